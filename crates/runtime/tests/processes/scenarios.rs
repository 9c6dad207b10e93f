//! What happens to programs.

use crate::fixture::{Fixture, TIMEOUT, eventually, signal};
use crate::peer::PeerCommand;
use ginnel::CloseReason;
use rustix::process::Signal;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

type Scenario = fn(&mut Fixture);

pub const ALL: &[(&str, Scenario)] = &[
    ("a_server_that_is_killed_has_said_what_it_wrote_and_is_gone", a_server_that_is_killed),
    ("a_server_that_is_killed_with_bytes_unread_resets", killed_with_bytes_unread),
    ("of_two_workers_one_is_killed_and_the_other_goes_on", of_two_workers),
    ("a_child_goes_on_with_a_stream_that_its_parent_has_half_read", a_child_goes_on),
    ("a_child_that_is_killed_before_its_first_word_holds_no_longer", a_mute_child),
    ("a_child_that_never_is_holds_nothing", a_child_that_never_is),
    ("the_next_program_goes_on_where_the_last_one_stopped", the_next_program),
    ("what_the_next_program_does_not_keep_ends", what_is_not_kept),
    ("a_program_that_was_started_holds_what_it_was_given", a_program_that_was_started),
    ("a_socket_in_flight_outlives_its_sender", a_socket_in_flight),
    ("a_socket_that_nobody_takes_ends_with_its_last_descriptor", nobody_takes),
    ("a_socket_of_another_domain_is_not_to_be_had", another_domain),
    ("when_the_stack_dies_its_clients_are_told", the_stack_dies),
    ("a_client_that_is_stopped_hurts_nobody", a_client_that_is_stopped),
    ("who_talks_nonsense_is_sent_away", nonsense),
];

fn a_server_that_is_killed(rig: &mut Fixture) {
    let mut server = rig.spawn_attached("");
    server.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "hello");
    server.request_ok("accept");
    assert_eq!(server.request_ok("recv 5"), "hello");
    server.request_ok("send hello,");
    rig.await_received(conn, "hello,");
    // Written, and the stack was not told.
    server.request_ok("whisper goodbye");
    server.kill();
    rig.await_received(conn, "hello,goodbye");
    rig.await_fin(conn);
    eventually("its burial", || rig.broker_stats().reaped == 1);
    let late = rig.connect_peer(80, "anybody?");
    eventually("a refusal", || rig.conn_record(late).close_reason == Some(CloseReason::Refused));
    // Another takes its place.
    let mut server = rig.spawn_attached("");
    server.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "again");
    server.request_ok("accept");
    server.send("echo");
    rig.await_received(conn, "again");
}

fn killed_with_bytes_unread(rig: &mut Fixture) {
    let mut server = rig.spawn_attached("");
    server.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "read this");
    server.request_ok("accept");
    assert_eq!(server.request_ok("recv 4"), "read");
    server.kill();
    eventually("a reset", || rig.conn_record(conn).close_reason == Some(CloseReason::Reset));
}

fn of_two_workers(rig: &mut Fixture) {
    let (mut first, mut second) = (rig.spawn_attached("web"), rig.spawn_attached("web"));
    let listener = first.request_ok("listen 80 1");
    let mine = rig.connect_peer(80, "1");
    first.request_ok("accept");
    assert_eq!(first.request_ok("recv 1"), "1");
    second.request_ok(&format!("join {listener} 8"));
    // Offered to whoever has the fewest, so some to one that will never take them.
    let rest: Vec<usize> = (0..6).map(|_| rig.connect_peer(80, "x")).collect();
    first.kill();
    rig.await_fin(mine);
    second.send("echo");
    for conn in rest {
        rig.await_received(conn, "x");
    }
    let late = rig.connect_peer(80, "late");
    rig.await_received(late, "late");
}

fn a_child_goes_on(rig: &mut Fixture) {
    let mut parent = rig.spawn_attached("");
    parent.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "first,second");
    parent.request_ok("accept");
    assert_eq!(parent.request_ok("recv 6"), "first,");
    parent.request_ok("fork");
    let mut child = rig.accept_process("child");
    assert_eq!(child.request_ok("recv 6"), "second");
    // In turns, each byte once and in order.
    for round in 0..5 {
        parent.request_ok(&format!("send {round}p"));
        child.request_ok(&format!("send {round}c"));
    }
    rig.await_received(conn, "0p0c1p1c2p2c3p3c4p4c");
    rig.command_peer(PeerCommand::Send(conn, b"more".into()));
    assert_eq!(parent.request_ok("recv 2"), "mo");
    assert_eq!(child.request_ok("recv 2"), "re");
    parent.kill();
    rig.assert_stays_open(conn);
    child.request_ok("credits 4");
    let other = rig.connect_peer(80, "to the child");
    child.request_ok("accept");
    child.kill();
    rig.await_fin(conn);
    eventually("a reset", || rig.conn_record(other).close_reason == Some(CloseReason::Reset));
}

fn a_mute_child(rig: &mut Fixture) {
    let mut parent = rig.spawn_attached("");
    parent.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "");
    parent.request_ok("accept");
    let child: u32 = parent.request_ok("fork mute").parse().unwrap();
    parent.kill();
    rig.assert_stays_open(conn);
    signal(child, Signal::KILL);
    rig.await_fin(conn);
}

fn a_child_that_never_is(rig: &mut Fixture) {
    let mut parent = rig.spawn_attached("");
    parent.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "");
    parent.request_ok("accept");
    parent.request_ok("expect");
    eventually("its burial", || rig.broker_stats().reaped == 1);
    rig.assert_stays_open(conn);
    parent.kill();
    rig.await_fin(conn);
}

fn the_next_program(rig: &mut Fixture) {
    let mut server = rig.spawn_attached("");
    server.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "before,after");
    server.request_ok("accept");
    assert_eq!(server.request_ok("recv 7"), "before,");
    server.request_ok("whisper old");
    server.send("exec self keep");
    let mut image = rig.accept_process("image");
    assert_eq!(image.pid, server.pid, "the same process");
    assert_eq!(image.request_ok("held"), "1");
    assert_eq!(image.request_ok("recv 5"), "after");
    image.request_ok("send new");
    rig.await_received(conn, "oldnew");
    image.request_ok("credits 4");
    let other = rig.connect_peer(80, "?");
    image.request_ok("accept");
    image.kill();
    rig.await_fin(conn);
    eventually("a reset", || rig.conn_record(other).close_reason == Some(CloseReason::Reset));
}

fn what_is_not_kept(rig: &mut Fixture) {
    let mut server = rig.spawn_attached("");
    server.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "");
    server.request_ok("accept");
    // A program that cannot be started: everything is as before.
    let error = server.request("exec /nowhere keep");
    assert!(error.starts_with("error"), "{error}");
    eventually("its burial", || rig.broker_stats().reaped == 1);
    rig.assert_stays_open(conn);
    // One that knows nothing of all this holds what it was given as long as it lives.
    server.send("exec sleep keep");
    eventually("the burial of the one it was", || rig.broker_stats().reaped == 2);
    rig.assert_stays_open(conn);
    server.kill();
    rig.await_fin(conn);
    let mut server = rig.spawn_attached("");
    server.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "");
    server.request_ok("accept");
    server.send("exec self drop");
    let mut image = rig.accept_process("image");
    rig.await_fin(conn);
    assert_eq!(image.request_ok("held"), "0");
    // It is attached all the same.
    image.request_ok("listen 80 4");
}

fn a_program_that_was_started(rig: &mut Fixture) {
    let mut parent = rig.spawn_attached("");
    parent.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "to the program");
    parent.request_ok("accept");
    parent.request_ok("spawn self keep");
    let mut program = rig.accept_process("image");
    parent.request_ok("release");
    parent.kill();
    rig.assert_stays_open(conn);
    assert_eq!(program.request_ok("recv 14"), "to the program");
    program.request_ok("send yes");
    rig.await_received(conn, "yes");
    program.kill();
    rig.await_fin(conn);
}

fn a_socket_in_flight(rig: &mut Fixture) {
    let (mut first, mut second) = (rig.spawn_attached("web"), rig.spawn_attached("web"));
    first.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "first,second");
    first.request_ok("accept");
    assert_eq!(first.request_ok("recv 6"), "first,");
    first.request_ok("share all");
    let address = rig.path("other");
    second.send(&format!("take {} later", address.display()));
    eventually("an address", || address.exists());
    first.request_ok(&format!("give {}", address.display()));
    second.read_answer();
    first.kill();
    eventually("its burial", || rig.broker_stats().reaped == 1);
    // Nobody holds it but a descriptor.
    rig.assert_stays_open(conn);
    assert_eq!(second.request_ok("resolve"), "2");
    assert_eq!(second.request_ok("recv 6"), "second");
    second.request_ok("send third");
    rig.await_received(conn, "third");
    second.request_ok("credits 4");
    let other = rig.connect_peer(80, "?");
    second.request_ok("accept");
    second.kill();
    rig.await_fin(conn);
    eventually("a reset", || rig.conn_record(other).close_reason == Some(CloseReason::Reset));
}

fn nobody_takes(rig: &mut Fixture) {
    let mut first = rig.spawn_attached("");
    first.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "");
    first.request_ok("accept");
    first.request_ok("share one");
    first.request_ok("release");
    rig.assert_stays_open(conn);
    first.request_ok("unshare");
    rig.await_fin(conn);
}

fn another_domain(rig: &mut Fixture) {
    let (mut first, mut second) = (rig.spawn_attached("one"), rig.spawn_attached("two"));
    first.request_ok("listen 80 4");
    let conn = rig.connect_peer(80, "secret");
    first.request_ok("accept");
    first.request_ok("share one");
    let address = rig.path("other");
    second.send(&format!("take {}", address.display()));
    eventually("an address", || address.exists());
    first.request_ok(&format!("give {}", address.display()));
    let error = second.read_answer();
    assert!(error.contains("there is no such connection"), "{error}");
    assert_eq!(rig.broker_stats().requests_refused, 1);
    rig.assert_stays_open(conn);
    assert_eq!(first.request_ok("recv 6"), "secret");
}

fn the_stack_dies(rig: &mut Fixture) {
    let (stack, path) = rig.spawn_stack();
    let (mut client, mut idle) = (rig.spawn_process(), rig.spawn_process());
    for puppet in [&mut client, &mut idle] {
        puppet.request_ok(&format!("attach {} x", path.display()));
    }
    client.request_ok("connect 90");
    client.request_ok("send abc");
    client.send("ended");
    let began = Instant::now();
    signal(stack, Signal::KILL);
    assert_eq!(client.read_answer(), "Reset");
    assert!(began.elapsed() < TIMEOUT / 2, "it was told, and did not run into a time limit");
    let send = client.request("send more");
    assert!(send.starts_with("error"), "{send}");
    for puppet in [&mut client, &mut idle] {
        assert_eq!(puppet.request("connect 90"), "error: the stack is gone");
    }
}

fn a_client_that_is_stopped(rig: &mut Fixture) {
    let (mut first, mut second) = (rig.spawn_attached("web"), rig.spawn_attached("web"));
    let mut neighbour = rig.spawn_attached("other");
    let listener = first.request_ok("listen 80 4");
    neighbour.request_ok("listen 81 4");
    let held = rig.connect_peer(80, "");
    first.request_ok("accept");
    signal(first.pid, Signal::STOP);
    second.request_ok(&format!("join {listener} 4"));
    second.send("echo");
    neighbour.send("echo");
    // Some are offered to the one that is stopped first.
    for round in 0..20 {
        let (to_second, to_neighbour) = (rig.connect_peer(80, "x"), rig.connect_peer(81, "y"));
        rig.await_received(to_second, "x");
        rig.await_received(to_neighbour, "y");
        assert_eq!(rig.conn_record(held).close_reason, None, "round {round}");
    }
    // Bytes for it wait, as far as there is room.
    let much = vec![b'z'; 300_000];
    rig.command_peer(PeerCommand::Send(held, much.clone()));
    let late = rig.connect_peer(80, "x");
    rig.await_received(late, "x");
    signal(first.pid, Signal::CONT);
    assert_eq!(first.request_ok(&format!("recv {}", much.len())).as_bytes(), much);
    first.request_ok("send hello");
    rig.await_received(held, "hello");
}

fn nonsense(rig: &mut Fixture) {
    let mut good = rig.spawn_attached("");
    good.request_ok("listen 80 4");
    let path = rig.path("control");
    // Not even the same kind of socket.
    assert!(UnixStream::connect(&path).is_err());
    for seed in 0..200u32 {
        use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketType, connect, send, socket};
        let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        let bytes: Vec<u8> =
            (0..seed).map(|i| (i.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        // It may have been sent away already.
        let _ = send(&socket, &bytes, SendFlags::NOSIGNAL);
        let _ = send(&socket, &bytes, SendFlags::NOSIGNAL);
        if seed % 3 == 0 {
            // Silent ones stay until there are too many.
            std::mem::forget(socket);
        }
    }
    eventually("goodbyes", || rig.broker_stats().rejected > 100);
    let conn = rig.connect_peer(80, "as ever");
    good.request_ok("accept");
    good.send("echo");
    rig.await_received(conn, "as ever");
    std::thread::sleep(Duration::from_millis(1));
}
