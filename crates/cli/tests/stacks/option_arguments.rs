//! Arguments of socket options and control messages that Python cannot pass, so the program is in C.

use crate::fixture::{Fixture, skipped};

#[test]
fn option_arguments_have_the_effect_of_linux() {
    if skipped("option_arguments_have_the_effect_of_linux") {
        return;
    }
    Fixture::new("options").compare_c_program("option_arguments", &[]);
}
