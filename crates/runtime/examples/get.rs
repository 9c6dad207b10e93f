//! An HTTP client on hyper: fetches a page, with a timeout of ten seconds.
//!
//! `cargo run -p ginnel --example get --features hyper -- crates/runtime/examples/tap.toml 10.1.0.1:8080
//! /index.html`

use ginnel::compat::HyperExecutor;
use ginnel::net::TcpStream;
use ginnel::time::{Duration, timeout};
use ginnel::{Config, Executor, Shard, StopFlag};
use http_body_util::{BodyExt, Empty};
use hyper::Request;
use hyper::body::Bytes;
use hyper::rt::Executor as _;
use std::error::Error;
use std::io::Write;
use std::net::SocketAddr;

async fn get(server: SocketAddr, path: &str) -> Result<Bytes, Box<dyn Error>> {
    let stream = TcpStream::connect(server).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await?;
    HyperExecutor.execute(async move {
        if let Err(e) = connection.await {
            eprintln!("{server}: {e}");
        }
    });
    let request = Request::get(path).header("host", server.to_string()).body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    if !response.status().is_success() {
        return Err(response.status().to_string().into());
    }
    Ok(response.into_body().collect().await?.to_bytes())
}

async fn get_with_timeout(server: SocketAddr, path: &str) -> Result<Bytes, Box<dyn Error>> {
    timeout(Duration::from_secs(10), get(server, path)).await?
}

fn main() -> Result<(), Box<dyn Error>> {
    const USAGE: &str = "usage: get CONFIGURATION ADDRESS:PORT PATH";
    let mut arguments = std::env::args().skip(1);
    let config = Config::from_file(arguments.next().ok_or(USAGE)?.as_ref())?;
    let server = arguments.next().ok_or(USAGE)?.parse()?;
    let path = arguments.next().ok_or(USAGE)?;
    let client = Executor::new(async move || -> Result<(), Box<dyn Error>> {
        let page = get_with_timeout(server, &path).await?;
        Ok(std::io::stdout().write_all(&page)?)
    });
    Shard::builder(config).handler(client).build()?.run(&StopFlag::new()?)?;
    Ok(())
}

#[cfg(test)]
mod support;

#[cfg(test)]
mod tests {
    use super::{get_with_timeout, support};
    use ginnel::net::TcpListener;
    use std::io;

    #[test]
    fn fetches_a_page_and_times_out() {
        let server = async || -> io::Result<()> {
            let listener = TcpListener::bind("0.0.0.0:80").await?;
            let (mut stream, _) = listener.accept().await?;
            let mut request = [0; 500];
            let n = stream.read(&mut request).await?;
            assert!(request[..n].starts_with(b"GET /a HTTP/1.1\r\n"));
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npage").await?;
            let (_silent, _) = listener.accept().await?;
            core::future::pending().await
        };
        support::run(server, async || {
            let server = "10.0.0.1:80".parse().unwrap();
            assert_eq!(get_with_timeout(server, "/a").await.unwrap(), &b"page"[..]);
            let late = get_with_timeout(server, "/b").await.unwrap_err();
            assert_eq!(late.to_string(), "deadline has elapsed");
            Ok(())
        });
    }
}
