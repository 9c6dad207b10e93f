//! memif with a hostile peer: an input is a list of operations on the control channel, the rings, their
//! descriptors and the frames; the device has turns in between. Whatever the peer does, the device delivers
//! only valid frames, neither crashes nor blocks, and serves the next, well-behaved peer.

mod peer;

use ginnel_devices::memif::fuzzing::FuzzDevice;
use ginnel_devices::memif::{MemifConfig, Role, SocketName};
use ginnel_stack::device::{Label, RxBurst, RxChecksum, TxMeta};
use ginnel_stack::time::Instant;
use peer::{MemifPeer, RingDescriptor, RingField};
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum number of operations in an input.
const OPERATIONS_MAX: usize = 200;
/// Maximum length of a frame that the device may deliver.
const FRAME_BYTES_MAX: usize = 65_535 + 14 + 4;

/// Summary of one input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemifOutcome {
    /// Connections that were established, except the final well-behaved one.
    pub connections: u64,
    /// Frames that the device delivered.
    pub frames: u64,
    /// Connections that the device closed because of an invalid ring.
    pub violations: u64,
    /// Frames that the device dropped as malformed.
    pub malformed: u64,
    /// Peers that were rejected because of their messages.
    pub refused: u64,
}

/// Reader of the bytes of an input.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// Returns the next two bytes; missing bytes are 0.
    fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte().unwrap_or(0), self.byte().unwrap_or(0)])
    }

    /// Returns a 32-bit number: below 2,200, of 16 bits, close to the maximum, or any other.
    fn number(&mut self) -> u32 {
        let kind = self.byte().unwrap_or(0);
        let low = u32::from(self.word());
        match kind % 4 {
            0 => low % 2200,
            1 => low,
            2 => u32::MAX - low,
            _ => low << 16 | u32::from(self.word()),
        }
    }
}

/// The device and its peer.
struct MemifFixture {
    device: FuzzDevice,
    role: Role,
    peer: MemifPeer,
    frames: u64,
}

/// Runs one input.
///
/// # Panics
/// If the device violates an invariant.
pub fn run(data: &[u8]) -> MemifOutcome {
    let mut input = Input(data);
    let settings = input.byte().unwrap_or(0);
    let role = if settings & 1 == 0 { Role::Server } else { Role::Client };
    let config = MemifConfig {
        ring: 64,
        offload: settings & 2 == 0,
        mtu: if settings & 4 == 0 { 1500 } else { 9000 },
        secret: (settings & 8 != 0).then(|| "word".into()),
        ..MemifConfig::new(SocketName::Abstract("fuzz".into()), role)
    };
    let mut device = FuzzDevice::new(&config).expect("a free file descriptor");
    let socket = device.connect_peer().expect("a free file descriptor");
    let peer = MemifPeer::new(role, socket, settings >> 4);
    let mut fixture = MemifFixture { device, role, peer, frames: 0 };
    for _ in 0..OPERATIONS_MAX {
        let Some(operation) = input.byte() else { break };
        fixture.step(operation, &mut input);
    }
    let stats = fixture.device.stats();
    let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let outcome = MemifOutcome {
        connections: get(&stats.connections),
        frames: fixture.frames,
        violations: get(&stats.violations),
        malformed: get(&stats.rx_malformed),
        refused: get(&stats.refused),
    };
    fixture.check_next_peer(config.secret.is_some());
    outcome
}

impl MemifFixture {
    fn step(&mut self, operation: u8, input: &mut Input<'_>) {
        match operation % 20 {
            0..=4 => self.peer_sends_next(|message| message),
            5 => {
                let (at, value) = (input.byte().unwrap_or(0), input.byte().unwrap_or(0));
                self.peer_sends_next(|(mut message, fd)| {
                    message[usize::from(at) % 128] = value;
                    (message, fd)
                });
            }
            6 => {
                let kind = input.byte().unwrap_or(0);
                self.peer_sends_next(|(message, _)| (message, peer::test_fd(kind)));
            }
            7 => {
                let (kind, fill, fd) = (input.byte().unwrap_or(0), input.byte().unwrap_or(0), input.byte());
                let mut message = [fill; 128];
                message[..2].copy_from_slice(&u16::from(kind % 11).to_ne_bytes());
                self.peer.send(&message, fd.and_then(peer::test_fd));
                self.device.process_control();
            }
            8 => {
                let len = usize::from(input.byte().unwrap_or(0));
                self.peer.send(&[1; 256][..len], None);
                self.device.process_control();
            }
            9 => {
                let (selector, change, value) =
                    (input.byte().unwrap_or(0), input.byte().unwrap_or(0), input.word());
                let field = [RingField::Cookie, RingField::Flags, RingField::Head, RingField::Tail]
                    [usize::from(selector >> 1) % 4];
                // By a small amount, or to any value.
                let change = |old: u16| if change & 1 == 0 { old.wrapping_add(value % 70) } else { value };
                self.peer.update_field(usize::from(selector & 1), field, change);
            }
            10 | 11 => {
                let (ring, slot) = (input.byte().unwrap_or(0), input.byte().unwrap_or(0));
                let descriptor = RingDescriptor {
                    flags: input.byte().unwrap_or(0).into(),
                    region: (input.byte().unwrap_or(0) % 3).into(),
                    length: input.number(),
                    offset: input.number(),
                };
                self.peer.write_descriptor(usize::from(ring & 1), slot.into(), descriptor);
            }
            12 => {
                let (at, value) = (input.number(), input.word());
                self.peer.write_anywhere(at, &value.to_ne_bytes());
            }
            13..=15 => {
                let (count, len) = (input.byte().unwrap_or(0) % 8, usize::from(input.word()) % 5000);
                let header: [u8; 16] = core::array::from_fn(|_| input.byte().unwrap_or(0));
                for number in 0..=count {
                    self.peer.send_frame(&header, len, number);
                }
                self.turn();
            }
            16 => self.turn(),
            17 => {
                let (len, bits) = (usize::from(input.word()), input.number());
                self.device_sends(60 + len % 1441, TxMeta { label: Label::from_bits(bits), ..TxMeta::NONE });
            }
            18 => drop(self.device.device().rx.arm()),
            _ => {
                let settings = input.byte().unwrap_or(0);
                if let Ok(socket) = self.device.connect_peer() {
                    // The previous peer closes its socket, which the device detects when it polls.
                    self.peer = MemifPeer::new(self.role, socket, settings);
                    self.device.process_control();
                }
            }
        }
    }

    /// Sends the peer's next valid message, changed by `alter`.
    fn peer_sends_next(&mut self, alter: impl FnOnce(peer::OutgoingMessage) -> peer::OutgoingMessage) {
        if let Some(message) = self.peer.next_message() {
            let (message, fd) = alter(message);
            self.peer.send(&message, fd);
        }
        self.device.process_control();
    }

    /// Runs a turn of a shard.
    fn turn(&mut self) {
        let mut burst = RxBurst::new();
        self.device.device().rx.rx_burst(Instant::ZERO, &mut burst);
        for frame in &burst {
            let len = frame.bytes.len();
            assert!((1..=FRAME_BYTES_MAX).contains(&len), "a frame of {len} bytes");
            if let RxChecksum::Partial { start, offset } = frame.checksum {
                assert!(usize::from(start) + usize::from(offset) + 2 <= len, "{start} and {offset} of {len}");
            }
            if let Some(gso) = frame.gso {
                assert!(gso.size > 0 && usize::from(gso.header_len) <= len, "{gso:?} of {len}");
            }
            assert_eq!(Label::from_bits(frame.label.bits()), frame.label);
            // Each byte must be readable.
            core::hint::black_box(frame.bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>());
        }
        self.frames += burst.len() as u64;
        drop(burst);
        self.device.device().tx.flush(Instant::ZERO);
        self.device.process_control();
    }

    /// Lets the device send a frame. Returns false if there is no buffer.
    fn device_sends(&mut self, len: usize, meta: TxMeta) -> bool {
        let tx = &mut self.device.device().tx;
        let Some(buffer) = tx.reserve(len) else { return false };
        buffer.fill(0x5a);
        tx.commit(len, meta);
        tx.flush(Instant::ZERO);
        true
    }

    /// Replaces the hostile peer by a well-behaved one and checks that the device serves it.
    fn check_next_peer(mut self, secret: bool) {
        let socket = self.device.connect_peer().expect("a free file descriptor");
        self.peer = MemifPeer::well_behaved(self.role, socket, secret);
        self.device.process_control();
        assert!(!self.device.is_up(), "the previous peer is still connected");
        for _ in 0..20 {
            self.peer_sends_next(|message| message);
        }
        assert!(self.device.is_up(), "a well-behaved peer is not accepted");
        for number in 0..3u8 {
            self.peer.send_frame(&[0; 16], 100, number);
            let mut burst = RxBurst::new();
            self.device.device().rx.rx_burst(Instant::ZERO, &mut burst);
            let received: Vec<_> = burst.iter().map(|frame| frame.bytes).collect();
            assert_eq!(received, [[number; 100]], "a frame of the well-behaved peer is lost");
        }
        for number in 1..=3 {
            assert!(self.device_sends(100, TxMeta::NONE), "no buffer for a frame");
            assert_eq!(self.peer.last_received(), (number, vec![0x5a; 100]), "the received frame differs");
        }
    }
}

/// Returns the handwritten seed inputs. The first byte selects the role and the settings of the device, and
/// in its upper half those of the peer. Operations follow, of which 0 sends the peer's next valid message.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let handshake = [0; 7];
    let plain_frames = |count: u8, len: u16| {
        let [low, high] = len.to_le_bytes();
        [&[13, count, low, high][..], &[0; 16]].concat()
    };
    let mut with_header = plain_frames(2, 200);
    // A partial checksum from byte 34, stored 16 bytes later, and a label.
    with_header[4] = 1;
    with_header[10..12].copy_from_slice(&34u16.to_ne_bytes());
    with_header[12..14].copy_from_slice(&16u16.to_ne_bytes());
    with_header[16..20].copy_from_slice(&0x9000_0007u32.to_ne_bytes());
    let session = |settings: u8, rest: &[&[u8]]| [&[settings][..], &handshake, &rest.concat()].concat();
    let send = [17, 200, 0, 0, 0, 0];
    vec![
        ("server-session", session(0, &[&plain_frames(3, 100), &[16], &send, &with_header, &[18, 16]])),
        ("client-session", session(1, &[&plain_frames(3, 100), &[16], &send, &with_header, &[18, 16]])),
        ("without-headers", session(0x12, &[&plain_frames(3, 100), &send])),
        ("long-frames", session(1, &[&plain_frames(7, 4800), &plain_frames(7, 4000), &[16]])),
        ("empty-frames", session(0, &[&plain_frames(3, 0), &[16]])),
        ("head-jumps", session(0, &[&[9, 4, 1, 0xff, 0x7f, 16, 16]])),
        ("tail-jumps", session(1, &[&[9, 7, 1, 0xff, 0x7f, 16, 16]])),
        ("length-overflow", session(0, &[&[10, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 9, 4, 0, 1, 0, 16]])),
        ("offset-outside-region", session(0, &[&[10, 0, 0, 0, 0, 0, 100, 0, 2, 1, 0, 9, 4, 0, 1, 0, 16]])),
        ("unknown-region", session(0, &[&[10, 0, 0, 0, 2, 0, 100, 0, 0, 0, 0, 9, 4, 0, 1, 0, 16]])),
        ("unterminated-chain", session(0, &[&[10, 0, 0, 1, 0, 0, 100, 0, 0, 0, 0, 9, 4, 0, 1, 0, 16]])),
        ("interrupt-requested", session(0, &[&[9, 3, 1, 0, 0], &send, &send])),
        ("head-beyond-ring", session(0, &[&[9, 5, 1, 0, 0x40], &send])),
        ("wrong-version", vec![0, 5, 3, 9, 0]),
        ("wrong-secret", [&[8 | 0x20][..], &handshake].concat()),
        ("no-descriptor", vec![0, 0, 6, 0, 0]),
        ("unsealed-region", vec![0, 0, 6, 2, 0]),
        ("small-region", vec![0, 0, 6, 3, 0, 0, 0]),
        ("pipe-as-eventfd", vec![0, 0, 0, 6, 1, 0, 0]),
        ("ring-outside", vec![0, 0, 0, 5, 11, 0xff, 0, 0, 0]),
        ("short-message", vec![0, 8, 127, 0, 0]),
        ("unknown-message", vec![1, 7, 10, 0xff, 0, 0]),
        ("second-peer", [&[0][..], &handshake, &[19, 0], &handshake, &plain_frames(1, 60)].concat()),
        ("hello-twice", vec![1, 0, 7, 2, 0, 0, 0]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A corpus whose seeds establish no connection, or violate nothing, in a role would not test that role.
    #[test]
    fn seeds_cover_both_roles() {
        for client in [0, 1] {
            let mut sum = MemifOutcome::default();
            for (name, data) in seeds().into_iter().filter(|(_, data)| data[0] & 1 == client) {
                let outcome = run(&data);
                assert_eq!(run(&data), outcome, "{name}: not deterministic");
                sum.connections += outcome.connections;
                sum.frames += outcome.frames;
                sum.violations += outcome.violations;
                sum.malformed += outcome.malformed;
                sum.refused += outcome.refused;
            }
            assert!(
                sum.connections >= 3 && sum.frames >= 10 && sum.violations >= 1 && sum.refused >= 1,
                "{sum:?}"
            );
        }
    }

    /// All seeds but `interrupt-requested`: nothing counts the interrupts of the device.
    #[test]
    fn seeds_have_their_named_effect() {
        let outcome_of = |name: &str| {
            let all = seeds();
            run(&all.iter().find(|(other, _)| *other == name).unwrap().1)
        };
        for name in ["server-session", "client-session", "without-headers"] {
            let outcome = outcome_of(name);
            assert!(
                outcome.frames >= 4 && outcome.violations == 0 && outcome.malformed == 0,
                "{name}: {outcome:?}"
            );
        }
        for name in
            ["head-jumps", "tail-jumps", "offset-outside-region", "unknown-region", "head-beyond-ring"]
        {
            assert_eq!(outcome_of(name).violations, 1, "{name}");
        }
        for name in ["empty-frames", "unterminated-chain", "length-overflow"] {
            assert!(outcome_of(name).malformed > 0, "{name}");
        }
        for name in [
            "wrong-version",
            "wrong-secret",
            "no-descriptor",
            "unsealed-region",
            "small-region",
            "pipe-as-eventfd",
            "ring-outside",
            "short-message",
            "unknown-message",
            "hello-twice",
        ] {
            let outcome = outcome_of(name);
            assert!(outcome.refused > 0 && outcome.connections == 0, "{name}: {outcome:?}");
        }
        assert_eq!(outcome_of("second-peer").connections, 2);
        assert!(outcome_of("long-frames").frames > 3);
    }
}
