//! Messages about a wrong command line, each in one line.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use ginnel::config::ADDRESS_PROBLEMS;
use std::ffi::OsString;

/// Messages of the standard library about numbers, and what is printed instead.
const NUMBER_PROBLEMS: [(&str, &str); 6] = [
    ("invalid digit found in string", "not a whole number"),
    ("cannot parse integer from empty string", "the number is missing"),
    ("number too large to fit in target type", "the number is too large"),
    ("number too small to fit in target type", "the number is too small"),
    ("invalid float literal", "not a number"),
    ("cannot parse float from empty string", "the number is missing"),
];
/// Numbers that are tried as an example.
const EXAMPLES: [&str; 6] = ["1", "2", "100", "1000", "100000", "0"];

/// Returns the first paragraph of an error in `arguments` as one line. Messages of the standard library about
/// addresses and numbers are replaced by sentences with an example. A number of an example is one that
/// `parse` accepts in place of the wrong one.
pub fn one_line(
    error: &clap::Error,
    arguments: &[OsString],
    parse: impl Fn(Vec<OsString>) -> Option<clap::Error>,
) -> String {
    let text = error.render().to_string();
    let lines: Vec<&str> = text.split("\n\n").next().unwrap_or_default().lines().map(str::trim).collect();
    let line = lines.join(" ").trim_start_matches("error: ").to_owned();
    if error.kind() != ErrorKind::ValueValidation {
        return line;
    }
    let replaced = |(problem, sentence): (&str, &str)| {
        line.strip_suffix(problem).map(|before| format!("{before}{sentence}"))
    };
    if let Some(explained) = ADDRESS_PROBLEMS.into_iter().find_map(replaced) {
        return explained;
    }
    let Some(explained) = NUMBER_PROBLEMS.into_iter().find_map(replaced) else { return line };
    match example(error, arguments, parse) {
        Some(example) => format!("{explained}, as in {example}"),
        None => explained,
    }
}

/// Returns a number that the option takes whose value is wrong.
fn example(
    error: &clap::Error,
    arguments: &[OsString],
    parse: impl Fn(Vec<OsString>) -> Option<clap::Error>,
) -> Option<&'static str> {
    let (ContextValue::String(wrong), option) =
        (error.get(ContextKind::InvalidValue)?, error.get(ContextKind::InvalidArg)?)
    else {
        return None;
    };
    // The value may be an argument of its own, or follow the option. Options of other arguments do not
    // matter.
    let with = |example: &str, argument: &OsString| {
        let before = argument.to_str().and_then(|text| text.strip_suffix(wrong.as_str()));
        match before.filter(|before| before.is_empty() || before.starts_with('-')) {
            Some(before) => format!("{before}{example}").into(),
            None => argument.clone(),
        }
    };
    EXAMPLES.into_iter().find(|example| {
        let is_wrong = parse(arguments.iter().map(|argument| with(example, argument)).collect());
        // Otherwise another argument is wrong, too.
        is_wrong.is_none_or(|other| {
            other.kind() != ErrorKind::ValueValidation || other.get(ContextKind::InvalidArg) != Some(option)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::{ADDRESS_PROBLEMS, NUMBER_PROBLEMS, one_line};
    use crate::Cli;
    use clap::{CommandFactory, Parser};
    use std::ffi::OsString;

    /// Returns the message about a command line; `None` if it is right.
    fn problem(words: &[&str]) -> Option<String> {
        let parse = |words| Cli::try_parse_from(words).err();
        let words: Vec<OsString> = ["ginnel"].iter().chain(words).map(Into::into).collect();
        parse(words.clone()).map(|error| one_line(&error, &words, parse))
    }

    #[test]
    fn wrong_values_have_a_right_example() {
        for (words, expected) in [
            (&["up", "x", "--mtu", "abc"][..], "'abc' for '--mtu <BYTES>': not a whole number, as in 100"),
            (&["up", "x", "--mtu=abc"], "'abc' for '--mtu <BYTES>': not a whole number, as in 100"),
            (&["up", "x", "--mtu", "1"], "'1' for '--mtu <BYTES>': 1 is not in 68..=65521"),
            (&["top", "--count="], "'' for '--count <N>': the number is missing, as in 1"),
            (&["top", "-nx"], "'x' for '--count <N>': not a whole number, as in 1"),
            (
                &["top", "-n", "99999999999999999999"],
                "'99999999999999999999' for '--count <N>': the number is too large, as in 1",
            ),
            (
                &["up", "x", "--gateway", "y"],
                "'y' for '--gateway <ADDRESS>': not an IP address, as in 10.0.0.1",
            ),
            // Both values are wrong.
            (
                &["up", "x", "--mtu", "y", "--cpu", "y"],
                "'y' for '--mtu <BYTES>': not a whole number, as in 100",
            ),
        ] {
            assert_eq!(problem(words).unwrap(), format!("invalid value {expected}"));
        }
    }

    #[test]
    fn every_number_has_a_right_example() {
        fn check(path: &[&str], command: &clap::Command, numbers: &mut u32) {
            for option in command.get_opts().filter_map(clap::Arg::get_long) {
                let wrong = format!("--{option}=?");
                let Some(text) = problem(&[path, &[&wrong]].concat()) else { continue };
                let mut problems = NUMBER_PROBLEMS.iter().chain(&ADDRESS_PROBLEMS);
                assert!(!problems.any(|(problem, _)| text.contains(problem)), "{text}");
                let is_of_number = NUMBER_PROBLEMS.iter().any(|(_, sentence)| text.contains(sentence));
                *numbers += u32::from(is_of_number);
                assert!(!is_of_number || text.contains(", as in "), "{path:?}: {text}");
            }
            for next in command.get_subcommands() {
                check(&[path, &[next.get_name()]].concat(), next, numbers);
            }
        }
        let mut numbers = 0;
        check(&[], &Cli::command(), &mut numbers);
        assert!(numbers > 20, "{numbers}");
    }
}
