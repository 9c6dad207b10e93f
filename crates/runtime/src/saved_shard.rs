//! The saved state of a shard, with which another process continues
//! (docs/adr/0026-connections-at-an-upgrade.md).
//!
//! ```text
//!   sections     length (8 bytes, little-endian) and bytes of each: runtime, application, engine
//!   digest       8 bytes: detects a state that was cut off or changed
//! ```
//!
//! Each section is encoded by postcard, which has neither names nor types: only programs with the same
//! [`STATE_FORMAT`] understand each other.

pub(crate) mod state_config;

use rustix::fd::{BorrowedFd, OwnedFd};
use serde::Serialize;
use serde::de::DeserializeOwned;
pub use state_config::StateConfig;

/// Names the format of saved states. Two programs understand each other only if both parts are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateFormat {
    /// Raised with each change of a type that is saved, or of the meaning of its values.
    pub version: u32,
    /// Hash of the layouts of all types that are saved. It finds a change between two versions, and one for
    /// which the version was not raised.
    pub layout: u64,
}

/// The format that this program writes and reads. A test computes the hash.
pub const STATE_FORMAT: StateFormat = StateFormat { version: 4, layout: 0x4039_fee6_6bac_bdf8 };

/// Bytes of the length of a section, and of the digest.
const WORD_BYTES: usize = 8;

/// The state of a shard between two turns.
#[derive(Debug, Default)]
pub struct SavedShard {
    /// The encoded state, which refers to descriptors by their index. It may have hundreds of MiB: the bytes
    /// of all connections that were not acknowledged or not read.
    pub bytes: Vec<u8>,
    /// Copies of the descriptors that the state needs: memory shared with programs, and what wakes both
    /// sides. While they are open, programs do not notice that the shard's process is gone.
    pub descriptors: Vec<OwnedFd>,
    /// TCP connections in the state.
    pub connections: u32,
}

/// The descriptors of a saved state by index.
#[derive(Debug, Default)]
pub struct DescriptorTable(Vec<Option<OwnedFd>>);

impl DescriptorTable {
    /// Adds a copy of a descriptor. Returns its index.
    ///
    /// # Errors
    /// The process has as many descriptors as it may have.
    pub fn add(&mut self, fd: BorrowedFd<'_>) -> Result<u32, String> {
        let copy = fd.try_clone_to_owned().map_err(|error| format!("copy of a descriptor: {error}"))?;
        self.0.push(Some(copy));
        // Cannot truncate: a process has fewer descriptors.
        Ok(self.0.len() as u32 - 1)
    }

    /// Takes the descriptor of an index.
    ///
    /// # Errors
    /// There is none, or it was taken before.
    pub fn take(&mut self, index: u32) -> Result<OwnedFd, String> {
        let taken = self.0.get_mut(index as usize).and_then(Option::take);
        taken.ok_or_else(|| format!("saved state: no descriptor {index}"))
    }
}

/// Encodes a value after the bytes in `out`.
///
/// # Errors
/// The value refuses to be saved; the text says why.
pub(crate) fn encode_to(out: Vec<u8>, value: &impl Serialize) -> Result<Vec<u8>, String> {
    postcard::to_extend(value, out).map_err(|error| format!("encode the state: {error}"))
}

/// Decodes a value that takes all of `bytes`.
///
/// # Errors
/// The bytes are not valid.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err("saved state: bytes are left".into()),
        Err(error) => Err(format!("saved state: {error}")),
    }
}

/// Writes the sections of a state.
#[derive(Default)]
pub(crate) struct SectionWriter(Vec<u8>);

impl SectionWriter {
    /// Adds a section, which `write` appends to the vector.
    pub(crate) fn add(
        &mut self,
        write: impl FnOnce(Vec<u8>) -> Result<Vec<u8>, String>,
    ) -> Result<(), String> {
        let start = self.0.len() + WORD_BYTES;
        let mut bytes = core::mem::take(&mut self.0);
        bytes.resize(start, 0);
        let mut bytes = write(bytes)?;
        let len = (bytes.len() - start) as u64;
        bytes[start - WORD_BYTES..start].copy_from_slice(&len.to_le_bytes());
        self.0 = bytes;
        Ok(())
    }

    /// Returns the state with its digest.
    pub(crate) fn finish(mut self, descriptors: DescriptorTable) -> SavedShard {
        let digest = digest(&self.0);
        self.0.extend(digest.to_le_bytes());
        let descriptors = descriptors.0.into_iter().flatten().collect();
        SavedShard { bytes: self.0, descriptors, connections: 0 }
    }
}

/// Reads the sections of a state.
pub(crate) struct SectionReader<'a>(&'a [u8]);

impl<'a> SectionReader<'a> {
    /// # Errors
    /// The state was cut off or changed.
    pub(crate) fn new(bytes: &'a [u8]) -> Result<Self, String> {
        let (sections, expected) = bytes.split_last_chunk().ok_or("saved state: it has no digest")?;
        if digest(sections) != u64::from_le_bytes(*expected) {
            return Err("saved state: it was cut off or changed".into());
        }
        Ok(Self(sections))
    }

    /// Returns the next section.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn next(&mut self) -> Result<&'a [u8], String> {
        let cut_off = || "saved state: a section is missing".to_owned();
        let (len, rest) = self.0.split_first_chunk().ok_or_else(cut_off)?;
        let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| cut_off())?;
        let (section, rest) = rest.split_at_checked(len).ok_or_else(cut_off)?;
        self.0 = rest;
        Ok(section)
    }
}

/// Returns the table of passed descriptors.
pub(crate) fn descriptor_table(descriptors: Vec<OwnedFd>) -> DescriptorTable {
    DescriptorTable(descriptors.into_iter().map(Some).collect())
}

/// Returns a digest. Each step is a bijection of what it has so far, so a change of a single word always
/// changes the result.
fn digest(bytes: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let step = |digest: u64, word: u64| (digest ^ word).wrapping_mul(FACTOR).rotate_left(29);
    let (words, rest) = bytes.as_chunks::<WORD_BYTES>();
    let mut last = [0; WORD_BYTES];
    last[..rest.len()].copy_from_slice(rest);
    let whole = words.iter().fold(bytes.len() as u64, |digest, word| step(digest, u64::from_le_bytes(*word)));
    step(whole, u64::from_le_bytes(last))
}

#[cfg(all(test, not(loom)))]
mod layout_tests;
#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::io::pipe;
    use std::os::fd::AsFd;

    #[test]
    fn changed_bits_and_lengths_are_found() {
        let mut writer = SectionWriter::default();
        for value in [&b"runtime"[..], b"", b"engine and more"] {
            writer.add(|out| encode_to(out, &value)).unwrap();
        }
        let SavedShard { bytes, .. } = writer.finish(DescriptorTable::default());
        let mut reader = SectionReader::new(&bytes).unwrap();
        let sections = [(); 3].map(|()| decode::<Vec<u8>>(reader.next().unwrap()).unwrap());
        assert_eq!(sections, [&b"runtime"[..], b"", b"engine and more"]);
        assert!(reader.next().is_err());
        for bit in 0..8 * bytes.len() {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(SectionReader::new(&changed).is_err(), "bit {bit}");
        }
        assert!((0..bytes.len()).all(|len| SectionReader::new(&bytes[..len]).is_err()));
    }

    #[test]
    fn descriptors_are_taken_once() {
        let (reader, _writer) = pipe().unwrap();
        let mut table = DescriptorTable::default();
        assert_eq!([table.add(reader.as_fd()), table.add(reader.as_fd())], [Ok(0), Ok(1)]);
        let mut passed = descriptor_table(SectionWriter::default().finish(table).descriptors);
        assert!(passed.take(1).is_ok() && passed.take(1).is_err() && passed.take(2).is_err());
        assert!(passed.take(0).is_ok());
    }
}
