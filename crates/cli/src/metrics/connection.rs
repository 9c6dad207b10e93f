//! A connection of the exporter: hyper on a blocking socket, in the thread of the connection.

use core::cell::Cell;
use core::convert::Infallible;
use core::pin::{Pin, pin};
use core::task::{Context, Poll, Waker};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::rt::ReadBufCursor;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A connection without a request for this time is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(150);
/// Longest time from the first byte of a request to the last byte of its answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest head of a request in bytes.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// How many times in a row hyper may be polled without reading or writing anything.
const IDLE_POLLS_MAX: u32 = 64;

/// The version of the text format (Prometheus, "Exposition formats").
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Serves a connection until its end. `scrape` returns the present samples.
pub fn serve(client: TcpStream, scrape: impl Fn() -> String) -> io::Result<()> {
    let _ = client.set_nodelay(true);
    let calls = Rc::new(Cell::new(0));
    let stream = BlockingStream { client, request_began: None, calls: calls.clone() };
    let service = service_fn(|request: Request<Incoming>| {
        core::future::ready(Ok::<_, Infallible>(answer(&request, &scrape)))
    });
    let mut builder = http1::Builder::new();
    // With half_close, hyper does not read while it answers: on a blocking socket that would wait for the
    // next request.
    builder.half_close(true).header_read_timeout(None).max_buf_size(HEAD_BYTES_MAX);
    let mut connection = pin!(builder.serve_connection(stream, service));
    let mut context = Context::from_waker(Waker::noop());
    let mut idle_polls = 0;
    while idle_polls < IDLE_POLLS_MAX {
        let before = calls.get();
        // Reading and writing block, so a pending connection only wants to be called again.
        if let Poll::Ready(result) = connection.as_mut().poll(&mut context) {
            return result.map_err(io::Error::other);
        }
        idle_polls = if calls.get() == before { idle_polls + 1 } else { 0 };
    }
    Err(ErrorKind::TimedOut.into())
}

fn answer(request: &Request<Incoming>, scrape: &impl Fn() -> String) -> Response<Full<Bytes>> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/metrics") => (StatusCode::OK, scrape()),
        (&Method::GET | &Method::HEAD, "/") => (StatusCode::OK, "The metrics are at /metrics.\n".into()),
        (&Method::GET | &Method::HEAD, _) => {
            (StatusCode::NOT_FOUND, "There is nothing here: the metrics are at /metrics.\n".into())
        }
        _ => (StatusCode::METHOD_NOT_ALLOWED, "Only GET and HEAD are possible.\n".into()),
    };
    let mut answer = Response::builder().status(status).header(CONTENT_TYPE, TEXT_FORMAT);
    if status == StatusCode::METHOD_NOT_ALLOWED {
        answer = answer.header(ALLOW, "GET, HEAD");
    }
    // The parts are constants.
    answer.body(Full::new(text.into())).unwrap_or_default()
}

/// A socket whose calls block, up to their deadlines.
struct BlockingStream {
    client: TcpStream,
    /// When the first byte of the present request arrived. `None` between an answer and the next request.
    request_began: Option<Instant>,
    /// Number of reads and writes so far.
    calls: Rc<Cell<u64>>,
}

impl BlockingStream {
    /// Counts a read or a write, and returns the time until its deadline.
    ///
    /// # Errors
    /// `TimedOut` after the deadline.
    fn time_left(&self) -> io::Result<Duration> {
        self.calls.set(self.calls.get() + 1);
        let left = match self.request_began {
            None => IDLE_TIMEOUT,
            Some(began) => REQUEST_TIMEOUT.saturating_sub(began.elapsed()),
        };
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }

    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.client.set_read_timeout(Some(self.time_left()?))?;
        let count = retry(|| self.client.read(buffer))?;
        self.request_began.get_or_insert_with(Instant::now);
        Ok(count)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.client.set_write_timeout(Some(self.time_left()?))?;
        retry(|| self.client.write(bytes))
    }
}

fn retry(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Err(ErrorKind::TimedOut.into()),
            result => return result,
        }
    }
}

impl hyper::rt::Read for BlockingStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        mut out: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut buffer = [0; 4096];
        let room = out.remaining().min(buffer.len());
        let count = self.read(&mut buffer[..room]);
        Poll::Ready(count.map(|count| out.put_slice(&buffer[..count])))
    }
}

impl hyper::rt::Write for BlockingStream {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(self.write(bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The answer is complete.
        self.request_began = None;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.client.shutdown(std::net::Shutdown::Write))
    }
}
