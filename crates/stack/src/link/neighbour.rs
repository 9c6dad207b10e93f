//! The neighbour table: the MAC address of each IP address on a link, for ARP and NDP.
//!
//! The states are those of neighbour unreachability detection (RFC 4861 §7.3.2), used for IPv4, too, as on
//! Linux:
//!
//! ```text
//!                 first packet                answer
//!   UNRESOLVED ──────────────────► INCOMPLETE ────────► REACHABLE ◄──────────────┐
//!        ▲                             │                   │ reachable time      │ answer, or
//!        │ evicted           no answer │                   ▼ over, next packet   │ confirmation
//!      FAILED ◄────────────────────────┘      STALE ────► DELAY ──► PROBE ───────┤
//!        ▲                                 next packet                 │         │
//!        └─────────────────────────────────────────────── no answer ───┘─────────┘
//! ```
//!
//! This module decides what is to be sent; [`Network`](crate::ip::Network) sends it.

use crate::device::TxMeta;
use crate::handle::LinkId;
use crate::ip::config::NetworkConfig;
use crate::ip::entropy::KeyedHash;
use crate::time::Instant;
use crate::wire::MacAddr;
use core::net::IpAddr;
use core::time::Duration;
use std::collections::{HashMap, VecDeque};

/// Bits of a neighbour reference that hold the slot; the others hold the slot's generation.
const SLOT_BITS: u32 = 20;
/// Largest number of slots.
pub(crate) const SLOTS_MAX: u32 = (1 << SLOT_BITS) - 1;
/// Bytes of the longest link header: Ethernet with one tag.
pub(crate) const LINK_HEADER_MAX: usize = 18;

/// How long to wait before a full device is tried again.
pub(crate) const DEVICE_RETRY: Duration = Duration::from_millis(1);

/// A slot and its generation in 32 bits, as a cached hop holds it. It becomes stale when the slot is reused
/// for another neighbour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NeighbourRef(u32);

impl NeighbourRef {
    fn new(slot: u32, generation: u16) -> Self {
        Self(slot | u32::from(generation) << SLOT_BITS)
    }

    /// Returns the index of the slot.
    pub(crate) const fn slot(self) -> u32 {
        self.0 & SLOTS_MAX
    }

    const fn generation(self) -> u16 {
        // 12 bits remain above the slot.
        (self.0 >> SLOT_BITS) as u16
    }
}

/// The reachability state of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NeighbourState {
    /// It has never been solicited.
    Unresolved,
    /// It has been solicited and has not answered yet. Packets are queued.
    Incomplete,
    /// It is known to be reachable.
    Reachable,
    /// Its MAC address is known, but its reachability has not been confirmed recently. The next packet is
    /// sent and starts the delay.
    Stale,
    /// A packet was sent since it became stale; the transport may still confirm it before it is probed.
    Delay,
    /// It is being probed. Packets are sent meanwhile.
    Probe,
    /// It did not answer. The next packet solicits it again.
    Failed,
    /// It comes from the configuration: it is never solicited, changed or evicted (Linux's NUD_PERMANENT).
    Permanent,
    /// It is a multicast or broadcast address, from which its MAC address follows (Linux's NUD_NOARP).
    NoArp,
}

/// A frame, complete except for its destination MAC address, that is queued until the neighbour is resolved.
#[derive(Debug)]
pub(crate) struct PendingFrame {
    pub bytes: Box<[u8]>,
    pub meta: TxMeta,
}

/// A neighbour.
#[derive(Debug)]
pub(crate) struct Neighbour {
    /// The link header, ready to be copied in front of a packet. Its first six bytes are the neighbour's MAC
    /// address.
    pub header: [u8; LINK_HEADER_MAX],
    /// Bytes of the header in use: 14 or 18.
    pub header_len: u8,
    pub state: NeighbourState,
    /// Number of solicitations sent since the state was entered.
    probes: u8,
    /// Number of attempts to send the next solicitation that found the device full.
    refused_sends: u8,
    /// True if it was used since the clock hand last passed it.
    pub referenced: bool,
    /// True if its last advertisement said that it is a router.
    pub is_router: bool,
    generation: u16,
    pub link: LinkId,
    /// In state Reachable: the end of the reachable time.
    pub reachable_until: Instant,
    /// When the MAC address was last set, for the lock time.
    updated: Instant,
    pub address: IpAddr,
    pending: VecDeque<PendingFrame>,
    pending_bytes: usize,
}

/// Decision about a packet for a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendDecision {
    /// Send it: the MAC address is known.
    Send,
    /// Send it, and arm the neighbour's timer with this delay.
    SendThenProbe(Duration),
    /// Queue it.
    Queue,
    /// Queue it, and send the first solicitation.
    QueueAndSolicit,
}

/// Action when a neighbour's timer expires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NeighbourTimerAction {
    /// Nothing.
    None,
    /// Send a broadcast or multicast solicitation.
    SolicitMulticast,
    /// Send a unicast solicitation to the neighbour.
    SolicitUnicast,
    /// Give up: report the queued packets as unreachable.
    Fail,
}

/// Information about a neighbour from an ARP or NDP packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeighbourUpdate {
    /// Its MAC address, if the packet contains it.
    pub mac: Option<MacAddr>,
    /// True if it answers a solicitation.
    pub solicited: bool,
    /// True if it may replace another MAC address (the override flag of RFC 4861 §4.4).
    pub overrides: bool,
    /// True if an update without override makes a reachable neighbour stale (RFC 4861 §7.2.5; not so in ARP).
    pub makes_stale: bool,
}

/// The result of a neighbour update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NeighbourUpdateOutcome {
    /// The neighbour was unresolved and is resolved now: the queued packets can be sent.
    Resolved,
    /// The MAC address has changed.
    Moved,
    /// Nothing relevant has changed.
    Unchanged,
    /// The update was refused.
    Refused,
}

impl Neighbour {
    /// Returns the MAC address; meaningless in states Unresolved, Incomplete and Failed.
    pub(crate) fn mac(&self) -> MacAddr {
        let mut mac = [0; 6];
        mac.copy_from_slice(&self.header[..6]);
        MacAddr(mac)
    }

    fn set_mac(&mut self, mac: MacAddr) {
        self.header[..6].copy_from_slice(&mac.0);
    }

    /// Returns whether the MAC address is known.
    pub(crate) const fn is_resolved(&self) -> bool {
        use NeighbourState::{Failed, Incomplete, Unresolved};
        !matches!(self.state, Unresolved | Incomplete | Failed)
    }

    /// Returns whether a packet can be sent without [`Neighbour::on_send`]: the common case.
    #[inline]
    pub(crate) fn is_ready(&self, now: Instant) -> bool {
        use NeighbourState::{Delay, NoArp, Permanent, Probe, Reachable};
        match self.state {
            Reachable => now < self.reachable_until,
            Delay | Probe | Permanent | NoArp => true,
            _ => false,
        }
    }

    /// Decides what to do with a packet to be sent.
    pub(crate) fn on_send(&mut self, now: Instant, config: &NetworkConfig) -> SendDecision {
        use NeighbourState::{Delay, Failed, Incomplete, Unresolved};
        self.referenced = true;
        if self.is_ready(now) {
            return SendDecision::Send;
        }
        match self.state {
            Unresolved | Failed => {
                self.state = Incomplete;
                (self.probes, self.refused_sends) = (1, 0);
                SendDecision::QueueAndSolicit
            }
            Incomplete => SendDecision::Queue,
            // RFC 4861 §7.3.3: a stale neighbour is used at once and probed only if it is not confirmed
            // meanwhile.
            _ => {
                self.state = Delay;
                SendDecision::SendThenProbe(Duration::from_millis(config.neighbour_delay_probe_ms.into()))
            }
        }
    }

    /// Handles the expiry of the neighbour's timer.
    pub(crate) fn on_timer(&mut self, now: Instant, config: &NetworkConfig) -> NeighbourTimerAction {
        use NeighbourState::{Delay, Failed, Incomplete, Probe, Reachable};
        match self.state {
            Incomplete if self.probes < config.neighbour_multicast_probes => {
                self.probes += 1;
                NeighbourTimerAction::SolicitMulticast
            }
            Delay | Probe if now < self.reachable_until => {
                self.state = Reachable;
                NeighbourTimerAction::None
            }
            Delay => {
                self.state = Probe;
                (self.probes, self.refused_sends) = (1, 0);
                NeighbourTimerAction::SolicitUnicast
            }
            Probe if self.probes < config.neighbour_unicast_probes => {
                self.probes += 1;
                NeighbourTimerAction::SolicitUnicast
            }
            Incomplete | Probe => {
                self.state = Failed;
                NeighbourTimerAction::Fail
            }
            _ => NeighbourTimerAction::None,
        }
    }

    /// Records the attempt to send a solicitation and returns when the timer is due: after `interval` if the
    /// solicitation was sent (`sent`). An attempt that found the device full does not count and is retried
    /// after a short, doubling time. When that time reaches `interval` the solicitation counts as lost, so
    /// that queued packets are reported eventually.
    pub(crate) fn on_solicited(&mut self, sent: bool, interval: Duration) -> Duration {
        let retry = DEVICE_RETRY * (1 << self.refused_sends);
        if sent || retry >= interval {
            self.refused_sends = 0;
            return interval;
        }
        self.refused_sends += 1;
        self.probes -= 1;
        retry
    }

    /// Records a confirmation of reachability by the transport (RFC 4861 §7.3.1).
    #[inline]
    pub(crate) fn confirm(&mut self, now: Instant, reachable: Duration) {
        use NeighbourState::{Delay, Probe, Reachable, Stale};
        if matches!(self.state, Reachable | Stale | Delay | Probe) {
            self.state = Reachable;
            self.reachable_until = now + reachable;
        }
    }

    /// Applies an update by the rules of RFC 4861 §7.2.5. ARP sets `overrides` according to the lock time.
    pub(crate) fn update(
        &mut self,
        now: Instant,
        update: NeighbourUpdate,
        reachable: Duration,
    ) -> NeighbourUpdateOutcome {
        use NeighbourState::{NoArp, Permanent, Reachable, Stale};
        if matches!(self.state, Permanent | NoArp) {
            return if update.mac == Some(self.mac()) {
                NeighbourUpdateOutcome::Unchanged
            } else {
                NeighbourUpdateOutcome::Refused
            };
        }
        let was_resolved = self.is_resolved();
        let moves = match update.mac {
            Some(mac) => !was_resolved || mac != self.mac(),
            // Without a MAC address the update is useless to an unresolved neighbour.
            None if !was_resolved => return NeighbourUpdateOutcome::Refused,
            None => false,
        };
        if was_resolved && moves && !update.overrides {
            if update.makes_stale && self.state == Reachable {
                self.state = Stale;
            }
            return NeighbourUpdateOutcome::Refused;
        }
        if let Some(mac) = update.mac
            && moves
        {
            self.set_mac(mac);
            self.updated = now;
        }
        if update.solicited {
            self.state = Reachable;
            self.reachable_until = now + reachable;
        } else if moves {
            self.state = Stale;
        }
        match (was_resolved, moves) {
            (false, _) => NeighbourUpdateOutcome::Resolved,
            (true, true) => NeighbourUpdateOutcome::Moved,
            (true, false) => NeighbourUpdateOutcome::Unchanged,
        }
    }

    /// Returns whether the MAC address was set less than the lock time ago.
    pub(crate) fn is_locked(&self, now: Instant, lock: Duration) -> bool {
        self.is_resolved() && now.saturating_since(self.updated) < lock
    }

    /// Returns the first queued packet, from which the source address of a solicitation is taken.
    pub(crate) fn first_pending(&self) -> Option<&PendingFrame> {
        self.pending.front()
    }
}

/// A neighbour as it is shown in listings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighbourInfo {
    /// Its link.
    pub link: LinkId,
    /// Its IP address.
    pub address: IpAddr,
    /// Its MAC address, if known.
    pub mac: Option<MacAddr>,
    /// Its state.
    pub state: NeighbourState,
    /// True if its last advertisement said that it is a router.
    pub is_router: bool,
}

/// The error when there is no room for a packet or a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRoom;

/// All neighbours of all links.
#[derive(Debug)]
pub(crate) struct NeighbourTable {
    slots: Vec<Neighbour>,
    /// Only used for lookups, never iterated.
    index: HashMap<(LinkId, IpAddr), u32, KeyedHash>,
    slots_max: usize,
    /// Slots of neighbours that may be evicted: all but permanent ones.
    evictable: Vec<u32>,
    /// Index into `evictable` where the next search for a victim begins.
    clock_hand: usize,
    /// Number of neighbours examined in these searches.
    #[cfg(test)]
    victim_search_steps: u64,
    pending_bytes: usize,
    pending_bytes_max: usize,
    pending_bytes_per_neighbour_max: usize,
}

/// An evicted neighbour with its queued packets.
#[derive(Debug)]
pub(crate) struct EvictedNeighbour {
    pub slot: u32,
    pub pending: VecDeque<PendingFrame>,
}

/// A neighbour to be added.
#[derive(Debug)]
pub(crate) struct NewNeighbour {
    pub link: LinkId,
    pub address: IpAddr,
    /// The link header, with the destination already set if `state` implies that it is known.
    pub header: [u8; LINK_HEADER_MAX],
    pub header_len: u8,
    pub state: NeighbourState,
}

impl NeighbourTable {
    pub(crate) fn new(config: &NetworkConfig, hash: KeyedHash) -> Self {
        Self {
            slots: Vec::new(),
            index: HashMap::with_hasher(hash),
            slots_max: config.neighbours_max.min(SLOTS_MAX) as usize,
            evictable: Vec::new(),
            clock_hand: 0,
            #[cfg(test)]
            victim_search_steps: 0,
            pending_bytes: 0,
            pending_bytes_max: config.neighbour_pending_total_bytes as usize,
            pending_bytes_per_neighbour_max: config.neighbour_pending_bytes as usize,
        }
    }

    /// Returns the neighbour that a reference was made for, unless its slot has been reused.
    #[inline]
    pub(crate) fn resolve(&mut self, reference: NeighbourRef) -> Option<&mut Neighbour> {
        let neighbour = self.slots.get_mut(reference.slot() as usize)?;
        (neighbour.generation == reference.generation()).then_some(neighbour)
    }

    /// Returns whether `reference` still refers to the neighbour it was made for.
    #[inline]
    pub(crate) fn is_current(&self, reference: NeighbourRef) -> bool {
        self.slots
            .get(reference.slot() as usize)
            .is_some_and(|neighbour| neighbour.generation == reference.generation())
    }

    /// Returns the neighbour in a slot.
    pub(crate) fn neighbour_mut(&mut self, slot: u32) -> Option<&mut Neighbour> {
        self.slots.get_mut(slot as usize)
    }

    /// Returns the slot of an address.
    pub(crate) fn find(&self, link: LinkId, address: IpAddr) -> Option<u32> {
        self.index.get(&(link, address)).copied()
    }

    /// Returns the state of the neighbour in an occupied slot.
    pub(crate) fn state(&self, slot: u32) -> NeighbourState {
        self.slots[slot as usize].state
    }

    /// Returns a reference to the neighbour in `slot`, which a hop may keep.
    pub(crate) fn reference(&self, slot: u32) -> NeighbourRef {
        NeighbourRef::new(slot, self.slots[slot as usize].generation)
    }

    /// Returns all neighbours, in slot order, for a listing.
    pub(crate) fn iter(&self) -> impl Iterator<Item = NeighbourInfo> {
        self.slots.iter().map(|neighbour| NeighbourInfo {
            link: neighbour.link,
            address: neighbour.address,
            mac: neighbour.is_resolved().then(|| neighbour.mac()),
            state: neighbour.state,
            is_router: neighbour.is_router,
        })
    }

    /// Adds a neighbour that does not exist yet, and evicts another one if the table is full. Returns its
    /// slot and the evicted neighbour.
    pub(crate) fn insert(&mut self, new: NewNeighbour) -> Result<(u32, Option<EvictedNeighbour>), NoRoom> {
        let key = (new.link, new.address);
        let is_permanent = new.state == NeighbourState::Permanent;
        let (slot, generation, evicted) = if self.slots.len() < self.slots_max {
            let slot = self.slots.len();
            if !is_permanent {
                // Cannot truncate: slots_max is below 2^20.
                self.evictable.push(slot as u32);
            }
            (slot, 0, None)
        } else {
            let at = self.find_victim().ok_or(NoRoom)?;
            let victim = self.evictable[at] as usize;
            if is_permanent {
                self.evictable.swap_remove(at);
            }
            let (generation, evicted) = self.evict(victim);
            (victim, generation, Some(evicted))
        };
        let neighbour = Neighbour {
            header: new.header,
            header_len: new.header_len,
            state: new.state,
            probes: 0,
            refused_sends: 0,
            referenced: true,
            is_router: false,
            generation,
            link: new.link,
            reachable_until: Instant::ZERO,
            updated: Instant::ZERO,
            address: new.address,
            pending: VecDeque::new(),
            pending_bytes: 0,
        };
        if slot == self.slots.len() {
            self.slots.push(neighbour);
        } else {
            self.slots[slot] = neighbour;
        }
        let slot = slot as u32;
        self.index.insert(key, slot);
        Ok((slot, evicted))
    }

    /// Returns how many more permanent neighbours can be added; all others are evicted for them.
    pub(crate) fn permanent_slots_left(&self) -> usize {
        self.slots_max - (self.slots.len() - self.evictable.len())
    }

    /// Selects a victim by the second-chance algorithm: the clock hand clears the mark of each neighbour that
    /// was used since its last pass, and stops at the first one without a mark. Each step but the last clears
    /// a mark that a packet has set, so the amortised cost is constant. Returns an index into `evictable`.
    fn find_victim(&mut self) -> Option<usize> {
        for _ in 0..=self.evictable.len() {
            let at = if self.clock_hand < self.evictable.len() { self.clock_hand } else { 0 };
            let slot = *self.evictable.get(at)?;
            self.clock_hand = at + 1;
            #[cfg(test)]
            {
                self.victim_search_steps += 1;
            }
            if !core::mem::take(&mut self.slots[slot as usize].referenced) {
                return Some(at);
            }
        }
        None
    }

    /// Empties a slot. Returns the generation of its next neighbour, and the evicted one.
    fn evict(&mut self, at: usize) -> (u16, EvictedNeighbour) {
        let pending = self.take_pending(at as u32);
        let neighbour = &self.slots[at];
        self.index.remove(&(neighbour.link, neighbour.address));
        let generation = (neighbour.generation + 1) & (u16::MAX >> (SLOT_BITS - 16));
        (generation, EvictedNeighbour { slot: at as u32, pending })
    }

    /// Queues a frame. Returns how many older frames were dropped for it.
    pub(crate) fn push_pending(&mut self, slot: u32, frame: PendingFrame) -> Result<u64, NoRoom> {
        let len = frame.bytes.len();
        let neighbour = &mut self.slots[slot as usize];
        let mut dropped = 0;
        while neighbour.pending_bytes + len > self.pending_bytes_per_neighbour_max {
            let Some(oldest) = neighbour.pending.pop_front() else { return Err(NoRoom) };
            neighbour.pending_bytes -= oldest.bytes.len();
            self.pending_bytes -= oldest.bytes.len();
            dropped += 1;
        }
        if self.pending_bytes + len > self.pending_bytes_max {
            return Err(NoRoom);
        }
        neighbour.pending_bytes += len;
        self.pending_bytes += len;
        neighbour.pending.push_back(frame);
        Ok(dropped)
    }

    /// Takes all queued frames of a neighbour, the oldest first.
    pub(crate) fn take_pending(&mut self, slot: u32) -> VecDeque<PendingFrame> {
        let neighbour = &mut self.slots[slot as usize];
        self.pending_bytes -= core::mem::take(&mut neighbour.pending_bytes);
        core::mem::take(&mut neighbour.pending)
    }

    /// Puts frames back that the device had no room for, in front of those queued since.
    pub(crate) fn requeue_pending(&mut self, slot: u32, mut frames: VecDeque<PendingFrame>) {
        let bytes: usize = frames.iter().map(|frame| frame.bytes.len()).sum();
        let neighbour = &mut self.slots[slot as usize];
        frames.append(&mut neighbour.pending);
        neighbour.pending = frames;
        neighbour.pending_bytes += bytes;
        self.pending_bytes += bytes;
    }
}

#[cfg(test)]
#[path = "neighbour_tests.rs"]
mod tests;
