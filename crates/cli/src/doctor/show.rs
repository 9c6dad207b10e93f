//! Shows findings as text and as JSON.

use super::description::MachineDescription;
use super::examine::{Finding, Level, counted};
use super::plan::ShardPlan;
use core::fmt::Write as _;
use serde_json::json;

impl Level {
    /// Returns the word in front of a finding.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Fix => "fix",
            Self::Todo => "todo",
            Self::Fail => "FAIL",
        }
    }
}

/// Returns a line for each finding, and a summary that says what to do. `command` is the command line that
/// has shown them, without `--fix`; `None` for another machine.
pub fn text(findings: &[Finding], command: Option<&str>) -> String {
    let width = findings.iter().map(|finding| finding.item.len()).max().unwrap_or(0);
    let mut out = String::new();
    for Finding { item, level, text, changes } in findings {
        let _ = write!(out, "{:<4}  {item:<width$}  {text}", level.word());
        let _ = match &changes[..] {
            [change] => writeln!(out, "; --fix sets {}", change.to),
            _ => writeln!(out),
        };
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (fix, todo, fail) = (count(Level::Fix), count(Level::Todo), count(Level::Fail));
    if fix + todo + fail == 0 {
        return out + "\nNothing is to be done.\n";
    }
    out.push('\n');
    if fail > 0 {
        let _ =
            writeln!(out, "FAIL: a stack cannot use this interface until {} solved.", verb(fail, "problem"));
    }
    if fix > 0 {
        let items = counted(fix, "item");
        let _ = match command {
            Some(command) => {
                writeln!(out, "fix: \"{command} --fix\" changes {items}, and --undo restores them.")
            }
            None => writeln!(out, "fix: {items} can be changed by --fix on that machine."),
        };
    }
    if todo > 0 {
        let _ = writeln!(out, "todo: {} left to you; the line says how.", verb(todo, "item"));
    }
    out
}

fn verb(count: usize, noun: &str) -> String {
    format!("{} {}", counted(count, noun), if count == 1 { "is" } else { "are" })
}

/// Returns a JSON object.
pub fn json(machine: &MachineDescription, plan: &ShardPlan, findings: &[Finding]) -> String {
    let finding = |finding: &Finding| {
        let changes =
            finding.changes.iter().map(|change| json!({ "setting": change.key.name(), "to": change.to }));
        json!({
            "item": finding.item,
            "level": finding.level.word().to_lowercase(),
            "text": finding.text,
            "changes": changes.collect::<Vec<_>>(),
        })
    };
    let object = json!({
        "interface": machine.interface.as_ref().map(|interface| &interface.name),
        "shard_cpus": plan.cpus,
        "findings": findings.iter().map(finding).collect::<Vec<_>>(),
    });
    format!("{object}\n")
}
