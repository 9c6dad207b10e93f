//! `ginnel demo`, which `make demo` runs. It needs no root; measurements that this machine does not permit
//! are reported and skipped.

mod idle;
mod kernel;
mod nginx;

use super::load::{self, HttpArgs};
use crate::failure::Failure;
use crate::signals;
use crate::table::{Table, with_thousands_separators};
use clap::{Args, Parser};
use ginnel::StopFlag;
use ginnel_apps::load::Report;
use ginnel_apps::{corpus, units};
use std::fs;
use std::path::{Path, PathBuf};

/// Options of `ginnel demo`.
#[derive(Clone, Debug, Args)]
pub struct DemoOptions {
    /// Length of each measurement in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,

    /// Number of connections for measuring the memory of an idle connection.
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(2_000..=10_000_000))]
    idle: u32,

    /// Run the part that needs the kernel, inside a network namespace, with the files in this directory.
    #[arg(long, value_name = "DIR", hide = true)]
    kernel_side: Option<PathBuf>,
}

/// Text below the table.
const LEGEND: &str = "\
memory: ginnel load on one thread, ginnel httpd on another. The generator uses --stack light, with delay and loss --stack ginnel.
TAP: a client on the kernel's TCP requests pages from ginnel httpd.
nginx: the same program and configuration on Ginnel and on the kernel, one process; the client is wrk on the kernel's TCP.
p50, p99, p99.9: latency from the start of a request (of its connection, if it has its own) to the end of the response.
errors: requests without a complete, successful response, and pages that differ from the file.
Client and server shared this machine, so these are no precise measurements: use \"make bench\" for those.";

/// A row of the table of results.
#[derive(Clone, Debug, Default)]
pub(crate) struct DemoRow {
    name: String,
    connections_per_second: Option<f64>,
    requests_per_second: Option<f64>,
    megabytes_per_second: Option<f64>,
    p50: String,
    p99: String,
    p99_9: String,
    bytes_per_connection: Option<f64>,
    errors: u64,
}

/// Runs the demonstration and prints the table of results.
pub fn run(options: &DemoOptions) -> Result<(), Failure> {
    if let Some(folder) = &options.kernel_side {
        return kernel::run_inside_namespace(folder, options.seconds);
    }
    let stop = signals::stop_on_signal()?;
    let folder = TempFolder::create()?;
    eprintln!("writing the pages to {}", folder.0.display());
    corpus::write(&folder.0, 1)?;
    fs::write(folder.site().join("64.html"), "64 bytes ".repeat(8).as_bytes().split_at(64).0)?;

    let mut rows = Vec::new();
    for (name, arguments) in [
        (
            "memory: 64 B, short connections",
            &["--stack=light", "--connections=64", "http://10.0.0.1/64.html"][..],
        ),
        (
            "memory: 64 B, keep-alive",
            &["--stack=light", "--connections=64", "--keep-alive", "http://10.0.0.1/64.html"],
        ),
        (
            "memory: 500 pages, keep-alive",
            &["--stack=light", "--connections=32", "--keep-alive", "--urls=@", "http://10.0.0.1/"],
        ),
        (
            "memory: 500 pages, short, delay=5ms loss=1%",
            &["--connections=64", "--link=delay=5ms loss=1%", "--urls=@", "http://10.0.0.1/"],
        ),
    ] {
        if stop.is_set() {
            return Err(Failure::running("interrupted"));
        }
        eprintln!("\n{name}");
        let report = measure(arguments, &folder, options.seconds, &stop)?;
        rows.push(DemoRow::from_report(name, &report));
    }
    eprintln!("\nmemory of an idle connection ({} of them)", with_thousands_separators(options.idle.into()));
    rows.push(idle::measure(options.idle)?);
    match kernel::run_in_namespace(&folder.0, options.seconds) {
        Ok(more) => rows.extend(more),
        Err(reason) => eprintln!("\nskipped the measurements with the kernel: {reason}"),
    }
    println!("\n{}\n{LEGEND}", table(&rows));
    let errors: u64 = rows.iter().map(|row| row.errors).sum();
    if errors > 0 {
        Err(Failure::running(format!("{errors} errors: see the last column of the table")))
    } else {
        Ok(())
    }
}

/// Runs the generator against a server at the other end of a memory cable.
fn measure(
    arguments: &[&str],
    folder: &TempFolder,
    seconds: u32,
    stop: &StopFlag,
) -> Result<Report, Failure> {
    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        options: HttpArgs,
    }
    let serve = format!("--serve={}", folder.site().display());
    let urls = format!("--urls={}", folder.0.join("urls.txt").display());
    let duration = format!("--duration={seconds}s");
    let own = ["http", "--device=memory", &serve, &duration];
    let given = arguments.iter().map(|a| if *a == "--urls=@" { urls.as_str() } else { a });
    let parsed = Arguments::try_parse_from(own.into_iter().chain(given));
    let options = parsed.map_err(|e| Failure::usage(e.to_string()))?.options;
    Ok(load::measure(&options, stop)?.0)
}

fn table(rows: &[DemoRow]) -> Table {
    let mut table = Table::new(&[
        "",
        "connections/s",
        "requests/s",
        "MB/s",
        "p50",
        "p99",
        "p99.9",
        "bytes/connection",
        "errors",
    ]);
    let number = |n: Option<f64>| n.map(|n| with_thousands_separators(n.round() as u64)).unwrap_or_default();
    for row in rows {
        table.add_row([
            row.name.clone(),
            number(row.connections_per_second),
            number(row.requests_per_second),
            number(row.megabytes_per_second),
            row.p50.clone(),
            row.p99.clone(),
            row.p99_9.clone(),
            number(row.bytes_per_connection),
            with_thousands_separators(row.errors),
        ]);
    }
    table
}

impl DemoRow {
    fn from_report(name: &str, report: &Report) -> Self {
        let (achieved, latency) = (&report.achieved, &report.latency_ns.total);
        let not_ok: u64 = report.statuses.iter().filter(|(class, _)| **class != "2xx").map(|(_, n)| n).sum();
        Self {
            name: name.into(),
            // With keep-alive the rate would count only the first connections.
            connections_per_second: (!report.requested.keep_alive).then_some(achieved.connections_per_second),
            requests_per_second: Some(achieved.requests_per_second),
            megabytes_per_second: Some(achieved.bytes_per_second / 1e6),
            p50: units::show_nanos(latency.p50),
            p99: units::show_nanos(latency.p99),
            p99_9: units::show_nanos(latency.p99_9),
            bytes_per_connection: None,
            errors: report.failures.values().sum::<u64>() + not_ok,
        }
    }
}

/// A directory that is removed when the value is dropped.
struct TempFolder(PathBuf);

impl TempFolder {
    fn create() -> Result<Self, Failure> {
        let path = std::env::temp_dir().join(format!("ginnel-demo-{}", std::process::id()));
        fs::create_dir_all(&path).map_err(|e| Failure::running(format!("{}: {e}", path.display())))?;
        Ok(Self(path))
    }

    fn site(&self) -> PathBuf {
        site_of(&self.0)
    }
}

fn site_of(folder: &Path) -> PathBuf {
    folder.join("site")
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        // A file that cannot be removed stays in the directory for temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}
