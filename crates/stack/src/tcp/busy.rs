//! What only a busy connection needs: buffers, the retransmission queue, recovery, the congestion algorithm's state, timers.

use super::chrono::Chrono;
use super::congestion::Congestion;
use super::conn::NONE;
use super::cuts::Cuts;
use super::mtu_search::MtuSearch;
use super::rack::Rack;
use super::recovery::Recovery;
use super::recv_buffer::RecvBuffer;
use super::send_buffer::SendBuffer;
use super::sent_queue::SentQueue;
use super::state::State;
use crate::device::Label;
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;

/// Whether more follows what was sent (`MSG_MORE`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum More {
    #[default]
    No,
    /// It does: what does not fill a segment waits for it.
    Expected,
    /// It does, but what there is waits no longer.
    Late,
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
    Probe,
    /// Segments that may be merely reordered are looked at again (RFC 8985 §6.3).
    Reorder,
    /// Zero window probe (RFC 9293 §3.8.6.1).
    Persist,
}

/// Urgent data of the receiving side, as Linux has it: one byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Urgent {
    #[default]
    None,
    /// Announced, not arrived: sequence number of the byte.
    Pending(SeqNumber),
    /// Arrived.
    Held(SeqNumber, u8),
    /// Taken by the application.
    Taken(SeqNumber),
}

/// What has to be looked at before new data leave, on few connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extras(u8);

impl Extras {
    pub const NONE: Self = Self(0);
    /// A tail loss probe is due.
    pub const TAIL_PROBE: Self = Self(1);
    /// The path MTU is found by probing (RFC 4821).
    pub const MTU_SEARCH: Self = Self(2);
    /// Something is cut or pushes before the end of what is queued, or a write goes on ([`super::cuts`]).
    pub const CUTS: Self = Self(4);
    /// The application is to be told when little is left that was not sent (`TCP_NOTSENT_LOWAT`).
    pub const LOW_WATER: Self = Self(8);

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
pub(crate) struct Busy {
    pub owner: u32,
    /// Bytes from `snd_una` on: in flight, then not yet sent.
    pub send: SendBuffer,
    pub sent: SentQueue,
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
    pub probes: u8,
    /// When the first of the current unanswered retransmissions or probes left.
    pub trouble_since: Option<Instant>,
    /// End of the last segment smaller than the full size (Minshall's variant of Nagle's algorithm).
    pub small_end: Option<SeqNumber>,
    /// When the cork gives way.
    pub cork_at: Option<Instant>,
    /// End of the tail loss probe in flight, and whether it was a retransmission.
    pub probe_end: Option<(SeqNumber, bool)>,
    /// Received twice: to be reported first (RFC 2883).
    pub dsack: Option<(SeqNumber, SeqNumber)>,
    /// Largest number of segments in flight during the current round, and whether the window was the limit.
    pub flight_max: u32,
    pub cwnd_limited: bool,
    pub usage_end: SeqNumber,
    /// Acknowledged bytes not yet reported.
    pub acked_bytes: u32,
    /// When the last data left.
    pub last_sent: Instant,
    /// When the last data came, or whatever came last before there was this part: low bits of the clock in ms.
    pub last_data: u32,
    pub chrono: Chrono,
    /// Nothing was queued or in flight since.
    pub idle_since: Option<Instant>,
    /// Retransmitted segments in all.
    pub total_retrans: u32,
    pub urgent_in: Urgent,
    /// Events about urgent data that nobody has heard of yet. Reading waits for them.
    pub urgent_untold: u16,
    /// End of the urgent data we sent.
    pub urgent_out: Option<SeqNumber>,
    /// Bytes that were consumed here, and that whoever reads in the end has not read.
    pub held: u32,
    /// Largest window the peer offered.
    pub window_max: u32,
    pub extras: Extras,
    pub mtu: MtuSearch,
    pub cuts: Cuts,
    /// What the last send said of what follows it.
    pub more: More,
    /// The next partial segment leaves whatever holds it back.
    pub force: bool,
    /// FIN was sent.
    pub fin_sent: bool,
    /// Among the senders that wait for memory.
    pub starved: bool,
    /// A FIN that came before the data in front of it.
    pub fin_at: Option<SeqNumber>,
    /// When we last answered an invalid segment, in ms.
    pub last_invalid_ms: Option<u32>,
    /// The flow's hash, once a device that carries labels was to send something.
    pub label: Label,
}

impl Busy {
    pub fn new() -> Self {
        Self {
            owner: NONE,
            send: SendBuffer::default(),
            sent: SentQueue::default(),
            recv: RecvBuffer::default(),
            recovery: Recovery::default(),
            rack: Rack::default(),
            congestion: Congestion::default(),
            timer_kind: RetransmitTimer::Off,
            timer_at: Instant::MAX,
            retransmits: 0,
            backoff: 0,
            probes: 0,
            trouble_since: None,
            small_end: None,
            cork_at: None,
            probe_end: None,
            dsack: None,
            flight_max: 0,
            cwnd_limited: false,
            usage_end: SeqNumber(0),
            acked_bytes: 0,
            last_sent: Instant::ZERO,
            last_data: 0,
            chrono: Chrono::default(),
            idle_since: None,
            total_retrans: 0,
            urgent_in: Urgent::None,
            urgent_untold: 0,
            urgent_out: None,
            held: 0,
            window_max: 0,
            extras: Extras::NONE,
            mtu: MtuSearch::NONE,
            cuts: Cuts::default(),
            more: More::No,
            force: false,
            fin_sent: false,
            starved: false,
            fin_at: None,
            last_invalid_ms: None,
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
            sent,
            recv,
            recovery,
            rack,
            congestion,
            timer_kind,
            timer_at,
            retransmits,
            backoff,
            probes,
            trouble_since,
            small_end,
            cork_at,
            probe_end,
            dsack,
            flight_max,
            cwnd_limited,
            usage_end,
            acked_bytes,
            last_sent,
            last_data,
            chrono,
            idle_since,
            total_retrans,
            urgent_in,
            urgent_untold,
            urgent_out,
            held,
            window_max,
            extras,
            mtu,
            cuts,
            more,
            force,
            fin_sent,
            starved,
            fin_at,
            last_invalid_ms,
            label,
        } = self;
        sent.clear();
        recv.forget_drops();
        *owner = NONE;
        *recovery = Recovery::default();
        *rack = Rack::default();
        *congestion = Congestion::default();
        *timer_kind = RetransmitTimer::Off;
        *timer_at = Instant::MAX;
        (*retransmits, *backoff, *probes) = (0, 0, 0);
        (*trouble_since, *cork_at, *idle_since) = (None, None, None);
        (*small_end, *urgent_out, *fin_at) = (None, None, None);
        *more = More::No;
        *probe_end = None;
        *dsack = None;
        *last_invalid_ms = None;
        *label = Label::NONE;
        *usage_end = SeqNumber(0);
        *last_sent = Instant::ZERO;
        (*last_data, *chrono) = (0, Chrono::default());
        (*urgent_in, *urgent_untold) = (Urgent::None, 0);
        (*flight_max, *acked_bytes, *total_retrans) = (0, 0, 0);
        (*held, *window_max) = (0, 0);
        (*cwnd_limited, *force, *fin_sent, *starved) = (false, false, false, false);
        if *extras != Extras::NONE {
            *extras = Extras::NONE;
            *mtu = MtuSearch::NONE;
            cuts.clear();
        }
    }

    /// Nothing is queued, in flight or unread, and nothing needs to be remembered. `state` is the connection's.
    pub fn is_idle(&self, state: State) -> bool {
        self.send.is_empty()
            && self.sent.is_empty()
            && self.recv.is_empty()
            && self.held == 0
            // A FIN may still have to leave, with nothing else queued.
            && !matches!(state, State::FinWait1 | State::Closing | State::LastAck)
            && matches!(self.urgent_in, Urgent::None | Urgent::Taken(_))
    }

    /// An undone reduction: what was marked lost is in flight after all.
    pub fn sent_unmark_lost(&mut self) {
        self.sent.unmark_lost();
    }

    /// Sets the retransmission timer.
    pub fn set_timer(&mut self, kind: RetransmitTimer, at: Instant) {
        self.timer_kind = kind;
        self.timer_at = at;
    }

    /// Nothing is in flight any more: stops it, if it was for what was.
    #[inline(always)]
    pub fn stop_flight_timer(&mut self) {
        if matches!(self.timer_kind, RetransmitTimer::Rto | RetransmitTimer::Probe | RetransmitTimer::Reorder)
        {
            self.stop_timer();
        }
    }

    /// Nothing was received that nobody has read, neither data nor a FIN in front of some.
    #[inline(always)]
    pub fn has_received_nothing(&self) -> bool {
        self.recv.is_empty() && self.fin_at.is_none()
    }

    /// Stops it.
    pub fn stop_timer(&mut self) {
        self.set_timer(RetransmitTimer::Off, Instant::MAX);
    }
}
