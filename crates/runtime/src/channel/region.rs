//! The layout of the memory that a stack shares with its clients.
//!
//! ```text
//!   header          parameters of the layout
//!   clients         for each: two rings of doorbells, credits and offer slots
//!   sockets         for each: state, requests, positions of both directions
//!   descriptions    for each socket and listener: state that processes share
//!   buffers         for each socket: received bytes, bytes to be sent
//!   large buffers   rings for sockets that move much data
//! ```
//!
//! The region is one memory file, sealed so that no process can shrink it: otherwise an access of another
//! process would fail. Pages are allocated on first use: a socket that never had more than a page in flight
//! in each direction takes two.
#![allow(unsafe_code)] // maps memory that other processes write, and lends parts of it

use super::ChannelConfig;
use super::description::SharedDescription;
use super::doorbells::{DoorbellWords, Doorbells};
use super::pending_options;
use super::stream::{LargeRings, Stream, StreamPositions};
use super::sync::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use crate::internal_fd::InternalFd;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::ptr::NonNull;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::sync::Arc;

/// Listeners that a client may have credit for.
// Listeners for which a client may have credit.
pub(crate) const LISTENERS_MAX: usize = 64;
/// Connections offered to a client at a time.
pub(crate) const OFFERS_MAX: usize = 64;
/// Preallocated sockets of a client at a time.
pub(crate) const PREALLOCATED_MAX: usize = 64;
/// Bit of a client's credits for a listener: the client gets connections only if no other client has credit.
pub(crate) const FALLBACK_CREDIT: u32 = 1 << 31;

const PAGE: usize = 4096;
/// "ginnelch" and the version of the layout.
const MAGIC: u64 = 0x6869_6e6e_656c_6308;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// The start of the region. Written once, by the stack.
#[repr(C)]
struct RegionHeader {
    magic: AtomicU64,
    sockets: AtomicU32,
    clients: AtomicU32,
    buffer_bytes: AtomicU32,
    large_bytes: AtomicU32,
    large_count: AtomicU32,
    /// The stack can be used: its addresses are checked.
    is_ready: AtomicU32,
    /// The CPU on which the stack's shard last began to run, plus one; 0 if unknown.
    cpu: AtomicU32,
}

/// The area of one client.
#[repr(C)]
struct ClientArea {
    /// Doorbells from the client to the stack.
    to_stack: DoorbellWords,
    /// Doorbells from the stack to the client.
    to_client: DoorbellWords,
    /// How many connections of each listener the client would accept now, and [`FALLBACK_CREDIT`].
    credits: [AtomicU32; LISTENERS_MAX],
    /// See [`super::socket::OfferSlot`].
    offers: [AtomicU64; OFFERS_MAX],
    /// See [`super::socket::PreallocatedSocket`].
    preallocated: [AtomicU64; PREALLOCATED_MAX],
    /// The CPU on which the client last began to run, plus one; 0 if unknown. Written by the client.
    cpu: AtomicU32,
    /// The stack has revoked offers to the client, and makes no more until the client notifies it.
    offers_suspended: AtomicU32,
}

/// The area of one socket.
#[repr(C, align(128))]
pub(super) struct SocketArea {
    // Written by the stack.
    /// How many sockets had this number before.
    pub generation: AtomicU32,
    /// See [`super::socket::state`].
    pub state: AtomicU32,
    /// The client's slot in which the socket is offered, if it is.
    pub offer_slot: AtomicU32,
    /// The stack holds received bytes back and wants to be notified when there is space.
    pub wants_recv_space: AtomicU32,
    /// Bytes that the peer acknowledged, if ack events are switched on.
    pub acked: AtomicU64,
    /// Lower limit of the position up to which bytes were sent, if clients limit the unsent bytes
    /// (`TCP_NOTSENT_LOWAT`).
    pub sent: AtomicU64,
    /// Number of out-of-band events: urgent data was announced or arrived, or a UDP socket got an error or a
    /// datagram that does not pass through the region. While it is 0, the two words about urgent data are
    /// invalid.
    pub oob_events: AtomicU32,
    /// UDP: the pending error (see [`super::datagram`]), which clients take. TCP: why the connection could
    /// not be opened (see [`super::socket::connect_error_from_word`]).
    pub error: AtomicU32,
    /// Port and address of both ends: local, then the peer's. IPv4 addresses are IPv4-mapped (RFC 4291
    /// §2.5.5.2). A client that opens a connection writes the peer's; the local port is 0 until the stack has
    /// opened the connection.
    endpoints: [[AtomicU32; 5]; 2],
    /// See [`super::urgent_mark`]: the urgent byte announced last (clients set the bit that it was taken),
    /// and earlier urgent bytes that are skipped in the stream.
    pub urgent_mark: AtomicU64,
    pub urgent_hole: AtomicU64,
    // Written by clients.
    /// See [`super::socket::request`].
    pub requests: AtomicU32,
    /// A write of a client was short, and the client wants to be notified when there is space.
    pub wants_send_space: AtomicU32,
    /// End of the last record that clients wrote (`MSG_EOR`); 0 if there is none. The stack clears the word
    /// when it has reached that position.
    pub record_end: AtomicU64,
    /// See [`super::lock`].
    pub lock: AtomicU32,
    /// See [`super::pending_options`]: the bits of the options that were set, and their values.
    pub pending_options: AtomicU32,
    pub option_values: [AtomicU32; pending_options::OPTION_KINDS],
    // Written by both sides, each its own words.
    incoming: StreamPositions,
    outgoing: StreamPositions,
}

/// A direction of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the stack to clients.
    Incoming,
    /// From clients to the stack.
    Outgoing,
}

/// Sizes, and offsets in bytes, of the parts of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RegionLayout {
    sockets: usize,
    clients: usize,
    /// Slots of a ring of doorbells: a power of two.
    doorbell_slots: usize,
    buffer_bytes: usize,
    client_bytes: usize,
    clients_offset: usize,
    sockets_offset: usize,
    descriptions_offset: usize,
    buffers_offset: usize,
    large_offset: usize,
    large_bytes: usize,
    large_count: u32,
    total: usize,
}

impl RegionLayout {
    fn new(config: &ChannelConfig) -> Self {
        let (sockets, clients) = (config.sockets_max as usize, config.clients_max as usize);
        let buffer_bytes = config.socket_buffer_bytes as usize;
        let doorbell_slots = sockets.next_power_of_two();
        let ring_bytes = doorbell_slots * size_of::<AtomicU32>() + sockets;
        let client_bytes = (size_of::<ClientArea>() + 2 * ring_bytes).next_multiple_of(PAGE);
        let clients_offset = PAGE;
        let sockets_offset = clients_offset + clients * client_bytes;
        let descriptions_offset = (sockets_offset + sockets * size_of::<SocketArea>()).next_multiple_of(PAGE);
        let shared = LISTENERS_MAX + sockets;
        let buffers_offset =
            (descriptions_offset + shared * size_of::<SharedDescription>()).next_multiple_of(PAGE);
        let large_offset = buffers_offset + sockets * 2 * buffer_bytes;
        let large_bytes = config.large_buffer_bytes as usize;
        // A large buffer that is not larger would be of no use.
        let large_count = if large_bytes > buffer_bytes { config.large_buffers_max } else { 0 };
        let total = large_offset + large_count as usize * large_bytes;
        Self {
            sockets,
            clients,
            doorbell_slots,
            buffer_bytes,
            client_bytes,
            clients_offset,
            sockets_offset,
            descriptions_offset,
            buffers_offset,
            large_offset,
            large_bytes,
            large_count,
            total,
        }
    }
}

/// The mapped region. Clones of the `Arc` share the mapping.
#[derive(Debug)]
pub(super) struct Region {
    base: NonNull<u8>,
    layout: RegionLayout,
    large_rings: LargeRings,
    file: InternalFd,
}

// SAFETY: the memory consists of atomics, and of bytes that `Stream` hands over between threads.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Creates a region without clients and sockets.
    ///
    /// # Errors
    /// Returns an error if the kernel has no memory for it.
    pub fn create(config: &ChannelConfig) -> io::Result<Arc<Self>> {
        let layout = RegionLayout::new(config);
        let file = memfd_create("ginnel-channel", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, layout.total as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        let region = Self::map(InternalFd::in_place(file), layout)?;
        let header = region.header();
        header.sockets.store(config.sockets_max, Ordering::Relaxed);
        header.clients.store(config.clients_max, Ordering::Relaxed);
        header.buffer_bytes.store(config.socket_buffer_bytes, Ordering::Relaxed);
        header.large_bytes.store(config.large_buffer_bytes, Ordering::Relaxed);
        header.large_count.store(config.large_buffers_max, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(Arc::new(region))
    }

    /// Opens the region that a stack in another process has created.
    ///
    /// # Errors
    /// Returns an error if the file is not a valid region, or cannot be mapped.
    pub fn open(file: OwnedFd) -> io::Result<Arc<Self>> {
        let invalid =
            |problem: &str| io::Error::new(io::ErrorKind::InvalidData, format!("channel: {problem}"));
        if !fcntl_get_seals(&file)?.contains(SEALS) {
            return Err(invalid("the region is not sealed against shrinking"));
        }
        let size = usize::try_from(fstat(&file)?.st_size).unwrap_or(0);
        if size < PAGE {
            return Err(invalid("the region is too short"));
        }
        let first = ChannelConfig {
            sockets_max: 0,
            clients_max: 0,
            large_buffers_max: 0,
            ..ChannelConfig::default()
        };
        let head =
            Self::map(InternalFd::in_place(file), RegionLayout { total: PAGE, ..RegionLayout::new(&first) })?;
        let header = head.header();
        if header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(invalid("the region has another layout version"));
        }
        let config = ChannelConfig {
            sockets_max: header.sockets.load(Ordering::Relaxed),
            clients_max: header.clients.load(Ordering::Relaxed),
            socket_buffer_bytes: header.buffer_bytes.load(Ordering::Relaxed),
            large_buffer_bytes: header.large_bytes.load(Ordering::Relaxed),
            large_buffers_max: header.large_count.load(Ordering::Relaxed),
            ..ChannelConfig::default()
        };
        config.validate().map_err(|e| invalid(&e.to_string()))?;
        let layout = RegionLayout::new(&config);
        if layout.total != size {
            return Err(invalid("the region's size does not match its header"));
        }
        Ok(Arc::new(Self::map(InternalFd::new(head.file.as_fd().try_clone_to_owned()?), layout)?))
    }

    fn map(file: InternalFd, layout: RegionLayout) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which is unmapped when the value is dropped and nothing borrows from it.
        let at = unsafe {
            mmap(
                core::ptr::null_mut(),
                layout.total,
                protection,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                0,
            )?
        };
        let at = NonNull::new(at.cast()).ok_or_else(|| io::Error::other("channel: mapped at address 0"))?;
        // SAFETY: inside the mapping, or its end if there are no large buffers.
        let first = unsafe { at.add(layout.large_offset.min(layout.total)) };
        let rings = LargeRings { memory: first, bytes: layout.large_bytes, count: layout.large_count };
        Ok(Self { base: at, layout, large_rings: rings, file })
    }

    /// Replaces the mapping by a private copy: later changes are invisible to other processes. This is for a
    /// process that was forked in the middle of a call which the parent continues. Makes one system call for
    /// memory that is already mapped, and may be called in a signal handler.
    ///
    /// # Errors
    /// Returns an error if the kernel has no memory.
    pub fn make_private(&self) -> io::Result<()> {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE);
        // SAFETY: replaces the whole mapping of `map` by a copy of the same bytes, so borrows of it stay
        // valid.
        unsafe { mmap(self.base.as_ptr().cast(), self.layout.total, protection, flags, &self.file, 0)? };
        Ok(())
    }

    /// Returns how many bytes are mapped.
    pub fn bytes(&self) -> u64 {
        self.layout.total as u64
    }

    /// Returns the file, to be passed to a client.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the file's descriptor.
    pub fn internal_fd(&self) -> &InternalFd {
        &self.file
    }

    /// Returns whether the stack can be used.
    pub fn is_ready(&self) -> bool {
        self.header().is_ready.load(Ordering::Acquire) != 0
    }

    /// Declares that the stack can be used from now on.
    pub fn set_ready(&self) {
        self.header().is_ready.store(1, Ordering::Release);
    }

    /// Publishes the CPU on which the stack's shard runs.
    pub fn set_cpu(&self, cpu: usize) {
        // Cannot truncate: CPU numbers are small.
        self.header().cpu.store(cpu as u32 + 1, Ordering::Relaxed);
    }

    /// Returns the CPU on which the stack's shard last began to run, if known.
    pub fn cpu(&self) -> Option<usize> {
        self.header().cpu.load(Ordering::Relaxed).checked_sub(1).map(|cpu| cpu as usize)
    }

    /// Publishes the CPU on which a client runs.
    pub fn set_client_cpu(&self, number: usize, cpu: usize) {
        // Cannot truncate: CPU numbers are small.
        self.client(number).cpu.store(cpu as u32 + 1, Ordering::Relaxed);
    }

    /// Returns the CPU on which a client claims to run.
    pub fn client_cpu(&self, number: usize) -> Option<usize> {
        self.client(number).cpu.load(Ordering::Relaxed).checked_sub(1).map(|cpu| cpu as usize)
    }

    pub fn sockets(&self) -> usize {
        self.layout.sockets
    }

    pub fn clients(&self) -> usize {
        self.layout.clients
    }

    /// Returns the number of large buffers, and the bytes of each.
    pub fn large(&self) -> (u32, usize) {
        (self.layout.large_count, self.layout.large_bytes)
    }

    /// Returns the bytes of each direction's own buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.layout.buffer_bytes
    }

    /// Returns `count` values of `T` at an offset.
    ///
    /// # Safety
    /// `T` consists of atomics, for which all bit patterns are valid, and is aligned at the offset.
    unsafe fn slice<T>(&self, offset: usize, count: usize) -> &[T] {
        assert!(offset + count * size_of::<T>() <= self.layout.total, "range is inside the region");
        debug_assert!(offset.is_multiple_of(align_of::<T>()));
        // SAFETY: inside the mapping, which lives as long as `self`; the caller guarantees the rest.
        unsafe { core::slice::from_raw_parts(self.base.add(offset).cast().as_ptr(), count) }
    }

    /// Returns `count` values of `T` in a part that [`RegionLayout`] defines. The caller has checked the
    /// index, so the bounds are not checked again for each call and packet.
    ///
    /// # Safety
    /// As for `slice`, and the values are inside the region.
    #[inline]
    unsafe fn slice_unchecked<T>(&self, offset: usize, count: usize) -> &[T] {
        debug_assert!(offset + count * size_of::<T>() <= self.layout.total, "range is inside the region");
        debug_assert!(offset.is_multiple_of(align_of::<T>()));
        // SAFETY: inside the mapping, as the caller guarantees; for the rest see `slice`.
        unsafe { core::slice::from_raw_parts(self.base.add(offset).cast().as_ptr(), count) }
    }

    fn header(&self) -> &RegionHeader {
        // SAFETY: atomics, at the start of a page.
        unsafe { &self.slice::<RegionHeader>(0, 1)[0] }
    }

    #[inline]
    fn client(&self, number: usize) -> &ClientArea {
        // SAFETY: atomics; client areas begin at pages, and `client_offset` checks the number.
        unsafe { &self.slice_unchecked::<ClientArea>(self.client_offset(number), 1)[0] }
    }

    #[inline]
    fn client_offset(&self, number: usize) -> usize {
        assert!(number < self.layout.clients, "client number is valid");
        self.layout.clients_offset + number * self.layout.client_bytes
    }

    /// Returns one of the two rings of a client: 0 is the ring to the stack, 1 the ring to the client.
    #[inline]
    fn doorbells(
        &self,
        number: usize,
        words: impl FnOnce(&ClientArea) -> &DoorbellWords,
        index: usize,
    ) -> Doorbells<'_> {
        let (count, sockets) = (self.layout.doorbell_slots, self.layout.sockets);
        let client_at = self.client_offset(number);
        let at = client_at + size_of::<ClientArea>();
        let flags_at = at + 2 * count * size_of::<AtomicU32>();
        // SAFETY: atomics; client areas begin at pages, the words before the slots are aligned to 128 bytes,
        // and slots are words of four bytes. A client's area has room for both rings, and its number was
        // checked.
        unsafe {
            let words = words(&self.slice_unchecked::<ClientArea>(client_at, 1)[0]);
            let slots = self.slice_unchecked::<AtomicU32>(at + index * count * size_of::<AtomicU32>(), count);
            Doorbells {
                words,
                slots,
                flags: self.slice_unchecked::<AtomicU8>(flags_at + index * sockets, sockets),
            }
        }
    }

    /// Returns the ring from a client to the stack.
    #[inline]
    pub fn to_stack(&self, number: usize) -> Doorbells<'_> {
        self.doorbells(number, |client| &client.to_stack, 0)
    }

    /// Returns the ring from the stack to a client.
    #[inline]
    pub fn to_client(&self, number: usize) -> Doorbells<'_> {
        self.doorbells(number, |client| &client.to_client, 1)
    }

    pub fn credits(&self, number: usize) -> &[AtomicU32; LISTENERS_MAX] {
        &self.client(number).credits
    }

    pub fn offers(&self, number: usize) -> &[AtomicU64; OFFERS_MAX] {
        &self.client(number).offers
    }

    pub fn preallocated(&self, number: usize) -> &[AtomicU64; PREALLOCATED_MAX] {
        &self.client(number).preallocated
    }

    pub fn offers_suspended(&self, number: usize) -> &AtomicU32 {
        &self.client(number).offers_suspended
    }

    /// Clears the area of a new client, so that nothing of an earlier client is left in it.
    pub fn clear_client(&self, number: usize) {
        self.to_stack(number).clear();
        self.to_client(number).clear();
        for credit in self.credits(number) {
            credit.store(0, Ordering::Relaxed);
        }
        for offer in self.offers(number) {
            offer.store(0, Ordering::Relaxed);
        }
        for slot in self.preallocated(number) {
            slot.store(0, Ordering::Relaxed);
        }
        self.client(number).cpu.store(0, Ordering::Relaxed);
        self.offers_suspended(number).store(0, Ordering::Relaxed);
    }

    #[inline]
    pub fn socket(&self, socket: u32) -> &SocketArea {
        assert!((socket as usize) < self.layout.sockets, "socket number is valid");
        let at = self.layout.sockets_offset + socket as usize * size_of::<SocketArea>();
        // SAFETY: atomics; the table begins at a page, and an entry's size is a multiple of its alignment.
        // The number was checked.
        unsafe { &self.slice_unchecked::<SocketArea>(at, 1)[0] }
    }

    fn description(&self, index: usize) -> &SharedDescription {
        let at = self.layout.descriptions_offset + index * size_of::<SharedDescription>();
        // SAFETY: atomics; the table begins at a page, and an entry's size is a multiple of its alignment.
        unsafe { &self.slice::<SharedDescription>(at, 1)[0] }
    }

    /// Returns the description that owners of a listener share; `None` if there is no listener of this
    /// number.
    pub fn listener_description(&self, listener: u32) -> Option<&SharedDescription> {
        ((listener as usize) < LISTENERS_MAX).then(|| self.description(listener as usize))
    }

    /// Returns the description that owners of a socket share; `None` if there is no socket of this number.
    pub fn socket_description(&self, socket: u32) -> Option<&SharedDescription> {
        ((socket as usize) < self.layout.sockets).then(|| self.description(LISTENERS_MAX + socket as usize))
    }

    /// Returns the bytes of a large buffer, which clients may write at any time.
    pub fn large_ring(&self, number: u32) -> &[core::sync::atomic::AtomicU8] {
        assert!(number < self.layout.large_count, "large ring number is valid");
        let bytes = self.layout.large_bytes;
        // SAFETY: atomics of one byte each.
        unsafe { self.slice(self.layout.large_offset + number as usize * bytes, bytes) }
    }

    /// Copies bytes of a large buffer. The copy may or may not contain what clients write meanwhile.
    pub fn copy_from_large(&self, number: u32, at: usize, out: &mut [u8]) {
        let bytes = &self.large_ring(number)[at..at + out.len()];
        // SAFETY: both ranges have the same length; the source is inside the mapping, and `out` is private
        // memory. A byte that changes during the copy does no harm: nothing depends on its value.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), out.as_mut_ptr(), out.len()) };
    }

    /// Returns the stream of a socket in one direction.
    #[inline]
    pub fn stream(&self, socket: u32, direction: Direction) -> Stream<'_> {
        self.stream_of(self.socket(socket), socket, direction)
    }

    /// Returns the area of a socket, and its streams in both directions.
    #[inline]
    pub fn socket_and_streams(&self, socket: u32) -> (&SocketArea, Stream<'_>, Stream<'_>) {
        let words = self.socket(socket);
        let stream = |direction| self.stream_of(words, socket, direction);
        (words, stream(Direction::Incoming), stream(Direction::Outgoing))
    }

    /// Returns a stream of the socket whose number was checked and whose area is `words`.
    #[inline]
    fn stream_of<'a>(&'a self, words: &'a SocketArea, socket: u32, direction: Direction) -> Stream<'a> {
        debug_assert!((socket as usize) < self.layout.sockets);
        let (positions, index) = match direction {
            Direction::Incoming => (&words.incoming, 0),
            Direction::Outgoing => (&words.outgoing, 1),
        };
        let bytes = self.layout.buffer_bytes;
        let at = self.layout.buffers_offset + (2 * socket as usize + index) * bytes;
        // SAFETY: inside the mapping by `RegionLayout::new`, as the socket's number was checked; nothing else
        // accesses these bytes.
        unsafe { Stream::new(positions, self.base.add(at), bytes, &self.large_rings) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the whole mapping of `map`; nothing borrows from it any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.layout.total) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

impl SocketArea {
    /// Resets the area for a new connection that no client knows yet.
    pub fn reset(&self, generation: u32) {
        self.wants_recv_space.store(0, Ordering::Relaxed);
        self.requests.store(0, Ordering::Relaxed);
        self.pending_options.store(0, Ordering::Relaxed);
        self.wants_send_space.store(0, Ordering::Relaxed);
        self.lock.store(0, Ordering::Relaxed);
        self.acked.store(0, Ordering::Relaxed);
        self.sent.store(0, Ordering::Relaxed);
        self.record_end.store(0, Ordering::Relaxed);
        // The only option that clients read themselves.
        self.option_values[pending_options::NOTSENT_LOWAT].store(0, Ordering::Relaxed);
        self.oob_events.store(0, Ordering::Relaxed);
        self.error.store(0, Ordering::Relaxed);
        self.incoming.clear();
        self.outgoing.clear();
        self.generation.store(generation, Ordering::Relaxed);
    }

    #[inline]
    pub fn positions(&self, direction: Direction) -> &StreamPositions {
        match direction {
            Direction::Incoming => &self.incoming,
            Direction::Outgoing => &self.outgoing,
        }
    }

    /// Stores both addresses: local, then the peer's.
    pub fn set_endpoints(&self, endpoints: [SocketAddr; 2]) {
        for (words, end) in self.endpoints.iter().zip(endpoints) {
            let address = match end.ip() {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            for (word, bytes) in words[1..].iter().zip(address.octets().as_chunks().0) {
                word.store(u32::from_ne_bytes(*bytes), Ordering::Relaxed);
            }
            // A reader that sees the port sees the address.
            words[0].store(end.port().into(), Ordering::Release);
        }
    }

    /// Returns the local and the peer's address.
    pub fn endpoints(&self) -> [SocketAddr; 2] {
        [self.endpoint(0), self.endpoint(1)]
    }

    /// Returns the local address (0) or the peer's (1).
    pub fn endpoint(&self, index: usize) -> SocketAddr {
        let words = &self.endpoints[index];
        let mut octets = [0; 16];
        let port = words[0].load(Ordering::Acquire) as u16;
        for (word, bytes) in words[1..].iter().zip(octets.as_chunks_mut().0) {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        SocketAddr::new(Ipv6Addr::from(octets).to_canonical(), port)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn config() -> ChannelConfig {
        ChannelConfig { sockets_max: 5, clients_max: 3, ..ChannelConfig::default() }
    }

    #[test]
    fn two_mappings_show_the_same_region() {
        let region = Region::create(&config()).unwrap();
        let other = Region::open(region.file().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(region.layout, other.layout);
        let mut notifier = region.to_stack(2).notifier();
        notifier.notify(region.to_stack(2), 4, super::super::doorbells::NOTIFIED);
        let mut queue = other.to_stack(2).notify_queue();
        assert_eq!(queue.pop(other.to_stack(2)), Ok(None), "the queue begins at the tail");
        notifier.notify(region.to_stack(2), 3, super::super::doorbells::NOTIFIED);
        assert_eq!(queue.pop(other.to_stack(2)), Ok(Some((3, super::super::doorbells::NOTIFIED))));
        let mut written = 0;
        region.stream(4, Direction::Outgoing).write(&mut written, b"through").unwrap();
        let mut out = [0; 16];
        assert_eq!(other.stream(4, Direction::Outgoing).peek(0, 0, &mut out), Ok(7));
        assert_eq!(&out[..7], b"through");
        let endpoints = ["192.0.2.1:80".parse().unwrap(), "[2001:db8::1]:50000".parse().unwrap()];
        region.socket(4).set_endpoints(endpoints);
        assert_eq!(other.socket(4).endpoints(), endpoints);
    }

    #[test]
    fn private_mapping_does_not_change_the_shared_one() {
        let region = Region::create(&config()).unwrap();
        let other = Region::open(region.file().try_clone_to_owned().unwrap()).unwrap();
        let word = |region: &Region| region.socket(1).requests.load(Ordering::Relaxed);
        region.socket(1).requests.store(7, Ordering::Relaxed);
        other.make_private().unwrap();
        assert_eq!(word(&other), 7);
        other.socket(1).requests.store(8, Ordering::Relaxed);
        assert_eq!((word(&region), word(&other)), (7, 8));
    }

    #[test]
    fn layout_parts_do_not_overlap() {
        let layout = RegionLayout::new(&config());
        assert!(size_of::<RegionHeader>() <= layout.clients_offset);
        assert!(layout.clients_offset + 3 * layout.client_bytes <= layout.sockets_offset);
        assert!(layout.sockets_offset + 5 * size_of::<SocketArea>() <= layout.descriptions_offset);
        assert!(
            layout.descriptions_offset + (LISTENERS_MAX + 5) * size_of::<SharedDescription>()
                <= layout.buffers_offset
        );
        assert_eq!(layout.large_offset, layout.buffers_offset + 10 * layout.buffer_bytes);
        assert_eq!(layout.total, layout.large_offset + 256 * layout.large_bytes);
        let useless = RegionLayout::new(&ChannelConfig {
            large_buffer_bytes: config().socket_buffer_bytes,
            ..config()
        });
        assert_eq!((useless.large_count, useless.total), (0, useless.large_offset));
    }

    #[test]
    fn invalid_region_is_refused() {
        let file = |seals, bytes: u64| {
            let file = memfd_create("no region", MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&file, bytes).unwrap();
            fcntl_add_seals(&file, seals).unwrap();
            Region::open(file).expect_err("refused").to_string()
        };
        assert_eq!(file(SealFlags::GROW, 1 << 20), "channel: the region is not sealed against shrinking");
        assert_eq!(file(SEALS, 100), "channel: the region is too short");
        assert_eq!(file(SEALS, 1 << 20), "channel: the region has another layout version");
        let region = Region::create(&config()).unwrap();
        let open =
            || Region::open(region.file().try_clone_to_owned().unwrap()).expect_err("refused").to_string();
        region.header().sockets.store(6, Ordering::Relaxed);
        assert_eq!(open(), "channel: the region's size does not match its header");
        region.header().sockets.store(0, Ordering::Relaxed);
        assert!(open().contains("sockets_max"), "{}", open());
    }
}
