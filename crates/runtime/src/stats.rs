//! The counters of a shard. The shard publishes snapshots of them periodically; other threads read the
//! snapshots and never access the shard's own state.

mod catalogue;
mod mapping;
mod page;
mod read;
mod seqlock;

pub(crate) use catalogue::{StatsView, names};
pub(crate) use page::StatsPage;
pub use page::{CounterKind, ShardActivity};
pub use read::{PageError, PageReader, Snapshot, pages};

use seqlock::AtomicU64;
use std::sync::Arc;

/// Buckets of the burst histogram: 1, 2–3, 4–7, 8–15, 16–31, 32–63 and 64 frames.
pub const BURST_BUCKETS: usize = 7;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of a shard since its start.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub struct ShardStats {
            $($(#[$doc])* pub $name: u64,)*
            /// Bursts by number of frames, in powers of two.
            pub bursts: [u64; BURST_BUCKETS],
        }

        const NAMES: &[&str] = &[$(stringify!($name)),*];
        const WORDS: usize = NAMES.len() + BURST_BUCKETS;

        impl ShardStats {
            fn words(&self) -> [u64; WORDS] {
                let mut words = [0; WORDS];
                words[..NAMES.len()].copy_from_slice(&[$(self.$name),*]);
                words[NAMES.len()..].copy_from_slice(&self.bursts);
                words
            }

            fn from_words(words: [u64; WORDS]) -> Self {
                let mut stats = Self::default();
                let mut next = words.into_iter();
                $(stats.$name = next.next().unwrap_or(0);)*
                for (bucket, word) in stats.bursts.iter_mut().zip(next) {
                    *bucket = word;
                }
                stats
            }

            /// Returns names and values in a fixed order, without the burst histogram.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                NAMES.iter().copied().zip(self.words())
            }
        }
    };
}

counters! {
    /// Turns of the shard's loop.
    turns,
    /// Turns that found nothing to do.
    idle_turns,
    /// Time without work, polling or asleep, in nanoseconds. Its share of `running_ns` shows how far the
    /// shard is from saturation.
    idle_ns,
    /// Times that the shard slept in the kernel.
    sleeps,
    /// Time asleep, in nanoseconds.
    slept_ns,
    /// Frames received.
    frames_received,
    /// Events delivered to the handler.
    events,
    /// Commands received from other threads.
    commands,
    /// Timers of the application that expired.
    timers,
    /// Timers of the application that were refused at `shard.timers_max`.
    timers_refused,
    /// Devices that went away.
    devices_lost,
    /// Received frames that were forwarded to other shards.
    frames_forwarded,
    /// Received frames of other shards that were dropped because the queue to their shard was full.
    forwards_dropped,
    /// Frames that other shards forwarded to this one.
    forwards_received,
    /// Frames that this shard has sent for shards that do not serve their device.
    frames_relayed,
    /// Frames of shards that do not serve their device that were dropped because the device was full.
    relays_dropped,
    /// Times that this shard could not send a frame on a device that it does not serve because the queue to
    /// the shard that sends it was full. TCP tries again; other frames are dropped.
    relays_refused,
    /// Frames that stayed on this shard because of the flow hash computed by their sender; the hash was not
    /// computed again.
    hashes_trusted,
    /// Frames whose sender's flow hash named another shard than their addresses and ports do.
    hashes_mismatched,
    /// Times that a rule of `[[steering.rules]]`, or of the program, has chosen the shard of a received
    /// packet or of a connection to be opened.
    steering_chosen,
    /// Shards that a rule of the program has chosen and that do not exist, or do not serve the device of the
    /// connection; the flow hash decided.
    steering_invalid,
    /// Frames and control updates sent to another shard because all shards must have them.
    broadcasts_sent,
    /// Frames for all shards that were not accepted from the wire because a queue to another shard was full.
    broadcasts_refused,
    /// Received frames that waited in the queue of their priority (`[priority]`).
    frames_queued,
    /// Received frames by priority, counted while `[priority]` is in use: priority 0, the default.
    priority0_frames,
    /// Received frames of priority 1, which comes after the default priority.
    priority1_frames,
    /// Received frames of priority 2.
    priority2_frames,
    /// Received frames of priority 3.
    priority3_frames,
    /// Received frames of priority 4.
    priority4_frames,
    /// Received frames of priority 5.
    priority5_frames,
    /// Received frames of priority 6.
    priority6_frames,
    /// Received frames of priority 7, the highest one.
    priority7_frames,
    /// Frames and datagrams that were dropped or refused because the queue of their priority was full, or
    /// their priority's part of a queue for all (`priority.reserve_percent`): priority 0. Those to be sent on
    /// a device that this shard does not serve are counted by `relays_refused`, too.
    priority0_shed,
    /// Frames and datagrams of priority 1 that were dropped or refused.
    priority1_shed,
    /// Frames and datagrams of priority 2 that were dropped or refused.
    priority2_shed,
    /// Frames and datagrams of priority 3 that were dropped or refused.
    priority3_shed,
    /// Frames and datagrams of priority 4 that were dropped or refused.
    priority4_shed,
    /// Frames and datagrams of priority 5 that were dropped or refused.
    priority5_shed,
    /// Frames and datagrams of priority 6 that were dropped or refused.
    priority6_shed,
    /// Frames and datagrams of priority 7 that were dropped or refused.
    priority7_shed,
    /// Listeners of other shards that could not be opened on this one.
    listens_refused,
    /// Priorities above 7 that the program's function returned. The frames kept the priority that they had.
    priorities_invalid,
    /// Flows that were replaced in the cache of `[priority]` (`priority.flow_cache_entries`); their next
    /// packet is compared with all rules again.
    priority_flows_replaced,
    /// Time since the start, in nanoseconds.
    running_ns,
}

impl ShardStats {
    /// Returns the share of the time without work: near 0 if the shard is saturated, near 1 if it is idle.
    pub fn idle_share(&self) -> f64 {
        self.idle_ns as f64 / self.running_ns.max(1) as f64
    }

    /// Counts a received frame of a priority.
    pub(crate) fn count_priority(&mut self, priority: u8) {
        *match priority {
            0 => &mut self.priority0_frames,
            1 => &mut self.priority1_frames,
            2 => &mut self.priority2_frames,
            3 => &mut self.priority3_frames,
            4 => &mut self.priority4_frames,
            5 => &mut self.priority5_frames,
            6 => &mut self.priority6_frames,
            _ => &mut self.priority7_frames,
        } += 1;
    }

    /// Counts frames or datagrams of a priority that were dropped in front of a full queue.
    pub(crate) fn count_shed(&mut self, priority: u8, count: u64) {
        *match priority {
            0 => &mut self.priority0_shed,
            1 => &mut self.priority1_shed,
            2 => &mut self.priority2_shed,
            3 => &mut self.priority3_shed,
            4 => &mut self.priority4_shed,
            5 => &mut self.priority5_shed,
            6 => &mut self.priority6_shed,
            _ => &mut self.priority7_shed,
        } += count;
    }

    pub(crate) fn count_burst(&mut self, frames: usize) {
        self.frames_received += frames as u64;
        let bucket = (frames.max(1).ilog2() as usize).min(BURST_BUCKETS - 1);
        self.bursts[bucket] += 1;
    }
}

/// Reads a shard's counters from another thread.
#[derive(Clone, Debug)]
pub struct StatsReader(Arc<[AtomicU64]>);

/// Publishes a shard's counters to other threads.
#[derive(Debug)]
pub(crate) struct StatsWriter(Arc<[AtomicU64]>);

impl StatsWriter {
    pub(crate) fn new() -> Self {
        Self((0..=WORDS).map(|_| AtomicU64::new(0)).collect())
    }

    pub(crate) fn reader(&self) -> StatsReader {
        StatsReader(Arc::clone(&self.0))
    }

    /// Publishes a snapshot.
    pub(crate) fn publish(&self, stats: &ShardStats) {
        let Some(mut publication) = seqlock::begin(&self.0) else { return };
        for word in stats.words() {
            publication.put(word);
        }
        publication.finish();
    }
}

impl StatsReader {
    /// Returns the last published snapshot: about 10 ms old at most while the shard is busy, exact while it
    /// sleeps.
    pub fn snapshot(&self) -> ShardStats {
        let mut words = [0; WORDS];
        while !seqlock::read_words(&self.0, &mut words) {
            core::hint::spin_loop();
        }
        ShardStats::from_words(words)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
