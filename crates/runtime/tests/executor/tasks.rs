//! Spawning, joining, aborting, panics and fairness.

use super::common::{SharedCounter, run_alone, run_alone_with, shared};
use core::future::{pending, poll_fn};
use core::task::Poll;
use core::time::Duration;
use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use ginnel::task::{self, spawn, yield_now};
use ginnel::time::{sleep, timeout};
use std::rc::Rc;

#[test]
fn tasks_spawn_tasks_and_join_them() {
    run_alone(async || {
        let outer = spawn(async {
            let inner: Vec<_> = (0..100u32).map(|i| spawn(async move { i * 2 })).collect();
            let mut sum = 0;
            for task in inner {
                sum += task.await.unwrap();
            }
            // Neither `Send` nor `Copy`.
            Rc::new(sum)
        });
        assert_eq!(*outer.await.unwrap(), 9900);
    });
}

#[test]
fn panic_ends_only_its_task() {
    run_alone(async || {
        let bad = spawn(async {
            yield_now().await;
            if true {
                panic!("on purpose");
            }
        });
        let good = spawn(async {
            for _ in 0..10 {
                yield_now().await;
            }
            7
        });
        let error = bad.await.unwrap_err();
        assert!(error.is_panic() && !error.is_cancelled());
        assert_eq!(error.to_string(), "the task panicked: on purpose");
        assert_eq!(error.try_into_panic().unwrap().downcast_ref(), Some(&"on purpose"));
        assert_eq!(good.await.unwrap(), 7);
    });
}

#[test]
fn join_outside_of_its_shard_is_no_panic() {
    let (lent, taken) = shared::<Option<task::JoinHandle<()>>>();
    run_alone(async move || *lent.borrow_mut() = Some(spawn(pending())));
    let mut handle = taken.borrow_mut().take().unwrap();
    let error = (&mut handle).now_or_never().unwrap().unwrap_err();
    assert!(!error.is_panic() && !error.is_cancelled());
    assert!(error.to_string().contains("its shard is not running"), "{error}");
    assert!(error.try_into_panic().is_err());
}

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("in a destructor");
    }
}

#[test]
fn panic_in_destructor_of_aborted_task_is_reported() {
    run_alone(async || {
        let task = spawn(async {
            let _bomb = Bomb;
            pending::<()>().await;
        });
        yield_now().await;
        task.abort();
        assert!(task.await.unwrap_err().is_panic());
    });
}

#[test]
#[should_panic(expected = "the main task panicked")]
fn panic_of_main_task_ends_the_shard() {
    run_alone(async || {
        yield_now().await;
        if true {
            panic!("the first of two messages");
        }
    });
}

#[test]
#[should_panic(expected = "no luck")]
fn error_of_main_task_is_the_shards() {
    run_alone(async || -> Result<(), &'static str> { Err("no luck") });
}

struct Flag(SharedCounter);

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.add();
    }
}

#[test]
fn aborted_task_is_dropped_and_cancelled() {
    let dropped = SharedCounter::default();
    let seen = dropped.clone();
    run_alone(async move || {
        let flag = Flag(seen.clone());
        let task = spawn(async move {
            let _flag = flag;
            pending::<()>().await;
        });
        yield_now().await;
        assert!(!task.is_finished());
        task.abort();
        yield_now().await;
        assert!(task.is_finished());
        assert_eq!(seen.get(), 1);
        let error = task.await.unwrap_err();
        assert!(error.is_cancelled());
        assert_eq!(error.to_string(), "the task was aborted");

        // A task that was never polled.
        let flag = Flag(seen.clone());
        let task = spawn(async move { drop(flag) });
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        assert_eq!(seen.get(), 2);

        // A task that has ended keeps its result.
        let task = spawn(async { 3 });
        yield_now().await;
        task.abort();
        assert_eq!(task.await.unwrap(), 3);
    });
    assert_eq!(dropped.get(), 2);
}

#[test]
fn a_task_can_abort_itself() {
    run_alone(async || {
        let (handle, given) = shared::<Option<task::JoinHandle<()>>>();
        let task = spawn(async move {
            yield_now().await;
            given.borrow().as_ref().unwrap().abort();
            pending::<()>().await;
        });
        *handle.borrow_mut() = Some(task);
        for _ in 0..4 {
            yield_now().await;
        }
        let task = handle.borrow_mut().take().unwrap();
        assert!(task.await.unwrap_err().is_cancelled());
    });
}

#[test]
fn detached_task_continues_and_its_slot_is_reused() {
    run_alone(async || {
        let done = SharedCounter::default();
        for round in 0..1000 {
            let count = done.clone();
            drop(spawn(async move {
                yield_now().await;
                count.add();
                Flag(count)
            }));
            yield_now().await;
            yield_now().await;
            // The result of a detached task is dropped.
            assert_eq!(done.get(), 2 * (round + 1));
        }
    });
}

#[test]
fn tasks_join_tasks_through_other_wakers() {
    run_alone(async || {
        // Each future of the set has a waker of its own.
        let mut set: FuturesUnordered<_> = (0..50u64)
            .map(|i| async move {
                sleep(Duration::from_millis(i % 7)).await;
                spawn(async move { i }).await.unwrap()
            })
            .collect();
        let mut sum = 0;
        while let Some(i) = set.next().await {
            sum += i;
        }
        assert_eq!(sum, 49 * 50 / 2);
    });
}

#[test]
fn always_ready_task_does_not_starve_others() {
    let took = run_alone(async || {
        let busy = spawn(async {
            loop {
                yield_now().await;
            }
        });
        // A loop around an operation that is always ready.
        let flooder = spawn(async {
            loop {
                sleep(Duration::ZERO).await;
            }
        });
        sleep(Duration::from_millis(3)).await;
        busy.abort();
        flooder.abort();
        let (busy, flooder) = (busy.await, flooder.await);
        assert!(busy.unwrap_err().is_cancelled() && flooder.unwrap_err().is_cancelled());
    });
    assert!(took < Duration::from_millis(5), "{took:?}");
}

#[test]
fn more_tasks_than_polls_per_turn_all_run() {
    run_alone(async || {
        let tasks: Vec<_> = (0..5000u32).map(|i| spawn(async move { i })).collect();
        for (i, task) in tasks.into_iter().enumerate() {
            assert_eq!(task.await.unwrap(), i as u32);
        }
    });
}

#[test]
fn stale_waker_wakes_no_task() {
    run_alone(async || {
        let (waker, kept) = shared::<Option<core::task::Waker>>();
        let first = spawn(poll_fn(move |cx| {
            *kept.borrow_mut() = Some(cx.waker().clone());
            Poll::Ready(())
        }));
        first.await.unwrap();
        let polls = SharedCounter::default();
        let counted = polls.clone();
        // It has the same slot.
        let second = spawn(poll_fn(move |_| {
            counted.add();
            if counted.get() < 3 { Poll::Pending } else { Poll::Ready(()) }
        }));
        yield_now().await;
        let before = polls.get();
        let stale = waker.borrow_mut().take().unwrap();
        stale.wake_by_ref();
        yield_now().await;
        assert!(polls.get() - before <= 1, "at most one spurious poll");
        second.abort();
        assert!(timeout(Duration::from_secs(1), second).await.is_ok());
        stale.wake();
        yield_now().await;
    });
}

#[test]
#[should_panic(expected = "no task of a Ginnel shard is running on this thread")]
fn spawning_outside_of_a_shard_panics() {
    drop(spawn(async {}));
}

#[test]
#[should_panic(expected = "no task of a Ginnel shard is running on this thread")]
fn sleeping_outside_of_a_shard_panics() {
    drop(sleep(Duration::ZERO));
}

#[test]
fn sleep_without_a_free_timer_panics_its_task() {
    let body = async || {
        let first = spawn(sleep(Duration::from_millis(5)));
        let second = spawn(sleep(Duration::from_millis(5)));
        yield_now().await;
        let error = second.await.unwrap_err();
        assert!(error.to_string().contains("shard.timers_max"), "{error}");
        first.await.unwrap();
    };
    run_alone_with(body, |config| config.shard.timers_max = 1);
}
