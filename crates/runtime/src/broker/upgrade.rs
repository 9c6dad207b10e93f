//! The request to run the shards of a stack with another version of its program.

use super::control_listener::connect_to;
use super::message::{ControlReply, Hello, MAGIC_UPGRADE, PROTOCOL_VERSION, decode, encode};
use super::seqpacket::{self, RecvResult};
use super::unreachable::UnreachableStack;
use crate::error::Error;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Id of the only request.
const REQUEST_ID: u32 = 1;

/// Says what happens to the connections of a stack when its shards are upgraded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ConnectionPolicy {
    /// Connections are kept if both versions of the shards can do that, and otherwise reset. If the new
    /// version cannot take them over, the former version continues with them.
    #[default]
    KeepIfPossible,
    /// The shards are upgraded only if the connections can be kept.
    Keep,
    /// Connections are reset.
    Reset,
}

impl ConnectionPolicy {
    const ALL: [Self; 3] = [Self::KeepIfPossible, Self::Keep, Self::Reset];

    /// Returns the word that stands for the policy in a message.
    fn word(self) -> &'static str {
        match self {
            Self::KeepIfPossible => "",
            Self::Keep => "keep",
            Self::Reset => "reset",
        }
    }

    pub(super) fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|policy| policy.word() == word)
    }
}

/// Result of an upgrade of the shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upgraded {
    /// How long the shards were away.
    pub away: Duration,
    /// The number of TCP connections that were kept, or the reason why all connections were reset.
    pub connections: Result<u64, String>,
}

/// Asks the supervisor of the stack whose broker is at `path` to run the shards with `executable`, which must
/// have the same version of the broker protocol. Waits until they run, at most for `timeout`. Connections are
/// kept as far as `policy` says; listeners and UDP sockets serve in any case.
///
/// # Errors
/// Nobody listens at `path`; the stack has another version, another user, or no supervisor; the executable
/// does not accept the command line of the stack or cannot start the shards, which then run with their former
/// executable; connections cannot be kept and `policy` demands that; or `timeout` is over.
pub fn upgrade(
    path: &Path,
    executable: BorrowedFd<'_>,
    policy: ConnectionPolicy,
    timeout: Duration,
) -> Result<Upgraded, Error> {
    let unreachable = |e| UnreachableStack::error(path, e);
    let connection = connect_to(path).map_err(unreachable)?;
    let hello = Hello { magic: MAGIC_UPGRADE, version: PROTOCOL_VERSION, domain: policy.word().into() };
    seqpacket::send(&connection, &encode(REQUEST_ID, &hello), &[executable]).map_err(unreachable)?;
    let until = Instant::now() + timeout;
    let mut buffer = seqpacket::buffer();
    loop {
        let remaining = until.saturating_duration_since(Instant::now());
        let remaining =
            Timespec { tv_sec: remaining.as_secs() as i64, tv_nsec: remaining.subsec_nanos().into() };
        // The result is not needed: `receive` tells whether there is a packet, also after a signal.
        let _ = poll(&mut [PollFd::new(&connection, PollFlags::IN)], Some(&remaining));
        match seqpacket::receive(&connection, &mut buffer) {
            RecvResult::Packet(bytes, _) => {
                return match decode::<ControlReply>(&buffer[..bytes]).1 {
                    Some(ControlReply::Upgraded(milliseconds, connections)) => {
                        Ok(Upgraded { away: Duration::from_millis(milliseconds.into()), connections })
                    }
                    Some(ControlReply::NotUpgraded(reason)) => Err(Error::application(reason)),
                    Some(ControlReply::Refused(refusal)) => Err(Error::Refused(refusal)),
                    _ => Err(Error::application("the stack sent a malformed reply")),
                };
            }
            RecvResult::WouldBlock if Instant::now() < until => {}
            RecvResult::WouldBlock => {
                let seconds = timeout.as_secs();
                return Err(Error::application(format!(
                    "the stack has not said within {seconds} s whether it was upgraded: its log tells"
                )));
            }
            RecvResult::Closed | RecvResult::Oversized | RecvResult::NoDescriptors(_) => {
                return Err(Error::StackGone);
            }
        }
    }
}
