//! Processes that may come to use the stack, and may not: most that a shell starts never do.

use super::super::message::{
    ControlReply, ControlRequest, Hello, MAGIC_UNATTACHED, PROTOCOL_VERSION, Refusal, encode, unattached,
};
use super::super::seqpacket;
use super::{Attachment, connect_to, hangup_reason, lock_connection};
use crate::error::Error;
use crate::internal_fd::InternalFd;
use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::io;
use std::path::Path;

/// A connection of such a process, and of those that it forks, which have it, too. The stack counts it among those who are there, it takes no place, and it leads in from wherever a
/// process has gone since: into another root directory, or to other rights.
#[derive(Debug)]
pub struct UnattachedProcess(InternalFd);

impl UnattachedProcess {
    /// Comes to the stack whose door is at `path`. Nothing is waited for.
    ///
    /// # Errors
    /// Nobody is there.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let io = |e| Error::io(format!("stack at {}", path.display()), e);
        let connection = connect_to(path).map_err(io)?;
        send_hello(&connection).map_err(io)?;
        Ok(Self(InternalFd::new(connection)))
    }

    /// Goes on with the connection that the program before left to this one ([`Guest::followed`], [`Process::followed`]).
    ///
    /// # Errors
    /// The stack is gone, or this is no connection to one.
    pub fn from_connection(connection: OwnedFd) -> Result<Self, Error> {
        let pidfd = self_pidfd().map_err(|e| Error::io("descriptor of this process", e))?;
        seqpacket::send(&connection, &[unattached::IDENTIFY], &[pidfd.as_fd()])
            .map_err(|_| Error::StackGone)?;
        Ok(Self(InternalFd::new(connection)))
    }

    /// Its connection.
    pub fn connection_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// See [`OwnFd::make_way`].
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn relocate_from(&self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        self.0.relocate_from(number)
    }

    /// Attaches, as [`Process::connect`] does. Several processes may do so over one such connection, at the same time.
    ///
    /// # Errors
    /// As [`Process::connect`].
    pub fn attach(&self) -> Result<Attachment, Error> {
        let (process_end, broker_end) =
            seqpacket::pair().map_err(|e| Error::io("connection for a process", e))?;
        self.send(unattached::ATTACH, &broker_end).map_err(|_| self.hangup_reason())?;
        drop(broker_end);
        Attachment::from_connection(process_end)
    }

    /// A connection for a program that this process is going to start and that may not be able to open the door, as it runs with other rights or in another root directory. It comes as the
    /// user that this process is now. To be inherited; close-on-exec until that is changed.
    ///
    /// # Errors
    /// No descriptors, or the stack is gone.
    pub fn successor_connection(&self) -> Result<InternalFd, Error> {
        open_successor(|broker_end| {
            self.send(unattached::SUCCESSOR, &broker_end).map_err(|_| self.hangup_reason())
        })
    }

    /// A message with a descriptor.
    pub(in super::super) fn send(&self, kind: u8, descriptor: &OwnedFd) -> io::Result<()> {
        seqpacket::send(&self.0, &[kind], &[descriptor.as_fd()])
    }

    /// Why the stack has hung up.
    fn hangup_reason(&self) -> Error {
        hangup_reason(&self.0, &mut seqpacket::buffer())
    }
}

impl Attachment {
    /// As [`Guest::followed`], for a program that keeps nothing of what this process holds.
    ///
    /// # Errors
    /// As there.
    pub fn successor_connection(&self) -> Result<InternalFd, Error> {
        open_successor(|broker_end| {
            match lock_connection(&self.connection)
                .request(&ControlRequest::Successor, &[broker_end.as_fd()])?
                .0
            {
                ControlReply::Done => Ok(()),
                _ => Err(Error::Refused(Refusal::Malformed)),
            }
        })
    }
}

fn open_successor(send: impl FnOnce(OwnedFd) -> Result<(), Error>) -> Result<InternalFd, Error> {
    let io = |e| Error::io("connection for a program", e);
    let (process_end, broker_end) = seqpacket::pair().map_err(io)?;
    send(broker_end)?;
    // For the program, which may not know the library, and so that somebody is there until it has begun.
    send_hello(&process_end).map_err(io)?;
    Ok(InternalFd::new(process_end))
}

/// The first word.
fn send_hello(connection: &OwnedFd) -> io::Result<()> {
    let hello = Hello { magic: MAGIC_UNATTACHED, version: PROTOCOL_VERSION, domain: String::new() };
    seqpacket::send(connection, &encode(0, &hello), &[self_pidfd()?.as_fd()])
}

fn self_pidfd() -> io::Result<OwnedFd> {
    Ok(pidfd_open(getpid(), PidfdFlags::empty())?)
}
