//! The device: IP packets without Ethernet on one side, frames on the other. Whoever is reached by it is one neighbour, whose address the stack is told at the start, so
//! nothing of ARP or NDP has to be asked; what the stack says about them by itself stays here.

use crate::clock::Clock;
use core::time::Duration;
use ginnel_stack::device::{Capabilities, Device, RxBurst, RxFrame, RxQueue, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The stack's own Ethernet address, and that of whoever it talks to.
const OWN_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub const NEIGHBOUR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const ETHERNET_BYTES: usize = 14;
const ETHERTYPE_V4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_V6: [u8; 2] = [0x86, 0xdd];
/// Packets that may wait each way: more than a script has.
const PACKETS_MAX: usize = 4096;
/// Longest packet (RFC 791; of IPv6 those that need no jumbo option are 40 bytes longer, and no device has them).
const PACKET_BYTES_MAX: usize = 65_535;
/// Types of ICMPv6 that are about the link: MLD, NDP, MLDv2 (RFC 2710, RFC 4861, RFC 3810).
const LINK_ICMPV6_TYPES: [core::ops::RangeInclusive<u8>; 2] = [130..=137, 143..=143];

/// A packet that left the stack, and when.
#[derive(Debug)]
pub struct OutboundPacket {
    pub bytes: Vec<u8>,
    pub at: Duration,
}

struct TunnelShared {
    inbound: Mutex<VecDeque<Vec<u8>>>,
    /// Readable when packets came and the stack may be asleep.
    doorbell: OwnedFd,
    outbound: Mutex<VecDeque<OutboundPacket>>,
    outbound_ready: Condvar,
    turns: Mutex<TurnCounters>,
    turn_ended: Condvar,
    mtu: usize,
}

/// Turns of the stack, counted from 1.
#[derive(Default)]
struct TurnCounters {
    begun: u64,
    ended: u64,
    /// Somebody waits until this one has ended.
    wanted: u64,
}

/// Turns until all is done that was asked for before them: what a program has made room for is shown to the channel in the turn behind the one that heard of it.
const TURNS_TO_SETTLE: u64 = 2;
/// A turn that takes longer than this is none any more: the stack is gone.
const TURN_MAX: Duration = Duration::from_secs(10);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it is locked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The side of the packets.
#[derive(Clone)]
pub struct Tunnel(Arc<TunnelShared>);

impl Tunnel {
    /// A tunnel for packets of so many bytes.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(mtu: usize) -> Result<Self, Errno> {
        Ok(Self(Arc::new(TunnelShared {
            inbound: Mutex::default(),
            doorbell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            outbound: Mutex::default(),
            outbound_ready: Condvar::new(),
            turns: Mutex::default(),
            turn_ended: Condvar::new(),
            mtu,
        })))
    }

    /// The stack's device at the other end, for one stack at a time.
    pub fn device(&self, clock: Clock) -> Device {
        let shared = &self.0;
        let rx = TunnelRx { shared: shared.clone(), lent: Vec::new() };
        let frame = vec![0; shared.mtu + 18];
        let tx = TunnelTx { shared: shared.clone(), clock, frame, committed: Vec::new() };
        Device { rx: Box::new(rx), tx: Box::new(tx) }
    }

    /// A packet for the stack. When this returns the stack has processed it, and sent its answers, as the kernel has when a packet was written to a TUN device.
    ///
    /// # Errors
    /// `EINVAL` if it is no IP packet, `EMSGSIZE` if it is longer than any can be, `ENOBUFS` if too many wait, `EIO` if the stack is gone.
    pub fn send(&self, packet: &[u8]) -> Result<(), Errno> {
        let ethertype = ethertype_of(packet).ok_or(Errno::INVAL)?;
        // As on a TUN device, the MTU is for the other way.
        if packet.len() > PACKET_BYTES_MAX {
            return Err(Errno::MSGSIZE);
        }
        let frame = [&OWN_MAC[..], &NEIGHBOUR_MAC, &ethertype, packet].concat();
        let mut inbound = lock(&self.0.inbound);
        if inbound.len() >= PACKETS_MAX {
            return Err(Errno::NOBUFS);
        }
        inbound.push_back(frame);
        drop(inbound);
        self.settle()
    }

    /// Waits until the stack has done what it has been asked for so far.
    ///
    /// # Errors
    /// `EIO` if it is gone.
    pub fn settle(&self) -> Result<(), Errno> {
        let mut turns = lock(&self.0.turns);
        // One may be under way that has looked already.
        let last = turns.begun + TURNS_TO_SETTLE;
        turns.wanted = turns.wanted.max(last);
        // A full counter is readable, too.
        let _ = rustix::io::write(&self.0.doorbell, &1u64.to_ne_bytes());
        while turns.ended < last {
            let (after, waited) =
                self.0.turn_ended.wait_timeout(turns, TURN_MAX).unwrap_or_else(PoisonError::into_inner);
            turns = after;
            if waited.timed_out() {
                return Err(Errno::IO);
            }
        }
        Ok(())
    }

    /// The next packet that left the stack. Waits for it.
    pub fn receive(&self) -> OutboundPacket {
        let mut outbound = lock(&self.0.outbound);
        loop {
            if let Some(packet) = outbound.pop_front() {
                return packet;
            }
            outbound = self.0.outbound_ready.wait(outbound).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

fn ethertype_of(packet: &[u8]) -> Option<[u8; 2]> {
    match packet.first()? >> 4 {
        4 if packet.len() >= 20 => Some(ETHERTYPE_V4),
        6 if packet.len() >= 40 => Some(ETHERTYPE_V6),
        _ => None,
    }
}

/// Whether a frame is for whoever is at the other end, and not about the link.
fn is_ip_packet(frame: &[u8]) -> bool {
    let Some((header, packet)) = frame.split_at_checked(ETHERNET_BYTES) else { return false };
    let about_link = match packet {
        // MLD stands behind a hop-by-hop header of eight bytes.
        [_, _, _, _, _, _, 0, ..] => packet.get(40) == Some(&58) && is_link_message(packet.get(48)),
        [_, _, _, _, _, _, 58, ..] => is_link_message(packet.get(40)),
        _ => false,
    };
    match &header[12..] {
        ethertype if *ethertype == ETHERTYPE_V4 => true,
        ethertype if *ethertype == ETHERTYPE_V6 => !about_link,
        _ => false,
    }
}

fn is_link_message(kind: Option<&u8>) -> bool {
    kind.is_some_and(|kind| LINK_ICMPV6_TYPES.iter().any(|types| types.contains(kind)))
}

impl TunnelShared {
    /// The last turn has ended; another begins, or the stack is about to sleep. Whether nobody waits for another.
    fn count_turn(&self, begins: bool) -> bool {
        let mut turns = lock(&self.turns);
        let news = turns.ended < turns.begun;
        turns.ended = turns.begun;
        turns.begun += u64::from(begins);
        if news {
            self.turn_ended.notify_all();
        }
        turns.wanted <= turns.ended
    }
}

struct TunnelRx {
    shared: Arc<TunnelShared>,
    lent: Vec<Vec<u8>>,
}

impl RxQueue for TunnelRx {
    fn rx_burst<'a>(&'a mut self, _: Instant, burst: &mut RxBurst<'a>) {
        self.shared.count_turn(true);
        let mut inbound = lock(&self.shared.inbound);
        let count = inbound.len().min(burst.remaining_capacity());
        self.lent.clear();
        self.lent.extend(inbound.drain(..count));
        drop(inbound);
        for frame in &self.lent {
            burst.push(RxFrame::new(frame));
        }
    }

    fn arm(&mut self) -> bool {
        // Emptied before the look, so that what comes after it is heard.
        let _ = rustix::io::read(&self.shared.doorbell, &mut [0; 8]);
        self.shared.count_turn(false) && lock(&self.shared.inbound).is_empty()
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.shared.doorbell.as_raw_fd())
    }
}

struct TunnelTx {
    shared: Arc<TunnelShared>,
    clock: Clock,
    frame: Vec<u8>,
    committed: Vec<Vec<u8>>,
}

impl TxQueue for TunnelTx {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            mac: OWN_MAC,
            mtu: self.shared.mtu,
            tx_checksum: false,
            gso_bytes_max: 0,
            uso: false,
            labels: false,
        }
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        let waiting = lock(&self.shared.outbound).len() + self.committed.len();
        if waiting >= PACKETS_MAX {
            return None;
        }
        self.frame.get_mut(..len)
    }

    fn commit(&mut self, len: usize, _: TxMeta) {
        let frame = &self.frame[..len];
        if is_ip_packet(frame) {
            self.committed.push(frame[ETHERNET_BYTES..].to_vec());
        }
    }

    fn flush(&mut self, _: Instant) {
        if self.committed.is_empty() {
            return;
        }
        let at = self.clock.now();
        lock(&self.shared.outbound)
            .extend(self.committed.drain(..).map(|bytes| OutboundPacket { bytes, at }));
        self.shared.outbound_ready.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(ethertype: [u8; 2], packet: &[u8]) -> Vec<u8> {
        [&NEIGHBOUR_MAC[..], &OWN_MAC, &ethertype, packet].concat()
    }

    #[test]
    fn what_is_about_the_link_stays_here() {
        let tunnel = Tunnel::new(1500).unwrap();
        let mut device = tunnel.device(Clock::new());
        let v6 = |next: u8, rest: &[u8]| {
            let mut packet = vec![0; 40];
            (packet[0], packet[6]) = (0x60, next);
            packet.extend(rest);
            packet
        };
        let frames = [
            frame([0x08, 0x06], &[0; 28]),
            frame(ETHERTYPE_V6, &v6(58, &[135, 0, 0, 0])),
            frame(ETHERTYPE_V6, &v6(0, &[58, 0, 5, 2, 0, 0, 1, 0, 143, 0, 0, 0])),
            frame(ETHERTYPE_V6, &v6(58, &[128, 0, 0, 0])),
            frame(ETHERTYPE_V4, &[0x45; 20]),
        ];
        for frame in &frames {
            device.tx.reserve(frame.len()).unwrap().copy_from_slice(frame);
            device.tx.commit(frame.len(), TxMeta::NONE);
        }
        device.tx.flush(Instant::ZERO);
        assert_eq!(tunnel.receive().bytes, v6(58, &[128, 0, 0, 0]));
        assert_eq!(tunnel.receive().bytes, [0x45; 20]);
    }

    #[test]
    fn only_ip_packets_are_taken_and_they_wake_the_stack() {
        let tunnel = Tunnel::new(100).unwrap();
        let mut device = tunnel.device(Clock::new());
        assert_eq!(tunnel.send(&[]), Err(Errno::INVAL));
        assert_eq!(tunnel.send(&[0x45; 19]), Err(Errno::INVAL));
        assert_eq!(tunnel.send(&[0x55; 60]), Err(Errno::INVAL));
        assert_eq!(tunnel.send(&[0x45; 65_536]), Err(Errno::MSGSIZE));
        assert!(device.rx.arm());
        let sender = std::thread::spawn(move || (tunnel.send(&[0x45; 20]), tunnel));
        while device.rx.arm() {
            std::thread::yield_now();
        }
        let mut burst = RxBurst::new();
        device.rx.rx_burst(Instant::ZERO, &mut burst);
        assert_eq!(burst.len(), 1);
        assert_eq!(&burst[0].bytes[ETHERNET_BYTES..], [0x45; 20]);
        drop(burst);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!sender.is_finished(), "the turn goes on");
        assert!(!device.rx.arm(), "another one is asked for");
        device.rx.rx_burst(Instant::ZERO, &mut RxBurst::new());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!sender.is_finished(), "that one goes on");
        assert!(device.rx.arm(), "nothing more is asked for");
        let (sent, tunnel) = sender.join().unwrap();
        assert_eq!(sent, Ok(()));
        lock(&tunnel.0.inbound).extend((0..PACKETS_MAX).map(|_| vec![0; 34]));
        assert_eq!(tunnel.send(&[0x45; 20]), Err(Errno::NOBUFS));
    }
}
