//! A TCP client that is just correct enough for comparisons. It is much faster than any server under test,
//! and all servers are measured with it.
//!
//! `ginnel load http --stack light` is the client for users: a correct peer that parses complete responses
//! and measures latencies. It takes four times as many cycles per connection, so the comparisons use this
//! one.
//!
//! The client sends prepared raw frames ([`frames`](crate::frames)). A connection takes 24 bytes; its address
//! and port follow from its id, so that no table is needed. The client relies on the link: segments out of
//! order are dropped, and a connection without progress for [`STUCK_AFTER`] is counted, reset and opened
//! again.

use crate::frames::{ACK, Endpoint, FIN, FrameTemplate, LinkSetup, PSH, RST, SYN, Segment, arp_reply};
use crate::http;
use core::time::Duration;
use ginnel_devices::random::Random;
use ginnel_stack::device::{Device, RxBurst, RxQueue, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use std::collections::VecDeque;

/// Time without progress after which a connection is opened again.
const STUCK_AFTER: Duration = Duration::from_millis(500);
/// Connections that are checked for progress in a turn.
const STUCK_CHECKS_PER_TURN: u32 = 4;
/// Frames after which the device is flushed, so that both sides work at the same time.
const FRAMES_PER_FLUSH: u32 = 8;

/// First address of the client. It uses as many consecutive addresses as it needs, with [`PORTS`] ports each.
pub const FIRST_ADDRESS: u32 = 0x0a01_0000;
/// Ports of each address: 32,768 … 65,535.
const PORTS: u32 = 1 << 15;

/// Work of the connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One request per connection; the server closes.
    Short,
    /// Endless requests on each connection.
    KeepAlive,
    /// All connections are open; the oldest one makes its only request and is replaced by a new one.
    Rotate {
        /// Number of connections that make a request or are opened at the same time.
        active: u32,
    },
    /// All connections are opened, make one request and stay idle.
    Hold {
        /// Number of connections that are opened at the same time.
        active: u32,
    },
    /// All connections are opened and make one request; then random ones make further requests.
    Uniform {
        /// Number of connections that are opened, or make a request, at the same time.
        active: u32,
    },
}

/// Configuration of a client.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    /// Addresses of the link, and whether the device computes checksums.
    pub wire: LinkSetup,
    /// Work of the connections.
    pub mode: Mode,
    /// Number of concurrent connections.
    pub connections: u32,
    /// Requests, which are used in turn.
    pub requests: Vec<Vec<u8>>,
    /// Window scale to offer; the windows are 65,535 shifted left by it.
    pub window_scale: Option<u8>,
}

/// Counters of the client.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClientCounts {
    /// Connections (with keep-alive: requests) completed.
    pub done: u64,
    /// Connections open now.
    pub open: u64,
    /// Frames sent.
    pub sent: u64,
    /// Frames received.
    pub received: u64,
    /// Bytes of payload received.
    pub bytes: u64,
    /// Resets received.
    pub resets: u64,
    /// Connections opened again for lack of progress.
    pub stuck: u64,
    /// Segments out of order, or of closed connections.
    pub stray: u64,
    /// Frames for which the device had no free buffer.
    pub full: u64,
}

impl ClientCounts {
    /// Returns the difference to `earlier`; `open` is the current value.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            done: self.done - earlier.done,
            open: self.open,
            sent: self.sent - earlier.sent,
            received: self.received - earlier.received,
            bytes: self.bytes - earlier.bytes,
            resets: self.resets - earlier.resets,
            stuck: self.stuck - earlier.stuck,
            stray: self.stray - earlier.stray,
            full: self.full - earlier.full,
        }
    }

    /// Returns the sum with `later`; `open` is the value of `later`.
    #[must_use]
    pub fn plus(&self, later: &Self) -> Self {
        Self {
            done: self.done + later.done,
            open: later.open,
            sent: self.sent + later.sent,
            received: self.received + later.received,
            bytes: self.bytes + later.bytes,
            resets: self.resets + later.resets,
            stuck: self.stuck + later.stuck,
            stray: self.stray + later.stray,
            full: self.full + later.full,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Closed,
    SynSent,
    /// Open, without a request in flight.
    Idle,
    /// The request was sent; the head of the response has not arrived.
    Requested,
    /// A part of the body has not arrived.
    Body,
    /// FIN was sent in response to the server's FIN.
    LastAck,
}

#[derive(Clone, Copy, Debug, Default)]
struct ClientSlot {
    /// Number of the connection, from which its address and port follow.
    id: u32,
    snd_nxt: u32,
    rcv_nxt: u32,
    /// Bytes of the response that have not arrived.
    left: u32,
    /// Time of the last progress in milliseconds.
    last_progress: u32,
    state: State,
    /// True if received bytes are not acknowledged yet.
    unacked: bool,
}

const _: () = assert!(size_of::<ClientSlot>() <= 24);

/// The client.
pub struct Client {
    rx: Box<dyn RxQueue + Send>,
    core: ClientCore,
}

struct ClientCore {
    tx: Box<dyn TxQueue + Send>,
    wire: LinkSetup,
    mode: Mode,
    syn: FrameTemplate,
    ack: FrameTemplate,
    fin: FrameTemplate,
    rst: FrameTemplate,
    requests: Vec<FrameTemplate>,
    slots: Vec<ClientSlot>,
    counts: ClientCounts,
    now_ms: u32,
    unflushed: u32,
    /// Open and idle connections, the oldest first (only [`Mode::Rotate`]).
    idle: VecDeque<u32>,
    /// Connections that are being opened or have a request in flight, in the modes that limit them.
    active: u32,
    /// Chooses the connection of the next request ([`Mode::Uniform`]).
    random: Random,
    /// Number of slots whose first connection was opened; the index of the next one.
    opened: u32,
    next_request: usize,
    next_stuck_check: u32,
    /// Slots with received bytes to acknowledge at the end of the burst.
    unacked: Vec<u32>,
}

impl Client {
    /// Creates a client on a device.
    pub fn new(device: Device, config: &ClientConfig) -> Self {
        let wire = &config.wire;
        // MSS 1,460, and optionally a window scale.
        let mut options = vec![2, 4, 5, 0xb4];
        options.extend(config.window_scale.map(|shift| [1, 3, 3, shift]).into_iter().flatten());
        let requests = config.requests.iter().map(|r| FrameTemplate::new(wire, PSH | ACK, &[], r)).collect();
        let core = ClientCore {
            tx: device.tx,
            wire: *wire,
            mode: config.mode,
            syn: FrameTemplate::new(wire, SYN, &options, &[]),
            ack: FrameTemplate::new(wire, ACK, &[], &[]),
            fin: FrameTemplate::new(wire, FIN | ACK, &[], &[]),
            rst: FrameTemplate::new(wire, RST | ACK, &[], &[]),
            requests,
            // Initialized with nonzero values, so that the memory is resident from the start and not counted
            // as the server's.
            slots: vec![ClientSlot { id: u32::MAX, ..ClientSlot::default() }; config.connections as usize],
            counts: ClientCounts::default(),
            now_ms: 0,
            unflushed: 0,
            idle: VecDeque::with_capacity(config.connections as usize),
            active: 0,
            random: Random::new(1),
            opened: 0,
            next_request: 0,
            next_stuck_check: 0,
            unacked: Vec::with_capacity(64),
        };
        Self { rx: device.rx, core }
    }

    /// Handles the received frames and returns their number.
    pub fn turn(&mut self, now: Instant) -> usize {
        let core = &mut self.core;
        core.now_ms = now.as_millis() as u32;
        let mut burst = RxBurst::new();
        self.rx.rx_burst(now, &mut burst);
        for frame in &burst {
            core.receive(frame.bytes);
            if core.unflushed >= FRAMES_PER_FLUSH {
                core.flush();
            }
        }
        core.counts.received += burst.len() as u64;
        core.acknowledge();
        core.open_or_request();
        core.restart_stuck();
        core.flush();
        burst.len()
    }

    /// Sends another request on the first connection, unless that is not idle ([`Mode::Hold`]).
    pub fn request_again(&mut self) {
        if self.core.slots[0].state == State::Idle {
            self.core.active += 1;
            self.core.send_request(0);
            self.core.flush();
        }
    }

    /// Returns the counters.
    pub fn counts(&self) -> ClientCounts {
        self.core.counts
    }

    /// Returns true if the first SYN of every slot was sent.
    pub fn is_ready(&self) -> bool {
        self.core.opened as usize == self.core.slots.len()
    }
}

fn endpoint_of(id: u32) -> Endpoint {
    Endpoint { ip: FIRST_ADDRESS + id / PORTS, port: (PORTS | (id % PORTS)) as u16 }
}

fn id_of(of: Endpoint) -> u32 {
    of.ip.wrapping_sub(FIRST_ADDRESS).wrapping_mul(PORTS) | u32::from(of.port) & (PORTS - 1)
}

impl ClientCore {
    fn flush(&mut self) {
        self.unflushed = 0;
        self.tx.flush(Instant::ZERO);
    }

    fn send(tx: &mut dyn TxQueue, counts: &mut ClientCounts, template: &FrameTemplate, slot: &ClientSlot) {
        let Some(room) = tx.reserve(template.len()) else {
            counts.full += 1;
            return;
        };
        template.write(room, endpoint_of(slot.id), slot.snd_nxt, slot.rcv_nxt);
        tx.commit(template.len(), template.meta());
        counts.sent += 1;
    }

    /// Opens initial connections and sends requests on idle ones, as the mode says.
    fn open_or_request(&mut self) {
        let limit = match self.mode {
            Mode::Short | Mode::KeepAlive => u32::MAX,
            Mode::Rotate { active } | Mode::Hold { active } | Mode::Uniform { active } => active,
        };
        while self.active < limit {
            if (self.opened as usize) < self.slots.len() {
                let index = self.opened;
                self.opened += 1;
                self.slots[index as usize].id = index;
                self.active += 1;
                self.open(index);
            } else if let Some(index) = self.next_idle() {
                self.active += 1;
                self.send_request(index);
            } else {
                return;
            }
            if self.unflushed >= FRAMES_PER_FLUSH {
                self.flush();
            }
        }
    }

    /// Returns the idle connection that makes the next request.
    fn next_idle(&mut self) -> Option<u32> {
        match self.mode {
            Mode::Rotate { .. } => self.idle.pop_front(),
            Mode::Uniform { .. } => {
                let mut chosen = || self.random.below(self.slots.len() as u64) as u32;
                // Most connections are idle; the search is continued in the next turn if there is none.
                (0..4).map(|_| chosen()).find(|index| self.slots[*index as usize].state == State::Idle)
            }
            Mode::Short | Mode::KeepAlive | Mode::Hold { .. } => None,
        }
    }

    fn open(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.snd_nxt = slot.id.wrapping_mul(64_013);
        slot.rcv_nxt = 0;
        slot.state = State::SynSent;
        slot.last_progress = self.now_ms;
        Self::send(&mut *self.tx, &mut self.counts, &self.syn, slot);
        slot.snd_nxt = slot.snd_nxt.wrapping_add(1);
        self.unflushed += 1;
    }

    /// Opens a new connection in the slot of an old one.
    fn reopen(&mut self, index: u32) {
        let count = self.slots.len() as u32;
        let slot = &mut self.slots[index as usize];
        slot.id = slot.id.wrapping_add(count);
        self.open(index);
    }

    fn send_request(&mut self, index: u32) {
        let template = &self.requests[self.next_request];
        self.next_request = (self.next_request + 1) % self.requests.len();
        let slot = &mut self.slots[index as usize];
        Self::send(&mut *self.tx, &mut self.counts, template, slot);
        slot.snd_nxt = slot.snd_nxt.wrapping_add(template.payload_len());
        slot.state = State::Requested;
        slot.unacked = false;
        slot.last_progress = self.now_ms;
        self.unflushed += 1;
    }

    #[inline]
    fn receive(&mut self, frame: &[u8]) {
        let Some(segment) = Segment::parse(frame) else { return self.receive_arp(frame) };
        let id = id_of(segment.to);
        let index = id % self.slots.len() as u32;
        let slot = &mut self.slots[index as usize];
        if slot.id != id || slot.state == State::Closed {
            self.counts.stray += 1;
            return;
        }
        if segment.flags & RST != 0 {
            self.counts.resets += 1;
            return self.abandon(index);
        }
        match slot.state {
            State::SynSent => self.on_syn_ack(index, &segment),
            State::Requested | State::Body => self.on_response(index, &segment),
            State::LastAck if segment.ack == slot.snd_nxt => self.on_last_ack(index),
            _ => self.counts.stray += u64::from(!segment.payload.is_empty()),
        }
    }

    #[cold]
    fn receive_arp(&mut self, frame: &[u8]) {
        let Some(reply) = arp_reply(frame, self.wire.client_mac) else { return };
        if let Some(room) = self.tx.reserve(reply.len()) {
            room.copy_from_slice(&reply);
            self.tx.commit(reply.len(), TxMeta::default());
            self.unflushed += 1;
        }
    }

    #[inline]
    fn on_syn_ack(&mut self, index: u32, segment: &Segment<'_>) {
        let slot = &mut self.slots[index as usize];
        if segment.flags & (SYN | ACK) != SYN | ACK || segment.ack != slot.snd_nxt {
            self.counts.stray += 1;
            return;
        }
        slot.rcv_nxt = segment.seq.wrapping_add(1);
        self.counts.open += 1;
        if let Mode::Rotate { .. } = self.mode {
            slot.state = State::Idle;
            Self::send(&mut *self.tx, &mut self.counts, &self.ack, slot);
            self.unflushed += 1;
            self.active -= 1;
            self.idle.push_back(index);
        } else {
            self.send_request(index);
        }
    }

    #[inline]
    fn on_response(&mut self, index: u32, segment: &Segment<'_>) {
        let slot = &mut self.slots[index as usize];
        let len = segment.payload.len() as u32;
        let fin = segment.flags & FIN != 0;
        if len == 0 && !fin {
            return;
        }
        if segment.seq != slot.rcv_nxt {
            self.counts.stray += 1;
            return;
        }
        slot.rcv_nxt = slot.rcv_nxt.wrapping_add(len + u32::from(fin));
        slot.last_progress = self.now_ms;
        self.counts.bytes += u64::from(len);
        if fin {
            slot.state = State::LastAck;
            Self::send(&mut *self.tx, &mut self.counts, &self.fin, slot);
            slot.snd_nxt = slot.snd_nxt.wrapping_add(1);
            self.unflushed += 1;
            return;
        }
        if slot.state == State::Requested {
            // A head that arrives in several segments is not recognized; the connection then counts as stuck.
            let Some((head, body)) = http::response_head(segment.payload) else { return };
            slot.left = (head as u64 + body) as u32;
            slot.state = State::Body;
        }
        slot.left = slot.left.saturating_sub(len);
        match (slot.left, self.mode) {
            (0, Mode::KeepAlive) => {
                self.counts.done += 1;
                self.send_request(index);
            }
            (0, Mode::Hold { .. } | Mode::Uniform { .. }) => {
                self.counts.done += 1;
                self.active -= 1;
                slot.state = State::Idle;
                Self::send(&mut *self.tx, &mut self.counts, &self.ack, slot);
                self.unflushed += 1;
            }
            _ if !slot.unacked => {
                slot.unacked = true;
                self.unacked.push(index);
            }
            _ => {}
        }
    }

    /// Acknowledges the data received in this burst, once per connection, as a client with receive offload
    /// does. The response of a short connection comes with the server's FIN, so it leaves nothing to
    /// acknowledge here.
    fn acknowledge(&mut self) {
        while let Some(index) = self.unacked.pop() {
            let slot = &mut self.slots[index as usize];
            if std::mem::take(&mut slot.unacked) && slot.state == State::Body {
                Self::send(&mut *self.tx, &mut self.counts, &self.ack, slot);
                self.unflushed += 1;
            }
        }
    }

    #[inline]
    fn on_last_ack(&mut self, index: u32) {
        self.counts.done += 1;
        self.counts.open -= 1;
        self.reopen(index);
    }

    /// Gives up a connection and opens a new one in its slot.
    #[cold]
    fn abandon(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        self.counts.open -= u64::from(slot.state != State::SynSent);
        if slot.state == State::Idle {
            // It becomes active now; in [`Mode::Rotate`] it is in the queue.
            self.idle.retain(|&i| i != index);
            self.active += 1;
        }
        self.reopen(index);
    }

    /// Checks a few connections for progress, all in turn.
    fn restart_stuck(&mut self) {
        let used = self.opened;
        for _ in 0..STUCK_CHECKS_PER_TURN.min(used) {
            self.next_stuck_check =
                if self.next_stuck_check + 1 < used { self.next_stuck_check + 1 } else { 0 };
            let slot = &self.slots[self.next_stuck_check as usize];
            let waits = !matches!(slot.state, State::Closed | State::Idle);
            let since = self.now_ms.wrapping_sub(slot.last_progress);
            if waits && u128::from(since) > STUCK_AFTER.as_millis() {
                self.counts.stuck += 1;
                Self::send(&mut *self.tx, &mut self.counts, &self.rst, slot);
                self.abandon(self.next_stuck_check);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_and_endpoint_correspond() {
        for id in [0, 1, 32_767, 32_768, 99_999_999, u32::MAX] {
            assert_eq!(id_of(endpoint_of(id)), id);
            assert!(endpoint_of(id).port >= 32_768);
        }
    }
}
