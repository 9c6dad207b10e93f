//! The findings about a machine.

use super::description::MachineDescription;
use super::plan::ShardPlan;
use super::setting::Change;
use super::{interface_findings, machine_findings, offload_findings, queue_findings};

/// Urgency of a finding, by what has to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Nothing has to be done.
    Ok,
    /// Nothing has to be done, but the operator should know it.
    Note,
    /// `--fix` changes it.
    Fix,
    /// Only the operator can change it.
    Todo,
    /// A stack cannot use the interface by AF_XDP.
    Fail,
}

/// A finding.
#[derive(Clone, Debug)]
pub struct Finding {
    /// Its subject, one word.
    pub item: &'static str,
    pub level: Level,
    /// The finding, and the reason why it matters, in one line.
    pub text: String,
    /// Changes that `--fix` makes.
    pub changes: Vec<Change>,
}

impl Finding {
    pub fn new(item: &'static str, level: Level, text: impl Into<String>) -> Self {
        Self { item, level, text: text.into(), changes: Vec::new() }
    }

    /// Makes a finding that `--fix` changes.
    pub fn fix(item: &'static str, text: impl Into<String>, changes: Vec<Change>) -> Self {
        Self { item, level: Level::Fix, text: text.into(), changes }
    }
}

/// Returns the findings about a machine on which the shards get the CPUs of `plan`.
pub fn examine(machine: &MachineDescription, plan: &ShardPlan) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(interface) = &machine.interface {
        findings.extend(interface_findings::all(machine, interface));
        if !interface.is_loopback && !interface.is_tap {
            findings.extend(queue_findings::all(interface, plan));
            findings.extend(offload_findings::all(interface));
        }
    } else {
        let text =
            "none is examined, because there is no default route: name one, as in \"ginnel doctor eth0\"";
        findings.push(Finding::new("interface", Level::Note, text));
    }
    findings.extend(machine_findings::all(machine, plan));
    findings
}

/// Returns a number with its noun: `1 queue`, `4 queues`.
pub fn counted(count: usize, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}
