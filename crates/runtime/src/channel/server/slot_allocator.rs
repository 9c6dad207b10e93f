//! The allocator of numbers of sockets, listeners and clients.

/// Numbers that are listed at a time: a table that is as long as the list grows in steps of this size.
const BLOCK: usize = 256;

/// Allocates the number that was freed last, and otherwise the lowest one: where few sockets are in use at a
/// time, few were ever used. Numbers are listed when they are needed for the first time, so that the cost
/// of creating an allocator does not depend on their count.
#[derive(Debug)]
pub(super) struct SlotAllocator {
    /// Numbers that are listed and free.
    free: Vec<u32>,
    /// The numbers below this one are listed.
    listed: usize,
    count: usize,
}

impl SlotAllocator {
    /// Creates an allocator of the numbers below `count`, all of them free.
    pub fn new(count: usize) -> Self {
        // The list never moves: memory that was not used costs nothing.
        Self { free: Vec::with_capacity(count), listed: 0, count }
    }

    /// Creates an allocator of the numbers below `count`, of which those are allocated for which `allocated`
    /// returns true, from number 0 on. There are at most `count` of them.
    pub fn with_allocated(
        count: usize,
        allocated: impl DoubleEndedIterator<Item = bool> + ExactSizeIterator,
    ) -> Self {
        let mut numbers = Self::new(count);
        numbers.listed = allocated.len();
        // Cannot truncate: the configuration limits the count.
        let free = allocated.enumerate().rev().filter(|(_, allocated)| !allocated);
        numbers.free.extend(free.map(|(number, _)| number as u32));
        numbers
    }

    /// Returns how many numbers are free.
    pub fn free_count(&self) -> usize {
        self.count - self.in_use()
    }

    /// Returns how many numbers are allocated.
    #[inline]
    pub fn in_use(&self) -> usize {
        self.listed - self.free.len()
    }

    /// Returns whether a number is free.
    #[inline]
    pub fn has_free(&self) -> bool {
        !self.free.is_empty() || self.listed < self.count
    }

    /// Returns how many numbers are listed: no number from there on was ever allocated.
    pub fn listed(&self) -> usize {
        self.listed
    }

    /// Returns the number that is allocated next; `None` if all are allocated.
    pub fn peek(&self) -> Option<u32> {
        // Cannot truncate: the configuration limits the count.
        self.free.last().copied().or_else(|| (self.listed < self.count).then_some(self.listed as u32))
    }

    /// Allocates a number; `None` if all are allocated.
    #[inline]
    pub fn allocate(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| self.allocate_from_next_block())
    }

    #[cold]
    #[inline(never)]
    fn allocate_from_next_block(&mut self) -> Option<u32> {
        let end = self.count.min(self.listed + BLOCK);
        // Cannot truncate: the configuration limits the count.
        self.free.extend((self.listed as u32..end as u32).rev());
        self.listed = end;
        self.free.pop()
    }

    /// Frees a number.
    pub fn release(&mut self, number: u32) {
        self.free.push(number);
    }
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, SlotAllocator};

    #[test]
    fn freed_numbers_are_reused_before_new_ones() {
        let mut numbers = SlotAllocator::new(3);
        for _ in 0..10 {
            assert_eq!((numbers.peek(), numbers.allocate(), numbers.allocate()), (Some(0), Some(0), Some(1)));
            assert_eq!((numbers.in_use(), numbers.free_count()), (2, 1));
            numbers.release(1);
            numbers.release(0);
        }
        assert_eq!(numbers.free_count(), 3);
        assert_eq!([(); 4].map(|()| numbers.allocate()), [Some(0), Some(1), Some(2), None]);
        assert_eq!((numbers.free_count(), numbers.has_free(), numbers.peek()), (0, false, None));
    }

    #[test]
    fn restored_numbers_continue() {
        let mut numbers = SlotAllocator::with_allocated(6, [true, false, true, false].into_iter());
        assert_eq!((numbers.in_use(), numbers.free_count(), numbers.listed()), (2, 4, 4));
        assert_eq!([(); 5].map(|()| numbers.allocate()), [Some(1), Some(3), Some(4), Some(5), None]);
    }

    #[test]
    fn numbers_are_listed_in_blocks() {
        let count = 2 * BLOCK + 7;
        let mut numbers = SlotAllocator::new(count);
        assert_eq!((numbers.listed(), numbers.free_count(), numbers.has_free()), (0, count, true));
        let memory = numbers.free.as_ptr();
        let mut listed = Vec::new();
        for expected in 0..count as u32 {
            assert_eq!(numbers.allocate(), Some(expected));
            listed.push(numbers.listed());
        }
        listed.dedup();
        assert_eq!(listed, [BLOCK, 2 * BLOCK, count]);
        assert_eq!((numbers.allocate(), numbers.in_use(), numbers.has_free()), (None, count, false));
        (0..count as u32).for_each(|number| numbers.release(number));
        assert_eq!((numbers.in_use(), numbers.free_count(), numbers.free.as_ptr()), (0, count, memory));
    }
}
