//! Checks of a send buffer that was read from an image of a stack.

use super::{CHUNK_BYTES, ItemContent, SLICES_MAX, SendBuffer, TailChunk};
use crate::chunk_pool::image::UnclaimedChunks;
use crate::tcp::source::SourceTable;

/// Positions in a stream stay below this, so that sums do not overflow.
const POSITION_MAX: u64 = 1 << 62;

impl SendBuffer {
    /// Claims the chunks and counts the slices of the buffer, and checks that its lists agree.
    ///
    /// # Errors
    /// The lists disagree, or a chunk is not in the image.
    pub(crate) fn check(
        &self,
        chunks: &mut UnclaimedChunks,
        sources: &mut SourceTable,
    ) -> Result<(), &'static str> {
        if self.start > self.end || self.end > POSITION_MAX || self.discarded > POSITION_MAX {
            return Err("the positions of a send buffer are out of range");
        }
        match self.items.front() {
            None if self.is_empty() => {}
            Some(first) if first.position <= self.start && !self.is_empty() => {}
            _ => return Err("a send buffer lacks its first bytes"),
        }
        let (mut slices, mut unshared) = (0, 0);
        // Chunks that a later item must free.
        let mut continued = Vec::new();
        for (index, item) in self.items.iter().enumerate() {
            let end = self.item_end(index);
            if item.position >= end || end <= self.start {
                return Err("an item of a send buffer has no bytes");
            }
            let len = end - item.position;
            match item.content {
                ItemContent::Bytes { chunk, start, is_continued } => {
                    if u64::from(start) + len > CHUNK_BYTES as u64 {
                        return Err("an item of a send buffer exceeds its chunk");
                    }
                    let known = continued.iter().position(|other| *other == chunk);
                    match (known, is_continued) {
                        (Some(known), false) => {
                            continued.swap_remove(known);
                        }
                        (Some(_), true) => {}
                        (None, is_continued) => {
                            chunks.claim(chunk)?;
                            if is_continued {
                                continued.push(chunk);
                            }
                        }
                    }
                }
                ItemContent::Slice { source, offset, is_shared } => {
                    let source = sources.count_slice(source)?;
                    let source_end = offset.checked_add(len);
                    if source_end.is_none_or(|end| end > source.len())
                        || source.shared(offset, 1).is_some() != is_shared
                    {
                        return Err("a slice is not within its source");
                    }
                    slices += 1;
                    unshared += usize::from(!is_shared);
                }
            }
        }
        if !continued.is_empty() {
            return Err("nothing frees a chunk of a send buffer");
        }
        if (self.slices, self.unshared_slices) != (slices, unshared) || slices > SLICES_MAX {
            return Err("the slices of a send buffer were counted wrong");
        }
        let is_item = |tail: &TailChunk| {
            let index = tail.item.checked_sub(self.discarded).and_then(|index| usize::try_from(index).ok());
            let item = index.and_then(|index| Some((index, self.items.get(index)?)));
            item.is_some_and(|(index, item)| match item.content {
                ItemContent::Bytes { chunk, start, .. } => {
                    let used = u64::from(start) + self.item_end(index) - item.position;
                    chunk == tail.chunk && used == tail.used as u64
                }
                ItemContent::Slice { .. } => false,
            })
        };
        if self.tail.as_ref().is_some_and(|tail| tail.used > CHUNK_BYTES || !is_item(tail)) {
            return Err("the last chunk of a send buffer is wrong");
        }
        let has_chunk = |chunk: &TailChunk| {
            let index = chunk.item.checked_sub(self.discarded).and_then(|index| usize::try_from(index).ok());
            matches!(index.and_then(|index| self.items.get(index)).map(|item| item.content),
                Some(ItemContent::Bytes { chunk: of_item, .. }) if of_item == chunk.chunk)
        };
        if !self.messages.is_valid(self.discarded, self.end, has_chunk) {
            return Err("the messages of a send buffer are wrong");
        }
        Ok(())
    }
}
