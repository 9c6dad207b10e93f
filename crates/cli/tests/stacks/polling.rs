//! Programs that never wait in a socket call, on a stack whose shards are killed.

use crate::fixture::{Fixture, RunningProgram, run_to_end, skipped, wait_until};
use crate::restart::{kill_shards, supervisor_of};
use std::fs;

/// Processes of one socket each, which make only one kind of call and sleep elsewhere.
const POLLING: &str = "
def bound(port):
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', port)); return u
def receives():
    u = bound(7010)
    def turn():
        got, peer = u.recvfrom(100, socket.MSG_DONTWAIT); u.sendto(got + b'!', peer)
    return turn
def accepts():
    l = server('127.0.0.1', 7011); l.setblocking(False)
    def turn():
        c, _ = l.accept(); c.sendall(b'accepted'); c.close()
    return turn
def polls():
    l = server('127.0.0.1', 7012); p = select.poll(); p.register(l)
    def turn():
        for _ in p.poll(0): c, _ = l.accept(); c.sendall(b'polled'); c.close()
    return turn
def reads_options():
    u = bound(7013)
    return lambda: u.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
def sets_options():
    u = bound(7014)
    return lambda: u.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
def sends():
    u = bound(7015); u.connect(('127.0.0.1', 7016))
    return lambda: u.send(b'sent', socket.MSG_DONTWAIT)
def is_connected():
    l = server('127.0.0.1', 0); c = socket.create_connection(l.getsockname())
    def turn():
        try: c.recv(1, socket.MSG_DONTWAIT)
        except ConnectionResetError: open('reset', 'w').close()
    return turn
children = []
for number, kind in enumerate((receives, accepts, polls, reads_options, sets_options, sends, is_connected)):
    child = os.fork()
    if child: children.append(child); continue
    # If the test fails, nobody ends the child.
    signal.alarm(60); turn = kind(); open('polls%d' % number, 'w').close()
    while True:
        time.sleep(0.05)
        try: turn()
        except OSError: pass
while not os.path.exists('end'): time.sleep(0.01)
for child in children: os.kill(child, signal.SIGKILL)";

/// Asks each process, for 30 seconds at most.
const ASK: &str = "
until = time.monotonic() + 30
def tries(f):
    while time.monotonic() < until:
        try: return f()
        except OSError: time.sleep(0.01)
def ask(port):
    with socket.create_connection(('127.0.0.1', port), timeout=1) as s: return s.recv(100)
def ask_datagram():
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(0.2)
    u.sendto(b'hey', ('127.0.0.1', 7010)); return u.recv(100)
def received():
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 7016)); u.settimeout(1)
    return u.recv(100)
def is_bound(port):
    # A connected socket gets the error of a port that nobody has.
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.connect(('127.0.0.1', port)); u.settimeout(0.1)
    u.send(b'?')
    try: u.recv(1)
    except TimeoutError: return True
print(tries(ask_datagram), tries(lambda: ask(7011)), tries(lambda: ask(7012)))
print(tries(lambda: is_bound(7013)), tries(lambda: is_bound(7014)), tries(received))";

fn serve_again(shards: u32) {
    let fixture = Fixture::new(&format!("polling{shards}"));
    fs::write(fixture.path().join("shards.toml"), format!("[shards]\ncount = {shards}\n")).unwrap();
    let options = ["--loopback", "stack", "--config", "shards.toml", "--on-stack-death", "restart"];
    let _up = fixture.start_stack("lab", &options);
    let on_lab = ["--stack", "lab"];
    let polling = RunningProgram::new(fixture.script(&on_lab, POLLING));
    let exists = |name: &str| fixture.path().join(name).exists();
    wait_until("all processes poll", || (0..7).all(|number| exists(&format!("polls{number}"))));
    let ask = || {
        let output = run_to_end(fixture.script(&on_lab, ASK));
        String::from_utf8(output.stdout).unwrap()
    };
    let expected = "b'hey!' b'accepted' b'polled'\nTrue True b'sent'\n";
    assert_eq!(ask(), expected);
    kill_shards(supervisor_of(&fixture, "lab"));
    assert_eq!(ask(), expected, "with new shards");
    wait_until("the connection is reported as reset", || exists("reset"));
    fs::write(fixture.path().join("end"), "").unwrap();
    assert!(polling.wait_for_output().status.success());
}

#[test]
fn polling_programs_serve_again_after_a_restart() {
    if !skipped("polling_programs_serve_again_after_a_restart") {
        serve_again(1);
    }
}

#[test]
fn polling_programs_of_two_shards_serve_again() {
    if !skipped("polling_programs_of_two_shards_serve_again") {
        serve_again(2);
    }
}
