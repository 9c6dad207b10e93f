//! `ginnel run`: an unmodified program on a stack of its own.

use crate::failure::Failure;
use crate::presence;
use crate::stack_options::StackOptions;
use clap::{Args, ValueEnum};
use ginnel::channel::ChannelServer;
use ginnel::door::Door;
use ginnel::shards::Shards;
use ginnel::{Shard, StopFlag};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::Duration;

/// Name of the library.
const LIBRARY: &str = "libginnel.so";
/// Name of the door's socket in the directory of a stack.
const CONTROL: &str = "control";
/// How often it is looked whether somebody still uses the stack.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Options of `ginnel run`.
#[derive(Clone, Debug, Args)]
pub struct RunOptions {
    #[command(flatten)]
    stack: StackOptions,

    /// Whether listeners on all addresses (0.0.0.0 and ::) take connections that come by the kernel, too.
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = KernelListen::Auto)]
    kernel_listen: KernelListen,

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

/// Runs the program, and ends as it ended.
pub fn run(options: &RunOptions) -> Result<(), Failure> {
    let config = options.stack.to_config()?;
    let library = library()?;
    if config.shards.count > 1 {
        return Err(Failure::usage("shards.count: a program of another process is served by one shard only"));
    }
    let channel = config.channel.clone();
    let presence = presence::of(&config.run, "run")?.ok_or_else(|| {
        Failure::usage(
            "run.directory: a program on the stack finds it by its directory, so it has to have one",
        )
    })?;
    let control = presence.dir().path().join(CONTROL);
    let mut shards = Shards::new(config)
        .presence(Some(presence))
        .open()?
        .build(|_| ChannelServer::for_processes(&channel))?;
    let stop = StopFlag::new().map_err(|e| Failure::running(format!("stop flag: {e}")))?;
    let door = Door::open(Some(&control), shards.iter().map(Shard::commander).collect())?;
    std::thread::scope(|scope| {
        let shards = scope.spawn(|| shards.iter_mut().try_for_each(|shard| shard.run(&stop)));
        let ended = start(options, &library, &control).and_then(|child| follow(child, &door));
        stop.stop();
        match shards.join() {
            Ok(result) => result.map_err(Failure::from).and(ended),
            Err(_) => Err(Failure::running("a shard panicked")),
        }
    })
    .and_then(|status| if status.success() { Ok(()) } else { Err(Failure::program(code(status))) })
}

/// Where the library is: where the environment says, beside this program, or where packages put it.
fn library() -> Result<PathBuf, Failure> {
    if let Some(path) = std::env::var_os("GINNEL_LIBRARY") {
        return Ok(path.into());
    }
    let program = std::env::current_exe().map_err(|e| Failure::running(format!("own path: {e}")))?;
    let beside = program.with_file_name(LIBRARY);
    let places = program
        .parent()
        .into_iter()
        .flat_map(|at| ["../lib/ginnel", "../lib"].map(|folder| at.join(folder).join(LIBRARY)));
    core::iter::once(beside.clone()).chain(places).find(|path| path.exists()).ok_or_else(|| {
        Failure::running(format!("{} is missing (GINNEL_LIBRARY says where else it is)", beside.display()))
    })
}

/// Starts the program with the library and a way to the stack.
fn start(options: &RunOptions, library: &Path, control: &Path) -> Result<Child, Failure> {
    let [program, arguments @ ..] = options.program.as_slice() else {
        return Err(Failure::usage("PROGRAM is missing"));
    };
    let mut preload = library.as_os_str().to_owned();
    if let Some(others) = std::env::var_os("LD_PRELOAD") {
        preload.push(":");
        preload.push(others);
    }
    let kernel_listen = match options.kernel_listen {
        KernelListen::Auto => "auto",
        KernelListen::Off => "off",
    };
    let mut command = std::process::Command::new(program);
    command
        .args(arguments)
        .env("LD_PRELOAD", preload)
        .env("GINNEL_STACK", control)
        .env("GINNEL_KERNEL_LISTEN", kernel_listen);
    command.spawn().map_err(|e| Failure::running(format!("{}: {e}", program.display())))
}

/// Hands signals on, until the program and all that came of it have ended.
fn follow(mut child: Child, door: &Door) -> Result<ExitStatus, Failure> {
    let running = |e| Failure::running(format!("program: {e}"));
    let signals = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT];
    let mut signals = Signals::new(signals).map_err(running)?;
    let status = loop {
        for signal in signals.pending() {
            if let (Some(pid), Some(signal)) =
                (Pid::from_raw(child.id().cast_signed()), Signal::from_named_raw(signal))
            {
                // It may have ended.
                let _ = kill_process(pid, signal);
            }
        }
        if let Some(status) = child.try_wait().map_err(running)? {
            break status;
        }
        std::thread::sleep(LOOK_EVERY);
    };
    // A program that went to the background left others behind: the stack is theirs until they end.
    let ended = |signals: &mut Signals| signals.pending().any(|s| matches!(s, SIGINT | SIGTERM));
    while door.processes() > 0 && !ended(&mut signals) {
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(status)
}

/// As a shell has it: of a program that a signal ended, 128 and the signal.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
    u8::try_from(code & 0xff).unwrap_or(1)
}
