//! The layout of the memory that a stack shares with all clients of a domain. What it shares with one client
//! alone is in [`super::client_memory`].
//!
//! ```text
//!   header          parameters of the layout
//!   notifications   sleep state of the stack, and the clients that have notified it
//!   sockets         for each: state, requests, positions of both directions
//!   descriptions    for each socket and listener: state that processes share
//!   buffers         for each socket: received bytes, bytes to be sent
//!   large buffers   rings for sockets that move much data
//! ```
//!
//! The region is one memory file. Pages are allocated on first use: a socket that never had more than a page
//! in flight in each direction takes two.
#![allow(unsafe_code)] // lends parts of a mapping that other processes write

use super::ChannelConfig;
use super::description::SharedDescription;
use super::mapping::{self, PAGE, SharedMapping, invalid};
use super::notified_clients::NotifiedClients;
use super::pending_options;
use super::sleep_state::SleepState;
use super::stream::{LargeRings, Stream, StreamPositions};
use super::sync::{AtomicU32, AtomicU64, Ordering};
use crate::internal_fd::InternalFd;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::Arc;

/// Seven letters and, in the lowest byte, the version of the layout.
const MAGIC: u64 = 0x6869_6e6e_656c_630c;

/// The start of the region. Written once, by the stack.
#[repr(C)]
struct RegionHeader {
    magic: AtomicU64,
    sockets: AtomicU32,
    clients: AtomicU32,
    listeners: AtomicU32,
    buffer_bytes: AtomicU32,
    large_bytes: AtomicU32,
    large_count: AtomicU32,
    /// The stack can be used: its addresses are checked.
    is_ready: AtomicU32,
    /// The CPU on which the stack's shard last began to run, plus one; 0 if unknown.
    cpu: AtomicU32,
    /// Number of listeners that an administrator has closed.
    destroyed_listeners: AtomicU32,
    /// Minimum share of lower priorities in percent; 0 if the stack reports sockets in the order in which
    /// they became ready.
    lower_share_percent: AtomicU32,
    /// Number of turns of the stack's shard. Wraps around.
    turns: AtomicU32,
    /// Not 0 once the shard has ended. Written by the broker of a supervisor, and by clients that have found
    /// out themselves. It is a hint: another process of the domain may have written it.
    has_ended: AtomicU32,
}

/// State of the notifications of all clients of the domain.
#[repr(C)]
struct NotificationWords {
    /// Sleep state of the stack.
    sleep: SleepState,
    notified: NotifiedClients,
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
    /// See [`super::data_class`]: the priority of the bytes that were received.
    pub data_class: AtomicU64,
    /// One more than the class of priority of the last bytes that can be taken before bytes which precede
    /// them; 0 if there are none.
    pub unordered: AtomicU32,
    // Written by clients.
    /// See [`super::socket::request`].
    pub requests: AtomicU32,
    /// A write of a client was short, and the client wants to be notified when there is space.
    pub wants_send_space: AtomicU32,
    /// End of the last record that clients wrote (`MSG_EOR`), or with [`HOLD_BEGINS`] the end of what they
    /// wrote before they held data back; 0 if there is none. The stack clears the word when it has reached
    /// that position.
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

/// Bit of [`SocketArea::record_end`]: bytes after the position are held back (`MSG_MORE`, `TCP_CORK`), and
/// those before it are not.
pub(super) const HOLD_BEGINS: u64 = 1 << 63;

/// A direction of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From the stack to clients.
    Incoming,
    /// From clients to the stack.
    Outgoing,
}

/// Tells all clients of a region that the shard has ended. The caller need not have mapped the region.
///
/// # Errors
/// Returns the kernel's error.
pub(crate) fn announce_end(region: impl AsFd) -> io::Result<()> {
    let at = core::mem::offset_of!(RegionHeader, has_ended);
    rustix::io::pwrite(region, &1u32.to_ne_bytes(), at as u64)?;
    Ok(())
}

/// The layout of a region follows from these values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RegionParameters {
    /// The version of the layout ([`MAGIC`]).
    magic: u64,
    sockets: u32,
    clients: u32,
    listeners: u32,
    buffer_bytes: u32,
    large_bytes: u32,
    large_count: u32,
}

impl RegionParameters {
    /// Returns the layout of a file of `size` bytes.
    ///
    /// # Errors
    /// The version is another one, the file has another size, or a value is out of its range.
    fn layout(self, size: usize) -> io::Result<RegionLayout> {
        if self.magic != MAGIC {
            return Err(invalid("the region has another layout version"));
        }
        let config = ChannelConfig {
            sockets_max: self.sockets,
            clients_max: self.clients,
            listeners_max: self.listeners,
            socket_buffer_bytes: self.buffer_bytes,
            large_buffer_bytes: self.large_bytes,
            large_buffers_max: self.large_count,
            ..ChannelConfig::default()
        };
        config.validate().map_err(|e| invalid(&e.to_string()))?;
        let layout = RegionLayout::new(&config);
        if layout.total != size {
            return Err(invalid("the region's size does not match its header"));
        }
        Ok(layout)
    }
}

/// Sizes, and offsets in bytes, of the parts of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RegionLayout {
    sockets: usize,
    clients: usize,
    listeners: usize,
    buffer_bytes: usize,
    notifications_offset: usize,
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
        let listeners = config.listeners_max as usize;
        let buffer_bytes = config.socket_buffer_bytes as usize;
        let notifications_offset =
            size_of::<RegionHeader>().next_multiple_of(align_of::<NotificationWords>());
        let sockets_offset = (notifications_offset + size_of::<NotificationWords>()).next_multiple_of(PAGE);
        let descriptions_offset = (sockets_offset + sockets * size_of::<SocketArea>()).next_multiple_of(PAGE);
        let shared = listeners + sockets;
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
            listeners,
            buffer_bytes,
            notifications_offset,
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
    mapping: SharedMapping,
    layout: RegionLayout,
    large_rings: LargeRings,
    file: InternalFd,
}

// SAFETY: `large_rings` refers to the mapping, which threads share.
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
        let file = mapping::create_sealed("ginnel-channel", layout.total)?;
        let region = Self::map(InternalFd::in_place(file), layout)?;
        let header = region.header();
        header.sockets.store(config.sockets_max, Ordering::Relaxed);
        header.clients.store(config.clients_max, Ordering::Relaxed);
        header.listeners.store(config.listeners_max, Ordering::Relaxed);
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
        let size = mapping::sealed_size(&file)?;
        if size < PAGE {
            return Err(invalid("the region is too short"));
        }
        let head = SharedMapping::new(&file, PAGE)?;
        // SAFETY: atomics, at the start of a page, which the mapping has.
        let header = unsafe { &head.slice::<RegionHeader>(0, 1)[0] };
        let parameters = RegionParameters {
            magic: header.magic.load(Ordering::Acquire),
            sockets: header.sockets.load(Ordering::Relaxed),
            clients: header.clients.load(Ordering::Relaxed),
            listeners: header.listeners.load(Ordering::Relaxed),
            buffer_bytes: header.buffer_bytes.load(Ordering::Relaxed),
            large_bytes: header.large_bytes.load(Ordering::Relaxed),
            large_count: header.large_count.load(Ordering::Relaxed),
        };
        let layout = parameters.layout(size)?;
        Ok(Arc::new(Self::map(InternalFd::new(file)?, layout)?))
    }

    /// Opens a region with which a stack in another process has worked until now. The layout is that of
    /// `parameters`, whatever clients have written to the header.
    ///
    /// # Errors
    /// Returns an error if the file does not have this layout, or cannot be mapped.
    pub fn reopen(file: OwnedFd, parameters: RegionParameters) -> io::Result<Arc<Self>> {
        let layout = parameters.layout(mapping::sealed_size(&file)?)?;
        Ok(Arc::new(Self::map(InternalFd::in_place(file), layout)?))
    }

    /// Returns what the layout follows from.
    pub fn parameters(&self) -> RegionParameters {
        let RegionLayout { sockets, clients, listeners, buffer_bytes, large_bytes, large_count, .. } =
            self.layout;
        // Cannot truncate: the configuration has 32 bits.
        let [sockets, clients, listeners] = [sockets, clients, listeners].map(|count| count as u32);
        let [buffer_bytes, large_bytes] = [buffer_bytes, large_bytes].map(|bytes| bytes as u32);
        RegionParameters { magic: MAGIC, sockets, clients, listeners, buffer_bytes, large_bytes, large_count }
    }

    fn map(file: InternalFd, layout: RegionLayout) -> io::Result<Self> {
        let mapping = SharedMapping::new(&file, layout.total)?;
        let first = mapping.at(layout.large_offset.min(layout.total));
        let rings = LargeRings { memory: first, bytes: layout.large_bytes, count: layout.large_count };
        Ok(Self { mapping, layout, large_rings: rings, file })
    }

    /// Replaces the mapping by a private copy: later changes are invisible to other processes. This is for a
    /// process that was forked in the middle of a call which the parent continues. Returns false if the copy
    /// can only be read ([`SharedMapping::make_private`]).
    pub fn make_private(&self) -> bool {
        self.mapping.make_private(Some(&self.file))
    }

    /// See [`SharedMapping::make_page_writable`].
    pub fn make_page_writable(&self, address: usize) -> bool {
        self.mapping.make_page_writable(address)
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

    /// Returns whether the shard is said to have ended.
    #[inline]
    pub fn is_said_to_have_ended(&self) -> bool {
        self.header().has_ended.load(Ordering::Relaxed) != 0
    }

    /// Tells all clients that the shard has ended.
    pub fn announce_end(&self) {
        self.header().has_ended.store(1, Ordering::Relaxed);
    }

    /// Counts a turn of the stack's shard, which is the only one that writes the counter.
    #[inline]
    pub fn count_turn(&self) {
        let turns = &self.header().turns;
        turns.store(turns.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// Returns the number of turns that the stack's shard has begun.
    pub fn turns(&self) -> u32 {
        self.header().turns.load(Ordering::Acquire)
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

    /// Returns the number of sockets that the domain may have.
    pub fn sockets(&self) -> usize {
        self.layout.sockets
    }

    /// Returns the number of clients that the domain may have.
    pub fn clients(&self) -> usize {
        self.layout.clients
    }

    /// Returns the number of listeners that the domain may have.
    pub fn listeners(&self) -> usize {
        self.layout.listeners
    }

    /// Returns the number of listeners that an administrator has closed.
    pub fn destroyed_listeners(&self) -> &AtomicU32 {
        &self.header().destroyed_listeners
    }

    /// Returns the minimum share of lower priorities in percent; `None` if the stack reports sockets in the
    /// order in which they became ready.
    pub fn lower_share_percent(&self) -> Option<u32> {
        // Another process of the domain may have written any value there.
        Some(self.header().lower_share_percent.load(Ordering::Relaxed).min(50)).filter(|share| *share != 0)
    }

    /// Declares that the stack reports sockets by priority from now on.
    pub fn set_lower_share_percent(&self, share: u32) {
        self.header().lower_share_percent.store(share, Ordering::Relaxed);
    }

    /// Returns the number of large buffers, and the bytes of each.
    pub fn large(&self) -> (u32, usize) {
        (self.layout.large_count, self.layout.large_bytes)
    }

    /// Returns the bytes of each direction's own buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.layout.buffer_bytes
    }

    /// Returns the bytes of the largest buffer that a direction may have.
    pub fn largest_buffer_bytes(&self) -> usize {
        let (large_count, large_bytes) = self.large();
        if large_count > 0 { large_bytes } else { self.buffer_bytes() }
    }

    #[inline]
    fn header(&self) -> &RegionHeader {
        // SAFETY: atomics, at the start of a page; every layout begins with the header.
        unsafe { &self.mapping.slice_unchecked::<RegionHeader>(0, 1)[0] }
    }

    #[inline]
    fn notifications(&self) -> &NotificationWords {
        // SAFETY: atomics; `RegionLayout` aligns them and has room for them.
        unsafe { &self.mapping.slice_unchecked::<NotificationWords>(self.layout.notifications_offset, 1)[0] }
    }

    /// Returns the sleep state of the stack.
    #[inline]
    pub fn stack_sleep(&self) -> &SleepState {
        &self.notifications().sleep
    }

    /// Returns the clients that have notified the stack.
    #[inline]
    pub fn notified(&self) -> &NotifiedClients {
        &self.notifications().notified
    }

    #[inline]
    pub fn socket(&self, socket: u32) -> &SocketArea {
        assert!((socket as usize) < self.layout.sockets, "socket number is valid");
        let at = self.layout.sockets_offset + socket as usize * size_of::<SocketArea>();
        // SAFETY: atomics; the table begins at a page, and an entry's size is a multiple of its alignment.
        // The number was checked.
        unsafe { &self.mapping.slice_unchecked::<SocketArea>(at, 1)[0] }
    }

    fn description(&self, index: usize) -> &SharedDescription {
        let at = self.layout.descriptions_offset + index * size_of::<SharedDescription>();
        // SAFETY: atomics; the table begins at a page, and an entry's size is a multiple of its alignment.
        unsafe { &self.mapping.slice::<SharedDescription>(at, 1)[0] }
    }

    /// Returns the description that owners of a listener share; `None` if there is no listener of this
    /// number.
    pub fn listener_description(&self, listener: u32) -> Option<&SharedDescription> {
        ((listener as usize) < self.layout.listeners).then(|| self.description(listener as usize))
    }

    /// Returns the description that owners of a socket share; `None` if there is no socket of this number.
    pub fn socket_description(&self, socket: u32) -> Option<&SharedDescription> {
        ((socket as usize) < self.layout.sockets)
            .then(|| self.description(self.layout.listeners + socket as usize))
    }

    /// Returns the bytes of a large buffer, which clients may write at any time.
    pub fn large_ring(&self, number: u32) -> &[core::sync::atomic::AtomicU8] {
        assert!(number < self.layout.large_count, "large ring number is valid");
        let bytes = self.layout.large_bytes;
        // SAFETY: atomics of one byte each.
        unsafe { self.mapping.slice(self.layout.large_offset + number as usize * bytes, bytes) }
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
        unsafe { Stream::new(positions, self.mapping.at(at), bytes, &self.large_rings) }
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
        self.data_class.store(0, Ordering::Relaxed);
        self.unordered.store(0, Ordering::Relaxed);
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

    /// Stores both addresses: local, then the peer's. IPv4 addresses are mapped (RFC 4291 §2.5.5.2).
    pub fn set_endpoints(&self, endpoints: [SocketAddr; 2]) {
        for (words, end) in self.endpoints.iter().zip(endpoints) {
            let address = match end.ip() {
                IpAddr::V4(v4) => [0, 0, MAPPED_WORD, u32::from_ne_bytes(v4.octets())],
                IpAddr::V6(v6) => words_of(v6),
            };
            for (word, value) in words[1..].iter().zip(address) {
                word.store(value, Ordering::Relaxed);
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

/// The third word of an IPv4 address that is mapped to an IPv6 address.
const MAPPED_WORD: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);

/// Returns the bytes of an address in words.
fn words_of(address: Ipv6Addr) -> [u32; 4] {
    let octets = address.octets();
    core::array::from_fn(|at| u32::from_ne_bytes(octets.as_chunks().0[at]))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn config() -> ChannelConfig {
        ChannelConfig { sockets_max: 5, clients_max: 3, listeners_max: 2, ..ChannelConfig::default() }
    }

    #[test]
    fn two_mappings_show_the_same_region() {
        let region = Region::create(&config()).unwrap();
        let other = Region::open(region.file().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(region.layout, other.layout);
        other.notified().insert(2);
        let mut notified = Vec::new();
        region.notified().take(3, &mut notified);
        assert_eq!(notified, [2]);
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
        assert!(other.make_private());
        assert_eq!(word(&other), 7);
        other.socket(1).requests.store(8, Ordering::Relaxed);
        assert_eq!((word(&region), word(&other)), (7, 8));
    }

    #[test]
    fn announced_end_is_seen_in_all_mappings() {
        let region = Region::create(&config()).unwrap();
        let other = Region::open(region.file().try_clone_to_owned().unwrap()).unwrap();
        assert!(!region.is_said_to_have_ended() && !other.is_said_to_have_ended());
        announce_end(region.file()).unwrap();
        assert!(region.is_said_to_have_ended() && other.is_said_to_have_ended());
        let header = other.header();
        assert_eq!(header.lower_share_percent.load(Ordering::Relaxed), 0);
        assert_eq!(header.destroyed_listeners.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn layout_parts_do_not_overlap() {
        let layout = RegionLayout::new(&config());
        assert!(size_of::<RegionHeader>() <= layout.notifications_offset);
        assert!(layout.notifications_offset + size_of::<NotificationWords>() <= layout.sockets_offset);
        assert!(layout.sockets_offset + 5 * size_of::<SocketArea>() <= layout.descriptions_offset);
        assert!(layout.descriptions_offset + 7 * size_of::<SharedDescription>() <= layout.buffers_offset);
        assert_eq!(layout.large_offset, layout.buffers_offset + 10 * layout.buffer_bytes);
        assert_eq!(layout.total, layout.large_offset + 256 * layout.large_bytes);
        let useless = RegionLayout::new(&ChannelConfig {
            large_buffer_bytes: config().socket_buffer_bytes,
            ..config()
        });
        assert_eq!((useless.large_count, useless.total), (0, useless.large_offset));
    }

    #[test]
    fn region_is_reopened_with_the_same_layout_version_only() {
        let region = Region::create(&config()).unwrap();
        let reopen = |parameters| Region::reopen(region.file().try_clone_to_owned().unwrap(), parameters);
        let parameters = region.parameters();
        assert_eq!(reopen(parameters).unwrap().layout, region.layout);
        // What clients have written to the header does not matter.
        region.header().magic.store(0, Ordering::Relaxed);
        assert!(reopen(parameters).is_ok());
        let other = RegionParameters { magic: MAGIC + 1, ..parameters };
        let error = reopen(other).expect_err("refused").to_string();
        assert_eq!(error, "channel: the region has another layout version");
    }

    #[test]
    fn invalid_region_is_refused() {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
        let file = |seals, bytes: u64| {
            let file = memfd_create("no region", MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&file, bytes).unwrap();
            fcntl_add_seals(&file, seals).unwrap();
            Region::open(file).expect_err("refused").to_string()
        };
        assert_eq!(
            file(SealFlags::GROW, 1 << 20),
            "channel: the memory file is not sealed against shrinking"
        );
        let sealed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        assert_eq!(file(sealed, 100), "channel: the region is too short");
        assert_eq!(file(sealed, 1 << 20), "channel: the region has another layout version");
        let region = Region::create(&config()).unwrap();
        let open =
            || Region::open(region.file().try_clone_to_owned().unwrap()).expect_err("refused").to_string();
        region.header().sockets.store(6, Ordering::Relaxed);
        assert_eq!(open(), "channel: the region's size does not match its header");
        region.header().sockets.store(0, Ordering::Relaxed);
        assert!(open().contains("sockets_max"), "{}", open());
    }
}
