//! The channel across processes: programs that fork, execute others, pass sockets on, are killed and stopped.
//! The stack runs in this process (or in one of its own if it is killed) and is connected to a peer by a
//! memory device. The programs are further processes of this executable, which the scenarios script.
//!
//! Not run by the standard harness, because a program that was executed must do its work from the start of
//! `main`, and has one thread.

#[path = "../../src/fixture.rs"]
#[allow(dead_code)] // shared: this suite uses a part
mod fixture;
mod peer;
mod process_fixture;
mod scenarios;
mod scripted_process;
mod sys;

use process_fixture::ProcessFixture;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Ok(path) = std::env::var(process_fixture::STACK_PATH_ENV) {
        process_fixture::run_stack(path.as_ref());
    }
    if let Ok(address) = std::env::var(scripted_process::ADDRESS_ENV) {
        scripted_process::run(address);
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let filters: Vec<&String> = arguments.iter().filter(|a| !a.starts_with("--")).collect();
    let ignored_only = arguments.iter().any(|a| a == "--ignored");
    let (mut passed, mut failed) = (0, 0);
    for (name, scenario) in scenarios::ALL.iter().filter(|_| !ignored_only) {
        if !filters.is_empty() && !filters.iter().any(|filter| name.contains(*filter)) {
            continue;
        }
        let ok = catch_unwind(AssertUnwindSafe(|| scenario(&mut ProcessFixture::new(name)))).is_ok();
        println!("test {name} ... {}", if ok { "ok" } else { "FAILED" });
        if ok { passed += 1 } else { failed += 1 }
    }
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {result}. {passed} passed; {failed} failed; 0 ignored; 0 measured; 0 filtered out"
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
