//! Compares structures and constants in the header, as a C compiler sees them, with those of this library.

use crate::config::PacketView;
use crate::event_queue::{self, Event};
use crate::handles::{
    ConnHandle, KernelFdHandle, ListenerHandle, SourceHandle, TimerHandle, UdpSocketHandle,
};
use crate::multicast;
use crate::options::{self, CListenOptions, CSocketOptions};
use crate::resources;
use crate::run::Callbacks;
use crate::shard_loop::EventList;
use crate::tcp::CInfo;
use crate::udp::CDatagram;
use crate::udp_errors::CUdpError;
use crate::udp_options::{self, CMulticastOptions, CUdpOptions};
use core::ffi::c_int;
use core::time::Duration;
use ginnel::{CongestionControl, PmtuDiscovery, TcpOption};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Returns the values of the expressions, as a C program that includes the header computes them.
fn evaluate_in_c<'a>(expressions: impl IntoIterator<Item = &'a String>) -> Vec<usize> {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("layout.c");
    let mut text = String::from("#include <ginnel.h>\n#include <stdio.h>\nint main(void) {\n");
    for expression in expressions {
        text += &format!("printf(\"%zu\\n\", (size_t)({expression}));\n");
    }
    std::fs::write(&source, text + "return 0; }\n").unwrap();
    let program = folder.path().join("layout");
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let cc = Command::new("cc").arg("-I").arg(include).arg("-o").arg(&program).arg(&source).status();
    assert!(cc.expect("cc, a C compiler, runs").success());
    let output = Command::new(&program).output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect()
}

macro_rules! layout {
    ($($c:literal = $rust:ty { $($c_field:literal = $field:ident),* $(,)? })*) => {{
        let mut expected: Vec<(String, usize)> = Vec::new();
        $(
            expected.push((format!("sizeof(struct {})", $c), size_of::<$rust>()));
            $(expected.push((
                format!("offsetof(struct {}, {})", $c, $c_field),
                core::mem::offset_of!($rust, $field),
            ));)*
        )*
        expected
    }};
}

#[test]
fn header_structures_have_the_layout_of_the_library() {
    let expected = layout! {
        "ginnel_conn" = ConnHandle { "id" = id }
        "ginnel_listener" = ListenerHandle { "id" = id }
        "ginnel_udp" = UdpSocketHandle { "id" = id }
        "ginnel_timer" = TimerHandle { "id" = id }
        "ginnel_fd" = KernelFdHandle { "id" = id }
        "ginnel_source" = SourceHandle { "id" = id }
        "ginnel_packet" = PacketView {
            "frame" = frame, "frame_len" = frame_len, "payload" = payload, "payload_len" = payload_len,
            "transmits" = transmits
        }
        "ginnel_event" = Event {
            "source" = source, "token" = token, "events" = events, "acked" = acked, "error" = error,
            "class_" = class, "reserved" = reserved
        }
        "ginnel_events" = EventList { "events" = events, "max" = max, "count" = count }
        "ginnel_datagram" = CDatagram {
            "from" = from, "to" = to, "len" = len, "tos" = tos, "hop_limit" = hop_limit,
            "gso_size" = gso_size, "reserved" = reserved
        }
        "ginnel_udp_options" = CUdpOptions {
            "flags" = flags, "recv_buffer_bytes" = recv_buffer_bytes, "priority" = priority, "tos" = tos,
            "hop_limit" = hop_limit, "pmtu_discovery" = pmtu_discovery, "reserved" = reserved,
            "multicast_v4" = multicast_v4, "multicast_v6" = multicast_v6
        }
        "ginnel_multicast_options" = CMulticastOptions {
            "source" = source, "link" = link, "hop_limit" = hop_limit, "flags" = flags
        }
        "ginnel_udp_error" = CUdpError {
            "destination" = destination, "offender" = offender, "len" = len, "error" = error,
            "next_error" = next_error, "info" = info, "extensions" = extensions, "icmp_type" = icmp_type,
            "icmp_code" = icmp_code, "has_more" = has_more, "extensions_invalid" = extensions_invalid,
            "reserved" = reserved
        }
        "ginnel_socket_options" = CSocketOptions {
            "flags" = flags, "backlog" = backlog, "recv_buffer_bytes" = recv_buffer_bytes,
            "send_buffer_bytes" = send_buffer_bytes, "mss" = mss, "priority" = priority, "tos" = tos,
            "hop_limit" = hop_limit, "reserved" = reserved
        }
        "ginnel_listen_options" = CListenOptions {
            "size" = size, "socket" = socket, "fastopen_queue" = fastopen_queue,
            "defer_accept_s" = defer_accept_s, "fastopen_key" = fastopen_key,
            "fastopen_backup_key" = fastopen_backup_key, "rto_min_us" = rto_min_us,
            "rto_max_ms" = rto_max_ms, "delayed_ack_max_us" = delayed_ack_max_us, "min_ttl" = min_ttl,
            "min_hop_count" = min_hop_count, "save_syn" = save_syn, "reserved" = reserved
        }
        "ginnel_info" = CInfo {
            "local" = local, "remote" = remote, "rtt_ns" = rtt_ns, "rttvar_ns" = rttvar_ns,
            "min_rtt_ns" = min_rtt_ns, "send_queued" = send_queued, "recv_queued" = recv_queued,
            "unsent" = unsent, "mss" = mss, "congestion_window" = congestion_window,
            "unacked_segments" = unacked_segments, "retransmits" = retransmits, "state" = state
        }
        "ginnel_callbacks" = Callbacks {
            "size" = size, "create" = create, "start" = start, "accepted" = accepted,
            "connected" = connected, "data" = data, "unordered" = unordered, "writable" = writable,
            "acked" = acked, "peer_closed" = peer_closed, "closed" = closed, "datagram" = datagram,
            "datagram_error" = datagram_error, "timer" = timer, "fd_ready" = fd_ready, "command" = command,
            "destroyed" = destroyed, "stopping" = stopping, "ended" = ended,
            "urgent" = urgent
        }
    };
    let found = evaluate_in_c(expected.iter().map(|(expression, _)| expression));
    assert_eq!(found.len(), expected.len());
    for ((expression, here), in_c) in expected.iter().zip(found) {
        assert_eq!(in_c, *here, "{expression}");
    }
}

/// Bits that the header and this library name, without the options of connections.
const BITS: [(&str, u32); 40] = [
    ("EV_INCOMING", event_queue::INCOMING),
    ("EV_CONNECTED", event_queue::CONNECTED),
    ("EV_READABLE", event_queue::READABLE),
    ("EV_UNORDERED", event_queue::UNORDERED),
    ("EV_WRITABLE", event_queue::WRITABLE),
    ("EV_ACKED", event_queue::ACKED),
    ("EV_PEER_CLOSED", event_queue::PEER_CLOSED),
    ("EV_CLOSED", event_queue::CLOSED),
    ("EV_DATAGRAMS", event_queue::DATAGRAMS),
    ("EV_TIMER", event_queue::TIMER),
    ("EV_FD_READABLE", event_queue::FD_READABLE),
    ("EV_FD_WRITABLE", event_queue::FD_WRITABLE),
    ("EV_COMMAND", event_queue::COMMAND),
    ("EV_DESTROYED", event_queue::DESTROYED),
    ("EV_URGENT", event_queue::URGENT),
    ("REUSE_PORT", options::REUSE_PORT),
    ("V6_ONLY", options::V6_ONLY),
    ("NODELAY", options::NODELAY),
    ("KEEPALIVE", options::KEEPALIVE),
    ("ACK_EVENTS", options::ACK_EVENTS),
    ("UNORDERED", options::UNORDERED),
    ("FASTOPEN_NO_COOKIE", options::FASTOPEN_NO_COOKIE),
    ("MAY_FRAGMENT", options::MAY_FRAGMENT),
    ("SAVE_SYN_PACKET", options::SAVE_SYN_PACKET as u32),
    ("SAVE_SYN_FRAME", options::SAVE_SYN_FRAME as u32),
    ("UDP_REUSE_PORT", udp_options::REUSE_PORT),
    ("UDP_V6_ONLY", udp_options::V6_ONLY),
    ("UDP_BROADCAST", udp_options::BROADCAST),
    ("UDP_REUSE_ADDRESS", udp_options::REUSE_ADDRESS),
    ("UDP_GRO", udp_options::GRO),
    ("UDP_RECVERR_V4", udp_options::RECVERR_V4),
    ("UDP_RECVERR_V6", udp_options::RECVERR_V6),
    ("MULTICAST_NO_LOOP", udp_options::NO_LOOP as u32),
    ("MULTICAST_MEMBERS_ONLY", udp_options::MEMBERS_ONLY as u32),
    ("MULTICAST_THIS_HOST", udp_options::THIS_HOST as u32),
    ("SOURCES_EXCLUDE", multicast::EXCLUDE),
    ("SOURCES_INCLUDE", multicast::INCLUDE),
    ("FD_READ", resources::READ),
    ("FD_WRITE", resources::WRITE),
    ("FD_EDGES", resources::EDGES),
];

/// The options of connections, each with the value 7 of C.
const OPTIONS: [(&str, TcpOption); 28] = [
    ("OPT_NODELAY", TcpOption::NoDelay(true)),
    ("OPT_CORK", TcpOption::Cork(true)),
    ("OPT_MORE", TcpOption::More(true)),
    ("OPT_QUICKACK", TcpOption::QuickAck(true)),
    ("OPT_KEEPALIVE", TcpOption::KeepAlive(true)),
    ("OPT_KEEPIDLE_S", TcpOption::KeepIdle(Duration::from_secs(7))),
    ("OPT_KEEPINTVL_S", TcpOption::KeepInterval(Duration::from_secs(7))),
    ("OPT_KEEPCNT", TcpOption::KeepCount(7)),
    ("OPT_USER_TIMEOUT_MS", TcpOption::UserTimeout(Duration::from_millis(7))),
    ("OPT_LINGER_ZERO", TcpOption::LingerZero(true)),
    ("OPT_OOBINLINE", TcpOption::OobInline(true)),
    ("OPT_ACK_EVENTS", TcpOption::AckEvents(true)),
    ("OPT_RCVBUF", TcpOption::RecvBuffer(7)),
    ("OPT_SNDBUF", TcpOption::SendBuffer(7)),
    ("OPT_NOTSENT_LOWAT", TcpOption::NotSentLowat(7)),
    ("OPT_MAXSEG", TcpOption::MaxSegment(7)),
    ("OPT_TOS", TcpOption::Tos(7)),
    ("OPT_HOP_LIMIT", TcpOption::HopLimit(Some(7))),
    ("OPT_PRIORITY", TcpOption::Priority(7)),
    ("OPT_UNORDERED", TcpOption::Unordered(true)),
    ("OPT_MIN_HOP_LIMIT", TcpOption::MinHopLimit(7)),
    ("OPT_RTO_MIN_US", TcpOption::RtoMin(Duration::from_micros(7))),
    ("OPT_RTO_MAX_MS", TcpOption::RtoMax(Duration::from_millis(7))),
    ("OPT_DELACK_MAX_US", TcpOption::DelayedAckMax(Duration::from_micros(7))),
    ("OPT_SYNCNT", TcpOption::SynRetries(7)),
    ("OPT_LINGER2_S", TcpOption::Linger2(Duration::from_secs(7))),
    ("OPT_MAX_PACING_RATE", TcpOption::MaxPacingRate(7)),
    ("OPT_MAY_FRAGMENT", TcpOption::MayFragment(true)),
];

/// The algorithms of congestion control, for the option that the value 7 does not suit.
const CONGESTION: [(&str, CongestionControl); 3] = [
    ("CONGESTION_CUBIC", CongestionControl::Cubic),
    ("CONGESTION_NEWRENO", CongestionControl::NewReno),
    ("CONGESTION_BBR", CongestionControl::Bbr),
];

/// The modes of path MTU discovery.
const PMTU_DISCOVERY: [(&str, PmtuDiscovery); 6] = [
    ("PMTU_WANT", PmtuDiscovery::Want),
    ("PMTU_DONT", PmtuDiscovery::Dont),
    ("PMTU_DO", PmtuDiscovery::Do),
    ("PMTU_PROBE", PmtuDiscovery::Probe),
    ("PMTU_INTERFACE", PmtuDiscovery::Interface),
    ("PMTU_OMIT", PmtuDiscovery::Omit),
];

#[test]
fn header_constants_have_the_values_of_the_library() {
    let names = BITS.map(|(name, _)| name).into_iter().chain(OPTIONS.map(|(name, _)| name));
    let names = names.chain(PMTU_DISCOVERY.map(|(name, _)| name));
    let names = names.chain(CONGESTION.map(|(name, _)| name)).chain(["OPT_CONGESTION"]);
    let names: Vec<String> = names.map(|name| format!("GINNEL_{name}")).collect();
    let mut values = evaluate_in_c(&names).into_iter();
    for ((name, bit), in_c) in BITS.into_iter().zip(values.by_ref()) {
        assert_eq!(in_c, bit as usize, "{name}");
    }
    for ((name, option), in_c) in OPTIONS.into_iter().zip(values.by_ref()) {
        assert_eq!(options::option(in_c as c_int, 7).ok(), Some(option), "{name}");
    }
    for ((name, mode), in_c) in PMTU_DISCOVERY.into_iter().zip(values.by_ref()) {
        assert_eq!(udp_options::pmtu_discovery(in_c as u8), Some(mode), "{name}");
    }
    assert_eq!(udp_options::pmtu_discovery(PMTU_DISCOVERY.len() as u8), None);
    for ((name, algorithm), in_c) in CONGESTION.into_iter().zip(values.by_ref()) {
        assert_eq!(options::congestion(in_c as i64).ok(), Some(algorithm), "{name}");
    }
    let congestion = values.next().unwrap() as c_int;
    assert_eq!(options::option(congestion, 2).ok(), Some(TcpOption::Congestion(CongestionControl::Bbr)));
    assert_eq!(values.next(), None);
    let unknown = OPTIONS.len() as c_int + 2;
    assert!(options::option(0, 7).is_err() && options::option(unknown, 7).is_err());
    // The header has no other constants.
    let header = include_str!("../include/ginnel.h");
    let declared = header.lines().filter_map(|line| line.trim().split_once(" = ")).map(|(name, _)| name);
    let declared: BTreeSet<&str> = declared.filter(|name| name.starts_with("GINNEL_")).collect();
    assert_eq!(declared, names.iter().map(String::as_str).collect());
}
