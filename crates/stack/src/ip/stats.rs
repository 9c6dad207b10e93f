//! Counters of the network layer: one per event, and one per reason for which a frame is dropped.

/// Defines a struct of `u64` counters that can be listed by name.
macro_rules! counters {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub struct $name { $($(#[$fdoc])* pub $field: u64,)* }

        impl $name {
            /// Returns every counter with its name, in the order of declaration.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($field), self.$field),)*].into_iter()
            }
        }
    };
}

pub(crate) use counters;

/// Defines [`DropReason`] and [`DropStats`] together, so that every reason has a counter.
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
    /// Frames that were too short for their Ethernet header, or had a tag other than one 802.1Q tag.
    BadEthernet => bad_ethernet,
    /// Frames whose destination MAC address is another host's.
    OtherHost => other_host,
    /// Frames of a VLAN that no link of the device has.
    UnknownVlan => unknown_vlan,
    /// Frames with an EtherType other than IPv4, IPv6 and ARP.
    UnknownEthertype => unknown_ethertype,
    /// ARP packets that were malformed or had an impossible sender.
    BadArp => bad_arp,
    /// Packets whose IP header was malformed or whose lengths contradict the frame.
    BadIpHeader => bad_ip_header,
    /// IPv4 packets with a wrong header checksum.
    BadIpChecksum => bad_ip_checksum,
    /// Packets whose IP options were malformed or requested source routing (RFC 7126 §4.3).
    BadIpOptions => bad_ip_options,
    /// Packets with a source address that no other host can have: multicast, broadcast, loopback or local
    /// (RFC 1122 §3.2.1.3).
    MartianSource => martian_source,
    /// Packets whose destination is not a local address, or not usable yet. This is a host: nothing is
    /// forwarded.
    NotLocal => not_local,
    /// Unicast packets in broadcast or multicast frames (RFC 1122 §3.3.6).
    UnicastInBroadcast => unicast_in_broadcast,
    /// TCP segments to broadcast or multicast addresses (RFC 9293 §3.9.2.3).
    TcpBroadcast => tcp_broadcast,
    /// Packets too short for their transport header, or with a transport length that contradicts the packet.
    BadTransportLength => bad_transport_length,
    /// Packets with a wrong TCP or UDP checksum, and UDP datagrams over IPv6 without one.
    BadTransportChecksum => bad_transport_checksum,
    /// Packets whose TCP or UDP checksum is that of the pseudo-header alone: a local sender left the rest to
    /// a device that did not add it (`partial_checksums`).
    PartialTransportChecksum => partial_transport_checksum,
    /// IPv6 packets whose extension headers were malformed, too many or unsupported.
    BadExtensionHeaders => bad_extension_headers,
    /// Fragments within packets that were reassembled from fragments.
    NestedFragment => nested_fragment,
    /// IPv6 packets on links without IPv6 (an MTU below 1,280 bytes excludes IPv6).
    FamilyDisabled => family_disabled,
}

counters! {
    /// Events of the network layer other than drops.
    NetworkStats {
        /// TCP segments received and passed to TCP.
        rx_tcp,
        /// UDP datagrams received and passed to UDP.
        rx_udp,
        /// Other frames received: ARP, ICMP, fragments and unknown protocols.
        rx_other,
        /// Frames received and dropped, for any reason.
        rx_dropped,
        /// Frames given to a device.
        tx_frames,
        /// Bytes of frames given to a device, Ethernet headers included.
        tx_bytes,
        /// Control frames (ARP, NDP, MLD, ICMP) that were not sent because the device was full. Solicitations
        /// are soon retried; each failed attempt counts.
        tx_control_dropped,
        /// Packets dropped because they exceeded the MTU and may not be fragmented.
        tx_too_big,
        /// Packets queued for an unresolved neighbour.
        tx_pending,
        /// Packets dropped from the queue of an unresolved neighbour because a limit in bytes was reached.
        tx_pending_overflow,
        /// Packets dropped because their neighbour did not answer. Each is also reported as an error.
        tx_unresolved,
        /// Datagrams sent in fragments.
        tx_fragmented,
        /// Fragments sent.
        tx_fragments,
        /// Datagrams of which only the first fragments were sent because the device became full.
        tx_fragments_lost,
        /// ARP requests received.
        arp_requests_in,
        /// ARP replies received.
        arp_replies_in,
        /// ARP requests sent.
        arp_requests_out,
        /// ARP replies sent.
        arp_replies_out,
        /// ARP packets in which another host claims a local address.
        arp_conflicts,
        /// Neighbours created.
        neighbours_created,
        /// Neighbours evicted to make room for others.
        neighbours_evicted,
        /// Packets for which no neighbour could be created because the table was full.
        neighbours_exhausted,
        /// Neighbours whose MAC address changed.
        neighbours_moved,
        /// Neighbours that did not answer.
        neighbours_failed,
        /// Neighbour updates that were refused, such as for a static neighbour or within the lock time.
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
        /// Redirects received and ignored.
        redirects_ignored,
        /// Addresses found to be in use by another host in duplicate address detection (RFC 4862 §5.4).
        dad_duplicates,
        /// Neighbour advertisements in which another host claims a local address.
        ndp_conflicts,
        /// Addresses formed from router advertisements.
        slaac_addresses,
        /// Prefixes, routers and addresses of router advertisements that were ignored because a limit was
        /// reached.
        router_advertisement_limits,
        /// IGMP reports sent.
        igmp_reports_out,
        /// IGMP queries received.
        igmp_queries_in,
        /// IGMP messages that were malformed, had a wrong checksum, or were reports not sent to a group.
        igmp_invalid,
        /// Multicast listener reports sent.
        mld_reports_out,
        /// Multicast listener queries received.
        mld_queries_in,
        /// Datagrams to groups or broadcast addresses that members on other shards did not get because too
        /// many were sent in one turn.
        looped_back_dropped,
        /// Fragments received.
        fragments_in,
        /// Datagrams reassembled.
        reassembled,
        /// Incomplete datagrams discarded because a fragment did not arrive in time.
        reassembly_timeouts,
        /// Incomplete datagrams discarded because fragments overlapped (RFC 5722).
        reassembly_overlaps,
        /// Incomplete datagrams discarded to keep within `fragment_bytes`.
        reassembly_evicted,
        /// Fragments with an impossible offset or length, and datagrams discarded because their fragments
        /// contradicted each other.
        reassembly_malformed,
        /// Duplicate fragments received.
        reassembly_duplicates,
        /// ICMP messages received.
        icmp_in,
        /// ICMP messages that were malformed or had a wrong checksum.
        icmp_invalid,
        /// Echo requests answered.
        icmp_echo_replies,
        /// Echo requests not answered because they were sent to a broadcast address (RFC 1122 §3.2.2.6) or
        /// replies are disabled.
        icmp_echo_ignored,
        /// ICMP errors passed to a transport.
        icmp_errors_in,
        /// ICMP errors that quote a packet this host did not send.
        icmp_errors_foreign,
        /// ICMP messages of a type that a host does not process.
        icmp_unhandled,
        /// ICMP errors sent.
        icmp_errors_out,
        /// ICMP errors not sent because of the rate limit.
        icmp_errors_limited,
        /// Path MTU values learnt.
        path_mtu_learnt,
        /// Destinations whose path MTU was evicted to keep within `path_mtu_entries`.
        path_mtu_evicted,
        /// Reported path MTU values that do not lower the known one.
        path_mtu_ignored,
        /// Errors about transmitted packets that were dropped because `errors_max` of them were queued.
        errors_overflow,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counted_drop_appears_under_its_name() {
        let mut drops = DropStats::default();
        drops.count(DropReason::BadIpChecksum);
        let total: u64 = drops.entries().map(|(_, value)| value).sum();
        assert_eq!(total, 1);
        assert!(drops.entries().any(|entry| entry == ("bad_ip_checksum", 1)));
    }
}
