//! One setting of the machine or of an interface, read and written as a text.

use super::cpu_mask::{format_mask, parse_mask};
use super::description::{CoalescingDescription, InterfaceDescription};
use ginnel_devices::ethtool::{self, Coalescing};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, ErrorKind};

/// Text of the table that distributes frames evenly to all queues.
pub const DEFAULT_TABLE: &str = "default";
/// Folders below which the files of settings are.
const FOLDERS: &[&str] =
    &["/proc/irq/", "/proc/sys/", "/sys/class/net/", "/sys/devices/system/cpu/", "/sys/kernel/mm/"];

/// A setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Setting {
    /// Numbers of queues of the interface: `rx=0 tx=0 combined=4`.
    Channels,
    /// Interrupt coalescing of the interface: `adaptive-rx=off rx-usecs=20 rx-frames=0`.
    Coalescing,
    /// Table of the interface that distributes frames to queues: `default`, or the queues.
    Indirection,
    /// A feature of the interface by its kernel name: `on` or `off`.
    Feature(String),
    /// A file that has the value.
    File(String),
    /// A file that has a mask of CPUs.
    Mask(String),
    /// A file with words, of which the chosen one is in brackets.
    Choice(String),
}

/// A setting and its new value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub key: SettingKey,
    /// The new value.
    pub to: String,
}

/// A setting, and the interface that it belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SettingKey {
    /// The interface; `None` for a setting of the machine.
    pub interface: Option<String>,
    pub setting: Setting,
}

impl Change {
    /// Makes a change of an interface.
    pub fn of(interface: &InterfaceDescription, setting: Setting, to: impl Into<String>) -> Self {
        Self { key: SettingKey { interface: Some(interface.name.clone()), setting }, to: to.into() }
    }

    /// Makes a change of the machine.
    pub fn of_machine(setting: Setting, to: impl Into<String>) -> Self {
        Self { key: SettingKey { interface: None, setting }, to: to.into() }
    }
}

impl SettingKey {
    /// Returns a name for messages: `eth0 channels`, or the path of a file.
    pub fn name(&self) -> String {
        let interface = self.interface.as_deref().unwrap_or_default();
        match &self.setting {
            Setting::Channels => format!("{interface} channels"),
            Setting::Coalescing => format!("{interface} coalescing"),
            Setting::Indirection => format!("{interface} table of queues"),
            Setting::Feature(name) => format!("{interface} {name}"),
            Setting::File(path) | Setting::Mask(path) | Setting::Choice(path) => path.clone(),
        }
    }

    /// Returns whether the setting is a file of an interface in `/sys`.
    pub fn is_in_sysfs(&self) -> bool {
        matches!(&self.setting, Setting::File(path) | Setting::Mask(path) | Setting::Choice(path)
            if path.starts_with("/sys/class/net/"))
    }

    fn interface(&self) -> io::Result<&str> {
        self.interface.as_deref().ok_or_else(|| io::Error::other("the interface is not known"))
    }

    /// Reads the value.
    ///
    /// # Errors
    /// The setting does not exist (any more), or may not be read.
    pub fn read(&self) -> io::Result<String> {
        let unsupported = || io::Error::from(ErrorKind::Unsupported);
        Ok(match &self.setting {
            Setting::Channels => {
                let channels = ethtool::channels(self.interface()?)?.ok_or_else(unsupported)?;
                channels_value(channels.rx, channels.tx, channels.combined)
            }
            Setting::Coalescing => {
                let Coalescing { adaptive_rx, rx_usecs, rx_frames } =
                    ethtool::coalescing(self.interface()?)?.ok_or_else(unsupported)?;
                coalescing_value(CoalescingDescription { adaptive_rx, rx_usecs, rx_frames })
            }
            Setting::Indirection => {
                let interface = self.interface()?;
                let table = ethtool::indirection(interface)?.ok_or_else(unsupported)?;
                let queues =
                    ethtool::channels(interface)?.map_or(1, |channels| channels.rx + channels.combined);
                table_value(&table, queues)
            }
            Setting::Feature(name) => {
                let features = ethtool::features(self.interface()?)?;
                let feature =
                    features.iter().find(|feature| feature.name == *name).ok_or_else(unsupported)?;
                if feature.on { "on".into() } else { "off".into() }
            }
            Setting::File(path) => fs::read_to_string(checked(path)?)?.trim().to_owned(),
            Setting::Mask(path) => {
                let cpus = parse_mask(&fs::read_to_string(checked(path)?)?);
                format_mask(&cpus.ok_or_else(|| io::Error::from(ErrorKind::InvalidData))?)
            }
            Setting::Choice(path) => {
                let text = fs::read_to_string(checked(path)?)?;
                chosen(&text).ok_or_else(|| io::Error::from(ErrorKind::InvalidData))?.to_owned()
            }
        })
    }

    /// Writes a value.
    ///
    /// # Errors
    /// The text is no value of this setting, or the kernel does not permit it.
    pub fn write(&self, value: &str) -> io::Result<()> {
        let invalid =
            || io::Error::new(ErrorKind::InvalidInput, format!("{value:?} is no value of this setting"));
        match &self.setting {
            Setting::Channels => {
                let [rx, tx, combined] = numbers(value, ["rx", "tx", "combined"]).ok_or_else(invalid)?;
                ethtool::set_channels(self.interface()?, rx, tx, combined)
            }
            Setting::Coalescing => {
                let rest = value.strip_prefix("adaptive-rx=").and_then(|rest| rest.split_once(' '));
                let (adaptive, rest) = rest.ok_or_else(invalid)?;
                let [rx_usecs, rx_frames] = numbers(rest, ["rx-usecs", "rx-frames"]).ok_or_else(invalid)?;
                let adaptive_rx = parse_switch(adaptive).ok_or_else(invalid)?;
                let values = Coalescing { adaptive_rx, rx_usecs, rx_frames };
                ethtool::set_coalescing(self.interface()?, values)
            }
            Setting::Indirection => {
                let queues: Option<Vec<u32>> = match value {
                    DEFAULT_TABLE => Some(Vec::new()),
                    list => list.split(' ').map(|queue| queue.parse().ok()).collect(),
                };
                ethtool::set_indirection(self.interface()?, &queues.ok_or_else(invalid)?)
            }
            Setting::Feature(name) => {
                let on = parse_switch(value).ok_or_else(invalid)?;
                ethtool::set_feature(self.interface()?, name, on)
            }
            Setting::File(path) | Setting::Mask(path) | Setting::Choice(path) => {
                fs::write(checked(path)?, value)
            }
        }
    }
}

/// Returns the path if it is that of a setting.
fn checked(path: &str) -> io::Result<&str> {
    let is_setting = FOLDERS.iter().any(|folder| path.starts_with(folder)) && !path.contains("..");
    is_setting.then_some(path).ok_or_else(|| io::Error::other("is no file of a setting"))
}

/// Formats numbers of queues.
pub fn channels_value(rx: u32, tx: u32, combined: u32) -> String {
    format!("rx={rx} tx={tx} combined={combined}")
}

/// Formats coalescing.
pub fn coalescing_value(values: CoalescingDescription) -> String {
    let CoalescingDescription { adaptive_rx, rx_usecs, rx_frames } = values;
    let adaptive = if adaptive_rx { "on" } else { "off" };
    format!("adaptive-rx={adaptive} rx-usecs={rx_usecs} rx-frames={rx_frames}")
}

/// Formats a table of queues.
fn table_value(table: &[u32], queues: u32) -> String {
    let queues = queues.max(1);
    if (0..).zip(table).all(|(index, queue): (u32, &u32)| *queue == index % queues) {
        return DEFAULT_TABLE.into();
    }
    table.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// Parses numbers with their names.
fn numbers<const N: usize>(text: &str, names: [&str; N]) -> Option<[u32; N]> {
    let mut words = text.split(' ');
    let mut found = [0; N];
    for (name, number) in names.iter().zip(&mut found) {
        *number = words.next()?.strip_prefix(name)?.strip_prefix('=')?.parse().ok()?;
    }
    words.next().is_none().then_some(found)
}

/// Parses `on` or `off`.
fn parse_switch(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
}

/// Returns the word in brackets.
pub fn chosen(text: &str) -> Option<&str> {
    text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_parsed_as_they_are_formatted() {
        assert_eq!(numbers(&channels_value(1, 2, 3), ["rx", "tx", "combined"]), Some([1, 2, 3]));
        assert_eq!(numbers("rx=1 tx=2", ["rx", "tx", "combined"]), None);
        assert_eq!(numbers("rx=1 x", ["rx"]), None);
        assert_eq!(table_value(&[0, 1, 2, 0, 1, 2], 3), "default");
        assert_eq!(table_value(&[0, 1, 0, 1], 3), "0 1 0 1");
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen("always"), None);
    }

    #[test]
    fn damaged_values_are_not_written() {
        // No interface has this name, so a value that is accepted ends with another error.
        let interface = Some("no-such-nic".to_owned());
        let error_of = |setting: Setting, value: &str| {
            let key = SettingKey { interface: interface.clone(), setting };
            key.write(value).unwrap_err().kind()
        };
        let feature = || Setting::Feature("rx-gro".into());
        for value in ["", "of", "On", "on ", "1"] {
            assert_eq!(error_of(feature(), value), ErrorKind::InvalidInput, "{value:?}");
            let coalescing = format!("adaptive-rx={value} rx-usecs=20 rx-frames=0");
            assert_eq!(error_of(Setting::Coalescing, &coalescing), ErrorKind::InvalidInput, "{value:?}");
        }
        for value in ["on", "off"] {
            assert_ne!(error_of(feature(), value), ErrorKind::InvalidInput, "{value:?}");
            let coalescing = format!("adaptive-rx={value} rx-usecs=20 rx-frames=0");
            assert_ne!(error_of(Setting::Coalescing, &coalescing), ErrorKind::InvalidInput, "{value:?}");
        }
    }

    #[test]
    fn only_files_of_settings_are_written() {
        for path in ["/etc/passwd", "/proc/sys/../../etc/passwd", "proc/sys/x"] {
            let key = SettingKey { interface: None, setting: Setting::File(path.into()) };
            assert_eq!(key.write("x").unwrap_err().to_string(), "is no file of a setting", "{path}");
            assert!(key.read().is_err());
        }
    }
}
