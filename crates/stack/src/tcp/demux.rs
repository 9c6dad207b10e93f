//! Finds the connection that a segment belongs to.

use super::conn::{ConnTable, Flags, Tcb};
use super::time_wait::TimeWaitTable;
use crate::flow_table::FlowTable;
use crate::ip::rx_fast_path::peek_flow_key;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use serde::{Deserialize, Serialize};

/// Marks an index in the flow table as one of the TIME-WAIT table.
pub(crate) const TIME_WAIT_BIT: u32 = 1 << 31;

/// The address of one end: an IPv6 address as a number, or an IPv4 address as the IPv6 address it is mapped
/// to (RFC 4291 §2.5.5.2), which no packet has. So both families are compared and hashed without a branch.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HostAddr(u128);

/// The mapped prefix: bits 32 to 127 of mapped addresses; the lower 32 bits are 0.
const MAPPED: u128 = 0xffff_0000_0000;

impl HostAddr {
    #[inline(always)]
    pub const fn v4(address: u32) -> Self {
        Self(MAPPED | address as u128)
    }

    #[inline(always)]
    pub const fn v6(address: Ipv6Addr) -> Self {
        Self(address.to_bits())
    }

    #[inline(always)]
    pub const fn is_v4(self) -> bool {
        self.0 >> 32 == MAPPED >> 32
    }

    /// Returns an IPv4 address as a number, or the lowest 32 bits of an IPv6 address.
    #[inline(always)]
    pub const fn v4_bits(self) -> u32 {
        self.0 as u32
    }

    /// Returns both halves of the number.
    #[inline(always)]
    pub const fn halves(self) -> (u64, u64) {
        ((self.0 >> 64) as u64, self.0 as u64)
    }

    /// Returns the number in words of 32 bits, the lowest first.
    #[inline(always)]
    pub const fn words(self) -> [u32; 4] {
        [self.0 as u32, (self.0 >> 32) as u32, (self.0 >> 64) as u32, (self.0 >> 96) as u32]
    }

    /// Returns the address of the words of its number.
    pub const fn from_words([a, b, c, d]: [u32; 4]) -> Self {
        Self(a as u128 | (b as u128) << 32 | (c as u128) << 64 | (d as u128) << 96)
    }

    #[inline]
    pub const fn ip(self) -> IpAddr {
        if self.is_v4() {
            IpAddr::V4(Ipv4Addr::from_bits(self.v4_bits()))
        } else {
            IpAddr::V6(Ipv6Addr::from_bits(self.0))
        }
    }
}

impl From<IpAddr> for HostAddr {
    #[inline]
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Self::v4(address.to_bits()),
            IpAddr::V6(address) => Self::v6(address),
        }
    }
}

impl core::fmt::Debug for HostAddr {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.ip().fmt(f)
    }
}

/// A value that the flow table never has. It has [`TIME_WAIT_BIT`], so that one test identifies a connection.
pub(crate) const NO_HINT: u32 = u32::MAX;

/// Both ends of a connection, as segments from the peer have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowKey {
    pub(crate) remote: HostAddr,
    pub(crate) local: HostAddr,
    pub(crate) remote_port: u16,
    pub(crate) local_port: u16,
}

impl FlowKey {
    /// Returns the flow of a frame that may carry a TCP segment in an untagged packet without IP options;
    /// `None` for other frames. No more is checked than is needed to find the fields.
    #[inline(always)]
    pub fn of_frame(frame: &[u8]) -> Option<Self> {
        peek_flow_key(frame)
    }

    /// Returns the address and the port of the peer.
    pub fn remote_addr(&self) -> SocketAddr {
        SocketAddr::new(self.remote.ip(), self.remote_port)
    }

    /// Returns the local address and port.
    pub fn local_addr(&self) -> SocketAddr {
        SocketAddr::new(self.local.ip(), self.local_port)
    }

    /// Returns both ports as one number.
    #[inline(always)]
    pub(crate) const fn ports(&self) -> u32 {
        (self.remote_port as u32) << 16 | self.local_port as u32
    }
}

/// IPv6 addresses of connections: they are too large for the TCB, which stores an index instead.
#[derive(Default)]
pub(crate) struct AddressPool {
    pairs: Vec<(HostAddr, HostAddr)>,
    free: Vec<u32>,
}

impl AddressPool {
    /// Stores the addresses of a connection. Returns the remote and the local address, or an index and 0, and
    /// whether they are IPv6.
    #[inline]
    pub fn store(&mut self, key: &FlowKey) -> (u32, u32, bool) {
        if key.remote.is_v4() {
            (key.remote.v4_bits(), key.local.v4_bits(), false)
        } else {
            self.store_v6(key)
        }
    }

    #[inline(never)]
    fn store_v6(&mut self, key: &FlowKey) -> (u32, u32, bool) {
        let pair = (key.remote, key.local);
        let index = match self.free.pop() {
            Some(index) => {
                self.pairs[index as usize] = pair;
                index
            }
            None => {
                self.pairs.push(pair);
                (self.pairs.len() - 1) as u32
            }
        };
        (index, 0, true)
    }

    /// Returns the bytes that are stored for a connection.
    pub const fn bytes_of(v6: bool) -> usize {
        if v6 { size_of::<(HostAddr, HostAddr)>() } else { 0 }
    }

    #[inline(never)]
    fn release_v6(&mut self, index: u32) {
        self.free.push(index);
    }

    /// Releases what `store` has allocated.
    #[inline]
    pub fn release(&mut self, v6: bool, remote_ip: u32) {
        if v6 {
            self.release_v6(remote_ip);
        }
    }

    /// Returns the number of address pairs stored and not released, for invariant checks.
    pub fn in_use(&self) -> usize {
        self.pairs.len() - self.free.len()
    }

    #[inline(always)]
    pub fn matches(&self, v6: bool, remote_ip: u32, local_ip: u32, key: &FlowKey) -> bool {
        if v6 {
            self.pairs[remote_ip as usize] == (key.remote, key.local)
        } else {
            key.remote == HostAddr::v4(remote_ip) && key.local == HostAddr::v4(local_ip)
        }
    }

    #[inline(always)]
    pub fn key(&self, v6: bool, remote_ip: u32, local_ip: u32, remote_port: u16, local_port: u16) -> FlowKey {
        let (remote, local) = if v6 {
            self.pairs[remote_ip as usize]
        } else {
            (HostAddr::v4(remote_ip), HostAddr::v4(local_ip))
        };
        FlowKey { remote, local, remote_port, local_port }
    }
}

/// An entry of the flow table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlowEntry {
    Connection(u32),
    TimeWait(u32),
}

/// Looks up a connection or TIME-WAIT entry by its key.
#[inline]
pub(crate) fn lookup_flow(
    flows: &FlowTable,
    conns: &ConnTable,
    time_wait: &TimeWaitTable,
    addresses: &AddressPool,
    hash: u32,
    key: &FlowKey,
) -> Option<FlowEntry> {
    let value = flows.find(hash, |value| {
        if value & TIME_WAIT_BIT != 0 {
            time_wait.get(value & !TIME_WAIT_BIT).matches(key, addresses)
        } else {
            tcb_matches(&conns[value], addresses, key)
        }
    })?;
    Some(if value & TIME_WAIT_BIT != 0 {
        FlowEntry::TimeWait(value & !TIME_WAIT_BIT)
    } else {
        FlowEntry::Connection(value)
    })
}

#[inline(always)]
pub(crate) fn tcb_matches(c: &Tcb, addresses: &AddressPool, key: &FlowKey) -> bool {
    c.remote_port == key.remote_port
        && c.local_port == key.local_port
        && addresses.matches(c.has(Flags::V6), c.remote_ip, c.local_ip, key)
}
