//! Send and receive buffers, and their memory.

use super::common::{ACK, FIN, config, established};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::device::{RxBurst, RxFrame};
use ginnel_stack::error::{RecvError, SendError};
use ginnel_stack::events::Event;
use ginnel_stack::handle::PortId;
use ginnel_stack::tcp::source::Source;
use ginnel_stack::wire::tcp::TcpOptions;
use ginnel_testkit::scripted_peer::{PORT, ScriptedPeer, SentSegment};
use ginnel_testkit::sim::{HostConfig, LinkModel, Sim};

#[test]
fn acknowledged_burst_data_has_reserved_memory() {
    let mut tight = config();
    tight.tcp.buffer_pool_bytes = 1 << 16;
    let mut p = established(tight);
    let conn = p.conn.unwrap();
    let bytes = p.segment(ACK, 1, 1, b"must not be lost", &TcpOptions::default());
    let mut burst = RxBurst::new();
    burst.push(RxFrame::new(&bytes));
    p.stack.receive(p.now, PortId(0), &burst);
    while let Some(event) = p.stack.next_event() {
        if let Event::Data { conn, data } = event {
            p.stack.send(conn, &[1; 1 << 17]).unwrap();
            p.stack.consume(conn, data, 0, &burst);
        }
    }
    p.stack.finish_burst(&burst);
    let mut read = [0; 64];
    assert_eq!(p.stack.recv(conn, &mut read), Ok(16));
}

#[test]
fn sender_without_memory_gets_writable_event() {
    let mut tight = config();
    tight.tcp.buffer_pool_bytes = 1 << 16;
    let mut p = established(tight);
    let (first, first_iss) = (p.conn.unwrap(), p.iss);
    p.ports.1 = 40_001;
    let second = p.open(&TcpOptions { mss: Some(1000), ..TcpOptions::default() });
    let accepted = p.stack.send(first, &[1; 1 << 17]).unwrap();
    assert_eq!(
        p.stack.send(second, &[2; 1 << 17]),
        Ok(8192),
        "the last quarter of the pool is shared in small parts"
    );
    assert_eq!(p.stack.send(second, &[2; 100]), Ok(0));
    p.ports.1 = 40_000;
    p.iss = first_iss;
    let of_first = |sent: &[SentSegment]| -> i64 {
        sent.iter().filter(|s| s.header.dst_port == 40_000).map(|s| s.payload.len() as i64).sum()
    };
    let mut at = 1 + of_first(&p.flush());
    for _ in 0..200 {
        at += of_first(&p.deliver(ACK, 1, at, &[]));
    }
    assert_eq!(at, 1 + accepted as i64);
    p.wait(Duration::from_secs(1));
    assert!(p.events.contains(&Event::Writable { conn: second }), "{:?}", p.events);
}

struct ConstantSource(u64);

impl Source for ConstantSource {
    fn len(&self) -> u64 {
        self.0
    }

    fn fill(&self, _offset: u64, out: &mut [u8]) {
        out.fill(9);
    }
}

// limit: bytes queued on a connection
#[test]
fn oversized_source_slice_is_invalid() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let source = p.stack.add_source(Box::new(ConstantSource(u64::MAX)));
    assert_eq!(p.stack.send_source(conn, source, 0, (1 << 30) + 1), Err(SendError::InvalidSource));
    p.stack.send(conn, b"x").unwrap();
    assert_eq!(p.stack.send_source(conn, source, 0, u64::MAX), Err(SendError::InvalidSource));
    assert_eq!(p.stack.send_source(conn, source, 0, 1 << 20), Ok(()));
}

#[test]
fn readable_includes_burst_data_buffered_does_not() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let (first, second) = (
        p.segment(ACK, 1, 1, b"abc", &TcpOptions::default()),
        p.segment(ACK, 4, 1, b"defgh", &TcpOptions::default()),
    );
    let mut burst = RxBurst::new();
    for bytes in [&first, &second] {
        burst.push(RxFrame::new(bytes));
    }
    let mut read = [0; 16];
    p.stack.receive(p.now, PortId(0), &burst);
    assert_eq!((p.stack.readable(conn), p.stack.buffered(conn)), (8, 0));
    assert_eq!(p.stack.recv(conn, &mut read), Err(RecvError::WouldBlock));
    // The event passes its bytes to the application, so they are not counted any more.
    let Some(Event::Data { data, .. }) = p.stack.next_event() else { panic!("no data") };
    assert_eq!((p.stack.readable(conn), p.stack.buffered(conn)), (5, 0));
    p.stack.consume(conn, data, 1, &burst);
    let buffered = p.stack.buffered(conn);
    assert!(buffered >= 2, "the rest of the first segment is buffered");
    assert_eq!(p.stack.readable(conn), 7);
    p.stack.finish_burst(&burst);
    assert_eq!((p.stack.readable(conn), p.stack.buffered(conn)), (7, 7));
    assert_eq!(p.stack.recv(conn, &mut read), Ok(7));
    assert_eq!(&read[..7], b"bcdefgh");
}

#[test]
fn exhausted_buffer_pool_loses_nothing() {
    let mut tight = HostConfig { defer_reads: true, ..HostConfig::default() };
    tight.stack.tcp.buffer_pool_bytes = 1 << 17;
    let mut sim = Sim::pair_with(2, HostConfig::default(), tight, LinkModel::default());
    sim.hosts[1].listen(80);
    let to = SocketAddr::new(sim.hosts[1].v4.into(), 80);
    let now = sim.now;
    let all: Vec<u8> = (0..1u32 << 20).map(|i| (i * 7) as u8).collect();
    let conn = sim.hosts[0].connect(now, to);
    sim.hosts[0].send_all(now, conn, all.clone(), false);
    sim.collect(0);
    sim.run(Duration::from_secs(5));
    let served = sim.hosts[1].accepted[0];
    for _ in 0..3000 {
        while sim.hosts[1].read(served, 1 << 14) > 0 {}
        let now = sim.now;
        sim.hosts[1].stack.transmit(now);
        sim.collect(1);
        sim.run(Duration::from_millis(100));
        if sim.hosts[1].received[&served].bytes.len() == all.len() {
            break;
        }
    }
    let got = &sim.hosts[1].received[&served].bytes;
    assert_eq!(got.len(), all.len(), "{:?}", sim.hosts[0].stack.info(conn));
    assert!(*got == all, "bytes are out of order");
}

#[test]
fn the_receive_buffer_counts_bytes_not_packets() {
    let mut small = config();
    small.tcp.recv_buffer_bytes = 16_384;
    let mut p = established(small);
    p.defer_reads = true;
    for at in 1..=5000 {
        p.deliver(ACK, at, 1, b"a");
    }
    let info = p.stack.info(p.conn.unwrap()).unwrap();
    assert_eq!(info.recv_queued, 5000, "5,000 tiny segments fit into 16 KiB");
}

#[test]
fn late_event_processing_loses_no_event() {
    const CONNECTIONS: u16 = 2000;
    let mut p = ScriptedPeer::new(config());
    p.listen();
    let opened: Vec<_> = (0..CONNECTIONS)
        .map(|i| {
            p.ports = (PORT, 10_000 + i);
            (p.open(&TcpOptions::default()), p.iss)
        })
        .collect();
    p.events.clear();
    for (i, (_, iss)) in (0..CONNECTIONS).zip(&opened) {
        p.ports = (PORT, 10_000 + i);
        p.iss = *iss;
        let last = p.segment(FIN | ACK, 1, 1, b"x", &TcpOptions::default());
        p.receive_without_events(&[last]);
    }
    p.flush();
    for (conn, _) in opened {
        let event_count = |event: Event| p.events.iter().filter(|e| **e == event).count();
        assert_eq!(
            (event_count(Event::Readable { conn }), event_count(Event::PeerClosed { conn })),
            (1, 1),
            "{conn:?}"
        );
    }
    assert_eq!(p.read.len(), usize::from(CONNECTIONS));
}
