//! Other threads wake tasks of a shard, even while it sleeps, start tasks, and ask the shard to stop.

use super::common::{MainFuture, boxed, config};
use core::future::poll_fn;
use core::pin::pin;
use core::task::{Poll, Waker};
use core::time::Duration;
use ginnel::executor::MainOutput;
use ginnel::task::{self, SpawnError, spawn};
use ginnel::{Error, Executor, Shard, StopFlag, signal};
use ginnel_devices::memory::{MemoryConfig, pair};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

/// A main task that may start on another thread.
type Main = Box<dyn FnOnce() -> MainFuture + Send>;

fn shard<M, F>(main: M) -> Shard<Executor<Main>>
where
    M: FnOnce() -> F + Send + 'static,
    F: Future<Output: MainOutput> + 'static,
{
    shard_with(main, 1024)
}

/// As [`shard`], with a mailbox of another size.
fn shard_with<M, F>(main: M, commands_max: u32) -> Shard<Executor<Main>>
where
    M: FnOnce() -> F + Send + 'static,
    F: Future<Output: MainOutput> + 'static,
{
    let main: Main = Box::new(boxed(main));
    let (device, _) = pair(MemoryConfig::default());
    let mut config = config("10.0.0.1/24");
    config.shard.spin_us = 0;
    config.shard.commands_max = commands_max;
    Shard::builder(config).handler(Executor::new(main)).device("cable", device).build().unwrap()
}

/// A value that a thread gives to a task that waits for it.
#[derive(Default)]
struct SharedSlot {
    value: Mutex<(Option<u32>, Option<Waker>)>,
}

impl SharedSlot {
    fn give(&self, value: u32) {
        let mut slot = self.value.lock().unwrap();
        slot.0 = Some(value);
        if let Some(waker) = slot.1.take() {
            waker.wake();
        }
    }

    async fn take(&self) -> u32 {
        poll_fn(|cx| {
            let mut slot = self.value.lock().unwrap();
            match slot.0.take() {
                Some(value) => Poll::Ready(value),
                None => {
                    slot.1 = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}

/// Hangs if a wake-up from another thread is lost.
#[test]
fn other_thread_wakes_task_of_sleeping_shard() {
    let (there, back) = (Arc::new(SharedSlot::default()), Arc::new(SharedSlot::default()));
    let (to_task, from_task) = (Arc::clone(&there), Arc::clone(&back));
    let mut shard = shard(async move || {
        for expected in 0..2000 {
            assert_eq!(to_task.take().await, expected);
            from_task.give(expected);
        }
    });
    let shard = thread::spawn(move || {
        shard.run(&StopFlag::new().unwrap()).unwrap();
        *shard.stats()
    });
    // This thread is a minimal executor.
    for value in 0..2000 {
        if value % 500 == 499 {
            // Long enough for the shard to fall asleep.
            thread::sleep(Duration::from_millis(20));
        }
        there.give(value);
        while back.value.lock().unwrap().0.take() != Some(value) {
            thread::yield_now();
        }
    }
    let stats = shard.join().unwrap();
    assert!(stats.sleeps > 0, "{stats:?}");
}

#[test]
fn concurrent_wakers_lose_no_wakeup() {
    wake_many(1024);
}

#[test]
fn concurrent_wakers_lose_no_wakeup_with_full_mailbox() {
    wake_many(1);
}

fn wake_many(commands_max: u32) {
    const TASKS: u32 = 64;
    const ROUNDS: u32 = 500;
    let slots: Arc<Vec<SharedSlot>> = Arc::new((0..TASKS).map(|_| SharedSlot::default()).collect());
    let done: Arc<Vec<AtomicU32>> = Arc::new((0..TASKS).map(|_| AtomicU32::new(0)).collect());
    let (of_tasks, done_of_tasks) = (Arc::clone(&slots), Arc::clone(&done));
    let main = async move || {
        let tasks: Vec<_> = (0..TASKS as usize)
            .map(|i| {
                let (slots, done) = (Arc::clone(&of_tasks), Arc::clone(&done_of_tasks));
                spawn(async move {
                    for round in 1..=ROUNDS {
                        assert_eq!(slots[i].take().await, round);
                        done[i].store(round, Ordering::Release);
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    };
    let mut shard = shard_with(main, commands_max);
    let commander = shard.commander();
    let shard = thread::spawn(move || shard.run(&StopFlag::new().unwrap()).unwrap());
    let givers: Vec<_> = (0..2u32)
        .map(|part| {
            let (slots, done) = (Arc::clone(&slots), Arc::clone(&done));
            thread::spawn(move || {
                for round in 1..=ROUNDS {
                    for i in (part..TASKS).step_by(2) {
                        slots[i as usize].give(round);
                    }
                    for i in (part..TASKS).step_by(2) {
                        while done[i as usize].load(Ordering::Acquire) < round {
                            thread::yield_now();
                        }
                    }
                }
            })
        })
        .collect();
    let noise = thread::spawn(move || {
        // As fast as the shard accepts them, until it is gone.
        while !matches!(commander.send(Box::new(0u8)), Err(ginnel::CommandError::Gone(_))) {
            thread::yield_now();
        }
    });
    givers.into_iter().for_each(|g| g.join().unwrap());
    shard.join().unwrap();
    noise.join().unwrap();
}

#[test]
fn other_threads_start_tasks_on_a_shard() {
    let (to, from) = mpsc::channel();
    let (results, got) = mpsc::channel();
    let over = Arc::new(AtomicBool::new(false));
    let ends = Arc::new(SharedSlot::default());
    let end = Arc::clone(&ends);
    let mut shard = shard(async move || {
        to.send(task::spawner()).unwrap();
        end.take().await;
    });
    let shard = thread::spawn(move || shard.run(&StopFlag::new().unwrap()).unwrap());
    let spawner = from.recv().unwrap();
    for i in 0..10 {
        let results = results.clone();
        let over = Arc::clone(&over);
        spawner
            .spawn(move || async move {
                task::yield_now().await;
                over.store(true, Ordering::Relaxed);
                results.send(i).unwrap();
            })
            .unwrap();
        assert_eq!(got.recv().unwrap(), i);
    }
    assert!(over.load(Ordering::Relaxed));
    ends.give(0);
    shard.join().unwrap();
    assert_eq!(spawner.spawn(|| async {}), Err(SpawnError::Gone));
}

#[test]
fn shard_without_stop_waiter_stops_at_once() {
    let mut shard = shard(async || core::future::pending::<()>().await);
    let stop = StopFlag::new().unwrap();
    stop.stop();
    shard.run(&stop).unwrap();
}

fn unreachable_task() {
    panic!("the main task must not start");
}

#[test]
fn shard_stopped_during_dad_never_starts() {
    let (device, _) = pair(MemoryConfig::default());
    // Duplicate address detection of IPv6 takes a second.
    let main = Executor::new(async || unreachable_task());
    let builder = Shard::builder(config("fd00::1/64")).handler(main).device("cable", device);
    let stop = StopFlag::new().unwrap();
    stop.stop();
    builder.build().unwrap().run(&stop).unwrap();
}

#[test]
fn task_waiting_for_stop_ends_gracefully() {
    let has_stopped = Arc::new(AtomicBool::new(false));
    let stop_seen = Arc::clone(&has_stopped);
    let (listening, listens) = mpsc::channel();
    let mut shard = shard(async move || {
        let mut stop = pin!(signal::stop());
        assert!(futures_util::poll!(&mut stop).is_pending());
        listening.send(()).unwrap();
        stop.await;
        ginnel::time::sleep(Duration::from_millis(20)).await;
        stop_seen.store(true, Ordering::Relaxed);
    });
    let stop = StopFlag::new().unwrap();
    let flag = stop.clone();
    let thread = thread::spawn(move || shard.run(&flag).unwrap());
    listens.recv().unwrap();
    stop.stop();
    thread.join().unwrap();
    assert!(has_stopped.load(Ordering::Relaxed));
}

#[test]
fn error_of_main_task_ends_the_shard() {
    let mut shard = shard(async || -> std::io::Result<()> {
        let error = ginnel::net::TcpListener::bind("192.0.2.1:80").await.unwrap_err();
        Err(error)
    });
    let error = shard.run(&StopFlag::new().unwrap()).unwrap_err();
    assert!(matches!(&error, Error::Application(text) if text.contains("address")), "{error}");
}
