//! The filters of connections and listeners. They belong to profiles, so a connection without a filter has
//! nothing that could refer to one, and a connection that a listener has received shares the listener's.

use crate::socket_filter::{FilteredPacket, SocketFilter};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Identifies a filter in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct FilterId(pub(super) u16);

impl FilterId {
    /// No filter: every segment is accepted.
    pub const NONE: Self = Self(0);
    /// A filter that drops every segment. A listener that will get a filter begins with this one.
    pub const DROP_ALL: Self = Self(u16::MAX);
}

/// A filter with the number of profiles that have it.
#[derive(Debug)]
pub(super) struct FilterSlot {
    pub(super) filter: Arc<dyn SocketFilter>,
    profiles: u16,
}

/// The filters of all profiles.
#[derive(Debug, Default)]
pub(crate) struct FilterTable {
    /// Slots by number, less one.
    pub(super) slots: Vec<Option<FilterSlot>>,
    free: Vec<u16>,
}

impl FilterTable {
    /// Adds a filter that no profile has yet. Returns `None` if there are as many filters as there can be
    /// profiles.
    pub fn add(&mut self, filter: Arc<dyn SocketFilter>) -> Option<FilterId> {
        let slot = Some(FilterSlot { filter, profiles: 0 });
        if let Some(index) = self.free.pop() {
            self.slots[usize::from(index)] = slot;
            return Some(FilterId(index + 1));
        }
        let id =
            u16::try_from(self.slots.len() + 1).ok().map(FilterId).filter(|id| *id != FilterId::DROP_ALL)?;
        self.slots.push(slot);
        Some(id)
    }

    fn index(id: FilterId) -> Option<usize> {
        usize::from(id.0).checked_sub(1)
    }

    /// Returns a filter; `None` for the two that are not in the table.
    pub fn get(&self, id: FilterId) -> Option<&Arc<dyn SocketFilter>> {
        let slot = self.slots.get(Self::index(id)?)?.as_ref()?;
        Some(&slot.filter)
    }

    /// Returns how many bytes of a packet a filter keeps.
    pub fn run(&self, id: FilterId, packet: &FilteredPacket<'_>) -> u32 {
        match self.get(id) {
            Some(filter) => filter.run(packet),
            None if id == FilterId::NONE => u32::MAX,
            None => 0,
        }
    }

    /// Counts one more profile with a filter.
    pub fn share(&mut self, id: FilterId) {
        if let Some(Some(slot)) = Self::index(id).and_then(|index| self.slots.get_mut(index)) {
            slot.profiles += 1;
        }
    }

    /// Counts one profile less with a filter, and frees a filter that no profile has.
    pub fn release(&mut self, id: FilterId) {
        let Some(index) = Self::index(id) else { return };
        let Some(slot) = self.slots.get_mut(index) else { return };
        if let Some(entry) = slot {
            entry.profiles = entry.profiles.saturating_sub(1);
            if entry.profiles == 0 {
                *slot = None;
                self.free.push(id.0 - 1);
            }
        }
    }

    /// Returns whether no profile has a filter of the table.
    pub fn is_empty(&self) -> bool {
        self.slots.len() == self.free.len()
    }

    /// Returns the number of filters.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}
