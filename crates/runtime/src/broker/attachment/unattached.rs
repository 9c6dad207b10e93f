//! Processes that may attach to the stack later. Most processes that a shell starts never do.

use super::super::message::{
    ControlReply, ControlRequest, Hello, MAGIC_UNATTACHED, PROTOCOL_VERSION, Refusal, encode, unattached,
};
use super::super::seqpacket;
use super::super::unreachable::UnreachableStack;
use super::{Attachment, connect_to, hangup_reason, is_io_mfile, lock_connection, request_again_if_short};
use crate::error::Error;
use crate::internal_fd::InternalFd;
use crate::raised_limit::with_raised_limit;
use rustix::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::io;
use std::path::Path;

/// A connection of a process that is not attached; the children that it forks share it. The stack lists the
/// process, but gives it no clients. The connection can attach even after the process changed its root
/// directory or its user.
#[derive(Debug)]
pub struct UnattachedProcess(InternalFd);

impl UnattachedProcess {
    /// Connects to the broker at `path`. Does not wait for a reply.
    ///
    /// # Errors
    /// Nobody listens there.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let unreachable = |e| UnreachableStack::error(path, e);
        let connection = connect_to(path).map_err(unreachable)?;
        send_hello(&connection).map_err(unreachable)?;
        Self::of_connection(connection)
    }

    fn of_connection(connection: OwnedFd) -> Result<Self, Error> {
        InternalFd::new(connection).map(Self).map_err(|e| Error::io("connection to the stack", e))
    }

    /// Takes over the connection that the previous program created for this one
    /// ([`UnattachedProcess::successor_connection`], [`Attachment::successor_connection`]).
    ///
    /// # Errors
    /// The stack is gone, or `connection` is not a connection to a broker.
    pub fn from_connection(connection: OwnedFd) -> Result<Self, Error> {
        let pidfd = self_pidfd().map_err(|e| Error::io("pidfd of this process", e))?;
        seqpacket::send(&connection, &[unattached::IDENTIFY], &[pidfd.as_fd()])
            .map_err(|_| Error::StackGone)?;
        Self::of_connection(connection)
    }

    /// Returns the descriptor of the connection.
    pub fn connection_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// See [`InternalFd::relocate_from`].
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn relocate_from(&self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        self.0.relocate_from(number)
    }

    /// Attaches, as [`Attachment::connect`] does. Several processes may attach over one connection at the
    /// same time.
    ///
    /// # Errors
    /// As [`Attachment::connect`].
    pub fn attach(&self) -> Result<Attachment, Error> {
        request_again_if_short(|is_short| {
            let ends = with_raised_limit(is_io_mfile, seqpacket::pair);
            let (process_end, broker_end) = ends.map_err(|e| Error::io("connection for a process", e))?;
            self.send(unattached::ATTACH, &broker_end).map_err(|_| self.hangup_reason())?;
            drop(broker_end);
            Attachment::greet(process_end, "", true, is_short).map_err(|error| match error {
                // The broker may have refused this process after the message above was sent, but before
                // reading it.
                Error::StackGone => self.hangup_reason(),
                error => error,
            })
        })
    }

    /// Creates a connection for a program that this process is about to execute and that may not be able to
    /// open the broker's socket, because it runs as another user or in another root directory. The program
    /// attaches as the current user of this process. The descriptor is close-on-exec; the caller clears that
    /// before the program inherits it.
    ///
    /// # Errors
    /// The process has no descriptor left, or the stack is gone.
    pub fn successor_connection(&self) -> Result<InternalFd, Error> {
        open_successor(|broker_end| {
            self.send(unattached::SUCCESSOR, &broker_end).map_err(|_| self.hangup_reason())
        })
    }

    /// Sends a message and its descriptor.
    pub(in super::super) fn send(&self, kind: u8, descriptor: &OwnedFd) -> io::Result<()> {
        seqpacket::send(&self.0, &[kind], &[descriptor.as_fd()])
    }

    /// Returns why the stack closed the connection.
    fn hangup_reason(&self) -> Error {
        hangup_reason(&self.0, &mut seqpacket::buffer())
    }
}

impl Attachment {
    /// As [`UnattachedProcess::successor_connection`], for a program that inherits none of the sockets of
    /// this process.
    ///
    /// # Errors
    /// As [`UnattachedProcess::successor_connection`].
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
    // On behalf of the program, which may not use the library, and so that the entry has a process until the
    // program starts.
    send_hello(&process_end).map_err(io)?;
    InternalFd::new(process_end).map_err(|e| io(e.into()))
}

/// Sends the first message.
fn send_hello(connection: &OwnedFd) -> io::Result<()> {
    let hello = Hello { magic: MAGIC_UNATTACHED, version: PROTOCOL_VERSION, domain: String::new() };
    seqpacket::send(connection, &encode(0, &hello), &[self_pidfd()?.as_fd()])
}

fn self_pidfd() -> io::Result<OwnedFd> {
    Ok(pidfd_open(getpid(), PidfdFlags::empty())?)
}
