//! Compares structures and the bits of events in the header, as a C compiler sees them, with those of this
//! library.

use crate::config::PacketView;
use crate::event_queue::{self, Event};
use crate::handles::ConnHandle;
use crate::options::CSocketOptions;
use crate::run::Callbacks;
use crate::shard_loop::EventList;
use crate::tcp::CInfo;
use crate::udp::CDatagram;
use std::path::Path;
use std::process::Command;

/// Returns the values of the expressions, as a C program that includes the header computes them.
fn evaluate_in_c(expressions: &[(String, usize)]) -> Vec<usize> {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("layout.c");
    let mut text = String::from("#include <ginnel.h>\n#include <stdio.h>\nint main(void) {\n");
    for (expression, _) in expressions {
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
    let mut expected = layout! {
        "ginnel_conn" = ConnHandle { "id" = id }
        "ginnel_packet" = PacketView {
            "frame_len" = frame_len, "payload" = payload, "payload_len" = payload_len, "transmits" = transmits
        }
        "ginnel_event" = Event {
            "token" = token, "events" = events, "acked" = acked, "error" = error, "class_" = class
        }
        "ginnel_events" = EventList { "events" = events, "max" = max, "count" = count }
        "ginnel_datagram" = CDatagram { "to" = to, "len" = len, "tos" = tos, "hop_limit" = hop_limit }
        "ginnel_socket_options" = CSocketOptions {
            "flags" = flags, "backlog" = backlog, "recv_buffer_bytes" = recv_buffer_bytes,
            "send_buffer_bytes" = send_buffer_bytes, "mss" = mss, "priority" = priority, "tos" = tos,
            "hop_limit" = hop_limit
        }
        "ginnel_info" = CInfo {
            "remote" = remote, "rtt_ns" = rtt_ns, "min_rtt_ns" = min_rtt_ns, "send_queued" = send_queued,
            "unsent" = unsent, "congestion_window" = congestion_window, "retransmits" = retransmits,
            "state" = state
        }
        "ginnel_callbacks" = Callbacks {
            "create" = create, "start" = start, "accepted" = accepted, "connected" = connected, "data" = data,
            "unordered" = unordered, "writable" = writable, "acked" = acked, "peer_closed" = peer_closed,
            "closed" = closed, "datagram" = datagram, "datagram_error" = datagram_error, "timer" = timer,
            "fd_ready" = fd_ready, "command" = command, "destroyed" = destroyed, "stopping" = stopping,
            "ended" = ended
        }
    };
    let bits = [
        ("INCOMING", event_queue::INCOMING),
        ("CONNECTED", event_queue::CONNECTED),
        ("READABLE", event_queue::READABLE),
        ("UNORDERED", event_queue::UNORDERED),
        ("WRITABLE", event_queue::WRITABLE),
        ("ACKED", event_queue::ACKED),
        ("PEER_CLOSED", event_queue::PEER_CLOSED),
        ("CLOSED", event_queue::CLOSED),
        ("DATAGRAMS", event_queue::DATAGRAMS),
        ("TIMER", event_queue::TIMER),
        ("FD_READABLE", event_queue::FD_READABLE),
        ("FD_WRITABLE", event_queue::FD_WRITABLE),
        ("COMMAND", event_queue::COMMAND),
        ("DESTROYED", event_queue::DESTROYED),
    ];
    expected.extend(bits.map(|(name, bit)| (format!("GINNEL_EV_{name}"), bit as usize)));
    let found = evaluate_in_c(&expected);
    assert_eq!(found.len(), expected.len());
    for ((expression, here), in_c) in expected.iter().zip(found) {
        assert_eq!(in_c, *here, "{expression}");
    }
}
