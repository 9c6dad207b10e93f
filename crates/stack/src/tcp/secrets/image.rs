//! The keys of a stack in its image: values that peers know must not change.

use super::Secrets;
use serde::{Deserialize, Serialize};
use siphasher::sip::SipHasher13;

/// The keys.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Secrets")]
pub(crate) struct SecretsImage {
    flow: [u64; 3],
    sequence: (u64, u64),
    timestamp: (u64, u64),
    cookie: (u64, u64),
    port: (u64, u64),
    random: u64,
}

impl Secrets {
    /// Returns the image.
    pub(crate) fn image(&self) -> SecretsImage {
        SecretsImage {
            flow: self.flow,
            sequence: self.sequence,
            timestamp: self.timestamp.keys(),
            cookie: self.cookie.keys(),
            port: self.port,
            random: self.random,
        }
    }

    /// Takes over the keys of an image.
    pub(crate) fn restore(&mut self, image: SecretsImage) {
        let SecretsImage { flow, sequence, timestamp, cookie, port, random } = image;
        (self.flow, self.sequence, self.port) = (flow, sequence, port);
        self.timestamp = SipHasher13::new_with_keys(timestamp.0, timestamp.1);
        self.cookie = SipHasher13::new_with_keys(cookie.0, cookie.1);
        self.timestamp_offset_cache.fill((0, 0));
        // The generator never leaves 0.
        self.random = random.max(1);
    }
}
