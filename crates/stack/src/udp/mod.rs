//! UDP sockets (RFC 768, RFC 1122 §4.1), with Linux's rules for binding, for choosing among sockets, and for errors.
//!
//! A socket of an IPv6 wildcard address receives IPv4 datagrams too unless it is told not to; addresses are given as they are, never
//! mapped into IPv6.

mod bind;
mod error;
mod queue;

pub(crate) use bind::{fit, is_in_conflict};
pub use error::UdpError;
pub use queue::Datagram;

use crate::handle::UdpHandle;
use crate::icmp::Unreachable;
use crate::icmp::error::{IcmpErrorKind, TransportError};
use crate::ip::stats::counters;
use crate::ip::{IpHeader, L4, Network, NetworkConfig, Route, RouteError, TxError};
use crate::stack::{Listed, Protocol, nobody};
use crate::tcp::state::State;
use crate::time::Instant;
use crate::wire::{protocol, udp};
use core::net::{IpAddr, SocketAddr};
use queue::ReceiveQueue;
use std::collections::{BTreeMap, VecDeque};

/// Hop limit of multicast datagrams (RFC 1112 §6.1).
const MULTICAST_HOP_LIMIT: u8 = 1;

/// How a socket behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpOptions {
    /// Others that have this set too may bind the same address; the last one gets the datagrams (`SO_REUSEADDR`).
    pub reuse_address: bool,
    /// Others that have this set too may bind the same address; datagrams are spread over them by sender (`SO_REUSEPORT`).
    pub reuse_port: bool,
    /// May send to broadcast addresses (`SO_BROADCAST`).
    pub broadcast: bool,
    /// A socket of the IPv6 wildcard address leaves IPv4 to others (`IPV6_V6ONLY`).
    pub only_v6: bool,
    /// Receive queue in bytes; `None` takes `udp_receive_bytes` (`SO_RCVBUF`, but exactly these bytes).
    pub receive_bytes: Option<u32>,
    /// Hop limit of what it sends to single hosts; `None` takes the link's (`IP_TTL`, `IPV6_UNICAST_HOPS`).
    pub hop_limit: Option<u8>,
    /// Type of service, or traffic class, of what it sends (`IP_TOS`, `IPV6_TCLASS`).
    pub tos: u8,
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
struct Socket {
    local: SocketAddr,
    remote: Option<SocketAddr>,
    options: UdpOptions,
    queue: ReceiveQueue,
    error: Option<UdpError>,
    /// It is in the list of readable sockets.
    listed: bool,
    /// The way to `remote`.
    route: Option<Route>,
}

/// A place for a socket.
#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    socket: Option<Socket>,
}

/// All UDP sockets of a shard.
#[derive(Debug)]
pub struct Udp {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Sockets by local port, in the order they were bound.
    ports: BTreeMap<u16, Vec<u32>>,
    /// Sockets with something to read that nobody was told of yet.
    readable: VecDeque<u32>,
    /// Charged for queued datagrams, over all sockets.
    queued: usize,
    /// Most that ever was.
    queued_most: usize,
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
            queued_most: 0,
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
        (self.queued, self.queued_most)
    }

    /// The limit of that.
    pub fn receive_total_bytes(&self) -> usize {
        self.receive_total_bytes
    }

    /// The socket in a place, as a listing shows it.
    pub(crate) fn listed(&self, index: u32) -> Option<Listed> {
        let socket = self.at(index)?;
        Some(Listed {
            protocol: Protocol::Udp,
            state: if socket.remote.is_some() { State::Established } else { State::Closed },
            local: socket.local,
            remote: socket.remote.unwrap_or_else(|| nobody(socket.local)),
            recv_queue: socket.queue.cost() as u64,
            send_queue: 0,
            timer: None,
            info: None,
        })
    }

    /// Counters.
    pub fn stats(&self) -> &UdpStats {
        &self.stats
    }

    fn socket(&mut self, handle: UdpHandle) -> Result<&mut Socket, UdpError> {
        match self.slots.get_mut(handle.index as usize) {
            Some(Slot { generation, socket: Some(socket) }) if *generation == handle.generation => Ok(socket),
            _ => Err(UdpError::Stale),
        }
    }

    fn at(&self, index: u32) -> Option<&Socket> {
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
        self.socket(handle)?.options = options;
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
            self.unlist_port(socket.local.port(), handle.index);
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
        socket.route = Some(route);
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
        self.send(now, network, handle, None, to, payload)
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
        self.send(now, network, handle, Some(source), Some(to), payload)
    }

    fn send(
        &mut self,
        now: Instant,
        network: &mut Network,
        handle: UdpHandle,
        source: Option<IpAddr>,
        to: Option<SocketAddr>,
        payload: &[u8],
    ) -> Result<(), UdpError> {
        let socket = self.socket(handle)?;
        if let Some(error) = socket.error.take() {
            return Err(error);
        }
        let remote = to.or(socket.remote).ok_or(UdpError::NoDestination)?;
        check_destination(network, socket, remote)?;
        let len = udp::Header::LEN + payload.len();
        let len_max = usize::from(u16::MAX) - if remote.is_ipv4() { 20 } else { 0 };
        if len > len_max {
            return Err(UdpError::TooLong);
        }
        let route = match source {
            Some(_) => network.route(now, remote.ip(), source).map_err(route_error)?,
            None => route_for(now, network, socket, remote, to.is_some())?,
        };
        let header = IpHeader {
            src: route.src,
            dst: remote.ip(),
            protocol: protocol::UDP,
            tos: socket.options.tos,
            hop_limit: match socket.options.hop_limit {
                _ if remote.ip().is_multicast() => MULTICAST_HOP_LIMIT,
                Some(hop_limit) => hop_limit,
                None => network.hop_limit(route.hop.link()),
            },
            // Linux's default, IP_PMTUDISC_WANT: unless it has to be cut anyway.
            dont_fragment: true,
        };
        let udp = udp::Header {
            src_port: socket.local.port(),
            dst_port: remote.port(),
            // Cannot truncate: compared with `len_max` above.
            len: len as u16,
            checksum: 0,
        };
        let checksum = Some(udp::Header::CHECKSUM_OFFSET as u16);
        let sent = network.send_datagram(now, &route, &header, len, checksum, |out| {
            udp.emit(out);
            out[udp::Header::LEN..].copy_from_slice(payload);
        });
        match sent {
            Ok(()) => {
                self.stats.sent += 1;
                Ok(())
            }
            Err(TxError::Full) => Err(UdpError::NoBuffers),
            Err(TxError::TooBig) => Err(UdpError::TooLong),
            Err(TxError::Stale | TxError::Unreachable) => Err(UdpError::HostUnreachable),
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
        self.release_if_scarce(handle.index, before.1);
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

    /// The next socket that has got something to read, or an error, since it was named last.
    pub fn next_readable(&mut self) -> Option<UdpHandle> {
        let index = self.readable.pop_front()?;
        let slot = &mut self.slots[index as usize];
        if let Some(socket) = &mut slot.socket {
            socket.listed = false;
        }
        Some(UdpHandle { index, generation: slot.generation })
    }

    /// Sockets that [`Udp::next_readable`] has not named yet.
    pub fn readable_count(&self) -> usize {
        self.readable.len()
    }

    fn list_readable(&mut self, index: u32) {
        if let Some(socket) = &mut self.slots[index as usize].socket
            && !socket.listed
        {
            socket.listed = true;
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
            for index in self.candidates(local, remote) {
                self.deliver(index, l4, remote, payload, piece);
            }
            return;
        }
        match self.choose(network, local, remote) {
            Some(index) => self.deliver(index, l4, remote, payload, piece),
            None => {
                self.stats.no_port += 1;
                network.send_icmp_unreachable(now, l4, Unreachable::Port);
            }
        }
    }

    fn deliver(&mut self, index: u32, l4: &L4<'_>, from: SocketAddr, payload: &[u8], piece: usize) {
        let mut rest = payload;
        loop {
            let (datagram, following) = rest.split_at(piece.min(rest.len()));
            let description =
                Datagram { len: datagram.len(), from, to: l4.dst, ecn: l4.ecn, hop_limit: l4.hop_limit };
            self.enqueue(index, description, datagram);
            rest = following;
            if rest.is_empty() {
                break;
            }
        }
    }

    fn enqueue(&mut self, index: u32, datagram: Datagram, payload: &[u8]) {
        let Some(socket) = &mut self.slots[index as usize].socket else { return };
        let cost = payload.len() + queue::OVERHEAD;
        let limit = socket.options.receive_bytes.map_or(self.receive_bytes, |bytes| bytes as usize);
        // An empty queue takes any datagram, so that a small limit cannot shut a socket up for ever.
        let fits = socket.queue.is_empty() || socket.queue.cost() + cost <= limit;
        if !fits || self.queued + cost > self.receive_total_bytes {
            self.stats.receive_overflow += 1;
            return;
        }
        let capacity = socket.queue.capacity();
        socket.queue.push(datagram, payload);
        self.capacity += socket.queue.capacity() - capacity;
        self.queued += cost;
        self.queued_most = self.queued_most.max(self.queued);
        self.stats.received += 1;
        self.list_readable(index);
    }

    /// Queues keep their memory for the next datagrams, unless all together keep more than half of what they may hold.
    fn release_if_scarce(&mut self, index: u32, capacity_before: usize) {
        let scarce = self.capacity > self.receive_total_bytes / 2;
        let Some(socket) = &mut self.slots[index as usize].socket else { return };
        if scarce {
            socket.queue.release();
        }
        self.capacity = self.capacity - capacity_before + socket.queue.capacity();
    }

    /// Somebody says that a datagram of ours could not be delivered. All that can be checked is that there is such a socket.
    pub fn error(&mut self, now: Instant, network: &mut Network, error: &TransportError) {
        let Some(index) = self.choose(network, error.local, error.remote) else {
            self.stats.foreign_errors += 1;
            return;
        };
        let Some(socket) = &mut self.slots[index as usize].socket else { return };
        let too_big = matches!(error.kind, IcmpErrorKind::PacketTooBig { .. });
        if too_big {
            network.accept_path_mtu(now, error);
            socket.route = None;
        }
        // Linux: soft errors, and errors of sockets without a fixed other end, are only for those who ask (IP_RECVERR).
        if socket.remote == Some(error.remote) && (error.kind.is_hard() || too_big) {
            socket.error = Some(error.kind.into());
            self.list_readable(index);
        }
    }
}

impl Slot {
    fn queue_cost(&self) -> usize {
        self.socket.as_ref().map_or(0, |socket| socket.queue.cost())
    }
}

/// Whether a socket may send to an address at all.
fn check_destination(network: &Network, socket: &Socket, remote: SocketAddr) -> Result<(), UdpError> {
    if remote.port() == 0 {
        return Err(UdpError::InvalidAddress);
    }
    let local = socket.local.ip();
    // Only the IPv6 wildcard is open to both families.
    let both = local.is_ipv6() && local.is_unspecified() && !socket.options.only_v6;
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
    socket: &mut Socket,
    remote: SocketAddr,
    named: bool,
) -> Result<Route, UdpError> {
    if !named
        && let Some(route) = socket.route
        && network.hop_is_current(&route.hop)
    {
        return Ok(route);
    }
    let local = socket.local.ip();
    // A datagram to one host cannot come from a broadcast or multicast address, though a socket may be bound to one.
    let from =
        (!local.is_unspecified() && !local.is_multicast() && !network.is_broadcast(local)).then_some(local);
    let route = network.route(now, remote.ip(), from).map_err(route_error)?;
    if !named {
        socket.route = Some(route);
    }
    Ok(route)
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
