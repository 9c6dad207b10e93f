//! Server programs that are compared: on a stack, and on the kernel.

use crate::fixture;
use crate::processes::pid_in_time;
use ginnel_testkit::interop::{ProgramFixture, RunningProgram};
use serde_json::Value;

/// Where a server runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Kernel,
    Stack,
    /// A stack with two shards.
    TwoShards,
    /// The kernel, with a listener per worker.
    KernelLane,
}

/// Where clients reach a server, on either side.
pub const ADDRESS: &str = "10.9.0.2:8000";

impl Side {
    pub const BOTH: [Self; 2] = [Self::Kernel, Self::Stack];

    /// Returns a fixture of its own for this side, or `None` if the test cannot run here. The namespace
    /// forwards the packets of routed clients.
    pub fn fixture(self, test: &str, programs: &[&str]) -> Option<ProgramFixture> {
        let fixture = fixture(test, programs)?;
        match self {
            Self::Kernel | Self::KernelLane => {
                drop(fixture.namespace().ip("address add 10.9.0.2/32 dev lo").unwrap())
            }
            Self::Stack | Self::TwoShards => {
                fixture.namespace().sysctl("net.ipv4.ip_forward", "1").unwrap();
            }
        }
        Some(fixture)
    }

    /// Starts a server and waits until it accepts connections at [`ADDRESS`]. A server on the kernel runs
    /// until the fixture is dropped.
    #[track_caller]
    pub fn start<'a>(self, fixture: &'a ProgramFixture, program: &[&str]) -> Option<RunningProgram<'a>> {
        match self {
            Self::Kernel => {
                fixture.start_on_kernel(program[0], &program[1..]);
                fixture.wait_until_listening(ADDRESS);
                None
            }
            Self::KernelLane => {
                crate::kernel_lane::start(fixture, "auto", program);
                fixture.wait_until_listening(ADDRESS);
                None
            }
            Self::Stack | Self::TwoShards => {
                let shards = if self == Self::TwoShards { 2 } else { 1 };
                let config = fixture.write("stack.toml", format!("[shards]\ncount = {shards}\n"));
                let options = ["--config", &config, "--gateway", "10.9.0.1"];
                let mut running = fixture.start_on_stack_with(&options, program);
                running.wait_until_listening(ADDRESS);
                Some(running)
            }
        }
    }
}

/// nginx with several workers at port 8000.
pub struct Nginx<'a> {
    /// Process id of the master.
    pub master: String,
    /// `ginnel run`, if nginx runs on a stack.
    pub on_stack: Option<RunningProgram<'a>>,
    fixture: &'a ProgramFixture,
}

impl<'a> Nginx<'a> {
    /// Starts nginx. `listen` are parameters of the `listen` directive after the port. Each response names
    /// the worker that sent it in the field `Worker`.
    #[track_caller]
    pub fn start(fixture: &'a ProgramFixture, side: Side, workers: u32, listen: &str) -> Self {
        let conf = fixture.nginx(&format!("worker_processes {workers};"));
        let text = String::from_utf8(fixture.read("nginx.conf")).unwrap();
        let listen = format!("listen 8000 {listen}; add_header Worker $pid;");
        fixture.write("nginx.conf", text.replace("listen 8000;", &listen));
        let on_stack = side.start(fixture, &["nginx", "-c", &conf]);
        Self { master: pid_in_time(fixture, "pid"), on_stack, fixture }
    }

    /// Stops nginx if it runs on a stack, and asserts that its log has no warnings or errors; with
    /// `may_kill_workers`, none but those about workers that SIGKILL has ended.
    #[track_caller]
    pub fn finish(self, may_kill_workers: bool) {
        if let Some(mut running) = self.on_stack {
            assert_eq!(running.stop(), 0, "{}", running.read_stderr());
        }
        let log = String::from_utf8(self.fixture.read("error.log")).unwrap();
        let bad = ["[emerg]", "[alert]", "[crit]", "[error]", "[warn]"];
        let is_bad = |line: &&str| bad.iter().any(|bad| line.contains(bad));
        let killed = |line: &&str| line.contains("exited on signal 9");
        let first = log.lines().filter(is_bad).find(|line| !(may_kill_workers && killed(line)));
        assert_eq!(first, None, "{log}");
    }
}

/// Asserts that a stack accelerates a process and its listener at port 8000.
#[track_caller]
pub fn assert_accelerated(fixture: &ProgramFixture, pid: &str) {
    let output = fixture.ginnel(&["check", "--json", pid]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    assert_eq!(report["accelerated"], true, "{report}");
    let sockets = report["sockets"].as_array().unwrap();
    let listener = sockets.iter().find(|row| row["local"] == "0.0.0.0:8000" && row["state"] == "LISTEN");
    // The wildcard address has a listener on the kernel, too.
    assert_eq!(listener.map(|row| &row["where"]), Some(&Value::from("both")), "{report}");
}

/// Writes the configuration of an HAProxy that answers each request itself. Returns its path.
pub fn haproxy_configuration(fixture: &ProgramFixture) -> String {
    fixture.write(
        "haproxy.cfg",
        format!(
            "global\n nbthread 1\n maxconn 1000\n\
             defaults\n mode http\n timeout connect 10s\n timeout client 60s\n timeout server 60s\n\
             listen own\n bind {ADDRESS}\n http-request return status 200 content-type text/plain string ok\n"
        ),
    )
}
