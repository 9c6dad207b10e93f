//! One of the hosts: a stack, nginx on it, BIRD, and `announce-while`.

use crate::network::Network;
use crate::process::{GINNEL, Process, copy_example, example, start_bird};
use ginnel_testkit::interop::{Namespace, build_preload_library};
use ginnel_testkit::processes::wait_until;
use rustix::process::Signal;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// The programs of a host. Dropping the value kills them.
pub struct Host<'a> {
    number: usize,
    machine: &'a Namespace,
    folder: PathBuf,
    stack: Option<Process>,
    server: Option<Process>,
    _bird: Process,
    _announcer: Process,
}

impl<'a> Host<'a> {
    /// Starts all programs. The stack is ready when the function returns, the service is announced later.
    pub fn start(network: &'a Network, number: usize) -> Self {
        let machine = network.host(number);
        let folder = std::env::temp_dir().join(format!("ginnel-ecmp-{}-{number}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        copy_example("web.toml", &folder, "10.0.0.21", &format!("10.0.0.2{number}"));
        let bird = copy_example("host.bird.conf", &folder, "10.0.0.11", &format!("10.0.0.1{number}"));
        let at = folder.display();
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        let temporary: String = temporary.iter().map(|name| format!("{name}_temp_path {at};\n")).collect();
        // Each answer is a line that names the host.
        fs::write(
            folder.join("nginx.conf"),
            format!(
                "daemon off; user root; error_log {at}/error.log; pid {at}/nginx.pid;\n\
                 events {{ worker_connections 1024; }}\n\
                 http {{ access_log off; keepalive_requests 1000000; {temporary}\n\
                 server {{ listen 80; location / {{ return 200 \"host{number}\\n\"; }} }} }}\n"
            ),
        )
        .unwrap();
        let mut host = Self {
            number,
            machine,
            stack: None,
            server: None,
            _bird: start_bird(machine, &folder, &bird),
            _announcer: Self::start_announcer(machine, &folder),
            folder,
        };
        host.start_stack();
        host.start_server();
        host
    }

    pub fn number(&self) -> usize {
        self.number
    }

    /// Starts the command of `announce.service`, which docs/past-one-machine.md explains.
    fn start_announcer(machine: &Namespace, folder: &std::path::Path) -> Process {
        let mut command = Command::new(example("announce-while"));
        command.args(["service", GINNEL, "run", "--stack", "web", "--"]);
        command.args(["curl", "-sfN", "--fail-early", "--rate", "5/s", "--max-time", "0.4"]);
        command.args(["-H", "Connection: close", "http://203.0.113.10/health#[1-1000000000]"]);
        command.env("BIRDC", "birdc -s bird.ctl");
        let command = Self::with_stack(command, folder);
        Process::start(machine, folder, "announce", command)
    }

    /// Adds the runtime directory of the stack and the library to the environment of a command.
    fn with_stack(mut command: Command, folder: &std::path::Path) -> Command {
        command.env("GINNEL_RUN_DIR", folder.join("run"));
        command.env("GINNEL_LIBRARY", build_preload_library(GINNEL)).env_remove("GINNEL_STACK");
        command
    }

    fn ginnel(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(GINNEL);
        command.args(arguments);
        Self::with_stack(command, &self.folder)
    }

    pub fn start_stack(&mut self) {
        let up = self.ginnel(&["up", "web", "--config", "web.toml"]);
        let ready = self.folder.join("run/web/ready");
        // A stack that was killed may have left it.
        let _ = fs::remove_file(&ready);
        let mut stack = Process::start(self.machine, &self.folder, "up", up);
        wait_until("the stack is ready", || {
            stack.assert_running();
            ready.exists()
        });
        self.stack = Some(stack);
    }

    /// Starts nginx. It serves soon after the function returns.
    pub fn start_server(&mut self) {
        let nginx = self.ginnel(&[
            "run",
            "--stack",
            "web",
            "--kernel-listen",
            "off",
            "--",
            "nginx",
            "-c",
            &self.folder.join("nginx.conf").display().to_string(),
        ]);
        self.server = Some(Process::start(self.machine, &self.folder, "nginx", nginx));
    }

    /// Kills the stack. nginx goes on without it.
    pub fn kill_stack(&mut self) {
        self.stack = None;
    }

    pub fn kill_server(&mut self) {
        self.server = None;
    }

    /// Stops the process of the shards, which then hangs.
    pub fn stop_shards(&self) {
        self.stack.as_ref().unwrap().signal_children(Signal::STOP);
    }

    pub fn continue_shards(&self) {
        self.stack.as_ref().unwrap().signal_children(Signal::CONT);
    }
}

impl Drop for Host<'_> {
    fn drop(&mut self) {
        self.server = None;
        self.stack = None;
        let _ = fs::remove_dir_all(&self.folder);
    }
}
