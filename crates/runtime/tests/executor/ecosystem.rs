//! Other crates on top: hyper's server and client, and the traits of futures and tokio.

use super::common::{SERVER, pattern, run, shared};
use core::convert::Infallible;
use core::time::Duration;
use futures_util::future::join_all;
use futures_util::stream::StreamExt;
use ginnel::compat::{HyperExecutor, HyperTimer};
use ginnel::net::{TcpListener, TcpStream};
use ginnel::task::spawn;
use ginnel::time::{interval, now, sleep};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};

/// Answers `GET /size/N` with N bytes, and echoes POST bodies. Counts in an `Rc`: nothing here is `Send`.
async fn answer(
    request: Request<Incoming>,
    count: std::rc::Rc<std::cell::RefCell<u32>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    *count.borrow_mut() += 1;
    let body = match (request.method(), request.uri().path()) {
        (&Method::GET, path) if path.starts_with("/size/") => {
            pattern(0..path["/size/".len()..].parse().unwrap()).into()
        }
        (&Method::GET, "/slow") => {
            sleep(Duration::from_secs(2)).await;
            Bytes::from_static(b"at last")
        }
        (&Method::POST, "/echo") => request.into_body().collect().await.unwrap().to_bytes(),
        _ => {
            let mut missing = Response::new(Full::default());
            *missing.status_mut() = StatusCode::NOT_FOUND;
            return Ok(missing);
        }
    };
    Ok(Response::new(Full::new(body)))
}

async fn serve(count: std::rc::Rc<std::cell::RefCell<u32>>) -> std::io::Result<()> {
    let listener = TcpListener::bind(SERVER).await?;
    let timer = HyperTimer::new();
    loop {
        let (stream, _) = listener.accept().await?;
        let count = std::rc::Rc::clone(&count);
        let service = service_fn(move |request| answer(request, std::rc::Rc::clone(&count)));
        drop(spawn(async move {
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(timer).header_read_timeout(Duration::from_secs(5));
            // The date would be that of the machine.
            http.auto_date_header(false);
            // The clients check errors.
            let _ = http.serve_connection(stream, service).await;
        }));
    }
}

/// Reads one response without hyper: head and body.
async fn response(stream: &mut TcpStream, unread: &mut Vec<u8>) -> (String, Vec<u8>) {
    let mut piece = [0; 1000];
    loop {
        if let Some(end) = unread.windows(4).position(|w| w == b"\r\n\r\n") {
            let head = String::from_utf8(unread[..end].to_vec()).unwrap().to_lowercase();
            let length = head.split("content-length: ").nth(1).unwrap();
            let length: usize = length.split("\r\n").next().unwrap().parse().unwrap();
            if unread.len() >= end + 4 + length {
                let body = unread[end + 4..end + 4 + length].to_vec();
                unread.drain(..end + 4 + length);
                return (head, body);
            }
        }
        let n = stream.read(&mut piece).await.unwrap();
        assert!(n > 0, "the response is incomplete");
        unread.extend_from_slice(&piece[..n]);
    }
}

#[test]
fn hyper_server_answers_pipelined_requests() {
    let (count, seen) = shared::<u32>();
    run(
        async move || serve(count).await,
        async move || {
            let mut stream = TcpStream::connect(SERVER).await.unwrap();
            let mut unread = Vec::new();
            for size in [0, 1, 100, 10_000, 300_000] {
                let request = format!("GET /size/{size} HTTP/1.1\r\nHost: a\r\n\r\n");
                stream.write_all(request.as_bytes()).await.unwrap();
                let (head, body) = response(&mut stream, &mut unread).await;
                assert!(head.starts_with("http/1.1 200 ok") && body == pattern(0..size), "{head}");
            }
            // Two pipelined requests, the second in pieces, and the last of the connection.
            stream.write_all(b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\nPOST /echo HTT").await.unwrap();
            assert!(response(&mut stream, &mut unread).await.0.starts_with("http/1.1 404"));
            sleep(Duration::from_secs(1)).await;
            stream.write_all(b"P/1.1\r\nHost: a\r\nConnection: close\r\n").await.unwrap();
            stream.write_all(b"Content-Length: 5\r\n\r\nhello").await.unwrap();
            assert_eq!(response(&mut stream, &mut unread).await.1, b"hello");
            assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
            assert_eq!(*seen.borrow(), 7);
        },
    );
}

#[test]
fn hyper_server_and_client_use_many_connections() {
    const CLIENTS: usize = 20;
    let (count, seen) = shared::<u32>();
    run(
        async move || serve(count).await,
        async move || {
            let clients = (0..CLIENTS).map(|i| {
                spawn(async move {
                    let stream = TcpStream::connect(SERVER).await.unwrap();
                    let (mut sender, connection) =
                        hyper::client::conn::http1::handshake(stream).await.unwrap();
                    hyper::rt::Executor::execute(&HyperExecutor, async move { connection.await.unwrap() });
                    for round in 0..5usize {
                        let body = pattern(i..i + 1 + round * 20_000);
                        let request = Request::post("/echo")
                            .header("host", "a")
                            .body(Full::<Bytes>::from(body.clone()))
                            .unwrap();
                        let response = sender.send_request(request).await.unwrap();
                        assert_eq!(response.status(), StatusCode::OK);
                        assert!(response.into_body().collect().await.unwrap().to_bytes() == body);
                    }
                })
            });
            for client in join_all(clients).await {
                client.unwrap();
            }
            assert_eq!(*seen.borrow(), 5 * CLIENTS as u32);
        },
    );
}

#[test]
fn hyper_timers_use_the_shards_time() {
    let (count, _) = shared::<u32>();
    run(
        async move || serve(count).await,
        async || {
            let start = now();
            let mut stream = TcpStream::connect(SERVER).await.unwrap();
            stream.write_all(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
            assert_eq!(response(&mut stream, &mut Vec::new()).await.1, b"at last");
            let took = now().saturating_since(start);
            assert!(took >= Duration::from_secs(2) && took < Duration::from_millis(2100), "{took:?}");
            // Half a head, and then nothing.
            stream.write_all(b"GET /slow HT").await.unwrap();
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).await.unwrap();
            let took = now().saturating_since(start);
            assert!(took >= Duration::from_secs(7) && took < Duration::from_millis(7200), "{took:?}");
        },
    );
}

#[test]
fn streams_and_halves_implement_futures_traits() {
    use futures_util::io::{AsyncReadExt, AsyncWriteExt, copy};
    let server = async || -> std::io::Result<()> {
        let listener = TcpListener::bind(SERVER).await?;
        let mut incoming = listener.incoming();
        while let Some(stream) = incoming.next().await {
            let (reader, mut writer) = stream?.into_split();
            drop(spawn(async move {
                let copied = copy(reader, &mut writer).await;
                AsyncWriteExt::close(&mut writer).await.and(copied)
            }));
        }
        Ok(())
    };
    run(server, async || {
        let mut stream = TcpStream::connect(SERVER).await.unwrap();
        AsyncWriteExt::write_all(&mut stream, &pattern(0..50_000)).await.unwrap();
        AsyncWriteExt::flush(&mut stream).await.unwrap();
        AsyncWriteExt::close(&mut stream).await.unwrap();
        let mut got = Vec::new();
        AsyncReadExt::read_to_end(&mut &stream, &mut got).await.unwrap();
        assert!(got == pattern(0..50_000));
        let start = now();
        let ticks: Vec<_> = interval(Duration::from_millis(7)).take(3).collect().await;
        assert_eq!(ticks[2].saturating_since(start), Duration::from_millis(14));
    });
}

#[test]
fn streams_and_halves_implement_tokio_traits() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
    let server = async || -> std::io::Result<()> {
        let listener = TcpListener::bind(SERVER).await?;
        loop {
            let (mut stream, _) = listener.accept().await?;
            drop(spawn(async move {
                let (mut reader, mut writer) = stream.split();
                let copied = copy(&mut reader, &mut writer).await;
                AsyncWriteExt::shutdown(&mut writer).await.and(copied)
            }));
        }
    };
    run(server, async || {
        let mut stream = TcpStream::connect(SERVER).await.unwrap();
        AsyncWriteExt::write_all(&mut stream, &pattern(0..50_000)).await.unwrap();
        AsyncWriteExt::flush(&mut stream).await.unwrap();
        AsyncWriteExt::shutdown(&mut stream).await.unwrap();
        let mut got = Vec::new();
        AsyncReadExt::read_to_end(&mut stream, &mut got).await.unwrap();
        assert!(got == pattern(0..50_000));
    });
}
