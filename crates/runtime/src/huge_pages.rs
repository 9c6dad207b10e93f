//! Huge pages for large tables.
//!
//! With millions of connections, the tables in which segments are looked up have hundreds of megabytes and
//! are accessed at random. With pages of 4 KiB, nearly each access also misses the TLB, and the page walk
//! costs as much again as the cache miss.
#![allow(unsafe_code)] // Reason: madvise(2) is only reachable through an unsafe function.

use ginnel_stack::stack::Stack;
use rustix::mm::{Advice, madvise};

/// Tables below this size are left alone: a huge page would be mostly empty.
const BYTES_MIN: usize = 4 << 20;

/// Advises the kernel to use huge pages for the tables of a stack, if the system has them
/// (`/sys/kernel/mm/transparent_hugepage/enabled`). Call this before there are connections. Without huge
/// pages everything works, only slower.
pub fn advise(stack: &Stack) {
    let page = rustix::param::page_size();
    for table in stack.tables() {
        let start = table.cast::<u8>();
        let skip = start.align_offset(page);
        if table.len() < BYTES_MIN {
            continue;
        }
        // SAFETY: the range is memory that the stack has reserved and keeps, and the advice has no visible
        // effect.
        _ = unsafe {
            madvise(start.wrapping_add(skip).cast_mut().cast(), table.len() - skip, Advice::LinuxHugepage)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::{BYTES_MIN, advise};
    use ginnel_stack::stack::{Stack, StackConfig};
    use ginnel_stack::time::Instant;

    /// Returns the flags of the mapping that contains `address`, from /proc/self/smaps.
    fn flags_at(address: usize) -> Option<String> {
        let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let mut inside = false;
        for line in maps.lines() {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            if let Some((from, to)) = range
                && let (Ok(from), Ok(to)) = (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
            {
                inside = (from..to).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| inside) {
                return Some(flags.into());
            }
        }
        None
    }

    #[test]
    fn only_large_tables_are_marked_for_huge_pages() {
        if std::fs::metadata("/sys/kernel/mm/transparent_hugepage").is_err() {
            eprintln!("skipped: this kernel has no transparent huge pages");
            return;
        }
        let stack =
            Stack::new(StackConfig::default(), [1; 32], Instant::ZERO).expect("the defaults are valid");
        advise(&stack);
        let mut large = 0;
        for table in stack.tables() {
            // In the middle, where the whole page belongs to the table.
            let flags = flags_at(table.cast::<u8>() as usize + table.len() / 2);
            if table.len() >= BYTES_MIN {
                let flags = flags.expect("the table is mapped");
                assert!(flags.split_whitespace().any(|f| f == "hg"), "{flags}");
                large += 1;
            }
        }
        assert!(large > 0, "the defaults have large tables");
    }
}
