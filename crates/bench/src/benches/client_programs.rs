//! Unmodified clients on a stack and on the kernel: ab and wrk against `ginnel httpd`, and both ends of
//! iperf3.

use crate::harness::machine::{Cpus, children_cpu_time, pin};
use crate::harness::pairs::{self, Bound, Measurement};
use crate::harness::result::BenchResult;
use crate::harness::{CoreLayout, MeasureError, Options};
use crate::program_comparison::{ADDRESS, create_site, run_beside_httpd};
use core::time::Duration;
use ginnel_measure::cpu_account::{CpuAccount, Participants, measure_cpu};
use ginnel_measure::program::{NetworkStack, RunningPrograms, ginnel_path};
use ginnel_measure::servers;
use ginnel_measure::testbed::{Medium, Testbed};
use ginnel_measure::veth::{self, VethOffloads};
use ginnel_measure::watched_group::WatchedGroup;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Concurrent connections of ab and wrk.
const CONNECTIONS: &str = "64";
/// More requests than ab can make within its time; ab allocates memory for all of them.
const REQUESTS_MAX: &str = "4000000";
/// Time that a client may take in addition to its measurement.
const EXIT_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval at which the end of a client is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The measurement: options, CPUs and files.
struct ClientComparison<'a> {
    options: &'a Options,
    cpus: Cpus,
    folder: tempfile::TempDir,
    /// The processes of servers and clients, which do not outlive this one.
    group: WatchedGroup,
}

impl<'a> ClientComparison<'a> {
    fn new(options: &'a Options) -> Result<Self, MeasureError> {
        if !rustix::process::geteuid().is_root() {
            return Err(MeasureError::Skipped(
                "needs root: it loads BPF programs and pins kernel threads".into(),
            ));
        }
        let ginnel = ginnel_path()?;
        let mut cpus = Cpus::choose()?;
        if options.layout == CoreLayout::One {
            cpus.client = cpus.server;
        }
        let folder = tempfile::tempdir()?;
        let group = WatchedGroup::start(&ginnel, folder.path())?;
        Ok(Self { options, cpus, folder, group })
    }

    fn testbed(&self, wire: Medium) -> Testbed {
        let folder = self.folder.path().to_owned();
        Testbed {
            medium: wire,
            cpus: self.cpus,
            layout: self.options.layout,
            polls: false,
            address: ADDRESS,
            folder,
            process_group: Some(self.group.id()),
        }
    }

    /// Returns the length of a measurement in whole seconds, because the clients accept no fractions.
    fn seconds(&self) -> u64 {
        // A measurement takes at least a second.
        self.options.seconds(5.0).ceil().max(1.0) as u64
    }

    /// Returns the command line of a client on a stack.
    fn on_stack(&self, testbed: &Testbed, client: &[String]) -> Result<Vec<OsString>, MeasureError> {
        let mut line: Vec<OsString> = vec![ginnel_path()?.into(), "run".into()];
        line.extend(testbed.client_options()?.into_iter().map(Into::into));
        line.push("--".into());
        line.extend(client.iter().map(Into::into));
        Ok(line)
    }

    /// Runs a client on its core and returns its output.
    fn client(&self, line: &[OsString]) -> Result<String, MeasureError> {
        let limit = Duration::from_secs(self.seconds()) + EXIT_TIMEOUT;
        let folder = self.folder.path();
        // The servers write into a file of their own (`RunningPrograms`).
        let (output, problems) = (folder.join("client-output"), folder.join("client-problems"));
        let (written, complained) = (std::fs::File::create(&output)?, std::fs::File::create(&problems)?);
        let start = || -> Result<Child, MeasureError> {
            // A child inherits the CPU affinity of the thread that starts it.
            pin(self.cpus.client)?;
            let mut command = Command::new(&line[0]);
            command.args(&line[1..]).stdin(Stdio::null()).stdout(written).stderr(complained);
            command.process_group(self.group.id().as_raw_pid());
            Ok(command.env("GINNEL_RUN_DIR", folder.join("stacks")).spawn()?)
        };
        let mut child =
            std::thread::scope(|scope| scope.spawn(start).join().expect("starting a client does not panic"))?;
        let until = Instant::now() + limit;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            if Instant::now() > until {
                let _ = child.kill();
                let _ = child.wait();
                break None;
            }
            std::thread::sleep(POLL_INTERVAL);
        };
        let read = |file: &Path| -> Result<String, MeasureError> {
            Ok(String::from_utf8_lossy(&std::fs::read(file)?).into_owned())
        };
        let text = read(&output)?;
        let name = line.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        let all = format!("{text}{}", read(&problems)?);
        let last = all.lines().rev().take(5).collect::<Vec<_>>().join(" / ");
        match status {
            Some(status) if status.success() => Ok(text),
            Some(status) => Err(MeasureError::Failed(format!("{name}: {status}: {last}"))),
            None => Err(MeasureError::Failed(format!("{name} did not end in time: {last}"))),
        }
    }

    /// Runs a client, and takes the figure from its output.
    fn measure(
        &self,
        arm: &str,
        unit: &str,
        parts: &Participants,
        line: &[OsString],
        read: impl FnOnce(&str) -> Option<(f64, u64)>,
    ) -> Result<(Measurement, CpuAccount), MeasureError> {
        let (before, started) = (children_cpu_time()?, Instant::now());
        let (text, account) = measure_cpu(parts, || self.client(line))?;
        let used = (children_cpu_time()? - before).as_secs_f64() / started.elapsed().as_secs_f64();
        let text = text?;
        let Some((figure, failures)) = read(&text) else {
            return Err(MeasureError::Failed(format!("{arm}: unexpected output of the client: {text}")));
        };
        let mut measured = Measurement::new(figure).with("client", used).with("failures", failures as f64);
        measured.kernel_time = account.kernel_time;
        println!("    {arm}: {figure:.2} {unit}; {}; client {:.0} %", account.line, 100.0 * used);
        let shares = account.shares.iter().filter(|(role, _)| **role != "generator");
        measured.facts.extend(shares.map(|(role, share)| ((*role).replace("generator", "client"), *share)));
        if failures > 0 {
            measured.problems.push(format!("{arm}: {failures} requests failed"));
        }
        Ok((measured, account))
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

/// Measures ab and wrk.
pub fn http(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let comparison = ClientComparison::new(options)?;
    let site = create_site(comparison.folder.path())?;
    let (seconds, url) = (comparison.seconds().to_string(), format!("http://{ADDRESS}/64"));
    let ab = ["ab", "-q", "-r", "-c", CONNECTIONS, "-t", &seconds, "-n", REQUESTS_MAX, &url];
    let length = format!("{seconds}s");
    let wrk = ["wrk", "-t", "1", "-c", CONNECTIONS, "-d", &length, &url];
    let mut results = Vec::new();
    type Read = fn(&str) -> Option<(f64, u64)>;
    let clients: [(&str, &[&str], Read); 2] = [("ab", &ab, parse_ab), ("wrk", &wrk, parse_wrk)];
    for (part, line, read) in clients {
        let name = format!("client-vs-kernel/{part}");
        if !options.wants(&name) {
            continue;
        }
        servers::find(part)?;
        let ours = || measure_against_httpd(&comparison, NetworkStack::Ginnel, &site, &words(line), read);
        let theirs = || measure_against_httpd(&comparison, NetworkStack::Kernel, &site, &words(line), read);
        let theirs: pairs::Arm<'_> = Box::new(theirs);
        results.push(pairs::run(&name, "requests/s", options, Bound::Machine, Box::new(ours), Some(theirs))?);
    }
    Ok(results)
}

/// Measures a client against `ginnel httpd`: over memif, or from the kernel over veth, where httpd uses
/// AF_XDP.
fn measure_against_httpd(
    comparison: &ClientComparison<'_>,
    host: NetworkStack,
    site: &Path,
    client: &[String],
    read: fn(&str) -> Option<(f64, u64)>,
) -> Result<Measurement, MeasureError> {
    let (arm, wire) =
        if host == NetworkStack::Ginnel { ("ours", Medium::Memif) } else { ("theirs", Medium::Veth) };
    let testbed = comparison.testbed(wire);
    testbed.set_up(false)?;
    let line = match host {
        NetworkStack::Ginnel => comparison.on_stack(&testbed, client)?,
        NetworkStack::Kernel => {
            veth::assign_kernel_address(veth::generator(), testbed.client_address(), "")?;
            client.iter().map(Into::into).collect()
        }
    };
    run_beside_httpd(&testbed, site, |thread| {
        let mut parts = Participants::new(comparison.cpus, comparison.options.layout);
        if wire == Medium::Veth {
            parts.place_napi_threads()?;
        }
        parts.add_thread("server", thread);
        let (mut measured, account) = comparison.measure(arm, "requests/s", &parts, &line, read)?;
        // The client runs on the generator's core.
        if !account.bottleneck.is_generator() {
            measured.problems.push(format!("{arm}: the client was not the {}", account.line));
        }
        Ok(measured)
    })
}

fn text_after<'a>(text: &'a str, label: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.trim().strip_prefix(label)).map(str::trim)
}

fn first_word<T: core::str::FromStr>(text: &str) -> Option<T> {
    text.split_whitespace().next()?.parse().ok()
}

/// Parses requests per second and failures from the output of ab.
fn parse_ab(text: &str) -> Option<(f64, u64)> {
    Some((
        first_word(text_after(text, "Requests per second:")?)?,
        first_word(text_after(text, "Failed requests:")?)?,
    ))
}

/// Parses requests per second and failures from the output of wrk, which does not mention failures if there
/// were none.
pub fn parse_wrk(text: &str) -> Option<(f64, u64)> {
    let numbers =
        |line: &str| line.split([' ', ',']).filter_map(|word| word.parse::<u64>().ok()).sum::<u64>();
    let failures = ["Socket errors:", "Non-2xx or 3xx responses:"]
        .map(|label| text_after(text, label).map_or(0, numbers));
    Some((first_word(text_after(text, "Requests/sec:")?)?, failures.iter().sum()))
}

/// Parses the received Gbit/s from the output of `iperf3 -J`, which counts no failures.
fn parse_iperf(text: &str) -> Option<(f64, u64)> {
    let report: serde_json::Value = serde_json::from_str(text).ok()?;
    Some((report["end"]["sum_received"]["bits_per_second"].as_f64()? / 1e9, 0))
}

/// Measures iperf3 with one connection from its client to its server.
pub fn iperf(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    servers::find("iperf3")?;
    let comparison = ClientComparison::new(options)?;
    let ours = || iperf_on_stacks(&comparison);
    let theirs: pairs::Arm<'_> = Box::new(|| iperf_on_kernel(&comparison));
    let (name, ours) = ("iperf-vs-kernel", Box::new(ours));
    Ok(vec![pairs::run(name, "Gbit/s", options, Bound::Machine, ours, Some(theirs))?])
}

fn iperf_server() -> Vec<OsString> {
    let address = ADDRESS.to_string();
    ["iperf3", "-s", "-B", &address].map(OsString::from).to_vec()
}

fn iperf_client(comparison: &ClientComparison<'_>) -> Vec<String> {
    words(&["iperf3", "-c", &ADDRESS.to_string(), "-t", &comparison.seconds().to_string(), "-J"])
}

fn iperf_on_stacks(comparison: &ClientComparison<'_>) -> Result<Measurement, MeasureError> {
    let testbed = comparison.testbed(Medium::Memif);
    testbed.set_up(false)?;
    let mut running = RunningPrograms::start(&[iperf_server()], NetworkStack::Ginnel, &testbed)?;
    let line = comparison.on_stack(&testbed, &iperf_client(comparison))?;
    transfer(
        comparison,
        "ours",
        Participants::new(comparison.cpus, comparison.options.layout),
        &mut running,
        &line,
    )
}

fn iperf_on_kernel(comparison: &ClientComparison<'_>) -> Result<Measurement, MeasureError> {
    let testbed = comparison.testbed(Medium::Veth);
    veth::create(VethOffloads::Enabled, comparison.options.layout)?;
    // The client's namespace exists as long as a process runs in it.
    let mut sleep = Command::new("unshare");
    sleep.args(["--net", "sleep", "600"]).process_group(comparison.group.id().as_raw_pid());
    let mut holder = NamespaceHolder(sleep.spawn()?);
    let within = holder.enter()?;
    veth::run_setup_command(&format!("ip link set {} netns {}", veth::generator(), holder.0.id()))?;
    veth::assign_kernel_address(veth::server(), ADDRESS, "")?;
    veth::assign_kernel_address(veth::generator(), testbed.client_address(), &within)?;
    let mut running = RunningPrograms::start(&[iperf_server()], NetworkStack::Kernel, &testbed)?;
    let mut parts = Participants::new(comparison.cpus, comparison.options.layout);
    parts.place_napi_threads()?;
    let line = within
        .split(' ')
        .map(String::from)
        .chain(iperf_client(comparison))
        .map(OsString::from)
        .collect::<Vec<_>>();
    transfer(comparison, "theirs", parts, &mut running, &line)
}

/// A process that keeps a namespace alive.
struct NamespaceHolder(Child);

impl NamespaceHolder {
    /// Waits until the namespace exists, and returns the words that run a command in it.
    fn enter(&mut self) -> Result<String, MeasureError> {
        let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net"));
        let own = of("self")?;
        let until = Instant::now() + EXIT_TIMEOUT;
        while of(&self.0.id().to_string())? == own {
            if Instant::now() > until || self.0.try_wait()?.is_some() {
                return Err(MeasureError::Failed("the client's network namespace was not created".into()));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(format!("nsenter -t {} -n --", self.0.id()))
    }
}

impl Drop for NamespaceHolder {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn transfer(
    comparison: &ClientComparison<'_>,
    arm: &str,
    mut parts: Participants,
    running: &mut RunningPrograms,
    line: &[OsString],
) -> Result<Measurement, MeasureError> {
    running.add_to(&mut parts);
    // The server refuses connections until it listens.
    let until = Instant::now() + EXIT_TIMEOUT;
    loop {
        running.check()?;
        match comparison.measure(arm, "Gbit/s", &parts, line, parse_iperf) {
            Ok((mut measured, account)) => {
                if account.bottleneck == ginnel_measure::cpu_account::Bottleneck::Neither {
                    measured.problems.push(format!("{arm}: {}", account.line));
                }
                return Ok(measured);
            }
            Err(failure) if Instant::now() > until => return Err(failure),
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_clients_is_parsed() {
        let ab = "Complete requests:      120\nFailed requests:        2\n   (Connect: 0)\nRequests per second:    24018.31 [#/sec] (mean)\n";
        assert_eq!(parse_ab(ab), Some((24018.31, 2)));
        let wrk = "  3 requests in 1.00s, 5.78GB read\n  Socket errors: connect 0, read 3, write 1, timeout 0\nRequests/sec:  35792.69\n";
        assert_eq!(parse_wrk(wrk), Some((35792.69, 4)));
        assert_eq!(parse_wrk("Requests/sec:  7.5\n"), Some((7.5, 0)));
        let iperf =
            r#"{"end":{"sum_sent":{"bits_per_second":9e9},"sum_received":{"bits_per_second":2.5e9}}}"#;
        assert_eq!(parse_iperf(iperf), Some((2.5, 0)));
        for read in [parse_ab, parse_wrk, parse_iperf] {
            assert_eq!(read("connection refused"), None);
        }
    }
}
