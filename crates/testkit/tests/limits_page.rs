//! Checks `docs/limits.md`: every limit of the configuration is listed with its default, its counters exist,
//! and a test shows it. The tests are found by comments `// limit: NAME` and listed in a generated index.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Endings of keys that bound how much of something there may be.
const ENDINGS: &[&str] = &["_max", "_bytes", "_entries", "_per_second", "_burst"];
/// Keys with such an ending that say how large something is, not how much of it there may be.
const SIZES: &[&str] = &[
    "device.capture_snaplen_bytes",
    "network.path_mtu_floor_bytes",
    "priority.rules.payload_bytes_max",
    "priority.rules.payload.offset_bytes",
    "tcp.mtu_base_segment_bytes",
    "tcp.mtu_floor_segment_bytes",
    "tcp.mtu_probe_threshold_bytes",
];

/// Begins the comment that ties a test, or the definition of a constant, to a row of `docs/limits.md`.
const MARK: &str = concat!("// ", "limit: ");
const INDEX: &str = "crates/testkit/tests/limits/INDEX.md";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().into()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the rows of all tables of a page, each as its cells.
fn rows(page: &str) -> Vec<Vec<String>> {
    let lines = page.lines().filter(|line| line.starts_with("| "));
    lines.map(|line| line.trim_matches('|').split(" | ").map(|cell| cell.trim().into()).collect()).collect()
}

/// Returns the texts between backquotes.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

struct Limit {
    /// The name in the first cell: a configuration key, `program --option`, or a few words.
    name: String,
    default: String,
    counters: Vec<String>,
}

fn limits() -> Vec<Limit> {
    let rows = rows(&read("docs/limits.md"));
    let rows = rows.into_iter().filter(|row| row[0] != "Limit" && row[0] != "---");
    let limits: Vec<Limit> = rows
        .map(|row| {
            let [name, default, _, counters] = &row[..] else { panic!("{row:?} does not have four cells") };
            Limit {
                name: name.replace('`', ""),
                default: default.clone(),
                counters: quoted(counters).into_iter().map(String::from).collect(),
            }
        })
        .collect();
    assert!(limits.len() > 40, "only {} rows were found", limits.len());
    limits
}

/// A comment `// limit: NAME` of the sources, with the file and the line of code after it.
struct Marker {
    name: String,
    /// Path below `crates`.
    file: String,
    code: String,
}

impl Marker {
    /// Returns the name of the test that the marker stands at, or `None` at a definition.
    fn test(&self) -> Option<&str> {
        self.code.strip_prefix("fn ")?.split('(').next()
    }
}

fn markers() -> Vec<Marker> {
    let mut markers = Vec::new();
    for (file, text) in sources() {
        let mut lines = text.lines().map(str::trim);
        while let Some(line) = lines.next() {
            let Some(name) = line.strip_prefix(MARK) else { continue };
            let is_code = |line: &&str| !line.starts_with("//") && !line.starts_with("#[");
            let code = lines.clone().find(is_code).unwrap_or_default().into();
            markers.push(Marker { name: name.into(), file: file.clone(), code });
        }
    }
    markers
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

/// Every Rust file below `crates`: its path from there, and its text.
fn sources() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("crates")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                let name = path.strip_prefix(root().join("crates")).unwrap().to_str().unwrap().into();
                found.push((name, fs::read_to_string(path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn every_limit_of_the_configuration_has_a_row_with_its_default() {
    let (limits, keys) = (limits(), keys());
    for (key, meaning) in &keys {
        let is_limit = ENDINGS.iter().any(|ending| key.ends_with(ending)) && !SIZES.contains(&key.as_str());
        let row = limits.iter().find(|limit| limit.name == *key);
        let Some(row) = row else {
            assert!(!is_limit, "{key} has no row in docs/limits.md");
            continue;
        };
        let stated =
            meaning.rsplit_once("efault ").map(|(_, default)| default.trim_end_matches([' ', '|', '.']));
        assert_eq!(stated, Some(row.default.as_str()), "the default of {key}");
    }
    for key in SIZES {
        assert!(keys.iter().any(|(known, _)| known == key), "unknown key {key}");
    }
    let keys: BTreeSet<&String> = keys.iter().map(|(key, _)| key).collect();
    for name in limits.iter().map(|limit| &limit.name).filter(|name| !name.contains(' ')) {
        assert!(keys.contains(name), "unknown key {name}");
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

/// Returns the default that the options of a program state.
fn option_default(program: &str, option: &str) -> String {
    let source = read(&format!("crates/apps/src/{program}/options.rs"));
    let field = format!("    pub {}: ", option.replace('-', "_"));
    let at = source.find(&field).unwrap_or_else(|| panic!("{program} has no option --{option}"));
    let attribute = source[..at].trim_end().lines().last().unwrap();
    let default = attribute.split("default_value").nth(1).unwrap_or("");
    let default = default.trim_start_matches("_t").trim_start_matches(" = ").split(',').next().unwrap();
    default.trim_matches('"').into()
}

#[test]
fn defaults_of_other_limits_agree_with_the_code() {
    let markers = markers();
    let mut checked = 0;
    for limit in limits().iter().filter(|limit| limit.name.contains(' ')) {
        if let Some((program, option)) = limit.name.split_once(" --").filter(|_| !limit.default.contains('-'))
        {
            assert_eq!(option_default(program, option), limit.default, "{}", limit.name);
            checked += 1;
        }
        for marker in markers.iter().filter(|m| m.name == limit.name && m.code.contains("const ")) {
            assert_eq!(constant(&marker.code), amount(&limit.default), "{}: {}", limit.name, marker.code);
            checked += 1;
        }
    }
    assert!(checked > 15, "only {checked}");
}

#[test]
fn counters_in_the_table_exist() {
    let sources = sources();
    for limit in limits() {
        for counter in &limit.counters {
            let (bare, field) = (format!("        {counter},"), format!("pub {counter}: "));
            let shard = format!("    {counter},");
            let exists = |text: &String| {
                text.lines().any(|line| line == bare || line == shard || line.trim().starts_with(&field))
            };
            let exists = sources.iter().any(|(_, text)| exists(text));
            assert!(exists, "{}: unknown counter {counter}", limit.name);
        }
    }
}

#[test]
fn the_index_of_limit_tests_is_current() {
    let markers = markers();
    let limits = limits();
    for marker in &markers {
        let known = limits.iter().any(|limit| limit.name == marker.name);
        assert!(known, "{}: docs/limits.md has no limit \"{}\"", marker.file, marker.name);
    }
    let mut index = String::from(
        "# Tests of the limits\n\nGenerated from the comments `// limit: NAME` at tests and definitions by\n\
         `GINNEL_BLESS=1 cargo test -p ginnel-testkit --test limits_page`. The limits themselves: docs/limits.md.\n",
    );
    for limit in &limits {
        let of_limit = || markers.iter().filter(|marker| marker.name == limit.name);
        assert!(of_limit().any(|marker| marker.test().is_some()), "{}: no test", limit.name);
        index += &format!("\n## {}\n\n", limit.name);
        for marker in of_limit() {
            index += &match marker.test() {
                Some(test) => format!("* `{}::{test}`\n", marker.file),
                None => format!("* defined in `{}`\n", marker.file),
            };
        }
    }
    if std::env::var_os("GINNEL_BLESS").is_some() {
        fs::write(root().join(INDEX), &index).unwrap();
    }
    for (found, expected) in read(INDEX).lines().zip(index.lines()) {
        assert_eq!(found, expected, "{INDEX} (GINNEL_BLESS=1 rewrites the file)");
    }
    assert_eq!(read(INDEX).len(), index.len(), "{INDEX} (GINNEL_BLESS=1 rewrites the file)");
}
