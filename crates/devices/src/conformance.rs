//! Conformance suite of devices: each implementation runs it with pairs of its devices.
//!
//! A failure panics with the name of the device and of the check. Frames that the suite did not send (for
//! example from a kernel on the path) are ignored.

mod frames;
mod wake;

use crate::memory::{MemoryConfig, RssMode, multi_queue};
use frames::{ReceivedFrame, TestFrame};
use ginnel_stack::device::{
    BURST_FRAMES_MAX, Device, Label, PayloadPiece, RxBurst, RxFrame, RxQueue, TxClass, TxMeta, TxQueue,
};
use ginnel_stack::priority::BEST_EFFORT;
use ginnel_stack::time::Instant;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::AtomicU8;
use std::time::Duration;

/// Timeout after which a frame counts as lost. It is long, because the machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of frames in flight: less than the queue of any device holds.
const WINDOW: usize = 32;

/// Properties that differ between correct devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guarantees {
    /// True if `reserve` returns `None` while the queue is full, and no frame is lost. Otherwise frames that
    /// the queue cannot hold are dropped.
    pub back_pressure: bool,
    /// Super-frames of up to this number of bytes arrive unsegmented. Larger ones may arrive as segments.
    pub uncut_super_frame_bytes: usize,
    /// True if labels are transmitted. Otherwise all frames arrive without a label.
    pub labels: bool,
}

/// Runs all checks. `make` creates a new pair of joined devices for each check.
pub fn run(name: &str, guarantees: Guarantees, make: &mut dyn FnMut() -> (Device, Device)) {
    for (check, body) in CHECKS {
        let (left, right) = make();
        let mut fixture = Fixture { left, right, clock: TestClock::start(), guarantees };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(&mut fixture)));
        if let Err(panic) = result {
            eprintln!("{name}: {check}: failed");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Checks that a layer around a device forwards whether the device computes hashes.
pub fn check_hash_origin(layer: impl Fn(Device) -> Device) {
    for (mode, computes_hashes) in [(RssMode::DeliveredHash, true), (RssMode::Hash, false)] {
        let (_single, mut queues) = multi_queue(&MemoryConfig::default(), 1, mode);
        let device = layer(queues.remove(0));
        assert_eq!(device.rx.computes_hashes(), computes_hashes, "{mode:?}");
    }
}

type Check = fn(&mut Fixture);

const CHECKS: &[(&str, Check)] = &[
    ("capabilities are constant and sane", capabilities_are_constant_and_sane),
    ("frames of every size keep their content", frames_of_every_size_keep_their_content),
    ("labels arrive as they were sent or not at all", labels_arrive_unchanged_or_absent),
    ("both directions keep their order", both_directions_keep_their_order),
    ("super-frames keep their content", super_frames_keep_their_content),
    ("super-frames in pieces keep their content", super_frames_in_pieces_keep_their_content),
    ("room that is not committed leaves no trace", room_that_is_not_committed_leaves_no_trace),
    ("less than reserved can be sent", less_than_reserved_can_be_sent),
    ("a backlog ends when frames are taken", a_backlog_ends_when_frames_are_taken),
    ("bursts are bounded and append", bursts_are_bounded_and_append),
    ("lent frames survive while answers are sent", lent_frames_survive_while_answers_are_sent),
    ("a frame wakes the receiver", wake::a_frame_wakes_the_receiver),
    ("no wake-up is lost between two threads", wake::no_wake_up_is_lost_between_two_threads),
    ("an overrun queue recovers", an_overrun_queue_recovers),
    ("a device outlives its peer", a_device_outlives_its_peer),
];

/// Time since the start of a check.
#[derive(Clone, Copy)]
struct TestClock(std::time::Instant);

impl TestClock {
    fn start() -> Self {
        Self(std::time::Instant::now())
    }

    fn now(self) -> Instant {
        Instant::from_nanos(self.0.elapsed().as_nanos() as u64)
    }
}

/// Two joined devices under test.
struct Fixture {
    left: Device,
    right: Device,
    clock: TestClock,
    guarantees: Guarantees,
}

impl Fixture {
    /// Sends all frames from left to right, a window at a time, and returns the frames that arrive.
    fn exchange(&mut self, frames: &[TestFrame]) -> Vec<ReceivedFrame> {
        transfer(&mut *self.left.tx, &mut *self.right.rx, self.clock, frames)
    }
}

/// Sends frames, and receives until all of their payload has arrived.
fn transfer(
    tx: &mut dyn TxQueue,
    rx: &mut dyn RxQueue,
    clock: TestClock,
    frames: &[TestFrame],
) -> Vec<ReceivedFrame> {
    transfer_with(tx, rx, clock, frames, send)
}

/// Sends frames by the function `send`, and receives until all of their payload has arrived.
fn transfer_with(
    tx: &mut dyn TxQueue,
    rx: &mut dyn RxQueue,
    clock: TestClock,
    frames: &[TestFrame],
    send: impl Fn(&mut dyn TxQueue, &TestFrame) -> bool,
) -> Vec<ReceivedFrame> {
    let mut all = Vec::new();
    for window in frames.chunks(WINDOW) {
        let expected: usize = window.iter().map(TestFrame::payload_len).sum();
        let mut got = 0;
        let mut take = |rx: &mut dyn RxQueue, all: &mut Vec<ReceivedFrame>| {
            for frame in receive(rx, clock) {
                got += frame.payload_len();
                all.push(frame);
            }
            got
        };
        for frame in window {
            let deadline = clock.now() + TIMEOUT;
            while !send(tx, frame) {
                tx.flush(clock.now());
                take(rx, &mut all);
                assert!(clock.now() < deadline, "the queue stays full after all frames were received");
            }
        }
        tx.flush(clock.now());
        let deadline = clock.now() + TIMEOUT;
        while take(rx, &mut all) < expected {
            assert!(clock.now() < deadline, "{got} of {expected} bytes arrived");
            wait(tx, rx, clock);
        }
    }
    all
}

/// Queues one frame without flush. Returns false if the queue is full.
fn send(tx: &mut dyn TxQueue, frame: &TestFrame) -> bool {
    let Some(room) = tx.reserve(frame.bytes.len()) else { return false };
    assert_eq!(room.len(), frame.bytes.len(), "reserve returned a buffer of another length");
    room.copy_from_slice(&frame.bytes);
    tx.commit(frame.bytes.len(), frame.meta);
    true
}

/// Receives one burst. Returns only the suite's own frames.
fn receive(rx: &mut dyn RxQueue, clock: TestClock) -> Vec<ReceivedFrame> {
    let mut burst = RxBurst::new();
    rx.rx_burst(clock.now(), &mut burst);
    burst.iter().filter_map(ReceivedFrame::of).collect()
}

/// Sleeps until a frame may have arrived, at most 50 ms.
fn wait(tx: &mut dyn TxQueue, rx: &mut dyn RxQueue, clock: TestClock) {
    let now = clock.now();
    let deadlines = [tx.next_deadline(), rx.next_deadline(), Some(now + Duration::from_millis(50))];
    let until = deadlines.into_iter().flatten().min().unwrap_or(now);
    if rx.arm() {
        sleep(rx.wake_fd(), until - now);
    }
    tx.flush(clock.now());
}

/// Sleeps for `duration`, or until the descriptor (`RxQueue::wake_fd` of a device that the caller keeps
/// alive) is readable. Returns whether it became readable.
pub fn sleep(fd: Option<RawFd>, duration: Duration) -> bool {
    let Some(fd) = fd else {
        std::thread::sleep(duration);
        return false;
    };
    wake::with_borrowed(fd, |fd: BorrowedFd<'_>| {
        let deadline = std::time::Instant::now() + duration;
        loop {
            let left = deadline.saturating_duration_since(std::time::Instant::now());
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut fds = [PollFd::new(&fd, PollFlags::IN)];
            match poll(&mut fds, Some(&timeout)) {
                // A driver of DPDK receives a signal with each frame.
                Err(Errno::INTR) => {}
                result => return matches!(result, Ok(1..)),
            }
        }
    })
}

fn assert_same_frames(sent: &[TestFrame], received: &[ReceivedFrame]) {
    for (sent, received) in sent.iter().zip(received) {
        assert_eq!(sent.bytes.len(), received.bytes.len(), "a frame changed its length");
        assert!(sent.bytes == received.bytes, "a frame of {} bytes changed its content", sent.bytes.len());
    }
    assert_eq!(sent.len(), received.len(), "number of frames differs");
}

fn capabilities_are_constant_and_sane(fixture: &mut Fixture) {
    let (left, right) = (fixture.left.tx.capabilities(), fixture.right.tx.capabilities());
    assert_ne!(left.mac, right.mac, "both devices have one MAC address");
    for capabilities in [left, right] {
        assert_eq!(capabilities.mac[0] & 1, 0, "the MAC address is a group address");
        assert!((68..=65_535).contains(&capabilities.mtu), "MTU {}", capabilities.mtu);
        assert!(capabilities.gso_bytes_max == 0 || capabilities.tx_checksum, "super-frames need checksums");
        assert!(!capabilities.uso || capabilities.gso_bytes_max > 0);
    }
    let frames: Vec<_> =
        (0..100).map(|number| TestFrame::plain(fixture.left.tx.capabilities(), number, 200)).collect();
    fixture.exchange(&frames);
    assert_eq!(
        (left, right),
        (fixture.left.tx.capabilities(), fixture.right.tx.capabilities()),
        "capabilities changed"
    );
}

fn frames_of_every_size_keep_their_content(fixture: &mut Fixture) {
    let capabilities = fixture.left.tx.capabilities();
    let largest = fixture.left.tx.capabilities().mtu.min(fixture.right.tx.capabilities().mtu) + 14;
    // All sizes up to a usual MTU, and selected sizes and the largest ones above it.
    let sizes = (60..=largest).filter(|&size| size <= 1600 || size % 251 == 0 || size + 20 > largest);
    let frames: Vec<_> =
        sizes.zip(0..).map(|(size, number)| TestFrame::plain(capabilities, number, size)).collect();
    assert_same_frames(&frames, &fixture.exchange(&frames));
}

/// A device need not transmit labels, but a wrong hash would send a frame to the wrong shard.
fn labels_arrive_unchanged_or_absent(fixture: &mut Fixture) {
    let capabilities = fixture.left.tx.capabilities();
    let labels = |number: u32| match number % 3 {
        0 => Label::NONE,
        1 => Label::new(Some(number.wrapping_mul(0x9e37_79b9)), 0),
        _ => Label::new(None, (number % 8) as u8),
    };
    let frames: Vec<_> = (0..300)
        .map(|number| {
            let mut frame = TestFrame::plain(capabilities, number, 60 + number as usize);
            frame.meta.label = labels(number);
            frame
        })
        .collect();
    let received = fixture.exchange(&frames);
    assert_same_frames(&frames, &received);
    for (sent, received) in frames.iter().zip(&received) {
        let expected = if fixture.guarantees.labels { sent.meta.label } else { Label::NONE };
        assert_eq!(received.label, expected);
    }
}

fn both_directions_keep_their_order(fixture: &mut Fixture) {
    let make = |capabilities, seed: u32| -> Vec<_> {
        (0..1000u32)
            .map(|number| TestFrame::plain(capabilities, number + seed, 60 + (number * 37 % 400) as usize))
            .collect()
    };
    let there = make(fixture.left.tx.capabilities(), 0);
    let back = make(fixture.right.tx.capabilities(), 5000);
    let (mut got_there, mut got_back) = (Vec::new(), Vec::new());
    for (there, back) in there.chunks(WINDOW).zip(back.chunks(WINDOW)) {
        got_there.extend(transfer(&mut *fixture.left.tx, &mut *fixture.right.rx, fixture.clock, there));
        got_back.extend(transfer(&mut *fixture.right.tx, &mut *fixture.left.rx, fixture.clock, back));
    }
    assert_same_frames(&there, &got_there);
    assert_same_frames(&back, &got_back);
}

fn super_frames_keep_their_content(fixture: &mut Fixture) {
    let capabilities = fixture.left.tx.capabilities();
    let frames = frames::transport_frames(capabilities, fixture.right.tx.capabilities().mac);
    let received = fixture.exchange(&frames);
    frames::assert_payloads_arrive(&frames, &received, fixture.guarantees.uncut_super_frame_bytes);
}

/// The content must not depend on the pieces, nor on the reserved memory after the head.
fn super_frames_in_pieces_keep_their_content(fixture: &mut Fixture) {
    if fixture.left.tx.gather().is_none() {
        return;
    }
    let capabilities = fixture.left.tx.capabilities();
    let frames = frames::transport_frames(capabilities, fixture.right.tx.capabilities().mac);
    let received =
        transfer_with(&mut *fixture.left.tx, &mut *fixture.right.rx, fixture.clock, &frames, |tx, frame| {
            let Some(room) = tx.reserve(frame.bytes.len()) else { return false };
            let (head, mut rest) = frame.bytes.split_at(frame.bytes.len().min(100));
            room.fill(0xee);
            room[..head.len()].copy_from_slice(head);
            let mut lengths = [1, 700, 2048, 5000, 17].into_iter().cycle();
            // Every second piece is in memory that others might write to.
            let copy: Vec<AtomicU8> = rest.iter().map(|&byte| AtomicU8::new(byte)).collect();
            let (mut copy, mut shared) = (&copy[..], false);
            let mut pieces = core::iter::from_fn(|| {
                let (piece, behind) = rest.split_at(rest.len().min(lengths.next()?));
                rest = behind;
                let (copied, behind) = copy.split_at(piece.len());
                copy = behind;
                shared = !shared;
                let piece = if shared { PayloadPiece::Shared(copied) } else { PayloadPiece::Private(piece) };
                (!piece.is_empty()).then_some(piece)
            });
            let gather = tx.gather().expect("the frame was accepted before");
            gather.commit_gathered(head.len(), &mut pieces, frame.meta);
            true
        });
    frames::assert_payloads_arrive(&frames, &received, fixture.guarantees.uncut_super_frame_bytes);
}

fn room_that_is_not_committed_leaves_no_trace(fixture: &mut Fixture) {
    let capabilities = fixture.left.tx.capabilities();
    let largest = (capabilities.mtu + 18).max(capabilities.gso_bytes_max);
    for number in 0..300 {
        for len in [60, largest, 0, 1000.min(largest)] {
            if let Some(room) = fixture.left.tx.reserve(len) {
                room.fill(0xdb);
            }
            fixture.left.tx.flush(fixture.clock.now());
        }
        let frame = [TestFrame::plain(capabilities, number, 60 + number as usize % 100)];
        assert_same_frames(&frame, &fixture.exchange(&frame));
    }
}

/// Frames of low priority would wait forever otherwise.
fn a_backlog_ends_when_frames_are_taken(fixture: &mut Fixture) {
    if !fixture.left.tx.has_backlog(0) {
        return;
    }
    let capabilities = fixture.left.tx.capabilities();
    let frames: Vec<_> = (0..40).map(|number| TestFrame::plain(capabilities, number, 100)).collect();
    for _ in 0..10 {
        assert_same_frames(&frames, &fixture.exchange(&frames));
        let deadline = fixture.clock.now() + TIMEOUT;
        while fixture.left.tx.has_backlog(1) {
            assert!(fixture.clock.now() < deadline, "the device still has frames");
            receive(&mut *fixture.right.rx, fixture.clock);
            fixture.left.tx.flush(fixture.clock.now());
        }
    }
    // A device that refuses low classes while others wait accepts them again afterwards.
    fixture.left.tx.select_class(Some(TxClass::Connections(BEST_EFFORT)));
    for _ in 0..10 {
        assert_same_frames(&frames, &fixture.exchange(&frames));
    }
    fixture.left.tx.select_class(None);
}

fn less_than_reserved_can_be_sent(fixture: &mut Fixture) {
    let capabilities = fixture.left.tx.capabilities();
    for number in 0..300u32 {
        let frame = TestFrame::plain(capabilities, number, 60 + number as usize % 7);
        let room = fixture.left.tx.reserve(capabilities.mtu + 18).expect("the queue is empty");
        room[..frame.bytes.len()].copy_from_slice(&frame.bytes);
        fixture.left.tx.commit(frame.bytes.len(), TxMeta::default());
        let next = [TestFrame::plain(capabilities, number + 1, 100)];
        let mut received = fixture.exchange(&next);
        let deadline = fixture.clock.now() + TIMEOUT;
        while received.len() < 2 {
            assert!(fixture.clock.now() < deadline, "a frame did not arrive");
            received.extend(receive(&mut *fixture.right.rx, fixture.clock));
        }
        assert_same_frames(&[frame, next[0].clone()], &received);
    }
}

fn bursts_are_bounded_and_append(fixture: &mut Fixture) {
    let capabilities = fixture.left.tx.capabilities();
    let frames: Vec<_> =
        (0..3 * BURST_FRAMES_MAX as u32).map(|n| TestFrame::plain(capabilities, n, 90)).collect();
    let filler = [0xffu8; 60];
    let filler = RxFrame::new(&filler);
    let mut received = Vec::new();
    for window in frames.chunks(WINDOW) {
        for frame in window {
            assert!(send(&mut *fixture.left.tx, frame), "the queue holds less than a window");
        }
        fixture.left.tx.flush(fixture.clock.now());
        let (start, deadline) = (received.len(), fixture.clock.now() + TIMEOUT);
        let mut room = 0;
        while received.len() - start < window.len() {
            assert!(fixture.clock.now() < deadline, "a frame did not arrive");
            let mut burst = RxBurst::new();
            let kept = BURST_FRAMES_MAX - room;
            (0..kept).for_each(|_| burst.push(filler));
            fixture.right.rx.rx_burst(fixture.clock.now(), &mut burst);
            assert!(
                burst[..kept].iter().all(|frame| frame.bytes == filler.bytes),
                "a burst was not appended to"
            );
            received.extend(burst[kept..].iter().filter_map(ReceivedFrame::of));
            room = (room + 1) % 10;
            fixture.left.tx.flush(fixture.clock.now());
        }
    }
    assert_same_frames(&frames, &received);
}

fn lent_frames_survive_while_answers_are_sent(fixture: &mut Fixture) {
    let (left, right) = (fixture.left.tx.capabilities(), fixture.right.tx.capabilities());
    let first: Vec<_> = (0..WINDOW as u32).map(|number| TestFrame::plain(left, number, 300)).collect();
    assert!(first.iter().all(|frame| send(&mut *fixture.left.tx, frame)));
    fixture.left.tx.flush(fixture.clock.now());
    let deadline = fixture.clock.now() + TIMEOUT;
    let mut seen = 0;
    while seen == 0 {
        assert!(fixture.clock.now() < deadline, "no frame arrived");
        let mut burst = RxBurst::new();
        fixture.right.rx.rx_burst(fixture.clock.now(), &mut burst);
        let before: Vec<Vec<u8>> = burst.iter().map(|frame| frame.bytes.to_vec()).collect();
        seen = burst.iter().filter_map(ReceivedFrame::of).count();
        let answers: Vec<_> = (0..200).map(|number| TestFrame::plain(right, 9000 + number, 500)).collect();
        transfer(&mut *fixture.right.tx, &mut *fixture.left.rx, fixture.clock, &answers);
        // More frames in the same direction must not overwrite lent frames either.
        for number in 0..200 {
            send(&mut *fixture.left.tx, &TestFrame::plain(left, 5000 + number, 500));
            fixture.left.tx.flush(fixture.clock.now());
        }
        assert!(
            burst.iter().zip(&before).all(|(frame, before)| frame.bytes == before),
            "a lent frame changed"
        );
    }
}

fn an_overrun_queue_recovers(fixture: &mut Fixture) {
    let capabilities = fixture.left.tx.capabilities();
    let mut queued = Vec::new();
    for number in 0..100_000 {
        let frame = TestFrame::plain(capabilities, number, 1000);
        if !send(&mut *fixture.left.tx, &frame) {
            fixture.left.tx.flush(fixture.clock.now());
            if !send(&mut *fixture.left.tx, &frame) {
                break;
            }
        }
        queued.push(frame);
        if number % 64 == 0 {
            fixture.left.tx.flush(fixture.clock.now());
        }
        if !fixture.guarantees.back_pressure && queued.len() == 5000 {
            break;
        }
    }
    fixture.left.tx.flush(fixture.clock.now());
    assert!(queued.len() < 100_000, "the queue has no bound");
    let mut received = Vec::new();
    let mut quiet = 0;
    while quiet < 4 {
        let frames = receive(&mut *fixture.right.rx, fixture.clock);
        let held = fixture.left.tx.next_deadline().or(fixture.right.rx.next_deadline()).is_some();
        quiet = if frames.is_empty() && !held { quiet + 1 } else { 0 };
        received.extend(frames);
        if quiet > 0 || held {
            wait(&mut *fixture.left.tx, &mut *fixture.right.rx, fixture.clock);
        }
    }
    if fixture.guarantees.back_pressure {
        assert_same_frames(&queued, &received);
    } else {
        assert!(received.len() >= WINDOW, "only {} frames survived an overrun", received.len());
    }
    let after: Vec<_> =
        (0..500).map(|number| TestFrame::plain(capabilities, 200_000 + number, 400)).collect();
    assert_same_frames(&after, &fixture.exchange(&after));
}

fn a_device_outlives_its_peer(fixture: &mut Fixture) {
    let capabilities = fixture.left.tx.capabilities();
    let frames: Vec<_> = (0..40).map(|number| TestFrame::plain(capabilities, number, 700)).collect();
    fixture.exchange(&frames);
    let (other, _) = crate::memory::pair(Default::default());
    drop(std::mem::replace(&mut fixture.right, other));
    for number in 0..20_000 {
        if send(&mut *fixture.left.tx, &TestFrame::plain(capabilities, number, 700)) && number % 32 != 0 {
            continue;
        }
        fixture.left.tx.flush(fixture.clock.now());
        assert!(receive(&mut *fixture.left.rx, fixture.clock).is_empty());
    }
    fixture.left.rx.arm();
}
