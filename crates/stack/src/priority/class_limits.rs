//! How much of a limit that all classes share each class may use.

use super::CLASSES;

/// The part of a shared limit that each class may fill. The rest is reserved for higher classes: a queue that
/// lower classes have filled up to their limit has room for higher ones, although nothing in it can be
/// dropped any more.
///
/// The highest class may fill everything. Each class leaves one seventh of the reserve more free than the
/// next higher one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassLimits {
    /// For each class, what is reserved for higher classes, in parts of 2^16.
    reserved: [usize; CLASSES],
}

/// Binary digits of a part.
const PART_BITS: u32 = 16;

impl ClassLimits {
    /// Creates the limits with which the lowest class leaves `reserve_percent` free: 0 to 99, larger values
    /// count as 99.
    #[must_use]
    pub fn new(reserve_percent: u32) -> Self {
        let percent = reserve_percent.min(99) as usize;
        let part = |class| ((percent * (CLASSES - 1 - class)) << PART_BITS) / (100 * (CLASSES - 1));
        Self { reserved: core::array::from_fn(part) }
    }

    /// Returns the part of `limit` that a class may fill.
    #[must_use]
    pub const fn of(&self, limit: usize, class: u8) -> usize {
        let highest = CLASSES - 1;
        let class = if class as usize > highest { highest } else { class as usize };
        let reserved = self.reserved[class];
        // In two steps, so that the product does not overflow.
        let fraction = limit & ((1 << PART_BITS) - 1);
        limit - (limit >> PART_BITS) * reserved - ((fraction * reserved) >> PART_BITS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_leaves_more_than_the_next_higher() {
        let limits = ClassLimits::new(25);
        let of = |limit| core::array::from_fn::<usize, CLASSES, _>(|class| limits.of(limit, class as u8));
        assert_eq!(of(700), [525, 551, 576, 601, 626, 651, 676, 700]);
        assert_eq!(of(1 << 20)[0], 786_432);
        assert_eq!(of(0), [0; CLASSES]);
        assert_eq!(limits.of(700, u8::MAX), 700);
        // Neither overflows nor loses the lower half.
        let largest = of(usize::MAX);
        assert!(largest.is_sorted() && largest[0] > usize::MAX / 100 * 74 && largest[7] == usize::MAX);
    }

    #[test]
    fn nothing_is_reserved_with_0_percent() {
        for class in 0..CLASSES as u8 {
            assert_eq!(ClassLimits::new(0).of(12_345, class), 12_345);
            assert!(ClassLimits::new(u32::MAX).of(1 << 20, class) > 0);
        }
    }
}
