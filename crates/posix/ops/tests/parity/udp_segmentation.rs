//! Segmented, coalesced and corked datagrams: `UDP_SEGMENT`, `UDP_GRO`, `UDP_CORK` and `MSG_MORE`.

use crate::sys::{Fixture, control, port, word};
use crate::udp::pair;
use libc::{
    AF_INET, IPPROTO_UDP, MSG_DONTWAIT, MSG_MORE, MSG_PEEK, SOCK_DGRAM, UDP_CORK, UDP_GRO, UDP_SEGMENT,
};

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

pub fn udp_segment_splits(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    w.log("size", w.b.setsockopt(b, IPPROTO_UDP, UDP_SEGMENT, &word(100)));
    for len in [250, 100, 99, 0, 300, 1300, 12_800] {
        w.log("send", (len, w.b.send_to(b, &bytes(len), Some(&to), &[], 0)));
        let mut lengths = Vec::new();
        for _ in 0..len.div_ceil(100).max(1) {
            w.wait(w.a, a, libc::POLLIN);
            let piece = w.a.recv(a, 2000, 0).unwrap();
            lengths.push(piece.len());
            assert!(bytes(len)[lengths.len() * 100 - 100..].starts_with(&piece));
        }
        w.log("received", lengths);
    }
    w.log("no further result", w.a.recv(a, 10, MSG_DONTWAIT));
    w.log("too many", w.b.send_to(b, &bytes(12_801), Some(&to), &[], 0));
    w.log("too long", w.b.send_to(b, &bytes(66_000), Some(&to), &[], 0));
    let size = control(IPPROTO_UDP, UDP_SEGMENT, &60u16.to_ne_bytes());
    w.log("size of one call", w.b.send_to(b, &bytes(130), Some(&to), &size, 0));
    let lens: Vec<usize> = (0..3).map(|_| w.a.recv(a, 2000, 0).unwrap().len()).collect();
    w.log("received", lens);
    let none = control(IPPROTO_UDP, UDP_SEGMENT, &0u16.to_ne_bytes());
    w.log("one datagram", w.b.send_to(b, &bytes(130), Some(&to), &none, 0));
    w.log("received", w.a.recv(a, 2000, 0).unwrap().len());
    let wrong = control(IPPROTO_UDP, UDP_SEGMENT, &60u32.to_ne_bytes());
    w.log("control message too long", w.b.send_to(b, b"x", Some(&to), &wrong, 0));
    let unknown = control(IPPROTO_UDP, 99, &60u16.to_ne_bytes());
    w.log("unknown", w.b.send_to(b, b"x", Some(&to), &unknown, 0));
    w.log("connected", w.b.connect(b, &to));
    w.log("send", w.b.send(b, &bytes(150), 0));
    w.log("received", (w.a.recv(a, 2000, 0).unwrap().len(), w.a.recv(a, 2000, 0).unwrap().len()));
}

pub fn udp_gro_coalesces(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    w.log("one datagram", w.a.setsockopt(a, IPPROTO_UDP, UDP_GRO, &word(1)));
    w.log("value", w.a.getsockopt(a, IPPROTO_UDP, UDP_GRO));
    w.log("size", w.b.setsockopt(b, IPPROTO_UDP, UDP_SEGMENT, &word(500)));
    for len in [2000, 2001, 501, 500, 499, 6000] {
        w.log("send", w.b.send_to(b, &bytes(len), Some(&to), &[], 0));
        w.wait(w.a, a, libc::POLLIN);
        w.log("bytes", w.a.readable_bytes(a));
        w.log("peek", w.a.recv_from(a, 10, 100, MSG_PEEK).map(|got| (got.count, got.control)));
        let got = w.a.recv_from(a, 70_000, 100, 0).unwrap();
        let own = port(&w.b.getsockname(b).unwrap());
        w.log("coalesced", (got.count, got.bytes == bytes(len), got.flags, port(&got.from) == own));
        w.log("control message", got.control);
    }
    w.b.send_to(b, &bytes(1000), Some(&to), &[], 0).unwrap();
    let got = w.a.recv_from(a, 300, 100, libc::MSG_TRUNC).unwrap();
    w.log("truncated", (got.count, got.bytes.len(), got.flags, got.control));
    w.log("UDP_GRO off", w.a.setsockopt(a, IPPROTO_UDP, UDP_GRO, &word(0)));
    w.b.send_to(b, &bytes(1000), Some(&to), &[], 0).unwrap();
    let got = w.a.recv_from(a, 3000, 100, 0).unwrap();
    w.log("not coalesced", (got.count, got.control));
}

pub fn cork_and_msg_more(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    w.log("first", w.b.send_to(b, b"one ", Some(&to), &[], MSG_MORE));
    w.settle();
    w.log("no data yet", w.a.recv(a, 100, MSG_DONTWAIT));
    w.log("second", w.b.send_to(b, b"two ", Some(&w.at_a(9)), &[], MSG_MORE));
    w.log("third", w.b.send(b, b"three", 0));
    w.log("one datagram", w.a.recv(a, 100, 0));
    w.log("cork", w.b.setsockopt(b, IPPROTO_UDP, UDP_CORK, &word(1)));
    w.log("value", w.b.getsockopt(b, IPPROTO_UDP, UDP_CORK));
    w.log("first", w.b.send_to(b, b"corked ", Some(&to), &[], 0));
    w.log("second", w.b.send_to(b, b"and ", Some(&to), &[], MSG_MORE));
    w.log("empty", w.b.send_to(b, b"", Some(&to), &[], 0));
    w.log("third", w.b.send_to(b, b"sent", None, &[], 0));
    w.settle();
    w.log("no data yet", w.a.recv(a, 100, MSG_DONTWAIT));
    w.log("uncork", w.b.setsockopt(b, IPPROTO_UDP, UDP_CORK, &word(0)));
    w.log("one datagram", w.a.recv(a, 100, 0));
    w.log("uncorked datagram", w.b.send_to(b, b"x", Some(&to), &[], 0));
    w.log("received", w.a.recv(a, 100, 0));
    w.log("first part", w.b.send_to(b, &bytes(40_000), Some(&to), &[], MSG_MORE));
    w.log("too much", w.b.send(b, &bytes(40_000), MSG_MORE));
    w.log("after the failed datagram", w.b.send(b, b"x", 0));
    w.log("size", w.b.setsockopt(b, IPPROTO_UDP, UDP_SEGMENT, &word(3)));
    w.log("first", w.b.send_to(b, b"ab", Some(&to), &[], MSG_MORE));
    w.log("second", w.b.send_to(b, b"cde", Some(&to), &[], 0));
    w.log("split", (w.a.recv(a, 100, 0), w.a.recv(a, 100, 0)));
    w.log("no destination", w.b.send(b, b"x", MSG_MORE));
    w.log("no further result", w.a.recv(a, 100, MSG_DONTWAIT));
    let other = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.log("connected", w.b.connect(other, &to));
    w.log("first", w.b.send(other, b"1", MSG_MORE));
    w.log("second", w.b.send(other, b"2", 0));
    w.log("one datagram", w.a.recv(a, 100, 0));
}

pub fn udp_options_on_tcp_sockets(w: &mut Fixture<'_>) {
    let fd = w.a.socket(AF_INET, libc::SOCK_STREAM).unwrap();
    for name in [UDP_CORK, UDP_SEGMENT, UDP_GRO] {
        w.log("set", w.a.setsockopt(fd, IPPROTO_UDP, name, &word(1)));
        w.log("short", w.a.setsockopt(fd, IPPROTO_UDP, name, &[1]));
        w.log("get", w.a.getsockopt(fd, IPPROTO_UDP, name));
    }
}

pub mod tests {
    crate::cases! {
        udp_options_on_tcp_sockets
        ; both {
            udp_segment_splits
            udp_gro_coalesces
            cork_and_msg_more
        }
    }
}
