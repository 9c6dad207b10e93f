//! Processes that may come to use the stack, and may not: most that a shell starts never do.

use super::super::line;
use super::super::message::{Answer, Ask, GUEST, Hello, Refusal, VERSION, encode, guest};
use super::{Process, connect_to, last_word, locked};
use crate::error::Error;
use crate::own_fd::OwnFd;
use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::io;
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
        let line = connect_to(path).map_err(io)?;
        introduce(&line).map_err(io)?;
        Ok(Self(OwnFd::new(line)))
    }

    /// Goes on with the connection that the program before left to this one ([`Guest::followed`], [`Process::followed`]).
    ///
    /// # Errors
    /// The stack is gone, or this is no connection to one.
    pub fn over(line: OwnedFd) -> Result<Self, Error> {
        let this = this_process().map_err(|e| Error::io("descriptor of this process", e))?;
        line::send(&line, &[guest::IS], &[this.as_fd()]).map_err(|_| Error::StackGone)?;
        Ok(Self(OwnFd::new(line)))
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
        self.tell(guest::ENTERS, &stacks).map_err(|_| self.last_word())?;
        drop(stacks);
        Process::over(its)
    }

    /// A connection for a program that this process is going to start and that may not be able to open the door, as it runs with other rights or in another root directory. It comes as the
    /// user that this process is now. To be inherited; close-on-exec until that is changed.
    ///
    /// # Errors
    /// No descriptors, or the stack is gone.
    pub fn followed(&self) -> Result<OwnFd, Error> {
        follow(|stacks| self.tell(guest::IS_FOLLOWED, &stacks).map_err(|_| self.last_word()))
    }

    /// A message with a descriptor.
    pub(in super::super) fn tell(&self, what: u8, with: &OwnedFd) -> io::Result<()> {
        line::send(&self.0, &[what], &[with.as_fd()])
    }

    /// Why the stack has hung up.
    fn last_word(&self) -> Error {
        last_word(&self.0, &mut line::buffer())
    }
}

impl Process {
    /// As [`Guest::followed`], for a program that keeps nothing of what this process holds.
    ///
    /// # Errors
    /// As there.
    pub fn followed(&self) -> Result<OwnFd, Error> {
        follow(|stacks| match locked(&self.line).ask(&Ask::Follow, &[stacks.as_fd()])?.0 {
            Answer::Done => Ok(()),
            _ => Err(Error::Refused(Refusal::Malformed)),
        })
    }
}

fn follow(tell: impl FnOnce(OwnedFd) -> Result<(), Error>) -> Result<OwnFd, Error> {
    let io = |e| Error::io("connection for a program", e);
    let (its, stacks) = line::pair().map_err(io)?;
    tell(stacks)?;
    // For the program, which may not know the library, and so that somebody is there until it has begun.
    introduce(&its).map_err(io)?;
    Ok(OwnFd::new(its))
}

/// The first word.
fn introduce(line: &OwnedFd) -> io::Result<()> {
    let hello = Hello { magic: GUEST, version: VERSION, domain: String::new() };
    line::send(line, &encode(0, &hello), &[this_process()?.as_fd()])
}

fn this_process() -> io::Result<OwnedFd> {
    Ok(pidfd_open(getpid(), PidfdFlags::empty())?)
}
