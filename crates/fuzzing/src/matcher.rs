//! Rules over frames: a program of the input is refused or ends, any frame is parsed, and the cache of flows
//! never changes which rule is found.
//!
//! The input is the number of the program's instructions, the instructions of eight bytes each, and frames,
//! each after its length in one byte.

use ginnel_matcher::{
    Condition, Expression, Matcher, Packet, PayloadTest, Program, Protocol, RawInstruction, Rule, Side,
};

/// Bytes of an instruction in the input.
const INSTRUCTION_BYTES: usize = 8;
/// Maximum number of instructions of a program.
const INSTRUCTIONS_MAX: usize = 32;

/// Runs one input.
///
/// # Panics
/// If fields of a packet contradict each other, or the matcher, which caches flows, finds another rule than
/// the first that matches.
pub fn run(data: &[u8]) {
    let Some((&count, rest)) = data.split_first() else { return };
    let count = usize::from(count) % (INSTRUCTIONS_MAX + 1);
    let (instructions, mut rest) = rest.split_at(rest.len().min(count * INSTRUCTION_BYTES));
    let rules = rules(&instructions.chunks_exact(INSTRUCTION_BYTES).map(instruction).collect::<Vec<_>>());
    // So small that flows replace each other.
    let mut matcher = Matcher::new(rules.clone(), 16).expect("few rules");
    while let Some((&len, frames)) = rest.split_first() {
        let (frame, others) = frames.split_at(frames.len().min(len.into()));
        rest = others;
        check(&mut matcher, &rules, frame);
        // In an untagged IPv4 frame, none of these bits belongs to the fields of the flow. In other frames
        // some do, so the flow changes.
        let mut changed = frame.to_vec();
        for at in [0, 16, 18, 20, 22, 38, 46, 54, 60] {
            if let Some(byte) = changed.get_mut(at) {
                *byte ^= 0x40;
                check(&mut matcher, &rules, &changed);
            }
        }
        check(&mut matcher, &rules, &frame[..frame.len() - frame.len() / 4]);
    }
}

/// Reads an instruction.
fn instruction(bytes: &[u8]) -> RawInstruction {
    RawInstruction {
        code: u16::from_le_bytes([bytes[0], bytes[1]]),
        jt: bytes[2],
        jf: bytes[3],
        k: u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
    }
}

/// Returns rules of all kinds. Their actions are their indices.
fn rules(program: &[RawInstruction]) -> Vec<Rule<usize>> {
    let payload =
        |offset, value| Condition::Payload(PayloadTest::new(offset, &[value], None).expect("one byte"));
    let program = Program::verify(program).map(|program| Expression::from_program("of the input", program));
    let mut conditions = vec![
        vec![Condition::Port(Side::Destination, "53".parse().expect("a port")), payload(1, 1)],
        vec![Condition::Address(Side::Source, vec!["10.0.0.9".parse().expect("an address")])],
        vec![Condition::Dscp(vec![46]), Condition::Protocol(Protocol::Tcp)],
        vec![
            Condition::PayloadBytes(7..=9),
            Condition::Address(Side::Either, vec!["fd00::/8".parse().expect("a network")]),
        ],
        vec![payload(0, 7)],
        vec![
            Condition::Port(Side::Either, "1-100".parse().expect("ports")),
            Condition::Protocol(Protocol::Udp),
        ],
    ];
    if let Ok(expression) = program {
        conditions.insert(2, vec![Condition::Expression(expression.clone())]);
        conditions.push(vec![Condition::Protocol(Protocol::Tcp), Condition::Expression(expression)]);
    }
    conditions.into_iter().enumerate().map(|(action, conditions)| Rule { conditions, action }).collect()
}

fn check(matcher: &mut Matcher<usize>, rules: &[Rule<usize>], frame: &[u8]) {
    let packet = Packet::parse(frame);
    assert_eq!(packet.bytes(), frame);
    assert_eq!(packet.source().is_some(), packet.destination().is_some());
    assert_eq!(packet.source().is_some(), packet.dscp().is_some());
    assert!(packet.protocol().is_none() || packet.source().is_some(), "a protocol without IP");
    assert!(packet.ports().is_none() || packet.protocol().is_some(), "ports without a protocol");
    if let Some(payload) = packet.payload() {
        assert!(packet.ports().is_some(), "a payload without ports");
        // 8 bytes are the shortest transport header.
        assert!(payload.len() + 14 + 20 + 8 <= frame.len(), "the payload is longer than the frame");
    }
    let expected = rules.iter().find(|rule| rule.matches(&packet)).map(|rule| rule.action);
    assert_eq!(matcher.find(&packet).copied(), expected, "{frame:02x?}");
}

/// Returns the handwritten seed inputs.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let program = |instructions: &[(u16, u8, u8, u32)]| {
        let mut bytes = vec![instructions.len() as u8];
        for (code, jt, jf, k) in instructions {
            bytes.extend(code.to_le_bytes());
            bytes.extend([*jt, *jf]);
            bytes.extend(k.to_le_bytes());
        }
        bytes
    };
    // tcp[((tcp[12]&0xf0)>>2)+6] = 2, as libpcap compiles it.
    let request = program(&[
        (0x28, 0, 0, 12),
        (0x15, 0, 13, 0x800),
        (0x30, 0, 0, 23),
        (0x15, 0, 11, 6),
        (0x28, 0, 0, 20),
        (0x45, 9, 0, 0x1fff),
        (0xb1, 0, 0, 14),
        (0x50, 0, 0, 26),
        (0x54, 0, 0, 0xf0),
        (0x74, 0, 0, 2),
        (0x0c, 0, 0, 0),
        (0x07, 0, 0, 0),
        (0x50, 0, 0, 20),
        (0x15, 0, 1, 2),
        (0x06, 0, 0, 262_144),
        (0x06, 0, 0, 0),
    ]);
    let arithmetic = program(&[
        (0x80, 0, 0, 0),
        (0x02, 0, 0, 3),
        (0x30, 0, 0, 34),
        (0x61, 0, 0, 3),
        (0x3c, 0, 0, 0),
        (0x9c, 0, 0, 0),
        (0x84, 0, 0, 0),
        (0x64, 0, 0, 4),
        (0x16, 0, 0, 0),
    ]);
    let wild_jump = program(&[(0x15, 9, 9, 1), (0x06, 0, 0, 1)]);
    let none = program(&[]);
    let with = |program: &[u8], frames: &[Vec<u8>]| {
        let mut bytes = program.to_vec();
        for frame in frames {
            bytes.push(frame.len() as u8);
            bytes.extend(frame);
        }
        bytes
    };
    let payload = [0, 1, 0, 0, 0, 0, 2, 7, 9];
    let (tcp4, udp4) = (packet(false, 6, &payload), packet(false, 17, &payload));
    let (tcp6, udp6) = (packet(true, 6, &payload), packet(true, 17, &payload));
    let tagged = [&udp4[..12], &[0x81, 0, 0, 5], &udp4[12..]].concat();
    let mut fragment = udp4.clone();
    fragment[20] = 0x20;
    let all = [tcp4.clone(), udp4, tcp6, udp6, tagged, fragment];
    vec![
        ("empty", Vec::new()),
        ("request", with(&request, &[tcp4.clone(), all[1].clone(), tcp4])),
        ("arithmetic", with(&arithmetic, &all)),
        ("wild-jump", with(&wild_jump, &all[..1])),
        ("no-program", with(&none, &all)),
        ("short-frames", with(&none, &[vec![0; 13], vec![8, 0], Vec::new()])),
    ]
}

/// Returns a packet from port 1000 to port 53.
fn packet(ipv6: bool, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut transport = vec![0x03, 0xe8, 0, 53];
    match protocol {
        6 => transport.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 1, 0, 0, 0, 0, 0]),
        _ => transport.extend([0, 8 + payload.len() as u8, 0, 0]),
    }
    transport.extend(payload);
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    if ipv6 {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, transport.len() as u8, protocol, 64]);
        frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    } else {
        frame.extend([8, 0, 0x45, 0xb8, 0, 20 + transport.len() as u8, 0, 0, 0x40, 0, 64, protocol, 0, 0]);
        frame.extend([10, 0, 0, 2, 10, 0, 0, 1]);
    }
    frame.extend(transport);
    frame
}
