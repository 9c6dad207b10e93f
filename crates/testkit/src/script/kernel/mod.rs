//! Runs scripts against the Linux kernel in real time: over a TUN device in a network namespace of its own,
//! whose other side is the script.

mod calls;
pub(crate) mod sys;
pub mod tcp_info;
mod tun;

use super::assertion::Info;
use super::ast::{Directives, Target};
use super::backend::{Backend, FinishedCall, SentPacket};
use super::calls::{CallResult, Fd, Op};
use calls::KernelSockets;
use core::time::Duration;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::time::Instant;

/// Period of the kernel's timer tick (`CONFIG_HZ` = 250, the lowest common value except 100).
const JIFFY: Duration = Duration::from_millis(4);

/// Maximum delay of a packet's timestamp because this thread was not scheduled.
const SCHEDULING_LATENCY: Duration = Duration::from_millis(4);

/// Length of a `virtio_net_hdr`.
const VNET_HEADER_BYTES: usize = 10;

/// Returns the `virtio_net_hdr` of an inbound packet. If its payload is longer than `size`, the packet was
/// merged of segments of that many bytes.
fn vnet_header(packet: &[u8], size: u16) -> [u8; VNET_HEADER_BYTES] {
    let mut header = [0; VNET_HEADER_BYTES];
    if let Some(headers) = super::wire::headers_of_merged(packet, size) {
        // From `linux/virtio_net.h`: VIRTIO_NET_HDR_GSO_TCPV4 and VIRTIO_NET_HDR_GSO_TCPV6.
        header[1] = if packet[0] >> 4 == 4 { 1 } else { 4 };
        header[2..4].copy_from_slice(&headers.to_ne_bytes());
        header[4..6].copy_from_slice(&size.to_ne_bytes());
    }
    header
}

/// Returns why the kernel cannot run scripts here, or `None` if it can.
pub fn unavailable() -> Option<String> {
    std::thread::spawn(|| {
        let ip = super::ast::IpVersion::V4;
        tun::open(ip, &Directives::default())
            .err()
            .map(|e| format!("no network namespace with a TUN device: {e}"))
    })
    .join()
    .unwrap_or_else(|_| Some("the check for network namespaces panicked".into()))
}

/// Runs `work` with a backend, on a thread that alone is in the namespace.
///
/// # Errors
/// The kernel's error if the namespace cannot be set up.
pub fn with_backend<R: Send>(
    target: Target,
    directives: &Directives,
    work: impl FnOnce(&mut dyn Backend) -> R + Send,
) -> io::Result<R> {
    let run = || {
        let mut kernel = KernelBackend::new(target, directives)?;
        Ok(work(&mut kernel))
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(512 * 1024).spawn_scoped(scope, run)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Runs scripts against the kernel.
struct KernelBackend {
    start: Instant,
    tun: OwnedFd,
    /// Payload bytes of the segments of which an inbound packet was merged (`// gso`).
    gso: Option<u16>,
    sockets: KernelSockets,
    buffer: Vec<u8>,
    queue: VecDeque<SentPacket>,
    finished_rx: mpsc::Receiver<FinishedCall>,
    finished_tx: mpsc::Sender<FinishedCall>,
}

impl KernelBackend {
    fn new(target: Target, directives: &Directives) -> io::Result<Self> {
        let tun = tun::open(target.ip, directives)?;
        // Without the privilege for real-time priority, scripts still run but are late more often.
        let _ = sys::raise_priority();
        let (finished_tx, finished_rx) = mpsc::channel();
        Ok(Self {
            start: Instant::now(),
            tun,
            gso: directives.gso,
            sockets: KernelSockets::new(target.ip, directives.congestion_control()),
            buffer: vec![0; 1 << 16],
            queue: VecDeque::new(),
            finished_rx,
            finished_tx,
        })
    }

    /// Reads all packets that the kernel has sent.
    fn drain(&mut self) {
        while let Ok(len) = rustix::io::read(&self.tun, &mut self.buffer[..]) {
            let at = self.start.elapsed();
            let header = if self.gso.is_some() { VNET_HEADER_BYTES } else { 0 };
            self.queue.push_back(SentPacket { at, packet: self.buffer[header.min(len)..len].to_vec() });
        }
    }
}

impl Backend for KernelBackend {
    fn now(&mut self) -> Duration {
        self.start.elapsed()
    }

    fn wait(&mut self, until: Duration) -> Option<SentPacket> {
        loop {
            self.drain();
            if let Some(sent) = self.queue.pop_front() {
                return Some(sent);
            }
            let left = until.checked_sub(self.start.elapsed()).filter(|left| !left.is_zero())?;
            let nanos = u64::try_from(left.as_nanos()).unwrap_or(u64::MAX);
            // The loop repeats an interrupted wait.
            let _ = sys::wait_readable(self.tun.as_fd(), nanos);
        }
    }

    fn inject(&mut self, packet: &[u8]) {
        // The kernel processes the packet within this call. It rejects only malformed packets, which it would
        // have dropped anyway.
        let _ = match self.gso {
            Some(size) => rustix::io::write(&self.tun, &[&vnet_header(packet, size), packet].concat()),
            None => rustix::io::write(&self.tun, packet),
        };
        self.drain();
    }

    fn call(&mut self, op: &Op, new_fd: Option<Fd>, data: &[u8]) -> CallResult {
        let returned = self.sockets.call(op, new_fd, data);
        self.drain();
        returned
    }

    fn call_blocking(&mut self, call_id: usize, op: &Op, new_fd: Option<Fd>, data: &[u8]) {
        let (finished_tx, start) = (self.finished_tx.clone(), self.start);
        let finish = move |returned| {
            // The receiver is gone only if the script has failed already.
            let _ = finished_tx.send(FinishedCall { call_id, at: start.elapsed(), returned });
        };
        self.sockets.call_blocking(op, new_fd, data, Box::new(finish));
        self.drain();
    }

    fn take_finished_call(&mut self) -> Option<FinishedCall> {
        self.finished_rx.try_recv().ok()
    }

    fn info(&mut self, fd: Fd) -> Result<Info, String> {
        let bytes = self.sockets.tcp_info(fd).map_err(|e| format!("tcp_info of descriptor {fd}: {e}"))?;
        Ok(tcp_info::parse(&bytes))
    }

    fn timer_slack(&self, after: Duration) -> Duration {
        // A timer is armed for the tick after the next one and rounded up to the granularity of its wheel
        // level, which is at most an eighth of its length (kernel/time/timer.c).
        2 * JIFFY + SCHEDULING_LATENCY + after / 8
    }

    fn settle_time(&self) -> Duration {
        Duration::from_millis(2)
    }
}
