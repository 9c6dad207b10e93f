//! The receiving half.

use super::AfXdpStats;
use super::filter::AttachedProgram;
use super::neighbours::NeighbourSocket;
use super::rings::{CONTINUED, ConsumerRing, ProducerRing, XdpDescriptor};
use super::socket::XdpSocket;
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
enum FrameLocation {
    /// In one chunk.
    Chunk(Range<usize>),
    /// Put together from several.
    Reassembled(Range<usize>),
}

/// Sleeps in a row without a frame after which errors are looked for.
pub(super) const EMPTY_SLEEPS_PER_ERROR_CHECK: u32 = 8;

/// The packet socket of a queue.
pub(super) enum PacketSocket {
    Neighbours(NeighbourSocket),
    LinkWatch(OwnedFd),
}

impl PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Neighbours(copies) => copies.as_fd(),
            Self::LinkWatch(fd) => fd.as_fd(),
        }
    }
}

pub(super) struct AfXdpRx {
    socket: Arc<XdpSocket>,
    ring: ConsumerRing<XdpDescriptor>,
    fill: ProducerRing<u64>,
    chunks: RxChunks,
    /// Chunks whose frames are lent, or were copied: they go back with the next call.
    held_chunks: Vec<u64>,
    /// Frames that take several chunks; empty if none can.
    reassembly: Box<[u8]>,
    /// Bytes of the longest frame.
    frame_bytes_max: usize,
    /// Hears what happens to the interface, and at the first queue what kernel and stack both get.
    packet_socket: PacketSocket,
    /// Readable when one of the two sockets is.
    epoll: OwnedFd,
    gone: bool,
    /// Something came since the last sleep.
    received: bool,
    /// Sleeps without a frame since one came, or errors were looked for.
    empty_sleeps: u32,
    stats: Arc<AfXdpStats>,
    /// It is the queue that reports what all have counted.
    pub(super) reports_stats: bool,
    /// The program stays as long as a half is there.
    _program: Arc<AttachedProgram>,
}

impl AfXdpRx {
    /// `joined_bytes`: room for frames in several chunks, or 0.
    pub(super) fn new(
        (socket, ring, fill, chunks): (
            Arc<XdpSocket>,
            ConsumerRing<XdpDescriptor>,
            ProducerRing<u64>,
            RxChunks,
        ),
        (frame_bytes_max, joined_bytes): (usize, usize),
        packets: PacketSocket,
        stats: Arc<AfXdpStats>,
        attached: Arc<AttachedProgram>,
    ) -> io::Result<Self> {
        let any = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&any, socket.as_fd(), EventData::new_u64(0), EventFlags::IN)?;
        epoll::add(&any, packets.as_fd(), EventData::new_u64(1), EventFlags::IN)?;
        Ok(Self {
            socket,
            ring,
            fill,
            held_chunks: Vec::with_capacity(chunks.addresses().count()),
            chunks,
            reassembly: vec![0; joined_bytes].into_boxed_slice(),
            frame_bytes_max,
            packet_socket: packets,
            epoll: any,
            gone: false,
            received: false,
            empty_sleeps: 0,
            stats,
            reports_stats: false,
            _program: attached,
        })
    }

    /// Another descriptor of what to sleep on.
    pub(super) fn clone_wake_fd(&self) -> io::Result<OwnedFd> {
        self.epoll.try_clone()
    }

    /// Gives back the chunks of the last burst.
    fn refill(&mut self) {
        for address in self.held_chunks.drain(..) {
            // There is an entry for each chunk, so there is room; a chunk that the kernel named twice may go.
            let _ = self.fill.push(address);
        }
        if self.fill.publish() && self.fill.needs_wakeup() {
            self.socket.kick_rx();
        }
    }

    /// The part of a frame that a descriptor names. Its chunk is held until the next call. `None`, and counted, if it names nothing.
    fn take_chunk(&mut self, descriptor: XdpDescriptor) -> Option<Range<usize>> {
        let Some(range) = self.chunks.locate(descriptor.address, descriptor.len) else {
            self.stats.rx_invalid.fetch_add(1, Ordering::Relaxed);
            return None;
        };
        if self.held_chunks.len() < self.held_chunks.capacity() {
            self.held_chunks.push(self.chunks.chunk_of(range.start));
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
    fn reassemble(&mut self, first: u32, count: u32, at: usize) -> Option<Range<usize>> {
        let mut end = at;
        let mut whole = true;
        for number in first..first + count {
            // All chunks are taken, also of a frame that is dropped, so that they go back.
            let Some(range) = self.take_chunk(self.ring.peek(number)) else {
                whole = false;
                continue;
            };
            let fits =
                end + range.len() <= self.reassembly.len() && end + range.len() - at <= self.frame_bytes_max;
            if !fits || !whole {
                whole = false;
                continue;
            }
            let bytes = self.chunks.bytes(range);
            self.reassembly[end..end + bytes.len()].copy_from_slice(bytes);
            end += bytes.len();
        }
        if !whole {
            self.stats.rx_dropped.fetch_add(1, Ordering::Relaxed);
        }
        whole.then_some(at..end)
    }

    /// Takes what fills the ring and is no frame, for no end of it can come any more.
    fn drop_incomplete(&mut self, available: u32) {
        for number in 0..available {
            self.take_chunk(self.ring.peek(number));
        }
        self.stats.rx_dropped.fetch_add(1, Ordering::Relaxed);
    }

    fn take_frames(&mut self, most: usize) -> ArrayVec<FrameLocation, BURST_FRAMES_MAX> {
        let mut places = ArrayVec::new();
        let available = self.ring.available();
        let (mut taken, mut joined) = (0, 0);
        while taken < available && places.len() < most {
            let descriptor = self.ring.peek(taken);
            if descriptor.options & CONTINUED == 0 {
                taken += 1;
                places.extend(self.take_chunk(descriptor).map(FrameLocation::Chunk));
                continue;
            }
            // The rest comes with the next burst, if this one has no room for it.
            let Some(count) = self.descriptors_of_frame(taken, available) else {
                if taken == 0 && available == self.ring.size() {
                    self.drop_incomplete(available);
                    taken = available;
                }
                break;
            };
            if joined + self.frame_bytes_max > self.reassembly.len() && joined > 0 {
                break;
            }
            if let Some(range) = self.reassemble(taken, count, joined) {
                joined = range.end.next_multiple_of(64);
                places.push(FrameLocation::Reassembled(range));
            }
            taken += count;
        }
        self.ring.release(taken);
        self.received |= taken > 0;
        places
    }

    /// The packet socket has an error, until it is taken, when the interface goes down or away. The other one only when it is deleted.
    fn take_errors(&mut self) {
        let _ = sockopt::socket_error(self.packet_socket.as_fd());
        if !self.gone && self.socket.take_error() == Some(Errno::NETDOWN) {
            self.gone = true;
            tracing::error!("the interface of an AF_XDP device was deleted");
        }
    }
}

impl RxQueue for AfXdpRx {
    fn rx_burst<'a>(&'a mut self, _now: Instant, burst: &mut RxBurst<'a>) {
        self.refill();
        if self.socket.busy_poll && self.ring.available() == 0 {
            self.socket.kick_rx();
        }
        let places = self.take_frames(burst.remaining_capacity());
        for place in places {
            let bytes = match place {
                FrameLocation::Chunk(range) => self.chunks.bytes(range),
                FrameLocation::Reassembled(range) => &self.reassembly[range],
            };
            burst.push(RxFrame::new(bytes));
        }
        if let PacketSocket::Neighbours(copies) = &mut self.packet_socket {
            copies.receive(burst);
        }
    }

    fn arm(&mut self) -> bool {
        self.refill();
        // Where frames come all is well. An error ends every sleep until it is taken, so it is looked for when some have ended without a frame.
        if core::mem::take(&mut self.received) {
            self.empty_sleeps = 0;
        } else {
            self.empty_sleeps += 1;
            if self.empty_sleeps == EMPTY_SLEEPS_PER_ERROR_CHECK {
                self.empty_sleeps = 0;
                self.take_errors();
            }
        }
        // The descriptors are readable as long as frames wait.
        !self.gone && self.ring.available() == 0
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.epoll.as_raw_fd())
    }

    fn is_gone(&self) -> bool {
        self.gone
    }

    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        if self.reports_stats {
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
