//! HAProxy: clients and servers on either side of it, over the stack and by the kernel.

use crate::{CLOSE, KEEP_ALIVE, assert_load, assert_same, distinct_bytes, fixture};
use ginnel_testkit::interop::{ProgramFixture, RunningProgram};

/// Listeners of a proxy: an own address or all, and a server that it reaches over the stack or by the kernel.
const LISTENERS: [(&str, &str, &str); 4] = [
    ("http", "10.9.0.2:8001", "10.9.0.1:8000"),
    ("http", "*:8002", "127.0.0.1:8000"),
    ("tcp", "10.9.0.2:8003", "10.9.0.1:8000"),
    ("tcp", "*:8004", "127.0.0.1:8000"),
];

/// Where clients of the kernel reach them.
const REQUEST_OPTIONS: [&str; 6] =
    ["10.9.0.2:8001", "10.9.0.2:8002", "10.9.0.2:8003", "10.9.0.2:8004", "127.0.0.1:8002", "127.0.0.1:8004"];

/// A proxy on the stack in front of nginx on the kernel's side, once it serves. `global` and `proxy` are lines of its configuration.
fn start<'a>(place: &'a ProgramFixture, arguments: &[&str], global: &str, proxy: &str) -> RunningProgram<'a> {
    place.start_on_kernel("nginx", &["-c", &place.nginx("master_process off;")]);
    place.wait_until_listening("127.0.0.1:8000");
    let mut conf = format!(
        "global\n maxconn 2000\n stats socket {}/stats level admin\n {global}\n\
         defaults\n timeout connect 10s\n timeout client 30s\n timeout server 30s\n timeout check 10s\n",
        place.folder().display()
    );
    for (number, (mode, bind, server)) in LISTENERS.iter().enumerate() {
        conf += &format!(
            "listen proxy{number}\n mode {mode}\n bind {bind}\n {proxy}\n option httpchk GET /ok\n server nginx {server} check inter 100ms\n"
        );
    }
    let conf = place.write("haproxy.cfg", conf);
    let mut haproxy = place.start_on_stack(&[&["haproxy", "-f", &conf], arguments].concat());
    for (_, bind, _) in LISTENERS {
        haproxy.wait_until_listening(&bind.replace('*', "10.9.0.2"));
    }
    haproxy
}

/// A page through each way, and an upload.
fn assert_whole(place: &ProgramFixture) {
    let page = distinct_bytes(3_000_000);
    let path = place.write("site/page", &page);
    for at in REQUEST_OPTIONS {
        let fetched = place.client_output("curl", &["-sS", "-m", "30", &format!("http://{at}/page")]);
        assert_same(at, &fetched, &page);
        place.client_output("curl", &["-sS", "-m", "30", "-T", &path, &format!("http://{at}/up/{at}")]);
        assert_same(at, &place.read(&format!("up/{at}")), &page);
    }
}

#[test]
fn haproxy_with_threads_serves_http_and_tcp() {
    let Some(place) =
        fixture("haproxy_with_threads_serves_http_and_tcp", &["haproxy", "nginx", "curl", "wrk"])
    else {
        return;
    };
    let _haproxy = start(&place, &[], "nbthread 4", "");
    assert_whole(&place);
    assert_load(&place, "http://10.9.0.2:8001/ok", KEEP_ALIVE);
    assert_load(&place, "http://10.9.0.2:8003/ok", CLOSE);
}

#[test]
fn haproxy_with_a_master_serves_through_a_worker() {
    let Some(place) =
        fixture("haproxy_with_a_master_serves_through_a_worker", &["haproxy", "nginx", "curl", "wrk"])
    else {
        return;
    };
    let mut haproxy = start(&place, &["-W"], "nbthread 1", "");
    assert_whole(&place);
    assert_load(&place, "http://10.9.0.2:8002/ok", CLOSE);
    assert_eq!(haproxy.stop(), 0, "{}", haproxy.read_stderr());
}

#[test]
fn haproxy_splices() {
    let Some(place) = fixture("haproxy_splices", &["haproxy", "nginx", "curl", "wrk"]) else { return };
    let options = "option splice-auto\n option splice-request\n option splice-response";
    let _haproxy = start(&place, &[], "nbthread 2", options);
    assert_whole(&place);
    place.write("site/part", distinct_bytes(100_000));
    assert_load(&place, "http://10.9.0.2:8003/part", KEEP_ALIVE);
}

#[test]
fn haproxy_resets_clients_after_the_response() {
    let Some(place) =
        fixture("haproxy_resets_clients_after_the_response", &["haproxy", "nginx", "curl", "wrk"])
    else {
        return;
    };
    let _haproxy = start(&place, &[], "noepoll", "option nolinger\n option http-server-close");
    assert_load(&place, "http://10.9.0.2:8001/ok", CLOSE);
    assert_load(&place, "http://10.9.0.2:8001/ok", KEEP_ALIVE);
}
