//! Programs that are started on a stack, or beside it.

use crate::failure::Failure;
use clap::{Args, ValueEnum};
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// Name of the library.
const LIBRARY: &str = "libginnel.so";
/// What the library reads (crates/posix/preload/src/attach.rs).
const STACK_VARIABLE: &str = "GINNEL_STACK";
const ON_MISSING_VARIABLE: &str = "GINNEL_ON_MISSING";
const KERNEL_LISTEN_VARIABLE: &str = "GINNEL_KERNEL_LISTEN";
const LISTEN_SPAWN_VARIABLE: &str = "GINNEL_LISTEN_SPAWN";

/// How a program is run.
#[derive(Clone, Debug, Args)]
pub struct ProgramOptions {
    /// Whether listeners on all addresses (0.0.0.0 and ::) take connections that come by the kernel, too.
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = KernelListen::Auto)]
    kernel_listen: KernelListen,

    /// On a stack with several shards: which of them a worker's listener takes connections from first. Others follow if nobody else takes theirs.
    #[arg(long, value_name = "MODE", value_enum, default_value_t = ListenSpawn::Auto)]
    listen_spawn: ListenSpawn,

    /// What becomes of the program if there is no stack for it.
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = OnMissing::Fail)]
    on_missing: OnMissing,

    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// When listeners on all addresses are the kernel's, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KernelListen {
    /// Always: the kernel says whether the port is free, and who may have it.
    Auto,
    /// Never: ports are the stack's alone.
    Off,
}

/// Which shard a worker serves first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ListenSpawn {
    /// All alike.
    #[value(alias = "0")]
    Off,
    /// That of the CPU which the worker is bound to, if it is bound to one.
    #[value(alias = "1")]
    Bound,
    /// The same, and workers that are not bound get the shards in turn. What CPUs they may use is left as it is.
    #[value(alias = "2")]
    Auto,
}

/// What a program does without its stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnMissing {
    /// It does not run: exit status 125.
    Fail,
    /// It goes on with the kernel's network.
    Kernel,
}

/// Where the library is: where the environment says, beside this program, or where packages put it.
pub fn find_library() -> Result<PathBuf, Failure> {
    if let Some(path) = std::env::var_os("GINNEL_LIBRARY") {
        return Ok(path.into());
    }
    let program = std::env::current_exe().map_err(|e| Failure::running(format!("own path: {e}")))?;
    let beside = program.with_file_name(LIBRARY);
    let candidates = program
        .parent()
        .into_iter()
        .flat_map(|at| ["../lib/ginnel", "../lib"].map(|folder| at.join(folder).join(LIBRARY)));
    core::iter::once(beside.clone()).chain(candidates).find(|path| path.exists()).ok_or_else(|| {
        Failure::running(format!("{} is missing (GINNEL_LIBRARY says where else it is)", beside.display()))
    })
}

impl ProgramOptions {
    fn command(&self) -> Command {
        // clap has seen to it that there is one.
        let mut words = self.program.iter();
        let mut command = Command::new(words.next().map_or(OsStr::new(""), OsString::as_os_str));
        command.args(words);
        command
    }

    /// Why the program cannot be on a stack at all, if it cannot.
    pub fn check_preloadable(&self) -> Option<Failure> {
        let cause = self.program.first().and_then(|word| crate::executable::why_not_preloadable(word))?;
        Some(Failure::running(match self.on_missing {
            OnMissing::Fail => format!("{cause} (--on-missing=kernel runs it on the kernel's network)"),
            OnMissing::Kernel => cause,
        }))
    }

    fn command_on_stack(&self, library: &Path, control: &Path) -> Command {
        let mut preload = library.as_os_str().to_owned();
        if let Some(other_libraries) = other_preloaded_libraries() {
            preload.push(":");
            preload.push(other_libraries);
        }
        let kernel_listen = match self.kernel_listen {
            KernelListen::Auto => "auto",
            KernelListen::Off => "off",
        };
        let on_missing = match self.on_missing {
            OnMissing::Fail => "fail",
            OnMissing::Kernel => "kernel",
        };
        let listen_spawn = match self.listen_spawn {
            ListenSpawn::Off => "off",
            ListenSpawn::Bound => "bound",
            ListenSpawn::Auto => "auto",
        };
        let mut command = self.command();
        command
            .env(LISTEN_SPAWN_VARIABLE, listen_spawn)
            .env("LD_PRELOAD", preload)
            .env(STACK_VARIABLE, control)
            .env(ON_MISSING_VARIABLE, on_missing)
            .env(KERNEL_LISTEN_VARIABLE, kernel_listen);
        command
    }

    fn exec_failure(&self, e: &std::io::Error) -> Failure {
        let name = self.program.first().map(|name| name.display().to_string()).unwrap_or_default();
        Failure::running(format!("{name}: {e}"))
    }

    /// Starts the program with the library and a way to the stack.
    pub fn spawn_on_stack(&self, library: &Path, control: &Path) -> Result<Child, Failure> {
        self.command_on_stack(library, control).spawn().map_err(|e| self.exec_failure(&e))
    }

    /// This process becomes the program, on a stack that others made. Returns only if that fails.
    pub fn exec_on_stack(&self, library: &Path, control: &Path) -> Failure {
        self.exec_failure(&self.command_on_stack(library, control).exec())
    }

    /// This process becomes the program, without the library. Returns only if that fails.
    pub fn exec_on_kernel(&self) -> Failure {
        let mut command = self.command();
        match other_preloaded_libraries() {
            Some(other_libraries) => command.env("LD_PRELOAD", other_libraries),
            None => command.env_remove("LD_PRELOAD"),
        };
        for name in [STACK_VARIABLE, ON_MISSING_VARIABLE, KERNEL_LISTEN_VARIABLE, LISTEN_SPAWN_VARIABLE] {
            command.env_remove(name);
        }
        self.exec_failure(&command.exec())
    }

    /// There is no stack for the program, and why: one loud line, and what was chosen for this case.
    pub fn handle_missing_stack(&self, cause: &Failure) -> Failure {
        if self.on_missing == OnMissing::Fail {
            return Failure::no_stack(cause.to_string());
        }
        let name = self.program.first().map(|name| name.display().to_string()).unwrap_or_default();
        eprintln!("ginnel: {cause}; {name} goes on with the kernel's network");
        self.exec_on_kernel()
    }
}

/// What is preloaded beside this library, if anything is.
fn other_preloaded_libraries() -> Option<OsString> {
    let all = std::env::var_os("LD_PRELOAD")?;
    let text = all.to_str()?;
    let is_ours = |path: &&str| Path::new(path).file_name() == Some(OsStr::new(LIBRARY));
    let other_libraries: Vec<&str> =
        text.split([':', ' ']).filter(|path| !path.is_empty() && !is_ours(path)).collect();
    (!other_libraries.is_empty()).then(|| other_libraries.join(":").into())
}
