//! Compares `ginnel stat` and `ginnel ss` with a capture of the same run, to the segment and to the byte.

mod temp_folder;

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::skip;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use temp_folder::TempFolder;

const TIMEOUT: Duration = Duration::from_secs(60);

impl TempFolder {
    /// Creates a `ginnel` command whose stacks are in this directory.
    fn ginnel(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel"));
        command.env("GINNEL_RUN_DIR", self.0.join("run")).args(arguments);
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        self.ginnel(arguments).output().unwrap()
    }

    fn text(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Returns the sockets that `ginnel ss --json` prints.
    fn sockets(&self, name: &str, filter: &[&str]) -> Vec<Value> {
        let text = self.text(&[&["ss", name, "--json"], filter].concat());
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Returns the error of a command, which must fail.
    fn run_refused(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert!(!output.status.success(), "{arguments:?} did not fail");
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        text.trim_end().trim_start_matches("ginnel: ").into()
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    /// Waits until the stack's counters meet a condition.
    fn wait_for(&self, name: &str, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let output = self.output(&["stat", name, "--json"]);
            if output.status.success() {
                let stat: Value = serde_json::from_slice(&output.stdout).unwrap();
                if is_so(&stat) {
                    return stat;
                }
                assert!(Instant::now() < deadline, "{what}: {stat}");
            }
            assert!(Instant::now() < deadline, "{what}: {}", String::from_utf8_lossy(&output.stderr));
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A process that is killed when the value is dropped.
struct RunningGinnel(Child);

impl RunningGinnel {
    fn start(mut command: Command) -> Self {
        Self(command.stdout(Stdio::null()).spawn().unwrap())
    }

    /// Sends SIGTERM and waits for the end.
    fn stop(mut self) {
        assert!(Command::new("kill").arg(self.0.id().to_string()).status().unwrap().success());
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for RunningGinnel {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One direction of a connection in the capture. Offsets count from the SYN.
#[derive(Debug, Default)]
struct CapturedStream {
    first: Option<u32>,
    /// Offset after the last byte; SYN and FIN count.
    end: u32,
    /// Offset after the last contiguous byte of payload.
    data_end: u32,
    /// Payload after gaps.
    beyond: Vec<(u32, u32)>,
    /// RST was captured; later segments do not belong to the connection.
    reset: bool,
    /// Largest acknowledgement of the other direction, as captured.
    acks: Vec<u32>,
}

/// Everything that passed the devices of a stack.
#[derive(Debug, Default)]
struct CapturedTraffic {
    frames: [u64; 2],
    bytes: [u64; 2],
    segments: [u64; 2],
    /// Received segments that ask for a connection.
    syns: u64,
    resets_out: u64,
    retransmitted: u64,
    /// Inbound and outbound.
    flows: BTreeMap<Endpoints, [CapturedStream; 2]>,
    /// Connections whose ports were reused.
    past: Vec<(Endpoints, [CapturedStream; 2])>,
}

/// Local and remote endpoint.
type Endpoints = (SocketAddr, SocketAddr);

const INBOUND: usize = 0;
const OUTBOUND: usize = 1;

impl CapturedTraffic {
    /// Merges the captures of a stack's shards by time: a frame may arrive at another shard than its
    /// connection's.
    fn of(paths: &[PathBuf]) -> Self {
        let mut frames = Vec::new();
        for path in paths {
            let mut reader = PcapNgReader::new(File::open(path).unwrap()).unwrap();
            while let Some(block) = reader.next_block() {
                let Block::EnhancedPacket(packet) = block.unwrap() else { continue };
                let (mut way, mut size) = (None, None);
                for option in &packet.options {
                    match option {
                        EnhancedPacketOption::Flags(flags) => way = Some((flags & 3) as usize - 1),
                        EnhancedPacketOption::Comment(text) => {
                            size = text.split(' ').find_map(|word| word.parse::<usize>().ok());
                        }
                        _ => {}
                    }
                }
                frames.push((packet.timestamp, way.expect("a direction"), packet.data.into_owned(), size));
            }
        }
        frames.sort_by_key(|(time, ..)| *time);
        let mut wire = Self::default();
        for (_, way, data, size) in frames {
            wire.frame(way, &data, size);
        }
        wire
    }

    fn frame(&mut self, way: usize, bytes: &[u8], size: Option<usize>) {
        self.frames[way] += 1;
        self.bytes[way] += bytes.len() as u64;
        let packet = SlicedPacket::from_ethernet(bytes).unwrap();
        let ends: [IpAddr; 2] = match &packet.net {
            Some(NetSlice::Ipv4(ip)) => {
                [ip.header().source_addr().into(), ip.header().destination_addr().into()]
            }
            Some(NetSlice::Ipv6(ip)) => {
                [ip.header().source_addr().into(), ip.header().destination_addr().into()]
            }
            _ => return,
        };
        let Some(TransportSlice::Tcp(tcp)) = &packet.transport else { return };
        let from = SocketAddr::new(ends[0], tcp.source_port());
        let to = SocketAddr::new(ends[1], tcp.destination_port());
        let key = if way == INBOUND { (to, from) } else { (from, to) };
        let payload = tcp.payload().len();
        let size = size.unwrap_or(payload).max(1);
        self.segments[way] += payload.div_ceil(size).max(1) as u64;
        if way == OUTBOUND && tcp.rst() {
            self.resets_out += 1;
        }
        self.syns += u64::from(way == INBOUND && tcp.syn() && !tcp.ack());
        let mut flow = self.flows.entry(key).or_default();
        // The clocks of two shards may differ slightly: the response to a SYN may precede the SYN, and data
        // of the previous connection may follow it.
        let has_other = flow[way].first.is_some_and(|first| first != tcp.sequence_number());
        let answers = |first: u32| tcp.acknowledgment_number() == first.wrapping_add(1);
        if tcp.syn() && has_other && (way == INBOUND || !flow[INBOUND].first.is_some_and(answers)) {
            self.past.push((key, std::mem::take(flow)));
        } else if way == OUTBOUND
            && !tcp.syn()
            && flow[OUTBOUND].first.is_none()
            && let Some((_, before)) = self.past.iter_mut().rev().find(|(ends, _)| *ends == key)
        {
            flow = before;
        }
        let was_reset = flow[INBOUND].reset || flow[OUTBOUND].reset;
        let stream = &mut flow[way];
        stream.reset |= tcp.rst();
        if tcp.ack() && !tcp.rst() {
            stream.acks.push(tcp.acknowledgment_number());
        }
        if tcp.syn() && stream.first.is_none() {
            stream.first = Some(tcp.sequence_number());
        }
        let Some(first) = stream.first else { return };
        let start = tcp.sequence_number().wrapping_sub(first);
        let flags = u32::from(tcp.syn()) + u32::from(tcp.fin());
        if payload as u32 + flags == 0 || tcp.rst() {
            return;
        }
        // A segment that begins before the end of sent data is a retransmission.
        let mut at = 0;
        loop {
            let len = size.min(payload - at);
            let begins = start + at as u32;
            if way == OUTBOUND && begins < stream.end {
                self.retransmitted += 1;
            }
            at += len;
            let is_last = at == payload;
            stream.end = stream.end.max(begins + len as u32 + if is_last { flags } else { 0 });
            if is_last {
                break;
            }
        }
        // After a reset that another shard received, the connection's shard may have sent and counted further
        // segments.
        if payload > 0 && (way == OUTBOUND || !was_reset) {
            let begins = start + u32::from(tcp.syn());
            stream.beyond.push((begins, begins + payload as u32));
            stream.data_end = stream.data_end.max(1);
            while let Some(next) = stream.beyond.iter().position(|(begins, _)| *begins <= stream.data_end) {
                let (_, end) = stream.beyond.swap_remove(next);
                stream.data_end = stream.data_end.max(end);
            }
        }
    }

    /// Returns the captured payload in bytes, each byte counted once.
    fn payload(&self, way: usize) -> u64 {
        self.all().map(|flow| u64::from(flow[way].data_end.saturating_sub(1))).sum()
    }

    /// Returns the number of passive connections whose handshake was completed.
    fn accepted(&self) -> u64 {
        let accepted = |[incoming, outgoing]: &&[CapturedStream; 2]| {
            let Some(first) = outgoing.first else { return false };
            incoming.acks.iter().any(|ack| (1..1 << 31).contains(&ack.wrapping_sub(first)))
        };
        self.all().filter(accepted).count() as u64
    }

    fn all(&self) -> impl Iterator<Item = &[CapturedStream; 2]> {
        self.flows.values().chain(self.past.iter().map(|(_, flow)| flow))
    }
}

fn count(stat: &Value, name: &str) -> u64 {
    stat["all"][name].as_u64().unwrap_or_else(|| panic!("{name} is missing: {stat}"))
}

/// Compares the counters of an idle server with the capture.
fn reconcile(stat: &Value, wire: &CapturedTraffic, device: &str) {
    let counted = |name: &str| (name.to_string(), count(stat, name));
    let tcp = |name: &str| counted(&format!("tcp.{name}"));
    let seen = |name: &str, number: u64| (format!("tcp.{name}"), number);
    assert_eq!(tcp("segments_in"), seen("segments_in", wire.segments[INBOUND]));
    assert_eq!(tcp("segments_out"), seen("segments_out", wire.segments[OUTBOUND]));
    assert_eq!(tcp("retransmitted"), seen("retransmitted", wire.retransmitted));
    assert_eq!(tcp("resets_out"), seen("resets_out", wire.resets_out));
    assert_eq!(tcp("bytes_in"), seen("bytes_in", wire.payload(INBOUND)));
    assert_eq!(tcp("bytes_out"), seen("bytes_out", wire.payload(OUTBOUND)));
    assert_eq!(tcp("passive_opens"), seen("passive_opens", wire.accepted()));
    assert_eq!(tcp("active_opens"), seen("active_opens", 0));
    assert_eq!(count(stat, "httpd.connections"), wire.accepted());
    // Traffic other than TCP continues (neighbour and router discovery). All of it that was counted is in the
    // capture, which ends later.
    for (name, seen) in [
        ("rx_frames", wire.frames[INBOUND]),
        ("tx_frames", wire.frames[OUTBOUND]),
        ("rx_bytes", wire.bytes[INBOUND]),
        ("tx_bytes", wire.bytes[OUTBOUND]),
    ] {
        let counted = count(stat, &format!("device.{device}.{name}"));
        assert!(counted <= seen && counted + 2_000 > seen, "{name}: {counted} counted, {seen} seen");
    }
}

/// Compares Fastsocket's counters of an idle server on `shards` shards with the capture.
fn reconcile_fastsocket(fastsocket: &Value, stat: &Value, wire: &CapturedTraffic, shards: usize) {
    let row = |name: &str| fastsocket[name].as_u64().unwrap_or_else(|| panic!("{name}: {fastsocket}"));
    // A SYN that is sent again finds the connection instead of the listener.
    let lookups = row("listen_lookup.local");
    assert!((wire.accepted()..=wire.syns).contains(&lookups), "{lookups}: {wire:?}");
    assert_eq!(row("listen_lookup.none"), count(stat, "tcp.no_listener"));
    let segments = lookups + row("listen_lookup.none") + row("established_lookup.local");
    assert_eq!(segments, wire.segments[INBOUND]);
    assert_eq!((row("accept.local"), row("accept.remote")), (wire.accepted(), 0));
    assert_eq!((row("socket_pool.hit"), row("socket_pool.miss")), (wire.accepted(), 0));
    assert_eq!(row("direct_tcp.hit") + row("direct_tcp.miss"), wire.segments[OUTBOUND]);
    let steered = row("steer.local") + row("steer.remote") + row("steer.error");
    assert_eq!(steered, row("steer.total"));
    // As for the counters of devices: discovery continues.
    let frames = wire.frames[INBOUND];
    assert!(steered <= frames && steered + 2_000 > frames, "{steered} counted, {frames} seen");
    assert!(steered >= wire.segments[INBOUND], "a super-frame has several segments: {steered}");
    assert_eq!((row("steer.remote"), row("steer.error")), (row("steer.from_others"), 0));
    assert!(shards > 1 || row("steer.remote") == 0);
    assert_eq!((row("steer.by_rule"), row("buffer_pool.miss")), (0, 0));
}

/// After a reset, a stack's counters begin at zero; gauges, and the counters since the start, do not change.
fn check_reset(folder: &TempFolder, before: &Value) {
    let json = |more: &[&str]| -> Value {
        let arguments = [&["stat", "web", "--json"], more].concat();
        serde_json::from_str(&folder.text(&arguments)).unwrap()
    };
    assert_eq!(folder.text(&["stat", "web", "--reset"]), "");
    let (after, total) = (json(&[]), json(&["--since-start"]));
    for name in ["tcp.segments_in", "tcp.passive_opens", "httpd.connections", "tcp.listener_lookups"] {
        assert!(count(before, name) > 0);
        assert_eq!((count(&after, name), count(&total, name)), (0, count(before, name)), "{name}");
    }
    assert_eq!(count(&after, "pool.listeners.used"), count(before, "pool.listeners.used"));
    assert_eq!(json(&["--fastsocket"])["accept.local"], 0);
    assert!(json(&["--fastsocket", "--since-start"])["accept.local"].as_u64() > Some(0));
    let table = folder.text(&["stat", "web", "--fastsocket"]);
    assert!(table.starts_with("| reset ") && table.contains(" s ago "), "{table}");
    let refused = folder.run_refused(&["stat", "web", "--reset", "--json"]);
    assert!(refused.contains("--reset"), "{refused}");
}

/// Returns true if no connection is open and nothing is queued.
fn is_quiet(stat: &Value) -> bool {
    count(stat, "httpd.open") == 0 && count(stat, "pool.connections.used") == 0
}

/// Runs a server with `shards` shards and a generator, as two processes over memif.
fn over_memif(shards: usize) {
    let folder = TempFolder::new(&format!("statistics-{shards}"));
    let memif = |role: &str| format!("socket={},role={role},queues={shards}", folder.path("socket"));
    let (capture, site) = (folder.path("trace.pcapng"), folder.path("site"));
    let shards_text = shards.to_string();
    let server = RunningGinnel::start(folder.ginnel(&[
        "httpd",
        &site,
        "--memif",
        &memif("server"),
        "--address",
        "10.7.0.1/24",
        "--name",
        "web",
        "--capture",
        &capture,
        "--shards",
        &shards_text,
        // A capture of all that two processes can send in two seconds would be too large.
        "--link",
        "rate=100mbit",
    ]));
    folder.wait_for("web", "it listens", |stat| count(stat, "pool.listeners.used") >= shards as u64);
    let listed = folder.sockets("web", &["-ltn"]);
    assert_eq!(listed.len(), 2 * shards, "{listed:?}");
    assert!(listed.iter().all(|socket| socket["state"] == "LISTEN" && socket["send_q"].as_u64() > Some(0)));

    // The second load reuses ports of the first one.
    let client_config = folder.path("client.toml");
    std::fs::write(&client_config, "[tcp]\nlocal_port_first = 40000\nlocal_port_last = 40449\n").unwrap();
    let load = |url: &str, more: &[&str]| {
        let client = memif("client");
        let mut arguments = vec![
            "load",
            "http",
            "--config",
            &client_config,
            "--json",
            "--quiet",
            "--memif",
            &client,
            "--address",
            "10.7.0.2/24",
            "--shards",
            &shards_text,
        ];
        arguments.extend(more);
        arguments.push(url);
        folder.ginnel(&arguments)
    };
    let mut long = load("http://10.7.0.1/large.bin", &["-c", "8", "-k", "-t", "2s", "--name", "client"]);
    let long = long.stdout(Stdio::piped()).spawn().unwrap();
    folder.wait_for("web", "it is loaded", |stat| count(stat, "httpd.open") == 8);
    // Both ends have the same connections, each from its side.
    let ends = |name: &str, ours: &str, peers: &str| -> BTreeSet<(String, String)> {
        let sockets = folder.sockets(name, &["-tn", "state", "established"]);
        let text = |socket: &Value, end: &str| socket[end].as_str().unwrap().to_string();
        sockets.iter().map(|socket| (text(socket, ours), text(socket, peers))).collect()
    };
    let (at_server, at_client) = (ends("web", "local", "peer"), ends("client", "peer", "local"));
    assert_eq!(at_server.len(), 8);
    assert_eq!(at_server, at_client);
    for socket in folder.sockets("web", &["-tn", "sport", "=", ":80"]) {
        assert!(socket["shard"].as_str().unwrap().parse::<usize>().unwrap() < shards, "{socket}");
        assert!(socket["rtt_us"].as_u64() > Some(0) && socket["snd_cwnd"].as_u64() > Some(0), "{socket}");
        assert_eq!(socket["snd_mss"], 1448, "{socket}");
    }
    let table = folder.text(&["ss", "web", "-tino", "dst", "10.7.0.2"]);
    assert_eq!(table.lines().filter(|line| line.starts_with("tcp   ESTAB ")).count(), 8, "{table}");
    assert_eq!(
        table.lines().filter(|line| line.contains(" cwnd:") && line.contains(" rtt:")).count(),
        8,
        "{table}"
    );
    let output = long.wait_with_output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(output.status.success(), "{report}");

    let output = load("http://10.7.0.1/index.html", &["-c", "8", "-n", "400"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let stat = folder.wait_for("web", "it is quiet", is_quiet);
    let time_wait = folder.sockets("web", &["-a", "state", "time-wait"]);
    assert_eq!(time_wait.len() as u64, count(&stat, "pool.time_wait.used"));
    assert_eq!(stat["shards"].as_array().unwrap().len(), shards);
    let fastsocket: Value =
        serde_json::from_str(&folder.text(&["stat", "web", "--fastsocket", "--json"])).unwrap();
    check_reset(&folder, &stat);
    server.stop();
    let mut captures = vec![PathBuf::from(&capture)];
    captures.extend((1..shards).map(|shard| PathBuf::from(format!("{capture}.{shard}"))));
    let wire = CapturedTraffic::of(&captures);
    reconcile(&stat, &wire, "memif");
    reconcile_fastsocket(&fastsocket, &stat, &wire, shards);
    let flows: BTreeSet<(String, String)> =
        wire.flows.keys().map(|(ours, peer)| (ours.to_string(), peer.to_string())).collect();
    assert!(at_server.is_subset(&flows), "all that ss has listed was on the wire");
    // There are more if a request was given up on a busy machine.
    assert!(wire.accepted() >= 8 + 400, "{}", wire.accepted());
    assert!(folder.text(&["stat", "--list"]).is_empty(), "nothing is left of a stack that has ended");
}

#[test]
fn counters_and_sockets_agree_with_a_capture() {
    over_memif(1);
}

#[test]
fn counters_of_several_shards_agree_with_captures() {
    over_memif(2);
}

/// With loss in both directions and the kernel as client, the retransmissions counted are those in the
/// capture.
#[test]
fn retransmissions_agree_with_a_capture() {
    if let Some(reason) = unavailable() {
        return skip("retransmissions_agree_with_a_capture", &reason);
    }
    let folder = TempFolder::new("statistics-loss");
    let namespace = Namespace::new().unwrap();
    let (capture, site) = (folder.path("trace.pcapng"), folder.path("site"));
    let command = folder.ginnel(&[
        "httpd",
        &site,
        "--device",
        "tap:web0",
        "--address",
        "10.9.0.2/24",
        "--kernel-address",
        "10.9.0.1/24",
        "--name",
        "web",
        "--capture",
        &capture,
        "--link",
        "loss=2%",
        "--link-seed",
        "7",
    ]);
    let server = namespace.run(|| Ok::<_, std::io::Error>(RunningGinnel::start(command))).unwrap();
    folder.wait_for("web", "it listens", |stat| count(stat, "pool.listeners.used") > 0);
    for _ in 0..12 {
        let fetched = namespace.run(|| {
            Command::new("curl")
                .args(["-sS", "-m", "60", "-o", "/dev/null", "http://10.9.0.2/large.bin"])
                .output()
        });
        let fetched = fetched.unwrap();
        assert!(fetched.status.success(), "{fetched:?}");
    }
    let stat = folder.wait_for("web", "it is quiet", is_quiet);
    server.stop();
    let wire = CapturedTraffic::of(&[PathBuf::from(&capture)]);
    reconcile(&stat, &wire, "web0");
    assert!(wire.retransmitted > 20, "{wire:?}");
    assert_eq!((wire.accepted(), wire.payload(OUTBOUND) > 12 << 20), (12, true));
}

/// Returns the queues of the only connection in a namespace's kernel: unacknowledged bytes and unread bytes.
fn kernel_queues(namespace: &Namespace) -> (u64, u64) {
    let table = namespace.run(|| Command::new("cat").arg("/proc/net/tcp").output()).unwrap();
    let table = String::from_utf8(table.stdout).unwrap();
    let queues = table.lines().nth(1).and_then(|line| line.split_whitespace().nth(4)).unwrap();
    let (unacknowledged, unread) = queues.split_once(':').unwrap();
    let number = |text| u64::from_str_radix(text, 16).unwrap();
    (number(unacknowledged), number(unread))
}

/// The kernel fills the buffers of both ends and reads nothing, so every byte is in one of them. After all is
/// read, the connection takes little memory.
#[test]
fn socket_memory_equals_the_queued_bytes() {
    if let Some(reason) = unavailable() {
        return skip("socket_memory_equals_the_queued_bytes", &reason);
    }
    let folder = TempFolder::new("statistics-memory");
    let namespace = Namespace::new().unwrap();
    let command = folder.ginnel(&[
        "echo",
        "--device",
        "tap:echo0",
        "--address",
        "10.9.0.2/24",
        "--kernel-address",
        "10.9.0.1/24",
        "--name",
        "echo",
    ]);
    let server = namespace.run(|| Ok::<_, std::io::Error>(RunningGinnel::start(command))).unwrap();
    folder.wait_for("echo", "it listens", |stat| count(stat, "pool.listeners.used") > 0);
    let port = folder.sockets("echo", &["-lt4n"])[0]["local"]
        .as_str()
        .unwrap()
        .rsplit_once(':')
        .unwrap()
        .1
        .to_string();
    let mut client = namespace.run(|| TcpStream::connect(format!("10.9.0.2:{port}"))).unwrap();
    client.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    client.set_read_timeout(Some(TIMEOUT)).unwrap();
    let bytes = vec![b'x'; 1 << 20];
    let mut written = 0;
    // Until both ends are so full that nothing is sent for two seconds.
    while let Ok(n) = client.write(&bytes) {
        written += n as u64;
    }

    let number = |socket: &Value, name: &str| {
        socket[name].as_u64().unwrap_or_else(|| panic!("{name} is missing: {socket}"))
    };
    let deadline = Instant::now() + TIMEOUT;
    let socket = loop {
        let before = kernel_queues(&namespace);
        let socket = folder.sockets("echo", &["-tn"]).remove(0);
        let (unacknowledged, unread) = kernel_queues(&namespace);
        let held = number(&socket, "rmem_alloc") + number(&socket, "wmem_queued");
        if before == (unacknowledged, unread) && held + unacknowledged + unread == written {
            break socket;
        }
        assert!(
            Instant::now() < deadline,
            "{written} written, {unacknowledged} and {unread} at the kernel: {socket}"
        );
        thread::sleep(Duration::from_millis(50));
    };
    let [held, queued, room] = ["rmem_alloc", "wmem_queued", "fwd_alloc"].map(|name| number(&socket, name));
    assert_eq!([held, queued], ["recv_q", "send_q"].map(|name| number(&socket, name)));
    assert!(held > 0 && held <= number(&socket, "rcvbuf") + 65_535, "{socket}");
    assert!(queued > 0 && queued <= number(&socket, "sndbuf"), "{socket}");
    let stat = folder.wait_for("echo", "it stands still", |_| true);
    assert_eq!(held + queued + room, count(&stat, "pool.buffer_bytes.used"), "{socket}");
    let beside = number(&socket, "memory_bytes") - (held + queued + room);
    assert!((500..1 << 20).contains(&beside), "{beside} bytes beside the buffers: {socket}");

    let mut left = written;
    let mut buffer = vec![0; 1 << 20];
    while left > 0 {
        let n = client.read(&mut buffer).unwrap() as u64;
        assert!(n > 0, "{left} bytes did not come back");
        left -= n;
    }
    const IDLE: &str = ",f0,w0,o0,bl0,d0) memory:128";
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let table = folder.text(&["ss", "echo", "-tnm"]);
        let memory = table.lines().nth(2).unwrap();
        if memory.starts_with("\tskmem:(r0,rb") && memory.ends_with(IDLE) {
            break;
        }
        assert!(Instant::now() < deadline, "{table}");
        thread::sleep(Duration::from_millis(50));
    }
    drop(client);
    server.stop();
}

#[test]
fn a_missing_stack_is_named() {
    let folder = TempFolder::new("statistics-errors");
    let text = folder.run_refused(&["stat"]);
    assert!(text.starts_with("no stack of this user runs ("), "{text}");
    assert!(folder.run_refused(&["ss", "web"]).starts_with("no stack named \"web\" runs"));
    assert!(folder.run_refused(&["ss", "web", "state", "open"]).contains("\"open\" is not a state"));
    assert_eq!(folder.text(&["stat", "--list", "--json"]), "[]\n");

    let serve = |name: &str, socket: &str| {
        let memif = format!("socket={},role=server", folder.path(socket));
        folder.ginnel(&[
            "httpd",
            &folder.path("site"),
            "--memif",
            &memif,
            "--address",
            "10.7.0.1/24",
            "--name",
            name,
        ])
    };
    let first = RunningGinnel::start(serve("one", "s1"));
    folder.wait_for("one", "it runs", |_| true);
    let output = serve("one", "s2").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    let expected = format!("ginnel: a stack named \"one\" runs already, as process {}\n", first.0.id());
    assert_eq!(text, expected);
    let second = RunningGinnel::start(serve("two", "s2"));
    folder.wait_for("two", "it runs", |_| true);
    assert_eq!(folder.run_refused(&["stat"]), "several stacks run, name one: one, two");
    let list = folder.text(&["stat", "--list"]);
    assert_eq!(list.lines().map(|line| line.split(' ').next().unwrap()).collect::<Vec<_>>(), ["one", "two"]);

    // A killed stack has left its directory, which must not be mistaken for a running stack.
    drop(first);
    assert!(folder.0.join("run/one/stats.0").exists());
    let list = folder.text(&["stat", "--list"]);
    assert!(list.starts_with("two ") && list.lines().count() == 1, "{list}");
    assert!(!folder.0.join("run/one").exists());
    second.stop();

    let refused = folder.output(&[
        "echo",
        "--memif",
        "socket=@x,role=server",
        "--address",
        "10.7.0.1/24",
        "--name",
        "a/b",
    ]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("run.name: \"a/b\" is not a valid stack name"),
        "{refused:?}"
    );
}
