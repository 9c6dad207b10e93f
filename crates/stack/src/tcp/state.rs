//! The states of a connection (RFC 9293 §3.3.2).
//!
//! ```text
//!            listen                connect
//!   LISTEN ◄──────── CLOSED ──────────────────► SYN_SENT
//!      │ SYN                                   SYN │  │ SYN+ACK
//!      └─────────► SYN_RECEIVED ◄──────────────────┘  │
//!                     │ ACK of SYN                    ▼
//!                     └─────────────────────────► ESTABLISHED
//!          close │                                    │ FIN
//!   FIN_WAIT_1 ◄─┴──── (also from SYN_RECEIVED)       ▼
//!    │     │  └──── FIN ────► CLOSING            CLOSE_WAIT
//!    │     │ FIN+ACK of FIN      │ ACK of FIN         │ close
//!    │     └─────────────┐       ▼                    ▼
//!    └─ ACK of FIN ► FIN_WAIT_2 ─ FIN ► TIME_WAIT  LAST_ACK ─ ACK of FIN ► CLOSED
//! ```

/// State of a connection. LISTEN belongs to a listener, and TIME_WAIT to an entry of its own, but both are named here because
/// users ask for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum State {
    /// No connection.
    #[default]
    Closed,
    /// Waits for SYN.
    Listen,
    /// Sent SYN.
    SynSent,
    /// Received SYN, sent SYN+ACK.
    SynReceived,
    /// Data flow both ways.
    Established,
    /// We sent FIN.
    FinWait1,
    /// Our FIN was acknowledged; the peer may still send.
    FinWait2,
    /// The peer sent FIN; we may still send.
    CloseWait,
    /// Both sent FIN at once; ours is not acknowledged yet.
    Closing,
    /// We sent FIN after the peer's.
    LastAck,
    /// Everything is acknowledged; late segments are still answered.
    TimeWait,
}

impl State {
    /// The handshake is over: segments of the stream can arrive and leave.
    pub const fn is_synchronized(self) -> bool {
        !matches!(self, Self::Closed | Self::Listen | Self::SynSent | Self::SynReceived)
    }

    /// The peer may still send data (no FIN from it yet).
    pub const fn may_receive(self) -> bool {
        matches!(self, Self::Established | Self::FinWait1 | Self::FinWait2)
    }

    /// We may still send data (no FIN of ours was queued yet).
    pub const fn may_send(self) -> bool {
        matches!(self, Self::Established | Self::CloseWait)
    }

    /// Name as in RFC 9293 and `ss`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Closed => "CLOSED",
            Self::Listen => "LISTEN",
            Self::SynSent => "SYN-SENT",
            Self::SynReceived => "SYN-RECEIVED",
            Self::Established => "ESTABLISHED",
            Self::FinWait1 => "FIN-WAIT-1",
            Self::FinWait2 => "FIN-WAIT-2",
            Self::CloseWait => "CLOSE-WAIT",
            Self::Closing => "CLOSING",
            Self::LastAck => "LAST-ACK",
            Self::TimeWait => "TIME-WAIT",
        }
    }
}
