//! Lists the sockets of running shards (`ginnel ss`), in chunks, so that neither a long list nor a slow
//! reader delays a shard.
//!
//! ```text
//!   ginnel ss ──Unix socket──► thread "inspect" ──a request in the shard's mailbox──► shard: at most one chunk per turn
//!             ◄──one per line──                 ◄─the same memory, filled──────────
//! ```
//!
//! The thread also lists the attached processes (`ginnel down`, `ginnel check`), and closes sockets for the
//! stack's user and root (`ginnel ss -K`), changes routes (`ginnel route`), and passes copies of frames to a
//! monitor.
//!
//! The shard keeps no state of a listing between two chunks. If a client does not read, no more chunks are
//! requested for it, and it is disconnected after a timeout.

mod line;
mod mirror;
mod routes;
mod server;
mod stage_request;
mod visible_pids;

pub use crate::stages::{STAGE_NAMES, StageTimes};
pub(crate) use mirror::MirrorRequest;
pub use mirror::{MirrorDirection, MirrorRing, StackMirror};
pub(crate) use routes::RouteRequest;
pub use routes::{ListedRoute, RouteAction, RouteChange, restore_routes};
pub(crate) use server::{InspectServer, SOCKET};
pub use server::{
    RouteClient, SocketCloser, answering_shards, explain_timeout, list_processes, list_sockets, owner_pid,
};
pub(crate) use stage_request::StageRequest;
pub use stage_request::{STAGE_CONNS_MAX, SampledStages, sample_stages};

use crate::command::{CommandError, Commander};
use crate::context::ShardCore;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::handle::Listener;
use ginnel_stack::stack::{ListCursor, ListedSocket, SocketHandle};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Instant;

/// Slots that a shard examines per turn: about 10 µs if none of them is in its cache.
const SLOTS_PER_TURN: usize = 64;

/// Interval at which the requester of a chunk checks whether the shard still runs.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(20);

/// How long a shard may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a shard may take to count as one that answers.
const SILENCE: Duration = Duration::from_secs(1);

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

/// A request in the shard's mailbox to close sockets, at most [`SLOTS_PER_TURN`].
pub(crate) struct DestroyRequest {
    sockets: Vec<(SocketHandle, [SocketAddr; 2])>,
    /// Gets for each socket whether it existed.
    reply: SyncSender<Vec<bool>>,
}

impl DestroyRequest {
    /// Closes the sockets on the shard. Calls `on_listener` for each listener that was closed by this request
    /// or by one to another shard. Returns the reply, which must be sent after the events of the other
    /// sockets have been delivered, so that the requester sees the effects.
    pub(crate) fn execute(
        self,
        core: &mut ShardCore,
        mut on_listener: impl FnMut(&mut ShardCore, Listener),
    ) -> DestroyReply {
        let mut closed = Vec::with_capacity(self.sockets.len());
        for (handle, ends) in self.sockets {
            let now = core.now;
            let was_there = match (handle, core.stack.local_mut()) {
                (_, None) => false,
                // A listener on several shards is closed on all of them.
                (SocketHandle::Listener(listener), Some(_)) => core.unlisten(listener),
                (handle, Some(stack)) => stack.destroy_socket(now, handle, ends),
            };
            if let SocketHandle::Listener(listener) = handle
                && (was_there || core.stack.local().is_some_and(|stack| !stack.has_listener(listener)))
            {
                on_listener(core, listener);
            }
            closed.push(was_there);
        }
        DestroyReply { closed, reply: self.reply }
    }
}

/// The reply to a [`DestroyRequest`].
pub(crate) struct DestroyReply {
    closed: Vec<bool>,
    reply: SyncSender<Vec<bool>>,
}

impl DestroyReply {
    pub(crate) fn send(self) {
        // Fails only if the requester is gone.
        let _ = self.reply.try_send(self.closed);
    }
}

/// Closes sockets of a shard. Returns for each whether it existed.
///
/// # Errors
/// Why the shard does not answer.
fn destroy(
    shard: &Commander,
    sockets: Vec<(SocketHandle, [SocketAddr; 2])>,
) -> Result<Vec<bool>, &'static str> {
    let (reply, replies) = sync_channel(1);
    send_request(shard, Box::new(DestroyRequest { sockets, reply }))?;
    wait_for_reply(shard, &replies)
}

/// Sends a request to a shard, whose mailbox may be full for a moment.
fn send_request(shard: &Commander, mut request: crate::Command) -> Result<(), &'static str> {
    let started = Instant::now();
    loop {
        match shard.send(request) {
            Ok(()) => return Ok(()),
            Err(CommandError::Full(command)) if started.elapsed() < ANSWER_TIMEOUT => request = command,
            Err(CommandError::Full(_)) => return Err("has a full mailbox"),
            Err(CommandError::Gone(_)) => return Err("has ended"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn wait_for_reply<T>(shard: &Commander, replies: &Receiver<T>) -> Result<T, &'static str> {
    let started = Instant::now();
    loop {
        match replies.recv_timeout(LIVENESS_INTERVAL) {
            Ok(reply) => return Ok(reply),
            Err(RecvTimeoutError::Timeout) if shard.has_ended() => return Err("has ended"),
            Err(RecvTimeoutError::Timeout) if started.elapsed() > ANSWER_TIMEOUT => {
                return Err("does not answer");
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err("has ended"),
        }
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
        send_request(shard, Box::new(ListRequest { chunk, reply: reply.clone() }))?;
        chunk = wait_for_reply(shard, &replies)?;
        if !chunk.sockets.iter().all(&mut visit) {
            break;
        }
    }
    Ok(())
}

/// Asks all shards at once. Returns for each whether it has answered within [`SILENCE`].
fn answering(shards: &[(String, Commander)]) -> Vec<bool> {
    let until = Instant::now() + SILENCE;
    let ask = |shard: &Commander| {
        let (reply, replies) = sync_channel(1);
        let chunk =
            ListingChunk { cursor: Some(ListCursor::default()), sockets: Vec::with_capacity(SLOTS_PER_TURN) };
        // A mailbox stays full only while the shard does not look at it.
        let mut request: crate::Command = Box::new(ListRequest { chunk, reply });
        while let Err(CommandError::Full(command)) = shard.send(request) {
            if Instant::now() > until {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
            request = command;
        }
        replies
    };
    let asked: Vec<_> = shards.iter().map(|(_, shard)| ask(shard)).collect();
    let has_answered = |replies: Receiver<ListingChunk>| {
        replies.recv_timeout(until.saturating_duration_since(Instant::now())).is_ok()
    };
    asked.into_iter().map(has_answered).collect()
}

#[cfg(all(test, not(loom)))]
mod tests;
