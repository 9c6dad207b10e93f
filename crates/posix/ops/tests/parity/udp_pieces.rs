//! Segmented, coalesced and corked datagrams: `UDP_SEGMENT`, `UDP_GRO`, `UDP_CORK` and `MSG_MORE`.

use crate::sys::{World, control, port, word};
use crate::udp::pair;
use libc::{
    AF_INET, IPPROTO_UDP, MSG_DONTWAIT, MSG_MORE, MSG_PEEK, SOCK_DGRAM, UDP_CORK, UDP_GRO, UDP_SEGMENT,
};

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8).collect()
}

pub fn one_piece_becomes_several_datagrams(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    w.say("size", w.b.setsockopt(b, IPPROTO_UDP, UDP_SEGMENT, &word(100)));
    for len in [250, 100, 99, 0, 300, 1300, 12_800] {
        w.say("send", (len, w.b.send_to(b, &bytes(len), Some(&to), &[], 0)));
        let mut whole = Vec::new();
        for _ in 0..len.div_ceil(100).max(1) {
            w.wait(w.a, a, libc::POLLIN);
            let piece = w.a.recv(a, 2000, 0).unwrap();
            whole.push(piece.len());
            assert!(bytes(len)[whole.len() * 100 - 100..].starts_with(&piece));
        }
        w.say("arrive", whole);
    }
    w.say("no more", w.a.recv(a, 10, MSG_DONTWAIT));
    w.say("too many", w.b.send_to(b, &bytes(12_801), Some(&to), &[], 0));
    w.say("too long", w.b.send_to(b, &bytes(66_000), Some(&to), &[], 0));
    let size = control(IPPROTO_UDP, UDP_SEGMENT, &60u16.to_ne_bytes());
    w.say("once", w.b.send_to(b, &bytes(130), Some(&to), &size, 0));
    let lens: Vec<usize> = (0..3).map(|_| w.a.recv(a, 2000, 0).unwrap().len()).collect();
    w.say("arrive", lens);
    let none = control(IPPROTO_UDP, UDP_SEGMENT, &0u16.to_ne_bytes());
    w.say("whole", w.b.send_to(b, &bytes(130), Some(&to), &none, 0));
    w.say("arrives", w.a.recv(a, 2000, 0).unwrap().len());
    let wrong = control(IPPROTO_UDP, UDP_SEGMENT, &60u32.to_ne_bytes());
    w.say("too long a message", w.b.send_to(b, b"x", Some(&to), &wrong, 0));
    let unknown = control(IPPROTO_UDP, 99, &60u16.to_ne_bytes());
    w.say("unknown", w.b.send_to(b, b"x", Some(&to), &unknown, 0));
    w.say("connected", w.b.connect(b, &to));
    w.say("send", w.b.send(b, &bytes(150), 0));
    w.say("arrive", (w.a.recv(a, 2000, 0).unwrap().len(), w.a.recv(a, 2000, 0).unwrap().len()));
}

pub fn datagrams_of_one_piece_arrive_as_one(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    w.say("together", w.a.setsockopt(a, IPPROTO_UDP, UDP_GRO, &word(1)));
    w.say("is", w.a.getsockopt(a, IPPROTO_UDP, UDP_GRO));
    w.say("size", w.b.setsockopt(b, IPPROTO_UDP, UDP_SEGMENT, &word(500)));
    for len in [2000, 2001, 501, 500, 499, 6000] {
        w.say("send", w.b.send_to(b, &bytes(len), Some(&to), &[], 0));
        w.wait(w.a, a, libc::POLLIN);
        w.say("bytes", w.a.readable_bytes(a));
        w.say("peek", w.a.recv_from(a, 10, 100, MSG_PEEK).map(|got| (got.count, got.control)));
        let got = w.a.recv_from(a, 70_000, 100, 0).unwrap();
        let own = port(&w.b.getsockname(b).unwrap());
        w.say("as one", (got.count, got.bytes == bytes(len), got.flags, port(&got.from) == own));
        w.say("how", got.control);
    }
    w.b.send_to(b, &bytes(1000), Some(&to), &[], 0).unwrap();
    let got = w.a.recv_from(a, 300, 100, libc::MSG_TRUNC).unwrap();
    w.say("cut off", (got.count, got.bytes.len(), got.flags, got.control));
    w.say("apart", w.a.setsockopt(a, IPPROTO_UDP, UDP_GRO, &word(0)));
    w.b.send_to(b, &bytes(1000), Some(&to), &[], 0).unwrap();
    let got = w.a.recv_from(a, 3000, 100, 0).unwrap();
    w.say("one by one", (got.count, got.control));
}

pub fn one_datagram_of_several_calls(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    w.say("first", w.b.send_to(b, b"one ", Some(&to), &[], MSG_MORE));
    w.settle();
    w.say("nothing yet", w.a.recv(a, 100, MSG_DONTWAIT));
    w.say("second", w.b.send_to(b, b"two ", Some(&w.at_a(9)), &[], MSG_MORE));
    w.say("third", w.b.send(b, b"three", 0));
    w.say("together", w.a.recv(a, 100, 0));
    w.say("cork", w.b.setsockopt(b, IPPROTO_UDP, UDP_CORK, &word(1)));
    w.say("is", w.b.getsockopt(b, IPPROTO_UDP, UDP_CORK));
    w.say("first", w.b.send_to(b, b"corked ", Some(&to), &[], 0));
    w.say("second", w.b.send_to(b, b"and ", Some(&to), &[], MSG_MORE));
    w.say("empty", w.b.send_to(b, b"", Some(&to), &[], 0));
    w.say("third", w.b.send_to(b, b"sent", None, &[], 0));
    w.settle();
    w.say("nothing yet", w.a.recv(a, 100, MSG_DONTWAIT));
    w.say("uncork", w.b.setsockopt(b, IPPROTO_UDP, UDP_CORK, &word(0)));
    w.say("together", w.a.recv(a, 100, 0));
    w.say("alone again", w.b.send_to(b, b"x", Some(&to), &[], 0));
    w.say("arrives", w.a.recv(a, 100, 0));
    w.say("much", w.b.send_to(b, &bytes(40_000), Some(&to), &[], MSG_MORE));
    w.say("too much", w.b.send(b, &bytes(40_000), MSG_MORE));
    w.say("nothing of it", w.b.send(b, b"x", 0));
    w.say("size", w.b.setsockopt(b, IPPROTO_UDP, UDP_SEGMENT, &word(3)));
    w.say("first", w.b.send_to(b, b"ab", Some(&to), &[], MSG_MORE));
    w.say("second", w.b.send_to(b, b"cde", Some(&to), &[], 0));
    w.say("cut", (w.a.recv(a, 100, 0), w.a.recv(a, 100, 0)));
    w.say("no destination", w.b.send(b, b"x", MSG_MORE));
    w.say("no more", w.a.recv(a, 100, MSG_DONTWAIT));
    let other = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.say("connected", w.b.connect(other, &to));
    w.say("first", w.b.send(other, b"1", MSG_MORE));
    w.say("second", w.b.send(other, b"2", 0));
    w.say("together", w.a.recv(a, 100, 0));
}

pub fn options_of_udp_are_none_of_tcp(w: &mut World<'_>) {
    let fd = w.a.socket(AF_INET, libc::SOCK_STREAM).unwrap();
    for name in [UDP_CORK, UDP_SEGMENT, UDP_GRO] {
        w.say("set", w.a.setsockopt(fd, IPPROTO_UDP, name, &word(1)));
        w.say("short", w.a.setsockopt(fd, IPPROTO_UDP, name, &[1]));
        w.say("get", w.a.getsockopt(fd, IPPROTO_UDP, name));
    }
}

pub mod tests {
    crate::cases! {
        options_of_udp_are_none_of_tcp
        ; both {
            one_piece_becomes_several_datagrams
            datagrams_of_one_piece_arrive_as_one
            one_datagram_of_several_calls
        }
    }
}
