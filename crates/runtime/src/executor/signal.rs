//! Being asked to stop.

use super::local::{self, WaitRegistration};
use super::state::WaitTarget;
use core::future::poll_fn;

/// Waits until the shard is asked to stop ([`StopFlag`](crate::StopFlag)).
///
/// A shard none of whose tasks has ever waited here stops at once when it is asked to. Otherwise it goes on until the main task ends, for
/// `shard.stop_grace_ms` at the most.
///
/// # Panics
/// Outside of a shard's task.
pub async fn stop() {
    let executor = local::current();
    let mut waiting = WaitRegistration::new(executor, WaitTarget::Stop);
    let stopped = poll_fn(|cx| {
        waiting.poll(cx, |a| {
            a.state.stop.is_observed = true;
            a.state.stop.is_requested.then_some(Ok(()))
        })
    });
    // The error says that this task is polled by another executor than it was made on.
    stopped.await.unwrap_or_else(|e| panic!("{e}"));
}
