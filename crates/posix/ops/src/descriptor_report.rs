//! The descriptor report of a process for `ginnel check`: a memfd that other processes read through /proc
//! without involving this one. Each descriptor has one cache line, written when the side that serves it is
//! decided and when a connection is accepted, never for data.
#![allow(unsafe_code)] // memory that other processes read

use crate::descriptor::{HiddenFd, is_shortage};
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::{Relaxed, Release};
use ginnel::channel::SharedMapping;
use ginnel::memory_file;
use ginnel::raised_limit::with_raised_limit;
use rustix::fd::{AsRawFd, OwnedFd, RawFd};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

/// Beginning of the memfd's name. The control socket of the stack follows, if it is known.
const NAME_PREFIX: &str = "ginnel-descriptors";
/// Length of the longest name of a memfd in bytes (memfd_create(2)).
const NAME_BYTES_MAX: usize = 249;
/// "ginnelD", followed by the version of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"ginnelD\x02");
const ENTRY_WORDS: usize = 8;
const ENTRY_BYTES: usize = ENTRY_WORDS * size_of::<u64>();

/// Why a socket of the program is a kernel socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum KernelReason {
    /// The stack has no route to its destination.
    Unreachable = 1,
    /// The socket is bound to an address that does not belong to the stack.
    NotLocal = 2,
}

/// Object that a descriptor refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReportEntry {
    /// A socket that is neither bound, connected nor listening: it is not decided which side serves it.
    Unconnected,
    /// A socket that is only bound.
    Bound(SocketAddr),
    /// A listener of the stack; the flag tells that the kernel listens, too.
    Listener(SocketAddr, bool),
    /// A connection of the stack, with its local and remote address.
    Stream([SocketAddr; 2]),
    /// A UDP socket, with its local address and the address to which it is connected, if any. The flag tells
    /// that the kernel serves the socket, too. Until it has a port, it is not decided which side serves it.
    Udp([SocketAddr; 2], bool),
    /// An epoll set.
    Epoll,
    /// A kernel socket, the reason, and its inode, by which a reader detects that the number refers to
    /// another socket by now.
    Kernel(KernelReason, u64),
    /// An internal descriptor of the library.
    Internal,
}

/// The report of this process.
pub(crate) struct DescriptorReport {
    mapping: Arc<SharedMapping>,
    entries: usize,
    /// The name of the memfd.
    name: String,
    /// The memfd, which other processes find in /proc.
    pub file: HiddenFd,
}

impl DescriptorReport {
    /// Creates a report for this number of descriptors. It names the stack by the path of its control socket,
    /// unless `stack` is empty.
    ///
    /// # Errors
    /// `ENOMEM`, `EMFILE`, `ENFILE`, `EFBIG`.
    pub fn new(descriptors: usize, stack: &str) -> Result<Self, Errno> {
        let entries = descriptors + 1;
        let name = format!("{NAME_PREFIX} {stack}");
        let is_usable = !stack.is_empty() && name.len() <= NAME_BYTES_MAX && !name.contains('\0');
        let name = if is_usable { name } else { NAME_PREFIX.into() };
        // The program may have used all of its numbers.
        let file = with_raised_limit(is_shortage, || HiddenFd::new(empty_file(&name, entries)?))?;
        let mapping = SharedMapping::new(&file, entries * ENTRY_BYTES).map_err(errno)?;
        Ok(Self { mapping: Arc::new(mapping), entries, name, file }.with_magic())
    }

    /// Replaces the report in a child by an empty one, under the same number. The old one is the parent's.
    ///
    /// # Errors
    /// `ENOMEM`, `EMFILE`, `ENFILE`, `EFBIG`.
    pub fn for_child(self) -> Result<Self, Errno> {
        // The program may have used all of its descriptors, and the number may be above its soft limit. A
        // child has one thread.
        let is_without_number = |errno: &Errno| is_shortage(errno) || *errno == Errno::BADF;
        with_raised_limit(is_without_number, || {
            let file = empty_file(&self.name, self.entries)?;
            crate::syscall::dup3(file.as_raw_fd(), self.file.as_raw_fd(), libc::O_CLOEXEC)
        })?;
        self.mapping.replace(&self.file).map_err(errno)?;
        Ok(self.with_magic())
    }

    /// Returns the memory of the report.
    pub fn mapping(&self) -> Arc<SharedMapping> {
        self.mapping.clone()
    }

    fn with_magic(self) -> Self {
        if let Some(head) = self.entry(-1) {
            head[0].store(MAGIC, Release);
        }
        self
    }

    /// Returns the words of a descriptor; those of -1 are the header.
    #[inline(always)]
    fn entry(&self, fd: RawFd) -> Option<&[AtomicU64; ENTRY_WORDS]> {
        let index = usize::try_from(i64::from(fd) + 1).ok().filter(|index| *index < self.entries)?;
        // SAFETY: atomics, inside of the mapping; any bits are valid, and pages are aligned.
        Some(unsafe { &self.mapping.slice_unchecked(index * ENTRY_BYTES, 1)[0] })
    }

    /// Stores the entry of a descriptor. Ignores descriptors beyond the end of the report.
    pub fn write(&self, fd: RawFd, entry: ReportEntry) {
        let Some(words) = self.entry(fd) else { return };
        let unspecified = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
        let (tag, detail, addresses) = match entry {
            ReportEntry::Unconnected => (1, 0, [unspecified; 2]),
            ReportEntry::Bound(at) => (2, 0, [at, unspecified]),
            ReportEntry::Listener(at, kernel) => (3, u64::from(kernel), [at, unspecified]),
            ReportEntry::Stream(addresses) => (4, 0, addresses),
            ReportEntry::Epoll => (5, 0, [unspecified; 2]),
            ReportEntry::Kernel(reason, inode) => {
                words[6].store(inode, Relaxed);
                (6, reason as u64, [unspecified; 2])
            }
            ReportEntry::Internal => (7, 0, [unspecified; 2]),
            ReportEntry::Udp(addresses, kernel) => (8, u64::from(kernel), addresses),
        };
        let family = addresses.map(|end| u64::from(end.is_ipv6()));
        words[0].store(tag | detail << 8 | family[0] << 16 | family[1] << 17, Relaxed);
        words[1].store(u64::from(addresses[0].port()) | u64::from(addresses[1].port()) << 16, Relaxed);
        for (words, end) in words[2..6].chunks_exact(2).zip(addresses) {
            let bits = match end.ip() {
                IpAddr::V4(ip) => u128::from(ip.to_bits()),
                IpAddr::V6(ip) => ip.to_bits(),
            };
            words[0].store(bits as u64, Relaxed);
            words[1].store((bits >> 64) as u64, Relaxed);
        }
    }

    /// Sets both addresses of a connection whose local address was unknown, if the descriptor still refers to
    /// it.
    pub fn complete(&self, fd: RawFd, addresses: [SocketAddr; 2]) {
        let Some(words) = self.entry(fd) else { return };
        if let Some(ReportEntry::Stream([own, peer])) =
            decode(core::array::from_fn(|at| words[at].load(Relaxed)))
            && own.port() == 0
            && peer == addresses[1]
        {
            self.write(fd, ReportEntry::Stream(addresses));
        }
    }

    /// Removes a descriptor that was closed or is no longer the stack's.
    #[inline]
    pub fn clear(&self, fd: RawFd) {
        if let Some(words) = self.entry(fd) {
            words[0].store(0, Relaxed);
        }
    }
}

fn empty_file(name: &str, entries: usize) -> Result<OwnedFd, Errno> {
    memory_file::create(name, entries * ENTRY_BYTES, MemfdFlags::CLOEXEC)
}

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::NOMEM)
}

fn decode(words: [u64; ENTRY_WORDS]) -> Option<ReportEntry> {
    let end = |which: usize| {
        let bits = u128::from(words[2 + 2 * which]) | u128::from(words[3 + 2 * which]) << 64;
        let ip = match words[0] >> (16 + which) & 1 {
            0 => IpAddr::V4((bits as u32).into()),
            _ => IpAddr::V6(Ipv6Addr::from_bits(bits)),
        };
        SocketAddr::new(ip, (words[1] >> (16 * which)) as u16)
    };
    let detail = words[0] >> 8 & 0xff;
    Some(match words[0] & 0xff {
        1 => ReportEntry::Unconnected,
        2 => ReportEntry::Bound(end(0)),
        3 => ReportEntry::Listener(end(0), detail != 0),
        4 => ReportEntry::Stream([end(0), end(1)]),
        5 => ReportEntry::Epoll,
        6 => match detail {
            1 => ReportEntry::Kernel(KernelReason::Unreachable, words[6]),
            2 => ReportEntry::Kernel(KernelReason::NotLocal, words[6]),
            _ => return None,
        },
        7 => ReportEntry::Internal,
        8 => ReportEntry::Udp([end(0), end(1)], detail != 0),
        _ => return None,
    })
}

/// Reads what the report of another process says about these descriptors: one element for each, which is
/// `None` if the report has no entry for it. Returns `None` if that process has no report.
///
/// # Errors
/// Reading /proc fails: the process belongs to another user, or has ended.
pub fn read(pid: u32, fds: &[RawFd]) -> io::Result<Option<Vec<Option<ReportEntry>>>> {
    for (path, _) in report_files(pid)? {
        let file = File::open(&path)?;
        let entry = |fd: i64| -> Option<[u64; ENTRY_WORDS]> {
            let mut bytes = [0; ENTRY_BYTES];
            file.read_exact_at(&mut bytes, u64::try_from(fd + 1).ok()? * ENTRY_BYTES as u64).ok()?;
            let word =
                |at: usize| u64::from_ne_bytes(bytes[8 * at..8 * at + 8].try_into().unwrap_or_default());
            Some(core::array::from_fn(word))
        };
        if entry(-1).is_some_and(|head| head[0] == MAGIC) {
            return Ok(Some(fds.iter().map(|fd| decode(entry((*fd).into())?)).collect()));
        }
    }
    Ok(None)
}

/// Returns the path of the control socket of the stack to which another process has attached. Unlike the
/// environment of a process, which many servers overwrite with a title, it stays readable. `None` if the
/// process has no report, or its report does not tell.
pub fn stack_of(pid: u32) -> Option<String> {
    report_files(pid).ok()?.find_map(|(_, stack)| stack)
}

/// Iterates over the files of a process that may be its report: the path in /proc, and the control socket
/// that the file names.
fn report_files(pid: u32) -> io::Result<impl Iterator<Item = (PathBuf, Option<String>)>> {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd"))?;
    Ok(files.filter_map(|file| {
        let path = file.ok()?.path();
        let target = std::fs::read_link(&path).ok()?;
        let name = target.to_str()?.strip_prefix("/memfd:")?.strip_prefix(NAME_PREFIX)?;
        let stack = name.trim_end_matches(" (deleted)").strip_prefix(' ').map(String::from);
        Some((path, stack))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_readable_and_child_starts_empty() {
        let report = DescriptorReport::new(64, "/run/a stack/control").unwrap();
        let addresses = ["10.0.0.1:80".parse().unwrap(), "[2001:db8::1]:443".parse().unwrap()];
        let entries = [
            ReportEntry::Unconnected,
            ReportEntry::Bound(addresses[1]),
            ReportEntry::Listener(addresses[0], true),
            ReportEntry::Stream(addresses),
            ReportEntry::Epoll,
            ReportEntry::Kernel(KernelReason::NotLocal, 4711),
            ReportEntry::Internal,
            ReportEntry::Udp(addresses, true),
        ];
        for (fd, entry) in (10..).zip(entries) {
            report.write(fd, entry);
        }
        report.write(63, ReportEntry::Stream(addresses));
        report.write(64, ReportEntry::Unconnected);
        report.clear(10);
        assert_eq!(stack_of(std::process::id()).as_deref(), Some("/run/a stack/control"));
        let fds = [10, 11, 12, 13, 14, 15, 16, 17, 63, 64, 18];
        let read = super::read(std::process::id(), &fds).unwrap().expect("a report");
        let expected: Vec<_> = entries.iter().skip(1).copied().map(Some).collect();
        assert_eq!((&read[0], &read[1..8]), (&None, &expected[..]));
        assert_eq!(read[8..], [Some(ReportEntry::Stream(addresses)), None, None]);
        // A child has an empty report under the same number, and the parent's stays as it was.
        let (parents, number) = (rustix::io::dup(&report.file).unwrap(), report.file.as_raw_fd());
        let report = report.for_child().unwrap();
        assert_eq!(report.file.as_raw_fd(), number);
        assert_eq!(report.name, "ginnel-descriptors /run/a stack/control");
        let unnamed = DescriptorReport::new(1, &"x".repeat(300)).unwrap();
        assert_eq!(unnamed.name, NAME_PREFIX);
        assert_eq!(rustix::io::fcntl_getfd(&report.file), Ok(rustix::io::FdFlags::CLOEXEC));
        report.write(10, ReportEntry::Epoll);
        let tag = |file: &dyn std::os::fd::AsFd, fd: u64| {
            let mut tag = [0];
            rustix::io::pread(file, &mut tag, (fd + 1) * ENTRY_BYTES as u64).unwrap();
            tag[0]
        };
        assert_eq!((tag(&report.file, 10), tag(&report.file, 11)), (5, 0));
        assert_eq!((tag(&parents, 10), tag(&parents, 11)), (0, 2));
    }
}
