//! Process ids of a stack's PID namespace, translated to that of the caller (pid_namespaces(7)).

use crate::own_proc::is_own_proc;
use rustix::process::Pid;
use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

/// How ids of the stack's PID namespace are translated.
pub(super) enum VisiblePids {
    /// The stack runs in the namespace of the caller.
    Same,
    /// The processes of the stack's namespace, by their ids there; empty if the caller sees none of them.
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
        Self::Other(processes_beside(owner, ids.len()))
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

fn namespace_of(pid: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

/// Returns the processes in the namespace of `owner`, which is `depth - 1` levels below that of the caller.
/// Processes whose namespace this user may not read are left out.
fn processes_beside(owner: u32, depth: usize) -> HashMap<u32, u32> {
    let (Some(namespace), Ok(entries)) = (namespace_of(owner), fs::read_dir("/proc")) else {
        return HashMap::new();
    };
    let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| {
        let ids = namespace_ids(pid);
        let is_beside = ids.len() == depth && namespace_of(pid).as_ref() == Some(&namespace);
        ids.last().filter(|_| is_beside).map(|inner| (*inner, pid))
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
        assert_eq!(processes_beside(std::process::id(), 1)[&std::process::id()], std::process::id());
    }
}
