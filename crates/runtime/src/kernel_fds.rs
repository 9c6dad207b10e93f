//! Kernel descriptors of an application, such as pipes and Unix sockets: the shard watches them together with
//! its devices.
//!
//! The descriptors have an epoll instance of their own, which the shard adds to what it sleeps on. A shard
//! that does not sleep polls that instance at most once per `BUSY_POLL_INTERVAL`. A shard without registered
//! descriptors does neither.

use crate::context::{Context, ShardCore};
use crate::handler::Handler;
use crate::wait::borrow_registered;
use arrayvec::ArrayVec;
use core::mem::MaybeUninit;
use core::time::Duration;
use ginnel_stack::error::Stale;
use ginnel_stack::time::Instant;
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use std::collections::HashMap;

/// Interval at which a shard that does not sleep polls its kernel descriptors.
const BUSY_POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Descriptors reported per poll; further ones follow in the next turn.
const EVENTS_PER_POLL_MAX: usize = 64;

/// Says what a handler wants to know about a kernel descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interest {
    /// True to report that the descriptor is readable, or that its other end is closed.
    pub read: bool,
    /// True to report that the descriptor is writable.
    pub write: bool,
    /// True to report a state once, when it begins (`EPOLLET`): the handler then reads or writes until the
    /// kernel returns `EAGAIN`. False to report it in each turn as long as it lasts.
    pub edge_triggered: bool,
}

impl Interest {
    /// Reports nothing.
    pub const NONE: Self = Self { read: false, write: false, edge_triggered: false };
    /// Reports that the descriptor is readable, as long as it is.
    pub const READ: Self = Self { read: true, ..Self::NONE };
    /// Reports that the descriptor is writable, as long as it is.
    pub const WRITE: Self = Self { write: true, ..Self::NONE };
    /// Reports once that the descriptor became readable or writable.
    pub const EDGES: Self = Self { read: true, write: true, edge_triggered: true };

    fn flags(self) -> epoll::EventFlags {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN | epoll::EventFlags::RDHUP, self.read);
        flags.set(epoll::EventFlags::OUT, self.write);
        // Without any interest the kernel still reports errors and hang-ups, and would do so in each poll.
        flags.set(epoll::EventFlags::ET, self.edge_triggered || !(self.read || self.write));
        flags
    }
}

/// The state of a kernel descriptor. Errors and hang-ups set both fields that the handler is interested in:
/// reading or writing then returns the error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Reading does not block.
    pub readable: bool,
    /// Writing does not block.
    pub writable: bool,
}

impl Readiness {
    fn new(flags: epoll::EventFlags, interest: Interest) -> Self {
        use epoll::EventFlags as Flags;
        let ended = Flags::ERR | Flags::HUP;
        Self {
            readable: interest.read && flags.intersects(Flags::IN | Flags::RDHUP | ended),
            writable: interest.write && flags.intersects(Flags::OUT | ended),
        }
    }
}

/// A handle to a registered kernel descriptor: see [`Context::register_kernel_fd`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelFd {
    fd: RawFd,
    generation: u32,
}

impl KernelFd {
    /// Returns the handle as a number: the data that the kernel keeps with the descriptor.
    pub const fn to_bits(self) -> u64 {
        // A descriptor is not negative.
        (self.generation as u64) << 32 | self.fd.cast_unsigned() as u64
    }

    /// Returns the handle that [`to_bits`](Self::to_bits) has converted. Any other number is a stale handle.
    pub const fn from_bits(bits: u64) -> Self {
        Self { fd: (bits as u32).cast_signed(), generation: (bits >> 32) as u32 }
    }

    fn data(self) -> epoll::EventData {
        epoll::EventData::new_u64(self.to_bits())
    }
}

#[derive(Debug)]
struct KernelFdEntry {
    generation: u32,
    token: u64,
    interest: Interest,
}

/// The kernel descriptors of a shard's application.
#[derive(Debug)]
pub(crate) struct KernelFds {
    set: OwnedFd,
    /// By number.
    entries: HashMap<RawFd, KernelFdEntry>,
    last_generation: u32,
    /// Result of the last poll; those before `next` were delivered.
    ready: ArrayVec<(KernelFd, epoll::EventFlags), EVENTS_PER_POLL_MAX>,
    next: usize,
    last_poll: Instant,
    /// True if a sleep ended because one of the descriptors is ready.
    is_ready: bool,
}

impl KernelFds {
    fn new() -> Result<Self, Errno> {
        Ok(Self {
            set: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            entries: HashMap::new(),
            last_generation: 0,
            ready: ArrayVec::new(),
            next: 0,
            last_poll: Instant::ZERO,
            is_ready: false,
        })
    }

    /// Returns whether no descriptor is registered.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Registers a descriptor in a shard's set, which the first one creates.
    pub(crate) fn register(
        slot: &mut Option<Box<Self>>,
        fd: BorrowedFd<'_>,
        interest: Interest,
        token: u64,
    ) -> Result<KernelFd, Errno> {
        let this = match slot {
            Some(this) => this,
            None => slot.insert(Box::new(Self::new()?)),
        };
        this.last_generation = this.last_generation.wrapping_add(1);
        let handle = KernelFd { fd: fd.as_raw_fd(), generation: this.last_generation };
        epoll::add(&this.set, fd, handle.data(), interest.flags())?;
        // An earlier entry of this number belongs to a descriptor that was closed without being deregistered:
        // its handle becomes stale.
        this.entries.insert(handle.fd, KernelFdEntry { generation: handle.generation, token, interest });
        Ok(handle)
    }

    /// Changes the interest in a descriptor.
    pub(crate) fn modify(&mut self, handle: KernelFd, interest: Interest) -> Result<(), Errno> {
        let entry = self.entries.get_mut(&handle.fd).filter(|entry| entry.generation == handle.generation);
        let entry = entry.ok_or(Errno::NOENT)?;
        epoll::modify(&self.set, borrow_registered(&handle.fd), handle.data(), interest.flags())?;
        entry.interest = interest;
        Ok(())
    }

    /// Removes a descriptor, also one that was closed. Nothing is reported about it any more.
    pub(crate) fn deregister(&mut self, handle: KernelFd) -> Result<(), Stale> {
        if self.entry(handle).is_none() {
            return Err(Stale::Handle);
        }
        self.entries.remove(&handle.fd);
        // Fails if the descriptor was closed; the kernel has removed it then, too.
        let _ = epoll::delete(&self.set, borrow_registered(&handle.fd));
        Ok(())
    }

    fn entry(&self, handle: KernelFd) -> Option<&KernelFdEntry> {
        self.entries.get(&handle.fd).filter(|entry| entry.generation == handle.generation)
    }

    /// Returns the descriptor that is readable while a registered one is ready; `None` if none is registered.
    pub(crate) fn wake_fd(&self) -> Option<RawFd> {
        (!self.entries.is_empty()).then(|| self.set.as_raw_fd())
    }

    /// Records that [`wake_fd`](Self::wake_fd) ended a sleep.
    pub(crate) fn set_ready(&mut self) {
        self.is_ready = true;
    }

    /// Asks the kernel which descriptors are ready, unless it was asked a moment ago.
    fn poll(&mut self, now: Instant) -> Result<(), Errno> {
        if self.next < self.ready.len() {
            // The last call has left some.
            return Ok(());
        }
        let is_due = self.is_ready || now.saturating_since(self.last_poll) >= BUSY_POLL_INTERVAL;
        if self.entries.is_empty() || !is_due {
            return Ok(());
        }
        (self.last_poll, self.is_ready, self.next) = (now, false, 0);
        self.ready.clear();
        let mut events = [MaybeUninit::uninit(); EVENTS_PER_POLL_MAX];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.set, &mut events[..], Some(&at_once)) {
            Ok((events, _)) => {
                let ready = |event: &epoll::Event| (KernelFd::from_bits(event.data.u64()), event.flags);
                self.ready.extend(events.iter().map(ready));
                Ok(())
            }
            Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns the next ready descriptor that is still registered, and still of interest: its token and its
    /// state.
    fn next_ready(&mut self) -> Option<(u64, Readiness)> {
        loop {
            let &(handle, flags) = self.ready.get(self.next)?;
            self.next += 1;
            let Some(entry) = self.entry(handle) else { continue };
            let readiness = Readiness::new(flags, entry.interest);
            if readiness != Readiness::default() {
                return Some((entry.token, readiness));
            }
        }
    }
}

/// Reports ready descriptors to the handler. Returns how many.
#[cold]
#[inline(never)]
pub(crate) fn deliver<H: Handler>(
    core: &mut ShardCore,
    handler: &mut H,
    now: Instant,
) -> Result<usize, crate::Error> {
    if let Some(fds) = &mut core.kernel_fds {
        fds.poll(now).map_err(|error| crate::Error::io("epoll of the kernel descriptors", error))?;
    }
    let mut count = 0;
    // The handler may register and deregister descriptors.
    while let Some((token, readiness)) = core.kernel_fds.as_mut().and_then(|fds| fds.next_ready()) {
        count += 1;
        handler.kernel_ready(&mut Context::new(core), token, readiness);
        if core.must_look_at_devices() {
            // The others follow in the next turn.
            break;
        }
    }
    Ok(count)
}
