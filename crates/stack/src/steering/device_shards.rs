//! Devices that only some of the shards serve.
//!
//! Such a device has a queue for each of its shards, and the hash distributes its flows over these alone. A
//! flow belongs to the device that has the flow's local address, on whichever device its packets arrive, so
//! that all shards compute one owner. Packets to other addresses, such as groups, belong to the device that
//! has received them.

use super::home_ports::HomePorts;
use super::toeplitz::Toeplitz;
use super::{INDIRECTION_ENTRIES, INDIRECTION_ENTRIES_MAX, NO_SHARD, Steering};
use crate::handle::PortId;
use crate::ip::local::LocalAddresses;
use core::net::IpAddr;

/// The shards of each device, and the devices of the local addresses.
pub(super) struct DeviceShards {
    devices: Vec<DeviceQueues>,
    addresses: LocalAddresses,
    /// The devices of the links, by number of the link.
    ports_of_links: Vec<PortId>,
    /// True if this shard serves all devices.
    serves_all: bool,
}

/// The queues of a device.
struct DeviceQueues {
    /// The shard of each queue.
    shards: Box<[u8]>,
    /// The shard of each entry of the device's own indirection table; `None` if the device has the usual
    /// table of [`INDIRECTION_ENTRIES`] entries, or its table is not known.
    table: Option<Box<[u8]>>,
    /// Local ports for connections that this shard opens by the device; `None` if it does not serve it.
    home_ports: Option<HomePorts>,
}

impl DeviceShards {
    /// Returns the device of a local address; otherwise `received`, the one that has received the packet.
    fn device(&self, local: IpAddr, received: Option<PortId>) -> Option<&DeviceQueues> {
        let link = self.addresses.link_of(local);
        let port = link.and_then(|link| self.ports_of_links.get(usize::from(link.0)).copied());
        self.devices.get(usize::from(port.or(received)?.0))
    }

    /// Returns the shard of each queue of a device; `None` if all shards serve the device.
    pub(super) fn queues(&self, local: IpAddr, received: Option<PortId>) -> Option<&[u8]> {
        self.device(local, received).map(|device| &*device.shards)
    }

    /// Returns the owner of a hash; `None` if all shards serve the device.
    #[inline(never)]
    pub(super) fn shard_of_hash(&self, hash: u32, local: IpAddr, received: Option<PortId>) -> Option<u8> {
        let DeviceQueues { shards, table, .. } = self.device(local, received)?;
        if let Some(table) = table {
            return table.get(hash as usize & (table.len() - 1)).copied();
        }
        shards.get((hash % INDIRECTION_ENTRIES) as usize % shards.len().max(1)).copied()
    }

    /// Returns bits of the shards that serve the device of a local address; all bits if there is none.
    pub(super) fn serving(&self, local: IpAddr) -> u64 {
        self.device(local, None).map_or(u64::MAX, |device| bits(&device.shards))
    }

    /// Returns the ports of this shard for a local address, `Some(None)` if it does not serve the device of
    /// the address, and `None` if all shards do.
    pub(super) fn home_ports(&self, local: IpAddr) -> Option<Option<&HomePorts>> {
        self.device(local, None).map(|device| device.home_ports.as_ref())
    }

    /// Returns the primary shard of a device.
    pub(super) fn primary(&self, port: PortId) -> u8 {
        let first = self.devices.get(usize::from(port.0)).and_then(|device| device.shards.first());
        first.copied().unwrap_or(0)
    }
}

/// Returns a set of shards as bits.
fn bits(shards: &[u8]) -> u64 {
    shards.iter().fold(0, |bits, &shard| bits | 1_u64.unbounded_shl(shard.into()))
}

impl Steering {
    /// Sets the shards that serve each device, by number of the device: the shard of each of its queues.
    pub fn set_device_shards(&mut self, devices: impl IntoIterator<Item = Vec<u8>>) {
        let queues = |shards: Vec<u8>| {
            let is_home = |entry: usize| shards.get(entry % shards.len().max(1)) == Some(&self.shard);
            let is_served = shards.contains(&self.shard);
            let home_ports = is_served.then(|| {
                let home_entries = core::array::from_fn::<_, { INDIRECTION_ENTRIES as usize }, _>(is_home);
                HomePorts::new(&home_entries, &self.toeplitz)
            });
            DeviceQueues { shards: shards.into(), table: None, home_ports }
        };
        let devices: Vec<DeviceQueues> = devices.into_iter().map(queues).collect();
        let serves_all = devices.iter().all(|device| device.home_ports.is_some());
        let (addresses, ports_of_links) = (LocalAddresses::new(), Vec::new());
        self.device_shards = Some(Box::new(DeviceShards { devices, addresses, ports_of_links, serves_all }));
        // The hash alone does not tell the device.
        self.home_entries = [false; INDIRECTION_ENTRIES as usize];
    }

    /// Replaces the key of the hash by that of the devices. Shards and tables of devices are set afterwards.
    pub fn set_hash_key(&mut self, key: &[u8; 40]) {
        self.toeplitz = Toeplitz::new(key);
        let home_entries = core::array::from_fn::<_, { INDIRECTION_ENTRIES as usize }, _>(|entry| {
            entry % usize::from(self.shards) == usize::from(self.shard)
        });
        self.home_ports = HomePorts::new(&home_entries, &self.toeplitz);
    }

    /// Sets the indirection table of a device, after [`Steering::set_device_shards`]: the shard of each
    /// entry. Flows of entries with [`NO_SHARD`] belong to any shard, and no port is chosen for a connection
    /// whose packets would arrive there. Returns false, and changes nothing, if the number of entries is no
    /// power of two up to [`INDIRECTION_ENTRIES_MAX`], or if one of the shards does not serve the device.
    pub fn set_device_table(&mut self, port: PortId, table: &[u8]) -> bool {
        let Some(served) = &mut self.device_shards else { return false };
        let Some(device) = served.devices.get_mut(usize::from(port.0)) else { return false };
        let is_valid = !device.shards.is_empty()
            && table.len().is_power_of_two()
            && table.len() <= INDIRECTION_ENTRIES_MAX
            && table.iter().all(|&shard| shard == NO_SHARD || device.shards.contains(&shard));
        if is_valid {
            if device.home_ports.is_some() {
                let home_entries: Vec<bool> = table.iter().map(|&shard| shard == self.shard).collect();
                device.home_ports = Some(HomePorts::new(&home_entries, &self.toeplitz));
            }
            let dealt = device.shards.iter().cycle();
            let owner = |(&shard, &dealt): (&u8, &u8)| if shard == NO_SHARD { dealt } else { shard };
            device.table = Some(table.iter().zip(dealt).map(owner).collect());
        }
        is_valid
    }

    /// Returns whether some devices are served by some of the shards only.
    pub(crate) fn has_device_shards(&self) -> bool {
        self.device_shards.is_some()
    }

    /// Returns whether this shard serves all devices, so that it may open a connection by each of them.
    pub(crate) fn serves_all_devices(&self) -> bool {
        self.device_shards.as_ref().is_none_or(|served| served.serves_all)
    }

    /// Replaces the local addresses, and the devices of the links, by number of the link.
    pub(crate) fn set_local_addresses(&mut self, addresses: LocalAddresses, ports_of_links: Vec<PortId>) {
        if let Some(served) = &mut self.device_shards {
            (served.addresses, served.ports_of_links) = (addresses, ports_of_links);
        }
    }

    /// Returns whether this shard serves a device. Devices that have no shards of their own, such as the
    /// loopback, are served by all.
    pub fn serves_device(&self, port: PortId) -> bool {
        let device = self.device_shards.as_ref().and_then(|served| served.devices.get(usize::from(port.0)));
        device.is_none_or(|device| device.home_ports.is_some())
    }

    /// Returns the place of the local addresses in memory, which each update changes.
    #[cfg(test)]
    pub(crate) fn place_of_addresses(&self) -> Option<*const PortId> {
        self.device_shards.as_ref().map(|served| served.ports_of_links.as_ptr())
    }

    /// Returns the primary shard of a device, which acts on its links for all shards.
    pub fn primary(&self, port: PortId) -> u8 {
        self.device_shards.as_ref().map_or(0, |served| served.primary(port))
    }

    /// Returns whether this shard serves the device of a local address.
    pub(crate) fn serves(&self, local: IpAddr) -> bool {
        let serving = self.device_shards.as_ref().map_or(u64::MAX, |served| served.serving(local));
        serving >> self.shard & 1 != 0
    }
}
