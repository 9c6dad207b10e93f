//! How the interfaces of AF_XDP devices distribute frames to their queues, and so to shards. A stack that
//! knows it lets each flow belong to the shard to which the interface delivers its packets.

use crate::config::{Config, DeviceConfig, DeviceKind};
use ginnel_devices::rss::Rss;
use ginnel_stack::handle::PortId;
use ginnel_stack::steering::toeplitz::KEY;
use ginnel_stack::steering::{INDIRECTION_ENTRIES, INDIRECTION_ENTRIES_MAX, NO_SHARD, Steering};

/// The key of the devices' hash, and their indirection tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceTables {
    key: [u8; 40],
    /// By number of the device: the shard of each entry, or [`NO_SHARD`]; `None` for a device without such a
    /// table.
    tables: Vec<Option<Vec<u8>>>,
}

impl DeviceTables {
    #[cfg(all(test, not(loom)))]
    pub(crate) fn new(key: [u8; 40], tables: Vec<Option<Vec<u8>>>) -> Self {
        Self { key, tables }
    }

    /// Lets flows belong to the shards to which the devices deliver them. `shards` are the shards of each
    /// device.
    pub(crate) fn apply(&self, steering: &mut Steering, shards: &[Vec<u8>]) {
        steering.set_hash_key(&self.key);
        steering.set_device_shards(shards.iter().cloned());
        for (number, table) in self.tables.iter().enumerate() {
            if let Some(table) = table {
                // Cannot truncate: the engine numbers devices with 16 bits.
                let is_set = steering.set_device_table(PortId(number as u16), table);
                debug_assert!(is_set, "the entries are shards of the device");
            }
        }
    }
}

/// A line of the log about the distribution of frames.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Message {
    Info(String),
    Warning(String),
}

/// Reads the tables of the interfaces, after their queues are open: attaching a program makes some drivers
/// fill the table again. Logs why the shards of packets are not known.
pub(crate) fn read(config: &Config, read: impl Fn(&str) -> Result<Rss, String>) -> Option<DeviceTables> {
    let (tables, messages) = tables(config, read);
    for message in messages {
        match message {
            Message::Info(text) => tracing::info!("{text}"),
            Message::Warning(text) => tracing::warn!("{text}"),
        }
    }
    tables
}

/// How a device distributes frames to its shards.
enum Distribution {
    /// It has one shard, where all frames arrive.
    OneShard,
    /// The operator keeps the stack's own hash.
    Off,
    /// The key of its hash, and the shard of each entry of its table.
    Known([u8; 40], Vec<u8>),
    /// The reason why it is not known.
    Unknown(String),
}

impl Distribution {
    fn of(config: &Config, device: &DeviceConfig, read: impl Fn(&str) -> Result<Rss, String>) -> Self {
        let shards = config.shards_of(device);
        if shards.len() < 2 {
            return Self::OneShard;
        }
        if device.af_xdp.as_ref().is_some_and(|options| !options.rss) {
            return Self::Off;
        }
        match read(device.interface()).and_then(|rss| shards_of_entries(device, &shards, &rss)) {
            Ok((key, entries)) => Self::Known(key, entries),
            Err(problem) => Self::Unknown(problem),
        }
    }

    /// Returns the key that decides about the flows of the device; `None` if any does.
    fn key(&self) -> Option<[u8; 40]> {
        match self {
            Self::OneShard => None,
            Self::Known(key, _) => Some(*key),
            // Without a table, the stack's own hash decides.
            Self::Off | Self::Unknown(_) => Some(KEY),
        }
    }

    fn table(self) -> Option<Vec<u8>> {
        match self {
            Self::Known(_, entries) => Some(entries),
            _ => None,
        }
    }
}

/// Returns the tables of the devices, given what the driver of an interface tells, and what the log says; no
/// tables if the stack's own hash decides.
fn tables(
    config: &Config,
    read: impl Fn(&str) -> Result<Rss, String>,
) -> (Option<DeviceTables>, Vec<Message>) {
    // Other devices deliver the stack's own hash, or distribute their frames by it.
    if config.shards.count < 2 || config.devices.iter().any(|device| device.kind != DeviceKind::AfXdp) {
        return (None, Vec::new());
    }
    let devices = || config.devices.iter();
    let found: Vec<_> = devices().map(|device| Distribution::of(config, device, &read)).collect();
    // A stack has one hash. Without a common key, that of one device would spoil the others.
    let mut keys = found.iter().filter_map(Distribution::key);
    let key = keys.next().filter(|first| keys.all(|key| key == *first));
    let is_usual = |(found, device): (&Distribution, &DeviceConfig)| match found {
        Distribution::Known(key, table) => *key == KEY && is_own(table, &config.shards_of(device)),
        _ => true,
    };
    let mut messages = Vec::new();
    for (found, device) in found.iter().zip(devices()) {
        report(found, device, key.is_some() || is_usual((found, device)), &mut messages);
    }
    let needs_no_table = found.iter().zip(devices()).all(is_usual);
    let tables = key
        .filter(|_| !needs_no_table)
        .map(|key| DeviceTables { key, tables: found.into_iter().map(Distribution::table).collect() });
    (tables, messages)
}

/// Says what is known about a device. `is_followed` tells whether flows belong to the shards of its table.
fn report(found: &Distribution, device: &DeviceConfig, is_followed: bool, messages: &mut Vec<Message>) {
    let name = device.interface();
    let crosses = |problem: &str| {
        Message::Info(format!(
            "AF_XDP on {name}: frames may arrive at shards that do not own them, and are forwarded: {problem}"
        ))
    };
    match found {
        Distribution::OneShard | Distribution::Off => {}
        Distribution::Unknown(problem) => messages.push(crosses(problem)),
        Distribution::Known(_, entries) => {
            messages.push(match is_followed {
                true => Message::Info(format!(
                    "AF_XDP on {name}: connections belong to shards by the hash of the interface, whose table has {} entries",
                    entries.len()
                )),
                false => crosses(
                    "the devices do not have one known key of the hash, so the stack's own hash decides (ethtool -X … hkey)",
                ),
            });
            let lost = entries.iter().filter(|&&shard| shard == NO_SHARD).count();
            if lost > 0 {
                messages.push(Message::Warning(format!(
                    "AF_XDP on {name}: {lost} of {} entries of its indirection table name queues that the stack does not use, and their frames do not reach it (ethtool -X … equal)",
                    entries.len()
                )));
            }
        }
    }
}

/// Returns the key of an interface's hash, and the shard of each entry of its table: [`NO_SHARD`] for a queue
/// that the stack does not use.
fn shards_of_entries(device: &DeviceConfig, shards: &[u8], rss: &Rss) -> Result<([u8; 40], Vec<u8>), String> {
    if rss.queues.len() > INDIRECTION_ENTRIES_MAX {
        return Err(format!(
            "its indirection table has {} entries, more than {INDIRECTION_ENTRIES_MAX}",
            rss.queues.len()
        ));
    }
    let numbers = device.af_xdp.as_ref().and_then(|options| options.queues.clone());
    // Cannot truncate: there are at most 64 shards.
    let numbers = numbers.unwrap_or_else(|| (0..shards.len() as u16).collect());
    let shard = |queue: &u32| {
        let position = numbers.iter().position(|&number| u32::from(number) == *queue);
        position.and_then(|position| shards.get(position)).copied().unwrap_or(NO_SHARD)
    };
    let entries: Vec<u8> = rss.queues.iter().map(shard).collect();
    match shards.iter().find(|shard| !entries.contains(shard)) {
        None => Ok((rss.key, entries)),
        // No connection could be opened there.
        Some(shard) => {
            Err(format!("its indirection table has no queue of shard {shard} (ethtool -X … equal)"))
        }
    }
}

/// Returns whether a table distributes flows as the stack does by itself.
fn is_own(table: &[u8], shards: &[u8]) -> bool {
    let entries = INDIRECTION_ENTRIES as usize;
    table.len().is_multiple_of(entries)
        && table.iter().enumerate().all(|(entry, shard)| shards[entry % entries % shards.len()] == *shard)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::from_toml("x.toml", text).unwrap()
    }

    fn two_devices(more: &str) -> Config {
        config(&format!(
            "[shards]\ncount = 4\n\
             [[device]]\nname = \"a\"\nkind = \"af_xdp\"\nshards = [2, 3]\n{more}\
             [[device]]\nname = \"b\"\nkind = \"af_xdp\"\nshards = [0, 1, 2]\n\
             [[link]]\nname = \"la\"\ndevice = \"a\"\naddresses = [\"10.1.0.1/24\"]\n\
             [[link]]\nname = \"lb\"\ndevice = \"b\"\naddresses = [\"10.2.0.1/24\"]\n"
        ))
    }

    fn distribution(key: u8, entries: u32, queues: u32) -> Rss {
        Rss { key: [key; 40], queues: (0..entries).map(|entry| entry / 2 % queues).collect() }
    }

    fn found(config: &Config, read: impl Fn(&str) -> Result<Rss, String>) -> Option<DeviceTables> {
        tables(config, read).0
    }

    #[test]
    fn entries_name_the_shards_of_their_queues() {
        let read = |name: &str| Ok(distribution(7, 8, if name == "a" { 2 } else { 3 }));
        let expected = [vec![2, 2, 3, 3, 2, 2, 3, 3], vec![0, 0, 1, 1, 2, 2, 0, 0]].map(Some);
        let tables = DeviceTables { key: [7; 40], tables: expected.to_vec() };
        assert_eq!(found(&two_devices(""), read), Some(tables));
    }

    #[test]
    fn entries_of_unused_queues_have_no_shard() {
        // The second shard has queue 0. The stack does not use queue 2.
        let config = two_devices("af_xdp = \"queues=1+0\"\n");
        let (found, messages) = tables(&config, |_| Ok(distribution(7, 8, 3)));
        let expected = vec![3, 3, 2, 2, NO_SHARD, NO_SHARD, 3, 3];
        assert_eq!(found.unwrap().tables[0].as_ref(), Some(&expected));
        let warned = |message: &&Message| matches!(message, Message::Warning(_));
        let warnings: Vec<_> = messages.iter().filter(warned).collect();
        assert!(
            matches!(&warnings[..], [Message::Warning(text)] if text.contains("on a: 2 of 8 entries")),
            "{messages:?}"
        );
    }

    /// The stack has one hash. If it were that of one device, packets of another one would cross.
    #[test]
    fn devices_without_a_common_key_have_no_tables() {
        let queues = |name: &str| if name == "a" { 2 } else { 3 };
        let own = |name: &str| Rss { key: KEY, queues: (0..128).map(|entry| entry % queues(name)).collect() };
        let says = |messages: &[Message], text: &str| {
            let contains = |message: &&Message| matches!(message, Message::Info(it) if it.contains(text));
            messages.iter().filter(contains).count()
        };
        for other in ["a", "b"] {
            // One device has the stack's key and distribution, and keeps both.
            let read =
                |name: &str| Ok(if name == other { distribution(7, 8, queues(name)) } else { own(name) });
            let (found, messages) = tables(&two_devices(""), read);
            assert_eq!(found, None);
            let crosses = format!("on {other}: frames may arrive");
            assert_eq!((says(&messages, &crosses), says(&messages, "may arrive")), (1, 1), "{messages:?}");
            assert_eq!((says(&messages, "one known key"), messages.len()), (1, 2), "{messages:?}");
            // The key of one device is not known, so that it may be the stack's.
            let read = |name: &str| match name == other {
                true => Err("unknown".into()),
                false => Ok(distribution(7, 8, queues(name))),
            };
            let (found, messages) = tables(&two_devices(""), read);
            assert_eq!((found, says(&messages, "may arrive")), (None, 2), "{messages:?}");
        }
        // Each device has another key.
        let read = |name: &str| Ok(distribution(name.as_bytes()[0], 8, queues(name)));
        let (found, messages) = tables(&two_devices(""), read);
        assert_eq!((found, says(&messages, "one known key")), (None, 2), "{messages:?}");
        // The operator keeps the stack's own hash on one device, so it stays on both.
        assert_eq!(tables(&two_devices("af_xdp = \"rss=off\"\n"), read).0, None);
        assert_eq!(tables(&two_devices(""), |_| Err("unknown".into())).0, None);
    }

    #[test]
    fn devices_with_the_stacks_key_may_lack_a_table() {
        let read = |name: &str| match name {
            "a" => Ok(Rss { key: KEY, ..distribution(7, 8, 2) }),
            _ => Err("unknown".into()),
        };
        let found = found(&two_devices(""), read).unwrap();
        assert!(found.key == KEY && found.tables[0].is_some() && found.tables[1].is_none());
    }

    #[test]
    fn usual_distributions_need_no_table() {
        let usual = |name: &str| {
            let queues = if name == "a" { 2 } else { 3 };
            Ok(Rss { key: KEY, queues: (0..256).map(|entry| entry % 128 % queues).collect() })
        };
        assert_eq!(found(&two_devices(""), usual), None);
        let other = |name: &str| usual(name).map(|rss| Rss { key: [1; 40], ..rss });
        assert!(found(&two_devices(""), other).is_some());
        let shorter = |name: &str| usual(name).map(|rss| Rss { queues: rss.queues[..64].to_vec(), ..rss });
        assert!(found(&two_devices(""), shorter).is_some());
    }

    /// A shard that gets no flows could open no connections.
    #[test]
    fn each_shard_needs_an_entry() {
        let read = |_: &str| Ok(Rss { key: KEY, ..distribution(7, 8, 2) });
        let found = found(&two_devices(""), read).unwrap();
        assert!(found.tables[0].is_some() && found.tables[1].is_none(), "{found:?}");
    }

    /// Devices of other kinds deliver, or use, the hash with the stack's key.
    #[test]
    fn other_devices_keep_the_stacks_hash() {
        let read = |_: &str| Ok(distribution(7, 8, 2));
        let mut mixed = two_devices("");
        mixed.devices[1].kind = DeviceKind::Tap;
        assert_eq!(found(&mixed, read), None);
    }

    // limit: entries of an interface's table
    #[test]
    fn longest_table_is_used() {
        let entries = INDIRECTION_ENTRIES_MAX as u32;
        let found = |entries| found(&two_devices(""), |_| Ok(distribution(7, entries, 3)));
        assert_eq!(found(entries).unwrap().tables[1].as_ref().unwrap().len(), INDIRECTION_ENTRIES_MAX);
        assert_eq!(found(2 * entries), None);
    }
}
