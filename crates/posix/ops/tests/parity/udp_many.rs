//! Several datagrams in one call: `sendmmsg` and `recvmmsg`.

use crate::sys::{World, port};
use crate::udp::pair;
use core::time::Duration;
use libc::{MSG_DONTWAIT, MSG_WAITFORONE, SO_ERROR, SOCK_DGRAM, SOL_SOCKET};

pub fn many_in_one_call(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    let texts = [&b"first"[..], b"", b"the third"];
    let messages = texts.map(|text| (text, Some(&to[..])));
    w.say("nothing", w.a.recv_many(a, 4, 10, MSG_DONTWAIT, None));
    w.say("send", w.b.send_many(b, &messages, 0));
    w.settle();
    w.say("all", w.a.recv_many(a, 3, 10, 0, None));
    w.b.send_many(b, &messages, 0).unwrap();
    w.settle();
    w.say("some", w.a.recv_many(a, 2, 10, 0, None));
    w.say("what there is", w.a.recv_many(a, 2, 10, MSG_WAITFORONE, None));
    w.b.send_many(b, &messages, 0).unwrap();
    w.settle();
    w.say("what there is", w.a.recv_many(a, 10, 3, MSG_DONTWAIT, None));
    w.b.send_many(b, &messages, 0).unwrap();
    w.settle();
    w.say("time is over with the first", w.a.recv_many(a, 10, 10, 0, Some(Duration::from_nanos(1))));
    w.say("the others", w.a.recv_many(a, 2, 10, 0, Some(Duration::from_secs(5))));
    w.say("none", w.a.recv_many(a, 0, 10, 0, None));
    w.say("none", w.b.send_many(b, &[], 0));
    let nowhere = [(&b"x"[..], Some(&to[..])), (b"y", None), (b"z", Some(&to))];
    w.say("until one does not go", w.b.send_many(b, &nowhere, 0));
    w.say("the first does not", w.b.send_many(b, &nowhere[1..], 0));
    w.say("arrives", w.a.recv_many(a, 2, 10, MSG_WAITFORONE, None));
}

pub fn errors_between_many(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    let own = w.at_b(0);
    w.say("bind", w.b.bind(b, &own));
    let back = w.at_b(port(&w.b.getsockname(b).unwrap()));
    w.say("connect", w.b.connect(b, &w.at_a(at)));
    w.a.send_to(a, b"one", Some(&back), &[], 0).unwrap();
    w.a.close(a).unwrap();
    w.wait(w.b, b, libc::POLLIN);
    w.settle();
    w.say("send", w.b.send(b, b"x", 0));
    w.wait(w.b, b, libc::POLLERR);
    w.settle();
    w.say("the pending error first", w.b.recv_many(b, 2, 10, 0, None));
    w.say("and then", w.b.recv_many(b, 2, 10, MSG_DONTWAIT, None));
    w.say("nothing is pending", w.b.getsockopt(b, SOL_SOCKET, SO_ERROR));
    let other = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.say("a time that is over", w.b.recv_many(other, 2, 10, MSG_DONTWAIT, Some(Duration::ZERO)));
}

pub mod tests {
    crate::cases! {
        ; both {
            many_in_one_call
            errors_between_many
        }
    }
}
