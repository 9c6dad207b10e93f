//! The measurements of a monitor as metrics.

use super::exposition::Observations;
use super::{Exposition, MetricKind, MetricSource};
use ginnel_monitor::distribution::Distribution;
use ginnel_monitor::session::Session;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time between two publications of the monitor.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(200);

/// Upper bounds of the buckets of latencies, in microseconds.
const BOUNDS_US: [u64; 20] = [
    50, 100, 200, 300, 500, 750, 1_000, 1_500, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000,
];

/// Measurements since the start of the monitor.
#[derive(Clone, Debug, Default)]
struct PublishedMeasurements {
    /// Name, meaning and value of each counter.
    counters: Vec<(&'static str, &'static str, u64)>,
    connections: u64,
    outstanding: u64,
    lost: u64,
    /// Latencies of low and of high priority.
    latencies: [Observations; 2],
}

/// Passes measurements from the monitor to the exporter.
pub struct MonitorPublisher {
    published: Arc<Mutex<PublishedMeasurements>>,
    next: Instant,
}

/// The published measurements of a monitor.
pub struct MonitorMetrics {
    source: String,
    published: Arc<Mutex<PublishedMeasurements>>,
}

/// Creates the two ends. `source` names what is monitored.
pub fn channel(source: &str) -> (MonitorPublisher, MonitorMetrics) {
    let published = Arc::<Mutex<PublishedMeasurements>>::default();
    let publisher = MonitorPublisher { published: published.clone(), next: Instant::now() };
    (publisher, MonitorMetrics { source: source.into(), published })
}

impl MonitorPublisher {
    /// Publishes the measurements of a session if the last ones are old. `lost` is the number of packets that
    /// the source has lost.
    pub fn publish_if_due(&mut self, session: &Session, lost: u64) {
        let now = Instant::now();
        if now < self.next {
            return;
        }
        self.next = now + PUBLISH_INTERVAL;
        let (engine, mut measurements) = (session.engine(), PublishedMeasurements::default());
        engine.counters().visit(&mut |name, help, value| measurements.counters.push((name, help, value)));
        measurements.connections = engine.connections() as u64;
        measurements.outstanding = engine.outstanding() as u64;
        measurements.lost = lost;
        // The latencies of the closed intervals, and those of the current one.
        let parts = session.total().iter().zip(engine.latencies());
        for (out, (closed, present)) in measurements.latencies.iter_mut().zip(parts) {
            *out = observations([closed, present]);
        }
        *self.published.lock().unwrap_or_else(PoisonError::into_inner) = measurements;
    }
}

/// Returns the sum of two distributions of nanoseconds as observations in seconds.
fn observations(distributions: [&Distribution; 2]) -> Observations {
    let mut out = Observations::default();
    let mut counts = [0; BOUNDS_US.len()];
    for distribution in distributions.into_iter().filter(|distribution| distribution.count() > 0) {
        out.count += distribution.count();
        out.sum += distribution.sum_nanos() as f64 / 1e9;
        let below = distribution.counts_up_to(&BOUNDS_US.map(|bound| bound * 1_000));
        counts.iter_mut().zip(below).for_each(|(sum, count)| *sum += count);
    }
    out.buckets = BOUNDS_US.iter().map(|bound| *bound as f64 / 1e6).zip(counts).collect();
    out
}

impl MetricSource for MonitorMetrics {
    fn collect(&self, out: &mut Exposition) {
        let published = self.published.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let labels = [("source", self.source.as_str())];
        for (name, help, value) in &published.counters {
            out.add(&format!("monitor.{name}"), MetricKind::Counter, help, &labels, *value);
        }
        let help = "Packets that were lost because the monitor was too slow.";
        out.add("monitor.lost", MetricKind::Counter, help, &labels, published.lost);
        let help = "Connections that are followed.";
        out.add("monitor.connections", MetricKind::Gauge, help, &labels, published.connections);
        let help = "Requests that wait for their responses.";
        out.add("monitor.outstanding", MetricKind::Gauge, help, &labels, published.outstanding);
        for (priority, observations) in ["low", "high"].into_iter().zip(&published.latencies) {
            let labels = [labels[0], ("priority", priority)];
            let help = "Time from the last byte of a request to the last byte of its response, by priority.";
            out.add_histogram("monitor.latency_seconds", help, &labels, observations);
        }
    }
}
