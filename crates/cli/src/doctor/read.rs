//! Reads the description of this machine.

use super::cpu_mask::parse_mask;
use super::description::{
    ChannelDescription, CoalescingDescription, CpuDescription, DriverDescription, FeatureDescription,
    InterfaceDescription, InterruptDescription, MachineDescription, VERSION,
};
use super::setting::chosen;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use ginnel::cpu_list::{self, parse_list};
use ginnel_devices::interface::InterfaceInfo;
use ginnel_devices::resource_limit::resource_limit;
use ginnel_devices::{af_xdp, ethtool, interface};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::process::Resource;
use rustix::thread::{CpuSet, sched_getaffinity};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The capability that exempts from the limit of locked memory (capabilities(7)).
const CAP_IPC_LOCK: u32 = 14;
/// Flags in /proc/net/route and /proc/net/ipv6_route: the route is up, and has a gateway.
const RTF_UP_GATEWAY: u32 = 3;

fn text(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn number<T: std::str::FromStr>(path: impl AsRef<Path>) -> Option<T> {
    text(path)?.parse().ok()
}

/// Reads the description of this machine and of the interface `name`, or of the one with the default route.
///
/// # Errors
/// There is no such interface, or it cannot be read.
pub fn machine(name: Option<&str>) -> Result<MachineDescription, String> {
    let routes = default_routes();
    let name = name.or_else(|| routes.first().map(|(interface, _)| interface.as_str()));
    let interface = name.map(|name| describe_interface(name, &routes)).transpose()?;
    let uses_af_xdp = interface.as_ref().is_some_and(|interface| !interface.is_tap && !interface.is_loopback);
    let error = |result: Result<(), String>| {
        if uses_af_xdp { result.err().unwrap_or_default() } else { String::new() }
    };
    let program = || af_xdp::check_program().map_err(|e| e.to_string());
    let socket = || {
        let opened = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None);
        opened.map(drop).map_err(|e| {
            format!("{} (CAP_NET_RAW, and CONFIG_XDP_SOCKETS of the kernel)", io::Error::from(e))
        })
    };
    let mut ports = text("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    ports = ports.split_whitespace().collect::<Vec<_>>().join(" ");
    let ports =
        ports.split_once(' ').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
    Ok(MachineDescription {
        version: VERSION,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        cpus: cpus(),
        isolated: cpu_list::isolated(),
        nohz_full: cpu_list::nohz_full(),
        transparent_huge_pages: text("/sys/kernel/mm/transparent_hugepage/enabled")
            .and_then(|modes| chosen(&modes).map(ToOwned::to_owned)),
        irqbalance: process_named("irqbalance"),
        descriptors_max: resource_limit(Resource::Nofile).maximum.unwrap_or(u64::MAX),
        mappings_max: number("/proc/sys/vm/max_map_count"),
        locked_bytes_max: if has_capability(CAP_IPC_LOCK) {
            None
        } else {
            resource_limit(Resource::Memlock).current
        },
        bpf_jit: number("/proc/sys/net/core/bpf_jit_enable"),
        bpf_error: error(if uses_af_xdp { program() } else { Ok(()) }),
        af_xdp_error: error(if uses_af_xdp { socket() } else { Ok(()) }),
        local_ports: ports,
        interface,
    })
}

/// Returns the online CPUs that this process may use, and the isolated ones, which the kernel leaves out of
/// the affinity mask.
fn cpus() -> Vec<CpuDescription> {
    let allowed = sched_getaffinity(None).ok();
    let isolated = cpu_list::isolated();
    let online = text("/sys/devices/system/cpu/online").and_then(|list| parse_list(&list));
    let online = online.unwrap_or_else(|| (0..CpuSet::MAX_CPU as u32).collect());
    let may_use = |cpu: &u32| {
        isolated.contains(cpu)
            || allowed
                .as_ref()
                .is_none_or(|set| (*cpu as usize) < CpuSet::MAX_CPU && set.is_set(*cpu as usize))
    };
    online.into_iter().filter(may_use).map(describe_cpu).collect()
}

fn describe_cpu(number: u32) -> CpuDescription {
    let folder = PathBuf::from(format!("/sys/devices/system/cpu/cpu{number}"));
    let siblings = text(folder.join("topology/thread_siblings_list")).and_then(|list| parse_list(&list));
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
    let node =
        entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()).next();
    CpuDescription {
        number,
        siblings: siblings.unwrap_or_else(|| vec![number]),
        node: node.unwrap_or(0),
        governor: text(folder.join("cpufreq/scaling_governor")),
    }
}

fn process_named(name: &str) -> Option<u32> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| text(format!("/proc/{pid}/comm")).as_deref() == Some(name))
}

fn has_capability(bit: u32) -> bool {
    let status = text("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> bit & 1 == 1)
}

/// Returns the interface and the gateway of each default route that has a gateway.
fn default_routes() -> Vec<(String, IpAddr)> {
    let mut routes = Vec::new();
    for line in text("/proc/net/route").unwrap_or_default().lines().skip(1) {
        routes.extend(parse_route(line));
    }
    for line in text("/proc/net/ipv6_route").unwrap_or_default().lines() {
        routes.extend(parse_route_v6(line));
    }
    routes
}

/// Parses a line of /proc/net/route: interface, destination, gateway, flags, …
fn parse_route(line: &str) -> Option<(String, IpAddr)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let address = |at: usize| u32::from_str_radix(fields.get(at)?, 16).ok();
    let flags = u32::from_str_radix(fields.get(3)?, 16).ok()?;
    let mask = address(7)?;
    // The numbers are in the byte order of the machine.
    let gateway = Ipv4Addr::from(address(2)?.to_ne_bytes());
    let is_default = address(1)? == 0 && mask == 0 && flags & RTF_UP_GATEWAY == RTF_UP_GATEWAY;
    is_default.then(|| (fields[0].to_owned(), gateway.into()))
}

/// Parses a line of /proc/net/ipv6_route: destination, its length, source, its length, next hop, metric,
/// references, uses, flags, interface.
fn parse_route_v6(line: &str) -> Option<(String, IpAddr)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [destination, length, _, _, hop, _, _, _, flags, interface] = fields[..] else { return None };
    let flags = u32::from_str_radix(flags, 16).ok()?;
    let is_default = u128::from_str_radix(destination, 16) == Ok(0) && length == "00";
    let gateway = Ipv6Addr::from(u128::from_str_radix(hop, 16).ok()?);
    (is_default && flags & RTF_UP_GATEWAY == RTF_UP_GATEWAY).then(|| (interface.to_owned(), gateway.into()))
}

/// Returns whether `/sys/class/net` describes this interface: after `nsenter --net` it is that of another
/// network namespace, whose interface of the same name may have the same index.
pub(super) fn is_own_sysfs(name: &str, info: &InterfaceInfo) -> bool {
    describes(&PathBuf::from("/sys/class/net").join(name), info)
}

/// Returns whether the folder of an interface in `sysfs` is that of this interface.
fn describes(folder: &Path, info: &InterfaceInfo) -> bool {
    let mac = info.mac.map(|byte| format!("{byte:02x}")).join(":");
    // A TUN interface has no address.
    let has_address = |address: String| address == mac || info.mac == [0; 6] && address.is_empty();
    number(folder.join("ifindex")) == Some(info.index)
        && text(folder.join("address")).is_some_and(has_address)
}

fn describe_interface(name: &str, routes: &[(String, IpAddr)]) -> Result<InterfaceDescription, String> {
    let info = interface::read(name).map_err(|e| match e.raw_os_error() {
        Some(errno) if errno == rustix::io::Errno::NODEV.raw_os_error() => {
            format!("there is no interface {name:?} in this network namespace (\"ip link\" lists them)")
        }
        _ => format!("interface {name:?}: {e}"),
    })?;
    let folder = PathBuf::from("/sys/class/net").join(name);
    let is_described = is_own_sysfs(name, &info);
    let mut described = InterfaceDescription {
        name: name.into(),
        up: info.up,
        carrier: true,
        mtu: info.mtu,
        addresses: info.addresses.iter().map(|(address, prefix)| format!("{address}/{prefix}")).collect(),
        gateways: routes
            .iter()
            .filter(|(on, _)| on == name)
            .map(|(_, gateway)| gateway.to_string())
            .collect(),
        is_loopback: name == "lo",
        ..InterfaceDescription::default()
    };
    read_driver(&mut described);
    if is_described {
        read_sysfs(&mut described, &folder);
    } else {
        described.sysfs_error = format!(
            "/sys belongs to another network namespace, so queues and interrupts of {name} are not known: mount a sysfs in this one, as \"ip netns exec\" does"
        );
    }
    Ok(described)
}

/// Reads what the driver says. What it does not support is left out.
fn read_driver(described: &mut InterfaceDescription) {
    let name = &described.name;
    let driver = ethtool::driver_info(name).ok().flatten();
    described.driver = driver.map(|driver| DriverDescription {
        name: driver.name,
        version: driver.version,
        firmware: driver.firmware,
    });
    let channels = ethtool::channels(name).ok().flatten();
    described.channels = channels.map(|channels| ChannelDescription {
        rx_max: channels.rx_max,
        combined_max: channels.combined_max,
        rx: channels.rx,
        tx: channels.tx,
        combined: channels.combined,
    });
    let coalescing = ethtool::coalescing(name).ok().flatten();
    described.coalescing = coalescing.map(|coalescing| CoalescingDescription {
        adaptive_rx: coalescing.adaptive_rx,
        rx_usecs: coalescing.rx_usecs,
        rx_frames: coalescing.rx_frames,
    });
    let features = ethtool::features(name).unwrap_or_default();
    // The findings are about receiving; the rest would make a recording long.
    let features = features.into_iter().filter(|feature| feature.name.starts_with("rx-"));
    described.features = features
        .map(|feature| (feature.name, FeatureDescription { on: feature.on, fixed: feature.fixed }))
        .collect();
    described.indirection = ethtool::indirection(name).ok().flatten();
}

fn read_sysfs(described: &mut InterfaceDescription, folder: &Path) {
    described.is_tap = folder.join("tun_flags").exists();
    described.carrier = text(folder.join("carrier")).as_deref() != Some("0");
    described.speed_mbits = number(folder.join("speed"));
    described.master =
        fs::read_link(folder.join("master")).ok().and_then(|to| Some(to.file_name()?.to_str()?.to_owned()));
    described.node = number(folder.join("device/numa_node"));
    let queue = |kind: &str, number: usize, file: &str| folder.join(format!("queues/{kind}-{number}/{file}"));
    for number in 0.. {
        let path = queue("rx", number, "rps_cpus");
        if !path.exists() {
            break;
        }
        described.rps.push(text(path).and_then(|mask| parse_mask(&mask)).unwrap_or_default());
    }
    for number in 0.. {
        let path = queue("tx", number, "xps_cpus");
        if !path.exists() {
            break;
        }
        described.xps.push(text(path).and_then(|mask| parse_mask(&mask)));
    }
    described.interrupts = interrupts(folder);
}

/// Returns the interrupts of the device of an interface. A virtio device has none itself: they are those of
/// its parent, a PCI device.
fn interrupts(folder: &Path) -> Vec<InterruptDescription> {
    let names = text("/proc/interrupts").unwrap_or_default();
    let name_of = |number: u32| {
        let mut lines = names.lines().filter_map(|line| line.trim().split_once(':'));
        lines.find(|(irq, _)| irq.parse() == Ok(number))?.1.split_whitespace().last()
    };
    let folders = ["device/msi_irqs", "device/../msi_irqs"].map(|inside| folder.join(inside));
    let entries = folders.iter().find_map(|folder| fs::read_dir(folder).ok());
    let numbers = entries.into_iter().flatten().flatten();
    let mut numbers: Vec<u32> =
        numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    let describe = |number: u32| {
        let cpus = text(format!("/proc/irq/{number}/smp_affinity_list")).and_then(|list| parse_list(&list));
        Some(InterruptDescription { number, name: name_of(number)?.to_owned(), cpus: cpus? })
    };
    numbers.into_iter().filter_map(describe).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_routes_are_parsed() {
        let line = "eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0";
        let gateway = Ipv4Addr::from(0x0100_000a_u32.to_ne_bytes());
        assert_eq!(parse_route(line), Some(("eth0".into(), gateway.into())));
        for other in
            [line.replace("0003", "0001"), line.replace("\t00000000\t0\t", "\t00FFFFFF\t0\t"), String::new()]
        {
            assert_eq!(parse_route(&other), None, "{other}");
        }
        let zero = "0".repeat(32);
        let v6 = format!("{zero} 00 {zero} 00 fe80000000000000000000000000002a 00000400 1 0 00000003 eth1");
        assert_eq!(parse_route_v6(&v6), Some(("eth1".into(), "fe80::2a".parse().unwrap())));
        assert_eq!(parse_route_v6(&v6.replace(" 00 fe", " 40 fe").replace("00000003", "00000001")), None);
    }

    /// Another namespace's interface may have the same name and index.
    #[test]
    fn a_foreign_sysfs_is_recognized() {
        let folder = tempfile::tempdir().unwrap();
        let mac = [2, 0, 0xab, 0, 0, 1];
        let info = InterfaceInfo { index: 2, up: true, mtu: 1500, mac, addresses: Vec::new() };
        for (index, address, expected) in [
            ("2", "02:00:ab:00:00:01", true),
            ("2", "02:00:ab:00:00:02", false),
            ("3", "02:00:ab:00:00:01", false),
        ] {
            fs::write(folder.path().join("ifindex"), format!("{index}\n")).unwrap();
            fs::write(folder.path().join("address"), format!("{address}\n")).unwrap();
            assert_eq!(describes(folder.path(), &info), expected, "{index} {address}");
        }
        assert!(!describes(Path::new("/nonexistent"), &info));
    }

    #[test]
    fn this_machine_can_be_described() {
        let machine = machine(Some("lo")).unwrap();
        assert!(!machine.cpus.is_empty() && machine.interface.as_ref().unwrap().is_loopback);
        assert_eq!(MachineDescription::parse(&machine.to_json()), Ok(machine));
        assert!(super::machine(Some("nonesuch0")).unwrap_err().starts_with("there is no interface"));
    }
}
