//! Unmodified clients on a stack and on the kernel: ab and wrk, which ask `ginnel httpd`, and both ends of iperf3.

use crate::contest::{ADDRESS, site_in, with_httpd};
use crate::harness::machine::{Cpus, children_cpu_time, pin};
use crate::harness::pairs::{self, Bound, Measured};
use crate::harness::result::BenchResult;
use crate::harness::{Failure, Layout, Options};
use crate::programs;
use core::time::Duration;
use ginnel_measure::account::{Account, Parts, account};
use ginnel_measure::program::{Host, Running, ginnel};
use ginnel_measure::veth::{self, Ends};
use ginnel_measure::wire::{Ground, Wire};
use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Connections of ab and wrk at the same time.
const CONNECTIONS: &str = "64";
/// More requests than ab makes within its time; it makes room for all of them.
const REQUESTS_MAX: &str = "4000000";
/// How long a client may take in addition to its measurement.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often it is looked whether a client has ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// What is measured, and where.
struct Plan<'a> {
    options: &'a Options,
    cpus: Cpus,
    folder: tempfile::TempDir,
}

impl<'a> Plan<'a> {
    fn new(options: &'a Options) -> Result<Self, Failure> {
        if !rustix::process::geteuid().is_root() {
            return Err(Failure::Skipped("needs root: BPF programs, and the kernel's threads".into()));
        }
        ginnel()?;
        let mut cpus = Cpus::choose()?;
        if options.layout == Layout::One {
            cpus.client = cpus.server;
        }
        Ok(Self { options, cpus, folder: tempfile::tempdir()? })
    }

    fn ground(&self, wire: Wire) -> Ground {
        let folder = self.folder.path().to_owned();
        Ground { wire, cpus: self.cpus, layout: self.options.layout, polls: false, address: ADDRESS, folder }
    }

    /// Whole seconds: the clients know no others.
    fn seconds(&self) -> u64 {
        // A measurement of less than a second is one of a second.
        self.options.seconds(5.0).ceil().max(1.0) as u64
    }

    /// The command line of a client on a stack.
    fn on_stack(&self, ground: &Ground, client: &[String]) -> Result<Vec<OsString>, Failure> {
        let mut line: Vec<OsString> = vec![ginnel()?.into(), "run".into()];
        line.extend(ground.client_options()?.into_iter().map(Into::into));
        line.push("--".into());
        line.extend(client.iter().map(Into::into));
        Ok(line)
    }

    /// Runs a client on its core and returns what it wrote.
    fn client(&self, line: &[OsString]) -> Result<String, Failure> {
        let limit = Duration::from_secs(self.seconds()) + PATIENCE;
        let output = self.folder.path().join("output");
        let (written, folder) = (std::fs::File::create(&output)?, self.folder.path());
        let start = || -> Result<Child, Failure> {
            // A child runs where the thread did that started it.
            pin(self.cpus.client)?;
            let mut command = Command::new(&line[0]);
            command.args(&line[1..]).stdin(Stdio::null()).stdout(written.try_clone()?).stderr(written);
            Ok(command.env("GINNEL_RUN_DIR", folder.join("stacks")).spawn()?)
        };
        let mut child = std::thread::scope(|scope| scope.spawn(start).join().expect("it does not panic"))?;
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
            std::thread::sleep(LOOK_EVERY);
        };
        let text = String::from_utf8_lossy(&std::fs::read(&output)?).into_owned();
        let name = line.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
        let last = text.lines().rev().take(5).collect::<Vec<_>>().join(" / ");
        match status {
            Some(status) if status.success() => Ok(text),
            Some(status) => Err(Failure::Failed(format!("{name}: {status}: {last}"))),
            None => Err(Failure::Failed(format!("{name} does not end: {last}"))),
        }
    }

    /// Lets a client work, and makes a figure of what it wrote.
    fn measure(
        &self,
        arm: &str,
        unit: &str,
        parts: &Parts,
        line: &[OsString],
        read: impl FnOnce(&str) -> Option<(f64, u64)>,
    ) -> Result<(Measured, Account), Failure> {
        let (before, begun) = (children_cpu_time()?, Instant::now());
        let (text, account) = account(parts, || self.client(line))?;
        let used = (children_cpu_time()? - before).as_secs_f64() / begun.elapsed().as_secs_f64();
        let text = text?;
        let Some((figure, failures)) = read(&text) else {
            return Err(Failure::Failed(format!("{arm}: this was not understood: {text}")));
        };
        let mut measured = Measured::new(figure).with("client", used).with("failures", failures as f64);
        measured.kernel_time = account.kernel_time;
        println!("    {arm}: {figure:.2} {unit}; {}; client {:.0} %", account.line, 100.0 * used);
        let shares = account.shares.iter().filter(|(role, _)| **role != "generator");
        measured.facts.extend(shares.map(|(role, share)| ((*role).replace("generator", "client"), *share)));
        if failures > 0 {
            measured.complaints.push(format!("{arm}: {failures} requests failed"));
        }
        Ok((measured, account))
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(ToString::to_string).collect()
}

/// ab and wrk.
pub fn http(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    let plan = Plan::new(options)?;
    let site = site_in(plan.folder.path())?;
    let (seconds, url) = (plan.seconds().to_string(), format!("http://{ADDRESS}/64"));
    let ab = ["ab", "-q", "-r", "-c", CONNECTIONS, "-t", &seconds, "-n", REQUESTS_MAX, &url];
    let length = format!("{seconds}s");
    let wrk = ["wrk", "-t", "1", "-c", CONNECTIONS, "-d", &length, &url];
    let mut results = Vec::new();
    type Read = fn(&str) -> Option<(f64, u64)>;
    let clients: [(&str, &[&str], Read); 2] = [("ab", &ab, read_ab), ("wrk", &wrk, read_wrk)];
    for (part, line, read) in clients {
        let name = format!("client-vs-kernel/{part}");
        if !options.wants(&name) {
            continue;
        }
        programs::need(part)?;
        let ours = || asks_httpd(&plan, Host::Stack, &site, &words(line), read);
        let theirs = || asks_httpd(&plan, Host::Kernel, &site, &words(line), read);
        let theirs: pairs::Arm<'_> = Box::new(theirs);
        results.push(pairs::run(&name, "requests/s", options, Bound::Machine, Box::new(ours), Some(theirs))?);
    }
    Ok(results)
}

/// A client that asks ginnel httpd: over memif, or from the kernel over veth, where httpd has AF_XDP.
fn asks_httpd(
    plan: &Plan<'_>,
    host: Host,
    site: &Path,
    client: &[String],
    read: fn(&str) -> Option<(f64, u64)>,
) -> Result<Measured, Failure> {
    let (arm, wire) = if host == Host::Stack { ("ours", Wire::Memif) } else { ("theirs", Wire::Veth) };
    let ground = plan.ground(wire);
    ground.lay(false)?;
    let line = match host {
        Host::Stack => plan.on_stack(&ground, client)?,
        Host::Kernel => {
            veth::give_kernel(veth::generator(), ground.client_address(), "")?;
            client.iter().map(Into::into).collect()
        }
    };
    with_httpd(&ground, site, |thread| {
        let mut parts = Parts::new(plan.cpus, plan.options.layout);
        if wire == Wire::Veth {
            parts.place_receivers()?;
        }
        parts.add_thread("server", thread);
        let (mut measured, account) = plan.measure(arm, "requests/s", &parts, &line, read)?;
        // The client has the generator's core.
        if !account.bottleneck.is_generator() {
            measured.complaints.push(format!("{arm}: the client was not the {}", account.line));
        }
        Ok(measured)
    })
}

fn after<'a>(text: &'a str, label: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.trim().strip_prefix(label)).map(str::trim)
}

fn first<T: core::str::FromStr>(text: &str) -> Option<T> {
    text.split_whitespace().next()?.parse().ok()
}

/// Requests per second, and failures.
fn read_ab(text: &str) -> Option<(f64, u64)> {
    Some((first(after(text, "Requests per second:")?)?, first(after(text, "Failed requests:")?)?))
}

/// The same of wrk, which is silent about failures if there were none.
fn read_wrk(text: &str) -> Option<(f64, u64)> {
    let numbers =
        |line: &str| line.split([' ', ',']).filter_map(|word| word.parse::<u64>().ok()).sum::<u64>();
    let failures =
        ["Socket errors:", "Non-2xx or 3xx responses:"].map(|label| after(text, label).map_or(0, numbers));
    Some((first(after(text, "Requests/sec:")?)?, failures.iter().sum()))
}

/// Gbit/s that arrived, of what iperf3 writes with -J.
fn read_iperf(text: &str) -> Option<(f64, u64)> {
    let report: serde_json::Value = serde_json::from_str(text).ok()?;
    Some((report["end"]["sum_received"]["bits_per_second"].as_f64()? / 1e9, 0))
}

/// iperf3, one connection from its client to its server.
pub fn iperf(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    programs::need("iperf3")?;
    let plan = Plan::new(options)?;
    let ours = || iperf_on_stacks(&plan);
    let theirs: pairs::Arm<'_> = Box::new(|| iperf_on_kernel(&plan));
    let (name, ours) = ("iperf-vs-kernel", Box::new(ours));
    Ok(vec![pairs::run(name, "Gbit/s", options, Bound::Machine, ours, Some(theirs))?])
}

fn iperf_server() -> Vec<OsString> {
    let address = ADDRESS.to_string();
    ["iperf3", "-s", "-B", &address].map(OsString::from).to_vec()
}

fn iperf_client(plan: &Plan<'_>) -> Vec<String> {
    words(&["iperf3", "-c", &ADDRESS.to_string(), "-t", &plan.seconds().to_string(), "-J"])
}

fn iperf_on_stacks(plan: &Plan<'_>) -> Result<Measured, Failure> {
    let ground = plan.ground(Wire::Memif);
    ground.lay(false)?;
    let mut running = Running::start(&[iperf_server()], Host::Stack, &ground)?;
    let line = plan.on_stack(&ground, &iperf_client(plan))?;
    transfer(plan, "ours", Parts::new(plan.cpus, plan.options.layout), &mut running, &line)
}

fn iperf_on_kernel(plan: &Plan<'_>) -> Result<Measured, Failure> {
    let ground = plan.ground(Wire::Veth);
    veth::lay(Ends::Kernel, plan.options.layout)?;
    // A namespace for the client: it lives as long as a process in it.
    let mut holder = Holder(Command::new("unshare").args(["--net", "sleep", "600"]).spawn()?);
    let within = holder.enter()?;
    veth::run(&format!("ip link set {} netns {}", veth::generator(), holder.0.id()))?;
    veth::give_kernel(veth::server(), ADDRESS, "")?;
    veth::give_kernel(veth::generator(), ground.client_address(), &within)?;
    let mut running = Running::start(&[iperf_server()], Host::Kernel, &ground)?;
    let mut parts = Parts::new(plan.cpus, plan.options.layout);
    parts.place_receivers()?;
    let line =
        within.split(' ').map(String::from).chain(iperf_client(plan)).map(OsString::from).collect::<Vec<_>>();
    transfer(plan, "theirs", parts, &mut running, &line)
}

/// A process that keeps a namespace.
struct Holder(Child);

impl Holder {
    /// Words that run a command in there, once it is there.
    fn enter(&mut self) -> Result<String, Failure> {
        let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net"));
        let own = of("self")?;
        let until = Instant::now() + PATIENCE;
        while of(&self.0.id().to_string())? == own {
            if Instant::now() > until || self.0.try_wait()?.is_some() {
                return Err(Failure::Failed("no second namespace".into()));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(format!("nsenter -t {} -n --", self.0.id()))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn transfer(
    plan: &Plan<'_>,
    arm: &str,
    mut parts: Parts,
    running: &mut Running,
    line: &[OsString],
) -> Result<Measured, Failure> {
    running.add_to(&mut parts);
    // The server may need a moment until it listens, and refuses until then.
    let until = Instant::now() + PATIENCE;
    loop {
        running.check()?;
        match plan.measure(arm, "Gbit/s", &parts, line, read_iperf) {
            Ok((mut measured, account)) => {
                if account.bottleneck == ginnel_measure::account::Bottleneck::Neither {
                    measured.complaints.push(format!("{arm}: {}", account.line));
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
    fn what_clients_write_is_understood() {
        let ab = "Complete requests:      120\nFailed requests:        2\n   (Connect: 0)\nRequests per second:    24018.31 [#/sec] (mean)\n";
        assert_eq!(read_ab(ab), Some((24018.31, 2)));
        let wrk = "  3 requests in 1.00s, 5.78GB read\n  Socket errors: connect 0, read 3, write 1, timeout 0\nRequests/sec:  35792.69\n";
        assert_eq!(read_wrk(wrk), Some((35792.69, 4)));
        assert_eq!(read_wrk("Requests/sec:  7.5\n"), Some((7.5, 0)));
        let iperf =
            r#"{"end":{"sum_sent":{"bits_per_second":9e9},"sum_received":{"bits_per_second":2.5e9}}}"#;
        assert_eq!(read_iperf(iperf), Some((2.5, 0)));
        for read in [read_ab, read_wrk, read_iperf] {
            assert_eq!(read("connection refused"), None);
        }
    }
}
