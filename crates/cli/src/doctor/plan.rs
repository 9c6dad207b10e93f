//! Which CPUs the shards of a stack get on a machine.

use super::description::{CpuDescription, MachineDescription};
use ginnel_stack::steering::SHARDS_MAX;

/// The CPUs of the shards, one for each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardPlan {
    pub cpus: Vec<u32>,
}

impl ShardPlan {
    /// Chooses CPUs for `wanted` shards, isolated ones first. Without a number, all isolated cores of the
    /// interface's memory node get a shard, or if there are none, half of the cores, at most one for each
    /// queue; the programs run on the others.
    ///
    /// # Errors
    /// More shards are wanted than there are CPUs, or than a stack can have.
    pub fn new(machine: &MachineDescription, wanted: Option<u32>) -> Result<Self, String> {
        let interface = machine.interface.as_ref();
        let cores = cores(machine, interface.and_then(|interface| interface.node));
        let queues = interface.map_or(u32::from(SHARDS_MAX), |interface| match interface.is_tap {
            true => u32::from(SHARDS_MAX),
            false => interface.rx_queues_max(),
        });
        let firsts = cores.iter().map(|core| core[0]);
        let (isolated, others): (Vec<u32>, Vec<u32>) = firsts.partition(|cpu| machine.isolated.contains(cpu));
        let usual = if isolated.is_empty() { cores.len() / 2 } else { isolated.len() };
        let count = match wanted {
            Some(count) => count,
            None => (usual as u32).min(queues).min(SHARDS_MAX.into()).max(1),
        };
        if !(1..=u32::from(SHARDS_MAX)).contains(&count) {
            return Err(format!("{count} shards are not 1 to {SHARDS_MAX}"));
        }
        // If there are more cores than shards, the first core, on which the kernel's own work begins, gets no
        // shard. Siblings come last.
        let spare = usize::from(cores.len() > count as usize).min(others.len());
        let (kept, used) = others.split_at(spare);
        let siblings = cores.iter().flat_map(|core| &core[1..]);
        let mut cpus: Vec<u32> = isolated.iter().chain(used).chain(kept).chain(siblings).copied().collect();
        if cpus.len() < count as usize {
            return Err(format!("{count} shards need {count} CPUs, and {} can be used", cpus.len()));
        }
        cpus.truncate(count as usize);
        Ok(Self { cpus })
    }

    /// Returns the number of shards.
    pub fn count(&self) -> u32 {
        self.cpus.len() as u32
    }

    /// Returns the CPU of the shard that serves a queue.
    pub fn cpu_of_queue(&self, queue: u32) -> u32 {
        self.cpus[queue as usize % self.cpus.len()]
    }
}

/// Returns the CPUs of each core of `node`, or of each core of the machine if the node has none or is `None`.
fn cores(machine: &MachineDescription, node: Option<u32>) -> Vec<Vec<u32>> {
    let mut cores: Vec<Vec<u32>> = Vec::new();
    let is_near = |cpu: &&CpuDescription| node.is_none_or(|node| cpu.node == node);
    let has_near = machine.cpus.iter().any(|cpu| is_near(&cpu));
    for cpu in machine.cpus.iter().filter(|cpu| is_near(cpu) || !has_near) {
        let core = cores.iter_mut().find(|core| core.iter().any(|other| cpu.siblings.contains(other)));
        match core {
            Some(core) => core.push(cpu.number),
            None => cores.push(vec![cpu.number]),
        }
    }
    cores
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::description::InterfaceDescription;

    /// Returns a machine with `cores` cores of two CPUs each, numbered as on most servers.
    fn machine(cores: u32, nodes: u32) -> MachineDescription {
        let cpu = |number: u32| CpuDescription {
            number,
            siblings: vec![number % cores, number % cores + cores],
            node: number % nodes,
            governor: None,
        };
        MachineDescription { cpus: (0..2 * cores).map(cpu).collect(), ..MachineDescription::default() }
    }

    fn plan(machine: &MachineDescription, wanted: Option<u32>) -> Vec<u32> {
        ShardPlan::new(machine, wanted).unwrap().cpus
    }

    #[test]
    fn shards_get_cores_before_siblings() {
        assert_eq!(plan(&machine(8, 1), None), [1, 2, 3, 4]);
        assert_eq!(plan(&machine(8, 1), Some(8)), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(plan(&machine(2, 1), Some(3)), [0, 1, 2]);
        assert_eq!(plan(&machine(1, 1), None), [0]);
        assert!(ShardPlan::new(&machine(2, 1), Some(5)).unwrap_err().contains("4 can be used"));
        assert!(ShardPlan::new(&machine(2, 1), Some(0)).is_err());
    }

    #[test]
    fn shards_get_isolated_cpus() {
        let isolated = |isolated: Vec<u32>| MachineDescription { isolated, ..machine(8, 1) };
        assert_eq!(plan(&isolated(vec![5, 6, 7, 13, 14, 15]), None), [5, 6, 7]);
        assert_eq!(plan(&isolated(vec![5, 6, 7]), Some(2)), [5, 6]);
        assert_eq!(plan(&isolated(vec![5, 6]), Some(4)), [5, 6, 1, 2]);
        assert_eq!(plan(&isolated((0..16).collect()), None), [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn shards_are_near_the_device() {
        let interface = InterfaceDescription { node: Some(1), rps: vec![vec![]; 3], ..Default::default() };
        let near = MachineDescription { interface: Some(interface), ..machine(8, 2) };
        assert_eq!(plan(&near, None), [3, 5]);
        let mut far = near.clone();
        far.interface.as_mut().unwrap().node = Some(9);
        assert_eq!(plan(&far, None), [1, 2, 3], "as many as it has queues");
    }
}
