//! The traits that hyper requires of a runtime: `Read` and `Write` for streams, a timer, an executor.

use crate::net::TcpStream;
use crate::time::{self, Instant, Sleep};
use core::pin::Pin;
use core::task::{Context, Poll};
use core::time::Duration;
use hyper::rt::{Read, ReadBufCursor, Write};
use std::io;

impl Read for TcpStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        // Only `put_slice`, which copies, can advance hyper's buffer safely.
        let room = buffer.remaining();
        self.poll_recv_with(cx, room, |bytes| buffer.put_slice(bytes)).map_ok(|_| ())
    }
}

impl Write for TcpStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        (*self).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        (*self).poll_shutdown(cx)
    }
}

/// Spawns hyper's tasks on this shard.
#[derive(Clone, Copy, Debug, Default)]
pub struct HyperExecutor;

impl<F> hyper::rt::Executor<F> for HyperExecutor
where
    F: Future<Output: 'static> + 'static,
{
    /// # Panics
    /// Outside of a shard's task.
    fn execute(&self, future: F) {
        drop(crate::task::spawn(future));
    }
}

/// Timers for hyper on this shard, also in simulated time.
#[derive(Clone, Copy, Debug)]
pub struct HyperTimer {
    /// One moment in hyper's clock and in the shard's.
    base: (std::time::Instant, Instant),
}

impl HyperTimer {
    /// Creates a timer in a task of the shard that uses it.
    ///
    /// # Panics
    /// Outside of a shard's task.
    #[track_caller]
    pub fn new() -> Self {
        Self { base: (std::time::Instant::now(), time::now()) }
    }
}

impl Default for HyperTimer {
    fn default() -> Self {
        Self::new()
    }
}

impl hyper::rt::Sleep for Sleep {}

impl hyper::rt::Timer for HyperTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn hyper::rt::Sleep>> {
        Box::pin(time::sleep(duration))
    }

    fn sleep_until(&self, deadline: std::time::Instant) -> Pin<Box<dyn hyper::rt::Sleep>> {
        let (hyper_base, shard_base) = self.base;
        Box::pin(time::sleep_until(shard_base + deadline.saturating_duration_since(hyper_base)))
    }

    fn now(&self) -> std::time::Instant {
        let (hyper_base, shard_base) = self.base;
        hyper_base + time::now().saturating_since(shard_base)
    }

    fn reset(&self, sleep: &mut Pin<Box<dyn hyper::rt::Sleep>>, deadline: std::time::Instant) {
        let (hyper_base, shard_base) = self.base;
        match sleep.as_mut().downcast_mut_pin::<Sleep>() {
            Some(mut sleep) => sleep.reset(shard_base + deadline.saturating_duration_since(hyper_base)),
            None => *sleep = self.sleep_until(deadline),
        }
    }
}
