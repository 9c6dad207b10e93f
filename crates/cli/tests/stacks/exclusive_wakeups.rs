//! `EPOLLEXCLUSIVE` across processes: how many workers an event wakes, on a stack and on the kernel.

use crate::fixture::{Fixture, RunningProgram, skipped, wait_until};
use crate::restart::{kill_shards, supervisor_of};

/// Workers with an epoll set each, in which there is also a listener of the stack. A worker that wakes leaves
/// the event as it is until it is told to take it, so every process that the event wakes is counted.
const WORKERS: &str = "
import ctypes
log, to_log = os.pipe()
EXCLUSIVE = select.EPOLLIN | select.EPOLLEXCLUSIVE
def state(task): return open('/proc/%s/stat' % task).read().rpartition(')')[2].split()[0]
def log_text():
    os.set_blocking(log, False)
    try: return os.read(log, 10000).decode()
    except BlockingIOError: return ''
def words(is_enough):
    # Words of the log, until these are enough. What comes later is not among them.
    found, until = [], time.monotonic() + 10
    while not is_enough(found) and time.monotonic() < until: time.sleep(0.01); found += log_text().split()
    return found
def until_sleeping(tasks):
    asleep, until = 0, time.monotonic() + 30
    while asleep < 10:
        time.sleep(0.01)
        states = [state(task) for task in tasks]
        assert 'Z' not in states and time.monotonic() < until, states
        asleep = asleep + 1 if set(states) == {'S'} else 0
def until_asleep(workers): until_sleeping(['%d' % w.pid for w in workers])
def count(words, beginning): return sum(word.startswith(beginning) for word in words)
class Worker:
    def __init__(self, number, watched, take, flags=EXCLUSIVE, prepare=lambda ep: None):
        go, self.go = os.pipe()
        port, to_port = os.pipe()
        self.pid = os.fork()
        if self.pid:
            self.number, self.port = number, int(os.read(port, 10)); return
        ctypes.CDLL(None).prctl(1, signal.SIGKILL) # PR_SET_PDEATHSIG
        own = server('127.0.0.1', 0)
        ep = select.epoll()
        for fd in watched: ep.register(fd, flags)
        ep.register(own, select.EPOLLIN)
        prepare(ep)
        os.write(to_port, b'%d' % own.getsockname()[1])
        while True:
            for fd, _ in ep.poll(maxevents=1 if number == 0 else -1):
                if fd == own.fileno():
                    own.accept()[0].close(); os.write(to_log, b'own%d ' % number); continue
                os.write(to_log, b'woken%d ' % number)
                os.read(go, 1)
                try: take(fd); os.write(to_log, b'taken ')
                except BlockingIOError: os.write(to_log, b'nothing ')
    def end(self):
        os.kill(self.pid, signal.SIGKILL); os.waitpid(self.pid, 0)
def event_words(workers, cause, expected):
    until_asleep(workers); log_text(); cause()
    found = words(lambda found: count(found, 'woken') >= expected)
    time.sleep(0.2)
    return found + log_text().split()
def event(workers, cause, expected=1): return count(event_words(workers, cause, expected), 'woken')
def go(workers, woken=1):
    for w in workers: os.write(w.go, b'x')
    found = words(lambda found: count(found, 'taken') + count(found, 'nothing') >= woken)
    return count(found, 'taken')
def end(workers):
    for w in workers: w.end()
eventfd = os.eventfd(0, os.EFD_NONBLOCK)
signal_event = lambda: os.eventfd_write(eventfd, 1)
";

/// Runs a script on the kernel and on a stack, and compares what it prints.
#[track_caller]
fn compare(name: &str, script: &str, expected: &str) {
    if skipped(name) {
        return;
    }
    let fixture = Fixture::new(name);
    let script = format!("{WORKERS}{script}");
    assert_eq!(fixture.script_output(&["--stack", "kernel"], &script), expected, "the kernel");
    assert_eq!(fixture.script_output(&["--loopback", "stack"], &script), expected, "the stack");
}

#[test]
fn event_of_kernel_descriptor_wakes_one_worker() {
    let script = "
workers = [Worker(n, [eventfd], os.eventfd_read) for n in range(4)]
print('eventfd', event(workers, signal_event), go(workers))
end(workers)
r, w = os.pipe2(os.O_NONBLOCK)
workers = [Worker(n, [r], lambda fd: os.read(fd, 1)) for n in range(4)]
print('pipe', event(workers, lambda: os.write(w, b'x')), go(workers))
end(workers)
l = socket.socket(socket.AF_UNIX); l.bind('\\0exclusive%d' % os.getpid()); l.listen(); l.setblocking(False)
workers = [Worker(n, [l.fileno()], lambda fd: l.accept()[0].close()) for n in range(4)]
kept = []
def connect():
    c = socket.socket(socket.AF_UNIX); c.connect(l.getsockname()); kept.append(c)
print('listener', event(workers, connect), go(workers))
end(workers)
";
    let expected = "eventfd 1 1\npipe 1 1\nlistener 1 1\n";
    compare("event_of_kernel_descriptor_wakes_one_worker", script, expected);
}

#[test]
fn plain_waiters_all_wake_beside_an_exclusive_one() {
    let script = "
workers = [Worker(n, [eventfd], os.eventfd_read, EXCLUSIVE if n % 2 else select.EPOLLIN) for n in range(4)]
print(event(workers, signal_event, 3))
end(workers)
";
    compare("plain_waiters_all_wake_beside_an_exclusive_one", script, "3\n");
}

#[test]
fn each_event_wakes_a_further_exclusive_worker() {
    let script = "
workers = [Worker(n, [eventfd], os.eventfd_read) for n in range(3)]
print('first', event(workers, signal_event))
print('second, while the first worker has not taken it', event(workers, signal_event))
print('third', event(workers, signal_event))
print('fourth, while all are busy', event(workers, signal_event, 0))
print('taken', go(workers, 3))
end(workers)
";
    let expected = "first 1\nsecond, while the first worker has not taken it 1\nthird 1\n\
                    fourth, while all are busy 0\ntaken 1\n";
    compare("each_event_wakes_a_further_exclusive_worker", script, expected);
}

#[test]
fn death_of_woken_worker_loses_no_later_event() {
    let script = "
workers = [Worker(n, [eventfd], os.eventfd_read) for n in range(3)]
for _ in range(2):
    woken = [word for word in event_words(workers, signal_event, 1) if word.startswith('woken')]
    print('woken', len(woken))
    [dead] = [w for w in workers if woken == ['woken%d' % w.number]]
    dead.end(); workers.remove(dead); time.sleep(0.2)
    print('woken by the death', count(log_text().split(), 'woken'))
print('woken', event(workers, signal_event), go(workers))
end(workers)
";
    let expected = "woken 1\nwoken by the death 0\nwoken 1\nwoken by the death 0\nwoken 1 1\n";
    compare("death_of_woken_worker_loses_no_later_event", script, expected);
}

#[test]
fn exclusive_worker_serves_its_sockets_meanwhile() {
    let script = "
r, w = os.pipe2(os.O_NONBLOCK)
workers = [Worker(n, [eventfd, r], lambda fd: os.read(fd, 8)) for n in range(3)]
def connect(worker): socket.create_connection(('127.0.0.1', worker.port)).close()
for _ in range(20):
    until_asleep(workers); log_text()
    for worker in workers: connect(worker)
    seen = words(lambda found: len(found) >= 3)
    assert sorted(seen) == ['own0', 'own1', 'own2'], seen
print('woken', event(workers, signal_event), go(workers))
for w_ in workers: connect(w_)
found = words(lambda found: len(found) >= 3); time.sleep(0.1)
print(sorted(found + log_text().split()))
end(workers)
";
    let expected = "woken 1 1\n['own0', 'own1', 'own2']\n";
    compare("exclusive_worker_serves_its_sockets_meanwhile", script, expected);
}

#[test]
fn shared_and_polled_sets_lose_no_event() {
    let script = "
# The set of each worker is used in another way, too, after a first sleep in it.
def forks(ep):
    ep.poll(0.05)
    if os.fork() == 0: os._exit(0)
    os.wait()
def forks_from_thread(ep):
    def fork():
        time.sleep(0.05)
        if os.fork() == 0: os._exit(0)
        os.write(to_log, b'forked ')
    threading.Thread(target=fork).start()
def is_polled(ep):
    ep.poll(0.05)
    p = select.poll(); p.register(ep.fileno()); assert p.poll(50) == []
def is_nested(ep):
    ep.poll(0.05)
    outer = select.epoll(); outer.register(ep.fileno(), select.EPOLLIN); assert outer.poll(0.05) == []
    kept.append(outer)
def is_passed(ep):
    ep.poll(0.05)
    socket.send_fds(pair[0], [b'x'], [ep.fileno()])
kept = []; pair = socket.socketpair(socket.AF_UNIX)
for prepare in (forks, forks_from_thread, is_polled, is_nested, is_passed):
    worker = Worker(1, [eventfd], os.eventfd_read, prepare=prepare)
    if prepare is forks_from_thread: words(lambda found: 'forked' in found)
    until_asleep([worker])
    for _ in range(3):
        c = socket.create_connection(('127.0.0.1', worker.port)); own = words(len)
        print(prepare.__name__, *own, event([worker], signal_event), go([worker]))
    worker.end()
";
    let line = |name: &str| format!("{name} own1 1 1\n").repeat(3);
    let names = ["forks", "forks_from_thread", "is_polled", "is_nested", "is_passed"];
    compare("shared_and_polled_sets_lose_no_event", script, &names.map(line).concat());
}

#[test]
fn event_wakes_one_thread_of_several_sets() {
    let script = "
go_on = threading.Event()
def work(number):
    ep = select.epoll(); ep.register(eventfd, EXCLUSIVE)
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 0))
    ep.register(u, select.EPOLLIN)
    ports[number] = u.getsockname()
    while True:
        for fd, _ in ep.poll():
            if fd == u.fileno(): u.recv(10); os.write(to_log, b'own%d ' % number); continue
            os.write(to_log, b'woken '); go_on.wait()
            try: os.eventfd_read(eventfd)
            except BlockingIOError: pass
ports = [None] * 4
for n in range(4): threading.Thread(target=work, args=(n,), daemon=True).start()
while None in ports: time.sleep(0.01)
def print_words(number): print(sorted(words(lambda found: len(found) >= number)))
for _ in range(3):
    for p in ports:
        own_ = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); own_.sendto(b'x', p); own_.close()
    print_words(4)
tasks = ['self/task/' + task for task in os.listdir('/proc/self/task') if int(task) != os.getpid()]
until_sleeping(tasks)
signal_event(); found = words(len); time.sleep(0.2); print(found + log_text().split()); go_on.set()
while select.select([eventfd], [], [], 0)[0]: time.sleep(0.01)
for p in ports: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', p)
print_words(4)
sys.stdout.flush(); os._exit(0)
";
    let own = "['own0', 'own1', 'own2', 'own3']\n";
    let expected = format!("{}['woken']\n{own}", own.repeat(3));
    compare("event_wakes_one_thread_of_several_sets", script, &expected);
}

#[test]
fn threads_of_one_exclusive_set_lose_no_event() {
    let script = "
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 0)); u.setblocking(False)
ep = select.epoll(); ep.register(eventfd, EXCLUSIVE); ep.register(u, select.EPOLLIN)
taken = {eventfd: 0, u.fileno(): 0}
lock = threading.Lock()
def take(events):
    for fd, _ in events:
        with lock:
            try: taken[fd] += os.eventfd_read(fd) if fd == eventfd else len(u.recv(10))
            except BlockingIOError: pass
def wait(events_max):
    while True: take(ep.poll(maxevents=events_max))
def poll():
    while True: take(ep.poll(0)); time.sleep(0.0005)
for events_max in (1, 2, 8): threading.Thread(target=wait, args=(events_max,), daemon=True).start()
threading.Thread(target=poll, daemon=True).start()
c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); c.connect(u.getsockname())
for n in range(1, 301):
    os.eventfd_write(eventfd, 1) if n % 2 else c.send(b'x')
    if n % 3 == 0: os.eventfd_write(eventfd, 1)
    until = time.monotonic() + 10
    while taken != {eventfd: (n + 1) // 2 + n // 3, u.fileno(): n // 2}:
        assert time.monotonic() < until, (n, taken)
print('all'); sys.stdout.flush(); os._exit(0)
";
    compare("threads_of_one_exclusive_set_lose_no_event", script, "all\n");
}

#[test]
fn exclusive_worker_serves_again_after_a_restart() {
    if skipped("exclusive_worker_serves_again_after_a_restart") {
        return;
    }
    let fixture = Fixture::new("exclusive-restart");
    let _up = fixture.start_stack("lab", &["--loopback", "stack", "--on-stack-death", "restart"]);
    let on_lab = ["--stack", "lab"];
    let serve = "
r, w = os.pipe()
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 7020)); u.setblocking(False)
ep = select.epoll(); ep.register(r, select.EPOLLIN | select.EPOLLEXCLUSIVE); ep.register(u, select.EPOLLIN)
open('serves', 'w').close()
while True:
    for fd, _ in ep.poll():
        if fd == r: os.read(r, 1); open('signalled', 'w').close(); continue
        try: data, peer = u.recvfrom(10)
        except OSError: continue
        if data == b'end': sys.exit()
        u.sendto(data, peer); os.write(w, b'x')";
    let server = RunningProgram::new(fixture.script(&on_lab, serve));
    let exists = |name: &str| fixture.path().join(name).exists();
    wait_until("the worker serves", || exists("serves"));
    let ask = "
c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); c.settimeout(0.2); c.connect(('127.0.0.1', 7020))
for _ in range(100):
    try: c.send(b'hey'); print(c.recv(10)); break
    except OSError: time.sleep(0.05)";
    for round in 0..3 {
        if round > 0 {
            kill_shards(supervisor_of(&fixture, "lab"));
        }
        assert_eq!(fixture.script_output(&on_lab, ask), "b'hey'\n", "round {round}");
        wait_until("the pipe is read", || exists("signalled"));
        std::fs::remove_file(fixture.path().join("signalled")).unwrap();
    }
    fixture.script_output(&on_lab, &ask.replace("b'hey'); print(c.recv(10))", "b'end')"));
    assert!(server.wait_for_output().status.success());
}

#[test]
fn workers_slower_than_an_offer_accept() {
    let script = "
l = server('127.0.0.1', 0, backlog=16); l.setblocking(False)
pids = []
for n in range(3):
    pids.append(os.fork())
    if pids[-1]: continue
    ctypes.CDLL(None).prctl(1, signal.SIGKILL) # PR_SET_PDEATHSIG
    ep = select.epoll(); ep.register(l, EXCLUSIVE)
    while True:
        ep.poll(); time.sleep(0.2)
        try: l.accept()[0].sendall(b'accepted')
        except BlockingIOError: pass
time.sleep(0.3)
for _ in range(4):
    c = socket.create_connection(l.getsockname()); c.settimeout(5); print(c.recv(10))
for p in pids: os.kill(p, signal.SIGKILL)
";
    compare("workers_slower_than_an_offer_accept", script, &"b'accepted'\n".repeat(4));
}

#[test]
fn workers_slower_than_an_offer_accept_from_each_listener() {
    let script = "
listeners = [server('127.0.0.1', 0, backlog=16) for _ in range(3)]
pids = []
for n in range(3):
    pids.append(os.fork())
    if pids[-1]: continue
    ctypes.CDLL(None).prctl(1, signal.SIGKILL) # PR_SET_PDEATHSIG
    ep = select.epoll()
    for l in listeners: l.setblocking(False); ep.register(l, EXCLUSIVE)
    while True:
        ep.poll(); time.sleep(0.2)
        for l in listeners:
            try: l.accept()[0].sendall(b'accepted')
            except BlockingIOError: pass
time.sleep(0.3)
for l in listeners * 2:
    c = socket.create_connection(l.getsockname()); c.settimeout(10); print(c.recv(10))
for p in pids: os.kill(p, signal.SIGKILL)
";
    compare("workers_slower_than_an_offer_accept_from_each_listener", script, &"b'accepted'\n".repeat(6));
}

#[test]
fn set_whose_sleep_is_interrupted_is_not_readable() {
    // The handler is one of C, which runs while the thread is in `epoll_wait`.
    let script = "
own = server('127.0.0.1', 0)
def run(in_handler, in_thread):
    ep = select.epoll(); ep.register(eventfd, EXCLUSIVE); ep.register(own, select.EPOLLIN)
    def polled(): p = select.poll(); p.register(ep.fileno()); return [e for _, e in p.poll(50)]
    seen = []; began = threading.Event(); done = threading.Event()
    def handle(_): began.set(); in_handler(polled, seen, done)
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(handle)
    libc = ctypes.CDLL(None); libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGUSR1, handler)
    def interrupt():
        until_sleeping(['self/task/%d' % os.getpid()])
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        began.wait(); in_thread(polled, seen); done.set()
    thread = threading.Thread(target=interrupt); thread.start()
    result = [e for _, e in ep.poll(20)]; thread.join()
    print(seen, result); os.eventfd_read(eventfd)
def polls(polled, seen, _): seen.append(polled()); signal_event(); seen.append(polled())
def waits(polled, seen, done): done.wait()
def forks(polled, seen, done):
    child = os.fork()
    if child == 0: os._exit(len(polled()))
    seen.append(os.waitpid(child, 0)[1]); signal_event()
run(polls, lambda polled, seen: None)
run(waits, lambda polled, seen: polls(polled, seen, None))
run(forks, lambda polled, seen: None)
";
    compare(
        "set_whose_sleep_is_interrupted_is_not_readable",
        script,
        "[[], [1]] [1]\n[[], [1]] [1]\n[0] [1]\n",
    );
}
