//! The first entries in the log of a stack: what it runs on, and what is not possible on this machine.

use ginnel::Config;
use ginnel::config::{DeviceConfig, DeviceKind, Loopback, OpenedSteering};
use ginnel_devices::resource_limit::resource_limit;
use rustix::process::Resource;

/// Descriptors of a stack's process that do not belong to the process of a program.
const OTHER_DESCRIPTORS: u64 = 16;
/// Memory mappings of a stack's process that do not belong to the process of a program.
const OTHER_MAPPINGS: u64 = 1024;

/// Writes the entries about the stack `name`, which `command` starts.
pub fn write(config: &Config, name: &str, command: &str) {
    let system = rustix::system::uname();
    tracing::info!(
        "ginnel {} starts the stack \"{name}\" ({command}) on Linux {}: {}",
        env!("CARGO_PKG_VERSION"),
        system.release().to_string_lossy(),
        describe_shards(config)
    );
    tracing::info!("{}", describe_many_cores(config));
    for device in &config.devices {
        tracing::info!("device {}", describe_device(config, device));
    }
    for route in &config.routes {
        let gateway = route.gateway.map_or_else(String::new, |gateway| format!(" via {gateway}"));
        tracing::info!("route {}{gateway} on {}", route.destination, route.link);
    }
    if config.loopback == Loopback::Stack {
        tracing::info!("127.0.0.0/8 and ::1 belong to the stack");
    }
}

/// Writes entries about limits of this machine that are lower than those of the configuration.
pub fn write_machine_limits(config: &Config) {
    let shards = u64::from(config.shards.count);
    let clients_max = config.channel.clients_max as u64;
    let descriptors = resource_limit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let mappings = read_number("/proc/sys/vm/max_map_count").unwrap_or(u64::MAX);
    for limit in machine_limits(clients_max, shards, descriptors, mappings) {
        tracing::info!("{limit}");
    }
    let huge_pages = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    if huge_pages.is_ok_and(|modes| modes.contains("[never]")) {
        tracing::info!(
            "large tables get no huge pages, which makes millions of connections slower: /sys/kernel/mm/transparent_hugepage/enabled is \"never\""
        );
    }
}

/// Describes which limits of the machine admit fewer processes than `clients_max`.
pub fn machine_limits(clients_max: u64, shards: u64, descriptors: u64, mappings: u64) -> Vec<String> {
    // docs/operations.md, "Limits", says who has which descriptors.
    let by_descriptors = descriptors.saturating_sub(OTHER_DESCRIPTORS) / (2 + 2 * shards);
    let by_mappings = mappings.saturating_sub(OTHER_MAPPINGS) / shards;
    let limit = |processes: u64, cause: String| {
        (processes < clients_max).then(|| {
            format!(
                "about {processes} processes can attach, not channel.clients_max ({clients_max}): {cause}"
            )
        })
    };
    let causes = [
        limit(by_descriptors, format!("the hard limit of descriptors is {descriptors} (LimitNOFILE=)")),
        limit(by_mappings, format!("vm.max_map_count is {mappings}")),
    ];
    causes.into_iter().flatten().collect()
}

fn read_number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn describe_shards(config: &Config) -> String {
    let count = match config.shards.count {
        1 => "1 shard".to_owned(),
        count => format!("{count} shards"),
    };
    let cpus: Vec<String> = match &config.shards.cpus[..] {
        [] => config.shard.cpu.iter().map(ToString::to_string).collect(),
        cpus => cpus.iter().map(ToString::to_string).collect(),
    };
    if cpus.is_empty() {
        format!("{count}, not pinned to CPUs")
    } else {
        format!("{count} on CPU {}", cpus.join(", "))
    }
}

/// Describes which of Fastsocket's features are on (docs/many-cores.md).
fn describe_many_cores(config: &Config) -> String {
    let several = config.shards.count > 1;
    let steering = match config.steering.rules.len() {
        0 => "off".to_owned(),
        count => format!("{count} rule(s)"),
    };
    let pools = if config.shard.prefault { "allocated at the start" } else { "reserved" };
    format!(
        "many cores: listen spawn {}, receive flow deliver {}, steering {steering}, fast epoll on, direct TCP on, \
         socket pool {} connections a shard ({pools}), buffer pool {} MiB a shard",
        if several { config.run.listen_spawn.name() } else { "off (1 shard)" },
        match config.steering.opened {
            _ if !several => "off",
            OpenedSteering::Hash => "on",
            OpenedSteering::PortBits => "on (by port bits)",
        },
        config.tcp.connections_max,
        config.tcp.buffer_pool_bytes >> 20,
    )
}

fn describe_device(config: &Config, device: &DeviceConfig) -> String {
    let interface = device.interface.as_deref().unwrap_or(&device.name);
    let mut text = match device.kind {
        DeviceKind::Memory => format!("{}: memory inside the process", device.name),
        DeviceKind::Tap => format!("{}: TAP interface {interface}", device.name),
        DeviceKind::AfXdp => format!("{}: AF_XDP on {interface}", device.name),
        DeviceKind::Dpdk => format!("{}: DPDK port {interface}", device.name),
        DeviceKind::Memif => {
            let socket = device.memif.as_ref().map_or_else(String::new, |memif| memif.socket.to_string());
            format!("{}: memif {socket}", device.name)
        }
    };
    if let Some(mtu) = device.mtu {
        text += &format!(", MTU {mtu}");
    }
    if let Some(shards) = &device.shards {
        let shards: Vec<String> = shards.iter().map(ToString::to_string).collect();
        text += &format!(", shards {}", shards.join(" "));
    }
    for link in config.links.iter().filter(|link| link.device == device.name) {
        let vlan = link.vlan.map_or_else(String::new, |vlan| format!(" (VLAN {vlan})"));
        let prefixes = link.addresses.iter().chain(&link.local_networks);
        let addresses: Vec<String> = prefixes.map(ToString::to_string).collect();
        let addresses = if addresses.is_empty() { "no address".into() } else { addresses.join(" ") };
        text += &format!(", link {}{vlan}: {addresses}", link.name);
    }
    if device.faults.is_some() {
        text += ", with faults";
    }
    if let Some(path) = &device.capture {
        text += &format!(", captured to {}", path.display());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_lines_say_what_is_on() {
        let one = describe_many_cores(&Config::default());
        assert!(
            one.starts_with("many cores: listen spawn off (1 shard), receive flow deliver off, steering off")
        );
        let by_bits =
            Config::from_toml("x.toml", "shards.count = 2\nsteering.opened = \"port-bits\"\n").unwrap();
        assert!(
            describe_many_cores(&by_bits).contains("receive flow deliver on (by port bits), steering off")
        );
        let text = "shards.count = 3\nrun.listen_spawn = \"bound\"\nshard.prefault = true\n\
                    tcp.connections_max = 77\n[[steering.rules]]\nshards = [2]\nports = 1\n";
        let many = describe_many_cores(&Config::from_toml("x.toml", text).unwrap());
        for part in
            ["listen spawn bound,", "deliver on,", "steering 1 rule(s),", "77 connections a shard (allocated"]
        {
            assert!(many.contains(part), "{many}");
        }
    }

    #[test]
    fn an_entry_names_the_shards_of_a_device() {
        let text = "shards.count = 3\n[[device]]\nname = \"a\"\nkind = \"tap\"\nshards = [2, 0]\n\
                    [[device]]\nname = \"b\"\nkind = \"tap\"\n[[link]]\nname = \"lan\"\ndevice = \"b\"\n";
        let config = Config::from_toml("x.toml", text).unwrap();
        let entries: Vec<_> = config.devices.iter().map(|device| describe_device(&config, device)).collect();
        assert_eq!(entries, ["a: TAP interface a, shards 2 0", "b: TAP interface b, link lan: no address"]);
    }

    #[test]
    fn machine_limits_below_the_configured_one_are_named() {
        assert_eq!(machine_limits(4096, 1, 1 << 20, 65_530), [""; 0]);
        let few = machine_limits(4096, 1, 1024, 65_530);
        assert_eq!(few.len(), 1);
        assert!(
            few[0].starts_with("about 252 processes can attach, not channel.clients_max (4096): the hard")
        );
        let several = machine_limits(65_535, 4, 20_000, 65_530);
        assert!(several[0].starts_with("about 1998 processes"), "{several:?}");
        assert!(several[1].starts_with("about 16126 processes") && several[1].contains("vm.max_map_count"));
    }
}
