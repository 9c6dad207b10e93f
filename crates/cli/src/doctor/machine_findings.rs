//! Findings about the machine: CPUs, memory and limits.

use super::description::MachineDescription;
use super::examine::{Finding, Level, counted};
use super::plan::ShardPlan;
use super::setting::{Change, Setting};
use crate::start_entries::machine_limits;
use ginnel::config::ChannelConfig;
use ginnel::cpu_list::format_list;

/// Locked memory of an AF_XDP queue with rings of the default size, in bytes.
const QUEUE_LOCKED_BYTES: u64 = 16 << 20;
/// Mode of transparent huge pages that gives them to programs that ask, as Ginnel does.
const HUGE_PAGES: &str = "madvise";

/// Returns the findings.
pub fn all(machine: &MachineDescription, plan: &ShardPlan) -> Vec<Finding> {
    let mut findings = vec![cpus(machine, plan), smt(machine, plan), isolation(machine, plan)];
    findings.extend([governor(machine), irqbalance(machine), jit(machine), huge_pages(machine)]);
    findings.extend(limits(machine, plan));
    findings
}

fn cpus(machine: &MachineDescription, plan: &ShardPlan) -> Finding {
    let (shards, cpus) = (counted(plan.cpus.len(), "shard"), format_list(&plan.cpus));
    let rest: Vec<u32> =
        machine.cpus.iter().map(|cpu| cpu.number).filter(|cpu| !plan.cpus.contains(cpu)).collect();
    let rest = match &rest[..] {
        [] => "none is left for programs".to_owned(),
        rest => format!("CPU {} for programs and the kernel", format_list(rest)),
    };
    let node = machine.interface.as_ref().and_then(|interface| interface.node);
    let is_far = |number: &u32| {
        machine.cpus.iter().any(|cpu| cpu.number == *number && node.is_some_and(|node| cpu.node != node))
    };
    let text = format!("{shards} on CPU {cpus}, {rest}");
    match plan.cpus.iter().any(is_far) {
        true => Finding::new(
            "cpus",
            Level::Note,
            format!(
                "{text}; some are on another memory node than the device, which makes each access slower"
            ),
        ),
        false => Finding::new("cpus", Level::Ok, text),
    }
}

fn smt(machine: &MachineDescription, plan: &ShardPlan) -> Finding {
    let siblings = machine.cpus.iter().filter(|cpu| plan.cpus.contains(&cpu.number));
    let siblings: Vec<u32> = siblings
        .flat_map(|cpu| cpu.siblings.iter().copied().filter(move |sibling| *sibling != cpu.number))
        .collect();
    if siblings.is_empty() {
        return Finding::new("smt", Level::Ok, "no shard shares its core with another CPU");
    }
    let shared: Vec<u32> = siblings.iter().copied().filter(|cpu| plan.cpus.contains(cpu)).collect();
    if !shared.is_empty() {
        let text = format!(
            "shards on CPU {} share cores, which makes both slower: fewer shards may do the work",
            format_list(&shared)
        );
        return Finding::new("smt", Level::Note, text);
    }
    Finding::new(
        "smt",
        Level::Note,
        format!(
            "CPU {} share cores with shards: a busy program there takes up to half of a shard's speed",
            format_list(&siblings)
        ),
    )
}

fn isolation(machine: &MachineDescription, plan: &ShardPlan) -> Finding {
    const ITEM: &str = "isolation";
    if machine.isolated.is_empty() {
        let text = "no CPU is isolated (isolcpus=): the kernel may run programs on the shards' CPUs";
        return Finding::new(ITEM, Level::Ok, text);
    }
    let outside =
        |cpus: &[u32]| -> Vec<u32> { plan.cpus.iter().copied().filter(|cpu| !cpus.contains(cpu)).collect() };
    let (shared, interrupted) = (outside(&machine.isolated), outside(&machine.nohz_full));
    let isolated = format_list(&machine.isolated);
    if !shared.is_empty() {
        let shared = format_list(&shared);
        let text = format!(
            "CPU {isolated} are isolated, CPU {shared} with shards are not: other programs run there"
        );
        return Finding::new(ITEM, Level::Note, text);
    }
    if !interrupted.is_empty() {
        let text = format!(
            "only shards run on CPU {}; nohz_full={isolated} on the kernel's command line keeps timer interrupts away, too",
            format_list(&plan.cpus)
        );
        return Finding::new(ITEM, Level::Note, text);
    }
    let text = format!("only shards run on CPU {}, without timer interrupts", format_list(&plan.cpus));
    Finding::new(ITEM, Level::Ok, text)
}

fn governor(machine: &MachineDescription) -> Finding {
    const ITEM: &str = "governor";
    const WANTED: &str = "performance";
    let known = machine.cpus.iter().filter_map(|cpu| Some((cpu.number, cpu.governor.as_deref()?)));
    let known: Vec<(u32, &str)> = known.collect();
    let slow: Vec<(u32, &str)> = known.iter().copied().filter(|(_, governor)| *governor != WANTED).collect();
    let Some((_, governor)) = slow.first() else {
        return match known.len() {
            0 => Finding::new(
                ITEM,
                Level::Ok,
                "the kernel does not control the CPUs' frequency (as in most virtual machines)",
            ),
            _ => Finding::new(
                ITEM,
                Level::Ok,
                "performance: the CPUs keep their frequency when a shard sleeps",
            ),
        };
    };
    let cpus: Vec<u32> = slow.iter().map(|(cpu, _)| *cpu).collect();
    let text = format!(
        "{governor} on CPU {}: a CPU that has slept starts slowly, which delays the first requests",
        format_list(&cpus)
    );
    let change = |cpu: &u32| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor");
        Change::of_machine(Setting::File(path), WANTED)
    };
    Finding::fix(ITEM, text, cpus.iter().map(change).collect())
}

fn irqbalance(machine: &MachineDescription) -> Finding {
    match machine.irqbalance {
        None => Finding::new("irqbalance", Level::Ok, "does not run, so interrupts stay where they are put"),
        Some(pid) => Finding::new(
            "irqbalance",
            Level::Todo,
            format!(
                "runs (process {pid}), and moves interrupts away from their shards: systemctl disable --now irqbalance"
            ),
        ),
    }
}

fn jit(machine: &MachineDescription) -> Finding {
    match machine.bpf_jit {
        Some(0) => Finding::fix(
            "bpf_jit",
            "the kernel interprets BPF programs, which costs time for each frame",
            vec![Change::of_machine(Setting::File("/proc/sys/net/core/bpf_jit_enable".into()), "1")],
        ),
        Some(_) => Finding::new("bpf_jit", Level::Ok, "the kernel compiles BPF programs"),
        None => {
            Finding::new("bpf_jit", Level::Note, "the kernel does not say whether it compiles BPF programs")
        }
    }
}

fn huge_pages(machine: &MachineDescription) -> Finding {
    const ITEM: &str = "hugepages";
    match machine.transparent_huge_pages.as_deref() {
        Some("never") => Finding::fix(
            ITEM,
            "large tables get no huge pages, which makes millions of connections slower",
            vec![Change::of_machine(
                Setting::Choice("/sys/kernel/mm/transparent_hugepage/enabled".into()),
                HUGE_PAGES,
            )],
        ),
        Some(mode) => Finding::new(ITEM, Level::Ok, format!("{mode}: large tables get huge pages")),
        None => Finding::new(ITEM, Level::Note, "the kernel has no transparent huge pages"),
    }
}

fn limits(machine: &MachineDescription, plan: &ShardPlan) -> Vec<Finding> {
    const ITEM: &str = "limits";
    let clients_max = ChannelConfig::default().clients_max as u64;
    let shards = u64::from(plan.count());
    let mut findings: Vec<Finding> = machine_limits(
        clients_max,
        shards,
        machine.descriptors_max,
        machine.mappings_max.unwrap_or(u64::MAX),
    )
    .into_iter()
    .map(|text| Finding::new(ITEM, Level::Todo, text))
    .collect();
    let uses_af_xdp =
        machine.interface.as_ref().is_some_and(|interface| !interface.is_tap && !interface.is_loopback);
    if let Some(bytes) =
        machine.locked_bytes_max.filter(|bytes| uses_af_xdp && *bytes < shards * QUEUE_LOCKED_BYTES)
    {
        let text = format!(
            "locked memory is limited to {} KiB for the user of this command, and AF_XDP needs up to {} MiB for each queue: LimitMEMLOCK=infinity, or ulimit -l unlimited",
            bytes >> 10,
            QUEUE_LOCKED_BYTES >> 20
        );
        findings.push(Finding::new(ITEM, Level::Todo, text));
    }
    if machine.mappings_max.is_none() {
        let text = "unknown whether the mappings suffice: /proc/sys/vm/max_map_count cannot be read";
        findings.push(Finding::new(ITEM, Level::Note, text));
    }
    if findings.is_empty() {
        // The limit of locked memory is that of this command. The stack may run as another user.
        let locked = match machine.locked_bytes_max {
            _ if !uses_af_xdp => "",
            None => {
                "; locked memory has no limit here: a stack of another user without CAP_IPC_LOCK needs LimitMEMLOCK=infinity"
            }
            Some(_) => {
                "; locked memory suffices here: a stack of another user without CAP_IPC_LOCK needs LimitMEMLOCK=infinity"
            }
        };
        let text = format!("descriptors and mappings suffice for {clients_max} processes on a stack{locked}");
        findings.push(Finding::new(ITEM, Level::Ok, text));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn isolation_of(isolated: &[u32], nohz_full: &[u32]) -> (Level, String) {
        let (isolated, nohz_full) = (isolated.to_vec(), nohz_full.to_vec());
        let machine = MachineDescription { isolated, nohz_full, ..MachineDescription::default() };
        let finding = isolation(&machine, &ShardPlan { cpus: vec![2, 3] });
        (finding.level, finding.text)
    }

    #[test]
    fn unknown_limit_is_not_taken_for_none() {
        let plan = ShardPlan { cpus: vec![0] };
        let of = |mappings_max| {
            let machine = MachineDescription { mappings_max, descriptors_max: 1 << 20, ..Default::default() };
            let findings = limits(&machine, &plan);
            findings.iter().map(|finding| finding.level).collect::<Vec<_>>()
        };
        assert_eq!(of(Some(65_530)), [Level::Ok]);
        assert_eq!(of(None), [Level::Note]);
    }

    #[test]
    fn cpus_of_shards_should_be_isolated() {
        assert_eq!(isolation_of(&[], &[]).0, Level::Ok);
        let (level, text) = isolation_of(&[3, 4], &[3, 4]);
        assert_eq!(level, Level::Note);
        assert!(text.starts_with("CPU 3-4 are isolated, CPU 2 with shards are not"), "{text}");
        let (level, text) = isolation_of(&[2, 3, 4], &[2]);
        assert_eq!(level, Level::Note);
        assert!(text.contains("CPU 2-3; nohz_full=2-4 on"), "{text}");
        assert_eq!(isolation_of(&[2, 3], &[2, 3]).0, Level::Ok);
    }
}
