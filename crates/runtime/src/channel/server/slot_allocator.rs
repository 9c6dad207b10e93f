//! The allocator of numbers of sockets, listeners and clients.

/// Allocates the number that was freed last, and otherwise the lowest one: where few sockets are in use at a
/// time, few were ever used.
#[derive(Debug)]
pub(super) struct SlotAllocator {
    free: Vec<u32>,
}

impl SlotAllocator {
    /// Creates an allocator of the numbers below `count`, all of them free.
    pub fn new(count: usize) -> Self {
        // Cannot truncate: the configuration limits the count.
        Self { free: (0..count as u32).rev().collect() }
    }

    /// Returns how many numbers are free.
    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Returns the number that is allocated next.
    pub fn peek(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Allocates a number.
    pub fn allocate(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Frees a number.
    pub fn release(&mut self, number: u32) {
        self.free.push(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_numbers_are_reused_before_high_ones() {
        let mut numbers = SlotAllocator::new(3);
        for _ in 0..10 {
            assert_eq!((numbers.peek(), numbers.allocate(), numbers.allocate()), (Some(0), Some(0), Some(1)));
            numbers.release(1);
            numbers.release(0);
        }
        assert_eq!(numbers.free_count(), 3);
        assert_eq!([(); 4].map(|()| numbers.allocate()), [Some(0), Some(1), Some(2), None]);
        assert_eq!((numbers.free_count(), numbers.peek()), (0, None));
    }
}
