//! Pre-forking servers on the kernel with a listener per worker (`ginnel run --stack kernel --listen-spawn`).

use crate::processes::{children, signal, wait_until};
use crate::server::{ADDRESS, Nginx, Side};
use ginnel_testkit::interop::{ProgramFixture, build_kernel_library};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");
/// Connections from each CPU.
const CONNECTIONS: usize = 30;

/// A pre-forking server: `python3 server.py WAIT WORKERS RESPAWN`. Each worker answers a connection with its
/// process id and its CPUs. WAIT is how it waits for connections. RESPAWN is `respawn`, `stay`, `asked` (the
/// master replaces a worker that has ended after SIGUSR1), or `background` (without workers).
const SERVER: &str = "
import os, select, selectors, signal, socket, sys, time
wait, workers, respawn = sys.argv[1], int(sys.argv[2]), sys.argv[3]
listener = socket.create_server(('0.0.0.0', 8000), backlog=100)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
def serve():
    if wait != 'accept': listener.setblocking(False)
    if wait == 'epoll':
        events = select.epoll()
        events.register(listener, select.EPOLLIN)
    while True:
        if wait == 'epoll': events.poll()
        if wait == 'poll':
            events = select.poll()
            events.register(listener, select.POLLIN)
            events.poll()
        if wait == 'select': select.select([listener], [], [])
        try: connection, _ = listener.accept()
        except BlockingIOError:
            if wait == 'accept': raise
            continue
        cpus = ','.join(map(str, sorted(os.sched_getaffinity(0))))
        connection.sendall(b'%d %s' % (os.getpid(), cpus.encode()))
        connection.close()
def start():
    if os.fork() == 0:
        try: serve()
        finally: os._exit(1)
if respawn == 'background':
    listening = os.getpid()
    if os.fork() != 0: os._exit(0)
    while os.getppid() == listening: time.sleep(0.01)
if workers == 0: serve()
for _ in range(workers): start()
while True:
    os.wait()
    if respawn == 'asked': signal.sigwait({signal.SIGUSR1})
    if respawn != 'stay': start()
";

/// A client: `python3 client.py CPU COUNT` connects from a CPU and prints an answer per line.
const CLIENT: &str = "
import os, socket, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
for _ in range(int(sys.argv[2])):
    connection = socket.create_connection(('10.9.0.2', 8000), timeout=30)
    print(connection.makefile().read())
";

/// Starts a program with a listener per worker.
pub fn start(fixture: &ProgramFixture, mode: &str, program: &[&str]) {
    let library = format!("GINNEL_KERNEL_LIBRARY={}", build_kernel_library(GINNEL).display());
    let run = [&library, GINNEL, "run", "--stack", "kernel", "--listen-spawn", mode, "--"];
    fixture.start_on_kernel("env", &[&run[..], program].concat());
}

/// Runs a Python program to its end with a listener per worker, and returns what it prints. `before` are the
/// program that starts Python and its arguments.
#[track_caller]
fn run_python(fixture: &ProgramFixture, before: &[&str], program: &str) -> String {
    let library = format!("GINNEL_KERNEL_LIBRARY={}", build_kernel_library(GINNEL).display());
    let run = [&library, GINNEL, "run", "--stack", "kernel", "--listen-spawn", "auto", "--"];
    fixture.client_text("env", &[&run, before, &["python3", "-c", program]].concat())
}

fn fixture(test: &str, programs: &[&str]) -> Option<ProgramFixture> {
    let fixture = Side::KernelLane.fixture(test, programs)?;
    fixture.write("server.py", SERVER);
    fixture.write("client.py", CLIENT);
    Some(fixture)
}

/// Returns what `ginnel listeners` shows of the fixture's programs, in the order of slots.
fn rows(fixture: &ProgramFixture) -> Vec<Value> {
    let output = fixture.ginnel(&["listeners", "--json"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let rows = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    // The master of another test may have ended.
    rows.filter(|row| row["master"].as_u64().is_some_and(|master| is_in(fixture, master))).collect()
}

/// Returns the workers with a listener of their own, and the CPU of each. The number 0 stands for workers
/// that have ended and still have their listeners.
fn workers(fixture: &ProgramFixture) -> BTreeMap<u64, Option<u64>> {
    let number = |worker: &Value| worker.as_u64().or_else(|| (worker == "ended").then_some(0));
    let rows = rows(fixture).into_iter();
    rows.filter_map(|row| Some((number(&row["worker"])?, row["cpu"].as_u64()))).collect()
}

/// Returns whether a process runs in the directory of the fixture: other tests run beside this one.
fn is_in(fixture: &ProgramFixture, pid: u64) -> bool {
    std::fs::read_link(format!("/proc/{pid}/cwd"))
        .is_ok_and(|at| at == fixture.folder().canonicalize().unwrap())
}

/// Connects from a CPU and returns the process ids and the CPUs of the workers that have answered.
#[track_caller]
fn answers_to(fixture: &ProgramFixture, cpu: u64, count: usize) -> BTreeSet<(u64, String)> {
    let client = fixture.folder().join("client.py").display().to_string();
    let text = fixture.client_text("python3", &[&client, &cpu.to_string(), &count.to_string()]);
    assert_eq!(text.lines().count(), count, "{text}");
    let parse = |line: &str| line.split_once(' ').map(|(pid, cpus)| (pid.parse().unwrap(), cpus.to_string()));
    text.lines().map(|line| parse(line).unwrap_or_else(|| panic!("{line:?}"))).collect()
}

fn cpus() -> Vec<u64> {
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    (0..1024).filter(|cpu| set.is_set(*cpu)).map(|cpu| cpu as u64).collect()
}

#[test]
fn a_worker_serves_the_connections_of_its_cpu() {
    let test = "a_worker_serves_the_connections_of_its_cpu";
    for wait in ["accept", "poll", "select", "epoll"] {
        let Some(fixture) = fixture(test, &["python3"]) else { return };
        let cpus = cpus();
        start(&fixture, "auto", &["python3", "server.py", wait, &cpus.len().to_string(), "respawn"]);
        wait_until("all workers have listeners", || workers(&fixture).len() == cpus.len());
        let workers = workers(&fixture);
        let used: BTreeSet<u64> = workers.values().flatten().copied().collect();
        assert_eq!(used.into_iter().collect::<Vec<_>>(), cpus, "{wait}: {workers:?}");
        for (worker, cpu) in workers {
            let cpu = cpu.unwrap();
            let only = BTreeSet::from([(worker, cpu.to_string())]);
            assert_eq!(answers_to(&fixture, cpu, CONNECTIONS), only, "{wait}: CPU {cpu}");
        }
    }
}

#[test]
fn more_workers_than_cpus_share_each_cpu() {
    let test = "more_workers_than_cpus_share_each_cpu";
    let Some(fixture) = fixture(test, &["python3"]) else { return };
    let cpus = cpus();
    start(&fixture, "auto", &["python3", "server.py", "epoll", &(2 * cpus.len()).to_string(), "respawn"]);
    wait_until("all workers have listeners", || workers(&fixture).len() == 2 * cpus.len());
    let of_cpu: BTreeSet<u64> =
        workers(&fixture).into_iter().filter(|(_, cpu)| *cpu == Some(cpus[0])).map(|(pid, _)| pid).collect();
    assert_eq!(of_cpu.len(), 2);
    // The probability that one of two gets none of 60 is 2⁻⁵⁹.
    let answers = answers_to(&fixture, cpus[0], 2 * CONNECTIONS);
    assert_eq!(answers.into_iter().map(|(pid, _)| pid).collect::<BTreeSet<_>>(), of_cpu);
}

#[test]
fn bound_workers_keep_their_cpus() {
    let test = "bound_workers_keep_their_cpus";
    let Some(fixture) = fixture(test, &["python3"]) else { return };
    start(&fixture, "bound", &["python3", "server.py", "poll", "2", "respawn"]);
    wait_until("all workers have listeners", || workers(&fixture).len() == 2);
    let cpus = cpus();
    let is_pinned = cpus.len() == 1;
    assert!(workers(&fixture).values().all(|cpu| cpu.is_some() == is_pinned));
    let all = cpus.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    let answers = answers_to(&fixture, cpus[0], 2 * CONNECTIONS);
    assert!(answers.iter().all(|(_, cpus)| *cpus == all), "{answers:?}");
    assert_eq!(answers.len(), 2, "both share the CPUs");
}

#[test]
fn a_server_without_workers_is_not_pinned() {
    let test = "a_server_without_workers_is_not_pinned";
    for respawn in ["respawn", "background"] {
        let Some(fixture) = fixture(test, &["python3"]) else { return };
        start(&fixture, "auto", &["python3", "server.py", "epoll", "0", respawn]);
        fixture.wait_until_listening(ADDRESS);
        let all = cpus().iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        for cpu in cpus() {
            let answers = answers_to(&fixture, cpu, CONNECTIONS);
            let answers: Vec<String> = answers.into_iter().map(|(_, cpus)| cpus).collect();
            assert_eq!(answers, [all.as_str()], "{respawn}");
        }
    }
}

const REQUEST: &[u8] = b"GET /ok HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n";

/// Opens connections from all CPUs that send a request and wait for the answer.
fn waiting_connections(fixture: &ProgramFixture, request: &[u8]) -> Vec<TcpStream> {
    let from_cpu = |cpu: u64| {
        let mut set = rustix::thread::CpuSet::new();
        set.set(usize::try_from(cpu).unwrap());
        std::thread::scope(|scope| {
            let connect = || {
                rustix::thread::sched_setaffinity(None, &set).unwrap();
                let streams = (0..CONNECTIONS).map(|_| {
                    let mut stream = fixture.connect(ADDRESS).unwrap();
                    stream.write_all(request).unwrap();
                    stream
                });
                streams.collect::<Vec<_>>()
            };
            scope.spawn(connect).join().unwrap()
        })
    };
    cpus().into_iter().flat_map(from_cpu).collect()
}

#[track_caller]
fn assert_answered(streams: Vec<TcpStream>, end: &str) {
    for mut stream in streams {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with(end) && !answer.is_empty(), "{answer:?}");
    }
}

#[test]
fn a_new_nginx_worker_serves_waiting_connections() {
    let test = "a_new_nginx_worker_serves_waiting_connections";
    let Some(fixture) = fixture(test, &["nginx", "pgrep"]) else { return };
    let count = cpus().len().max(2) as u32;
    let nginx = Nginx::start(&fixture, Side::KernelLane, count, "");
    wait_until("all workers have listeners", || workers(&fixture).len() == count as usize);
    let before = workers(&fixture);
    before.keys().for_each(|worker| signal(worker, "STOP"));
    let streams = waiting_connections(&fixture, REQUEST);
    let killed = *before.keys().next().unwrap();
    signal(killed, "KILL");
    wait_until("a new worker has the listener", || {
        let now = workers(&fixture);
        now.len() == count as usize && !now.contains_key(&killed) && !now.contains_key(&0)
    });
    let new: Vec<Option<u64>> = workers(&fixture)
        .into_iter()
        .filter(|(pid, _)| !before.contains_key(pid))
        .map(|(_, cpu)| cpu)
        .collect();
    assert_eq!(new, [before[&killed]], "the new worker has the CPU of the old one");
    before.keys().filter(|worker| **worker != killed).for_each(|worker| signal(worker, "CONT"));
    assert_answered(streams, "\r\n\r\nok");
    nginx.finish(true);
}

#[test]
fn another_worker_takes_over_what_waits() {
    let test = "another_worker_takes_over_what_waits";
    let Some(fixture) = fixture(test, &["python3"]) else { return };
    start(&fixture, "auto", &["python3", "server.py", "epoll", "2", "stay"]);
    wait_until("all workers have listeners", || workers(&fixture).len() == 2);
    let pids: Vec<u64> = workers(&fixture).into_keys().collect();
    pids.iter().for_each(|pid| signal(pid, "STOP"));
    let streams = waiting_connections(&fixture, b"");
    signal(pids[0], "KILL");
    wait_until("the slot is free", || workers(&fixture).len() == 1);
    signal(pids[1], "CONT");
    assert_answered(streams, "");
    for cpu in cpus() {
        let answers = answers_to(&fixture, cpu, CONNECTIONS);
        assert_eq!(answers.into_iter().map(|(pid, _)| pid).collect::<Vec<_>>(), [pids[1]]);
    }
}

#[test]
fn a_blocking_accept_still_blocks_after_a_takeover() {
    let test = "a_blocking_accept_still_blocks_after_a_takeover";
    let Some(fixture) = fixture(test, &["python3"]) else { return };
    start(&fixture, "auto", &["python3", "server.py", "accept", "2", "asked"]);
    wait_until("all workers have listeners", || workers(&fixture).len() == 2);
    let first = rows(&fixture).remove(0);
    let killed = first["worker"].as_u64().unwrap();
    let kept = *workers(&fixture).keys().find(|pid| **pid != killed).unwrap();
    // These connections wait in the queue of the program's own socket, until the other worker accepts them.
    [killed, kept].iter().for_each(|pid| signal(pid, "STOP"));
    let streams = waiting_connections(&fixture, b"");
    signal(killed, "KILL");
    wait_until("the slot is free", || workers(&fixture).len() == 1);
    signal(kept, "CONT");
    // The worker looks for them after each connection of its own.
    for cpu in cpus() {
        answers_to(&fixture, cpu, CONNECTIONS);
    }
    assert_answered(streams, "");
    signal(first["master"].as_u64().unwrap(), "USR1");
    wait_until("a new worker has the listener", || workers(&fixture).len() == 2);
    let before = workers(&fixture);
    for cpu in cpus() {
        answers_to(&fixture, cpu, CONNECTIONS);
    }
    assert_eq!(workers(&fixture), before, "accept has failed in none");
}

#[test]
fn a_reload_with_fewer_workers_loses_nothing() {
    let test = "a_reload_with_fewer_workers_loses_nothing";
    let Some(fixture) = fixture(test, &["nginx", "pgrep"]) else { return };
    let nginx = Nginx::start(&fixture, Side::KernelLane, 4, "");
    wait_until("all workers have listeners", || workers(&fixture).len() == 4);
    let old = workers(&fixture);
    old.keys().for_each(|worker| signal(worker, "STOP"));
    let streams = waiting_connections(&fixture, REQUEST);
    let text = String::from_utf8(fixture.read("nginx.conf")).unwrap();
    fixture.write("nginx.conf", text.replace("worker_processes 4", "worker_processes 1"));
    signal(&nginx.master, "HUP");
    wait_until("there is a new worker", || children(&nginx.master).len() == 5);
    // The old workers close their listeners before they accept anything.
    old.keys().for_each(|worker| signal(worker, "CONT"));
    wait_until("the old workers are gone", || children(&nginx.master).len() == 1);
    assert_answered(streams, "\r\n\r\nok");
    assert_answered(waiting_connections(&fixture, REQUEST), "\r\n\r\nok");
    assert_eq!(workers(&fixture).len(), 1);
    nginx.finish(false);
}

#[test]
fn the_prefix_is_left_away_and_added() {
    let test = "the_prefix_is_left_away_and_added";
    let Some(fixture) = fixture(test, &["nginx", "pgrep", "python3"]) else { return };
    for side in [Side::Kernel, Side::KernelLane, Side::Kernel] {
        let nginx = Nginx::start(&fixture, side, 2, "");
        if side == Side::KernelLane {
            wait_until("all workers have listeners", || workers(&fixture).len() == 2);
        }
        assert_answered(waiting_connections(&fixture, REQUEST), "\r\n\r\nok");
        // A second server finds the address in use, as without the prefix.
        let bind = "import socket; socket.create_server(('0.0.0.0', 8000))";
        let library = format!("GINNEL_KERNEL_LIBRARY={}", build_kernel_library(GINNEL).display());
        let run = [
            &library,
            GINNEL,
            "run",
            "--stack",
            "kernel",
            "--listen-spawn",
            "auto",
            "--",
            "python3",
            "-c",
            bind,
        ];
        let second = fixture.run_client("env", &run);
        let error = String::from_utf8_lossy(&second.stderr).into_owned();
        assert!(!second.status.success() && error.contains("Address already in use"), "{side:?}: {error}");
        signal(&nginx.master, "QUIT");
        wait_until("the port is closed", || fixture.connect(ADDRESS).is_err());
        wait_until("nginx has ended", || !fixture.folder().join("pid").exists());
        assert!(fixture.connect(ADDRESS).is_err(), "{side:?}");
        assert_eq!(workers(&fixture), BTreeMap::new());
        nginx.finish(false);
    }
}

#[test]
fn a_failed_wait_keeps_its_error_number() {
    let test = "a_failed_wait_keeps_its_error_number";
    let Some(fixture) = fixture(test, &["python3", "unshare"]) else { return };
    // A signal to all processes of this namespace would find none.
    let program = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.wait(None), ctypes.get_errno())
";
    let printed = run_python(&fixture, &["unshare", "--pid", "--fork"], program);
    assert_eq!(printed.trim(), format!("-1 {}", rustix::io::Errno::CHILD.raw_os_error()));
}

#[test]
fn hidden_sockets_leave_descriptors_to_the_program() {
    let test = "hidden_sockets_leave_descriptors_to_the_program";
    let Some(fixture) = fixture(test, &["python3"]) else { return };
    // Nobody waits for these children, so they seem to run.
    let program = "
import os, resource, signal, socket
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
listener = socket.create_server(('0.0.0.0', 8000))
for _ in range(250):
    if os.fork() == 0: os._exit(0)
opened = []
try:
    while True: opened.append(os.open('/dev/null', os.O_RDONLY))
except OSError: print(len(opened))
";
    let opened: usize = run_python(&fixture, &[], program).trim().parse().unwrap();
    assert!((150..256).contains(&opened), "{opened}");
}

/// Calls `poll` and `select` with lists that cannot be read, or whose end cannot, in a process with a
/// listener that it has not used yet. Then polls the listener, and tries to close all other numbers by calls
/// of `close_range` with unknown flags.
const BAD_ARGUMENTS: &str = "
import ctypes, errno, mmap, select, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    return result if result >= 0 else errno.errorcode[ctypes.get_errno()]
listener = socket.create_server(('0.0.0.0', 8000)); fd = listener.fileno()
pages = mmap.mmap(-1, 8192); start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
libc.mprotect(ctypes.c_void_p(start + 4096), 4096, 0)
for address in (8, start + 4092, start + 4096, 1 << 63, 2**64 - 8):
    fds = ctypes.c_void_p(address)
    print(call('poll', fds, 2, 0), call('poll', fds, ctypes.c_ulong(2**64 - 1), 0),
        call('ppoll', fds, 2, None, None), call('select', 64, fds, None, None, None))
print(call('select', -1, ctypes.c_void_p(8), None, None, None))
print(call('poll', ctypes.c_void_p(start + 4084), 2, 0))
ctypes.memmove(start + 4096 - 10, fd.to_bytes(4, 'little') + b'\\1\\0\\1\\0', 8)
print(call('poll', ctypes.c_void_p(start + 4096 - 10), 1, 0))
numbers = [n for n in range(3, 4096) if n != fd]
print({call('close_range', n, n, 64) for n in numbers})
";

#[test]
fn bad_arguments_fail_as_without_the_library() {
    let test = "bad_arguments_fail_as_without_the_library";
    let Some(fixture) = fixture(test, &["python3"]) else { return };
    let program = fixture.write("arguments.py", BAD_ARGUMENTS);
    let kernel = fixture.run_client("python3", &[&program]);
    assert!(kernel.status.success(), "{kernel:?}");
    let printed = run_python(&fixture, &[], BAD_ARGUMENTS);
    assert_eq!(printed, String::from_utf8_lossy(&kernel.stdout));
}

/// A server with one worker, whose master has closed the listener in a child of `vfork`.
const VFORK: &str = "
#include <arpa/inet.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(8000)};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 100)) return 1;
    if (vfork() == 0) {
        close(listener);
        _exit(0);
    }
    if (fork() == 0)
        for (;;) {
            int connection = accept(listener, 0, 0);
            if (write(connection, \"ok\", 2) != 2) return 1;
            close(connection);
        }
    for (;;) wait(0);
}
";

/// A server whose first worker closes its listener and stays: `python3 server.py HOW`.
const CLOSING: &str = "
import ctypes, os, select, signal, socket, sys
libc, null = ctypes.CDLL(None), os.open('/dev/null', os.O_RDWR)
reader, writer = os.pipe()
listener = socket.create_server(('0.0.0.0', 8000), backlog=100)
fd = listener.fileno()
def wait():
    events = select.poll()
    events.register(fd, select.POLLIN)
    events.poll(0)
if os.fork() == 0:
    wait()
    {
        'dup2': lambda: libc.dup2(null, fd),
        'dup3': lambda: libc.dup3(null, fd, 0),
        'close_range': lambda: libc.close_range(fd, fd, 0),
        'closefrom': lambda: libc.closefrom(fd),
    }[sys.argv[1]]()
    os.write(writer, b'.')
    while True: signal.pause()
os.read(reader, 1)
if os.fork() == 0:
    wait()
    while True:
        connection, _ = listener.accept()
        connection.sendall(b'%d 0' % os.getpid())
        connection.close()
os.wait()
";

#[test]
fn a_worker_that_has_closed_gets_no_connections() {
    let test = "a_worker_that_has_closed_gets_no_connections";
    for how in ["dup2", "dup3", "close_range", "closefrom"] {
        let Some(fixture) = fixture(test, &["python3"]) else { return };
        fixture.write("server.py", CLOSING);
        start(&fixture, "auto", &["python3", "server.py", how]);
        wait_until("a worker has a listener", || !workers(&fixture).is_empty());
        fixture.wait_until_listening(ADDRESS);
        for cpu in cpus() {
            assert_eq!(answers_to(&fixture, cpu, CONNECTIONS).len(), 1, "{how}: CPU {cpu}");
        }
        assert_eq!(workers(&fixture).len(), 1, "{how}");
    }
}

#[test]
fn a_vfork_child_closes_its_own_listener() {
    let test = "a_vfork_child_closes_its_own_listener";
    let Some(fixture) = fixture(test, &["gcc"]) else { return };
    let program = fixture.write("vfork.c", VFORK);
    let made = fixture.run_client("gcc", &["-o", "vfork", &program]);
    assert!(made.status.success(), "{made:?}");
    start(&fixture, "auto", &[&fixture.folder().join("vfork").display().to_string()]);
    wait_until("the worker has a listener", || workers(&fixture).len() == 1);
    assert_answered(waiting_connections(&fixture, b""), "ok");
}

/// A server with one worker, whose master waits for it with a null pointer for the result.
const WAITING: &str = "
import ctypes, os, select, signal, socket
libc = ctypes.CDLL(None)
listener = socket.create_server(('0.0.0.0', 8000), backlog=100)
worker = os.fork()
if worker == 0:
    events = select.poll()
    events.register(listener, select.POLLIN)
    while True: events.poll()
assert libc.waitid(os.P_PID, worker, None, os.WEXITED) == 0
signal.pause()
";

#[test]
fn a_worker_is_missed_without_its_status() {
    let Some(fixture) = fixture("a_worker_is_missed_without_its_status", &["python3"]) else { return };
    fixture.write("server.py", WAITING);
    start(&fixture, "auto", &["python3", "server.py"]);
    wait_until("the worker has a listener", || workers(&fixture).len() == 1);
    let master = rows(&fixture)[0]["master"].as_u64().unwrap();
    signal(*workers(&fixture).keys().next().unwrap(), "KILL");
    wait_until("the slot is free", || workers(&fixture).is_empty());
    assert!(is_in(&fixture, master), "the master has ended");
}

/// A server whose two workers are process 1 of a PID namespace of their own each, as the server itself is:
/// `python3 server.py HOW`. The child of `clone` is one that libc does not know of.
const NAMESPACES: &str = "
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
NEWPID, CLONE, SIGCHLD = 0x20000000, 56 if os.uname().machine == 'x86_64' else 220, 17
listener = socket.create_server(('0.0.0.0', 8000), backlog=100)
assert os.getpid() == 1
outer = os.open('/proc/self/ns/pid', os.O_RDONLY)
def fork():
    assert libc.unshare(NEWPID) == 0, ctypes.get_errno()
    child = os.fork()
    if child: assert libc.setns(outer, NEWPID) == 0, ctypes.get_errno()
    return child
def clone(): return libc.syscall(CLONE, NEWPID | SIGCHLD, None, None, None, None)
for number in range(2):
    child = {'fork': fork, 'clone': clone}[sys.argv[1]]()
    assert child >= 0, ctypes.get_errno()
    if child == 0:
        assert os.getpid() == 1
        while True:
            connection, _ = listener.accept()
            connection.sendall(b'%d 0' % number)
            connection.close()
while True: os.wait()
";

#[test]
fn workers_of_other_pid_namespaces_keep_their_listeners() {
    let test = "workers_of_other_pid_namespaces_keep_their_listeners";
    for (how, with_listeners) in [("fork", 2), ("clone", 1)] {
        let Some(fixture) = fixture(test, &["python3", "unshare"]) else { return };
        fixture.write("server.py", NAMESPACES);
        start(&fixture, "auto", &["unshare", "--pid", "--fork", "--kill-child", "python3", "server.py", how]);
        wait_until("workers have listeners", || workers(&fixture).len() == with_listeners);
        let before = workers(&fixture);
        if how == "fork" {
            assert!(before.values().all(Option::is_some), "{before:?}");
            let answers: BTreeSet<u64> = cpus()
                .iter()
                .flat_map(|cpu| answers_to(&fixture, *cpu, 1))
                .map(|(worker, _)| worker)
                .collect();
            assert_eq!(answers.len(), cpus().len().min(2));
        }
        for cpu in cpus() {
            answers_to(&fixture, cpu, CONNECTIONS);
        }
        assert_eq!(workers(&fixture), before, "{how}: nobody counts as ended");
        let killed = *before.keys().next().unwrap();
        signal(killed, "KILL");
        wait_until("the listener has no worker", || workers(&fixture).len() == with_listeners - 1);
        // The other worker finds out after some connections.
        for cpu in cpus() {
            let answers = answers_to(&fixture, cpu, CONNECTIONS);
            assert_eq!(answers.len(), 1, "{how}: {answers:?}");
        }
    }
}

#[test]
fn errors_name_the_program_and_the_library() {
    let test = "errors_name_the_program_and_the_library";
    let Some(fixture) = fixture(test, &["gcc"]) else { return };
    let program = fixture.write("static.c", "int main(void) { return 0; }");
    let made = fixture.run_client("gcc", &["-static", "-o", "static", &program]);
    assert!(made.status.success(), "{made:?}");
    let path = fixture.folder().join("static").display().to_string();
    let library = format!("GINNEL_KERNEL_LIBRARY={}", build_kernel_library(GINNEL).display());
    let run = |options: &[&str]| {
        let words = [&library, GINNEL, "run", "--stack", "kernel", "--listen-spawn", "auto"];
        fixture.run_client("env", &[&words[..], options, &["--", &path]].concat())
    };
    let refused = run(&[]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(125), "{error}");
    assert!(error.contains(&path) && error.contains("--on-missing=kernel"), "{error}");
    assert!(run(&["--on-missing", "kernel"]).status.success());
    let none = fixture.ginnel(&["listeners", "1"]);
    let error = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(error.contains("process 1 has no listeners of workers: start a server with"), "{error}");
}
