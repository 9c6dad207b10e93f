//! What clients do with the bytes of a socket. Positions stand in the region, so that whoever holds the socket goes on where another stopped;
//! who shares it with others does so under the lock.

use super::datagram::{DatagramHeader, HAS_EXTENDED_ERRORS, HEADER_BYTES, error_from_word};
use super::lock::{self, SocketLockGuard};
use super::pending_options;
use super::region::{Direction, Region, SocketArea};
use super::socket::{close_reason, closed_bits, request, state};
use super::stream::Stream;
use super::sync::{Ordering, fence};
use super::urgent_mark::{self, UrgentMark};
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Release;
use core::time::Duration;
use ginnel_stack::error::{OptionError, RecvError, SendError};
use ginnel_stack::events::CloseReason;
use ginnel_stack::options::TcpOption;
use ginnel_stack::udp::UdpError;
use std::io::{IoSlice, IoSliceMut};

/// A holder that runs is done in microseconds; one that was stopped in the middle must not stop others.
const LOCK_TIMEOUT: Duration = Duration::from_millis(20);

/// How a socket stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketStatus {
    /// Bytes that wait to be read.
    pub readable: usize,
    /// Bytes that can be written now.
    pub send_space: usize,
    /// Bytes that were written and that the stack has not taken.
    pub unsent: usize,
    /// Bytes that were written and lie in the buffer: the stack gives their room back when it has copied them, or when the peer has acknowledged them.
    pub occupied: usize,
    /// The rest, which was looked at before: all that came before an end is there.
    pub state: SocketState,
    /// Somebody who holds it has ended its write side.
    pub is_write_closed: bool,
    /// How often urgent data were announced or came, or datagrams came. If it is not 0, reads have to heed [`Client::mark`](super::Client::mark).
    pub oob_events: u32,
}

/// How a connection stands but for its bytes: one word, which the stack writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketState(u32);

impl SocketState {
    /// What the word says.
    #[inline]
    pub(super) fn load(words: &SocketArea) -> Self {
        Self(words.state.load(Ordering::Acquire))
    }

    /// The same of a stack that is gone, and does not write it down any more.
    #[cold]
    pub(super) fn with_stack_lost(self) -> Self {
        if self.is_closed() { self } else { Self(self.0 | closed_bits(CloseReason::Reset)) }
    }

    /// The same of one whose bytes could not be looked at: its end stands behind them, and does not show yet.
    #[cold]
    pub(super) fn without_end(self) -> Self {
        Self(self.0 & !(state::FIN | state::CLOSED))
    }

    /// It is established, or was.
    #[inline]
    pub fn is_connected(self) -> bool {
        self.0 & state::CONNECTED != 0
    }

    /// The peer's FIN follows what there is to read.
    #[inline]
    pub fn has_fin(self) -> bool {
        self.0 & state::FIN != 0
    }

    /// It is over.
    #[inline]
    pub fn is_closed(self) -> bool {
        self.0 & state::CLOSED != 0
    }

    /// Why, if it is.
    pub fn close_reason(self) -> Option<CloseReason> {
        close_reason(self.0)
    }
}

/// A client's grip on a socket.
#[derive(Clone, Copy)]
pub(super) struct SocketRef<'a> {
    words: &'a SocketArea,
    incoming: Stream<'a>,
    outgoing: Stream<'a>,
    /// The client's number, if others may use the socket at the same time.
    shared_by: Option<usize>,
}

impl<'a> SocketRef<'a> {
    #[inline]
    pub fn new(region: &'a Region, socket: u32, shared_by: Option<usize>) -> Self {
        let (words, incoming, outgoing) = region.socket_and_streams(socket);
        Self { words, incoming, outgoing, shared_by }
    }

    /// `Err`: another holder has it and was stopped there.
    #[inline]
    fn lock(&self) -> Result<Option<SocketLockGuard<'a>>, ()> {
        match self.shared_by {
            None => Ok(None),
            Some(client) => lock::lock(&self.words.lock, client, LOCK_TIMEOUT).map(Some).ok_or(()),
        }
    }

    #[inline]
    pub fn state(&self) -> SocketState {
        SocketState::load(self.words)
    }

    /// The bytes, to what was said before of the rest: so all that came before an end is there.
    #[inline(always)]
    pub fn status(&self, standing: SocketState) -> SocketStatus {
        let requests = self.words.requests.load(Ordering::Relaxed);
        let positions = self.words.positions(Direction::Outgoing);
        let written = positions.written();
        let waiting = self.outgoing.unread(written);
        let occupied = waiting.unwrap_or(0);
        SocketStatus {
            readable: self.readable(),
            send_space: waiting.map_or(0, |waiting| self.outgoing.space_beside(waiting)),
            unsent: written.saturating_sub(positions.taken()).min(occupied as u64) as usize,
            occupied,
            state: standing,
            is_write_closed: requests & (request::SHUTDOWN | request::CLOSE | request::ABORT) != 0,
            oob_events: self.words.oob_events.load(Ordering::Relaxed),
        }
    }

    /// Bytes that can be written now.
    #[inline]
    pub fn send_space(&self) -> usize {
        self.outgoing.space(self.words.positions(Direction::Outgoing).written()).unwrap_or(0)
    }

    #[inline]
    pub fn read_position(&self) -> u64 {
        self.words.positions(Direction::Incoming).read()
    }

    #[inline]
    pub fn readable(&self) -> usize {
        // The stack can be trusted, and other holders are of the same domain: what cannot be is nothing.
        self.incoming.readable(self.read_position()).unwrap_or(0)
    }

    #[inline]
    pub fn peek(&self, skip: usize, out: &mut [u8]) -> Result<usize, RecvError> {
        let _guard = self.lock().map_err(|()| RecvError::WouldBlock)?;
        Ok(self.incoming.peek(self.read_position(), skip, out).unwrap_or(0))
    }

    /// Takes up to `count` bytes off. Whether the stack wants to hear of it.
    #[inline]
    pub fn consume(&self, count: usize) -> bool {
        // Without the lock nothing is taken, and what was peeked at comes again.
        let Ok(_guard) = self.lock() else { return false };
        self.consume_locked(count)
    }

    #[inline]
    fn consume_locked(&self, count: usize) -> bool {
        let read = self.read_position();
        let waiting = self.incoming.readable(read).unwrap_or(0);
        self.advance_read(read, count.min(waiting))
    }

    /// The same of bytes that wait behind this position.
    #[inline]
    fn advance_read(&self, mut read: u64, count: usize) -> bool {
        self.incoming.consume(&mut read, count);
        // Pairs with the fence of the stack's, which asks for this before it looks once more.
        fence(Ordering::SeqCst);
        let wants = &self.words.wants_recv_space;
        wants.load(Ordering::Relaxed) != 0 && wants.swap(0, Ordering::Relaxed) != 0
    }

    /// Reads and takes what waits: how many bytes, and whether the stack wants to hear of it.
    #[inline]
    pub fn recv(&self, out: &mut [u8]) -> Result<(usize, bool), RecvError> {
        let _guard = self.lock().map_err(|()| RecvError::WouldBlock)?;
        let count = self.incoming.peek(self.read_position(), 0, out).unwrap_or(0);
        Ok((count, self.consume_locked(count)))
    }

    /// The same into buffers, behind `skip` bytes of them. `None`, and nothing is taken, if there ever were urgent data: then reads have to heed the mark.
    ///
    /// Who waits for bytes that are not there takes no lock.
    #[inline]
    pub fn recv_into(
        &self,
        buffers: &mut [IoSliceMut<'_>],
        mut skip: usize,
    ) -> Result<Option<(usize, bool)>, RecvError> {
        if self.readable() == 0 {
            return Ok(self.has_no_oob_events().then_some((0, false)));
        }
        let _guard = self.lock().map_err(|()| RecvError::WouldBlock)?;
        let read = self.read_position();
        let waiting = self.incoming.readable(read).unwrap_or(0);
        // Behind the position: what came with an urgent byte, or behind one, is not taken for what it is not.
        if !self.has_no_oob_events() {
            return Ok(None);
        }
        let mut copied = 0;
        for buffer in buffers {
            if skip >= buffer.len() {
                skip -= buffer.len();
                continue;
            }
            let place = &mut buffer[skip..];
            skip = 0;
            let count = place.len().min(waiting - copied);
            self.incoming.copy_unread(read, copied, &mut place[..count]);
            copied += count;
            if copied == waiting {
                break;
            }
        }
        Ok(Some((copied, self.advance_read(read, copied))))
    }

    /// Whether there never were urgent data, nor datagrams.
    #[inline]
    fn has_no_oob_events(&self) -> bool {
        self.words.oob_events.load(Ordering::Relaxed) == 0
    }

    /// Writes what there is room for; how many bytes. If that is not all, `blocked` is set, and the stack tells when there is room.
    #[inline]
    pub fn send(&self, bytes: &[u8], blocked: &AtomicBool) -> Result<usize, SendError> {
        let requests = self.words.requests.load(Ordering::Relaxed);
        let closed = requests & (request::SHUTDOWN | request::CLOSE | request::ABORT) != 0;
        if closed || self.words.state.load(Ordering::Acquire) & state::CLOSED != 0 {
            return Err(SendError::Closed);
        }
        let _guard = self.lock().map_err(|()| SendError::Full)?;
        let mut written = self.words.positions(Direction::Outgoing).written();
        let mut count = self.outgoing.write(&mut written, bytes).unwrap_or(0);
        while count < bytes.len() {
            // First: who waits for events may hear of room before this returns.
            blocked.store(true, Release);
            self.words.wants_send_space.store(1, Ordering::Relaxed);
            // Pairs with the fence of the stack's, which looks for this after it made room.
            fence(Ordering::SeqCst);
            let more = self.outgoing.write(&mut written, &bytes[count..]).unwrap_or(0);
            count += more;
            if more == 0 {
                return Ok(count);
            }
        }
        if self.shared_by.is_none() {
            // Nobody else waits for room.
            blocked.store(false, Release);
        }
        Ok(count)
    }

    /// The urgent byte that was announced last, if reading has not passed it. Bytes that were urgent and next when another was announced are dropped
    /// before (`tcp_check_urg`); the second value is whether the stack wants to hear of that.
    pub fn urgent_mark(&self) -> (Option<UrgentMark>, bool) {
        let mut ring = false;
        if urgent_mark::hole_bytes(self.words, self.read_position()) > 0
            && let Ok(_guard) = self.lock()
        {
            ring = self.consume_locked(urgent_mark::hole_bytes(self.words, self.read_position()));
        }
        (urgent_mark::current(self.words, self.read_position()), ring)
    }

    /// Takes the urgent byte out of line.
    pub fn take_urgent(&self) -> Option<u8> {
        urgent_mark::take_byte(self.words, self.read_position())
    }

    /// The header of the datagram that is next, if all of it is there.
    fn next_header(&self) -> Option<DatagramHeader> {
        let read = self.read_position();
        let mut head = [0; HEADER_BYTES];
        let there = self.incoming.peek(read, 0, &mut head) == Ok(HEADER_BYTES);
        let header = DatagramHeader::decode(&head).filter(|_| there)?;
        (self.incoming.readable(read).ok()? >= header.stream_bytes()).then_some(header)
    }

    /// Bytes of the datagram that is next.
    pub fn next_datagram_bytes(&self) -> Option<usize> {
        self.next_header().map(|header| header.len as usize)
    }

    /// Copies the next datagram as far as there is room, and takes it if `take`. Whether the stack wants to hear of that. Nothing is taken of one that
    /// is to be asked for.
    pub fn recv_datagram(
        &self,
        buffers: &mut [IoSliceMut<'_>],
        take: bool,
    ) -> Result<Option<(DatagramHeader, bool)>, RecvError> {
        let _guard = self.lock().map_err(|()| RecvError::WouldBlock)?;
        let Some(header) = self.next_header() else { return Ok(None) };
        if header.is_oversize {
            return Ok(Some((header, false)));
        }
        let (read, mut skip, mut left) = (self.read_position(), HEADER_BYTES, header.len as usize);
        for buffer in buffers {
            let count = left.min(buffer.len());
            let copied = self.incoming.peek(read, skip, &mut buffer[..count]).unwrap_or(0);
            (skip, left) = (skip + copied, left - copied);
            if left == 0 {
                break;
            }
        }
        let ring = take && self.consume_locked(header.stream_bytes());
        Ok(Some((header, ring)))
    }

    /// Takes the header of a datagram that was asked for. Whether the stack wants to hear of that.
    pub fn consume_header(&self) -> bool {
        let Ok(_guard) = self.lock() else { return false };
        self.consume_locked(HEADER_BYTES)
    }

    /// Writes a datagram; whether there was room. If there was not, the stack tells when there is.
    pub fn send_datagram(
        &self,
        header: &DatagramHeader,
        buffers: &[IoSlice<'_>],
        blocked: &AtomicBool,
    ) -> Result<bool, SendError> {
        let _guard = self.lock().map_err(|()| SendError::Full)?;
        let mut written = self.words.positions(Direction::Outgoing).written();
        let fits = |written| self.outgoing.space(written).unwrap_or(0) >= header.stream_bytes();
        if !fits(written) {
            blocked.store(true, Release);
            self.words.wants_send_space.store(1, Ordering::Relaxed);
            // Pairs with the fence of the stack's, which looks for this after it made room.
            fence(Ordering::SeqCst);
            if !fits(written) {
                return Ok(false);
            }
        }
        let _ = self.outgoing.write(&mut written, &header.encode());
        for buffer in buffers {
            let _ = self.outgoing.write(&mut written, buffer);
        }
        Ok(true)
    }

    /// What ICMP said about a datagram.
    pub fn udp_error(&self, take: bool) -> Option<UdpError> {
        let word = &self.words.error;
        // Most sockets have none: no need to write there.
        let found = error_from_word(word.load(Ordering::Acquire))?;
        if take {
            error_from_word(word.fetch_and(HAS_EXTENDED_ERRORS, Ordering::AcqRel))
        } else {
            Some(found)
        }
    }

    /// Whether there are reports of errors to be asked for.
    pub fn has_extended_errors(&self) -> bool {
        self.words.error.load(Ordering::Acquire) & HAS_EXTENDED_ERRORS != 0
    }

    /// Bytes that were ever written.
    pub fn write_position(&self) -> u64 {
        self.words.positions(Direction::Outgoing).written()
    }

    /// Bytes that were written and have not left, at the most: only where the stack says how many have ([`TcpOption::NotSentLowWater`]).
    pub fn not_sent(&self) -> usize {
        let written = self.words.positions(Direction::Outgoing).written();
        usize::try_from(written.saturating_sub(self.words.sent.load(Ordering::Acquire))).unwrap_or(usize::MAX)
    }

    /// Whether so few were not sent that more may be written, as Linux says it (`__sk_stream_memory_free`).
    #[inline]
    pub fn is_below_low_water(&self) -> bool {
        let low =
            self.words.option_values[pending_options::NOT_SENT_LOW_WATER].load(Ordering::Relaxed) as usize;
        low == 0 || self.not_sent() < low.div_ceil(2)
    }

    /// What was written is the end of a record. Of one that the stack has not come to nothing is known any more.
    pub fn end_record(&self) {
        let written = self.words.positions(Direction::Outgoing).written();
        // What is written later is so behind this.
        self.words.record_end.store(written, Ordering::Release);
    }

    /// Whether the stack has not come to the end of the last record.
    pub fn has_pending_record(&self) -> bool {
        self.words.record_end.load(Ordering::Relaxed) != 0
    }

    /// The stack sends from the buffer what it has taken.
    pub fn has_loan(&self) -> bool {
        let positions = self.words.positions(Direction::Outgoing);
        positions.taken() > positions.read()
    }

    /// The stack is to tell when there is room.
    pub fn await_send_space(&self) {
        self.words.wants_send_space.store(1, Ordering::Relaxed);
        // Pairs with the fence of the stack's, which looks for this after it made room.
        fence(Ordering::SeqCst);
    }

    /// An option that the connection is to have. [`OptionError::Stale`] if it is over.
    pub fn set_option(&self, option: TcpOption) -> Result<(), OptionError> {
        if self.words.state.load(Ordering::Acquire) & state::CLOSED != 0 {
            return Err(OptionError::Stale);
        }
        pending_options::set(self.words, option);
        Ok(())
    }

    /// Asks for something that is done once.
    pub fn request(&self, what: u32) {
        self.words.requests.fetch_or(what, Ordering::Release);
    }
}
