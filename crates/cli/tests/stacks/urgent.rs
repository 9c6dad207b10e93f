//! Urgent data in unmodified programs: `MSG_OOB`, `sockatmark` through its `ioctl`, and `SIGURG`.

use crate::fixture::{Fixture, skipped};

const SCRIPT: &str = "
import fcntl
def mark(s): return struct.unpack('i', fcntl.ioctl(s, 0x8905, b'\\0' * 4))[0]
def until(so):
    while not so(): time.sleep(0.002)
received = []
signal.signal(signal.SIGURG, lambda *_: received.append(1))
s = server('127.0.0.1', 7501)
c = socket.create_connection(('127.0.0.1', 7501)); a, _ = s.accept()
print('none', mark(a))
fcntl.fcntl(a, fcntl.F_SETOWN, os.getpid()); print('owner', fcntl.fcntl(a, fcntl.F_GETOWN) == os.getpid())
c.sendall(b'before'); c.send(b'!', socket.MSG_OOB); c.sendall(b'behind')
p = select.poll(); p.register(a, select.POLLPRI)
print('urgent', p.poll(20000) == [(a.fileno(), select.POLLPRI)])
until(lambda: received); print('received', len(received))
print('third set', select.select([], [], [a], 20)[2] == [a])
print('not yet', mark(a)); print(exactly(a, 6)); until(lambda: mark(a)); print('at the mark', mark(a))
print(a.recv(1, socket.MSG_OOB), exactly(a, 6), mark(a))
try: a.recv(1, socket.MSG_OOB)
except OSError as e: print(os.strerror(e.errno))
# Whoever sees the urgent byte has the signal, without a further call.
c2 = socket.create_connection(('127.0.0.1', 7501)); b, _ = s.accept()
fcntl.fcntl(b, fcntl.F_SETOWN, os.getpid()); p = select.poll(); p.register(b, select.POLLPRI)
late = 0
for _ in range(500):
    before = len(received); c2.send(b'.', socket.MSG_OOB)
    while not p.poll(0): pass
    end = time.monotonic() + 0.2
    while len(received) == before and time.monotonic() < end: pass
    late += len(received) == before; b.recv(1, socket.MSG_OOB)
print('late signals', late)
# In line, in a child that has inherited the socket.
a.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
child = os.fork()
if not child:
    print(exactly(a, 3), flush=True); until(lambda: mark(a)); print(exactly(a, 4), mark(a), flush=True); os._exit(0)
c.sendall(b'one'); c.send(b'?', socket.MSG_OOB); c.sendall(b'two')
print('child', os.waitpid(child, 0)[1])
# Without an owner no signal is sent.
fcntl.fcntl(a, fcntl.F_SETOWN, 0); before = len(received)
c.send(b'.', socket.MSG_OOB); print(exactly(a, 1), len(received) - before)";

/// The expected output is that of the program on the kernel.
#[test]
fn urgent_data_behave_as_on_the_kernel() {
    if skipped("urgent_data_behave_as_on_the_kernel") {
        return;
    }
    let fixture = Fixture::new("urgent");
    let on_kernel = fixture.script_output(&["--stack", "kernel"], SCRIPT);
    assert!(on_kernel.starts_with("none 0\nowner True\nurgent True\nreceived 1\n"), "{on_kernel}");
    assert_eq!(fixture.script_output(&["--loopback", "stack"], SCRIPT), on_kernel);
}

/// Urgent data of four sockets arrive before the next call, and each socket has another child as its owner.
const OWNERS: &str = "
import fcntl
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
s = server('127.0.0.1', 7502)
pairs = [(socket.create_connection(('127.0.0.1', 7502)), s.accept()[0]) for _ in range(4)]
children = []
for _, accepted in pairs:
    child = os.fork()
    if not child: os._exit(signal.sigtimedwait({signal.SIGURG}, 20) is None)
    fcntl.fcntl(accepted, fcntl.F_SETOWN, child); children.append(child)
for connected, _ in pairs: connected.send(b'!', socket.MSG_OOB)
time.sleep(0.2)
p = select.poll()
for _, accepted in pairs: p.register(accepted, select.POLLPRI)
# Usually one call reports all of them.
while p.poll(20000) and len(p.poll(0)) < 4: pass
print([os.waitpid(child, 0)[1] for child in children])";

/// The expected output is that of the program on the kernel.
#[test]
fn each_owner_gets_its_signal() {
    if skipped("each_owner_gets_its_signal") {
        return;
    }
    let fixture = Fixture::new("owners");
    let on_kernel = fixture.script_output(&["--stack", "kernel"], OWNERS);
    assert_eq!(on_kernel, "[0, 0, 0, 0]\n");
    assert_eq!(fixture.script_output(&["--loopback", "stack"], OWNERS), on_kernel);
}
