//! The messages that belong to a version of the protocol.

use super::PROTOCOL_VERSION;
use std::path::{Path, PathBuf};

/// Contains the version, and a hash of the messages and of what is in shared memory.
const VERSION_AND_HASH: (u32, u64) = (23, 0x4b1e_cae8_63c2_ec47);

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

/// Returns the lists of fields and variants that the file gives to a macro of [`super::codec`], without
/// white space.
fn codec_lists(text: &str) -> Vec<String> {
    let lists = [concat!("codec_", "struct!("), concat!("codec_", "enum!(")]
        .iter()
        .flat_map(|name| text.split(*name).skip(1));
    lists.map(|rest| rest.split(");").next().unwrap().split_whitespace().collect()).collect()
}

/// Returns what follows each `start` in the file up to the end of the item, without comments and white space.
fn items_after(text: &str, start: &str) -> Vec<String> {
    let code = |item: &str| item.lines().filter(|line| !line.trim().starts_with("//")).collect();
    let items = text.split(start).skip(1).map(|rest| rest.split("\n}").next().unwrap());
    items.map(code).map(|code: String| code.split_whitespace().collect()).collect()
}

/// Returns the numbers of the options that clients store in shared memory.
fn option_numbers(file: &Path, text: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim).filter(|line| line.starts_with("TcpOption::"));
    if file.ends_with("pending_options.rs") { lines.map(String::from).collect() } else { Vec::new() }
}

/// FNV-1a.
fn hash(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn changed_messages_have_a_new_version() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    rust_files(&source, &mut files);
    rust_files(&source.join("../../posix/ops/src"), &mut files);
    let mut parts = Vec::new();
    for file in &files {
        let text = std::fs::read_to_string(file).unwrap();
        parts.extend(codec_lists(&text));
        // The implementations of `super::codec::Codec` that the file writes out.
        parts.extend(items_after(&text, concat!(" Codec ", "for ")));
        // The structures of shared memory.
        parts.extend(items_after(&text, concat!("#[repr", "(C")));
        parts.extend(option_numbers(file, &text));
    }
    parts.sort();
    assert!(parts.len() > 50, "only {} parts were found", parts.len());
    let hash = hash(parts.iter().flat_map(|part| part.bytes()));
    assert_eq!(
        (PROTOCOL_VERSION, hash),
        VERSION_AND_HASH,
        "messages or structures in shared memory have changed: raise PROTOCOL_VERSION, unless the version is \
         newer than the last build that anybody uses, and write the hash here"
    );
}
