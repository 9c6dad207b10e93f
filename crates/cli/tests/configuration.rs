//! `docs/configuration.md` is generated from the configuration structs, so it lists every key with its type,
//! default and meaning. After a change: `GINNEL_BLESS=1 cargo test -p ginnel-cli --test configuration`.

use ginnel::Config;
use ginnel::config::{
    ChannelConfig, DeviceConfig, DeviceKind, LinkConfig, NetworkConfig, PriorityConfig, RunConfig,
    ShardConfig, ShardsConfig, TcpConfig,
};
use std::fmt::{Debug, Write};
use std::path::{Path, PathBuf};

/// A table of the file: its name, its struct, and the file of the struct.
const TABLES: &[(&str, &str, &str)] = &[
    ("[shard]", "ShardConfig", "crates/runtime/src/config.rs"),
    ("[shards]", "ShardsConfig", "crates/runtime/src/config/shards.rs"),
    ("[run]", "RunConfig", "crates/runtime/src/config/run.rs"),
    ("[channel]", "ChannelConfig", "crates/runtime/src/channel/mod.rs"),
    ("[[device]]", "DeviceConfig", "crates/runtime/src/config.rs"),
    ("[[link]]", "LinkConfig", "crates/runtime/src/config.rs"),
    ("[[link.neighbour]]", "NeighbourConfig", "crates/runtime/src/config.rs"),
    ("[[route]]", "RouteConfig", "crates/runtime/src/config.rs"),
    ("[priority]", "PriorityConfig", "crates/runtime/src/config/priority.rs"),
    ("[[priority.rules]]", "PriorityRule", "crates/runtime/src/config/priority.rs"),
    ("[priority.rules.payload]", "PayloadRule", "crates/runtime/src/config/priority.rs"),
    ("[steering]", "SteeringConfig", "crates/runtime/src/config/steering.rs"),
    ("[[steering.rules]]", "SteeringRule", "crates/runtime/src/config/steering.rs"),
    ("[network]", "NetworkConfig", "crates/stack/src/ip/config.rs"),
    ("[tcp]", "TcpConfig", "crates/stack/src/tcp/config.rs"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().into()
}

struct Key {
    name: String,
    type_name: String,
    text: String,
}

/// Returns the public fields of a struct with their documentation, from the source.
fn parse_keys(file: &str, name: &str) -> Vec<Key> {
    let source = std::fs::read_to_string(root().join(file)).unwrap();
    let start = source.find(&format!("pub struct {name} {{")).unwrap_or_else(|| panic!("{name} in {file}"));
    let body = &source[start..][..source[start..].find("\n}").unwrap()];
    let (mut keys, mut text, mut renamed) = (Vec::new(), String::new(), None);
    for line in body.lines().skip(1).map(str::trim) {
        if let Some(doc) = line.strip_prefix("///") {
            let _ = write!(text, "{}{}", if text.is_empty() { "" } else { " " }, doc.trim());
        } else if let Some(rest) = line.strip_prefix("#[serde(") {
            renamed = rest.split("rename = \"").nth(1).and_then(|r| r.split('"').next()).map(String::from);
        } else if let Some(field) = line.strip_prefix("pub ") {
            let (field, type_name) = field.trim_end_matches(',').split_once(": ").unwrap();
            let name = renamed.take().unwrap_or_else(|| field.into());
            keys.push(Key { name, type_name: type_name.into(), text: std::mem::take(&mut text) });
        }
    }
    assert!(!keys.is_empty(), "{name} has no keys");
    keys
}

fn type_text(type_name: &str) -> &'static str {
    let inner = type_name.strip_prefix("Option<").and_then(|t| t.strip_suffix('>')).unwrap_or(type_name);
    match inner {
        "u8" | "u16" | "u32" | "u64" | "usize" => "integer",
        "bool" => "boolean",
        "Ports" => "integer, string or array",
        t if t.starts_with("Vec<") => "array",
        _ => "string",
    }
}

fn render_document() -> String {
    let mut out = String::from(
        "# Configuration\n\n\
         One TOML file, given with `--config FILE`. Every key has a default unless its description says\n\
         otherwise. An unknown key, a wrong type and a value out of range are errors that name file, line and key.\n\
         Units are part of the key names.\n\n\
         This page is generated from the structs (`crates/cli/tests/configuration.rs`).\n\n\
         ```toml\n",
    );
    out.push_str(EXAMPLE.trim_start());
    out.push_str("```\n");
    out.push_str("\n## Keys before all tables\n\n| Key | Type | Meaning |\n|---|---|---|\n");
    for key in parse_keys("crates/runtime/src/config.rs", "Config") {
        // The other fields are tables.
        if !key.type_name.contains("Config") {
            let _ = writeln!(out, "| `{}` | {} | {} |", key.name, type_text(&key.type_name), key.text);
        }
    }
    for (table, name, file) in TABLES {
        let _ = write!(out, "\n## `{table}`\n\n| Key | Type | Meaning |\n|---|---|---|\n");
        for key in parse_keys(file, name) {
            if ["neighbour", "rules", "payload"].contains(&&*key.name) {
                continue; // a table of its own
            }
            let text = key.text.replace('|', "\\|");
            let _ = writeln!(out, "| `{}` | {} | {text} |", key.name, type_text(&key.type_name));
        }
    }
    out
}

const EXAMPLE: &str = r#"
[shard]
cpu = 1

[tcp]
connections_max = 10_000_000

[[device]]
name = "tap0"
kind = "tap"
faults = "delay=20ms loss=1%"

[[link]]
name = "lan"
device = "tap0"
addresses = ["10.1.0.2/24", "fd00::2/64"]

[[route]]
destination = "0.0.0.0/0"
gateway = "10.1.0.1"
link = "lan"
"#;

/// Parses a number as the documentation writes it: `1,024`, `2^30`, `2^32-1`.
fn number(text: &str) -> Option<i128> {
    let text = text.trim_end_matches(['.', ';', ':', ')']).trim_end_matches(',').replace(',', "");
    let Some(power) = text.strip_prefix("2^") else { return text.parse().ok() };
    match power.strip_suffix("-1") {
        Some(power) => Some((1 << power.parse::<u32>().ok()?) - 1),
        None => Some(1 << power.parse::<u32>().ok()?),
    }
}

/// Returns the range that a doc comment states: `1 … 64` or `1 to 64`.
fn stated_range(text: &str) -> Option<(i128, i128)> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let range = |w: &[&str]| matches!(w[1], "…" | "to").then(|| Some((number(w[0])?, number(w[2])?)))?;
    words.windows(3).find_map(range)
}

/// Returns a file in which a key has a value, with the other keys that it needs to be valid, and the name of
/// the key in errors.
fn file_with(table: &str, key: &str, value: i128) -> (String, String) {
    let device = "[[device]]\nname = \"d\"\nkind = \"memory\"\n";
    let link = "[[link]]\nname = \"l\"\ndevice = \"d\"\n";
    // Two keys must not contradict each other.
    let beside = match key {
        "mtu_floor_segment_bytes" => "mtu_base_segment_bytes = 9000\n",
        "local_port_first" => "local_port_last = 65535\n",
        "local_port_last" => "local_port_first = 1\n",
        "udp_port_first" => "udp_port_last = 65535\n",
        "udp_port_last" => "udp_port_first = 1\n",
        "application_cpu" => "placement = \"split\"\n",
        "capture_snaplen_bytes" | "capture_files" => "capture = \"x\"\n",
        "capture_file_bytes" => "capture = \"x\"\ncapture_files = 2\n",
        _ => "",
    };
    let line = format!("{key} = {value}\n");
    let name = |table: &str| format!("{table}.{key}");
    match table {
        "[[device]]" => (format!("{device}{beside}{line}"), name("device[0]")),
        "[[link]]" => (format!("{device}{link}{line}"), name("link[0]")),
        "[[route]]" => {
            let route = "[[route]]\ndestination = \"0.0.0.0/0\"\nlink = \"l\"\n";
            (format!("{device}{link}{route}{line}"), name("route[0]"))
        }
        "[[priority.rules]]" => {
            let condition = "protocol = \"udp\"\n";
            let required = if key == "priority" { "" } else { "priority = 1\n" };
            (format!("{table}\n{condition}{required}{line}"), name("priority.rules[0]"))
        }
        "[priority.rules.payload]" => {
            let rule = "[[priority.rules]]\npriority = 1\n";
            (format!("{rule}{table}\nvalue = \"00\"\n{line}"), name("priority.rules[0].payload"))
        }
        table => (format!("{table}\n{beside}{line}"), name(table.trim_matches(['[', ']']))),
    }
}

#[test]
fn documented_ranges_of_numbers_are_exact() {
    let mut checked = 0;
    for (table, name, file) in TABLES {
        for key in parse_keys(file, name).iter().filter(|key| type_text(&key.type_name) == "integer") {
            let Some((least, most)) = stated_range(&key.text) else {
                panic!("{name}.{} states no range", key.name)
            };
            let parse = |value: i128| {
                let (text, key) = file_with(table, &key.name, value);
                (Config::from_toml("x.toml", &text), key)
            };
            for within in [least, most] {
                let (result, key) = parse(within);
                assert!(result.is_ok(), "{key} = {within}: {result:?}");
            }
            for outside in [least - 1, most + 1] {
                let (result, key) = parse(outside);
                let Err(error) = result else { panic!("{key} = {outside} was accepted") };
                assert_eq!(error.key, key, "{outside}: {error}");
                assert!(error.line > 0 && !error.problem.is_empty(), "{error}");
            }
            checked += 1;
        }
    }
    assert!(checked > 70, "only {checked} ranges were found");
}

#[test]
fn every_key_is_documented() {
    let path = root().join("docs/configuration.md");
    let expected = render_document();
    if std::env::var_os("GINNEL_BLESS").is_some() {
        std::fs::write(&path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    for (i, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "docs/configuration.md:{} (GINNEL_BLESS=1 rewrites it)", i + 1);
    }
    assert_eq!(found, expected, "docs/configuration.md (GINNEL_BLESS=1 rewrites it)");
}

#[test]
fn the_example_is_valid() {
    Config::from_toml("docs/configuration.md", EXAMPLE).unwrap();
}

/// Returns `name: value` of each line of the pretty debug text.
fn field_values(config: &impl Debug) -> Vec<(String, String)> {
    let text = format!("{config:#?}");
    let fields = text.lines().filter_map(|l| l.strip_prefix("    ")?.trim_end_matches(',').split_once(": "));
    fields.map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

/// Returns the default that a doc comment states: "Default 1,000." "Default 6 MiB." "Default `cubic`." "1 …
/// 9, default 5."
fn stated_default(text: &str) -> Option<String> {
    let (_, stated) = text.rsplit_once("efault ")?;
    let stated = stated.split(". ").next()?.trim_end_matches('.').trim_matches('`').replace(',', "");
    let scaled = |suffix: &str, unit: u64| {
        let number: u64 = stated.strip_suffix(suffix)?.parse().ok()?;
        Some((number * unit).to_string())
    };
    Some(
        scaled(" GiB", 1 << 30)
            .or_else(|| scaled(" MiB", 1 << 20))
            .or_else(|| scaled(" KiB", 1 << 10))
            .unwrap_or(stated),
    )
}

#[test]
fn documented_defaults_are_correct() {
    let device = DeviceConfig::new("x", DeviceKind::Memory);
    let link = LinkConfig::new("x", "y", Vec::new());
    let actual = [
        ("ShardConfig", field_values(&ShardConfig::default())),
        ("ShardsConfig", field_values(&ShardsConfig::default())),
        ("RunConfig", field_values(&RunConfig::default())),
        ("ChannelConfig", field_values(&ChannelConfig::default())),
        ("DeviceConfig", field_values(&device)),
        ("LinkConfig", field_values(&link)),
        ("PriorityConfig", field_values(&PriorityConfig::default())),
        ("NetworkConfig", field_values(&NetworkConfig::default())),
        ("TcpConfig", field_values(&TcpConfig::default())),
    ];
    let mut checked = 0;
    for (name, actual) in actual {
        let (_, _, file) = TABLES.iter().find(|(_, n, _)| *n == name).unwrap();
        for key in parse_keys(file, name) {
            let Some(stated) = stated_default(&key.text) else { continue };
            let Some((_, value)) = actual.iter().find(|(n, _)| *n == key.name) else { continue };
            assert_eq!(stated, value.to_lowercase(), "{name}.{}", key.name);
            checked += 1;
        }
    }
    assert!(checked > 30, "only {checked} defaults were found");
}
