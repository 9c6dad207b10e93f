//! The generated parts of `docs/posix.md`: the calls that cases make, and the options.
//!
//! Each case compares its calls on the stack with its line of `calls.txt`, so that a case that runs alone is
//! checked, too. The table of the document and `INDEX.md`, which counts the cases of each call, follow from
//! all lines. With `GINNEL_BLESS=1`, cases write their lines and both files instead.

use crate::record::Calls;
use crate::{Cases, MODULES, options};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs::File;

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/posix.md");
const LIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/parity/calls.txt");
const INDEX: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/parity/INDEX.md");
const INDEX_HEAD: &str = "# Parity cases of each call

Generated: `GINNEL_BLESS=1 cargo test -p ginnel-posix-ops --test parity`. The column \"Cases\" says how many
cases make the call on the stack. `calls.txt` lists the calls of each case.

| Call | On | Cases |
|---|---|---|
";
const HEAD: &str = "# Calls of each case on the stack, generated: GINNEL_BLESS=1 cargo test -p ginnel-posix-ops --test parity\n";
/// Suffix of cases over loopback.
const OVER_LOOPBACK: &str = " over loopback";

/// A generated part of the document.
struct Part {
    begin: &'static str,
    end: &'static str,
}

const CALLS: Part = Part {
    begin: "<!-- calls, by the cases: GINNEL_BLESS=1 cargo test -p ginnel-posix-ops --test parity -->\n",
    end: "<!-- end of calls -->\n",
};
const OPTIONS: Part = Part {
    begin: "<!-- options, by the table: GINNEL_BLESS=1 cargo test -p ginnel-posix-ops --test parity document -->\n",
    end: "<!-- end of options -->\n",
};

fn is_blessing() -> bool {
    std::env::var_os("GINNEL_BLESS").is_some()
}

/// Runs `write` exclusively: tests run concurrently, in threads or processes.
fn with_lock(write: impl FnOnce()) {
    let lock = File::open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).unwrap();
    lock.lock().unwrap();
    write();
    lock.unlock().unwrap();
}

/// Returns the document, and the document with `text` in one part.
fn replace_part(part: &Part, text: &str) -> (String, String) {
    let found = std::fs::read_to_string(DOCUMENT).unwrap();
    let (before, rest) =
        found.split_once(part.begin).expect("docs/posix.md contains the begin marker of the part");
    let (_, after) = rest.split_once(part.end).expect("docs/posix.md contains the end marker of the part");
    let expected = [before, part.begin, text, part.end, after].concat();
    (found, expected)
}

fn write(part: &Part, text: &str) {
    std::fs::write(DOCUMENT, replace_part(part, text).1).unwrap();
}

fn assert_part(part: &Part, text: &str) {
    let (found, expected) = replace_part(part, text);
    for (number, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "docs/posix.md:{} (GINNEL_BLESS=1 rewrites it)", number + 1);
    }
    assert_eq!(found, expected, "docs/posix.md (GINNEL_BLESS=1 rewrites it)");
}

/// Returns the lines of the list, by the names of cases.
fn list() -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(LIST).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let parts = lines.map(|line| line.split_once(": ").expect("`CASE: CALLS`"));
    parts.map(|(case, calls)| (case.to_owned(), calls.to_owned())).collect()
}

/// Writes the list, and the table and the index that follow from it.
fn write_list(list: &BTreeMap<String, String>) {
    let mut text = HEAD.to_owned();
    for (case, calls) in list {
        writeln!(text, "{case}: {calls}").unwrap();
    }
    std::fs::write(LIST, text).unwrap();
    write(&CALLS, &table(list));
    std::fs::write(INDEX, index(list)).unwrap();
}

/// Formats the calls of a case, for example `recv TCP MSG_PEEK MSG_DONTWAIT; send TCP`.
fn line(calls: &Calls) -> String {
    let words = calls.iter().map(|((call, on), flags)| {
        let words = [call, on].into_iter().chain(flags).map(String::as_str);
        words.collect::<Vec<_>>().join(" ")
    });
    words.collect::<Vec<_>>().join("; ")
}

/// Compares the calls of a completed case with its line, or writes the line.
pub fn compare(module: &str, case: &str, over_loopback: bool, calls: &Calls) {
    let (case, line) = (name(module, case, over_loopback), line(calls));
    if is_blessing() {
        return with_lock(|| {
            let mut list = list();
            list.insert(case, line);
            write_list(&list);
        });
    }
    let found = list().remove(&case).unwrap_or_default();
    assert_eq!(found, line, "{case}: calls.txt left, this run right (GINNEL_BLESS=1 rewrites it)");
}

/// Returns the name of a case in the list.
fn name(module: &str, case: &str, over_loopback: bool) -> String {
    let module = module.split("::").nth(1).expect("the path of a case contains its module");
    format!("{module}::{case}{}", if over_loopback { OVER_LOOPBACK } else { "" })
}

/// Returns the names of all cases.
fn names() -> BTreeSet<String> {
    let of = |cases: &Cases| {
        let module = cases.module;
        let between = cases.between_hosts.iter().map(move |case| name(module, case, false));
        between.chain(cases.over_loopback.iter().map(move |case| name(module, case, true)))
    };
    MODULES.iter().flat_map(of).collect()
}

/// The flags and the cases of each call on each kind of object.
type Rows<'a> = BTreeMap<(&'a str, &'a str), [BTreeSet<&'a str>; 2]>;

/// Returns the calls of the list with their objects, flags and cases. A case that runs both ways counts once.
fn rows(list: &BTreeMap<String, String>) -> Rows<'_> {
    let mut rows = Rows::new();
    for (case, calls) in list {
        let case = case.strip_suffix(OVER_LOOPBACK).unwrap_or(case);
        for call in calls.split("; ") {
            let mut words = call.split(' ');
            let (call, on) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            let [flags, cases] = rows.entry((call, on)).or_default();
            flags.extend(words);
            cases.insert(case);
        }
    }
    rows
}

/// Returns the table of calls, with their objects and flags.
fn table(list: &BTreeMap<String, String>) -> String {
    let mut text = String::from("| Call | On | Flags and kinds |\n|---|---|---|\n");
    for ((call, on), [flags, _]) in rows(list) {
        let flags: Vec<String> = flags.iter().map(|flag| format!("`{flag}`")).collect();
        let flags = if flags.is_empty() { "—".to_owned() } else { flags.join(", ") };
        let on = on.replace('→', " → ");
        writeln!(text, "| `{call}` | {on} | {flags} |").unwrap();
    }
    text
}

/// Returns the index: how many cases make each call.
fn index(list: &BTreeMap<String, String>) -> String {
    let mut text = INDEX_HEAD.to_owned();
    for ((call, on), [_, cases]) in rows(list) {
        writeln!(text, "| `{call}` | {} | {} |", on.replace('→', " → "), cases.len()).unwrap();
    }
    text
}

#[test]
fn document_lists_the_calls() {
    if is_blessing() {
        return with_lock(|| {
            let (mut list, names) = (list(), names());
            list.retain(|case, _| names.contains(case));
            write_list(&list);
        });
    }
    let list = list();
    let (listed, names) = (list.keys().cloned().collect::<BTreeSet<_>>(), names());
    let differ: Vec<&String> = listed.symmetric_difference(&names).collect();
    assert!(
        differ.is_empty(),
        "cases only in calls.txt, or missing there (GINNEL_BLESS=1 rewrites it): {differ:?}"
    );
    assert_part(&CALLS, &table(&list));
    let found = std::fs::read_to_string(INDEX).unwrap();
    assert_eq!(found, index(&list), "tests/parity/INDEX.md (GINNEL_BLESS=1 rewrites it)");
}

#[test]
fn document_lists_the_options() {
    let text = options::document();
    if is_blessing() {
        return with_lock(|| write(&OPTIONS, &text));
    }
    assert_part(&OPTIONS, &text);
}
