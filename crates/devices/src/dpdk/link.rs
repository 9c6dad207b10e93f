//! Links of ports: which are down, and which devices were removed.

use super::ffi::{self, PortStats};
use crate::netlink::Netlink;
use core::ffi::c_int;
use ginnel_stack::time::Instant;
use rustix::io::Errno;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
    /// Serialises calls of the driver's control functions after the start, because drivers do not expect them
    /// on several threads. False when the port is closed.
    is_open: Mutex<bool>,
    /// The counters of the driver when it reported them last.
    stats: Mutex<PortStats>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PortLink {
    fn new(port: u16, name: &str, interface: Option<&str>) -> Self {
        // Without a socket the driver is asked.
        let interface = interface.and_then(|name| Some((name.into(), Mutex::new(Netlink::open().ok()?))));
        Self {
            port,
            name: name.into(),
            interface,
            is_down: AtomicBool::new(false),
            is_removed: AtomicBool::new(false),
            is_open: Mutex::new(true),
            stats: Mutex::default(),
        }
    }

    /// Starts to watch a port over an interface of the kernel, if there is one.
    pub fn watch(port: u16, name: &str, interface: Option<&str>) -> Arc<Self> {
        let state = Arc::new(Self::new(port, name, interface));
        lock(&OPEN).push(state.clone());
        // Without events the link is looked at from time to time.
        let _ = ffi::watch(port, on_event);
        state
    }

    /// Ends the watch of a port. No thread calls the driver's control functions afterwards.
    pub fn forget(&self) {
        lock(&OPEN).retain(|state| state.port != self.port);
        *lock(&self.is_open) = false;
    }

    /// Calls a control function of the driver unless another thread does, or the port is closed.
    fn control<T>(&self, call: impl FnOnce(u16) -> Result<T, Errno>) -> Option<T> {
        let is_open = self.is_open.try_lock().ok()?;
        if *is_open { call(self.port).ok() } else { None }
    }

    /// Returns the counters of the driver, or those that it reported last.
    pub fn stats(&self) -> PortStats {
        let mut last = lock(&self.stats);
        if let Some(stats) = self.control(ffi::stats) {
            *last = stats;
        }
        *last
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

    /// Asks for the link of the port, and logs a change. Changes nothing if the driver does not answer.
    pub fn check(&self) {
        let is_down = match &self.interface {
            None => match self.control(ffi::is_up) {
                Some(is_up) => !is_up,
                None => return,
            },
            Some((name, netlink)) => {
                let link = lock(netlink).link(name);
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

/// Returns whether a device of this process has the port.
pub(super) fn is_open(port: u16) -> bool {
    lock(&OPEN).iter().any(|state| state.port == port)
}

/// Receives an event in a thread of EAL.
extern "C" fn on_event(port: u16, is_removal: c_int) {
    let state = lock(&OPEN).iter().find(|state| state.port == port).cloned();
    let Some(state) = state else { return };
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

#[cfg(test)]
mod tests {
    use super::*;

    /// EAL does not run, and so there is no port that a driver could tell anything about.
    #[test]
    fn silent_driver_changes_nothing() {
        let link = PortLink::new(31, "none", None);
        lock(&link.stats).missed = 7;
        for was_down in [false, true] {
            link.is_down.store(was_down, Ordering::Relaxed);
            link.check();
            assert_eq!(link.is_down.load(Ordering::Relaxed), was_down);
            assert_eq!(link.stats().missed, 7);
        }
    }

    #[test]
    fn control_functions_are_called_one_at_a_time() {
        let link = PortLink::new(31, "none", None);
        let inner = link.control(|port| Ok((port, link.control(|_| Ok(())))));
        assert_eq!(inner, Some((31, None)), "the inner call is not made");
        assert_eq!(link.control(|_| Err::<(), _>(Errno::IO)), None);
        link.forget();
        assert_eq!(link.control(|_| Ok(())), None, "the port is closed");
    }
}
