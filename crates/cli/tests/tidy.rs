//! Rules of the tree that the compiler does not know. What they are for stands in ARCHITECTURE.md.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Longest Rust file without its tests, in lines.
const FILE_LINES_MAX: usize = 900;

/// Files that may be longer, each with the reason. Empty is the aim.
const LONG_FILES: &[(&str, &str)] = &[];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("crates/cli lies two levels deep").into()
}

/// Every text file of the tree with its path from the root, build products and fuzz corpora left out.
fn files() -> Vec<(String, String)> {
    let root = root();
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if !["target", ".git", "corpus", "artifacts"].contains(&name.as_str()) {
                    folders.push(path);
                }
            } else if name == ".git" {
                // A worktree's pointer to its repository.
            } else if let Ok(text) = fs::read_to_string(&path) {
                found.push((path.strip_prefix(&root).unwrap().to_string_lossy().into_owned(), text));
            }
        }
    }
    found.sort();
    assert!(found.len() > 50, "the tree was not found");
    found
}

fn rust_files() -> Vec<(String, String)> {
    let mut files = files();
    files.retain(|(path, _)| path.ends_with(".rs"));
    files
}

fn report(rule: &str, broken: &[String]) {
    assert!(broken.is_empty(), "{rule}:\n  {}", broken.join("\n  "));
}

/// Lines of `files` that contain one of `marks`.
fn marked(files: &[(String, String)], marks: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (path, text) in files {
        for (number, line) in text.lines().enumerate() {
            if let Some(mark) = marks.iter().find(|m| line.contains(**m)) {
                found.push(format!("{path}:{}: {mark}", number + 1));
            }
        }
    }
    found
}

/// The files listed in ARCHITECTURE.md under "Where unsafe may stand".
fn files_with_permitted_unsafe() -> Vec<String> {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let section = text.split("## Where unsafe may stand").nth(1).expect("the section exists");
    let section = section.split("\n## ").next().unwrap();
    section.lines().filter_map(|l| Some(l.strip_prefix("| `")?.split('`').next()?.to_string())).collect()
}

#[test]
fn unsafe_stands_only_in_files_that_the_architecture_names() {
    let permitted = files_with_permitted_unsafe();
    let mut broken = Vec::new();
    for (path, text) in rust_files() {
        let allows = text.contains(concat!("allow(unsafe", "_code)"));
        let named = permitted.contains(&path);
        if allows && !named {
            broken.push(format!("{path} allows unsafe code and is not listed"));
        } else if named && !allows {
            broken.push(format!("{path} is listed and needs no unsafe code"));
        }
    }
    for path in permitted.iter().filter(|p| !root().join(p).exists()) {
        broken.push(format!("{path} is listed and does not exist"));
    }
    report("unsafe code is confined to named files", &broken);
}

#[test]
fn files_are_short_enough_to_find_ones_way() {
    let mut broken = Vec::new();
    for (path, text) in rust_files() {
        let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or(&text);
        let lines = code.lines().count();
        let excused = LONG_FILES.iter().any(|(p, _)| *p == path);
        if lines > FILE_LINES_MAX && !excused && !path.contains("/tests") {
            broken.push(format!("{path}: {lines} lines"));
        }
    }
    report("a file has at most 900 lines without its tests", &broken);
}

#[test]
fn nothing_is_left_to_be_done() {
    let marks =
        [concat!("to", "do!("), concat!("unimple", "mented!("), concat!("FIX", "ME"), concat!("dbg", "!(")];
    report("no stubs", &marked(&rust_files(), &marks));
}

#[test]
fn tests_that_others_run_without_say_who_runs_them() {
    // Put together here, so that this file has none of them.
    let (ignored, unused) = (concat!("#[", "ignore"), concat!("allow(", "dead_code"));
    let files = rust_files();
    let mut broken = marked(&files, &[unused]);
    for (path, text) in &files {
        let lines = text.lines().enumerate().filter(|(_, line)| line.contains(ignored));
        let silent = lines.filter(|(_, line)| !line.contains("part of `make suites`"));
        broken.extend(silent.map(|(number, line)| format!("{path}:{}: {}", number + 1, line.trim())));
    }
    report("tests that are ignored name the command that runs them, and code that nobody uses goes", &broken);
}

#[test]
fn no_path_of_one_machine_is_in_the_tree() {
    let marks = [concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/wo", "rk/"), concat!("/Us", "ers/")];
    report("the tree works on any machine", &marked(&files(), &marks));
}

#[test]
fn the_engine_reads_no_clock_and_makes_no_system_call() {
    let marks =
        ["std::time", "SystemTime", "std::thread", "std::net::", "std::fs", "std::env", "rustix", "libc::"];
    let mut files = rust_files();
    files.retain(|(path, _)| path.starts_with("crates/stack/src/") && !path.contains("tests"));
    for (_, text) in &mut files {
        let code = text.split("\n#[cfg(test)]").next().unwrap_or_default().to_string();
        *text = code;
    }
    report("crate ginnel-stack does no I/O", &marked(&files, &marks));
}

/// The numbers of RFCs that a text cites as `RFC 1234`.
fn rfcs_cited(text: &str) -> BTreeSet<u32> {
    let after = text.split("RFC ").skip(1);
    after.filter_map(|t| t.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()).collect()
}

#[test]
fn the_page_of_rfcs_agrees_with_the_citations_in_the_engine() {
    let page = fs::read_to_string(root().join("docs/rfc.md")).unwrap();
    let sources: BTreeMap<String, String> =
        rust_files().into_iter().filter(|(path, _)| path.starts_with("crates/stack/src/")).collect();
    let mut broken = Vec::new();
    let mut listed = BTreeSet::new();
    for row in page.lines() {
        let Some((number, rest)) = row.strip_prefix("| ").and_then(|r| r.split_once(" | ")) else { continue };
        let Ok(number) = number.parse::<u32>() else { continue };
        listed.insert(number);
        let files = rest.split(" | ").nth(1).unwrap_or_default();
        for file in files.split('`').filter(|f| f.ends_with(".rs")) {
            match sources.get(&format!("crates/stack/src/{file}")) {
                None => broken.push(format!("RFC {number}: {file} does not exist")),
                Some(text) if !rfcs_cited(text).contains(&number) => {
                    broken.push(format!("RFC {number}: {file} does not cite it"));
                }
                Some(_) => {}
            }
        }
    }
    for (path, text) in sources.iter().filter(|(path, _)| !path.contains("test")) {
        for number in rfcs_cited(text).difference(&listed) {
            broken.push(format!("RFC {number}: cited in {path} and not on the page"));
        }
    }
    report("docs/rfc.md says where each RFC is obeyed", &broken);
}

#[test]
fn files_that_the_documents_name_exist() {
    let mut broken = Vec::new();
    for (path, text) in files().into_iter().filter(|(path, _)| path.ends_with(".md")) {
        let words = text.split(|c: char| c.is_whitespace() || "`()[]|,;".contains(c));
        let named = words.map(|w| w.trim_end_matches(['.', ':']).split('#').next().unwrap_or(w));
        let ours = named.filter(|w| {
            ["crates/", "docs/", "scripts/", "tests/", "bench/"].iter().any(|p| w.starts_with(p))
        });
        for name in ours.filter(|w| !w.contains(['{', '*', '<'])) {
            if !root().join(name).exists() {
                broken.push(format!("{path}: {name}"));
            }
        }
    }
    report("documents name files that exist", &broken);
}

#[test]
fn dependencies_point_one_way() {
    let forbidden = [
        ("stack", &["ginnel-devices", "ginnel.workspace", "ginnel-apps", "ginnel-cli"][..]),
        ("devices", &["ginnel.workspace", "ginnel-apps", "ginnel-cli", "ginnel-testkit"]),
        ("runtime", &["ginnel-apps", "ginnel-cli", "ginnel-testkit"]),
        ("apps", &["ginnel-cli", "ginnel-testkit"]),
    ];
    let mut broken = Vec::new();
    for (name, others) in forbidden {
        let path = root().join("crates").join(name).join("Cargo.toml");
        let text = fs::read_to_string(path).unwrap();
        let direct = text.split("[dev-dependencies]").next().unwrap();
        for other in others.iter().filter(|o| direct.contains(**o)) {
            broken.push(format!("crates/{name} depends on {other}"));
        }
    }
    report("cli, apps -> runtime -> stack <- devices", &broken);
}
