//! The lock of a socket, which only clients take: a client holds it while it reads or writes a stream that
//! several threads or processes share.
//!
//! The lock word names the client that holds the lock, so that the stack, which learns of a client's death,
//! can unlock it. Changes that a dead owner had not committed have no effect, so nothing has to be repaired.
//! The stack itself never takes a lock.

use super::CLIENTS_MAX;
use super::sync::{AtomicU32, Ordering};
use core::time::Duration;

/// Bit of the lock word: threads may sleep until the lock is released.
const WAITERS: u32 = 1 << 31;
/// Attempts before sleeping. An owner that is running usually releases the lock in the meantime.
const SPINS: u32 = 100;
/// Attempts to release a lock, in case a client keeps writing to the word.
const UNLOCK_TRIES: u32 = 64;

/// Returns whether no client holds the lock: the word is 0 or names a client that cannot exist.
fn is_unlocked(word: u32) -> bool {
    let owner = word & !WAITERS;
    owner == 0 || owner > CLIENTS_MAX
}

fn owner_word(client: usize) -> u32 {
    // Cannot truncate: there are at most 2^16 clients.
    client as u32 + 1
}

/// Takes the lock if it is free.
#[inline]
fn try_lock(word: &AtomicU32, client: usize) -> bool {
    word.compare_exchange(0, owner_word(client), Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// Takes the lock, or sets the waiters bit and returns the resulting word, on which the caller sleeps.
fn lock_or_mark_waiting(word: &AtomicU32, client: usize) -> Result<(), u32> {
    loop {
        let now = word.load(Ordering::Relaxed);
        // Other threads may sleep, too: a thread that has slept wakes the next one when it releases the lock.
        let next = if is_unlocked(now) { owner_word(client) | WAITERS } else { now | WAITERS };
        if word.compare_exchange(now, next, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            return if is_unlocked(now) { Ok(()) } else { Err(next) };
        }
    }
}

/// Releases the lock if `client` holds it. Returns whether a sleeping thread has to be woken.
#[inline]
fn unlock(word: &AtomicU32, client: usize) -> bool {
    for _ in 0..UNLOCK_TRIES {
        let now = word.load(Ordering::Relaxed);
        if now & !WAITERS != owner_word(client) {
            // The stack considered this client dead, or another client wrote an invalid value.
            return false;
        }
        if word.compare_exchange(now, 0, Ordering::Release, Ordering::Relaxed).is_ok() {
            return now & WAITERS != 0;
        }
    }
    false
}

/// Guard of a lock that is held.
pub(super) struct SocketLockGuard<'a> {
    word: &'a AtomicU32,
    client: usize,
}

impl Drop for SocketLockGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if unlock(self.word, self.client) {
            wake(self.word, 1);
        }
    }
}

/// Takes a lock, waiting for at most `timeout`. Returns `None` if another client holds the lock for all of
/// this time, as it does while a debugger or SIGSTOP stops its process.
#[inline]
pub(super) fn lock(word: &AtomicU32, client: usize, timeout: Duration) -> Option<SocketLockGuard<'_>> {
    if try_lock(word, client) || lock_slow(word, client, timeout) {
        return Some(SocketLockGuard { word, client });
    }
    None
}

#[cold]
fn lock_slow(word: &AtomicU32, client: usize, timeout: Duration) -> bool {
    for _ in 0..SPINS {
        if try_lock(word, client) {
            return true;
        }
        if is_unlocked(word.load(Ordering::Relaxed)) {
            break;
        }
        core::hint::spin_loop();
    }
    let until = std::time::Instant::now() + timeout;
    loop {
        let Err(seen) = lock_or_mark_waiting(word, client) else { return true };
        let remaining = until.saturating_duration_since(std::time::Instant::now());
        if remaining.is_zero() {
            return false;
        }
        sleep(word, seen, remaining);
    }
}

/// Returns whether a client holds the lock.
pub(super) fn is_held_by(word: &AtomicU32, client: usize) -> bool {
    word.load(Ordering::Relaxed) & !WAITERS == owner_word(client)
}

/// Releases the lock of a client that died, if that client held it.
pub(super) fn unlock_for_dead(word: &AtomicU32, client: usize) {
    if unlock(word, client) {
        wake(word, u32::MAX >> 1);
    }
}

#[cfg(not(loom))]
fn sleep(word: &AtomicU32, seen: u32, time: Duration) {
    use rustix::thread::futex;
    let time = futex::Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    // The caller checks the word again, whatever ended the sleep: a wake-up, a change, a signal or the
    // timeout.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&time));
}

#[cfg(not(loom))]
fn wake(word: &AtomicU32, count: u32) {
    use rustix::thread::futex;
    // The address is valid, and it does not matter whether a thread sleeps.
    let _ = futex::wake(word, futex::Flags::empty(), count);
}

// The models replace the futex by yielding.
#[cfg(loom)]
fn sleep(_: &AtomicU32, _: u32, _: Duration) {
    loom::thread::yield_now();
}

#[cfg(loom)]
fn wake(_: &AtomicU32, _: u32) {}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn contended_lock_serves_all_threads() {
        let (word, count) = (AtomicU32::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for client in 0..4 {
                let (word, count) = (&word, &count);
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let _guard = lock(word, client, LONG).expect("the lock is released soon");
                        let before = count.load(Ordering::Relaxed);
                        core::hint::spin_loop();
                        count.store(before + 1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(count.load(Ordering::Relaxed), 80_000);
        assert_eq!(word.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn lock_times_out_while_owner_is_stopped() {
        let word = AtomicU32::new(0);
        let stopped = lock(&word, 3, LONG).unwrap();
        assert!(lock(&word, 4, Duration::from_millis(5)).is_none());
        drop(stopped);
        assert!(lock(&word, 4, Duration::ZERO).is_some());
    }

    #[test]
    fn only_a_dead_clients_lock_is_released() {
        let word = AtomicU32::new(0);
        let dead = lock(&word, 3, LONG).unwrap();
        unlock_for_dead(&word, 2);
        assert!(lock(&word, 4, Duration::ZERO).is_none());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| drop(lock(&word, 4, LONG).expect("opened")));
            std::thread::sleep(Duration::from_millis(5));
            unlock_for_dead(&word, 3);
            waiting.join().unwrap();
        });
        // The client was not dead after all: the lock of another client stays locked.
        let guard = lock(&word, 4, LONG).unwrap();
        drop(dead);
        assert!(lock(&word, 5, Duration::ZERO).is_none());
        drop(guard);
        word.store(u32::MAX - 7, Ordering::Relaxed);
        assert!(lock(&word, 5, Duration::ZERO).is_some(), "no client has this number");
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::cell::UnsafeCell;
    use std::sync::Arc;

    /// In every interleaving, one client at a time holds the lock, even if one has set the waiters bit, and
    /// each sees what the previous one wrote.
    #[test]
    fn lock_is_exclusive_and_publishes_writes() {
        loom::model(|| {
            let shared = Arc::new((AtomicU32::new(0), UnsafeCell::new(0u32)));
            let other = {
                let shared = shared.clone();
                loom::thread::spawn(move || {
                    let took = lock_or_mark_waiting(&shared.0, 1).is_ok();
                    if took {
                        shared.1.with_mut(|_| ());
                        unlock(&shared.0, 1);
                    }
                })
            };
            if try_lock(&shared.0, 0) {
                shared.1.with_mut(|_| ());
                unlock(&shared.0, 0);
            }
            other.join().unwrap();
        });
    }

    /// A client that set the waiters bit and sleeps is woken by the owner's unlock, or by the stack's if the
    /// owner died.
    #[test]
    fn every_waiter_is_woken() {
        for dies in [false, true] {
            loom::model(move || {
                let word = Arc::new(AtomicU32::new(0));
                assert!(try_lock(&word, 0));
                let other = {
                    let word = word.clone();
                    loom::thread::spawn(move || lock_or_mark_waiting(&word, 1))
                };
                // The stack uses the same function as the owner.
                let wakes = unlock(&word, 0);
                if other.join().unwrap().is_err() {
                    assert!(wakes, "the waiter is woken (dead: {dies})");
                }
            });
        }
    }

    /// The stack releases the lock of a client that it considers dead while that client releases the lock
    /// itself and another client takes it: the lock is never free while the other client holds it.
    #[test]
    fn unlock_affects_only_the_owner() {
        loom::model(|| {
            let word = Arc::new(AtomicU32::new(0));
            assert!(try_lock(&word, 0));
            let owner = {
                let word = word.clone();
                loom::thread::spawn(move || unlock(&word, 0))
            };
            let stack = {
                let word = word.clone();
                loom::thread::spawn(move || unlock(&word, 0))
            };
            let took = try_lock(&word, 1);
            owner.join().unwrap();
            stack.join().unwrap();
            assert_eq!(word.load(Ordering::Relaxed), if took { owner_word(1) } else { 0 });
        });
    }
}
