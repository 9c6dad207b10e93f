//! Checks rules of the tree that the compiler does not know (ARCHITECTURE.md and CONTRIBUTING.md say what
//! they are for).
//!
//! The checks of language only remind: they find a few forms of bad sentences, and reading finds the others.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Lines of the longest Rust file. A file has one responsibility; most files are far shorter.
const FILE_LINES_MAX: usize = 1500;
/// Columns of comments and of prose in Markdown. rustfmt keeps code within the same width.
const COLUMNS_MAX: usize = 110;
/// Words that begin doc comments without a subject: "Returns …" or "Counts …" says what the item does.
const BAD_BEGINNINGS: &[&str] =
    &["The same", "What ", "Whether ", "Who ", "Whose ", "That ", "Those ", "So many"];
/// Words of README.md, which a stranger reads to the end.
const README_WORDS_MAX: usize = 700;
/// Rows of the glossary.
const PRIVATE_WORDS_MAX: usize = 40;
const UNSAFE_PAGE: &str = "docs/unsafe.md";
/// Modules and types that were renamed to the words of the field: `crate item old-name`.
const RENAMED: &str = include_str!("renamed.txt");

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("crates/testkit is two levels deep")
        .into()
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

/// Returns the reason that a file gives for its unsafe code: the comment after `allow(unsafe_code)`.
fn unsafe_reason(text: &str) -> Option<Result<&str, &str>> {
    let line = text.lines().find(|line| line.starts_with(concat!("#![allow(unsafe", "_code)]")))?;
    Some(line.split_once(" // ").map(|(_, reason)| reason).ok_or(line))
}

#[test]
fn the_list_of_unsafe_files_is_current() {
    let mut page = String::from(
        "# Files with unsafe code\n\nGenerated: `GINNEL_BLESS=1 cargo test -p ginnel-testkit --test tidy`. The compiler \
         denies unsafe code in\nall other files. Each block has a SAFETY comment.\n\n| File | Why |\n|---|---|\n",
    );
    let mut broken = Vec::new();
    for (path, text) in rust_files() {
        match unsafe_reason(&text) {
            Some(Ok(reason)) => page += &format!("| `{path}` | {reason} |\n"),
            Some(Err(line)) => broken.push(format!("{path}: `{line}` gives no reason after `// `")),
            None if text.contains(concat!("[allow(unsafe", "_code)")) => {
                broken.push(format!("{path}: unsafe code is allowed for a whole file, at its top"));
            }
            None => {}
        }
    }
    report("files with unsafe code say why", &broken);
    if std::env::var_os("GINNEL_BLESS").is_some() {
        fs::write(root().join(UNSAFE_PAGE), &page).unwrap();
    }
    let found = fs::read_to_string(root().join(UNSAFE_PAGE)).unwrap_or_default();
    for (found, expected) in found.lines().zip(page.lines()) {
        assert_eq!(found, expected, "{UNSAFE_PAGE} (GINNEL_BLESS=1 rewrites the file)");
    }
    assert_eq!(found.len(), page.len(), "{UNSAFE_PAGE} (GINNEL_BLESS=1 rewrites the file)");
}

#[test]
fn files_are_short_enough() {
    let lines = rust_files().into_iter().map(|(path, text)| (path, text.lines().count()));
    let long = lines.filter(|(_, lines)| *lines > FILE_LINES_MAX);
    let broken: Vec<String> = long.map(|(path, lines)| format!("{path}: {lines} lines")).collect();
    report("a file has at most 1,500 lines", &broken);
}

/// Returns the text of a line that is a comment and nothing else.
fn comment(line: &str) -> Option<&str> {
    let text = line.trim_start().strip_prefix("//")?;
    Some(text.strip_prefix(['/', '!']).unwrap_or(text).trim_start())
}

/// Pages whose paragraphs are doc comments of the sources, put into one line each.
const GENERATED_PROSE: &str = "docs/statistics.md";

/// Returns whether a line is too wide and could be broken. A link, a path or an address cannot.
fn is_too_wide(line: &str, text: &str) -> bool {
    line.chars().count() > COLUMNS_MAX && text.trim().trim_start_matches("* ").contains(' ')
}

#[test]
fn comments_and_prose_keep_to_110_columns() {
    let mut broken = Vec::new();
    for (path, text) in files().into_iter().filter(|(path, _)| path != GENERATED_PROSE) {
        let mut in_fence = false;
        for (number, line) in text.lines().enumerate() {
            let prose = match path.rsplit('.').next() {
                Some("rs") => comment(line),
                Some("md") => Some(line),
                _ => None,
            };
            let Some(prose) = prose else {
                in_fence = false;
                continue;
            };
            in_fence ^= prose.trim_start().starts_with("```");
            // Tables, code and drawings keep their lines.
            let is_indented_code = path.ends_with(".md") && line.starts_with("    ");
            let is_prose = !in_fence && !is_indented_code && !prose.starts_with(['|', '<']);
            if is_prose && is_too_wide(line, prose) {
                broken.push(format!("{path}:{}", number + 1));
            }
        }
    }
    report("comments and prose have at most 110 columns", &broken);
}

#[test]
fn doc_comments_begin_with_a_subject() {
    let mut broken = Vec::new();
    for (path, text) in rust_files() {
        let mut inside = false;
        for (number, line) in text.lines().enumerate() {
            let doc = line.trim_start().strip_prefix("///").or(line.trim_start().strip_prefix("//!"));
            let begins = doc.map(str::trim_start).filter(|_| !inside);
            if begins.is_some_and(|text| BAD_BEGINNINGS.iter().any(|bad| text.starts_with(bad))) {
                broken.push(format!("{path}:{}: {}", number + 1, line.trim()));
            }
            // A heading such as "# Errors" begins a paragraph, as an empty line does.
            inside = doc.map(str::trim_start).is_some_and(|text| !text.is_empty() && !text.starts_with('#'));
        }
    }
    report("doc comments have a subject and a verb", &broken);
}

/// Returns the name of the type that a line defines for others of its crate.
fn shared_type(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("pub")?.trim_start_matches(|c| c != ' ').trim_start();
    let kinds = ["struct ", "enum ", "trait ", "union ", "type "];
    let name = kinds.iter().find_map(|kind| rest.strip_prefix(kind))?;
    name.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

/// Checks whether a text names a type without its module: `Config`, and not `tcp::Config`.
fn names_bare(text: &str, name: &str) -> bool {
    let code = text.lines().filter(|line| comment(line).is_none());
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.flat_map(|line| line.match_indices(name).map(move |(at, _)| (line, at))).any(|(line, at)| {
        let (before, after) = (&line[..at], &line[at + name.len()..]);
        !before.ends_with(is_word) && !before.ends_with("::") && !after.starts_with(is_word)
    })
}

#[test]
fn shared_types_of_a_crate_differ_in_name() {
    let mut defined: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    let is_test = |path: &str| path.contains("/tests") || path.contains("_tests.rs");
    let sources: Vec<(String, String)> =
        rust_files().into_iter().filter(|(path, _)| path.starts_with("crates/") && !is_test(path)).collect();
    let krate = |path: &str| path.split("/src/").next().unwrap_or(path).to_string();
    for (path, text) in &sources {
        for name in text.lines().filter_map(shared_type) {
            defined.entry((krate(path), name.into())).or_default().push(path.clone());
        }
    }
    let mut broken = Vec::new();
    for ((krate_of, name), paths) in defined.iter().filter(|(_, paths)| paths.len() > 1) {
        // Two of one name are fine where every other file writes the module, too.
        let bare = |(path, text): &&(String, String)| {
            krate(path) == *krate_of && !paths.contains(path) && names_bare(text, name)
        };
        if let Some((path, _)) = sources.iter().find(bare) {
            broken.push(format!("{name}: {} ({path} names it without its module)", paths.join(", ")));
        }
    }
    report("types of a crate differ in name, or are always written with their module", &broken);
}

/// The rows of `docs/glossary.md`: word, meaning, file.
fn glossary() -> Vec<[String; 3]> {
    let page = fs::read_to_string(root().join("docs/glossary.md")).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| ")).filter(|row| !row.starts_with("Word"));
    rows.map(|row| {
        let cells: Vec<String> = row.trim_end_matches(" |").split(" | ").map(String::from).collect();
        cells.try_into().unwrap_or_else(|cells| panic!("{cells:?}: word, meaning, file"))
    })
    .collect()
}

#[test]
fn the_readme_is_short() {
    let words = fs::read_to_string(root().join("README.md")).unwrap().split_whitespace().count();
    assert!(
        (100..=README_WORDS_MAX).contains(&words),
        "README.md has {words} words, {README_WORDS_MAX} at most"
    );
}

#[test]
fn the_glossary_is_short_and_true() {
    let rows = glossary();
    let mut broken = Vec::new();
    if !(5..=PRIVATE_WORDS_MAX).contains(&rows.len()) {
        broken.push(format!("{} words, {PRIVATE_WORDS_MAX} at most", rows.len()));
    }
    for [word, meaning, file] in &rows {
        let file = file.trim_matches('`');
        let text = fs::read_to_string(root().join(file)).unwrap_or_default().to_lowercase();
        // As prose writes the word, or as code does: `offer slot`, `offer_slot`, `OfferSlot`.
        let plain = word.to_lowercase();
        let forms = [plain.clone(), plain.replace([' ', '-'], "_"), plain.replace([' ', '-'], "")];
        if !forms.iter().any(|form| text.contains(form)) {
            broken.push(format!("{word}: does not occur in {file}"));
        }
        if meaning.matches(". ").count() > 0 {
            broken.push(format!("{word}: more than one sentence"));
        }
    }
    report("docs/glossary.md has the private words", &broken);
}

#[test]
fn renamed_modules_and_types_stay_gone() {
    let sources = rust_files();
    let mut broken = Vec::new();
    let mut checked = 0;
    for row in RENAMED.lines().filter(|row| !row.starts_with('#')) {
        let [folder, item, old] = row.split(' ').collect::<Vec<_>>()[..] else { panic!("{row}") };
        let kinds: &[&str] = match item {
            "mod" => &["mod"],
            "type" => &["struct", "enum", "trait", "union", "type"],
            _ => panic!("{row}: mod or type"),
        };
        checked += 1;
        for (path, text) in sources.iter().filter(|(path, _)| path.starts_with(&format!("crates/{folder}/")))
        {
            for line in text.lines() {
                let mut words = line.trim_start().split(' ').skip_while(|word| word.starts_with("pub"));
                let kind = words.next().unwrap_or_default();
                let name = words.next().unwrap_or_default();
                let name = name.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
                if kinds.contains(&kind) && name == old {
                    broken.push(format!("{path}: {kind} {old}"));
                }
            }
        }
    }
    assert!(checked > 50, "only {checked} old names are listed");
    report("old names do not occur", &broken);
}

#[test]
fn nothing_is_left_to_be_done() {
    let marks =
        [concat!("to", "do!("), concat!("unimple", "mented!("), concat!("FIX", "ME"), concat!("dbg", "!(")];
    report("no stubs", &marked(&rust_files(), &marks));
}

#[test]
fn ignored_tests_name_the_command_that_runs_them() {
    // Put together here, so that this file has none of them.
    let (ignored, unused) = (concat!("#[", "ignore"), concat!("allow(", "dead_code"));
    let files = rust_files();
    let mut broken = Vec::new();
    for (path, text) in &files {
        // A file that several suites include may have parts that one of them does not use.
        let mut previous = "";
        for (number, line) in text.lines().enumerate() {
            if line.contains(unused) && !previous.starts_with("#[path = ") {
                broken.push(format!("{path}:{}: {}", number + 1, line.trim()));
            }
            previous = line;
        }
        let lines = text.lines().enumerate().filter(|(_, line)| line.contains(ignored));
        let silent = lines.filter(|(_, line)| !line.contains("`make suites`"));
        broken.extend(silent.map(|(number, line)| format!("{path}:{}: {}", number + 1, line.trim())));
    }
    report("ignored tests name the command that runs them, and unused code is removed", &broken);
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
    report("docs/rfc.md states where each RFC is implemented", &broken);
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
        // Also those of a target: `[target.'cfg(…)'.dev-dependencies]`.
        let direct = text.split("dev-dependencies]").next().unwrap();
        for other in others.iter().filter(|o| direct.contains(**o)) {
            broken.push(format!("crates/{name} depends on {other}"));
        }
    }
    report("cli, apps -> runtime -> stack <- devices", &broken);
}
