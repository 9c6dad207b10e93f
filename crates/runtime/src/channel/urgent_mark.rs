//! The position of urgent data in a stream (`SIOCATMARK`): the stack writes it, and clients compare it with
//! their read position.
//!
//! All bytes of a stream are in the region, including the urgent one. Clients make a read stop before the
//! urgent byte and skip it when it is taken out of band. A client whose stream never had urgent data
//! recognizes that by the count of out-of-band events, which it reads anyway.

use super::region::SocketArea;
use super::sync::Ordering;

/// The byte has arrived (`TCP_URG_VALID`).
const URG_VALID: u64 = 1 << 8;
/// The byte was taken out of band (`TCP_URG_READ`).
const URG_READ: u64 = 1 << 9;
/// Lowest bit of the position. The word has room for the lowest 48 bits of the position, which is compared
/// with near positions only.
const POSITION_SHIFT: u32 = 16;
/// Mask of the number of bytes in a hole, that is, of earlier urgent bytes which reads skip.
const HOLE_BYTES: u64 = 0xffff;

/// The urgent byte that was announced last, unless the read position has passed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UrgentMark {
    /// Unread bytes before the urgent byte, whether they have arrived or not. 0: the read position is at the
    /// mark.
    pub unread_before: usize,
    /// The byte, if it has arrived and was not taken.
    pub byte: Option<u8>,
    /// True if the byte was taken out of band.
    pub is_taken: bool,
}

/// Returns how far the position in `word`, of which only the lowest bits are kept, lies ahead of `read`.
fn distance(word: u64, read: u64) -> i64 {
    ((word ^ word & 0xffff).wrapping_sub(read << POSITION_SHIFT)).cast_signed() >> POSITION_SHIFT
}

/// Announces that the byte at `position` is urgent; called by the stack. `read` is the read position that
/// clients claim; `inline` says that clients want urgent bytes to stay in the stream.
pub(super) fn announce(area: &SocketArea, position: u64, byte: Option<u8>, read: u64, inline: bool) {
    let new = position << POSITION_SHIFT | byte.map_or(0, |byte| URG_VALID | u64::from(byte));
    if area.oob_events.load(Ordering::Relaxed) == 0 {
        area.urgent_hole.store(0, Ordering::Relaxed);
    } else {
        let old = area.urgent_mark.load(Ordering::Relaxed);
        let moved = distance(old, position) != 0;
        let hole = hole_bytes(area, read) as u64;
        if moved && distance(old, read + hole) == 0 && old & URG_VALID != 0 && !inline {
            // Reading has reached the earlier urgent byte, which must not appear in the stream
            // (`tcp_check_urg`).
            area.urgent_hole.store(read << POSITION_SHIFT | (hole + 1).min(HOLE_BYTES), Ordering::Relaxed);
        }
    }
    area.urgent_mark.store(new, Ordering::Relaxed);
    area.oob_events.fetch_add(1, Ordering::Release);
}

/// Returns the urgent mark, unless the read position has passed it; called by clients.
pub(super) fn current(area: &SocketArea, read: u64) -> Option<UrgentMark> {
    if area.oob_events.load(Ordering::Acquire) == 0 {
        return None;
    }
    let word = area.urgent_mark.load(Ordering::Relaxed);
    let (valid, is_taken) = (word & URG_VALID != 0, word & URG_READ != 0);
    let ahead = usize::try_from(distance(word, read)).ok()?;
    Some(UrgentMark { unread_before: ahead, byte: (valid && !is_taken).then_some(word as u8), is_taken })
}

/// Returns how many of the next bytes are skipped, because each was urgent and next in the stream when
/// another one was announced.
pub(super) fn hole_bytes(area: &SocketArea, read: u64) -> usize {
    if area.oob_events.load(Ordering::Acquire) == 0 {
        return 0;
    }
    let word = area.urgent_hole.load(Ordering::Relaxed);
    if distance(word, read) == 0 { (word & HOLE_BYTES) as usize } else { 0 }
}

/// Takes the urgent byte. `None` if there is none, or it has not arrived.
pub(super) fn take_byte(area: &SocketArea, read: u64) -> Option<u8> {
    let mut byte = None;
    // The stack may announce another urgent byte meanwhile, or another client take this one.
    let _none = area.urgent_mark.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
        let is_available = word & URG_VALID != 0 && word & URG_READ == 0 && distance(word, read) >= 0;
        byte = is_available.then_some(word as u8);
        is_available.then_some(word | URG_READ)
    });
    byte.filter(|_| area.oob_events.load(Ordering::Relaxed) != 0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn distance_is_right_where_positions_wrap() {
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
