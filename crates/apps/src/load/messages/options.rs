//! Options of `ginnel load iot` and `ginnel load echo`. The short options are those of MCC, QStack's
//! generator.

use super::MessageJob;
use super::plan::{Gaps, MessagePlan, OnOff, PriorityGrain, SendMode, Service};
use crate::iot::RedisAddress;
use crate::load::agents::Meeting;
use crate::load::options::{CommonOptions, StackKind, parse_interval};
use crate::load::sources::{SOURCES_MAX, SourceRange};
use crate::units::parse_duration;
use core::net::{IpAddr, SocketAddr};
use core::str::FromStr;
use core::time::Duration;
use ginnel::Error;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::sync::Arc;

/// Shortest message in bytes: what the server of docs/iot.md accepts.
const LENGTH_MIN: u16 = 8;
/// Port of the IoT server, and of the echo service (RFC 862).
const IOT_PORT: u16 = 80;
const ECHO_PORT: u16 = 7;

/// Source addresses: ranges, or a number of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceAddresses {
    /// These addresses.
    Range(SourceRange),
    /// This many consecutive addresses, of which the stack's own address is the first.
    Count(u32),
}

impl FromStr for SourceAddresses {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<u32>() {
            Ok(0) => Err("must be at least 1".to_owned()),
            Ok(count) => Ok(Self::Count(count)),
            Err(_) => text.parse().map(Self::Range),
        }
    }
}

/// Options of `ginnel load iot` and `ginnel load echo`.
#[derive(Clone, Debug, clap::Args)]
pub struct MessageOptions {
    /// Server, as in 10.0.0.1, 10.0.0.1:8080 or iot.example. Port 80 is the default of "load iot", 7 that of
    /// "load echo".
    #[arg(value_name = "SERVER", required_unless_present = "dest")]
    pub server: Option<String>,

    /// Server: MCC's form of the argument. May be given several times; connections use the servers in turn.
    #[arg(long, value_name = "SERVER", conflicts_with = "server")]
    pub dest: Vec<String>,

    /// TCP implementation of the generator; "load http --help" describes the three. MCC's mtcp stands for
    /// ginnel.
    #[arg(long, visible_alias = "network-stack", value_name = "STACK", value_enum, default_value_t)]
    pub stack: StackKind,

    /// Number of connections. All are opened in the set-up time and stay open.
    #[arg(short, long, visible_alias = "conn", value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    pub connections: u32,

    /// Number of messages that are due at the same time, each on another connection.
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    pub burst: u32,

    /// Time in which every connection sends one message. --connections divided by --epoch is the rate, and
    /// --connections divided by --burst the number of bursts in this time.
    #[arg(short, long, value_name = "TIME", default_value = "1s", value_parser = parse_period)]
    pub epoch: Duration,

    /// Open the connections evenly over this time.
    #[arg(short, long, visible_alias = "setup-time", value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    pub setup: Duration,

    /// Wait for this time between the set-up and the first message. ("load http -w" is its warm-up.)
    #[arg(short, long, visible_alias = "wait-time", value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    pub wait: Duration,

    /// Length of a message in bytes. A range as in 64-1400, which only an echo service accepts, gives each
    /// message a random length.
    #[arg(short, long, visible_alias = "message-bytes", value_name = "BYTES", default_value = "200", value_parser = parse_length)]
    pub length: (u16, u16),

    /// Send messages for this time, not counting set-up and wait.
    #[arg(short, long, value_name = "TIME", default_value = "10s", value_parser = parse_period)]
    pub duration: Duration,

    /// Share of messages that are urgent requests: of N messages, exactly N times this share, rounded.
    /// ("load http -r" is a rate.)
    #[arg(short = 'r', long, visible_alias = "request-ratio", value_name = "SHARE", default_value_t = 0.05, value_parser = parse_share)]
    pub high_share: f64,

    /// Compute for this time after each answer, as a client that processes the answer; a number without a
    /// unit is in nanoseconds. ("load http -t" is its timeout.)
    #[arg(short, long, value_name = "TIME", default_value = "0", value_parser = parse_nanos)]
    pub think_time: Duration,

    /// Priority grain: each message has its own priority, or all messages of a connection have the same. 0
    /// and 1 are MCC's names.
    #[arg(short, long, visible_alias = "priority-level", value_name = "GRAIN", value_enum, default_value_t)]
    pub priority_grain: PriorityGrain,

    /// Rule by which messages are due.
    #[arg(long, value_name = "MODE", value_enum, default_value_t)]
    pub mode: SendMode,

    /// With --mode burst: length of a period with messages; a number without a unit is in milliseconds.
    #[arg(long, value_name = "TIME", default_value = "100", value_parser = parse_millis)]
    pub burst_on: Duration,

    /// With --mode burst: silence after each period with messages; a number without a unit is in
    /// milliseconds.
    #[arg(long, value_name = "TIME", default_value = "900", value_parser = parse_millis)]
    pub burst_off: Duration,

    /// Distances between bursts.
    #[arg(long, value_name = "GAPS", value_enum, default_value_t)]
    pub gaps: Gaps,

    /// Source addresses: ranges as in "load http --source", or a number of consecutive addresses, of which
    /// the stack's own address is the first. May be given several times; connections use the addresses in
    /// turn.
    #[arg(long, visible_alias = "ips", value_name = "ADDRESSES|N")]
    pub source: Vec<SourceAddresses>,

    /// Number of generator threads. With --stack ginnel they are shards of one stack, with --stack light each
    /// has one of the links of --config.
    #[arg(long, visible_alias = "smp", visible_alias = "threads", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub workers: u32,

    /// Longest wait for a connection, for the end of the set-up, and for the last answers. Requests that are
    /// not answered then count as unanswered.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_period)]
    pub timeout: Duration,

    /// Send the load together with other generators: N agents in all, which may run on different machines.
    /// Each is started with the same load and its own stack and source addresses. They meet in --redis, and
    /// the first one prints the report on all.
    #[arg(long, value_name = "N", requires = "redis", value_parser = clap::value_parser!(u32).range(2..=1_024))]
    pub agents: Option<u32>,

    /// With --agents: Redis server through which they agree on the start and collect results, as in
    /// unix:/run/redis.sock, 10.0.0.9:6379 or a name with a port. The kernel reaches it.
    #[arg(long, value_name = "SERVER", requires = "agents")]
    pub redis: Option<RedisAddress>,

    /// With --agents: name of the run, for several runs with one Redis server.
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = parse_run)]
    pub run: String,

    /// Seed of all random choices.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Print progress at this interval.
    #[arg(long, visible_alias = "log-duration", value_name = "TIME", default_value = "1s", value_parser = parse_interval)]
    pub report_interval: Duration,

    /// Print the report as JSON instead of a table.
    #[arg(long)]
    pub json: bool,

    /// Draw the distributions of latencies and of the generator's send-time error into this file.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Do not print progress on standard error.
    #[arg(short, long)]
    pub quiet: bool,
}

/// Options of `ginnel load iot`.
#[derive(Clone, Debug, clap::Args)]
pub struct IotLoadOptions {
    /// Options of both services.
    #[command(flatten)]
    pub messages: MessageOptions,

    /// Share of messages that are ordinary requests. All messages that are neither urgent nor ordinary
    /// requests are heartbeats, which are never answered.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = parse_share)]
    pub low_share: f64,
}

/// Options of `ginnel load echo`.
#[derive(Clone, Debug, clap::Args)]
pub struct EchoLoadOptions {
    /// Options of both services.
    #[command(flatten)]
    pub messages: MessageOptions,
}

fn parse_run(text: &str) -> Result<String, String> {
    match text {
        "" => Err("must not be empty".to_owned()),
        name if name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) => Ok(name.to_owned()),
        _ => Err("must have letters, digits, \"-\", \"_\" and \".\" only".to_owned()),
    }
}

fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("must be a number from 0 to 1, for example 0.05".to_owned()),
    }
}

fn parse_period(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    let range = Duration::from_micros(1)..=Duration::from_secs(366 * 86_400);
    if range.contains(&time) { Ok(time) } else { Err("must be from 1us to 366 days".to_owned()) }
}

/// Parses a duration; a number without a unit is in `unit`.
fn parse_in(text: &str, unit: &str) -> Result<Duration, String> {
    let has_unit = text.trim().chars().next_back().is_some_and(char::is_alphabetic);
    parse_duration(&format!("{text}{}", if has_unit { "" } else { unit }))
}

fn parse_nanos(text: &str) -> Result<Duration, String> {
    let time = parse_in(text, "ns")?;
    if time > Duration::from_secs(1) { Err("must be at most 1s".to_owned()) } else { Ok(time) }
}

fn parse_millis(text: &str) -> Result<Duration, String> {
    let time = parse_in(text, "ms")?;
    if time > Duration::from_secs(86_400) { Err("must be at most 24h".to_owned()) } else { Ok(time) }
}

fn parse_length(text: &str) -> Result<(u16, u16), String> {
    let number = |text: &str| text.parse::<u16>().ok().filter(|length| *length >= LENGTH_MIN);
    let (min, max) = text.split_once('-').unwrap_or((text, text));
    match (number(min), number(max)) {
        (Some(min), Some(max)) if min <= max => Ok((min, max)),
        _ => Err(format!("must be from {LENGTH_MIN} to {}, or a range of such lengths", u16::MAX)),
    }
}

/// Resolves a server's name and returns its first address.
fn resolve(server: &str, port: u16) -> Result<SocketAddr, Error> {
    let bare = server.strip_prefix('[').and_then(|s| s.strip_suffix(']')).unwrap_or(server);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Ok(SocketAddr::new(address, port));
    }
    let found =
        if server.contains(':') { server.to_socket_addrs() } else { (server, port).to_socket_addrs() };
    let failed = |problem: String| Error::application(format!("{server}: {problem}"));
    found.map_err(|e| failed(e.to_string()))?.next().ok_or_else(|| failed("no address".to_owned()))
}

impl MessageOptions {
    /// Returns the source addresses. `own` is the stack's address, from which a number of addresses counts.
    ///
    /// # Errors
    /// A number of addresses is given and there is no `own`, or there are too many addresses.
    pub fn sources(&self, own: Option<IpAddr>) -> Result<Vec<SourceRange>, Error> {
        let range = |addresses: &SourceAddresses| match (addresses, own) {
            (SourceAddresses::Range(range), _) => Ok(*range),
            (SourceAddresses::Count(count), Some(own)) => SourceRange::consecutive(own, *count)
                .map_err(|problem| Error::application(format!("--source {count}: {problem}"))),
            (SourceAddresses::Count(count), None) => Err(Error::application(format!(
                "--source {count} needs the address of a stack: write the addresses, as in 10.0.0.2-10.0.0.9"
            ))),
        };
        let ranges = self.source.iter().map(range).collect::<Result<Vec<_>, _>>()?;
        let count: u64 = ranges.iter().map(SourceRange::count).sum();
        if count > SOURCES_MAX {
            let problem = format!("--source: {count} addresses are too many: at most {SOURCES_MAX}");
            return Err(Error::application(problem));
        }
        Ok(ranges)
    }

    /// Returns where the agents of a run meet, if it has several.
    pub fn meeting(&self) -> Option<Meeting> {
        let (agents, redis) = (self.agents?, self.redis.clone()?);
        Some(Meeting { redis, run: self.run.clone(), agents })
    }

    /// Returns the options that all kinds of load have.
    fn common(&self, source: Vec<SourceRange>) -> CommonOptions {
        CommonOptions {
            stack: self.stack,
            dest: Vec::new(),
            source,
            // The share of this agent, rounded up.
            connections: self.connections.div_ceil(self.agents.unwrap_or(1)),
            rate: None,
            poisson: false,
            duration: Some(self.duration),
            requests: None,
            setup: self.setup,
            warmup: self.wait,
            timeout: self.timeout,
            give_up: None,
            workers: if self.stack == StackKind::Ginnel { 1 } else { self.workers },
            shards: (self.stack == StackKind::Ginnel && self.workers > 1).then_some(self.workers),
            seed: self.seed,
            json: self.json,
            quiet: self.quiet,
        }
    }

    /// Checks what clap cannot check, and creates the job. `own` is as in [`MessageOptions::sources`].
    fn job(&self, service: Service, low_share: f64, own: Option<IpAddr>) -> Result<MessageJob, Error> {
        if self.high_share + low_share > 1.0 {
            return Err(Error::application(format!(
                "--high-share {} and --low-share {low_share} are more than 1 together",
                self.high_share
            )));
        }
        if service == Service::Iot && self.length.0 != self.length.1 {
            return Err(Error::application(format!(
                "--length {}-{}: all messages to an IoT server have one length: give one, or use load echo",
                self.length.0, self.length.1
            )));
        }
        let workers = u64::from(self.agents.unwrap_or(1)) * u64::from(self.workers);
        if u64::from(self.connections) < workers {
            return Err(Error::application(format!(
                "--connections {} is less than one connection for each of {workers} workers",
                self.connections
            )));
        }
        let on_off = OnOff { on: self.burst_on, off: self.burst_off };
        if self.mode == SendMode::Burst && on_off.on.is_zero() {
            return Err(Error::application("--burst-on 0: no message would ever be due"));
        }
        let rate = f64::from(self.connections) / self.epoch.as_secs_f64();
        let messages = (rate * self.duration.as_secs_f64()).round();
        if messages < 1.0 {
            return Err(Error::application(format!(
                "no message is due in --duration {:?}: {} connections send one message each in --epoch {:?}",
                self.duration, self.connections, self.epoch
            )));
        }
        let port = if service == Service::Iot { IOT_PORT } else { ECHO_PORT };
        let servers: Vec<&String> = self.server.iter().chain(&self.dest).collect();
        let targets = servers.iter().map(|s| resolve(s, port)).collect::<Result<Vec<_>, _>>()?;
        let common = self.common(self.sources(own)?);
        let plan = MessagePlan {
            service,
            connections: self.connections,
            burst: if self.mode == SendMode::Precision { 1 } else { self.burst },
            epoch: self.epoch,
            // Saturates for extreme options; no run sends so many messages.
            messages: messages as u64,
            high_share: self.high_share,
            low_share,
            grain: self.priority_grain,
            gaps: self.gaps,
            on_off: (self.mode == SendMode::Burst).then_some(on_off),
            length_bytes: self.length,
            setup: self.setup,
            wait: self.wait,
            timeout: self.timeout,
            think_time: self.think_time,
            seed: self.seed,
        };
        Ok(MessageJob {
            plan: Arc::new(plan),
            duration: self.duration,
            mode: self.mode,
            targets,
            server: servers.iter().map(|s| s.as_str()).collect::<Vec<_>>().join(", "),
            report_interval: self.report_interval,
            common,
            agents: self.agents.unwrap_or(1),
            agent: 0,
            start: None,
        })
    }
}

/// Options of a run that sends messages.
pub trait MessageLoadOptions {
    /// Returns the options of both services.
    fn messages(&self) -> &MessageOptions;

    /// Checks what clap cannot check, and creates the job. `own` is the address of the generator's stack,
    /// from which a number of source addresses counts.
    ///
    /// # Errors
    /// An error in the options, or the server's name cannot be resolved.
    fn job(&self, own: Option<IpAddr>) -> Result<MessageJob, Error>;
}

impl MessageLoadOptions for IotLoadOptions {
    fn messages(&self) -> &MessageOptions {
        &self.messages
    }

    fn job(&self, own: Option<IpAddr>) -> Result<MessageJob, Error> {
        self.messages.job(Service::Iot, self.low_share, own)
    }
}

impl MessageLoadOptions for EchoLoadOptions {
    fn messages(&self) -> &MessageOptions {
        &self.messages
    }

    fn job(&self, own: Option<IpAddr>) -> Result<MessageJob, Error> {
        // Every message is answered, so every message is a request.
        self.messages.job(Service::Echo, 1.0 - self.messages.high_share, own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct IotCommand {
        #[command(flatten)]
        options: IotLoadOptions,
    }

    #[derive(Debug, Parser)]
    struct EchoCommand {
        #[command(flatten)]
        options: EchoLoadOptions,
    }

    fn words(line: &str) -> Vec<&str> {
        ["load"].into_iter().chain(line.split_whitespace()).collect()
    }

    fn job(line: &str) -> Result<MessageJob, String> {
        let parsed = IotCommand::try_parse_from(words(line)).map_err(|e| e.to_string())?;
        parsed.options.job("10.1.0.9".parse().ok()).map_err(|e| e.to_string())
    }

    #[test]
    fn the_command_line_of_qstack_is_understood() {
        let line = "-c 10368000 -b 172800 -e 60 -s 200 -w 20 -l 200 -r 0.05 --ips 230 --log-duration 60 \
                    --network-stack mtcp --dest 192.168.3.10 --smp 9";
        let job = job(&line.replace('\\', "")).unwrap();
        let plan = &job.plan;
        assert_eq!(
            (plan.connections, plan.burst, plan.epoch),
            (10_368_000, 172_800, Duration::from_secs(60))
        );
        assert_eq!((plan.setup, plan.wait), (Duration::from_secs(200), Duration::from_secs(20)));
        assert_eq!((plan.length_bytes, plan.high_share, plan.low_share), ((200, 200), 0.05, 0.0));
        assert_eq!((plan.bursts(), plan.messages), (60, 1_728_000));
        assert_eq!(job.targets, ["192.168.3.10:80".parse().unwrap()]);
        assert_eq!((job.common.stack, job.common.workers()), (StackKind::Ginnel, 9));
        assert_eq!(job.report_interval, Duration::from_secs(60));
        assert_eq!(job.common.source[0].to_string(), "10.1.0.9-10.1.0.238");
    }

    #[test]
    fn numbers_without_units_have_those_of_mcc() {
        let job = job("10.0.0.1 -t 500 --mode burst --burst-on 20 --burst-off 1s -p 1 -d 7").unwrap();
        assert_eq!(job.plan.think_time, Duration::from_nanos(500));
        let on_off = OnOff { on: Duration::from_millis(20), off: Duration::from_secs(1) };
        assert_eq!((job.plan.on_off, job.plan.grain), (Some(on_off), PriorityGrain::Flow));
        assert_eq!(job.duration, Duration::from_secs(7));
    }

    #[test]
    fn an_echo_service_has_no_heartbeats() {
        let line = "[fd00::1] -l 64-1400 -r 0.25 --mode precision -b 50";
        let job = EchoCommand::try_parse_from(words(line)).unwrap().options.job(None).unwrap();
        assert_eq!(job.targets, ["[fd00::1]:7".parse().unwrap()]);
        assert_eq!((job.plan.high_share, job.plan.low_share), (0.25, 0.75));
        assert_eq!((job.plan.length_bytes, job.plan.burst), ((64, 1400), 1));
    }

    #[test]
    fn refusals_name_the_option() {
        for (line, expected) in [
            ("", "SERVER"),
            ("10.0.0.1 --dest 10.0.0.2", "--dest"),
            ("10.0.0.1 -c 0", "--connections"),
            ("10.0.0.1 -b 0", "--burst"),
            ("10.0.0.1 -e 0", "--epoch"),
            ("10.0.0.1 -l 7", "--length"),
            ("10.0.0.1 -l 70000", "--length"),
            ("10.0.0.1 -l 100-64", "--length"),
            ("10.0.0.1 -l 64-100", "--length 64-100: all messages to an IoT server"),
            ("10.0.0.1 -r 1.5", "--high-share"),
            ("10.0.0.1 -r 5%", "must be a number from 0 to 1"),
            ("10.0.0.1 -r 0.6 --low-share 0.5", "--high-share 0.6 and --low-share 0.5"),
            ("10.0.0.1 -t 2s", "--think-time"),
            ("10.0.0.1 --mode burst --burst-on 0", "--burst-on 0"),
            ("10.0.0.1 --mode fast", "--mode"),
            ("10.0.0.1 --ips 0", "--source"),
            ("10.0.0.1 --ips x", "--source"),
            ("10.0.0.1 --smp 65", "--workers"),
            ("10.0.0.1 -e 60 -d 100ms", "no message is due"),
            ("10.0.0.1 --log-duration 1ms", "--report-interval"),
            ("10.0.0.1:x", "10.0.0.1:x"),
            ("10.0.0.1 --agents 2", "--redis"),
            ("10.0.0.1 --redis 10.0.0.9", "--agents"),
            ("10.0.0.1 --agents 2 --redis 10.0.0.9 --run a:b", "--run"),
            ("10.0.0.1 -c 5 --smp 2 --agents 3 --redis 10.0.0.9", "--connections 5 is less than one"),
        ] {
            let error = job(line).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
        let parsed = IotCommand::try_parse_from(words("10.0.0.1 --ips 5")).unwrap();
        let error = parsed.options.job(None).unwrap_err().to_string();
        assert!(error.contains("--source 5 needs the address of a stack"), "{error}");
    }
}
