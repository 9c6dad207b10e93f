//! The receiving half.

use super::AfXdpStats;
use super::filter::Attached;
use super::neighbours::Copies;
use super::rings::{CONTINUED, Consumer, Descriptor, Producer};
use super::socket::Socket;
use super::umem::RxChunks;
use arrayvec::ArrayVec;
use ginnel_stack::device::{BURST_FRAMES_MAX, RxBurst, RxFrame, RxQueue};
use ginnel_stack::time::Instant;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Where a frame of this burst is.
enum Place {
    /// In one chunk.
    Chunk(Range<usize>),
    /// Put together from several.
    Joined(Range<usize>),
}

/// Sleeps in a row without a frame after which errors are looked for.
pub(super) const ERRORS_EVERY: u32 = 8;

/// The packet socket of a queue.
pub(super) enum Packets {
    Copies(Copies),
    Watch(OwnedFd),
}

impl Packets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Copies(copies) => copies.as_fd(),
            Self::Watch(fd) => fd.as_fd(),
        }
    }
}

pub(super) struct AfXdpRx {
    socket: Arc<Socket>,
    ring: Consumer<Descriptor>,
    fill: Producer<u64>,
    chunks: RxChunks,
    /// Chunks whose frames are lent, or were copied: they go back with the next call.
    held: Vec<u64>,
    /// Frames that take several chunks; empty if none can.
    joined: Box<[u8]>,
    /// Bytes of the longest frame.
    frame_bytes_max: usize,
    /// Hears what happens to the interface, and at the first queue what kernel and stack both get.
    packets: Packets,
    /// Readable when one of the two sockets is.
    any: OwnedFd,
    gone: bool,
    /// Something came since the last sleep.
    received: bool,
    /// Sleeps without a frame since one came, or errors were looked for.
    fruitless: u32,
    stats: Arc<AfXdpStats>,
    /// It is the queue that reports what all have counted.
    pub(super) reports: bool,
    /// The program stays as long as a half is there.
    _attached: Arc<Attached>,
}

impl AfXdpRx {
    /// `joined_bytes`: room for frames in several chunks, or 0.
    pub(super) fn new(
        (socket, ring, fill, chunks): (Arc<Socket>, Consumer<Descriptor>, Producer<u64>, RxChunks),
        (frame_bytes_max, joined_bytes): (usize, usize),
        packets: Packets,
        stats: Arc<AfXdpStats>,
        attached: Arc<Attached>,
    ) -> io::Result<Self> {
        let any = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&any, socket.as_fd(), EventData::new_u64(0), EventFlags::IN)?;
        epoll::add(&any, packets.as_fd(), EventData::new_u64(1), EventFlags::IN)?;
        Ok(Self {
            socket,
            ring,
            fill,
            held: Vec::with_capacity(chunks.addresses().count()),
            chunks,
            joined: vec![0; joined_bytes].into_boxed_slice(),
            frame_bytes_max,
            packets,
            any,
            gone: false,
            received: false,
            fruitless: 0,
            stats,
            reports: false,
            _attached: attached,
        })
    }

    /// Another descriptor of what to sleep on.
    pub(super) fn waker(&self) -> io::Result<OwnedFd> {
        self.any.try_clone()
    }

    /// Gives back the chunks of the last burst.
    fn give_back(&mut self) {
        for address in self.held.drain(..) {
            // There is an entry for each chunk, so there is room; a chunk that the kernel named twice may go.
            let _ = self.fill.push(address);
        }
        if self.fill.publish() && self.fill.needs_wakeup() {
            self.socket.wake_for_receiving();
        }
    }

    /// The part of a frame that a descriptor names. Its chunk is held until the next call. `None`, and counted, if it names nothing.
    fn part(&mut self, descriptor: Descriptor) -> Option<Range<usize>> {
        let Some(range) = self.chunks.locate(descriptor.address, descriptor.len) else {
            self.stats.rx_invalid.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        if self.held.len() < self.held.capacity() {
            self.held.push(self.chunks.chunk_of(range.start));
        }
        Some(range)
    }

    /// Descriptors of the frame that starts at `first`, if all of it is there.
    fn descriptors_of_frame(&self, first: u32, available: u32) -> Option<u32> {
        (first..available)
            .find(|&at| self.ring.peek(at).options & CONTINUED == 0)
            .map(|last| last + 1 - first)
    }

    /// Copies the parts of a frame behind each other to `at`. `None` if the frame is to be dropped.
    fn join(&mut self, first: u32, count: u32, at: usize) -> Option<Range<usize>> {
        let mut end = at;
        let mut whole = true;
        for number in first..first + count {
            // All chunks are taken, also of a frame that is dropped, so that they go back.
            let Some(range) = self.part(self.ring.peek(number)) else {
                whole = false;
                continue;
            };
            let fits =
                end + range.len() <= self.joined.len() && end + range.len() - at <= self.frame_bytes_max;
            if !fits || !whole {
                whole = false;
                continue;
            }
            let bytes = self.chunks.bytes(range);
            self.joined[end..end + bytes.len()].copy_from_slice(bytes);
            end += bytes.len();
        }
        if !whole {
            self.stats.rx_dropped.fetch_add(1, Ordering::Relaxed);
        }
        whole.then_some(at..end)
    }

    /// Takes what fills the ring and is no frame, for no end of it can come any more.
    fn drop_all(&mut self, available: u32) {
        for number in 0..available {
            self.part(self.ring.peek(number));
        }
        self.stats.rx_dropped.fetch_add(1, Ordering::Relaxed);
    }

    fn frames_of_socket(&mut self, most: usize) -> ArrayVec<Place, BURST_FRAMES_MAX> {
        let mut places = ArrayVec::new();
        let available = self.ring.available();
        let (mut taken, mut joined) = (0, 0);
        while taken < available && places.len() < most {
            let descriptor = self.ring.peek(taken);
            if descriptor.options & CONTINUED == 0 {
                taken += 1;
                places.extend(self.part(descriptor).map(Place::Chunk));
                continue;
            }
            // The rest comes with the next burst, if this one has no room for it.
            let Some(count) = self.descriptors_of_frame(taken, available) else {
                if taken == 0 && available == self.ring.size() {
                    self.drop_all(available);
                    taken = available;
                }
                break;
            };
            if joined + self.frame_bytes_max > self.joined.len() && joined > 0 {
                break;
            }
            if let Some(range) = self.join(taken, count, joined) {
                joined = range.end.next_multiple_of(64);
                places.push(Place::Joined(range));
            }
            taken += count;
        }
        self.ring.release(taken);
        self.received |= taken > 0;
        places
    }

    /// The packet socket has an error, until it is taken, when the interface goes down or away. The other one only when it is deleted.
    fn take_errors(&mut self) {
        let _ = sockopt::socket_error(self.packets.as_fd());
        if !self.gone && self.socket.take_error() == Some(Errno::NETDOWN) {
            self.gone = true;
            tracing::error!("the interface of an AF_XDP device was deleted");
        }
    }
}

impl RxQueue for AfXdpRx {
    fn rx_burst<'a>(&'a mut self, _now: Instant, burst: &mut RxBurst<'a>) {
        self.give_back();
        if self.socket.busy_poll && self.ring.available() == 0 {
            self.socket.wake_for_receiving();
        }
        let places = self.frames_of_socket(burst.remaining_capacity());
        for place in places {
            let bytes = match place {
                Place::Chunk(range) => self.chunks.bytes(range),
                Place::Joined(range) => &self.joined[range],
            };
            burst.push(RxFrame::new(bytes));
        }
        if let Packets::Copies(copies) = &mut self.packets {
            copies.receive(burst);
        }
    }

    fn arm(&mut self) -> bool {
        self.give_back();
        // Where frames come all is well. An error ends every sleep until it is taken, so it is looked for when some have ended without a frame.
        if core::mem::take(&mut self.received) {
            self.fruitless = 0;
        } else {
            self.fruitless += 1;
            if self.fruitless == ERRORS_EVERY {
                self.fruitless = 0;
                self.take_errors();
            }
        }
        // The descriptors are readable as long as frames wait.
        !self.gone && self.ring.available() == 0
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.any.as_raw_fd())
    }

    fn is_gone(&self) -> bool {
        self.gone
    }

    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        if self.reports {
            let AfXdpStats { rx_invalid, rx_dropped, tx_invalid, tx_errors, tx_calls } = &*self.stats;
            for (name, count) in [
                ("xdp_rx_invalid", rx_invalid),
                ("xdp_rx_dropped", rx_dropped),
                ("xdp_tx_invalid", tx_invalid),
                ("xdp_tx_errors", tx_errors),
                ("xdp_tx_calls", tx_calls),
            ] {
                report(name, count.load(Ordering::Relaxed));
            }
        }
    }
}
