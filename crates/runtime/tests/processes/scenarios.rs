//! Scenarios with programs that die, fork, execute others and share sockets.

use crate::peer::PeerCommand;
use crate::process_fixture::{ProcessFixture, TIMEOUT, eventually, signal};
use ginnel::CloseReason;
use rustix::process::Signal;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

type Scenario = fn(&mut ProcessFixture);

pub const ALL: &[(&str, Scenario)] = &[
    ("killed_server_has_sent_what_it_wrote", killed_server_has_sent_what_it_wrote),
    ("killed_server_with_unread_bytes_resets", killed_server_with_unread_bytes_resets),
    ("surviving_worker_takes_over_offers", surviving_worker_takes_over_offers),
    ("child_continues_a_half_read_stream", child_continues_a_half_read_stream),
    ("child_killed_before_attaching_releases_sockets", child_killed_before_attaching_releases_sockets),
    ("child_attaches_after_its_parent_died", child_attaches_after_its_parent_died),
    ("unannounced_child_does_not_keep_sockets", unannounced_child_does_not_keep_sockets),
    ("announced_child_that_never_starts_owns_nothing", announced_child_that_never_starts_owns_nothing),
    ("executed_program_inherits_its_connections", executed_program_inherits_its_connections),
    ("sockets_not_inherited_are_closed", sockets_not_inherited_are_closed),
    ("spawned_program_owns_its_inherited_sockets", spawned_program_owns_its_inherited_sockets),
    ("proxy_descriptor_outlives_its_sender", proxy_descriptor_outlives_its_sender),
    ("unclaimed_proxy_descriptor_closes_its_socket", unclaimed_proxy_descriptor_closes_its_socket),
    ("proxy_descriptor_of_another_domain_is_refused", proxy_descriptor_of_another_domain_is_refused),
    ("clients_learn_that_the_stack_died", clients_learn_that_the_stack_died),
    ("stopped_client_harms_nobody", stopped_client_harms_nobody),
    ("malformed_messages_are_rejected", malformed_messages_are_rejected),
    ("random_writes_to_a_region_harm_no_other", random_writes_to_a_region_harm_no_other),
];

fn killed_server_has_sent_what_it_wrote(fixture: &mut ProcessFixture) {
    let mut server = fixture.spawn_attached("");
    server.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "hello");
    server.request_ok("accept");
    assert_eq!(server.request_ok("recv 5"), "hello");
    server.request_ok("send hello,");
    fixture.await_received(conn, "hello,");
    // Written without waking the stack.
    server.request_ok("send-unflushed goodbye");
    server.kill();
    fixture.await_received(conn, "hello,goodbye");
    fixture.await_fin(conn);
    eventually("the client is reaped", || fixture.broker_stats().reaped == 1);
    let late = fixture.connect_peer(80, "anybody?");
    eventually("the connection is refused", || {
        fixture.conn_record(late).close_reason == Some(CloseReason::Refused)
    });
    // Another server takes over the port.
    let mut server = fixture.spawn_attached("");
    server.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "again");
    server.request_ok("accept");
    server.send("echo");
    fixture.await_received(conn, "again");
}

fn killed_server_with_unread_bytes_resets(fixture: &mut ProcessFixture) {
    let mut server = fixture.spawn_attached("");
    server.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "read this");
    server.request_ok("accept");
    assert_eq!(server.request_ok("recv 4"), "read");
    server.kill();
    eventually("the connection is reset", || {
        fixture.conn_record(conn).close_reason == Some(CloseReason::Reset)
    });
}

fn surviving_worker_takes_over_offers(fixture: &mut ProcessFixture) {
    let (mut first, mut second) = (fixture.spawn_attached("web"), fixture.spawn_attached("web"));
    let listener = first.request_ok("listen 80 1");
    let own_conn = fixture.connect_peer(80, "1");
    first.request_ok("accept");
    assert_eq!(first.request_ok("recv 1"), "1");
    second.request_ok(&format!("join {listener} 8"));
    // Offered to the worker with the fewest offers, so some to the one that will never accept.
    let rest: Vec<usize> = (0..6).map(|_| fixture.connect_peer(80, "x")).collect();
    first.kill();
    fixture.await_fin(own_conn);
    second.send("echo");
    for conn in rest {
        fixture.await_received(conn, "x");
    }
    let late = fixture.connect_peer(80, "late");
    fixture.await_received(late, "late");
}

fn child_continues_a_half_read_stream(fixture: &mut ProcessFixture) {
    let mut parent = fixture.spawn_attached("");
    parent.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "first,second");
    parent.request_ok("accept");
    assert_eq!(parent.request_ok("recv 6"), "first,");
    parent.request_ok("fork");
    let mut child = fixture.accept_process("child");
    assert_eq!(child.request_ok("recv 6"), "second");
    // Both write alternately: each byte arrives once and in order.
    for round in 0..5 {
        parent.request_ok(&format!("send {round}p"));
        child.request_ok(&format!("send {round}c"));
    }
    fixture.await_received(conn, "0p0c1p1c2p2c3p3c4p4c");
    fixture.command_peer(PeerCommand::Send(conn, b"more".into()));
    assert_eq!(parent.request_ok("recv 2"), "mo");
    assert_eq!(child.request_ok("recv 2"), "re");
    parent.kill();
    fixture.assert_stays_open(conn);
    child.request_ok("credits 4");
    let other = fixture.connect_peer(80, "to the child");
    child.request_ok("accept");
    child.kill();
    fixture.await_fin(conn);
    eventually("the connection is reset", || {
        fixture.conn_record(other).close_reason == Some(CloseReason::Reset)
    });
}

fn child_killed_before_attaching_releases_sockets(fixture: &mut ProcessFixture) {
    let mut parent = fixture.spawn_attached("");
    parent.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "");
    parent.request_ok("accept");
    let child: u32 = parent.request_ok("fork silent").parse().unwrap();
    parent.kill();
    fixture.assert_stays_open(conn);
    signal(child, Signal::KILL);
    fixture.await_fin(conn);
}

fn child_attaches_after_its_parent_died(fixture: &mut ProcessFixture) {
    let mut parent = fixture.spawn_attached("");
    parent.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "orphan");
    parent.request_ok("accept");
    let start = fixture.path("start");
    parent.request_ok(&format!("fork-late {}", start.display()));
    parent.kill();
    eventually("the parent is reaped", || fixture.broker_stats().reaped == 1);
    fixture.assert_stays_open(conn);
    std::fs::write(&start, "").unwrap();
    let mut child = fixture.accept_process("child");
    assert_eq!(child.request_ok("recv 6"), "orphan");
    child.request_ok("send here");
    fixture.await_received(conn, "here");
    child.kill();
    fixture.await_fin(conn);
}

fn unannounced_child_does_not_keep_sockets(fixture: &mut ProcessFixture) {
    let mut parent = fixture.spawn_attached("");
    parent.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "");
    parent.request_ok("accept");
    let child: u32 = parent.request_ok("fork-unannounced").parse().unwrap();
    fixture.kill_at_end(child);
    fixture.assert_stays_open(conn);
    // The child keeps the control connection open, so only the pidfd reports that the parent ended.
    parent.kill();
    fixture.await_fin(conn);
}

fn announced_child_that_never_starts_owns_nothing(fixture: &mut ProcessFixture) {
    let mut parent = fixture.spawn_attached("");
    parent.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "");
    parent.request_ok("accept");
    parent.request_ok("prepare-fork");
    eventually("the client is reaped", || fixture.broker_stats().reaped == 1);
    fixture.assert_stays_open(conn);
    parent.kill();
    fixture.await_fin(conn);
}

fn executed_program_inherits_its_connections(fixture: &mut ProcessFixture) {
    let mut server = fixture.spawn_attached("");
    server.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "before,after");
    server.request_ok("accept");
    assert_eq!(server.request_ok("recv 7"), "before,");
    server.request_ok("send-unflushed old");
    server.send("exec self keep");
    let mut executed = fixture.accept_process("executed");
    assert_eq!(executed.pid, server.pid, "the same process");
    assert_eq!(executed.request_ok("owned"), "1");
    assert_eq!(executed.request_ok("recv 5"), "after");
    executed.request_ok("send new");
    fixture.await_received(conn, "oldnew");
    executed.request_ok("credits 4");
    let other = fixture.connect_peer(80, "?");
    executed.request_ok("accept");
    executed.kill();
    fixture.await_fin(conn);
    eventually("the connection is reset", || {
        fixture.conn_record(other).close_reason == Some(CloseReason::Reset)
    });
}

fn sockets_not_inherited_are_closed(fixture: &mut ProcessFixture) {
    let mut server = fixture.spawn_attached("");
    server.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "");
    server.request_ok("accept");
    // If a program cannot be executed, nothing changes.
    let error = server.request("exec /nowhere keep");
    assert!(error.starts_with("error"), "{error}");
    eventually("the client is reaped", || fixture.broker_stats().reaped == 1);
    fixture.assert_stays_open(conn);
    // A program that does not use the stack owns what it inherited for as long as it lives.
    server.send("exec sleep keep");
    eventually("the previous client is reaped", || fixture.broker_stats().reaped == 2);
    fixture.assert_stays_open(conn);
    server.kill();
    fixture.await_fin(conn);
    let mut server = fixture.spawn_attached("");
    server.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "");
    server.request_ok("accept");
    server.send("exec self drop");
    let mut executed = fixture.accept_process("executed");
    fixture.await_fin(conn);
    assert_eq!(executed.request_ok("owned"), "0");
    // The executed program is attached nevertheless.
    executed.request_ok("listen 80 4");
}

fn spawned_program_owns_its_inherited_sockets(fixture: &mut ProcessFixture) {
    let mut parent = fixture.spawn_attached("");
    parent.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "to the program");
    parent.request_ok("accept");
    parent.request_ok("spawn self keep");
    let mut program = fixture.accept_process("executed");
    parent.request_ok("release");
    parent.kill();
    fixture.assert_stays_open(conn);
    assert_eq!(program.request_ok("recv 14"), "to the program");
    program.request_ok("send yes");
    fixture.await_received(conn, "yes");
    program.kill();
    fixture.await_fin(conn);
}

fn proxy_descriptor_outlives_its_sender(fixture: &mut ProcessFixture) {
    let (mut first, mut second) = (fixture.spawn_attached("web"), fixture.spawn_attached("web"));
    first.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "first,second");
    first.request_ok("accept");
    assert_eq!(first.request_ok("recv 6"), "first,");
    first.request_ok("share all");
    let address = fixture.path("other");
    second.send(&format!("receive-proxy {} later", address.display()));
    eventually("the socket exists", || address.exists());
    first.request_ok(&format!("send-proxy {}", address.display()));
    second.read_answer();
    first.kill();
    eventually("the client is reaped", || fixture.broker_stats().reaped == 1);
    // The proxy descriptor is the only owner.
    fixture.assert_stays_open(conn);
    assert_eq!(second.request_ok("resolve"), "2");
    assert_eq!(second.request_ok("recv 6"), "second");
    second.request_ok("send third");
    fixture.await_received(conn, "third");
    second.request_ok("credits 4");
    let other = fixture.connect_peer(80, "?");
    second.request_ok("accept");
    second.kill();
    fixture.await_fin(conn);
    eventually("the connection is reset", || {
        fixture.conn_record(other).close_reason == Some(CloseReason::Reset)
    });
}

fn unclaimed_proxy_descriptor_closes_its_socket(fixture: &mut ProcessFixture) {
    let mut first = fixture.spawn_attached("");
    first.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "");
    first.request_ok("accept");
    first.request_ok("share one");
    first.request_ok("release");
    fixture.assert_stays_open(conn);
    first.request_ok("unshare");
    fixture.await_fin(conn);
}

fn proxy_descriptor_of_another_domain_is_refused(fixture: &mut ProcessFixture) {
    let (mut first, mut second) = (fixture.spawn_attached("one"), fixture.spawn_attached("two"));
    first.request_ok("listen 80 4");
    let conn = fixture.connect_peer(80, "secret");
    first.request_ok("accept");
    first.request_ok("share one");
    let address = fixture.path("other");
    second.send(&format!("receive-proxy {}", address.display()));
    eventually("the socket exists", || address.exists());
    first.request_ok(&format!("send-proxy {}", address.display()));
    let error = second.read_answer();
    assert!(error.contains("no such socket exists"), "{error}");
    assert_eq!(fixture.broker_stats().requests_refused, 1);
    fixture.assert_stays_open(conn);
    assert_eq!(first.request_ok("recv 6"), "secret");
}

fn clients_learn_that_the_stack_died(fixture: &mut ProcessFixture) {
    let (stack, path) = fixture.spawn_stack();
    let (mut client, mut idle) = (fixture.spawn_process(), fixture.spawn_process());
    for process in [&mut client, &mut idle] {
        process.request_ok(&format!("attach {} x", path.display()));
    }
    client.request_ok("connect 90");
    client.request_ok("send abc");
    client.send("close-reason");
    let began = Instant::now();
    signal(stack, Signal::KILL);
    assert_eq!(client.read_answer(), "Reset");
    assert!(began.elapsed() < TIMEOUT / 2, "the client was notified before its time limit");
    let send = client.request("send more");
    assert!(send.starts_with("error"), "{send}");
    for process in [&mut client, &mut idle] {
        assert_eq!(process.request("connect 90"), "error: the stack is gone");
    }
}

fn stopped_client_harms_nobody(fixture: &mut ProcessFixture) {
    let (mut first, mut second) = (fixture.spawn_attached("web"), fixture.spawn_attached("web"));
    let mut neighbour = fixture.spawn_attached("other");
    let listener = first.request_ok("listen 80 4");
    neighbour.request_ok("listen 81 4");
    let held = fixture.connect_peer(80, "");
    first.request_ok("accept");
    signal(first.pid, Signal::STOP);
    second.request_ok(&format!("join {listener} 4"));
    second.send("echo");
    neighbour.send("echo");
    // Some connections are first offered to the stopped process.
    for round in 0..20 {
        let (to_second, to_neighbour) = (fixture.connect_peer(80, "x"), fixture.connect_peer(81, "y"));
        fixture.await_received(to_second, "x");
        fixture.await_received(to_neighbour, "y");
        assert_eq!(fixture.conn_record(held).close_reason, None, "round {round}");
    }
    // Bytes for the stopped process are queued, as far as there is space.
    let bytes = vec![b'z'; 300_000];
    fixture.command_peer(PeerCommand::Send(held, bytes.clone()));
    let late = fixture.connect_peer(80, "x");
    fixture.await_received(late, "x");
    signal(first.pid, Signal::CONT);
    assert_eq!(first.request_ok(&format!("recv {}", bytes.len())).as_bytes(), bytes);
    first.request_ok("send hello");
    fixture.await_received(held, "hello");
}

fn malformed_messages_are_rejected(fixture: &mut ProcessFixture) {
    let mut good = fixture.spawn_attached("");
    good.request_ok("listen 80 4");
    let path = fixture.path("control");
    // Even the socket type differs.
    assert!(UnixStream::connect(&path).is_err());
    for seed in 0..200u32 {
        use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketType, connect, send, socket};
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let bytes: Vec<u8> =
            (0..seed).map(|i| (i.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        // The broker may have closed the connection already.
        let _ = send(&socket, &bytes, SendFlags::NOSIGNAL);
        let _ = send(&socket, &bytes, SendFlags::NOSIGNAL);
        if seed % 3 == 0 {
            // Silent connections stay until there are too many.
            std::mem::forget(socket);
        }
    }
    eventually("connections are rejected", || fixture.broker_stats().rejected > 100);
    let conn = fixture.connect_peer(80, "as ever");
    good.request_ok("accept");
    good.send("echo");
    fixture.await_received(conn, "as ever");
    std::thread::sleep(Duration::from_millis(1));
}

fn random_writes_to_a_region_harm_no_other(fixture: &mut ProcessFixture) {
    let (mut hostile, mut neighbour) = (fixture.spawn_attached("one"), fixture.spawn_attached("two"));
    hostile.request_ok("listen 80 4");
    neighbour.request_ok("listen 81 4");
    neighbour.send("echo");
    fixture.connect_peer(80, "hello");
    hostile.request_ok("accept");
    for round in 0..20 {
        hostile.request_ok("scribble 5000");
        // The shard looks at the sockets of the hostile domain, too.
        fixture.connect_peer(80, "x");
        let conn = fixture.connect_peer(81, "y");
        eventually(&format!("the neighbour answers in round {round}"), || {
            fixture.conn_record(conn).received == b"y"
        });
    }
    hostile.kill();
    eventually("the hostile client is reaped", || fixture.broker_stats().reaped == 1);
    let late = fixture.connect_peer(81, "as ever");
    fixture.await_received(late, "as ever");
}
