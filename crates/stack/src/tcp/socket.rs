//! The calls of applications on a connection.

use super::Tcp;
use super::active::{ActiveConn, MsgMore, SlowPathFlags};
use super::conn::{Flags, NONE, SlotState, Tcb};
use super::memory_waiters::BYTES_UNDER_PRESSURE_MAX;
use super::receive::chunks_for;
use super::rtt;
use super::send_buffer::{NoMessageRoom, PushSourceError};
use super::source::SourceId;
use super::state::State;
use super::urgent::ReadSpan;
use crate::chunk_pool::CHUNK_BYTES;
use crate::device::RxBurst;
use crate::error::{OptionError, RecvError, SendError, Stale};
use crate::events::{CloseReason, InlineData};
use crate::handle::Conn;
use crate::ip::Network;
use crate::options::{BufferLimits, CaState, TcpInfo, TcpOption};
use crate::priority;
use crate::wire::tcp::SeqNumber;
use core::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use core::ops::Range;
use core::time::Duration;

/// Bytes that may be queued at most: positions are compared as sequence numbers, so the queue must stay well
/// below 2 GiB.
// limit: bytes queued on a connection
const QUEUED_BYTES_MAX: u64 = 1 << 30;

impl Tcp {
    pub(super) fn index(&self, conn: Conn) -> Option<u32> {
        self.conns.lookup(conn)
    }

    /// Returns the slot of a connection that may still be written to.
    fn check_writable(&self, conn: Conn) -> Result<u32, SendError> {
        let idx = self.index(conn).ok_or(SendError::Stale)?;
        let c = &self.conns[idx];
        let opening = matches!(c.state, State::SynSent | State::SynReceived);
        if c.has(Flags::FIN_QUEUED | Flags::ORPHAN) || !(c.state.may_send() || opening) {
            return Err(SendError::Closed);
        }
        Ok(idx)
    }

    /// Copies bytes to the send buffer. Returns how many fit; if fewer than given, `Writable` follows.
    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        let fill = |at: usize, out: &mut [u8]| out.copy_from_slice(&bytes[at..at + out.len()]);
        self.send_with(conn, bytes.len(), false, fill)
    }

    /// Appends `len` bytes that `fill` writes to the send buffer. Returns how many fit; if fewer than `len`,
    /// `Writable` follows. `fill` is called for each piece, with the number of bytes before it.
    /// `continues`: the write of the application is longer, and the next call has more of it.
    #[inline]
    pub fn send_with(
        &mut self,
        conn: Conn,
        len: usize,
        continues: bool,
        fill: impl FnMut(usize, &mut [u8]),
    ) -> Result<usize, SendError> {
        let idx = self.check_writable(conn)?;
        let active = self.ensure_active(idx);
        let first = u64::from(self.profile(idx).send_buffer_first);
        let is_short = self.active[active].send.len().saturating_add(len as u64) <= first;
        let limit = if is_short { first } else { self.send_buffer_limit(idx) };
        let b = &mut self.active[active];
        let spare = self.chunks.spare() * CHUNK_BYTES;
        let fair = (b.send.len() + spare as u64).max(BYTES_UNDER_PRESSURE_MAX as u64);
        let taken = b.send.push_with(&mut self.chunks, len, limit.min(fair), fill);
        // Usually this is a complete write, and far too short to push before its end.
        let needs_marks =
            continues | b.slow_path.has(SlowPathFlags::RECORD_MARKS) | (taken > b.max_window as usize / 2);
        if taken < len {
            let queued = b.send.len();
            if queued < limit {
                // The pool is exhausted, and perhaps no acknowledgement of this connection will free any of
                // it.
                self.wait_for_memory(idx, queued);
            }
            self.conns[idx].flags.set(Flags::WANT_WRITABLE);
        }
        if taken > 0 {
            if needs_marks {
                self.mark_write(idx, taken as u32, continues);
            }
            self.want_transmit(idx);
        }
        Ok(taken)
    }

    /// Queues a message before those of lower classes of priority that were not begun, all or nothing.
    #[cold]
    pub fn send_message(&mut self, conn: Conn, bytes: &[u8], priority: u8) -> Result<(), SendError> {
        let idx = self.check_writable(conn)?;
        let limit = u64::from(self.profile(idx).send_buffer_bytes);
        if bytes.len() as u64 > limit {
            return Err(SendError::TooLong);
        }
        if bytes.is_empty() {
            return Ok(());
        }
        self.ensure_active(idx);
        let Some(sent) = self.begun_bytes(idx) else { return Err(SendError::Stale) };
        let b = &mut self.active[self.conns[idx].active];
        let queued = b.send.len();
        let spare = self.chunks.spare() * CHUNK_BYTES;
        let fair = (queued + spare as u64).max(BYTES_UNDER_PRESSURE_MAX as u64);
        let class = priority::class(priority);
        match b.send.push_message(&mut self.chunks, bytes, class, sent, limit.min(fair)) {
            Ok(place) => {
                let is_next = place.start == sent;
                self.on_message_queued(idx, place);
                if is_next {
                    self.want_transmit_of_message(idx);
                } else {
                    self.want_transmit(idx);
                }
                Ok(())
            }
            Err(NoMessageRoom { is_memory }) => {
                if is_memory || queued + bytes.len() as u64 <= limit {
                    self.wait_for_memory(idx, queued);
                }
                self.conns[idx].flags.set(Flags::WANT_WRITABLE);
                Err(SendError::Full)
            }
        }
    }

    /// Returns how many of the queued bytes have a place that cannot change: those that were sent, and those
    /// up to the urgent byte.
    fn begun_bytes(&mut self, idx: u32) -> Option<u64> {
        let (c, b) = self.tcb_and_active(idx)?;
        // Before the handshake is complete, SYN precedes the first byte.
        let syn = i32::from(!c.state.is_synchronized());
        let offset = |seq: SeqNumber| u64::try_from(seq - c.snd_una - syn).unwrap_or(0);
        Some(offset(c.snd_nxt).max(b.snd_up.map_or(0, offset)).min(b.send.len()))
    }

    /// Updates positions in the queued data after a message was queued at `place`, counted from `snd_una`.
    fn on_message_queued(&mut self, idx: u32, place: Range<u64>) {
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        let len = (place.end - place.start) as u32;
        if place.end < b.send.len() {
            if b.slow_path.has(SlowPathFlags::RECORD_MARKS) {
                b.record_marks.on_inserted(c.snd_una + place.start as u32, len);
            }
        } else if b.slow_path.has(SlowPathFlags::RECORD_MARKS) || len > b.max_window / 2 {
            self.mark_write(idx, len, false);
        }
    }

    /// Queues a slice of a source, all or nothing. The slice may be longer than the room in the send buffer;
    /// it is refused if the buffer is full, or more than [`QUEUED_BYTES_MAX`] bytes would be queued.
    pub fn send_source(
        &mut self,
        conn: Conn,
        source: SourceId,
        offset: u64,
        len: u64,
    ) -> Result<(), SendError> {
        let idx = self.check_writable(conn)?;
        let limit = u64::from(self.profile(idx).send_buffer_bytes);
        let active = self.ensure_active(idx);
        let b = &mut self.active[active];
        if len > QUEUED_BYTES_MAX {
            // No room will ever be enough, so waiting for it would be useless.
            return Err(SendError::InvalidSource);
        }
        let full = b.send.len() >= limit && limit > 0 || b.send.len() + len > QUEUED_BYTES_MAX;
        let pushed = if full {
            Err(PushSourceError::Full)
        } else {
            b.send.push_source(&mut self.sources, source, offset, len)
        };
        match pushed {
            Ok(()) => {
                self.want_transmit(idx);
                Ok(())
            }
            Err(PushSourceError::Full) => {
                self.conns[idx].flags.set(Flags::WANT_WRITABLE);
                Err(SendError::Full)
            }
            Err(_) => Err(SendError::InvalidSource),
        }
    }

    /// Queues up to `len` bytes of a source from `offset` on, as many as the send buffer has room for, and
    /// returns how many. If fewer than `len`, `Writable` follows.
    pub fn send_source_partial(
        &mut self,
        conn: Conn,
        source: SourceId,
        offset: u64,
        len: usize,
    ) -> Result<usize, SendError> {
        let idx = self.check_writable(conn)?;
        let active = self.ensure_active(idx);
        let limit = self.send_buffer_limit(idx);
        let b = &mut self.active[active];
        let count = limit.saturating_sub(b.send.len()).min(len as u64);
        let pushed = b.send.push_source(&mut self.sources, source, offset, count);
        if count < len as u64 || pushed == Err(PushSourceError::Full) {
            self.conns[idx].flags.set(Flags::WANT_WRITABLE);
        }
        match pushed {
            Ok(()) => {
                if count > 0 {
                    self.want_transmit(idx);
                }
                Ok(count as usize)
            }
            Err(PushSourceError::Full) => Ok(0),
            Err(_) => Err(SendError::InvalidSource),
        }
    }

    /// Copies queued slices of sources whose bytes others may write, until the first `len` unacknowledged
    /// bytes are private copies, or memory is exhausted. Returns how many are.
    pub fn privatize(&mut self, conn: Conn, len: u64) -> u64 {
        let active = self.index(conn).map_or(NONE, |idx| self.conns[idx].active);
        if active == NONE {
            return 0;
        }
        self.active[active].send.privatize_front(&mut self.chunks, &mut self.sources, len)
    }

    /// Switches events about acknowledgements on or off ([`SocketOptions::ack_events`]).
    ///
    /// [`SocketOptions::ack_events`]: crate::options::SocketOptions::ack_events
    pub fn set_ack_events(&mut self, conn: Conn, on: bool) {
        if let Some(idx) = self.index(conn) {
            self.conns[idx].flags.assign(Flags::ACK_EVENTS, on);
        }
    }

    /// Requests `Writable` for the time when some of the queued bytes are acknowledged.
    pub fn request_writable(&mut self, conn: Conn) {
        if let Some(idx) = self.index(conn) {
            self.conns[idx].flags.set(Flags::WANT_WRITABLE);
            if self.conns[idx].active != NONE && self.queued(conn) > 0 && self.notsent(conn) == 0 {
                self.chrono_sndbuf_limited(idx);
            }
        }
    }

    /// Returns the bytes that are queued and not acknowledged.
    pub fn queued(&self, conn: Conn) -> u64 {
        let active = self.index(conn).map_or(NONE, |idx| self.conns[idx].active);
        if active == NONE { 0 } else { self.active[active].send.len() }
    }

    /// Returns the bytes that are queued and not sent.
    pub fn notsent(&self, conn: Conn) -> u32 {
        let Some(idx) = self.index(conn).filter(|idx| self.conns[*idx].active != NONE) else { return 0 };
        let c = &self.conns[idx];
        notsent_bytes(c, &self.active[c.active])
    }

    /// Queues bytes of which the last one is urgent, like `MSG_OOB`. Returns how many fit.
    pub fn send_urgent(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        let taken = self.send(conn, bytes)?;
        if taken > 0
            && let Some(idx) = self.index(conn)
            && let Some((c, b)) = self.tcb_and_active(idx)
        {
            // Before the handshake is complete, SYN precedes the first byte.
            let syn = u32::from(!c.state.is_synchronized());
            b.snd_up = Some(c.snd_una + (b.send.len() as u32 + syn));
        }
        Ok(taken)
    }

    /// Reads from the receive buffer. Returns `Ok(0)` at the end of the stream.
    pub fn recv(&mut self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        let idx = self.index(conn).ok_or(RecvError::Stale)?;
        self.conns[idx].flags.clear(Flags::READABLE_QUEUED);
        let c = &self.conns[idx];
        if c.active == NONE {
            return self.empty_read_result(idx, 0);
        }
        let span = ReadSpan::of(c, &self.active[c.active]);
        let has_skipped = span.skip > 0;
        self.pass_urgent_mark(idx, &span);
        let active = self.conns[idx].active;
        let max = span.max.min(out.len());
        let n = self.active[active].recv.read(&mut self.chunks, &mut out[..max]);
        if n == 0 && !has_skipped {
            return self.empty_read_result(idx, 0);
        }
        self.after_read(idx);
        if n == 0 {
            return self.empty_read_result(idx, 0);
        }
        if self.conns.lookup(conn).is_some() {
            self.rearm(idx);
        }
        Ok(n)
    }

    /// Returns the result of a read for which there are no bytes but those that it skips.
    fn empty_read_result(&self, idx: u32, skipped: usize) -> Result<usize, RecvError> {
        let c = &self.conns[idx];
        let open = c.state.may_receive() || matches!(c.state, State::SynSent | State::SynReceived);
        if open && !c.has(Flags::PEER_FIN) || self.unread(idx) > skipped {
            Err(RecvError::WouldBlock)
        } else {
            Ok(0)
        }
    }

    /// Returns the bytes received and not read, including those that are still in the burst and will be
    /// offered in an event.
    pub fn readable(&self, conn: Conn) -> usize {
        self.index(conn).map_or(0, |idx| self.unread(idx))
    }

    /// Copies buffered bytes without consuming them. Returns `Ok(0)` at the end of the stream.
    pub fn peek(&self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        let idx = self.index(conn).ok_or(RecvError::Stale)?;
        let c = &self.conns[idx];
        if c.active == NONE {
            return self.empty_read_result(idx, 0);
        }
        let b = &self.active[c.active];
        let span = ReadSpan::of(c, b);
        let out_len = out.len().min(span.max);
        let mut filled = 0;
        while filled < out_len {
            let piece = b.recv.peek_at(&self.chunks, span.skip + filled);
            let n = piece.len().min(out_len - filled);
            if n == 0 {
                break;
            }
            out[filled..filled + n].copy_from_slice(&piece[..n]);
            filled += n;
        }
        if filled == 0 {
            return self.empty_read_result(idx, span.skip);
        }
        Ok(filled)
    }

    /// Returns buffered bytes where they are, from `offset` bytes after the first one that [`Tcp::peek`]
    /// returns: as many as are contiguous in memory. Empty at the end of the stream.
    pub fn peek_at(&self, conn: Conn, offset: usize) -> Result<&[u8], RecvError> {
        let idx = self.index(conn).ok_or(RecvError::Stale)?;
        let c = &self.conns[idx];
        let mut skipped = 0;
        if c.active != NONE {
            let b = &self.active[c.active];
            let span = ReadSpan::of(c, b);
            skipped = span.skip;
            let left = span.max.saturating_sub(offset);
            let piece = b.recv.peek_at(&self.chunks, span.skip.saturating_add(offset));
            let piece = &piece[..piece.len().min(left)];
            if !piece.is_empty() {
                return Ok(piece);
            }
        }
        self.empty_read_result(idx, skipped).map(|_| &[][..])
    }

    /// Consumes `count` of the bytes that [`Tcp::peek_at`] returns for increasing offsets. Returns false, and
    /// consumes nothing, if there are fewer.
    pub fn consume_peeked(&mut self, conn: Conn, count: usize) -> Result<bool, Stale> {
        let idx = self.index(conn).ok_or(Stale::Handle)?;
        let c = &self.conns[idx];
        let available = if c.active == NONE {
            0
        } else {
            let b = &self.active[c.active];
            let span = ReadSpan::of(c, b);
            b.recv.readable().saturating_sub(span.skip).min(span.max)
        };
        if count > available {
            return Ok(false);
        }
        self.skip(conn, count).map(|()| true)
    }

    /// Returns whether [`Tcp::recv`] would return bytes, or an error because the handle is stale.
    pub fn has_readable(&self, conn: Conn) -> bool {
        let Some(idx) = self.index(conn) else { return true };
        let c = &self.conns[idx];
        if c.active == NONE {
            return false;
        }
        let b = &self.active[c.active];
        let span = ReadSpan::of(c, b);
        span.max > 0 && b.recv.readable() > span.skip
    }

    /// Returns the bytes in the receive buffer that can be read; 0 for a stale handle.
    pub fn buffered(&self, conn: Conn) -> usize {
        let active = self.index(conn).map_or(NONE, |idx| self.conns[idx].active);
        if active == NONE { 0 } else { self.active[active].recv.unread_bytes() }
    }

    /// Consumes buffered bytes that `peek` showed.
    pub fn skip(&mut self, conn: Conn, count: usize) -> Result<(), Stale> {
        let idx = self.index(conn).ok_or(Stale::Handle)?;
        let c = &self.conns[idx];
        if c.active != NONE {
            let active = c.active;
            let span = ReadSpan::of(c, &self.active[active]);
            self.pass_urgent_mark(idx, &span);
            let b = &mut self.active[active];
            let n = count.min(span.max).min(b.recv.readable());
            b.recv.consume(&mut self.chunks, n);
        }
        self.after_read(idx);
        if self.conns.lookup(conn).is_some() {
            self.rearm(idx);
        }
        Ok(())
    }

    /// Accounts for data in the burst of which the owner has read the first `count` bytes. Moves the rest to
    /// the receive buffer.
    pub fn consume(&mut self, conn: Conn, data: InlineData, count: usize, burst: &RxBurst<'_>) {
        let Some(more) = self.pending.remove(conn, data) else { return };
        self.chunks.unreserve(chunks_for(data.len()));
        let Some(idx) = self.index(conn) else { return };
        if !more {
            self.conns[idx].flags.clear(Flags::INLINE);
        }
        if count < data.len() {
            let bytes = data.bytes(burst);
            self.append_received(idx, &bytes[count..]);
        }
        self.after_read(idx);
    }

    /// Moves data in the burst that were not consumed to receive buffers. Must be called before the burst is
    /// released.
    pub fn finish_burst(&mut self, burst: &RxBurst<'_>) {
        while let Some(p) = self.pending.pop() {
            self.chunks.unreserve(chunks_for(p.data.len()));
            let Some(idx) = self.index(p.conn) else { continue };
            self.conns[idx].flags.clear(Flags::INLINE);
            self.append_received(idx, p.data.bytes(burst));
            self.rearm(idx);
        }
    }

    /// Queues FIN after the queued data (`shutdown(SHUT_WR)`).
    pub fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale> {
        let idx = self.index(conn).ok_or(Stale::Handle)?;
        self.queue_fin(idx);
        Ok(())
    }

    #[inline(always)]
    fn queue_fin(&mut self, idx: u32) {
        let c = &mut self.conns[idx];
        if c.has(Flags::FIN_QUEUED) {
            return;
        }
        match c.state {
            State::Established => c.state = State::FinWait1,
            State::CloseWait => c.state = State::LastAck,
            // FIN follows when the handshake is complete.
            State::SynSent | State::SynReceived => {}
            _ => return,
        }
        c.flags.set(Flags::FIN_QUEUED);
        self.ensure_active(idx);
        self.want_transmit(idx);
    }

    /// Closes the connection like `close` of the last descriptor on Linux.
    pub fn close(&mut self, net: &mut Network, conn: Conn) -> Result<(), Stale> {
        let idx = self.index(conn).ok_or(Stale::Handle)?;
        let c = &self.conns[idx];
        if c.slot_state == SlotState::Reported || c.has(Flags::ORPHAN) {
            return Ok(());
        }
        let unread = self.unread(idx) > 0;
        let c = &mut self.conns[idx];
        if c.slot_state == SlotState::Unread {
            c.flags.set(Flags::ORPHAN);
            self.finish(idx, CloseReason::Normal);
            return Ok(());
        }
        if c.state == State::SynSent || unread || c.has(Flags::LINGER_ZERO) {
            // RFC 2525 §2.17: a close that discards data must not look like a regular one.
            c.flags.set(Flags::ORPHAN);
            self.abort(net, idx);
            return Ok(());
        }
        c.flags.set(Flags::ORPHAN);
        self.queue_fin(idx);
        if self.conns[idx].state == State::FinWait2 {
            self.start_fin_timeout(idx);
        }
        if !self.conns[idx].has(Flags::TX_LISTED) {
            self.rearm(idx);
        }
        Ok(())
    }

    /// Ends the connection with RST.
    pub fn abort_conn(&mut self, net: &mut Network, conn: Conn) -> Result<(), Stale> {
        let idx = self.index(conn).ok_or(Stale::Handle)?;
        if self.conns[idx].slot_state == SlotState::Reported {
            return Ok(());
        }
        self.conns[idx].flags.set(Flags::ORPHAN);
        self.abort(net, idx);
        Ok(())
    }

    /// Sets an option.
    pub fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError> {
        let idx = self
            .index(conn)
            .filter(|idx| self.conns[*idx].slot_state != SlotState::Reported)
            .ok_or(OptionError::Stale)?;
        let c = &mut self.conns[idx];
        match option {
            TcpOption::NoDelay(on) => {
                c.flags.assign(Flags::NODELAY, on);
                if on {
                    self.push_pending_frames(idx);
                }
            }
            TcpOption::Cork(on) => {
                if on {
                    self.push_before_hold(idx);
                }
                let c = &mut self.conns[idx];
                c.flags.assign(Flags::CORK, on);
                if !on {
                    self.push_pending_frames(idx);
                }
            }
            TcpOption::More(on) => self.set_more(idx, on),
            TcpOption::QuickAck(on) => {
                c.flags.assign(Flags::PINGPONG, !on);
                if on {
                    c.raise_quick_acks(1);
                    if c.has(Flags::ACK_DELAYED) {
                        self.ack_now(idx);
                    }
                }
            }
            TcpOption::KeepAlive(on) => {
                c.flags.assign(Flags::KEEPALIVE, on);
                if c.state.is_synchronized() {
                    // Before the handshake is complete, the field counts SYNs.
                    c.retries = 0;
                }
            }
            TcpOption::LingerZero(on) => c.flags.assign(Flags::LINGER_ZERO, on),
            TcpOption::OobInline(on) => c.flags.assign(Flags::OOB_INLINE, on),
            TcpOption::AckEvents(on) => c.flags.assign(Flags::ACK_EVENTS, on),
            // Channels implement it.
            TcpOption::ArrivalTimes(_) => {}
            other => self.set_profile_option(idx, other)?,
        }
        self.rearm(idx);
        Ok(())
    }

    fn push_pending_frames(&mut self, idx: u32) {
        if let Some((_, b)) = self.tcb_and_active(idx) {
            b.cork_deadline = None;
            b.nagle_push = true;
            if b.msg_more == MsgMore::Expected {
                b.msg_more = MsgMore::Released;
            }
            self.want_transmit(idx);
        }
    }

    /// Separates queued data, which wait for the end of the turn, from data that are held back from now on.
    fn push_before_hold(&mut self, idx: u32) {
        let c = &self.conns[idx];
        if c.active != NONE && !c.has(Flags::CORK) && self.active[c.active].msg_more == MsgMore::No {
            self.push_before_held(self.conns.handle(idx));
        }
    }

    fn set_more(&mut self, idx: u32, on: bool) {
        if on {
            let active = self.ensure_active(idx);
            self.push_before_hold(idx);
            self.active[active].msg_more = MsgMore::Expected;
        } else if let Some((_, b)) = self.tcb_and_active(idx) {
            b.msg_more = MsgMore::No;
            b.cork_deadline = None;
            self.want_transmit(idx);
        }
    }

    fn set_profile_option(&mut self, idx: u32, option: TcpOption) -> Result<(), OptionError> {
        if !option.is_valid() {
            return Err(OptionError::Invalid);
        }
        // Cannot truncate: the value was checked to be within the range.
        let seconds = |time: Duration| time.as_secs() as u16;
        let mut p = *self.profile(idx);
        match option {
            TcpOption::KeepIdle(time) => p.keep_idle_seconds = seconds(time),
            TcpOption::KeepInterval(time) => p.keep_interval_seconds = seconds(time),
            TcpOption::KeepCount(count) => p.keep_count = count,
            TcpOption::UserTimeout(time) => p.user_timeout_ms = time.as_millis() as u32,
            TcpOption::Linger2(time) => p.fin_timeout_seconds = seconds(time),
            TcpOption::RecvBuffer(bytes) => p.set_recv_buffer(bytes),
            TcpOption::SendBuffer(bytes) => p.set_send_buffer(bytes),
            TcpOption::NotSentLowat(bytes) => p.notsent_lowat = bytes,
            TcpOption::MaxSegment(bytes) => p.mss = bytes,
            TcpOption::Congestion(kind) => p.congestion = kind,
            TcpOption::MaxPacingRate(rate) => p.max_pacing_rate = rate,
            TcpOption::SynRetries(count) => p.syn_retries = count,
            TcpOption::Tos(tos) => p.tos = tos,
            TcpOption::MinHopLimit(hops) => p.min_hop_limits = [hops; 2],
            TcpOption::RtoMin(time) => p.set_rto_min(time),
            TcpOption::RtoMax(time) => p.set_rto_max(time),
            TcpOption::DelayedAckMax(time) => p.set_delayed_ack_max(&self.config, time),
            TcpOption::Priority(priority) => p.priority = priority,
            TcpOption::Unordered(on) => p.unordered = on,
            TcpOption::MayFragment(on) => p.may_fragment = on,
            TcpOption::FlowLabel(choice) => p.flow_label = choice,
            TcpOption::HopLimit(hops) => p.hop_limit = hops.unwrap_or(self.config.hop_limit),
            _ => return Err(OptionError::Invalid),
        }
        let id = self.profiles.intern(p).ok_or(OptionError::TooMany)?;
        self.note_profile(id);
        let c = &mut self.conns[idx];
        let old = core::mem::replace(&mut c.profile, id);
        if let TcpOption::MayFragment(on) = option {
            // If the path needs fragmentation, the next ICMP message says it again.
            c.flags.assign(Flags::MTU_LOCKED, on);
        }
        if p.mss != 0 {
            c.peer_mss = c.peer_mss.min(p.mss);
        }
        self.profiles.release(old);
        self.set_congestion_control(idx, p.congestion);
        self.apply_slow_path_options(idx);
        if matches!(option, TcpOption::Priority(_)) {
            self.move_to_class(idx);
        }
        if let Some((c, b)) = self.tcb_and_active(idx) {
            b.rtx_queue.resegment(c.mss());
            if !p.unordered {
                b.recv.cancel_early();
            }
        }
        Ok(())
    }

    /// Returns the state of a connection.
    pub fn state(&self, conn: Conn) -> Option<State> {
        self.index(conn).map(|idx| self.conns[idx].state)
    }

    /// Returns the largest sizes of the receive buffer and the send buffer in bytes, and the size that the
    /// send buffer has now.
    pub fn buffer_limits(&self, conn: Conn) -> Option<BufferLimits> {
        let idx = self.index(conn)?;
        let profile = self.profile(idx);
        Some(BufferLimits {
            recv_max: profile.recv_buffer_bytes,
            send_max: profile.send_buffer_bytes,
            send: self.send_buffer_limit(idx),
        })
    }

    /// Returns the local and the remote address of a connection; `None` if the handle is stale.
    pub fn endpoints(&self, conn: Conn) -> Option<[SocketAddr; 2]> {
        let idx = self.index(conn).filter(|idx| self.conns[*idx].slot_state != SlotState::Vacant)?;
        let c = &self.conns[idx];
        if c.has(Flags::V6) {
            let key = self.key(idx);
            return Some([key.local_addr(), key.remote_addr()]);
        }
        let end = |ip, port| SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::from_bits(ip), port));
        Some([end(c.local_ip, c.local_port), end(c.remote_ip, c.remote_port)])
    }

    /// Returns RCV.NXT, less the peer's FIN, and SND.NXT of a connection; `None` if the handle is stale.
    pub fn next_sequence_numbers(&self, conn: Conn) -> Option<[u32; 2]> {
        let idx = self.index(conn).filter(|idx| self.conns[*idx].slot_state != SlotState::Vacant)?;
        let c = &self.conns[idx];
        Some([c.data_end().0, c.snd_nxt.0])
    }

    /// Returns what is known about a connection.
    pub fn info(&self, conn: Conn) -> Option<TcpInfo> {
        self.index(conn).and_then(|idx| self.info_at(idx))
    }

    /// Returns what is known about the connection in a slot; `None` if the slot is vacant.
    pub fn info_at(&self, idx: u32) -> Option<TcpInfo> {
        let c = &self.conns[idx];
        if c.slot_state == SlotState::Vacant {
            return None;
        }
        let key = self.key(idx);
        let b = (c.active != NONE).then(|| &self.active[c.active]);
        let us = |us: u32| Duration::from_micros(us.into());
        let threshold = self.config.reordering_segments;
        let [busy_time, rwnd_limited, sndbuf_limited] =
            b.map_or([0; 3], |b| b.spent_us(self.now)).map(Duration::from_micros);
        let last_data = b.map_or(c.last_rx, |b| b.lrcvtime);
        let rates = self.rate_info(c, b);
        let seen = c.min_rtt != u32::MAX && c.state.is_synchronized();
        Some(TcpInfo {
            state: if self.is_fastopen_pending(idx) { State::SynReceived } else { c.state },
            local: key.local_addr(),
            remote: key.remote_addr(),
            ca_state: b.map_or(CaState::Open, |b| b.recovery.ca_state),
            retransmits: b.map_or(c.retries, |b| b.retransmits),
            probes: b.map_or(0, |b| b.probes_out),
            backoff: b.map_or(0, |b| b.backoff),
            rto: rtt::rto(c, self.profiles.get(c.profile), b.map_or(0, |b| b.backoff)),
            ato: Duration::from_millis(self.profile(idx).delayed_ack_ms.into()),
            snd_mss: c.mss(),
            rcv_mss: c.rcv_mss.into(),
            advmss: self.advmss(idx).into(),
            pmtu: c.pmtu.into(),
            unacked: b.map_or(0, |b| b.rtx_queue.packets_out),
            sacked: b.map_or(0, |b| b.rtx_queue.sacked_out),
            lost: b.map_or(0, |b| b.rtx_queue.lost_out),
            retrans: b.map_or(0, |b| b.rtx_queue.retrans_out),
            total_retrans: b.map_or(0, |b| b.total_retrans),
            rtt: us(c.srtt >> 3),
            rttvar: us(c.rttvar >> 2),
            min_rtt: us(if seen { c.min_rtt } else { 0 }),
            snd_ssthresh: c.ssthresh,
            snd_cwnd: c.cwnd,
            reordering: b.map_or(threshold, |b| b.rack.reordering(threshold)),
            reord_seen: b.map_or(0, |b| b.rack.reord_seen),
            snd_wnd: c.snd_wnd,
            rcv_wnd: c.rcv_wnd(),
            snd_wscale: c.snd_wscale(),
            rcv_wscale: c.rcv_wscale(),
            timestamps: c.has(Flags::TIMESTAMPS),
            sack: c.has(Flags::SACK),
            wscale: c.has(Flags::WSCALE),
            ecn: c.has(Flags::ECN),
            syn_data: self.profile(idx).fastopen.is_syn_data_acked,
            fastopen_failure: self.profile(idx).fastopen.failure,
            last_data_recv: Duration::from_millis(self.now_ms().wrapping_sub(last_data).into()),
            busy_time,
            rwnd_limited,
            sndbuf_limited,
            congestion: self.profile(idx).congestion,
            pacing_rate: rates.pacing,
            max_pacing_rate: self.profile(idx).max_pacing_rate,
            delivery_rate: rates.delivery,
            delivery_rate_app_limited: rates.is_app_limited,
            bbr: rates.bbr,
            notsent_bytes: b.map_or(0, |b| notsent_bytes(c, b)),
            send_queued: b.map_or(0, |b| b.send.len() as u32),
            recv_queued: self.unread(idx) as u32,
        })
    }
}

/// Returns the bytes that are queued and not sent.
fn notsent_bytes(c: &Tcb, b: &ActiveConn) -> u32 {
    // Before the handshake is complete, SYN precedes the first byte.
    let syn = u32::from(!c.state.is_synchronized());
    let end = c.snd_una + (b.send.len() as u32 + syn);
    (end - c.snd_nxt).max(0) as u32
}
