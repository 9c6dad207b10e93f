//! An echo server: a task for each connection.
//!
//! `cargo run -p ginnel --example echo -- crates/runtime/examples/tap.toml`, then `nc 10.1.0.2 7`.

use ginnel::net::{TcpListener, TcpStream};
use ginnel::{Config, Executor, Shard, StopFlag, task};
use std::io;

async fn serve() -> io::Result<()> {
    let listener = TcpListener::bind("0.0.0.0:7").await?;
    loop {
        let (stream, peer) = listener.accept().await?;
        drop(task::spawn(async move {
            if let Err(e) = echo(stream).await {
                eprintln!("{peer}: {e}");
            }
        }));
    }
}

async fn echo(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    loop {
        // An array would be part of the task all the time. This buffer exists only while there is data to
        // echo.
        stream.readable().await?;
        let mut buffer = vec![0; 4096];
        match stream.read(&mut buffer).await? {
            0 => return Ok(()),
            n => stream.write_all(&buffer[..n]).await?,
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: echo CONFIGURATION")?;
    let config = Config::from_file(path.as_ref())?;
    Shard::builder(config).handler(Executor::new(serve)).build()?.run(&StopFlag::new()?)?;
    Ok(())
}

#[cfg(test)]
mod support;

#[cfg(test)]
mod tests {
    use super::{serve, support};
    use ginnel::net::TcpStream;

    #[test]
    fn echoes_bytes() {
        support::run(serve, async || {
            let mut stream = TcpStream::connect("10.0.0.1:7").await?;
            stream.write_all(&[7; 10_000]).await?;
            stream.shutdown().await?;
            let mut back = Vec::new();
            assert_eq!(stream.read_to_end(&mut back).await?, 10_000);
            Ok(())
        });
    }
}
