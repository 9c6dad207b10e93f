//! Timers for millions of connections: a hierarchical timing wheel with intrusive nodes.
//!
//! ```text
//!            now
//!             ▼
//! level 0  ..[x][ ][ ][x]..   128 slots of one tick (2^16 ns = 65.5 µs)
//! level 1  ..[ ][ ][x]....    128 slots of 64 ticks (4.2 ms)          a slot of level l+1 is cascaded
//! level 2  ..[x][ ]......     128 slots of 2^12 ticks (268 ms)        to the 64 slots below it before
//!   ⋮                                                                 its time begins
//! level 5  ..[ ][x]......     128 slots of 2^30 ticks (19.5 h)
//!
//! slot ──first──► node 17 ⇄ node 4 ⇄ node 99 ◄──last── slot       (ids into a store of the owner)
//! ```
//!
//! Arming, re-arming and cancelling are O(1). A timer moves down at most five times. Within a tick timers
//! fire in the order in which they were armed, and ticks fire in order, whatever the pattern of calls was:
//! the order depends on the inputs only.
//!
//! **No stall.** With 100 M keepalive timers one slot of level 4 has millions of nodes, each a cache miss.
//! Cascading them when their time comes would stop the shard for seconds. So every level has room for two
//! windows: while time is in the second half of one slot, the next slot is cascaded a few nodes at a time.
//! The rest, for example after a long sleep, is bounded for each call, too; then `pop_expired` returns `None`
//! although timers may be due, and `next_deadline` is not later than the present, so that the caller
//! continues after its next burst.
//!
//! **Never early.** Deadlines are rounded up to a tick. The only exception is a deadline beyond [`HORIZON`]
//! (103 days): the timer fires at the horizon, and its owner finds that it is not due and arms it again.
//!
//! A node has 12 bytes; it stores the low 32 bits of its deadline, because its slot implies the rest.

pub(crate) mod image;

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
/// Nodes that one call moves at most after their time has come: about 0.1 ms of cache misses.
const FORCED_MOVES_MAX: u32 = 1024;
/// Nodes that one call moves at most ahead of time. Once per tick this is half a million per second, and 100
/// M timers of two hours need 30,000.
const AHEAD_MOVES_MAX: u32 = 32;
/// A link with this bit names a slot (the end of a list), without it a node by its id + 1. Zero means "not
/// armed".
const SLOT_MARK: u32 = 1 << 31;

/// Longest time ahead that can certainly be represented; a later deadline fires at the horizon, early.
pub const HORIZON: Duration =
    Duration::from_nanos((RING_SLOTS - 1) << (LEVEL_BITS as u64 * (LEVELS as u64 - 1) + TICK_SHIFT as u64));

/// Largest id that a timer may have.
pub const TIMER_ID_MAX: u32 = SLOT_MARK - 2;

/// The timer of one connection (or neighbour, or other entry), which contains it. All zeros mean "not armed".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(into = "image::NodeImage", from = "image::NodeImage")]
pub struct TimerNode {
    next: u32,
    prev: u32,
    /// Low 32 bits of the tick at which it fires.
    deadline: u32,
}

const _: () = assert!(size_of::<TimerNode>() == 12);

impl TimerNode {
    /// Returns whether the timer will fire.
    #[inline]
    pub const fn is_armed(&self) -> bool {
        self.next != 0
    }

    /// Returns a node that is not armed, but that its owner will arm soon and has recorded under this number.
    /// Arming it replaces this state.
    #[inline]
    pub(crate) const fn deferred(number: u32) -> Self {
        Self { next: 0, prev: u32::MAX, deadline: number }
    }

    /// Returns a node that is not armed, but that its owner visits at a time of its own and has recorded
    /// under this number. Arming it replaces this state.
    #[inline]
    pub(crate) const fn listed(number: u32) -> Self {
        Self { next: 0, prev: u32::MAX - 1, deadline: number }
    }

    /// Returns whether the node is [deferred](TimerNode::deferred).
    #[inline]
    pub(crate) const fn is_deferred(&self) -> bool {
        self.next == 0 && self.prev == u32::MAX
    }
}

/// Storage of the nodes. The wheel requests only ids that it was given.
pub trait TimerStore {
    /// Returns the node of timer `id`.
    fn timer_node(&mut self, id: u32) -> &mut TimerNode;
}

/// First and last link of a list; both zero if it is empty.
#[derive(Clone, Copy, Debug, Default)]
struct WheelSlot {
    first: u32,
    last: u32,
}

/// The wheel. Its nodes are in a [`TimerStore`] that is passed to every call; it must be the same store each
/// time.
#[derive(Debug)]
pub struct TimerWheel {
    /// The tick up to which time has advanced. Its slot of level 0 may still have timers that are due.
    current: u64,
    /// Bitmap of each level's slots that are not empty.
    occupied: [u128; LEVELS],
    /// The `LEVELS * RING_SLOTS` slots.
    slots: Box<[WheelSlot]>,
    /// Bit `l`: the slot of level `l` after the current one was cascaded; timers for it belong to lower
    /// levels.
    cascaded_ahead: u8,
    /// True if `current` has entered a slot of level 1 or above that may not have been cascaded yet.
    needs_cascade: bool,
    /// The tick at which slots were last cascaded ahead of time.
    last_cascade_ahead: u64,
    /// [`FORCED_MOVES_MAX`] and [`AHEAD_MOVES_MAX`], which tests make small.
    forced_moves_max: u32,
    ahead_moves_max: u32,
    len: usize,
}

impl TimerWheel {
    /// Returns an empty wheel whose time is `now`.
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

    /// Returns the number of armed timers.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether no timer is armed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether `node` is armed, as [`TimerNode::is_armed`].
    pub fn is_armed(&self, node: &TimerNode) -> bool {
        node.is_armed()
    }

    /// Arms timer `id` to fire at `at`, rounded up to the next tick; replaces the time for which it was armed
    /// before.
    ///
    /// A time in the past means the tick after the current one: a handler that always arms its timer for
    /// "now" cannot keep `pop_expired` running forever. `id` must not exceed [`TIMER_ID_MAX`].
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
        // On levels above the highest differing bit, time is inside the slot, which was cascaded unless
        // `needs_cascade` is set.
        let differing = (self.current ^ tick).ilog2() / LEVEL_BITS;
        let level = if self.needs_cascade { LEVELS - 1 } else { (differing as usize).min(LEVELS - 1) };
        let slot = self.slot_for(level, tick);
        self.append(store, slot, id, tick);
    }

    /// Arms timer `id` for `at`, unless it is armed for that time or an earlier one.
    #[inline]
    pub fn schedule_no_later<S: TimerStore + ?Sized>(&mut self, store: &mut S, id: u32, at: Instant) {
        let node = *store.timer_node(id);
        let tick = at.as_nanos().div_ceil(1 << TICK_SHIFT) as u32;
        // Compared as sequence numbers: the low 32 bits of a tick wrap in 78 hours, so the two may be 39
        // hours apart.
        if node.is_armed() && (node.deadline.wrapping_sub(tick) as i32) <= 0 {
            return;
        }
        self.schedule(store, id, at);
    }

    /// Disarms timer `id`. Returns whether it was armed.
    pub fn cancel<S: TimerStore + ?Sized>(&mut self, store: &mut S, id: u32) -> bool {
        let armed = store.timer_node(id).is_armed();
        if armed {
            self.unlink(store, id);
            self.len -= 1;
        }
        armed
    }

    /// Takes the next timer that is due at `now`, which is disarmed. Must be called until it returns `None`.
    ///
    /// `None` with a [`TimerWheel::next_deadline`] that is not after `now` means that the work limit of one
    /// call is reached and more work is left for the next turn of the shard.
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

    /// Returns when to call [`TimerWheel::pop_expired`] next: never later than the earliest timer. `None` if
    /// no timer is armed.
    ///
    /// It may be earlier than the earliest timer, which happens at most five times for each timer.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.len == 0 {
            return None;
        }
        let due = self.needs_cascade || self.slots[slot_of(0, self.current)].first != 0;
        let tick = if due { self.current } else { self.next_occupied()? };
        Some(Instant::from_nanos(tick.saturating_mul(1 << TICK_SHIFT)))
    }

    /// Returns the slot to which a timer for `tick` belongs, beginning at `level`, which is known to be high
    /// enough.
    ///
    /// Of two timers for one tick the one that was armed later is never on a lower level than the other one,
    /// which keeps them in order.
    fn slot_for(&self, mut level: usize, tick: u64) -> usize {
        while level > 0 && self.is_cascaded(level, index_at(level, tick)) {
            level -= 1;
        }
        slot_of(level, index_at(level, tick))
    }

    /// Returns whether timers for slot `index` (not wrapped) of `level` belong to the level below.
    fn is_cascaded(&self, level: usize, index: u64) -> bool {
        let current = index_at(level, self.current);
        if index == current {
            self.slots[slot_of(level, index)].first == 0
        } else {
            index == current + 1 && self.cascaded_ahead & (1 << level) != 0
        }
    }

    /// Returns the start tick of the first slot after the current ones that has a timer.
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

    /// Advances time to `tick`. Slots in between must be empty.
    fn advance_to(&mut self, tick: u64) {
        debug_assert!(tick > self.current);
        let highest = ((self.current ^ tick).ilog2() / LEVEL_BITS).min(LEVELS as u32 - 1);
        // On the levels whose slot changes, another slot follows the current one now.
        self.cascaded_ahead &= !((2u32 << highest) - 1) as u8;
        self.needs_cascade |= highest > 0;
        self.current = tick;
    }

    /// Cascades the slots that time has entered. Returns false if `moves` is exhausted first.
    fn cascade_current<S: TimerStore + ?Sized>(&mut self, store: &mut S, moves: &mut u32) -> bool {
        for level in (1..LEVELS).rev() {
            if !self.cascade(store, level, index_at(level, self.current), moves) {
                return false;
            }
        }
        self.needs_cascade = false;
        true
    }

    /// Cascades the slots that time enters next, if it is half-way there.
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

    /// Moves all timers of slot `index` (not wrapped) of `level` to lower levels, in order. Returns false if
    /// `moves` is exhausted.
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
            let target = self.slot_for(level - 1, tick);
            self.append(store, target, id, tick);
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

/// Returns the number of the slot of `level` that `tick` belongs to, not wrapped.
const fn index_at(level: usize, tick: u64) -> u64 {
    tick >> (LEVEL_BITS * level as u32)
}

/// Returns the index of that slot in `slots`.
const fn slot_of(level: usize, index: u64) -> usize {
    level * RING_SLOTS as usize + (index % RING_SLOTS) as usize
}

#[cfg(test)]
mod tests;
