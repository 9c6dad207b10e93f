//! Stops all shards of a stack and saves them, while they run on threads.
//!
//! Each shard gets a request through its mailbox. It finishes its turn, and then looks at no device and no
//! doorbell any more. All shards process together what they have sent to each other, until none of them has
//! anything left; then each saves its state. They stay stopped until [`StoppedShards`] is dropped.

use crate::command::Commander;
use crate::saved_shard::SavedShard;
use core::time::Duration;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Saves the shards of a stack.
#[derive(Clone, Debug)]
pub struct ShardSaver {
    commanders: Vec<Commander>,
}

/// Shards that have been saved, and wait. They go on, as if nothing had been, when this value is dropped.
#[derive(Debug)]
pub struct StoppedShards {
    /// The states of the shards, by index.
    pub saved: Vec<SavedShard>,
    session: Arc<SaveSession>,
}

impl Drop for StoppedShards {
    fn drop(&mut self) {
        self.session.end();
    }
}

impl ShardSaver {
    /// `commanders` send commands to the shards, in their order.
    pub fn new(commanders: Vec<Commander>) -> Self {
        Self { commanders }
    }

    /// Stops all shards and saves them. Waits for up to `timeout`. Requests to the shards that have no answer
    /// yet are handled before.
    ///
    /// # Errors
    /// Says in a sentence why a shard cannot be saved. All shards go on then.
    pub fn save(&self, timeout: Duration) -> Result<StoppedShards, String> {
        let session = SaveSession::new(self.commanders.len());
        // Dropped, and so ends the session, if the shards cannot be saved.
        let mut stopped = StoppedShards { saved: Vec::new(), session };
        for (index, commander) in self.commanders.iter().enumerate() {
            let request = SaveRequest { session: Arc::clone(&stopped.session), index };
            commander.send(Box::new(request)).map_err(|error| format!("shard {index}: {error}"))?;
        }
        stopped.saved = stopped.session.wait_for_states(timeout)?;
        Ok(stopped)
    }
}

/// One attempt to save all shards, which they share.
#[derive(Debug)]
pub(crate) struct SaveSession {
    shards: usize,
    progress: Mutex<SaveProgress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct SaveProgress {
    /// Number of times that all shards have met.
    meetings: u64,
    /// Shards that have arrived at the next meeting, and the work that they have done since the last one.
    arrived: usize,
    work: usize,
    /// Work of all shards before the last meeting.
    total: usize,
    states: Vec<Option<Result<SavedShard, String>>>,
    /// The shards go on.
    is_over: bool,
}

impl SaveSession {
    fn new(shards: usize) -> Arc<Self> {
        let states = (0..shards).map(|_| None).collect();
        let progress = Mutex::new(SaveProgress { states, ..SaveProgress::default() });
        Arc::new(Self { shards, progress, changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, SaveProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the shards go on.
    fn end(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Waits until each shard has delivered its state.
    fn wait_for_states(&self, timeout: Duration) -> Result<Vec<SavedShard>, String> {
        let is_waiting =
            |progress: &mut SaveProgress| progress.states.iter().any(Option::is_none) && !progress.is_over;
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, is_waiting);
        let (mut progress, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let states = core::mem::take(&mut progress.states);
        // There is one reason at most: shards that go on because of it deliver none.
        if let Some((index, reason)) = states
            .iter()
            .enumerate()
            .find_map(|(index, state)| state.as_ref().and_then(|state| Some((index, state.as_ref().err()?))))
        {
            return Err(if self.shards > 1 { format!("shard {index}: {reason}") } else { reason.clone() });
        }
        let late = || format!("the shards did not stop within {timeout:?}");
        states.into_iter().map(|state| state.and_then(Result::ok).ok_or_else(late)).collect()
    }
}

/// The request to one shard. Dropping it says that the shard's application cannot be saved.
pub(crate) struct SaveRequest {
    session: Arc<SaveSession>,
    index: usize,
}

impl SaveRequest {
    /// Waits until all shards have arrived here. Returns the sum of their `work`; `None` if the session is
    /// over.
    pub(crate) fn meet(&self, work: usize) -> Option<usize> {
        let mut progress = self.session.lock();
        if progress.is_over {
            return None;
        }
        progress.work += work;
        progress.arrived += 1;
        if progress.arrived == self.session.shards {
            progress.total = core::mem::take(&mut progress.work);
            progress.arrived = 0;
            progress.meetings += 1;
            self.session.changed.notify_all();
            return Some(progress.total);
        }
        let before = progress.meetings;
        let is_waiting = |progress: &mut SaveProgress| progress.meetings == before && !progress.is_over;
        let waited = self.session.changed.wait_while(progress, is_waiting);
        let progress = waited.unwrap_or_else(PoisonError::into_inner);
        // The next meeting needs this shard, too, so the sum is still that of the last one.
        (progress.meetings != before).then_some(progress.total)
    }

    /// Delivers the state, and waits until the session is over.
    pub(crate) fn deliver(self, state: Result<SavedShard, String>) {
        self.put(state);
        let waited = self.session.changed.wait_while(self.session.lock(), |progress| !progress.is_over);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Delivers the state, unless there is one, or the shards go on already.
    fn put(&self, state: Result<SavedShard, String>) {
        let progress = &mut *self.session.lock();
        if progress.is_over {
            return;
        }
        if let Some(slot @ None) = progress.states.get_mut(self.index) {
            progress.is_over |= state.is_err();
            *slot = Some(state);
            self.session.changed.notify_all();
        }
    }
}

impl Drop for SaveRequest {
    fn drop(&mut self) {
        self.put(Err("its application cannot be saved".into()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_reason_is_reported() {
        let session = SaveSession::new(2);
        let [first, second] = [0, 1].map(|index| SaveRequest { session: Arc::clone(&session), index });
        second.put(Err("frames wait".into()));
        assert_eq!(first.meet(0), None);
        // This is what a shard does that goes on: its request is dropped.
        drop(first);
        let reason = session.wait_for_states(Duration::ZERO).map(|_| ()).unwrap_err();
        assert_eq!(reason, "shard 1: frames wait");
    }
}
