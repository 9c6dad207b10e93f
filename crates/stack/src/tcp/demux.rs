//! Which connection a segment belongs to.

use super::conn::{ConnTable, Flags, Tcb};
use super::time_wait::TimeWaitTable;
use crate::flow_table::FlowTable;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Marks an index in the flow table as one of the TIME_WAIT table.
pub(crate) const TIME_WAIT_BIT: u32 = 1 << 31;

/// Both ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlowKey {
    pub remote: IpAddr,
    pub local: IpAddr,
    pub remote_port: u16,
    pub local_port: u16,
}

impl FlowKey {
    pub fn remote_addr(&self) -> SocketAddr {
        SocketAddr::new(self.remote, self.remote_port)
    }

    pub fn local_addr(&self) -> SocketAddr {
        SocketAddr::new(self.local, self.local_port)
    }
}

/// IPv6 addresses of connections: too large for the connection itself, which holds an index.
#[derive(Default)]
pub(crate) struct AddressPool {
    pairs: Vec<(Ipv6Addr, Ipv6Addr)>,
    free: Vec<u32>,
}

impl AddressPool {
    /// What a connection stores for its addresses: (remote, local, is IPv6).
    pub fn store(&mut self, key: &FlowKey) -> (u32, u32, bool) {
        match (key.remote, key.local) {
            (IpAddr::V4(r), IpAddr::V4(l)) => (r.to_bits(), l.to_bits(), false),
            (remote, local) => {
                let pair = (to_v6(remote), to_v6(local));
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
        }
    }

    /// Gives back what `store` took.
    pub fn release(&mut self, v6: bool, remote_ip: u32) {
        if v6 {
            self.free.push(remote_ip);
        }
    }

    /// Pairs stored and not released, for invariant checks.
    pub fn in_use(&self) -> usize {
        self.pairs.len() - self.free.len()
    }

    #[inline]
    pub fn matches(&self, v6: bool, remote_ip: u32, local_ip: u32, key: &FlowKey) -> bool {
        match (key.remote, key.local) {
            (IpAddr::V4(r), IpAddr::V4(l)) => !v6 && remote_ip == r.to_bits() && local_ip == l.to_bits(),
            (IpAddr::V6(r), IpAddr::V6(l)) => v6 && self.pairs[remote_ip as usize] == (r, l),
            _ => false,
        }
    }

    pub fn key(&self, v6: bool, remote_ip: u32, local_ip: u32, remote_port: u16, local_port: u16) -> FlowKey {
        let (remote, local) = if v6 {
            let (r, l) = self.pairs[remote_ip as usize];
            (IpAddr::V6(r), IpAddr::V6(l))
        } else {
            (IpAddr::V4(Ipv4Addr::from_bits(remote_ip)), IpAddr::V4(Ipv4Addr::from_bits(local_ip)))
        };
        FlowKey { remote, local, remote_port, local_port }
    }
}

fn to_v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(a) => a.to_ipv6_mapped(),
        IpAddr::V6(a) => a,
    }
}

/// What the flow table knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Connection(u32),
    TimeWait(u32),
}

/// Looks up a connection by its key.
#[inline]
pub(crate) fn find(
    flows: &FlowTable,
    conns: &ConnTable,
    time_wait: &TimeWaitTable,
    addresses: &AddressPool,
    hash: u32,
    key: &FlowKey,
) -> Option<Found> {
    let value = flows.find(hash, |value| {
        if value & TIME_WAIT_BIT != 0 {
            time_wait.get(value & !TIME_WAIT_BIT).matches(key, addresses)
        } else {
            tcb_matches(&conns[value], addresses, key)
        }
    })?;
    Some(if value & TIME_WAIT_BIT != 0 {
        Found::TimeWait(value & !TIME_WAIT_BIT)
    } else {
        Found::Connection(value)
    })
}

#[inline]
fn tcb_matches(c: &Tcb, addresses: &AddressPool, key: &FlowKey) -> bool {
    c.remote_port == key.remote_port
        && c.local_port == key.local_port
        && addresses.matches(c.has(Flags::V6), c.remote_ip, c.local_ip, key)
}
