//! Redis Cluster: which server owns a key. The servers say it in redirections (`MOVED`, `ASK`).

use core::net::SocketAddr;

/// Hash slots of a cluster.
const SLOTS: usize = 16_384;
/// Servers of a cluster: the most that Redis recommends.
// limit: servers of a Redis Cluster
pub const SERVERS_MAX: usize = 1000;

/// A server's answer to a command for a key that another server owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Redirection {
    /// The hash slot of the key.
    pub slot: u16,
    /// The server to ask.
    pub server: SocketAddr,
    /// True if only this message goes to the other server, because the slot is being migrated (`ASK`).
    pub is_ask: bool,
}

impl Redirection {
    /// Parses the text of an error reply. Returns `None` for other errors, and for a server without an IP
    /// address.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(text).ok()?.split(' ');
        let is_ask = match words.next()? {
            "MOVED" => false,
            "ASK" => true,
            _ => return None,
        };
        let slot: u16 = words.next()?.parse().ok().filter(|slot| usize::from(*slot) < SLOTS)?;
        let (host, port) = words.next()?.rsplit_once(':')?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let server = SocketAddr::new(host.parse().ok()?, port.parse().ok()?);
        Some(Self { slot, server, is_ask })
    }
}

/// The owner of each hash slot, as far as known: an index of a server.
#[derive(Debug)]
pub struct SlotMap {
    owners: Vec<u16>,
}

impl SlotMap {
    /// Creates a map in which each of `servers` servers is asked for some slots.
    pub fn new(servers: usize) -> Self {
        // The number of servers is limited.
        Self { owners: (0..SLOTS).map(|slot| (slot % servers) as u16).collect() }
    }

    /// Returns the server to ask for a key, which must have no hash tag (`{…}`).
    pub fn owner(&self, key: &[u8]) -> usize {
        self.owners[usize::from(crc16(key)) % SLOTS].into()
    }

    /// Records the owner of a slot.
    pub fn set_owner(&mut self, slot: u16, server: usize) {
        self.owners[usize::from(slot)] = server as u16;
    }

    /// Asks another server from now on for the slots of a server that does not answer.
    pub fn replace(&mut self, server: usize, other: usize) {
        let (server, other) = (server as u16, other as u16);
        self.owners.iter_mut().filter(|owner| **owner == server).for_each(|owner| *owner = other);
    }
}

/// CRC16 with the polynomial 0x1021 (XMODEM), as Redis uses it.
fn crc16(bytes: &[u8]) -> u16 {
    const TABLE: [u16; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let mut crc = (byte as u16) << 8;
            let mut bit = 0;
            while bit < 8 {
                crc = if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 };
                bit += 1;
            }
            table[byte] = crc;
            byte += 1;
        }
        table
    };
    bytes.iter().fold(0, |crc, byte| crc << 8 ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        // The check value of CRC16/XMODEM, and `CLUSTER KEYSLOT` of redis-server 7.0.
        assert_eq!(crc16(b"123456789"), 0x31c3);
        assert_eq!(usize::from(crc16(b"foo")) % SLOTS, 12_182);
        let mut map = SlotMap::new(2);
        map.set_owner(12_182, 7);
        assert_eq!(map.owner(b"foo"), 7);
        map.replace(7, 1);
        assert_eq!(map.owner(b"foo"), 1);
    }

    #[test]
    fn redirections_have_slot_and_server() {
        let server = "127.0.0.1:7001".parse().unwrap();
        let moved = Redirection { slot: 3999, server, is_ask: false };
        assert_eq!(Redirection::parse(b"MOVED 3999 127.0.0.1:7001"), Some(moved));
        assert_eq!(
            Redirection::parse(b"ASK 3999 127.0.0.1:7001"),
            Some(Redirection { is_ask: true, ..moved })
        );
        let v6 = Redirection { server: "[::1]:7001".parse().unwrap(), ..moved };
        assert_eq!(Redirection::parse(b"MOVED 3999 ::1:7001"), Some(v6));
        for other in
            ["ERR", "MOVED", "MOVED 16384 127.0.0.1:7001", "MOVED 1 host:7001", "MOVED 1 :7001", "MOVED 1 a"]
        {
            assert_eq!(Redirection::parse(other.as_bytes()), None, "{other}");
        }
    }
}
