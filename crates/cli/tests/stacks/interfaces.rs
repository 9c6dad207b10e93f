//! Programs that list the addresses on which they can listen.

use crate::fixture::{Fixture, skipped};

const MEMORY: [&str; 4] = ["--device", "memory", "--address", "10.5.0.1/24"];

/// Lists interfaces by all the means that programs use.
const LIST_INTERFACES: &str = "
import ctypes as C, fcntl, errno
libc = C.CDLL(None, use_errno=True)
class Entry(C.Structure): pass
Entry._fields_ = [('next', C.POINTER(Entry)), ('name', C.c_char_p), ('flags', C.c_uint), ('addr', C.c_void_p), ('mask', C.c_void_p), ('broad', C.c_void_p), ('data', C.c_void_p)]
def address(at):
    if not at: return None
    family = int.from_bytes(C.string_at(at, 2), 'little')
    if family == socket.AF_INET: return socket.inet_ntop(family, C.string_at(at + 4, 4))
    if family == socket.AF_INET6: return socket.inet_ntop(family, C.string_at(at + 8, 16))
    if family == socket.AF_PACKET:
        raw = C.string_at(at, 20)
        return (int.from_bytes(raw[4:8], 'little'), raw[12:12 + raw[11]].hex(':'))
    return family
def interfaces():
    first = C.POINTER(Entry)()
    assert libc.getifaddrs(C.byref(first)) == 0
    found, at = [], first
    while at:
        e = at.contents
        found.append((e.name.decode(), e.flags, address(e.addr), address(e.mask), address(e.broad)))
        at = e.next
    libc.freeifaddrs(first)
    return found
def names(): return dict((name, index) for index, name in socket.if_nameindex())
def ask(s, request, name, more=b''):
    return fcntl.ioctl(s, request, struct.pack('16s24s', name.encode(), more))[16:]
def conf(s, room=4096):
    buffer = C.create_string_buffer(room)
    head = fcntl.ioctl(s, 0x8912, struct.pack('i4xQ', room, C.addressof(buffer)))
    used = struct.unpack('i', head[:4])[0]
    part = lambda at: buffer.raw[at:at + 40]
    return [(part(at)[:16].rstrip(b'\\0').decode(), socket.inet_ntoa(part(at)[20:24])) for at in range(0, used, 40)]
";

#[test]
fn stack_links_follow_the_kernels_interfaces() {
    if skipped("stack_links_follow_the_kernels_interfaces") {
        return;
    }
    let script = format!(
        "{LIST_INTERFACES}
FIRST = 1 << 30
links = {{name: index for name, index in names().items() if index >= FIRST}}
(link, index), = links.items()
assert socket.if_nametoindex(link) == index and socket.if_indextoname(index) == link
assert socket.if_nametoindex('lo') == names()['lo'] < FIRST, 'the kernel has its own'
for wrong in (lambda: socket.if_nametoindex('nobody'), lambda: socket.if_indextoname(index + 7)):
    try: wrong(); print('?')
    except OSError: pass
for _ in range(200): found = interfaces()
kernels = [one for one in found if one[0] != link]
assert [one[2] for one in kernels].count('127.0.0.1') == 1, kernels
assert found[:len(kernels)] == kernels, 'they come first'
ours = found[len(kernels):]
packet, = [one for one in ours if type(one[2]) is tuple]
v4, = [one for one in ours if one[2] == '10.5.0.1']
assert packet[2][0] == index and packet[4] == (index, 'ff:ff:ff:ff:ff:ff')
assert v4[3:] == ('255.255.255.0', '10.5.0.255'), v4
assert all(one[1] & 0x104b == 0x1043 for one in ours), 'up, running, broadcast, for groups; no loop'
assert {{one[2] for one in ours if one[2] != packet[2]}} >= {{'10.5.0.1'}}
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
number = lambda request: struct.unpack('i', ask(s, request, link)[:4])[0]
assert socket.inet_ntoa(ask(s, 0x8915, link)[4:8]) == '10.5.0.1'
assert socket.inet_ntoa(ask(s, 0x891b, link)[4:8]) == '255.255.255.0'
assert socket.inet_ntoa(ask(s, 0x8919, link)[4:8]) == '10.5.0.255'
assert number(0x8913) & 0xffff == 0x1043 and number(0x8921) == 1500 and number(0x8933) == index
assert ask(s, 0x8927, link)[:8].hex(':') == '01:00:' + packet[2][1]
named = fcntl.ioctl(s, 0x8910, struct.pack('16si20s', b'', index, b''))
assert named[:16].rstrip(b'\\0').decode() == link
assert socket.inet_ntoa(ask(s, 0x8915, 'lo')[4:8]) == '127.0.0.1', 'the kernel answers for its own'
for request, name, error in [(0x8915, 'nobody', errno.ENODEV), (0x8927, 'nobody', errno.ENODEV)]:
    try: ask(s, request, name); print('?')
    except OSError as e: assert e.errno == error, e
all_ = conf(s)
assert (link, '10.5.0.1') == all_[-1] and ('lo', '127.0.0.1') in all_, all_
assert conf(s, 40) == all_[:1] and conf(s, 79) == all_[:1]
head = fcntl.ioctl(s, 0x8912, struct.pack('i4xQ', 0, 0))
assert struct.unpack('i', head[:4])[0] == 40 * len(all_)
# A child sees the same interfaces.
child = os.fork()
if not child: os._exit(0 if interfaces() == found else 1)
assert os.waitpid(child, 0)[1] == 0
print('seen')"
    );
    let fixture = Fixture::new("interfaces");
    assert_eq!(fixture.script_output(&MEMORY, &script), "seen\n");
    // Without a stack only the kernel's interfaces are listed.
    let without = format!("{LIST_INTERFACES}\nprint(max(names().values()) < 1 << 30, len(interfaces()) > 0)");
    let output = std::process::Command::new(crate::fixture::python().unwrap())
        .args(["-c", &format!("{}\n{without}", crate::fixture::PRELUDE)])
        .env("LD_PRELOAD", crate::fixture::built_library())
        .env_remove("GINNEL_STACK")
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "True True\n", "{output:?}");
}

#[test]
fn servers_binding_every_address_include_the_stacks() {
    if skipped("servers_binding_every_address_include_the_stacks") {
        return;
    }
    let script = format!(
        "{LIST_INTERFACES}
links = [index for index in names().values() if index >= 1 << 30]
seen = [one[2] for one in interfaces() if type(one[2]) is str]
assert len(seen) == len(set(seen)), 'each once: it is bound once'
assert '127.0.0.1' in seen and '10.5.0.1' in seen, seen
def bound(kind, at):
    family = socket.AF_INET6 if ':' in at else socket.AF_INET
    s = socket.socket(family, kind)
    where = (at, 7000, 0, links[0] if at.startswith('fe80') else 0) if ':' in at else (at, 7000)
    s.bind(where)
    assert s.getsockname()[:2] == (at, 7000)
    if kind == socket.SOCK_STREAM: s.listen()
    return s
tcp = {{at: bound(socket.SOCK_STREAM, at) for at in seen if not at.startswith('fe80')}}
udp = {{at: bound(socket.SOCK_DGRAM, at) for at in seen if not at.startswith('fe80')}}
for at in ('127.0.0.1', '10.5.0.1'):
    c = socket.create_connection((at, 7000)); a, peer = tcp[at].accept(); a.sendall(at.encode())
    assert exactly(c, len(at)).decode() == at
    d = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); d.sendto(b'asks', (at, 7000))
    assert udp[at].recvfrom(9)[0] == b'asks'
print('reached')"
    );
    let fixture = Fixture::new("finds");
    assert_eq!(
        fixture.script_output(&[&MEMORY[..], &["--loopback", "stack"]].concat(), &script),
        "reached\n"
    );
    assert_eq!(fixture.script_output(&MEMORY, &script), "reached\n");
}

#[test]
fn interface_lists_are_freed() {
    if skipped("interface_lists_are_freed") {
        return;
    }
    // Measures allocated memory after rounds that create many lists, also lists of another library.
    let script = format!(
        "{LIST_INTERFACES}
class Info(C.Structure): _fields_ = [(name, C.c_size_t) for name in 'arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost'.split()]
libc.mallinfo2.restype = Info
def used(): i = libc.mallinfo2(); return i.uordblks + i.hblkhd
def round():
    lists = [C.POINTER(Entry)() for _ in range(300)]
    for one in lists: assert libc.getifaddrs(C.byref(one)) == 0
    for one in lists[::2] + lists[1::2]: libc.freeifaddrs(one)
round(); before = used()
for _ in range(20): round()
libc.freeifaddrs(None)
print(used() - before < 300 * 100)"
    );
    let fixture = Fixture::new("lists");
    assert_eq!(fixture.script_output(&MEMORY, &script), "True\n");
}

#[test]
fn every_socket_can_query_interfaces() {
    if skipped("every_socket_can_query_interfaces") {
        return;
    }
    // Sockets of the stack and of the kernel: in this process, passed to and fro, and in another process that
    // received them, for a socket that the stack knew before and for one that it did not.
    let script = format!(
        "{LIST_INTERFACES}
import subprocess
link, = [name for name, index in names().items() if index >= 1 << 30]
def tries(f):
    try: return f()
    except OSError as e: return errno.errorcode[e.errno]
def tells(x):
    return [tries(lambda: socket.inet_ntoa(ask(x, 0x8915, link)[4:8])), tries(lambda: socket.inet_ntoa(ask(x, 0x8915, 'lo')[4:8])), tries(lambda: (link, '10.5.0.1') in conf(x)),
        tries(lambda: struct.unpack('i', ask(x, 0x8921, link)[:4])[0]), tries(lambda: ask(x, 0x8913, 'nobody'))]
def is_right(x):
    v4 = ['10.5.0.1', '127.0.0.1'] if x.family == socket.AF_INET else ['ENOTTY', 'ENOTTY']
    return tells(x) == v4 + [True, 1500, 'ENODEV']
def receive(way):
    name, fds, _, _ = socket.recv_fds(way, 99, 9)
    return name.decode(), [socket.socket(fileno=fd) for fd in fds]
if len(sys.argv) > 1:
    there = socket.socket(fileno=int(sys.argv[1]))
    while True:
        name, got = receive(there)
        if not got: sys.exit(0)
        print(name, got[0].family, tells(got[0]), is_right(got[0]), file=sys.stderr)
        there.send(b'.' if is_right(got[0]) else b'!')
def at(port, kind=socket.SOCK_STREAM, host='10.5.0.1', family=socket.AF_INET):
    s = socket.socket(family, kind); s.bind((host, port)); return s
listener = server('10.5.0.1', 7000); c = socket.create_connection(('10.5.0.1', 7000)); a, _ = listener.accept()
these = dict(listener=listener, connection=c, accepted=a, both=server('', 7001), datagrams=at(7002, socket.SOCK_DGRAM), everywhere=at(7004, socket.SOCK_DGRAM, ''), fresh=socket.socket(), bound=at(7003),
    unbound=socket.socket(socket.AF_INET, socket.SOCK_DGRAM), six=socket.socket(socket.AF_INET6), six6=at(7005, family=socket.AF_INET6, host='::'), kernels=at(7006, host='127.0.0.1'), unix=socket.socket(socket.AF_UNIX))
here, there = socket.socketpair(socket.AF_UNIX)
def to_and_fro(one):
    socket.send_fds(there, [b'x'], [one.fileno()])
    return receive(here)[1][0]
print([name for name, one in these.items() if not is_right(one)], [name for name, one in these.items() if not is_right(to_and_fro(one))])
me, number = [sys.executable, '-c', open('script').read()], str(there.fileno())
there.set_inheritable(True)
def forked():
    pid = os.fork()
    if not pid: os.execv(me[0], me + [number])
    return pid
def started(): return subprocess.Popen(me + [number], pass_fds=[there.fileno()]).pid
def send(one, name):
    socket.send_fds(here, [name.encode()], [one.fileno()])
    return here.recv(1)
for begin in forked, started:
    pid = begin()
    print([name for name, one in these.items() if send(one, name) != b'.'])
    here.send(b'end'); assert os.waitpid(pid, 0)[1] == 0
try: fcntl.ioctl(0, 0x8912, struct.pack('i4xQ', 0, 0)); print('?')
except OSError as e: print(errno.errorcode[e.errno])"
    );
    let fixture = Fixture::new("script");
    std::fs::write(fixture.path().join("script"), format!("{}\n{script}", crate::fixture::PRELUDE)).unwrap();
    assert_eq!(fixture.script_output(&MEMORY, &script), "[] []\n[]\n[]\nENOTTY\n");
}
