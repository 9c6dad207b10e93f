//! Hand-over of the shards: their state passes to the next process, and the broker goes on with the processes
//! and sockets that it knows (docs/adr/0026-connections-at-an-upgrade.md).
//!
//! The broker waits meanwhile. Requests and new programs wait in its sockets. The broker notices the end of a
//! program's process afterwards, and tells the next process of the shards.

use super::super::saved_state::SavedState;
use super::super::shard_link::{NotSaved, RELEASE_TIMEOUT, SAVE_TIMEOUT, TRANSFER_TIMEOUT};
use super::restart::END_TIMEOUT;
use super::{BrokerCommand, BrokerThread, ChildLink};
use crate::wait::EventFd;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// Number of attempts to save the shards, and the time between two attempts. What prevents an attempt, for
/// example frames in a queue, often passes within milliseconds.
const ATTEMPTS: u32 = 3;
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(100);

/// Longest time of an attempt after which another one is made. Programs wait meanwhile.
const FAST_ATTEMPT: Duration = Duration::from_secs(1);

/// Longest time of [`HandOver::begin`]: of its attempts, the last one takes longest.
pub const HAND_OVER_TIMEOUT: Duration = SAVE_TIMEOUT
    .saturating_add(TRANSFER_TIMEOUT)
    .saturating_add(RELEASE_TIMEOUT)
    .saturating_add(FAST_ATTEMPT.saturating_add(ATTEMPT_INTERVAL).saturating_mul(ATTEMPTS - 1));

/// Has the broker hand the shards over, from the thread of an upgrade.
#[derive(Clone, Debug)]
pub struct HandOver {
    commands: Sender<BrokerCommand>,
    wake: Arc<EventFd>,
}

impl HandOver {
    /// Stops the shards and returns their state. The broker sends no more requests to them until the
    /// hand-over is over. Shards that cannot be saved now are asked again, twice at most; they serve
    /// meanwhile.
    ///
    /// # Errors
    /// The state cannot be passed on.
    pub fn begin(&self) -> Result<HandOverInProgress, NotSaved> {
        for _ in 1..ATTEMPTS {
            let begun = Instant::now();
            match self.try_begin() {
                Err(NotSaved { hangs: false, .. }) if begun.elapsed() < FAST_ATTEMPT => {
                    std::thread::sleep(ATTEMPT_INTERVAL);
                }
                result => return result,
            }
        }
        self.try_begin()
    }

    fn try_begin(&self) -> Result<HandOverInProgress, NotSaved> {
        let (reply, result) = channel();
        // Fails if the thread of the broker has ended; so does the next step then.
        let _ = self.commands.send(BrokerCommand::HandOver(reply));
        self.wake.signal();
        result.recv().unwrap_or_else(|_| Err(not_saved("the stack is being stopped")))
    }
}

/// Shards that are stopped. If this value is dropped, their state is lost: the broker has the shards started
/// as after a death. Their process must have ended by then.
#[derive(Debug)]
pub struct HandOverInProgress {
    state: SavedState,
    next: Sender<ChildLink>,
}

impl HandOverInProgress {
    /// Returns the state of the shards.
    pub fn state(&self) -> &SavedState {
        &self.state
    }

    /// Has the broker go on with the process at the other end of `link`, which has the state.
    pub fn finish(self, link: ChildLink) {
        // Fails if the thread of the broker has ended; the process then finds its connection closed.
        let _ = self.next.send(link);
    }
}

/// Returns the error for shards that were not asked for their state.
fn not_saved(reason: &str) -> NotSaved {
    NotSaved { reason: reason.into(), hangs: false }
}

impl BrokerThread {
    pub(super) fn hand_over_handle(&self) -> HandOver {
        HandOver { commands: self.command_sender.clone(), wake: self.wake.clone() }
    }

    /// Handles [`BrokerCommand::HandOver`].
    pub(super) fn hand_over(&mut self, reply: Sender<Result<HandOverInProgress, NotSaved>>) {
        let saved = match &self.supervised {
            Some(supervised) if supervised.is_restarting() => {
                Err(not_saved("the shards are being started again"))
            }
            Some(supervised) => supervised.link.save(SAVE_TIMEOUT),
            None => Err(not_saved("the shards have ended")),
        };
        let state = match saved {
            Ok(state) => state,
            Err(not_saved) => {
                // Fails if nobody waits any more.
                let _ = reply.send(Err(not_saved));
                return;
            }
        };
        self.unwatch_shards();
        let (next, result) = channel();
        // If nobody waits, `next` is dropped here.
        let _ = reply.send(Ok(HandOverInProgress { state, next }));
        // Each step of the upgrade has a time limit, and the sender is dropped at the end of the upgrade.
        match result.recv() {
            Ok(link) if usize::from(link.shards()) == self.shards.len() => self.continue_on(link),
            _ => self.restart_unless_running(),
        }
    }

    /// Has the shards started again after a hand-over that has failed. If their process still runs, nobody
    /// has ended it, and it goes on.
    fn restart_unless_running(&mut self) {
        if !self.restart_ended_shards(END_TIMEOUT)
            && let Some(supervised) = self.supervised.take()
        {
            if !supervised.link.release() {
                tracing::error!("the shards were not upgraded, and do not answer");
            }
            self.watch_shards(supervised);
        }
    }
}
