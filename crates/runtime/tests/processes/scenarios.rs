//! What happens to programs.

use crate::peer::Tell;
use crate::rig::{PATIENCE, Rig, eventually, signal};
use ginnel::CloseReason;
use rustix::process::Signal;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

type Scenario = fn(&mut Rig);

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

fn a_server_that_is_killed(rig: &mut Rig) {
    let mut server = rig.attached("");
    server.ok("listen 80 4");
    let conn = rig.dial(80, "hello");
    server.ok("accept");
    assert_eq!(server.ok("recv 5"), "hello");
    server.ok("send hello,");
    rig.received(conn, "hello,");
    // Written, and the stack was not told.
    server.ok("whisper goodbye");
    server.kill();
    rig.received(conn, "hello,goodbye");
    rig.finished(conn);
    eventually("its burial", || rig.door().buried == 1);
    let late = rig.dial(80, "anybody?");
    eventually("a refusal", || rig.seen(late).ended == Some(CloseReason::Refused));
    // Another takes its place.
    let mut server = rig.attached("");
    server.ok("listen 80 4");
    let conn = rig.dial(80, "again");
    server.ok("accept");
    server.tell("echo");
    rig.received(conn, "again");
}

fn killed_with_bytes_unread(rig: &mut Rig) {
    let mut server = rig.attached("");
    server.ok("listen 80 4");
    let conn = rig.dial(80, "read this");
    server.ok("accept");
    assert_eq!(server.ok("recv 4"), "read");
    server.kill();
    eventually("a reset", || rig.seen(conn).ended == Some(CloseReason::Reset));
}

fn of_two_workers(rig: &mut Rig) {
    let (mut first, mut second) = (rig.attached("web"), rig.attached("web"));
    let listener = first.ok("listen 80 1");
    let mine = rig.dial(80, "1");
    first.ok("accept");
    assert_eq!(first.ok("recv 1"), "1");
    second.ok(&format!("join {listener} 8"));
    // Offered to whoever has the fewest, so some to one that will never take them.
    let rest: Vec<usize> = (0..6).map(|_| rig.dial(80, "x")).collect();
    first.kill();
    rig.finished(mine);
    second.tell("echo");
    for conn in rest {
        rig.received(conn, "x");
    }
    let late = rig.dial(80, "late");
    rig.received(late, "late");
}

fn a_child_goes_on(rig: &mut Rig) {
    let mut parent = rig.attached("");
    parent.ok("listen 80 4");
    let conn = rig.dial(80, "first,second");
    parent.ok("accept");
    assert_eq!(parent.ok("recv 6"), "first,");
    parent.ok("fork");
    let mut child = rig.meet("child");
    assert_eq!(child.ok("recv 6"), "second");
    // In turns, each byte once and in order.
    for round in 0..5 {
        parent.ok(&format!("send {round}p"));
        child.ok(&format!("send {round}c"));
    }
    rig.received(conn, "0p0c1p1c2p2c3p3c4p4c");
    rig.tell(Tell::Send(conn, b"more".into()));
    assert_eq!(parent.ok("recv 2"), "mo");
    assert_eq!(child.ok("recv 2"), "re");
    parent.kill();
    rig.stays(conn);
    child.ok("credits 4");
    let other = rig.dial(80, "to the child");
    child.ok("accept");
    child.kill();
    rig.finished(conn);
    eventually("a reset", || rig.seen(other).ended == Some(CloseReason::Reset));
}

fn a_mute_child(rig: &mut Rig) {
    let mut parent = rig.attached("");
    parent.ok("listen 80 4");
    let conn = rig.dial(80, "");
    parent.ok("accept");
    let child: u32 = parent.ok("fork mute").parse().unwrap();
    parent.kill();
    rig.stays(conn);
    signal(child, Signal::KILL);
    rig.finished(conn);
}

fn a_child_that_never_is(rig: &mut Rig) {
    let mut parent = rig.attached("");
    parent.ok("listen 80 4");
    let conn = rig.dial(80, "");
    parent.ok("accept");
    parent.ok("expect");
    eventually("its burial", || rig.door().buried == 1);
    rig.stays(conn);
    parent.kill();
    rig.finished(conn);
}

fn the_next_program(rig: &mut Rig) {
    let mut server = rig.attached("");
    server.ok("listen 80 4");
    let conn = rig.dial(80, "before,after");
    server.ok("accept");
    assert_eq!(server.ok("recv 7"), "before,");
    server.ok("whisper old");
    server.tell("exec self keep");
    let mut image = rig.meet("image");
    assert_eq!(image.pid, server.pid, "the same process");
    assert_eq!(image.ok("held"), "1");
    assert_eq!(image.ok("recv 5"), "after");
    image.ok("send new");
    rig.received(conn, "oldnew");
    image.ok("credits 4");
    let other = rig.dial(80, "?");
    image.ok("accept");
    image.kill();
    rig.finished(conn);
    eventually("a reset", || rig.seen(other).ended == Some(CloseReason::Reset));
}

fn what_is_not_kept(rig: &mut Rig) {
    let mut server = rig.attached("");
    server.ok("listen 80 4");
    let conn = rig.dial(80, "");
    server.ok("accept");
    // A program that cannot be started: everything is as before.
    let error = server.ask("exec /nowhere keep");
    assert!(error.starts_with("error"), "{error}");
    eventually("its burial", || rig.door().buried == 1);
    rig.stays(conn);
    // One that knows nothing of all this holds what it was given as long as it lives.
    server.tell("exec sleep keep");
    eventually("the burial of the one it was", || rig.door().buried == 2);
    rig.stays(conn);
    server.kill();
    rig.finished(conn);
    let mut server = rig.attached("");
    server.ok("listen 80 4");
    let conn = rig.dial(80, "");
    server.ok("accept");
    server.tell("exec self drop");
    let mut image = rig.meet("image");
    rig.finished(conn);
    assert_eq!(image.ok("held"), "0");
    // It is attached all the same.
    image.ok("listen 80 4");
}

fn a_program_that_was_started(rig: &mut Rig) {
    let mut parent = rig.attached("");
    parent.ok("listen 80 4");
    let conn = rig.dial(80, "to the program");
    parent.ok("accept");
    parent.ok("spawn self keep");
    let mut program = rig.meet("image");
    parent.ok("release");
    parent.kill();
    rig.stays(conn);
    assert_eq!(program.ok("recv 14"), "to the program");
    program.ok("send yes");
    rig.received(conn, "yes");
    program.kill();
    rig.finished(conn);
}

fn a_socket_in_flight(rig: &mut Rig) {
    let (mut first, mut second) = (rig.attached("web"), rig.attached("web"));
    first.ok("listen 80 4");
    let conn = rig.dial(80, "first,second");
    first.ok("accept");
    assert_eq!(first.ok("recv 6"), "first,");
    first.ok("share all");
    let address = rig.path("other");
    second.tell(&format!("take {} later", address.display()));
    eventually("an address", || address.exists());
    first.ok(&format!("give {}", address.display()));
    second.answer();
    first.kill();
    eventually("its burial", || rig.door().buried == 1);
    // Nobody holds it but a descriptor.
    rig.stays(conn);
    assert_eq!(second.ok("resolve"), "2");
    assert_eq!(second.ok("recv 6"), "second");
    second.ok("send third");
    rig.received(conn, "third");
    second.ok("credits 4");
    let other = rig.dial(80, "?");
    second.ok("accept");
    second.kill();
    rig.finished(conn);
    eventually("a reset", || rig.seen(other).ended == Some(CloseReason::Reset));
}

fn nobody_takes(rig: &mut Rig) {
    let mut first = rig.attached("");
    first.ok("listen 80 4");
    let conn = rig.dial(80, "");
    first.ok("accept");
    first.ok("share one");
    first.ok("release");
    rig.stays(conn);
    first.ok("unshare");
    rig.finished(conn);
}

fn another_domain(rig: &mut Rig) {
    let (mut first, mut second) = (rig.attached("one"), rig.attached("two"));
    first.ok("listen 80 4");
    let conn = rig.dial(80, "secret");
    first.ok("accept");
    first.ok("share one");
    let address = rig.path("other");
    second.tell(&format!("take {}", address.display()));
    eventually("an address", || address.exists());
    first.ok(&format!("give {}", address.display()));
    let error = second.answer();
    assert!(error.contains("there is no such connection"), "{error}");
    assert_eq!(rig.door().refused, 1);
    rig.stays(conn);
    assert_eq!(first.ok("recv 6"), "secret");
}

fn the_stack_dies(rig: &mut Rig) {
    let (stack, path) = rig.other_stack();
    let (mut client, mut idle) = (rig.puppet(), rig.puppet());
    for puppet in [&mut client, &mut idle] {
        puppet.ok(&format!("attach {} x", path.display()));
    }
    client.ok("connect 90");
    client.ok("send abc");
    client.tell("ended");
    let began = Instant::now();
    signal(stack, Signal::KILL);
    assert_eq!(client.answer(), "Reset");
    assert!(began.elapsed() < PATIENCE / 2, "it was told, and did not run into a time limit");
    let send = client.ask("send more");
    assert!(send.starts_with("error"), "{send}");
    for puppet in [&mut client, &mut idle] {
        assert_eq!(puppet.ask("connect 90"), "error: the stack is gone");
    }
}

fn a_client_that_is_stopped(rig: &mut Rig) {
    let (mut first, mut second) = (rig.attached("web"), rig.attached("web"));
    let mut neighbour = rig.attached("other");
    let listener = first.ok("listen 80 4");
    neighbour.ok("listen 81 4");
    let held = rig.dial(80, "");
    first.ok("accept");
    signal(first.pid, Signal::STOP);
    second.ok(&format!("join {listener} 4"));
    second.tell("echo");
    neighbour.tell("echo");
    // Some are offered to the one that is stopped first.
    for round in 0..20 {
        let (to_second, to_neighbour) = (rig.dial(80, "x"), rig.dial(81, "y"));
        rig.received(to_second, "x");
        rig.received(to_neighbour, "y");
        assert_eq!(rig.seen(held).ended, None, "round {round}");
    }
    // Bytes for it wait, as far as there is room.
    let much = vec![b'z'; 300_000];
    rig.tell(Tell::Send(held, much.clone()));
    let late = rig.dial(80, "x");
    rig.received(late, "x");
    signal(first.pid, Signal::CONT);
    assert_eq!(first.ok(&format!("recv {}", much.len())).as_bytes(), much);
    first.ok("send hello");
    rig.received(held, "hello");
}

fn nonsense(rig: &mut Rig) {
    let mut good = rig.attached("");
    good.ok("listen 80 4");
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
    eventually("goodbyes", || rig.door().turned_away > 100);
    let conn = rig.dial(80, "as ever");
    good.ok("accept");
    good.tell("echo");
    rig.received(conn, "as ever");
    std::thread::sleep(Duration::from_millis(1));
}
