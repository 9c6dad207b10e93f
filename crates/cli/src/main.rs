//! The `ginnel` command.
//!
//! Exit codes: 0 done; 1 the command failed while running; 2 the arguments or the configuration cannot be
//! used; 125 a program has no stack to run on; 126 or 127 a program cannot be started. `ginnel run` otherwise
//! exits as its program does. Every error is one line on standard error that names what it is about.

// These macros panic if their reader has closed the pipe: see `output`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod clap_errors;
mod commands;
mod descriptor_limit;
mod doctor;
mod entry_limit;
mod executable;
mod executable_check;
mod failure;
mod interface_watch;
mod limit_watch;
mod log;
mod metrics;
mod orphans;
mod output;
mod programs;
mod publish;
mod sd_notify;
mod served_stack;
mod signals;
mod stack_options;
mod start_entries;
mod supervisor;
mod table;
mod terminal;

use clap::Parser;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use failure::Failure;
use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

/// A TCP/IP stack in user space, and programs on it.
#[derive(Debug, Parser)]
#[command(name = "ginnel", version, max_term_width = 100, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => return usage(&e),
    };
    log::install();
    let result = run(cli.command);
    log::write_omitted();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.is_silent() {
                output::note(format_args!("ginnel: {failure}"));
            }
            failure.exit_code()
        }
    }
}

/// Runs a subcommand, also as process 1 of a container.
fn run(command: commands::Command) -> Result<(), Failure> {
    // The runtime would take the default directory, without a word.
    if let Some(directory) = std::env::var_os("GINNEL_RUN_DIR").filter(|directory| !directory.is_empty())
        && !Path::new(&directory).is_absolute()
    {
        let directory = directory.display();
        return Err(Failure::usage(format!("GINNEL_RUN_DIR: \"{directory}\" is not an absolute path")));
    }
    signals::ignore_file_size_limit()?;
    signals::end_process_1_on_signal()?;
    if command.has_children() { command.run() } else { orphans::reap_during(|| command.run()) }
}

/// Prints help and version as clap renders them, and any other clap error as one line.
fn usage(e: &clap::Error) -> ExitCode {
    if matches!(
        e.kind(),
        ErrorKind::DisplayHelp
            | ErrorKind::DisplayVersion
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    ) {
        let _ = e.print();
        return if e.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
    }
    let text = e.render().to_string();
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let failure =
        Failure::usage(clap_errors::one_line(e, &arguments, |words| Cli::try_parse_from(words).err()));
    output::note(format_args!("ginnel: {failure}{} (see --help)", remedy(e, &text)));
    failure.exit_code()
}

/// Returns what may have been meant, for an argument that is unknown.
fn remedy(e: &clap::Error, text: &str) -> String {
    let argument = match e.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(argument)) if e.kind() == ErrorKind::UnknownArgument => argument,
        _ => return String::new(),
    };
    let is_for_program = text.contains("Usage: ginnel run ") && !argument.starts_with('-');
    match e.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(known)) => format!(": did you mean {known}?"),
        _ if is_for_program => format!(": put \"--\" before the program, as in \"-- {argument}\""),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::{Cli, remedy};
    use clap::{CommandFactory, Parser};

    #[test]
    fn unknown_arguments_have_a_remedy() {
        let remedy = |words: &[&str]| {
            let error = Cli::try_parse_from(words).unwrap_err();
            remedy(&error, &error.render().to_string())
        };
        let run = ["ginnel", "run", "--loopback", "stack"];
        assert_eq!(
            remedy(&[&run[..], &["true"]].concat()),
            ": put \"--\" before the program, as in \"-- true\""
        );
        assert_eq!(remedy(&["ginnel", "run", "--adress", "::1/64"]), ": did you mean --address?");
        assert_eq!(remedy(&["ginnel", "down", "web", "lab"]), "");
        assert_eq!(remedy(&["ginnel", "run"]), "");
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_option_has_a_help_text() {
        fn check(command: &clap::Command) {
            assert!(command.get_about().is_some(), "{} has no description", command.get_name());
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{} {}", command.get_name(), argument.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    /// Splits a line into words as a shell does: quotes hold a word together, a command substitution becomes
    /// `1`, a comment is dropped.
    fn words(line: &str) -> Vec<String> {
        let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
        let mut characters = line.chars().peekable();
        while let Some(character) = characters.next() {
            match (quote, character) {
                (Some(open), _) if character == open => quote = None,
                (None, '"' | '\'') => {
                    quote = Some(character);
                    word.get_or_insert_default();
                }
                (None, '#') if word.is_none() => break,
                (None, '&') => break,
                (None, '$') if characters.peek() == Some(&'(') => {
                    characters.by_ref().find(|c| *c == ')');
                    word.get_or_insert_default().push('1');
                }
                (None, ' ') => words.extend(word.take()),
                _ => word.get_or_insert_default().push(character),
            }
        }
        words.extend(word);
        words
    }

    #[test]
    fn the_commands_of_the_readme_parse() {
        let readme = include_str!("../../../README.md");
        let lines: Vec<_> = readme.lines().filter(|line| line.starts_with("ginnel ")).collect();
        assert!(lines.len() > 8, "{lines:?}");
        for line in lines {
            if let Err(error) = Cli::try_parse_from(words(line)) {
                panic!("{line}\n{error}");
            }
        }
    }
}
