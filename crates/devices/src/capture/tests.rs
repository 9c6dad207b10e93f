use super::*;
use crate::conformance::{self, Guarantees};
use crate::memory::{MemoryConfig, pair};
use ginnel_stack::device::{Gso, GsoKind};
use ginnel_stack::wire::checksum::{Sum, pseudo_v4};
use ginnel_testkit::skip;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use std::fs::File;
use std::path::Path;

/// A directory that is removed with its contents.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ginnel-capture-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[derive(Debug, PartialEq)]
struct Read {
    nanos: u64,
    sent: bool,
    original_len: u32,
    data: Vec<u8>,
    comment: bool,
}

fn read(path: &Path) -> Vec<Read> {
    let mut reader = PcapNgReader::new(File::open(path).expect("the file")).expect("a pcapng file");
    let mut packets = Vec::new();
    while let Some(block) = reader.next_block() {
        if let Block::EnhancedPacket(packet) = block.expect("a block") {
            packets.push(Read {
                nanos: packet.timestamp.as_nanos() as u64,
                sent: packet.options.contains(&EnhancedPacketOption::Flags(2)),
                original_len: packet.original_len,
                data: packet.data.to_vec(),
                comment: packet.options.iter().any(|o| matches!(o, EnhancedPacketOption::Comment(_))),
            });
        }
    }
    packets
}

fn send(device: &mut Device, now: Instant, frame: &[u8], meta: TxMeta) {
    device.tx.reserve(frame.len()).expect("room").copy_from_slice(frame);
    device.tx.commit(frame.len(), meta);
    device.tx.flush(now);
}

fn receive(device: &mut Device, now: Instant) -> usize {
    let mut burst = RxBurst::new();
    device.rx.rx_burst(now, &mut burst);
    burst.len()
}

/// Returns a TCP segment from 10.0.0.1:5000 to 10.0.0.2:80 whose checksum field holds the pseudo-header sum.
fn tcp(payload: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0];
    frame.extend((40 + payload as u16).to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let header = Sum::of(&frame[14..34]).finish();
    frame[24..26].copy_from_slice(&header.to_be_bytes());
    frame.extend([0x13, 0x88, 0, 80, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    frame.extend((0..payload).map(|at| at as u8));
    let pseudo = pseudo_v4([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), 6, 20 + payload).fold();
    frame[50..52].copy_from_slice(&pseudo.to_be_bytes());
    frame
}

const PARTIAL: TxMeta = TxMeta { partial_checksum: Some((34, 16)), ..TxMeta::NONE };
const SUPER: TxMeta = TxMeta {
    partial_checksum: Some((34, 16)),
    gso: Some(Gso { kind: GsoKind::Tcp4, size: 1460, header_len: 54, ecn: false }),
    ..TxMeta::NONE
};

/// Sends a frame and a super-frame, and receives an answer.
fn exchange(config: &CaptureConfig) {
    let (left, mut right) = pair(MemoryConfig::default());
    let mut left = wrap(left, config).expect("a capture");
    send(&mut left, Instant::from_nanos(1_001), &tcp(100), PARTIAL);
    send(&mut left, Instant::from_nanos(2_002), &tcp(5000), SUPER);
    send(&mut right, Instant::from_nanos(2_500), &tcp(7), PARTIAL);
    assert_eq!(receive(&mut left, Instant::from_nanos(3_003)), 1);
    assert_eq!(receive(&mut right, Instant::ZERO), 2, "frames pass unchanged");
}

#[test]
fn captured_device_conforms() {
    let directory = Directory::new("conforms");
    let guarantees = Guarantees { back_pressure: true, uncut_super_frame_bytes: usize::MAX, labels: true };
    conformance::run("capture", guarantees, &mut || {
        let (left, right) = pair(MemoryConfig::default());
        (wrap(left, &CaptureConfig::new(directory.file("trace.pcapng"))).expect("a capture"), right)
    });
}

#[test]
fn captured_device_has_hashes_of_its_origin() {
    let directory = Directory::new("hashes");
    let config = CaptureConfig::new(directory.file("trace.pcapng"));
    conformance::check_hash_origin(|device| wrap(device, &config).expect("a capture"));
}

#[test]
fn capture_contains_both_directions_with_valid_checksums() {
    let directory = Directory::new("both");
    let path = directory.file("trace.pcapng");
    exchange(&CaptureConfig { epoch: Some(Duration::from_secs(1_700_000_000)), ..CaptureConfig::new(&path) });
    let packets = read(&path);
    let summary: Vec<_> = packets
        .iter()
        .map(|p| (p.nanos - 1_700_000_000_000_000_000, p.sent, p.data.len(), p.comment))
        .collect();
    assert_eq!(summary, [(1_001, true, 154, false), (2_002, true, 5054, true), (3_003, false, 61, false)]);
    for packet in &packets {
        let len = packet.data.len() - 34;
        let pseudo = pseudo_v4([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), 6, len);
        assert!(pseudo.add(Sum::of(&packet.data[34..])).is_valid(), "checksum of {len} bytes");
    }
}

#[test]
fn snaplen_and_filter_limit_the_capture() {
    let directory = Directory::new("chosen");
    let path = directory.file("trace.pcapng");
    exchange(&CaptureConfig { snaplen: 60, ..CaptureConfig::new(&path) });
    let lengths: Vec<_> = read(&path).iter().map(|p| (p.data.len(), p.original_len)).collect();
    assert_eq!(lengths, [(60, 154), (60, 5054), (60, 61)]);
    for (filter, expected) in [("tcp port 80 and host 10.0.0.1", 3), ("udp", 0)] {
        exchange(&CaptureConfig { filter: Some(filter.into()), ..CaptureConfig::new(&path) });
        assert_eq!(read(&path).len(), expected, "{filter}");
    }
}

const RING: FileRing = FileRing { file_bytes: 64 << 10, files: 3 };

/// Captures 1,000 frames into a ring of files; `before` is called before each frame with its number. Checks
/// that none is lost.
fn fill_file_ring(directory: &Directory, mut before: impl FnMut(u64)) {
    let config = CaptureConfig { ring: Some(RING), ..CaptureConfig::new(directory.file("trace.pcapng")) };
    let capture = Capture::create(&config).expect("a capture");
    let (left, mut right) = pair(MemoryConfig::default());
    let mut left = capture.wrap(left);
    for number in 0..1000 {
        before(number);
        send(&mut left, Instant::from_micros(number), &tcp(1000), PARTIAL);
        receive(&mut right, Instant::ZERO);
    }
    drop(left);
    let stats = capture.stats();
    drop(capture);
    assert_eq!((stats.captured.load(Relaxed), stats.lost.load(Relaxed)), (1000, 0));
}

// limit: device.capture_file_bytes
#[test]
fn file_ring_keeps_the_last_files() {
    let directory = Directory::new("ring");
    fill_file_ring(&directory, |_| ());
    let mut names: Vec<_> =
        std::fs::read_dir(&directory.0).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    // A block of 1100 bytes holds 1054 bytes of data: a file holds 59 blocks.
    assert_eq!(names, ["trace-00015.pcapng", "trace-00016.pcapng", "trace-00017.pcapng"]);
    let mut counts = Vec::new();
    for name in names {
        let path = directory.0.join(name);
        assert!(std::fs::metadata(&path).unwrap().len() <= RING.file_bytes);
        counts.push(read(&path).len());
    }
    assert_eq!(counts, [59, 59, 1000 - 16 * 59]);
}

#[test]
fn file_ring_goes_on_without_a_deleted_file() {
    let directory = Directory::new("deleted");
    fill_file_ring(&directory, |number| {
        if number == 100 {
            std::fs::remove_file(directory.file("trace-00001.pcapng")).unwrap();
        }
    });
}

#[test]
fn capture_is_flushed_before_sleep_and_every_second() {
    let directory = Directory::new("flush");
    let path = directory.file("trace.pcapng");
    let (left, mut right) = pair(MemoryConfig::default());
    let mut left = wrap(left, &CaptureConfig::new(&path)).expect("a capture");
    send(&mut left, Instant::from_micros(1), &tcp(10), PARTIAL);
    assert!(left.rx.arm());
    assert_eq!(read(&path).len(), 1);
    send(&mut left, Instant::from_millis(1_500), &tcp(10), PARTIAL);
    assert_eq!(read(&path).len(), 2);
    assert_eq!(receive(&mut right, Instant::ZERO), 2);
}

#[test]
fn write_error_ends_only_the_capture() {
    if !Path::new("/dev/full").exists() {
        return eprintln!("skipped: there is no /dev/full");
    }
    let capture = Capture::create(&CaptureConfig::new("/dev/full")).expect("the file opens");
    let (left, mut right) = pair(MemoryConfig::default());
    let mut left = capture.wrap(left);
    for second in 0..10 {
        send(&mut left, Instant::from_millis(second * 2_000 + 1_000), &tcp(10), PARTIAL);
        assert_eq!(receive(&mut right, Instant::ZERO), 1);
    }
    let stats = capture.stats();
    assert!(stats.failed.load(Relaxed));
    assert_eq!(stats.captured.load(Relaxed) + stats.lost.load(Relaxed), 10);
    assert!(stats.lost.load(Relaxed) >= 8);
}

#[test]
fn invalid_configuration_is_refused() {
    let directory = Directory::new("refused");
    let config = CaptureConfig::new(directory.file("trace.pcapng"));
    let message = |config: CaptureConfig| Capture::create(&config).err().expect("refused").to_string();
    let filter = Some("tcp prot 80".into());
    assert_eq!(
        message(CaptureConfig { filter, ..config.clone() }),
        "capture filter: at byte 4: expected and, or, found \"prot\""
    );
    assert_eq!(message(CaptureConfig { snaplen: 13, ..config.clone() }), "snaplen 13 is below 14");
    let ring = Some(FileRing { file_bytes: 1 << 20, files: 1 });
    assert!(message(CaptureConfig { ring, ..config }).starts_with("a ring of 1 files"));
    assert!(
        message(CaptureConfig::new(directory.file("nowhere/trace.pcapng"))).contains("nowhere/trace.pcapng")
    );
}

#[test]
fn tshark_accepts_the_capture() {
    let directory = Directory::new("tshark");
    let path = directory.file("trace.pcapng");
    exchange(&CaptureConfig { epoch: Some(Duration::from_secs(1_700_000_000)), ..CaptureConfig::new(&path) });
    let output = std::process::Command::new("tshark")
        .args(["-n", "-o", "tcp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE", "-T", "fields"])
        .args(["-e", "frame.time_epoch", "-e", "frame.len", "-e", "frame.packet_flags_direction"])
        .args(["-e", "tcp.checksum.status", "-e", "ip.checksum.status", "-r"])
        .arg(&path)
        .output();
    let output = match output {
        Ok(output) => output,
        Err(error) => return skip("tshark_accepts_the_capture", &format!("tshark: {error}")),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8_lossy(&output.stdout).replace("0x00000001", "1").replace("0x00000002", "2");
    let expected = [
        "1700000000.000001001\t154\t2\t1\t1",
        "1700000000.000002002\t5054\t2\t1\t1",
        "1700000000.000003003\t61\t1\t1\t1",
    ];
    assert_eq!(lines.lines().collect::<Vec<_>>(), expected);
}
