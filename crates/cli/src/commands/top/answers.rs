//! Finds out whether the shards answer. Their counters do not tell: a sleeping shard publishes none, and
//! sleeps on if its process is stopped.

use ginnel::inspect;
use ginnel::run_dir::RunningStack;
use std::io::ErrorKind;
use std::thread::JoinHandle;

/// Which shards answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ShardAnswers {
    /// The first question has no answer yet.
    #[default]
    Pending,
    /// The stack does not tell.
    Unknown,
    /// The process of the shards does not answer.
    None,
    /// Labels of the shards, each with whether the shard answers.
    Each(Vec<(String, bool)>),
}

impl ShardAnswers {
    /// Returns whether the shard with this label answers, if that is known.
    pub fn of(&self, label: &str) -> Option<bool> {
        match self {
            Self::Pending | Self::Unknown => None,
            Self::None => Some(false),
            Self::Each(shards) => {
                shards.iter().find(|(shard, _)| shard == label).map(|(_, answers)| *answers)
            }
        }
    }

    fn read(running: &RunningStack) -> Self {
        match inspect::answering_shards(&running.path) {
            Ok(shards) => Self::Each(shards),
            Err(e) if e.kind() == ErrorKind::TimedOut => Self::None,
            Err(_) => Self::Unknown,
        }
    }
}

/// Asks the shards on a thread of its own, so that a stack that does not answer keeps nothing waiting.
#[derive(Default)]
pub struct AnswerReader {
    reading: Option<JoinHandle<ShardAnswers>>,
    last: ShardAnswers,
}

impl AnswerReader {
    /// Returns what was read last, and starts to read again unless that is going on.
    pub fn update(&mut self, running: &RunningStack) -> &ShardAnswers {
        if let Some(reading) = self.reading.take_if(|reading| reading.is_finished()) {
            self.last = reading.join().unwrap_or_default();
        }
        if self.reading.is_none() {
            let running = running.clone();
            let thread = std::thread::Builder::new().name("answers".into());
            self.reading = thread.spawn(move || ShardAnswers::read(&running)).ok();
        }
        &self.last
    }
}
