//! Measures the longest programs of socket filters (`SO_ATTACH_FILTER`), 4,096 instructions, in nanoseconds
//! per packet: `make bench BENCH=socket_filter`.
//!
//! Columns: instructions and visited attributes of a packet, ns per packet, and milliseconds that a turn of a
//! shard takes if programs do as many steps as they may. Each value is the median of the rounds.

use ginnel_matcher::{RawInstruction, SocketPacket, SocketProgram};
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 31;
const PACKETS: usize = 200;
const INSTRUCTIONS: usize = 4096;
/// Steps that the programs of a domain may do in one turn (docs/limits.md).
const STEPS_PER_TURN: f64 = 262_144.0;
/// Attributes that the programs may visit in a packet (docs/limits.md).
const ATTRIBUTES: usize = 4096;
/// Offset of the properties of a packet (`SKF_AD_OFF`).
const SKF_AD: u32 = 0xffff_f000;
/// Offset of the link-layer header (`SKF_LL_OFF`).
const SKF_LL: u32 = 0xffe0_0000;
const UDP_HEADER: u32 = 8;

const fn op(code: u16, k: u32) -> RawInstruction {
    RawInstruction { code, jt: 0, jf: 0, k }
}

const RET_A: RawInstruction = op(0x16, 0);

/// Returns a program that begins with `first`, repeats an instruction, and ends with `last`.
fn program(first: &[RawInstruction], repeated: RawInstruction, last: &[RawInstruction]) -> SocketProgram {
    let middle = vec![repeated; INSTRUCTIONS - first.len() - last.len()];
    SocketProgram::verify(&[first, &middle, last].concat()).expect("the program is valid")
}

fn main() {
    // A datagram of attributes of four bytes without contents, and a short one.
    let attributes = [4_u16.to_ne_bytes(), 1_u16.to_ne_bytes()].concat();
    let long = [vec![0; UDP_HEADER as usize], attributes.repeat(ATTRIBUTES + 1)].concat();
    let short = &long[..64];
    // Division by 1 leaves A as it is, and so does the remainder of a division by a larger number.
    let with_x = |x| [op(0x00, u32::MAX - 1), op(0x01, x)];
    let search = [op(0x00, UDP_HEADER), op(0x01, 2), op(0x20, SKF_AD + 12), op(0x06, u32::MAX)];
    let cases = [
        ("load of a byte", program(&[], op(0x30, 20), &[RET_A]), short),
        ("load of a word", program(&[], op(0x20, 20), &[RET_A]), short),
        ("word of memory", program(&[op(0x02, 3)], op(0x60, 3), &[RET_A]), short),
        ("branch", program(&[op(0x80, 0)], op(0x15, 1), &[RET_A]), short),
        ("division", program(&with_x(1), op(0x3c, 0), &[RET_A]), short),
        ("remainder", program(&with_x(u32::MAX), op(0x9c, 0), &[RET_A]), short),
        ("load at SKF_LL_OFF", program(&[], op(0x20, SKF_LL + 10), &[RET_A]), short),
        ("random number", program(&[], op(0x20, SKF_AD + 56), &[RET_A]), short),
        ("word of memory, attributes", program(&[op(0x02, 3)], op(0x60, 3), &search), &long),
        ("load at SKF_LL_OFF, attributes", program(&[], op(0x20, SKF_LL + 10), &search), &long),
    ];
    println!("{:>32} {:>6} {:>9} {:>8}", "repeated instruction", "steps", "ns/packet", "ms/turn");
    for (name, program, bytes) in cases {
        let (steps, ns) = measure(&program, bytes);
        let turn = ns / steps as f64 * STEPS_PER_TURN / 1e6;
        println!("{name:>32} {steps:>6} {ns:>9.0} {turn:>8.2}");
    }
}

/// Returns the steps that a program does for a packet, and the median of the nanoseconds per packet.
fn measure(program: &SocketProgram, bytes: &[u8]) -> (usize, f64) {
    let packet = SocketPacket { bytes, network: bytes, link: bytes, ..SocketPacket::default() };
    let (_, steps) = program.run_counted(&packet);
    assert!(steps >= INSTRUCTIONS, "the program is executed to its end");
    let round = |_| {
        let clock = Instant::now();
        for _ in 0..PACKETS {
            black_box(program.run_counted(black_box(&packet)));
        }
        clock.elapsed().as_nanos() as f64 / PACKETS as f64
    };
    let mut rounds: Vec<f64> = (0..ROUNDS).map(round).collect();
    rounds.sort_by(f64::total_cmp);
    (steps, rounds[ROUNDS / 2])
}
