//! The interface through which a handler acts on its shard.

use crate::classifier::PriorityCounters;
use crate::command::Commander;
use crate::engine::Engine;
use crate::error::Error;
use crate::kernel_fds::{Interest, KernelFd, KernelFds};
use crate::prioritized_rx::DeviceCheck;
use crate::shard_router::ShardRouter;
use crate::shard_saver::SaveRequest;
use crate::stats::ShardStats;
use crate::timers::{Timer, Timers};
use core::net::{IpAddr, SocketAddr};
use core::ops::{Deref, DerefMut};
use core::time::Duration;
use ginnel_devices::random::Random;
use ginnel_stack::device::RxBurst;
use ginnel_stack::error::{GroupError, ListenError, OptionError, RecvError, SendError, Stale};
use ginnel_stack::handle::{Conn, LinkId, Listener, PortId, UdpHandle};
use ginnel_stack::ip::{DropStats, LinkView, NetworkStats};
use ginnel_stack::multicast::SourceFilter;
use ginnel_stack::options::{BufferLimits, ConnectOptions, ListenOptions, SocketOptions, TcpInfo, TcpOption};
use ginnel_stack::priority::{self, ClassLimits};
use ginnel_stack::socket_filter::SocketFilter;
use ginnel_stack::stack::Stack;
use ginnel_stack::tcp::TcpStats;
use ginnel_stack::tcp::UnorderedBytes;
use ginnel_stack::tcp::source::{Source, SourceId};
use ginnel_stack::tcp::state::State;
use ginnel_stack::time::Instant;
use ginnel_stack::udp::{Datagram, MembershipLimits, UdpError, UdpExtendedError, UdpOptions, UdpSendParams};
use rustix::fd::AsFd;
use std::sync::Arc;

/// Everything of a shard except its devices and its handler.
pub(crate) struct ShardCore {
    pub(crate) now: Instant,
    pub(crate) stack: Engine,
    pub(crate) timers: Timers,
    pub(crate) rng: Random,
    pub(crate) commander: Commander,
    pub(crate) stats: ShardStats,
    /// Connections whose handler asked for unread bytes to be delivered again.
    pub(crate) resume_reading: Vec<Conn>,
    /// The connection whose `closed` is running, and its token.
    pub(crate) closing: Option<(Conn, u32)>,
    /// The connection whose buffered bytes are being delivered, and how many. They count as read if the
    /// handler closes the connection meanwhile, as bytes in a frame do.
    pub(crate) delivering: Option<(Conn, usize)>,
    /// True if the shard's loop ends after this turn, or begins what `save_request` asks for.
    pub(crate) is_stopping: bool,
    /// A request to save the shard after this turn.
    pub(crate) save_request: Option<SaveRequest>,
    /// Routes to the other shards, if there are several.
    pub(crate) router: Option<Box<ShardRouter>>,
    /// Kernel descriptors of the application, once one was registered.
    pub(crate) kernel_fds: Option<Box<KernelFds>>,
    /// Counters of the classifiers, if there are rules or a function for priorities.
    pub(crate) priority_counters: Option<Arc<PriorityCounters>>,
    /// Index of this shard, and of this worker.
    pub(crate) shard_and_worker: (u8, u16),
    /// When the devices must be looked at again, if `[priority]` is in use.
    pub(crate) device_check: Option<DeviceCheck>,
    /// Minimum share of the work of lower priorities in percent.
    pub(crate) lower_share_percent: u32,
    /// The part of shared limits that each class may fill, if `[priority]` is in use.
    pub(crate) class_limits: Option<ClassLimits>,
}

/// Operations that concern all shards, if there are several.
impl ShardCore {
    pub(crate) fn listen(
        &mut self,
        local: SocketAddr,
        options: ListenOptions,
    ) -> Result<Listener, ListenError> {
        self.listen_as(local, options, false)
    }

    /// Listens, but fails if another shard listens on the port, which was chosen by the stack.
    pub(crate) fn listen_exclusive(
        &mut self,
        local: SocketAddr,
        options: ListenOptions,
    ) -> Result<Listener, ListenError> {
        self.listen_as(local, options, true)
    }

    fn listen_as(
        &mut self,
        local: SocketAddr,
        options: ListenOptions,
        exclusive: bool,
    ) -> Result<Listener, ListenError> {
        let Self { stack, stats, router, .. } = self;
        match (router, stack) {
            (Some(router), Engine::Local(stack)) => router.listen(stack, stats, local, options, exclusive),
            (_, Engine::Channel(remote)) if exclusive => remote.listen_exclusive(local, options),
            (_, engine) => engine.listen(local, options),
        }
    }

    /// Returns false if the listener was closed before.
    pub(crate) fn unlisten(&mut self, listener: Listener) -> bool {
        let Self { stack, stats, router, .. } = self;
        match (router, stack) {
            (Some(router), Engine::Local(stack)) => router.unlisten(stack, stats, listener),
            (_, engine) => engine.unlisten(listener),
        }
    }

    pub(crate) fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> Result<UdpHandle, UdpError> {
        let Self { stack, stats, router, .. } = self;
        match (router, stack) {
            (Some(router), Engine::Local(stack)) => router.udp_bind(stack, stats, local, options),
            (_, engine) => engine.udp_bind(local, options),
        }
    }

    pub(crate) fn udp_connect(&mut self, socket: UdpHandle, remote: SocketAddr) -> Result<(), UdpError> {
        self.stack.udp_connect(self.now, socket, remote)?;
        self.with_router(|router, stack, stats| router.udp_connected(stack, stats, socket, remote));
        Ok(())
    }

    pub(crate) fn udp_set_membership(
        &mut self,
        socket: UdpHandle,
        link: LinkId,
        group: IpAddr,
        filter: Option<SourceFilter>,
    ) -> Result<(), UdpError> {
        self.stack.udp_set_membership(socket, link, group, filter)?;
        self.with_router(|router, stack, stats| router.publish_groups(stack, stats));
        Ok(())
    }

    pub(crate) fn udp_close(&mut self, socket: UdpHandle) -> Result<(), UdpError> {
        self.stack.udp_close(socket)?;
        self.with_router(|router, stack, stats| router.udp_closed(stack, stats, socket));
        Ok(())
    }

    /// Calls `act` with the router, the engine and the counters, if there are several shards.
    pub(crate) fn with_router(&mut self, act: impl FnOnce(&mut ShardRouter, &mut Stack, &mut ShardStats)) {
        if let (Some(router), Engine::Local(stack)) = (&mut self.router, &mut self.stack) {
            act(router, stack, &mut self.stats);
        }
    }

    /// Processes a burst from a device: keeps the frames that belong to this shard, and sends the others to
    /// their shards.
    pub(crate) fn receive(&mut self, port: PortId, burst: &mut RxBurst<'_>) {
        let Self { stack: Engine::Local(stack), router, stats, now, .. } = self else { return };
        let Some(router) = router else { return stack.receive(*now, port, burst) };
        router.route(stack.network().steering(), port, burst, stats);
        self.receive_routed(port, burst);
    }

    /// Keeps the frames of a burst that belong to this shard, and sends the others to their shards.
    pub(crate) fn route(&mut self, port: PortId, burst: &mut RxBurst<'_>) {
        self.with_router(|router, stack, stats| router.route(stack.network().steering(), port, burst, stats));
    }

    /// Processes frames that belong to this shard.
    pub(crate) fn receive_routed(&mut self, port: PortId, burst: &RxBurst<'_>) {
        let Self { stack: Engine::Local(stack), router, stats, now, .. } = self else { return };
        stack.receive(*now, port, burst);
        let Some(router) = router else { return };
        let misrouted = stack.network_mut().take_misrouted();
        if misrouted != 0 {
            router.redirect(stack.network().steering(), port, burst, misrouted, stats);
        }
    }

    /// Returns whether the devices must be looked at before the application goes on: never without
    /// priorities.
    #[inline]
    pub(crate) fn must_look_at_devices(&self) -> bool {
        priority::COMPILED && self.device_check.as_ref().is_some_and(DeviceCheck::is_due)
    }
}

/// The slot in which a shard keeps its core. The core is boxed, so that
/// [`Handler::work`](crate::Handler::work) can take it for the duration of its call.
pub(crate) struct CoreSlot(Option<Box<ShardCore>>);

impl CoreSlot {
    pub(crate) fn new(core: ShardCore) -> Self {
        Self(Some(Box::new(core)))
    }

    /// Takes the core out of the slot.
    pub(crate) fn take(&mut self) -> Box<ShardCore> {
        self.0.take().expect(CORE_NOT_RETURNED)
    }

    /// Puts the core back.
    pub(crate) fn put(&mut self, core: Box<ShardCore>) {
        self.0 = Some(core);
    }
}

const CORE_NOT_RETURNED: &str = "the core of the shard was taken and not returned";

impl Deref for CoreSlot {
    type Target = ShardCore;

    fn deref(&self) -> &ShardCore {
        self.0.as_ref().expect(CORE_NOT_RETURNED)
    }
}

impl DerefMut for CoreSlot {
    fn deref_mut(&mut self) -> &mut ShardCore {
        self.0.as_mut().expect(CORE_NOT_RETURNED)
    }
}

/// The argument of [`Handler::work`](crate::Handler::work), from which a context is obtained.
pub struct WorkContext<'a> {
    pub(crate) core: &'a mut CoreSlot,
}

impl WorkContext<'_> {
    /// Returns the handler's interface to its shard, as in all other calls.
    pub fn context(&mut self) -> Context<'_> {
        Context::new(self.core)
    }
}

/// A handler's interface to its shard, valid for one call.
pub struct Context<'a> {
    core: &'a mut ShardCore,
}

impl<'a> Context<'a> {
    pub(crate) fn new(core: &'a mut ShardCore) -> Self {
        Self { core }
    }

    /// Saves the shard after this turn, unless it stops.
    #[cold]
    pub(crate) fn save_after_turn(&mut self, request: SaveRequest) {
        if !core::mem::replace(&mut self.core.is_stopping, true) {
            self.core.save_request = Some(request);
        }
    }

    /// See [`Stack::defer_quick_acks`](ginnel_stack::stack::Stack::defer_quick_acks). Does nothing where the
    /// stack is in another shard.
    pub(crate) fn defer_quick_acks(&mut self, time: Duration) {
        if let Some(stack) = self.core.stack.local_mut() {
            stack.defer_quick_acks(time);
        }
    }

    /// Returns the class of priority ([`priority::class`]) of the frames whose events are being delivered;
    /// [`BEST_EFFORT`](ginnel_stack::priority::BEST_EFFORT) for events that no frame has caused, and always
    /// without `[priority]`.
    pub fn event_class(&self) -> u8 {
        self.core.stack.event_class()
    }

    /// Returns whether events have classes of priority.
    pub(crate) fn has_priorities(&self) -> bool {
        priority::COMPILED && self.core.device_check.is_some()
    }

    /// Returns `priority.lower_share_percent`.
    pub(crate) fn lower_share_percent(&self) -> u32 {
        self.core.lower_share_percent
    }

    /// Returns the part of `limit` that the datagram which is being delivered may fill. Datagrams of all
    /// priorities share the limit. Without `[priority]` this is all of it.
    pub(crate) fn limit_for_datagram(&self, limit: usize) -> usize {
        match &self.core.class_limits {
            Some(limits) if priority::COMPILED => limits.of(limit, self.core.stack.received_class()),
            _ => limit,
        }
    }

    /// Counts by its priority, if `[priority]` is in use, that the datagram being delivered was dropped.
    pub(crate) fn count_shed_datagram(&mut self) {
        if self.core.class_limits.is_some() {
            let class = self.core.stack.received_class();
            self.core.stats.count_shed(priority::of_class(class), 1);
        }
    }

    /// Returns whether the engine has a listener.
    pub(crate) fn has_listener(&self, listener: Listener) -> bool {
        self.core.stack.local().is_some_and(|stack| stack.has_listener(listener))
    }

    /// Returns the time of the current burst.
    pub fn now(&self) -> Instant {
        self.core.now
    }

    /// Listens on `local`; the unspecified address means all addresses of the stack. Port 0 is refused.
    ///
    /// If there are several shards, all listen when one does (except with `reuse_port`, with which each
    /// listens for itself), and each serves the connections that arrive at it. Each may call this once for
    /// the same address to get its own handle; the options are those of the first call.
    pub fn listen(&mut self, local: SocketAddr, options: ListenOptions) -> Result<Listener, Error> {
        self.core.listen(local, options).map_err(|e| Error::Listen(local, e))
    }

    /// Listens, but fails if another shard or worker listens on the port, which was chosen by the stack.
    pub(crate) fn listen_exclusive(
        &mut self,
        local: SocketAddr,
        options: ListenOptions,
    ) -> Result<Listener, Error> {
        self.core.listen_exclusive(local, options).map_err(|e| Error::Listen(local, e))
    }

    /// Sets a listener's backlog. `unaccepted` is the number of accepted connections that count in it because
    /// no client has taken them yet. Has no effect where the engine is reached through a channel, which has
    /// limits of its own.
    pub(crate) fn set_backlog(&mut self, listener: Listener, backlog: u32, unaccepted: u32) {
        if let Some(stack) = self.core.stack.local_mut() {
            stack.set_backlog(listener, backlog, unaccepted);
        }
    }

    /// Lets SYNs to an address without a listener wait for one ([`Stack::hold_syns`]). Has no effect where
    /// the engine is reached through a channel.
    pub(crate) fn hold_syns(&mut self, local: SocketAddr, v6_only: bool, backlog: u32, wait: Duration) {
        if let Some(stack) = self.core.stack.local_mut() {
            stack.hold_syns(local, v6_only, backlog, wait);
        }
    }

    /// Sets the options with which later connections of a listener begin. Fails unless the engine is in this
    /// thread.
    pub(crate) fn set_listener_options(
        &mut self,
        listener: Listener,
        options: &SocketOptions,
    ) -> Result<(), OptionError> {
        let stack = self.core.stack.local_mut().ok_or(OptionError::Stale)?;
        stack.set_listener_options(listener, options)
    }

    /// Sets the filter of a connection. Fails unless the engine is in this thread.
    pub(crate) fn set_filter(
        &mut self,
        conn: Conn,
        filter: Option<Arc<dyn SocketFilter>>,
    ) -> Result<(), OptionError> {
        self.core.stack.local_mut().ok_or(OptionError::Stale)?.set_filter(conn, filter)
    }

    /// Sets the filter of a listener. Fails unless the engine is in this thread.
    pub(crate) fn set_listener_filter(
        &mut self,
        listener: Listener,
        filter: Option<Arc<dyn SocketFilter>>,
    ) -> Result<(), OptionError> {
        self.core.stack.local_mut().ok_or(OptionError::Stale)?.set_listener_filter(listener, filter)
    }

    /// Sets the filter of a UDP socket. Fails unless the engine is in this thread.
    pub(crate) fn udp_set_filter(
        &mut self,
        socket: UdpHandle,
        filter: Option<Arc<dyn SocketFilter>>,
    ) -> Result<(), UdpError> {
        self.core.stack.local_mut().ok_or(UdpError::Stale)?.udp_set_filter(socket, filter)
    }

    /// Sets the program of the group of a listener. Fails unless the engine is in this thread.
    pub(crate) fn set_group_program(
        &mut self,
        listener: Listener,
        program: Option<Arc<dyn SocketFilter>>,
        is_first: bool,
    ) -> Result<(), GroupError> {
        let stack = self.core.stack.local_mut().ok_or(GroupError::Stale)?;
        stack.set_group_program(listener, program, is_first)
    }

    /// Sets the program of the group of a UDP socket. Fails unless the engine is in this thread.
    pub(crate) fn udp_set_group_program(
        &mut self,
        socket: UdpHandle,
        program: Option<Arc<dyn SocketFilter>>,
        is_first: bool,
    ) -> Result<(), GroupError> {
        let stack = self.core.stack.local_mut().ok_or(GroupError::Stale)?;
        stack.udp_set_group_program(socket, program, is_first)
    }

    /// Returns the filter of a connection.
    pub(crate) fn filter(&self, conn: Conn) -> Option<&dyn SocketFilter> {
        self.core.stack.local()?.filter(conn)
    }

    /// Returns the filter of a listener.
    pub(crate) fn listener_filter(&self, listener: Listener) -> Option<&dyn SocketFilter> {
        self.core.stack.local()?.listener_filter(listener)
    }

    /// Returns the filter of a UDP socket.
    pub(crate) fn udp_filter(&self, socket: UdpHandle) -> Option<&dyn SocketFilter> {
        self.core.stack.local()?.udp_filter(socket)
    }

    /// Returns the headers of the SYN that began a connection, if its listener saves them
    /// ([`SocketOptions::save_syn`]); empty if there are none, or the engine is in another thread. The engine
    /// discards them if they fit into `max_len` bytes.
    pub fn saved_syn(&mut self, conn: Conn, max_len: usize) -> Vec<u8> {
        let Some(stack) = self.core.stack.local_mut() else { return Vec::new() };
        let bytes = stack.saved_syn(conn).unwrap_or_default().to_vec();
        if bytes.len() <= max_len {
            stack.drop_saved_syn(conn);
        }
        bytes
    }

    /// Stops listening, on all shards. Accepted connections continue; connections in the accept queue are
    /// reset.
    pub fn unlisten(&mut self, listener: Listener) -> Result<(), Stale> {
        if self.core.unlisten(listener) { Ok(()) } else { Err(Stale::Handle) }
    }

    /// Accepts the oldest connection in the accept queue, if there is one; with `[priority]` in use, the
    /// oldest one of the highest class, except that lower classes get their share. For handlers that
    /// [pull](crate::Handler::is_pulling), and for connections left there by
    /// [`may_accept`](crate::Handler::may_accept); otherwise the shard accepts and calls
    /// [`accepted`](crate::Handler::accepted).
    pub fn accept(&mut self, listener: Listener) -> Option<Conn> {
        self.core.stack.accept(listener)
    }

    /// As [`Context::accept`]. Returns the class of the connection, too.
    pub(crate) fn accept_with_class(&mut self, listener: Listener) -> Option<(Conn, u8)> {
        self.core.stack.accept_with_class(listener)
    }

    /// Reads and consumes received bytes; `Ok(0)` is the end of the stream. For handlers that
    /// [pull](crate::Handler::is_pulling).
    pub fn recv(&mut self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        self.core.stack.recv(conn, out)
    }

    /// Returns received bytes where the engine has them, without consuming them: from `offset` bytes after
    /// the first unread one on, as many as are contiguous in memory. Empty at the end of the stream. For
    /// handlers that [pull](crate::Handler::is_pulling).
    ///
    /// # Errors
    /// See [`RecvError`]; [`RecvError::Stale`] also if the engine is in another thread.
    pub fn peek(&self, conn: Conn, offset: usize) -> Result<&[u8], RecvError> {
        self.core.stack.local().ok_or(RecvError::Stale)?.peek_at(conn, offset)
    }

    /// Consumes `count` of the bytes that [`peek`](Self::peek) returns for increasing offsets. Returns false,
    /// and consumes nothing, if there are fewer.
    ///
    /// # Errors
    /// The handle is stale, or the engine is in another thread.
    pub fn consume(&mut self, conn: Conn, count: usize) -> Result<bool, Stale> {
        self.core.stack.local_mut().ok_or(Stale::Handle)?.consume_peeked(conn, count)
    }

    /// Takes bytes that arrived before bytes which precede them in the stream; see
    /// [`Stack::recv_unordered`](ginnel_stack::stack::Stack::recv_unordered). For handlers that
    /// [pull](crate::Handler::is_pulling), and for bytes that arrive while the handler runs.
    pub fn recv_unordered(&mut self, conn: Conn, out: &mut [u8]) -> Result<Option<UnorderedBytes>, Stale> {
        self.core.stack.recv_unordered(conn, out)
    }

    /// Returns whether [`Context::recv_unordered`] could take bytes.
    pub(crate) fn has_unordered(&self, conn: Conn) -> bool {
        self.core.stack.local().is_some_and(|stack| stack.next_unordered(conn).is_some())
    }

    /// Returns how many bytes [`Context::recv`] could read.
    pub fn unread(&self, conn: Conn) -> usize {
        self.core.stack.buffered(conn)
    }

    /// Takes a datagram, cut off at the length of `out`. A pending error is returned first. For handlers that
    /// [pull](crate::Handler::is_pulling).
    pub fn udp_recv(&mut self, socket: UdpHandle, out: &mut [u8]) -> Result<Datagram, UdpError> {
        self.core.stack.udp_recv_from(socket, out)
    }

    /// Returns a handle through which other threads send commands to this shard.
    pub fn commander(&self) -> Commander {
        self.core.commander.clone()
    }

    /// Opens a connection. [`connected`](crate::Handler::connected) or [`closed`](crate::Handler::closed)
    /// follows.
    ///
    /// # Errors
    /// Why no SYN can be sent; [`AddressNotAvailable`](crate::ConnectError::AddressNotAvailable) also on a
    /// shard that does not serve the link towards `remote`, if its device has `shards`.
    pub fn connect(&mut self, remote: SocketAddr, options: ConnectOptions) -> Result<Conn, Error> {
        self.core.stack.connect(self.core.now, remote, &options).map_err(|e| Error::Connect(remote, e))
    }

    /// Opens a connection fast (RFC 7413): the SYN carries the first of `data` if the peer has given a cookie
    /// before, and otherwise requests one. Returns the connection and how many bytes were queued; later bytes
    /// follow with [`send`](Self::send).
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_with_data(
        &mut self,
        remote: SocketAddr,
        options: ConnectOptions,
        data: &[u8],
    ) -> Result<(Conn, usize), Error> {
        let socket = SocketOptions { fastopen_connect: true, ..options.socket };
        let conn = self.connect(remote, ConnectOptions { socket, ..options })?;
        // A new connection takes data.
        let queued = self.send(conn, data).unwrap_or(0);
        self.send_deferred_syn(conn);
        Ok((conn, queued))
    }

    /// See [`Stack::syn_data_max`](ginnel_stack::stack::Stack::syn_data_max).
    pub(crate) fn syn_data_max(&self, conn: Conn) -> Option<u16> {
        self.core.stack.local().and_then(|stack| stack.syn_data_max(conn))
    }

    /// Sends a deferred SYN now, with what is queued.
    pub(crate) fn send_deferred_syn(&mut self, conn: Conn) {
        let now = self.core.now;
        self.core.stack.send_deferred_syn(now, conn);
    }

    /// See [`Stack::can_open_fast`](ginnel_stack::stack::Stack::can_open_fast).
    pub(crate) fn can_open_fast(&self) -> bool {
        self.core.stack.local().is_some_and(|stack| stack.can_open_fast())
    }

    /// Queues a copy of as many of `bytes` as there is space for, and returns how many. After a short send
    /// [`writable`](crate::Handler::writable) follows when there is space again.
    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        self.core.stack.send(conn, bytes)
    }

    /// Queues `len` bytes, which `fill` writes directly into the send buffer: see
    /// [`Stack::send_with`](ginnel_stack::stack::Stack::send_with). Where the engine is in another thread,
    /// `fill` may be asked for more bytes than are queued.
    #[inline]
    pub fn send_with(
        &mut self,
        conn: Conn,
        len: usize,
        continues: bool,
        fill: impl FnMut(usize, &mut [u8]),
    ) -> Result<usize, SendError> {
        self.core.stack.send_with(conn, len, continues, fill)
    }

    /// See [`Stack::end_record`](ginnel_stack::stack::Stack::end_record).
    pub(crate) fn end_record(&mut self, conn: Conn) {
        if let Some(stack) = self.core.stack.local_mut() {
            stack.end_record(conn);
        }
    }

    /// See [`Stack::push_before_held`](ginnel_stack::stack::Stack::push_before_held).
    pub(crate) fn push_before_held(&mut self, conn: Conn) {
        if let Some(stack) = self.core.stack.local_mut() {
            stack.push_before_held(conn);
        }
    }

    /// See [`Stack::sendable_within`](ginnel_stack::stack::Stack::sendable_within).
    pub(crate) fn sendable_within(&mut self, conn: Conn, len: u32, unsent_max: u32, unacked_max: u32) -> u32 {
        self.core
            .stack
            .local_mut()
            .map_or(len, |stack| stack.sendable_within(conn, len, unsent_max, unacked_max))
    }

    /// Queues a message with a priority (0 to 7, see [`ginnel_stack::priority`]; higher values count as 7).
    /// Queued messages of lower priority of which no byte was sent leave after it. All or nothing: after
    /// [`SendError::Full`] nothing was queued, and [`writable`](crate::Handler::writable) follows.
    ///
    /// The peer, whichever TCP it runs, receives a contiguous stream of whole messages. Within a priority
    /// they keep their order. Bytes queued by other calls are no messages: messages queued later follow them.
    /// Where the engine is in another thread, messages are sent in the order of the calls.
    pub fn send_message(&mut self, conn: Conn, bytes: &[u8], priority: u8) -> Result<(), SendError> {
        self.core.stack.send_message(conn, bytes, priority)
    }

    /// Queues `len` bytes of a source, beginning at `offset`, without copying them. All or nothing: after
    /// [`SendError::Full`] nothing was queued, and [`writable`](crate::Handler::writable) follows.
    pub fn send_source(&mut self, conn: Conn, id: SourceId, offset: u64, len: u64) -> Result<(), SendError> {
        self.core.stack.send_source(conn, id, offset, len)
    }

    /// Queues as many bytes of a source as there is space for, without copying them: see
    /// [`Stack::send_source_partial`](ginnel_stack::stack::Stack::send_source_partial). Fails unless the
    /// engine is in this thread.
    pub(crate) fn send_source_partial(
        &mut self,
        conn: Conn,
        id: SourceId,
        offset: u64,
        len: usize,
    ) -> Result<usize, SendError> {
        self.core
            .stack
            .local_mut()
            .map_or(Err(SendError::Stale), |stack| stack.send_source_partial(conn, id, offset, len))
    }

    /// See [`Stack::privatize`](ginnel_stack::stack::Stack::privatize).
    pub(crate) fn privatize(&mut self, conn: Conn, len: u64) -> u64 {
        self.core.stack.local_mut().map_or(0, |stack| stack.privatize(conn, len))
    }

    /// Returns whether the engine is in this thread.
    pub(crate) fn is_engine_local(&self) -> bool {
        self.core.stack.local().is_some()
    }

    /// See [`Stack::request_writable`](ginnel_stack::stack::Stack::request_writable).
    pub(crate) fn request_writable(&mut self, conn: Conn) {
        if let Some(stack) = self.core.stack.local_mut() {
            stack.request_writable(conn);
        }
    }

    /// See [`Stack::set_ack_events`](ginnel_stack::stack::Stack::set_ack_events).
    pub(crate) fn set_ack_events(&mut self, conn: Conn, on: bool) {
        if let Some(stack) = self.core.stack.local_mut() {
            stack.set_ack_events(conn, on);
        }
    }

    /// See [`Stack::notsent`](ginnel_stack::stack::Stack::notsent).
    pub(crate) fn notsent(&self, conn: Conn) -> u32 {
        self.core.stack.local().map_or(0, |stack| stack.notsent(conn))
    }

    /// See [`Stack::queued`](ginnel_stack::stack::Stack::queued).
    pub(crate) fn queued(&self, conn: Conn) -> u64 {
        self.core.stack.local().map_or(0, |stack| stack.queued(conn))
    }

    /// Queues bytes of which the last is urgent (`MSG_OOB`). Otherwise like [`Context::send`].
    pub fn send_urgent(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        self.core.stack.send_urgent(conn, bytes)
    }

    /// Takes the urgent byte, if it arrived and does not stay in the stream ([`TcpOption::OobInline`]).
    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        self.core.stack.recv_urgent(conn)
    }

    /// Sets how many delivered bytes the application has not read yet; they reduce the advertised window
    /// until the next call.
    pub(crate) fn set_unread(&mut self, conn: Conn, bytes: u32) {
        if let Some(stack) = self.core.stack.local_mut() {
            // Only a stale handle can be refused.
            let _ = stack.set_unread(conn, bytes);
        }
    }

    /// Registers a source of bytes. It lives until it is released and no connection needs it any more.
    pub fn add_source(&mut self, source: Box<dyn Source>) -> SourceId {
        self.core.stack.add_source(source)
    }

    /// Releases a source. Ranges already queued are still sent. Returns false if it was released before.
    pub fn release_source(&mut self, id: SourceId) -> bool {
        self.core.stack.release_source(id)
    }

    /// Sends FIN after what is queued; receiving continues.
    pub fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale> {
        self.core.stack.shutdown_write(conn)
    }

    /// Closes both directions: what is queued is still sent, then FIN. If received bytes were neither
    /// consumed nor are being delivered, the connection is reset, as on Linux.
    /// [`closed`](crate::Handler::closed) follows.
    pub fn close(&mut self, conn: Conn) -> Result<(), Stale> {
        if let Some((_, len)) = self.core.delivering.take_if(|(shown, _)| *shown == conn) {
            self.core.stack.skip(conn, len)?;
        }
        self.core.stack.close(conn)
    }

    /// Sends what is queued as far as the windows allow, then RST, and discards the rest.
    /// [`closed`](crate::Handler::closed) follows.
    pub fn abort(&mut self, conn: Conn) -> Result<(), Stale> {
        self.core.stack.abort(conn)
    }

    /// Sets an option of a connection.
    pub fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError> {
        self.core.stack.set_option(conn, option)
    }

    /// Sets the priority with which a connection's segments are sent: 0 (the default) to 7, in the order of
    /// [`ginnel_stack::priority`] (`SO_PRIORITY`). Equivalent to [`TcpOption::Priority`]; UDP sockets have
    /// [`UdpOptions::priority`].
    pub fn set_priority(&mut self, conn: Conn, priority: u8) -> Result<(), OptionError> {
        self.set_option(conn, TcpOption::Priority(priority))
    }

    /// Returns what is known about a connection.
    pub fn info(&self, conn: Conn) -> Result<TcpInfo, Stale> {
        self.core.stack.info(conn).ok_or(Stale::Handle)
    }

    /// Returns the sizes of a connection's receive and send buffer in the engine. `None` if the handle is
    /// stale, or the engine is not in this thread.
    pub(crate) fn buffer_limits(&self, conn: Conn) -> Option<BufferLimits> {
        self.core.stack.local()?.buffer_limits(conn)
    }

    /// See [`Stack::has_grown_window`](ginnel_stack::stack::Stack::has_grown_window). True if the engine is
    /// not in this thread.
    pub(crate) fn has_grown_window(&self, conn: Conn) -> bool {
        self.core.stack.local().is_none_or(|stack| stack.has_grown_window(conn))
    }

    /// Returns the local and the peer's address.
    pub fn endpoints(&self, conn: Conn) -> Result<[SocketAddr; 2], Stale> {
        self.core.stack.endpoints(conn).ok_or(Stale::Handle)
    }

    /// Returns the state of a connection.
    pub fn state(&self, conn: Conn) -> Result<State, Stale> {
        self.core.stack.state(conn).ok_or(Stale::Handle)
    }

    /// Stores a number of the application with the connection.
    pub fn set_token(&mut self, conn: Conn, token: u32) -> Result<(), Stale> {
        if self.core.stack.set_token(conn, token) { Ok(()) } else { Err(Stale::Handle) }
    }

    /// Returns the number that was stored last; 0 if none was.
    pub fn token(&self, conn: Conn) -> Result<u32, Stale> {
        match self.core.closing {
            Some((closing, token)) if closing == conn => Ok(token),
            _ => self.core.stack.token(conn).ok_or(Stale::Handle),
        }
    }

    /// Makes the shard call [`data`](crate::Handler::data) once more with the bytes that it left unconsumed,
    /// after this call returns.
    pub fn resume_reading(&mut self, conn: Conn) {
        self.core.resume_reading.push(conn);
    }

    /// Sends the datagrams that are concatenated in `data`: each has `gso_size` bytes, except that the last
    /// may be shorter. They go to the connected peer if no destination is given, and from `source` if that is
    /// one of the stack's addresses. A device with segmentation offload gets them in one piece.
    ///
    /// # Errors
    /// As [`Context::udp_send`]; [`UdpError::TooLong`] also if a datagram does not fit into a packet of the
    /// path, if all of them together do not fit into one datagram, or if they are more than 128.
    pub fn udp_send_segments(
        &mut self,
        socket: UdpHandle,
        source: Option<IpAddr>,
        to: Option<SocketAddr>,
        data: &[u8],
        gso_size: u16,
    ) -> Result<(), UdpError> {
        self.udp_send_with(socket, &UdpSendParams { to, source, gso_size, ..UdpSendParams::default() }, data)
    }

    /// Sends a datagram, or several, with parameters that are valid for this call alone.
    ///
    /// # Errors
    /// As [`Context::udp_send_segments`].
    pub fn udp_send_with(
        &mut self,
        socket: UdpHandle,
        sending: &UdpSendParams,
        data: &[u8],
    ) -> Result<(), UdpError> {
        self.core.stack.udp_send_with(self.core.now, socket, sending, data)
    }

    /// Takes the oldest entry of a socket's error queue: the error, its origin, and as much of the datagram
    /// as is known and fits into `out`. Only sockets that request it have an error queue
    /// ([`UdpOptions::recverr_v4`], [`UdpOptions::recverr_v6`]).
    ///
    /// # Errors
    /// Returns [`UdpError::WouldBlock`] if there is none, and [`UdpError::Stale`].
    pub fn udp_take_report(
        &mut self,
        socket: UdpHandle,
        out: &mut [u8],
    ) -> Result<UdpExtendedError, UdpError> {
        self.core.stack.udp_take_report(socket, out)
    }

    /// Returns the bytes of the largest IP packet that reaches the connected peer without fragmentation, as
    /// far as known.
    ///
    /// # Errors
    /// Returns [`UdpError::NoDestination`] if the socket is not connected, an error if there is no route any
    /// more, and [`UdpError::Stale`].
    pub fn udp_path_mtu(&mut self, socket: UdpHandle) -> Result<u16, UdpError> {
        self.core.stack.udp_path_mtu(self.core.now, socket)
    }

    /// Takes the pending error of a socket, if it was not reported yet.
    pub(crate) fn udp_take_error(&mut self, socket: UdpHandle) -> Option<UdpError> {
        self.core.stack.udp_take_error(socket)
    }

    /// Returns whether this shard serves the device of a local address: always, unless devices have `shards`.
    /// A UDP socket of another shard works as well, but its datagrams cross.
    pub fn serves(&self, local: IpAddr) -> bool {
        self.core.stack.local().is_none_or(|stack| stack.network().serves(local))
    }

    /// Returns whether this shard serves the device of `local`, unless it is unspecified, and the one by
    /// which packets to `to` leave.
    pub(crate) fn serves_path(&self, local: IpAddr, to: Option<IpAddr>) -> bool {
        let now = self.core.now;
        let Some(stack) = self.core.stack.local() else { return true };
        let network = stack.network();
        network.serves(local)
            && to.filter(|_| local.is_unspecified()).is_none_or(|to| network.serves_route(now, to))
    }

    /// Opens a UDP socket. For port 0 the stack chooses a port ([`Context::udp_local`] returns it); the
    /// unspecified address means all addresses of the stack.
    ///
    /// If there are several shards, the one that binds gets all datagrams of the port. Shards that bind the
    /// same port with `reuse_port` share them by sender.
    pub fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> Result<UdpHandle, UdpError> {
        self.core.udp_bind(local, options)
    }

    /// Connects a UDP socket to a peer: from now on it receives only datagrams and errors from that peer.
    pub fn udp_connect(&mut self, socket: UdpHandle, remote: SocketAddr) -> Result<(), UdpError> {
        self.core.udp_connect(socket, remote)
    }

    /// Sends a datagram, to the connected peer if no destination is given. A pending error is reported first.
    pub fn udp_send(
        &mut self,
        socket: UdpHandle,
        to: Option<SocketAddr>,
        data: &[u8],
    ) -> Result<(), UdpError> {
        self.core.stack.udp_send_to(self.core.now, socket, to, data)
    }

    /// Replies to a datagram from the address to which it was sent, even if the socket is bound to all
    /// addresses of the stack. A datagram to a multicast or broadcast address is answered from the address
    /// that source address selection prefers.
    pub fn udp_reply(&mut self, socket: UdpHandle, to: &Datagram, data: &[u8]) -> Result<(), UdpError> {
        let now = self.core.now;
        self.core.stack.udp_reply(now, socket, to, data)
    }

    /// Sets the options of a UDP socket. `v6only` keeps the value that it had when the socket was bound;
    /// `reuse_address` and `reuse_port` concern sockets that are bound later.
    pub fn udp_set_options(&mut self, socket: UdpHandle, options: UdpOptions) -> Result<(), UdpError> {
        self.core.stack.udp_set_options(socket, options)
    }

    /// Sets the filter with which a UDP socket receives a group on a link; `None` leaves the group. The link
    /// is the number of an entry of the configuration's list, from 0.
    ///
    /// # Errors
    /// Returns [`UdpError::InvalidAddress`] if there is no such link, the group is not a multicast address,
    /// or a source is of another family; [`UdpError::NoBuffers`] if the socket has joined
    /// `network.igmp_max_memberships` groups or the filter has more than `network.igmp_max_msf` sources (for
    /// IPv6 `mld_max_memberships` and `mld_max_msf`), or the sockets of the shard together have
    /// `network.group_memberships_max`; and [`UdpError::Stale`].
    pub fn udp_set_membership(
        &mut self,
        socket: UdpHandle,
        link: LinkId,
        group: IpAddr,
        filter: Option<SourceFilter>,
    ) -> Result<(), UdpError> {
        self.core.udp_set_membership(socket, link, group, filter)
    }

    /// Returns the link by which a group is reached if the program names none: by the routes, otherwise the
    /// first link with an address of the family. `None` also where the engine is in another thread.
    pub fn link_of_group(&self, group: IpAddr) -> Option<LinkId> {
        self.core.stack.local()?.network().link_of_group(group)
    }

    /// Returns the result of [`Context::link_of_group`], and the limits of memberships.
    pub(crate) fn link_and_limits(&self, group: IpAddr) -> (Option<LinkId>, MembershipLimits) {
        let network = self.core.stack.local().map(ginnel_stack::stack::Stack::network);
        let limits = network.map_or_else(
            || ginnel_stack::ip::NetworkConfig::default().membership_limits(),
            |network| network.config().membership_limits(),
        );
        (self.link_of_group(group), limits)
    }

    /// Returns the local address of a UDP socket.
    pub fn udp_local(&mut self, socket: UdpHandle) -> Result<SocketAddr, UdpError> {
        self.core.stack.udp_local(socket)
    }

    /// Closes a UDP socket.
    pub fn udp_close(&mut self, socket: UdpHandle) -> Result<(), UdpError> {
        self.core.udp_close(socket)
    }

    /// Returns the index of this shard, from 0.
    pub fn shard(&self) -> usize {
        self.core.shard_and_worker.0.into()
    }

    /// Returns the index of this worker of the shard (`shard.workers`), from 0.
    pub fn worker(&self) -> usize {
        self.core.shard_and_worker.1.into()
    }

    /// Returns whether an address belongs to this stack. False for an application that is not in its stack's
    /// shard, to which the addresses are not known.
    pub(crate) fn is_local(&self, address: core::net::IpAddr) -> bool {
        self.core.stack.local().is_some_and(|stack| stack.network().is_local(address))
    }

    /// Returns whether a connection of this shard prevents a socket with these options from being bound.
    pub(crate) fn prevents_bind(
        &self,
        address: core::net::SocketAddr,
        v6_only: bool,
        sharing: ginnel_stack::options::PortSharing,
    ) -> bool {
        self.core.stack.local().is_some_and(|stack| stack.prevents_bind(address, v6_only, sharing))
    }

    /// Returns the range of ephemeral ports of UDP sockets; `0..=0` where the engine is in another thread.
    pub(crate) fn local_udp_ports(&self) -> core::ops::RangeInclusive<u16> {
        self.core.stack.local().map_or(0..=0, ginnel_stack::stack::Stack::local_udp_ports)
    }

    /// Returns the range of ephemeral ports; `0..=0` where the engine is in another thread.
    pub(crate) fn local_ports(&self) -> core::ops::RangeInclusive<u16> {
        self.core.stack.local().map_or(0..=0, ginnel_stack::stack::Stack::local_ports)
    }

    /// Sets a timer that calls [`timer`](crate::Handler::timer) once with `token`, `after` from now (rounded
    /// up by at most [`TIMER_TICK`](crate::timers::TIMER_TICK)). `None` if `shard.timers_max` timers are set
    /// already.
    pub fn set_timer(&mut self, after: Duration, token: u64) -> Option<Timer> {
        self.core.timers.set(self.core.now + after, token)
    }

    /// Sets a timer that calls [`timer`](crate::Handler::timer) once with `token`, in the first turn that
    /// begins at `at` or later, without rounding. Shortly before that time the shard polls instead of
    /// sleeping (except with `paired` placement). Costs O(log n) in the number of such timers.
    pub fn set_exact_timer(&mut self, at: Instant, token: u64) -> Option<Timer> {
        self.core.timers.set_exact(at, token)
    }

    /// Cancels a timer. Returns false if it has expired already.
    pub fn cancel_timer(&mut self, timer: Timer) -> bool {
        self.core.timers.cancel(timer)
    }

    /// Watches a kernel descriptor, such as a pipe or a Unix socket, from now on:
    /// [`kernel_ready`](crate::Handler::kernel_ready) is called with `token`. The descriptor should be
    /// non-blocking. It stays the caller's, who deregisters it before closing it.
    ///
    /// # Errors
    /// Returns those of `epoll_ctl(2)`: `EEXIST` if it is registered already, `EPERM` for regular files,
    /// `ENOSPC` and `ENOMEM`; `EMFILE` if the first registration cannot create an epoll instance.
    pub fn register_kernel_fd(
        &mut self,
        fd: impl AsFd,
        interest: Interest,
        token: u64,
    ) -> std::io::Result<KernelFd> {
        Ok(KernelFds::register(&mut self.core.kernel_fds, fd.as_fd(), interest, token)?)
    }

    /// Changes what is reported about a kernel descriptor. A state that lasts is reported again, also if it
    /// is [edge-triggered](Interest::edge_triggered).
    ///
    /// # Errors
    /// `ENOENT` if the handle is stale, `EBADF` if the descriptor was closed.
    pub fn modify_kernel_fd(&mut self, handle: KernelFd, interest: Interest) -> std::io::Result<()> {
        let fds = self.core.kernel_fds.as_mut().ok_or(rustix::io::Errno::NOENT)?;
        Ok(fds.modify(handle, interest)?)
    }

    /// Stops watching a kernel descriptor. Nothing is reported about it any more, not even what the shard
    /// has found already.
    pub fn deregister_kernel_fd(&mut self, handle: KernelFd) -> Result<(), Stale> {
        self.core.kernel_fds.as_mut().ok_or(Stale::Handle)?.deregister(handle)
    }

    /// Returns the shard's counters.
    pub fn stats(&self) -> &ShardStats {
        &self.core.stats
    }

    /// Returns the counters of TCP.
    pub fn tcp_stats(&self) -> &TcpStats {
        self.core.stack.tcp_stats()
    }

    /// Returns the counters of the network layer.
    pub fn network_stats(&self) -> NetworkStats {
        self.core.stack.network_stats()
    }

    /// Returns the received frames that the network layer dropped, by reason.
    pub fn network_drops(&self) -> &DropStats {
        self.core.stack.network_drops()
    }

    /// Returns the links of the stack, as a host would list its interfaces. Empty where the engine is in
    /// another thread.
    pub(crate) fn links(&self) -> impl Iterator<Item = LinkView<'_>> {
        self.core.stack.local().into_iter().flat_map(|stack| stack.network().link_views())
    }

    /// Returns a random number: unpredictable from outside, reproducible in a simulation.
    pub fn random_u64(&mut self) -> u64 {
        self.core.rng.next_u64()
    }

    /// Ends the shard after this turn. Connections that are still open are dropped without FIN or RST, so
    /// close them first where it matters.
    pub fn stop(&mut self) {
        self.core.is_stopping = true;
        self.core.save_request = None;
    }
}
