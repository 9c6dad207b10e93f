//! Lists the sockets of running shards (`ginnel ss`), in chunks, so that neither a long list nor a slow
//! reader delays a shard.
//!
//! ```text
//!   ginnel ss ──Unix socket──► thread "inspect" ──a request in the shard's mailbox──► shard: at most one chunk per turn
//!             ◄──one per line──                 ◄─the same memory, filled──────────
//! ```
//!
//! The thread also lists the attached processes (`ginnel down`, `ginnel check`).
//!
//! The shard keeps no state of a listing between two chunks. If a client does not read, no more chunks are
//! requested for it, and it is disconnected after a timeout.

mod line;
mod server;

pub(crate) use server::{InspectServer, SOCKET};
pub use server::{explain_timeout, list_processes, list_sockets};

use crate::command::{CommandError, Commander};
use crate::context::ShardCore;
use core::time::Duration;
use ginnel_stack::stack::{ListCursor, ListedSocket};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Instant;

/// Slots that a shard examines per turn: about 10 µs if none of them is in its cache.
const SLOTS_PER_TURN: usize = 64;

/// Interval at which the requester of a chunk checks whether the shard still runs.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(20);

/// How long a shard may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// A chunk of a listing. The requester allocates its memory.
struct ListingChunk {
    /// Where the listing continues; `None` at its end.
    cursor: Option<ListCursor>,
    sockets: Vec<ListedSocket>,
}

/// A request in the shard's mailbox.
pub(crate) struct ListRequest {
    chunk: ListingChunk,
    reply: SyncSender<ListingChunk>,
}

impl ListRequest {
    /// Fills the chunk on the shard and sends it back.
    pub(crate) fn answer(self, core: &ShardCore) {
        let Self { mut chunk, reply } = self;
        chunk.cursor = match (core.stack.local(), chunk.cursor) {
            (Some(stack), Some(cursor)) => stack.list(core.now, cursor, SLOTS_PER_TURN, &mut chunk.sockets),
            // A shard without an engine has no sockets of its own; the shard with its engine lists them.
            _ => None,
        };
        // Fails only if the requester is gone.
        let _ = reply.try_send(chunk);
    }
}

/// Calls `visit` with all sockets of a shard, until it returns false.
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
