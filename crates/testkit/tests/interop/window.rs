//! Readers that pause: the window closes, is probed, and opens again.

use crate::case::{Case, Client, Family};
use crate::plan::{Pause, Plan};
use crate::suite;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// Returns cases in which either side pauses reading.
fn pauses(what: &str, time: Duration, base: &Case) -> Vec<Case> {
    let bytes = 24 * MIB;
    let sends = Plan::send(bytes);
    let pause = Some(Pause { after: MIB, time });
    let reads = Plan { pause, finish_after: bytes, ..Plan::default() };
    let mut cases = Vec::new();
    for family in [Family::V4, Family::V6] {
        for client in [Client::Ginnel, Client::Kernel] {
            let roles = format!("{what}, {family:?}, {client:?} connects");
            let name = format!("Ginnel pauses, {roles}");
            cases.push(Case { name, family, client, ginnel: reads, kernel: sends, ..base.clone() });
            let name = format!("the kernel pauses, {roles}");
            cases.push(Case { name, family, client, ginnel: sends, kernel: reads, ..base.clone() });
        }
    }
    cases
}

#[test]
fn paused_reader_gets_everything() {
    let base = Case::default();
    suite::run("paused_reader_gets_everything", 8, pauses("perfect link", Duration::from_secs(4), &base));
}

/// Probes and window updates are lost, too.
#[test]
fn paused_reader_over_bad_link_gets_everything() {
    let base = Case { link: "loss=3% duplicate=1% reorder=1%", ..Case::default() };
    let cases = pauses("bad link", Duration::from_secs(2), &base);
    suite::run("paused_reader_over_bad_link_gets_everything", 8, cases);
}

/// The window closes again and again, because buffers hold a few segments.
#[test]
fn transfers_through_tiny_buffers() {
    let sysctls = vec![("net.ipv4.tcp_rmem", "2304 4608 4608"), ("net.ipv4.tcp_wmem", "4608 4608 4608")];
    let config = |config: &mut ginnel::Config| {
        config.tcp.recv_buffer_bytes = 4096;
        config.tcp.send_buffer_bytes = 4096;
    };
    let (bytes, mut cases) = (2 * MIB, Vec::new());
    for family in [Family::V4, Family::V6] {
        for client in [Client::Ginnel, Client::Kernel] {
            let name = format!("tiny buffers, {family:?}, {client:?} connects");
            let plan = Plan::send(bytes);
            let case = Case { name, family, client, ginnel: plan, kernel: plan, ..Case::default() };
            cases.push(Case { sysctls: sysctls.clone(), config, ..case });
        }
    }
    suite::run("transfers_through_tiny_buffers", 4, cases);
}
