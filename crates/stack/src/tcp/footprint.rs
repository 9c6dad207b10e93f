//! Memory that a connection occupies: counted on request from the lists that exist anyway, so that no
//! counters are kept.

use super::Tcp;
use super::active::ActiveConn;
use super::conn::{Flags, NONE, Tcb};
use super::demux::AddressPool;
use super::listen::ListenEntry;
use super::rate::RateState;
use super::time_wait::TimeWait;
#[cfg(test)]
use super::{conn::SlotState, state::State};
use crate::chunk_pool::CHUNK_BYTES;
use crate::stack::SocketMemory;

/// Memory of a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BufferMemory {
    /// Bytes of the stream that are stored in chunks.
    pub bytes: u64,
    /// Number of chunks.
    pub chunks: usize,
    /// Bytes of the lists that index the chunks.
    pub list_bytes: usize,
    /// List entries that were visited for the count.
    pub entries_visited: usize,
}

impl Tcp {
    /// Returns the memory of the connection in a slot, and how many list entries were visited.
    pub fn memory_at(&self, idx: u32) -> (SocketMemory, usize) {
        let c = &self.conns[idx];
        let profile = self.profile(idx);
        let tcb_bytes = size_of::<Tcb>() + AddressPool::bytes_of(c.has(Flags::V6));
        let mut memory = SocketMemory {
            rcvbuf: profile.recv_buffer_bytes.into(),
            sndbuf: self.send_buffer_limit(idx),
            drops: Some(0),
            total: tcb_bytes as u64,
            ..SocketMemory::default()
        };
        if c.active == NONE {
            return (memory, 0);
        }
        let b = &self.active[c.active];
        let (recv, send) = (b.recv.memory(), b.send.memory());
        let chunks = ((recv.chunks + send.chunks) * CHUNK_BYTES) as u64;
        let lists =
            recv.list_bytes + send.list_bytes + b.rtx_queue.list_bytes() + b.record_marks.list_bytes();
        let rate = b.rate.as_deref();
        let lists = lists + rate.map_or(0, |rate| size_of::<RateState>() + rate.delivery.list_bytes());
        memory.rmem_alloc = recv.bytes;
        memory.wmem_queued = send.bytes;
        // The limit falls with the congestion window; what is queued stays.
        memory.sndbuf = memory.sndbuf.max(send.bytes);
        memory.fwd_alloc = chunks - recv.bytes - send.bytes;
        memory.drops = Some(b.recv.dropped_ranges());
        memory.total += chunks + (size_of::<ActiveConn>() + lists) as u64;
        (memory, recv.entries_visited + send.entries_visited)
    }

    /// Returns the memory of a listener. The limits are those that its connections begin with.
    pub fn listener_memory(&self, entry: &ListenEntry) -> SocketMemory {
        let profile = self.profiles.get(entry.profile);
        SocketMemory {
            rcvbuf: profile.recv_buffer_bytes.into(),
            sndbuf: profile.send_buffer_bytes.into(),
            total: (size_of::<ListenEntry>() + entry.queue_bytes()) as u64,
            ..SocketMemory::default()
        }
    }

    /// Returns the memory of an entry in TIME-WAIT, which has no bytes of the stream.
    pub fn time_wait_memory(v6: bool) -> SocketMemory {
        let total = size_of::<TimeWait>() + AddressPool::bytes_of(v6);
        SocketMemory { drops: Some(0), total: total as u64, ..SocketMemory::default() }
    }
}

#[cfg(test)]
impl Tcp {
    /// Adds an established connection with `ranges` ranges out of order.
    pub fn add_fragmented_conn(&mut self, ranges: usize) {
        let idx = self.conns.alloc().unwrap();
        let c = &mut self.conns[idx];
        (c.slot_state, c.state) = (SlotState::Open, State::Established);
        if ranges > 0 {
            let active = self.ensure_active(idx);
            for n in 1..=ranges {
                let out = self.active[active].recv.write(&mut self.chunks, n * 4000, b"ab", usize::MAX);
                assert_eq!(out.stored, 2);
            }
        }
    }
}
