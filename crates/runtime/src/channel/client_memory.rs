//! The memory that the stack shares with one client: rings of doorbells, credits and slots for offers.
//!
//! ```text
//!   words        state of both rings, sleep state, offer slots, slots for preallocated sockets
//!   slots        of both rings
//!   credits      one word for each listener
//!   flags        of both rings: a byte for each socket, and for each listener
//! ```
//!
//! Each client has a memory file of its own, which the stack creates when it admits the client and which no
//! other client had before. Pages are allocated on first use: a client that owns few sockets takes four or
//! five, however many sockets and listeners the domain may have.
#![allow(unsafe_code)] // lends parts of a mapping that other processes write

use super::doorbells::{DoorbellWords, Doorbells};
use super::mapping::{self, PAGE, SharedMapping, invalid};
use super::sleep_state::SleepState;
use super::sync::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::Arc;

/// Most connections offered to a client at a time.
pub(crate) const OFFERS_MAX: usize = 64;
/// Most preallocated sockets of a client at a time.
pub(crate) const PREALLOCATED_MAX: usize = 64;
/// Bit of a client's credits for a listener: the client gets connections only if no other client has credit.
pub(crate) const FALLBACK_CREDIT: u32 = 1 << 31;
/// Least and most slots of a ring. A ring of a domain with fewer sockets has a slot for each.
const SLOTS_MIN: usize = 1 << 10;
const SLOTS_MAX: usize = 1 << 16;
/// Sockets for each slot of a ring.
const SOCKETS_PER_SLOT: usize = 64;

/// The words at the start of the memory.
#[repr(C)]
struct ClientHeader {
    /// Doorbells from the client to the stack.
    to_stack: DoorbellWords,
    /// Doorbells from the stack to the client.
    to_client: DoorbellWords,
    /// Sleep state of the client.
    sleep: SleepState,
    /// The stack yielded its CPU to the client, which wakes the stack when it goes to sleep itself.
    has_cpu: AtomicU32,
    /// The CPU on which the client last began to run, plus one; 0 if unknown. Written by the client.
    cpu: AtomicU32,
    /// The stack has revoked offers to the client, and makes no more until the client notifies it.
    offers_suspended: AtomicU32,
    /// See [`super::socket::OfferSlot`].
    offers: [AtomicU64; OFFERS_MAX],
    /// See [`super::socket::PreallocatedSocket`].
    preallocated: [AtomicU64; PREALLOCATED_MAX],
}

/// Sizes, and offsets in bytes, of the parts of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ClientLayout {
    sockets: usize,
    listeners: usize,
    /// Sockets and listeners: flags of a ring.
    flags: usize,
    /// Slots of a ring: a power of two.
    slots: usize,
    /// Of the ring to the stack, and of the ring to the client.
    slots_offsets: [usize; 2],
    credits_offset: usize,
    /// Of the same rings.
    flags_offsets: [usize; 2],
    total: usize,
}

impl ClientLayout {
    fn new(sockets: usize, listeners: usize) -> Self {
        let all_sockets = sockets.next_power_of_two();
        let slots = (all_sockets / SOCKETS_PER_SLOT).clamp(SLOTS_MIN, SLOTS_MAX).min(all_sockets.max(2));
        let (slots_bytes, flags) = (slots * size_of::<AtomicU32>(), sockets + listeners);
        let slots_offset = size_of::<ClientHeader>().next_multiple_of(PAGE / 2);
        let credits_offset = (slots_offset + 2 * slots_bytes).next_multiple_of(PAGE);
        let flags_offset = (credits_offset + listeners * size_of::<AtomicU32>()).next_multiple_of(PAGE);
        Self {
            sockets,
            listeners,
            flags,
            slots,
            slots_offsets: [slots_offset, slots_offset + slots_bytes],
            credits_offset,
            flags_offsets: [flags_offset, flags_offset + flags],
            total: (flags_offset + 2 * flags).next_multiple_of(PAGE),
        }
    }
}

/// The memory of one client of one shard. Clones of the `Arc` share the mapping.
#[derive(Debug)]
pub(super) struct ClientMemory {
    mapping: SharedMapping,
    layout: ClientLayout,
}

impl ClientMemory {
    /// Creates the memory of a client of a domain that may have this many sockets and listeners. Returns the
    /// file, too, for the client.
    ///
    /// # Errors
    /// Returns an error if the kernel has no memory, descriptor or mapping left.
    pub fn create(sockets: usize, listeners: usize) -> io::Result<(Arc<Self>, OwnedFd)> {
        let layout = ClientLayout::new(sockets, listeners);
        let file = mapping::create_sealed("ginnel-client", layout.total)?;
        let mapping = SharedMapping::new(&file, layout.total)?;
        Ok((Arc::new(Self { mapping, layout }), file))
    }

    /// Opens the memory that a stack has created for this client.
    ///
    /// # Errors
    /// Returns an error if the file is not valid, or cannot be mapped.
    pub fn open(file: &OwnedFd, sockets: usize, listeners: usize) -> io::Result<Arc<Self>> {
        let layout = ClientLayout::new(sockets, listeners);
        if mapping::sealed_size(file)? != layout.total {
            return Err(invalid("the size of the client's memory does not match the region"));
        }
        Ok(Arc::new(Self { mapping: SharedMapping::new(file, layout.total)?, layout }))
    }

    /// Makes this process's later changes invisible to other processes, and forgets everything that is in the
    /// memory: no notification, credit or offer. Returns false if the memory can only be read now
    /// ([`SharedMapping::make_private`]).
    pub fn make_private(&self) -> bool {
        self.mapping.make_private(None)
    }

    /// See [`SharedMapping::make_page_writable`].
    pub fn make_page_writable(&self, address: usize) -> bool {
        self.mapping.make_page_writable(address)
    }

    /// Returns how many bytes are mapped.
    pub fn bytes(&self) -> u64 {
        self.mapping.bytes() as u64
    }

    #[inline]
    fn header(&self) -> &ClientHeader {
        // SAFETY: atomics, at the start of the mapping, which `ClientLayout` makes large enough.
        unsafe { &self.mapping.slice_unchecked::<ClientHeader>(0, 1)[0] }
    }

    /// Returns a ring: 0 is the ring to the stack, 1 the ring to the client.
    #[inline]
    fn doorbells<'a>(&'a self, words: &'a DoorbellWords, index: usize) -> Doorbells<'a> {
        let ClientLayout { flags, slots, slots_offsets, flags_offsets, .. } = &self.layout;
        // SAFETY: atomics; `ClientLayout` aligns the slots, and has room for the slots and flags of two
        // rings.
        unsafe {
            Doorbells {
                words,
                slots: self.mapping.slice_unchecked::<AtomicU32>(slots_offsets[index], *slots),
                flags: self.mapping.slice_unchecked::<AtomicU8>(flags_offsets[index], *flags),
            }
        }
    }

    /// Returns the ring to the stack.
    #[inline]
    pub fn to_stack(&self) -> Doorbells<'_> {
        self.doorbells(&self.header().to_stack, 0)
    }

    /// Returns the ring to the client.
    #[inline]
    pub fn to_client(&self) -> Doorbells<'_> {
        self.doorbells(&self.header().to_client, 1)
    }

    /// Returns the number of a listener in the rings. The lower numbers are those of sockets.
    pub fn doorbell_of_listener(&self, listener: u32) -> u32 {
        // Cannot truncate: there are at most 2^24 sockets and 2^16 listeners.
        self.layout.sockets as u32 + listener
    }

    /// Returns the listener that has the number `doorbell` in the rings; `None` if none has it.
    pub fn listener_of_doorbell(&self, doorbell: u32) -> Option<u32> {
        doorbell.checked_sub(self.layout.sockets as u32).filter(|at| (*at as usize) < self.layout.listeners)
    }

    /// Returns the sleep state of the client.
    #[inline]
    pub fn sleep(&self) -> &SleepState {
        &self.header().sleep
    }

    /// Returns the flag that says that the stack yielded its CPU to the client.
    #[inline]
    pub fn has_cpu(&self) -> &AtomicU32 {
        &self.header().has_cpu
    }

    /// Publishes the CPU on which the client runs.
    pub fn set_cpu(&self, cpu: usize) {
        // Cannot truncate: CPU numbers are small.
        self.header().cpu.store(cpu as u32 + 1, Ordering::Relaxed);
    }

    /// Returns the CPU on which the client claims to run.
    pub fn cpu(&self) -> Option<usize> {
        self.header().cpu.load(Ordering::Relaxed).checked_sub(1).map(|cpu| cpu as usize)
    }

    /// Returns the word that says how many connections of a listener the client would accept now, and
    /// [`FALLBACK_CREDIT`]; `None` if there is no listener of this number.
    #[inline]
    pub fn credits(&self, listener: u32) -> Option<&AtomicU32> {
        let ClientLayout { listeners, credits_offset, .. } = self.layout;
        // SAFETY: atomics, at the start of a page; `ClientLayout` has room for them.
        unsafe { self.mapping.slice_unchecked::<AtomicU32>(credits_offset, listeners) }.get(listener as usize)
    }

    /// Returns the offer slots: see [`super::socket::OfferSlot`].
    pub fn offers(&self) -> &[AtomicU64; OFFERS_MAX] {
        &self.header().offers
    }

    /// Returns the slots for preallocated sockets: see [`super::socket::PreallocatedSocket`].
    pub fn preallocated(&self) -> &[AtomicU64; PREALLOCATED_MAX] {
        &self.header().preallocated
    }

    /// Returns the flag that says that the stack offers no connections until the client notifies it.
    pub fn offers_suspended(&self) -> &AtomicU32 {
        &self.header().offers_suspended
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::doorbells::{NOTIFIED, NotifyQueue};
    use super::*;

    #[test]
    fn both_sides_see_the_same_memory() {
        let (stack, file) = ClientMemory::create(5, 3).unwrap();
        let client = ClientMemory::open(&file, 5, 3).unwrap();
        assert_eq!(stack.layout, client.layout);
        let mut notifier = client.to_stack().notifier();
        let mut queue = NotifyQueue::default();
        for number in [4, client.doorbell_of_listener(2)] {
            notifier.notify(client.to_stack(), number, NOTIFIED);
            assert_eq!(queue.pop(stack.to_stack()), Ok(Some((number, NOTIFIED))));
        }
        assert_eq!(queue.pop(stack.to_stack()), Ok(None));
        client.credits(2).unwrap().store(7, Ordering::Relaxed);
        assert_eq!(stack.credits(2).unwrap().load(Ordering::Relaxed), 7);
        assert!(stack.credits(3).is_none());
        assert_eq!([4, 5, 7, 8].map(|at| stack.listener_of_doorbell(at)), [None, Some(0), Some(2), None]);
        assert!(client.make_private());
        assert_eq!(client.credits(2).unwrap().load(Ordering::Relaxed), 0);
        assert_eq!(stack.credits(2).unwrap().load(Ordering::Relaxed), 7);
    }

    #[test]
    fn layout_parts_do_not_overlap() {
        for (sockets, listeners) in [(1, 1), (5, 3), (1 << 16, 4096), (1 << 24, 65_535)] {
            let layout = ClientLayout::new(sockets, listeners);
            assert!(layout.slots.is_power_of_two() && layout.slots <= SLOTS_MAX);
            assert!(size_of::<ClientHeader>() <= layout.slots_offsets[0]);
            assert!(layout.slots_offsets[0] + 4 * layout.slots <= layout.slots_offsets[1]);
            assert!(layout.slots_offsets[1] + 4 * layout.slots <= layout.credits_offset);
            assert!(layout.credits_offset + 4 * listeners <= layout.flags_offsets[0]);
            assert!(layout.flags_offsets[0] + sockets + listeners <= layout.flags_offsets[1]);
            assert!(layout.flags_offsets[1] + sockets + listeners <= layout.total);
        }
        assert_eq!(ClientLayout::new(1 << 16, 4096).slots, SLOTS_MIN);
    }

    #[test]
    fn memory_of_another_size_is_refused() {
        let (_, file) = ClientMemory::create(5, 3).unwrap();
        let refused = ClientMemory::open(&file, 50_000, 3).expect_err("refused").to_string();
        assert_eq!(refused, "channel: the size of the client's memory does not match the region");
    }
}
