//! The network of a session: its connections, and sending on them.

use super::buffer::{SendBuffers, SendQueue};
use super::conn::{CWND_SEGMENTS_MAX, Conn, ConnFlags, NO_SLOT, TcpState};
use super::destination::{Destination, WINDOW_SHIFT};
use super::frames::{self, NEIGHBOUR_BYTES, NdpAddresses, SegmentFields, Template};
use super::locals::{Local, Locals};
use super::neighbour::PeerNeighbour;
use crate::load::session::Network;
use crate::load::stats::Failure;
use core::net::{IpAddr, SocketAddr};
use ginnel::Instant;
use ginnel_stack::device::{BURST_FRAMES_MAX, TxMeta, TxQueue};
use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags};
use ginnel_stack::wire::{MacAddr, arp, ndp};
use std::collections::VecDeque;

/// Frames after which the device is flushed, so that the peer can start to work on them.
const FRAMES_PER_FLUSH: u32 = 8;
/// Most retransmissions of a SYN and of other segments, as in Linux; fewer for connections that the session
/// has closed.
const SYN_RETRIES_MAX: u8 = 6;
const RETRIES_MAX: u8 = 15;
const ORPHAN_RETRIES_MAX: u8 = 8;
/// Time in FIN-WAIT-2 before the connection is dropped (Linux's `tcp_fin_timeout`).
const FIN_WAIT_2_MS: u32 = 60_000;
/// Interval at which the deadline of a connection is checked, and so the largest delay of a timeout.
const TIMER_CHECK_MS: u32 = 100;

/// Sends frames on the device.
pub(super) struct FrameSender {
    pub tx: Box<dyn TxQueue + Send>,
    pub mac: MacAddr,
    /// True if the device computes checksums.
    pub offload: bool,
    unflushed: u32,
    now: Instant,
}

impl FrameSender {
    pub fn new(tx: Box<dyn TxQueue + Send>) -> Self {
        let capabilities = tx.capabilities();
        let (mac, offload) = (MacAddr(capabilities.mac), capabilities.tx_checksum);
        Self { tx, mac, offload, unflushed: 0, now: Instant::ZERO }
    }

    /// Sends a segment. If the device has no free buffer the segment is lost, as on a congested link.
    #[inline]
    fn segment(
        &mut self,
        template: &Template,
        from: &Local,
        fields: SegmentFields,
        options: &[u8],
        payload: &[u8],
    ) {
        let len = template.head_len() + options.len() + payload.len();
        if let Some(room) = self.tx.reserve(len) {
            template.write(&mut room[..len], from, fields, options, payload);
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
pub(super) struct LightNetwork {
    pub out: FrameSender,
    pub conns: Vec<Conn>,
    /// Unused indices of `conns`.
    free: Vec<u32>,
    /// Connections by slot of the session, or [`NO_CONN`].
    conn_of: Vec<u32>,
    pub locals: Locals,
    pub destinations: Vec<Destination>,
    pub neighbours: Vec<PeerNeighbour>,
    pub buffers: SendBuffers,
    /// Connections whose deadlines are to be checked, each [`TIMER_CHECK_MS`] after the time with which it
    /// was queued.
    timer_queue: VecDeque<(u32, u32)>,
    /// Connections that received SYN, data or FIN in this burst. A connection stays in the list if a segment
    /// with data has carried its acknowledgement.
    pub unacked: Vec<u32>,
    next_destination: usize,
    start: Instant,
    /// Time since the start in milliseconds and in microseconds, both of which wrap.
    pub now_ms: u32,
    pub now_us: u32,
    /// Clock of initial sequence numbers (RFC 9293 §3.4.1) in units of 4.096 µs, and the amount by which it
    /// was advanced.
    isn_clock: u32,
    isn_advance: u32,
    seed: u32,
    /// True if timestamps are offered, and their clock in milliseconds.
    timestamps: bool,
    ts_now: u32,
}

const NO_CONN: u32 = u32::MAX;

impl LightNetwork {
    pub fn new(
        out: FrameSender,
        locals: Locals,
        destinations: Vec<Destination>,
        neighbours: Vec<PeerNeighbour>,
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
            destinations,
            neighbours,
            buffers: SendBuffers::default(),
            timer_queue: VecDeque::new(),
            unacked: Vec::with_capacity(BURST_FRAMES_MAX),
            next_destination: 0,
            start: now,
            now_ms: 0,
            now_us: 0,
            isn_clock: 0,
            isn_advance: 0,
            seed: (seed ^ seed >> 32) as u32,
            timestamps,
            ts_now: 0,
        };
        net.set_time(now);
        for neighbour in 0..net.neighbours.len() {
            net.apply_neighbour(neighbour);
        }
        net
    }

    /// Sets the time for the following calls.
    pub fn set_time(&mut self, now: Instant) {
        self.out.now = now;
        let since = now.saturating_since(self.start);
        (self.now_ms, self.now_us) = (since.as_millis() as u32, since.as_micros() as u32);
        self.isn_clock = (now.as_nanos() >> 12) as u32;
        // Not relative to the start, because the clock must continue from one run to the next.
        self.ts_now = now.as_millis() as u32;
    }

    /// Returns true if every next hop is resolved or unreachable.
    pub fn is_ready(&self) -> bool {
        self.neighbours.iter().all(|n| n.mac.is_some() || n.is_unreachable())
    }

    /// Returns the number of connections.
    pub fn open_connections(&self) -> usize {
        self.conns.len() - self.free.len()
    }

    /// Returns the earliest deadline.
    pub fn next_deadline(&self) -> Option<Instant> {
        let timer = self.timer_queue.front().map(|(at, _)| {
            let due = at.wrapping_add(TIMER_CHECK_MS);
            if self.has_come(due) { 0 } else { due.wrapping_sub(self.now_ms) }
        });
        let solicitation = self.neighbours.iter().filter_map(|neighbour| neighbour.due_in(self.now_ms)).min();
        let ms = [timer, solicitation].into_iter().flatten().min();
        let since = self.out.now.saturating_since(self.start);
        // The milliseconds count from the last whole one.
        let part = core::time::Duration::from_nanos(since.as_nanos() as u64 % 1_000_000);
        let ms = ms.map(|ms| self.start + (since - part) + core::time::Duration::from_millis(ms.into()));
        [ms, self.out.tx.next_deadline()].into_iter().flatten().min()
    }

    /// Returns whether a time in wrapping milliseconds, less than 24 days from now, has come.
    fn has_come(&self, ms: u32) -> bool {
        ms.wrapping_sub(self.now_ms).cast_signed() <= 0
    }

    /// Returns true if the slot still has the connection with this index, port and local address.
    #[inline]
    pub fn is_current(&self, slot: u32, conn: u32, port: u16, source: u16) -> bool {
        let c = &self.conns[conn as usize];
        self.conn_of.get(slot as usize) == Some(&conn) && (c.port, c.source) == (port, source)
    }

    fn conn_of(&self, slot: u32) -> Option<u32> {
        self.conn_of.get(slot as usize).copied().filter(|conn| *conn != NO_CONN)
    }

    /// Returns the initial sequence number for a port. It grows from one connection of a port to the next, so
    /// that a server that holds the last connection in TIME-WAIT accepts the new one (RFC 9293 §3.10.7.4, “if
    /// the sequence number is greater”).
    fn isn(&self, source: u16, port: u16) -> SeqNumber {
        let key = (u32::from(source) << 16 | u32::from(port)) ^ self.seed;
        SeqNumber(self.isn_clock.wrapping_add(self.isn_advance).wrapping_add(key.wrapping_mul(0x9e37_79b1)))
    }

    /// Sends a segment without payload.
    #[inline]
    pub fn send_control(&mut self, conn: u32, flags: TcpFlags) {
        let Self { out, conns, destinations, locals, ts_now, .. } = self;
        let c = &mut conns[conn as usize];
        if let Some(template) = &destinations[usize::from(c.destination)].template {
            // The sequence number must not exceed the peer's window, even if a probe did: the peer would not
            // accept the segment (RFC 9293 §3.10.7.4).
            let window_end = c.snd_una + c.snd_wnd;
            let seq = if c.snd_max.gt(window_end) { window_end } else { c.snd_max };
            let fields = SegmentFields { port: c.port, seq, ack: c.rcv_nxt, flags };
            let options = frames::timestamps(*ts_now, c.ts_recent);
            out.segment(template, locals.get(c.source), fields, &options[..c.options_len()], &[]);
        }
        c.flags.clear(ConnFlags::ACK_PENDING);
    }

    fn send_syn(&mut self, conn: u32) {
        let Self { out, conns, destinations, locals, .. } = self;
        let c = &conns[conn as usize];
        let destination = &destinations[usize::from(c.destination)];
        if let Some(template) = &destination.template {
            let fields =
                SegmentFields { port: c.port, seq: c.snd_una, ack: SeqNumber(0), flags: TcpFlags::SYN };
            let value = self.timestamps.then_some(self.ts_now);
            let (options, len) = frames::syn_options(destination.advmss, WINDOW_SHIFT, value);
            out.segment(template, locals.get(c.source), fields, &options[..len], &[]);
        }
    }

    /// Sends what may be sent from `snd_nxt` on. A probe sends a byte even into a closed window (RFC 9293
    /// §3.8.6.1).
    pub fn transmit(&mut self, conn: u32, probe: bool) {
        let Self { out, conns, destinations, locals, buffers, now_us, ts_now, .. } = self;
        let c = &mut conns[conn as usize];
        let destination = &destinations[usize::from(c.destination)];
        let Some(template) = &destination.template else { return };
        let from = locals.get(c.source);
        let options = frames::timestamps(*ts_now, c.ts_recent);
        let options = &options[..c.options_len()];
        let mss = u32::from(c.mss.min(destination.mss)) - options.len() as u32;
        let window = if probe { c.snd_wnd.max(1) } else { c.snd_wnd };
        let room = window.min(u32::from(c.cwnd_segments) * mss);
        let len = c.send_queue.len();
        loop {
            let offset = (c.snd_nxt - c.snd_una) as u32;
            if offset > len || (offset == len && !c.flags.has(ConnFlags::FIN_PENDING)) {
                break;
            }
            let chunk = buffers.slice_at(&c.send_queue, offset);
            let full = chunk.len().min(mss as usize);
            let n = full.min(room.saturating_sub(offset) as usize);
            // RFC 9293 §3.8.6.2.1: no small segment is sent because of a small window while an
            // acknowledgement is outstanding.
            if n < full && (n == 0 || offset > 0) {
                break;
            }
            let fin = c.flags.has(ConnFlags::FIN_PENDING) && offset + n as u32 == len;
            let mut flags = TcpFlags::ACK;
            if n > 0 {
                flags |= TcpFlags::PSH;
            }
            if fin {
                flags |= TcpFlags::FIN;
            }
            let fields = SegmentFields { port: c.port, seq: c.snd_nxt, ack: c.rcv_nxt, flags };
            out.segment(template, from, fields, options, &chunk[..n]);
            if c.snd_nxt == c.snd_max && c.snd_una == c.snd_max {
                (c.sent_at, c.flags) = (*now_us, c.flags.with(ConnFlags::RTT_TIMED));
            }
            c.flags.clear(ConnFlags::ACK_PENDING);
            c.snd_nxt += n as u32 + u32::from(fin);
            c.snd_max = c.snd_max.max(c.snd_nxt);
        }
        let is_waiting = !c.is_all_acked() || c.send_queue.len() > 0;
        if is_waiting && !c.flags.has(ConnFlags::ARMED) {
            let ms = destination.rto_ms(c.retries);
            self.arm(conn, ms);
        }
    }

    /// Sets a connection's deadline.
    #[inline]
    pub fn arm(&mut self, conn: u32, ms: u32) {
        let c = &mut self.conns[conn as usize];
        c.deadline = self.now_ms.wrapping_add(ms);
        c.flags.set(ConnFlags::ARMED);
        if !c.flags.has(ConnFlags::IN_TIMER_QUEUE) {
            c.flags.set(ConnFlags::IN_TIMER_QUEUE);
            self.timer_queue.push_back((self.now_ms, conn));
        }
    }

    /// Handles the next expired deadline. Returns the slot and the failure if it ended a connection of the
    /// session. Must be called until it returns `None`.
    pub fn expire(&mut self) -> Option<(u32, Failure)> {
        while let Some(&(entered, conn)) = self.timer_queue.front() {
            if !self.has_come(entered.wrapping_add(TIMER_CHECK_MS)) {
                break;
            }
            self.timer_queue.pop_front();
            let is_expired = self.has_come(self.conns[conn as usize].deadline);
            let c = &mut self.conns[conn as usize];
            if !c.flags.has(ConnFlags::ARMED) {
                c.flags.clear(ConnFlags::IN_TIMER_QUEUE);
            } else if !is_expired {
                self.timer_queue.push_back((self.now_ms, conn));
            } else {
                c.flags.clear(ConnFlags::IN_TIMER_QUEUE);
                c.flags.clear(ConnFlags::ARMED);
                if let Some(end) = self.time_out(conn) {
                    return Some(end);
                }
            }
        }
        None
    }

    fn time_out(&mut self, conn: u32) -> Option<(u32, Failure)> {
        let c = &mut self.conns[conn as usize];
        let (slot, destination) = (c.slot, usize::from(c.destination));
        let (retries_max, failure) = match c.state {
            TcpState::Closed => return None,
            TcpState::SynSent => (SYN_RETRIES_MAX, Failure::ConnectTimeout),
            _ if slot == NO_SLOT => (ORPHAN_RETRIES_MAX, Failure::Timeout),
            _ => (RETRIES_MAX, Failure::Timeout),
        };
        if c.state == TcpState::FinWait2 || c.retries >= retries_max {
            self.release(conn, false);
            return (slot != NO_SLOT).then_some((slot, failure));
        }
        c.retries += 1;
        let retries = c.retries;
        if retries > 1 {
            // The next hop may have another Ethernet address now.
            self.neighbours[self.destinations[destination].neighbour].resolve();
        }
        // RFC 6298 §5.4-5.6: retransmit the first unacknowledged segment and double the timeout.
        if c.state == TcpState::SynSent {
            c.flags.clear(ConnFlags::RTT_TIMED);
            self.send_syn(conn);
        } else {
            (c.snd_nxt, c.cwnd_segments) = (c.snd_una, 1);
            c.flags.clear(ConnFlags::RTT_TIMED);
            self.transmit(conn, true);
        }
        let ms = self.destinations[destination].rto_ms(retries);
        self.arm(conn, ms);
        None
    }

    /// Starts the timer of FIN-WAIT-2.
    pub fn arm_fin_wait_2(&mut self, conn: u32) {
        self.arm(conn, FIN_WAIT_2_MS);
    }

    /// Records that the peer has acknowledged a probe of its closed window. A connection of the session
    /// persists as long as the peer does so (RFC 9293 §3.8.6.1).
    #[cold]
    pub fn probe_answered(&mut self, conn: u32) {
        let c = &mut self.conns[conn as usize];
        c.retries = c.retries.min(RETRIES_MAX - 1);
    }

    /// Enables timestamps after the peer's SYN, if they were offered.
    pub fn enable_timestamps(&mut self, conn: u32) {
        if self.timestamps {
            self.conns[conn as usize].flags.set(ConnFlags::TIMESTAMPS);
        }
    }

    /// Removes a connection. `in_order` says whether it was closed with FINs on both sides.
    pub fn release(&mut self, conn: u32, in_order: bool) {
        let c = &mut self.conns[conn as usize];
        let (queued, slot, source, port, max) = (c.send_queue.len(), c.slot, c.source, c.port, c.snd_max);
        if queued > 0 {
            self.buffers.acknowledge(&mut c.send_queue, queued);
        }
        *c = Conn { flags: c.flags.only(ConnFlags::IN_TIMER_QUEUE), ..Conn::VACANT };
        self.free.push(conn);
        self.locals.release_port(source, port, in_order);
        if slot != NO_SLOT {
            self.conn_of[slot as usize] = NO_CONN;
        }
        // A connection that sent faster than the clock of sequence numbers advances the clock.
        let excess = max - self.isn(source, port);
        if excess >= 0 {
            self.isn_advance = self.isn_advance.wrapping_add(excess as u32 + 1);
        }
    }

    /// Sends the acknowledgements that no data segment has carried, one for each connection.
    pub fn acknowledge(&mut self) {
        while let Some(conn) = self.unacked.pop() {
            if self.conns[conn as usize].flags.has(ConnFlags::ACK_PENDING) {
                self.send_control(conn, TcpFlags::ACK);
            }
        }
    }

    /// Flushes the device.
    pub fn flush(&mut self) {
        let is_tx_deadline_past = self.out.tx.next_deadline().is_some_and(|at| at <= self.out.now);
        if self.out.unflushed > 0 || is_tx_deadline_past {
            self.out.flush();
        }
    }

    /// Answers a segment without a connection: with a reset (RFC 9293 §3.10.7.1), or with the flags in
    /// `fields`.
    pub fn reply(&mut self, to: SocketAddr, mac: MacAddr, local: u16, fields: SegmentFields) {
        let template = Template::new(to, self.out.mac, mac, 0, self.out.offload);
        self.out.segment(&template, self.locals.get(local), fields, &[], &[]);
    }

    /// Makes destinations reachable whose next hop has been resolved.
    pub fn apply_neighbour(&mut self, neighbour: usize) {
        if let Some(mac) = self.neighbours[neighbour].mac {
            for destination in self.destinations.iter_mut().filter(|t| t.neighbour == neighbour) {
                destination.set_next_hop(self.out.mac, mac, self.out.offload);
            }
        }
    }

    /// Sends the solicitations that are due.
    pub fn solicit_neighbours(&mut self) {
        for neighbour in &mut self.neighbours {
            if !neighbour.take_due_solicitation(self.now_ms) {
                continue;
            }
            let mut frame = [0; NEIGHBOUR_BYTES];
            let mac = self.out.mac;
            let len = match (neighbour.address, self.locals.get(neighbour.source).address) {
                (IpAddr::V4(target_ip), IpAddr::V4(sender_ip)) => {
                    let request = arp::ArpPacket {
                        operation: arp::ArpOperation::Request,
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
                        ndp::NdpMessage::NeighbourSolicitation { target, source_mac: Some(mac), nonce: None };
                    let to = MacAddr::from_ipv6_multicast(group);
                    let addresses = NdpAddresses { src, dst: group, src_mac: mac, dst_mac: to };
                    frames::ndp(&message, addresses, &mut frame)
                }
                _ => continue,
            };
            self.out.frame(&frame[..len]);
        }
    }

    /// Sends a complete frame.
    pub fn send_frame(&mut self, frame: &[u8]) {
        self.out.frame(frame);
    }

    fn destination_of(&mut self, to: SocketAddr) -> Option<usize> {
        // A session uses the destinations in turn.
        let expected = self.next_destination;
        let found = match self.destinations.get(expected) {
            Some(target) if target.address == to => expected,
            _ => self.destinations.iter().position(|t| t.address == to)?,
        };
        self.next_destination = if found + 1 < self.destinations.len() { found + 1 } else { 0 };
        Some(found)
    }
}

impl Network for LightNetwork {
    fn connect(&mut self, slot: u32, to: SocketAddr, from: Option<IpAddr>) -> Result<(), Failure> {
        let number = self.destination_of(to).ok_or(Failure::Unreachable)?;
        let destination = &self.destinations[number];
        if destination.template.is_none() {
            let neighbour = destination.neighbour;
            self.neighbours[neighbour].resolve();
            return Err(Failure::Unreachable);
        }
        let (mss, rto_ms) = (destination.mss, destination.rto_ms(0));
        let source = match from {
            None => destination.local,
            Some(from) if from.is_ipv4() == to.is_ipv4() => {
                self.locals.number(from).ok_or(Failure::Unreachable)?
            }
            Some(_) => return Err(Failure::Unreachable),
        };
        let conn = match self.free.pop() {
            Some(conn) => conn,
            None => {
                self.conns.push(Conn::VACANT);
                // Returning an index to the list must not allocate.
                self.free.reserve(self.conns.len());
                self.conns.len() as u32 - 1
            }
        };
        let Some(port) = self.locals.allocate_port(source, conn) else {
            self.free.push(conn);
            return Err(Failure::Exhausted);
        };
        let una = self.isn(source, port);
        let c = &mut self.conns[conn as usize];
        let mut flags = c.flags.only(ConnFlags::IN_TIMER_QUEUE);
        flags.set(ConnFlags::RTT_TIMED);
        *c = Conn {
            slot,
            snd_una: una,
            snd_nxt: una + 1,
            snd_max: una + 1,
            rcv_nxt: SeqNumber(0),
            ts_recent: 0,
            snd_wnd: 0,
            deadline: 0,
            sent_at: self.now_us,
            send_queue: SendQueue::EMPTY,
            mss,
            source,
            port,
            destination: number as u16,
            state: TcpState::SynSent,
            retries: 0,
            snd_wscale: 0,
            cwnd_segments: CWND_SEGMENTS_MAX,
            flags,
        };
        let index = slot as usize;
        if self.conn_of.len() <= index {
            self.conn_of.resize(index + 1, NO_CONN);
        }
        self.conn_of[index] = conn;
        self.send_syn(conn);
        self.arm(conn, rto_ms);
        Ok(())
    }

    fn send(&mut self, slot: u32, bytes: &[u8]) -> usize {
        let Some(conn) = self.conn_of(slot) else { return 0 };
        let c = &mut self.conns[conn as usize];
        if !c.can_send() {
            return 0;
        }
        let taken = self.buffers.append(&mut c.send_queue, bytes);
        if taken < bytes.len() {
            c.flags.set(ConnFlags::WANTS_WRITABLE);
        }
        self.transmit(conn, false);
        taken
    }

    fn close(&mut self, slot: u32) {
        let Some(conn) = self.conn_of(slot) else { return };
        let c = &mut self.conns[conn as usize];
        c.state = match c.state {
            TcpState::Established => TcpState::FinWait1,
            TcpState::CloseWait => TcpState::LastAck,
            // The connection is not open yet, so it is dropped. (The session closes a connection once, so no
            // other state is possible.)
            _ => return self.release(conn, false),
        };
        c.slot = NO_SLOT;
        c.flags.set(ConnFlags::FIN_PENDING);
        self.conn_of[slot as usize] = NO_CONN;
        self.transmit(conn, false);
    }

    fn abort(&mut self, slot: u32) {
        let Some(conn) = self.conn_of(slot) else { return };
        if self.conns[conn as usize].is_synchronized() {
            self.send_control(conn, TcpFlags::RST | TcpFlags::ACK);
        }
        self.release(conn, false);
    }
}
