//! The receiving half of an AF_XDP device.

use super::filter::AttachedProgram;
use super::neighbours::NeighbourSocket;
use super::rings::{CONTINUED, ConsumerRing, ProducerRing, XdpDescriptor};
use super::socket::{RxRings, XdpSocket};
use super::umem::RxChunks;
use super::{AfXdpStats, add};
use crate::partial_checksums::PartialChecksumCheck;
use arrayvec::ArrayVec;
use ginnel_stack::device::{BURST_FRAMES_MAX, RxBurst, RxChecksum, RxFrame, RxQueue};
use ginnel_stack::time::Instant;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::net::sockopt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Location of a frame of the current burst.
enum FrameLocation {
    /// In one chunk.
    Chunk(Range<usize>),
    /// In the reassembly buffer, copied from several chunks.
    Reassembled(Range<usize>),
}

/// Number of consecutive sleeps without a frame after which socket errors are checked.
pub(super) const EMPTY_SLEEPS_PER_ERROR_CHECK: u32 = 8;

/// The packet socket of a queue.
pub(super) enum PacketSocket {
    /// At the first queue, unless all frames are redirected: receives copies of neighbour messages, and
    /// reports changes of the interface.
    Neighbours(NeighbourSocket),
    /// At the other queues: reports changes of the interface.
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
    /// Chunks whose frames are lent or were copied. The next call returns them to the fill ring.
    held_chunks: Vec<u64>,
    /// Buffer for frames that span several chunks; empty if no frame can.
    reassembly: Box<[u8]>,
    /// Bytes of the longest frame.
    frame_bytes_max: usize,
    /// Reports changes of the interface, and at the first queue receives copies of neighbour messages.
    packet_socket: PacketSocket,
    pub(super) partial_checksums: PartialChecksumCheck,
    /// Epoll set that is readable when one of the two sockets is.
    epoll: OwnedFd,
    gone: bool,
    /// True if a frame was received since the last sleep.
    received: bool,
    /// Number of sleeps without a frame, since a frame was received or errors were checked.
    empty_sleeps: u32,
    stats: Arc<AfXdpStats>,
    /// Keeps the program attached while a half exists.
    _program: Arc<AttachedProgram>,
}

impl AfXdpRx {
    /// Creates the half. `reassembly_bytes` is the size of the reassembly buffer, or 0.
    pub(super) fn new(
        socket: Arc<XdpSocket>,
        RxRings { ring, fill, chunks }: RxRings,
        frame_bytes_max: usize,
        reassembly_bytes: usize,
        packet_socket: PacketSocket,
        stats: Arc<AfXdpStats>,
        program: Arc<AttachedProgram>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, socket.as_fd(), EventData::new_u64(0), EventFlags::IN)?;
        epoll::add(&epoll, packet_socket.as_fd(), EventData::new_u64(1), EventFlags::IN)?;
        Ok(Self {
            socket,
            ring,
            fill,
            held_chunks: Vec::with_capacity(chunks.addresses().count()),
            chunks,
            reassembly: vec![0; reassembly_bytes].into_boxed_slice(),
            frame_bytes_max,
            packet_socket,
            partial_checksums: PartialChecksumCheck::Off,
            epoll,
            gone: false,
            received: false,
            empty_sleeps: 0,
            stats,
            _program: program,
        })
    }

    /// Returns a copy of the descriptor to sleep on.
    pub(super) fn clone_wake_fd(&self) -> io::Result<OwnedFd> {
        self.epoll.try_clone()
    }

    /// Returns the chunks of the last burst to the fill ring.
    fn refill(&mut self) {
        for address in self.held_chunks.drain(..) {
            // The ring has an entry for each chunk, so there is room; a chunk that the kernel named twice may
            // be dropped.
            let _ = self.fill.push(address);
        }
        if self.fill.publish() && self.fill.needs_wakeup() {
            self.socket.kick_rx();
        }
    }

    /// Returns the range of a descriptor, and holds its chunk until the next call. Returns `None`, and counts
    /// the descriptor, if it is invalid.
    fn take_chunk(&mut self, descriptor: XdpDescriptor) -> Option<Range<usize>> {
        let Some(range) = self.chunks.locate(descriptor.address, descriptor.len) else {
            add(&self.stats.rx_invalid, 1);
            return None;
        };
        if self.held_chunks.len() < self.held_chunks.capacity() {
            self.held_chunks.push(self.chunks.chunk_of(range.start));
        }
        Some(range)
    }

    /// Returns the number of descriptors of the frame that starts at `first`, if all of them are available.
    fn descriptors_of_frame(&self, first: u32, available: u32) -> Option<u32> {
        (first..available)
            .find(|&at| self.ring.peek(at).options & CONTINUED == 0)
            .map(|last| last + 1 - first)
    }

    /// Copies the parts of a frame one after another to offset `at` of the reassembly buffer. Returns `None`
    /// if the frame is dropped.
    fn reassemble(&mut self, first: u32, count: u32, at: usize) -> Option<Range<usize>> {
        let mut end = at;
        let mut is_complete = true;
        for number in first..first + count {
            // The chunks of a dropped frame are taken, too, so that they return to the fill ring.
            let Some(range) = self.take_chunk(self.ring.peek(number)) else {
                is_complete = false;
                continue;
            };
            let fits =
                end + range.len() <= self.reassembly.len() && end + range.len() - at <= self.frame_bytes_max;
            if !fits || !is_complete {
                is_complete = false;
                continue;
            }
            let bytes = self.chunks.bytes(range);
            self.reassembly[end..end + bytes.len()].copy_from_slice(bytes);
            end += bytes.len();
        }
        if !is_complete {
            add(&self.stats.rx_dropped, 1);
        }
        is_complete.then_some(at..end)
    }

    /// Drops the descriptors of an incomplete frame that fills the whole ring, because its end cannot arrive
    /// any more.
    fn drop_incomplete(&mut self, available: u32) {
        for number in 0..available {
            self.take_chunk(self.ring.peek(number));
        }
        add(&self.stats.rx_dropped, 1);
    }

    fn take_frames(&mut self, frames_max: usize) -> ArrayVec<FrameLocation, BURST_FRAMES_MAX> {
        let mut frames = ArrayVec::new();
        let available = self.ring.available();
        let (mut taken, mut reassembled_bytes) = (0, 0);
        while taken < available && frames.len() < frames_max {
            let descriptor = self.ring.peek(taken);
            if descriptor.options & CONTINUED == 0 {
                taken += 1;
                frames.extend(self.take_chunk(descriptor).map(FrameLocation::Chunk));
                continue;
            }
            // A frame whose end has not arrived waits, unless it fills the whole ring.
            let Some(count) = self.descriptors_of_frame(taken, available) else {
                if taken == 0 && available == self.ring.size() {
                    self.drop_incomplete(available);
                    taken = available;
                }
                break;
            };
            // If the reassembly buffer has no room for the frame, the next burst takes it.
            if reassembled_bytes + self.frame_bytes_max > self.reassembly.len() && reassembled_bytes > 0 {
                break;
            }
            if let Some(range) = self.reassemble(taken, count, reassembled_bytes) {
                reassembled_bytes = range.end.next_multiple_of(64);
                frames.push(FrameLocation::Reassembled(range));
            }
            taken += count;
        }
        self.ring.release(taken);
        self.received |= taken > 0;
        frames
    }

    /// Reads socket errors. The packet socket has one when the interface goes down or is deleted, the AF_XDP
    /// socket only when it is deleted.
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
        let frames = self.take_frames(burst.remaining_capacity());
        let mut partial_checksums = 0;
        for frame in frames {
            let bytes = match frame {
                FrameLocation::Chunk(range) => self.chunks.bytes(range),
                FrameLocation::Reassembled(range) => &self.reassembly[range],
            };
            let checksum = self.partial_checksums.checksum_of(bytes);
            partial_checksums += u64::from(matches!(checksum, RxChecksum::Partial { .. }));
            burst.push(RxFrame { checksum, ..RxFrame::new(bytes) });
        }
        if partial_checksums > 0 {
            add(&self.stats.rx_partial_checksums, partial_checksums);
        }
        if let PacketSocket::Neighbours(copies) = &mut self.packet_socket {
            copies.receive(burst);
        }
    }

    fn arm(&mut self) -> bool {
        self.refill();
        // If frames arrive, the interface works. A pending error ends every sleep until it is read, so errors
        // are checked after some sleeps without a frame.
        if core::mem::take(&mut self.received) {
            self.empty_sleeps = 0;
        } else {
            self.empty_sleeps += 1;
            if self.empty_sleeps == EMPTY_SLEEPS_PER_ERROR_CHECK {
                self.empty_sleeps = 0;
                self.take_errors();
            }
        }
        // The descriptors are readable while frames are waiting.
        !self.gone && self.ring.available() == 0
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.epoll.as_raw_fd())
    }

    fn is_gone(&self) -> bool {
        self.gone
    }

    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        let AfXdpStats { rx_invalid, rx_dropped, rx_partial_checksums, tx_invalid, tx_errors, tx_calls } =
            &*self.stats;
        for (name, count) in [
            ("xdp_rx_invalid", rx_invalid),
            ("xdp_rx_dropped", rx_dropped),
            ("xdp_rx_partial_checksums", rx_partial_checksums),
            ("xdp_tx_invalid", tx_invalid),
            ("xdp_tx_errors", tx_errors),
            ("xdp_tx_calls", tx_calls),
        ] {
            report(name, count.load(Ordering::Relaxed));
        }
    }
}
