//! TIME_WAIT (RFC 9293 §3.6.1): a small entry of its own, in the flow table like a connection.
//!
//! All entries live equally long, so they stand in a list in order of expiry; restarting one moves it to the end.
//! At `time_wait_max` the oldest goes and is counted.

use super::conn::{Flags, NONE, Tcb};
use super::demux::{AddressPool, FlowKey};
use crate::tables::memory_of;
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use core::time::Duration;

/// One connection in TIME_WAIT.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimeWait {
    pub remote_ip: u32,
    pub local_ip: u32,
    pub remote_port: u16,
    pub local_port: u16,
    pub rcv_nxt: SeqNumber,
    pub snd_nxt: SeqNumber,
    pub ts_recent: u32,
    pub ts_offset: u32,
    /// When it ends, in ms (low bits of the clock).
    deadline: u32,
    /// When we last answered, in ms: answers are rate limited.
    pub last_oow_ack_time: u32,
    prev: u32,
    next: u32,
    /// Window we advertised, unscaled.
    pub window: u16,
    pub v6: bool,
    /// Bit 0: with timestamps; above it the priority of what it sends.
    timestamps_and_priority: u8,
}

const _: () = assert!(size_of::<TimeWait>() <= 48);

impl TimeWait {
    pub fn matches(&self, key: &FlowKey, addresses: &AddressPool) -> bool {
        self.remote_port == key.remote_port
            && self.local_port == key.local_port
            && addresses.matches(self.v6, self.remote_ip, self.local_ip, key)
    }

    #[inline(always)]
    pub fn key(&self, addresses: &AddressPool) -> FlowKey {
        addresses.key(self.v6, self.remote_ip, self.local_ip, self.remote_port, self.local_port)
    }

    /// Timestamps are in use (RFC 7323).
    #[inline(always)]
    pub const fn timestamps(&self) -> bool {
        self.timestamps_and_priority & 1 != 0
    }

    /// The connection's.
    pub const fn priority(&self) -> u8 {
        self.timestamps_and_priority >> 1
    }

    /// The entry for a connection of this priority. `remote_ip` is a reference of its own into the address pool.
    #[inline(always)]
    pub fn from_tcb(c: &Tcb, remote_ip: u32, priority: u8) -> Self {
        let scale = if c.has(Flags::WSCALE) { c.rcv_wscale() } else { 0 };
        Self {
            remote_ip,
            local_ip: c.local_ip,
            remote_port: c.remote_port,
            local_port: c.local_port,
            rcv_nxt: c.rcv_nxt,
            snd_nxt: c.snd_nxt,
            ts_recent: c.ts_recent,
            ts_offset: c.ts_offset,
            deadline: 0,
            last_oow_ack_time: 0,
            prev: NONE,
            next: NONE,
            // Rounded up, so that the right edge does not move back.
            window: u16::try_from(c.rcv_wnd().div_ceil(1 << scale)).unwrap_or(u16::MAX),
            v6: c.has(Flags::V6),
            timestamps_and_priority: u8::from(c.has(Flags::TIMESTAMPS)) | priority << 1,
        }
    }
}

/// All entries of a shard.
pub(crate) struct TimeWaitTable {
    entries: Vec<TimeWait>,
    free: u32,
    head: u32,
    tail: u32,
    len: usize,
    max: usize,
    lifetime_ms: u32,
}

impl TimeWaitTable {
    pub fn new(max: u32, lifetime: Duration) -> Self {
        Self {
            entries: Vec::with_capacity(max as usize),
            free: NONE,
            head: NONE,
            tail: NONE,
            len: 0,
            max: max as usize,
            lifetime_ms: lifetime.as_millis() as u32,
        }
    }

    /// The memory that is reserved.
    pub fn memory(&self) -> *const [u8] {
        memory_of(&self.entries)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Most entries that there ever were at a time: places are used again before there are more.
    pub fn high_water(&self) -> usize {
        self.entries.len()
    }

    /// The entry in a place, if there is one.
    pub fn get_live(&self, index: u32) -> Option<&TimeWait> {
        self.entries.get(index as usize).filter(|entry| entry.prev != index)
    }

    /// How much longer an entry lives, in ms.
    pub fn remaining_ms(&self, entry: &TimeWait, now_ms: u32) -> u32 {
        (entry.deadline.wrapping_sub(now_ms) as i32).max(0) as u32
    }

    pub fn is_full(&self) -> bool {
        self.len >= self.max
    }

    pub fn get(&self, index: u32) -> &TimeWait {
        &self.entries[index as usize]
    }

    pub fn get_mut(&mut self, index: u32) -> &mut TimeWait {
        &mut self.entries[index as usize]
    }

    /// All entries, for invariant checks.
    pub fn iter(&self) -> impl Iterator<Item = &TimeWait> {
        let next = |e: &&TimeWait| (e.next != NONE).then(|| self.get(e.next));
        core::iter::successors(self.oldest().map(|i| self.get(i)), next)
    }

    /// The entry that ends first.
    pub fn oldest(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    /// The entry that ends after `entry`.
    pub fn next_expiring(&self, entry: &TimeWait) -> Option<&TimeWait> {
        self.entries.get(entry.next as usize)
    }

    /// When the oldest entry ends, given the current time.
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let left = self.oldest().map(|i| self.get(i).deadline.wrapping_sub(now.as_millis() as u32) as i32)?;
        Some(now + Duration::from_millis(left.max(0) as u64))
    }

    /// Adds an entry; the table must not be full.
    #[inline(always)]
    pub fn insert(&mut self, mut entry: TimeWait, now_ms: u32) -> u32 {
        entry.deadline = now_ms.wrapping_add(self.lifetime_ms);
        entry.last_oow_ack_time = now_ms.wrapping_sub(1 << 20);
        entry.prev = self.tail;
        let index = if self.free != NONE {
            let index = self.free;
            self.free = self.entries[index as usize].next;
            self.entries[index as usize] = entry;
            index
        } else {
            self.entries.push(entry);
            (self.entries.len() - 1) as u32
        };
        self.append(index);
        self.len += 1;
        index
    }

    /// Starts its time again.
    pub fn restart(&mut self, index: u32, now_ms: u32) {
        self.unlink(index);
        let (tail, deadline) = (self.tail, now_ms.wrapping_add(self.lifetime_ms));
        let entry = self.get_mut(index);
        (entry.prev, entry.next, entry.deadline) = (tail, NONE, deadline);
        self.append(index);
    }

    /// How long an entry has been there, in ms.
    pub fn age_ms(&self, index: u32, now_ms: u32) -> u32 {
        let began = self.get(index).deadline.wrapping_sub(self.lifetime_ms);
        now_ms.wrapping_sub(began)
    }

    /// Removes an entry.
    pub fn remove(&mut self, index: u32) {
        self.unlink(index);
        let free = self.free;
        let entry = self.get_mut(index);
        // No living entry is its own predecessor.
        (entry.prev, entry.next) = (index, free);
        self.free = index;
        self.len -= 1;
    }

    /// The oldest entry, if its time is over.
    pub fn expired(&self, now_ms: u32) -> Option<u32> {
        let index = self.oldest()?;
        let over = now_ms.wrapping_sub(self.get(index).deadline) as i32 >= 0;
        over.then_some(index)
    }

    /// Makes the tail point to an entry that points back to it.
    #[inline(always)]
    fn append(&mut self, index: u32) {
        match self.tail {
            NONE => self.head = index,
            tail => self.get_mut(tail).next = index,
        }
        self.tail = index;
    }

    fn unlink(&mut self, index: u32) {
        let (prev, next) = (self.get(index).prev, self.get(index).next);
        match prev {
            NONE => self.head = next,
            prev => self.get_mut(prev).next = next,
        }
        match next {
            NONE => self.tail = prev,
            next => self.get_mut(next).prev = prev,
        }
    }
}
