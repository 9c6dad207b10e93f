//! Applies changes, and keeps a record of the former values, with which they are undone.
//!
//! The record is a file in the folder `.doctor` of the runtime directory. It has an entry for each changed
//! setting, with the value before the first change and after the last one, and it is written before a setting
//! is. A record of another boot is void.
//!
//! A network namespace is known by its inode and, from Linux 5.14 on, its cookie: the kernel gives the inode
//! of a deleted namespace to another one.

use super::read::is_own_sysfs;
use super::setting::{Change, SettingKey};
use crate::failure::Failure;
use ginnel::run_dir;
use ginnel_devices::{interface, network_namespace};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const FOLDER: &str = ".doctor";
const FILE: &str = "undo.json";

/// A changed setting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    key: SettingKey,
    /// The network namespace of the interface, as the kernel names its inode; empty for a setting of the
    /// machine.
    namespace: String,
    /// The cookie of the network namespace; `None` for a setting of the machine, and if the kernel has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cookie: Option<u64>,
    before: String,
    after: String,
}

/// Where the setting of an entry is.
#[derive(Debug, PartialEq, Eq)]
enum Location {
    /// On the machine, or in this network namespace.
    Here,
    /// In another network namespace.
    Elsewhere,
    /// In a network namespace that was deleted: this one has its inode.
    Deleted,
    /// In a network namespace that is not in the record.
    Unknown,
}

/// The identity of a network namespace.
#[derive(Clone, Debug)]
struct Namespace {
    inode: String,
    cookie: Option<u64>,
}

impl Namespace {
    /// Returns the network namespace that the link `path` names, which is that of this process.
    ///
    /// # Errors
    /// The namespace cannot be identified. Nothing may be changed or undone then.
    fn identify(path: &Path) -> Result<Self, Failure> {
        let failed = |e: io::Error| {
            Failure::running(format!("{}: cannot identify the network namespace: {e}", path.display()))
        };
        let inode = fs::read_link(path).map_err(failed)?.display().to_string();
        Ok(Self { inode, cookie: network_namespace::cookie().map_err(failed)? })
    }

    /// Returns where the setting of an entry is, as seen from this namespace.
    fn locate(&self, entry: &Entry) -> Location {
        match (&entry.key.interface, entry.cookie, self.cookie) {
            (None, ..) => Location::Here,
            (Some(_), ..) if entry.namespace.is_empty() => Location::Unknown,
            (Some(_), ..) if entry.namespace != self.inode => Location::Elsewhere,
            (Some(_), Some(recorded), Some(own)) if recorded != own => Location::Deleted,
            _ => Location::Here,
        }
    }
}

/// The content of the file.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    /// Identifies the boot.
    boot: String,
    entries: Vec<Entry>,
}

/// The record of changes.
pub struct UndoRecord {
    path: PathBuf,
    namespace: Namespace,
    record: Record,
    /// Locked as long as the value lives, so that one process changes settings at a time.
    _lock: File,
}

/// Result of a change.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The setting has the value already.
    Unchanged,
    /// The value before, and the value now.
    Changed(String, String),
    /// Something else has changed the setting since; it is left as it is. The value now.
    Left(String),
    /// The setting does not exist any more.
    Gone,
    /// The reason why the setting could not be changed.
    Failed(String),
}

impl Outcome {
    fn failed(e: &io::Error) -> Self {
        let hint = if e.kind() == ErrorKind::PermissionDenied { ": only root may change it" } else { "" };
        Self::Failed(format!("{e}{hint}"))
    }
}

impl UndoRecord {
    /// Opens the record.
    ///
    /// # Errors
    /// The runtime directory cannot be used, another process changes settings, the file is damaged, or the
    /// network namespace cannot be identified.
    pub fn open() -> Result<Self, Failure> {
        let folder = run_dir::folder(FOLDER).map_err(|e| Failure::running(e.to_string()))?;
        Self::open_in(&folder)
    }

    fn open_in(folder: &Path) -> Result<Self, Failure> {
        let failed = |path: &Path, e: io::Error| Failure::running(format!("{}: {e}", path.display()));
        let lock_path = folder.join("lock");
        let lock = OpenOptions::new().append(true).create(true).mode(0o600).open(&lock_path);
        let lock = lock.map_err(|e| failed(&lock_path, e))?;
        lock.lock().map_err(|e| failed(&lock_path, e))?;
        let path = folder.join(FILE);
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let boot = boot.trim().to_owned();
        let record = match fs::read_to_string(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => Record::default(),
            Err(e) => return Err(failed(&path, e)),
            Ok(text) => serde_json::from_str(&text).map_err(|e| {
                let path = path.display();
                Failure::running(format!("{path}: is damaged: {e}: remove it if nothing is to be undone"))
            })?,
        };
        let record = if record.boot == boot { record } else { Record { boot, entries: Vec::new() } };
        let namespace = Namespace::identify(Path::new("/proc/self/ns/net"))?;
        Ok(Self { path, namespace, record, _lock: lock })
    }

    /// Applies a change.
    ///
    /// # Errors
    /// The record cannot be written. The setting then keeps its value, unless only the value that the driver
    /// has chosen could not be recorded.
    pub fn apply(&mut self, change: &Change) -> Result<Outcome, Failure> {
        let Change { key, to } = change;
        let before = match key.read() {
            Ok(value) if value == *to => return Ok(Outcome::Unchanged),
            Ok(value) => value,
            Err(e) => return Ok(Outcome::failed(&e)),
        };
        let is_known = |entry: &Entry| entry.key == *key && self.namespace.locate(entry) == Location::Here;
        let known = self.record.entries.iter().position(is_known);
        let earlier = self.record.entries.clone();
        let at = known.unwrap_or_else(|| {
            let (namespace, cookie) = match key.interface {
                Some(_) => (self.namespace.inode.clone(), self.namespace.cookie),
                None => (String::new(), None),
            };
            let (before, after) = (before.clone(), to.clone());
            let entry = Entry { key: key.clone(), namespace, cookie, before, after };
            self.record.entries.push(entry);
            self.record.entries.len() - 1
        });
        self.record.entries[at].after.clone_from(to);
        self.save()?;
        if let Err(e) = key.write(to) {
            self.record.entries = earlier;
            self.save()?;
            return Ok(Outcome::failed(&e));
        }
        // Drivers round some values.
        let after = key.read().unwrap_or_else(|_| to.clone());
        self.record.entries[at].after.clone_from(&after);
        if self.record.entries[at].before == after {
            self.record.entries.remove(at);
        }
        self.save()?;
        if after == before {
            return Ok(Outcome::Failed(format!("the driver keeps {before}")));
        }
        Ok(Outcome::Changed(before, after))
    }

    /// Undoes all changes of this network namespace and of the machine, the last one first. Calls `report`
    /// with each setting.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn undo(&mut self, mut report: impl FnMut(&SettingKey, Outcome)) -> Result<(), Failure> {
        for at in (0..self.record.entries.len()).rev() {
            let location = self.namespace.locate(&self.record.entries[at]);
            let Entry { key, before, after, .. } = self.record.entries[at].clone();
            let outcome = match location {
                Location::Elsewhere => continue,
                Location::Here => undo_setting(&key, before, &after),
                Location::Deleted => Outcome::Gone,
                Location::Unknown => Outcome::Failed(format!(
                    "the record does not name its network namespace: set {before} there, and remove {}",
                    self.path.display()
                )),
            };
            if !matches!(outcome, Outcome::Failed(_)) {
                self.record.entries.remove(at);
                self.save()?;
            }
            report(&key, outcome);
        }
        Ok(())
    }

    /// Returns the number of settings that can be undone.
    pub fn len(&self) -> usize {
        self.record.entries.len()
    }

    /// Replaces the file by the record, or removes it if there is nothing to undo.
    fn save(&self) -> Result<(), Failure> {
        let save = || {
            if self.record.entries.is_empty() {
                return match fs::remove_file(&self.path) {
                    Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
                    _ => Ok(()),
                };
            }
            let temporary = self.path.with_extension("new");
            let file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary);
            let mut file = file?;
            file.write_all(serde_json::to_string_pretty(&self.record)?.as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, &self.path)
        };
        save().map_err(|e| Failure::running(format!("{}: {e}", self.path.display())))
    }
}

/// Restores the former value of a setting if it still has the value that `--fix` gave it.
fn undo_setting(key: &SettingKey, before: String, after: &str) -> Outcome {
    if let Some(name) = &key.interface {
        match interface::read(name) {
            Err(e) if e.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => return Outcome::Gone,
            Err(e) => return Outcome::failed(&e),
            Ok(info) if key.is_in_sysfs() && !is_own_sysfs(name, &info) => {
                return Outcome::Failed("/sys does not describe this network namespace".into());
            }
            Ok(_) => {}
        }
    }
    match key.read() {
        Ok(now) if now == before => Outcome::Unchanged,
        Ok(now) if now != after => Outcome::Left(now),
        Ok(now) => match key.write(&before) {
            Ok(()) => Outcome::Changed(now, before),
            Err(e) => Outcome::failed(&e),
        },
        Err(e) if e.kind() == ErrorKind::NotFound => Outcome::Gone,
        Err(e) => Outcome::failed(&e),
    }
}

#[cfg(test)]
mod tests {
    use super::{FILE, Namespace, Outcome, UndoRecord};
    use std::fs;
    use std::path::Path;

    /// Returns the outcome of undoing an entry for an interface, and whether the record is empty then. The
    /// setting has its former value.
    fn undo(namespace: &str, cookie: &str) -> (Option<Outcome>, bool) {
        let folder = tempfile::tempdir().unwrap();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let file = "/proc/sys/kernel/ostype";
        let before = fs::read_to_string(file).unwrap();
        let text = format!(
            r#"{{"boot":"{}","entries":[{{"key":{{"interface":"lo","setting":{{"File":"{file}"}}}},
                "namespace":"{namespace}",{cookie}"before":"{}","after":"other"}}]}}"#,
            boot.trim(),
            before.trim()
        );
        fs::write(folder.path().join(FILE), text).unwrap();
        let mut record = UndoRecord::open_in(folder.path()).unwrap();
        let mut found = None;
        record.undo(|_, outcome| found = Some(outcome)).unwrap();
        (found, record.len() == 0)
    }

    #[test]
    fn a_recycled_inode_is_another_namespace() {
        let own = Namespace::identify(Path::new("/proc/self/ns/net")).unwrap();
        let without_cookie = undo(&own.inode, "");
        assert_eq!(without_cookie, (Some(Outcome::Unchanged), true), "a record of an earlier version");
        assert_eq!(undo("net:[1]", ""), (None, false), "another namespace");
        let Some(cookie) = own.cookie else { return };
        let field = |cookie: u64| format!(r#""cookie":{cookie},"#);
        assert_eq!(undo(&own.inode, &field(cookie)), (Some(Outcome::Unchanged), true));
        assert_eq!(undo(&own.inode, &field(cookie + 1)), (Some(Outcome::Gone), true));
    }

    #[test]
    fn an_unknown_namespace_is_refused() {
        let (outcome, is_empty) = undo("", "");
        assert!(matches!(outcome, Some(Outcome::Failed(why)) if why.contains("network namespace")));
        assert!(!is_empty);
        let failure = Namespace::identify(Path::new("/proc/self/ns/none")).unwrap_err().to_string();
        assert!(failure.contains("cannot identify the network namespace"), "{failure}");
    }
}
