//! TIME-WAIT (RFC 9293 §3.6.1): a small entry of its own, in the flow table like a connection.
//!
//! All entries have equal lifetimes, so they are in a list ordered by expiry; restarting an entry moves it to
//! the end. At `time_wait_max` the oldest entry is removed and counted.

pub(super) mod image;

use super::conn::{Flags, NONE, Tcb};
use super::demux::{AddressPool, FlowKey};
use super::port_use::PortSharing;
use crate::tables::memory_of;
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// A connection in TIME-WAIT.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct TimeWait {
    #[serde(skip)]
    pub remote_ip: u32,
    #[serde(skip)]
    pub local_ip: u32,
    pub remote_port: u16,
    pub local_port: u16,
    pub rcv_nxt: SeqNumber,
    pub snd_nxt: SeqNumber,
    pub ts_recent: u32,
    pub ts_offset: u32,
    /// When the entry expires, in ms (low bits of the clock).
    deadline: u32,
    /// When a segment was last answered, in ms: answers are rate limited.
    pub last_oow_ack_time: u32,
    #[serde(skip)]
    prev: u32,
    #[serde(skip)]
    next: u32,
    /// Window field of the segments that are sent: the advertised window, shifted right by its scale.
    pub window: u16,
    /// Bit 0: the addresses are IPv6; bits 2 to 7: DSCP of the segments that are sent.
    tos_and_v6: u8,
    /// Bit 0: timestamps are in use; bits 1 to 3: priority of the segments that are sent; bits 4 and 5:
    /// whether the port is shared.
    small_fields: u8,
}

const _: () = assert!(size_of::<TimeWait>() <= 48);

impl TimeWait {
    pub fn matches(&self, key: &FlowKey, addresses: &AddressPool) -> bool {
        self.remote_port == key.remote_port
            && self.local_port == key.local_port
            && addresses.matches(self.v6(), self.remote_ip, self.local_ip, key)
    }

    #[inline(always)]
    pub fn key(&self, addresses: &AddressPool) -> FlowKey {
        addresses.key(self.v6(), self.remote_ip, self.local_ip, self.remote_port, self.local_port)
    }

    /// Returns whether timestamps are in use (RFC 7323).
    #[inline(always)]
    pub const fn timestamps(&self) -> bool {
        self.small_fields & 1 != 0
    }

    /// Returns whether the addresses are IPv6.
    #[inline(always)]
    pub const fn v6(&self) -> bool {
        self.tos_and_v6 & 1 != 0
    }

    /// Returns the type of service or traffic class of the segments that are sent.
    pub const fn tos(&self) -> u8 {
        self.tos_and_v6 & !1
    }

    /// Returns the priority of the connection.
    pub const fn priority(&self) -> u8 {
        self.small_fields >> 1 & 7
    }

    /// Returns the [`PortSharing::bits`] of the connection.
    #[inline(always)]
    pub const fn port_sharing_bits(&self) -> u8 {
        self.small_fields >> 4
    }

    /// Returns the entry for a connection of this priority and type of service, whose ECN bits are 0, that
    /// shares its port in this way. `remote_ip` is a reference of its own into the address pool.
    #[inline(always)]
    pub fn from_tcb(c: &Tcb, remote_ip: u32, (priority, tos): (u8, u8), sharing: PortSharing) -> Self {
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
            tos_and_v6: tos | u8::from(c.has(Flags::V6)),
            small_fields: u8::from(c.has(Flags::TIMESTAMPS)) | priority << 1 | sharing.bits() << 4,
        }
    }
}

/// The entries of a shard.
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

    /// Returns how many bytes a table for at most `max` entries reserves.
    pub const fn reserved_bytes(max: u32) -> usize {
        (max as usize).saturating_mul(size_of::<TimeWait>())
    }

    /// Returns the memory that is reserved.
    pub fn memory(&self) -> *const [u8] {
        memory_of(&self.entries)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the largest number of entries that ever existed at a time: vacant slots are reused before
    /// slots are added.
    pub fn high_water(&self) -> usize {
        self.entries.len()
    }

    /// Returns the entry in a slot, if the slot is in use.
    pub fn get_live(&self, index: u32) -> Option<&TimeWait> {
        self.entries.get(index as usize).filter(|entry| entry.prev != index)
    }

    /// Returns the time until an entry expires, in ms.
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

    /// Returns all entries, for invariant checks.
    pub fn iter(&self) -> impl Iterator<Item = &TimeWait> {
        let next = |e: &&TimeWait| (e.next != NONE).then(|| self.get(e.next));
        core::iter::successors(self.oldest().map(|i| self.get(i)), next)
    }

    /// Returns the entry that expires first.
    pub fn oldest(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    /// Returns the entry that expires after `entry`.
    pub fn next_expiring(&self, entry: &TimeWait) -> Option<&TimeWait> {
        self.entries.get(entry.next as usize)
    }

    /// Returns when the oldest entry expires, given the current time.
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let left = self.oldest().map(|i| self.get(i).deadline.wrapping_sub(now.as_millis() as u32) as i32)?;
        Some(now + Duration::from_millis(left.max(0) as u64))
    }

    /// Adds an entry. The table must not be full.
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

    /// Restarts the lifetime of an entry.
    pub fn restart(&mut self, index: u32, now_ms: u32) {
        self.unlink(index);
        let (tail, deadline) = (self.tail, now_ms.wrapping_add(self.lifetime_ms));
        let entry = self.get_mut(index);
        (entry.prev, entry.next, entry.deadline) = (tail, NONE, deadline);
        self.append(index);
    }

    /// Returns the age of an entry in ms.
    pub fn age_ms(&self, index: u32, now_ms: u32) -> u32 {
        let began = self.get(index).deadline.wrapping_sub(self.lifetime_ms);
        now_ms.wrapping_sub(began)
    }

    /// Removes an entry.
    pub fn remove(&mut self, index: u32) {
        self.unlink(index);
        let free = self.free;
        let entry = self.get_mut(index);
        // No entry in use is its own predecessor.
        (entry.prev, entry.next) = (index, free);
        self.free = index;
        self.len -= 1;
    }

    /// Returns the oldest entry, if it has expired.
    pub fn expired(&self, now_ms: u32) -> Option<u32> {
        let index = self.oldest()?;
        let is_expired = now_ms.wrapping_sub(self.get(index).deadline) as i32 >= 0;
        is_expired.then_some(index)
    }

    /// Makes the tail point to an entry that already points back to the tail.
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
