//! `vfork` and `fork` at the same time, and `fork` in a child of `vfork`: no child holds the pipe for which
//! the parent of another one waits.

use crate::fixture::{Fixture, skipped};

const EXPECTED: &str = "waits for its child alone: 1\nheld: 0\nheld with handlers: 0\n";

#[test]
fn forked_children_do_not_hold_pipes_of_vfork() {
    if skipped("forked_children_do_not_hold_pipes_of_vfork") {
        return;
    }
    let fixture = Fixture::new("vfork-races");
    let program = &*fixture.compile_c("vfork_races");
    assert_eq!(fixture.run_ok(&["run", "--stack", "kernel", "--", program]), EXPECTED);
    // Children of a program without sockets are not attached to the stack, and forks are fast.
    assert_eq!(fixture.run_ok(&["run", "--loopback", "stack", "--", program]), EXPECTED);
    assert_eq!(fixture.run_ok(&["run", "--loopback", "stack", "--", program, "with a socket"]), EXPECTED);
}
