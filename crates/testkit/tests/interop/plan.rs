//! Plans: the actions of one end of a connection, for the kernel and for Ginnel alike.

use crate::stream::Digest256;
use std::time::Duration;

/// Actions of one end on each connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Bytes to send.
    pub send: u64,
    /// Begins to send after the peer's FIN.
    pub answer_after_fin: bool,
    /// Finishes when everything is sent and this many bytes are received. Unless it finishes with FIN, the
    /// end reads no more than this.
    pub finish_after: u64,
    pub finish: Finish,
    /// Stops reading for a while.
    pub pause: Option<Pause>,
}

/// The way an end finishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// Shuts its direction down, reads until the peer's FIN, then closes.
    Fin,
    /// Closes at once.
    Close,
    /// Resets the connection.
    Reset,
}

/// A pause of the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Number of bytes to read before the pause.
    pub after: u64,
    /// Duration of the pause.
    pub time: Duration,
}

impl Default for Plan {
    fn default() -> Self {
        Self { send: 0, answer_after_fin: false, finish_after: 0, finish: Finish::Fin, pause: None }
    }
}

impl Plan {
    /// Returns a plan that sends `send` bytes, then FIN.
    pub fn send(send: u64) -> Self {
        Self { send, ..Self::default() }
    }
}

/// The way a connection ended for one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Both ends sent FIN, and this end received the peer's FIN.
    Fin,
    /// This end closed the connection without waiting for the peer.
    Closed,
    /// This end reset the connection.
    Aborted,
    /// The peer reset the connection.
    Reset,
    /// The peer refused the connection.
    Refused,
    /// The peer did not answer in time.
    TimedOut,
    /// Any other end, which is never expected.
    Otherwise(&'static str),
}

/// Observations of one end of a connection.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub sent: u64,
    pub received: u64,
    pub digest: Digest256,
    /// Offset of the first byte that differs from the peer's stream.
    pub mismatch: Option<u64>,
    pub ended: Ended,
    /// The stack's view of the connection at its end.
    pub info: Info,
}

/// A stack's view of a connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Info {
    pub timestamps: bool,
    pub sack: bool,
    pub window_scaling: bool,
    pub ecn: bool,
    pub retransmits: u32,
    pub path_mtu: u32,
    pub segment_bytes: u32,
    /// All fields as text, for reports.
    pub text: String,
}
