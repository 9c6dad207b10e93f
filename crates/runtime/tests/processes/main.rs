//! The channel across processes: programs that fork, become others, pass sockets on, are killed and stopped. The stack runs in this process (or, where it is
//! to die, in one of its own), over memory to a peer; the programs are this one again, as puppets.
//!
//! Without the usual harness, because a program that was started must be what it is from its first line, and have one thread.

mod fixture;
mod peer;
mod scenarios;
mod scripted_process;
mod sys;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Ok(path) = std::env::var(fixture::STACK_PATH_ENV) {
        fixture::run_stack(path.as_ref());
    }
    if let Ok(address) = std::env::var(scripted_process::ADDRESS_ENV) {
        scripted_process::run(address);
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let filters: Vec<&String> = arguments.iter().filter(|a| !a.starts_with("--")).collect();
    let long = arguments.iter().any(|a| a == "--ignored");
    let (mut passed, mut failed) = (0, 0);
    for (name, scenario) in scenarios::ALL.iter().filter(|_| !long) {
        if !filters.is_empty() && !filters.iter().any(|filter| name.contains(*filter)) {
            continue;
        }
        let ok = catch_unwind(AssertUnwindSafe(|| scenario(&mut fixture::Fixture::new(name)))).is_ok();
        println!("test {name} ... {}", if ok { "ok" } else { "FAILED" });
        if ok { passed += 1 } else { failed += 1 }
    }
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {result}. {passed} passed; {failed} failed; 0 ignored; 0 measured; 0 filtered out"
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
