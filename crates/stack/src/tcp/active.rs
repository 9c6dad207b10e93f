//! What only a busy connection needs: buffers, the retransmission queue, recovery, the congestion algorithm's state, timers.

use super::chrono::Chrono;
use super::congestion::Congestion;
use super::conn::NONE;
use super::mtu_search::MtuSearch;
use super::rack::Rack;
use super::record_marks::RecordMarks;
use super::recovery::Recovery;
use super::recv_buffer::RecvBuffer;
use super::rtx_queue::RtxQueue;
use super::send_buffer::SendBuffer;
use super::state::State;
use crate::device::Label;
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;

/// Whether more follows what was sent (`MSG_MORE`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum MsgMore {
    #[default]
    No,
    /// It does: what does not fill a segment waits for it.
    Expected,
    /// It does, but what there is waits no longer.
    Released,
}

/// What the retransmission timer is set for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RetransmitTimer {
    /// Not set.
    #[default]
    Off,
    /// Retransmission time-out (RFC 6298).
    Rto,
    /// Tail loss probe (RFC 8985 §7).
    LossProbe,
    /// Segments that may be merely reordered are looked at again (RFC 8985 §6.3).
    ReoTimeout,
    /// Zero window probe (RFC 9293 §3.8.6.1).
    Persist,
}

/// Urgent data of the receiving side, as Linux has it: one byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum UrgentState {
    #[default]
    None,
    /// Announced, not arrived: sequence number of the byte.
    NotYet(SeqNumber),
    /// Arrived.
    Valid(SeqNumber, u8),
    /// Taken by the application.
    Read(SeqNumber),
}

/// What has to be looked at before new data leave, on few connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlowPathFlags(u8);

impl SlowPathFlags {
    pub const NONE: Self = Self(0);
    /// A tail loss probe is due.
    pub const LOSS_PROBE: Self = Self(1);
    /// The path MTU is found by probing (RFC 4821).
    pub const MTU_SEARCH: Self = Self(2);
    /// Something is cut or pushes before the end of what is queued, or a write goes on ([`super::cuts`]).
    pub const RECORD_MARKS: Self = Self(4);
    /// The application is to be told when little is left that was not sent (`TCP_NOTSENT_LOWAT`).
    pub const NOTSENT_LOWAT: Self = Self(8);

    pub fn has(self, extra: Self) -> bool {
        self.0 & extra.0 != 0
    }

    pub fn set(&mut self, extra: Self) {
        self.0 |= extra.0;
    }

    pub fn assign(&mut self, extra: Self, on: bool) {
        self.0 = self.0 & !extra.0 | if on { extra.0 } else { 0 };
    }

    /// Whether it was there.
    pub fn take(&mut self, extra: Self) -> bool {
        let had = self.has(extra);
        self.0 &= !extra.0;
        had
    }
}

/// The busy part of a connection.
pub(crate) struct ActiveConn {
    pub owner: u32,
    /// Bytes from `snd_una` on: in flight, then not yet sent.
    pub send: SendBuffer,
    pub rtx_queue: RtxQueue,
    /// Bytes received and not read, with holes.
    pub recv: RecvBuffer,
    pub recovery: Recovery,
    pub rack: Rack,
    pub congestion: Congestion,
    pub timer_kind: RetransmitTimer,
    pub timer_at: Instant,
    /// Consecutive time-outs of the head of the queue, and the shift of the time-out.
    pub retransmits: u8,
    pub backoff: u8,
    /// Unanswered zero window probes.
    pub probes_out: u8,
    /// When the first of the current unanswered retransmissions or probes left.
    pub retransmit_since: Option<Instant>,
    /// End of the last segment smaller than the full size (Minshall's variant of Nagle's algorithm).
    pub snd_sml: Option<SeqNumber>,
    /// When the cork gives way.
    pub cork_deadline: Option<Instant>,
    /// End of the tail loss probe in flight, and whether it was a retransmission.
    pub tlp: Option<(SeqNumber, bool)>,
    /// Received twice: to be reported first (RFC 2883).
    pub dsack: Option<(SeqNumber, SeqNumber)>,
    /// Largest number of segments in flight during the current round, and whether the window was the limit.
    pub max_packets_out: u32,
    pub is_cwnd_limited: bool,
    pub cwnd_usage_seq: SeqNumber,
    /// Acknowledged bytes not yet reported.
    pub acked_bytes: u32,
    /// When the last data left.
    pub lsndtime: Instant,
    /// When the last data came, or whatever came last before there was this part: low bits of the clock in ms.
    pub lrcvtime: u32,
    pub chrono: Chrono,
    /// Nothing was queued or in flight since.
    pub idle_since: Option<Instant>,
    /// Retransmitted segments in all.
    pub total_retrans: u32,
    pub urg_data: UrgentState,
    /// Events about urgent data that nobody has heard of yet. Reading waits for them.
    pub urgent_events_queued: u16,
    /// End of the urgent data we sent.
    pub snd_up: Option<SeqNumber>,
    /// Bytes that were consumed here, and that whoever reads in the end has not read.
    pub delivered_unread: u32,
    /// Largest window the peer offered.
    pub max_window: u32,
    pub slow_path: SlowPathFlags,
    pub mtu: MtuSearch,
    pub record_marks: RecordMarks,
    /// What the last send said of what follows it.
    pub msg_more: MsgMore,
    /// The next partial segment leaves whatever holds it back.
    pub nagle_push: bool,
    /// FIN was sent.
    pub fin_sent: bool,
    /// Among the senders that wait for memory.
    pub is_waiting_for_memory: bool,
    /// A FIN that came before the data in front of it.
    pub ooo_fin_seq: Option<SeqNumber>,
    /// When we last answered an invalid segment, in ms.
    pub last_oow_ack_time: Option<u32>,
    /// The flow's hash, once a device that carries labels was to send something.
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
            mtu: MtuSearch::NONE,
            record_marks: RecordMarks::default(),
            msg_more: MsgMore::No,
            nagle_push: false,
            fin_sent: false,
            is_waiting_for_memory: false,
            ooo_fin_seq: None,
            last_oow_ack_time: None,
            label: Label::NONE,
        }
    }

    /// Back to the initial state, keeping the capacity of the queues. Buffers must have been cleared by the caller, who has the pools.
    ///
    /// Field by field, because all of it at once would be built elsewhere first and then copied.
    #[inline(always)]
    pub fn reset(&mut self) {
        let Self {
            owner,
            send: _,
            rtx_queue: sent,
            recv,
            recovery,
            rack,
            congestion,
            timer_kind,
            timer_at,
            retransmits,
            backoff,
            probes_out: probes,
            retransmit_since: trouble_since,
            snd_sml: small_end,
            cork_deadline: cork_at,
            tlp: probe_end,
            dsack,
            max_packets_out: flight_max,
            is_cwnd_limited: cwnd_limited,
            cwnd_usage_seq: usage_end,
            acked_bytes,
            lsndtime: last_sent,
            lrcvtime: last_data,
            chrono,
            idle_since,
            total_retrans,
            urg_data: urgent_in,
            urgent_events_queued: urgent_untold,
            snd_up: urgent_out,
            delivered_unread: held,
            max_window: window_max,
            slow_path: extras,
            mtu,
            record_marks: cuts,
            msg_more: more,
            nagle_push: force,
            fin_sent,
            is_waiting_for_memory: starved,
            ooo_fin_seq: fin_at,
            last_oow_ack_time: last_invalid_ms,
            label,
        } = self;
        sent.clear();
        recv.reset_dropped_ranges();
        *owner = NONE;
        *recovery = Recovery::default();
        *rack = Rack::default();
        *congestion = Congestion::default();
        *timer_kind = RetransmitTimer::Off;
        *timer_at = Instant::MAX;
        (*retransmits, *backoff, *probes) = (0, 0, 0);
        (*trouble_since, *cork_at, *idle_since) = (None, None, None);
        (*small_end, *urgent_out, *fin_at) = (None, None, None);
        *more = MsgMore::No;
        *probe_end = None;
        *dsack = None;
        *last_invalid_ms = None;
        *label = Label::NONE;
        *usage_end = SeqNumber(0);
        *last_sent = Instant::ZERO;
        (*last_data, *chrono) = (0, Chrono::default());
        (*urgent_in, *urgent_untold) = (UrgentState::None, 0);
        (*flight_max, *acked_bytes, *total_retrans) = (0, 0, 0);
        (*held, *window_max) = (0, 0);
        (*cwnd_limited, *force, *fin_sent, *starved) = (false, false, false, false);
        if *extras != SlowPathFlags::NONE {
            *extras = SlowPathFlags::NONE;
            *mtu = MtuSearch::NONE;
            cuts.clear();
        }
    }

    /// Nothing is queued, in flight or unread, and nothing needs to be remembered. `state` is the connection's.
    pub fn is_idle(&self, state: State) -> bool {
        self.send.is_empty()
            && self.rtx_queue.is_empty()
            && self.recv.is_empty()
            && self.delivered_unread == 0
            // A FIN may still have to leave, with nothing else queued.
            && !matches!(state, State::FinWait1 | State::Closing | State::LastAck)
            && matches!(self.urg_data, UrgentState::None | UrgentState::Read(_))
    }

    /// An undone reduction: what was marked lost is in flight after all.
    pub fn unmark_lost(&mut self) {
        self.rtx_queue.unmark_lost();
    }

    /// Sets the retransmission timer.
    pub fn set_timer(&mut self, kind: RetransmitTimer, at: Instant) {
        self.timer_kind = kind;
        self.timer_at = at;
    }

    /// Nothing is in flight any more: stops it, if it was for what was.
    #[inline(always)]
    pub fn stop_retransmit_timer(&mut self) {
        if matches!(
            self.timer_kind,
            RetransmitTimer::Rto | RetransmitTimer::LossProbe | RetransmitTimer::ReoTimeout
        ) {
            self.stop_timer();
        }
    }

    /// Nothing was received that nobody has read, neither data nor a FIN in front of some.
    #[inline(always)]
    pub fn is_receive_queue_empty(&self) -> bool {
        self.recv.is_empty() && self.ooo_fin_seq.is_none()
    }

    /// Stops it.
    pub fn stop_timer(&mut self) {
        self.set_timer(RetransmitTimer::Off, Instant::MAX);
    }
}
