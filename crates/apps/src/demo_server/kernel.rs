//! Runs the server on the kernel's sockets: non-blocking, with edge-triggered epoll, and listeners of its own
//! for each worker (`SO_REUSEPORT`).

use super::counters::WorkerCounters;
use super::options::DemoServerOptions;
use super::server::{DemoCore, StackConnections, Trace};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::{Error, Instant, StopFlag, clock};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Size of the receive buffer in bytes.
const READ_BYTES: usize = 64 << 10;
/// Largest capacity in bytes that an empty buffer of unread bytes keeps.
const UNREAD_KEPT: usize = 4 << 10;
/// Reads of one socket before others get their turn.
const READS_MAX: usize = 16;
/// Connections accepted from one listener before others get their turn.
const ACCEPTS_MAX: usize = 64;
/// Most events of one `epoll_wait`.
const EVENTS_MAX: usize = 1024;
/// Interval at which the worker looks for the end of the program.
const POLL: Duration = Duration::from_millis(100);
/// Time that a worker without descriptors waits before it accepts again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
/// Length of the queue of a listener.
const BACKLOG: i32 = 4096;
/// Marks the events of listeners.
const LISTENER: u64 = 1 << 63;

/// A connection: the slot of its socket, and a count that changes when the slot gets another socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KernelConn {
    slot: u32,
    generation: u32,
}

#[derive(Default)]
struct Socket {
    fd: Option<OwnedFd>,
    /// Counts the connections of the slot, without the highest bit.
    generation: u32,
    /// The server's token.
    token: u32,
    is_connecting: bool,
    /// Bytes that the server has not consumed.
    unread: Vec<u8>,
    /// True if the slot is in the list of those to read from.
    is_queued: bool,
    /// True if the server has been told of the peer's FIN.
    has_ended: bool,
}

struct KernelTransport {
    epoll: OwnedFd,
    sockets: Vec<Socket>,
    vacant: Vec<u32>,
    /// Connections whose sockets are read again although epoll reports no new event.
    queued: Vec<KernelConn>,
    /// Connections whose send failed.
    broken: Vec<KernelConn>,
}

impl KernelTransport {
    /// Watches a socket. Returns its connection.
    fn add(&mut self, fd: OwnedFd, token: u32, is_connecting: bool) -> Result<KernelConn, Errno> {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.sockets.push(Socket::default());
            // A process has fewer descriptors than 2^31.
            (self.sockets.len() - 1) as u32
        });
        let socket = &mut self.sockets[slot as usize];
        let conn = KernelConn { slot, generation: socket.generation };
        let data = epoll::EventData::new_u64(u64::from(conn.generation) << 32 | u64::from(slot));
        let flags =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        if let Err(error) = epoll::add(&self.epoll, &fd, data, flags) {
            self.vacant.push(slot);
            return Err(error);
        }
        (socket.fd, socket.token, socket.is_connecting) = (Some(fd), token, is_connecting);
        Ok(conn)
    }

    fn open(&mut self, to: SocketAddr, token: u32) -> Result<KernelConn, Errno> {
        let fd = stream_socket(to)?;
        sockopt::set_tcp_nodelay(&fd, true)?;
        match net::connect(&fd, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => self.add(fd, token, true),
            Err(error) => Err(error),
        }
    }

    fn socket(&mut self, conn: KernelConn) -> Option<&mut Socket> {
        self.sockets
            .get_mut(conn.slot as usize)
            .filter(|socket| socket.generation == conn.generation && socket.fd.is_some())
    }

    /// Takes the socket of a connection, whose handle is stale from now on.
    fn take(&mut self, conn: KernelConn) -> Option<OwnedFd> {
        let socket = self.socket(conn)?;
        let fd = socket.fd.take();
        let mut unread = core::mem::take(&mut socket.unread);
        unread.clear();
        unread.shrink_to(UNREAD_KEPT);
        let generation = socket.generation.wrapping_add(1) & (u32::MAX >> 1);
        *socket = Socket { generation, unread, ..Socket::default() };
        self.vacant.push(conn.slot);
        fd
    }
}

impl StackConnections<KernelConn> for KernelTransport {
    fn connect(&mut self, to: SocketAddr, token: u32) -> Option<KernelConn> {
        self.open(to, token).ok()
    }

    fn send(&mut self, conn: KernelConn, bytes: &[u8]) -> usize {
        let Some(Socket { fd: Some(fd), .. }) = self.socket(conn) else { return 0 };
        match net::send(fd, bytes, net::SendFlags::NOSIGNAL) {
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(_) => {
                self.broken.push(conn);
                0
            }
        }
    }

    fn finish(&mut self, conn: KernelConn) {
        if let Some(Socket { fd: Some(fd), .. }) = self.socket(conn) {
            // Fails only if the connection has ended, which is reported.
            let _ = net::shutdown(fd, net::Shutdown::Write);
        }
    }

    fn close(&mut self, conn: KernelConn) {
        drop(self.take(conn));
    }

    fn abort(&mut self, conn: KernelConn) {
        if let Some(fd) = self.take(conn) {
            // If SO_LINGER cannot be set, the socket is closed without a reset, which also ends the
            // connection.
            let _ = sockopt::set_socket_linger(&fd, Some(Duration::ZERO));
        }
    }

    fn resume_reading(&mut self, conn: KernelConn) {
        if let Some(socket) = self.socket(conn)
            && !core::mem::replace(&mut socket.is_queued, true)
        {
            self.queued.push(conn);
        }
    }
}

fn stream_socket(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    net::socket_with(family, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)
}

/// Listens on `address`, beside the other workers.
fn listen(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let fd = stream_socket(address)?;
    sockopt::set_socket_reuseaddr(&fd, true)?;
    sockopt::set_socket_reuseport(&fd, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&fd, true)?;
    }
    // Inherited by the connections, so that accepting needs no further call.
    sockopt::set_tcp_nodelay(&fd, true)?;
    net::bind(&fd, &address)?;
    net::listen(&fd, BACKLOG)?;
    Ok(fd)
}

/// Raises the limit on open descriptors to its maximum.
///
/// # Errors
/// The maximum is too small for the descriptors that every process needs, or the kernel refuses.
pub fn raise_descriptor_limit() -> Result<(), Error> {
    crate::load::kernel::raise_descriptor_limit(0, 0)
}

/// A worker: its listeners and its server.
pub struct KernelWorker {
    server: DemoCore<KernelConn>,
    net: KernelTransport,
    listeners: Vec<OwnedFd>,
    counters: Arc<WorkerCounters>,
    buffer: Box<[u8]>,
}

impl KernelWorker {
    /// Opens the listeners of worker `worker`, so that connections can be made. `trace` gets the lines of
    /// `--debug`.
    ///
    /// # Errors
    /// Returns an error that names the address that cannot be listened on.
    pub fn open(
        options: &DemoServerOptions,
        worker: usize,
        counters: Arc<WorkerCounters>,
        trace: Option<Trace>,
    ) -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| Error::io("epoll", e))?;
        let mut listeners = Vec::new();
        for (index, address) in options.listen().iter().enumerate() {
            let failed = |e: Errno| Error::io(format!("listen on {address}"), e);
            let fd = listen(*address).map_err(failed)?;
            let data = epoll::EventData::new_u64(LISTENER | index as u64);
            epoll::add(&epoll, &fd, data, epoll::EventFlags::IN).map_err(failed)?;
            listeners.push(fd);
        }
        let server = DemoCore::new(options, worker, Arc::clone(&counters), trace, clock::now());
        let (sockets, vacant, queued, broken) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let net = KernelTransport { epoll, sockets, vacant, queued, broken };
        Ok(Self { server, net, listeners, counters, buffer: vec![0; READ_BYTES].into() })
    }

    /// Serves until `stop` is set.
    ///
    /// # Errors
    /// Returns an error if events cannot be waited for.
    pub fn run(&mut self, stop: &StopFlag) -> Result<(), Error> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let mut next_tick = clock::now();
        while !stop.is_set() {
            let wait = if self.net.queued.is_empty() { POLL } else { Duration::ZERO };
            let wait = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
            events.clear();
            match epoll::wait(&self.net.epoll, rustix::buffer::spare_capacity(&mut events), Some(&wait)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Error::io("epoll", error)),
            }
            for event in &events {
                self.event(event.data.u64(), event.flags);
            }
            for conn in core::mem::take(&mut self.net.queued) {
                if let Some(socket) = self.net.socket(conn) {
                    socket.is_queued = false;
                    self.read(conn);
                }
            }
            self.end_broken();
            self.tick(&mut next_tick);
        }
        Ok(())
    }

    fn tick(&mut self, next: &mut Instant) {
        let now = clock::now();
        if now >= *next {
            *next = now + Duration::from_secs(1);
            self.server.tick(now, &mut self.net);
        }
    }

    fn event(&mut self, data: u64, flags: epoll::EventFlags) {
        if data & LISTENER != 0 {
            return self.accept((data & !LISTENER) as usize);
        }
        let conn = KernelConn { slot: data as u32, generation: (data >> 32) as u32 };
        let Some(socket) = self.net.socket(conn) else { return };
        let token = socket.token;
        if socket.is_connecting {
            let Some(fd) = &socket.fd else { return };
            match sockopt::socket_error(fd) {
                Ok(Ok(())) if flags.contains(epoll::EventFlags::OUT) => {
                    socket.is_connecting = false;
                    self.server.connected(token, conn, &mut self.net);
                }
                Ok(Ok(())) => return,
                Ok(Err(_)) | Err(_) => return self.end(conn),
            }
        } else if flags.contains(epoll::EventFlags::OUT) {
            self.server.writable(token, conn, &mut self.net);
        }
        let end = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        if flags.intersects(epoll::EventFlags::IN | end) {
            self.read(conn);
        }
    }

    fn accept(&mut self, listener: usize) {
        let Some(listener) = self.listeners.get(listener) else { return };
        for _ in 0..ACCEPTS_MAX {
            let fd = match net::accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(fd) => fd,
                Err(Errno::AGAIN) => return,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    self.counters.accept_failures.add(1);
                    // The listener stays readable: without a pause the worker would try again all the time.
                    return std::thread::sleep(ACCEPT_PAUSE);
                }
                // The connection has ended already, or a signal has arrived.
                Err(_) => continue,
            };
            match self.net.add(fd, 0, false) {
                Ok(conn) => {
                    let token = self.server.accepted(conn);
                    if let Some(socket) = self.net.socket(conn) {
                        socket.token = token;
                    }
                }
                Err(_) => self.counters.accept_failures.add(1),
            }
        }
    }

    /// Delivers what was not consumed, and what has arrived since.
    fn read(&mut self, conn: KernelConn) {
        for _ in 0..READS_MAX {
            let Some(socket) = self.net.socket(conn) else { return };
            let token = socket.token;
            let mut unread = core::mem::take(&mut socket.unread);
            if !unread.is_empty() {
                let used = self.server.data(token, conn, &unread, &mut self.net);
                unread.drain(..used);
                if unread.is_empty() {
                    unread.shrink_to(UNREAD_KEPT);
                }
            }
            let Some(socket) = self.net.socket(conn) else { return };
            socket.unread = unread;
            if !socket.unread.is_empty() || socket.has_ended {
                return;
            }
            let Some(fd) = &socket.fd else { return };
            match net::recv(fd, &mut self.buffer[..], net::RecvFlags::empty()) {
                Ok((0, _)) => {
                    socket.has_ended = true;
                    return self.server.peer_closed(token, conn, &mut self.net);
                }
                Ok((len, _)) => {
                    let used = self.server.data(token, conn, &self.buffer[..len], &mut self.net);
                    if let Some(socket) = self.net.socket(conn) {
                        socket.unread.extend_from_slice(&self.buffer[used..len]);
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Err(_) => return self.end(conn),
            }
        }
        self.net.resume_reading(conn);
    }

    /// Reports that a connection has ended.
    fn end(&mut self, conn: KernelConn) {
        let Some(token) = self.net.socket(conn).map(|socket| socket.token) else { return };
        drop(self.net.take(conn));
        self.server.closed(token, conn, &mut self.net);
    }

    fn end_broken(&mut self) {
        while let Some(conn) = self.net.broken.pop() {
            self.end(conn);
        }
    }
}
