//! System calls by number, `vfork`, `splice`, and waiting for many descriptors. Python cannot make these
//! calls, so the program is in C.

use crate::fixture::{Fixture, skipped};

#[test]
fn system_calls_by_number_match_the_kernel() {
    if skipped("system_calls_by_number_match_the_kernel") {
        return;
    }
    let fixture = Fixture::new("system-calls");
    let program = &*fixture.compile_c("system_calls");
    let on_kernel = fixture.run_ok(&["run", "--stack", "kernel", "--", program]);
    assert!(on_kernel.ends_with("end\n"), "{on_kernel}");
    let on_stack = fixture.run_ok(&["run", "--loopback", "stack", "--", program]);
    let differences: Vec<_> =
        on_kernel.lines().zip(on_stack.lines()).filter(|(kernel, stack)| kernel != stack).collect();
    assert!(on_kernel == on_stack, "kernel and stack: {differences:#?}");
}
