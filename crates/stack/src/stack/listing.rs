//! Listing sockets, a portion at a time: nobody waits for the end of a long list.

use super::Stack;
use crate::options::TcpInfo;
use crate::tcp::Tcp;
use crate::tcp::state::State;
use crate::time::Instant;
use core::net::SocketAddr;
use core::time::Duration;

/// A socket, as a listing shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedSocket {
    /// TCP or UDP.
    pub protocol: SocketProtocol,
    /// Its state. Of a UDP socket [`State::Established`] if it is connected, else [`State::Closed`].
    pub state: State,
    /// Our end.
    pub local: SocketAddr,
    /// The peer's end; of a socket without one all zeros.
    pub remote: SocketAddr,
    /// Bytes received and not read; of a listener, connections that nobody accepted yet.
    pub recv_queue: u64,
    /// Bytes queued and not acknowledged; of a listener, how many connections may wait.
    pub send_queue: u64,
    /// The timer that is most worth knowing.
    pub timer: Option<ListedTimer>,
    /// More about a connection.
    pub info: Option<TcpInfo>,
    /// What it occupies.
    pub memory: SocketMemory,
}

/// The memory of a socket, in bytes, under the names of Linux's `INET_DIAG_SKMEMINFO` where that has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketMemory {
    /// Bytes received and held: those that can be read and those that wait behind gaps. Of UDP with what each datagram is charged.
    pub rmem_alloc: u64,
    /// The limit of what is held unread.
    pub rcvbuf: u64,
    /// Bytes that were copied to be sent, and are not acknowledged. Slices of sources are not copied.
    pub wmem_queued: u64,
    /// The limit of what is queued, slices included. 0 of UDP, which queues nothing.
    pub sndbuf: u64,
    /// Memory of the buffers in which nothing is.
    pub fwd_alloc: u64,
    /// Datagrams dropped for want of room; of a connection, ranges out of order that were given up for others since it was last idle.
    /// `None` of a listener, for which nobody counts.
    pub drops: Option<u64>,
    /// All that is there for this socket alone: its entry, the busy part of a connection, chunks and lists of its buffers. Not what all share, as the
    /// table of flows.
    pub total: u64,
}

/// What a socket speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedTimer {
    /// Why.
    pub kind: TimerKind,
    /// How much longer.
    pub left: Duration,
    /// How often it has run out already.
    pub count: u8,
}

/// As Linux tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimerKind {
    /// Something is in flight: retransmission, tail loss probe, reordering.
    On,
    /// Idle, and probed.
    Keepalive,
    /// The end of TIME_WAIT, or of FIN_WAIT_2 that nobody owns.
    TimeWait,
    /// The peer's window is closed.
    Persist,
}

/// Where a listing goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListCursor {
    table: u8,
    at: u32,
}

/// So many entries of a buffer's lists take as long as a place.
const ENTRIES_PER_SLOT: usize = 64;

impl Stack {
    /// Appends sockets to `out` from `cursor` on: listeners, connections, TIME_WAIT, UDP. Looks at no more than `places` places, of which some may
    /// be vacant, and at fewer if there are buffers with long lists; returns where to go on; `None` at the end. What begins or ends meanwhile may be in the listing or not; nothing is in it twice.
    pub fn list(
        &self,
        now: Instant,
        cursor: ListCursor,
        places: usize,
        out: &mut impl Extend<ListedSocket>,
    ) -> Option<ListCursor> {
        let ListCursor { mut table, at } = cursor;
        let (mut at, mut left) = (at as usize, places);
        loop {
            let len = match table {
                0 => self.tcp.listeners.slots(),
                1 => self.tcp.conns.high_water(),
                2 => self.tcp.time_wait.high_water(),
                3 => self.udp.sockets().1,
                _ => return None,
            };
            let mut end = len.min(at.saturating_add(left));
            let tcp = &self.tcp;
            // Cannot truncate: no table has more places.
            let range = at as u32..end as u32;
            match table {
                0 => out.extend(
                    range.filter_map(|i| tcp.listeners.listed(i, |entry| tcp.listener_memory(entry))),
                ),
                1 => {
                    let mut next = at;
                    while next < end {
                        let (listed, looked_at) = listed_connection(tcp, now, next as u32).unzip();
                        out.extend(listed);
                        next += 1;
                        end = next.max(end.saturating_sub(looked_at.unwrap_or(0) / ENTRIES_PER_SLOT));
                    }
                }
                2 => out.extend(range.filter_map(|i| tcp.listed_time_wait(now, i))),
                _ => out.extend(range.filter_map(|i| self.udp.listing(i))),
            }
            left -= end.saturating_sub(at);
            if end < len {
                return Some(ListCursor { table, at: end as u32 });
            }
            (table, at) = (table + 1, 0);
            if left == 0 {
                return (table <= 3).then_some(ListCursor { table, at: 0 });
            }
        }
    }
}

/// The connection in a place, and how many entries of its buffers' lists were looked at.
fn listed_connection(tcp: &Tcp, now: Instant, index: u32) -> Option<(ListedSocket, usize)> {
    // What has ended and waits for its owner is no socket to anybody else.
    let info = tcp.info_at(index).filter(|info| info.state != State::Closed)?;
    let (memory, looked_at) = tcp.memory_at(index);
    let listed = ListedSocket {
        protocol: SocketProtocol::Tcp,
        state: info.state,
        local: info.local,
        remote: info.remote,
        recv_queue: info.recv_queued.into(),
        send_queue: tcp.send_queued(index),
        timer: tcp.listed_timer(now, index),
        info: Some(info),
        memory,
    };
    Some((listed, looked_at))
}

/// What stands for "no peer" in a listing.
pub(crate) fn unspecified_addr(local: SocketAddr) -> SocketAddr {
    if local.is_ipv4() { ([0u8; 4], 0).into() } else { ([0u16; 8], 0).into() }
}

#[cfg(test)]
mod tests {
    use super::{ListCursor, ListedSocket};
    use crate::chunk_pool::CHUNK_BYTES;
    use crate::stack::{Stack, StackConfig};
    use crate::tcp::recv_buffer::RANGES_MAX;
    use crate::time::Instant;

    #[test]
    fn buffers_with_long_lists_are_most_of_a_portion() {
        let now = Instant::from_millis(1_000);
        let mut stack = Stack::new(StackConfig::default(), [1; 32], now).unwrap();
        for ranges in [RANGES_MAX, RANGES_MAX, 0, 1] {
            stack.tcp.add_fragmented_conn(ranges);
        }
        let (mut portions, mut cursor) = (Vec::new(), Some(ListCursor::default()));
        while let Some(at) = cursor {
            let mut portion: Vec<ListedSocket> = Vec::new();
            cursor = stack.list(now, at, 64, &mut portion);
            portions.push(portion);
        }
        assert_eq!(portions.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 2]);
        let memory = portions.concat().iter().map(|listed| listed.memory).collect::<Vec<_>>();
        // A range is in a chunk of its own, behind one of which nothing has come.
        let (bytes, chunks) = (2 * RANGES_MAX as u64, (RANGES_MAX * CHUNK_BYTES) as u64);
        let lists = (RANGES_MAX * 16 + RANGES_MAX * 4000 / CHUNK_BYTES * 4) as u64;
        for full in &memory[..2] {
            assert_eq!((full.rmem_alloc, full.fwd_alloc), (bytes, chunks - bytes));
            assert!((chunks + lists..chunks + 3 * lists).contains(&full.total), "{full:?}");
        }
        let [idle, busy] = [memory[2], memory[3]];
        assert_eq!((idle.total, idle.rmem_alloc, idle.fwd_alloc), (128, 0, 0));
        assert_eq!((busy.rmem_alloc, busy.fwd_alloc), (2, CHUNK_BYTES as u64 - 2));
    }
}
