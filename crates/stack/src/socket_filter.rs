//! Filters that applications attach to sockets (`SO_ATTACH_FILTER`), and the packets that these see.
//!
//! The engine does not know how a filter decides; its owner implements [`SocketFilter`]. As in Linux's
//! `sk_filter_trim_cap`, a filter decides about each packet that was found to be for the socket, before the
//! protocol processes the packet.

use crate::handle::LinkId;
use crate::wire::ethernet::EtherType;
use crate::wire::{ipv4, ipv6};
use core::fmt::Debug;
use core::net::IpAddr;

/// A filter of sockets.
pub trait SocketFilter: Debug + Send + Sync {
    /// Decides about a packet. Returns how many of its bytes to keep, counted from the transport header on; 0
    /// drops the packet. The transport header is always kept. The program of a group returns the index of a
    /// member.
    fn run(&self, packet: &FilteredPacket<'_>) -> u32;

    /// Returns the filter in the encoding in which it was attached.
    fn code(&self) -> &[u8];

    /// Returns bytes from which another process makes the filter again
    /// ([`Restorer::filter`](crate::stack::Restorer::filter)).
    fn saved(&self) -> Vec<u8> {
        self.code().to_vec()
    }
}

/// A packet as a filter sees it.
#[derive(Clone, Copy, Debug)]
pub struct FilteredPacket<'a> {
    /// The packet from its TCP or UDP header on; without that header for a program that selects a member of a
    /// group (`SO_ATTACH_REUSEPORT_CBPF`).
    pub bytes: &'a [u8],
    /// Bytes of the TCP or UDP header that `bytes` begin with.
    pub header_len: usize,
    /// The packet from its IP header on.
    pub network: &'a [u8],
    /// The frame from its Ethernet header on; of a datagram, or a segment that was reassembled from
    /// fragments, only an Ethernet header without addresses.
    pub frame: &'a [u8],
    /// The destination address.
    pub destination: IpAddr,
    /// True if the destination is a broadcast address.
    pub is_broadcast: bool,
    /// The link on which the packet arrived.
    pub link: LinkId,
    /// True if that is the loopback link.
    pub is_loopback: bool,
}

/// Bytes of an Ethernet header without tags.
const ETHERNET: usize = 14;

/// An Ethernet header without addresses, as frames have it on Linux's loopback device.
pub(crate) fn loopback_header(is_v4: bool) -> [u8; ETHERNET] {
    let mut header = [0; ETHERNET];
    let EtherType(ethertype) = if is_v4 { EtherType::IPV4 } else { EtherType::IPV6 };
    header[12..].copy_from_slice(&ethertype.to_be_bytes());
    header
}

/// Fields of the headers of a packet that is not in one frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PacketFields {
    pub source: IpAddr,
    pub destination: IpAddr,
    pub protocol: u8,
    pub tos: u8,
    pub hop_limit: u8,
}

impl PacketFields {
    /// Writes an IP header and the parts of the packet that follow it to `out`, of which only the capacity is
    /// used. Returns the length of the IP header.
    pub fn build(&self, parts: &[&[u8]], out: &mut Vec<u8>) -> usize {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let (dscp, ecn) = (self.tos >> 2, self.tos & 3);
        out.clear();
        let header_len = match (self.source, self.destination) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                out.resize(ipv4::Header::LEN, 0);
                let header = ipv4::Header {
                    dscp,
                    ecn,
                    // Cannot truncate: packets are at most that long.
                    total_len: (ipv4::Header::LEN + len) as u16,
                    ident: 0,
                    dont_fragment: true,
                    more_fragments: false,
                    fragment_offset: 0,
                    ttl: self.hop_limit,
                    protocol: self.protocol,
                    src,
                    dst,
                    header_len: ipv4::Header::LEN as u8,
                };
                header.emit(out)
            }
            (source, destination) => {
                out.resize(ipv6::Header::LEN, 0);
                let v6 = |address: IpAddr| match address {
                    IpAddr::V4(address) => address.to_ipv6_mapped(),
                    IpAddr::V6(address) => address,
                };
                let header = ipv6::Header {
                    dscp,
                    ecn,
                    flow_label: 0,
                    // Cannot truncate: packets are at most that long.
                    payload_len: len as u16,
                    next_header: self.protocol,
                    hop_limit: self.hop_limit,
                    src: v6(source),
                    dst: v6(destination),
                };
                header.emit(out)
            }
        };
        parts.iter().for_each(|part| out.extend_from_slice(part));
        header_len
    }
}
