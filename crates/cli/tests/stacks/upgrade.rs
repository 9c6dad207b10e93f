//! Upgrades of the shards of running stacks, and executables that packages replace.

use crate::fixture::{Fixture, GINNEL, RunningProgram, copy_program, run_to_end, skipped, wait_until};
use crate::restart::{CLIENT, SERVERS, kill_shards, shard_process, supervisor_of};
use ginnel::broker::{ConnectionPolicy, PROTOCOL_VERSION, upgrade};
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const SERVED: &str = "blocking polling {'worker'} hey!\n";

/// Returns a copy of `ginnel`, which stands for another version.
fn copy_of_ginnel(fixture: &Fixture, name: &str) -> PathBuf {
    let path = fixture.path().join(name);
    copy_program(GINNEL.as_ref(), &path);
    path
}

/// Creates a command as [`Fixture::ginnel`], of a copy.
fn command_of(fixture: &Fixture, program: &Path, arguments: &[&str]) -> Command {
    let of_fixture = fixture.ginnel(arguments);
    let mut command = Command::new(program);
    command.args(arguments).current_dir(fixture.path());
    for (name, value) in of_fixture.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// Returns the executable of the shards' process.
fn executable(supervisor: u32) -> String {
    let pid = shard_process(supervisor).unwrap();
    fs::read_link(format!("/proc/{pid}/exe")).unwrap().display().to_string()
}

#[test]
fn programs_go_on_after_an_upgrade() {
    if skipped("programs_go_on_after_an_upgrade") {
        return;
    }
    let fixture = Fixture::new("upgrade");
    let [former, next] = ["former", "next"].map(|name| copy_of_ginnel(&fixture, name));
    // Programs outlive an upgrade also if they would be ended after a crash.
    let up = ["up", "lab", "--background", "--loopback", "stack", "--on-stack-death", "kill"];
    let started = run_to_end(command_of(&fixture, &former, &up));
    assert!(started.status.success(), "{started:?}");
    let _up = fixture.stopped_at_end("lab");
    let servers = RunningProgram::new(fixture.script(&["--stack", "lab"], SERVERS));
    wait_until("the servers wait", || fixture.path().join("there").exists());
    let serve = || fixture.script_output(&["--stack", "lab"], CLIENT);
    assert_eq!(serve(), SERVED);
    let supervisor = supervisor_of(&fixture, "lab");
    assert_eq!(executable(supervisor), former.display().to_string());
    let upgraded = run_to_end(command_of(&fixture, &next, &["upgrade", "lab"]));
    assert!(upgraded.status.success(), "{upgraded:?}");
    assert_eq!(executable(supervisor), next.display().to_string());
    assert_eq!(serve(), SERVED);
    let log = fixture.run_ok(&["log", "lab"]);
    assert!(log.contains(" INFO  the shards were upgraded to version"), "{log}");
    drop(servers);
}

#[test]
fn shards_restart_after_their_file_was_replaced() {
    if skipped("shards_restart_after_their_file_was_replaced") {
        return;
    }
    let fixture = Fixture::new("replaced");
    let installed = copy_of_ginnel(&fixture, "installed");
    let up = ["up", "lab", "--background", "--loopback", "stack"];
    let started = run_to_end(command_of(&fixture, &installed, &up));
    assert!(started.status.success(), "{started:?}");
    let _up = fixture.stopped_at_end("lab");
    // As a package manager does it.
    fs::remove_file(&installed).unwrap();
    fs::write(&installed, "no program").unwrap();
    let supervisor = supervisor_of(&fixture, "lab");
    kill_shards(supervisor);
    assert_eq!(executable(supervisor), format!("{} (deleted)", installed.display()));
    let pid = shard_process(supervisor).unwrap();
    wait_until("the process has its name", || {
        fs::read_to_string(format!("/proc/{pid}/comm")).unwrap() == "ginnel\n"
    });
}

#[test]
fn executables_that_do_not_fit_change_nothing() {
    if skipped("executables_that_do_not_fit_change_nothing") {
        return;
    }
    let fixture = Fixture::new("unfit");
    let config = fixture.path().join("shards.toml");
    fs::write(&config, "[shards]\ncount = 2\n").unwrap();
    let options = ["--loopback", "stack", "--config", "shards.toml", "--on-stack-death", "kill"];
    let _up = fixture.start_stack("lab", &options);
    let servers = RunningProgram::new(fixture.script(&["--stack", "lab"], SERVERS));
    wait_until("the servers wait", || fixture.path().join("there").exists());
    let supervisor = supervisor_of(&fixture, "lab");
    let shards = shard_process(supervisor);
    let try_upgrade = |path: &str| {
        let executable = File::open(path).unwrap();
        let control = fixture.path().join("run/lab/control");
        let policy = ConnectionPolicy::KeepIfPossible;
        upgrade(&control, executable.as_fd(), policy, Duration::from_secs(60)).unwrap_err().to_string()
    };
    let reason = try_upgrade("/bin/true");
    assert!(reason.contains("no version of ginnel"), "{reason}");
    let reason = try_upgrade("/proc/self/status");
    assert!(reason.contains("cannot be started"), "{reason}");
    let version = |protocol: u32| {
        let words = format!("#define WORDS \"ginnel-shards {protocol} 9.8.7\"\n");
        fs::write(fixture.path().join("version.h"), words).unwrap();
        fixture.compile_c("cannot_start")
    };
    let reason = try_upgrade(&version(PROTOCOL_VERSION + 1));
    assert!(reason.contains("9.8.7") && reason.contains("stop the stack"), "{reason}");
    fs::write(&config, "[shards]\ncount = \"many\"\n").unwrap();
    let refused = fixture.run(&["upgrade", "lab"]);
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && stderr.contains("count"), "{stderr}");
    // Programs know the shards, and the supervisor keeps the TAP interfaces.
    let tap = "[shards]\ncount = 2\n[[device]]\nname = \"tap7\"\nkind = \"tap\"\n[[link]]\nname = \"lan\"\ndevice = \"tap7\"\n";
    for (text, expected) in [
        ("[shards]\ncount = 3\n", "the configuration has 3 shards, and the running stack has 2"),
        (tap, "the configuration has other TAP interfaces (tap7) than the running stack (none)"),
    ] {
        fs::write(&config, text).unwrap();
        let refused = fixture.run(&["upgrade", "lab"]);
        let stderr = String::from_utf8(refused.stderr).unwrap();
        assert!(!refused.status.success() && stderr.contains(expected), "{stderr}");
    }
    assert_eq!(shard_process(supervisor), shards, "all this was found before the shards ended");
    // A version that fails later is taken back.
    fs::write(&config, "[shards]\ncount = 2\n").unwrap();
    let reason = try_upgrade(&version(PROTOCOL_VERSION));
    assert!(reason.contains("9.8.7") && reason.contains("cannot start the shards"), "{reason}");
    assert_eq!(fixture.script_output(&["--stack", "lab"], CLIENT), SERVED);
    assert_eq!(executable(supervisor), fs::canonicalize(GINNEL).unwrap().display().to_string());
    drop(servers);
}

#[test]
fn stack_without_a_supervisor_refuses_upgrades() {
    if skipped("stack_without_a_supervisor_refuses_upgrades") {
        return;
    }
    let fixture = Fixture::new("unsupervised");
    let _up = fixture.start_stack("lab", &["--loopback", "stack", "--on-stack-death", "fail"]);
    let refused = fixture.run(&["upgrade", "lab"]);
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && stderr.contains("no supervisor"), "{stderr}");
    let refused = fixture.run(&["upgrade", "nonesuch"]);
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && stderr.contains("nonesuch"), "{stderr}");
}
