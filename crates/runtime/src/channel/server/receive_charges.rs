//! Memory that Linux would charge to the receive buffer of a UDP socket for its unread datagrams, which
//! `SO_RCVBUF` limits.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Memory that Linux charges for a short datagram over loopback: `struct sk_buff` and a buffer of
/// `SKB_SMALL_HEAD_CACHE_SIZE`.
const SMALL_TRUESIZE: usize = 832;
/// Bytes of a buffer of Linux besides the payload: headers of the link, IP and UDP, and `struct
/// skb_shared_info`.
const BUFFER_OVERHEAD: usize = 379;
/// `struct sk_buff`.
const SKB_BYTES: usize = 256;

/// Returns the memory that Linux charges for a datagram of `len` bytes (`skb->truesize`).
pub(super) fn truesize(len: usize) -> usize {
    match len + BUFFER_OVERHEAD {
        ..=576 => SMALL_TRUESIZE,
        bytes => bytes.next_power_of_two() + SKB_BYTES,
    }
}

/// The datagrams in the region that were unread at the last call of [`unread`](Self::unread), or were added
/// since.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Vec<(u64, usize)>", into = "Vec<(u64, usize)>")]
pub(super) struct ReceiveCharges {
    /// Position after each datagram, and what it is charged.
    entries: VecDeque<(u64, usize)>,
    total: usize,
}

impl From<Vec<(u64, usize)>> for ReceiveCharges {
    fn from(entries: Vec<(u64, usize)>) -> Self {
        let total = entries.iter().fold(0, |total: usize, (_, charge)| total.saturating_add(*charge));
        Self { entries: entries.into(), total }
    }
}

impl From<ReceiveCharges> for Vec<(u64, usize)> {
    fn from(charges: ReceiveCharges) -> Self {
        charges.entries.into()
    }
}

impl ReceiveCharges {
    /// Adds a datagram of `len` bytes that ends at position `end`.
    pub fn add(&mut self, end: u64, len: usize) {
        let charge = truesize(len);
        self.entries.push_back((end, charge));
        self.total += charge;
    }

    /// Removes the datagrams that end at or before the position of the reader, and returns what the others
    /// are charged.
    pub fn unread(&mut self, read: u64) -> usize {
        while let Some(&(end, charge)) = self.entries.front()
            && end <= read
        {
            self.entries.pop_front();
            self.total -= charge;
        }
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_datagram_is_charged_by_its_own_length() {
        let mut charges = ReceiveCharges::default();
        charges.add(16_432, 16_384);
        charges.add(16_481, 1);
        assert_eq!((truesize(16_384), truesize(1)), (33_024, 832));
        assert_eq!(charges.unread(16_431), 33_024 + 832);
        assert_eq!(charges.unread(16_432), 832);
        assert_eq!(charges.unread(16_481), 0);
    }
}
