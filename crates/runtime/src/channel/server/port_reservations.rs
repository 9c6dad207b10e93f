//! Addresses that programs reserved with `bind` before they listen or connect. The rules are those of Linux
//! (`inet_csk_bind_conflict`): reservations, listeners, open connections and connections in TIME-WAIT prevent
//! a bind.

use super::ChannelServer;
use crate::channel::control::{AddressSharing, Reservation, ReserveError};
use crate::context::Context;
use core::net::{IpAddr, SocketAddr};
use core::ops::RangeInclusive;
use ginnel_stack::options::PortSharing;
use serde::{Deserialize, Serialize};

/// One reservation.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct PortReservation {
    address: SocketAddr,
    sharing: AddressSharing,
    /// The client that made it: see [`owner_id`].
    owner: u32,
}

/// Parameters of a reservation that the stack determines.
#[derive(Clone, Debug)]
pub(super) struct PortChoice {
    /// The range from which a port is chosen for port 0.
    pub ephemeral: RangeInclusive<u16>,
    /// Offset in the range at which the search begins.
    pub start: u64,
    /// Limit of the number of reservations.
    pub max: usize,
}

/// Sockets without a reservation that may prevent one.
pub(super) struct OtherSockets<'a> {
    /// Addresses on which there are listeners.
    pub listeners: &'a [(SocketAddr, AddressSharing)],
    /// Returns whether a connection prevents a bind.
    pub connections_prevent: &'a dyn Fn(SocketAddr, AddressSharing) -> bool,
}

/// Returns the owner ID of a client of a domain.
pub(super) fn owner_id(domain: usize, client: usize) -> u32 {
    // Cannot truncate: there are at most 64 domains, and client numbers have 16 bits.
    (domain as u32) << 16 | client as u32
}

/// All reservations on a stack's shard. Binding is rare, so they are searched linearly.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct PortReservations {
    entries: Vec<Option<PortReservation>>,
}

impl PortReservations {
    /// Reserves an address. `others` are the sockets that have no reservation.
    pub fn reserve(
        &mut self,
        address: SocketAddr,
        sharing: AddressSharing,
        owner: u32,
        choice: &PortChoice,
        others: &OtherSockets<'_>,
    ) -> Result<Reservation, ReserveError> {
        let PortChoice { ephemeral, start, max } = choice;
        let free = |ports: &Self, address, sharing| !ports.has_conflict(address, sharing, others);
        let address = if address.port() != 0 {
            Some(address).filter(|address| free(self, *address, sharing)).ok_or(ReserveError::InUse)?
        } else {
            let count = u64::from(ephemeral.end() - ephemeral.start()) + 1;
            let ports = (0..count).map(|n| ephemeral.start() + ((start + n) % count) as u16);
            let mut ports = ports.map(|port| SocketAddr::new(address.ip(), port));
            // A port that was chosen by the stack is not shared.
            let unshared = AddressSharing { reuse_address: false, reuse_port: false, ..sharing };
            ports.find(|address| free(self, *address, unshared)).ok_or(ReserveError::InUse)?
        };
        let entry = Some(PortReservation { address, sharing, owner });
        let number = match self.entries.iter().position(Option::is_none) {
            Some(number) => number,
            None if self.entries.len() < *max => {
                self.entries.push(None);
                self.entries.len() - 1
            }
            None => return Err(ReserveError::TooMany),
        };
        self.entries[number] = entry;
        Ok(Reservation { number: number as u32, address })
    }

    fn has_conflict(&self, address: SocketAddr, sharing: AddressSharing, others: &OtherSockets<'_>) -> bool {
        // Covers listeners whose reservation was released with the process that made it.
        let listeners = others.listeners.iter().map(|(at, other)| (*at, *other, true));
        let reserved = self.entries.iter().flatten().map(|other| (other.address, other.sharing, false));
        listeners.chain(reserved).any(|(at, other, listens)| {
            let both_reuse = sharing.reuse_address && other.reuse_address && !listens;
            let both_spread = sharing.reuse_port && other.reuse_port && sharing.uid == other.uid;
            !both_reuse
                && !both_spread
                && at.port() == address.port()
                && overlap(address.ip(), sharing.v6only, at.ip(), other.v6only)
        }) || (others.connections_prevent)(address, sharing)
    }

    /// Gives up a reservation, if this owner made it.
    pub fn release(&mut self, number: u32, owner: u32) {
        if let Some(entry) = self.entries.get_mut(number as usize)
            && entry.is_some_and(|entry| entry.owner == owner)
        {
            *entry = None;
        }
    }

    /// Gives up all reservations of an owner that is gone.
    pub fn release_all(&mut self, owner: u32) {
        for entry in self.entries.iter_mut().filter(|entry| entry.is_some_and(|e| e.owner == owner)) {
            *entry = None;
        }
    }
}

impl ChannelServer {
    pub(super) fn reserve(
        &mut self,
        cx: &mut Context<'_>,
        owner: u32,
        at: SocketAddr,
        sharing: AddressSharing,
    ) -> Result<Reservation, ReserveError> {
        if !at.ip().is_unspecified() && !cx.is_local(at.ip()) {
            return Err(ReserveError::NotAvailable);
        }
        let sockets = self.config.sockets_max as usize;
        let choice = PortChoice {
            ephemeral: cx.local_ports(),
            start: cx.random_u64() >> 1,
            max: sockets + self.domains.len() * self.config.listeners_max as usize,
        };
        let listeners = self.domains.iter().flatten().flat_map(|domain| domain.listeners.iter().flatten());
        let listening: Vec<(SocketAddr, AddressSharing)> =
            listeners.map(|listener| (listener.address, listener.sharing)).collect();
        let connections_prevent = |at: SocketAddr, sharing: AddressSharing| {
            let AddressSharing { reuse_address, reuse_port, .. } = sharing;
            let options = PortSharing { reuse_address, reuse_port };
            cx.prevents_bind(at, sharing.v6only, options)
        };
        let others = OtherSockets { listeners: &listening, connections_prevent: &connections_prevent };
        self.ports.reserve(at, sharing, owner, &choice, &others)
    }
}

/// Returns whether two local addresses overlap.
fn overlap(first: IpAddr, one_v6_only: bool, other: IpAddr, other_v6_only: bool) -> bool {
    match (first, other) {
        (IpAddr::V6(v6), IpAddr::V4(_)) => v6.is_unspecified() && !one_v6_only,
        (IpAddr::V4(_), IpAddr::V6(v6)) => v6.is_unspecified() && !other_v6_only,
        (first, other) => first == other || first.is_unspecified() || other.is_unspecified(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: AddressSharing =
        AddressSharing { reuse_address: false, reuse_port: false, uid: 0, v6only: false };
    const REUSE: AddressSharing = AddressSharing { reuse_address: true, ..PLAIN };
    const SPREAD: AddressSharing = AddressSharing { reuse_port: true, ..PLAIN };
    const V6_ONLY: AddressSharing = AddressSharing { v6only: true, ..PLAIN };
    const ANOTHER: AddressSharing = AddressSharing { uid: 1, ..SPREAD };

    /// Returns listeners, and no connections.
    fn others(listeners: &[(SocketAddr, AddressSharing)]) -> OtherSockets<'_> {
        OtherSockets { listeners, connections_prevent: &|_, _| false }
    }

    fn reserve(
        ports: &mut PortReservations,
        address: &str,
        sharing: AddressSharing,
    ) -> Result<Reservation, ReserveError> {
        let address = address.parse().unwrap();
        let choice = PortChoice { ephemeral: 1000..=1002, start: 1, max: 8 };
        ports.reserve(address, sharing, 1, &choice, &others(&[]))
    }

    #[test]
    fn addresses_are_shared_as_on_linux() {
        for (first, with, second, and, fits) in [
            ("10.0.0.1:80", PLAIN, "10.0.0.1:80", PLAIN, false),
            ("10.0.0.1:80", PLAIN, "10.0.0.2:80", PLAIN, true),
            ("10.0.0.1:80", PLAIN, "0.0.0.0:80", PLAIN, false),
            ("10.0.0.1:80", REUSE, "0.0.0.0:80", REUSE, true),
            ("10.0.0.1:80", REUSE, "0.0.0.0:80", PLAIN, false),
            ("10.0.0.1:81", SPREAD, "10.0.0.1:81", SPREAD, true),
            ("10.0.0.1:80", SPREAD, "10.0.0.1:80", PLAIN, false),
            ("10.0.0.1:80", SPREAD, "10.0.0.1:80", ANOTHER, false),
            ("10.0.0.1:80", ANOTHER, "0.0.0.0:80", ANOTHER, true),
            ("[::]:80", PLAIN, "10.0.0.1:80", PLAIN, false),
            ("[::]:80", V6_ONLY, "10.0.0.1:80", PLAIN, true),
            ("[2001:db8::1]:80", PLAIN, "0.0.0.0:80", PLAIN, true),
        ] {
            let mut ports = PortReservations::default();
            reserve(&mut ports, first, with).unwrap();
            let second_result = reserve(&mut ports, second, and);
            assert_eq!(second_result.is_ok(), fits, "{first} {with:?}, {second} {and:?}");
        }
    }

    #[test]
    fn listening_address_cannot_be_reserved_unless_shared() {
        let mut ports = PortReservations::default();
        let choice = PortChoice { ephemeral: 1000..=1002, start: 1, max: 8 };
        let listening = [
            ("0.0.0.0:81".parse().unwrap(), SPREAD),
            ("10.0.0.1:83".parse().unwrap(), REUSE),
            ("[::]:84".parse().unwrap(), V6_ONLY),
        ];
        let mut reserve =
            |at: &str, sharing| ports.reserve(at.parse().unwrap(), sharing, 1, &choice, &others(&listening));
        assert_eq!(reserve("10.0.0.1:81", REUSE), Err(ReserveError::InUse));
        assert!(reserve("10.0.0.1:82", REUSE).is_ok());
        assert!(reserve("0.0.0.0:81", SPREAD).is_ok());
        assert_eq!(reserve("0.0.0.0:81", ANOTHER), Err(ReserveError::InUse));
        assert_eq!(reserve("10.0.0.1:83", SPREAD), Err(ReserveError::InUse), "the listener does not share");
        assert!(reserve("10.0.0.1:84", PLAIN).is_ok());
    }

    #[test]
    fn chosen_port_is_exclusive_and_reusable() {
        let mut ports = PortReservations::default();
        let chosen: Vec<u16> =
            (0..3).map(|_| reserve(&mut ports, "0.0.0.0:0", REUSE).unwrap().address.port()).collect();
        assert_eq!(chosen, [1001, 1002, 1000]);
        assert_eq!(reserve(&mut ports, "0.0.0.0:0", REUSE), Err(ReserveError::InUse));
        // Of another owner.
        ports.release(1, 7);
        assert_eq!(reserve(&mut ports, "0.0.0.0:0", REUSE), Err(ReserveError::InUse));
        ports.release(1, 1);
        assert_eq!(reserve(&mut ports, "0.0.0.0:0", REUSE).unwrap().address.port(), 1002);
        ports.release_all(1);
        assert!(reserve(&mut ports, "0.0.0.0:1000", PLAIN).is_ok());
    }

    #[test]
    fn reservations_are_limited() {
        let mut ports = PortReservations::default();
        for port in 1..=8 {
            reserve(&mut ports, &format!("10.0.0.1:{port}"), PLAIN).unwrap();
        }
        assert_eq!(reserve(&mut ports, "10.0.0.1:9", PLAIN), Err(ReserveError::TooMany));
        ports.release(3, 1);
        assert_eq!(reserve(&mut ports, "10.0.0.1:9", PLAIN).map(|r| r.number), Ok(3));
    }
}
