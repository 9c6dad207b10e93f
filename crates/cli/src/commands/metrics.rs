//! `ginnel metrics`: exports the counters of running stacks to Prometheus.

use crate::failure::Failure;
use crate::metrics;
use crate::metrics::stacks::StackMetrics;
use crate::output::note;
use crate::signals;
use clap::Args;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::run_dir;

/// Interval at which the flag of the signals is looked at.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// Options of `ginnel metrics`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "A configuration of Prometheus, and alerts: docs/metrics.md")]
pub struct MetricsOptions {
    /// Names of stacks. One that does not run has "ginnel_up 0". Default: all stacks that run at the time of
    /// a scrape.
    name: Vec<String>,

    /// Address and port to listen on. Whoever can connect sees the counters.
    #[arg(long, short, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9745")]
    listen: SocketAddr,
}

/// Answers scrapes until a signal.
pub fn run(options: &MetricsOptions) -> Result<(), Failure> {
    if let Some(name) = options.name.iter().find(|name| !run_dir::is_valid_name(name)) {
        return Err(Failure::usage(format!("{name:?} is not a valid name of a stack")));
    }
    let stop = signals::stop_on_signal("the exporter")?;
    let address = serve(options.listen, StackMetrics { names: options.name.clone() })?;
    note(format_args!("metrics at http://{address}/metrics; Ctrl-C ends"));
    while !stop.is_set() {
        std::thread::sleep(SIGNAL_INTERVAL);
    }
    Ok(())
}

/// Starts the exporter, and returns its address.
pub fn serve(
    listen: SocketAddr,
    source: impl metrics::MetricSource + 'static,
) -> Result<SocketAddr, Failure> {
    metrics::serve(listen, Box::new(source))
        .map_err(|e| Failure::running(format!("metrics: listen on {listen}: {e}")))
}
