//! Multicast group membership as sockets set it: source filters (RFC 3376 §2, RFC 3810 §4), and the options
//! with which sockets send to groups.

use crate::handle::LinkId;
use core::net::{IpAddr, Ipv4Addr};
use serde::{Deserialize, Serialize};

/// How the list of sources of a filter is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FilterMode {
    /// Only packets of the listed sources are received.
    Include,
    /// Packets of all sources but the listed ones are received.
    Exclude,
}

/// A source filter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "SavedFilter")]
pub struct SourceFilter {
    mode: FilterMode,
    /// Sorted, without duplicates.
    sources: Vec<IpAddr>,
}

/// A source filter as it is read from an image, which need not be sorted.
#[derive(Deserialize)]
#[serde(rename = "SourceFilter")]
struct SavedFilter {
    mode: FilterMode,
    sources: Vec<IpAddr>,
}

impl From<SavedFilter> for SourceFilter {
    fn from(saved: SavedFilter) -> Self {
        Self::new(saved.mode, saved.sources)
    }
}

impl SourceFilter {
    /// The filter that lets no packet pass: that of a host that is not a member.
    pub const NONE: Self = Self { mode: FilterMode::Include, sources: Vec::new() };
    /// The filter that lets all packets pass: that of an any-source membership.
    pub const ANY: Self = Self { mode: FilterMode::Exclude, sources: Vec::new() };

    /// Creates a filter.
    pub fn new(mode: FilterMode, mut sources: Vec<IpAddr>) -> Self {
        sources.sort_unstable();
        sources.dedup();
        Self { mode, sources }
    }

    /// Returns the mode.
    pub const fn mode(&self) -> FilterMode {
        self.mode
    }

    /// Returns the listed sources, sorted.
    pub fn sources(&self) -> &[IpAddr] {
        &self.sources
    }

    /// Returns whether the filter lets no packet pass.
    pub fn is_none(&self) -> bool {
        self.mode == FilterMode::Include && self.sources.is_empty()
    }

    /// Returns whether packets of this source pass.
    pub fn allows(&self, source: IpAddr) -> bool {
        let is_listed = self.sources.binary_search(&source).is_ok();
        is_listed == (self.mode == FilterMode::Include)
    }
}

/// The options of a UDP socket about groups of one address family. The default is Linux's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MulticastOptions {
    /// The link by which datagrams leave; `None` lets the route or the source address determine the link
    /// (`IP_MULTICAST_IF`, `IPV6_MULTICAST_IF`).
    pub link: Option<LinkId>,
    /// The source address of datagrams of a socket that is bound to no address (`IP_MULTICAST_IF`).
    pub source: Option<Ipv4Addr>,
    /// Hop limit; `None` stands for 1 (`IP_MULTICAST_TTL`, `IPV6_MULTICAST_HOPS`). Datagrams with 0 do not
    /// leave this host.
    pub hop_limit: Option<u8>,
    /// Keeps datagrams from members on this host (`IP_MULTICAST_LOOP` or `IPV6_MULTICAST_LOOP` is off).
    pub no_loop: bool,
    /// Receives datagrams only to groups that the socket itself has joined (`IP_MULTICAST_ALL` or
    /// `IPV6_MULTICAST_ALL` is off).
    pub members_only: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_allows_by_mode_and_list() {
        let [a, b] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        let allowed = |mode, sources: &[IpAddr]| {
            let filter = SourceFilter::new(mode, sources.to_vec());
            [a, b].map(|source| filter.allows(source))
        };
        assert_eq!(allowed(FilterMode::Include, &[b, b]), [false, true]);
        assert_eq!(allowed(FilterMode::Exclude, &[b]), [true, false]);
        assert!(SourceFilter::ANY.allows(a) && !SourceFilter::NONE.allows(a));
        assert!(SourceFilter::NONE.is_none() && !SourceFilter::ANY.is_none());
    }
}
