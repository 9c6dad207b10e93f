//! Memory of a group of processes, as the kernel charges it to a control group: anonymous and shared memory,
//! and what the kernel needs for them.

use super::MeasureError;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Mount points of version 2 and of the memory controller of version 1.
const ROOTS: [&str; 3] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/memory"];

/// A control group. Dropping the value removes the group; its processes must have ended by then.
#[derive(Debug)]
pub struct MemoryGroup {
    path: PathBuf,
}

/// Memory of a group in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupMemory {
    /// Private memory.
    pub anonymous: u64,
    /// Shared memory.
    pub shared: u64,
    /// Memory of the kernel: page tables, descriptors, stacks.
    pub kernel: u64,
}

impl GroupMemory {
    /// Returns the sum.
    pub const fn total(&self) -> u64 {
        self.anonymous + self.shared + self.kernel
    }
}

impl MemoryGroup {
    /// Creates a group without processes.
    ///
    /// # Errors
    /// [`MeasureError::Skipped`] if this system or user has no group whose memory is counted.
    pub fn create(name: &str) -> Result<Self, MeasureError> {
        let directory = format!("ginnel-bench-{name}-{}", std::process::id());
        for root in ROOTS {
            let path = Path::new(root).join(&directory);
            if fs::create_dir(&path).is_err() {
                continue;
            }
            let group = Self { path };
            if group.memory().is_ok() {
                return Ok(group);
            }
        }
        Err(MeasureError::Skipped("needs root and a control group with the memory controller".into()))
    }

    /// Returns a command that runs `line` in the group.
    pub fn command(&self, line: &[OsString]) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo $$ > "$0" && exec "$@""#]).arg(self.path.join("cgroup.procs")).args(line);
        command
    }

    /// Returns the memory that is in use.
    pub fn memory(&self) -> io::Result<GroupMemory> {
        let text = fs::read_to_string(self.path.join("memory.stat"))?;
        // Version 1 counts the kernel's memory in a file of its own.
        let kernel = fs::read_to_string(self.path.join("memory.kmem.usage_in_bytes"));
        let kernel = kernel.ok().and_then(|bytes| bytes.trim().parse().ok());
        parse(&text, kernel).ok_or_else(|| io::Error::other("memory.stat: unexpected format"))
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // Fails if a process could not be ended: the group is not empty then.
        _ = fs::remove_dir(&self.path);
    }
}

/// Reads memory.stat of version 1, whose kernel memory is given, or of version 2.
fn parse(text: &str, kernel: Option<u64>) -> Option<GroupMemory> {
    let value = |name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse::<u64>().ok())
    };
    let kernel = match kernel {
        Some(bytes) => bytes,
        // "kernel" exists since Linux 5.18.
        None => value("kernel")?,
    };
    let anonymous = value("anon").or_else(|| value("rss"))?;
    Some(GroupMemory { anonymous, shared: value("shmem")?, kernel })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_read() {
        let expected = GroupMemory { anonymous: 4096, shared: 8192, kernel: 100 };
        assert_eq!(parse("cache 12288\nrss 4096\nrss_huge 0\nshmem 8192\n", Some(100)), Some(expected));
        assert_eq!(parse("anon 4096\nfile 12288\nkernel 100\nshmem 8192\n", None), Some(expected));
        assert_eq!(parse("anon 4096\nshmem 8192\n", None), None, "Linux before 5.18");
    }
}
