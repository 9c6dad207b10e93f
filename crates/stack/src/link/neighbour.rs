//! Neighbours: which MAC address belongs to an IP address on a link, for ARP and NDP alike.
//!
//! The states are those of neighbour unreachability detection (RFC 4861 §7.3.2), used for IPv4 too, as on Linux:
//!
//! ```text
//!                  first packet                answer
//!   UNRESOLVED ──────────────────► INCOMPLETE ────────► REACHABLE ◄──────────────┐
//!        ▲                             │                   │ reachable time      │ answer, or the
//!        │ evicted           no answer │                   ▼ over, next packet   │ transport's word
//!      FAILED ◄────────────────────────┘      STALE ────► DELAY ──► PROBE ───────┤
//!        ▲                                 next packet                 │         │
//!        └─────────────────────────────────────────────── no answer ───┘─────────┘
//! ```
//!
//! This file decides; [`Network`](crate::ip::Network) sends what it asks for.

use crate::device::TxMeta;
use crate::handle::LinkId;
use crate::ip::config::NetworkConfig;
use crate::ip::entropy::KeyedHash;
use crate::time::Instant;
use crate::wire::MacAddr;
use core::net::IpAddr;
use core::time::Duration;
use std::collections::{HashMap, VecDeque};

/// Bits of a neighbour reference that name the slot; the others hold the slot's generation.
const SLOT_BITS: u32 = 20;
/// Largest number of slots.
pub(crate) const SLOTS_MAX: u32 = (1 << SLOT_BITS) - 1;
/// Bytes of the longest link header: Ethernet with one tag.
pub(crate) const LINK_HEADER_MAX: usize = 18;

/// How long to wait before a full device is tried again.
pub(crate) const DEVICE_RETRY: Duration = Duration::from_millis(1);

/// A slot and its generation in 32 bits: what a cached route holds. It goes stale when the slot gets another tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NeighbourRef(u32);

impl NeighbourRef {
    fn new(slot: u32, generation: u16) -> Self {
        Self(slot | u32::from(generation) << SLOT_BITS)
    }

    /// The slot's number.
    pub(crate) const fn slot(self) -> u32 {
        self.0 & SLOTS_MAX
    }

    const fn generation(self) -> u16 {
        // 12 bits remain above the slot's.
        (self.0 >> SLOT_BITS) as u16
    }
}

/// What is known about a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NeighbourState {
    /// Never asked.
    Unresolved,
    /// Asked, no answer yet. Packets wait.
    Incomplete,
    /// Known to answer.
    Reachable,
    /// Known, but not heard of recently. Used, and then checked.
    Stale,
    /// Used since it went stale; the transport may still vouch for it.
    Delay,
    /// Being asked whether it is still there. Used meanwhile.
    Probe,
    /// Did not answer. The next packet asks again.
    Failed,
    /// From the configuration: never asked, never changed, never forgotten.
    Permanent,
    /// A multicast or broadcast address, whose MAC address follows from it.
    NoArp,
}

/// A frame, complete but for its destination MAC address, that waits for an answer.
#[derive(Debug)]
pub(crate) struct PendingFrame {
    pub bytes: Box<[u8]>,
    pub meta: TxMeta,
}

/// One neighbour.
#[derive(Debug)]
pub(crate) struct Neighbour {
    /// The link header, ready to be copied in front of a packet: the first six bytes are the neighbour's MAC address.
    pub header: [u8; LINK_HEADER_MAX],
    /// How many of them are used: 14 or 18.
    pub header_len: u8,
    pub state: NeighbourState,
    /// Solicitations sent since the state was entered.
    probes: u8,
    /// Attempts to send the next one that found the device full.
    refused_sends: u8,
    /// Used since the eviction hand passed by.
    pub referenced: bool,
    /// Said to be a router in its last advertisement.
    pub is_router: bool,
    generation: u16,
    pub link: LinkId,
    /// In state Reachable: until when.
    pub reachable_until: Instant,
    /// When the MAC address was last set, for the lock time.
    updated: Instant,
    pub address: IpAddr,
    pending: VecDeque<PendingFrame>,
    pending_bytes: usize,
}

/// What to do with a packet for a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendDecision {
    /// Send it: the MAC address is known.
    Send,
    /// Send it, and look after the neighbour in the given time.
    SendThenProbe(Duration),
    /// Let it wait.
    Queue,
    /// Let it wait, and send the first solicitation.
    QueueAndSolicit,
}

/// What a neighbour's timer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NeighbourTimerAction {
    /// Nothing any more.
    None,
    /// Ask all hosts of the link.
    SolicitMulticast,
    /// Ask the neighbour itself.
    SolicitUnicast,
    /// Give up: report the packets that waited.
    Fail,
}

/// What somebody said about a neighbour.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NeighbourUpdate {
    /// Its MAC address, if that was said.
    pub mac: Option<MacAddr>,
    /// It is an answer to a question of ours.
    pub solicited: bool,
    /// It may replace another MAC address.
    pub overrides: bool,
    /// A claim that may not replace makes a reachable neighbour stale (RFC 4861 §7.2.5; not so in ARP).
    pub makes_stale: bool,
}

/// What came of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NeighbourUpdateOutcome {
    /// The neighbour could not be used before and can now: send what waits.
    Resolved,
    /// It has another MAC address now.
    Moved,
    /// Nothing of importance.
    Unchanged,
    /// The claim was not believed.
    Refused,
}

impl Neighbour {
    /// The MAC address; meaningful unless Unresolved, Incomplete or Failed.
    pub(crate) fn mac(&self) -> MacAddr {
        let mut mac = [0; 6];
        mac.copy_from_slice(&self.header[..6]);
        MacAddr(mac)
    }

    fn set_mac(&mut self, mac: MacAddr) {
        self.header[..6].copy_from_slice(&mac.0);
    }

    /// True if the MAC address is known.
    pub(crate) const fn is_resolved(&self) -> bool {
        use NeighbourState::{Failed, Incomplete, Unresolved};
        !matches!(self.state, Unresolved | Incomplete | Failed)
    }

    /// The common case of [`Neighbour::on_use`]: nothing to decide.
    #[inline]
    pub(crate) fn is_ready(&self, now: Instant) -> bool {
        use NeighbourState::{Delay, NoArp, Permanent, Probe, Reachable};
        match self.state {
            Reachable => now < self.reachable_until,
            Delay | Probe | Permanent | NoArp => true,
            _ => false,
        }
    }

    /// A packet is to be sent.
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
            // RFC 4861 §7.3.3: a stale neighbour is used at once and probed only if nothing vouches for it meanwhile.
            _ => {
                self.state = Delay;
                SendDecision::SendThenProbe(Duration::from_millis(config.neighbour_delay_probe_ms.into()))
            }
        }
    }

    /// The timer went off.
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

    /// A solicitation left, or found the device full. Returns when the timer is due, which is after `interval` once it left. Otherwise it does not
    /// count, and is tried again soon; but a device that stays full for so long has lost it, as a wire would: those who wait must learn of it.
    pub(crate) fn on_solicited(&mut self, left: bool, interval: Duration) -> Duration {
        let soon = DEVICE_RETRY * (1 << self.refused_sends);
        if left || soon >= interval {
            self.refused_sends = 0;
            return interval;
        }
        self.refused_sends += 1;
        self.probes -= 1;
        soon
    }

    /// The transport has heard from the peer in answer to something it sent (RFC 4861 §7.3.1).
    #[inline]
    pub(crate) fn confirm(&mut self, now: Instant, reachable: Duration) {
        use NeighbourState::{Delay, Probe, Reachable, Stale};
        if matches!(self.state, Reachable | Stale | Delay | Probe) {
            self.state = Reachable;
            self.reachable_until = now + reachable;
        }
    }

    /// Somebody said something. The rules are RFC 4861 §7.2.5's; ARP passes `replaces` by the lock time.
    pub(crate) fn update(
        &mut self,
        now: Instant,
        claim: NeighbourUpdate,
        reachable: Duration,
    ) -> NeighbourUpdateOutcome {
        use NeighbourState::{NoArp, Permanent, Reachable, Stale};
        if matches!(self.state, Permanent | NoArp) {
            return if claim.mac == Some(self.mac()) {
                NeighbourUpdateOutcome::Unchanged
            } else {
                NeighbourUpdateOutcome::Refused
            };
        }
        let was_resolved = self.is_resolved();
        let moves = match claim.mac {
            Some(mac) => !was_resolved || mac != self.mac(),
            // Nothing to send to: of no use to a neighbour whose MAC address is unknown.
            None if !was_resolved => return NeighbourUpdateOutcome::Refused,
            None => false,
        };
        if was_resolved && moves && !claim.overrides {
            if claim.makes_stale && self.state == Reachable {
                self.state = Stale;
            }
            return NeighbourUpdateOutcome::Refused;
        }
        if let Some(mac) = claim.mac
            && moves
        {
            self.set_mac(mac);
            self.updated = now;
        }
        if claim.solicited {
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

    /// True if the MAC address was set less than the lock time ago.
    pub(crate) fn is_locked(&self, now: Instant, lock: Duration) -> bool {
        self.is_resolved() && now.saturating_since(self.updated) < lock
    }

    /// The first packet that waits, for its source address.
    pub(crate) fn first_pending(&self) -> Option<&PendingFrame> {
        self.pending.front()
    }
}

/// A neighbour, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighbourInfo {
    /// Where it is.
    pub link: LinkId,
    /// Its IP address.
    pub address: IpAddr,
    /// Its MAC address, if known.
    pub mac: Option<MacAddr>,
    /// What is known about it.
    pub state: NeighbourState,
    /// It said that it is a router.
    pub is_router: bool,
}

/// Why there is no room for a packet or a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRoom;

/// All neighbours of all links.
#[derive(Debug)]
pub(crate) struct NeighbourTable {
    slots: Vec<Neighbour>,
    /// Only looked up, never iterated.
    index: HashMap<(LinkId, IpAddr), u32, KeyedHash>,
    slots_max: usize,
    /// Slots of neighbours that may be thrown out: all but static ones.
    evictable: Vec<u32>,
    /// Where in `evictable` the search for a victim goes on.
    clock_hand: usize,
    /// Neighbours looked at in such searches.
    #[cfg(test)]
    victim_search_steps: u64,
    pending_bytes: usize,
    pending_bytes_max: usize,
    pending_bytes_per_neighbour_max: usize,
}

/// A neighbour that was thrown out, with what waited for it.
#[derive(Debug)]
pub(crate) struct EvictedNeighbour {
    pub slot: u32,
    pub pending: VecDeque<PendingFrame>,
}

/// A new neighbour.
#[derive(Debug)]
pub(crate) struct NewNeighbour {
    pub link: LinkId,
    pub address: IpAddr,
    /// The link header, with the destination already set if `state` says that it is known.
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

    /// The neighbour a route holds, unless its slot has another tenant now.
    #[inline]
    pub(crate) fn resolve(&mut self, reference: NeighbourRef) -> Option<&mut Neighbour> {
        let neighbour = self.slots.get_mut(reference.slot() as usize)?;
        (neighbour.generation == reference.generation()).then_some(neighbour)
    }

    /// True if `reference` still names the neighbour it was made for.
    #[inline]
    pub(crate) fn is_current(&self, reference: NeighbourRef) -> bool {
        self.slots
            .get(reference.slot() as usize)
            .is_some_and(|neighbour| neighbour.generation == reference.generation())
    }

    /// The neighbour in a slot that is known to be taken.
    pub(crate) fn neighbour_mut(&mut self, slot: u32) -> Option<&mut Neighbour> {
        self.slots.get_mut(slot as usize)
    }

    /// Looks an address up.
    pub(crate) fn find(&self, link: LinkId, address: IpAddr) -> Option<u32> {
        self.index.get(&(link, address)).copied()
    }

    /// The state of the neighbour in a slot that is known to be taken.
    pub(crate) fn state(&self, slot: u32) -> NeighbourState {
        self.slots[slot as usize].state
    }

    /// What a route may keep of the neighbour in `slot`.
    pub(crate) fn reference(&self, slot: u32) -> NeighbourRef {
        NeighbourRef::new(slot, self.slots[slot as usize].generation)
    }

    /// All neighbours, in slot order, for display.
    pub(crate) fn iter(&self) -> impl Iterator<Item = NeighbourInfo> {
        self.slots.iter().map(|neighbour| NeighbourInfo {
            link: neighbour.link,
            address: neighbour.address,
            mac: neighbour.is_resolved().then(|| neighbour.mac()),
            state: neighbour.state,
            is_router: neighbour.is_router,
        })
    }

    /// Adds a neighbour that is not there yet, throwing out another if need be.
    pub(crate) fn insert(&mut self, new: NewNeighbour) -> Result<(u32, Option<EvictedNeighbour>), NoRoom> {
        let key = (new.link, new.address);
        let stays = new.state == NeighbourState::Permanent;
        let (slot, generation, evicted) = if self.slots.len() < self.slots_max {
            let slot = self.slots.len();
            if !stays {
                // Cannot truncate: slots_max is below 2^20.
                self.evictable.push(slot as u32);
            }
            (slot, 0, None)
        } else {
            let at = self.find_victim().ok_or(NoRoom)?;
            let victim = self.evictable[at] as usize;
            if stays {
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

    /// Static neighbours that there is still room for: all others give way to them.
    pub(crate) fn permanent_slots_left(&self) -> usize {
        self.slots_max - (self.slots.len() - self.evictable.len())
    }

    /// Second chance: the hand takes the mark off whoever was used since it last came by, and stops at who was not. Each step but the last takes off a mark
    /// that a packet has paid for. Returns a place in `evictable`.
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

    /// Empties a slot. Returns the generation of its next tenant.
    fn evict(&mut self, at: usize) -> (u16, EvictedNeighbour) {
        let pending = self.take_pending(at as u32);
        let neighbour = &self.slots[at];
        self.index.remove(&(neighbour.link, neighbour.address));
        let generation = (neighbour.generation + 1) & (u16::MAX >> (SLOT_BITS - 16));
        (generation, EvictedNeighbour { slot: at as u32, pending })
    }

    /// Lets a frame wait. Returns how many older ones had to go for it.
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

    /// Takes everything that waits for the neighbour, the oldest first.
    pub(crate) fn take_pending(&mut self, slot: u32) -> VecDeque<PendingFrame> {
        let neighbour = &mut self.slots[slot as usize];
        self.pending_bytes -= core::mem::take(&mut neighbour.pending_bytes);
        core::mem::take(&mut neighbour.pending)
    }

    /// Puts back what the device had no room for, in front of what has come since.
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
