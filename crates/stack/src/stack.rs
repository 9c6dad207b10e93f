//! One stack: what a shard owns. Frames and the time go in, events and frames come out.
//!
//! One turn of its owner:
//!
//! ```text
//!   receive(now, port, &burst)     connections are fetched ahead, frames processed one by one; events queue up
//!   next_event() … consume(…)      the owner reads events and answers
//!   finish_burst(&burst)           what it did not read moves to receive buffers; the burst may go
//!   advance(now)                   timers
//!   transmit(now)                  everything that is to be sent leaves, with acknowledgements riding on answers
//! ```

mod listing;
mod pools;

pub(crate) use listing::unspecified_addr;
pub use listing::{ListCursor, ListedSocket, ListedTimer, SocketMemory, SocketProtocol, TimerKind};
pub use pools::{POOL_COUNT, PoolUsage};

use crate::device::{BURST_FRAMES_MAX, Gso, RxBurst, RxFrame, TxQueue};
use crate::error::{ConfigError, ConnectError, ListenError, OptionError, RecvError, SendError, Stale};
use crate::events::{Event, InlineData};
use crate::handle::{Conn, LinkId, Listener, PortId, UdpHandle};
use crate::icmp::error::TransportError;
use crate::ip::rx_fast_path::{self, FastPathSegment};
use crate::ip::{InputResult, L4, Network, NetworkConfig, ParsedFrame, Reassembled, RouteConfig};
use crate::link::LinkConfig;
use crate::options::{ConnectOptions, ListenOptions, SocketOptions, TcpInfo, TcpOption, UrgentMark};
use crate::steering::{ControlUpdate, FrameOwner, MisroutedPacket, Steering};
use crate::tcp::config::TcpConfig;
use crate::tcp::demux;
use crate::tcp::input::{Segment, SegmentHeader};
use crate::tcp::source::{Source, SourceId};
use crate::tcp::state::State;
use crate::tcp::{FlowKey, Tcp, TcpStats};
use crate::time::Instant;
use crate::udp::{Datagram, Udp, UdpError, UdpExtendedError, UdpOptions, UdpSendParams, UdpStats};
use crate::wire::protocol;
use crate::wire::tcp::{SeqNumber, TcpHeader, TcpSegment};
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use serde::Deserialize;

/// Configuration of a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StackConfig {
    /// Everything below TCP, and UDP.
    pub network: NetworkConfig,
    /// TCP.
    pub tcp: TcpConfig,
}

impl StackConfig {
    /// Checks every range. The error names the key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.network.validate()?;
        self.tcp.validate()
    }
}

/// A stack. See the module's text.
pub struct Stack {
    net: Network,
    tcp: Tcp,
    udp: Udp,
    /// Packets that were put together here and belong to other shards.
    misrouted: Vec<MisroutedPacket>,
}

/// Fewer frames than these are worked on before a prefetch could help.
const PREFETCH_FRAMES_MIN: usize = 3;

/// ECN codepoint CE (RFC 3168 §5).
const CONGESTION_EXPERIENCED: u8 = 3;

/// How many segments a frame held on the wire.
#[inline(always)]
fn wire_segments(gso: Option<Gso>, payload: &[u8]) -> u16 {
    match gso {
        Some(gso) => super_frame_segments(gso, payload),
        None => 1,
    }
}

/// The same of a super-frame.
#[inline(never)]
fn super_frame_segments(gso: Gso, payload: &[u8]) -> u16 {
    payload.len().div_ceil(usize::from(gso.size.max(1))).max(1) as u16
}

/// The segment of a usual frame, which is number `index` of its burst, with its flow hash and what the flow table had for that.
#[inline(always)]
fn segment_of<'b>(
    usual: &FastPathSegment<'b>,
    (hash, hint): (u32, u32),
    index: usize,
    frame: &RxFrame<'b>,
) -> Segment<'b> {
    let FastPathSegment { key, ecn, hop_limit: hops, header, options, payload, payload_at } = *usual;
    Segment {
        key,
        hash,
        hint,
        header: SegmentHeader::from(&TcpHeader::parse(header)),
        options,
        payload,
        frame: Some((index as u16, payload_at)),
        ce: ecn == CONGESTION_EXPERIENCED,
        segments: wire_segments(frame.gso, payload),
        hop_limit: hops,
    }
}

impl Stack {
    /// An empty stack. `seed` keys everything that must not be guessed; with the same seed and inputs it behaves the same.
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

    /// Adds a link with its addresses to a device.
    ///
    /// # Errors
    /// What is wrong with the configuration of the link.
    pub fn add_link(&mut self, port: PortId, config: &LinkConfig) -> Result<LinkId, ConfigError> {
        self.net.add_link(port, config)
    }

    /// Adds a route.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn add_route(&mut self, route: RouteConfig) -> Result<(), ConfigError> {
        self.net.add_route(route)
    }

    /// The memory of the tables that segments are looked up in. It is reserved, and touched as connections come: the owner may ask the
    /// system for huge pages there.
    pub fn tables(&self) -> [*const [u8]; 4] {
        let [buckets, overflow] = self.tcp.flows.memory();
        [buckets, overflow, self.tcp.conns.memory(), self.tcp.time_wait.memory()]
    }

    /// Ports that outgoing connections get (RFC 6056): from `tcp.local_port_first` to `tcp.local_port_last`.
    pub fn local_ports(&self) -> core::ops::RangeInclusive<u16> {
        self.tcp.config.local_port_first..=self.tcp.config.local_port_last
    }

    /// The network layer: addresses, neighbours, counters.
    pub fn network(&self) -> &Network {
        &self.net
    }

    /// The network layer, to change it.
    pub fn network_mut(&mut self) -> &mut Network {
        &mut self.net
    }

    /// Takes a burst of frames from device `port`.
    pub fn receive(&mut self, now: Instant, port: PortId, burst: &RxBurst<'_>) {
        self.tcp.set_now(now);
        // What the flow table had for each frame before the first of them was processed.
        let mut hints = [demux::NO_HINT; BURST_FRAMES_MAX];
        if burst.len() >= PREFETCH_FRAMES_MIN && self.tcp.exceeds_cache() {
            self.prefetch_flows(burst, &mut hints);
        }
        let link = self.net.untagged_link(port);
        let mut gate = link.map(|link| self.net.fast_path_filter(link));
        for (index, frame) in burst.iter().enumerate() {
            let hint = hints[index];
            // A branch of its own for what nearly all are, so that nothing in it has to fit the others.
            if let Some(gate) = &gate
                && let Some(usual) = self.net.parse_fast_v4(gate, frame)
            {
                let hash = self.tcp.secrets.flow_hash_v4(&usual.key);
                let arrived = segment_of(&usual, (hash, hint), index, frame);
                self.net.stats.rx_tcp += 1;
                self.tcp.input_inlined(&mut self.net, &arrived, burst);
            } else if let Some(usual) = link.and_then(|link| self.net.parse_fast_v6(link, frame)) {
                let hash = self.tcp.secrets.flow_hash(&usual.key);
                let arrived = segment_of(&usual, (hash, hint), index, frame);
                self.net.stats.rx_tcp += 1;
                self.tcp.input(&mut self.net, &arrived, burst);
            } else {
                self.receive_slow_path(now, port, index, frame, burst);
                // It may have been about our addresses, or about a neighbour.
                gate = link.map(|link| self.net.fast_path_filter(link));
                self.net.reset_last_confirmed();
            }
        }
        self.net.reset_last_confirmed();
    }

    /// Asks for the cache lines that a burst is going to need: first the buckets of the flow table, then the connections they name.
    fn prefetch_flows(&self, burst: &RxBurst<'_>, hints: &mut [u32; BURST_FRAMES_MAX]) {
        if !self.tcp.live_conns_exceed_cache() {
            return self.prefetch_buckets(burst);
        }
        let mut hashes = [0; BURST_FRAMES_MAX];
        let mut usual = [false; BURST_FRAMES_MAX];
        for (index, frame) in burst.iter().enumerate() {
            let Some(key) = rx_fast_path::peek_flow_key(frame.bytes) else { continue };
            let hash = self.tcp.secrets.flow_hash(&key);
            self.tcp.flows.prefetch(hash);
            usual[index] = true;
            hashes[index] = hash;
        }
        for (index, _) in usual.iter().enumerate().filter(|(_, usual)| **usual) {
            hints[index] = self.tcp.prefetch_flow(hashes[index]);
        }
    }

    /// The same where what short connections touch was touched a moment ago, but for the bucket that a new one gets. What it holds is not asked for: that would be to
    /// wait for it.
    fn prefetch_buckets(&self, burst: &RxBurst<'_>) {
        for frame in burst.iter().filter(|frame| rx_fast_path::may_be_syn(frame.bytes)) {
            if let Some(key) = rx_fast_path::peek_flow_key(frame.bytes) {
                self.tcp.flows.prefetch(self.tcp.secrets.flow_hash(&key));
            }
        }
    }

    /// A frame that needs a closer look.
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
                if let Some(arrived) = self.parse_segment(&l4, Some((index, frame))) {
                    self.tcp.input(&mut self.net, &arrived, burst);
                }
            }
            ParsedFrame::Drop(_) => {}
            other => self.receive_other(now, &other, burst),
        }
    }

    /// Parses a TCP segment. `None` if its header is malformed.
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
        let frame = frame.map(|(index, frame)| {
            let start = segment.payload.as_ptr() as usize - frame.bytes.as_ptr() as usize;
            (index as u16, start as u32)
        });
        Some(Segment {
            hash: self.tcp.secrets.flow_hash(&key),
            hint: demux::NO_HINT,
            key,
            header: SegmentHeader::from(&header),
            options: segment.options,
            payload: segment.payload,
            frame,
            ce: l4.ecn == CONGESTION_EXPERIENCED,
            segments: wire_segments(l4.gso, segment.payload),
            hop_limit: l4.hop_limit,
        })
    }

    /// Frames that are not TCP in one piece.
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
                        if let Some(arrived) = self.parse_segment(&l4, None) {
                            self.tcp.input(&mut self.net, &arrived, burst);
                        }
                    }
                    // Cannot come back here again: a reassembled packet is no fragment.
                    parsed => self.receive_other(now, &parsed, burst),
                }
                self.net.recycle(packet);
            }
        }
    }

    /// Of several shards, one puts fragments together and another may be the home of what comes of them: it gets the packet. True if this one does not.
    #[cold]
    fn route_reassembled(&mut self, packet: &Reassembled) -> bool {
        let Some(home) = self.net.owner_of_reassembled(packet) else { return false };
        let me = self.net.steering().map(Steering::shard);
        if matches!(home, FrameOwner::Shard(home) if Some(home) == me) {
            return false;
        }
        self.misrouted.push(self.net.misrouted_packet(home, packet));
        home != FrameOwner::All
    }

    /// The next packet that was put together here and belongs elsewhere.
    pub fn next_misrouted(&mut self) -> Option<MisroutedPacket> {
        self.misrouted.pop()
    }

    /// Another shard tells something.
    pub fn apply_control_update(&mut self, now: Instant, news: &ControlUpdate) {
        self.net.apply_control_update(now, news);
    }

    fn on_transport_error(&mut self, now: Instant, error: &TransportError) {
        match error.protocol {
            protocol::TCP => self.tcp.on_icmp_error(&mut self.net, error),
            protocol::UDP => self.udp.on_error(now, &mut self.net, error),
            _ => {}
        }
    }

    /// The next thing that happened. Slots of connections whose end was reported before are reused from here on.
    #[inline]
    pub fn next_event(&mut self) -> Option<Event> {
        self.tcp.next_event().or_else(|| self.udp.next_readable().map(|socket| Event::UdpReadable { socket }))
    }

    /// Events that wait now. [`Stack::next_event`] may give fewer, for some have become void.
    pub fn events_waiting(&self) -> usize {
        self.tcp.events.len() + self.udp.readable_count()
    }

    /// The bytes of a [`Event::Data`], in the burst that was given to [`Stack::receive`].
    pub fn inline_data<'a>(&self, burst: &RxBurst<'a>, data: &InlineData) -> &'a [u8] {
        data.bytes(burst)
    }

    /// Says how many of the bytes of an [`Event::Data`] were read; the rest moves to the receive buffer.
    /// To be called once for each such event, before the next event is taken.
    pub fn consume(&mut self, conn: Conn, data: InlineData, count: usize, burst: &RxBurst<'_>) {
        self.tcp.consume(conn, data, count, burst);
    }

    /// Moves what nobody read to the receive buffers: after this the burst's frames may go back to the device.
    pub fn finish_burst(&mut self, burst: &RxBurst<'_>) {
        self.tcp.finish_burst(burst);
    }

    /// A turn begins: calls without a time of their own happen now, until a later one is given.
    #[inline]
    pub fn set_now(&mut self, now: Instant) {
        self.tcp.set_now(now);
    }

    /// Runs timers that are due.
    pub fn advance(&mut self, now: Instant) {
        self.tcp.set_now(now);
        self.net.run_timers(now);
        while let Some(error) = self.net.next_error() {
            self.on_transport_error(now, &error);
        }
        self.tcp.advance(&mut self.net);
    }

    /// Sends everything that may be sent, and hands it to the devices.
    pub fn transmit(&mut self, now: Instant) {
        self.tcp.set_now(now);
        self.tcp.transmit(&mut self.net);
        self.net.flush(now);
    }

    /// How long acknowledgements that have no other reason to leave at once than Linux's quick acknowledgement mode wait for an answer to ride on, for an
    /// application that answers a little after the turn in which it gets data. Zero, as in the beginning: not at all. Every second segment, and
    /// whatever tells of loss, is acknowledged at once nevertheless (RFC 9293 §3.8.6.3, RFC 5681 §4.2).
    pub fn defer_quick_acks(&mut self, time: Duration) {
        self.tcp.defer_quick_acks(time);
    }

    /// When the next turn is due if no frame comes before. `None` if nothing waits.
    pub fn next_deadline(&self) -> Option<Instant> {
        [self.net.next_deadline(), self.tcp.next_deadline()].into_iter().flatten().min()
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

    /// Connections that come to a listener from now on begin with these options. What waits to be accepted keeps what it has.
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

    /// The headers of the SYN that began a connection, if its listener was to keep them
    /// ([`SaveSyn`](crate::options::SaveSyn)).
    pub fn saved_syn(&self, conn: Conn) -> Option<&[u8]> {
        self.tcp.saved_syn(conn)
    }

    /// Lets go of them.
    pub fn drop_saved_syn(&mut self, conn: Conn) {
        self.tcp.drop_saved_syn(conn);
    }

    /// How many connections may wait at a listener from now on. `kept` are those that were accepted here and still wait for somebody to take them: they count, so
    /// that what is between the engine and an application makes no queue longer. Nothing happens if it was closed.
    pub fn set_backlog(&mut self, listener: Listener, backlog: u32, kept: u32) {
        self.tcp.set_backlog(listener, backlog, kept);
    }

    /// Closes a listener. Connections in its accept queue are reset. Returns false if it was closed already.
    pub fn unlisten(&mut self, listener: Listener) -> bool {
        self.tcp.unlisten(&mut self.net, listener)
    }

    /// Takes the first connection from the accept queue. If it has ended since it came there, as by a reset, what it received can be read until
    /// its [`Event::Closed`], which follows.
    pub fn accept(&mut self, listener: Listener) -> Option<Conn> {
        self.tcp.accept(listener)
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

    /// Queues bytes to be sent, copied. Returns how many were taken: if fewer than given, [`Event::Writable`] follows.
    ///
    /// # Errors
    /// See [`SendError`].
    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        self.tcp.send(conn, bytes)
    }

    /// The same of `len` bytes that `fill` writes where they are kept, so that what lies elsewhere is copied once: it is given how many bytes come before, and must fill
    /// all that it is given, for there stands what others have sent. `continues`: more of what the application has written at once follows, which matters for PSH.
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

    /// What is queued is the end of a record (`MSG_EOR`): what is sent later shares no segment with it. Of records of which nothing has left, the last 256 less what long
    /// writes need are kept apart.
    pub fn end_record(&mut self, conn: Conn) {
        self.tcp.end_record(conn);
    }

    /// How many of `len` bytes, 2^30 at the most, Linux would take in one call, in which it also sends, before so many or more are not sent (`TCP_NOTSENT_LOWAT`), or not acknowledged (`SO_SNDBUF`).
    pub fn sendable_within(&mut self, conn: Conn, len: u32, most: (u32, u32)) -> u32 {
        self.tcp.sendable_within(conn, len, most)
    }

    /// Queues `len` bytes of a source from `offset` on, without copying. Taken whole or not at all.
    ///
    /// # Errors
    /// [`SendError::Full`] if the send buffer is full or too many slices wait: [`Event::Writable`] follows.
    pub fn send_source(
        &mut self,
        conn: Conn,
        source: SourceId,
        offset: u64,
        len: u64,
    ) -> Result<(), SendError> {
        self.tcp.send_source(conn, source, offset, len)
    }

    /// Queues up to `len` bytes of a source from `offset` on, without copying: as many as the send buffer has room for. Returns how many; if fewer than given,
    /// [`Event::Writable`] follows.
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

    /// Copies what is queued of sources whose bytes others may write ([`Source::shared`]), until `len` bytes from the first unacknowledged one on are copies, or
    /// memory is used up. Returns how many are.
    pub fn privatize(&mut self, conn: Conn, len: u64) -> u64 {
        self.tcp.privatize(conn, len)
    }

    /// [`Event::Writable`] is to follow when some of what is queued was acknowledged.
    pub fn request_writable(&mut self, conn: Conn) {
        self.tcp.request_writable(conn);
    }

    /// Bytes that are queued and not acknowledged. 0 if the connection is over.
    pub fn queued(&self, conn: Conn) -> u64 {
        self.tcp.queued(conn)
    }

    /// Of those the ones that were not sent.
    pub fn notsent(&self, conn: Conn) -> u32 {
        self.tcp.notsent(conn)
    }

    /// Queues bytes of which the last is urgent (`MSG_OOB`).
    ///
    /// # Errors
    /// See [`SendError`].
    pub fn send_urgent(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        self.tcp.send_urgent(conn, bytes)
    }

    /// Registers something that many connections may send from.
    pub fn add_source(&mut self, source: Box<dyn Source>) -> SourceId {
        self.tcp.sources.add(source)
    }

    /// Gives a source up; it goes when nothing queued refers to it any more. Returns false if it was given up already.
    pub fn release_source(&mut self, source: SourceId) -> bool {
        self.tcp.sources.release(source)
    }

    /// Reads buffered bytes. `Ok(0)` is the end of the stream.
    ///
    /// # Errors
    /// See [`RecvError`].
    pub fn recv(&mut self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        self.tcp.recv(conn, out)
    }

    /// Copies buffered bytes without consuming them: perhaps fewer than there are, and none beyond an urgent one in front of which
    /// [`Stack::recv`] would stop. `Ok(0)` is the end of the stream.
    ///
    /// # Errors
    /// See [`RecvError`].
    pub fn peek(&self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        self.tcp.peek(conn, out)
    }

    /// Bytes in the receive buffer that can be read; none of a stale handle.
    pub fn buffered(&self, conn: Conn) -> usize {
        self.tcp.buffered(conn)
    }

    /// Consumes `count` of the bytes that [`Stack::peek`] shows, or as many as there are; before them, an urgent byte that reading has come to.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn skip(&mut self, conn: Conn, count: usize) -> Result<(), Stale> {
        self.tcp.skip(conn, count)
    }

    /// Takes the urgent byte, if there is one and it is out of line.
    ///
    /// # Errors
    /// [`RecvError::WouldBlock`] if there is none.
    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        self.tcp.recv_urgent(conn)
    }

    /// Where the urgent byte is that the peer announced last; `None` if there is none or reading has passed it.
    pub fn urgent_mark(&self, conn: Conn) -> Option<UrgentMark> {
        self.tcp.urgent_mark(conn)
    }

    /// Says that so many of the bytes that were read here lie elsewhere and were read by nobody there: they count against the window until it is said anew.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn set_unread(&mut self, conn: Conn, bytes: u32) -> Result<(), Stale> {
        self.tcp.set_unread(conn, bytes)
    }

    /// Unread bytes in front of an urgent one that an [`Event::Urgent`] tells of; below 0 if reading has passed it.
    pub fn urgent_ahead(&self, conn: Conn, at: SeqNumber) -> i32 {
        self.tcp.urgent_ahead(conn, at)
    }

    /// Bytes received and not read: what is in the receive buffer and, between [`Stack::receive`] and [`Stack::finish_burst`], what lies in frames
    /// whose [`Event::Data`] was not taken yet. The latter are not for [`Stack::recv`]: [`Stack::buffered`] says what it has. None of a stale handle.
    pub fn readable(&self, conn: Conn) -> usize {
        self.tcp.readable(conn)
    }

    /// No more data from us: FIN follows what is queued.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale> {
        self.tcp.shutdown_write(conn)
    }

    /// The application is done with the connection: FIN follows what is queued, or RST if there are unread bytes.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn close(&mut self, conn: Conn) -> Result<(), Stale> {
        self.tcp.close(&mut self.net, conn)
    }

    /// Ends the connection with RST; of what is queued only that leaves before it that can leave now, the rest is lost.
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

    /// What is known about a connection; `None` if the handle is stale.
    pub fn info(&self, conn: Conn) -> Option<TcpInfo> {
        self.tcp.info(conn)
    }

    /// Our end and the peer's of a connection; `None` if the handle is stale.
    pub fn endpoints(&self, conn: Conn) -> Option<[SocketAddr; 2]> {
        self.tcp.endpoints(conn)
    }

    /// How many bytes may wait to be read and to be sent, as configured or as the connection's options say; `None` if the handle is stale.
    pub fn buffer_limits(&self, conn: Conn) -> Option<[u32; 2]> {
        self.tcp.buffer_limits(conn)
    }

    /// State of a connection; `None` if the handle is stale.
    pub fn state(&self, conn: Conn) -> Option<State> {
        self.tcp.state(conn)
    }

    /// The application's number for a connection, 0 at first; `None` if the handle is stale.
    pub fn token(&self, conn: Conn) -> Option<u32> {
        self.tcp.token(conn)
    }

    /// Sets the application's number for a connection. Returns false if the handle is stale.
    pub fn set_token(&mut self, conn: Conn, token: u32) -> bool {
        self.tcp.set_token(conn, token)
    }

    /// Opens a UDP socket. Port 0 chooses one, the unspecified address means all of ours.
    ///
    /// # Errors
    /// See [`UdpError`].
    pub fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> Result<UdpHandle, UdpError> {
        self.udp.bind(&mut self.net, local, options)
    }

    /// Fixes the other end of a UDP socket.
    ///
    /// # Errors
    /// See [`UdpError`].
    pub fn udp_connect(&mut self, now: Instant, socket: UdpHandle, to: SocketAddr) -> Result<(), UdpError> {
        self.udp.connect(now, &mut self.net, socket, to)
    }

    /// Sends a datagram; it leaves with the next [`Stack::transmit`]. Without a destination it goes to the connected one.
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

    /// The same from `source`, which must be one of our addresses, whatever the socket is bound to (`IP_PKTINFO`).
    ///
    /// # Errors
    /// See [`UdpError`]; [`UdpError::AddressNotAvailable`] if `source` is not ours.
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

    /// Takes the next datagram of a socket, cut off where `out` ends.
    ///
    /// # Errors
    /// [`UdpError::WouldBlock`] if there is none; a pending error is reported first.
    pub fn udp_recv_from(&mut self, socket: UdpHandle, out: &mut [u8]) -> Result<Datagram, UdpError> {
        self.udp.recv_from(socket, out)
    }

    /// Sends a datagram, or several that stand one behind the other in `payload`, in the way that `sending` says.
    ///
    /// # Errors
    /// As [`Stack::udp_send_from`]; [`UdpError::TooLong`] also if a piece does not fit into a packet of the path, or all of them into one datagram.
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

    /// Takes the oldest report of an error about a socket's datagrams, with as much of the datagram as is known and `out` holds. There are some only for
    /// sockets that want them ([`UdpOptions::reports_v4`], [`UdpOptions::reports_v6`]).
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

    /// Takes the pending error of a UDP socket (`SO_ERROR`).
    ///
    /// # Errors
    /// [`UdpError::Stale`].
    pub fn udp_take_error(&mut self, socket: UdpHandle) -> Result<Option<UdpError>, UdpError> {
        self.udp.take_error(socket)
    }

    /// Bytes of the largest IP packet that gets to the other end of a UDP socket in one piece, as far as is known.
    ///
    /// # Errors
    /// [`UdpError::NoDestination`] if the other end is not fixed, and if there is no route to it.
    pub fn udp_path_mtu(&mut self, now: Instant, socket: UdpHandle) -> Result<u16, UdpError> {
        self.udp.path_mtu(now, &mut self.net, socket)
    }

    /// Our end of a UDP socket.
    ///
    /// # Errors
    /// [`UdpError::Stale`].
    pub fn udp_local(&mut self, socket: UdpHandle) -> Result<SocketAddr, UdpError> {
        self.udp.local(socket)
    }

    /// Changes how a UDP socket behaves. What concerns binding has no effect any more.
    ///
    /// # Errors
    /// [`UdpError::Stale`].
    pub fn udp_set_options(&mut self, socket: UdpHandle, options: UdpOptions) -> Result<(), UdpError> {
        self.udp.set_options(socket, options)
    }

    /// Closes a UDP socket.
    ///
    /// # Errors
    /// [`UdpError::Stale`].
    pub fn udp_close(&mut self, socket: UdpHandle) -> Result<(), UdpError> {
        self.udp.close(socket)
    }

    /// UDP's counters.
    pub fn udp_stats(&self) -> &UdpStats {
        self.udp.stats()
    }

    /// TCP's counters.
    pub fn tcp_stats(&self) -> &TcpStats {
        &self.tcp.stats
    }

    /// How much of what is limited is in use.
    pub fn usage(&self) -> Usage {
        self.tcp.usage()
    }

    /// Checks the engine's invariants; for tests and fuzzing. Takes time in proportion to the number of connections.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check_invariants(&self) {
        self.tcp.check_invariants();
    }
}

/// How much is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Connections, half-open ones included.
    pub connections: usize,
    /// Half-open ones.
    pub half_open: usize,
    /// Entries in TIME_WAIT.
    pub time_wait: usize,
    /// Connections with something queued, in flight or unread.
    pub active: usize,
    /// Buffer chunks in use.
    pub chunks: usize,
    /// Most chunks ever in use.
    pub chunks_high_water: usize,
    /// Timers set.
    pub timers: usize,
    /// Bytes of the flow table.
    pub flow_table_bytes: usize,
}

#[cfg(test)]
#[path = "stack_tests.rs"]
mod tests;
