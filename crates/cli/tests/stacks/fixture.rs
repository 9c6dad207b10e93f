//! Stacks and programs in a directory of the test's own.

pub use ginnel_testkit::processes::{signal, wait_until};

use ginnel_testkit::interop::build_preload_library;
use ginnel_testkit::skip;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");
/// No test waits longer.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the path of the library that `ginnel run` preloads.
pub fn built_library() -> &'static Path {
    build_preload_library(GINNEL)
}

/// Returns the path of the Python interpreter itself, and not of a wrapper script.
pub fn python() -> Option<&'static str> {
    static PYTHON: OnceLock<Option<String>> = OnceLock::new();
    let find = || {
        let output =
            Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().ok()?;
        Some(String::from_utf8(output.stdout).ok()?.trim().to_string()).filter(|path| !path.is_empty())
    };
    PYTHON.get_or_init(find).as_deref()
}

/// Returns true, and prints a note, if the test cannot run here.
pub fn skipped(test: &str) -> bool {
    let missing = python().is_none();
    if missing {
        skip(test, "no python3");
    }
    missing
}

/// Returns true, and prints a note, if the test cannot make PID namespaces here.
pub fn skipped_without_pid_namespaces(test: &str) -> bool {
    let probe = Command::new("unshare").args(["--pid", "--fork", "--mount-proc", "true"]).output();
    let missing = !probe.is_ok_and(|output| output.status.success());
    if missing {
        skip(test, "PID namespaces need CAP_SYS_ADMIN and unshare(1)");
    }
    missing
}

/// Directory of a test's stacks, removed when the value is dropped.
pub struct Fixture(PathBuf);

impl Fixture {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ginnel-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Creates a `ginnel` command.
    pub fn ginnel(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(GINNEL);
        command
            .args(arguments)
            .env("GINNEL_LIBRARY", built_library())
            .env("GINNEL_RUN_DIR", self.0.join("run"));
        command.env_remove("LD_PRELOAD").env_remove("GINNEL_STACK").current_dir(&self.0);
        command
    }

    /// Runs a `ginnel` command to its end.
    pub fn run(&self, arguments: &[&str]) -> Output {
        run_to_end(self.ginnel(arguments))
    }

    /// Runs a `ginnel` command, which must succeed, and returns its output.
    #[track_caller]
    pub fn run_ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a stack, which is stopped when the value is dropped.
    #[track_caller]
    pub fn start_stack<'a>(&'a self, name: &'a str, options: &[&str]) -> RunningStack<'a> {
        self.run_ok(&[&["up", name, "--background"], options].concat());
        self.stopped_at_end(name)
    }

    /// Returns a value that stops a running stack when it is dropped.
    pub fn stopped_at_end<'a>(&'a self, name: &'a str) -> RunningStack<'a> {
        RunningStack(self, name)
    }

    /// Creates a `ginnel run` command for a Python script.
    pub fn script(&self, options: &[&str], text: &str) -> Command {
        self.script_without_prelude(options, &format!("{PRELUDE}\n{text}"))
    }

    /// Creates a command for a script without the prelude. Importing `socket` creates an epoll set, which
    /// attaches to the stack.
    pub fn script_without_prelude(&self, options: &[&str], text: &str) -> Command {
        self.ginnel(&[&["run"], options, &["--", python().unwrap(), "-c", text]].concat())
    }

    /// Compiles a C program, whose source is in the directory of the tests, and returns its path. The source
    /// may include files of the fixture's directory.
    pub fn compile_c(&self, name: &str) -> String {
        let program = self.0.join(name);
        let source =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stacks").join(name).with_extension("c");
        let mut cc = Command::new("cc");
        cc.args(["-Wall", "-Wno-deprecated-declarations", "-O1", "-pthread", "-o"]).arg(&program).arg(source);
        cc.arg("-I").arg(&self.0);
        assert!(cc.status().expect("cc, a C compiler, runs").success());
        program.to_str().unwrap().to_string()
    }

    /// Compiles a C program and runs it with these arguments on the kernel and on the loopback of a stack.
    /// Both outputs must be equal, and end with the line `end`.
    #[track_caller]
    pub fn compare_c_program(&self, name: &str, arguments: &[&str]) {
        let program = &*self.compile_c(name);
        let run = |options: &[&str]| self.run_ok(&[&["run"], options, &["--", program], arguments].concat());
        let on_kernel = run(&["--stack", "kernel"]);
        assert!(on_kernel.ends_with("end\n"), "{on_kernel}");
        let on_stack = run(&["--loopback", "stack"]);
        let differences: Vec<_> =
            on_kernel.lines().zip(on_stack.lines()).filter(|(kernel, stack)| kernel != stack).collect();
        assert!(on_kernel == on_stack, "kernel and stack: {differences:#?}");
    }

    /// Runs a script, which must succeed, and returns its output.
    #[track_caller]
    pub fn script_output(&self, options: &[&str], text: &str) -> String {
        let output = run_to_end(self.script(options, text));
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A running stack.
pub struct RunningStack<'a>(&'a Fixture, &'a str);

impl Drop for RunningStack<'_> {
    fn drop(&mut self) {
        let _ = self.0.run(&["down", self.1, "--force"]);
    }
}

/// Beginning of every script.
pub const PRELUDE: &str = "import os, sys, socket, select, signal, struct, time, threading
def server(host, port, **more):
    s = socket.create_server((host, port), **more)
    return s
def exactly(s, n):
    got = b''
    while len(got) < n:
        part = s.recv(n - len(got))
        if not part: break
        got += part
    return got
signal.alarm(50)
";

/// Copies a program. Another process does it: if this one wrote the copy, a child that another test forks
/// meanwhile would have its descriptor, and the kernel would refuse to execute the copy (`ETXTBSY`).
pub fn copy_program(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg(from).arg(to).status().unwrap().success());
}

/// Runs a command until it ends; panics after [`TIMEOUT`].
pub fn run_to_end(mut command: Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    RunningProgram(Some(child)).wait_for_output()
}

/// A program that runs beside the test and is killed when the value is dropped.
pub struct RunningProgram(Option<Child>);

impl RunningProgram {
    pub fn new(mut command: Command) -> Self {
        Self(Some(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()))
    }

    pub fn pid(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    pub fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Waits for the end of the program and returns its output.
    pub fn wait_for_output(mut self) -> Output {
        let mut child = self.0.take().unwrap();
        let until = Instant::now() + TIMEOUT;
        let printed = [(); 2].map(|()| Arc::new(Mutex::new(Vec::new())));
        let readers = [
            spawn_reader(child.stdout.take().unwrap(), &printed[0]),
            spawn_reader(child.stderr.take().unwrap(), &printed[1]),
        ];
        let status = loop {
            // Its children may have the pipes for longer than it lives.
            let are_closed = readers.iter().all(JoinHandle::is_finished);
            if let Some(status) = child.try_wait().unwrap().filter(|_| are_closed) {
                break status;
            }
            if Instant::now() > until {
                let _ = child.kill();
                let _ = child.wait();
                let [stdout, stderr] =
                    printed.map(|bytes| String::from_utf8_lossy(&bytes.lock().unwrap()).into_owned());
                panic!("it or a child does not end; it has printed {stdout:?} and {stderr:?}");
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let [stdout, stderr] = printed.map(|bytes| std::mem::take(&mut *bytes.lock().unwrap()));
        Output { status, stdout, stderr }
    }
}

/// Starts a thread that appends what a program prints, until the program and its children have closed the
/// pipe.
fn spawn_reader(mut pipe: impl Read + Send + 'static, printed: &Arc<Mutex<Vec<u8>>>) -> JoinHandle<()> {
    let printed = Arc::clone(printed);
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        loop {
            match pipe.read(&mut buffer) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => break,
                Ok(count) => printed.lock().unwrap().extend_from_slice(&buffer[..count]),
            }
        }
    })
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
