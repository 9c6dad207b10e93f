//! What a connection that has something to send waits for, as Linux counts it (`tcp_chrono_start`): for how long it was busy, and of that for the peer's window, and for its application because the send
//! buffer was too small.

use super::Tcp;
use super::ack;
use super::active::ActiveConn;
use super::conn::Flags;
use crate::time::Instant;

/// What is waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ChronoType {
    /// Nothing is queued or in flight; or no more than one message, which begins to count when it is acknowledged.
    #[default]
    Idle,
    /// The network.
    Busy,
    /// The peer's window.
    RwndLimited,
    /// The application, which waits for room.
    SndbufLimited,
}

/// The time of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Chrono {
    chrono_type: ChronoType,
    chrono_start: Instant,
    /// Of busy, window and room, in ns.
    chrono_stat: [u64; 3],
}

impl Chrono {
    /// Something leaves.
    #[inline]
    pub fn start_busy(&mut self, now: Instant) {
        if self.chrono_type != ChronoType::Busy {
            self.set(ChronoType::Busy, now);
        }
    }

    /// All is acknowledged now, of which the last was sent then.
    #[inline(always)]
    pub fn stop(&mut self, now: Instant, sent: Instant) {
        if self.chrono_type == ChronoType::Idle {
            // Mostly it was a message.
            self.chrono_stat[0] += now.as_nanos().wrapping_sub(sent.as_nanos());
        } else {
            self.set(ChronoType::Idle, now);
        }
    }

    /// Waits for something else from now on.
    #[inline(never)]
    pub fn set(&mut self, waits: ChronoType, now: Instant) {
        if let Some(place) = (self.chrono_type as usize).checked_sub(1) {
            self.chrono_stat[place] += now.as_nanos().wrapping_sub(self.chrono_start.as_nanos());
        }
        (self.chrono_type, self.chrono_start) = (waits, now);
    }

    pub fn is_sndbuf_limited(&self) -> bool {
        self.chrono_type == ChronoType::SndbufLimited
    }

    /// How long it was busy in all, and of that how long it waited for the peer's window and for room, in µs. `sent`: something is in flight, and the last of it was sent then.
    fn spent_us(&self, now: Instant, sent: Option<Instant>) -> [u64; 3] {
        let mut upto = *self;
        match sent {
            Some(sent) => upto.stop(now, sent),
            None => upto.set(ChronoType::Idle, now),
        }
        let [busy, window, room] = upto.chrono_stat.map(|ns| ns / 1000);
        [busy + window + room, window, room]
    }
}

impl ActiveConn {
    /// The same of the connection.
    pub fn spent_us(&self, now: Instant) -> [u64; 3] {
        self.chrono.spent_us(now, (!self.send.is_empty()).then_some(self.lsndtime))
    }
}

impl Tcp {
    /// All that is queued has left, and the congestion window would have taken more (`tcp_cwnd_validate`): it is the application that waits, if it waits for room.
    #[inline]
    pub(super) fn chrono_sndbuf_limited(&mut self, idx: u32) {
        let c = &self.conns[idx];
        if c.has(Flags::WANT_WRITABLE) {
            let b: &mut ActiveConn = &mut self.active[c.active];
            if !ack::is_cwnd_limited(c, b) {
                b.chrono.set(ChronoType::SndbufLimited, self.now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_counted_for_what_was_waited_for_and_not_while_idle() {
        let at = Instant::from_millis;
        let mut chrono = Chrono::default();
        assert_eq!(chrono.spent_us(at(50), None), [0; 3]);
        chrono.start_busy(at(100));
        chrono.start_busy(at(110));
        chrono.set(ChronoType::RwndLimited, at(120));
        chrono.start_busy(at(150));
        chrono.set(ChronoType::SndbufLimited, at(151));
        assert_eq!(chrono.spent_us(at(155), Some(at(151))), [55_000, 30_000, 4000]);
        chrono.stop(at(155), at(151));
        assert_eq!(chrono.spent_us(at(900), None), [55_000, 30_000, 4000]);
        // A message.
        assert_eq!(chrono.spent_us(at(1001), Some(at(1000))), [56_000, 30_000, 4000]);
        chrono.stop(at(1002), at(1000));
        chrono.start_busy(at(2000));
        assert_eq!(chrono.spent_us(at(2001), Some(at(2000))), [58_000, 30_000, 4000]);
    }
}
