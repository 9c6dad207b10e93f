//! Local addresses and their ports. They map a segment to its connection by an index instead of a hash.
//!
//! Each address has a ring of ports. A port is used again only after all other ports of the address, which
//! replaces TIME-WAIT. A port carries one connection at a time, to any destination.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use ginnel_stack::wire::checksum::Sum;

/// First port: that of Linux's ephemeral range.
const PORT_MIN: u16 = 32_768;
/// Ports of an address.
const PORTS_MAX: u32 = 32_768;
/// Largest number of ports of all addresses together: with more than 2,048 addresses, each has fewer than
/// [`PORTS_MAX`]. A table of this size takes 256 MiB of address space, of which only used pages take memory.
const TABLE_MAX: u32 = 1 << 26;
/// Most local addresses: their indices have 16 bits.
pub(super) const LOCALS_MAX: usize = 1 << 16;

/// Table entry of a port without a connection.
const VACANT: u32 = 0;
/// Table entry of a port whose last connection was closed with FINs on both sides.
const ENDED: u32 = 1;
/// Table entry of connection 0.
const FIRST: u32 = 2;

/// A local address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local {
    pub address: IpAddr,
    /// Ones' complement sum of the address, for the pseudo-header.
    pub sum: Sum,
    /// Index of the next port in the ring.
    next: u32,
}

/// Consecutive addresses with consecutive indices.
#[derive(Clone, Copy, Debug)]
struct AddressRange<T> {
    first: T,
    count: u32,
    base: u32,
}

/// The use of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PortUser {
    /// The connection of this index uses the port.
    Conn(u32),
    /// The last connection was closed with FINs on both sides.
    Ended,
    /// No connection uses the port.
    Free,
}

/// All local addresses.
pub(super) struct Locals {
    list: Vec<Local>,
    v4: Vec<AddressRange<u32>>,
    v6: Vec<AddressRange<u128>>,
    /// An entry for each port of each address. The entries of one port are adjacent, because addresses are
    /// used in turn.
    table: Vec<u32>,
    /// Ports of each address, a power of two.
    ports: u32,
}

/// Returns the number of ports of each source address if there are `addresses` of them.
pub fn ports_of_address(addresses: u64) -> u32 {
    PORTS_MAX.min(1 << (u64::from(TABLE_MAX) / addresses.max(1)).max(1).ilog2())
}

impl Locals {
    /// Creates the table for at most [`LOCALS_MAX`] addresses. Duplicates count once.
    pub fn new(addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        let mut addresses: Vec<IpAddr> = addresses.into_iter().collect();
        addresses.sort_unstable();
        addresses.dedup();
        let (mut v4, mut v6): (Vec<AddressRange<u32>>, Vec<AddressRange<u128>>) = (Vec::new(), Vec::new());
        for (number, address) in (0..).zip(&addresses) {
            match address {
                IpAddr::V4(a) => match v4.last_mut() {
                    Some(run) if run.first.checked_add(run.count) == Some(a.to_bits()) => run.count += 1,
                    _ => v4.push(AddressRange { first: a.to_bits(), count: 1, base: number }),
                },
                IpAddr::V6(a) => match v6.last_mut() {
                    Some(run) if run.first.checked_add(run.count.into()) == Some(a.to_bits()) => {
                        run.count += 1
                    }
                    _ => v6.push(AddressRange { first: a.to_bits(), count: 1, base: number }),
                },
            }
        }
        let count = addresses.len().max(1) as u32;
        let ports = ports_of_address(count.into());
        let list = addresses.into_iter().map(|address| Local { address, sum: sum_of(address), next: 0 });
        Self { list: list.collect(), v4, v6, table: vec![VACANT; (count * ports) as usize], ports }
    }

    /// Starts the ring of each address at position `index`, modulo its size. A new process would otherwise
    /// begin with the ports of a former one, and wait one second at each of them if the server still has
    /// their connections.
    pub fn start_ports_at(&mut self, index: u32) {
        for local in &mut self.list {
            local.next = index & (self.ports - 1);
        }
    }

    /// Returns the address of this index.
    #[inline]
    pub fn get(&self, number: u16) -> &Local {
        &self.list[usize::from(number)]
    }

    /// Returns all addresses.
    pub fn all(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.list.iter().map(|local| local.address)
    }

    /// Returns the index of an address, or `None` if it is not local.
    #[inline]
    pub fn number(&self, address: IpAddr) -> Option<u16> {
        match address {
            IpAddr::V4(address) => self.number_v4(address),
            IpAddr::V6(address) => self.number_v6(address),
        }
    }

    /// Returns the index of an IPv4 address.
    #[inline]
    pub fn number_v4(&self, address: Ipv4Addr) -> Option<u16> {
        let distance = |run: &AddressRange<u32>| address.to_bits().wrapping_sub(run.first);
        let run = self.v4.iter().find(|run| distance(run) < run.count)?;
        Some((run.base + distance(run)) as u16)
    }

    /// Returns the index of an IPv6 address.
    #[inline]
    pub fn number_v6(&self, address: Ipv6Addr) -> Option<u16> {
        let distance = |run: &AddressRange<u128>| address.to_bits().wrapping_sub(run.first);
        let run = self.v6.iter().find(|run| distance(run) < run.count.into())?;
        Some((run.base + distance(run) as u32) as u16)
    }

    #[inline]
    fn table_index(&self, number: u16, port: u16) -> Option<usize> {
        let index = u32::from(port.wrapping_sub(PORT_MIN));
        (index < self.ports).then(|| index as usize * self.list.len() + usize::from(number))
    }

    /// Returns the use of a port.
    #[inline]
    pub fn port_user(&self, number: u16, port: u16) -> PortUser {
        let entry = self.table_index(number, port).and_then(|index| self.table.get(index));
        match entry.copied().unwrap_or(VACANT) {
            VACANT => PortUser::Free,
            ENDED => PortUser::Ended,
            entry => PortUser::Conn(entry - FIRST),
        }
    }

    /// Allocates the next free port of an address for a connection. Returns `None` if no port is free.
    #[inline]
    pub fn allocate_port(&mut self, number: u16, conn: u32) -> Option<u16> {
        let count = self.list.len();
        for _ in 0..self.ports {
            let local = &mut self.list[usize::from(number)];
            let index = local.next;
            local.next = (index + 1) & (self.ports - 1);
            let entry = &mut self.table[index as usize * count + usize::from(number)];
            if *entry < FIRST {
                *entry = conn + FIRST;
                return Some(PORT_MIN + index as u16);
            }
        }
        None
    }

    /// Releases a port. `in_order` says whether its connection was closed with FINs on both sides.
    #[inline]
    pub fn release_port(&mut self, number: u16, port: u16, in_order: bool) {
        if let Some(index) = self.table_index(number, port) {
            self.table[index] = if in_order { ENDED } else { VACANT };
        }
    }
}

/// Returns the ones' complement sum of an address.
pub(super) fn sum_of(address: IpAddr) -> Sum {
    match address {
        IpAddr::V4(address) => Sum::of(&address.octets()),
        IpAddr::V6(address) => Sum::of(&address.octets()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn addresses_of_both_families_have_indices() {
        let texts = ["10.0.0.9", "fd00::1", "10.0.0.1", "10.0.0.2", "255.255.255.255", "fd00::2", "10.0.0.1"];
        let locals = Locals::new(texts.map(address));
        for text in texts {
            let number = locals.number(address(text)).unwrap();
            assert_eq!(locals.get(number).address, address(text));
        }
        for text in ["10.0.0.0", "10.0.0.3", "10.0.0.8", "0.0.0.0", "fd00::", "fd00::3", "fd01::1", "::"] {
            assert_eq!(locals.number(address(text)), None, "{text}");
        }
    }

    #[test]
    fn a_port_is_reused_after_all_others() {
        let mut locals = Locals::new([address("10.0.0.1"), address("10.0.0.2")]);
        let first = locals.allocate_port(1, 7).unwrap();
        assert_eq!(locals.port_user(1, first), PortUser::Conn(7));
        assert_eq!(locals.port_user(0, first), PortUser::Free);
        locals.release_port(1, first, true);
        assert_eq!(locals.port_user(1, first), PortUser::Ended);
        let mut others = 0;
        while locals.allocate_port(1, 8).unwrap() != first {
            others += 1;
        }
        assert_eq!(others, PORTS_MAX - 1);
        assert_eq!(locals.allocate_port(1, 9), None, "all are taken");
        assert!(locals.allocate_port(0, 9).is_some(), "the other address has its own");
        locals.release_port(1, 40_000, false);
        assert_eq!(locals.allocate_port(1, 9), Some(40_000));
        for port in [0, 80, 32_767] {
            assert_eq!(locals.port_user(1, port), PortUser::Free);
        }
    }

    #[test]
    fn any_start_port_uses_all_ports() {
        let mut locals = Locals::new([address("10.0.0.1")]);
        locals.start_ports_at(u32::MAX);
        assert_eq!(locals.allocate_port(0, 1), Some(u16::MAX));
        assert_eq!(locals.allocate_port(0, 2), Some(PORT_MIN));
        let rest = core::iter::from_fn(|| locals.allocate_port(0, 3)).count();
        assert_eq!(rest, PORTS_MAX as usize - 2);
    }

    #[test]
    fn many_addresses_share_the_table() {
        let all = (0..10_000u32).map(|n| Ipv4Addr::from_bits(0x0a00_0000 + n).into());
        let mut locals = Locals::new(all);
        assert_eq!(locals.ports, 4096);
        let port = locals.allocate_port(9_999, 3).unwrap();
        assert_eq!(locals.port_user(9_999, port), PortUser::Conn(3));
        assert_eq!(locals.port_user(9_999, PORT_MIN + 4096), PortUser::Free);
    }
}
