//! Ports that several programs share (`SO_REUSEPORT`).

use crate::fixture::{Fixture, RunningProgram, RunningStack, skipped, wait_until};

const ON_LAB: [&str; 2] = ["--stack", "lab"];

/// Starts a stack with two shards.
fn two_shards(fixture: &Fixture) -> RunningStack<'_> {
    std::fs::write(fixture.path().join("two.toml"), "[shards]\ncount = 2\n").unwrap();
    fixture.start_stack("lab", &["--config", "two.toml", "--loopback", "stack"])
}

#[test]
fn reuseport_listeners_share_all_shards() {
    if skipped("reuseport_listeners_share_all_shards") {
        return;
    }
    let fixture = Fixture::new("shared");
    let _up = two_shards(&fixture);
    // `B` does not accept until it is told to.
    let serve = |name: &str| {
        let text = format!(
            "
s = server('127.0.0.1', 7301, reuse_port=True, backlog=100)
open('at{name}', 'w').close()
while '{name}' == 'B' and not os.path.exists('go'): time.sleep(0.01)
keep = []
while True:
    a, _ = s.accept(); a.sendall(b'{name}'); keep.append(a)"
        );
        RunningProgram::new(fixture.script(&ON_LAB, &text))
    };
    let here = |name: &str| fixture.path().join(name).exists();
    let _a = serve("A");
    let b = serve("B");
    wait_until("both listen", || here("atA") && here("atB"));
    let listeners = fixture.run_ok(&["ss", "lab", "-l", "-H", "src", "127.0.0.1:7301"]);
    assert_eq!(listeners.lines().count(), 4, "each on each shard: {listeners}");
    // A process without SO_REUSEPORT, and a process of another user, are refused.
    let others = "
def refused(**more):
    try: server('127.0.0.1', 7301, **more); return 'served'
    except OSError as e: return os.strerror(e.errno)
print(refused())
if os.geteuid() == 0: os.seteuid(65534); print(refused(reuse_port=True))
else: print(refused())";
    assert_eq!(fixture.script_output(&ON_LAB, others), "Address already in use\nAddress already in use\n");
    let ask = "
all_ = [socket.create_connection(('127.0.0.1', 7301)) for _ in range(60)]
def answered(): return sum(bool(select.select([c], [], [], 0)[0]) for c in all_)
first = 0
while first < 10 or first < answered(): first = answered(); time.sleep(0.3)
open('waits.new', 'w').write(str(first)); os.rename('waits.new', 'waits')
def end(c):
    try: return c.recv(1).decode()
    except ConnectionResetError: return 'reset'
ends = [end(c) for c in all_]
print(len(ends), sorted(set(ends)))
print({exactly(socket.create_connection(('127.0.0.1', 7301)), 1).decode() for _ in range(40)})";
    let client = RunningProgram::new(fixture.script(&ON_LAB, ask));
    wait_until("one has answered", || here("waits"));
    let answered = std::fs::read_to_string(fixture.path().join("waits")).unwrap();
    let answered: usize = answered.parse().unwrap();
    assert!((10..=50).contains(&answered), "both have their share: {answered}");
    let by_shard = |shard: &str| {
        let lines = fixture.run_ok(&["ss", "lab", "state", "established", "-H", "src", "127.0.0.1:7301"]);
        lines.lines().filter(|line| line.trim_end().ends_with(shard)).count()
    };
    assert!(by_shard(" 0") > 5 && by_shard(" 1") > 5);
    // Connections queued at the killed process move to the other one; so do later ones.
    b.signal("KILL");
    let output = client.wait_for_output();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "60 ['A']\n{'A'}\n");
    let _again = serve("B");
    std::fs::write(fixture.path().join("go"), "").unwrap();
    wait_until("it is there again", || {
        let ask = "print(exactly(socket.create_connection(('127.0.0.1', 7301)), 1).decode())";
        fixture.script_output(&ON_LAB, ask) == "B\n"
    });
}

#[test]
fn reuseport_distributes_datagrams_by_sender() {
    if skipped("reuseport_distributes_datagrams_by_sender") {
        return;
    }
    let fixture = Fixture::new("spread");
    let _up = two_shards(&fixture);
    let serve = |name: &str| {
        let text = format!(
            "
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
s.bind(('127.0.0.1', 7302)); open('at{name}', 'w').close()
while True:
    data, peer = s.recvfrom(100); s.sendto(b'{name}', peer)"
        );
        RunningProgram::new(fixture.script(&ON_LAB, &text))
    };
    let servers = [serve("A"), serve("B")];
    wait_until("both are there", || {
        fixture.path().join("atA").exists() && fixture.path().join("atB").exists()
    });
    let ask = "
by = {}
for n in range(40):
    c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); c.bind(('127.0.0.1', 20000 + n))
    def ask(): c.sendto(b'who', ('127.0.0.1', 7302)); return c.recv(9)
    one = ask(); assert ask() == one; by[one] = by.get(one, 0) + 1
print(len(by), min(by.values()) > 5)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
try: s.bind(('127.0.0.1', 7302))
except OSError as e: print(os.strerror(e.errno))";
    assert_eq!(fixture.script_output(&ON_LAB, ask), "2 True\nAddress already in use\n");
    servers[0].signal("KILL");
    let left = "
def ask():
    c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); c.settimeout(0.2); c.connect(('127.0.0.1', 7302))
    try: c.send(b'who'); return c.recv(9)
    except (TimeoutError, ConnectionRefusedError): return b'lost'
# Datagrams to the dead process are lost. One whose answer takes too long counts as lost.
while b'lost' in (answers := {ask() for _ in range(20)}): pass
print(answers)";
    assert_eq!(fixture.script_output(&ON_LAB, left), "{b'B'}\n");
}
