//! HTTP clients on a stack: curl, wrk and ab, with nginx on the kernel.

use crate::{assert_same, distinct_bytes, fixture};
use ginnel_testkit::interop::ProgramFixture;

/// Starts nginx on the kernel with a page, and returns the page.
fn serve(fixture: &ProgramFixture) -> Vec<u8> {
    let page = distinct_bytes(10 << 20);
    let conf = fixture.nginx("master_process off;");
    fixture.write("site/page", &page);
    fixture.start_on_kernel("nginx", &["-c", &conf]);
    fixture.wait_until_listening("127.0.0.1:8000");
    page
}

/// Runs a script on a stack and returns its standard output.
#[track_caller]
fn script(fixture: &ProgramFixture, script: &str) -> String {
    let mut shell = fixture.start_on_stack(&["sh", "-ec", script]);
    let stdout = shell.read_stdout();
    assert_eq!(shell.wait_for_exit(), 0, "{stdout}{}", shell.read_stderr());
    stdout
}

#[test]
fn curl_runs_on_a_stack() {
    let Some(fixture) = fixture("curl_runs_on_a_stack", &["curl", "nginx"]) else { return };
    let page = serve(&fixture);
    let text = script(
        &fixture,
        "
        at=http://10.9.0.1:8000
        # Twice over one connection.
        curl -sS -m 30 -o first $at/page -o second $at/page -w '%{num_connects} '
        curl -sS -m 30 -T site/page $at/up/put
        curl -sS -m 30 --limit-rate 20M -o slow $at/page
        # By its address, from a port of its own choice, by a name that somebody looks up.
        curl -sS -m 30 --interface 10.9.0.2 --local-port 5000-5100 $at/ok
        curl -sS -m 30 --resolve there:8000:10.9.0.1 http://there:8000/ok
        # What the stack does not reach is the kernel's.
        curl -sS -m 30 http://localhost:8000/ok
        curl -sS -m 30 -Z --parallel-max 20 -o /dev/null \"$at/ok?[1-100]\" 2>&1
        # Nobody listens there.
        curl -sS -m 30 http://10.9.0.1:8001/ok 2>&1 || echo $?
        ",
    );
    assert!(text.starts_with("1 0 okokok"), "{text}");
    assert!(text.ends_with("Couldn't connect to server\n7\n"), "{text}");
    for file in ["first", "second", "slow", "up/put"] {
        assert_same(file, &fixture.read(file), &page);
    }
}

#[test]
fn wrk_and_ab_run_on_a_stack() {
    let Some(fixture) = fixture("wrk_and_ab_run_on_a_stack", &["ab", "wrk", "nginx"]) else { return };
    let page = serve(&fixture);
    let text = script(
        &fixture,
        "
        at=http://10.9.0.1:8000
        wrk -t 2 -c 20 -d 1 $at/ok
        wrk -t 1 -c 20 -d 1 -H 'Connection: close' $at/ok
        ab -q -n 2000 -c 20 $at/ok
        ab -q -k -n 5000 -c 20 $at/ok
        ab -q -n 10 -c 5 $at/page
        ab -q -n 10 -c 5 -u site/page $at/up/put
        ",
    );
    assert_eq!(text.matches("requests in").count(), 2, "{text}");
    assert!(!text.contains("Socket errors") && !text.contains("Non-2xx"), "{text}");
    assert_eq!(text.matches("Failed requests:        0\n").count(), 4, "{text}");
    assert!(text.contains(&format!("HTML transferred:       {} bytes", 10 * page.len())), "{text}");
    assert_same("upload", &fixture.read("up/put"), &page);
}
