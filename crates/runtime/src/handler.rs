//! The trait that an application implements.

use crate::context::{Context, WorkContext};
use crate::dispatch::READ_BUFFER_BYTES;
use crate::error::Error;
use crate::kernel_fds::Readiness;
use crate::saved_shard::DescriptorTable;
use crate::stages::StageSampler;
use crate::stats::CounterKind;
use core::any::Any;
use core::time::Duration;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use ginnel_stack::socket_filter::SocketFilter;
use ginnel_stack::tcp::UnorderedBytes;
use ginnel_stack::udp::{Datagram, UdpError};
use std::os::fd::RawFd;
use std::sync::Arc;

/// Position of an urgent byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UrgentData {
    /// Unread bytes before it; negative if it was read already.
    pub unread_before: i32,
    /// The byte, if it has arrived. [`Context::recv_urgent`] takes it out of band.
    pub byte: Option<u8>,
}

/// An application on a shard.
///
/// There is one value for each shard. All calls happen on the shard's thread, one after the other, and never
/// from inside another call: the effects of what a handler does with its [`Context`] are reported by later
/// calls. What it sends leaves together with the acknowledgements of the burst that it answers.
///
/// A handler should return quickly: while it runs, its shard neither receives nor sends.
///
/// A connection begins with [`accepted`](Self::accepted) or [`connected`](Self::connected). Any number of
/// calls of [`data`](Self::data), [`writable`](Self::writable) and [`acked`](Self::acked) follow, at most one
/// of [`peer_closed`](Self::peer_closed), and exactly one of [`closed`](Self::closed). If a connect fails,
/// `closed` follows [`Context::connect`] without `connected`.
pub trait Handler {
    /// Called once, before anything else, as soon as the configured addresses can be used (at once for IPv4;
    /// IPv6 addresses are checked for duplicates first). The place to listen, connect and set timers. An
    /// error ends the shard.
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error>;

    /// A connection to `listener` was established. If the peer has reset it since,
    /// [`closed`](Handler::closed) follows.
    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, listener: Listener) {
        let _ = (cx, conn, listener);
    }

    /// Returns whether a connection may be taken from the accept queue of `listener` now. Otherwise
    /// connections stay there until [`Context::accept`] or the next connection, and when the queue is full
    /// the stack accepts no more.
    fn may_accept(&mut self, listener: Listener) -> bool {
        let _ = listener;
        true
    }

    /// A connection opened with [`Context::connect`] is established.
    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let _ = (cx, conn);
    }

    /// Bytes arrived, in order. `data` is where the device put them; nothing was copied yet.
    ///
    /// Returns how many bytes were consumed, from the front. Returning less than all is back-pressure: the
    /// rest is kept, the window advertised to the peer shrinks, and the rest is delivered again, with more
    /// after it, when more arrives or after [`Context::resume_reading`].
    ///
    /// Kept bytes are delivered up to [`read_bytes_max`](Self::read_bytes_max) at a time, and the next ones
    /// in the next turn if any were consumed. So a handler that waits for a complete message must take longer
    /// messages in parts.
    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize;

    /// Bytes of a segment with a priority above best effort arrived while bytes before them are missing. Only
    /// called for connections with unordered receive ([`TcpOption::Unordered`]), once for each byte. All of
    /// `data` counts as consumed; [`data`](Self::data) continues without these bytes when the missing ones
    /// have arrived.
    ///
    /// A [`StreamPosition`](crate::StreamPosition) that is told of all calls of this method and of `data`
    /// knows the offset of each byte in the stream. A call of `data` never contains bytes from both sides of
    /// bytes that were delivered here.
    ///
    /// [`TcpOption::Unordered`]: ginnel_stack::options::TcpOption::Unordered
    fn unordered(&mut self, cx: &mut Context<'_>, conn: Conn, bytes: UnorderedBytes, data: &[u8]) {
        let _ = (cx, conn, bytes, data);
    }

    /// There is send space again after a short send.
    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let _ = (cx, conn);
    }

    /// The peer acknowledged `bytes` more. Only called for connections with ack events switched on
    /// ([`SocketOptions::ack_events`](ginnel_stack::options::SocketOptions::ack_events)).
    fn acked(&mut self, cx: &mut Context<'_>, conn: Conn, bytes: u32) {
        let _ = (cx, conn, bytes);
    }

    /// The peer announced urgent data, or the announced byte arrived: [`Context::recv_urgent`].
    fn urgent(&mut self, cx: &mut Context<'_>, conn: Conn, urgent: UrgentData) {
        let _ = (cx, conn, urgent);
    }

    /// The peer sent FIN and all bytes before it were consumed. Sending is still possible. Closes the
    /// connection unless overridden.
    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        // Only a stale handle can be refused, and then there is nothing to close.
        let _ = cx.close(conn);
    }

    /// The connection is closed and its handle stale. Called exactly once for each connection that was
    /// accepted or opened, unless the shard ends first. Until this call returns, only [`Context::token`]
    /// still accepts the handle.
    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        let _ = (cx, conn, reason);
    }

    /// A datagram arrived on a UDP socket.
    fn datagram(&mut self, cx: &mut Context<'_>, socket: UdpHandle, datagram: &Datagram, data: &[u8]) {
        let _ = (cx, socket, datagram, data);
    }

    /// ICMP reported that a datagram of a UDP socket did not arrive. The socket stays open.
    fn datagram_error(&mut self, cx: &mut Context<'_>, socket: UdpHandle, error: UdpError) {
        let _ = (cx, socket, error);
    }

    /// Returns whether this handler pulls received data when it likes, instead of having it delivered.
    /// Connections then stay in the accept queue, bytes in the receive buffer and datagrams in the socket's
    /// queue: [`incoming`](Self::incoming), [`readable`](Self::readable) and [`datagrams`](Self::datagrams)
    /// report them, and [`Context::accept`], [`Context::recv`] and [`Context::udp_recv`] take them.
    /// [`accepted`](Self::accepted), [`data`](Self::data) and [`datagram`](Self::datagram) are not called,
    /// and [`peer_closed`](Self::peer_closed) is called when FIN arrives, whether there are unread bytes
    /// before it or not. Must always return the same value.
    fn is_pulling(&self) -> bool {
        false
    }

    /// Returns whether [`data`](Self::data) consumes all bytes that it has room for, and never waits for the
    /// rest of a message. Kept bytes are then delivered in pieces of 2 KiB, so that less is copied if the
    /// handler stops in between. Must always return the same value.
    fn takes_any_bytes(&self) -> bool {
        false
    }

    /// Returns how many kept bytes a call of [`data`](Self::data) gets at most, from 2 KiB to 64 KiB. It must
    /// be at least the length of the longest message whose end the handler waits for. The bytes are copied
    /// for each call, so a handler that takes little in a call should ask for little. Must always return the
    /// same value.
    fn read_bytes_max(&self) -> usize {
        READ_BUFFER_BYTES
    }

    /// A connection is in the accept queue. Only called for handlers that [pull](Self::is_pulling).
    fn incoming(&mut self, cx: &mut Context<'_>, listener: Listener) {
        let _ = (cx, listener);
    }

    /// New bytes can be read. Only called for handlers that [pull](Self::is_pulling).
    fn readable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let _ = (cx, conn);
    }

    /// Returns whether this handler pulls bytes that arrived before bytes which precede them, even if it does
    /// not pull other bytes: [`unordered_readable`](Self::unordered_readable) is called instead of
    /// [`unordered`](Self::unordered). Must always return the same value.
    fn pulls_unordered(&self) -> bool {
        self.is_pulling()
    }

    /// [`Context::recv_unordered`] can take bytes. Only called for handlers that
    /// [pull them](Self::pulls_unordered), and for connections with unordered receive.
    fn unordered_readable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let _ = (cx, conn);
    }

    /// New datagrams, or an error, can be received. Only called for handlers that [pull](Self::is_pulling).
    fn datagrams(&mut self, cx: &mut Context<'_>, socket: UdpHandle) {
        let _ = (cx, socket);
    }

    /// Called once in each turn, after all events were delivered and before queued bytes are sent. Returns
    /// how much it did; if that is more than 0, another turn follows at once. An error ends the shard.
    fn work(&mut self, cx: &mut WorkContext<'_>) -> Result<usize, Error> {
        let _ = cx;
        Ok(0)
    }

    /// A timer set with [`Context::set_timer`] expired.
    fn timer(&mut self, cx: &mut Context<'_>, token: u64) {
        let _ = (cx, token);
    }

    /// A kernel descriptor that was registered with [`Context::register_kernel_fd`] is ready. Called at most
    /// once per turn for each descriptor.
    fn kernel_ready(&mut self, cx: &mut Context<'_>, token: u64, readiness: Readiness) {
        let _ = (cx, token, readiness);
    }

    /// The shard was asked to stop ([`StopFlag`](crate::StopFlag)). Ends it at once unless overridden. A
    /// handler that wants to finish its work calls [`Context::stop`] afterwards, within
    /// `shard.stop_grace_ms`.
    fn stopping(&mut self, cx: &mut Context<'_>) {
        cx.stop();
    }

    /// Reports this handler's counters for `ginnel stat`, each with a name like `httpd.responses`. Called at
    /// most a few times per second; must always report the same names in the same order.
    fn report_counters(&self, report: &mut dyn FnMut(CounterKind, &'static str, u64)) {
        let _ = report;
    }

    /// An administrator has closed a listener (`ginnel ss -K`), whose handle is stale from now on. Its
    /// connections that were not accepted are reset.
    fn listener_destroyed(&mut self, cx: &mut Context<'_>, listener: Listener) {
        let _ = (cx, listener);
    }

    /// Begins or ends the sampling of a connection for `ginnel ss --stages`. Returns whether this handler can
    /// say when an application read and wrote.
    #[doc(hidden)]
    fn set_stages(
        &mut self,
        cx: &mut Context<'_>,
        conn: Conn,
        stages: Option<(Arc<StageSampler>, u32)>,
    ) -> bool {
        let _ = (cx, conn, stages);
        false
    }

    /// Another thread sent `command` through the shard's mailbox ([`Commander`](crate::Commander)).
    fn command(&mut self, cx: &mut Context<'_>, command: Box<dyn Any + Send>) {
        let _ = (cx, command);
    }

    /// Returns the application's state, with which [`restore`](Self::restore) continues in another process
    /// ([`Shard::save`](crate::Shard::save)). Between turns; the application goes on if the shard cannot be
    /// saved after all.
    ///
    /// # Errors
    /// Says in a sentence why the application cannot be saved, which is what it does unless overridden.
    fn save(&mut self, cx: &mut Context<'_>, descriptors: &mut DescriptorTable) -> Result<Vec<u8>, String> {
        let _ = (cx, descriptors);
        Err("its application cannot be saved".into())
    }

    /// Takes over the state that [`save`](Self::save) returned. Called instead of [`start`](Self::start),
    /// before the engine has its connections.
    ///
    /// # Errors
    /// Says in a sentence why the state cannot be taken over.
    fn restore(&mut self, state: &[u8], descriptors: &mut DescriptorTable) -> Result<(), String> {
        let _ = (state, descriptors);
        Err("its application cannot be restored".into())
    }

    /// Returns the filter that was saved as these bytes, while the engine is restored; `None` if there is
    /// none.
    fn restore_filter(&mut self, saved: &[u8]) -> Option<Arc<dyn SocketFilter>> {
        let _ = saved;
        None
    }

    /// The engine has all connections, listeners and UDP sockets that it had when the shard was saved. The
    /// place to set timers.
    ///
    /// # Errors
    /// Says in a sentence what of the engine contradicts the state of the application.
    fn restored(&mut self, cx: &mut Context<'_>) -> Result<(), String> {
        let _ = cx;
        Ok(())
    }

    /// Returns whether the application has left work of this turn to the next one, which then starts at once
    /// (`shard.coalesce_us`).
    fn has_unfinished(&self) -> bool {
        false
    }

    /// The shard is about to sleep: from now on, work of other threads must make [`wake_fd`](Self::wake_fd)
    /// readable. Returns false if there is work already.
    fn before_sleep(&mut self) -> bool {
        true
    }

    /// Returns whether other threads have work on this CPU, so that a shard without work must not keep the
    /// CPU by polling.
    fn is_cpu_contended(&self) -> bool {
        false
    }

    /// Returns the longest time for which other threads on this CPU should run, if the shard would sleep only
    /// to let them run. The shard may then yield instead of sleeping.
    fn yield_limit(&self) -> Option<Duration> {
        None
    }

    /// Returns for how long the shard leaves its CPU to other threads with work on this CPU, or `None` if
    /// there are none. The shard sleeps for at most that time, and frames wait meanwhile: only
    /// [`wake_fd`](Self::wake_fd) and commands of other threads end the sleep early. Called after
    /// [`before_sleep`](Self::before_sleep) returned true.
    fn yield_cpu(&mut self) -> Option<Duration> {
        None
    }

    /// The time that [`yield_cpu`](Self::yield_cpu) returned is over, and nothing ended the sleep earlier.
    fn yield_expired(&mut self) {}

    /// The shard is awake, or did not sleep after all. Called after each
    /// [`before_sleep`](Self::before_sleep). `is_readable`: the descriptor of [`wake_fd`](Self::wake_fd) was
    /// readable.
    fn after_sleep(&mut self, is_readable: bool) {
        let _ = is_readable;
    }

    /// Returns the descriptor that a sleeping shard watches for work of other threads. It stays open as long
    /// as the handler lives.
    fn wake_fd(&self) -> Option<RawFd> {
        None
    }
}
