//! The options of a program that a bench runs as a part of itself.

use clap::{Args, Parser};

/// Parser for the options of a program.
#[derive(Parser)]
struct ParsedOptions<T: Args> {
    #[command(flatten)]
    options: T,
}

/// Returns the options that the words of a command line mean.
pub fn options<T: Args>(words: &[&str]) -> T {
    ParsedOptions::parse_from([&["program"], words].concat()).options
}
