//! Handlers that leave calls that wait by `siglongjmp`, as old programs end what takes too long. Python's cannot, so the program is C's.

use crate::fixture::{Fixture, skipped};

#[test]
fn a_handler_may_jump_out_of_blocking_calls() {
    if skipped("a_handler_may_jump_out_of_blocking_calls") {
        return;
    }
    let place = Fixture::new("jumps");
    let program = &*place.compile_c("jumps");
    let on_kernel = place.run_ok(&["run", "--stack", "kernel", "--", program]);
    assert!(on_kernel.ends_with("end 0\nconnect: left\nnumbers lost: 0\n"), "{on_kernel}");
    assert!(
        !on_kernel.contains("returned") && on_kernel.matches("memory is lost: 0").count() == 7,
        "{on_kernel}"
    );
    assert_eq!(place.run_ok(&["run", "--loopback", "stack", "--", program]), on_kernel);
}
