//! Sockets that one program passes to another (SCM_RIGHTS).

use crate::fixture::{Fixture, PRELUDE, RunningProgram, python, run_to_end, skipped, wait_until};
use std::process::Command;

const MEMORY: [&str; 4] = ["--device", "memory", "--address", "10.5.0.1/24"];
const ON_LAB: [&str; 2] = ["--stack", "lab"];

/// A receiver of descriptors.
const RECEIVER: &str = "
u = socket.socket(socket.AF_UNIX); u.bind('where'); u.listen(); open('waits', 'w').close()
m, _ = u.accept()
text, fds, _, _ = socket.recv_fds(m, 100, 9)
all_ = [socket.socket(fileno=fd) for fd in fds]
";
/// A sender of descriptors.
const SENDER: &str = "
s = server('10.5.0.1', 7201); c = socket.create_connection(('10.5.0.1', 7201)); a, _ = s.accept(); c.sendall(b'unread')
def send(*all_):
    m = socket.socket(socket.AF_UNIX); m.connect('where')
    socket.send_fds(m, [b'these'], [x.fileno() for x in all_])
    return m
";

#[test]
fn passed_sockets_work_in_the_receiver() {
    if skipped("passed_sockets_work_in_the_receiver") {
        return;
    }
    let fixture = Fixture::new("rights");
    let _up = fixture.start_stack("lab", &MEMORY);
    let receive = format!(
        "{RECEIVER}
a, s = all_
print(a.getpeername()[0], s.getsockname(), a.recv(6)); a.sendall(b'from another')
b, _ = s.accept(); b.sendall(b'accepted elsewhere')
assert m.recv(1) == b''
a.close()"
    );
    let receiver = RunningProgram::new(fixture.script(&ON_LAB, &receive));
    wait_until("it waits", || fixture.path().join("waits").exists());
    // The sender passes its only descriptors and closes them before anyone has received them.
    let send = format!(
        "{SENDER}
m = send(a, s); a.close(); s.close()
print(exactly(c, 12)); print(exactly(socket.create_connection(('10.5.0.1', 7201)), 18))
m.close()
print(c.recv(9))"
    );
    let stdout = fixture.script_output(&ON_LAB, &send);
    assert_eq!(stdout, "b'from another'\nb'accepted elsewhere'\nb''\n");
    let received = receiver.wait_for_output();
    assert!(received.status.success(), "{received:?}");
    let stdout = String::from_utf8(received.stdout).unwrap();
    assert_eq!(stdout, "10.5.0.1 ('10.5.0.1', 7201) b'unread'\n");
    // No process has the listener any more.
    wait_until("it is gone", || fixture.run_ok(&["ss", "lab", "-l", "-H", "-t"]).is_empty());
}

#[test]
fn sockets_in_transit_outlive_the_sender() {
    if skipped("sockets_in_transit_outlive_the_sender") {
        return;
    }
    let fixture = Fixture::new("way");
    let _up = fixture.start_stack("lab", &MEMORY);
    let script = format!(
        "
l = socket.socket(socket.AF_UNIX); l.bind('where'); l.listen()
if not os.fork():
    {}
    send(a, c); os._exit(0)
os.wait()
m, _ = l.accept()
fds = socket.recv_fds(m, 100, 9)[1]
a, c = [socket.socket(fileno=fd) for fd in fds]
print(a.recv(6)); a.sendall(b'alive'); print(c.recv(5))
# Back to this process itself: the same socket once more.
x, y = socket.socketpair(socket.AF_UNIX); socket.send_fds(x, [b'-'], [a.fileno()])
again = socket.socket(fileno=socket.recv_fds(y, 9, 9)[1][0]); a.close(); again.sendall(b'twice'); print(c.recv(5))
# The socket is in a message when both ends of the pair are closed.
socket.send_fds(x, [b'-'], [again.fileno()]); again.close(); c.settimeout(0.3)
try: print(c.recv(5))
except TimeoutError: print('still there')
c.settimeout(None); x.close(); y.close(); print(c.recv(5))",
        SENDER.trim().replace('\n', "\n    ")
    );
    let stdout = fixture.script_output(&ON_LAB, &script);
    assert_eq!(stdout, "b'unread'\nb'alive'\nb'twice'\nstill there\nb''\n");
}

#[test]
fn programs_without_library_receive_closed_streams() {
    if skipped("programs_without_library_receive_closed_streams") {
        return;
    }
    let fixture = Fixture::new("stranger");
    let _up = fixture.start_stack("lab", &MEMORY);
    let mut stranger = Command::new(python().unwrap());
    let script = format!("{PRELUDE}{RECEIVER}\nprint(all_[0].recv(9)); m.recv(1)");
    stranger.args(["-c", &script]).current_dir(fixture.path());
    let stranger = RunningProgram::new(stranger);
    wait_until("it waits", || fixture.path().join("waits").exists());
    // The sender continues with its own copy.
    let send = format!("{SENDER}\nm = send(a); print(a.recv(9)); a.sendall(b'mine'); print(c.recv(9))");
    assert_eq!(fixture.script_output(&ON_LAB, &send), "b'unread'\nb'mine'\n");
    let output = stranger.wait_for_output();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "b''\n", "{output:?}");
}

#[test]
fn both_sockets_of_a_dual_listener_arrive() {
    if skipped("both_sockets_of_a_dual_listener_arrive") {
        return;
    }
    let fixture = Fixture::new("halves");
    let _up = fixture.start_stack("lab", &MEMORY);
    let receive = format!(
        "{RECEIVER}
for _ in range(2):
    b, peer = all_[0].accept(); b.sendall(peer[0].encode()); b.close()"
    );
    let receiver = RunningProgram::new(fixture.script(&ON_LAB, &receive));
    wait_until("it waits", || fixture.path().join("waits").exists());
    let send = format!(
        "{}
w = server('0.0.0.0', 0); open('port', 'w').write(str(w.getsockname()[1]))
m = send(w); m.recv(1)",
        SENDER
    );
    let sender = RunningProgram::new(fixture.script(&ON_LAB, &send));
    let port = || std::fs::read_to_string(fixture.path().join("port")).unwrap_or_default();
    wait_until("it listens", || !port().is_empty());
    let ask =
        |host: &str| format!("print(exactly(socket.create_connection(('{host}', {})), 99).decode())", port());
    assert_eq!(fixture.script_output(&ON_LAB, &ask("10.5.0.1")), "10.5.0.1\n");
    let mut kernels = Command::new(python().unwrap());
    kernels.args(["-c", &format!("{PRELUDE}{}", ask("127.0.0.1"))]);
    assert_eq!(String::from_utf8_lossy(&run_to_end(kernels).stdout), "127.0.0.1\n");
    assert!(receiver.wait_for_output().status.success());
    assert!(sender.wait_for_output().status.success());
}

/// Passing a socket that is not on the stack yet would lose its filter, so it is refused.
#[test]
fn sockets_with_filters_are_passed_on_the_stack_only() {
    if skipped("sockets_with_filters_are_passed_on_the_stack_only") {
        return;
    }
    let fixture = Fixture::new("filtered");
    let _up = fixture.start_stack("lab", &MEMORY);
    let script = "
import ctypes
def attach(s):
    buffer = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0), 8)
    s.setsockopt(socket.SOL_SOCKET, 26, struct.pack('@HP', 1, ctypes.addressof(buffer)))
here, there = socket.socketpair(socket.AF_UNIX)
def passes(s):
    try: socket.send_fds(here, [b'.'], [s.fileno()])
    except OSError as e: return e.strerror
    text, fds, _, _ = socket.recv_fds(there, 10, 1); r = socket.socket(fileno=fds[0])
    buffer = ctypes.create_string_buffer(8); count = ctypes.c_uint32(1)
    libc = ctypes.CDLL(None)
    assert libc.getsockopt(r.fileno(), socket.SOL_SOCKET, 26, buffer, ctypes.byref(count)) == 0
    return count.value
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    plain, filtered, locked = (socket.socket(socket.AF_INET, kind) for _ in range(3))
    attach(filtered); locked.setsockopt(socket.SOL_SOCKET, 44, 1)
    print(passes(plain), '|', passes(filtered), '|', passes(locked))
    filtered.bind(('10.5.0.1', 0))
    if kind == socket.SOCK_STREAM: filtered.listen()
    print(passes(filtered))";
    let refused = "0 | Operation not supported | Operation not supported\n1\n";
    assert_eq!(fixture.script_output(&ON_LAB, script), refused.repeat(2));
}

/// A socket that is bound and does not listen yet: the receiver listens on it, as in libuv's
/// `ipc_listen_after_write`, where the sender listens, too.
#[test]
fn bound_sockets_listen_in_the_receiver() {
    if skipped("bound_sockets_listen_in_the_receiver") {
        return;
    }
    let fixture = Fixture::new("bound");
    let _up = fixture.start_stack("lab", &MEMORY);
    let receive = format!(
        "{RECEIVER}
one, any_, both, plain = all_
for s in all_[:3]: s.listen()
plain.bind(('10.5.0.1', 7204)); plain.listen()
m.sendall(b'listens')
for s in all_:
    b, peer = s.accept(); b.sendall(str(s.getsockname()[1]).encode()); b.close()"
    );
    let receiver = RunningProgram::new(fixture.script(&ON_LAB, &receive));
    wait_until("it waits", || fixture.path().join("waits").exists());
    let send = format!(
        "{SENDER}
def bound(*at):
    s = socket.socket(); s.bind(at); return s
one, any_, both, plain = bound('10.5.0.1', 7202), bound('0.0.0.0', 0), bound('10.5.0.1', 7203), socket.socket()
port = any_.getsockname()[1]
m = send(one, any_, both, plain); both.listen(); one.close(); plain.close()
assert m.recv(7) == b'listens'
open('port', 'w').write(str(port))
for at in (7202, port, 7203, 7204):
    c = socket.create_connection(('10.5.0.1', at)); print(exactly(c, len(str(at))).decode() == str(at))"
    );
    assert_eq!(fixture.script_output(&ON_LAB, &send), "True\n".repeat(4));
    assert!(receiver.wait_for_output().status.success());
}

/// Both sides of a socket that is bound to the unspecified address arrive: that of the stack, and that of the
/// kernel.
#[test]
fn passed_datagram_sockets_receive_in_the_receiver() {
    if skipped("passed_datagram_sockets_receive_in_the_receiver") {
        return;
    }
    let fixture = Fixture::new("datagrams");
    let _up = fixture.start_stack("lab", &MEMORY);
    let receive = format!(
        "{RECEIVER}
one, any_, connected = all_
for s in (one, any_, any_, any_):
    text, peer = s.recvfrom(99); s.sendto(text.upper(), peer)
connected.send(b'from the receiver')"
    );
    let receiver = RunningProgram::new(fixture.script(&ON_LAB, &receive));
    wait_until("it waits", || fixture.path().join("waits").exists());
    let send = format!(
        "{SENDER}
def bound(*at):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(at); return s
one, any_, peer = bound('10.5.0.1', 7202), bound('0.0.0.0', 0), bound('10.5.0.1', 0)
connected = bound('10.5.0.1', 0); connected.connect(peer.getsockname())
client, port = bound('10.5.0.1', 0), any_.getsockname()[1]
m = send(one, any_, connected); one.close(); connected.close()
for at in (('10.5.0.1', 7202), ('10.5.0.1', port), ('127.0.0.1', port)):
    c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    c.sendto(b'hello', at); text, origin = c.recvfrom(99); print(text, origin == at)
any_.close(); client.sendto(b'again', ('10.5.0.1', port)); print(client.recv(99), peer.recv(99))"
    );
    let stdout = fixture.script_output(&ON_LAB, &send);
    assert_eq!(stdout, format!("{}b'AGAIN' b'from the receiver'\n", "b'HELLO' True\n".repeat(3)));
    assert!(receiver.wait_for_output().status.success());
}

/// A process that passes a bound socket to itself has one description of it.
#[test]
fn bound_sockets_return_to_their_process() {
    if skipped("bound_sockets_return_to_their_process") {
        return;
    }
    let fixture = Fixture::new("return");
    let _up = fixture.start_stack("lab", &MEMORY);
    let script = "
x, y = socket.socketpair(socket.AF_UNIX)
for host in ('10.5.0.1', '0.0.0.0'):
    s = socket.socket(); s.bind((host, 0)); at = ('10.5.0.1', s.getsockname()[1])
    socket.send_fds(x, [b'-'], [s.fileno()]); same = socket.socket(fileno=socket.recv_fds(y, 9, 9)[1][0])
    same.listen(); c = socket.create_connection(at); a, _ = s.accept(); s.close()
    # It listens meanwhile.
    socket.send_fds(x, [b'-'], [same.fileno()]); again = socket.socket(fileno=socket.recv_fds(y, 9, 9)[1][0])
    same.close(); c2 = socket.create_connection(at); a2, _ = again.accept(); a2.sendall(b'twice')
    print(exactly(c2, 5)); again.close()
    # The process keeps the stack's side of a socket whose kernel socket it has passed.
    # The stack learns of the close of the last copy a moment later.
    end = time.monotonic() + 10
    while host != '0.0.0.0' and time.monotonic() < end:
        try: socket.create_connection(at).close()
        except OSError as e:
            print(e.strerror); break";
    assert_eq!(fixture.script_output(&ON_LAB, script), "b'twice'\nConnection refused\nb'twice'\n");
}
