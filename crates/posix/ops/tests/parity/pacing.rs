//! `SO_MAX_PACING_RATE`, BBR by `TCP_CONGESTION`, and what `TCP_INFO` and `TCP_CC_INFO` say about rates.

use crate::stack::Stacks;
use crate::sys::{Fd, Fixture, Sys, word};
use ginnel::CongestionControl;
use ginnel_posix_ops::OpsConfig;
use libc::{IPPROTO_TCP, SOCK_DGRAM, SOCK_STREAM, SOL_SOCKET};

const SO_MAX_PACING_RATE: i32 = 47;

/// Offsets in `struct tcp_info`.
const PACING_RATE: usize = 104;
const MAX_PACING_RATE: usize = 112;

fn wide(info: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(info[at..at + 8].try_into().unwrap())
}

pub fn max_pacing_rate(w: &mut Fixture<'_>) {
    for kind in [SOCK_STREAM, SOCK_DGRAM] {
        let fd = w.a.socket(w.domain(), kind).unwrap();
        let get = |w: &Fixture<'_>, space| w.a.getsockopt_into(fd, SOL_SOCKET, SO_MAX_PACING_RATE, space);
        let both = |w: &Fixture<'_>| [4, 7, 8, 16].map(|space| get(w, space));
        w.log("default", both(w));
        let values: [&[u8]; 8] = [
            &word(125_000),
            &word(0),
            &word(-1),
            &1_000_000u64.to_ne_bytes(),
            &(1u64 << 40).to_ne_bytes(),
            &0xffff_ffffu64.to_ne_bytes(),
            &[1, 2, 3],
            &[],
        ];
        for value in values {
            let set = w.a.setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, value);
            w.log("set", (value, set, both(w)));
        }
    }
}

pub fn pacing_rate_is_inherited_and_reported(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let rates = |w: &Fixture<'_>, fd: Fd| {
        let info = w.a.getsockopt(fd, IPPROTO_TCP, libc::TCP_INFO).unwrap();
        [PACING_RATE, MAX_PACING_RATE].map(|at| wide(&info, at))
    };
    w.log("listener", rates(w, listener));
    w.log("set", w.a.setsockopt(listener, SOL_SOCKET, SO_MAX_PACING_RATE, &word(50_000)));
    w.log("listener", rates(w, listener));
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.connect(b, &w.at_a(at)).unwrap();
    let a = w.a.accept4(listener, 0).unwrap();
    w.log("accepted", w.a.getsockopt(a, SOL_SOCKET, SO_MAX_PACING_RATE));
    w.log("send", w.a.send(a, &[1; 20_000], 0));
    w.log("received", w.b.recv(b, 20_000, libc::MSG_WAITALL).map(|bytes| bytes.len()));
    w.settle();
    w.log("rates of the connection", rates(w, a));
    w.log("raise", w.a.setsockopt(a, SOL_SOCKET, SO_MAX_PACING_RATE, &word(-1)));
    w.log("limit", rates(w, a)[1]);
    w.a.close(listener).unwrap();
}

pub fn bbr_by_name(w: &mut Fixture<'_>) {
    // The calls are made on any kernel; their results are compared if the kernel has BBR.
    let available = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control");
    let has_bbr = available.is_ok_and(|names| names.split_whitespace().any(|name| name == "bbr"));
    let log = |w: &mut Fixture<'_>, label: &str, result: String| {
        if has_bbr {
            w.log(label, result);
        }
    };
    let (listener, at) = w.listener(0);
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    let set = w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_CONGESTION, b"bbr");
    log(w, "set", format!("{set:?}"));
    let name = |w: &Fixture<'_>| w.b.getsockopt(b, IPPROTO_TCP, libc::TCP_CONGESTION);
    let value = name(w);
    log(w, "name", format!("{value:?}"));
    let cc_info = |w: &Fixture<'_>| w.b.getsockopt(b, IPPROTO_TCP, libc::TCP_CC_INFO);
    let value = cc_info(w);
    log(w, "no model yet", format!("{value:?}"));
    w.b.connect(b, &w.at_a(at)).unwrap();
    let a = w.a.accept4(listener, 0).unwrap();
    let value = name(w);
    log(w, "connected", format!("{value:?}"));
    // Bandwidth, round-trip time, gains.
    let model = |w: &Fixture<'_>| {
        let bytes = cc_info(w).unwrap_or_default();
        bytes.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect::<Vec<u32>>()
    };
    // Linux runs BBR on the SYN+ACK, before it is initialised, so that the gains differ until data are sent.
    let words = model(w);
    log(w, "words", format!("{} {:?}", words.len(), words.get(..2)));
    log(w, "sent", format!("{:?}", w.b.send(b, &[1; 30_000], 0)));
    log(w, "received", format!("{:?}", w.a.recv(a, 30_000, libc::MSG_WAITALL).map(|bytes| bytes.len())));
    w.settle();
    let words = model(w);
    let has_model = words.len() == 5 && words[0] > 0 && words[2] > 0 && words[2] < 1_000_000;
    log(w, "model", format!("{has_model}"));
    let info = w.b.getsockopt(b, IPPROTO_TCP, libc::TCP_INFO).unwrap();
    log(w, "rates", format!("{:?}", (wide(&info, PACING_RATE) > 0, wide(&info, 160) > 0)));
    for other in [&b"reno"[..], b"bbr", b"cubic"] {
        let set = w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_CONGESTION, other);
        let (name, info) = (name(w), cc_info(w).map(|bytes| bytes.len()));
        log(w, "changed", format!("{:?}", (set, name, info)));
    }
    log(w, "sent", format!("{:?}", w.b.send(b, b"last", 0)));
    log(w, "received", format!("{:?}", w.a.recv(a, 10, 0)));
    w.a.close(listener).unwrap();
}

#[test]
fn sockets_without_connection_have_the_configured_algorithm() {
    let stacks =
        Stacks::with(|| OpsConfig { congestion_control: CongestionControl::Bbr, ..OpsConfig::default() });
    let host = stacks.a();
    let value = |fd, name| host.getsockopt(fd, IPPROTO_TCP, name).unwrap();
    let (fresh, listening) = [0, 1].map(|_| host.socket(libc::AF_INET, SOCK_STREAM).unwrap()).into();
    host.listen(listening, 1).unwrap();
    for fd in [fresh, listening] {
        assert!(value(fd, libc::TCP_CONGESTION).starts_with(b"bbr\0"));
        assert_eq!(value(fd, libc::TCP_CC_INFO), [0; 20]);
    }
    host.setsockopt(fresh, IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").unwrap();
    assert!(value(fresh, libc::TCP_CONGESTION).starts_with(b"reno\0"));
    assert!(value(fresh, libc::TCP_CC_INFO).is_empty());
}

pub mod tests {
    crate::cases! {
        ; both {
            max_pacing_rate
            pacing_rate_is_inherited_and_reported
            bbr_by_name
        }
    }
}
