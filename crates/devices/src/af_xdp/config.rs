//! What an AF_XDP device is opened with, and how that is written in one line.

use core::net::IpAddr;
use std::fmt;
use std::str::FromStr;

/// Queues at the most: as many as shards.
pub const QUEUES_MAX: usize = 64;
/// Numbers of queues are below this.
const QUEUE_NUMBERS: u16 = 4096;
/// Sizes of rings.
const RING_RANGE: std::ops::RangeInclusive<u32> = 64..=32_768;

/// Which frames are the stack's; the rest goes to the kernel as before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RedirectScope {
    /// Those for the stack's addresses, with ARP and neighbour discovery about them. The addresses are the stack's alone.
    #[default]
    Addresses,
    /// Of the stack's addresses, which are the host's as well: those for the stack's ports, and ICMP errors about what came from them.
    Ports,
    /// All.
    All,
}

/// How frames come from the driver and go there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyMode {
    /// Without a copy if the driver can.
    #[default]
    Auto,
    /// The kernel copies each frame. Every driver can do that.
    Copy,
    /// Without a copy, or not at all.
    ZeroCopy,
}

/// Where the redirect program runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attach {
    /// In the driver if it can, else before the kernel's own path.
    #[default]
    Auto,
    /// In the driver, or not at all.
    Driver,
    /// Before the kernel's own path, which works with every interface and is slower.
    Generic,
}

/// The keys of a device in one line: `queues=0-3,mode=zerocopy`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AfXdpOptions {
    /// Queues of the interface, in the order in which shards get them. Text key `queues`, as `0-3` or `1+5`; default: none are named.
    pub queues: Option<Vec<u16>>,
    /// Text key `take`: `addresses` (the default), `ports` or `all`.
    pub take: RedirectScope,
    /// The stack's ports, for [`Take::Ports`], beside those it chooses itself. Text key `ports`, as `80+8000-8010`.
    pub ports: Vec<(u16, u16)>,
    /// Text key `mode`: `auto` (the default), `copy` or `zerocopy`.
    pub mode: CopyMode,
    /// Text key `attach`: `auto` (the default), `driver` or `generic`.
    pub attach: Attach,
    /// Descriptors of each ring, a power of two from 64 to 32,768. Text key `ring`, default 2,048.
    // limit: descriptors of an AF_XDP ring
    pub ring: u32,
    /// Call the kernel only when it asks for it. Text key `need_wakeup`: `on` (the default) or `off`.
    pub need_wakeup: bool,
    /// Run the driver's receive work in this thread's calls, looking for so many microseconds; 0: leave it to interrupts. Text key `busy_poll`, default 0.
    pub busy_poll_us: u32,
    /// Packets of one such run, 1 to 65,535. Text key `busy_budget`, default 64.
    pub busy_budget: u16,
}

impl Default for AfXdpOptions {
    fn default() -> Self {
        Self {
            queues: None,
            take: RedirectScope::Addresses,
            ports: Vec::new(),
            mode: CopyMode::Auto,
            attach: Attach::Auto,
            ring: 2048,
            need_wakeup: true,
            busy_poll_us: 0,
            busy_budget: 64,
        }
    }
}

/// What [`open`](super::open) opens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AfXdpConfig {
    /// Name of the interface.
    pub interface: String,
    /// How it is used.
    pub options: AfXdpOptions,
    /// Queues, if the keys name none: so many from 0 on. 0 is as many as the interface has.
    pub queue_count: usize,
    /// The stack's addresses with the VLAN that they are in (0 is none).
    pub addresses: Vec<(IpAddr, u16)>,
    /// Local ports that the stack chooses from, first and last of TCP and of UDP. For [`Take::Ports`].
    pub ephemeral: [(u16, u16); 2],
    /// Largest IP packet in bytes, not above the interface's. `None` takes the interface's.
    pub mtu: Option<usize>,
}

impl AfXdpConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// A line that says which value is wrong, and what is allowed.
    pub fn validate(&self) -> Result<(), String> {
        let name = &self.interface;
        if !(1..=15).contains(&name.len()) || name.contains(|c: char| c == '/' || c.is_whitespace()) {
            return Err(format!("{name:?} is no name of an interface (1 to 15 bytes without blanks and /)"));
        }
        if self.queue_count > QUEUES_MAX {
            return Err(format!("queues: {} are more than {QUEUES_MAX}", self.queue_count));
        }
        if self.options.take != RedirectScope::All && self.addresses.is_empty() {
            return Err("take: without an address nothing is the stack's: give it one, or take=all".into());
        }
        self.options.validate()
    }
}

impl AfXdpOptions {
    /// Checks every range.
    ///
    /// # Errors
    /// A line that says which value is wrong, and what is allowed.
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
                return Err(format!("queues: {queue} is there twice"));
            }
        }
        if !self.ring.is_power_of_two() || !RING_RANGE.contains(&self.ring) {
            let (least, most) = RING_RANGE.into_inner();
            return Err(format!("ring: {} is no power of two from {least} to {most}", self.ring));
        }
        if self.busy_poll_us > 1_000_000 {
            return Err(format!("busy_poll: {} is above 1000000", self.busy_poll_us));
        }
        if self.busy_budget == 0 {
            return Err("busy_budget: must be 1 to 65535".into());
        }
        if !self.ports.is_empty() && self.take != RedirectScope::Ports {
            return Err("ports: is for take=ports".into());
        }
        if self.mode == CopyMode::ZeroCopy && self.attach == Attach::Generic {
            return Err("mode: zerocopy needs the program in the driver, not attach=generic".into());
        }
        Ok(())
    }
}

impl FromStr for AfXdpOptions {
    type Err = String;

    /// `key=value` pairs with commas between them; nothing is all defaults.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut keys = Self::default();
        let mut seen = Vec::new();
        for pair in text.split(',').filter(|_| !text.is_empty()) {
            let (key, value) =
                pair.split_once('=').ok_or_else(|| format!("\"{pair}\" is not of the form key=value"))?;
            if seen.contains(&key) {
                return Err(format!("{key}: is given twice"));
            }
            seen.push(key);
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
                    keys.take = one_of(key, value, all)?;
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
                "ring" => keys.ring = parse_number(key, value)?,
                "need_wakeup" => keys.need_wakeup = one_of(key, value, [("on", true), ("off", false)])?,
                "busy_poll" => keys.busy_poll_us = parse_number(key, value)?,
                "busy_budget" => keys.busy_budget = parse_number(key, value)?,
                _ => {
                    return Err(format!(
                        "{key}: unknown key (queues, take, ports, mode, attach, ring, need_wakeup, busy_poll, busy_budget)"
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

fn one_of<T, const N: usize>(key: &str, value: &str, all: [(&str, T); N]) -> Result<T, String> {
    let names = all.each_ref().map(|(name, _)| *name).join(", ");
    let found = all.into_iter().find(|(name, _)| *name == value);
    found.map(|(_, meaning)| meaning).ok_or_else(|| format!("{key}: \"{value}\" is none of {names}"))
}

fn parse_number<T: FromStr>(key: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{key}: \"{value}\" is no number, or too large"))
}

/// Numbers and ranges with plus signs between them.
fn parse_ranges(key: &str, value: &str) -> Result<Vec<(u16, u16)>, String> {
    value
        .split('+')
        .map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (parse_number(key, first)?, parse_number(key, last)?);
            if first > last {
                return Err(format!("{key}: \"{part}\" goes backwards"));
            }
            Ok((first, last))
        })
        .collect()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_text_says_everything() {
        let text = "queues=4+0-2,take=ports,ports=80+8000-8010,mode=copy,attach=generic,ring=64,need_wakeup=off,busy_poll=20,busy_budget=8";
        let expected = AfXdpOptions {
            queues: Some(vec![4, 0, 1, 2]),
            take: RedirectScope::Ports,
            ports: vec![(80, 80), (8000, 8010)],
            mode: CopyMode::Copy,
            attach: Attach::Generic,
            ring: 64,
            need_wakeup: false,
            busy_poll_us: 20,
            busy_budget: 8,
        };
        assert_eq!(text.parse(), Ok(expected));
        assert_eq!("".parse(), Ok(AfXdpOptions::default()));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, problem) in [
            ("queues", "\"queues\" is not"),
            ("queues=", "queues: \"\" is no number"),
            ("queues=3-1", "queues: \"3-1\" goes backwards"),
            ("queues=0+0", "queues: 0 is there twice"),
            ("queues=0-64", "queues: \"0-64\" are more than 64"),
            ("queues=4096", "queues: 4096 is above"),
            ("take=some", "take: \"some\" is none of addresses, ports, all"),
            ("ports=80", "ports: is for take=ports"),
            ("take=ports,ports=70000", "ports: \"70000\" is no number"),
            ("mode=fast", "mode: \"fast\" is none of auto, copy, zerocopy"),
            ("mode=copy,mode=copy", "mode: is given twice"),
            ("mode=zerocopy,attach=generic", "mode: zerocopy needs"),
            ("attach=skb", "attach: \"skb\" is none of"),
            ("ring=100", "ring: 100 is no power of two"),
            ("ring=32", "ring: 32 is no power of two from 64"),
            ("busy_poll=1000001", "busy_poll: 1000001 is above"),
            ("busy_budget=0", "busy_budget: must be"),
            ("need_wakeup=yes", "need_wakeup: \"yes\" is none of on, off"),
            ("colour=red", "colour: unknown key"),
        ] {
            let error = text.parse::<AfXdpOptions>().expect_err(text);
            assert!(error.starts_with(problem), "{text}: {error}");
        }
    }

    #[test]
    fn a_device_needs_a_name_and_something_to_take() {
        let good = AfXdpConfig {
            interface: "eth0".into(),
            addresses: vec![([10, 0, 0, 1].into(), 0)],
            queue_count: 2,
            ..AfXdpConfig::default()
        };
        assert_eq!(good.validate(), Ok(()));
        let error = |config: AfXdpConfig| config.validate().expect_err("wrong");
        assert!(error(AfXdpConfig { interface: "a/b".into(), ..good.clone() }).contains("no name"));
        assert!(error(AfXdpConfig { addresses: vec![], ..good.clone() }).starts_with("take: "));
        assert!(error(AfXdpConfig { queue_count: 65, ..good }).starts_with("queues: 65"));
    }
}
