//! Counters of the network layer: one per event, one per reason for which a frame is dropped.

/// Defines a struct of `u64` counters that can also be listed by name.
macro_rules! counters {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct $name { $($(#[$fdoc])* pub $field: u64,)* }

        impl $name {
            /// Every counter with its name, in the order of declaration.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)*].into_iter()
            }
        }
    };
}

pub(crate) use counters;

/// Defines [`DropReason`] and [`DropStats`] together, so that no reason can lack its counter.
macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $variant:ident => $field:ident,)*) => {
        /// Why a received frame was dropped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum DropReason { $($(#[$doc])* $variant,)* }

        counters! {
            /// Received frames that were dropped, by reason.
            DropStats { $($(#[$doc])* $field,)* }
        }

        impl DropStats {
            /// Counts one dropped frame.
            pub fn count(&mut self, reason: DropReason) {
                match reason { $(DropReason::$variant => self.$field += 1,)* }
            }
        }
    };
}

drop_reasons! {
    /// Too short for its Ethernet header, or a tag that is not plain 802.1Q.
    BadEthernet => bad_ethernet,
    /// The destination MAC address is another host's.
    OtherHost => other_host,
    /// No link of the port has this VLAN.
    UnknownVlan => unknown_vlan,
    /// An EtherType that is not IPv4, IPv6 or ARP.
    UnknownEthertype => unknown_ethertype,
    /// A malformed ARP packet, or one with an impossible sender.
    BadArp => bad_arp,
    /// An IP header that is malformed, or lengths that contradict the frame.
    BadIpHeader => bad_ip_header,
    /// The IPv4 header checksum is wrong.
    BadIpChecksum => bad_ip_checksum,
    /// IP options that are malformed or ask for source routing (RFC 7126 §4.3).
    BadIpOptions => bad_ip_options,
    /// A source address that no other host can have: multicast, broadcast, loopback, or our own (RFC 1122 §3.2.1.3).
    MartianSource => martian_source,
    /// The destination is not an address of ours (this is a host: nothing is forwarded), or not usable yet.
    NotLocal => not_local,
    /// A unicast packet in a broadcast or multicast frame (RFC 1122 §3.3.6).
    UnicastInBroadcast => unicast_in_broadcast,
    /// TCP to a broadcast or multicast address (RFC 9293 §3.9.2.3).
    TcpBroadcast => tcp_broadcast,
    /// Too short for its transport header, or a transport length that contradicts the packet.
    BadTransportLength => bad_transport_length,
    /// The TCP or UDP checksum is wrong, or UDP over IPv6 has none.
    BadTransportChecksum => bad_transport_checksum,
    /// IPv6 extension headers that are malformed, too many or unsupported.
    BadExtensionHeaders => bad_extension_headers,
    /// A fragment in what was put together from fragments.
    NestedFragment => nested_fragment,
    /// The link does not do this IP version (an MTU below 1,280 bytes excludes IPv6).
    FamilyDisabled => family_disabled,
}

counters! {
    /// Everything else that happened in the network layer.
    NetworkStats {
        /// TCP segments received and passed on.
        rx_tcp,
        /// UDP datagrams received and passed on.
        rx_udp,
        /// Other frames received: ARP, ICMP, fragments, unknown protocols.
        rx_other,
        /// Frames received and dropped, for any reason.
        rx_dropped,
        /// Frames given to a device.
        tx_frames,
        /// Bytes of frames given to a device, Ethernet headers included.
        tx_bytes,
        /// Frames of our own control protocols that did not leave because the device was full. Questions are soon asked again, and count each time.
        tx_control_dropped,
        /// Packets that exceeded the MTU although they may not be fragmented.
        tx_too_big,
        /// Packets queued until their neighbour answers.
        tx_pending,
        /// Packets dropped from a neighbour's queue because a limit in bytes was reached.
        tx_pending_overflow,
        /// Packets dropped because their neighbour did not answer. Each is also reported as an error.
        tx_unresolved,
        /// Datagrams that were sent in fragments.
        tx_fragmented,
        /// Fragments sent.
        tx_fragments,
        /// Datagrams of which only the first fragments were sent because the device was full.
        tx_fragments_lost,
        /// ARP requests received.
        arp_requests_in,
        /// ARP replies received.
        arp_replies_in,
        /// ARP requests sent.
        arp_requests_out,
        /// ARP replies sent.
        arp_replies_out,
        /// ARP packets in which another host claims an address of ours.
        arp_conflicts,
        /// Neighbours created.
        neighbours_created,
        /// Neighbours thrown out to make room.
        neighbours_evicted,
        /// Packets that found no room for a neighbour.
        neighbours_exhausted,
        /// Neighbours that changed their MAC address.
        neighbours_moved,
        /// Neighbours that did not answer.
        neighbours_failed,
        /// Claims about a static neighbour, or within the lock time, that were ignored.
        neighbour_updates_refused,
        /// NDP messages that failed the checks of RFC 4861 §6.1 and §7.1.
        ndp_invalid,
        /// Neighbour solicitations received.
        ndp_solicitations_in,
        /// Neighbour advertisements received.
        ndp_advertisements_in,
        /// Neighbour solicitations sent.
        ndp_solicitations_out,
        /// Neighbour advertisements sent.
        ndp_advertisements_out,
        /// Router solicitations sent.
        ndp_router_solicitations_out,
        /// Router advertisements received and used.
        ndp_router_advertisements_in,
        /// Redirects, which are not followed.
        redirects_ignored,
        /// Addresses found to be in use by another host (RFC 4862 §5.4).
        dad_duplicates,
        /// Neighbour advertisements in which another host claims an address of ours.
        ndp_conflicts,
        /// Addresses formed from router advertisements.
        slaac_addresses,
        /// Prefixes, routers and addresses of router advertisements that exceeded a limit.
        router_advertisement_limits,
        /// Multicast listener reports sent.
        mld_reports_out,
        /// Multicast listener queries received.
        mld_queries_in,
        /// Fragments received.
        fragments_in,
        /// Datagrams put together.
        reassembled,
        /// Datagrams given up because a fragment did not come in time.
        reassembly_timeouts,
        /// Datagrams given up because fragments overlapped (RFC 5722).
        reassembly_overlaps,
        /// Datagrams given up to keep within `fragment_bytes`.
        reassembly_evicted,
        /// Fragments whose offset or length is impossible, and datagrams whose fragments disagree.
        reassembly_malformed,
        /// Fragments received twice.
        reassembly_duplicates,
        /// ICMP messages received.
        icmp_in,
        /// ICMP messages that are malformed or whose checksum is wrong.
        icmp_invalid,
        /// Echo requests answered.
        icmp_echo_replies,
        /// Echo requests to a broadcast address, which are not answered (RFC 1122 §3.2.2.6).
        icmp_echo_ignored,
        /// ICMP errors passed to their transport.
        icmp_errors_in,
        /// ICMP errors whose quote is not a packet of ours.
        icmp_errors_foreign,
        /// ICMP messages of a type that a host has no use for.
        icmp_unhandled,
        /// ICMP errors sent.
        icmp_errors_out,
        /// ICMP errors not sent because of the rate limit.
        icmp_errors_limited,
        /// Path MTU values learnt.
        path_mtu_learnt,
        /// Destinations whose path MTU was forgotten before its time to keep within `path_mtu_entries`.
        path_mtu_evicted,
        /// Path MTU values that would not lower the known one.
        path_mtu_ignored,
        /// Errors about packets of ours that nobody fetched in time.
        errors_overflow,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counted_drop_appears_under_its_name() {
        let mut drops = DropStats::default();
        drops.count(DropReason::BadIpChecksum);
        let total: u64 = drops.entries().map(|(_, value)| value).sum();
        assert_eq!(total, 1);
        assert!(drops.entries().any(|entry| entry == ("bad_ip_checksum", 1)));
    }
}
