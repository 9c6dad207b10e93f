//! UDP sockets (RFC 768, RFC 1122 §4.1), with Linux's rules for binding, for choosing among sockets, and for errors.
//!
//! A socket of an IPv6 wildcard address receives IPv4 datagrams too unless it is told not to; addresses are given as they are, never
//! mapped into IPv6.

mod bind;
mod error;
mod error_queue;
mod gso;
mod pmtu_discovery;
mod queue;

pub(crate) use bind::{compute_score, has_bind_conflict};
pub use error::UdpError;
pub use error_queue::UdpExtendedError;
pub use pmtu_discovery::PmtuDiscovery;
pub use queue::Datagram;

use crate::device::Label;
use crate::handle::UdpHandle;
use crate::icmp::UnreachableReason;
use crate::icmp::error::{IcmpErrorKind, IcmpErrorOrigin, TransportError};
use crate::ip::stats::counters;
use crate::ip::{IpHeader, L4, Network, NetworkConfig, Route, RouteError, TxError};
use crate::priority;
use crate::stack::{ListedSocket, SocketMemory, SocketProtocol, unspecified_addr};
use crate::tcp::state::State;
use crate::time::Instant;
use crate::wire::{protocol, udp};
use core::net::{IpAddr, SocketAddr};
use error_queue::UdpErrorQueue;
use queue::UdpReceiveQueue;
use std::collections::{BTreeMap, VecDeque};

/// Hop limit of multicast datagrams (RFC 1112 §6.1).
const MULTICAST_HOP_LIMIT: u8 = 1;

/// How a datagram is sent, or several of one length that stand one behind the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpSendParams {
    /// Where to; `None` is the other end of a connected socket.
    pub to: Option<SocketAddr>,
    /// From this address, whatever the socket is bound to (`IP_PKTINFO`); one that is not ours is not looked at.
    pub source: Option<IpAddr>,
    /// Bytes of each but the last, which may have fewer (`UDP_SEGMENT`); 0 if it is one.
    pub gso_size: u16,
    /// Hop limit of these alone; `None` is the socket's (`IP_TTL`, `IPV6_HOPLIMIT` as control messages).
    pub hop_limit: Option<u8>,
    /// Type of service, or traffic class, of these alone; `None` is the socket's (`IP_TOS`, `IPV6_TCLASS` as control messages). Over IPv4 their priority is what the former
    /// stands for, as on Linux.
    pub tos: Option<u8>,
}

/// How a socket behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpOptions {
    /// Others that have this set too may bind the same address; the last one gets the datagrams (`SO_REUSEADDR`).
    pub reuse_address: bool,
    /// Others that have this set too may bind the same address; datagrams are spread over them by sender (`SO_REUSEPORT`).
    pub reuse_port: bool,
    /// Whose it is: sockets of several users do not share a port by `reuse_port` (on Linux, effective users).
    pub uid: u32,
    /// May send to broadcast addresses (`SO_BROADCAST`).
    pub broadcast: bool,
    /// A socket of the IPv6 wildcard address leaves IPv4 to others (`IPV6_V6ONLY`).
    pub v6only: bool,
    /// Receive queue in bytes; `None` takes `udp_receive_bytes` (`SO_RCVBUF`, but exactly these bytes).
    pub rcvbuf: Option<u32>,
    /// Hop limit of what it sends to single hosts; `None` takes the link's (`IP_TTL`, `IPV6_UNICAST_HOPS`).
    pub hop_limit: Option<u8>,
    /// Type of service, or traffic class, of what it sends (`IP_TOS`, `IPV6_TCLASS`).
    pub tos: u8,
    /// Priority of what it sends, for devices that carry that: 0, the usual one, to 7, in the order that [`crate::priority`] says (`SO_PRIORITY`). Larger ones are 7.
    pub priority: u8,
    /// Errors about datagrams over IPv4 are kept, and pending also if they may pass, or the other end is not fixed (`IP_RECVERR`).
    pub recverr_v4: bool,
    /// The same over IPv6 (`IPV6_RECVERR`).
    pub recverr_v6: bool,
    /// What becomes of datagrams that are longer than a link on their way (`IP_MTU_DISCOVER`, `IPV6_MTU_DISCOVER`).
    pub pmtu_discovery: PmtuDiscovery,
    /// Datagrams of one sender and one length that come together are received as one ([`Datagram::piece`], `UDP_GRO`).
    pub gro: bool,
}

impl UdpOptions {
    fn recverr(&self, v4: bool) -> bool {
        if v4 { self.recverr_v4 } else { self.recverr_v6 }
    }
}

counters! {
    /// What happened to datagrams.
    UdpStats {
        /// Datagrams queued to a socket.
        received,
        /// Datagrams sent.
        sent,
        /// Datagrams to a port that nobody has.
        no_port,
        /// Datagrams dropped because a socket's queue, or all of them together, were full.
        receive_overflow,
        /// ICMP errors about datagrams of no socket.
        foreign_errors,
    }
}

/// A socket.
#[derive(Debug)]
struct UdpSocket {
    local: SocketAddr,
    remote: Option<SocketAddr>,
    options: UdpOptions,
    queue: UdpReceiveQueue,
    error: Option<UdpError>,
    /// Errors for those who ask, from the first one on.
    error_queue: Option<Box<UdpErrorQueue>>,
    /// It is in the list of readable sockets.
    in_readable_list: bool,
    /// The way to `remote`, and the hash of the flow there if somebody reads it.
    route: Option<(Route, Option<u32>)>,
    /// Datagrams that found no room.
    drops: u64,
}

/// A place for a socket.
#[derive(Debug, Default)]
struct UdpSlot {
    generation: u32,
    socket: Option<UdpSocket>,
}

/// All UDP sockets of a shard.
#[derive(Debug)]
pub struct Udp {
    slots: Vec<UdpSlot>,
    free: Vec<u32>,
    /// Sockets by local port, in the order they were bound.
    ports: BTreeMap<u16, Vec<u32>>,
    /// Sockets with something to read that nobody was told of yet.
    readable: VecDeque<u32>,
    /// Charged for queued datagrams, over all sockets.
    queued: usize,
    /// Most that ever was.
    queued_peak: usize,
    /// What all queues could hold without growing.
    capacity: usize,
    stats: UdpStats,
    sockets_max: usize,
    receive_bytes: usize,
    receive_total_bytes: usize,
    port_first: u16,
    port_last: u16,
}

impl Udp {
    /// No sockets yet. The limits are those of the network layer's configuration.
    pub fn new(config: &NetworkConfig) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            ports: BTreeMap::new(),
            readable: VecDeque::new(),
            queued: 0,
            queued_peak: 0,
            capacity: 0,
            stats: UdpStats::default(),
            sockets_max: config.udp_sockets_max as usize,
            receive_bytes: config.udp_receive_bytes as usize,
            receive_total_bytes: usize::try_from(config.udp_receive_total_bytes).unwrap_or(usize::MAX),
            port_first: config.udp_port_first,
            port_last: config.udp_port_last,
        }
    }

    /// Sockets now, and the most that there ever were at a time.
    pub fn sockets(&self) -> (usize, usize) {
        (self.slots.len() - self.free.len(), self.slots.len())
    }

    /// Bytes charged for queued datagrams, and the most that ever were.
    pub fn queued_bytes(&self) -> (usize, usize) {
        (self.queued, self.queued_peak)
    }

    /// The limit of that.
    pub fn receive_total_bytes(&self) -> usize {
        self.receive_total_bytes
    }

    /// The socket in a place, as a listing shows it.
    pub(crate) fn listing(&self, index: u32) -> Option<ListedSocket> {
        let socket = self.socket_at(index)?;
        Some(ListedSocket {
            protocol: SocketProtocol::Udp,
            state: if socket.remote.is_some() { State::Established } else { State::Closed },
            local: socket.local,
            remote: socket.remote.unwrap_or_else(|| unspecified_addr(socket.local)),
            recv_queue: socket.queue.cost() as u64,
            send_queue: 0,
            timer: None,
            info: None,
            memory: self.memory_of(socket),
        })
    }

    fn memory_of(&self, socket: &UdpSocket) -> SocketMemory {
        let (cost, capacity) = (socket.queue.cost(), socket.queue.capacity());
        let reports = socket.error_queue.as_ref().map_or(0, |reports| reports.memory_bytes());
        SocketMemory {
            rmem_alloc: cost as u64,
            rcvbuf: socket.rcvbuf(self.receive_bytes) as u64,
            // The charge for a datagram is not exactly what its description takes.
            fwd_alloc: capacity.saturating_sub(cost) as u64,
            drops: Some(socket.drops),
            total: (size_of::<UdpSlot>() + capacity + reports) as u64,
            ..SocketMemory::default()
        }
    }

    /// Counters.
    pub fn stats(&self) -> &UdpStats {
        &self.stats
    }

    fn socket(&mut self, handle: UdpHandle) -> Result<&mut UdpSocket, UdpError> {
        match self.slots.get_mut(handle.index as usize) {
            Some(UdpSlot { generation, socket: Some(socket) }) if *generation == handle.generation => {
                Ok(socket)
            }
            _ => Err(UdpError::Stale),
        }
    }

    fn socket_at(&self, index: u32) -> Option<&UdpSocket> {
        self.slots.get(index as usize)?.socket.as_ref()
    }

    /// Our end.
    pub fn local(&mut self, handle: UdpHandle) -> Result<SocketAddr, UdpError> {
        Ok(self.socket(handle)?.local)
    }

    /// The other end, if the socket is connected.
    pub fn remote(&mut self, handle: UdpHandle) -> Result<Option<SocketAddr>, UdpError> {
        Ok(self.socket(handle)?.remote)
    }

    /// Changes how the socket behaves. What concerns binding has no effect any more.
    pub fn set_options(&mut self, handle: UdpHandle, options: UdpOptions) -> Result<(), UdpError> {
        let socket = self.socket(handle)?;
        let before = core::mem::replace(&mut socket.options, options);
        if before.recverr_v4 && !options.recverr_v4 || before.recverr_v6 && !options.recverr_v6 {
            socket.error_queue = None;
        }
        Ok(())
    }

    /// Closes a socket. What is queued is lost, and the handle is stale.
    pub fn close(&mut self, handle: UdpHandle) -> Result<(), UdpError> {
        self.socket(handle)?;
        let slot = &mut self.slots[handle.index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        if let Some(socket) = slot.socket.take() {
            self.queued -= socket.queue.cost();
            self.capacity -= socket.queue.capacity();
            self.remove_from_port(socket.local.port(), handle.index);
        }
        self.readable.retain(|&index| index != handle.index);
        self.free.push(handle.index);
        Ok(())
    }

    /// Fixes the other end: only its datagrams are received from now on, and errors about datagrams to it are reported. A wildcard local address
    /// becomes the one that datagrams to `remote` leave from.
    ///
    /// # Errors
    /// [`UdpError::Stale`], [`UdpError::InvalidAddress`], [`UdpError::WrongFamily`], and if there is no route.
    pub fn connect(
        &mut self,
        now: Instant,
        network: &mut Network,
        handle: UdpHandle,
        remote: SocketAddr,
    ) -> Result<(), UdpError> {
        let socket = self.socket(handle)?;
        check_destination(network, socket, remote)?;
        let from = (!socket.local.ip().is_unspecified()).then_some(socket.local.ip());
        let route = network.route(now, remote.ip(), from).map_err(route_error)?;
        socket.local.set_ip(route.src);
        socket.remote = Some(remote);
        socket.cache_route(network, route, remote);
        Ok(())
    }

    /// Sends a datagram, to the other end of a connected socket if no destination is given. An error that is pending is reported instead.
    ///
    /// # Errors
    /// [`UdpError`]; [`UdpError::NoBuffers`] if the device is full.
    pub fn send_to(
        &mut self,
        now: Instant,
        network: &mut Network,
        handle: UdpHandle,
        to: Option<SocketAddr>,
        payload: &[u8],
    ) -> Result<(), UdpError> {
        self.send(now, network, handle, &UdpSendParams { to, ..UdpSendParams::default() }, payload)
    }

    /// The same from one of our addresses, whatever the socket is bound to (`IP_PKTINFO`): a socket that listens on all of them
    /// answers from the one that was asked.
    ///
    /// # Errors
    /// [`UdpError::AddressNotAvailable`] if `source` is not ours or of another family than `to`.
    pub fn send_from(
        &mut self,
        now: Instant,
        network: &mut Network,
        handle: UdpHandle,
        source: IpAddr,
        to: SocketAddr,
        payload: &[u8],
    ) -> Result<(), UdpError> {
        let sending = UdpSendParams { to: Some(to), source: Some(source), ..UdpSendParams::default() };
        self.send(now, network, handle, &sending, payload)
    }

    /// Sends a datagram, or several: a device that can cut gets all at once.
    ///
    /// # Errors
    /// As [`Udp::send_from`]; [`UdpError::TooLong`] also if a piece does not fit into a packet of the path, all of them do not fit into one datagram, or
    /// they are more than 128.
    pub fn send(
        &mut self,
        now: Instant,
        network: &mut Network,
        handle: UdpHandle,
        sending: &UdpSendParams,
        payload: &[u8],
    ) -> Result<(), UdpError> {
        let &UdpSendParams { to, source, gso_size: piece, .. } = sending;
        let piece = if piece == 0 { payload.len() } else { piece.into() };
        let socket = self.socket(handle)?;
        if let Some(error) = socket.error.take() {
            return Err(error);
        }
        let remote = to.or(socket.remote).ok_or(UdpError::NoDestination)?;
        check_destination(network, socket, remote)?;
        let len = udp::Header::LEN + payload.len();
        let len_max = usize::from(u16::MAX) - if remote.is_ipv4() { 20 } else { 0 };
        let (route, hash) = match source {
            Some(_) => (network.route(now, remote.ip(), source).map_err(route_error)?, None),
            None => route_for(now, network, socket, remote, to.is_some())?,
        };
        let priority = match sending.tos {
            Some(tos) if remote.is_ipv4() => priority::of_tos(tos),
            _ => socket.options.priority,
        };
        let fits = len_max.min(socket.options.pmtu_discovery.datagram_len_max(network, &route));
        if len > fits && (piece == payload.len() || len > len_max) {
            socket.queue_message_too_long(remote, &route, network);
            return Err(UdpError::TooLong);
        }
        let header = IpHeader {
            src: route.src,
            dst: remote.ip(),
            protocol: protocol::UDP,
            tos: sending.tos.unwrap_or(socket.options.tos),
            hop_limit: match (sending.hop_limit, socket.options.hop_limit) {
                (Some(hop_limit), _) => hop_limit,
                _ if remote.ip().is_multicast() => MULTICAST_HOP_LIMIT,
                (None, Some(hop_limit)) => hop_limit,
                (None, None) => network.hop_limit(route.hop.link()),
            },
            dont_fragment: socket.options.pmtu_discovery.dont_fragment(),
            label: Label::new(hash, priority),
        };
        let udp = udp::Header {
            src_port: socket.local.port(),
            dst_port: remote.port(),
            // Cannot truncate: compared with `len_max` above.
            len: len as u16,
            checksum: 0,
        };
        let checksum = Some(udp::Header::CHECKSUM_OFFSET as u16);
        if piece < payload.len() {
            let sent = gso::send(now, network, &route, &header, &udp, (payload, piece));
            self.stats.sent += sent?;
            return Ok(());
        }
        let sent = network.send_datagram(now, &route, &header, len, checksum, |out| {
            udp.emit(out);
            out[udp::Header::LEN..].copy_from_slice(payload);
        });
        match sent {
            Ok(()) => {
                self.stats.sent += 1;
                Ok(())
            }
            Err(error) => Err(tx_error(error)),
        }
    }

    /// Takes the next datagram. Its payload is cut off where `out` ends.
    ///
    /// # Errors
    /// A pending error first; [`UdpError::WouldBlock`] if there is nothing.
    pub fn recv_from(&mut self, handle: UdpHandle, out: &mut [u8]) -> Result<Datagram, UdpError> {
        let socket = self.socket(handle)?;
        if let Some(error) = socket.error.take() {
            return Err(error);
        }
        let before = (socket.queue.cost(), socket.queue.capacity());
        let datagram = socket.queue.pop(out).ok_or(UdpError::WouldBlock)?;
        self.queued -= before.0 - self.slots[handle.index as usize].queue_cost();
        self.shrink_if_scarce(handle.index, before.1);
        Ok(datagram)
    }

    /// The same without taking it (`MSG_PEEK`).
    pub fn peek_from(&mut self, handle: UdpHandle, out: &mut [u8]) -> Result<Datagram, UdpError> {
        let socket = self.socket(handle)?;
        if let Some(error) = socket.error.take() {
            return Err(error);
        }
        socket.queue.peek(out).ok_or(UdpError::WouldBlock)
    }

    /// Payload bytes of the next datagram, if there is one.
    pub fn next_len(&mut self, handle: UdpHandle) -> Result<Option<usize>, UdpError> {
        Ok(self.socket(handle)?.queue.front().map(|datagram| datagram.len))
    }

    /// Takes a pending error (`SO_ERROR`).
    pub fn take_error(&mut self, handle: UdpHandle) -> Result<Option<UdpError>, UdpError> {
        Ok(self.socket(handle)?.error.take())
    }

    /// Bytes of the largest IP packet that gets to the other end in one piece, as far as is known (`IP_MTU`).
    ///
    /// # Errors
    /// [`UdpError::NoDestination`] if the other end is not fixed, or there is no route to it any more.
    pub fn path_mtu(
        &mut self,
        now: Instant,
        network: &mut Network,
        handle: UdpHandle,
    ) -> Result<u16, UdpError> {
        let socket = self.socket(handle)?;
        let remote = socket.remote.ok_or(UdpError::NoDestination)?;
        let (route, _) = route_for(now, network, socket, remote, false)?;
        Ok(socket.options.pmtu_discovery.mtu(network, &route))
    }

    /// The next socket that has got something to read, or an error, since it was named last.
    pub fn next_readable(&mut self) -> Option<UdpHandle> {
        let index = self.readable.pop_front()?;
        let slot = &mut self.slots[index as usize];
        if let Some(socket) = &mut slot.socket {
            socket.in_readable_list = false;
        }
        Some(UdpHandle { index, generation: slot.generation })
    }

    /// Sockets that [`Udp::next_readable`] has not named yet.
    pub fn readable_count(&self) -> usize {
        self.readable.len()
    }

    fn list_readable(&mut self, index: u32) {
        if let Some(socket) = &mut self.slots[index as usize].socket
            && !socket.in_readable_list
        {
            socket.in_readable_list = true;
            self.readable.push_back(index);
        }
    }

    /// A datagram arrived, checked by [`Network::parse`].
    pub fn input(&mut self, now: Instant, network: &mut Network, l4: &L4<'_>) {
        let Ok(header) = udp::Header::parse(l4.bytes) else { return };
        let local = SocketAddr::new(l4.dst, header.dst_port);
        let remote = SocketAddr::new(l4.src, header.src_port);
        let payload = header.payload(l4.bytes);
        // A super-frame holds several datagrams of equal size.
        let piece = l4.gso.map_or(payload.len(), |gso| usize::from(gso.size)).max(1);
        if l4.broadcast {
            // Every socket that could be meant gets a copy, as on Linux.
            for index in self.matching_sockets(local, remote) {
                self.deliver(index, l4, remote, payload, piece);
            }
            return;
        }
        match self.lookup(network, local, remote) {
            Some(index) => self.deliver(index, l4, remote, payload, piece),
            None => {
                self.stats.no_port += 1;
                network.send_icmp_unreachable(now, l4, UnreachableReason::Port);
            }
        }
    }

    fn deliver(&mut self, index: u32, l4: &L4<'_>, from: SocketAddr, payload: &[u8], piece: usize) {
        let (tos, hop_limit) = (l4.tos(), l4.hop_limit);
        let whole = Datagram { len: payload.len(), from, to: l4.dst, tos, hop_limit, gso_size: 0 };
        if piece < payload.len() && self.socket_at(index).is_some_and(|socket| socket.options.gro) {
            // Cannot truncate: shorter than the payload of an IP packet.
            self.enqueue(index, Datagram { gso_size: piece as u16, ..whole }, payload);
            return;
        }
        let mut rest = payload;
        loop {
            let (datagram, following) = rest.split_at(piece.min(rest.len()));
            self.enqueue(index, Datagram { len: datagram.len(), ..whole }, datagram);
            rest = following;
            if rest.is_empty() {
                break;
            }
        }
    }

    fn enqueue(&mut self, index: u32, datagram: Datagram, payload: &[u8]) {
        let Some(socket) = &mut self.slots[index as usize].socket else { return };
        let cost = payload.len() + queue::OVERHEAD;
        let limit = socket.rcvbuf(self.receive_bytes);
        // An empty queue takes any datagram, so that a small limit cannot shut a socket up for ever.
        let fits = socket.queue.is_empty() || socket.queue.cost() + cost <= limit;
        if !fits || self.queued + cost > self.receive_total_bytes {
            self.stats.receive_overflow += 1;
            socket.drops += 1;
            return;
        }
        let (capacity, before) = (socket.queue.capacity(), socket.queue.cost());
        if !(socket.options.gro && datagram.gso_size == 0 && socket.queue.coalesce(&datagram, payload)) {
            socket.queue.push(datagram, payload);
        }
        self.capacity += socket.queue.capacity() - capacity;
        self.queued += socket.queue.cost() - before;
        self.queued_peak = self.queued_peak.max(self.queued);
        // Cannot truncate: 64 at the most.
        let count = if datagram.gso_size == 0 { 1 } else { payload.len().div_ceil(datagram.gso_size.into()) };
        self.stats.received += count as u64;
        self.list_readable(index);
    }

    /// Queues keep their memory for the next datagrams, unless all together keep more than half of what they may hold.
    fn shrink_if_scarce(&mut self, index: u32, capacity_before: usize) {
        let scarce = self.capacity > self.receive_total_bytes / 2;
        let Some(socket) = &mut self.slots[index as usize].socket else { return };
        if scarce {
            socket.queue.shrink();
        }
        self.capacity = self.capacity - capacity_before + socket.queue.capacity();
    }

    /// Somebody says that a datagram of ours could not be delivered. All that can be checked is that there is such a socket.
    pub fn on_error(&mut self, now: Instant, network: &mut Network, error: &TransportError) {
        let Some(index) = self.lookup(network, error.local, error.remote) else {
            self.stats.foreign_errors += 1;
            return;
        };
        let Some(socket) = &mut self.slots[index as usize].socket else { return };
        let v4 = error.remote.is_ipv4();
        let too_big = matches!(error.kind, IcmpErrorKind::PacketTooBig { .. });
        if too_big {
            network.accept_path_mtu(now, error);
            socket.route = None;
            if socket.options.pmtu_discovery == PmtuDiscovery::Dont && v4 {
                return;
            }
        }
        let meaning = UdpError::from_icmp(error.kind, v4);
        let asked = socket.options.recverr(v4);
        if asked {
            let IcmpErrorOrigin {
                offender: from, icmp_type: kind, icmp_code: code, info, extensions, ..
            } = error.origin;
            let report = socket.extended_error(meaning, error.remote);
            let report = UdpExtendedError {
                offender: Some(from),
                icmp_type: kind,
                icmp_code: code,
                info,
                extensions,
                ..report
            };
            socket.queue_error(report, network.quoted_payload());
        }
        // Linux: soft errors, and errors of sockets without a fixed other end, are only for those who ask.
        if asked || socket.remote == Some(error.remote) && (error.kind.is_hard() || too_big) {
            socket.error = Some(meaning);
            self.list_readable(index);
        }
    }
}

impl UdpSocket {
    /// Remembers the way to its other end.
    fn cache_route(&mut self, network: &Network, route: Route, remote: SocketAddr) -> (Route, Option<u32>) {
        let local = SocketAddr::new(route.src, self.local.port());
        let hash = if network.device_carries_labels(&route.hop) {
            network.tx_flow_hash(local, remote)
        } else {
            None
        };
        *self.route.insert((route, hash))
    }

    /// Bytes that may be queued on it; `default` is the configuration's.
    fn rcvbuf(&self, default: usize) -> usize {
        self.options.rcvbuf.map_or(default, |bytes| bytes as usize)
    }

    fn extended_error(&self, error: UdpError, to: SocketAddr) -> UdpExtendedError {
        UdpExtendedError {
            error,
            destination: to,
            offender: None,
            icmp_type: 0,
            icmp_code: 0,
            info: 0,
            extensions: None,
            payload_len: 0,
            next_error: None,
            has_more: false,
        }
    }

    fn queue_error(&mut self, report: UdpExtendedError, known: &[u8]) {
        self.error_queue.get_or_insert_default().push(report, known);
    }

    /// A datagram is too long to be sent at all (`ip_local_error`).
    fn queue_message_too_long(&mut self, to: SocketAddr, route: &Route, network: &Network) {
        if self.options.recverr(to.is_ipv4()) {
            let port = self.remote.map_or(0, |remote| remote.port());
            // IPv6 names the port that this one was for.
            let port = if to.is_ipv4() { port } else { to.port() };
            let info = self.options.pmtu_discovery.mtu(network, route).into();
            let report = self.extended_error(UdpError::TooLong, SocketAddr::new(to.ip(), port));
            self.queue_error(UdpExtendedError { info, ..report }, &[]);
        }
    }
}

impl UdpSlot {
    fn queue_cost(&self) -> usize {
        self.socket.as_ref().map_or(0, |socket| socket.queue.cost())
    }
}

/// Whether a socket may send to an address at all.
fn check_destination(network: &Network, socket: &UdpSocket, remote: SocketAddr) -> Result<(), UdpError> {
    if remote.port() == 0 {
        return Err(UdpError::InvalidAddress);
    }
    let local = socket.local.ip();
    // Only the IPv6 wildcard is open to both families.
    let both = local.is_ipv6() && local.is_unspecified() && !socket.options.v6only;
    if local.is_ipv4() != remote.is_ipv4() && !both {
        return Err(UdpError::WrongFamily);
    }
    if network.is_broadcast(remote.ip()) && !socket.options.broadcast {
        return Err(UdpError::BroadcastForbidden);
    }
    Ok(())
}

/// The way to `remote`, from the socket's memory if it still leads there.
fn route_for(
    now: Instant,
    network: &mut Network,
    socket: &mut UdpSocket,
    remote: SocketAddr,
    named: bool,
) -> Result<(Route, Option<u32>), UdpError> {
    if !named
        && let Some(known) = socket.route
        && network.hop_is_current(&known.0.hop)
    {
        return Ok(known);
    }
    let local = socket.local.ip();
    // A datagram to one host cannot come from a broadcast or multicast address, though a socket may be bound to one.
    let from =
        (!local.is_unspecified() && !local.is_multicast() && !network.is_broadcast(local)).then_some(local);
    let route = network.route(now, remote.ip(), from).map_err(route_error)?;
    if named {
        // Its receiver needs the hash only of ports that several of its shards have: who sends to many leaves it to that one.
        return Ok((route, None));
    }
    Ok(socket.cache_route(network, route, remote))
}

fn tx_error(error: TxError) -> UdpError {
    match error {
        TxError::Full => UdpError::NoBuffers,
        TxError::TooBig => UdpError::TooLong,
        TxError::Stale | TxError::Unreachable => UdpError::HostUnreachable,
    }
}

fn route_error(error: RouteError) -> UdpError {
    match error {
        RouteError::NetUnreachable | RouteError::OwnAddress => UdpError::NetUnreachable,
        RouteError::SourceNotLocal => UdpError::AddressNotAvailable,
        RouteError::InvalidDestination => UdpError::InvalidAddress,
        RouteError::NeighboursExhausted => UdpError::NoBuffers,
    }
}

/// True if a socket bound to `bound` receives what is sent to `address`.
fn address_matches(bound: IpAddr, only_v6: bool, address: IpAddr) -> bool {
    match (bound, address) {
        (IpAddr::V6(bound), IpAddr::V4(_)) => bound.is_unspecified() && !only_v6,
        (bound, address) if bound.is_ipv4() == address.is_ipv4() => {
            bound.is_unspecified() || bound == address
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
