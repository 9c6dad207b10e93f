//! `ginnel watch-group`: leads a process group, and kills its members when the process that started this one
//! dies, however that process dies. The kernel's signal at a parent's death would reach only children, and
//! not the workers that a server has forked.

use crate::failure::Failure;
use crate::served_stack::POLL_INTERVAL;
use clap::Args;
use rustix::process::{Pid, Signal, getpgrp, getpid, kill_process};
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest time for killed processes to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Options of `ginnel watch-group`.
#[derive(Clone, Debug, Args)]
pub struct WatchGroupOptions {
    /// Directory to remove when the members have ended.
    #[arg(long, value_name = "DIRECTORY")]
    folder: PathBuf,
}

/// A process group whose members are killed if this process dies before the value is dropped. Dropping the
/// value does not end them.
#[derive(Debug)]
pub struct WatchedGroup {
    /// The leader. Its standard input is a pipe, which hangs up when this process dies.
    watcher: Child,
}

impl WatchedGroup {
    /// Starts the leader of the group. It also removes `folder` if this process dies.
    pub fn start(folder: &Path) -> Result<Self, Failure> {
        let failed = |e| Failure::running(format!("watcher of the servers: {e}"));
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg("watch-group").arg("--folder").arg(folder).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { watcher: command.spawn().map_err(failed)? })
    }

    /// Returns the id of the group.
    pub fn id(&self) -> Pid {
        Pid::from_child(&self.watcher)
    }
}

impl Drop for WatchedGroup {
    fn drop(&mut self) {
        // Killed before its pipe hangs up, the watcher ends nobody. It cannot have ended by itself.
        let _ = self.watcher.kill();
        let _ = self.watcher.wait();
    }
}

/// Waits for the hang-up of standard input, and kills the other members of the group.
pub fn run(options: &WatchGroupOptions) -> Result<(), Failure> {
    if getpgrp() != getpid() {
        return Err(Failure::usage(
            "watch-group is a command for ginnel itself: it must lead a process group",
        ));
    }
    // Whatever comes is no hang-up; an error is one.
    let _ = io::copy(&mut io::stdin().lock().by_ref(), &mut io::sink());
    let deadline = Instant::now() + END_TIMEOUT;
    // A member may have forked just before it was killed.
    while kill_members() > 0 && Instant::now() < deadline {
        std::thread::sleep(POLL_INTERVAL);
    }
    let removed = std::fs::remove_dir_all(&options.folder);
    removed.map_err(|e| Failure::running(format!("{}: {e}", options.folder.display())))
}

/// Kills the other members of this process's group, and returns how many there were.
fn kill_members() -> usize {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?));
    let members = processes.filter(|pid| *pid != getpid() && is_member(*pid));
    members.fold(0, |count, pid| {
        // Fails if the process has ended meanwhile.
        let _ = kill_process(pid, Signal::KILL);
        count + 1
    })
}

/// Returns whether a process runs and is a member of this process's group.
fn is_member(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default();
    // proc(5): the name in parentheses may contain anything; state, parent and group follow.
    let Some((_, fields)) = stat.rsplit_once(") ") else { return false };
    let mut fields = fields.split(' ');
    let has_ended = fields.next().is_none_or(|state| state == "Z" || state == "X");
    let group = fields.nth(1).and_then(|group| Pid::from_raw(group.parse().ok()?));
    !has_ended && group == Some(getpgrp())
}
