//! Sockets that travel between processes in messages over Unix sockets.

use super::super::message::{Answer, Ask, Held, Refusal};
use super::{Process, locked};
use crate::door::line;
use crate::error::Error;
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::sockopt::socket_cookie;

impl Process {
    /// A descriptor for a socket (on several shards, for a listener): as long as there is a copy of it in any process, or on its way to one, the socket is
    /// held. Whoever receives it [resolves](Process::resolve) it.
    ///
    /// # Errors
    /// This process does not hold one of the things; too many are on their way; the stack is gone.
    pub fn share(&self, things: &[Held]) -> Result<OwnedFd, Error> {
        let io = |e| Error::io("descriptor of a socket", e);
        let (ours, stacks) = line::pair().map_err(io)?;
        let cookie = socket_cookie(&ours).map_err(|e| io(e.into()))?;
        match locked(&self.line).ask(&Ask::Share(cookie, things.to_vec()), &[stacks.as_fd()])?.0 {
            Answer::Done => Ok(ours),
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }

    /// What a descriptor that was received stands for; this process holds it from now on. The descriptor may be closed then, or kept.
    ///
    /// # Errors
    /// [`Refusal::Unknown`]: it is another kind of descriptor, or of another stack or domain.
    pub fn resolve(&mut self, descriptor: impl AsFd) -> Result<Vec<Held>, Error> {
        // Whatever has no cookie is no socket.
        let cookie = socket_cookie(descriptor).map_err(|_| Error::Refused(Refusal::Unknown))?;
        let answer = locked(&self.line).ask(&Ask::Resolve(cookie), &[])?.0;
        match answer {
            Answer::Things(things) => {
                self.adopt(&things);
                Ok(things)
            }
            _ => Err(Error::Refused(Refusal::Malformed)),
        }
    }
}
