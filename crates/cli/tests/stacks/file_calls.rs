//! Calls that exist for all files, such as `writev` and `poll`. Python cannot make them with these arguments,
//! so the program is in C.

use crate::fixture::{Fixture, skipped};

#[test]
fn calls_on_files_have_the_results_of_linux() {
    if skipped("calls_on_files_have_the_results_of_linux") {
        return;
    }
    Fixture::new("file-calls").compare_c_program("file_calls", &[]);
}
