//! The control thread: listens or connects, shakes hands, and puts connections into the ports of the halves. It sleeps unless somebody comes or goes,
//! and never waits for a peer.

use super::channel::{Channel, Received};
use super::config::{MemifConfig, Role};
use super::handshake::{ClientHandshake, Link, Offered, ServerHandshake, Step};
use super::message::Message;
use super::port::{Complaint, Port, Waker};
use super::rx::RxRing;
use super::signal::Signaller;
use super::socket::{Listener, connect_to};
use super::tx::TxRing;
use super::{Shared, count};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Clients that shake hands at the same time, at the most; more wait to be accepted.
// limit: memif peers in their handshake
const CLIENTS_MAX: usize = 8;
/// A handshake that takes longer is broken off.
const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// A client looks for its server again after this time, which doubles up to the longest.
const RETRY_FIRST: Duration = Duration::from_millis(20);
const RETRY_LONGEST: Duration = Duration::from_secs(1);
/// After an error that would only come again.
const PAUSE: Duration = Duration::from_millis(100);

/// The ports of one queue.
#[derive(Debug)]
pub(super) struct QueuePorts {
    pub(super) rx: Arc<Port<RxRing>>,
    pub(super) tx: Arc<Port<TxRing>>,
    pub(super) waker: Arc<Waker>,
    pub(super) signaller: Arc<Signaller>,
}

/// What the thread works with.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) config: Arc<MemifConfig>,
    pub(super) shared: Arc<Shared>,
    pub(super) queues: Vec<QueuePorts>,
}

/// A peer that is connected.
pub(super) struct Connection {
    complaint: Arc<Complaint>,
}

/// What a peer's messages led to.
enum Progress {
    /// Nothing more to read.
    Going,
    Connected(Connection),
    /// It is gone, or has been sent away. It may have been connected just before.
    Over(Option<Connection>),
}

impl Progress {
    fn over(self) -> Self {
        match self {
            Self::Going => Self::Over(None),
            Self::Connected(connection) => Self::Over(Some(connection)),
            Self::Over(connection) => Self::Over(connection),
        }
    }
}

impl Control {
    pub(super) fn serve(self, listener: Listener) {
        let mut clients: Vec<Client> = Vec::new();
        while !self.is_stopping() {
            let listening = (clients.len() < CLIENTS_MAX).then_some(listener.fd());
            let deadline = clients.iter().filter_map(|client| client.deadline).min();
            self.sleep(listening.into_iter().chain(clients.iter().map(|c| c.channel.fd())), deadline);
            if listening.is_some() {
                self.accept(&listener, &mut clients);
            }
            self.attend_all(&mut clients);
        }
        for client in &clients {
            self.dismiss(&client.channel, "the device is closed");
        }
        self.put_down();
    }

    /// Reads and answers what clients say, and lets go of those that are through.
    pub(super) fn attend_all(&self, clients: &mut Vec<Client>) {
        let mut busy = clients.iter().any(|client| client.handshake.is_claimed());
        let mut at = 0;
        while let Some(client) = clients.get_mut(at) {
            if self.attend(client, busy) {
                busy |= client.handshake.is_claimed();
                at += 1;
                continue;
            }
            let Client { channel, handshake, connection, .. } = clients.remove(at);
            self.let_go((channel, handshake), connection);
        }
    }

    /// The end of a peer. The link is down only when nothing of it is left.
    fn let_go(&self, held: impl Sized, connection: Option<Connection>) {
        drop(held);
        if connection.is_some() {
            self.put_down();
        }
    }

    fn accept(&self, listener: &Listener, clients: &mut Vec<Client>) {
        match listener.accept() {
            Ok(Some(channel)) => {
                let (handshake, hello) = ServerHandshake::new(&self.config);
                if channel.send(&hello, None).is_ok() {
                    clients.push(Client::new(channel, handshake));
                }
            }
            Ok(None) => count(&self.shared.stats.refused),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::warn!(%error, socket = %self.config.socket, "accepting a memif client");
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// Whether the client stays.
    fn attend(&self, client: &mut Client, busy: bool) -> bool {
        if client.connection.as_ref().is_some_and(|c| c.complaint.made.load(Ordering::Acquire)) {
            self.dismiss(&client.channel, "broken ring");
            return false;
        }
        if client.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            count(&self.shared.stats.refused);
            self.dismiss(&client.channel, "handshake takes too long");
            return false;
        }
        let Client { channel, handshake, .. } = client;
        let claimed = handshake.is_claimed();
        let progress = self
            .read(channel, |message, descriptor| handshake.on_message(message, descriptor, busy && !claimed));
        match progress {
            Progress::Going => true,
            Progress::Connected(connection) => {
                (client.connection, client.deadline) = (Some(connection), None);
                true
            }
            Progress::Over(connection) => {
                client.connection = client.connection.take().or(connection);
                false
            }
        }
    }

    pub(super) fn connect(self) {
        let (mut retry, mut wait) = (RETRY_FIRST, None);
        while !self.is_stopping() {
            if let Some(until) = wait.take() {
                self.sleep([].into_iter(), Some(until));
                if Instant::now() < until {
                    wait = Some(until);
                    continue;
                }
            }
            if let Ok(channel) = connect_to(&self.config.socket)
                && self.stay_with(Server::new(channel, &self.config))
            {
                retry = RETRY_FIRST;
            }
            wait = Some(Instant::now() + retry);
            retry = (2 * retry).min(RETRY_LONGEST);
        }
    }

    /// Talks to a server until one of the two ends it. Whether they were connected.
    fn stay_with(&self, mut server: Server) -> bool {
        loop {
            let until = server.connection.is_none().then_some(server.deadline);
            self.sleep([server.channel.fd()].into_iter(), until);
            if !self.attend_server(&mut server) {
                break;
            }
        }
        self.let_go_of_server(server)
    }

    /// Returns whether it was connected.
    pub(super) fn let_go_of_server(&self, server: Server) -> bool {
        let Server { channel, handshake, connection, .. } = server;
        let connected = connection.is_some();
        self.let_go((channel, handshake), connection);
        connected
    }

    /// Reads and answers what the server says. Whether it stays.
    pub(super) fn attend_server(&self, server: &mut Server) -> bool {
        let complained = server.connection.as_ref().is_some_and(|c| c.complaint.made.load(Ordering::Acquire));
        let late = server.connection.is_none() && server.deadline <= Instant::now();
        if self.is_stopping() || complained || late {
            let reason = if complained {
                "broken ring"
            } else if late {
                "handshake takes too long"
            } else {
                "the device is closed"
            };
            self.dismiss(&server.channel, reason);
            return false;
        }
        let Server { channel, handshake, .. } = server;
        match self.read(channel, |message, _| handshake.on_message(message)) {
            Progress::Going => true,
            Progress::Connected(connection) => {
                server.connection = Some(connection);
                true
            }
            Progress::Over(connection) => {
                server.connection = server.connection.take().or(connection);
                false
            }
        }
    }

    /// Reads and answers what has come.
    fn read(
        &self,
        channel: &Channel,
        mut on_message: impl FnMut(Message, Option<OwnedFd>) -> Result<Step, String>,
    ) -> Progress {
        let mut progress = Progress::Going;
        loop {
            let step = match channel.receive() {
                Received::Message(message, descriptor) => on_message(message, descriptor),
                Received::Nothing => return progress,
                Received::Closed => return progress.over(),
                Received::Malformed(problem) => Err(problem),
            };
            let sent = match step {
                Ok(Step::Send(message, descriptor)) => channel.send(&message, descriptor.as_ref()),
                Ok(Step::Connect(link, message)) => self.put_up(*link).and_then(|connection| {
                    progress = Progress::Connected(connection);
                    channel.send(&message, None)
                }),
                Ok(Step::Connected(link)) => {
                    self.put_up(*link).map(|connection| progress = Progress::Connected(connection))
                }
                Ok(Step::Leave(reason)) => {
                    tracing::info!(socket = %self.config.socket, reason, "the memif peer leaves");
                    return progress.over();
                }
                Err(reason) => {
                    count(&self.shared.stats.refused);
                    self.dismiss(channel, &reason);
                    return progress.over();
                }
            };
            if sent.is_err() {
                return progress.over();
            }
        }
    }

    /// Tells a peer why, if it still listens.
    fn dismiss(&self, channel: &Channel, reason: &str) {
        tracing::info!(socket = %self.config.socket, reason, "memif peer sent away");
        let _ = channel.send(&Message::Disconnect { code: 0, reason: reason.into() }, None);
    }

    /// Gives all rings to the halves.
    fn put_up(&self, link: Link) -> io::Result<Connection> {
        let Link { regions, to_server, to_client, features, peer } = link;
        let complaint = Complaint::new(&self.shared.event);
        let (received, sent) = match self.config.role {
            Role::Server => (to_server, to_client),
            Role::Client => (to_client, to_server),
        };
        let (rx_count, tx_count) = (received.len(), sent.len());
        let (header_bytes, hashes) = (features.header_bytes(), features.hash.is_some());
        let mut rx_rings = Vec::new();
        for (Offered { ring, bell, buffers }, queue) in received.into_iter().zip(&self.queues) {
            let bell = queue.waker.attach(bell)?;
            let (regions, complaint) = (regions.clone(), complaint.clone());
            rx_rings.push(RxRing {
                ring,
                regions,
                buffers,
                header_bytes,
                hashes,
                position: 0,
                complaint,
                _bell: bell,
            });
        }
        for (ring, queue) in rx_rings.into_iter().zip(&self.queues) {
            ring.start();
            queue.rx.put(Some(ring));
            queue.waker.wake();
        }
        for (Offered { ring, bell, buffers }, queue) in sent.into_iter().zip(&self.queues) {
            queue.tx.put(Some(TxRing::new(
                ring,
                regions.clone(),
                buffers,
                (header_bytes, hashes),
                (bell, queue.signaller.clone()),
                complaint.clone(),
            )));
        }
        if rx_count.min(tx_count) < self.queues.len() {
            tracing::warn!(
                socket = %self.config.socket,
                "the memif peer has {rx_count} and {tx_count} queues, here are {}: the others stay down",
                self.queues.len()
            );
        }
        tracing::info!(socket = %self.config.socket, peer, extended = features.frame_headers, "memif link is up");
        count(&self.shared.stats.connections);
        self.shared.up.store(true, Ordering::Release);
        Ok(Connection { complaint })
    }

    /// Takes all rings away.
    fn put_down(&self) {
        for queue in &self.queues {
            queue.rx.put(None);
            queue.tx.put(None);
            queue.waker.wake();
        }
        if self.shared.up.swap(false, Ordering::AcqRel) {
            tracing::info!(socket = %self.config.socket, "memif link is down");
        }
    }

    fn is_stopping(&self) -> bool {
        self.shared.stop.load(Ordering::Acquire)
    }

    /// Sleeps until one of the descriptors is readable, a half has something to say, or the deadline.
    fn sleep<'a>(&'a self, fds: impl Iterator<Item = &'a OwnedFd>, deadline: Option<Instant>) {
        let own = self.shared.event.fd();
        let mut fds: Vec<PollFd<'_>> =
            [own].into_iter().chain(fds).map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        let _ = poll(&mut fds, timeout.as_ref());
        self.shared.event.clear();
    }
}

/// A client of this server.
pub(super) struct Client {
    channel: Channel,
    handshake: ServerHandshake,
    /// Until it is connected.
    deadline: Option<Instant>,
    connection: Option<Connection>,
}

impl Client {
    pub(super) fn new(channel: Channel, handshake: ServerHandshake) -> Self {
        Self { channel, handshake, deadline: Some(Instant::now() + HANDSHAKE_MAX), connection: None }
    }
}

/// The server of this client.
pub(super) struct Server {
    channel: Channel,
    handshake: ClientHandshake,
    deadline: Instant,
    connection: Option<Connection>,
}

impl Server {
    pub(super) fn new(channel: Channel, config: &Arc<MemifConfig>) -> Self {
        let (handshake, deadline) = (ClientHandshake::new(config), Instant::now() + HANDSHAKE_MAX);
        Self { channel, handshake, deadline, connection: None }
    }
}
