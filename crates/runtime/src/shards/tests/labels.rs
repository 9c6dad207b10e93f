//! What devices and peers say about a frame's flow.

use super::control::turn;
use super::{Idle, START, ours, shards_and_wire};
use core::time::Duration;
use ginnel_devices::memory::Spread;
use ginnel_stack::device::{Label, TxMeta};

/// A TCP segment to the shards: a port that nobody listens on.
fn segment(src_port: u16) -> Vec<u8> {
    let mut frame =
        vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0];
    frame.extend([10, 0, 0, 2, 10, 0, 0, 1]);
    frame.extend(src_port.to_be_bytes());
    frame.extend([0, 99, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0, 0, 0, 0, 0, 0]);
    frame
}

/// The hash in a frame's label says whose it is, whatever its ports would say; without one they are hashed.
#[test]
fn a_hash_brings_a_frame_to_its_shard() {
    let (mut shards, mut wire) = shards_and_wire(ours(3), Spread::Fixed(0), |_| Idle::default());
    let mut now = START + Duration::from_secs(5);
    turn(&mut shards, now);
    for hash in 0..9 {
        let before: Vec<u64> = shards.iter().map(|shard| shard.stats().frames_taken).collect();
        for port in 1000..1010 {
            let frame = segment(port);
            wire.tx.reserve(frame.len()).unwrap().copy_from_slice(&frame);
            wire.tx.commit(frame.len(), TxMeta { label: Label::new(Some(hash), 2), ..TxMeta::NONE });
        }
        wire.tx.flush(now);
        now += Duration::from_millis(1);
        turn(&mut shards, now);
        let taken: Vec<u64> =
            shards.iter().zip(before).map(|(shard, before)| shard.stats().frames_taken - before).collect();
        // Those of the first arrive there and make no hop.
        let expected: Vec<u64> =
            (0..3).map(|shard| if shard > 0 && hash % 3 == shard { 10 } else { 0 }).collect();
        assert_eq!(taken, expected, "hash {hash}");
    }
}
