//! Bulk transfers: every MTU, both families, both directions, both roles, over perfect and faulty links.

use crate::case::{Case, Client, Family};
use crate::plan::Plan;
use crate::suite;

const MIB: u64 = 1 << 20;
const MTUS_V4: [usize; 8] = [128, 256, 552, 576, 1280, 1500, 4000, 9000];
const MTUS_V6: [usize; 4] = [1280, 1500, 4000, 9000];
const CLIENTS: [Client; 2] = [Client::Ginnel, Client::Kernel];

/// Faults of links, in both directions.
const FAULTS: [&str; 7] = [
    "loss=1%",
    "loss=5%",
    "loss=1% loss-burst=2",
    "reorder=5% reorder-delay=2ms",
    "duplicate=5%",
    "corrupt=1%",
    "delay=2ms jitter=1ms loss=1% duplicate=1% reorder=1% corrupt=0.5%",
];

/// The sending side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    Ginnel,
    Kernel,
    Both,
}

impl Sender {
    /// Returns the case with a transfer of `bytes` bytes.
    pub fn sends(self, bytes: u64, case: Case) -> Case {
        let send = Plan::send(bytes);
        // The FIN of the receiver shows that everything arrived.
        let receive = Plan { finish_after: bytes, ..Plan::default() };
        match self {
            Self::Ginnel => Case { ginnel: send, kernel: receive, ..case },
            Self::Kernel => Case { ginnel: receive, kernel: send, ..case },
            Self::Both => Case { ginnel: send, kernel: send, ..case },
        }
    }
}

/// Both directions × both roles over links of every size.
fn all_sizes(bytes: u64, offload: bool) -> Vec<Case> {
    let sizes = MTUS_V4.map(|mtu| (Family::V4, mtu)).into_iter().chain(MTUS_V6.map(|mtu| (Family::V6, mtu)));
    let with = if offload { "" } else { ", no offload" };
    let mut cases = Vec::new();
    for (family, mtu) in sizes {
        for client in CLIENTS {
            for sender in [Sender::Ginnel, Sender::Kernel] {
                let name = format!("{family:?} MTU {mtu}, {client:?} connects, {sender:?} sends{with}");
                let case = Case { name, family, mtu, client, offload, ..Case::default() };
                cases.push(sender.sends(bytes, case));
            }
        }
    }
    cases
}

/// Every fault × both families × both directions; the roles alternate.
fn all_faults(bytes: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for link in FAULTS {
        for family in [Family::V4, Family::V6] {
            for sender in [Sender::Ginnel, Sender::Kernel] {
                let client = CLIENTS[(cases.len() / 2 + cases.len()) % 2];
                let name = format!("{link}, {family:?}, {client:?} connects, {sender:?} sends");
                cases.push(sender.sends(bytes, Case { name, family, client, link, ..Case::default() }));
            }
        }
    }
    cases
}

/// Loss over links of every size; the roles alternate.
fn lossy_links_of_all_sizes(bytes: u64) -> Vec<Case> {
    let sizes = MTUS_V4.map(|mtu| (Family::V4, mtu)).into_iter().chain(MTUS_V6.map(|mtu| (Family::V6, mtu)));
    let mut cases = Vec::new();
    for (family, mtu) in sizes {
        for link in ["loss=1%", "loss=5%"] {
            for sender in [Sender::Ginnel, Sender::Kernel] {
                let client = CLIENTS[(cases.len() / 2 + cases.len()) % 2];
                let name = format!("{link}, {family:?} MTU {mtu}, {client:?} connects, {sender:?} sends");
                let case = Case { name, family, mtu, client, link, ..Case::default() };
                cases.push(sender.sends(bytes, case));
            }
        }
    }
    cases
}

/// All faults at once over links of unusual size, with `segments` segments each.
fn bad_links_of_all_sizes(segments: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    let v4 = [128, 576, 4000, 9000].map(|mtu| (Family::V4, mtu));
    for (family, mtu) in v4.into_iter().chain([1280, 4000, 9000].map(|mtu| (Family::V6, mtu))) {
        for sender in [Sender::Ginnel, Sender::Kernel, Sender::Both] {
            let client = CLIENTS[cases.len() % 2];
            let link = FAULTS[FAULTS.len() - 1];
            let name = format!("{link}, {family:?}, MTU {mtu}, {client:?} connects, {sender:?} sends");
            let case = Case { name, family, mtu, client, link, ..Case::default() };
            cases.push(sender.sends(segments * mtu as u64, case));
        }
    }
    cases
}

/// Both directions concurrently, with and without offloads, and without any layer between the stack and the
/// TAP device.
fn both_ways(bytes: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for family in [Family::V4, Family::V6] {
        for client in CLIENTS {
            for (offload, capture) in [(true, true), (true, false), (false, true)] {
                let name = format!(
                    "both ways, {family:?}, {client:?} connects, offload {offload}, capture {capture}"
                );
                let case = Case { name, family, client, offload, capture, ..Case::default() };
                cases.push(Sender::Both.sends(bytes, case));
            }
        }
    }
    cases
}

#[test]
fn transfers_over_links_of_every_size() {
    suite::run("transfers_over_links_of_every_size", 2, all_sizes(16 * MIB, true));
}

#[test]
fn transfers_without_offload() {
    suite::run("transfers_without_offload", 2, all_sizes(4 * MIB, false));
}

#[test]
fn transfers_over_bad_links() {
    suite::run("transfers_over_bad_links", 4, all_faults(16 * MIB));
}

#[test]
fn transfers_over_bad_links_of_every_size() {
    suite::run("transfers_over_bad_links_of_every_size", 4, bad_links_of_all_sizes(2_000));
}

#[test]
fn transfers_over_lossy_links_of_every_size() {
    suite::run("transfers_over_lossy_links_of_every_size", 4, lossy_links_of_all_sizes(2 * MIB));
}

#[test]
fn transfers_both_ways_at_once() {
    suite::run("transfers_both_ways_at_once", 2, both_ways(64 * MIB));
}

/// The transfers above with a GiB each.
mod suites {
    use super::*;
    use std::time::Duration;

    const GIB: u64 = 1 << 30;

    fn patient(cases: Vec<Case>) -> Vec<Case> {
        let limit = Duration::from_secs(3600);
        cases.into_iter().map(|case| Case { limit, ..case }).collect()
    }

    #[test]
    #[ignore = "minutes: a GiB for each case; part of `make suites`"]
    fn a_gibibyte_over_links_of_every_size() {
        suite::run("a_gibibyte_over_links_of_every_size", 2, patient(all_sizes(GIB, true)));
    }

    #[test]
    #[ignore = "minutes: a GiB for each case; part of `make suites`"]
    fn a_gibibyte_without_offload() {
        suite::run("a_gibibyte_without_offload", 2, patient(all_sizes(GIB, false)));
    }

    #[test]
    #[ignore = "minutes: a GiB for each case; part of `make suites`"]
    fn a_gibibyte_over_bad_links() {
        suite::run("a_gibibyte_over_bad_links", 4, patient(all_faults(GIB)));
    }

    #[test]
    #[ignore = "minutes: 64 MiB over small links with loss; part of `make suites`"]
    fn much_over_lossy_links_of_every_size() {
        let cases = patient(lossy_links_of_all_sizes(64 * MIB));
        suite::run("much_over_lossy_links_of_every_size", 4, cases);
    }

    #[test]
    #[ignore = "minutes: much over small links; part of `make suites`"]
    fn much_over_bad_links_of_every_size() {
        suite::run("much_over_bad_links_of_every_size", 4, patient(bad_links_of_all_sizes(50_000)));
    }

    #[test]
    #[ignore = "minutes: a GiB for each case; part of `make suites`"]
    fn a_gibibyte_both_ways_at_once() {
        suite::run("a_gibibyte_both_ways_at_once", 2, patient(both_ways(GIB)));
    }
}
