//! Passing sockets between processes in messages over Unix sockets (`SCM_RIGHTS`).

use super::super::message::{ControlReply, ControlRequest, GlobalSocketId, ProxyContents, Refusal};
use super::inherit::adopt;
use super::{Attachment, lock_connection};
use crate::broker::seqpacket;
use crate::channel::Client;
use crate::error::Error;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::sockopt::socket_cookie;

impl Attachment {
    /// Creates a proxy descriptor for a socket, or for a listener on several shards. The descriptor
    /// owns the sockets as long as a process, or a message in flight, has a copy of it. The receiver
    /// [resolves](Attachment::resolve) it. A program that does not use this library reads end-of-file
    /// from it.
    ///
    /// # Errors
    /// This process does not own one of the sockets; the domain has too many proxy descriptors; the stack is
    /// gone.
    pub fn share(&self, sockets: &[GlobalSocketId]) -> Result<OwnedFd, Error> {
        let (process_end, broker_end) = seqpacket::pair().map_err(io)?;
        let cookie = socket_cookie(&process_end).map_err(|e| io(e.into()))?;
        self.request_share(cookie, sockets, &[], &broker_end)?;
        Ok(process_end)
    }

    /// As [`Attachment::share`], with metadata for the receiver. If `passed` is a socket of the kernel that
    /// is sent in place of the proxy descriptor, the receiver resolves that socket; the returned descriptor
    /// owns the sockets and must be kept as long as `passed` may be resolved.
    ///
    /// # Errors
    /// As [`Attachment::share`].
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
        let contents = ProxyContents { sockets: sockets.to_vec(), metadata: metadata.to_vec() };
        let request = ControlRequest::Share(cookie, contents);
        match lock_connection(&self.connection).request(&request, &[broker_end.as_fd()])?.0 {
            ControlReply::Done => Ok(()),
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }

    /// Returns the sockets that a received descriptor owns; this process is an owner of them from now on. The
    /// descriptor may be closed afterwards.
    ///
    /// # Errors
    /// [`Refusal::Unknown`]: `descriptor` is no proxy descriptor, or belongs to another stack or domain.
    pub fn resolve(&mut self, descriptor: impl AsFd) -> Result<Vec<GlobalSocketId>, Error> {
        let ProxyContents { sockets, .. } = self.request_resolve(descriptor)?;
        self.adopt(&sockets);
        Ok(sockets)
    }

    /// As [`Attachment::resolve`], for clients that were [taken](Attachment::take_client). Returns the
    /// metadata, too.
    ///
    /// # Errors
    /// As [`Attachment::resolve`].
    pub fn resolve_with(
        &self,
        clients: &mut [Client],
        descriptor: impl AsFd,
    ) -> Result<(Vec<GlobalSocketId>, Vec<u8>), Error> {
        let ProxyContents { sockets, metadata } = self.request_resolve(descriptor)?;
        adopt(clients, &sockets);
        Ok((sockets, metadata))
    }

    fn request_resolve(&self, descriptor: impl AsFd) -> Result<ProxyContents, Error> {
        // Only sockets have a cookie.
        let cookie = socket_cookie(descriptor).map_err(|_| Error::Refused(Refusal::Unknown))?;
        let reply = lock_connection(&self.connection).request(&ControlRequest::Resolve(cookie), &[])?.0;
        match reply {
            ControlReply::Resolved(contents) => Ok(contents),
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }
}

fn io(e: std::io::Error) -> Error {
    Error::io("proxy descriptor", e)
}
