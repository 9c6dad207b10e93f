//! nginx is reloaded again and again while requests arrive at a fixed rate: none fails.

use crate::open_loop::{Client, requests_during};
use crate::processes::{children, signal, wait_until};
use crate::server::{ADDRESS, Nginx, Side};

const WORKERS: u32 = 2;
/// Requests per second.
const RATE: u32 = 500;

/// Reloads nginx `count` times, with a listener that the workers share and with one for each worker.
fn assert_reloads_fail_nothing(test: &str, count: u32) {
    for listen in ["", "reuseport"] {
        let Some(fixture) = Side::Stack.fixture(test, &["nginx", "pgrep"]) else { return };
        let nginx = Nginx::start(&fixture, Side::Stack, WORKERS, listen);
        let answers =
            requests_during(&fixture, Client::Kernel, &format!("http://{ADDRESS}/ok"), RATE, count, |_| {
                let old = children(&nginx.master);
                signal(&nginx.master, "HUP");
                wait_until("new workers serve alone", || {
                    let now = children(&nginx.master);
                    now.len() == WORKERS as usize && now.iter().all(|worker| !old.contains(worker))
                });
            });
        println!("{count} reloads, listen {listen:?}: {answers}");
        assert_eq!(answers.failed, 0, "listen {listen:?}: {answers}");
        nginx.finish(false);
    }
}

#[test]
fn twenty_nginx_reloads_fail_no_request() {
    assert_reloads_fail_nothing("twenty_nginx_reloads_fail_no_request", 20);
}

#[test]
#[ignore = "minutes: 200 reloads for each kind of listener; part of `make suites`"]
fn hundreds_of_nginx_reloads_fail_no_request() {
    assert_reloads_fail_nothing("hundreds_of_nginx_reloads_fail_no_request", 200);
}
