//! The costs of tasks: no heap allocation in steady state, and no time while they wait.

use super::common::{SERVER, SharedCounter};
use crate::placement_suite::pair::ShardPair;
use core::time::Duration;
use futures_util::future::{Either, select};
use ginnel::config::Config;
use ginnel::net::{TcpListener, TcpStream};
use ginnel::task::{JoinHandle, spawn, yield_now};
use ginnel::time::{sleep, timeout};
use ginnel::{Executor, Handler};
use ginnel_testkit::alloc_counter::count_allocations;
use std::cell::RefCell;
use std::pin::pin;
use std::rc::Rc;

/// Echoes, with a timeout of a minute for each read.
async fn echo() -> std::io::Result<()> {
    let listener = TcpListener::bind(SERVER).await?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        drop(spawn(async move {
            let mut buffer = [0; 2048];
            while let Ok(Ok(n @ 1..)) = timeout(Duration::from_secs(60), stream.read(&mut buffer)).await {
                if stream.write_all(&buffer[..n]).await.is_err() {
                    break;
                }
            }
        }));
    }
}

/// Sends requests of three kinds forever: plain, with a lost race, and with a task of its own for the
/// response.
async fn ask(count: SharedCounter, own_task: bool) {
    let mut stream = TcpStream::connect(SERVER).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let mut answer = [0; 500];
    loop {
        stream.write_all(&[7; 500]).await.unwrap();
        {
            // Either branch may finish first.
            let nap = pin!(sleep(Duration::from_micros(70)));
            let peeking = pin!(stream.peek(&mut answer));
            match select(nap, peeking).await {
                Either::Left(_) | Either::Right(_) => {}
            }
        }
        stream.readable().await.unwrap();
        stream.read_exact(&mut answer).await.unwrap();
        if own_task {
            let counted = count.clone();
            // One allocation: the future.
            let task: JoinHandle<()> = spawn(async move {
                yield_now().await;
                counted.add();
            });
            task.await.unwrap();
        } else {
            count.add();
        }
    }
}

fn requests<S: Handler, C: Handler>(pair: &mut ShardPair<S, C>, count: &SharedCounter, more: u32) {
    let wanted = count.get() + more;
    while count.get() < wanted {
        pair.turn();
        pair.now += Duration::from_micros(10);
    }
}

fn allocations_of_1000_requests(own_task: bool) -> u64 {
    let count = SharedCounter::default();
    let counted = count.clone();
    let client = async move || {
        let tasks: [JoinHandle<()>; 4] = core::array::from_fn(|_| spawn(ask(counted.clone(), own_task)));
        for task in tasks {
            task.await.unwrap();
        }
    };
    let mut pair = ShardPair::without_transcript(Executor::new(echo), Executor::new(client), |_| {});
    requests(&mut pair, &count, 1000);
    let ((), made) = count_allocations(|| requests(&mut pair, &count, 1000));
    made.count
}

#[test]
fn requests_in_steady_state_allocate_nothing() {
    assert_eq!(allocations_of_1000_requests(false), 0);
}

#[test]
fn a_task_is_one_allocation() {
    let made = allocations_of_1000_requests(true);
    // Four clients may be ahead by a task.
    assert!((996..=1004).contains(&made), "{made} allocations for 1000 tasks");
}

const IDLE: usize = 20_000;

#[test]
fn idle_tasks_use_no_time() {
    let polls = SharedCounter::default();
    let counted = polls.clone();
    let server = async move || -> std::io::Result<()> {
        let listener = TcpListener::bind(SERVER).await?;
        loop {
            let (mut stream, _) = listener.accept().await?;
            let polls = counted.clone();
            drop(spawn(async move {
                while let Ok(()) = stream.readable().await {
                    polls.add();
                    let mut buffer = [0; 100];
                    match stream.try_read(&mut buffer) {
                        Ok(n @ 1..) => stream.write_all(&buffer[..n]).await.unwrap(),
                        _ => return,
                    }
                }
            }));
        }
    };
    let streams: Rc<RefCell<Vec<TcpStream>>> = Rc::default();
    let opened = Rc::clone(&streams);
    let go = SharedCounter::default();
    let gone = go.clone();
    let client = async move || {
        while opened.borrow().len() < IDLE {
            let stream = TcpStream::connect(SERVER).await.unwrap();
            opened.borrow_mut().push(stream);
        }
        // Requested between turns, so that nothing else happens in the turn.
        while gone.get() == 0 {
            sleep(Duration::from_secs(100)).await;
        }
        let mut stream = opened.borrow_mut().swap_remove(IDLE / 2);
        stream.write_all(b"you").await.unwrap();
        let mut answer = [0; 3];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"you");
        opened.borrow_mut().push(stream);
    };
    let many = |config: &mut Config| config.tcp.connections_max = IDLE as u32;
    let mut pair = ShardPair::without_transcript(Executor::new(server), Executor::new(client), many);
    while streams.borrow().len() < IDLE {
        pair.turn();
        pair.now += Duration::from_micros(10);
    }
    pair.advance(Duration::from_secs(250));
    let stats = pair.server.handler().stats();
    assert_eq!((stats.tasks, stats.streams, stats.sleeps), (IDLE + 1, IDLE, 0));

    let waiting = polls.get();
    let before = *pair.server.stats();
    let ((), made) = count_allocations(|| pair.advance(Duration::from_secs(3600)));
    let after = pair.server.stats();
    assert_eq!((polls.get(), after.events, after.timers), (waiting, before.events, before.timers));
    assert_eq!(made.count, 0);
    // An hour of the client's sleeps, and no work of the server.
    assert!(after.turns - before.turns < 200, "{} turns", after.turns - before.turns);

    go.add();
    pair.run(Duration::from_secs(200));
    assert_eq!(polls.get(), waiting + 1, "one task must be woken once");
}
