//! The reason why a process with the library uses no stack, for `ginnel check`: the name of a page of memory,
//! which other processes read in /proc/PID/maps. The page takes no descriptor, a child has it as well, and it
//! ends with the program.
#![allow(unsafe_code)] // a page that is never unmapped

use ginnel::memory_file;
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap};

/// Beginning of the memfd's name.
const NAME_PREFIX: &str = "ginnel-not-attached: ";
/// Length of the longest name of a memfd in bytes (memfd_create(2)).
const NAME_BYTES_MAX: usize = 249;
const PAGE_BYTES: usize = 4096;

/// Returns the memfd's name, which is truncated to [`NAME_BYTES_MAX`].
fn name_of(reason: &str) -> String {
    let mut name: String = NAME_PREFIX.into();
    // The name ends at the first NUL byte, and a line of /proc/PID/maps at the first line feed.
    let printable = reason.chars().map(|c| if c.is_control() { ' ' } else { c });
    for c in printable {
        if name.len() + c.len_utf8() > NAME_BYTES_MAX {
            break;
        }
        name.push(c);
    }
    name
}

/// Publishes the reason; a process does so once. Does nothing if the kernel has no memory or descriptor at
/// this moment.
pub fn publish(reason: &str) {
    let name = name_of(reason);
    let Ok(file) = memory_file::create(&name, PAGE_BYTES, MemfdFlags::CLOEXEC) else { return };
    // SAFETY: a new mapping, to which nothing refers. It stays until the program ends.
    let _ = unsafe { mmap(core::ptr::null_mut(), PAGE_BYTES, ProtFlags::READ, MapFlags::PRIVATE, &file, 0) };
}

/// Returns the reason that a process has published, from the text of its /proc/PID/maps.
pub fn find(maps: &str) -> Option<&str> {
    maps.lines().find_map(|line| {
        let (_, name) = line.split_once("/memfd:")?;
        Some(name.strip_prefix(NAME_PREFIX)?.trim_end_matches(" (deleted)"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_found_in_the_maps() {
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
        assert_eq!(find(&maps()), None);
        publish("it is full: \"x\"\n(see --clients-max)");
        assert_eq!(find(&maps()), Some("it is full: \"x\" (see --clients-max)"));
        let long = name_of(&"ü".repeat(200));
        assert_eq!(long, format!("{NAME_PREFIX}{}", "ü".repeat((NAME_BYTES_MAX - NAME_PREFIX.len()) / 2)));
        assert!(memory_file::create(&long, 1, MemfdFlags::CLOEXEC).is_ok());
    }
}
