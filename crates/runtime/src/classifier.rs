//! Gives frames their priorities by rules (`[priority]`) and by a function of the program.

use crate::config::PriorityConfig;
use crate::error::Error;
use crate::stats::ShardStats;
use ginnel_devices::relabel;
use ginnel_matcher::{Matcher, Packet, Rule};
use ginnel_stack::device::{Device, Label, RxQueue};
use ginnel_stack::error::ConfigError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A function that returns the priority of a frame, 0 to 7, from its packet and the priority that it has by
/// the rules, or by its device if no rule matches. A returned value above 7 is counted
/// (`shard.priorities_invalid`), and the frame keeps the priority that it has.
pub type PriorityFunction = Box<dyn FnMut(&Packet<'_>, u8) -> u8 + Send>;

/// Creates the functions of a shard, one for each direction of each device.
pub(crate) type PriorityFunctionFactory = Arc<dyn Fn(FrameDirection) -> PriorityFunction + Send + Sync>;

/// The direction in which frames pass a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameDirection {
    /// Received frames.
    Receive,
    /// Sent frames. They have priorities only on devices that carry labels: memory and memif.
    Transmit,
}

/// Creates the classifiers of a shard, which share their counters.
pub(crate) struct ClassifierFactory {
    rules: Vec<Rule<u8>>,
    flow_cache_entries: usize,
    functions: Option<PriorityFunctionFactory>,
    pub(crate) counters: Arc<PriorityCounters>,
}

/// Counters of all classifiers of a shard. They belong to one thread.
#[derive(Debug, Default)]
pub(crate) struct PriorityCounters {
    invalid: AtomicU64,
    flows_replaced: AtomicU64,
}

/// Gives frames of one direction their priorities.
pub(crate) struct Classifier {
    matcher: Matcher<u8>,
    function: Option<PriorityFunction>,
    counters: Arc<PriorityCounters>,
    /// Part of [`Matcher::flows_replaced`] that was counted.
    flows_replaced: u64,
}

impl ClassifierFactory {
    /// Returns `None` if there are neither rules nor a function.
    ///
    /// # Errors
    /// A rule of the configuration that is not valid.
    pub(crate) fn new(
        config: &PriorityConfig,
        functions: Option<PriorityFunctionFactory>,
    ) -> Result<Option<Self>, Error> {
        if config.rules.is_empty() && functions.is_none() {
            return Ok(None);
        }
        let rules = config.matcher_rules()?;
        let flow_cache_entries = config.flow_cache_entries as usize;
        Ok(Some(Self { rules, flow_cache_entries, functions, counters: Arc::default() }))
    }

    /// Creates a classifier.
    ///
    /// # Errors
    /// If there are too many rules.
    pub(crate) fn classifier(&self, direction: FrameDirection) -> Result<Classifier, Error> {
        let matcher = Matcher::new(self.rules.clone(), self.flow_cache_entries)
            .map_err(|e| ConfigError::new("priority.rules", e.to_string()))?;
        let function = self.functions.as_ref().map(|create| create(direction));
        Ok(Classifier { matcher, function, counters: Arc::clone(&self.counters), flows_replaced: 0 })
    }

    /// Adds a classifier for received frames.
    ///
    /// # Errors
    /// If there are too many rules.
    pub(crate) fn wrap_rx(&self, rx: Box<dyn RxQueue + Send>) -> Result<Box<dyn RxQueue + Send>, Error> {
        let mut received = self.classifier(FrameDirection::Receive)?;
        Ok(relabel::wrap_rx(rx, move |frame, label| received.label(frame, label)))
    }

    /// Adds classifiers to a device: for the frames that it receives, and for those that it sends if it
    /// carries labels.
    ///
    /// # Errors
    /// If there are too many rules.
    pub(crate) fn wrap(&self, Device { rx, tx }: Device) -> Result<Device, Error> {
        let rx = self.wrap_rx(rx)?;
        if !tx.capabilities().labels {
            return Ok(Device { rx, tx });
        }
        let mut sent = self.classifier(FrameDirection::Transmit)?;
        Ok(Device { rx, tx: relabel::wrap_tx(tx, move |frame, label| sent.label(frame, label)) })
    }
}

impl Classifier {
    /// Returns the label of a frame: a rule or the function replaces the priority in `label`.
    pub(crate) fn label(&mut self, frame: &[u8], label: Label) -> Label {
        let packet = Packet::parse(frame);
        let mut priority = self.matcher.find(&packet).copied().unwrap_or(label.priority());
        if let Some(function) = &mut self.function {
            let found = function(&packet, priority);
            if found <= Label::PRIORITY_MAX {
                priority = found;
            } else {
                add(&self.counters.invalid, 1);
            }
        }
        let flows_replaced = self.matcher.flows_replaced();
        if flows_replaced != self.flows_replaced {
            add(&self.counters.flows_replaced, flows_replaced - self.flows_replaced);
            self.flows_replaced = flows_replaced;
        }
        if priority == label.priority() { label } else { Label::new(label.hash(), priority) }
    }
}

impl PriorityCounters {
    /// Writes the counters of all classifiers of the shard.
    #[cold]
    pub(crate) fn report(&self, stats: &mut ShardStats) {
        stats.priorities_invalid = self.invalid.load(Relaxed);
        stats.priority_flows_replaced = self.flows_replaced.load(Relaxed);
    }
}

/// Adds to a counter that only this thread writes.
fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Relaxed) + count, Relaxed);
}

#[cfg(all(test, not(loom)))]
mod tests;
