//! How long a UDP socket waits for a device that refuses a datagram.
//!
//! The datagrams of a socket are sent in order, over all links. While one of them waits for a device, so do
//! those for other links.

use super::domain::DomainSocket;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::time::Instant;
use serde::{Deserialize, Serialize};

/// Longest time that a datagram waits for a device.
// limit: time that a datagram waits for a device
const WAIT_MAX: Duration = Duration::from_millis(10);
/// Longest time between two attempts that counts as waiting: a device cannot take what the shard does not
/// offer, because other threads have its CPU.
const ATTEMPT_MAX: Duration = Duration::from_millis(1);
/// Time after a datagram has waited in vain during which no datagram of the socket waits: what a device
/// refuses is dropped at once, as by a full queueing discipline of Linux.
const NO_WAIT_TIME: Duration = Duration::from_millis(100);

/// The wait of a socket for devices.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct DeviceWait {
    /// Position in the stream of the datagram that a device refused last, and when that was.
    refused: Option<(u64, Instant)>,
    /// How long that datagram has waited.
    waited: Duration,
    /// Destination of the datagram that has waited in vain, and the time before which no datagram waits. It
    /// ends earlier if a datagram to this destination is taken.
    given_up: Option<(SocketAddr, Instant)>,
}

impl DeviceWait {
    /// See [`DomainSocket::waits_for_device`].
    fn may_wait(&mut self, position: u64, destination: SocketAddr, now: Instant) -> bool {
        if self.given_up.is_some_and(|(_, end)| now < end) {
            return false;
        }
        self.given_up = None;
        self.waited = match self.refused {
            Some((refused, last)) if refused == position => self.waited + (now - last).min(ATTEMPT_MAX),
            _ => Duration::ZERO,
        };
        self.refused = Some((position, now));
        if self.waited < WAIT_MAX {
            return true;
        }
        self.given_up = Some((destination, now + NO_WAIT_TIME));
        false
    }

    /// Returns whether a datagram has waited in vain, and none to its destination was taken since.
    pub fn has_given_up(&self) -> bool {
        self.given_up.is_some()
    }

    /// Records that a datagram was taken.
    #[cold]
    pub fn note_taken(&mut self, destination: SocketAddr) {
        if self.given_up.is_some_and(|(lost_to, _)| lost_to == destination) {
            self.given_up = None;
        }
    }
}

impl DomainSocket {
    /// Returns whether the datagram at `position` in the stream, which a device has refused, waits in its
    /// socket. If not, it is lost.
    #[cold]
    pub(super) fn waits_for_device(&mut self, position: u64, destination: SocketAddr, now: Instant) -> bool {
        let queue = self.datagram_queue.as_mut();
        queue.is_some_and(|queue| queue.device_wait.may_wait(position, destination, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn at(time: Duration) -> Instant {
        Instant::ZERO + 1000 * MS + time
    }

    fn destination(last: u8) -> SocketAddr {
        ([10, 0, 0, last], 53).into()
    }

    #[test]
    fn pauses_of_the_shard_count_as_one_attempt() {
        let mut wait = DeviceWait::default();
        assert!(wait.may_wait(7, destination(1), at(Duration::ZERO)));
        assert!(wait.may_wait(7, destination(1), at(50 * MS)));
        assert!((51..59).all(|ms| wait.may_wait(7, destination(1), at(ms * MS))));
        assert!(!wait.may_wait(7, destination(1), at(59 * MS)), "10 ms of attempts");
    }

    #[test]
    fn a_device_that_takes_datagrams_again_is_waited_for() {
        let mut wait = DeviceWait::default();
        let last = (0..).find(|ms| !wait.may_wait(7, destination(1), at(*ms * MS))).unwrap();
        assert!(wait.has_given_up() && !wait.may_wait(8, destination(1), at(last * MS)));
        wait.note_taken(destination(2));
        assert!(!wait.may_wait(8, destination(1), at((last + 99) * MS)), "another link takes datagrams");
        wait.note_taken(destination(1));
        assert!(!wait.has_given_up() && wait.may_wait(9, destination(1), at((last + 99) * MS)));
    }
}
