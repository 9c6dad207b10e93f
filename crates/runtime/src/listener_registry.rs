//! What all shards have in common and one of them may change: who listens where, and who has which UDP socket.
//!
//! Listening and binding are answered at once ("address in use"), so a message alone cannot do it: the shard that wants something changes the
//! board under its lock, and then tells the others that there is something new. A message that says no more than that cannot be lost by being
//! late or told twice: each shard compares one number per turn with the last that it has seen, and then takes over the whole state. The lock is
//! taken when somebody listens, binds or closes; never for a packet.

use core::net::SocketAddr;
use core::sync::atomic::{AtomicU64, Ordering};
use ginnel_stack::options::ListenOptions;
use ginnel_stack::steering::udp::{UdpBinding, UdpPortTable};
use ginnel_stack::udp::UdpOptions;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The board.
#[derive(Default)]
pub(crate) struct ListenerRegistry {
    version: AtomicU64,
    state: Mutex<RegistryState>,
}

/// What stands on it.
#[derive(Default)]
pub(crate) struct RegistryState {
    pub(crate) listeners: BTreeMap<SocketAddr, RegistryEntry>,
    /// Listeners that share an address by `reuse_port`. Each is one shard's own, so nobody is told; they only stand in the way of others.
    pub(crate) reuseport: Vec<ReuseportEntry>,
    /// UDP sockets bound to a port by name.
    pub(crate) udp: UdpPortTable,
    /// Those whose port was chosen. Their home follows from the port, so nobody is told; they only stand in the way of others.
    pub(crate) ephemeral_udp: UdpPortTable,
    /// `udp` as it was announced last.
    published_udp: Arc<UdpPortTable>,
    version: u64,
    last_id: u64,
}

/// A listener of all shards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegistryEntry {
    /// Tells it from others of the same address before and after it.
    pub(crate) id: u64,
    pub(crate) options: ListenOptions,
}

/// A listener of one shard that others may listen beside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReuseportEntry {
    pub(crate) id: u64,
    pub(crate) address: SocketAddr,
    pub(crate) options: ListenOptions,
}

impl ListenerRegistry {
    /// Counts up with each change.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// To read or change what stands there.
    pub(crate) fn lock(&self) -> MutexGuard<'_, RegistryState> {
        // A shard that panicked has left the state whole: each change is one call on a map.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets everybody see what was changed. Returns the number of the change.
    pub(crate) fn publish(&self, state: &mut RegistryState) -> u64 {
        state.version += 1;
        state.published_udp = Arc::new(state.udp.clone());
        self.version.store(state.version, Ordering::Release);
        state.version
    }
}

impl RegistryState {
    /// A number that was not given before.
    pub(crate) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// True if one of those that share their addresses stands in the way of a listener.
    pub(crate) fn reuseport_conflicts(&self, address: SocketAddr, options: &ListenOptions) -> bool {
        self.reuseport.iter().any(|entry| entry.options.conflicts_with(entry.address, address, options))
    }

    /// True if a socket of another shard stands in the way of this one.
    pub(crate) fn udp_conflicts(&self, claim: &UdpBinding) -> bool {
        // A chosen port is not shared with anybody: the sockets' home could not follow from it any more.
        let exclusive = UdpOptions { reuse_address: false, reuse_port: false, ..claim.options };
        self.udp.conflicts(claim)
            || self.ephemeral_udp.conflicts(&UdpBinding { options: exclusive, ..*claim })
    }

    pub(crate) fn udp_owners(&self) -> Arc<UdpPortTable> {
        Arc::clone(&self.published_udp)
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }
}
