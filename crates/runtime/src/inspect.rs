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

pub(crate) use server::InspectServer;
pub use server::{list_processes, list_sockets};

use crate::command::{CommandError, Commander};
use crate::context::ShardCore;
use core::time::Duration;
use ginnel_stack::stack::{ListCursor, ListedSocket};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Instant;

/// Places that a shard looks at in one turn: some 10 µs if none of them is in its cache.
const SLOTS_PER_TURN: usize = 64;

/// Whoever waits for a portion looks so often whether the shard still runs.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(20);

/// A shard that answers later than this has other troubles.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A part of a listing, whose memory is the asker's.
struct ListingChunk {
    /// Where it goes on; `None` at the end.
    cursor: Option<ListCursor>,
    sockets: Vec<ListedSocket>,
}

/// What comes through the mailbox.
pub(crate) struct ListRequest {
    chunk: ListingChunk,
    reply: SyncSender<ListingChunk>,
}

impl ListRequest {
    /// On the shard: fills the portion and sends it back.
    pub(crate) fn answer(self, core: &ShardCore) {
        let Self { mut chunk, reply } = self;
        chunk.cursor = match (core.stack.local(), chunk.cursor) {
            (Some(stack), Some(cursor)) => stack.list(core.now, cursor, SLOTS_PER_TURN, &mut chunk.sockets),
            // The engine of a shard without one belongs to another that is asked itself.
            _ => None,
        };
        // Whoever asked may have gone.
        let _ = reply.try_send(chunk);
    }
}

/// Shows `each` all sockets of a shard, until it has seen enough (false).
///
/// # Errors
/// Why the shard does not answer.
fn list(shard: &Commander, mut visit: impl FnMut(&ListedSocket) -> bool) -> Result<(), &'static str> {
    let (reply, replies) = sync_channel(1);
    let mut chunk =
        ListingChunk { cursor: Some(ListCursor::default()), sockets: Vec::with_capacity(SLOTS_PER_TURN) };
    while chunk.cursor.is_some() {
        chunk.sockets.clear();
        let started = Instant::now();
        let mut request: crate::Command = Box::new(ListRequest { chunk, reply: reply.clone() });
        loop {
            match shard.send(request) {
                Ok(()) => break,
                Err(CommandError::Full(command)) if started.elapsed() < ANSWER_TIMEOUT => request = command,
                Err(CommandError::Full(_)) => return Err("has a full mailbox"),
                Err(CommandError::Gone(_)) => return Err("has ended"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        chunk = loop {
            match replies.recv_timeout(LIVENESS_INTERVAL) {
                Ok(chunk) => break chunk,
                Err(RecvTimeoutError::Timeout) if shard.has_ended() => return Err("has ended"),
                Err(RecvTimeoutError::Timeout) if started.elapsed() > ANSWER_TIMEOUT => {
                    return Err("does not answer");
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err("has ended"),
            }
        };
        if !chunk.sockets.iter().all(&mut visit) {
            break;
        }
    }
    Ok(())
}

#[cfg(all(test, not(loom)))]
mod tests;
