use super::*;
use ginnel_stack::priority::BEST_EFFORT;
use std::collections::HashMap;

const PORT: PortId = PortId(0);

/// Returns a TCP segment, with or without payload, of flow `flow` with the number `number`.
fn frame(flow: u16, number: u32, is_control: bool) -> Vec<u8> {
    let payload = if is_control { 0 } else { 20 };
    let mut frame = vec![2; 12];
    frame.extend([8, 0, 0x45, 0]);
    frame.extend((40 + payload as u16).to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1]);
    frame.extend(flow.to_be_bytes());
    frame.extend([0, 80]);
    frame.extend(number.to_be_bytes());
    frame.extend([0, 0, 0, 0, 0x50, 0x10, 0, 0, 0, 0, 0, 0]);
    frame.extend(vec![number as u8; payload]);
    frame
}

fn flow_of(frame: &[u8]) -> u16 {
    u16::from_be_bytes([frame[34], frame[35]])
}

fn number_of(frame: &[u8]) -> u32 {
    u32::from_be_bytes([frame[38], frame[39], frame[40], frame[41]])
}

fn queues(frames: u32, bytes: u32) -> ReceiveQueues {
    ReceiveQueues::new(&PriorityConfig {
        queue_frames: frames,
        queue_bytes: bytes,
        ..PriorityConfig::default()
    })
}

fn push(queues: &mut ReceiveQueues, frame: &[u8], priority: u8) -> Queued {
    let frame = RxFrame { label: Label::new(None, priority), ..RxFrame::new(frame) };
    queues.push(PORT, &frame, |_| false)
}

/// Takes up to `max` frames of a class and checks them.
fn take(queues: &mut ReceiveQueues, class: u8, max: usize) -> Vec<(u16, u32)> {
    let Some(burst) = queues.next_burst(class, max) else { return Vec::new() };
    let taken = burst.frames.iter().map(|f| {
        let payload = &f.bytes[54..];
        assert!(payload.iter().all(|byte| *byte == number_of(f.bytes) as u8), "damaged");
        (flow_of(f.bytes), number_of(f.bytes))
    });
    let taken = taken.collect();
    let processed = burst.processed();
    drop(burst);
    queues.remove(processed);
    taken
}

/// Takes everything, the highest class first.
fn take_all(queues: &mut ReceiveQueues) -> Vec<(u16, u32)> {
    let mut all = Vec::new();
    while let Some(class) = queues.with_frames().checked_ilog2() {
        all.extend(take(queues, class as u8, BURST_FRAMES_MAX));
    }
    all
}

#[test]
fn high_frames_leave_before_queued_low_ones() {
    let mut queues = queues(16_384, 8 << 20);
    for number in 0..10_000 {
        assert_eq!(push(&mut queues, &frame(number as u16, number, false), 0), Queued::Waiting);
    }
    assert_eq!(push(&mut queues, &frame(60_000, 1, false), 6), Queued::Waiting);
    let all = take_all(&mut queues);
    assert_eq!(all[0], (60_000, 1));
    assert!(all[1..].iter().map(|(_, number)| *number).eq(0..10_000));
    assert_eq!(queues.with_frames(), 0);
}

/// A high frame pulls earlier frames of its flow along, and no others.
#[test]
fn frames_of_a_flow_keep_their_order() {
    let mut queues = queues(1000, 1 << 20);
    for number in 0..100 {
        push(&mut queues, &frame(number as u16 % 10, number, false), 0);
    }
    push(&mut queues, &frame(3, 100, false), 5);
    push(&mut queues, &frame(4, 101, false), 2);
    push(&mut queues, &frame(3, 102, false), 0);
    push(&mut queues, &frame(4, 103, false), 7);
    let all = take_all(&mut queues);
    let expected: Vec<u32> = [4, 14, 24, 34, 44, 54, 64, 74, 84, 94, 101, 103]
        .into_iter()
        .chain([3, 13, 23, 33, 43, 53, 63, 73, 83, 93, 100])
        .chain((0..100).filter(|number| number % 10 != 3 && number % 10 != 4))
        .chain([102])
        .collect();
    assert_eq!(all.iter().map(|(_, number)| *number).collect::<Vec<_>>(), expected);
}

/// Frames that are pulled along do not push out the frames of the higher class, and datagrams are not pulled.
#[test]
fn pulled_frames_leave_room_for_urgent_ones() {
    let mut queues = queues(64, 1 << 20);
    for number in 0..60 {
        push(&mut queues, &frame(1, number, false), 0);
    }
    assert_eq!(push(&mut queues, &frame(1, 60, false), 6), Queued::Waiting);
    for number in 0..32 {
        assert_eq!(push(&mut queues, &frame(100 + number as u16, number, false), 6), Queued::Waiting);
    }
    let own: Vec<u32> =
        take_all(&mut queues).iter().filter(|(flow, _)| *flow == 1).map(|(_, number)| *number).collect();
    assert!(own.into_iter().eq(0..61), "the flow keeps its order");
    let mut datagram = frame(7, 1, false);
    datagram[23] = 17;
    push(&mut queues, &datagram, 0);
    push(&mut queues, &datagram, 6);
    assert_eq!(take(&mut queues, 6, 64).len(), 1);
    assert_eq!(take(&mut queues, BEST_EFFORT, 64).len(), 1);
}

/// A lower class that is served for its share does not overtake inside a flow either.
#[test]
fn lower_class_waits_for_earlier_frames_of_its_flow() {
    let mut queues = queues(1000, 1 << 20);
    push(&mut queues, &frame(1, 0, false), 6);
    push(&mut queues, &frame(2, 1, false), 6);
    push(&mut queues, &frame(9, 2, false), 0);
    push(&mut queues, &frame(2, 3, false), 0);
    assert_eq!(take(&mut queues, BEST_EFFORT, 64), [(9, 2)]);
    assert_eq!(take(&mut queues, BEST_EFFORT, 64), [(1, 0), (2, 1)], "the class of the earlier frame");
    assert_eq!(take(&mut queues, BEST_EFFORT, 64), [(2, 3)]);
}

#[test]
fn wanted_frames_overtake_and_are_marked() {
    let mut queues = queues(1000, 1 << 20);
    push(&mut queues, &frame(1, 0, false), 0);
    let bytes = frame(1, 1, false);
    let high = RxFrame { label: Label::new(None, 6), ..RxFrame::new(&bytes) };
    queues.push(PORT, &high, |_| true);
    let burst = queues.next_burst(6, 64).unwrap();
    assert!(burst.is_overtaking && number_of(burst.frames[0].bytes) == 1);
    drop(burst);
    // Once the earlier frame was processed, nothing is overtaken any more.
    let burst = queues.next_burst(BEST_EFFORT, 64).unwrap();
    assert_eq!((burst.class, burst.is_overtaking), (6, true), "what the socket wants first comes first");
    let processed = burst.processed();
    drop(burst);
    queues.remove(processed);
    assert_eq!(take(&mut queues, BEST_EFFORT, 64), [(1, 0)]);
    queues.push(PORT, &high, |_| true);
    assert!(!queues.next_burst(6, 64).unwrap().is_overtaking);
}

// limit: priority.queue_frames
#[test]
fn full_queue_sheds_data_and_keeps_control_frames() {
    let mut queues = queues(64, 1 << 20);
    for number in 0..64 {
        assert_eq!(push(&mut queues, &frame(number as u16, number, false), 0), Queued::Waiting);
    }
    assert_eq!(push(&mut queues, &frame(99, 99, false), 0), Queued::Shed);
    // Other priorities have queues of their own.
    assert_eq!(push(&mut queues, &frame(98, 98, false), 6), Queued::Waiting);
    for number in 100..164 {
        assert_eq!(push(&mut queues, &frame(number as u16, number, true), 0), Queued::Waiting);
    }
    // One more control frame of a flow with a waiting frame: both are processed at once, in their order.
    let Queued::Refused { flow } = push(&mut queues, &frame(30, 200, true), 0) else { panic!("not refused") };
    let mut taken = Vec::new();
    queues.take_flow(flow, &mut |port, frame, _| taken.push((port, number_of(frame.bytes))));
    assert_eq!(taken, [(PORT, 30)]);
    assert_eq!(take(&mut queues, BEST_EFFORT, 63).len(), 63);
    assert_eq!(push(&mut queues, &frame(201, 201, true), 0), Queued::Waiting);
    // A flow whose frames find no room in the higher queue keeps its place in the lower one.
    for number in 0..127 {
        assert_eq!(push(&mut queues, &frame(5000 + number as u16, number, true), 6), Queued::Waiting);
    }
    assert_eq!(push(&mut queues, &frame(110, 300, true), 6), Queued::Waiting);
    let all = take_all(&mut queues);
    let positions =
        [110, 300].map(|number| all.iter().position(|(_, n)| *n == number && all.len() > 128).unwrap());
    assert!(positions[0] < positions[1]);
    assert_eq!(all.len(), 1 + 127 + 65 + 1);
}

// limit: priority.queue_bytes
#[test]
fn full_ring_sheds_data_and_is_used_again() {
    let mut queues = queues(1 << 20, 256 << 10);
    let mut large = frame(7, 1, false);
    large.resize(10_000, 1);
    let mut number = 0;
    let mut queued = VecDeque::new();
    for round in 0..200 {
        while push(&mut queues, &large, 0) == Queued::Waiting {
            queued.push_back(large.len());
            number += 1;
            large.truncate(5000 + (number * 37 % 5000) as usize);
            large.resize(5000 + (number * 91 % 9000) as usize, 1);
        }
        let bytes: usize = queued.iter().sum();
        assert!(bytes <= 7 * (256 << 10) / 8, "round {round}: {bytes}");
        assert!(bytes > (256 << 10) / 2, "round {round}: {bytes}");
        assert_eq!(push(&mut queues, &frame(8, 2, true), 0), Queued::Waiting, "room for control frames");
        queued.push_back(54);
        let burst = queues.next_burst(BEST_EFFORT, 1 + round % 7).unwrap();
        for frame in &burst.frames {
            assert_eq!(Some(frame.bytes.len()), queued.pop_front());
        }
        let processed = burst.processed();
        drop(burst);
        queues.remove(processed);
    }
}

/// Random frames, with a list as the model: nothing is lost, duplicated or damaged, and no flow is reordered.
#[test]
fn random_use_keeps_frames_and_order() {
    let mut random = ginnel_devices::random::Random::new(7);
    for _ in 0..40 {
        let mut queues = queues(64, 256 << 10);
        let (mut next, mut waiting) = (0u32, HashMap::<u16, VecDeque<u32>>::new());
        for _ in 0..3000 {
            if random.below(5) < 3 {
                let flow = random.below(20) as u16;
                let pushed =
                    push(&mut queues, &frame(flow, next, random.below(4) == 0), random.below(8) as u8);
                if pushed == Queued::Waiting {
                    waiting.entry(flow).or_default().push_back(next);
                }
                next += 1;
            } else {
                let class = random.below(8) as u8;
                for (flow, number) in take(&mut queues, class, 1 + random.below(10) as usize) {
                    assert_eq!(waiting.get_mut(&flow).and_then(VecDeque::pop_front), Some(number));
                }
            }
        }
        for (flow, number) in take_all(&mut queues) {
            assert_eq!(waiting.get_mut(&flow).and_then(VecDeque::pop_front), Some(number));
        }
        assert!(waiting.values().all(VecDeque::is_empty));
        assert!(queues.classes.iter().all(|queue| queue.entries.is_empty() && queue.flows.is_empty()));
    }
}
