//! Path MTUs in an image of a stack.

use super::{PathMtuCache, PathMtuEntry};
use core::net::IpAddr;
use serde::{Deserialize, Serialize};

/// Destinations and their path MTUs, the oldest first.
#[derive(Serialize, Deserialize)]
#[serde(rename = "PathMtu")]
pub(crate) struct PathMtuImage(Vec<(IpAddr, PathMtuEntry)>);

impl PathMtuCache {
    /// Returns the image.
    pub(crate) fn image(&self) -> PathMtuImage {
        let entry = |(_, address): &(_, IpAddr)| Some((*address, *self.entries.get(address)?));
        PathMtuImage(self.by_age.iter().filter_map(entry).collect())
    }

    /// Takes over the path MTUs of an image.
    pub(crate) fn restore(&mut self, image: PathMtuImage) {
        image.0.into_iter().for_each(|(address, entry)| self.insert(address, entry));
    }
}
