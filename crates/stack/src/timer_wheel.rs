//! Timers for millions of connections: a hierarchical timing wheel with intrusive nodes.
//!
//! ```text
//!            now
//!             ▼
//! level 0  ..[x][ ][ ][x]..   128 slots of one tick (2^16 ns = 65.5 µs)
//! level 1  ..[ ][ ][x]....    128 slots of 64 ticks (4.2 ms)          a slot of level l+1 is dealt out
//! level 2  ..[x][ ]......     128 slots of 2^12 ticks (268 ms)        to the 64 slots below it before
//!   ⋮                                                                 its time begins
//! level 5  ..[ ][x]......     128 slots of 2^30 ticks (19.5 h)
//!
//! slot ──first──► node 17 ⇄ node 4 ⇄ node 99 ◄──last── slot       (ids into a store of the owner)
//! ```
//!
//! Arming, re-arming and cancelling are O(1). A timer moves down at most five times in its life. Within a tick timers fire in
//! the order in which they were armed, and ticks in order, whatever the pattern of calls was: the order depends on
//! the inputs only.
//!
//! **No stall.** With 100 M keepalive timers one slot of level 4 holds millions of nodes, each a cache miss. Dealing
//! them out when their time comes would stop the shard for seconds. So every level has room for two windows: while time
//! runs through the second half of one slot, the next one is dealt out a few nodes at a time (look-ahead). What look-ahead did
//! not manage, say after a long sleep, is bounded per call too; then `pop_expired` returns `None` although timers may be due, and
//! `next_deadline` is not later than the present, so that the caller comes back after its next burst.
//!
//! **Never early.** Deadlines are rounded up to a tick. The only exception is a deadline beyond [`HORIZON`] (103 days): it
//! fires at the horizon, and its owner finds that it is not due and arms it again.
//!
//! A node is 12 bytes; of the deadline it keeps the low 32 bits, because its slot implies the rest.

use crate::time::Instant;
use core::time::Duration;

/// Length of a tick as a power of two, in nanoseconds.
const TICK_SHIFT: u32 = 16;
/// Levels of the hierarchy.
const LEVELS: usize = 6;
/// A slot of one level covers `1 << LEVEL_BITS` slots of the level below.
const LEVEL_BITS: u32 = 6;
/// Slots of a level: its current window of 64 and the next.
const RING_SLOTS: u64 = 128;
/// Nodes that one call moves at most when their time has come already: about 0.1 ms of cache misses.
const FORCED_MOVES_MAX: u32 = 1024;
/// Nodes that one call moves at most ahead of time. Once per tick this is half a million a second, and 100 M timers of
/// two hours need 30,000.
const AHEAD_MOVES_MAX: u32 = 32;
/// A link with this bit names a slot (the end of a list), without it a node: its id + 1. Zero is "not armed".
const SLOT_MARK: u32 = 1 << 31;

/// Longest time ahead that is certain to be represented; a later deadline fires at the horizon, early.
pub const HORIZON: Duration =
    Duration::from_nanos((RING_SLOTS - 1) << (LEVEL_BITS as u64 * (LEVELS as u64 - 1) + TICK_SHIFT as u64));

/// Largest id a timer may have.
pub const TIMER_ID_MAX: u32 = SLOT_MARK - 2;

/// The timer of one connection (or neighbour, or anything): part of the entry it belongs to. All zero is "not armed".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimerNode {
    next: u32,
    prev: u32,
    /// Low 32 bits of the tick at which it fires.
    deadline: u32,
}

const _: () = assert!(size_of::<TimerNode>() == 12);

impl TimerNode {
    /// Whether the timer will fire.
    #[inline]
    pub const fn is_armed(&self) -> bool {
        self.next != 0
    }

    /// A node that is not armed, but that its owner has noted under this number to be armed soon. Arming it ends that.
    #[inline]
    pub(crate) const fn deferred(number: u32) -> Self {
        Self { next: 0, prev: u32::MAX, deadline: number }
    }

    /// Whether the node is a [deferred](TimerNode::deferred) one.
    #[inline]
    pub(crate) const fn is_deferred(&self) -> bool {
        self.next == 0 && self.prev == u32::MAX
    }
}

/// Where the nodes live. The wheel asks only for ids it was given.
pub trait TimerStore {
    /// The node of timer `id`.
    fn timer_node(&mut self, id: u32) -> &mut TimerNode;
}

/// First and last link of a list; both zero if it is empty.
#[derive(Clone, Copy, Debug, Default)]
struct WheelSlot {
    first: u32,
    last: u32,
}

/// The wheel. Its nodes are in a [`TimerStore`] that every call gets; it must be the same one each time.
#[derive(Debug)]
pub struct TimerWheel {
    /// The tick up to which time has come. Its slot of level 0 may still hold timers that are due.
    current: u64,
    /// Which slots of a level are not empty.
    occupied: [u128; LEVELS],
    /// `LEVELS * RING_SLOTS` of them.
    slots: Box<[WheelSlot]>,
    /// Bit `l`: the slot of level `l` after the current one has been dealt out; timers for it go below.
    cascaded_ahead: u8,
    /// `current` entered a slot of level 1 or above that may not have been dealt out yet.
    needs_cascade: bool,
    /// The tick at which look-ahead ran last.
    last_cascade_ahead: u64,
    /// [`FORCED_MOVES_MAX`] and [`AHEAD_MOVES_MAX`], which tests make small.
    forced_moves_max: u32,
    ahead_moves_max: u32,
    len: usize,
}

impl TimerWheel {
    /// An empty wheel whose time is `now`.
    pub fn new(now: Instant) -> Self {
        let current = now.as_nanos() >> TICK_SHIFT;
        Self {
            current,
            occupied: [0; LEVELS],
            slots: vec![WheelSlot::default(); LEVELS * RING_SLOTS as usize].into_boxed_slice(),
            cascaded_ahead: 0,
            needs_cascade: false,
            last_cascade_ahead: current,
            forced_moves_max: FORCED_MOVES_MAX,
            ahead_moves_max: AHEAD_MOVES_MAX,
            len: 0,
        }
    }

    /// How many timers are armed.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no timer is armed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `node` is armed, as [`TimerNode::is_armed`].
    pub fn is_armed(&self, node: &TimerNode) -> bool {
        node.is_armed()
    }

    /// Arms timer `id` to fire at `at` rounded up to the next tick, instead of when it would have fired if it was armed.
    ///
    /// A time that has passed means the tick after the one in work: a handler that always arms its timer again "now"
    /// cannot keep `pop_expired` going forever. `id` must not exceed [`TIMER_ID_MAX`].
    pub fn schedule<S: TimerStore + ?Sized>(&mut self, store: &mut S, id: u32, at: Instant) {
        debug_assert!(id <= TIMER_ID_MAX);
        if store.timer_node(id).is_armed() {
            self.unlink(store, id);
        } else {
            self.len += 1;
        }
        let top = LEVEL_BITS * (LEVELS as u32 - 1);
        let latest = (((self.current >> top) + RING_SLOTS) << top) - 1;
        let tick = at.as_nanos().div_ceil(1 << TICK_SHIFT).clamp(self.current + 1, latest);
        // Time is inside every slot of the levels above the highest bit that differs, and those are dealt out unless unsettled.
        let differing = (self.current ^ tick).ilog2() / LEVEL_BITS;
        let level = if self.needs_cascade { LEVELS - 1 } else { (differing as usize).min(LEVELS - 1) };
        let slot = self.slot_for(level, tick);
        self.append(store, slot, id, tick);
    }

    /// Arms timer `id` for `at`, unless it is armed for that time or an earlier one already.
    #[inline]
    pub fn schedule_no_later<S: TimerStore + ?Sized>(&mut self, store: &mut S, id: u32, at: Instant) {
        let node = *store.timer_node(id);
        let tick = at.as_nanos().div_ceil(1 << TICK_SHIFT) as u32;
        // Compared as sequence numbers: the low 32 bits of a tick go round in 78 hours, so the two may be 39 hours apart.
        if node.is_armed() && (node.deadline.wrapping_sub(tick) as i32) <= 0 {
            return;
        }
        self.schedule(store, id, at);
    }

    /// Makes sure that timer `id` does not fire. Returns whether it was armed.
    pub fn cancel<S: TimerStore + ?Sized>(&mut self, store: &mut S, id: u32) -> bool {
        let armed = store.timer_node(id).is_armed();
        if armed {
            self.unlink(store, id);
            self.len -= 1;
        }
        armed
    }

    /// Takes the next timer that is due at `now`, which is then not armed any more. To be called until it returns `None`.
    ///
    /// `None` with a [`TimerWheel::next_deadline`] that is not after `now` means that the work of one call is done
    /// and more is left for the next turn of the shard.
    pub fn pop_expired<S: TimerStore + ?Sized>(&mut self, store: &mut S, now: Instant) -> Option<u32> {
        let now = now.as_nanos() >> TICK_SHIFT;
        let mut moves = self.forced_moves_max;
        loop {
            if self.needs_cascade && !self.cascade_current(store, &mut moves) {
                return None;
            }
            let due = self.slots[slot_of(0, self.current)].first;
            if due != 0 {
                self.unlink(store, due - 1);
                self.len -= 1;
                return Some(due - 1);
            }
            if self.current >= now {
                if self.last_cascade_ahead != self.current {
                    self.last_cascade_ahead = self.current;
                    self.cascade_next(store);
                }
                return None;
            }
            self.advance_to(self.next_occupied().map_or(now, |next| next.min(now)));
        }
    }

    /// When to call [`TimerWheel::pop_expired`] next: never later than the earliest timer. `None` if no timer is armed.
    ///
    /// It may be earlier than the earliest timer, which happens at most five times for each.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.len == 0 {
            return None;
        }
        let due = self.needs_cascade || self.slots[slot_of(0, self.current)].first != 0;
        let tick = if due { self.current } else { self.next_occupied()? };
        Some(Instant::from_nanos(tick.saturating_mul(1 << TICK_SHIFT)))
    }

    /// The slot where a timer for `tick` belongs, starting from `level`, which is known to be high enough.
    ///
    /// Of two timers for one tick the one armed later is never further down than the other. That keeps them in order.
    fn slot_for(&self, mut level: usize, tick: u64) -> usize {
        while level > 0 && self.is_cascaded(level, index_at(level, tick)) {
            level -= 1;
        }
        slot_of(level, index_at(level, tick))
    }

    /// Whether timers for slot `index` (unwrapped) of `level` go to the level below.
    fn is_cascaded(&self, level: usize, index: u64) -> bool {
        let current = index_at(level, self.current);
        if index == current {
            self.slots[slot_of(level, index)].first == 0
        } else {
            index == current + 1 && self.cascaded_ahead & (1 << level) != 0
        }
    }

    /// The start of the first slot after the current ones that holds a timer, as a tick.
    fn next_occupied(&self) -> Option<u64> {
        let mut earliest: Option<u64> = None;
        for (level, occupied) in self.occupied.iter().enumerate() {
            let index = index_at(level, self.current);
            let following = occupied.rotate_right((index % RING_SLOTS) as u32) >> 1;
            if following != 0 {
                let slots_ahead = u64::from(following.trailing_zeros()) + 1;
                let start = (index + slots_ahead) << (LEVEL_BITS * level as u32);
                earliest = Some(earliest.map_or(start, |earliest| earliest.min(start)));
            }
        }
        earliest
    }

    /// Moves time on to `tick`. Slots in between must be empty.
    fn advance_to(&mut self, tick: u64) {
        debug_assert!(tick > self.current);
        let highest = ((self.current ^ tick).ilog2() / LEVEL_BITS).min(LEVELS as u32 - 1);
        // Of the levels whose slot changes, "the slot after the current one" is now another.
        self.cascaded_ahead &= !((2u32 << highest) - 1) as u8;
        self.needs_cascade |= highest > 0;
        self.current = tick;
    }

    /// Deals out the slots that time has entered. Returns false if `moves` ran out first.
    fn cascade_current<S: TimerStore + ?Sized>(&mut self, store: &mut S, moves: &mut u32) -> bool {
        for level in (1..LEVELS).rev() {
            if !self.cascade(store, level, index_at(level, self.current), moves) {
                return false;
            }
        }
        self.needs_cascade = false;
        true
    }

    /// Deals out the slots that time enters next, if it is half-way there.
    fn cascade_next<S: TimerStore + ?Sized>(&mut self, store: &mut S) {
        let mut moves = self.ahead_moves_max;
        for level in (1..LEVELS).rev() {
            let second_half = self.current >> (LEVEL_BITS * level as u32 - 1) & 1 == 1;
            if !second_half || self.cascaded_ahead & (1 << level) != 0 {
                continue;
            }
            if !self.cascade(store, level, index_at(level, self.current) + 1, &mut moves) {
                return;
            }
            self.cascaded_ahead |= 1 << level;
        }
    }

    /// Moves all timers of slot `index` (unwrapped) of `level` down, first ones first. Returns false if `moves` ran out.
    fn cascade<S: TimerStore + ?Sized>(
        &mut self,
        store: &mut S,
        level: usize,
        index: u64,
        moves: &mut u32,
    ) -> bool {
        let slot = slot_of(level, index);
        let shift = LEVEL_BITS * level as u32;
        while self.slots[slot].first != 0 {
            if *moves == 0 {
                return false;
            }
            *moves -= 1;
            let id = self.slots[slot].first - 1;
            let below = u64::from(store.timer_node(id).deadline) & ((1 << shift) - 1);
            let tick = index << shift | below;
            self.unlink(store, id);
            let place = self.slot_for(level - 1, tick);
            self.append(store, place, id, tick);
        }
        true
    }

    fn append<S: TimerStore + ?Sized>(&mut self, store: &mut S, slot: usize, id: u32, tick: u64) {
        let mark = SLOT_MARK | slot as u32;
        let last = self.slots[slot].last;
        let prev = if last == 0 { mark } else { last };
        *store.timer_node(id) = TimerNode { next: mark, prev, deadline: tick as u32 };
        if last == 0 {
            self.slots[slot].first = id + 1;
            self.occupied[slot / RING_SLOTS as usize] |= 1 << (slot as u64 % RING_SLOTS);
        } else {
            store.timer_node(last - 1).next = id + 1;
        }
        self.slots[slot].last = id + 1;
    }

    fn unlink<S: TimerStore + ?Sized>(&mut self, store: &mut S, id: u32) {
        let TimerNode { next, prev, .. } = core::mem::take(store.timer_node(id));
        let (is_first, is_last) = (prev & SLOT_MARK != 0, next & SLOT_MARK != 0);
        if is_first && is_last {
            let slot = (prev & !SLOT_MARK) as usize;
            self.slots[slot] = WheelSlot::default();
            self.occupied[slot / RING_SLOTS as usize] &= !(1 << (slot as u64 % RING_SLOTS));
            return;
        }
        if is_first {
            self.slots[(prev & !SLOT_MARK) as usize].first = next;
        } else {
            store.timer_node(prev - 1).next = next;
        }
        if is_last {
            self.slots[(next & !SLOT_MARK) as usize].last = prev;
        } else {
            store.timer_node(next - 1).prev = prev;
        }
    }
}

/// Number of the slot of `level` that `tick` falls into, not wrapped around.
const fn index_at(level: usize, tick: u64) -> u64 {
    tick >> (LEVEL_BITS * level as u32)
}

/// Where that slot is kept.
const fn slot_of(level: usize, index: u64) -> usize {
    level * RING_SLOTS as usize + (index % RING_SLOTS) as usize
}

#[cfg(test)]
mod tests;
