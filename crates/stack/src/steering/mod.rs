//! Receive steering: which of several shards owns a received frame.
//!
//! The owner shard is a pure function of the frame's bytes and the UDP ports in use, so all shards compute
//! one owner. An adapter or a sender may have computed the flow hash already; then it is in the frame's
//! label and is not computed again. If that hash was wrong, a TCP segment is passed on to its owner when its
//! flow is not found. For a UDP datagram the hash only selects among sockets that share a port, so a wrong
//! hash is the sender's choice.
//!
//! | frame | owner |
//! |---|---|
//! | TCP, unfragmented | what the rules of the configuration say ([`policy`]); otherwise the Toeplitz hash of addresses and ports, modulo 128, modulo the number of shards |
//! | UDP, unfragmented | the shard whose socket is bound to the port ([`udp`]); without such a socket as for TCP |
//! | fragments | hash of the addresses; the fragments are reassembled there, and the packet is then passed to its own owner |
//! | ICMP errors | the owner of the quoted flow |
//! | ARP, neighbour and router discovery, IGMP, listener queries | the primary shard, which answers for all shards and passes on what they must learn |
//! | everything else (echo requests) | the shard that received the frame |
//!
//! If some devices are served by some of the shards only (`device_shards`), each device has its own number of
//! shards, its own primary one, and possibly its own indirection table. If devices steer by port mask
//! (`port_bits`), the low bits of the local port choose the shard of connections that the stack opens.

mod device_shards;
pub mod ephemeral_udp;
pub(crate) mod home_ports;
pub mod policy;
mod port_bits;
pub mod toeplitz;
pub mod udp;

use crate::device::{Label, RxFrame};
use crate::handle::PortId;
use crate::icmp::error::{TransportError, parse_quoted_packet};
use crate::ip::NetworkConfig;
use crate::wire::ethernet::EtherType;
use crate::wire::{icmpv4, icmpv6, ipv6, protocol};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::ops::RangeInclusive;
use device_shards::DeviceShards;
use ephemeral_udp::EphemeralUdpPorts;
use home_ports::HomePorts;
use policy::{PolicyState, SteeredFlow};
use port_bits::PortBits;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use toeplitz::Toeplitz;
use udp::{UdpOwner, UdpPortTable};

/// Largest number of shards of a stack.
pub const SHARDS_MAX: u8 = 64;
/// Entries of the indirection table that adapters usually have: the low bits of the hash select an entry, and
/// the entries are assigned to the queues in turn.
pub const INDIRECTION_ENTRIES: u32 = 128;
/// In a device's own indirection table: an entry whose frames no shard receives.
pub const NO_SHARD: u8 = u8::MAX;
/// Most entries of a device's own indirection table ([`Steering::set_device_table`]).
pub const INDIRECTION_ENTRIES_MAX: usize = 4096;

/// The owner of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FrameOwner {
    /// The shard with this number.
    Shard(u8),
    /// All shards: a datagram to a group that several of them have joined.
    All,
    /// The primary shard, which acts on the link for all shards.
    Primary {
        /// The shards that get a copy.
        broadcast: Broadcast,
    },
}

/// The shards that get a copy of a frame for the primary shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Broadcast {
    /// No other shard: they learn nothing from it.
    None,
    /// The shards that send on the device, which have its neighbours.
    Users,
    /// All shards: addresses and routes.
    All,
}

/// The steering of one shard.
pub struct Steering {
    shard: u8,
    shards: u8,
    toeplitz: Toeplitz,
    udp: Arc<UdpPortTable>,
    udp_port_first: u16,
    udp_port_last: u16,
    /// The ephemeral ports with a socket; `None` if a datagram to any of them belongs to the port's shard.
    ephemeral_udp: Option<Arc<EphemeralUdpPorts>>,
    /// The entries of the indirection table that belong to this shard; none if the hash alone does not decide
    /// (rules, port bits, shards of devices).
    home_entries: [bool; INDIRECTION_ENTRIES as usize],
    /// Local ports for connections of this shard.
    home_ports: HomePorts,
    /// Rules that come before the hash.
    policy: Option<Box<PolicyState>>,
    /// The shards of each device, if not all shards serve all devices.
    device_shards: Option<Box<DeviceShards>>,
    /// The ports whose low bits come before the hash.
    port_bits: Option<PortBits>,
}

impl Steering {
    /// Creates the steering of shard `shard` of `shards` (1 to [`SHARDS_MAX`]).
    ///
    /// # Panics
    /// If `shard` is not below `shards`, or there are more than [`SHARDS_MAX`].
    pub fn new(shard: u8, shards: u8, network: &NetworkConfig) -> Self {
        assert!(shard < shards && shards <= SHARDS_MAX, "shard {shard} of {shards}");
        let toeplitz = Toeplitz::new(&toeplitz::KEY);
        let home_entries = core::array::from_fn(|entry| entry % usize::from(shards) == usize::from(shard));
        Self {
            shard,
            shards,
            home_entries,
            home_ports: HomePorts::new(&home_entries, &toeplitz),
            toeplitz,
            udp: Arc::default(),
            udp_port_first: network.udp_port_first,
            udp_port_last: network.udp_port_last,
            ephemeral_udp: None,
            policy: None,
            device_shards: None,
            port_bits: None,
        }
    }

    /// Returns the number of this shard.
    pub fn shard(&self) -> u8 {
        self.shard
    }

    /// Returns whether this shard is not the primary one of a device.
    pub fn is_secondary(&self, port: PortId) -> bool {
        self.shard != self.primary(port)
    }

    /// Replaces the table of bound UDP ports.
    pub fn set_udp_ports(&mut self, table: Arc<UdpPortTable>) {
        self.udp = table;
    }

    /// Lets datagrams to ephemeral ports without a socket belong to the shard of their hash, as those to
    /// other closed ports do, instead of the port's shard.
    pub fn set_ephemeral_udp_ports(&mut self, ports: Arc<EphemeralUdpPorts>) {
        self.ephemeral_udp = Some(ports);
    }

    /// Returns the hash of a flow, given the source and destination of its received packets.
    #[inline]
    pub fn flow_hash(&self, src: SocketAddr, dst: SocketAddr) -> u32 {
        self.toeplitz.hash(src.ip(), dst.ip(), Some((src.port(), dst.port())))
    }

    /// Returns the owner of a TCP flow, given the source and destination of its received packets.
    #[inline]
    pub fn flow_owner(&self, src: SocketAddr, dst: SocketAddr) -> u8 {
        self.tcp_owner(src, dst, self.flow_hash(src, dst), None)
    }

    /// Returns the owner of a TCP flow whose hash is known.
    #[inline]
    fn tcp_owner(&self, src: SocketAddr, dst: SocketAddr, hash: u32, port: Option<PortId>) -> u8 {
        let by_port = match &self.port_bits {
            None => None,
            Some(bits) => self.shard_of_port_bits(bits, dst, port),
        };
        let owner = by_port.unwrap_or_else(|| self.shard_of_hash(hash, dst.ip(), port));
        match &self.policy {
            None => owner,
            Some(policy) => {
                let serving = self.device_shards.as_ref().map_or(u64::MAX, |served| served.serving(dst.ip()));
                policy.owner(SteeredFlow {
                    source: src,
                    destination: dst,
                    hash,
                    shards: self.shards,
                    serving,
                    shard: owner,
                })
            }
        }
    }

    /// Sets the rules that come before the hash. They do not apply to packets to `active_ports`, the local
    /// ports of connections that the stack opens: these ports are chosen so that packets arrive where the
    /// connection is.
    pub fn set_policy(&mut self, policy: Arc<dyn policy::SteeringPolicy>, active_ports: RangeInclusive<u16>) {
        self.policy = Some(Box::new(PolicyState::new(policy, active_ports)));
        self.home_entries = [false; INDIRECTION_ENTRIES as usize];
    }

    /// Returns how often a rule has chosen an owner, and how often a rule has named a shard that does not
    /// exist or does not serve the device of the connection.
    pub fn policy_counts(&self) -> (u64, u64) {
        self.policy.as_ref().map_or((0, 0), |policy| policy.counts())
    }

    /// Returns whether this shard owns packets from `remote` to `local`, so that a connection to `remote` may
    /// be opened here.
    pub(crate) fn owns_flow(&self, remote: SocketAddr, local: SocketAddr) -> bool {
        self.flow_owner(remote, local) == self.shard
    }

    /// Returns whether a UDP socket of this shard may use an ephemeral port. Each shard has a share of the
    /// ephemeral ports, so that the owner of a datagram follows from its port without coordination. Ports
    /// that are bound explicitly are excluded.
    pub(crate) fn may_choose_udp_port(&self, port: u16) -> bool {
        self.owner_of_ephemeral_port(port) == Some(self.shard) && !self.udp.has_port(port)
    }

    fn owner_of_ephemeral_port(&self, port: u16) -> Option<u8> {
        let chosen = (self.udp_port_first..=self.udp_port_last).contains(&port);
        // Cannot truncate: the remainder is below 64.
        chosen.then(|| ((port - self.udp_port_first) % u16::from(self.shards)) as u8)
    }

    /// Returns whether an ephemeral port may have a socket.
    fn may_have_socket(&self, port: u16) -> bool {
        self.ephemeral_udp.as_ref().is_none_or(|ports| ports.has_socket(port))
    }

    /// Returns the shard that the low bits of a local port name; `None` if the hash decides.
    fn shard_of_port_bits(&self, bits: &PortBits, local: SocketAddr, port: Option<PortId>) -> Option<u8> {
        let queues = self.device_shards.as_ref().and_then(|served| served.queues(local.ip(), port));
        match queues {
            None => bits.queue(local.port(), self.shards.into()).map(|queue| queue as u8),
            Some(shards) => shards.get(bits.queue(local.port(), shards.len())?).copied(),
        }
    }

    /// Returns the shard of a hash. `local` is the receiver of the packets, `port` the device that has
    /// received one of them, if it is known.
    fn shard_of_hash(&self, hash: u32, local: IpAddr, port: Option<PortId>) -> u8 {
        let served = self.device_shards.as_ref();
        served.and_then(|served| served.shard_of_hash(hash, local, port)).unwrap_or_else(|| {
            // Cannot truncate: the remainder is below 64.
            (hash % INDIRECTION_ENTRIES % u32::from(self.shards)) as u8
        })
    }

    /// Returns whether a frame is a plain TCP segment whose label has a hash that belongs to this shard, so
    /// that [`Steering::owner_of_frame`] would return this shard. False for frames that only the latter can
    /// judge: a few instructions for most frames of a device that steers by the hash.
    #[inline(always)]
    pub fn is_home_segment(&self, frame: &RxFrame<'_>) -> bool {
        let Some(header) = frame.bytes.first_chunk::<34>() else { return false };
        let Some(hash) = frame.label.hash() else { return false };
        let [.., e0, e1, version, _, _, _, _, _, f0, f1, _, protocol, _, _, _, _, _, _, _, _, _, _] = *header;
        // Two comparisons of words: EtherType, version and header length, then fragmentation and protocol.
        const IPV4: [u32; 2] = [u32::from_ne_bytes([0x08, 0, 0x45, 0]), u32::from_ne_bytes([0, 0, 0, 6])];
        let words = [[e0, e1, version, 0], [f0 & 0x3f, f1, 0, protocol]].map(u32::from_ne_bytes);
        let is_ipv6 =
            || (e0, e1, version >> 4, f0) == (0x86, 0xdd, 6, protocol::TCP) && frame.bytes.len() >= 54;
        (words == IPV4 || is_ipv6()) && self.home_entries[(hash % INDIRECTION_ENTRIES) as usize]
    }

    /// Returns the owner of a frame that the device `port` has received, Ethernet header included. A
    /// malformed frame stays with this shard, which counts it. The flow hash is taken from the frame's label
    /// if the label has one.
    #[inline]
    pub fn owner_of_frame(&self, port: PortId, frame: &RxFrame<'_>) -> FrameOwner {
        self.owner_with_hash(port, frame.bytes, frame.label.hash())
    }

    /// Returns the owner of a frame without a label that the device `port` has received.
    #[inline]
    pub fn owner_of_bytes(&self, port: PortId, frame: &[u8]) -> FrameOwner {
        self.owner_with_hash(port, frame, None)
    }

    #[inline]
    fn owner_with_hash(&self, port: PortId, frame: &[u8], hash: Option<u32>) -> FrameOwner {
        let this_shard = FrameOwner::Shard(self.shard);
        let Some(&[group, .., e0, e1]) = frame.first_chunk::<14>() else { return this_shard };
        let (mut ethertype, mut at) = (EtherType(u16::from_be_bytes([e0, e1])), 14);
        if ethertype == EtherType::VLAN {
            let Some(&[.., e0, e1]) = frame.first_chunk::<18>() else { return this_shard };
            (ethertype, at) = (EtherType(u16::from_be_bytes([e0, e1])), 18);
        }
        match ethertype {
            EtherType::ARP => FrameOwner::Primary { broadcast: Broadcast::Users },
            EtherType::IPV4 | EtherType::IPV6 => {
                self.owner_of_packet(port, &frame[at..], group & 1 != 0, hash)
            }
            _ => this_shard,
        }
    }

    /// Returns the owner of a packet, from its IP header on. `group` tells whether the frame has a group
    /// destination.
    pub(crate) fn owner_of_packet(
        &self,
        port: PortId,
        packet: &[u8],
        group: bool,
        hash: Option<u32>,
    ) -> FrameOwner {
        let owner = match packet.first().map(|byte| byte >> 4) {
            Some(4) => self.owner_v4(port, packet, group, hash),
            Some(6) => self.owner_v6(port, packet, group, hash),
            _ => None,
        };
        owner.unwrap_or(FrameOwner::Shard(self.shard))
    }

    fn owner_v4(&self, port: PortId, packet: &[u8], group: bool, hash: Option<u32>) -> Option<FrameOwner> {
        let header = packet.first_chunk::<20>()?;
        let [.., s0, s1, s2, s3, d0, d1, d2, d3] = *header;
        let (src, dst) = (Ipv4Addr::new(s0, s1, s2, s3).into(), Ipv4Addr::new(d0, d1, d2, d3));
        if u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0 {
            return Some(self.owner_of_fragment(port, src, dst.into()));
        }
        let transport = packet.get(usize::from(header[0] & 15) * 4..)?;
        match header[9] {
            protocol::ICMP => match *transport.first()? {
                // The owner verifies the checksum.
                icmpv4::UNREACHABLE | icmpv4::TIME_EXCEEDED | icmpv4::PARAMETER_PROBLEM => {
                    self.owner_of_quoted(port, transport.get(icmpv4::HEADER_LEN..)?)
                }
                _ => None,
            },
            // The other shards learn nothing from group management.
            protocol::IGMP => Some(FrameOwner::Primary { broadcast: Broadcast::None }),
            protocol => self.owner_of_transport(port, protocol, transport, [src, dst.into()], group, hash),
        }
    }

    fn owner_v6(&self, port: PortId, packet: &[u8], group: bool, hash: Option<u32>) -> Option<FrameOwner> {
        let header = ipv6::Header::parse(packet).ok()?;
        let (src, dst) = (header.src.into(), header.dst.into());
        let chain = ipv6::walk_header_chain(packet, &header).ok()?;
        if chain.fragment.is_some() {
            return Some(self.owner_of_fragment(port, src, dst));
        }
        let transport = packet.get(chain.offset..)?;
        if chain.protocol != protocol::ICMPV6 {
            return self.owner_of_transport(port, chain.protocol, transport, [src, dst], group, hash);
        }
        match transport.first()? {
            // Error messages.
            1..=4 => self.owner_of_quoted(port, transport.get(icmpv6::HEADER_LEN..)?),
            // The other shards learn nothing from listener discovery and router solicitations.
            130..=133 | 143 => Some(FrameOwner::Primary { broadcast: Broadcast::None }),
            134 => Some(FrameOwner::Primary { broadcast: Broadcast::All }),
            135..=137 => Some(FrameOwner::Primary { broadcast: Broadcast::Users }),
            _ => None,
        }
    }

    /// Returns the shard that reassembles the fragments of a packet: that of the hash of its addresses.
    fn owner_of_fragment(&self, port: PortId, src: IpAddr, dst: IpAddr) -> FrameOwner {
        FrameOwner::Shard(self.shard_of_hash(self.toeplitz.hash(src, dst, None), dst, Some(port)))
    }

    fn owner_of_transport(
        &self,
        port: PortId,
        protocol: u8,
        transport: &[u8],
        [src, dst]: [IpAddr; 2],
        group: bool,
        hash: Option<u32>,
    ) -> Option<FrameOwner> {
        let &[s0, s1, d0, d1] = transport.first_chunk()?;
        let src = SocketAddr::new(src, u16::from_be_bytes([s0, s1]));
        let dst = SocketAddr::new(dst, u16::from_be_bytes([d0, d1]));
        match protocol {
            protocol::TCP => {
                let hash = hash.unwrap_or_else(|| self.flow_hash(src, dst));
                Some(FrameOwner::Shard(self.tcp_owner(src, dst, hash, Some(port))))
            }
            protocol::UDP => Some(self.udp_owner(src, dst, group, hash, port)),
            _ => None,
        }
    }

    fn udp_owner(
        &self,
        src: SocketAddr,
        dst: SocketAddr,
        group: bool,
        label_hash: Option<u32>,
        port: PortId,
    ) -> FrameOwner {
        // The hash is masked as in a label, so that the same socket is selected with and without a label.
        let computed =
            || self.toeplitz.hash(src.ip(), dst.ip(), Some((src.port(), dst.port()))) & Label::HASH_MASK;
        let hash = || label_hash.unwrap_or_else(computed);
        let serving = self.device_shards.as_ref().map_or(u64::MAX, |served| served.serving(dst.ip()));
        match self.udp.owner(dst, src, group, serving, hash) {
            Some(UdpOwner::Shard(shard)) => FrameOwner::Shard(shard),
            Some(UdpOwner::All) => FrameOwner::All,
            None => FrameOwner::Shard(
                self.owner_of_ephemeral_port(dst.port())
                    .filter(|_| self.may_have_socket(dst.port()))
                    .unwrap_or_else(|| self.shard_of_hash(hash(), dst.ip(), Some(port))),
            ),
        }
    }

    /// Returns the shards that may have receivers of a datagram that this host sends to a group or broadcast
    /// address. Returns `None` if no socket has the port.
    pub(crate) fn group_owner(&self, src: SocketAddr, dst: SocketAddr) -> Option<FrameOwner> {
        // The hash distributes unicast datagrams only.
        match self.udp.owner(dst, src, true, u64::MAX, || 0) {
            Some(UdpOwner::Shard(shard)) => Some(FrameOwner::Shard(shard)),
            Some(UdpOwner::All) => Some(FrameOwner::All),
            None => self
                .owner_of_ephemeral_port(dst.port())
                .filter(|_| self.may_have_socket(dst.port()))
                .map(FrameOwner::Shard),
        }
    }

    /// Returns the owner of a transmitted packet that an error quotes: the owner of received packets of its
    /// flow. If the quoted sender is not this host, it is a shard of the device `port` that has received the
    /// error.
    fn owner_of_quoted(&self, port: PortId, quote: &[u8]) -> Option<FrameOwner> {
        let TransportError { protocol, local, remote, .. } = parse_quoted_packet(quote)?;
        match protocol {
            protocol::TCP => {
                let hash = self.flow_hash(remote, local);
                Some(FrameOwner::Shard(self.tcp_owner(remote, local, hash, Some(port))))
            }
            protocol::UDP => Some(self.udp_owner(remote, local, false, None, port)),
            _ => None,
        }
    }
}

/// A packet that one shard has reassembled, or looped back, and that another shard owns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MisroutedPacket {
    /// The owner.
    pub owner: FrameOwner,
    /// The device that received the fragments, or by which the packet was sent.
    pub port: PortId,
    /// The packet with an Ethernet header.
    pub frame: Vec<u8>,
}

/// An update that a shard broadcasts to the others, in addition to the frames from which neighbours and
/// routes are learnt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ControlUpdate {
    /// The primary shard has finished duplicate address detection for an IPv6 address (RFC 4862 §5.4).
    DadResult {
        /// The number of the link.
        link: u16,
        /// The address.
        address: Ipv6Addr,
        /// True if no other host has it.
        valid: bool,
    },
    /// A transport has accepted a smaller path MTU of a destination.
    PathMtu {
        /// The destination.
        destination: IpAddr,
        /// The MTU in bytes, as reported.
        mtu: u16,
    },
    /// A SYN+ACK has told something about a peer that matters for fast open (RFC 7413 §4.1.3).
    FastOpenPeer(FastOpenPeer),
}

/// Knowledge about a peer from one of its SYN+ACKs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FastOpenPeer {
    /// The address of this host.
    pub local: IpAddr,
    /// The address of the peer.
    pub remote: IpAddr,
    /// The MSS that the peer has announced; 0 if it announced none.
    pub mss: u16,
    /// The cookie, without its unused bytes at the end; empty if there was none.
    pub cookie: ([u8; 16], u8),
    /// True if the cookie came in the experimental option.
    pub is_experimental: bool,
    /// How often the peer has not answered a request for a cookie, as far as that decides about the form of
    /// the next request: 0 … 2.
    pub unanswered: u8,
}

impl FastOpenPeer {
    /// Returns the cookie; empty if there is none.
    pub fn cookie(&self) -> &[u8] {
        &self.cookie.0[..usize::from(self.cookie.1).min(16)]
    }
}

/// Returns an address as an IPv6 address.
fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

impl ControlUpdate {
    /// Length of an encoded update in bytes.
    pub const LEN: usize = 53;

    /// Encodes the update for a mailbox: kind, flag, a number, and two addresses and a cookie as far as the
    /// update has them.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let (kind, flag, number, address) = match *self {
            Self::DadResult { link, address, valid } => (0, u8::from(valid), link, address),
            Self::PathMtu { destination: IpAddr::V4(to), mtu } => (1, 4, mtu, to.to_ipv6_mapped()),
            Self::PathMtu { destination: IpAddr::V6(to), mtu } => (1, 6, mtu, to),
            Self::FastOpenPeer(peer) => {
                bytes[20..36].copy_from_slice(&mapped(peer.local).octets());
                bytes[36..52].copy_from_slice(&peer.cookie.0);
                bytes[52] = peer.cookie.1;
                let family = u8::from(peer.remote.is_ipv6());
                let flag = family | u8::from(peer.is_experimental) << 1 | peer.unanswered << 2;
                (2, flag, peer.mss, mapped(peer.remote))
            }
        };
        (bytes[0], bytes[1]) = (kind, flag);
        bytes[2..4].copy_from_slice(&number.to_be_bytes());
        bytes[4..20].copy_from_slice(&address.octets());
        bytes
    }

    /// Decodes an update; `None` for bytes that [`ControlUpdate::encode`] never produces.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let number = u16::from_be_bytes([bytes[2], bytes[3]]);
        let octets = |at: usize| core::array::from_fn::<u8, 16, _>(|i| bytes[at + i]);
        let address = Ipv6Addr::from_octets(octets(4));
        match (bytes[0], bytes[1]) {
            (0, valid @ 0..=1) => Some(Self::DadResult { link: number, address, valid: valid == 1 }),
            (1, 4) => Some(Self::PathMtu { destination: address.to_ipv4_mapped()?.into(), mtu: number }),
            (1, 6) => Some(Self::PathMtu { destination: address.into(), mtu: number }),
            (2, flag @ 0..12) if bytes[52] <= 16 => {
                let unmapped = |address: Ipv6Addr| match flag & 1 {
                    0 => address.to_ipv4_mapped().map(IpAddr::V4),
                    _ => Some(address.into()),
                };
                Some(Self::FastOpenPeer(FastOpenPeer {
                    local: unmapped(Ipv6Addr::from_octets(octets(20)))?,
                    remote: unmapped(address)?,
                    mss: number,
                    cookie: (octets(36), bytes[52]),
                    is_experimental: flag & 2 != 0,
                    unanswered: flag >> 2,
                }))
            }
            _ => None,
        }
    }

    /// Returns whether `later` replaces this update, so that only `later` needs to be broadcast.
    pub fn is_superseded_by(&self, later: &Self) -> bool {
        match (self, later) {
            (Self::DadResult { link, address, .. }, Self::DadResult { link: l, address: a, .. }) => {
                link == l && address == a
            }
            (Self::PathMtu { destination, .. }, Self::PathMtu { destination: d, .. }) => destination == d,
            (Self::FastOpenPeer(peer), Self::FastOpenPeer(p)) => {
                let has_mss = p.mss != 0 || peer.mss == 0;
                // With a cookie it does not matter how often the peer has not answered.
                let has_cookie = p.cookie.1 > 0 || peer.cookie.1 == 0 && p.unanswered >= peer.unanswered;
                (peer.local, peer.remote) == (p.local, p.remote) && has_mss && has_cookie
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests;
