//! `ginnel bench compare`: runs a server program on the kernel and on Ginnel in turns, under the same load.

mod summary;

pub use self::summary::OTHER_PROGRAMS_SHARE_MAX;
use self::summary::{ComparisonSummary, MeasuredRun};
use crate::failure::Failure;
use crate::output;
use crate::signals;
use clap::{Args, Subcommand, ValueEnum};
use core::net::{IpAddr, Ipv4Addr};
use core::str::FromStr;
use core::time::Duration;
use ginnel::StopFlag;
use ginnel_apps::load::urls::{Url, UrlScheme};
use ginnel_measure::generator::{LoadProtocol, LoadSpec};
use ginnel_measure::machine::Cpus;
use ginnel_measure::program::{NetworkStack, RunningPrograms, ginnel_path};
use ginnel_measure::testbed::{Medium, Testbed};
use ginnel_measure::watched_group::WatchedGroup;
use ginnel_measure::{self as measure, CoreLayout, namespace};
use std::ffi::OsString;

/// The subcommands of `ginnel bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Run a server on the kernel and on Ginnel in turns under the same load, and report which is faster
    ///
    /// The measurement runs in a network namespace of its own, which is removed at the end; nothing outside
    /// of it is changed. The server program gets one core, together with the stack and, over veth, the
    /// kernel's receive processing for it; the load generator gets another core. Which is faster follows from
    /// the requests per second of CPU time of the server's side. The program must stay in the foreground and
    /// listen on the URL's address or on all addresses, as in: ginnel bench compare --url
    /// http://10.77.0.1:8080/ -- nginx -c /etc/mine.conf -g 'daemon off;'
    ///
    /// A user other than root needs --device memif.
    Compare(CompareOptions),
}

/// Options of `ginnel bench compare`.
#[derive(Clone, Debug, Args)]
pub struct CompareOptions {
    /// URL to request. Its host is the IPv4 address that the program will have: http://10.77.0.1:8080/path,
    /// or redis://10.77.0.1 or memcached://10.77.0.1 to GET a value.
    #[arg(long, value_name = "URL", default_value = "http://10.77.0.1/")]
    url: CompareUrl,

    /// Send many requests on each connection. Without this option each HTTP request uses a connection of its
    /// own. Requests to redis and memcached always use persistent connections.
    #[arg(short, long)]
    keep_alive: bool,

    /// Number of concurrent connections, each with one request in flight.
    #[arg(short, long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    connections: u32,

    /// Number of pairs of measurements; each pair measures the kernel, then Ginnel.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pairs: u32,

    /// Length of each measurement in seconds. A warm-up of the same length, at most 2 s, comes before.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = parse_seconds)]
    seconds: f64,

    /// Device between Ginnel and the generator.
    #[arg(long, value_name = "DEVICE", value_enum, default_value_t = CompareDevice::AfXdp)]
    device: CompareDevice,

    /// Interface between the kernel and the generator. The default is veth for root, and loopback for others.
    #[arg(long, value_name = "DEVICE", value_enum)]
    kernel_device: Option<KernelDevice>,

    /// Which core runs the kernel's receive processing over veth. Over loopback it is the sender's.
    #[arg(long, value_name = "LAYOUT", value_enum, default_value_t)]
    layout: CoreLayout,

    /// Longest time in seconds to wait for the program's first answer.
    #[arg(long, alias = "patience", value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=600))]
    start_timeout: u64,

    /// Print the result as JSON instead of a table.
    #[arg(long)]
    json: bool,

    /// The server program and its arguments.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Device that Ginnel runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CompareDevice {
    /// AF_XDP on the same veth pair that the kernel uses.
    #[value(name = "af_xdp")]
    AfXdp,
    /// Shared memory, which the kernel cannot use: for a client and a server on one machine.
    Memif,
}

/// Interface that the kernel runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KernelDevice {
    /// A veth pair; the generator has a TCP of its own, over AF_XDP. It needs root.
    Veth,
    /// The loopback interface; the generator is on the kernel's TCP.
    Loopback,
}

/// Parses the length of a measurement in seconds.
pub fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number from 0.1 to 3600".into()),
    }
}

/// A URL of `--url`: which protocol to speak to which address.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CompareUrl {
    protocol: LoadProtocol,
    address: Ipv4Addr,
    /// The argument that `ginnel load` takes for the server.
    load_argument: String,
    /// The URL as it was given.
    text: String,
}

impl FromStr for CompareUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (scheme, argument) = UrlScheme::split(text)?;
        let protocol = match scheme {
            UrlScheme::Http => LoadProtocol::Http,
            UrlScheme::Redis => LoadProtocol::Redis,
            UrlScheme::Memcached => LoadProtocol::Memcached,
        };
        let url: Url = argument.parse()?;
        let host = url.authority.rsplit_once(':').map_or(&*url.authority, |(host, _)| host);
        let address: Ipv4Addr = host.parse().map_err(|_| format!("\"{host}\" is not an IPv4 address"))?;
        if address.is_loopback()
            || address.is_unspecified()
            || address.is_multicast()
            || address.is_broadcast()
        {
            return Err(format!(
                "{address} cannot be the program's address: use a unicast address as 10.77.0.1"
            ));
        }
        debug_assert!(url.resolve().is_ok_and(|server| server.ip() == IpAddr::from(address)));
        Ok(Self { protocol, address, load_argument: argument.to_owned(), text: text.to_owned() })
    }
}

impl CompareOptions {
    fn kernel_medium(&self) -> Medium {
        match self.kernel_device {
            Some(KernelDevice::Loopback) => Medium::Loopback,
            None if !is_root() => Medium::Loopback,
            Some(KernelDevice::Veth) | None => Medium::Veth,
        }
    }

    fn medium(&self) -> Medium {
        match self.device {
            CompareDevice::AfXdp => Medium::Veth,
            CompareDevice::Memif => Medium::Memif,
        }
    }

    /// Returns an error if an option needs root and this user is not root.
    fn check_permission(&self) -> Result<(), Failure> {
        let needs_root = [
            ("--device af_xdp", self.medium(), "--device memif"),
            ("--kernel-device veth", self.kernel_medium(), "--kernel-device loopback"),
        ];
        let found = needs_root.into_iter().find(|(_, medium, _)| !is_root() && *medium == Medium::Veth);
        found.map_or(Ok(()), |(option, _, instead)| {
            let reason = "it loads BPF programs (AF_XDP) and pins kernel threads to CPUs";
            Err(Failure::running(format!("bench compare {option} needs root: {reason}; {instead} does not")))
        })
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

impl BenchCommand {
    /// Measures, and prints the result.
    pub fn run(self) -> Result<(), Failure> {
        let Self::Compare(options) = self;
        if !namespace::is_inside() {
            options.check_permission()?;
            let reason = match namespace::check(&["true"]) {
                // Inside of the namespace every user is root, so the choice is made here.
                Ok(()) => namespace::enter(arguments_with_kernel_device(&options)),
                Err(reason) => reason,
            };
            return Err(Failure::running(format!("cannot create a network namespace: {reason}")));
        }
        namespace::prepare().map_err(Failure::running)?;
        let stop = signals::stop_and_clean_up_on_signal()?;
        let result = compare(&options, &stop);
        if stop.is_set() {
            return Err(Failure::running("interrupted"));
        }
        let summary = result?;
        if options.json {
            output::print(format_args!("{}\n", summary.to_json()))
        } else {
            output::print(summary)
        }
    }
}

/// Returns the arguments of this process, with the interface of the kernel.
fn arguments_with_kernel_device(options: &CompareOptions) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    if options.kernel_device.is_none() {
        let device = if options.kernel_medium() == Medium::Loopback { "loopback" } else { "veth" };
        // The words "bench compare" come first.
        arguments.splice(2..2, ["--kernel-device".into(), device.into()]);
    }
    arguments
}

fn from_measure_failure(error: measure::MeasureError) -> Failure {
    match error {
        measure::MeasureError::Skipped(why) | measure::MeasureError::Failed(why) => Failure::running(why),
    }
}

/// Returns the load that the options describe.
fn generator_load(options: &CompareOptions, stop: &StopFlag) -> LoadSpec {
    let connections = options.connections.to_string();
    let mut words = vec![&*options.url.load_argument, "--connections", &connections];
    if options.keep_alive && options.url.protocol == LoadProtocol::Http {
        words.push("--keep-alive");
    }
    LoadSpec { stop: Some(stop.clone()), ..LoadSpec::new(options.url.protocol, &words) }
}

fn compare(options: &CompareOptions, stop: &StopFlag) -> Result<ComparisonSummary, Failure> {
    let mut cpus = Cpus::choose().map_err(from_measure_failure)?;
    if options.layout == CoreLayout::One {
        cpus.client = cpus.server;
    }
    let folder = tempfile::tempdir().map_err(|e| Failure::running(format!("temporary directory: {e}")))?;
    let group = WatchedGroup::start(&ginnel_path().map_err(from_measure_failure)?, folder.path())
        .map_err(from_measure_failure)?;
    let of = |medium| Testbed {
        medium,
        cpus,
        layout: match options.layout {
            CoreLayout::Charged if medium == Medium::Loopback => CoreLayout::Sender,
            layout => layout,
        },
        polls: false,
        address: options.url.address,
        folder: folder.path().to_owned(),
        process_group: Some(group.id()),
    };
    let (medium, kernel_medium) = (options.medium(), options.kernel_medium());
    let media = [kernel_medium, medium];
    let mut summary = ComparisonSummary::new(&options.program, &options.url.text, options.layout, media);
    let load = generator_load(options, stop);
    output::note(format_args!(
        "program on CPU {}, generator on CPU {}; {} pairs of {} s each",
        cpus.server, cpus.client, options.pairs, options.seconds
    ));
    for pair in 1..=options.pairs {
        let measure = |stack, testbed: &Testbed| -> Result<MeasuredRun, Failure> {
            let name = if stack == NetworkStack::Kernel { "the kernel" } else { "Ginnel" };
            let run = measure_once(options, &load, stack, testbed);
            let run = run.map_err(|e| Failure::running(format!("on {name}: {}", from_measure_failure(e))))?;
            output::note(format_args!("{pair}/{} on {name}: {}", options.pairs, run.line()));
            Ok(run)
        };
        let kernel = measure(NetworkStack::Kernel, &of(kernel_medium))?;
        summary.add(kernel, measure(NetworkStack::Ginnel, &of(medium))?);
    }
    Ok(summary)
}

/// Starts the program, waits until it answers, and measures it.
fn measure_once(
    options: &CompareOptions,
    load: &LoadSpec,
    stack: NetworkStack,
    testbed: &Testbed,
) -> Result<MeasuredRun, measure::MeasureError> {
    testbed.set_up(stack == NetworkStack::Kernel)?;
    let mut running = RunningPrograms::start(core::slice::from_ref(&options.program), stack, testbed)?;
    let measured = load
        .wait_for_answer(testbed, Duration::from_secs(options.start_timeout), || running.check())
        .and_then(|()| load.measure(testbed, options.seconds, |participants| running.add_to(participants)));
    match measured {
        Ok((report, account)) => {
            running.check()?;
            Ok(MeasuredRun::new(&report, &account))
        }
        Err(measure::MeasureError::Failed(why)) if !why.contains(measure::program::OUTPUT_INTRODUCTION) => {
            Err(measure::MeasureError::Failed(why + &running.last_output()))
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::{CompareUrl, LoadProtocol};

    #[test]
    fn urls_give_protocol_and_address() {
        let target = |text: &str| text.parse::<CompareUrl>();
        let http = target("http://10.1.2.3:8080/x?y").unwrap();
        assert_eq!((http.protocol, http.address.to_string()), (LoadProtocol::Http, "10.1.2.3".into()));
        assert_eq!(http.load_argument, "http://10.1.2.3:8080/x?y");
        let redis = target("redis://10.1.2.3/").unwrap();
        assert_eq!((redis.protocol, redis.load_argument.as_str()), (LoadProtocol::Redis, "10.1.2.3"));
        let memcached = target("memcached://10.1.2.3:99").unwrap();
        assert_eq!(
            (memcached.protocol, memcached.load_argument.as_str()),
            (LoadProtocol::Memcached, "10.1.2.3:99")
        );
        for bad in [
            "http://[fd00::1]/",
            "http://127.0.0.1/",
            "http://0.0.0.0/",
            "http://host/",
            "ftp://10.0.0.1/",
            "redis://",
            "redis://10.1.2.3/0",
        ] {
            assert!(target(bad).is_err(), "{bad}");
        }
    }
}
