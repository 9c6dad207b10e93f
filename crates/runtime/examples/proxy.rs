//! A TCP proxy with time-outs: for connecting, and for silence.
//!
//! `cargo run -p ginnel --example proxy -- crates/runtime/examples/tap.toml 10.1.0.1:8080`, then `curl http://10.1.0.2/`.

use ginnel::net::{OwnedReadHalf, OwnedWriteHalf, TcpListener, TcpStream};
use ginnel::task::spawn;
use ginnel::time::{Duration, timeout};
use ginnel::{Config, Executor, Shard, StopFlag};
use std::io;
use std::net::SocketAddr;

/// How long a connection to the server behind may take.
const CONNECT: Duration = Duration::from_secs(3);
/// How long a direction may be silent.
const SILENCE: Duration = Duration::from_secs(60);

async fn serve(upstream: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind("0.0.0.0:80").await?;
    loop {
        let (stream, peer) = listener.accept().await?;
        drop(spawn(async move {
            if let Err(e) = pass(stream, upstream).await {
                eprintln!("{peer}: {e}");
            }
        }));
    }
}

/// Connects the client to the server behind until both have nothing more to say, or one of them fails.
async fn pass(client: TcpStream, upstream: SocketAddr) -> io::Result<()> {
    let server = timeout(CONNECT, TcpStream::connect(upstream)).await??;
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

/// Dropping the writing half at the end passes FIN on.
async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> io::Result<()> {
    let mut buffer = vec![0; 16 << 10];
    loop {
        match timeout(SILENCE, from.read(&mut buffer)).await?? {
            0 => return Ok(()),
            n => timeout(SILENCE, to.write_all(&buffer[..n])).await??,
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
    use super::{SILENCE, serve, support};
    use ginnel::net::{TcpListener, TcpStream};
    use ginnel::task::spawn;
    use ginnel::time::now;
    use std::io;

    /// The other shard is both: the proxy's client and the server behind.
    #[test]
    fn bytes_pass_both_ways_and_silence_ends_it() {
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
                    // The second one never says anything.
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
                assert!(took >= SILENCE && took < 2 * SILENCE, "{took:?}");
                Ok::<(), io::Error>(())
            },
        );
    }
}
