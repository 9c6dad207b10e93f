//! The members of a region: the processes that take part. A member has a number that means the same process
//! in all PID namespaces, which a process id does not. While a member runs, it locks the byte of the memory
//! that has its number (`F_SETLK`, see fcntl(2)). A child does not inherit the lock, and the kernel releases
//! it when the process ends, so every member can ask which others run.
#![allow(unsafe_code)] // locks of a file, and a page that a child finds empty

use crate::local::FdCell;
use crate::region::Region;
use crate::slot_socket::{self, borrow};
use core::ffi::{c_int, c_uint};
use core::ops::RangeInclusive;
use core::sync::atomic::{AtomicU32, Ordering};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use rustix::fs::fstat;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use std::io;
use std::sync::OnceLock;

/// The members of the region of this program, as one process knows them.
#[derive(Debug)]
pub struct Members {
    /// The region, its memory and the number that [`Self::open`] has taken.
    opened: OnceLock<OpenedRegion>,
    /// Number of this process, or of the process that this one was cloned from if [`Self::forget_own`] was
    /// not called.
    recent: AtomicU32,
}

/// The region of a process.
#[derive(Debug)]
struct OpenedRegion {
    region: &'static Region,
    /// The region's memory, whose bytes the members lock.
    memory: FdCell,
    /// The memory's device and inode, by which the memory is recognised: the program may have closed the
    /// descriptor, and another file may have the number.
    device: u64,
    inode: u64,
    /// Number of this process; zero if it has none. The kernel clears the page in a child.
    own: &'static AtomicU32,
}

impl OpenedRegion {
    fn memory(&self) -> Option<BorrowedFd<'static>> {
        let memory = self.memory.get().and_then(borrow)?;
        let is_own =
            fstat(memory).is_ok_and(|about| about.st_dev == self.device && about.st_ino == self.inode);
        is_own.then_some(memory)
    }
}

impl Members {
    /// No members.
    pub const fn new() -> Self {
        Self { opened: OnceLock::new(), recent: AtomicU32::new(0) }
    }

    /// Takes the memory of `region`, which stays open as long as the process runs. Returns the region of this
    /// process: another one than `region` if another thread was faster.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn open(&self, region: &'static Region, memory: OwnedFd) -> io::Result<&'static Region> {
        let about = fstat(&memory)?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: the kernel chooses an address that nothing uses.
        let page =
            unsafe { mmap_anonymous(core::ptr::null_mut(), size_of::<AtomicU32>(), protection, flags) }?;
        // Without this advice, `forget_own` alone clears the number. SAFETY: the mapping was just made.
        let _ = unsafe { madvise(page, size_of::<AtomicU32>(), Advice::LinuxWipeOnFork) };
        // SAFETY: the mapping is aligned, is never unmapped, and begins with zeros.
        let own = unsafe { &*page.cast::<AtomicU32>() };
        let opened =
            OpenedRegion { region, memory: FdCell::new(), device: about.st_dev, inode: about.st_ino, own };
        opened.memory.set(Some(memory.as_raw_fd()));
        if self.opened.set(opened).is_ok() {
            let _ = memory.into_raw_fd();
        }
        Ok(self.opened.get().map_or(region, |opened| opened.region))
    }

    fn memory(&self) -> Option<BorrowedFd<'static>> {
        self.opened.get()?.memory()
    }

    /// Returns the number of this process in `region`, which it gets at the first call. Returns `None` if it
    /// cannot get one: the program has closed the memory, or a filter forbids locks.
    pub fn own(&self, region: &Region) -> Option<u32> {
        let own = self.opened.get()?.own;
        if let number @ 1.. = own.load(Ordering::Relaxed) {
            return Some(number);
        }
        let memory = self.memory()?;
        let number = region.next_member()?;
        set_lock(memory, number).ok()?;
        // Another thread may have been faster. The further lock means nothing.
        let exchanged = own.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed);
        let number = exchanged.err().unwrap_or(number);
        self.recent.store(number, Ordering::Relaxed);
        Some(number)
    }

    /// Returns the number of this process if it has one.
    pub fn present(&self) -> Option<u32> {
        self.opened.get().map(|opened| opened.own.load(Ordering::Relaxed)).filter(|number| *number != 0)
    }

    /// Forgets the number in a child, and returns that of the process that has forked it; zero for none.
    pub fn forget_own(&self) -> u32 {
        if let Some(opened) = self.opened.get() {
            opened.own.store(0, Ordering::Relaxed);
        }
        self.recent.swap(0, Ordering::Relaxed)
    }

    /// Returns whether this process was cloned from a member without the calls of pthread_atfork(3), as by
    /// clone(2).
    pub fn is_unnoticed_child(&self) -> bool {
        self.present().is_none() && self.recent.load(Ordering::Relaxed) != 0
    }

    /// Returns whether the state of this process is its own: a child of `vfork` works on that of its parent.
    pub fn is_own_state(&self) -> bool {
        // The kernel does not report locks of the caller itself. It may tell nothing, as under a seccomp
        // filter.
        let lock = self.present().zip(self.memory()).map(|(number, memory)| holder(memory, number));
        !matches!(lock, Some(Ok(Some(_))))
    }

    /// Returns whether a member runs. Returns true if the kernel does not tell.
    pub fn is_running(&self, member: u32) -> bool {
        self.present() == Some(member)
            || self.memory().is_none_or(|memory| holder(memory, member) != Ok(None))
    }

    /// Returns the descriptor of the memory if it is in a range of numbers.
    pub fn fd_in(&self, range: RangeInclusive<c_uint>) -> Option<c_int> {
        let opened = self.opened.get()?;
        let fd = opened.memory.get().filter(|fd| range.contains(&fd.cast_unsigned()))?;
        opened.memory().map(|_| fd)
    }

    /// Moves the memory to another descriptor, because the program is about to replace that one. Returns
    /// whether it was moved. The old descriptor stays open: when it is closed, the kernel releases all locks
    /// of the process, and [`Self::lock_again`] must follow.
    pub fn make_way(&self) -> bool {
        let Some(opened) = self.opened.get() else { return false };
        let copy = opened.memory().and_then(|memory| slot_socket::hidden_copy(memory).ok());
        copy.map(|copy| opened.memory.set(Some(copy.into_raw_fd()))).is_some()
    }

    /// See [`Self::make_way`].
    pub fn lock_again(&self) {
        if let (Some(memory), Some(number)) = (self.memory(), self.present()) {
            // Without the lock, others take this process for one that has ended.
            let _ = set_lock(memory, number);
        }
    }
}

fn lock_of(member: u32) -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as _,
        l_whence: libc::SEEK_SET as _,
        l_start: member as _,
        l_len: 1,
        l_pid: 0,
    }
}

fn set_lock(memory: BorrowedFd<'_>, member: u32) -> Result<(), Errno> {
    let lock = lock_of(member);
    // SAFETY: the kernel reads one structure.
    if unsafe { libc::fcntl(memory.as_raw_fd(), libc::F_SETLK, &raw const lock) } == 0 {
        return Ok(());
    }
    Err(last_error())
}

/// Returns the process id of a member, or `None` if it does not run or is the caller. The id is that in the
/// PID namespace of the caller; zero if the member is not visible there.
///
/// # Errors
/// The kernel's error.
pub fn holder(memory: impl AsFd, member: u32) -> Result<Option<i32>, Errno> {
    let mut lock = lock_of(member);
    // SAFETY: the kernel reads and writes one structure.
    if unsafe { libc::fcntl(memory.as_fd().as_raw_fd(), libc::F_GETLK, &raw mut lock) } != 0 {
        return Err(last_error());
    }
    Ok((c_int::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_pid))
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

/// Processes that are members, for tests.
#[cfg(test)]
pub mod tests {
    use super::*;
    use rustix::fs::{Mode, OFlags, open};
    use rustix::pipe::{PipeFlags, pipe_with};
    use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid, waitpid};
    use std::sync::{Mutex, PoisonError};

    /// Serialises the tests that look at locks of this process, and those that close memory of other tests:
    /// the kernel releases the locks then.
    pub static OWN_LOCKS: Mutex<()> = Mutex::new(());

    /// A process that is a member until the value is dropped.
    #[derive(Debug)]
    pub struct MemberProcess(Pid);

    impl MemberProcess {
        /// Starts a process that holds the lock of `member`.
        pub fn start(memory: impl AsFd, member: u32) -> Self {
            let memory = memory.as_fd();
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
            // SAFETY: the child makes system calls only. It must not close a descriptor of the memory, so it
            // does not execute another program.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                let result = set_lock(memory, member).and_then(|()| rustix::io::write(&writer, b"."));
                while result.is_ok() {
                    // SAFETY: ends with the thread that has started this process.
                    unsafe {
                        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                        libc::pause();
                    }
                }
                // SAFETY: ends the child.
                unsafe { libc::_exit(1) };
            }
            drop(writer);
            let process = Self(Pid::from_raw(pid).unwrap());
            assert_eq!(rustix::io::read(&reader, &mut [0]), Ok(1));
            process
        }

        /// Returns the process id.
        pub fn id(&self) -> i32 {
            self.0.as_raw_nonzero().get()
        }

        /// Ends the process; it is a zombie then.
        pub fn kill(&mut self) {
            kill_process(self.0, Signal::KILL).unwrap();
            waitid(WaitId::Pid(self.0), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
        }
    }

    impl Drop for MemberProcess {
        fn drop(&mut self) {
            let _ = kill_process(self.0, Signal::KILL);
            let _ = waitpid(Some(self.0), rustix::process::WaitOptions::empty());
        }
    }

    /// Runs `action`, which may only make system calls, in a child. Returns the exit status of the child,
    /// which is the result of `action`.
    pub fn in_child(action: impl FnOnce() -> i32) -> Option<i32> {
        // SAFETY: the child makes system calls only.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let status = action();
            // SAFETY: ends the child.
            unsafe { libc::_exit(status) };
        }
        let ended = waitpid(Pid::from_raw(pid), rustix::process::WaitOptions::empty()).unwrap();
        ended.unwrap().1.exit_status()
    }

    impl Members {
        fn opened(&self) -> &OpenedRegion {
            self.opened.get().unwrap()
        }
    }

    fn members() -> (&'static Region, &'static Members, OwnedFd) {
        let (region, memory) = Region::create().unwrap();
        let members: &'static Members = Box::leak(Box::new(Members::new()));
        members.open(region, memory.try_clone().unwrap()).unwrap();
        (region, members, memory)
    }

    #[test]
    fn a_member_runs_until_its_process_ends() {
        let (region, members, memory) = members();
        let own = members.own(region).unwrap();
        assert_eq!(members.own(region), Some(own));
        assert!(members.is_running(own));
        let other = region.next_member().unwrap();
        assert!(other != own && !members.is_running(other));
        let mut process = MemberProcess::start(&memory, other);
        assert_eq!(holder(&memory, other), Ok(Some(process.id())));
        assert!(members.is_running(other));
        process.kill();
        assert!(!members.is_running(other), "a zombie");
    }

    #[test]
    fn a_clone_is_another_process() {
        let (region, members, memory) = members();
        let own = members.own(region).unwrap();
        assert!(members.is_own_state() && !members.is_unnoticed_child());
        // The number in memory that a child shares, as after vfork.
        members.opened().own.store(own + 1, Ordering::Relaxed);
        let _holder = MemberProcess::start(&memory, own + 1);
        assert!(!members.is_own_state());
        // What a child of clone finds.
        members.opened().own.store(0, Ordering::Relaxed);
        assert!(members.is_unnoticed_child());
        assert_eq!(members.forget_own(), own);
        assert!(!members.is_unnoticed_child());
    }

    #[test]
    fn without_the_memory_all_members_run() {
        let (region, members, _memory) = members();
        let fd = members.opened().memory.take().unwrap();
        assert!(members.is_running(7));
        assert_eq!(members.own(region), None);
        // Another file has the number.
        let foreign = rustix::fs::memfd_create("foreign", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        members.opened().memory.set(Some(foreign.as_raw_fd()));
        assert!(members.is_running(7) && members.fd_in(0..=c_uint::MAX).is_none());
        assert_eq!(members.own(region), None);
        drop(slot_socket::own(fd));
    }

    #[test]
    fn the_lock_outlives_its_descriptor() {
        let _own_locks = OWN_LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
        let (region, members, memory) = members();
        let own = members.own(region).unwrap();
        let before = members.opened().memory.get().unwrap();
        assert_eq!(members.fd_in(0..=c_uint::MAX), Some(before));
        assert!(members.make_way());
        let after = members.opened().memory.get().unwrap();
        assert_ne!(before, after);
        assert!(is_seen_to_run(&memory, own), "both are open");
        drop(slot_socket::own(before));
        assert!(!is_seen_to_run(&memory, own));
        members.lock_again();
        assert!(is_seen_to_run(&memory, own));
    }

    #[test]
    fn the_first_of_two_regions_is_kept() {
        let _own_locks = OWN_LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
        let (region, members, memory) = members();
        let (other, other_memory) = Region::create().unwrap();
        let kept = members.open(other, other_memory).unwrap();
        assert!(core::ptr::eq(kept, region));
        let own = members.own(region).unwrap();
        assert!(is_seen_to_run(&memory, own));
    }

    #[test]
    fn state_is_own_if_the_kernel_does_not_tell() {
        let (region, members, memory) = members();
        members.own(region).unwrap();
        // A descriptor of the file that has no locks.
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let without_locks = open(path, OFlags::PATH, Mode::empty()).unwrap();
        members.opened().memory.set(Some(without_locks.as_raw_fd()));
        assert!(members.memory().is_some_and(|memory| holder(memory, 1).is_err()));
        assert!(members.is_own_state());
    }

    /// Returns whether another process sees that a member runs.
    fn is_seen_to_run(memory: &OwnedFd, member: u32) -> bool {
        in_child(|| i32::from(matches!(holder(memory, member), Ok(Some(_))))) == Some(1)
    }

    #[test]
    fn numbers_are_not_given_twice() {
        let (region, members, _memory) = members();
        region.use_members(i32::MAX as u32 - 1);
        assert_eq!(members.own(region), Some(i32::MAX as u32));
        members.forget_own();
        assert_eq!(members.own(region), None);
    }
}
