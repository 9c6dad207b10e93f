//! The table `[iot]` of the configuration file: each key is an option of the command, with `_` in place of
//! `-`. Options on the command line override keys.

use super::{IotCommandOptions, ProgramOptions};
use crate::clap_errors::one_line;
use crate::failure::Failure;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use ginnel::config::ProgramKey;
use std::ffi::OsString;
use std::path::Path;

/// Options of which a file must not give one if the command line gives another.
const ALTERNATIVES: &[&[&str]] = &[&["redis", "start_redis"]];

/// Applies the keys of a file to the options that were parsed from `command_line`, which begins with the name
/// of the subcommand.
pub fn apply(
    command_line: &[OsString],
    file: &Path,
    keys: &[ProgramKey],
) -> Result<IotCommandOptions, Failure> {
    let failed = |key: &ProgramKey, problem: &str| {
        Failure::usage(format!("{}:{}: iot.{}: {problem}", file.display(), key.line, key.name))
    };
    let all = |words: Vec<OsString>| matches_of(IotCommandOptions::augment_args(command()), words);
    let given = all(command_line.to_vec());
    let given =
        given.map_err(|error| Failure::usage(one_line(&error, command_line, |words| all(words).err())))?;
    let mut arguments = vec![command_line[0].clone()];
    for key in keys {
        let program = ProgramOptions::augment_args(command());
        if !program.get_arguments().any(|argument| argument.get_id() == key.name.as_str()) {
            return Err(failed(key, "unknown key: docs/iot.md lists the keys"));
        }
        let option = format!("--{}", key.name.replace('_', "-"));
        let options: Vec<OsString> = match (key.is_boolean, key.values[..].first().map(String::as_str)) {
            (true, Some("false")) => Vec::new(),
            (true, _) => vec![option.into()],
            _ => key.values.iter().map(|value| format!("{option}={value}").into()).collect(),
        };
        let alone: Vec<OsString> =
            [OsString::from("iot")].into_iter().chain(options.iter().cloned()).collect();
        let parse = |words| matches_of(program.clone(), words).err();
        if let Some(error) = parse(alone.clone()) {
            return Err(failed(key, &one_line(&error, &alone, parse)));
        }
        if !is_overridden(&given, &key.name) {
            arguments.extend(options);
        }
    }
    arguments.extend_from_slice(&command_line[1..]);
    let options = all(arguments.clone()).and_then(|matches| IotCommandOptions::from_arg_matches(&matches));
    options.map_err(|error| {
        let problem = one_line(&error, &arguments, |words| all(words).err());
        Failure::usage(format!("{}: {problem}", file.display()))
    })
}

fn command() -> Command {
    Command::new("iot")
}

fn matches_of(
    command: Command,
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<ArgMatches, clap::Error> {
    command.try_get_matches_from(arguments)
}

/// Returns whether the command line has the option of a key, or an alternative to it.
fn is_overridden(given: &ArgMatches, key: &str) -> bool {
    let is_given = |id: &str| given.value_source(id) == Some(ValueSource::CommandLine);
    let alternatives = ALTERNATIVES.iter().find(|options| options.contains(&key));
    is_given(key) || alternatives.is_some_and(|options| options.iter().any(|id| is_given(id)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_apps::iot::RedisAddress;

    fn key(name: &str, values: &[&str], is_boolean: bool) -> ProgramKey {
        let values = values.iter().map(ToString::to_string).collect();
        ProgramKey { name: name.into(), line: 7, values, is_boolean }
    }

    fn apply_to(line: &str, keys: &[ProgramKey]) -> Result<IotCommandOptions, String> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        apply(&words, Path::new("x.toml"), keys).map_err(|failure| failure.to_string())
    }

    #[test]
    fn options_override_keys() {
        let keys = [
            key("keys", &["5"], false),
            key("deadline_ms", &["77"], false),
            key("redis", &["unix:/a", "unix:/b"], false),
            key("stat_print", &["true"], true),
        ];
        let options = apply_to("iot --deadline-ms 99", &keys).unwrap();
        let iot = &options.program.iot;
        assert_eq!((iot.keys, iot.deadline_ms, iot.redis.len()), (5, 99, 2));
        assert!(options.program.stat_print.is_some());
        let options = apply_to("iot --redis unix:/c", &keys).unwrap();
        assert_eq!(options.program.iot.redis, [RedisAddress::Unix("/c".into())]);
        let options = apply_to("iot --start-redis 2", &keys).unwrap();
        assert_eq!(options.program.iot.start_redis, Some(2));
        let off = [key("stat_print", &["false"], true)];
        assert!(apply_to("iot", &off).unwrap().program.stat_print.is_none());
    }

    #[test]
    fn wrong_keys_are_named_with_their_line() {
        for (wrong, expected) in [
            (key("key", &["5"], false), "x.toml:7: iot.key: unknown key"),
            (key("device", &["tap:x"], false), "x.toml:7: iot.device: unknown key"),
            (key("keys", &["0"], false), "x.toml:7: iot.keys: invalid value '0'"),
            (key("keys", &["true"], true), "x.toml:7: iot.keys: a value is required"),
            (key("keys", &["1", "2"], false), "x.toml:7: iot.keys: the argument '--keys <N>' cannot be used"),
            (key("redis", &["unix:"], false), "x.toml:7: iot.redis: invalid value 'unix:'"),
        ] {
            let error = apply_to("iot", &[wrong]).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        let both = [key("redis", &["a"], false), key("start_redis", &["1"], false)];
        let error = apply_to("iot", &both).unwrap_err();
        assert!(error.starts_with("x.toml: the argument '--redis <SERVER>' cannot be used with"), "{error}");
    }
}
