//! Two links, each served by shards of its own: unmodified programs serve and reach both.

use crate::{KEEP_ALIVE, assert_load, assert_same, distinct_bytes, fixture};
use ginnel_testkit::interop::ProgramFixture;
use pcap_file::pcapng::{Block, PcapNgReader};
use serde_json::Value;
use std::io::Read;

/// Addresses of the stack, and the interfaces.
const LINKS: [(&str, &str); 2] = [("10.9.0", "gaps0"), ("10.8.0", "gaps1")];

/// Returns the name of the stack of a test.
fn stack_name(fixture: &ProgramFixture) -> String {
    let name = fixture.folder().file_name().unwrap().to_str().unwrap();
    // A name begins with a letter or digit.
    name[name.len().saturating_sub(40)..].trim_start_matches(['_', '-']).into()
}

/// The devices of both links.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LinkDevices {
    Tap,
    /// Interfaces of veth pairs. The kernel has the other ends.
    AfXdp,
}

impl LinkDevices {
    /// Returns the kernel's interface of a link.
    fn kernel_interface(self, interface: &str) -> String {
        match self {
            Self::Tap => interface.into(),
            Self::AfXdp => format!("{interface}k"),
        }
    }

    /// Creates what the stack does not create itself. Returns the keys of a device.
    fn create(self, fixture: &ProgramFixture, network: &str, interface: &str) -> String {
        if self == Self::Tap {
            return format!("kind = \"tap\"\nkernel_addresses = [\"{network}.1/24\"]\n");
        }
        let kernel = self.kernel_interface(interface);
        create_veth(fixture, interface, &kernel, &format!("{network}.1/24"), 2);
        "kind = \"af_xdp\"\n".into()
    }
}

/// Creates a pair of interfaces: `interface` for AF_XDP, with as many queues, and `kernel` with `address`.
pub fn create_veth(fixture: &ProgramFixture, interface: &str, kernel: &str, address: &str, queues: usize) {
    let ip = |arguments: &str| fixture.namespace().ip(arguments).unwrap();
    let queues = format!("numrxqueues {queues} numtxqueues {queues}");
    ip(&format!("link add {interface} {queues} type veth peer name {kernel} {queues}"));
    for name in [interface, kernel] {
        ip(&format!("link set {name} up"));
    }
    ip(&format!("addr add {address} dev {kernel}"));
    // The kernel would leave checksums and segmentation to the interface, from which the stack gets its
    // frames.
    fixture.client_text("ethtool", &["-K", kernel, "tx", "off", "tso", "off", "gso", "off"]);
}

/// Returns a fixture for AF_XDP, or prints a note and returns `None` if the test cannot run here.
pub fn af_xdp_fixture(test: &str, programs: &[&str]) -> Option<ProgramFixture> {
    if !rustix::process::geteuid().is_root() {
        ginnel_testkit::skip(test, "BPF programs need root");
        return None;
    }
    fixture(test, &[programs, &["ethtool"]].concat())
}

/// Four shards over two interfaces. The second interface is served by the first two shards.
fn configuration(fixture: &ProgramFixture, devices: LinkDevices) -> String {
    let mut text = format!("[shards]\ncount = 4\n[run]\nname = \"{}\"\n", stack_name(fixture));
    for ((network, interface), shards) in LINKS.into_iter().zip(["[2, 3]", "[0, 1]"]) {
        let device = devices.create(fixture, network, interface);
        text += &format!(
            "[[device]]\nname = \"{interface}\"\n{device}\
             shards = {shards}\n[[link]]\nname = \"{interface}\"\ndevice = \"{interface}\"\n\
             addresses = [\"{network}.2/24\"]\n"
        );
    }
    fixture.write("two.toml", text)
}

/// Returns a counter of each shard.
fn counters(fixture: &ProgramFixture, name: &str) -> Vec<u64> {
    let output = fixture.ginnel(&["stat", &stack_name(fixture), "--json", "--since-start"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    let shards = report["shards"].as_array().unwrap_or_else(|| panic!("{report}"));
    let value = |shard: &Value| shard["counters"][name].as_u64().unwrap_or_else(|| panic!("{name}: {shard}"));
    shards.iter().map(value).collect()
}

/// Asserts that each interface's frames have reached its own shards alone.
#[track_caller]
fn assert_separate(fixture: &ProgramFixture) {
    for ((_, interface), served) in
        LINKS.into_iter().zip([[false, false, true, true], [true, true, false, false]])
    {
        let received = counters(fixture, &format!("device.{interface}.rx_frames"));
        let is_served: Vec<bool> = received.iter().map(|&frames| frames > 0).collect();
        assert_eq!(is_served, served, "{interface}: {received:?}");
    }
    assert_eq!(counters(fixture, "shard.frames_relayed"), [0; 4]);
}

fn fetch(fixture: &ProgramFixture, url: &str) -> Vec<u8> {
    fixture.client_output("curl", &["-sS", "-m", "30", url])
}

const NGINX_PROGRAMS: [&str; 4] = ["nginx", "curl", "wrk", "python3"];

#[test]
fn nginx_serves_both_links() {
    if let Some(fixture) = fixture("nginx_serves_both_links", &NGINX_PROGRAMS) {
        nginx_serves_links(&fixture, LinkDevices::Tap);
    }
}

#[test]
fn nginx_serves_both_links_over_af_xdp() {
    if let Some(fixture) = af_xdp_fixture("nginx_serves_both_links_over_af_xdp", &NGINX_PROGRAMS) {
        nginx_serves_links(&fixture, LinkDevices::AfXdp);
    }
}

fn nginx_serves_links(fixture: &ProgramFixture, devices: LinkDevices) {
    let page = distinct_bytes(3_000_000);
    fixture.write("site/page", &page);
    let conf = fixture.nginx("worker_processes 2;");
    let text = String::from_utf8(fixture.read("nginx.conf")).unwrap();
    // nginx connects to servers of the kernel on both links.
    let far: String = LINKS
        .map(|(network, interface)| {
            format!("location /{interface}/ {{ proxy_pass http://{network}.1:9000/; }}\n")
        })
        .concat();
    fixture.write("nginx.conf", text.replace("location /ok", &format!("{far} location /ok")));
    let config = configuration(fixture, devices);
    let mut nginx = fixture.start_ginnel(&["run", "--config", &config, "--", "nginx", "-c", &conf]);
    nginx.wait_until_listening("10.9.0.2:8000");
    nginx.wait_until_listening("10.8.0.2:8000");
    let site = fixture.folder().join("site").display().to_string();
    fixture.start_on_kernel("python3", &["-m", "http.server", "9000", "-d", &site]);
    fixture.wait_until_listening("10.9.0.1:9000");
    for (network, _) in LINKS {
        let host = format!("http://{network}.2:8000");
        assert_same(&host, &fetch(fixture, &format!("{host}/page")), &page);
        assert_load(fixture, &format!("{host}/ok"), KEEP_ALIVE);
        for (_, far) in LINKS {
            for _ in 0..8 {
                let url = format!("{host}/{far}/page");
                assert_same(&url, &fetch(fixture, &url), &page);
            }
        }
    }
    assert_separate(fixture);
    let opened = counters(fixture, "tcp.active_opens");
    assert!(opened[..2].iter().sum::<u64>() >= 16 && opened[2..].iter().sum::<u64>() >= 16, "{opened:?}");
    // The log names the shards of the device.
    let expected = match devices {
        LinkDevices::Tap => "device gaps0: TAP interface gaps0, shards 2 3, link gaps0: 10.9.0.2/24",
        LinkDevices::AfXdp => "device gaps0: AF_XDP on gaps0, shards 2 3, link gaps0: 10.9.0.2/24",
    };
    let log = String::from_utf8(fixture.ginnel(&["log", &stack_name(fixture)]).stdout).unwrap();
    assert!(log.contains(expected), "{log}");
    assert_eq!(nginx.stop(), 0, "{}", nginx.read_stderr());
}

#[test]
fn httpd_serves_both_links() {
    if let Some(fixture) = fixture("httpd_serves_both_links", &["curl"]) {
        httpd_serves_links(&fixture, LinkDevices::Tap);
    }
}

#[test]
fn httpd_serves_both_links_over_af_xdp() {
    if let Some(fixture) = af_xdp_fixture("httpd_serves_both_links_over_af_xdp", &["curl"]) {
        httpd_serves_links(&fixture, LinkDevices::AfXdp);
    }
}

fn httpd_serves_links(fixture: &ProgramFixture, devices: LinkDevices) {
    let page = distinct_bytes(300_000);
    fixture.write("site/page", &page);
    let config = configuration(fixture, devices);
    let site = fixture.folder().join("site").display().to_string();
    let mut httpd = fixture.start_ginnel(&["httpd", &site, "--config", &config, "--listen", "0.0.0.0:8000"]);
    httpd.wait_until_listening("10.8.0.2:8000");
    for (network, _) in LINKS {
        for _ in 0..20 {
            let url = format!("http://{network}.2:8000/page");
            assert_same(&url, &fetch(fixture, &url), &page);
        }
    }
    // Packets to an address of the other link are routed by the first one, and answered by the second. An
    // AF_XDP device takes those to its own addresses only.
    if devices == LinkDevices::Tap {
        fixture.namespace().ip("route add 10.8.0.2/32 via 10.9.0.2 dev gaps0").unwrap();
        let url = "http://10.8.0.2:8000/page";
        for _ in 0..5 {
            assert_same(url, &fetch(fixture, url), &page);
        }
        assert!(counters(fixture, "shard.frames_forwarded")[2..].iter().sum::<u64>() > 0);
    }
    assert_eq!(counters(fixture, "shard.relays_dropped"), [0; 4]);
    assert_eq!(httpd.stop(), 0, "{}", httpd.read_stderr());
}

/// A single queue cannot serve two shards.
#[test]
fn an_interface_without_queues_is_refused() {
    let Some(fixture) = fixture("an_interface_without_queues_is_refused", &["ip"]) else { return };
    fixture.namespace().ip("tuntap add gaps0 mode tap").unwrap();
    let config = configuration(&fixture, LinkDevices::Tap);
    let output = fixture.ginnel(&["run", "--config", &config, "--", "true"]);
    let error = String::from_utf8_lossy(&output.stderr);
    let expected = "(several shards need an interface with several queues: ip tuntap add … multi_queue)";
    assert!(!output.status.success() && error.contains("gaps0") && error.contains(expected), "{error}");
}

/// Opens sockets of each kind towards each link, and names their local ports.
const SOCKETS: &str = "
import socket, time
def udp(how, network):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(20)
    if how == 'bind': s.bind((network + '.2', 0))
    elif how == 'connect': s.connect((network + '.1', 9001)); s.send(b'?'); assert s.recv(9) == b'!'
    else: s.sendto(b'?', (network + '.1', 9001)); assert s.recv(9) == b'!'
    return s
def tcp(how, network):
    s = socket.socket(); s.settimeout(20)
    if how == 'bind': s.bind((network + '.2', 0))
    s.connect((network + '.1', 9000)); return s
opened = [(network, kind, kind(how, network)) for network in ('10.9.0', '10.8.0') for _ in range(3)
    for kind, how in [(udp, 'bind'), (udp, 'connect'), (udp, 'send'), (tcp, 'bind'), (tcp, 'connect')]]
taken = opened[0][2].getsockname()
try: udp('bind', '10.9.0').bind(taken); print('?')
except OSError: pass
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try: s.bind(taken); print('not in use?')
except OSError as e: assert e.errno == 98, e
wild = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); wild.bind(('0.0.0.0', 5353))
print(*['%s:%s:%d' % (kind.__name__, network, s.getsockname()[1]) for network, kind, s in opened], flush=True)
for _ in range(2):
    data, peer = wild.recvfrom(9); wild.sendto(data + b' to ' + peer[0].encode(), peer)
time.sleep(40)";

/// Answers datagrams at both addresses of the kernel, and leaves connections alone.
const KERNEL_SERVER: &str = "
import select, socket
def server(kind, address): s = socket.socket(socket.AF_INET, kind); s.bind(address); return s
udp = [server(socket.SOCK_DGRAM, (host, 9001)) for host in ('10.9.0.1', '10.8.0.1')]
tcp = server(socket.SOCK_STREAM, ('0.0.0.0', 9000)); tcp.listen(100)
while True:
    for s in select.select(udp, [], [])[0]: s.sendto(b'!', s.recvfrom(9)[1])";

/// Asks a server on each link from the kernel.
const KERNEL_CLIENT: &str = "
import socket
for network in ('10.9.0', '10.8.0'):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(20); s.bind((network + '.1', 0))
    s.sendto(b'ask', (network + '.2', 5353)); print(*s.recvfrom(99))";

#[test]
fn sockets_belong_to_the_shards_of_their_link() {
    if let Some(fixture) = fixture("sockets_belong_to_the_shards_of_their_link", &["python3"]) {
        sockets_belong_to_links(&fixture, LinkDevices::Tap);
    }
}

#[test]
fn sockets_belong_to_shards_over_af_xdp() {
    if let Some(fixture) = af_xdp_fixture("sockets_belong_to_shards_over_af_xdp", &["python3"]) {
        sockets_belong_to_links(&fixture, LinkDevices::AfXdp);
    }
}

/// Returns the number of IPv4 datagrams from a port in a capture.
fn datagrams_from(port: u16, capture: &[u8]) -> usize {
    let mut reader = PcapNgReader::new(capture).unwrap();
    let mut count = 0;
    while let Some(block) = reader.next_block() {
        if let Block::EnhancedPacket(packet) = block.unwrap() {
            let (data, port) = (&packet.data, port.to_be_bytes());
            count += usize::from(
                data.len() > 36 && data[12..14] == [8, 0] && data[23] == 17 && data[34..36] == port,
            );
        }
    }
    count
}

fn sockets_belong_to_links(fixture: &ProgramFixture, devices: LinkDevices) {
    let (config, name) = (configuration(fixture, devices), stack_name(fixture));
    let mut up = fixture.start_ginnel(&["up", &name, "--config", &config]);
    up.wait_until_stack_runs(&name);
    fixture.start_on_kernel("python3", &["-c", KERNEL_SERVER]);
    fixture.wait_until_listening("10.9.0.1:9000");
    let mut program = fixture.start_ginnel(&["run", "--stack", &name, "--", "python3", "-c", SOCKETS]);
    let ports = program.read_line();
    let sockets = String::from_utf8(fixture.ginnel(&["ss", &name, "-a", "-t", "-u", "-H"]).stdout).unwrap();
    assert_eq!(ports.split_whitespace().count(), 30, "{ports} {}", program.read_stderr());
    for socket in ports.split_whitespace() {
        let [kind, network, port] = socket.split(':').collect::<Vec<_>>().try_into().unwrap();
        let suffix = format!(":{port}");
        let words = |line: &str| line.split_whitespace().map(String::from).collect::<Vec<_>>();
        let is_local = |local: &str| {
            local.ends_with(&suffix) && (local.starts_with(network) || local.starts_with("0.0.0.0"))
        };
        let is_it = |words: &Vec<String>| words[0] == kind && is_local(&words[4]);
        let mut lines = sockets.lines().map(words).filter(is_it);
        let shard: usize = lines.next().unwrap_or_else(|| panic!("{socket}: {sockets}"))[6].parse().unwrap();
        assert_eq!(shard >= 2, network == "10.9.0", "{socket} {shard}: {sockets}");
    }
    let relayed = || counters(fixture, "shard.frames_relayed").iter().sum::<u64>();
    let relayed_before = relayed();
    let mut capture = fixture.start_ginnel(&["capture", &name]);
    // The head of the capture is written when all frames are copied.
    let mut captured = vec![0];
    capture.child.stdout.as_mut().unwrap().read_exact(&mut captured).unwrap();
    let answers = fixture.client_text("python3", &["-c", KERNEL_CLIENT]);
    let expected = "b'ask to 10.9.0.1' ('10.9.0.2', 5353)\nb'ask to 10.8.0.1' ('10.8.0.2', 5353)\n";
    assert_eq!(answers, expected);
    // One of the answers was sent by a shard of the other link.
    ginnel_testkit::processes::wait_until("the counters are published", || relayed() > relayed_before);
    assert_eq!(capture.stop(), 0, "{}", capture.read_stderr());
    capture.child.stdout.as_mut().unwrap().read_to_end(&mut captured).unwrap();
    assert_eq!(datagrams_from(5353, &captured), 2);
    assert_eq!(counters(fixture, "shard.relays_refused"), [0; 4]);
    drop(program);
    assert_eq!(up.stop(), 0, "{}", up.read_stderr());
}
