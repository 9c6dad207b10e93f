//! Programs that reach themselves and each other inside a stack.

use crate::rig::{Place, Started, skipped, until};

const LOOPBACK: [&str; 2] = ["--loopback", "stack"];
const MEMORY: [&str; 4] = ["--device", "memory", "--address", "10.5.0.1/24"];

#[test]
fn a_program_reaches_itself_by_all_addresses_of_the_loop_and_moves_much() {
    if skipped("a_program_reaches_itself_by_all_addresses_of_the_loop_and_moves_much") {
        return;
    }
    let place = Place::new("itself");
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
    let begun = std::time::Instant::now();
    assert_eq!(place.says(&LOOPBACK, script), "refused\nrefused\nrefused\n");
    assert!(begun.elapsed().as_secs() < 30, "60 MB took {:?}", begun.elapsed());
    // Nothing of it was the kernel's: nobody there listened.
    let kernels = "s = server('127.0.0.1', 0)
print(any(line.split()[1].endswith(':%04X' % s.getsockname()[1]) for line in open('/proc/net/tcp')))";
    assert_eq!(place.says(&LOOPBACK, kernels), "False\n");
    assert_eq!(place.says(&MEMORY, kernels), "True\n");
}

#[test]
fn a_connection_to_itself_is_one_that_hears_what_it_says() {
    if skipped("a_connection_to_itself_is_one_that_hears_what_it_says") {
        return;
    }
    let script = "
s = socket.socket(); s.bind(('127.0.0.1', 7003)); s.connect(('127.0.0.1', 7003))
s.sendall(b'echo'); print(exactly(s, 4).decode(), s.getsockname() == s.getpeername())";
    let place = Place::new("self");
    assert_eq!(place.says(&LOOPBACK, script), "echo True\n");
}

#[test]
fn two_programs_on_a_stack_reach_each_other_by_its_own_address() {
    if skipped("two_programs_on_a_stack_reach_each_other_by_its_own_address") {
        return;
    }
    let place = Place::new("two");
    let _up = place.up("lab", &MEMORY);
    for (host, listens) in [("10.5.0.1", "10.5.0.1:7004"), ("0.0.0.0", "0.0.0.0:7004")] {
        let serve = format!(
            "s = server({host:?}, 7004); a, peer = s.accept(); a.sendall(peer[0].encode()); a.recv(1)"
        );
        let mut command = place.script(&["--stack", "lab", "--kernel-listen", "off"], &serve);
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        let server = Started::new(command);
        until("it listens", || place.must(&["ss", "lab", "-l"]).contains(listens));
        let ask = "print(exactly(socket.create_connection(('10.5.0.1', 7004)), 8).decode())";
        assert_eq!(place.says(&["--stack", "lab"], ask), "10.5.0.1\n");
        assert!(server.finish().status.success());
    }
}

#[test]
fn low_ports_are_free_on_a_stack_of_ones_own_and_need_the_capability_on_others() {
    if skipped("low_ports_are_free_on_a_stack_of_ones_own_and_need_the_capability_on_others") {
        return;
    }
    let place = Place::new("ports");
    // Whether this process may bind them in the kernel, which root in a container may not always.
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
    let config = place.path().join("free.toml");
    std::fs::write(&config, "[run]\nunprivileged_port_start = 80\n").unwrap();
    assert_eq!(place.says(&LOOPBACK, script), "free free free\n");
    let _up = place.up("lab", &LOOPBACK);
    assert_eq!(place.says(&["--stack", "lab"], script), "EACCES EACCES free\n");
    let _up = place.up("free", &["--config", "free.toml", "--loopback", "stack"]);
    assert_eq!(place.says(&["--stack", "free"], script), "free free free\n");
}
