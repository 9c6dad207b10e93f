//! Words that tell whether a side of the channel sleeps, so that the other side wakes it only then.
//!
//! A side that is about to sleep stores its state, and then checks for notifications once more. The other
//! side notifies, and then loads the state. Between the two steps, each side executes a sequentially
//! consistent fence, or a read-modify-write of a word that the other side modifies, too. So either the first
//! side sees the notification, or the other side sees that it has to wake the first one.

use super::sync::{AtomicU32, Ordering, fence};

/// The side runs and checks its notifications.
const AWAKE: u32 = 0;
/// The side sleeps, or is about to sleep, and a notification has to wake it.
const ASLEEP: u32 = 1;

/// Keeps what one side writes apart from what the other side writes. Two cache lines, because the
/// adjacent-line prefetcher fetches pairs.
#[repr(align(128))]
pub(super) struct CachePadded<T>(pub T);

/// Written by its side, and by the one who wakes that side.
#[repr(C)]
pub(super) struct SleepState(CachePadded<AtomicU32>);

impl SleepState {
    #[cfg(test)]
    pub fn new() -> Self {
        Self(CachePadded(AtomicU32::new(AWAKE)))
    }

    /// Returns whether the side sleeps or is about to. The answer may be outdated at once.
    #[inline]
    pub fn is_asleep(&self) -> bool {
        self.0.0.load(Ordering::Relaxed) != AWAKE
    }

    /// Declares that the side is about to sleep. It must check for notifications afterwards.
    #[inline]
    pub fn begin_sleep(&self) {
        self.0.0.store(ASLEEP, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Returns whether the caller has to wake the side. The caller has notified and executed a fence.
    #[inline]
    pub fn claim_wakeup(&self) -> bool {
        self.0.0.load(Ordering::Relaxed) == ASLEEP && self.0.0.swap(AWAKE, Ordering::Relaxed) == ASLEEP
    }

    /// Ends a sleep. Returns whether the other side claimed the wake-up.
    #[inline]
    pub fn end_sleep(&self) -> bool {
        self.0.0.swap(AWAKE, Ordering::Relaxed) == AWAKE
    }
}

/// Result of [`try_yield`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum YieldOutcome {
    /// The CPU is left to the client.
    Yielded,
    /// The client sleeps, so notifications wake the stack as usual.
    Declined,
    /// A notification is pending: the stack must not sleep.
    Notified,
}

/// Yields the CPU that the stack and a client share, after the stack found no notification before its sleep.
/// If this succeeds, notifications of this client do not wake the stack until the client goes to sleep.
/// `is_notified` returns whether there is a notification now.
pub(super) fn try_yield(
    has_cpu: &AtomicU32,
    client: &SleepState,
    is_notified: impl FnOnce() -> bool,
) -> YieldOutcome {
    if client.is_asleep() {
        return YieldOutcome::Declined;
    }
    has_cpu.store(1, Ordering::Relaxed);
    // Either the stack sees that the client has fallen asleep, or the client sees that it has to wake the
    // stack.
    fence(Ordering::SeqCst);
    if !client.is_asleep() {
        return YieldOutcome::Yielded;
    }
    has_cpu.store(0, Ordering::Relaxed);
    // Another thread of the client may have notified meanwhile and woken nobody.
    fence(Ordering::SeqCst);
    if is_notified() { YieldOutcome::Notified } else { YieldOutcome::Declined }
}

/// Returns whether a client that is about to sleep has to wake the stack, which yielded its CPU to it. Called
/// after [`SleepState::begin_sleep`].
#[inline]
pub(super) fn end_yield(has_cpu: &AtomicU32, stack: &SleepState) -> bool {
    has_cpu.load(Ordering::Relaxed) != 0 && has_cpu.swap(0, Ordering::Relaxed) != 0 && stack.claim_wakeup()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn yielded_side_is_woken_when_the_client_sleeps() {
        let (stack, client, has_cpu) = (SleepState::new(), SleepState::new(), AtomicU32::new(0));
        stack.begin_sleep();
        assert_eq!(try_yield(&has_cpu, &client, || false), YieldOutcome::Yielded);
        client.begin_sleep();
        assert!(end_yield(&has_cpu, &stack));
        assert!(!end_yield(&has_cpu, &stack), "only once");
        assert!(stack.end_sleep());
        stack.begin_sleep();
        assert_eq!(try_yield(&has_cpu, &client, || true), YieldOutcome::Declined, "the client sleeps");
        assert!(!end_yield(&has_cpu, &stack), "the stack did not yield");
        assert!(stack.claim_wakeup());
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use std::sync::Arc;

    /// The stack's sleep state, the client's, the yield, and the client's bit among the notifications.
    struct Memory {
        stack: SleepState,
        client: SleepState,
        has_cpu: AtomicU32,
        notified: AtomicU32,
    }

    impl Memory {
        fn new() -> Arc<Self> {
            let word = || AtomicU32::new(0);
            let (stack, client) = (SleepState::new(), SleepState::new());
            Arc::new(Self { stack, client, has_cpu: word(), notified: word() })
        }

        /// As `Client::flush`, after a notification. Returns whether it wakes the stack.
        fn flush(&self) -> bool {
            self.notified.fetch_or(1, Ordering::AcqRel);
            self.has_cpu.load(Ordering::Relaxed) == 0 && self.stack.claim_wakeup()
        }

        /// As the stack does before its sleep. Returns whether it sleeps.
        fn sleep_or_yield(&self) -> bool {
            let is_notified = || self.notified.fetch_or(0, Ordering::AcqRel) != 0;
            self.stack.begin_sleep();
            !is_notified() && try_yield(&self.has_cpu, &self.client, is_notified) != YieldOutcome::Notified
        }
    }

    /// A client that notifies and sleeps, and a stack that yields to it, do not both sleep.
    #[test]
    fn mutual_yield_loses_no_wakeup() {
        loom::model(|| {
            let memory = Memory::new();
            let client = {
                let memory = memory.clone();
                loom::thread::spawn(move || {
                    let woken = memory.flush();
                    memory.client.begin_sleep();
                    woken | end_yield(&memory.has_cpu, &memory.stack)
                })
            };
            let sleeps = memory.sleep_or_yield();
            let woken = client.join().unwrap();
            assert!(!sleeps || woken, "the stack sleeps and was not woken");
        });
    }

    /// As above, while the thread that waits for events sleeps and another thread of the client notifies.
    #[test]
    fn notification_of_another_thread_ends_a_yield() {
        loom::model(|| {
            let memory = Memory::new();
            let waiting = {
                let memory = memory.clone();
                loom::thread::spawn(move || {
                    memory.client.begin_sleep();
                    end_yield(&memory.has_cpu, &memory.stack)
                })
            };
            let other = {
                let memory = memory.clone();
                loom::thread::spawn(move || memory.flush())
            };
            let sleeps = memory.sleep_or_yield();
            let woken = [waiting.join().unwrap(), other.join().unwrap()];
            assert!(!sleeps || woken.contains(&true), "the stack sleeps and was not woken");
        });
    }
}
