//! A shard shows its counters to other processes: now and then while it is busy, before it sleeps for long, and at its end.

use crate::error::Error;
use crate::handler::Handler;
use crate::presence::Presence;
use crate::shard::Shard;
use crate::stats::{Doing, Page, View, names};
use core::time::Duration;
use ginnel_stack::time::Instant;
use std::sync::Arc;

/// A shard that falls asleep shows its counters no more often than this: one that is woken a hundred thousand times per second has other things to do.
const SLEEPERS_SHOW_EVERY: Duration = Duration::from_millis(1);

/// Where a shard's counters are shown.
pub(crate) struct Shown {
    pub(crate) page: Page,
    /// Turns that had done something when they were shown last.
    turns: u64,
    doing: Doing,
    /// Keeps the directory.
    _presence: Arc<Presence>,
}

impl<H: Handler> Shard<H> {
    /// From now on other processes see the counters.
    pub(crate) fn show(&mut self, presence: Arc<Presence>, label: &str) -> Result<(), Error> {
        let names = names(&self.view());
        let page = Page::create(presence.dir().path(), label, presence.publish_every(), &names);
        let page = page.map_err(|e| Error::io(format!("counters of shard {label}"), e))?;
        if self.core.stack.here().is_some() {
            presence.register(label, self.commander());
        }
        self.page = Some(Shown { page, turns: 0, doing: Doing::Nothing, _presence: presence });
        self.show_now(self.core.now, Doing::Nothing);
        Ok(())
    }

    fn view(&self) -> View<'_, H> {
        View {
            stats: &self.core.stats,
            engine: &self.core.stack,
            ports: &self.ports,
            timers: &self.core.timers,
            handler: &self.handler,
        }
    }

    /// Turns that found something to do.
    fn busy_turns(&self) -> u64 {
        self.core.stats.turns - self.core.stats.idle_turns
    }

    /// Shows the counters.
    #[cold]
    pub(crate) fn show_now(&mut self, now: Instant, doing: Doing) {
        let Some(mut shown) = self.page.take() else { return };
        (shown.turns, shown.doing) = (self.busy_turns(), doing);
        shown.page.publish(now, doing, |publication| {
            self.view().visit(&mut |_, _, value| publication.put(value));
        });
        self.page = Some(shown);
    }

    /// Shows what has changed before a sleep that ends at `until`, or says when it has to end earlier to do so.
    pub(crate) fn show_before_sleep(&mut self, now: Instant, until: Option<Instant>) -> Option<Instant> {
        let Some(shown) = &self.page else { return until };
        if shown.turns == self.busy_turns() && shown.doing == Doing::Sleeps {
            return until;
        }
        match shown.page.published().map(|at| at + SLEEPERS_SHOW_EVERY) {
            Some(at) if at > now => Some(until.map_or(at, |until| until.min(at))),
            _ => {
                self.show_now(now, Doing::Sleeps);
                until
            }
        }
    }
}
