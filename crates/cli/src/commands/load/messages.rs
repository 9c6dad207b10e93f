//! `ginnel load iot` and `ginnel load echo`.

use super::{refuse_stack_options, run_on_stacks};
use crate::failure::Failure;
use crate::output;
use crate::stack_options::{DeviceName, OwnStackOptions};
use clap::Args;
use core::net::IpAddr;
use ginnel::{Config, StopFlag};
use ginnel_apps::load::agents::AgentResult;
use ginnel_apps::load::messages::plan::SendMode;
use ginnel_apps::load::messages::{
    MessageJob, MessageLoadOptions, MessageOptions, MessageReport, PRECISE_SPIN,
};
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
    let Some(report) = measure(options, stop)? else {
        if !messages.quiet {
            output::note("the first agent prints the report");
        }
        return Ok(());
    };
    if let Some(file) = &messages.svg {
        std::fs::write(file, report.to_svg())
            .map_err(|e| Failure::running(format!("--svg: write {}: {e}", file.display())))?;
    }
    let text = if messages.json { format!("{}\n", report.to_json()) } else { report.to_string() };
    output::print(text)?;
    match report.missed.as_slice() {
        [] => Ok(()),
        missed => Err(Failure::running(format!("load {}: {}", report.service, missed.join("; ")))),
    }
}

/// Runs the generator, alone or as an agent. Returns no report if another agent makes it.
fn measure<A: Args + MessageLoadOptions>(
    options: &MessageCommandOptions<A>,
    stop: &StopFlag,
) -> Result<Option<MessageReport>, Failure> {
    let (messages, stack) = (options.load.messages(), &options.stack);
    refuse_stack_options(messages.stack, stack)?;
    let job = |own| options.load.job(own).map_err(|e| Failure::usage(e.to_string()));
    if messages.stack == StackKind::Kernel {
        return as_agent(messages, job(None)?, stop, |job| Ok(load::measure_on_kernel(job, stop)?));
    }
    if stack.device == Some(DeviceName::Memory) {
        return Err(Failure::usage(
            "--device memory has no server at its other end: use another device, or --stack kernel",
        ));
    }
    let mut config = stack.to_config()?;
    if messages.mode == SendMode::Precision {
        if config.shard.coalesce_us > 0 {
            return Err(Failure::usage("--coalesce-us delays messages, which --mode precision is to avoid"));
        }
        // The shard polls for this long after each message, and so until the next one.
        config.shard.spin_us = PRECISE_SPIN.as_micros() as u32;
    }
    let job = job(own_address(&config, messages))?;
    as_agent(messages, job, stop, |job| run_on_stacks(job, config, false, stop))
}

/// Runs `measure`. If the run has several agents, waits for the others first. At the end the first agent
/// collects the results of the others, and the others get no report.
fn as_agent(
    messages: &MessageOptions,
    mut job: MessageJob,
    stop: &StopFlag,
    measure: impl FnOnce(&MessageJob) -> Result<MessageReport, Failure>,
) -> Result<Option<MessageReport>, Failure> {
    let Some(meeting) = messages.meeting() else { return measure(&job).map(Some) };
    let agent = meeting.join(&job.description(), stop, |number| {
        if !messages.quiet {
            let (agents, run) = (meeting.agents, &meeting.run);
            output::note(format_args!("agent {number} of {agents} has joined the run \"{run}\""));
        }
    })?;
    job.set_agent(&agent);
    let report = measure(&job)?;
    match agent.finish(report.stats(), stop)? {
        AgentResult::Collected { others, dead } => {
            Ok(Some(job.report_on_agents(report.stats(), &others, &dead)))
        }
        AgentResult::Delivered => Ok(None),
    }
}

/// Returns the stack's first IPv6 address if a server is given as one, otherwise its first IPv4 address.
fn own_address(config: &Config, messages: &MessageOptions) -> Option<IpAddr> {
    let is_v6 = messages.server.iter().chain(&messages.dest).any(|server| server.matches(':').count() > 1);
    let addresses = config.links.first()?.addresses.iter().map(|prefix| prefix.address);
    addresses.into_iter().find(|address| address.is_ipv6() == is_v6)
}
