//! Interface between the script runner and a stack.

use super::assertion::Info;
use super::calls::{CallResult, Fd, Op};
use core::time::Duration;

/// A packet that the stack sent.
#[derive(Clone, Debug)]
pub struct SentPacket {
    /// Time since the start of the script.
    pub at: Duration,
    /// The IP packet.
    pub packet: Vec<u8>,
}

/// A blocking call that returned.
#[derive(Clone, Debug)]
pub struct FinishedCall {
    /// Identifier that [`Backend::call_blocking`] received.
    pub call_id: usize,
    /// Time of the return since the start of the script.
    pub at: Duration,
    /// Result of the call.
    pub returned: CallResult,
}

/// A stack that runs scripts. All times count from the start of the script.
pub trait Backend {
    /// Returns the current time.
    fn now(&mut self) -> Duration;

    /// Advances time until the stack sends a packet, which is returned, or until `until`. Returns packets
    /// that were sent already even if `until` has passed.
    fn wait(&mut self, until: Duration) -> Option<SentPacket>;

    /// Delivers an IP packet to the stack now.
    fn inject(&mut self, packet: &[u8]);

    /// Makes a socket call without blocking. A socket that the call creates gets the descriptor `new_fd`.
    /// `data` is the payload of a send.
    fn call(&mut self, op: &Op, new_fd: Option<Fd>, data: &[u8]) -> CallResult;

    /// Makes a socket call that may block. [`Backend::take_finished_call`] returns its result under
    /// `call_id`.
    fn call_blocking(&mut self, call_id: usize, op: &Op, new_fd: Option<Fd>, data: &[u8]);

    /// Returns a blocking call that has returned and was not taken yet; `None` if there is none.
    fn take_finished_call(&mut self) -> Option<FinishedCall>;

    /// Returns the connection's state by the names of `tcp_info`.
    ///
    /// # Errors
    /// A message if the descriptor is unknown or the kernel refuses.
    fn info(&mut self, fd: Fd) -> Result<Info, String>;

    /// Returns how much later than `after` a timer of that length may fire because of the granularity of the
    /// stack's clock. The script's tolerance is not included.
    fn timer_slack(&self, after: Duration) -> Duration;

    /// Returns how long the runner waits for unexpected packets after the last event.
    fn settle_time(&self) -> Duration;
}
