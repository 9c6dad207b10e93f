//! Datagrams that are held until the time at which they are to be sent (`SO_TXTIME`).
//!
//! They have left the region, so that later datagrams of the socket can overtake them. A socket holds at most
//! as many bytes as its send buffer has; further datagrams stay in the region. A device that refuses a
//! datagram whose time has come loses it.

use super::datagram_queue::send_datagram;
use super::domain::{CHUNK_BYTES, Domain};
use crate::channel::datagram::DatagramHeader;
use crate::context::Context;
use crate::timers::Timer;
use core::net::IpAddr;
use core::num::NonZeroU32;
use core::time::Duration;
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::time::Instant;
use ginnel_stack::udp::UdpError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The upper half of the token of the timer for the next departure.
const TIMER_TOKEN: u64 = 1 << 33;
/// Datagrams that are sent before other work of the turn.
const DATAGRAMS_PER_TURN: usize = 256;

/// A datagram that waits for its time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct HeldDatagram {
    socket: u32,
    udp: UdpHandle,
    header: DatagramHeader,
    data: Vec<u8>,
}

/// The datagrams of a domain that wait for their time.
#[derive(Debug, Default)]
pub(super) struct Departures {
    /// By their time, and in the order in which they were written.
    held: BTreeMap<(Instant, u64), HeldDatagram>,
    next_number: u64,
    /// The timer for the first of them.
    timer: Option<(Timer, Instant)>,
}

impl Departures {
    /// Returns the datagrams with their times, to be saved.
    pub(super) fn saved(&self) -> impl Iterator<Item = (Instant, &HeldDatagram)> {
        self.held.iter().map(|((at, _), datagram)| (*at, datagram))
    }

    fn push(&mut self, at: Instant, datagram: HeldDatagram) {
        self.held.insert((at, self.next_number), datagram);
        self.next_number += 1;
    }

    /// Takes the first datagram if its time has come.
    fn pop_due(&mut self, now: Instant) -> Option<HeldDatagram> {
        let first = self.held.first_entry().filter(|first| first.key().0 <= now)?;
        Some(first.remove())
    }
}

/// Longest time in microseconds for which a datagram is held: clients ask for 10 s at most, and one that does
/// not keep to that has no memory for longer.
const AHEAD_MAX_US: u32 = 11_000_000;

/// Returns the time of departure whose lowest 32 bits of microseconds are these; a time that has passed if it
/// is not in the [`AHEAD_MAX_US`] after `now`.
fn departure_after(now: Instant, departs_us: u32) -> Instant {
    let ahead = departs_us.wrapping_sub((now.as_nanos() / 1000) as u32);
    let ahead = if ahead > AHEAD_MAX_US { 0 } else { ahead };
    // The microseconds of `now` are rounded down, and the departure is rounded up.
    let start = Instant::from_nanos(now.as_nanos() / 1000 * 1000);
    start + Duration::from_micros(ahead.into())
}

/// Result of looking at a datagram with a time of departure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HoldOutcome {
    /// It is sent at once, because its time has passed and the socket holds nothing.
    Now,
    /// It is held, and was copied.
    Held,
    /// It stays in the region, because the socket holds as much as it may.
    Waits,
}

impl Domain {
    /// Returns whether a timer of the domain is that of departures.
    pub(super) fn is_departure_timer(token: u64) -> bool {
        token & TIMER_TOKEN != 0
    }

    /// Holds a datagram that was written with a time of departure.
    #[cold]
    pub(super) fn hold_datagram(
        &mut self,
        cx: &mut Context<'_>,
        (socket, udp): (u32, UdpHandle),
        header: &DatagramHeader,
        data: &[u8],
    ) -> HoldOutcome {
        let now = cx.now();
        let at = departure_after(now, header.received_us.map_or(0, NonZeroU32::get));
        // limit: bytes of datagrams that a socket holds until their time
        let limit = self.region.buffer_bytes();
        let Some(queue) = &mut self.sockets[socket as usize].datagram_queue else { return HoldOutcome::Now };
        if at <= now && queue.held_bytes == 0 {
            return HoldOutcome::Now;
        }
        // One whose time has passed does not overtake those that are held.
        if queue.held_bytes > 0 && queue.held_bytes + header.stream_bytes() > limit {
            return HoldOutcome::Waits;
        }
        queue.held_bytes += header.stream_bytes();
        let mut header = *header;
        header.received_us = None;
        if header.peer.port() == 0
            && header.peer.ip().is_unspecified()
            && let [_, remote] = self.region.socket(socket).endpoints()
            && remote.port() != 0
            && !matches!(remote.ip(), IpAddr::V6(remote) if remote.is_unicast_link_local())
        {
            // Also if the socket is connected to another address meanwhile. A link-local address would need
            // its link, which the region does not have.
            header.peer = remote;
        }
        self.departures.push(at, HeldDatagram { socket, udp, header, data: data.to_vec() });
        self.arm_departures(cx);
        HoldOutcome::Held
    }

    /// Sets the timer for the first departure. If there are too many timers, the next datagram with a time
    /// tries it again.
    pub(super) fn arm_departures(&mut self, cx: &mut Context<'_>) {
        let token = TIMER_TOKEN | self.token();
        let Departures { held, timer, .. } = &mut self.departures;
        let Some(((at, _), _)) = held.first_key_value() else { return };
        if timer.is_some_and(|(_, set)| set <= *at) {
            return;
        }
        if let Some((late, _)) = timer.take() {
            cx.cancel_timer(late);
        }
        *timer = cx.set_exact_timer(*at, token).map(|new| (new, *at));
    }

    /// Sends the datagrams whose time has come.
    pub(super) fn on_departure_timer(&mut self, cx: &mut Context<'_>) {
        self.departures.timer = None;
        let now = cx.now();
        let mut sockets: Vec<(u32, UdpHandle)> = Vec::new();
        for _ in 0..DATAGRAMS_PER_TURN {
            let Some(HeldDatagram { socket, udp, header, data }) = self.departures.pop_due(now) else {
                break;
            };
            let entry = &mut self.sockets[socket as usize];
            // A socket that its owner has closed by a request is gone.
            let Some(queue) = entry.datagram_queue.as_mut().filter(|_| entry.udp == Some(udp)) else {
                continue;
            };
            queue.held_bytes -= header.stream_bytes();
            match send_datagram(cx, udp, &header, &data) {
                Ok(()) => {}
                Err(UdpError::DeviceFull | UdpError::NoBuffers) => self.stats.datagrams_refused += 1,
                Err(error) => self.publish_udp_error(socket, error),
            }
            if !sockets.contains(&(socket, udp)) {
                sockets.push((socket, udp));
            }
        }
        for (socket, udp) in sockets {
            // Takes what had to wait in the region.
            self.send_queued_datagrams(cx, socket, udp, CHUNK_BYTES);
            if self.sockets[socket as usize].is_closing {
                self.close_if_unowned(cx, socket);
            }
        }
        self.arm_departures(cx);
    }

    /// Takes over the datagrams of a saved state.
    ///
    /// # Errors
    /// A datagram belongs to no socket.
    pub(super) fn restore_departures(
        &mut self,
        saved: Vec<(Instant, HeldDatagram)>,
    ) -> Result<(), &'static str> {
        for entry in self.sockets.iter_mut().filter_map(|entry| entry.datagram_queue.as_mut()) {
            entry.held_bytes = 0;
        }
        for (at, datagram) in saved {
            let entry = self.sockets.get_mut(datagram.socket as usize);
            let entry = entry.filter(|entry| entry.udp == Some(datagram.udp));
            let queue = entry.and_then(|entry| entry.datagram_queue.as_mut());
            queue.ok_or("a datagram belongs to no socket")?.held_bytes += datagram.header.stream_bytes();
            self.departures.push(at, datagram);
        }
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn departures_wrap_with_the_clock() {
        let at = |us: u64| Instant::from_nanos(us * 1000);
        let now = at((5 << 32) - 10);
        assert_eq!(departure_after(now, (now.as_nanos() / 1000) as u32 + 3), at((5 << 32) - 7));
        assert_eq!(departure_after(now, 20), at((5 << 32) + 20));
        assert_eq!(departure_after(now, u32::MAX - 100), now, "has passed");
        assert_eq!(departure_after(at(10), 10 + AHEAD_MAX_US), at(11_000_010));
        assert_eq!(
            departure_after(at(10), 11 + AHEAD_MAX_US),
            at(10),
            "further ahead than a client may ask for"
        );
    }

    #[test]
    fn datagrams_leave_by_time_and_in_order() {
        let header = DatagramHeader::decode(&[0; 48]).unwrap();
        let datagram = |byte| HeldDatagram { socket: 0, udp: UdpHandle::new(0, 0), header, data: vec![byte] };
        let at = |us: u64| Instant::from_nanos(us * 1000);
        let mut departures = Departures::default();
        for (us, byte) in [(20, b'a'), (10, b'b'), (20, b'c'), (30, b'd')] {
            departures.push(at(us), datagram(byte));
        }
        let taken: Vec<u8> =
            core::iter::from_fn(|| departures.pop_due(at(20))).map(|held| held.data[0]).collect();
        assert_eq!(taken, b"bac");
        assert_eq!(departures.saved().map(|(at, _)| at).collect::<Vec<_>>(), [at(30)]);
    }
}
