//! Encoding of an input: words of 16 bytes, each an operation with its operands.
//!
//! All words have one size, so an input can be cut anywhere, and every byte string is a valid input. The
//! functions that build words document their operands. Operands out of range are reduced modulo the number of
//! choices.

use ginnel_stack::wire::tcp::TcpFlags;

/// Bytes of a word.
pub const WORD_BYTES: usize = 16;

/// An operation with its operands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Word {
    /// The operation: an [`Op`], modulo their number.
    pub code: u8,
    /// First byte operand.
    pub a: u8,
    /// Second byte operand.
    pub b: u8,
    /// Third byte operand.
    pub c: u8,
    /// First 32-bit operand.
    pub x: u32,
    /// Second 32-bit operand.
    pub y: u32,
    /// Third 32-bit operand.
    pub z: u32,
}

/// Operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// A remote host sends a SYN.
    Open,
    /// A remote host sends a segment, relative to its knowledge.
    Segment,
    /// A remote host performs a [`PeerAction`].
    PeerAction,
    /// Collects further frames, to be delivered in one burst.
    Hold,
    /// Delivers the collected frames.
    Release,
    /// Advances time.
    Advance,
    /// The application listens.
    Listen,
    /// The application closes a listener.
    Unlisten,
    /// The application connects.
    Connect,
    /// The application accepts, or changes whether it accepts automatically.
    Accept,
    /// The application sends.
    Send,
    /// The application sends from a source.
    SendSource,
    /// The application sends urgent data.
    SendUrgent,
    /// The application reads.
    Recv,
    /// The application shuts down its write side.
    Shutdown,
    /// The application closes.
    Close,
    /// The application aborts.
    Abort,
    /// The application sets an option.
    SetOption,
    /// Sets which share of in-burst data the application takes.
    ReadPolicy,
    /// Sets how many frames the device takes.
    TxCapacity,
    /// A router sends an ICMP error about a frame of the stack.
    IcmpError,
    /// Fragments the next packets of remote hosts.
    Fragment,
    /// A remote host sends an ARP frame.
    Arp,
    /// A remote host sends neighbour discovery or a router advertisement.
    Ndp,
    /// A remote host sends an echo request, an IGMP message or another packet, see [`Word::ping`].
    Ping,
    /// Delivers an earlier frame again, with some bytes changed.
    Mutate,
    /// Delivers the following words as a frame.
    Raw,
    /// Sets whether a remote end responds automatically.
    AutoRespond,
    /// Repeats the next operation.
    Repeat,
    /// The application opens a UDP socket.
    UdpBind,
    /// The application connects a UDP socket.
    UdpConnect,
    /// The application sends a datagram.
    UdpSend,
    /// The application reads a datagram.
    UdpRecv,
    /// The application closes a UDP socket.
    UdpClose,
    /// A remote host sends a datagram.
    Datagram,
    /// A router sends an ICMP error about the last datagram of the stack.
    UdpError,
}

impl Op {
    /// All operations, in the order of their codes.
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

/// Actions of [`Op::PeerAction`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PeerAction {
    /// Answers SYN with SYN+ACK.
    AcceptSyn,
    /// Acknowledges everything that the stack sent.
    AckAll,
    /// Sends data.
    Data,
    /// Sends FIN and acknowledges everything.
    Fin,
    /// Sends RST at the expected sequence number.
    Reset,
    /// Answers SYN with SYN: simultaneous open.
    CrossingSyn,
    /// Acknowledges up to the last acknowledgement, with SACK blocks for some of the data in flight.
    SackHoles,
    /// Retransmits its last data.
    Retransmit,
    /// Advertises a zero window.
    CloseWindow,
    /// Advertises a non-zero window.
    OpenWindow,
}

impl PeerAction {
    /// All actions, in the order of their codes.
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

/// Options of SYN segments, as bits of an operand.
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
    /// The remote host is beyond the gateway.
    pub const REMOTE: u8 = 64;
    /// The options that most hosts send.
    pub const DEFAULT: u8 = MSS | WSCALE | SACK | TIMESTAMPS;
}

impl Word {
    fn op(op: Op) -> Self {
        Self { code: op as u8, ..Self::default() }
    }

    /// Returns the operation.
    pub fn operation(&self) -> Op {
        Op::ALL[usize::from(self.code) % Op::ALL.len()]
    }

    /// Encodes the word.
    pub fn encode(&self) -> [u8; WORD_BYTES] {
        let mut out = [0; WORD_BYTES];
        out[..4].copy_from_slice(&[self.code, self.a, self.b, self.c]);
        out[4..8].copy_from_slice(&self.x.to_le_bytes());
        out[8..12].copy_from_slice(&self.y.to_le_bytes());
        out[12..].copy_from_slice(&self.z.to_le_bytes());
        out
    }

    /// Decodes a word from up to 16 bytes; missing bytes are 0.
    pub fn decode(bytes: &[u8]) -> Self {
        let mut b = [0; WORD_BYTES];
        let n = bytes.len().min(WORD_BYTES);
        b[..n].copy_from_slice(&bytes[..n]);
        let long = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        Self { code: b[0], a: b[1], b: b[2], c: b[3], x: long(4), y: long(8), z: long(12) }
    }

    /// Sends a SYN to listener number `listener`, with bits of [`syn_options`]. `host` and `port` identify
    /// the remote end.
    pub fn open(listener: u8, options: u8, host: u8, port: u16, iss: u32) -> Self {
        Self { a: listener, b: options, c: host, x: iss, y: u32::from(port), z: 0xffff, ..Self::op(Op::Open) }
    }

    /// Sends a segment of remote end `peer`. `seq` is relative to the end's next sequence number, `ack` to
    /// the end of the data it has received. `bits` has bits of [`segment_bits`].
    pub fn segment(peer: u8, flags: TcpFlags, seq: i16, ack: i16, len: u16, bits: u8) -> Self {
        let x = (seq as u16 as u32) | (ack as u16 as u32) << 16;
        let y = u32::from(len) | 0xffff << 16;
        Self { a: peer, b: flags.0, c: bits, x, y, z: 0, ..Self::op(Op::Segment) }
    }

    /// Performs `action` of remote end `peer`; `amount` is a number of bytes where the action has one.
    pub fn peer_action(peer: u8, action: PeerAction, amount: u32) -> Self {
        Self { a: peer, b: action as u8, x: amount, ..Self::op(Op::PeerAction) }
    }

    /// Collects further frames.
    pub fn hold() -> Self {
        Self::op(Op::Hold)
    }

    /// Delivers the collected frames.
    pub fn release() -> Self {
        Self::op(Op::Release)
    }

    /// Advances time by `ms` milliseconds.
    pub fn milliseconds(ms: u32) -> Self {
        Self { a: 1, x: ms, ..Self::op(Op::Advance) }
    }

    /// Advances time to the next deadline, `count` times.
    pub fn deadlines(count: u32) -> Self {
        Self { a: 0, x: count, ..Self::op(Op::Advance) }
    }

    /// Opens a listener: `kind` 0 on all IPv4 addresses, 1 on all addresses of both families, 2 on all IPv6
    /// addresses, 3 on the IPv4 address, 4 on the IPv6 address.
    pub fn listen(kind: u8, port: u8, backlog: u8) -> Self {
        Self { a: kind, b: port, c: backlog, ..Self::op(Op::Listen) }
    }

    /// Closes a listener.
    pub fn unlisten(listener: u8) -> Self {
        Self { a: listener, ..Self::op(Op::Unlisten) }
    }

    /// Connects to a remote host; of `options`, [`syn_options::V6`] and [`syn_options::REMOTE`] apply.
    pub fn connect(options: u8, host: u8, port: u16) -> Self {
        Self { b: options, c: host, y: u32::from(port), ..Self::op(Op::Connect) }
    }

    /// Sets whether connections are accepted automatically.
    pub fn auto_accept(on: bool) -> Self {
        Self { a: 1 + u8::from(on), ..Self::op(Op::Accept) }
    }

    /// Accepts one connection.
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

    /// Performs an operation without further operands on a connection.
    pub fn on_conn(op: Op, conn: u8) -> Self {
        Self { a: conn, ..Self::op(op) }
    }

    /// Sets the option with this number in `tcp_option` (`fixture.rs`).
    pub fn set_option(conn: u8, option: u8, value: u32) -> Self {
        Self { a: conn, b: option, x: value, ..Self::op(Op::SetOption) }
    }

    /// Sets the share of in-burst data that is taken: 0 none, 1 half, 2 all. With `read_all`, buffered data
    /// are read when they are reported.
    pub fn read_policy(share: u8, read_all: bool) -> Self {
        Self { a: share, b: read_all.into(), ..Self::op(Op::ReadPolicy) }
    }

    /// Limits the device to `frames` frames per turn; 255 is unlimited.
    pub fn tx_capacity(frames: u8) -> Self {
        Self { a: frames, ..Self::op(Op::TxCapacity) }
    }

    /// Sends an ICMP error of kind `kind` about the last frame sent to `peer`.
    pub fn icmp_error(peer: u8, kind: u8, mtu: u16) -> Self {
        Self { a: peer, b: kind, x: mtu.into(), ..Self::op(Op::IcmpError) }
    }

    /// Fragments the next `count` packets into fragments of `size` bytes; `order` 0 in order, 1 reversed, 2
    /// without the last, 3 the first one twice, 4 overlapping, 5 only the last.
    pub fn fragment(count: u8, size: u16, order: u8) -> Self {
        Self { a: count, b: order, x: size.into(), ..Self::op(Op::Fragment) }
    }

    /// Sends ARP from a remote host: `kind` 0 request, 1 reply, 2 gratuitous with the stack's address.
    pub fn arp(kind: u8, host: u8) -> Self {
        Self { a: kind, c: host, ..Self::op(Op::Arp) }
    }

    /// Sends NDP from a remote host: `kind` 0 solicitation, 1 advertisement, 2 advertisement of the stack's
    /// address, 3 router advertisement.
    pub fn ndp(kind: u8, host: u8, value: u32) -> Self {
        Self { a: kind, c: host, x: value, ..Self::op(Op::Ndp) }
    }

    /// Sends an echo request: `kind` 0 over IPv4, 1 over IPv6. `kind` 2 sends an IGMP message, another even
    /// number a packet of that protocol, and another odd number a UDP packet.
    pub fn ping(kind: u8, len: u32) -> Self {
        Self { a: kind, x: len, ..Self::op(Op::Ping) }
    }

    /// Delivers an old frame again, number `age` from the end, with `changes` changed bytes; `fix` repairs
    /// its checksums.
    pub fn mutate(age: u8, changes: u8, fix: bool, seed: u32) -> Self {
        Self { a: age, b: changes, c: fix.into(), x: seed, ..Self::op(Op::Mutate) }
    }

    /// Delivers the next `words` words as a frame.
    pub fn raw(words: u8) -> Self {
        Self { a: words, ..Self::op(Op::Raw) }
    }

    /// Sets whether `peer` responds automatically.
    pub fn auto_respond(peer: u8, on: bool) -> Self {
        Self { a: peer, b: on.into(), ..Self::op(Op::AutoRespond) }
    }

    /// Opens a UDP socket: `kind` as in [`Word::listen`], and 5 for the broadcast address. `port` is a port
    /// number, or any port if its highest bit is set. Bits of `options`, from the lowest: reuse address,
    /// reuse port, broadcast, hop limit, GRO, errors of IPv4, errors of IPv6, another user.
    pub fn udp_bind(kind: u8, port: u8, options: u8) -> Self {
        Self { a: kind, b: port, c: options, ..Self::op(Op::UdpBind) }
    }

    /// Connects a UDP socket.
    pub fn udp_connect(socket: u8, options: u8, host: u8, port: u16) -> Self {
        Self { a: socket, b: options, c: host, y: port.into(), ..Self::op(Op::UdpConnect) }
    }

    /// Sends a datagram of `len` bytes; `options` has bits of [`udp_bits`](super::udp::udp_bits).
    pub fn udp_send(socket: u8, options: u8, host: u8, port: u16, len: u32) -> Self {
        Self { a: socket, b: options, c: host, x: len, y: port.into(), ..Self::op(Op::UdpSend) }
    }

    /// Reads a datagram into a buffer of `len` bytes.
    pub fn udp_recv(socket: u8, len: u32) -> Self {
        Self { a: socket, x: len, ..Self::op(Op::UdpRecv) }
    }

    /// Delivers a datagram of a remote host to port number `port`; `options` has bits of
    /// [`udp_bits`](super::udp::udp_bits).
    pub fn datagram(port: u8, options: u8, host: u8, from: u16, len: u32) -> Self {
        Self { a: port, b: options, c: host, x: len, y: from.into(), ..Self::op(Op::Datagram) }
    }

    /// Sends an ICMP error of kind `kind` about the last datagram sent.
    pub fn udp_error(kind: u8, mtu: u16) -> Self {
        Self { b: kind, x: mtu.into(), ..Self::op(Op::UdpError) }
    }

    /// Performs the next word `count` times more, 40 at most. Operand `b` of this word is added to operand
    /// `y` of the next one each time.
    pub fn repeat(count: u8) -> Self {
        Self { a: count, ..Self::op(Op::Repeat) }
    }
}

/// Bits of operand `c` of a segment.
pub mod segment_bits {
    /// Sequence and acknowledgement offsets are in units of 256 bytes.
    pub const SCALED_OFFSETS: u8 = 1;
    /// The sender's next sequence number advances past this segment.
    pub const ADVANCE_SEQ: u8 = 2;
    /// Omits negotiated timestamps.
    pub const NO_TIMESTAMP: u8 = 4;
    /// Sends an old timestamp.
    pub const OLD_TIMESTAMP: u8 = 8;
    /// Adds SACK blocks derived from operand z.
    pub const SACK: u8 = 16;
    /// Makes the checksum wrong.
    pub const BAD_CHECKSUM: u8 = 32;
    /// Sets CE in the IP header.
    pub const CE: u8 = 64;
    /// Appends option bytes derived from the operands; a SYN then lacks its usual options except timestamps.
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
        for (number, action) in PeerAction::ALL.iter().enumerate() {
            assert_eq!(*action as usize, number);
        }
    }
}
