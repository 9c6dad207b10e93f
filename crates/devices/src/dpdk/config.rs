//! Configuration of a DPDK device, and its text form.

use crate::key_values::{self, number_in, one_of};
use crate::partial_checksums::PartialChecksums;
use std::str::FromStr;

/// Maximum number of queues: the number of cores of the largest machines that are supported.
pub const QUEUES_MAX: u16 = 64;
/// Bytes of the longest name of a port.
const NAME_BYTES_MAX: usize = 63;
/// Sizes of rings in descriptors.
const RING_RANGE: core::ops::RangeInclusive<u16> = 64..=32_768;
/// Numbers of buffers of a queue.
const BUFFERS_RANGE: core::ops::RangeInclusive<u32> = 1024..=1_048_576;
/// Sizes of the memory of a process in MiB.
const MEMORY_RANGE: core::ops::RangeInclusive<u32> = 32..=1_048_576;
/// Longest time between two looks at a port, in microseconds.
const POLL_US_MAX: u32 = 1_000_000;
/// Arguments that would end the process. EAL also takes the first letters of long ones.
const FORBIDDEN_ARGUMENTS: [&str; 4] = ["-h", "--help", "-v", "--version"];
/// Bytes from which on the beginning of a long argument is unique.
const ABBREVIATION_BYTES_MIN: usize = 4;

/// Use of huge pages, the text key `huge`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Uses them if enough are free.
    #[default]
    Auto,
    /// Uses them, or fails.
    On,
    /// Uses ordinary pages.
    Off,
}

/// Options of a DPDK device. Their text form is for example `args=iface=eth0+qpairs=2,huge=off`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DpdkOptions {
    /// Arguments of the driver, `key=value`. Text key `args`, separated by `+`, default none.
    pub driver_arguments: Vec<String>,
    /// Queues in each direction, 1 to 64. Text key `queues`, default one for each shard.
    pub queues: Option<u16>,
    /// Descriptors of each ring, 64 to 32,768, within the limits of the port. Text key `ring`, default 1,024.
    pub ring: u16,
    /// Buffers of each queue, up to 1,048,576: at least 1,024 more than its two rings have descriptors. Text
    /// key `buffers`, default 8,192, or more if the rings need more.
    pub buffers: Option<u32>,
    /// Longest time until an idle shard looks at the port again, 1 to 1,000,000 µs. The first sleep after a
    /// frame lasts 50 µs, and each further one twice as long. Text key `poll_us`, default 1,000.
    pub poll_us: u32,
    /// Treatment of frames whose checksum is partial. Text key `partial_checksums`, default `auto`.
    pub partial_checksums: PartialChecksums,
    /// How EAL is started, which is done once for all devices of a process.
    pub eal: EalOptions,
}

/// How DPDK's environment abstraction layer is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EalOptions {
    /// Use of huge pages. Text key `huge`.
    pub huge: HugePages,
    /// Memory of the process for rings and buffers, 32 to 1,048,576 MiB. Text key `memory_mib`, default 256.
    pub memory_mib: u32,
    /// Further arguments of EAL. Text key `eal`, separated by `+`, default none.
    pub arguments: Vec<String>,
}

impl Default for EalOptions {
    fn default() -> Self {
        Self { huge: HugePages::Auto, memory_mib: 256, arguments: Vec::new() }
    }
}

impl Default for DpdkOptions {
    fn default() -> Self {
        Self {
            driver_arguments: Vec::new(),
            queues: None,
            ring: 1024,
            buffers: None,
            poll_us: 1000,
            partial_checksums: PartialChecksums::Auto,
            eal: EalOptions::default(),
        }
    }
}

impl DpdkOptions {
    /// Returns the name of a port and the arguments of its driver as DPDK reads them: `NAME,KEY=VALUE,…`.
    #[must_use]
    pub fn device_arguments(&self, port: &str) -> String {
        let arguments = self.driver_arguments.iter().map(String::as_str);
        core::iter::once(port).chain(arguments).collect::<Vec<_>>().join(",")
    }
}

impl FromStr for DpdkOptions {
    type Err = String;

    /// Parses `key=value` pairs separated by commas; an empty text gives the defaults.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut options = Self::default();
        for pair in key_values::pairs(text).filter(|_| !text.is_empty()) {
            let (key, value) = pair?;
            match key {
                "args" => options.driver_arguments = driver_arguments(value)?,
                "queues" => options.queues = Some(number_in(key, value, 1..=QUEUES_MAX)?),
                "ring" => options.ring = number_in(key, value, RING_RANGE)?,
                "buffers" => options.buffers = Some(number_in(key, value, BUFFERS_RANGE)?),
                "poll_us" => options.poll_us = number_in(key, value, 1..=POLL_US_MAX)?,
                "partial_checksums" => {
                    options.partial_checksums = one_of(key, value, PartialChecksums::WORDS)?
                }
                "huge" => {
                    let all = [("auto", HugePages::Auto), ("on", HugePages::On), ("off", HugePages::Off)];
                    options.eal.huge = one_of(key, value, all)?;
                }
                "memory_mib" => options.eal.memory_mib = number_in(key, value, MEMORY_RANGE)?,
                "eal" => options.eal.arguments = eal_arguments(value)?,
                _ => {
                    return Err(format!(
                        "{key}: unknown key (args, queues, ring, buffers, poll_us, partial_checksums, huge, memory_mib, eal)"
                    ));
                }
            }
        }
        Ok(options)
    }
}

fn driver_arguments(value: &str) -> Result<Vec<String>, String> {
    let arguments = value.split('+').map(|argument| match argument.split_once('=') {
        Some((key, _)) if !key.is_empty() => Ok(argument.to_owned()),
        _ => Err(format!("args: \"{argument}\" is not of the form key=value")),
    });
    arguments.collect()
}

fn eal_arguments(value: &str) -> Result<Vec<String>, String> {
    let arguments = value.split('+').map(|argument| {
        let is_abbreviated = argument.len() >= ABBREVIATION_BYTES_MIN;
        let is = |name: &&str| *name == argument || is_abbreviated && name.starts_with(argument);
        if FORBIDDEN_ARGUMENTS.iter().any(is) {
            return Err(format!("eal: \"{argument}\" would end the process"));
        }
        if argument.is_empty() || argument.contains('\0') {
            return Err(format!("eal: \"{argument}\" is not an argument"));
        }
        Ok(argument.to_owned())
    });
    arguments.collect()
}

/// Configuration of a DPDK device, see [`open_queues`](super::open_queues).
#[derive(Clone, Debug, Default)]
pub struct DpdkConfig {
    /// Name of the port: a PCI address (`0000:03:00.0`), or the name of a virtual device (`net_tap0`).
    pub port: String,
    /// Options.
    pub options: DpdkOptions,
    /// Number of queues; 0 takes that of the options, or 1.
    pub queues: u16,
    /// Largest IP packet in bytes. Default: the MTU of the port.
    pub mtu: Option<usize>,
    /// MAC address. Default: that of the port.
    pub mac: Option<[u8; 6]>,
    /// Leaves checksums and segmentation to the port if it can do them.
    pub offload: bool,
    /// All ports of the process with their arguments ([`DpdkOptions::device_arguments`]), which EAL must know
    /// from the start if they are PCI devices.
    pub all_ports: Vec<String>,
}

impl DpdkConfig {
    /// Returns whether a name is the address of a PCI device.
    #[must_use]
    pub fn is_pci(name: &str) -> bool {
        name.contains(':') && name.bytes().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte))
    }

    /// Returns the number of queues.
    ///
    /// # Errors
    /// The port has no valid name, or the numbers of queues contradict each other.
    pub fn validate(&self) -> Result<u16, String> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_:.-".contains(&byte);
        if !(1..=NAME_BYTES_MAX).contains(&self.port.len()) || !self.port.bytes().all(is_plain) {
            return Err(format!(
                "\"{}\" is not the name of a port: a PCI address as 0000:03:00.0, or a driver and a number as net_tap0",
                self.port
            ));
        }
        if let Some(mac) = self.mac.filter(|mac| mac[0] & 1 != 0) {
            return Err(format!("{mac:02x?} is a group address, and cannot be the MAC address of a port"));
        }
        match (self.queues, self.options.queues) {
            (0, queues) => Ok(queues.unwrap_or(1)),
            (queues, Some(configured)) if queues != configured => {
                Err(format!("queues: {configured} are configured, and {queues} shards need one each"))
            }
            (queues, _) if queues > QUEUES_MAX => Err(format!("queues: {queues} is above {QUEUES_MAX}")),
            (queues, _) => Ok(queues),
        }
    }

    /// Returns the value of an argument of the driver.
    #[must_use]
    pub fn driver_argument(&self, key: &str) -> Option<&str> {
        let pairs = self.options.driver_arguments.iter().filter_map(|pair| pair.split_once('='));
        pairs.into_iter().find(|(name, _)| *name == key).map(|(_, value)| value)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn text_sets_all_keys() {
        let text = "args=iface=eth0+qpairs=2,queues=2,ring=512,buffers=4096,poll_us=20,partial_checksums=off,huge=on,memory_mib=512,eal=--log-level+8";
        let expected = DpdkOptions {
            driver_arguments: vec!["iface=eth0".into(), "qpairs=2".into()],
            queues: Some(2),
            ring: 512,
            buffers: Some(4096),
            poll_us: 20,
            partial_checksums: PartialChecksums::Reject,
            eal: EalOptions {
                huge: HugePages::On,
                memory_mib: 512,
                arguments: vec!["--log-level".into(), "8".into()],
            },
        };
        assert_eq!(text.parse(), Ok(expected));
        assert_eq!("".parse(), Ok(DpdkOptions::default()));
    }

    #[test]
    fn errors_name_the_invalid_value() {
        for (text, problem) in [
            ("args", "\"args\" is not of the form"),
            ("args=iface", "args: \"iface\" is not of the form"),
            ("args=iface=a+=b", "args: \"=b\" is not of the form"),
            ("queues=0", "queues: \"0\" is not a number from 1 to 64"),
            ("queues=65", "queues: \"65\""),
            ("queues=1,queues=1", "queues: is repeated"),
            ("ring=63", "ring: \"63\" is not a number from 64 to 32768"),
            ("buffers=1023", "buffers: \"1023\""),
            ("memory_mib=31", "memory_mib: \"31\" is not a number from 32"),
            ("poll_us=0", "poll_us: \"0\" is not a number from 1 to 1000000"),
            ("huge=maybe", "huge: \"maybe\" is not one of auto, on, off"),
            ("partial_checksums=x", "partial_checksums: \"x\" is not one of"),
            ("eal=--help", "eal: \"--help\" would end the process"),
            ("eal=--he", "eal: \"--he\" would end the process"),
            ("eal=--ver", "eal: \"--ver\" would end the process"),
            ("eal=", "eal: \"\" is not an argument"),
            ("colour=red", "colour: unknown key (args, queues"),
        ] {
            let error = text.parse::<DpdkOptions>().expect_err(text);
            assert!(error.starts_with(problem), "{text}: {error}");
        }
    }

    #[test]
    fn port_names_and_queues_are_checked() {
        let good = DpdkConfig { port: "0000:03:00.0".into(), ..DpdkConfig::default() };
        assert_eq!(good.validate(), Ok(1));
        assert!(DpdkConfig::is_pci(&good.port) && !DpdkConfig::is_pci("net_tap0"));
        let error = |config: DpdkConfig| config.validate().expect_err("wrong");
        for name in ["", "net tap", "net_tap0,iface=x", &"x".repeat(64)] {
            let config = DpdkConfig { port: name.into(), ..DpdkConfig::default() };
            assert!(error(config).contains("is not the name of a port"), "{name}");
        }
        assert!(error(DpdkConfig { mac: Some([1; 6]), ..good.clone() }).contains("group address"));
        let options = DpdkOptions { queues: Some(2), ..DpdkOptions::default() };
        assert_eq!(DpdkConfig { options: options.clone(), ..good.clone() }.validate(), Ok(2));
        let error = error(DpdkConfig { options, queues: 3, ..good });
        assert_eq!(error, "queues: 2 are configured, and 3 shards need one each");
    }

    #[test]
    fn driver_arguments_are_found_by_key() {
        let options = "args=iface=eth0+qpairs=2".parse().expect("valid");
        let config = DpdkConfig { options, ..DpdkConfig::default() };
        assert_eq!(config.options.device_arguments("net_tap0"), "net_tap0,iface=eth0,qpairs=2");
        assert_eq!((config.driver_argument("qpairs"), config.driver_argument("mac")), (Some("2"), None));
    }
}
