//! One end of a memif without a thread and without a socket that others could find, for a fuzzer that plays the peer. Nothing waits, so an input does the same each
//! time. What is done with messages and rings is the device's own code.

use super::channel::Channel;
use super::config::{MemifConfig, Role};
use super::control::{Client, Control, Server};
use super::handshake::ServerHandshake;
use super::signal::Signaller;
use super::{Guard, MemifStats, Shared, parts};
use ginnel_stack::device::Device;
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

/// A device whose peer is the caller.
pub struct Exposed {
    control: Control,
    peers: Peers,
    queues: Vec<Device>,
    shared: Arc<Shared>,
}

/// Whom the device talks to.
enum Peers {
    Clients(Vec<Client>),
    Server(Option<Server>),
}

impl Exposed {
    /// A device that has not met anybody.
    ///
    /// # Errors
    /// No descriptors.
    pub fn new(config: &MemifConfig) -> io::Result<Self> {
        let shared = Arc::new(Shared::new()?);
        let guard = Arc::new(Guard { shared: shared.clone(), thread: Mutex::new(None) });
        // The kernel takes its time to take one away, so all have the same.
        static SIGNALLER: Mutex<Option<Arc<Signaller>>> = Mutex::new(None);
        let (queues, control) = parts(config, &shared, &guard, || {
            let mut shared = SIGNALLER.lock().unwrap_or_else(PoisonError::into_inner);
            match &*shared {
                Some(signaller) => Ok(signaller.clone()),
                None => Ok(shared.insert(Arc::new(Signaller::new()?)).clone()),
            }
        })?;
        let peers = match config.role {
            Role::Server => Peers::Clients(Vec::new()),
            Role::Client => Peers::Server(None),
        };
        Ok(Self { control, peers, queues, shared })
    }

    /// Somebody comes: a client that has connected to this server, or the server that this client has found. Returns their end of the control channel, a
    /// SEQPACKET socket that does not block.
    ///
    /// # Errors
    /// No descriptors.
    pub fn meet(&mut self) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let channel = Channel::new(ours);
        match &mut self.peers {
            Peers::Clients(clients) => {
                let (handshake, hello) = ServerHandshake::new(&self.control.config);
                channel.send(&hello, None)?;
                clients.push(Client::new(channel, handshake));
            }
            Peers::Server(server) => {
                if let Some(before) = server.replace(Server::new(channel, &self.control.config)) {
                    self.control.let_go_of_server(before);
                }
            }
        }
        Ok(theirs)
    }

    /// Reads and answers what has come over control channels. Returns how many peers stay.
    pub fn attend(&mut self) -> usize {
        match &mut self.peers {
            Peers::Clients(clients) => {
                self.control.attend_all(clients);
                clients.len()
            }
            Peers::Server(server) => {
                if let Some(mut present) = server.take() {
                    if self.control.attend_server(&mut present) {
                        *server = Some(present);
                    } else {
                        self.control.let_go_of_server(present);
                    }
                }
                usize::from(server.is_some())
            }
        }
    }

    /// The first queue.
    pub fn device(&mut self) -> &mut Device {
        &mut self.queues[0]
    }

    /// The device's counters.
    pub fn stats(&self) -> &MemifStats {
        &self.shared.stats
    }

    /// Whether a peer is connected.
    pub fn is_up(&self) -> bool {
        self.shared.up.load(Ordering::Acquire)
    }
}
