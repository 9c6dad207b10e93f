//! Unmodified programs on a stack of their own (`ginnel run`), and the kernel's programs on the other side of
//! a TAP device.

use super::{Namespace, unavailable};
use crate::processes::signal;
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Options of a stack over TAP: the stack has the address 10.9.0.2, the kernel 10.9.0.1.
pub const STACK: [&str; 6] =
    ["--device", "tap:run0", "--address", "10.9.0.2/24", "--kernel-address", "10.9.0.1/24"];
/// Upper limit of every wait, however busy the machine is.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Directory of servers that may be missing in `PATH`.
const EXTRA_PATH: &str = "/usr/sbin";

/// Builds the library that `ginnel run` preloads and returns its path. Cargo does not build it for the tests
/// of another package. `ginnel` is the path of the command; the library is built in the same directory.
/// Builds nothing if [`programs_are_built`].
///
/// # Panics
/// If the build fails.
pub fn build_preload_library(ginnel: &str) -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| build_library(ginnel, "ginnel-posix", "libginnel.so"))
}

/// Builds the library of `ginnel run --stack kernel --listen-spawn`, as [`build_preload_library`] does its
/// library.
///
/// # Panics
/// If the build fails.
pub fn build_kernel_library(ginnel: &str) -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| build_library(ginnel, "ginnel-kernel-preload", "libginnel_kernel.so"))
}

/// Builds the library of the C API, as [`build_preload_library`] does its library.
///
/// # Panics
/// If the build fails.
pub fn build_c_library(ginnel: &str) -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| build_library(ginnel, "ginnel-capi", "libginnel_c.so"))
}

fn build_library(ginnel: &str, package: &str, file: &str) -> PathBuf {
    let folder = Path::new(ginnel).parent().expect("the path has a directory");
    if programs_are_built() {
        return folder.join(file);
    }
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--locked", "--package", package]);
    build.arg("--target-dir").arg(folder.parent().expect("the command is in a profile directory"));
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    let built = build.output().expect("cargo runs");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    folder.join(file)
}

/// Returns true if `scripts/test` has built all programs and libraries of the workspace. A build of single
/// packages would compile their dependencies again, with fewer features.
pub fn programs_are_built() -> bool {
    std::env::var_os("GINNEL_TEST_BUILT").is_some()
}

/// Returns why programs cannot run on a stack here: a missing privilege, or the first of `programs` that is
/// not installed. `None` if they can.
pub fn programs_unavailable(programs: &[&str]) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).chain([EXTRA_PATH.into()]).collect();
    let missing = |program: &&&str| !folders.iter().any(|folder| folder.join(program).metadata().is_ok());
    unavailable().or_else(|| programs.iter().find(missing).map(|program| format!("no {program}")))
}

/// A namespace with a directory for the files of the programs in it. Dropping the value removes the directory
/// and kills the programs that were started on the kernel's side.
pub struct ProgramFixture {
    namespace: Namespace,
    folder: PathBuf,
    ginnel: &'static str,
    kernel_programs: Mutex<Vec<Child>>,
}

impl ProgramFixture {
    /// Creates the namespace and the directory. `temporary` is the parent directory, `ginnel` the path of the
    /// command.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn new(ginnel: &'static str, temporary: &str, name: &str) -> io::Result<Self> {
        let folder = Path::new(temporary).join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        Ok(Self { namespace: Namespace::new()?, folder, ginnel, kernel_programs: Mutex::default() })
    }

    /// Returns the path of the directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes a file in the directory and returns its path.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        let path = self.folder.join(name);
        std::fs::create_dir_all(path.parent().expect("the path has a directory"))
            .expect("the directory is created");
        std::fs::write(&path, contents).expect("the file is written");
        path.display().to_string()
    }

    /// Reads a file of the directory.
    ///
    /// # Panics
    /// If the file cannot be read.
    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.folder.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Waits until a file of the directory is not empty, then reads it.
    ///
    /// # Panics
    /// If the file stays empty for [`TIMEOUT`].
    pub fn wait_for_content(&self, name: &str) -> Vec<u8> {
        let end = std::time::Instant::now() + TIMEOUT;
        while std::fs::metadata(self.folder.join(name)).map_or(0, |file| file.len()) == 0 {
            assert!(std::time::Instant::now() < end, "{name} stays empty");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        self.read(name)
    }

    /// Writes a configuration of nginx that serves the directory `site` on port 8000 and stores uploads in
    /// `up`. `main` is added to the main context. Returns the path of the configuration.
    pub fn nginx(&self, main: &str) -> String {
        let at = self.folder.display();
        std::fs::create_dir_all(self.folder.join("site")).expect("the directory is created");
        std::fs::create_dir_all(self.folder.join("up")).expect("the directory is created");
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        let temporary: String = temporary.iter().map(|name| format!("{name}_temp_path {at};\n")).collect();
        self.write(
            "nginx.conf",
            format!(
                "daemon off; user root; {main}\nerror_log {at}/error.log notice; pid {at}/pid;\n\
                 events {{ worker_connections 1024; }}\n\
                 http {{ access_log off; keepalive_requests 1000000; client_max_body_size 100m; {temporary}\n\
                 server {{ listen 8000; root {at}/site; location /ok {{ return 200 ok; }}\n\
                 location /up/ {{ alias {at}/up/; dav_methods PUT; }} }} }}\n"
            ),
        )
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        let path = std::env::var("PATH").unwrap_or_default();
        command.args(arguments).env("PATH", format!("{path}:{EXTRA_PATH}")).current_dir(&self.folder);
        command
    }

    /// Starts a program on a stack of its own.
    ///
    /// # Panics
    /// If the program cannot be started.
    pub fn start_on_stack(&self, program: &[&str]) -> RunningProgram<'_> {
        self.start_on_stack_with(&[], program)
    }

    /// As [`start_on_stack`](Self::start_on_stack), with further options of `ginnel run`.
    ///
    /// # Panics
    /// If the program cannot be started.
    pub fn start_on_stack_with(&self, options: &[&str], program: &[&str]) -> RunningProgram<'_> {
        self.start_ginnel(&[&["run"], &STACK[..], options, &["--"], program].concat())
    }

    /// Starts the `ginnel` command with these arguments.
    ///
    /// # Panics
    /// If the command cannot be started.
    pub fn start_ginnel(&self, arguments: &[&str]) -> RunningProgram<'_> {
        let mut command = self.command(self.ginnel, arguments);
        command
            .env("GINNEL_LIBRARY", build_preload_library(self.ginnel))
            .env("XDG_RUNTIME_DIR", &self.folder);
        // Some programs signal their whole process group, which must not include the test.
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let child = self.namespace.run(|| command.spawn()).expect("ginnel run");
        RunningProgram { fixture: self, child }
    }

    /// Starts a program on the kernel's side. It and its process group are killed when this value is dropped.
    ///
    /// # Panics
    /// If the program cannot be started.
    pub fn start_on_kernel(&self, program: &str, arguments: &[&str]) {
        let mut command = self.command(program, arguments);
        let log = |name: &str| std::fs::File::create(self.folder.join(name)).expect("the file is written");
        command.stdout(log("beside.out")).stderr(log("beside.err")).process_group(0);
        let child = self.namespace.run(|| command.spawn()).unwrap_or_else(|e| panic!("{program}: {e}"));
        self.kernel_programs.lock().unwrap_or_else(PoisonError::into_inner).push(child);
    }

    /// Starts a program on the kernel's side whose output is read when it has exited. Dropping the value
    /// kills the program.
    ///
    /// # Panics
    /// If the program cannot be started.
    pub fn start_client(&self, program: &str, arguments: &[&str]) -> RunningClient {
        let mut command = self.command(program, arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = self.namespace.run(|| command.spawn()).unwrap_or_else(|e| panic!("{program}: {e}"));
        RunningClient { child: Some(child) }
    }

    /// Runs the `ginnel` command, which finds the stacks of this fixture, until it exits.
    ///
    /// # Panics
    /// If the command cannot be started.
    pub fn ginnel(&self, arguments: &[&str]) -> Output {
        let mut command = self.command(self.ginnel, arguments);
        command.env("XDG_RUNTIME_DIR", &self.folder);
        self.namespace.run(|| command.output()).expect("ginnel")
    }

    /// Returns the namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Runs a program on the kernel's side until it exits; `timeout` kills it after [`TIMEOUT`].
    ///
    /// # Panics
    /// If the program cannot be started.
    pub fn run_client(&self, program: &str, arguments: &[&str]) -> Output {
        let limit = TIMEOUT.as_secs().to_string();
        let mut command = self.command("timeout", &["-s", "KILL", &limit, program]);
        command.args(arguments);
        self.namespace.run(|| command.output()).expect("timeout")
    }

    /// Runs a program as [`Self::run_client`] does. Returns its standard output.
    ///
    /// # Panics
    /// If the program fails.
    #[track_caller]
    pub fn client_output(&self, program: &str, arguments: &[&str]) -> Vec<u8> {
        let output = self.run_client(program, arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?}: {}: {error}", output.status);
        output.stdout
    }

    /// Runs a program as [`Self::client_output`] does. Returns its standard output as text.
    ///
    /// # Panics
    /// If the program fails.
    #[track_caller]
    pub fn client_text(&self, program: &str, arguments: &[&str]) -> String {
        String::from_utf8_lossy(&self.client_output(program, arguments)).into_owned()
    }

    /// Opens a TCP connection from the kernel's side.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn connect(&self, to: &str) -> io::Result<TcpStream> {
        let to: SocketAddr = to.parse().map_err(io::Error::other)?;
        let stream = self.namespace.run(|| TcpStream::connect_timeout(&to, Duration::from_secs(2)))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(stream)
    }

    /// Waits until a connection to `address` from the kernel's side succeeds.
    ///
    /// # Panics
    /// If none succeeds within [`TIMEOUT`].
    #[track_caller]
    pub fn wait_until_listening(&self, address: &str) {
        let end = Instant::now() + TIMEOUT;
        while let Err(error) = self.connect(address) {
            assert!(Instant::now() < end, "{address}: {error}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for ProgramFixture {
    fn drop(&mut self) {
        for mut child in self.kernel_programs.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // The program may have exited already, but not the children that it left in its process group.
            // The group's number is not used again before the child has been waited for.
            let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A program on the kernel's side that runs beside the test. Dropping the value kills the program.
pub struct RunningClient {
    /// `None` once the output has been read.
    child: Option<Child>,
}

impl RunningClient {
    /// Returns whether the program has exited.
    ///
    /// # Panics
    /// If the child cannot be waited for.
    pub fn has_exited(&mut self) -> bool {
        let child = self.child.as_mut().expect("the output has not been read");
        child.try_wait().expect("the child can be waited for").is_some()
    }

    /// Sends the signal of this name, without `SIG`.
    ///
    /// # Panics
    /// If the program cannot be signalled.
    pub fn signal(&self, name: &str) {
        let child = self.child.as_ref().expect("the output has not been read");
        signal(child.id(), name);
    }

    /// Waits until the program exits. Returns its output.
    ///
    /// # Panics
    /// If the output cannot be read.
    pub fn wait_for_output(mut self) -> Output {
        let child = self.child.take().expect("the output has not been read");
        child.wait_with_output().expect("the output can be read")
    }
}

impl Drop for RunningClient {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A program on a stack. Dropping the value stops the program.
pub struct RunningProgram<'a> {
    fixture: &'a ProgramFixture,
    /// The `ginnel run` process.
    pub child: Child,
}

impl RunningProgram<'_> {
    /// Waits until the program accepts connections at `address`.
    ///
    /// # Panics
    /// If the program exits first (with its standard error), or accepts none within [`TIMEOUT`].
    #[track_caller]
    pub fn wait_until_listening(&mut self, address: &str) {
        let end = Instant::now() + TIMEOUT;
        while let Err(error) = self.fixture.connect(address) {
            if let Some(status) = self.child.try_wait().expect("the child can be waited for") {
                panic!("the program exited with {status}: {}", self.read_stderr());
            }
            assert!(Instant::now() < end, "{address}: {error}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the stack of this name, which the program provides, answers `ginnel stat`.
    ///
    /// # Panics
    /// If the program exits first, or the stack does not answer within [`TIMEOUT`], with the standard error
    /// of both.
    #[track_caller]
    pub fn wait_until_stack_runs(&mut self, name: &str) {
        let end = Instant::now() + TIMEOUT;
        loop {
            let answer = self.fixture.ginnel(&["stat", name]);
            if answer.status.success() {
                return;
            }
            let has_exited = self.child.try_wait().expect("the child can be waited for").is_some();
            if has_exited || Instant::now() > end {
                let _ = self.child.kill();
                panic!("{} {}", String::from_utf8_lossy(&answer.stderr), self.read_stderr());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns what the program wrote to standard error. Blocks until the program closes it.
    pub fn read_stderr(&mut self) -> String {
        read_pipe(self.child.stderr.take())
    }

    /// Returns what the program wrote to standard output. Blocks until the program closes it.
    pub fn read_stdout(&mut self) -> String {
        read_pipe(self.child.stdout.take())
    }

    /// Returns the next line that the program writes to standard output; empty if the program closes it.
    ///
    /// # Panics
    /// If the output cannot be read.
    pub fn read_line(&mut self) -> String {
        let mut line = Vec::new();
        let mut byte = [0];
        if let Some(stdout) = &mut self.child.stdout {
            while stdout.read(&mut byte).expect("the output can be read") == 1 && byte != *b"\n" {
                line.push(byte[0]);
            }
        }
        String::from_utf8_lossy(&line).into_owned()
    }

    /// Waits until the program exits. Returns the exit status.
    ///
    /// # Panics
    /// If a signal killed `ginnel run`.
    #[track_caller]
    pub fn wait_for_exit(&mut self) -> i32 {
        self.child.wait().expect("the child can be waited for").code().expect("no signal killed the child")
    }

    /// Sends SIGTERM and waits for the exit. Returns the exit status.
    ///
    /// # Panics
    /// If the program has exited already.
    #[track_caller]
    pub fn stop(&mut self) -> i32 {
        assert!(self.signal("TERM"));
        self.wait_for_exit()
    }

    /// Sends the signal of this name, without `SIG`. Returns false if the program has exited.
    pub fn signal(&self, name: &str) -> bool {
        let status = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        status.is_ok_and(|status| status.success())
    }
}

fn read_pipe(pipe: Option<impl io::Read>) -> String {
    let text = pipe.map(io::read_to_string);
    text.and_then(Result::ok).unwrap_or_default()
}

impl Drop for RunningProgram<'_> {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        // A stack that is asked to stop also ends its program.
        self.signal("TERM");
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
