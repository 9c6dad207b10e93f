//! The network that a session drives: connections, and what leaves on them.

use super::buffer::{Buffers, Waiting};
use super::conn::{Conn, FLIGHT_SEGMENTS_MAX, Flags, NO_SLOT, State};
use super::frames::{self, NEIGHBOUR_BYTES, Numbers, Template};
use super::locals::{Local, Locals};
use super::neighbour::Neighbour;
use super::target::{Target, WINDOW_SHIFT};
use crate::load::session::Network;
use crate::load::stats::Failure;
use core::net::{IpAddr, SocketAddr};
use ginnel::Instant;
use ginnel_stack::device::{BURST_FRAMES_MAX, TxMeta, TxQueue};
use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags};
use ginnel_stack::wire::{MacAddr, arp, ndp};
use std::collections::VecDeque;

/// Frames after which those made so far are shown to the device, so that the other side can begin on them.
const FRAMES_PER_FLUSH: u32 = 8;
/// A SYN, and other segments, are sent again so often at the most, as Linux does; those of connections that nobody waits for less often.
const SYN_RETRIES_MAX: u8 = 6;
const RETRIES_MAX: u8 = 15;
const ORPHAN_RETRIES_MAX: u8 = 8;
/// A connection whose FIN was acknowledged waits so long for the peer's (Linux's `tcp_fin_timeout`).
const FIN_WAIT_2_MS: u32 = 60_000;
/// Time between two looks at a connection that has a deadline, and so the longest that a time-out may be late.
const LOOK_MS: u32 = 100;

/// Where frames leave.
pub(super) struct Out {
    pub tx: Box<dyn TxQueue + Send>,
    pub mac: MacAddr,
    /// The device completes checksums.
    pub offload: bool,
    unflushed: u32,
    now: Instant,
}

impl Out {
    pub fn new(tx: Box<dyn TxQueue + Send>) -> Self {
        let capabilities = tx.capabilities();
        let (mac, offload) = (MacAddr(capabilities.mac), capabilities.tx_checksum);
        Self { tx, mac, offload, unflushed: 0, now: Instant::ZERO }
    }

    /// Makes a segment. One for which the device has no room is lost, as on a wire that is busy.
    #[inline]
    fn segment(
        &mut self,
        template: &Template,
        from: &Local,
        numbers: Numbers,
        options: &[u8],
        payload: &[u8],
    ) {
        let len = template.head_len() + options.len() + payload.len();
        if let Some(room) = self.tx.reserve(len) {
            template.write(&mut room[..len], from, numbers, options, payload);
            self.tx.commit(len, template.meta());
            self.count();
        }
    }

    fn frame(&mut self, frame: &[u8]) {
        if let Some(room) = self.tx.reserve(frame.len()) {
            room[..frame.len()].copy_from_slice(frame);
            self.tx.commit(frame.len(), TxMeta::default());
            self.count();
        }
    }

    #[inline]
    fn count(&mut self) {
        self.unflushed += 1;
        if self.unflushed >= FRAMES_PER_FLUSH {
            self.flush();
        }
    }

    fn flush(&mut self) {
        self.unflushed = 0;
        self.tx.flush(self.now);
    }
}

/// All connections.
pub(super) struct Net {
    pub out: Out,
    pub conns: Vec<Conn>,
    /// Places without a connection.
    free: Vec<u32>,
    /// Connections by slot of the session, or [`NO_CONN`].
    conn_of: Vec<u32>,
    pub locals: Locals,
    pub targets: Vec<Target>,
    pub neighbours: Vec<Neighbour>,
    pub buffers: Buffers,
    /// Connections whose deadline is to be looked at, each [`LOOK_MS`] after the time it was entered.
    looks: VecDeque<(u32, u32)>,
    /// Connections that received something in this burst.
    pub unacked: Vec<u32>,
    next_target: usize,
    start: Instant,
    /// Since the start, in milliseconds and (wrapping) microseconds.
    pub now_ms: u32,
    pub now_us: u32,
    /// The clock of initial sequence numbers (RFC 9293 §3.4.1): one step in 4 µs, and what it was put forward.
    clock: u32,
    ahead: u32,
    seed: u32,
    /// Timestamps are offered, and their clock in milliseconds.
    timestamps: bool,
    ts_now: u32,
}

const NO_CONN: u32 = u32::MAX;

impl Net {
    pub fn new(
        out: Out,
        locals: Locals,
        (targets, neighbours): (Vec<Target>, Vec<Neighbour>),
        seed: u64,
        timestamps: bool,
        now: Instant,
    ) -> Self {
        let mut net = Self {
            out,
            conns: Vec::new(),
            free: Vec::new(),
            conn_of: Vec::new(),
            locals,
            targets,
            neighbours,
            buffers: Buffers::default(),
            looks: VecDeque::new(),
            unacked: Vec::with_capacity(BURST_FRAMES_MAX),
            next_target: 0,
            start: now,
            now_ms: 0,
            now_us: 0,
            clock: 0,
            ahead: 0,
            seed: (seed ^ seed >> 32) as u32,
            timestamps,
            ts_now: 0,
        };
        net.set_time(now);
        for neighbour in 0..net.neighbours.len() {
            net.found(neighbour);
        }
        net
    }

    /// The time of all that follows.
    pub fn set_time(&mut self, now: Instant) {
        self.out.now = now;
        let since = now.saturating_since(self.start);
        (self.now_ms, self.now_us) = (since.as_millis() as u32, since.as_micros() as u32);
        self.clock = (now.as_nanos() >> 12) as u32;
        // Not from the start: it must go on from one run to the next.
        self.ts_now = now.as_millis() as u32;
    }

    /// Whether it is known of all neighbours where they are, or that they do not answer.
    pub fn is_ready(&self) -> bool {
        self.neighbours.iter().all(|n| n.mac.is_some() || n.is_given_up())
    }

    /// Connections that are not over.
    pub fn live(&self) -> usize {
        self.conns.len() - self.free.len()
    }

    /// When there is something to do.
    pub fn next_deadline(&self) -> Option<Instant> {
        let look = self.looks.front().map(|(at, _)| at + LOOK_MS);
        let ask = self.neighbours.iter().filter_map(Neighbour::due).min();
        let ms = [look, ask].into_iter().flatten().min();
        let ms = ms.map(|ms| self.start + core::time::Duration::from_millis(ms.into()));
        [ms, self.out.tx.next_deadline()].into_iter().flatten().min()
    }

    /// Whether slot and place still belong to the same connection.
    #[inline]
    pub fn is_current(&self, slot: u32, conn: u32, port: u16, source: u16) -> bool {
        let c = &self.conns[conn as usize];
        self.conn_of.get(slot as usize) == Some(&conn) && (c.port, c.source) == (port, source)
    }

    fn conn_of(&self, slot: u32) -> Option<u32> {
        self.conn_of.get(slot as usize).copied().filter(|conn| *conn != NO_CONN)
    }

    /// The initial sequence number of a port at this time. It grows from one connection of the port to the next, so that a server which still
    /// holds the last one in TIME-WAIT takes the new one (RFC 9293 §3.10.7.4, “if the sequence number is greater”).
    fn isn(&self, source: u16, port: u16) -> SeqNumber {
        let place = (u32::from(source) << 16 | u32::from(port)) ^ self.seed;
        SeqNumber(self.clock.wrapping_add(self.ahead).wrapping_add(place.wrapping_mul(0x9e37_79b1)))
    }

    /// Sends a segment without payload.
    #[inline]
    pub fn control(&mut self, conn: u32, flags: TcpFlags) {
        let Self { out, conns, targets, locals, ts_now, .. } = self;
        let c = &mut conns[conn as usize];
        if let Some(template) = &targets[usize::from(c.target)].template {
            // Never beyond the peer's window, whatever a probe has sent there: it would not be acceptable (RFC 9293 §3.10.7.4).
            let window_end = c.una + c.window;
            let seq = if c.max.gt(window_end) { window_end } else { c.max };
            let numbers = Numbers { port: c.port, seq, ack: c.rcv_nxt, flags };
            let options = frames::timestamps(*ts_now, c.ts_recent);
            out.segment(template, locals.get(c.source), numbers, &options[..c.options_len()], &[]);
        }
        c.flags.clear(Flags::ACK);
    }

    fn send_syn(&mut self, conn: u32) {
        let Self { out, conns, targets, locals, .. } = self;
        let c = &conns[conn as usize];
        let target = &targets[usize::from(c.target)];
        if let Some(template) = &target.template {
            let numbers = Numbers { port: c.port, seq: c.una, ack: SeqNumber(0), flags: TcpFlags::SYN };
            let value = self.timestamps.then_some(self.ts_now);
            let (options, len) = frames::syn_options(target.offer, WINDOW_SHIFT, value);
            out.segment(template, locals.get(c.source), numbers, &options[..len], &[]);
        }
    }

    /// Sends what may be sent from `nxt` on. As a probe it sends a byte even into a closed window (RFC 9293 §3.8.6.1).
    pub fn transmit(&mut self, conn: u32, probe: bool) {
        let Self { out, conns, targets, locals, buffers, now_us, ts_now, .. } = self;
        let c = &mut conns[conn as usize];
        let target = &targets[usize::from(c.target)];
        let Some(template) = &target.template else { return };
        let from = locals.get(c.source);
        let options = frames::timestamps(*ts_now, c.ts_recent);
        let options = &options[..c.options_len()];
        let mss = u32::from(c.mss.min(target.mss)) - options.len() as u32;
        let window = if probe { c.window.max(1) } else { c.window };
        let room = window.min(u32::from(c.flight) * mss);
        let len = c.waiting.len();
        loop {
            let offset = (c.nxt - c.una) as u32;
            if offset > len || (offset == len && !c.flags.has(Flags::FIN)) {
                break;
            }
            let piece = buffers.from(&c.waiting, offset);
            let whole = piece.len().min(mss as usize);
            let n = whole.min(room.saturating_sub(offset) as usize);
            // RFC 9293 §3.8.6.2.1: a part that the window happens to leave is not sent while an acknowledgement is to come.
            if n < whole && (n == 0 || offset > 0) {
                break;
            }
            let fin = c.flags.has(Flags::FIN) && offset + n as u32 == len;
            let mut flags = TcpFlags::ACK;
            if n > 0 {
                flags |= TcpFlags::PSH;
            }
            if fin {
                flags |= TcpFlags::FIN;
            }
            let numbers = Numbers { port: c.port, seq: c.nxt, ack: c.rcv_nxt, flags };
            out.segment(template, from, numbers, options, &piece[..n]);
            if c.nxt == c.max && c.una == c.max {
                (c.sent_at, c.flags) = (*now_us, c.flags.with(Flags::TIMING));
            }
            c.flags.clear(Flags::ACK);
            c.nxt += n as u32 + u32::from(fin);
            c.max = c.max.max(c.nxt);
        }
        let is_waiting = !c.is_quiet() || c.waiting.len() > 0;
        if is_waiting && !c.flags.has(Flags::ARMED) {
            let ms = target.rto_ms(c.retries);
            self.arm(conn, ms);
        }
    }

    /// Sets a connection's deadline.
    #[inline]
    pub fn arm(&mut self, conn: u32, ms: u32) {
        let c = &mut self.conns[conn as usize];
        c.deadline = self.now_ms + ms;
        c.flags.set(Flags::ARMED);
        if !c.flags.has(Flags::QUEUED) {
            c.flags.set(Flags::QUEUED);
            self.looks.push_back((self.now_ms, conn));
        }
    }

    /// Deals with the next deadline that is over. Some if that ends a connection which the session knows. To be called until `None`.
    pub fn expire(&mut self) -> Option<(u32, Failure)> {
        while let Some(&(entered, conn)) = self.looks.front() {
            if entered + LOOK_MS > self.now_ms {
                break;
            }
            self.looks.pop_front();
            let c = &mut self.conns[conn as usize];
            if !c.flags.has(Flags::ARMED) {
                c.flags.clear(Flags::QUEUED);
            } else if c.deadline > self.now_ms {
                self.looks.push_back((self.now_ms, conn));
            } else {
                c.flags.clear(Flags::QUEUED);
                c.flags.clear(Flags::ARMED);
                if let Some(end) = self.time_out(conn) {
                    return Some(end);
                }
            }
        }
        None
    }

    fn time_out(&mut self, conn: u32) -> Option<(u32, Failure)> {
        let c = &mut self.conns[conn as usize];
        let (slot, target) = (c.slot, usize::from(c.target));
        let (retries_max, failure) = match c.state {
            State::Closed => return None,
            State::SynSent => (SYN_RETRIES_MAX, Failure::ConnectTimeout),
            _ if slot == NO_SLOT => (ORPHAN_RETRIES_MAX, Failure::Timeout),
            _ => (RETRIES_MAX, Failure::Timeout),
        };
        if c.state == State::FinWait2 || c.retries >= retries_max {
            self.release(conn, false);
            return (slot != NO_SLOT).then_some((slot, failure));
        }
        c.retries += 1;
        let retries = c.retries;
        if retries > 1 {
            // It may have moved.
            self.neighbours[self.targets[target].neighbour].want();
        }
        // RFC 6298 §5.4-5.6: again from the first that is not acknowledged, one segment, and twice as long.
        if c.state == State::SynSent {
            c.flags.clear(Flags::TIMING);
            self.send_syn(conn);
        } else {
            (c.nxt, c.flight) = (c.una, 1);
            c.flags.clear(Flags::TIMING);
            self.transmit(conn, true);
        }
        let ms = self.targets[target].rto_ms(retries);
        self.arm(conn, ms);
        None
    }

    /// The connection's FIN was acknowledged, and the peer's is still to come.
    pub fn await_fin(&mut self, conn: u32) {
        self.arm(conn, FIN_WAIT_2_MS);
    }

    /// The peer has acknowledged a probe of its closed window: the connection lives, however long that lasts (RFC 9293 §3.8.6.1).
    #[cold]
    pub fn probe_answered(&mut self, conn: u32) {
        let c = &mut self.conns[conn as usize];
        c.retries = c.retries.min(RETRIES_MAX - 1);
    }

    /// The peer has answered the offer of timestamps, if it was made.
    pub fn agree_on_timestamps(&mut self, conn: u32) {
        if self.timestamps {
            self.conns[conn as usize].flags.set(Flags::TIMESTAMPS);
        }
    }

    /// Forgets a connection.
    pub fn release(&mut self, conn: u32, in_order: bool) {
        let c = &mut self.conns[conn as usize];
        let (waiting, slot, source, port, max) = (c.waiting.len(), c.slot, c.source, c.port, c.max);
        if waiting > 0 {
            self.buffers.forget(&mut c.waiting, waiting);
        }
        *c = Conn { flags: c.flags.only(Flags::QUEUED), ..Conn::VACANT };
        self.free.push(conn);
        self.locals.give_back(source, port, in_order);
        if slot != NO_SLOT {
            self.conn_of[slot as usize] = NO_CONN;
        }
        // Who sends faster than the clock of sequence numbers runs puts it forward.
        let excess = max - self.isn(source, port);
        if excess >= 0 {
            self.ahead = self.ahead.wrapping_add(excess as u32 + 1);
        }
    }

    /// Sends the acknowledgements that nothing else has carried, one for each connection.
    pub fn acknowledge(&mut self) {
        while let Some(conn) = self.unacked.pop() {
            if self.conns[conn as usize].flags.has(Flags::ACK) {
                self.control(conn, TcpFlags::ACK);
            }
        }
    }

    /// Shows the device what was sent.
    pub fn flush(&mut self) {
        let held = self.out.tx.next_deadline().is_some_and(|at| at <= self.out.now);
        if self.out.unflushed > 0 || held {
            self.out.flush();
        }
    }

    /// Answers a segment that belongs to no connection with a reset (RFC 9293 §3.10.7.1), or with `flags`.
    pub fn reply(&mut self, to: SocketAddr, mac: MacAddr, local: u16, numbers: Numbers) {
        let template = Template::new(to, self.out.mac, mac, 0, self.out.offload);
        self.out.segment(&template, self.locals.get(local), numbers, &[], &[]);
    }

    /// A neighbour's address is known: the ways by it are open.
    pub fn found(&mut self, neighbour: usize) {
        if let Some(mac) = self.neighbours[neighbour].mac {
            for target in self.targets.iter_mut().filter(|t| t.neighbour == neighbour) {
                target.found(self.out.mac, mac, self.out.offload);
            }
        }
    }

    /// Asks for the neighbours that are to be asked for.
    pub fn ask(&mut self) {
        for neighbour in &mut self.neighbours {
            if !neighbour.is_to_be_asked(self.now_ms) {
                continue;
            }
            let mut frame = [0; NEIGHBOUR_BYTES];
            let mac = self.out.mac;
            let len = match (neighbour.address, self.locals.get(neighbour.asker).address) {
                (IpAddr::V4(target_ip), IpAddr::V4(sender_ip)) => {
                    let request = arp::Packet {
                        operation: arp::Operation::Request,
                        sender_mac: mac,
                        sender_ip,
                        target_mac: MacAddr::ZERO,
                        target_ip,
                    };
                    frames::arp(&request, MacAddr::BROADCAST, &mut frame)
                }
                (IpAddr::V6(target), IpAddr::V6(src)) => {
                    let group = ndp::solicited_node(target);
                    let message =
                        ndp::Message::NeighbourSolicitation { target, source: Some(mac), nonce: None };
                    let to = MacAddr::from_ipv6_multicast(group);
                    frames::ndp(&message, (src, group), (mac, to), &mut frame)
                }
                _ => continue,
            };
            self.out.frame(&frame[..len]);
        }
    }

    /// Sends a frame that is ready.
    pub fn send_frame(&mut self, frame: &[u8]) {
        self.out.frame(frame);
    }

    fn target(&mut self, to: SocketAddr) -> Option<usize> {
        // A session takes them in turn.
        let guess = self.next_target;
        let found = match self.targets.get(guess) {
            Some(target) if target.address == to => guess,
            _ => self.targets.iter().position(|t| t.address == to)?,
        };
        self.next_target = if found + 1 < self.targets.len() { found + 1 } else { 0 };
        Some(found)
    }
}

impl Network for Net {
    fn connect(&mut self, slot: u32, to: SocketAddr, from: Option<IpAddr>) -> Result<(), Failure> {
        let number = self.target(to).ok_or(Failure::Unreachable)?;
        let target = &self.targets[number];
        if target.template.is_none() {
            let neighbour = target.neighbour;
            self.neighbours[neighbour].want();
            return Err(Failure::Unreachable);
        }
        let (mss, rto_ms) = (target.mss, target.rto_ms(0));
        let source = match from {
            None => target.local,
            Some(from) if from.is_ipv4() == to.is_ipv4() => {
                self.locals.number(from).ok_or(Failure::Unreachable)?
            }
            Some(_) => return Err(Failure::Unreachable),
        };
        let conn = match self.free.pop() {
            Some(conn) => conn,
            None => {
                self.conns.push(Conn::VACANT);
                // Giving a place back must never allocate.
                self.free.reserve(self.conns.len());
                self.conns.len() as u32 - 1
            }
        };
        let Some(port) = self.locals.lease(source, conn) else {
            self.free.push(conn);
            return Err(Failure::Exhausted);
        };
        let una = self.isn(source, port);
        let c = &mut self.conns[conn as usize];
        let mut flags = c.flags.only(Flags::QUEUED);
        flags.set(Flags::TIMING);
        *c = Conn {
            slot,
            una,
            nxt: una + 1,
            max: una + 1,
            rcv_nxt: SeqNumber(0),
            ts_recent: 0,
            window: 0,
            deadline: 0,
            sent_at: self.now_us,
            waiting: Waiting::EMPTY,
            mss,
            source,
            port,
            target: number as u16,
            state: State::SynSent,
            retries: 0,
            shift: 0,
            flight: FLIGHT_SEGMENTS_MAX,
            flags,
        };
        let place = slot as usize;
        if self.conn_of.len() <= place {
            self.conn_of.resize(place + 1, NO_CONN);
        }
        self.conn_of[place] = conn;
        self.send_syn(conn);
        self.arm(conn, rto_ms);
        Ok(())
    }

    fn send(&mut self, slot: u32, bytes: &[u8]) -> usize {
        let Some(conn) = self.conn_of(slot) else { return 0 };
        let c = &mut self.conns[conn as usize];
        if !c.may_send() {
            return 0;
        }
        let taken = self.buffers.append(&mut c.waiting, bytes);
        if taken < bytes.len() {
            c.flags.set(Flags::WANTS_ROOM);
        }
        self.transmit(conn, false);
        taken
    }

    fn close(&mut self, slot: u32) {
        let Some(conn) = self.conn_of(slot) else { return };
        let c = &mut self.conns[conn as usize];
        c.state = match c.state {
            State::Established => State::FinWait1,
            State::CloseWait => State::LastAck,
            // Not open yet: nobody will miss it. (A close comes once, so it is in none of the other states.)
            _ => return self.release(conn, false),
        };
        c.slot = NO_SLOT;
        c.flags.set(Flags::FIN);
        self.conn_of[slot as usize] = NO_CONN;
        self.transmit(conn, false);
    }

    fn abort(&mut self, slot: u32) {
        let Some(conn) = self.conn_of(slot) else { return };
        if self.conns[conn as usize].is_synchronized() {
            self.control(conn, TcpFlags::RST | TcpFlags::ACK);
        }
        self.release(conn, false);
    }
}
