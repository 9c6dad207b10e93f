//! Reads the listeners and workers of all programs of this machine.

use crate::members::holder;
use crate::region::{NAME, Region};
use core::sync::atomic::Ordering;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// A process that has a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenerProcess {
    /// The process with this id.
    Id(i32),
    /// A process of a PID namespace that is not visible in that of the caller.
    Hidden,
    /// The process has ended.
    Ended,
}

/// A worker's socket for one listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerListener {
    /// Address of the listener.
    pub address: SocketAddr,
    /// Process that keeps the sockets of all workers: the master.
    pub master: ListenerProcess,
    /// Process that accepts from the socket; `None` if the worker has left it.
    pub worker: Option<ListenerProcess>,
    /// CPU whose connections the worker gets; `None` if it shares those of CPUs without a worker.
    pub cpu: Option<u32>,
    /// Connections that were accepted from the socket.
    pub accepted: u64,
}

/// Returns one row for each listener and worker of all programs whose descriptors this process may see; with
/// `pid`, only those of that process. A program that listens must not call this: the memory of its listeners
/// is opened and closed, and so the kernel releases the lock by which its workers see that it runs.
///
/// # Errors
/// `/proc` or the directory of the process cannot be read.
pub fn all(pid: Option<u32>) -> io::Result<Vec<WorkerListener>> {
    let mut seen = BTreeSet::new();
    let mut rows = Vec::new();
    if let Some(pid) = pid {
        add(Path::new("/proc").join(pid.to_string()).as_path(), &mut seen, &mut rows)?;
        return Ok(rows);
    }
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let is_process = path.file_name().is_some_and(|name| name.as_encoded_bytes()[0].is_ascii_digit());
        if is_process {
            // A process may have ended, and one of another user cannot be read.
            let _ = add(&path, &mut seen, &mut rows);
        }
    }
    Ok(rows)
}

fn add(process: &Path, seen: &mut BTreeSet<u64>, rows: &mut Vec<WorkerListener>) -> io::Result<()> {
    let wanted = format!("/memfd:{NAME} (deleted)");
    // A file of any kind can have this name: opening a FIFO must not wait for a writer.
    let mut options = fs::OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    for entry in fs::read_dir(process.join("fd"))? {
        let Ok(entry) = entry else { continue };
        if fs::read_link(entry.path()).is_ok_and(|link| link.as_os_str() == wanted.as_str())
            && let Ok(memory) = options.open(entry.path())
            && let Ok(inode) = memory.metadata()
            && inode.is_file()
            && seen.insert(inode.ino())
            && let Ok(region) = Region::open(&memory)
        {
            add_region(region, |member| process_of(&memory, member), rows);
        }
    }
    Ok(())
}

fn process_of(memory: &fs::File, member: u32) -> ListenerProcess {
    match holder(memory, member) {
        Ok(None) => ListenerProcess::Ended,
        Ok(Some(pid)) if pid > 0 => ListenerProcess::Id(pid),
        Ok(Some(_)) | Err(_) => ListenerProcess::Hidden,
    }
}

fn add_region(region: &Region, process_of: impl Fn(u32) -> ListenerProcess, rows: &mut Vec<WorkerListener>) {
    for listener in &region.listeners {
        if listener.cookie.load(Ordering::Acquire) == 0 {
            continue;
        }
        for (socket, slot) in listener.sockets.iter().zip(&region.slots) {
            let is_active = socket.is_active.load(Ordering::Acquire) != 0;
            let accepted = socket.accepted.load(Ordering::Relaxed);
            if !is_active && (socket.group_index().is_none() || accepted == 0) {
                continue;
            }
            let worker = slot.worker.load(Ordering::Relaxed);
            rows.push(WorkerListener {
                address: listener.address(),
                master: process_of(listener.owner.load(Ordering::Relaxed)),
                worker: u32::try_from(worker).ok().filter(|_| is_active).map(&process_of),
                cpu: slot.cpu().filter(|_| is_active),
                accepted,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::tests::{MemberProcess, OWN_LOCKS};
    use std::sync::PoisonError;

    #[test]
    fn a_region_is_found_by_its_descriptor() {
        let _own_locks = OWN_LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
        // A memfd with the name of a region and other contents is skipped. It has the lower descriptor, so it
        // is examined first.
        let _foreign = rustix::fs::memfd_create(NAME, rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        let (region, memory) = Region::create().unwrap();
        let (mut master, worker_process) =
            (MemberProcess::start(&memory, 77), MemberProcess::start(&memory, 88));
        let [master_pid, worker_pid] = [&master, &worker_process].map(MemberProcess::id);
        let address = "127.0.0.1:8000".parse().unwrap();
        region.listeners[1].fill(5, 77, address);
        region.listeners[1].join_group(1);
        region.slots[1].worker.store(88, Ordering::Relaxed);
        region.slots[1].set_cpu(Some(3));
        region.listeners[1].sockets[1].is_active.store(1, Ordering::Relaxed);
        region.listeners[1].sockets[1].accepted.store(9, Ordering::Relaxed);
        let worker = Some(ListenerProcess::Id(worker_pid));
        let master_id = ListenerProcess::Id(master_pid);
        let row = WorkerListener { address, master: master_id, worker, cpu: Some(3), accepted: 9 };
        assert!(all(None).unwrap().contains(&row));
        assert!(all(Some(std::process::id())).unwrap().contains(&row));
        assert!(all(Some(u32::MAX)).is_err());
        master.kill();
        assert!(all(None).unwrap().contains(&WorkerListener { master: ListenerProcess::Ended, ..row }));
    }
}
