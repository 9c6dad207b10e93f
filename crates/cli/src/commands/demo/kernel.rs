//! The part of the demonstration with the kernel as the client: curl and wrk against `ginnel httpd` over a
//! TAP device, in a network namespace of its own.

use super::{DemoRow, nginx, site_of};
use crate::commands::serve;
use crate::failure::Failure;
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::{Config, Shard, StopFlag};
use ginnel_apps::httpd::Httpd;
use ginnel_apps::units;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const STACK: &str = "10.99.0.2";

/// Runs this executable again inside a new network namespace and parses the rows that it prints. The error is
/// the reason why that is not possible.
pub(super) fn run_in_namespace(folder: &Path, seconds: u32) -> Result<Vec<DemoRow>, String> {
    eprintln!("\nTAP: the kernel's TCP as the client, in a network namespace");
    let program = std::env::current_exe().map_err(|e| format!("this program's path: {e}"))?;
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["--net", "--"]).arg(program).arg("demo").arg(format!("--seconds={seconds}"));
    command.arg(format!("--kernel-side={}", folder.display())).stderr(Stdio::inherit());
    let output = command.output().map_err(|e| format!("unshare: {e}"))?;
    if !output.status.success() {
        return Err("no network namespace can be created here (see the line above)".into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).lines().filter_map(DemoRow::from_line).collect())
}

/// Runs inside the namespace: serves the site, runs the clients, and prints a row for each.
pub(super) fn run_inside_namespace(folder: &Path, seconds: u32) -> Result<(), Failure> {
    let site = site_of(folder);
    let mut device = DeviceConfig::new("gtap0", DeviceKind::Tap);
    device.kernel_addresses = vec!["10.99.0.1/24".parse().map_err(Failure::running)?];
    let own = format!("{STACK}/24").parse().map_err(Failure::running)?;
    let config = Config::single(device, &[own], &[]);
    let server = Httpd::new(&serve::httpd_options(&site, &format!("{STACK}:80"))?)?;
    let mut shard = Shard::builder(config).handler(server).build()?;
    let stop = StopFlag::new()?;
    let flag = stop.clone();
    let thread = std::thread::Builder::new().name("server".into()).spawn(move || shard.run(&flag))?;

    let mut rows = clients(&site, seconds);
    stop.stop();
    thread.join().map_err(|_| Failure::running("the server's thread panicked"))??;
    eprintln!("\nnginx, unmodified, on Ginnel and on the kernel");
    match nginx::rows(folder, seconds) {
        Ok(more) => rows.extend(more),
        Err(reason) => eprintln!("skipped: {reason}"),
    }
    for row in rows {
        println!("{}", row.to_line());
    }
    Ok(())
}

/// Measures with each client. A client that is not installed is reported and skipped.
fn clients(site: &Path, seconds: u32) -> Vec<DemoRow> {
    let mut rows = Vec::new();
    match curl(site) {
        Ok(row) => rows.push(row),
        Err(reason) => eprintln!("skipped: {reason}"),
    }
    for (name, header) in
        [("TAP: wrk, 64 B, keep-alive", None), ("TAP: wrk, 64 B, short", Some("Connection: close"))]
    {
        match wrk(name, STACK, header, seconds) {
            Ok(row) => rows.push(row),
            Err(reason) => eprintln!("skipped: {reason}"),
        }
    }
    rows
}

/// Fetches every 25th page with curl and compares it with its file.
fn curl(site: &Path) -> Result<DemoRow, String> {
    let mut row = DemoRow { name: "TAP: curl, pages compared".into(), ..DemoRow::default() };
    let entries = fs::read_dir(site).map_err(|e| format!("{}: {e}", site.display()))?;
    let mut names: Vec<_> = entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect();
    names.sort();
    for name in names.iter().step_by(25) {
        let url = format!("http://{STACK}/{name}");
        let output = run(Command::new("curl").args(["--silent", "--fail", "--max-time", "20", &url]))?;
        if fs::read(site.join(name)).ok() != Some(output.stdout) {
            row.errors += 1;
        }
    }
    eprintln!("curl: {} pages, {} differ", names.len().div_ceil(25), row.errors);
    Ok(row)
}

/// Runs wrk. `header` is an additional header field, as `Connection: close` for a connection per request.
pub(super) fn wrk(name: &str, host: &str, header: Option<&str>, seconds: u32) -> Result<DemoRow, String> {
    let mut command = Command::new("wrk");
    command.args(["--threads", "1", "--connections", "64", "--latency", "--duration"]);
    command.arg(format!("{seconds}s"));
    if let Some(header) = header {
        command.args(["--header", header]);
    }
    let output = run(command.arg(format!("http://{host}/64.html")))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let row = parse_wrk(name, header.is_some(), &text).ok_or("wrk: its output was not understood")?;
    eprintln!("{name}: {:.0} requests/s", row.requests_per_second.unwrap_or_default());
    Ok(row)
}

/// Parses the output of `wrk --latency`.
fn parse_wrk(name: &str, short: bool, text: &str) -> Option<DemoRow> {
    let after = |label: &str| text.lines().find_map(|l| l.trim().strip_prefix(label)).map(str::trim);
    let requests: f64 = after("Requests/sec:")?.parse().ok()?;
    // wrk prints “Socket errors: connect 0, read 3, write 0, timeout 0” and “Non-2xx or 3xx responses: 5”
    // only if nonzero.
    let numbers = |line: &str| line.split([' ', ',']).filter_map(|w| w.parse::<u64>().ok()).sum::<u64>();
    let time = |label: &str| Some(units::show_nanos(parse_scaled(after(label)?, TIMES)? as u64));
    Some(DemoRow {
        name: name.into(),
        connections_per_second: short.then_some(requests),
        requests_per_second: Some(requests),
        megabytes_per_second: Some(parse_scaled(after("Transfer/sec:")?, SIZES)? / 1e6),
        p50: time("50%")?,
        p99: time("99%")?,
        errors: after("Socket errors:").map_or(0, numbers)
            + after("Non-2xx or 3xx responses:").map_or(0, numbers),
        ..DemoRow::default()
    })
}

/// Units of wrk's times, in nanoseconds.
const TIMES: &[(&str, f64)] = &[("us", 1e3), ("ms", 1e6), ("s", 1e9), ("m", 60e9), ("h", 3600e9)];
/// Units of wrk's sizes, in bytes.
const SIZES: &[(&str, f64)] =
    &[("KB", 1024.0), ("MB", 1048576.0), ("GB", 1073741824.0), ("TB", 1099511627776.0), ("B", 1.0)];

/// Parses a number that is followed by one of these units.
fn parse_scaled(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let (unit, scale) = units.iter().find(|(unit, _)| text.ends_with(unit))?;
    Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * scale)
}

/// Runs a program that may not be installed.
fn run(command: &mut Command) -> Result<Output, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    command.stderr(Stdio::null()).output().map_err(|e| format!("{name}: {e}"))
}

impl DemoRow {
    /// Formats the row as a line for the parent process, with tabs between the fields.
    fn to_line(&self) -> String {
        let number = |n: Option<f64>| n.map(|n| n.to_string()).unwrap_or_default();
        [
            self.name.clone(),
            number(self.connections_per_second),
            number(self.requests_per_second),
            number(self.megabytes_per_second),
            self.p50.clone(),
            self.p99.clone(),
            self.errors.to_string(),
        ]
        .join("\t")
    }

    fn from_line(line: &str) -> Option<Self> {
        let [name, connections, requests, megabytes, p50, p99, errors] =
            line.split('\t').collect::<Vec<_>>().try_into().ok()?;
        Some(Self {
            name: name.into(),
            connections_per_second: connections.parse().ok(),
            requests_per_second: requests.parse().ok(),
            megabytes_per_second: megabytes.parse().ok(),
            p50: p50.into(),
            p99: p99.into(),
            errors: errors.parse().ok()?,
            ..Self::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{DemoRow, parse_wrk};

    const OUTPUT: &str = "\
Running 3s test @ http://10.99.0.2/64.html
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency   593.75us  184.60us   5.56ms   94.38%
    Req/Sec    35.96k   630.93    36.80k    77.42%
  Latency Distribution
     50%  597.00us
     75%  656.00us
     90%  689.00us
     99%  786.00us
  110980 requests in 3.10s, 5.78GB read
  Socket errors: connect 0, read 3, write 1, timeout 0
Requests/sec:  35792.69
Transfer/sec:      1.86GB
";

    #[test]
    fn the_output_of_wrk_is_parsed() {
        let row = parse_wrk("x", true, OUTPUT).unwrap();
        let row = DemoRow::from_line(&row.to_line()).unwrap();
        assert_eq!((row.requests_per_second, row.errors), (Some(35792.69), 4));
        assert_eq!((row.p50.as_str(), row.p99.as_str()), ("597.00 µs", "786.00 µs"));
        assert_eq!(row.megabytes_per_second.map(f64::round), Some(1997.0));
        assert!(parse_wrk("x", true, "unable to connect to 10.99.0.2:80 Connection refused").is_none());
    }
}
