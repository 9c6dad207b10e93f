//! Flows, and the cache of what the rules say about them.

use crate::packet::IpVersion;
use core::net::IpAddr;

/// The fields that the packets of a flow share: addresses, ports, protocol, type of service and VLAN tag.
/// Only packets with headers of the usual shape belong to a flow: see [`crate::Packet::flow_key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlowKey([u64; 6]);

impl FlowKey {
    /// Equals the key of no flow.
    const NONE: Self = Self([0; 6]);

    /// Creates a key. `tag` is the VLAN tag with its EtherType, or 0.
    pub(crate) fn new(
        version: IpVersion,
        (source, destination): (IpAddr, IpAddr),
        ports: (u16, u16),
        (protocol, traffic_class): (u8, u8),
        tag: u32,
    ) -> Self {
        let halves = |address: IpAddr| match address {
            IpAddr::V4(v4) => (0, u64::from(v4.to_bits())),
            // The halves of an address.
            IpAddr::V6(v6) => ((v6.to_bits() >> 64) as u64, v6.to_bits() as u64),
        };
        let (source, destination) = (halves(source), halves(destination));
        let version = match version {
            IpVersion::Four => 4,
            IpVersion::Six => 6,
        };
        let ports = u64::from(ports.0) << 16 | u64::from(ports.1);
        Self([
            source.0,
            source.1,
            destination.0,
            destination.1,
            ports << 32 | u64::from(tag),
            version << 16 | u64::from(protocol) << 8 | u64::from(traffic_class),
        ])
    }

    fn hash(&self) -> u64 {
        self.0
            .iter()
            .fold(0, |hash: u64, word| (hash.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95))
    }
}

/// The shape of the headers of a flow's packets: Ethernet, perhaps a VLAN tag, IPv4 without options or IPv6
/// without extension headers, and the ports of TCP or UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlowShape {
    pub(crate) version: IpVersion,
    /// Start of the IP header.
    pub(crate) ip_at: usize,
}

impl FlowShape {
    /// Bytes that every packet of the flow has.
    pub(crate) fn common_len(self) -> usize {
        let header_len = match self.version {
            IpVersion::Four => 20,
            IpVersion::Six => 40,
        };
        self.ip_at + header_len + 4
    }

    /// Returns the bits of the byte at `at` in which packets of the flow may differ.
    pub(crate) fn differing_bits(self, at: usize) -> u8 {
        if at < self.ip_at {
            // EtherTypes and VLAN tag are equal, MAC addresses need not be.
            return if at < 12 { 0xff } else { 0 };
        }
        match (self.version, at - self.ip_at) {
            // Version and header length, type of service, protocol, addresses, ports.
            (IpVersion::Four, 0 | 1 | 9 | 12..24) => 0,
            // "Don't fragment", and a reserved bit. The packet is no fragment.
            (IpVersion::Four, 6) => 0xc0,
            (IpVersion::Four, 7) => 0,
            // Version and traffic class, next header, addresses, ports.
            (IpVersion::Six, 0 | 6 | 8..44) => 0,
            // The flow label.
            (IpVersion::Six, 1) => 0x0f,
            _ => 0xff,
        }
    }
}

/// The result of the rules for a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlowVerdicts {
    /// Rules whose match depends on the packet, a bit for each. They come before `certain`.
    pub(crate) depending: u64,
    /// The first rule that matches all packets of the flow.
    pub(crate) certain: Option<u8>,
}

/// A direct-mapped cache: flows whose hashes select the same entry replace each other.
#[derive(Debug)]
pub(crate) struct FlowCache {
    entries: Box<[(FlowKey, FlowVerdicts)]>,
    /// Bits of a hash that are not used.
    shift: u32,
    /// Flows that were replaced.
    pub(crate) replaced: u64,
}

impl FlowCache {
    /// Creates a cache with this number of entries, rounded up to a power of two. `entries` is at least 2.
    pub(crate) fn new(entries: usize) -> Self {
        let entries = entries.next_power_of_two();
        let empty = (FlowKey::NONE, FlowVerdicts { depending: 0, certain: None });
        Self { entries: vec![empty; entries].into(), shift: 64 - entries.ilog2(), replaced: 0 }
    }

    /// Returns what is known about a flow, or determines it by `evaluate`.
    #[inline]
    pub(crate) fn get(&mut self, key: &FlowKey, evaluate: impl FnOnce() -> FlowVerdicts) -> FlowVerdicts {
        // Cannot be out of bounds: the hash has as many bits left as the index of the last entry.
        let entry = &mut self.entries[(key.hash() >> self.shift) as usize];
        if entry.0 != *key {
            self.replaced += u64::from(entry.0 != FlowKey::NONE);
            *entry = (*key, evaluate());
        }
        entry.1
    }
}
