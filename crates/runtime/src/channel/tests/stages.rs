//! Latency stages of sampled connections (`ginnel ss --stages`), with exact times.

use super::*;
use crate::inspect::StageRequest;
use crate::stages::{StageSampler, StageTimes};
use core::cell::Cell;
use ginnel_stack::stack::{ListCursor, SocketHandle};
use std::sync::mpsc::sync_channel;

thread_local! {
    static NOW: Cell<Instant> = const { Cell::new(Instant::ZERO) };
}

const MICROSECOND: Duration = Duration::from_micros(1);

/// Each reading of this clock takes a microsecond.
fn test_clock() -> Instant {
    NOW.with(|now| {
        now.set(now.get() + MICROSECOND);
        now.get()
    })
}

fn advance_clock(microseconds: u64) {
    NOW.with(|now| now.set(now.get() + Duration::from_micros(microseconds)));
}

fn stage(samples_us: &[u64]) -> StageTimes {
    let mut mean = Duration::from_micros(samples_us[0]);
    for sample in &samples_us[1..] {
        mean = (mean * 7 + Duration::from_micros(*sample)) / 8;
    }
    let max = Duration::from_micros(*samples_us.iter().max().unwrap());
    StageTimes { count: samples_us.len() as u32, mean, max }
}

/// Returns the engine's connections with their addresses.
fn engine_conns(fixture: &Fixture) -> Vec<(Conn, [SocketAddr; 2])> {
    let server = fixture.server.lock().unwrap();
    let mut sockets = Vec::new();
    server.core.stack.local().unwrap().list(fixture.now, ListCursor::default(), 64, &mut sockets);
    let conn = |socket: &ginnel_stack::stack::ListedSocket| match socket.handle {
        Some(SocketHandle::Conn(conn)) => Some((conn, [socket.local, socket.remote])),
        _ => None,
    };
    sockets.iter().filter_map(conn).collect()
}

fn request(fixture: &Fixture, request: StageRequest) {
    let mut server = fixture.server.lock().unwrap();
    let Shard { ports, core, handler, .. } = &mut *server;
    request.answer(ports, core, handler);
}

fn begin(fixture: &Fixture, conns: Vec<(Conn, [SocketAddr; 2])>) -> (Arc<StageSampler>, Vec<bool>) {
    let sampler = StageSampler::new(test_clock, &conns.iter().map(|(_, ends)| *ends).collect::<Vec<_>>());
    let (reply, replies) = sync_channel(1);
    request(fixture, StageRequest::Attach { sampler: sampler.clone(), reply });
    replies.recv().unwrap();
    let (reply, replies) = sync_channel(1);
    request(fixture, StageRequest::Mark { sampler: sampler.clone(), first_slot: 0, conns, reply });
    let sampled = replies.recv().unwrap();
    (sampler, sampled)
}

fn end(fixture: &Fixture, conns: Vec<Conn>) {
    let (reply, replies) = sync_channel(1);
    request(fixture, StageRequest::Unmark { conns, reply });
    replies.recv().unwrap();
    let (reply, replies) = sync_channel(1);
    request(fixture, StageRequest::Detach(reply));
    replies.recv().unwrap();
}

fn is_mirrored(fixture: &Fixture) -> bool {
    fixture.server.lock().unwrap().ports.iter().any(|port| port.is_mirrored)
}

/// Makes the peer send `text` on its first connection.
fn send_from_peer(fixture: &mut Fixture, text: &[u8]) {
    fixture.peer.with(fixture.now, |peer, cx| {
        peer.to_send[0].0.extend(text);
        let conn = peer.conns[0];
        peer.push(cx, conn);
    });
    // The peer sends in the first turn, after the shard's; the shard receives in the next one.
    fixture.run(MICROSECOND);
    fixture.run(MICROSECOND);
}

fn setup(channel: &ChannelConfig) -> (Fixture, Client, Conn) {
    let mut fixture = Fixture::new(channel, Peer::default());
    let mut client = fixture.client();
    listen(&mut client, 4);
    fixture.connect_peer(b"first");
    let conn = accepted(&fixture.events(&mut client))[0];
    let mut out = [0; 64];
    assert_eq!(client.recv(conn, &mut out), Ok(5));
    fixture.events(&mut client);
    (fixture, client, conn)
}

#[test]
fn each_stage_has_its_time() {
    let (mut fixture, mut client, conn) = setup(&ChannelConfig::default());
    let conns = engine_conns(&fixture);
    let (sampler, sampled) = begin(&fixture, conns.clone());
    assert_eq!((conns.len(), &sampled[..]), (1, &[true][..]));
    let mut out = [0; 64];
    for (read_us, answer_us) in [(300, 40), (100, 7)] {
        send_from_peer(&mut fixture, b"request");
        advance_clock(read_us);
        assert_eq!(client.recv(conn, &mut out), Ok(7));
        fixture.run(MICROSECOND);
        advance_clock(answer_us);
        assert_eq!(client.send(conn, b"response"), Ok(8));
        fixture.run(Duration::from_millis(5));
        while client.next_event().is_some() {}
    }
    assert_eq!(fixture.peer.handler().received[0], b"responseresponse");
    // Each stage ends with a reading of the clock; the first one begins with one, too. The shard also looks
    // at the clock when it delivers data, to see whether they were read already.
    let [receive, read, answer, send] = sampler.times(0);
    assert_eq!(receive, stage(&[1, 1]));
    assert_eq!(read, stage(&[302, 102]));
    assert_eq!(answer, stage(&[41, 8]));
    assert_eq!(send, stage(&[1, 1]));
}

#[test]
fn answer_in_one_turn_with_its_read_takes_no_time() {
    let (mut fixture, mut client, conn) = setup(&ChannelConfig::default());
    let (sampler, _) = begin(&fixture, engine_conns(&fixture));
    send_from_peer(&mut fixture, b"request");
    advance_clock(10);
    let mut out = [0; 64];
    assert_eq!(client.recv(conn, &mut out), Ok(7));
    assert_eq!(client.send(conn, b"response"), Ok(8));
    fixture.run(Duration::from_millis(5));
    let [_, read, answer, send] = sampler.times(0);
    assert_eq!([read, answer, send], [stage(&[12]), stage(&[0]), stage(&[1])]);
}

#[test]
fn nothing_is_left_after_the_end() {
    let (mut fixture, mut client, conn) = setup(&ChannelConfig::default());
    let conns = engine_conns(&fixture);
    let (sampler, _) = begin(&fixture, conns.clone());
    assert!(is_mirrored(&fixture));
    end(&fixture, conns.iter().map(|(conn, _)| *conn).collect());
    assert!(!is_mirrored(&fixture));
    let readings = NOW.with(Cell::get);
    send_from_peer(&mut fixture, b"request");
    let mut out = [0; 64];
    assert_eq!(client.recv(conn, &mut out), Ok(7));
    assert_eq!(client.send(conn, b"response"), Ok(8));
    fixture.run(Duration::from_millis(5));
    assert_eq!(fixture.peer.handler().received[0], b"response");
    assert_eq!((sampler.times(0), NOW.with(Cell::get)), ([StageTimes::default(); 4], readings));
    assert_eq!(Arc::strong_count(&sampler), 1);
}

#[test]
fn unknown_connections_are_not_sampled() {
    let (fixture, ..) = setup(&ChannelConfig::default());
    let (conn, [local, remote]) = engine_conns(&fixture)[0];
    let gone = Conn::new(conn.index(), conn.generation() + 1);
    let (_, sampled) = begin(&fixture, vec![(gone, [local, remote]), (conn, [remote, local])]);
    assert_eq!(sampled, [false, false]);
}

/// The window that the peer gets is the one that it would get without the sampler.
#[test]
fn sampled_connection_advertises_the_usual_window() {
    let sent = |is_sampled: bool| {
        let mut fixture = Fixture::new(&small_config(), Peer::default());
        let mut client = fixture.client();
        listen(&mut client, 1);
        fixture.connect_peer(&vec![7; 1_000_000]);
        let conn = accepted(&fixture.events(&mut client))[0];
        let conns = engine_conns(&fixture);
        if is_sampled {
            begin(&fixture, conns.clone());
        }
        let (mut out, mut progress) = (vec![0; 3000], Vec::new());
        for round in 0..60 {
            fixture.run(Duration::from_millis(50));
            if round == 40 && is_sampled {
                end(&fixture, conns.iter().map(|(conn, _)| *conn).collect());
            }
            progress.push((client.recv(conn, &mut out), fixture.peer.handler().to_send[0].1));
        }
        progress
    };
    assert_eq!(sent(true), sent(false));
}

#[test]
fn read_in_two_calls_ends_with_the_second() {
    let (mut fixture, mut client, conn) = setup(&ChannelConfig::default());
    let (sampler, _) = begin(&fixture, engine_conns(&fixture));
    send_from_peer(&mut fixture, b"request");
    let mut out = [0; 64];
    advance_clock(100);
    assert_eq!(client.recv(conn, &mut out[..2]), Ok(2));
    fixture.run(MICROSECOND);
    advance_clock(200);
    assert_eq!(client.recv(conn, &mut out), Ok(5));
    fixture.run(MICROSECOND);
    advance_clock(20_000);
    assert_eq!(client.send(conn, b"response"), Ok(8));
    fixture.run(Duration::from_millis(5));
    let [_, read, answer, _] = sampler.times(0);
    // The shard looked at the clock three times more: at the arrival, and twice after the first read.
    assert_eq!([read, answer], [stage(&[304]), stage(&[20_001])]);
}

#[test]
fn undelivered_bytes_are_on_their_way_until_read() {
    let (mut fixture, mut client, conn) = setup(&small_config());
    let (sampler, _) = begin(&fixture, engine_conns(&fixture));
    send_from_peer(&mut fixture, &[7; 3000]);
    fixture.run(Duration::from_millis(5));
    let [before, ..] = sampler.times(0);
    assert!(before.count > 0 && before.max < Duration::from_micros(100), "{before:?}");
    // The buffer has no space for all of these bytes, nor for those after them.
    for _ in 0..2 {
        send_from_peer(&mut fixture, &[7; 1400]);
        fixture.run(Duration::from_millis(5));
    }
    let [blocked, ..] = sampler.times(0);
    assert_eq!(client.readable(conn), Ok(4096));
    assert_eq!(blocked, before, "no byte of them counts as delivered");
    advance_clock(50_000);
    let mut out = vec![0; 8192];
    assert_eq!(client.recv(conn, &mut out), Ok(4096));
    fixture.run(Duration::from_millis(5));
    assert_eq!(client.recv(conn, &mut out), Ok(3000 + 2 * 1400 - 4096));
    let [after, ..] = sampler.times(0);
    assert_eq!(after.count, before.count + 1);
    assert!(after.max >= Duration::from_millis(50), "{after:?}");
}

#[test]
fn shard_undoes_what_nobody_waits_for() {
    let (mut fixture, mut client, conn) = setup(&ChannelConfig::default());
    let conns = engine_conns(&fixture);
    let sampler = StageSampler::new(test_clock, &[conns[0].1]);
    let (reply, replies) = sync_channel(1);
    drop(replies);
    request(&fixture, StageRequest::Attach { sampler: sampler.clone(), reply });
    let (reply, replies) = sync_channel(1);
    drop(replies);
    request(&fixture, StageRequest::Mark { sampler: sampler.clone(), first_slot: 0, conns, reply });
    assert_eq!((is_mirrored(&fixture), Arc::strong_count(&sampler)), (false, 1));
    let readings = NOW.with(Cell::get);
    send_from_peer(&mut fixture, b"request");
    assert_eq!(client.recv(conn, &mut [0; 64]), Ok(7));
    fixture.run(Duration::from_millis(5));
    assert_eq!(NOW.with(Cell::get), readings, "nothing is measured");
}

#[test]
fn nothing_is_left_of_a_connection_that_closed() {
    let (mut fixture, mut client, conn) = setup(&ChannelConfig::default());
    let conns = engine_conns(&fixture);
    let (sampler, _) = begin(&fixture, conns.clone());
    assert!(Arc::strong_count(&sampler) > 1);
    client.close(conn).unwrap();
    let events = fixture.events(&mut client);
    assert_eq!(events.last(), Some(&ClientEvent::Closed { conn, reason: CloseReason::Normal }));
    // The client still owns the socket.
    end(&fixture, vec![conns[0].0]);
    assert_eq!((fixture.sockets_in_use(), Arc::strong_count(&sampler)), (1, 1));
}

#[test]
fn bytes_that_waited_before_are_no_answer() {
    let (mut fixture, mut client, conn) = setup(&small_config());
    let (sampler, _) = begin(&fixture, engine_conns(&fixture));
    send_from_peer(&mut fixture, b"request");
    // The peer acknowledges nothing, so the engine's buffer gets full, then the region.
    let poll = |fixture: &Fixture| fixture.server.lock().unwrap().poll_once(fixture.now).unwrap();
    while client.send(conn, &[1; 4096]).unwrap() > 0 {
        poll(&fixture);
    }
    advance_clock(100);
    assert_eq!(client.recv(conn, &mut [0; 64]), Ok(7));
    poll(&fixture);
    let [_, read, answer, _] = sampler.times(0);
    assert_eq!((read.count, answer.count), (1, 0));
    fixture.run(SECOND);
    while client.next_event().is_some() {}
    advance_clock(500);
    assert_eq!(client.send(conn, b"late"), Ok(4));
    fixture.run(Duration::from_millis(5));
    let [.., answer, _] = sampler.times(0);
    assert_eq!(answer.count, 1);
    assert!(answer.max > Duration::from_micros(500), "{answer:?}");
}

/// A frame that came by another shard did not pass the layers.
#[test]
fn read_without_a_known_frame_has_its_time() {
    let (mut fixture, mut client, conn) = setup(&ChannelConfig::default());
    let (sampler, _) = begin(&fixture, engine_conns(&fixture));
    let (reply, replies) = sync_channel(1);
    request(&fixture, StageRequest::Detach(reply));
    replies.recv().unwrap();
    send_from_peer(&mut fixture, b"request");
    advance_clock(70);
    assert_eq!(client.recv(conn, &mut [0; 64]), Ok(7));
    fixture.run(MICROSECOND);
    let [receive, read, ..] = sampler.times(0);
    assert_eq!((receive.count, read), (0, stage(&[72])));
}
