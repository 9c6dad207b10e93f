//! The key `shards` of a device: which shards serve it.

use super::{Config, DeviceConfig};
use ginnel_stack::error::ConfigError;

impl Config {
    /// Returns the shards that serve a device: the shard of each of its queues.
    pub fn shards_of(&self, device: &DeviceConfig) -> Vec<u8> {
        // Cannot truncate: there are at most 64 shards.
        device.shards.clone().unwrap_or_else(|| (0..self.shards.count as u8).collect())
    }

    /// Returns whether a device has other shards than all of them in their order.
    pub(crate) fn has_device_shards(&self) -> bool {
        let all = (0..self.shards.count).map(|shard| shard as u8);
        self.devices
            .iter()
            .filter_map(|device| device.shards.as_ref())
            .any(|shards| !shards.iter().copied().eq(all.clone()))
    }

    /// Validates that devices with different shards do not have one MAC address by configuration. The IPv6
    /// addresses that are formed from it would belong to both, and shards could disagree about the owner.
    fn validate_macs_of_shards(&self) -> Result<(), ConfigError> {
        for (i, device) in self.devices.iter().enumerate() {
            let has_its_mac = |other: &&DeviceConfig| {
                device.mac.is_some()
                    && other.mac == device.mac
                    && self.shards_of(other) != self.shards_of(device)
            };
            if let Some(other) = self.devices[..i].iter().find(has_its_mac) {
                let problem = format!(
                    "is also that of device \"{}\": devices with different `shards` need different addresses",
                    other.name
                );
                return Err(ConfigError::new(format!("device[{i}].mac"), problem));
            }
        }
        Ok(())
    }

    /// Validates the shards of all devices.
    pub(super) fn validate_device_shards(&self) -> Result<(), ConfigError> {
        let count = self.shards.count;
        for (i, device) in self.devices.iter().enumerate() {
            let Some(shards) = &device.shards else { continue };
            if shards.is_empty() {
                let problem = "is empty: name a shard, as in [0], or remove the key for all shards";
                return Err(ConfigError::new(format!("device[{i}].shards"), problem));
            }
            for (at, &shard) in shards.iter().enumerate() {
                let key = format!("device[{i}].shards[{at}]");
                if u32::from(shard) >= count {
                    let last = count - 1;
                    let problem = format!(
                        "there is no shard {shard}: shards.count is {count}, so shards are 0 to {last}"
                    );
                    return Err(ConfigError::new(key, problem));
                }
                if shards[..at].contains(&shard) {
                    return Err(ConfigError::new(key, format!("shard {shard} is listed twice")));
                }
            }
        }
        if self.devices.iter().all(|device| device.shards.is_none()) {
            return Ok(());
        }
        self.validate_macs_of_shards()?;
        let serves = |shard: u8| {
            let linked = self
                .links
                .iter()
                .filter_map(|link| self.devices.iter().find(|device| device.name == link.device));
            linked
                .into_iter()
                .any(|device| device.shards.as_ref().is_none_or(|shards| shards.contains(&shard)))
        };
        match (0..count).find(|&shard| !serves(shard as u8)) {
            None => Ok(()),
            Some(shard) => {
                let problem = format!(
                    "shard {shard} of {count} serves no link: name it in the `shards` of a device with a link, or \
                     lower the count"
                );
                Err(ConfigError::new("shards.count", problem))
            }
        }
    }
}
