//! Loss recovery: which congestion state a connection is in, and how many segments it may send in it.
//!
//! Detection is RACK's (`rack.rs`) with SACK, and counting duplicate acknowledgements without. The reduction of the window is paced by
//! PRR (RFC 9937). A reduction that proves to have been for nothing is taken back (RFC 3708 by DSACK, RFC 3522 by timestamps, and a
//! time-out by RFC 5682).

use super::active::ActiveConn;
use super::conn::Tcb;
use super::rack::RackInput;
use crate::options::CaState;
use crate::wire::tcp::SeqNumber;

/// State of recovery.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Recovery {
    pub ca_state: CaState,
    /// `snd_nxt` when the state was entered: it ends when this is acknowledged.
    pub high_seq: SeqNumber,
    prr_delivered: u32,
    prr_out: u32,
    /// Segments in flight when recovery began (RecoverFS).
    recover_fs: u32,
    /// What to return to if the reduction was for nothing.
    prior_cwnd: u32,
    prior_ssthresh: u32,
    /// `snd_una` when the window was reduced; none if nothing can be undone.
    undo_marker: Option<SeqNumber>,
    /// Retransmissions since then that no DSACK has shown to be needless.
    undo_retrans: u32,
    /// Our timestamp when the first retransmission left.
    retrans_stamp: Option<u32>,
    /// After a time-out: whether it was for nothing is being found out (F-RTO, RFC 5682).
    frto: bool,
    /// New data leave instead of lost ones until the next acknowledgement (RFC 5682 §2.1, step 2b).
    frto_new_data: bool,
}

/// What recovery has to know of an acknowledgement.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AckSummary {
    pub delivered: u32,
    pub snd_una_advanced: bool,
    /// Segments newly marked lost.
    pub newly_lost: u32,
    /// The peer set ECE.
    pub ece: bool,
    /// It reported that a retransmission was needless.
    pub dsack: bool,
    /// Timestamp it echoes, if timestamps are in use.
    pub echo: Option<u32>,
    /// Lowest end of what it newly acknowledged that was never retransmitted.
    pub original_end: Option<SeqNumber>,
    /// It tells of something that arrived behind a hole.
    pub is_dupack: bool,
    /// There are data that were never sent, and the window takes some.
    pub more_to_send: bool,
    /// More reordering was seen than is expected at first: what arrives out of order is progress.
    pub has_reordering: bool,
}

impl Recovery {
    /// Whether PRR governs the window.
    pub fn is_in_cwnd_reduction(&self) -> bool {
        matches!(self.ca_state, CaState::Recovery | CaState::Cwr)
    }

    /// Whether only new data may leave now, to find out if the time-out was for nothing.
    pub fn is_frto_sending_new_data(&self) -> bool {
        self.frto_new_data
    }

    /// No new data could leave: what is lost is sent again after all (RFC 5682 §2.1, step 2b).
    pub fn end_frto(&mut self) {
        self.frto = false;
        self.frto_new_data = false;
    }

    /// Segments left the sender during a reduction.
    pub fn on_sent(&mut self, segments: u32) {
        if self.is_in_cwnd_reduction() {
            self.prr_out += segments;
        }
    }

    /// A retransmission left.
    pub fn on_retransmit(&mut self, segments: u32, our_ts: u32) {
        self.retrans_stamp.get_or_insert(our_ts);
        if self.undo_marker.is_some() {
            self.undo_retrans += segments;
        }
    }

    /// A DSACK for data from `undo_marker` on: one needless retransmission.
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
            // The acknowledgement echoes a timestamp from before the retransmission: the original had arrived.
            (Some(echo), Some(sent)) => (echo.wrapping_sub(sent) as i32) < 0,
            _ => false,
        };
        let all_needless = self.retrans_stamp.is_some() && self.undo_retrans == 0;
        delayed || all_needless
    }

    fn undo_cwnd_reduction(&mut self, c: &mut Tcb) {
        c.cwnd = c.cwnd.max(self.prior_cwnd);
        c.ssthresh = c.ssthresh.max(self.prior_ssthresh);
        self.undo_marker = None;
        self.retrans_stamp = None;
    }

    fn clear_undo(&mut self) {
        self.undo_marker = None;
        self.retrans_stamp = None;
        self.undo_retrans = 0;
    }
}

/// Enters fast recovery or, for a mark by the network, CWR. `delivered` is what the acknowledgement that caused it delivered.
fn init_cwnd_reduction(c: &mut Tcb, b: &mut ActiveConn, state: CaState, delivered: u32) {
    if matches!(b.recovery.ca_state, CaState::Open | CaState::Disorder) {
        b.recovery.init_undo(c);
        c.ssthresh = b.congestion.on_congestion(c);
    }
    let r = &mut b.recovery;
    r.ca_state = state;
    r.high_seq = c.snd_nxt;
    r.prr_delivered = 0;
    r.prr_out = 0;
    // RFC 9937 §6.2: what was in flight before this acknowledgement. What was selectively acknowledged earlier is not delivered again.
    r.recover_fs = (b.rtx_queue.packets_out.saturating_sub(b.rtx_queue.sacked_out) + delivered).max(1);
}

/// A retransmission time-out: all is lost, slow start from one segment (RFC 5681 §3.1, equation 4).
pub(crate) fn enter_loss(c: &mut Tcb, b: &mut ActiveConn, frto: bool) {
    // Once per window (RFC 5681 §3.1): not again while what was outstanding at the last reduction is not acknowledged.
    // RFC 5682 §2.1, step 1: a recovery that is under way has sent too much again for acknowledgements to tell. Time-outs of one segment
    // in a row have not.
    b.recovery.frto =
        frto && (b.retransmits > 0 || !matches!(b.recovery.ca_state, CaState::Recovery | CaState::Loss));
    b.recovery.frto_new_data = false;
    let reduce = match b.recovery.ca_state {
        CaState::Open | CaState::Disorder => true,
        CaState::Cwr | CaState::Recovery => b.recovery.high_seq.le(c.snd_una),
        CaState::Loss => b.retransmits == 0,
    };
    if reduce {
        b.recovery.init_undo(c);
        c.ssthresh = b.congestion.on_congestion(c);
    }
    // RFC 2018 §8: a receiver that acknowledged the head selectively and still lets it time out has reneged.
    let reneged = b.rtx_queue.front().is_some_and(|s| s.has(super::rtx_queue::SACKED));
    b.rtx_queue.mark_all_lost(reneged || !c.has(super::conn::Flags::SACK));
    b.congestion.on_timeout();
    b.recovery.ca_state = CaState::Loss;
    b.recovery.high_seq = c.snd_nxt;
    c.cwnd = b.rtx_queue.in_flight() + 1;
    if reduce && c.has(super::conn::Flags::ECN) {
        // RFC 3168 §6.1.2: the peer learns of each reduction, whatever caused it.
        c.flags.set(super::conn::Flags::ECN_CWR);
    }
}

/// The state machine on an acknowledgement. Returns whether the window may grow by what was delivered.
pub(crate) fn fastretrans_alert(c: &mut Tcb, b: &mut ActiveConn, ack: &AckSummary) -> bool {
    let was = b.recovery.ca_state;
    exit_finished_state(c, b, ack);
    if ack.dsack
        && matches!(b.recovery.ca_state, CaState::Open | CaState::Disorder)
        && b.recovery.may_undo(None)
    {
        b.recovery.undo_cwnd_reduction(c);
        b.congestion.on_undo();
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
        cwnd_reduction(c, b, ack);
        return false;
    }
    // A duplicate acknowledgement lets one more segment leave, but never makes the window larger (RFC 3042 §2).
    // On a path that reorders much it does, as on Linux (`tcp_may_raise_cwnd`): acknowledgements that advance are rare there.
    was != CaState::Recovery && (ack.snd_una_advanced || ack.has_reordering && ack.delivered > 0)
}

/// States end when what was outstanding at their start is acknowledged, or when they prove to have been a mistake.
fn exit_finished_state(c: &mut Tcb, b: &mut ActiveConn, ack: &AckSummary) {
    let r = &mut b.recovery;
    let echo = ack.echo.filter(|_| ack.snd_una_advanced);
    let news = ack.snd_una_advanced || ack.dsack;
    if news && matches!(r.ca_state, CaState::Recovery | CaState::Loss) && r.may_undo(echo) {
        undo_recovery(c, b);
        return;
    }
    if r.ca_state == CaState::Loss && detect_spurious_timeout(c, b, ack) {
        return;
    }
    let r = &mut b.recovery;
    if c.snd_una.lt(r.high_seq) {
        return;
    }
    match r.ca_state {
        CaState::Open => {}
        CaState::Disorder => {
            if c.snd_una.ge(r.high_seq) {
                r.clear_undo();
            }
        }
        // Held until something sent after the reduction is acknowledged, so that CWR has reached the peer (RFC 3168 §6.1.2).
        CaState::Cwr if c.snd_una == r.high_seq => {}
        CaState::Cwr => {
            c.cwnd = c.cwnd.min(c.ssthresh);
            r.ca_state = CaState::Open;
        }
        CaState::Recovery => {
            c.cwnd = c.ssthresh;
            r.ca_state = CaState::Open;
            b.rack.on_recovery_end();
        }
        CaState::Loss => {
            r.ca_state = CaState::Open;
            r.end_frto();
            b.rack.on_recovery_end();
        }
    }
}

/// Recovery was for nothing: it ends, and so does what it changed.
fn undo_recovery(c: &mut Tcb, b: &mut ActiveConn) {
    if b.recovery.undo_marker.is_some() {
        b.recovery.undo_cwnd_reduction(c);
        b.congestion.on_undo();
    }
    b.recovery.ca_state = CaState::Open;
    b.recovery.end_frto();
    b.rack.on_recovery_end();
    b.unmark_lost();
}

/// F-RTO (RFC 5682 §3.1, as Linux has it). The time-out was for nothing if something that was never sent again arrives. To see that, new data
/// leave on the first acknowledgement that does not cover everything. Returns whether the time-out was taken back.
fn detect_spurious_timeout(c: &mut Tcb, b: &mut ActiveConn, ack: &AckSummary) -> bool {
    let r = &mut b.recovery;
    r.frto_new_data = false;
    if !r.frto {
        return false;
    }
    if ack.original_end.is_some_and(|end| end.le(r.high_seq)) {
        // Step 3b.
        undo_recovery(c, b);
        return true;
    }
    if c.snd_nxt.gt(r.high_seq) {
        // Step 3a: the new data arrived behind a hole.
        r.frto &= !ack.is_dupack;
    } else if ack.snd_una_advanced && c.snd_una.lt(r.high_seq) {
        // Step 2b.
        r.frto = ack.more_to_send;
        r.frto_new_data = ack.more_to_send;
    }
    false
}

/// Proportional rate reduction (RFC 9937 §6.2).
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
            // A "safe" acknowledgement: the network takes more.
            send += 1;
        }
        send.min(c.ssthresh - pipe)
    };
    // The first retransmission leaves at once.
    let send = if r.prr_out == 0 { send.max(1) } else { send };
    c.cwnd = pipe + send;
}

/// What RACK reads.
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

/// A tail loss probe repaired a loss that was never seen otherwise: the window pays for it (RFC 8985 §7.4.2).
pub(crate) fn on_tlp_repaired_loss(c: &mut Tcb, b: &mut ActiveConn) {
    if b.recovery.ca_state == CaState::Open || b.recovery.ca_state == CaState::Disorder {
        init_cwnd_reduction(c, b, CaState::Cwr, 0);
        b.recovery.clear_undo();
    }
}

/// Segments were found lost without an acknowledgement: fast recovery begins, or goes on.
pub(crate) fn on_loss_without_ack(c: &mut Tcb, b: &mut ActiveConn) {
    fastretrans_alert(c, b, &AckSummary { newly_lost: 1, ..AckSummary::default() });
}

/// The path takes smaller segments: those in flight are sent again. No sign of congestion, so neither window nor threshold change; the state
/// only says that retransmissions come first (RFC 1191 §6.5).
pub(crate) fn simple_retransmit(c: &Tcb, b: &mut ActiveConn) {
    if !b.recovery.is_in_cwnd_reduction() {
        b.recovery.ca_state = CaState::Loss;
        b.recovery.high_seq = c.snd_nxt;
        b.recovery.clear_undo();
        b.recovery.end_frto();
    }
}
