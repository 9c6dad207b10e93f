//! One end of a memif without a thread and without a socket that others could find, for a fuzzer that plays the peer. Nothing waits, so an input does the same each
//! time. What is done with messages and rings is the device's own code.

use super::config::{MemifConfig, Role};
use super::control::{ClientPeer, ControlThread, ServerPeer};
use super::control_channel::ControlChannel;
use super::handshake::ServerHandshake;
use super::signal::Signaller;
use super::{ControlThreadGuard, MemifShared, MemifStats, build_queues};
use ginnel_stack::device::Device;
use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

/// A device whose peer is the caller.
pub struct FuzzDevice {
    control: ControlThread,
    peers: PeerSessions,
    queues: Vec<Device>,
    shared: Arc<MemifShared>,
}

/// Whom the device talks to.
enum PeerSessions {
    Clients(Vec<ClientPeer>),
    Server(Option<ServerPeer>),
}

impl FuzzDevice {
    /// A device that has not met anybody.
    ///
    /// # Errors
    /// No descriptors.
    pub fn new(config: &MemifConfig) -> io::Result<Self> {
        let shared = Arc::new(MemifShared::new()?);
        let guard = Arc::new(ControlThreadGuard { shared: shared.clone(), thread: Mutex::new(None) });
        // The kernel takes its time to take one away, so all have the same.
        static SIGNALLER: Mutex<Option<Arc<Signaller>>> = Mutex::new(None);
        let (queues, control) = build_queues(config, &shared, &guard, || {
            let mut shared = SIGNALLER.lock().unwrap_or_else(PoisonError::into_inner);
            match &*shared {
                Some(signaller) => Ok(signaller.clone()),
                None => Ok(shared.insert(Arc::new(Signaller::new()?)).clone()),
            }
        })?;
        let peers = match config.role {
            Role::Server => PeerSessions::Clients(Vec::new()),
            Role::Client => PeerSessions::Server(None),
        };
        Ok(Self { control, peers, queues, shared })
    }

    /// Somebody comes: a client that has connected to this server, or the server that this client has found. Returns their end of the control channel, a
    /// SEQPACKET socket that does not block.
    ///
    /// # Errors
    /// No descriptors.
    pub fn connect_peer(&mut self) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let channel = ControlChannel::new(ours);
        match &mut self.peers {
            PeerSessions::Clients(clients) => {
                let (handshake, hello) = ServerHandshake::new(&self.control.config);
                channel.send(&hello, None)?;
                clients.push(ClientPeer::new(channel, handshake));
            }
            PeerSessions::Server(server) => {
                if let Some(before) = server.replace(ServerPeer::new(channel, &self.control.config)) {
                    self.control.close_server(before);
                }
            }
        }
        Ok(theirs)
    }

    /// Reads and answers what has come over control channels. Returns how many peers stay.
    pub fn process_control(&mut self) -> usize {
        match &mut self.peers {
            PeerSessions::Clients(clients) => {
                self.control.service_clients(clients);
                clients.len()
            }
            PeerSessions::Server(server) => {
                if let Some(mut present) = server.take() {
                    if self.control.service_server(&mut present) {
                        *server = Some(present);
                    } else {
                        self.control.close_server(present);
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
