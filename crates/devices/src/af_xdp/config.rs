//! Configuration of an AF_XDP device, and its text form.

use crate::key_values::{self, number, one_of};
pub use crate::partial_checksums::PartialChecksums;
pub use crate::port_filters::PortFilterMode;
use core::net::IpAddr;
use core::ops::RangeInclusive;
use std::fmt;
use std::str::FromStr;

/// Maximum number of queues: the maximum number of shards.
pub const QUEUES_MAX: usize = 64;
/// Queue numbers are below this value.
const QUEUE_NUMBERS: u16 = 4096;
/// Valid ring sizes in descriptors.
const RING_RANGE: std::ops::RangeInclusive<u32> = 64..=32_768;

/// Which frames are redirected to the stack; the kernel processes all others as before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RedirectScope {
    /// Frames to the stack's addresses, and ARP and neighbour discovery about them. The addresses belong to
    /// the stack alone.
    #[default]
    Addresses,
    /// For addresses that stack and host share: frames to the stack's ports, and ICMP errors that quote
    /// packets from them.
    Ports,
    /// All frames.
    All,
}

/// How the kernel passes frames between driver and socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyMode {
    /// Zero copy if the driver supports it, otherwise copies.
    #[default]
    Auto,
    /// The kernel copies each frame, which every driver supports.
    Copy,
    /// Zero copy; opening fails if the driver does not support it.
    ZeroCopy,
}

/// Where the redirect program runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attach {
    /// In the driver if it supports XDP, otherwise in generic mode.
    #[default]
    Auto,
    /// In the driver; opening fails if it does not support XDP.
    Driver,
    /// In generic mode (before the network stack of the kernel), which works with every interface and is
    /// slower.
    Generic,
}

/// Options of a device, with the text form `queues=0-3,mode=zerocopy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AfXdpOptions {
    /// Queues of the interface, in the order in which shards get them. Text key `queues`, as `0-3` or `1+5`;
    /// default: see [`AfXdpConfig::queue_count`].
    pub queues: Option<Vec<u16>>,
    /// Which frames are redirected; `None` stands for [`RedirectScope::Addresses`]. Text key `take`:
    /// `addresses` (the default), `ports` or `all`.
    pub take: Option<RedirectScope>,
    /// Port ranges of the stack for [`RedirectScope::Ports`], in addition to its ephemeral ports. Text key
    /// `ports`, as `80+8000-8010`.
    pub ports: Vec<(u16, u16)>,
    /// Copy mode. Text key `mode`: `auto` (the default), `copy` or `zerocopy`.
    pub mode: CopyMode,
    /// Where the redirect program runs. Text key `attach`: `auto` (the default), `driver` or `generic`.
    pub attach: Attach,
    /// Descriptors of each ring, a power of two from 64 to 32,768. Text key `ring`, default 2,048.
    // limit: descriptors of an AF_XDP ring
    pub ring: u32,
    /// Makes system calls only if the kernel requests them (`XDP_USE_NEED_WAKEUP`). Text key `need_wakeup`:
    /// `on` (the default) or `off`.
    pub need_wakeup: bool,
    /// Time in microseconds, at most 1,000,000, for which a system call of the shard's thread polls the
    /// driver's receive queue (`SO_BUSY_POLL`); 0 leaves receiving to interrupts. Text key `busy_poll`,
    /// default 0.
    pub busy_poll_us: u32,
    /// Packets of one busy poll (`SO_BUSY_POLL_BUDGET`), 1 to 65,535. Text key `busy_budget`, default 64.
    pub busy_budget: u16,
    /// Treatment of frames of local senders whose checksum is partial. Text key `partial_checksums`: `auto`
    /// (the default), `on` or `off`.
    pub partial_checksums: PartialChecksums,
    /// True if connections belong to the shards to which the interface delivers their packets by its own
    /// hash, provided that the driver reports key and table. Text key `rss`, `auto` or `off`; default `auto`.
    pub rss: bool,
    /// The way that filters for [`AfXdpConfig::opened_ports`] are set in the adapter. Text key
    /// `port_filters`: `auto` (the default), `on` or `off`.
    pub port_filters: PortFilterMode,
}

impl Default for AfXdpOptions {
    fn default() -> Self {
        Self {
            queues: None,
            take: None,
            ports: Vec::new(),
            mode: CopyMode::Auto,
            attach: Attach::Auto,
            ring: 2048,
            need_wakeup: true,
            busy_poll_us: 0,
            busy_budget: 64,
            partial_checksums: PartialChecksums::Auto,
            rss: true,
            port_filters: PortFilterMode::Auto,
        }
    }
}

/// Configuration of an AF_XDP device, see [`open`](super::open).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AfXdpConfig {
    /// Name of the interface.
    pub interface: String,
    /// Options of the device.
    pub options: AfXdpOptions,
    /// Number of queues, counted from queue 0, if the options name none. 0 stands for all queues of the
    /// interface.
    pub queue_count: usize,
    /// Addresses of the stack, each with its VLAN (0 for none).
    pub addresses: Vec<(IpAddr, u16)>,
    /// Ephemeral port ranges (first and last port) of TCP and of UDP, for [`RedirectScope::Ports`].
    pub ephemeral: [(u16, u16); 2],
    /// Local ports of opened connections, whose low bits are an index of the device's queues. The adapter
    /// gets filters that deliver their packets to these queues, if there are several. `None`: no filter is
    /// set.
    pub opened_ports: Option<RangeInclusive<u16>>,
    /// Largest IP packet in bytes, at most the interface's MTU. `None` takes the interface's MTU.
    pub mtu: Option<usize>,
}

impl AfXdpConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// Names the wrong value and the range that is allowed.
    pub fn validate(&self) -> Result<(), String> {
        let name = &self.interface;
        if !(1..=15).contains(&name.len()) || name.contains(|c: char| c == '/' || c.is_whitespace()) {
            return Err(format!("{name:?} is not an interface name (1 to 15 bytes without blanks and /)"));
        }
        if self.queue_count > QUEUES_MAX {
            return Err(format!("queues: {} are more than {QUEUES_MAX}", self.queue_count));
        }
        if *self.options.scope() != RedirectScope::All && self.addresses.is_empty() {
            return Err("take: no address is configured: configure one, or set take=all".into());
        }
        self.options.validate()
    }
}

impl AfXdpOptions {
    /// Returns which frames are redirected.
    pub fn scope(&self) -> &RedirectScope {
        self.take.as_ref().unwrap_or(&RedirectScope::Addresses)
    }

    /// Checks every range.
    ///
    /// # Errors
    /// Names the wrong value and the range that is allowed.
    pub fn validate(&self) -> Result<(), String> {
        if let Some(queues) = &self.queues {
            if !(1..=QUEUES_MAX).contains(&queues.len()) {
                return Err(format!("queues: {} are outside 1 to {QUEUES_MAX}", queues.len()));
            }
            if let Some(queue) = queues.iter().find(|&&queue| queue >= QUEUE_NUMBERS) {
                return Err(format!("queues: {queue} is above {}", QUEUE_NUMBERS - 1));
            }
            if let Some((_, queue)) =
                queues.iter().enumerate().find(|&(i, queue)| queues[..i].contains(queue))
            {
                return Err(format!("queues: {queue} is repeated"));
            }
        }
        if !self.ring.is_power_of_two() || !RING_RANGE.contains(&self.ring) {
            let (least, most) = RING_RANGE.into_inner();
            return Err(format!("ring: {} is not a power of two from {least} to {most}", self.ring));
        }
        if self.busy_poll_us > 1_000_000 {
            return Err(format!("busy_poll: {} is above 1000000", self.busy_poll_us));
        }
        if self.busy_budget == 0 {
            return Err("busy_budget: must be 1 to 65535".into());
        }
        if !self.ports.is_empty() && *self.scope() != RedirectScope::Ports {
            return Err("ports: requires take=ports".into());
        }
        if self.mode == CopyMode::ZeroCopy && self.attach == Attach::Generic {
            return Err(
                "mode: zerocopy cannot be combined with attach=generic: it needs the program in the driver"
                    .into(),
            );
        }
        Ok(())
    }
}

impl FromStr for AfXdpOptions {
    type Err = String;

    /// Parses `key=value` pairs separated by commas; an empty text gives the defaults.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut keys = Self::default();
        for pair in key_values::pairs(text).filter(|_| !text.is_empty()) {
            let (key, value) = pair?;
            match key {
                "queues" => {
                    let mut queues = Vec::new();
                    for (first, last) in parse_ranges(key, value)? {
                        if usize::from(last - first) >= QUEUES_MAX {
                            return Err(format!("queues: \"{value}\" are more than {QUEUES_MAX}"));
                        }
                        queues.extend(first..=last);
                    }
                    keys.queues = Some(queues);
                }
                "take" => {
                    let all = [
                        ("addresses", RedirectScope::Addresses),
                        ("ports", RedirectScope::Ports),
                        ("all", RedirectScope::All),
                    ];
                    keys.take = Some(one_of(key, value, all)?);
                }
                "ports" => keys.ports = parse_ranges(key, value)?,
                "mode" => {
                    let all = [
                        ("auto", CopyMode::Auto),
                        ("copy", CopyMode::Copy),
                        ("zerocopy", CopyMode::ZeroCopy),
                    ];
                    keys.mode = one_of(key, value, all)?;
                }
                "attach" => {
                    let all =
                        [("auto", Attach::Auto), ("driver", Attach::Driver), ("generic", Attach::Generic)];
                    keys.attach = one_of(key, value, all)?;
                }
                "ring" => keys.ring = number(key, value, keys.ring)?,
                "need_wakeup" => keys.need_wakeup = one_of(key, value, [("on", true), ("off", false)])?,
                "busy_poll" => keys.busy_poll_us = number(key, value, 20)?,
                "busy_budget" => keys.busy_budget = number(key, value, keys.busy_budget)?,
                "partial_checksums" => keys.partial_checksums = one_of(key, value, PartialChecksums::WORDS)?,
                "rss" => keys.rss = one_of(key, value, [("auto", true), ("off", false)])?,
                "port_filters" => keys.port_filters = one_of(key, value, PortFilterMode::WORDS)?,
                _ => {
                    return Err(format!(
                        "{key}: unknown key (queues, take, ports, mode, attach, ring, need_wakeup, busy_poll, busy_budget, partial_checksums, rss, port_filters)"
                    ));
                }
            }
        }
        keys.validate()?;
        Ok(keys)
    }
}

impl fmt::Display for RedirectScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Addresses => "addresses",
            Self::Ports => "ports",
            Self::All => "all",
        })
    }
}

/// Parses numbers and ranges separated by plus signs.
fn parse_ranges(key: &str, value: &str) -> Result<Vec<(u16, u16)>, String> {
    value
        .split('+')
        .map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(key, first, 1)?, number(key, last, 1)?);
            if first > last {
                return Err(format!("{key}: \"{part}\" is not an ascending range"));
            }
            Ok((first, last))
        })
        .collect()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn text_sets_all_keys() {
        let text = "queues=4+0-2,take=ports,ports=80+8000-8010,mode=copy,attach=generic,ring=64,need_wakeup=off,busy_poll=20,busy_budget=8,partial_checksums=on,rss=off,port_filters=on";
        let expected = AfXdpOptions {
            queues: Some(vec![4, 0, 1, 2]),
            take: Some(RedirectScope::Ports),
            ports: vec![(80, 80), (8000, 8010)],
            mode: CopyMode::Copy,
            attach: Attach::Generic,
            ring: 64,
            need_wakeup: false,
            busy_poll_us: 20,
            busy_budget: 8,
            partial_checksums: PartialChecksums::Accept,
            rss: false,
            port_filters: PortFilterMode::On,
        };
        assert_eq!(text.parse(), Ok(expected));
        assert_eq!("".parse(), Ok(AfXdpOptions::default()));
    }

    #[test]
    fn errors_name_the_invalid_value() {
        for (text, problem) in [
            ("queues", "\"queues\" is not"),
            ("queues=", "queues: \"\" is not a number"),
            ("queues=3-1", "queues: \"3-1\" is not an ascending range"),
            ("queues=0+0", "queues: 0 is repeated"),
            ("queues=0-64", "queues: \"0-64\" are more than 64"),
            ("queues=4096", "queues: 4096 is above"),
            ("take=some", "take: \"some\" is not one of addresses, ports, all"),
            ("ports=80", "ports: requires take=ports"),
            ("take=ports,ports=70000", "ports: \"70000\" is not a number"),
            ("mode=fast", "mode: \"fast\" is not one of auto, copy, zerocopy"),
            ("mode=copy,mode=copy", "mode: is repeated"),
            ("mode=zerocopy,attach=generic", "mode: zerocopy cannot"),
            ("attach=skb", "attach: \"skb\" is not one of"),
            ("ring=100", "ring: 100 is not a power of two"),
            ("ring=32", "ring: 32 is not a power of two from 64"),
            ("busy_poll=1000001", "busy_poll: 1000001 is above"),
            ("busy_budget=0", "busy_budget: must be"),
            ("need_wakeup=yes", "need_wakeup: \"yes\" is not one of on, off"),
            ("partial_checksums=yes", "partial_checksums: \"yes\" is not one of auto, on, off"),
            ("port_filters=yes", "port_filters: \"yes\" is not one of auto, on, off"),
            ("colour=red", "colour: unknown key"),
        ] {
            let error = text.parse::<AfXdpOptions>().expect_err(text);
            assert!(error.starts_with(problem), "{text}: {error}");
        }
    }

    #[test]
    fn interface_addresses_and_queue_count_are_checked() {
        let good = AfXdpConfig {
            interface: "eth0".into(),
            addresses: vec![([10, 0, 0, 1].into(), 0)],
            queue_count: 2,
            ..AfXdpConfig::default()
        };
        assert_eq!(good.validate(), Ok(()));
        let error = |config: AfXdpConfig| config.validate().expect_err("wrong");
        assert!(
            error(AfXdpConfig { interface: "a/b".into(), ..good.clone() }).contains("not an interface name")
        );
        assert!(error(AfXdpConfig { addresses: vec![], ..good.clone() }).starts_with("take: "));
        assert!(error(AfXdpConfig { queue_count: 65, ..good }).starts_with("queues: 65"));
    }
}
