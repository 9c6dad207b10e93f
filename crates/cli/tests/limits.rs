//! `docs/limits.md` names every limit of the configuration, with its default, counters that exist and tests that exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Endings of keys that bound how much of something there may be.
const ENDINGS: &[&str] = &["_max", "_bytes", "_entries", "_per_second", "_burst"];
/// Keys with such an ending that say how large something is, not how much of it there may be.
const SIZES: &[&str] = &[
    "device.capture_snaplen_bytes",
    "network.path_mtu_floor_bytes",
    "tcp.mtu_base_segment_bytes",
    "tcp.mtu_floor_segment_bytes",
    "tcp.mtu_probe_threshold_bytes",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().into()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// A row of a table: its cells.
fn rows(page: &str) -> Vec<Vec<String>> {
    let lines = page.lines().filter(|line| line.starts_with("| "));
    lines.map(|line| line.trim_matches('|').split(" | ").map(|cell| cell.trim().into()).collect()).collect()
}

/// What stands between backquotes.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

struct Limit {
    /// The whole of the first cell.
    text: String,
    /// The name in it, if there is one.
    name: Option<String>,
    default: String,
    counters: Vec<String>,
    tests: Vec<String>,
}

fn limits() -> Vec<Limit> {
    let rows = rows(&read("docs/limits.md"));
    let rows = rows.into_iter().filter(|row| row[0] != "Limit" && row[0] != "---");
    let owned = |cell: &str| quoted(cell).into_iter().map(String::from).collect::<Vec<_>>();
    let limits: Vec<Limit> = rows
        .map(|row| {
            let [text, default, _, counters, tests] = &row[..] else { panic!("{row:?} has not five cells") };
            Limit {
                text: text.clone(),
                name: owned(text).into_iter().next(),
                default: default.clone(),
                counters: owned(counters),
                tests: owned(tests),
            }
        })
        .collect();
    assert!(limits.len() > 40, "only {} rows were found", limits.len());
    limits
}

/// Keys of `docs/configuration.md`, with table and meaning.
fn keys() -> Vec<(String, String)> {
    let mut keys = Vec::new();
    let mut table = String::new();
    for line in read("docs/configuration.md").lines() {
        if let Some(heading) = line.strip_prefix("## `") {
            table = heading.trim_matches(['`', '[', ']']).into();
        } else if let Some(row) = line.strip_prefix("| `") {
            let (key, rest) = row.split_once('`').unwrap();
            keys.push((format!("{table}.{key}"), rest.into()));
        }
    }
    assert!(keys.len() > 90, "only {} keys were found", keys.len());
    keys
}

/// Text of all Rust files of the crates.
fn sources() -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("crates")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                found.push(fs::read_to_string(path).unwrap());
            }
        }
    }
    found
}

#[test]
fn every_limit_of_the_configuration_has_a_row_with_its_default() {
    let (limits, keys) = (limits(), keys());
    for (key, meaning) in &keys {
        let is_limit = ENDINGS.iter().any(|ending| key.ends_with(ending)) && !SIZES.contains(&key.as_str());
        let row = limits.iter().find(|limit| limit.name.as_ref() == Some(key));
        let Some(row) = row else {
            assert!(!is_limit, "{key} has no row in docs/limits.md");
            continue;
        };
        let stated =
            meaning.rsplit_once("efault ").map(|(_, default)| default.trim_end_matches([' ', '|', '.']));
        assert_eq!(stated, Some(row.default.as_str()), "the default of {key}");
    }
    for key in SIZES {
        assert!(keys.iter().any(|(known, _)| known == key), "there is no key {key}");
    }
    let names: Vec<&String> = limits.iter().filter_map(|limit| limit.name.as_ref()).collect();
    let keys: BTreeSet<&String> = keys.iter().map(|(key, _)| key).collect();
    for name in names.iter().filter(|name| !name.contains(['/', ' '])) {
        assert!(keys.contains(name), "there is no key {name}");
    }
}

/// `4,096`, `64 KiB`, `1 GiB`.
fn amount(text: &str) -> Option<u64> {
    let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
    let shift = match unit {
        "" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    Some(number.replace(',', "").parse::<u64>().ok()? << shift)
}

/// The value of a line like `const NAME: usize = 64 << 10;`.
fn constant(line: &str) -> Option<u64> {
    let value = line.split_once(" = ")?.1.trim_end_matches(';').replace('_', "");
    match value.split_once(" << ") {
        Some((number, shift)) => Some(number.parse::<u64>().ok()? << shift.parse::<u32>().ok()?),
        None => value.parse().ok(),
    }
}

#[test]
fn every_other_limit_is_where_the_table_says() {
    let mut checked = 0;
    for limit in limits() {
        let Some(name) = limit.name else { continue };
        if let Some((file, item)) = name.split_once("::") {
            let source = read(&format!("crates/{file}"));
            let has_word =
                |line: &&str| line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == item);
            let declares = |line: &&str| line.contains("pub ") || line.contains("const ");
            let line = source.lines().filter(declares).find(has_word);
            let line = line.unwrap_or_else(|| panic!("{name}: nothing of this name is declared"));
            if line.contains("const ") {
                assert_eq!(constant(line), amount(&limit.default), "the default of {name}: {line}");
            }
            checked += 1;
        } else if let Some((program, option)) = name.split_once(" --") {
            let source = read(&format!("crates/apps/src/{program}/options.rs"));
            let field = format!("    pub {}: ", option.replace('-', "_"));
            let at = source.find(&field).unwrap_or_else(|| panic!("{name}: no such option"));
            let attribute = source[..at].trim_end().lines().last().unwrap();
            let default = attribute.split("default_value").nth(1).unwrap_or("");
            let default =
                default.trim_start_matches("_t").trim_start_matches(" = ").split(',').next().unwrap();
            assert_eq!(default.trim_matches('"'), limit.default, "{name}: {attribute}");
            checked += 1;
        }
    }
    assert!(checked > 15, "only {checked}");
}

#[test]
fn every_counter_and_every_test_that_is_named_exists() {
    let sources = sources();
    let mut tests = 0;
    for limit in limits() {
        for counter in &limit.counters {
            let (bare, field) = (format!("        {counter},"), format!("pub {counter}: "));
            let shard = format!("    {counter},");
            let exists = |text: &String| {
                text.lines().any(|line| line == bare || line == shard || line.trim().starts_with(&field))
            };
            assert!(sources.iter().any(exists), "{}: there is no counter {counter}", limit.text);
        }
        assert!(!limit.tests.is_empty(), "{}: no test", limit.text);
        for test in &limit.tests {
            let (file, name) = test.split_once("::").unwrap_or_else(|| panic!("{test} has no file"));
            let source = read(&format!("crates/{file}"));
            let at = source.find(&format!("fn {name}(")).unwrap_or_else(|| panic!("{test} does not exist"));
            let above = source[..at].trim_end().lines().last().unwrap_or("").trim();
            assert_eq!(above, "#[test]", "{test} is no test");
            tests += 1;
        }
    }
    assert!(tests > 50, "only {tests} tests were found");
}
