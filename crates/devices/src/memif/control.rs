//! The control thread: listens or connects, performs handshakes, and passes the rings of connections to the
//! halves of the device. It sleeps until a peer connects, sends or disconnects, and never waits for a peer.

use super::config::{MemifConfig, Role};
use super::control_channel::{ChannelEvent, ControlChannel};
use super::handshake::{ClientHandshake, HandshakeStep, NegotiatedLink, NegotiatedRing, ServerHandshake};
use super::message::ControlMessage;
use super::ring_slot::{RingSlot, ViolationFlag, Waker};
use super::rx::RxRing;
use super::signal::Signaller;
use super::socket::{MemifListener, connect_to};
use super::tx::{LinkContext, TxRing};
use super::{MemifShared, increment};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Maximum number of simultaneous clients in the handshake; more clients wait in the backlog.
// limit: memif peers in their handshake
const CLIENTS_MAX: usize = 8;
/// Timeout of a handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// Interval at which a client tries to connect to its server. It doubles up to the maximum.
const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// Pause after an error of `accept` that would recur at once.
const ACCEPT_ERROR_PAUSE: Duration = Duration::from_millis(100);

/// The ring slots of one queue.
#[derive(Debug)]
pub(super) struct QueueSlots {
    pub(super) rx: Arc<RingSlot<RxRing>>,
    pub(super) tx: Arc<RingSlot<TxRing>>,
    pub(super) waker: Arc<Waker>,
    pub(super) signaller: Arc<Signaller>,
}

/// The state of the control thread.
#[derive(Debug)]
pub(super) struct ControlThread {
    pub(super) config: Arc<MemifConfig>,
    pub(super) shared: Arc<MemifShared>,
    pub(super) queues: Vec<QueueSlots>,
}

/// A connection that is up.
pub(super) struct Connection {
    violation_flag: Arc<ViolationFlag>,
}

/// Result of reading the messages of a peer.
enum ReadOutcome {
    /// All messages are processed, and the peer stays.
    Open,
    Connected(Connection),
    /// The peer has disconnected or was disconnected. The connection is one that was established just before.
    Closed(Option<Connection>),
}

impl ReadOutcome {
    fn into_closed(self) -> Self {
        match self {
            Self::Open => Self::Closed(None),
            Self::Connected(connection) => Self::Closed(Some(connection)),
            Self::Closed(connection) => Self::Closed(connection),
        }
    }
}

impl ControlThread {
    pub(super) fn run_server(self, listener: MemifListener) {
        let mut clients: Vec<ClientPeer> = Vec::new();
        while !self.is_stopping() {
            let listening = (clients.len() < CLIENTS_MAX).then_some(listener.fd());
            let deadline = clients.iter().filter_map(|client| client.deadline).min();
            self.wait_for_events(
                listening.into_iter().chain(clients.iter().map(|c| c.channel.fd())),
                deadline,
            );
            if listening.is_some() {
                self.accept(&listener, &mut clients);
            }
            self.service_clients(&mut clients);
        }
        for client in &clients {
            self.send_disconnect(&client.channel, "the device is closed");
        }
        self.bring_down();
    }

    /// Processes the messages of all clients, and removes clients that have disconnected.
    pub(super) fn service_clients(&self, clients: &mut Vec<ClientPeer>) {
        let mut busy = clients.iter().any(|client| client.handshake.has_init());
        let mut at = 0;
        while let Some(client) = clients.get_mut(at) {
            if self.service_client(client, busy) {
                busy |= client.handshake.has_init();
                at += 1;
                continue;
            }
            let ClientPeer { channel, handshake, connection, .. } = clients.remove(at);
            self.close_peer((channel, handshake), connection);
        }
    }

    /// Closes a peer. Takes the link down, if the peer was connected, after everything that refers to it was
    /// dropped.
    fn close_peer(&self, peer: impl Sized, connection: Option<Connection>) {
        drop(peer);
        if connection.is_some() {
            self.bring_down();
        }
    }

    fn accept(&self, listener: &MemifListener, clients: &mut Vec<ClientPeer>) {
        match listener.accept() {
            Ok(Some(channel)) => {
                let (handshake, hello) = ServerHandshake::new(&self.config);
                if channel.send(&hello, None).is_ok() {
                    clients.push(ClientPeer::new(channel, handshake));
                }
            }
            Ok(None) => increment(&self.shared.stats.refused),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::warn!(%error, socket = %self.config.socket, "accepting a memif client failed");
                std::thread::sleep(ACCEPT_ERROR_PAUSE);
            }
        }
    }

    /// Processes the messages of a client. Returns whether it stays.
    fn service_client(&self, client: &mut ClientPeer, busy: bool) -> bool {
        if client.connection.as_ref().is_some_and(|c| c.violation_flag.raised.load(Ordering::Acquire)) {
            self.send_disconnect(&client.channel, "ring protocol violation");
            return false;
        }
        if client.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            increment(&self.shared.stats.refused);
            self.send_disconnect(&client.channel, "handshake timeout");
            return false;
        }
        let ClientPeer { channel, handshake, .. } = client;
        let has_init = handshake.has_init();
        let progress = self.read(channel, |message, descriptor| {
            handshake.on_message(message, descriptor, busy && !has_init)
        });
        match progress {
            ReadOutcome::Open => true,
            ReadOutcome::Connected(connection) => {
                (client.connection, client.deadline) = (Some(connection), None);
                true
            }
            ReadOutcome::Closed(connection) => {
                client.connection = client.connection.take().or(connection);
                false
            }
        }
    }

    pub(super) fn run_client(self) {
        let (mut retry, mut retry_at) = (RETRY_FIRST, None);
        while !self.is_stopping() {
            if let Some(until) = retry_at.take() {
                self.wait_for_events([].into_iter(), Some(until));
                if Instant::now() < until {
                    retry_at = Some(until);
                    continue;
                }
            }
            if let Ok(channel) = connect_to(&self.config.socket)
                && self.run_session(ServerPeer::new(channel, &self.config))
            {
                retry = RETRY_FIRST;
            }
            retry_at = Some(Instant::now() + retry);
            retry = (2 * retry).min(RETRY_MAX);
        }
    }

    /// Communicates with a server until one of the two disconnects. Returns whether a connection was
    /// established.
    fn run_session(&self, mut server: ServerPeer) -> bool {
        loop {
            let until = server.connection.is_none().then_some(server.deadline);
            self.wait_for_events([server.channel.fd()].into_iter(), until);
            if !self.service_server(&mut server) {
                break;
            }
        }
        self.close_server(server)
    }

    /// Closes the server. Returns whether a connection was established.
    pub(super) fn close_server(&self, server: ServerPeer) -> bool {
        let ServerPeer { channel, handshake, connection, .. } = server;
        let connected = connection.is_some();
        self.close_peer((channel, handshake), connection);
        connected
    }

    /// Processes the messages of the server. Returns whether it stays.
    pub(super) fn service_server(&self, server: &mut ServerPeer) -> bool {
        let has_violated =
            server.connection.as_ref().is_some_and(|c| c.violation_flag.raised.load(Ordering::Acquire));
        let is_late = server.connection.is_none() && server.deadline <= Instant::now();
        if self.is_stopping() || has_violated || is_late {
            let reason = if has_violated {
                "ring protocol violation"
            } else if is_late {
                "handshake timeout"
            } else {
                "the device is closed"
            };
            self.send_disconnect(&server.channel, reason);
            return false;
        }
        let ServerPeer { channel, handshake, .. } = server;
        match self.read(channel, |message, _| handshake.on_message(message)) {
            ReadOutcome::Open => true,
            ReadOutcome::Connected(connection) => {
                server.connection = Some(connection);
                true
            }
            ReadOutcome::Closed(connection) => {
                server.connection = server.connection.take().or(connection);
                false
            }
        }
    }

    /// Reads and answers the messages that have arrived.
    fn read(
        &self,
        channel: &ControlChannel,
        mut on_message: impl FnMut(ControlMessage, Option<OwnedFd>) -> Result<HandshakeStep, String>,
    ) -> ReadOutcome {
        let mut progress = ReadOutcome::Open;
        loop {
            let step = match channel.receive() {
                ChannelEvent::Message(message, descriptor) => on_message(message, descriptor),
                ChannelEvent::Empty => return progress,
                ChannelEvent::Closed => return progress.into_closed(),
                ChannelEvent::Malformed(problem) => Err(problem),
            };
            let sent = match step {
                Ok(HandshakeStep::Send(message, descriptor)) => channel.send(&message, descriptor.as_ref()),
                Ok(HandshakeStep::Connect(link, message)) => self.bring_up(*link).and_then(|connection| {
                    progress = ReadOutcome::Connected(connection);
                    channel.send(&message, None)
                }),
                Ok(HandshakeStep::Connected(link)) => {
                    self.bring_up(*link).map(|connection| progress = ReadOutcome::Connected(connection))
                }
                Ok(HandshakeStep::Disconnected(reason)) => {
                    tracing::info!(socket = %self.config.socket, reason, "memif peer disconnected");
                    return progress.into_closed();
                }
                Err(reason) => {
                    increment(&self.shared.stats.refused);
                    self.send_disconnect(channel, &reason);
                    return progress.into_closed();
                }
            };
            if sent.is_err() {
                return progress.into_closed();
            }
        }
    }

    /// Sends DISCONNECT with a reason, ignoring errors.
    fn send_disconnect(&self, channel: &ControlChannel, reason: &str) {
        tracing::info!(socket = %self.config.socket, reason, "disconnecting memif peer");
        let _ = channel.send(&ControlMessage::Disconnect { code: 0, reason: reason.into() }, None);
    }

    /// Passes all rings of a connection to the halves.
    fn bring_up(&self, link: NegotiatedLink) -> io::Result<Connection> {
        let NegotiatedLink { regions, to_server, to_client, features, peer } = link;
        let violation_flag = ViolationFlag::new(&self.shared.event);
        let (received, sent) = match self.config.role {
            Role::Server => (to_server, to_client),
            Role::Client => (to_client, to_server),
        };
        let (rx_count, tx_count) = (received.len(), sent.len());
        let context = LinkContext {
            regions,
            header_bytes: features.header_bytes(),
            has_flow_hash: features.hash.is_some(),
            violation_flag: violation_flag.clone(),
        };
        let mut rx_rings = Vec::new();
        for (NegotiatedRing { ring, interrupt, buffers }, queue) in received.into_iter().zip(&self.queues) {
            let interrupt = queue.waker.register(interrupt)?;
            let LinkContext { regions, header_bytes, has_flow_hash, violation_flag } = context.clone();
            rx_rings.push(RxRing {
                ring,
                regions,
                buffers,
                header_bytes,
                has_flow_hash,
                position: 0,
                violation_flag,
                _interrupt: interrupt,
            });
        }
        for (ring, queue) in rx_rings.into_iter().zip(&self.queues) {
            ring.prepare();
            queue.rx.replace(Some(ring));
            queue.waker.wake();
        }
        for (NegotiatedRing { ring, interrupt, buffers }, queue) in sent.into_iter().zip(&self.queues) {
            queue.tx.replace(Some(TxRing::new(
                ring,
                buffers,
                context.clone(),
                interrupt,
                queue.signaller.clone(),
            )));
        }
        if rx_count.min(tx_count) < self.queues.len() {
            tracing::warn!(
                socket = %self.config.socket,
                "the memif peer has {rx_count} receive and {tx_count} send rings for {} queues: the other queues stay down",
                self.queues.len()
            );
        }
        tracing::info!(socket = %self.config.socket, peer, extended = features.frame_headers, "memif link is up");
        increment(&self.shared.stats.connections);
        self.shared.up.store(true, Ordering::Release);
        Ok(Connection { violation_flag })
    }

    /// Takes all rings from the halves.
    fn bring_down(&self) {
        for queue in &self.queues {
            queue.rx.replace(None);
            queue.tx.replace(None);
            queue.waker.wake();
        }
        if self.shared.up.swap(false, Ordering::AcqRel) {
            tracing::info!(socket = %self.config.socket, "memif link is down");
        }
    }

    fn is_stopping(&self) -> bool {
        self.shared.stop.load(Ordering::Acquire)
    }

    /// Sleeps until one of the descriptors is readable, a half has signalled the thread, or the deadline has
    /// passed.
    fn wait_for_events<'a>(&'a self, fds: impl Iterator<Item = &'a OwnedFd>, deadline: Option<Instant>) {
        let own_event = self.shared.event.fd();
        let mut fds: Vec<PollFd<'_>> =
            [own_event].into_iter().chain(fds).map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let timeout = deadline.map(|deadline| {
            let remaining = deadline.saturating_duration_since(Instant::now());
            Timespec { tv_sec: remaining.as_secs() as i64, tv_nsec: remaining.subsec_nanos().into() }
        });
        let _ = poll(&mut fds, timeout.as_ref());
        self.shared.event.clear();
    }
}

/// A client of this server.
pub(super) struct ClientPeer {
    channel: ControlChannel,
    handshake: ServerHandshake,
    /// End of the handshake timeout; `None` once the client is connected.
    deadline: Option<Instant>,
    connection: Option<Connection>,
}

impl ClientPeer {
    pub(super) fn new(channel: ControlChannel, handshake: ServerHandshake) -> Self {
        Self { channel, handshake, deadline: Some(Instant::now() + HANDSHAKE_MAX), connection: None }
    }
}

/// The server of this client.
pub(super) struct ServerPeer {
    channel: ControlChannel,
    handshake: ClientHandshake,
    deadline: Instant,
    connection: Option<Connection>,
}

impl ServerPeer {
    pub(super) fn new(channel: ControlChannel, config: &Arc<MemifConfig>) -> Self {
        let (handshake, deadline) = (ClientHandshake::new(config), Instant::now() + HANDSHAKE_MAX);
        Self { channel, handshake, deadline, connection: None }
    }
}
