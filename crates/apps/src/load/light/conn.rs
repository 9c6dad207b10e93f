//! State of a connection: 68 bytes.

use super::buffer::SendQueue;
use super::frames::TIMESTAMPS_BYTES;
use ginnel_stack::wire::tcp::SeqNumber;

/// Stands for no slot of the session: the session is not informed about the connection any more.
pub(super) const NO_SLOT: u32 = u32::MAX;
/// Largest congestion window in segments: the initial window of RFC 6928. The window never grows beyond it,
/// so no congestion control is needed.
pub(super) const CWND_SEGMENTS_MAX: u8 = 10;

/// States of RFC 9293 §3.3.2, except TIME-WAIT (see the module's documentation).
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
    /// First unacknowledged sequence number (SND.UNA).
    pub snd_una: SeqNumber,
    /// Next sequence number to send (SND.NXT); less than `snd_max` after a timeout.
    pub snd_nxt: SeqNumber,
    /// First sequence number that was never sent.
    pub snd_max: SeqNumber,
    pub rcv_nxt: SeqNumber,
    /// The peer's timestamp to echo (RFC 7323 §4.3); valid if the peer sends timestamps.
    pub ts_recent: u32,
    /// The peer's window in bytes from `snd_una` on (SND.WND).
    pub snd_wnd: u32,
    /// Deadline in the network's milliseconds; valid with [`ConnFlags::ARMED`].
    pub deadline: u32,
    /// Send time of the segment whose round trip is measured, in microseconds; valid with
    /// [`ConnFlags::RTT_TIMED`].
    pub sent_at: u32,
    /// Bytes from `snd_una` on.
    pub send_queue: SendQueue,
    /// Largest payload of a segment in bytes.
    pub mss: u16,
    /// Index of the local address.
    pub source: u16,
    pub port: u16,
    /// Index of the destination.
    pub destination: u16,
    pub state: TcpState,
    /// Timeouts since the last acknowledgement of new data.
    pub retries: u8,
    /// Window scale shift of the peer's windows.
    pub snd_wscale: u8,
    /// Congestion window in segments.
    pub cwnd_segments: u8,
    pub flags: ConnFlags,
}

const _: () = assert!(size_of::<Conn>() <= 68);

/// Flags of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ConnFlags(u8);

impl ConnFlags {
    pub const NONE: Self = Self(0);
    /// Received data are not acknowledged yet.
    pub const ACK_PENDING: Self = Self(1);
    /// FIN follows the send queue.
    pub const FIN_PENDING: Self = Self(2);
    /// `deadline` is valid.
    pub const ARMED: Self = Self(4);
    /// `sent_at` is valid.
    pub const RTT_TIMED: Self = Self(8);
    /// The connection's index is in the timer queue. The flag survives the connection.
    pub const IN_TIMER_QUEUE: Self = Self(16);
    /// The session had more to send than the send queue could hold.
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

    /// Returns the flags with this flag set.
    #[inline(always)]
    pub const fn with(self, flag: Self) -> Self {
        Self(self.0 | flag.0)
    }

    /// Returns the flags with all other flags cleared.
    pub const fn only(self, flag: Self) -> Self {
        Self(self.0 & flag.0)
    }
}

impl Conn {
    /// The state of an unused index.
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

    /// Returns true if the handshake has completed.
    pub const fn is_synchronized(&self) -> bool {
        !matches!(self.state, TcpState::Closed | TcpState::SynSent)
    }

    /// Returns the bytes of TCP options in each segment.
    #[inline(always)]
    pub const fn options_len(&self) -> usize {
        if self.flags.has(ConnFlags::TIMESTAMPS) { TIMESTAMPS_BYTES } else { 0 }
    }

    /// Returns true if the session may send.
    pub const fn can_send(&self) -> bool {
        matches!(self.state, TcpState::Established | TcpState::CloseWait)
    }

    /// Returns true if everything that was sent is acknowledged.
    pub fn is_all_acked(&self) -> bool {
        self.snd_una == self.snd_max
    }
}
