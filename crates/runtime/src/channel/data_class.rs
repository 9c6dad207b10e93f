//! The class of priority of a socket's unread bytes, in a word of the region that the stack writes if
//! `[priority]` is in use: the highest class of unread bytes and where the last of these bytes ends, and the
//! class of the newest bytes. Reading does not change the word: a reader compares the end with the position
//! up to which bytes were read.

use super::sync::{AtomicU64, Ordering};
use ginnel_stack::priority::BEST_EFFORT;

/// Bits of a class.
const CLASS_BITS: u32 = 3;
const CLASS_MASK: u64 = (1 << CLASS_BITS) - 1;

/// The content of the word. Classes are stored with their lowest bit inverted, so that 0 stands for
/// [`BEST_EFFORT`].
#[derive(Clone, Copy)]
struct DataClass {
    /// Position after the last byte of the class `highest`.
    end: u64,
    highest: u8,
    newest: u8,
}

impl DataClass {
    fn from_word(word: u64) -> Self {
        let class = |bits: u64| (bits & CLASS_MASK) as u8 ^ BEST_EFFORT;
        Self { end: word >> (2 * CLASS_BITS), highest: class(word >> CLASS_BITS), newest: class(word) }
    }

    fn to_word(self) -> u64 {
        let bits = |class: u8| u64::from(class ^ BEST_EFFORT);
        self.end << (2 * CLASS_BITS) | bits(self.highest) << CLASS_BITS | bits(self.newest)
    }
}

/// Records that bytes of this class arrived, the last of them before position `end`, while bytes up to `read`
/// were read.
pub(super) fn record(word: &AtomicU64, class: u8, end: u64, read: u64) {
    let before = DataClass::from_word(word.load(Ordering::Relaxed));
    let after = if class >= before.highest || read >= before.end {
        DataClass { end, highest: class, newest: class }
    } else {
        DataClass { newest: class, ..before }
    };
    // A notification follows, for which a client reads the word.
    word.store(after.to_word(), Ordering::Release);
}

/// Returns the class of the unread bytes after position `read`. The caller knows that there are some. The
/// result is the recorded highest class as long as bytes of it are unread, and otherwise the class of the
/// newest bytes.
pub(super) fn of_unread(word: &AtomicU64, read: u64) -> u8 {
    let DataClass { end, highest, newest } = DataClass::from_word(word.load(Ordering::Acquire));
    if read < end { highest.max(newest) } else { newest }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn highest_class_counts_until_its_bytes_are_read() {
        let word = AtomicU64::new(0);
        assert_eq!(of_unread(&word, 0), BEST_EFFORT);
        record(&word, BEST_EFFORT, 10, 0);
        record(&word, 6, 20, 0);
        record(&word, BEST_EFFORT, 30, 5);
        assert_eq!([0, 19, 20, 29].map(|read| of_unread(&word, read)), [6, 6, BEST_EFFORT, BEST_EFFORT]);
        record(&word, 4, 40, 19);
        assert_eq!([19, 20].map(|read| of_unread(&word, read)), [6, 4]);
        record(&word, 4, 50, 20);
        assert_eq!([20, 49].map(|read| of_unread(&word, read)), [4, 4]);
        record(&word, 0, 60, 50);
        assert_eq!(of_unread(&word, 50), 0);
        record(&word, 7, u64::from(u32::MAX) << 8, 60);
        assert_eq!(of_unread(&word, 60), 7);
    }
}
