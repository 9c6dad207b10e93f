//! Datagrams.

use super::common::{executor, run};
use crate::placement_suite::pair::ShardPair;
use core::future::pending;
use core::time::Duration;
use futures_util::future::join;
use ginnel::net::UdpSocket;
use ginnel::time::{now, sleep, timeout};
use std::io::ErrorKind;

const CLIENT: &str = "10.0.0.1:53";

async fn echo() {
    let socket = UdpSocket::bind(CLIENT).await.unwrap();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let (n, from) = socket.recv_from(&mut buffer).await.unwrap();
        assert_eq!(socket.send_to(&buffer[..n], from).await.unwrap(), n);
    }
}

#[test]
fn datagrams_of_all_sizes_are_echoed() {
    run(echo, async || {
        let socket = UdpSocket::bind("0.0.0.0:0").await.unwrap();
        socket.connect(CLIENT).await.unwrap();
        assert_ne!(socket.local_addr().unwrap().port(), 0);
        let mut buffer = vec![0; 1 << 16];
        for size in [0, 1, 1472, 1473, 9000, 65_507] {
            let sent: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
            socket.send(&sent).await.unwrap();
            let n = socket.recv(&mut buffer).await.unwrap();
            assert!(n == size && buffer[..n] == sent);
        }
        assert!(socket.send(&vec![0; 65_508]).await.is_err());
        // A datagram is truncated to the buffer, and its full length is known.
        socket.send(b"longer").await.unwrap();
        let datagram = socket.recv_datagram(&mut buffer[..2]).await.unwrap();
        assert_eq!((datagram.len, datagram.from.to_string().as_str()), (6, CLIENT));
    });
}

#[test]
fn error_of_connected_socket_is_returned_by_recv() {
    run(
        async || pending::<()>().await,
        async || {
            let socket = UdpSocket::bind("0.0.0.0:0").await.unwrap();
            let unconnected = socket.send(b"x").await.unwrap_err();
            assert_eq!(unconnected.raw_os_error(), Some(89), "EDESTADDRREQ");
            socket.connect("10.0.0.1:54").await.unwrap();
            socket.send(b"x").await.unwrap();
            let error = socket.recv(&mut [0]).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
            let taken = UdpSocket::bind(socket.local_addr().unwrap()).await;
            assert_eq!(taken.unwrap_err().kind(), ErrorKind::AddrInUse);
        },
    );
}

#[test]
fn cancelled_receive_loses_nothing() {
    let client = async || {
        let socket = UdpSocket::bind("10.0.0.2:2000").await.unwrap();
        let mut buffer = [0; 10];
        assert!(timeout(Duration::from_millis(5), socket.recv_from(&mut buffer)).await.is_err());
        socket.send_to(b"a", CLIENT).await.unwrap();
        socket.send_to(b"b", CLIENT).await.unwrap();
        sleep(Duration::from_millis(5)).await;
        // Both have arrived; each of two waiting tasks gets one.
        let mut other = [0; 10];
        let (a, b) = join(socket.recv_from(&mut buffer), socket.recv_from(&mut other)).await;
        assert_eq!((a.unwrap().0, b.unwrap().0, buffer[0], other[0]), (1, 1, b'a', b'b'));
        socket.send_to(b"cc", CLIENT).await.unwrap();
        let (first, _) = join(socket.recv_from(&mut buffer), async {
            let waits = timeout(Duration::from_millis(9), socket.recv_from(&mut other)).await;
            assert!(waits.is_err(), "only one datagram was sent");
        })
        .await;
        assert_eq!(first.unwrap().0, 2);
        drop(socket);
        UdpSocket::bind("10.0.0.2:2000").await.unwrap();
        pending::<()>().await;
    };
    let mut pair = ShardPair::new(executor(echo), executor(client));
    pair.advance(Duration::from_secs(1));
    let stats = pair.client.handler().stats();
    assert_eq!((stats.tasks, stats.sleeps, stats.wait_lists), (1, 0, 0));
}

#[test]
fn sender_waits_for_a_full_device() {
    const COUNT: u32 = 3000;
    let server = async || {
        let socket = UdpSocket::bind(CLIENT).await.unwrap();
        let mut buffer = [0; 1400];
        for expected in 0..COUNT {
            let (n, from) = socket.recv_from(&mut buffer).await.unwrap();
            assert_eq!((n, &buffer[..4]), (1400, &expected.to_be_bytes()[..]));
            if expected + 1 == COUNT {
                socket.send_to(b"all", from).await.unwrap();
            }
        }
        pending::<()>().await;
    };
    run(server, async || {
        let socket = UdpSocket::bind("0.0.0.0:0").await.unwrap();
        // Resolves the neighbour first: until then only a few datagrams may be queued.
        let mut datagram = [0; 1400];
        socket.send_to(b"", "10.0.0.1:54").await.unwrap();
        sleep(Duration::from_millis(10)).await;
        let start = now();
        for i in 0..COUNT {
            datagram[..4].copy_from_slice(&i.to_be_bytes());
            socket.send_to(&datagram, CLIENT).await.unwrap();
        }
        assert!(now() > start, "the device was never full");
        assert_eq!(socket.recv(&mut datagram).await.unwrap(), 3);
    });
}
