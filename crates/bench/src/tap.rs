//! Bulk transfers between a Ginnel host and the Linux kernel over TAP.

use crate::bulk::BulkTransfer;
use crate::harness::MeasureError;
use crate::harness::machine::{Cpus, pin, thread_cpu_time};
use crate::harness::pairs::Measurement;
use crate::host::StackHost;
use crate::namespace;
use crate::two_threads::PollTime;
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::time::Duration;
use ginnel::clock;
use ginnel_devices::faults::{self, LinkSpec};
use ginnel_devices::tap::{self, TapConfig};
use ginnel_stack::device::Device;
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::tcp::config::TcpConfig;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};

/// Address of the kernel.
pub const KERNEL_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
/// Address of the Ginnel host.
pub const STACK_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);

/// Name of the kernel's interface.
pub const INTERFACE: &str = "bench0";
/// Bytes that the kernel's end reads or writes in one call.
const CHUNK_BYTES: usize = 256 << 10;
/// Timeout of blocking calls of the kernel's end, after which it checks whether the transfer is over.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Longest time to open a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Port of the next transfer. Each uses a new port, so that no segments of the last transfer interfere.
static NEXT_PORT: AtomicU16 = AtomicU16::new(5001);

/// The sender of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// The Ginnel host sends, and the kernel receives.
    Ours,
    /// The kernel sends, and the Ginnel host receives.
    Kernel,
}

/// A transfer.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// The sender.
    pub sender: Sender,
    /// CPUs of the two ends.
    pub cpus: Cpus,
    /// TCP configuration of the Ginnel host.
    pub tcp: TcpConfig,
    /// Time before the measurement.
    pub warm_up: Duration,
    /// Length of the measurement.
    pub measure: Duration,
    /// Faults of the link and their seed.
    pub link: Option<(LinkSpec, u64)>,
}

/// Opens the TAP device and gives the kernel's interface `addresses`.
pub fn open(cpus: Cpus, addresses: Vec<(IpAddr, u8)>) -> Result<Device, MeasureError> {
    let config =
        TapConfig { name: Some(INTERFACE.into()), kernel_addresses: addresses, ..TapConfig::default() };
    let device = tap::open(&config).map_err(|e| MeasureError::Skipped(e.to_string()))?;
    if !namespace::receive_on(INTERFACE, cpus.client) {
        println!("  the kernel's receive processing runs on the stack's CPU: /sys could not be mounted");
    }
    Ok(device)
}

/// Runs a transfer. The figure is the payload in Mbit/s.
pub fn transfer(t: &Transfer) -> Result<Measurement, MeasureError> {
    let mut device = open(t.cpus, vec![(KERNEL_ADDRESS.into(), 24)])?;
    if let Some((link, seed)) = &t.link {
        device = faults::wrap(device, link, *seed);
    }
    let over = AtomicBool::new(false);
    let received = AtomicU64::new(0);
    let port = NEXT_PORT.fetch_add(1, Ordering::Relaxed);
    let listener = TcpListener::bind((KERNEL_ADDRESS, port))?;
    std::thread::scope(|scope| {
        let kernel = scope.spawn(|| run_kernel_end(t, &listener, port, &over, &received));
        let ours = scope.spawn(|| {
            let result = run_stack_end(t, device, port, &received);
            over.store(true, Ordering::Relaxed);
            result
        });
        let mut measured = ours.join().expect("the stack's end does not panic")?;
        let share = kernel.join().expect("the kernel's end does not panic")?;
        measured.facts.insert("kernel_end_cpu".into(), share);
        Ok(measured)
    })
}

fn run_stack_end(
    t: &Transfer,
    device: Device,
    port: u16,
    received: &AtomicU64,
) -> Result<Measurement, MeasureError> {
    pin(t.cpus.server)?;
    let mut now = clock::now();
    let mut host = StackHost::new(device, STACK_ADDRESS, None, t.tcp.clone(), now);
    let mut bulk = match t.sender {
        Sender::Ours => BulkTransfer::sender(&mut host.stack),
        Sender::Kernel => BulkTransfer::receiver(),
    };
    match t.sender {
        Sender::Ours => {
            let to = SocketAddr::new(KERNEL_ADDRESS.into(), port);
            let opened = host.stack.connect(now, to, &ConnectOptions::default());
            opened.map_err(|e| MeasureError::Failed(e.to_string()))?;
        }
        Sender::Kernel => {
            let local = SocketAddr::new(STACK_ADDRESS.into(), port);
            let listening = host.stack.listen(local, ListenOptions::default());
            listening.map_err(|e| MeasureError::Failed(e.to_string()))?;
        }
    }
    let give_up = now + CONNECT_TIMEOUT;
    let mut opened = None;
    let mut counted_from = None;
    let mut load = PollTime::default();
    loop {
        let frames = host.turn(now, &mut bulk);
        let end = clock::now();
        load.count(frames, end - now);
        now = end;
        let bytes = match t.sender {
            Sender::Ours => received.load(Ordering::Relaxed),
            Sender::Kernel => bulk.received,
        };
        match (opened, counted_from) {
            (None, _) if bulk.opened > 0 => opened = Some(now),
            (None, _) if now >= give_up => {
                return Err(MeasureError::Failed("the connection was not established in time".into()));
            }
            (Some(at), None) if now - at >= t.warm_up => {
                counted_from = Some((now, bytes));
                load = PollTime::default();
            }
            (_, Some((at, before))) if now - at >= t.measure => {
                let stats = host.stack.tcp_stats();
                let mut measured =
                    Measurement::new((bytes - before) as f64 * 8.0 / (now - at).as_secs_f64() / 1e6)
                        .with("our_busy_time", 1.0 - load.idle_time())
                        .with("our_idle_polls", load.idle_polls())
                        .with("packets_to_us", stats.segments_in as f64)
                        .with("packets_to_kernel", stats.segments_out as f64)
                        .with("our_retransmissions", stats.retransmitted as f64);
                if bulk.ended > 0 {
                    measured.problems.push("the connection ended before the measurement did".into());
                }
                return Ok(measured);
            }
            _ => {}
        }
    }
}

/// Runs the kernel's end and returns the share of a CPU that its thread used.
fn run_kernel_end(
    t: &Transfer,
    listener: &TcpListener,
    port: u16,
    over: &AtomicBool,
    received: &AtomicU64,
) -> Result<f64, MeasureError> {
    pin(t.cpus.client)?;
    let began = std::time::Instant::now();
    let result = match t.sender {
        Sender::Ours => receive_on_kernel(listener, over, received),
        Sender::Kernel => send_from_kernel(SocketAddr::new(STACK_ADDRESS.into(), port), over),
    };
    let share = thread_cpu_time().as_secs_f64() / began.elapsed().as_secs_f64();
    match result {
        // The Ginnel host stops without closing the connection.
        Err(e) if !over.load(Ordering::Relaxed) => {
            Err(MeasureError::Failed(format!("the kernel's end: {e}")))
        }
        _ => Ok(share),
    }
}

fn receive_on_kernel(listener: &TcpListener, over: &AtomicBool, received: &AtomicU64) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let (mut stream, _) = retry(over, || {
        std::thread::sleep(Duration::from_millis(1));
        listener.accept()
    })?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(POLL_INTERVAL))?;
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match retry(over, || stream.read(&mut buffer))? {
            0 => return Ok(()),
            count => received.fetch_add(count as u64, Ordering::Relaxed),
        };
    }
}

fn send_from_kernel(to: SocketAddr, over: &AtomicBool) -> io::Result<()> {
    // The Ginnel host may not listen yet.
    let mut stream = retry(over, || match connect_with_cubic(to) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => Err(io::ErrorKind::WouldBlock.into()),
        other => other,
    })?;
    stream.set_write_timeout(Some(POLL_INTERVAL))?;
    let buffer = vec![0; CHUNK_BYTES];
    loop {
        retry(over, || stream.write(&buffer))?;
    }
}

/// Connects with CUBIC. It is chosen before the connection is opened, because pacing that another algorithm
/// enabled would remain.
fn connect_with_cubic(to: SocketAddr) -> io::Result<TcpStream> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt};
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_tcp_congestion(&socket, "cubic")?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(CONNECT_TIMEOUT))?;
    connect(&socket, &to)?;
    Ok(socket.into())
}

/// Errors after a timeout, or after the machine was suspended (signal(7)).
const RETRIED_ERRORS: [io::ErrorKind; 3] =
    [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut, io::ErrorKind::Interrupted];

/// Repeats a call until it succeeds, fails, or the transfer is over.
fn retry<R>(over: &AtomicBool, mut attempt: impl FnMut() -> io::Result<R>) -> io::Result<R> {
    loop {
        if over.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match attempt() {
            Err(e) if RETRIED_ERRORS.contains(&e.kind()) => {}
            result => return result,
        }
    }
}
