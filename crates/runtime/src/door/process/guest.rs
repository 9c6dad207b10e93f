//! Processes that may come to use the stack, and may not: most that a shell starts never do.

use super::super::line;
use super::super::message::{GUEST, Hello, VERSION, encode};
use super::{Process, connect_to};
use crate::error::Error;
use crate::own_fd::OwnFd;
use rustix::fd::{AsFd, AsRawFd, RawFd};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::path::Path;

/// A connection of such a process, and of those that it forks, which have it, too. The stack counts it among those who are there, it takes no place, and it leads in from wherever a
/// process has gone since: into another root directory, or to other rights.
#[derive(Debug)]
pub struct Guest(OwnFd);

impl Guest {
    /// Comes to the stack whose door is at `path`. Nothing is waited for.
    ///
    /// # Errors
    /// Nobody is there.
    pub fn come(path: &Path) -> Result<Self, Error> {
        let io = |e| Error::io(format!("stack at {}", path.display()), e);
        let line = OwnFd::new(connect_to(path).map_err(io)?);
        let this = pidfd_open(getpid(), PidfdFlags::empty());
        let this = this.map_err(|e| Error::io("descriptor of this process", e))?;
        let hello = Hello { magic: GUEST, version: VERSION, domain: String::new() };
        line::send(&line, &encode(0, &hello), &[this.as_fd()]).map_err(io)?;
        Ok(Self(line))
    }

    /// Its connection.
    pub fn line(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// See [`OwnFd::make_way`].
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn make_way(&self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        self.0.make_way(number)
    }

    /// Attaches, as [`Process::connect`] does. Several processes may do so over one such connection, at the same time.
    ///
    /// # Errors
    /// As [`Process::connect`].
    pub fn enter(&self) -> Result<Process, Error> {
        let (its, stacks) = line::pair().map_err(|e| Error::io("connection for a process", e))?;
        // What is said does not matter; no message is empty.
        line::send(&self.0, &[0], &[stacks.as_fd()]).map_err(|_| Error::StackGone)?;
        drop(stacks);
        Process::over(its)
    }
}
