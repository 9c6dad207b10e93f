//! `ginnel load replay`.

use super::{refuse_stack_options, run_on_stacks};
use crate::commands::monitor::open_capture;
use crate::failure::Failure;
use crate::stack_options::{DeviceName, OwnStackOptions};
use clap::Args;
use ginnel::StopFlag;
use ginnel_apps::load::replay::{ReplayOptions, ReplayReport};
use ginnel_apps::load::{self, StackKind};
use ginnel_monitor::recording::{self, RecordingOptions};
use std::io::{ErrorKind, Write};

/// Options of `ginnel load replay`.
#[derive(Clone, Debug, Args)]
pub struct ReplayCommandOptions {
    /// Options of the generator.
    #[command(flatten)]
    load: ReplayOptions,
    /// Options of the generator's stack.
    #[command(flatten)]
    stack: OwnStackOptions,
}

/// Runs the generator, prints its report and draws its picture. Returns an error if a goal was not reached.
pub fn run(options: &ReplayCommandOptions, stop: &StopFlag) -> Result<(), Failure> {
    let report = measure(options, stop)?;
    if let Some(file) = &options.load.svg {
        std::fs::write(file, report.to_svg())
            .map_err(|e| Failure::running(format!("--svg: write {}: {e}", file.display())))?;
    }
    let text = if options.load.json { format!("{}\n", report.to_json()) } else { report.to_string() };
    match std::io::stdout().write_all(text.as_bytes()) {
        // A reader that has seen enough of the report.
        Err(e) if e.kind() == ErrorKind::BrokenPipe => {}
        printed => printed?,
    }
    match report.missed.as_slice() {
        [] => Ok(()),
        missed => Err(Failure::running(format!("load replay: {}", missed.join("; ")))),
    }
}

fn measure(options: &ReplayCommandOptions, stop: &StopFlag) -> Result<ReplayReport, Failure> {
    let ReplayCommandOptions { load: replay, stack } = options;
    refuse_stack_options(replay.stack, stack)?;
    if replay.stack != StackKind::Kernel && stack.device == Some(DeviceName::Memory) {
        return Err(Failure::usage(
            "--device memory has no server at its other end: use another device, or --stack kernel",
        ));
    }
    let (name, mut source) = open_capture(&replay.file, std::io::stdin())?;
    let selected = RecordingOptions { ports: replay.port.clone(), bytes_max: replay.bytes_max };
    let read = recording::read(&mut source, &selected);
    let recording = read.map_err(|problem| Failure::running(format!("{name}: {problem}")))?;
    let job = replay.job(name, recording)?;
    match replay.stack {
        StackKind::Kernel => Ok(load::measure_on_kernel(&job, stop)?),
        _ => run_on_stacks(&job, stack.to_config()?, false, stop),
    }
}
