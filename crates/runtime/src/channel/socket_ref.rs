//! Access of clients to the bytes of a socket. The positions are in the region, so every owner of the socket
//! continues where another one stopped. Owners that share the socket with others take its lock.

mod datagram_peek;

use super::buffers::{Fault, RecvBuffer, SendBuffer};
use super::datagram::{DatagramHeader, HAS_EXTENDED_ERRORS, HEADER_BYTES, error_from_word};
use super::lock::{self, SocketLockGuard};
use super::pending_options;
use super::region::{Direction, HOLD_BEGINS, Region, SocketArea};
use super::socket::{close_reason, closed_bits, request, state};
use super::stream::Stream;
use super::sync::{Ordering, fence};
use super::urgent_mark::{self, UrgentMark};
use core::ops::Range;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Release;
use core::time::Duration;
use ginnel_stack::error::{OptionError, RecvError, SendError};
use ginnel_stack::events::CloseReason;
use ginnel_stack::options::TcpOption;
use ginnel_stack::udp::UdpError;
use std::io::IoSlice;

/// Longest wait for a socket's lock. A running owner releases the lock within microseconds; one that was
/// stopped while it had the lock must not block the others.
const LOCK_TIMEOUT: Duration = Duration::from_millis(20);

pub(super) use datagram_peek::PeekedAt;

/// A datagram that was copied to buffers.
pub(super) struct TakenDatagram {
    pub header: DatagramHeader,
    /// True if the stack wants to be notified of free space.
    pub wants_notice: bool,
    /// The result of copying.
    pub copied: Result<(), Fault>,
}

/// State of a socket and of its buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketStatus {
    /// Bytes that can be read.
    pub readable: usize,
    /// Bytes that can be written now.
    pub send_space: usize,
    /// Bytes that were written and that the stack has not taken.
    pub unsent: usize,
    /// Bytes that were written and still occupy the buffer. The stack frees their space when it has copied
    /// them, or when the peer has acknowledged them.
    pub occupied: usize,
    /// State of the connection. It was read before the byte counts, so all bytes that came before an end are
    /// counted.
    pub state: SocketState,
    /// True if an owner has shut down the write side.
    pub is_write_closed: bool,
    /// Number of out-of-band events: urgent data was announced or arrived, or a UDP socket got an error or a
    /// datagram that does not pass through the region. If this is not 0, reads have to heed
    /// [`Client::urgent_mark`](super::Client::urgent_mark).
    pub oob_events: u32,
}

/// State of a connection without its buffers: one word, which the stack writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketState(u32);

impl SocketState {
    /// Loads the state from the region.
    #[inline]
    pub(super) fn load(area: &SocketArea) -> Self {
        Self(area.state.load(Ordering::Acquire))
    }

    /// Returns the state of a socket whose stack is gone: closed, as if by a reset, unless it already was.
    #[cold]
    pub(super) fn with_stack_lost(self) -> Self {
        if self.is_closed() { self } else { Self(self.0 | closed_bits(CloseReason::Reset)) }
    }

    /// Returns whether the connection is or was established.
    #[inline]
    pub fn is_connected(self) -> bool {
        self.0 & state::CONNECTED != 0
    }

    /// Returns whether the peer sent FIN. Bytes before it may still have to be read.
    #[inline]
    pub fn has_fin(self) -> bool {
        self.0 & state::FIN != 0
    }

    /// Returns whether the connection is closed.
    #[inline]
    pub fn is_closed(self) -> bool {
        self.0 & state::CLOSED != 0
    }

    /// Returns how many bytes the SYN takes that waits, or has waited, for the first bytes that are written;
    /// `None` if it was sent before.
    pub(super) fn syn_data_max(self) -> Option<u16> {
        let is_deferred = self.0 & (state::SYN_DEFERRED | state::SYN_SENT) == state::SYN_DEFERRED;
        is_deferred.then_some((self.0 >> state::SYN_DATA_MAX_SHIFT) as u16)
    }

    /// Returns why the connection closed, if it did.
    pub fn close_reason(self) -> Option<CloseReason> {
        close_reason(self.0)
    }
}

/// A client's reference to the words and streams of a socket.
#[derive(Clone, Copy)]
pub(super) struct SocketRef<'a> {
    area: &'a SocketArea,
    incoming: Stream<'a>,
    outgoing: Stream<'a>,
    /// The client's number, if other threads or processes may use the socket at the same time.
    shared_by: Option<usize>,
}

impl<'a> SocketRef<'a> {
    #[inline]
    pub fn new(region: &'a Region, socket: u32, shared_by: Option<usize>) -> Self {
        let (area, incoming, outgoing) = region.socket_and_streams(socket);
        Self { area, incoming, outgoing, shared_by }
    }

    /// Takes the socket's lock if the socket may be shared. `Err` if another owner was stopped while it had
    /// the lock.
    #[inline]
    fn lock(&self) -> Result<Option<SocketLockGuard<'a>>, ()> {
        match self.shared_by {
            None => Ok(None),
            Some(client) => lock::lock(&self.area.lock, client, LOCK_TIMEOUT).map(Some).ok_or(()),
        }
    }

    #[inline]
    pub fn state(&self) -> SocketState {
        SocketState::load(self.area)
    }

    /// Reads the byte counts and combines them with a state that was loaded before, so that all bytes that
    /// came before an end are counted.
    #[inline(always)]
    pub fn status(&self, state: SocketState) -> SocketStatus {
        let requests = self.area.requests.load(Ordering::Relaxed);
        let positions = self.area.positions(Direction::Outgoing);
        let written = positions.written();
        let waiting = self.outgoing.unread(written);
        let occupied = waiting.unwrap_or(0);
        SocketStatus {
            readable: self.readable(),
            send_space: waiting.map_or(0, |waiting| self.outgoing.space_beside(waiting)),
            unsent: written.saturating_sub(positions.taken()).min(occupied as u64) as usize,
            occupied,
            state,
            is_write_closed: requests & (request::SHUTDOWN | request::CLOSE | request::ABORT) != 0,
            oob_events: self.area.oob_events.load(Ordering::Relaxed),
        }
    }

    /// Returns how many bytes can be written now.
    #[inline]
    pub fn send_space(&self) -> usize {
        self.outgoing.space(self.area.positions(Direction::Outgoing).written()).unwrap_or(0)
    }

    #[inline]
    pub fn read_position(&self) -> u64 {
        self.area.positions(Direction::Incoming).read()
    }

    #[inline]
    pub fn readable(&self) -> usize {
        // The stack is trusted, and other owners are of the same domain: an invalid position counts as
        // nothing to read.
        self.incoming.readable(self.read_position()).unwrap_or(0)
    }

    #[inline]
    pub fn peek(&self, skip: usize, out: &mut [u8]) -> Result<usize, RecvError> {
        let _guard = self.lock().map_err(|()| RecvError::WouldBlock)?;
        Ok(self.incoming.peek(self.read_position(), skip, out).unwrap_or(0))
    }

    /// Consumes up to `count` bytes. Returns how many, and whether the stack wants to be notified.
    #[inline]
    pub fn consume(&self, count: usize) -> Result<(usize, bool), RecvError> {
        let _guard = self.lock().map_err(|()| RecvError::WouldBlock)?;
        Ok(self.consume_locked(count))
    }

    #[inline]
    fn consume_locked(&self, count: usize) -> (usize, bool) {
        let read = self.read_position();
        let count = count.min(self.incoming.readable(read).unwrap_or(0));
        (count, self.advance_read(read, count))
    }

    /// Consumes `count` bytes that are known to follow the position `read`. Returns whether the stack wants
    /// to be notified.
    #[inline]
    fn advance_read(&self, mut read: u64, count: usize) -> bool {
        self.incoming.consume(&mut read, count);
        // Pairs with the fence of the stack, which sets the flag before it checks for space once more.
        fence(Ordering::SeqCst);
        let wants = &self.area.wants_recv_space;
        wants.load(Ordering::Relaxed) != 0 && wants.swap(0, Ordering::Relaxed) != 0
    }

    /// Reads and consumes received bytes. Returns how many, and whether the stack wants to be notified.
    #[inline]
    pub fn recv(&self, out: &mut [u8]) -> Result<(usize, bool), RecvError> {
        let _guard = self.lock().map_err(|()| RecvError::WouldBlock)?;
        let count = self.incoming.peek(self.read_position(), 0, out).unwrap_or(0);
        Ok(self.consume_locked(count))
    }

    /// Copies at most `len` unread bytes to offset `at` of a buffer, beginning `skip` bytes after the read
    /// position, without consuming them. Returns how many.
    pub fn peek_into<B: RecvBuffer>(
        &self,
        skip: usize,
        buffer: &mut B,
        at: usize,
        len: usize,
    ) -> Result<Result<usize, Fault>, RecvError> {
        let _guard = self.lock().map_err(|()| RecvError::WouldBlock)?;
        let read = self.read_position();
        let count = self.incoming.readable(read).unwrap_or(0).saturating_sub(skip).min(len);
        Ok(self.incoming.copy_unread_to(read, skip, buffer, at, count).map(|()| count))
    }

    /// Reads into buffers, beginning at byte `skip` of their concatenation, as [`recv`](Self::recv) does.
    /// Returns `None` and consumes nothing if there were out-of-band events: reads then have to heed the
    /// urgent mark. After a fault in a buffer nothing is consumed, either.
    ///
    /// A caller for which no bytes are there takes no lock.
    #[inline]
    pub fn recv_into<B: RecvBuffer>(
        &self,
        buffers: &mut [B],
        skip: usize,
    ) -> Result<Result<Option<(usize, bool)>, Fault>, RecvError> {
        if self.readable() == 0 {
            return Ok(Ok(self.has_no_oob_events().then_some((0, false))));
        }
        let _guard = self.lock().map_err(|()| RecvError::WouldBlock)?;
        let read = self.read_position();
        let waiting = self.incoming.readable(read).unwrap_or(0);
        // Checked after the position was read: bytes that came with or after an urgent byte are not read as
        // ordinary ones.
        if !self.has_no_oob_events() {
            return Ok(Ok(None));
        }
        Ok(self.recv_locked(read, buffers, skip, waiting).map(Some))
    }

    /// Reads at most `max` bytes into buffers as [`recv_into`](Self::recv_into) does, whatever out-of-band
    /// events there were. The caller has found out that none of these bytes is urgent.
    #[inline(never)]
    pub fn recv_at_most<B: RecvBuffer>(
        &self,
        buffers: &mut [B],
        skip: usize,
        max: usize,
    ) -> Result<Result<(usize, bool), Fault>, RecvError> {
        let _guard = self.lock().map_err(|()| RecvError::WouldBlock)?;
        let read = self.read_position();
        let waiting = self.incoming.readable(read).unwrap_or(0).min(max);
        Ok(self.recv_locked(read, buffers, skip, waiting))
    }

    /// Reads `max` bytes, which have arrived, from the position `read`, as far as the buffers hold them.
    #[inline(always)]
    fn recv_locked<B: RecvBuffer>(
        &self,
        read: u64,
        buffers: &mut [B],
        mut skip: usize,
        max: usize,
    ) -> Result<(usize, bool), Fault> {
        let mut copied = 0;
        for buffer in buffers {
            if skip >= buffer.len() {
                skip -= buffer.len();
                continue;
            }
            let count = (buffer.len() - skip).min(max - copied);
            self.incoming.copy_unread_to(read, copied, buffer, skip, count)?;
            skip = 0;
            copied += count;
            if copied == max {
                break;
            }
        }
        Ok((copied, self.advance_read(read, copied)))
    }

    /// Returns whether the socket had neither urgent data nor errors.
    #[inline]
    fn has_no_oob_events(&self) -> bool {
        self.area.oob_events.load(Ordering::Relaxed) == 0
    }

    /// Writes as many bytes as there is space for, and returns how many. After a short write `blocked` is
    /// set, and the stack notifies when there is space.
    #[inline]
    pub fn send(&self, bytes: &[u8], blocked: &AtomicBool) -> Result<usize, SendError> {
        // A slice can be read.
        self.send_from(&[IoSlice::new(bytes)], 0..bytes.len(), blocked).map(|sent| sent.unwrap_or(0))
    }

    /// Writes as many as there is space for of the bytes in a range of the buffers' concatenation, as
    /// [`send`](Self::send) does. The inner result is an error if a buffer cannot be read: then nothing is
    /// written. After a short write the call tries to write the rest; a fault in that attempt ends the call,
    /// which returns the number of bytes written before. The reader sees the bytes of an attempt at once.
    #[inline]
    pub fn send_from<B: SendBuffer>(
        &self,
        buffers: &[B],
        range: Range<usize>,
        blocked: &AtomicBool,
    ) -> Result<Result<usize, Fault>, SendError> {
        let requests = self.area.requests.load(Ordering::Relaxed);
        let closed = requests & (request::SHUTDOWN | request::CLOSE | request::ABORT) != 0;
        if closed || self.area.state.load(Ordering::Acquire) & state::CLOSED != 0 {
            return Err(SendError::Closed);
        }
        let _guard = self.lock().map_err(|()| SendError::Full)?;
        let mut written = self.area.positions(Direction::Outgoing).written();
        let Ok(mut count) = self.write_from(&mut written, buffers, range.clone()) else {
            return Ok(Err(Fault));
        };
        while count < range.len() {
            // Set first: a thread that waits for events may be notified of space before this call returns.
            blocked.store(true, Release);
            self.area.wants_send_space.store(1, Ordering::Relaxed);
            // Pairs with the fence of the stack, which reads this flag after it has freed space.
            fence(Ordering::SeqCst);
            let more = match self.write_from(&mut written, buffers, range.start + count..range.end) {
                Ok(more) => more,
                Err(Fault) if count == 0 => return Ok(Err(Fault)),
                Err(Fault) => 0,
            };
            count += more;
            if more == 0 {
                return Ok(Ok(count));
            }
        }
        if self.shared_by.is_none() {
            // No other thread or process waits for space.
            blocked.store(false, Release);
        }
        Ok(Ok(count))
    }

    /// Copies as much as there is space for of a range of the buffers' concatenation, and publishes it.
    /// Nothing is published after a fault.
    #[inline]
    fn write_from<B: SendBuffer>(
        &self,
        written: &mut u64,
        buffers: &[B],
        range: Range<usize>,
    ) -> Result<usize, Fault> {
        let start = *written;
        let (mut skip, mut remaining) = (range.start, range.len());
        for buffer in buffers {
            if skip >= buffer.len() {
                skip -= buffer.len();
                continue;
            }
            let wanted = (buffer.len() - skip).min(remaining);
            let copied = match self.outgoing.copy_in(written, buffer, skip, wanted).unwrap_or(Ok(0)) {
                Ok(copied) => copied,
                Err(Fault) => {
                    *written = start;
                    return Err(Fault);
                }
            };
            skip = 0;
            remaining -= copied;
            if copied < wanted || remaining == 0 {
                break;
            }
        }
        if *written > start {
            self.outgoing.publish(*written);
        }
        Ok((*written - start) as usize)
    }

    /// Returns the urgent byte that was announced last, unless the read position has passed it. Earlier
    /// urgent bytes that were next in the stream when another one was announced are dropped first
    /// (`tcp_check_urg`); the second value says whether the stack wants to be notified of that.
    pub fn urgent_mark(&self) -> (Option<UrgentMark>, bool) {
        let mut must_notify = false;
        if urgent_mark::hole_bytes(self.area, self.read_position()) > 0
            && let Ok(_guard) = self.lock()
        {
            (_, must_notify) = self.consume_locked(urgent_mark::hole_bytes(self.area, self.read_position()));
        }
        (urgent_mark::current(self.area, self.read_position()), must_notify)
    }

    /// Takes the urgent byte out of band.
    pub fn take_urgent(&self) -> Option<u8> {
        urgent_mark::take_byte(self.area, self.read_position())
    }

    /// Returns the header of the next datagram, if the whole datagram is there.
    fn next_header(&self) -> Option<DatagramHeader> {
        self.header_ahead(0)
    }

    /// Returns the header `ahead` bytes after the read position, if the whole datagram is there.
    #[inline(always)]
    fn header_ahead(&self, ahead: usize) -> Option<DatagramHeader> {
        let read = self.read_position();
        let mut head = [0; HEADER_BYTES];
        let is_complete = self.incoming.peek(read, ahead, &mut head) == Ok(HEADER_BYTES);
        let header = DatagramHeader::decode(&head).filter(|_| is_complete)?;
        (self.incoming.readable(read).ok()? >= ahead + header.stream_bytes()).then_some(header)
    }

    /// Copies `len` unread bytes that begin `skip` bytes after the read position, as far as the buffers hold
    /// them.
    #[inline(always)]
    fn copy_ahead<B: RecvBuffer>(&self, buffers: &mut [B], mut skip: usize, len: usize) -> Result<(), Fault> {
        let (read, mut remaining) = (self.read_position(), len);
        for buffer in buffers {
            let count = remaining.min(buffer.len());
            self.incoming.copy_unread_to(read, skip, buffer, 0, count)?;
            (skip, remaining) = (skip + count, remaining - count);
            if remaining == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Returns how many bytes the next datagram has.
    pub fn next_datagram_bytes(&self) -> Option<usize> {
        self.next_header().map(|header| header.len as usize)
    }

    /// Copies the next datagram as far as the buffers hold it, and consumes it, even after a fault in a
    /// buffer (`udp_recvmsg`). A datagram that has to be requested is neither copied nor consumed.
    pub fn recv_datagram<B: RecvBuffer>(
        &self,
        buffers: &mut [B],
    ) -> Result<Option<TakenDatagram>, RecvError> {
        let _guard = self.lock().map_err(|()| RecvError::WouldBlock)?;
        let Some(header) = self.next_header() else { return Ok(None) };
        if header.is_oversize {
            return Ok(Some(TakenDatagram { header, wants_notice: false, copied: Ok(()) }));
        }
        let copied = self.copy_ahead(buffers, HEADER_BYTES, header.len as usize);
        let (_, wants_notice) = self.consume_locked(header.stream_bytes());
        Ok(Some(TakenDatagram { header, wants_notice, copied }))
    }

    /// Consumes the header of a datagram that was requested. Returns whether the stack wants to be notified.
    pub fn consume_header(&self) -> bool {
        let Ok(_guard) = self.lock() else { return false };
        self.consume_locked(HEADER_BYTES).1
    }

    /// Writes a datagram. Returns false if there was no space; the stack then notifies when there is. Nothing
    /// is written after a fault in a buffer.
    pub fn send_datagram<B: SendBuffer>(
        &self,
        header: &DatagramHeader,
        buffers: &[B],
        blocked: &AtomicBool,
    ) -> Result<Result<bool, Fault>, SendError> {
        let _guard = self.lock().map_err(|()| SendError::Full)?;
        let mut written = self.area.positions(Direction::Outgoing).written();
        let fits = |written| self.outgoing.space(written).unwrap_or(0) >= header.stream_bytes();
        if !fits(written) {
            blocked.store(true, Release);
            self.area.wants_send_space.store(1, Ordering::Relaxed);
            // Pairs with the fence of the stack, which reads this flag after it has freed space.
            fence(Ordering::SeqCst);
            if !fits(written) {
                return Ok(Ok(false));
            }
        }
        let encoded = header.encode();
        let _ = self.outgoing.copy_in(&mut written, &encoded[..], 0, encoded.len());
        for buffer in buffers {
            if let Ok(Err(Fault)) = self.outgoing.copy_in(&mut written, buffer, 0, buffer.len()) {
                return Ok(Err(Fault));
            }
        }
        self.outgoing.publish(written);
        Ok(Ok(true))
    }

    /// Returns the pending error of a UDP socket, and clears it if `take` is set.
    pub fn udp_error(&self, take: bool) -> Option<UdpError> {
        let word = &self.area.error;
        // Most sockets have no error and need no write.
        let found = error_from_word(word.load(Ordering::Acquire))?;
        if take {
            error_from_word(word.fetch_and(HAS_EXTENDED_ERRORS, Ordering::AcqRel))
        } else {
            Some(found)
        }
    }

    /// Returns whether the error queue has entries.
    pub fn has_extended_errors(&self) -> bool {
        self.area.error.load(Ordering::Acquire) & HAS_EXTENDED_ERRORS != 0
    }

    /// Returns the position of the writer: how many bytes were ever written.
    pub fn write_position(&self) -> u64 {
        self.area.positions(Direction::Outgoing).written()
    }

    /// Returns an upper limit of the bytes that were written and not yet sent. Only valid if the stack
    /// publishes how many bytes were sent ([`TcpOption::NotSentLowat`]).
    pub fn notsent(&self) -> usize {
        let written = self.area.positions(Direction::Outgoing).written();
        usize::try_from(written.saturating_sub(self.area.sent.load(Ordering::Acquire))).unwrap_or(usize::MAX)
    }

    /// Returns whether few enough bytes are unsent to write more, by the rule of Linux
    /// (`__sk_stream_memory_free`).
    #[inline]
    pub fn is_below_low_water(&self) -> bool {
        let low = self.area.option_values[pending_options::NOTSENT_LOWAT].load(Ordering::Relaxed) as usize;
        low == 0 || self.notsent() < low.div_ceil(2)
    }

    /// Marks the end of what was written as the end of a record. An earlier record end that the stack has not
    /// reached is forgotten.
    pub fn end_record(&self) {
        let written = self.area.positions(Direction::Outgoing).written();
        // Bytes that are written later come after this position.
        self.area.record_end.store(written, Ordering::Release);
    }

    /// Marks the end of what was written as the place after which bytes are held back, if there are bytes
    /// that the stack has not taken. The mark is left out if the stack has not yet reached the end of the
    /// last record.
    pub fn begin_hold(&self) {
        let positions = self.area.positions(Direction::Outgoing);
        let written = positions.written();
        if written > positions.taken() {
            let mark = written | HOLD_BEGINS;
            let _ = self.area.record_end.compare_exchange(0, mark, Ordering::Release, Ordering::Relaxed);
        }
    }

    /// Returns whether the stack has not yet reached the end of the last record.
    pub fn has_pending_record(&self) -> bool {
        self.area.record_end.load(Ordering::Relaxed) != 0
    }

    /// Returns whether the stack still sends from bytes in the buffer that it has taken.
    pub fn has_loan(&self) -> bool {
        let positions = self.area.positions(Direction::Outgoing);
        positions.taken() > positions.read()
    }

    /// Asks the stack to notify when there is send space.
    pub fn await_send_space(&self) {
        self.area.wants_send_space.store(1, Ordering::Relaxed);
        // Pairs with the fence of the stack, which reads this flag after it has freed space.
        fence(Ordering::SeqCst);
    }

    /// Sets an option of the connection. Returns [`OptionError::Stale`] if the connection is closed.
    pub fn set_option(&self, option: TcpOption) -> Result<(), OptionError> {
        if self.area.state.load(Ordering::Acquire) & state::CLOSED != 0 {
            return Err(OptionError::Stale);
        }
        pending_options::set(self.area, option);
        Ok(())
    }

    /// Sets request bits, each of which takes effect once.
    pub fn request(&self, bits: u32) {
        self.area.requests.fetch_or(bits, Ordering::Release);
    }
}
