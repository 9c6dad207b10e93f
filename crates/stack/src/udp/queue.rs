//! The receive queue of a socket: one ring of bytes and one of entries, so that nothing is allocated in
//! steady state.

use crate::priority::{BEST_EFFORT, CLASSES};
use core::net::{IpAddr, SocketAddr};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Bytes charged for a datagram besides its payload: approximately the size of its entry.
pub(super) const OVERHEAD: usize = 64;

/// A received datagram without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Datagram {
    /// Bytes of payload. This is more than the length of the caller's buffer if the payload was truncated.
    pub len: usize,
    /// Source address and port.
    pub from: SocketAddr,
    /// Destination address: a local address, or a broadcast or multicast address.
    pub to: IpAddr,
    /// Type of service or traffic class; the lowest two bits are the ECN field (RFC 3168).
    pub tos: u8,
    /// Hop limit, or time to live.
    pub hop_limit: u8,
    /// Flow label of a datagram over IPv6, otherwise 0.
    pub flow_label: u32,
    /// If several datagrams have been coalesced ([`UdpOptions::gro`]): payload bytes of each but the last,
    /// which may be shorter. 0 for a single datagram.
    ///
    /// [`UdpOptions::gro`]: super::UdpOptions::gro
    pub gso_size: u16,
}

/// Largest number of coalesced datagrams (Linux's `UDP_GRO_CNT_MAX`), and of their bytes.
const GRO_COUNT_MAX: usize = 64;
const GRO_BYTES_MAX: usize = 65_507;

/// The receive queue of a socket.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct UdpReceiveQueue {
    datagrams: VecDeque<Datagram>,
    bytes: VecDeque<u8>,
    /// The class of each datagram; empty if datagrams have no classes.
    classes: VecDeque<u8>,
}

impl UdpReceiveQueue {
    /// Returns whether the parts of a queue that was read from an image agree.
    pub(super) fn is_valid(&self) -> bool {
        let len = self.datagrams.iter().try_fold(0_usize, |sum, datagram| sum.checked_add(datagram.len));
        len == Some(self.bytes.len())
            && [0, self.datagrams.len()].contains(&self.classes.len())
            && self.classes.iter().all(|class| usize::from(*class) < CLASSES)
    }

    /// Gives all datagrams a class, or none, as the configuration requires.
    pub(super) fn set_has_classes(&mut self, has_classes: bool) {
        self.classes.resize(if has_classes { self.datagrams.len() } else { 0 }, BEST_EFFORT);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.datagrams.is_empty()
    }

    /// Returns the next datagram without taking it.
    pub(super) fn front(&self) -> Option<&Datagram> {
        self.datagrams.front()
    }

    /// Returns the bytes that the queue is charged.
    pub(super) fn cost(&self) -> usize {
        self.bytes.len() + self.datagrams.len() * OVERHEAD
    }

    /// Returns the bytes of memory allocated by the queue.
    pub(super) fn capacity(&self) -> usize {
        self.bytes.capacity() + self.datagrams.capacity() * size_of::<Datagram>() + self.classes.capacity()
    }

    /// Frees the memory of the queue if it is empty.
    pub(super) fn shrink(&mut self) {
        if self.is_empty() {
            *self = Self::default();
        }
    }

    /// Appends a datagram to the last one if both have equal sources, destinations and header fields, and all
    /// but the appended one have equal lengths. Returns whether it was appended.
    pub(super) fn coalesce(&mut self, datagram: &Datagram, payload: &[u8]) -> bool {
        let Some(last) = self.datagrams.back_mut() else { return false };
        let gso_size = if last.gso_size == 0 { last.len } else { last.gso_size.into() };
        let expected = Datagram { len: last.len, gso_size: last.gso_size, ..*datagram };
        let joins = *last == expected
            && (1..=gso_size).contains(&payload.len())
            && last.len.is_multiple_of(gso_size)
            && last.len / gso_size < GRO_COUNT_MAX
            && last.len + payload.len() <= GRO_BYTES_MAX;
        if joins {
            // Cannot truncate: shorter than the longest datagram.
            last.gso_size = gso_size as u16;
            last.len += payload.len();
            self.bytes.extend(payload);
        }
        joins
    }

    pub(super) fn push(&mut self, datagram: Datagram, payload: &[u8]) {
        self.bytes.extend(payload);
        self.datagrams.push_back(datagram);
    }

    /// Adds the class of the datagram that was pushed last.
    pub(super) fn push_class(&mut self, class: u8) {
        self.classes.push_back(class);
    }

    /// Returns the class of the datagram that was pushed last.
    pub(super) fn newest_class(&self) -> Option<u8> {
        self.classes.back().copied()
    }

    /// Takes the class of the datagram that was taken last.
    pub(super) fn pop_class(&mut self) -> Option<u8> {
        self.classes.pop_front()
    }

    /// Copies as much of the next datagram as fits, without taking it.
    pub(super) fn peek(&self, out: &mut [u8]) -> Option<Datagram> {
        let datagram = *self.front()?;
        let len = datagram.len.min(out.len());
        let (first, second) = self.bytes.as_slices();
        let in_first = len.min(first.len());
        out[..in_first].copy_from_slice(&first[..in_first]);
        out[in_first..len].copy_from_slice(&second[..len - in_first]);
        Some(datagram)
    }

    /// Copies as much of the next datagram as fits, and takes it.
    pub(super) fn pop(&mut self, out: &mut [u8]) -> Option<Datagram> {
        let datagram = self.peek(out)?;
        self.datagrams.pop_front();
        self.bytes.drain(..datagram.len);
        Some(datagram)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(len: usize) -> Datagram {
        let from = SocketAddr::from(([10, 0, 0, 2], 53));
        Datagram {
            len,
            from,
            to: IpAddr::from([10, 0, 0, 1]),
            tos: 0,
            hop_limit: 64,
            flow_label: 0,
            gso_size: 0,
        }
    }

    #[test]
    fn datagrams_stay_in_order_across_the_ring_end() {
        let mut queue = UdpReceiveQueue::default();
        let mut out = [0; 64];
        for round in 0..100_u8 {
            queue.push(datagram(37), &[round; 37]);
            queue.push(datagram(0), &[]);
            queue.push(datagram(5), &[round ^ 0xff; 5]);
            assert_eq!(queue.pop(&mut out), Some(datagram(37)));
            assert_eq!(out[..37], [round; 37]);
            assert_eq!(queue.pop(&mut out), Some(datagram(0)));
            assert_eq!(queue.pop(&mut out), Some(datagram(5)));
            assert_eq!(out[..5], [round ^ 0xff; 5]);
        }
        assert!(queue.is_empty() && queue.cost() == 0);
    }

    #[test]
    fn short_buffer_truncates_the_datagram() {
        let mut queue = UdpReceiveQueue::default();
        queue.push(datagram(4), b"abcd");
        queue.push(datagram(2), b"ef");
        let mut out = [0; 3];
        assert_eq!(queue.peek(&mut out), Some(datagram(4)));
        assert_eq!(queue.pop(&mut out), Some(datagram(4)));
        assert_eq!(&out, b"abc");
        assert_eq!(queue.pop(&mut out), Some(datagram(2)));
        assert_eq!(&out[..2], b"ef");
        assert_eq!(queue.pop(&mut out), None);
    }

    #[test]
    fn equal_datagrams_are_coalesced() {
        let mut queue = UdpReceiveQueue::default();
        let mut out = [0; 64];
        queue.push(datagram(3), b"abc");
        assert!(queue.coalesce(&datagram(3), b"def") && queue.coalesce(&datagram(1), b"g"));
        assert!(!queue.coalesce(&datagram(3), b"hij"), "a shorter datagram ends the sequence");
        queue.push(datagram(3), b"hij");
        assert!(!queue.coalesce(&datagram(4), b"longer"));
        assert!(!queue.coalesce(&datagram(0), b""));
        assert!(!queue.coalesce(&Datagram { tos: 3, ..datagram(3) }, b"klm"));
        assert_eq!(queue.pop(&mut out), Some(Datagram { len: 7, gso_size: 3, ..datagram(7) }));
        assert_eq!(&out[..7], b"abcdefg");
        assert_eq!(queue.pop(&mut out), Some(datagram(3)));
        assert!(!queue.coalesce(&datagram(3), b"abc"), "the queue is empty");
        queue.push(datagram(1), b"x");
        let joined = (0..100).take_while(|_| queue.coalesce(&datagram(1), b"x")).count();
        assert_eq!(joined, GRO_COUNT_MAX - 1);
    }
}
