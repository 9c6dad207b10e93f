//! The language of an input: words of 16 bytes, each an operation with its operands.
//!
//! Words have one size, so that an input can be cut anywhere, and every byte string is a valid input. The operands' meaning stands at
//! the functions that make the words; what is out of range is taken modulo whatever there is.

use ginnel_stack::wire::tcp::TcpFlags;

/// Bytes of a word.
pub const WORD_BYTES: usize = 16;

/// One operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Word {
    /// Which operation: an [`Op`], modulo their number.
    pub code: u8,
    /// Operands.
    pub a: u8,
    /// …
    pub b: u8,
    /// …
    pub c: u8,
    /// …
    pub x: u32,
    /// …
    pub y: u32,
    /// …
    pub z: u32,
}

/// The operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// A remote host begins a connection: SYN.
    Open,
    /// A segment of a remote host, relative to what it knows.
    Segment,
    /// A remote host does what a correct one would do next.
    PeerAction,
    /// Frames wait from here on, to arrive in one burst.
    Hold,
    /// The frames that wait arrive.
    Release,
    /// Time passes.
    Advance,
    /// The application listens.
    Listen,
    /// The application closes a listener.
    Unlisten,
    /// The application connects.
    Connect,
    /// The application accepts, or stops accepting by itself.
    Accept,
    /// The application sends.
    Send,
    /// The application sends from a source.
    SendSource,
    /// The application sends urgent data.
    SendUrgent,
    /// The application reads.
    Recv,
    /// The application closes its half.
    Shutdown,
    /// The application closes.
    Close,
    /// The application aborts.
    Abort,
    /// The application sets an option.
    SetOption,
    /// How much of in-burst data the application takes.
    ReadPolicy,
    /// How many more frames the device takes.
    TxCapacity,
    /// An ICMP error about a frame that the stack sent.
    IcmpError,
    /// The next packets of remote hosts come in fragments.
    Fragment,
    /// ARP.
    Arp,
    /// Neighbour discovery and router advertisements.
    Ndp,
    /// Echo requests, and protocols nobody speaks.
    Ping,
    /// An earlier frame again, with some bytes changed.
    Mutate,
    /// The words that follow are a frame.
    Raw,
    /// A peer behaves by itself from here on, or ceases to.
    AutoRespond,
    /// Many operations of the same kind.
    Repeat,
    /// The application opens a UDP socket.
    UdpBind,
    /// The application fixes a UDP socket's other end.
    UdpConnect,
    /// The application sends a datagram.
    UdpSend,
    /// The application reads a datagram.
    UdpRecv,
    /// The application closes a UDP socket.
    UdpClose,
    /// A remote host sends a datagram.
    Datagram,
    /// An ICMP error about the last datagram that the stack sent.
    UdpError,
}

impl Op {
    /// All of them.
    pub const ALL: [Self; 36] = [
        Self::Open,
        Self::Segment,
        Self::PeerAction,
        Self::Hold,
        Self::Release,
        Self::Advance,
        Self::Listen,
        Self::Unlisten,
        Self::Connect,
        Self::Accept,
        Self::Send,
        Self::SendSource,
        Self::SendUrgent,
        Self::Recv,
        Self::Shutdown,
        Self::Close,
        Self::Abort,
        Self::SetOption,
        Self::ReadPolicy,
        Self::TxCapacity,
        Self::IcmpError,
        Self::Fragment,
        Self::Arp,
        Self::Ndp,
        Self::Ping,
        Self::Mutate,
        Self::Raw,
        Self::AutoRespond,
        Self::Repeat,
        Self::UdpBind,
        Self::UdpConnect,
        Self::UdpSend,
        Self::UdpRecv,
        Self::UdpClose,
        Self::Datagram,
        Self::UdpError,
    ];
}

/// What [`Op::Behave`] can mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PeerAction {
    /// Answers SYN with SYN+ACK.
    AcceptSyn,
    /// Acknowledges everything the stack sent.
    AckAll,
    /// Sends data.
    Data,
    /// Sends FIN and acknowledges everything.
    Fin,
    /// Sends RST at the right place.
    Reset,
    /// Answers SYN with SYN: simultaneous open.
    CrossingSyn,
    /// Acknowledges all but the last bytes, with SACK blocks for some of them.
    SackHoles,
    /// Sends its last data again.
    Retransmit,
    /// Closes its window.
    CloseWindow,
    /// Opens its window.
    OpenWindow,
}

impl PeerAction {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::AcceptSyn,
        Self::AckAll,
        Self::Data,
        Self::Fin,
        Self::Reset,
        Self::CrossingSyn,
        Self::SackHoles,
        Self::Retransmit,
        Self::CloseWindow,
        Self::OpenWindow,
    ];
}

/// Options in SYN segments: bits of an operand.
pub mod syn_options {
    /// MSS.
    pub const MSS: u8 = 1;
    /// Window scale.
    pub const WSCALE: u8 = 2;
    /// SACK permitted.
    pub const SACK: u8 = 4;
    /// Timestamps.
    pub const TIMESTAMPS: u8 = 8;
    /// ECE and CWR.
    pub const ECN: u8 = 16;
    /// IPv6.
    pub const V6: u8 = 32;
    /// From a network behind the gateway.
    pub const REMOTE: u8 = 64;
    /// What everybody sends.
    pub const DEFAULT: u8 = MSS | WSCALE | SACK | TIMESTAMPS;
}

impl Word {
    fn op(op: Op) -> Self {
        Self { code: op as u8, ..Self::default() }
    }

    /// What operation it is.
    pub fn operation(&self) -> Op {
        Op::ALL[usize::from(self.code) % Op::ALL.len()]
    }

    /// The bytes of a word.
    pub fn encode(&self) -> [u8; WORD_BYTES] {
        let mut out = [0; WORD_BYTES];
        out[..4].copy_from_slice(&[self.code, self.a, self.b, self.c]);
        out[4..8].copy_from_slice(&self.x.to_le_bytes());
        out[8..12].copy_from_slice(&self.y.to_le_bytes());
        out[12..].copy_from_slice(&self.z.to_le_bytes());
        out
    }

    /// A word from up to 16 bytes; what is missing is 0.
    pub fn decode(bytes: &[u8]) -> Self {
        let mut b = [0; WORD_BYTES];
        let n = bytes.len().min(WORD_BYTES);
        b[..n].copy_from_slice(&bytes[..n]);
        let long = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        Self { code: b[0], a: b[1], b: b[2], c: b[3], x: long(4), y: long(8), z: long(12) }
    }

    /// SYN for listener number `listener`, with [`syn_options`]. `host` and `port` name the remote end: the same ones again are the same
    /// connection.
    pub fn open(listener: u8, options: u8, host: u8, port: u16, iss: u32) -> Self {
        Self { a: listener, b: options, c: host, x: iss, y: u32::from(port), z: 0xffff, ..Self::op(Op::Open) }
    }

    /// A segment of remote end `peer`: sequence number `seq` beyond what it would send next, acknowledgement number `ack` beyond all
    /// it has seen. Bits of `how` are listed at [`segment_bits`].
    pub fn segment(peer: u8, flags: TcpFlags, seq: i16, ack: i16, len: u16, how: u8) -> Self {
        let x = (seq as u16 as u32) | (ack as u16 as u32) << 16;
        let y = u32::from(len) | 0xffff << 16;
        Self { a: peer, b: flags.0, c: how, x, y, z: 0, ..Self::op(Op::Segment) }
    }

    /// Remote end `peer` does what `manner` says; `amount` is how many bytes, where that means something.
    pub fn peer_action(peer: u8, manner: PeerAction, amount: u32) -> Self {
        Self { a: peer, b: manner as u8, x: amount, ..Self::op(Op::PeerAction) }
    }

    /// Frames wait from here on.
    pub fn hold() -> Self {
        Self::op(Op::Hold)
    }

    /// All that wait arrive.
    pub fn release() -> Self {
        Self::op(Op::Release)
    }

    /// Milliseconds pass.
    pub fn milliseconds(ms: u32) -> Self {
        Self { a: 1, x: ms, ..Self::op(Op::Advance) }
    }

    /// Time passes to the `count`-th next deadline.
    pub fn deadlines(count: u32) -> Self {
        Self { a: 0, x: count, ..Self::op(Op::Advance) }
    }

    /// Listener on a port: `kind` 0 is all IPv4 addresses, 1 all addresses of both families, 2 all IPv6 ones, 3 the IPv4 address, 4 the IPv6
    /// address.
    pub fn listen(kind: u8, port: u8, backlog: u8) -> Self {
        Self { a: kind, b: port, c: backlog, ..Self::op(Op::Listen) }
    }

    /// Closes a listener.
    pub fn unlisten(listener: u8) -> Self {
        Self { a: listener, ..Self::op(Op::Unlisten) }
    }

    /// Connects to a remote host, with [`syn_options::V6`] and [`syn_options::REMOTE`] meaning something.
    pub fn connect(options: u8, host: u8, port: u16) -> Self {
        Self { b: options, c: host, y: u32::from(port), ..Self::op(Op::Connect) }
    }

    /// Whether connections are accepted as they come.
    pub fn auto_accept(on: bool) -> Self {
        Self { a: 1 + u8::from(on), ..Self::op(Op::Accept) }
    }

    /// Accepts one.
    pub fn accept() -> Self {
        Self::op(Op::Accept)
    }

    /// Sends `len` bytes.
    pub fn send(conn: u8, len: u32) -> Self {
        Self { a: conn, x: len, ..Self::op(Op::Send) }
    }

    /// Sends `len` bytes from a source.
    pub fn send_source(conn: u8, len: u32) -> Self {
        Self { a: conn, x: len, ..Self::op(Op::SendSource) }
    }

    /// Sends `len` bytes, the last one urgent.
    pub fn send_urgent(conn: u8, len: u32) -> Self {
        Self { a: conn, x: len, ..Self::op(Op::SendUrgent) }
    }

    /// Reads up to `len` bytes.
    pub fn recv(conn: u8, len: u32) -> Self {
        Self { a: conn, x: len, ..Self::op(Op::Recv) }
    }

    /// An operation on a connection without operands.
    pub fn on_conn(op: Op, conn: u8) -> Self {
        Self { a: conn, ..Self::op(op) }
    }

    /// Sets option number `which`.
    pub fn set_option(conn: u8, which: u8, value: u32) -> Self {
        Self { a: conn, b: which, x: value, ..Self::op(Op::SetOption) }
    }

    /// How much of in-burst data is taken: 0 nothing, 1 half, 2 all; `greedy` reads buffered data when told of them.
    pub fn read_policy(share: u8, greedy: bool) -> Self {
        Self { a: share, b: greedy.into(), ..Self::op(Op::ReadPolicy) }
    }

    /// The device takes that many more frames; 255 is all.
    pub fn tx_capacity(frames: u8) -> Self {
        Self { a: frames, ..Self::op(Op::TxCapacity) }
    }

    /// ICMP error of kind `kind` about the last frame sent to `peer`.
    pub fn icmp_error(peer: u8, kind: u8, mtu: u16) -> Self {
        Self { a: peer, b: kind, x: mtu.into(), ..Self::op(Op::IcmpError) }
    }

    /// The next `count` packets come in fragments of `size` bytes; `order` 0 forwards, 1 backwards, 2 without the last, 3 one twice, 4 overlapping.
    pub fn fragment(count: u8, size: u16, order: u8) -> Self {
        Self { a: count, b: order, x: size.into(), ..Self::op(Op::Fragment) }
    }

    /// ARP from a remote host: `kind` 0 request, 1 reply, 2 gratuitous with our address.
    pub fn arp(kind: u8, host: u8) -> Self {
        Self { a: kind, c: host, ..Self::op(Op::Arp) }
    }

    /// NDP from a remote host: `kind` 0 solicitation, 1 advertisement, 2 advertisement of our address, 3 router advertisement.
    pub fn ndp(kind: u8, host: u8, value: u32) -> Self {
        Self { a: kind, c: host, x: value, ..Self::op(Op::Ndp) }
    }

    /// Echo request: `kind` 0 IPv4, 1 IPv6; others are protocols nobody speaks.
    pub fn ping(kind: u8, len: u32) -> Self {
        Self { a: kind, x: len, ..Self::op(Op::Ping) }
    }

    /// An earlier frame again: the `back`-th last one; with `fix` its checksums are put right.
    pub fn mutate(back: u8, changes: u8, fix: bool, seed: u32) -> Self {
        Self { a: back, b: changes, c: fix.into(), x: seed, ..Self::op(Op::Mutate) }
    }

    /// The next `words` words are a frame.
    pub fn raw(words: u8) -> Self {
        Self { a: words, ..Self::op(Op::Raw) }
    }

    /// `peer` behaves by itself.
    pub fn auto_respond(peer: u8, on: bool) -> Self {
        Self { a: peer, b: on.into(), ..Self::op(Op::AutoRespond) }
    }

    /// UDP socket: `kind` as with [`Word::listen`], and 5 for the broadcast address; port number `port`, or one that is chosen if its highest
    /// bit is set; bits of `options`: shared address, shared port, broadcast, hop limit.
    pub fn udp_bind(kind: u8, port: u8, options: u8) -> Self {
        Self { a: kind, b: port, c: options, ..Self::op(Op::UdpBind) }
    }

    /// Fixes the other end of a socket.
    pub fn udp_connect(socket: u8, options: u8, host: u8, port: u16) -> Self {
        Self { a: socket, b: options, c: host, y: port.into(), ..Self::op(Op::UdpConnect) }
    }

    /// Sends a datagram of `len` bytes, with the bits of [`datagram_bits`](super::datagrams::datagram_bits).
    pub fn udp_send(socket: u8, options: u8, host: u8, port: u16, len: u32) -> Self {
        Self { a: socket, b: options, c: host, x: len, y: port.into(), ..Self::op(Op::UdpSend) }
    }

    /// Reads a datagram into `len` bytes.
    pub fn udp_recv(socket: u8, len: u32) -> Self {
        Self { a: socket, x: len, ..Self::op(Op::UdpRecv) }
    }

    /// A datagram of a remote host's to port number `port`, with the bits of [`datagram_bits`](super::datagrams::datagram_bits).
    pub fn datagram(port: u8, options: u8, host: u8, from: u16, len: u32) -> Self {
        Self { a: port, b: options, c: host, x: len, y: from.into(), ..Self::op(Op::Datagram) }
    }

    /// ICMP error of kind `kind` about the last datagram sent.
    pub fn udp_error(kind: u8, mtu: u16) -> Self {
        Self { b: kind, x: mtu.into(), ..Self::op(Op::UdpError) }
    }

    /// The next word `count` times.
    pub fn repeat(count: u8) -> Self {
        Self { a: count, ..Self::op(Op::Repeat) }
    }
}

/// Bits of operand `how` of a segment.
pub mod segment_bits {
    /// Sequence and acknowledgement offsets count in 256 bytes.
    pub const SCALED_OFFSETS: u8 = 1;
    /// The sender moves on behind it, as if it had sent this in its turn.
    pub const ADVANCE_SEQ: u8 = 2;
    /// Without timestamps although they were negotiated.
    pub const NO_TIMESTAMP: u8 = 4;
    /// With an old timestamp.
    pub const OLD_TIMESTAMP: u8 = 8;
    /// With SACK blocks made of operand z.
    pub const SACK: u8 = 16;
    /// With a wrong checksum.
    pub const BAD_CHECKSUM: u8 = 32;
    /// Congestion experienced.
    pub const CE: u8 = 64;
    /// With SYN options, and garbage behind them, made of operand z.
    pub const GARBAGE: u8 = 128;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_back_as_written() {
        let word = Word { code: 1, a: 2, b: 3, c: 4, x: 0x0506_0708, y: 0x090a_0b0c, z: 0x0d0e_0f10 };
        assert_eq!(Word::decode(&word.encode()), word);
        assert_eq!(Word::decode(&[7]), Word { code: 7, ..Word::default() });
    }

    #[test]
    fn operations_are_numbered_in_their_order() {
        for (number, op) in Op::ALL.iter().enumerate() {
            assert_eq!(*op as usize, number);
        }
        for (number, manner) in PeerAction::ALL.iter().enumerate() {
            assert_eq!(*manner as usize, number);
        }
    }
}
