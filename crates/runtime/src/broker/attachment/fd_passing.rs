//! Sockets that travel between processes in messages over Unix sockets.

use super::super::message::{ControlReply, ControlRequest, GlobalSocketId, Refusal};
use super::inherit::adopt;
use super::{Attachment, lock_connection};
use crate::broker::seqpacket;
use crate::channel::Client;
use crate::error::Error;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::sockopt::socket_cookie;

impl Attachment {
    /// A descriptor for a socket (on several shards, for a listener): as long as there is a copy of it in any process, or on its way to one, the socket is
    /// held. Whoever receives it [resolves](Process::resolve) it. A program that does not know this reads the end of a stream from it.
    ///
    /// # Errors
    /// This process does not hold one of the things; too many are on their way; the stack is gone.
    pub fn share(&self, sockets: &[GlobalSocketId]) -> Result<OwnedFd, Error> {
        let (process_end, broker_end) = seqpacket::pair().map_err(io)?;
        let cookie = socket_cookie(&process_end).map_err(|e| io(e.into()))?;
        self.request_share(cookie, sockets, &[], &broker_end)?;
        Ok(process_end)
    }

    /// The same with a note for whoever receives it, and, if `travels` is a socket of the kernel that travels instead, by that: then the descriptor that is returned holds
    /// the things, wherever the other is, and has to be kept.
    ///
    /// # Errors
    /// As [`Process::share`].
    pub fn share_with(
        &self,
        sockets: &[GlobalSocketId],
        metadata: &[u8],
        passed: Option<BorrowedFd<'_>>,
    ) -> Result<OwnedFd, Error> {
        let (process_end, broker_end) = seqpacket::pair().map_err(io)?;
        let cookie = socket_cookie(passed.unwrap_or(process_end.as_fd())).map_err(|e| io(e.into()))?;
        self.request_share(cookie, sockets, metadata, &broker_end)?;
        Ok(process_end)
    }

    fn request_share(
        &self,
        cookie: u64,
        sockets: &[GlobalSocketId],
        metadata: &[u8],
        broker_end: &OwnedFd,
    ) -> Result<(), Error> {
        let request = ControlRequest::Share(cookie, sockets.to_vec(), metadata.to_vec());
        match lock_connection(&self.connection).request(&request, &[broker_end.as_fd()])?.0 {
            ControlReply::Done => Ok(()),
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }

    /// What a descriptor that was received stands for; this process holds it from now on. The descriptor may be closed then, or kept.
    ///
    /// # Errors
    /// [`Refusal::Unknown`]: it is another kind of descriptor, or of another stack or domain.
    pub fn resolve(&mut self, descriptor: impl AsFd) -> Result<Vec<GlobalSocketId>, Error> {
        let (sockets, _) = self.request_resolve(descriptor)?;
        self.adopt(&sockets);
        Ok(sockets)
    }

    /// The same for clients that were [taken](Process::take_client), with the note of whoever shared it.
    ///
    /// # Errors
    /// As [`Process::resolve`].
    pub fn resolve_with(
        &self,
        clients: &mut [Client],
        descriptor: impl AsFd,
    ) -> Result<(Vec<GlobalSocketId>, Vec<u8>), Error> {
        let (sockets, metadata) = self.request_resolve(descriptor)?;
        adopt(clients, &sockets);
        Ok((sockets, metadata))
    }

    fn request_resolve(&self, descriptor: impl AsFd) -> Result<(Vec<GlobalSocketId>, Vec<u8>), Error> {
        // Whatever has no cookie is no socket.
        let cookie = socket_cookie(descriptor).map_err(|_| Error::Refused(Refusal::Unknown))?;
        let answer = lock_connection(&self.connection).request(&ControlRequest::Resolve(cookie), &[])?.0;
        match answer {
            ControlReply::Resolved(sockets, metadata) => Ok((sockets, metadata)),
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }
}

fn io(e: std::io::Error) -> Error {
    Error::io("descriptor of a socket", e)
}
