//! Tasks that wait for kernel descriptors.

use crate::common::{config, executor, run_alone, shared};
use crate::fixture::{SERVER_ADDRESS, START};
use crate::placement_suite::build;
use core::future::Future;
use core::task::Poll;
use core::time::Duration;
use ginnel::async_fd::{AsyncFd, IoDirection};
use ginnel::{StopFlag, task, time};
use ginnel_devices::memory::{MemoryConfig, pair};
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;

fn sockets() -> (AsyncFd<UnixStream>, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    (AsyncFd::new(near).unwrap(), far)
}

async fn read(fd: &AsyncFd<UnixStream>) -> Vec<u8> {
    let mut bytes = [0; 100];
    let len = fd.async_io(IoDirection::Read, |mut socket| socket.read(&mut bytes)).await.unwrap();
    bytes[..len].to_vec()
}

/// Runs a main task on a shard on a thread, in the placement under test.
fn run_on_thread<F: Future<Output = ()> + 'static>(main: impl FnOnce() -> F + 'static) {
    let (device, _other_end) = pair(MemoryConfig::default());
    let mut shard = build(config(SERVER_ADDRESS), executor(main), device, 1, START);
    shard.run(&StopFlag::new().unwrap()).unwrap();
}

#[test]
fn tasks_wait_in_both_directions() {
    run_alone(async || {
        let (fd, mut far) = sockets();
        let fd = std::rc::Rc::new(fd);
        let reader = task::spawn({
            let fd = fd.clone();
            async move { read(&fd).await }
        });
        let mut full = 0;
        while let Ok(written) = fd.get_ref().write(&[1; 5000]) {
            full += written;
        }
        let writer = task::spawn({
            let fd = fd.clone();
            async move { fd.async_io(IoDirection::Write, |mut socket| socket.write(b"more")).await.unwrap() }
        });
        time::sleep(Duration::from_millis(1)).await;
        assert!(!reader.is_finished() && !writer.is_finished());
        far.write_all(b"hello").unwrap();
        assert_eq!(reader.await.unwrap(), b"hello");
        assert!(!writer.is_finished());
        far.read_exact(&mut vec![0; full]).unwrap();
        assert_eq!(writer.await.unwrap(), 4);
        far.read_exact(&mut [0; 4]).unwrap();
        // Readiness is forgotten only after `WouldBlock`.
        far.write_all(b"ab").unwrap();
        for expected in [b"a", b"b"] {
            let mut byte = [0];
            fd.readable().await.unwrap().try_io(|mut socket| socket.read(&mut byte)).unwrap().unwrap();
            assert_eq!(&byte, expected);
        }
        drop(far);
        assert_eq!(read(&fd).await, b"");
    });
}

#[test]
fn sleeping_shard_wakes_for_a_task() {
    run_on_thread(async || {
        let (fd, mut far) = sockets();
        let writer = thread::spawn(move || {
            for number in 0..10 {
                thread::sleep(Duration::from_millis(number % 4));
                far.write_all(&[number as u8]).unwrap();
                far.read_exact(&mut [0]).unwrap();
            }
        });
        for number in 0..10 {
            assert_eq!(read(&fd).await, [number]);
            fd.async_io(IoDirection::Write, |mut socket| socket.write(&[number])).await.unwrap();
        }
        writer.join().unwrap();
    });
}

#[test]
fn event_after_the_guard_is_not_cleared() {
    run_alone(async || {
        let (fd, mut far) = sockets();
        far.write_all(b"a").unwrap();
        let mut guard = fd.readable().await.unwrap();
        assert_eq!(guard.get_inner().read(&mut [0; 9]).unwrap(), 1);
        assert!(fd.get_ref().read(&mut [0; 9]).is_err());
        far.write_all(b"b").unwrap();
        time::sleep(Duration::from_millis(1)).await;
        guard.clear_ready();
        assert_eq!(read(&fd).await, b"b");
        // Without such an event it is cleared.
        assert!(fd.readable().await.unwrap().try_io(|mut socket| socket.read(&mut [0; 9])).is_err());
        let mut waiting = Box::pin(fd.readable());
        let is_pending =
            core::future::poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending())).await;
        assert!(is_pending);
    });
}

#[test]
fn several_tasks_wait_for_one_descriptor() {
    run_alone(async || {
        let (fd, mut far) = sockets();
        let fd = std::rc::Rc::new(fd);
        let (count, counted) = shared::<u32>();
        let tasks: Vec<_> = (0..5)
            .map(|_| {
                let (fd, count) = (fd.clone(), count.clone());
                task::spawn(async move {
                    assert_eq!(read(&fd).await.len(), 100);
                    *count.borrow_mut() += 1;
                })
            })
            .collect();
        time::sleep(Duration::from_millis(1)).await;
        far.write_all(&[3; 500]).unwrap();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(*counted.borrow(), 5);
    });
}

#[test]
fn dropped_descriptor_is_deregistered() {
    run_alone(async || {
        let (fd, mut far) = sockets();
        let copy = fd.get_ref().try_clone().unwrap();
        // The copy keeps the file open, so the kernel does not forget it by itself.
        let near = fd.into_inner();
        let again = AsyncFd::new(near).unwrap();
        assert_eq!(
            AsyncFd::new(again.get_ref().try_clone().unwrap()).map(drop).map_err(|e| e.kind()),
            Ok(())
        );
        far.write_all(b"x").unwrap();
        assert_eq!(read(&again).await, b"x");
        drop(again);
        let again = AsyncFd::new(copy).unwrap();
        far.write_all(b"y").unwrap();
        assert_eq!(read(&again).await, b"y");
        let error = AsyncFd::new(tempfile::tempfile().unwrap()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    });
    assert!(AsyncFd::new(UnixStream::pair().unwrap().0).is_err(), "outside of a task");
}

#[test]
fn descriptor_dropped_outside_of_tasks_is_deregistered() {
    let (kept, keep) = shared::<Option<AsyncFd<UnixStream>>>();
    let (device, _other_end) = pair(MemoryConfig::default());
    let main = move || async move {
        let (fd, far) = sockets();
        let copy = fd.get_ref().try_clone().unwrap();
        *keep.borrow_mut() = Some(fd);
        time::sleep(Duration::from_millis(10)).await;
        let mut far = far;
        far.write_all(b"z").unwrap();
        let again = AsyncFd::new(copy).unwrap();
        assert_eq!(read(&again).await, b"z");
    };
    let mut now = START;
    let mut shard = build(config(SERVER_ADDRESS), executor(main), device, 1, now);
    for _ in 0..10_000 {
        if now > START + Duration::from_millis(5) {
            kept.borrow_mut().take();
        }
        if shard.poll_once(now).unwrap().stopped {
            return;
        }
        now += Duration::from_micros(100);
    }
    panic!("the main task does not end");
}
