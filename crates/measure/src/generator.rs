//! The generator: `ginnel load` with the light stack, on a core of its own.

use crate::MeasureError;
use crate::cpu_account::{CpuAccount, Participants, measure_cpu};
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

/// Until virtual cores run at the speed that they keep, and what grows with the first connections has grown: a second or two on machines of others, in which both
/// arms are up to 40 % slower.
const WARM_UP_SECONDS: f64 = 2.0;

/// How long a server may take to answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// A question whether it does takes no longer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(3);

/// The command line of a program.
#[derive(Parser)]
struct LoadCommandLine<T: Args> {
    #[command(flatten)]
    options: T,
}

/// Options from the words of a command line.
///
/// # Errors
/// As clap has it.
pub fn parse<T: Args>(words: &[String]) -> Result<T, MeasureError> {
    let words = core::iter::once("program").chain(words.iter().map(String::as_str));
    LoadCommandLine::try_parse_from(words).map(|line| line.options).map_err(MeasureError::failed)
}

/// In which language the generator asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadProtocol {
    /// `ginnel load http`.
    Http,
    /// `ginnel load redis`.
    Redis,
    /// `ginnel load memcached`.
    Memcached,
}

/// What the generator asks.
#[derive(Clone, Debug)]
pub struct LoadSpec {
    /// The language.
    pub protocol: LoadProtocol,
    /// The words of its command, without the generator's stack, sources and times.
    pub arguments: Vec<String>,
}

impl LoadSpec {
    /// What these words say.
    pub fn new(protocol: LoadProtocol, words: &[&str]) -> Self {
        Self { protocol, arguments: words.iter().map(ToString::to_string).collect() }
    }

    /// The job that these words and `more` make; `change` is made to what they say before.
    fn job(
        &self,
        ground: &Testbed,
        more: &[String],
        change: impl FnOnce(&mut CommonOptions),
    ) -> Result<Job, MeasureError> {
        let mut words = self.arguments.clone();
        words.extend(ground.source_options());
        words.extend(["--stack".into(), "light".into(), "--quiet".into()]);
        words.extend_from_slice(more);
        fn of<A: Args + LoadOptions>(
            words: &[String],
            change: impl FnOnce(&mut CommonOptions),
        ) -> Result<Job, MeasureError> {
            let mut ask: A = parse(words)?;
            change(ask.common_mut());
            ask.job().map_err(MeasureError::failed)
        }
        match self.protocol {
            LoadProtocol::Http => of::<HttpOptions>(&words, change),
            LoadProtocol::Redis => of::<RedisOptions>(&words, change),
            LoadProtocol::Memcached => of::<MemcachedOptions>(&words, change),
        }
    }

    /// Asks once: how many answers came, and what failed.
    fn probe(&self, ground: &Testbed) -> Result<Report, MeasureError> {
        let more = ["--requests", "1", "--duration", "1s", "--timeout", "500ms"].map(String::from);
        let job = self.job(ground, &more, |common| (common.connections, common.rate) = (1, None))?;
        let stop = StopFlag::new().map_err(MeasureError::failed)?;
        let place = ground.generator()?;
        let report = std::thread::scope(|scope| {
            let asks = scope.spawn(|| load::measure_light(&job, &stop, vec![place]));
            let until = Instant::now() + PROBE_TIMEOUT;
            while !asks.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            stop.stop();
            asks.join().expect("the generator does not panic")
        });
        report.map_err(MeasureError::failed)
    }

    /// Waits until a server answers. `check` fails if there is none any more.
    ///
    /// # Errors
    /// There is none, or it does not answer within `patience`: whether it listens, and what came instead of an answer.
    pub fn wait_for_answer(
        &self,
        ground: &Testbed,
        patience: Duration,
        mut check: impl FnMut() -> Result<(), MeasureError>,
    ) -> Result<(), MeasureError> {
        let until = Instant::now() + patience;
        loop {
            check()?;
            let report = self.probe(ground)?;
            if report.requests.completed > 0 {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(MeasureError::Failed(no_answer_message(&report, ground, patience)));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Puts load on a server that answers, for so many seconds after [`WARM_UP_SECONDS`], or as many if it is fewer, and says what it came to and what it cost
    /// whom. `add` names the server's threads.
    ///
    /// # Errors
    /// The generator's device cannot be opened, or its options are wrong.
    pub fn measure(
        &self,
        ground: &Testbed,
        seconds: f64,
        add: impl FnOnce(&mut Participants) + Send,
    ) -> Result<(Report, CpuAccount), MeasureError> {
        let milliseconds = |seconds: f64| format!("{:.0}ms", 1000.0 * seconds);
        let warm_up = seconds.min(WARM_UP_SECONDS);
        let times = ["--duration".into(), milliseconds(seconds), "--warmup".into(), milliseconds(warm_up)];
        let job = self.job(ground, &times, |_| ())?;
        let stop = StopFlag::new().map_err(MeasureError::failed)?;
        let work = || -> Result<_, MeasureError> {
            pin(ground.cpus.client)?;
            let WorkerStack { config, .. } = ground.generator()?;
            // The kernel's threads are there once both devices are.
            let device =
                ginnel::raw::open(&config.devices[0], &config, None).map_err(MeasureError::failed)?;
            let mut parts = Participants::new(ground.cpus, ground.layout);
            if ground.medium == Medium::Veth {
                parts.place_napi_threads()?;
            }
            add(&mut parts);
            let places = vec![WorkerStack { config, device: Some(device) }];
            measure_cpu(&parts, || load::measure_light(&job, &stop, places))
        };
        let measured =
            std::thread::scope(|scope| scope.spawn(work).join().expect("the generator does not panic"));
        let (report, account) = measured?;
        Ok((report.map_err(MeasureError::failed)?, account))
    }
}

/// Why nobody answered.
fn no_answer_message(report: &Report, ground: &Testbed, patience: Duration) -> String {
    let (server, seconds) = (&report.server, patience.as_secs());
    let failed = |kind: stats::Failure| report.failures.contains_key(kind.name());
    if failed(stats::Failure::Refused) {
        let address = ground.address;
        return format!(
            "after {seconds} s nothing listens at {server}: the program has to listen on {address} or on all addresses"
        );
    }
    if failed(stats::Failure::BadResponse) {
        return format!("what listens at {server} does not speak the language that it is asked in");
    }
    let others: Vec<&str> = report.failures.keys().copied().collect();
    let how = if others.is_empty() { String::new() } else { format!(" ({})", others.join(", ")) };
    format!("no answer from {server} within {seconds} s{how}")
}
