//! A member of a group on a stack, and the kernel as router, sender and member at the other end.

use crate::fixture;

/// Joins on the address of the stack, receives a datagram of the group, and answers another group.
const ON_STACK: &str = r#"
import signal, socket
member = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
member.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
member.bind(("", 7777))
join = socket.inet_aton("239.1.2.3") + socket.inet_aton("10.9.0.2")
member.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, join)
print("yes", file=open("joined", "w"), flush=True)
data, sender = member.recvfrom(100)
member.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("10.9.0.2"))
member.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 5)
member.sendto(data + b" from " + sender[0].encode(), ("239.1.2.4", 7778))
member.setsockopt(socket.IPPROTO_IP, socket.IP_DROP_MEMBERSHIP, join)
signal.pause()
"#;

/// Queries the members, sends to the group, and prints what the kernel receives.
const ON_KERNEL: &str = r#"
import socket, struct, time
link = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
link.settimeout(10)
def report(kind):
    while True:
        packet, address = link.recvfrom(2000)
        header = (packet[0] & 15) * 4
        igmp = packet[header:]
        if packet[9] == 2 and packet[12:16] == socket.inet_aton("10.9.0.2") and igmp[0] == 0x22:
            count, = struct.unpack("!H", igmp[6:8])
            groups = [(igmp[at], socket.inet_ntoa(igmp[at + 4:at + 8])) for at in range(8, 8 + 8 * count, 8)]
            if (kind, "239.1.2.3") in groups:
                return "ttl %d options %s to %s" % (packet[8], packet[20:24].hex(), socket.inet_ntoa(packet[16:20]))
def checksum(data):
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    total = (total & 0xffff) + (total >> 16)
    return ~((total & 0xffff) + (total >> 16)) & 0xffff
query = bytearray(struct.pack("!BBH4sBBH", 0x11, 5, 0, bytes(4), 2, 125, 0))
query[2:4] = struct.pack("!H", checksum(bytes(query)))
own = socket.inet_aton("10.9.0.1")
router = socket.socket(socket.AF_INET, socket.SOCK_RAW, 2)
router.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
router.sendto(bytes(query), ("224.0.0.1", 0))
print("answer", report(2))
member = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
member.bind(("", 7778))
member.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton("239.1.2.4") + own)
member.setsockopt(socket.IPPROTO_IP, 12, 1)  # IP_RECVTTL
member.settimeout(10)
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
sender.sendto(b"hello", ("239.1.2.3", 7777))
data, control, flags, source = member.recvmsg(100, 100)
print(data.decode(), "via", source[0], "ttl", struct.unpack("i", control[0][2])[0])
print("leave", report(3))
"#;

#[test]
fn group_member_on_stack_talks_to_kernel() {
    let Some(fixture) = fixture("group_member_on_stack_talks_to_kernel", &["python3"]) else { return };
    let mut on_stack = fixture.start_on_stack(&["python3", "-c", ON_STACK]);
    fixture.wait_for_content("joined");
    let text = fixture.client_text("python3", &["-c", ON_KERNEL]);
    let expected = "answer ttl 1 options 94040000 to 224.0.0.22\n\
                    hello from 10.9.0.1 via 10.9.0.2 ttl 5\n\
                    leave ttl 1 options 94040000 to 224.0.0.22\n";
    assert_eq!(text, expected, "{}", on_stack.read_stderr());
}
