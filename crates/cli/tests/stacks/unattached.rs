//! Programs that do not use the stack, or do not use it yet: they occupy no client slot.

use crate::fixture::{Fixture, RunningProgram, run_to_end, skipped, wait_until};

const LOOPBACK: [&str; 2] = ["--loopback", "stack"];

#[test]
fn programs_without_network_use_no_slots() {
    let fixture = Fixture::new("shell");
    std::fs::write(fixture.path().join("few.toml"), "[channel]\nclients_max = 2\n").unwrap();
    let _up = fixture.start_stack("lab", &["--config", "few.toml", "--loopback", "stack"]);
    // Bounded, so that no process is left after a failed test.
    let wait = "for turn in $(seq 600); do test -e go && break; sleep 0.05; done";
    let script = format!(
        "for n in 1 2 3 4 5 6 7 8 9 10; do (echo $n >here$n; {wait}) & done; ls >/dev/null; wait; echo done"
    );
    let shell = RunningProgram::new(fixture.ginnel(&["run", "--stack", "lab", "--", "sh", "-c", &script]));
    wait_until("all are there", || (1..=10).all(|n| fixture.path().join(format!("here{n}")).exists()));
    let clients = fixture.run_ok(&["stat", "lab", "--json"]);
    assert!(
        clients.contains("\"channel.clients\":0") || clients.contains("\"channel.clients\": 0"),
        "{clients}"
    );
    // The stack is in use nevertheless.
    let refused = fixture.run(&["down", "lab"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains(&format!("({})", shell.pid())), "{refused:?}");
    std::fs::write(fixture.path().join("go"), "").unwrap();
    let output = shell.wait_for_output();
    assert_eq!((&output.stdout[..], &output.stderr[..]), (&b"done\n"[..], &b""[..]), "{output:?}");
    fixture.run_ok(&["down", "lab"]);
}

#[test]
fn a_program_attaches_after_chroot_and_setuid() {
    if skipped("a_program_attaches_after_chroot_and_setuid") {
        return;
    }
    let fixture = Fixture::new("late");
    // Importing Python's `socket` creates an epoll set, which would attach the program before the chroot.
    let script = "
import os, _socket, encodings.idna
before = os.geteuid()
if before == 0:
    os.mkdir('jail'); os.chroot('jail'); os.chdir('/'); os.setgid(65534); os.setuid(65534)
child = os.fork()
# Both, over the same connection.
s = _socket.socket(); s.bind(('127.0.0.1', 7401 + (child == 0))); s.listen(1)
c = _socket.socket(); c.connect(s.getsockname()); a = _socket.socket(fileno=s._accept()[0]); c.sendall(b'in'); data = a.recv(9)
if child: os.waitpid(child, 0)
print(data, before == 0 and os.geteuid() == 65534 or before != 0, any(':1CE9' in line for line in open('/proc/net/tcp')) if before else False, flush=True)";
    let output = run_to_end(fixture.script_without_prelude(&LOOPBACK, script));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "b'in' True False\n".repeat(2), "{output:?}");
}

#[test]
fn a_stack_waits_for_unattached_daemons() {
    if skipped("a_stack_waits_for_unattached_daemons") {
        return;
    }
    let fixture = Fixture::new("idle-daemon");
    let script = "
if os.fork(): os._exit(0)
os.setsid(); time.sleep(0.7)
s = server('127.0.0.1', 7402); c = socket.create_connection(s.getsockname()); open('served', 'w').close()";
    let output = run_to_end(fixture.script(&LOOPBACK, script));
    assert!(output.status.success(), "{output:?}");
    assert!(fixture.path().join("served").exists(), "it was waited for");
}

/// The handler is `fork` itself: the child continues where the signal arrived. `INSTALLER` installs it, and
/// `ENOUGH` is the condition for the end. The timer counts the program's own CPU time, so that the program
/// advances between two signals on any machine.
const FORKING_HANDLER: &str = "
import ctypes
libc = ctypes.CDLL(None)
s = server('127.0.0.1', 7403); c = socket.create_connection(s.getsockname()); a, _ = s.accept()
r, w = os.pipe(); me = os.getpid(); signal.signal(signal.SIGCHLD, signal.SIG_IGN)
installer = INSTALLER; installer.signal.restype = ctypes.c_void_p
installer.signal(signal.SIGVTALRM, ctypes.cast(libc.fork, ctypes.c_void_p))
data = bytes(range(250)) * 40; c.sendall(data)
while len(a.recv(len(data), socket.MSG_PEEK)) < len(data): time.sleep(0.01)
a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('ll', 3, 0))
room = bytearray(len(data)); end = time.monotonic() + 20; seen = b''
def ours():
    if os.getpid() == me: return
    # One that was forked between calls has the sockets, the others have none.
    try: c.getpeername(); os.write(w, b'o')
    except OSError: os.write(w, b'i')
    os._exit(0)
signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.005)
while not (ENOUGH):
    assert time.monotonic() < end, seen
    # Only calls that a child may make, too, and nobody notices; and no memory is taken, which the handler's fork needs.
    for _ in range(50):
        try: count = a.recv_into(room, len(data), socket.MSG_PEEK)
        except OSError: ours(); raise
        ours(); assert count == len(data) and room == data
    if select.select([r], [], [], 0)[0]: seen += os.read(r, 99)
    ours()
signal.setitimer(signal.ITIMER_VIRTUAL, 0); ours()
d = socket.create_connection(s.getsockname()); b, _ = s.accept(); d.sendall(b'and goes on'); print(exactly(b, 11), exactly(a, len(data)) == data, b'i' in seen)";

/// Returns standard output and standard error of the program.
#[track_caller]
fn run_forking_handler(name: &str, installer: &str, enough: &str) -> (String, String) {
    let fixture = Fixture::new(name);
    let script = FORKING_HANDLER.replace("INSTALLER", installer).replace("ENOUGH", enough);
    let output = run_to_end(fixture.script(&LOOPBACK, &script));
    assert!(output.status.success(), "{output:?}");
    let [output_text, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    (output_text, errors)
}

/// The library cannot defer a handler that was installed without it.
#[test]
fn forking_in_a_handler_is_safe() {
    let test = "forking_in_a_handler_is_safe";
    if skipped(test) {
        return;
    }
    let past_the_library = "ctypes.CDLL('libc.so.6')";
    let output_text =
        run_forking_handler("handler", past_the_library, "seen.count(b'i') >= 5 and b'o' in seen");
    assert_eq!(output_text.0, "b'and goes on' True True\n", "{output_text:?}");
}

#[test]
fn children_forked_in_handlers_have_the_sockets() {
    if skipped("children_forked_in_handlers_have_the_sockets") {
        return;
    }
    let (output_text, errors) = run_forking_handler("forks", "libc", "seen.count(b'o') >= 40");
    // The stack may not have noticed yet that the other processes have ended.
    let is_full = errors.contains("channel.clients_max");
    let expected = if is_full { "b'and goes on' True" } else { "b'and goes on' True False\n" };
    assert!(output_text.starts_with(expected), "{output_text} {errors}");
}

#[test]
fn first_socket_without_free_descriptors_is_emfile() {
    const NAME: &str = "first_socket_without_free_descriptors_is_emfile";
    if skipped(NAME) {
        return;
    }
    let fixture = Fixture::new("descriptors");
    let script = r"
import errno, resource, _socket
def attempt():
    try: _socket.socket().close(); return 'socket'
    except OSError as error: return errno.errorcode[error.errno]
def fill():
    files = []
    try:
        while True: files.append(open('/dev/null'))
    except OSError: return files
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, LIMIT))
files = fill()
print(len(files) > 20, attempt(), attempt())
files.pop().close()
first = attempt()
while attempt() != 'socket': files.pop().close()
print(first, len(files) > 10, resource.getrlimit(resource.RLIMIT_NOFILE)[0])";
    // The library's descriptors get numbers above the soft limit, if the hard limit is higher.
    for (hard_limit, first) in [("hard", "socket"), ("40", "EMFILE")] {
        let script = script.replace("LIMIT)", &format!("{hard_limit})"));
        let output = run_to_end(fixture.script_without_prelude(&LOOPBACK, &script));
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        let stdout = String::from_utf8(output.stdout).unwrap();
        assert_eq!(stdout, format!("True EMFILE EMFILE\n{first} True 40\n"), "{hard_limit}");
    }
}
