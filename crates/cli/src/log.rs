//! Prints warnings and errors of the devices and the runtime on standard error, one line each.

use core::fmt::{self, Write as _};
use std::io::Write as _;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Installs the subscriber that prints events of level WARN and ERROR.
pub fn to_stderr() {
    // Fails only if another subscriber was installed before; that one keeps the events.
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
        // A failed write to standard error cannot be reported anywhere.
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
        // Writing to a `String` never fails.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, ", {name}: {value:?}"),
        };
    }
}
