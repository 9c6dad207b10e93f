//! Sockets that travel between processes in messages over Unix sockets.

use super::super::message::{Answer, Ask, Held, Refusal};
use super::heirs::adopt;
use super::{Process, locked};
use crate::channel::Client;
use crate::door::line;
use crate::error::Error;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::sockopt::socket_cookie;

impl Process {
    /// A descriptor for a socket (on several shards, for a listener): as long as there is a copy of it in any process, or on its way to one, the socket is
    /// held. Whoever receives it [resolves](Process::resolve) it. A program that does not know this reads the end of a stream from it.
    ///
    /// # Errors
    /// This process does not hold one of the things; too many are on their way; the stack is gone.
    pub fn share(&self, things: &[Held]) -> Result<OwnedFd, Error> {
        let (ours, stacks) = line::pair().map_err(io)?;
        let cookie = socket_cookie(&ours).map_err(|e| io(e.into()))?;
        self.ask_to_share(cookie, things, &[], &stacks)?;
        Ok(ours)
    }

    /// The same with a note for whoever receives it, and, if `travels` is a socket of the kernel that travels instead, by that: then the descriptor that is returned holds
    /// the things, wherever the other is, and has to be kept.
    ///
    /// # Errors
    /// As [`Process::share`].
    pub fn share_with(
        &self,
        things: &[Held],
        note: &[u8],
        travels: Option<BorrowedFd<'_>>,
    ) -> Result<OwnedFd, Error> {
        let (ours, stacks) = line::pair().map_err(io)?;
        let cookie = socket_cookie(travels.unwrap_or(ours.as_fd())).map_err(|e| io(e.into()))?;
        self.ask_to_share(cookie, things, note, &stacks)?;
        Ok(ours)
    }

    fn ask_to_share(&self, cookie: u64, things: &[Held], note: &[u8], stacks: &OwnedFd) -> Result<(), Error> {
        let ask = Ask::Share(cookie, things.to_vec(), note.to_vec());
        match locked(&self.line).ask(&ask, &[stacks.as_fd()])?.0 {
            Answer::Done => Ok(()),
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }

    /// What a descriptor that was received stands for; this process holds it from now on. The descriptor may be closed then, or kept.
    ///
    /// # Errors
    /// [`Refusal::Unknown`]: it is another kind of descriptor, or of another stack or domain.
    pub fn resolve(&mut self, descriptor: impl AsFd) -> Result<Vec<Held>, Error> {
        let (things, _) = self.ask_to_resolve(descriptor)?;
        self.adopt(&things);
        Ok(things)
    }

    /// The same for clients that were [taken](Process::take_client), with the note of whoever shared it.
    ///
    /// # Errors
    /// As [`Process::resolve`].
    pub fn resolve_for(
        &self,
        clients: &mut [Client],
        descriptor: impl AsFd,
    ) -> Result<(Vec<Held>, Vec<u8>), Error> {
        let (things, note) = self.ask_to_resolve(descriptor)?;
        adopt(clients, &things);
        Ok((things, note))
    }

    fn ask_to_resolve(&self, descriptor: impl AsFd) -> Result<(Vec<Held>, Vec<u8>), Error> {
        // Whatever has no cookie is no socket.
        let cookie = socket_cookie(descriptor).map_err(|_| Error::Refused(Refusal::Unknown))?;
        let answer = locked(&self.line).ask(&Ask::Resolve(cookie), &[])?.0;
        match answer {
            Answer::Things(things, note) => Ok((things, note)),
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }
}

fn io(e: std::io::Error) -> Error {
    Error::io("descriptor of a socket", e)
}
