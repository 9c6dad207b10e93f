//! The states of a connection (RFC 9293 §3.3.2).
//!
//! ```text
//!            listen                connect
//!   LISTEN ◄──────── CLOSED ──────────────────► SYN-SENT
//!      │ SYN                                 SYN │  │ SYN+ACK
//!      └─────────► SYN-RECEIVED ◄────────────────┘  │
//!                    │       │ ACK of SYN           ▼
//!              close │       └─────────────────► ESTABLISHED
//!                    ▼                       close │     │ FIN
//!                FIN-WAIT-1 ◄──────────────────────┘     ▼
//!                 │ │ └─── FIN ────► CLOSING        CLOSE-WAIT
//!      ACK of FIN │ │ FIN+ACK of FIN    │ ACK of FIN     │ close
//!                 │ └────────────────┐  │                ▼
//!                 ▼                  ▼  ▼            LAST-ACK
//!             FIN-WAIT-2 ── FIN ──► TIME-WAIT            │ ACK of FIN
//!                                       │ 2 MSL          ▼
//!                                       └────────────► CLOSED
//! ```

use serde::{Deserialize, Serialize};

/// State of a connection. A listener is in LISTEN and has an entry of its own, and so has a connection in
/// TIME-WAIT; both states are named here because users query them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[repr(u8)]
pub enum State {
    /// There is no connection.
    #[default]
    Closed,
    /// Waits for a SYN.
    Listen,
    /// A SYN was sent.
    SynSent,
    /// A SYN was received and a SYN+ACK was sent.
    SynReceived,
    /// Data flow in both directions.
    Established,
    /// A FIN is queued or was sent, and is not acknowledged.
    FinWait1,
    /// The FIN that was sent was acknowledged; the peer may still send.
    FinWait2,
    /// The peer has sent FIN; data may still be sent.
    CloseWait,
    /// Both sides have sent FIN at once; the local FIN is not acknowledged yet.
    Closing,
    /// A FIN is queued or was sent after the peer's FIN, and is not acknowledged.
    LastAck,
    /// Everything is acknowledged; late segments are still answered.
    TimeWait,
}

impl State {
    /// Returns the number that Linux gives the state (`<net/tcp_states.h>`, `<netinet/tcp.h>`).
    pub const fn linux_number(self) -> u8 {
        match self {
            Self::Established => 1,
            Self::SynSent => 2,
            Self::SynReceived => 3,
            Self::FinWait1 => 4,
            Self::FinWait2 => 5,
            Self::TimeWait => 6,
            Self::Closed => 7,
            Self::CloseWait => 8,
            Self::LastAck => 9,
            Self::Listen => 10,
            Self::Closing => 11,
        }
    }

    /// Returns whether the state is synchronized (RFC 9293 §3.3.2): the handshake is complete.
    pub const fn is_synchronized(self) -> bool {
        !matches!(self, Self::Closed | Self::Listen | Self::SynSent | Self::SynReceived)
    }

    /// Returns whether the peer may still send data (no FIN was received from it).
    pub const fn may_receive(self) -> bool {
        matches!(self, Self::Established | Self::FinWait1 | Self::FinWait2)
    }

    /// Returns whether data may still be sent (no FIN was queued).
    pub const fn may_send(self) -> bool {
        matches!(self, Self::Established | Self::CloseWait)
    }

    /// Returns the name in RFC 9293.
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
