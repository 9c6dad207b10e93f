//! How stacks come and go.

use crate::rig::{Place, Started, skipped, until};
use std::fs;

#[test]
fn a_stack_is_kept_until_it_is_ended_and_says_who_uses_it() {
    if skipped("a_stack_is_kept_until_it_is_ended_and_says_who_uses_it") {
        return;
    }
    let place = Place::new("kept");
    let up = place.up("lab", &["--loopback", "stack"]);
    let directory = place.path().join("run/lab");
    assert!(directory.join("ready").exists());
    let twice = place.run(&["up", "lab", "--background", "--loopback", "stack"]);
    let said = String::from_utf8(twice.stderr).unwrap();
    assert_eq!((twice.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("\"lab\" runs already"), "{said}");
    let waiting = Started::new(
        place.script(&["--stack", "lab"], "s = server('127.0.0.1', 7001); s.accept()[0].sendall(b'bye')"),
    );
    let lists = |state: &str, text: &str| {
        place.must(&["ss", "lab", "-a", "state", state]).lines().any(|line| line.contains(text))
    };
    until("the program listens", || lists("listening", "127.0.0.1:7001"));
    let refused = place.run(&["down", "lab"]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("python3") && said.contains(&format!("({})", waiting.pid())), "{said}");
    let heard = place.says(
        &["--stack", "lab"],
        "print(exactly(socket.create_connection(('127.0.0.1', 7001)), 9).decode())",
    );
    assert_eq!(heard, "bye\n");
    assert!(waiting.finish().status.success());
    // Nobody is there any more.
    place.must(&["down", "lab"]);
    assert!(!directory.exists());
    assert_eq!(place.run(&["down", "lab"]).status.code(), Some(1));
    drop(up);
}

#[test]
fn a_stack_that_is_ended_by_force_leaves_its_programs_without_network_and_alive() {
    if skipped("a_stack_that_is_ended_by_force_leaves_its_programs_without_network_and_alive") {
        return;
    }
    let place = Place::new("force");
    let _up = place.up("lab", &["--loopback", "stack"]);
    let script =
        "s = server('127.0.0.1', 7001); c = socket.create_connection(('127.0.0.1', 7001)); a, _ = s.accept()
open('there', 'w').close()
try: print('got', a.recv(10))
except OSError as e: print(type(e).__name__)";
    let program = Started::new(place.script(&["--stack", "lab"], script));
    until("the program waits", || place.path().join("there").exists());
    place.must(&["down", "lab", "--force"]);
    let output = program.finish();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "ConnectionResetError\n");
}

#[test]
fn a_missing_stack_is_told_in_one_line_and_what_was_chosen_for_it_happens() {
    let place = Place::new("missing");
    let run = |options: &[&str]| {
        let output = place.run(&[&["run"], options, &["--", "echo", "here"]].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("no stack named \"lab\" runs"), "{said}");
        (output.status.code(), output.stdout)
    };
    assert_eq!(run(&["--stack", "lab"]), (Some(125), vec![]));
    assert_eq!(run(&["--stack", "lab", "--on-missing=fail"]), (Some(125), vec![]));
    assert_eq!(run(&["--stack", "lab", "--on-missing=kernel"]), (Some(0), b"here\n".to_vec()));
    // A device that nobody can have: the stack of the program's own is the one that is missing.
    let own = ["run", "--device", "af_xdp:no-such", "--address", "10.0.0.1/24"];
    let own = |policy| place.run(&[&own[..], &[policy, "--", "echo", "here"]].concat());
    assert_eq!(own("--on-missing=fail").status.code(), Some(125));
    let fallen = own("--on-missing=kernel");
    assert_eq!((fallen.status.code(), &fallen.stdout[..]), (Some(0), &b"here\n"[..]));
    assert!(String::from_utf8(fallen.stderr).unwrap().contains("no-such"));
}

#[test]
fn the_name_kernel_stands_for_no_stack() {
    let place = Place::new("kernel");
    let refused = place.run(&["up", "kernel", "--loopback", "stack"]);
    assert_eq!(refused.status.code(), Some(2));
    // As it is where somebody runs all of a script on a stack.
    let script = "echo ${LD_PRELOAD-none} ${GINNEL_STACK-none}";
    let mut command = place.ginnel(&["run", "--stack", "kernel", "--", "sh", "-c", script]);
    command.env("LD_PRELOAD", "/nowhere/libginnel.so").env("GINNEL_STACK", "/nowhere");
    let output = crate::rig::finish(command);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "none none\n");
}

#[test]
fn what_killed_stacks_left_goes_when_another_is_made() {
    let place = Place::new("stale");
    let mut killed = Vec::new();
    for name in ["one", "two"] {
        let up = Started::new(place.ginnel(&["up", name, "--loopback", "stack"]));
        until("it serves", || place.path().join("run").join(name).join("ready").exists());
        up.signal("KILL");
        killed.push(up.finish());
        assert!(place.path().join("run").join(name).exists());
    }
    let _up = place.up("three", &["--loopback", "stack"]);
    let left = fs::read_dir(place.path().join("run")).unwrap();
    let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, [".lock", "three"]);
}

#[test]
fn a_stack_of_its_own_lives_as_long_as_the_last_process_of_a_program_that_went_to_the_background() {
    if skipped(
        "a_stack_of_its_own_lives_as_long_as_the_last_process_of_a_program_that_went_to_the_background",
    ) {
        return;
    }
    let place = Place::new("daemon");
    let script = "s = server('127.0.0.1', 7001)
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open('daemon', 'w').write(str(os.getpid()))
def end(*_):
    open('ended', 'w').close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
while True:
    a, _ = s.accept(); a.sendall(b'here'); a.close()";
    let program = Started::new(place.script(&["--name", "lab", "--loopback", "stack"], script));
    until("the daemon is there", || {
        fs::read_to_string(place.path().join("daemon")).is_ok_and(|s| !s.is_empty())
    });
    let ask = "print(exactly(socket.create_connection(('127.0.0.1', 7001)), 9).decode())";
    for _ in 0..2 {
        assert_eq!(place.says(&["--stack", "lab"], ask), "here\n");
    }
    // Who would be sent it if it had stayed in the foreground gets it now, too.
    program.signal("TERM");
    assert_eq!(program.finish().status.code(), Some(0));
    assert!(place.path().join("ended").exists());
}
