//! UDP sockets (RFC 768, RFC 1122 §4.1). Binding, socket lookup and errors follow Linux.
//!
//! A socket bound to the IPv6 wildcard address also receives IPv4 datagrams unless `v6only` is set. IPv4
//! addresses are reported as IPv4 addresses, never as IPv4-mapped IPv6 addresses.

mod bind;
mod classes;
mod error;
mod error_queue;
mod filter;
mod groups;
mod gso;
pub(crate) mod image;
mod pmtu_discovery;
mod queue;
mod reuseport;
mod send;

pub(crate) use bind::{compute_score, has_bind_conflict};
pub use error::UdpError;
pub use error_queue::UdpExtendedError;
pub use groups::MembershipLimits;
pub use pmtu_discovery::PmtuDiscovery;
pub use queue::Datagram;

use crate::handle::UdpHandle;
use crate::icmp::UnreachableReason;
use crate::icmp::error::{IcmpErrorKind, IcmpErrorOrigin, TransportError};
use crate::ip::path_mtu::PathMtuValidity;
use crate::ip::stats::counters;
use crate::ip::{FlowLabel, L4, Network, NetworkConfig, Route, RouteError, TxError};
use crate::multicast::MulticastOptions;
use crate::priority::{COMPILED, ClassQueues, ClassSet};
use crate::reuseport::{GroupKey, ReuseportGroups};
use crate::socket_filter::SocketFilter;
use crate::stack::{ListedSocket, SocketHandle, SocketMemory, SocketProtocol, unspecified_addr};
use crate::tcp::state::State;
use crate::time::Instant;
use crate::wire::udp;
use classes::UdpClasses;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use error_queue::UdpErrorQueue;
use filter::Arrival;
use groups::Membership;
use queue::UdpReceiveQueue;
use send::transmit;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The parameters of a send call, which sends one datagram or several datagrams of one length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UdpSendParams {
    /// Destination; `None` stands for the remote address of a connected socket.
    pub to: Option<SocketAddr>,
    /// Source address, regardless of what the socket is bound to (`IP_PKTINFO`, `IPV6_PKTINFO`). It must be a
    /// local address.
    pub source: Option<IpAddr>,
    /// Payload bytes of each datagram but the last, which may be shorter (`UDP_SEGMENT`); 0 sends a single
    /// datagram.
    pub gso_size: u16,
    /// Hop limit of this call; `None` takes the socket's (`IP_TTL`, `IPV6_HOPLIMIT` as control messages).
    pub hop_limit: Option<u8>,
    /// Type of service or traffic class of this call; `None` takes the socket's (`IP_TOS`, `IPV6_TCLASS` as
    /// control messages). Over IPv4 it also determines the priority, as on Linux.
    pub tos: Option<u8>,
    /// Flow label of this call over IPv6; `None` takes the socket's (`IPV6_FLOWINFO` as a control message).
    pub flow_label: Option<FlowLabel>,
}

/// The options of a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UdpOptions {
    /// Lets other sockets with this option bind the same address; the socket bound last gets the datagrams
    /// (`SO_REUSEADDR`).
    pub reuse_address: bool,
    /// Lets other sockets with this option bind the same address; datagrams are distributed among them by
    /// sender (`SO_REUSEPORT`).
    pub reuse_port: bool,
    /// The owner: `reuse_port` does not let sockets of different users share a port (on Linux, effective user
    /// IDs).
    pub uid: u32,
    /// Permits sending to broadcast addresses (`SO_BROADCAST`).
    pub broadcast: bool,
    /// Restricts a socket bound to the IPv6 wildcard address to IPv6 (`IPV6_V6ONLY`).
    pub v6only: bool,
    /// Capacity of the receive queue in bytes; `None` takes `udp_receive_bytes` (`SO_RCVBUF`, but not
    /// doubled).
    pub rcvbuf: Option<u32>,
    /// Hop limit of unicast datagrams; `None` takes the link's (`IP_TTL`, `IPV6_UNICAST_HOPS`).
    pub hop_limit: Option<u8>,
    /// Type of service or traffic class of datagrams (`IP_TOS`, `IPV6_TCLASS`).
    pub tos: u8,
    /// Flow label of datagrams over IPv6 (`IPV6_FLOWLABEL_MGR`, `IPV6_AUTOFLOWLABEL`).
    pub flow_label: FlowLabel,
    /// Priority of datagrams, for devices that carry it: 0 (the default) to 7, ordered as [`crate::priority`]
    /// defines (`SO_PRIORITY`). Larger values count as 7.
    pub priority: u8,
    /// Queues errors about datagrams over IPv4 for the application, and also makes soft errors, and errors on
    /// an unconnected socket, pending (`IP_RECVERR`).
    pub recverr_v4: bool,
    /// Like `recverr_v4`, for IPv6 (`IPV6_RECVERR`).
    pub recverr_v6: bool,
    /// The path MTU discovery mode (`IP_MTU_DISCOVER`, `IPV6_MTU_DISCOVER`).
    pub pmtu_discovery: PmtuDiscovery,
    /// Coalesces consecutive datagrams of one sender and one length ([`Datagram::gso_size`], `UDP_GRO`).
    pub gro: bool,
    /// Options about IPv4 groups.
    pub multicast_v4: MulticastOptions,
    /// Options about IPv6 groups.
    pub multicast_v6: MulticastOptions,
}

impl UdpOptions {
    fn recverr(&self, v4: bool) -> bool {
        if v4 { self.recverr_v4 } else { self.recverr_v6 }
    }
}

counters! {
    /// Events of UDP.
    UdpStats {
        /// Datagrams queued to a socket.
        received,
        /// Datagrams sent.
        sent,
        /// Datagrams received for a port that no socket has.
        no_port,
        /// Datagrams dropped because the receive queue of a socket, or all of them together, had reached
        /// their limit.
        receive_overflow,
        /// Datagrams that the filter of their socket dropped (`SO_ATTACH_FILTER`).
        filter_drops,
        /// Memberships and sources of filters that were refused because all sockets together had reached the
        /// limit.
        memberships_refused,
        /// Sockets that were refused at `udp_sockets_max`.
        sockets_refused,
        /// Sockets without a port that were refused because this shard had no free ephemeral port.
        ports_exhausted,
        /// ICMP errors about datagrams of no known socket.
        foreign_errors,
    }
}

/// A UDP socket.
#[derive(Debug)]
struct UdpSocket {
    local: SocketAddr,
    remote: Option<SocketAddr>,
    options: UdpOptions,
    queue: UdpReceiveQueue,
    error: Option<UdpError>,
    /// The error queue, which exists from the first queued error on.
    error_queue: Option<Box<UdpErrorQueue>>,
    /// The classes in whose lists of readable sockets the socket is.
    listed_in: ClassSet,
    /// The cached route to `remote`.
    route: Option<CachedRoute>,
    /// Datagrams dropped because a queue had reached its limit, or by the filter.
    drops: u64,
    /// Decides which datagrams are queued.
    filter: Option<Arc<dyn SocketFilter>>,
    /// True if the socket coalesces datagrams or has a filter, or if datagrams have classes.
    has_slow_path: bool,
    /// The groups that the socket has joined.
    memberships: Vec<Membership>,
    /// The group of sockets that share its address, if it was bound with `reuse_port`.
    group: Option<Box<GroupKey>>,
}

/// A route that a socket caches.
#[derive(Clone, Copy, Debug)]
struct CachedRoute {
    route: Route,
    /// The flow hash, if the device carries labels.
    flow_hash: Option<u32>,
    /// States until when the path MTU of the route is valid.
    path_mtu: PathMtuValidity,
}

impl CachedRoute {
    /// Returns a route for one call, which no socket caches.
    fn uncached(route: Route) -> Self {
        Self { route, flow_hash: None, path_mtu: PathMtuValidity::default() }
    }
}

/// A slot for a socket.
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
    /// Sockets that have become readable by frames of the current class of priority and have not been
    /// returned by [`Udp::next_readable`] yet.
    readable: VecDeque<u32>,
    /// The readable sockets of the other classes.
    readable_classes: ClassQueues<u32>,
    /// Present if the limits of receive queues depend on the class.
    classes: Option<Box<UdpClasses>>,
    /// Bytes charged for queued datagrams, over all sockets.
    queued: usize,
    /// Peak of `queued`.
    queued_peak: usize,
    /// Bytes of memory allocated by all receive queues.
    capacity: usize,
    /// Memberships of all sockets, plus the sources in their filters.
    memberships: usize,
    groups: ReuseportGroups,
    stats: UdpStats,
    /// When the datagrams that the device refused last should be sent again.
    retry_at: Instant,
    /// Buffer for packets that are rebuilt for filters.
    scratch: Vec<u8>,
    sockets_max: usize,
    memberships_max: usize,
    receive_bytes: usize,
    receive_total_bytes: usize,
    port_first: u16,
    port_last: u16,
}

impl Udp {
    /// Creates a table without sockets. Its limits are those of the network layer's configuration.
    pub fn new(config: &NetworkConfig) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            ports: BTreeMap::new(),
            readable: VecDeque::new(),
            readable_classes: ClassQueues::default(),
            classes: None,
            queued: 0,
            queued_peak: 0,
            capacity: 0,
            memberships: 0,
            groups: ReuseportGroups::default(),
            stats: UdpStats::default(),
            retry_at: Instant::ZERO,
            scratch: Vec::new(),
            sockets_max: config.udp_sockets_max as usize,
            memberships_max: config.group_memberships_max as usize,
            receive_bytes: config.udp_receive_bytes as usize,
            receive_total_bytes: usize::try_from(config.udp_receive_total_bytes).unwrap_or(usize::MAX),
            port_first: config.udp_port_first,
            port_last: config.udp_port_last,
        }
    }

    /// Returns the number of sockets now, and its peak.
    pub fn sockets(&self) -> (usize, usize) {
        (self.slots.len() - self.free.len(), self.slots.len())
    }

    /// Returns the bytes charged for queued datagrams now, and their peak.
    pub fn queued_bytes(&self) -> (usize, usize) {
        (self.queued, self.queued_peak)
    }

    /// Returns the limit of the bytes charged for queued datagrams.
    pub fn receive_total_bytes(&self) -> usize {
        self.receive_total_bytes
    }

    /// Returns the socket in a slot as a listing shows it.
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
            handle: Some(SocketHandle::Udp(UdpHandle {
                index,
                generation: self.slots[index as usize].generation,
            })),
        })
    }

    /// Reports [`UdpError::Destroyed`] on a socket, if it has these ends. Returns whether it has.
    pub(crate) fn destroy(&mut self, handle: UdpHandle, ends: [SocketAddr; 2]) -> bool {
        let Ok(socket) = self.socket(handle) else { return false };
        let remote = socket.remote.unwrap_or_else(|| unspecified_addr(socket.local));
        let exists = [socket.local, remote] == ends;
        if exists {
            socket.error = Some(UdpError::Destroyed);
            self.list_readable(handle.index);
        }
        exists
    }

    fn memory_of(&self, socket: &UdpSocket) -> SocketMemory {
        let (cost, capacity) = (socket.queue.cost(), socket.queue.capacity());
        let error_queue = socket.error_queue.as_ref().map_or(0, |error_queue| error_queue.memory_bytes());
        SocketMemory {
            rmem_alloc: cost as u64,
            rcvbuf: socket.rcvbuf(self.receive_bytes) as u64,
            // The charge for a datagram is not exactly the size of its entry.
            fwd_alloc: capacity.saturating_sub(cost) as u64,
            drops: Some(socket.drops),
            total: (size_of::<UdpSlot>() + capacity + error_queue) as u64,
            ..SocketMemory::default()
        }
    }

    /// Returns the counters.
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

    /// Returns the local address of a socket.
    pub fn local(&mut self, handle: UdpHandle) -> Result<SocketAddr, UdpError> {
        Ok(self.socket(handle)?.local)
    }

    /// Returns the remote address of a socket, if it is connected.
    pub fn remote(&mut self, handle: UdpHandle) -> Result<Option<SocketAddr>, UdpError> {
        Ok(self.socket(handle)?.remote)
    }

    /// Sets the options of a socket. `v6only` keeps the value that it had when the socket was bound;
    /// `reuse_address` and `reuse_port` concern sockets that are bound later.
    pub fn set_options(&mut self, handle: UdpHandle, options: UdpOptions) -> Result<(), UdpError> {
        let has_classes = self.classes.is_some();
        let socket = self.socket(handle)?;
        let options = UdpOptions { v6only: socket.options.v6only, ..options };
        let before = core::mem::replace(&mut socket.options, options);
        socket.update_slow_path(has_classes);
        if before.recverr_v4 && !options.recverr_v4 || before.recverr_v6 && !options.recverr_v6 {
            socket.error_queue = None;
        }
        Ok(())
    }

    /// Closes a socket, which must have left its groups. Queued datagrams are discarded, and the handle
    /// becomes stale.
    pub fn close(&mut self, handle: UdpHandle) -> Result<(), UdpError> {
        self.socket(handle)?;
        let slot = &mut self.slots[handle.index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        if let Some(socket) = slot.socket.take() {
            self.queued -= socket.queue.cost();
            self.capacity -= socket.queue.capacity();
            if let Some(group) = &socket.group {
                self.groups.leave(group, handle.index);
            }
            self.remove_from_port(socket.local.port(), handle.index);
        }
        self.readable.retain(|&index| index != handle.index);
        self.readable_classes.retain(|&index| index != handle.index);
        self.free.push(handle.index);
        Ok(())
    }

    /// Connects a socket: it receives only datagrams from `remote`, and errors about datagrams to `remote`
    /// are reported. A wildcard local address is replaced by the source address of the route to `remote`; a
    /// group or broadcast address remains the one that the socket receives at. As on Linux, the port of
    /// `remote` may be 0, a port that no socket has.
    ///
    /// # Errors
    /// [`UdpError::Stale`], [`UdpError::InvalidAddress`], [`UdpError::WrongFamily`], and the errors of the
    /// route lookup.
    pub fn connect(
        &mut self,
        now: Instant,
        network: &mut Network,
        handle: UdpHandle,
        remote: SocketAddr,
    ) -> Result<(), UdpError> {
        let socket = self.socket(handle)?;
        check_destination(network, socket, remote)?;
        let route = if remote.ip().is_multicast() {
            socket.group_route(now, network, remote.ip(), None)?
        } else {
            network.route(now, remote.ip(), socket.source_address(network)).map_err(route_error)?
        };
        if socket.local.ip().is_unspecified() {
            socket.local.set_ip(route.src);
        }
        socket.remote = Some(remote);
        socket.cache_route(now, network, route, remote);
        self.leave_group(handle.index);
        Ok(())
    }

    /// Sends a datagram to `to`, or to the remote address of a connected socket. A pending error is returned
    /// instead.
    ///
    /// # Errors
    /// Any [`UdpError`].
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

    /// Sends a datagram from a given local address, regardless of what the socket is bound to (`IP_PKTINFO`):
    /// a socket bound to the wildcard address can answer from the address that a request was sent to.
    ///
    /// # Errors
    /// [`UdpError::AddressNotAvailable`] if `source` is not a local address or not of the family of `to`;
    /// otherwise as [`Udp::send_to`].
    pub fn send_from(
        &mut self,
        now: Instant,
        network: &mut Network,
        handle: UdpHandle,
        source: IpAddr,
        to: SocketAddr,
        payload: &[u8],
    ) -> Result<(), UdpError> {
        let params = UdpSendParams { to: Some(to), source: Some(source), ..UdpSendParams::default() };
        self.send(now, network, handle, &params, payload)
    }

    /// Sends one datagram, or several. A device with UDP segmentation offload gets several datagrams as one
    /// super-frame.
    ///
    /// # Errors
    /// As [`Udp::send_from`]; [`UdpError::TooLong`] also if a datagram exceeds the path MTU, all datagrams
    /// together exceed the longest datagram, or there are more than 128.
    pub fn send(
        &mut self,
        now: Instant,
        network: &mut Network,
        handle: UdpHandle,
        params: &UdpSendParams,
        payload: &[u8],
    ) -> Result<(), UdpError> {
        let &UdpSendParams { to, source, .. } = params;
        let socket = self.socket(handle)?;
        if let Some(error) = socket.error.take() {
            return Err(error);
        }
        let remote = to.or(socket.remote).ok_or(UdpError::NoDestination)?;
        if to.is_some_and(|to| to.port() == 0) {
            return Err(UdpError::InvalidAddress);
        }
        if check_destination(network, socket, remote)? {
            return self.send_to_all(now, network, handle, params, payload);
        }
        let cached = match source {
            Some(_) => {
                let route = network.route(now, remote.ip(), source).map_err(route_error)?;
                CachedRoute::uncached(route)
            }
            None => route_for(now, network, socket, remote, to.is_some())?,
        };
        let (header, udp) = socket.headers(network, params, remote, &cached, None, payload.len())?;
        let sent = transmit(now, network, &cached.route, &header, &udp, payload, params.gso_size);
        if sent == Err(UdpError::DeviceFull) {
            return Err(self.refused_by_device(now));
        }
        self.stats.sent += sent?;
        Ok(())
    }

    /// Sets when datagrams that the device has refused should be sent again. Returns
    /// [`UdpError::DeviceFull`].
    #[cold]
    fn refused_by_device(&mut self, now: Instant) -> UdpError {
        self.retry_at = now + DEVICE_FULL_RETRY;
        UdpError::DeviceFull
    }

    /// Returns when datagrams that the device has refused should be sent again, if that is after `now`.
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        (self.retry_at > now).then_some(self.retry_at)
    }

    /// Takes the next datagram. Its payload is truncated to the length of `out`.
    ///
    /// # Errors
    /// A pending error; [`UdpError::WouldBlock`] if the queue is empty.
    pub fn recv_from(&mut self, handle: UdpHandle, out: &mut [u8]) -> Result<Datagram, UdpError> {
        let socket = self.socket(handle)?;
        if let Some(error) = socket.error.take() {
            return Err(error);
        }
        let before = (socket.queue.cost(), socket.queue.capacity());
        let datagram = socket.queue.pop(out).ok_or(UdpError::WouldBlock)?;
        if COMPILED && self.classes.is_some() {
            self.note_received(handle.index);
        }
        self.queued -= before.0 - self.slots[handle.index as usize].queue_cost();
        self.shrink_if_scarce(handle.index, before.1);
        Ok(datagram)
    }

    /// Copies the next datagram without taking it (`MSG_PEEK`). Its payload is truncated to the length of
    /// `out`.
    ///
    /// # Errors
    /// As [`Udp::recv_from`]; a pending error is taken.
    pub fn peek_from(&mut self, handle: UdpHandle, out: &mut [u8]) -> Result<Datagram, UdpError> {
        let socket = self.socket(handle)?;
        if let Some(error) = socket.error.take() {
            return Err(error);
        }
        socket.queue.peek(out).ok_or(UdpError::WouldBlock)
    }

    /// Returns the payload length of the next datagram in bytes, if there is one.
    pub fn next_len(&mut self, handle: UdpHandle) -> Result<Option<usize>, UdpError> {
        Ok(self.socket(handle)?.queue.front().map(|datagram| datagram.len))
    }

    /// Takes the pending error (`SO_ERROR`).
    pub fn take_error(&mut self, handle: UdpHandle) -> Result<Option<UdpError>, UdpError> {
        Ok(self.socket(handle)?.error.take())
    }

    /// Returns the path MTU of a connected socket as far as it is known: bytes of the largest IP packet
    /// (`IP_MTU`).
    ///
    /// # Errors
    /// [`UdpError::NoDestination`] if the socket is not connected; the error of the route lookup.
    pub fn path_mtu(
        &mut self,
        now: Instant,
        network: &mut Network,
        handle: UdpHandle,
    ) -> Result<u16, UdpError> {
        let socket = self.socket(handle)?;
        let remote = socket.remote.ok_or(UdpError::NoDestination)?;
        let CachedRoute { route, .. } = route_for(now, network, socket, remote, false)?;
        Ok(socket.options.pmtu_discovery.mtu(network, &route))
    }

    /// Takes the next socket that has become readable, or got an error, since it was last returned.
    pub fn next_readable(&mut self) -> Option<UdpHandle> {
        let index = self.readable.pop_front()?;
        let slot = &mut self.slots[index as usize];
        if let Some(socket) = &mut slot.socket {
            socket.listed_in &= !(1 << self.readable_classes.current());
        }
        Some(UdpHandle { index, generation: slot.generation })
    }

    /// Sets the class of priority whose frames are received, and whose sockets [`Udp::next_readable`]
    /// returns.
    pub fn select_class(&mut self, class: u8) {
        self.readable_classes.select(&mut self.readable, class);
    }

    /// Returns the classes for which [`Udp::next_readable`] has sockets.
    pub fn classes_with_readable(&self) -> ClassSet {
        self.readable_classes.with_entries(&self.readable)
    }

    /// Returns the number of sockets of the current class that [`Udp::next_readable`] has not returned yet.
    pub fn readable_count(&self) -> usize {
        self.readable.len()
    }

    /// Lists a socket again as readable in the current class.
    pub fn report_again(&mut self, socket: UdpHandle) {
        if self.socket(socket).is_ok() {
            self.list_readable(socket.index);
        }
    }

    fn list_readable(&mut self, index: u32) {
        let class = 1 << self.readable_classes.current();
        if let Some(socket) = &mut self.slots[index as usize].socket
            && socket.listed_in & class == 0
        {
            socket.listed_in |= class;
            self.readable.push_back(index);
        }
    }

    /// Handles a received datagram, which [`Network::parse`] has checked.
    pub fn input(&mut self, now: Instant, network: &mut Network, l4: &L4<'_>) {
        let Ok(header) = udp::Header::parse(l4.bytes) else { return };
        let local = SocketAddr::new(l4.dst, header.dst_port);
        let remote = SocketAddr::new(l4.src, header.src_port);
        let payload = header.payload(l4.bytes);
        // A super-frame holds several datagrams of equal length.
        let gso_size = l4.gso.map_or(payload.len(), |gso| usize::from(gso.size)).max(1);
        let describe = || {
            let (tos, hop_limit) = (l4.tos(), l4.hop_limit);
            let flow_label = l4.flow_label();
            Datagram { len: payload.len(), from: remote, to: l4.dst, tos, hop_limit, flow_label, gso_size: 0 }
        };
        let arrival = Arrival { network, link: l4.link, l4: Some(l4) };
        if l4.broadcast {
            // Every matching socket gets a copy, as on Linux.
            self.deliver_to_all(&arrival, header.dst_port, &describe(), payload, gso_size);
            return;
        }
        let select = |found| self.select_by_program(found, network, l4, payload);
        match self.lookup_with(network, local, remote, select) {
            Some(index) => self.deliver(index, &describe(), payload, gso_size, &arrival),
            None => {
                self.stats.no_port += 1;
                network.send_icmp_unreachable(now, l4, UnreachableReason::Port);
            }
        }
    }

    fn deliver(
        &mut self,
        index: u32,
        description: &Datagram,
        payload: &[u8],
        gso_size: usize,
        arrival: &Arrival<'_>,
    ) {
        if gso_size < payload.len() && self.socket_at(index).is_some_and(|socket| socket.options.gro) {
            // Cannot truncate: shorter than the payload of an IP packet.
            self.enqueue(index, Datagram { gso_size: gso_size as u16, ..*description }, payload, arrival);
            return;
        }
        let mut rest = payload;
        loop {
            let (datagram, following) = rest.split_at(gso_size.min(rest.len()));
            self.enqueue(index, Datagram { len: datagram.len(), ..*description }, datagram, arrival);
            rest = following;
            if rest.is_empty() {
                break;
            }
        }
    }

    fn enqueue(&mut self, index: u32, datagram: Datagram, payload: &[u8], arrival: &Arrival<'_>) {
        let Some(socket) = &mut self.slots[index as usize].socket else { return };
        if socket.has_slow_path {
            return self.enqueue_slow_path(index, datagram, payload, arrival);
        }
        let cost = payload.len() + queue::OVERHEAD;
        let rcvbuf = socket.rcvbuf(self.receive_bytes);
        if !socket.has_room(cost, rcvbuf) || self.queued + cost > self.receive_total_bytes {
            self.stats.receive_overflow += 1;
            socket.drops += 1;
            return;
        }
        let (capacity, before) = (socket.queue.capacity(), socket.queue.cost());
        socket.queue.push(datagram, payload);
        self.capacity += socket.queue.capacity() - capacity;
        self.queued += socket.queue.cost() - before;
        self.queued_peak = self.queued_peak.max(self.queued);
        self.stats.received += 1;
        self.list_readable(index);
    }

    /// Updates the sum of allocated bytes after a datagram was taken. A queue keeps its memory for further
    /// datagrams, unless all queues together have allocated more than half of the limit.
    fn shrink_if_scarce(&mut self, index: u32, capacity_before: usize) {
        let scarce = self.capacity > self.receive_total_bytes / 2;
        let Some(socket) = &mut self.slots[index as usize].socket else { return };
        if scarce {
            socket.queue.shrink();
        }
        self.capacity = self.capacity - capacity_before + socket.queue.capacity();
    }

    /// Handles an error about a transmitted datagram. The only possible validation is that a matching socket
    /// exists.
    pub fn on_error(&mut self, now: Instant, network: &mut Network, error: &TransportError) {
        let Some(index) = self.lookup(network, error.local, error.remote) else {
            self.stats.foreign_errors += 1;
            return;
        };
        let Some(socket) = &mut self.slots[index as usize].socket else { return };
        let v4 = error.remote.is_ipv4();
        let is_too_big = matches!(error.kind, IcmpErrorKind::PacketTooBig { .. });
        let discovery = socket.options.pmtu_discovery;
        if is_too_big {
            if discovery.accepts_path_mtu() {
                network.accept_path_mtu(now, error);
            } else if !v4 {
                return;
            }
            // Over IPv6, `IPV6_RECVERR` reports the error with `IPV6_PMTUDISC_DONT`, too.
            if discovery == PmtuDiscovery::Dont && v4 {
                return;
            }
        }
        // Linux: an error about the size is final unless routers should have fragmented the datagram.
        let is_final = error.kind.is_hard() || is_too_big && discovery != PmtuDiscovery::Dont;
        let udp_error = UdpError::from_icmp(error.kind, v4);
        let recverr = socket.options.recverr(v4);
        if recverr {
            let IcmpErrorOrigin { offender, icmp_type, icmp_code, info, extensions, .. } = error.origin;
            let extended = socket.extended_error(udp_error, error.remote);
            let extended = UdpExtendedError {
                offender: Some(offender),
                icmp_type,
                icmp_code,
                info,
                extensions,
                ..extended
            };
            socket.queue_error(extended, network.quoted_payload());
        }
        // Linux: soft errors, and errors on unconnected sockets, are reported only with `IP_RECVERR`.
        if recverr || socket.remote == Some(error.remote) && is_final {
            socket.error = Some(udp_error);
            self.list_readable(index);
        }
    }
}

impl UdpSocket {
    /// Returns whether a datagram with this cost fits into the queue, whose limit is `rcvbuf` bytes.
    #[inline(always)]
    fn has_room(&self, cost: usize, rcvbuf: usize) -> bool {
        // An empty queue accepts any datagram, so that a small limit cannot block a socket forever.
        self.queue.is_empty() || self.queue.cost() + cost <= rcvbuf
    }

    /// Returns the source address of the socket's datagrams if the socket is bound to one. A socket may be
    /// bound to a group or broadcast address, but no datagram comes from there.
    fn source_address(&self, network: &Network) -> Option<IpAddr> {
        let local = self.local.ip();
        let is_host = !local.is_unspecified() && !local.is_multicast() && !network.is_broadcast(local);
        is_host.then_some(local)
    }

    /// Updates what depends on options and filter, and on whether datagrams have classes.
    fn update_slow_path(&mut self, has_classes: bool) {
        self.has_slow_path = has_classes || self.options.gro || self.filter.is_some();
    }

    /// Caches the route to the remote address.
    fn cache_route(
        &mut self,
        now: Instant,
        network: &Network,
        route: Route,
        remote: SocketAddr,
    ) -> CachedRoute {
        let local = SocketAddr::new(route.src, self.local.port());
        let flow_hash = if network.device_carries_labels(&route.hop) {
            network.tx_flow_hash(local, remote)
        } else {
            None
        };
        let path_mtu = network.path_mtu.validity(now, remote.ip());
        *self.route.insert(CachedRoute { route, flow_hash, path_mtu })
    }

    /// Returns the capacity of the receive queue in bytes; `default` is the configured one.
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

    fn queue_error(&mut self, error: UdpExtendedError, payload: &[u8]) {
        self.error_queue.get_or_insert_default().push(error, payload);
    }

    /// Queues an error about a datagram that is too long to be sent (Linux's `ip_local_error`).
    fn queue_message_too_long(&mut self, to: SocketAddr, route: &Route, network: &Network) {
        if self.options.recverr(to.is_ipv4()) {
            let port = self.remote.map_or(0, |remote| remote.port());
            // For IPv6 the error contains the port of this datagram.
            let port = if to.is_ipv4() { port } else { to.port() };
            let info = self.options.pmtu_discovery.mtu(network, route).into();
            let error = self.extended_error(UdpError::TooLong, SocketAddr::new(to.ip(), port));
            self.queue_error(UdpExtendedError { info, ..error }, &[]);
        }
    }
}

impl UdpSlot {
    fn queue_cost(&self) -> usize {
        self.socket.as_ref().map_or(0, |socket| socket.queue.cost())
    }
}

/// Checks whether a socket may send to an address. Returns whether the address is a group or broadcast
/// address.
fn check_destination(network: &Network, socket: &UdpSocket, remote: SocketAddr) -> Result<bool, UdpError> {
    let local = socket.local.ip();
    // Only the IPv6 wildcard address is open to both families.
    let both = local.is_ipv6() && local.is_unspecified() && !socket.options.v6only;
    if local.is_ipv4() != remote.is_ipv4() && !both {
        return Err(UdpError::WrongFamily);
    }
    let is_broadcast = network.is_broadcast(remote.ip());
    if is_broadcast && !socket.options.broadcast {
        return Err(UdpError::BroadcastForbidden);
    }
    Ok(is_broadcast || remote.ip().is_multicast())
}

/// Returns the route to `remote`, from the socket's cache if it is still valid.
fn route_for(
    now: Instant,
    network: &mut Network,
    socket: &mut UdpSocket,
    remote: SocketAddr,
    has_destination: bool,
) -> Result<CachedRoute, UdpError> {
    if !has_destination
        && let Some(cached) = socket.route
        && network.hop_is_current(&cached.route.hop)
        && network.path_mtu.is_current(now, &cached.path_mtu)
    {
        return Ok(cached);
    }
    let route = network.route(now, remote.ip(), socket.source_address(network)).map_err(route_error)?;
    if has_destination {
        // Without a hash the receiver computes it, if several of its shards share the port: hashing is not
        // worthwhile for sockets that send to many destinations.
        return Ok(CachedRoute::uncached(route));
    }
    Ok(socket.cache_route(now, network, route, remote))
}

fn tx_error(error: TxError) -> UdpError {
    match error {
        TxError::Full => UdpError::DeviceFull,
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

/// Time after which datagrams that the device has refused should be sent again.
const DEVICE_FULL_RETRY: Duration = Duration::from_micros(50);

/// Returns whether a socket bound to `bound` receives datagrams sent to `address`.
fn address_matches(bound: IpAddr, v6only: bool, address: IpAddr) -> bool {
    match (bound, address) {
        (IpAddr::V6(bound), IpAddr::V4(_)) => bound.is_unspecified() && !v6only,
        (bound, address) if bound.is_ipv4() == address.is_ipv4() => {
            bound.is_unspecified() || bound == address
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
