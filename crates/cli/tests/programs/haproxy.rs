//! HAProxy with clients and servers on both sides, over the stack and over the kernel.

use crate::{CLOSE, KEEP_ALIVE, assert_load, assert_same, distinct_bytes, fixture};
use ginnel_testkit::interop::{ProgramFixture, RunningProgram};

/// Listeners of the proxy: its address or the wildcard address, and a server over the stack or over the
/// kernel.
const LISTENERS: [(&str, &str, &str); 4] = [
    ("http", "10.9.0.2:8001", "10.9.0.1:8000"),
    ("http", "*:8002", "127.0.0.1:8000"),
    ("tcp", "10.9.0.2:8003", "10.9.0.1:8000"),
    ("tcp", "*:8004", "127.0.0.1:8000"),
];

/// Addresses at which the kernel's clients reach the listeners.
const REQUEST_OPTIONS: [&str; 6] =
    ["10.9.0.2:8001", "10.9.0.2:8002", "10.9.0.2:8003", "10.9.0.2:8004", "127.0.0.1:8002", "127.0.0.1:8004"];

/// Starts the proxy on the stack in front of nginx on the kernel, and waits until it serves. `global` and
/// `proxy` are lines of its configuration.
fn start<'a>(
    fixture: &'a ProgramFixture,
    arguments: &[&str],
    global: &str,
    proxy: &str,
) -> RunningProgram<'a> {
    fixture.start_on_kernel("nginx", &["-c", &fixture.nginx("master_process off;")]);
    fixture.wait_until_listening("127.0.0.1:8000");
    let mut conf = format!(
        "global\n maxconn 2000\n stats socket {}/stats level admin\n {global}\n\
         defaults\n timeout connect 10s\n timeout client 30s\n timeout server 30s\n timeout check 10s\n",
        fixture.folder().display()
    );
    for (number, (mode, bind, server)) in LISTENERS.iter().enumerate() {
        conf += &format!(
            "listen proxy{number}\n mode {mode}\n bind {bind}\n {proxy}\n option httpchk GET /ok\n server nginx {server} check inter 100ms\n"
        );
    }
    let conf = fixture.write("haproxy.cfg", conf);
    let mut haproxy = fixture.start_on_stack(&[&["haproxy", "-f", &conf], arguments].concat());
    for (_, bind, _) in LISTENERS {
        haproxy.wait_until_listening(&bind.replace('*', "10.9.0.2"));
    }
    haproxy
}

/// Fetches a page over each address, and uploads.
fn assert_whole(fixture: &ProgramFixture) {
    let page = distinct_bytes(3_000_000);
    let path = fixture.write("site/page", &page);
    for at in REQUEST_OPTIONS {
        let fetched = fixture.client_output("curl", &["-sS", "-m", "30", &format!("http://{at}/page")]);
        assert_same(at, &fetched, &page);
        fixture.client_output("curl", &["-sS", "-m", "30", "-T", &path, &format!("http://{at}/up/{at}")]);
        assert_same(at, &fixture.read(&format!("up/{at}")), &page);
    }
}

#[test]
fn haproxy_with_threads_serves_http_and_tcp() {
    let Some(fixture) =
        fixture("haproxy_with_threads_serves_http_and_tcp", &["haproxy", "nginx", "curl", "wrk"])
    else {
        return;
    };
    let _haproxy = start(&fixture, &[], "nbthread 4", "");
    assert_whole(&fixture);
    assert_load(&fixture, "http://10.9.0.2:8001/ok", KEEP_ALIVE);
    assert_load(&fixture, "http://10.9.0.2:8003/ok", CLOSE);
}

#[test]
fn haproxy_with_a_master_serves_through_a_worker() {
    let Some(fixture) =
        fixture("haproxy_with_a_master_serves_through_a_worker", &["haproxy", "nginx", "curl", "wrk"])
    else {
        return;
    };
    let mut haproxy = start(&fixture, &["-W"], "nbthread 1", "");
    assert_whole(&fixture);
    assert_load(&fixture, "http://10.9.0.2:8002/ok", CLOSE);
    assert_eq!(haproxy.stop(), 0, "{}", haproxy.read_stderr());
}

#[test]
fn haproxy_splices() {
    let Some(fixture) = fixture("haproxy_splices", &["haproxy", "nginx", "curl", "wrk"]) else { return };
    let options = "option splice-auto\n option splice-request\n option splice-response";
    let _haproxy = start(&fixture, &[], "nbthread 2", options);
    assert_whole(&fixture);
    fixture.write("site/part", distinct_bytes(100_000));
    assert_load(&fixture, "http://10.9.0.2:8003/part", KEEP_ALIVE);
}

#[test]
fn haproxy_resets_clients_after_the_response() {
    let Some(fixture) =
        fixture("haproxy_resets_clients_after_the_response", &["haproxy", "nginx", "curl", "wrk"])
    else {
        return;
    };
    let _haproxy = start(&fixture, &[], "noepoll", "option nolinger\n option http-server-close");
    assert_load(&fixture, "http://10.9.0.2:8001/ok", CLOSE);
    assert_load(&fixture, "http://10.9.0.2:8001/ok", KEEP_ALIVE);
}
