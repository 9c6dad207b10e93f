//! Entries in TIME-WAIT in an image of a stack, in the order in which they expire.

use super::{TimeWait, TimeWaitTable};
use crate::tcp::conn::NONE;
use crate::tcp::demux::{AddressPool, FlowKey, HostAddr};
use serde::{Deserialize, Serialize};

/// An entry and its addresses.
#[derive(Serialize, Deserialize)]
#[serde(rename = "TimeWaitEntry")]
pub(crate) struct TimeWaitImage {
    entry: TimeWait,
    remote: HostAddr,
    local: HostAddr,
}

impl TimeWaitTable {
    /// Returns the image.
    pub(crate) fn image(&self, addresses: &AddressPool) -> Vec<TimeWaitImage> {
        let image = |entry: &TimeWait| {
            let FlowKey { remote, local, .. } = entry.key(addresses);
            TimeWaitImage { entry: *entry, remote, local }
        };
        self.iter().map(image).collect()
    }

    /// Takes over the entries of an image; the table is empty.
    ///
    /// # Errors
    /// The configuration does not allow that many, or the image is malformed.
    pub(crate) fn restore(
        &mut self,
        image: Vec<TimeWaitImage>,
        addresses: &mut AddressPool,
    ) -> Result<(), String> {
        if image.len() > self.max {
            let (count, max) = (image.len(), self.max);
            return Err(format!("tcp.time_wait_max is {max}, but {count} connections are in TIME-WAIT"));
        }
        for TimeWaitImage { mut entry, remote, local } in image {
            if remote.is_v4() != local.is_v4() || remote.is_v4() == entry.v6() {
                return Err("the addresses of a connection in TIME-WAIT are of the wrong family".into());
            }
            let TimeWait { remote_port, local_port, .. } = entry;
            let key = FlowKey { remote, local, remote_port, local_port };
            (entry.remote_ip, entry.local_ip, _) = addresses.store(&key);
            (entry.prev, entry.next) = (self.tail, NONE);
            self.entries.push(entry);
            self.append((self.entries.len() - 1) as u32);
            self.len += 1;
        }
        Ok(())
    }
}
