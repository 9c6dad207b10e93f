//! DNS servers over UDP and TCP, and dig at either end.

use crate::fixture;
use ginnel_testkit::interop::ProgramFixture;

/// Runs dig, with retries while the server starts.
fn dig(fixture: &ProgramFixture, arguments: &[&str]) -> String {
    let always = ["+short", "+time=1", "+tries=20"];
    fixture.client_text("dig", &[&always[..], arguments].concat())
}

#[test]
fn dnsmasq_and_dig_work_over_both_stacks() {
    let Some(fixture) = fixture("dnsmasq_and_dig_work_over_both_stacks", &["dnsmasq", "dig"]) else { return };
    // The response does not fit into a datagram without EDNS, but does with it.
    let long = ["a", "b", "c"].map(|letter| letter.repeat(240));
    let record = format!("--txt-record=long.test,{}", long.join(","));
    let config = ["--no-resolv", "--no-hosts", "--user=root", "--address=/name.test/10.1.2.3", &record];
    let server = [&["dnsmasq", "--no-daemon"], &config[..]].concat();
    let bound = ["--bind-interfaces", "--listen-address=10.9.0.2"];
    let mut dnsmasq = fixture.start_on_stack(&[&server, &bound[..]].concat());
    dnsmasq.wait_until_listening("10.9.0.2:53");
    assert_eq!(dig(&fixture, &["@10.9.0.2", "name.test"]), "10.1.2.3\n");
    assert_eq!(dig(&fixture, &["@10.9.0.2", "name.test", "+tcp"]), "10.1.2.3\n");
    let expected = format!("{}\n", long.map(|text| format!("\"{text}\"")).join(" "));
    assert_eq!(dig(&fixture, &["@10.9.0.2", "long.test", "TXT", "+bufsize=1400"]), expected);
    assert_eq!(dig(&fixture, &["@10.9.0.2", "long.test", "TXT", "+noedns"]), expected, "again over TCP");
    assert_eq!(dnsmasq.stop(), 0, "{}", dnsmasq.read_stderr());
    drop(dnsmasq);

    // The server runs on the kernel, and dig on the stack.
    fixture.start_on_kernel("dnsmasq", &[&["--keep-in-foreground"], &config[..]].concat());
    let mut asks = fixture.start_on_stack(&[
        "sh",
        "-c",
        "for how in +notcp +tcp +noedns; do dig +short +time=1 +tries=20 @10.9.0.1 long.test TXT $how; done >answers",
    ]);
    assert_eq!(asks.wait_for_exit(), 0, "{}", asks.read_stderr());
    assert_eq!(String::from_utf8(fixture.read("answers")).unwrap(), expected.repeat(3));
}

#[test]
fn unbound_answers_with_two_threads() {
    let Some(fixture) = fixture("unbound_answers_with_two_threads", &["unbound", "dig"]) else { return };
    let config = fixture.write(
        "unbound.conf",
        "server:
  interface: 10.9.0.2
  do-daemonize: no
  username: \"\"
  chroot: \"\"
  pidfile: \"\"
  use-syslog: no
  num-threads: 2
  so-reuseport: yes
  access-control: 10.9.0.0/24 allow
  local-zone: \"test.\" static
  local-data: \"name.test. IN A 10.1.2.3\"
  module-config: \"iterator\"
remote-control:
  control-enable: no
",
    );
    let mut unbound = fixture.start_on_stack(&["unbound", "-d", "-c", &config]);
    unbound.wait_until_listening("10.9.0.2:53");
    for _ in 0..10 {
        assert_eq!(dig(&fixture, &["@10.9.0.2", "name.test"]), "10.1.2.3\n");
        assert_eq!(dig(&fixture, &["@10.9.0.2", "name.test", "+tcp"]), "10.1.2.3\n");
    }
    assert_eq!(unbound.stop(), 0, "{}", unbound.read_stderr());
}
