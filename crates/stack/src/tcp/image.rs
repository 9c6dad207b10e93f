//! The state of TCP in an image of a stack ([`crate::stack::Stack::save`]).
//!
//! The image has what is in use. Tables that are reserved are made from the configuration, and what follows
//! from connections is computed again: the flow table, the use of ports, the pool of IPv6 addresses and
//! counters. An index of the image that no later code checks is checked here: it must not be out of range. A
//! list of connections that wait may contain closed ones, which are skipped when the list is processed.

use super::active::SlowPathFlags;
use super::conn::image::{ConnImage, SlotImage, SlotsRef};
use super::conn::{Flags, NONE, SlotState, Tcb};
use super::deferred_acks::DeferredAck;
use super::demux::{FlowKey, TIME_WAIT_BIT};
use super::fastopen::{self, FastOpenKeys};
use super::fastopen_client::FastOpenClient;
use super::listen::image::{ListenersImage, ListenersRef, UnacceptedCount};
use super::listen::listener_of;
use super::memory_waiters::MemoryWaiters;
use super::port_use::PortSharing;
use super::profile::image::{ProfilesImage, RestoredProfiles};
use super::saved_syn::SavedSyns;
use super::secrets::image::SecretsImage;
use super::soft_errors::SoftErrors;
use super::source::image::SourcesImage;
use super::state::State;
use super::time_wait::image::TimeWaitImage;
use super::timer_queue::TimerQueue;
use super::timestamp_age::TimestampAge;
use super::tx_list::image::TxListImage;
use super::{Tcp, TcpStats};
use crate::chunk_pool::image::{ChunksImage, ChunksRef, UnclaimedChunks};
use crate::events::Event;
use crate::priority::{BEST_EFFORT, ClassQueues};
use crate::stack::Restorer;
use crate::timer_wheel::image::WheelImage;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Defines two forms of the state: one to be written, which borrows large parts, and one that was read, which
/// owns them.
macro_rules! image {
    ($($field:ident: $written:ty => $read:ty,)*) => {
        /// The state, to be written.
        #[derive(Serialize)]
        #[serde(rename = "Tcp")]
        pub(crate) struct TcpRef<'a> { $($field: $written,)* }

        /// The state as it was read.
        #[derive(Deserialize)]
        #[serde(rename = "Tcp")]
        pub(crate) struct TcpImage { $($field: $read,)* }
    };
}

image! {
    secrets: SecretsImage => SecretsImage,
    profiles: ProfilesImage => ProfilesImage,
    sources: SourcesImage => SourcesImage,
    chunks: ChunksRef<'a> => ChunksImage,
    slots: SlotsRef<'a> => Vec<SlotImage>,
    vacant: Vec<u32> => Vec<u32>,
    time_wait: Vec<TimeWaitImage> => Vec<TimeWaitImage>,
    listeners: ListenersRef<'a> => ListenersImage,
    wheel: WheelImage => WheelImage,
    deferred_timers: &'a TimerQueue => TimerQueue,
    releases: &'a TimerQueue => TimerQueue,
    timestamp_age: &'a TimestampAge => TimestampAge,
    deferred_acks: &'a VecDeque<DeferredAck> => VecDeque<DeferredAck>,
    tx_list: TxListImage => TxListImage,
    events: &'a VecDeque<Event> => VecDeque<Event>,
    event_classes: &'a ClassQueues<Event> => ClassQueues<Event>,
    memory_waiters: &'a MemoryWaiters => MemoryWaiters,
    soft_errors: &'a SoftErrors => SoftErrors,
    saved_syns: &'a SavedSyns => SavedSyns,
    reap: Option<u32> => Option<u32>,
    half_open_high_water: u32 => u32,
    is_gtsm_used: bool => bool,
    has_guards: bool => bool,
    is_unordered_used: bool => bool,
    fastopen_keys: FastOpenKeys => FastOpenKeys,
    fastopen_client: &'a FastOpenClient => FastOpenClient,
    challenge_timestamp: u64 => u64,
    challenge_count: u32 => u32,
    next_port: u32 => u32,
    stats: &'a TcpStats => TcpStats,
}

impl Tcp {
    /// Returns why the state cannot be saved now.
    pub fn cannot_be_saved(&self) -> Option<&'static str> {
        if self.pending.iter().next().is_some() {
            return Some("received data are still in the frames of a burst");
        }
        if self.event_classes.current() != BEST_EFFORT {
            return Some("events of a class of priority are being processed");
        }
        let can_be_restored = self.sources.can_be_restored();
        (!can_be_restored).then_some("data of a source are sent that another process cannot make again")
    }

    /// Returns the image.
    pub fn image(&self) -> TcpRef<'_> {
        // Each field is listed, so that none is forgotten.
        let Self {
            config: _,
            conns,
            active: _,
            addresses,
            port_use: _,
            soft_errors,
            flows: _,
            wheel,
            deferred_timers,
            releases,
            timestamp_age,
            time_wait,
            listeners,
            profiles,
            chunks,
            sources,
            saved_syns,
            secrets,
            events,
            event_classes,
            pending: _,
            memory_waiters,
            deferred_acks,
            tx_list,
            window_limits: _,
            lower_share_percent: _,
            reap,
            half_open: _,
            half_open_high_water,
            is_gtsm_used,
            has_guards,
            held_syns: _,
            rx_port: _,
            reassembled_link: _,
            filter_scratch: _,
            is_unordered_used,
            fastopen_pending: _,
            fastopen_keys,
            fastopen_client,
            is_overtaking: _,
            challenge_timestamp,
            challenge_count,
            next_port,
            stats,
            now: _,
            now_ms: _,
            #[cfg(test)]
                is_fast_path_disabled: _,
        } = self;
        let (profiles, numbers) = profiles.image();
        TcpRef {
            secrets: secrets.image(),
            profiles,
            sources: sources.image(),
            chunks: chunks.image(),
            listeners: listeners.image(&numbers),
            slots: SlotsRef { tcp: self, profiles: numbers },
            vacant: conns.vacant(),
            time_wait: time_wait.image(addresses),
            wheel: wheel.image(|idx| conns.timer(idx)),
            deferred_timers,
            releases,
            timestamp_age,
            deferred_acks: &deferred_acks.queue,
            tx_list: tx_list.image(),
            events,
            event_classes,
            memory_waiters,
            soft_errors,
            saved_syns,
            reap: *reap,
            half_open_high_water: *half_open_high_water,
            is_gtsm_used: *is_gtsm_used,
            has_guards: *has_guards,
            is_unordered_used: *is_unordered_used,
            fastopen_keys: *fastopen_keys,
            fastopen_client,
            challenge_timestamp: *challenge_timestamp,
            challenge_count: *challenge_count,
            next_port: *next_port,
            stats,
        }
    }

    /// Takes over the state of an image. `self` must not have been used before; after an error it must not be
    /// used any more.
    ///
    /// # Errors
    /// The configuration has too little room, the owner does not make a filter or a source again, or the
    /// image is malformed.
    pub fn restore(&mut self, image: TcpImage, owner: &mut dyn Restorer) -> Result<(), String> {
        if self.conns.high_water() > 0 || self.listeners.slots() > 0 || !self.sources.is_empty() {
            return Err("a stack that has sockets cannot take over others".into());
        }
        self.secrets.restore(image.secrets);
        let profiles = self.profiles.restore(image.profiles, |saved| owner.filter(saved))?;
        self.sources.restore(image.sources, |id| owner.source(id))?;
        let mut chunks = self.chunks.restore(image.chunks)?;
        let mut counts = Vec::new();
        for slot in image.slots {
            match slot {
                SlotImage::Vacant { generation } => {
                    self.conns.restore_slot(Tcb { generation, ..Tcb::vacant() })?;
                }
                SlotImage::Used(conn) => {
                    self.restore_connection(*conn, &profiles, &mut chunks, &mut counts)?
                }
            }
        }
        chunks.check_none_left()?;
        self.sources.check_released()?;
        self.conns.restore_vacant(&image.vacant)?;
        self.restore_time_wait(image.time_wait)?;
        self.wheel.restore(image.wheel, &mut self.conns, |conns, idx| conns.is_used(idx))?;
        self.restore_listeners(image.listeners, &profiles, &counts, owner)?;
        self.profiles.end_restore(profiles);

        let slots = self.conns.high_water();
        let queues = image.deferred_timers.connections().chain(image.releases.connections());
        let mut listed = queues.chain(image.deferred_acks.iter().map(|deferred| deferred.idx));
        let are_listed_right = listed.all(|idx| (idx as usize) < slots);
        drop(listed);
        if !are_listed_right {
            return Err("a timer belongs to a connection that does not exist".into());
        }
        let is_reported =
            |idx: u32| self.conns.is_used(idx) && matches!(self.conns[idx].slot_state, SlotState::Reported);
        if image.reap.is_some_and(|idx| !is_reported(idx)) || !image.event_classes.is_valid() {
            return Err("the events contradict the connections".into());
        }
        self.tx_list.restore(image.tx_list, slots)?;
        (self.deferred_timers, self.releases) = (image.deferred_timers, image.releases);
        self.timestamp_age = image.timestamp_age;
        self.deferred_acks.queue = image.deferred_acks;
        (self.events, self.event_classes) = (image.events, image.event_classes);
        self.memory_waiters = image.memory_waiters;
        (self.soft_errors, self.saved_syns) = (image.soft_errors, image.saved_syns);
        self.reap = image.reap;
        self.half_open_high_water = image.half_open_high_water.max(self.half_open);
        self.is_gtsm_used |= image.is_gtsm_used;
        self.has_guards |= image.has_guards;
        self.is_unordered_used |= image.is_unordered_used;
        if fastopen::parse_keys(&self.config.fastopen_key).is_none() {
            self.fastopen_keys = image.fastopen_keys;
        }
        self.fastopen_client.restore(image.fastopen_client);
        self.challenge_timestamp = image.challenge_timestamp;
        self.challenge_count = image.challenge_count;
        self.next_port = image.next_port;
        self.stats = image.stats;
        Ok(())
    }

    /// Takes over a connection, and counts it if it is not accepted.
    fn restore_connection(
        &mut self,
        image: ConnImage,
        profiles: &RestoredProfiles,
        chunks: &mut UnclaimedChunks,
        counts: &mut Vec<UnacceptedCount>,
    ) -> Result<(), String> {
        let ConnImage { mut tcb, profile, remote, local, active } = image;
        let idx = self.conns.high_water() as u32;
        if remote.is_v4() != local.is_v4() || tcb.has(Flags::V6) == remote.is_v4() {
            return Err("the addresses of a connection are of the wrong family".into());
        }
        let is_open = tcb.slot_state == SlotState::Open;
        let is_valid = is_open == (tcb.state != State::Closed)
            && !matches!(tcb.slot_state, SlotState::Vacant)
            && !matches!(tcb.state, State::Listen | State::TimeWait);
        if !is_valid || !tcb.snd_una.le(tcb.snd_nxt) || !tcb.rcv_wup.le(tcb.rcv_nxt) {
            return Err("the state of a connection contradicts itself".into());
        }
        let Tcb { remote_port, local_port, .. } = tcb;
        let key = FlowKey { remote, local, remote_port, local_port };
        (tcb.remote_ip, tcb.local_ip, _) = self.addresses.store(&key);
        let is_active_open = tcb.has(Flags::ACTIVE_OPEN);
        let profile = profiles.get(profile)?;
        tcb.profile = self.profiles.share(profile);
        tcb.active = NONE;
        if is_open {
            let sharing = self.profiles.port_sharing(profile, is_active_open);
            self.add_flow(&key, idx, sharing)?;
        }
        let is_half_open = tcb.state == State::SynReceived && !is_active_open;
        let is_queued = tcb.has(Flags::IN_ACCEPT_QUEUE) && !is_active_open;
        if is_half_open || is_queued {
            let token = tcb.token;
            let listener = listener_of(token) as usize;
            if listener > super::listen::LISTENERS_LIMIT {
                return Err("a connection belongs to no listener".into());
            }
            if counts.len() <= listener {
                counts.resize(listener + 1, UnacceptedCount::default());
            }
            let count = &mut counts[listener];
            count.queued += u32::from(is_queued);
            count.half_open += u32::from(is_half_open);
            count.half_open_loopback += u32::from(is_half_open && token != listener_of(token));
            self.half_open += u32::from(is_half_open);
        }
        if let Some(b) = &active {
            b.send.check(chunks, &mut self.sources)?;
            b.recv.check(chunks)?;
            b.check(&tcb)?;
            self.fastopen_pending += u32::from(b.slow_path.has(SlowPathFlags::FASTOPEN));
        }
        self.conns.restore_slot(tcb)?;
        if let Some(state) = active {
            let active = self.active.restore(*state, idx);
            self.conns[idx].active = active;
        }
        Ok(())
    }

    /// Adds a connection or an entry in TIME-WAIT to the flow table and to the use of its port.
    fn add_flow(&mut self, key: &FlowKey, value: u32, sharing: PortSharing) -> Result<(), &'static str> {
        let hash = self.secrets.flow_hash(key);
        self.flows.insert(hash, value).map_err(|_| "the flow table is full")?;
        self.port_use.add(key, sharing);
        Ok(())
    }

    fn restore_time_wait(&mut self, image: Vec<TimeWaitImage>) -> Result<(), String> {
        self.time_wait.restore(image, &mut self.addresses)?;
        let entries = self.time_wait.iter();
        let flows: Vec<_> = (entries)
            .map(|entry| (entry.key(&self.addresses), PortSharing::from_bits(entry.port_sharing_bits())))
            .collect();
        for (index, (key, sharing)) in (0..).zip(flows) {
            self.add_flow(&key, index | TIME_WAIT_BIT, sharing)?;
        }
        Ok(())
    }

    fn restore_listeners(
        &mut self,
        image: ListenersImage,
        profiles: &RestoredProfiles,
        counts: &[UnacceptedCount],
        owner: &mut dyn Restorer,
    ) -> Result<(), String> {
        let conns = &self.conns;
        let mut is_taken = vec![false; conns.high_water()];
        let is_queued = |listener: u32, idx: u32| {
            let Some(is_taken) = is_taken.get_mut(idx as usize).filter(|is_taken| !**is_taken) else {
                return false;
            };
            *is_taken = true;
            let c = &conns[idx];
            conns.is_used(idx)
                && c.has(Flags::IN_ACCEPT_QUEUE)
                && !c.has(Flags::ACTIVE_OPEN)
                && listener_of(c.token) == listener
        };
        let of = (&mut self.profiles, profiles);
        self.listeners.restore(image, of, counts, is_queued, |saved| owner.filter(saved))?;
        let mut pending = vec![0; self.listeners.slots()];
        for (_, c) in self.conns.iter().filter(|(_, c)| c.active != NONE) {
            let listener = self.active[c.active].fastopen_listener;
            if let Some(index) = listener.and_then(|listener| self.listeners.index(listener)) {
                pending[index as usize] += 1;
            }
        }
        for (index, pending) in (0..).zip(pending) {
            let queue = self.listeners.fastopen_queue(index).0;
            if (queue.len as usize) < pending + queue.resets.len() {
                return Err("connections that were opened fast were counted wrong".into());
            }
        }
        Ok(())
    }
}
