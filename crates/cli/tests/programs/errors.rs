//! ICMP errors with extensions (RFC 4884), as traceroute reads them from routers that use MPLS labels.

use crate::fixture;

/// Requests errors with extensions, and prints for each the length of the quoted datagram, the RFC 4884 data
/// and `ee_data`.
const SERVER_SCRIPT: &str = "
import select, socket
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('10.9.0.2', 7001))
u.setsockopt(socket.IPPROTO_IP, 11, 1)
open('ready', 'w').write('yes')
for asks in (0, 1, 1, 1):
    u.setsockopt(socket.IPPROTO_IP, 26, asks); p = select.poll(); p.register(u, 0); p.poll(20000)
    data, control, flags, to = u.recvmsg(2000, 500, socket.MSG_ERRQUEUE)
    print(len(data), control[0][2][:8].hex(), control[0][2][12:16].hex(), to, flush=True)
    u.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR); open(f'dots{asks}', 'a').write('.')";

/// Sends ICMP messages that quote a datagram of 100 bytes, followed by an extension: valid ones, and one with
/// a wrong checksum.
const CLIENT_SCRIPT: &str = "
import os, socket, struct, time
def checksum(b):
    s = sum(struct.unpack('!%dH' % (len(b) // 2), b))
    while s >> 16: s = (s & 0xffff) + (s >> 16)
    return ~s & 0xffff
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
def dots(): return sum(os.path.getsize(f) for f in ('dots0', 'dots1') if os.path.exists(f))
for number, (kind, length, spoil) in enumerate(((3, 32, 0), (3, 32, 0), (11, 32, 1), (3, 0, 0))):
    ends = socket.inet_aton('10.9.0.2') + socket.inet_aton('10.9.0.1')
    quote = struct.pack('!BBHHHBBH', 0x45, 0, 128, 1, 0, 64, 17, 0) + ends + struct.pack('!4H', 7001, 7002, 108, 0) + bytes(range(100))
    extension = struct.pack('!BBHHBB', 0x20, 0, 0, 8, 1, 1) + b'abcd'
    extension = extension[:2] + struct.pack('!H', checksum(extension) ^ spoil) + extension[4:]
    message = struct.pack('!BBHBBH', kind, 3 if kind == 3 else 0, 0, 0, length, 0) + quote + extension
    message = message[:2] + struct.pack('!H', checksum(message)) + message[4:]
    raw.sendto(message, ('10.9.0.2', 0))
    while dots() <= number: time.sleep(0.01)";

/// The expected output is that of Linux for the same messages.
#[test]
fn icmp_extensions_are_reported_on_request() {
    let Some(fixture) = fixture("icmp_extensions_are_reported_on_request", &["python3"]) else { return };
    let mut asks = fixture.start_on_stack(&["python3", "-c", SERVER_SCRIPT]);
    fixture.wait_for_content("ready");
    fixture.client_output("python3", &["-c", CLIENT_SCRIPT]);
    assert_eq!(asks.wait_for_exit(), 0, "{}", asks.read_stderr());
    let to = "('10.9.0.1', 7002)";
    let refused = "6f00000002030300";
    let expired = "71000000020b0000";
    let expected = [
        format!("112 {refused} 00000000 {to}"),
        format!("112 {refused} 64000000 {to}"),
        format!("112 {expired} 64000100 {to}"),
        format!("112 {refused} 00000000 {to}"),
    ];
    assert_eq!(asks.read_stdout().lines().collect::<Vec<_>>(), expected);
}
