//! State of an open file description that several processes share: status flags and options. The library
//! defines the format; this module moves bytes.
//!
//! A version counts changes and is odd during a write, so that a reader can tell whether it read a consistent
//! value (a sequence lock, as in [`crate::stats`]). The state of a socket that belongs to one process alone
//! is never touched.

use super::sync::{AtomicU8, AtomicU32, Ordering, fence};

/// Most bytes of the state of a description that several processes share.
// limit: bytes of a shared description
pub const DESCRIPTION_BYTES_MAX: usize = 1008;
/// Number of attempts to read or write while a write is in progress. After that many, the writer is
/// considered dead or stopped.
const LOCK_TRIES: usize = 1000;

/// The shared state of one socket or one listener.
#[repr(C, align(128))]
pub(super) struct SharedDescription {
    version: AtomicU32,
    /// Generation of the socket to which the bytes belong.
    generation: AtomicU32,
    len: AtomicU32,
    /// 1 if the description is of a listener that an administrator has closed.
    is_destroyed: AtomicU32,
    bytes: [AtomicU8; DESCRIPTION_BYTES_MAX],
}

impl SharedDescription {
    /// Returns the version, which grows with each change.
    #[inline]
    pub fn version(&self) -> u32 {
        self.version.load(Ordering::Acquire)
    }

    /// Returns whether an administrator has closed the listener.
    pub fn is_destroyed(&self) -> bool {
        self.is_destroyed.load(Ordering::Acquire) != 0
    }

    /// Records whether an administrator has closed the listener.
    pub fn set_destroyed(&self, is_destroyed: bool) {
        self.is_destroyed.store(is_destroyed.into(), Ordering::Release);
    }

    /// Writes a new value and returns its version. `None` if the value is too long.
    pub fn write(&self, generation: u32, bytes: &[u8]) -> Option<u32> {
        let len = u32::try_from(bytes.len()).ok().filter(|len| *len as usize <= DESCRIPTION_BYTES_MAX)?;
        let mut version = self.version();
        for _ in 0..LOCK_TRIES {
            if version & 1 == 0 {
                let odd = version.wrapping_add(1);
                match self.version.compare_exchange(version, odd, Ordering::Acquire, Ordering::Acquire) {
                    Ok(_) => break,
                    Err(now) => version = now,
                }
            } else {
                core::hint::spin_loop();
                version = self.version();
            }
        }
        let odd = version | 1;
        self.version.store(odd, Ordering::Relaxed);
        Some(self.finish_write(odd, generation, len, bytes))
    }

    /// Writes a value if none was written since the version was `version`. Returns the new version, or `None`
    /// if there was another value, a write is in progress, or the value is too long.
    pub fn write_after(&self, version: u32, generation: u32, bytes: &[u8]) -> Option<u32> {
        let len = u32::try_from(bytes.len()).ok().filter(|len| *len as usize <= DESCRIPTION_BYTES_MAX)?;
        let odd = Some(version.wrapping_add(1)).filter(|odd| odd & 1 != 0)?;
        self.version.compare_exchange(version, odd, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(self.finish_write(odd, generation, len, bytes))
    }

    /// Removes the value, for a new listener of this number.
    pub fn clear(&self) {
        if self.version() != 0 {
            self.write(0, &[]);
        }
    }

    /// Writes a value during which the version is `odd`. Returns the version after it.
    fn finish_write(&self, odd: u32, generation: u32, len: u32, bytes: &[u8]) -> u32 {
        // No reader sees a later store before the version is odd.
        fence(Ordering::Release);
        self.generation.store(generation, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        for (slot, byte) in self.bytes.iter().zip(bytes) {
            slot.store(*byte, Ordering::Relaxed);
        }
        let done = odd.wrapping_add(1);
        self.version.store(done, Ordering::Release);
        done
    }

    /// Returns the version and the value written last for this generation. `None` if there is none, or a
    /// write is in progress.
    pub fn read(&self, generation: u32) -> Option<(u32, Vec<u8>)> {
        for _ in 0..LOCK_TRIES {
            let before = self.version();
            if before & 1 == 0 {
                let of = self.generation.load(Ordering::Relaxed);
                let len = (self.len.load(Ordering::Relaxed) as usize).min(DESCRIPTION_BYTES_MAX);
                let bytes = self.bytes[..len].iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
                fence(Ordering::Acquire);
                if self.version.load(Ordering::Relaxed) == before {
                    return (before != 0 && of == generation).then_some((before, bytes));
                }
            }
            core::hint::spin_loop();
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::time::Duration;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    fn empty() -> SharedDescription {
        let word = || AtomicU32::new(0);
        let bytes = [const { AtomicU8::new(0) }; DESCRIPTION_BYTES_MAX];
        SharedDescription { version: word(), generation: word(), len: word(), is_destroyed: word(), bytes }
    }

    #[test]
    fn read_returns_whole_values_of_its_generation() {
        let description = empty();
        assert_eq!(description.read(0), None);
        let first = description.write(7, b"first").unwrap();
        assert_eq!(description.read(7), Some((first, b"first".to_vec())));
        assert_eq!(description.read(8), None, "of another generation");
        let second = description.write(8, b"2").unwrap();
        assert!(second != first && description.version() == second);
        assert_eq!(description.read(8), Some((second, b"2".to_vec())));
        assert_eq!(description.write(8, &[0; DESCRIPTION_BYTES_MAX + 1]), None);
        assert_eq!(description.version(), second);
        // A writer that died during its write.
        description.version.store(second + 1, Ordering::Relaxed);
        assert_eq!(description.read(8), None);
        assert_eq!(description.write_after(second + 1, 8, b"not after it"), None);
        let third = description.write(8, b"third").unwrap();
        assert_eq!(description.read(8), Some((third, b"third".to_vec())));
    }

    #[test]
    fn later_values_are_not_overwritten() {
        let description = empty();
        let first = description.write_after(0, 1, b"first").unwrap();
        assert_eq!(description.write_after(0, 1, b"late"), None);
        assert_eq!(description.read(1), Some((first, b"first".to_vec())));
        let second = description.write_after(first, 1, b"second").unwrap();
        assert_eq!(description.write_after(second, 1, &[0; DESCRIPTION_BYTES_MAX + 1]), None);
        assert_eq!(description.read(1), Some((second, b"second".to_vec())));
        description.clear();
        assert_eq!(description.read(0).map(|(_, bytes)| bytes), Some(Vec::new()));
        assert!(description.version() > second);
    }

    #[test]
    fn concurrent_writes_are_never_read_torn() {
        const VERSIONS: usize = 500;
        // Far more than the reads take, for writers that do not write.
        const TIMEOUT: Duration = Duration::from_secs(30);
        let (description, is_over) = (empty(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            // Each value has its length in each byte. No writer takes over from the other one, as `write`
            // does if the machine has stopped that one for long.
            for first in [1u8, 2] {
                let (description, is_over) = (&description, &is_over);
                scope.spawn(move || {
                    for len in (first..=255).step_by(2).cycle() {
                        if is_over.load(Ordering::Relaxed) {
                            return;
                        }
                        let value = vec![len; len.into()];
                        let _ = description.write_after(description.version(), 0, &value);
                        (0..50).for_each(|_| core::hint::spin_loop());
                    }
                });
            }
            // The writers end only after the last read, so that the reads are concurrent with writes.
            let (mut versions, mut last, mut torn) = (0, 0, None);
            let deadline = Instant::now() + TIMEOUT;
            while versions < VERSIONS && torn.is_none() && Instant::now() < deadline {
                let Some((version, bytes)) = description.read(0) else { continue };
                versions += usize::from(version != last);
                last = version;
                let is_whole = bytes.iter().all(|byte| usize::from(*byte) == bytes.len());
                torn = (!is_whole).then_some(bytes);
            }
            is_over.store(true, Ordering::Relaxed);
            assert_eq!((versions, torn), (VERSIONS, None));
        });
    }
}
