//! Filters of sockets: `SO_ATTACH_FILTER`, `SO_DETACH_FILTER`, `SO_LOCK_FILTER` and `SO_GET_FILTER`.

use crate::sys::{Fd, Fixture, Sys, port, word};
use crate::udp::pair;
use libc::{
    MSG_DONTWAIT, MSG_WAITALL, SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_LOCK_FILTER, SOCK_DGRAM, SOCK_NONBLOCK,
    SOCK_STREAM, SOL_SOCKET,
};
use rustix::io::Errno;

/// An instruction: code, `jt`, `jf`, `k`.
pub type Instruction = (u16, u8, u8, u32);

pub const RET_A: Instruction = (0x16, 0, 0, 0);
const LEN: Instruction = (0x80, 0, 0, 0);
const TAX: Instruction = (0x07, 0, 0, 0);
const SKF_AD: u32 = 0xffff_f000;
const SKF_NET: u32 = 0xfff0_0000;
const SKF_LL: u32 = 0xffe0_0000;

pub const fn op(code: u16, k: u32) -> Instruction {
    (code, 0, 0, k)
}

pub const fn ret(k: u32) -> Instruction {
    op(0x06, k)
}

pub fn encode(program: &[Instruction]) -> Vec<u8> {
    let bytes = |(code, jt, jf, k): &Instruction| {
        let [c0, c1] = code.to_ne_bytes();
        let [k0, k1, k2, k3] = k.to_ne_bytes();
        [c0, c1, *jt, *jf, k0, k1, k2, k3]
    };
    program.iter().flat_map(bytes).collect()
}

/// Attaches a program, given by a length and bytes that may be fewer than the length says.
fn attach_code(sys: &dyn Sys, fd: Fd, len: usize, code: &[u8]) -> Result<(), Errno> {
    let mut value = [0; 16];
    value[..2].copy_from_slice(&(len as u16).to_ne_bytes());
    value[8..].copy_from_slice(&code.as_ptr().expose_provenance().to_ne_bytes());
    sys.setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &value)
}

fn attach(sys: &dyn Sys, fd: Fd, program: &[Instruction]) -> Result<(), Errno> {
    attach_code(sys, fd, program.len(), &encode(program))
}

fn detach(sys: &dyn Sys, fd: Fd) -> Result<(), Errno> {
    sys.setsockopt(fd, SOL_SOCKET, SO_DETACH_FILTER, &word(0))
}

fn lock(sys: &dyn Sys, fd: Fd, on: i32) -> Result<(), Errno> {
    sys.setsockopt(fd, SOL_SOCKET, SO_LOCK_FILTER, &word(on))
}

/// Closes descriptors of host `a` and of host `b`. Those of a stack would stay open until the last case ends.
fn close(w: &Fixture<'_>, of_a: &[Fd], of_b: &[Fd]) {
    of_a.iter().for_each(|fd| w.a.close(*fd).unwrap());
    of_b.iter().for_each(|fd| w.b.close(*fd).unwrap());
}

/// Drops segments whose payload begins with `x`. A segment without payload passes.
fn drop_segments_of_x() -> Vec<Instruction> {
    vec![
        op(0x30, 12),
        op(0x74, 2),
        op(0x54, 0x3c),
        TAX,
        LEN,
        // If the packet is longer than its header:
        (0x2d, 0, 2, 0),
        op(0x50, 0),
        (0x15, 1, 0, u32::from(b'x')),
        ret(u32::MAX),
        ret(0),
    ]
}

pub fn datagrams_are_dropped(w: &mut Fixture<'_>) {
    let program = [op(0x30, 8), (0x15, 0, 1, u32::from(b'x')), ret(0), ret(u32::MAX)];
    for when in ["before bind", "after bind", "before connect"] {
        let a = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
        let b = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
        w.b.bind(b, &w.at_b(0)).unwrap();
        let peer = w.at_b(port(&w.b.getsockname(b).unwrap()));
        if when != "after bind" {
            w.log(when, attach(w.a, a, &program));
        }
        if when == "before connect" {
            w.a.connect(a, &peer).unwrap();
        } else {
            w.a.bind(a, &w.at_a(0)).unwrap();
        }
        if when == "after bind" {
            w.log(when, attach(w.a, a, &program));
        }
        let to = w.at_a(port(&w.a.getsockname(a).unwrap()));
        for bytes in [&b"x dropped"[..], b"y kept", b"xx", b"", b"yx"] {
            w.log("send", w.b.send_to(b, bytes, Some(&to), &[], 0));
        }
        w.settle();
        // A load beyond the end drops the empty datagram.
        w.log("received", w.a.recv(a, 100, MSG_DONTWAIT));
        w.log("received", w.a.recv(a, 100, MSG_DONTWAIT));
        w.log("received", w.a.recv(a, 100, MSG_DONTWAIT));
        w.log("send", w.a.send_to(a, b"x sent", Some(&peer), &[], 0));
        w.settle();
        w.log("what is sent is not filtered", w.b.recv(b, 100, MSG_DONTWAIT));
        w.log("detach", detach(w.a, a));
        w.b.send_to(b, b"x now", Some(&to), &[], 0).unwrap();
        w.settle();
        w.log("received", w.a.recv(a, 100, MSG_DONTWAIT));
        close(w, &[a], &[b]);
    }
}

pub fn datagrams_are_truncated(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    for kept in [1, 7, 8, 9, 11, 14, 15, 1000, u32::MAX] {
        w.log("attach", attach(w.a, a, &[ret(kept)]));
        w.b.send_to(b, b"abcdef", Some(&to), &[], 0).unwrap();
        w.settle();
        w.log("next", w.a.readable_bytes(a));
        let got = w.a.recv_from(a, 4, 0, libc::MSG_TRUNC | MSG_DONTWAIT).map(|got| (got.count, got.bytes));
        w.log("received", (kept, got));
    }
    // The filter is not applied again to what is queued.
    w.log("attach", attach(w.a, a, &[ret(u32::MAX)]));
    w.b.send_to(b, b"queued", Some(&to), &[], 0).unwrap();
    w.settle();
    w.log("attach", attach(w.a, a, &[ret(0)]));
    w.log("received", w.a.recv(a, 100, MSG_DONTWAIT));
    close(w, &[a], &[b]);
}

/// Returns the lowest byte of what instructions leave in A, which a filter turns into a length.
fn value_of(w: &Fixture<'_>, (a, b): (Fd, Fd), to: &[u8], program: &[Instruction]) -> Option<usize> {
    let end = [op(0x54, 0xff), op(0x04, 8), RET_A];
    attach(w.a, a, &[program, &end].concat()).unwrap();
    let bytes: Vec<u8> = (0..=255).collect();
    w.b.send_to(b, &bytes, Some(to), &[], 0).unwrap();
    w.settle();
    w.a.recv(a, 300, MSG_DONTWAIT).ok().map(|bytes| bytes.len())
}

pub fn programs_see_headers_of_datagrams(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    let v4 = w.domain() == libc::AF_INET;
    let next_header = if v4 { 9 } else { 6 };
    let hop_limit = if v4 { 8 } else { 7 };
    let network_len = if v4 { 20 } else { 40 };
    let high = |load: Instruction| vec![load, op(0x74, 8)];
    let sequences = [
        ("length", high(LEN)),
        ("length", vec![LEN]),
        ("length in X", vec![op(0x81, 0), op(0x87, 0)]),
        ("length field", high(op(0x28, 4))),
        ("payload", vec![op(0x30, 8 + 77)]),
        ("payload", vec![op(0x28, 8 + 77)]),
        ("payload", vec![op(0x20, 8 + 77)]),
        ("last byte", vec![op(0x30, 8 + 255)]),
        ("beyond the end", vec![op(0x30, 8 + 256)]),
        ("beyond the end", vec![op(0x28, 8 + 255)]),
        ("indexed", vec![op(0x01, 100), op(0x50, 8 + 77)]),
        ("indexed, wrapped", vec![op(0x01, u32::MAX), op(0x50, 10)]),
        ("version", vec![op(0x30, SKF_NET)]),
        ("protocol", vec![op(0x30, SKF_NET + next_header)]),
        ("hop limit", vec![op(0x30, SKF_NET + hop_limit)]),
        ("payload from IP on", vec![op(0x30, SKF_NET + network_len + 8 + 33)]),
        ("IP by index", vec![op(0x01, SKF_NET), op(0x50, next_header)]),
        ("beyond the end of IP", vec![op(0x30, SKF_NET + network_len + 8 + 256)]),
        ("ethertype", vec![op(0x30, SKF_LL + 12)]),
        ("ethertype", vec![op(0x30, SKF_LL + 13)]),
        ("ethertype", vec![op(0x28, SKF_LL + 12)]),
        ("other negative offset", vec![op(0x30, 0x8000_0000)]),
        ("other negative offset", vec![op(0x30, SKF_LL - 1)]),
        ("low nibble", vec![op(0xb1, SKF_NET), op(0x87, 0)]),
        ("low nibble", vec![op(0xb1, 8 + 0x27), op(0x87, 0)]),
        ("SKF_AD_PROTOCOL", vec![op(0x28, SKF_AD)]),
        ("SKF_AD_PROTOCOL", high(op(0x20, SKF_AD))),
        ("SKF_AD_PKTTYPE", vec![op(0x30, SKF_AD + 4)]),
        ("SKF_AD_MARK", vec![op(0x20, SKF_AD + 20)]),
        ("SKF_AD_ALU_XOR_X", vec![op(0x00, 0b1100), op(0x01, 0b1010), op(0x20, SKF_AD + 40)]),
        ("SKF_AD_VLAN_TAG", vec![op(0x20, SKF_AD + 44)]),
        ("SKF_AD_VLAN_TAG_PRESENT", vec![op(0x20, SKF_AD + 48)]),
        ("SKF_AD_PAY_OFFSET", vec![op(0x20, SKF_AD + 52)]),
        ("SKF_AD_VLAN_TPID", vec![op(0x20, SKF_AD + 60)]),
        ("SKF_AD_ by index", vec![op(0x01, 0), op(0x50, SKF_AD)]),
        ("shift by 33", vec![op(0x00, 3), op(0x01, 33), op(0x6c, 0)]),
        ("division by X = 0", vec![op(0x00, 3), op(0x01, 0), op(0x3c, 0)]),
        ("remainder", vec![op(0x00, 23), op(0x01, 9), op(0x9c, 0)]),
        ("negation", vec![op(0x00, 1), op(0x84, 0)]),
        ("memory", vec![op(0x00, 9), op(0x02, 15), op(0x00, 1), op(0x60, 15)]),
        ("memory of X", vec![op(0x01, 8), op(0x03, 0), op(0x01, 1), op(0x61, 0), op(0x87, 0)]),
    ];
    for (name, program) in sequences {
        let value = value_of(w, (a, b), &to, &program);
        w.log(name, (program, value));
    }
    close(w, &[a], &[b]);
}

/// Searches for netlink attributes in datagrams.
pub fn programs_find_attributes(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    // After the UDP header: an attribute of type 1 with 2 bytes; one of type 2 with nested ones of types 7
    // and 9; one of type 3.
    let attribute = |len: u16, kind: u16| [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
    let parts = [
        attribute(6, 1),
        vec![0; 4],
        attribute(20, 2),
        attribute(5, 7),
        vec![0; 4],
        attribute(8, 9),
        vec![0; 4],
        attribute(4, 3),
    ];
    let mut bytes = parts.concat();
    bytes.resize(200, 0);
    for (code, from, kind) in [
        (12, 8, 1),
        (12, 8, 2),
        (12, 8, 3),
        (12, 8, 4),
        (12, 16, 1),
        (12, 16, 3),
        (12, 207, 0),
        (12, 208, 0),
        (12, u32::MAX, 0),
        (16, 16, 7),
        (16, 16, 9),
        (16, 16, 3),
        (16, 40, 3),
        (16, 1000, 3),
    ] {
        let program =
            [op(0x00, from), op(0x01, kind), op(0x20, SKF_AD + code), op(0x54, 0xff), op(0x04, 8), RET_A];
        attach(w.a, a, &program).unwrap();
        w.b.send_to(b, &bytes, Some(&to), &[], 0).unwrap();
        w.settle();
        w.log("offset", (code, from, kind, w.a.recv(a, 300, MSG_DONTWAIT).map(|bytes| bytes.len())));
    }
    close(w, &[a], &[b]);
}

/// The interface is the loopback interface.
pub fn programs_see_the_interface(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    for (name, program) in [
        ("SKF_AD_IFINDEX", vec![op(0x20, SKF_AD + 8)]),
        ("SKF_AD_HATYPE", vec![op(0x28, SKF_AD + 28)]),
        ("SKF_AD_HATYPE", vec![op(0x28, SKF_AD + 28), op(0x74, 8)]),
        ("destination", vec![op(0x30, SKF_LL + 5)]),
        ("source", vec![op(0x30, SKF_LL + 11)]),
    ] {
        let value = value_of(w, (a, b), &to, &program);
        w.log(name, value);
    }
    close(w, &[a], &[b]);
}

pub fn listeners_drop_syns(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(SOCK_NONBLOCK);
    w.log("attach", attach(w.a, listener, &[ret(0)]));
    let b = w.b.socket(w.domain(), SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    w.settle();
    w.log("waits", w.ready(w.b, b));
    w.log("accept", w.a.accept4(listener, 0).is_ok());
    w.log("detach", detach(w.a, listener));
    // The SYN is sent again.
    w.wait(w.b, b, libc::POLLOUT);
    w.log("error", w.b.getsockopt(b, SOL_SOCKET, libc::SO_ERROR));
    w.wait(w.a, listener, libc::POLLIN);
    let a = w.a.accept4(listener, 0);
    w.log("accept", a.is_ok());
    close(w, &[listener, a.unwrap()], &[b]);
    // Attached before listen; only SYNs pass.
    let listener = w.a.socket(w.domain(), SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    w.a.bind(listener, &w.at_a(0)).unwrap();
    let only_syns = [op(0x30, 13), (0x45, 1, 0, 2), ret(0), ret(u32::MAX)];
    w.log("attach", attach(w.a, listener, &only_syns));
    w.a.listen(listener, 8).unwrap();
    let at = port(&w.a.getsockname(listener).unwrap());
    let b = w.b.socket(w.domain(), SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    w.wait(w.b, b, libc::POLLOUT);
    w.settle();
    w.log("the final ACK is dropped", w.a.accept4(listener, 0));
    close(w, &[listener], &[b]);
}

/// Changes the filter of a listener while a connection is half-open, which `TCP_DEFER_ACCEPT` makes so.
pub fn half_open_connections_have_the_present_filter(w: &mut Fixture<'_>) {
    let drops_x = drop_segments_of_x();
    let drops_all = vec![ret(0)];
    let none = Vec::new();
    let cases = [
        ("attach", &none, &drops_all, &b"yes"[..]),
        ("attach", &none, &drops_x, b"x"),
        ("attach", &none, &drops_x, b"y"),
        ("detach", &drops_x, &none, b"x"),
        ("replace", &drops_x, &drops_all, b"y"),
        ("replace", &drops_all, &drops_x, b"y"),
    ];
    for (name, before, after, sent) in cases {
        let (listener, at) = w.listener(SOCK_NONBLOCK);
        w.a.setsockopt(listener, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, &word(30)).unwrap();
        let b = w.b.socket(w.domain(), SOCK_STREAM | SOCK_NONBLOCK).unwrap();
        if before != &drops_all && !before.is_empty() {
            attach(w.a, listener, before).unwrap();
        }
        w.log(name, w.b.connect(b, &w.at_a(at)));
        w.wait(w.b, b, libc::POLLOUT);
        w.settle();
        if before == &drops_all {
            attach(w.a, listener, before).unwrap();
        }
        w.log("half-open", w.a.accept4(listener, 0));
        if after.is_empty() {
            detach(w.a, listener).unwrap();
        } else {
            attach(w.a, listener, after).unwrap();
        }
        w.b.send(b, sent, 0).unwrap();
        w.settle();
        let accepted = w.a.accept4(listener, SOCK_NONBLOCK);
        w.log("accepted", accepted.is_ok());
        if let Ok(a) = accepted {
            w.log("received", w.a.recv(a, 10, MSG_DONTWAIT));
            w.log("filter", w.a.attached_filter(a, 100));
            close(w, &[a], &[]);
        }
        close(w, &[listener], &[b]);
    }
}

/// Returns the lowest byte of what instructions leave in A for a segment with 200 bytes: that many of them
/// are kept, and 0 stands for a value of 0 or a segment that was dropped. What was cut off is sent again
/// after a while, perhaps before the bytes are read, so segments that do not begin with the first byte are
/// dropped.
fn value_of_segment(w: &mut Fixture<'_>, program: &[Instruction]) -> Option<usize> {
    let (a, b) = w.connection();
    // The header stays in any case: its length and the value are kept.
    let header = [op(0x30, 12), op(0x74, 2), op(0x54, 0x3c), TAX];
    let is_first = [op(0x50, 0), (0x15, 1, 0, 0), ret(0)];
    let value = [op(0x54, 0x7f), op(0x0c, 0), RET_A];
    attach(w.a, a, &[program, &[op(0x02, 0)], &header, &is_first, &[op(0x60, 0)], &value].concat()).unwrap();
    let bytes: Vec<u8> = (0..200).collect();
    w.b.send(b, &bytes, 0).unwrap();
    w.settle();
    let got = w.a.recv(a, 300, MSG_DONTWAIT).ok().map(|bytes| bytes.len());
    detach(w.a, a).unwrap();
    close(w, &[a], &[b]);
    got
}

pub fn programs_see_headers_of_segments(w: &mut Fixture<'_>) {
    let v4 = w.domain() == libc::AF_INET;
    let next_header = if v4 { 9 } else { 6 };
    let hop_limit = if v4 { 8 } else { 7 };
    let network_len = if v4 { 20 } else { 40 };
    let sequences = [
        ("first byte of the payload, and more", vec![op(0x30, 32 + 77)]),
        ("header length", vec![op(0x30, 12), op(0x74, 1)]),
        ("flags", vec![op(0x30, 13)]),
        ("version", vec![op(0x30, SKF_NET)]),
        ("protocol", vec![op(0x30, SKF_NET + next_header)]),
        ("hop limit", vec![op(0x30, SKF_NET + hop_limit)]),
        ("payload from IP on", vec![op(0x30, SKF_NET + network_len + 32 + 33)]),
        ("beyond the end of IP", vec![op(0x30, SKF_NET + network_len + 32 + 200)]),
        ("ethertype", vec![op(0x30, SKF_LL + 12), op(0x74, 1)]),
        ("payload from Ethernet on", vec![op(0x30, SKF_LL + 14 + network_len + 32 + 55)]),
        ("beyond the end of the frame", vec![op(0x30, SKF_LL + 14 + network_len + 32 + 200)]),
        ("SKF_AD_PROTOCOL", vec![op(0x28, SKF_AD), op(0x74, 8)]),
        ("SKF_AD_PKTTYPE", vec![op(0x30, SKF_AD + 4), op(0x04, 1)]),
        ("SKF_AD_PAY_OFFSET", vec![op(0x20, SKF_AD + 52)]),
        ("SKF_AD_VLAN_TAG_PRESENT", vec![op(0x20, SKF_AD + 48), op(0x04, 1)]),
    ];
    for (name, program) in sequences {
        let value = value_of_segment(w, &program);
        w.log(name, value);
    }
}

pub fn connections_lose_segments(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.log("attach", attach(w.a, a, &drop_segments_of_x()));
    w.b.send(b, b"yes", 0).unwrap();
    w.log("received", w.a.recv(a, 3, MSG_WAITALL));
    w.log("send", w.b.send(b, b"x lost", 0));
    w.settle();
    w.log("lost", w.a.recv(a, 10, MSG_DONTWAIT));
    w.log("the other direction", w.a.send(a, b"x kept", 0));
    w.log("received", w.b.recv(b, 6, MSG_WAITALL));
    w.log("detach", detach(w.a, a));
    w.log("sent again", w.a.recv(a, 6, MSG_WAITALL));
    w.b.send(b, b"x once more", 0).unwrap();
    w.log("received", w.a.recv(a, 11, MSG_WAITALL));
    w.log("attach", attach(w.a, a, &drop_segments_of_x()));
    w.b.shutdown(b, libc::SHUT_WR).unwrap();
    w.log("FIN passes", w.a.recv(a, 10, 0));
    close(w, &[a], &[b]);
}

pub fn connections_truncate_segments(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    // Two bytes more than the header.
    let program = [op(0x30, 12), op(0x74, 2), op(0x54, 0x3c), op(0x04, 2), RET_A];
    w.log("attach", attach(w.a, a, &program));
    w.b.send(b, b"hello", 0).unwrap();
    w.settle();
    w.log("first", w.a.recv(a, 10, MSG_DONTWAIT));
    // The rest is sent again.
    w.log("rest", w.a.recv(a, 3, MSG_WAITALL));
    close(w, &[a], &[b]);
}

pub fn connections_inherit_filters(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let program = drop_segments_of_x();
    w.log("attach", attach(w.a, listener, &program));
    w.log("lock", lock(w.a, listener, 1));
    let connect = |w: &Fixture<'_>| {
        let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
        w.b.connect(b, &w.at_a(at)).unwrap();
        (w.a.accept4(listener, 0).unwrap(), b)
    };
    let (a, b) = connect(w);
    let equal = w.a.attached_filter(a, 100) == Ok((program.len(), encode(&program)));
    w.log("inherited", equal);
    w.log("lock", w.a.getsockopt(a, SOL_SOCKET, SO_LOCK_FILTER));
    w.log("locked", (attach(w.a, a, &[ret(1)]), detach(w.a, a), lock(w.a, a, 0)));
    w.b.send(b, b"y", 0).unwrap();
    w.log("received", w.a.recv(a, 1, 0));
    w.b.send(b, b"x", 0).unwrap();
    w.settle();
    w.log("lost", w.a.recv(a, 1, MSG_DONTWAIT));
    close(w, &[listener, a], &[b]);
    let (listener, at) = w.listener(0);
    w.log("attach", attach(w.a, listener, &program));
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.connect(b, &w.at_a(at)).unwrap();
    let a = w.a.accept4(listener, 0).unwrap();
    w.log("detach from the listener", detach(w.a, listener));
    w.b.send(b, b"x", 0).unwrap();
    w.settle();
    w.log("lost", w.a.recv(a, 1, MSG_DONTWAIT));
    w.log("detach", detach(w.a, a));
    w.log("received", w.a.recv(a, 1, MSG_WAITALL));
    close(w, &[listener, a], &[b]);
}

pub fn connecting_sockets_have_filters(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.log("attach", attach(w.b, b, &drop_segments_of_x()));
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    let a = w.a.accept4(listener, 0).unwrap();
    w.a.send(a, b"y", 0).unwrap();
    w.log("received", w.b.recv(b, 1, 0));
    w.a.send(a, b"x", 0).unwrap();
    w.settle();
    w.log("lost", w.b.recv(b, 1, MSG_DONTWAIT));
    w.log("length", w.b.attached_filter(b, 0));
    w.log("detach", detach(w.b, b));
    w.log("received", w.b.recv(b, 1, 0));
    close(w, &[a], &[b]);
    // A SYN+ACK is dropped.
    let b = w.b.socket(w.domain(), SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    w.log("attach", attach(w.b, b, &[ret(0)]));
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    w.settle();
    w.log("waits", w.ready(w.b, b));
    w.log("detach", detach(w.b, b));
    w.wait(w.b, b, libc::POLLOUT);
    w.log("error", w.b.getsockopt(b, SOL_SOCKET, libc::SO_ERROR));
    close(w, &[listener], &[b]);
}

/// Calls `case` with sockets of all kinds and their names.
fn with_sockets(w: &mut Fixture<'_>, mut case: impl FnMut(&mut Fixture<'_>, &str, Fd)) {
    let (listener, _) = w.listener(0);
    let (a, b) = w.connection();
    let (udp, sender, _) = pair(w);
    let unbound = |kind| w.a.socket(w.domain(), kind).unwrap();
    let all = [
        ("unconnected", unbound(SOCK_STREAM)),
        ("unbound", unbound(SOCK_DGRAM)),
        ("listener", listener),
        ("connection", a),
        ("datagrams", udp),
    ];
    for (name, fd) in all {
        case(w, name, fd);
    }
    close(w, &all.map(|(_, fd)| fd), &[b, sender]);
}

pub fn filters_are_replaced_and_read(w: &mut Fixture<'_>) {
    let programs = [vec![ret(u32::MAX)], drop_segments_of_x(), vec![op(0x00, 7), RET_A]];
    with_sockets(w, |w, name, fd| {
        w.log(name, (w.a.attached_filter(fd, 0), w.a.attached_filter(fd, 10)));
        w.log("nothing to detach", detach(w.a, fd));
        for program in &programs {
            w.log("attach", attach(w.a, fd, program));
            for space in [0, 1, 2, 3, 9, 10, 11, 4096] {
                w.log("get", (space, w.a.attached_filter(fd, space)));
            }
        }
        w.log("detach", detach(w.a, fd));
        w.log("get", w.a.attached_filter(fd, 10));
        w.log("detach again", detach(w.a, fd));
    });
}

pub fn locked_filters_stay(w: &mut Fixture<'_>) {
    let is_locked = |w: &Fixture<'_>, fd| w.a.getsockopt(fd, SOL_SOCKET, SO_LOCK_FILTER);
    with_sockets(w, |w, name, fd| {
        w.log(name, is_locked(w, fd));
        w.log("unlock", lock(w.a, fd, 0));
        w.log("attach", attach(w.a, fd, &[ret(77)]));
        w.log("lock", (lock(w.a, fd, 2), is_locked(w, fd)));
        w.log("lock again", lock(w.a, fd, 1));
        w.log("unlock", lock(w.a, fd, 0));
        w.log("attach", attach(w.a, fd, &[ret(78)]));
        w.log("a bad program", (attach(w.a, fd, &[]), attach(w.a, fd, &[op(0x20, 0)])));
        w.log("detach", detach(w.a, fd));
        w.log("get", w.a.attached_filter(fd, 1));
    });
    let fd = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.log("lock without a filter", lock(w.a, fd, 1));
    w.log("attach", attach(w.a, fd, &[ret(1)]));
    w.log("detach", detach(w.a, fd));
    close(w, &[fd], &[]);
}

pub fn invalid_programs_are_refused(w: &mut Fixture<'_>) {
    let branch = |jt, jf| (0x15, jt, jf, 0);
    let nops = |count| vec![LEN; count];
    let long = |count: usize| [nops(count - 1), vec![ret(0)]].concat();
    let programs = [
        ("no return", vec![LEN]),
        ("returns X", vec![op(0x0e, 0)]),
        ("unknown code", vec![op(0x18, 0), RET_A]),
        ("unknown code", vec![op(0xb4, 0), RET_A]),
        ("unknown code", vec![op(0x8016, 0)]),
        ("unknown code", vec![op(0x55, 0), RET_A]),
        ("jump beyond the end", vec![op(0x05, 1), RET_A]),
        ("jump to the end", vec![op(0x05, 0), RET_A]),
        ("jump backwards", vec![LEN, op(0x05, u32::MAX - 1), RET_A]),
        ("branch beyond the end", vec![LEN, branch(0, 1), RET_A]),
        ("branch beyond the end", vec![branch(255, 0), RET_A]),
        ("word 16", vec![op(0x02, 16), RET_A]),
        ("word 16", vec![op(0x60, 16), RET_A]),
        ("unwritten word", vec![op(0x60, 15), RET_A]),
        ("unwritten word", vec![op(0x61, 15), RET_A]),
        ("word written on one way", vec![branch(0, 1), op(0x02, 0), op(0x60, 0), RET_A]),
        (
            "word written on both ways",
            vec![branch(0, 2), op(0x02, 0), op(0x05, 1), op(0x02, 0), op(0x60, 0), RET_A],
        ),
        ("division by 0", vec![op(0x34, 0), RET_A]),
        ("remainder by 0", vec![op(0x94, 0), RET_A]),
        ("shift by 31", vec![op(0x64, 31), RET_A]),
        ("shift by 32", vec![op(0x64, 32), RET_A]),
        ("shift by 32", vec![op(0x74, 32), RET_A]),
        ("4096 instructions", long(4096)),
        ("4097 instructions", long(4097)),
        ("no instruction", vec![]),
    ];
    with_sockets(w, |w, name, fd| {
        w.log(name, attach(w.a, fd, &[ret(5)]));
        for (name, program) in &programs {
            w.log(name, attach(w.a, fd, program));
            let is_kept = w.a.attached_filter(fd, 1) == Ok((1, encode(&[ret(5)])));
            w.log("the filter is kept", is_kept);
            attach(w.a, fd, &[ret(5)]).unwrap();
        }
        for offset in 0..70 {
            w.log("property", (offset, attach(w.a, fd, &[op(0x20, SKF_AD + offset), RET_A])));
        }
        let code = encode(&[ret(5)]);
        let value = |len: u16, address: usize| {
            let mut value = vec![0; 16];
            value[..2].copy_from_slice(&len.to_ne_bytes());
            value[8..].copy_from_slice(&address.to_ne_bytes());
            value
        };
        let own = code.as_ptr().expose_provenance();
        for (len, address) in
            [(1, 0), (1, 8), (1, usize::MAX - 7), (0, 8), (4097, 8), (u16::MAX, own), (1, own)]
        {
            let set = w.a.setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &value(len, address));
            w.log("address", (len, address.min(9), set));
        }
        for len in [0, 1, 3, 4, 8, 15, 17, 32] {
            let mut value = value(1, own);
            value.resize(len, 0);
            let set = w.a.setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &value);
            w.log("length", (len, set));
        }
        for len in [0, 3, 5] {
            w.log("detach", (len, w.a.setsockopt(fd, SOL_SOCKET, SO_DETACH_FILTER, &vec![0; len])));
        }
    });
}

/// A socket that is not connected any more keeps its filter.
pub fn filters_outlive_connections(w: &mut Fixture<'_>) {
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.log("attach", attach(w.b, b, &drop_segments_of_x()));
    w.log("refused", w.b.connect(b, &w.at_a(9)));
    w.log("length", w.b.attached_filter(b, 0));
    let (listener, at) = w.listener(0);
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    let a = w.a.accept4(listener, 0).unwrap();
    w.a.send(a, b"x", 0).unwrap();
    w.settle();
    w.log("lost", w.b.recv(b, 1, MSG_DONTWAIT));
    w.a.close(a).unwrap();
    w.log("attach", attach(w.b, b, &[ret(1)]));
    w.log("length", w.b.attached_filter(b, 0));
    close(w, &[listener], &[b]);
    // A UDP socket that is disconnected.
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    w.log("attach", attach(w.b, b, &[ret(8)]));
    w.b.connect(b, &to).unwrap();
    let mut unspecified = vec![0; 16];
    unspecified[..2].copy_from_slice(&(libc::AF_UNSPEC as u16).to_ne_bytes());
    w.log("disconnect", w.b.connect(b, &unspecified));
    w.log("length", w.b.attached_filter(b, 0));
    w.b.connect(b, &to).unwrap();
    let own = w.b.getsockname(b).unwrap();
    w.a.send_to(a, b"truncated", Some(&own), &[], 0).unwrap();
    w.settle();
    w.log("received", w.b.recv(b, 10, MSG_DONTWAIT));
    close(w, &[a], &[b]);
}

pub mod tests {
    crate::cases! {
        ; over_loopback {
            programs_see_the_interface
        }
        ; both {
            datagrams_are_dropped
            datagrams_are_truncated
            programs_see_headers_of_datagrams
            programs_see_headers_of_segments
            programs_find_attributes
            listeners_drop_syns
            half_open_connections_have_the_present_filter
            connections_lose_segments
            connections_truncate_segments
            connections_inherit_filters
            connecting_sockets_have_filters
            filters_are_replaced_and_read
            locked_filters_stay
            invalid_programs_are_refused
            filters_outlive_connections
        }
    }
}
