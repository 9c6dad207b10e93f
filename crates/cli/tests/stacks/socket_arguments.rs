//! Unusual arguments of calls that transfer data. Python cannot pass them, so the program is in C.

use crate::fixture::{Fixture, skipped};

#[test]
fn unusual_arguments_have_the_effect_of_linux() {
    if skipped("unusual_arguments_have_the_effect_of_linux") {
        return;
    }
    let fixture = Fixture::new("arguments");
    let program = &*fixture.compile_c("socket_arguments");
    let on_kernel = fixture.run_ok(&["run", "--stack", "kernel", "--", program]);
    assert!(on_kernel.ends_with("end\n"), "{on_kernel}");
    let on_stack = fixture.run_ok(&["run", "--loopback", "stack", "--", program]);
    let differences: Vec<_> =
        on_kernel.lines().zip(on_stack.lines()).filter(|(kernel, stack)| kernel != stack).collect();
    assert!(on_kernel == on_stack, "kernel and stack: {differences:#?}");
}
