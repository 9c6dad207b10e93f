//! Time for tasks: the clock of the shard, which is simulated in a simulation.

use super::local::{self, Access, WaitRegistration};
use super::state::WaitTarget;
use super::timer::SleepId;
use core::fmt;
use core::future::poll_fn;
use core::pin::Pin;
use core::task::{Context, Poll};
pub use core::time::Duration;
pub use ginnel_stack::time::Instant;
use pin_project_lite::pin_project;
use std::io;

/// Returns the time of the shard's current turn.
///
/// # Panics
/// Outside of a shard's task.
#[track_caller]
pub fn now() -> Instant {
    now_of(local::current())
}

fn now_of(executor: u32) -> Instant {
    local::access(executor, |a| a.core.now).unwrap_or_else(|e| panic!("{e}"))
}

/// Waits for `duration`. Never ends early, and at most one [`TIMER_TICK`](crate::timers::TIMER_TICK) late
/// unless the shard is busy.
///
/// # Panics
/// Outside of a shard's task; and while waiting, if the shard has as many timers as `shard.timers_max`.
#[track_caller]
pub fn sleep(duration: Duration) -> Sleep {
    sleep_until(now() + duration)
}

/// Waits until `deadline`.
///
/// # Panics
/// As [`sleep`].
#[track_caller]
pub fn sleep_until(deadline: Instant) -> Sleep {
    Sleep { deadline, executor: local::current(), slot: None }
}

/// See [`sleep`]. It is `Send`, because traits of other crates require that, but only its shard can poll it.
#[derive(Debug)]
#[must_use = "it does nothing unless awaited"]
pub struct Sleep {
    deadline: Instant,
    executor: u32,
    /// The timer that it waits for, once it was polled.
    slot: Option<SleepId>,
}

impl Sleep {
    /// Returns the time at which it ends.
    pub const fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Returns whether the deadline has passed.
    ///
    /// # Panics
    /// Outside of its shard's tasks.
    pub fn is_elapsed(&self) -> bool {
        now_of(self.executor) >= self.deadline
    }

    /// Sets another deadline, also after the sleep has ended.
    pub fn reset(&mut self, deadline: Instant) {
        self.end();
        self.deadline = deadline;
    }

    fn end(&mut self) {
        let Some(slot) = self.slot.take() else { return };
        local::release(self.executor, |state, core| {
            let Some((timer, waiters)) = state.sleeps.end(slot) else { return };
            state.wait_lists.forget(waiters);
            if let Some(core) = core {
                core.timers.cancel(timer);
            }
            // Without a core no task is running; the timer expires without a waiter.
        });
    }

    /// Sets the timer if necessary. Returns `None` while waiting, and an error if no timer is left.
    fn poll_timer(&mut self, a: &mut Access<'_>) -> Option<Result<(), NoTimer>> {
        if a.core.now >= self.deadline {
            return Some(Ok(()));
        }
        if self.slot.is_none_or(|slot| !a.state.sleeps.is_active(slot)) {
            let Access { core, state, .. } = a;
            self.slot = state.sleeps.begin(|token| core.timers.set(self.deadline, token));
            if self.slot.is_none() {
                return Some(Err(NoTimer));
            }
        }
        None
    }
}

struct NoTimer;

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let executor = self.executor;
        let polled = local::access(executor, |a| self.poll_timer(a)).unwrap_or_else(|e| panic!("{e}"));
        match polled {
            Some(Ok(())) => {
                // Counts as an operation, so that a loop of zero-length sleeps yields to other tasks.
                let mut waiting = WaitRegistration::poll_function(executor, WaitTarget::Stop);
                let ready = waiting.poll(cx, |_| Some(Ok(())));
                ready.map(|_: io::Result<()>| self.end())
            }
            Some(Err(NoTimer)) => panic!("the shard has as many timers as shard.timers_max permits"),
            None => {
                let Some(slot) = self.slot else { return Poll::Pending };
                let mut waiting = WaitRegistration::poll_function(executor, WaitTarget::Sleep(slot.index));
                waiting.poll(cx, |_| None::<io::Result<()>>).map(|_| ())
            }
        }
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.end();
    }
}

/// The time limit passed before the future was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed(());

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("deadline has elapsed")
    }
}

impl std::error::Error for Elapsed {}

impl From<Elapsed> for io::Error {
    fn from(_: Elapsed) -> Self {
        io::ErrorKind::TimedOut.into()
    }
}

/// Limits the time that a future may take. The future is polled first, so a future that is ready never times
/// out.
///
/// # Panics
/// As [`sleep`].
#[track_caller]
pub fn timeout<F: IntoFuture>(duration: Duration, future: F) -> Timeout<F::IntoFuture> {
    Timeout { future: future.into_future(), sleep: sleep(duration) }
}

/// As [`timeout`], with a deadline.
///
/// # Panics
/// As [`sleep`].
#[track_caller]
pub fn timeout_at<F: IntoFuture>(deadline: Instant, future: F) -> Timeout<F::IntoFuture> {
    Timeout { future: future.into_future(), sleep: sleep_until(deadline) }
}

pin_project! {
    /// See [`timeout`].
    #[derive(Debug)]
    #[must_use = "it does nothing unless awaited"]
    pub struct Timeout<F> {
        #[pin]
        future: F,
        #[pin]
        sleep: Sleep,
    }
}

impl<F: Future> Future for Timeout<F> {
    type Output = Result<F::Output, Elapsed>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(output) = this.future.poll(cx) {
            return Poll::Ready(Ok(output));
        }
        this.sleep.poll(cx).map(|()| Err(Elapsed(())))
    }
}

/// Policy of an interval for ticks that were missed because no task waited for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissedTickBehavior {
    /// The missed ticks follow each other without a pause.
    #[default]
    Burst,
    /// The missed ticks are skipped, and the next tick comes one period after the late one.
    Delay,
    /// The missed ticks are skipped, and the next tick comes at a multiple of the period after the start.
    Skip,
}

/// Ticks now, and then once per period.
///
/// # Panics
/// As [`sleep`], and if the period is zero.
#[track_caller]
pub fn interval(period: Duration) -> Interval {
    interval_at(now(), period)
}

/// Ticks at `start`, and then once per period.
///
/// # Panics
/// As [`interval`].
#[track_caller]
pub fn interval_at(start: Instant, period: Duration) -> Interval {
    assert!(!period.is_zero(), "the period of an interval must not be zero");
    Interval { sleep: sleep_until(start), period, missed: MissedTickBehavior::default() }
}

/// See [`interval`].
#[derive(Debug)]
pub struct Interval {
    sleep: Sleep,
    period: Duration,
    missed: MissedTickBehavior,
}

impl Interval {
    /// Waits for the next tick and returns when it was due. No tick is lost if the future is dropped.
    pub async fn tick(&mut self) -> Instant {
        poll_fn(|cx| self.poll_tick(cx)).await
    }

    /// As [`tick`](Self::tick), as a `poll` function.
    pub fn poll_tick(&mut self, cx: &mut Context<'_>) -> Poll<Instant> {
        Pin::new(&mut self.sleep).poll(cx).map(|()| self.schedule_next())
    }

    /// Sets the deadline of the next tick and returns when the current one was due.
    fn schedule_next(&mut self) -> Instant {
        let due = self.sleep.deadline();
        let now = now_of(self.sleep.executor);
        let next = match self.missed {
            MissedTickBehavior::Burst => due + self.period,
            MissedTickBehavior::Delay if now > due + crate::timers::TIMER_TICK => now + self.period,
            MissedTickBehavior::Delay => due + self.period,
            MissedTickBehavior::Skip => {
                let missed = (now - due).as_nanos() / self.period.as_nanos();
                due + self.period.saturating_mul(u32::try_from(missed + 1).unwrap_or(u32::MAX))
            }
        };
        self.sleep.reset(next);
        due
    }

    /// Sets what to do about missed ticks.
    pub const fn set_missed_tick_behavior(&mut self, behavior: MissedTickBehavior) {
        self.missed = behavior;
    }

    /// Returns the period.
    pub const fn period(&self) -> Duration {
        self.period
    }
}
