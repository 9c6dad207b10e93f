//! The counters of running stacks as metrics.

use super::{Exposition, MetricKind, MetricSource};
use crate::commands::StatSource;
use ginnel::run_dir::{self, RunningStack, restarts};
use ginnel::stats::CounterKind;
use std::collections::HashMap;
use std::sync::LazyLock;

/// Names and meanings of all counters. The table is generated from the definitions of the counters, together
/// with `docs/statistics.md`.
const COUNTERS: &str = include_str!("counters.tsv");

static HELP: LazyLock<HashMap<&str, &str>> =
    LazyLock::new(|| COUNTERS.lines().filter_map(|line| line.split_once('\t')).collect());

const UP_HELP: &str = "Whether the stack runs and its counters can be read.";

const RESTARTS_HELP: &str =
    "Times that the shards were started again since the start of the stack, which reset all connections.";

/// The stacks of this user.
pub struct StackMetrics {
    /// Names of the stacks; without any, all stacks that run are exported.
    pub names: Vec<String>,
}

impl MetricSource for StackMetrics {
    fn collect(&self, out: &mut Exposition) {
        if self.names.is_empty() {
            match run_dir::running() {
                Ok(running) => running.into_iter().for_each(|stack| collect_stack(stack, out)),
                Err(e) => out.comment(&e.to_string()),
            }
            return;
        }
        for name in &self.names {
            match run_dir::find(Some(name)) {
                Ok(running) => collect_stack(running, out),
                Err(e) => report_down(name, &e.to_string(), out),
            }
        }
    }
}

fn report_down(name: &str, problem: &str, out: &mut Exposition) {
    out.add("up", MetricKind::Gauge, UP_HELP, &[("stack", name)], 0);
    out.comment(problem);
}

/// Adds the counters of all shards of a stack.
fn collect_stack(running: RunningStack, out: &mut Exposition) {
    let stack = running.name.clone();
    if restarts::has_failed(&running.path) {
        let problem =
            format!("the shards of the stack \"{stack}\" could not be started again: see ginnel log {stack}");
        return report_down(&stack, &problem, out);
    }
    let taken = StatSource::open(running).and_then(|source| Ok((source.take()?, source)));
    let (sample, source) = match taken {
        Ok((sample, source)) if source.has_ended(&sample) => {
            return report_down(&stack, &format!("the shards of the stack \"{stack}\" have ended"), out);
        }
        Ok(taken) => taken,
        Err(e) => return report_down(&stack, &e.to_string(), out),
    };
    out.add("up", MetricKind::Gauge, UP_HELP, &[("stack", &stack)], 1);
    let count = restarts::count(&source.running.path);
    out.add("restarts", MetricKind::Counter, RESTARTS_HELP, &[("stack", &stack)], count);
    for (page, snapshot) in source.pages.iter().zip(&sample.shards) {
        for ((kind, name), value) in page.names().iter().zip(&snapshot.values) {
            let CounterLabel { metric, documented, instance } = CounterLabel::of(name);
            let mut labels = vec![("stack", stack.as_str()), ("shard", page.label())];
            labels.extend(instance);
            let kind = match kind {
                CounterKind::Counter => MetricKind::Counter,
                CounterKind::Gauge => MetricKind::Gauge,
            };
            let help = HELP.get(documented.as_str()).copied().unwrap_or_default();
            out.add(&metric, kind, help, &labels, *value);
        }
    }
}

/// How a counter is exported.
struct CounterLabel<'a> {
    /// Name of the metric, with words separated by dots.
    metric: String,
    /// Name in the documentation.
    documented: String,
    /// Label of a counter that devices or pools have: the kind and the name of the instance.
    instance: Option<(&'static str, &'a str)>,
}

impl<'a> CounterLabel<'a> {
    /// Makes a label of the name of a device or pool: `device.tap0.rx_frames`. The name of a device may
    /// contain dots.
    fn of(name: &'a str) -> Self {
        for group in ["device", "pool"] {
            let rest = name.strip_prefix(group).and_then(|rest| rest.strip_prefix('.'));
            if let Some((instance, item)) = rest.and_then(|rest| rest.rsplit_once('.')) {
                let (metric, documented) = (format!("{group}.{item}"), format!("{group}.NAME.{item}"));
                return Self { metric, documented, instance: Some((group, instance)) };
            }
        }
        Self { metric: name.into(), documented: name.into(), instance: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_pools_become_labels() {
        let of = |name| {
            let CounterLabel { metric, documented, instance } = CounterLabel::of(name);
            assert!(HELP.contains_key(documented.as_str()), "{documented}");
            (metric, instance)
        };
        assert_eq!(of("tcp.segments_in"), ("tcp.segments_in".into(), None));
        assert_eq!(of("device.eth0.5.rx_frames"), ("device.rx_frames".into(), Some(("device", "eth0.5"))));
        assert_eq!(of("pool.timers.used"), ("pool.used".into(), Some(("pool", "timers"))));
    }

    #[test]
    fn a_stack_that_does_not_run_is_down() {
        let mut out = Exposition::default();
        StackMetrics { names: vec!["no-such-stack".into()] }.collect(&mut out);
        let text = out.to_string();
        assert!(text.contains("\nginnel_up{stack=\"no-such-stack\"} 0\n# no stack named"), "{text}");
    }
}
