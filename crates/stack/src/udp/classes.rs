//! Classes of priority of queued datagrams: how much of the limits each class may use, and what a full queue
//! has refused.

use super::Udp;
use crate::priority::{BEST_EFFORT, CLASSES, ClassLimits};

/// The limits of classes and the counters of [`Udp`], if priorities are in use.
#[derive(Debug)]
pub(super) struct UdpClasses {
    /// The part of the limits of queues that each class may fill.
    pub limits: ClassLimits,
    /// Datagrams of each class that a limit has refused since [`Udp::take_shed`] was called.
    shed: [u64; CLASSES],
    /// Class of the datagram that was received last.
    received: u8,
}

impl UdpClasses {
    /// Counts a datagram that was dropped at a limit.
    pub fn count_shed(&mut self, class: u8) {
        self.shed[usize::from(class)] += 1;
    }
}

impl Udp {
    /// Sets the part of the limits of receive queues that each class may fill. Must be called before the
    /// first socket is bound.
    pub(crate) fn set_class_limits(&mut self, limits: ClassLimits) {
        debug_assert!(self.slots.is_empty(), "the classes of queued datagrams are unknown");
        self.classes = Some(Box::new(UdpClasses { limits, shed: [0; CLASSES], received: BEST_EFFORT }));
    }

    /// Returns the class of the datagram that [`Udp::recv_from`] returned last; [`BEST_EFFORT`] without
    /// [`Udp::set_class_limits`].
    pub(crate) fn received_class(&self) -> u8 {
        self.classes.as_ref().map_or(BEST_EFFORT, |classes| classes.received)
    }

    /// Returns how many datagrams of each class were dropped at a limit since the last call, if there are
    /// any.
    pub(crate) fn take_shed(&mut self) -> Option<[u64; CLASSES]> {
        let shed = core::mem::take(&mut self.classes.as_mut()?.shed);
        (shed != [0; CLASSES]).then_some(shed)
    }

    /// Remembers the class of a datagram that was taken from the queue of a socket.
    #[cold]
    #[inline(never)]
    pub(super) fn note_received(&mut self, index: u32) {
        if let Some(classes) = &mut self.classes
            && let Some(socket) = &mut self.slots[index as usize].socket
        {
            classes.received = socket.queue.pop_class().unwrap_or(BEST_EFFORT);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::handle::UdpHandle;
    use crate::ip::NetworkConfig;
    use crate::ip::testbench::network_config;
    use crate::priority::{BEST_EFFORT, CLASSES, ClassLimits};
    use crate::udp::tests::{Sockets, sockets_with};
    use crate::udp::{Datagram, UdpOptions};

    const HIGH: u8 = 6;
    const ANY_V4: &str = "0.0.0.0";

    /// Returns sockets that may be charged 65,536 bytes together, and 20,000 bytes each.
    fn sockets(has_classes: bool) -> Sockets {
        let config =
            NetworkConfig { udp_receive_total_bytes: 65_536, udp_receive_bytes: 20_000, ..network_config() };
        let mut sockets = sockets_with(config);
        if has_classes {
            sockets.udp.set_class_limits(ClassLimits::new(25));
        }
        sockets
    }

    impl Sockets {
        /// Receives datagrams of a class that are charged 1,000 bytes each. Returns how many were queued.
        fn receive_many(&mut self, class: u8, port: u16, count: usize) -> u64 {
            let before = self.udp.stats().received;
            self.udp.select_class(class);
            (0..count).for_each(|_| self.receive(1, port, &[class; 936]));
            self.udp.select_class(BEST_EFFORT);
            self.udp.stats().received - before
        }

        /// Takes all datagrams of a socket. Returns the class of each.
        fn take_classes(&mut self, socket: UdpHandle) -> Vec<u8> {
            let mut buffer = [0; 936];
            core::iter::from_fn(|| {
                let Datagram { len, .. } = self.udp.recv_from(socket, &mut buffer).ok()?;
                let len = len.min(buffer.len());
                let class = self.udp.received_class();
                // Without classes all datagrams are of best effort.
                assert!(buffer[..len] == [class; 936][..len] || class == BEST_EFFORT);
                Some(class)
            })
            .collect()
        }
    }

    /// Returns the counts of dropped datagrams by class, where only these two classes have lost any.
    fn shed(low: u64, high: u64) -> Option<[u64; CLASSES]> {
        let mut shed = [0; CLASSES];
        (shed[usize::from(BEST_EFFORT)], shed[usize::from(HIGH)]) = (low, high);
        (low + high > 0).then_some(shed)
    }

    #[test]
    fn socket_full_of_low_datagrams_has_room_for_high() {
        for has_classes in [true, false] {
            let mut s = sockets(has_classes);
            let socket = s.bind(ANY_V4, 7);
            let low = if has_classes { 15 } else { 20 };
            assert_eq!(s.receive_many(BEST_EFFORT, 7, 100), low);
            let high = if has_classes { 4 } else { 0 };
            assert_eq!(s.receive_many(HIGH, 7, 4), high);
            assert_eq!(s.udp.take_shed(), if has_classes { shed(85, 0) } else { None });
            assert_eq!(s.udp.stats().receive_overflow, 104 - low - high);
            // High datagrams are dropped when they have filled what was left.
            assert_eq!(s.receive_many(HIGH, 7, 3), 0);
            assert_eq!(s.udp.take_shed(), if has_classes { shed(0, 3) } else { None });
            let mut expected = vec![BEST_EFFORT; low as usize];
            expected.extend(vec![HIGH; high as usize]);
            assert_eq!(s.take_classes(socket), expected);
            assert_eq!(s.receive_many(BEST_EFFORT, 7, 100), low, "there is room again");
        }
    }

    // limit: network.udp_receive_total_bytes
    #[test]
    fn low_datagrams_of_sockets_leave_room_for_another() {
        for has_classes in [true, false] {
            let mut s = sockets(has_classes);
            let low: Vec<_> = (1..=8).map(|port| s.bind(ANY_V4, port)).collect();
            let high = s.bind(ANY_V4, 9);
            let queued: u64 = (1..=8).map(|port| s.receive_many(BEST_EFFORT, port, 15)).sum();
            assert_eq!(queued, if has_classes { 51 } else { 65 });
            assert_eq!(s.receive_many(HIGH, 9, 10), if has_classes { 10 } else { 0 });
            assert_eq!(s.udp.take_shed(), if has_classes { shed(120 - 51, 0) } else { None });
            assert_eq!(s.take_classes(high).len(), if has_classes { 10 } else { 0 });
            assert_eq!(low.iter().map(|socket| s.take_classes(*socket).len()).sum::<usize>() as u64, queued);
        }
    }

    /// A socket with a small buffer still receives, whatever the class.
    #[test]
    fn empty_queue_accepts_every_class() {
        let mut s = sockets(true);
        let socket =
            s.bind_with(ANY_V4, 7, UdpOptions { rcvbuf: Some(1000), ..UdpOptions::default() }).unwrap();
        for class in 0..CLASSES as u8 {
            assert_eq!(s.receive_many(class, 7, 2), 1);
            assert_eq!(s.take_classes(socket), [class]);
        }
    }

    #[test]
    fn datagrams_of_two_classes_are_not_coalesced() {
        let mut s = sockets(true);
        let socket = s.bind_with(ANY_V4, 7, UdpOptions { gro: true, ..UdpOptions::default() }).unwrap();
        for class in [BEST_EFFORT, BEST_EFFORT, HIGH, HIGH, BEST_EFFORT] {
            s.receive_many(class, 7, 1);
        }
        assert_eq!(s.take_classes(socket), [BEST_EFFORT, HIGH, BEST_EFFORT]);
    }
}
