//! What one end of a connection does, whoever it is: the kernel and Ginnel get the same orders.

use crate::stream::Digest256;
use std::time::Duration;

/// What one end does with each connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Bytes it sends.
    pub send: u64,
    /// It begins to send when the peer's FIN has come.
    pub answer_after_fin: bool,
    /// Once everything is sent and this much received, it finishes. Unless it finishes with FIN it reads no more than this.
    pub finish_after: u64,
    pub finish: Finish,
    /// It stops reading for a while.
    pub pause: Option<Pause>,
}

/// How an end finishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// Shuts its direction down, reads until the peer's FIN, then closes.
    Fin,
    /// Closes at once.
    Close,
    /// Resets the connection.
    Reset,
}

/// A reader that stops for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pause {
    /// When so many bytes were read.
    pub after: u64,
    /// For how long.
    pub time: Duration,
}

impl Default for Plan {
    fn default() -> Self {
        Self { send: 0, answer_after_fin: false, finish_after: 0, finish: Finish::Fin, pause: None }
    }
}

impl Plan {
    /// Sends so many bytes, then FIN.
    pub fn send(send: u64) -> Self {
        Self { send, ..Self::default() }
    }
}

/// How a connection ended for one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Both ends sent FIN and this one saw the peer's.
    Fin,
    /// This end closed it without waiting for the peer.
    Closed,
    /// This end reset it.
    Aborted,
    /// The peer reset it.
    Reset,
    /// The peer refused it.
    Refused,
    /// The peer did not answer in time.
    TimedOut,
    /// Anything else, which is never expected.
    Otherwise(&'static str),
}

/// What one end saw of a connection.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub sent: u64,
    pub received: u64,
    pub digest: Digest256,
    /// First byte that was not the peer's stream's.
    pub mismatch: Option<u64>,
    pub ended: Ended,
    /// What the end's stack said about the connection at its end.
    pub info: Info,
}

/// What the two stacks say about a connection, as far as tests ask for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Info {
    pub timestamps: bool,
    pub sack: bool,
    pub window_scaling: bool,
    pub ecn: bool,
    pub retransmits: u32,
    pub path_mtu: u32,
    pub segment_bytes: u32,
    /// Everything, to be printed.
    pub text: String,
}
