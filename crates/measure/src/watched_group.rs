//! A process group that does not outlive the process that started it.

use crate::MeasureError;
use rustix::process::Pid;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A process group whose members are killed if this process dies before the value is dropped. Dropping the
/// value does not end them.
#[derive(Debug)]
pub struct WatchedGroup {
    /// The leader, `ginnel watch-group`. Its standard input is a pipe, which hangs up when this process dies.
    watcher: Child,
}

impl WatchedGroup {
    /// Starts the leader of the group, a command of the executable `ginnel`. It also removes `folder` if this
    /// process dies.
    ///
    /// # Errors
    /// If the leader cannot be started.
    pub fn start(ginnel: &Path, folder: &Path) -> Result<Self, MeasureError> {
        let mut command = Command::new(ginnel);
        command.arg("watch-group").arg("--folder").arg(folder).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let started = command.spawn();
        let failed = |e| MeasureError::Failed(format!("{}: watcher of the servers: {e}", ginnel.display()));
        Ok(Self { watcher: started.map_err(failed)? })
    }

    /// Returns the id of the group.
    pub fn id(&self) -> Pid {
        Pid::from_child(&self.watcher)
    }
}

impl Drop for WatchedGroup {
    fn drop(&mut self) {
        // The watcher is killed before its pipe hangs up, so it does not kill the members of the group.
        let _ = self.watcher.kill();
        let _ = self.watcher.wait();
    }
}
