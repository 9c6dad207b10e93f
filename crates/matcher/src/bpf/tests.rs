use super::{BadProgram, Program, RawInstruction};
use crate::flow::FlowShape;
use crate::libpcap;
use crate::packet::IpVersion;
use ginnel_testkit::skip;
use proptest::prelude::*;

const RETURN_A: RawInstruction = op(0x16, 0);

const fn op(code: u16, k: u32) -> RawInstruction {
    RawInstruction { code, jt: 0, jf: 0, k }
}

fn run(program: &[RawInstruction], frame: &[u8]) -> u32 {
    Program::verify(program).unwrap().run(frame)
}

#[test]
fn invalid_programs_are_refused() {
    let branch = |jt, jf| RawInstruction { code: 0x15, jt, jf, k: 0 };
    let nops = |count| vec![op(0x80, 0); count];
    let cases = [
        (vec![], BadProgram::Empty),
        (nops(5000), BadProgram::TooLong(5000)),
        (vec![op(0x80, 0)], BadProgram::NoReturn),
        (vec![op(0x05, 1), RETURN_A], BadProgram::WildJump(0)),
        (vec![op(0x05, u32::MAX), RETURN_A], BadProgram::WildJump(0)),
        (vec![op(0x80, 0), branch(0, 1), RETURN_A], BadProgram::WildJump(1)),
        (vec![branch(255, 0), RETURN_A], BadProgram::WildJump(0)),
        (vec![op(0x60, 16), RETURN_A], BadProgram::WildMemory(0)),
        (vec![op(0x61, 16), RETURN_A], BadProgram::WildMemory(0)),
        (vec![op(0x02, 16), RETURN_A], BadProgram::WildMemory(0)),
        (vec![op(0x03, u32::MAX), RETURN_A], BadProgram::WildMemory(0)),
        (vec![op(0x34, 0), RETURN_A], BadProgram::DivisionByZero(0)),
        (vec![op(0x94, 0), RETURN_A], BadProgram::DivisionByZero(0)),
        (vec![op(0x64, 32), RETURN_A], BadProgram::WildShift(0)),
        (vec![op(0x18, 0), RETURN_A], BadProgram::UnknownOperation(0, 0x18)),
        (vec![op(0xb4, 0), RETURN_A], BadProgram::UnknownOperation(0, 0xb4)),
        (vec![op(0x55, 0), RETURN_A], BadProgram::UnknownOperation(0, 0x55)),
        (vec![op(0x8016, 0)], BadProgram::UnknownOperation(0, 0x8016)),
        (vec![op(0x0e, 0)], BadProgram::UnknownOperation(0, 0x0e)),
    ];
    for (program, problem) in cases {
        assert_eq!(Program::verify(&program), Err(problem), "{program:?}");
        assert!(!problem.to_string().is_empty());
    }
    let longest = [nops(4095), vec![RETURN_A]].concat();
    assert!(Program::verify(&longest).is_ok());
    let too_long = [nops(4096), vec![RETURN_A]].concat();
    assert_eq!(Program::verify(&too_long), Err(BadProgram::TooLong(4097)));
}

#[test]
fn loads_beyond_the_frame_reject() {
    let frame = [1, 2, 3, 4, 5];
    for (code, k, value) in [
        (0x20, 1, 0x0203_0405),
        (0x20, 2, 0),
        (0x28, 3, 0x0405),
        (0x28, 4, 0),
        (0x30, 4, 5),
        (0x30, 5, 0),
        (0x30, u32::MAX, 0),
    ] {
        assert_eq!(run(&[op(code, k), RETURN_A], &frame), value, "{code:#x} {k}");
        // Loads with an index give the value, too, or reject if the index is beyond `k`.
        for x in [0, 1, u32::MAX] {
            let program = [op(0x01, x), op(code ^ 0x60, k.wrapping_sub(x)), RETURN_A];
            let expected = if k >= x { value } else { 0 };
            assert_eq!(run(&program, &frame), expected, "{code:#x} {k} - {x}");
        }
    }
    assert_eq!(run(&[op(0xb1, 5), op(0x87, 0), RETURN_A], &frame), 0);
    assert_eq!(run(&[op(0xb1, 4), op(0x87, 0), RETURN_A], &frame), 20);
    assert_eq!(run(&[op(0x80, 0), RETURN_A], &frame), 5);
}

#[test]
fn division_by_a_zero_in_x_rejects() {
    for code in [0x3c, 0x9c] {
        assert_eq!(run(&[op(0, 7), op(1, 0), op(code, 0), op(6, 1)], &[]), 0);
        assert_eq!(run(&[op(0, 7), op(1, 2), op(code, 0), op(6, 1)], &[]), 1);
    }
}

const SHAPE: FlowShape = FlowShape { version: IpVersion::Four, ip_at: 14 };

#[test]
fn result_of_a_flow_depends_on_what_was_looked_at() {
    let flow = |program: &[RawInstruction], frame: &[u8]| {
        Program::verify(program).unwrap().run_for_flow(frame, SHAPE)
    };
    let frame: Vec<u8> = (0..60).collect();
    let branch = |code, k, jt, jf| RawInstruction { code, jt, jf, k };
    let returns = [op(6, 0), op(6, 1)];
    let test = |load: RawInstruction, branch: RawInstruction| {
        flow(&[&[load, branch][..], &returns].concat(), &frame)
    };
    // The protocol decides, then the second byte of the payload.
    assert_eq!(test(op(0x30, 23), branch(0x15, 23, 1, 0)), Some(1));
    assert_eq!(test(op(0x30, 55), branch(0x15, 55, 1, 0)), None);
    // Fragment offset and flags: "don't fragment" may differ, the rest does not.
    assert_eq!(test(op(0x28, 20), branch(0x45, 0x1fff, 1, 0)), Some(1));
    assert_eq!(test(op(0x28, 20), branch(0x45, 0x4000, 1, 0)), None);
    // A frame of the flow may end after the ports.
    assert_eq!(test(op(0x20, 34), branch(0x15, 0, 1, 0)), Some(0));
    assert_eq!(test(op(0x20, 35), branch(0x15, 0, 1, 0)), None);
    // The length of the frame.
    assert_eq!(test(op(0x80, 0), branch(0x15, 60, 1, 0)), None);
    // A position that depends on the payload.
    assert_eq!(
        flow(
            &[op(0x30, 55), op(0x07, 0), op(0x50, 0), branch(0x15, 0, 1, 0), returns[0], returns[1]],
            &frame
        ),
        None
    );
    // Masked out.
    let masked = [op(0x30, 15), op(0x54, 0xf0), branch(0x15, 0, 1, 0), returns[0], returns[1]];
    assert_eq!(flow(&masked, &frame), Some(1));
    assert_eq!(flow(&[op(0x28, 20), op(0x54, 0x1fff), RETURN_A], &frame), Some(0x1415));
    assert_eq!(flow(&[op(0x28, 20), RETURN_A], &frame), None);
}

/// Generates instructions of valid programs.
fn instruction() -> impl Strategy<Value = RawInstruction> {
    let loads = prop::sample::select(vec![0x20u16, 0x28, 0x30, 0x40, 0x48, 0x50, 0xb1]);
    let constants = prop::sample::select(vec![0x00u16, 0x01, 0x80, 0x81, 0x07, 0x87, 0x84]);
    let memory = prop::sample::select(vec![0x60u16, 0x61, 0x02, 0x03]);
    let alu = prop::sample::select(
        [0x00u16, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x90, 0xa0]
            .iter()
            .flat_map(|c| [c | 4, c | 12])
            .collect::<Vec<_>>(),
    );
    let branches = prop::sample::select(
        [0x10u16, 0x20, 0x30, 0x40].iter().flat_map(|c| [c | 5, c | 13]).collect::<Vec<_>>(),
    );
    let small = prop_oneof![0u32..70, Just(0), Just(u32::MAX), any::<u32>()];
    prop_oneof![
        4 => (loads, prop_oneof![9 => 0u32..64, 1 => any::<u32>()]).prop_map(|(code, k)| op(code, k)),
        2 => (constants, small.clone()).prop_map(|(code, k)| op(code, k)),
        1 => (memory, 0u32..16).prop_map(|(code, k)| op(code, k)),
        2 => (alu, small.clone()).prop_map(|(code, k)| match code & !0xf {
            0x30 | 0x90 if code & 8 == 0 => op(code, k.max(1)),
            0x60 | 0x70 if code & 8 == 0 => op(code, k % 32),
            _ => op(code, k),
        }),
        2 => (branches, small, 0u8..4, 0u8..4).prop_map(|(code, k, jt, jf)| RawInstruction { code, jt, jf, k }),
        1 => (0u32..3).prop_map(|k| op(0x05, k)),
    ]
}

/// Generates valid programs. libpcap does not clear the memory, so the programs do.
fn program() -> impl Strategy<Value = Vec<RawInstruction>> {
    prop::collection::vec(instruction(), 1..20).prop_map(|body| {
        let clear = (0..16).map(|k| op(0x02, k));
        // As many returns as the longest jump skips.
        clear.chain(body).chain([RETURN_A, op(6, 0), op(6, 1), op(6, 1), RETURN_A]).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn programs_give_what_libpcap_gives(mut program in program(), frame in prop::collection::vec(any::<u8>(), 0..64)) {
        let ours = run(&program, &frame) != 0;
        match libpcap::interpret(&mut program, &frame) {
            Ok(theirs) => prop_assert_eq!(ours, theirs),
            Err(error) => skip("programs_give_what_libpcap_gives", &error.to_string()),
        }
    }

    /// A program whose result was the same for a flow is not affected by the bits in which its frames differ.
    #[test]
    fn result_of_a_flow_is_that_of_all_its_frames(
        program in program(), six: bool, ip_at in prop::sample::select(vec![14usize, 18]),
        frame in prop::collection::vec(any::<u8>(), 64..80), other in prop::collection::vec(any::<u8>(), 80..81),
        len in 0usize..80,
    ) {
        let shape = FlowShape { version: if six { IpVersion::Six } else { IpVersion::Four }, ip_at };
        let frame = [&frame[..], &[0; 20]].concat();
        let program = Program::verify(&program).unwrap();
        let Some(value) = program.run_for_flow(&frame, shape) else { return Ok(()) };
        prop_assert_eq!(value, program.run(&frame));
        let of_flow: Vec<u8> = frame.iter().zip(other.iter().chain([0; 20].iter())).enumerate().map(|(at, (byte, other))| {
            let differing = shape.differing_bits(at);
            byte & !differing | other & differing
        }).collect();
        let of_flow = &of_flow[..shape.common_len().max(len).min(of_flow.len())];
        prop_assert_eq!(value, program.run(of_flow));
    }

    #[test]
    fn arbitrary_programs_are_refused_or_end(
        program in prop::collection::vec((any::<u16>(), any::<u8>(), any::<u8>(), any::<u32>()), 0..10),
        frame in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let program: Vec<_> = program.into_iter().map(|(code, jt, jf, k)| RawInstruction { code: code & 0xff, jt: jt % 8, jf: jf % 8, k }).collect();
        if let Ok(program) = Program::verify(&program) {
            let _ = program.run(&frame);
        }
    }
}
