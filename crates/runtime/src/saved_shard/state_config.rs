//! The part of a configuration on which a saved state depends.

use super::digest;
use crate::config::Config;
use core::fmt;
use core::str::FromStr;
use ginnel_stack::priority;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

/// File in the directory of a stack with the [`StateConfig`] of its running shards.
const FILE: &str = "state-config";

/// Why shards of a configuration cannot continue with a saved state.
pub(crate) const OTHER_DISTRIBUTION: &str =
    "the configuration distributes frames among the shards in another way";
pub(crate) const OTHER_INTERFACES: &str = "the configuration has other devices or links, or in another order";
pub(crate) const OTHER_PRIORITIES: &str = "[priority] was switched on or off";

/// Identifies the part of a configuration that must not differ between the shards that save a state and those
/// that continue with it. It is known before any shard is stopped. As text it is one line of words without
/// blanks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateConfig {
    /// Digests of the texts that are part of a saved state.
    distribution: u64,
    interfaces: u64,
    has_priorities: bool,
}

impl StateConfig {
    /// Returns the part of a configuration, whose shards have no function for priorities.
    pub fn of(config: &Config) -> Self {
        Self {
            distribution: match config.shards.count {
                1 => digest(b""),
                count => digest(format!("{count}: {}", distribution(config)).as_bytes()),
            },
            interfaces: digest(interfaces(config).as_bytes()),
            has_priorities: priority::COMPILED && config.priority.is_enabled(false),
        }
    }

    /// Returns why shards of this configuration cannot continue with the state of shards that have the
    /// configuration `running`; `None` if they can.
    pub fn difference(&self, running: &Self) -> Option<&'static str> {
        match self {
            _ if self.distribution != running.distribution => Some(OTHER_DISTRIBUTION),
            _ if self.interfaces != running.interfaces => Some(OTHER_INTERFACES),
            _ if self.has_priorities != running.has_priorities => Some(OTHER_PRIORITIES),
            _ => None,
        }
    }

    /// Writes the value to the directory of the stack whose shards have this configuration.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn record(&self, directory: &Path) -> io::Result<()> {
        fs::write(directory.join(FILE), format!("{self}\n"))
    }

    /// Removes the value of shards that have ended: the next ones may be of a version that writes none.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn forget(directory: &Path) -> io::Result<()> {
        fs::remove_file(directory.join(FILE)).or_else(|e| match e.kind() {
            ErrorKind::NotFound => Ok(()),
            _ => Err(e),
        })
    }

    /// Returns the value of the running shards of the stack with this directory; `None` if they have written
    /// none.
    pub fn recorded(directory: &Path) -> Option<Self> {
        fs::read_to_string(directory.join(FILE)).ok()?.parse().ok()
    }
}

impl fmt::Display for StateConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { distribution, interfaces, has_priorities } = self;
        write!(f, "distribution={distribution:016x} interfaces={interfaces:016x} priorities={has_priorities}")
    }
}

impl FromStr for StateConfig {
    type Err = ();

    /// Reads what [`Display`](fmt::Display) has written. Words may follow.
    fn from_str(text: &str) -> Result<Self, ()> {
        let mut words = text.split_whitespace();
        let mut value = |name: &str| words.next()?.strip_prefix(name)?.strip_prefix('=');
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let mut parse = || {
            let distribution = hex(value("distribution")?)?;
            let interfaces = hex(value("interfaces")?)?;
            let has_priorities = value("priorities")?.parse().ok()?;
            Some(Self { distribution, interfaces, has_priorities })
        };
        parse().ok_or(())
    }
}

/// Describes how frames are distributed among several shards, as far as the configuration says.
pub(crate) fn distribution(config: &Config) -> String {
    let devices: Vec<_> = config.devices.iter().map(|device| (&device.name, &device.shards)).collect();
    format!("{:?} {devices:?}", config.steering)
}

/// Describes the devices and links to which a saved state refers by number.
pub(crate) fn interfaces(config: &Config) -> String {
    let devices: Vec<_> = config.devices.iter().map(|device| &device.name).collect();
    let links: Vec<_> = config.links.iter().map(|link| (&link.device, link.vlan)).collect();
    format!("{devices:?} {links:?}")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const DEVICE: &str =
        "[[device]]\nname = \"m\"\nkind = \"memory\"\n[[link]]\nname = \"l\"\ndevice = \"m\"\n";

    fn of(text: &str) -> StateConfig {
        StateConfig::of(&Config::from_toml("lab", text).unwrap())
    }

    #[test]
    fn text_is_read_again() {
        for text in [DEVICE.to_owned(), format!("{DEVICE}[priority]\nenabled = true\n")] {
            let config = of(&text);
            assert_eq!(format!("{config} more").parse(), Ok(config));
        }
        let text = of(DEVICE).to_string();
        assert_eq!(text.split_whitespace().count(), 3, "{text}");
        for wrong in ["", "distribution=1 interfaces=2", "distribution=1 interfaces=g priorities=true"] {
            assert_eq!(wrong.parse::<StateConfig>(), Err(()), "{wrong}");
        }
    }

    #[test]
    fn only_what_a_state_depends_on_differs() {
        let [one, two] = ["", "[shards]\ncount = 2\n"].map(|shards| format!("{shards}{DEVICE}"));
        let port_bits = "[steering]\nopened = \"port-bits\"\n";
        for (running, next, expected) in [
            (one.clone(), format!("[shard]\nspin_us = 7\n{one}"), None),
            // A single shard gets all frames.
            (one.clone(), format!("{port_bits}{one}"), None),
            (two.clone(), format!("{port_bits}{two}"), Some(OTHER_DISTRIBUTION)),
            (two.clone(), one.clone(), Some(OTHER_DISTRIBUTION)),
            (one.clone(), one.replace("\"m\"", "\"n\""), Some(OTHER_INTERFACES)),
            (one.clone(), format!("{one}vlan = 5\n"), Some(OTHER_INTERFACES)),
            (one.clone(), format!("[priority]\nenabled = true\n{one}"), Some(OTHER_PRIORITIES)),
            (one.clone(), format!("[priority]\nenabled = false\n{one}"), None),
        ] {
            assert_eq!(of(&next).difference(&of(&running)), expected, "{next}");
        }
    }
}
