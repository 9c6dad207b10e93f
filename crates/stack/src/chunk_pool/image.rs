//! A pool of chunks in an image of a stack: the chunks in use, with their bytes.

use super::{CHUNK_BYTES, Chunk, ChunkId, ChunkPool, ChunkSlot};
use core::fmt;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The bytes of a chunk.
pub(crate) struct ChunkBytes(Box<Chunk>);

impl<'de> Deserialize<'de> for ChunkBytes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct BytesVisitor;
        impl<'de> Visitor<'de> for BytesVisitor {
            type Value = ChunkBytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{CHUNK_BYTES} bytes")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<ChunkBytes, E> {
                let chunk = Box::<Chunk>::try_from(Box::<[u8]>::from(bytes));
                chunk.map(ChunkBytes).map_err(|other| E::invalid_length(other.len(), &self))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut bytes: A) -> Result<ChunkBytes, A::Error> {
                let mut chunk = Box::new([0; CHUNK_BYTES]);
                for (index, byte) in chunk.iter_mut().enumerate() {
                    *byte = bytes.next_element()?.ok_or_else(|| A::Error::invalid_length(index, &self))?;
                }
                Ok(ChunkBytes(chunk))
            }
        }
        from.deserialize_bytes(BytesVisitor)
    }
}

/// Like [`ChunkBytes`], to be written.
struct ChunkBytesRef<'a>(&'a [u8]);

impl Serialize for ChunkBytesRef<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(self.0)
    }
}

/// The chunks in use.
struct ChunksInUse<'a>(&'a ChunkPool);

impl Serialize for ChunksInUse<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let in_use = (0..).zip(&self.0.slots).filter(|(_, slot)| slot.in_use);
        // Encodings without names need the number of elements first.
        let mut bytes: Vec<(u32, ChunkBytesRef<'_>)> = Vec::with_capacity(self.0.in_use);
        bytes.extend(in_use.map(|(id, slot)| {
            (id, ChunkBytesRef(slot.bytes.as_ref().map_or(&[][..], |chunk| chunk.as_slice())))
        }));
        to.collect_seq(bytes)
    }
}

/// The pool, to be written.
#[derive(Serialize)]
#[serde(rename = "ChunkPool")]
pub(crate) struct ChunksRef<'a> {
    in_use: ChunksInUse<'a>,
    free: Vec<u32>,
    high_water: usize,
}

/// The pool as it was read.
#[derive(Deserialize)]
#[serde(rename = "ChunkPool")]
pub(crate) struct ChunksImage {
    in_use: Vec<(u32, ChunkBytes)>,
    /// Free chunks with lower numbers than the last one in use, the last freed one on top.
    free: Vec<u32>,
    high_water: usize,
}

/// Chunks in use that no buffer has claimed yet: each belongs to exactly one.
pub(crate) struct UnclaimedChunks {
    is_unclaimed: Vec<bool>,
    count: usize,
}

impl UnclaimedChunks {
    /// Claims a chunk for a buffer.
    ///
    /// # Errors
    /// The chunk is not in use, or belongs to another buffer.
    pub fn claim(&mut self, id: ChunkId) -> Result<(), &'static str> {
        match self.is_unclaimed.get_mut(id.0 as usize) {
            Some(is_unclaimed) if *is_unclaimed => {
                *is_unclaimed = false;
                self.count -= 1;
                Ok(())
            }
            _ => Err("a buffer has a chunk that is free or belongs to another buffer"),
        }
    }

    /// Checks that every chunk was claimed.
    ///
    /// # Errors
    /// One was not.
    pub fn check_none_left(&self) -> Result<(), &'static str> {
        if self.count == 0 { Ok(()) } else { Err("a chunk belongs to no buffer") }
    }
}

impl ChunkPool {
    /// Returns the image. No chunk may be lent.
    pub(crate) fn image(&self) -> ChunksRef<'_> {
        let end = self.slots.iter().rposition(|slot| slot.in_use).map_or(0, |last| last + 1);
        ChunksRef {
            in_use: ChunksInUse(self),
            free: self.free.iter().copied().filter(|id| (*id as usize) < end).collect(),
            high_water: self.high_water,
        }
    }

    /// Takes over the chunks of an image. The pool was not used before.
    ///
    /// # Errors
    /// The budget is too small, or the image is malformed.
    pub(crate) fn restore(&mut self, image: ChunksImage) -> Result<UnclaimedChunks, String> {
        let ChunksImage { in_use, free, high_water } = image;
        let end = in_use.last().map_or(0, |(id, _)| *id as usize + 1);
        if end > self.chunks_max {
            let max = self.chunks_max;
            return Err(format!(
                "tcp.buffer_pool_bytes has room for {max} chunks, but chunk {end} is in use"
            ));
        }
        if in_use.len() + free.len() != end || !in_use.is_sorted_by(|(a, _), (b, _)| a < b) {
            return Err("the lists of chunks contradict each other".into());
        }
        self.slots.resize_with(end, ChunkSlot::default);
        self.in_use = in_use.len();
        for (id, ChunkBytes(bytes)) in in_use {
            self.slots[id as usize] = ChunkSlot { bytes: Some(bytes), in_use: true };
        }
        for id in &free {
            match self.slots.get_mut(*id as usize) {
                Some(slot) if slot.bytes.is_none() => slot.bytes = Some(Box::new([0; CHUNK_BYTES])),
                _ => return Err("a chunk is free twice, or free and in use".into()),
            }
        }
        self.free.extend(free);
        self.high_water = high_water.max(self.in_use);
        let is_unclaimed = self.slots.iter().map(|slot| slot.in_use).collect();
        Ok(UnclaimedChunks { is_unclaimed, count: self.in_use })
    }
}
