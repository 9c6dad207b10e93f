//! What all shards have in common and one of them may change: who listens where, and who has which UDP socket.
//!
//! Listening and binding are answered at once ("address in use"), so a message alone cannot do it: the shard that wants something changes the
//! board under its lock, and then tells the others that there is something new. A message that says no more than that cannot be lost by being
//! late or told twice: each shard compares one number per turn with the last that it has seen, and then takes over the whole state. The lock is
//! taken when somebody listens, binds or closes; never for a packet.

use core::net::SocketAddr;
use core::sync::atomic::{AtomicU64, Ordering};
use ginnel_stack::options::ListenOptions;
use ginnel_stack::steering::udp::{UdpClaim, UdpHomes};
use ginnel_stack::udp::UdpOptions;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The board.
#[derive(Default)]
pub(crate) struct Board {
    version: AtomicU64,
    state: Mutex<State>,
}

/// What stands on it.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) listeners: BTreeMap<SocketAddr, Posted>,
    /// Listeners that share an address by `reuse_port`. Each is one shard's own, so nobody is told; they only stand in the way of others.
    pub(crate) sharers: Vec<Sharer>,
    /// UDP sockets bound to a port by name.
    pub(crate) udp: UdpHomes,
    /// Those whose port was chosen. Their home follows from the port, so nobody is told; they only stand in the way of others.
    pub(crate) chosen: UdpHomes,
    /// `udp` as it was announced last.
    announced: Arc<UdpHomes>,
    version: u64,
    last_id: u64,
}

/// A listener of all shards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Posted {
    /// Tells it from others of the same address before and after it.
    pub(crate) id: u64,
    pub(crate) options: ListenOptions,
}

/// A listener of one shard that others may listen beside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sharer {
    pub(crate) id: u64,
    pub(crate) at: SocketAddr,
    pub(crate) options: ListenOptions,
}

impl Board {
    /// Counts up with each change.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// To read or change what stands there.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // A shard that panicked has left the state whole: each change is one call on a map.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets everybody see what was changed. Returns the number of the change.
    pub(crate) fn announce(&self, state: &mut State) -> u64 {
        state.version += 1;
        state.announced = Arc::new(state.udp.clone());
        self.version.store(state.version, Ordering::Release);
        state.version
    }
}

impl State {
    /// A number that was not given before.
    pub(crate) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// True if one of those that share their addresses stands in the way of a listener.
    pub(crate) fn sharers_conflict(&self, at: SocketAddr, options: &ListenOptions) -> bool {
        self.sharers.iter().any(|sharer| sharer.options.is_in_conflict(sharer.at, at, options))
    }

    /// True if a socket of another shard stands in the way of this one.
    pub(crate) fn udp_conflicts(&self, claim: &UdpClaim) -> bool {
        // A chosen port is not shared with anybody: the sockets' home could not follow from it any more.
        let alone = UdpOptions { reuse_address: false, reuse_port: false, ..claim.options };
        self.udp.conflicts(claim) || self.chosen.conflicts(&UdpClaim { options: alone, ..*claim })
    }

    pub(crate) fn udp_homes(&self) -> Arc<UdpHomes> {
        Arc::clone(&self.announced)
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }
}
