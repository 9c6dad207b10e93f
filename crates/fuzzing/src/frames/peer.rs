//! The remote end of a connection: its knowledge from all frames of the stack, and the segments that it
//! sends.
//!
//! The bytes that it sends depend only on their sequence numbers. However segments overlap, repeat and race,
//! there is one correct result for the application's reads.

use super::build::{self, SegmentSpec};
use super::word::{PeerAction, Word, segment_bits, syn_options};
use arrayvec::ArrayVec;
use core::net::SocketAddr;
use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags, TcpHeader, TcpOptions, TcpSegment, Timestamps};

/// Returns the byte that a remote end sends at a sequence number.
pub fn inbound_byte(seq: SeqNumber) -> u8 {
    (seq.0.wrapping_mul(0x9e37_79b1) >> 24) as u8
}

/// Returns the byte that the application sends at a stream offset.
pub fn outbound_byte(offset: u64) -> u8 {
    (offset.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 56) as u8
}

/// Initial sequence numbers of connections between the same addresses.
type Isns = ArrayVec<SeqNumber, 8>;

/// A remote end.
#[derive(Debug)]
pub struct Peer {
    /// Address of the remote end.
    pub remote: SocketAddr,
    /// Address of the stack.
    pub local: SocketAddr,
    /// Initial sequence numbers that this end used.
    pub own_isns: Isns,
    /// Initial sequence numbers that the stack used.
    pub stack_isns: Isns,
    /// Next sequence number to send.
    pub snd_nxt: SeqNumber,
    /// Sequence number after the last byte that the stack sent.
    pub rcv_nxt: SeqNumber,
    /// Last acknowledgement number sent.
    pub last_ack_sent: SeqNumber,
    /// Last acknowledgement number of the stack.
    pub snd_una: SeqNumber,
    /// True if the stack has acknowledged something since its last SYN.
    pub snd_una_known: bool,
    /// Right edge of the window that the stack offered.
    pub snd_wnd_edge: Option<SeqNumber>,
    /// Window scale of the stack, from its SYN+ACK.
    pub snd_wscale: Option<u8>,
    /// Highest right edge of the window that this end offered.
    pub rcv_wnd_edge: Option<SeqNumber>,
    /// Options of the SYN, as bits of [`syn_options`].
    pub syn_option_bits: u8,
    /// True if a SYN of this end had the window scale option.
    pub sent_wscale: bool,
    /// Timestamp of the stack to echo (TS.Recent).
    pub ts_recent: u32,
    /// Window field to send.
    pub rcv_wnd: u16,
    /// Answers segments of the stack without further operations.
    pub auto_respond: bool,
    /// True if urgent data or mutated segments make the content of the stream uncertain.
    pub tainted: bool,
    /// True if a FIN of the stack was received.
    pub fin_seen: bool,
    /// True if the stack's last SYN is unanswered.
    pub syn_unanswered: bool,
}

/// Window scale of all remote ends.
const RCV_WSCALE: u8 = 7;

impl Peer {
    /// Creates a remote end that has sent nothing.
    pub fn new(remote: SocketAddr, local: SocketAddr, start: SeqNumber) -> Self {
        Self {
            remote,
            local,
            own_isns: Isns::new(),
            stack_isns: Isns::new(),
            snd_nxt: start,
            rcv_nxt: SeqNumber(0),
            last_ack_sent: SeqNumber(0),
            snd_una: start,
            snd_una_known: false,
            snd_wnd_edge: None,
            snd_wscale: None,
            rcv_wnd_edge: None,
            syn_option_bits: syn_options::DEFAULT,
            sent_wscale: false,
            ts_recent: 0,
            rcv_wnd: 0xffff,
            auto_respond: false,
            tainted: false,
            fin_seen: false,
            syn_unanswered: false,
        }
    }

    fn add_isn(starts: &mut Isns, start: SeqNumber) {
        if !starts.contains(&start) {
            if starts.is_full() {
                starts.remove(0);
            }
            starts.push(start);
        }
    }

    /// Processes a segment of the stack.
    pub fn on_stack_segment(&mut self, segment: &TcpSegment<'_>) {
        let h = &segment.header;
        if h.flags.contains(TcpFlags::RST) {
            return self.forget_stack_state();
        }
        let options = TcpOptions::parse(segment.options);
        let end = h.seq + segment.seq_len();
        if h.flags.contains(TcpFlags::SYN) {
            let repeated = self.stack_isns.last() == Some(&h.seq);
            Self::add_isn(&mut self.stack_isns, h.seq);
            if !repeated {
                self.rcv_nxt = end;
                self.last_ack_sent = h.seq;
                self.fin_seen = false;
                self.snd_wnd_edge = None;
                self.rcv_wnd_edge = None;
            }
            self.syn_unanswered = true;
            self.forget_stack_state();
            self.snd_wscale = h.flags.contains(TcpFlags::ACK).then(|| options.window_scale.unwrap_or(0));
        }
        if end.gt(self.rcv_nxt) {
            self.rcv_nxt = end;
        }
        self.fin_seen |= h.flags.contains(TcpFlags::FIN);
        if let Some(ts) = options.timestamps {
            self.ts_recent = ts.tsval;
        }
        if h.flags.contains(TcpFlags::ACK) {
            self.snd_una = h.ack;
            self.snd_una_known = true;
        }
    }

    /// Forgets the state of the stack's connection, because another one may begin. After RST a cookie may
    /// revive the old one.
    pub fn forget_stack_state(&mut self) {
        self.snd_wnd_edge = None;
        self.snd_una_known = false;
    }

    /// Returns the timestamps of a segment sent at `now_ms`.
    fn timestamps(&self, now_ms: u32, bits: u8) -> Option<Timestamps> {
        let enabled =
            self.syn_option_bits & syn_options::TIMESTAMPS != 0 && bits & segment_bits::NO_TIMESTAMP == 0;
        let age = if bits & segment_bits::OLD_TIMESTAMP == 0 { 0 } else { 100_000 };
        enabled.then(|| Timestamps {
            tsval: now_ms.wrapping_add(7_000_000).wrapping_sub(age),
            tsecr: self.ts_recent,
        })
    }

    fn syn_options(&self, now_ms: u32) -> TcpOptions {
        let has = |bit| self.syn_option_bits & bit != 0;
        TcpOptions {
            mss: has(syn_options::MSS).then_some(if has(syn_options::V6) { 1440 } else { 1460 }),
            window_scale: has(syn_options::WSCALE).then_some(RCV_WSCALE),
            sack_permitted: has(syn_options::SACK),
            timestamps: self.timestamps(now_ms, 0),
            ..TcpOptions::default()
        }
    }

    /// Builds a segment and updates the right edge of the offered window.
    fn build(&mut self, header: TcpHeader, options: TcpOptions, len: usize, word: &Word) -> Vec<u8> {
        let syn = header.flags.contains(TcpFlags::SYN);
        if header.flags.contains(TcpFlags::ACK) || syn {
            self.sent_wscale |= syn && self.syn_option_bits & syn_options::WSCALE != 0;
            let shift = if syn || !self.sent_wscale { 0 } else { RCV_WSCALE };
            let base = if header.flags.contains(TcpFlags::ACK) {
                Some(header.ack)
            } else {
                self.stack_isns.last().map(|s| *s + 1)
            };
            if let Some(edge) = base.map(|b| b + (u32::from(header.window) << shift))
                && self.rcv_wnd_edge.is_none_or(|old| edge.gt(old))
            {
                self.rcv_wnd_edge = Some(edge);
            }
        }
        if syn || header.flags.contains(TcpFlags::RST) {
            self.forget_stack_state();
        }
        if syn {
            self.snd_wscale = None;
        }
        let first = header.seq + u32::from(syn);
        let payload: Vec<u8> = (0..len as u32).map(|i| inbound_byte(first + i)).collect();
        let bits = word.c;
        let seed = word.z.to_le_bytes();
        let garbage = [seed, [word.a, word.b, seed[3], seed[1]], [seed[1], seed[2], 4, 2]].concat();
        let segment = SegmentSpec {
            header,
            options,
            trailing_options: if bits & segment_bits::GARBAGE != 0 { &garbage } else { &[] },
            payload: &payload,
            ecn: if bits & segment_bits::CE != 0 { 3 } else { 0 },
            ident: 0,
            bad_checksum: bits & segment_bits::BAD_CHECKSUM != 0,
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
            window: self.rcv_wnd,
            urg_ptr: 0,
            header_len: 0,
        }
    }

    /// Builds a SYN with a new initial sequence number. The low half of `z` is the window, the high half the
    /// payload length.
    pub fn open(&mut self, word: &Word, now_ms: u32) -> Vec<u8> {
        let start = SeqNumber(word.x);
        self.syn_option_bits = word.b;
        self.snd_nxt = start + 1;
        self.rcv_wnd = word.z as u16;
        Self::add_isn(&mut self.own_isns, start);
        let ecn = if word.b & syn_options::ECN == 0 { TcpFlags::NONE } else { TcpFlags::ECE | TcpFlags::CWR };
        let header = self.header(start, SeqNumber(0), TcpFlags::SYN | ecn);
        let no_bits = Word { c: 0, ..*word };
        self.build(header, self.syn_options(now_ms), (word.z >> 16) as usize % 1400, &no_bits)
    }

    /// Builds a segment as [`Word::segment`] describes it.
    pub fn segment(&mut self, word: &Word, now_ms: u32) -> Vec<u8> {
        let scale = if word.c & segment_bits::SCALED_OFFSETS == 0 { 1 } else { 256 };
        let offset = |half: u32| (i64::from(half as u16 as i16) * scale) as i32 as u32;
        let flags = TcpFlags(word.b);
        let len = (word.y & 0xffff) as usize % 9000;
        let seq = self.snd_nxt + offset(word.x);
        let mut header = self.header(seq, self.rcv_nxt + offset(word.x >> 16), flags);
        header.window = (word.y >> 16) as u16;
        header.urg_ptr = if flags.contains(TcpFlags::URG) { (word.z >> 16) as u16 } else { 0 };
        self.tainted |= flags.contains(TcpFlags::URG);
        let mut options = TcpOptions { timestamps: self.timestamps(now_ms, word.c), ..TcpOptions::default() };
        if word.c & segment_bits::SACK != 0 {
            self.add_sack_blocks(word.z, &mut options);
        }
        if flags.contains(TcpFlags::SYN) {
            Self::add_isn(&mut self.own_isns, seq);
            if word.c & segment_bits::GARBAGE == 0 {
                options = self.syn_options(now_ms);
            }
        }
        if word.c & segment_bits::ADVANCE_SEQ != 0 {
            let space = u32::from(flags.contains(TcpFlags::SYN)) + u32::from(flags.contains(TcpFlags::FIN));
            self.snd_nxt = seq + (len as u32 + space);
            if flags.contains(TcpFlags::ACK) {
                self.last_ack_sent = header.ack;
            }
        }
        self.build(header, options, len, word)
    }

    /// Adds SACK blocks within the data in flight; the bits of `seed` select them.
    fn add_sack_blocks(&self, seed: u32, options: &mut TcpOptions) {
        let flight = (self.rcv_nxt - self.last_ack_sent).max(16) as u32;
        for i in 0..1 + (seed & 3) {
            let at = (seed >> (2 + 7 * i) & 15) * flight / 12;
            let len = (seed >> (6 + 7 * i) & 7) * flight / 8;
            options.sack_blocks.push((self.last_ack_sent + at, self.last_ack_sent + (at + len)));
        }
    }

    /// Builds the segment of a correct host that performs `action`.
    pub fn act(&mut self, action: PeerAction, amount: u32, now_ms: u32) -> Vec<u8> {
        let no_bits = Word::default();
        let options = TcpOptions { timestamps: self.timestamps(now_ms, 0), ..TcpOptions::default() };
        let ack = self.rcv_nxt;
        let (header, options, len) = match action {
            PeerAction::AcceptSyn | PeerAction::CrossingSyn => {
                let start = self.snd_nxt;
                Self::add_isn(&mut self.own_isns, start);
                let flags = if action == PeerAction::AcceptSyn {
                    TcpFlags::SYN | TcpFlags::ACK
                } else {
                    TcpFlags::SYN
                };
                let header = self.header(start, ack, flags);
                self.snd_nxt = start + 1;
                (header, self.syn_options(now_ms), 0)
            }
            PeerAction::AckAll => (self.header(self.snd_nxt, ack, TcpFlags::ACK), options, 0),
            PeerAction::Data => {
                let len = amount % 9000;
                let header = self.header(self.snd_nxt, ack, TcpFlags::ACK | TcpFlags::PSH);
                self.snd_nxt += len;
                (header, options, len)
            }
            PeerAction::Fin => {
                let header = self.header(self.snd_nxt, ack, TcpFlags::ACK | TcpFlags::FIN);
                self.snd_nxt += 1;
                (header, options, 0)
            }
            PeerAction::Reset => (self.header(self.snd_una, ack, TcpFlags::RST | TcpFlags::ACK), options, 0),
            PeerAction::SackHoles => {
                let header = self.header(self.snd_nxt, self.last_ack_sent, TcpFlags::ACK);
                let mut options = options;
                self.add_sack_blocks(amount, &mut options);
                return self.build(header, options, 0, &no_bits);
            }
            PeerAction::Retransmit => {
                let unacked = (self.snd_nxt - self.snd_una).clamp(0, 9000) as u32;
                let len = unacked.max(amount % 100);
                let header = self.header(self.snd_nxt - len, ack, TcpFlags::ACK | TcpFlags::PSH);
                (header, options, len)
            }
            PeerAction::CloseWindow => {
                self.rcv_wnd = 0;
                (self.header(self.snd_nxt, ack, TcpFlags::ACK), options, 0)
            }
            PeerAction::OpenWindow => {
                self.rcv_wnd = (amount as u16).max(1);
                (self.header(self.snd_nxt, ack, TcpFlags::ACK), options, 0)
            }
        };
        self.syn_unanswered = false;
        self.last_ack_sent = ack;
        self.build(header, options, len as usize, &no_bits)
    }

    /// Returns the answer to the stack's segments, if this end responds automatically and owes one.
    pub fn answer(&mut self, now_ms: u32) -> Option<Vec<u8>> {
        if !self.auto_respond || !self.rcv_nxt.gt(self.last_ack_sent) {
            return None;
        }
        let active_open = self.syn_unanswered && self.snd_wscale.is_none();
        Some(self.act(if active_open { PeerAction::AcceptSyn } else { PeerAction::AckAll }, 0, now_ms))
    }
}
