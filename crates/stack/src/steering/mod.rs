//! Several shards on one device: to which of them a frame belongs.
//!
//! Pure functions of the frame's bytes, so that whichever shard receives a frame says the same, and so does an adapter that hashes, or a sender (what it has
//! computed stands in the frame's label; if that says that the frame may stay, nothing is computed again, and if it was wrong, the frame of a TCP flow goes home when the flow is
//! not found. Of a datagram it says only which of several sockets that share a port gets it, which is then the sender's choice):
//!
//! | what | its home |
//! |---|---|
//! | TCP, in one piece | the Toeplitz hash of addresses and ports, modulo 128, modulo the number of shards |
//! | UDP, in one piece | the shard whose socket is bound to the port ([`udp`]); if nobody's is, as TCP |
//! | fragments | the hash of the addresses; there they are put together, and what comes of them goes to its own home |
//! | ICMP errors | the home of the flow that they quote |
//! | ARP, neighbour and router discovery, listener queries | the first shard, which answers for all and tells the others what they teach |
//! | everything else (echo requests) | where it arrived |

pub mod toeplitz;
pub mod udp;

use crate::device::{Label, RxFrame};
use crate::handle::PortId;
use crate::icmp::error::{TransportError, parse_quoted_packet};
use crate::ip::NetworkConfig;
use crate::wire::ethernet::EtherType;
use crate::wire::{icmpv4, icmpv6, ipv6, protocol};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use toeplitz::Toeplitz;
use udp::{UdpOwner, UdpPortTable};

/// Most shards of one stack.
pub const SHARDS_MAX: u8 = 64;
/// Entries of the indirection table of usual adapters: the hash's low bits choose one, and they are dealt out to the queues in turn.
const INDIRECTION_ENTRIES: u32 = 128;

/// Where a frame belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameOwner {
    /// To this shard.
    Shard(u8),
    /// To each of them: a datagram for a group that several have joined.
    All,
    /// To the first shard, which speaks for all of them on the link.
    Primary {
        /// The others are to learn what it says.
        broadcast: bool,
    },
}

/// A shard's view of who has what.
pub struct Steering {
    shard: u8,
    shards: u8,
    toeplitz: Toeplitz,
    udp: Arc<UdpPortTable>,
    udp_port_first: u16,
    udp_port_last: u16,
}

impl Steering {
    /// For shard `me` of `count` (1 to [`SHARDS_MAX`]).
    ///
    /// # Panics
    /// If there is no such shard.
    pub fn new(shard: u8, shards: u8, network: &NetworkConfig) -> Self {
        assert!(shard < shards && shards <= SHARDS_MAX, "shard {shard} of {shards}");
        Self {
            shard,
            shards,
            toeplitz: Toeplitz::new(&toeplitz::KEY),
            udp: Arc::default(),
            udp_port_first: network.udp_port_first,
            udp_port_last: network.udp_port_last,
        }
    }

    /// Which shard this is.
    pub fn shard(&self) -> u8 {
        self.shard
    }

    /// True for every shard but the first.
    pub fn is_secondary(&self) -> bool {
        self.shard != 0
    }

    /// Takes over who has which UDP port.
    pub fn set_udp_ports(&mut self, homes: Arc<UdpPortTable>) {
        self.udp = homes;
    }

    /// The shard of a TCP flow, by what its received packets say.
    #[inline]
    pub fn flow_owner(&self, src: SocketAddr, dst: SocketAddr) -> u8 {
        self.shard_of_hash(self.toeplitz.hash(src.ip(), dst.ip(), Some((src.port(), dst.port()))))
    }

    /// True if packets from `remote` to `local` come home to this shard: a connection from there may be opened here.
    pub(crate) fn owns_flow(&self, remote: SocketAddr, local: SocketAddr) -> bool {
        self.flow_owner(remote, local) == self.shard
    }

    /// True if a UDP socket of this shard may choose the port: each shard has its part of them, so that a datagram's home follows from the port
    /// without asking anybody, and nobody has bound it by name.
    pub(crate) fn may_choose_udp_port(&self, port: u16) -> bool {
        self.owner_of_ephemeral_port(port) == Some(self.shard) && !self.udp.has_port(port)
    }

    fn owner_of_ephemeral_port(&self, port: u16) -> Option<u8> {
        let chosen = (self.udp_port_first..=self.udp_port_last).contains(&port);
        // Cannot truncate: the remainder is below 64.
        chosen.then(|| ((port - self.udp_port_first) % u16::from(self.shards)) as u8)
    }

    fn shard_of_hash(&self, hash: u32) -> u8 {
        // Cannot truncate: the remainder is below 64.
        (hash % INDIRECTION_ENTRIES % u32::from(self.shards)) as u8
    }

    /// The home of a received frame, Ethernet header included. What is malformed stays where it is: somebody has to count it. If its label says the hash of its
    /// flow, that is not computed again.
    #[inline]
    pub fn owner_of_frame(&self, frame: &RxFrame<'_>) -> FrameOwner {
        self.owner_with_hash(frame.bytes, frame.label.hash())
    }

    /// The home of a frame of which nothing else is known.
    #[inline]
    pub fn owner_of_bytes(&self, frame: &[u8]) -> FrameOwner {
        self.owner_with_hash(frame, None)
    }

    #[inline]
    fn owner_with_hash(&self, frame: &[u8], hash: Option<u32>) -> FrameOwner {
        let here = FrameOwner::Shard(self.shard);
        let Some(&[group, .., e0, e1]) = frame.first_chunk::<14>() else { return here };
        let (mut ethertype, mut at) = (EtherType(u16::from_be_bytes([e0, e1])), 14);
        if ethertype == EtherType::VLAN {
            let Some(&[.., e0, e1]) = frame.first_chunk::<18>() else { return here };
            (ethertype, at) = (EtherType(u16::from_be_bytes([e0, e1])), 18);
        }
        match ethertype {
            EtherType::ARP => FrameOwner::Primary { broadcast: true },
            EtherType::IPV4 | EtherType::IPV6 => self.owner_of_packet(&frame[at..], group & 1 != 0, hash),
            _ => here,
        }
    }

    /// The same for a packet, from its IP header on. `group`: it is meant for more than one host.
    pub(crate) fn owner_of_packet(&self, packet: &[u8], group: bool, hash: Option<u32>) -> FrameOwner {
        let home = match packet.first().map(|byte| byte >> 4) {
            Some(4) => self.owner_v4(packet, group, hash),
            Some(6) => self.owner_v6(packet, group, hash),
            _ => None,
        };
        home.unwrap_or(FrameOwner::Shard(self.shard))
    }

    fn owner_v4(&self, packet: &[u8], group: bool, hash: Option<u32>) -> Option<FrameOwner> {
        let header = packet.first_chunk::<20>()?;
        let [.., s0, s1, s2, s3, d0, d1, d2, d3] = *header;
        let (src, dst) = (Ipv4Addr::new(s0, s1, s2, s3).into(), Ipv4Addr::new(d0, d1, d2, d3));
        if u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0 {
            return Some(FrameOwner::Shard(self.shard_of_hash(self.toeplitz.hash(src, dst.into(), None))));
        }
        let transport = packet.get(usize::from(header[0] & 15) * 4..)?;
        match header[9] {
            protocol::ICMP => match *transport.first()? {
                // The checksum is the home's business.
                icmpv4::UNREACHABLE | icmpv4::TIME_EXCEEDED | icmpv4::PARAMETER_PROBLEM => {
                    self.owner_of_quoted(transport.get(icmpv4::HEADER_LEN..)?)
                }
                _ => None,
            },
            protocol => self.owner_of_transport((protocol, transport), src, dst.into(), group, hash),
        }
    }

    fn owner_v6(&self, packet: &[u8], group: bool, hash: Option<u32>) -> Option<FrameOwner> {
        let header = ipv6::Header::parse(packet).ok()?;
        let (src, dst) = (header.src.into(), header.dst.into());
        let chain = ipv6::walk_header_chain(packet, &header).ok()?;
        if chain.fragment.is_some() {
            return Some(FrameOwner::Shard(self.shard_of_hash(self.toeplitz.hash(src, dst, None))));
        }
        let transport = packet.get(chain.offset..)?;
        if chain.protocol != protocol::ICMPV6 {
            return self.owner_of_transport((chain.protocol, transport), src, dst, group, hash);
        }
        match transport.first()? {
            // Errors.
            1..=4 => self.owner_of_quoted(transport.get(icmpv6::HEADER_LEN..)?),
            // Listener discovery and questions for routers teach nothing.
            130..=133 | 143 => Some(FrameOwner::Primary { broadcast: false }),
            134..=137 => Some(FrameOwner::Primary { broadcast: true }),
            _ => None,
        }
    }

    fn owner_of_transport(
        &self,
        (protocol, transport): (u8, &[u8]),
        src: IpAddr,
        dst: IpAddr,
        group: bool,
        hash: Option<u32>,
    ) -> Option<FrameOwner> {
        let &[s0, s1, d0, d1] = transport.first_chunk()?;
        let src = SocketAddr::new(src, u16::from_be_bytes([s0, s1]));
        let dst = SocketAddr::new(dst, u16::from_be_bytes([d0, d1]));
        match protocol {
            protocol::TCP => Some(FrameOwner::Shard(
                hash.map_or_else(|| self.flow_owner(src, dst), |hash| self.shard_of_hash(hash)),
            )),
            protocol::UDP => Some(self.udp_owner(src, dst, group, hash)),
            _ => None,
        }
    }

    fn udp_owner(&self, src: SocketAddr, dst: SocketAddr, group: bool, known: Option<u32>) -> FrameOwner {
        // As much of it as a label says, so that the same socket is chosen with a label and without.
        let computed =
            || self.toeplitz.hash(src.ip(), dst.ip(), Some((src.port(), dst.port()))) & Label::HASH_MASK;
        let hash = || known.unwrap_or_else(computed);
        match self.udp.owner(dst, src, group, hash) {
            Some(UdpOwner::Shard(shard)) => FrameOwner::Shard(shard),
            Some(UdpOwner::All) => FrameOwner::All,
            None => FrameOwner::Shard(
                self.owner_of_ephemeral_port(dst.port()).unwrap_or_else(|| self.shard_of_hash(hash())),
            ),
        }
    }

    /// The home of a packet of ours that an error quotes: where packets of its flow come in.
    fn owner_of_quoted(&self, quote: &[u8]) -> Option<FrameOwner> {
        let TransportError { protocol, local, remote, .. } = parse_quoted_packet(quote)?;
        match protocol {
            protocol::TCP => Some(FrameOwner::Shard(self.flow_owner(remote, local))),
            protocol::UDP => Some(self.udp_owner(remote, local, false, None)),
            _ => None,
        }
    }
}

/// A packet that one shard has put together from fragments and that belongs to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MisroutedPacket {
    /// Where it belongs.
    pub owner: FrameOwner,
    /// The device that the fragments came from.
    pub port: PortId,
    /// The packet with an Ethernet header.
    pub frame: Vec<u8>,
}

/// What a shard tells all others, beside the frames that teach neighbours and routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlUpdate {
    /// The first shard has found out whether an IPv6 address may be used (RFC 4862 §5.4).
    DadResult {
        /// The number of its link.
        link: u16,
        /// The address.
        address: Ipv6Addr,
        /// Nobody else has it.
        valid: bool,
    },
    /// A connection has learnt that the way to a destination takes no larger packets.
    PathMtu {
        /// The destination.
        destination: IpAddr,
        /// Bytes of the largest packet, as reported.
        mtu: u16,
    },
}

impl ControlUpdate {
    /// Bytes of encoded news.
    pub const LEN: usize = 20;

    /// As bytes, for a mailbox: kind, flag, a number, and an address.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let (kind, flag, number, address) = match *self {
            Self::DadResult { link, address, valid } => (0, u8::from(valid), link, address),
            Self::PathMtu { destination: IpAddr::V4(to), mtu } => (1, 4, mtu, to.to_ipv6_mapped()),
            Self::PathMtu { destination: IpAddr::V6(to), mtu } => (1, 6, mtu, to),
        };
        let mut bytes = [0; Self::LEN];
        (bytes[0], bytes[1]) = (kind, flag);
        bytes[2..4].copy_from_slice(&number.to_be_bytes());
        bytes[4..].copy_from_slice(&address.octets());
        bytes
    }

    /// The reverse of [`News::encode`]; `None` for what it never makes.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let number = u16::from_be_bytes([bytes[2], bytes[3]]);
        let mut octets = [0; 16];
        octets.copy_from_slice(&bytes[4..]);
        let address = Ipv6Addr::from_octets(octets);
        match (bytes[0], bytes[1]) {
            (0, valid @ 0..=1) => Some(Self::DadResult { link: number, address, valid: valid == 1 }),
            (1, 4) => Some(Self::PathMtu { destination: address.to_ipv4_mapped()?.into(), mtu: number }),
            (1, 6) => Some(Self::PathMtu { destination: address.into(), mtu: number }),
            _ => None,
        }
    }

    /// True if `later` says all that this says, so that only it need be told.
    pub fn is_superseded_by(&self, later: &Self) -> bool {
        match (self, later) {
            (Self::DadResult { link, address, .. }, Self::DadResult { link: l, address: a, .. }) => {
                link == l && address == a
            }
            (Self::PathMtu { destination, .. }, Self::PathMtu { destination: d, .. }) => destination == d,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
