//! How the interfaces of AF_XDP devices distribute frames to their queues, and so to shards. A stack that
//! knows it lets each flow belong to the shard to which the interface delivers its packets.

use crate::config::{Config, DeviceConfig, DeviceKind};
use ginnel_devices::rss::{self, Rss};
use ginnel_stack::handle::PortId;
use ginnel_stack::steering::toeplitz::KEY;
use ginnel_stack::steering::{INDIRECTION_ENTRIES, INDIRECTION_ENTRIES_MAX, Steering};

/// The key of the devices' hash, and their indirection tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceTables {
    key: [u8; 40],
    /// By number of the device: the shard of each entry; `None` for a device without such a table.
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

/// Reads the tables of the interfaces. Logs why the shards of packets are not known.
pub(crate) fn read(config: &Config) -> Option<DeviceTables> {
    tables(config, rss::read)
}

/// Returns the tables of the devices, given what the driver of an interface tells; `None` if the stack's own
/// hash decides.
fn tables(config: &Config, read: impl Fn(&str) -> Result<Rss, String>) -> Option<DeviceTables> {
    // Other devices deliver the stack's own hash, or distribute their frames by it.
    if config.shards.count < 2 || config.devices.iter().any(|device| device.kind != DeviceKind::AfXdp) {
        return None;
    }
    let mut common_key = None;
    let mut tables = Vec::new();
    for device in &config.devices {
        let shards = config.shards_of(device);
        // All frames of a device with one shard arrive there.
        if shards.len() < 2 || device.af_xdp.as_ref().is_some_and(|options| !options.rss) {
            tables.push(None);
            continue;
        }
        let found = read(device.interface()).and_then(|rss| shards_of_entries(device, &shards, &rss));
        let found = found.and_then(|(key, entries)| match *common_key.get_or_insert(key) {
            known if known == key => Ok(entries),
            _ => Err("the key of its hash is not that of another device".into()),
        });
        match &found {
            Ok(entries) => tracing::info!(
                "AF_XDP on {}: connections belong to shards by the hash of the interface, whose table has {} entries",
                device.interface(),
                entries.len()
            ),
            Err(problem) => tracing::info!(
                "AF_XDP on {}: frames may arrive at shards that do not own them, and are forwarded: {problem}",
                device.interface()
            ),
        }
        tables.push(found.ok());
    }
    let key = common_key?;
    let is_usual = |(table, device): (&Option<Vec<u8>>, &DeviceConfig)| {
        table.as_ref().is_none_or(|table| is_own(table, &config.shards_of(device)))
    };
    let needs_no_table = key == KEY && tables.iter().zip(&config.devices).all(is_usual);
    (!needs_no_table).then_some(DeviceTables { key, tables })
}

/// Returns the key of an interface's hash, and the shard of each entry of its table. Frames for a queue that
/// the stack does not use are lost; their flows belong to any shard.
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
    let shard = |(entry, queue): (usize, &u32)| {
        let position = numbers.iter().position(|&number| u32::from(number) == *queue);
        shards.get(position.unwrap_or(entry % shards.len())).copied().unwrap_or_default()
    };
    let entries: Vec<u8> = rss.queues.iter().enumerate().map(shard).collect();
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

    #[test]
    fn entries_name_the_shards_of_their_queues() {
        let read = |name: &str| Ok(distribution(7, 8, if name == "a" { 2 } else { 3 }));
        let found = tables(&two_devices(""), read).unwrap();
        let expected = [vec![2, 2, 3, 3, 2, 2, 3, 3], vec![0, 0, 1, 1, 2, 2, 0, 0]].map(Some);
        assert_eq!(found, DeviceTables { key: [7; 40], tables: expected.to_vec() });
        // The second shard has queue 0. The stack does not use queue 2.
        let found = tables(&two_devices("af_xdp = \"queues=1+0\"\n"), |_| Ok(distribution(7, 8, 3))).unwrap();
        assert_eq!(found.tables[0], Some(vec![3, 3, 2, 2, 2, 3, 3, 3]));
    }

    #[test]
    fn devices_without_a_known_hash_have_no_table() {
        let read = |name: &str| match name {
            "a" => Ok(distribution(7, 8, 2)),
            _ => Err("unknown".into()),
        };
        let found = tables(&two_devices(""), read).unwrap();
        assert!(found.tables[0].is_some() && found.tables[1].is_none());
        assert_eq!(tables(&two_devices(""), |_| Err("unknown".into())), None);
        // There is one key.
        let read = |name: &str| Ok(distribution(name.as_bytes()[0], 8, if name == "a" { 2 } else { 3 }));
        let found = tables(&two_devices(""), read).unwrap();
        assert!(found.key == [b'a'; 40] && found.tables[0].is_some() && found.tables[1].is_none());
        // The operator does not want it.
        let found = tables(&two_devices("af_xdp = \"rss=off\"\n"), read).unwrap();
        assert!(found.key == [b'b'; 40] && found.tables[0].is_none() && found.tables[1].is_some());
    }

    #[test]
    fn usual_distributions_need_no_table() {
        let usual = |name: &str| {
            let queues = if name == "a" { 2 } else { 3 };
            Ok(Rss { key: KEY, queues: (0..256).map(|entry| entry % 128 % queues).collect() })
        };
        assert_eq!(tables(&two_devices(""), usual), None);
        let other = |name: &str| usual(name).map(|rss| Rss { key: [1; 40], ..rss });
        assert!(tables(&two_devices(""), other).is_some());
        let shorter = |name: &str| usual(name).map(|rss| Rss { queues: rss.queues[..64].to_vec(), ..rss });
        assert!(tables(&two_devices(""), shorter).is_some());
    }

    /// A shard that gets no flows could open no connections.
    #[test]
    fn each_shard_needs_an_entry() {
        let read = |_: &str| Ok(distribution(7, 8, 2));
        let found = tables(&two_devices(""), read).unwrap();
        assert!(found.tables[0].is_some() && found.tables[1].is_none(), "{found:?}");
    }

    /// Devices of other kinds deliver, or use, the hash with the stack's key.
    #[test]
    fn other_devices_keep_the_stacks_hash() {
        let read = |_: &str| Ok(distribution(7, 8, 2));
        let mut mixed = two_devices("");
        mixed.devices[1].kind = DeviceKind::Tap;
        assert_eq!(tables(&mixed, read), None);
    }

    // limit: entries of an interface's table
    #[test]
    fn longest_table_is_used() {
        let entries = INDIRECTION_ENTRIES_MAX as u32;
        let found = |entries| tables(&two_devices(""), |_| Ok(distribution(7, entries, 2)));
        assert_eq!(found(entries).unwrap().tables[0].as_ref().unwrap().len(), INDIRECTION_ENTRIES_MAX);
        assert_eq!(found(2 * entries), None);
    }
}
