//! `ginnel corpus`: writes the page corpus into a directory.

use crate::failure::Failure;
use ginnel_apps::corpus;

/// Writes the pages.
pub fn run(options: &corpus::CorpusOptions) -> Result<(), Failure> {
    corpus::run(options).map_err(|e| Failure::running(format!("{}: {e}", options.directory.display())))
}
