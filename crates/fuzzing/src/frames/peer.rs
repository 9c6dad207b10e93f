//! The remote end of a connection: what it knows by having seen every frame of the stack, and the segments it sends.
//!
//! The bytes it sends depend on nothing but their sequence number, so however segments overlap, repeat and race, there is one right
//! answer to what the application must read.

use super::build::{self, Segment};
use super::word::{Manner, Word, segment_bits, syn_options};
use arrayvec::ArrayVec;
use core::net::SocketAddr;
use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags, TcpHeader, TcpOptions, TcpSegment, Timestamps};

/// The byte that a remote end sends at a sequence number.
pub fn inbound_byte(seq: SeqNumber) -> u8 {
    (seq.0.wrapping_mul(0x9e37_79b1) >> 24) as u8
}

/// The byte that the application sends at an offset of its stream.
pub fn outbound_byte(offset: u64) -> u8 {
    (offset.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 56) as u8
}

/// Sequence numbers that connections of the same addresses began with.
type Starts = ArrayVec<SeqNumber, 8>;

/// A remote end.
#[derive(Debug)]
pub struct Peer {
    /// Its address.
    pub remote: SocketAddr,
    /// The stack's address.
    pub local: SocketAddr,
    /// Initial sequence numbers that it used.
    pub own_starts: Starts,
    /// Initial sequence numbers that the stack used.
    pub stack_starts: Starts,
    /// What it sends next.
    pub next: SeqNumber,
    /// End of what the stack sent.
    pub stack_next: SeqNumber,
    /// What it has acknowledged.
    pub acked: SeqNumber,
    /// Last acknowledgement and window of the stack.
    pub stack_ack: SeqNumber,
    /// The stack acknowledged something since its last SYN.
    pub stack_acked: bool,
    /// Right edge of the window that the stack offered.
    pub stack_edge: Option<SeqNumber>,
    /// Shift of the stack's window, once a SYN+ACK of it said so.
    pub stack_scale: Option<u8>,
    /// Farthest that any segment of this end allowed the stack to send.
    pub allowed: Option<SeqNumber>,
    /// Options of its SYN.
    pub options: u8,
    /// A SYN of it had the window scale option.
    pub scales: bool,
    /// The stack's timestamp to be echoed.
    pub echo: u32,
    /// The window field it sends.
    pub window: u16,
    /// Behaves by itself.
    pub automatic: bool,
    /// Urgent data or mutated segments make it impossible to say what must be read.
    pub tainted: bool,
    /// It saw a FIN of the stack.
    pub fin_seen: bool,
    /// The stack's last SYN has no answer.
    pub syn_waits: bool,
}

/// Shift of the window of all remote ends.
const OWN_SCALE: u8 = 7;

impl Peer {
    /// A remote end that has sent nothing.
    pub fn new(remote: SocketAddr, local: SocketAddr, start: SeqNumber) -> Self {
        Self {
            remote,
            local,
            own_starts: Starts::new(),
            stack_starts: Starts::new(),
            next: start,
            stack_next: SeqNumber(0),
            acked: SeqNumber(0),
            stack_ack: start,
            stack_acked: false,
            stack_edge: None,
            stack_scale: None,
            allowed: None,
            options: syn_options::USUAL,
            scales: false,
            echo: 0,
            window: 0xffff,
            automatic: false,
            tainted: false,
            fin_seen: false,
            syn_waits: false,
        }
    }

    fn remember(starts: &mut Starts, start: SeqNumber) {
        if !starts.contains(&start) {
            if starts.is_full() {
                starts.remove(0);
            }
            starts.push(start);
        }
    }

    /// Takes note of a segment of the stack.
    pub fn on_stack_segment(&mut self, segment: &TcpSegment<'_>) {
        let h = &segment.header;
        if h.flags.contains(TcpFlags::RST) {
            return self.forget_stack();
        }
        let options = TcpOptions::parse(segment.options);
        let end = h.seq + segment.seq_len();
        if h.flags.contains(TcpFlags::SYN) {
            let known = self.stack_starts.last() == Some(&h.seq);
            Self::remember(&mut self.stack_starts, h.seq);
            if !known {
                self.stack_next = end;
                self.acked = h.seq;
                self.fin_seen = false;
                self.stack_edge = None;
                self.allowed = None;
            }
            self.syn_waits = true;
            self.forget_stack();
            self.stack_scale = h.flags.contains(TcpFlags::ACK).then(|| options.window_scale.unwrap_or(0));
        }
        if end.gt(self.stack_next) {
            self.stack_next = end;
        }
        self.fin_seen |= h.flags.contains(TcpFlags::FIN);
        if let Some(ts) = options.timestamps {
            self.echo = ts.value;
        }
        if h.flags.contains(TcpFlags::ACK) {
            self.stack_ack = h.ack;
            self.stack_acked = true;
        }
    }

    /// Another connection may begin: what is known of the old one says nothing about it. After RST a cookie may still bring one back.
    pub fn forget_stack(&mut self) {
        self.stack_edge = None;
        self.stack_acked = false;
    }

    /// Timestamps of a segment sent at `now_ms`.
    fn timestamps(&self, now_ms: u32, how: u8) -> Option<Timestamps> {
        let wanted = self.options & syn_options::TIMESTAMPS != 0 && how & segment_bits::NO_TIMESTAMP == 0;
        let age = if how & segment_bits::OLD_TIMESTAMP == 0 { 0 } else { 100_000 };
        wanted
            .then(|| Timestamps { value: now_ms.wrapping_add(7_000_000).wrapping_sub(age), echo: self.echo })
    }

    fn syn_options(&self, now_ms: u32) -> TcpOptions {
        let has = |bit| self.options & bit != 0;
        TcpOptions {
            mss: has(syn_options::MSS).then_some(if has(syn_options::V6) { 1440 } else { 1460 }),
            window_scale: has(syn_options::WSCALE).then_some(OWN_SCALE),
            sack_permitted: has(syn_options::SACK),
            timestamps: self.timestamps(now_ms, 0),
            ..TcpOptions::default()
        }
    }

    /// Builds a segment and keeps account of what it allows.
    fn build(&mut self, header: TcpHeader, options: TcpOptions, len: usize, word: &Word) -> Vec<u8> {
        let syn = header.flags.contains(TcpFlags::SYN);
        if header.flags.contains(TcpFlags::ACK) || syn {
            self.scales |= syn && self.options & syn_options::WSCALE != 0;
            let shift = if syn || !self.scales { 0 } else { OWN_SCALE };
            let from = if header.flags.contains(TcpFlags::ACK) {
                Some(header.ack)
            } else {
                self.stack_starts.last().map(|s| *s + 1)
            };
            if let Some(edge) = from.map(|f| f + (u32::from(header.window) << shift))
                && self.allowed.is_none_or(|known| edge.gt(known))
            {
                self.allowed = Some(edge);
            }
        }
        if syn || header.flags.contains(TcpFlags::RST) {
            self.forget_stack();
        }
        if syn {
            self.stack_scale = None;
        }
        let first = header.seq + u32::from(syn);
        let payload: Vec<u8> = (0..len as u32).map(|i| inbound_byte(first + i)).collect();
        let how = word.c;
        let seed = word.z.to_le_bytes();
        let garbage = [seed, [word.a, word.b, seed[3], seed[1]], [seed[1], seed[2], 4, 2]].concat();
        let segment = Segment {
            header,
            options,
            garbage: if how & segment_bits::GARBAGE != 0 { &garbage } else { &[] },
            payload: &payload,
            ecn: if how & segment_bits::CE != 0 { 3 } else { 0 },
            ident: 0,
            bad_checksum: how & segment_bits::BAD_CHECKSUM != 0,
        };
        build::tcp(self.remote, self.local, &segment)
    }

    fn header(&self, seq: SeqNumber, ack: SeqNumber, flags: TcpFlags) -> TcpHeader {
        TcpHeader {
            src_port: 0,
            dst_port: 0,
            seq,
            ack: if flags.contains(TcpFlags::ACK) { ack } else { SeqNumber(0) },
            flags,
            window: self.window,
            urgent: 0,
            header_len: 0,
        }
    }

    /// SYN with a new initial sequence number. The low half of `z` is the window, the high half payload.
    pub fn open(&mut self, word: &Word, now_ms: u32) -> Vec<u8> {
        let start = SeqNumber(word.x);
        self.options = word.b;
        self.next = start + 1;
        self.window = word.z as u16;
        Self::remember(&mut self.own_starts, start);
        let ecn = if word.b & syn_options::ECN == 0 { TcpFlags::NONE } else { TcpFlags::ECE | TcpFlags::CWR };
        let header = self.header(start, SeqNumber(0), TcpFlags::SYN | ecn);
        let plain = Word { c: 0, ..*word };
        self.build(header, self.syn_options(now_ms), (word.z >> 16) as usize % 1400, &plain)
    }

    /// A segment as [`Word::segment`] describes it.
    pub fn segment(&mut self, word: &Word, now_ms: u32) -> Vec<u8> {
        let scale = if word.c & segment_bits::FAR == 0 { 1 } else { 256 };
        let offset = |half: u32| (i64::from(half as u16 as i16) * scale) as i32 as u32;
        let flags = TcpFlags(word.b);
        let len = (word.y & 0xffff) as usize % 9000;
        let seq = self.next + offset(word.x);
        let mut header = self.header(seq, self.stack_next + offset(word.x >> 16), flags);
        header.window = (word.y >> 16) as u16;
        header.urgent = if flags.contains(TcpFlags::URG) { (word.z >> 16) as u16 } else { 0 };
        self.tainted |= flags.contains(TcpFlags::URG);
        let mut options = TcpOptions { timestamps: self.timestamps(now_ms, word.c), ..TcpOptions::default() };
        if word.c & segment_bits::SACK != 0 {
            self.add_sack_blocks(word.z, &mut options);
        }
        if flags.contains(TcpFlags::SYN) {
            Self::remember(&mut self.own_starts, seq);
            if word.c & segment_bits::GARBAGE == 0 {
                options = self.syn_options(now_ms);
            }
        }
        if word.c & segment_bits::IN_TURN != 0 {
            let space = u32::from(flags.contains(TcpFlags::SYN)) + u32::from(flags.contains(TcpFlags::FIN));
            self.next = seq + (len as u32 + space);
            if flags.contains(TcpFlags::ACK) {
                self.acked = header.ack;
            }
        }
        self.build(header, options, len, word)
    }

    /// Blocks relative to what is in flight; the bytes of `seed` choose where.
    fn add_sack_blocks(&self, seed: u32, options: &mut TcpOptions) {
        let flight = (self.stack_next - self.acked).max(16) as u32;
        for i in 0..1 + (seed & 3) {
            let at = (seed >> (2 + 7 * i) & 15) * flight / 12;
            let len = (seed >> (6 + 7 * i) & 7) * flight / 8;
            options.sack_blocks.push((self.acked + at, self.acked + (at + len)));
        }
    }

    /// What a correct host would do. `None` if there is nothing to do.
    pub fn behave(&mut self, manner: Manner, amount: u32, now_ms: u32) -> Option<Vec<u8>> {
        let plain = Word::default();
        let options = TcpOptions { timestamps: self.timestamps(now_ms, 0), ..TcpOptions::default() };
        let ack = self.stack_next;
        let (header, options, len) = match manner {
            Manner::AcceptSyn | Manner::CrossingSyn => {
                let start = self.next;
                Self::remember(&mut self.own_starts, start);
                let flags =
                    if manner == Manner::AcceptSyn { TcpFlags::SYN | TcpFlags::ACK } else { TcpFlags::SYN };
                let header = self.header(start, ack, flags);
                self.next = start + 1;
                (header, self.syn_options(now_ms), 0)
            }
            Manner::AckAll => (self.header(self.next, ack, TcpFlags::ACK), options, 0),
            Manner::Data => {
                let len = amount % 9000;
                let header = self.header(self.next, ack, TcpFlags::ACK | TcpFlags::PSH);
                self.next += len;
                (header, options, len)
            }
            Manner::Fin => {
                let header = self.header(self.next, ack, TcpFlags::ACK | TcpFlags::FIN);
                self.next += 1;
                (header, options, 0)
            }
            Manner::Reset => (self.header(self.stack_ack, ack, TcpFlags::RST | TcpFlags::ACK), options, 0),
            Manner::SackHoles => {
                let header = self.header(self.next, self.acked, TcpFlags::ACK);
                let mut options = options;
                self.add_sack_blocks(amount, &mut options);
                return Some(self.build(header, options, 0, &plain));
            }
            Manner::Retransmit => {
                let behind = (self.next - self.stack_ack).clamp(0, 9000) as u32;
                let len = behind.max(amount % 100);
                let header = self.header(self.next - len, ack, TcpFlags::ACK | TcpFlags::PSH);
                (header, options, len)
            }
            Manner::CloseWindow => {
                self.window = 0;
                (self.header(self.next, ack, TcpFlags::ACK), options, 0)
            }
            Manner::OpenWindow => {
                self.window = (amount as u16).max(1);
                (self.header(self.next, ack, TcpFlags::ACK), options, 0)
            }
        };
        self.syn_waits = false;
        self.acked = ack;
        Some(self.build(header, options, len as usize, &plain))
    }

    /// The answer of an automatic end to what the stack sent, if there is any.
    pub fn answer(&mut self, now_ms: u32) -> Option<Vec<u8>> {
        if !self.automatic || !self.stack_next.gt(self.acked) {
            return None;
        }
        let active_open = self.syn_waits && self.stack_scale.is_none();
        self.behave(if active_open { Manner::AcceptSyn } else { Manner::AckAll }, 0, now_ms)
    }
}
