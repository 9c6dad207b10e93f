//! What becomes of datagrams that are longer than a link on their way takes (`IP_MTU_DISCOVER`, `IPV6_MTU_DISCOVER`).

use crate::ip::{Network, Route};
use crate::wire::ipv6;

/// How a socket finds out what the path takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PmtuDiscovery {
    /// What is longer is cut here, and nowhere else (`IP_PMTUDISC_WANT`).
    #[default]
    Want,
    /// What is longer is cut here, or by routers, and what these say of it is nobody's concern (`IP_PMTUDISC_DONT`).
    Dont,
    /// What is longer is refused (`IP_PMTUDISC_DO`).
    Do,
    /// What is longer than the first link takes is refused; the program looks for what the path takes (`IP_PMTUDISC_PROBE`).
    Probe,
    /// The same, and routers may cut it (`IP_PMTUDISC_INTERFACE`).
    Interface,
    /// The same, and what is longer is cut here (`IP_PMTUDISC_OMIT`).
    Omit,
}

impl PmtuDiscovery {
    /// Whether routers must not cut what is sent.
    pub(super) fn dont_fragment(self) -> bool {
        matches!(self, Self::Want | Self::Do | Self::Probe)
    }

    /// Bytes of the largest IP packet that is sent in one piece.
    pub(super) fn mtu(self, network: &Network, route: &Route) -> u16 {
        match self {
            Self::Want | Self::Dont | Self::Do => route.mtu,
            Self::Probe | Self::Interface | Self::Omit => network.link_mtu(route),
        }
    }

    /// Bytes of the longest datagram, with its header, that is sent at all.
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
