//! Executors on several shards.

use super::threads::{Pinger, only_v4};
use super::{Fixture, stack_config};
use crate::executor::Executor;
use crate::net::{TcpListener, UdpSocket};
use crate::task::spawn;
use core::time::Duration;
use ginnel_devices::memory::RssMode;
use ginnel_stack::udp::UdpOptions;
use std::io;

/// Echoes data of connections, and datagrams.
async fn echo() -> io::Result<()> {
    let shared = UdpOptions { reuse_port: true, ..UdpOptions::default() };
    let socket = UdpSocket::bind_with("10.0.0.1:7", shared).await?;
    assert!(UdpSocket::bind("10.0.0.1:7").await.is_err(), "it is taken");
    let listener = TcpListener::bind("10.0.0.1:7").await?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        assert_eq!(socket.local_addr()?.port(), 7);
        drop(spawn(async move {
            let mut buffer = [0; 64];
            loop {
                match stream.read(&mut buffer).await? {
                    0 => return Ok::<_, io::Error>(()),
                    n => stream.write_all(&buffer[..n]).await?,
                }
            }
        }));
    }
}

#[test]
fn tasks_of_every_shard_serve_every_queue() {
    let server = |_| Executor::new(echo);
    let mut fixture =
        Fixture::new(only_v4(stack_config(3)), RssMode::RoundRobin, server, Pinger { left: 60 });
    let served = |fixture: &Fixture<_, Pinger>| -> Vec<u64> {
        fixture.shards.iter().map(|shard| shard.core.stack.tcp_stats().passive_opens).collect()
    };
    fixture.advance(Duration::from_secs(2));
    assert_eq!(served(&fixture).iter().sum::<u64>(), 60);
    assert!(served(&fixture).iter().all(|&n| n >= 8), "{:?}", served(&fixture));
}
