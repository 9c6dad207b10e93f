//! Labels of frames: the flow hash saves work and never loses a frame, and frames with priority are processed
//! first. Two stacks over memif.

use super::control::turn;
use super::{Fixture, RecordingHandler, START, shards_and_device, stack_config};
use crate::context::Context;
use crate::error::Error;
use crate::handler::Handler;
use crate::shards::Shards;
use core::time::Duration;
use ginnel_devices::memif::{self, MemifConfig, Role, SocketName};
use ginnel_devices::memory::RssMode;
use ginnel_stack::device::{Capabilities, Device, GatherTx, Label, PayloadPiece, TxMeta, TxQueue};
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener, PortId};
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::steering::{FrameOwner, Steering};
use ginnel_stack::time::Instant;
use std::sync::atomic::{AtomicU32, Ordering};

/// Returns a TCP segment to a port of the shards without listener.
fn segment(src_port: u16) -> Vec<u8> {
    let mut frame =
        vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0];
    frame.extend([10, 0, 0, 2, 10, 0, 0, 1]);
    frame.extend(src_port.to_be_bytes());
    frame.extend([0, 99, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0, 0, 0, 0, 0, 0]);
    frame
}

/// Whatever the hash in its label, a frame goes to the shard of its addresses and ports, and is forwarded at
/// most once. A correct hash is not computed again if the frame stays.
#[test]
fn frame_reaches_its_shard_whatever_its_hash() {
    let config = stack_config(3);
    let steering = Steering::new(0, 3, &config.network);
    let (mut shards, mut wire) =
        shards_and_device(config, RssMode::Fixed(0), |_| RecordingHandler::default());
    let mut now = START + Duration::from_secs(5);
    turn(&mut shards, now);
    let mut seen = 0;
    for hash in 0..9 {
        for port in 1000..1010 {
            let before: Vec<_> = shards.iter().map(|shard| *shard.stats()).collect();
            let frame = with_checksums(segment(port));
            let FrameOwner::Shard(owner) = steering.owner_of_bytes(PortId(0), &frame) else {
                panic!("the frame must have one owner")
            };
            wire.tx.reserve(frame.len()).unwrap().copy_from_slice(&frame);
            wire.tx.commit(frame.len(), TxMeta { label: Label::new(Some(hash), 2), ..TxMeta::NONE });
            wire.tx.flush(now);
            for _ in 0..2 {
                now += Duration::from_millis(1);
                turn(&mut shards, now);
            }
            let hops: Vec<u64> = shards
                .iter()
                .zip(&before)
                .map(|(shard, b)| shard.stats().forwards_received - b.forwards_received)
                .collect();
            let expected: Vec<u64> = (0..3).map(|shard| u64::from(shard == owner && owner != 0)).collect();
            assert_eq!(hops, expected, "hash {hash}, port {port}");
            let (was, is) = (before[0], shards[0].stats());
            let taken = u64::from(hash % 3 == 0 && owner == 0);
            let wrong = u64::from(hash % 3 != u32::from(owner));
            assert_eq!(
                (is.hashes_trusted - was.hashes_trusted, is.hashes_mismatched - was.hashes_mismatched),
                (taken, wrong)
            );
            seen |= 1 << (owner * 2 + u8::from(wrong == 1));
        }
    }
    assert_eq!(seen, 0b11_1111, "every owner, with correct and wrong hashes");
    // No listener: each segment was answered once.
    assert_eq!(shards.iter().map(resets).sum::<u64>(), 90);
}

fn resets<H: Handler>(shard: &crate::shard::Shard<H>) -> u64 {
    shard.core.stack.local().unwrap().tcp_stats().resets_out
}

/// Returns the frame with correct checksums.
fn with_checksums(mut frame: Vec<u8>) -> Vec<u8> {
    let sum = |bytes: &mut dyn Iterator<Item = u8>| {
        let bytes: Vec<u8> = bytes.collect();
        let mut sum: u32 =
            bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        (!sum as u16).to_be_bytes()
    };
    let ip = sum(&mut frame[14..34].iter().copied());
    frame[24..26].copy_from_slice(&ip);
    let tcp = sum(&mut frame[26..].iter().copied().chain([0, 6, 0, 20]));
    frame[50..52].copy_from_slice(&tcp);
    frame
}

/// Echoes, and records the order of what it receives.
#[derive(Default)]
pub(super) struct Echo {
    pub(super) got: Vec<u8>,
    closed: Vec<CloseReason>,
}

impl Handler for Echo {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("[::]:80".parse().unwrap(), ListenOptions::default()).map(|_| ())
    }

    fn accepted(&mut self, _: &mut Context<'_>, _: Conn, _: Listener) {}

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        self.got.push(data[0]);
        assert_eq!(cx.send(conn, data), Ok(data.len()));
        data.len()
    }

    fn closed(&mut self, _: &mut Context<'_>, _: Conn, reason: CloseReason) {
        self.closed.push(reason);
    }
}

/// Opens connections over both families.
#[derive(Default)]
pub(super) struct RequestClient {
    pub(super) conns: Vec<Conn>,
    pub(super) connected: usize,
    /// First bytes of the echoes, in order.
    pub(super) got: Vec<u8>,
    closed: Vec<CloseReason>,
}

impl RequestClient {
    pub(super) fn open(&mut self, cx: &mut Context<'_>, count: usize) {
        for number in 0..count {
            let to = if number % 3 == 2 { "[fd00::1]:80" } else { "10.0.0.1:80" };
            self.conns.push(cx.connect(to.parse().unwrap(), ConnectOptions::default()).unwrap());
        }
    }
}

impl Handler for RequestClient {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn connected(&mut self, _: &mut Context<'_>, _: Conn) {
        self.connected += 1;
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        self.got.push(data[0]);
        data.len()
    }

    fn closed(&mut self, _: &mut Context<'_>, _: Conn, reason: CloseReason) {
        self.closed.push(reason);
    }
}

/// How the peer changes the labels of its stack.
type RewriteLabel = fn(Label) -> Label;

/// A device that changes labels.
struct ForgedHashTx(Box<dyn TxQueue + Send>, RewriteLabel);

impl TxQueue for ForgedHashTx {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.0.reserve(len)
    }
    fn commit(&mut self, len: usize, meta: TxMeta) {
        self.0.commit(len, TxMeta { label: (self.1)(meta.label), ..meta });
    }
    fn gather(&mut self) -> Option<&mut dyn GatherTx> {
        Some(self)
    }
    fn flush(&mut self, now: Instant) {
        self.0.flush(now);
    }
}

impl GatherTx for ForgedHashTx {
    fn commit_gathered(
        &mut self,
        head: usize,
        pieces: &mut dyn Iterator<Item = PayloadPiece<'_>>,
        meta: TxMeta,
    ) {
        let gather = self.0.gather().expect("memif supports gathering");
        gather.commit_gathered(head, pieces, TxMeta { label: (self.1)(meta.label), ..meta });
    }
}

/// Creates `count` shards and a client in this process, connected by memif.
fn over_memif(count: u32, offload: bool, rewrite: RewriteLabel) -> Fixture<Echo, RequestClient> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("ginnel-labels-{}-{number}", std::process::id());
    let [server, client] = [Role::Server, Role::Client].map(|role| {
        let config = MemifConfig::new(SocketName::Abstract(name.clone()), role);
        memif::open(&MemifConfig { queues: count as u16, offload, ..config }).unwrap()
    });
    assert!(server.link.wait_for(true, Duration::from_secs(10)));
    assert!(client.link.wait_for(true, Duration::from_secs(10)));
    let Device { rx, tx } = client.into_single_device().unwrap();
    let far = Device { rx, tx: Box::new(ForgedHashTx(tx, rewrite)) };
    let opened = Shards::new(stack_config(count)).device("cable", server.queues).seed([1; 32]).now(START);
    let shards = opened.open().unwrap().build(|_| Ok(Echo::default())).unwrap();
    let mut fixture = Fixture::with_devices((shards, far), RequestClient::default());
    // Until duplicate address detection has finished.
    fixture.advance(Duration::from_secs(5));
    fixture
}

/// Opens connections, sends three requests on each, and closes them. Returns the number of frames that the
/// shards received.
fn exchange_requests(fixture: &mut Fixture<Echo, RequestClient>, count: usize) -> u64 {
    fixture.client.with(fixture.now, |client, cx| client.open(cx, count));
    assert!(fixture.run_until(Duration::from_secs(1), |_, client| client.connected == count));
    for round in 1..=3 {
        fixture.client.with(fixture.now, |client, cx| {
            for (number, conn) in client.conns.iter().enumerate() {
                // More than a segment, too.
                assert_eq!(cx.send(*conn, &vec![number as u8; 10 + 1_000 * round]), Ok(10 + 1_000 * round));
            }
        });
        fixture.advance(Duration::from_millis(100));
    }
    fixture
        .client
        .with(fixture.now, |client, cx| client.conns.iter().for_each(|conn| cx.close(*conn).unwrap()));
    fixture.advance(Duration::from_secs(1));
    for ends in
        fixture.shards.iter().map(|shard| &shard.handler().closed).chain([&fixture.client.handler().closed])
    {
        assert!(ends.iter().all(|reason| *reason == CloseReason::Normal), "{ends:?}");
    }
    assert_eq!(fixture.client.handler().closed.len(), count);
    let got = &fixture.client.handler().got;
    assert!((0..count).all(|number| got.iter().filter(|byte| usize::from(**byte) == number).count() >= 3));
    assert_eq!(fixture.shards.iter().map(resets).sum::<u64>() + resets(&fixture.client), 0);
    assert_eq!(
        fixture.sum(|s| s.forwards_received),
        fixture.sum(|s| s.frames_forwarded),
        "forwarded once, and none is lost"
    );
    fixture.sum(|s| s.frames_received)
}

/// Upper bound for frames of ARP and neighbour discovery in each run.
const LINK_FRAMES_MAX: u64 = 40;

#[test]
fn hash_of_the_peer_is_not_recomputed() {
    let mut fixture = over_memif(3, true, |label| label);
    let received = exchange_requests(&mut fixture, 40);
    assert_eq!(fixture.sum(|s| s.hashes_mismatched), 0);
    let (taken, forwarded) = (fixture.sum(|s| s.hashes_trusted), fixture.sum(|s| s.frames_forwarded));
    // The client sends on its first queue, so the frames of the first shard stay there.
    assert!(taken > 100 && forwarded > 100, "{taken} {forwarded}");
    assert!(taken + forwarded + LINK_FRAMES_MAX > received, "{taken} and {forwarded} of {received}");
    // Without an agreed hash function no hash is used.
    for (offload, rewrite) in [(false, (|label| label) as RewriteLabel), (true, Label::without_hash)] {
        let mut fixture = over_memif(3, offload, rewrite);
        exchange_requests(&mut fixture, 40);
        assert_eq!((fixture.sum(|s| s.hashes_trusted), fixture.sum(|s| s.hashes_mismatched)), (0, 0));
    }
}

#[test]
fn forged_hashes_lose_no_frame() {
    let mut fixture = over_memif(3, true, |label| label);
    exchange_requests(&mut fixture, 40);
    let honest = fixture.sum(|s| s.frames_forwarded);
    let forges_hashes: [RewriteLabel; 4] = [
        // All hashes name the receiving shard, another one, the wrong one, or a different one for each frame.
        |label| Label::new(Some(0), label.priority()),
        |label| Label::new(Some(1), label.priority()),
        |label| Label::new(label.hash().map(|hash| hash + 1), label.priority()),
        |label| {
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            Label::new(Some(NUMBER.fetch_add(0x9e37_79b9, Ordering::Relaxed) >> 5), label.priority())
        },
    ];
    for (number, rewrite) in forges_hashes.into_iter().enumerate() {
        let mut fixture = over_memif(3, true, rewrite);
        exchange_requests(&mut fixture, 40);
        let (wrong, forwarded) = (fixture.sum(|s| s.hashes_mismatched), fixture.sum(|s| s.frames_forwarded));
        assert!(wrong > 100, "rewrite {number}: {wrong}");
        // As many are forwarded as without, except for different segmentation.
        assert!(forwarded.abs_diff(honest) < honest / 5, "rewrite {number}: {forwarded}, {honest} without");
    }
}

/// Opens 30 connections that send in one turn; the last sends with `priority`. Returns the first bytes in the
/// order in which a shard received them, and in which the client received the answers.
fn one_burst(shards: u32, priority: u8) -> (Vec<u8>, Vec<u8>) {
    let mut fixture = over_memif(shards, true, |label| label);
    fixture.client.with(fixture.now, |client, cx| client.open(cx, 30));
    assert!(fixture.run_until(Duration::from_secs(1), |_, client| client.connected == 30));
    fixture.advance(Duration::from_millis(100));
    let before = fixture.sum(|s| s.bursts.iter().sum());
    fixture.client.with(fixture.now, |client, cx| {
        for (number, conn) in client.conns.iter().enumerate() {
            assert_eq!(cx.send(*conn, &[number as u8; 10]), Ok(10));
        }
        // Last, so that it transmits last.
        cx.set_priority(client.conns[29], priority).unwrap();
    });
    let now = fixture.now;
    fixture.client.poll_once(now).unwrap();
    fixture.shards[0].poll_once(now).unwrap();
    assert_eq!(fixture.sum(|s| s.bursts.iter().sum()), before + 1, "the frames must arrive in one burst");
    fixture.advance(Duration::from_millis(100));
    let last = fixture.shards.iter().find(|shard| shard.handler().got.contains(&29)).unwrap();
    (last.handler().got.clone(), fixture.client.handler().got.clone())
}

#[test]
fn frames_with_priority_are_answered_first() {
    for shards in [1, 3] {
        let (got, answered) = one_burst(shards, 0);
        assert!(got.is_sorted() && got.last() == Some(&29), "in order of arrival: {got:?}");
        assert_eq!(answered.len(), 30);
        let (got, answered) = one_burst(shards, 6);
        assert!(got[0] == 29 && got[1..].is_sorted(), "{got:?}");
        if shards == 1 {
            assert!(answered[0] == 29 && answered[1..].is_sorted(), "{answered:?}");
        }
        // Background priority stays last.
        let (got, _) = one_burst(shards, 1);
        assert!(got.is_sorted() && got.last() == Some(&29), "{got:?}");
    }
}
