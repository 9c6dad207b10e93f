//! Programs that connect to themselves and to each other inside a stack.

use crate::fixture::{Fixture, RunningProgram, skipped, wait_until};

const LOOPBACK: [&str; 2] = ["--loopback", "stack"];
const MEMORY: [&str; 4] = ["--device", "memory", "--address", "10.5.0.1/24"];

#[test]
fn a_program_reaches_itself_over_loopback() {
    if skipped("a_program_reaches_itself_over_loopback") {
        return;
    }
    let fixture = Fixture::new("itself");
    let script = "
import hashlib
data = os.urandom(1 << 20)
for host, family in [('127.0.0.1', socket.AF_INET), ('127.45.6.7', socket.AF_INET), ('::1', socket.AF_INET6)]:
    s = server(host, 7002, family=family)
    def serve():
        a, peer = s.accept()
        assert a.getsockname()[:2] == (host, 7002), a.getsockname()
        got = hashlib.sha256()
        while part := a.recv(1 << 16): got.update(part)
        a.sendall(got.digest()); a.close()
    t = threading.Thread(target=serve); t.start()
    c = socket.create_connection((host, 7002))
    for _ in range(20): c.sendall(data)
    c.shutdown(socket.SHUT_WR)
    assert exactly(c, 32) == hashlib.sha256(data * 20).digest()
    t.join(); c.close(); s.close()
    try: socket.create_connection((host, 7002)); print('?')
    except ConnectionRefusedError: print('refused')
";
    // The kernel is not involved: nothing listens there.
    let kernels = "s = server('127.0.0.1', 0)
print(any(line.split()[1].endswith(':%04X' % s.getsockname()[1]) for line in open('/proc/net/tcp')))";
    assert_eq!(fixture.script_output(&LOOPBACK, kernels), "False\n");
    assert_eq!(fixture.script_output(&MEMORY, kernels), "True\n");
    // The first command of a test may have to wait until the library is built.
    let begun = std::time::Instant::now();
    assert_eq!(fixture.script_output(&LOOPBACK, script), "refused\nrefused\nrefused\n");
    assert!(begun.elapsed().as_secs() < 30, "60 MB took {:?}", begun.elapsed());
}

#[test]
fn a_connection_to_itself_echoes() {
    if skipped("a_connection_to_itself_echoes") {
        return;
    }
    let script = "
s = socket.socket(); s.bind(('127.0.0.1', 7003)); s.connect(('127.0.0.1', 7003))
s.sendall(b'echo'); print(exactly(s, 4).decode(), s.getsockname() == s.getpeername())";
    let fixture = Fixture::new("self");
    assert_eq!(fixture.script_output(&LOOPBACK, script), "echo True\n");
}

#[test]
fn two_programs_connect_over_the_stacks_address() {
    if skipped("two_programs_connect_over_the_stacks_address") {
        return;
    }
    let fixture = Fixture::new("two");
    let _up = fixture.start_stack("lab", &MEMORY);
    for (host, listens) in [("10.5.0.1", "10.5.0.1:7004"), ("0.0.0.0", "0.0.0.0:7004")] {
        let serve = format!(
            "s = server({host:?}, 7004); a, peer = s.accept(); a.sendall(peer[0].encode()); a.recv(1)"
        );
        let mut command = fixture.script(&["--stack", "lab", "--kernel-listen", "off"], &serve);
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        let server = RunningProgram::new(command);
        wait_until("it listens", || fixture.run_ok(&["ss", "lab", "-l"]).contains(listens));
        let ask = "print(exactly(socket.create_connection(('10.5.0.1', 7004)), 8).decode())";
        assert_eq!(fixture.script_output(&["--stack", "lab"], ask), "10.5.0.1\n");
        assert!(server.wait_for_output().status.success());
    }
}

#[test]
fn low_ports_need_a_capability_on_shared_stacks() {
    if skipped("low_ports_need_a_capability_on_shared_stacks") {
        return;
    }
    let fixture = Fixture::new("ports");
    // Whether this process may bind low ports on the kernel, which root in a container may not always do.
    let script = "
def low(host, port):
    try: server(host, port).close(); return 'free'
    except PermissionError: return 'EACCES'
may = low('127.0.0.1', 80)
import ctypes
class H(ctypes.Structure): _fields_ = [('v', ctypes.c_uint32), ('pid', ctypes.c_int)]
libc = ctypes.CDLL(None)
if libc.capset(ctypes.byref(H(0x20080522, 0)), (ctypes.c_uint32 * 6)(0, 0, 0, 0, 0, 0)): sys.exit('capset')
print(low('127.0.0.1', 80), low('127.0.0.1', 1023), low('127.0.0.1', 1024))";
    let config = fixture.path().join("free.toml");
    std::fs::write(&config, "[run]\nunprivileged_port_start = 80\n").unwrap();
    assert_eq!(fixture.script_output(&LOOPBACK, script), "free free free\n");
    let _up = fixture.start_stack("lab", &LOOPBACK);
    assert_eq!(fixture.script_output(&["--stack", "lab"], script), "EACCES EACCES free\n");
    let _up = fixture.start_stack("free", &["--config", "free.toml", "--loopback", "stack"]);
    assert_eq!(fixture.script_output(&["--stack", "free"], script), "free free free\n");
}

#[test]
fn all_shards_open_and_accept_connections() {
    if skipped("all_shards_open_and_accept_connections") {
        return;
    }
    let fixture = Fixture::new("shards");
    std::fs::write(fixture.path().join("three.toml"), "[shards]\ncount = 3\n").unwrap();
    let _up = fixture.start_stack("lab", &["--config", "three.toml", "--loopback", "stack"]);
    // A server that accepts and waits with epoll in several threads, and clients that bind first and clients
    // that do not.
    let serve = "
s = server('127.0.0.1', 7005, backlog=200)
s.setblocking(False)
def work():
    e = select.epoll(); e.register(s, select.EPOLLIN | select.EPOLLEXCLUSIVE); open_ = {}
    while True:
        for fd, ev in e.poll():
            if fd == s.fileno():
                try: a, _ = s.accept()
                except BlockingIOError: continue
                open_[a.fileno()] = a; e.register(a, select.EPOLLIN)
            else:
                data = open_[fd].recv(1000)
                if data == b'end': os._exit(0)
                if data: open_[fd].sendall(data.upper())
                else: e.unregister(fd); open_.pop(fd).close()
for _ in range(3): threading.Thread(target=work, daemon=True).start()
time.sleep(60)";
    let server = RunningProgram::new(fixture.script(&["--stack", "lab"], serve));
    let listeners = || {
        fixture.run_ok(&["ss", "lab", "-l"]).lines().filter(|line| line.contains("127.0.0.1:7005")).count()
    };
    wait_until("it listens on all shards", || listeners() == 3);
    let ask = "
import subprocess
all_ = []
for n in range(60):
    c = socket.socket()
    if n % 2: c.bind(('127.0.0.1', 30000 + n))
    c.connect(('127.0.0.1', 7005)); all_.append(c)
p = select.poll()
for n, c in enumerate(all_): c.sendall(b'x%d' % n); p.register(c, select.POLLIN)
left = set(range(60)); byfd = {c.fileno(): n for n, c in enumerate(all_)}
while left:
    for fd, ev in p.poll():
        n = byfd[fd]; assert exactly(all_[n], len('x%d' % n)) == b'X%d' % n; left.remove(n); p.unregister(fd)
open('open', 'w').close()
while not os.path.exists('seen'): time.sleep(0.01)
all_[0].sendall(b'end'); print('done')";
    let client = RunningProgram::new(fixture.script(&["--stack", "lab"], ask));
    wait_until("all were answered", || fixture.path().join("open").exists());
    let lines = fixture.run_ok(&["ss", "lab", "state", "established", "-H"]);
    // Both ends of each of 60 connections.
    assert_eq!(lines.lines().count(), 120, "{lines}");
    for end in ["src", "dst"] {
        let lines = fixture.run_ok(&["ss", "lab", "state", "established", "-H", end, "127.0.0.1:7005"]);
        for shard in ["0", "1", "2"] {
            let there = lines.lines().filter(|line| line.trim_end().ends_with(&format!(" {shard}"))).count();
            assert!(there > 5, "{end} {shard}: {lines}");
        }
    }
    std::fs::write(fixture.path().join("seen"), "").unwrap();
    let output = client.wait_for_output();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n", "{output:?}");
    assert!(server.wait_for_output().status.success());
}

#[cfg(target_arch = "x86_64")]
#[test]
fn the_syscall_function_reaches_the_stack() {
    if skipped("the_syscall_function_reaches_the_stack") {
        return;
    }
    let fixture = Fixture::new("numbers");
    let script = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True); libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
room = ctypes.create_string_buffer(64); length = ctypes.c_int(16); one = ctypes.c_int(1)
address = struct.pack('=H', 2) + struct.pack('>H', 7006) + bytes([127, 0, 0, 1]) + bytes(8)
s = call(41, 2, 1, 0); call(54, s, 1, 2, ctypes.byref(one), 4); call(49, s, address, 16); call(50, s, 5)
c = call(41, 2, 1, 0); call(42, c, address, 16)
a = call(288, s, room, ctypes.byref(length), 0)
call(51, a, room, ctypes.byref(length)); print(struct.unpack('>H', room.raw[2:4])[0])
call(52, c, room, ctypes.byref(length)); print(struct.unpack('>H', room.raw[2:4])[0])
call(1, c, b'write', 5); call(0, a, room, 64); print(room.value)
call(44, c, b'sendto', 6, 0, 0, 0); call(45, a, room, 64, 0, 0, 0); print(room.value)
iov = struct.pack('QQ', ctypes.addressof(buffer := ctypes.create_string_buffer(b'writev')), 6)
call(20, c, iov, 1)
fds = ctypes.create_string_buffer(struct.pack('ihh', a, 1, 0), 8)
print(call(7, fds, 1, 5000), call(271, fds, 1, 0, 0, 8))
into = struct.pack('QQ', ctypes.addressof(room), 64); print(call(19, a, into, 1), room.raw[:6])
message = struct.pack('QIIQQQQI4x', 0, 0, 0, ctypes.addressof(held := ctypes.create_string_buffer(iov)), 1, 0, 0, 0)
call(46, c, message, 0); print(call(45, a, room, 64, 0, 0, 0))
e = call(291, 0); call(233, e, 1, a, struct.pack('=Iq', 1, 77)); call(1, c, b'!', 1)
print(call(281, e, room, 4, 5000, 0, 8), struct.unpack('=Iq', room.raw[:12]))
d = call(32, a); call(33, d, 100); call(3, a); call(3, d); print(call(0, 100, room, 64))
print(call(72, 100, 3, 0) & 2, call(16, c, 0x5421, ctypes.byref(one)), call(72, c, 3, 0) & 0o4000)
call(48, c, 1); print(call(0, 100, room, 64)); call(436, 100, 100, 0)
for number, fd in [(0, 100), (50, 100)]:
    try: call(number, fd, room, 1); print('?')
    except OSError as error: print(error.errno)
try: call(425, 1, room)
except OSError as error: print(error.errno)
# None of them was the kernel's.
print(any(line.split()[1].endswith(':%04X' % 7006) for line in open('/proc/net/tcp')))";
    let stdout = fixture.script_output(&LOOPBACK, script);
    let expected = "7006
7006
b'write'
b'sendto'
1 1
6 b'writev'
6
1 (1, 77)
1
2 0 2048
0
9
9
38
False
";
    assert_eq!(stdout, expected);
}

#[test]
fn workers_prefer_their_own_shard() {
    if skipped("workers_prefer_their_own_shard") {
        return;
    }
    let fixture = Fixture::new("spawn");
    std::fs::write(fixture.path().join("two.toml"), "[shards]\ncount = 2\n").unwrap();
    let _up = fixture.start_stack("lab", &["--config", "two.toml", "--loopback", "stack"]);
    // Each worker records the source ports of its connections and keeps them open.
    let serve = "
s = server('127.0.0.1', 7007, backlog=200)
for worker in range(2):
    if not os.fork():
        all_ = []
        open('pid%d' % worker, 'w').write(str(os.getpid()))
        while True:
            a, peer = s.accept(); all_.append(a)
            open('of%d' % worker, 'a').write('%d ' % peer[1]); a.sendall(b'%d' % worker)
os.wait()";
    let server = RunningProgram::new(fixture.script(&["--stack", "lab", "--listen-spawn", "auto"], serve));
    let read = |name: &str| std::fs::read_to_string(fixture.path().join(name)).unwrap_or_default();
    wait_until("both workers are there", || !read("pid0").is_empty() && !read("pid1").is_empty());
    // One connection after the other, so that the preferred worker has time to accept.
    let ask = "
all_ = []
for _ in range(40):
    c = socket.create_connection(('127.0.0.1', 7007)); all_.append(c); print(exactly(c, 1).decode(), flush=True); time.sleep(0.01)
open('open', 'w').close()
while not os.path.exists('seen'): time.sleep(0.01)";
    let client = RunningProgram::new(fixture.script(&["--stack", "lab"], ask));
    wait_until("all were accepted", || fixture.path().join("open").exists());
    let shard_of = |worker: &str| -> Vec<String> {
        let lines = fixture.run_ok(&["ss", "lab", "state", "established", "-H", "src", "127.0.0.1:7007"]);
        let ports = read(worker);
        let of =
            |line: &&str| ports.split_whitespace().any(|port| line.contains(&format!("127.0.0.1:{port} ")));
        lines.lines().filter(of).map(|line| line.split_whitespace().last().unwrap().to_string()).collect()
    };
    let (first, second) = (shard_of("of0"), shard_of("of1"));
    assert!(first.len() > 5 && second.len() > 5 && first.len() + second.len() == 40, "{first:?} {second:?}");
    // Finds the shard of each worker and the number of its connections. A worker may have been busy when the
    // other was preferred, also for the first connection.
    let most = |shards: &[String]| {
        ["0", "1"]
            .map(|shard| (shards.iter().filter(|other| *other == shard).count(), shard))
            .into_iter()
            .max()
            .unwrap()
    };
    let ((of_first, one), (of_second, other)) = (most(&first), most(&second));
    assert!(of_first + of_second >= 36 && one != other, "{first:?} {second:?}");
    std::fs::write(fixture.path().join("seen"), "").unwrap();
    assert!(client.wait_for_output().status.success());
    // One worker dies, and the other serves both shards.
    assert!(std::process::Command::new("kill").args(["-9", &read("pid0")]).status().unwrap().success());
    let ask =
        "print({exactly(socket.create_connection(('127.0.0.1', 7007)), 1).decode() for _ in range(20)})";
    assert_eq!(fixture.script_output(&["--stack", "lab"], ask), "{'1'}\n");
    let _ = std::process::Command::new("kill").arg(read("pid1")).status();
    drop(server);
}

/// A worker that was busy when a connection was offered, which another worker then accepted, accepts the next
/// one without another notification.
#[test]
fn a_worker_accepts_again_after_a_pause() {
    if skipped("a_worker_accepts_again_after_a_pause") {
        return;
    }
    let script = "
s = server('127.0.0.1', 7301); r, w = os.pipe(); R, W = os.pipe()
c = socket.create_connection(('127.0.0.1', 7301)); a, _ = s.accept()
if not os.fork():
    # It accepts once, and is busy while others come.
    select.select([s], [], []); os.write(w, b'.'); time.sleep(0.5)
    for _ in range(2): s.accept()[0].sendall(b'child')
    os.read(R, 1); os._exit(0)
# This process has asked for connections, and is busy for good.
all_ = [socket.create_connection(('127.0.0.1', 7301)) for _ in range(2)]
os.read(r, 1)
print([exactly(c, 5) for c in all_]); os.write(W, b'.'); os.wait()";
    let fixture = Fixture::new("busy");
    assert_eq!(
        fixture.script_output(&["--stack", "kernel"], script),
        fixture.script_output(&LOOPBACK, script)
    );
}

/// Returns the first two CPUs that this process may use.
fn two_cpus() -> Option<[usize; 2]> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim().to_string();
    let all = list.split(',').flat_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse().unwrap_or(0)..=last.parse().unwrap_or(0)
    });
    let two: Vec<usize> = all.take(2).collect();
    two.try_into().ok()
}

#[test]
fn pinned_workers_serve_the_shard_of_their_cpu() {
    let test = "pinned_workers_serve_the_shard_of_their_cpu";
    if skipped(test) {
        return;
    }
    let Some([first, second]) = two_cpus() else { return ginnel_testkit::skip(test, "one CPU only") };
    let fixture = Fixture::new("bound");
    let pinned = format!("[shards]\ncount = 2\ncpus = [{first}, {second}]\n");
    std::fs::write(fixture.path().join("pinned.toml"), pinned).unwrap();
    let _up = fixture.start_stack("lab", &["--config", "pinned.toml", "--loopback", "stack"]);
    // Worker and shard numbers are crossed: without pinning the workers would get the shards of their own
    // numbers.
    let serve = format!(
        "
s = server('127.0.0.1', 7008, backlog=200)
for worker, cpu in enumerate([{second}, {first}]):
    if not os.fork():
        os.sched_setaffinity(0, {{cpu}}); all_ = []
        open('there%d' % worker, 'w').close()
        while True:
            a, peer = s.accept(); all_.append(a)
            open('of%d' % worker, 'a').write('%d ' % peer[1]); a.sendall(b'%d' % worker)
os.wait()"
    );
    let _server = RunningProgram::new(fixture.script(&["--stack", "lab", "--listen-spawn", "bound"], &serve));
    wait_until("both workers are there", || {
        (0..2).all(|n| fixture.path().join(format!("there{n}")).exists())
    });
    let ask = "
all_ = []
for _ in range(40):
    c = socket.create_connection(('127.0.0.1', 7008)); all_.append(c); exactly(c, 1); time.sleep(0.02)
open('open', 'w').close()
while not os.path.exists('seen'): time.sleep(0.01)";
    let client = RunningProgram::new(fixture.script(&["--stack", "lab"], ask));
    wait_until("all were accepted", || fixture.path().join("open").exists());
    let lines = fixture.run_ok(&["ss", "lab", "state", "established", "-H", "src", "127.0.0.1:7008"]);
    let mut served = [0, 0];
    for (worker, shard) in [("of0", "1"), ("of1", "0")] {
        let ports = std::fs::read_to_string(fixture.path().join(worker)).unwrap_or_default();
        let own = lines
            .lines()
            .filter(|line| ports.split_whitespace().any(|port| line.contains(&format!("127.0.0.1:{port} "))));
        for line in own {
            served[usize::from(line.split_whitespace().last() == Some(shard))] += 1;
        }
    }
    // A worker may have been busy when the other was preferred.
    assert!(served[1] >= 34 && served[0] + served[1] == 40, "{served:?} {lines}");
    std::fs::write(fixture.path().join("seen"), "").unwrap();
    assert!(client.wait_for_output().status.success());
}

/// Servers use this to answer from the address to which a request was sent (dnsmasq).
#[test]
fn stack_sockets_report_interfaces_and_pktinfo() {
    if skipped("stack_sockets_report_interfaces_and_pktinfo") {
        return;
    }
    let script = "
import fcntl
s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 7008)); s.setsockopt(socket.IPPROTO_IP, 8, 1)
c = socket.socket(type=socket.SOCK_DGRAM); c.sendto(b'x', ('127.0.0.1', 7008))
data, [(level, kind, info)], flags, peer = s.recvmsg(9, 64)
number, own, to = struct.unpack('i4s4s', info)
# SIOCGIFNAME
name = fcntl.ioctl(s, 0x8910, struct.pack('16si20x', b'', number))[:16].rstrip(bytes(1))
print(data, (level, kind) == (0, 8), number, name, socket.inet_ntoa(own), socket.inet_ntoa(to))";
    let fixture = Fixture::new("interfaces");
    assert_eq!(fixture.script_output(&LOOPBACK, script), "b'x' True 1 b'lo' 127.0.0.1 127.0.0.1\n");
}
