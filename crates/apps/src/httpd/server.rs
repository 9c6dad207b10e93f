//! The server without its network: bytes and times go in, calls on a [`Transport`] come out.
//!
//! A connection is always in one [`Phase`]. Requests are taken one after the other: while a response waits for room to be sent, further
//! requests stay with the transport, unread, so that a client that pipelines without reading is held back by its own window, and
//! responses keep the order of their requests.

pub mod recorder;
mod sending;

use super::body::BodyReader;
use super::clock::Clock;
use super::exchange::{self, ExchangePool, Payload};
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

/// Bytes read from a file at once: what a shard's other work may have to wait for.
const READ_BYTES: usize = 64 << 10;

/// What the server asks of the network. A call on a connection that is gone does nothing.
pub trait Transport {
    /// Queues a copy of as many bytes as there is room for; returns how many. After less than all, [`Server::writable`] must follow.
    fn send(&mut self, conn: Conn, bytes: &[u8]) -> usize;
    /// Queues a range of a loaded file, all or nothing. After `false`, [`Server::writable`] must follow.
    fn send_file(&mut self, conn: Conn, file: FileId, offset: u64, len: u64) -> bool;
    /// Sends FIN behind what is queued; receiving goes on.
    fn finish(&mut self, conn: Conn);
    /// Closes; what is queued is still sent. [`Server::closed`] follows.
    fn close(&mut self, conn: Conn);
    /// Resets. [`Server::closed`] follows.
    fn abort(&mut self, conn: Conn);
    /// Asks for data that were left unread to be shown again.
    fn resume_reading(&mut self, conn: Conn);
    /// About how many of the bytes that were queued are not acknowledged; `None` if all are. It must change when some are. Asked only when
    /// a time-out runs out.
    fn outstanding(&mut self, conn: Conn) -> Option<u32>;
}

/// What was done so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerCounters {
    /// Connections accepted.
    pub connections: u64,
    /// Requests answered, with whatever status.
    pub responses: u64,
    /// Those that were answered with an error (status ≥ 400).
    pub errors: u64,
    /// Connections ended by a time-out.
    pub timeouts: u64,
    /// Connections that are open now.
    pub open: u64,
}

/// Where a connection stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConnectionPhase {
    /// No connection.
    Vacant,
    /// Between requests.
    Idle,
    /// A head has come in part.
    Head,
    /// A body is being skipped; its response is ready.
    Body,
    /// A response waits for room.
    Sending,
    /// Everything was said and FIN sent: what comes is dropped until the client closes too, because closing with unread data
    /// would be a reset that can destroy the response on its way (RFC 9112 §9.6).
    Draining,
    /// Closed or reset; only the transport's last word is missing.
    Closed,
}

/// 20 bytes for each slot of the transport's connection table.
#[derive(Clone, Copy, Debug)]
struct ConnectionSlot {
    generation: u32,
    /// Second at which the phase ends.
    deadline: u32,
    /// Index of its record, if it is in the middle of something.
    exchange: u32,
    /// Bytes that were on their way when a time-out ran out last.
    outstanding: u32,
    phase: ConnectionPhase,
    /// The client has closed its side.
    half_closed: bool,
    /// The sweep has an entry for the slot.
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
    /// Connections whose next piece is not in memory yet.
    waiting_for_disk: Vec<Conn>,
    /// Scratch: a head being written, a path being normalised, a piece of a file.
    pub(super) head: Vec<u8>,
    pub(super) path: Vec<u8>,
    read_buffer: Box<[u8]>,
}

/// What a request is answered with. The head, and perhaps a small body, stand in [`Server::head`], unless it is a prepared one.
pub(super) struct ResponsePlan {
    /// A prepared response of this file, and whether only its head is wanted.
    pub prepared: Option<(FileId, bool)>,
    /// What follows.
    pub payload: Payload,
    /// Close afterwards.
    pub close: bool,
    /// Status ≥ 400.
    pub is_error: bool,
}

impl Server {
    /// A server of `site`. `now` is the transport's time, `unix` the time of day.
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

    /// What was done so far.
    pub const fn counters(&self) -> &ServerCounters {
        &self.counters
    }

    /// The site.
    pub const fn site(&self) -> &Site {
        &self.site
    }

    /// The time of day as the Date field has it.
    pub(super) const fn date(&self) -> &DateText {
        &self.clock.date
    }

    /// Sets the time of day again, to follow a clock that is adjusted.
    pub fn set_clock(&mut self, now: Instant, unix: Duration) {
        self.clock = Clock::new(now, unix);
    }

    /// A connection was accepted.
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

    /// Bytes arrived; returns how many were taken. The rest must be shown again after [`Transport::resume_reading`].
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

    /// There is room again.
    pub fn writable(&mut self, now: Instant, conn: Conn, net: &mut impl Transport) {
        self.clock.update(now);
        if self.slot(conn).is_some_and(|c| c.phase == ConnectionPhase::Sending) {
            self.flush(conn, net);
        }
    }

    /// The client closed its side, and all it sent was taken.
    pub fn peer_closed(&mut self, conn: Conn, net: &mut impl Transport) {
        let Some(slot) = self.slot(conn) else { return };
        slot.half_closed = true;
        match slot.phase {
            // Nothing is owed: a request that will never be complete gets no answer.
            ConnectionPhase::Idle
            | ConnectionPhase::Head
            | ConnectionPhase::Body
            | ConnectionPhase::Draining => self.close(conn, net),
            ConnectionPhase::Sending | ConnectionPhase::Closed | ConnectionPhase::Vacant => {}
        }
    }

    /// The connection is gone.
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

    /// Once per second: ends what has waited too long.
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
            // A response is still on its way: the client is not idle but slow, unless it takes nothing at all.
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

    /// True if [`Server::read_disk`] should be called again in a millisecond.
    pub const fn waits_for_disk(&self) -> bool {
        !self.waiting_for_disk.is_empty()
    }

    /// Goes on with connections whose file was not in memory.
    pub fn read_disk(&mut self, now: Instant, net: &mut impl Transport) {
        let mut waiting = core::mem::take(&mut self.waiting_for_disk);
        waiting.sort_unstable();
        waiting.dedup(); // room to send may have led to a second try meanwhile
        for conn in waiting {
            self.writable(now, conn, net);
        }
    }

    /// Takes leave: idle connections are closed now, the others after the response they wait for. Once [`Counters::open`] is 0 all is done.
    pub fn drain(&mut self, net: &mut impl Transport) {
        self.options.keep_alive = false;
        self.request_cache.clear();
        for index in 0..self.connections.len() {
            let slot = self.connections[index];
            if slot.phase == ConnectionPhase::Idle {
                self.finish(Conn::new(index as u32, slot.generation), net);
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

    /// The connection's record, taken from the pool if it has none.
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

    /// Bytes at the start of a request. Usually it is there as a whole and is read where it lies.
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
        // One byte beyond the limit is enough to know that it is exceeded.
        let room = (limits.head_bytes_max + 1).saturating_sub(before);
        let taken = bytes.len().min(room);
        exchange.input.extend_from_slice(&bytes[..taken]);
        match exchange.scanner.find_end(&exchange.input, &limits) {
            Ok(Some(end)) => {
                let mut input = core::mem::take(&mut exchange.input);
                let record = self.connections[conn.index() as usize].exchange;
                self.handle_head(conn, &input[..end], net);
                // The record still waits for the response, or is back in the pool already: the buffer belongs to it either way.
                input.clear();
                let exchange = self.exchanges.get(record);
                (exchange.input, exchange.scanner) = (input, Scanner::NEW);
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

    /// A whole head is there.
    fn handle_head(&mut self, conn: Conn, bytes: &[u8], net: &mut impl Transport) {
        let mut buffer: HeaderBuffer<'_> = [const { MaybeUninit::uninit() }; HEADERS_MAX];
        match head::parse(bytes, &mut buffer) {
            Ok(request) => {
                self.handle_request(conn, &request, net);
            }
            Err(status) => self.refuse(conn, status, bytes.starts_with(b"HEAD "), net),
        }
    }

    /// A request is understood. Returns the answer if the same bytes will always get it.
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
        // RFC 9110 §10.1.1: a client that waits learns of an error before it sends the body. Whether it then still sends it is its
        // choice, so the connection cannot go on.
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
