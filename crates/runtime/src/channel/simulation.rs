//! Domains of processes without processes, for simulations: the stack's shard is asked directly, and whoever calls is the client.

use super::client::{Client, ClientParts};
use super::control::{Control, Errand, Outcome, Reply, Request, SameThread};
use crate::error::Error;
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// A domain as the door would have made it.
#[derive(Clone)]
pub struct SimulatedDomain {
    server: SameThread,
    domain: u8,
}

impl Control for SimulatedDomain {
    fn ask(&mut self, client: usize, request: Request) -> Result<Reply, Error> {
        // Cannot truncate: clients are 64 at the most.
        let client = client as u32;
        match self.server.run(match request {
            // What its connection to the door would say by hanging up.
            Request::Detach => Errand::Bury { domain: self.domain, client },
            request => Errand::Ask { domain: self.domain, client, request },
        })? {
            Outcome::Reply(reply) => Ok(reply),
            _ => Ok(Reply::Done),
        }
    }
}

impl SameThread {
    /// A new domain, and its first client.
    ///
    /// # Errors
    /// There are `channel.domains_max`.
    pub fn open_domain(&self) -> Result<(SimulatedDomain, ClientParts), Error> {
        let (wake, its) = wake_pair()?;
        match self.run(Errand::Open { wake })? {
            Outcome::Opened { domain, region, wake, client } => {
                let parts = ClientParts { region, stack: wake, wake: its, number: client };
                Ok((SimulatedDomain { server: self.clone(), domain }, parts))
            }
            _ => Err(Error::application("channel: as many domains as channel.domains_max")),
        }
    }

    fn run(&self, errand: Errand) -> Result<Outcome, Error> {
        let mut shard = self.0.lock().map_err(|_| Error::application("channel: the shard is gone"))?;
        let now = shard.now();
        Ok(shard.with(now, |server, cx| server.run_errand(cx, errand)))
    }
}

impl SimulatedDomain {
    /// Another client of it, of which all are in one mapping.
    ///
    /// # Errors
    /// There are `channel.clients_max`.
    pub fn admit(&self, like: &Client) -> Result<Client, Error> {
        let (wake, its) = wake_pair()?;
        match self.server.run(Errand::Admit { domain: self.domain, wake })? {
            Outcome::Seat(number) => Ok(like.beside(number, its, Box::new(self.clone()))),
            _ => Err(Error::application("channel: as many clients as channel.clients_max")),
        }
    }

    /// The same client after fork(2), in the child: it holds what the parent holds, from before the fork on.
    ///
    /// # Errors
    /// There are `channel.clients_max`.
    pub fn fork(&self, parent: &Client) -> Result<Client, Error> {
        let (wake, its) = wake_pair()?;
        let errand = Errand::Fork { domain: self.domain, parent: parent.number(), kept: None, wake };
        match self.server.run(errand)? {
            Outcome::Seat(number) => {
                let mut child = parent.beside(number, its, Box::new(self.clone()));
                child.inherit(parent);
                Ok(child)
            }
            _ => Err(Error::application("channel: as many clients as channel.clients_max")),
        }
    }
}

fn wake_pair() -> Result<(OwnedFd, OwnedFd), Error> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|e| Error::io("what wakes a client", e))
}
