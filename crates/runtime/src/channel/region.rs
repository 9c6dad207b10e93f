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
use super::bells::{Bells, Words};
use super::common::Common;
use super::stream::{Positions, Rings, Stream};
use super::sync::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use super::wishes;
use crate::own_fd::OwnFd;
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
pub(crate) const BLANKS_MAX: usize = 64;
/// A bit of a client's credits for a listener: it is to be asked only if no other has any.
pub(crate) const SECOND_CHOICE: u32 = 1 << 31;

const PAGE: usize = 4096;
/// "ginnelch", and the version of the layout.
const MAGIC: u64 = 0x6869_6e6e_656c_6308;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// At the start of the region. Written once, by the stack.
#[repr(C)]
struct Header {
    magic: AtomicU64,
    sockets: AtomicU32,
    clients: AtomicU32,
    buffer_bytes: AtomicU32,
    large_bytes: AtomicU32,
    large: AtomicU32,
    /// The stack can be used: its addresses are checked.
    ready: AtomicU32,
    /// The CPU on which the stack's shard ran when it last began to, and one; 0 if that is not known.
    cpu: AtomicU32,
}

/// Of each client.
#[repr(C)]
struct ClientWords {
    /// From the client to the stack.
    up: Words,
    /// From the stack to the client.
    down: Words,
    /// How many connections of each listener the client would take now.
    credits: [AtomicU32; LISTENERS_MAX],
    /// See [`super::socket::Offer`].
    offers: [AtomicU64; OFFERS_MAX],
    /// See [`super::socket::Blank`].
    blanks: [AtomicU64; BLANKS_MAX],
    /// The CPU on which the client was when it last began to work, and one; 0 if that is not known. Written by the client.
    cpu: AtomicU32,
    /// The stack took back what the client was offered, and offers it nothing until it rings.
    dozes: AtomicU32,
}

/// Of each socket.
#[repr(C, align(128))]
pub(super) struct SocketWords {
    // Written by the stack.
    /// How many connections had this place before, and this one.
    pub generation: AtomicU32,
    /// See [`super::socket::state`].
    pub state: AtomicU32,
    /// The place of a client's offers in which it stands, if it is offered.
    pub offer_place: AtomicU32,
    /// The stack holds bytes back and wants to hear that there is room.
    pub wants_room: AtomicU32,
    /// Bytes that the peer acknowledged, if that is to be told.
    pub acked: AtomicU64,
    /// Bytes that have left, of what clients wrote, if they want few to be ahead of those (`TCP_NOTSENT_LOWAT`). Perhaps there are more by now.
    pub sent: AtomicU64,
    /// How often urgent data were announced or came, or datagrams came. As long as it is 0 the two words about urgent data say nothing.
    pub notices: AtomicU32,
    /// What ICMP said about a datagram, once (see [`super::datagram`]). Taken by clients. Of a connection: why it could not be opened (see
    /// [`super::socket::refusal`]).
    pub error: AtomicU32,
    /// Port and address of both ends: ours, the peer's. IPv4 addresses are mapped ones (RFC 4291 §2.5.5.2). A client that opens a connection writes the
    /// peer's, and ours has port 0 until the stack has opened it.
    ends: [[AtomicU32; 5]; 2],
    /// See [`super::mark`]: the urgent byte that was announced last (that it was taken is noted by clients), and earlier ones that are left out of the
    /// stream.
    pub mark: AtomicU64,
    pub hole: AtomicU64,
    // Written by clients.
    /// See [`super::socket::request`].
    pub requests: AtomicU32,
    /// A client could not write all and wants to hear that there is space.
    pub wants_space: AtomicU32,
    /// Where the last record ends that clients wrote (`MSG_EOR`); 0 if there was none. The stack takes it off when it has come there.
    pub record: AtomicU64,
    /// See [`super::lock`].
    pub lock: AtomicU32,
    /// See [`super::wishes`]: which options are new, and their values.
    pub wished: AtomicU32,
    pub wishes: [AtomicU32; wishes::KINDS],
    // Written by both, each their own.
    incoming: Positions,
    outgoing: Positions,
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
struct Layout {
    sockets: usize,
    clients: usize,
    /// Of a ring of doorbells: a power of two.
    places: usize,
    buffer_bytes: usize,
    client_bytes: usize,
    clients_at: usize,
    sockets_at: usize,
    common_at: usize,
    bytes_at: usize,
    large_at: usize,
    large_bytes: usize,
    large: u32,
    total: usize,
}

impl Layout {
    fn new(config: &ChannelConfig) -> Self {
        let (sockets, clients) = (config.sockets_max as usize, config.clients_max as usize);
        let buffer_bytes = config.socket_buffer_bytes as usize;
        let places = sockets.next_power_of_two();
        let ring_bytes = places * size_of::<AtomicU32>() + sockets;
        let client_bytes = (size_of::<ClientWords>() + 2 * ring_bytes).next_multiple_of(PAGE);
        let clients_at = PAGE;
        let sockets_at = clients_at + clients * client_bytes;
        let common_at = (sockets_at + sockets * size_of::<SocketWords>()).next_multiple_of(PAGE);
        let shared = LISTENERS_MAX + sockets;
        let bytes_at = (common_at + shared * size_of::<Common>()).next_multiple_of(PAGE);
        let large_at = bytes_at + sockets * 2 * buffer_bytes;
        let large_bytes = config.large_buffer_bytes as usize;
        // One that is no larger is of no use.
        let large = if large_bytes > buffer_bytes { config.large_buffers_max } else { 0 };
        let total = large_at + large as usize * large_bytes;
        Self {
            sockets,
            clients,
            places,
            buffer_bytes,
            client_bytes,
            clients_at,
            sockets_at,
            common_at,
            bytes_at,
            large_at,
            large_bytes,
            large,
            total,
        }
    }
}

/// The region, mapped. Clones are the same mapping.
#[derive(Debug)]
pub(super) struct Region {
    at: NonNull<u8>,
    layout: Layout,
    rings: Rings,
    file: OwnFd,
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
        let layout = Layout::new(config);
        let file = memfd_create("ginnel-channel", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, layout.total as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        let region = Self::mapped(OwnFd::in_place(file), layout)?;
        let header = region.header();
        header.sockets.store(config.sockets_max, Ordering::Relaxed);
        header.clients.store(config.clients_max, Ordering::Relaxed);
        header.buffer_bytes.store(config.socket_buffer_bytes, Ordering::Relaxed);
        header.large_bytes.store(config.large_buffer_bytes, Ordering::Relaxed);
        header.large.store(config.large_buffers_max, Ordering::Relaxed);
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
        let head = Self::mapped(OwnFd::in_place(file), Layout { total: PAGE, ..Layout::new(&first) })?;
        let header = head.header();
        if header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(strange("the region is of another version"));
        }
        let config = ChannelConfig {
            sockets_max: header.sockets.load(Ordering::Relaxed),
            clients_max: header.clients.load(Ordering::Relaxed),
            socket_buffer_bytes: header.buffer_bytes.load(Ordering::Relaxed),
            large_buffer_bytes: header.large_bytes.load(Ordering::Relaxed),
            large_buffers_max: header.large.load(Ordering::Relaxed),
            ..ChannelConfig::default()
        };
        config.validate().map_err(|e| strange(&e.to_string()))?;
        let layout = Layout::new(&config);
        if layout.total != size {
            return Err(strange("the region's size is not what its header says"));
        }
        Ok(Arc::new(Self::mapped(OwnFd::new(head.file.as_fd().try_clone_to_owned()?), layout)?))
    }

    fn mapped(file: OwnFd, layout: Layout) -> io::Result<Self> {
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
        let first = unsafe { at.add(layout.large_at.min(layout.total)) };
        let rings = Rings { first, bytes: layout.large_bytes, count: layout.large };
        Ok(Self { at, layout, rings, file })
    }

    /// What is done here from now on nobody else sees: for a process that was forked in the middle of a call, whose other half goes on in the parent. Makes one system call for
    /// memory that is there already, and may be called in a handler of a signal.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn part(&self) -> io::Result<()> {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE);
        // SAFETY: the mapping of `mapped`, whole, is replaced by a copy of the same bytes: whoever borrows from it finds them as they are.
        unsafe { mmap(self.at.as_ptr().cast(), self.layout.total, protection, flags, &self.file, 0)? };
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
    pub fn own(&self) -> &OwnFd {
        &self.file
    }

    /// Whether the stack can be used.
    pub fn is_ready(&self) -> bool {
        self.header().ready.load(Ordering::Acquire) != 0
    }

    /// The stack can be used from now on.
    pub fn set_ready(&self) {
        self.header().ready.store(1, Ordering::Release);
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
        (self.layout.large, self.layout.large_bytes)
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
        unsafe { core::slice::from_raw_parts(self.at.add(offset).cast().as_ptr(), count) }
    }

    /// The same of one of the parts that [`Layout`] lays out, whose number was checked: they lie inside, so that is not asked once more for each call and packet.
    ///
    /// # Safety
    /// As of `slice`, and they are inside of the region.
    #[inline]
    unsafe fn laid_out<T>(&self, offset: usize, count: usize) -> &[T] {
        debug_assert!(offset + count * size_of::<T>() <= self.layout.total, "inside of the region");
        debug_assert!(offset.is_multiple_of(align_of::<T>()));
        // SAFETY: inside of the mapping, as the caller promises; for the rest see `slice`.
        unsafe { core::slice::from_raw_parts(self.at.add(offset).cast().as_ptr(), count) }
    }

    fn header(&self) -> &Header {
        // SAFETY: atomics, at the start of a page.
        unsafe { &self.slice::<Header>(0, 1)[0] }
    }

    #[inline]
    fn client(&self, number: usize) -> &ClientWords {
        // SAFETY: atomics; areas begin at pages, and the number was checked.
        unsafe { &self.laid_out::<ClientWords>(self.client_at(number), 1)[0] }
    }

    #[inline]
    fn client_at(&self, number: usize) -> usize {
        assert!(number < self.layout.clients, "a client's number");
        self.layout.clients_at + number * self.layout.client_bytes
    }

    /// A ring of a client, by which of the two it is.
    #[inline]
    fn bells(&self, number: usize, words: impl FnOnce(&ClientWords) -> &Words, which: usize) -> Bells<'_> {
        let (count, sockets) = (self.layout.places, self.layout.sockets);
        let client_at = self.client_at(number);
        let at = client_at + size_of::<ClientWords>();
        let flags_at = at + 2 * count * size_of::<AtomicU32>();
        // SAFETY: atomics; areas begin at pages, the words before are aligned to 128 bytes and places are words of four. A client's area has room for both rings, and its number
        // was checked.
        unsafe {
            let words = words(&self.laid_out::<ClientWords>(client_at, 1)[0]);
            let places = self.laid_out::<AtomicU32>(at + which * count * size_of::<AtomicU32>(), count);
            Bells { words, places, flags: self.laid_out::<AtomicU8>(flags_at + which * sockets, sockets) }
        }
    }

    /// The ring from a client to the stack.
    #[inline]
    pub fn up(&self, number: usize) -> Bells<'_> {
        self.bells(number, |client| &client.up, 0)
    }

    /// The ring from the stack to a client.
    #[inline]
    pub fn down(&self, number: usize) -> Bells<'_> {
        self.bells(number, |client| &client.down, 1)
    }

    pub fn credits(&self, number: usize) -> &[AtomicU32; LISTENERS_MAX] {
        &self.client(number).credits
    }

    pub fn offers(&self, number: usize) -> &[AtomicU64; OFFERS_MAX] {
        &self.client(number).offers
    }

    pub fn blanks(&self, number: usize) -> &[AtomicU64; BLANKS_MAX] {
        &self.client(number).blanks
    }

    pub fn dozes(&self, number: usize) -> &AtomicU32 {
        &self.client(number).dozes
    }

    /// An area for a new client: nothing of an old one is left in it.
    pub fn clear_client(&self, number: usize) {
        self.up(number).clear();
        self.down(number).clear();
        for credit in self.credits(number) {
            credit.store(0, Ordering::Relaxed);
        }
        for offer in self.offers(number) {
            offer.store(0, Ordering::Relaxed);
        }
        for blank in self.blanks(number) {
            blank.store(0, Ordering::Relaxed);
        }
        self.client(number).cpu.store(0, Ordering::Relaxed);
        self.dozes(number).store(0, Ordering::Relaxed);
    }

    #[inline]
    pub fn socket(&self, socket: u32) -> &SocketWords {
        assert!((socket as usize) < self.layout.sockets, "a socket's number");
        let at = self.layout.sockets_at + socket as usize * size_of::<SocketWords>();
        // SAFETY: atomics; the table begins at a page and its entries are as long as they are aligned. The number was checked.
        unsafe { &self.laid_out::<SocketWords>(at, 1)[0] }
    }

    fn common(&self, place: usize) -> &Common {
        let at = self.layout.common_at + place * size_of::<Common>();
        // SAFETY: atomics; the table begins at a page and its entries are as long as they are aligned.
        unsafe { &self.slice::<Common>(at, 1)[0] }
    }

    /// What those who share a listener agree on. `None`: there is none of this number.
    pub fn common_of_listener(&self, listener: u32) -> Option<&Common> {
        ((listener as usize) < LISTENERS_MAX).then(|| self.common(listener as usize))
    }

    /// The same for a socket.
    pub fn common_of_socket(&self, socket: u32) -> Option<&Common> {
        ((socket as usize) < self.layout.sockets).then(|| self.common(LISTENERS_MAX + socket as usize))
    }

    /// The bytes of a large ring, which clients may write at any time.
    pub fn large_ring(&self, number: u32) -> &[core::sync::atomic::AtomicU8] {
        assert!(number < self.layout.large, "a large ring's number");
        let bytes = self.layout.large_bytes;
        // SAFETY: atomics, of one byte each.
        unsafe { self.slice(self.layout.large_at + number as usize * bytes, bytes) }
    }

    /// Copies some of them. What clients write meanwhile may be in the copy or not.
    pub fn copy_of_large(&self, number: u32, at: usize, out: &mut [u8]) {
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
    pub fn whole(&self, socket: u32) -> (&SocketWords, Stream<'_>, Stream<'_>) {
        let words = self.socket(socket);
        let stream = |direction| self.stream_of(words, socket, direction);
        (words, stream(Direction::Incoming), stream(Direction::Outgoing))
    }

    /// The bytes of the socket whose number was checked, and gave these words.
    #[inline]
    fn stream_of<'a>(&'a self, words: &'a SocketWords, socket: u32, direction: Direction) -> Stream<'a> {
        debug_assert!((socket as usize) < self.layout.sockets);
        let (positions, which) = match direction {
            Direction::Incoming => (&words.incoming, 0),
            Direction::Outgoing => (&words.outgoing, 1),
        };
        let bytes = self.layout.buffer_bytes;
        let at = self.layout.bytes_at + (2 * socket as usize + which) * bytes;
        // SAFETY: inside of the mapping by `Layout::new`, as the socket's number was checked before; nothing else reaches these bytes.
        unsafe { Stream::new(positions, self.at.add(at), bytes, &self.rings) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping of `mapped`, whole; nothing borrows from it any more.
        let unmapped = unsafe { munmap(self.at.as_ptr().cast(), self.layout.total) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

impl SocketWords {
    /// Of a new connection, before anybody else knows it.
    pub fn begin(&self, generation: u32) {
        self.wants_room.store(0, Ordering::Relaxed);
        self.requests.store(0, Ordering::Relaxed);
        self.wished.store(0, Ordering::Relaxed);
        self.wants_space.store(0, Ordering::Relaxed);
        self.lock.store(0, Ordering::Relaxed);
        self.acked.store(0, Ordering::Relaxed);
        self.sent.store(0, Ordering::Relaxed);
        self.record.store(0, Ordering::Relaxed);
        // The only one that clients read themselves.
        self.wishes[wishes::LOW_WATER].store(0, Ordering::Relaxed);
        self.notices.store(0, Ordering::Relaxed);
        self.error.store(0, Ordering::Relaxed);
        self.incoming.clear();
        self.outgoing.clear();
        self.generation.store(generation, Ordering::Relaxed);
    }

    #[inline]
    pub fn positions(&self, direction: Direction) -> &Positions {
        match direction {
            Direction::Incoming => &self.incoming,
            Direction::Outgoing => &self.outgoing,
        }
    }

    /// Notes both ends: ours, the peer's.
    pub fn set_ends(&self, ends: [SocketAddr; 2]) {
        for (words, end) in self.ends.iter().zip(ends) {
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
    pub fn ends(&self) -> [SocketAddr; 2] {
        [self.end(0), self.end(1)]
    }

    /// One of them.
    pub fn end(&self, which: usize) -> SocketAddr {
        let words = &self.ends[which];
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
        let mut ringer = region.up(2).ringer();
        ringer.ring(region.up(2), 4, super::super::bells::RUNG);
        let mut answerer = other.up(2).answerer();
        assert_eq!(answerer.take(other.up(2)), Ok(None), "it begins where the ring is");
        ringer.ring(region.up(2), 3, super::super::bells::RUNG);
        assert_eq!(answerer.take(other.up(2)), Ok(Some((3, super::super::bells::RUNG))));
        let mut written = 0;
        region.stream(4, Direction::Outgoing).write(&mut written, b"through").unwrap();
        let mut out = [0; 16];
        assert_eq!(other.stream(4, Direction::Outgoing).peek(0, 0, &mut out), Ok(7));
        assert_eq!(&out[..7], b"through");
        let ends = ["192.0.2.1:80".parse().unwrap(), "[2001:db8::1]:50000".parse().unwrap()];
        region.socket(4).set_ends(ends);
        assert_eq!(other.socket(4).ends(), ends);
    }

    #[test]
    fn who_parts_from_others_sees_what_was_and_changes_nothing() {
        let region = Region::create(&config()).unwrap();
        let other = Region::open(region.file().try_clone_to_owned().unwrap()).unwrap();
        let word = |region: &Region| region.socket(1).requests.load(Ordering::Relaxed);
        region.socket(1).requests.store(7, Ordering::Relaxed);
        other.part().unwrap();
        assert_eq!(word(&other), 7);
        other.socket(1).requests.store(8, Ordering::Relaxed);
        assert_eq!((word(&region), word(&other)), (7, 8));
    }

    #[test]
    fn parts_do_not_overlap() {
        let layout = Layout::new(&config());
        assert!(size_of::<Header>() <= layout.clients_at);
        assert!(layout.clients_at + 3 * layout.client_bytes <= layout.sockets_at);
        assert!(layout.sockets_at + 5 * size_of::<SocketWords>() <= layout.common_at);
        assert!(layout.common_at + (LISTENERS_MAX + 5) * size_of::<Common>() <= layout.bytes_at);
        assert_eq!(layout.large_at, layout.bytes_at + 10 * layout.buffer_bytes);
        assert_eq!(layout.total, layout.large_at + 256 * layout.large_bytes);
        let useless =
            Layout::new(&ChannelConfig { large_buffer_bytes: config().socket_buffer_bytes, ..config() });
        assert_eq!((useless.large, useless.total), (0, useless.large_at));
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
