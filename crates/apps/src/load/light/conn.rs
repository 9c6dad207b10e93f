//! What is known of a connection: 68 bytes.

use super::buffer::SendQueue;
use super::frames::TIMESTAMPS_BYTES;
use ginnel_stack::wire::tcp::SeqNumber;

/// No slot of the session: nobody is told of what happens to the connection.
pub(super) const NO_SLOT: u32 = u32::MAX;
/// Segments in flight at the most: what RFC 6928 allows for a start. It never becomes more, so that no congestion control is needed.
pub(super) const CWND_SEGMENTS_MAX: u8 = 10;

/// States of RFC 9293 §3.3.2. TIME-WAIT is not among them: see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TcpState {
    Closed,
    SynSent,
    Established,
    CloseWait,
    FinWait1,
    FinWait2,
    Closing,
    LastAck,
}

/// A connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Conn {
    /// Slot of the session, or [`NO_SLOT`].
    pub slot: u32,
    /// The first sequence number that is not acknowledged.
    pub snd_una: SeqNumber,
    /// The next to be sent; behind `max` after a time-out.
    pub snd_nxt: SeqNumber,
    /// The first that was never sent.
    pub snd_max: SeqNumber,
    pub rcv_nxt: SeqNumber,
    /// The peer's timestamp that is echoed (RFC 7323 §4.3); counts if it sends some.
    pub ts_recent: u32,
    /// The peer's window in bytes, from `una` on.
    pub snd_wnd: u32,
    /// When something must be done, in the network's milliseconds; counts if `armed`.
    pub deadline: u32,
    /// When the segment was sent whose round trip is measured, in microseconds; counts if `timing`.
    pub sent_at: u32,
    /// What lies behind `una`.
    pub send_queue: SendQueue,
    /// Longest payload to send.
    pub mss: u16,
    /// Which of the own addresses.
    pub source: u16,
    pub port: u16,
    /// Which of the targets.
    pub destination: u16,
    pub state: TcpState,
    /// Time-outs since the last progress.
    pub retries: u8,
    /// Shift of the peer's windows.
    pub snd_wscale: u8,
    /// Segments that may be in flight.
    pub cwnd_segments: u8,
    pub flags: ConnFlags,
}

const _: () = assert!(size_of::<Conn>() <= 68);

/// What else is to be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnFlags(u8);

impl ConnFlags {
    pub const NONE: Self = Self(0);
    /// Something came that is not acknowledged.
    pub const ACK_PENDING: Self = Self(1);
    /// A FIN is to follow what is waiting.
    pub const FIN_PENDING: Self = Self(2);
    /// `deadline` counts.
    pub const ARMED: Self = Self(4);
    /// `sent_at` counts.
    pub const RTT_TIMED: Self = Self(8);
    /// It is in the queue of those whose deadline is looked at. Survives the connection.
    pub const IN_TIMER_QUEUE: Self = Self(16);
    /// The session had more to send than there was room for.
    pub const WANTS_WRITABLE: Self = Self(32);
    /// Both sides send timestamps.
    pub const TIMESTAMPS: Self = Self(64);

    #[inline(always)]
    pub const fn has(self, flag: Self) -> bool {
        self.0 & flag.0 != 0
    }

    #[inline(always)]
    pub const fn set(&mut self, flag: Self) {
        self.0 |= flag.0;
    }

    #[inline(always)]
    pub const fn clear(&mut self, flag: Self) {
        self.0 &= !flag.0;
    }

    /// With this flag too.
    #[inline(always)]
    pub const fn with(self, flag: Self) -> Self {
        Self(self.0 | flag.0)
    }

    /// Only this flag, if it is set.
    pub const fn only(self, flag: Self) -> Self {
        Self(self.0 & flag.0)
    }
}

impl Conn {
    /// A place without a connection.
    pub const VACANT: Self = Self {
        slot: NO_SLOT,
        snd_una: SeqNumber(0),
        snd_nxt: SeqNumber(0),
        snd_max: SeqNumber(0),
        rcv_nxt: SeqNumber(0),
        ts_recent: 0,
        snd_wnd: 0,
        deadline: 0,
        sent_at: 0,
        send_queue: SendQueue::EMPTY,
        mss: 0,
        source: 0,
        port: 0,
        destination: 0,
        state: TcpState::Closed,
        retries: 0,
        snd_wscale: 0,
        cwnd_segments: CWND_SEGMENTS_MAX,
        flags: ConnFlags::NONE,
    };

    /// Whether a handshake came to its end.
    pub const fn is_synchronized(&self) -> bool {
        !matches!(self.state, TcpState::Closed | TcpState::SynSent)
    }

    /// Bytes of the options of its segments.
    #[inline(always)]
    pub const fn options_len(&self) -> usize {
        if self.flags.has(ConnFlags::TIMESTAMPS) { TIMESTAMPS_BYTES } else { 0 }
    }

    /// Whether the session may still send.
    pub const fn can_send(&self) -> bool {
        matches!(self.state, TcpState::Established | TcpState::CloseWait)
    }

    /// Whether everything sent was acknowledged.
    pub fn is_all_acked(&self) -> bool {
        self.snd_una == self.snd_max
    }
}
