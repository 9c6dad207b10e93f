//! Flow labels: `IPV6_FLOWLABEL_MGR`, `IPV6_FLOWINFO`, `IPV6_FLOWINFO_SEND` and `IPV6_AUTOFLOWLABEL`.
//!
//! Labels belong to a network namespace, and stay reserved for seconds after a socket has released them, so
//! each case begins in a namespace of its own.

use crate::sys::{Fd, Fixture, control, port, word};
use libc::{AF_INET6, IPPROTO_IPV6, SOCK_DGRAM, SOCK_STREAM};

const FLOWINFO: i32 = 11;
const FLOWLABEL_MGR: i32 = 32;
const FLOWINFO_SEND: i32 = 33;
const AUTOFLOWLABEL: i32 = 70;

const GET: u8 = 0;
const PUT: u8 = 1;
const RENEW: u8 = 2;
const CREATE: u16 = 1;
const EXCLUSIVE: u16 = 2;
const REFLECT: u16 = 4;
const REMOTE: u16 = 8;
/// Users of a label: one socket, a process, a user, all.
const SHARE_NONE: u8 = 1;
const SHARE_PROCESS: u8 = 2;
const SHARE_USER: u8 = 3;
const SHARE_ALL: u8 = 255;

/// Returns a `struct in6_flowlabel_req`.
fn request(action: u8, label: u32, share: u8, flags: u16) -> Vec<u8> {
    let mut bytes = vec![0xfd; 1];
    bytes.resize(15, 0);
    bytes.push(1);
    bytes.extend(label.to_be_bytes());
    bytes.extend([action, share]);
    bytes.extend(flags.to_ne_bytes());
    bytes.resize(32, 0);
    bytes
}

/// Returns a request with a lifetime and a time for which the label stays reserved afterwards, in seconds.
fn with_times(mut request: Vec<u8>, expires: u16, linger: u16) -> Vec<u8> {
    request[24..26].copy_from_slice(&expires.to_ne_bytes());
    request[26..28].copy_from_slice(&linger.to_ne_bytes());
    request
}

fn manage(w: &Fixture<'_>, fd: Fd, request: &[u8]) -> Result<(), rustix::io::Errno> {
    w.b.setsockopt(fd, IPPROTO_IPV6, FLOWLABEL_MGR, request)
}

/// Returns the label of the peer, without the time at which it expires.
fn label_of(w: &Fixture<'_>, fd: Fd, flags: u16) -> String {
    let asked = w.b.source_filter(fd, IPPROTO_IPV6, FLOWLABEL_MGR, &request(GET, 0, 0, flags));
    format!("{:?}", asked.map(|answer| [&answer[..24], &answer[26..]].concat()))
}

/// Returns an address with `sin6_flowinfo`.
fn with_flow(mut address: Vec<u8>, flow_info: u32) -> Vec<u8> {
    address[4..8].copy_from_slice(&flow_info.to_be_bytes());
    address
}

pub fn labels_are_reserved(w: &mut Fixture<'_>) {
    crate::enter_own_namespace();
    for kind in [SOCK_DGRAM, SOCK_STREAM] {
        let fd = w.b.socket(w.domain(), kind).unwrap();
        let other = w.b.socket(w.domain(), kind).unwrap();
        // The labels of the second kind of socket are others.
        let base = if kind == SOCK_DGRAM { 0 } else { 100 };
        let get = |label: u32, share, flags| request(GET, base + label, share, flags);
        let steps = [
            ("unknown", get(1, SHARE_ALL, 0)),
            ("not reserved", request(PUT, base + 1, 0, 0)),
            ("more than 20 bits", request(GET, 0x1f_ffff, SHARE_ALL, CREATE)),
            ("new", get(1, SHARE_ALL, CREATE)),
            ("again", get(1, SHARE_ALL, 0)),
            ("again as new", get(1, SHARE_ALL, CREATE)),
            ("exclusively", get(1, SHARE_ALL, CREATE | EXCLUSIVE)),
            ("renewed", with_times(request(RENEW, base + 1, 0, 0), 30, 20)),
            ("renewed for long", with_times(request(RENEW, base + 1, 0, 0), 600, 600)),
            ("unknown renewed", request(RENEW, base + 50, 0, 0)),
            ("released", request(PUT, base + 1, 0, 0)),
            ("released", request(PUT, base + 1, 0, 0)),
            ("released", request(PUT, base + 1, 0, 0)),
            ("released too often", request(PUT, base + 1, 0, 0)),
            ("for itself", get(2, SHARE_NONE, CREATE)),
            ("for itself, again", get(2, SHARE_NONE, CREATE)),
            ("for itself, shared", get(2, SHARE_ALL, CREATE)),
            ("released", request(PUT, base + 2, 0, 0)),
            ("still reserved", get(2, SHARE_ALL, CREATE)),
            ("for the user", get(3, SHARE_USER, CREATE)),
            ("for the user, again", get(3, SHARE_USER, 0)),
            ("for the user, shared", get(3, SHARE_ALL, 0)),
            ("for the process", get(4, SHARE_PROCESS, CREATE)),
            ("for the process, again", get(4, SHARE_PROCESS, 0)),
            ("for another group", get(5, 4, CREATE)),
            ("of another action", request(7, base + 5, 0, 0)),
            ("reflected", request(GET, 0, 0, REFLECT)),
            ("not reflected", request(PUT, 0, 0, REFLECT)),
            ("short", get(6, SHARE_ALL, CREATE)[..31].to_vec()),
            ("nothing", Vec::new()),
            ("long", [get(7, SHARE_ALL, CREATE), vec![0; 8]].concat()),
        ];
        for (label, request) in &steps {
            w.log(label, manage(w, fd, request));
        }
        w.log("of another socket", manage(w, other, &get(3, SHARE_USER, 0)));
        w.log("of another socket, for itself", manage(w, other, &get(2, SHARE_NONE, 0)));
        let mut any = get(8, SHARE_ALL, CREATE);
        any[..16].fill(0);
        w.log("for no destination", manage(w, fd, &any));
        any[10..12].fill(0xff);
        w.log("for IPv4", manage(w, fd, &any));
        w.log("no peer", (label_of(w, fd, 0), label_of(w, fd, REMOTE)));
        let ask = |w: &Fixture<'_>, bytes: &[u8]| w.b.source_filter(fd, IPPROTO_IPV6, FLOWLABEL_MGR, bytes);
        w.log("other action", ask(w, &request(PUT, 0, 0, 0)));
        w.log("short", ask(w, &request(GET, 0, 0, 0)[..31]));
        w.log("without a request", w.b.getsockopt(fd, IPPROTO_IPV6, FLOWLABEL_MGR));
    }
}

/// Sends a datagram, and returns what the receiver learns of its flow.
fn flow_of(w: &Fixture<'_>, [a, b]: [Fd; 2], to: Option<&[u8]>, control: &[u8]) -> String {
    match w.b.send_to(b, b"x", to, control, 0) {
        Ok(_) => {
            w.wait(w.a, a, libc::POLLIN);
            let control = w.a.recv_from(a, 10, 100, 0).unwrap().control;
            // The value of a label that the sender has not chosen is not compared.
            let flow_info = control.get(16..20).map(|bytes| u32::from_be_bytes(bytes.try_into().unwrap()));
            match flow_info {
                Some(flow_info) if flow_info & 0xf_ffff > 0xff => {
                    format!("{:?} {:#x} and a label", &control[..16], flow_info >> 20)
                }
                _ => format!("{control:?}"),
            }
        }
        Err(error) => format!("{error:?}"),
    }
}

pub fn datagrams_carry_labels(w: &mut Fixture<'_>) {
    crate::enter_own_namespace();
    let (a, b) = (w.a.socket(w.domain(), SOCK_DGRAM).unwrap(), w.b.socket(w.domain(), SOCK_DGRAM).unwrap());
    w.a.bind(a, &w.at_a(0)).unwrap();
    let to = w.at_a(port(&w.a.getsockname(a).unwrap()));
    w.log("receiver", w.a.setsockopt(a, IPPROTO_IPV6, FLOWINFO, &word(1)));
    let flow = |value: &[u8]| control(IPPROTO_IPV6, FLOWINFO, value);
    let cmsg = |flow_info: u32| flow(&flow_info.to_be_bytes());
    w.log("without a label", flow_of(w, [a, b], Some(&to), &[]));
    w.log("label that nobody has reserved", flow_of(w, [a, b], Some(&to), &cmsg(9)));
    w.log("reserve", manage(w, b, &with_times(request(GET, 5, SHARE_ALL, CREATE), 300, 20)));
    w.log("reserve for itself", manage(w, b, &request(GET, 7, SHARE_NONE, CREATE)));
    for (label, cmsgs) in [
        ("reserved", cmsg(5)),
        ("reserved for itself", cmsg(7)),
        ("not reserved", cmsg(9)),
        ("with a class", cmsg(0x0ab0_0005)),
        ("with a version", cmsg(0x6000_0005)),
        ("none", cmsg(0)),
        ("twice", [cmsg(5), cmsg(7)].concat()),
        ("short", flow(&[0, 0, 5])),
        ("long", flow(&[0, 0, 0, 5, 0, 0, 0, 9])),
    ] {
        w.log(label, flow_of(w, [a, b], Some(&to), &cmsgs));
    }
    if w.domain() == AF_INET6 {
        w.log("named, ignored", flow_of(w, [a, b], Some(&with_flow(to.clone(), 9)), &[]));
        w.log("FLOWINFO_SEND", w.b.setsockopt(b, IPPROTO_IPV6, FLOWINFO_SEND, &word(1)));
        for flow_info in [5, 9, 0, 0xfff0_0005, 0x0010_0000] {
            let named = with_flow(to.clone(), flow_info);
            w.log("named", (flow_info, flow_of(w, [a, b], Some(&named), &[])));
            w.log("named and 7", (flow_info, flow_of(w, [a, b], Some(&named), &cmsg(7))));
            w.log("named and version", (flow_info, flow_of(w, [a, b], Some(&named), &cmsg(0x6000_0007))));
        }
    }
    w.log("class", w.b.setsockopt(b, IPPROTO_IPV6, libc::IPV6_TCLASS, &word(0x28)));
    w.log("class and label", flow_of(w, [a, b], Some(&to), &cmsg(5)));
    w.log("no automatic label", w.b.setsockopt(b, IPPROTO_IPV6, AUTOFLOWLABEL, &word(0)));
    w.log("class alone", flow_of(w, [a, b], Some(&to), &[]));
    w.log("label", flow_of(w, [a, b], Some(&to), &cmsg(5)));
    w.log("no class", w.b.setsockopt(b, IPPROTO_IPV6, libc::IPV6_TCLASS, &word(0)));
    w.log("nothing", flow_of(w, [a, b], Some(&to), &[]));
    w.log("automatic label", w.b.setsockopt(b, IPPROTO_IPV6, AUTOFLOWLABEL, &word(1)));
    w.log("label of the stack", flow_of(w, [a, b], Some(&to), &[]));
}

pub fn peers_have_labels(w: &mut Fixture<'_>) {
    crate::enter_own_namespace();
    let (a, b) = (w.a.socket(w.domain(), SOCK_DGRAM).unwrap(), w.b.socket(w.domain(), SOCK_DGRAM).unwrap());
    w.a.bind(a, &w.at_a(0)).unwrap();
    let to = w.at_a(port(&w.a.getsockname(a).unwrap()));
    w.log("receiver", w.a.setsockopt(a, IPPROTO_IPV6, FLOWINFO, &word(1)));
    w.log("reserve", manage(w, b, &with_times(request(GET, 5, SHARE_ALL, CREATE), 300, 20)));
    w.log("reserve for itself", manage(w, b, &request(GET, 7, SHARE_NONE, CREATE)));
    let (listener, at) = w.listener(0);
    if w.domain() == AF_INET6 {
        let cmsg = |flow_info: u32| control(IPPROTO_IPV6, FLOWINFO, &flow_info.to_be_bytes());
        w.log("connect, ignored", w.b.connect(b, &with_flow(to.clone(), 9)));
        w.log("peer", w.b.getpeername(b).map(|name| name[4..8].to_vec()));
        w.log("FLOWINFO_SEND", w.b.setsockopt(b, IPPROTO_IPV6, FLOWINFO_SEND, &word(1)));
        for flow_info in [5, 9, 7, 0x0f30_0005, 0] {
            w.log("connect", (flow_info, w.b.connect(b, &with_flow(to.clone(), flow_info))));
            w.log("peer", w.b.getpeername(b).map(|name| name[4..8].to_vec()));
            w.log("label", label_of(w, b, 0));
            w.log("send", flow_of(w, [a, b], None, &[]));
            w.log("send with 7", flow_of(w, [a, b], None, &cmsg(7)));
            w.log("send with none", flow_of(w, [a, b], None, &cmsg(0)));
            w.log("send to", flow_of(w, [a, b], Some(&to), &[]));
            w.log("send to with 5", flow_of(w, [a, b], Some(&with_flow(to.clone(), 5)), &[]));
        }
        w.b.connect(b, &with_flow(to.clone(), 5)).unwrap();
        w.log("release", manage(w, b, &request(PUT, 5, 0, 0)));
        w.log("send", flow_of(w, [a, b], None, &[]));
        w.log(
            "send with a message",
            flow_of(w, [a, b], None, &control(IPPROTO_IPV6, libc::IPV6_TCLASS, &word(0))),
        );
        w.log("label", label_of(w, b, 0));
        let stream = w.b.socket(AF_INET6, SOCK_STREAM).unwrap();
        w.log("FLOWINFO_SEND", w.b.setsockopt(stream, IPPROTO_IPV6, FLOWINFO_SEND, &word(1)));
        w.log("not reserved", w.b.connect(stream, &with_flow(w.at_a(at), 9)));
        w.log("reserve", manage(w, stream, &with_times(request(GET, 15, SHARE_ALL, CREATE), 300, 20)));
        w.log("connect", w.b.connect(stream, &with_flow(w.at_a(at), 0x0ff0_000f)));
        w.log("peer", w.b.getpeername(stream).map(|name| name[4..8].to_vec()));
        w.log("label", label_of(w, stream, 0));
        let accepted = w.a.accept4(listener, 0).unwrap();
        w.log("send", w.b.send(stream, b"data", 0));
        w.log("received", w.a.recv(accepted, 10, 0));
        w.log("accepted", w.a.getpeername(accepted).map(|name| name[4..8].to_vec()));
        w.log("without FLOWINFO_SEND", w.b.setsockopt(stream, IPPROTO_IPV6, FLOWINFO_SEND, &word(0)));
        w.log("peer", w.b.getpeername(stream).map(|name| name[4..8].to_vec()));
    }
    w.a.close(listener).unwrap();
}

pub mod tests {
    crate::cases! {
        ; over_loopback {
            labels_are_reserved
            datagrams_carry_labels
            peers_have_labels
        }
    }
}
