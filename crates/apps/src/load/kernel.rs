//! The generator on the kernel's sockets: non-blocking, with edge-triggered epoll and one session per thread.

use super::busy_time::BusyTime;
use super::plan::WorkerShare;
use super::run::{self, LoadJob, LoadSession, WorkerStats};
use super::session::Network;
use super::stats::{Failure, LiveProgress};
use core::net::{IpAddr, SocketAddr};
use core::num::NonZeroU64;
use core::time::Duration;
use ginnel::resource_limit::resource_limit;
use ginnel::{Error, Instant, StopFlag, clock};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Size of the receive buffer in bytes.
const READ_BYTES: usize = 64 << 10;
/// Most events of one `epoll_wait`.
const EVENTS_MAX: usize = 1024;
/// Descriptors that the process needs besides the connections of its workers.
const SPARE_DESCRIPTORS: u64 = 64;
/// Descriptors that a worker needs besides its connections: its epoll instance.
const DESCRIPTORS_PER_WORKER: u64 = 1;

struct Socket {
    fd: Option<OwnedFd>,
    /// Counts the connections of the slot: a batch of events may still have events of an earlier one.
    generation: u32,
    connecting: bool,
}

struct KernelNetwork {
    epoll: OwnedFd,
    sockets: Vec<Socket>,
    /// Connections whose send failed: slot, generation and the failure.
    broken: Vec<(u32, u32, Failure)>,
    nodelay: bool,
}

impl KernelNetwork {
    fn open(&mut self, slot: u32, to: SocketAddr, from: Option<IpAddr>) -> Result<(), Errno> {
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = net::socket_with(family, SocketType::STREAM, flags, None)?;
        if self.nodelay {
            sockopt::set_tcp_nodelay(&fd, true)?;
        }
        if let Some(from) = from {
            // Without SO_REUSEADDR, ports in TIME_WAIT could not be bound again, towards any destination.
            sockopt::set_socket_reuseaddr(&fd, true)?;
            net::bind(&fd, &SocketAddr::new(from, 0))?;
        }
        match net::connect(&fd, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(error),
        }
        while self.sockets.len() <= slot as usize {
            self.sockets.push(Socket { fd: None, generation: 0, connecting: false });
        }
        let socket = &mut self.sockets[slot as usize];
        let data = epoll::EventData::new_u64(u64::from(socket.generation) << 32 | u64::from(slot));
        let events =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(&self.epoll, &fd, data, events)?;
        (socket.fd, socket.connecting) = (Some(fd), true);
        Ok(())
    }

    fn drop_socket(&mut self, slot: u32) -> Option<OwnedFd> {
        let socket = self.sockets.get_mut(slot as usize)?;
        socket.generation = socket.generation.wrapping_add(1);
        socket.fd.take()
    }

    fn is_current(&self, slot: u32, generation: u32) -> bool {
        self.sockets.get(slot as usize).is_some_and(|s| s.generation == generation && s.fd.is_some())
    }
}

impl Network for KernelNetwork {
    fn connect(&mut self, slot: u32, to: SocketAddr, from: Option<IpAddr>) -> Result<(), Failure> {
        self.open(slot, to, from).map_err(connect_failure)
    }

    fn send(&mut self, slot: u32, bytes: &[u8]) -> usize {
        let socket = &self.sockets[slot as usize];
        let Some(fd) = &socket.fd else { return 0 };
        match net::send(fd, bytes, net::SendFlags::NOSIGNAL) {
            Ok(n) => n,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(error) => {
                self.broken.push((slot, socket.generation, send_failure(error)));
                0
            }
        }
    }

    fn close(&mut self, slot: u32) {
        drop(self.drop_socket(slot));
    }

    fn abort(&mut self, slot: u32) {
        if let Some(fd) = self.drop_socket(slot) {
            // If SO_LINGER cannot be set, the socket is closed without a reset, which also ends the
            // connection.
            let _ = sockopt::set_socket_linger(&fd, Some(Duration::ZERO));
        }
    }
}

/// Returns the failure of a connection that was not established.
const fn connect_failure(error: Errno) -> Failure {
    match error {
        Errno::CONNREFUSED => Failure::Refused,
        Errno::TIMEDOUT => Failure::ConnectTimeout,
        Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::ACCESS | Errno::PERM => Failure::Unreachable,
        Errno::CONNRESET | Errno::PIPE | Errno::CONNABORTED => Failure::Reset,
        _ => Failure::Exhausted,
    }
}

/// Returns the failure of an established connection that cannot receive.
const fn receive_failure(error: Errno) -> Failure {
    match error {
        Errno::TIMEDOUT => Failure::Timeout,
        other => connect_failure(other),
    }
}

/// Returns the failure of an established connection that cannot send.
const fn send_failure(error: Errno) -> Failure {
    match error {
        Errno::TIMEDOUT => Failure::Timeout,
        _ => Failure::Reset,
    }
}

/// Runs a worker's share on this thread and returns its results.
///
/// # Errors
/// The kernel has no epoll instance for the worker, or waiting on it fails.
pub fn run<J: LoadJob>(
    job: &J,
    share: WorkerShare,
    progress: Arc<LiveProgress>,
    stop: &StopFlag,
) -> Result<J::Stats, Error> {
    KernelWorker::new(job, share, progress)?.run(stop)
}

/// Raises the limit on open descriptors to its maximum.
///
/// # Errors
/// The maximum is too small for the descriptors of connections, workers and the rest of the process, or the
/// kernel refuses.
pub fn raise_descriptor_limit(connections: u64, workers: u64) -> Result<(), Error> {
    let needed = connections + DESCRIPTORS_PER_WORKER * workers + SPARE_DESCRIPTORS;
    let limit = resource_limit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        setrlimit(Resource::Nofile, raised)
            .map_err(|e| Error::io("raise the limit on open descriptors", e))?;
    }
    match limit.maximum {
        Some(maximum) if needed > maximum => Err(Error::application(format!(
            "--connections {connections} is too many: this process may have {maximum} open descriptors (raise RLIMIT_NOFILE, or use --stack light)"
        ))),
        _ => Ok(()),
    }
}

struct KernelWorker<S> {
    session: S,
    net: KernelNetwork,
    buffer: Box<[u8]>,
    busy: BusyTime,
    /// Waits shorter than this time are spent polling, because a sleep would end too late.
    spin: Duration,
}

impl<S: LoadSession> KernelWorker<S> {
    fn new<J: LoadJob<Session = S>>(
        job: &J,
        share: WorkerShare,
        progress: Arc<LiveProgress>,
    ) -> Result<Self, Error> {
        // Timer slack delays wake-ups, and the delay would be measured as latency. A failure is ignored.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| Error::io("epoll", e))?;
        let session = job.session(share, progress, clock::now());
        let net =
            KernelNetwork { epoll, sockets: Vec::new(), broken: Vec::new(), nodelay: job.needs_nodelay() };
        let buffer = vec![0; READ_BYTES].into();
        Ok(Self { session, net, buffer, busy: BusyTime::default(), spin: job.kernel_spin() })
    }

    fn run(mut self, stop: &StopFlag) -> Result<S::Stats, Error> {
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let mut woken_at = clock::now();
        loop {
            let now = clock::now();
            if stop.is_set() {
                self.session.interrupt(now);
            }
            let Some(next) = self.session.poll(now, &mut self.net) else { break };
            self.end_broken(now);
            let before = clock::now();
            let wait = timeout(next, before, self.spin);
            events.clear();
            match epoll::wait(&self.net.epoll, rustix::buffer::spare_capacity(&mut events), Some(&wait)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Error::io("epoll", error)),
            }
            let now = clock::now();
            if self.session.is_measuring() {
                self.busy.count(before - woken_at, false);
                self.busy.count(now - before, true);
            }
            woken_at = now;
            for event in &events {
                let (data, flags) = (event.data.u64(), event.flags);
                self.event(data as u32, (data >> 32) as u32, flags, now);
            }
            self.end_broken(now);
            run::think(self.session.take_think_time());
        }
        let mut stats = self.session.stats().clone();
        stats.set_busy(self.busy.share());
        Ok(stats)
    }

    fn event(&mut self, slot: u32, generation: u32, flags: epoll::EventFlags, now: Instant) {
        if !self.net.is_current(slot, generation) {
            return;
        }
        let socket = &mut self.net.sockets[slot as usize];
        if socket.connecting {
            let Some(fd) = &socket.fd else { return };
            match sockopt::socket_error(fd) {
                Ok(Ok(())) if flags.contains(epoll::EventFlags::OUT) => {
                    socket.connecting = false;
                    self.session.connected(slot, now, &mut self.net);
                }
                Ok(Ok(())) => return,
                Ok(Err(error)) | Err(error) => return self.end(slot, connect_failure(error), now),
            }
        } else if flags.contains(epoll::EventFlags::OUT) && !flags.contains(epoll::EventFlags::ERR) {
            // After an error a send would only take the error away from `read`.
            self.session.writable(slot, now, &mut self.net);
        }
        let end = epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR;
        if flags.intersects(epoll::EventFlags::IN | end) {
            self.read(slot, generation, flags.intersects(end), now);
        }
    }

    /// Reads the available data. `to_end` is true if the end of the stream is signalled. Otherwise a read
    /// that does not fill the buffer has emptied the socket.
    fn read(&mut self, slot: u32, generation: u32, to_end: bool, now: Instant) {
        while self.net.is_current(slot, generation) {
            let Some(fd) = &self.net.sockets[slot as usize].fd else { return };
            match net::recv(fd, &mut self.buffer[..], net::RecvFlags::empty()) {
                Ok((0, _)) => return self.session.peer_closed(slot, now, &mut self.net),
                Ok((n, _)) => {
                    self.session.data(slot, &self.buffer[..n], now, &mut self.net);
                    if n < READ_BYTES && !to_end {
                        return;
                    }
                }
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Err(error) => return self.end(slot, receive_failure(error), now),
            }
        }
    }

    fn end(&mut self, slot: u32, failure: Failure, now: Instant) {
        drop(self.net.drop_socket(slot));
        self.session.ended(slot, failure, now, &mut self.net);
    }

    fn end_broken(&mut self, now: Instant) {
        while let Some((slot, generation, failure)) = self.net.broken.pop() {
            if self.net.is_current(slot, generation) {
                self.end(slot, failure, now);
            }
        }
    }
}

/// Returns how long to sleep for an event that is due at `next`: not at all if that is within `spin`.
fn timeout(next: Instant, now: Instant, spin: Duration) -> Timespec {
    let wait = next.saturating_since(now);
    let wait = if wait < spin { Duration::ZERO } else { wait };
    Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() }
}

#[cfg(test)]
mod tests;
