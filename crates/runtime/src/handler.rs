//! What an application implements.

use crate::context::{Context, WorkContext};
use crate::error::Error;
use crate::stats::CounterKind;
use core::any::Any;
use core::time::Duration;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use ginnel_stack::udp::{Datagram, UdpError};
use std::os::fd::RawFd;

/// Where an urgent byte is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UrgentData {
    /// Unread bytes in front of it; below 0 if it was read already.
    pub unread_before: i32,
    /// The byte, if it has come. It may be taken by itself with [`Context::recv_urgent`].
    pub byte: Option<u8>,
}

/// An application on a shard.
///
/// There is one value per shard, and all calls happen on the shard's thread, one after the other, never from inside
/// another call: what a handler does with its [`Context`] shows up as later calls. Whatever it sends leaves with the acknowledgements of
/// the burst it answers.
///
/// A handler should return quickly: while it runs, its shard neither receives nor sends.
///
/// The life of a connection is [`accepted`](Self::accepted) or [`connected`](Self::connected), then any number of
/// [`data`](Self::data), [`writable`](Self::writable) and [`acked`](Self::acked), at most one
/// [`peer_closed`](Self::peer_closed), and exactly one [`closed`](Self::closed). A connect that fails goes from
/// [`Context::connect`] to `closed` without `connected`.
pub trait Handler {
    /// Called once, before anything else, as soon as the configured addresses may be used (at once for IPv4; IPv6 addresses are checked for
    /// duplicates first): listen, connect and set timers here. An error ends the shard.
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error>;

    /// A peer's connection to `listener` was established. If the peer has reset it since, [`closed`](Handler::closed) follows.
    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, listener: Listener) {
        let _ = (cx, conn, listener);
    }

    /// Whether a connection may be taken from the accept queue of `listener` now. Those that may not stay there until [`Context::accept`] or
    /// the next connection, and when the queue is full the stack takes no more.
    fn may_accept(&mut self, listener: Listener) -> bool {
        let _ = listener;
        true
    }

    /// A connection opened with [`Context::connect`] is established.
    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let _ = (cx, conn);
    }

    /// Bytes arrived, in order, where the device put them: nothing was copied yet.
    ///
    /// Returns how many were consumed, from the front. Returning less is back-pressure: the rest is kept, the window offered to the peer
    /// shrinks, and the rest is shown again, with more behind it, when more arrives or after [`Context::resume_reading`].
    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize;

    /// There is room again after a send was cut short.
    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let _ = (cx, conn);
    }

    /// The peer acknowledged `bytes` more. Only called for connections with ack events switched on
    /// ([`SocketOptions::ack_events`](ginnel_stack::options::SocketOptions::ack_events)).
    fn acked(&mut self, cx: &mut Context<'_>, conn: Conn, bytes: u32) {
        let _ = (cx, conn, bytes);
    }

    /// The peer announced urgent data, or the byte came that was announced before: [`Context::recv_urgent`].
    fn urgent(&mut self, cx: &mut Context<'_>, conn: Conn, urgent: UrgentData) {
        let _ = (cx, conn, urgent);
    }

    /// The peer sent FIN and all bytes before it were consumed. Sending is still possible. Closes our side too unless overridden.
    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        // Only a stale handle can be refused, and then there is nothing left to close.
        let _ = cx.close(conn);
    }

    /// The connection is over and its handle stale. Exactly once per connection that was accepted or opened.
    /// Only [`Context::token`] still knows the handle, until this call returns.
    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        let _ = (cx, conn, reason);
    }

    /// A datagram arrived on a UDP socket.
    fn datagram(&mut self, cx: &mut Context<'_>, socket: UdpHandle, datagram: &Datagram, data: &[u8]) {
        let _ = (cx, socket, datagram, data);
    }

    /// ICMP said that something sent from a UDP socket did not arrive. The socket goes on.
    fn datagram_error(&mut self, cx: &mut Context<'_>, socket: UdpHandle, error: UdpError) {
        let _ = (cx, socket, error);
    }

    /// Whether this handler takes what arrived when it likes instead of being shown it. Then connections stay in the accept queue, bytes in
    /// the receive buffer and datagrams in the socket's queue: [`incoming`](Self::incoming), [`readable`](Self::readable) and
    /// [`datagrams`](Self::datagrams) say that they are there, and [`Context::accept`], [`Context::recv`] and [`Context::udp_recv`] take them.
    /// [`accepted`](Self::accepted), [`data`](Self::data) and [`datagram`](Self::datagram) are not called, and
    /// [`peer_closed`](Self::peer_closed) is told when FIN came, be there unread bytes before it or not. Must always answer the same.
    fn is_pulling(&self) -> bool {
        false
    }

    /// A connection waits to be accepted. Only for handlers that [pull](Self::pulls).
    fn incoming(&mut self, cx: &mut Context<'_>, listener: Listener) {
        let _ = (cx, listener);
    }

    /// There are bytes that were not there before. Only for handlers that [pull](Self::pulls).
    fn readable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let _ = (cx, conn);
    }

    /// There are datagrams, or an error, that were not there before. Only for handlers that [pull](Self::pulls).
    fn datagrams(&mut self, cx: &mut Context<'_>, socket: UdpHandle) {
        let _ = (cx, socket);
    }

    /// Called once in each turn, after everything that happened was told and before what is to be sent leaves. Returns how much it did; if it
    /// is more than 0, another turn follows at once. An error ends the shard.
    fn work(&mut self, cx: &mut WorkContext<'_>) -> Result<usize, Error> {
        let _ = cx;
        Ok(0)
    }

    /// A timer set with [`Context::set_timer`] ran out.
    fn timer(&mut self, cx: &mut Context<'_>, token: u64) {
        let _ = (cx, token);
    }

    /// The shard was asked to stop ([`StopFlag`](crate::StopFlag)). Ends it at once unless overridden; a handler that wants to finish what
    /// it began calls [`Context::stop`] when it has, within `shard.stop_grace_ms`.
    fn stopping(&mut self, cx: &mut Context<'_>) {
        cx.stop();
    }

    /// What this handler counts, for `ginnel stat`: each with a name like `httpd.responses`. Called a few times per second at the most, and must always
    /// report the same names in the same order.
    fn report_counters(&self, report: &mut dyn FnMut(CounterKind, &'static str, u64)) {
        let _ = report;
    }

    /// Another thread sent `command` through the shard's mailbox ([`Commander`](crate::Commander)).
    fn command(&mut self, cx: &mut Context<'_>, command: Box<dyn Any + Send>) {
        let _ = (cx, command);
    }

    /// The shard is about to sleep: from now on work from elsewhere must make [`wake_fd`](Self::wake_fd) readable. False if there is some already.
    fn before_sleep(&mut self) -> bool {
        true
    }

    /// Whether others have work on this very CPU, so that a shard that has none must not keep it by polling.
    fn is_cpu_contended(&self) -> bool {
        false
    }

    /// Whether it is for these others alone that a shard would sleep now, so that it may yield to them instead, and how long they should take at the most.
    fn yield_limit(&self) -> Option<Duration> {
        None
    }

    /// Asked after [`before_sleep`](Self::before_sleep) has said yes: whether others have work on this very CPU, and how long they get it for. Then the
    /// shard sleeps for so long at the most, and frames wait meanwhile; only [`wake_fd`](Self::wake_fd) and other threads' commands end that sleep.
    fn yield_cpu(&mut self) -> Option<Duration> {
        None
    }

    /// Nobody has ended the time that [`give_way`](Self::give_way) said before it was over.
    fn yield_expired(&mut self) {}

    /// The shard is awake, or did not go to sleep after all. Follows each [`before_sleep`](Self::before_sleep). `rang`: what
    /// [`wake_fd`](Self::wake_fd) names was readable.
    fn after_sleep(&mut self, rang: bool) {
        let _ = rang;
    }

    /// What a sleeping shard watches for work from elsewhere. It stays open as long as the handler lives.
    fn wake_fd(&self) -> Option<RawFd> {
        None
    }
}
