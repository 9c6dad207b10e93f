#!/usr/bin/env python3
"""Prints the segments that Linux's software GSO makes of super-frames. Its output is linux_gso.txt.

Sends each super-frame with a virtio-net header through a packet socket on a TAP device that offers no offload, and prints what the
kernel hands to the device. Needs root; touches nothing outside its own network namespace:

    unshare -n ./linux_gso.py > linux_gso.txt
"""
import fcntl, os, select, socket, struct, subprocess

IFF_TAP, IFF_NO_PI, TUNSETIFF = 0x0002, 0x1000, 0x400454CA
SOL_PACKET, PACKET_VNET_HDR = 263, 15
NEEDS_CSUM, GSO_TCP4, GSO_TCP6, GSO_UDP_L4, GSO_ECN = 1, 1, 4, 5, 0x80
MACS = bytes.fromhex("020000000001020000000002")
PAYLOAD = bytes(range(1, 21))
TIMESTAMPS = bytes.fromhex("0101080a0102030405060708")
TCP, UDP = 6, 17

tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"t0", IFF_TAP | IFF_NO_PI))
subprocess.check_call(["ip", "link", "set", "t0", "up"])
sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
sender.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
sender.bind(("t0", 0))


def fold(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def transport(protocol, pseudo, flags, options):
    if protocol == UDP:
        return struct.pack("!HHHH", 0x1234, 53, 8 + len(PAYLOAD), fold(pseudo))
    offset, urgent = (20 + len(options)) // 4 << 4, 5 if flags & 0x20 else 0
    # The sequence number wraps within the frame.
    return struct.pack("!HHIIBBHHH", 0x1234, 80, 0xFFFFFFF8, 0x01020304, offset, flags, 0x2000, fold(pseudo), urgent) + options


def show(name, version, protocol, size=8, flags=0x10, options=b"", ecn=0, df=0x4000, ip_options=b"", vlan=b"", extension=b""):
    length = len(PAYLOAD) + (8 if protocol == UDP else 20 + len(options))
    if version == 4:
        a, b = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])
        pseudo = a + b + struct.pack("!HH", protocol, length)
        header_len = 20 + len(ip_options)
        # The identification wraps within the frame.
        ip = struct.pack("!BBHHHBBH", 0x40 | header_len // 4, 2, header_len + length, 0xFFFF, df, 64, protocol, 0) + a + b + ip_options
        ip = ip[:10] + struct.pack("!H", 0xFFFF ^ fold(ip)) + ip[12:]
    else:
        a, b = bytes.fromhex("fd" + "00" * 14 + "01"), bytes.fromhex("fd" + "00" * 14 + "02")
        pseudo = a + b + struct.pack("!II", length, protocol)
        ip = struct.pack("!IHBB", 0x60212345, len(extension) + length, 60 if extension else protocol, 64) + a + b + extension
    headers = MACS + vlan + (b"\x08\x00" if version == 4 else b"\x86\xdd") + ip
    start, headers = len(headers), headers + transport(protocol, pseudo, flags, options)
    kind = GSO_UDP_L4 if protocol == UDP else GSO_TCP4 if version == 4 else GSO_TCP6
    virtio = struct.pack("<BBHHHH", NEEDS_CSUM, kind | ecn, len(headers), size, start, 6 if protocol == UDP else 16)
    sender.send(virtio + headers + PAYLOAD)
    print(f"case {'udp' if protocol == UDP else 'tcp'}{version} {size} {name}\nsuper {(headers + PAYLOAD).hex()}")
    while select.select([tap], [], [], 0.2)[0]:
        segment = os.read(tap, 65536)
        if segment.startswith(MACS):
            print("segment", segment.hex())


print(f"# Output of linux_gso.py on Linux {os.uname().release.split('-')[0]}. Case: kind, gso_size, what is special.")
show("FIN PSH ACK CWR, timestamps", 4, TCP, flags=0x99, options=TIMESTAMPS)
show("CWR, ECN bit of the virtio header", 4, TCP, flags=0x98, ecn=GSO_ECN)
show("URG, may be fragmented", 4, TCP, flags=0x30, df=0)
show("IP options", 4, TCP, flags=0x18, ip_options=b"\1\1\1\0")
show("VLAN tag", 4, TCP, flags=0x18, vlan=b"\x81\x00\x20\x05")
show("one segment", 4, TCP, flags=0x18, size=20)
show("two full segments", 4, TCP, flags=0x18, size=10)
show("odd size", 4, TCP, flags=0xD9, size=7)
show("FIN PSH ACK CWR, timestamps", 6, TCP, flags=0x99, options=TIMESTAMPS)
show("destination options", 6, TCP, flags=0x18, extension=bytes([TCP, 0, 1, 4, 0, 0, 0, 0]))
show("even size", 4, UDP)
show("odd size", 4, UDP, size=7)
show("even size", 6, UDP)
