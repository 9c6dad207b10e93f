//! Packets per second over memif in one direction, against two processes of DPDK's testpmd: no protocol
//! extension, no GSO, one queue.

use crate::harness::machine::{Cpus, pin};
use crate::harness::pairs::{self, Bound, Measurement};
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use core::time::Duration;
use ginnel::clock;
use ginnel_devices::memif::{Memif, MemifConfig, Role, SocketName, open};
use ginnel_stack::device::{RxBurst, TxMeta};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const PROGRAM: &str = "dpdk-testpmd";
/// Frames per flush: testpmd's default burst.
const BURST: usize = 32;
/// Longest time until the link comes up.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Measures frames of 64 and 1500 bytes, including the Ethernet header.
pub fn rate(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let found = Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if let Err(error) = found {
        return Err(MeasureError::Skipped(format!("{PROGRAM}: {error} (install Debian's package dpdk-dev)")));
    }
    let cpus = Cpus::choose()?;
    let time = Duration::from_secs_f64(options.seconds(3.0));
    let mut results = Vec::new();
    for bytes in [64, 1500] {
        let name = format!("memif-rate/{bytes}");
        if options.wants(&name) {
            let ours = Box::new(|| ours(cpus, bytes, time));
            let theirs: pairs::Arm<'_> = Box::new(|| theirs(cpus, bytes, time));
            results.push(pairs::run(&name, "packets/s", options, Bound::Machine, ours, Some(theirs))?);
        }
    }
    Ok(results)
}

fn device(socket: &Path, role: Role) -> Result<Memif, MeasureError> {
    let name = SocketName::Path(socket.into());
    Ok(open(&MemifConfig { offload: false, ..MemifConfig::new(name, role) })?)
}

/// One thread sends as client, as fast as the ring permits, and one receives as server. Both poll.
fn ours(cpus: Cpus, bytes: usize, time: Duration) -> Result<Measurement, MeasureError> {
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("socket");
    let (mut server, mut client) = (device(&socket, Role::Server)?, device(&socket, Role::Client)?);
    if !client.link.wait_for(true, CONNECT_TIMEOUT) {
        return Err(MeasureError::Failed("the memif link did not come up".into()));
    }
    let (stop, received) = (AtomicBool::new(false), AtomicU64::new(0));
    let frame = vec![0x5a; bytes];
    let (mut rx, mut tx) = (server.queues.remove(0).rx, client.queues.remove(0).tx);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| -> std::io::Result<()> {
            pin(cpus.client)?;
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..BURST {
                    let Some(room) = tx.reserve(bytes) else { break };
                    room.copy_from_slice(&frame);
                    tx.commit(bytes, TxMeta::default());
                }
                tx.flush(clock::now());
            }
            Ok(())
        });
        let receiver = scope.spawn(|| -> std::io::Result<()> {
            pin(cpus.server)?;
            let mut total = 0;
            while !stop.load(Ordering::Relaxed) {
                let mut burst = RxBurst::new();
                rx.rx_burst(clock::now(), &mut burst);
                total += burst.iter().filter(|frame| frame.bytes.len() == bytes).count() as u64;
                received.store(total, Ordering::Relaxed);
            }
            Ok(())
        });
        std::thread::sleep(time / 5);
        let (before, start) = (received.load(Ordering::Relaxed), Instant::now());
        std::thread::sleep(time);
        let (count, seconds) = (received.load(Ordering::Relaxed) - before, start.elapsed().as_secs_f64());
        stop.store(true, Ordering::Relaxed);
        for thread in [sender, receiver] {
            thread.join().map_err(|_| MeasureError::Failed("a thread panicked".into()))??;
        }
        Ok(Measurement::new(count as f64 / seconds))
    })
}

/// A testpmd process on one CPU.
struct Testpmd(Child);

impl Testpmd {
    fn start(cpu: usize, role: &str, socket: &Path, arguments: &[&str]) -> Result<Self, MeasureError> {
        let device = format!("net_memif0,role={role},socket={},socket-abstract=no", socket.display());
        let mut command = Command::new(PROGRAM);
        command.args([
            "--no-huge",
            "-m",
            "128",
            "--no-pci",
            "--no-shconf",
            "--log-level=1",
            "--vdev",
            &device,
        ]);
        // testpmd's main thread only prints occasionally, so it may share the CPU of the forwarding thread.
        command.arg(format!("--lcores=0@{cpu},1@{cpu}"));
        command.args(["--", "--total-num-mbufs=4096", "--auto-start", "--no-lsc-interrupt", "--no-mlockall"]);
        command.args(["--no-flush-rx", "--stats-period=1"]).args(arguments);
        Ok(Self(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?))
    }
}

impl Drop for Testpmd {
    /// Waits for the process, so that its CPU time counts as this process's children.
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One testpmd only receives, as server, and one only sends.
fn theirs(cpus: Cpus, bytes: usize, time: Duration) -> Result<Measurement, MeasureError> {
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("socket");
    let mut receiver = Testpmd::start(cpus.server, "server", &socket, &["--forward-mode=rxonly"])?;
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    while !socket.exists() {
        if Instant::now() > deadline {
            return Err(MeasureError::Failed(format!("{PROGRAM} does not listen on its socket")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let size = format!("--txpkts={bytes}");
    let _sender = Testpmd::start(cpus.client, "client", &socket, &["--forward-mode=txonly", &size])?;
    let output = receiver
        .0
        .stdout
        .take()
        .ok_or_else(|| MeasureError::Failed("the standard output of testpmd is not piped".into()))?;
    // testpmd prints its counter every second; the first nonzero value is the start.
    let mut first: Option<(u64, Instant)> = None;
    for line in BufReader::new(output).lines() {
        let line = line?;
        let Some(rest) = line.trim().strip_prefix("RX-packets:") else { continue };
        let now = Instant::now();
        let count: u64 = rest.split_whitespace().next().and_then(|n| n.parse().ok()).unwrap_or(0);
        match first {
            None if count > 0 => first = Some((count, now)),
            Some((before, start)) if now - start >= time => {
                return Ok(Measurement::new((count - before) as f64 / (now - start).as_secs_f64()));
            }
            None if now > deadline => break,
            _ => {}
        }
    }
    Err(MeasureError::Failed(format!("{PROGRAM} received nothing")))
}
