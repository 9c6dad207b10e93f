//! Where urgent data stand in a stream (`SIOCATMARK`): the stack writes it, clients compare it with how far they have read.
//!
//! All bytes of a stream are in the region, also the urgent one. That a read stops in front of it, and leaves it out of line, is the clients' affair. Who has
//! never had urgent data sees that by the count of notices, which is read anyway.

use super::region::SocketArea;
use super::sync::Ordering;

/// The byte has come.
const URG_VALID: u64 = 1 << 8;
/// It was taken out of line.
const URG_READ: u64 = 1 << 9;
/// Where the position begins. Of what is above, the position's lowest bits: they are compared with one that is near.
const POSITION_SHIFT: u32 = 16;
/// Of a hole, how many bytes it has.
const HOLE_BYTES: u64 = 0xffff;

/// The urgent byte that was announced last, while reading has not passed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UrgentMark {
    /// Unread bytes in front of it, whether they have come or not. 0: reading is at the mark.
    pub unread_before: usize,
    /// The byte, once it has come and until somebody takes it.
    pub byte: Option<u8>,
    /// It was taken.
    pub is_taken: bool,
}

/// How far a position that is kept in part lies ahead of another.
fn distance(word: u64, read: u64) -> i64 {
    ((word ^ word & 0xffff).wrapping_sub(read << POSITION_SHIFT)).cast_signed() >> POSITION_SHIFT
}

/// The stack's end: the byte at a position of the stream is urgent. `read` is what clients say that they have read, and `inline` that they want to find
/// urgent bytes in the stream.
pub(super) fn announce(words: &SocketArea, position: u64, byte: Option<u8>, read: u64, inline: bool) {
    let new = position << POSITION_SHIFT | byte.map_or(0, |byte| URG_VALID | u64::from(byte));
    if words.oob_events.load(Ordering::Relaxed) == 0 {
        words.urgent_hole.store(0, Ordering::Relaxed);
    } else {
        let old = words.urgent_mark.load(Ordering::Relaxed);
        let moved = distance(old, position) != 0;
        let left_out = hole_bytes(words, read) as u64;
        if moved && distance(old, read + left_out) == 0 && old & URG_VALID != 0 && !inline {
            // Reading has come to the earlier one, which will not be found in the stream (`tcp_check_urg`).
            words
                .urgent_hole
                .store(read << POSITION_SHIFT | (left_out + 1).min(HOLE_BYTES), Ordering::Relaxed);
        }
    }
    words.urgent_mark.store(new, Ordering::Relaxed);
    words.oob_events.fetch_add(1, Ordering::Release);
}

/// A client's end: the mark, if reading has not passed it.
pub(super) fn current(words: &SocketArea, read: u64) -> Option<UrgentMark> {
    if words.oob_events.load(Ordering::Acquire) == 0 {
        return None;
    }
    let word = words.urgent_mark.load(Ordering::Relaxed);
    let (valid, taken) = (word & URG_VALID != 0, word & URG_READ != 0);
    let ahead = usize::try_from(distance(word, read)).ok()?;
    Some(UrgentMark { unread_before: ahead, byte: (valid && !taken).then_some(word as u8), is_taken: taken })
}

/// How many of the next bytes are left out, because each was urgent and next when another was announced.
pub(super) fn hole_bytes(words: &SocketArea, read: u64) -> usize {
    if words.oob_events.load(Ordering::Acquire) == 0 {
        return 0;
    }
    let word = words.urgent_hole.load(Ordering::Relaxed);
    if distance(word, read) == 0 { (word & HOLE_BYTES) as usize } else { 0 }
}

/// Takes the urgent byte. `None` if there is none, or it has not come.
pub(super) fn take_byte(words: &SocketArea, read: u64) -> Option<u8> {
    let mut byte = None;
    // Another may come meanwhile, or somebody else take it.
    let _none = words.urgent_mark.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
        let there = word & URG_VALID != 0 && word & URG_READ == 0 && distance(word, read) >= 0;
        byte = there.then_some(word as u8);
        there.then_some(word | URG_READ)
    });
    byte.filter(|_| words.oob_events.load(Ordering::Relaxed) != 0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn distances_are_right_around_the_end_of_what_is_kept() {
        let end = 1u64 << 48;
        for (position, read, expected) in
            [(5, 5, 0), (9, 5, 4), (5, 9, -4), (end + 3, end - 2, 5), (end - 2, end + 3, -5)]
        {
            assert_eq!(
                distance(position << POSITION_SHIFT | URG_VALID | 7, read),
                expected,
                "{position} from {read}"
            );
        }
    }
}
