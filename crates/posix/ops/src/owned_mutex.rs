//! A mutex that knows which thread holds it. A signal handler that interrupted a thread inside of a call must
//! know whether that thread holds the lock or waits for it: one word tells both the state and the owner, so
//! there is no moment at which the answer is wrong.
#![allow(unsafe_code)] // a mutex

use crate::syscall;
use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// The word while no thread holds the lock. Otherwise the word is the owner's token, plus [`CONTENDED`].
const UNLOCKED: usize = 0;
/// Bit of the word: other threads may sleep until the lock is released.
const CONTENDED: usize = 1;
/// How often a thread checks the lock before it sleeps.
const SPINS: u32 = 100;

thread_local! {
    /// A variable whose address no other thread has.
    static TOKEN: u16 = const { 0 };
}

/// Returns a number, even and not 0, that no other thread of the process has. A forked child keeps it.
#[inline(always)]
fn token() -> usize {
    TOKEN.with(|token| core::ptr::from_ref(token).addr())
}

/// As `std::sync::Mutex`, without poisoning.
#[derive(Debug)]
pub(crate) struct OwnedMutex<T> {
    word: AtomicUsize,
    value: UnsafeCell<T>,
}

// SAFETY: one thread at a time has access to the value.
unsafe impl<T: Send> Sync for OwnedMutex<T> {}

impl<T> OwnedMutex<T> {
    pub const fn new(value: T) -> Self {
        Self { word: AtomicUsize::new(UNLOCKED), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock. A thread that holds it already waits for ever.
    #[inline]
    pub fn lock(&self) -> OwnedMutexGuard<'_, T> {
        if self.word.compare_exchange(UNLOCKED, token(), Acquire, Relaxed).is_err() {
            self.lock_contended();
        }
        OwnedMutexGuard { mutex: self }
    }

    /// Returns whether this thread holds the lock. May be called in a signal handler.
    pub fn is_held_by_this_thread(&self) -> bool {
        self.word.load(Relaxed) & !CONTENDED == token()
    }

    #[cold]
    fn lock_contended(&self) {
        let own = token();
        for _ in 0..SPINS {
            match self.word.load(Relaxed) {
                UNLOCKED if self.word.compare_exchange(UNLOCKED, own, Acquire, Relaxed).is_ok() => return,
                word if word & CONTENDED != 0 => break,
                _ => core::hint::spin_loop(),
            }
        }
        loop {
            let word = self.word.load(Relaxed);
            if word == UNLOCKED {
                // Other threads may sleep, too.
                if self.word.compare_exchange(UNLOCKED, own | CONTENDED, Acquire, Relaxed).is_ok() {
                    return;
                }
            } else if word & CONTENDED != 0
                || self.word.compare_exchange(word, word | CONTENDED, Relaxed, Relaxed).is_ok()
            {
                syscall::futex_wait(&self.word, word | CONTENDED);
            }
        }
    }

    #[inline]
    fn unlock(&self) {
        if self.word.swap(UNLOCKED, Release) & CONTENDED != 0 {
            syscall::futex_wake(&self.word);
        }
    }
}

/// The value while the lock is held.
pub(crate) struct OwnedMutexGuard<'a, T> {
    mutex: &'a OwnedMutex<T>,
}

impl<T> Deref for OwnedMutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread holds the lock.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for OwnedMutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread holds the lock, and the guard is borrowed exclusively.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T> Drop for OwnedMutexGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.mutex.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn one_thread_at_a_time_holds_the_lock() {
        let mutex: OwnedMutex<(u64, u64)> = OwnedMutex::new((0, 0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        let mut guard = mutex.lock();
                        guard.0 += 1;
                        assert!(mutex.is_held_by_this_thread());
                        if guard.0.is_multiple_of(1000) {
                            // Others fall asleep meanwhile.
                            thread::yield_now();
                        }
                        guard.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*mutex.lock(), (80_000, 80_000));
        assert_eq!(mutex.word.load(Relaxed), UNLOCKED);
    }

    #[test]
    fn only_the_owner_is_told_to_hold_the_lock() {
        let mutex = OwnedMutex::new(());
        assert!(!mutex.is_held_by_this_thread());
        let guard = mutex.lock();
        assert!(mutex.is_held_by_this_thread());
        thread::scope(|scope| {
            assert!(!scope.spawn(|| mutex.is_held_by_this_thread()).join().unwrap());
            let waiter = scope.spawn(|| drop(mutex.lock()));
            while mutex.word.load(Relaxed) & CONTENDED == 0 {
                thread::yield_now();
            }
            assert!(mutex.is_held_by_this_thread());
            drop(guard);
            waiter.join().unwrap();
        });
        assert!(!mutex.is_held_by_this_thread());
    }
}
