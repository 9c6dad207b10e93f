//! Shows counters periodically: redrawn in place on a terminal, as lines otherwise.

use super::baseline::Baseline;
use super::sample::{StatSample, StatSource};
use super::{StatOptions, show};
use crate::failure::Failure;
use crate::terminal::{self, screen};
use core::time::Duration;
use std::io::{self, IsTerminal, Write};

/// Shows the counters until the stack ends or the reader closes the pipe.
pub fn run(options: &StatOptions, source: &StatSource, every: Duration) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let terminal = out.is_terminal();
    let baseline = if options.since_start { None } else { Baseline::load(source)? };
    let take = || -> Result<StatSample, Failure> {
        let mut sample = source.take()?;
        if let Some(baseline) = &baseline {
            baseline.subtract(source, &mut sample);
        }
        Ok(sample)
    };
    let first = take()?;
    let mut before = take()?;
    loop {
        std::thread::sleep(every);
        let now = take()?;
        if options.json {
            out.write_all(show::json(source, &now, &options.filter).as_bytes())?;
        } else if terminal {
            let table = show::table(source, &now, Some(&before), &options.filter, options.all, "per second");
            let title = format!("{} (process {}), every {every:?}", source.running.name, source.running.pid);
            let table = table.to_string();
            let lines: Vec<&str> = core::iter::once(title.as_str()).chain(table.lines()).collect();
            out.write_all(screen(&lines, "use --filter", terminal::size()).as_bytes())?;
        } else {
            let lines = show::lines(source, &first, &before, &now, &options.filter, options.all);
            out.write_all(lines.as_bytes())?;
        }
        out.flush()?;
        if source.has_ended(&now) {
            return Ok(());
        }
        before = now;
    }
}
