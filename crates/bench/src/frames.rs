//! Prepared frames of the client and of the sink. Sending one takes a copy, a few patched fields and two
//! short checksums.

use ginnel_stack::device::TxMeta;

const IP_AT: usize = 14;
const TCP_AT: usize = IP_AT + 20;
/// Offset of the checksum in the TCP header.
const CHECKSUM_IN_TCP: usize = 16;

/// TCP flag: no more data from the sender.
pub const FIN: u8 = 1;
/// TCP flag: synchronize sequence numbers.
pub const SYN: u8 = 2;
/// TCP flag: reset.
pub const RST: u8 = 4;
/// TCP flag: push.
pub const PSH: u8 = 8;
/// TCP flag: the acknowledgement number is valid.
pub const ACK: u8 = 16;

/// Address and port of one end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// IPv4 address.
    pub ip: u32,
    /// Port.
    pub port: u16,
}

/// Addresses that all frames of a client share.
#[derive(Clone, Copy, Debug)]
pub struct LinkSetup {
    /// The client's MAC address.
    pub client_mac: [u8; 6],
    /// The server's MAC address.
    pub server_mac: [u8; 6],
    /// The server's address and port.
    pub server: Endpoint,
    /// True if the device computes TCP checksums.
    pub offload: bool,
}

/// Direction of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

/// A frame in which only the client's address, its port and the sequence numbers are missing.
#[derive(Clone, Debug)]
pub struct FrameTemplate {
    bytes: Vec<u8>,
    /// Checksum of the IP header without the client's address.
    ip_sum: u32,
    /// Checksum of pseudo-header and segment without the client's address and port and sequence numbers; of
    /// the pseudo-header alone if the device computes the checksum.
    tcp_sum: u32,
    offload: bool,
    /// Places of the client's address and port.
    address_at: usize,
    port_at: usize,
}

fn sum(bytes: &[u8]) -> u32 {
    let words = bytes.chunks(2).map(|c| u32::from(c[0]) << 8 | u32::from(*c.get(1).unwrap_or(&0)));
    words.sum()
}

fn fold(mut sum: u32) -> u16 {
    sum = (sum >> 16) + (sum & 0xffff);
    sum = (sum >> 16) + (sum & 0xffff);
    sum as u16
}

fn sum_of_halves(word: u32) -> u32 {
    (word >> 16) + (word & 0xffff)
}

impl FrameTemplate {
    /// Creates a frame of the client with these flags, TCP options (a multiple of four bytes) and payload.
    pub fn new(wire: &LinkSetup, flags: u8, options: &[u8], payload: &[u8]) -> Self {
        Self::with_direction(Direction::ToServer, wire, flags, options, payload)
    }

    /// Creates a frame of either end.
    pub fn with_direction(
        direction: Direction,
        wire: &LinkSetup,
        flags: u8,
        options: &[u8],
        payload: &[u8],
    ) -> Self {
        let to_server = direction == Direction::ToServer;
        let (from, to) =
            if to_server { (wire.client_mac, wire.server_mac) } else { (wire.server_mac, wire.client_mac) };
        let own = wire.server.ip.to_be_bytes();
        let port = wire.server.port.to_be_bytes();
        let (addresses, ports) = match direction {
            Direction::ToServer => ([[0; 4], own], [[0; 2], port]),
            Direction::ToClient => ([own, [0; 4]], [port, [0; 2]]),
        };
        let tcp_len = 20 + options.len() + payload.len();
        let mut bytes = Vec::with_capacity(TCP_AT + tcp_len);
        bytes.extend_from_slice(&to);
        bytes.extend_from_slice(&from);
        bytes.extend_from_slice(&[0x08, 0x00]);
        // Version and length, TOS, total length, identification, don't fragment, TTL, protocol, checksum.
        bytes.extend_from_slice(&[0x45, 0]);
        bytes.extend_from_slice(&((20 + tcp_len) as u16).to_be_bytes());
        bytes.extend_from_slice(&[0, 0, 0x40, 0, 64, 6, 0, 0]);
        bytes.extend_from_slice(&addresses.concat());
        bytes.extend_from_slice(&ports.concat());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(&[((20 + options.len()) << 2) as u8, flags, 0xff, 0xff, 0, 0, 0, 0]);
        bytes.extend_from_slice(options);
        bytes.extend_from_slice(payload);
        let pseudo = sum_of_halves(wire.server.ip) + 6 + tcp_len as u32;
        let segment = if wire.offload { 0 } else { sum(&bytes[TCP_AT..]) };
        Self {
            ip_sum: sum(&bytes[IP_AT..TCP_AT]),
            tcp_sum: u32::from(fold(pseudo)) + u32::from(fold(segment)),
            bytes,
            offload: wire.offload,
            address_at: IP_AT + if to_server { 12 } else { 16 },
            port_at: TCP_AT + if to_server { 0 } else { 2 },
        }
    }

    /// Returns the length of the frame in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the length of the payload in bytes.
    pub fn payload_len(&self) -> u32 {
        let options = usize::from(self.bytes[TCP_AT + 12] >> 4) * 4;
        (self.bytes.len() - TCP_AT - options) as u32
    }

    /// Writes the frame to or from this client to `out`, whose length must be [`Self::len`].
    #[inline]
    pub fn write(&self, out: &mut [u8], client: Endpoint, seq: u32, ack: u32) {
        out.copy_from_slice(&self.bytes);
        let mut put16 = |at: usize, value: u16| out[at..at + 2].copy_from_slice(&value.to_be_bytes());
        let ip_sum = self.ip_sum + sum_of_halves(client.ip);
        put16(IP_AT + 10, !fold(ip_sum));
        put16(self.port_at, client.port);
        if self.offload {
            put16(TCP_AT + CHECKSUM_IN_TCP, fold(self.tcp_sum + sum_of_halves(client.ip)));
        } else {
            let tcp_sum = self.tcp_sum
                + sum_of_halves(client.ip)
                + u32::from(client.port)
                + sum_of_halves(seq)
                + sum_of_halves(ack);
            put16(TCP_AT + CHECKSUM_IN_TCP, !fold(tcp_sum));
        }
        out[self.address_at..self.address_at + 4].copy_from_slice(&client.ip.to_be_bytes());
        out[TCP_AT + 4..TCP_AT + 8].copy_from_slice(&seq.to_be_bytes());
        out[TCP_AT + 8..TCP_AT + 12].copy_from_slice(&ack.to_be_bytes());
    }

    /// Returns the offload request for the device.
    pub fn meta(&self) -> TxMeta {
        tx_meta(self.offload)
    }
}

/// Returns the offload request for a TCP frame over IPv4 without IP options.
pub fn tx_meta(offload: bool) -> TxMeta {
    let partial_checksum = offload.then_some((TCP_AT as u16, CHECKSUM_IN_TCP as u16));
    TxMeta { partial_checksum, ..TxMeta::NONE }
}

/// A received TCP segment.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Source.
    pub from: Endpoint,
    /// Destination.
    pub to: Endpoint,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
    /// Flags.
    pub flags: u8,
    /// Payload.
    pub payload: &'a [u8],
}

impl<'a> Segment<'a> {
    /// Parses a TCP segment over IPv4 without IP options. Returns `None` for any other frame.
    #[inline]
    pub fn parse(frame: &'a [u8]) -> Option<Self> {
        let head: &[u8; TCP_AT + 20] = frame.first_chunk()?;
        if head[12..15] != [0x08, 0x00, 0x45] || head[IP_AT + 9] != 6 {
            return None;
        }
        let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let half = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let payload_at = TCP_AT + usize::from(head[TCP_AT + 12] >> 4) * 4;
        Some(Self {
            from: Endpoint { ip: word(IP_AT + 12), port: half(TCP_AT) },
            to: Endpoint { ip: word(IP_AT + 16), port: half(TCP_AT + 2) },
            seq: word(TCP_AT + 4),
            ack: word(TCP_AT + 8),
            flags: head[TCP_AT + 13],
            // The length of a GSO frame does not fit into the field of the IP header, and memory devices add
            // no padding.
            payload: frame.get(payload_at..)?,
        })
    }
}

/// Returns the reply to an ARP request for any address: the replying end stands for all hosts.
pub fn arp_reply(frame: &[u8], mac: [u8; 6]) -> Option<[u8; 42]> {
    let request: &[u8; 42] = frame.first_chunk()?;
    if request[12..22] != [0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1] {
        return None;
    }
    let mut reply = *request;
    reply[..6].copy_from_slice(&request[6..12]);
    reply[6..12].copy_from_slice(&mac);
    reply[21] = 2;
    reply[22..28].copy_from_slice(&mac);
    reply[28..32].copy_from_slice(&request[38..42]);
    reply[32..42].copy_from_slice(&request[22..32]);
    Some(reply)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_stack::wire::checksum;
    use std::net::Ipv4Addr;

    const SERVER: Endpoint = Endpoint { ip: 0x0aff_0001, port: 80 };
    const FROM: Endpoint = Endpoint { ip: 0x0a01_f00f, port: 40_000 };

    fn wire(offload: bool) -> LinkSetup {
        LinkSetup { client_mac: [2, 0, 0, 0, 0, 2], server_mac: [2, 0, 0, 0, 0, 1], server: SERVER, offload }
    }

    fn pseudo(len: usize) -> checksum::Sum {
        checksum::pseudo_v4(Ipv4Addr::from_bits(FROM.ip), Ipv4Addr::from_bits(SERVER.ip), 6, len)
    }

    #[test]
    fn checksums_are_right_for_any_numbers() {
        for (payload, seq, ack) in
            [(&b""[..], 0, 0), (b"odd", u32::MAX, 0x8000_ffff), (b"GET / HTTP/1.1\r\n\r\n", 7, u32::MAX)]
        {
            let template = FrameTemplate::new(&wire(false), PSH | ACK, &[1, 1, 1, 1], payload);
            let mut frame = vec![0xa5; template.len()];
            template.write(&mut frame, FROM, seq, ack);
            assert_eq!(checksum::Sum::of(&frame[IP_AT..TCP_AT]).finish(), 0);
            let segment = &frame[TCP_AT..];
            assert_eq!(pseudo(segment.len()).add(checksum::Sum::of(segment)).finish(), 0);
            assert_eq!(template.payload_len() as usize, payload.len());
        }
    }

    #[test]
    fn frames_of_the_server_have_the_other_direction() {
        let template = FrameTemplate::with_direction(Direction::ToClient, &wire(false), ACK, &[], b"payload");
        let mut frame = vec![0; template.len()];
        template.write(&mut frame, FROM, 5, 6);
        assert_eq!(frame[..12], [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1]);
        let segment = Segment::parse(&frame).unwrap();
        assert_eq!((segment.from, segment.to), (SERVER, FROM));
        assert_eq!(checksum::Sum::of(&frame[IP_AT..TCP_AT]).finish(), 0);
        let segment = &frame[TCP_AT..];
        assert_eq!(pseudo(segment.len()).add(checksum::Sum::of(segment)).finish(), 0);
    }

    #[test]
    fn an_offloaded_checksum_covers_the_pseudo_header() {
        let template = FrameTemplate::new(&wire(true), SYN, &[2, 4, 5, 0xb4], b"");
        let mut frame = vec![0; template.len()];
        template.write(&mut frame, FROM, 1, 2);
        let field = u16::from_be_bytes([frame[50], frame[51]]);
        assert_eq!(field, pseudo(24).fold());
    }

    #[test]
    fn written_frames_are_parsed() {
        let template = FrameTemplate::new(&wire(false), FIN | ACK, &[], b"payload");
        let mut frame = vec![0; template.len()];
        template.write(&mut frame, FROM, 5, 6);
        let segment = Segment::parse(&frame).unwrap();
        assert_eq!((segment.seq, segment.ack, segment.flags), (5, 6, FIN | ACK));
        assert_eq!((segment.from, segment.to, segment.payload), (FROM, SERVER, &b"payload"[..]));
        for short in 0..54 {
            assert!(Segment::parse(&frame[..short]).is_none());
        }
    }

    #[test]
    fn an_arp_request_is_answered() {
        let mut request = [0u8; 42];
        request[..22]
            .copy_from_slice(&[255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 1, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        request[22..32].copy_from_slice(&[2, 0, 0, 0, 0, 1, 192, 0, 2, 1]);
        request[38..42].copy_from_slice(&[192, 0, 2, 2]);
        let reply = arp_reply(&request, [2, 0, 0, 0, 0, 9]).unwrap();
        assert_eq!(reply[..12], [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 9]);
        assert_eq!(reply[21..], [2, 2, 0, 0, 0, 0, 9, 192, 0, 2, 2, 2, 0, 0, 0, 0, 1, 192, 0, 2, 1]);
        assert!(arp_reply(&reply, [2, 0, 0, 0, 0, 9]).is_none(), "an answer needs no answer");
    }
}
