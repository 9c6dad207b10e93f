//! The server on a shard.

use super::cluster::{Redirection, SERVERS_MAX, SlotMap};
use super::counters::IotCounters;
use super::link;
use super::message::{ANSWER_BYTES, ANSWER_ERROR, ANSWER_OK, HEAD_BYTES, MessageHead};
use super::options::{IotOptions, RedisAddress};
use super::pipeline::{Ended, KeyText, Message, MessageError, Pipeline};
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel::stats::CounterKind;
use ginnel::{
    CloseReason, Conn, Context, Error, Handler, Instant, Interest, KernelFd, ListenOptions, Listener,
    Readiness, SocketOptions, WorkContext,
};
use rustix::fd::OwnedFd;
use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind};

/// Bytes read from Redis at a time.
const READ_BYTES: usize = 64 << 10;
/// Longest interval at which deadlines are checked while messages wait.
const TICK_MAX: Duration = Duration::from_millis(100);
/// Most requests of one connection without an answer. At the limit the rest of its bytes stays unread, so
/// that one client cannot fill the queue.
// limit: requests of a connection without an answer
const OUTSTANDING_MAX: u32 = 1024;
/// Number of checks within the time of a deadline, so a message fails at most an eighth of that time late.
const TICKS_PER_DEADLINE: u32 = 8;

/// The state of a connection with requests that are not answered, or with a part of a message. Other
/// connections have no state here.
#[derive(Debug, Default)]
struct ActiveConn {
    /// Requests without an answer.
    outstanding: u32,
    /// Bytes of the last message that have arrived, and its head as far as it is among them.
    partial_bytes: u32,
    head: [u8; HEAD_BYTES],
    /// Answers that did not fit into the send buffer (true: no error), and the bytes of the first that did.
    unsent: VecDeque<bool>,
    sent_bytes: usize,
    /// True if the peer sends nothing more.
    peer_closed: bool,
    /// True if bytes were left unread because of [`OUTSTANDING_MAX`].
    is_paused: bool,
}

impl ActiveConn {
    fn is_idle(&self) -> bool {
        self.outstanding == 0 && self.partial_bytes == 0 && self.unsent.is_empty()
    }
}

/// The connection to a server.
#[derive(Debug)]
enum LinkState {
    /// There is none; the next attempt is due at this time.
    Down {
        retry_at: Instant,
    },
    Connecting {
        socket: OwnedFd,
        handle: KernelFd,
        since: Instant,
    },
    Up {
        socket: OwnedFd,
        handle: KernelFd,
    },
}

/// A Redis server.
#[derive(Debug)]
struct Backend {
    address: RedisAddress,
    pipeline: Pipeline<Conn>,
    link: LinkState,
    /// Commands that the socket has not accepted yet, from `out_sent` on.
    out: Vec<u8>,
    out_sent: usize,
    /// Time from the next failure to the attempt after it.
    back_off: Duration,
    /// True if the log has the last failure.
    is_failure_logged: bool,
}

impl Backend {
    fn new(options: &IotOptions, address: RedisAddress) -> Self {
        Self {
            address,
            pipeline: Pipeline::new(options.pipeline_limits()),
            link: LinkState::Down { retry_at: Instant::ZERO },
            out: Vec::new(),
            out_sent: 0,
            back_off: Duration::from_millis(options.reconnect_first_ms.into()),
            is_failure_logged: false,
        }
    }
}

/// The server as a shard's application.
#[derive(Debug)]
pub struct Iot {
    options: IotOptions,
    backends: Vec<Backend>,
    /// The owners of keys in Redis Cluster; otherwise the keys are distributed evenly.
    slots: Option<SlotMap>,
    active: HashMap<Conn, ActiveConn>,
    counters: IotCounters,
    /// Connections open now.
    open: u64,
    /// Messages that have ended and were not counted yet.
    ended: Vec<Ended<Conn>>,
    read_buffer: Vec<u8>,
    is_tick_set: bool,
    is_stopping: bool,
    listeners: Vec<Listener>,
}

impl Iot {
    /// Creates a server that uses these Redis servers.
    ///
    /// # Errors
    /// If the name of a server cannot be looked up.
    pub fn new(options: &IotOptions, redis: &[RedisAddress]) -> Result<Self, Error> {
        let resolve = |address: &RedisAddress| {
            let resolved = address.resolve().map_err(|e| Error::io(format!("redis {address}"), e))?;
            Ok(Backend::new(options, resolved))
        };
        Ok(Self {
            options: options.clone(),
            backends: redis.iter().map(resolve).collect::<Result<_, Error>>()?,
            slots: options.redis_cluster.then(|| SlotMap::new(redis.len())),
            active: HashMap::new(),
            counters: IotCounters::default(),
            open: 0,
            ended: Vec::new(),
            read_buffer: vec![0; READ_BYTES],
            is_tick_set: false,
            is_stopping: false,
            listeners: Vec::new(),
        })
    }

    /// Returns the counters.
    pub const fn counters(&self) -> &IotCounters {
        &self.counters
    }

    /// Returns the number of messages that have not ended: those that wait, and those whose commands are in
    /// flight.
    pub fn waiting(&self) -> u64 {
        self.backends.iter().map(|b| (b.pipeline.waiting() + b.pipeline.in_flight()) as u64).sum()
    }

    fn in_flight(&self) -> u64 {
        self.backends.iter().map(|b| b.pipeline.in_flight() as u64).sum()
    }

    /// Returns the number of connections that are open now.
    pub const fn open(&self) -> u64 {
        self.open
    }

    /// Takes a message whose last byte has arrived. Returns false if it is malformed.
    fn accept_message(&mut self, cx: &mut Context<'_>, conn: Conn, head: &[u8; HEAD_BYTES]) -> bool {
        let Some(MessageHead { counter, is_request, is_urgent }) = MessageHead::parse(head) else {
            self.counters.malformed += 1;
            return false;
        };
        self.counters.messages += 1;
        self.counters.urgent += u64::from(is_urgent);
        if is_request {
            self.counters.requests += 1;
            self.counters.urgent_requests += u64::from(is_urgent);
            self.active.entry(conn).or_default().outstanding += 1;
        }
        // The token of a connection is its key.
        let key = cx.token(conn).unwrap_or_default();
        let backend = match &self.slots {
            Some(slots) => slots.owner(KeyText::new(key).as_bytes()),
            None => key as usize % self.backends.len(),
        };
        let deadline = cx.now() + self.options.deadline();
        let message = Message { conn, key, counter, is_request, is_urgent, deadline, is_asking: false };
        if self.backends[backend].pipeline.is_full() {
            // What may be sent at once does not wait.
            self.send_commands(cx, backend);
        }
        self.backends[backend].pipeline.push(message, &mut self.ended);
        true
    }

    /// Splits received bytes into messages, and returns how many bytes were consumed; `None` if a message is
    /// malformed.
    fn split(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> Option<usize> {
        let mut bytes = data;
        let message_bytes = self.options.message_bytes as usize;
        let (mut have, mut head) = match self.active.get_mut(&conn) {
            Some(active) => (core::mem::take(&mut active.partial_bytes) as usize, active.head),
            None => (0, [0; HEAD_BYTES]),
        };
        while !bytes.is_empty() {
            if have == 0 && self.pause_if_full(conn) {
                return Some(data.len() - bytes.len());
            }
            let (piece, rest) = bytes.split_at(bytes.len().min(message_bytes - have));
            if let Some(head) = head.get_mut(have..) {
                let len = head.len().min(piece.len());
                head[..len].copy_from_slice(&piece[..len]);
            }
            (have, bytes) = (have + piece.len(), rest);
            if have == message_bytes {
                if !self.accept_message(cx, conn, &head) {
                    return None;
                }
                have = 0;
            }
        }
        if have > 0 {
            let active = self.active.entry(conn).or_default();
            // The cast cannot truncate: it is less than the length of a message.
            (active.partial_bytes, active.head) = (have as u32, head);
        } else if self.active.get(&conn).is_some_and(ActiveConn::is_idle) {
            self.active.remove(&conn);
        }
        Some(data.len())
    }

    /// Returns true if a connection has so many requests without an answer that it must wait.
    fn pause_if_full(&mut self, conn: Conn) -> bool {
        let Some(active) = self.active.get_mut(&conn) else { return false };
        active.is_paused = active.outstanding >= OUTSTANDING_MAX;
        active.is_paused
    }

    /// Counts the messages that have ended, and answers requests.
    fn finish_ended(&mut self, cx: &mut Context<'_>) {
        let mut ended = core::mem::take(&mut self.ended);
        for (message, result) in ended.drain(..) {
            *match result {
                Ok(()) => &mut self.counters.done,
                Err(MessageError::Deadline) => &mut self.counters.failed_deadline,
                Err(MessageError::Shed) => &mut self.counters.failed_shed,
                Err(MessageError::Redis) => &mut self.counters.failed_redis,
            } += 1;
            if message.is_request {
                self.answer(cx, message.conn, result.is_ok());
            }
        }
        self.ended = ended;
    }

    /// Answers a request of a connection.
    fn answer(&mut self, cx: &mut Context<'_>, conn: Conn, is_ok: bool) {
        let Some(active) = self.active.get_mut(&conn) else {
            // It has ended.
            self.counters.answers_undeliverable += 1;
            return;
        };
        active.outstanding -= 1;
        if active.is_paused && active.outstanding <= OUTSTANDING_MAX / 2 {
            active.is_paused = false;
            cx.resume_reading(conn);
        }
        active.unsent.push_back(is_ok);
        // While other answers wait for space, so does this one.
        if active.unsent.len() == 1 {
            self.send_answers(cx, conn);
        }
    }

    /// Sends answers as far as there is space.
    fn send_answers(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let Some(active) = self.active.get_mut(&conn) else { return };
        while let Some(is_ok) = active.unsent.front().copied() {
            let text = if is_ok { ANSWER_OK } else { ANSWER_ERROR };
            // After an error the connection is about to be reported as closed.
            let Ok(sent) = cx.send(conn, &text[active.sent_bytes..]) else { return };
            active.sent_bytes += sent;
            if active.sent_bytes < ANSWER_BYTES {
                return;
            }
            active.sent_bytes = 0;
            active.unsent.pop_front();
            self.counters.answers += 1;
            self.counters.answers_error += u64::from(!is_ok);
        }
        if active.is_idle() {
            if active.peer_closed {
                // Fails only if it has ended already.
                let _ = cx.close(conn);
            }
            self.active.remove(&conn);
        }
    }

    /// Sets the timer that checks deadlines and connects again, if it has anything to do.
    fn set_tick(&mut self, cx: &mut Context<'_>) {
        let has_work = |b: &Backend| !b.pipeline.is_idle() || !matches!(b.link, LinkState::Up { .. });
        if !self.is_tick_set && self.backends.iter().any(has_work) {
            let first = Duration::from_millis(self.options.reconnect_first_ms.into());
            let interval = TICK_MAX.min(first).min(self.options.deadline() / TICKS_PER_DEADLINE);
            // The server has no other timer, so the limit of timers does not refuse it.
            self.is_tick_set = cx.set_timer(interval, 0).is_some();
        }
    }

    /// Sends waiting messages to a server, as many as may be in flight.
    fn send_commands(&mut self, cx: &mut Context<'_>, index: usize) {
        let Backend { pipeline, link: LinkState::Up { socket, handle }, out, out_sent, .. } =
            &mut self.backends[index]
        else {
            return;
        };
        if !out.is_empty() || pipeline.waiting() == 0 {
            // The socket is full: it is reported as writable later.
            return;
        }
        pipeline.send(cx.now(), out);
        if out.is_empty() {
            return;
        }
        let handle = *handle;
        match write_out(socket, out, out_sent) {
            Ok(true) => {}
            Ok(false) => {
                let interest = Interest { read: true, write: true, edge_triggered: false };
                if let Err(error) = cx.modify_kernel_fd(handle, interest) {
                    self.disconnect(cx, index, &error);
                }
            }
            Err(error) => self.disconnect(cx, index, &error),
        }
    }

    /// Continues to write after the socket was full.
    fn flush(&mut self, cx: &mut Context<'_>, index: usize) -> io::Result<()> {
        let Backend { link: LinkState::Up { socket, handle }, out, out_sent, .. } = &mut self.backends[index]
        else {
            return Ok(());
        };
        if !out.is_empty() && write_out(socket, out, out_sent)? {
            cx.modify_kernel_fd(*handle, Interest::READ)?;
        }
        Ok(())
    }

    /// Reads and processes replies.
    fn receive(&mut self, cx: &mut Context<'_>, index: usize) -> io::Result<()> {
        loop {
            let Backend { pipeline, link: LinkState::Up { socket, .. }, back_off, is_failure_logged, .. } =
                &mut self.backends[index]
            else {
                return Ok(());
            };
            let len = match link::receive(socket, &mut self.read_buffer) {
                Ok(0) => return Err(io::Error::other("the server closed the connection")),
                Ok(len) => len,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            let received = pipeline.receive(cx.now(), &self.read_buffer[..len], &mut self.ended);
            received.map_err(|error| io::Error::other(error.to_string()))?;
            *back_off = Duration::from_millis(self.options.reconnect_first_ms.into());
            if core::mem::take(is_failure_logged) {
                tracing::info!("redis {}: it answers again", self.backends[index].address);
            }
            if len < READ_BYTES {
                return Ok(());
            }
        }
    }

    /// Begins to connect to a server.
    fn connect(&mut self, cx: &mut Context<'_>, index: usize) {
        let attempt = link::connect(&self.backends[index].address).and_then(|(socket, is_connected)| {
            let interest = if is_connected { Interest::READ } else { Interest::WRITE };
            let handle = cx.register_kernel_fd(&socket, interest, index as u64)?;
            Ok((socket, handle, is_connected))
        });
        match attempt {
            Ok((socket, handle, true)) => {
                self.counters.redis_connects += 1;
                self.backends[index].link = LinkState::Up { socket, handle };
            }
            Ok((socket, handle, false)) => {
                self.backends[index].link = LinkState::Connecting { socket, handle, since: cx.now() };
            }
            Err(error) => self.refuse(cx, index, &error),
        }
    }

    /// Handles the end of an attempt to connect.
    fn finish_connect(&mut self, cx: &mut Context<'_>, index: usize) {
        let backend = &mut self.backends[index];
        let down = LinkState::Down { retry_at: Instant::MAX };
        let LinkState::Connecting { socket, handle, .. } = core::mem::replace(&mut backend.link, down) else {
            return;
        };
        let connected =
            link::connect_result(&socket).and_then(|()| cx.modify_kernel_fd(handle, Interest::READ));
        match connected {
            Ok(()) => {
                self.counters.redis_connects += 1;
                backend.link = LinkState::Up { socket, handle };
            }
            Err(error) => {
                let _ = cx.deregister_kernel_fd(handle);
                self.refuse(cx, index, &error);
            }
        }
    }

    /// Handles a failed attempt to connect.
    fn refuse(&mut self, cx: &mut Context<'_>, index: usize, error: &io::Error) {
        self.counters.redis_refused += 1;
        self.fail(cx.now(), index, error);
    }

    /// Closes a connection to a server after an error. Its messages wait for the next connection.
    fn disconnect(&mut self, cx: &mut Context<'_>, index: usize, error: &io::Error) {
        let backend = &mut self.backends[index];
        let down = LinkState::Down { retry_at: Instant::MAX };
        if let LinkState::Up { handle, .. } | LinkState::Connecting { handle, .. } = &backend.link {
            // It is registered as long as the link has it.
            let _ = cx.deregister_kernel_fd(*handle);
        }
        backend.link = down;
        self.counters.redis_disconnects += 1;
        self.counters.redis_repeated += backend.pipeline.disconnect() as u64;
        backend.out.clear();
        backend.out_sent = 0;
        self.fail(cx.now(), index, error);
    }

    /// Passes redirected messages to the servers that own their keys.
    fn redirect(&mut self, cx: &mut Context<'_>, index: usize) {
        while let Some((message, redirection)) = self.backends[index].pipeline.take_redirected() {
            let Some(server) = self.owner_of(cx, redirection) else {
                self.ended.push((message, Err(MessageError::Redis)));
                continue;
            };
            self.counters.redis_redirected += 1;
            let message = Message { is_asking: redirection.is_ask, ..message };
            self.backends[server].pipeline.push_front(message);
        }
    }

    /// Returns the server of a redirection; `None` without a cluster, or if it has too many servers.
    fn owner_of(&mut self, cx: &mut Context<'_>, redirection: Redirection) -> Option<usize> {
        let Redirection { slot, server, is_ask } = redirection;
        let slots = self.slots.as_mut()?;
        let address = RedisAddress::Tcp(server);
        let known = self.backends.iter().position(|backend| backend.address == address);
        let index = known.unwrap_or(self.backends.len());
        if index >= SERVERS_MAX {
            return None;
        }
        if !is_ask {
            slots.set_owner(slot, index);
        }
        if known.is_none() {
            self.backends.push(Backend::new(&self.options, address));
            self.connect(cx, index);
        }
        Some(index)
    }

    /// Asks another server of the cluster about the messages of a server that does not answer: it may have
    /// been replaced. If it was not, they are redirected to it again.
    fn ask_others(&mut self, index: usize) {
        let Some(slots) = &mut self.slots else { return };
        let is_up = |other: &usize| matches!(self.backends[*other].link, LinkState::Up { .. });
        let count = self.backends.len();
        let Some(other) = (1..count).map(|step| (index + step) % count).find(is_up) else { return };
        slots.replace(index, other);
        while let Some(message) = self.backends[index].pipeline.take_waiting() {
            self.backends[other].pipeline.push_front(Message { is_asking: false, ..message });
        }
    }

    /// Plans the next attempt after an error.
    fn fail(&mut self, now: Instant, index: usize, error: &io::Error) {
        let max = Duration::from_millis(self.options.reconnect_max_ms.into());
        let backend = &mut self.backends[index];
        let wait = backend.back_off.min(max);
        backend.link = LinkState::Down { retry_at: now + wait };
        backend.back_off = (wait * 2).min(max);
        if !core::mem::replace(&mut backend.is_failure_logged, true) {
            tracing::warn!("redis {}: {error}; its messages wait until it answers", backend.address);
        }
        self.ask_others(index);
    }

    /// Checks deadlines and connections.
    fn tick(&mut self, cx: &mut Context<'_>) {
        let now = cx.now();
        for index in 0..self.backends.len() {
            let backend = &mut self.backends[index];
            backend.pipeline.expire(now, &mut self.ended);
            let timeout = || io::Error::new(ErrorKind::TimedOut, "it did not answer in time");
            match &backend.link {
                LinkState::Down { retry_at } if *retry_at <= now => self.connect(cx, index),
                LinkState::Connecting { handle, since, .. }
                    if now.saturating_since(*since) >= self.options.deadline() =>
                {
                    let _ = cx.deregister_kernel_fd(*handle);
                    self.refuse(cx, index, &timeout());
                }
                LinkState::Up { .. } if backend.pipeline.is_stalled(now) => {
                    self.disconnect(cx, index, &timeout());
                }
                _ => {}
            }
        }
    }

    /// Ends the shard if it was asked to stop and nothing waits any more.
    fn stop_if_done(&self, cx: &mut Context<'_>) {
        let has_unsent = || self.active.values().any(|active| !active.unsent.is_empty());
        if self.is_stopping && self.waiting() == 0 && !has_unsent() {
            cx.stop();
        }
    }
}

/// Writes commands, and returns whether all were accepted; the buffer is empty then.
fn write_out(socket: &OwnedFd, out: &mut Vec<u8>, sent: &mut usize) -> io::Result<bool> {
    while *sent < out.len() {
        match link::send(socket, &out[*sent..]) {
            Ok(len) => *sent += len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    out.clear();
    *sent = 0;
    Ok(true)
}

/// Returns the key of a peer, which depends neither on the placement nor on the run (FNV-1a).
fn key_of(peer: SocketAddr, keys: u32) -> u32 {
    let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let start = 0xcbf2_9ce4_8422_2325;
    let hash = match peer.ip() {
        IpAddr::V4(ip) => ip.octets().into_iter().fold(start, fold),
        IpAddr::V6(ip) => ip.octets().into_iter().fold(start, fold),
    };
    let hash = peer.port().to_be_bytes().into_iter().fold(hash, fold);
    // The remainder is less than `keys`.
    ((hash ^ hash >> 32) % u64::from(keys)) as u32
}

impl Handler for Iot {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
        for address in &self.options.listen {
            let options = ListenOptions { socket, v6_only: true, ..ListenOptions::default() };
            self.listeners.push(cx.listen(*address, options)?);
        }
        (0..self.backends.len()).for_each(|index| self.connect(cx, index));
        self.set_tick(cx);
        Ok(())
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, _: Listener) {
        self.counters.connections += 1;
        self.open += 1;
        // If the connection has ended already, `closed` follows.
        if let Ok([_, peer]) = cx.endpoints(conn) {
            let _ = cx.set_token(conn, key_of(peer, self.options.keys));
        }
    }

    fn takes_any_bytes(&self) -> bool {
        true
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        if self.is_stopping || self.active.get(&conn).is_some_and(|active| !active.unsent.is_empty()) {
            // A peer that does not read its answers sends nothing more.
            return 0;
        }
        let consumed = self.split(cx, conn, data);
        if !self.ended.is_empty() {
            self.finish_ended(cx);
        }
        if consumed.is_none() {
            // Fails only if it has ended already.
            let _ = cx.abort(conn);
        }
        consumed.unwrap_or(data.len())
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.send_answers(cx, conn);
        if self.active.get(&conn).is_none_or(|active| active.unsent.is_empty()) {
            cx.resume_reading(conn);
            self.stop_if_done(cx);
        }
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Some(active) = self.active.get_mut(&conn) {
            self.counters.truncated += u64::from(core::mem::take(&mut active.partial_bytes) > 0);
            active.peer_closed = true;
            if !active.is_idle() {
                // It is closed after its last answer.
                return;
            }
            self.active.remove(&conn);
        }
        // Fails only if it has ended already.
        let _ = cx.close(conn);
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, _: CloseReason) {
        self.open -= 1;
        if let Some(active) = self.active.remove(&conn) {
            self.counters.truncated += u64::from(active.partial_bytes > 0);
            self.counters.answers_undeliverable += active.unsent.len() as u64;
        }
        self.stop_if_done(cx);
    }

    fn kernel_ready(&mut self, cx: &mut Context<'_>, token: u64, readiness: Readiness) {
        // The token was made from an index.
        let index = token as usize;
        if matches!(self.backends[index].link, LinkState::Connecting { .. }) {
            return self.finish_connect(cx, index);
        }
        let mut result = Ok(());
        if readiness.readable {
            result = self.receive(cx, index);
        }
        if readiness.writable && result.is_ok() {
            result = self.flush(cx, index);
        }
        self.redirect(cx, index);
        if let Err(error) = result {
            self.disconnect(cx, index, &error);
        }
        self.finish_ended(cx);
        self.stop_if_done(cx);
    }

    fn work(&mut self, cx: &mut WorkContext<'_>) -> Result<usize, Error> {
        if self.backends.iter().any(|backend| backend.pipeline.waiting() > 0) {
            let mut cx = cx.context();
            (0..self.backends.len()).for_each(|index| self.send_commands(&mut cx, index));
            self.set_tick(&mut cx);
        } else if !self.is_tick_set {
            self.set_tick(&mut cx.context());
        }
        // Everything else waits for Redis or for the timer.
        Ok(0)
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        self.is_tick_set = false;
        self.tick(cx);
        self.finish_ended(cx);
        self.set_tick(cx);
        self.stop_if_done(cx);
    }

    fn stopping(&mut self, cx: &mut Context<'_>) {
        self.is_stopping = true;
        for listener in core::mem::take(&mut self.listeners) {
            // Fails only if an administrator has closed it.
            let _ = cx.unlisten(listener);
        }
        self.stop_if_done(cx);
    }

    fn report_counters(&self, report: &mut dyn FnMut(CounterKind, &'static str, u64)) {
        self.counters.report(report);
        report(CounterKind::Gauge, "iot.open", self.open);
        report(CounterKind::Gauge, "iot.waiting", self.waiting());
        report(CounterKind::Gauge, "iot.in_flight", self.in_flight());
    }
}
