//! Listing the sockets of shards that run (`ginnel ss`): a portion at a time, so that no shard is held up by a long list or by whoever reads it.
//!
//! ```text
//!   ginnel ss ──Unix socket──► thread "inspect" ──a request in the shard's mailbox──► shard: at most one portion in a turn
//!             ◄───a line each──                 ◄─the same memory, filled──────────
//! ```
//!
//! The same thread says which processes are attached (`ginnel down`, `ginnel check`).
//!
//! The shard keeps nothing of a listing between two portions. An asker that does not read is not asked for any more, and after a while sent away.

mod line;
mod server;

pub(crate) use server::Office;
pub use server::{ask, users};

use crate::command::{CommandError, Commander};
use crate::context::Core;
use core::time::Duration;
use ginnel_stack::stack::{Cursor, Listed};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Instant;

/// Places that a shard looks at in one turn: some 10 µs if none of them is in its cache.
const PLACES_PER_TURN: usize = 64;

/// Whoever waits for a portion looks so often whether the shard still runs.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A shard that answers later than this has other troubles.
const PATIENCE: Duration = Duration::from_secs(5);

/// A part of a listing, whose memory is the asker's.
struct Portion {
    /// Where it goes on; `None` at the end.
    cursor: Option<Cursor>,
    sockets: Vec<Listed>,
}

/// What comes through the mailbox.
pub(crate) struct Request {
    portion: Portion,
    reply: SyncSender<Portion>,
}

impl Request {
    /// On the shard: fills the portion and sends it back.
    pub(crate) fn answer(self, core: &Core) {
        let Self { mut portion, reply } = self;
        portion.cursor = match (core.stack.here(), portion.cursor) {
            (Some(stack), Some(cursor)) => {
                stack.list(core.now, cursor, PLACES_PER_TURN, &mut portion.sockets)
            }
            // The engine of a shard without one belongs to another that is asked itself.
            _ => None,
        };
        // Whoever asked may have gone.
        let _ = reply.try_send(portion);
    }
}

/// Shows `each` all sockets of a shard, until it has seen enough (false).
///
/// # Errors
/// Why the shard does not answer.
fn list(shard: &Commander, mut each: impl FnMut(&Listed) -> bool) -> Result<(), &'static str> {
    let (reply, answers) = sync_channel(1);
    let mut portion =
        Portion { cursor: Some(Cursor::default()), sockets: Vec::with_capacity(PLACES_PER_TURN) };
    while portion.cursor.is_some() {
        portion.sockets.clear();
        let begun = Instant::now();
        let mut request: crate::Command = Box::new(Request { portion, reply: reply.clone() });
        loop {
            match shard.send(request) {
                Ok(()) => break,
                Err(CommandError::Full(back)) if begun.elapsed() < PATIENCE => request = back,
                Err(CommandError::Full(_)) => return Err("has a full mailbox"),
                Err(CommandError::Gone(_)) => return Err("has ended"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        portion = loop {
            match answers.recv_timeout(LOOK_EVERY) {
                Ok(portion) => break portion,
                Err(RecvTimeoutError::Timeout) if shard.has_ended() => return Err("has ended"),
                Err(RecvTimeoutError::Timeout) if begun.elapsed() > PATIENCE => {
                    return Err("does not answer");
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err("has ended"),
            }
        };
        if !portion.sockets.iter().all(&mut each) {
            break;
        }
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests;
