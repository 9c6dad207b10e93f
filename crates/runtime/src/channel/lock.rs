//! The lock of a socket, between clients only: whoever reads or writes a stream that several threads or processes share holds it meanwhile.
//!
//! The word says which client holds it, so that the stack, which hears of a client's death, can open it. What a holder had not committed did
//! not happen, and there is nothing to be mended. The stack never takes a lock itself.

use super::CLIENTS_MAX;
use super::sync::{AtomicU32, Ordering};
use core::time::Duration;

/// Somebody sleeps until it is opened.
const WAITERS: u32 = 1 << 31;
/// Looks before sleeping: a holder that runs is done within this time.
const SPINS: u32 = 100;
/// Tries to open a dead holder's lock, against somebody who writes into it all the time.
const UNLOCK_TRIES: u32 = 64;

/// Nobody holds it: it is open, or names a client that cannot be.
fn is_unlocked(word: u32) -> bool {
    let owner = word & !WAITERS;
    owner == 0 || owner > CLIENTS_MAX
}

fn owner_word(client: usize) -> u32 {
    // Cannot truncate: clients are 64 at the most.
    client as u32 + 1
}

/// Takes it if nobody holds it.
#[inline]
fn try_lock(word: &AtomicU32, client: usize) -> bool {
    word.compare_exchange(0, owner_word(client), Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// Takes it, or leaves a note that somebody waits. The note is what the word says then, to sleep on.
fn lock_or_mark_waiting(word: &AtomicU32, client: usize) -> Result<(), u32> {
    loop {
        let now = word.load(Ordering::Relaxed);
        // Others may sleep, too: whoever has slept wakes the next when it is done.
        let next = if is_unlocked(now) { owner_word(client) | WAITERS } else { now | WAITERS };
        if word.compare_exchange(now, next, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            return if is_unlocked(now) { Ok(()) } else { Err(next) };
        }
    }
}

/// Opens it if `client` holds it. Whether a sleeper has to be woken.
#[inline]
fn unlock(word: &AtomicU32, client: usize) -> bool {
    for _ in 0..UNLOCK_TRIES {
        let now = word.load(Ordering::Relaxed);
        if now & !WAITERS != owner_word(client) {
            // The stack took this client for dead, or somebody writes what is not allowed.
            return false;
        }
        if word.compare_exchange(now, 0, Ordering::Release, Ordering::Relaxed).is_ok() {
            return now & WAITERS != 0;
        }
    }
    false
}

/// The lock, held.
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

/// Takes a lock, for which it waits as long as `patience` at the most. `None` if somebody holds it all that time: one that was stopped in the
/// middle, which a debugger or SIGSTOP does.
#[inline]
pub(super) fn lock(word: &AtomicU32, client: usize, patience: Duration) -> Option<SocketLockGuard<'_>> {
    if try_lock(word, client) || lock_slow(word, client, patience) {
        return Some(SocketLockGuard { word, client });
    }
    None
}

#[cold]
fn lock_slow(word: &AtomicU32, client: usize, patience: Duration) -> bool {
    for _ in 0..SPINS {
        if try_lock(word, client) {
            return true;
        }
        if is_unlocked(word.load(Ordering::Relaxed)) {
            break;
        }
        core::hint::spin_loop();
    }
    let until = std::time::Instant::now() + patience;
    loop {
        let Err(note) = lock_or_mark_waiting(word, client) else { return true };
        let left = until.saturating_duration_since(std::time::Instant::now());
        if left.is_zero() {
            return false;
        }
        sleep(word, note, left);
    }
}

/// A client died: if it held the lock, that is open.
pub(super) fn unlock_for_dead(word: &AtomicU32, client: usize) {
    if unlock(word, client) {
        wake(word, u32::MAX >> 1);
    }
}

#[cfg(not(loom))]
fn sleep(word: &AtomicU32, note: u32, time: Duration) {
    use rustix::thread::futex;
    let time = futex::Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    // Woken, changed meanwhile, interrupted or late: whoever sleeps looks again.
    let _ = futex::wait(word, futex::Flags::empty(), note, Some(&time));
}

#[cfg(not(loom))]
fn wake(word: &AtomicU32, count: u32) {
    use rustix::thread::futex;
    // Nothing can be wrong with the address, and nobody need sleep.
    let _ = futex::wake(word, futex::Flags::empty(), count);
}

// The models sleep and wake in their own way.
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
    fn threads_take_turns_and_nobody_sleeps_for_ever() {
        let (word, count) = (AtomicU32::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for client in 0..4 {
                let (word, count) = (&word, &count);
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let _guard = lock(word, client, LONG).expect("soon free");
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
    fn one_that_stopped_in_the_middle_is_given_up_for_now() {
        let word = AtomicU32::new(0);
        let stopped = lock(&word, 3, LONG).unwrap();
        assert!(lock(&word, 4, Duration::from_millis(5)).is_none());
        drop(stopped);
        assert!(lock(&word, 4, Duration::ZERO).is_some());
    }

    #[test]
    fn the_lock_of_a_dead_client_is_opened_and_that_of_another_is_not() {
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
        // It was not dead after all: what another holds stays closed.
        let held = lock(&word, 4, LONG).unwrap();
        drop(dead);
        assert!(lock(&word, 5, Duration::ZERO).is_none());
        drop(held);
        word.store(u32::MAX - 7, Ordering::Relaxed);
        assert!(lock(&word, 5, Duration::ZERO).is_some(), "nobody has such a number");
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::cell::UnsafeCell;
    use std::sync::Arc;

    /// One at a time, in every order of steps, also behind one who has left a note; what one did the next sees.
    #[test]
    fn one_at_a_time_and_what_one_did_the_next_sees() {
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

    /// Whoever left a note and sleeps is woken by the one who held it, or by the stack if that one died.
    #[test]
    fn nobody_who_left_a_note_is_forgotten() {
        for dies in [false, true] {
            loom::model(move || {
                let word = Arc::new(AtomicU32::new(0));
                assert!(try_lock(&word, 0));
                let other = {
                    let word = word.clone();
                    loom::thread::spawn(move || lock_or_mark_waiting(&word, 1))
                };
                // The stack's way is the same as the holder's own.
                let wakes = unlock(&word, 0);
                if other.join().unwrap().is_err() {
                    assert!(wakes, "it sleeps and nobody wakes it (dead: {dies})");
                }
            });
        }
    }

    /// The stack opens the lock of a client that it takes for dead while that one is opening it itself, and another takes it: it is never open
    /// while the other holds it.
    #[test]
    fn a_lock_is_opened_for_its_holder_only() {
        loom::model(|| {
            let word = Arc::new(AtomicU32::new(0));
            assert!(try_lock(&word, 0));
            let holder = {
                let word = word.clone();
                loom::thread::spawn(move || unlock(&word, 0))
            };
            let stack = {
                let word = word.clone();
                loom::thread::spawn(move || unlock(&word, 0))
            };
            let took = try_lock(&word, 1);
            holder.join().unwrap();
            stack.join().unwrap();
            assert_eq!(word.load(Ordering::Relaxed), if took { owner_word(1) } else { 0 });
        });
    }
}
