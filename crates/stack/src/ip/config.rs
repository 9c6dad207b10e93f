//! The keys of the `[network]` configuration table.

use crate::error::ConfigError;
use crate::udp::MembershipLimits;
use core::fmt::Display;
use core::ops::RangeInclusive;
use core::time::Duration;
use serde::Deserialize;

/// Parameters of ARP, NDP, ICMP, fragmentation, path MTU discovery and UDP. Where Linux has the parameter,
/// the default is Linux's.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkConfig {
    /// Largest number of neighbours over all links; a neighbour takes about 160 bytes. At the limit a
    /// neighbour that was not used recently is evicted. 16 … 1,048,575, default 16,384.
    pub neighbours_max: u32,
    /// Largest number of bytes queued for one neighbour while it is being resolved. At the limit the oldest
    /// packet is dropped. 2,048 … 2^30, default 212,992.
    pub neighbour_pending_bytes: u32,
    /// Largest number of bytes queued for all unresolved neighbours together. At the limit new packets are
    /// dropped. 2,048 … 2^32-1, default 4 MiB.
    pub neighbour_pending_total_bytes: u32,
    /// How long a neighbour counts as reachable after an answer, in milliseconds (BaseReachableTime of RFC
    /// 4861 §10; each link draws a value between 0.5 and 1.5 times this). 100 … 3,600,000, default 30,000.
    pub neighbour_reachable_ms: u32,
    /// How long a stale neighbour is used before it is probed, in milliseconds (DELAY_FIRST_PROBE_TIME of RFC
    /// 4861 §10). 1 … 3,600,000, default 5,000.
    pub neighbour_delay_probe_ms: u32,
    /// Time between solicitations, in milliseconds (RetransTimer of RFC 4861 §10). 1 … 60,000, default 1,000.
    pub neighbour_retransmit_ms: u32,
    /// Number of unicast solicitations to a known neighbour before it counts as failed. 1 … 20, default 3.
    pub neighbour_unicast_probes: u8,
    /// Number of broadcast or multicast solicitations for an unknown neighbour before it counts as failed. 1
    /// … 20, default 3.
    pub neighbour_multicast_probes: u8,
    /// How long after an ARP update another MAC address for that neighbour is refused, in milliseconds, so
    /// that the first of several replies wins (Linux's `locktime`). 0 … 60,000, default 1,000.
    pub neighbour_lock_ms: u32,
    /// Largest number of bytes of fragments awaiting reassembly; each fragment is charged 64 bytes in
    /// addition. At the limit the oldest datagram is discarded. 65,536 … 2^32-1, default 4 MiB.
    pub fragment_bytes: u32,
    /// How long IPv4 fragments await reassembly, in seconds. 1 … 120, default 30.
    pub fragment_timeout_v4_seconds: u32,
    /// How long IPv6 fragments await reassembly, in seconds (RFC 8200 §4.5). 1 … 120, default 60.
    pub fragment_timeout_v6_seconds: u32,
    /// Largest number of destinations whose path MTU is cached. At the limit the oldest entry is evicted. 1 …
    /// 1,048,576, default 4,096.
    pub path_mtu_entries: u32,
    /// How long a path MTU is cached, in seconds (RFC 1191 §6.3). 60 … 86,400, default 600.
    pub path_mtu_seconds: u32,
    /// Smallest IPv4 path MTU that an ICMP message can set, in bytes; it protects against forged messages
    /// that report less. 68 … 1,500, default 552.
    pub path_mtu_floor_bytes: u16,
    /// Largest number of ICMP errors sent per second, over all destinations. 0 … 1,000,000, default 1,000.
    pub icmp_errors_per_second: u32,
    /// Largest number of ICMP errors sent in a burst. 1 … 1,000,000, default 50.
    pub icmp_errors_burst: u32,
    /// Time between ICMP errors to one destination, in milliseconds; after a pause a destination may get six
    /// in a burst. 0 … 3,600,000, default 1,000.
    pub icmp_error_interval_ms: u32,
    /// True if ICMP echo requests are answered. Default true.
    pub icmp_echo: bool,
    /// Largest number of queued errors about packets whose neighbour did not answer. At the limit new errors
    /// are dropped. 1 … 1,048,576, default 1,024.
    pub errors_max: u32,
    /// Number of neighbour solicitations sent in duplicate address detection; 0 disables the detection
    /// (DupAddrDetectTransmits of RFC 4862 §5.1). 0 … 10, default 1.
    pub dad_transmits: u8,
    /// Number of router solicitations sent at start (MAX_RTR_SOLICITATIONS of RFC 4861 §10). 0 … 10, default
    /// 3.
    pub router_solicitations: u8,
    /// Largest number of addresses that router advertisements may create on a link. 0 … 256, default 16.
    pub autoconf_addresses_max: u16,
    /// Largest number of default routers and on-link prefixes that router advertisements may create on a
    /// link. 0 … 256, default 16.
    pub autoconf_routes_max: u16,
    /// Hop limit, or time to live, of ICMP and UDP packets. 1 … 255, default 64.
    pub hop_limit: u8,
    /// Largest number of UDP sockets. 1 … 1,048,576, default 16,384.
    pub udp_sockets_max: u32,
    /// Capacity of a UDP socket's receive queue in bytes; each datagram is charged 64 bytes in addition.
    /// 2,048 … 2^30, default 212,992.
    pub udp_receive_bytes: u32,
    /// Capacity of all UDP receive queues together, in bytes. 65,536 … 2^40, default 64 MiB.
    pub udp_receive_total_bytes: u64,
    /// Largest number of IPv4 groups that a UDP socket can join (`net.ipv4.igmp_max_memberships`). 1 …
    /// 65,536, default 20.
    pub igmp_max_memberships: u32,
    /// Largest number of sources in the filter of an IPv4 group (`net.ipv4.igmp_max_msf`). 0 … 1,024, default
    /// 10.
    pub igmp_max_msf: u32,
    /// Largest number of IPv6 groups that a UDP socket can join; Linux limits their memory
    /// (`net.core.optmem_max`). 1 … 65,536, default 2,048.
    pub mld_max_memberships: u32,
    /// Largest number of sources in the filter of an IPv6 group (`net.ipv6.mld_max_msf`). 0 … 1,024, default
    /// 64.
    pub mld_max_msf: u32,
    /// Largest number of groups that all UDP sockets together have joined, plus the sources in their filters.
    /// A group counts once for each socket. 1 … 1,048,576, default 16,384.
    pub group_memberships_max: u32,
    /// First ephemeral UDP port (RFC 6056). 1 … 65,535, default 32,768.
    pub udp_port_first: u16,
    /// Last ephemeral UDP port. 1 … 65,535, default 60,999.
    pub udp_port_last: u16,
}

impl Default for NetworkConfig {
    fn default() -> Self {
        Self {
            neighbours_max: 16_384,
            neighbour_pending_bytes: 212_992,
            neighbour_pending_total_bytes: 4 << 20,
            neighbour_reachable_ms: 30_000,
            neighbour_delay_probe_ms: 5_000,
            neighbour_retransmit_ms: 1_000,
            neighbour_unicast_probes: 3,
            neighbour_multicast_probes: 3,
            neighbour_lock_ms: 1_000,
            fragment_bytes: 4 << 20,
            fragment_timeout_v4_seconds: 30,
            fragment_timeout_v6_seconds: 60,
            path_mtu_entries: 4_096,
            path_mtu_seconds: 600,
            path_mtu_floor_bytes: 552,
            icmp_errors_per_second: 1_000,
            icmp_errors_burst: 50,
            icmp_error_interval_ms: 1_000,
            icmp_echo: true,
            errors_max: 1_024,
            dad_transmits: 1,
            router_solicitations: 3,
            autoconf_addresses_max: 16,
            autoconf_routes_max: 16,
            hop_limit: 64,
            udp_sockets_max: 16_384,
            udp_receive_bytes: 212_992,
            udp_receive_total_bytes: 64 << 20,
            igmp_max_memberships: 20,
            igmp_max_msf: 10,
            mld_max_memberships: 2_048,
            mld_max_msf: 64,
            group_memberships_max: 16_384,
            udp_port_first: 32_768,
            udp_port_last: 60_999,
        }
    }
}

impl NetworkConfig {
    /// Checks the range of every key. The error names the key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        within("neighbours_max", self.neighbours_max, 16..=1_048_575)?;
        within("neighbour_pending_bytes", self.neighbour_pending_bytes, 2_048..=1 << 30)?;
        within("neighbour_pending_total_bytes", self.neighbour_pending_total_bytes, 2_048..=u32::MAX)?;
        within("neighbour_reachable_ms", self.neighbour_reachable_ms, 100..=3_600_000)?;
        within("neighbour_delay_probe_ms", self.neighbour_delay_probe_ms, 1..=3_600_000)?;
        within("neighbour_retransmit_ms", self.neighbour_retransmit_ms, 1..=60_000)?;
        within("neighbour_unicast_probes", self.neighbour_unicast_probes, 1..=20)?;
        within("neighbour_multicast_probes", self.neighbour_multicast_probes, 1..=20)?;
        within("neighbour_lock_ms", self.neighbour_lock_ms, 0..=60_000)?;
        within("fragment_bytes", self.fragment_bytes, 65_536..=u32::MAX)?;
        within("fragment_timeout_v4_seconds", self.fragment_timeout_v4_seconds, 1..=120)?;
        within("fragment_timeout_v6_seconds", self.fragment_timeout_v6_seconds, 1..=120)?;
        within("path_mtu_entries", self.path_mtu_entries, 1..=1 << 20)?;
        within("path_mtu_seconds", self.path_mtu_seconds, 60..=86_400)?;
        within("path_mtu_floor_bytes", self.path_mtu_floor_bytes, 68..=1_500)?;
        within("icmp_errors_per_second", self.icmp_errors_per_second, 0..=1_000_000)?;
        within("icmp_errors_burst", self.icmp_errors_burst, 1..=1_000_000)?;
        within("icmp_error_interval_ms", self.icmp_error_interval_ms, 0..=3_600_000)?;
        within("errors_max", self.errors_max, 1..=1 << 20)?;
        within("dad_transmits", self.dad_transmits, 0..=10)?;
        within("router_solicitations", self.router_solicitations, 0..=10)?;
        within("autoconf_addresses_max", self.autoconf_addresses_max, 0..=256)?;
        within("autoconf_routes_max", self.autoconf_routes_max, 0..=256)?;
        within("hop_limit", self.hop_limit, 1..=255)?;
        within("udp_sockets_max", self.udp_sockets_max, 1..=1 << 20)?;
        within("udp_receive_bytes", self.udp_receive_bytes, 2_048..=1 << 30)?;
        within("udp_receive_total_bytes", self.udp_receive_total_bytes, 65_536..=1 << 40)?;
        within("igmp_max_memberships", self.igmp_max_memberships, 1..=1 << 16)?;
        within("igmp_max_msf", self.igmp_max_msf, 0..=1_024)?;
        within("mld_max_memberships", self.mld_max_memberships, 1..=1 << 16)?;
        within("mld_max_msf", self.mld_max_msf, 0..=1_024)?;
        within("group_memberships_max", self.group_memberships_max, 1..=1 << 20)?;
        within("udp_port_first", self.udp_port_first, 1..=u16::MAX)?;
        if self.udp_port_last < self.udp_port_first {
            return Err(ConfigError::new("network.udp_port_last", "is below network.udp_port_first"));
        }
        Ok(())
    }

    /// Returns the limits of the memberships of a UDP socket.
    pub fn membership_limits(&self) -> MembershipLimits {
        let &Self { igmp_max_memberships, igmp_max_msf, mld_max_memberships, mld_max_msf, .. } = self;
        MembershipLimits { igmp_max_memberships, igmp_max_msf, mld_max_memberships, mld_max_msf }
    }

    pub(crate) fn retransmit_interval(&self) -> Duration {
        Duration::from_millis(self.neighbour_retransmit_ms.into())
    }
}

fn within<T: PartialOrd + Display>(key: &str, value: T, range: RangeInclusive<T>) -> Result<(), ConfigError> {
    if range.contains(&value) {
        return Ok(());
    }
    let problem = format!("{value} is outside {} to {}", range.start(), range.end());
    Err(ConfigError::new(format!("network.{key}"), problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_configuration_is_valid() {
        assert_eq!(NetworkConfig::default().validate(), Ok(()));
    }

    #[test]
    fn out_of_range_value_is_rejected_with_key() {
        let config = NetworkConfig { neighbours_max: 1, ..NetworkConfig::default() };
        assert_eq!(config.validate().unwrap_err().key, "network.neighbours_max");
        let config = NetworkConfig { udp_port_first: 5, udp_port_last: 4, ..NetworkConfig::default() };
        assert_eq!(config.validate().unwrap_err().key, "network.udp_port_last");
    }
}
