//! A web server on a stack, in a namespace, and commands that look at it.

use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::processes::wait_until;
use ginnel_testkit::skip;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

/// A stack with the name "web", whose server answers `/page` at 10.1.0.2.
pub struct WebStack<'a> {
    pub folder: &'a Path,
    run_dir: PathBuf,
    server: Child,
}

impl WebStack<'_> {
    /// Creates a `ginnel` command that finds the stack.
    pub fn ginnel(&self, arguments: &[&str]) -> Command {
        ginnel(&self.run_dir, arguments)
    }

    /// Starts a command, and returns the first line that it prints on standard error.
    pub fn start(&self, arguments: &[&str]) -> (Child, BufReader<ChildStderr>, String) {
        let mut child = self.ginnel(arguments).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut first = String::new();
        lines.read_line(&mut first).unwrap();
        (child, lines, first)
    }

    /// Requests the page.
    pub fn get_page(&self) {
        let mut client = TcpStream::connect("10.1.0.2:80").unwrap();
        client.write_all(b"GET /page HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).unwrap();
        assert!(answer.ends_with(b"hello"), "{}", String::from_utf8_lossy(&answer));
    }

    /// Kills the server's process.
    pub fn kill(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }
}

fn ginnel(run_dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel"));
    command.args(arguments).env("GINNEL_RUN_DIR", run_dir).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Sends SIGINT.
pub fn interrupt(child: &Child) {
    let id = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(id, rustix::process::Signal::INT).unwrap();
}

/// Runs `test` in a namespace with the stack.
pub fn with_web_stack(name: &str, test: impl FnOnce(&mut WebStack<'_>) + Send) {
    if let Some(reason) = unavailable() {
        return skip(name, &reason);
    }
    let namespace = Namespace::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("page"), "hello").unwrap();
    let run_dir = folder.path().join("run");
    let root = folder.path().display().to_string();
    let run = namespace.run(|| {
        assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status()?.success());
        let addresses = ["--address", "10.1.0.2/24", "--kernel-address", "10.1.0.1/24"];
        let options = ["httpd", &root, "--device", "tap:m0", "--name", "web"];
        let server = ginnel(&run_dir, &[&options[..], &addresses].concat()).spawn()?;
        let mut stack = WebStack { folder: folder.path(), run_dir, server };
        wait_until("the server does not listen", || TcpStream::connect("10.1.0.2:80").is_ok());
        test(&mut stack);
        if stack.server.try_wait()?.is_none() {
            interrupt(&stack.server);
            assert!(stack.server.wait()?.success());
        }
        Ok(())
    });
    run.unwrap();
}
