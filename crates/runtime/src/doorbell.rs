//! Waking a shard that sleeps in the kernel, once for all that waits for it.

use crate::wait::EventFd;
#[cfg(not(loom))]
use core::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering, fence};

/// Whether somebody sleeps. A shard that does not is never written to by those who have something for it.
#[derive(Debug)]
struct SleepFlag(AtomicBool);

impl SleepFlag {
    /// To be called before the last look at what might be waiting.
    fn set_asleep(&self) {
        self.0.store(true, Ordering::Relaxed);
        // Pairs with the fence in `needs_waking`: either this side sees what was left for it, or the other sees it asleep.
        fence(Ordering::SeqCst);
    }

    /// To be called after something was left. True for one of those who call it during a sleep: it wakes the sleeper.
    fn needs_wakeup(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Relaxed)
    }

    /// The sleep is over. True if somebody has woken the sleeper, or is about to.
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

    /// Something was left for the shard.
    pub(crate) fn ring(&self) {
        if self.sleep_flag.needs_wakeup() {
            self.wake.signal();
        }
    }

    /// From now on a ring ends the sleep. What was left before must be looked for after this.
    pub(crate) fn before_sleep(&self) {
        self.sleep_flag.set_asleep();
    }

    /// Nobody rings any more. `readable`: what was slept on is. It may be without a ring, if the signal of one came after the sleep that it
    /// was for; then the next sleep would end at once, and every one after it.
    pub(crate) fn after_sleep(&self, readable: bool) {
        if self.sleep_flag.clear() || readable {
            self.wake.clear();
        }
    }

    /// What to sleep on.
    pub(crate) fn wake(&self) -> &EventFd {
        &self.wake
    }
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test -p ginnel --lib bell::`.
#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// Two shards leave something for a third that goes to sleep: in every order of steps it sees both, or is woken, and by one of them only.
    #[test]
    fn no_wake_up_is_lost_and_none_is_given_twice() {
        loom::model(|| {
            let sleep_flag = Arc::new(SleepFlag(AtomicBool::new(false)));
            let mail = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
            let senders = [0, 1].map(|at| {
                let (sleep_flag, mail) = (sleep_flag.clone(), mail.clone());
                thread::spawn(move || {
                    mail[at].store(true, Ordering::Release);
                    sleep_flag.needs_wakeup()
                })
            });
            sleep_flag.set_asleep();
            let seen = mail.iter().filter(|mail| mail.load(Ordering::Acquire)).count();
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
    fn a_signal_that_comes_after_the_sleep_ends_one_sleep_and_not_all() {
        let bell = Doorbell::new().unwrap();
        let sleep = || {
            let fd = bell.wake().as_fd();
            wait::sleep([fd, fd], &[], Some(Duration::ZERO)).unwrap().contains(0)
        };
        bell.before_sleep();
        // Whoever rings was interrupted between the two halves of it.
        assert!(bell.sleep_flag.needs_wakeup());
        bell.after_sleep(sleep());
        bell.wake.signal();
        bell.before_sleep();
        let ended = sleep();
        assert!(ended);
        bell.after_sleep(ended);
        bell.before_sleep();
        assert!(!sleep());
    }
}
