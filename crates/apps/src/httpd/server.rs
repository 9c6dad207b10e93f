//! The server without its network: bytes and times go in, calls on a [`Transport`] come out.
//!
//! A connection is always in one [`ConnectionPhase`]. Requests are handled one after the other: while a
//! response waits for free send buffer, further requests stay unread in the transport. So the receive window
//! limits a client that pipelines without reading, and responses keep the order of their requests.

pub mod recorder;
mod sending;

use super::body::BodyReader;
use super::clock::Clock;
use super::exchange::{self, ExchangePool, Payload, retained};
use super::head::{self, HEADERS_MAX, HeaderBuffer, Scanner};
use super::limits::ServerOptions;
use super::request_cache::{CachedResponse, RequestCache};
use super::response::{DateText, Persistence};
use super::site::{FileId, Site};
use super::status::Status;
use crate::sweep::Sweep;
use core::mem::MaybeUninit;
use core::time::Duration;
use ginnel::{Conn, Instant};

/// Bytes read from a file at a time, which bounds the time that a shard's other work waits for.
const READ_BYTES: usize = 64 << 10;

/// The network that the server uses. A call for a closed connection does nothing.
pub trait Transport {
    /// Queues a copy of as many bytes as fit into the send buffer and returns how many. If that is less than
    /// all, the transport must call [`Server::writable`] later.
    fn send(&mut self, conn: Conn, bytes: &[u8]) -> usize;
    /// Queues a range of a loaded file, all of it or nothing. After `false` the transport must call
    /// [`Server::writable`] later.
    fn send_file(&mut self, conn: Conn, file: FileId, offset: u64, len: u64) -> bool;
    /// Sends FIN after the queued data; receiving continues.
    fn finish(&mut self, conn: Conn);
    /// Closes the connection after the queued data. [`Server::closed`] follows.
    fn close(&mut self, conn: Conn);
    /// Resets the connection. [`Server::closed`] follows.
    fn abort(&mut self, conn: Conn);
    /// Asks the transport to deliver unread data again.
    fn resume_reading(&mut self, conn: Conn);
    /// Returns a number that changes when queued bytes are acknowledged, or `None` if all of them are. Called
    /// only when a timeout expires.
    fn outstanding(&mut self, conn: Conn) -> Option<u32>;
}

/// Counters of the server.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerCounters {
    /// Accepted connections.
    pub connections: u64,
    /// Requests answered, with any status.
    pub responses: u64,
    /// Requests answered with an error (status ≥ 400).
    pub errors: u64,
    /// Connections that a timeout ended.
    pub timeouts: u64,
    /// Connections open now.
    pub open: u64,
}

/// Phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionPhase {
    /// The slot has no connection.
    Vacant,
    /// Between requests.
    Idle,
    /// A head has arrived in part.
    Head,
    /// A body is being skipped; its response is ready.
    Body,
    /// A response waits for free send buffer.
    Sending,
    /// The last response and FIN were sent. Received data are dropped until the client closes, too. Closing
    /// with unread data would send a reset, which can destroy the response (RFC 9112 §9.6).
    Draining,
    /// Closed or reset; only the call of [`Server::closed`] is outstanding.
    Closed,
}

/// A slot of the connection table: 20 bytes.
#[derive(Clone, Copy, Debug)]
struct ConnectionSlot {
    generation: u32,
    /// Second at which the phase times out.
    deadline: u32,
    /// Index of the exchange in progress, or [`exchange::NONE`].
    exchange: u32,
    /// The result of [`Transport::outstanding`] at the last timeout.
    outstanding: u32,
    phase: ConnectionPhase,
    /// True if the client has closed its side.
    half_closed: bool,
    /// True if the sweep has an entry for the slot.
    in_sweep: bool,
}

impl ConnectionSlot {
    const VACANT: Self = Self {
        generation: 0,
        deadline: 0,
        exchange: exchange::NONE,
        outstanding: 0,
        phase: ConnectionPhase::Vacant,
        half_closed: false,
        in_sweep: false,
    };
}

/// A server of static files for any number of connections.
pub struct Server {
    pub(super) site: Site,
    options: ServerOptions,
    connections: Vec<ConnectionSlot>,
    exchanges: ExchangePool,
    sweep: Sweep,
    clock: Clock,
    counters: ServerCounters,
    request_cache: RequestCache,
    /// Connections whose next block of a file is not in the page cache.
    waiting_for_disk: Vec<Conn>,
    /// Buffers for a head, a normalised path and a block of a file.
    pub(super) head: Vec<u8>,
    pub(super) path: Vec<u8>,
    read_buffer: Box<[u8]>,
}

/// The response to a request. Its head, and for a small file its body, are in [`Server::head`] unless it is
/// prepared.
pub(super) struct ResponsePlan {
    /// The file whose prepared response is sent, and whether only the head is sent.
    pub prepared: Option<(FileId, bool)>,
    /// Body that follows the head.
    pub payload: Payload,
    /// True if the connection is closed after the response.
    pub close: bool,
    /// True if the status is 400 or above.
    pub is_error: bool,
}

impl Server {
    /// Creates a server of `site`. `now` is the transport's time and `unix` the time of day.
    pub fn new(site: Site, options: ServerOptions, now: Instant, unix: Duration) -> Self {
        let t = options.timeouts;
        let timeout_min = t.head.min(t.idle).min(t.body).min(t.send).min(t.linger);
        let clock = Clock::new(now, unix);
        Self {
            site,
            options,
            connections: Vec::new(),
            exchanges: ExchangePool::default(),
            sweep: Sweep::new(timeout_min, clock.second),
            clock,
            counters: ServerCounters::default(),
            request_cache: RequestCache::default(),
            waiting_for_disk: Vec::new(),
            head: Vec::with_capacity(1 << 10),
            path: Vec::with_capacity(1 << 10),
            read_buffer: vec![0; READ_BYTES].into(),
        }
    }

    /// Returns the counters.
    pub const fn counters(&self) -> &ServerCounters {
        &self.counters
    }

    /// Returns the site.
    pub const fn site(&self) -> &Site {
        &self.site
    }

    /// Returns the current value of the Date field.
    pub(super) const fn date(&self) -> &DateText {
        &self.clock.date
    }

    /// Sets the time of day again, to follow a clock that is adjusted.
    pub fn set_clock(&mut self, now: Instant, unix: Duration) {
        self.clock = Clock::new(now, unix);
    }

    /// Handles an accepted connection.
    pub fn accepted(&mut self, now: Instant, conn: Conn) {
        self.clock.update(now);
        let index = conn.index() as usize;
        if index >= self.connections.len() {
            self.connections.resize(index + 1, ConnectionSlot::VACANT);
        }
        let deadline = self.clock.deadline_after(self.options.timeouts.head);
        let slot = &mut self.connections[index];
        if !slot.in_sweep {
            self.sweep.enter(conn.index(), deadline);
        }
        let generation = conn.generation();
        *slot = ConnectionSlot {
            generation,
            deadline,
            phase: ConnectionPhase::Idle,
            in_sweep: true,
            ..ConnectionSlot::VACANT
        };
        self.counters.connections += 1;
        self.counters.open += 1;
    }

    fn slot(&mut self, conn: Conn) -> Option<&mut ConnectionSlot> {
        self.connections
            .get_mut(conn.index() as usize)
            .filter(|c| c.generation == conn.generation() && c.phase != ConnectionPhase::Vacant)
    }

    /// Handles received bytes and returns how many were consumed. The transport must deliver the rest again
    /// after [`Transport::resume_reading`].
    pub fn data(&mut self, now: Instant, conn: Conn, bytes: &[u8], net: &mut impl Transport) -> usize {
        self.clock.update(now);
        let mut used = 0;
        while used < bytes.len() {
            let rest = &bytes[used..];
            used += match self.slot(conn).map(|c| c.phase) {
                Some(ConnectionPhase::Idle) => self.begin_request(conn, rest, net),
                Some(ConnectionPhase::Head) => self.continue_head(conn, rest, net),
                Some(ConnectionPhase::Body) => self.continue_body(conn, rest, net),
                Some(ConnectionPhase::Sending) => break,
                Some(ConnectionPhase::Draining | ConnectionPhase::Closed | ConnectionPhase::Vacant)
                | None => rest.len(),
            };
        }
        used
    }

    /// Continues a response when send buffer has become free.
    pub fn writable(&mut self, now: Instant, conn: Conn, net: &mut impl Transport) {
        self.clock.update(now);
        if self.slot(conn).is_some_and(|c| c.phase == ConnectionPhase::Sending) {
            self.flush(conn, net);
        }
    }

    /// Handles the client's FIN, after all its data were consumed.
    pub fn peer_closed(&mut self, conn: Conn, net: &mut impl Transport) {
        let Some(slot) = self.slot(conn) else { return };
        slot.half_closed = true;
        match slot.phase {
            // An incomplete request gets no response.
            ConnectionPhase::Idle
            | ConnectionPhase::Head
            | ConnectionPhase::Body
            | ConnectionPhase::Draining => self.close(conn, net),
            ConnectionPhase::Sending | ConnectionPhase::Closed | ConnectionPhase::Vacant => {}
        }
    }

    /// Handles the end of a connection.
    pub fn closed(&mut self, conn: Conn) {
        if let Some(slot) = self.slot(conn) {
            let (exchange, in_sweep) = (slot.exchange, slot.in_sweep);
            *slot = ConnectionSlot { in_sweep, ..ConnectionSlot::VACANT };
            self.counters.open -= 1;
            if exchange != exchange::NONE {
                self.exchanges.release(exchange);
            }
        }
    }

    /// Ends the connections whose phase has timed out. Called once per second.
    pub fn tick(&mut self, now: Instant, net: &mut impl Transport) {
        self.clock.update(now);
        let second = self.clock.second;
        while let Some(index) = self.sweep.take_due(second) {
            let slot = self.connections[index as usize];
            if slot.phase != ConnectionPhase::Vacant && slot.deadline <= second {
                self.expire(Conn::new(index, slot.generation), slot.phase, net);
            }
            let slot = &mut self.connections[index as usize];
            slot.in_sweep = slot.phase != ConnectionPhase::Vacant;
            if slot.in_sweep {
                self.sweep.enter(index, slot.deadline);
            }
        }
    }

    fn expire(&mut self, conn: Conn, phase: ConnectionPhase, net: &mut impl Transport) {
        if matches!(phase, ConnectionPhase::Idle | ConnectionPhase::Draining)
            && let Some(outstanding) = net.outstanding(conn)
        {
            // A response is still in flight: the client is slow and not idle, unless it acknowledges nothing
            // at all.
            let deadline = self.clock.deadline_after(self.options.timeouts.send);
            let slot = &mut self.connections[conn.index() as usize];
            if core::mem::replace(&mut slot.outstanding, outstanding) != outstanding {
                slot.deadline = deadline;
                return;
            }
        }
        self.counters.timeouts += 1;
        match phase {
            ConnectionPhase::Idle => self.finish(conn, net),
            ConnectionPhase::Head | ConnectionPhase::Body => {
                self.refuse(conn, Status::RequestTimeout, false, net)
            }
            ConnectionPhase::Sending => {
                net.abort(conn);
                self.set_phase(conn, ConnectionPhase::Closed);
            }
            ConnectionPhase::Draining => self.close(conn, net),
            ConnectionPhase::Closed | ConnectionPhase::Vacant => {}
        }
    }

    /// Returns true if [`Server::read_disk`] should be called in a millisecond.
    pub const fn waits_for_disk(&self) -> bool {
        !self.waiting_for_disk.is_empty()
    }

    /// Continues the connections that wait for the disk.
    pub fn read_disk(&mut self, now: Instant, net: &mut impl Transport) {
        let mut waiting = core::mem::take(&mut self.waiting_for_disk);
        waiting.sort_unstable();
        waiting.dedup(); // room to send may have led to a second try meanwhile
        for conn in waiting {
            self.writable(now, conn, net);
        }
    }

    /// Closes idle connections now, and the others after their response. All are closed once
    /// [`ServerCounters::open`] is 0.
    pub fn drain(&mut self, net: &mut impl Transport) {
        self.options.keep_alive = false;
        self.request_cache.clear();
        for index in 0..self.connections.len() {
            let slot = self.connections[index];
            let conn = Conn::new(index as u32, slot.generation);
            match slot.phase {
                ConnectionPhase::Idle => self.finish(conn, net),
                ConnectionPhase::Body => self.close_after_deferred(conn),
                ConnectionPhase::Sending => self.exchange(conn).close = true,
                // The response to a head that is incomplete announces the close.
                ConnectionPhase::Head
                | ConnectionPhase::Draining
                | ConnectionPhase::Closed
                | ConnectionPhase::Vacant => {}
            }
        }
    }

    fn set_phase(&mut self, conn: Conn, phase: ConnectionPhase) {
        let t = self.options.timeouts;
        let deadline = match phase {
            ConnectionPhase::Idle => self.clock.deadline_after(t.idle),
            ConnectionPhase::Head => self.clock.deadline_after(t.head),
            ConnectionPhase::Body => self.clock.deadline_after(t.body),
            ConnectionPhase::Sending => self.clock.deadline_after(t.send),
            ConnectionPhase::Draining => self.clock.deadline_after(t.linger),
            ConnectionPhase::Closed | ConnectionPhase::Vacant => u32::MAX,
        };
        if let Some(slot) = self.slot(conn) {
            (slot.phase, slot.deadline) = (phase, deadline);
        }
    }

    /// Returns the connection's exchange, and takes one from the pool if it has none.
    fn exchange(&mut self, conn: Conn) -> &mut exchange::Exchange {
        let slot = &mut self.connections[conn.index() as usize];
        if slot.exchange == exchange::NONE {
            slot.exchange = self.exchanges.take();
        }
        self.exchanges.get(slot.exchange)
    }

    fn release_exchange(&mut self, conn: Conn) {
        let slot = &mut self.connections[conn.index() as usize];
        let exchange = core::mem::replace(&mut slot.exchange, exchange::NONE);
        if exchange != exchange::NONE {
            self.exchanges.release(exchange);
        }
    }

    /// Handles bytes at the start of a request. A complete request is parsed in place.
    fn begin_request(&mut self, conn: Conn, bytes: &[u8], net: &mut impl Transport) -> usize {
        if let Some((len, CachedResponse { file, is_head, close })) = self.request_cache.find(bytes) {
            let plan = self.plan_prepared(file, is_head, close);
            self.counters.responses += 1;
            self.respond(conn, plan, net);
            return len;
        }
        let mut buffer: HeaderBuffer<'_> = [const { MaybeUninit::uninit() }; HEADERS_MAX];
        if let Some((len, request)) = head::parse_complete_head(bytes, &mut buffer, &self.options.limits) {
            match request {
                Ok(request) => {
                    let cached = self.handle_request(conn, &request, net);
                    if let Some(plan) = cached {
                        self.request_cache.insert(bytes, len, plan);
                    }
                }
                Err(status) => self.refuse(conn, status, bytes.starts_with(b"HEAD "), net),
            }
            return len;
        }
        let mut scanner = Scanner::NEW;
        match scanner.find_end(bytes, &self.options.limits) {
            Ok(Some(end)) => {
                self.handle_head(conn, &bytes[..end], net);
                end
            }
            Ok(None) => {
                let exchange = self.exchange(conn);
                exchange.input.extend_from_slice(bytes);
                exchange.scanner = scanner;
                self.set_phase(conn, ConnectionPhase::Head);
                bytes.len()
            }
            Err(status) => {
                self.refuse(conn, status, bytes.starts_with(b"HEAD "), net);
                bytes.len()
            }
        }
    }

    fn continue_head(&mut self, conn: Conn, bytes: &[u8], net: &mut impl Transport) -> usize {
        let limits = self.options.limits;
        let exchange = self.exchange(conn);
        let before = exchange.input.len();
        // One byte more than the limit shows that the head is too long.
        let room = (limits.head_bytes_max + 1).saturating_sub(before);
        let taken = bytes.len().min(room);
        exchange.input.extend_from_slice(&bytes[..taken]);
        match exchange.scanner.find_end(&exchange.input, &limits) {
            Ok(Some(end)) => {
                let input = core::mem::take(&mut exchange.input);
                let record = self.connections[conn.index() as usize].exchange;
                self.handle_head(conn, &input[..end], net);
                // The record belongs to the response, or is back in the pool. It keeps a small buffer in
                // either case.
                let exchange = self.exchanges.get(record);
                exchange.input = retained(input);
                exchange.scanner = Scanner::NEW;
                end - before
            }
            Ok(None) => taken,
            Err(status) => {
                let is_head = exchange.input.starts_with(b"HEAD ");
                self.refuse(conn, status, is_head, net);
                bytes.len()
            }
        }
    }

    fn continue_body(&mut self, conn: Conn, bytes: &[u8], net: &mut impl Transport) -> usize {
        let exchange = self.exchange(conn);
        let Some(body) = &mut exchange.body else { return bytes.len() };
        match body.read(bytes) {
            Ok(used) => {
                if body.is_done() {
                    self.set_phase(conn, ConnectionPhase::Sending);
                    self.flush(conn, net);
                } else {
                    self.set_phase(conn, ConnectionPhase::Body);
                }
                used
            }
            Err(status) => {
                self.refuse(conn, status, false, net);
                bytes.len()
            }
        }
    }

    /// Handles a complete head.
    fn handle_head(&mut self, conn: Conn, bytes: &[u8], net: &mut impl Transport) {
        let mut buffer: HeaderBuffer<'_> = [const { MaybeUninit::uninit() }; HEADERS_MAX];
        match head::parse(bytes, &mut buffer) {
            Ok(request) => {
                self.handle_request(conn, &request, net);
            }
            Err(status) => self.refuse(conn, status, bytes.starts_with(b"HEAD "), net),
        }
    }

    /// Handles a parsed request. Returns the response if equal bytes always get it.
    fn handle_request(
        &mut self,
        conn: Conn,
        request: &head::Request<'_, '_>,
        net: &mut impl Transport,
    ) -> Option<CachedResponse> {
        let body = match BodyReader::new(request.body, self.options.limits.body_bytes_max) {
            Ok(body) => body,
            Err(status) => {
                self.refuse(conn, status, request.method == head::Method::Head, net);
                return None;
            }
        };
        let persistence = match (request.keep_alive && self.options.keep_alive, request.version) {
            (false, _) => Persistence::Close,
            (true, head::Version::Http10) => Persistence::KeepExplicit,
            (true, head::Version::Http11) => Persistence::Keep,
        };
        let plan = self.plan_response(request, persistence);
        self.counters.responses += 1;
        self.counters.errors += u64::from(plan.is_error);
        if body.is_done() {
            let close = plan.close;
            let cached = plan.prepared.map(|(file, is_head)| CachedResponse { file, is_head, close });
            self.respond(conn, plan, net);
            return cached;
        }
        // RFC 9110 §10.1.1: a client that waits for 100 learns of an error before it sends the body. It may
        // send the body nevertheless, so the connection must be closed.
        let is_refused = request.expects_continue && plan.is_error;
        self.defer(conn, plan, body);
        if is_refused {
            self.send_deferred_and_close(conn, net);
        } else if request.expects_continue {
            self.send_continue(conn, net);
        }
        None
    }
}

#[cfg(test)]
mod tests;
