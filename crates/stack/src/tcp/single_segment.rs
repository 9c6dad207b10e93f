//! Single-segment sends: all queued data fit into one segment and the windows, and nothing is in flight.
//! Nearly every request and response is sent this way. No queue has to be searched, and loss recovery is not
//! involved.
//!
//! This module does what `output` and `timers` would do with such a connection, and nothing else: tests
//! compare both paths, as they do for header prediction (docs/adr/0007).

use super::ack;
use super::active::{ActiveConn, MsgMore, RetransmitTimer, SlowPathFlags};
use super::conn::{Flags, NONE};
use super::rtx_queue::EndKind;
use super::{Tcp, rtt};
use crate::ip::{Network, TxError};
use crate::options::CaState;
use crate::wire::tcp::TcpFlags;

/// A segment that contains all queued data and may be sent at once.
struct SingleSegment {
    len: u32,
    /// True if FIN is sent with the data.
    has_fin: bool,
    /// True if the data fill a full-sized segment.
    is_full_sized: bool,
    /// Retransmission time-out in µs.
    rto_us: u64,
}

/// Flags of connections whose segments need the slow path.
const SLOW_PATH_FLAGS: Flags = Flags::SYN_PENDING
    .with(Flags::V6)
    .with(Flags::ECN)
    .with(Flags::ECN_ECHO)
    .with(Flags::ECN_CWR)
    .with(Flags::MTU_LOCKED)
    .with(Flags::CORK);

impl Tcp {
    /// Sends all queued data of a connection if they fit one segment. Returns false without any change if the
    /// slow path is needed.
    ///
    /// # Errors
    /// The device has no room, or there is no route.
    #[inline]
    pub(super) fn send_single_segment(&mut self, net: &mut Network, idx: u32) -> Result<bool, TxError> {
        #[cfg(test)]
        if self.is_fast_path_disabled {
            return Ok(false);
        }
        let Some(segment) = self.single_segment(idx) else { return Ok(false) };
        let SingleSegment { len, has_fin, is_full_sized, rto_us } = segment;
        let c = &self.conns[idx];
        let flags = TcpFlags(TcpFlags::ACK.0 | TcpFlags::PSH.0 | if has_fin { TcpFlags::FIN.0 } else { 0 });
        let seq = c.snd_nxt;
        if !self.emit_single(net, idx, seq, len, flags)? {
            return Ok(false);
        }
        self.stats.bytes_out += u64::from(len);
        let (now, now_ms) = (self.now, self.now_ms());
        let c = &mut self.conns[idx];
        let b = &mut self.active[c.active];
        let end = seq + (len + u32::from(has_fin));
        b.max_window = b.max_window.max(c.snd_wnd);
        b.rtx_queue.push(seq, end, now, 1, EndKind::Push);
        b.fin_sent |= has_fin;
        c.snd_nxt = end;
        if !is_full_sized {
            b.snd_sml = Some(end);
        }
        b.lsndtime = now;
        b.idle_since = None;
        b.cork_deadline = None;
        if c.has(Flags::ATO_SET) && now_ms.wrapping_sub(c.last_rx) < self.config.delayed_ack_ms {
            c.flags.set(Flags::PINGPONG);
        }
        let (enabled, profile) = (self.config.tail_loss_probes, self.profiles.get(c.profile));
        // Nothing was in flight, so a new round begins.
        b.is_cwnd_limited = c.cwnd <= 1;
        b.max_packets_out = 1;
        b.cwnd_usage_seq = end;
        let (kind, at) = ack::loss_probe_or_rto(c, b, enabled, profile, now, now.after_micros(rto_us));
        b.set_timer(kind, at);
        if c.has(Flags::KEEPALIVE) {
            self.rearm(idx);
        } else {
            self.arm(idx, at);
        }
        Ok(true)
    }

    /// Returns the segment to send, if the connection qualifies for a single-segment send.
    #[inline(always)]
    fn single_segment(&self, idx: u32) -> Option<SingleSegment> {
        let c = &self.conns[idx];
        if c.active == NONE || c.has(SLOW_PATH_FLAGS) || !c.state.is_synchronized() {
            return None;
        }
        let b = &self.active[c.active];
        let len = u32::try_from(b.send.len()).ok()?;
        let mss = c.mss();
        let idle_us = self.now.micros_since(b.lsndtime);
        let rto_us = rtt::rto_us(c, self.profiles.get(c.profile), 0);
        let window_max = b.max_window.max(c.snd_wnd);
        let qualifies = len > 0
            && len <= mss
            && len < c.snd_wnd
            // Not above half of the largest window that the peer has offered.
            && (window_max >= 2 * mss)
            && c.cwnd > 0
            && c.snd_una == c.snd_nxt
            && is_open_and_idle(b)
            // After a long idle time the congestion window is reduced first.
            && (idle_us <= rto_us || !self.config.slow_start_after_idle);
        qualifies.then(|| SingleSegment {
            len,
            has_fin: c.has(Flags::FIN_QUEUED),
            is_full_sized: len == mss,
            rto_us,
        })
    }
}

/// Returns whether the congestion state is Open and nothing is in flight, out of order or urgent, and no
/// timer is set.
#[inline(always)]
fn is_open_and_idle(b: &ActiveConn) -> bool {
    b.rtx_queue.is_empty()
        && b.timer_kind == RetransmitTimer::Off
        && b.recovery.ca_state == CaState::Open
        && b.slow_path == SlowPathFlags::NONE
        && !(b.nagle_push | b.fin_sent | (b.backoff > 0))
        && b.snd_up.is_none()
        && b.msg_more == MsgMore::No
        && b.dsack.is_none()
        && b.recv.range_count() == 0
        && b.ooo_fin_seq.is_none()
}
