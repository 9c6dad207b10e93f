//! Shows counters periodically: redrawn in place on a terminal, as lines otherwise.

use super::sample::StatSource;
use super::{StatOptions, show};
use crate::failure::Failure;
use core::time::Duration;
use rustix::termios::tcgetwinsize;
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
            let table = show::table(source, &now, Some(&before), &options.filter, options.all);
            let title = format!("{} (process {}), every {every:?}", source.running.name, source.running.pid);
            let size = tcgetwinsize(&out).ok();
            let size = size.map(|size| (usize::from(size.ws_row), usize::from(size.ws_col)));
            out.write_all(screen(&title, &table.to_string(), size).as_bytes())?;
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

/// Returns the escape sequences that redraw the screen without flicker: each line overwrites the former one,
/// and the rest of the line is cleared.
fn screen(title: &str, table: &str, size: Option<(usize, usize)>) -> String {
    let (rows, columns) = size.filter(|size| size.0 > 2 && size.1 > 0).unwrap_or((usize::MAX, usize::MAX));
    let mut out = String::from("\x1b[H");
    let lines: Vec<&str> = core::iter::once(title).chain(table.lines()).collect();
    // The cursor ends on a line of its own.
    let fit = lines.len().min(rows - 1);
    for line in &lines[..fit] {
        out.extend(line.chars().take(columns));
        out.push_str("\x1b[K\n");
    }
    out.push_str("\x1b[J");
    if fit < lines.len() {
        let hidden = format!("… {} more rows: use --filter", lines.len() - fit);
        out.extend(hidden.chars().take(columns));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::screen;

    #[test]
    fn the_screen_is_overwritten_without_scrolling() {
        let all = screen("title", "one\ntwo\n", Some((10, 80)));
        assert_eq!(all, "\x1b[Htitle\x1b[K\none\x1b[K\ntwo\x1b[K\n\x1b[J");
        let cut = screen("title", "one\ntwo\nthree\n", Some((3, 12)));
        assert_eq!(cut, "\x1b[Htitle\x1b[K\none\x1b[K\n\x1b[J… 2 more row");
        assert!(!cut.ends_with('\n'), "that would scroll");
    }
}
