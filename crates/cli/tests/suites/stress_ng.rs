//! Stressors of stress-ng.

use crate::side::{Side, assert_ended, command};
use crate::verdict::{Verdict, Verdicts};
use std::collections::BTreeMap;
use std::path::Path;

/// Stressors of stress-ng that use sockets of IP, each with `--verify`.
pub(crate) const STRESSORS: &[&str] = &["epoll", "sock", "sockabuse", "sockmany", "udp"];
pub(crate) const STRESS_SECONDS: u32 = 5;

pub(crate) fn run_stressor(side: Side, folder: &Path, stressor: &str) -> Verdicts {
    let option = format!("--{stressor}");
    let seconds = STRESS_SECONDS.to_string();
    let words = ["stress-ng", &option, "2", "--verify", "--timeout", &seconds, "--metrics-brief"];
    let output = command(side, folder, &words).output().unwrap();
    assert_ended(&output, side, &words);
    let verdict = if output.status.success() { Verdict::Passed } else { Verdict::Failed };
    if verdict == Verdict::Failed {
        println!("{side:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    BTreeMap::from([(format!("stress-ng --{stressor}"), verdict)])
}
