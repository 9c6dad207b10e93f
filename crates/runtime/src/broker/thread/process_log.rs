//! Events about programs that attach and end, and about processes that are refused. Forked children come and
//! go with their programs, and have no events of their own.

use super::Refusal;
use core::time::Duration;

/// Writes that a program has attached. Returns its name, for [`ended`].
pub(super) fn attached(pid: u32, uid: u32) -> Option<Box<str>> {
    // The stack's own process attaches to find out whether its addresses are ready.
    if pid == std::process::id() {
        return None;
    }
    let name = command_of(pid);
    tracing::info!("{name:?} (process {pid}, user {uid}) attached");
    Some(name)
}

/// Writes that a program has ended or closed its connection.
pub(super) fn ended(name: &str, pid: u32) {
    tracing::info!("{name:?} (process {pid}) ended");
}

/// Writes that a program was killed because it has not ended within `timeout` after SIGTERM.
pub(super) fn killed(name: &str, pid: u32, timeout: Duration) {
    let seconds = timeout.as_secs();
    tracing::warn!("{name:?} (process {pid}) did not end within {seconds} s of SIGTERM, and was killed");
}

/// Writes that a program runs while its stack ends, or could not be taken over by shards that were started
/// again.
pub(super) fn lost_stack(name: &str, pid: u32) {
    tracing::warn!("{name:?} (process {pid}) goes on without the stack: its calls fail");
}

/// Writes that the shards have ended while a program, or a forked child, opened its sockets again.
pub(super) fn restoration_interrupted(program: Option<&(u32, Box<str>)>) {
    match program {
        Some((pid, name)) => tracing::warn!(
            "the shards ended while {name:?} (process {pid}) opened its sockets again; it begins anew"
        ),
        None => {
            tracing::warn!("the shards ended while a child process opened its sockets again; it begins anew")
        }
    }
}

/// Writes that a process was refused. Process 0 is an unknown one.
pub(super) fn refused(pid: u32, uid: u32, refusal: Refusal) {
    match (pid, refusal) {
        // The text of the refusal is for the process, whose library has another version.
        (_, Refusal::Version(version)) => tracing::warn!(
            "{:?} (process {pid}, user {uid}) was refused: its library has another version of the broker protocol than {version}",
            command_of(pid)
        ),
        (0, _) => tracing::warn!("a process of user {uid} was refused: {refusal}"),
        // An event of its own, so that this frequent reason does not crowd out the others.
        (_, Refusal::Unattached(_)) => {
            tracing::warn!("{:?} (process {pid}, user {uid}) was refused: {refusal}", command_of(pid));
        }
        _ => tracing::warn!("{:?} (process {pid}, user {uid}) was refused: {refusal}", command_of(pid)),
    }
}

/// Returns the name of the program that a process runs, or "?" if the process is gone or in another PID
/// namespace.
fn command_of(pid: u32) -> Box<str> {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
    name.as_deref().map_or("?", str::trim_end).into()
}
