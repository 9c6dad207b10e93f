//! Timeouts and intervals in simulated time.

use super::common::{SharedCounter, run_alone};
use core::future::pending;
use core::time::Duration;
use futures_util::future::join_all;
use ginnel::task::{spawn, yield_now};
use ginnel::time::{Instant, MissedTickBehavior, interval, now, sleep, sleep_until, timeout, timeout_at};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// The error of rounding to timer ticks, and of the steps of the simulation.
const TOLERANCE: Duration = Duration::from_micros(100);

fn assert_at(start: Instant, due: Duration) {
    let took = now().saturating_since(start);
    assert!(took >= due && took <= due + TOLERANCE, "{took:?} instead of {due:?}");
}

#[test]
fn sleeps_end_on_time_in_any_order() {
    run_alone(async || {
        let start = now();
        let tasks: Vec<_> = [30, 10, 20, 0, 15]
            .map(|t| {
                spawn(async move {
                    sleep(ms(t)).await;
                    assert_at(start, ms(t));
                })
            })
            .into();
        for task in join_all(tasks).await {
            task.unwrap();
        }
        assert_at(start, ms(30));
        sleep_until(start + ms(35)).await;
        assert_at(start, ms(35));
        // A deadline that has passed.
        sleep_until(start).await;
        assert_at(start, ms(35));
    });
}

#[test]
fn timeout_cancels_only_late_futures() {
    run_alone(async || {
        let start = now();
        assert!(timeout(ms(10), pending::<()>()).await.is_err());
        assert_at(start, ms(10));
        assert_eq!(timeout(ms(10), async { 5 }).await, Ok(5));
        assert_eq!(timeout(Duration::ZERO, async { 5 }).await, Ok(5));
        let slow = async {
            sleep(ms(5)).await;
            6
        };
        assert_eq!(timeout_at(start + ms(20), slow).await, Ok(6));
        assert_at(start, ms(15));
        let error: std::io::Error = timeout(ms(1), pending::<()>()).await.unwrap_err().into();
        assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
    });
}

#[test]
fn completed_timeouts_leave_no_timer() {
    let took = run_alone(async || {
        for _ in 0..10_000 {
            timeout(Duration::from_secs(3600), yield_now()).await.unwrap();
        }
    });
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_sleep_can_be_reset_in_both_directions() {
    run_alone(async || {
        let start = now();
        let mut sleep = Box::pin(sleep(ms(50)));
        assert!(timeout(ms(5), &mut sleep).await.is_err());
        sleep.as_mut().reset(start + ms(10));
        sleep.as_mut().await;
        assert_at(start, ms(10));
        assert!(sleep.is_elapsed());
        sleep.as_mut().reset(start + ms(30));
        assert!(!sleep.is_elapsed());
        sleep.await;
        assert_at(start, ms(30));
    });
}

#[test]
fn interval_ticks_at_once_and_every_period() {
    run_alone(async || {
        let start = now();
        let mut interval = interval(ms(10));
        for n in 0..5 {
            assert_eq!(interval.tick().await, start + ms(10) * n);
            assert_at(start, ms(10) * n);
        }
        // A cancelled wait loses no tick.
        assert!(timeout(ms(3), interval.tick()).await.is_err());
        assert_eq!(interval.tick().await, start + ms(50));
    });
}

#[test]
fn missed_ticks_burst_delay_or_skip() {
    run_alone(async || {
        for (behavior, next) in [
            (MissedTickBehavior::Burst, [10, 20, 30, 40]),
            (MissedTickBehavior::Delay, [10, 35, 45, 55]),
            (MissedTickBehavior::Skip, [10, 30, 40, 50]),
        ] {
            let start = now();
            let mut interval = interval(ms(10));
            interval.set_missed_tick_behavior(behavior);
            interval.tick().await;
            sleep_until(start + ms(25)).await;
            for due in next {
                let due = start + ms(due);
                let tick = interval.tick().await;
                assert!(tick >= due && tick <= due + TOLERANCE, "{behavior:?}");
            }
        }
    });
}

#[test]
fn sleep_dropped_outside_tasks_wakes_no_task() {
    let count = SharedCounter::default();
    let seen = count.clone();
    run_alone(async move || {
        let task = spawn(async move {
            sleep(ms(5)).await;
            seen.add();
        });
        yield_now().await;
        task.abort();
        sleep(ms(10)).await;
    });
    assert_eq!(count.get(), 0);
}
