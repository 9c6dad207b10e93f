//! Standard output and standard error of the commands. A reader that has closed its end of a pipe has seen
//! enough: that is no error, and the exit status does not depend on it.

use crate::failure::Failure;
use core::fmt::Display;
use std::io::{self, ErrorKind, Write};

/// Prints a text on standard output.
///
/// # Errors
/// Standard output cannot be written for another reason than a closed pipe.
pub fn print(text: impl Display) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        Err(e) => Err(Failure::running(format!("standard output: {e}"))),
        Ok(()) => Ok(()),
    }
}

/// Prints a line on standard error. Without standard error there is nobody to inform.
pub fn note(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}
