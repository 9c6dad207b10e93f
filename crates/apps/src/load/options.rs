//! Options of `ginnel load`.

use super::plan::{Closer, Plan, Rate};
use super::sources::{SOURCES_MAX, SourceRange, Sources};
use super::urls::{RequestStyle, Requests, Url, parse_list};
use crate::units::parse_duration;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::Error;
use std::path::PathBuf;
use std::sync::Arc;

/// The TCP that the generator uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum StackKind {
    /// Ginnel's TCP, on the given device.
    #[default]
    #[value(alias = "mtcp")]
    Ginnel,
    /// A minimal client TCP on the given device: cheapest, for finding the limit of a server.
    Light,
    /// The kernel's sockets.
    Kernel,
}

impl StackKind {
    /// Returns the name of the stack.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ginnel => "ginnel",
            Self::Light => "light",
            Self::Kernel => "kernel",
        }
    }
}

/// Options of the generator for all protocols.
#[derive(Clone, Debug, clap::Args)]
pub struct CommonOptions {
    /// TCP implementation of the generator. Everything else is equal for all of them.
    #[arg(long, value_name = "STACK", value_enum, default_value_t)]
    pub stack: StackKind,

    /// Connect to this address and port instead of those of the URL or server. May be given several times;
    /// connections use them in turn.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub dest: Vec<SocketAddr>,

    /// Source addresses, as in 10.0.0.2, 10.0.0.2-10.0.0.9, 10.0.0.2-9 or 10.1.0.0/16. May be given several
    /// times; connections use them in turn. Ginnel's stacks get these addresses in addition; on the kernel
    /// they must exist (all of 127.0.0.0/8 does).
    #[arg(long, visible_alias = "ips", value_name = "ADDRESSES")]
    pub source: Vec<SourceRange>,

    /// Number of connections: all of them are kept busy in a closed loop; in an open loop (--rate) at most
    /// this many are open.
    #[arg(short, long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    pub connections: u32,

    /// Open loop: start this many requests per second, whatever the server does (with short connections:
    /// connections per second). Latency counts from the time that a request is due. Without --rate (closed
    /// loop) each connection sends its next request as soon as it has received a response.
    #[arg(short, long, value_name = "PER-SECOND", value_parser = parse_rate)]
    pub rate: Option<f64>,

    /// With --rate: random distances between requests (a Poisson process) instead of equal ones.
    #[arg(long, requires = "rate")]
    pub poisson: bool,

    /// Length of the measurement [default: 10s, or until --requests are answered]
    #[arg(short, long, value_name = "TIME", value_parser = parse_measured_time)]
    pub duration: Option<Duration>,

    /// Measure this many requests, then end.
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub requests: Option<u64>,

    /// Open the connections evenly over this time before the warm-up.
    #[arg(short, long, value_name = "TIME", default_value = "0s", value_parser = parse_duration)]
    pub setup: Duration,

    /// Send requests for this time before the measurement.
    #[arg(short, long, value_name = "TIME", default_value = "0s", value_parser = parse_duration)]
    pub warmup: Duration,

    /// Longest wait for a connection or a response, which then counts as failed.
    #[arg(short, long, value_name = "TIME", default_value = "10s", value_parser = parse_timeout)]
    pub timeout: Duration,

    /// With --requests and without --duration: end with exit status 1 when requests or connections have
    /// failed for this time and none was answered in between [default: the value of --timeout]
    #[arg(long, value_name = "TIME", requires = "requests", conflicts_with = "duration", value_parser = parse_duration)]
    pub give_up: Option<Duration>,

    /// Number of generator threads. Connections, rate, requests and source addresses are divided among them.
    /// Except with --stack kernel each worker has a stack of its own, on one of the N links of --config with
    /// its device. With --serve of "load http" it has a cable of its own to the server instead.
    #[arg(long, visible_alias = "threads", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub workers: u32,

    /// Number of shards of the generator's stack. Each shard is a thread with a queue of its own on every
    /// device, and gets a share of the load as a worker does. Unlike workers, shards share addresses and
    /// devices. With --stack ginnel only.
    #[arg(long, value_name = "N", conflicts_with = "workers", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub shards: Option<u32>,

    /// Seed of all random choices.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Print the report as JSON instead of a table.
    #[arg(long)]
    pub json: bool,

    /// Do not print progress on standard error.
    #[arg(short, long)]
    pub quiet: bool,
}

/// Options of `ginnel load http`.
#[derive(Clone, Debug, clap::Args)]
pub struct HttpOptions {
    /// URL to request, as in http://10.0.0.1:8080/index.html. With --urls only its host and port are used.
    #[arg(value_name = "URL")]
    pub url: Url,

    /// File with the paths to request, one per line, each optionally followed by a weight (default 1), as
    /// "ginnel corpus" writes it.
    #[arg(long, value_name = "FILE")]
    pub urls: Option<PathBuf>,

    /// Send many requests on each connection. Without this option every request uses a connection of its own.
    #[arg(short, long)]
    pub keep_alive: bool,

    /// With --keep-alive: close each connection after this many requests.
    #[arg(long, value_name = "N", requires = "keep_alive", value_parser = clap::value_parser!(u32).range(2..))]
    pub per_connection: Option<u32>,

    /// With --keep-alive: requests in flight on each connection.
    #[arg(long, value_name = "N", requires = "keep_alive", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub pipeline: u16,

    /// Side that closes a connection after its last request.
    #[arg(long, value_name = "SIDE", value_enum, default_value_t)]
    pub close: Closer,

    /// Send HEAD requests instead of GET.
    #[arg(long)]
    pub head: bool,

    /// Additional header field, as in "Accept: text/html". May be given several times.
    #[arg(short = 'H', long = "header", value_name = "FIELD")]
    pub headers: Vec<String>,

    /// Options that do not depend on the protocol.
    #[command(flatten)]
    pub common: CommonOptions,
}

fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (1e-3..=1e9).contains(&rate) => Ok(rate),
        _ => Err("must be a number from 0.001 to 1000000000".to_owned()),
    }
}

/// Parses the length of the measurement. It must not be 0, because rates are divided by it.
fn parse_measured_time(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    if time.is_zero() { Err("must not be 0".to_owned()) } else { Ok(time) }
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    let timeout = parse_duration(text)?;
    let range = Duration::from_millis(100)..=Duration::from_secs(86_400);
    if range.contains(&timeout) { Ok(timeout) } else { Err("must be from 100ms to 24h".to_owned()) }
}

/// Settings that all workers of a run share, checked and ready to use.
#[derive(Clone, Debug)]
pub struct Job {
    /// Plan of the whole run.
    pub plan: Plan,
    /// The requests, and the protocol of their responses.
    pub requests: Arc<Requests>,
    /// Addresses to connect to.
    pub targets: Vec<SocketAddr>,
    /// Name of the server in the report.
    pub server: String,
    /// Options of the generator.
    pub common: CommonOptions,
}

/// Options of a generator for one protocol.
pub trait LoadOptions {
    /// Returns the options that do not depend on the protocol.
    fn common(&self) -> &CommonOptions;

    /// Returns the options that do not depend on the protocol, for changing them.
    fn common_mut(&mut self) -> &mut CommonOptions;

    /// Resolves the server's name or address.
    ///
    /// # Errors
    /// The name cannot be resolved.
    fn server(&self) -> Result<SocketAddr, Error>;

    /// Checks what clap cannot check, writes the requests, and resolves the server's name.
    ///
    /// # Errors
    /// An option is invalid, the file of paths cannot be read, or the server's name cannot be resolved.
    fn job(&self) -> Result<Job, Error>;
}

/// Options that concern connections and depend on the protocol.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnectionOptions {
    /// Requests on a connection before it is closed; `u32::MAX` for no limit.
    pub requests: u32,
    /// Most requests in flight on a connection.
    pub pipeline: u16,
    pub closer: Closer,
}

impl CommonOptions {
    /// Returns the measured time, or `None` if the number of requests ends the run.
    pub fn duration(&self) -> Option<Duration> {
        self.duration.or(if self.requests.is_some() { None } else { Some(Duration::from_secs(10)) })
    }

    /// Returns how long requests may fail before the run is given up, or `None` if a time ends the run.
    pub fn give_up(&self) -> Option<Duration> {
        self.duration().is_none().then(|| self.give_up.unwrap_or(self.timeout))
    }

    /// Returns the number of shards if it is given, otherwise that of workers, but no more than connections.
    pub fn workers(&self) -> u32 {
        self.shards.unwrap_or(self.workers.min(self.connections))
    }

    /// Returns the source addresses of one worker.
    pub fn sources(&self, worker: u32) -> Sources {
        Sources::new(&self.source, worker.into(), self.workers().into())
    }

    /// Creates the job for these requests.
    pub(super) fn job(
        &self,
        requests: Requests,
        connections: ConnectionOptions,
        server: &str,
        resolve: impl FnOnce() -> Result<SocketAddr, Error>,
    ) -> Result<Job, Error> {
        let sources: u64 = self.source.iter().map(SourceRange::count).sum();
        if sources > SOURCES_MAX {
            return Err(Error::application(format!(
                "--source: {sources} addresses are too many: at most {SOURCES_MAX}"
            )));
        }
        let targets = match self.dest.as_slice() {
            [] => vec![resolve()?],
            given => given.to_vec(),
        };
        let (plan, requests) = (self.plan(connections), Arc::new(requests));
        Ok(Job { plan, requests, targets, server: server.to_owned(), common: self.clone() })
    }

    fn plan(&self, connections: ConnectionOptions) -> Plan {
        Plan {
            connections: self.connections,
            requests_per_connection: connections.requests,
            pipeline: connections.pipeline,
            rate: self.rate.map(|per_second| Rate { per_second, poisson: self.poisson }),
            setup: self.setup,
            warmup: self.warmup,
            duration: self.duration(),
            requests: self.requests,
            timeout: self.timeout,
            give_up: self.give_up(),
            closer: connections.closer,
            seed: self.seed,
        }
    }
}

impl LoadOptions for HttpOptions {
    fn common(&self) -> &CommonOptions {
        &self.common
    }

    fn common_mut(&mut self) -> &mut CommonOptions {
        &mut self.common
    }

    fn server(&self) -> Result<SocketAddr, Error> {
        self.url.resolve().map_err(Error::application)
    }

    fn job(&self) -> Result<Job, Error> {
        let paths = match &self.urls {
            Some(file) => {
                let name = file.display();
                let text = std::fs::read_to_string(file).map_err(|e| Error::io(format!("read {name}"), e))?;
                parse_list(&text).map_err(|e| Error::application(format!("{name}: {e}")))?
            }
            None => vec![(self.url.path.clone(), 1)],
        };
        let style = RequestStyle { head: self.head, close: !self.keep_alive, fields: self.headers.clone() };
        let requests = Requests::new(&self.url.authority, &paths, &style).map_err(Error::application)?;
        let of_many = self.per_connection.unwrap_or(u32::MAX);
        let connections = ConnectionOptions {
            requests: if self.keep_alive { of_many } else { 1 },
            pipeline: self.pipeline,
            closer: self.close,
        };
        self.common.job(requests, connections, &self.url.authority, || self.server())
    }
}

/// Parses the interval of progress lines.
///
/// # Errors
/// The text is no duration, or one below 100 ms.
pub fn parse_interval(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    if time < Duration::from_millis(100) { Err("must be at least 100ms".to_owned()) } else { Ok(time) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct LoadCommand {
        #[command(flatten)]
        options: HttpOptions,
    }

    /// Parses options.
    pub fn parse(line: &str) -> Result<HttpOptions, String> {
        let words = ["load"].into_iter().chain(line.split_whitespace());
        LoadCommand::try_parse_from(words).map(|c| c.options).map_err(|e| e.to_string())
    }

    /// Creates the job of a command line.
    pub fn job(line: &str) -> Job {
        parse(line).unwrap().job().unwrap()
    }

    #[test]
    fn defaults_make_a_closed_loop_of_short_connections() {
        let job = parse("http://10.0.0.1/x").unwrap().job().unwrap();
        assert_eq!((job.plan.connections, job.plan.is_short(), job.plan.rate), (100, true, None));
        assert_eq!(job.plan.duration, Some(Duration::from_secs(10)));
        assert_eq!(job.targets, ["10.0.0.1:80".parse().unwrap()]);
        assert!(job.requests.get(0).starts_with(b"GET /x HTTP/1.1\r\nHost: 10.0.0.1\r\n"));
    }

    #[test]
    fn a_request_count_replaces_the_default_duration() {
        assert_eq!(parse("http://a/ -n 5").unwrap().common.duration(), None);
        assert_eq!(parse("http://a/ -n 5 -d 2s").unwrap().common.duration(), Some(Duration::from_secs(2)));
    }

    #[test]
    fn runs_without_duration_have_a_give_up_time() {
        let give_up = |line: &str| parse(line).unwrap().common.give_up();
        assert_eq!(give_up("http://a/ -n 5"), Some(Duration::from_secs(10)));
        assert_eq!(give_up("http://a/ -n 5 -t 3s"), Some(Duration::from_secs(3)));
        assert_eq!(give_up("http://a/ -n 5 --give-up 1m"), Some(Duration::from_secs(60)));
        assert_eq!((give_up("http://a/"), give_up("http://a/ -n 5 -d 9s")), (None, None));
    }

    #[test]
    fn invalid_options_are_refused() {
        for line in [
            "",
            "ftp://a/",
            "http://a/ -c 0",
            "http://a/ --rate 0",
            "http://a/ --rate x",
            "http://a/ --poisson",
            "http://a/ --pipeline 4",
            "http://a/ --per-connection 5",
            "http://a/ -n 0",
            "http://a/ --source x",
            "http://a/ --timeout 1ms",
            "http://a/ --stack linux",
            "http://a/ --shards 0",
            "http://a/ --shards 65",
            "http://a/ --shards 2 --workers 2",
            "http://a/ --give-up 1s",
            "http://a/ --duration 1s --give-up 1s",
            "http://a/ -n 5 --duration 1s --give-up 1s",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        assert!(parse("http://10.0.0.1/ --urls /does/not/exist").unwrap().job().is_err());
        assert!(parse("http://10.0.0.1/ -H nonsense").unwrap().job().is_err());
    }
}
