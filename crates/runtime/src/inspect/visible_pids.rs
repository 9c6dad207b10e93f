//! Process ids of a stack's PID namespace, translated to that of the caller (pid_namespaces(7)).
#![allow(unsafe_code)] // Reason: ioctl_ns(2) is only reachable through an unsafe function.

use crate::own_proc::is_own_proc;
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags, fstat, open};
use rustix::process::Pid;
use std::collections::HashMap;
use std::fs;

/// Opens the parent of a namespace (linux/nsfs.h).
const NS_GET_PARENT: libc::c_ulong = 0xb702;

/// How ids of the stack's PID namespace are translated.
pub(super) enum VisiblePids {
    /// The stack runs in the namespace of the caller.
    Same,
    /// The ids that processes have here, by their ids in the stack's namespace: processes in that namespace
    /// and in namespaces below it. Empty if the caller sees none of them.
    Other(HashMap<u32, u32>),
}

impl VisiblePids {
    /// Returns the translation for the stack of `owner`, which is `None` if it is not visible here.
    pub(super) fn of_stack(owner: Option<Pid>) -> Self {
        let Some(owner) = owner.filter(|_| is_own_proc()) else { return Self::Other(HashMap::new()) };
        let owner = owner.as_raw_nonzero().get().cast_unsigned();
        let ids = namespace_ids(owner);
        if ids.len() == 1 {
            return Self::Same;
        }
        Self::Other(processes_in_namespace_of(owner, ids.len()))
    }

    /// Returns the id of a process here, or 0 if the process is not visible.
    pub(super) fn translate(&self, pid: u32) -> u32 {
        match self {
            Self::Same => pid,
            Self::Other(pids) => pids.get(&pid).copied().unwrap_or(0),
        }
    }
}

/// Returns the ids of a process in the PID namespaces from that of the caller inwards. A process in the
/// namespace of the caller has one.
fn namespace_ids(pid: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    ids.split_whitespace().map_while(|id| id.parse().ok()).collect()
}

/// The PID namespace of a process.
struct Namespace(OwnedFd);

impl Namespace {
    fn of(pid: u32) -> Option<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        open(format!("/proc/{pid}/ns/pid"), flags, Mode::empty()).ok().map(Self)
    }

    /// Returns the namespace in which this one was created; `None` if the caller does not see that one.
    fn parent(&self) -> Option<Self> {
        // SAFETY: the request has no argument.
        let parent = unsafe { libc::ioctl(self.0.as_raw_fd(), NS_GET_PARENT) };
        // SAFETY: the kernel has just opened the descriptor.
        (parent >= 0).then(|| Self(unsafe { OwnedFd::from_raw_fd(parent) }))
    }

    /// Returns the namespace `levels` above this one.
    fn ancestor(self, levels: usize) -> Option<Self> {
        (0..levels).try_fold(self, |namespace, _| namespace.parent())
    }

    fn inode(&self) -> Option<u64> {
        fstat(&self.0).map(|stat| stat.st_ino).ok()
    }
}

/// Returns the processes in the namespace of `owner`, which is `depth - 1` levels below that of the caller,
/// and in namespaces below it. Processes whose namespace this user may not read are left out.
fn processes_in_namespace_of(owner: u32, depth: usize) -> HashMap<u32, u32> {
    let inode = Namespace::of(owner).and_then(|namespace| namespace.inode());
    let (Some(inode), Ok(entries)) = (inode, fs::read_dir("/proc")) else { return HashMap::new() };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| {
        let ids = namespace_ids(pid);
        let inner = *ids.get(depth.checked_sub(1)?)?;
        let namespace = Namespace::of(pid)?.ancestor(ids.len() - depth)?;
        (namespace.inode() == Some(inode)).then_some((inner, pid))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::getpid;

    #[test]
    fn the_callers_own_namespace_is_not_translated() {
        let here = VisiblePids::of_stack(Some(getpid()));
        assert!(matches!(here, VisiblePids::Same));
        assert_eq!(here.translate(7), 7);
        assert_eq!(VisiblePids::of_stack(None).translate(7), 0);
        assert_eq!(namespace_ids(std::process::id()), [std::process::id()]);
        let here = processes_in_namespace_of(std::process::id(), 1);
        assert_eq!(here[&std::process::id()], std::process::id());
    }
}
