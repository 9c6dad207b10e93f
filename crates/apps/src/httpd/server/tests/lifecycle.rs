//! Time-outs, back-pressure, closing, bodies, streaming.

use super::*;

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
const GET_LARGE: &[u8] = b"GET /large.bin HTTP/1.1\r\nHost: a\r\n\r\n";

// limit: httpd --linger-timeout
#[test]
fn a_client_that_says_nothing_is_closed_in_silence() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.pass(9);
    assert!(!rig.ended());
    rig.pass(2);
    assert!(rig.net.finished && rig.net.output.is_empty());
    rig.pass(6);
    assert!(rig.net.closed, "the client did not close within the linger time");
    assert_eq!(rig.server.counters().timeouts, 2);
}

// limit: httpd --head-timeout
#[test]
fn a_head_that_trickles_in_gets_408() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.feed(b"GET / HTTP/1.1\r\n");
    for _ in 0..9 {
        rig.pass(1);
        rig.feed(b"X: y\r\n"); // no byte of it extends the time
        assert!(!rig.ended());
    }
    rig.pass(2);
    assert!(rig.take().starts_with("HTTP/1.1 408 Request Timeout\r\n"));
    assert!(rig.net.finished);
    assert_eq!(rig.server.counters().timeouts, 1);
}

#[test]
fn nobody_gets_less_time_than_was_granted() {
    let outer = tree();
    let mut rig = rig(&outer);
    let wait = |rig: &mut Rig, ms| {
        rig.now += Duration::from_millis(ms);
        rig.server.tick(rig.now, &mut rig.net);
    };
    rig.now += Duration::from_millis(1_900 - u64::from(rig.now.as_nanos() as u32 / 1_000_000 % 1_000));
    rig.feed(b"GET / HTTP/1.1\r\n");
    wait(&mut rig, 9_500);
    assert!(!rig.ended() && rig.net.output.is_empty(), "half a second is left of ten");
    rig.feed(b"Host: a\r\n\r\n");
    assert!(rig.take().starts_with("HTTP/1.1 200 OK"));
    // The last tick was 0.4 s after a second began.
    wait(&mut rig, 500);
    rig.feed(GET);
    wait(&mut rig, 59_500);
    assert!(!rig.ended(), "half a second is left of a minute");
    wait(&mut rig, 1_500);
    assert!(rig.net.finished);
}

// limit: httpd --body-timeout
#[test]
fn a_body_that_stops_gets_408_and_nothing_of_its_answer() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.feed(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc");
    rig.pass(29);
    rig.feed(b"d");
    rig.pass(29);
    assert!(!rig.ended() && rig.net.output.is_empty());
    rig.pass(2);
    let output = rig.take();
    assert!(output.starts_with("HTTP/1.1 408 Request Timeout\r\n") && !output.contains("home"));
    assert_eq!(rig.server.counters().timeouts, 1);
}

// limit: httpd --idle-timeout
#[test]
fn an_idle_connection_is_closed_after_the_idle_time_counted_from_the_last_request() {
    let outer = tree();
    let mut rig = rig(&outer);
    for _ in 0..5 {
        rig.feed(GET);
        rig.pass(50);
    }
    assert!(!rig.ended());
    rig.pass(11);
    assert!(rig.net.finished);
    assert_eq!(rig.server.counters().timeouts, 1);
}

// limit: httpd --send-timeout
#[test]
fn a_client_that_does_not_read_is_reset() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.net.room = 10;
    rig.feed(GET);
    rig.pass(59);
    assert!(!rig.ended());
    rig.make_room(1); // a little progress extends the time
    rig.pass(59);
    assert!(!rig.ended());
    rig.pass(2);
    assert!(rig.net.aborted);
    assert_eq!(rig.server.counters().timeouts, 1);
}

#[test]
fn a_slow_client_is_not_an_idle_one() {
    let outer = tree();
    for request in [GET_LARGE, b"GET /large.bin HTTP/1.0\r\n\r\n"] {
        let mut rig = rig(&outer);
        rig.feed(request);
        for kilobyte in (1..50).rev() {
            rig.net.outstanding = Some(kilobyte << 10);
            rig.pass(50);
            assert!(!rig.net.closed && !rig.net.aborted);
        }
        // It stops taking anything.
        rig.pass(200);
        assert!(rig.net.closed);
    }
}

#[test]
fn the_slots_next_connection_has_its_own_time() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.pass(8);
    rig.server.closed(CONN);
    let next = Conn::new(CONN.index(), CONN.generation() + 1);
    rig.server.accepted(rig.now, next);
    rig.pass(9);
    assert!(!rig.ended());
    rig.pass(2);
    assert!(rig.net.finished);
}

#[test]
fn a_handle_of_a_former_connection_does_nothing() {
    let outer = tree();
    let mut rig = rig(&outer);
    let stale = Conn::new(CONN.index(), CONN.generation() - 1);
    assert_eq!(rig.server.data(rig.now, stale, GET, &mut rig.net), GET.len());
    rig.server.writable(rig.now, stale, &mut rig.net);
    rig.server.peer_closed(stale, &mut rig.net);
    rig.server.closed(stale);
    rig.server.closed(Conn::new(1_000_000, 0));
    assert!(rig.net.output.is_empty() && !rig.ended());
    rig.feed(GET);
    assert!(rig.take().starts_with("HTTP/1.1 200 OK"));
}

#[test]
fn requests_wait_unread_while_a_response_waits_for_room() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.net.room = 100;
    rig.feed(&GET.repeat(3));
    assert_eq!(rig.unread.len(), 2 * GET.len());
    rig.make_room(10);
    assert_eq!(rig.unread.len(), 2 * GET.len());
    rig.make_room(10_000);
    assert!(rig.unread.is_empty());
    assert_eq!(rig.take().matches("<p>home</p>").count(), 3);
}

#[test]
fn a_client_that_half_closes_gets_its_answer() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.net.room = 10;
    rig.feed(GET_LARGE);
    rig.peer_closes();
    assert!(!rig.ended());
    rig.make_room(1000);
    assert_eq!(
        rig.net.output.len(),
        200_000 + rig.net.output.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4
    );
    assert!(rig.net.closed && !rig.net.finished);
}

#[test]
fn a_client_that_closes_in_the_middle_of_a_request_gets_nothing() {
    let outer = tree();
    for part in [&b""[..], b"GET / HT", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc"] {
        let mut rig = rig(&outer);
        rig.feed(part);
        rig.peer_closes();
        assert!(rig.net.closed && rig.net.output.is_empty());
    }
}

#[test]
fn after_an_error_input_is_dropped_until_the_client_closes() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.feed(b"BAD\r\n\r\n");
    rig.feed(GET);
    rig.feed(&[0; 5000]);
    assert!(rig.unread.is_empty());
    let output = rig.take();
    assert!(output.starts_with("HTTP/1.1 400 ") && !output.contains("200 OK"));
    assert!(rig.net.finished && !rig.net.closed);
    rig.peer_closes();
    assert!(rig.net.closed);
}

#[test]
fn requests_behind_one_that_closes_are_not_answered() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.feed(&[b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", GET].concat());
    assert_eq!(rig.take().matches("200 OK").count(), 1);
    assert!(rig.unread.is_empty());
}

#[test]
fn expect_100_continue_is_answered_before_the_body() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.feed(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
    assert_eq!(rig.take(), "HTTP/1.1 100 Continue\r\n\r\n");
    rig.feed(b"abc");
    assert!(rig.take().starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(!rig.ended());
}

#[test]
fn a_client_that_waits_learns_of_an_error_at_once() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
    let output = rig.take();
    assert!(output.starts_with("HTTP/1.1 405 ") && output.contains("\r\nConnection: close\r\n"));
    assert!(rig.net.finished);
}

#[test]
fn an_interim_response_that_did_not_fit_is_completed_first() {
    let outer = tree();
    for body in [&b"3\r\nabc\r\n0\r\n\r\n"[..], b"X"] {
        let mut rig = rig(&outer);
        rig.net.room = 5;
        rig.feed(b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n");
        rig.feed(body);
        rig.make_room(100_000);
        let output = rig.take();
        let rest = output.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap();
        assert!(rest.starts_with(if body == b"X" { "HTTP/1.1 400 " } else { "HTTP/1.1 200 " }), "{rest}");
        assert_eq!(rest.matches("HTTP/1.1").count(), 1);
    }
}

// limit: httpd --body-max
#[test]
fn a_chunked_body_beyond_the_limit_gets_413() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.feed(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n100001\r\n");
    assert!(rig.take().starts_with("HTTP/1.1 413 "));
}

#[test]
fn keep_alive_can_be_switched_off() {
    let outer = tree();
    let options = ServerOptions { keep_alive: false, ..ServerOptions::default() };
    let mut rig = Rig::new(&outer.path().join("root"), &SiteOptions::default(), options);
    rig.feed(GET);
    assert!(rig.take().contains("\r\nConnection: close\r\n"));
    assert!(rig.net.finished);
}

#[test]
fn the_date_follows_the_clock() {
    let outer = tree();
    let mut rig = rig(&outer);
    rig.feed(GET);
    assert!(rig.take().contains("Date: Sun, 06 Nov 1994 08:49:37 GMT"));
    rig.now += Duration::from_millis(999);
    rig.feed(GET);
    assert!(rig.take().contains("Date: Sun, 06 Nov 1994 08:49:37 GMT"));
    rig.now += Duration::from_millis(1);
    rig.feed(GET);
    assert!(rig.take().contains("Date: Sun, 06 Nov 1994 08:49:38 GMT"));
    rig.server.set_clock(rig.now, Duration::from_secs(UNIX + 100));
    rig.feed(GET);
    assert!(rig.take().contains("Date: Sun, 06 Nov 1994 08:51:17 GMT"));
}

#[test]
fn streamed_files_arrive_whole_in_any_room() {
    let outer = tree();
    for room in [1_000, 70_000, usize::MAX / 2] {
        let mut rig = rig_streamed(&outer);
        rig.net.room = room;
        rig.feed(GET_LARGE);
        while rig.server.slot(CONN).unwrap().phase == Phase::Sending {
            rig.make_room(room.min(100_000));
        }
        assert!(rig.net.output.ends_with(&large()));
        assert!(rig.net.output.starts_with(b"HTTP/1.1 200 OK\r\n"));
    }
}

#[test]
fn a_streamed_file_is_described_as_it_is_now() {
    let outer = tree();
    let mut rig = rig_streamed(&outer);
    fs::write(outer.path().join("root/large.bin"), "short now").unwrap();
    rig.feed(GET_LARGE);
    assert!(rig.take().ends_with("\r\n\r\nshort now"));
    fs::remove_file(outer.path().join("root/large.bin")).unwrap();
    rig.feed(GET_LARGE);
    assert!(rig.take().starts_with("HTTP/1.1 404 "));
}

#[test]
fn a_streamed_file_that_shrinks_resets_the_connection() {
    let outer = tree();
    let mut rig = rig_streamed(&outer);
    rig.net.room = 1_000;
    rig.feed(GET_LARGE);
    fs::write(outer.path().join("root/large.bin"), "short").unwrap();
    rig.make_room(1_000_000);
    assert!(rig.net.aborted);
}

#[test]
fn on_leaving_idle_connections_close_and_busy_ones_get_their_answer() {
    let outer = tree();
    let mut idle = rig(&outer);
    idle.feed(GET);
    idle.server.leave(&mut idle.net);
    assert!(idle.net.finished);

    let mut busy = rig(&outer);
    busy.feed(&GET[..10]);
    busy.server.leave(&mut busy.net);
    assert!(!busy.ended());
    busy.feed(&GET[10..]);
    assert!(busy.take().contains("\r\nConnection: close\r\n"));
    assert_eq!(busy.server.counters().open, 1);
    busy.server.closed(CONN);
    assert_eq!(busy.server.counters().open, 0);
}
