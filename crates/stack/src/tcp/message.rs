//! The short message: all that is queued fits into one segment and the windows, and nothing is in flight. Nearly every request and
//! response is one. It needs no search for what may leave, and loss recovery has nothing to say to it.
//!
//! What is done here is what `output` and `timers` would do with such a connection, and nothing else: tests compare the two, as they do
//! with header prediction (docs/adr/0007).

use super::ack;
use super::busy::{Busy, Extras, More, RetransmitTimer};
use super::conn::{Flags, NONE};
use super::sent_queue::Ends;
use super::{Tcp, rtt};
use crate::ip::{Network, TxError};
use crate::options::CaState;
use crate::wire::tcp::TcpFlags;

/// A message that may leave at once.
struct Message {
    len: u32,
    /// Our FIN goes with it.
    fin: bool,
    /// It fills its segment.
    full: bool,
    /// The retransmission time-out, in µs.
    rto_us: u64,
}

/// Flags of connections whose segments are not the usual ones.
const UNUSUAL: Flags = Flags::SYN_PENDING
    .with(Flags::V6)
    .with(Flags::ECN)
    .with(Flags::ECN_ECHO)
    .with(Flags::ECN_CWR)
    .with(Flags::MTU_LOCKED)
    .with(Flags::CORK);

impl Tcp {
    /// Sends all that a connection has, if that is a short message; `false` if it is something else, and nothing was done.
    ///
    /// # Errors
    /// The device has no room, or there is no way there.
    #[inline]
    pub(super) fn send_message(&mut self, net: &mut Network, idx: u32) -> Result<bool, TxError> {
        #[cfg(test)]
        if self.unpredicted {
            return Ok(false);
        }
        let Some(message) = self.message(idx) else { return Ok(false) };
        let Message { len, fin, full, rto_us } = message;
        let c = &self.conns[idx];
        let flags = TcpFlags(TcpFlags::ACK.0 | TcpFlags::PSH.0 | if fin { TcpFlags::FIN.0 } else { 0 });
        let seq = c.snd_nxt;
        if !self.emit_single(net, idx, seq, len, flags)? {
            return Ok(false);
        }
        self.stats.bytes_out += u64::from(len);
        let (now, now_ms) = (self.now, self.now_ms());
        let c = &mut self.conns[idx];
        let b = &mut self.busy[c.busy];
        let end = seq + (len + u32::from(fin));
        b.window_max = b.window_max.max(c.snd_wnd);
        b.sent.push(seq, end, now, 1, Ends::Message);
        b.fin_sent |= fin;
        c.snd_nxt = end;
        if !full {
            b.small_end = Some(end);
        }
        b.last_sent = now;
        b.idle_since = None;
        b.cork_at = None;
        if c.has(Flags::ATO_SET) && now_ms.wrapping_sub(c.last_rx) < self.config.delayed_ack_ms {
            c.flags.set(Flags::PINGPONG);
        }
        let times = (self.config.tail_loss_probes, self.profiles.get(c.profile));
        // Nothing was in flight, so a round begins.
        b.cwnd_limited = c.cwnd <= 1;
        b.flight_max = 1;
        b.usage_end = end;
        let (kind, at) = ack::probe_or_timeout(c, b, times, now, now.after_micros(rto_us));
        b.set_timer(kind, at);
        if c.has(Flags::KEEPALIVE) {
            self.rearm(idx);
        } else {
            self.arm(idx, at);
        }
        Ok(true)
    }

    /// What a connection has to send, if it is a short message.
    #[inline(always)]
    fn message(&self, idx: u32) -> Option<Message> {
        let c = &self.conns[idx];
        if c.busy == NONE || c.has(UNUSUAL) || !c.state.is_synchronized() {
            return None;
        }
        let b = &self.busy[c.busy];
        let len = u32::try_from(b.send.len()).ok()?;
        let mss = c.mss();
        let idle_us = self.now.micros_since(b.last_sent);
        let rto_us = rtt::rto_us(c, self.profiles.get(c.profile), 0);
        let window_max = b.window_max.max(c.snd_wnd);
        let usual = len > 0
            && len <= mss
            && len < c.snd_wnd
            // Never more than half of the largest window the peer had.
            && (window_max >= 2 * mss)
            && c.cwnd > 0
            && c.snd_una == c.snd_nxt
            && is_calm(b)
            // The window is another after a long silence.
            && (idle_us <= rto_us || !self.config.slow_start_after_idle);
        usual.then(|| Message { len, fin: c.has(Flags::FIN_QUEUED), full: len == mss, rto_us })
    }
}

/// Nothing is in flight, out of order or urgent, and no timer runs for it.
#[inline(always)]
fn is_calm(b: &Busy) -> bool {
    b.sent.is_empty()
        && b.timer_kind == RetransmitTimer::Off
        && b.recovery.state == CaState::Open
        && b.extras == Extras::NONE
        && !(b.recovery.sends_new_first() | b.force | b.fin_sent | (b.backoff > 0))
        && b.urgent_out.is_none()
        && b.more == More::No
        && b.dsack.is_none()
        && b.recv.range_count() == 0
}
