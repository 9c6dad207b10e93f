//! Compares the interfaces of a stack when its shards start again. The shards take over what they find, so an
//! administrator learns of a change from the log.

use crate::interface_watch::kernel_interfaces;
use ginnel::Config;
use ginnel_devices::interface::{self, InterfaceInfo};
use ginnel_stack::wire::MacAddr;

/// The interfaces of a stack as the last start of its shards found them.
#[derive(Debug)]
pub struct LastInterfaces(Vec<LastInterface>);

#[derive(Debug)]
struct LastInterface {
    name: String,
    /// `None` if it could not be read.
    found: Option<InterfaceInfo>,
}

impl LastInterfaces {
    /// Reads the interfaces of the TAP and AF_XDP devices of a stack whose shards have just started.
    pub fn read(config: &Config) -> Self {
        let of = |(name, _): (String, _)| LastInterface { found: interface::read(&name).ok(), name };
        Self(kernel_interfaces(config).into_iter().map(of).collect())
    }

    /// Reads the interfaces after another start of the shards. Returns an entry of the log for each interface
    /// that has changed since the start before.
    pub fn update(&mut self) -> Vec<String> {
        let changed = |last: &mut LastInterface| last.change(interface::read(&last.name).ok()?);
        self.0.iter_mut().filter_map(changed).collect()
    }
}

impl LastInterface {
    /// Takes note of what is found now. Returns what has changed.
    fn change(&mut self, now: InterfaceInfo) -> Option<String> {
        let before = self.found.replace(now.clone())?;
        let mut changes = Vec::new();
        if before.index != now.index {
            changes.push(format!("deleted and made again (index {}, was {})", now.index, before.index));
        }
        if before.mtu != now.mtu {
            changes.push(format!("MTU {} (was {})", now.mtu, before.mtu));
        }
        if before.mac != now.mac {
            let [was, is] = [before.mac, now.mac].map(MacAddr);
            changes.push(format!("MAC address {is} (was {was})"));
        }
        let changes = (!changes.is_empty()).then(|| changes.join(", "))?;
        Some(format!("interface {} differs from the last start of the shards: {changes}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_names_both_values() {
        let before =
            InterfaceInfo { index: 3, up: true, mtu: 1500, mac: [2, 0, 0, 0, 0, 1], addresses: vec![] };
        let mut last = LastInterface { name: "web0".into(), found: None };
        assert_eq!(last.change(before.clone()), None, "nothing is known of the start before");
        let other =
            InterfaceInfo { up: false, addresses: vec![([10, 0, 0, 1].into(), 24)], ..before.clone() };
        assert_eq!(last.change(other), None, "the shards do not depend on that");
        let now = InterfaceInfo { index: 7, mtu: 9000, mac: [2, 0, 0, 0, 0, 0xff], ..before };
        assert_eq!(
            last.change(now.clone()).unwrap(),
            "interface web0 differs from the last start of the shards: deleted and made again (index 7, was 3), MTU 9000 (was 1500), MAC address 02:00:00:00:00:ff (was 02:00:00:00:00:01)"
        );
        assert_eq!(last.change(now), None);
    }
}
