//! The state of stopped shards, on its way from the process that saves it through the supervisor to the next
//! process of the shards (docs/adr/0026-connections-at-an-upgrade.md).
//!
//! The bytes of each shard are in a memory file, so they cross as a descriptor and exist once. A message
//! takes few descriptors: the receiver asks for one batch after the other.

use super::codec::codec_struct;
use super::message::DESCRIPTORS_MAX;
use super::shard_link::SAVE_TIMEOUT;
use crate::command::Commander;
use crate::error::Error;
use crate::saved_shard::SavedShard;
use crate::shard_saver::{ShardSaver, StoppedShards};
use core::time::Duration;
use ginnel_devices::memory_file;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, fstat};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// How long shards may take until their state is saved: less than the supervisor waits, so that the child
/// says which shard is late.
const STOP_TIMEOUT: Duration = SAVE_TIMEOUT.saturating_sub(Duration::from_secs(1));

/// The saved state of one shard.
#[derive(Debug)]
pub struct ShardState {
    image: OwnedFd,
    descriptors: Vec<OwnedFd>,
    connections: u32,
}

impl ShardState {
    /// Stores `bytes` in a memory file. `descriptors` are those that the state refers to, and `connections`
    /// says how many TCP connections the state contains.
    ///
    /// # Errors
    /// The process has no descriptor or memory left.
    pub fn new(bytes: &[u8], descriptors: Vec<OwnedFd>, connections: u32) -> io::Result<Self> {
        let file = File::from(memory_file::create("ginnel-state", bytes.len(), MemfdFlags::empty())?);
        file.write_all_at(bytes, 0)?;
        Ok(Self { image: file.into(), descriptors, connections })
    }

    /// Returns the state with its bytes.
    ///
    /// # Errors
    /// The memory file cannot be read.
    pub fn load(self) -> io::Result<SavedShard> {
        let length = usize::try_from(fstat(&self.image)?.st_size).unwrap_or_default();
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(length).map_err(|_| io::ErrorKind::OutOfMemory)?;
        bytes.resize(length, 0);
        // Not by the position, which copies of the descriptor share: the state may be restored again.
        File::from(self.image).read_exact_at(&mut bytes, 0)?;
        Ok(SavedShard { bytes, descriptors: self.descriptors, connections: self.connections })
    }
}

/// Describes the state of a shard before its descriptors follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShardSummary {
    /// Descriptors that the state refers to, without the memory file.
    descriptors: u32,
    connections: u32,
}
codec_struct!(ShardSummary { descriptors, connections });

/// The saved state of all shards of a stack.
#[derive(Debug)]
pub struct SavedState(Vec<ShardState>);

impl SavedState {
    /// Combines the states of all shards, in the order of the shards.
    pub fn new(shards: Vec<ShardState>) -> Self {
        Self(shards)
    }

    /// Returns the states by shard.
    pub fn into_shards(self) -> Vec<ShardState> {
        self.0
    }

    /// Returns the number of TCP connections in the state.
    pub fn connections(&self) -> u64 {
        self.0.iter().map(|shard| u64::from(shard.connections)).sum()
    }

    pub(super) fn summary(&self) -> Vec<ShardSummary> {
        let of = |shard: &ShardState| ShardSummary {
            // Cannot truncate: descriptors are numbered by 31 bits.
            descriptors: shard.descriptors.len() as u32,
            connections: shard.connections,
        };
        self.0.iter().map(of).collect()
    }

    /// Returns the batch of descriptors that begins with the one of this number: the memory file and the
    /// other descriptors of each shard.
    pub(super) fn batch(&self, first: u32) -> Vec<BorrowedFd<'_>> {
        let all = self.0.iter().flat_map(|shard| core::iter::once(&shard.image).chain(&shard.descriptors));
        all.skip(first as usize).take(DESCRIPTORS_MAX).map(AsFd::as_fd).collect()
    }

    /// Receives a state: calls `request` for each batch with the number of its first descriptor.
    ///
    /// # Errors
    /// `request` has failed, or a batch is empty or too long.
    pub(super) fn receive(
        summary: &[ShardSummary],
        mut request: impl FnMut(u32) -> Result<Vec<OwnedFd>, Error>,
    ) -> Result<Self, Error> {
        let malformed = || Error::application("the descriptors of a saved state are not complete");
        let expected = summary.iter().map(|shard| 1 + u64::from(shard.descriptors)).sum::<u64>();
        let mut received: Vec<OwnedFd> = Vec::new();
        while (received.len() as u64) < expected {
            let first = u32::try_from(received.len()).map_err(|_| malformed())?;
            let batch = request(first)?;
            if batch.is_empty() || (received.len() + batch.len()) as u64 > expected {
                return Err(malformed());
            }
            received.extend(batch);
        }
        let mut received = received.into_iter();
        let of = |summary: &ShardSummary| {
            let image = received.next().ok_or_else(malformed)?;
            let descriptors = received.by_ref().take(summary.descriptors as usize).collect();
            Ok(ShardState { image, descriptors, connections: summary.connections })
        };
        summary.iter().map(of).collect::<Result<_, Error>>().map(Self)
    }
}

/// Stops the shards of this process so that their state can pass to another one.
pub trait SaveShards {
    /// Stops all shards between two turns, and returns their state. The shards stay stopped.
    ///
    /// # Errors
    /// A sentence that says which shard cannot save its state and why. All shards go on then.
    fn save(&mut self) -> Result<SavedState, String>;

    /// Has stopped shards go on: no other process has their state.
    fn release(&mut self);
}

/// Saves the shards that run on threads of this process.
#[derive(Debug)]
pub struct RunningShards {
    saver: ShardSaver,
    stopped: Option<StoppedShards>,
}

impl RunningShards {
    /// `shards` send commands to the shards, in their order.
    pub fn new(shards: Vec<Commander>) -> Self {
        Self { saver: ShardSaver::new(shards), stopped: None }
    }
}

impl SaveShards for RunningShards {
    fn save(&mut self) -> Result<SavedState, String> {
        let mut stopped = self.saver.save(STOP_TIMEOUT)?;
        let store = |shard: SavedShard| {
            ShardState::new(&shard.bytes, shard.descriptors, shard.connections)
                .map_err(|error| format!("the state of the shards cannot be stored: {error}"))
        };
        // Each shard's bytes are freed once they are stored.
        let states = core::mem::take(&mut stopped.saved).into_iter().map(store).collect::<Result<_, _>>()?;
        self.stopped = Some(stopped);
        Ok(SavedState::new(states))
    }

    fn release(&mut self) {
        self.stopped = None;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    fn pipe_with(byte: u8) -> OwnedFd {
        let (read, mut write) = std::io::pipe().unwrap();
        write.write_all(&[byte]).unwrap();
        read.into()
    }

    fn state(descriptors: &[usize]) -> SavedState {
        let mut next = 0;
        let of = |(shard, &count): (usize, &usize)| {
            let pipes = (0..count).map(|_| {
                next += 1;
                pipe_with(next as u8)
            });
            ShardState::new(&vec![shard as u8; 1000 * shard], pipes.collect(), shard as u32).unwrap()
        };
        SavedState::new(descriptors.iter().enumerate().map(of).collect())
    }

    #[test]
    fn state_crosses_in_batches() {
        let sent = state(&[3, 0, 2 * DESCRIPTORS_MAX]);
        let mut batches = 0;
        let received = SavedState::receive(&sent.summary(), |first| {
            batches += 1;
            Ok(sent.batch(first).iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect())
        });
        let received = received.unwrap();
        assert_eq!((batches, received.connections()), (3, 3));
        let mut next = 0u8;
        for (shard, state) in received.into_shards().into_iter().enumerate() {
            let SavedShard { bytes, descriptors, .. } = state.load().unwrap();
            assert_eq!(bytes, vec![shard as u8; 1000 * shard]);
            for descriptor in descriptors {
                let mut byte = [0];
                File::from(descriptor).read_exact(&mut byte).unwrap();
                next += 1;
                assert_eq!(byte, [next]);
            }
        }
        assert_eq!(usize::from(next), 3 + 2 * DESCRIPTORS_MAX);
    }

    #[test]
    fn state_can_be_read_again() {
        let sent = state(&[0, 1]);
        for _ in 0..2 {
            let copy =
                |first| Ok(sent.batch(first).iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect());
            let received = SavedState::receive(&sent.summary(), copy).unwrap();
            assert_eq!(received.into_shards().pop().unwrap().load().unwrap().bytes.len(), 1000);
        }
    }

    #[test]
    fn incomplete_batches_are_errors() {
        let sent = state(&[1]);
        let receive = |batch: usize| {
            SavedState::receive(&sent.summary(), |_| Ok((0..batch).map(|_| pipe_with(0)).collect()))
        };
        assert!(receive(0).is_err());
        assert!(receive(3).is_err());
        assert!(receive(1).is_ok());
    }
}
