//! Domains for simulated processes, whose requests call the stack's shard directly.

use super::client::{Client, ClientParts};
use super::control::{
    AdmittedClient, BrokerReply, BrokerRequest, ChannelReply, ChannelRequest, ControlPath, SameThread,
};
use crate::error::Error;
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// A domain as the broker would have created it.
#[derive(Clone)]
pub struct SimulatedDomain {
    server: SameThread,
    domain: u8,
}

impl ControlPath for SimulatedDomain {
    fn call(&mut self, client: usize, request: ChannelRequest) -> Result<ChannelReply, Error> {
        // Cannot truncate: client numbers have 16 bits.
        let client = client as u32;
        match self.server.call_for_broker(match request {
            // A process would close its connection to the broker.
            ChannelRequest::Detach => BrokerRequest::Reap { domain: self.domain, client },
            request => BrokerRequest::Call { domain: self.domain, client, request },
        })? {
            BrokerReply::Reply(reply) => Ok(reply),
            _ => Ok(ChannelReply::Done),
        }
    }
}

impl SameThread {
    /// Creates a domain and its first client.
    ///
    /// # Errors
    /// Returns an error if `channel.domains_max` is reached.
    pub fn open_domain(&self) -> Result<(SimulatedDomain, ClientParts), Error> {
        let (wake, client_wake) = wake_pair()?;
        match self.call_for_broker(BrokerRequest::OpenDomain { wake })? {
            BrokerReply::Opened { domain, region, wake, client } => {
                let AdmittedClient { number, memory } = client;
                let parts = ClientParts { region, memory, stack_wake: wake, client_wake, client: number };
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
    /// Admits another client, which uses the same mapping as `sibling`.
    ///
    /// # Errors
    /// Returns an error if `channel.clients_max` is reached.
    pub fn admit(&self, sibling: &Client) -> Result<Client, Error> {
        let (wake, client_wake) = wake_pair()?;
        match self.server.call_for_broker(BrokerRequest::Admit { domain: self.domain, wake })? {
            BrokerReply::Admitted(AdmittedClient { number, memory }) => {
                sibling.sibling(number, &memory, client_wake, Box::new(self.clone()))
            }
            _ => Err(Error::application("channel: channel.clients_max clients are attached")),
        }
    }

    /// Admits the client of a child after fork(2). It owns what the parent owned at the fork.
    ///
    /// # Errors
    /// Returns an error if `channel.clients_max` is reached.
    pub fn fork(&self, parent: &Client) -> Result<Client, Error> {
        let (wake, client_wake) = wake_pair()?;
        let request = BrokerRequest::Fork { domain: self.domain, parent: parent.number(), kept: None, wake };
        match self.server.call_for_broker(request)? {
            BrokerReply::Admitted(AdmittedClient { number, memory }) => {
                let mut child = parent.sibling(number, &memory, client_wake, Box::new(self.clone()))?;
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
