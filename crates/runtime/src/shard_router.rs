//! Routes frames to the shards that they belong to, and keeps listeners and UDP ports of all shards
//! consistent.

use crate::classifier::Classifier;
use crate::cross_shard::CrossShardSender;
use crate::listener_registry::{ListenerRegistry, RegistryEntry, RegistryState, ReuseportEntry};
use crate::prioritized_rx;
use crate::relay::DeviceUsers;
use crate::stats::ShardStats;
use arrayvec::ArrayVec;
use core::net::SocketAddr;
use ginnel_stack::device::{RxBurst, RxFrame};
use ginnel_stack::error::ListenError;
use ginnel_stack::handle::{Listener, PortId, UdpHandle};
use ginnel_stack::options::ListenOptions;
use ginnel_stack::priority::{self, CLASSES, ClassLimits};
use ginnel_stack::stack::Stack;
use ginnel_stack::steering::ephemeral_udp::EphemeralUdpPorts;
use ginnel_stack::steering::udp::UdpBinding;
use ginnel_stack::steering::{Broadcast, FrameOwner, SHARDS_MAX, Steering};
use ginnel_stack::udp::{UdpError, UdpOptions};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Attempts to choose a free port. A chosen port is in use only if another shard has bound it since this
/// shard's last turn.
const EPHEMERAL_ATTEMPTS_MAX: usize = 16;

/// The connections of a shard to the other shards.
pub(crate) struct ShardRouter {
    shard: u8,
    /// By index of the shard; `None` for this shard.
    senders: Vec<Option<CrossShardSender>>,
    /// Bits of the shards whose queues have entries to publish.
    unpublished: u64,
    /// Bits of the shards in whose queues updates wait for space.
    waiting_updates: u64,
    registry: Arc<ListenerRegistry>,
    /// The shards that send on each device, if not all shards serve all devices.
    device_users: Option<Arc<DeviceUsers>>,
    /// The version of the registry that was applied last.
    seen_version: u64,
    /// The version of the registry's groups that was applied last.
    seen_groups: u64,
    /// True if a listener could not be opened, for example because its address is not usable yet.
    has_unopened: bool,
    /// Ids of the listeners that have been counted as refused, by address.
    refused: BTreeMap<SocketAddr, u64>,
    listeners: BTreeMap<SocketAddr, SharedListener>,
    /// Listeners of this shard with `SO_REUSEPORT`, with their ids in the registry.
    reuseport: Vec<(Listener, u64)>,
    /// Ids and ports of the bindings of this shard's UDP sockets.
    udp_claims: BTreeMap<UdpHandle, (u64, u16)>,
    /// Gives packets that were reassembled here their priorities.
    classifier: Option<Box<Classifier>>,
    /// The part of a queue that each class may fill, if `[priority]` is in use.
    class_limits: Option<ClassLimits>,
}

/// A listener of the registry on this shard.
#[derive(Clone, Serialize, Deserialize)]
struct SharedListener {
    id: u64,
    listener: Listener,
    /// True if the application of this shard listens there, too.
    is_claimed: bool,
}

/// Everything that a shard knows about the others, in the form in which it is saved.
#[derive(Serialize, Deserialize)]
pub(crate) struct SavedRouter {
    registry: RegistryState,
    listeners: BTreeMap<SocketAddr, SharedListener>,
    reuseport: Vec<(Listener, u64)>,
    udp_claims: BTreeMap<UdpHandle, (u64, u16)>,
}

impl ShardRouter {
    /// Returns the state to be saved. Other shards must not change the registry meanwhile.
    pub(crate) fn save(&self) -> SavedRouter {
        SavedRouter {
            registry: self.registry.lock().clone(),
            listeners: self.listeners.clone(),
            reuseport: self.reuseport.clone(),
            udp_claims: self.udp_claims.clone(),
        }
    }

    /// Restores a saved state. The engine has been restored before.
    ///
    /// # Errors
    /// The engine does not have a listener or a UDP socket.
    pub(crate) fn restore(
        &mut self,
        saved: SavedRouter,
        stack: &mut Stack,
        stats: &mut ShardStats,
    ) -> Result<(), String> {
        let shared = saved.listeners.values().map(|shared| shared.listener);
        let mut listeners = shared.chain(saved.reuseport.iter().map(|(listener, _)| *listener));
        if !listeners.all(|listener| stack.has_listener(listener))
            || saved.udp_claims.keys().any(|socket| stack.udp_local(*socket).is_err())
        {
            return Err("saved state: the engine does not have a socket that shards share".into());
        }
        self.listeners = saved.listeners;
        self.reuseport = saved.reuseport;
        self.udp_claims = saved.udp_claims;
        let registry = Arc::clone(&self.registry);
        self.apply_registry(&registry.restore(saved.registry), stack, stats);
        Ok(())
    }

    pub(crate) fn new(
        shard: u8,
        senders: Vec<Option<CrossShardSender>>,
        registry: Arc<ListenerRegistry>,
        device_users: Option<Arc<DeviceUsers>>,
    ) -> Self {
        Self {
            shard,
            senders,
            device_users,
            unpublished: 0,
            waiting_updates: 0,
            registry,
            seen_version: 0,
            seen_groups: 0,
            has_unopened: false,
            refused: BTreeMap::new(),
            listeners: BTreeMap::new(),
            reuseport: Vec::new(),
            udp_claims: BTreeMap::new(),
            classifier: None,
            class_limits: None,
        }
    }

    /// Returns how many frames the full queues to shards that serve other devices have refused.
    pub(crate) fn relays_refused(&self) -> u64 {
        self.device_users.as_ref().map_or(0, |users| users.refused(self.shard))
    }

    /// Returns how many frames of each class the full queues to shards that serve other devices have refused
    /// since the last call; `None` if all shards serve all devices, or if classes have no limits.
    pub(crate) fn take_relays_shed(&self) -> Option<[u64; CLASSES]> {
        self.class_limits.as_ref()?;
        Some(self.device_users.as_ref()?.take_shed(self.shard))
    }

    /// Returns the ephemeral UDP ports of all shards that have a socket; `None` if all shards serve all
    /// devices.
    pub(crate) fn ephemeral_udp_ports(&self) -> Option<Arc<EphemeralUdpPorts>> {
        self.registry.ephemeral_ports.clone()
    }

    /// Sets the classifier, which gives packets that were reassembled on this shard their priorities.
    pub(crate) fn set_classifier(&mut self, classifier: Option<Classifier>) {
        self.classifier = classifier.map(Box::new);
    }

    /// Sets the part of the queues to other shards that frames of each class may fill.
    pub(crate) fn set_class_limits(&mut self, limits: Option<ClassLimits>) {
        self.class_limits = limits;
    }

    /// Keeps the frames of this shard in `burst`, and forwards the others.
    pub(crate) fn route(
        &mut self,
        steering: Option<&Steering>,
        port: PortId,
        burst: &mut RxBurst<'_>,
        stats: &mut ShardStats,
    ) {
        let Some(steering) = steering else { return };
        if burst.iter().all(|frame| steering.is_home_segment(frame)) {
            stats.hashes_trusted += burst.len() as u64;
            return;
        }
        burst.retain(|frame| match self.owner_of(steering, port, frame, stats) {
            FrameOwner::Shard(owner) if owner == self.shard => true,
            FrameOwner::Shard(owner) => {
                self.send(owner, port, frame, stats);
                false
            }
            FrameOwner::All => {
                self.send_to_all(port, frame, stats);
                true
            }
            FrameOwner::Primary { .. } if steering.is_secondary(port) => {
                self.send(steering.primary(port), port, frame, stats);
                false
            }
            FrameOwner::Primary { broadcast } => self.broadcast(port, frame, broadcast, stats),
        });
        self.flush();
    }

    /// Returns the owner of a frame. If the hash of the sender says that the frame belongs to this shard, the
    /// hash is trusted. Forwarding costs more than computing the hash, so the hash is checked before a frame
    /// is forwarded. Thus a sender cannot flood the queues with frames that do not belong there.
    #[inline]
    fn owner_of(
        &self,
        steering: &Steering,
        port: PortId,
        frame: &RxFrame<'_>,
        stats: &mut ShardStats,
    ) -> FrameOwner {
        if frame.label.hash().is_none() {
            return steering.owner_of_bytes(port, frame.bytes);
        }
        let claimed_owner = steering.owner_of_frame(port, frame);
        if claimed_owner == FrameOwner::Shard(self.shard) {
            stats.hashes_trusted += 1;
            return claimed_owner;
        }
        let owner = steering.owner_of_bytes(port, frame.bytes);
        stats.hashes_mismatched += u64::from(claimed_owner != owner);
        owner
    }

    /// Forwards frames of a burst that a wrong hash kept here; `frames` has a bit for each. The engine found
    /// no flow for them and has not changed any state.
    #[cold]
    pub(crate) fn redirect(
        &mut self,
        steering: Option<&Steering>,
        port: PortId,
        burst: &RxBurst<'_>,
        frames: u64,
        stats: &mut ShardStats,
    ) {
        let Some(steering) = steering else { return };
        for (_, frame) in burst.iter().enumerate().filter(|(index, _)| frames >> index & 1 != 0) {
            stats.hashes_trusted -= 1;
            stats.hashes_mismatched += 1;
            if let FrameOwner::Shard(owner) = steering.owner_of_bytes(port, frame.bytes) {
                self.send(owner, port, frame, stats);
            }
        }
        self.flush();
    }

    /// Returns whether a frame that another shard forwarded may be processed here. Frames are forwarded only
    /// once, so the frame is processed here even if another shard owns it by now. It is not processed if it
    /// must be broadcast and a queue is full.
    pub(crate) fn accepts(
        &mut self,
        steering: Option<&Steering>,
        port: PortId,
        frame: &RxFrame<'_>,
        stats: &mut ShardStats,
    ) -> bool {
        let Some(steering) = steering.filter(|steering| !steering.is_secondary(port)) else { return true };
        match steering.owner_of_bytes(port, frame.bytes) {
            FrameOwner::Primary { broadcast } => self.broadcast(port, frame, broadcast, stats),
            FrameOwner::Shard(_) | FrameOwner::All => true,
        }
    }

    fn send(&mut self, owner: u8, port: PortId, frame: &RxFrame<'_>, stats: &mut ShardStats) {
        let Some(Some(out)) = self.senders.get_mut(usize::from(owner)) else { return };
        // The hash is not used any more.
        let frame = RxFrame { label: frame.label.without_hash(), ..*frame };
        let priority = frame.label.priority();
        let has_room = match &self.class_limits {
            Some(limits) if priority::COMPILED => {
                out.has_room_for(frame.bytes.len(), limits, priority::class(priority))
                    || prioritized_rx::is_control(frame.bytes)
            }
            _ => true,
        };
        if has_room && out.send(port, &frame) {
            self.unpublished |= 1 << owner;
            stats.frames_forwarded += 1;
        } else {
            stats.forwards_dropped += 1;
            if self.class_limits.is_some() {
                stats.count_shed(priority, 1);
            }
        }
    }

    fn send_to_all(&mut self, port: PortId, frame: &RxFrame<'_>, stats: &mut ShardStats) {
        // Cannot truncate: there are at most 64 shards.
        (0..self.senders.len() as u8).for_each(|owner| self.send(owner, port, frame, stats));
    }

    /// Broadcasts a frame to the other shards that `broadcast` names. Returns false if a queue is full; then
    /// no shard may process the frame.
    fn broadcast(
        &mut self,
        port: PortId,
        frame: &RxFrame<'_>,
        broadcast: Broadcast,
        stats: &mut ShardStats,
    ) -> bool {
        let users = self.device_users.as_ref().map_or(u64::MAX, |users| users.users(port));
        let to = match broadcast {
            Broadcast::None => return true,
            Broadcast::Users => users,
            Broadcast::All => u64::MAX,
        };
        let mut senders: ArrayVec<_, { SHARDS_MAX as usize }> = self
            .senders
            .iter_mut()
            .enumerate()
            .filter(|(shard, _)| to >> shard & 1 != 0)
            .filter_map(|(_, sender)| sender.as_mut())
            .collect();
        if !senders.iter_mut().all(|sender| sender.has_broadcast_room(frame.bytes.len())) {
            stats.broadcasts_refused += 1;
            return false;
        }
        for sender in senders {
            sender.broadcast(port, frame);
            stats.broadcasts_sent += 1;
        }
        self.unpublished |= to;
        true
    }

    /// Forwards misrouted packets of the engine, and broadcasts its updates. The packets were not received as
    /// they are, but were reassembled, so they have no priority yet.
    pub(crate) fn exchange(&mut self, stack: &mut Stack, stats: &mut ShardStats) {
        while let Some(packet) = stack.next_misrouted() {
            let mut frame = RxFrame::new(&packet.frame);
            if let Some(classifier) = &mut self.classifier {
                frame.label = classifier.label(frame.bytes, frame.label);
            }
            match packet.owner {
                FrameOwner::Shard(owner) => self.send(owner, packet.port, &frame, stats),
                FrameOwner::All => self.send_to_all(packet.port, &frame, stats),
                FrameOwner::Primary { .. } => {
                    let primary =
                        stack.network().steering().map_or(0, |steering| steering.primary(packet.port));
                    self.send(primary, packet.port, &frame, stats);
                }
            }
        }
        while let Some(update) = stack.network_mut().next_control_update() {
            for sender in self.senders.iter_mut().flatten() {
                sender.broadcast_update(update);
                stats.broadcasts_sent += 1;
            }
            self.unpublished = u64::MAX;
        }
        self.flush();
    }

    /// Publishes what was put into the queues since the last call, and updates for which there is space now.
    #[inline]
    fn flush(&mut self) {
        if self.unpublished | self.waiting_updates != 0 {
            self.publish_queues();
        }
    }

    #[inline(never)]
    fn publish_queues(&mut self) {
        let unpublished = core::mem::take(&mut self.unpublished) | core::mem::take(&mut self.waiting_updates);
        for (shard, sender) in self.senders.iter_mut().enumerate() {
            let Some(sender) = sender.as_mut().filter(|_| unpublished >> shard & 1 != 0) else { continue };
            sender.publish();
            self.waiting_updates |= u64::from(sender.has_pending_updates()) << shard;
        }
    }

    /// Returns whether updates wait for space in a queue.
    pub(crate) fn has_pending_updates(&self) -> bool {
        self.waiting_updates != 0
    }

    /// Returns whether the registry has changed.
    pub(crate) fn is_stale(&self) -> bool {
        self.registry.version() != self.seen_version
    }

    /// Opens listeners again whose addresses may have become usable.
    pub(crate) fn retry_listens(&mut self, stack: &mut Stack, stats: &mut ShardStats) {
        if self.has_unopened {
            self.sync_registry(stack, stats);
        }
    }

    /// Applies the current state of the registry.
    pub(crate) fn sync_registry(&mut self, stack: &mut Stack, stats: &mut ShardStats) {
        let registry = Arc::clone(&self.registry);
        self.apply_registry(&registry.lock(), stack, stats);
    }

    fn apply_registry(&mut self, state: &RegistryState, stack: &mut Stack, stats: &mut ShardStats) {
        self.seen_version = state.version();
        let is_listener =
            |address: &SocketAddr, id: u64| state.listeners.get(address).is_some_and(|entry| entry.id == id);
        self.refused.retain(|address, id| is_listener(address, *id));
        self.listeners.retain(|address, shared| {
            let is_current = is_listener(address, shared.id);
            if !is_current {
                stack.unlisten(shared.listener);
            }
            is_current
        });
        self.has_unopened = false;
        for (&address, entry) in &state.listeners {
            if self.listeners.contains_key(&address) {
                continue;
            }
            match stack.listen(address, entry.options) {
                Ok(listener) => {
                    self.listeners
                        .insert(address, SharedListener { id: entry.id, listener, is_claimed: false });
                }
                Err(error) => {
                    self.has_unopened |= error == ListenError::AddressNotAvailable;
                    // Each listener counts once, although it is tried again later.
                    if self.refused.insert(address, entry.id) != Some(entry.id) {
                        stats.listens_refused += 1;
                    }
                }
            }
        }
        if self.seen_groups != state.groups_version() {
            self.seen_groups = state.groups_version();
            stack.network_mut().set_groups_of_other_shards(state.groups_of_others(self.shard));
        }
        if let Some(steering) = stack.network_mut().steering_mut() {
            steering.set_udp_ports(state.udp_owners());
        }
    }

    fn publish_registry(
        &mut self,
        registry: &ListenerRegistry,
        state: &mut RegistryState,
        stack: &mut Stack,
        stats: &mut ShardStats,
    ) {
        registry.publish(state);
        self.apply_registry(state, stack, stats);
    }

    /// Tells the other shards that a device went away.
    pub(crate) fn report_gone(&self, port: PortId) {
        if let Some(users) = &self.device_users {
            users.set_gone(port);
            self.ring_all();
        }
    }

    /// Wakes the other shards, which check the registry in their next turn.
    fn ring_all(&self) {
        self.senders.iter().flatten().for_each(CrossShardSender::ring);
    }

    /// Listens on all shards. If another shard listens on the address already, this shard shares its listener
    /// with its options, and the handler of the shard where a connection arrives accepts the connection. With
    /// `exclusive`, that is `AddressInUse` instead. A listener with `SO_REUSEPORT` belongs to this shard
    /// alone.
    pub(crate) fn listen(
        &mut self,
        stack: &mut Stack,
        stats: &mut ShardStats,
        address: SocketAddr,
        options: ListenOptions,
        exclusive: bool,
    ) -> Result<Listener, ListenError> {
        let registry = Arc::clone(&self.registry);
        let mut state = registry.lock();
        self.apply_registry(&state, stack, stats);
        if state.reuseport_conflicts(address, &options) {
            return Err(ListenError::AddressInUse);
        }
        if options.reuse_port {
            let listener = stack.listen(address, options)?;
            let id = state.next_id();
            state.reuseport.push(ReuseportEntry { id, address, options });
            self.reuseport.push((listener, id));
            return Ok(listener);
        }
        if let Some(shared) = self.listeners.get_mut(&address) {
            if exclusive || core::mem::replace(&mut shared.is_claimed, true) {
                return Err(ListenError::AddressInUse);
            }
            return Ok(shared.listener);
        }
        let listener = stack.listen(address, options)?;
        let id = state.next_id();
        state.listeners.insert(address, RegistryEntry { id, options });
        self.listeners.insert(address, SharedListener { id, listener, is_claimed: true });
        self.publish_registry(&registry, &mut state, stack, stats);
        drop(state);
        self.ring_all();
        Ok(listener)
    }

    /// Stops listening on all shards. Returns false if another shard has done so already.
    pub(crate) fn unlisten(&mut self, stack: &mut Stack, stats: &mut ShardStats, listener: Listener) -> bool {
        if let Some(position) = self.reuseport.iter().position(|(listener_id, _)| *listener_id == listener) {
            let (_, id) = self.reuseport.swap_remove(position);
            self.registry.lock().reuseport.retain(|entry| entry.id != id);
            return stack.unlisten(listener);
        }
        let found = self.listeners.iter().find(|(_, shared)| shared.listener == listener);
        let Some((&address, known)) = found else { return stack.unlisten(listener) };
        let id = known.id;
        let registry = Arc::clone(&self.registry);
        let mut state = registry.lock();
        if state.listeners.get(&address).is_none_or(|entry| entry.id != id) {
            self.apply_registry(&state, stack, stats);
            return false;
        }
        state.listeners.remove(&address);
        self.publish_registry(&registry, &mut state, stack, stats);
        drop(state);
        self.ring_all();
        true
    }

    /// Opens a UDP socket of this shard: its datagrams are forwarded to this shard from wherever they arrive.
    pub(crate) fn udp_bind(
        &mut self,
        stack: &mut Stack,
        stats: &mut ShardStats,
        local: SocketAddr,
        options: UdpOptions,
    ) -> Result<UdpHandle, UdpError> {
        let registry = Arc::clone(&self.registry);
        let mut state = registry.lock();
        self.apply_registry(&state, stack, stats);
        let mut claim = UdpBinding { id: state.next_id(), shard: self.shard, local, remote: None, options };
        if local.port() != 0 && state.udp_conflicts(&claim) {
            return Err(UdpError::AddressInUse);
        }
        for _ in 0..EPHEMERAL_ATTEMPTS_MAX {
            let socket = stack.udp_bind(local, options)?;
            claim.local = stack.udp_local(socket)?;
            if local.port() == 0 && state.udp_conflicts(&claim) {
                stack.udp_close(socket)?;
                continue;
            }
            self.udp_claims.insert(socket, (claim.id, claim.local.port()));
            // With `SO_REUSEPORT`, sockets of other shards may share the port.
            if local.port() == 0 && !options.reuse_port {
                registry.add_ephemeral(&mut state, claim);
            } else {
                state.udp.add(claim);
                self.publish_registry(&registry, &mut state, stack, stats);
                drop(state);
                self.ring_all();
            }
            return Ok(socket);
        }
        Err(UdpError::AddressNotAvailable)
    }

    /// Publishes that a socket of this shard was connected.
    pub(crate) fn udp_connected(
        &mut self,
        stack: &mut Stack,
        stats: &mut ShardStats,
        socket: UdpHandle,
        remote: SocketAddr,
    ) {
        let (Some(&(id, _)), Ok(local)) = (self.udp_claims.get(&socket), stack.udp_local(socket)) else {
            return;
        };
        let registry = Arc::clone(&self.registry);
        let mut state = registry.lock();
        if state.udp.connect(id, local, remote) {
            self.publish_registry(&registry, &mut state, stack, stats);
            drop(state);
            self.ring_all();
        }
    }

    /// Tells the other shards which groups the sockets of this shard have joined or left.
    pub(crate) fn publish_groups(&mut self, stack: &mut Stack, stats: &mut ShardStats) {
        let mut changes = core::iter::from_fn(|| stack.network_mut().next_group_change()).peekable();
        if changes.peek().is_none() {
            return;
        }
        let registry = Arc::clone(&self.registry);
        let mut state = registry.lock();
        let is_current = self.seen_groups == state.groups_version();
        for (link, group, filter) in changes {
            state.set_group((self.shard, link.0, group), filter);
        }
        if is_current {
            // This shard knows its own groups.
            self.seen_groups = state.groups_version();
        }
        self.publish_registry(&registry, &mut state, stack, stats);
        drop(state);
        self.ring_all();
    }

    /// Releases the port of a socket of this shard that was closed, and publishes that it left its groups.
    pub(crate) fn udp_closed(&mut self, stack: &mut Stack, stats: &mut ShardStats, socket: UdpHandle) {
        self.publish_groups(stack, stats);
        let Some((id, port)) = self.udp_claims.remove(&socket) else { return };
        let registry = Arc::clone(&self.registry);
        let mut state = registry.lock();
        registry.remove_ephemeral(&mut state, port, id);
        if state.udp.remove(port, id) {
            self.publish_registry(&registry, &mut state, stack, stats);
            drop(state);
            self.ring_all();
        }
    }
}
