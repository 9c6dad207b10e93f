//! lighttpd: sendfile, epoll, and workers that share listeners.

use crate::{CLOSE, KEEP_ALIVE, assert_load, assert_same, distinct_bytes, fixture};
use ginnel_testkit::interop::ProgramFixture;

fn serves(fixture: &ProgramFixture, more: &str) {
    let page = distinct_bytes(12_000_000);
    fixture.write("site/page", &page);
    fixture.write("site/ok", "ok");
    let at = fixture.folder().display();
    let conf = fixture.write(
        "lighttpd.conf",
        format!(
            "server.document-root = \"{at}/site\"\nserver.port = 8000\nserver.errorlog = \"{at}/error.log\"\n\
             server.max-keep-alive-requests = 1000000\n{more}\n"
        ),
    );
    let mut lighttpd = fixture.start_on_stack(&["lighttpd", "-D", "-f", &conf]);
    lighttpd.wait_until_listening("10.9.0.2:8000");
    for host in ["10.9.0.2", "127.0.0.1"] {
        let fetched =
            fixture.client_output("curl", &["-sS", "-m", "30", &format!("http://{host}:8000/page")]);
        assert_same(host, &fetched, &page);
    }
    assert_load(fixture, "http://10.9.0.2:8000/ok", KEEP_ALIVE);
    assert_load(fixture, "http://10.9.0.2:8000/ok", CLOSE);
    assert_eq!(lighttpd.stop(), 0, "{}", lighttpd.read_stderr());
}

#[test]
fn lighttpd_serves_files() {
    let Some(fixture) = fixture("lighttpd_serves_files", &["lighttpd", "curl", "wrk"]) else { return };
    serves(&fixture, "");
}

#[test]
fn lighttpd_serves_with_workers() {
    let Some(fixture) = fixture("lighttpd_serves_with_workers", &["lighttpd", "curl", "wrk"]) else { return };
    serves(&fixture, "server.max-worker = 2");
}
