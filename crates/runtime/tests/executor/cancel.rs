//! Futures dropped at any poll: no byte is lost or duplicated, and no waiter is left.

use super::common::{SERVER, executor, pattern};
use crate::placement_suite::pair::ShardPair;
use core::future::{pending, poll_fn};
use core::pin::pin;
use core::task::Poll;
use core::time::Duration;
use futures_util::stream::{FuturesUnordered, StreamExt};
use ginnel::Random;
use ginnel::net::{OwnedReadHalf, OwnedWriteHalf, TcpListener, TcpStream};
use ginnel::task::{spawn, yield_now};
use ginnel::time::sleep;
use proptest::prelude::*;

/// Polls a future up to `polls` times and then drops it, as a lost race does; sometimes with a waker of its
/// own.
async fn dropped_after<F: Future>(rng: &mut Random, future: F) -> Option<F::Output> {
    let mut polls = rng.next_u64() % 5;
    if polls == 0 {
        return None;
    }
    if rng.next_u64().is_multiple_of(2) {
        let mut set = FuturesUnordered::new();
        set.push(future);
        let next = pin!(set.next());
        return counted(&mut polls, next).await.flatten();
    }
    let future = pin!(future);
    counted(&mut polls, future).await
}

async fn counted<F: Future + Unpin>(polls: &mut u64, mut future: F) -> Option<F::Output> {
    poll_fn(|cx| {
        *polls -= 1;
        match core::pin::Pin::new(&mut future).poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if *polls == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

async fn write(mut half: OwnedWriteHalf, bytes: usize, mut rng: Random) {
    let mut sent = 0;
    while sent < bytes {
        let piece = pattern(sent..bytes.min(sent + 1 + rng.next_u64() as usize % 9000));
        match rng.next_u64() % 4 {
            0 => drop(dropped_after(&mut rng, half.as_stream().writable()).await),
            _ => match dropped_after(&mut rng, half.write(&piece)).await {
                Some(n) => sent += n.unwrap(),
                None => yield_now().await,
            },
        }
    }
    half.shutdown().await.unwrap();
}

async fn read(mut half: OwnedReadHalf, bytes: usize, mut rng: Random) {
    let mut got = Vec::new();
    let mut buffer = vec![0; 5000];
    loop {
        let room = 1 + rng.next_u64() as usize % buffer.len();
        match rng.next_u64() % 8 {
            0 => drop(dropped_after(&mut rng, half.as_stream().readable()).await),
            1 => {
                if let Some(n) = dropped_after(&mut rng, half.as_stream().peek(&mut buffer[..room])).await {
                    let n = n.unwrap();
                    assert!(buffer[..n] == pattern(got.len()..got.len() + n), "peeked at {}", got.len());
                }
            }
            2 => sleep(Duration::from_micros(rng.next_u64() % 3000)).await,
            _ => match dropped_after(&mut rng, half.read(&mut buffer[..room])).await {
                Some(Ok(0)) => break,
                Some(n) => got.extend_from_slice(&buffer[..n.unwrap()]),
                None => yield_now().await,
            },
        }
    }
    assert!(got == pattern(0..bytes), "{} of {bytes} bytes, or wrong bytes", got.len());
}

/// In both directions at once.
async fn exchange(stream: TcpStream, bytes: usize, mut rng: Random) {
    let (reader, writer) = stream.into_split();
    let (a, b) = (Random::new(rng.next_u64()), Random::new(rng.next_u64()));
    let (mut reading, mut writing) = (spawn(read(reader, bytes, a)), spawn(write(writer, bytes, b)));
    // Joining a task can be cancelled, too.
    for task in [&mut reading, &mut writing] {
        loop {
            if let Some(ended) = dropped_after(&mut rng, &mut *task).await {
                break ended.unwrap();
            }
            sleep(Duration::from_micros(100)).await;
        }
    }
}

fn run(seed: u64, bytes: usize, faults: &str) {
    const CONNECTIONS: u64 = 3;
    let server = async move || {
        let listener = TcpListener::bind(SERVER).await.unwrap();
        let mut rng = Random::new(seed);
        let mut accepted = 0;
        while accepted < CONNECTIONS {
            match dropped_after(&mut rng, listener.accept()).await {
                Some(taken) => {
                    drop(spawn(exchange(taken.unwrap().0, bytes, Random::new(rng.next_u64()))));
                    accepted += 1;
                }
                None => yield_now().await,
            }
        }
        pending::<()>().await;
    };
    let client = async move || {
        let mut rng = Random::new(!seed);
        let mut connected = 0;
        let mut tasks = Vec::new();
        while connected < CONNECTIONS {
            let stream = TcpStream::connect(SERVER).await.unwrap();
            tasks.push(spawn(exchange(stream, bytes, Random::new(rng.next_u64()))));
            connected += 1;
        }
        for task in tasks {
            task.await.unwrap();
        }
        sleep(Duration::from_secs(5)).await;
    };
    // The transcript differs from run to run.
    let mut pair = ShardPair::without_transcript(executor(server), executor(client), |config| {
        if !faults.is_empty() {
            config.devices[0].faults = Some(faults.parse().unwrap());
        }
    });
    pair.run(Duration::from_secs(3600));
    pair.advance(Duration::from_secs(1));
    let stats = pair.server.handler().stats();
    assert_eq!((stats.tasks, stats.streams, stats.sleeps, stats.wait_lists), (1, 0, 0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn futures_dropped_anywhere_lose_no_bytes(seed: u64, bytes in 0usize..200_000) {
        run(seed, bytes, "");
    }

    #[test]
    fn dropped_futures_lose_no_bytes_on_lossy_link(seed: u64, bytes in 0usize..60_000) {
        run(seed, bytes, "delay=300us loss=2% reorder=2%");
    }
}
