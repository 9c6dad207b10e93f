//! How long a UDP socket waits for a device that refuses a datagram.
//!
//! The datagrams of a socket are sent in order, over all links. While one of them waits for a device, so do
//! those for other links.

use super::domain::DomainSocket;
use core::time::Duration;
use ginnel_stack::time::Instant;

/// Longest time that a datagram waits for a device.
// limit: time that a datagram waits for a device
const WAIT_MAX: Duration = Duration::from_millis(10);
/// Time after a datagram has waited in vain during which no datagram of the socket waits: what a device
/// refuses is dropped at once, as by a full queueing discipline of Linux.
const NO_WAIT_TIME: Duration = Duration::from_millis(100);

/// The wait of a socket for devices.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DeviceWait {
    /// Position in the stream of the datagram that a device refused last, and when it was first refused.
    refused: Option<(u64, Instant)>,
    /// No datagram waits before this time.
    no_wait_until: Instant,
}

impl DeviceWait {
    /// See [`DomainSocket::waits_for_device`].
    fn may_wait(&mut self, position: u64, now: Instant) -> bool {
        if now < self.no_wait_until {
            return false;
        }
        let since = match self.refused {
            Some((refused, since)) if refused == position => since,
            _ => now,
        };
        self.refused = Some((position, since));
        if now - since < WAIT_MAX {
            return true;
        }
        self.no_wait_until = now + NO_WAIT_TIME;
        false
    }
}

impl DomainSocket {
    /// Returns whether the datagram at `position` in the stream, which a device has refused, waits in its
    /// socket. If not, it is lost.
    #[cold]
    pub(super) fn waits_for_device(&mut self, position: u64, now: Instant) -> bool {
        self.datagram_queue.as_mut().is_some_and(|queue| queue.device_wait.may_wait(position, now))
    }
}
