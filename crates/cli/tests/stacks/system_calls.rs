//! System calls by number, `vfork`, `splice`, and waiting for many descriptors. Python cannot make these
//! calls, so the program is in C.

use crate::fixture::{Fixture, skipped};

#[test]
fn system_calls_by_number_match_the_kernel() {
    if skipped("system_calls_by_number_match_the_kernel") {
        return;
    }
    Fixture::new("system-calls").compare_c_program("system_calls", &[]);
}
