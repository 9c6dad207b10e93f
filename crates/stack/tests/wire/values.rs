//! Generators of arbitrary valid values of every header.

use arrayvec::ArrayVec;
use core::net::{Ipv4Addr, Ipv6Addr};
use ginnel_stack::wire::ethernet::{EtherType, VlanTag};
use ginnel_stack::wire::ndp::{NdpMessage, PREFIXES_MAX, PrefixInfo, RouterAdvertisement};
use ginnel_stack::wire::tcp::{OPTIONS_LEN_MAX, SeqNumber, TcpFlags, TcpHeader, TcpOptions, Timestamps};
use ginnel_stack::wire::{MacAddr, arp, ethernet, ipv4, ipv6};
use proptest::option;
use proptest::prelude::*;

pub fn mac() -> impl Strategy<Value = MacAddr> {
    any::<[u8; 6]>().prop_map(MacAddr)
}

pub fn v4() -> impl Strategy<Value = Ipv4Addr> {
    any::<u32>().prop_map(Ipv4Addr::from_bits)
}

pub fn v6() -> impl Strategy<Value = Ipv6Addr> {
    any::<u128>().prop_map(Ipv6Addr::from_bits)
}

/// Generates source addresses that every neighbour discovery message may have.
pub fn link_local() -> impl Strategy<Value = Ipv6Addr> {
    any::<u64>().prop_map(|low| Ipv6Addr::from_bits(0xfe80 << 112 | u128::from(low)))
}

/// Generates addresses that are not multicast.
pub fn unicast() -> impl Strategy<Value = Ipv6Addr> {
    v6().prop_map(|address| Ipv6Addr::from_bits(address.to_bits() & !(1 << 127)))
}

/// Generates multicast addresses.
pub fn multicast() -> impl Strategy<Value = Ipv6Addr> {
    v6().prop_map(|address| Ipv6Addr::from_bits(address.to_bits() | 0xff << 120))
}

pub fn payload() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..200)
}

pub fn ethernet_header() -> impl Strategy<Value = ethernet::Header> {
    let vlan = (0u8..8, any::<bool>(), 0u16..4095).prop_map(|(pcp, dei, vid)| VlanTag { pcp, dei, vid });
    let known = prop_oneof![Just(0x0800), Just(0x0806), Just(0x86dd), Just(0x88cc)];
    (mac(), mac(), option::of(vlan), known)
        .prop_map(|(dst, src, vlan, kind)| ethernet::Header::new(dst, src, vlan, EtherType(kind)))
}

pub fn arp_packet() -> impl Strategy<Value = arp::ArpPacket> {
    let operation = prop_oneof![Just(arp::ArpOperation::Request), Just(arp::ArpOperation::Reply)];
    (operation, mac(), v4(), mac(), v4()).prop_map(
        |(operation, sender_mac, sender_ip, target_mac, target_ip)| arp::ArpPacket {
            operation,
            sender_mac,
            sender_ip,
            target_mac,
            target_ip,
        },
    )
}

/// Generates headers for a payload of this length in bytes.
pub fn ipv4_header(payload_len: usize) -> impl Strategy<Value = ipv4::Header> {
    let flags = (any::<bool>(), any::<bool>(), 0u16..8000);
    (0u8..64, 0u8..4, any::<u16>(), flags, any::<u8>(), any::<u8>(), v4(), v4()).prop_map(
        move |(dscp, ecn, ident, (dont_fragment, more_fragments, offset), ttl, protocol, src, dst)| {
            ipv4::Header {
                dscp,
                ecn,
                total_len: 20 + payload_len as u16,
                ident,
                dont_fragment,
                more_fragments,
                fragment_offset: offset * 8,
                ttl,
                protocol,
                src,
                dst,
                header_len: 20,
            }
        },
    )
}

/// Generates headers for a payload of this length in bytes.
pub fn ipv6_header(payload_len: usize) -> impl Strategy<Value = ipv6::Header> {
    (0u8..64, 0u8..4, 0u32..1 << 20, any::<u8>(), any::<u8>(), v6(), v6()).prop_map(
        move |(dscp, ecn, flow_label, next_header, hop_limit, src, dst)| ipv6::Header {
            dscp,
            ecn,
            flow_label,
            payload_len: payload_len as u16,
            next_header,
            hop_limit,
            src,
            dst,
        },
    )
}

pub fn fragment_header() -> impl Strategy<Value = ipv6::FragmentHeader> {
    (any::<u8>(), 0u16..8192, any::<bool>(), any::<u32>()).prop_map(
        |(next_header, offset, more_fragments, ident)| ipv6::FragmentHeader {
            next_header,
            offset: offset * 8,
            more_fragments,
            ident,
        },
    )
}

/// Generates headers with their options; the header has the length that the options need.
pub fn tcp_header() -> impl Strategy<Value = (TcpHeader, TcpOptions)> {
    let fields = (1u16.., 1u16.., any::<u32>(), any::<u32>(), any::<u8>(), any::<u16>(), any::<u16>());
    (fields, tcp_options()).prop_map(|((src_port, dst_port, seq, ack, flags, window, urg_ptr), options)| {
        let header = TcpHeader {
            src_port,
            dst_port,
            seq: SeqNumber(seq),
            ack: SeqNumber(ack),
            flags: TcpFlags(flags),
            window,
            urg_ptr,
            header_len: 20 + options.encoded_len() as u8,
        };
        (header, options)
    })
}

/// Generates options that fit into a header together and that the parser returns unchanged.
pub fn tcp_options() -> impl Strategy<Value = TcpOptions> {
    let timestamps = any::<(u32, u32)>().prop_map(|(tsval, tsecr)| Timestamps { tsval, tsecr });
    let blocks = prop::collection::vec(any::<(u32, u32)>(), 0..=4);
    let few = (option::of(1u16..), option::of(0u8..=14), any::<bool>(), option::of(any::<u16>()));
    (few, option::of(timestamps), blocks).prop_map(
        |((mss, window_scale, sack_permitted, user_timeout), timestamps, blocks)| {
            let blocks: ArrayVec<_, 4> = blocks.iter().map(|&(a, b)| (SeqNumber(a), SeqNumber(b))).collect();
            let mut options = TcpOptions {
                mss,
                window_scale,
                sack_permitted,
                timestamps,
                sack_blocks: ArrayVec::new(),
                user_timeout,
                fastopen: None,
            };
            let room = (OPTIONS_LEN_MAX - options.encoded_len()).saturating_sub(4) / 8;
            options.sack_blocks = blocks.into_iter().take(room).collect();
            options
        },
    )
}

fn prefix_info() -> impl Strategy<Value = PrefixInfo> {
    (v6(), 0u8..=128, any::<bool>(), any::<bool>(), any::<u32>(), any::<u32>()).prop_map(
        |(prefix, prefix_len, on_link, autonomous, valid_lifetime_s, preferred_lifetime_s)| PrefixInfo {
            prefix,
            prefix_len,
            on_link,
            autonomous,
            valid_lifetime_s,
            preferred_lifetime_s,
        },
    )
}

pub fn router_advertisement(prefixes_max: usize) -> impl Strategy<Value = RouterAdvertisement> {
    assert!(prefixes_max <= PREFIXES_MAX);
    let fields = (any::<u8>(), any::<bool>(), any::<bool>(), any::<u16>(), any::<u32>(), any::<u32>());
    let options =
        (option::of(mac()), option::of(any::<u32>()), prop::collection::vec(prefix_info(), 0..=prefixes_max));
    (fields, options).prop_map(
        |(
            (hop_limit, managed, other, router_lifetime_s, reachable_time_ms, retrans_timer_ms),
            (source, mtu, prefixes),
        )| {
            RouterAdvertisement {
                hop_limit,
                managed,
                other,
                router_lifetime_s,
                reachable_time_ms,
                retrans_timer_ms,
                source_mac: source,
                mtu,
                prefixes: prefixes.into_iter().collect(),
            }
        },
    )
}

/// Generates neighbour discovery messages for packets from a link-local to a unicast address.
pub fn ndp_message(prefixes_max: usize) -> impl Strategy<Value = NdpMessage> {
    prop_oneof![
        option::of(mac()).prop_map(|source_mac| NdpMessage::RouterSolicitation { source_mac }),
        router_advertisement(prefixes_max).prop_map(NdpMessage::RouterAdvertisement),
        (unicast(), option::of(mac())).prop_map(|(target, source_mac)| NdpMessage::NeighbourSolicitation {
            target,
            source_mac,
            nonce: None
        }),
        (unicast(), any::<bool>(), any::<bool>(), any::<bool>(), option::of(mac())).prop_map(
            |(target, router, solicited, overrides, target_mac)| NdpMessage::NeighbourAdvertisement {
                target,
                router,
                solicited,
                overrides,
                target_mac
            }
        ),
    ]
}
