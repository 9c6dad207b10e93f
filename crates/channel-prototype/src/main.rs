//! A prototype: may processes share the sockets of a stack in another process, and come to an end in any way they like?
//!
//! `cargo run -p ginnel-channel-prototype` plays every scenario and prints what came out. What was learned stands in
//! `docs/adr/0011-channel.md`; nothing else depends on this program.

mod client;
mod control;
mod lock;
mod measure;
mod region;
mod scenarios;
mod stack;
mod sys;

use client::Client;
use rustix::process::Signal;
use scenarios::Stage;
use std::io;
use std::time::{Duration, Instant};

/// The stack in a process of its own, and its name; both end with this value.
struct StackProcess(u32, String);

impl Drop for StackProcess {
    fn drop(&mut self) {
        sys::signal(self.0, Signal::KILL);
        _ = sys::wait(self.0);
        _ = std::fs::remove_file(&self.1);
    }
}

fn start_stack(path: &str) -> io::Result<StackProcess> {
    let mut stack = stack::Stack::new(path)?;
    match sys::fork()? {
        Some(process) => Ok(StackProcess(process, path.to_string())),
        None => {
            let error = stack.run().expect_err("it runs for ever");
            eprintln!("the stack ended: {error}");
            sys::exit(1)
        }
    }
}

/// Plays all scenarios. Returns how many did not come out.
fn check(program: &str) -> io::Result<usize> {
    let path = std::env::temp_dir().join(format!("ginnel-channel-{}", std::process::id()));
    let path = path.to_str().ok_or_else(|| io::Error::other("the temporary directory has a strange name"))?;
    let _stack = start_stack(path)?;
    let observer = Client::attach(path)?;
    let stage = Stage { path: path.to_string(), program: program.to_string(), observer };
    let mut failed = 0;
    for (name, play) in scenarios::ALL {
        let begun = Instant::now();
        let result = play(&stage);
        let ms = begun.elapsed().as_millis();
        match result {
            Ok(()) => println!("survived  {ms:>5} ms  {name}"),
            Err(error) => {
                failed += 1;
                println!("FAILED    {ms:>5} ms  {name}: {error}");
            }
        }
    }
    measure::print(stage.observer)?;
    Ok(failed)
}

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, role, text, ms] = &arguments[..]
        && role == "resumed"
    {
        let ms = ms.parse().map_err(|_| io::Error::other("not a number of milliseconds"))?;
        return scenarios::resumed(text, Duration::from_millis(ms));
    }
    let program = std::env::current_exe()?;
    let program = program.to_str().ok_or_else(|| io::Error::other("this program has a strange name"))?;
    match check(program)? {
        0 => Ok(()),
        failed => Err(io::Error::other(format!("{failed} scenarios failed"))),
    }
}
