//! The scripts of `packaging/ecmp` alone, in situations that the service does not produce.

use crate::process::{Process, example};
use ginnel_testkit::interop::{Namespace, programs_unavailable};
use ginnel_testkit::processes::wait_until;
use ginnel_testkit::skip;
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Directory of a test's files, removed when the value is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ginnel-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns whether a process has ended, also if nobody has waited for it.
fn has_ended(pid: &str) -> bool {
    let stat = fs::read_to_string(Path::new("/proc").join(pid).join("stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, fields)| fields.starts_with(['Z', 'X']))
}

#[test]
fn a_pipeline_that_hangs_leaves_no_process() {
    let test = "a_pipeline_that_hangs_leaves_no_process";
    if let Some(reason) = programs_unavailable(&["bash", "setsid"]) {
        return skip(test, &reason);
    }
    let folder = Folder::new("ecmp-pipeline");
    let machine = Namespace::new().unwrap();
    let mut command = Command::new(example("announce-while"));
    let probe = "(echo answer; sh -c 'echo $$ >>hanging; exec sleep 1000') | cat";
    command.args(["service", "sh", "-c", probe]).env("BIRDC", "true").env("DEADLINE", "0.1");
    let mut announcer = Process::start(&machine, &folder.0, "announce", command);
    let hanging = || -> Vec<String> {
        let text = fs::read_to_string(folder.0.join("hanging")).unwrap_or_default();
        text.lines().map(String::from).collect()
    };
    wait_until("the deadline ends three probes", || {
        announcer.assert_running();
        hanging().iter().filter(|pid| has_ended(pid)).count() >= 3
    });
    announcer.signal(Signal::TERM);
    wait_until("all probes end", || hanging().iter().all(|pid| has_ended(pid)));
}

/// The monitor reports changes faster than the script reads them: changes of another table, and of the table
/// that the script watches.
#[test]
fn routes_follow_on_a_busy_router() {
    let test = "routes_follow_on_a_busy_router";
    let reason = programs_unavailable(&["bash", "ip"]).or_else(crate::router::groups_unavailable);
    if let Some(reason) = reason {
        return skip(test, &reason);
    }
    for change in ["192.0.2.1 via 10.0.0.9 dev v0 table main", "192.0.2.1 via 10.0.0.9 dev v0 table 100"] {
        let folder = Folder::new("ecmp-busy-router");
        let ip = folder.0.join("ip");
        let monitor = format!("case \"$*\" in *monitor*) exec yes '{change}' ;; esac");
        let text = format!("#!/bin/sh\n{monitor}\nPATH=${{PATH#*:}}; exec ip \"$@\"\n");
        fs::write(&ip, text).unwrap();
        fs::set_permissions(&ip, fs::Permissions::from_mode(0o755)).unwrap();
        let (machine, neighbour) = (Namespace::new().unwrap(), Namespace::new().unwrap());
        machine.connect("v0", &neighbour, "v1", 1500).unwrap();
        machine.ip("address add 10.0.0.1/24 dev v0").unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "PATH=$PWD:$PATH; exec \"$0\" 100"]).arg(example("resilient-routes"));
        let _routes = Process::start(&machine, &folder.0, "routes", command);
        for route in ["203.0.113.10", "203.0.113.11"] {
            machine.ip(&format!("route add {route}/32 via 10.0.0.2 dev v0 table 100")).unwrap();
            wait_until(&format!("{route} follows {change:?}"), || {
                machine.ip(&format!("route show {route}/32")).unwrap().contains("nhid")
            });
        }
    }
}
