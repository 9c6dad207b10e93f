//! Who is attached: for whoever asks the stack's process, from inside or through its directory.

use super::BrokerHandle;
use super::thread::BrokerCommand;
use core::time::Duration;
use rustix::fd::{AsFd, AsRawFd};
use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// A door that does not answer for so long has nothing to add.
const BROKER_TIMEOUT: Duration = Duration::from_secs(5);

/// A process that is attached to a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachedProcess {
    /// Its number, as the stack's process sees it. 0: the process has announced it, and it has not said a word yet.
    pub pid: u32,
    /// When it was let in, in milliseconds since 1970.
    pub since_ms: u64,
}

/// All of them, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct AttachedProcesses(Mutex<BTreeMap<u64, AttachedProcess>>);

impl AttachedProcesses {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, AttachedProcess>> {
        // Each change is one insertion or removal, so whatever panicked left it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A holder of this number is there, or has said which process it is.
    pub(super) fn update(&self, id: u64, pid: u32) {
        let mut users = self.lock();
        let since_ms = users.get(&id).map_or_else(now_ms, |known| known.since_ms);
        users.insert(id, AttachedProcess { pid, since_ms });
    }

    pub(super) fn remove(&self, id: u64) {
        self.lock().remove(&id);
    }

    pub(super) fn count(&self) -> usize {
        self.lock().len()
    }

    pub(super) fn all(&self) -> Vec<AttachedProcess> {
        self.lock().values().copied().collect()
    }
}

/// Asks the door who is there.
#[derive(Debug)]
pub(crate) struct AttachedQuery {
    attached: Arc<AttachedProcesses>,
    broker: Arc<BrokerHandle>,
}

impl AttachedQuery {
    pub(super) fn new(attached: Arc<AttachedProcesses>, broker: Arc<BrokerHandle>) -> Self {
        Self { attached, broker }
    }

    /// All of them, and with them whoever came before this was asked and had not been attended to.
    pub(crate) fn fetch(&self) -> Vec<AttachedProcess> {
        let (done, is_done) = channel();
        self.broker.send(BrokerCommand::Barrier(done));
        let _ = is_done.recv_timeout(BROKER_TIMEOUT);
        self.attached.all()
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}

/// The number of the process that a descriptor stands for (pidfd_open(2)); 0 if the kernel does not say, or it is in another world.
pub(super) fn pid_of(process: impl AsFd) -> u32 {
    let path = format!("/proc/self/fdinfo/{}", process.as_fd().as_raw_fd());
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let pid_line = text.lines().find_map(|line| line.strip_prefix("Pid:"));
    pid_line.and_then(|pid| pid.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    #[test]
    fn a_user_keeps_its_time_when_it_says_who_it_is() {
        let users = AttachedProcesses::default();
        users.update(1, 0);
        users.update(2, 7);
        let first = users.all()[0];
        std::thread::sleep(std::time::Duration::from_millis(3));
        users.update(1, 5);
        assert_eq!(users.all()[0], AttachedProcess { pid: 5, ..first });
        assert!(first.since_ms > 1_600_000_000_000, "{first:?}");
        users.remove(1);
        users.remove(1);
        assert_eq!((users.count(), users.all()[0].pid), (1, 7));
    }

    #[test]
    fn the_process_behind_a_descriptor_is_known_and_of_other_descriptors_nothing_is() {
        let this = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        assert_eq!(pid_of(&this), std::process::id());
        assert_eq!(pid_of(std::fs::File::open("/dev/null").unwrap()), 0);
    }
}
