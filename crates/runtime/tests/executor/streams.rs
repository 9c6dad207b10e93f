//! Connections without errors: data in both directions, back-pressure, halves, addresses.

use super::common::{SERVER, SharedCounter, executor, pattern, run, shared};
use crate::placement_suite::pair::ShardPair;
use core::future::poll_fn;
use core::pin::pin;
use core::time::Duration;
use futures_util::future::{join, join_all, select};
use ginnel::net::{TcpListener, TcpStream};
use ginnel::task::{spawn, yield_now};
use ginnel::time::{sleep, timeout};
use ginnel::{ConnectOptions, ListenOptions, SocketOptions, TcpOption};
use std::io::{self, ErrorKind};

/// Echoes, on any number of connections.
async fn echo() -> io::Result<()> {
    let listener = TcpListener::bind(SERVER).await?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        drop(spawn(async move {
            let mut buffer = [0; 3000];
            loop {
                match stream.read(&mut buffer).await? {
                    0 => return Ok::<_, io::Error>(()),
                    n => stream.write_all(&buffer[..n]).await?,
                }
            }
        }));
    }
}

/// Sends `len` bytes, reads them back and compares.
async fn exchange(stream: TcpStream, bytes: usize) {
    let (mut reader, mut writer) = stream.into_split();
    let sending = spawn(async move {
        let mut sent = 0;
        while sent < bytes {
            let piece = pattern(sent..bytes.min(sent + 7000));
            writer.write_all(&piece).await.unwrap();
            sent += piece.len();
        }
        writer.shutdown().await.unwrap();
    });
    let mut got = Vec::new();
    assert_eq!(reader.read_to_end(&mut got).await.unwrap(), bytes);
    assert!(got == pattern(0..bytes));
    sending.await.unwrap();
    assert_eq!(reader.read(&mut [0]).await.unwrap(), 0, "the end of the stream must persist");
}

#[test]
fn many_connections_echo_at_once() {
    run(echo, async || {
        let clients = (0..20usize).map(|i| {
            spawn(async move { exchange(TcpStream::connect(SERVER).await.unwrap(), i * 10_000).await })
        });
        for client in join_all(clients).await {
            client.unwrap();
        }
    });
}

#[test]
fn megabytes_echo_over_a_lossy_link() {
    let client = async || exchange(TcpStream::connect(SERVER).await.unwrap(), 4 << 20).await;
    let mut pair = ShardPair::with(executor(echo), executor(client), |config| {
        config.devices[0].faults = Some("delay=1ms loss=1% reorder=1%".parse().unwrap());
    });
    pair.run(Duration::from_secs(3600));
    // The echoing task is gone, and its connection with it.
    pair.advance(Duration::from_secs(5));
    let stats = pair.server.handler().stats();
    assert_eq!((stats.tasks, stats.streams, stats.sleeps, stats.wait_lists), (1, 0, 0, 0));
}

/// Borrowed halves in one task, owned halves in two, and a part of a task with a waker of its own.
#[test]
fn halves_read_and_write_at_the_same_time() {
    const BYTES: usize = 300_000;
    run(echo, async || {
        let mut stream = TcpStream::connect(SERVER).await.unwrap();
        let (mut reader, mut writer) = stream.split();
        let data = pattern(0..BYTES);
        let mut got = vec![0; BYTES];
        let (sent, read) = join(writer.write_all(&data), reader.read_exact(&mut got)).await;
        sent.unwrap();
        read.unwrap();
        assert!(got == data);

        let (mut reader, mut writer) = stream.into_split();
        let reading = spawn(async move {
            let mut got = vec![0; BYTES];
            reader.read_exact(&mut got).await.unwrap();
            assert!(got == pattern(0..BYTES));
            reader
        });
        writer.write_all(&data).await.unwrap();
        let mut stream = reading.await.unwrap().reunite(writer).unwrap();
        stream.write_all(b"still one").await.unwrap();
        let mut nine = [0; 9];
        stream.read_exact(&mut nine).await.unwrap();
        assert_eq!(&nine, b"still one");

        let (reader, _writer) = stream.into_split();
        let (_reader, writer) = TcpStream::connect(SERVER).await.unwrap().into_split();
        assert!(reader.reunite(writer).is_err(), "halves of two streams");
    });
}

/// The server writes to a client that does not read.
#[test]
fn a_write_waits_for_a_peer_that_does_not_read() {
    const BYTES: usize = 12 << 20;
    let (written, seen) = shared::<usize>();
    let server = async move || {
        let listener = TcpListener::bind(SERVER).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        while *written.borrow() < BYTES {
            let at = *written.borrow();
            let n = stream.write(&pattern(at..BYTES.min(at + 9000))).await.unwrap();
            assert!(n > 0);
            *written.borrow_mut() += n;
        }
        stream.shutdown().await.unwrap();
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
    };
    let client = async move || {
        let mut stream = TcpStream::connect(SERVER).await.unwrap();
        sleep(Duration::from_secs(30)).await;
        let stalled = *seen.borrow();
        let unread = stream.info().unwrap().recv_queued as usize;
        assert!(stalled < BYTES && unread > 0 && unread <= stalled, "{stalled} bytes, {unread} unread");
        sleep(Duration::from_secs(300)).await;
        assert_eq!(*seen.borrow(), stalled, "the window is closed");
        let mut got = Vec::new();
        stream.read_to_end(&mut got).await.unwrap();
        assert!(got == pattern(0..BYTES));
    };
    let mut pair = ShardPair::new(executor(server), executor(client));
    pair.run(Duration::from_secs(3600));
}

#[test]
fn one_side_may_end_while_the_other_goes_on() {
    let server = async || {
        let listener = TcpListener::bind(SERVER).await.unwrap();
        let mut stream = listener.incoming().next().await.unwrap().unwrap();
        let mut question = Vec::new();
        stream.read_to_end(&mut question).await.unwrap();
        assert_eq!(question, b"how many?");
        sleep(Duration::from_secs(1)).await;
        stream.write_all(&vec![b'x'; 100_000]).await.unwrap();
        // Dropping it sends the rest, and FIN.
    };
    run(
        async move || {
            server().await;
            core::future::pending::<()>().await;
        },
        async || {
            let mut stream = TcpStream::connect(SERVER).await.unwrap();
            stream.write_all(b"how many?").await.unwrap();
            stream.shutdown().await.unwrap();
            stream.shutdown().await.unwrap();
            assert_eq!(stream.write(b"more").await.unwrap_err().kind(), ErrorKind::BrokenPipe);
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.unwrap();
            assert_eq!(answer.len(), 100_000);
        },
    );
}

#[test]
fn peek_readable_and_try_read_work() {
    let server = async || {
        let listener = TcpListener::bind(SERVER).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        sleep(Duration::from_millis(5)).await;
        stream.write_all(b"hello").await.unwrap();
        stream.read(&mut [0]).await.unwrap();
    };
    run(server, async || {
        let mut stream = TcpStream::connect(SERVER).await.unwrap();
        let mut buffer = [0; 10];
        assert_eq!(stream.try_read(&mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(stream.read(&mut []).await.unwrap(), 0, "an empty buffer does not wait");
        stream.writable().await.unwrap();
        // Several tasks wait for the same event, and all are woken.
        let (a, b) = join(stream.readable(), stream.peek(&mut buffer)).await;
        a.unwrap();
        assert_eq!((b.unwrap(), &buffer[..5]), (5, &b"hello"[..]));
        assert_eq!(stream.peek(&mut buffer[..2]).await.unwrap(), 2);
        assert_eq!(stream.try_read(&mut buffer[..1]).unwrap(), 1);
        let mut rest = [0; 4];
        stream.read_exact(&mut rest).await.unwrap();
        assert_eq!(&rest, b"ello");
        // Until the window is closed and the buffer is full.
        let mut sent = 0;
        loop {
            match stream.try_write(&[0; 5000]) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => panic!("{e}"),
            }
        }
        assert!(sent > 10_000);
        assert!(timeout(Duration::ZERO, stream.writable()).await.is_err());
        stream.writable().await.unwrap();
    });
}

#[test]
fn addresses_and_options_are_available() {
    let server = async || {
        let options = ListenOptions {
            socket: SocketOptions {
                nodelay: true,
                recv_buffer_bytes: Some(20_000),
                ..SocketOptions::default()
            },
            ..ListenOptions::default()
        };
        let listener = TcpListener::bind_with(SERVER, options).await.unwrap();
        assert_eq!(listener.local_addr().unwrap().to_string(), SERVER);
        let other = TcpListener::bind(SERVER).await;
        assert_eq!(other.unwrap_err().kind(), ErrorKind::AddrInUse);
        let any = TcpListener::bind(("10.0.0.1", 0)).await.unwrap();
        assert!(any.local_addr().unwrap().port() >= 32_768);
        let (stream, peer) = listener.accept().await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), peer);
        assert_eq!(peer.to_string(), "10.0.0.2:5555");
        assert_eq!(stream.local_addr().unwrap().to_string(), SERVER);
        assert!(stream.info().unwrap().rcv_wnd <= 20_000);
        core::future::pending::<()>().await;
    };
    run(server, async || {
        let options = ConnectOptions { local: Some("10.0.0.2:5555".parse().unwrap()), ..Default::default() };
        let stream = TcpStream::connect_with(SERVER, options).await.unwrap();
        assert_eq!(stream.local_addr().unwrap().port(), 5555);
        assert_eq!(stream.peer_addr().unwrap().to_string(), SERVER);
        stream.set_nodelay(true).unwrap();
        stream.set_keepalive(Some(Duration::from_secs(60))).unwrap();
        stream.set_keepalive(None).unwrap();
        let refused = stream.set_option(TcpOption::KeepCount(0)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidInput);
        assert_eq!(stream.take_error().unwrap().map(|e| e.kind()), None);
        let same = TcpStream::connect_with(SERVER, options).await;
        assert_eq!(same.unwrap_err().kind(), ErrorKind::AddrNotAvailable);
        assert_eq!(TcpStream::connect("no:such").await.unwrap_err().kind(), ErrorKind::InvalidInput);
    });
}

/// A SYN that waited for data would wait for ever: the task gets its stream after the handshake.
#[test]
fn syn_of_a_task_does_not_wait_for_data() {
    run(echo, async || {
        let socket =
            SocketOptions { fastopen_connect: true, fastopen_no_cookie: true, ..SocketOptions::default() };
        let options = ConnectOptions { socket, ..ConnectOptions::default() };
        let connecting = timeout(Duration::from_secs(10), TcpStream::connect_with(SERVER, options));
        exchange(connecting.await.expect("connected").unwrap(), 100).await;
    });
}

#[test]
fn several_tasks_accept_from_one_listener() {
    const CLIENTS: u32 = 40;
    let taken = [SharedCounter::default(), SharedCounter::default()];
    let counted = taken.clone();
    let server = async move || {
        let listener = std::rc::Rc::new(TcpListener::bind(SERVER).await.unwrap());
        let tasks = counted.map(|count| {
            let listener = std::rc::Rc::clone(&listener);
            spawn(async move {
                loop {
                    let (mut stream, _) = listener.accept().await.unwrap();
                    count.add();
                    // The other task's turn.
                    stream.write_all(b"!").await.unwrap();
                    yield_now().await;
                }
            })
        });
        join_all(tasks).await;
    };
    run(server, async || {
        let clients = (0..CLIENTS).map(|_| {
            spawn(async {
                let mut stream = TcpStream::connect(SERVER).await.unwrap();
                assert_eq!(stream.read(&mut [0; 2]).await.unwrap(), 1);
            })
        });
        for client in join_all(clients).await {
            client.unwrap();
        }
    });
    let taken = taken.map(|t| t.get());
    assert_eq!(taken[0] + taken[1], CLIENTS);
    assert!(taken[0] > 0 && taken[1] > 0, "{taken:?}");
}

/// On a shard with many tasks, data wakes exactly the task that waits for it.
#[test]
fn data_wakes_only_its_reader() {
    const IDLE: usize = 500;
    let (polls, seen) = shared::<Vec<u32>>();
    polls.borrow_mut().resize(IDLE, 0);
    let server = async move || -> () {
        let listener = TcpListener::bind(SERVER).await.unwrap();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let polls = std::rc::Rc::clone(&polls);
            drop(spawn(async move {
                let mut name = [0; 2];
                stream.read_exact(&mut name).await.unwrap();
                let name = usize::from(u16::from_be_bytes(name));
                loop {
                    let mut buffer = [0; 10];
                    let n = poll_fn(|cx| {
                        polls.borrow_mut()[name] += 1;
                        stream.poll_read(cx, &mut buffer)
                    })
                    .await
                    .unwrap();
                    if n == 0 {
                        return;
                    }
                    stream.write_all(&buffer[..n]).await.unwrap();
                }
            }));
        }
    };
    let client = async move || {
        let mut streams = Vec::new();
        for i in 0..IDLE as u16 {
            let mut stream = TcpStream::connect(SERVER).await.unwrap();
            stream.write_all(&i.to_be_bytes()).await.unwrap();
            streams.push(stream);
        }
        sleep(Duration::from_secs(1)).await;
        let before = seen.borrow().clone();
        assert!(before.iter().all(|polls| *polls > 0), "each task must wait");
        streams[123].write_all(b"you").await.unwrap();
        let mut answer = [0; 3];
        streams[123].read_exact(&mut answer).await.unwrap();
        sleep(Duration::from_secs(1)).await;
        for (i, polls) in seen.borrow().iter().enumerate() {
            // Woken once, and polled once more for the next data.
            assert_eq!(*polls - before[i], if i == 123 { 2 } else { 0 });
        }
    };
    let mut pair = ShardPair::with(executor(server), executor(client), |c| {
        c.tcp.connections_max = 2 * IDLE as u32;
    });
    pair.run(Duration::from_secs(60));
}

#[test]
fn socket_used_on_another_shard_is_an_error() {
    let (lent, taken) = shared::<Option<TcpStream>>();
    let server = async move || {
        let listener = TcpListener::bind(SERVER).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        *lent.borrow_mut() = Some(stream);
        core::future::pending::<()>().await;
    };
    run(server, async move || {
        let mut stream = TcpStream::connect(SERVER).await.unwrap();
        sleep(Duration::from_secs(1)).await;
        let mut foreign = taken.borrow_mut().take().unwrap();
        for error in [
            foreign.write(b"x").await.unwrap_err(),
            foreign.read(&mut [0]).await.unwrap_err(),
            foreign.peer_addr().unwrap_err(),
        ] {
            assert!(error.to_string().contains("belongs to another Ginnel shard"), "{error}");
        }
        // Its own shard closes it nevertheless.
        drop(foreign);
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
    });
    let outside = futures_util::FutureExt::now_or_never(TcpListener::bind(SERVER)).unwrap();
    assert!(outside.unwrap_err().to_string().contains("no task of a Ginnel shard is running"));
}

#[test]
fn lost_race_leaves_data_for_the_next_read() {
    run(echo, async || {
        let mut stream = TcpStream::connect(SERVER).await.unwrap();
        let mut buffer = [0; 8];
        for round in 0..100u8 {
            stream.write_all(&[round; 8]).await.unwrap();
            let mut read = 0;
            while read < 8 {
                let nap = pin!(sleep(Duration::from_micros(u64::from(round))));
                let reading = pin!(stream.read(&mut buffer[read..]));
                if let futures_util::future::Either::Left((n, _)) = select(reading, nap).await {
                    read += n.unwrap();
                }
            }
            assert_eq!(buffer, [round; 8]);
        }
    });
}
