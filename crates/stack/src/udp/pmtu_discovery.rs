//! Path MTU discovery modes of UDP sockets (`IP_MTU_DISCOVER`, `IPV6_MTU_DISCOVER`).

use crate::ip::{Network, Route};
use crate::wire::ipv6;
use serde::{Deserialize, Serialize};

/// Treatment of datagrams that exceed the path MTU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PmtuDiscovery {
    /// They are fragmented by this host, and routers must not fragment them (`IP_PMTUDISC_WANT`).
    #[default]
    Want,
    /// They are fragmented by this host or by routers, and reported path MTUs are not errors for the socket
    /// (`IP_PMTUDISC_DONT`).
    Dont,
    /// They are rejected (`IP_PMTUDISC_DO`).
    Do,
    /// They are rejected only if they exceed the link MTU; the application probes the path MTU
    /// (`IP_PMTUDISC_PROBE`).
    Probe,
    /// As `Probe`, but routers may fragment them (`IP_PMTUDISC_INTERFACE`).
    Interface,
    /// As `Interface`, but datagrams that exceed the link MTU are fragmented by this host
    /// (`IP_PMTUDISC_OMIT`).
    Omit,
}

impl PmtuDiscovery {
    /// Returns whether routers must not fragment the socket's datagrams.
    pub(super) fn dont_fragment(self) -> bool {
        matches!(self, Self::Want | Self::Do | Self::Probe)
    }

    /// Returns whether a router's report of a smaller path MTU is accepted, for all sockets. The largest
    /// datagram of `Interface` and `Omit` does not depend on the path MTU, so a report for them may be forged
    /// without effect.
    pub(super) fn accepts_path_mtu(self) -> bool {
        !matches!(self, Self::Interface | Self::Omit)
    }

    /// Returns the size in bytes of the largest IP packet that is sent unfragmented.
    pub(super) fn mtu(self, network: &Network, route: &Route) -> u16 {
        match self {
            Self::Want | Self::Dont | Self::Do => route.mtu,
            Self::Probe | Self::Interface | Self::Omit => network.link_mtu(route),
        }
    }

    /// Returns the largest accepted datagram length in bytes, UDP header included.
    pub(super) fn datagram_len_max(self, network: &Network, route: &Route) -> usize {
        let header = if route.src.is_ipv4() { 20 } else { ipv6::Header::LEN };
        match self {
            Self::Want | Self::Dont | Self::Omit => usize::MAX,
            Self::Do | Self::Probe | Self::Interface => {
                usize::from(self.mtu(network, route)).saturating_sub(header)
            }
        }
    }
}
