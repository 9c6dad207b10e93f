//! State that only an active connection needs: buffers, the retransmission queue, recovery, the state of the
//! congestion control algorithm, timers.

use super::chrono::Chrono;
use super::config::CongestionControl;
use super::congestion::{Bbr, Congestion, Totals};
use super::conn::{NONE, Tcb};
use super::mtu_search::MtuSearch;
use super::rack::Rack;
use super::rate::RateState;
use super::record_marks::RecordMarks;
use super::recovery::Recovery;
use super::recv_buffer::RecvBuffer;
use super::rtx_queue::RtxQueue;
use super::send_buffer::SendBuffer;
use super::state::State;
use crate::device::Label;
use crate::handle::Listener;
use crate::options::CaState;
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use serde::{Deserialize, Serialize};

/// Says whether the application has announced more data after the last send (`MSG_MORE`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum MsgMore {
    #[default]
    No,
    /// More data follow: a partial segment waits for them.
    Expected,
    /// More data follow, but a partial segment no longer waits for them.
    Released,
}

/// Purpose of the retransmission timer (Linux's `icsk_pending`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RetransmitTimer {
    /// The timer is not set.
    #[default]
    Off,
    /// Retransmission time-out (RFC 6298).
    Rto,
    /// Tail loss probe (RFC 8985 §7).
    LossProbe,
    /// Reordering timer: segments that may have been reordered are checked again (RFC 8985 §6.3).
    ReoTimeout,
    /// Zero window probe (RFC 9293 §3.8.6.1).
    Persist,
    /// SYN+ACK of a connection that was opened fast ([`super::fastopen`]). Data in flight have no timer
    /// meanwhile.
    SynAck,
}

/// Urgent data of the receiving side: one byte, as on Linux (`urg_data`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum UrgentState {
    #[default]
    None,
    /// The byte with this sequence number was announced and has not arrived (`TCP_URG_NOTYET`).
    NotYet(SeqNumber),
    /// The byte has arrived (`TCP_URG_VALID`).
    Valid(SeqNumber, u8),
    /// The application has read the byte (`TCP_URG_READ`).
    Read(SeqNumber),
}

/// An episode of tail loss probing (RFC 8985 §7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TailLossProbe {
    /// `snd_nxt` after the probe (TLP.end_seq; Linux's `tlp_high_seq`).
    pub end_seq: SeqNumber,
    /// True if the probe was a retransmission (TLP.is_retrans).
    pub is_retrans: bool,
}

/// Conditions, set on few connections, that need the slow path before new data are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SlowPathFlags(u8);

impl SlowPathFlags {
    pub const NONE: Self = Self(0);
    /// A tail loss probe is due.
    pub const LOSS_PROBE: Self = Self(1);
    /// The path MTU is searched for by probing (RFC 4821).
    pub const MTU_SEARCH: Self = Self(2);
    /// A record ends or a long write pushes inside of the queued data, or a write continues
    /// ([`super::record_marks`]).
    pub const RECORD_MARKS: Self = Self(4);
    /// The application is notified when few bytes are unsent (`TCP_NOTSENT_LOWAT`).
    pub const NOTSENT_LOWAT: Self = Self(8);
    /// The connection was opened by TCP Fast Open, and its SYN+ACK was not acknowledged yet.
    pub const FASTOPEN: Self = Self(16);
    /// The connection is paced or has samples of its delivery rate taken ([`super::rate`]).
    pub const PACED: Self = Self(32);
    /// New data are sent before lost data until the next acknowledgement (RFC 5682 §2.1, step 2b).
    pub const FRTO_NEW_DATA: Self = Self(64);
    /// Flags of connections whose output differs from the first segment on.
    pub const OWN_OUTPUT: Self = Self(Self::PACED.0 | Self::FRTO_NEW_DATA.0);
    /// The SYN of the connection waits for data that it carries ([`super::fastopen_client`]).
    pub const SYN_DEFERRED: Self = Self(128);

    pub fn has(self, flag: Self) -> bool {
        self.0 & flag.0 != 0
    }

    pub fn set(&mut self, flag: Self) {
        self.0 |= flag.0;
    }

    pub fn assign(&mut self, flag: Self, on: bool) {
        self.0 = self.0 & !flag.0 | if on { flag.0 } else { 0 };
    }

    /// Clears a flag and returns whether it was set.
    pub fn take(&mut self, flag: Self) -> bool {
        let had = self.has(flag);
        self.0 &= !flag.0;
        had
    }
}

/// The active state of a connection.
#[derive(Serialize, Deserialize)]
pub(crate) struct ActiveConn {
    #[serde(skip)]
    pub owner: u32,
    /// Bytes from `snd_una` on: those in flight, then those that were not sent yet.
    pub send: SendBuffer,
    pub rtx_queue: RtxQueue,
    /// Bytes received and not read, including those after gaps.
    pub recv: RecvBuffer,
    pub recovery: Recovery,
    pub rack: Rack,
    pub congestion: Congestion,
    pub timer_kind: RetransmitTimer,
    pub timer_at: Instant,
    /// Consecutive retransmission time-outs of the head of the queue, without progress.
    pub retransmits: u8,
    /// Shift of the retransmission time-out (RFC 6298 §5.5), also that of window probes.
    pub backoff: u8,
    /// Unanswered zero window probes.
    pub probes_out: u8,
    /// When the first of the current unanswered retransmissions or probes was sent.
    pub retransmit_since: Option<Instant>,
    /// End of the last segment sent that was smaller than the full size (Minshall's variant of Nagle's
    /// algorithm).
    pub snd_sml: Option<SeqNumber>,
    /// When a partial segment that a cork holds back is sent, or when a paced connection may send next.
    pub cork_deadline: Option<Instant>,
    /// The episode of tail loss probing, if a probe is in flight.
    pub tlp: Option<TailLossProbe>,
    /// Range that was received twice and is reported first (RFC 2883).
    pub dsack: Option<(SeqNumber, SeqNumber)>,
    /// Largest number of segments in flight during the current round.
    pub max_packets_out: u32,
    /// True if the congestion window limited the sender during the current round.
    pub is_cwnd_limited: bool,
    /// `snd_nxt` when the current round of window validation began.
    pub cwnd_usage_seq: SeqNumber,
    /// Acknowledged bytes that were not reported yet.
    pub acked_bytes: u32,
    /// When the last data were sent.
    pub lsndtime: Instant,
    /// When the last data were received; before that, when the last segment was received before this state
    /// was allocated. Low bits of the clock in ms.
    pub lrcvtime: u32,
    pub chrono: Chrono,
    /// When the connection became idle: nothing is queued or in flight since then.
    pub idle_since: Option<Instant>,
    /// Segments retransmitted since this state was allocated.
    pub total_retrans: u32,
    pub urg_data: UrgentState,
    /// Events about urgent data that the owner has not taken yet. Reading waits for them.
    pub urgent_events_queued: u16,
    /// End of the urgent data sent (SND.UP).
    pub snd_up: Option<SeqNumber>,
    /// Bytes that the owner has consumed, but whose final reader has not read. They reduce the advertised
    /// window.
    pub delivered_unread: u32,
    /// Largest window that the peer has offered.
    pub max_window: u32,
    pub slow_path: SlowPathFlags,
    /// Present if [`SlowPathFlags::PACED`] is set.
    pub rate: Option<Box<RateState>>,
    /// The listener of a connection that was opened by TCP Fast Open, until its SYN+ACK is acknowledged.
    pub fastopen_listener: Option<Listener>,
    pub mtu: MtuSearch,
    pub record_marks: RecordMarks,
    /// Announcement of the last send about the data that follow it.
    pub msg_more: MsgMore,
    /// True if the next partial segment is sent whatever holds it back (Linux's `TCP_NAGLE_PUSH`).
    pub nagle_push: bool,
    /// True if FIN was sent.
    pub fin_sent: bool,
    /// True if the connection is among the senders that wait for memory.
    pub is_waiting_for_memory: bool,
    /// Sequence number of a FIN that arrived before the data that precede it.
    pub ooo_fin_seq: Option<SeqNumber>,
    /// SACK blocks report this FIN: it has not overtaken the data before it here.
    pub is_ooo_fin_reported: bool,
    /// When the last invalid segment was answered, in ms.
    pub last_oow_ack_time: Option<u32>,
    /// Hash of the flow, computed when a device that carries labels first sends a segment of this connection.
    pub label: Label,
}

impl ActiveConn {
    pub fn new() -> Self {
        Self {
            owner: NONE,
            send: SendBuffer::default(),
            rtx_queue: RtxQueue::default(),
            recv: RecvBuffer::default(),
            recovery: Recovery::default(),
            rack: Rack::default(),
            congestion: Congestion::default(),
            timer_kind: RetransmitTimer::Off,
            timer_at: Instant::MAX,
            retransmits: 0,
            backoff: 0,
            probes_out: 0,
            retransmit_since: None,
            snd_sml: None,
            cork_deadline: None,
            tlp: None,
            dsack: None,
            max_packets_out: 0,
            is_cwnd_limited: false,
            cwnd_usage_seq: SeqNumber(0),
            acked_bytes: 0,
            lsndtime: Instant::ZERO,
            lrcvtime: 0,
            chrono: Chrono::default(),
            idle_since: None,
            total_retrans: 0,
            urg_data: UrgentState::None,
            urgent_events_queued: 0,
            snd_up: None,
            delivered_unread: 0,
            max_window: 0,
            slow_path: SlowPathFlags::NONE,
            rate: None,
            fastopen_listener: None,
            mtu: MtuSearch::NONE,
            record_marks: RecordMarks::default(),
            msg_more: MsgMore::No,
            nagle_push: false,
            fin_sent: false,
            is_waiting_for_memory: false,
            ooo_fin_seq: None,
            is_ooo_fin_reported: false,
            last_oow_ack_time: None,
            label: Label::NONE,
        }
    }

    /// Resets the state to its initial value and keeps the capacity of the queues. The caller, who has the
    /// pools, has cleared the buffers. Returns the state of pacing, if there was one.
    ///
    /// The fields are set one by one, because a value for all of them would be built elsewhere first and then
    /// copied.
    #[inline(always)]
    pub fn reset(&mut self) -> Option<Box<RateState>> {
        let Self {
            owner,
            send: _,
            rtx_queue,
            recv,
            recovery,
            rack,
            congestion,
            timer_kind,
            timer_at,
            retransmits,
            backoff,
            probes_out,
            retransmit_since,
            snd_sml,
            cork_deadline,
            tlp,
            dsack,
            max_packets_out,
            is_cwnd_limited,
            cwnd_usage_seq,
            acked_bytes,
            lsndtime,
            lrcvtime,
            chrono,
            idle_since,
            total_retrans,
            urg_data,
            urgent_events_queued,
            snd_up,
            delivered_unread,
            max_window,
            slow_path,
            rate,
            fastopen_listener: _,
            mtu,
            record_marks,
            msg_more,
            nagle_push,
            fin_sent,
            is_waiting_for_memory,
            ooo_fin_seq,
            is_ooo_fin_reported,
            last_oow_ack_time,
            label,
        } = self;
        rtx_queue.clear();
        recv.reset_dropped_ranges();
        *owner = NONE;
        *recovery = Recovery::default();
        *rack = Rack::default();
        *congestion = Congestion::default();
        *timer_kind = RetransmitTimer::Off;
        *timer_at = Instant::MAX;
        (*retransmits, *backoff, *probes_out) = (0, 0, 0);
        (*retransmit_since, *cork_deadline, *idle_since) = (None, None, None);
        (*snd_sml, *snd_up, *ooo_fin_seq) = (None, None, None);
        *is_ooo_fin_reported = false;
        *msg_more = MsgMore::No;
        *tlp = None;
        *dsack = None;
        *last_oow_ack_time = None;
        *label = Label::NONE;
        *cwnd_usage_seq = SeqNumber(0);
        *lsndtime = Instant::ZERO;
        (*lrcvtime, *chrono) = (0, Chrono::default());
        (*urg_data, *urgent_events_queued) = (UrgentState::None, 0);
        (*max_packets_out, *acked_bytes, *total_retrans) = (0, 0, 0);
        (*delivered_unread, *max_window) = (0, 0);
        (*is_cwnd_limited, *nagle_push, *fin_sent, *is_waiting_for_memory) = (false, false, false, false);
        if *slow_path != SlowPathFlags::NONE {
            *slow_path = SlowPathFlags::NONE;
            *mtu = MtuSearch::NONE;
            record_marks.clear();
            return rate.take();
        }
        None
    }

    /// Checks a state that was read from an image and whose buffers were checked. `c` is its TCB.
    ///
    /// # Errors
    /// The state contradicts itself or the TCB.
    pub fn check(&self, c: &Tcb) -> Result<(), &'static str> {
        self.rtx_queue.check_image()?;
        let is_paced = self.slow_path.has(SlowPathFlags::PACED);
        if is_paced && self.rate.as_ref().is_none_or(|rate| !rate.bbr.is_valid()) {
            return Err("a paced connection has no valid state of pacing");
        }
        if c.state.is_synchronized()
            && let (Some(first), Some(last)) = (self.rtx_queue.front(), self.rtx_queue.back())
        {
            let in_flight = u64::try_from(c.snd_nxt - c.snd_una).unwrap_or(u64::MAX);
            let fin = u64::from(self.fin_sent);
            if first.seq != c.snd_una || last.end_seq != c.snd_nxt || in_flight > self.send.len() + fin {
                return Err("the data in flight contradict the sequence numbers");
            }
        }
        Ok(())
    }

    /// Returns BBR's state, if BBR is the congestion control, and the counters that it needs.
    pub fn bbr(&mut self, c: &Tcb) -> Option<(&mut Bbr, Totals)> {
        if self.congestion.kind() != CongestionControl::Bbr {
            return None;
        }
        let rate = self.rate.as_deref_mut()?;
        let totals = Totals {
            delivered_mstamp: rate.delivery.delivered_mstamp,
            delivered: rate.delivery.delivered,
            lost: self.rtx_queue.lost,
            mss: c.mss(),
        };
        Some((&mut rate.bbr, totals))
    }

    /// Ends the wait of a paced connection for its next departure. Returns false if it did not wait.
    pub fn end_pacing_wait(&mut self) -> bool {
        self.rate.as_deref_mut().is_some_and(|rate| core::mem::take(&mut rate.pacer.is_waiting))
    }

    /// Returns whether nothing is queued, in flight or unread, and nothing has to be remembered. `state` is
    /// that of the connection.
    pub fn is_idle(&self, state: State) -> bool {
        self.send.is_empty()
            && self.rtx_queue.is_empty()
            && self.recv.is_empty()
            && self.delivered_unread == 0
            // FIN may still have to be sent, with nothing else queued.
            && !matches!(state, State::FinWait1 | State::Closing | State::LastAck)
            && matches!(self.urg_data, UrgentState::None | UrgentState::Read(_))
    }

    /// Returns whether a new state would not differ in anything that the connection needs: it is idle,
    /// nothing was ever lost or reordered, and its congestion window has never grown. `c` is its TCB, and
    /// `initial_window` the congestion window of a new connection in segments.
    #[inline(always)]
    pub fn is_as_new(&self, c: &Tcb, initial_window: u32) -> bool {
        self.is_idle(c.state)
            && c.state.is_synchronized()
            && c.cwnd <= initial_window
            && c.ssthresh == u32::MAX
            && self.total_retrans == 0
            && self.recovery.ca_state == CaState::Open
            && !self.rack.reordering_seen
            && !self.is_cwnd_limited
            && self.ooo_fin_seq.is_none()
            && self.acked_bytes == 0
            && self.slow_path == SlowPathFlags::NONE
            && self.cork_deadline.is_none()
            && self.dsack.is_none()
            && self.last_oow_ack_time.is_none()
            && self.snd_up.is_none()
            && matches!(self.urg_data, UrgentState::None)
            // Half of the largest window that the peer has offered is enough to send (RFC 9293 §3.8.6.2.1).
            && c.snd_wnd >= self.max_window / 2
    }

    /// Marks the segments that were considered lost as in flight, because a reduction is undone.
    pub fn unmark_lost(&mut self) {
        self.rtx_queue.unmark_lost();
    }

    /// Sets the retransmission timer.
    pub fn set_timer(&mut self, kind: RetransmitTimer, at: Instant) {
        self.timer_kind = kind;
        self.timer_at = at;
    }

    /// Stops the timer if it was set for segments in flight, of which none are left.
    #[inline(always)]
    pub fn stop_retransmit_timer(&mut self) {
        if matches!(
            self.timer_kind,
            RetransmitTimer::Rto | RetransmitTimer::LossProbe | RetransmitTimer::ReoTimeout
        ) {
            self.stop_timer();
        }
    }

    /// Returns the sequence number of a FIN out of order that SACK blocks report.
    #[inline]
    pub fn reported_fin(&self) -> Option<SeqNumber> {
        self.ooo_fin_seq.filter(|_| self.is_ooo_fin_reported)
    }

    /// Returns how many SACK blocks there are for what arrived out of order. `rcv_nxt` is that of the
    /// connection.
    #[inline]
    pub fn sack_block_count(&self, rcv_nxt: SeqNumber) -> usize {
        let ranges = self.recv.reported_range_count();
        ranges + self.reported_fin().map_or(0, |fin| usize::from(!self.ends_a_range(fin, rcv_nxt)))
    }

    /// Returns whether a range that arrived out of order ends where a FIN is.
    #[cold]
    fn ends_a_range(&self, fin: SeqNumber, rcv_nxt: SeqNumber) -> bool {
        let base = rcv_nxt - self.recv.contiguous() as u32;
        self.recv.ranges().iter().any(|&(_, end)| base + end as u32 == fin)
    }

    /// Returns whether the receive queue is empty: no unread data, and no FIN that arrived before its data.
    #[inline(always)]
    pub fn is_receive_queue_empty(&self) -> bool {
        self.recv.is_empty() && self.ooo_fin_seq.is_none()
    }

    /// Stops the retransmission timer.
    pub fn stop_timer(&mut self) {
        self.set_timer(RetransmitTimer::Off, Instant::MAX);
    }
}
