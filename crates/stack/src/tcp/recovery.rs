//! Loss recovery: the congestion state of a connection, and how many segments it may send in that state.
//!
//! Losses are detected by RACK (`rack.rs`) with SACK, and by counting duplicate acknowledgements without
//! SACK. PRR (RFC 9937) paces the reduction of the window. A spurious reduction is undone (detected by DSACK
//! as in RFC 3708, by timestamps as in RFC 3522, and after a time-out by F-RTO, RFC 5682).

use super::active::{ActiveConn, SlowPathFlags};
use super::config::CongestionControl;
use super::conn::Tcb;
use super::rack::RackInput;
use crate::options::CaState;
use crate::wire::tcp::SeqNumber;
use serde::{Deserialize, Serialize};

/// State of recovery.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Recovery {
    pub ca_state: CaState,
    /// `snd_nxt` when the state was entered: the state ends when this is acknowledged.
    pub high_seq: SeqNumber,
    prr_delivered: u32,
    prr_out: u32,
    /// Segments in flight when recovery began (RecoverFS of RFC 9937).
    recover_fs: u32,
    /// Congestion window and threshold before the reduction, which an undo restores.
    prior_cwnd: u32,
    prior_ssthresh: u32,
    /// `snd_una` when the window was reduced; `None` if nothing can be undone.
    undo_marker: Option<SeqNumber>,
    /// Retransmissions since then that no DSACK has reported as spurious.
    undo_retrans: u32,
    /// Timestamp value (TSval) of the first retransmission.
    retrans_stamp: Option<u32>,
    /// F-RTO is finding out whether the last time-out was spurious (RFC 5682).
    frto: bool,
}

/// Facts about an acknowledgement that the recovery state machine needs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AckSummary {
    pub delivered: u32,
    pub snd_una_advanced: bool,
    /// Segments that were newly marked lost.
    pub newly_lost: u32,
    /// True if the peer set ECE.
    pub ece: bool,
    /// True if the acknowledgement reported a spurious retransmission (DSACK).
    pub dsack: bool,
    /// Timestamp that the acknowledgement echoes, if timestamps are in use.
    pub echo: Option<u32>,
    /// Lowest end of the newly acknowledged segments that were never retransmitted.
    pub original_end: Option<SeqNumber>,
    /// True if the acknowledgement reports data after a gap, or acknowledges nothing new and has no payload.
    pub is_dupack: bool,
    /// True if data are queued that were never sent, and the peer's window admits some of them.
    pub more_to_send: bool,
    /// True if more reordering was observed than is assumed initially, so segments that arrive out of order
    /// are progress.
    pub has_reordering: bool,
}

impl Recovery {
    /// Returns whether PRR controls the window (Linux's `tcp_in_cwnd_reduction`).
    pub fn is_in_cwnd_reduction(&self) -> bool {
        matches!(self.ca_state, CaState::Recovery | CaState::Cwr)
    }

    /// Counts segments that were sent during a reduction.
    pub fn on_sent(&mut self, segments: u32) {
        if self.is_in_cwnd_reduction() {
            self.prr_out += segments;
        }
    }

    /// Records a retransmission of `segments` segments with the timestamp value `our_ts`.
    pub fn on_retransmit(&mut self, segments: u32, our_ts: u32) {
        self.retrans_stamp.get_or_insert(our_ts);
        if self.undo_marker.is_some() {
            self.undo_retrans += segments;
        }
    }

    /// Counts a DSACK for data from `undo_marker` on: one retransmission was spurious.
    pub fn on_dsack(&mut self, start: SeqNumber) {
        if self.undo_marker.is_some_and(|m| start.ge(m)) {
            self.undo_retrans = self.undo_retrans.saturating_sub(1);
        }
    }

    fn init_undo(&mut self, c: &Tcb) {
        self.prior_cwnd = c.cwnd;
        self.prior_ssthresh = c.ssthresh;
        self.undo_marker = Some(c.snd_una);
        self.undo_retrans = 0;
        self.retrans_stamp = None;
    }

    fn may_undo(&self, echo: Option<u32>) -> bool {
        if self.undo_marker.is_none() {
            return false;
        }
        let delayed = match (echo, self.retrans_stamp) {
            // The acknowledgement echoes a timestamp from before the retransmission: the original
            // transmission had arrived.
            (Some(echo), Some(sent)) => (echo.wrapping_sub(sent) as i32) < 0,
            _ => false,
        };
        let all_needless = self.retrans_stamp.is_some() && self.undo_retrans == 0;
        delayed || all_needless
    }

    fn clear_undo(&mut self) {
        self.undo_marker = None;
        self.retrans_stamp = None;
        self.undo_retrans = 0;
    }
}

/// Ends F-RTO, because the cause of the time-out is known, or because no new data can be sent to find it out
/// (RFC 5682 §2.1, step 2b). Lost segments are retransmitted from now on.
pub(crate) fn end_frto(b: &mut ActiveConn) {
    b.recovery.frto = false;
    b.slow_path.take(SlowPathFlags::FRTO_NEW_DATA);
}

/// Returns the slow start threshold after a congestion signal. With BBR it stays, and BBR remembers the
/// window.
fn ssthresh(c: &Tcb, b: &mut ActiveConn) -> u32 {
    match b.bbr(c) {
        Some((bbr, _)) => {
            bbr.save_cwnd(c.cwnd);
            c.ssthresh
        }
        None => b.congestion.on_congestion(c),
    }
}

/// Reduces the threshold after another algorithm has replaced BBR during a reduction of the window, because
/// BBR has left the threshold as it was. `window` is BBR's window before the reduction.
pub(crate) fn reduce_after_bbr(c: &mut Tcb, b: &mut ActiveConn, window: u32) {
    if b.recovery.is_in_cwnd_reduction() {
        let cwnd = core::mem::replace(&mut c.cwnd, window);
        c.ssthresh = b.congestion.on_congestion(c);
        c.cwnd = cwnd;
    }
}

/// Undoes a reduction of the window. BBR restores its window itself.
fn undo_cwnd_reduction(c: &mut Tcb, b: &mut ActiveConn) {
    match b.bbr(c) {
        Some((bbr, totals)) => bbr.on_undo(&totals),
        None => {
            c.cwnd = c.cwnd.max(b.recovery.prior_cwnd);
            b.congestion.on_undo();
        }
    }
    let r = &mut b.recovery;
    c.ssthresh = c.ssthresh.max(r.prior_ssthresh);
    r.undo_marker = None;
    r.retrans_stamp = None;
}

/// Enters fast recovery or, after an ECN mark, CWR. `delivered` counts the segments that the acknowledgement
/// which caused it delivered.
fn init_cwnd_reduction(c: &mut Tcb, b: &mut ActiveConn, state: CaState, delivered: u32) {
    if matches!(b.recovery.ca_state, CaState::Open | CaState::Disorder) {
        b.recovery.init_undo(c);
        c.ssthresh = ssthresh(c, b);
    }
    let r = &mut b.recovery;
    r.ca_state = state;
    r.high_seq = c.snd_nxt;
    r.prr_delivered = 0;
    r.prr_out = 0;
    // RFC 9937 §6.2: segments in flight before this acknowledgement. Segments that were selectively
    // acknowledged earlier are not delivered again.
    r.recover_fs = (b.rtx_queue.packets_out.saturating_sub(b.rtx_queue.sacked_out) + delivered).max(1);
}

/// Enters the Loss state after a retransmission time-out: all segments are lost, and slow start begins with
/// one segment (RFC 5681 §3.1, equation 4).
pub(crate) fn enter_loss(c: &mut Tcb, b: &mut ActiveConn, frto: bool) {
    // The window is reduced once per window of data (RFC 5681 §3.1): not again before the data that were
    // outstanding at the last reduction are acknowledged. RFC 5682 §2.1, step 1: F-RTO is not used during a
    // recovery, which has retransmitted too much for acknowledgements to be unambiguous. Repeated time-outs
    // of the same segment have not.
    b.recovery.frto =
        frto && (b.retransmits > 0 || !matches!(b.recovery.ca_state, CaState::Recovery | CaState::Loss));
    b.slow_path.take(SlowPathFlags::FRTO_NEW_DATA);
    let reduce = match b.recovery.ca_state {
        CaState::Open | CaState::Disorder => true,
        CaState::Cwr | CaState::Recovery => b.recovery.high_seq.le(c.snd_una),
        CaState::Loss => b.retransmits == 0,
    };
    if reduce {
        b.recovery.init_undo(c);
        c.ssthresh = ssthresh(c, b);
    }
    // RFC 2018 §8: a receiver that selectively acknowledged the head and still lets it time out has reneged.
    let reneged = b.rtx_queue.is_front_sacked();
    b.rtx_queue.mark_all_lost(reneged || !c.has(super::conn::Flags::SACK));
    b.congestion.on_timeout();
    if let Some((bbr, totals)) = b.bbr(c) {
        bbr.on_timeout(&totals);
    }
    b.recovery.ca_state = CaState::Loss;
    b.recovery.high_seq = c.snd_nxt;
    c.cwnd = b.rtx_queue.in_flight() + 1;
    if reduce && c.has(super::conn::Flags::ECN) {
        // RFC 3168 §6.1.2: the peer is notified of each reduction, whatever caused it.
        c.flags.set(super::conn::Flags::ECN_CWR);
    }
}

/// Result of [`fastretrans_alert`].
pub(crate) struct FastRetransResult {
    /// The window may grow by what was delivered.
    pub(crate) may_grow: bool,
    /// A reduction of the window was undone.
    pub(crate) is_undone: bool,
}

/// Runs the state machine on an acknowledgement (Linux's `tcp_fastretrans_alert`).
pub(crate) fn fastretrans_alert(c: &mut Tcb, b: &mut ActiveConn, ack: &AckSummary) -> FastRetransResult {
    let prior_state = b.recovery.ca_state;
    let mut is_undone = exit_finished_state(c, b, ack);
    if ack.dsack
        && matches!(b.recovery.ca_state, CaState::Open | CaState::Disorder)
        && b.recovery.may_undo(None)
    {
        undo_cwnd_reduction(c, b);
        is_undone = true;
    }
    match b.recovery.ca_state {
        CaState::Open | CaState::Disorder | CaState::Cwr => {
            if b.rtx_queue.lost_out > 0 {
                init_cwnd_reduction(c, b, CaState::Recovery, ack.delivered);
            } else if ack.ece && b.recovery.ca_state != CaState::Cwr {
                init_cwnd_reduction(c, b, CaState::Cwr, ack.delivered);
            } else if b.recovery.ca_state != CaState::Cwr {
                let disorder = b.rtx_queue.sacked_out > 0;
                b.recovery.ca_state = if disorder { CaState::Disorder } else { CaState::Open };
            }
        }
        CaState::Recovery | CaState::Loss => {}
    }
    if b.recovery.ca_state == CaState::Open {
        b.recovery.high_seq = c.snd_una;
    }
    if b.recovery.is_in_cwnd_reduction() {
        if b.congestion.kind() != CongestionControl::Bbr {
            cwnd_reduction(c, b, ack);
        }
        return FastRetransResult { may_grow: false, is_undone };
    }
    // A duplicate acknowledgement admits one more segment but never grows the window (RFC 3042 §2). On a path
    // with much reordering it does, as on Linux (`tcp_may_raise_cwnd`), because acknowledgements that advance
    // are rare there.
    let may_grow =
        prior_state != CaState::Recovery && (ack.snd_una_advanced || ack.has_reordering && ack.delivered > 0);
    FastRetransResult { may_grow, is_undone }
}

/// Leaves a state when the data that were outstanding at its start are acknowledged, or when the reduction
/// proves to have been spurious. Returns whether a reduction of the window was undone.
fn exit_finished_state(c: &mut Tcb, b: &mut ActiveConn, ack: &AckSummary) -> bool {
    let r = &mut b.recovery;
    let echo = ack.echo.filter(|_| ack.snd_una_advanced);
    let may_be_spurious = ack.snd_una_advanced || ack.dsack;
    if may_be_spurious && matches!(r.ca_state, CaState::Recovery | CaState::Loss) && r.may_undo(echo) {
        return undo_recovery(c, b);
    }
    if r.ca_state == CaState::Loss && detect_spurious_timeout(c, b, ack) {
        return undo_recovery(c, b);
    }
    let r = &mut b.recovery;
    if c.snd_una.lt(r.high_seq) {
        return false;
    }
    let sets_own_window = b.congestion.kind() == CongestionControl::Bbr;
    match r.ca_state {
        CaState::Open => {}
        CaState::Disorder => {
            if c.snd_una.ge(r.high_seq) {
                r.clear_undo();
            }
        }
        // CWR is kept until data sent after the reduction are acknowledged, so that the CWR flag has reached
        // the peer (RFC 3168 §6.1.2).
        CaState::Cwr if c.snd_una == r.high_seq => {}
        CaState::Cwr => {
            if !sets_own_window {
                c.cwnd = c.cwnd.min(c.ssthresh);
            }
            r.ca_state = CaState::Open;
        }
        CaState::Recovery => {
            if !sets_own_window && c.ssthresh != u32::MAX {
                c.cwnd = c.ssthresh;
            }
            r.ca_state = CaState::Open;
            b.rack.on_recovery_end();
        }
        CaState::Loss => {
            r.ca_state = CaState::Open;
            end_frto(b);
            b.rack.on_recovery_end();
        }
    }
    false
}

/// Ends a spurious recovery and undoes what it changed. Returns whether that included a reduction of the
/// window.
fn undo_recovery(c: &mut Tcb, b: &mut ActiveConn) -> bool {
    let is_reduced = b.recovery.undo_marker.is_some();
    if is_reduced {
        undo_cwnd_reduction(c, b);
    }
    b.recovery.ca_state = CaState::Open;
    end_frto(b);
    b.rack.on_recovery_end();
    b.unmark_lost();
    is_reduced
}

/// Runs F-RTO (RFC 5682 §3.1, as implemented by Linux). The time-out was spurious if a segment that was never
/// retransmitted is acknowledged. To find out, new data are sent on the first acknowledgement that does not
/// cover everything. Returns whether the time-out was spurious.
fn detect_spurious_timeout(c: &Tcb, b: &mut ActiveConn, ack: &AckSummary) -> bool {
    b.slow_path.take(SlowPathFlags::FRTO_NEW_DATA);
    let r = &mut b.recovery;
    if !r.frto {
        return false;
    }
    if ack.original_end.is_some_and(|end| end.le(r.high_seq)) {
        // Step 3b.
        return true;
    }
    if c.snd_nxt.gt(r.high_seq) {
        // Step 3a: the new data arrived after a gap.
        r.frto &= !ack.is_dupack;
    } else if ack.snd_una_advanced && c.snd_una.lt(r.high_seq) {
        // Step 2b.
        r.frto = ack.more_to_send;
        b.slow_path.assign(SlowPathFlags::FRTO_NEW_DATA, ack.more_to_send);
    }
    false
}

/// Updates the congestion window by proportional rate reduction (RFC 9937 §6.2).
fn cwnd_reduction(c: &mut Tcb, b: &mut ActiveConn, ack: &AckSummary) {
    if ack.delivered == 0 && b.recovery.prr_out > 0 {
        return;
    }
    let pipe = b.rtx_queue.in_flight();
    let r = &mut b.recovery;
    r.prr_delivered += ack.delivered;
    let send = if pipe > c.ssthresh {
        let share = u64::from(r.prr_delivered) * u64::from(c.ssthresh);
        (share.div_ceil(u64::from(r.recover_fs)) as u32).saturating_sub(r.prr_out)
    } else {
        let mut send = r.prr_delivered.saturating_sub(r.prr_out).max(ack.delivered);
        if ack.snd_una_advanced && ack.newly_lost == 0 {
            // A "safe" acknowledgement (SafeACK): the network accepts more.
            send += 1;
        }
        send.min(c.ssthresh - pipe)
    };
    // The first retransmission is sent at once.
    let send = if r.prr_out == 0 { send.max(1) } else { send };
    c.cwnd = pipe + send;
}

/// Collects what RACK reads of the connection.
pub(crate) fn rack_input(
    c: &Tcb,
    b: &ActiveConn,
    now: crate::time::Instant,
    dup_threshold: u32,
    stale_echo: bool,
) -> RackInput {
    RackInput {
        now,
        min_rtt_us: c.min_rtt,
        srtt_us: c.srtt >> 3,
        in_recovery: matches!(b.recovery.ca_state, CaState::Recovery | CaState::Loss),
        sacked_out: b.rtx_queue.sacked_out,
        dup_thresh: dup_threshold,
        mss: c.mss(),
        echo_is_older_than_retransmission: stale_echo,
    }
}

/// Reduces the window after a tail loss probe has repaired a loss that was not detected otherwise (RFC 8985
/// §7.4.2).
pub(crate) fn on_tlp_repaired_loss(c: &mut Tcb, b: &mut ActiveConn) {
    if b.recovery.ca_state == CaState::Open || b.recovery.ca_state == CaState::Disorder {
        init_cwnd_reduction(c, b, CaState::Cwr, 0);
        b.recovery.clear_undo();
    }
}

/// Enters or continues fast recovery after segments were found lost without an acknowledgement.
pub(crate) fn on_loss_without_ack(c: &mut Tcb, b: &mut ActiveConn) {
    fastretrans_alert(c, b, &AckSummary { newly_lost: 1, ..AckSummary::default() });
}

/// Schedules the retransmission of segments that are too large for the path (RFC 1191 §6.4; Linux's
/// `tcp_simple_retransmit`). This is no sign of congestion, so neither window nor threshold change; the state
/// only makes retransmissions precede new data.
pub(crate) fn simple_retransmit(c: &Tcb, b: &mut ActiveConn) {
    if !b.recovery.is_in_cwnd_reduction() {
        b.recovery.ca_state = CaState::Loss;
        b.recovery.high_seq = c.snd_nxt;
        b.recovery.clear_undo();
        end_frto(b);
    }
}
