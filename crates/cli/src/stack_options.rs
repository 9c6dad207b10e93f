//! Options that describe a stack, and the configuration that results from them.

use crate::failure::Failure;
use clap::{Args, ValueEnum};
use core::net::IpAddr;
use core::str::FromStr;
use ginnel::Config;
use ginnel::config::{
    AfXdpOptions, DeviceConfig, DeviceKind, DpdkOptions, LinkSpec, Loopback, MemifConfig, Prefix,
    PriorityRule,
};
use ginnel_apps::units::parse_bytes;
use ginnel_devices::af_xdp::RedirectScope;
use ginnel_devices::capture::Filter;
use ginnel_devices::dpdk::DpdkConfig;
use ginnel_stack::device::Label;
use std::path::PathBuf;

/// Options of every stack. A stack that runs in the process of its application has only these; see
/// [`StackOptions`] for the others.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Stack")]
pub struct OwnStackOptions {
    /// Configuration file (TOML). Options on the command line override it. docs/configuration.md lists its
    /// keys and their defaults.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Device to run over: tap:NAME (a TAP interface, created unless it exists), af_xdp:NAME (queues of a
    /// network interface, which the host keeps using; with keys as in
    /// af_xdp:eth0,queues=0-3,take=ports,ports=80, see docs/configuration.md), dpdk:PORT (a port of DPDK,
    /// in builds with it, see docs/dpdk.md), or memory (a virtual cable inside this process).
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceName>,

    /// Run over shared memory with another process, as in "socket=/run/lan,role=server". One process has
    /// role=server, the other role=client. docs/configuration.md lists the other keys.
    #[arg(long, value_name = "SOCKET,ROLE", conflicts_with = "device")]
    pub memif: Option<MemifConfig>,

    /// Share the host's addresses with an af_xdp device: the stack gets these TCP and UDP ports, as in
    /// 80,443,8000-8010, and its ephemeral ports. The keys take=ports and ports= of the device mean the same.
    #[arg(long, value_name = "PORTS", value_delimiter = ',', value_parser = parse_port_range)]
    pub af_xdp_ports: Vec<(u16, u16)>,

    /// IP address of the stack with its prefix length, as in 10.0.0.1/24 or fd00::1/64. May be given several
    /// times.
    #[arg(long, value_name = "ADDRESS/LEN")]
    pub address: Vec<Prefix>,

    /// Default gateway: next hop for all destinations that are not on the link. One for IPv4 and one for
    /// IPv6.
    #[arg(long, value_name = "ADDRESS")]
    pub gateway: Vec<IpAddr>,

    /// IP address with prefix length for the kernel's side of a TAP interface. May be given several times.
    #[arg(long, value_name = "ADDRESS/LEN")]
    pub kernel_address: Vec<Prefix>,

    /// Owner of the loopback addresses (127.0.0.0/8 and ::1) of programs on the stack. With "stack", these
    /// programs reach themselves and each other by loopback addresses inside the stack, which then needs no
    /// device.
    #[arg(long, value_name = "OWNER", value_enum)]
    pub loopback: Option<LoopbackOwner>,

    /// MTU: largest IP packet in bytes.
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(68..=65_521))]
    pub mtu: Option<u32>,

    /// Faults to inject into the link in both directions, as in "delay=20ms loss=1%". docs/configuration.md
    /// lists all of them (device.faults).
    #[arg(long, value_name = "FAULTS")]
    pub link: Option<LinkSpec>,

    /// Seed of the injected faults: the same seed gives the same faults.
    #[arg(long, value_name = "N")]
    pub link_seed: Option<u64>,

    /// Write frames to this pcapng file, for tshark or Wireshark. All frames are written whole,
    /// unless --capture-filter selects some or --capture-snaplen cuts them.
    #[arg(long, value_name = "FILE")]
    pub capture: Option<PathBuf>,

    /// Capture only frames that match this filter, in a subset of tcpdump's language, as in "tcp port 80 and
    /// not host 10.0.0.9".
    #[arg(long, value_name = "EXPRESSION", value_parser = parse_filter)]
    pub capture_filter: Option<String>,

    /// Capture at most this many bytes of each frame.
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(14..=262_144))]
    pub capture_snaplen: Option<u32>,

    /// Capture to a ring of this many files (trace-00001.pcapng …). When a file is full the next one is begun
    /// and the oldest one is deleted.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    pub capture_files: Option<u32>,

    /// With --capture-files: largest size of a file. Default: 64MiB.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub capture_file_bytes: Option<u64>,

    /// Give frames that match an expression in tcpdump's language a priority from 0 to 7, as in "6 tcp dst
    /// port 22": 7 is the most urgent, 0 (best effort) the default, and 1 (background) is below 0. May be
    /// given several times: the first rule that matches a frame is used, and these rules come before those of
    /// the configuration file. Needs libpcap (on Debian: libpcap0.8).
    #[arg(long, value_name = "PRIORITY EXPRESSION", value_parser = parse_priority_rule)]
    pub priority_rule: Vec<PriorityRule>,

    /// Name of the stack, by which ginnel stat, ss and other commands find it. Default: the subcommand and
    /// the process id.
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// CPU to pin the stack's thread to. Several shards are pinned with shards.cpus in the configuration
    /// file.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1023))]
    pub cpu: Option<u32>,

    /// Time in microseconds that the stack's thread polls without finding work before it sleeps.
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub spin_us: Option<u32>,

    /// Shortest time in microseconds between two passes of the stack's loop (receive, process, send) while it
    /// has little to do. It saves CPU time at a moderate load; frames and timers wait for up to this long.
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub coalesce_us: Option<u32>,
}

/// Options of a stack for programs in other processes.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Stack")]
pub struct StackOptions {
    #[command(flatten)]
    pub own: OwnStackOptions,

    /// Number of shards: threads that each serve a part of the connections, on queues of their own of each
    /// device.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub shards: Option<u32>,

    /// Largest number of processes and threads of one user that use the stack at a time
    /// (channel.clients_max).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_535))]
    pub clients_max: Option<u32>,
}

impl StackOptions {
    /// Returns the whole configuration: the file, if one is given, overridden by the options.
    pub fn to_config(&self) -> Result<Config, Failure> {
        self.own.to_config_with(|config| {
            config.shards.count = self.shards.unwrap_or(config.shards.count);
            config.channel.clients_max = self.clients_max.unwrap_or(config.channel.clients_max);
        })
    }

    /// Returns the first stack option that was given, if any.
    pub fn first_given(&self) -> Option<&'static str> {
        let given = [("--shards", self.shards), ("--clients-max", self.clients_max)];
        self.own
            .first_given()
            .or(given.into_iter().find(|(_, value)| value.is_some()).map(|(option, _)| option))
    }
}

/// Owner of the loopback addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LoopbackOwner {
    /// The kernel's loopback interface owns them (default).
    Kernel,
    /// The stack owns them.
    Stack,
}

/// A device on the command line: `memory`, `tap:NAME`, `af_xdp:NAME,KEY=VALUE,…` or `dpdk:PORT,KEY=VALUE,…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// A virtual cable inside the process.
    Memory,
    /// The TAP interface of this name.
    Tap(String),
    /// Queues of the network interface of this name.
    AfXdp(String, AfXdpOptions),
    /// The port of DPDK of this name.
    Dpdk(String, DpdkOptions),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "memory" => Ok(Self::Memory),
            Some(("tap", name)) => Ok(Self::Tap(parse_interface(name)?)),
            Some(("af_xdp", rest)) => {
                let (name, keys) = rest.split_once(',').unwrap_or((rest, ""));
                Ok(Self::AfXdp(parse_interface(name)?, keys.parse()?))
            }
            Some(("dpdk", rest)) => {
                let (port, keys) = rest.split_once(',').unwrap_or((rest, ""));
                let config = DpdkConfig { port: port.into(), ..DpdkConfig::default() };
                config.validate()?;
                Ok(Self::Dpdk(config.port, keys.parse()?))
            }
            _ => Err("must be \"memory\", \"tap:NAME\", \"af_xdp:NAME\" or \"dpdk:PORT\"".into()),
        }
    }
}

fn parse_interface(name: &str) -> Result<String, String> {
    if (1..=15).contains(&name.len()) && !name.contains(['/', ' ']) {
        Ok(name.into())
    } else {
        Err(format!("\"{name}\" is not an interface name (1 to 15 characters, without / and spaces)"))
    }
}

/// Parses a port, or a range of ports as in 8000-8010. Port 0 is an error.
pub fn parse_port_range(text: &str) -> Result<(u16, u16), String> {
    let port = |text: &str| {
        let port: u16 = text.parse().ok().filter(|port| *port > 0)?;
        Some(port)
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (port(first), port(last)) {
        (Some(first), Some(last)) if first <= last => Ok((first, last)),
        _ => Err(format!("\"{text}\" is not a port or an ascending range of ports, as in 80 or 8000-8010")),
    }
}

/// Parses a priority and an expression.
fn parse_priority_rule(text: &str) -> Result<PriorityRule, String> {
    let text = text.trim();
    let (priority, expression) = text.split_once(' ').unwrap_or((text, ""));
    let Some(priority) = priority.parse().ok().filter(|priority| *priority <= Label::PRIORITY_MAX) else {
        return Err(format!("\"{priority}\" is not a priority from 0 to 7, as in \"6 tcp dst port 22\""));
    };
    let expression = expression.parse().map_err(|e| format!("the expression \"{}\": {e}", expression))?;
    Ok(PriorityRule::from_expression(priority, expression))
}

/// Checks the syntax of a capture filter and returns the filter as it was written.
fn parse_filter(text: &str) -> Result<String, String> {
    text.parse::<Filter>().map(|_| text.into()).map_err(|e| e.to_string())
}

impl OwnStackOptions {
    /// Returns the whole configuration: the file, if one is given, overridden by the options.
    pub fn to_config(&self) -> Result<Config, Failure> {
        self.to_config_with(|_| ())
    }

    /// Returns the configuration as [`to_config`](Self::to_config) does, changed by `change` before it is
    /// checked.
    fn to_config_with(&self, change: impl FnOnce(&mut Config)) -> Result<Config, Failure> {
        let config = match &self.config {
            Some(path) => Config::from_file(path).map_err(|e| Failure::usage(e.to_string()))?,
            None => Config::default(),
        };
        self.complete(config, change)
    }

    /// Returns a configuration that was read from the file, overridden by the options and then by `change`.
    pub fn complete(&self, mut config: Config, change: impl FnOnce(&mut Config)) -> Result<Config, Failure> {
        config.loopback = match self.loopback {
            Some(LoopbackOwner::Kernel) => Loopback::Kernel,
            Some(LoopbackOwner::Stack) => Loopback::Stack,
            None => config.loopback,
        };
        self.apply_to(&mut config)?;
        if let Some(device) = self.sole_device(&mut config)? {
            device.mtu = self.mtu.or(device.mtu);
            self.set_af_xdp_ports(device)?;
            device.kernel_addresses.extend(&self.kernel_address);
            device.faults = self.link.clone().or(device.faults.take());
            device.faults_seed = self.link_seed.unwrap_or(device.faults_seed);
            device.capture = self.capture.clone().or(device.capture.take());
            device.capture_filter = self.capture_filter.clone().or(device.capture_filter.take());
            device.capture_snaplen_bytes = self.capture_snaplen.unwrap_or(device.capture_snaplen_bytes);
            device.capture_files = self.capture_files.or(device.capture_files);
            device.capture_file_bytes = self.capture_file_bytes.unwrap_or(device.capture_file_bytes);
        }
        config.priority.rules.splice(0..0, self.priority_rule.iter().cloned());
        config.run.name = self.name.clone().or(config.run.name.take());
        config.shard.cpu = self.cpu.or(config.shard.cpu);
        config.shard.spin_us = self.spin_us.unwrap_or(config.shard.spin_us);
        config.shard.coalesce_us = self.coalesce_us.unwrap_or(config.shard.coalesce_us);
        change(&mut config);
        config.validate().map_err(|e| Failure::usage(e.to_string()))?;
        Ok(config)
    }

    /// Gives the ports of --af-xdp-ports to the device.
    fn set_af_xdp_ports(&self, device: &mut DeviceConfig) -> Result<(), Failure> {
        if self.af_xdp_ports.is_empty() {
            return Ok(());
        }
        let name = &device.name;
        if device.kind != DeviceKind::AfXdp {
            return Err(Failure::usage(format!(
                "--af-xdp-ports needs an af_xdp device, and {name} is none: use --device af_xdp:NAME"
            )));
        }
        let options = device.af_xdp.get_or_insert_default();
        let key = match options.take {
            Some(RedirectScope::Ports) if !options.ports.is_empty() => "ports=",
            Some(RedirectScope::All) => "take=all",
            Some(RedirectScope::Addresses) => "take=addresses",
            None | Some(RedirectScope::Ports) => {
                options.take = Some(RedirectScope::Ports);
                options.ports.clone_from(&self.af_xdp_ports);
                return Ok(());
            }
        };
        Err(Failure::usage(format!(
            "--af-xdp-ports cannot be combined with the key {key} of the device af_xdp:{name}: remove one of them"
        )))
    }

    /// Returns the first stack option that was given, if any.
    pub fn first_given(&self) -> Option<&'static str> {
        let given = [
            ("--config", self.config.is_some()),
            ("--device", self.device.is_some()),
            ("--memif", self.memif.is_some()),
            ("--af-xdp-ports", !self.af_xdp_ports.is_empty()),
            ("--address", !self.address.is_empty()),
            ("--gateway", !self.gateway.is_empty()),
            ("--kernel-address", !self.kernel_address.is_empty()),
            ("--loopback", self.loopback.is_some()),
            ("--mtu", self.mtu.is_some()),
            ("--link", self.link.is_some()),
            ("--link-seed", self.link_seed.is_some()),
            ("--capture", self.capture.is_some()),
            ("--capture-filter", self.capture_filter.is_some()),
            ("--capture-snaplen", self.capture_snaplen.is_some()),
            ("--capture-files", self.capture_files.is_some()),
            ("--capture-file-bytes", self.capture_file_bytes.is_some()),
            ("--priority-rule", !self.priority_rule.is_empty()),
            ("--name", self.name.is_some()),
            ("--cpu", self.cpu.is_some()),
            ("--spin-us", self.spin_us.is_some()),
            ("--coalesce-us", self.coalesce_us.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(option, _)| option)
    }

    /// Sets devices, links and routes. They come either all from the file or all from the options.
    fn apply_to(&self, config: &mut Config) -> Result<(), Failure> {
        let from_options = self.device.is_some()
            || self.memif.is_some()
            || !self.address.is_empty()
            || !self.gateway.is_empty();
        if !config.devices.is_empty() || !config.links.is_empty() {
            if from_options {
                let file = self.config.as_deref().unwrap_or("the configuration".as_ref()).display();
                return Err(Failure::usage(format!(
                    "--device, --memif, --address and --gateway cannot be combined with {file}, which has [[device]] or [[link]] tables: change them there"
                )));
            }
            return Ok(());
        }
        let device = match (&self.device, &self.memif) {
            (Some(DeviceName::Memory), _) => DeviceConfig::new("memory", DeviceKind::Memory),
            (Some(DeviceName::Tap(interface)), _) => DeviceConfig::new(interface, DeviceKind::Tap),
            (Some(DeviceName::AfXdp(interface, keys)), _) => {
                let af_xdp = Some(keys.clone());
                DeviceConfig { af_xdp, ..DeviceConfig::new(interface, DeviceKind::AfXdp) }
            }
            (Some(DeviceName::Dpdk(port, keys)), _) => {
                DeviceConfig { dpdk: Some(keys.clone()), ..DeviceConfig::new(port, DeviceKind::Dpdk) }
            }
            (None, Some(memif)) => {
                let memif = Some(memif.clone());
                DeviceConfig { memif, ..DeviceConfig::new("memif", DeviceKind::Memif) }
            }
            // Programs that only talk to each other over loopback need no device.
            (None, None) if config.loopback == Loopback::Stack && !from_options => return Ok(()),
            (None, None) => {
                return Err(Failure::usage(
                    "--device is missing: use --device memory, tap:NAME, af_xdp:NAME or dpdk:PORT, or --memif, or a --config FILE with a [[device]] table, or --loopback stack for programs that only reach each other",
                ));
            }
        };
        if self.address.is_empty() {
            return Err(Failure::usage(
                "--address is missing: give the stack an address, as in --address 10.1.0.2/24",
            ));
        }
        let shape = Config::single(device, &self.address, &self.gateway);
        (config.devices, config.links, config.routes) = (shape.devices, shape.links, shape.routes);
        Ok(())
    }

    /// Returns the only device of the configuration if an option that concerns one device is given (--mtu,
    /// --af-xdp-ports, --kernel-address, --link, --link-seed, or one of the --capture options).
    fn sole_device<'a>(&self, config: &'a mut Config) -> Result<Option<&'a mut DeviceConfig>, Failure> {
        let given = [
            self.mtu.map(|_| "--mtu"),
            self.af_xdp_ports.first().map(|_| "--af-xdp-ports"),
            self.kernel_address.first().map(|_| "--kernel-address"),
            self.link.as_ref().map(|_| "--link"),
            self.link_seed.map(|_| "--link-seed"),
            self.capture.as_ref().map(|_| "--capture"),
            self.capture_filter.as_ref().map(|_| "--capture-filter"),
            self.capture_snaplen.map(|_| "--capture-snaplen"),
            self.capture_files.map(|_| "--capture-files"),
            self.capture_file_bytes.map(|_| "--capture-file-bytes"),
        ];
        let Some(option) = given.into_iter().flatten().next() else { return Ok(None) };
        match config.devices.as_mut_slice() {
            [device] => Ok(Some(device)),
            [] => Err(Failure::usage(format!(
                "{option} needs a device, and the stack has none: add --device tap:NAME or another device, or remove {option}"
            ))),
            devices => Err(Failure::usage(format!(
                "{option} needs exactly one device, but the configuration has {}: set it in their [[device]] tables instead",
                devices.len()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        DeviceName, LoopbackOwner, OwnStackOptions, StackOptions, parse_port_range, parse_priority_rule,
    };
    use ginnel::config::{AfXdpOptions, DeviceKind, DpdkOptions};

    fn options() -> OwnStackOptions {
        OwnStackOptions {
            device: Some(DeviceName::Tap("gtap0".into())),
            address: vec!["10.1.0.2/24".parse().unwrap(), "fd00::2/64".parse().unwrap()],
            gateway: vec!["10.1.0.1".parse().unwrap()],
            ..OwnStackOptions::default()
        }
    }

    #[test]
    fn options_of_a_device_need_a_device() {
        let own = OwnStackOptions {
            loopback: Some(LoopbackOwner::Stack),
            mtu: Some(1400),
            ..OwnStackOptions::default()
        };
        let text = own.to_config().unwrap_err().to_string();
        assert!(text.contains("--mtu needs a device, and the stack has none: add --device"), "{text}");
    }

    #[test]
    fn options_alone_form_a_configuration() {
        let own = OwnStackOptions { mtu: Some(9000), cpu: Some(1), ..options() };
        let config = StackOptions { own, shards: None, clients_max: Some(9) }.to_config().unwrap();
        assert_eq!((config.channel.clients_max, config.shards.count), (9, 1));
        let two = StackOptions { own: options(), shards: Some(2), clients_max: None }.to_config().unwrap();
        assert_eq!(two.shards.count, 2);
        assert_eq!(config.devices.len(), 1);
        assert_eq!((config.devices[0].kind, config.devices[0].mtu), (DeviceKind::Tap, Some(9000)));
        assert_eq!(config.links[0].addresses.len(), 2);
        assert_eq!(config.routes.len(), 1);
        assert_eq!(config.shard.cpu, Some(1));
    }

    #[test]
    fn missing_options_are_named() {
        let error = |options: OwnStackOptions| options.to_config().unwrap_err().to_string();
        assert!(error(OwnStackOptions::default()).starts_with("--device is missing"));
        assert!(error(OwnStackOptions { address: vec![], ..options() }).starts_with("--address is missing"));
        assert!(
            error(OwnStackOptions { config: Some("no/file".into()), ..options() }).starts_with("no/file: ")
        );
    }

    #[test]
    fn a_memif_is_a_device_too() {
        let memif = Some("socket=/run/x,role=client,id=4".parse().unwrap());
        let options = OwnStackOptions { device: None, memif: memif.clone(), mtu: Some(9000), ..options() };
        let config = options.to_config().unwrap();
        let device = &config.devices[0];
        assert_eq!((device.kind, device.mtu, &device.memif), (DeviceKind::Memif, Some(9000), &memif));
    }

    #[test]
    fn af_xdp_ports_are_an_option_or_a_key() {
        let with = |device: &str, ports: &[(u16, u16)]| {
            let (device, af_xdp_ports) = (Some(device.parse().unwrap()), ports.to_vec());
            OwnStackOptions { device, af_xdp_ports, ..options() }.to_config()
        };
        let by_option = with("af_xdp:x,queues=1", &[(80, 80), (8000, 8010)]).unwrap();
        let by_key = with("af_xdp:x,queues=1,take=ports,ports=80+8000-8010", &[]).unwrap();
        assert_eq!(by_option.devices[0].af_xdp, by_key.devices[0].af_xdp);
        assert!(with("af_xdp:x,take=ports", &[(80, 80)]).is_ok());
        for (device, expected) in [
            (
                "af_xdp:x,take=ports,ports=81",
                "--af-xdp-ports cannot be combined with the key ports= of the device af_xdp:x: remove one of them",
            ),
            (
                "af_xdp:x,take=all",
                "--af-xdp-ports cannot be combined with the key take=all of the device af_xdp:x: remove one of them",
            ),
            (
                "af_xdp:x,queues=1,take=addresses",
                "--af-xdp-ports cannot be combined with the key take=addresses of the device af_xdp:x: remove one of them",
            ),
            ("tap:x", "--af-xdp-ports needs an af_xdp device, and x is none: use --device af_xdp:NAME"),
        ] {
            assert_eq!(with(device, &[(80, 80)]).unwrap_err().to_string(), expected);
        }
        assert_eq!((parse_port_range("80"), parse_port_range("1-65535")), (Ok((80, 80)), Ok((1, 65_535))));
        for bad in ["", "0", "65536", "9-8", "80+81", "http", "-1", "1-"] {
            let error = parse_port_range(bad).unwrap_err();
            assert!(error.starts_with(&format!("\"{bad}\" is not a port")), "{error}");
        }
    }

    #[test]
    fn priority_rules_come_before_those_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("stack.toml");
        std::fs::write(&file, "[[priority.rules]]\npriority = 1\nports = 80\n").unwrap();
        let rule = |text: &str| match parse_priority_rule(text) {
            Err(error) if error.contains("apt-get install libpcap0.8") => {
                ginnel_testkit::skip("priority_rules_come_before_those_of_the_file", &error);
                None
            }
            rule => Some(rule.unwrap()),
        };
        let (Some(ssh), Some(dns)) = (rule("6 tcp dst port 22"), rule(" 2 udp port 53 ")) else { return };
        let priority_rule = vec![ssh, dns];
        let config = OwnStackOptions { config: Some(file), priority_rule, ..options() }.to_config().unwrap();
        let priorities: Vec<u8> = config.priority.rules.iter().map(|rule| rule.priority).collect();
        assert_eq!(priorities, [6, 2, 1]);
        assert_eq!(config.priority.rules[0].expression.as_ref().unwrap().text(), "tcp dst port 22");
    }

    #[test]
    fn wrong_priority_rules_are_named() {
        for (text, problem) in [
            ("8 tcp", "\"8\" is not a priority from 0 to 7, as in \"6 tcp dst port 22\""),
            ("tcp", "\"tcp\" is not a priority from 0 to 7, as in \"6 tcp dst port 22\""),
            ("", "\"\" is not a priority from 0 to 7, as in \"6 tcp dst port 22\""),
            ("6", "the expression \"\": is empty"),
        ] {
            assert_eq!(parse_priority_rule(text).unwrap_err(), problem);
        }
    }

    #[test]
    fn device_names_are_checked() {
        assert_eq!("memory".parse(), Ok(DeviceName::Memory));
        assert_eq!("tap:x".parse(), Ok(DeviceName::Tap("x".into())));
        let keys = "queues=1,take=all".parse().unwrap();
        assert_eq!("af_xdp:x,queues=1,take=all".parse(), Ok(DeviceName::AfXdp("x".into(), keys)));
        assert_eq!("af_xdp:x".parse(), Ok(DeviceName::AfXdp("x".into(), AfXdpOptions::default())));
        let keys = "args=iface=eth0+qpairs=2,huge=off";
        let expected = DeviceName::Dpdk("net_af_packet0".into(), keys.parse().unwrap());
        assert_eq!(format!("dpdk:net_af_packet0,{keys}").parse(), Ok(expected));
        let pci = DeviceName::Dpdk("0000:03:00.0".into(), DpdkOptions::default());
        assert_eq!("dpdk:0000:03:00.0".parse(), Ok(pci));
        for wrong in ["dpdk:", "dpdk:net tap", "dpdk:net_tap0,huge=maybe"] {
            assert!(wrong.parse::<DeviceName>().is_err(), "{wrong}");
        }
        for bad in
            ["af_xdp:", "af_xdp:x,take=some", "", "tap", "tap:", "eth0", "tap:sixteen-letters-", "memory:x"]
        {
            assert!(bad.parse::<DeviceName>().is_err(), "{bad}");
        }
    }
}
