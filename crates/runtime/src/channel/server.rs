//! The stack's end of a channel: a handler that copies between the engine and the region, and trusts nothing that stands in the region but what it
//! wrote there itself and kept a copy of.

use super::ChannelConfig;
mod accept;
mod datagrams;

use super::bells::{Answerer, RELEASED, RUNG, Ringer};
use super::client::{Client, ClientParts};
use super::control::{Control, Counters, Envelope, Reply, Request, UdpRequest};
use super::region::{Direction, LISTENERS_MAX, OFFERS_MAX, Region};
use super::socket::{Offer, ended, request, state};
use super::sync::{Ordering, fence};
use crate::command::Command;
use crate::context::{Context, WorkContext};
use crate::error::Error;
use crate::handler::Handler;
use crate::stats::Kind;
use crate::wait::EventFd;
use core::any::Any;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::error::{ListenError, OptionError, RecvError, SendError, Stale};
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use ginnel_stack::options::ListenOptions;
use ginnel_stack::udp::{Datagram, UdpError};
use rustix::fd::{AsRawFd, BorrowedFd, RawFd};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Bells of one client answered in a turn, so that one that rings without end does not keep frames waiting.
const BELLS_PER_TURN_MAX: usize = 256;
/// Datagrams that wait on a UDP socket.
const DATAGRAMS_MAX: usize = 256;
/// Bytes copied from a client to the engine at a time.
const COPY_BYTES: usize = 16 << 10;

/// What the stack's end has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelStats {
    /// Bells answered.
    pub bells: u64,
    /// Datagrams that nobody took in time.
    pub datagrams_dropped: u64,
    /// Connections that clients accepted.
    pub accepted: u64,
    /// Offers that were not taken in time and went to another client.
    pub offers_revoked: u64,
    /// Positions, numbers and rings that cannot be: each cost its client a connection, or bells.
    pub violations: u64,
}

/// One client.
struct Served {
    up: Answerer,
    down: Ringer,
    wake: Arc<EventFd>,
    offers: [Option<Offered>; OFFERS_MAX],
    /// It did not take what it was offered: its credits are worth nothing until it rings again.
    dozes: bool,
}

#[derive(Clone, Copy)]
struct Offered {
    listener: u16,
    socket: u32,
    until: ginnel_stack::time::Instant,
}

/// One listener.
struct Listening {
    listener: Listener,
    /// Clients that hold it, a bit each.
    holders: u64,
    /// Connections that nobody took yet.
    waiting: VecDeque<u32>,
    /// How many may wait here; the others wait in the engine.
    backlog: usize,
}

/// One socket.
#[derive(Clone, Copy, Debug, Default)]
struct Socket {
    conn: Option<Conn>,
    in_use: bool,
    generation: u32,
    /// Clients that hold it, a bit each.
    holders: u64,
    /// The client and the place where it is offered.
    offered: Option<(u8, u8)>,
    /// It waits for somebody to take it.
    waits: bool,
    bits: u32,
    /// Positions: bytes received, and bytes taken from clients.
    received: u64,
    taken: u64,
    /// The engine holds bytes back for which there was no room.
    held_back: bool,
    /// The engine's send buffer was full.
    blocked: bool,
    /// Nobody holds it any more: what was written is still sent.
    closing: bool,
    /// FIN was asked of the engine.
    shut: bool,
    /// It is a UDP socket.
    udp: Option<UdpHandle>,
}

/// What came on a UDP socket and was not taken yet.
type Datagrams = VecDeque<Result<(Datagram, Vec<u8>), UdpError>>;

/// A handler that serves the clients of one domain.
pub struct ChannelServer {
    region: Arc<Region>,
    wake: Arc<EventFd>,
    clients: Vec<Option<Served>>,
    sockets: Vec<Socket>,
    free: Vec<u32>,
    listeners: Vec<Option<Listening>>,
    offer_time: Duration,
    /// UDP sockets by the engine's handles: their numbers here, and what waits on them.
    udp: HashMap<UdpHandle, (u32, Datagrams)>,
    /// A timer is set for offers that are out.
    timer_runs: bool,
    /// Some listener could not take all that came.
    starved: bool,
    scratch: Box<[u8; COPY_BYTES]>,
    stats: ChannelStats,
}

impl ChannelServer {
    /// The stack's end of a new channel without clients.
    ///
    /// # Errors
    /// A key that is out of range; no memory or descriptors.
    pub fn new(config: &ChannelConfig) -> Result<Self, Error> {
        config.validate()?;
        let io = |e| Error::io("region of the channel", e);
        let region = Region::create(config).map_err(io)?;
        let count = region.sockets() as u32;
        Ok(Self {
            wake: Arc::new(EventFd::new().map_err(io)?),
            clients: (0..region.clients()).map(|_| None).collect(),
            sockets: vec![Socket::default(); region.sockets()],
            free: (0..count).rev().collect(),
            listeners: (0..LISTENERS_MAX).map(|_| None).collect(),
            offer_time: Duration::from_millis(config.offer_ms.into()),
            udp: HashMap::new(),
            timer_runs: false,
            starved: false,
            scratch: Box::new([0; COPY_BYTES]),
            stats: ChannelStats::default(),
            region,
        })
    }

    /// A new client in this process. `control` is how it asks: usually the shard's [`Commander`](crate::Commander).
    ///
    /// # Errors
    /// There are `channel.clients_max` already; no descriptors.
    pub fn attach(&mut self, control: Box<dyn Control>) -> Result<Client, Error> {
        let (number, wake) = self.admit()?;
        Ok(Client::new(self.region.clone(), number, self.wake.clone(), wake, control))
    }

    /// What a client in another process needs to be one: [`Client::open`].
    ///
    /// # Errors
    /// As [`ChannelServer::attach`].
    pub fn attach_process(&mut self) -> Result<ClientParts, Error> {
        let copy = |fd: BorrowedFd<'_>| {
            fd.try_clone_to_owned().map_err(|e| Error::io("descriptors of the channel", e))
        };
        let (region, stack) = (copy(self.region.file())?, copy(self.wake.as_fd())?);
        let (number, wake) = self.admit()?;
        Ok(ClientParts { region, stack, wake: copy(wake.as_fd())?, number: number as u32 })
    }

    fn admit(&mut self) -> Result<(usize, Arc<EventFd>), Error> {
        let number = self.clients.iter().position(Option::is_none);
        let number =
            number.ok_or_else(|| Error::application("channel: as many clients as channel.clients_max"))?;
        let wake = EventFd::new().map_err(|e| Error::io("event descriptor of a client", e))?;
        let wake = Arc::new(wake);
        self.region.clear_client(number);
        self.clients[number] = Some(Served {
            up: self.region.up(number).answerer(),
            down: self.region.down(number).ringer(),
            wake: wake.clone(),
            offers: [None; OFFERS_MAX],
            dozes: false,
        });
        Ok((number, wake))
    }

    /// What was counted.
    pub fn stats(&self) -> &ChannelStats {
        &self.stats
    }

    /// Sockets in use: connections, and those that clients still hold after their end.
    pub fn sockets_in_use(&self) -> usize {
        self.sockets.len() - self.free.len()
    }

    fn socket(&mut self, socket: u32) -> &mut Socket {
        &mut self.sockets[socket as usize]
    }

    /// The socket of a connection.
    fn of(&self, cx: &Context<'_>, conn: Conn) -> Option<u32> {
        let socket = cx.token(conn).ok()?;
        let known = self.sockets.get(socket as usize)?;
        (known.conn == Some(conn)).then_some(socket)
    }

    /// A socket for a new connection.
    fn begin(&mut self, cx: &mut Context<'_>, conn: Conn, bits: u32) -> Option<u32> {
        let socket = self.free.pop()?;
        let generation = self.socket(socket).generation;
        *self.socket(socket) =
            Socket { conn: Some(conn), in_use: true, generation, bits, ..Socket::default() };
        let words = self.region.socket(socket);
        words.begin(generation);
        if let Ok(ends) = cx.ends(conn) {
            words.set_ends(ends);
        }
        words.state.store(bits, Ordering::Release);
        // Only a stale handle can be refused.
        let _ = cx.set_token(conn, socket);
        Some(socket)
    }

    /// Tells all who hold it.
    fn ring(&mut self, socket: u32) {
        let known = &self.sockets[socket as usize];
        let mut holders = known.holders;
        if let Some((client, _)) = known.offered {
            // It may have been taken, and the client learnt of nothing since.
            holders |= 1 << client;
        }
        while holders != 0 {
            let number = holders.trailing_zeros() as usize;
            holders &= holders - 1;
            if let Some(client) = &mut self.clients[number] {
                client.down.ring(self.region.down(number), socket, RUNG);
            }
        }
    }

    fn add_bits(&mut self, socket: u32, bits: u32) {
        let known = self.socket(socket);
        known.bits |= bits;
        let bits = known.bits;
        self.region.socket(socket).state.store(bits, Ordering::Release);
        self.ring(socket);
    }

    /// A client wrote what cannot be.
    fn violated(&mut self, cx: &mut Context<'_>, socket: u32) {
        self.stats.violations += 1;
        if let Some(conn) = self.socket(socket).conn {
            let _ = cx.abort(conn);
        }
    }

    /// Does what clients asked for, as far as it goes.
    fn go_on(&mut self, cx: &mut Context<'_>, socket: u32) {
        let Some(conn) = self.socket(socket).conn else { return };
        let requests = self.region.socket(socket).requests.load(Ordering::Acquire);
        if requests & request::ABORT != 0 {
            let _ = cx.abort(conn);
            return;
        }
        let close = requests & request::CLOSE != 0 || self.socket(socket).closing;
        if close && self.is_unread(socket) {
            // As on Linux: the peer must learn that not all was read.
            let _ = cx.abort(conn);
            return;
        }
        // First, for it must not depend on the other direction: an application that writes back what it reads has both full.
        if core::mem::take(&mut self.socket(socket).held_back) {
            cx.resume_reading(conn);
        }
        if !self.forward(cx, socket, conn) {
            return;
        }
        if close {
            let _ = cx.close(conn);
        } else if requests & request::SHUTDOWN != 0 && !self.socket(socket).shut {
            self.socket(socket).shut = true;
            let _ = cx.shutdown_write(conn);
        }
    }

    /// Whether a client left bytes unread. A position that cannot be counts as unread.
    fn is_unread(&self, socket: u32) -> bool {
        let known = &self.sockets[socket as usize];
        let stream = self.region.stream(socket, Direction::Incoming);
        known.held_back || stream.room(known.received) != Ok(self.region.buffer_bytes())
    }

    /// Moves what clients wrote to the engine. Whether that was all.
    fn forward(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn) -> bool {
        let mut moved = false;
        let mut taken = self.socket(socket).taken;
        let stream = self.region.stream(socket, Direction::Outgoing);
        let whole = loop {
            let Ok(count) = stream.peek(taken, 0, &mut self.scratch[..]) else {
                self.violated(cx, socket);
                break false;
            };
            if count == 0 {
                break true;
            }
            // After an end of the stream nothing can be sent any more: it is dropped, as the client is about to learn.
            let accepted = cx.send(conn, &self.scratch[..count]).unwrap_or(count);
            stream.consume(&mut taken, accepted);
            moved |= accepted > 0;
            if accepted < count {
                self.sockets[socket as usize].blocked = true;
                break false;
            }
        };
        let known = &mut self.sockets[socket as usize];
        known.taken = taken;
        if moved {
            // Pairs with the fence of a client that found no room.
            fence(Ordering::SeqCst);
            let wants = &self.region.socket(socket).wants_space;
            if wants.load(Ordering::Relaxed) != 0 && wants.swap(0, Ordering::Relaxed) != 0 {
                self.ring(socket);
            }
        }
        whole
    }

    /// The last client let go of it.
    fn unheld(&mut self, cx: &mut Context<'_>, socket: u32) {
        let known = self.socket(socket);
        if known.holders != 0 || known.waits || known.offered.is_some() || !known.in_use {
            return;
        }
        if let Some(udp) = known.udp.take() {
            self.udp.remove(&udp);
            // Only a stale handle can be refused.
            let _ = cx.udp_close(udp);
        }
        let known = self.socket(socket);
        if known.conn.is_some() {
            known.closing = true;
            self.go_on(cx, socket);
        } else {
            self.put_back(cx, socket);
        }
    }

    fn put_back(&mut self, cx: &mut Context<'_>, socket: u32) {
        let known = self.socket(socket);
        known.in_use = false;
        known.generation = known.generation.wrapping_add(1);
        self.free.push(socket);
        self.take_more(cx);
    }

    /// Listeners that could not take all may have room again.
    fn take_more(&mut self, cx: &mut Context<'_>) {
        if !core::mem::take(&mut self.starved) {
            return;
        }
        for number in 0..LISTENERS_MAX {
            let Some(listener) = self.listeners[number].as_ref().map(|l| l.listener) else { continue };
            while self.may_accept(listener)
                && let Some(conn) = cx.accept(listener)
            {
                self.accepted(cx, conn, listener);
            }
        }
    }

    /// Answers bells of a client, `most` at the most and no more than its ring holds. Returns how many.
    fn answer_bells(&mut self, cx: &mut Context<'_>, number: usize, most: usize) -> usize {
        let most = most.min(self.sockets.len());
        let mut answered = 0;
        while answered < most {
            let Some(client) = self.clients.get_mut(number).and_then(Option::as_mut) else { break };
            match client.up.take(self.region.up(number)) {
                Ok(None) => break,
                Ok(Some((socket, why))) => {
                    client.dozes = false;
                    answered += 1;
                    self.answer(cx, number, socket, why);
                }
                Err(_) => {
                    self.stats.violations += 1;
                    break;
                }
            }
        }
        self.stats.bells += answered as u64;
        answered
    }

    /// Answers one bell.
    fn answer(&mut self, cx: &mut Context<'_>, number: usize, socket: u32, why: u8) {
        let Some(known) = self.sockets.get(socket as usize) else {
            self.stats.violations += 1;
            return;
        };
        if let Some((client, place)) = known.offered
            && usize::from(client) == number
        {
            self.settle(number, place.into());
        }
        let known = self.socket(socket);
        let bit = 1 << number;
        if known.holders & bit == 0 {
            return;
        }
        if why & RELEASED != 0 {
            known.holders &= !bit;
            self.unheld(cx, socket);
        }
        // Also what was written before it was released.
        self.go_on(cx, socket);
    }

    /// Forgets a client. What it alone held is closed.
    fn detach(&mut self, cx: &mut Context<'_>, number: usize) {
        if self.clients.get(number).is_none_or(Option::is_none) {
            return;
        }
        for place in 0..OFFERS_MAX {
            self.settle(number, place);
            self.revoke(number, place);
        }
        for listener in 0..LISTENERS_MAX {
            self.unlisten(cx, number, listener as u32);
        }
        self.clients[number] = None;
        for socket in 0..self.sockets.len() as u32 {
            let known = self.socket(socket);
            if known.holders & 1 << number == 0 {
                continue;
            }
            known.holders &= !(1 << number);
            // It may have written and not rung.
            self.go_on(cx, socket);
            self.unheld(cx, socket);
        }
        self.deal(cx);
    }

    /// Does what a client asks for.
    pub(super) fn serve(&mut self, cx: &mut Context<'_>, number: usize, asked: Request) -> Reply {
        let held = |server: &Self, socket: u32| {
            let known = server.sockets.get(socket as usize)?;
            known.conn.filter(|_| known.holders & 1 << number != 0)
        };
        // What it did before it asked is in its ring.
        self.answer_bells(cx, number, usize::MAX);
        match asked {
            Request::Listen(at, options) => Reply::Listen(self.listen(cx, number, at, options)),
            Request::Join(listener) => Reply::Join(self.join(number, listener)),
            Request::Unlisten(listener) => {
                self.unlisten(cx, number, listener);
                Reply::Done
            }
            Request::Connect(remote, options) => {
                if self.free.is_empty() {
                    let error = ginnel_stack::error::ConnectError::TooMany;
                    return Reply::Connect(Err(Error::Connect(remote, error)));
                }
                let socket = cx.connect(remote, options).map(|conn| self.begin(cx, conn, 0));
                Reply::Connect(socket.map(|socket| {
                    let socket = socket.expect("one was free");
                    self.socket(socket).holders = 1 << number;
                    (socket, self.socket(socket).generation)
                }))
            }
            Request::SetOption(socket, option) => Reply::SetOption(match held(self, socket) {
                Some(conn) => cx.set_option(conn, option),
                None => Err(OptionError::Stale),
            }),
            Request::Info(socket) => Reply::Info(match held(self, socket) {
                Some(conn) => cx.info(conn).map(Box::new),
                None => Err(Stale::Handle),
            }),
            Request::SendUrgent(socket, bytes) => Reply::SendUrgent(match held(self, socket) {
                // It stands behind what was written before.
                Some(conn) if self.forward(cx, socket, conn) => cx.send_urgent(conn, &bytes),
                Some(_) => Err(SendError::Full),
                None => Err(SendError::Stale),
            }),
            Request::RecvUrgent(socket) => Reply::RecvUrgent(match held(self, socket) {
                Some(conn) => cx.recv_urgent(conn),
                None => Err(RecvError::Stale),
            }),
            Request::Udp(request) => self.serve_udp(cx, number, request),
            Request::Counters => Reply::Counters(Box::new(Counters {
                tcp: *cx.tcp_stats(),
                network: cx.network_stats().clone(),
                drops: cx.network_drops().clone(),
            })),
            Request::Detach => {
                self.detach(cx, number);
                Reply::Done
            }
        }
    }

    /// Tells of something that is no byte of a stream.
    fn notice(&mut self, socket: u32) {
        self.region.socket(socket).notices.fetch_add(1, Ordering::Relaxed);
        self.ring(socket);
    }

    /// Wakes the clients that sleep and were rung.
    fn wake_clients(&mut self) {
        for (number, client) in self.clients.iter_mut().enumerate() {
            if let Some(client) = client
                && client.down.must_wake(self.region.down(number))
            {
                client.wake.signal();
            }
        }
    }
}

impl Handler for ChannelServer {
    fn start(&mut self, _cx: &mut Context<'_>) -> Result<(), Error> {
        self.region.set_ready();
        for (number, client) in self.clients.iter_mut().enumerate() {
            if let Some(client) = client {
                // For no socket in particular: whoever waits looks again.
                client.down.ring(self.region.down(number), 0, RUNG);
            }
        }
        Ok(())
    }

    fn may_accept(&mut self, listener: Listener) -> bool {
        let listening = self.listeners.iter().flatten().find(|l| l.listener == listener);
        let may = !self.free.is_empty() && listening.is_some_and(|l| l.waiting.len() < l.backlog);
        self.starved |= !may;
        may
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, listener: Listener) {
        let Some(socket) = self.begin(cx, conn, state::CONNECTED) else {
            let _ = cx.abort(conn);
            return;
        };
        match self.listeners.iter_mut().flatten().find(|l| l.listener == listener) {
            Some(listening) => {
                listening.waiting.push_back(socket);
                self.socket(socket).waits = true;
            }
            None => {
                let _ = cx.abort(conn);
            }
        }
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Some(socket) = self.of(cx, conn) {
            if let Ok(ends) = cx.ends(conn) {
                self.region.socket(socket).set_ends(ends);
            }
            self.add_bits(socket, state::CONNECTED);
        }
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let Some(socket) = self.of(cx, conn) else { return data.len() };
        if self.socket(socket).closing {
            // Nobody will ever read it.
            let _ = cx.abort(conn);
            return data.len();
        }
        let stream = self.region.stream(socket, Direction::Incoming);
        let mut received = self.sockets[socket as usize].received;
        let mut count = stream.write(&mut received, data);
        if matches!(count, Ok(count) if count < data.len()) {
            self.sockets[socket as usize].held_back = true;
            self.region.socket(socket).wants_room.store(1, Ordering::Relaxed);
            // Pairs with the fence of a client that has read.
            fence(Ordering::SeqCst);
            count = count.and_then(|done| Ok(done + stream.write(&mut received, &data[done..])?));
            self.sockets[socket as usize].held_back = count.is_ok_and(|count| count < data.len());
        }
        self.sockets[socket as usize].received = received;
        match count {
            Ok(count) => {
                self.ring(socket);
                count
            }
            Err(_) => {
                self.violated(cx, socket);
                data.len()
            }
        }
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Some(socket) = self.of(cx, conn) {
            self.socket(socket).blocked = false;
            self.go_on(cx, socket);
        }
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Some(socket) = self.of(cx, conn) {
            self.add_bits(socket, state::FIN);
        }
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        let Some(socket) = self.of(cx, conn) else { return };
        self.add_bits(socket, ended(reason));
        self.socket(socket).conn = None;
        self.unheld(cx, socket);
    }

    fn timer(&mut self, cx: &mut Context<'_>, _token: u64) {
        self.timer_runs = false;
        let now = cx.now();
        let mut next = None;
        for number in 0..self.clients.len() {
            for place in 0..OFFERS_MAX {
                self.settle(number, place);
                let Some(client) = &self.clients[number] else { break };
                let Some(offer) = client.offers[place] else { continue };
                let others = (0..self.clients.len()).filter(|other| *other != number);
                let mut others = others.filter(|other| self.has_credit(*other, offer.listener.into()));
                if now >= offer.until && others.next().is_some() && self.revoke(number, place) {
                    self.stats.offers_revoked += 1;
                    if let Some(client) = &mut self.clients[number] {
                        client.dozes = true;
                    }
                } else {
                    next = Some(self.offer_time);
                }
            }
        }
        self.deal(cx);
        if let Some(after) = next.filter(|_| !self.timer_runs) {
            self.timer_runs = cx.set_timer(after, 0).is_some();
        }
    }

    fn counters(&self, report: &mut dyn FnMut(Kind, &'static str, u64)) {
        let ChannelStats { bells, datagrams_dropped, accepted, offers_revoked, violations } = self.stats;
        for (name, count) in [
            ("channel.bells", bells),
            ("channel.datagrams_dropped", datagrams_dropped),
            ("channel.accepted", accepted),
            ("channel.offers_revoked", offers_revoked),
            ("channel.violations", violations),
        ] {
            report(Kind::Counter, name, count);
        }
        let clients = self.clients.iter().filter(|client| client.is_some()).count();
        for (name, count) in [
            ("channel.sockets", self.sockets_in_use()),
            ("channel.sockets_limit", self.sockets.len()),
            ("channel.clients", clients),
            ("channel.clients_limit", self.clients.len()),
        ] {
            report(Kind::Gauge, name, count as u64);
        }
    }

    fn command(&mut self, cx: &mut Context<'_>, command: Command) {
        let command: Box<dyn Any + Send> = command;
        let Ok(envelope) = command.downcast::<Envelope>() else { return };
        let Envelope { client, request, reply } = *envelope;
        let answer = self.serve(cx, client, request);
        // Whoever asked may be gone.
        let _ = reply.send(answer);
    }

    fn acked(&mut self, cx: &mut Context<'_>, conn: Conn, bytes: u32) {
        if let Some(socket) = self.of(cx, conn) {
            self.region.socket(socket).acked.fetch_add(bytes.into(), Ordering::Relaxed);
            self.ring(socket);
        }
    }

    fn urgent(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Some(socket) = self.of(cx, conn) {
            self.notice(socket);
        }
    }

    fn datagram(&mut self, _cx: &mut Context<'_>, socket: UdpHandle, datagram: &Datagram, data: &[u8]) {
        self.came(socket, Ok((*datagram, data.to_vec())));
    }

    fn datagram_error(&mut self, _cx: &mut Context<'_>, socket: UdpHandle, error: UdpError) {
        self.came(socket, Err(error));
    }

    fn work(&mut self, cx: &mut WorkContext<'_>) -> Result<usize, Error> {
        let cx = &mut cx.context();
        let clients = 0..self.clients.len();
        let answered = clients.map(|number| self.answer_bells(cx, number, BELLS_PER_TURN_MAX)).sum();
        self.deal(cx);
        self.wake_clients();
        Ok(answered)
    }

    fn before_sleep(&mut self) -> bool {
        let region = &self.region;
        let clients = self.clients.iter_mut().enumerate();
        // All of them, also behind one that has rung.
        clients.fold(true, |quiet, (number, client)| {
            client.as_mut().is_none_or(|c| c.up.before_sleep(region.up(number))) && quiet
        })
    }

    fn after_sleep(&mut self) {
        let mut woken = false;
        for (number, client) in self.clients.iter_mut().enumerate() {
            if let Some(client) = client {
                woken |= client.up.after_sleep(self.region.up(number));
            }
        }
        if woken {
            self.wake.clear();
        }
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.wake.as_fd().as_raw_fd())
    }
}
