//! Next hops and their Ethernet addresses, resolved by ARP (RFC 826) and neighbour discovery (RFC 4861 §7.2).
//! Several destinations can share a next hop.

use core::net::IpAddr;
use ginnel_stack::wire::MacAddr;

/// Unanswered solicitations after which a neighbour is unreachable, and the interval between them (RFC 4861
/// §10).
const SOLICITATIONS_MAX: u8 = 3;
const RETRANS_TIMER_MS: u32 = 1_000;

/// A next hop.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerNeighbour {
    pub address: IpAddr,
    pub mac: Option<MacAddr>,
    /// Index of the local address that sends solicitations.
    pub source: u16,
    /// True if the Ethernet address comes from the configuration and never changes.
    is_static: bool,
    /// Solicitations of the present resolution, or of the last one.
    solicitations: u8,
    /// Time of the last solicitation in the network's milliseconds, which wrap.
    solicited_at: Option<u32>,
    is_resolving: bool,
}

impl PeerNeighbour {
    /// Creates a neighbour, which is to be resolved unless `mac` is given.
    pub fn new(address: IpAddr, mac: Option<MacAddr>, source: u16) -> Self {
        let is_static = mac.is_some();
        Self {
            address,
            mac,
            source,
            is_static,
            solicitations: 0,
            solicited_at: None,
            is_resolving: !is_static,
        }
    }

    /// Returns true if the last attempt to resolve the neighbour has failed.
    pub const fn is_unreachable(&self) -> bool {
        self.mac.is_none() && !self.is_resolving
    }

    /// Starts to resolve the neighbour, or to verify its address.
    pub fn resolve(&mut self) {
        if !self.is_static && !self.is_resolving {
            (self.is_resolving, self.solicitations) = (true, 0);
        }
    }

    /// Sets the neighbour's Ethernet address. Returns true if it has changed.
    pub fn update(&mut self, mac: MacAddr) -> bool {
        if self.is_static || !mac.is_unicast() {
            return false;
        }
        self.is_resolving = false;
        self.mac.replace(mac) != Some(mac)
    }

    /// Returns the milliseconds until the next solicitation is due; `None` unless the neighbour is being
    /// resolved.
    pub fn due_in(&self, now_ms: u32) -> Option<u32> {
        let wait = |at: u32| RETRANS_TIMER_MS.saturating_sub(now_ms.wrapping_sub(at));
        self.is_resolving.then(|| self.solicited_at.map_or(0, wait))
    }

    /// Returns true if a solicitation is to be sent now, and counts it.
    pub fn take_due_solicitation(&mut self, now_ms: u32) -> bool {
        if self.due_in(now_ms) != Some(0) {
            return false;
        }
        if self.solicitations == SOLICITATIONS_MAX {
            // A known address is kept: a neighbour that does not answer may still forward.
            self.is_resolving = false;
            return false;
        }
        self.solicitations += 1;
        self.solicited_at = Some(now_ms);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 7]);

    fn neighbour(mac: Option<MacAddr>) -> PeerNeighbour {
        PeerNeighbour::new("10.0.0.1".parse().unwrap(), mac, 0)
    }

    #[test]
    fn three_solicitations_are_sent_a_second_apart() {
        let mut neighbour = neighbour(None);
        let asked: Vec<u32> = (0..10_000).filter(|ms| neighbour.take_due_solicitation(*ms)).collect();
        assert_eq!(asked, [0, 1_000, 2_000]);
        assert!(neighbour.is_unreachable());
        neighbour.resolve();
        assert!(neighbour.take_due_solicitation(10_000));
        assert!(neighbour.update(MAC) && !neighbour.update(MAC));
        assert_eq!((neighbour.due_in(10_000), neighbour.is_unreachable()), (None, false));
    }

    #[test]
    fn solicitations_go_on_when_the_clock_wraps() {
        let mut neighbour = neighbour(None);
        let times = (0..10_000_u32).map(|ms| ms.wrapping_sub(500));
        let asked: Vec<u32> = times.filter(|ms| neighbour.take_due_solicitation(*ms)).collect();
        assert_eq!(asked, [u32::MAX - 499, 500, 1_500]);
    }

    #[test]
    fn a_neighbour_keeps_its_address_during_verification() {
        let mut neighbour = neighbour(None);
        neighbour.update(MAC);
        for ms in [0, 500, 1_000, 2_000, 3_000] {
            neighbour.resolve();
            neighbour.take_due_solicitation(ms);
            assert_eq!(neighbour.mac, Some(MAC));
        }
        assert!(!neighbour.update(MacAddr::BROADCAST), "nobody's own address");
        assert!(neighbour.update(MacAddr([2, 0, 0, 0, 0, 8])));
    }

    #[test]
    fn a_static_neighbour_is_never_solicited() {
        let mut neighbour = neighbour(Some(MAC));
        neighbour.resolve();
        assert!(!neighbour.take_due_solicitation(0) && !neighbour.update(MacAddr([2, 0, 0, 0, 0, 8])));
        assert_eq!(neighbour.mac, Some(MAC));
    }
}
