//! Who is next on the way to the targets, and their Ethernet addresses (ARP, RFC 826, and neighbour discovery, RFC 4861 §7.2). There are
//! as many as targets, or fewer.

use core::net::IpAddr;
use ginnel_stack::wire::MacAddr;

/// Unanswered questions after which a neighbour is given up, and the time between them (RFC 4861 §10).
const QUESTIONS_MAX: u8 = 3;
const QUESTION_EVERY_MS: u32 = 1_000;

/// A neighbour.
#[derive(Clone, Copy, Debug)]
pub(super) struct Neighbour {
    pub address: IpAddr,
    pub mac: Option<MacAddr>,
    /// Number of the own address that asks.
    pub asker: u16,
    /// Its address is written in the configuration: nothing changes it.
    fixed: bool,
    /// Questions since the last answer.
    asked: u8,
    /// When the last was asked, in the network's milliseconds.
    asked_at: Option<u32>,
    wanted: bool,
}

impl Neighbour {
    /// A neighbour that is to be found, unless `mac` is known already.
    pub fn new(address: IpAddr, mac: Option<MacAddr>, asker: u16) -> Self {
        let fixed = mac.is_some();
        Self { address, mac, asker, fixed, asked: 0, asked_at: None, wanted: !fixed }
    }

    /// Whether it was asked for in vain, and nobody wants it now.
    pub const fn is_given_up(&self) -> bool {
        self.mac.is_none() && !self.wanted
    }

    /// Somebody needs it, or doubts that it is still where it was.
    pub fn want(&mut self) {
        if !self.fixed && !self.wanted {
            (self.wanted, self.asked) = (true, 0);
        }
    }

    /// It has said where it is. Returns whether that is news.
    pub fn learn(&mut self, mac: MacAddr) -> bool {
        if self.fixed || !mac.is_unicast() {
            return false;
        }
        self.wanted = false;
        self.mac.replace(mac) != Some(mac)
    }

    /// When there is something to do, in the network's milliseconds.
    pub fn due(&self) -> Option<u32> {
        self.wanted.then(|| self.asked_at.map_or(0, |at| at + QUESTION_EVERY_MS))
    }

    /// True if it is time to ask.
    pub fn is_to_be_asked(&mut self, now_ms: u32) -> bool {
        if self.due().is_none_or(|due| due > now_ms) {
            return false;
        }
        if self.asked == QUESTIONS_MAX {
            // What is known stays: a neighbour that answers no questions may still forward.
            self.wanted = false;
            return false;
        }
        self.asked += 1;
        self.asked_at = Some(now_ms);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 7]);

    fn neighbour(mac: Option<MacAddr>) -> Neighbour {
        Neighbour::new("10.0.0.1".parse().unwrap(), mac, 0)
    }

    #[test]
    fn three_questions_a_second_apart_and_then_no_more_until_somebody_wants_it() {
        let mut neighbour = neighbour(None);
        let asked: Vec<u32> = (0..10_000).filter(|ms| neighbour.is_to_be_asked(*ms)).collect();
        assert_eq!(asked, [0, 1_000, 2_000]);
        assert!(neighbour.is_given_up());
        neighbour.want();
        assert!(neighbour.is_to_be_asked(10_000));
        assert!(neighbour.learn(MAC) && !neighbour.learn(MAC));
        assert_eq!((neighbour.due(), neighbour.is_given_up()), (None, false));
    }

    #[test]
    fn one_that_is_doubted_keeps_its_address_until_it_says_another() {
        let mut neighbour = neighbour(None);
        neighbour.learn(MAC);
        for ms in [0, 500, 1_000, 2_000, 3_000] {
            neighbour.want();
            neighbour.is_to_be_asked(ms);
            assert_eq!(neighbour.mac, Some(MAC));
        }
        assert!(!neighbour.learn(MacAddr::BROADCAST), "nobody's own address");
        assert!(neighbour.learn(MacAddr([2, 0, 0, 0, 0, 8])));
    }

    #[test]
    fn a_configured_one_is_never_asked_for() {
        let mut neighbour = neighbour(Some(MAC));
        neighbour.want();
        assert!(!neighbour.is_to_be_asked(0) && !neighbour.learn(MacAddr([2, 0, 0, 0, 0, 8])));
        assert_eq!(neighbour.mac, Some(MAC));
    }
}
