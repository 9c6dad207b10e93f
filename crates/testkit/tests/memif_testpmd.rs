//! memif with DPDK's testpmd at the other end (Debian: dpdk-dev), in both roles.

use ginnel_devices::conformance::sleep;
use ginnel_devices::memif::{Memif, MemifConfig, Role, SocketName, open};
use ginnel_stack::device::{Device, Gso, GsoKind, RxBurst, RxChecksum, TxMeta};
use ginnel_stack::time::Instant;
use ginnel_stack::wire::checksum::{Sum, pseudo_v4};
use ginnel_testkit::skip;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(30);
const PROGRAM: &str = "dpdk-testpmd";
/// Number of frames in flight, less than the queues of either end hold.
const WINDOW: usize = 32;

/// A temporary directory for a socket, removed with this value.
struct TempFolder(PathBuf);

impl TempFolder {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("ginnel-testpmd-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A testpmd process that returns the frames that it receives.
struct Testpmd(Child);

impl Testpmd {
    fn start(role: &str, socket: &Path, queues: u16, mode: &str) -> Self {
        let (socket, is_abstract) = match socket.to_str().unwrap().strip_prefix('@') {
            Some(name) => (name, "yes"),
            None => (socket.to_str().unwrap(), "no"),
        };
        let device = format!("net_memif0,role={role},socket={socket},socket-abstract={is_abstract},id=3");
        let mut command = Command::new(PROGRAM);
        // Without --no-shconf it would leave files behind, and a second process would need another file
        // prefix.
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
        command.args([
            "--",
            "--total-num-mbufs=4096",
            "--auto-start",
            "--no-lsc-interrupt",
            "--no-mlockall",
            "--no-flush-rx",
        ]);
        command.args([
            format!("--forward-mode={mode}"),
            format!("--rxq={queues}"),
            format!("--txq={queues}"),
        ]);
        // Without this option it reads commands, and exits at the end of its input.
        command.arg("--stats-period=3600");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        Self(child)
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns true and records the reason if the test cannot run here.
fn is_skipped(test: &str) -> bool {
    let found = Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let reason = match found {
        Ok(_) if cfg!(target_os = "linux") => return false,
        Ok(_) => "memif is for Linux".into(),
        Err(error) => format!("{PROGRAM}: {error} (Debian: dpdk-dev)"),
    };
    skip(test, &reason);
    true
}

fn config(socket: &Path, role: Role, queues: u16) -> MemifConfig {
    let name = match socket.to_str().unwrap().strip_prefix('@') {
        Some(name) => SocketName::Abstract(name.into()),
        None => SocketName::Path(socket.into()),
    };
    MemifConfig { id: 3, queues, ..MemifConfig::new(name, role) }
}

/// Opens a device and connects it to testpmd.
fn with_testpmd(role: Role, socket: &Path, queues: u16, mode: &str) -> (Memif, Testpmd) {
    let memif = open(&config(socket, role, queues)).unwrap();
    let testpmd =
        Testpmd::start(if role == Role::Server { "client" } else { "server" }, socket, queues, mode);
    assert!(memif.link.wait_for(true, TIMEOUT), "the link stays down");
    (memif, testpmd)
}

fn frame(number: usize, len: usize) -> Vec<u8> {
    let mut frame = vec![0x02, 0x77, 0, 0, 0, 0x77, 0x02, 0x77, 0, 0, 0, 0x78, 0x88, 0xb5];
    frame.extend((number as u32).to_be_bytes());
    frame.extend((frame.len()..len).map(|at| (number * 31 + at * 7) as u8));
    frame
}

/// Waits for a free buffer and sends a frame. testpmd in the role of the client offers its first buffers some
/// time after the link is up.
fn send(device: &mut Device, bytes: &[u8], meta: TxMeta) {
    let deadline = std::time::Instant::now() + TIMEOUT;
    while device.tx.reserve(bytes.len()).is_none() {
        assert!(std::time::Instant::now() < deadline, "the queue stays full");
        device.tx.flush(Instant::ZERO);
    }
    device.tx.reserve(bytes.len()).expect("a free buffer").copy_from_slice(bytes);
    device.tx.commit(bytes.len(), meta);
    device.tx.flush(Instant::ZERO);
}

/// Receives `count` frames. Sleeps in between, so that testpmd must wake the device.
fn receive(device: &mut Device, count: usize) -> Vec<(Vec<u8>, RxChecksum)> {
    let (mut received, deadline) = (Vec::new(), std::time::Instant::now() + TIMEOUT);
    while received.len() < count {
        assert!(std::time::Instant::now() < deadline, "{} of {count} frames received", received.len());
        let mut burst = RxBurst::new();
        device.rx.rx_burst(Instant::ZERO, &mut burst);
        received.extend(burst.iter().map(|frame| (frame.bytes.to_vec(), frame.checksum)));
        drop(burst);
        if received.len() < count && device.rx.arm() {
            sleep(device.rx.wake_fd(), Duration::from_secs(1));
        }
    }
    received
}

fn check_echo(device: &mut Device, sizes: impl Iterator<Item = usize>) {
    let frames: Vec<_> = sizes.enumerate().map(|(number, size)| frame(number, size)).collect();
    for window in frames.chunks(WINDOW) {
        window.iter().for_each(|frame| send(device, frame, TxMeta::default()));
        let received = receive(device, window.len());
        for (sent, (received, checksum)) in window.iter().zip(&received) {
            assert!(sent == received, "a frame of {} bytes changed", sent.len());
            assert_eq!(*checksum, RxChecksum::Unverified);
        }
    }
}

#[test]
fn testpmd_returns_frames_of_every_size() {
    if is_skipped("testpmd_returns_frames_of_every_size") {
        return;
    }
    for role in [Role::Server, Role::Client] {
        let folder = TempFolder::new();
        let (mut memif, _testpmd) = with_testpmd(role, &folder.0.join("socket"), 1, "io");
        check_echo(&mut memif.queues[0], 60..=1514);
        let counters = &memif.stats;
        let wrong = [&counters.refused, &counters.violations, &counters.rx_malformed, &counters.tx_dropped];
        assert_eq!(wrong.map(|counter| counter.load(Ordering::Relaxed)), [0; 4], "{role:?}");
    }
}

/// Returns an ICMP echo request or reply.
fn ping(number: u16, source: [u8; 4], target: [u8; 4], macs: [[u8; 6]; 2], kind: u8) -> Vec<u8> {
    let mut frame = macs.concat();
    frame.extend([0x08, 0x00, 0x45, 0, 0, 48, 0, 0, 0x40, 0, 64, 1, 0, 0]);
    frame.extend([source, target].concat());
    let checksum = Sum::of(&frame[14..34]).finish();
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame.extend([kind, 0, 0, 0, 0x77, 0x77]);
    frame.extend(number.to_be_bytes());
    frame.extend([0x5a; 20]);
    let checksum = Sum::of(&frame[34..]).finish();
    frame[36..38].copy_from_slice(&checksum.to_be_bytes());
    frame
}

#[test]
fn testpmd_answers_pings_over_an_abstract_socket() {
    if is_skipped("testpmd_answers_pings_over_an_abstract_socket") {
        return;
    }
    for role in [Role::Server, Role::Client] {
        let name = format!("@ginnel-testpmd-{}-{role:?}", std::process::id());
        let (mut memif, _testpmd) = with_testpmd(role, Path::new(&name), 1, "icmpecho");
        let device = &mut memif.queues[0];
        let (ours, theirs) = (device.tx.capabilities().mac, [0x02, 0x88, 0, 0, 0, 1]);
        for number in 0..100 {
            send(device, &ping(number, [10, 8, 0, 1], [10, 8, 0, 2], [theirs, ours], 8), TxMeta::default());
            let (answer, _) = receive(device, 1).remove(0);
            let same = |range: core::ops::Range<usize>, expected: &[u8]| answer.get(range) == Some(expected);
            assert!(same(0..6, &ours) && same(26..34, &[10, 8, 0, 2, 10, 8, 0, 1]), "{answer:?}");
            assert!(same(34..35, &[0]) && same(40..42, &number.to_be_bytes()), "{answer:?}");
        }
    }
}

#[test]
fn every_queue_has_its_counterpart_in_testpmd() {
    if is_skipped("every_queue_has_its_counterpart_in_testpmd") {
        return;
    }
    for role in [Role::Server, Role::Client] {
        let folder = TempFolder::new();
        let (mut memif, _testpmd) = with_testpmd(role, &folder.0.join("socket"), 3, "io");
        for (device, size) in memif.queues.iter_mut().zip([100, 500, 1000]) {
            check_echo(device, (0..200).map(|number| size + number));
        }
    }
}

/// Returns a TCP segment, or a super-frame with segments of `size` bytes, whose checksum is left to the
/// device.
fn tcp(payload: usize, size: Option<u16>) -> (Vec<u8>, TxMeta) {
    let mut frame = vec![0; 54 + payload];
    frame[..12].copy_from_slice(&[2, 0x77, 0, 0, 0, 0x77, 2, 0x77, 0, 0, 0, 0x78]);
    frame[12..15].copy_from_slice(&[8, 0, 0x45]);
    frame[16..18].copy_from_slice(&(40 + payload as u16).to_be_bytes());
    frame[22..24].copy_from_slice(&[64, 6]);
    frame[26..34].copy_from_slice(&[10, 8, 0, 1, 10, 8, 0, 2]);
    let checksum = Sum::of(&frame[14..34]).finish();
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame[46] = 0x50;
    frame[50..52].copy_from_slice(&pseudo(20 + payload).fold().to_be_bytes());
    frame[54..].iter_mut().zip(0u32..).for_each(|(byte, at)| *byte = (at % 251) as u8);
    let gso = size.map(|size| Gso { kind: GsoKind::Tcp4, size, header_len: 54, ecn: false });
    (frame, TxMeta { partial_checksum: Some((34, 16)), gso, ..TxMeta::NONE })
}

fn pseudo(len: usize) -> Sum {
    pseudo_v4([10, 8, 0, 1].into(), [10, 8, 0, 2].into(), 6, len)
}

#[test]
fn testpmd_receives_software_offloaded_frames() {
    if is_skipped("testpmd_receives_software_offloaded_frames") {
        return;
    }
    for role in [Role::Server, Role::Client] {
        let folder = TempFolder::new();
        let (mut memif, _testpmd) = with_testpmd(role, &folder.0.join("socket"), 1, "io");
        let device = &mut memif.queues[0];
        for (payload, size, count) in [(700, None, 1), (40_000, Some(1400), 29), (60_000, Some(1000), 60)] {
            let (frame, meta) = tcp(payload, size);
            send(device, &frame, meta);
            let segments = receive(device, count);
            let mut whole = Vec::new();
            for (segment, checksum) in &segments {
                assert_eq!(*checksum, RxChecksum::Unverified);
                assert!(pseudo(segment.len() - 34).add(Sum::of(&segment[34..])).is_valid(), "checksum");
                whole.extend_from_slice(&segment[54..]);
            }
            assert!(whole == frame[54..], "{} of {payload} bytes", whole.len());
        }
    }
}

#[test]
fn link_recovers_after_testpmd_is_killed() {
    if is_skipped("link_recovers_after_testpmd_is_killed") {
        return;
    }
    for role in [Role::Server, Role::Client] {
        let folder = TempFolder::new();
        let socket = folder.0.join("socket");
        let (mut memif, testpmd) = with_testpmd(role, &socket, 1, "io");
        check_echo(&mut memif.queues[0], 100..200);
        testpmd.kill();
        assert!(memif.link.wait_for(false, TIMEOUT));
        let device = &mut memif.queues[0];
        let dropped = memif.stats.tx_dropped.load(Ordering::Relaxed);
        send(device, &frame(0, 100), TxMeta::default());
        assert_eq!(memif.stats.tx_dropped.load(Ordering::Relaxed), dropped + 1);
        // A testpmd in the role of the server does not replace the stale socket file.
        if role == Role::Client {
            std::fs::remove_file(&socket).unwrap();
        }
        let peer = if role == Role::Server { "client" } else { "server" };
        let _testpmd = Testpmd::start(peer, &socket, 1, "io");
        assert!(memif.link.wait_for(true, TIMEOUT), "{role:?}: the link stays down");
        check_echo(&mut memif.queues[0], 100..200);
    }
}
