//! Prints reports, and writes the files of `--output`.

use crate::failure::Failure;
use ginnel_monitor::distribution::Distribution;
use ginnel_monitor::report::Report;
use ginnel_monitor::session::Measurements;
use ginnel_monitor::{cdf, picture};
use rustix::termios::tcgetwinsize;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Columns of a terminal of unknown size.
const COLUMNS: usize = 80;

/// Where reports go.
pub struct Output {
    /// Name of the source.
    title: String,
    json: bool,
    /// True if the screen is redrawn for each interval.
    is_terminal: bool,
    files: Option<OutputFiles>,
    /// Number of intervals so far.
    intervals: u64,
    /// The first error, which ends the run.
    error: Option<io::Error>,
}

/// The files of a directory.
struct OutputFiles {
    directory: PathBuf,
    cdf: File,
}

impl OutputFiles {
    fn create(directory: &Path) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        Ok(Self { directory: directory.into(), cdf: File::create(directory.join("cdf.txt"))? })
    }

    fn interval(&mut self, report: &Report, latencies: &[Distribution; 2]) -> io::Result<()> {
        self.cdf.write_all(cdf::cdf_block(report).as_bytes())?;
        fs::write(self.directory.join("sketch.txt"), cdf::sketch(latencies))
    }
}

impl Output {
    /// Creates the files.
    pub fn new(title: &str, json: bool, directory: Option<&Path>) -> Result<Self, Failure> {
        let create = |directory: &Path| {
            OutputFiles::create(directory)
                .map_err(|e| Failure::running(format!("{}: {e}", directory.display())))
        };
        Ok(Self {
            title: title.into(),
            json,
            is_terminal: io::stdout().is_terminal() && !json,
            files: directory.map(create).transpose()?,
            intervals: 0,
            error: None,
        })
    }

    /// Returns whether an output cannot be written any more.
    pub fn is_closed(&self) -> bool {
        self.error.is_some()
    }

    /// Reports an interval.
    pub fn interval(&mut self, interval: &Measurements<'_>) {
        self.intervals += 1;
        let result = self.write_interval(interval);
        if let Err(e) = result {
            self.error.get_or_insert(e);
        }
    }

    fn write_interval(&mut self, interval: &Measurements<'_>) -> io::Result<()> {
        let Measurements { report, latencies } = *interval;
        if let Some(files) = &mut self.files {
            files.interval(report, latencies)?;
        }
        let mut out = io::stdout().lock();
        if self.json {
            writeln!(out, "{}", json_line("interval", report))?;
        } else if self.is_terminal {
            let size =
                tcgetwinsize(&out).ok().map(|size| (usize::from(size.ws_row), usize::from(size.ws_col)));
            let (rows, columns) =
                size.filter(|size| size.0 > 2 && size.1 > 20).unwrap_or((usize::MAX, COLUMNS));
            let text = format!(
                "{}, interval {}\n{report}\n{}",
                self.title,
                self.intervals,
                picture::text(latencies, columns)
            );
            let mut screen = String::from("\x1b[H");
            // The cursor ends on a line of its own.
            for line in text.lines().take(rows - 1) {
                screen.extend(line.chars().take(columns));
                screen.push_str("\x1b[K\n");
            }
            out.write_all((screen + "\x1b[J").as_bytes())?;
        } else {
            writeln!(out, "interval {}\n{report}", self.intervals)?;
        }
        out.flush()
    }

    /// Reports the whole run. Fails if an earlier report could not be written.
    pub fn total(&mut self, report: &Report, latencies: &[Distribution; 2]) -> Result<(), Failure> {
        let result = match self.error.take() {
            Some(e) => Err(e),
            None => self.write_total(report, latencies),
        };
        // The reader closed the pipe: that is no error.
        let result = result.map_err(Failure::from);
        result.or_else(|failure| if failure.is_closed_pipe() { Ok(()) } else { Err(failure) })
    }

    fn write_total(&mut self, report: &Report, latencies: &[Distribution; 2]) -> io::Result<()> {
        if let Some(files) = &mut self.files {
            if self.intervals == 0 {
                files.interval(report, latencies)?;
            }
            fs::write(files.directory.join("cdf.svg"), picture::svg(&self.title, latencies))?;
        }
        let mut out = io::stdout().lock();
        if self.json {
            writeln!(out, "{}", json_line("total", report))?;
        } else {
            writeln!(out, "{}, total\n{report}\n{}", self.title, picture::text(latencies, COLUMNS))?;
        }
        out.flush()
    }
}

/// Formats a report as one line that says what it covers.
fn json_line(kind: &str, report: &Report) -> String {
    let json = report.to_json();
    format!("{{\"kind\":\"{kind}\",{}", json.strip_prefix('{').unwrap_or_default())
}
