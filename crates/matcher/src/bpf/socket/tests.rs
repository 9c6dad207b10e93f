use super::*;
use proptest::prelude::*;

const RETURN_A: RawInstruction = op(0x16, 0);
const X_TO_A: RawInstruction = op(0x87, 0);

const fn op(code: u16, k: u32) -> RawInstruction {
    RawInstruction { code, jt: 0, jf: 0, k }
}

/// A frame with the lengths of an Ethernet header, an IPv4 header and a UDP datagram of five bytes. The value
/// of each byte is its offset.
const FRAME: [u8; 47] = {
    let mut frame = [0; 47];
    let mut at = 0;
    while at < frame.len() {
        frame[at] = at as u8;
        at += 1;
    }
    frame
};

fn packet() -> SocketPacket<'static> {
    SocketPacket {
        bytes: &FRAME[34..],
        network: &FRAME[14..],
        link: &FRAME,
        ethertype: 0x800,
        packet_type: 2,
        interface: 7,
        hardware_type: 1,
        payload_offset: 8,
        random: 0x1234_5678,
        cpu: 5,
    }
}

fn run(program: &[RawInstruction]) -> u32 {
    SocketProgram::verify(program).unwrap().run(&packet())
}

#[test]
fn negative_offsets_reach_the_headers() {
    let network = |at: u32| 0xfff0_0000 + at;
    let link = |at: u32| 0xffe0_0000 + at;
    for (code, at, expected) in [
        (0x30, 0, 34),
        (0x30, network(0), 14),
        (0x28, network(0), 0x0e0f),
        (0x20, network(29), 0x2b2c_2d2e),
        (0x20, network(30), 0),
        (0x30, link(0), 0),
        (0x30, link(46), 46),
        (0x30, link(47), 0),
        (0x30, 0xffdf_ffff, 0),
        (0x30, 0x8000_0000, 0),
    ] {
        assert_eq!(run(&[op(code, at), RETURN_A]), expected, "{code:#x} {at:#x}");
        // By index; the sum wraps around.
        for x in [0, 1, 0xffff_ffff] {
            let program = [op(0x01, x), op(code ^ 0x60, at.wrapping_sub(x)), RETURN_A];
            assert_eq!(run(&program), expected, "{code:#x} {at:#x} {x:#x}");
        }
    }
    // The length of an IPv4 header, which is 14 & 0xf words here.
    assert_eq!(run(&[op(0xb1, network(0)), X_TO_A, RETURN_A]), 56);
}

#[test]
fn properties_of_a_packet_are_loaded() {
    for (offset, expected) in [
        (0, 0x800),
        (4, 2),
        (8, 7),
        (20, 0),
        (24, 0),
        (28, 1),
        (32, 0),
        (36, 5),
        (44, 0),
        (48, 0),
        (52, 8),
        (60, 0),
    ] {
        for code in [0x20, 0x28, 0x30] {
            assert_eq!(run(&[op(code, PROPERTIES + offset), RETURN_A]), expected, "{offset}");
        }
    }
    assert_eq!(run(&[op(0x00, 0b1100), op(0x01, 0b1010), op(0x20, PROPERTIES + 40), RETURN_A]), 0b0110);
    for offset in [1, 2, 3, 5, 64, 68, 0xfff] {
        let program = [op(0x20, PROPERTIES + offset), RETURN_A];
        assert_eq!(SocketProgram::verify(&program), Err(BadProgram::UnknownProperty(0)), "{offset}");
    }
    // By index they cannot be loaded, and a program of an expression has no properties.
    assert_eq!(run(&[op(0x40, PROPERTIES), RETURN_A]), 0);
    let program = [op(0x20, PROPERTIES), RETURN_A];
    assert_eq!(Program::verify(&program).unwrap().run(&FRAME), 0);
}

#[test]
fn memory_is_written_before_it_is_read() {
    let branch = |jt, jf| RawInstruction { code: 0x15, jt, jf, k: 0 };
    let verify = |program: &[RawInstruction]| SocketProgram::verify(program).map(|_| ());
    assert_eq!(verify(&[op(0x60, 3), RETURN_A]), Err(BadProgram::UnwrittenMemory(0)));
    assert_eq!(verify(&[op(0x61, 3), RETURN_A]), Err(BadProgram::UnwrittenMemory(0)));
    assert_eq!(verify(&[op(0x02, 3), op(0x60, 3), RETURN_A]), Ok(()));
    assert_eq!(verify(&[op(0x03, 3), op(0x61, 3), RETURN_A]), Ok(()));
    assert_eq!(verify(&[op(0x02, 2), op(0x60, 3), RETURN_A]), Err(BadProgram::UnwrittenMemory(1)));
    // On one of two ways only.
    let program = [branch(0, 1), op(0x02, 0), op(0x60, 0), RETURN_A];
    assert_eq!(verify(&program), Err(BadProgram::UnwrittenMemory(2)));
    let program = [branch(0, 2), op(0x02, 0), op(0x05, 1), op(0x02, 0), op(0x60, 0), RETURN_A];
    assert_eq!(verify(&program), Ok(()));
    // After a jump: no way leads there.
    assert_eq!(verify(&[op(0x05, 1), op(0x60, 0), RETURN_A]), Ok(()));
}

#[test]
fn shifts_use_five_bits_of_x() {
    for (code, expected) in [(0x6c, 6), (0x7c, 1)] {
        assert_eq!(run(&[op(0x00, 3), op(0x01, 33), op(code, 0), RETURN_A]), expected);
    }
}

#[test]
fn division_by_zero_drops() {
    assert_eq!(run(&[op(0x00, 3), op(0x01, 0), op(0x3c, 0), op(0x06, 9)]), 0);
}

#[test]
fn encoded_programs_have_whole_instructions() {
    let code: Vec<u8> = [op(0x00, 77), RETURN_A]
        .iter()
        .flat_map(|i| [&i.code.to_ne_bytes()[..], &[i.jt, i.jf][..], &i.k.to_ne_bytes()[..]].concat())
        .collect();
    assert_eq!(SocketProgram::decode(&code).unwrap().unwrap().run(&packet()), 77);
    for len in (0..16).filter(|len| len % 8 != 0) {
        assert_eq!(SocketProgram::decode(&code[..len]), None, "{len}");
    }
    assert_eq!(SocketProgram::decode(&[]), Some(Err(BadProgram::Empty)));
    assert_eq!(SocketProgram::decode(&code[..8]), Some(Err(BadProgram::NoReturn)));
    let long = code[8..].repeat(4097);
    assert_eq!(SocketProgram::decode(&long), Some(Err(BadProgram::TooLong(4097))));
    assert!(SocketProgram::decode(&long[8..]).unwrap().is_ok());
}

/// Returns attributes of these lengths and types.
fn attributes(of: &[(u16, u16)]) -> Vec<u8> {
    of.iter()
        .flat_map(|(len, kind)| {
            let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
            bytes.resize(usize::from(*len).next_multiple_of(4), 0);
            bytes
        })
        .collect()
}

#[test]
fn attributes_are_found_at_their_offsets() {
    let mut bytes = attributes(&[(6, 1), (20, 2), (4, 0x8003)]);
    let nested = attributes(&[(5, 7), (8, 9)]);
    bytes[12..28].copy_from_slice(&nested);
    let find = |code: u32, a: u32, x: u32| {
        let program = [op(0x00, a), op(0x01, x), op(0x20, PROPERTIES + code), RETURN_A];
        SocketProgram::verify(&program).unwrap().run(&SocketPacket { bytes: &bytes, ..packet() })
    };
    assert_eq!([1, 2, 3, 4, 0x8003].map(|kind| find(12, 0, kind)), [0, 8, 28, 0, 0]);
    assert_eq!([0, 4, 8, 28, 29, 32, u32::MAX].map(|from| find(12, from, 3)), [28, 0, 28, 28, 0, 0, 0]);
    assert_eq!([7, 9, 3].map(|kind| find(16, 8, kind)), [12, 20, 0]);
    assert_eq!([28, 29, 40, u32::MAX].map(|from| find(16, from, 3)), [0; 4]);
}

// limit: attributes that a filter searches in a packet
#[test]
fn searches_visit_a_bounded_number_of_attributes() {
    let bytes = attributes(&[(4, 1); 1024]);
    let searches = |count: usize| {
        let search = [op(0x00, 0), op(0x01, 2), op(0x20, PROPERTIES + 12)];
        let program = [search.repeat(count), vec![op(0x06, 5)]].concat();
        SocketProgram::verify(&program).unwrap().run_counted(&SocketPacket { bytes: &bytes, ..packet() })
    };
    let max = ATTRIBUTE_VISITS_MAX;
    let expected = [(5, 4 + 1024), (5, 13 + max), (0, 15 + max), (0, 15 + max)];
    assert_eq!([1, 4, 5, 1000].map(searches), expected);
}

#[test]
fn steps_end_with_the_last_instruction() {
    let program = [op(0x05, 2), RETURN_A, RETURN_A, op(0x80, 0), RETURN_A, op(0x80, 0), RETURN_A];
    let program = SocketProgram::verify(&program).unwrap();
    assert_eq!(program.run_counted(&SocketPacket { bytes: &[0; 9], ..packet() }), (9, 5));
    let beyond = SocketProgram::verify(&[op(0x80, 0), op(0x20, 9), RETURN_A]).unwrap();
    assert_eq!(beyond.run_counted(&SocketPacket { bytes: &[0; 9], ..packet() }), (0, 2));
}

#[test]
fn each_load_of_a_random_number_returns_another_one() {
    let load = op(0x20, PROPERTIES + 56);
    // A XOR X of two numbers.
    let program = [load, op(0x07, 0), load, op(0xac, 0), RETURN_A];
    let program = SocketProgram::verify(&program).unwrap();
    for random in 0..100 {
        assert_ne!(program.run(&SocketPacket { bytes: &[0; 9], random, ..packet() }), 0);
    }
}

fn instruction() -> impl Strategy<Value = RawInstruction> {
    let code = prop_oneof![
        proptest::sample::select(vec![
            0x00, 0x01, 0x02, 0x03, 0x05, 0x06, 0x07, 0x15, 0x16, 0x1d, 0x20, 0x28, 0x30, 0x40, 0x48, 0x50,
            0x60, 0x61, 0x80, 0x81, 0x84, 0x87, 0xb1, 0x3c, 0x6c,
        ]),
        any::<u16>(),
    ];
    let k = prop_oneof![0..20_u32, (0..70_u32).prop_map(|at| PROPERTIES + at), any::<u32>()];
    (code, 0..4_u8, 0..4_u8, k).prop_map(|(code, jt, jf, k)| RawInstruction { code, jt, jf, k })
}

proptest! {
    #[test]
    fn any_program_runs_on_any_packet(
        mut program in proptest::collection::vec(instruction(), 0..40),
        bytes in proptest::collection::vec(any::<u8>(), 0..100),
    ) {
        program.push(RETURN_A);
        if let Ok(program) = SocketProgram::verify(&program) {
            let packet = SocketPacket { bytes: &bytes, network: &bytes, link: &[], ..packet() };
            let _ = program.run(&packet);
        }
    }
}
