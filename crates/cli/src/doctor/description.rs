//! The facts about a machine and an interface from which all findings follow. They can be written to a file,
//! and read from one that another machine has written.

use super::drivers;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of the format.
pub const VERSION: u32 = 1;
/// Largest file that is read, in bytes.
pub const BYTES_MAX: u64 = 4 << 20;

/// Facts about a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineDescription {
    /// Version of the format.
    pub version: u32,
    /// Release of the kernel.
    pub kernel: String,
    /// The CPUs that are online and that the process may use, or that are isolated.
    pub cpus: Vec<CpuDescription>,
    /// CPUs on which the kernel runs only threads that were pinned there (`isolcpus`).
    #[serde(default)]
    pub isolated: Vec<u32>,
    /// CPUs without a periodic timer interrupt while they run one thread (`nohz_full`).
    #[serde(default)]
    pub nohz_full: Vec<u32>,
    /// The chosen mode of transparent huge pages, if the kernel has them.
    pub transparent_huge_pages: Option<String>,
    /// Process id of irqbalance, if it runs.
    pub irqbalance: Option<u32>,
    /// Hard limit of descriptors of a process.
    pub descriptors_max: u64,
    /// `vm.max_map_count`, if /proc tells it.
    pub mappings_max: Option<u64>,
    /// Limit of locked memory in bytes; `None` if there is none, or if the process may exceed it.
    pub locked_bytes_max: Option<u64>,
    /// `net.core.bpf_jit_enable`, if the kernel has the setting.
    pub bpf_jit: Option<u32>,
    /// Why the program of AF_XDP cannot be loaded; empty if it can.
    pub bpf_error: String,
    /// Why no AF_XDP socket can be opened; empty if one can.
    pub af_xdp_error: String,
    /// First and last ephemeral port of the kernel, if /proc tells them.
    pub local_ports: Option<(u16, u16)>,
    /// The interface, if one was named or has the default route.
    pub interface: Option<InterfaceDescription>,
}

/// Facts about a CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuDescription {
    /// Its number.
    pub number: u32,
    /// The CPUs of its core, itself included.
    pub siblings: Vec<u32>,
    /// Its memory node.
    pub node: u32,
    /// The governor of its frequency, if the kernel controls the frequency.
    pub governor: Option<String>,
}

/// Facts about an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InterfaceDescription {
    /// Its name.
    pub name: String,
    /// Why /sys does not describe the interface; empty if it does.
    pub sysfs_error: String,
    /// True if it is up.
    pub up: bool,
    /// True if it has a carrier.
    pub carrier: bool,
    /// Largest IP packet in bytes.
    pub mtu: usize,
    /// Addresses with prefix lengths.
    pub addresses: Vec<String>,
    /// Gateways of the default routes.
    pub gateways: Vec<String>,
    /// Rate in Mbit/s, if known.
    pub speed_mbits: Option<u64>,
    /// The bridge or bond that the interface is a port of.
    pub master: Option<String>,
    /// The memory node of the device, if known.
    pub node: Option<u32>,
    /// True for a TAP interface.
    pub is_tap: bool,
    /// True for the loopback interface.
    pub is_loopback: bool,
    /// Its driver, if it says.
    pub driver: Option<DriverDescription>,
    /// Numbers of queues, if the driver reports them.
    pub channels: Option<ChannelDescription>,
    /// Interrupt coalescing, if the driver reports it.
    pub coalescing: Option<CoalescingDescription>,
    /// Features by the kernel's names.
    pub features: BTreeMap<String, FeatureDescription>,
    /// Queues by hash, if the driver reports the table.
    pub indirection: Option<Vec<u32>>,
    /// For each receive queue: the CPUs to which it passes frames in software (RPS).
    pub rps: Vec<Vec<u32>>,
    /// For each transmit queue: the CPUs whose packets it sends (XPS), if the kernel says.
    pub xps: Vec<Option<Vec<u32>>>,
    /// Interrupts of the device.
    pub interrupts: Vec<InterruptDescription>,
}

/// A driver.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriverDescription {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Version of the device's firmware, or empty.
    pub firmware: String,
}

/// Numbers of queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChannelDescription {
    /// Largest number of queues that only receive.
    pub rx_max: u32,
    /// Largest number of queues that receive and send.
    pub combined_max: u32,
    /// Queues that only receive.
    pub rx: u32,
    /// Queues that only send.
    pub tx: u32,
    /// Queues that receive and send.
    pub combined: u32,
}

/// Interrupt coalescing of the receiving side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoalescingDescription {
    /// The driver adapts the time to the rate.
    pub adaptive_rx: bool,
    /// Longest time that a frame waits for an interrupt, in microseconds.
    pub rx_usecs: u32,
    /// Frames after which an interrupt is sent.
    pub rx_frames: u32,
}

/// State of a feature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureDescription {
    /// True if it is in use.
    pub on: bool,
    /// True if it cannot be changed.
    pub fixed: bool,
}

/// An interrupt of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InterruptDescription {
    /// Its number.
    pub number: u32,
    /// Its name in /proc/interrupts.
    pub name: String,
    /// The CPUs that may handle it.
    pub cpus: Vec<u32>,
}

impl MachineDescription {
    /// Formats the description as JSON.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Parses a description.
    ///
    /// # Errors
    /// The text is no description of this version.
    pub fn parse(text: &str) -> Result<Self, String> {
        let description: Self = serde_json::from_str(text).map_err(|e| e.to_string())?;
        if description.version != VERSION {
            return Err(format!(
                "has version {}, this program supports version {VERSION}",
                description.version
            ));
        }
        if description.cpus.is_empty() {
            return Err("describes no CPU".into());
        }
        Ok(description)
    }
}

impl InterfaceDescription {
    /// Returns the number of queues that receive.
    pub fn rx_queues(&self) -> u32 {
        match self.channels {
            Some(channels) if channels.rx + channels.combined > 0 => {
                channels.rx.saturating_add(channels.combined)
            }
            _ => (self.rps.len() as u32).max(1),
        }
    }

    /// Returns the largest number of queues that can receive for AF_XDP.
    pub fn rx_queues_max(&self) -> u32 {
        let most = self.channels.map_or(0, |channels| channels.combined_max.max(channels.rx_max));
        let needs_spare = drivers::find(self.driver_name()).is_some_and(|driver| driver.needs_spare_queues);
        if needs_spare { (most / 2).max(1) } else { most.max(self.rx_queues()) }
    }

    /// Returns the name of the driver, or "unknown".
    pub fn driver_name(&self) -> &str {
        self.driver.as_ref().map_or("unknown", |driver| &driver.name)
    }
}

impl InterruptDescription {
    /// Returns the queue that the interrupt belongs to, by its name: `eth0-TxRx-3`, `virtio2-input.3`,
    /// `mlx5_comp3@pci:0000:3b:00.0`. `None` for other interrupts of the device.
    pub fn queue(&self) -> Option<u32> {
        let name = self.name.split('@').next().unwrap_or_default();
        let head = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let number = name[head.len()..].parse().ok()?;
        let lower = head.to_ascii_lowercase();
        let ends = ["txrx-", "tx-rx-", "-rx-", "-tx-", "-input.", "-output.", "_comp"];
        ends.iter().any(|end| lower.ends_with(end)).then_some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_name_their_queues() {
        for (name, queue) in [
            ("eth0-TxRx-3", Some(3)),
            ("ice-ens1f0-TxRx-11", Some(11)),
            ("ens5-Tx-Rx-0", Some(0)),
            ("virtio2-input.7", Some(7)),
            ("virtio2-output.7", Some(7)),
            ("mlx5_comp12@pci:0000:3b:00.0", Some(12)),
            ("mlx5_async0@pci:0000:3b:00.0", None),
            ("ena-mgmnt@pci:0000:00:05.0", None),
            ("virtio2-config", None),
            ("eth0", None),
            ("", None),
            ("eth0-TxRx-99999999999", None),
        ] {
            let interrupt = InterruptDescription { name: name.into(), ..InterruptDescription::default() };
            assert_eq!(interrupt.queue(), queue, "{name}");
        }
    }

    #[test]
    fn descriptions_survive_a_file() {
        let mut machine = MachineDescription { version: VERSION, ..MachineDescription::default() };
        machine.cpus = vec![CpuDescription::default()];
        machine.interface = Some(InterfaceDescription::default());
        assert_eq!(MachineDescription::parse(&machine.to_json()), Ok(machine.clone()));
        let text = machine.to_json();
        for end in 0..text.len() - 2 {
            assert!(MachineDescription::parse(&text[..end]).is_err());
        }
        let other = text.replace("\"version\": 1", "\"version\": 9");
        assert!(MachineDescription::parse(&other).unwrap_err().starts_with("has version 9"));
    }
}
