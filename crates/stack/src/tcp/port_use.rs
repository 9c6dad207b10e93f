//! Counts the connections of each local port, so that `bind` can refuse a port as Linux does
//! (`inet_bind_conflict`) without a search through connections.

use super::demux::{FlowKey, HostAddr};
use core::net::IpAddr;
use serde::{Deserialize, Serialize};

/// Options by which a connection shares its local port with other sockets that are bound. A connection
/// has these options of the listener that accepted it, or of the socket that opened it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PortSharing {
    /// The socket has `SO_REUSEADDR`.
    pub reuse_address: bool,
    /// The socket has `SO_REUSEPORT`.
    pub reuse_port: bool,
}

impl PortSharing {
    /// Returns the options as two bits.
    #[inline(always)]
    pub(crate) const fn bits(self) -> u8 {
        self.reuse_address as u8 | (self.reuse_port as u8) << 1
    }

    /// Returns the options of a listener as [`SocketOptions`](crate::options::SocketOptions) has them, with
    /// `SO_REUSEADDR` reversed: most listeners have it, so that their connections have the default profile.
    /// Converts in both directions.
    #[inline(always)]
    pub const fn of_listener(self) -> Self {
        Self { reuse_address: !self.reuse_address, ..self }
    }

    /// Returns the options of two bits; other bits are ignored.
    #[inline(always)]
    pub(crate) const fn from_bits(bits: u8) -> Self {
        Self { reuse_address: bits & 1 != 0, reuse_port: bits & 2 != 0 }
    }
}

/// The connections of a port: the words of their local address, and their numbers by [`PortSharing::bits`].
type PortEntry = [u32; 8];

/// Words of an entry that are the address.
const ADDRESS_WORDS: usize = 4;

/// Address of an entry whose connections have several local addresses. No connection has this multicast
/// address.
const SEVERAL: [u32; ADDRESS_WORDS] = [u32::MAX; ADDRESS_WORDS];

/// The connections of all ports, including entries in TIME-WAIT.
pub(crate) struct PortUse {
    /// One entry for each port. Pages are touched when the first connection of a port is created.
    ports: Box<[PortEntry; 1 << 16]>,
}

impl PortUse {
    pub fn new() -> Self {
        let ports = vec![[0; 8]; 1 << 16].into_boxed_slice();
        Self { ports: ports.try_into().unwrap_or_else(|_| unreachable!("it has this length")) }
    }

    /// Counts a connection.
    #[inline(always)]
    pub fn add(&mut self, key: &FlowKey, sharing: PortSharing) {
        let entry = &mut self.ports[usize::from(key.local_port)];
        if address_of(entry) != key.local {
            Self::add_address(entry, key.local);
        }
        *count_of(entry, sharing.bits()) += 1;
    }

    /// Records a local address that differs from the recorded one.
    #[inline(never)]
    fn add_address(entry: &mut PortEntry, local: HostAddr) {
        let is_unused = entry[ADDRESS_WORDS..] == [0; 4];
        entry[..ADDRESS_WORDS].copy_from_slice(&if is_unused { local.words() } else { SEVERAL });
    }

    /// Removes a connection that was counted with options of these [bits](PortSharing::bits).
    #[inline(always)]
    pub fn remove(&mut self, local_port: u16, bits: u8) {
        *count_of(&mut self.ports[usize::from(local_port)], bits) -= 1;
    }

    /// Returns whether a connection prevents a socket with these options from being bound to an address. If
    /// the connections of the port have several local addresses, each of them counts as the one that is asked
    /// for.
    pub fn prevents_bind(&self, ip: IpAddr, port: u16, v6_only: bool, sharing: PortSharing) -> bool {
        let entry = &self.ports[usize::from(port)];
        let address = address_of(entry);
        let is_used = |bits: &u8| entry[ADDRESS_WORDS + usize::from(*bits)] != 0;
        // Two sockets share a port if both have one of the options.
        let conflicts = (0..4).filter(|bits| bits & sharing.bits() == 0).any(|bits| is_used(&bits));
        conflicts && (address.words() == SEVERAL || overlaps(ip, v6_only, address))
    }
}

/// Returns the recorded local address of an entry.
#[inline(always)]
const fn address_of(&[a, b, c, d, ..]: &PortEntry) -> HostAddr {
    HostAddr::from_words([a, b, c, d])
}

/// Returns the number of connections of an entry with options of these bits.
#[inline(always)]
fn count_of(entry: &mut PortEntry, bits: u8) -> &mut u32 {
    &mut entry[ADDRESS_WORDS + usize::from(bits & 3)]
}

/// Returns whether an address that a socket is bound to covers the local address of a connection.
fn overlaps(ip: IpAddr, v6_only: bool, local: HostAddr) -> bool {
    match ip {
        _ if !ip.is_unspecified() => HostAddr::from(ip) == local,
        IpAddr::V4(_) => local.is_v4(),
        IpAddr::V6(_) => !(v6_only && local.is_v4()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: PortSharing = PortSharing::from_bits(0);
    const ADDRESS: PortSharing = PortSharing::from_bits(1);
    const PORT: PortSharing = PortSharing::from_bits(2);

    fn key(local: &str) -> FlowKey {
        let local: core::net::SocketAddr = local.parse().unwrap();
        let remote = local.ip().into();
        FlowKey { remote, local: local.ip().into(), remote_port: 9, local_port: local.port() }
    }

    #[test]
    fn connections_prevent_binding_their_address() {
        let ask = |ports: &PortUse, ip: &str, sharing| {
            [false, true].map(|v6_only| ports.prevents_bind(ip.parse().unwrap(), 80, v6_only, sharing))
        };
        let mut ports = PortUse::new();
        assert_eq!(ask(&ports, "0.0.0.0", NONE), [false; 2]);
        ports.add(&key("10.0.0.1:80"), NONE);
        ports.add(&key("10.0.0.9:81"), NONE);
        for (ip, expected) in [
            ("10.0.0.1", [true; 2]),
            ("10.0.0.2", [false; 2]),
            ("0.0.0.0", [true; 2]),
            ("::", [true, false]),
            ("2001:db8::1", [false; 2]),
        ] {
            assert_eq!(ask(&ports, ip, NONE), expected, "{ip}");
            assert_eq!(ask(&ports, ip, PortSharing::from_bits(3)), expected, "{ip}");
        }
        ports.remove(80, NONE.bits());
        assert_eq!(ask(&ports, "10.0.0.1", NONE), [false; 2]);
        // The address of the next connection replaces that of the last one.
        ports.add(&key("[2001:db8::1]:80"), NONE);
        assert_eq!(ask(&ports, "10.0.0.1", NONE), [false; 2]);
        assert_eq!(ask(&ports, "0.0.0.0", NONE), [false; 2]);
        assert_eq!(ask(&ports, "::", NONE), [true; 2]);
    }

    #[test]
    fn both_need_an_option_to_share() {
        let mut ports = PortUse::new();
        let ip = "10.0.0.1".parse().unwrap();
        for (connection, binding, prevents) in [
            (NONE, ADDRESS, true),
            (ADDRESS, NONE, true),
            (ADDRESS, PORT, true),
            (ADDRESS, ADDRESS, false),
            (PORT, PORT, false),
            (PortSharing::from_bits(3), PORT, false),
        ] {
            ports.add(&key("10.0.0.1:80"), connection);
            let result = ports.prevents_bind(ip, 80, false, binding);
            assert_eq!(result, prevents, "{connection:?} {binding:?}");
            ports.remove(80, connection.bits());
        }
    }

    #[test]
    fn several_addresses_count_as_any_until_unused() {
        let mut ports = PortUse::new();
        let ask = |ports: &PortUse| ports.prevents_bind("10.0.0.3".parse().unwrap(), 80, false, NONE);
        ports.add(&key("10.0.0.1:80"), NONE);
        ports.add(&key("10.0.0.2:80"), ADDRESS);
        assert!(ask(&ports));
        ports.remove(80, NONE.bits());
        assert!(ask(&ports));
        ports.remove(80, ADDRESS.bits());
        ports.add(&key("10.0.0.2:80"), ADDRESS);
        assert!(!ask(&ports));
    }
}
