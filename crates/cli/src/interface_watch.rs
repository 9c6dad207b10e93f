//! Writes an entry to the log when an interface of the stack loses its carrier, goes down or comes back, also
//! if the stack transmits nothing meanwhile. Asks the kernel once a second.

use ginnel::config::DeviceKind;
use ginnel::{Config, StopFlag};
use ginnel_devices::interface::{LinkState, LinkStates};
use std::collections::BTreeMap;

/// Returns the interfaces of the TAP and AF_XDP devices of a stack, and the kinds of their devices. An
/// interface may have several devices.
pub fn kernel_interfaces(config: &Config) -> BTreeMap<String, DeviceKind> {
    let devices = config.devices.iter().filter(|device| match device.kind {
        DeviceKind::AfXdp | DeviceKind::Tap => true,
        DeviceKind::Memory | DeviceKind::Memif | DeviceKind::Dpdk => false,
    });
    devices.map(|device| (device.interface().to_owned(), device.kind)).collect()
}

/// The interfaces of a stack.
pub struct InterfaceWatch {
    /// Opened by the first look, in the thread that looks.
    states: Option<LinkStates>,
    interfaces: Vec<WatchedInterface>,
    /// Set when the stack ends: it deletes the interfaces that it has created.
    stop: Option<StopFlag>,
}

struct WatchedInterface {
    name: String,
    /// State at the last look; `None` until the interface was up for the first time.
    last: Option<LinkState>,
}

impl InterfaceWatch {
    /// Creates the watch for the TAP and AF_XDP devices of a stack.
    pub fn new(config: &Config) -> Self {
        let of = |(name, kind)| {
            // The interface of an AF_XDP device must be up when the stack starts. That of a TAP device may be
            // created by the stack, which sets it up.
            let last = (kind == DeviceKind::AfXdp).then_some(LinkState::Up);
            WatchedInterface { name, last }
        };
        let interfaces = kernel_interfaces(config).into_iter().map(of).collect();
        Self { states: None, interfaces, stop: None }
    }

    /// Ends the watch when `stop` is set.
    pub fn until(mut self, stop: &StopFlag) -> Self {
        self.stop = Some(stop.clone());
        self
    }

    /// Reads the states of the interfaces and writes what has changed.
    pub fn update(&mut self) {
        if self.interfaces.is_empty() {
            return;
        }
        if self.states.is_none() {
            self.states = LinkStates::open().ok();
        }
        let Some(mut states) = self.states.take() else { return };
        for entry in self.entries(|name| states.read(name).ok()) {
            tracing::warn!("{entry}");
        }
        self.states = Some(states);
    }

    /// Returns what has changed; nothing once the stack is about to end.
    fn entries(&mut self, mut read: impl FnMut(&str) -> Option<LinkState>) -> Vec<String> {
        let entries = self.interfaces.iter_mut().filter_map(|interface| {
            let state = read(&interface.name)?;
            interface.entry(state)
        });
        let entries = entries.collect();
        // Looked at last: the interfaces exist at least until it is set.
        if self.stop.as_ref().is_some_and(StopFlag::is_set) { Vec::new() } else { entries }
    }
}

impl WatchedInterface {
    /// Takes note of the state now. Returns the entry if it has changed.
    fn entry(&mut self, state: LinkState) -> Option<String> {
        if self.last == Some(state) || self.last.is_none() && state != LinkState::Up {
            return None;
        }
        let is_first = self.last.replace(state).is_none();
        let change = match state {
            LinkState::Up => "is up and has a carrier again",
            LinkState::NoCarrier => "has no carrier",
            LinkState::Down => "is down",
            LinkState::Missing => "was deleted, or moved to another network namespace",
        };
        (!is_first).then(|| format!("interface {} {change}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_has_one_entry() {
        let mut tap = WatchedInterface { name: "tap0".into(), last: None };
        for state in [LinkState::Missing, LinkState::Down, LinkState::Up, LinkState::Up] {
            assert_eq!(tap.entry(state), None, "{state:?}: the stack sets the interface up");
        }
        for (state, entry) in [
            (LinkState::NoCarrier, "interface tap0 has no carrier"),
            (LinkState::Down, "interface tap0 is down"),
            (LinkState::Up, "interface tap0 is up and has a carrier again"),
            (LinkState::Missing, "interface tap0 was deleted, or moved to another network namespace"),
        ] {
            assert_eq!(tap.entry(state).as_deref(), Some(entry));
            assert_eq!(tap.entry(state), None);
        }
        let mut xdp = WatchedInterface { name: "eth0".into(), last: Some(LinkState::Up) };
        assert_eq!(xdp.entry(LinkState::NoCarrier).as_deref(), Some("interface eth0 has no carrier"));
    }

    /// A stack that stops deletes its interfaces.
    #[test]
    fn stopping_stack_has_no_entries() {
        let config = Config::from_toml("lab", "[[device]]\nname = \"tap0\"\nkind = \"tap\"").unwrap();
        for is_stopping in [false, true] {
            let stop = StopFlag::new().unwrap();
            let mut watch = InterfaceWatch::new(&config).until(&stop);
            assert!(watch.entries(|_| Some(LinkState::Up)).is_empty());
            if is_stopping {
                stop.stop();
            }
            let entries = watch.entries(|_| Some(LinkState::Missing));
            assert_eq!(entries.len(), usize::from(!is_stopping), "{entries:?}");
        }
    }

    #[test]
    fn only_interfaces_of_the_kernel_are_watched() {
        let config =
            "[[device]]\nname = \"web0\"\nkind = \"af_xdp\"\n[[device]]\nname = \"m\"\nkind = \"memory\"
[[device]]\nname = \"t\"\nkind = \"tap\"\ninterface = \"tap0\"";
        let watch = InterfaceWatch::new(&Config::from_toml("lab", config).unwrap());
        let all: Vec<_> = watch.interfaces.iter().map(|watched| (&*watched.name, watched.last)).collect();
        assert_eq!(all, [("tap0", None), ("web0", Some(LinkState::Up))]);
    }
}
