//! HAProxy is replaced by `haproxy -sf`: the old process closes its listeners, and the new one has listeners
//! of its own at the same addresses (`SO_REUSEPORT`).

use crate::open_loop::{Client, requests_during};
use crate::processes::{pid, signal, wait_until};
use crate::server::{ADDRESS, Side, haproxy_configuration};
use ginnel_testkit::interop::{ProgramFixture, RunningProgram};
use std::fs::File;
use std::io::{Read, Write};
use std::process::Command;

/// Number of connections that wait at the listener that is closed.
const WAITING: usize = 40;
/// Requests per second.
const RATE: u32 = 2000;
/// Bit of `ShdPnd` in `/proc/PID/status` (proc(5)) that is set while SIGUSR1 is pending.
const USR1_PENDING: u64 = 1 << (10 - 1);

/// HAProxy below a shell, which starts a successor for each line that it reads.
struct Proxy<'a> {
    fixture: &'a ProgramFixture,
    requests: File,
    on_stack: Option<RunningProgram<'a>>,
}

impl<'a> Proxy<'a> {
    #[track_caller]
    fn start(fixture: &'a ProgramFixture, side: Side) -> Self {
        let conf = haproxy_configuration(fixture);
        let requests = fixture.folder().join("requests");
        assert!(Command::new("mkfifo").arg(&requests).status().unwrap().success());
        let script = format!(
            "haproxy -db -f {conf} & old=$!
            trap 'kill $old $new; exit 1' TERM
            echo $old >old
            while read -r _; do
                haproxy -db -f {conf} -sf $old & new=$!
                wait $old
                old=$new
                echo $old >next && mv next old
            done <requests
            kill $old
            wait $old"
        );
        let on_stack = side.start(fixture, &["sh", "-c", &script]);
        // Opened for reading, too, so that opening does not wait for the shell.
        let requests = File::options().read(true).write(true).open(requests).unwrap();
        Self { fixture, requests, on_stack }
    }

    /// Returns the process id of the proxy that serves.
    fn pid(&self) -> String {
        pid(self.fixture, "old").expect("the shell writes it before a proxy listens")
    }

    /// Starts a successor.
    fn request_successor(&mut self) {
        self.requests.write_all(b"\n").unwrap();
    }

    #[track_caller]
    fn wait_for_end_of(&self, old: &str) {
        wait_until("the old proxy has ended", || self.pid() != old);
    }

    /// Stops the proxy on a stack, which must have run without complaint.
    #[track_caller]
    fn finish(self) {
        drop(self.requests);
        if let Some(mut running) = self.on_stack {
            // The last proxy was ended by SIGTERM.
            assert_eq!(running.wait_for_exit(), 128 + 15, "{}", running.read_stderr());
        }
    }
}

/// Returns how many of the connections that wait at a listener get their answer when the listener is closed
/// and another one has its address.
#[track_caller]
fn served_of_waiting(fixture: &ProgramFixture, side: Side) -> usize {
    let mut proxy = Proxy::start(fixture, side);
    let old = proxy.pid();
    signal(&old, "STOP");
    let mut waiting: Vec<_> = (0..WAITING).map(|_| fixture.connect(ADDRESS).unwrap()).collect();
    for stream in &mut waiting {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n").unwrap();
    }
    proxy.request_successor();
    wait_until("the successor listens and asks the old proxy to stop", || {
        let status = std::fs::read_to_string(format!("/proc/{old}/status")).unwrap_or_default();
        let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
        pending.is_some_and(|bits| u64::from_str_radix(bits.trim(), 16).unwrap() & USR1_PENDING != 0)
    });
    signal(&old, "CONT");
    let served = waiting.iter_mut().filter_map(|stream| {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok().filter(|_| answer.ends_with("ok"))
    });
    let served = served.count();
    proxy.wait_for_end_of(&old);
    proxy.finish();
    served
}

#[test]
fn connections_at_a_closing_listener_reach_its_successor() {
    let test = "connections_at_a_closing_listener_reach_its_successor";
    let programs = ["haproxy", "mkfifo"];
    // Linux is the reference with this sysctl, which kernels before 5.14 lack. Without it Linux resets them,
    // except for a few that the old proxy accepts between SIGCONT and SIGUSR1.
    for migrate in ["0", "1"] {
        let Some(fixture) = Side::Kernel.fixture(test, &programs) else { return };
        if fixture.namespace().sysctl("net.ipv4.tcp_migrate_req", migrate).is_ok() {
            let served = served_of_waiting(&fixture, Side::Kernel);
            assert_eq!(served == WAITING, migrate == "1", "tcp_migrate_req {migrate}: {served} served");
        }
    }
    for side in [Side::Stack, Side::TwoShards] {
        let Some(fixture) = side.fixture(test, &programs) else { return };
        assert_eq!(served_of_waiting(&fixture, side), WAITING, "{side:?}");
    }
}

#[test]
fn haproxy_soft_stops_fail_no_request() {
    let test = "haproxy_soft_stops_fail_no_request";
    let Some(fixture) = Side::Stack.fixture(test, &["haproxy", "mkfifo"]) else { return };
    let mut proxy = Proxy::start(&fixture, Side::Stack);
    let answers = requests_during(&fixture, Client::Kernel, &format!("http://{ADDRESS}/"), RATE, 20, |_| {
        let old = proxy.pid();
        proxy.request_successor();
        proxy.wait_for_end_of(&old);
    });
    println!("20 soft stops: {answers}");
    assert_eq!(answers.failed, 0, "{answers}");
    proxy.finish();
}
