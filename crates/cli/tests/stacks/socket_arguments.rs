//! Unusual arguments of calls that transfer data. Python cannot pass them, so the program is in C.

use crate::fixture::{Fixture, skipped};

#[test]
fn unusual_arguments_have_the_effect_of_linux() {
    if skipped("unusual_arguments_have_the_effect_of_linux") {
        return;
    }
    Fixture::new("arguments").compare_c_program("socket_arguments", &[]);
}
