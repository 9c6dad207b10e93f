//! Ends of connections: half-close, resets from either side, refusals.

use crate::case::{Case, Client, Family};
use crate::plan::{Ended, Finish, Plan};
use crate::suite;

const MIB: u64 = 1 << 20;

/// Returns the case for both families and both roles.
fn in_all_roles(name: &str, case: &Case) -> Vec<Case> {
    let mut cases = Vec::new();
    for family in [Family::V4, Family::V6] {
        for client in [Client::Ginnel, Client::Kernel] {
            let name = format!("{name}, {family:?}, {client:?} connects");
            cases.push(Case { name, family, client, ..case.clone() });
        }
    }
    cases
}

#[test]
fn half_close_allows_the_other_direction() {
    let (asks, answers) =
        (Plan::send(4 * MIB), Plan { send: 4 * MIB, answer_after_fin: true, ..Plan::default() });
    let ginnel = Case { ginnel: asks, kernel: answers, ..Case::default() };
    let kernel = Case { ginnel: answers, kernel: asks, ..Case::default() };
    let mut cases = in_all_roles("Ginnel closes its half first", &ginnel);
    cases.extend(in_all_roles("the kernel closes its half first", &kernel));
    suite::run("half_close_allows_the_other_direction", 4, cases);
}

#[test]
fn empty_connections_close() {
    suite::run("empty_connections_close", 4, in_all_roles("no data", &Case::default()));
}

#[test]
fn resets_reach_the_other_side() {
    let resets = |finish_after| Plan { finish: Finish::Reset, finish_after, ..Plan::default() };
    let endless = Plan::send(1 << 40);
    let mut cases = Vec::new();
    for (when, after) in [("soon", 1), ("while receiving", MIB)] {
        let ends = (Ended::Aborted, Ended::Reset);
        let ginnel = Case { ginnel: resets(after), kernel: endless, ends, ..Case::default() };
        cases.extend(in_all_roles(&format!("Ginnel resets {when}"), &ginnel));
        let ends = (Ended::Reset, Ended::Aborted);
        let kernel = Case { ginnel: endless, kernel: resets(after), ends, ..Case::default() };
        cases.extend(in_all_roles(&format!("the kernel resets {when}"), &kernel));
    }
    suite::run("resets_reach_the_other_side", 4, cases);
}

#[test]
fn resets_of_senders_reach_the_receiver() {
    let resets = Plan { send: 64 << 10, finish: Finish::Reset, finish_after: 1, ..Plan::default() };
    let patient = Plan { send: 1, finish_after: 1 << 40, ..Plan::default() };
    let ginnel =
        Case { ginnel: resets, kernel: patient, ends: (Ended::Aborted, Ended::Reset), ..Case::default() };
    let kernel =
        Case { ginnel: patient, kernel: resets, ends: (Ended::Reset, Ended::Aborted), ..Case::default() };
    let mut cases = in_all_roles("Ginnel resets after sending", &ginnel);
    cases.extend(in_all_roles("the kernel resets after sending", &kernel));
    suite::run("resets_of_senders_reach_the_receiver", 4, cases);
}

/// The reset arrives before any other segment of the application.
#[test]
fn server_may_reset_immediately() {
    let resets = Plan { finish: Finish::Reset, ..Plan::default() };
    let endless = Plan::send(1 << 40);
    let ginnel =
        Case { ginnel: resets, kernel: endless, ends: (Ended::Aborted, Ended::Reset), ..Case::default() };
    let kernel =
        Case { ginnel: endless, kernel: resets, ends: (Ended::Reset, Ended::Aborted), ..Case::default() };
    let mut cases = in_all_roles("Ginnel resets at once", &ginnel);
    cases.retain(|case| case.client == Client::Kernel);
    cases.extend(in_all_roles("the kernel resets at once", &kernel));
    suite::run("server_may_reset_immediately", 4, cases);
}

/// Linux sends RST when a socket is closed with unread bytes, or receives bytes after it was closed (RFC 2525
/// §2.17), and so does Ginnel.
#[test]
fn closing_with_unread_bytes_resets() {
    let closes = Plan { finish: Finish::Close, finish_after: 1000, ..Plan::default() };
    let endless = Plan::send(1 << 40);
    let ginnel =
        Case { ginnel: closes, kernel: endless, ends: (Ended::Aborted, Ended::Reset), ..Case::default() };
    let kernel =
        Case { ginnel: endless, kernel: closes, ends: (Ended::Reset, Ended::Closed), ..Case::default() };
    let mut cases = in_all_roles("Ginnel closes with unread bytes", &ginnel);
    cases.extend(in_all_roles("the kernel closes with unread bytes", &kernel));
    suite::run("closing_with_unread_bytes_resets", 4, cases);
}

#[test]
fn connections_to_closed_ports_are_refused() {
    let case = Case { listens: false, ends: (Ended::Refused, Ended::Refused), count: 10, ..Case::default() };
    suite::run("connections_to_closed_ports_are_refused", 4, in_all_roles("closed port", &case));
}

/// Handshakes, FINs and resets are lost, too.
#[test]
fn connections_end_over_a_bad_link() {
    let link = "loss=10% duplicate=5% reorder=5%";
    let plan = Plan::send(1000);
    let lossy = Case { ginnel: plan, kernel: plan, count: 200, parallel: 200, link, ..Case::default() };
    suite::run("connections_end_over_a_bad_link", 4, in_all_roles("a tenth of all frames is lost", &lossy));
}
