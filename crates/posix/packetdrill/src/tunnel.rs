//! The device: IP packets without Ethernet header on one side, frames on the other. All destinations are
//! reached through one neighbour with a statically configured MAC address, so the stack sends no ARP or NDP
//! queries; link messages that it sends on its own are dropped here.

use crate::clock::Clock;
use core::time::Duration;
use ginnel_stack::device::{Capabilities, Device, RxBurst, RxFrame, RxQueue, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Ethernet addresses of the stack and of its neighbour.
const OWN_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub const NEIGHBOUR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const ETHERNET_BYTES: usize = 14;
const ETHERTYPE_V4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_V6: [u8; 2] = [0x86, 0xdd];
/// Maximum number of packets that wait in each direction: more than a script has.
const PACKETS_MAX: usize = 4096;
/// Longest packet in bytes (RFC 791; IPv6 packets without jumbo option may be 40 bytes longer, but no device
/// supports them).
const PACKET_BYTES_MAX: usize = 65_535;
/// Types of ICMPv6 messages about the link: MLD, NDP, MLDv2 (RFC 2710, RFC 4861, RFC 3810).
const LINK_ICMPV6_TYPES: [core::ops::RangeInclusive<u8>; 2] = [130..=137, 143..=143];

/// An IP packet that left the stack, with the time since 1970 at which it left.
#[derive(Debug)]
pub struct OutboundPacket {
    pub bytes: Vec<u8>,
    pub at: Duration,
}

struct TunnelShared {
    inbound: Mutex<VecDeque<Vec<u8>>>,
    /// Readable from the time when a thread requests turns (`settle`) until the stack arms the device for
    /// sleep.
    doorbell: OwnedFd,
    outbound: Mutex<VecDeque<OutboundPacket>>,
    outbound_ready: Condvar,
    turns: Mutex<TurnCounters>,
    turn_ended: Condvar,
    mtu: usize,
}

/// Turns of the shard, counted from 1.
#[derive(Default)]
struct TurnCounters {
    begun: u64,
    ended: u64,
    /// Last turn whose end a thread waits for.
    wanted: u64,
}

/// Turns until all earlier requests are processed. One is not enough: memory that a program has released is
/// seen by the channel only in the turn after the one that processed the release.
const TURNS_TO_SETTLE: u64 = 2;
/// Maximum duration of a turn, after which the stack counts as ended.
const TURN_MAX: Duration = Duration::from_secs(10);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No thread panics while it holds the lock.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The packet side of the device.
#[derive(Clone)]
pub struct Tunnel(Arc<TunnelShared>);

impl Tunnel {
    /// Creates a tunnel with an MTU of `mtu` bytes.
    ///
    /// # Errors
    /// The process has no descriptor left.
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

    /// Creates the stack's device, for one stack at a time.
    pub fn device(&self, clock: Clock) -> Device {
        let shared = &self.0;
        let rx = TunnelRx { shared: shared.clone(), lent: Vec::new() };
        // As much as `reserve` may be asked for.
        let frame = vec![0; shared.mtu + 18];
        let tx = TunnelTx { shared: shared.clone(), clock, frame, committed: Vec::new() };
        Device { rx: Box::new(rx), tx: Box::new(tx) }
    }

    /// Passes a packet to the stack. When this function returns, the stack has processed the packet and sent
    /// its replies, like the kernel after a packet was written to a TUN device.
    ///
    /// # Errors
    /// `EINVAL` if it is no IP packet, `EMSGSIZE` if it is longer than any IP packet, `ENOBUFS` if too many
    /// packets wait, `EIO` if the stack has ended.
    pub fn send(&self, packet: &[u8]) -> Result<(), Errno> {
        let ethertype = ethertype_of(packet).ok_or(Errno::INVAL)?;
        // As on a TUN device, the MTU applies to the other direction only.
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

    /// Waits until the stack has processed all earlier requests.
    ///
    /// # Errors
    /// `EIO` if the stack has ended.
    pub fn settle(&self) -> Result<(), Errno> {
        let mut turns = lock(&self.0.turns);
        // A turn that has already checked for requests may be in progress.
        let last = turns.begun + TURNS_TO_SETTLE;
        turns.wanted = turns.wanted.max(last);
        // If the counter is full, the descriptor is readable, too.
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

    /// Waits for the next packet that left the stack, and returns it.
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

/// Returns whether a frame contains an IP packet that is not about the link.
fn is_ip_packet(frame: &[u8]) -> bool {
    let Some((header, packet)) = frame.split_at_checked(ETHERNET_BYTES) else { return false };
    let is_link_control = match packet {
        // MLD messages follow a hop-by-hop header of eight bytes.
        [_, _, _, _, _, _, 0, ..] => packet.get(40) == Some(&58) && is_link_message(packet.get(48)),
        [_, _, _, _, _, _, 58, ..] => is_link_message(packet.get(40)),
        _ => false,
    };
    match &header[12..] {
        ethertype if *ethertype == ETHERTYPE_V4 => true,
        ethertype if *ethertype == ETHERTYPE_V6 => !is_link_control,
        _ => false,
    }
}

fn is_link_message(kind: Option<&u8>) -> bool {
    kind.is_some_and(|kind| LINK_ICMPV6_TYPES.iter().any(|types| types.contains(kind)))
}

impl TunnelShared {
    /// Records that the last turn has ended, and that another one begins (`is_next_begun`) or the stack is
    /// about to sleep. Returns whether no thread waits for another turn.
    fn count_turn(&self, is_next_begun: bool) -> bool {
        let mut turns = lock(&self.turns);
        let has_ended = turns.ended < turns.begun;
        turns.ended = turns.begun;
        turns.begun += u64::from(is_next_begun);
        if has_ended {
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
        // The eventfd is read before the check, so that later requests wake the stack.
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
        let queued = lock(&self.shared.outbound).len() + self.committed.len();
        if queued >= PACKETS_MAX {
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
    fn link_messages_are_dropped() {
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
    fn ip_packets_wake_the_stack() {
        let tunnel = Tunnel::new(100).unwrap();
        let mut device = tunnel.device(Clock::new());
        assert_eq!(tunnel.send(&[]), Err(Errno::INVAL));
        assert_eq!(tunnel.send(&[0x45; 19]), Err(Errno::INVAL));
        assert_eq!(tunnel.send(&[0x55; 60]), Err(Errno::INVAL));
        assert_eq!(tunnel.send(&[0x45; 65_536]), Err(Errno::MSGSIZE));
        assert!(device.rx.arm());
        let shared = tunnel.0.clone();
        let sender = std::thread::spawn(move || (tunnel.send(&[0x45; 20]), tunnel));
        // The packet is queued before the turns are requested.
        while lock(&shared.turns).wanted == 0 {
            std::thread::yield_now();
        }
        assert!(!device.rx.arm(), "a turn is requested");
        let mut burst = RxBurst::new();
        device.rx.rx_burst(Instant::ZERO, &mut burst);
        assert_eq!(burst.len(), 1);
        assert_eq!(&burst[0].bytes[ETHERNET_BYTES..], [0x45; 20]);
        drop(burst);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!sender.is_finished(), "the first turn is in progress");
        assert!(!device.rx.arm(), "a second turn is requested");
        device.rx.rx_burst(Instant::ZERO, &mut RxBurst::new());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!sender.is_finished(), "the second turn is in progress");
        assert!(device.rx.arm(), "no further turn is requested");
        let (sent, tunnel) = sender.join().unwrap();
        assert_eq!(sent, Ok(()));
        lock(&tunnel.0.inbound).extend((0..PACKETS_MAX).map(|_| vec![0; 34]));
        assert_eq!(tunnel.send(&[0x45; 20]), Err(Errno::NOBUFS));
    }
}
