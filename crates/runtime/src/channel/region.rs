//! The memory that a stack and its clients share: where everything lies.
//!
//! ```text
//!   header          what the stack says of the rest
//!   clients         for each: two rings of doorbells, credits and offers
//!   sockets         for each: state, requests, positions of both directions
//!   common          for each socket and listener: what processes that share it agree on
//!   bytes           for each: what was received, what is to be sent
//!   large           rings for sockets that move much
//! ```
//!
//! It is one memory file, sealed so that nobody can make another's access fail by shrinking it. Pages are touched as they are used: a
//! socket that never had more than a page under way in each direction takes two.
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
// limit: listeners of a domain
pub(crate) const LISTENERS_MAX: usize = 64;
/// Connections offered to a client at a time.
pub(crate) const OFFERS_MAX: usize = 64;
/// Sockets that a client has at hand to open connections with.
pub(crate) const PREALLOCATED_MAX: usize = 64;
/// A bit of a client's credits for a listener: it is to be asked only if no other has any.
pub(crate) const FALLBACK_CREDIT: u32 = 1 << 31;

const PAGE: usize = 4096;
/// "ginnelch", and the version of the layout.
const MAGIC: u64 = 0x6869_6e6e_656c_6308;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// At the start of the region. Written once, by the stack.
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
    /// The CPU on which the stack's shard ran when it last began to, and one; 0 if that is not known.
    cpu: AtomicU32,
}

/// Of each client.
#[repr(C)]
struct ClientArea {
    /// From the client to the stack.
    to_stack: DoorbellWords,
    /// From the stack to the client.
    to_client: DoorbellWords,
    /// How many connections of each listener the client would take now.
    credits: [AtomicU32; LISTENERS_MAX],
    /// See [`super::socket::Offer`].
    offers: [AtomicU64; OFFERS_MAX],
    /// See [`super::socket::Blank`].
    preallocated: [AtomicU64; PREALLOCATED_MAX],
    /// The CPU on which the client was when it last began to work, and one; 0 if that is not known. Written by the client.
    cpu: AtomicU32,
    /// The stack took back what the client was offered, and offers it nothing until it rings.
    offers_suspended: AtomicU32,
}

/// Of each socket.
#[repr(C, align(128))]
pub(super) struct SocketArea {
    // Written by the stack.
    /// How many connections had this place before, and this one.
    pub generation: AtomicU32,
    /// See [`super::socket::state`].
    pub state: AtomicU32,
    /// The place of a client's offers in which it stands, if it is offered.
    pub offer_slot: AtomicU32,
    /// The stack holds bytes back and wants to hear that there is room.
    pub wants_recv_space: AtomicU32,
    /// Bytes that the peer acknowledged, if that is to be told.
    pub acked: AtomicU64,
    /// Bytes that have left, of what clients wrote, if they want few to be ahead of those (`TCP_NOTSENT_LOWAT`). Perhaps there are more by now.
    pub sent: AtomicU64,
    /// How often urgent data were announced or came, or datagrams came. As long as it is 0 the two words about urgent data say nothing.
    pub oob_events: AtomicU32,
    /// What ICMP said about a datagram, once (see [`super::datagram`]). Taken by clients. Of a connection: why it could not be opened (see
    /// [`super::socket::refusal`]).
    pub error: AtomicU32,
    /// Port and address of both ends: ours, the peer's. IPv4 addresses are mapped ones (RFC 4291 §2.5.5.2). A client that opens a connection writes the
    /// peer's, and ours has port 0 until the stack has opened it.
    endpoints: [[AtomicU32; 5]; 2],
    /// See [`super::mark`]: the urgent byte that was announced last (that it was taken is noted by clients), and earlier ones that are left out of the
    /// stream.
    pub urgent_mark: AtomicU64,
    pub urgent_hole: AtomicU64,
    // Written by clients.
    /// See [`super::socket::request`].
    pub requests: AtomicU32,
    /// A client could not write all and wants to hear that there is space.
    pub wants_send_space: AtomicU32,
    /// Where the last record ends that clients wrote (`MSG_EOR`); 0 if there was none. The stack takes it off when it has come there.
    pub record_end: AtomicU64,
    /// See [`super::lock`].
    pub lock: AtomicU32,
    /// See [`super::wishes`]: which options are new, and their values.
    pub pending_options: AtomicU32,
    pub option_values: [AtomicU32; pending_options::OPTION_KINDS],
    // Written by both, each their own.
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

/// Offsets of the parts, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RegionLayout {
    sockets: usize,
    clients: usize,
    /// Of a ring of doorbells: a power of two.
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
        // One that is no larger is of no use.
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

/// The region, mapped. Clones are the same mapping.
#[derive(Debug)]
pub(super) struct Region {
    base: NonNull<u8>,
    layout: RegionLayout,
    large_rings: LargeRings,
    file: InternalFd,
}

// SAFETY: everything in it is an atomic, or bytes that `Stream` hands over between threads.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// A new region without clients and sockets.
    ///
    /// # Errors
    /// The kernel has no memory for it.
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

    /// The region that a stack in another process has made.
    ///
    /// # Errors
    /// It is no such region, or cannot be mapped.
    pub fn open(file: OwnedFd) -> io::Result<Arc<Self>> {
        let strange = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("channel: {what}"));
        if !fcntl_get_seals(&file)?.contains(SEALS) {
            return Err(strange("the region could shrink"));
        }
        let size = usize::try_from(fstat(&file)?.st_size).unwrap_or(0);
        if size < PAGE {
            return Err(strange("the region is too short"));
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
            return Err(strange("the region is of another version"));
        }
        let config = ChannelConfig {
            sockets_max: header.sockets.load(Ordering::Relaxed),
            clients_max: header.clients.load(Ordering::Relaxed),
            socket_buffer_bytes: header.buffer_bytes.load(Ordering::Relaxed),
            large_buffer_bytes: header.large_bytes.load(Ordering::Relaxed),
            large_buffers_max: header.large_count.load(Ordering::Relaxed),
            ..ChannelConfig::default()
        };
        config.validate().map_err(|e| strange(&e.to_string()))?;
        let layout = RegionLayout::new(&config);
        if layout.total != size {
            return Err(strange("the region's size is not what its header says"));
        }
        Ok(Arc::new(Self::map(InternalFd::new(head.file.as_fd().try_clone_to_owned()?), layout)?))
    }

    fn map(file: InternalFd, layout: RegionLayout) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, unmapped when the value is dropped and nobody borrows from it.
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
        // SAFETY: inside of the mapping, or its end if there are none.
        let first = unsafe { at.add(layout.large_offset.min(layout.total)) };
        let rings = LargeRings { memory: first, bytes: layout.large_bytes, count: layout.large_count };
        Ok(Self { base: at, layout, large_rings: rings, file })
    }

    /// What is done here from now on nobody else sees: for a process that was forked in the middle of a call, whose other half goes on in the parent. Makes one system call for
    /// memory that is there already, and may be called in a handler of a signal.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn make_private(&self) -> io::Result<()> {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE);
        // SAFETY: the mapping of `mapped`, whole, is replaced by a copy of the same bytes: whoever borrows from it finds them as they are.
        unsafe { mmap(self.base.as_ptr().cast(), self.layout.total, protection, flags, &self.file, 0)? };
        Ok(())
    }

    /// Bytes that are mapped.
    pub fn bytes(&self) -> u64 {
        self.layout.total as u64
    }

    /// To be given to a client.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The file's descriptor itself.
    pub fn internal_fd(&self) -> &InternalFd {
        &self.file
    }

    /// Whether the stack can be used.
    pub fn is_ready(&self) -> bool {
        self.header().is_ready.load(Ordering::Acquire) != 0
    }

    /// The stack can be used from now on.
    pub fn set_ready(&self) {
        self.header().is_ready.store(1, Ordering::Release);
    }

    /// Notes where the stack's shard runs now.
    pub fn set_cpu(&self, cpu: usize) {
        // Cannot truncate: there are not that many.
        self.header().cpu.store(cpu as u32 + 1, Ordering::Relaxed);
    }

    /// Where the stack's shard runs, as far as is known.
    pub fn cpu(&self) -> Option<usize> {
        self.header().cpu.load(Ordering::Relaxed).checked_sub(1).map(|cpu| cpu as usize)
    }

    /// Notes where a client runs now.
    pub fn set_client_cpu(&self, number: usize, cpu: usize) {
        // Cannot truncate: there are not that many.
        self.client(number).cpu.store(cpu as u32 + 1, Ordering::Relaxed);
    }

    /// Where a client runs, as it says.
    pub fn client_cpu(&self, number: usize) -> Option<usize> {
        self.client(number).cpu.load(Ordering::Relaxed).checked_sub(1).map(|cpu| cpu as usize)
    }

    pub fn sockets(&self) -> usize {
        self.layout.sockets
    }

    pub fn clients(&self) -> usize {
        self.layout.clients
    }

    /// Rings for sockets that move much, and the bytes of each.
    pub fn large(&self) -> (u32, usize) {
        (self.layout.large_count, self.layout.large_bytes)
    }

    /// Bytes of each direction of a socket, as it has them at first.
    pub fn buffer_bytes(&self) -> usize {
        self.layout.buffer_bytes
    }

    /// `count` values of `T` at an offset.
    ///
    /// # Safety
    /// `T` is made of atomics, for which any bits are valid, and is aligned there.
    unsafe fn slice<T>(&self, offset: usize, count: usize) -> &[T] {
        assert!(offset + count * size_of::<T>() <= self.layout.total, "inside of the region");
        debug_assert!(offset.is_multiple_of(align_of::<T>()));
        // SAFETY: inside of the mapping, which lives as long as `self`; see above for the rest.
        unsafe { core::slice::from_raw_parts(self.base.add(offset).cast().as_ptr(), count) }
    }

    /// The same of one of the parts that [`Layout`] lays out, whose number was checked: they lie inside, so that is not asked once more for each call and packet.
    ///
    /// # Safety
    /// As of `slice`, and they are inside of the region.
    #[inline]
    unsafe fn slice_unchecked<T>(&self, offset: usize, count: usize) -> &[T] {
        debug_assert!(offset + count * size_of::<T>() <= self.layout.total, "inside of the region");
        debug_assert!(offset.is_multiple_of(align_of::<T>()));
        // SAFETY: inside of the mapping, as the caller promises; for the rest see `slice`.
        unsafe { core::slice::from_raw_parts(self.base.add(offset).cast().as_ptr(), count) }
    }

    fn header(&self) -> &RegionHeader {
        // SAFETY: atomics, at the start of a page.
        unsafe { &self.slice::<RegionHeader>(0, 1)[0] }
    }

    #[inline]
    fn client(&self, number: usize) -> &ClientArea {
        // SAFETY: atomics; areas begin at pages, and the number was checked.
        unsafe { &self.slice_unchecked::<ClientArea>(self.client_offset(number), 1)[0] }
    }

    #[inline]
    fn client_offset(&self, number: usize) -> usize {
        assert!(number < self.layout.clients, "a client's number");
        self.layout.clients_offset + number * self.layout.client_bytes
    }

    /// A ring of a client, by which of the two it is.
    #[inline]
    fn doorbells(
        &self,
        number: usize,
        words: impl FnOnce(&ClientArea) -> &DoorbellWords,
        which: usize,
    ) -> Doorbells<'_> {
        let (count, sockets) = (self.layout.doorbell_slots, self.layout.sockets);
        let client_at = self.client_offset(number);
        let at = client_at + size_of::<ClientArea>();
        let flags_at = at + 2 * count * size_of::<AtomicU32>();
        // SAFETY: atomics; areas begin at pages, the words before are aligned to 128 bytes and places are words of four. A client's area has room for both rings, and its number
        // was checked.
        unsafe {
            let words = words(&self.slice_unchecked::<ClientArea>(client_at, 1)[0]);
            let places =
                self.slice_unchecked::<AtomicU32>(at + which * count * size_of::<AtomicU32>(), count);
            Doorbells {
                words,
                slots: places,
                flags: self.slice_unchecked::<AtomicU8>(flags_at + which * sockets, sockets),
            }
        }
    }

    /// The ring from a client to the stack.
    #[inline]
    pub fn to_stack(&self, number: usize) -> Doorbells<'_> {
        self.doorbells(number, |client| &client.to_stack, 0)
    }

    /// The ring from the stack to a client.
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

    /// An area for a new client: nothing of an old one is left in it.
    pub fn clear_client(&self, number: usize) {
        self.to_stack(number).clear();
        self.to_client(number).clear();
        for credit in self.credits(number) {
            credit.store(0, Ordering::Relaxed);
        }
        for offer in self.offers(number) {
            offer.store(0, Ordering::Relaxed);
        }
        for blank in self.preallocated(number) {
            blank.store(0, Ordering::Relaxed);
        }
        self.client(number).cpu.store(0, Ordering::Relaxed);
        self.offers_suspended(number).store(0, Ordering::Relaxed);
    }

    #[inline]
    pub fn socket(&self, socket: u32) -> &SocketArea {
        assert!((socket as usize) < self.layout.sockets, "a socket's number");
        let at = self.layout.sockets_offset + socket as usize * size_of::<SocketArea>();
        // SAFETY: atomics; the table begins at a page and its entries are as long as they are aligned. The number was checked.
        unsafe { &self.slice_unchecked::<SocketArea>(at, 1)[0] }
    }

    fn description(&self, place: usize) -> &SharedDescription {
        let at = self.layout.descriptions_offset + place * size_of::<SharedDescription>();
        // SAFETY: atomics; the table begins at a page and its entries are as long as they are aligned.
        unsafe { &self.slice::<SharedDescription>(at, 1)[0] }
    }

    /// What those who share a listener agree on. `None`: there is none of this number.
    pub fn listener_description(&self, listener: u32) -> Option<&SharedDescription> {
        ((listener as usize) < LISTENERS_MAX).then(|| self.description(listener as usize))
    }

    /// The same for a socket.
    pub fn socket_description(&self, socket: u32) -> Option<&SharedDescription> {
        ((socket as usize) < self.layout.sockets).then(|| self.description(LISTENERS_MAX + socket as usize))
    }

    /// The bytes of a large ring, which clients may write at any time.
    pub fn large_ring(&self, number: u32) -> &[core::sync::atomic::AtomicU8] {
        assert!(number < self.layout.large_count, "a large ring's number");
        let bytes = self.layout.large_bytes;
        // SAFETY: atomics, of one byte each.
        unsafe { self.slice(self.layout.large_offset + number as usize * bytes, bytes) }
    }

    /// Copies some of them. What clients write meanwhile may be in the copy or not.
    pub fn copy_from_large(&self, number: u32, at: usize, out: &mut [u8]) {
        let bytes = &self.large_ring(number)[at..at + out.len()];
        // SAFETY: as many bytes, inside of the mapping; `out` is private memory. Nobody draws conclusions from a byte that is changed during the copy: it is only moved here.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), out.as_mut_ptr(), out.len()) };
    }

    /// The bytes of a socket in one direction.
    #[inline]
    pub fn stream(&self, socket: u32, direction: Direction) -> Stream<'_> {
        self.stream_of(self.socket(socket), socket, direction)
    }

    /// The words of a socket, and its bytes in both directions.
    #[inline]
    pub fn socket_and_streams(&self, socket: u32) -> (&SocketArea, Stream<'_>, Stream<'_>) {
        let words = self.socket(socket);
        let stream = |direction| self.stream_of(words, socket, direction);
        (words, stream(Direction::Incoming), stream(Direction::Outgoing))
    }

    /// The bytes of the socket whose number was checked, and gave these words.
    #[inline]
    fn stream_of<'a>(&'a self, words: &'a SocketArea, socket: u32, direction: Direction) -> Stream<'a> {
        debug_assert!((socket as usize) < self.layout.sockets);
        let (positions, which) = match direction {
            Direction::Incoming => (&words.incoming, 0),
            Direction::Outgoing => (&words.outgoing, 1),
        };
        let bytes = self.layout.buffer_bytes;
        let at = self.layout.buffers_offset + (2 * socket as usize + which) * bytes;
        // SAFETY: inside of the mapping by `Layout::new`, as the socket's number was checked before; nothing else reaches these bytes.
        unsafe { Stream::new(positions, self.base.add(at), bytes, &self.large_rings) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping of `mapped`, whole; nothing borrows from it any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.layout.total) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

impl SocketArea {
    /// Of a new connection, before anybody else knows it.
    pub fn reset(&self, generation: u32) {
        self.wants_recv_space.store(0, Ordering::Relaxed);
        self.requests.store(0, Ordering::Relaxed);
        self.pending_options.store(0, Ordering::Relaxed);
        self.wants_send_space.store(0, Ordering::Relaxed);
        self.lock.store(0, Ordering::Relaxed);
        self.acked.store(0, Ordering::Relaxed);
        self.sent.store(0, Ordering::Relaxed);
        self.record_end.store(0, Ordering::Relaxed);
        // The only one that clients read themselves.
        self.option_values[pending_options::NOT_SENT_LOW_WATER].store(0, Ordering::Relaxed);
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

    /// Notes both ends: ours, the peer's.
    pub fn set_endpoints(&self, ends: [SocketAddr; 2]) {
        for (words, end) in self.endpoints.iter().zip(ends) {
            let address = match end.ip() {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            for (word, bytes) in words[1..].iter().zip(address.octets().as_chunks().0) {
                word.store(u32::from_ne_bytes(*bytes), Ordering::Relaxed);
            }
            // Who sees the port sees the address.
            words[0].store(end.port().into(), Ordering::Release);
        }
    }

    /// Our end and the peer's.
    pub fn endpoints(&self) -> [SocketAddr; 2] {
        [self.endpoint(0), self.endpoint(1)]
    }

    /// One of them.
    pub fn endpoint(&self, which: usize) -> SocketAddr {
        let words = &self.endpoints[which];
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
    fn another_mapping_of_the_file_is_the_same_region() {
        let region = Region::create(&config()).unwrap();
        let other = Region::open(region.file().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(region.layout, other.layout);
        let mut ringer = region.to_stack(2).notifier();
        ringer.notify(region.to_stack(2), 4, super::super::doorbells::NOTIFIED);
        let mut answerer = other.to_stack(2).notify_queue();
        assert_eq!(answerer.pop(other.to_stack(2)), Ok(None), "it begins where the ring is");
        ringer.notify(region.to_stack(2), 3, super::super::doorbells::NOTIFIED);
        assert_eq!(answerer.pop(other.to_stack(2)), Ok(Some((3, super::super::doorbells::NOTIFIED))));
        let mut written = 0;
        region.stream(4, Direction::Outgoing).write(&mut written, b"through").unwrap();
        let mut out = [0; 16];
        assert_eq!(other.stream(4, Direction::Outgoing).peek(0, 0, &mut out), Ok(7));
        assert_eq!(&out[..7], b"through");
        let ends = ["192.0.2.1:80".parse().unwrap(), "[2001:db8::1]:50000".parse().unwrap()];
        region.socket(4).set_endpoints(ends);
        assert_eq!(other.socket(4).endpoints(), ends);
    }

    #[test]
    fn who_parts_from_others_sees_what_was_and_changes_nothing() {
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
    fn parts_do_not_overlap() {
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
    fn what_is_no_region_is_refused() {
        let file = |seals, bytes: u64| {
            let file = memfd_create("no region", MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&file, bytes).unwrap();
            fcntl_add_seals(&file, seals).unwrap();
            Region::open(file).expect_err("refused").to_string()
        };
        assert_eq!(file(SealFlags::GROW, 1 << 20), "channel: the region could shrink");
        assert_eq!(file(SEALS, 100), "channel: the region is too short");
        assert_eq!(file(SEALS, 1 << 20), "channel: the region is of another version");
        let region = Region::create(&config()).unwrap();
        let open =
            || Region::open(region.file().try_clone_to_owned().unwrap()).expect_err("refused").to_string();
        region.header().sockets.store(6, Ordering::Relaxed);
        assert_eq!(open(), "channel: the region's size is not what its header says");
        region.header().sockets.store(0, Ordering::Relaxed);
        assert!(open().contains("sockets_max"), "{}", open());
    }
}
