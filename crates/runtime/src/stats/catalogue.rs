//! Everything that a shard counts, in one order and with one name each.

use super::page::Kind;
use super::{BURST_BUCKETS, ShardStats};
use crate::engine::Engine;
use crate::handler::Handler;
use crate::shard::Port;
use crate::timers::Timers;
use ginnel_stack::stack::{Pool, Stack};

/// What the counters are taken from.
pub(crate) struct View<'a, H> {
    pub(crate) stats: &'a ShardStats,
    pub(crate) engine: &'a Engine,
    pub(crate) ports: &'a [Port],
    pub(crate) timers: &'a Timers,
    pub(crate) handler: &'a H,
}

/// A name, in parts, for most are never put together: `device.tap0.rx_frames`.
#[derive(Clone, Copy)]
pub(crate) struct Name<'a> {
    group: &'a str,
    of: &'a str,
    item: &'a str,
}

const BURSTS: [&str; BURST_BUCKETS] =
    ["bursts_1", "bursts_2", "bursts_4", "bursts_8", "bursts_16", "bursts_32", "bursts_64"];

impl<H: Handler> View<'_, H> {
    /// Shows each value with its name, always the same in the same order.
    pub(crate) fn visit(&self, put: &mut impl FnMut(Kind, Name<'_>, u64)) {
        let name = |group, item| Name { group, of: "", item };
        for (item, value) in self.stats.iter() {
            put(Kind::Counter, name("shard", item), value);
        }
        for (item, value) in BURSTS.into_iter().zip(self.stats.bursts) {
            put(Kind::Counter, name("shard", item), value);
        }
        if let Some(stack) = self.engine.here() {
            self.visit_engine(stack, put);
        }
        let (used, limit, high_water) = self.timers.usage();
        let timers = [used, limit, high_water].map(|count| count as u64);
        visit_pool("timers", timers, put);
        // Last, so that a handler that reports more or fewer than it did at first spoils nothing but its own.
        self.handler.counters(&mut |kind, item, value| put(kind, name("", item), value));
    }

    fn visit_engine(&self, stack: &Stack, put: &mut impl FnMut(Kind, Name<'_>, u64)) {
        let network = stack.network();
        let groups: [(&str, &mut dyn Iterator<Item = (&'static str, u64)>); 4] = [
            ("tcp", &mut stack.tcp_stats().entries()),
            ("ip", &mut network.stats().entries()),
            ("drop", &mut network.drops().entries()),
            ("udp", &mut stack.udp_stats().entries()),
        ];
        for (group, entries) in groups {
            for (item, value) in entries {
                put(Kind::Counter, Name { group, of: "", item }, value);
            }
        }
        for port in self.ports {
            let (tx_frames, tx_bytes) = network.sent(port.id);
            let items = [
                ("rx_frames", port.rx_frames),
                ("rx_bytes", port.rx_bytes),
                ("tx_frames", tx_frames),
                ("tx_bytes", tx_bytes),
            ];
            for (item, value) in items {
                put(Kind::Counter, Name { group: "device", of: &port.name, item }, value);
            }
            port.rx.counters(&mut |item, value| {
                put(Kind::Counter, Name { group: "device", of: &port.name, item }, value);
            });
        }
        for Pool { name, used, limit, high_water } in stack.pools() {
            visit_pool(name, [used, limit, high_water], put);
        }
    }
}

fn visit_pool(of: &str, values: [u64; 3], put: &mut impl FnMut(Kind, Name<'_>, u64)) {
    for (item, value) in ["used", "limit", "high_water"].into_iter().zip(values) {
        put(Kind::Gauge, Name { group: "pool", of, item }, value);
    }
}

/// The names of all values.
pub(crate) fn names<H: Handler>(view: &View<'_, H>) -> Vec<(Kind, String)> {
    let mut names = Vec::new();
    view.visit(&mut |kind, Name { group, of, item }, _| {
        let parts = [group, of, item].into_iter().filter(|part| !part.is_empty());
        names.push((kind, parts.collect::<Vec<_>>().join(".")));
    });
    names
}
