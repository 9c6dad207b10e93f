//! Signal handlers that leave a blocking call with `siglongjmp`, as old programs implement timeouts. Python
//! cannot do that, so the program is in C.

use crate::fixture::{Fixture, skipped};

#[test]
fn a_handler_may_jump_out_of_blocking_calls() {
    if skipped("a_handler_may_jump_out_of_blocking_calls") {
        return;
    }
    let fixture = Fixture::new("siglongjmp");
    let program = &*fixture.compile_c("siglongjmp");
    let on_kernel = fixture.run_ok(&["run", "--stack", "kernel", "--", program]);
    assert!(on_kernel.ends_with("end 0\nconnect: left\nnumbers lost: 0\n"), "{on_kernel}");
    assert!(
        !on_kernel.contains("returned") && on_kernel.matches("memory is lost: 0").count() == 7,
        "{on_kernel}"
    );
    assert_eq!(fixture.run_ok(&["run", "--loopback", "stack", "--", program]), on_kernel);
}
