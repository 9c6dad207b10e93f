//! Stacks and programs in PID namespaces of their own, as in containers that share the runtime directory.

use crate::fixture::{
    Fixture, GINNEL, RunningProgram, built_library, python, run_to_end, skipped,
    skipped_without_pid_namespaces, wait_until,
};
use std::process::{Command, Output};

/// Returns a command that runs as process 1 of a new PID namespace, which ends with the command.
fn in_namespace(fixture: &Fixture, options: &[&str], words: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child"]).args(options).args(words);
    command.env("GINNEL_LIBRARY", built_library()).env("GINNEL_RUN_DIR", fixture.path().join("run"));
    command.current_dir(fixture.path());
    command
}

/// Starts the stack "lab" as process 1 of a new PID namespace. `options` are further options of unshare(1).
fn start_stack(fixture: &Fixture, options: &[&str]) -> RunningProgram {
    let device = ["--device", "memory", "--address", "10.5.0.1/24", "--loopback", "stack"];
    let stack = in_namespace(fixture, options, &[&[GINNEL, "up", "lab"], &device[..]].concat());
    let stack = RunningProgram::new(stack);
    wait_until("the stack is ready", || fixture.path().join("run/lab/ready").exists());
    stack
}

/// Returns the children of the first thread of a process.
fn children(pid: &str) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace().map(str::to_owned).collect()
}

/// Runs a shell script as process 1 of a new PID namespace.
fn run_script(fixture: &Fixture, script: &str) -> Output {
    run_to_end(in_namespace(fixture, &["--mount-proc"], &["sh", "-c", script, "sh", GINNEL]))
}

#[test]
fn down_signals_nobody_if_the_stack_is_hidden() {
    let test = "down_signals_nobody_if_the_stack_is_hidden";
    if skipped(test) || skipped_without_pid_namespaces(test) {
        return;
    }
    let fixture = Fixture::new("hidden-stack");
    let _stack = start_stack(&fixture, &[]);
    // The shell has the number that the stack has in its own namespace.
    for force in ["", "--force"] {
        let script = format!("trap 'echo signalled; exit 3' TERM; \"$1\" down lab {force}; echo $?");
        let output = run_script(&fixture, &script);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "1\n", "{output:?}");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(text.contains("runs in another PID namespace"), "{text}");
    }
    assert!(fixture.path().join("run/lab/ready").exists());
}

#[test]
fn down_stops_a_stack_of_an_inner_namespace() {
    let test = "down_stops_a_stack_of_an_inner_namespace";
    if skipped(test) || skipped_without_pid_namespaces(test) {
        return;
    }
    let fixture = Fixture::new("inner-stack");
    // The shell is process 1, as the stack is in its namespace.
    let script = "trap 'echo signalled; exit 3' TERM
        unshare --pid --fork \"$1\" up lab --loopback stack &
        until [ -e run/lab/ready ]; do sleep 0.05; done
        \"$1\" down lab; echo $?
        wait $!; echo $?";
    let output = run_script(&fixture, script);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0\n0\n", "{output:?}");
}

#[test]
fn down_names_users_by_their_numbers_here() {
    let test = "down_names_users_by_their_numbers_here";
    if skipped(test) || skipped_without_pid_namespaces(test) {
        return;
    }
    let fixture = Fixture::new("inner-users");
    // The stack reads the numbers of its own namespace.
    let stack = start_stack(&fixture, &["--mount-proc"]);
    let owner = children(&stack.pid().to_string()).remove(0);
    let script = "import socket, time; s = socket.create_server(('127.0.0.1', 7000)); time.sleep(60)";
    // In the namespace of the stack, and in one below it.
    for below in [&[][..], &["unshare", "--pid", "--fork", "--kill-child"]] {
        let mut inner = Command::new("nsenter");
        inner.args(["--target", &owner, "--pid"]).args(below);
        inner.args([GINNEL, "run", "--stack", "lab", "--", python().unwrap(), "-c", script]);
        inner.env("GINNEL_LIBRARY", built_library()).env("GINNEL_RUN_DIR", fixture.path().join("run"));
        let inner = RunningProgram::new(inner);
        let name = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let number = || {
            let child = children(&inner.pid().to_string()).pop()?;
            let child = if below.is_empty() { child } else { children(&child).pop()? };
            Some(child).filter(|child| name(child).starts_with("python"))
        };
        wait_until("the program runs", || number().is_some());
        let user = number().unwrap();
        wait_until("the program uses the stack", || {
            let users = run_to_end(fixture.ginnel(&["ss", "lab", "-l", "-p"])).stdout;
            String::from_utf8_lossy(&users).contains(&format!("pid={user},"))
        });
        let output = run_to_end(fixture.ginnel(&["down", "lab"]));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{output:?}");
        assert!(text.contains(&format!("is in use by {} ({user}): ", name(&user).trim_end())), "{text}");
        kill_and_wait(inner, &user);
    }
}

/// Kills the process `pid`, and waits for the program that waits for it.
fn kill_and_wait(program: RunningProgram, pid: &str) {
    assert!(Command::new("kill").args(["-s", "KILL", pid]).status().unwrap().success());
    program.wait_for_output();
}

#[test]
fn programs_of_another_namespace_use_the_stack() {
    let test = "programs_of_another_namespace_use_the_stack";
    if skipped(test) || skipped_without_pid_namespaces(test) {
        return;
    }
    let fixture = Fixture::new("other-namespace");
    let _stack = start_stack(&fixture, &[]);
    let script = "
s = server('127.0.0.1', 7000)
if os.fork():
    c = s.accept()[0]
    print(exactly(c, 5), os.wait()[1])
else:
    socket.create_connection(('127.0.0.1', 7000)).sendall(b'hello')";
    assert_eq!(fixture.script_output(&["--stack", "lab"], script), "b'hello' 0\n");
    fixture.run_ok(&["route", "lab", "add", "192.0.2.0/24", "via", "10.5.0.7"]);
}

/// Prints which signals a daemon gets that `ginnel run` serves, without /proc of its PID namespace.
#[test]
fn signals_reach_a_daemon_without_its_number() {
    let test = "signals_reach_a_daemon_without_its_number";
    if skipped(test) || skipped_without_pid_namespaces(test) {
        return;
    }
    let script = "
import os, signal, socket
signal.alarm(30)
s = socket.create_server(('127.0.0.1', 7000))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
program = os.getpid()
if os.fork(): os._exit(0)
while os.getppid() == program: signal.sigtimedwait([], 0.01)
assert os.getppid() == 1
while not signal.sigtimedwait({signal.SIGUSR1}, 0.1): os.system('kill -s USR1 1')
print('got it')";
    let fixture = Fixture::new("numberless");
    let words = [GINNEL, "run", "--loopback", "stack", "--", python().unwrap(), "-c", script];
    let output = run_to_end(in_namespace(&fixture, &[], &words));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "got it\n", "{output:?}");
}

/// The addresses of the stack are not ready for two seconds (duplicate address detection), and the kernel
/// ignores signals to process 1 that have no handler.
#[test]
fn a_container_may_be_stopped_while_it_starts() {
    let test = "a_container_may_be_stopped_while_it_starts";
    if skipped(test) || skipped_without_pid_namespaces(test) {
        return;
    }
    let address = ["--device", "memory", "--address", "fd00:5::1/64"];
    let words = [&[GINNEL, "run"], &address[..], &["--", "sh", "-c", "echo started; sleep 20"]].concat();
    // On a machine that stands still for two seconds, the signal comes after the start.
    for _ in 0..5 {
        let fixture = Fixture::new("stopped-early");
        let program = RunningProgram::new(in_namespace(&fixture, &[], &words));
        let own = || children(&program.pid().to_string()).pop();
        wait_until("the stack opens", || {
            let directory = fixture.path().join("run").read_dir();
            directory.is_ok_and(|mut stacks| stacks.next().is_some()) && own().is_some()
        });
        assert!(Command::new("kill").arg(own().unwrap()).status().unwrap().success());
        let output = program.wait_for_output();
        assert_eq!(output.status.code(), Some(143), "{output:?}");
        if output.stdout.is_empty() {
            return;
        }
    }
    panic!("the signal always came too late");
}

#[test]
fn orphans_of_a_container_are_reaped() {
    let test = "orphans_of_a_container_are_reaped";
    if skipped(test) || skipped_without_pid_namespaces(test) {
        return;
    }
    // Each inner shell leaves a process behind that ends later, as the first process of a daemon does.
    let script = "
        for i in 1 2 3 4 5; do sh -c 'sleep 0.1 & echo $!'; done >orphans
        for i in $(seq 100); do
            sleep 0.1
            found=$(for pid in $(cat orphans); do [ -e /proc/$pid ] && echo $pid; done)
            [ \"$found\" ] || break
        done
        echo $(wc -l <orphans) left: $found";
    let fixture = Fixture::new("orphans");
    let words = [GINNEL, "run", "--loopback", "stack", "--", "sh", "-c", script];
    let output = run_to_end(in_namespace(&fixture, &["--mount-proc"], &words));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "5 left:\n", "{output:?}");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_stack_of_a_container_reaps_orphans() {
    let test = "a_stack_of_a_container_reaps_orphans";
    if skipped(test) || skipped_without_pid_namespaces(test) {
        return;
    }
    let fixture = Fixture::new("stack-orphans");
    let stack = start_stack(&fixture, &[]);
    assert_reaps_orphans(&children(&stack.pid().to_string()).remove(0));
}

/// Has process 1 of a PID namespace inherit processes that end, and waits until they are reaped. `owner` is
/// the number of process 1 here.
fn assert_reaps_orphans(owner: &str) {
    let before = children(owner);
    // What an engine of containers executes in a container leaves processes behind.
    let script = "for i in 1 2 3 4 5; do sh -c 'sleep 1000 >/dev/null 2>&1 &'; done";
    let mut execute = Command::new("nsenter");
    execute.args(["--target", owner, "--pid", "sh", "-c", script]);
    assert!(run_to_end(execute).status.success());
    let orphans: Vec<String> = children(owner).into_iter().filter(|id| !before.contains(id)).collect();
    assert_eq!(orphans.len(), 5, "the processes that were left behind");
    assert!(Command::new("kill").args(&orphans).status().unwrap().success());
    wait_until("the orphans are reaped", || children(owner) == before);
}

/// Returns the names of a process's threads.
fn threads(pid: &str) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.map(|name| name.trim_end().to_owned()).collect()
}

/// The kernel ignores signals to process 1 that have no handler. The exporter has handlers of its own, with
/// which it ends regularly; a command that shows a log has none.
#[test]
fn commands_in_a_container_end_by_signals() {
    let test = "commands_in_a_container_end_by_signals";
    if skipped(test) || skipped_without_pid_namespaces(test) {
        return;
    }
    let fixture = Fixture::new("commands");
    let _stack = fixture.start_stack("lab", &["--loopback", "stack"]);
    let exporter = &["metrics", "--listen", "127.0.0.1:0"][..];
    let log = &["log", "lab", "--follow"][..];
    for (words, thread, signal, code) in [
        (exporter, "metrics", "TERM", 0),
        (exporter, "metrics", "HUP", 0),
        (log, "command", "TERM", 143),
        (log, "command", "INT", 130),
    ] {
        let program = RunningProgram::new(in_namespace(&fixture, &[], &[&[GINNEL], words].concat()));
        let own = || children(&program.pid().to_string()).pop();
        wait_until("the command runs", || {
            own().is_some_and(|pid| threads(&pid).iter().any(|name| name == thread))
        });
        let owner = own().unwrap();
        assert_reaps_orphans(&owner);
        assert!(Command::new("kill").args(["-s", signal, &owner]).status().unwrap().success());
        let output = program.wait_for_output();
        assert_eq!(output.status.code(), Some(code), "{words:?} {signal}: {output:?}");
    }
}

#[test]
fn watched_group_ends_without_its_numbers() {
    let test = "watched_group_ends_without_its_numbers";
    if skipped(test) || skipped_without_pid_namespaces(test) {
        return;
    }
    // /proc has the numbers of the outer namespace.
    let script = "
import os, subprocess, sys
os.mkdir('servers')
watcher = subprocess.Popen([sys.argv[1], 'watch-group', '--folder', 'servers'],
    stdin=subprocess.PIPE, preexec_fn=os.setpgrp)
member = subprocess.Popen(['sleep', '30'], preexec_fn=lambda: os.setpgid(0, watcher.pid))
watcher.stdin.close()
print(member.wait(), os.path.exists('servers'))";
    let fixture = Fixture::new("watched-group");
    let words = [python().unwrap(), "-c", script, GINNEL];
    let output = run_to_end(in_namespace(&fixture, &[], &words));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "-9 True\n", "{output:?}");
}
