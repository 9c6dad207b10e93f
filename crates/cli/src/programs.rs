//! Starts programs on a stack, or on the kernel's network.

use crate::descriptor_limit;
use crate::failure::Failure;
use crate::output;
use clap::{Args, ValueEnum};
use ginnel::config::ListenSpawnMode;
use ginnel_kernel_lane::{MODE_VARIABLE, Mode};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// File name of the library that programs on a stack are preloaded with.
const LIBRARY: &str = "libginnel.so";
/// File name of the library that programs on the kernel's network with `--listen-spawn` are preloaded with.
const KERNEL_LIBRARY: &str = "libginnel_kernel.so";
/// Environment variables that the library reads (crates/posix/preload/src/attach.rs).
const STACK_VARIABLE: &str = "GINNEL_STACK";
const ON_MISSING_VARIABLE: &str = "GINNEL_ON_MISSING";
const KERNEL_LISTEN_VARIABLE: &str = "GINNEL_KERNEL_LISTEN";
const LISTEN_SPAWN_VARIABLE: &str = "GINNEL_LISTEN_SPAWN";
/// Tells `ginnel check` why `ginnel run` has started a program on the kernel's network.
pub const NO_STACK_VARIABLE: &str = "GINNEL_NO_STACK";

/// Options that say how a program runs on the stack.
#[derive(Clone, Debug, Args)]
pub struct ProgramOptions {
    /// Let listeners on a wildcard address (0.0.0.0 or ::) also accept connections that arrive over the
    /// kernel's network.
    #[arg(long, value_name = "MODE", value_enum, default_value_t = KernelListen::Auto)]
    kernel_listen: KernelListen,

    /// Shard from which a worker process accepts connections first, on a stack with several shards (threads
    /// that each serve a part of the connections). A worker also accepts from shards that no other worker
    /// serves. Default: the key run.listen_spawn of the stack. With --stack kernel, "bound" and "auto" give
    /// each worker of a pre-forking server a listener of its own, which gets the connections that the
    /// worker's CPU receives; "auto" also pins workers to CPUs. Default with --stack kernel: off.
    #[arg(long, value_name = "MODE", value_enum)]
    listen_spawn: Option<ListenSpawn>,

    /// Action if the program cannot use the stack.
    #[arg(long, value_name = "ACTION", value_enum, default_value_t = OnMissing::Fail)]
    on_missing: OnMissing,

    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Choice of the networks on which wildcard listeners listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KernelListen {
    /// The stack and the kernel: the port must be free on both, and the kernel's permission checks apply.
    Auto,
    /// The stack alone.
    Off,
}

/// From which shard a worker accepts connections first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ListenSpawn {
    /// From all shards alike.
    #[value(alias = "0")]
    Off,
    /// From the shard of the CPU that the worker is pinned to, if it is pinned to one.
    #[value(alias = "1")]
    Bound,
    /// As "bound", and workers that are not pinned get the shards in turn. Their CPU affinity is not changed,
    /// except with --stack kernel.
    #[value(alias = "2")]
    Auto,
}

impl ListenSpawn {
    const fn mode(self) -> ListenSpawnMode {
        match self {
            Self::Off => ListenSpawnMode::Off,
            Self::Bound => ListenSpawnMode::Bound,
            Self::Auto => ListenSpawnMode::Auto,
        }
    }
}

/// File in a stack's directory that has the stack's `run.listen_spawn`.
const LISTEN_SPAWN_FILE: &str = "listen-spawn";

/// Tells programs on a stack in `directory` from which shard workers accept first.
///
/// # Errors
/// The file cannot be written.
pub fn publish_listen_spawn(directory: &Path, mode: ListenSpawnMode) -> Result<(), Failure> {
    let path = directory.join(LISTEN_SPAWN_FILE);
    std::fs::write(&path, mode.name()).map_err(|e| Failure::running(format!("{}: {e}", path.display())))
}

/// Returns true if the stack in `directory` is for programs: its devices may not be open yet.
pub fn is_for_programs(directory: &Path) -> bool {
    directory.join(LISTEN_SPAWN_FILE).exists()
}

/// Returns what [`publish_listen_spawn`] has written.
fn published_listen_spawn(directory: &Path) -> Option<ListenSpawnMode> {
    let text = std::fs::read_to_string(directory.join(LISTEN_SPAWN_FILE)).ok()?;
    [ListenSpawnMode::Off, ListenSpawnMode::Bound, ListenSpawnMode::Auto]
        .into_iter()
        .find(|mode| mode.name() == text)
}

/// Action if the program cannot use the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnMissing {
    /// Do not run the program; exit with status 125.
    Fail,
    /// Run the program on the kernel's network.
    Kernel,
}

/// Returns the path of the library for programs on a stack: `GINNEL_LIBRARY`, or the file beside this
/// executable, or where packages install it.
///
/// # Errors
/// The variable names no file, or is not set and the library is in neither place.
pub fn find_library() -> Result<PathBuf, Failure> {
    find(LIBRARY, "GINNEL_LIBRARY")
}

/// Returns the path of the library for programs on the kernel's network: `GINNEL_KERNEL_LIBRARY`, or the file
/// beside this executable, or where packages install it.
///
/// # Errors
/// As [`find_library`].
pub fn find_kernel_library() -> Result<PathBuf, Failure> {
    find(KERNEL_LIBRARY, "GINNEL_KERNEL_LIBRARY")
}

/// Returns the absolute path of a library that the dynamic loader can load. Of any other one the loader would
/// only warn, and the program would run on the kernel's network.
fn find(library: &str, variable: &str) -> Result<PathBuf, Failure> {
    let found = find_file(library, variable)?;
    // The loader searches its directories for a name without a directory.
    let path = std::path::absolute(&found).unwrap_or(found);
    match crate::executable::why_not_loadable(&path) {
        None => Ok(path),
        Some(cause) => {
            Err(Failure::running(format!("{cause}: set {variable} to the path of a usable copy or link")))
        }
    }
}

fn find_file(library: &str, variable: &str) -> Result<PathBuf, Failure> {
    if let Some(path) = std::env::var_os(variable).map(PathBuf::from) {
        return if path.exists() {
            Ok(path)
        } else {
            Err(Failure::running(format!("{} is missing: {variable} names it", path.display())))
        };
    }
    let program = std::env::current_exe()
        .map_err(|e| Failure::running(format!("path of the ginnel executable: {e}")))?;
    let beside = program.with_file_name(library);
    let candidates = program
        .parent()
        .into_iter()
        .flat_map(|at| ["../lib/ginnel", "../lib"].map(|folder| at.join(folder).join(library)));
    core::iter::once(beside.clone()).chain(candidates).find(|path| path.exists()).ok_or_else(|| {
        Failure::running(format!(
            "{} is missing: set {variable} to the path of the library",
            beside.display()
        ))
    })
}

impl ProgramOptions {
    fn command(&self) -> Command {
        // clap guarantees at least one word.
        let mut words = self.program.iter();
        let mut command = Command::new(words.next().map_or(OsStr::new(""), OsString::as_os_str));
        command.args(words);
        command
    }

    /// Returns `library` if the program can be preloaded with it.
    ///
    /// # Errors
    /// The program cannot be preloaded, for example because it is statically linked.
    pub fn check_preloadable(&self, library: PathBuf) -> Result<PathBuf, Failure> {
        let cause = self.program.first().and_then(|word| crate::executable::why_not_preloadable(word));
        match (cause, self.on_missing) {
            (None, _) => Ok(library),
            (Some(cause), OnMissing::Fail) => Err(Failure::running(format!(
                "{cause}: use --on-missing=kernel to run it on the kernel's network"
            ))),
            (Some(cause), OnMissing::Kernel) => Err(Failure::running(cause)),
        }
    }

    /// Returns the mode of `--listen-spawn` for workers on the kernel's network; `None` if they share their
    /// listeners.
    pub fn kernel_lane(&self) -> Option<Mode> {
        match self.listen_spawn? {
            ListenSpawn::Off => None,
            ListenSpawn::Bound => Some(Mode::Bound),
            ListenSpawn::Auto => Some(Mode::Auto),
        }
    }

    fn command_on_stack(&self, library: &Path, control: &Path) -> Command {
        let kernel_listen = match self.kernel_listen {
            KernelListen::Auto => "auto",
            KernelListen::Off => "off",
        };
        let on_missing = match self.on_missing {
            OnMissing::Fail => "fail",
            OnMissing::Kernel => "kernel",
        };
        let listen_spawn = self.listen_spawn.map_or_else(
            || control.parent().and_then(published_listen_spawn).unwrap_or_default(),
            ListenSpawn::mode,
        );
        let mut command = self.command();
        command
            .env(LISTEN_SPAWN_VARIABLE, listen_spawn.name())
            .env("LD_PRELOAD", with_other_libraries(library))
            .env_remove(MODE_VARIABLE)
            .env(STACK_VARIABLE, control)
            .env(ON_MISSING_VARIABLE, on_missing)
            .env(KERNEL_LISTEN_VARIABLE, kernel_listen)
            .env_remove(NO_STACK_VARIABLE);
        command
    }

    /// Returns `control` if programs can be told the path.
    ///
    /// # Errors
    /// The path is not UTF-8, as the library expects.
    pub fn check_control_socket(control: PathBuf) -> Result<PathBuf, Failure> {
        match control.to_str() {
            Some(_) => Ok(control),
            None => Err(Failure::running(format!(
                "{}: programs find a stack only by a path in UTF-8: set GINNEL_RUN_DIR to such a directory",
                control.display()
            ))),
        }
    }

    fn exec_failure(&self, e: &std::io::Error) -> Failure {
        let name = self.program.first().map(|name| name.display().to_string()).unwrap_or_default();
        Failure::not_started(&name, e)
    }

    /// Starts the program with the library preloaded and the path of the stack's control socket in its
    /// environment.
    pub fn spawn_on_stack(&self, library: &Path, control: &Path) -> Result<Child, Failure> {
        let mut command = self.command_on_stack(library, control);
        descriptor_limit::with_original(|| command.spawn()).map_err(|e| self.exec_failure(&e))
    }

    /// Replaces this process by the program, on an existing stack. Returns only if that fails.
    pub fn exec_on_stack(&self, library: &Path, control: &Path) -> Failure {
        self.exec_failure(&self.command_on_stack(library, control).exec())
    }

    /// Replaces this process by the program without the library, for the reason `cause`. Returns only if that
    /// fails.
    pub fn exec_on_kernel(&self, cause: &str) -> Failure {
        let mut command = self.command_on_kernel(cause);
        match other_preloaded_libraries() {
            Some(other_libraries) => command.env("LD_PRELOAD", other_libraries),
            None => command.env_remove("LD_PRELOAD"),
        };
        self.exec_failure(&descriptor_limit::with_original(|| command.exec()))
    }

    /// Replaces this process by the program on the kernel's network, with the library that gives each worker
    /// a listener of its own. Returns only if that fails.
    pub fn exec_in_kernel_lane(&self, library: &Path, mode: Mode) -> Failure {
        let mode = mode.name();
        let cause = format!("started with --stack kernel --listen-spawn {mode}");
        let mut command = self.command_on_kernel(&cause);
        command.env("LD_PRELOAD", with_other_libraries(library)).env(MODE_VARIABLE, mode);
        self.exec_failure(&command.exec())
    }

    fn command_on_kernel(&self, cause: &str) -> Command {
        let mut command = self.command();
        let variables = [STACK_VARIABLE, ON_MISSING_VARIABLE, KERNEL_LISTEN_VARIABLE, LISTEN_SPAWN_VARIABLE];
        for name in variables.into_iter().chain([MODE_VARIABLE]) {
            command.env_remove(name);
        }
        command.env(NO_STACK_VARIABLE, cause);
        command
    }

    /// Handles the case that the program cannot use a stack, for the reason `cause`. Returns an error, or
    /// with `--on-missing kernel` prints one line and replaces this process by the program on the kernel's
    /// network.
    pub fn handle_missing_stack(&self, cause: &Failure) -> Failure {
        if self.on_missing == OnMissing::Fail {
            return Failure::no_stack(cause.to_string());
        }
        let name = self.program.first().map(|name| name.display().to_string()).unwrap_or_default();
        // The process of the shards has reported a cause without text.
        let separator = if cause.is_silent() { "" } else { "; " };
        output::note(format_args!("ginnel: {cause}{separator}{name} runs on the kernel's network"));
        self.exec_on_kernel(&cause.to_string())
    }
}

/// Returns a value of `LD_PRELOAD` with this library and those of other projects.
fn with_other_libraries(library: &Path) -> OsString {
    let mut preload = library.as_os_str().to_owned();
    if let Some(other_libraries) = other_preloaded_libraries() {
        preload.push(":");
        preload.push(other_libraries);
    }
    preload
}

/// Returns the other libraries in `LD_PRELOAD`, or `None` if there are none.
fn other_preloaded_libraries() -> Option<OsString> {
    without_own_libraries(&std::env::var_os("LD_PRELOAD")?)
}

/// Returns a value of `LD_PRELOAD` without the libraries of this project, or `None` if nothing is left.
fn without_own_libraries(preload: &OsStr) -> Option<OsString> {
    let is_ours = |path: &&[u8]| {
        let name = Path::new(OsStr::from_bytes(path)).file_name();
        [LIBRARY, KERNEL_LIBRARY].iter().any(|own| name == Some(OsStr::new(own)))
    };
    let paths = preload.as_bytes().split(|byte| matches!(byte, b':' | b' '));
    let other_libraries: Vec<&[u8]> = paths.filter(|path| !path.is_empty() && !is_ours(path)).collect();
    (!other_libraries.is_empty()).then(|| OsString::from_vec(other_libraries.join(&b':')))
}

#[cfg(test)]
mod tests {
    use super::{
        KERNEL_LIBRARY, LIBRARY, ListenSpawnMode, publish_listen_spawn, published_listen_spawn,
        without_own_libraries,
    };
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn other_preloaded_libraries_are_kept() {
        let others = |preload: &[u8]| without_own_libraries(OsStr::from_bytes(preload));
        let kept = |bytes: &[u8]| Some(OsStr::from_bytes(bytes).to_owned());
        let ours = format!("/a/{LIBRARY}:{KERNEL_LIBRARY}");
        assert_eq!((others(b""), others(b": "), others(ours.as_bytes())), (None, None, None));
        assert_eq!(others(format!("/b.so {ours}::c.so").as_bytes()), kept(b"/b.so:c.so"));
        // A path need not be UTF-8.
        assert_eq!(others(&[b"/\xff.so:", ours.as_bytes()].concat()), kept(b"/\xff.so"));
    }

    #[test]
    fn listen_spawn_of_a_stack_reaches_its_programs() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(published_listen_spawn(directory.path()), None);
        for mode in [ListenSpawnMode::Off, ListenSpawnMode::Bound, ListenSpawnMode::Auto] {
            publish_listen_spawn(directory.path(), mode).unwrap();
            assert_eq!(published_listen_spawn(directory.path()), Some(mode));
        }
        let missing = publish_listen_spawn(&directory.path().join("no"), ListenSpawnMode::Off);
        assert!(missing.unwrap_err().to_string().contains("no/listen-spawn: No such file"));
    }
}
