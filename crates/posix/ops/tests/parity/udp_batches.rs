//! Several datagrams in one call: `sendmmsg` and `recvmmsg`.

use crate::sys::{Fixture, port};
use crate::udp::pair;
use core::time::Duration;
use libc::{MSG_DONTWAIT, MSG_WAITFORONE, SO_ERROR, SOCK_DGRAM, SOL_SOCKET};

pub fn sendmmsg_and_recvmmsg(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    let texts = [&b"first"[..], b"", b"the third"];
    let messages = texts.map(|text| (text, Some(&to[..])));
    w.log("empty", w.a.recv_many(a, 4, 10, MSG_DONTWAIT, None));
    w.log("send", w.b.send_many(b, &messages, 0));
    w.settle();
    w.log("all", w.a.recv_many(a, 3, 10, 0, None));
    w.b.send_many(b, &messages, 0).unwrap();
    w.settle();
    w.log("first messages", w.a.recv_many(a, 2, 10, 0, None));
    w.log("available messages", w.a.recv_many(a, 2, 10, MSG_WAITFORONE, None));
    w.b.send_many(b, &messages, 0).unwrap();
    w.settle();
    w.log("available messages", w.a.recv_many(a, 10, 3, MSG_DONTWAIT, None));
    w.b.send_many(b, &messages, 0).unwrap();
    w.settle();
    w.log("timeout after the first", w.a.recv_many(a, 10, 10, 0, Some(Duration::from_nanos(1))));
    w.log("other messages", w.a.recv_many(a, 2, 10, 0, Some(Duration::from_secs(5))));
    w.log("zero messages", w.a.recv_many(a, 0, 10, 0, None));
    w.log("zero messages", w.b.send_many(b, &[], 0));
    let nowhere = [(&b"x"[..], Some(&to[..])), (b"y", None), (b"z", Some(&to))];
    w.log("until the first failure", w.b.send_many(b, &nowhere, 0));
    w.log("first message fails", w.b.send_many(b, &nowhere[1..], 0));
    w.log("received", w.a.recv_many(a, 2, 10, MSG_WAITFORONE, None));
}

pub fn errors_within_a_batch(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let own = w.at_b(0);
    w.log("bind", w.b.bind(b, &own));
    let back = w.at_b(port(&w.b.getsockname(b).unwrap()));
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    w.a.send_to(a, b"one", Some(&back), &[], 0).unwrap();
    w.a.close(a).unwrap();
    w.wait(w.b, b, libc::POLLIN);
    w.settle();
    w.log("send", w.b.send(b, b"x", 0));
    w.wait(w.b, b, libc::POLLERR);
    w.settle();
    w.log("pending error first", w.b.recv_many(b, 2, 10, 0, None));
    w.log("after the pending error", w.b.recv_many(b, 2, 10, MSG_DONTWAIT, None));
    w.log("no pending error", w.b.getsockopt(b, SOL_SOCKET, SO_ERROR));
    let other = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.log("zero timeout", w.b.recv_many(other, 2, 10, MSG_DONTWAIT, Some(Duration::ZERO)));
}

pub mod tests {
    crate::cases! {
        ; both {
            sendmmsg_and_recvmmsg
            errors_within_a_batch
        }
    }
}
