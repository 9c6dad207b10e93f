//! One end of a memif without a thread and without a public socket, for a fuzzer that acts as the peer. No
//! call waits, so an input has the same effect every time. Messages and rings are processed by the code of
//! the device itself.

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

/// The connected peers.
enum PeerSessions {
    Clients(Vec<ClientPeer>),
    Server(Option<ServerPeer>),
}

impl FuzzDevice {
    /// Creates a device without a peer.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new(config: &MemifConfig) -> io::Result<Self> {
        let shared = Arc::new(MemifShared::new()?);
        let guard = Arc::new(ControlThreadGuard { shared: shared.clone(), thread: Mutex::new(None) });
        // The kernel takes a while to release a signaller, so all devices share one.
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

    /// Connects a peer: a client to this server, or the server to this client. Returns the peer's end of the
    /// control channel, a nonblocking SEQPACKET socket.
    ///
    /// # Errors
    /// The process has no descriptor left.
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

    /// Reads and answers the messages of all control channels. Returns the number of peers that stay.
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

    /// Returns the first queue.
    pub fn device(&mut self) -> &mut Device {
        &mut self.queues[0]
    }

    /// Returns the device's counters.
    pub fn stats(&self) -> &MemifStats {
        &self.shared.stats
    }

    /// Returns whether a peer is connected.
    pub fn is_up(&self) -> bool {
        self.shared.up.load(Ordering::Acquire)
    }
}
