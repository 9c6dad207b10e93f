//! Warnings and errors of the devices and the runtime, one line each on standard error.

use core::fmt::{self, Write as _};
use std::io::Write as _;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// From now on events of level WARN and ERROR are printed.
pub fn to_stderr() {
    // Only refused if it was set before, and then somebody listens already.
    let _ = tracing::subscriber::set_global_default(StderrSubscriber);
}

struct StderrSubscriber;

impl Subscriber for StderrSubscriber {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = LineBuilder::default();
        event.record(&mut line);
        // With standard error gone there is nobody left to tell.
        let _ = writeln!(std::io::stderr(), "ginnel: {}{}", line.message, line.fields);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct LineBuilder {
    message: String,
    fields: String,
}

impl Visit for LineBuilder {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, ", {name}: {value:?}"),
        };
    }
}
