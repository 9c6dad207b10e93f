//! Publishes the counters of a shard to other processes: periodically while it is busy, before a long sleep,
//! and at its end.

use crate::error::Error;
use crate::handler::Handler;
use crate::published_stack::PublishedStack;
use crate::shard::Shard;
use crate::stats::{ShardActivity, StatsPage, StatsView, names};
use core::time::Duration;
use ginnel_stack::time::Instant;
use std::sync::Arc;

/// Minimal interval between two publications before a sleep, so that a shard that wakes 100,000 times per
/// second does not publish each time.
const IDLE_PUBLISH_INTERVAL: Duration = Duration::from_millis(1);

/// Publishes the counters of a shard.
pub(crate) struct Publisher {
    pub(crate) stats_page: StatsPage,
    /// Turns with work at the last publication.
    turns: u64,
    activity: ShardActivity,
    /// Keeps the directory in existence.
    _published: Arc<PublishedStack>,
}

impl<H: Handler> Shard<H> {
    /// Starts to publish the counters, in the directory of `published`.
    pub(crate) fn start_publishing(
        &mut self,
        published: Arc<PublishedStack>,
        label: &str,
    ) -> Result<(), Error> {
        let names = names(&self.stats_view());
        let stats_page = StatsPage::create(published.dir().path(), label, published.publish_every(), &names);
        let stats_page = stats_page.map_err(|e| Error::io(format!("counters of shard {label}"), e))?;
        if self.core.stack.local().is_some() {
            published.register(label, self.commander());
        }
        self.publisher = Some(Publisher {
            stats_page,
            turns: 0,
            activity: ShardActivity::NotStarted,
            _published: published,
        });
        self.publish_page(self.core.now, ShardActivity::NotStarted);
        Ok(())
    }

    fn stats_view(&self) -> StatsView<'_, H> {
        StatsView {
            stats: &self.core.stats,
            engine: &self.core.stack,
            ports: &self.ports,
            timers: &self.core.timers,
            handler: &self.handler,
        }
    }

    /// Returns the number of turns with work.
    fn busy_turns(&self) -> u64 {
        self.core.stats.turns - self.core.stats.idle_turns
    }

    /// Publishes the counters now.
    #[cold]
    pub(crate) fn publish_page(&mut self, now: Instant, activity: ShardActivity) {
        let Some(mut publisher) = self.publisher.take() else { return };
        (publisher.turns, publisher.activity) = (self.busy_turns(), activity);
        publisher.stats_page.publish(now, activity, |publication| {
            self.stats_view().visit(&mut |_, _, value| publication.put(value));
        });
        self.publisher = Some(publisher);
    }

    /// Publishes the counters before a sleep that ends at `deadline`, if they have changed. Returns the end
    /// of the sleep: earlier if it is too soon to publish.
    pub(crate) fn publish_before_sleep(
        &mut self,
        now: Instant,
        deadline: Option<Instant>,
    ) -> Option<Instant> {
        let Some(publisher) = &self.publisher else { return deadline };
        if publisher.turns == self.busy_turns() && publisher.activity == ShardActivity::Sleeping {
            return deadline;
        }
        match publisher.stats_page.published().map(|last| last + IDLE_PUBLISH_INTERVAL) {
            Some(next_publish) if next_publish > now => {
                Some(deadline.map_or(next_publish, |until| until.min(next_publish)))
            }
            _ => {
                self.publish_page(now, ShardActivity::Sleeping);
                deadline
            }
        }
    }
}
