//! Links of ports: which are down, and which devices were removed.

use super::ffi;
use crate::netlink::Netlink;
use core::ffi::c_int;
use ginnel_stack::time::Instant;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Time between two looks at a link whose driver does not report changes.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The open ports, for the events of EAL.
static OPEN: Mutex<Vec<Arc<PortLink>>> = Mutex::new(Vec::new());

/// State of the link of a port.
pub(super) struct PortLink {
    port: u16,
    name: String,
    /// Name of the kernel's interface below the port, and a socket of its namespace. Drivers over
    /// interfaces do not tell that the interface is down or gone.
    interface: Option<(String, Mutex<Netlink>)>,
    is_down: AtomicBool,
    is_removed: AtomicBool,
}

impl PortLink {
    /// Starts to watch a port over an interface of the kernel, if there is one.
    pub fn watch(port: u16, name: &str, interface: Option<&str>) -> Arc<Self> {
        // Without a socket the driver is asked.
        let interface = interface.and_then(|name| Some((name.into(), Mutex::new(Netlink::open().ok()?))));
        let state = Arc::new(Self {
            port,
            name: name.into(),
            interface,
            is_down: AtomicBool::new(false),
            is_removed: AtomicBool::new(false),
        });
        OPEN.lock().unwrap_or_else(PoisonError::into_inner).push(state.clone());
        // Without events the link is looked at from time to time.
        let _ = ffi::watch(port, on_event);
        state
    }

    /// Ends the watch of a port.
    pub fn forget(&self) {
        OPEN.lock().unwrap_or_else(PoisonError::into_inner).retain(|state| state.port != self.port);
    }

    /// Returns whether the device was removed.
    pub fn is_removed(&self) -> bool {
        self.is_removed.load(Ordering::Relaxed)
    }

    /// Records that the device is gone.
    fn record_removal(&self) {
        if !self.is_removed.swap(true, Ordering::Relaxed) {
            tracing::error!("the device of DPDK port {} was removed", self.name);
        }
    }

    /// Asks for the link of the port, and logs a change.
    pub fn check(&self) {
        let is_down = match &self.interface {
            None => !ffi::is_up(self.port),
            Some((name, netlink)) => {
                let link = netlink.lock().unwrap_or_else(PoisonError::into_inner).link(name);
                match link {
                    Ok(link) => !link.up,
                    Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return self.record_removal(),
                    Err(_) => return,
                }
            }
        };
        if self.is_down.swap(is_down, Ordering::Relaxed) != is_down {
            match is_down {
                true => tracing::warn!("the link of DPDK port {} is down", self.name),
                false => tracing::warn!("the link of DPDK port {} is up again", self.name),
            }
        }
    }
}

/// Receives an event in a thread of EAL.
extern "C" fn on_event(port: u16, is_removal: c_int) {
    let found = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(state) = found.iter().find(|state| state.port == port).cloned() else { return };
    drop(found);
    if is_removal == 0 {
        state.check();
    } else {
        state.record_removal();
    }
}

/// Says when to look at a link again.
#[derive(Debug, Default)]
pub(super) struct LinkCheck {
    next: Instant,
}

impl LinkCheck {
    /// Looks at the link if that is due.
    #[inline]
    pub fn poll(&mut self, now: Instant, state: &PortLink) {
        if now >= self.next {
            self.next = now + CHECK_INTERVAL;
            state.check();
        }
    }
}
