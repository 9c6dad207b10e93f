//! Ends of connections and listeners, as errors of Linux.

use super::common::{CLOSED_PORT, SERVER, executor, run, shared};
use crate::placement_suite::pair::ShardPair;
use core::future::pending;
use core::time::Duration;
use futures_util::future::{FutureExt, LocalBoxFuture};
use ginnel::net::{TcpListener, TcpStream};
use ginnel::task::spawn;
use ginnel::time::{sleep, timeout};
use ginnel::{Conn, ConnectOptions, Context, Error, Handler};
use std::io::ErrorKind;

const SECOND: Duration = Duration::from_secs(1);

/// Accepts one connection, passes it to `then`, and continues forever.
fn accept_one<F>(then: impl FnOnce(TcpStream) -> F + 'static) -> impl FnOnce() -> LocalBoxFuture<'static, ()>
where
    F: Future<Output = ()> + 'static,
{
    || {
        Box::pin(async {
            let listener = TcpListener::bind(SERVER).await.unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            then(stream).await;
            pending::<()>().await;
        })
    }
}

#[test]
fn connection_to_a_closed_port_is_refused() {
    run(
        async || pending::<()>().await,
        async || {
            let error = TcpStream::connect(CLOSED_PORT).await.unwrap_err();
            assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::ConnectionRefused, Some(111)));
            let unreachable = TcpStream::connect("192.0.2.1:80").await.unwrap_err();
            assert_eq!(unreachable.kind(), ErrorKind::NetworkUnreachable);
            // No host has the address, which is known after a while.
            let unanswered = TcpStream::connect("10.0.0.77:80").await.unwrap_err();
            assert_eq!(unanswered.kind(), ErrorKind::HostUnreachable);
        },
    );
}

#[test]
fn cancelled_connect_leaves_no_state() {
    let client = async || {
        for _ in 0..10 {
            let connecting = TcpStream::connect("10.0.0.77:80");
            assert!(timeout(Duration::from_millis(100), connecting).await.is_err());
        }
        // The SYN+ACK arrives after the attempt was cancelled.
        assert!(TcpStream::connect(SERVER).now_or_never().is_none());
        pending::<()>().await;
    };
    let server = async || {
        let listener = TcpListener::bind(SERVER).await.unwrap();
        while let Ok((mut stream, _)) = listener.accept().await {
            assert_ne!(stream.read(&mut [0]).await.ok(), Some(1));
        }
    };
    let mut pair = ShardPair::new(executor(server), executor(client));
    pair.advance(100 * SECOND);
    for stats in [pair.client.handler().stats(), pair.server.handler().stats()] {
        assert_eq!((stats.tasks, stats.streams, stats.sleeps, stats.wait_lists), (1, 0, 0, 0));
    }
}

#[test]
fn data_before_a_reset_is_read_first() {
    let (checked, check) = shared::<bool>();
    let server = accept_one(async move |mut stream: TcpStream| {
        sleep(SECOND).await;
        let mut buffer = [0; 3];
        assert_eq!(stream.peek(&mut buffer).await.unwrap(), 3);
        assert_eq!((stream.read(&mut buffer).await.unwrap(), &buffer), (3, b"las"));
        assert_eq!((stream.read(&mut buffer).await.unwrap(), &buffer), (1, b"tas"));
        let error = stream.read(&mut buffer).await.unwrap_err();
        assert_eq!((error.kind(), error.raw_os_error()), (ErrorKind::ConnectionReset, Some(104)));
        assert_eq!(stream.read(&mut buffer).await.unwrap(), 0);
        assert_eq!(stream.write(b"x").await.unwrap_err().kind(), ErrorKind::BrokenPipe);
        assert_eq!(stream.shutdown().await.unwrap_err().kind(), ErrorKind::NotConnected);
        assert_eq!(stream.peer_addr().unwrap_err().kind(), ErrorKind::NotConnected);
        assert_eq!(stream.local_addr().unwrap().to_string(), SERVER);
        stream.readable().await.unwrap();
        stream.writable().await.unwrap();
        *checked.borrow_mut() = true;
    });
    run(server, async move || {
        let mut stream = TcpStream::connect(SERVER).await.unwrap();
        stream.write_all(b"last").await.unwrap();
        sleep(Duration::from_millis(10)).await;
        stream.set_zero_linger().unwrap();
        drop(stream);
        sleep(2 * SECOND).await;
        assert!(*check.borrow());
    });
}

#[test]
fn reset_wakes_readers_and_writers() {
    let (count, seen) = shared::<u32>();
    let server = accept_one(async move |stream: TcpStream| {
        let (mut reader, mut writer) = stream.into_split();
        let for_reader = std::rc::Rc::clone(&count);
        let reading = spawn(async move {
            let result = reader.read(&mut [0]).await;
            *for_reader.borrow_mut() += 1;
            result.map_err(|e| e.kind())
        });
        let writing = spawn(async move {
            let result = writer.write_all(&vec![0; 50 << 20]).await;
            *count.borrow_mut() += 1;
            result.map_err(|e| e.kind())
        });
        // The error is reported once; the other task reads the end of the stream.
        match (reading.await.unwrap(), writing.await.unwrap()) {
            (Err(ErrorKind::ConnectionReset), Err(ErrorKind::BrokenPipe)) => {}
            (Ok(0), Err(ErrorKind::ConnectionReset)) => {}
            other => panic!("{other:?}"),
        }
    });
    run(server, async move || {
        let stream = TcpStream::connect(SERVER).await.unwrap();
        sleep(SECOND).await;
        assert_eq!(*seen.borrow(), 0);
        stream.set_zero_linger().unwrap();
        drop(stream);
        sleep(SECOND).await;
        assert_eq!(*seen.borrow(), 2);
    });
}

#[test]
fn reset_after_the_peers_fin_is_epipe() {
    let (checked, check) = shared::<bool>();
    let server = accept_one(async move |mut stream: TcpStream| {
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
        sleep(SECOND).await;
        // The peer has closed both directions, so the data is answered with a reset.
        stream.write_all(b"too late").await.unwrap();
        sleep(SECOND).await;
        assert_eq!(stream.take_error().unwrap().unwrap().kind(), ErrorKind::BrokenPipe);
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
        *checked.borrow_mut() = true;
    });
    run(server, async move || {
        drop(TcpStream::connect(SERVER).await.unwrap());
        sleep(5 * SECOND).await;
        assert!(*check.borrow());
    });
}

#[test]
fn dropped_stream_sends_fin_or_rst_if_unread() {
    let server = async || {
        let listener = TcpListener::bind(SERVER).await.unwrap();
        let (mut well, _) = listener.accept().await.unwrap();
        let (unread, _) = listener.accept().await.unwrap();
        well.write_all(b"bye").await.unwrap();
        drop(well);
        sleep(SECOND).await;
        drop(unread);
        pending::<()>().await;
    };
    run(server, async || {
        let mut well = TcpStream::connect(SERVER).await.unwrap();
        let mut unread = TcpStream::connect(SERVER).await.unwrap();
        unread.write_all(b"nobody reads this").await.unwrap();
        let mut rest = Vec::new();
        well.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"bye");
        assert_eq!(unread.read(&mut [0]).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn dropped_write_half_sends_fin_forgotten_does_not() {
    let server = accept_one(async move |mut stream: TcpStream| {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        stream.write_all(&all).await.unwrap();
    });
    run(server, async || {
        let (mut reader, mut writer) = TcpStream::connect(SERVER).await.unwrap().into_split();
        writer.write_all(b"abc").await.unwrap();
        drop(writer);
        let mut answer = [0; 3];
        reader.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"abc");
    });
    let server = accept_one(async move |mut stream: TcpStream| {
        let mut three = [0; 3];
        stream.read_exact(&mut three).await.unwrap();
        assert!(timeout(SECOND, stream.read(&mut three)).await.is_err(), "no FIN must arrive");
        stream.write_all(&three).await.unwrap();
        assert_eq!(
            stream.read(&mut three).await.unwrap(),
            0,
            "FIN must arrive when the other half is dropped"
        );
        stream.write_all(b"last").await.unwrap();
    });
    run(server, async || {
        let (mut reader, mut writer) = TcpStream::connect(SERVER).await.unwrap().into_split();
        writer.write_all(b"abc").await.unwrap();
        writer.forget();
        reader.read_exact(&mut [0; 3]).await.unwrap();
        drop(reader);
        sleep(SECOND).await;
    });
}

#[test]
fn dropped_listener_frees_port_and_resets_backlog() {
    let server = async || {
        let listener = TcpListener::bind(SERVER).await.unwrap();
        let (mut accepted, _) = listener.accept().await.unwrap();
        sleep(SECOND).await;
        drop(listener);
        // Accepted connections continue.
        accepted.write_all(b"on").await.unwrap();
        sleep(SECOND).await;
        let listener = TcpListener::bind(SERVER).await.unwrap();
        listener.accept().await.unwrap().0.write_all(b"again").await.unwrap();
        pending::<()>().await;
    };
    run(server, async || {
        let mut accepted = TcpStream::connect(SERVER).await.unwrap();
        let mut waits = TcpStream::connect(SERVER).await.unwrap();
        assert_eq!(waits.read(&mut [0]).await.unwrap_err().kind(), ErrorKind::ConnectionReset);
        let mut pair = [0; 2];
        accepted.read_exact(&mut pair).await.unwrap();
        assert_eq!(&pair, b"on");
        let refused = TcpStream::connect(SERVER).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        sleep(SECOND).await;
        let mut again = TcpStream::connect(SERVER).await.unwrap();
        assert_eq!(again.read(&mut [0; 9]).await.unwrap(), 5);
    });
}

#[test]
fn ended_connection_is_accepted_with_its_data() {
    let (checked, check) = shared::<bool>();
    let server = async move || {
        let listener = TcpListener::bind(SERVER).await.unwrap();
        sleep(SECOND).await;
        let (mut closed, _) = listener.accept().await.unwrap();
        let mut all = Vec::new();
        closed.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, b"one");
        let (mut reset, _) = listener.accept().await.unwrap();
        all.clear();
        let error = reset.read_to_end(&mut all).await.unwrap_err();
        assert_eq!((error.kind(), &all[..]), (ErrorKind::ConnectionReset, &b"two"[..]));
        *checked.borrow_mut() = true;
        pending::<()>().await;
    };
    run(server, async move || {
        let mut one = TcpStream::connect(SERVER).await.unwrap();
        one.write_all(b"one").await.unwrap();
        drop(one);
        let mut pair = TcpStream::connect(SERVER).await.unwrap();
        pair.write_all(b"two").await.unwrap();
        sleep(Duration::from_millis(10)).await;
        pair.set_zero_linger().unwrap();
        drop(pair);
        sleep(2 * SECOND).await;
        assert!(*check.borrow());
    });
}

#[test]
fn end_of_main_task_closes_all_connections() {
    let server = async || {
        let listener = TcpListener::bind(SERVER).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        drop(spawn(async move {
            let _stream = stream;
            pending::<()>().await;
        }));
        sleep(SECOND).await;
    };
    let (ended, end) = shared::<bool>();
    let client = async move || {
        let mut stream = TcpStream::connect(SERVER).await.unwrap();
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
        *ended.borrow_mut() = true;
        pending::<()>().await;
    };
    let mut pair = ShardPair::new(executor(server), executor(client));
    let mut stopped = false;
    for _ in 0..10_000 {
        if !stopped {
            stopped = pair.server.poll_once(pair.now).unwrap().stopped;
        }
        pair.client.poll_once(pair.now).unwrap();
        pair.now += Duration::from_millis(1);
    }
    assert!(stopped && *end.borrow(), "FIN must leave before the shard ends");
    assert_eq!(pair.server.handler().stats().streams, 0);
}

#[test]
fn stream_dropped_between_turns_closes_in_next_turn() {
    let (lent, taken) = shared::<Option<TcpStream>>();
    let server = accept_one(async move |stream: TcpStream| *lent.borrow_mut() = Some(stream));
    let (ended, end) = shared::<bool>();
    let client = async move || {
        let mut stream = TcpStream::connect(SERVER).await.unwrap();
        assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
        *ended.borrow_mut() = true;
        pending::<()>().await;
    };
    let mut pair = ShardPair::new(executor(server), executor(client));
    pair.advance(SECOND);
    assert_eq!(pair.server.handler().stats().streams, 1);
    assert!(!*end.borrow());
    drop(taken.borrow_mut().take().unwrap());
    pair.advance(SECOND);
    assert!(*end.borrow());
    assert_eq!(pair.server.handler().stats().streams, 0);
    // And one that outlives its shard.
    let (kept, keeps) = shared::<Option<TcpStream>>();
    run(accept_one(async |_| pending().await), async move || {
        *keeps.borrow_mut() = Some(TcpStream::connect(SERVER).await.unwrap());
    });
    drop(kept);
}

/// Sends an urgent byte and FIN.
struct UrgentSender;

impl Handler for UrgentSender {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        for _ in 0..3 {
            cx.connect(SERVER.parse().unwrap(), ConnectOptions::default())?;
        }
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        cx.send_urgent(conn, b"!").unwrap();
        cx.shutdown_write(conn).unwrap();
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

#[test]
fn urgent_byte_alone_does_not_hide_the_end() {
    let (checked, check) = shared::<bool>();
    let server = async move || {
        let listener = TcpListener::bind(SERVER).await.unwrap();
        let (mut a, _) = listener.accept().await.unwrap();
        let (b, _) = listener.accept().await.unwrap();
        let (c, _) = listener.accept().await.unwrap();
        assert_eq!(a.read(&mut [0]).await.unwrap(), 0);
        b.readable().await.unwrap();
        assert_eq!(b.try_read(&mut [0]).unwrap(), 0);
        assert_eq!(c.peek(&mut [0]).await.unwrap(), 0);
        *checked.borrow_mut() = true;
        pending::<()>().await;
    };
    let mut pair = ShardPair::new(executor(server), UrgentSender);
    pair.advance(SECOND);
    assert!(*check.borrow());
}
