//! Devices that steer packets to opened connections by the low bits of their local port, as Fastsocket set
//! them up: filters with a port mask, one for each queue (ntuple, Flow Director). Such a device needs no
//! known hash.

use super::Steering;
use core::ops::RangeInclusive;

/// The local ports of opened connections, whose low bits name the queue.
#[derive(Clone, Debug)]
pub(crate) struct PortBits {
    ports: RangeInclusive<u16>,
}

impl PortBits {
    /// Returns the queue, of `queues`, of packets to a port; `None` if the hash decides: for other ports, and
    /// for bits that name no queue.
    pub(super) fn queue(&self, port: u16, queues: usize) -> Option<usize> {
        let queue = usize::from(port & mask(queues));
        (self.ports.contains(&port) && queue < queues).then_some(queue)
    }

    /// Returns the first port from `from` to `last` whose bits name a queue.
    pub(super) fn next(&self, from: u16, last: u16, queue: usize, queues: usize) -> Option<u16> {
        let from = from.max(*self.ports.start());
        // Cannot truncate: there are at most 64 queues.
        let steps = (queue as u16).wrapping_sub(from) & mask(queues);
        from.checked_add(steps).filter(|&port| port <= last && self.queue(port, queues) == Some(queue))
    }
}

/// Returns the mask of the bits that name one of `queues` queues.
pub(super) fn mask(queues: usize) -> u16 {
    // Cannot truncate: there are at most 64 queues.
    (queues.max(1).next_power_of_two() - 1) as u16
}

impl Steering {
    /// Lets the low bits of the port choose the shard of packets to `ports`, the local ports of connections
    /// that the stack opens, instead of the hash.
    pub fn set_port_bits(&mut self, ports: RangeInclusive<u16>) {
        self.port_bits = Some(PortBits { ports });
        // The hash alone does not tell the shard any more.
        self.home_entries = [false; super::INDIRECTION_ENTRIES as usize];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_port_is_the_first_of_its_queue() {
        let bits = PortBits { ports: 33_001..=33_050 };
        for queues in 1..=9 {
            for queue in 0..queues {
                for from in 32_990..33_060 {
                    let expected = (from..=33_055).find(|&port| bits.queue(port, queues) == Some(queue));
                    assert_eq!(
                        bits.next(from, 33_055, queue, queues),
                        expected,
                        "{queue} of {queues}: {from}"
                    );
                }
            }
        }
        assert_eq!(bits.queue(33_000, 2), None, "another port");
        assert_eq!(
            (bits.queue(33_006, 3), bits.queue(33_007, 3)),
            (Some(2), None),
            "no queue has the bits 11"
        );
        let all = PortBits { ports: 1..=u16::MAX };
        assert_eq!(
            (all.next(65_533, u16::MAX, 3, 4), all.next(65_533, u16::MAX, 0, 4)),
            (Some(65_535), None)
        );
    }
}
