//! Findings about queues: their number, the frames that reach them, and the CPUs that serve them.

use super::cpu_mask::format_mask;
use super::description::{CoalescingDescription, InterfaceDescription};
use super::examine::{Finding, Level, counted};
use super::plan::ShardPlan;
use super::setting::{Change, DEFAULT_TABLE, Setting, channels_value, coalescing_value};
use ginnel::cpu_list::format_list;
use std::collections::BTreeMap;

/// Longest time that a frame should wait for its interrupt, and the time that `--fix` sets, in microseconds.
const RX_USECS_MAX: u32 = 50;
const RX_USECS: u32 = 20;

/// Returns the findings.
pub fn all(interface: &InterfaceDescription, plan: &ShardPlan) -> Vec<Finding> {
    let mut findings = vec![channels(interface, plan), rss(interface), interrupts(interface, plan)];
    findings.extend([xps(interface, plan), rps(interface), coalescing(interface)]);
    findings
}

fn channels(interface: &InterfaceDescription, plan: &ShardPlan) -> Finding {
    const ITEM: &str = "channels";
    let (queues, shards) = (interface.rx_queues(), plan.count());
    let shown = counted(queues as usize, "queue");
    if shards == 1 && queues > 1 {
        return Finding::new(ITEM, Level::Ok, format!("{shown}, all served by one shard"));
    }
    if queues == shards {
        let text = format!("{shown} for {}", counted(shards as usize, "shard"));
        return Finding::new(ITEM, Level::Ok, text);
    }
    let problem = if queues > shards {
        format!("{shown} for {shards} shards: frames on a queue without a shard do not reach the stack")
    } else {
        format!("{shown} for {shards} shards: each shard needs a queue of its own")
    };
    let Some(channels) = interface.channels.filter(|_| interface.rx_queues_max() >= shards) else {
        let most = interface.rx_queues_max();
        let text = format!("{problem}, and the device has {most} at most: use --shards {most}");
        return Finding::new(ITEM, Level::Todo, text);
    };
    // A driver has either combined queues or separate ones for each direction.
    let to = match channels.combined_max {
        0 => channels_value(shards, shards, 0),
        _ => channels_value(0, 0, shards),
    };
    Finding::fix(ITEM, problem, vec![Change::of(interface, Setting::Channels, to)])
}

fn rss(interface: &InterfaceDescription) -> Finding {
    const ITEM: &str = "rss";
    let queues = interface.rx_queues();
    let Some(table) = &interface.indirection else {
        return match queues {
            1 => Finding::new(ITEM, Level::Ok, "one queue receives all frames"),
            _ => Finding::new(
                ITEM,
                Level::Note,
                format!("the driver does not show how it distributes frames to its {queues} queues"),
            ),
        };
    };
    // Not a vector by queue: the number of queues may be wrong.
    let mut counts = BTreeMap::new();
    let mut beyond = 0;
    for queue in table {
        match *queue < queues {
            true => *counts.entry(*queue).or_insert(0) += 1,
            false => beyond += 1,
        }
    }
    let unused = queues as usize - counts.len();
    let least = if unused > 0 { 0 } else { counts.values().min().copied().unwrap_or(0) };
    let most = counts.values().max().copied().unwrap_or(0);
    let is_short = table.len() < queues as usize;
    if beyond == 0 && most <= least.max(1) * 2 && (least > 0 || is_short) {
        let text = format!("frames are distributed to {} by their hash", counted(queues as usize, "queue"));
        return Finding::new(ITEM, Level::Ok, text);
    }
    let problem = match (beyond, unused) {
        (1.., _) => format!("{beyond} of {} entries of the table name queues that do not exist", table.len()),
        (_, 1..) => format!("{unused} of {queues} queues get no frames, so their shards have no work"),
        _ => format!("a queue gets {most} of {} parts of the frames, another one {least}", table.len()),
    };
    Finding::fix(ITEM, problem, vec![Change::of(interface, Setting::Indirection, DEFAULT_TABLE)])
}

fn interrupts(interface: &InterfaceDescription, plan: &ShardPlan) -> Finding {
    const ITEM: &str = "irq";
    let of_queues = interface.interrupts.iter().filter_map(|interrupt| Some((interrupt, interrupt.queue()?)));
    let of_queues: Vec<_> = of_queues.collect();
    if of_queues.is_empty() {
        let text = match interface.interrupts.len() {
            0 => "the device has no interrupts of its own: the kernel receives on the CPU of the sender, or in threads".to_owned(),
            count => format!("the names of {count} interrupts do not say which queue they serve: place them by hand in /proc/irq"),
        };
        return Finding::new(ITEM, Level::Note, text);
    }
    let mut problem = None;
    let mut changes = Vec::new();
    for (interrupt, queue) in &of_queues {
        let cpu = plan.cpu_of_queue(*queue);
        if interrupt.cpus != [cpu] {
            problem.get_or_insert_with(|| {
                let cpus = format_list(&interrupt.cpus);
                format!("{} is on CPU {cpus}, its shard on CPU {cpu}", interrupt.name)
            });
            let path = format!("/proc/irq/{}/smp_affinity_list", interrupt.number);
            changes.push(Change::of(interface, Setting::File(path), cpu.to_string()));
        }
    }
    match problem {
        None => Finding::new(
            ITEM,
            Level::Ok,
            format!("{} on the CPUs of their shards", counted(of_queues.len(), "interrupt")),
        ),
        Some(example) => {
            let text = format!(
                "{} of {} are not on the CPU of their shard alone, so frames cross between caches: {example}",
                changes.len(),
                counted(of_queues.len(), "interrupt")
            );
            Finding::fix(ITEM, text, changes)
        }
    }
}

fn xps(interface: &InterfaceDescription, plan: &ShardPlan) -> Finding {
    const ITEM: &str = "xps";
    let known: Vec<_> =
        (0..).zip(&interface.xps).filter_map(|(queue, cpus)| Some((queue, cpus.as_ref()?))).collect();
    if known.len() < 2 || plan.count() < 2 {
        let text = "one queue or one shard: the kernel's packets and those of the stack need no separation";
        return Finding::new(ITEM, Level::Ok, text);
    }
    // CPUs without a shard need no queue: the kernel distributes their packets by hash.
    let wrong: Vec<_> = known
        .iter()
        .filter(|(queue, cpus)| *queue < plan.count() && **cpus != [plan.cpu_of_queue(*queue)])
        .collect();
    let Some((queue, cpus)) = wrong.first() else {
        return Finding::new(ITEM, Level::Ok, "each shard's CPU sends on the shard's own queue");
    };
    let change = |queue: u32| {
        let path = format!("/sys/class/net/{}/queues/tx-{queue}/xps_cpus", interface.name);
        Change::of(interface, Setting::Mask(path), format_mask(&[plan.cpu_of_queue(queue)]))
    };
    let now = if cpus.is_empty() { "no CPU".into() } else { format!("CPU {}", format_list(cpus)) };
    let text = format!(
        "tx-{queue} sends for {now}, its shard runs on CPU {}: other CPUs contend for the queue's lock",
        plan.cpu_of_queue(*queue)
    );
    Finding::fix(ITEM, text, wrong.iter().map(|(queue, _)| change(*queue)).collect())
}

fn rps(interface: &InterfaceDescription) -> Finding {
    const ITEM: &str = "rps";
    let on: Vec<(usize, &Vec<u32>)> =
        interface.rps.iter().enumerate().filter(|(_, cpus)| !cpus.is_empty()).collect();
    let Some((queue, cpus)) = on.first() else {
        return Finding::new(ITEM, Level::Ok, "off: frames stay on the CPU of their queue");
    };
    let text = format!(
        "rx-{queue} passes frames in software to CPU {}: that interrupts shards, which have queues of their own",
        format_list(cpus)
    );
    let change = |(queue, _): &(usize, &Vec<u32>)| {
        let path = format!("/sys/class/net/{}/queues/rx-{queue}/rps_cpus", interface.name);
        Change::of(interface, Setting::Mask(path), format_mask(&[]))
    };
    Finding::fix(ITEM, text, on.iter().map(change).collect())
}

fn coalescing(interface: &InterfaceDescription) -> Finding {
    const ITEM: &str = "coalescing";
    let Some(CoalescingDescription { adaptive_rx, rx_usecs, rx_frames }) = interface.coalescing else {
        return Finding::new(ITEM, Level::Ok, "the driver has none, so no frame waits for its interrupt");
    };
    if adaptive_rx {
        return Finding::new(ITEM, Level::Ok, "the driver adapts the interrupts to the rate");
    }
    if rx_usecs > RX_USECS_MAX {
        let text = format!("a frame waits up to {rx_usecs} us for its interrupt, and so does each request");
        let to =
            coalescing_value(CoalescingDescription { adaptive_rx: false, rx_usecs: RX_USECS, rx_frames });
        return Finding::fix(ITEM, text, vec![Change::of(interface, Setting::Coalescing, to)]);
    }
    let text = match (rx_usecs, rx_frames) {
        (0, 0 | 1) => "an interrupt for each frame: the shortest latency, and the most CPU time".to_owned(),
        (0, frames) => format!("an interrupt for {frames} frames"),
        _ => format!("a frame waits up to {rx_usecs} us for its interrupt"),
    };
    Finding::new(ITEM, Level::Ok, text)
}
