//! Signals that arrive while a program makes calls: their handlers run before a call, while it blocks, or
//! after it, and never in its critical sections. Python delays its handlers, so the program is in C.

use crate::fixture::{Fixture, skipped};

/// Runs a part of the program on the kernel and on a stack; both must print `expected`.
#[track_caller]
fn assert_output(test: &str, part: &str, expected: &str) {
    if skipped(test) {
        return;
    }
    let fixture = Fixture::new(&format!("between-{part}"));
    let program = &*fixture.compile_c("signal_delivery");
    let on_kernel = fixture.run_ok(&["run", "--stack", "kernel", "--", program, part]);
    assert!(on_kernel.ends_with(expected), "{on_kernel}");
    assert_eq!(fixture.run_ok(&["run", "--loopback", "stack", "--", program, part]), on_kernel);
}

#[test]
fn handlers_may_jump_out_of_any_call() {
    let expected = "jumps: many, carried: much, wrong: 0\nthen: 1 1 x\n";
    assert_output("handlers_may_jump_out_of_any_call", "jumps", expected);
}

#[test]
fn handlers_may_block_on_sockets() {
    let expected = "ran: often, refused: 0 (0), carried: much, wrong: 0\n";
    assert_output("handlers_may_block_on_sockets", "uses", expected);
}

#[test]
fn queued_signals_keep_order_and_values() {
    let expected = "ran: 20000, disordered: 0, strange: 0\n";
    assert_output("queued_signals_keep_order_and_values", "queue", expected);
}

#[test]
fn thread_signals_use_the_threads_signal_stack() {
    let expected = "strays: 0, off their stack: 0\n";
    assert_output("thread_signals_use_the_threads_signal_stack", "threads", expected);
}

#[test]
fn one_shot_handlers_run_once() {
    assert_output("one_shot_handlers_run_once", "once", "once: 3000, strange: 0\n");
}

#[test]
fn sigaction_returns_the_installed_action() {
    assert_output("sigaction_returns_the_installed_action", "as_installed", "SigBlk:\t0000000000000000\n");
}

#[test]
fn started_programs_have_no_signals_blocked() {
    assert_output("started_programs_have_no_signals_blocked", "starts", "began well: 40\n");
}

#[test]
fn stop_and_continue_interrupt_as_on_linux() {
    assert_output("stop_and_continue_interrupt_as_on_linux", "stops", "accept: 1 \n");
}

#[test]
fn simultaneous_signals_leave_none_blocked() {
    assert_output("simultaneous_signals_leave_none_blocked", "several", "ran: often, left blocked: 0\n");
}

#[test]
fn threads_in_handlers_do_not_deadlock() {
    assert_output("threads_in_handlers_do_not_deadlock", "parks", "parked, wrong: 0\n");
}
