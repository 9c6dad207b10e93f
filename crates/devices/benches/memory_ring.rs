//! Measures the memory device in nanoseconds per frame and side, with both ends on one thread: `cargo bench
//! -p ginnel-devices --bench memory_ring`.
//!
//! Columns: frames per burst, bytes per frame, ns to send one frame (reserve, write 64 bytes, commit, share
//! of flush), ns to receive one frame (share of the burst, read of its first line). Each value is the median
//! of the rounds.

use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::{RxBurst, TxMeta};
use ginnel_stack::time::Instant;
use std::hint::black_box;

const ROUNDS: usize = 31;
const BURSTS: usize = 4_000;

fn main() {
    println!("{:>6} {:>6} {:>9} {:>9}", "burst", "bytes", "ns tx", "ns rx");
    for bytes in [64, 1514] {
        for burst in [1, 8, 32] {
            let (tx, rx) = measure(burst, bytes);
            println!("{burst:>6} {bytes:>6} {tx:>9.1} {rx:>9.1}");
        }
    }
}

/// Returns the median ns per frame of the sender and of the receiver.
fn measure(frames: usize, bytes: usize) -> (f64, f64) {
    let (mut a, mut b) = pair(MemoryConfig::default());
    // The receiver of this pair is dropped, so that sending alone never blocks.
    let mut alone = pair(MemoryConfig::default()).0;
    let mut results = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let both = ns_per_frame(frames, || {
            send(&mut a, frames, bytes);
            receive(&mut b, frames);
        });
        let tx = ns_per_frame(frames, || send(&mut alone, frames, bytes));
        results.0.push(tx);
        results.1.push(both - tx);
    }
    results.0.sort_by(f64::total_cmp);
    results.1.sort_by(f64::total_cmp);
    (results.0[ROUNDS / 2], results.1[ROUNDS / 2])
}

fn ns_per_frame(frames: usize, mut work: impl FnMut()) -> f64 {
    let clock = std::time::Instant::now();
    for _ in 0..BURSTS {
        work();
    }
    clock.elapsed().as_nanos() as f64 / (BURSTS * frames) as f64
}

fn send(device: &mut ginnel_stack::device::Device, frames: usize, bytes: usize) {
    for number in 0..frames {
        let room = device.tx.reserve(bytes).expect("the ring holds a batch");
        room[..64].fill(number as u8);
        device.tx.commit(bytes, TxMeta { partial_checksum: Some((34, 16)), ..TxMeta::NONE });
    }
    device.tx.flush(Instant::ZERO);
}

fn receive(device: &mut ginnel_stack::device::Device, frames: usize) {
    let mut burst = RxBurst::new();
    device.rx.rx_burst(Instant::ZERO, &mut burst);
    assert_eq!(burst.len(), frames);
    for frame in &burst {
        black_box(frame.bytes[12]);
    }
}
