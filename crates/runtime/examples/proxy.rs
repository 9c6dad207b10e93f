//! A TCP proxy with timeouts for connecting and for idle connections.
//!
//! `cargo run -p ginnel --example proxy -- crates/runtime/examples/tap.toml 10.1.0.1:8080`, then `curl
//! http://10.1.0.2/`.

use ginnel::net::{OwnedReadHalf, OwnedWriteHalf, TcpListener, TcpStream};
use ginnel::task::spawn;
use ginnel::time::{Duration, timeout};
use ginnel::{Config, Executor, Shard, StopFlag};
use std::io;
use std::net::SocketAddr;

/// Timeout for connecting to the server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout for a direction without data.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

async fn serve(upstream: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind("0.0.0.0:80").await?;
    loop {
        let (stream, peer) = listener.accept().await?;
        drop(spawn(async move {
            if let Err(e) = proxy(stream, upstream).await {
                eprintln!("{peer}: {e}");
            }
        }));
    }
}

/// Copies data between the client and the server until both directions have ended, or one of them fails.
async fn proxy(client: TcpStream, upstream: SocketAddr) -> io::Result<()> {
    let server = timeout(CONNECT_TIMEOUT, TcpStream::connect(upstream)).await??;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let there = spawn(copy(from_client, to_server));
    let back = copy(from_server, to_client).await;
    if back.is_err() {
        there.abort();
    }
    there.await??;
    back
}

/// Copies one direction. Dropping the write half at the end sends FIN.
async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> io::Result<()> {
    let mut buffer = vec![0; 16 << 10];
    loop {
        match timeout(IDLE_TIMEOUT, from.read(&mut buffer)).await?? {
            0 => return Ok(()),
            n => timeout(IDLE_TIMEOUT, to.write_all(&buffer[..n])).await??,
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const USAGE: &str = "usage: proxy CONFIGURATION ADDRESS:PORT";
    let mut arguments = std::env::args().skip(1);
    let config = Config::from_file(arguments.next().ok_or(USAGE)?.as_ref())?;
    let upstream = arguments.next().ok_or(USAGE)?.parse()?;
    let proxy = Executor::new(move || serve(upstream));
    Shard::builder(config).handler(proxy).build()?.run(&StopFlag::new()?)?;
    Ok(())
}

#[cfg(test)]
mod support;

#[cfg(test)]
mod tests {
    use super::{IDLE_TIMEOUT, serve, support};
    use ginnel::net::{TcpListener, TcpStream};
    use ginnel::task::spawn;
    use ginnel::time::now;
    use std::io;

    /// The other shard is both the client of the proxy and its server.
    #[test]
    fn data_passes_both_ways_until_idle_timeout() {
        support::run(
            || serve("10.0.0.2:8080".parse().unwrap()),
            async || {
                let listener = TcpListener::bind("0.0.0.0:8080").await?;
                let server = spawn(async move {
                    let (mut stream, _) = listener.accept().await?;
                    let mut question = Vec::new();
                    stream.read_to_end(&mut question).await?;
                    question.reverse();
                    stream.write_all(&question).await?;
                    drop(stream);
                    // The second connection never sends anything.
                    listener.accept().await
                });
                let mut client = TcpStream::connect("10.0.0.1:80").await?;
                client.write_all(b"abc").await?;
                client.shutdown().await?;
                let mut answer = Vec::new();
                client.read_to_end(&mut answer).await?;
                assert_eq!(answer, b"cba");

                let start = now();
                let mut client = TcpStream::connect("10.0.0.1:80").await?;
                let _silent = server.await??;
                assert_eq!(client.read(&mut [0]).await?, 0);
                let took = now().saturating_since(start);
                assert!(took >= IDLE_TIMEOUT && took < 2 * IDLE_TIMEOUT, "{took:?}");
                Ok::<(), io::Error>(())
            },
        );
    }
}
