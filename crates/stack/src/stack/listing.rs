//! Listing of sockets in bounded steps, so that a long list does not stop a shard.

use super::Stack;
use crate::handle::{Conn, Listener, UdpHandle};
use crate::options::TcpInfo;
use crate::tcp::Tcp;
use crate::tcp::state::State;
use crate::time::Instant;
use core::net::SocketAddr;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// A socket in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedSocket {
    /// TCP or UDP.
    pub protocol: SocketProtocol,
    /// State of the socket. For a UDP socket [`State::Established`] if it is connected, else
    /// [`State::Closed`].
    pub state: State,
    /// Local address.
    pub local: SocketAddr,
    /// Remote address; all zeros for a socket without one.
    pub remote: SocketAddr,
    /// Bytes received and not read; for a listener, the number of connections that were not accepted yet.
    pub recv_queue: u64,
    /// Bytes queued and not acknowledged; for a listener, the backlog.
    pub send_queue: u64,
    /// The most informative timer.
    pub timer: Option<ListedTimer>,
    /// Details of a connection.
    pub info: Option<TcpInfo>,
    /// Memory of the socket.
    pub memory: SocketMemory,
    /// Names the socket for [`Stack::destroy_socket`].
    pub handle: Option<SocketHandle>,
}

/// Names a socket in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketHandle {
    /// A connection.
    Conn(Conn),
    /// A listener.
    Listener(Listener),
    /// The slot of an entry in TIME-WAIT.
    TimeWait(u32),
    /// A UDP socket.
    Udp(UdpHandle),
}

/// Memory of a socket in bytes, named as in Linux's `INET_DIAG_SKMEMINFO` where Linux has the value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketMemory {
    /// Bytes received and buffered: those that can be read and those that wait after gaps. For UDP, including
    /// the overhead that each datagram is charged.
    pub rmem_alloc: u64,
    /// Limit of the unread bytes.
    pub rcvbuf: u64,
    /// Bytes that were copied for sending and are not acknowledged. Slices of sources are not copied.
    pub wmem_queued: u64,
    /// Limit of the queued bytes, including slices. 0 for UDP, which queues nothing.
    pub sndbuf: u64,
    /// Unused memory of the allocated buffers.
    pub fwd_alloc: u64,
    /// Datagrams dropped for lack of room; for a connection, ranges out of order that were dropped for other
    /// data since the connection was last idle. `None` for a listener, which has no such counter.
    pub drops: Option<u64>,
    /// All memory of this socket: its entry, the active state of a connection, the chunks and lists of its
    /// buffers. Shared memory, such as the flow table, does not count.
    pub total: u64,
}

/// Transport protocol of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SocketProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// Timer of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedTimer {
    /// Purpose of the timer.
    pub kind: TimerKind,
    /// Time until the timer expires.
    pub left: Duration,
    /// Number of times that the timer has expired already.
    pub count: u8,
}

/// Kinds of timers that Linux distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TimerKind {
    /// Data are in flight: retransmission, tail loss probe, reordering.
    On,
    /// The connection is idle and is probed.
    Keepalive,
    /// The end of TIME-WAIT, or of FIN-WAIT-2 without an owner.
    TimeWait,
    /// The peer's window is closed.
    Persist,
}

/// Position at which a listing continues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListCursor {
    table: u8,
    at: u32,
}

/// Number of list entries of a buffer whose visit takes as long as that of a slot.
const ENTRIES_PER_SLOT: usize = 64;

impl Stack {
    /// Appends sockets to `out` from `cursor` on: listeners, connections, TIME-WAIT, UDP. Visits at most
    /// `slots` slots, of which some may be vacant, and fewer if there are buffers with long lists. Returns
    /// where to continue; `None` at the end. A socket that is opened or closed in the meantime may be
    /// missing; no socket is listed twice.
    pub fn list(
        &self,
        now: Instant,
        cursor: ListCursor,
        slots: usize,
        out: &mut impl Extend<ListedSocket>,
    ) -> Option<ListCursor> {
        let ListCursor { mut table, at } = cursor;
        let (mut at, mut left) = (at as usize, slots);
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
            // Cannot truncate: no table has more slots.
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

impl Stack {
    /// Closes a socket on behalf of an administrator, as Linux's `SOCK_DESTROY` (`tcp_abort`): a connection
    /// ends with RST and [`CloseReason::Destroyed`](crate::events::CloseReason::Destroyed), an entry in
    /// TIME-WAIT is forgotten. A listener is closed, and connections that were not accepted are reset; there
    /// is no event. A UDP socket stays open with the pending error
    /// [`UdpError::Destroyed`](crate::udp::UdpError::Destroyed); its owner disconnects it (`udp_abort`).
    /// `ends` are the local and the remote address that were listed. Returns false if the socket does not
    /// exist any more.
    pub fn destroy_socket(&mut self, now: Instant, handle: SocketHandle, ends: [SocketAddr; 2]) -> bool {
        self.tcp.set_now(now);
        // A handle of another process of the shards may be that of another socket of this one.
        let are_ends =
            |listed: Option<ListedSocket>| listed.is_some_and(|listed| [listed.local, listed.remote] == ends);
        match handle {
            SocketHandle::Conn(conn) => {
                let is_slot = (conn.index() as usize) < self.tcp.conns.high_water();
                let listed = is_slot.then(|| listed_connection(&self.tcp, now, conn.index())).flatten();
                let listed = listed.map(|(listed, _)| listed);
                are_ends(listed) && self.tcp.destroy_conn(&mut self.net, conn)
            }
            SocketHandle::Listener(listener) => {
                let tcp = &self.tcp;
                let listed = tcp.listeners.listed(listener.index(), |entry| tcp.listener_memory(entry));
                are_ends(listed) && self.unlisten(listener)
            }
            SocketHandle::TimeWait(index) => {
                let exists = are_ends(self.tcp.listed_time_wait(now, index));
                if exists {
                    self.tcp.end_time_wait(index);
                }
                exists
            }
            SocketHandle::Udp(socket) => self.udp.destroy(socket, ends),
        }
    }
}

/// Returns the connection in a slot, and how many list entries of its buffers were visited.
fn listed_connection(tcp: &Tcp, now: Instant, index: u32) -> Option<(ListedSocket, usize)> {
    // A connection that has ended and whose owner has not taken the event is not listed.
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
        handle: Some(SocketHandle::Conn(tcp.conns.handle(index))),
    };
    Some((listed, looked_at))
}

/// Returns the address that a listing shows for a missing peer.
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
    fn buffers_with_long_lists_shorten_a_step() {
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
        // Each range is in a chunk of its own, after a chunk without data.
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
