//! The local addresses. They are looked up for every received packet: first the primary address is compared,
//! then a sorted array is searched.

use crate::handle::LinkId;
use core::net::{Ipv4Addr, Ipv6Addr};
use core::ops::BitAnd;

/// Local addresses of one family as integers, each with its link.
#[derive(Clone, Debug)]
pub(crate) struct AddressSet<T> {
    /// The first address that was added: on most hosts the only one.
    primary: Option<(T, LinkId)>,
    sorted: Vec<(T, LinkId)>,
    /// Networks whose addresses are all local: network address, mask and link.
    networks: Vec<(T, T, LinkId)>,
    /// An address of a local network that is not local: the broadcast address of the loopback network.
    excluded: Option<T>,
}

impl<T: Copy + Ord + BitAnd<Output = T>> AddressSet<T> {
    const fn new() -> Self {
        Self { primary: None, sorted: Vec::new(), networks: Vec::new(), excluded: None }
    }

    /// Returns the link that a local address belongs to; `None` if the address is not local.
    #[inline]
    pub(crate) fn link_of(&self, address: T) -> Option<LinkId> {
        match self.primary {
            Some((primary, link)) if primary == address => Some(link),
            _ => self.search(address),
        }
    }

    /// Returns whether an address is local.
    #[inline(always)]
    pub(crate) fn contains(&self, address: T) -> bool {
        self.primary.is_some_and(|(primary, _)| primary == address)
            || (self.sorted.len() > 1 || !self.networks.is_empty()) && self.search(address).is_some()
    }

    /// Returns the local address if there is exactly one and no local network.
    pub(crate) fn sole_address(&self) -> Option<T> {
        let is_sole = self.sorted.len() == 1 && self.networks.is_empty();
        self.primary.filter(|_| is_sole).map(|(address, _)| address)
    }

    #[inline(never)]
    fn search(&self, address: T) -> Option<LinkId> {
        match self.sorted.binary_search_by_key(&address, |&(key, _)| key) {
            Ok(at) => Some(self.sorted[at].1),
            Err(_) => {
                let holds = |&&(network, mask, _): &&(T, T, LinkId)| {
                    address & mask == network && self.excluded != Some(address)
                };
                self.networks.iter().find(holds).map(|&(.., link)| link)
            }
        }
    }

    /// Makes all addresses of a network local.
    pub(crate) fn insert_network(&mut self, address: T, mask: T, link: LinkId) {
        self.networks.push((address & mask, mask, link));
    }

    /// Makes an address of a local network an address that is not local.
    pub(crate) fn exclude(&mut self, address: T) {
        self.excluded = Some(address);
    }

    fn insert(&mut self, address: T, link: LinkId) {
        if let Err(at) = self.sorted.binary_search_by_key(&address, |&(key, _)| key) {
            self.sorted.insert(at, (address, link));
            self.primary = self.primary.or(Some((address, link)));
        }
    }

    fn remove(&mut self, address: T) {
        self.sorted.retain(|&(key, _)| key != address);
        if self.primary.is_some_and(|(primary, _)| primary == address) {
            self.primary = self.sorted.first().copied();
        }
    }
}

/// The addresses of this host that packets may be sent from and received at. Tentative addresses (RFC 4862
/// §5.4) are not among them.
#[derive(Clone, Debug)]
pub(crate) struct LocalAddresses {
    pub v4: AddressSet<u32>,
    pub v6: AddressSet<u128>,
}

impl LocalAddresses {
    pub(crate) const fn new() -> Self {
        Self { v4: AddressSet::new(), v6: AddressSet::new() }
    }

    /// Returns the link that a local address belongs to; `None` if the address is not local.
    pub(crate) fn link_of(&self, address: core::net::IpAddr) -> Option<LinkId> {
        match address {
            core::net::IpAddr::V4(address) => self.v4.link_of(address.to_bits()),
            core::net::IpAddr::V6(address) => self.v6.link_of(address.to_bits()),
        }
    }

    pub(crate) fn insert_v4(&mut self, address: Ipv4Addr, link: LinkId) {
        self.v4.insert(address.to_bits(), link);
    }

    pub(crate) fn insert_v6(&mut self, address: Ipv6Addr, link: LinkId) {
        self.v6.insert(address.to_bits(), link);
    }

    /// Makes all addresses of a network local.
    pub(crate) fn insert_network(&mut self, address: core::net::IpAddr, prefix: u8, link: LinkId) {
        match address {
            core::net::IpAddr::V4(address) => {
                let mask = u32::MAX.unbounded_shl(32_u32.saturating_sub(prefix.into()));
                self.v4.insert_network(address.to_bits(), mask, link);
            }
            core::net::IpAddr::V6(address) => {
                let mask = u128::MAX.unbounded_shl(128_u32.saturating_sub(prefix.into()));
                self.v6.insert_network(address.to_bits(), mask, link);
            }
        }
    }

    pub(crate) fn remove_v6(&mut self, address: Ipv6Addr) {
        self.v6.remove(address.to_bits());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_exactly_the_added_addresses() {
        let mut set = AddressSet::new();
        for address in [50_u32, 10, 30, 10] {
            set.insert(address, LinkId(address as u16));
        }
        for address in 0..60 {
            let expected = [10, 30, 50].contains(&address).then_some(LinkId(address as u16));
            assert_eq!(set.link_of(address), expected);
        }
    }

    #[test]
    fn exact_address_takes_precedence_over_local_network() {
        let mut set = AddressSet::new();
        set.insert_network(0x7f00_0001_u32, 0xff00_0000, LinkId(7));
        assert_eq!((set.link_of(0x7fab_cdef), set.contains(0x7f00_0000)), (Some(LinkId(7)), true));
        assert_eq!((set.link_of(0x8000_0000), set.contains(0x7eff_ffff)), (None, false));
        set.insert_network(0xc0a8_0001, 0xffff_0000, LinkId(3));
        assert_eq!((set.link_of(0xc0a8_ffff), set.link_of(0x7fab_cdef)), (Some(LinkId(3)), Some(LinkId(7))));
        assert_eq!(set.link_of(0xc0a9_0000), None);
        set.insert(0x7f00_0005, LinkId(2));
        assert_eq!((set.link_of(0x7f00_0005), set.contains(0x7f00_0006)), (Some(LinkId(2)), true));
    }

    #[test]
    fn removing_the_primary_address_promotes_another() {
        let mut set = AddressSet::new();
        set.insert(5_u32, LinkId(0));
        set.insert(6, LinkId(0));
        set.remove(5);
        assert_eq!((set.link_of(5), set.link_of(6)), (None, Some(LinkId(0))));
        assert_eq!(set.primary, Some((6, LinkId(0))));
        set.remove(6);
        assert_eq!(set.link_of(6), None);
    }
}
