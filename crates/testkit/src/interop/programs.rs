//! Unmodified programs on a stack (`ginnel run`) in a namespace, and the kernel's programs at the other end of a TAP.

use super::{Namespace, unavailable};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The stack has 10.9.0.2, the kernel 10.9.0.1.
const STACK: [&str; 6] =
    ["--device", "tap:run0", "--address", "10.9.0.2/24", "--kernel-address", "10.9.0.1/24"];
/// Nothing takes longer, however busy the machine is.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Where servers are that are not in everybody's path.
const EXTRA_PATH: &str = "/usr/sbin";

/// The library that `ginnel run` preloads, which cargo does not build for the tests of another package by itself. `ginnel` is the path of the command, beside
/// which it is built.
///
/// # Panics
/// If it does not build.
pub fn build_preload_library(ginnel: &str) -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let folder = Path::new(ginnel).parent().expect("a folder");
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--locked", "--package", "ginnel-posix"]);
        build.arg("--target-dir").arg(folder.parent().expect("a folder above it"));
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        let built = build.output().expect("cargo");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        folder.join("libginnel.so")
    })
}

/// Why programs cannot be run here on a stack, if they cannot: a privilege is missing, or one of `programs`.
pub fn programs_unavailable(programs: &[&str]) -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).chain([EXTRA_PATH.into()]).collect();
    let missing = |program: &&&str| !folders.iter().any(|folder| folder.join(program).metadata().is_ok());
    unavailable().or_else(|| programs.iter().find(missing).map(|program| format!("no {program}")))
}

/// A namespace with a folder for what programs in it read and write. Both go with the value, and so do the programs that were started beside the stack.
pub struct ProgramFixture {
    namespace: Namespace,
    folder: PathBuf,
    ginnel: &'static str,
    kernel_programs: Mutex<Vec<Child>>,
}

impl ProgramFixture {
    /// A new one. `temporary` is where the folder is made, `ginnel` the path of the command.
    ///
    /// # Errors
    /// What the kernel answered.
    pub fn new(ginnel: &'static str, temporary: &str, name: &str) -> io::Result<Self> {
        let folder = Path::new(temporary).join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        Ok(Self { namespace: Namespace::new()?, folder, ginnel, kernel_programs: Mutex::default() })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes a file in the folder, and returns its path.
    ///
    /// # Panics
    /// If it cannot be written.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> String {
        let path = self.folder.join(name);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(&path, contents).expect("a file");
        path.display().to_string()
    }

    /// A file that a program wrote in the folder.
    ///
    /// # Panics
    /// If it is not there.
    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.folder.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// The same as soon as there is something in it.
    ///
    /// # Panics
    /// If nothing is written in a minute.
    pub fn wait_for_content(&self, name: &str) -> Vec<u8> {
        let end = std::time::Instant::now() + TIMEOUT;
        while std::fs::metadata(self.folder.join(name)).map_or(0, |file| file.len()) == 0 {
            assert!(std::time::Instant::now() < end, "{name}: nothing was written");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        self.read(name)
    }

    /// A configuration of nginx that serves the folder "site" on port 8000, and takes uploads to "up". `main` stands outside of all blocks.
    pub fn nginx(&self, main: &str) -> String {
        let at = self.folder.display();
        std::fs::create_dir_all(self.folder.join("site")).expect("a folder");
        std::fs::create_dir_all(self.folder.join("up")).expect("a folder");
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
    /// If it cannot be started.
    pub fn start_on_stack(&self, program: &[&str]) -> RunningProgram<'_> {
        let mut command = self.command(self.ginnel, &["run"]);
        command.args(STACK).arg("--").args(program);
        command
            .env("GINNEL_LIBRARY", build_preload_library(self.ginnel))
            .env("XDG_RUNTIME_DIR", &self.folder);
        // Programs send signals to all processes of their group, which the test is not to be one of.
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let child = self.namespace.run(|| command.spawn()).expect("ginnel run");
        RunningProgram { fixture: self, child }
    }

    /// Starts a program on the kernel's side, to run as long as the place is there.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn start_on_kernel(&self, program: &str, arguments: &[&str]) {
        let mut command = self.command(program, arguments);
        let log = |name: &str| std::fs::File::create(self.folder.join(name)).expect("a file");
        command.stdout(log("beside.out")).stderr(log("beside.err"));
        let child = self.namespace.run(|| command.spawn()).unwrap_or_else(|e| panic!("{program}: {e}"));
        self.kernel_programs.lock().unwrap_or_else(PoisonError::into_inner).push(child);
    }

    /// Runs a program on the kernel's side to its end.
    ///
    /// # Panics
    /// If it cannot be started.
    pub fn run_client(&self, program: &str, arguments: &[&str]) -> Output {
        let limit = TIMEOUT.as_secs().to_string();
        let mut command = self.command("timeout", &["-s", "KILL", &limit, program]);
        command.args(arguments);
        self.namespace.run(|| command.output()).expect("timeout")
    }

    /// The same for one that must succeed. Returns what it wrote to standard output.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn client_output(&self, program: &str, arguments: &[&str]) -> Vec<u8> {
        let output = self.run_client(program, arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{program} {arguments:?}: {}: {error}", output.status);
        output.stdout
    }

    /// The same, as text.
    ///
    /// # Panics
    /// If it does not succeed.
    #[track_caller]
    pub fn client_text(&self, program: &str, arguments: &[&str]) -> String {
        String::from_utf8_lossy(&self.client_output(program, arguments)).into_owned()
    }

    /// Opens a connection from the kernel's side.
    ///
    /// # Errors
    /// What the kernel answered.
    pub fn connect(&self, to: &str) -> io::Result<TcpStream> {
        let to: SocketAddr = to.parse().map_err(io::Error::other)?;
        let stream = self.namespace.run(|| TcpStream::connect_timeout(&to, Duration::from_secs(2)))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        Ok(stream)
    }

    /// Waits until somebody listens on the kernel's side.
    ///
    /// # Panics
    /// If nobody does after a while.
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
            // It may have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A program on a stack. It goes with the value.
pub struct RunningProgram<'a> {
    fixture: &'a ProgramFixture,
    /// `ginnel run`.
    pub child: Child,
}

impl RunningProgram<'_> {
    /// Waits until it takes connections at this address.
    ///
    /// # Panics
    /// If it ends before, with what it said, or does not after a while.
    #[track_caller]
    pub fn wait_until_listening(&mut self, address: &str) {
        let end = Instant::now() + TIMEOUT;
        while let Err(error) = self.fixture.connect(address) {
            if let Some(status) = self.child.try_wait().expect("a child") {
                panic!("ended with {status}: {}", self.read_stderr());
            }
            assert!(Instant::now() < end, "{address}: {error}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What it wrote to standard error until its end.
    pub fn read_stderr(&mut self) -> String {
        read_pipe(self.child.stderr.take())
    }

    /// What it wrote to standard output until its end.
    pub fn read_stdout(&mut self) -> String {
        read_pipe(self.child.stdout.take())
    }

    /// Waits for its end, and returns its exit status.
    ///
    /// # Panics
    /// If a signal ended `ginnel run` itself.
    #[track_caller]
    pub fn wait_for_exit(&mut self) -> i32 {
        self.child.wait().expect("a child").code().expect("an exit status")
    }

    /// Asks it to stop, and returns its exit status.
    ///
    /// # Panics
    /// If it has ended already.
    #[track_caller]
    pub fn stop(&mut self) -> i32 {
        assert!(self.signal("TERM"));
        self.wait_for_exit()
    }

    fn signal(&self, name: &str) -> bool {
        let asked = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status();
        asked.is_ok_and(|status| status.success())
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
        // The program goes with a stack that is asked to end.
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
