//! Upgrades of the shards that keep connections, listeners and UDP sockets; and upgrades that cannot.

use crate::fixture::{Fixture, GINNEL, RunningProgram, skipped, wait_until};
use crate::restart::{count_descriptors, outages, shard_process, supervisor_of};
use crate::restart_devices::{over_af_xdp, over_tap};
use ginnel::broker::{ConnectionPolicy, PROTOCOL_VERSION, Upgraded, upgrade};
use ginnel::{STATE_FORMAT, StateFormat};
use ginnel_testkit::interop::Namespace;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Upgrades a stack to the version that it has, which must keep connections. Returns how many.
#[track_caller]
fn upgrade_keeping(fixture: &Fixture, name: &str) -> u32 {
    let before = shard_process(supervisor_of(fixture, name));
    let upgraded = fixture.run(&["upgrade", name, "--keep-connections"]);
    let text = String::from_utf8(upgraded.stderr).unwrap();
    assert!(upgraded.status.success(), "{text}\n{}", fixture.run_ok(&["log", name]));
    assert_ne!(shard_process(supervisor_of(fixture, name)), before);
    let kept = text.split("connections kept: ").nth(1);
    let kept = kept.unwrap_or_else(|| panic!("{text}\n{}", fixture.run_ok(&["log", name])));
    kept.trim().trim_end_matches('.').parse().unwrap()
}

/// A program whose sockets are in all states while the shards are upgraded. It waits for the files `1`, `2`
/// and `3` of the test, and creates `waits` and `served-1` to `served-3`.
const SOCKETS: &str = "
signal.alarm(0)
def wait(name):
    while not os.path.exists(name): time.sleep(0.005)
l = server('127.0.0.1', 7001)
def pair():
    c = socket.create_connection(('127.0.0.1', 7001)); d, _ = l.accept(); return c, d
# Unread bytes, a half-closed connection, an idle one, and one that waits in the accept queue.
unread, d1 = pair(); d1.sendall(b'unread')
half, d2 = pair(); d2.sendall(b'last'); d2.shutdown(socket.SHUT_WR)
idle, d3 = pair()
q = server('127.0.0.1', 7002); queued = socket.create_connection(('127.0.0.1', 7002)); queued.sendall(b'early')
# A full send buffer: its bytes leave during the upgrades.
full, d4 = pair(); full.setblocking(False); sent = bytearray(); pattern = os.urandom(100000)
try:
    while True: sent += pattern[:full.send(pattern)]
except BlockingIOError: pass
# A thread blocked in accept, and one blocked in recv.
b = server('127.0.0.1', 7003); accepted = []
t1 = threading.Thread(target=lambda: accepted.append(b.accept()[0]), daemon=True); t1.start()
blocked, d5 = pair(); got = []
t2 = threading.Thread(target=lambda: got.append(blocked.recv(10)), daemon=True); t2.start()
# UDP: a datagram in the queue, and a connected socket.
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 7004))
v = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); v.connect(('127.0.0.1', 7004)); v.send(b'queued')
e = select.epoll(); e.register(idle, select.EPOLLIN | select.EPOLLET)
# A stream in both directions that never rests.
s1, s2 = pair(); stop = []; counts = [0, 0]
def echo():
    while True:
        part = s2.recv(65536)
        if not part: break
        s2.sendall(part)
def stream():
    block = bytes(range(256)) * 16
    while not stop:
        s1.sendall(block); assert exactly(s1, len(block)) == block; counts[0] += 1
threads = [threading.Thread(target=f, daemon=True) for f in (echo, stream)]
for t in threads: t.start()
open('waits', 'w').close()
for round in ('1', '2', '3'):
    wait(round)
    # New connections to an old listener, and fork.
    c, d = pair(); c.sendall(b'new'); assert d.recv(10) == b'new'
    if not os.fork():
        d.sendall(b'child'); os._exit(0)
    assert exactly(c, 5) == b'child'; os.wait(); c.close(); d.close()
    before = counts[0]
    while counts[0] < before + 10: time.sleep(0.001)
    open('served-' + round, 'w').close()
stop.append(1); threads[1].join()
assert exactly(unread, 6) == b'unread'
assert exactly(half, 100) == b'last'; half.sendall(b'back'); assert d2.recv(10) == b'back'
assert queued.getpeername()[1] == 7002; a, _ = q.accept(); assert a.recv(10) == b'early'
full.shutdown(socket.SHUT_WR); got_all = exactly(d4, len(sent) + 1)
same = next((i for i, (a, b) in enumerate(zip(got_all, sent)) if a != b), None)
assert got_all == sent, (len(got_all), len(sent), same)
assert not accepted and not got, (accepted, got)
k = socket.create_connection(('127.0.0.1', 7003)); t1.join(); k.sendall(b'x'); assert accepted[0].recv(1) == b'x'
d5.sendall(b'at last'); t2.join(); assert got == [b'at last']
assert u.recv(100) == b'queued'; v.send(b'next'); data, peer = u.recvfrom(100)
assert data == b'next'; u.sendto(b'reply', peer); assert v.recv(100) == b'reply'
d3.sendall(b'wake'); assert e.poll(5) == [(idle.fileno(), select.EPOLLIN)]; assert idle.recv(10) == b'wake'
d3.close(); assert idle.recv(10) == b''
print('all there')";

fn sockets_pass_on(shards: u32) {
    let fixture = Fixture::new(&format!("keep{shards}"));
    fs::write(fixture.path().join("shards.toml"), format!("[shards]\ncount = {shards}\n")).unwrap();
    let options = ["--loopback", "stack", "--config", "shards.toml", "--on-stack-death", "kill"];
    let _up = fixture.start_stack("lab", &options);
    let program = RunningProgram::new(fixture.script(&["--stack", "lab"], SOCKETS));
    wait_until("the sockets are open", || fixture.path().join("waits").exists());
    let supervisor = supervisor_of(&fixture, "lab");
    let descriptors = || {
        let shards = shard_process(supervisor).expect("the shards run");
        [supervisor, shards, program.pid()].map(count_descriptors)
    };
    // The first upgrade opens what later ones use again.
    let mut after_first = None;
    for round in ["1", "2", "3"] {
        let kept = upgrade_keeping(&fixture, "lab");
        assert!(kept >= 14, "{kept} connections");
        fs::write(fixture.path().join(round), "").unwrap();
        wait_until("the program goes on", || fixture.path().join(format!("served-{round}")).exists());
        after_first.get_or_insert_with(descriptors);
    }
    let (first, last) = (after_first.unwrap(), descriptors());
    // A process that has just begun or ended has some, and each connection would have many.
    assert!(last.iter().zip(first).all(|(last, first)| *last <= first + 4), "{last:?}, from {first:?}");
    let output = program.wait_for_output();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "all there\n", "{stderr}");
    let log = fixture.run_ok(&["log", "lab"]);
    assert_eq!(log.matches("connections kept: ").count(), 3, "{log}");
    assert_eq!(log.matches("the shards are passed to version").count(), 3, "{log}");
    assert!(!log.contains("was started again"), "{log}");
    assert!(fixture.run_ok(&["stat", "lab", "--json"]).contains("\"restarts\":0,"));
}

#[test]
fn sockets_of_a_shard_pass_on() {
    if !skipped("sockets_of_a_shard_pass_on") {
        sockets_pass_on(1);
    }
}

#[test]
fn sockets_of_two_shards_pass_on() {
    if !skipped("sockets_of_two_shards_pass_on") {
        sockets_pass_on(2);
    }
}

/// Echoes on each connection.
const ECHO: &str = "
signal.alarm(0); s = server('10.9.0.2', 7001); open('there', 'w').close()
def serve(c):
    while True:
        part = c.recv(65536)
        if not part: break
        c.sendall(part)
while True:
    c, _ = s.accept(); threading.Thread(target=serve, args=(c,), daemon=True).start()";

/// Upgrades a stack whose interface is in `host`, with connections of the kernel of `clients`.
fn connections_of_the_kernel_pass_on(name: &str, options: &[&str], host: &Namespace, clients: &Namespace) {
    let fixture = Fixture::new(name);
    let inside = |command: Command| host.run(|| Ok::<_, std::io::Error>(RunningProgram::new(command)));
    let up = [&["up", "lab", "--address", "10.9.0.2/24"], options];
    let _up = inside(fixture.ginnel(&up.concat())).unwrap();
    wait_until("it serves", || fixture.path().join("run/lab/ready").exists());
    let _server = inside(fixture.script(&["--stack", "lab"], ECHO)).unwrap();
    wait_until("the server waits", || fixture.path().join("there").exists());
    let address = SocketAddr::from(([10, 9, 0, 2], 7001));
    let connect = || {
        let stream = clients.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(5))).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream
    };
    let exchange = |mut stream: &TcpStream, text: &[u8]| {
        stream.write_all(text).unwrap();
        let mut got = vec![0; text.len()];
        stream.read_exact(&mut got).unwrap();
        assert_eq!(got, text);
    };
    let kept: Vec<TcpStream> = (0..10).map(|_| connect()).collect();
    kept.iter().for_each(|stream| exchange(stream, b"before"));
    // Bytes are on their way during the upgrades.
    let busy = connect();
    let bytes: Vec<u8> = (0..16_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::thread::scope(|scope| {
        let (busy, bytes) = (&busy, &bytes);
        scope.spawn(move || { busy }.write_all(bytes).unwrap());
        let received = scope.spawn(move || {
            let mut got = vec![0; bytes.len()];
            { busy }.read_exact(&mut got).unwrap();
            assert!(got == *bytes, "other bytes than were sent");
        });
        for _ in 0..3 {
            assert!(upgrade_keeping(&fixture, "lab") >= 11);
            kept.iter().for_each(|stream| exchange(stream, b"after"));
            exchange(&connect(), b"new");
        }
        received.join().unwrap();
    });
}

#[test]
fn connections_over_tap_pass_on() {
    over_tap("connections_over_tap_pass_on", |options, host, clients| {
        connections_of_the_kernel_pass_on("keep-tap", options, host, clients);
    });
}

#[test]
fn connections_over_af_xdp_pass_on() {
    over_af_xdp("connections_over_af_xdp_pass_on", |options, host, clients| {
        connections_of_the_kernel_pass_on("keep-xdp", options, host, clients);
    });
}

/// Sends over an old connection and a new one each time that the test creates one of the files `1` to `4`.
const ROUNDS: &str = "
signal.alarm(0); block = bytes(range(256)) * 2000
def trip(c):
    t = threading.Thread(target=c.sendall, args=(block,)); t.start()
    assert exactly(c, len(block)) == block; t.join()
def connect(): return socket.create_connection(('10.9.0.2', 7001))
old = connect(); trip(old); open('connected', 'w').close()
for round in '1234':
    while not os.path.exists(round): time.sleep(0.005)
    trip(old); trip(connect()); open('served-' + round, 'w').close()
print('all served')";

/// Upgrades both stacks of a memif link in turn.
#[test]
fn connections_over_memif_pass_on() {
    if skipped("connections_over_memif_pass_on") {
        return;
    }
    let fixture = Fixture::new("keep-memif");
    let socket = fixture.path().join("wire");
    let memif = |role: &str| format!("socket={},role={role}", socket.display());
    let _lab = fixture.start_stack("lab", &["--memif", &memif("server"), "--address", "10.9.0.2/24"]);
    let _peer = fixture.start_stack("peer", &["--memif", &memif("client"), "--address", "10.9.0.1/24"]);
    let server = RunningProgram::new(fixture.script(&["--stack", "lab"], ECHO));
    wait_until("the server waits", || fixture.path().join("there").exists());
    let client = RunningProgram::new(fixture.script(&["--stack", "peer"], ROUNDS));
    wait_until("the client is connected", || fixture.path().join("connected").exists());
    for (round, name) in ["lab", "peer", "lab", "peer"].into_iter().enumerate() {
        assert!(upgrade_keeping(&fixture, name) >= 1);
        fs::write(fixture.path().join(format!("{}", round + 1)), "").unwrap();
        wait_until("all is served", || fixture.path().join(format!("served-{}", round + 1)).exists());
    }
    assert_eq!(String::from_utf8(client.wait_for_output().stdout).unwrap(), "all served\n");
    drop(server);
}

/// A connection inside of a stack that is upgraded to versions which cannot continue with it.
struct Echoed<'a> {
    fixture: &'a Fixture,
    program: RunningProgram,
    asked: u32,
}

/// Answers each file `ask-N` by `answer-N` with what a round trip over an old connection gave.
const ECHOED: &str = "
signal.alarm(0); l = server('127.0.0.1', 7001)
c = socket.create_connection(('127.0.0.1', 7001)); d, _ = l.accept()
def trip():
    try:
        c.sendall(b'x'); return 'kept' if d.recv(1) == b'x' else 'closed'
    except OSError as e: return os.strerror(e.errno)
open('there', 'w').close(); n = 0
while True:
    n += 1
    while not os.path.exists(f'ask-{n}'): time.sleep(0.005)
    answer = trip(); open('a', 'w').write(answer); os.rename('a', f'answer-{n}')";

impl<'a> Echoed<'a> {
    fn new(fixture: &'a Fixture) -> Self {
        let program = RunningProgram::new(fixture.script(&["--stack", "lab"], ECHOED));
        wait_until("it is connected", || fixture.path().join("there").exists());
        Self { fixture, program, asked: 0 }
    }

    fn ask(&mut self) -> String {
        self.asked += 1;
        let path = |name: &str| self.fixture.path().join(format!("{name}-{}", self.asked));
        fs::write(path("ask"), "").unwrap();
        wait_until("the program answers", || path("answer").exists());
        assert!(self.program.pid() > 0);
        fs::read_to_string(path("answer")).unwrap()
    }
}

/// A format of saved states that this version does not read.
const OTHER_FORMAT: StateFormat = StateFormat { version: STATE_FORMAT.version + 1, ..STATE_FORMAT };

/// Compiles a C program that stands for another version of ginnel.
fn compile_version(fixture: &Fixture, name: &str, format: StateFormat) -> String {
    let StateFormat { version, layout } = format;
    let words = format!(
        "#define WORDS \"ginnel-shards {PROTOCOL_VERSION} 9.8.7 {version} {layout:x}\"\n#define GINNEL \"{GINNEL}\"\n"
    );
    fs::write(fixture.path().join("version.h"), words).unwrap();
    fixture.compile_c(name)
}

fn upgrade_to(fixture: &Fixture, executable: &str, policy: ConnectionPolicy) -> Result<Upgraded, String> {
    let executable = File::open(executable).unwrap();
    let control = fixture.path().join("run/lab/control");
    upgrade(&control, executable.as_fd(), policy, TIMEOUT).map_err(|error| error.to_string())
}

#[test]
fn version_with_other_states_resets_connections() {
    if skipped("version_with_other_states_resets_connections") {
        return;
    }
    let fixture = Fixture::new("other-state");
    let _up = fixture.start_stack("lab", &["--loopback", "stack", "--on-stack-death", "kill"]);
    let mut program = Echoed::new(&fixture);
    let supervisor = supervisor_of(&fixture, "lab");
    let before = shard_process(supervisor);
    // Built from other sources with the same number.
    let layout = StateFormat { layout: !STATE_FORMAT.layout, ..STATE_FORMAT };
    let between = compile_version(&fixture, "runs_ginnel", layout);
    let reason = upgrade_to(&fixture, &between, ConnectionPolicy::Keep).unwrap_err();
    assert!(reason.contains("reads other saved states of version"), "{reason}");
    let other = compile_version(&fixture, "runs_ginnel", OTHER_FORMAT);
    let reason = upgrade_to(&fixture, &other, ConnectionPolicy::Keep).unwrap_err();
    let versions = format!("saved states of version {}", OTHER_FORMAT.version);
    assert!(reason.contains("cannot be kept") && reason.contains(&versions), "{reason}");
    assert_eq!((shard_process(supervisor), program.ask()), (before, "kept".into()));
    let upgraded = upgrade_to(&fixture, &other, ConnectionPolicy::KeepIfPossible).unwrap();
    let reset = upgraded.connections.unwrap_err();
    assert!(reset.contains(&versions), "{reset}");
    assert_eq!(program.ask(), "Connection reset by peer");
    assert!(fixture.run_ok(&["stat", "lab", "--json"]).contains("\"restarts\":1,"));
    let log = fixture.run_ok(&["log", "lab"]);
    assert!(log.contains(&format!("connections were reset: {reset}")), "{log}");
    assert!(log.contains(&format!("the shards were not upgraded: {reason}")), "{log}");
    // From here on the running version is the other one.
    let back = fixture.run(&["upgrade", "lab"]);
    let text = String::from_utf8(back.stderr).unwrap();
    assert!(back.status.success() && text.contains("connections were reset: "), "{text}");
    upgrade_keeping(&fixture, "lab");
}

/// An upgrade that resets connections has no more failures than a death of the shards: one outage for each
/// program, and then new connections.
#[test]
fn nginx_and_redis_survive_resetting_upgrades() {
    if skipped("nginx_and_redis_survive_resetting_upgrades") {
        return;
    }
    let upgrade = |fixture: &Fixture, _: u32, round: usize| {
        let executable = match round % 2 {
            0 => compile_version(fixture, "runs_ginnel", OTHER_FORMAT),
            _ => GINNEL.into(),
        };
        let upgraded = upgrade_to(fixture, &executable, ConnectionPolicy::KeepIfPossible).unwrap();
        assert!(upgraded.connections.unwrap_err().contains("saved states of version"));
    };
    if let Some(all) = outages("nginx_and_redis_survive_resetting_upgrades", 3, upgrade) {
        for outages in all {
            assert!(outages.len() <= 3 && outages.iter().all(|outage| *outage < 5000), "{outages:?}");
        }
    }
}

#[test]
fn connections_are_reset_on_demand() {
    if skipped("connections_are_reset_on_demand") {
        return;
    }
    let fixture = Fixture::new("on-demand");
    let _up = fixture.start_stack("lab", &["--loopback", "stack", "--on-stack-death", "kill"]);
    let mut program = Echoed::new(&fixture);
    let upgraded = fixture.run(&["upgrade", "lab", "--reset-connections"]);
    let text = String::from_utf8(upgraded.stderr).unwrap();
    assert!(upgraded.status.success() && text.contains("connections were reset"), "{text}");
    assert_eq!(program.ask(), "Connection reset by peer");
    let both = fixture.run(&["upgrade", "lab", "--reset-connections", "--keep-connections"]);
    assert!(!both.status.success());
}

#[test]
fn failed_upgrade_keeps_connections() {
    if skipped("failed_upgrade_keeps_connections") {
        return;
    }
    let fixture = Fixture::new("failed-upgrade");
    let _up = fixture.start_stack("lab", &["--loopback", "stack", "--on-stack-death", "kill"]);
    let mut program = Echoed::new(&fixture);
    let unable = compile_version(&fixture, "cannot_start", STATE_FORMAT);
    for policy in [ConnectionPolicy::Keep, ConnectionPolicy::KeepIfPossible] {
        let reason = upgrade_to(&fixture, &unable, policy).unwrap_err();
        assert!(reason.contains("9.8.7") && reason.contains("no connection was lost"), "{reason}");
        assert_eq!(program.ask(), "kept");
    }
    let reason = upgrade_to(&fixture, &unable, ConnectionPolicy::Reset).unwrap_err();
    assert!(reason.contains("cannot start the shards"), "{reason}");
    assert_eq!(program.ask(), "Connection reset by peer");
    upgrade_keeping(&fixture, "lab");
}

/// The former shards serve while it is compared what the next ones must have in common with them.
#[test]
fn other_configuration_stops_no_shards() {
    if skipped("other_configuration_stops_no_shards") {
        return;
    }
    let fixture = Fixture::new("other-config");
    let config = fixture.path().join("stack.toml");
    let device = "[[device]]\nname = \"m\"\nkind = \"memory\"\n[[link]]\nname = \"l\"\ndevice = \"m\"\n";
    let with = |first: &str| fs::write(&config, format!("loopback = \"stack\"\n{first}\n{device}")).unwrap();
    let two = "[shards]\ncount = 2";
    with(two);
    let options = ["--config", "stack.toml", "--on-stack-death", "kill"];
    let _up = fixture.start_stack("lab", &options);
    let mut program = Echoed::new(&fixture);
    let supervisor = supervisor_of(&fixture, "lab");
    let shards = shard_process(supervisor);
    let bits = format!("{two}\n[steering]\nopened = \"port-bits\"");
    let vlan = format!("{two}\n[[link]]\nname = \"v\"\ndevice = \"m\"\nvlan = 7");
    let priority = format!("{two}\n[priority]\nenabled = true");
    let distribution = "the configuration distributes frames among the shards in another way";
    for (text, expected) in [
        (&bits, distribution),
        (&vlan, "the configuration has other devices or links, or in another order"),
        (&priority, "[priority] was switched on or off"),
        (&format!("{two}\ncpus = [0, 1023]"), "shards.cpus[1]: CPU 1023 is not in"),
        (&format!("{two}\n[shard]\nworkers = 1"), "shard.placement and shard.workers have no effect"),
        (&format!("{two}\n[[device]]\nname = \"nonesuch\"\nkind = \"af_xdp\""), "interface nonesuch"),
    ] {
        with(text);
        let refused = fixture.run(&["upgrade", "lab", "--keep-connections"]);
        let stderr = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && stderr.contains(expected), "{text}: {stderr}");
        assert_eq!(shard_process(supervisor), shards, "{text}: {stderr}");
        assert_eq!(program.ask(), "kept", "{text}");
    }
    // The shards that run say what is compared, and not the supervisor: a restart has read the configuration.
    with(&bits);
    let upgraded = fixture.run(&["upgrade", "lab"]);
    let stderr = String::from_utf8(upgraded.stderr).unwrap();
    assert!(upgraded.status.success(), "{stderr}");
    assert!(stderr.contains(&format!("connections were reset: {distribution}")), "{stderr}");
    assert_eq!(program.ask(), "Connection reset by peer");
    upgrade_keeping(&fixture, "lab");
    let log = fixture.run_ok(&["log", "lab"]);
    assert_eq!(log.matches("the shards are passed to version").count(), 1, "{log}");
}

/// The supervisor is asked to stop while the shards are upgraded. It stops once: it neither hangs nor starts
/// shards that nobody ends.
#[test]
fn stack_that_is_upgraded_can_be_stopped() {
    if skipped("stack_that_is_upgraded_can_be_stopped") {
        return;
    }
    for delay_ms in [0, 5, 10, 20, 40, 80] {
        let fixture = Fixture::new(&format!("stopped{delay_ms}"));
        let up = RunningProgram::new(fixture.ginnel(&["up", "lab", "--loopback", "stack"]));
        let control = fixture.path().join("run/lab/control");
        wait_until("it serves", || fixture.path().join("run/lab/ready").exists());
        let mut program = Echoed::new(&fixture);
        assert_eq!(program.ask(), "kept");
        std::thread::scope(|scope| {
            let upgrade = scope.spawn(|| {
                let executable = File::open(GINNEL).unwrap();
                upgrade(&control, executable.as_fd(), ConnectionPolicy::Keep, TIMEOUT)
            });
            std::thread::sleep(Duration::from_millis(delay_ms));
            up.signal("TERM");
            // Waits for the shards, too, which have its standard output.
            let output = up.wait_for_output();
            assert!(output.status.success(), "{delay_ms} ms: {output:?}");
            // Upgraded before, refused, or cut off: it does not hang.
            let _ = upgrade.join().unwrap();
        });
        assert_ne!(program.ask(), "kept", "{delay_ms} ms");
    }
}
