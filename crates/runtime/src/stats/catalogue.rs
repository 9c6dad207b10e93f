//! All counters of a shard with their names, in a fixed order.

use super::page::CounterKind;
use super::{BURST_BUCKETS, ShardStats};
use crate::engine::Engine;
use crate::handler::Handler;
use crate::shard::RxPort;
use crate::timers::Timers;
use ginnel_stack::stack::{PoolUsage, Stack};

/// Sources of the counters.
pub(crate) struct StatsView<'a, H> {
    pub(crate) stats: &'a ShardStats,
    pub(crate) engine: &'a Engine,
    pub(crate) ports: &'a [RxPort],
    pub(crate) timers: &'a Timers,
    pub(crate) handler: &'a H,
}

/// The name of a counter, in parts, because most names are never joined: `device.tap0.rx_frames`.
#[derive(Clone, Copy)]
pub(crate) struct CounterName<'a> {
    group: &'a str,
    instance: &'a str,
    item: &'a str,
}

const BURST_NAMES: [&str; BURST_BUCKETS] =
    ["bursts_1", "bursts_2", "bursts_4", "bursts_8", "bursts_16", "bursts_32", "bursts_64"];

impl<H: Handler> StatsView<'_, H> {
    /// Calls `put` with each counter, always in the same order.
    pub(crate) fn visit(&self, put: &mut impl FnMut(CounterKind, CounterName<'_>, u64)) {
        let name = |group, item| CounterName { group, instance: "", item };
        for (item, value) in self.stats.iter() {
            put(CounterKind::Counter, name("shard", item), value);
        }
        for (item, value) in BURST_NAMES.into_iter().zip(self.stats.bursts) {
            put(CounterKind::Counter, name("shard", item), value);
        }
        if let Some(stack) = self.engine.local() {
            self.visit_engine(stack, put);
        }
        let (used, limit, high_water) = self.timers.usage();
        let timers = [used, limit, high_water].map(|count| count as u64);
        visit_pool("timers", timers, put);
        // Last, so that a handler that reports another number of counters than at first affects only its own.
        self.handler.report_counters(&mut |kind, item, value| put(kind, name("", item), value));
    }

    fn visit_engine(&self, stack: &Stack, put: &mut impl FnMut(CounterKind, CounterName<'_>, u64)) {
        let network = stack.network();
        let network_stats = network.stats();
        let groups: [(&str, &mut dyn Iterator<Item = (&'static str, u64)>); 4] = [
            ("tcp", &mut stack.tcp_stats().entries()),
            ("ip", &mut network_stats.entries()),
            ("drop", &mut network.drops().entries()),
            ("udp", &mut stack.udp_stats().entries()),
        ];
        for (group, entries) in groups {
            for (item, value) in entries {
                put(CounterKind::Counter, CounterName { group, instance: "", item }, value);
            }
        }
        for port in self.ports {
            let (tx_frames, tx_bytes) = network.tx_counters(port.id);
            let items = [
                ("rx_frames", port.rx_frames),
                ("rx_bytes", port.rx_bytes),
                ("tx_frames", tx_frames),
                ("tx_bytes", tx_bytes),
            ];
            for (item, value) in items {
                put(CounterKind::Counter, CounterName { group: "device", instance: &port.name, item }, value);
            }
            port.rx.counters(&mut |item, value| {
                put(CounterKind::Counter, CounterName { group: "device", instance: &port.name, item }, value);
            });
        }
        for PoolUsage { name, used, limit, high_water } in stack.pools() {
            visit_pool(name, [used, limit, high_water], put);
        }
    }
}

fn visit_pool(instance: &str, values: [u64; 3], put: &mut impl FnMut(CounterKind, CounterName<'_>, u64)) {
    for (item, value) in ["used", "limit", "high_water"].into_iter().zip(values) {
        put(CounterKind::Gauge, CounterName { group: "pool", instance, item }, value);
    }
}

/// Returns the names of all counters.
pub(crate) fn names<H: Handler>(view: &StatsView<'_, H>) -> Vec<(CounterKind, String)> {
    let mut names = Vec::new();
    view.visit(&mut |kind, CounterName { group, instance, item }, _| {
        let parts = [group, instance, item].into_iter().filter(|part| !part.is_empty());
        names.push((kind, parts.collect::<Vec<_>>().join(".")));
    });
    names
}
