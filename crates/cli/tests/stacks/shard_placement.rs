//! The shards to which sockets belong.

use crate::fixture::{Fixture, RunningProgram, RunningStack, skipped, wait_until};

const ON_LAB: [&str; 2] = ["--stack", "lab"];

/// Starts a stack with two shards.
fn two_shards<'a>(fixture: &'a Fixture, more: &str) -> RunningStack<'a> {
    std::fs::write(fixture.path().join("two.toml"), format!("[shards]\ncount = 2\n{more}")).unwrap();
    fixture.start_stack("lab", &["--config", "two.toml", "--loopback", "stack"])
}

/// Returns the number of UDP sockets that `ginnel ss` shows, by shard.
fn datagram_sockets(fixture: &Fixture, filter: &[&str]) -> [usize; 2] {
    let lines = fixture.run_ok(&[&["ss", "lab", "-u", "-a", "-H"], filter].concat());
    ["0", "1"]
        .map(|shard| lines.lines().filter(|line| line.trim_end().ends_with(&format!(" {shard}"))).count())
}

#[test]
fn a_udp_socket_spans_all_shards() {
    if skipped("a_udp_socket_spans_all_shards") {
        return;
    }
    let fixture = Fixture::new("homes");
    let _up = two_shards(&fixture, "");
    let script = "
def udp(port=None, share=False):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(20)
    if share: s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if port is not None: s.bind(('127.0.0.1', port))
    return s
named = [udp(21000 + n) for n in range(20)]
chosen = [udp(0) for n in range(20)]
connected = []
for n in range(20):
    c = udp(); c.connect(named[n].getsockname()); connected.append(c)
def step(name):
    open(name, 'w').close()
    while not os.path.exists(name + '-seen'): time.sleep(0.01)
step('open')
def talk():
    # Sockets of all three kinds reach each other, whichever shards own them.
    for n, c in enumerate(connected): c.send(b'to %d' % n)
    for n, s in enumerate(named):
        data, peer = s.recvfrom(100); assert data == b'to %d' % n and peer == connected[n].getsockname(), data
        s.sendto(b'back', peer); chosen[n].sendto(b'third', s.getsockname())
    for c in connected: assert c.recv(100) == b'back'
    for n, s in enumerate(named): assert s.recvfrom(100) == (b'third', chosen[n].getsockname())
    # All of them in one set, and the empty ones stay silent.
    e = select.epoll()
    for s in chosen: e.register(s, select.EPOLLIN)
    for s in chosen: named[3].sendto(b'all', s.getsockname())
    left = {s.fileno(): s for s in chosen}
    while left:
        for fd, ev in e.poll(): assert left.pop(fd).recv(9) == b'all'; e.unregister(fd)
    # As large as can be, which goes in fragments.
    connected[1].send(b'x' * 60000); assert len(named[1].recv(65535)) == 60000
talk()
child = os.fork()
if not child: talk(); os._exit(0)
assert os.waitpid(child, 0)[1] == 0
talk()
for s in named: s.close()
try:
    while True: connected[0].send(b'?'); time.sleep(0.01)
except ConnectionRefusedError: pass
again = udp(21000); again.close()
for s in chosen + connected: s.close()
step('closed')
# One port for several, first by a number that was chosen: each has a share, and a sender stays with one.
first = udp(0, share=True); port = first.getsockname()[1]
group = [first] + [udp(port, share=True) for _ in range(3)]
try: udp(port); print('shared with a stranger')
except OSError as e: print(os.strerror(e.errno))
step('group')
for n in range(80):
    c = udp(0); c.sendto(b'%d' % n, ('127.0.0.1', port)); c.sendto(b'%d' % n, ('127.0.0.1', port)); c.close()
got = [[] for _ in group]
while sum(map(len, got)) < 160:
    for s in select.select(group, [], [])[0]: got[group.index(s)].append(s.recv(9))
print(select.select(group, [], [], 0.3)[0], min(map(len, got)) > 10, all(m.count(d) == 2 for m in got for d in m))";
    let program = RunningProgram::new(fixture.script(&ON_LAB, script));
    let seen = |name: &str| std::fs::write(fixture.path().join(format!("{name}-seen")), "").unwrap();
    let reached = |name: &str| wait_until(name, || fixture.path().join(name).exists());
    reached("open");
    let all = datagram_sockets(&fixture, &[]);
    assert!(all[0] + all[1] == 60 && all.iter().all(|count| (25..=35).contains(count)), "{all:?}");
    seen("open");
    reached("closed");
    wait_until("all are gone", || datagram_sockets(&fixture, &[]) == [0, 0]);
    seen("closed");
    reached("group");
    assert_eq!(datagram_sockets(&fixture, &[]), [2, 2]);
    seen("group");
    let output = program.wait_for_output();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert_eq!(stdout, "Address already in use\n[] True True\n", "{output:?}");
}

#[test]
fn udp_sockets_are_distributed_over_shards() {
    if skipped("udp_sockets_are_distributed_over_shards") {
        return;
    }
    let fixture = Fixture::new("single");
    let _up = two_shards(&fixture, "");
    let script = "
for n in range(8):
    if not os.fork():
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 22000 + n)); time.sleep(40); os._exit(0)
time.sleep(40)";
    let _program = RunningProgram::new(fixture.script(&ON_LAB, script));
    let all = || datagram_sockets(&fixture, &[]);
    wait_until("all are there", || all().iter().sum::<usize>() == 8);
    let all = all();
    assert!(all.iter().all(|count| *count >= 2), "{all:?}");
}

/// Each shard has its part of the ports, and connections are opened on the shards in turn. A non-blocking
/// connect does not know beforehand whether its shard has a free port.
#[test]
fn any_shard_with_free_ports_can_connect() {
    if skipped("any_shard_with_free_ports_can_connect") {
        return;
    }
    let fixture = Fixture::new("ports");
    // One shard has two of the ports, and the other has eight.
    let _up = two_shards(&fixture, "[tcp]\nlocal_port_first = 40006\nlocal_port_last = 40015\n");
    let script = "
s = server('127.0.0.1', 7401, backlog=100)
# The first asks; those behind it do not.
first = socket.create_connection(('127.0.0.1', 7401))
e = select.epoll(); open_ = {}
for n in range(12):
    c = socket.socket(); c.setblocking(False); c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try: c.connect(('127.0.0.1', 7401)); print('at once?')
    except BlockingIOError: pass
    except OSError as e_: print('refused', n, os.strerror(e_.errno)); c.close(); continue
    open_[c.fileno()] = c; e.register(c, select.EPOLLOUT | select.EPOLLET)
errors = []; good = {}
while open_:
    for fd, ev in e.poll():
        c = open_.pop(fd); e.unregister(c); error = c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error: errors.append(os.strerror(error))
        else: good[c.getsockname()[1]] = c
print(len(good), sorted(good) + [first.getsockname()[1]] == sorted(good) + [p for p in range(40006, 40016) if p not in good])
print(errors)
for port, c in good.items():
    assert c.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY); c.setblocking(True); c.sendall(b'%d' % port)
peers = {}
for _ in range(10): a, peer = s.accept(); peers[peer[1]] = a
for port, c in good.items():
    assert peers[port].recv(9) == b'%d' % port; peers[port].sendall(b'and back'); assert c.recv(99) == b'and back'
c = socket.socket(); c.settimeout(None)
try: c.connect(('127.0.0.1', 7401))
except OSError as e_: print(os.strerror(e_.errno))";
    let none = "Cannot assign requested address";
    assert_eq!(
        fixture.script_output(&ON_LAB, script),
        format!("9 True\n['{none}', '{none}', '{none}']\n{none}\n")
    );
}

/// Workers that echo, each bound to the CPU of a shard. The client gets the number of the worker first.
const MOVING_WORKERS: &str = "
import threading, random
cpus = [int(cpu) for cpu in open('cpus').read().split()]
s = server('127.0.0.1', 7402, backlog=500)
def serve(worker):
    os.sched_setaffinity(0, {cpus[worker]})
    s.setblocking(False); e = select.epoll(); e.register(s, select.EPOLLIN); open_ = {}
    while True:
        for fd, _ in e.poll():
            if fd == s.fileno():
                try: c, _ = s.accept()
                except BlockingIOError: continue
                open_[c.fileno()] = c; e.register(c, select.EPOLLIN); c.sendall(b'%d' % worker)
            else:
                data = open_[fd].recv(65536)
                if data: open_[fd].setblocking(True); open_[fd].sendall(data)
                else: e.unregister(fd); open_.pop(fd).close()
workers = []
for worker in range(2):
    pid = os.fork()
    if not pid: serve(worker); os._exit(0)
    workers.append(pid)
def connect():
    c = socket.create_connection(('127.0.0.1', 7402)); c.settimeout(30)
    return c, int(exactly(c, 1))
def step(name, text):
    with open(name + '.part', 'w') as f: f.write(text)
    os.rename(name + '.part', name)
    while not os.path.exists(name + '-seen'): time.sleep(0.01)
def group(name, count):
    opened = [connect() for _ in range(count)]
    step(name, ' '.join('%d:%d' % (c.getsockname()[1], worker) for c, worker in opened))
    return [c for c, _ in opened]
# Both workers listen, and both shards have heard of it, before it is compared who gets what.
heard = set()
while len(heard) < 2: c, worker = connect(); heard.add(worker); c.close()
for _ in range(100): connect()[0].close()
kept = group('before', 60)
# Both change places, as by taskset. They learn of it as they accept.
for worker, pid in enumerate(workers): os.sched_setaffinity(pid, {cpus[1 - worker]})
for _ in range(600): connect()[0].close()
kept += group('after', 60)
# From now on they move all the time.
moving = True
def move():
    while moving:
        for pid in workers: os.sched_setaffinity(pid, random.choice([{cpus[0]}, {cpus[1]}, set(cpus)]))
        time.sleep(0.001)
mover = threading.Thread(target=move); mover.start()
for turn in range(20):
    for n, c in enumerate(kept):
        text = b'%d.%d ' % (turn, n) * 700
        c.sendall(text); assert exactly(c, len(text)) == text
    fresh, _ = connect(); fresh.sendall(b'new'); assert exactly(fresh, 3) == b'new'; fresh.close()
moving = False; mover.join()
for pid in workers: os.kill(pid, 9); os.waitpid(pid, 0)
print('intact')";

/// New connections follow a worker that is moved to the CPU of another shard; all bytes arrive wherever it
/// is.
#[test]
fn connections_follow_a_worker_that_moves() {
    let test = "connections_follow_a_worker_that_moves";
    if skipped(test) {
        return;
    }
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> =
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).take(2).collect();
    let &[first, second] = cpus.as_slice() else { return ginnel_testkit::skip(test, "one CPU") };
    let fixture = Fixture::new("moving");
    // No offer goes to another worker because this one is slow.
    let more = format!("cpus = [{first}, {second}]\n[channel]\noffer_ms = 60000\n");
    let _up = two_shards(&fixture, &more);
    std::fs::write(fixture.path().join("cpus"), format!("{first} {second}")).unwrap();
    let program =
        RunningProgram::new(fixture.script(&["--stack", "lab", "--listen-spawn", "bound"], MOVING_WORKERS));
    for (name, prefers) in [("before", [0, 1]), ("after", [1, 0])] {
        wait_until(name, || fixture.path().join(name).exists());
        let opened = std::fs::read_to_string(fixture.path().join(name)).unwrap();
        let sockets = fixture.run_ok(&["ss", "lab", "-t", "-H"]);
        for connection in opened.split_whitespace() {
            let (port, worker) = connection.split_once(':').unwrap();
            let (peer, worker) = (format!("127.0.0.1:{port}"), worker.parse::<usize>().unwrap());
            let words = |line: &str| line.split_whitespace().map(String::from).collect::<Vec<_>>();
            let accepted = |words: &Vec<String>| words[4] == "127.0.0.1:7402" && words[5] == peer;
            let line =
                sockets.lines().map(words).find(accepted).unwrap_or_else(|| panic!("{peer}: {sockets}"));
            assert_eq!(line[6], prefers[worker].to_string(), "{name}: worker {worker} of {peer}");
        }
        std::fs::write(fixture.path().join(format!("{name}-seen")), "").unwrap();
    }
    let output = program.wait_for_output();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "intact\n", "{output:?}");
}
