//! Who is attached: for whoever asks the stack's process, from inside or through its directory.

use super::Teller;
use super::serve::Handed;
use core::time::Duration;
use rustix::fd::{AsFd, AsRawFd};
use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// A door that does not answer for so long has nothing to add.
const DOORS_PATIENCE: Duration = Duration::from_secs(5);

/// A process that is attached to a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct User {
    /// Its number, as the stack's process sees it. 0: the process has announced it, and it has not said a word yet.
    pub pid: u32,
    /// When it was let in, in milliseconds since 1970.
    pub since_ms: u64,
}

/// All of them, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Users(Mutex<BTreeMap<u64, User>>);

impl Users {
    fn locked(&self) -> MutexGuard<'_, BTreeMap<u64, User>> {
        // Each change is one insertion or removal, so whatever panicked left it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A holder of this number is there, or has said which process it is.
    pub(super) fn note(&self, number: u64, pid: u32) {
        let mut users = self.locked();
        let since_ms = users.get(&number).map_or_else(now_ms, |known| known.since_ms);
        users.insert(number, User { pid, since_ms });
    }

    pub(super) fn forget(&self, number: u64) {
        self.locked().remove(&number);
    }

    pub(super) fn count(&self) -> usize {
        self.locked().len()
    }

    pub(super) fn all(&self) -> Vec<User> {
        self.locked().values().copied().collect()
    }
}

/// Asks the door who is there.
#[derive(Debug)]
pub(crate) struct Roll {
    users: Arc<Users>,
    teller: Arc<Teller>,
}

impl Roll {
    pub(super) fn new(users: Arc<Users>, teller: Arc<Teller>) -> Self {
        Self { users, teller }
    }

    /// All of them, and with them whoever came before this was asked and had not been attended to.
    pub(crate) fn call(&self) -> Vec<User> {
        let (attended, all_are) = channel();
        self.teller.tell(Handed::Asked(attended));
        let _ = all_are.recv_timeout(DOORS_PATIENCE);
        self.users.all()
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

/// The number of the process that a descriptor stands for (pidfd_open(2)); 0 if the kernel does not say, or it is in another world.
pub(super) fn pid_of(process: impl AsFd) -> u32 {
    let path = format!("/proc/self/fdinfo/{}", process.as_fd().as_raw_fd());
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Pid:"));
    line.and_then(|pid| pid.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    #[test]
    fn a_user_keeps_its_time_when_it_says_who_it_is() {
        let users = Users::default();
        users.note(1, 0);
        users.note(2, 7);
        let first = users.all()[0];
        std::thread::sleep(std::time::Duration::from_millis(3));
        users.note(1, 5);
        assert_eq!(users.all()[0], User { pid: 5, ..first });
        assert!(first.since_ms > 1_600_000_000_000, "{first:?}");
        users.forget(1);
        users.forget(1);
        assert_eq!((users.count(), users.all()[0].pid), (1, 7));
    }

    #[test]
    fn the_process_behind_a_descriptor_is_known_and_of_other_descriptors_nothing_is() {
        let this = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        assert_eq!(pid_of(&this), std::process::id());
        assert_eq!(pid_of(std::fs::File::open("/dev/null").unwrap()), 0);
    }
}
