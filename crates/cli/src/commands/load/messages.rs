//! `ginnel load iot` and `ginnel load echo`.

use super::{refuse_stack_options, run_on_stacks};
use crate::failure::Failure;
use crate::stack_options::{DeviceName, OwnStackOptions};
use clap::Args;
use core::net::IpAddr;
use ginnel::{Config, StopFlag};
use ginnel_apps::load::messages::plan::SendMode;
use ginnel_apps::load::messages::{MessageLoadOptions, MessageOptions, MessageReport, PRECISE_SPIN};
use ginnel_apps::load::{self, StackKind};

/// Options of `ginnel load iot` and `ginnel load echo`.
#[derive(Clone, Debug, Args)]
pub struct MessageCommandOptions<A: Args> {
    /// Options of the generator.
    #[command(flatten)]
    load: A,
    /// Options of the generator's stack.
    #[command(flatten)]
    stack: OwnStackOptions,
}

/// Runs the generator, prints its report and draws its picture. Returns an error if a goal was not reached.
pub fn run<A: Args + MessageLoadOptions>(
    options: &MessageCommandOptions<A>,
    stop: &StopFlag,
) -> Result<(), Failure> {
    let messages = options.load.messages();
    let report = measure(options, stop)?;
    if messages.json {
        println!("{}", report.to_json());
    } else {
        print!("{report}");
    }
    if let Some(file) = &messages.svg {
        std::fs::write(file, report.to_svg())
            .map_err(|e| Failure::running(format!("--svg: write {}: {e}", file.display())))?;
    }
    match report.missed.as_slice() {
        [] => Ok(()),
        missed => Err(Failure::running(format!("load {}: {}", report.service, missed.join("; ")))),
    }
}

fn measure<A: Args + MessageLoadOptions>(
    options: &MessageCommandOptions<A>,
    stop: &StopFlag,
) -> Result<MessageReport, Failure> {
    let (messages, stack) = (options.load.messages(), &options.stack);
    refuse_stack_options(messages.stack, stack)?;
    let job = |own| options.load.job(own).map_err(|e| Failure::usage(e.to_string()));
    if messages.stack == StackKind::Kernel {
        return Ok(load::measure_on_kernel(&job(None)?, stop)?);
    }
    if stack.device == Some(DeviceName::Memory) {
        return Err(Failure::usage(
            "--device memory has no server at its other end: use another device, or --stack kernel",
        ));
    }
    let mut config = stack.to_config()?;
    if messages.mode == SendMode::Precision {
        // The shard polls for this long after each message, and so until the next one.
        config.shard.spin_us = PRECISE_SPIN.as_micros() as u32;
    }
    let job = job(own_address(&config, messages))?;
    run_on_stacks(&job, config, stop)
}

/// Returns the stack's first address of the family of the server, if that is given as an address.
fn own_address(config: &Config, messages: &MessageOptions) -> Option<IpAddr> {
    let is_v6 = messages.server.iter().chain(&messages.dest).any(|server| server.matches(':').count() > 1);
    let addresses = config.links.first()?.addresses.iter().map(|prefix| prefix.address);
    addresses.into_iter().find(|address| address.is_ipv6() == is_v6)
}
