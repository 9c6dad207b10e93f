//! The responder as tasks, one for each connection.

use super::{SERVER, ShardServer};
use crate::http;
use core::net::Ipv4Addr;
use core::pin::Pin;
use core::sync::atomic::{AtomicUsize, Ordering};
use ginnel::net::{TcpListener, TcpStream};
use ginnel::{Error, Executor, ListenOptions, SocketOptions, task};
use ginnel_stack::device::Device;
use ginnel_stack::tcp::config::TcpConfig;
use ginnel_stack::time::Instant;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

/// A function that creates the first task.
pub type Main = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = io::Result<()>>>>>;

/// A shard with its tasks.
pub struct TaskServer {
    /// The underlying server.
    pub server: ShardServer<Executor<Main>>,
    future_bytes: Arc<AtomicUsize>,
}

impl TaskServer {
    /// Creates a responder with the default response. It then closes the connection, or with `keep_alive`
    /// waits for the next request.
    ///
    /// # Errors
    /// `tcp` is not a valid configuration.
    pub fn new(device: Device, keep_alive: bool, tcp: TcpConfig, now: Instant) -> Result<Self, Error> {
        let future_bytes = Arc::new(AtomicUsize::new(0));
        let size = Arc::clone(&future_bytes);
        let main: Main = Box::new(move || Box::pin(listen(keep_alive, size)));
        Ok(Self { server: ShardServer::new(device, Executor::new(main), tcp, now)?, future_bytes })
    }

    /// Returns the size of the future of a connection's task in bytes.
    pub fn future_bytes(&self) -> usize {
        self.future_bytes.load(Ordering::Relaxed)
    }
}

impl super::Server for TaskServer {
    fn turn(&mut self, now: Instant) -> usize {
        self.server.turn(now)
    }
}

async fn listen(keep_alive: bool, future_bytes: Arc<AtomicUsize>) -> io::Result<()> {
    let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
    let options = ListenOptions { socket, ..ListenOptions::default() };
    let listener = TcpListener::bind_with((Ipv4Addr::UNSPECIFIED, SERVER.port), options).await?;
    let response: Rc<[u8]> = http::response(keep_alive).into();
    loop {
        let (stream, _) = listener.accept().await?;
        let task = serve(stream, Rc::clone(&response), keep_alive);
        future_bytes.store(size_of_val(&task), Ordering::Relaxed);
        drop(task::spawn(task));
    }
}

/// The task of a connection, written for many connections: the buffer that is only needed while reading is
/// not a part of the future.
async fn serve(mut stream: TcpStream, response: Rc<[u8]>, keep_alive: bool) -> io::Result<()> {
    loop {
        stream.readable().await?;
        match read_request(&stream)? {
            ReadOutcome::Request => stream.write_all(&response).await?,
            ReadOutcome::None => continue,
            ReadOutcome::End => return Ok(()),
        }
        if !keep_alive {
            return Ok(());
        }
    }
}

/// Result of reading from a client.
enum ReadOutcome {
    Request,
    None,
    End,
}

fn read_request(stream: &TcpStream) -> io::Result<ReadOutcome> {
    let mut buffer = [0; 1024];
    match stream.try_read(&mut buffer) {
        Ok(0) => Ok(ReadOutcome::End),
        Ok(n) if http::is_request(&buffer[..n]) => Ok(ReadOutcome::Request),
        Ok(_) => Ok(ReadOutcome::None),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(ReadOutcome::None),
        Err(e) => Err(e),
    }
}
