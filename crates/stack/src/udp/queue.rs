//! A socket's received datagrams: one ring of bytes and one of descriptions, so that in steady state nothing is allocated.

use core::net::{IpAddr, SocketAddr};
use std::collections::VecDeque;

/// What a datagram is charged besides its bytes: about what its description takes.
pub(super) const OVERHEAD: usize = 64;

/// A received datagram, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Bytes of payload. More than the caller's buffer if it was too small: the rest is lost.
    pub len: usize,
    /// Who sent it.
    pub from: SocketAddr,
    /// The address it was sent to: one of ours, or a broadcast or multicast address.
    pub to: IpAddr,
    /// Explicit congestion notification field (RFC 3168): 0 … 3.
    pub ecn: u8,
    /// Time to live, or hop limit.
    pub hop_limit: u8,
}

/// The queue.
#[derive(Debug, Default)]
pub(super) struct ReceiveQueue {
    datagrams: VecDeque<Datagram>,
    bytes: VecDeque<u8>,
}

impl ReceiveQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.datagrams.is_empty()
    }

    /// The next datagram, which stays.
    pub(super) fn front(&self) -> Option<&Datagram> {
        self.datagrams.front()
    }

    /// What the queue is charged.
    pub(super) fn cost(&self) -> usize {
        self.bytes.len() + self.datagrams.len() * OVERHEAD
    }

    /// What the queue could hold without growing.
    pub(super) fn capacity(&self) -> usize {
        self.bytes.capacity() + self.datagrams.capacity() * size_of::<Datagram>()
    }

    /// Gives the memory of an empty queue back.
    pub(super) fn release(&mut self) {
        if self.is_empty() {
            *self = Self::default();
        }
    }

    pub(super) fn push(&mut self, datagram: Datagram, payload: &[u8]) {
        self.bytes.extend(payload);
        self.datagrams.push_back(datagram);
    }

    /// Copies as much of the next datagram as fits.
    pub(super) fn peek(&self, out: &mut [u8]) -> Option<Datagram> {
        let datagram = *self.front()?;
        let len = datagram.len.min(out.len());
        let (first, second) = self.bytes.as_slices();
        let in_first = len.min(first.len());
        out[..in_first].copy_from_slice(&first[..in_first]);
        out[in_first..len].copy_from_slice(&second[..len - in_first]);
        Some(datagram)
    }

    /// The same, and takes it off the queue.
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
        Datagram { len, from, to: IpAddr::from([10, 0, 0, 1]), ecn: 0, hop_limit: 64 }
    }

    #[test]
    fn datagrams_come_back_in_order_across_the_end_of_the_ring() {
        let mut queue = ReceiveQueue::default();
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
    fn a_small_buffer_gets_the_beginning_and_the_rest_is_lost() {
        let mut queue = ReceiveQueue::default();
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
}
