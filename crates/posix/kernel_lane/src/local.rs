//! Listeners as one process knows them: numbers of descriptors, and how the process uses them. A child has a
//! copy.

use crate::members::Members;
use crate::region::{LISTENERS_MAX, Region, SLOTS_MAX, SharedListener};
use crate::slot_socket::{borrow, cookie, own};
use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use rustix::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::OnceLock;

/// Number of descriptors that can be listeners of the program.
const FDS_MAX: usize = 1 << 16;

/// A descriptor's number, or none. All-zero memory is none.
#[derive(Debug, Default)]
pub struct FdCell(AtomicI32);

impl FdCell {
    /// No number.
    pub const fn new() -> Self {
        Self(AtomicI32::new(0))
    }

    /// Returns the number.
    pub fn get(&self) -> Option<c_int> {
        self.0.load(Ordering::Relaxed).checked_sub(1).filter(|fd| *fd >= 0)
    }

    /// Sets the number.
    pub fn set(&self, fd: Option<c_int>) {
        self.0.store(fd.map_or(0, |fd| fd + 1), Ordering::Relaxed);
    }

    /// Returns the number and forgets it, so that the caller may close the descriptor.
    pub fn take(&self) -> Option<c_int> {
        self.0.swap(0, Ordering::Relaxed).checked_sub(1).filter(|fd| *fd >= 0)
    }
}

/// The process has not accepted from the listener.
pub const UNUSED: u32 = 0;
/// The process accepts from the socket of its slot.
pub const OWN: u32 = 1;
/// The process accepts from the socket that it has inherited.
pub const INHERITED: u32 = 2;

/// A listener of the program in this process.
#[derive(Debug)]
pub struct LocalListener {
    /// The program's descriptor.
    pub fd: FdCell,
    /// `SO_COOKIE` of the socket that the program has listened on.
    pub cookie: AtomicU64,
    /// `SO_COOKIE` of the socket that is at the program's descriptor now.
    pub present_cookie: AtomicU64,
    /// Slot whose socket is at the program's descriptor now. A child inherits both.
    pub present_slot: AtomicUsize,
    /// The backlog that the program has asked for.
    pub backlog: AtomicI32,
    /// [`UNUSED`], [`OWN`] or [`INHERITED`].
    pub usage: AtomicU32,
    /// Becomes readable when a worker leaves connections behind.
    notification: FdCell,
    /// `SO_COOKIE` of the notification.
    notification_cookie: AtomicU64,
    /// The epoll set that has the listener.
    pub epoll: FdCell,
    /// Data of the listener in the epoll set.
    pub epoll_data: AtomicU64,
    /// The sockets of slots.
    pub sockets: [FdCell; SLOTS_MAX],
    /// `SO_COOKIE` of the sockets of slots.
    pub socket_cookies: [AtomicU64; SLOTS_MAX],
    /// Slots whose orphaned sockets are in the epoll set.
    pub watched: [AtomicBool; SLOTS_MAX],
    /// True if any of these is true.
    pub is_watching: AtomicBool,
    /// Number of slots with a socket, or [`SLOTS_MAX`] if no more can be made.
    pub sockets_len: AtomicUsize,
}

impl LocalListener {
    const fn new() -> Self {
        Self {
            fd: FdCell::new(),
            cookie: AtomicU64::new(0),
            present_cookie: AtomicU64::new(0),
            present_slot: AtomicUsize::new(0),
            backlog: AtomicI32::new(0),
            usage: AtomicU32::new(UNUSED),
            notification: FdCell::new(),
            notification_cookie: AtomicU64::new(0),
            epoll: FdCell::new(),
            epoll_data: AtomicU64::new(0),
            sockets: [const { FdCell::new() }; SLOTS_MAX],
            socket_cookies: [const { AtomicU64::new(0) }; SLOTS_MAX],
            watched: [const { AtomicBool::new(false) }; SLOTS_MAX],
            is_watching: AtomicBool::new(false),
            sockets_len: AtomicUsize::new(0),
        }
    }

    /// Returns whether the entry in the shared memory is still that of this listener. Another process may
    /// have freed the entry, and then used it again.
    pub fn is_in(&self, shared: &SharedListener) -> bool {
        let cookie = self.cookie.load(Ordering::Relaxed);
        cookie != 0 && shared.cookie.load(Ordering::Acquire) == cookie
    }

    /// Returns the notification, unless the program has closed it.
    pub fn notification(&self) -> Option<BorrowedFd<'static>> {
        let socket = self.notification.get().and_then(borrow)?;
        (cookie(socket) == self.notification_cookie.load(Ordering::Relaxed)).then_some(socket)
    }

    /// Sets the notification.
    pub fn set_notification(&self, socket: OwnedFd) {
        self.notification_cookie.store(cookie(socket.as_fd()), Ordering::Relaxed);
        self.notification.set(Some(socket.into_raw_fd()));
    }

    /// Returns the notification and forgets it. Another descriptor that has its number now stays open.
    pub fn take_notification(&self) -> Option<OwnedFd> {
        let is_own = self.notification().is_some();
        self.notification.take().filter(|_| is_own).map(own)
    }

    /// Returns the number of slots with a socket.
    pub fn open_sockets(&self) -> usize {
        self.sockets.iter().filter(|socket| socket.get().is_some()).count()
    }

    /// Returns the socket of a slot, unless the program has closed it, as `closefrom` does.
    pub fn socket(&self, slot: usize) -> Option<BorrowedFd<'static>> {
        let socket = self.sockets[slot].get().and_then(borrow)?;
        (cookie(socket) == self.socket_cookies[slot].load(Ordering::Relaxed)).then_some(socket)
    }
}

/// The state of this process.
#[derive(Debug)]
pub struct Process {
    /// Process id, once the program listens. A child of `vfork` has another one, and no tables of its own.
    pub id: AtomicI32,
    /// The shared memory, once the program listens.
    pub region: OnceLock<&'static Region>,
    /// The processes that take part.
    pub members: Members,
    /// The listeners, at the indexes of their entries in the shared memory.
    pub listeners: [LocalListener; LISTENERS_MAX],
    /// Number of listeners that the process has not accepted from.
    pub unused: AtomicUsize,
    /// The slot of this process plus one; zero if it has none.
    pub slot: AtomicUsize,
    /// True in a process that was forked by a program which listens.
    pub is_child: AtomicBool,
    /// Member that has forked this process; zero if there is none.
    pub forker: AtomicU32,
    /// Number of child processes that run.
    pub children: AtomicUsize,
    /// Index of the listener plus one, for each descriptor; zero for all others.
    indexes: [AtomicU8; FDS_MAX],
}

/// The state of this process.
pub static PROCESS: Process = Process {
    id: AtomicI32::new(0),
    region: OnceLock::new(),
    members: Members::new(),
    listeners: [const { LocalListener::new() }; LISTENERS_MAX],
    unused: AtomicUsize::new(0),
    slot: AtomicUsize::new(0),
    is_child: AtomicBool::new(false),
    forker: AtomicU32::new(0),
    children: AtomicUsize::new(0),
    indexes: [const { AtomicU8::new(0) }; FDS_MAX],
};

impl Process {
    /// Returns the listener at a descriptor, with its index.
    #[inline]
    pub fn listener(&self, fd: c_int) -> Option<(usize, &LocalListener)> {
        let index = self.indexes.get(usize::try_from(fd).ok()?)?.load(Ordering::Relaxed).checked_sub(1)?;
        self.listeners.get(usize::from(index)).map(|listener| (usize::from(index), listener))
    }

    /// Records which listener a descriptor is. Returns false if the number of the descriptor is too large.
    pub fn mark(&self, fd: c_int, index: Option<usize>) -> bool {
        let value = index.map_or(0, |index| index as u8 + 1);
        let entry = usize::try_from(fd).ok().and_then(|fd| self.indexes.get(fd));
        entry.map(|entry| entry.store(value, Ordering::Relaxed)).is_some()
    }

    /// Returns whether [`mark`](Self::mark) can record a descriptor.
    pub fn can_mark(&self, fd: c_int) -> bool {
        usize::try_from(fd).is_ok_and(|fd| fd < FDS_MAX)
    }

    /// Returns the listeners that this process has, with their indexes.
    pub fn open_listeners(&self) -> impl Iterator<Item = (usize, &LocalListener)> {
        self.listeners.iter().enumerate().filter(|(_, listener)| listener.fd.get().is_some())
    }

    /// Returns the slot of this process.
    pub fn slot(&self) -> Option<usize> {
        self.slot.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Computes the number of listeners that the process has not accepted from.
    pub fn count_unused(&self) {
        let is_unused = |listener: &LocalListener| listener.usage.load(Ordering::Relaxed) == UNUSED;
        let count = self.open_listeners().filter(|(_, listener)| is_unused(listener)).count();
        self.unused.store(count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{LocalListener, PROCESS};
    use crate::notification;
    use crate::region::Region;
    use core::sync::atomic::Ordering;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fd::{AsRawFd, IntoRawFd};

    #[test]
    fn a_foreign_descriptor_is_no_notification() {
        let local = LocalListener::new();
        local.set_notification(notification::create().unwrap());
        assert!(local.notification().is_some());
        // The program has closed the number and got it for a descriptor of its own.
        drop(local.take_notification().unwrap());
        let foreign = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        local.notification.set(Some(foreign.as_raw_fd()));
        assert!(local.notification().is_none());
        assert!(local.take_notification().is_none());
        assert!(rustix::io::fcntl_getfd(&foreign).is_ok(), "it stays open");
        let other = notification::create().unwrap();
        local.notification.set(Some(other.into_raw_fd()));
        assert!(local.notification().is_none(), "another socket");
    }

    #[test]
    fn an_entry_that_is_used_again_is_foreign() {
        let (region, _memory) = Region::create().unwrap();
        let (shared, local) = (&region.listeners[0], LocalListener::new());
        assert!(!local.is_in(shared), "both have no cookie");
        local.cookie.store(9, Ordering::Relaxed);
        shared.fill(9, 1, "10.0.0.1:80".parse().unwrap());
        assert!(local.is_in(shared));
        shared.fill(10, 1, "10.0.0.1:80".parse().unwrap());
        assert!(!local.is_in(shared));
    }

    #[test]
    fn only_marked_descriptors_are_listeners() {
        let index = |fd| PROCESS.listener(fd).map(|(index, _)| index);
        assert_eq!(index(65_000), None);
        assert!(PROCESS.mark(65_000, Some(7)));
        assert_eq!([65_000, 64_999, -1, 1 << 16].map(index), [Some(7), None, None, None]);
        assert!(PROCESS.mark(65_000, None));
        assert_eq!(index(65_000), None);
        assert!(!PROCESS.mark(-1, Some(0)) && !PROCESS.mark(1 << 16, Some(0)));
        assert_eq!([65_000, -1, 1 << 16].map(|fd| PROCESS.can_mark(fd)), [true, false, false]);
    }
}
