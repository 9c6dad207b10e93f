//! What the runner needs of a stack.

use super::assertion::Info;
use super::calls::{CallResult, Fd, Op};
use core::time::Duration;

/// A packet that the stack sent.
#[derive(Clone, Debug)]
pub struct SentPacket {
    /// When, since the start of the script.
    pub at: Duration,
    /// The IP packet.
    pub packet: Vec<u8>,
}

/// A blocking call that returned.
#[derive(Clone, Debug)]
pub struct FinishedCall {
    /// The number it was started under.
    pub call_id: usize,
    /// When, since the start of the script.
    pub at: Duration,
    /// What it returned.
    pub returned: CallResult,
}

/// A stack that scripts run against. Times count from the start of the script.
pub trait Backend {
    /// The time now.
    fn now(&mut self) -> Duration;

    /// Lets time pass until the stack sends a packet, which is returned, or until `until`.
    /// Packets already sent are returned even if `until` is past.
    fn wait(&mut self, until: Duration) -> Option<SentPacket>;

    /// The stack receives this IP packet now.
    fn inject(&mut self, packet: &[u8]);

    /// The application calls, without blocking. A socket that the call makes becomes descriptor `new_fd`. `data` is what a send sends.
    fn call(&mut self, op: &Op, new_fd: Option<Fd>, data: &[u8]) -> CallResult;

    /// The application makes a call that blocks; the result comes from [`Backend::finished`] under the same ticket.
    fn call_blocking(&mut self, ticket: usize, op: &Op, new_fd: Option<Fd>, data: &[u8]);

    /// A blocking call that has returned since.
    fn take_finished_call(&mut self) -> Option<FinishedCall>;

    /// The connection as `tcp_info` shows it.
    fn info(&mut self, fd: Fd) -> Result<Info, String>;

    /// How much later than `after` a timer of that length may fire because of the stack's clock alone, beyond the script's tolerance.
    fn timer_slack(&self, after: Duration) -> Duration;

    /// How long to listen at the end of a script for packets that it does not expect.
    fn settle_time(&self) -> Duration;
}
