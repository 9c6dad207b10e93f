//! The sources of a shard in an image of a stack: which exist, without their contents.

use super::{Source, SourceEntry, SourceId, SourceTable};
use serde::{Deserialize, Serialize};

/// A slot of the table.
#[derive(Serialize, Deserialize)]
struct SourceSlot {
    generation: u32,
    /// True if there is a source.
    exists: bool,
    released: bool,
}

/// The table.
#[derive(Serialize, Deserialize)]
#[serde(rename = "SourceTable")]
pub(crate) struct SourcesImage {
    slots: Vec<SourceSlot>,
    /// Vacant slots, the last freed one on top.
    free: Vec<u32>,
}

impl SourceTable {
    /// Returns whether another process can make all sources again.
    pub(crate) fn can_be_restored(&self) -> bool {
        self.entries.iter().filter_map(|entry| entry.source.as_deref()).all(Source::can_be_restored)
    }

    /// Returns the image.
    pub(crate) fn image(&self) -> SourcesImage {
        let slot = |entry: &SourceEntry| SourceSlot {
            generation: entry.generation,
            exists: entry.source.is_some(),
            released: entry.released,
        };
        SourcesImage { slots: self.entries.iter().map(slot).collect(), free: self.free.clone() }
    }

    /// Takes over the sources of an image, which `make` makes again. Slices of them are counted later.
    ///
    /// # Errors
    /// A source was not made, or the image is malformed.
    pub(crate) fn restore(
        &mut self,
        image: SourcesImage,
        mut make: impl FnMut(SourceId) -> Option<Box<dyn Source>>,
    ) -> Result<(), &'static str> {
        for (index, SourceSlot { generation, exists, released }) in (0..).zip(image.slots) {
            let source = match exists {
                true => Some(make(SourceId { index, generation }).ok_or("a source was not made again")?),
                false => None,
            };
            self.entries.push(SourceEntry { source, generation, refs: 0, released });
        }
        let vacant = self.entries.iter().filter(|entry| entry.source.is_none()).count();
        let mut free = image.free.clone();
        free.sort_unstable();
        free.dedup();
        let is_vacant =
            |index: &u32| self.entries.get(*index as usize).is_some_and(|entry| entry.source.is_none());
        if free.len() != image.free.len() || free.len() != vacant || !free.iter().all(is_vacant) {
            return Err("the list of vacant sources contradicts the sources");
        }
        self.free = image.free;
        Ok(())
    }

    /// Counts a slice that an image has queued. Returns the source.
    ///
    /// # Errors
    /// There is no such source.
    pub(crate) fn count_slice(&mut self, id: SourceId) -> Result<&dyn Source, &'static str> {
        let entry = self.entries.get_mut(id.index as usize).filter(|entry| entry.generation == id.generation);
        let entry = entry.ok_or("a slice belongs to no source")?;
        entry.refs += 1;
        entry.source.as_deref().ok_or("a slice belongs to no source")
    }

    /// Checks that every released source has slices.
    ///
    /// # Errors
    /// One has none, so nothing would ever drop it.
    pub(crate) fn check_released(&self) -> Result<(), &'static str> {
        let is_lost = |entry: &SourceEntry| entry.source.is_some() && entry.released && entry.refs == 0;
        if self.entries.iter().any(is_lost) { Err("a released source has no slices") } else { Ok(()) }
    }
}
