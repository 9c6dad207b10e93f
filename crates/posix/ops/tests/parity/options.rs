//! Tests every option number at each level: its default, the values that it accepts, and the value after
//! setting.

use crate::kernel::Kernel;
use crate::stack::Stacks;
use crate::sys::{Fixture, Sys, port};
use core::ffi::c_int;
use core::time::Duration;
use ginnel_posix_ops::table::{self, OptionKind, OptionRow};
use libc::{
    AF_INET, AF_INET6, IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, IPPROTO_UDP, MSG_PEEK, SOCK_DGRAM, SOCK_STREAM,
    SOL_SOCKET,
};

const LEVELS: [c_int; 5] = [SOL_SOCKET, IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, IPPROTO_UDP];

/// Range of the numbers to test. Higher numbers belong to netfilter modules.
fn names(level: c_int) -> core::ops::RangeInclusive<c_int> {
    0..=match level {
        SOL_SOCKET => 90,
        IPPROTO_UDP => 110,
        _ => 80,
    }
}

/// Returns the transcript of an option of a new socket, with one line for each step.
fn transcript(sys: &dyn Sys, domain: c_int, level: c_int, name: c_int) -> Vec<String> {
    let kind = if level == IPPROTO_UDP { SOCK_DGRAM } else { SOCK_STREAM };
    let fd = sys.socket(domain, kind).unwrap();
    let get = || match sys.getsockopt(fd, level, name) {
        Ok(value) if value.len() == 4 => i32::from_ne_bytes(value.try_into().unwrap()).to_string(),
        Ok(value) => format!("{value:?}"),
        Err(error) => format!("error {}", error.raw_os_error()),
    };
    let set = |value: &[u8]| {
        let result = match sys.setsockopt(fd, level, name, value) {
            Ok(()) => "set".into(),
            Err(error) => format!("error {}", error.raw_os_error()),
        };
        format!("{value:?}: {result}, is {}", get())
    };
    let mut lines = vec![format!("is {}", get())];
    let values = [1i32, 0, 2, -1, 3, 100, 300, 40_000, 70_000, i32::MIN, i32::MAX];
    lines.extend(values.map(|value| set(&value.to_ne_bytes())));
    for value in [&[][..], &[1], &[1, 0, 0], &[1; 8], &[0; 16]] {
        lines.push(set(value));
    }
    sys.close(fd).unwrap();
    lines
}

/// Returns whether the table states a difference: `ENOPROTOOPT`, or special behaviour that other cases test.
fn may_differ(row: &OptionRow) -> bool {
    matches!(row.kind, OptionKind::Refused | OptionKind::Dedicated | OptionKind::Fixed { .. })
        && !row.note.is_empty()
}

#[test]
fn options_match_linux_or_the_table() {
    let stacks = Stacks::start();
    let mut differences = Vec::new();
    for (domain, family) in [(AF_INET, "IPv4"), (AF_INET6, "IPv6")] {
        for level in LEVELS {
            for name in names(level) {
                let row = table::OPTIONS.iter().find(|row| row.level == level && row.name == name);
                let row = row.filter(|_| domain == AF_INET6 || level != IPPROTO_IPV6);
                let on_stack = transcript(stacks.a(), domain, level, name);
                if let Some(OptionRow { kind: OptionKind::Refused, linux_name: text, note, .. }) = row {
                    assert!(!note.is_empty(), "{text} is refused without a note");
                    let refused = |line: &String| line.contains("error 92");
                    assert!(on_stack.iter().all(refused), "{text}: {on_stack:#?}");
                }
                if row.is_some_and(may_differ) {
                    continue;
                }
                let on_kernel = transcript(&Kernel, domain, level, name);
                for (kernel, stack) in on_kernel.iter().zip(&on_stack) {
                    if kernel != stack {
                        let text = row.map_or("no option", |row| row.linux_name);
                        differences.push(format!("{family} {level} {name} {text}: {kernel} — {stack}"));
                    }
                }
            }
        }
    }
    assert!(differences.is_empty(), "kernel — stack:\n{}", differences.join("\n"));
}

/// Options of connections, compared with those of their listener.
pub fn connections_inherit_options(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let word = |value: i32| value.to_ne_bytes();
    let options = [
        (SOL_SOCKET, libc::SO_PRIORITY, 3),
        (SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (IPPROTO_IP, libc::IP_TOS, 0x2a),
        (IPPROTO_IP, libc::IP_TTL, 33),
        (IPPROTO_TCP, libc::TCP_NODELAY, 1),
        (IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, 1 << 14),
        (IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, 0),
        (IPPROTO_TCP, libc::TCP_FASTOPEN, 16),
        (IPPROTO_TCP, libc::TCP_KEEPIDLE, 77),
        (IPPROTO_TCP, libc::TCP_SYNCNT, 3),
    ];
    for (level, name, value) in options {
        w.log("listener", (level, name, w.a.setsockopt(listener, level, name, &word(value))));
    }
    w.a.setsockopt(listener, IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").unwrap();
    let b = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
    w.log("IP_MTU before connect", w.b.getsockopt(b, IPPROTO_IP, libc::IP_MTU));
    w.log("unknown", w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_CONGESTION, b"nonesuch"));
    w.log("cubic", w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_CONGESTION, b"cubic\0"));
    w.b.connect(b, &w.at_a(at)).unwrap();
    let a = w.a.accept4(listener, 0).unwrap();
    for (level, name, _) in options {
        if name == libc::TCP_FASTOPEN || name == libc::TCP_DEFER_ACCEPT {
            continue;
        }
        w.log("accepted", (level, name, w.a.getsockopt(a, level, name)));
    }
    w.log("accepted", w.a.getsockopt(a, IPPROTO_TCP, libc::TCP_CONGESTION));
    w.log("connected", w.b.getsockopt(b, IPPROTO_TCP, libc::TCP_CONGESTION));
    w.log("connected", w.b.getsockopt(b, IPPROTO_IP, libc::IP_MTU).is_ok());
    let own = w.b.getsockname(b).unwrap();
    let cookies = [
        w.a.getsockopt(a, SOL_SOCKET, libc::SO_COOKIE),
        w.a.getsockopt(listener, SOL_SOCKET, libc::SO_COOKIE),
    ];
    w.log("cookies", cookies[0] != cookies[1]);
    w.log("cookie is stable", w.a.getsockopt(a, SOL_SOCKET, libc::SO_COOKIE) == cookies[0]);
    w.log("port", port(&w.a.getpeername(a).unwrap()) == port(&own));
    for (level, name, value) in options {
        w.log("on the connection", (level, name, w.a.setsockopt(a, level, name, &word(value))));
    }
    w.log("send", w.a.send(a, b"after all that", 0));
    w.log("received", w.b.recv(b, 14, libc::MSG_WAITALL));
}

pub fn peek_offset(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let offset = |w: &Fixture<'_>| w.a.getsockopt(a, SOL_SOCKET, libc::SO_PEEK_OFF);
    w.log("at first", offset(w));
    w.log("peek from 2 on", w.a.setsockopt(a, SOL_SOCKET, libc::SO_PEEK_OFF, &2i32.to_ne_bytes()));
    w.b.send(b, b"0123456789", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.settle();
    w.log("peek", w.a.recv(a, 3, MSG_PEEK));
    w.log("moved", offset(w));
    w.log("peek again", w.a.recv(a, 3, MSG_PEEK));
    w.log("recv", w.a.recv(a, 4, 0));
    w.log("moved back", offset(w));
    w.log("peek", w.a.recv(a, 100, MSG_PEEK));
    w.log("after all bytes", w.a.recv(a, 100, MSG_PEEK | libc::MSG_DONTWAIT));
    w.log("off", w.a.setsockopt(a, SOL_SOCKET, libc::SO_PEEK_OFF, &(-1i32).to_ne_bytes()));
    w.log("peek without offset", w.a.recv(a, 100, MSG_PEEK));
}

/// `SO_PRIORITY`, and the effect of `IP_TOS` on it.
pub fn so_priority(w: &mut Fixture<'_>) {
    let word = |value: i32| value.to_ne_bytes();
    let (listener, at) = w.listener(0);
    let sockets = [
        ("stream", w.a.socket(AF_INET, SOCK_STREAM).unwrap()),
        ("datagrams", w.a.socket(AF_INET, SOCK_DGRAM).unwrap()),
        ("listener", listener),
    ];
    for (name, fd) in sockets {
        let priority = |w: &mut Fixture<'_>, value| {
            let set = w.a.setsockopt(fd, SOL_SOCKET, libc::SO_PRIORITY, &word(value));
            w.log(name, (value, set, w.a.getsockopt(fd, SOL_SOCKET, libc::SO_PRIORITY)));
        };
        let tos = |w: &mut Fixture<'_>, value| {
            let set = w.a.setsockopt(fd, IPPROTO_IP, libc::IP_TOS, &word(value));
            let is = [(SOL_SOCKET, libc::SO_PRIORITY), (IPPROTO_IP, libc::IP_TOS)];
            w.log(name, (value, set, is.map(|(level, option)| w.a.getsockopt(fd, level, option))));
        };
        for value in [1, 2, 3, 4, 5, 6, 0, 7, 8, 1000, i32::MAX, -1] {
            priority(w, value);
        }
        for value in [0x10, 0x08, 0x18, 0x1c, 0x02, 0x01, 0xb8, 0xff, 0] {
            tos(w, value);
        }
        tos(w, 0x10);
        priority(w, 3);
        // Setting an equal value changes nothing.
        tos(w, 0x10);
        tos(w, 0x08);
        let without = crate::kernel::without_network_capabilities(|| {
            [6, 7, -1].map(|value| w.a.setsockopt(fd, SOL_SOCKET, libc::SO_PRIORITY, &word(value)))
        });
        w.log(name, ("without capabilities", without));
        w.log(name, w.a.getsockopt(fd, SOL_SOCKET, libc::SO_PRIORITY));
    }
    let b = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
    w.b.connect(b, &w.at_a(at)).unwrap();
    let a = w.a.accept4(listener, 0).unwrap();
    for (level, name) in [(SOL_SOCKET, libc::SO_PRIORITY), (IPPROTO_IP, libc::IP_TOS)] {
        w.log("accepted", w.a.getsockopt(a, level, name));
    }
    w.log("on a connection", w.a.setsockopt(a, SOL_SOCKET, libc::SO_PRIORITY, &word(5)));
    w.log("send", w.a.send(a, b"urgent", 0));
    w.log("received", w.b.recv(b, 6, libc::MSG_WAITALL));
}

/// Checks values that `getsockopt` returns: times of `SO_LINGER` and `SO_RCVTIMEO`, short buffers, lengths,
/// sizes of buffers.
pub fn values_read_back(w: &mut Fixture<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    // The longest times are a number of ticks, and depend on their length.
    let has_ticks_of_stack = crate::kernel::tick() == Duration::from_millis(4);
    let lingering = [(0, 55), (1, 7), (0, 9), (1, -1), (1, 0)];
    for (on, seconds) in lingering.into_iter().filter(|(_, seconds)| has_ticks_of_stack || *seconds >= 0) {
        let value = [on, seconds].map(i32::to_ne_bytes).concat();
        w.log("linger", w.a.setsockopt(fd, SOL_SOCKET, libc::SO_LINGER, &value));
        w.log("reads back", w.a.getsockopt(fd, SOL_SOCKET, libc::SO_LINGER));
    }
    let infinite = i64::MAX / 250 - 1;
    let times = [7, i64::MAX / 1000 + 1, infinite - 1, infinite];
    for seconds in times.into_iter().filter(|seconds| has_ticks_of_stack || *seconds == 7) {
        let value = [seconds, 0].map(i64::to_ne_bytes).concat();
        w.log("time-out", w.a.setsockopt(fd, SOL_SOCKET, libc::SO_RCVTIMEO, &value));
        w.log("reads back", w.a.getsockopt(fd, SOL_SOCKET, libc::SO_RCVTIMEO));
    }
    w.a.setsockopt(fd, IPPROTO_IP, libc::IP_TOS, &[8]).unwrap();
    for name in [libc::IP_TOS, libc::IP_TTL, libc::IP_FREEBIND, libc::IP_MULTICAST_TTL] {
        for space in 0..=5 {
            w.log("short", (name, space, w.a.getsockopt_into(fd, IPPROTO_IP, name, space)));
        }
    }
    w.a.close(fd).unwrap();
    let (a, b) = w.connection();
    w.b.send(b, b"hello", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.settle();
    let info = |sys: &dyn Sys, fd| {
        let info = sys.getsockopt_into(fd, IPPROTO_TCP, libc::TCP_INFO, 512).unwrap();
        // tcpi_bytes_received
        (info.len(), info[128..136].to_vec())
    };
    w.log("info", (info(w.a, a), info(w.b, b)));
    let sndbuf = |sys: &dyn Sys, fd| {
        let value = sys.getsockopt(fd, SOL_SOCKET, libc::SO_SNDBUF).unwrap();
        i32::from_ne_bytes(value.try_into().unwrap())
    };
    w.log("send buffer has grown", sndbuf(w.a, a) > 16_384);
    w.b.setsockopt(b, SOL_SOCKET, libc::SO_SNDBUF, &3000i32.to_ne_bytes()).unwrap();
    w.log("fixed send buffer", sndbuf(w.b, b));
}

pub mod tests {
    crate::cases! {
        connections_inherit_options
        values_read_back
        so_priority
        peek_offset
    }
}

#[test]
fn option_table_is_sorted_and_unique() {
    let order = |row: &OptionRow| (LEVELS.iter().position(|level| *level == row.level).unwrap(), row.name);
    for pair in table::OPTIONS.windows(2) {
        assert!(order(&pair[0]) < order(&pair[1]), "{} {}", pair[0].linux_name, pair[1].linux_name);
    }
}

/// Returns the table of options that differ, for `docs/posix.md`.
pub fn document() -> String {
    let mut text = String::from("| Option | Here |\n|---|---|\n");
    let levels = ["SOL_SOCKET", "IPPROTO_IP", "IPPROTO_IPV6", "IPPROTO_TCP", "IPPROTO_UDP"];
    for (level, name) in LEVELS.into_iter().zip(levels) {
        let same: Vec<&str> = table::OPTIONS
            .iter()
            .filter(|row| row.level == level && row.note.is_empty())
            .map(|row| row.linux_name)
            .collect();
        text += &format!("| {name}: {} | as on Linux |\n", same.join(", "));
        let mut notes: Vec<(String, Vec<&str>)> = Vec::new();
        for row in table::OPTIONS.iter().filter(|row| row.level == level && !row.note.is_empty()) {
            let note = match row.kind {
                OptionKind::Refused => format!("`ENOPROTOOPT`: {}", row.note),
                _ => row.note.into(),
            };
            match notes.iter_mut().find(|(known, _)| *known == note) {
                Some((_, names)) => names.push(row.linux_name),
                None => notes.push((note, vec![row.linux_name])),
            }
        }
        for (note, names) in notes {
            text += &format!("| {} | {note} |\n", names.join(", "));
        }
    }
    text
}
