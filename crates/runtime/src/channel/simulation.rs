//! Domains of processes without processes, for simulations: the stack's shard is asked directly, and whoever calls is the client.

use super::client::{Client, ClientParts};
use super::control::{BrokerReply, BrokerRequest, ChannelReply, ChannelRequest, ControlPath, SameThread};
use crate::error::Error;
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// A domain as the door would have made it.
#[derive(Clone)]
pub struct SimulatedDomain {
    server: SameThread,
    domain: u8,
}

impl ControlPath for SimulatedDomain {
    fn call(&mut self, client: usize, request: ChannelRequest) -> Result<ChannelReply, Error> {
        // Cannot truncate: clients are 64 at the most.
        let client = client as u32;
        match self.server.call_for_broker(match request {
            // What its connection to the door would say by hanging up.
            ChannelRequest::Detach => BrokerRequest::Reap { domain: self.domain, client },
            request => BrokerRequest::Call { domain: self.domain, client, request },
        })? {
            BrokerReply::Reply(reply) => Ok(reply),
            _ => Ok(ChannelReply::Done),
        }
    }
}

impl SameThread {
    /// A new domain, and its first client.
    ///
    /// # Errors
    /// There are `channel.domains_max`.
    pub fn open_domain(&self) -> Result<(SimulatedDomain, ClientParts), Error> {
        let (wake, client_wake) = wake_pair()?;
        match self.call_for_broker(BrokerRequest::OpenDomain { wake })? {
            BrokerReply::Opened { domain, region, wake, client } => {
                let parts = ClientParts { region, stack_wake: wake, client_wake, client };
                Ok((SimulatedDomain { server: self.clone(), domain }, parts))
            }
            _ => Err(Error::application("channel: channel.domains_max domains exist")),
        }
    }

    fn call_for_broker(&self, request: BrokerRequest) -> Result<BrokerReply, Error> {
        let mut shard = self.0.lock().map_err(|_| Error::application("channel: the shard is gone"))?;
        let now = shard.now();
        Ok(shard.with(now, |server, cx| server.handle_broker_request(cx, request)))
    }
}

impl SimulatedDomain {
    /// Another client of it, of which all are in one mapping.
    ///
    /// # Errors
    /// There are `channel.clients_max`.
    pub fn admit(&self, like: &Client) -> Result<Client, Error> {
        let (wake, client_wake) = wake_pair()?;
        match self.server.call_for_broker(BrokerRequest::Admit { domain: self.domain, wake })? {
            BrokerReply::Admitted(number) => Ok(like.sibling(number, client_wake, Box::new(self.clone()))),
            _ => Err(Error::application("channel: channel.clients_max clients are attached")),
        }
    }

    /// The same client after fork(2), in the child: it holds what the parent holds, from before the fork on.
    ///
    /// # Errors
    /// There are `channel.clients_max`.
    pub fn fork(&self, parent: &Client) -> Result<Client, Error> {
        let (wake, client_wake) = wake_pair()?;
        let request = BrokerRequest::Fork { domain: self.domain, parent: parent.number(), kept: None, wake };
        match self.server.call_for_broker(request)? {
            BrokerReply::Admitted(number) => {
                let mut child = parent.sibling(number, client_wake, Box::new(self.clone()));
                child.inherit(parent);
                Ok(child)
            }
            _ => Err(Error::application("channel: channel.clients_max clients are attached")),
        }
    }
}

fn wake_pair() -> Result<(OwnedFd, OwnedFd), Error> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(|e| Error::io("socket pair that wakes a client", e))
}
