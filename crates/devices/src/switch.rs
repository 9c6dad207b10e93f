//! An Ethernet switch between devices of any kind, driven by calls of [`Switch::poll`].
//!
//! The switch learns which port each station is on and floods frames for unknown stations. A full port drops
//! the frame, as on a real switch. [`crate::memory::switch`] creates a switch together with the devices of
//! its stations.

use crate::offload::{Forwarder, meta_of};
use ginnel_stack::device::{Device, RxBurst, RxFrame, RxQueue, TxQueue};
use ginnel_stack::time::Instant;
use std::os::fd::RawFd;
use std::time::Duration;

/// Associativity of the address table. A full set evicts the station that was seen least recently.
const WAYS: usize = 4;
/// Time after which a silent station is forgotten (the ageing time that IEEE 802.1D recommends).
const AGEING_TIME: Duration = Duration::from_secs(300);

/// Counters of frames by their treatment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchStats {
    /// Frames for a known station, sent to its port.
    pub forwarded: u64,
    /// Frames for a group address or an unknown station, sent to all other ports.
    pub flooded: u64,
    /// Frames whose destination is on the port that they came from.
    pub filtered: u64,
    /// Frames or segments that a port did not accept, because it is full or because they are longer than it
    /// can send.
    pub dropped: u64,
    /// Stations evicted from the table to make room for others.
    pub evicted: u64,
}

/// A switch whose ports are devices: for example ends of memory pairs, TAP devices, or impaired links.
// limit: bytes in the ring of a switch port
// limit: stations that a switch remembers
pub struct Switch {
    // The queues are separate vectors because frames that the receiving queue of one port lends are sent to
    // the other ports.
    rx: Vec<Box<dyn RxQueue + Send>>,
    tx: Vec<Box<dyn TxQueue + Send>>,
    forwarding: ForwardingState,
    /// Port that the next call of `poll` serves first.
    next_port: usize,
}

/// The part of the switch without the queues.
struct ForwardingState {
    table: Vec<[Station; WAYS]>,
    forwarder: Forwarder,
    stats: SwitchStats,
}

#[derive(Clone, Copy, Default)]
struct Station {
    mac: [u8; 6],
    port: u16,
    /// Time of the last frame from the station; `None` if the entry is free.
    last_seen: Option<Instant>,
}

impl Switch {
    /// Creates a switch with these ports (at most 65,536). Its table holds `stations` addresses, rounded up
    /// to a power of two of at least 4.
    #[must_use]
    pub fn new(ports: Vec<Device>, stations: usize) -> Self {
        let sets = stations.div_ceil(WAYS).next_power_of_two();
        let (rx, tx) = ports.into_iter().map(|port| (port.rx, port.tx)).unzip();
        let forwarding = ForwardingState {
            table: vec![[Station::default(); WAYS]; sets],
            forwarder: Forwarder::default(),
            stats: SwitchStats::default(),
        };
        Self { rx, tx, forwarding, next_port: 0 }
    }

    /// Forwards one burst from each port. Returns the number of frames received; if it is not 0, more frames
    /// may be waiting.
    pub fn poll(&mut self, now: Instant) -> usize {
        let ports = self.rx.len();
        let mut frames = 0;
        for offset in 0..ports {
            let port = (self.next_port + offset) % ports;
            let mut burst = RxBurst::new();
            self.rx[port].rx_burst(now, &mut burst);
            frames += burst.len();
            for frame in &burst {
                self.forwarding.forward(now, port, frame, &mut self.tx);
            }
        }
        self.next_port = (self.next_port + 1) % ports.max(1);
        let due = |tx: &dyn TxQueue| tx.next_deadline().is_some_and(|deadline| deadline <= now);
        for tx in &mut self.tx {
            if frames > 0 || due(&**tx) {
                tx.flush(now);
            }
        }
        frames
    }

    /// Returns the time at which `poll` must be called even if no frame arrives.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let held = self.rx.iter().filter_map(|rx| rx.next_deadline());
        held.chain(self.tx.iter().filter_map(|tx| tx.next_deadline())).min()
    }

    /// Prepares for sleep on [`Switch::wake_fds`]. Returns false if frames are waiting.
    pub fn arm(&mut self) -> bool {
        self.rx.iter_mut().all(|rx| rx.arm())
    }

    /// Returns the descriptors to sleep on.
    #[must_use]
    pub fn wake_fds(&self) -> Vec<RawFd> {
        self.rx.iter().filter_map(|rx| rx.wake_fd()).collect()
    }

    /// Returns the counters.
    #[must_use]
    pub fn stats(&self) -> SwitchStats {
        self.forwarding.stats
    }
}

impl ForwardingState {
    fn forward(
        &mut self,
        now: Instant,
        from: usize,
        frame: &RxFrame<'_>,
        tx: &mut [Box<dyn TxQueue + Send>],
    ) {
        let Some(header) = frame.bytes.first_chunk::<14>() else { return };
        let [destination, source] = addresses(header);
        self.learn(now, source, from);
        let meta = meta_of(frame);
        match self.find(now, destination) {
            Some(port) if port == from => self.stats.filtered += 1,
            Some(port) => {
                self.stats.forwarded += 1;
                self.stats.dropped += self.forwarder.send(frame.bytes, meta, &mut *tx[port]);
            }
            None => {
                self.stats.flooded += 1;
                for (_, tx) in tx.iter_mut().enumerate().filter(|(port, _)| *port != from) {
                    self.stats.dropped += self.forwarder.send(frame.bytes, meta, &mut **tx);
                }
            }
        }
    }

    fn learn(&mut self, now: Instant, mac: [u8; 6], port: usize) {
        if is_group(mac) {
            return;
        }
        let set = self.set(mac);
        // Reuses the entry of the station, else a free one, else the least recently seen one: `None` sorts
        // before any time.
        let way = set.iter().position(|s| s.last_seen.is_some() && s.mac == mac);
        let way = way.or_else(|| (0..WAYS).min_by_key(|&way| set[way].last_seen)).unwrap_or(0);
        let previous =
            std::mem::replace(&mut set[way], Station { mac, port: port as u16, last_seen: Some(now) });
        if previous.mac != mac
            && previous.last_seen.is_some_and(|seen| now.saturating_since(seen) < AGEING_TIME)
        {
            self.stats.evicted += 1;
        }
    }

    fn find(&mut self, now: Instant, mac: [u8; 6]) -> Option<usize> {
        if is_group(mac) {
            return None;
        }
        let is_current = |s: &&Station| {
            s.mac == mac && s.last_seen.is_some_and(|seen| now.saturating_since(seen) < AGEING_TIME)
        };
        self.set(mac).iter().find(is_current).map(|station| station.port.into())
    }

    fn set(&mut self, mac: [u8; 6]) -> &mut [Station; WAYS] {
        let [a, b, c, d, e, f] = mac;
        let hash = u64::from_be_bytes([0, 0, a, b, c, d, e, f]).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let index = (hash >> 32) as usize & (self.table.len() - 1);
        &mut self.table[index]
    }
}

/// Returns destination and source address of an Ethernet header.
fn addresses(header: &[u8; 14]) -> [[u8; 6]; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, ..] = *header;
    [[a, b, c, d, e, f], [g, h, i, j, k, l]]
}

fn is_group(mac: [u8; 6]) -> bool {
    mac[0] & 1 != 0
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::conformance::{self, Guarantees};
    use crate::memory::{MemoryConfig, switch};
    use ginnel_stack::device::TxMeta;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn send(device: &mut Device, to: [u8; 6], from: [u8; 6], mark: u8) {
        let frame = [&to[..], &from[..], &[mark; 50]].concat();
        device.tx.reserve(62).expect("space").copy_from_slice(&frame);
        device.tx.commit(62, TxMeta::default());
        device.tx.flush(Instant::ZERO);
    }

    fn marks(devices: &mut [Device]) -> Vec<Vec<u8>> {
        let receive = |device: &mut Device| {
            let mut burst = RxBurst::new();
            device.rx.rx_burst(Instant::ZERO, &mut burst);
            burst.iter().map(|frame| frame.bytes[20]).collect()
        };
        devices.iter_mut().map(receive).collect()
    }

    fn mac(device: &Device) -> [u8; 6] {
        device.tx.capabilities().mac
    }

    #[test]
    fn two_switch_ports_conform() {
        // Frames for which a port has no room are lost.
        let guarantees =
            Guarantees { back_pressure: false, uncut_super_frame_bytes: usize::MAX, labels: true };
        for config in [MemoryConfig::default(), MemoryConfig::default().without_offloads()] {
            let over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                // Also ends the threads if a check panics; otherwise the scope would never end.
                let _end = StoreOnDrop(&over);
                conformance::run("switch", guarantees, &mut || {
                    let (mut switch, mut devices) = switch(2, &config);
                    let over = &over;
                    scope.spawn(move || {
                        while !over.load(Ordering::Relaxed) {
                            if switch.poll(Instant::ZERO) == 0 && switch.arm() {
                                std::thread::sleep(Duration::from_micros(20));
                            }
                        }
                    });
                    let right = devices.pop().expect("two devices");
                    (devices.pop().expect("two devices"), right)
                });
            });
        }
    }

    struct StoreOnDrop<'a>(&'a AtomicBool);

    impl Drop for StoreOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn unknown_addresses_are_flooded() {
        let (mut switch, mut devices) = switch(3, &MemoryConfig::default());
        let [a, b, c] = [0, 1, 2].map(|i| mac(&devices[i]));
        assert!(a != b && b != c && a != c);
        send(&mut devices[0], b, a, 1);
        assert_eq!(switch.poll(Instant::ZERO), 1);
        assert_eq!(marks(&mut devices), [vec![], vec![1], vec![1]]);
        send(&mut devices[1], a, b, 2);
        send(&mut devices[0], b, a, 3);
        switch.poll(Instant::ZERO);
        assert_eq!(marks(&mut devices), [vec![2], vec![3], vec![]]);
        send(&mut devices[2], [0xff; 6], c, 4);
        switch.poll(Instant::ZERO);
        assert_eq!(marks(&mut devices), [vec![4], vec![4], vec![]]);
        assert_eq!((switch.stats().forwarded, switch.stats().flooded), (2, 2));
    }

    #[test]
    fn moved_station_is_relearned_and_silent_one_expires() {
        let (mut switch, mut devices) = switch(3, &MemoryConfig::default());
        let station = [2, 9, 9, 9, 9, 9];
        let [a, c] = [mac(&devices[0]), mac(&devices[2])];
        send(&mut devices[1], a, station, 1);
        switch.poll(Instant::ZERO);
        send(&mut devices[2], a, station, 1);
        switch.poll(Instant::ZERO);
        marks(&mut devices);
        send(&mut devices[0], station, a, 2);
        switch.poll(Instant::ZERO);
        assert_eq!(marks(&mut devices), [vec![], vec![], vec![2]]);
        send(&mut devices[2], station, c, 3);
        switch.poll(Instant::ZERO);
        assert_eq!(marks(&mut devices), [vec![], vec![], Vec::<u8>::new()]);
        assert_eq!(switch.stats().filtered, 1);
        send(&mut devices[0], station, a, 4);
        switch.poll(Instant::ZERO + AGEING_TIME);
        assert_eq!(marks(&mut devices), [vec![], vec![4], vec![4]]);
    }

    // limit: stations that a switch remembers
    #[test]
    fn full_table_evicts_the_oldest_station() {
        let (near, far) = crate::memory::pair(MemoryConfig::default());
        let (mut sender, mut switch) = (near, Switch::new(vec![far], 16));
        for number in 0..10_000u16 {
            let [high, low] = number.to_be_bytes();
            send(&mut sender, [0xff; 6], [2, 0, 0, 0, high, low], 0);
            switch.poll(Instant::from_micros(number.into()));
        }
        let remembered = switch.forwarding.table.iter().flatten().filter(|s| s.last_seen.is_some()).count();
        assert_eq!((remembered, switch.stats().evicted), (16, 10_000 - 16));
        let newest = [2, 0, 0, 0, 0x27, 0x0f];
        assert_eq!(switch.forwarding.find(Instant::from_millis(10), newest), Some(0));
    }

    // limit: bytes in the ring of a switch port
    #[test]
    fn full_port_drops_and_queued_frames_prevent_sleep() {
        let (mut a, near) = crate::memory::pair(MemoryConfig::default());
        let small = MemoryConfig { ring_bytes: 1, ..MemoryConfig::default() }.without_offloads();
        let (far, mut slow) = crate::memory::pair(small);
        let (other, mut quick) = crate::memory::pair(MemoryConfig::default());
        let mut switch = Switch::new(vec![near, far, other], 4);
        let came = |device: &mut Device| {
            let mut burst = RxBurst::new();
            device.rx.rx_burst(Instant::ZERO, &mut burst);
            burst.len() as u64
        };
        for number in 0..40 {
            send(&mut a, [0xff; 6], [2; 6], number);
        }
        assert_eq!(switch.poll(Instant::ZERO), 40);
        let dropped = switch.stats().dropped;
        assert!((1..40).contains(&dropped), "{:?}", switch.stats());
        assert_eq!(came(&mut quick), 40, "the other port accepts frames");
        // The slow device holds the frames that fitted into its ring; once it has received them, there is
        // room for more.
        assert_eq!(came(&mut slow), 40 - dropped);
        assert_eq!(came(&mut slow), 0);
        send(&mut a, [0xff; 6], [2; 6], 40);
        assert_eq!(switch.poll(Instant::ZERO), 1);
        assert_eq!((came(&mut slow), came(&mut quick), switch.stats().dropped), (1, 1, dropped));
        assert!(switch.arm());
        assert_eq!(switch.wake_fds().len(), 3);
        send(&mut a, [0xff; 6], [2; 6], 0);
        assert!(!switch.arm());
    }

    #[test]
    fn frames_shorter_than_a_header_are_ignored() {
        let (mut switch, mut devices) = switch(2, &MemoryConfig::default());
        let header = [[4; 6], [2; 6]].concat().into_iter().chain([8, 0]).collect::<Vec<u8>>();
        for len in 0..=14 {
            devices[0].tx.reserve(len).expect("space").copy_from_slice(&header[..len]);
            devices[0].tx.commit(len, TxMeta::default());
            devices[0].tx.flush(Instant::ZERO);
            assert_eq!(switch.poll(Instant::ZERO), 1);
            let is_whole = len == 14;
            let mut burst = RxBurst::new();
            devices[1].rx.rx_burst(Instant::ZERO, &mut burst);
            assert_eq!(
                (burst.len(), switch.stats().flooded),
                (is_whole.into(), is_whole.into()),
                "{len} bytes"
            );
            let learned = switch.forwarding.find(Instant::ZERO, [2; 6]);
            assert_eq!(learned, is_whole.then_some(0), "{len} bytes");
        }
    }
}
