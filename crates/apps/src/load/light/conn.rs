//! What is known of a connection: 68 bytes.

use super::buffer::Waiting;
use super::frames::TIMESTAMPS_BYTES;
use ginnel_stack::wire::tcp::SeqNumber;

/// No slot of the session: nobody is told of what happens to the connection.
pub(super) const NO_SLOT: u32 = u32::MAX;
/// Segments in flight at the most: what RFC 6928 allows for a start. It never becomes more, so that no congestion control is needed.
pub(super) const FLIGHT_SEGMENTS_MAX: u8 = 10;

/// States of RFC 9293 §3.3.2. TIME-WAIT is not among them: see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
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
    pub una: SeqNumber,
    /// The next to be sent; behind `max` after a time-out.
    pub nxt: SeqNumber,
    /// The first that was never sent.
    pub max: SeqNumber,
    pub rcv_nxt: SeqNumber,
    /// The peer's timestamp that is echoed (RFC 7323 §4.3); counts if it sends some.
    pub ts_recent: u32,
    /// The peer's window in bytes, from `una` on.
    pub window: u32,
    /// When something must be done, in the network's milliseconds; counts if `armed`.
    pub deadline: u32,
    /// When the segment was sent whose round trip is measured, in microseconds; counts if `timing`.
    pub sent_at: u32,
    /// What lies behind `una`.
    pub waiting: Waiting,
    /// Longest payload to send.
    pub mss: u16,
    /// Which of the own addresses.
    pub source: u16,
    pub port: u16,
    /// Which of the targets.
    pub target: u16,
    pub state: State,
    /// Time-outs since the last progress.
    pub retries: u8,
    /// Shift of the peer's windows.
    pub shift: u8,
    /// Segments that may be in flight.
    pub flight: u8,
    pub flags: Flags,
}

const _: () = assert!(size_of::<Conn>() <= 68);

/// What else is to be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flags(u8);

impl Flags {
    pub const NONE: Self = Self(0);
    /// Something came that is not acknowledged.
    pub const ACK: Self = Self(1);
    /// A FIN is to follow what is waiting.
    pub const FIN: Self = Self(2);
    /// `deadline` counts.
    pub const ARMED: Self = Self(4);
    /// `sent_at` counts.
    pub const TIMING: Self = Self(8);
    /// It is in the queue of those whose deadline is looked at. Survives the connection.
    pub const QUEUED: Self = Self(16);
    /// The session had more to send than there was room for.
    pub const WANTS_ROOM: Self = Self(32);
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
        una: SeqNumber(0),
        nxt: SeqNumber(0),
        max: SeqNumber(0),
        rcv_nxt: SeqNumber(0),
        ts_recent: 0,
        window: 0,
        deadline: 0,
        sent_at: 0,
        waiting: Waiting::EMPTY,
        mss: 0,
        source: 0,
        port: 0,
        target: 0,
        state: State::Closed,
        retries: 0,
        shift: 0,
        flight: FLIGHT_SEGMENTS_MAX,
        flags: Flags::NONE,
    };

    /// Whether a handshake came to its end.
    pub const fn is_synchronized(&self) -> bool {
        !matches!(self.state, State::Closed | State::SynSent)
    }

    /// Bytes of the options of its segments.
    #[inline(always)]
    pub const fn options_len(&self) -> usize {
        if self.flags.has(Flags::TIMESTAMPS) { TIMESTAMPS_BYTES } else { 0 }
    }

    /// Whether the session may still send.
    pub const fn may_send(&self) -> bool {
        matches!(self.state, State::Established | State::CloseWait)
    }

    /// Whether everything sent was acknowledged.
    pub fn is_quiet(&self) -> bool {
        self.una == self.max
    }
}
