//! The shared region: everything in it is an atomic or a byte that only its writer reads back.
//!
//! `unsafe`: maps memory that other processes write, and copies bytes out of it and into it.
#![allow(unsafe_code)]

use crate::lock::RobustLock;
use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::io;

/// Clients that can be attached.
pub const CLIENTS: usize = 16;
/// Sockets of the domain.
pub const SOCKETS: usize = 64;
/// Bytes of each direction of a socket.
pub const BUFFER_BYTES: usize = 4096;
/// Connections that can be offered to a worker.
pub const OFFERS: usize = 8;
/// A socket is at most once in all rings for being rung, and once for being released.
const BELLS: usize = 2 * SOCKETS;

/// A bell that says that the client holds the socket no longer.
pub const RELEASED: u32 = 1 << 31;

/// An offered connection: nobody's, the worker may take it, the worker took it.
pub mod offer {
    pub const NONE: u32 = 0;
    pub const OFFERED: u32 = 1;
    pub const TAKEN: u32 = 2;
}

/// States that the stack shows.
pub mod state {
    pub const FREE: u32 = 0;
    pub const OPEN: u32 = 1;
}

/// From one client to the stack. The client writes `tail`, the stack `head`.
#[repr(C, align(64))]
pub struct BellRing {
    tail: AtomicU32,
    head: AtomicU32,
    slots: [AtomicU32; BELLS],
}

impl BellRing {
    /// Never full: see [`BELLS`]. A client that breaks the rule overwrites its own bells.
    pub fn push(&self, bell: u32) {
        let tail = self.tail.load(Relaxed);
        self.slots[tail as usize % BELLS].store(bell, Relaxed);
        self.tail.store(tail.wrapping_add(1), Release);
    }

    /// Takes one. Whatever the client wrote, no more than a ring full is taken in a turn.
    pub fn pop(&self) -> Option<u32> {
        let head = self.head.load(Relaxed);
        if head == self.tail.load(Acquire) {
            return None;
        }
        let bell = self.slots[head as usize % BELLS].load(Relaxed);
        self.head.store(head.wrapping_add(1), Release);
        Some(bell)
    }
}

/// What belongs to one client.
#[repr(C, align(64))]
pub struct ClientArea {
    pub bells: BellRing,
    /// Connections that the worker would take now.
    pub credits: AtomicU32,
    /// It sleeps: write to its event descriptor.
    pub sleeps: AtomicU32,
    /// State of each offer; which socket it is stands beside it.
    pub offers: [AtomicU32; OFFERS],
    pub offered: [AtomicU32; OFFERS],
}

/// One socket.
#[repr(C, align(64))]
pub struct Socket {
    // Written by the stack.
    pub state: AtomicU32,
    pub generation: AtomicU32,
    pub received: AtomicU64,
    pub sent: AtomicU64,
    // Written by clients, under the lock.
    pub lock: RobustLock,
    pub read: AtomicU64,
    pub written: AtomicU64,
    /// It is in a ring.
    pub rung: AtomicU32,
    incoming: Bytes,
    outgoing: Bytes,
}

#[repr(C, align(64))]
struct Bytes(UnsafeCell<[u8; BUFFER_BYTES]>);

impl Bytes {
    fn copy_in(&self, at: u64, bytes: &[u8]) {
        for (i, byte) in bytes.iter().enumerate() {
            let index = (at as usize + i) % BUFFER_BYTES;
            // SAFETY: inside of the array; the reader does not look at it before the position moved.
            unsafe { self.0.get().cast::<u8>().add(index).write_volatile(*byte) };
        }
    }

    fn copy_out(&self, at: u64, bytes: &mut [u8]) {
        for (i, byte) in bytes.iter_mut().enumerate() {
            let index = (at as usize + i) % BUFFER_BYTES;
            // SAFETY: inside of the array; a writer that breaks the rules changes the value only.
            *byte = unsafe { self.0.get().cast::<u8>().add(index).read_volatile() };
        }
    }
}

impl Socket {
    /// Client: appends to what the stack is to send. Returns how much. `commit` may end the process.
    pub fn write(&self, bytes: &[u8], commit: impl FnOnce()) -> usize {
        let _guard = self.lock.lock();
        let (at, done) = (self.written.load(Relaxed), self.sent.load(Acquire));
        let room = BUFFER_BYTES - (at - done) as usize;
        let count = room.min(bytes.len());
        self.outgoing.copy_in(at, &bytes[..count]);
        commit();
        self.written.store(at + count as u64, Release);
        count
    }

    /// Client: takes what the stack received. Returns how much.
    pub fn take(&self, bytes: &mut [u8]) -> usize {
        let _guard = self.lock.lock();
        let (at, end) = (self.read.load(Relaxed), self.received.load(Acquire));
        let count = bytes.len().min((end - at) as usize);
        self.incoming.copy_out(at, &mut bytes[..count]);
        self.read.store(at + count as u64, Release);
        count
    }

    /// Stack: takes up to `bytes.len()` bytes that a client wrote. `sent` is the stack's own copy of the position.
    pub fn take_outgoing(&self, sent: u64, bytes: &mut [u8]) -> usize {
        let end = self.written.load(Acquire);
        // Never trusted: a position that cannot be is as good as none.
        let there = end.checked_sub(sent).filter(|n| *n <= BUFFER_BYTES as u64).unwrap_or(0);
        let count = bytes.len().min(there as usize);
        self.outgoing.copy_out(sent, &mut bytes[..count]);
        self.sent.store(sent + count as u64, Release);
        count
    }

    /// Stack: room for what it receives.
    pub fn room(&self, received: u64) -> usize {
        let held = received.checked_sub(self.read.load(Acquire)).filter(|n| *n <= BUFFER_BYTES as u64);
        held.map_or(0, |held| BUFFER_BYTES - held as usize)
    }

    /// Stack: gives bytes for which there is room.
    pub fn give(&self, received: u64, bytes: &[u8]) {
        self.incoming.copy_in(received, bytes);
        self.received.store(received + bytes.len() as u64, Release);
    }
}

/// The whole of it.
#[repr(C, align(4096))]
pub struct Region {
    /// The stack sleeps: write to its event descriptor.
    pub stack_sleeps: AtomicU32,
    pub clients: [ClientArea; CLIENTS],
    pub sockets: [Socket; SOCKETS],
}

// SAFETY: all fields are atomics, locks, or bytes that are reached through raw pointers only.
unsafe impl Sync for Region {}

impl Region {
    /// A region of zeroes, which is a region without clients and sockets. It cannot shrink: nobody can make another's access fail.
    pub fn create() -> io::Result<(&'static Self, OwnedFd)> {
        let fd = memfd_create("ginnel-region", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, size_of::<Self>() as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let region = Self::map(&fd)?;
        for socket in &region.sockets {
            socket.lock.init();
        }
        Ok((region, fd))
    }

    /// Maps the region of a stack for as long as the process lives.
    pub fn map(fd: impl AsFd) -> io::Result<&'static Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of the whole length, which is never unmapped; all bit patterns are valid.
        unsafe {
            let at = mmap(core::ptr::null_mut(), size_of::<Self>(), protection, MapFlags::SHARED, fd, 0)?;
            Ok(&*at.cast())
        }
    }
}
