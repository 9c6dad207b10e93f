//! Many short connections, in sequence and concurrently.

use crate::case::{Case, Client, Family};
use crate::plan::Ended;
use crate::plan::{Finish, Plan};
use crate::suite;

const REQUEST: u64 = 100;
const RESPONSE: u64 = 1000;

/// The side that sends the first FIN, and keeps TIME_WAIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FirstFin {
    Client,
    Server,
}

/// Returns the plans of client and server for one request with its response.
fn exchange(first: FirstFin) -> (Plan, Plan) {
    match first {
        // The request ends with FIN, and the response follows.
        FirstFin::Client => {
            (Plan::send(REQUEST), Plan { send: RESPONSE, answer_after_fin: true, ..Plan::default() })
        }
        // As HTTP without keep-alive: the server's FIN ends the response.
        FirstFin::Server => (
            Plan { send: REQUEST, finish_after: RESPONSE, ..Plan::default() },
            Plan { send: RESPONSE, finish_after: REQUEST, ..Plan::default() },
        ),
    }
}

fn between(client: Client, (of_client, of_server): (Plan, Plan), case: Case) -> Case {
    match client {
        Client::Ginnel => Case { client, ginnel: of_client, kernel: of_server, ..case },
        Client::Kernel => Case { client, ginnel: of_server, kernel: of_client, ..case },
    }
}

fn short(count: usize, parallel: usize, link: &'static str) -> Vec<Case> {
    let mut cases = Vec::new();
    for family in [Family::V4, Family::V6] {
        for client in [Client::Ginnel, Client::Kernel] {
            for first in [FirstFin::Client, FirstFin::Server] {
                let name =
                    format!("{count} short, {family:?}, {client:?} connects, {first:?} closes first {link}");
                let case = Case { name, family, count, parallel, link, ..Case::default() };
                cases.push(between(client, exchange(first), case));
            }
        }
    }
    cases
}

#[test]
fn ten_thousand_short_connections() {
    suite::run("ten_thousand_short_connections", 2, short(10_000, 32, ""));
}

#[test]
fn short_connections_over_a_bad_link() {
    let link = "loss=2% duplicate=2% reorder=2% corrupt=1%";
    suite::run("short_connections_over_a_bad_link", 4, short(1_000, 100, link));
}

/// All connections are open before Ginnel sends its first byte.
#[test]
fn a_thousand_connections_at_once() {
    let mut cases = Vec::new();
    for family in [Family::V4, Family::V6] {
        for client in [Client::Ginnel, Client::Kernel] {
            let name = format!("1000 at once, {family:?}, {client:?} connects");
            let plan = Plan::send(64 << 10);
            let case = Case { name, family, count: 1000, parallel: 1000, all_open: true, ..Case::default() };
            cases.push(between(client, (plan, plan), case));
        }
    }
    suite::run("a_thousand_connections_at_once", 2, cases);
}

/// The server closes without waiting for the client's FIN.
#[test]
fn servers_close_without_waiting() {
    let mut cases = Vec::new();
    for family in [Family::V4, Family::V6] {
        for client in [Client::Ginnel, Client::Kernel] {
            let of_client = Plan { send: REQUEST, finish_after: RESPONSE, ..Plan::default() };
            let of_server =
                Plan { send: RESPONSE, finish_after: REQUEST, finish: Finish::Close, ..Plan::default() };
            let ends = match client {
                Client::Ginnel => (Ended::Fin, Ended::Closed),
                Client::Kernel => (Ended::Closed, Ended::Fin),
            };
            let name = format!("the server closes and forgets, {family:?}, {client:?} connects");
            let case = Case { name, family, count: 1000, parallel: 32, ends, ..Case::default() };
            cases.push(between(client, (of_client, of_server), case));
        }
    }
    suite::run("servers_close_without_waiting", 2, cases);
}
