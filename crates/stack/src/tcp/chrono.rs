//! Time that a connection with data to send spends waiting, as Linux counts it (`tcp_chrono_start`): the time
//! in which it is busy and, as parts of that, the time in which it is limited by the peer's window and the
//! time in which it is limited by the size of the send buffer.

use super::Tcp;
use super::ack;
use super::active::ActiveConn;
use super::conn::Flags;
use crate::time::Instant;
use serde::{Deserialize, Serialize};

/// Reason for which a connection waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ChronoType {
    /// Nothing is queued or in flight; or a single message is, which counts when it is acknowledged.
    #[default]
    Idle,
    /// The network (`TCP_CHRONO_BUSY`).
    Busy,
    /// The peer's window (`TCP_CHRONO_RWND_LIMITED`).
    RwndLimited,
    /// The application, which waits for room in the send buffer (`TCP_CHRONO_SNDBUF_LIMITED`).
    SndbufLimited,
}

/// Times of one connection.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Chrono {
    chrono_type: ChronoType,
    chrono_start: Instant,
    /// Times spent busy, limited by the window and limited by the send buffer, in ns.
    chrono_stat: [u64; 3],
}

impl Chrono {
    /// Begins to count busy time when data are sent.
    #[inline]
    pub fn start_busy(&mut self, now: Instant) {
        if self.chrono_type != ChronoType::Busy {
            self.set(ChronoType::Busy, now);
        }
    }

    /// Stops counting when everything is acknowledged; the last data were sent at `sent`.
    #[inline(always)]
    pub fn stop(&mut self, now: Instant, sent: Instant) {
        if self.chrono_type == ChronoType::Idle {
            // Usually a single message was sent.
            self.chrono_stat[0] += now.as_nanos().wrapping_sub(sent.as_nanos());
        } else {
            self.set(ChronoType::Idle, now);
        }
    }

    /// Counts time as `chrono_type` from now on.
    #[inline(never)]
    pub fn set(&mut self, chrono_type: ChronoType, now: Instant) {
        if let Some(index) = (self.chrono_type as usize).checked_sub(1) {
            self.chrono_stat[index] += now.as_nanos().wrapping_sub(self.chrono_start.as_nanos());
        }
        (self.chrono_type, self.chrono_start) = (chrono_type, now);
    }

    pub fn is_sndbuf_limited(&self) -> bool {
        self.chrono_type == ChronoType::SndbufLimited
    }

    /// Returns the busy time and, as parts of it, the times limited by the peer's window and by the send
    /// buffer, in µs. `sent`: data are in flight, and the last of them were sent then.
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
    /// Returns the times of the connection in µs, see [`Chrono::spent_us`].
    pub fn spent_us(&self, now: Instant) -> [u64; 3] {
        self.chrono.spent_us(now, (!self.send.is_empty()).then_some(self.lsndtime))
    }
}

impl Tcp {
    /// Counts time as limited by the send buffer if the application waits for room: all queued data were
    /// sent, and the congestion window would have admitted more (`tcp_cwnd_validate`).
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
    fn time_is_counted_by_cause_except_while_idle() {
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
        // A single message.
        assert_eq!(chrono.spent_us(at(1001), Some(at(1000))), [56_000, 30_000, 4000]);
        chrono.stop(at(1002), at(1000));
        chrono.start_busy(at(2000));
        assert_eq!(chrono.spent_us(at(2001), Some(at(2000))), [58_000, 30_000, 4000]);
    }
}
