//! The ephemeral UDP ports that have a socket, as all shards see them.
//!
//! The shard of an ephemeral port follows from its number, so the sockets are not in the table of bound
//! ports. If devices have shards of their own, that shard may serve another device than the one that has
//! received a datagram, and nobody should be able to send work to it through a port without a socket.

use core::sync::atomic::{AtomicU64, Ordering};

const WORDS: usize = (u16::MAX as usize + 1) / 64;

/// A bit for each port. Shards write when a socket is bound or closed, and read without a lock.
#[derive(Debug)]
pub struct EphemeralUdpPorts {
    words: Box<[AtomicU64; WORDS]>,
}

impl Default for EphemeralUdpPorts {
    fn default() -> Self {
        Self { words: Box::new([const { AtomicU64::new(0) }; WORDS]) }
    }
}

impl EphemeralUdpPorts {
    /// Returns the word of a port, and its bit.
    fn place(&self, port: u16) -> (&AtomicU64, u64) {
        (&self.words[usize::from(port / 64)], 1 << (port % 64))
    }

    /// Returns whether a port has a socket.
    pub fn has_socket(&self, port: u16) -> bool {
        let (word, bit) = self.place(port);
        word.load(Ordering::Acquire) & bit != 0
    }

    /// Records whether a port has a socket.
    pub fn set(&self, port: u16, has_socket: bool) {
        let (word, bit) = self.place(port);
        if has_socket {
            word.fetch_or(bit, Ordering::AcqRel);
        } else {
            word.fetch_and(!bit, Ordering::AcqRel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_have_bits_of_their_own() {
        let ports = EphemeralUdpPorts::default();
        let used = [0, 63, 64, 40_000, u16::MAX];
        used.iter().for_each(|&port| ports.set(port, true));
        let found = || (0..=u16::MAX).filter(|&port| ports.has_socket(port)).collect::<Vec<_>>();
        assert_eq!(found(), used);
        ports.set(64, false);
        assert_eq!(found(), [0, 63, 40_000, u16::MAX]);
    }
}
