//! The memory that all processes of a program share: its listeners, and which worker has which slot.
#![allow(unsafe_code)] // maps memory that other processes write

use crate::members::Members;
use crate::steering::{INSTRUCTIONS_MAX, Instruction};
use core::cell::UnsafeCell;
use core::ops::Deref;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use core::time::Duration;
use ginnel_devices::memory_file;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::process::{Pid, test_kill_process};
use rustix::time::{ClockId, clock_gettime};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Maximum number of listeners of a program; further ones stay as they are.
pub const LISTENERS_MAX: usize = 64;
/// Maximum number of workers with listeners of their own; further ones share those of slot 0.
pub const SLOTS_MAX: usize = 256;
/// Name of the memory in `/proc/PID/fd`.
pub const NAME: &str = "ginnel-listeners";
/// First word of the memory. It changes with the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"gnlKLN03");

/// Longest time to wait for the lock, in whole seconds.
const LOCK_SECONDS_MAX: u64 = 10;

/// Time between two attempts to take the lock.
const LOCK_INTERVAL: Duration = Duration::from_micros(100);

/// Returns the seconds of the monotonic clock.
pub fn seconds() -> u64 {
    clock_gettime(ClockId::Monotonic).tv_sec as u64
}

/// The slot of a worker. All-zero memory is a free slot.
#[derive(Debug)]
#[repr(C)]
pub struct Slot {
    /// The worker's number among the members; zero if there is none. While a member frees the slot of a
    /// worker that has ended, the negative number of that member.
    pub worker: AtomicI32,
    /// CPU of the worker plus one; zero if the worker has no CPU of its own.
    cpu: AtomicU32,
}

impl Slot {
    /// Returns the CPU of the worker.
    pub fn cpu(&self) -> Option<u32> {
        self.cpu.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Sets the CPU of the worker.
    pub fn set_cpu(&self, cpu: Option<u32>) {
        self.cpu.store(cpu.map_or(0, |cpu| cpu + 1), Ordering::Relaxed);
    }
}

/// The socket of one slot for one listener.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct SlotSocket {
    /// Index in the kernel's `SO_REUSEPORT` group plus one; zero while the socket does not listen.
    group_index: AtomicU32,
    /// 1 if the worker of the slot accepts from the socket.
    pub is_active: AtomicU32,
    /// 1 if the worker has left, so that connections in the queue wait for another one.
    pub is_orphan: AtomicU32,
    /// 1 if processes that have no slot may accept from the socket.
    pub is_inherited: AtomicU32,
    /// Seconds of the monotonic clock after which an orphan with an empty queue gets no connection any more.
    pub retires_at: AtomicU64,
    /// Connections that were accepted from the socket.
    pub accepted: AtomicU64,
}

impl SlotSocket {
    /// Returns the index in the kernel's group; `None` while the socket does not listen.
    pub fn group_index(&self) -> Option<u32> {
        self.group_index.load(Ordering::Relaxed).checked_sub(1)
    }
}

/// A listener of the program. All-zero memory is a free entry.
#[derive(Debug)]
#[repr(C)]
pub struct SharedListener {
    /// `SO_COOKIE` of the program's own socket; zero if the entry is free.
    pub cookie: AtomicU64,
    /// The member that keeps the sockets of all slots.
    pub owner: AtomicU32,
    /// 1 if the owner has closed the listener; the entry is freed when no worker uses it.
    pub is_closed: AtomicU32,
    /// Number of sockets that have joined the kernel's group.
    group_len: AtomicU32,
    /// Number of orphaned sockets.
    pub orphans: AtomicU32,
    port: AtomicU32,
    is_ipv6: AtomicU32,
    address: [AtomicU64; 2],
    /// The sockets of all slots; that of slot 0 is the program's own.
    pub sockets: [SlotSocket; SLOTS_MAX],
}

impl SharedListener {
    /// Fills a free entry. The program's own socket is the first of the kernel's group.
    pub fn fill(&self, cookie: u64, owner: u32, address: SocketAddr) {
        for socket in &self.sockets {
            socket.group_index.store(0, Ordering::Relaxed);
            socket.is_active.store(0, Ordering::Relaxed);
            socket.is_orphan.store(0, Ordering::Relaxed);
            socket.is_inherited.store(0, Ordering::Relaxed);
            socket.accepted.store(0, Ordering::Relaxed);
        }
        self.sockets[0].group_index.store(1, Ordering::Relaxed);
        self.group_len.store(1, Ordering::Relaxed);
        self.orphans.store(0, Ordering::Relaxed);
        self.is_closed.store(0, Ordering::Relaxed);
        self.owner.store(owner, Ordering::Relaxed);
        let bits = match address.ip() {
            IpAddr::V4(ip) => u128::from(ip.to_bits()),
            IpAddr::V6(ip) => ip.to_bits(),
        };
        self.port.store(u32::from(address.port()), Ordering::Relaxed);
        self.is_ipv6.store(u32::from(address.is_ipv6()), Ordering::Relaxed);
        self.address[0].store(bits as u64, Ordering::Relaxed);
        self.address[1].store((bits >> 64) as u64, Ordering::Relaxed);
        self.cookie.store(cookie, Ordering::Release);
    }

    /// Returns the address that the listener is bound to.
    pub fn address(&self) -> SocketAddr {
        let word = |number: usize| u128::from(self.address[number].load(Ordering::Relaxed));
        let bits = word(0) | word(1) << 64;
        let ip: IpAddr = if self.is_ipv6.load(Ordering::Relaxed) == 0 {
            Ipv4Addr::from_bits(bits as u32).into()
        } else {
            Ipv6Addr::from_bits(bits).into()
        };
        SocketAddr::new(ip, self.port.load(Ordering::Relaxed) as u16)
    }

    /// Records that the socket of a slot has begun to listen, so that the kernel has added it to the group.
    pub fn join_group(&self, slot: usize) {
        let index = self.group_len.fetch_add(1, Ordering::Relaxed);
        self.sockets[slot].group_index.store(index + 1, Ordering::Relaxed);
    }

    /// Frees the entry if the owner has closed the listener and no worker uses it.
    pub fn free_if_unused(&self) {
        let is_used = self.sockets.iter().any(|socket| socket.is_active.load(Ordering::Relaxed) != 0);
        if self.is_closed.load(Ordering::Relaxed) != 0 && !is_used {
            self.cookie.store(0, Ordering::Release);
        }
    }
}

/// The shared memory.
#[repr(C)]
pub struct Region {
    magic: AtomicU64,
    /// The holder of the lock: its number among the members, and in the low half the id of its thread in its
    /// own PID namespace. Zero if the lock is free.
    lock: AtomicU64,
    /// The highest number of a member so far.
    members: AtomicU32,
    /// 1 if the BPF programs of the listeners' groups must be written again.
    pub is_stale: AtomicU32,
    /// Number of slots that have been used or prepared.
    slots_len: AtomicU32,
    /// The slots of all workers.
    pub slots: [Slot; SLOTS_MAX],
    /// The listeners.
    pub listeners: [SharedListener; LISTENERS_MAX],
    /// Space for a BPF program of a listener's group; only the holder of the lock uses it.
    program: UnsafeCell<[Instruction; INSTRUCTIONS_MAX]>,
}

// SAFETY: all fields are atomic but the program, which only the holder of the lock uses.
unsafe impl Sync for Region {}

impl core::fmt::Debug for Region {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Region").finish_non_exhaustive()
    }
}

impl Region {
    /// Creates the memory. It is never unmapped, because signal handlers may use it at any time. Returns the
    /// descriptor by which `ginnel listeners` finds the memory.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn create() -> io::Result<(&'static Self, OwnedFd)> {
        let memory = memory_file::create(NAME, size_of::<Self>(), MemfdFlags::ALLOW_SEALING)?;
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW)?;
        let region = Self::map(&memory, ProtFlags::READ | ProtFlags::WRITE)?;
        region.magic.store(MAGIC, Ordering::Release);
        Ok((region, memory))
    }

    /// Maps the memory of another program, to read it. The memory stays mapped.
    ///
    /// # Errors
    /// The kernel's error, or that the descriptor is no such memory.
    pub fn open(memory: impl AsFd) -> io::Result<&'static Self> {
        let size = u64::try_from(fstat(&memory)?.st_size).unwrap_or_default();
        let seals = fcntl_get_seals(&memory)?;
        if size != size_of::<Self>() as u64 || !seals.contains(SealFlags::SHRINK) {
            return Err(io::Error::other("another version of Ginnel made this memory"));
        }
        let region = Self::map(&memory, ProtFlags::READ)?;
        if region.magic.load(Ordering::Acquire) != MAGIC {
            return Err(io::Error::other("another version of Ginnel made this memory"));
        }
        Ok(region)
    }

    fn map(memory: impl AsFd, protection: ProtFlags) -> io::Result<&'static Self> {
        let size = size_of::<Self>();
        // SAFETY: the kernel chooses an address that nothing uses.
        let at = unsafe { mmap(core::ptr::null_mut(), size, protection, MapFlags::SHARED, &memory, 0) }?;
        // SAFETY: the memory has this size, which the seals keep, and the alignment of a page; atomics allow
        // all values and changes by other processes. A mapping without write permission is only read.
        Ok(unsafe { &*at.cast::<Self>() })
    }

    /// Returns the number of slots that have been used or prepared.
    pub fn slots_len(&self) -> usize {
        (self.slots_len.load(Ordering::Relaxed) as usize).min(SLOTS_MAX)
    }

    /// Raises the number of slots to `len` if it is lower.
    pub fn raise_slots_len(&self, len: usize) {
        self.slots_len.fetch_max(len as u32, Ordering::Relaxed);
    }

    /// Returns a number for a new member; `None` if all numbers were given.
    pub fn next_member(&self) -> Option<u32> {
        let next = |last: u32| last.checked_add(1).filter(|number| i32::try_from(*number).is_ok());
        self.members.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok().and_then(next)
    }

    /// Takes the lock for the member `own`, which is this process, if it is free or its holder has died.
    ///
    /// # Errors
    /// The lock is held.
    pub fn try_lock(&'static self, own: u32, members: &Members) -> Result<LockedRegion, Contention> {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let word = u64::from(own) << 32 | u64::from(thread.cast_unsigned());
        match self.lock.compare_exchange(0, word, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(LockedRegion(self)),
            Err(holder) if holder == word => Err(Contention::Interrupted),
            Err(holder) => {
                let member = (holder >> 32) as u32;
                let died = if member == own {
                    // A thread of this process, so its id means the same here.
                    let thread = Pid::from_raw((holder as u32).cast_signed());
                    thread.is_some_and(|thread| test_kill_process(thread) == Err(Errno::SRCH))
                } else {
                    !members.is_running(member)
                };
                let exchanged =
                    || self.lock.compare_exchange(holder, word, Ordering::Acquire, Ordering::Relaxed);
                if died && exchanged().is_ok() { Ok(LockedRegion(self)) } else { Err(Contention::Other) }
            }
        }
    }

    /// Waits for the lock. Returns `None` in a process that is no member, in a signal handler that has
    /// interrupted the holder, and after [`LOCK_SECONDS_MAX`]: a holder that was stopped must not stop the
    /// others.
    pub fn lock(&'static self, members: &Members) -> Option<LockedRegion> {
        let own = members.own(self)?;
        let deadline = seconds() + LOCK_SECONDS_MAX;
        loop {
            match self.try_lock(own, members) {
                Ok(locked) => return Some(locked),
                Err(Contention::Interrupted) => return None,
                Err(Contention::Other) if seconds() > deadline => return None,
                Err(Contention::Other) => std::thread::sleep(LOCK_INTERVAL),
            }
        }
    }
}

#[cfg(test)]
impl Region {
    /// Marks the member numbers up to `last` as given, although no member has them.
    pub fn use_members(&self, last: u32) {
        self.members.store(last, Ordering::Relaxed);
    }
}

/// Why the lock was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contention {
    /// The calling thread holds the lock: this is a signal handler.
    Interrupted,
    /// Another thread holds the lock.
    Other,
}

/// The locked memory. Dropping the value unlocks it.
#[derive(Debug)]
pub struct LockedRegion(&'static Region);

impl LockedRegion {
    /// Returns the space for a BPF program.
    pub fn program(&mut self) -> &mut [Instruction] {
        // SAFETY: the lock is held, and the borrow of this value ends before the lock is released.
        unsafe { &mut *self.0.program.get() }
    }
}

impl Deref for LockedRegion {
    type Target = Region;

    fn deref(&self) -> &Region {
        self.0
    }
}

impl Drop for LockedRegion {
    fn drop(&mut self) {
        self.0.lock.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::tests::MemberProcess;
    use rustix::fs::{ftruncate, memfd_create};

    #[test]
    fn another_mapping_sees_the_listeners() {
        let (region, memory) = Region::create().unwrap();
        let address = "[2001:db8::7]:443".parse().unwrap();
        region.listeners[3].fill(9, 1234, address);
        region.listeners[3].join_group(2);
        let reader = Region::open(&memory).unwrap();
        let listener = &reader.listeners[3];
        assert_eq!(listener.address(), address);
        assert_eq!(listener.sockets[0].group_index(), Some(0));
        assert_eq!(listener.sockets[2].group_index(), Some(1));
        assert_eq!(listener.sockets[1].group_index(), None);
    }

    #[test]
    fn foreign_memory_is_refused() {
        let memory = memfd_create(NAME, MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(Region::open(&memory).is_err());
        ftruncate(&memory, size_of::<Region>() as u64).unwrap();
        assert!(Region::open(&memory).is_err(), "it could shrink");
        fcntl_add_seals(&memory, SealFlags::SHRINK).unwrap();
        assert!(Region::open(&memory).is_err(), "the magic is missing");
    }

    #[test]
    fn the_lock_of_a_dead_thread_is_taken() {
        let (region, memory) = Region::create().unwrap();
        let members: &'static Members = Box::leak(Box::new(Members::new()));
        members.open(region, memory).unwrap();
        let own = members.own(region).unwrap();
        let locked = region.lock(members).unwrap();
        assert_eq!(region.try_lock(own, members).unwrap_err(), Contention::Interrupted);
        let try_lock = move || region.try_lock(own, members).unwrap_err();
        assert_eq!(std::thread::spawn(try_lock).join().unwrap(), Contention::Other);
        drop(locked);
        std::thread::spawn(|| core::mem::forget(region.lock(members).unwrap())).join().unwrap();
        assert!(region.lock(members).is_some());
    }

    #[test]
    fn the_lock_of_a_running_member_is_kept() {
        let (region, memory) = Region::create().unwrap();
        let members = Members::new();
        members.open(region, memory.try_clone().unwrap()).unwrap();
        let own = members.own(region).unwrap();
        let other = region.next_member().unwrap();
        let mut process = MemberProcess::start(&memory, other);
        // The thread of a member of another PID namespace may have the id of this one.
        let thread = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
        region.lock.store(u64::from(other) << 32 | u64::from(thread), Ordering::Relaxed);
        assert_eq!(region.try_lock(own, &members).unwrap_err(), Contention::Other);
        // There is no such thread here.
        region.lock.store(u64::from(other) << 32 | u64::from(i32::MAX as u32), Ordering::Relaxed);
        assert_eq!(region.try_lock(own, &members).unwrap_err(), Contention::Other);
        process.kill();
        assert!(region.try_lock(own, &members).is_ok());
    }

    #[test]
    fn an_entry_is_freed_after_its_last_worker() {
        let (region, _memory) = Region::create().unwrap();
        let listener = &region.listeners[0];
        listener.fill(9, 1, "10.0.0.1:80".parse().unwrap());
        listener.sockets[1].is_active.store(1, Ordering::Relaxed);
        listener.free_if_unused();
        listener.is_closed.store(1, Ordering::Relaxed);
        listener.free_if_unused();
        assert_eq!(listener.cookie.load(Ordering::Relaxed), 9);
        listener.sockets[1].is_active.store(0, Ordering::Relaxed);
        listener.free_if_unused();
        assert_eq!(listener.cookie.load(Ordering::Relaxed), 0);
    }
}
