//! Handlers of signals that come while a program makes calls: they run before a call, in its sleep or behind it, never in its middle. Python's own run when it pleases, so the program is
//! C's.

use crate::fixture::{Fixture, skipped};

/// Says the same on the kernel, where it is `expected`, and on a stack.
#[track_caller]
fn assert_output(test: &str, part: &str, expected: &str) {
    if skipped(test) {
        return;
    }
    let place = Fixture::new(&format!("between-{part}"));
    let program = &*place.compile_c("between");
    let on_kernel = place.run_ok(&["run", "--stack", "kernel", "--", program, part]);
    assert!(on_kernel.ends_with(expected), "{on_kernel}");
    assert_eq!(place.run_ok(&["run", "--loopback", "stack", "--", program, part]), on_kernel);
}

#[test]
fn handlers_may_jump_out_of_whatever_they_interrupt() {
    let expected = "jumps: many, carried: much, wrong: 0\nthen: 1 1 x\n";
    assert_output("handlers_may_jump_out_of_whatever_they_interrupt", "jumps", expected);
}

#[test]
fn handlers_may_use_sockets_that_wait() {
    let expected = "ran: often, refused: 0 (0), carried: much, wrong: 0\n";
    assert_output("handlers_may_use_sockets_that_wait", "uses", expected);
}

#[test]
fn signals_that_queue_come_in_their_order_with_their_values() {
    let expected = "ran: 20000, disordered: 0, strange: 0\n";
    assert_output("signals_that_queue_come_in_their_order_with_their_values", "queue", expected);
}

#[test]
fn signals_of_a_thread_come_to_it_on_its_own_stack() {
    let expected = "strays: 0, off their stack: 0\n";
    assert_output("signals_of_a_thread_come_to_it_on_its_own_stack", "threads", expected);
}

#[test]
fn handlers_that_are_in_force_once_run_once() {
    assert_output("handlers_that_are_in_force_once_run_once", "once", "once: 3000, strange: 0\n");
}

#[test]
fn what_is_in_force_is_what_was_said() {
    assert_output("what_is_in_force_is_what_was_said", "said", "SigBlk:\t0000000000000000\n");
}

#[test]
fn programs_that_are_started_among_signals_begin_with_none_blocked() {
    assert_output(
        "programs_that_are_started_among_signals_begin_with_none_blocked",
        "starts",
        "began well: 40\n",
    );
}

#[test]
fn who_is_stopped_and_goes_on_hears_of_it_only_where_linux_says_so() {
    assert_output("who_is_stopped_and_goes_on_hears_of_it_only_where_linux_says_so", "stops", "accept: 1 \n");
}

#[test]
fn signals_that_come_at_once_leave_none_blocked() {
    assert_output("signals_that_come_at_once_leave_none_blocked", "several", "ran: often, left blocked: 0\n");
}

#[test]
fn threads_that_are_stopped_by_signals_do_not_wait_for_each_other() {
    assert_output(
        "threads_that_are_stopped_by_signals_do_not_wait_for_each_other",
        "parks",
        "parked, wrong: 0\n",
    );
}
