//! The table of results, and the sentences below it.

use super::server::{ADDRESS, DemoFigures, Load, Server};
use crate::commands::bench::OTHER_PROGRAMS_SHARE_MAX;
use crate::table::{Table, with_thousands_separators};
use core::fmt;
use ginnel_apps::units::show_nanos;
use ginnel_measure::machine::Cpus;
use ginnel_measure::median;

/// Length of the longest line, in characters.
const LINE_CHARACTERS: usize = 108;

/// The measurements of one load.
struct LoadResult {
    load: &'static Load,
    kernel: Vec<DemoFigures>,
    ginnel: Vec<DemoFigures>,
}

impl LoadResult {
    /// Returns the median of Ginnel's figure divided by the kernel's in each round.
    fn ratio(&self) -> f64 {
        let pairs = self.ginnel.iter().zip(&self.kernel);
        median(&pairs.map(|(ginnel, kernel)| ginnel.per_core / kernel.per_core).collect::<Vec<_>>())
            .unwrap_or_default()
    }
}

/// All results.
pub struct DemoSummary {
    cpus: Cpus,
    rounds: u32,
    results: Vec<LoadResult>,
}

impl DemoSummary {
    /// Creates a summary without results.
    pub const fn new(cpus: Cpus, rounds: u32) -> Self {
        Self { cpus, rounds, results: Vec::new() }
    }

    /// Adds the figures of a round.
    pub fn add(&mut self, load: &'static Load, kernel: DemoFigures, ginnel: DemoFigures) {
        match self.results.iter_mut().find(|result| result.load.row == load.row) {
            Some(result) => {
                result.kernel.push(kernel);
                result.ginnel.push(ginnel);
            }
            None => self.results.push(LoadResult { load, kernel: vec![kernel], ginnel: vec![ginnel] }),
        }
    }

    fn figures(&self) -> impl Iterator<Item = &DemoFigures> {
        self.results.iter().flat_map(|result| result.kernel.iter().chain(&result.ginnel))
    }

    /// Returns the number of requests without a successful answer.
    pub fn errors(&self) -> u64 {
        self.figures().map(|figures| figures.errors).sum()
    }

    fn table(&self) -> Table {
        let mut table = Table::new(&[
            "unmodified server",
            "Linux kernel",
            "Ginnel",
            "ratio",
            "p99, kernel",
            "p99, Ginnel",
        ]);
        let middle = |runs: &[DemoFigures], of: fn(&DemoFigures) -> f64| {
            median(&runs.iter().map(of).collect::<Vec<_>>()).unwrap_or_default()
        };
        for result in &self.results {
            let rate = |runs| format!("{}/s", with_thousands_separators(middle(runs, |f| f.per_core) as u64));
            let p99 = |runs| show_nanos(middle(runs, |f| f.p99_ns as f64) as u64);
            let (kernel, ginnel) = (&*result.kernel, &*result.ginnel);
            let ratio = format!("{:.1} x", result.ratio());
            table.add_row([
                result.load.row.into(),
                rate(kernel),
                rate(ginnel),
                ratio,
                p99(kernel),
                p99(ginnel),
            ]);
        }
        table
    }

    /// Formats the ratios as a sentence.
    fn sentence(&self) -> String {
        let mut servers = Vec::new();
        for server in Server::ALL {
            let of_server = self.results.iter().filter(|result| result.load.server == server);
            let ratios: Vec<String> = of_server
                .map(|result| format!("{:.1} times as many {}", result.ratio(), result.load.handled))
                .collect();
            if !ratios.is_empty() {
                servers.push(format!("{} handles {}", server.name(), ratios.join(" and ")));
            }
        }
        format!("With the same CPU time as on the kernel, on Ginnel {}.", servers.join("; "))
    }
}

impl fmt::Display for DemoSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cpus { server, client } = self.cpus;
        let rounds = match self.rounds {
            1 => "one round".into(),
            rounds => format!("median of {rounds} rounds"),
        };
        writeln!(
            f,
            "Requests per second of the server's CPU time ({rounds}), and the time in which 99 % were answered:\n\n{}",
            self.table()
        )?;
        writeln!(
            f,
            "Kernel: server (CPU {server}) and client (ginnel load, CPU {client}) use the kernel's TCP, over loopback."
        )?;
        writeln!(
            f,
            "Ginnel: the same server under \"ginnel run\", over shared memory (memif); the client has a TCP of its own."
        )?;
        let other_programs = self.figures().map(|figures| figures.other_programs).fold(0.0, f64::max);
        if other_programs > OTHER_PROGRAMS_SHARE_MAX {
            let percent = 100.0 * other_programs;
            writeln!(
                f,
                "warning: other programs used up to {percent:.0} % of these CPUs: repeat it on a quiet machine"
            )?;
        }
        if self.errors() > 0 {
            writeln!(f, "warning: {} requests had no successful answer", self.errors())?;
        }
        writeln!(f, "\n{}", wrap(&self.sentence()))?;
        writeln!(
            f,
            "Next, measure a server of your own in the same way (its URL has the address 10.77.0.1):"
        )?;
        let command = this_command();
        write!(f, "  {command} bench compare --device memif --url http://{ADDRESS}:8080/ -- SERVER OPTIONS")
    }
}

/// Returns the path of this program, relative to the working directory if it is below it.
fn this_command() -> String {
    let path = std::env::current_exe().unwrap_or_else(|_| "ginnel".into());
    let folder = std::env::current_dir().unwrap_or_default();
    path.strip_prefix(folder).unwrap_or(&path).display().to_string()
}

/// Breaks a text into lines of at most [`LINE_CHARACTERS`].
fn wrap(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= LINE_CHARACTERS => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.into()),
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(per_core: f64) -> DemoFigures {
        DemoFigures { per_core, p99_ns: 1_500_000, errors: 0, other_programs: 0.0 }
    }

    fn summary(ratios: &[f64]) -> DemoSummary {
        let mut summary = DemoSummary::new(Cpus { server: 0, client: 1 }, ratios.len() as u32);
        for ratio in ratios {
            for load in Server::Nginx.loads() {
                summary.add(load, figures(10_000.0), figures(10_000.0 * ratio));
            }
        }
        summary
    }

    #[test]
    fn medians_and_ratios_are_shown() {
        let text = summary(&[1.0, 4.0, 3.0]).to_string().replace('\n', " ");
        assert!(text.contains("median of 3 rounds") && !text.contains("warning"), "{text}");
        assert!(
            text.contains("| nginx, a connection per request  |     10,000/s | 30,000/s | 3.0 x |"),
            "{text}"
        );
        let sentence = "nginx handles 3.0 times as many short connections and 3.0 times as many requests on open connections.";
        assert!(text.contains(sentence) && !text.contains("redis"), "{text}");
    }

    #[test]
    fn lines_are_short() {
        let text = summary(&[1.0]).to_string();
        let lines = text.lines().filter(|line| !line.starts_with("  "));
        assert!(
            lines.clone().count() > 8 && lines.clone().all(|line| line.chars().count() <= LINE_CHARACTERS),
            "{text}"
        );
        assert_eq!(wrap("a b"), "a b");
    }

    #[test]
    fn doubts_are_shown() {
        let mut summary = summary(&[0.5]);
        let load = &Server::Redis.loads()[0];
        summary.add(
            load,
            DemoFigures { errors: 7, ..figures(1.0) },
            DemoFigures { other_programs: 0.4, ..figures(1.0) },
        );
        let text = summary.to_string().replace('\n', " ");
        assert!(
            text.contains("one round") && text.contains("handles 0.5 times as many short connections"),
            "{text}"
        );
        assert!(text.contains("redis handles 1.0 times as many GET requests."), "{text}");
        assert!(text.contains("other programs used up to 40 %") && text.contains("7 requests"), "{text}");
    }
}
