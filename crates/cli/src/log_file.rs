//! The log of a stack in the background.

use crate::failure::Failure;
use rustix::stdio::{dup2_stderr, dup2_stdout};
use std::fs::OpenOptions;
use std::path::Path;

/// Redirects standard output and standard error to the end of the file `log` in the stack's directory.
pub fn redirect_output(directory: &Path) -> Result<(), Failure> {
    let path = directory.join("log");
    let failed = |e: std::io::Error| Failure::running(format!("{}: {e}", path.display()));
    let log = OpenOptions::new().create(true).append(true).open(&path).map_err(failed)?;
    dup2_stdout(&log).and_then(|()| dup2_stderr(&log)).map_err(|e| failed(e.into()))
}
