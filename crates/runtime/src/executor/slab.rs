//! A slab: slots with stable indices that are reused.

use core::ops::{Index, IndexMut};

/// A value keeps its index until it is removed. The slot that was freed last is reused first.
#[derive(Debug)]
pub(super) struct Slab<T> {
    slots: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    pub(super) fn insert(&mut self, value: T) -> u32 {
        if let Some(index) = self.free.pop() {
            self.slots[index as usize] = Some(value);
            return index;
        }
        self.slots.push(Some(value));
        // Cannot truncate: each slot belongs to a connection, a task or a future, and memory is exhausted
        // before `u32` is.
        (self.slots.len() - 1) as u32
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<T> {
        let value = self.slots.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(value)
    }

    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        self.slots.get_mut(index as usize)?.as_mut()
    }

    /// Returns the number of slots in use.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

const VACANT: &str = "an index in use has a value";

impl<T> Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, index: u32) -> &T {
        self.slots[index as usize].as_ref().expect(VACANT)
    }
}

impl<T> IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        self.slots[index as usize].as_mut().expect(VACANT)
    }
}

#[cfg(test)]
mod tests {
    use super::Slab;

    #[test]
    fn freed_slot_is_reused_and_others_stay() {
        let mut slab = Slab::new();
        let [a, b] = ["a", "b"].map(|v| slab.insert(v));
        assert_eq!((slab.remove(a), slab.remove(a), slab.len()), (Some("a"), None, 1));
        assert_eq!(slab.insert("c"), a);
        assert_eq!((slab[a], slab[b], slab.get_mut(9)), ("c", "b", None));
    }
}
