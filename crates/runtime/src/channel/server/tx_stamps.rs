//! Times at which bytes of a stream were sent and acknowledged, for clients that ask for them
//! (`SO_TIMESTAMPING`).

use super::datagram_queue::now_us;
use super::domain::Domain;
use crate::channel::control::StreamStamp;
use crate::context::Context;
use core::num::NonZeroU32;
use core::time::Duration;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Times of a stream that clients have asked for and not taken. At the limit, further requests are refused.
// limit: transmit timestamps of a program's stream
const STAMPS_MAX: usize = 256;

/// The upper half of the token of the timer with which the domain looks at stamps in the next turn.
const TIMER_TOKEN: u64 = 1 << 32;

/// A byte whose times a client wants.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct AwaitedByte {
    /// The number of the client.
    client: usize,
    /// Position after the byte.
    end: u64,
    wants_sent: bool,
    wants_acked: bool,
}

/// The times of a stream that clients want.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct StreamStamps {
    /// True if the socket is in [`Domain::stamps_due`].
    #[serde(skip)]
    is_due: bool,
    awaited: VecDeque<AwaitedByte>,
    /// The times that were taken, each with the client that wants it.
    taken: Vec<(usize, StreamStamp)>,
}

impl StreamStamps {
    /// Has the times of a byte taken. Returns false at the limit.
    fn await_byte(&mut self, byte: AwaitedByte) -> bool {
        let has_space = self.awaited.len() + self.taken.len() < STAMPS_MAX;
        if has_space {
            self.awaited.push_back(byte);
        }
        has_space
    }

    /// Takes the times of bytes before the positions up to which the stream was sent and acknowledged.
    /// Returns whether there were any.
    fn take_times(&mut self, sent: u64, acked: u64) -> bool {
        let before = self.taken.len();
        for byte in &mut self.awaited {
            let at_us = || now_us().map_or(0, NonZeroU32::get);
            if byte.wants_sent && byte.end <= sent {
                byte.wants_sent = false;
                let stamp = StreamStamp { end: byte.end, is_acked: false, at_us: at_us() };
                self.taken.push((byte.client, stamp));
            }
            if byte.wants_acked && byte.end <= acked {
                byte.wants_acked = false;
                let stamp = StreamStamp { end: byte.end, is_acked: true, at_us: at_us() };
                self.taken.push((byte.client, stamp));
            }
        }
        self.awaited.retain(|byte| byte.wants_sent || byte.wants_acked);
        self.taken.len() > before
    }
}

impl Domain {
    /// Returns whether a timer of the domain is that of stamps.
    pub(super) fn is_stamp_timer(token: u64) -> bool {
        token >= TIMER_TOKEN
    }

    /// Has the times taken for a client at which the byte before position `end` of a stream is sent and
    /// acknowledged. Returns false, and counts the refusal, if too many times of the stream are awaited or
    /// were not fetched.
    pub(super) fn await_stamps(
        &mut self,
        cx: &mut Context<'_>,
        (client, socket): (usize, u32),
        (end, wants_sent, wants_acked): (u64, bool, bool),
    ) -> bool {
        let stamps = self.stamped.entry(socket).or_default();
        if !stamps.await_byte(AwaitedByte { client, end, wants_sent, wants_acked }) {
            self.stats.stamps_refused += 1;
            return false;
        }
        self.check_stamps(cx, socket);
        self.check_stamps_after_transmit(cx, socket);
        true
    }

    /// Looks at all sockets again of whose bytes clients want the times, after the domain was restored.
    pub(super) fn restore_stamps(&mut self, cx: &mut Context<'_>) {
        let sockets: Vec<u32> = self.stamped.keys().copied().collect();
        for socket in sockets {
            self.check_stamps(cx, socket);
            self.check_stamps_after_transmit(cx, socket);
        }
    }

    /// Looks again in the next turn, which comes after this turn has transmitted, if bytes are to be sent.
    fn check_stamps_after_transmit(&mut self, cx: &mut Context<'_>, socket: u32) {
        let token = TIMER_TOKEN | self.token();
        let Some(stamps) = self.stamped.get_mut(&socket) else { return };
        if stamps.is_due || !stamps.awaited.iter().any(|byte| byte.wants_sent) {
            return;
        }
        if self.stamps_due.is_empty() {
            let timer = cx.set_exact_timer(cx.now() + Duration::from_nanos(1), token);
            if timer.is_none() {
                // The next acknowledgement has them checked.
                return;
            }
        }
        stamps.is_due = true;
        self.stamps_due.push(socket);
    }

    /// Handles the timer that follows a turn in which bytes were to be sent.
    pub(super) fn on_stamp_timer(&mut self, cx: &mut Context<'_>) {
        for socket in core::mem::take(&mut self.stamps_due) {
            if let Some(stamps) = self.stamped.get_mut(&socket) {
                stamps.is_due = false;
            }
            self.check_stamps(cx, socket);
        }
    }

    /// Handles an acknowledgement. Returns false if no times are wanted.
    pub(super) fn on_stamped_ack(&mut self, cx: &mut Context<'_>, socket: u32) -> bool {
        if self.stamped.get(&socket).is_none_or(|stamps| stamps.awaited.is_empty()) {
            return false;
        }
        self.check_stamps(cx, socket);
        self.check_stamps_after_transmit(cx, socket);
        true
    }

    /// Takes the times of what was sent and acknowledged since, and tells clients.
    fn check_stamps(&mut self, cx: &mut Context<'_>, socket: u32) {
        let entry = &self.sockets[socket as usize];
        let (Some(conn), Some(stamps)) = (entry.conn, self.stamped.get_mut(&socket)) else { return };
        if !cx.is_engine_local() {
            return;
        }
        let sent = entry.taken.saturating_sub(cx.notsent(conn).into());
        let acked = entry.taken.saturating_sub(cx.queued(conn));
        let has_new = stamps.take_times(sent, acked);
        cx.set_ack_events(conn, !stamps.awaited.is_empty());
        if has_new {
            self.acked(socket, 1);
        }
    }

    /// Returns the times that were taken of a stream for a client.
    pub(super) fn take_stamps(&mut self, client: usize, socket: u32) -> Vec<StreamStamp> {
        let Some(stamps) = self.stamped.get_mut(&socket) else { return Vec::new() };
        stamps.taken.extract_if(.., |(of, _)| *of == client).map(|(_, stamp)| stamp).collect()
    }

    /// Forgets the times that a client wants, which is gone.
    pub(super) fn forget_stamps(&mut self, client: usize) {
        for stamps in self.stamped.values_mut() {
            stamps.awaited.retain(|byte| byte.client != client);
            stamps.taken.retain(|(of, _)| *of != client);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn byte(end: u64) -> AwaitedByte {
        AwaitedByte { client: 1, end, wants_sent: true, wants_acked: true }
    }

    #[test]
    fn each_time_of_a_byte_is_taken_once() {
        let mut stamps = StreamStamps::default();
        assert!(stamps.await_byte(byte(10)) && stamps.await_byte(byte(20)));
        assert!(!stamps.take_times(9, 0));
        assert!(stamps.take_times(10, 9) && !stamps.take_times(19, 9));
        assert!(stamps.take_times(20, 20));
        let taken: Vec<_> = stamps.taken.iter().map(|(_, stamp)| (stamp.end, stamp.is_acked)).collect();
        assert_eq!(taken, [(10, false), (10, true), (20, false), (20, true)]);
        assert!(stamps.awaited.is_empty());
    }

    // limit: transmit timestamps of a program's stream
    #[test]
    fn requests_beyond_the_limit_are_refused() {
        let mut stamps = StreamStamps::default();
        let accepted = (1..=2 * STAMPS_MAX as u64).filter(|end| stamps.await_byte(byte(*end))).count();
        assert_eq!((accepted, stamps.awaited.len()), (STAMPS_MAX, STAMPS_MAX));
    }
}
