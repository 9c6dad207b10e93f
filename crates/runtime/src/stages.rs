//! Latency stages of sampled connections (`ginnel ss --stages`): how long received data and the answer take
//! on their way through the stack and the program.
//!
//! ```text
//!   device ─ receive ─► program's buffer ─ read ─► program ─ answer ─► stack ─ send ─► device
//! ```
//!
//! The stamps are taken by layers around the devices, and by the channel where it handles sockets whose
//! arrivals it reports. Both exist only while connections are sampled: otherwise packets and calls take the
//! way that they would take without this module.

use crate::clock;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel_devices::mirror::FrameSink;
use ginnel_stack::device::TxMeta;
use ginnel_stack::time::Instant;
use ginnel_stack::wire::ethernet::{self, EtherType};
use ginnel_stack::wire::protocol;
use ginnel_stack::wire::tcp::TcpSegment;
use ginnel_stack::wire::{ipv4, ipv6};
use rustc_hash::FxHashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Names of the stages, in the order of a request's way:
///
/// 1. from the burst with a frame until its data are in the program's buffer;
/// 2. from then until the shard has noticed that the program read them;
/// 3. from then until the shard took the program's next bytes;
/// 4. from then until the device got the first of these bytes.
pub const STAGE_NAMES: [&str; 4] = ["receive", "read", "answer", "send"];
const RECEIVE: usize = 0;
const READ: usize = 1;
const ANSWER: usize = 2;
const SEND: usize = 3;

/// Weight of a new sample in the smoothed mean: one in this many, as of the smoothed round-trip time.
const SMOOTHING: u32 = 8;

/// Upper bound of all receive windows in bytes (RFC 7323 §2.3).
const RECV_WINDOW_MAX: u32 = 1 << 30;

/// A function that returns the current time.
pub type StageClock = fn() -> Instant;

/// The samples of a stage of one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Number of samples.
    pub count: u32,
    /// Smoothed mean.
    pub mean: Duration,
    /// Longest time.
    pub max: Duration,
}

impl StageTimes {
    fn add(&mut self, sample: Duration) {
        self.mean = match self.count {
            0 => sample,
            _ => (self.mean * (SMOOTHING - 1) + sample) / SMOOTHING,
        };
        self.max = self.max.max(sample);
        self.count = self.count.saturating_add(1);
    }
}

/// The state of a connection: of each stage at most one sample is under way.
#[derive(Clone, Copy, Debug, Default)]
struct ConnStages {
    /// When the burst was received whose data are not in the program's buffer yet.
    arrived: Option<Instant>,
    /// When data came into the program's buffer, and their end in the stream.
    delivered: Option<(Instant, u64)>,
    /// When the program had read what it has not answered yet.
    read: Option<Instant>,
    /// Position up to which the program had written when the shard looked last.
    written: u64,
    /// When the shard took bytes of the program, and how many earlier bytes are sent before them.
    taken: Option<(Instant, u32)>,
    /// Sequence numbers after the last byte that was received and sent; `None` if the connection is not
    /// sampled.
    ends: Option<[u32; 2]>,
    /// The device gets the bytes with this burst.
    is_committed: bool,
    times: [StageTimes; 4],
}

#[derive(Debug)]
struct SamplerState {
    clock: StageClock,
    conns: Vec<ConnStages>,
    /// The slots of the connections by their local address and their peer's.
    by_ends: FxHashMap<[SocketAddr; 2], u32>,
    /// When the burst was received that is being copied.
    burst_at: Option<Instant>,
    /// Connections whose bytes are in the burst that is sent.
    committed: Vec<u32>,
}

/// The sampled connections of one shard. Only threads that run the shard's turns and the one that reads the
/// result use it.
#[derive(Debug)]
pub struct StageSampler(Mutex<SamplerState>);

impl StageSampler {
    /// Creates a sampler of connections with these addresses: local, then the peer's. Their slots are their
    /// places in the list.
    pub(crate) fn new(clock: StageClock, conns: &[[SocketAddr; 2]]) -> Arc<Self> {
        // Cannot truncate: a request names few connections.
        let by_ends = conns.iter().enumerate().map(|(slot, ends)| (ends.map(canonical), slot as u32));
        Arc::new(Self(Mutex::new(SamplerState {
            clock,
            conns: vec![ConnStages::default(); conns.len()],
            by_ends: by_ends.collect(),
            burst_at: None,
            committed: Vec::with_capacity(conns.len()),
        })))
    }

    /// Returns the layer for received frames. `is_loopback`: the frames are those that the stack sends to
    /// itself, which are sent and received at once.
    pub(crate) fn received(self: &Arc<Self>, is_loopback: bool) -> impl FrameSink + use<> {
        ReceivedFrames { sampler: self.clone(), is_loopback }
    }

    /// Returns the layer for sent frames.
    pub(crate) fn sent(self: &Arc<Self>) -> impl FrameSink + use<> {
        SentFrames(self.clone())
    }

    /// Returns the samples of a connection.
    pub(crate) fn times(&self, slot: usize) -> [StageTimes; 4] {
        self.lock().conns.get(slot).map_or_else(Default::default, |conn| conn.times)
    }

    /// Begins to sample a connection. `ends`: the sequence numbers of the next bytes that it receives and
    /// sends.
    pub(crate) fn begin(&self, slot: usize, ends: [u32; 2]) {
        if let Some(conn) = self.lock().conns.get_mut(slot) {
            conn.ends = Some(ends);
        }
    }

    /// Records that the program has written up to this position before it is sampled.
    pub(crate) fn set_written(&self, slot: u32, written: u64) {
        if let Some(conn) = self.lock().conns.get_mut(slot as usize) {
            conn.written = written;
        }
    }

    /// Records that all received data up to position `end` of the stream are in the program's buffer.
    pub(crate) fn delivered(&self, slot: u32, end: u64) {
        self.at(slot, |conn, now| {
            // Frames that came by another shard did not pass the layer.
            if let Some(arrived) = conn.arrived.take() {
                conn.times[RECEIVE].add(now - arrived);
            }
            conn.delivered.get_or_insert((now, end));
        });
    }

    /// Records the positions up to which the program has read and written. The last `unsent` of the written
    /// bytes are not sent. Returns false if the program has yet to read what was delivered.
    pub(crate) fn noticed(&self, slot: u32, read_position: u64, written: u64, unsent: u32) -> bool {
        let mut is_read = true;
        self.at(slot, |conn, now| {
            if let Some((delivered, _)) = conn.delivered.take_if(|(_, end)| *end <= read_position) {
                conn.times[READ].add(now - delivered);
                conn.read.get_or_insert(now);
            }
            is_read = conn.delivered.is_none();
            let new = written.saturating_sub(conn.written);
            if new > 0 {
                conn.written = written;
                if let Some(read) = conn.read.take() {
                    conn.times[ANSWER].add(now - read);
                }
                let ahead = unsent.saturating_sub(u32::try_from(new).unwrap_or(u32::MAX));
                conn.taken.get_or_insert((now, ahead));
            }
        });
        is_read
    }

    fn at(&self, slot: u32, record: impl FnOnce(&mut ConnStages, Instant)) {
        let mut state = self.lock();
        let now = (state.clock)();
        if let Some(conn) = state.conns.get_mut(slot as usize) {
            record(conn, now);
        }
    }

    fn lock(&self) -> MutexGuard<'_, SamplerState> {
        // No change is left unfinished by a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SamplerState {
    fn on_received(&mut self, segment: &SegmentBytes) {
        let SegmentBytes { src, dst, seq, len } = *segment;
        let Some(conn) = self.by_ends.get(&[dst, src]).and_then(|slot| self.conns.get_mut(*slot as usize))
        else {
            return;
        };
        let Some([received_end, _]) = &mut conn.ends else { return };
        // A segment that ends farther ahead does not belong to the connection, because no window is larger.
        if new_bytes(received_end, seq, len, RECV_WINDOW_MAX) > 0 {
            let burst_at = *self.burst_at.get_or_insert_with(self.clock);
            conn.arrived.get_or_insert(burst_at);
        }
    }

    fn on_sent(&mut self, segment: &SegmentBytes) {
        let SegmentBytes { src, dst, seq, len } = *segment;
        let Some(slot) = self.by_ends.get(&[src, dst]).copied() else { return };
        let Some(conn) = self.conns.get_mut(slot as usize) else { return };
        let Some([_, sent_end]) = &mut conn.ends else { return };
        let count = new_bytes(sent_end, seq, len, u32::MAX / 2);
        let Some((_, ahead)) = &mut conn.taken else { return };
        if count <= *ahead {
            *ahead -= count;
        } else if !conn.is_committed {
            conn.is_committed = true;
            self.committed.push(slot);
        }
    }

    fn end_sent(&mut self) {
        if self.committed.is_empty() {
            return;
        }
        let now = (self.clock)();
        for slot in self.committed.drain(..) {
            let Some(conn) = self.conns.get_mut(slot as usize) else { continue };
            conn.is_committed = false;
            if let Some((taken, _)) = conn.taken.take() {
                conn.times[SEND].add(now - taken);
            }
        }
    }
}

/// Returns how many bytes of a segment come after `end`, the end of what was seen before, and advances it.
/// A segment that ends more than `max` bytes after it has none.
fn new_bytes(end: &mut u32, seq: u32, len: u32, max: u32) -> u32 {
    let segment_end = seq.wrapping_add(len);
    let count = segment_end.wrapping_sub(*end);
    if count > max {
        return 0;
    }
    *end = segment_end;
    count
}

/// Replaces an IPv4-mapped IPv6 address by the IPv4 address that it denotes.
fn canonical(end: SocketAddr) -> SocketAddr {
    SocketAddr::new(end.ip().to_canonical(), end.port())
}

/// The addresses of a TCP segment, and the sequence number and length of its payload.
struct SegmentBytes {
    src: SocketAddr,
    dst: SocketAddr,
    seq: u32,
    len: u32,
}

impl SegmentBytes {
    /// Returns `None` if the frame has no TCP segment with payload, has only a part of one, or has IPv6
    /// extension headers.
    fn parse(frame: &[u8]) -> Option<Self> {
        let link = ethernet::Header::parse(frame).ok()?;
        let packet = frame.get(usize::from(link.len)..)?;
        let (src, dst, segment): (IpAddr, IpAddr, &[u8]) = match link.ethertype {
            EtherType::IPV4 => {
                let header = ipv4::Header::parse(packet).ok()?;
                let is_whole = !header.more_fragments && header.fragment_offset == 0;
                let bytes = packet.get(usize::from(header.header_len)..usize::from(header.total_len))?;
                let is_tcp = is_whole && header.protocol == protocol::TCP;
                (header.src.into(), header.dst.into(), is_tcp.then_some(bytes)?)
            }
            EtherType::IPV6 => {
                let header = ipv6::Header::parse(packet).ok()?;
                let end = ipv6::Header::LEN + usize::from(header.payload_len);
                let bytes = packet.get(ipv6::Header::LEN..end)?;
                let is_tcp = header.next_header == protocol::TCP;
                (header.src.into(), header.dst.into(), is_tcp.then_some(bytes)?)
            }
            _ => return None,
        };
        let segment = TcpSegment::parse(segment).ok()?;
        let len = u32::try_from(segment.payload.len()).ok().filter(|len| *len > 0)?;
        Some(Self {
            src: SocketAddr::new(src, segment.header.src_port),
            dst: SocketAddr::new(dst, segment.header.dst_port),
            seq: segment.header.seq.0,
            len,
        })
    }
}

struct ReceivedFrames {
    sampler: Arc<StageSampler>,
    is_loopback: bool,
}

impl FrameSink for ReceivedFrames {
    fn put(&mut self, frame: &[u8], _: TxMeta) {
        let Some(segment) = SegmentBytes::parse(frame) else { return };
        let mut state = self.sampler.lock();
        if self.is_loopback {
            state.on_sent(&segment);
        }
        state.on_received(&segment);
    }

    fn end_burst(&mut self, _: Instant) {
        let mut state = self.sampler.lock();
        state.burst_at = None;
        if self.is_loopback {
            state.end_sent();
        }
    }
}

struct SentFrames(Arc<StageSampler>);

impl FrameSink for SentFrames {
    fn put(&mut self, frame: &[u8], _: TxMeta) {
        if let Some(segment) = SegmentBytes::parse(frame) {
            self.0.lock().on_sent(&segment);
        }
    }

    fn end_burst(&mut self, _: Instant) {
        self.0.lock().end_sent();
    }
}

/// The clock of a stack.
pub(crate) const MACHINE_CLOCK: StageClock = clock::now;

#[cfg(all(test, not(loom)))]
mod tests;
