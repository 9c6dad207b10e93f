//! Numbers of sockets that are free.

/// The lowest are given out first, and one that comes back is the next: where few sockets are in use at once, few were ever used.
#[derive(Debug)]
pub(super) struct Numbers {
    free: Vec<u32>,
    /// Numbers from this one on were never used.
    used: usize,
}

impl Numbers {
    /// Numbers below `count`, all of them free.
    pub fn new(count: usize) -> Self {
        // Cannot truncate: the configuration has fewer.
        Self { free: (0..count as u32).rev().collect(), used: 0 }
    }

    /// How many are free.
    pub fn left(&self) -> usize {
        self.free.len()
    }

    /// Those below this one may have been used.
    pub fn used(&self) -> usize {
        self.used
    }

    /// The one that is given out next.
    pub fn next(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Gives it out.
    pub fn take(&mut self) -> Option<u32> {
        let number = self.free.pop()?;
        self.used = self.used.max(number as usize + 1);
        Some(number)
    }

    /// One that was given out is free again.
    pub fn give_back(&mut self, number: u32) {
        self.free.push(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_numbers_are_used_again_and_again_and_high_ones_never_while_there_are_such() {
        let mut numbers = Numbers::new(3);
        for _ in 0..10 {
            assert_eq!((numbers.next(), numbers.take(), numbers.take()), (Some(0), Some(0), Some(1)));
            numbers.give_back(1);
            numbers.give_back(0);
        }
        assert_eq!((numbers.left(), numbers.used()), (3, 2));
        assert_eq!([(); 4].map(|()| numbers.take()), [Some(0), Some(1), Some(2), None]);
        assert_eq!((numbers.left(), numbers.used(), numbers.next()), (0, 3, None));
    }
}
