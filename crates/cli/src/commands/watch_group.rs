//! `ginnel watch-group`: leads a process group, and kills its members when the process that started this one
//! dies, however that process dies. `PR_SET_PDEATHSIG` would reach only children, and not the workers that a
//! server has forked. `ginnel_measure::watched_group` starts this command.

use crate::failure::Failure;
use crate::output;
use crate::served_stack::POLL_INTERVAL;
use clap::Args;
use ginnel::own_proc::is_own_proc;
use ginnel_posix_ops::ffi;
use rustix::fs::{FileType, fstat};
use rustix::process::{Pid, Signal, getpid, kill_current_process_group, kill_process};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::PathBuf;
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

/// Waits for the hang-up of standard input, and kills the other members of the group.
pub fn run(options: &WatchGroupOptions) -> Result<(), Failure> {
    // Anything else than the pipe of `WatchedGroup`, such as a terminal or /dev/null, is a mistake that would
    // remove a directory.
    if ffi::process_group(0) != Some(getpid().as_raw_pid()) || !is_pipe(&io::stdin()) {
        return Err(Failure::usage(
            "watch-group is a command for ginnel itself: it must lead a process group, with a pipe as its standard input",
        ));
    }
    // Bytes that arrive are ignored. The end of the pipe is the hang-up, and so is an error.
    let _ = io::copy(&mut io::stdin().lock().by_ref(), &mut io::sink());
    if !is_own_proc() {
        // The members cannot be told from other processes, so this one ends with them.
        output::note(format_args!(
            "ginnel: {} is left: /proc is not that of this PID namespace",
            options.folder.display()
        ));
        let ended = kill_current_process_group(Signal::KILL);
        return ended.map_err(|e| Failure::running(format!("process group: {e}")));
    }
    let deadline = Instant::now() + END_TIMEOUT;
    // A member may have forked just before it was killed.
    while kill_members() > 0 && Instant::now() < deadline {
        std::thread::sleep(POLL_INTERVAL);
    }
    loop {
        match std::fs::remove_dir_all(&options.folder) {
            // A process of another group, such as that of a stack's shards, learns of the end by itself, and
            // may write its last files meanwhile.
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty && Instant::now() < deadline => {
                std::thread::sleep(POLL_INTERVAL);
            }
            removed => {
                return removed.map_err(|e| Failure::running(format!("{}: {e}", options.folder.display())));
            }
        }
    }
}

/// Returns whether a descriptor is a pipe.
fn is_pipe(fd: &impl AsFd) -> bool {
    fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo)
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
    let group = fields.nth(1).and_then(|group| group.parse().ok());
    // `run` has seen that this process leads its group.
    !has_ended && group == Some(getpid().as_raw_pid())
}
