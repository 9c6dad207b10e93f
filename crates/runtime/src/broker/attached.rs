//! The list of attached processes, for this process and, through the directory of the stack, for others.

use super::BrokerHandle;
use super::thread::BrokerCommand;
use crate::own_proc::is_own_proc;
use core::time::Duration;
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// How long [`AttachedQuery::fetch`] waits for the broker to process what is pending.
const BROKER_TIMEOUT: Duration = Duration::from_secs(5);

/// A process that is attached to a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachedProcess {
    /// Its process id: for the broker that in the PID namespace of the stack's process, for
    /// [`list_processes`](crate::inspect::list_processes) that in the namespace of the caller. 0: the process
    /// is not visible there, or it was announced and has not sent a message yet.
    pub pid: u32,
    /// Time of its admission, in milliseconds since 1970.
    pub since_ms: u64,
}

/// A process, and its pidfd once the process has sent a message.
type Entry = (AttachedProcess, Option<Arc<OwnedFd>>);

/// All attached processes by the broker's id, which orders them by admission.
#[derive(Debug, Default)]
pub(super) struct AttachedProcesses(Mutex<BTreeMap<u64, Entry>>);

impl AttachedProcesses {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Entry>> {
        // Each change is a single insertion or removal, so a panic cannot leave the map inconsistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a process, or sets the process id and the pidfd of one that is in the list; its time of admission
    /// stays.
    pub(super) fn update(&self, id: u64, pid: u32, pidfd: Option<Arc<OwnedFd>>) {
        let mut processes = self.lock();
        let since_ms = processes.get(&id).map_or_else(now_ms, |(known, _)| known.since_ms);
        processes.insert(id, (AttachedProcess { pid, since_ms }, pidfd));
    }

    pub(super) fn remove(&self, id: u64) {
        self.lock().remove(&id);
    }

    pub(super) fn count(&self) -> usize {
        self.lock().len()
    }

    pub(super) fn all(&self) -> Vec<AttachedProcess> {
        self.lock().values().map(|(process, _)| *process).collect()
    }

    /// Returns the process that was admitted first of those that have a pidfd.
    pub(super) fn oldest(&self) -> Option<(AttachedProcess, Arc<OwnedFd>)> {
        self.lock().values().find_map(|(process, pidfd)| Some((*process, pidfd.clone()?)))
    }
}

/// Asks the broker for the attached processes.
#[derive(Debug)]
pub(crate) struct AttachedQuery {
    attached: Arc<AttachedProcesses>,
    broker: Arc<BrokerHandle>,
}

impl AttachedQuery {
    pub(super) fn new(attached: Arc<AttachedProcesses>, broker: Arc<BrokerHandle>) -> Self {
        Self { attached, broker }
    }

    /// Returns the attached processes, including all that connected before this call: waits, for at most
    /// `BROKER_TIMEOUT`, until the broker has processed their messages.
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

/// Returns the process id that a pidfd refers to (pidfd_open(2)); 0 if the kernel does not tell, or if the
/// process is in another PID namespace.
pub(super) fn pid_of(process: impl AsFd) -> u32 {
    if !is_own_proc() {
        return 0;
    }
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
    fn admission_time_survives_setting_the_pid() {
        let users = AttachedProcesses::default();
        users.update(1, 0, None);
        users.update(2, 7, None);
        let first = users.all()[0];
        assert_eq!(users.oldest().map(|(process, _)| process), None);
        std::thread::sleep(std::time::Duration::from_millis(3));
        let this = Arc::new(pidfd_open(getpid(), PidfdFlags::empty()).unwrap());
        users.update(1, 5, Some(this));
        assert_eq!(users.all()[0], AttachedProcess { pid: 5, ..first });
        assert_eq!(users.oldest().map(|(process, _)| process.pid), Some(5));
        assert!(first.since_ms > 1_600_000_000_000, "{first:?}");
        users.remove(1);
        users.remove(1);
        assert_eq!((users.count(), users.all()[0].pid), (1, 7));
    }

    #[test]
    fn pid_is_read_from_pidfds_only() {
        let this = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
        assert_eq!(pid_of(&this), std::process::id());
        assert_eq!(pid_of(std::fs::File::open("/dev/null").unwrap()), 0);
    }
}
