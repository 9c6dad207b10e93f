//! Shows counters periodically: redrawn in place on a terminal, as lines otherwise.

use super::sample::StatSource;
use super::{StatOptions, show};
use crate::failure::Failure;
use crate::terminal::{self, screen};
use core::time::Duration;
use std::io::{self, IsTerminal, Write};

/// Shows the counters until the stack ends or the reader closes the pipe.
pub fn run(options: &StatOptions, source: &StatSource, every: Duration) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let terminal = out.is_terminal();
    let first = source.take()?;
    let mut before = source.take()?;
    loop {
        std::thread::sleep(every);
        let now = source.take()?;
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
