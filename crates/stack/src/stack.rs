//! One stack: the state of a shard. Frames and the time go in, events and frames come out.
//!
//! A turn of the owner:
//!
//! ```text
//!   receive(now, port, &burst)     prefetches connections, processes frames one by one; events are queued
//!   next_event() … consume(…)      the owner takes events, reads data and answers
//!   finish_burst(&burst)           moves unread data to receive buffers; the burst may be released
//!   advance(now)                   runs timers
//!   transmit(now)                  sends everything that is due; answers carry acknowledgements
//! ```

mod image;
mod listing;
mod pools;

pub use image::{Nothing, Restorer, StackImage};
pub(crate) use listing::unspecified_addr;
pub use listing::{
    ListCursor, ListedSocket, ListedTimer, SocketHandle, SocketMemory, SocketProtocol, TimerKind,
};
pub use pools::{POOL_COUNT, PoolUsage};

use crate::device::{BURST_FRAMES_MAX, Gso, RxBurst, RxFrame, TxQueue};
use crate::error::{
    ConfigError, ConnectError, GroupError, ListenError, OptionError, RecvError, SendError, Stale,
};
use crate::events::{Event, InlineData};
use crate::handle::{Conn, LinkId, Listener, PortId, UdpHandle};
use crate::icmp::error::TransportError;
use crate::ip::rx_fast_path::{self, FastPathSegment};
use crate::ip::{InputResult, L4, Network, NetworkConfig, ParsedFrame, Reassembled, RouteConfig};
use crate::link::LinkConfig;
use crate::multicast::SourceFilter;
use crate::options::{
    BufferLimits, ConnectOptions, ListenOptions, PortSharing, SocketOptions, TcpInfo, TcpOption, UrgentMark,
};
use crate::priority::{BEST_EFFORT, CLASSES, ClassLimits, ClassSet};
use crate::socket_filter::SocketFilter;
use crate::steering::{ControlUpdate, FrameOwner, MisroutedPacket, Steering};
use crate::tcp::config::TcpConfig;
use crate::tcp::demux;
use crate::tcp::input::{PayloadPosition, Segment, SegmentHeader};
use crate::tcp::source::{Source, SourceId};
use crate::tcp::state::State;
use crate::tcp::{FlowKey, Tcp, TcpStats, UnorderedBytes};
use crate::time::Instant;
use crate::udp::{Datagram, Udp, UdpError, UdpExtendedError, UdpOptions, UdpSendParams, UdpStats};
use crate::wire::protocol;
use crate::wire::tcp::{SeqNumber, TcpHeader, TcpSegment};
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use serde::Deserialize;
use std::sync::Arc;

/// Configuration of a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StackConfig {
    /// Configuration of the layers below TCP, and of UDP.
    pub network: NetworkConfig,
    /// Configuration of TCP.
    pub tcp: TcpConfig,
}

impl StackConfig {
    /// Checks every range. The error names the key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.network.validate()?;
        self.tcp.validate()
    }

    /// Returns how many bytes [`Stack::new`] reserves for [its tables](Stack::tables). The allocator ends a
    /// process that cannot have them.
    pub fn table_bytes(&self) -> usize {
        Tcp::table_bytes(&self.tcp)
    }
}

/// A stack, see the module documentation.
pub struct Stack {
    net: Network,
    tcp: Tcp,
    udp: Udp,
    /// Packets that were reassembled here and belong to other shards.
    misrouted: Vec<MisroutedPacket>,
}

/// Bursts with fewer frames are processed before a prefetch could help.
const PREFETCH_FRAMES_MIN: usize = 3;

/// ECN codepoint CE (RFC 3168 §5).
const CONGESTION_EXPERIENCED: u8 = 3;

/// Returns how many segments of a frame were on the wire.
#[inline(always)]
fn wire_segments(gso: Option<Gso>, payload: &[u8]) -> u16 {
    match gso {
        Some(gso) => super_frame_segments(gso, payload),
        None => 1,
    }
}

/// Returns how many segments of a super-frame were on the wire.
#[inline(never)]
fn super_frame_segments(gso: Gso, payload: &[u8]) -> u16 {
    payload.len().div_ceil(usize::from(gso.size.max(1))).max(1) as u16
}

/// Returns the segment of a fast-path frame, which has the number `index` in its burst, with its flow hash
/// and the value that the flow table has under it.
#[inline(always)]
fn segment_of<'b>(
    parsed: FastPathSegment<'b>,
    hash: u32,
    hint: u32,
    index: usize,
    frame: &RxFrame<'b>,
) -> Segment<'b> {
    let FastPathSegment { key, ecn, hop_limit, flow_label, header, options, payload, payload_at } = parsed;
    Segment {
        key,
        hash,
        hint,
        header: SegmentHeader::from(&TcpHeader::parse(header)),
        options,
        payload,
        position: Some(PayloadPosition { frame: index as u16, start: payload_at }),
        ce: ecn == CONGESTION_EXPERIENCED,
        segments: wire_segments(frame.gso, payload),
        hop_limit,
        flow_label,
    }
}

impl Stack {
    /// Creates an empty stack. `seed` is the key of all values that must not be predictable; with equal seeds
    /// and inputs the stack behaves identically.
    ///
    /// # Errors
    /// The first key that is out of range.
    pub fn new(config: StackConfig, seed: [u8; 32], now: Instant) -> Result<Self, ConfigError> {
        config.validate()?;
        let udp = Udp::new(&config.network);
        let net = Network::new(config.network, &seed)?;
        Ok(Self { net, tcp: Tcp::new(config.tcp, &seed, now), udp, misrouted: Vec::new() })
    }

    /// Adds a device by its sending half.
    pub fn add_port(&mut self, tx: Box<dyn TxQueue + Send>) -> PortId {
        self.net.add_port(tx)
    }

    /// Replaces the sending half of a device by what `replace` makes of it: the half within a layer, or
    /// without one. The capabilities must stay the same. If `replace` returns `None`, the device sends
    /// nothing more.
    pub fn replace_tx(
        &mut self,
        port: PortId,
        replace: impl FnOnce(Box<dyn TxQueue + Send>) -> Option<Box<dyn TxQueue + Send>>,
    ) {
        self.net.replace_tx(port, replace);
    }

    /// Adds a link with its addresses to a device.
    ///
    /// # Errors
    /// Describes what is wrong with the configuration of the link.
    pub fn add_link(&mut self, port: PortId, config: &LinkConfig) -> Result<LinkId, ConfigError> {
        self.net.add_link(port, config)
    }

    /// Adds a route.
    ///
    /// # Errors
    /// Describes what is wrong with the route.
    pub fn add_route(&mut self, route: RouteConfig) -> Result<(), ConfigError> {
        self.net.add_route(route)
    }

    /// Returns the memory of the tables in which segments are looked up. It is reserved, and touched as
    /// connections are added: the owner may request huge pages for it.
    pub fn tables(&self) -> [*const [u8]; 4] {
        let [buckets, overflow] = self.tcp.flows.memory();
        [buckets, overflow, self.tcp.conns.memory(), self.tcp.time_wait.memory()]
    }

    /// Returns the ports of outgoing connections (RFC 6056): from `tcp.local_port_first` to
    /// `tcp.local_port_last`.
    pub fn local_ports(&self) -> core::ops::RangeInclusive<u16> {
        self.tcp.config.local_port_first..=self.tcp.config.local_port_last
    }

    /// Returns the ports of UDP sockets that are bound to none: from `network.udp_port_first` to
    /// `network.udp_port_last`.
    pub fn local_udp_ports(&self) -> core::ops::RangeInclusive<u16> {
        self.udp.ephemeral_ports()
    }

    /// Returns whether a connection, also one in TIME-WAIT, prevents a socket with these options from being
    /// bound to an address, as in Linux's `inet_bind_conflict`. If the connections of the port have several
    /// local addresses, each of them counts as the address that is asked for.
    pub fn prevents_bind(&self, address: SocketAddr, v6_only: bool, sharing: PortSharing) -> bool {
        self.tcp.port_use.prevents_bind(address.ip(), address.port(), v6_only, sharing)
    }

    /// Returns the network layer: addresses, neighbours, counters.
    pub fn network(&self) -> &Network {
        &self.net
    }

    /// Returns the network layer for changes.
    pub fn network_mut(&mut self) -> &mut Network {
        &mut self.net
    }

    /// Processes a burst of frames from device `port`.
    pub fn receive(&mut self, now: Instant, port: PortId, burst: &RxBurst<'_>) {
        self.tcp.set_now(now);
        self.tcp.rx_port = port;
        // Values of the flow table for the frames before the first of them was processed.
        let mut hints = [demux::NO_HINT; BURST_FRAMES_MAX];
        if burst.len() >= PREFETCH_FRAMES_MIN && self.tcp.exceeds_cache() {
            self.prefetch_flows(burst, &mut hints);
        }
        let link = self.net.untagged_link(port);
        let mut filter = link.map(|link| self.net.fast_path_filter(link));
        for (index, frame) in burst.iter().enumerate() {
            let hint = hints[index];
            // Nearly all frames take this branch, which is optimized for them alone.
            if let Some(filter) = &filter
                && let Some(parsed) = self.net.parse_fast_v4(filter, frame)
            {
                let hash = self.tcp.secrets.flow_hash_v4(&parsed.key);
                let segment = segment_of(parsed, hash, hint, index, frame);
                self.net.stats.rx_tcp += 1;
                self.tcp.input_inlined(&mut self.net, &segment, burst);
            } else if let Some(parsed) = link.and_then(|link| self.net.parse_fast_v6(link, frame)) {
                let hash = self.tcp.secrets.flow_hash(&parsed.key);
                let segment = segment_of(parsed, hash, hint, index, frame);
                self.net.stats.rx_tcp += 1;
                self.tcp.input(&mut self.net, &segment, burst);
            } else {
                self.receive_slow_path(now, port, index, frame, burst);
                // The frame may have changed addresses or a neighbour.
                filter = link.map(|link| self.net.fast_path_filter(link));
                self.net.reset_last_confirmed();
            }
        }
        self.net.reset_last_confirmed();
    }

    /// Prefetches the cache lines that a burst needs: first the buckets of the flow table, then the
    /// connections that they contain.
    fn prefetch_flows(&self, burst: &RxBurst<'_>, hints: &mut [u32; BURST_FRAMES_MAX]) {
        if !self.tcp.live_conns_exceed_cache() {
            return self.prefetch_buckets(burst);
        }
        let mut hashes = [0; BURST_FRAMES_MAX];
        let mut has_key = [false; BURST_FRAMES_MAX];
        for (index, frame) in burst.iter().enumerate() {
            let Some(key) = rx_fast_path::peek_flow_key(frame.bytes) else { continue };
            let hash = self.tcp.secrets.flow_hash(&key);
            self.tcp.flows.prefetch(hash);
            has_key[index] = true;
            hashes[index] = hash;
        }
        for (index, _) in has_key.iter().enumerate().filter(|(_, has_key)| **has_key) {
            hints[index] = self.tcp.prefetch_flow(hashes[index]);
        }
    }

    /// Prefetches the buckets that new connections are added to, where the data of short connections are in
    /// the cache anyway. The contents of the buckets are not prefetched, since that would have to wait for
    /// the buckets.
    fn prefetch_buckets(&self, burst: &RxBurst<'_>) {
        for frame in burst.iter().filter(|frame| rx_fast_path::may_be_syn(frame.bytes)) {
            if let Some(key) = rx_fast_path::peek_flow_key(frame.bytes) {
                self.tcp.flows.prefetch(self.tcp.secrets.flow_hash(&key));
            }
        }
    }

    /// Processes a frame that needs the slow path.
    fn receive_slow_path(
        &mut self,
        now: Instant,
        port: PortId,
        index: usize,
        frame: &RxFrame<'_>,
        burst: &RxBurst<'_>,
    ) {
        let parsed = self.net.parse(port, frame);
        self.net.count_received(&parsed);
        match parsed {
            ParsedFrame::Tcp(l4) => {
                if let Some(segment) = self.parse_segment(&l4, Some((index, frame))) {
                    self.tcp.input(&mut self.net, &segment, burst);
                }
            }
            ParsedFrame::Drop(_) => {}
            other => self.receive_other(now, &other, burst),
        }
    }

    /// Parses a TCP segment. Returns `None` if its header is malformed.
    fn parse_segment<'b>(
        &mut self,
        l4: &L4<'b>,
        frame: Option<(usize, &RxFrame<'b>)>,
    ) -> Option<Segment<'b>> {
        let Ok(segment) = TcpSegment::parse(l4.bytes) else {
            self.tcp.stats.malformed += 1;
            return None;
        };
        let header = segment.header;
        let key = FlowKey {
            remote: l4.src.into(),
            local: l4.dst.into(),
            remote_port: header.src_port,
            local_port: header.dst_port,
        };
        let position = frame.map(|(index, frame)| {
            let start = segment.payload.as_ptr() as usize - frame.bytes.as_ptr() as usize;
            PayloadPosition { frame: index as u16, start: start as u32 }
        });
        Some(Segment {
            hash: self.tcp.secrets.flow_hash(&key),
            hint: demux::NO_HINT,
            key,
            header: SegmentHeader::from(&header),
            options: segment.options,
            payload: segment.payload,
            position,
            ce: l4.ecn == CONGESTION_EXPERIENCED,
            segments: wire_segments(l4.gso, segment.payload),
            hop_limit: l4.hop_limit,
            flow_label: l4.flow_label(),
        })
    }

    /// Processes frames that are not unfragmented TCP.
    fn receive_other(&mut self, now: Instant, parsed: &ParsedFrame<'_>, burst: &RxBurst<'_>) {
        let other = match parsed {
            ParsedFrame::Udp(l4) => return self.udp.input(now, &mut self.net, l4),
            ParsedFrame::Other(other) => other,
            ParsedFrame::Tcp(_) | ParsedFrame::Drop(_) => return,
        };
        match self.net.input(now, other) {
            InputResult::Handled => {}
            InputResult::Error(error) => self.on_transport_error(now, &error),
            InputResult::Reassembled(packet) => {
                if self.net.steering().is_some() && self.route_reassembled(&packet) {
                    return self.net.recycle(packet);
                }
                match self.net.parse_reassembled(&packet) {
                    ParsedFrame::Tcp(l4) => {
                        self.tcp.reassembled_link = l4.link;
                        if let Some(segment) = self.parse_segment(&l4, None) {
                            self.tcp.input(&mut self.net, &segment, burst);
                        }
                    }
                    // Does not recurse again: a reassembled packet is no fragment.
                    parsed => self.receive_other(now, &parsed, burst),
                }
                self.net.recycle(packet);
            }
        }
    }

    /// Routes a reassembled packet to the shard that owns it, since with several shards one reassembles the
    /// fragments of all. Returns true if this shard does not process the packet.
    #[cold]
    fn route_reassembled(&mut self, packet: &Reassembled) -> bool {
        let Some(owner) = self.net.owner_of_reassembled(packet) else { return false };
        let shard = self.net.steering().map(Steering::shard);
        if matches!(owner, FrameOwner::Shard(owner) if Some(owner) == shard) {
            return false;
        }
        self.misrouted.push(self.net.misrouted_packet(owner, packet));
        owner != FrameOwner::All
    }

    /// Returns the next packet that was reassembled or looped back here and belongs to another shard.
    pub fn next_misrouted(&mut self) -> Option<MisroutedPacket> {
        self.misrouted.pop().or_else(|| self.net.looped_back.pop())
    }

    /// Applies a control update of another shard.
    pub fn apply_control_update(&mut self, now: Instant, update: &ControlUpdate) {
        match update {
            ControlUpdate::FastOpenPeer(peer) => {
                self.tcp.store_fastopen_peer(peer);
            }
            _ => self.net.apply_control_update(now, update),
        }
    }

    fn on_transport_error(&mut self, now: Instant, error: &TransportError) {
        match error.protocol {
            protocol::TCP => self.tcp.on_icmp_error(&mut self.net, error),
            protocol::UDP => self.udp.on_error(now, &mut self.net, error),
            _ => {}
        }
    }

    /// Returns the next event. Slots of connections whose end was reported before are reused from here on.
    #[inline(always)]
    pub fn next_event(&mut self) -> Option<Event> {
        let event = self.tcp.next_event::<false>();
        event.or_else(|| self.udp.next_readable().map(|socket| Event::UdpReadable { socket }))
    }

    /// As [`Stack::next_event`], for owners that use [`Stack::select_class`]: [`Event::Connected`] is
    /// returned before other events of its connection, also if these are of a higher class.
    #[inline(always)]
    pub fn next_event_by_class(&mut self) -> Option<Event> {
        let event = self.tcp.next_event::<true>();
        event.or_else(|| self.udp.next_readable().map(|socket| Event::UdpReadable { socket }))
    }

    /// Returns the number of events that are queued. [`Stack::next_event`] may return fewer, because some
    /// have become obsolete.
    pub fn events_waiting(&self) -> usize {
        self.tcp.events.len() + self.udp.readable_count()
    }

    /// Returns the bytes of an [`Event::Data`], in the burst that was given to [`Stack::receive`].
    pub fn inline_data<'a>(&self, burst: &RxBurst<'a>, data: &InlineData) -> &'a [u8] {
        data.bytes(burst)
    }

    /// Sets how many of the bytes of an [`Event::Data`] were read; the rest is moved to the receive buffer.
    /// Must be called once for each such event, before the next event is taken.
    pub fn consume(&mut self, conn: Conn, data: InlineData, count: usize, burst: &RxBurst<'_>) {
        self.tcp.consume(conn, data, count, burst);
    }

    /// Takes bytes of a connection that arrived before bytes which precede them (see [`Event::Unordered`]):
    /// those that arrived first, of one segment at most. Copies up to `out.len()` of them; what does not fit
    /// is left for the next call. Returns `None` if there are none: when the gap before them has filled, the
    /// bytes that were not taken are read in order. Reading in order skips the bytes that were taken, and a
    /// read never continues after such bytes.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn recv_unordered(&mut self, conn: Conn, out: &mut [u8]) -> Result<Option<UnorderedBytes>, Stale> {
        self.tcp.recv_unordered(conn, out)
    }

    /// Returns the bytes that the next [`Stack::recv_unordered`] can return, if any.
    pub fn next_unordered(&self, conn: Conn) -> Option<UnorderedBytes> {
        self.tcp.next_unordered(conn)
    }

    /// Returns whether the connection of this flow asks for unordered receive
    /// ([`TcpOption::Unordered`]).
    pub fn is_unordered(&self, key: &FlowKey) -> bool {
        self.tcp.is_unordered(key)
    }

    /// Says whether the frames given to [`Stack::receive`] from now on have overtaken earlier frames of their
    /// flows that wait in a queue of this host. A gap that they leave is reported to the peer neither by
    /// duplicate acknowledgements nor by SACK blocks. The blocks are reported when the connection receives a
    /// segment at or after them in the stream that has not overtaken others, and the gap is still open.
    pub fn set_overtaking(&mut self, on: bool) {
        self.tcp.set_overtaking(on);
    }

    /// Moves data that were not read to the receive buffers: after this the burst's frames may be returned to
    /// the device.
    pub fn finish_burst(&mut self, burst: &RxBurst<'_>) {
        self.tcp.finish_burst(burst);
    }

    /// Moves the data of a burst whose events were not all taken to receive buffers, like
    /// [`Stack::finish_burst`], and leaves the other events to later calls of [`Stack::next_event`]. They
    /// stay in the queue of the current class.
    pub fn finish_burst_early(&mut self, burst: &RxBurst<'_>) {
        let has_data_events = burst.len() > 1 || self.tcp.pending.iter().next().is_some();
        self.tcp.finish_burst(burst);
        if !has_data_events {
            return;
        }
        // A later burst may have data at an equal position.
        self.tcp.events.retain(|event| !matches!(event, Event::Data { .. }));
    }

    /// Sets the class of priority ([`crate::priority`]) whose frames are received and whose events are taken
    /// from now on: [`Stack::next_event`] returns events of this class only, and what connections of the
    /// default priority send meanwhile is sent with it. Events that no frame causes belong to the class that
    /// is current then. [`Stack::transmit`] may be called only while the class is
    /// [`BEST_EFFORT`], as it is from the beginning.
    pub fn select_class(&mut self, class: u8) {
        self.tcp.event_classes.select(&mut self.tcp.events, class);
        self.udp.select_class(class);
        self.tcp.tx_list.select(class);
    }

    /// Limits the receive windows, in bytes, that connections offer while they answer events of a class;
    /// `u32::MAX` lifts the limit. A window admits two segments in any case, and its right edge never moves
    /// back (RFC 9293 §3.8.6).
    pub fn set_window_limit(&mut self, class: u8, bytes: u32) {
        self.tcp.window_limits.set(class, bytes);
    }

    /// Returns the class that [`Stack::select_class`] set last.
    pub fn selected_class(&self) -> u8 {
        self.tcp.event_classes.current()
    }

    /// Returns the classes of the events that wait.
    pub fn classes_with_events(&self) -> ClassSet {
        self.tcp.event_classes.with_entries(&self.tcp.events) | self.udp.classes_with_readable()
    }

    /// Begins a turn: calls without a time of their own happen at `now`, until a later time is given.
    #[inline]
    pub fn set_now(&mut self, now: Instant) {
        self.tcp.set_now(now);
    }

    /// Runs the timers that are due.
    pub fn advance(&mut self, now: Instant) {
        self.tcp.set_now(now);
        self.net.run_timers(now);
        while let Some(error) = self.net.next_error() {
            self.on_transport_error(now, &error);
        }
        self.tcp.advance(&mut self.net);
    }

    /// Sends everything that may be sent, and passes it to the devices.
    pub fn transmit(&mut self, now: Instant) {
        debug_assert_eq!(self.selected_class(), BEST_EFFORT, "transmitted inside of a class");
        self.tcp.set_now(now);
        self.tcp.transmit(&mut self.net);
        self.net.flush(now);
    }

    /// Sets how long acknowledgements that are immediate only because of Linux's quickack mode wait for an
    /// answer that can carry them, for an application that answers a little after the turn in which it
    /// receives data. Zero, the initial value: not at all. Every second segment, and every segment that
    /// indicates loss, is acknowledged at once nevertheless (RFC 9293 §3.8.6.3, RFC 5681 §4.2).
    pub fn defer_quick_acks(&mut self, time: Duration) {
        self.tcp.defer_quick_acks(time);
    }

    /// Returns when the next turn is due if no frame arrives before; `None` if no timer is set.
    pub fn next_deadline(&self) -> Option<Instant> {
        let Self { net, tcp, udp, .. } = self;
        Instant::earliest([net.next_deadline(), tcp.next_deadline(), udp.next_deadline(tcp.now)])
    }

    /// Opens a listener.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn listen(&mut self, addr: SocketAddr, options: ListenOptions) -> Result<Listener, ListenError> {
        if !addr.ip().is_unspecified() && !self.net.is_local(addr.ip()) {
            return Err(ListenError::AddressNotAvailable);
        }
        self.tcp.listen(addr, options)
    }

    /// Sets the options that connections which arrive at a listener from now on begin with. Connections in
    /// the accept queue keep their options.
    ///
    /// # Errors
    /// The listener was closed, or an option is out of range.
    pub fn set_listener_options(
        &mut self,
        listener: Listener,
        options: &SocketOptions,
    ) -> Result<(), OptionError> {
        self.tcp.set_listener_options(listener, options)
    }

    /// Sets the filter of a connection, which each segment has to pass; `None` removes it.
    ///
    /// # Errors
    /// The connection has ended, or too many different option sets are in use.
    pub fn set_filter(
        &mut self,
        conn: Conn,
        filter: Option<Arc<dyn SocketFilter>>,
    ) -> Result<(), OptionError> {
        self.tcp.set_filter(conn, filter)
    }

    /// Sets the filter of a listener, which each segment has to pass, and which its connections inherit.
    ///
    /// # Errors
    /// As [`Stack::set_filter`].
    pub fn set_listener_filter(
        &mut self,
        listener: Listener,
        filter: Option<Arc<dyn SocketFilter>>,
    ) -> Result<(), OptionError> {
        self.tcp.set_listener_filter(listener, filter)
    }

    /// Sets the filter of a UDP socket, which each datagram has to pass; `None` removes it.
    ///
    /// # Errors
    /// [`UdpError::Stale`].
    pub fn udp_set_filter(
        &mut self,
        socket: UdpHandle,
        filter: Option<Arc<dyn SocketFilter>>,
    ) -> Result<(), UdpError> {
        self.udp.set_filter(socket, filter)
    }

    /// Sets the program that selects the listener for a segment among those that share the address of this
    /// one ([`ListenOptions::reuse_port`]); `None` removes it. With `is_first` no other listener may have
    /// the address yet.
    ///
    /// # Errors
    /// Any [`GroupError`].
    pub fn set_group_program(
        &mut self,
        listener: Listener,
        program: Option<Arc<dyn SocketFilter>>,
        is_first: bool,
    ) -> Result<(), GroupError> {
        self.tcp.set_group_program(listener, program, is_first)
    }

    /// As [`Stack::set_group_program`], for a UDP socket.
    ///
    /// # Errors
    /// Any [`GroupError`].
    pub fn udp_set_group_program(
        &mut self,
        socket: UdpHandle,
        program: Option<Arc<dyn SocketFilter>>,
        is_first: bool,
    ) -> Result<(), GroupError> {
        self.udp.set_group_program(socket, program, is_first)
    }

    /// Returns the filter of a connection.
    pub fn filter(&self, conn: Conn) -> Option<&dyn SocketFilter> {
        self.tcp.filter(conn)
    }

    /// Returns the filter of a listener.
    pub fn listener_filter(&self, listener: Listener) -> Option<&dyn SocketFilter> {
        self.tcp.listener_filter(listener)
    }

    /// Returns the filter of a UDP socket.
    pub fn udp_filter(&self, socket: UdpHandle) -> Option<&dyn SocketFilter> {
        self.udp.filter(socket)
    }

    /// Returns the headers of the SYN that created a connection, if its listener saves them
    /// ([`SaveSyn`](crate::options::SaveSyn)).
    pub fn saved_syn(&self, conn: Conn) -> Option<&[u8]> {
        self.tcp.saved_syn(conn)
    }

    /// Removes the saved headers of a SYN.
    pub fn drop_saved_syn(&mut self, conn: Conn) {
        self.tcp.drop_saved_syn(conn);
    }

    /// Sets how many connections may be queued at a listener from now on. `accepted_undelivered` connections
    /// were accepted here and not delivered to an application: they count as queued, so that connections
    /// between the engine and an application do not make the queue longer. Has no effect on a closed
    /// listener.
    pub fn set_backlog(&mut self, listener: Listener, backlog: u32, accepted_undelivered: u32) {
        self.tcp.set_backlog(listener, backlog, accepted_undelivered);
    }

    /// Returns whether a listener is open.
    pub fn has_listener(&self, listener: Listener) -> bool {
        self.tcp.listeners.index(listener).is_some()
    }

    /// Closes a listener. Connections in its accept queue are reset. Returns false if it was closed before.
    pub fn unlisten(&mut self, listener: Listener) -> bool {
        self.tcp.unlisten(&mut self.net, listener)
    }

    /// Lets SYNs to an address without a listener wait for one for the time `wait` before they are refused,
    /// `backlog` of them at the most, for a listener that is gone because its process has ended. Later ones
    /// are dropped: their senders retransmit them. The same holds if they and the half-open connections are
    /// `half_open_max`. [`Stack::unlisten`] of a listener at the address ends it. Linux refuses at once.
    pub fn hold_syns(&mut self, local: SocketAddr, v6_only: bool, backlog: u32, wait: Duration) {
        self.tcp.hold_syns(local, v6_only, backlog, wait);
    }

    /// Takes the next connection of the accept queue: the oldest one or, if connections of several classes
    /// wait ([`Stack::select_class`]), the oldest one of the highest class, except that lower classes get
    /// their share ([`Stack::set_lower_share_percent`]). The class is that of the segment which completed the
    /// handshake. If the connection has ended in the queue, for example by an RST, the received data can be
    /// read until its [`Event::Closed`], which follows.
    pub fn accept(&mut self, listener: Listener) -> Option<Conn> {
        self.tcp.accept(listener)
    }

    /// As [`Stack::accept`]. Returns the class of the connection, too.
    pub fn accept_with_class(&mut self, listener: Listener) -> Option<(Conn, u8)> {
        self.tcp.accept_with_class(listener)
    }

    /// Takes the oldest connection of the accept queue among those of the selected class. An
    /// [`Event::Incoming`] of a class stands for a connection of this class.
    pub fn accept_incoming(&mut self, listener: Listener) -> Option<Conn> {
        self.tcp.accept_incoming(listener)
    }

    /// Says that devices refuse frames by their class ([`TxQueue::select_class`]): connections are then sent
    /// by class in each round, and after a refusal the next round follows a moment later; datagrams are
    /// refused ([`UdpError::DeviceFull`]) by the class of their priority.
    pub fn set_refused_by_class(&mut self) {
        self.tcp.tx_list.set_refused_by_class();
        self.net.refuses_by_class = true;
    }

    /// Sets the part of the accepted connections that lower classes get at least while connections of a
    /// higher class wait, in percent: 0 to 50. Initially 5. It applies to listeners at which no connection of
    /// another class than [`BEST_EFFORT`] has arrived yet.
    pub fn set_lower_share_percent(&mut self, percent: u32) {
        self.tcp.lower_share_percent = percent;
    }

    /// Opens a connection; [`Event::Connected`] or [`Event::Closed`] follows.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(
        &mut self,
        now: Instant,
        remote: SocketAddr,
        options: &ConnectOptions,
    ) -> Result<Conn, ConnectError> {
        self.tcp.set_now(now);
        self.tcp.connect(&mut self.net, remote, options)
    }

    /// Returns how many bytes the SYN of a connection takes that is deferred until data are queued
    /// ([`SocketOptions::fastopen_connect`](crate::options::SocketOptions::fastopen_connect)); `None` if the
    /// SYN is not deferred.
    pub fn syn_data_max(&self, conn: Conn) -> Option<u16> {
        self.tcp.syn_data_max(conn)
    }

    /// Sends a deferred SYN now, with what is queued.
    pub fn send_deferred_syn(&mut self, now: Instant, conn: Conn) {
        self.tcp.set_now(now);
        self.tcp.send_deferred_syn(&mut self.net, conn);
    }

    /// Returns whether TCP Fast Open is enabled for clients (`tcp.fastopen`).
    pub fn can_open_fast(&self) -> bool {
        self.tcp.can_open_fast()
    }

    /// Queues a copy of bytes for sending. Returns how many were queued: if fewer than given,
    /// [`Event::Writable`] follows.
    ///
    /// # Errors
    /// See [`SendError`].
    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        self.tcp.send(conn, bytes)
    }

    /// Queues `len` bytes that `fill` writes directly into the send buffer, so that they are copied once.
    /// `fill` gets the number of preceding bytes and must fill all of its slice, which contains bytes of
    /// other connections before that. `continues`: more data of the same application write follow, which
    /// matters for PSH. Returns how many bytes were queued.
    ///
    /// # Errors
    /// See [`SendError`].
    #[inline]
    pub fn send_with(
        &mut self,
        conn: Conn,
        len: usize,
        continues: bool,
        fill: impl FnMut(usize, &mut [u8]),
    ) -> Result<usize, SendError> {
        self.tcp.send_with(conn, len, continues, fill)
    }

    /// Marks the end of the queued data as the end of a record (`MSG_EOR`): data that are sent later share no
    /// segment with it. Of the records that were not sent, the first 256 are kept apart, less the marks that
    /// long writes need.
    pub fn end_record(&mut self, conn: Conn) {
        self.tcp.end_record(conn);
    }

    /// Separates the queued data from data that are sent later and held back (`MSG_MORE`, `TCP_CORK`), if
    /// windows and Nagle's algorithm admit all queued data now. The queued data are then sent at the end of
    /// the turn, whatever holds back later data.
    pub fn push_before_held(&mut self, conn: Conn) {
        self.tcp.push_before_held(conn);
    }

    /// Returns how many of `len` bytes (at most 2^30) Linux would accept in one call, in which it also sends,
    /// before `unsent_max` bytes are unsent (`TCP_NOTSENT_LOWAT`) or `unacked_max` bytes are unacknowledged
    /// (`SO_SNDBUF`).
    pub fn sendable_within(&mut self, conn: Conn, len: u32, unsent_max: u32, unacked_max: u32) -> u32 {
        self.tcp.sendable_within(conn, len, unsent_max, unacked_max)
    }

    /// Queues `len` bytes of a source from `offset` on without copying them, all or none.
    ///
    /// # Errors
    /// [`SendError::Full`] if the send buffer is full or too many slices are queued: [`Event::Writable`]
    /// follows.
    pub fn send_source(
        &mut self,
        conn: Conn,
        source: SourceId,
        offset: u64,
        len: u64,
    ) -> Result<(), SendError> {
        self.tcp.send_source(conn, source, offset, len)
    }

    /// Queues a message with a priority (0 to 7; higher values count as 7) before queued messages of lower
    /// priority, in the order of [`crate::priority`]. Messages of which a byte was sent, or of equal or
    /// higher priority, remain before it. All or nothing; the peer receives a contiguous stream of whole
    /// messages. Bytes queued by other calls are no messages: no message is queued before them.
    ///
    /// # Errors
    /// [`SendError::TooLong`] if the message is longer than the send buffer; [`SendError::Full`] if there is
    /// no room now, or [`MESSAGES_MAX`](crate::tcp::send_buffer::MESSAGES_MAX) messages are queued:
    /// `Writable` follows; otherwise as [`Stack::send`].
    pub fn send_message(&mut self, conn: Conn, bytes: &[u8], priority: u8) -> Result<(), SendError> {
        self.tcp.send_message(conn, bytes, priority)
    }

    /// Queues up to `len` bytes of a source from `offset` on without copying them, as many as the send buffer
    /// has room for. Returns how many; if fewer than `len`, [`Event::Writable`] follows.
    ///
    /// # Errors
    /// See [`SendError`].
    pub fn send_source_partial(
        &mut self,
        conn: Conn,
        source: SourceId,
        offset: u64,
        len: usize,
    ) -> Result<usize, SendError> {
        self.tcp.send_source_partial(conn, source, offset, len)
    }

    /// Copies queued slices of sources whose bytes others may write ([`Source::shared`]), until the first
    /// `len` unacknowledged bytes are private copies, or memory is exhausted. Returns how many are.
    pub fn privatize(&mut self, conn: Conn, len: u64) -> u64 {
        self.tcp.privatize(conn, len)
    }

    /// Requests [`Event::Writable`] for the time when some of the queued bytes are acknowledged.
    pub fn request_writable(&mut self, conn: Conn) {
        self.tcp.request_writable(conn);
    }

    /// Switches events about acknowledgements of a connection on or off.
    pub fn set_ack_events(&mut self, conn: Conn, on: bool) {
        self.tcp.set_ack_events(conn, on);
    }

    /// Returns the bytes that are queued and not acknowledged; 0 if the connection has ended.
    pub fn queued(&self, conn: Conn) -> u64 {
        self.tcp.queued(conn)
    }

    /// Returns the bytes that are queued and not sent.
    pub fn notsent(&self, conn: Conn) -> u32 {
        self.tcp.notsent(conn)
    }

    /// Queues bytes of which the last one is urgent (`MSG_OOB`). Returns how many were queued.
    ///
    /// # Errors
    /// See [`SendError`].
    pub fn send_urgent(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        self.tcp.send_urgent(conn, bytes)
    }

    /// Registers a source that many connections may send from.
    pub fn add_source(&mut self, source: Box<dyn Source>) -> SourceId {
        self.tcp.sources.add(source)
    }

    /// Releases a source; it is dropped when no queued slice refers to it. Returns false if it was released
    /// before.
    pub fn release_source(&mut self, source: SourceId) -> bool {
        self.tcp.sources.release(source)
    }

    /// Reads buffered bytes. Returns `Ok(0)` at the end of the stream.
    ///
    /// # Errors
    /// See [`RecvError`].
    pub fn recv(&mut self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        self.tcp.recv(conn, out)
    }

    /// Copies buffered bytes without consuming them, as many as fit into `out`, but none beyond an urgent
    /// byte before which [`Stack::recv`] would stop. Returns `Ok(0)` at the end of the stream.
    ///
    /// # Errors
    /// See [`RecvError`].
    pub fn peek(&self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        self.tcp.peek(conn, out)
    }

    /// Returns buffered bytes where they are, without consuming them: from `offset` bytes after the first one
    /// that [`Stack::peek`] returns, as many as are contiguous in memory. Empty at the end of the stream.
    ///
    /// # Errors
    /// See [`RecvError`].
    pub fn peek_at(&self, conn: Conn, offset: usize) -> Result<&[u8], RecvError> {
        self.tcp.peek_at(conn, offset)
    }

    /// Consumes `count` of the bytes that [`Stack::peek_at`] returns. Returns false, and consumes nothing, if
    /// there are fewer.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn consume_peeked(&mut self, conn: Conn, count: usize) -> Result<bool, Stale> {
        self.tcp.consume_peeked(conn, count)
    }

    /// Returns whether [`Stack::recv`] would return bytes, or an error because the handle is stale. False at
    /// the end of the stream.
    pub fn has_readable(&self, conn: Conn) -> bool {
        self.tcp.has_readable(conn)
    }

    /// Returns the bytes in the receive buffer that can be read; 0 for a stale handle.
    pub fn buffered(&self, conn: Conn) -> usize {
        self.tcp.buffered(conn)
    }

    /// Consumes `count` of the bytes that [`Stack::peek`] returns, or as many as there are; before them, an
    /// urgent byte at the current position.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn skip(&mut self, conn: Conn, count: usize) -> Result<(), Stale> {
        self.tcp.skip(conn, count)
    }

    /// Takes the urgent byte, if there is one and it is out of band.
    ///
    /// # Errors
    /// [`RecvError::WouldBlock`] if there is none.
    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        self.tcp.recv_urgent(conn)
    }

    /// Returns the position of the urgent byte that the peer announced last; `None` if there is none or
    /// reading has passed it.
    pub fn urgent_mark(&self, conn: Conn) -> Option<UrgentMark> {
        self.tcp.urgent_mark(conn)
    }

    /// Sets how many delivered bytes the application has not read yet; they reduce the advertised window
    /// until the next call.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn set_unread(&mut self, conn: Conn, bytes: u32) -> Result<(), Stale> {
        self.tcp.set_unread(conn, bytes)
    }

    /// Returns the number of unread bytes before the urgent byte of an [`Event::Urgent`]; negative if reading
    /// has passed it.
    pub fn urgent_ahead(&self, conn: Conn, at: SeqNumber) -> i32 {
        self.tcp.urgent_ahead(conn, at)
    }

    /// Returns the bytes received and not read: those in the receive buffer and, between [`Stack::receive`]
    /// and [`Stack::finish_burst`], those in frames whose [`Event::Data`] was not taken yet. [`Stack::recv`]
    /// cannot read the latter; [`Stack::buffered`] does not count them. Returns 0 for a stale handle.
    pub fn readable(&self, conn: Conn) -> usize {
        self.tcp.readable(conn)
    }

    /// Queues FIN after the queued data: no more data can be sent.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale> {
        self.tcp.shutdown_write(conn)
    }

    /// Closes the connection: sends FIN after the queued data, or RST if there are unread bytes.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn close(&mut self, conn: Conn) -> Result<(), Stale> {
        self.tcp.close(&mut self.net, conn)
    }

    /// Ends the connection with RST. Queued data that can be sent at once are sent before it, the rest is
    /// lost.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn abort(&mut self, conn: Conn) -> Result<(), Stale> {
        self.tcp.abort_conn(&mut self.net, conn)
    }

    /// Sets an option.
    ///
    /// # Errors
    /// See [`OptionError`].
    pub fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError> {
        self.tcp.set_option(conn, option)
    }

    /// Returns what is known about a connection; `None` if the handle is stale.
    pub fn info(&self, conn: Conn) -> Option<TcpInfo> {
        self.tcp.info(conn)
    }

    /// Returns the sequence numbers of the next byte that a connection receives in order, and of the next one
    /// that it sends; `None` if the handle is stale.
    pub fn next_sequence_numbers(&self, conn: Conn) -> Option<[u32; 2]> {
        self.tcp.next_sequence_numbers(conn)
    }

    /// Returns the local and the remote address of a connection; `None` if the handle is stale.
    pub fn endpoints(&self, conn: Conn) -> Option<[SocketAddr; 2]> {
        self.tcp.endpoints(conn)
    }

    /// Returns the sizes of the receive buffer and the send buffer; `None` if the handle is stale.
    pub fn buffer_limits(&self, conn: Conn) -> Option<BufferLimits> {
        self.tcp.buffer_limits(conn)
    }

    /// Returns whether the receive window of a connection has grown to more than twice its usual size,
    /// because the application kept up with what arrived, or need not grow; true if the handle is stale.
    pub fn has_grown_window(&self, conn: Conn) -> bool {
        self.tcp.has_grown_window(conn)
    }

    /// Returns the state of a connection; `None` if the handle is stale.
    pub fn state(&self, conn: Conn) -> Option<State> {
        self.tcp.state(conn)
    }

    /// Returns the application's token of a connection, initially 0; `None` if the handle is stale.
    pub fn token(&self, conn: Conn) -> Option<u32> {
        self.tcp.token(conn)
    }

    /// Sets the application's token of a connection. Returns false if the handle is stale.
    pub fn set_token(&mut self, conn: Conn, token: u32) -> bool {
        self.tcp.set_token(conn, token)
    }

    /// Opens a UDP socket. Port 0 chooses a port; the unspecified address means all local addresses.
    ///
    /// # Errors
    /// See [`UdpError`].
    pub fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> Result<UdpHandle, UdpError> {
        self.udp.bind(&mut self.net, local, options)
    }

    /// Sets the remote address of a UDP socket.
    ///
    /// # Errors
    /// See [`UdpError`].
    pub fn udp_connect(&mut self, now: Instant, socket: UdpHandle, to: SocketAddr) -> Result<(), UdpError> {
        self.udp.connect(now, &mut self.net, socket, to)
    }

    /// Sends a datagram, which leaves with the next [`Stack::transmit`]. Without a destination it is sent to
    /// the connected address.
    ///
    /// # Errors
    /// See [`UdpError`]; a pending error is reported first.
    pub fn udp_send_to(
        &mut self,
        now: Instant,
        socket: UdpHandle,
        to: Option<SocketAddr>,
        payload: &[u8],
    ) -> Result<(), UdpError> {
        self.udp.send_to(now, &mut self.net, socket, to, payload)
    }

    /// Sends a datagram from `source`, which must be a local address, whatever the socket is bound to
    /// (`IP_PKTINFO`).
    ///
    /// # Errors
    /// See [`UdpError`]; [`UdpError::AddressNotAvailable`] if `source` is not local.
    pub fn udp_send_from(
        &mut self,
        now: Instant,
        socket: UdpHandle,
        source: IpAddr,
        to: SocketAddr,
        payload: &[u8],
    ) -> Result<(), UdpError> {
        self.udp.send_from(now, &mut self.net, socket, source, to, payload)
    }

    /// Takes the next datagram of a socket, truncated to the length of `out`.
    ///
    /// # Errors
    /// [`UdpError::WouldBlock`] if there is none; a pending error is reported first.
    pub fn udp_recv_from(&mut self, socket: UdpHandle, out: &mut [u8]) -> Result<Datagram, UdpError> {
        self.udp.recv_from(socket, out)
    }

    /// Sends a datagram, or several that are contiguous in `payload`, as `sending` says. A source address
    /// that is not local is ignored.
    ///
    /// # Errors
    /// As for [`Stack::udp_send_to`]; [`UdpError::TooLong`] also if a datagram does not fit into a packet of
    /// the path, if all of them together do not fit into one datagram, or if they are more than 128.
    pub fn udp_send_with(
        &mut self,
        now: Instant,
        socket: UdpHandle,
        sending: &UdpSendParams,
        payload: &[u8],
    ) -> Result<(), UdpError> {
        let source = sending.source.filter(|source| self.net.is_local(*source));
        self.udp.send(now, &mut self.net, socket, &UdpSendParams { source, ..*sending }, payload)
    }

    /// Takes the oldest extended error about a socket's datagrams (`MSG_ERRQUEUE`), with as much of the
    /// datagram as is known and fits `out`. Errors are queued only for sockets that request it
    /// ([`UdpOptions::recverr_v4`], [`UdpOptions::recverr_v6`]).
    ///
    /// # Errors
    /// [`UdpError::WouldBlock`] if there is none, [`UdpError::Stale`].
    pub fn udp_take_report(
        &mut self,
        socket: UdpHandle,
        out: &mut [u8],
    ) -> Result<UdpExtendedError, UdpError> {
        self.udp.take_extended_error(socket, out)
    }

    /// Reports a listener again, for an owner that left connections in its accept queue.
    pub fn report_incoming_again(&mut self, listener: Listener) {
        self.tcp.events.push_back(Event::Incoming { listener });
    }

    /// Reports a UDP socket again as readable, for an owner that left datagrams in its queue.
    pub fn udp_report_again(&mut self, socket: UdpHandle) {
        self.udp.report_again(socket);
    }

    /// Takes the pending error of a UDP socket (`SO_ERROR`).
    ///
    /// # Errors
    /// [`UdpError::Stale`].
    pub fn udp_take_error(&mut self, socket: UdpHandle) -> Result<Option<UdpError>, UdpError> {
        self.udp.take_error(socket)
    }

    /// Returns the bytes of the largest IP packet that is known to reach the remote address of a UDP socket
    /// unfragmented.
    ///
    /// # Errors
    /// [`UdpError::NoDestination`] if the socket is not connected or there is no route to its remote address.
    pub fn udp_path_mtu(&mut self, now: Instant, socket: UdpHandle) -> Result<u16, UdpError> {
        self.udp.path_mtu(now, &mut self.net, socket)
    }

    /// Returns the local address of a UDP socket.
    ///
    /// # Errors
    /// [`UdpError::Stale`].
    pub fn udp_local(&mut self, socket: UdpHandle) -> Result<SocketAddr, UdpError> {
        self.udp.local(socket)
    }

    /// Changes the options of a UDP socket. Options that concern binding have no effect any more.
    ///
    /// # Errors
    /// [`UdpError::Stale`].
    pub fn udp_set_options(&mut self, socket: UdpHandle, options: UdpOptions) -> Result<(), UdpError> {
        self.udp.set_options(socket, options)
    }

    /// Sets the filter with which a UDP socket receives a group on a link; `None` leaves the group.
    ///
    /// # Errors
    /// As [`Udp::set_membership`].
    pub fn udp_set_membership(
        &mut self,
        socket: UdpHandle,
        link: LinkId,
        group: IpAddr,
        filter: Option<SourceFilter>,
    ) -> Result<(), UdpError> {
        self.udp.set_membership(&mut self.net, socket, link, group, filter)
    }

    /// Closes a UDP socket.
    ///
    /// # Errors
    /// [`UdpError::Stale`].
    pub fn udp_close(&mut self, socket: UdpHandle) -> Result<(), UdpError> {
        self.udp.leave_all(&mut self.net, socket);
        self.udp.close(socket)
    }

    /// Sets the part of the limits of UDP receive queues that datagrams of each class may fill
    /// ([`Stack::select_class`]). Must be called before the first socket is bound.
    pub fn set_class_limits(&mut self, limits: ClassLimits) {
        self.udp.set_class_limits(limits);
    }

    /// Returns the class of the datagram that [`Stack::udp_recv_from`] returned last; [`BEST_EFFORT`] without
    /// [`Stack::set_class_limits`].
    pub fn udp_received_class(&self) -> u8 {
        self.udp.received_class()
    }

    /// Returns how many datagrams of each class were dropped at the limits of receive queues since the last
    /// call, if there are any.
    pub fn take_udp_shed(&mut self) -> Option<[u64; CLASSES]> {
        self.udp.take_shed()
    }

    /// Returns the counters of UDP.
    pub fn udp_stats(&self) -> &UdpStats {
        self.udp.stats()
    }

    /// Returns the counters of TCP.
    pub fn tcp_stats(&self) -> &TcpStats {
        &self.tcp.stats
    }

    /// Returns how much of the limited resources is in use.
    pub fn usage(&self) -> Usage {
        self.tcp.usage()
    }

    /// Checks the invariants of the engine, for tests and fuzzing. Takes time proportional to the number of
    /// connections.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn check_invariants(&self) {
        self.tcp.check_invariants();
    }
}

/// Use of limited resources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Connections, including half-open ones.
    pub connections: usize,
    /// Half-open connections.
    pub half_open: usize,
    /// Entries in TIME-WAIT.
    pub time_wait: usize,
    /// Connections with data queued, in flight or unread.
    pub active: usize,
    /// Buffer chunks in use.
    pub chunks: usize,
    /// Largest number of chunks ever in use.
    pub chunks_high_water: usize,
    /// Timers that are set.
    pub timers: usize,
    /// Bytes of memory of the flow table.
    pub flow_table_bytes: usize,
}

#[cfg(test)]
#[path = "stack_tests.rs"]
mod tests;
