//! Stop requests.

use super::local::{self, WaitRegistration};
use super::state::WaitTarget;
use core::future::poll_fn;

/// Waits until the shard is asked to stop ([`StopFlag`](crate::StopFlag)).
///
/// If no task of the shard has ever called this function, the shard stops at once. Otherwise it stops when
/// the main task ends, or after `shard.stop_grace_ms`.
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
    // Fails only if another executor polls this task.
    stopped.await.unwrap_or_else(|e| panic!("{e}"));
}
