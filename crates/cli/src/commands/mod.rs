//! The subcommands.

mod corpus;

use crate::failure::Failure;
use clap::Subcommand;

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write 500 synthetic front pages with the sizes of popular ones, for httpd and load http
    Corpus(ginnel_apps::corpus::Options),
}

impl Command {
    /// Does it.
    pub fn run(self) -> Result<(), Failure> {
        match self {
            Self::Corpus(options) => corpus::run(&options),
        }
    }
}
