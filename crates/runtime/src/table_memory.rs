//! Memory of the large tables: huge pages, and pages that are touched at the start.
//!
//! With millions of connections, the tables in which segments are looked up have hundreds of megabytes and
//! are accessed at random. With pages of 4 KiB, nearly each access also misses the TLB, and the page walk
//! costs as much again as the cache miss. And the first access to each page takes a page fault, which delays
//! the segments behind it.
#![allow(unsafe_code)] // Reason: madvise(2) and mmap(2) are only reachable through unsafe functions.

use crate::error::Error;
use core::ops::Range;
use ginnel_stack::stack::{Stack, StackConfig};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Tables below this size are left alone: a huge page would be mostly empty.
const BYTES_MIN: usize = 4 << 20;

/// Address space for all else that a shard allocates before it serves, in bytes.
const OTHER_BYTES: usize = 64 << 20;

/// Checks that the process may have the address space for the tables of a stack (`RLIMIT_AS`): the allocator
/// ends a process that may not. Call this before the stack is created.
///
/// # Errors
/// `ENOMEM`.
pub fn check_address_space(config: &StackConfig) -> Result<(), Error> {
    let bytes = config.table_bytes().saturating_add(OTHER_BYTES);
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: the kernel chooses an address that nothing uses.
    let mapping = unsafe { mmap_anonymous(core::ptr::null_mut(), bytes, ProtFlags::empty(), flags) };
    let mapping =
        mapping.map_err(|e| Error::io(format!("tables of a shard: reserve {} MiB", bytes >> 20), e))?;
    // SAFETY: the mapping from above, to which nothing refers.
    _ = unsafe { munmap(mapping, bytes) };
    Ok(())
}

/// Advises the kernel to use huge pages for the tables of a stack, if the system has them
/// (`/sys/kernel/mm/transparent_hugepage/enabled`). Call this before there are connections. Without huge
/// pages everything works, only slower.
pub fn advise(stack: &Stack) {
    for table in stack.tables().into_iter().filter(|table| table.len() >= BYTES_MIN) {
        _ = advise_pages(pages_of(table), Advice::LinuxHugepage);
    }
}

/// Touches the memory that the tables of a stack have reserved. Call this after [`advise`], so that huge
/// pages are used, and before there are connections.
///
/// # Errors
/// There is not enough memory (`ENOMEM`), or Linux is older than 5.14 (`EINVAL`).
pub fn prefault(stack: &Stack) -> Result<(), Error> {
    for table in stack.tables() {
        let done = advise_pages(pages_of(table), Advice::LinuxPopulateWrite);
        done.map_err(|e| Error::io(format!("shard.prefault: touch {} bytes of a table", table.len()), e))?;
    }
    Ok(())
}

/// Returns the addresses of the pages that belong to a table alone.
fn pages_of(table: *const [u8]) -> Range<usize> {
    let page = rustix::param::page_size();
    let start = table.cast::<u8>().addr();
    let end = (start + table.len()) / page * page;
    start.next_multiple_of(page).min(end)..end
}

fn advise_pages(pages: Range<usize>, advice: Advice) -> Result<(), Errno> {
    if pages.is_empty() {
        return Ok(());
    }
    // SAFETY: the pages belong to memory that the stack has reserved and keeps, and neither advice has an
    // effect that can be observed.
    unsafe { madvise(core::ptr::with_exposed_provenance_mut(pages.start), pages.len(), advice) }
}

#[cfg(test)]
mod tests {
    use super::{BYTES_MIN, advise, check_address_space, pages_of, prefault};
    use ginnel_stack::stack::{Stack, StackConfig};
    use ginnel_stack::time::Instant;
    use rustix::mm::{Advice, madvise};

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

    /// Returns the number of resident pages of a range.
    fn resident_pages(pages: core::ops::Range<usize>) -> usize {
        let page = rustix::param::page_size();
        let mut entries = vec![0u8; pages.len() / page * 8];
        let file = std::fs::File::open("/proc/self/pagemap").unwrap();
        let at = (pages.start / page * 8) as u64;
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut entries, at).unwrap();
        // Bit 63 of an entry: the page is present.
        entries.chunks(8).filter(|entry| entry[7] & 0x80 != 0).count()
    }

    #[test]
    fn address_space_of_tables_is_known() {
        let mut config = StackConfig::default();
        (config.tcp.connections_max, config.tcp.time_wait_max) = (12_345, 6_789);
        let bytes = config.table_bytes();
        check_address_space(&config).unwrap();
        let stack = Stack::new(config, [1; 32], Instant::ZERO).expect("the configuration is valid");
        assert_eq!(stack.tables().iter().map(|table| table.len()).sum::<usize>(), bytes);
    }

    #[test]
    fn tables_are_resident_after_prefault_alone() {
        let mut config = StackConfig::default();
        (config.tcp.connections_max, config.tcp.time_wait_max) = (20_000, 10_000);
        let stack = Stack::new(config, [1; 32], Instant::ZERO).expect("the configuration is valid");
        let tables = stack.tables().map(pages_of);
        let resident = || tables.clone().map(resident_pages);
        for pages in tables.clone() {
            // The allocator may give memory that was used before.
            // SAFETY: the memory belongs to tables that nobody reads or writes any more.
            let discarded = unsafe {
                madvise(
                    core::ptr::with_exposed_provenance_mut(pages.start),
                    pages.len(),
                    Advice::LinuxDontNeed,
                )
            };
            discarded.expect("the pages are mapped");
        }
        assert_eq!(resident(), [0; 4]);
        prefault(&stack).unwrap();
        assert_eq!(resident(), tables.clone().map(|pages| pages.len() / rustix::param::page_size()));
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
