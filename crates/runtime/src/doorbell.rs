//! Waking a shard that sleeps in the kernel, once for all work that waits for it.

use crate::wait::EventFd;
#[cfg(not(loom))]
use core::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering, fence};

/// Says whether a thread sleeps. Threads that have work for a shard that does not sleep make no system call.
#[derive(Debug)]
struct SleepFlag(AtomicBool);

impl SleepFlag {
    /// Declares that the thread is about to sleep. Call this before the last check for work.
    fn set_asleep(&self) {
        self.0.store(true, Ordering::Relaxed);
        // Pairs with the fence in `needs_wakeup`: either this side sees the work, or the other side sees it
        // asleep.
        fence(Ordering::SeqCst);
    }

    /// Returns whether the caller, which has left work, has to wake the sleeper. True for one caller in each
    /// sleep.
    fn needs_wakeup(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Relaxed)
    }

    /// Declares that the sleep is over. Returns true if another thread has woken the sleeper, or is about to.
    fn clear(&self) -> bool {
        !self.0.swap(false, Ordering::Relaxed)
    }
}

/// Wakes a shard, but only if it sleeps.
#[derive(Debug)]
pub(crate) struct Doorbell {
    sleep_flag: SleepFlag,
    wake: EventFd,
}

impl Doorbell {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { sleep_flag: SleepFlag(AtomicBool::new(false)), wake: EventFd::new()? })
    }

    /// Wakes the shard if it sleeps, because there is work for it.
    pub(crate) fn ring(&self) {
        if self.sleep_flag.needs_wakeup() {
            self.wake.signal();
        }
    }

    /// Makes a ring end the sleep. The shard has to check for earlier work after this call.
    pub(crate) fn before_sleep(&self) {
        self.sleep_flag.set_asleep();
    }

    /// Ends a sleep. `readable`: the descriptor is readable. It may be readable without a ring in this sleep
    /// if the signal of an earlier ring came late; if it were not cleared, every later sleep would end at
    /// once.
    pub(crate) fn after_sleep(&self, readable: bool) {
        if self.sleep_flag.clear() || readable {
            self.wake.clear();
        }
    }

    /// Returns the descriptor to sleep on.
    pub(crate) fn wake(&self) -> &EventFd {
        &self.wake
    }
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test -p ginnel --lib doorbell::`.
#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Two shards leave work for a third one that goes to sleep: in every interleaving it sees both, or
    /// exactly one of them wakes it.
    #[test]
    fn wakeup_is_neither_lost_nor_doubled() {
        loom::model(|| {
            let sleep_flag = Arc::new(SleepFlag(AtomicBool::new(false)));
            let mailboxes = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
            let senders = [0, 1].map(|at| {
                let (sleep_flag, mailboxes) = (sleep_flag.clone(), mailboxes.clone());
                thread::spawn(move || {
                    mailboxes[at].store(true, Ordering::Release);
                    sleep_flag.needs_wakeup()
                })
            });
            sleep_flag.set_asleep();
            let seen = mailboxes.iter().filter(|mailboxes| mailboxes.load(Ordering::Acquire)).count();
            let woken = senders.map(|sender| sender.join().expect("no panic"));
            let woken = woken.iter().filter(|woken| **woken).count();
            assert!(seen == 2 || woken == 1, "{seen} of two seen, woken {woken} times");
            assert!(woken <= 1);
            assert_eq!(sleep_flag.clear(), woken == 1);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::Doorbell;
    use crate::wait;
    use core::time::Duration;

    #[test]
    fn late_signal_ends_only_one_sleep() {
        let doorbell = Doorbell::new().unwrap();
        let sleep = || {
            let fd = doorbell.wake().as_fd();
            wait::sleep([fd, fd], &[], Some(Duration::ZERO)).unwrap().contains(0)
        };
        doorbell.before_sleep();
        // The ringing thread was interrupted between the two halves of `ring`.
        assert!(doorbell.sleep_flag.needs_wakeup());
        doorbell.after_sleep(sleep());
        doorbell.wake.signal();
        doorbell.before_sleep();
        let ended = sleep();
        assert!(ended);
        doorbell.after_sleep(ended);
        doorbell.before_sleep();
        assert!(!sleep());
    }
}
