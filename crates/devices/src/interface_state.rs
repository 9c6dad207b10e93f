//! State of the kernel's interface below a device: whether it transmits frames. Each change is logged.

use core::sync::atomic::{AtomicBool, Ordering};
use rustix::io::Errno;

/// The state of an interface, shared by all queues of its device.
#[derive(Debug)]
pub(crate) struct InterfaceState {
    name: String,
    is_down: AtomicBool,
}

impl InterfaceState {
    /// Creates the state of the interface `name`, which is up.
    pub fn new(name: &str) -> Self {
        Self { name: name.into(), is_down: AtomicBool::new(false) }
    }

    /// Records that the kernel accepted frames.
    pub fn record_sent(&self) {
        if self.is_down.load(Ordering::Relaxed) && self.is_down.swap(false, Ordering::Relaxed) {
            tracing::warn!("interface {} transmits again", self.name);
        }
    }

    /// Records that the kernel refused frames.
    pub fn record_failure(&self, error: Errno) {
        if !self.is_down.swap(true, Ordering::Relaxed) {
            let cause = match error {
                Errno::IO | Errno::NETDOWN => "it is down".to_owned(),
                error => error.to_string(),
            };
            tracing::warn!("interface {} does not transmit: {cause}", self.name);
        }
    }
}
