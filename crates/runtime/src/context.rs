//! What a handler can do.

use crate::command::Commander;
use crate::engine::Engine;
use crate::error::Error;
use crate::shard_router::ShardRouter;
use crate::stats::ShardStats;
use crate::timers::{Timer, Timers};
use core::net::{IpAddr, SocketAddr};
use core::ops::{Deref, DerefMut};
use core::time::Duration;
use ginnel_devices::random::Random;
use ginnel_stack::device::RxBurst;
use ginnel_stack::error::{ListenError, OptionError, RecvError, SendError, Stale};
use ginnel_stack::handle::{Conn, Listener, PortId, UdpHandle};
use ginnel_stack::ip::{DropStats, LinkView, NetworkStats};
use ginnel_stack::options::{ConnectOptions, ListenOptions, SocketOptions, TcpInfo, TcpOption};
use ginnel_stack::stack::Stack;
use ginnel_stack::tcp::TcpStats;
use ginnel_stack::tcp::source::{Source, SourceId};
use ginnel_stack::tcp::state::State;
use ginnel_stack::time::Instant;
use ginnel_stack::udp::{Datagram, UdpError, UdpExtendedError, UdpOptions, UdpSendParams};

/// Everything of a shard but its devices and its handler.
pub(crate) struct ShardCore {
    pub(crate) now: Instant,
    pub(crate) stack: Engine,
    pub(crate) timers: Timers,
    pub(crate) rng: Random,
    pub(crate) commander: Commander,
    pub(crate) stats: ShardStats,
    /// Connections whose handler wants to be shown what it left unread.
    pub(crate) resume_reading: Vec<Conn>,
    /// The connection whose `closed` is running, and its token.
    pub(crate) closing: Option<(Conn, u32)>,
    /// The connection whose handler is being shown buffered bytes, and how many. They count as read if it closes meanwhile, as they do where they lie in a frame.
    pub(crate) delivering: Option<(Conn, usize)>,
    pub(crate) is_stopping: bool,
    /// The other shards, if there are any.
    pub(crate) router: Option<Box<ShardRouter>>,
    /// Which of the shards this is, and which of its workers.
    pub(crate) shard_and_worker: (u8, u16),
}

/// What concerns all shards, if there are several.
impl ShardCore {
    pub(crate) fn listen(
        &mut self,
        local: SocketAddr,
        options: ListenOptions,
    ) -> Result<Listener, ListenError> {
        self.listen_as(local, options, false)
    }

    /// The same, but what another shard listens on is in use: for a port that was chosen.
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
        alone: bool,
    ) -> Result<Listener, ListenError> {
        let Self { stack, stats, router: peers, .. } = self;
        match (peers, stack) {
            (Some(peers), Engine::Local(stack)) => peers.listen(stack, stats, local, options, alone),
            (_, Engine::Channel(remote)) if alone => remote.listen_exclusive(local, options),
            (_, engine) => engine.listen(local, options),
        }
    }

    /// False if it was closed already.
    pub(crate) fn unlisten(&mut self, listener: Listener) -> bool {
        let Self { stack, stats, router: peers, .. } = self;
        match (peers, stack) {
            (Some(peers), Engine::Local(stack)) => peers.unlisten(stack, stats, listener),
            (_, engine) => engine.unlisten(listener),
        }
    }

    pub(crate) fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> Result<UdpHandle, UdpError> {
        let Self { stack, stats, router: peers, .. } = self;
        match (peers, stack) {
            (Some(peers), Engine::Local(stack)) => peers.udp_bind(stack, stats, local, options),
            (_, engine) => engine.udp_bind(local, options),
        }
    }

    pub(crate) fn udp_connect(&mut self, socket: UdpHandle, remote: SocketAddr) -> Result<(), UdpError> {
        self.stack.udp_connect(self.now, socket, remote)?;
        self.with_router(|peers, stack, stats| peers.udp_connected(stack, stats, socket, remote));
        Ok(())
    }

    pub(crate) fn udp_close(&mut self, socket: UdpHandle) -> Result<(), UdpError> {
        self.stack.udp_close(socket)?;
        self.with_router(|peers, stack, stats| peers.udp_closed(stack, stats, socket));
        Ok(())
    }

    /// Something about the other shards: what they are is lent beside the engine and the counters.
    pub(crate) fn with_router(&mut self, act: impl FnOnce(&mut ShardRouter, &mut Stack, &mut ShardStats)) {
        if let (Some(peers), Engine::Local(stack)) = (&mut self.router, &mut self.stack) {
            act(peers, stack, &mut self.stats);
        }
    }

    /// Takes a burst from a device: leaves in it what belongs to this shard, and sends the rest to the others.
    pub(crate) fn receive(&mut self, port: PortId, burst: &mut RxBurst<'_>) {
        let Self { stack: Engine::Local(stack), router: peers, stats, now, .. } = self else { return };
        let Some(peers) = peers else { return stack.receive(*now, port, burst) };
        peers.route(stack.network().steering(), port, burst, stats);
        stack.receive(*now, port, burst);
        let misdirected = stack.network_mut().take_misrouted();
        if misdirected != 0 {
            peers.redirect(stack.network().steering(), port, burst, misdirected, stats);
        }
    }
}

/// Where a shard keeps its core: in a box, so that [`Handler::work`](crate::Handler::work) can take it along for the time of its call.
pub(crate) struct CoreSlot(Option<Box<ShardCore>>);

impl CoreSlot {
    pub(crate) fn new(core: ShardCore) -> Self {
        Self(Some(Box::new(core)))
    }

    /// Takes the core away.
    pub(crate) fn take(&mut self) -> Box<ShardCore> {
        self.0.take().expect(CORE_NOT_RETURNED)
    }

    /// Brings it back.
    pub(crate) fn put(&mut self, core: Box<ShardCore>) {
        self.0 = Some(core);
    }
}

const CORE_NOT_RETURNED: &str = "whoever takes the core of a shard returns it";

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

/// What [`Handler::work`](crate::Handler::work) gets: the way to a context.
pub struct WorkContext<'a> {
    pub(crate) core: &'a mut CoreSlot,
}

impl WorkContext<'_> {
    /// The handler's way to its shard, as in all other calls.
    pub fn context(&mut self) -> Context<'_> {
        Context::new(self.core)
    }
}

/// A handler's way to its shard. Lent for one call.
pub struct Context<'a> {
    core: &'a mut ShardCore,
}

impl<'a> Context<'a> {
    pub(crate) fn new(core: &'a mut ShardCore) -> Self {
        Self { core }
    }

    /// See [`Stack::hold_quick_acks`](ginnel_stack::stack::Stack::hold_quick_acks). Nothing where the stack is another shard's.
    pub(crate) fn defer_quick_acks(&mut self, time: Duration) {
        if let Some(stack) = self.core.stack.local_mut() {
            stack.defer_quick_acks(time);
        }
    }

    /// The time of the current burst.
    pub fn now(&self) -> Instant {
        self.core.now
    }

    /// Listens on `local`; an unspecified address stands for all of the stack's. Port 0 is refused.
    ///
    /// Of several shards all listen when one does (but for `reuse_port`: then each for itself), and each serves the connections that arrive at it. Each may call this for the same address
    /// once, and so learn its own handle; the options are those of the first.
    pub fn listen(&mut self, local: SocketAddr, options: ListenOptions) -> Result<Listener, Error> {
        self.core.listen(local, options).map_err(|e| Error::Listen(local, e))
    }

    /// The same, but what another shard or worker listens on is in use: for a port that was chosen.
    pub(crate) fn listen_exclusive(
        &mut self,
        local: SocketAddr,
        options: ListenOptions,
    ) -> Result<Listener, Error> {
        self.core.listen_exclusive(local, options).map_err(|e| Error::Listen(local, e))
    }

    /// How many connections may wait at a listener, with those that were accepted here and are kept for others. The application of a shard that is reached through a
    /// channel has the channel's bounds.
    pub(crate) fn set_backlog(&mut self, listener: Listener, backlog: u32, kept: u32) {
        if let Some(stack) = self.core.stack.local_mut() {
            stack.set_backlog(listener, backlog, kept);
        }
    }

    /// What connections of a listener begin with from now on. Only where the engine is in this thread.
    pub(crate) fn set_listener_options(
        &mut self,
        listener: Listener,
        options: &SocketOptions,
    ) -> Result<(), OptionError> {
        let stack = self.core.stack.local_mut().ok_or(OptionError::Stale)?;
        stack.set_listener_options(listener, options)
    }

    /// The headers of the SYN that began a connection. They go if there is `room` for them.
    pub(crate) fn saved_syn(&mut self, conn: Conn, room: usize) -> Vec<u8> {
        let Some(stack) = self.core.stack.local_mut() else { return Vec::new() };
        let bytes = stack.saved_syn(conn).unwrap_or_default().to_vec();
        if bytes.len() <= room {
            stack.drop_saved_syn(conn);
        }
        bytes
    }

    /// Stops listening, on all shards. Connections already accepted go on, those still in the queue are reset.
    pub fn unlisten(&mut self, listener: Listener) -> Result<(), Stale> {
        if self.core.unlisten(listener) { Ok(()) } else { Err(Stale::Handle) }
    }

    /// Takes the first connection that waits to be accepted, if one does. For handlers that [pull](crate::Handler::pulls), or left it there
    /// ([`may_accept`](crate::Handler::may_accept)); for others this happens before [`accepted`](crate::Handler::accepted).
    pub fn accept(&mut self, listener: Listener) -> Option<Conn> {
        self.core.stack.accept(listener)
    }

    /// Takes received bytes; `Ok(0)` is the end of the stream. For handlers that [pull](crate::Handler::pulls).
    pub fn recv(&mut self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        self.core.stack.recv(conn, out)
    }

    /// Bytes that [`Context::recv`] has for a connection.
    pub fn unread(&self, conn: Conn) -> usize {
        self.core.stack.buffered(conn)
    }

    /// Takes a datagram, cut off where `out` ends. An error of an earlier one is reported first. For handlers that
    /// [pull](crate::Handler::pulls).
    pub fn udp_recv(&mut self, socket: UdpHandle, out: &mut [u8]) -> Result<Datagram, UdpError> {
        self.core.stack.udp_recv_from(socket, out)
    }

    /// The way into this shard for other threads.
    pub fn commander(&self) -> Commander {
        self.core.commander.clone()
    }

    /// Opens a connection. The outcome is [`connected`](crate::Handler::connected) or [`closed`](crate::Handler::closed).
    pub fn connect(&mut self, remote: SocketAddr, options: ConnectOptions) -> Result<Conn, Error> {
        self.core.stack.connect(self.core.now, remote, &options).map_err(|e| Error::Connect(remote, e))
    }

    /// Queues a copy of as many of `bytes` as there is room for, and returns how many. If that is less than all,
    /// [`writable`](crate::Handler::writable) follows when there is room again.
    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        self.core.stack.send(conn, bytes)
    }

    /// The same of `len` bytes that `fill` writes where they are kept: see [`Stack::send_with`](ginnel_stack::stack::Stack::send_with).
    #[inline]
    pub(crate) fn send_with(
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

    /// See [`Stack::room_below`](ginnel_stack::stack::Stack::room_below).
    pub(crate) fn sendable_within(&mut self, conn: Conn, len: u32, most: (u32, u32)) -> u32 {
        self.core.stack.local_mut().map_or(len, |stack| stack.sendable_within(conn, len, most))
    }

    /// Queues `len` bytes of a source from `offset` on, without copying them. All or nothing: [`SendError::Full`] means that nothing was
    /// queued and [`writable`](crate::Handler::writable) follows.
    pub fn send_source(&mut self, conn: Conn, id: SourceId, offset: u64, len: u64) -> Result<(), SendError> {
        self.core.stack.send_source(conn, id, offset, len)
    }

    /// The same of as many as there is room for: see [`Stack::send_lent`](ginnel_stack::stack::Stack::send_lent). Only to an engine in this thread.
    pub(crate) fn send_zero_copy(
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

    /// See [`Stack::own`](ginnel_stack::stack::Stack::own).
    pub(crate) fn privatize(&mut self, conn: Conn, len: u64) -> u64 {
        self.core.stack.local_mut().map_or(0, |stack| stack.privatize(conn, len))
    }

    /// Whether the engine is in this thread.
    pub(crate) fn is_engine_local(&self) -> bool {
        self.core.stack.local().is_some()
    }

    /// See [`Stack::await_acked`](ginnel_stack::stack::Stack::await_acked).
    pub(crate) fn await_acked(&mut self, conn: Conn) {
        if let Some(stack) = self.core.stack.local_mut() {
            stack.request_writable(conn);
        }
    }

    /// See [`Stack::not_sent`](ginnel_stack::stack::Stack::not_sent).
    pub(crate) fn not_sent(&self, conn: Conn) -> u32 {
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

    /// Says that so many of the bytes that were consumed lie with somebody who has not read them: they count against the window until it is said anew.
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

    /// Gives a source back. Ranges already queued are still sent.
    pub fn release_source(&mut self, id: SourceId) {
        // False only if it was given back before.
        let _ = self.core.stack.release_source(id);
    }

    /// Sends FIN after what is queued; receiving goes on.
    pub fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale> {
        self.core.stack.shutdown_write(conn)
    }

    /// Closes both directions: what is queued is still sent, then FIN. What was received and neither consumed nor is being shown makes it a reset, as on Linux.
    /// [`closed`](crate::Handler::closed) follows.
    pub fn close(&mut self, conn: Conn) -> Result<(), Stale> {
        if let Some((_, len)) = self.core.delivering.take_if(|(shown, _)| *shown == conn) {
            self.core.stack.skip(conn, len)?;
        }
        self.core.stack.close(conn)
    }

    /// Sends what is queued as far as the windows go, then RST, and forgets the rest. [`closed`](crate::Handler::closed) follows.
    pub fn abort(&mut self, conn: Conn) -> Result<(), Stale> {
        self.core.stack.abort(conn)
    }

    /// Sets one option of a connection.
    pub fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError> {
        self.core.stack.set_option(conn, option)
    }

    /// Lets a connection's segments go before those of others, or after them: 0, the usual one, to 7 in the order of [`ginnel_stack::priority`] (`SO_PRIORITY`). The same as
    /// [`TcpOption::Priority`]; UDP sockets have [`UdpOptions::priority`].
    pub fn set_priority(&mut self, conn: Conn, priority: u8) -> Result<(), OptionError> {
        self.set_option(conn, TcpOption::Priority(priority))
    }

    /// What is known about a connection.
    pub fn info(&self, conn: Conn) -> Result<TcpInfo, Stale> {
        self.core.stack.info(conn).ok_or(Stale::Handle)
    }

    /// How many bytes may wait in the engine to be read and to be sent. `None` if the handle is stale, or the engine is not in this thread.
    pub(crate) fn buffer_limits(&self, conn: Conn) -> Option<[u32; 2]> {
        self.core.stack.local()?.buffer_limits(conn)
    }

    /// Both ends of a connection: ours, the peer's.
    pub fn endpoints(&self, conn: Conn) -> Result<[SocketAddr; 2], Stale> {
        self.core.stack.endpoints(conn).ok_or(Stale::Handle)
    }

    /// The state of a connection.
    pub fn state(&self, conn: Conn) -> Result<State, Stale> {
        self.core.stack.state(conn).ok_or(Stale::Handle)
    }

    /// Stores a number of the application's with the connection.
    pub fn set_token(&mut self, conn: Conn, token: u32) -> Result<(), Stale> {
        if self.core.stack.set_token(conn, token) { Ok(()) } else { Err(Stale::Handle) }
    }

    /// The number stored last, 0 if none was.
    pub fn token(&self, conn: Conn) -> Result<u32, Stale> {
        match self.core.closing {
            Some((closing, token)) if closing == conn => Ok(token),
            _ => self.core.stack.token(conn).ok_or(Stale::Handle),
        }
    }

    /// Asks for what [`data`](crate::Handler::data) left unconsumed to be shown again, after this call returns.
    pub fn resume_reading(&mut self, conn: Conn) {
        self.core.resume_reading.push(conn);
    }

    /// Sends datagrams of `piece` bytes each, the last of which may have fewer, that stand one behind the other in `data`: to the socket's other end if none is given,
    /// and from `source` if that is one of the stack's addresses. A device that can cut them gets them in one piece.
    ///
    /// # Errors
    /// As [`Context::udp_send`]; [`UdpError::TooLong`] also if a piece does not fit into a packet of the path, all of them do not fit into one datagram, or
    /// they are more than 128.
    pub fn udp_send_segments(
        &mut self,
        socket: UdpHandle,
        source: Option<IpAddr>,
        to: Option<SocketAddr>,
        data: &[u8],
        piece: u16,
    ) -> Result<(), UdpError> {
        self.udp_send_with(
            socket,
            &UdpSendParams { to, source, gso_size: piece, ..UdpSendParams::default() },
            data,
        )
    }

    /// The same with whatever else there is to be said of these datagrams alone.
    ///
    /// # Errors
    /// As [`Context::udp_send_pieces`].
    pub fn udp_send_with(
        &mut self,
        socket: UdpHandle,
        sending: &UdpSendParams,
        data: &[u8],
    ) -> Result<(), UdpError> {
        self.core.stack.udp_send_with(self.core.now, socket, sending, data)
    }

    /// Takes the oldest report of an error about a socket's datagrams: what went wrong, who says so, and as much of the datagram as is known and `out` holds.
    /// There are some for sockets that want them ([`UdpOptions::reports_v4`], [`UdpOptions::reports_v6`]).
    ///
    /// # Errors
    /// [`UdpError::WouldBlock`] if there is none, [`UdpError::Stale`].
    pub fn udp_take_report(
        &mut self,
        socket: UdpHandle,
        out: &mut [u8],
    ) -> Result<UdpExtendedError, UdpError> {
        self.core.stack.udp_take_report(socket, out)
    }

    /// Bytes of the largest IP packet that gets to a socket's other end in one piece, as far as is known.
    ///
    /// # Errors
    /// [`UdpError::NoDestination`] if the other end is not fixed; there is no route to it any more; [`UdpError::Stale`].
    pub fn udp_path_mtu(&mut self, socket: UdpHandle) -> Result<u16, UdpError> {
        self.core.stack.udp_path_mtu(self.core.now, socket)
    }

    /// Takes the error that is pending on a socket and was not told yet.
    pub(crate) fn udp_take_error(&mut self, socket: UdpHandle) -> Option<UdpError> {
        self.core.stack.udp_take_error(socket)
    }

    /// Opens a UDP socket. Port 0 chooses one ([`Context::udp_local`] tells which); an unspecified address stands for all of the stack's.
    ///
    /// Of several shards the one that binds gets all datagrams of the port. Shards that bind the same port with `reuse_port` share them by sender.
    pub fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> Result<UdpHandle, UdpError> {
        self.core.udp_bind(local, options)
    }

    /// Fixes the other end of a UDP socket: only its datagrams and errors are received from now on.
    pub fn udp_connect(&mut self, socket: UdpHandle, remote: SocketAddr) -> Result<(), UdpError> {
        self.core.udp_connect(socket, remote)
    }

    /// Sends a datagram, to the connected end if no other is given. An error of an earlier datagram is reported first.
    pub fn udp_send(
        &mut self,
        socket: UdpHandle,
        to: Option<SocketAddr>,
        data: &[u8],
    ) -> Result<(), UdpError> {
        self.core.stack.udp_send_to(self.core.now, socket, to, data)
    }

    /// Answers a datagram from the address it was sent to, be the socket bound to all of the stack's; what was sent to a group is answered from
    /// the address that is best for the way back.
    pub fn udp_reply(&mut self, socket: UdpHandle, to: &Datagram, data: &[u8]) -> Result<(), UdpError> {
        let now = self.core.now;
        self.core.stack.udp_reply(now, socket, to, data)
    }

    /// Changes how a UDP socket behaves. What concerns binding has no effect any more.
    pub fn udp_set_options(&mut self, socket: UdpHandle, options: UdpOptions) -> Result<(), UdpError> {
        self.core.stack.udp_set_options(socket, options)
    }

    /// Our end of a UDP socket.
    pub fn udp_local(&mut self, socket: UdpHandle) -> Result<SocketAddr, UdpError> {
        self.core.stack.udp_local(socket)
    }

    /// Closes a UDP socket.
    pub fn udp_close(&mut self, socket: UdpHandle) -> Result<(), UdpError> {
        self.core.udp_close(socket)
    }

    /// Which shard this is, from 0.
    pub fn shard(&self) -> usize {
        self.core.shard_and_worker.0.into()
    }

    /// Which of the shard's workers (`shard.workers`) this is, from 0.
    pub fn worker(&self) -> usize {
        self.core.shard_and_worker.1.into()
    }

    /// Whether an address is one of this stack's. Not known to an application beside its shard, for which none is.
    pub(crate) fn is_local(&self, address: core::net::IpAddr) -> bool {
        self.core.stack.local().is_some_and(|stack| stack.network().is_local(address))
    }

    /// Ports that the stack chooses from.
    pub(crate) fn local_ports(&self) -> core::ops::RangeInclusive<u16> {
        self.core.stack.local().map_or(0..=0, ginnel_stack::stack::Stack::local_ports)
    }

    /// Calls [`timer`](crate::Handler::timer) with `token` once, `after` from now (rounded up, by at most
    /// [`TIMER_TICK`](crate::timers::TIMER_TICK)). `None` if `shard.timers_max` timers are set already.
    pub fn set_timer(&mut self, after: Duration, token: u64) -> Option<Timer> {
        self.core.timers.set(self.core.now + after, token)
    }

    /// Calls [`timer`](crate::Handler::timer) with `token` once, in the first turn that begins at `at` or later, without rounding. For what
    /// must happen at a given moment: shortly before it the shard polls instead of sleeping (but not with `paired`). Costs O(log n) in the number of such timers.
    pub fn set_exact_timer(&mut self, at: Instant, token: u64) -> Option<Timer> {
        self.core.timers.set_exact(at, token)
    }

    /// Takes a timer back. False if it has run out already.
    pub fn cancel_timer(&mut self, timer: Timer) -> bool {
        self.core.timers.cancel(timer)
    }

    /// What the shard has counted.
    pub fn stats(&self) -> &ShardStats {
        &self.core.stats
    }

    /// What TCP has counted.
    pub fn tcp_stats(&self) -> &TcpStats {
        self.core.stack.tcp_stats()
    }

    /// What the network layer has counted.
    pub fn network_stats(&self) -> &NetworkStats {
        self.core.stack.network_stats()
    }

    /// Received frames that the network layer dropped, by reason.
    pub fn network_drops(&self) -> &DropStats {
        self.core.stack.network_drops()
    }

    /// The links of the stack, as a host would list its interfaces. None where the engine is another thread's.
    pub(crate) fn links(&self) -> impl Iterator<Item = LinkView<'_>> {
        self.core.stack.local().into_iter().flat_map(|stack| stack.network().link_views())
    }

    /// A random number: not predictable from outside, reproducible in a simulation.
    pub fn random_u64(&mut self) -> u64 {
        self.core.rng.next_u64()
    }

    /// Ends the shard after this turn. Connections that are open then are simply forgotten, so close them first where it matters.
    pub fn stop(&mut self) {
        self.core.is_stopping = true;
    }
}
