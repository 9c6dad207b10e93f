//! Calls that exist for all files, such as `writev` and `poll`. Python cannot make them with these arguments,
//! so the program is in C.

use crate::fixture::{Fixture, skipped};

#[test]
fn calls_on_files_have_the_results_of_linux() {
    if skipped("calls_on_files_have_the_results_of_linux") {
        return;
    }
    let fixture = Fixture::new("file-calls");
    let program = &*fixture.compile_c("file_calls");
    let on_kernel = fixture.run_ok(&["run", "--stack", "kernel", "--", program]);
    assert!(on_kernel.ends_with("end\n"), "{on_kernel}");
    let on_stack = fixture.run_ok(&["run", "--loopback", "stack", "--", program]);
    let differences: Vec<_> =
        on_kernel.lines().zip(on_stack.lines()).filter(|(kernel, stack)| kernel != stack).collect();
    assert!(on_kernel == on_stack, "kernel and stack: {differences:#?}");
}
