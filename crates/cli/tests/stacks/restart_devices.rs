//! Restarts of the shards over each device. TAP devices stay open; the others are opened again.

use crate::fixture::{Fixture, RunningProgram, skipped, wait_until};
use crate::restart::{kill_shards, supervisor_of};
use ginnel_testkit::interop::{Namespace, VethEnd, unavailable};
use ginnel_testkit::skip;
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

/// Answers each connection.
const SERVER: &str = "
signal.alarm(0); s = server('10.9.0.2', 7001); open('there', 'w').close()
while True:
    c, _ = s.accept(); c.sendall(b'served'); c.close()";

/// Asks the server until it answers.
const CLIENT: &str = "
while True:
    try:
        with socket.create_connection(('10.9.0.2', 7001), timeout=1) as s:
            if exactly(s, 6) == b'served': break
    except OSError: time.sleep(0.01)
print('served')";

/// Kills the shards of a stack whose interface is in `host`, with the kernel of `clients` as the client.
fn restarts_in_namespace(name: &str, options: &[&str], host: &Namespace, clients: &Namespace) {
    let fixture = Fixture::new(name);
    let inside = |command: Command| host.run(|| Ok::<_, std::io::Error>(RunningProgram::new(command)));
    let up = [&["up", "lab", "--address", "10.9.0.2/24"], options];
    let _up = inside(fixture.ginnel(&up.concat())).unwrap();
    wait_until("it serves", || fixture.path().join("run/lab/ready").exists());
    let _server = inside(fixture.script(&["--stack", "lab"], SERVER)).unwrap();
    wait_until("the server waits", || fixture.path().join("there").exists());
    let serves = || {
        let address = SocketAddr::from(([10, 9, 0, 2], 7001));
        let connected = clients.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(1)));
        let mut text = String::new();
        connected.is_ok_and(|mut stream| stream.read_to_string(&mut text).is_ok()) && text == "served"
    };
    wait_until("it answers", serves);
    for _ in 0..3 {
        kill_shards(supervisor_of(&fixture, "lab"));
        wait_until("it answers again", serves);
    }
    assert_eq!(fixture.run_ok(&["log", "lab"]).matches("was started again").count(), 3);
}

/// Calls `check` with the options of a stack over TAP, and with the namespaces of the stack and of its
/// clients, which are one. Skips `test` where that is not possible.
pub fn over_tap(test: &str, check: impl FnOnce(&[&str], &Namespace, &Namespace)) {
    if let Some(reason) = unavailable() {
        return skip(test, &reason);
    }
    if skipped(test) {
        return;
    }
    let namespace = Namespace::new().unwrap();
    check(&["--device", "tap:web0", "--kernel-address", "10.9.0.1/24"], &namespace, &namespace);
}

/// As [`over_tap`], with AF_XDP on a pair of interfaces between two namespaces.
pub fn over_af_xdp(test: &str, check: impl FnOnce(&[&str], &Namespace, &Namespace)) {
    if let Some(reason) = unavailable() {
        return skip(test, &reason);
    }
    if skipped(test) {
        return;
    }
    let (host, clients) = (Namespace::new().unwrap(), Namespace::new().unwrap());
    let veth = |name| VethEnd { name, queues: 1 };
    host.connect_queues(veth("web0"), &clients, veth("web1"), 1500).unwrap();
    clients.ip("addr add 10.9.0.1/24 dev web1").unwrap();
    check(&["--device", "af_xdp:web0"], &host, &clients);
}

#[test]
fn stack_over_tap_serves_again() {
    over_tap("stack_over_tap_serves_again", |options, host, clients| {
        restarts_in_namespace("restart-tap", options, host, clients);
    });
}

#[test]
fn stack_over_af_xdp_serves_again() {
    over_af_xdp("stack_over_af_xdp_serves_again", |options, host, clients| {
        restarts_in_namespace("restart-xdp", options, host, clients);
    });
}

/// Changes the interface `web0` by `change` in the namespace `host` of a running stack with these options.
/// The log of the restart must have `expected`.
fn changed_interface_is_logged(
    name: &str,
    (options, host): (&[&str], &Namespace),
    changes: &[(&dyn Fn(), &[&str])],
) {
    let fixture = Fixture::new(name);
    let inside = |command: Command| host.run(|| Ok::<_, std::io::Error>(RunningProgram::new(command)));
    let up = [&["up", "lab", "--address", "10.9.0.2/24"], options];
    let _up = inside(fixture.ginnel(&up.concat())).unwrap();
    wait_until("it serves", || fixture.path().join("run/lab/ready").exists());
    let log = || fixture.run_ok(&["log", "lab"]);
    for (starts, (change, expected)) in changes.iter().enumerate() {
        change();
        kill_shards(supervisor_of(&fixture, "lab"));
        wait_until("the shards run", || log().matches("was started again").count() > starts);
        let log = log();
        let of_change = "differs from the last start of the shards: ";
        let entries: Vec<&str> = log.lines().filter(|line| line.contains(of_change)).collect();
        assert_eq!(entries.len(), usize::from(!expected.is_empty()) * (starts + 1), "{log}");
        let last = entries.last().copied().unwrap_or_default();
        assert!(last.contains("WARN  interface web0 "), "{log}");
        expected.iter().for_each(|part| assert!(last.contains(part), "{part}: {log}"));
    }
}

#[test]
fn changed_tap_is_logged_at_a_restart() {
    over_tap("changed_tap_is_logged_at_a_restart", |options, host, _| {
        let change = || {
            host.ip("link set web0 mtu 1400").unwrap();
            host.ip("link set web0 address 02:00:00:00:00:07").unwrap();
        };
        // Programs cannot wait for the interface: the next shards make it.
        let delete = || drop(host.ip("link del web0").unwrap());
        let replace = || {
            host.ip("link del web0").unwrap();
            host.ip("tuntap add web0 mode tap").unwrap();
            host.ip("link set web0 mtu 1300").unwrap();
        };
        let changes: [(&dyn Fn(), &[&str]); 3] = [
            (&change, &["MTU 1400 (was 1500)", "MAC address 02:00:00:00:00:07 (was "]),
            (&delete, &["deleted and made again (index ", "MTU 1500 (was 1400)", " (was 02:00:00:00:00:07)"]),
            (&replace, &["deleted and made again (index ", "MTU 1300 (was 1500)"]),
        ];
        changed_interface_is_logged("changed-tap", (options, host), &changes);
    });
}

#[test]
fn changed_af_xdp_is_logged_at_a_restart() {
    over_af_xdp("changed_af_xdp_is_logged_at_a_restart", |options, host, clients| {
        let change = || drop(host.ip("link set web0 mtu 1400").unwrap());
        let replace = || {
            host.ip("link del web0").unwrap();
            let veth = |name| VethEnd { name, queues: 1 };
            host.connect_queues(veth("web0"), clients, veth("web1"), 1500).unwrap();
        };
        let changes: [(&dyn Fn(), &[&str]); 2] = [
            (&change, &["MTU 1400 (was 1500)"]),
            (&replace, &["deleted and made again (index ", "MTU 1500 (was 1400)", "MAC address "]),
        ];
        changed_interface_is_logged("changed-xdp", (options, host), &changes);
    });
}

/// Kills the shards of both stacks of a memif link in turn.
#[test]
fn stacks_over_memif_serve_again() {
    if skipped("stacks_over_memif_serve_again") {
        return;
    }
    let fixture = Fixture::new("restart-memif");
    let socket = fixture.path().join("wire");
    let memif = |role: &str| format!("socket={},role={role}", socket.display());
    let _lab = fixture.start_stack("lab", &["--memif", &memif("server"), "--address", "10.9.0.2/24"]);
    let _peer = fixture.start_stack("peer", &["--memif", &memif("client"), "--address", "10.9.0.1/24"]);
    let server = RunningProgram::new(fixture.script(&["--stack", "lab"], SERVER));
    wait_until("the server waits", || fixture.path().join("there").exists());
    let serves = || assert_eq!(fixture.script_output(&["--stack", "peer"], CLIENT), "served\n");
    serves();
    for name in ["lab", "peer", "lab", "peer"] {
        kill_shards(supervisor_of(&fixture, name));
        serves();
    }
    for name in ["lab", "peer"] {
        let log = fixture.run_ok(&["log", name]);
        // Its own shards were killed twice, which logs no "down", and those of its peer twice, which does.
        for (entry, least) in [("memif link is up", 5), ("memif link is down", 2)] {
            assert!(log.matches(entry).count() >= least, "{name}: {entry}\n{log}");
        }
    }
    drop(server);
}
