//! Memory of a stack for one program.

use crate::fixture::{Fixture, RunningProgram, skipped, wait_until};
use crate::restart::shard_process;
use std::fs;

/// Echoes 100 KB over a connection of its own.
const PROGRAM: &str = "
l = server('127.0.0.1', 7021); c = socket.create_connection(('127.0.0.1', 7021)); d, _ = l.accept()
for _ in range(100): c.sendall(b'x' * 1000); exactly(d, 1000)
open('served', 'w').close(); signal.pause()";

/// Returns the memory of a process in KiB (`Pss`), and the part of it that is not from files.
fn memory_kib(pid: u32) -> [u64; 2] {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let value = |name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    [value("Pss:"), value("Pss_Anon:") + value("Pss_Shmem:")]
}

#[test]
fn a_stack_for_one_program_is_small() {
    if skipped("a_stack_for_one_program_is_small") {
        return;
    }
    for on_death in ["restart", "kill"] {
        let fixture = Fixture::new(&format!("small-{on_death}"));
        let options = ["--loopback", "stack", "--on-stack-death", on_death];
        let program = RunningProgram::new(fixture.script(&options, PROGRAM));
        wait_until("it served", || fixture.path().join("served").exists());
        let processes = [program.pid(), shard_process(program.pid()).unwrap()].map(memory_kib);
        let [total, own] = [0, 1].map(|part| processes.iter().map(|memory| memory[part]).sum::<u64>());
        println!("{on_death}: {total} KiB, of which {own} KiB are not from files: {processes:?}");
        assert!(own < 4 << 10 && total < 18 << 10, "{on_death}: {total} KiB, {own} KiB not from files");
    }
}
