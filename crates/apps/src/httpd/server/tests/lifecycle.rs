//! Timeouts, back-pressure, closing, request bodies and files that are read from disk.

use super::*;

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
const GET_LARGE: &[u8] = b"GET /large.bin HTTP/1.1\r\nHost: a\r\n\r\n";

// limit: httpd --linger-timeout
#[test]
fn a_silent_client_is_closed_without_response() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.pass_seconds(9);
    assert!(!fixture.has_ended());
    fixture.pass_seconds(2);
    assert!(fixture.net.finished && fixture.net.output.is_empty());
    fixture.pass_seconds(6);
    assert!(fixture.net.closed, "the client did not close within the linger time");
    assert_eq!(fixture.server.counters().timeouts, 2);
}

// limit: httpd --head-timeout
#[test]
fn a_slow_head_gets_408() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.feed(b"GET / HTTP/1.1\r\n");
    for _ in 0..9 {
        fixture.pass_seconds(1);
        fixture.feed(b"X: y\r\n"); // no byte of it extends the time
        assert!(!fixture.has_ended());
    }
    fixture.pass_seconds(2);
    assert!(fixture.take_output().starts_with("HTTP/1.1 408 Request Timeout\r\n"));
    assert!(fixture.net.finished);
    assert_eq!(fixture.server.counters().timeouts, 1);
}

#[test]
fn no_timeout_expires_early() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    let wait = |fixture: &mut ServerFixture, ms| {
        fixture.now += Duration::from_millis(ms);
        fixture.server.tick(fixture.now, &mut fixture.net);
    };
    fixture.now +=
        Duration::from_millis(1_900 - u64::from(fixture.now.as_nanos() as u32 / 1_000_000 % 1_000));
    fixture.feed(b"GET / HTTP/1.1\r\n");
    wait(&mut fixture, 9_500);
    assert!(!fixture.has_ended() && fixture.net.output.is_empty(), "half a second is left of ten");
    fixture.feed(b"Host: a\r\n\r\n");
    assert!(fixture.take_output().starts_with("HTTP/1.1 200 OK"));
    // The last tick was 0.4 s after the start of a second.
    wait(&mut fixture, 500);
    fixture.feed(GET);
    wait(&mut fixture, 59_500);
    assert!(!fixture.has_ended(), "half a second is left of a minute");
    wait(&mut fixture, 1_500);
    assert!(fixture.net.finished);
}

// limit: httpd --body-timeout
#[test]
fn an_incomplete_body_gets_408() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.feed(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc");
    fixture.pass_seconds(29);
    fixture.feed(b"d");
    fixture.pass_seconds(29);
    assert!(!fixture.has_ended() && fixture.net.output.is_empty());
    fixture.pass_seconds(2);
    let output = fixture.take_output();
    assert!(output.starts_with("HTTP/1.1 408 Request Timeout\r\n") && !output.contains("home"));
    assert_eq!(fixture.server.counters().timeouts, 1);
}

// limit: httpd --idle-timeout
#[test]
fn the_idle_timeout_starts_with_the_last_request() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    for _ in 0..5 {
        fixture.feed(GET);
        fixture.pass_seconds(50);
    }
    assert!(!fixture.has_ended());
    fixture.pass_seconds(11);
    assert!(fixture.net.finished);
    assert_eq!(fixture.server.counters().timeouts, 1);
}

// limit: httpd --send-timeout
#[test]
fn a_client_that_does_not_read_is_reset() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.net.room = 10;
    fixture.feed(GET);
    fixture.pass_seconds(59);
    assert!(!fixture.has_ended());
    fixture.make_room(1); // a little progress extends the time
    fixture.pass_seconds(59);
    assert!(!fixture.has_ended());
    fixture.pass_seconds(2);
    assert!(fixture.net.aborted);
    assert_eq!(fixture.server.counters().timeouts, 1);
}

#[test]
fn a_slow_client_is_not_idle() {
    let outer = site_directory();
    for request in [GET_LARGE, b"GET /large.bin HTTP/1.0\r\n\r\n"] {
        let mut fixture = fixture(&outer);
        fixture.feed(request);
        for kilobyte in (1..50).rev() {
            fixture.net.outstanding = Some(kilobyte << 10);
            fixture.pass_seconds(50);
            assert!(!fixture.net.closed && !fixture.net.aborted);
        }
        // The client stops acknowledging.
        fixture.pass_seconds(200);
        assert!(fixture.net.closed);
    }
}

#[test]
fn a_reused_slot_has_new_timeouts() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.pass_seconds(8);
    fixture.server.closed(CONN);
    let next = Conn::new(CONN.index(), CONN.generation() + 1);
    fixture.server.accepted(fixture.now, next);
    fixture.pass_seconds(9);
    assert!(!fixture.has_ended());
    fixture.pass_seconds(2);
    assert!(fixture.net.finished);
}

#[test]
fn a_stale_handle_does_nothing() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    let stale = Conn::new(CONN.index(), CONN.generation() - 1);
    assert_eq!(fixture.server.data(fixture.now, stale, GET, &mut fixture.net), GET.len());
    fixture.server.writable(fixture.now, stale, &mut fixture.net);
    fixture.server.peer_closed(stale, &mut fixture.net);
    fixture.server.closed(stale);
    fixture.server.closed(Conn::new(1_000_000, 0));
    assert!(fixture.net.output.is_empty() && !fixture.has_ended());
    fixture.feed(GET);
    assert!(fixture.take_output().starts_with("HTTP/1.1 200 OK"));
}

#[test]
fn pipelined_requests_wait_for_a_blocked_response() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.net.room = 100;
    fixture.feed(&GET.repeat(3));
    assert_eq!(fixture.unread.len(), 2 * GET.len());
    fixture.make_room(10);
    assert_eq!(fixture.unread.len(), 2 * GET.len());
    fixture.make_room(10_000);
    assert!(fixture.unread.is_empty());
    assert_eq!(fixture.take_output().matches("<p>home</p>").count(), 3);
}

#[test]
fn a_half_closed_client_gets_its_response() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.net.room = 10;
    fixture.feed(GET_LARGE);
    fixture.close_by_peer();
    assert!(!fixture.has_ended());
    fixture.make_room(1000);
    assert_eq!(
        fixture.net.output.len(),
        200_000 + fixture.net.output.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4
    );
    assert!(fixture.net.closed && !fixture.net.finished);
}

#[test]
fn an_incomplete_request_gets_no_response() {
    let outer = site_directory();
    for part in [&b""[..], b"GET / HT", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc"] {
        let mut fixture = fixture(&outer);
        fixture.feed(part);
        fixture.close_by_peer();
        assert!(fixture.net.closed && fixture.net.output.is_empty());
    }
}

#[test]
fn after_an_error_input_is_dropped() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.feed(b"BAD\r\n\r\n");
    fixture.feed(GET);
    fixture.feed(&[0; 5000]);
    assert!(fixture.unread.is_empty());
    let output = fixture.take_output();
    assert!(output.starts_with("HTTP/1.1 400 ") && !output.contains("200 OK"));
    assert!(fixture.net.finished && !fixture.net.closed);
    fixture.close_by_peer();
    assert!(fixture.net.closed);
}

#[test]
fn requests_after_connection_close_are_ignored() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.feed(&[b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", GET].concat());
    assert_eq!(fixture.take_output().matches("200 OK").count(), 1);
    assert!(fixture.unread.is_empty());
}

#[test]
fn expect_100_continue_is_answered_before_the_body() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.feed(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
    assert_eq!(fixture.take_output(), "HTTP/1.1 100 Continue\r\n\r\n");
    fixture.feed(b"abc");
    assert!(fixture.take_output().starts_with("HTTP/1.1 200 OK\r\n"));
    assert!(!fixture.has_ended());
}

#[test]
fn a_client_awaiting_100_gets_errors_immediately() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.feed(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
    let output = fixture.take_output();
    assert!(output.starts_with("HTTP/1.1 405 ") && output.contains("\r\nConnection: close\r\n"));
    assert!(fixture.net.finished);
}

#[test]
fn a_partial_interim_response_is_completed_first() {
    let outer = site_directory();
    for body in [&b"3\r\nabc\r\n0\r\n\r\n"[..], b"X"] {
        let mut fixture = fixture(&outer);
        fixture.net.room = 5;
        fixture
            .feed(b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n");
        fixture.feed(body);
        fixture.make_room(100_000);
        let output = fixture.take_output();
        let rest = output.strip_prefix("HTTP/1.1 100 Continue\r\n\r\n").unwrap();
        assert!(rest.starts_with(if body == b"X" { "HTTP/1.1 400 " } else { "HTTP/1.1 200 " }), "{rest}");
        assert_eq!(rest.matches("HTTP/1.1").count(), 1);
    }
}

// limit: httpd --body-max
#[test]
fn a_chunked_body_beyond_the_limit_gets_413() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.feed(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n100001\r\n");
    assert!(fixture.take_output().starts_with("HTTP/1.1 413 "));
}

#[test]
fn keep_alive_can_be_switched_off() {
    let outer = site_directory();
    let options = ServerOptions { keep_alive: false, ..ServerOptions::default() };
    let mut fixture = ServerFixture::new(&outer.path().join("root"), &SiteOptions::default(), options);
    fixture.feed(GET);
    assert!(fixture.take_output().contains("\r\nConnection: close\r\n"));
    assert!(fixture.net.finished);
}

#[test]
fn the_date_follows_the_clock() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.feed(GET);
    assert!(fixture.take_output().contains("Date: Sun, 06 Nov 1994 08:49:37 GMT"));
    fixture.now += Duration::from_millis(999);
    fixture.feed(GET);
    assert!(fixture.take_output().contains("Date: Sun, 06 Nov 1994 08:49:37 GMT"));
    fixture.now += Duration::from_millis(1);
    fixture.feed(GET);
    assert!(fixture.take_output().contains("Date: Sun, 06 Nov 1994 08:49:38 GMT"));
    fixture.server.set_clock(fixture.now, Duration::from_secs(UNIX + 100));
    fixture.feed(GET);
    assert!(fixture.take_output().contains("Date: Sun, 06 Nov 1994 08:51:17 GMT"));
}

#[test]
fn streamed_files_arrive_whole_with_any_buffer() {
    let outer = site_directory();
    for room in [1_000, 70_000, usize::MAX / 2] {
        let mut fixture = streaming_fixture(&outer);
        fixture.net.room = room;
        fixture.feed(GET_LARGE);
        while fixture.server.slot(CONN).unwrap().phase == ConnectionPhase::Sending {
            fixture.make_room(room.min(100_000));
        }
        assert!(fixture.net.output.ends_with(&large_file()));
        assert!(fixture.net.output.starts_with(b"HTTP/1.1 200 OK\r\n"));
    }
}

#[test]
fn a_streamed_file_has_current_metadata() {
    let outer = site_directory();
    let mut fixture = streaming_fixture(&outer);
    fs::write(outer.path().join("root/large.bin"), "short now").unwrap();
    fixture.feed(GET_LARGE);
    assert!(fixture.take_output().ends_with("\r\n\r\nshort now"));
    fs::remove_file(outer.path().join("root/large.bin")).unwrap();
    fixture.feed(GET_LARGE);
    assert!(fixture.take_output().starts_with("HTTP/1.1 404 "));
}

#[test]
fn a_streamed_file_that_shrinks_resets_the_connection() {
    let outer = site_directory();
    let mut fixture = streaming_fixture(&outer);
    fixture.net.room = 1_000;
    fixture.feed(GET_LARGE);
    fs::write(outer.path().join("root/large.bin"), "short").unwrap();
    fixture.make_room(1_000_000);
    assert!(fixture.net.aborted);
}

#[test]
fn draining_closes_idle_connections_and_finishes_responses() {
    let outer = site_directory();
    let mut idle = fixture(&outer);
    idle.feed(GET);
    idle.server.drain(&mut idle.net);
    assert!(idle.net.finished);

    let mut busy = fixture(&outer);
    busy.feed(&GET[..10]);
    busy.server.drain(&mut busy.net);
    assert!(!busy.has_ended());
    busy.feed(&GET[10..]);
    assert!(busy.take_output().contains("\r\nConnection: close\r\n"));
    assert_eq!(busy.server.counters().open, 1);
    busy.server.closed(CONN);
    assert_eq!(busy.server.counters().open, 0);
}

#[test]
fn draining_closes_after_a_response_that_is_being_sent() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.net.room = 10;
    fixture.feed(GET_LARGE);
    fixture.server.drain(&mut fixture.net);
    assert!(!fixture.has_ended());
    fixture.make_room(1_000_000);
    assert!(fixture.net.output.ends_with(&large_file()));
    assert!(fixture.net.finished);
}

#[test]
fn draining_closes_after_a_response_whose_request_has_a_body() {
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n";
    // In the first case, the rest of 100 (Continue) precedes the response.
    for room in [10, usize::MAX >> 1] {
        let outer = site_directory();
        let mut fixture = fixture(&outer);
        fixture.net.room = room;
        fixture.feed(REQUEST);
        assert_eq!(fixture.server.slot(CONN).unwrap().phase, ConnectionPhase::Body);
        fixture.server.drain(&mut fixture.net);
        assert!(!fixture.has_ended());
        fixture.feed(b"body");
        fixture.make_room(1_000_000);
        let output = fixture.take_output();
        let (interim, response) = output.split_once("\r\n\r\n").unwrap();
        assert_eq!(interim, "HTTP/1.1 100 Continue");
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
        assert_eq!(response.matches("\r\nConnection: close\r\n").count(), 1, "{response}");
        assert!(response.ends_with("\r\n\r\n<p>home</p>"), "{response}");
        assert!(fixture.net.finished);
    }
}

#[test]
fn draining_withdraws_keep_alive_of_http_1_0() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.feed(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 4\r\n\r\n");
    assert_eq!(fixture.server.slot(CONN).unwrap().phase, ConnectionPhase::Body);
    fixture.server.drain(&mut fixture.net);
    fixture.feed(b"body");
    let response = fixture.take_output();
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    assert_eq!(response.matches("\r\nConnection: ").count(), 1, "{response}");
    assert!(response.contains("\r\nConnection: close\r\n\r\n<p>home</p>"), "{response}");
    assert!(fixture.net.finished);
}

#[test]
fn a_record_does_not_keep_the_buffer_of_a_large_head() {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    for (filler, is_kept) in [(1_000, true), (10_000, false)] {
        let head = format!("GET / HTTP/1.1\r\nHost: a\r\nFiller: {}\r\n\r\n", "x".repeat(filler));
        let (first, second) = head.as_bytes().split_at(20);
        fixture.feed(first);
        fixture.feed(second);
        assert!(fixture.take_output().starts_with("HTTP/1.1 200 OK\r\n"));
        assert_eq!(fixture.server.exchanges.in_use(), 0);
        let capacity = fixture.server.exchanges.get(0).input.capacity();
        assert_eq!(capacity > 0, is_kept, "{capacity} bytes after a filler of {filler}");
    }
}
