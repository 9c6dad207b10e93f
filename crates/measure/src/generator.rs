//! The load generator: `ginnel load`, pinned to a core of its own. It runs on the light stack, or over
//! loopback on the kernel's stack.

use crate::MeasureError;
use crate::cpu_account::{CpuAccount, CpuWindow, Participants, measure_cpu_in};
use crate::machine::pin;
use crate::testbed::{Medium, Testbed};
use clap::{Args, Parser};
use core::time::Duration;
use ginnel::StopFlag;
use ginnel_apps::load::light::WorkerStack;
use ginnel_apps::load::stats;
use ginnel_apps::load::{
    self, CommonOptions, HttpOptions, Job, LoadOptions, MemcachedOptions, RedisOptions, Report,
};
use std::time::Instant;

/// Warm-up time, in seconds. In this time virtual cores reach their sustained speed, and the first
/// connections make memory grow. On shared machines this takes one or two seconds, in which a server, on
/// Ginnel or on the kernel, is up to 40 % slower.
const WARM_UP_SECONDS: f64 = 2.0;

/// How long a server may take to answer the first request.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Time limit of one probe request.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

/// A command line with the options `T`.
#[derive(Parser)]
struct LoadCommandLine<T: Args> {
    #[command(flatten)]
    options: T,
}

/// Parses options from arguments, which do not begin with the name of a program.
///
/// # Errors
/// The error of clap.
pub fn parse<T: Args>(arguments: &[String]) -> Result<T, MeasureError> {
    let arguments = core::iter::once("program").chain(arguments.iter().map(String::as_str));
    LoadCommandLine::try_parse_from(arguments).map(|line| line.options).map_err(MeasureError::failed)
}

/// The application protocol of the generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadProtocol {
    /// `ginnel load http`.
    Http,
    /// `ginnel load redis`.
    Redis,
    /// `ginnel load memcached`.
    Memcached,
}

/// The load that the generator produces.
#[derive(Clone, Debug)]
pub struct LoadSpec {
    /// The application protocol.
    pub protocol: LoadProtocol,
    /// The arguments of its command, without the generator's stack, source addresses and durations.
    pub arguments: Vec<String>,
    /// When set, a measurement ends early, and [`LoadSpec::wait_for_answer`] fails.
    pub stop: Option<StopFlag>,
}

/// Runs the generator on its stack, or on the kernel's TCP if `stack` is `None`.
fn generate(job: &Job, stop: &StopFlag, stack: Option<WorkerStack>) -> Result<Report, MeasureError> {
    match stack {
        Some(stack) => load::measure_light(job, stop, vec![stack]),
        None => load::measure_on_kernel(job, stop),
    }
    .map_err(MeasureError::failed)
}

impl LoadSpec {
    /// Creates a load with these arguments.
    pub fn new(protocol: LoadProtocol, arguments: &[&str]) -> Self {
        Self { protocol, arguments: arguments.iter().map(ToString::to_string).collect(), stop: None }
    }

    fn is_stopped(&self) -> bool {
        self.stop.as_ref().is_some_and(StopFlag::is_set)
    }

    /// Returns the job for [`LoadSpec::arguments`] followed by the testbed's options and `extra`; `change`
    /// modifies the common options.
    fn job(
        &self,
        testbed: &Testbed,
        extra: &[String],
        change: impl FnOnce(&mut CommonOptions),
    ) -> Result<Job, MeasureError> {
        let mut arguments = self.arguments.clone();
        arguments.extend(testbed.source_options());
        let stack = if testbed.generator_is_kernel() { "kernel" } else { "light" };
        arguments.extend(["--stack".into(), stack.into(), "--quiet".into()]);
        arguments.extend_from_slice(extra);
        fn of<A: Args + LoadOptions>(
            arguments: &[String],
            change: impl FnOnce(&mut CommonOptions),
        ) -> Result<Job, MeasureError> {
            let mut options: A = parse(arguments)?;
            change(options.common_mut());
            options.job().map_err(MeasureError::failed)
        }
        match self.protocol {
            LoadProtocol::Http => of::<HttpOptions>(&arguments, change),
            LoadProtocol::Redis => of::<RedisOptions>(&arguments, change),
            LoadProtocol::Memcached => of::<MemcachedOptions>(&arguments, change),
        }
    }

    /// Sends one request and returns the report on it.
    fn probe(&self, testbed: &Testbed) -> Result<Report, MeasureError> {
        let extra = ["--requests", "1", "--duration", "1s", "--timeout", "500ms"].map(String::from);
        let job = self.job(testbed, &extra, |common| (common.connections, common.rate) = (1, None))?;
        let stop = StopFlag::new().map_err(MeasureError::failed)?;
        let stack = testbed.generator()?;
        std::thread::scope(|scope| {
            let probe = scope.spawn(|| generate(&job, &stop, stack));
            let deadline = Instant::now() + PROBE_TIMEOUT;
            while !probe.is_finished() && !self.is_stopped() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            stop.stop();
            probe.join().expect("the generator does not panic")
        })
    }

    /// Waits until a server answers. `check` fails if the server has ended.
    ///
    /// # Errors
    /// The error of `check`; "interrupted" if [`LoadSpec::stop`] is set; that the options are wrong or a
    /// device cannot be opened; or, if the server does not answer within `timeout`, whether it listens, and
    /// what was received instead of an answer.
    pub fn wait_for_answer(
        &self,
        testbed: &Testbed,
        timeout: Duration,
        mut check: impl FnMut() -> Result<(), MeasureError>,
    ) -> Result<(), MeasureError> {
        let deadline = Instant::now() + timeout;
        loop {
            if self.is_stopped() {
                return Err(MeasureError::failed("interrupted"));
            }
            check()?;
            let report = self.probe(testbed)?;
            if report.requests.completed > 0 {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(MeasureError::Failed(no_answer_message(&report, testbed, timeout)));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Puts load on a server that answers, for `seconds` after a warm-up of `WARM_UP_SECONDS` or `seconds`,
    /// whichever is shorter. Returns the report and the CPU account of the time after the warm-up. `add` adds
    /// the server's threads to the participants.
    ///
    /// # Errors
    /// If the generator's options are wrong, its device cannot be opened, a thread cannot be pinned, or the
    /// kernel's counters cannot be read.
    pub fn measure(
        &self,
        testbed: &Testbed,
        seconds: f64,
        add: impl FnOnce(&mut Participants) + Send,
    ) -> Result<(Report, CpuAccount), MeasureError> {
        let milliseconds = |seconds: f64| format!("{:.0}ms", 1000.0 * seconds);
        let warm_up = seconds.min(WARM_UP_SECONDS);
        let times = ["--duration".into(), milliseconds(seconds), "--warmup".into(), milliseconds(warm_up)];
        let job = self.job(testbed, &times, |_| ())?;
        let window =
            CpuWindow { start: Duration::from_secs_f64(warm_up), length: Duration::from_secs_f64(seconds) };
        let stop = match &self.stop {
            Some(stop) => stop.clone(),
            None => StopFlag::new().map_err(MeasureError::failed)?,
        };
        let work = || -> Result<_, MeasureError> {
            pin(testbed.cpus.client)?;
            let mut stack = testbed.generator()?;
            if let Some(WorkerStack { config, device }) = &mut stack {
                // The NAPI threads exist once both interfaces are in use.
                let opened = ginnel::raw::open(&config.devices[0], config, None);
                *device = Some(opened.map_err(MeasureError::failed)?);
            }
            let mut participants = Participants::new(testbed.cpus, testbed.layout);
            match testbed.medium {
                Medium::Veth => participants.place_napi_threads()?,
                Medium::Loopback => participants.add_softirq_thread(),
                Medium::Memif => {}
            }
            add(&mut participants);
            measure_cpu_in(&participants, window, || generate(&job, &stop, stack))
        };
        let measured =
            std::thread::scope(|scope| scope.spawn(work).join().expect("the generator does not panic"));
        let (report, account) = measured?;
        Ok((report?, account))
    }
}

/// Explains why no answer was received.
fn no_answer_message(report: &Report, testbed: &Testbed, timeout: Duration) -> String {
    let (server, seconds) = (&report.server, timeout.as_secs());
    let failed = |kind: stats::Failure| report.failures.contains_key(kind.name());
    if failed(stats::Failure::Refused) {
        let address = testbed.address;
        return format!(
            "after {seconds} s nothing listens at {server}: the program has to listen on {address} or on all addresses"
        );
    }
    if failed(stats::Failure::BadResponse) {
        return format!("the program that listens at {server} does not speak the protocol of the generator");
    }
    let others: Vec<&str> = report.failures.keys().copied().collect();
    let reasons = if others.is_empty() { String::new() } else { format!(" ({})", others.join(", ")) };
    format!("no answer from {server} within {seconds} s{reasons}")
}
