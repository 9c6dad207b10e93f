//! Where urgent data stand in a stream (`SIOCATMARK`): the stack writes it, clients compare it with how far they have read.
//!
//! All bytes of a stream are in the region, also the urgent one. That a read stops in front of it, and leaves it out of line, is the clients' affair. Who has
//! never had urgent data sees that by the count of notices, which is read anyway.

use super::region::SocketWords;
use super::sync::Ordering;

/// The byte has come.
const VALID: u64 = 1 << 8;
/// It was taken out of line.
const TAKEN: u64 = 1 << 9;
/// Where the position begins. Of what is above, the position's lowest bits: they are compared with one that is near.
const POSITION: u32 = 16;
/// Of a hole, how many bytes it has.
const LEFT_OUT: u64 = 0xffff;

/// The urgent byte that was announced last, while reading has not passed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Unread bytes in front of it, whether they have come or not. 0: reading is at the mark.
    pub ahead: usize,
    /// The byte, once it has come and until somebody takes it.
    pub byte: Option<u8>,
    /// It was taken.
    pub taken: bool,
}

/// How far a position that is kept in part lies ahead of another.
fn ahead(word: u64, read: u64) -> i64 {
    ((word ^ word & 0xffff).wrapping_sub(read << POSITION)).cast_signed() >> POSITION
}

/// The stack's end: the byte at a position of the stream is urgent. `read` is what clients say that they have read, and `inline` that they want to find
/// urgent bytes in the stream.
pub(super) fn announce(words: &SocketWords, position: u64, byte: Option<u8>, read: u64, inline: bool) {
    let new = position << POSITION | byte.map_or(0, |byte| VALID | u64::from(byte));
    if words.notices.load(Ordering::Relaxed) == 0 {
        words.hole.store(0, Ordering::Relaxed);
    } else {
        let old = words.mark.load(Ordering::Relaxed);
        let moved = ahead(old, position) != 0;
        let left_out = hole(words, read) as u64;
        if moved && ahead(old, read + left_out) == 0 && old & VALID != 0 && !inline {
            // Reading has come to the earlier one, which will not be found in the stream (`tcp_check_urg`).
            words.hole.store(read << POSITION | (left_out + 1).min(LEFT_OUT), Ordering::Relaxed);
        }
    }
    words.mark.store(new, Ordering::Relaxed);
    words.notices.fetch_add(1, Ordering::Release);
}

/// A client's end: the mark, if reading has not passed it.
pub(super) fn find(words: &SocketWords, read: u64) -> Option<Mark> {
    if words.notices.load(Ordering::Acquire) == 0 {
        return None;
    }
    let word = words.mark.load(Ordering::Relaxed);
    let (valid, taken) = (word & VALID != 0, word & TAKEN != 0);
    let ahead = usize::try_from(ahead(word, read)).ok()?;
    Some(Mark { ahead, byte: (valid && !taken).then_some(word as u8), taken })
}

/// How many of the next bytes are left out, because each was urgent and next when another was announced.
pub(super) fn hole(words: &SocketWords, read: u64) -> usize {
    if words.notices.load(Ordering::Acquire) == 0 {
        return 0;
    }
    let word = words.hole.load(Ordering::Relaxed);
    if ahead(word, read) == 0 { (word & LEFT_OUT) as usize } else { 0 }
}

/// Takes the urgent byte. `None` if there is none, or it has not come.
pub(super) fn take(words: &SocketWords, read: u64) -> Option<u8> {
    let mut byte = None;
    // Another may come meanwhile, or somebody else take it.
    let _none = words.mark.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
        let there = word & VALID != 0 && word & TAKEN == 0 && ahead(word, read) >= 0;
        byte = there.then_some(word as u8);
        there.then_some(word | TAKEN)
    });
    byte.filter(|_| words.notices.load(Ordering::Relaxed) != 0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn distances_are_right_around_the_end_of_what_is_kept() {
        let end = 1u64 << 48;
        for (position, read, distance) in
            [(5, 5, 0), (9, 5, 4), (5, 9, -4), (end + 3, end - 2, 5), (end - 2, end + 3, -5)]
        {
            assert_eq!(ahead(position << POSITION | VALID | 7, read), distance, "{position} from {read}");
        }
    }
}
