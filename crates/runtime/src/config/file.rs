//! Reads a configuration file so that every error names the file, the line and the key.

use super::Config;
use core::fmt;
use core::ops::Range;
use ginnel_stack::error::ConfigError;
use serde::Deserialize;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

/// An error in a configuration file. Formats as one line: `file:line: key: problem`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    /// The file.
    pub file: String,
    /// The line, from 1; 0 if the file could not be read.
    pub line: usize,
    /// The key, dotted, with `[n]` for the n-th table of an array (`link[0].mtu`); empty if the file is not
    /// TOML.
    pub key: String,
    /// The problem.
    pub problem: String,
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        if !self.key.is_empty() {
            write!(f, ": {}", self.key)?;
        }
        write!(f, ": {}", self.problem)
    }
}

impl std::error::Error for FileError {}

pub(super) fn read(path: &Path) -> Result<Config, FileError> {
    let file = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&file, &text),
        Err(e) => Err(FileError { file, line: 0, key: String::new(), problem: e.to_string() }),
    }
}

/// A key of a program's own table: its value as it would be an argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramKey {
    /// The key, without its table.
    pub name: String,
    /// The line, from 1.
    pub line: usize,
    /// The values; several if it is an array. A boolean is `true` or `false`.
    pub values: Vec<String>,
    /// True for a boolean.
    pub is_boolean: bool,
}

/// As [`read`], for a file that may have a table `program` besides those of [`Config`]. Returns its keys,
/// too.
pub(super) fn read_with_program(path: &Path, program: &str) -> Result<(Config, Vec<ProgramKey>), FileError> {
    let file = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => parse_with_program(&file, &text, Some(program)),
        Err(e) => Err(FileError { file, line: 0, key: String::new(), problem: e.to_string() }),
    }
}

pub(super) fn parse(file: &str, text: &str) -> Result<Config, FileError> {
    parse_with_program(file, text, None).map(|(config, _)| config)
}

pub(super) fn parse_with_program(
    file: &str,
    text: &str,
    program: Option<&str>,
) -> Result<(Config, Vec<ProgramKey>), FileError> {
    let error = |offset: usize, key: String, problem: &str| FileError {
        file: file.into(),
        line: line_of(text, offset),
        key: printable(&key),
        problem: printable(&problem.lines().collect::<Vec<_>>().join("; ")),
    };
    let table = match DeTable::parse(text) {
        Ok(table) => table.into_inner(),
        Err(e) => return Err(error(e.span().map_or(0, |s| s.start), String::new(), e.message())),
    };
    let mut shared = DeTable::parse(text).map_err(|e| error(0, String::new(), e.message()))?;
    let mut keys = Vec::new();
    if let Some(program) = program
        && let Some(own) = shared.get_mut().remove(program)
    {
        let line = |offset| line_of(text, offset);
        keys = program_keys(own.get_ref(), own.span(), line)
            .map_err(|(offset, key, problem)| error(offset, format!("{program}{key}"), problem))?;
    }
    let config = Config::deserialize(toml::de::Deserializer::from(shared)).map_err(|e| {
        let span = e.span().unwrap_or(0..text.len());
        let key = path_at(&table, &span);
        let takes = |example: &str| {
            let text = format!("{}{example}{}", &text[..span.start], &text[span.end..]);
            key_of_problem(&text, program).as_ref() != Some(&key)
        };
        error(span.start, key.clone(), &explain_type(e.message(), takes))
    })?;
    config
        .validate()
        .map_err(|ConfigError { key, problem }| error(offset_of(&table, &key), key, &problem))?;
    Ok((config, keys))
}

/// Returns the key of the first problem of a file; empty if it is not TOML.
fn key_of_problem(text: &str, program: Option<&str>) -> Option<String> {
    let (Ok(table), Ok(mut shared)) = (DeTable::parse(text), DeTable::parse(text)) else {
        return Some(String::new());
    };
    if let Some(program) = program {
        shared.get_mut().remove(program);
    }
    match Config::deserialize(toml::de::Deserializer::from(shared)) {
        Ok(config) => config.validate().err().map(|error| error.key),
        Err(error) => Some(path_at(table.get_ref(), &error.span().unwrap_or(0..text.len()))),
    }
}

/// Messages of the standard library about addresses, and what is shown instead.
pub const ADDRESS_PROBLEMS: [(&str, &str); 4] = [
    ("invalid socket address syntax", "not an address with a port, as in 127.0.0.1:9000"),
    ("invalid IP address syntax", "not an IP address, as in 10.0.0.1"),
    ("invalid IPv4 address syntax", "not an IPv4 address, as in 10.0.0.1"),
    ("invalid IPv6 address syntax", "not an IPv6 address, as in fd00::1"),
];

/// Replaces the name of a type that a value should have by words, and an example that the key takes. Replaces
/// messages about addresses.
fn explain_type(message: &str, takes: impl Fn(&str) -> bool) -> String {
    if let Some((_, sentence)) = ADDRESS_PROBLEMS.into_iter().find(|(problem, _)| *problem == message) {
        return sentence.to_owned();
    }
    let Some((problem, name)) = message.rsplit_once(", expected ") else { return message.to_owned() };
    let (what, examples): (_, &[&str]) = match name {
        "u8" | "u16" | "u32" | "u64" | "usize" => {
            ("a whole number", &["1", "2", "100", "1000", "100000", "0"])
        }
        "f32" | "f64" => ("a number", &["0.5", "1.5", "100"]),
        "a boolean" => ("true or false", &[]),
        "a string" => ("a text in quotes", &[]),
        "a sequence" => ("a list in brackets, as in [ … ]", &[]),
        _ => return message.to_owned(),
    };
    let example = examples.iter().find(|example| takes(example));
    let example = example.map_or_else(String::new, |example| format!(", as in {example}"));
    format!("{problem}, expected {what}{example}")
}

/// Returns the keys of a program's table; otherwise the offset, the key with a dot in front, and the problem.
fn program_keys(
    table: &DeValue<'_>,
    span: Range<usize>,
    line: impl Fn(usize) -> usize,
) -> Result<Vec<ProgramKey>, (usize, String, &'static str)> {
    let DeValue::Table(table) = table else { return Err((span.start, String::new(), "must be a table")) };
    let key = |(key, value): (&Spanned<DeString<'_>>, &Spanned<DeValue<'_>>)| {
        let name: &str = key.get_ref();
        let values = match value.get_ref() {
            DeValue::Array(items) => items.iter().map(|item| scalar(item.get_ref())).collect(),
            value => scalar(value).map(|value| vec![value]),
        };
        let problem = "must be a number, a boolean, a text, or an array of them";
        let values: Vec<String> = values.ok_or((key.span().start, format!(".{name}"), problem))?;
        let is_boolean = matches!(value.get_ref(), DeValue::Boolean(_));
        Ok(ProgramKey { name: name.into(), line: line(key.span().start), values, is_boolean })
    };
    table.iter().map(key).collect()
}

/// Returns a value that is neither an array nor a table as text.
fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            i64::from_str_radix(number.as_str(), number.radix()).ok().map(|number| number.to_string())
        }
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        DeValue::Boolean(value) => Some(value.to_string()),
        DeValue::Datetime(time) => Some(time.to_string()),
        DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

/// Escapes control characters: a quoted key may contain any character, and must neither break the line nor
/// control the terminal.
fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

fn line_of(text: &str, offset: usize) -> usize {
    1 + text.as_bytes().iter().take(offset).filter(|&&b| b == b'\n').count()
}

/// Returns the dotted path of the innermost key whose key or value covers the start of `span`.
fn path_at(table: &DeTable<'_>, span: &Range<usize>) -> String {
    for (key, value) in table {
        let name: &str = key.get_ref();
        if key.span().contains(&span.start) && key.span().end >= span.end {
            return name.into();
        }
        let within = |inner: &Range<usize>| inner.start <= span.start && span.end <= inner.end;
        let inner_path = match value.get_ref() {
            DeValue::Table(inner) => {
                Some(path_at(inner, span)).filter(|p| !p.is_empty()).map(|p| format!(".{p}"))
            }
            DeValue::Array(items) => items.iter().enumerate().find_map(|(i, item)| match item.get_ref() {
                DeValue::Table(inner) => {
                    let path = path_at(inner, span);
                    let is_inside = !path.is_empty() || within(&item.span());
                    is_inside.then(|| format!("[{i}]{}{path}", if path.is_empty() { "" } else { "." }))
                }
                _ => within(&item.span()).then(|| format!("[{i}]")),
            }),
            _ => None,
        };
        if let Some(inner_path) = inner_path {
            return format!("{name}{inner_path}");
        }
        if within(&value.span()) {
            return name.into();
        }
    }
    String::new()
}

/// Returns the offset of a dotted path: of its value, or of the innermost existing table on the way.
fn offset_of(table: &DeTable<'_>, path: &str) -> usize {
    let mut table = table;
    let mut offset = 0;
    for part in path.split('.') {
        let (name, index) = match part.split_once('[') {
            Some((name, rest)) => (name, rest.trim_end_matches(']').parse::<usize>().ok()),
            None => (part, None),
        };
        let Some((key, value)) = table.iter().find(|(k, _)| k.get_ref() == name) else { return offset };
        offset = key.span().start;
        let mut value = value;
        if let (Some(index), DeValue::Array(items)) = (index, value.get_ref()) {
            let Some(item) = items.get(index) else { return offset };
            offset = item.span().start;
            value = item;
        }
        match value.get_ref() {
            DeValue::Table(inner) => table = inner,
            _ => return offset,
        }
    }
    offset
}
