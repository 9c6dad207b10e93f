//! Peers that violate every rule: random bytes everywhere a peer can write, and random messages. The device
//! must neither crash nor deliver invalid frames, and must serve the next peer as usual.

use super::peer::Peer;
use super::*;
use crate::random::Random;
use core::hint::black_box;
use ginnel_stack::device::{RxBurst, TxMeta};
use ginnel_stack::time::Instant as Time;

const ROLES: [Role; 2] = [Role::Server, Role::Client];

/// The device under test, and the number of frames that it has delivered.
struct Bench {
    memif: Memif,
    folder: Folder,
    frames: u64,
}

impl Bench {
    fn new(role: Role, adjust: impl Fn(&mut MemifConfig)) -> Self {
        let folder = Folder::new();
        let mut config = MemifConfig { ring: 64, ..MemifConfig::new(folder.socket(), role) };
        adjust(&mut config);
        let memif = open(&config).expect("a device");
        Self { memif, folder, frames: 0 }
    }

    /// Does what a shard does in one turn.
    fn turn(&mut self, random: &mut Random) {
        let device = &mut self.memif.queues[0];
        let mut burst = RxBurst::new();
        device.rx.rx_burst(Time::ZERO, &mut burst);
        for frame in &burst {
            assert!((1..=FRAME_BYTES_MAX).contains(&frame.bytes.len()), "{}", frame.bytes.len());
            if let ginnel_stack::device::RxChecksum::Partial { start, offset } = frame.checksum {
                assert!(usize::from(start) + usize::from(offset) + 2 <= frame.bytes.len());
            }
            assert!(
                frame.gso.is_none_or(|gso| gso.size > 0 && usize::from(gso.header_len) <= frame.bytes.len())
            );
            // Checks that each byte can be read and does not change.
            let sum = |bytes: &[u8]| bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
            // Without `black_box`, the compiler may read the bytes once and compare the sum with itself.
            assert_eq!(sum(black_box(frame.bytes)), sum(black_box(frame.bytes)));
        }
        self.frames += burst.len() as u64;
        drop(burst);
        for _ in 0..random.below(4) {
            let len = [60, 1514, 3000][random.below(3) as usize].min(device.tx.capabilities().mtu + 14);
            if let Some(room) = device.tx.reserve(len) {
                room.fill(0x5a);
                device.tx.commit(len, TxMeta::default());
            }
        }
        device.tx.flush(Time::ZERO);
        if random.below(8) == 0 {
            device.rx.arm();
        }
    }

    /// Checks that a peer that follows the rules is served.
    fn serves_others(&mut self) {
        let mut config = Peer::config(&self.memif, &self.folder);
        config.offload = false;
        let mut other = open(&config).expect("a device");
        assert!(other.link.wait_for(true, PATIENCE), "a valid peer is not served");
        let (ours, theirs) = (&mut self.memif.queues[0], &mut other.queues[0]);
        for number in 0..200u8 {
            exchange(&mut theirs.tx, &mut ours.rx, number);
            exchange(&mut ours.tx, &mut theirs.rx, number);
        }
    }
}

/// Sends copies of a frame until one arrives.
fn exchange(
    tx: &mut Box<dyn ginnel_stack::device::TxQueue + Send>,
    rx: &mut Box<dyn ginnel_stack::device::RxQueue + Send>,
    number: u8,
) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < deadline, "a frame did not arrive");
        if let Some(room) = tx.reserve(100) {
            room.fill(number);
            tx.commit(100, TxMeta::default());
        }
        tx.flush(Time::ZERO);
        let mut burst = RxBurst::new();
        rx.rx_burst(Time::ZERO, &mut burst);
        if burst.iter().any(|frame| frame.bytes == [number; 100]) {
            return;
        }
    }
}

/// Modifies the shared memory: mostly like a sender, sometimes with invalid values. `role` is the device's.
fn scribble(peer: &Peer, role: Role, random: &mut Random) {
    let link = peer.link.as_ref().expect("connected");
    let (sends, takes) = match role {
        Role::Server => (&link.to_server[0].ring, &link.to_client[0].ring),
        Role::Client => (&link.to_client[0].ring, &link.to_server[0].ring),
    };
    let sent = if role == Role::Server { sends.head() } else { sends.tail() };
    let word = random.next_u64().to_ne_bytes();
    match random.below(100) {
        0..60 => {
            let sent = sent.wrapping_add(1 + random.below(3) as u16);
            if role == Role::Server { sends.set_head(sent) } else { sends.set_tail(sent) }
        }
        60..90 => {
            let mut descriptor = sends.descriptor(sent);
            match random.below(20) {
                0 => descriptor.region = random.below(3) as u16,
                1 => descriptor.offset = random.next_u64() as u32,
                2 => descriptor.length = random.next_u64() as u32,
                3..10 => descriptor.next = !descriptor.next,
                10..12 => descriptor.length = 0,
                _ => descriptor.length = random.below(2049) as u32,
            }
            sends.set_descriptor(sent, descriptor);
        }
        90..93 => sends.set_interrupts_enabled(random.below(2) == 0),
        93 => sends.set_head(random.next_u64() as u16),
        94 => sends.set_tail(random.next_u64() as u16),
        95 => takes.set_head(takes.head().wrapping_add(random.below(80) as u16).wrapping_sub(8)),
        96 => takes.set_tail(takes.tail().wrapping_add(random.below(80) as u16).wrapping_sub(8)),
        97 => drop(link.regions[0].copy_in(random.below(1 << 12) as usize, &word)),
        _ => drop(link.regions[0].copy_in(random.below(1 << 18) as usize, &word)),
    }
}

/// Peer and device take turns in one thread, so that a seed determines what they write and read.
#[test]
fn random_shared_memory_is_harmless() {
    for role in ROLES {
        for offload in [false, true] {
            let mut bench = Bench::new(role, |config| config.offload = offload);
            let mut random = Random::new(17);
            let mut meet = Peer::stranger(&bench.memif, &bench.folder);
            for _ in 0..80 {
                let peer = meet.connect(offload);
                assert!(bench.memif.link.wait_for(true, PATIENCE), "the device does not notice");
                let before = bench.memif.stats.violations.load(Ordering::Relaxed);
                for _ in 0..400 {
                    for _ in 0..=random.below(3) {
                        scribble(&peer, role, &mut random);
                    }
                    bench.turn(&mut random);
                    if bench.memif.stats.violations.load(Ordering::Relaxed) > before {
                        assert!(peer.is_sent_away());
                        break;
                    }
                }
            }
            drop(meet);
            let stats = &bench.memif.stats;
            let seen = [&stats.connections, &stats.violations, &stats.rx_malformed]
                .map(|c| c.load(Ordering::Relaxed));
            // Otherwise this test would prove nothing.
            assert!(
                seen[0] >= 40 && seen[1] > 10 && seen[2] > 10 && bench.frames > 300,
                "{seen:?} {}",
                bench.frames
            );
            bench.serves_others();
        }
    }
}

/// The peer writes while the device reads frames.
#[test]
fn concurrent_random_shared_memory_is_harmless() {
    for role in ROLES {
        let mut bench = Bench::new(role, |_| {});
        let stop = AtomicBool::new(false);
        let mut meet = Peer::stranger(&bench.memif, &bench.folder);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random::new(23);
                while !stop.load(Ordering::Relaxed) {
                    let peer = meet.connect(true);
                    let end = Instant::now() + Duration::from_millis(50);
                    while peer.is_open() && Instant::now() < end {
                        (0..20).for_each(|_| scribble(&peer, role, &mut random));
                    }
                }
            });
            let mut random = Random::new(29);
            let end = Instant::now() + Duration::from_secs(1);
            while Instant::now() < end {
                bench.turn(&mut random);
            }
            stop.store(true, Ordering::Relaxed);
        });
        drop(meet);
        assert!(bench.memif.stats.violations.load(Ordering::Relaxed) > 0);
        bench.serves_others();
    }
}

/// Sends messages with wrong content, order, size or descriptor.
#[test]
fn random_messages_are_refused() {
    for role in ROLES {
        let mut bench = Bench::new(role, |_| {});
        let mut meet = Peer::stranger(&bench.memif, &bench.folder);
        let mut random = Random::new(31);
        // A client waits longer and longer before it reconnects to a server that it cannot understand.
        let meetings = if role == Role::Server { 300 } else { 8 };
        for _ in 0..meetings {
            meet.confuse(&mut random);
        }
        drop(meet);
        let refused = bench.memif.stats.refused.load(Ordering::Relaxed);
        assert!(refused >= meetings / 3, "only {refused} were refused");
        bench.serves_others();
    }
}
