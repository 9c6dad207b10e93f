//! A flag for each socket, set when a write on the socket is short. All threads of a process set flags, and
//! one of them clears them. Most processes write on few sockets, and many children on none, so the flags are
//! allocated in chunks: each with the first write on one of its sockets.

use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::OnceLock;

/// Flags of one chunk.
const FLAGS_PER_CHUNK: usize = 1024;

/// All flags of a client.
pub(in crate::channel) struct SendBlockedFlags(Box<[OnceLock<Box<[AtomicBool]>>]>);

impl SendBlockedFlags {
    /// Creates flags for `sockets` sockets. None is set.
    pub fn new(sockets: usize) -> Self {
        Self((0..sockets.div_ceil(FLAGS_PER_CHUNK)).map(|_| OnceLock::new()).collect())
    }

    /// Returns the flag of an existing socket, and allocates its chunk if necessary.
    #[inline]
    pub fn flag(&self, socket: u32) -> &AtomicBool {
        let chunk = self.0[socket as usize / FLAGS_PER_CHUNK].get_or_init(new_chunk);
        &chunk[socket as usize % FLAGS_PER_CHUNK]
    }

    fn existing(&self, socket: u32) -> Option<&AtomicBool> {
        self.0.get(socket as usize / FLAGS_PER_CHUNK)?.get()?.get(socket as usize % FLAGS_PER_CHUNK)
    }

    #[inline]
    pub fn is_set(&self, socket: u32) -> bool {
        self.existing(socket).is_some_and(|flag| flag.load(Acquire))
    }

    #[inline]
    pub fn clear(&self, socket: u32) {
        if let Some(flag) = self.existing(socket) {
            flag.store(false, Relaxed);
        }
    }
}

#[cold]
fn new_chunk() -> Box<[AtomicBool]> {
    (0..FLAGS_PER_CHUNK).map(|_| AtomicBool::new(false)).collect()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn flags_are_separate_and_allocated_on_write() {
        let blocked = SendBlockedFlags::new(3 * FLAGS_PER_CHUNK + 1);
        let made = || blocked.0.iter().filter(|chunk| chunk.get().is_some()).count();
        for socket in 0..=3 * FLAGS_PER_CHUNK as u32 {
            assert!(!blocked.is_set(socket));
            blocked.clear(socket);
        }
        assert_eq!(made(), 0);
        for socket in [0, FLAGS_PER_CHUNK as u32 - 1, 3 * FLAGS_PER_CHUNK as u32] {
            blocked.flag(socket).store(true, Relaxed);
        }
        assert_eq!(made(), 2);
        let set = |socket| blocked.is_set(socket);
        assert!(
            set(0)
                && set(FLAGS_PER_CHUNK as u32 - 1)
                && set(3 * FLAGS_PER_CHUNK as u32)
                && !set(1)
                && !set(FLAGS_PER_CHUNK as u32)
        );
        blocked.clear(0);
        assert!(!set(0) && set(FLAGS_PER_CHUNK as u32 - 1) && !set(u32::MAX));
    }
}
