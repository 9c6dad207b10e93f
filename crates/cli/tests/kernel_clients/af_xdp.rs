//! The server over AF_XDP, on an interface that it shares with a kernel, and clients at the other end of the
//! veth pair.

use super::{GINNEL, Server, ab, corpus};
use ginnel_testkit::interop::{Namespace, VethEnd, unavailable};
use ginnel_testkit::skip;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The kernel's own address at the server's end.
const HOST: &str = "10.9.0.3";

/// The namespaces of the server and of the clients.
struct VethCable {
    host: Namespace,
    clients: Namespace,
}

impl VethCable {
    /// Creates a pair of veth interfaces, with `web0` at the server's end and two queues each.
    fn create(mtu: u32) -> Self {
        let veth = |name| VethEnd { name, queues: 2 };
        let cable = Self { host: Namespace::new().unwrap(), clients: Namespace::new().unwrap() };
        cable.host.connect_queues(veth("web0"), &cable.clients, veth("web1"), mtu).unwrap();
        cable.host.ip(&format!("addr add {HOST}/24 dev web0")).unwrap();
        cable.clients.ip("addr add 10.9.0.1/24 dev web1").unwrap();
        cable.clients.ip("addr add fd09::1/64 dev web1 nodad").unwrap();
        cable
    }

    /// Starts `ginnel httpd` at the server's end.
    fn serve(self, name: &str, device: &str, options: &[&str]) -> (Server, Namespace) {
        let folder = corpus(name);
        let mut command = Command::new(GINNEL);
        command.arg("httpd").arg(folder.join("site")).arg("--device").arg(device).args(options);
        let child = self.host.run(|| command.stdout(Stdio::piped()).spawn()).unwrap();
        (Server { namespace: self.clients, child, folder }, self.host)
    }
}

const ADDRESSES: [&str; 4] = ["--address", "10.9.0.2/24", "--address", "fd09::2/64"];

fn start(name: &str, mtu: u32, device: &str, options: &[&str]) -> (Server, Namespace) {
    let (server, host) = VethCable::create(mtu).serve(name, device, &[&ADDRESSES, options].concat());
    server.wait_until_it_answers();
    (server, host)
}

/// Returns true, and prints a note, if the test cannot run here.
fn skipped(test: &str, programs: &[&str]) -> bool {
    let missing = |program: &&&str| Command::new(program).arg("--version").output().is_err();
    let reason = unavailable()
        .or_else(|| programs.iter().find(missing).map(|program| format!("no {program}")))
        .or_else(|| (!rustix::process::geteuid().is_root()).then(|| "BPF programs need root".into()));
    if let Some(reason) = &reason {
        skip(test, reason);
    }
    reason.is_some()
}

#[test]
fn curl_gets_every_page_over_af_xdp() {
    let test = "curl_gets_every_page_over_af_xdp";
    if skipped(test, &["curl"]) {
        return;
    }
    let (server, host) = start("xdp", 1500, "af_xdp:web0", &[]);
    server.compare_all_pages("10.9.0.2");
    server.compare_all_pages("[fd09::2]");
    // The host uses the interface as before.
    let listener = host.run(|| TcpListener::bind((HOST, 80))).unwrap();
    let greeting = std::thread::spawn(move || listener.accept().unwrap().0.write_all(b"the host").unwrap());
    let mut text = String::new();
    let mut stream = server.namespace.run(|| TcpStream::connect((HOST, 80))).unwrap();
    stream.read_to_string(&mut text).unwrap();
    greeting.join().unwrap();
    assert_eq!(text, "the host");
}

#[test]
fn af_xdp_supports_jumbo_frames_faults_and_capture() {
    let test = "af_xdp_supports_jumbo_frames_faults_and_capture";
    if skipped(test, &["curl"]) {
        return;
    }
    let capture =
        std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("xdp-{}.pcapng", std::process::id()));
    let faults = "loss=1% reorder=1% duplicate=1% corrupt=0.5%";
    let options = ["--link", faults, "--capture", capture.to_str().unwrap()];
    let (mut server, _host) = start("xdp-bad", 9000, "af_xdp:web0,attach=generic", &options);
    server.compare_all_pages("10.9.0.2");
    server.stop();
    assert!(std::fs::metadata(&capture).unwrap().len() > 1 << 20, "all pages are in it");
    std::fs::remove_file(capture).unwrap();
}

#[test]
fn two_shards_serve_over_two_queues() {
    if skipped("two_shards_serve_over_two_queues", &["curl", "ab"]) {
        return;
    }
    let (mut server, _host) = start("xdp-shards", 1500, "af_xdp:web0,queues=0-1", &["--shards", "2"]);
    server.compare_all_pages("10.9.0.2");
    ab(&server);
    let text = server.stop();
    let row = text.lines().find(|line| line.starts_with("| frames received ")).expect(&text);
    let received: Vec<u64> =
        row.split('|').skip(2).filter_map(|cell| cell.trim().replace(',', "").parse().ok()).collect();
    assert!(received.len() == 2 && received.iter().all(|&n| n > 100), "{text}");
}

#[test]
fn a_shared_address_has_servers_of_both_stacks() {
    if skipped("a_shared_address_has_servers_of_both_stacks", &["curl"]) {
        return;
    }
    let cable = VethCable::create(1500);
    cable.host.ip(&format!("addr del {HOST}/24 dev web0")).unwrap();
    cable.host.ip("addr add 10.9.0.2/24 dev web0").unwrap();
    cable.host.ip("addr add fd09::2/64 dev web0 nodad").unwrap();
    let config =
        std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("xdp-{}.toml", std::process::id()));
    let text = "[tcp]\nlocal_port_first = 61000\nlocal_port_last = 65535\n\
                [network]\nudp_port_first = 61000\nudp_port_last = 65535\n\
                [[device]]\nname = \"web0\"\nkind = \"af_xdp\"\naf_xdp = \"take=ports,ports=80\"\n\
                [[link]]\nname = \"lan\"\ndevice = \"web0\"\naddresses = [\"10.9.0.2/24\", \"fd09::2/64\"]\n";
    std::fs::write(&config, text).unwrap();
    let folder = corpus("xdp-shared");
    let mut command = Command::new(GINNEL);
    command.arg("httpd").arg(folder.join("site")).arg("--config").arg(&config);
    let child = cable.host.run(|| command.stdout(Stdio::piped()).spawn()).unwrap();
    let server = Server { namespace: cable.clients, child, folder };
    server.wait_until_it_answers();
    std::fs::remove_file(config).unwrap();
    for (host, ours, theirs) in [("10.9.0.2", "10.9.0.2", "10.9.0.1"), ("[fd09::2]", "fd09::2", "fd09::1")] {
        server.compare_all_pages(host);
        // Other ports belong to the kernel, and so do the ports of the kernel's own outgoing connections from
        // the address.
        connects(&server.namespace, &cable.host, ours);
        let (here, _) = connects(&cable.host, &server.namespace, theirs);
        assert_eq!(here.local_addr().unwrap().ip().to_string(), ours);
    }
}

/// Returns both ends of a connection between the kernels of two namespaces.
fn connects(from: &Namespace, to: &Namespace, address: &str) -> (TcpStream, TcpStream) {
    let listener = to.run(|| TcpListener::bind((address, 8080))).unwrap();
    let here = from.run(|| TcpStream::connect((address, 8080))).unwrap();
    let (there, peer) = listener.accept().unwrap();
    assert_eq!(here.local_addr().unwrap(), peer);
    (here, there)
}

#[test]
fn a_killed_af_xdp_server_can_restart() {
    if skipped("a_killed_af_xdp_server_can_restart", &["curl"]) {
        return;
    }
    let (mut server, host) = start("xdp-kill", 1500, "af_xdp:web0", &[]);
    let is_attached = || host.ip("link show web0").unwrap().contains("xdp");
    assert!(is_attached());
    for _ in 0..3 {
        server.child.kill().unwrap();
        assert_eq!(server.child.wait().unwrap().signal(), Some(9));
        let deadline = Instant::now() + Duration::from_secs(5);
        while is_attached() {
            assert!(Instant::now() < deadline, "the program outlives its process");
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut command = Command::new(GINNEL);
        command
            .arg("httpd")
            .arg(server.folder.join("site"))
            .args(["--device", "af_xdp:web0"])
            .args(ADDRESSES);
        server.child = host.run(|| command.stdout(Stdio::piped()).spawn()).unwrap();
        server.wait_until_it_answers();
    }
}

#[test]
fn missing_af_xdp_requirements_give_one_line() {
    if skipped("missing_af_xdp_requirements_give_one_line", &["unshare"]) {
        return;
    }
    let says = |command: &mut Command, words: &str| {
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{text}");
        assert!(text.lines().count() == 1 && text.contains(words), "{text}");
    };
    let mut nowhere = Command::new(GINNEL);
    nowhere.args(["echo", "--device", "af_xdp:nowhere0", "--address", "10.9.0.2/24"]);
    says(&mut nowhere, "AF_XDP on nowhere0: the interface does not exist");
    // Root of a user namespace has CAP_NET_ADMIN in it, but not CAP_BPF.
    let mut powerless = Command::new("unshare");
    powerless.args(["--user", "--map-root-user", "--net", "sh", "-c"]);
    powerless
        .arg(format!("ip link set lo up && exec {GINNEL} echo --device af_xdp:lo --address 10.9.0.2/24"));
    says(&mut powerless, "needs CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF and CAP_PERFMON");
}
