//! `ginnel doctor`: examines this machine and an interface for a stack, and changes what slows it down.

use crate::doctor::configuration::{Choices, configuration};
use crate::doctor::description::{BYTES_MAX, MachineDescription};
use crate::doctor::plan::ShardPlan;
use crate::doctor::setting::{Change, Setting};
use crate::doctor::undo::{Outcome, UndoRecord};
use crate::doctor::{Finding, Level, examine, read, show};
use crate::failure::Failure;
use crate::output::{note, print};
use crate::stack_options::parse_port_range;
use clap::Args;
use ginnel::config::Prefix;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// Subjects of findings, for --only.
const ITEMS: &[&str] = &[
    "interface",
    "driver",
    "mtu",
    "bpf",
    "af_xdp",
    "channels",
    "rss",
    "irq",
    "xps",
    "rps",
    "coalescing",
    "offload",
    "cpus",
    "smt",
    "isolation",
    "governor",
    "irqbalance",
    "bpf_jit",
    "hugepages",
    "limits",
];

/// Rounds of --fix: a change of the number of queues changes what else there is to do.
const ROUNDS_MAX: usize = 4;

/// Options of `ginnel doctor`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Each line has what is to be done: ok and note (nothing), fix (--fix does it), todo (only you can), FAIL\n(a stack cannot use the interface). Exit status: 0 if nothing is to be done, otherwise 1; with --fix and\n--undo 0 if every change succeeded.\n\nWhat the items mean: docs/operations.md"
)]
#[allow(clippy::struct_excessive_bools, reason = "they are actions of which one is given")]
pub struct DoctorOptions {
    /// The interface for a stack. Default: that of the default route, if there is one.
    interface: Option<String>,

    /// Number of shards (threads) of the stack. Default: one for each isolated core of the interface's memory
    /// node, or without isolated cores, for half of its cores; at most one for each queue.
    #[arg(long, value_name = "N")]
    shards: Option<u32>,

    /// Only these items, such as channels,irq,rps.
    #[arg(long, value_name = "ITEMS", value_delimiter = ',', value_parser = clap::builder::PossibleValuesParser::new(ITEMS), hide_possible_values = true)]
    only: Vec<String>,

    /// Change what is marked with "fix", and record the former values. May be repeated.
    #[arg(long, conflicts_with_all = ["undo", "write", "describe", "from"])]
    fix: bool,

    /// Restore the values from before all --fix. What something else has changed since is left alone.
    #[arg(long, conflicts_with_all = ["shards", "only", "write", "describe", "from"])]
    undo: bool,

    /// Write a configuration for this machine to a new FILE, for ginnel up --config FILE.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["describe", "only"])]
    write: Option<PathBuf>,

    /// For --write: the ports that the stack takes if it shares the addresses of the host, as in 80,443.
    #[arg(long, value_name = "PORTS", value_delimiter = ',', value_parser = parse_port_range, default_value = "80,443", requires = "write")]
    ports: Vec<(u16, u16)>,

    /// For --write: an address of the stack alone, with its prefix length. May be given several times.
    /// Default: the stack shares the addresses of the host.
    #[arg(long, value_name = "ADDRESS/LEN", requires = "write")]
    address: Vec<Prefix>,

    /// Print the description of the machine from which the findings follow, as JSON.
    #[arg(long)]
    describe: bool,

    /// Examine a machine that --describe has described in this file.
    #[arg(long, value_name = "FILE", conflicts_with = "interface")]
    from: Option<PathBuf>,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Examines the machine, or changes it.
pub fn run(options: &DoctorOptions) -> Result<(), Failure> {
    if options.undo {
        if let Some(interface) = &options.interface {
            return Err(Failure::usage(format!(
                "--undo restores all that --fix has changed: leave out {interface}"
            )));
        }
        return undo(options);
    }
    if options.fix {
        return fix(options);
    }
    let machine = describe(options)?;
    if options.describe {
        return print(machine.to_json());
    }
    let plan = plan(options, &machine)?;
    if let Some(path) = &options.write {
        return write(options, &machine, &plan, path);
    }
    show(options, &machine, &plan)
}

fn describe(options: &DoctorOptions) -> Result<MachineDescription, Failure> {
    let Some(path) = &options.from else {
        return read::machine(options.interface.as_deref()).map_err(Failure::running);
    };
    let failed = |e: String| Failure::usage(format!("{}: {e}", path.display()));
    let mut text = String::new();
    let file = File::open(path).map_err(|e| failed(e.to_string()))?;
    let bytes = file.take(BYTES_MAX + 1).read_to_string(&mut text).map_err(|e| failed(e.to_string()))?;
    if bytes as u64 > BYTES_MAX {
        return Err(failed(format!("is larger than {BYTES_MAX} bytes, and no description")));
    }
    MachineDescription::parse(&text)
        .map_err(|e| failed(format!("cannot be read as a description of \"ginnel doctor --describe\": {e}")))
}

fn plan(options: &DoctorOptions, machine: &MachineDescription) -> Result<ShardPlan, Failure> {
    ShardPlan::new(machine, options.shards).map_err(|e| Failure::usage(format!("--shards: {e}")))
}

/// Returns the findings that are wanted.
fn findings(options: &DoctorOptions, machine: &MachineDescription, plan: &ShardPlan) -> Vec<Finding> {
    let mut findings = examine(machine, plan);
    if !options.only.is_empty() {
        findings.retain(|finding| options.only.iter().any(|item| item == finding.item));
    }
    findings
}

fn show(options: &DoctorOptions, machine: &MachineDescription, plan: &ShardPlan) -> Result<(), Failure> {
    let findings = findings(options, machine, plan);
    if options.json {
        print(show::json(machine, plan, &findings))?;
    } else {
        let command = options.from.is_none().then(|| command(options));
        print(show::text(&findings, command.as_deref()))?;
    }
    let is_done = findings.iter().all(|finding| finding.level <= Level::Note);
    if is_done { Ok(()) } else { Err(Failure::program(1)) }
}

/// Returns the command line that shows these findings.
fn command(options: &DoctorOptions) -> String {
    let mut words = vec!["ginnel doctor".to_owned()];
    words.extend(options.interface.clone());
    words.extend(options.shards.map(|shards| format!("--shards {shards}")));
    if !options.only.is_empty() {
        words.push(format!("--only {}", options.only.join(",")));
    }
    words.join(" ")
}

/// Applies the changes of all findings. Each round reads the machine again.
fn fix(options: &DoctorOptions) -> Result<(), Failure> {
    let mut record = UndoRecord::open()?;
    let mut attempted: Vec<Change> = Vec::new();
    let mut report = Report { json: options.json, ..Report::default() };
    for _ in 0..ROUNDS_MAX {
        let machine = describe(options)?;
        let plan = plan(options, &machine)?;
        let changes = findings(options, &machine, &plan).into_iter().flat_map(|finding| finding.changes);
        let new: Vec<Change> = changes.filter(|change| !attempted.contains(change)).collect();
        if new.is_empty() {
            break;
        }
        for change in new {
            let outcome = record.apply(&change)?;
            // The other changes are for queues and interrupts that may not exist any more: see again.
            let is_stale = change.key.setting == Setting::Channels && matches!(outcome, Outcome::Changed(..));
            report.add(&change.key.name(), outcome)?;
            attempted.push(change);
            if is_stale {
                break;
            }
        }
    }
    report.finish("nothing is to be changed")?;
    if record.len() > 0 && !options.json {
        note("ginnel doctor --undo restores the former values");
    }
    report.result()
}

/// Restores the former values.
fn undo(options: &DoctorOptions) -> Result<(), Failure> {
    let mut record = UndoRecord::open()?;
    let mut report = Report { json: options.json, ..Report::default() };
    let mut printed = Ok(());
    record.undo(|key, outcome| {
        let added = report.add(&key.name(), outcome);
        if printed.is_ok() {
            printed = added;
        }
    })?;
    printed?;
    report.finish("nothing is to be undone")?;
    report.result()
}

/// Prints what became of changes.
#[derive(Default)]
struct Report {
    json: bool,
    lines: Vec<serde_json::Value>,
    reported: usize,
    failed: usize,
}

impl Report {
    fn add(&mut self, name: &str, outcome: Outcome) -> Result<(), Failure> {
        let (word, text) = match &outcome {
            Outcome::Unchanged => ("unchanged", "has the value already".to_owned()),
            Outcome::Changed(from, to) => ("changed", format!("{} -> {}", shown(from), shown(to))),
            Outcome::Left(now) => ("left", format!("is {} now, which something else has set", shown(now))),
            Outcome::Gone => ("gone", "does not exist any more".to_owned()),
            Outcome::Failed(reason) => ("failed", reason.clone()),
        };
        self.reported += 1;
        self.failed += usize::from(matches!(outcome, Outcome::Failed(_)));
        if self.json {
            self.lines.push(serde_json::json!({ "setting": name, "outcome": word, "text": text }));
            return Ok(());
        }
        print(format_args!("{word:<9}  {name}: {text}\n"))
    }

    fn finish(&mut self, nothing: &str) -> Result<(), Failure> {
        match (self.json, self.reported) {
            (true, _) => {
                print(format_args!("{}\n", serde_json::Value::Array(core::mem::take(&mut self.lines))))
            }
            (false, 0) => print(format_args!("{nothing}\n")),
            _ => Ok(()),
        }
    }

    fn result(&self) -> Result<(), Failure> {
        if self.failed == 0 { Ok(()) } else { Err(Failure::program(1)) }
    }
}

/// Shows a value; an empty one is visible.
fn shown(value: &str) -> &str {
    if value.is_empty() { "(empty)" } else { value }
}

fn write(
    options: &DoctorOptions,
    machine: &MachineDescription,
    plan: &ShardPlan,
    path: &Path,
) -> Result<(), Failure> {
    let choices = Choices { ports: &options.ports, addresses: &options.address };
    let text = configuration(machine, plan, &choices, path).map_err(Failure::usage)?;
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    let mut file = file.map_err(|e| {
        let hint =
            if e.kind() == ErrorKind::AlreadyExists { ": remove it, or name another file" } else { "" };
        Failure::running(format!("{}: {e}{hint}", path.display()))
    })?;
    if let Err(e) = file.write_all(text.as_bytes()) {
        let _ = fs::remove_file(path);
        return Err(Failure::running(format!("{}: {e}", path.display())));
    }
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    note(format_args!(
        "{}: start the stack with: ginnel up {name} --config {}",
        path.display(),
        path.display()
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The described machines of `tests/doctor` together have findings of all items.
    #[test]
    fn only_accepts_the_items_of_all_findings() {
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/doctor")).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "json") {
                let machine = MachineDescription::parse(&fs::read_to_string(path).unwrap()).unwrap();
                let plan = ShardPlan::new(&machine, None).unwrap();
                found.extend(examine(&machine, &plan).iter().map(|finding| finding.item));
            }
        }
        assert_eq!(ITEMS.iter().copied().collect::<BTreeSet<_>>(), found);
    }
}
