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
pub struct Listed {
    /// TCP or UDP.
    pub protocol: Protocol,
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
    pub timer: Option<Timer>,
    /// More about a connection.
    pub info: Option<TcpInfo>,
}

/// What a socket speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timer {
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
pub struct Cursor {
    table: u8,
    at: u32,
}

impl Stack {
    /// Appends sockets to `out` from `cursor` on: listeners, connections, TIME_WAIT, UDP. Looks at no more than `places` places, of which some may
    /// be vacant, and returns where to go on; `None` at the end. What begins or ends meanwhile may be in the listing or not; nothing is in it twice.
    pub fn list(
        &self,
        now: Instant,
        cursor: Cursor,
        places: usize,
        out: &mut impl Extend<Listed>,
    ) -> Option<Cursor> {
        let Cursor { mut table, at } = cursor;
        let (mut at, mut left) = (at as usize, places);
        loop {
            let len = match table {
                0 => self.tcp.listeners.places(),
                1 => self.tcp.conns.most(),
                2 => self.tcp.time_wait.most(),
                3 => self.udp.sockets().1,
                _ => return None,
            };
            let end = len.min(at.saturating_add(left));
            let tcp = &self.tcp;
            // Cannot truncate: no table has more places.
            let range = at as u32..end as u32;
            match table {
                0 => out.extend(range.filter_map(|i| tcp.listeners.listed(i))),
                1 => out.extend(range.filter_map(|i| listed_connection(tcp, now, i))),
                2 => out.extend(range.filter_map(|i| tcp.time_wait_listed(now, i))),
                _ => out.extend(range.filter_map(|i| self.udp.listed(i))),
            }
            left -= end.saturating_sub(at);
            if end < len {
                return Some(Cursor { table, at: end as u32 });
            }
            (table, at) = (table + 1, 0);
            if left == 0 {
                return (table <= 3).then_some(Cursor { table, at: 0 });
            }
        }
    }
}

fn listed_connection(tcp: &Tcp, now: Instant, index: u32) -> Option<Listed> {
    // What has ended and waits for its owner is no socket to anybody else.
    let info = tcp.info_at(index).filter(|info| info.state != State::Closed)?;
    Some(Listed {
        protocol: Protocol::Tcp,
        state: info.state,
        local: info.local,
        remote: info.remote,
        recv_queue: info.recv_queued.into(),
        send_queue: tcp.send_queued(index),
        timer: tcp.timer_shown(now, index),
        info: Some(info),
    })
}

/// What stands for "no peer" in a listing.
pub(crate) fn nobody(local: SocketAddr) -> SocketAddr {
    if local.is_ipv4() { ([0u8; 4], 0).into() } else { ([0u16; 8], 0).into() }
}
