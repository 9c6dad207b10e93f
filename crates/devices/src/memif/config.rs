//! Configuration of a memif device, and its text form.

use super::message::SECRET_BYTES;
use super::ring::{LOG2_MAX, LOG2_MIN};
use super::{FRAME_BYTES_MAX, LINK_HEADER_BYTES_MAX};
use crate::key_values::{self, number};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Maximum number of queues: the number of cores of the largest machines that are supported.
pub const QUEUES_MAX: u16 = 64;
/// Maximum bytes of the address of a Unix socket.
const ADDRESS_BYTES_MAX: usize = 107;

/// Address of the control socket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SocketName {
    /// A file that only its owner may use (mode 0600). Its text form is the path.
    Path(PathBuf),
    /// An abstract name (without a file). Its text form has the prefix `@`. Only processes of the same user
    /// and of root are accepted.
    Abstract(String),
}

/// Role of this end of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Listens for connections (also called master).
    Server,
    /// Connects, and allocates the shared memory (also called slave).
    Client,
}

/// Configuration of a memif device, see [`open`](super::open). Its text form is for example
/// `socket=/run/memif,role=server,id=0,queues=1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemifConfig {
    /// Control socket. Text key `socket`, which is required.
    pub socket: SocketName,
    /// Role of this end. Text key `role`, which is required.
    pub role: Role,
    /// Number of the interface, which must be the same at both ends. Text key `id`, default 0.
    pub id: u32,
    /// Shared secret of 1 to 24 bytes. Text key `secret`, default none.
    pub secret: Option<String>,
    /// Queues in each direction, 1 to 64. Text key `queues`, default 1.
    pub queues: u16,
    /// Descriptors of each ring, a power of two from 2 to 16,384. The client's value is used. Text key
    /// `ring`, default 1,024.
    pub ring: u16,
    /// Bytes of a buffer, a multiple of 64 from 64 to 65,536. The client's value is used. Longer frames take
    /// several buffers. Text key `buffer`, default 2,048.
    pub buffer_bytes: u32,
    /// Largest IP packet in bytes, without Ethernet header.
    pub mtu: usize,
    /// MAC address of this end. `None` derives a stable one from socket, id and role.
    pub mac: Option<[u8; 6]>,
    /// Leaves checksums and segmentation to the other end, if that is Ginnel and allows it.
    pub offload: bool,
}

impl MemifConfig {
    /// Returns an interface with all defaults.
    #[must_use]
    pub fn new(socket: SocketName, role: Role) -> Self {
        Self {
            socket,
            role,
            id: 0,
            secret: None,
            queues: 1,
            ring: 1024,
            buffer_bytes: 2048,
            mtu: 1500,
            mac: None,
            offload: true,
        }
    }

    pub(super) fn ring_log2(&self) -> u8 {
        self.ring.ilog2() as u8
    }

    /// Returns the MAC address: the configured one, or a locally administered one that differs between the
    /// two ends.
    pub(super) fn mac_address(&self) -> [u8; 6] {
        self.mac.unwrap_or_else(|| {
            // FNV-1a, because its result is the same in every version of this program, which a hasher of the
            // standard library does not guarantee.
            let text = format!("{}#{}", self.socket, self.id);
            let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
            });
            let [a, b, c, d, ..] = hash.to_be_bytes();
            [0x02, a, b, c, d, if self.role == Role::Server { 1 } else { 2 }]
        })
    }

    /// Checks every range.
    ///
    /// # Errors
    /// Names the key, the wrong value and the range that is allowed.
    pub fn validate(&self) -> Result<(), String> {
        let address_len = match &self.socket {
            SocketName::Path(path) => path.as_os_str().len(),
            SocketName::Abstract(name) => name.len(),
        };
        if !(1..=ADDRESS_BYTES_MAX).contains(&address_len) {
            return Err(format!("socket: must have 1 to {ADDRESS_BYTES_MAX} bytes"));
        }
        if !(1..=QUEUES_MAX).contains(&self.queues) {
            return Err(format!("queues: {} is outside 1 to {QUEUES_MAX}", self.queues));
        }
        let sizes = 1u16 << LOG2_MIN..=1 << LOG2_MAX;
        if !self.ring.is_power_of_two() || !sizes.contains(&self.ring) {
            let (least, most) = sizes.into_inner();
            return Err(format!("ring: {} is not a power of two from {least} to {most}", self.ring));
        }
        if !self.buffer_bytes.is_multiple_of(64) || !(64..=65_536).contains(&self.buffer_bytes) {
            return Err(format!("buffer: {} is not a multiple of 64 up to 65,536", self.buffer_bytes));
        }
        if !(68..=FRAME_BYTES_MAX - LINK_HEADER_BYTES_MAX).contains(&self.mtu) {
            return Err(format!(
                "mtu: {} is outside 68 to {}",
                self.mtu,
                FRAME_BYTES_MAX - LINK_HEADER_BYTES_MAX
            ));
        }
        let ring_bytes = u64::from(self.ring) * u64::from(self.buffer_bytes);
        if ring_bytes < (self.mtu + LINK_HEADER_BYTES_MAX) as u64 {
            return Err("ring: its buffers cannot hold a packet of the MTU".into());
        }
        // Half of the range of 32-bit offsets, to leave room for the rings themselves.
        if 2 * u64::from(self.queues) * ring_bytes > 1 << 31 {
            return Err("ring: the buffers of all queues exceed 2 GiB".into());
        }
        if self.secret.as_ref().is_some_and(|secret| !(1..=SECRET_BYTES).contains(&secret.len())) {
            return Err(format!("secret: must have 1 to {SECRET_BYTES} bytes"));
        }
        if self.mac.is_some_and(|mac| mac[0] & 1 != 0 || mac == [0; 6]) {
            return Err("mac: is zero or a group address".into());
        }
        Ok(())
    }
}

impl fmt::Display for SocketName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Abstract(name) => write!(f, "@{name}"),
        }
    }
}

impl FromStr for MemifConfig {
    type Err = String;

    /// Parses `key=value` pairs separated by commas.
    fn from_str(text: &str) -> Result<Self, String> {
        let (mut socket, mut role) = (None, None);
        let mut config = Self::new(SocketName::Path(PathBuf::new()), Role::Server);
        for pair in key_values::pairs(text) {
            let (key, value) = pair?;
            match key {
                "socket" => {
                    socket = Some(match value.strip_prefix('@') {
                        Some(name) => SocketName::Abstract(name.into()),
                        None => SocketName::Path(value.into()),
                    });
                }
                "role" => {
                    role = Some(match value {
                        "server" => Role::Server,
                        "client" => Role::Client,
                        _ => return Err(format!("role: \"{value}\" is neither server nor client")),
                    });
                }
                "id" => config.id = number(key, value, 1)?,
                "secret" => config.secret = Some(value.into()),
                "queues" => config.queues = number(key, value, config.queues)?,
                "ring" => config.ring = number(key, value, config.ring)?,
                "buffer" => config.buffer_bytes = number(key, value, config.buffer_bytes)?,
                _ => {
                    return Err(format!(
                        "{key}: unknown key (socket, role, id, secret, queues, ring, buffer)"
                    ));
                }
            }
        }
        config.socket = socket.ok_or("socket: is missing")?;
        config.role = role.ok_or("role: is missing (server or client)")?;
        config.validate()?;
        Ok(config)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn text_sets_all_keys() {
        let config: MemifConfig =
            "socket=/run/m,role=client,id=7,secret=s3,queues=2,ring=64,buffer=4096".parse().expect("valid");
        let expected = MemifConfig {
            id: 7,
            secret: Some("s3".into()),
            queues: 2,
            ring: 64,
            buffer_bytes: 4096,
            ..MemifConfig::new(SocketName::Path("/run/m".into()), Role::Client)
        };
        assert_eq!(config, expected);
        let config: MemifConfig = "role=server,socket=@x".parse().expect("valid");
        assert_eq!(config, MemifConfig::new(SocketName::Abstract("x".into()), Role::Server));
    }

    #[test]
    fn errors_name_the_invalid_value() {
        for (text, problem) in [
            ("", "\"\" is not"),
            ("socket=/a", "role: is missing"),
            ("role=server", "socket: is missing"),
            ("socket=,role=server", "socket: must have"),
            ("socket=/a,role=master", "role: \"master\""),
            ("socket=/a,role=server,id=-1", "id: \"-1\""),
            ("socket=/a,role=server,id=1,id=2", "id: is repeated"),
            ("socket=/a,role=server,colour=red", "colour: unknown key"),
            ("socket=/a,role=server,queues=0", "queues: 0"),
            ("socket=/a,role=server,queues=65", "queues: 65"),
            ("socket=/a,role=server,ring=100", "ring: 100"),
            ("socket=/a,role=server,ring=32768", "ring: 32768"),
            ("socket=/a,role=server,buffer=100", "buffer: 100"),
            ("socket=/a,role=server,ring=2,buffer=64", "ring: its buffers cannot hold"),
            ("socket=/a,role=server,queues=64,ring=16384", "ring: the buffers"),
            ("socket=/a,role=server,secret=", "secret: must have"),
            ("socket=/a,role=server,secret=0123456789012345678901234", "secret: must have"),
        ] {
            let error = text.parse::<MemifConfig>().expect_err(text);
            assert!(error.starts_with(problem), "{text}: {error}");
        }
    }

    #[test]
    fn generated_mac_addresses_are_stable_and_distinct() {
        let server: MemifConfig = "socket=/a,role=server".parse().expect("valid");
        let client = MemifConfig { role: Role::Client, ..server.clone() };
        let other = MemifConfig { id: 1, ..server.clone() };
        assert_eq!(server.mac_address(), server.mac_address());
        assert_eq!(server.mac_address()[0], 2);
        assert_ne!(server.mac_address(), client.mac_address());
        assert_ne!(server.mac_address(), other.mac_address());
    }
}
