//! The registry of listeners and UDP ports of all shards.
//!
//! `listen` and `bind` must fail at once if an address is in use, so asynchronous messages are not enough. A
//! shard changes the registry under its lock, raises the version, and wakes the others. Each shard compares
//! the version with the last one that it has applied once per turn, and applies the whole state if it
//! differs, so no change can be lost or applied twice. The lock is taken when a socket listens, binds or
//! closes; never for a packet.

use core::net::SocketAddr;
use core::sync::atomic::{AtomicU64, Ordering};
use ginnel_stack::link::ShardGroup;
use ginnel_stack::multicast::SourceFilter;
use ginnel_stack::options::ListenOptions;
use ginnel_stack::steering::ephemeral_udp::EphemeralUdpPorts;
use ginnel_stack::steering::udp::{UdpBinding, UdpPortTable};
use ginnel_stack::udp::UdpOptions;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The registry.
#[derive(Default)]
pub(crate) struct ListenerRegistry {
    version: AtomicU64,
    /// The ports of `ephemeral_udp`, for shards that receive datagrams. `None` if no shard asks for them,
    /// because all shards serve all devices.
    pub(crate) ephemeral_ports: Option<Arc<EphemeralUdpPorts>>,
    state: Mutex<RegistryState>,
}

/// The state of the registry.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct RegistryState {
    pub(crate) listeners: BTreeMap<SocketAddr, RegistryEntry>,
    /// Listeners with `SO_REUSEPORT`. Each belongs to one shard, so the others need not know them, except for
    /// conflicts of addresses.
    pub(crate) reuseport: Vec<ReuseportEntry>,
    /// UDP sockets that were bound to a given port.
    pub(crate) udp: UdpPortTable,
    /// UDP sockets with an ephemeral port. Their shard follows from the port, so the others need not know
    /// them, except for conflicts of addresses.
    pub(crate) ephemeral_udp: UdpPortTable,
    /// The filters of each shard's UDP sockets for groups: every shard receives what any of them does, and
    /// the primary shard reports them.
    groups: BTreeMap<ShardGroup, SourceFilter>,
    /// Counts the changes of `groups`.
    groups_version: u64,
    /// `udp` as of the last [`publish`](ListenerRegistry::publish).
    #[serde(skip)]
    published_udp: Arc<UdpPortTable>,
    version: u64,
    last_id: u64,
}

/// A listener of all shards.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct RegistryEntry {
    /// Distinguishes it from earlier and later listeners of its address.
    pub(crate) id: u64,
    pub(crate) options: ListenOptions,
}

/// A listener with `SO_REUSEPORT`, which belongs to one shard.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct ReuseportEntry {
    pub(crate) id: u64,
    pub(crate) address: SocketAddr,
    pub(crate) options: ListenOptions,
}

impl ListenerRegistry {
    /// Creates a registry that also tells shards which ephemeral UDP ports have a socket.
    pub(crate) fn with_ephemeral_ports() -> Self {
        Self { ephemeral_ports: Some(Arc::default()), ..Self::default() }
    }

    /// Returns the version, which increases with each change.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Locks the state.
    pub(crate) fn lock(&self) -> MutexGuard<'_, RegistryState> {
        // Each change is a single call on a map, so a panic of another shard cannot leave the state
        // inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a UDP socket with an ephemeral port. Datagrams find its shard from now on.
    pub(crate) fn add_ephemeral(&self, state: &mut RegistryState, binding: UdpBinding) {
        state.ephemeral_udp.add(binding);
        if let Some(ports) = &self.ephemeral_ports {
            ports.set(binding.local.port(), true);
        }
    }

    /// Removes a UDP socket if it has an ephemeral port.
    pub(crate) fn remove_ephemeral(&self, state: &mut RegistryState, port: u16, id: u64) {
        let is_removed = state.ephemeral_udp.remove(port, id);
        if let Some(ports) = &self.ephemeral_ports
            && is_removed
            && !state.ephemeral_udp.has_port(port)
        {
            ports.set(port, false);
        }
    }

    /// Takes over the state of another registry, which each shard has saved. Returns the state; all calls
    /// with the same state have the same effect.
    pub(crate) fn restore(&self, saved: RegistryState) -> MutexGuard<'_, RegistryState> {
        let mut state = self.lock();
        *state = saved;
        if let Some(ports) = &self.ephemeral_ports {
            state.ephemeral_udp.ports().for_each(|port| ports.set(port, true));
        }
        self.publish(&mut state);
        state
    }

    /// Makes a change visible to all shards. Returns the new version.
    pub(crate) fn publish(&self, state: &mut RegistryState) -> u64 {
        state.version += 1;
        state.published_udp = Arc::new(state.udp.clone());
        self.version.store(state.version, Ordering::Release);
        state.version
    }
}

impl RegistryState {
    /// Returns a new id.
    pub(crate) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Returns whether a listener with `SO_REUSEPORT` conflicts with a new listener.
    pub(crate) fn reuseport_conflicts(&self, address: SocketAddr, options: &ListenOptions) -> bool {
        self.reuseport.iter().any(|entry| entry.options.conflicts_with(entry.address, address, options))
    }

    /// Returns whether a socket of another shard conflicts with `claim`.
    pub(crate) fn udp_conflicts(&self, claim: &UdpBinding) -> bool {
        // An ephemeral port is never shared: otherwise the shard would not follow from the port.
        let exclusive = UdpOptions { reuse_address: false, reuse_port: false, ..claim.options };
        self.udp.conflicts(claim)
            || self.ephemeral_udp.conflicts(&UdpBinding { options: exclusive, ..*claim })
    }

    /// Sets the filter of a shard's sockets for a group; [`SourceFilter::NONE`] is that of a shard without
    /// members.
    pub(crate) fn set_group(&mut self, group: ShardGroup, filter: SourceFilter) {
        self.groups_version += 1;
        if filter.is_none() {
            self.groups.remove(&group);
        } else {
            self.groups.insert(group, filter);
        }
    }

    /// Returns the filters of all shards but one.
    pub(crate) fn groups_of_others(&self, shard: u8) -> BTreeMap<ShardGroup, SourceFilter> {
        let others = self.groups.iter().filter(|((owner, ..), _)| *owner != shard);
        others.map(|(group, filter)| (*group, filter.clone())).collect()
    }

    /// Returns the number of changes of groups, by which a shard knows whether it has applied the filters.
    pub(crate) fn groups_version(&self) -> u64 {
        self.groups_version
    }

    pub(crate) fn udp_owners(&self) -> Arc<UdpPortTable> {
        Arc::clone(&self.published_udp)
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ephemeral_ports_are_recorded_only_for_readers() {
        let options = UdpOptions::default();
        let local = "0.0.0.0:50000".parse().unwrap();
        let binding = UdpBinding { id: 1, shard: 0, local, remote: None, options };
        let registry = ListenerRegistry::with_ephemeral_ports();
        let ports = registry.ephemeral_ports.clone().unwrap();
        registry.add_ephemeral(&mut registry.lock(), binding);
        assert!(ports.has_socket(50_000));
        registry.remove_ephemeral(&mut registry.lock(), 50_000, 2);
        assert!(ports.has_socket(50_000), "another socket was closed");
        registry.remove_ephemeral(&mut registry.lock(), 50_000, 1);
        assert!(!ports.has_socket(50_000));
        let registry = ListenerRegistry::default();
        registry.add_ephemeral(&mut registry.lock(), binding);
        assert!(registry.ephemeral_ports.is_none() && registry.lock().ephemeral_udp.has_port(50_000));
        registry.remove_ephemeral(&mut registry.lock(), 50_000, 1);
        assert!(!registry.lock().ephemeral_udp.has_port(50_000));
    }
}
