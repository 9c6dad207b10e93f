//! Actions around the calls of the program: the hooks of libc call these functions.

use crate::errno::ErrnoGuard;
use crate::local::{INHERITED, LocalListener, OWN, PROCESS, UNUSED};
use crate::mode::Mode;
use crate::note::note;
use crate::notification;
use crate::region::{LISTENERS_MAX, Region, SLOTS_MAX, SharedListener, SlotSocket};
use crate::slot_socket::{self, borrow, cookie};
use crate::worker::{self, locked};
use core::ffi::{c_int, c_uint};
use core::sync::atomic::Ordering;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::{AsRawFd, BorrowedFd, IntoRawFd};
use rustix::process::getpid;
use std::io;
use std::sync::OnceLock;

/// Least number of slots that are prepared at once; the number of CPUs if that is larger.
const SLOTS_AT_ONCE: usize = 8;
/// Number of connections of a slot after which its worker looks for other workers that have died.
const CONNECTIONS_BETWEEN_CHECKS: u64 = 1024;

/// Returns the mode of this program; `None` if nothing is changed.
pub(crate) fn mode() -> Option<Mode> {
    static MODE: OnceLock<Option<Mode>> = OnceLock::new();
    *MODE.get_or_init(Mode::of_environment)
}

/// Returns whether the descriptor is a listener that workers may replace by one of their own.
#[inline]
pub fn is_listener(fd: c_int) -> bool {
    PROCESS.listener(fd).is_some()
}

/// Returns the listener at a descriptor and its entry in the shared memory.
fn shared_listener(fd: c_int) -> Option<(&'static LocalListener, &'static Region, &'static SharedListener)> {
    let (index, local) = PROCESS.listener(fd)?;
    let region = *PROCESS.region.get()?;
    let shared = &region.listeners[index];
    local.is_in(shared).then_some((local, region, shared))
}

/// Prepares a call of `listen`: allows further sockets on the address. Returns false if nothing changes for
/// this socket. The socket was bound without `SO_REUSEPORT`, so `bind` has failed if the address was in use.
pub fn listening_begins(fd: c_int) -> bool {
    mode().is_some() && share_address(fd)
}

/// Allows further sockets on the address of a socket that will have an entry in the shared memory. The kernel
/// remembers the option for the port from `listen` on, also if the option is cleared later.
fn share_address(fd: c_int) -> bool {
    let _errno = ErrnoGuard::new();
    let Some(socket) = borrow(fd).filter(|socket| slot_socket::is_suitable(*socket)) else { return false };
    let has_entry = |region| PROCESS.listener(fd).is_some() || free_entry(region, fd).is_some();
    region().is_some_and(has_entry) && slot_socket::set_shared(socket, true).is_ok()
}

/// Undoes [`listening_begins`] after `listen` has failed.
pub fn listening_failed(fd: c_int) {
    if let Some(socket) = borrow(fd) {
        let _ = slot_socket::set_shared(socket, false);
    }
}

/// Records a listener after `listen` has succeeded. `is_new` is what [`listening_begins`] has returned.
pub fn listening(fd: c_int, backlog: c_int, is_new: bool) {
    let _errno = ErrnoGuard::new();
    if !is_new {
        if let Some((_, local)) = PROCESS.listener(fd) {
            local.backlog.store(backlog, Ordering::Relaxed);
        }
        return;
    }
    let Some(region) = region() else { return };
    if PROCESS.members.is_unnoticed_child() {
        after_fork_child();
    }
    PROCESS.id.store(getpid().as_raw_nonzero().get(), Ordering::Relaxed);
    if let Some((index, local)) = PROCESS.listener(fd) {
        // The program has closed the previous listener at this number in a way that was not seen.
        forget(index, local);
    }
    locked(region, |_| register(region, fd, backlog));
}

/// Returns the shared memory, which the first listener creates.
fn region() -> Option<&'static Region> {
    if let Some(region) = PROCESS.region.get() {
        return Some(region);
    }
    let created = Region::create();
    // Of two threads that listen for the first time at once, both get the region of one.
    match created.and_then(|(region, memory)| PROCESS.members.open(region, slot_socket::hide(memory)?)) {
        Ok(region) => Some(*PROCESS.region.get_or_init(|| region)),
        Err(error) => {
            note(format_args!("workers share their listeners: shared memory: {error}"));
            None
        }
    }
}

/// Returns the index of a free entry for a listener. Notes why there is none.
fn free_entry(region: &Region, fd: c_int) -> Option<usize> {
    let address = slot_socket::address(borrow(fd)?).ok()?;
    if !PROCESS.can_mark(fd) {
        note(format_args!("{address}: workers share this listener: its descriptor is {fd}"));
        return None;
    }
    let is_free = |index: &usize| {
        let is_unused = PROCESS.listeners[*index].fd.get().is_none();
        is_unused && region.listeners[*index].cookie.load(Ordering::Acquire) == 0
    };
    let index = (0..LISTENERS_MAX).find(is_free);
    if index.is_none() {
        note(format_args!("{address}: workers share this listener: there are {LISTENERS_MAX} others"));
    }
    index
}

fn register(region: &'static Region, fd: c_int, backlog: c_int) {
    let Some(socket) = borrow(fd) else { return };
    let Ok(address) = slot_socket::address(socket) else { return };
    // `listening_begins` has found an entry; another process may have taken it.
    let Some(index) = free_entry(region, fd).filter(|index| PROCESS.mark(fd, Some(*index))) else { return };
    let local = &PROCESS.listeners[index];
    let cookie = cookie(socket);
    local.fd.set(Some(fd));
    local.cookie.store(cookie, Ordering::Relaxed);
    local.present_cookie.store(cookie, Ordering::Relaxed);
    local.backlog.store(backlog, Ordering::Relaxed);
    local.usage.store(UNUSED, Ordering::Relaxed);
    local.present_slot.store(0, Ordering::Relaxed);
    local.sockets_len.store(0, Ordering::Relaxed);
    region.listeners[index].fill(cookie, PROCESS.members.present().unwrap_or_default(), address);
    PROCESS.count_unused();
}

/// Called before the process accepts from a listener or waits for its connections. At the first call for a
/// listener, the process takes a slot unless it has one, and the socket of that slot takes the place of the
/// one at `fd`.
#[inline]
pub fn use_listener(fd: c_int) {
    if let Some((index, local)) = PROCESS.listener(fd)
        && local.usage.load(Ordering::Relaxed) == UNUSED
    {
        let _errno = ErrnoGuard::new();
        if PROCESS.members.is_unnoticed_child() {
            after_fork_child();
        }
        worker::begin(index, local);
    }
}

/// Calls [`use_listener`] for all descriptors, unless the process has no unused listener.
#[inline]
pub fn use_all_in(fds: impl Iterator<Item = c_int>) {
    if PROCESS.unused.load(Ordering::Relaxed) != 0 {
        fds.for_each(use_listener);
    }
}

/// Accepts a connection that a worker has left in its accept queue: calls `accept` with the socket of that
/// worker. Returns the new descriptor, or `None` if no connection was accepted.
pub fn accept_waiting(fd: c_int, accept: impl Fn(c_int) -> c_int) -> Option<c_int> {
    let (local, region, shared) = shared_listener(fd)?;
    let is_watching = local.is_watching.load(Ordering::Relaxed);
    if shared.orphans.load(Ordering::Acquire) == 0 && !is_watching {
        return None;
    }
    let _errno = ErrnoGuard::new();
    let mut still_watching = false;
    let mut accepted = None;
    for slot in 0..region.slots_len() {
        let entry = &shared.sockets[slot];
        if entry.is_orphan.load(Ordering::Acquire) == 0 {
            if local.watched[slot].swap(false, Ordering::Relaxed) {
                watch_slot(local, slot, false);
            }
            continue;
        }
        let Some(socket) = local.socket(slot) else { continue };
        let present = local.present_cookie.load(Ordering::Relaxed);
        if local.socket_cookies[slot].load(Ordering::Relaxed) == present {
            // The process accepts from this socket anyway.
            worker::retire(shared, slot);
            continue;
        }
        if !local.watched[slot].load(Ordering::Relaxed) && watch_slot(local, slot, true) {
            local.watched[slot].store(true, Ordering::Relaxed);
        }
        still_watching |= local.watched[slot].load(Ordering::Relaxed);
        if accepted.is_none() {
            if slot_socket::has_connection(socket) {
                accepted = accept_orphan(region, entry, socket, &accept);
            } else {
                worker::retire(shared, slot);
            }
        }
    }
    local.is_watching.store(still_watching, Ordering::Relaxed);
    accepted
}

/// Accepts a connection from the socket of a worker that has left. Never blocks, and leaves the flags of the
/// socket alone, because a later worker has it, too. Returns `None` if no connection was accepted.
fn accept_orphan(
    region: &'static Region,
    entry: &SlotSocket,
    socket: BorrowedFd<'_>,
    accept: impl Fn(c_int) -> c_int,
) -> Option<c_int> {
    let is_blocking = slot_socket::is_blocking(socket);
    // While this process has the lock, no worker takes the slot, and no other process accepts from its
    // socket.
    let lock = if is_blocking { Some(worker::try_lock(region)?) } else { None };
    let is_alone = entry.is_orphan.load(Ordering::Acquire) != 0
        && entry.is_inherited.load(Ordering::Acquire) == 0
        && slot_socket::has_connection(socket);
    let result = if is_blocking && !is_alone { -1 } else { accept(socket.as_raw_fd()) };
    drop(lock);
    if is_blocking && worker::is_stale(region) {
        worker::refresh(region);
    }
    if result >= 0 {
        entry.accepted.fetch_add(1, Ordering::Relaxed);
    }
    (result >= 0).then_some(result)
}

/// Adds the socket of a slot to the epoll set that has the listener, with the data of the listener, or
/// removes it. Returns whether the kernel has done so.
fn watch_slot(local: &LocalListener, slot: usize, add: bool) -> bool {
    let (Some(set), Some(socket)) = (local.epoll.get().and_then(borrow), local.socket(slot)) else {
        return false;
    };
    let data = EventData::new_u64(local.epoll_data.load(Ordering::Relaxed));
    if add {
        epoll::add(set, socket, data, EventFlags::IN).is_ok()
    } else {
        epoll::delete(set, socket).is_ok()
    }
}

/// Counts a connection that the program has accepted from the socket at its descriptor.
pub fn accepted(fd: c_int) {
    let Some((local, region, shared)) = shared_listener(fd) else { return };
    let slot = local.present_slot.load(Ordering::Relaxed);
    let count = shared.sockets[slot].accepted.fetch_add(1, Ordering::Relaxed);
    if count % CONNECTIONS_BETWEEN_CHECKS == CONNECTIONS_BETWEEN_CHECKS - 1 {
        let _errno = ErrnoGuard::new();
        worker::find_ended(region);
    }
}

/// Called after `epoll_ctl` has succeeded for a listener. `event` has the events and the data, unless the
/// listener was removed.
pub fn epoll_changed(set: c_int, fd: c_int, event: Option<(u32, u64)>) {
    let _errno = ErrnoGuard::new();
    let Some((_, local)) = PROCESS.listener(fd) else { return };
    unwatch(local);
    let Some((_, data)) = event.filter(|(events, _)| events & EventFlags::IN.bits() != 0) else { return };
    local.epoll.set(Some(set));
    local.epoll_data.store(data, Ordering::Relaxed);
    if let (Some(set), Some(notification)) = (borrow(set), local.notification()) {
        let _ = epoll::add(set, notification, EventData::new_u64(data), EventFlags::IN | EventFlags::ET);
    }
}

/// Removes all that [`epoll_changed`] and [`accept_waiting`] have added to the epoll set.
fn unwatch(local: &LocalListener) {
    for slot in 0..SLOTS_MAX {
        if local.watched[slot].swap(false, Ordering::Relaxed) {
            watch_slot(local, slot, false);
        }
    }
    local.is_watching.store(false, Ordering::Relaxed);
    let set = local.epoll.take().and_then(borrow);
    if let (Some(set), Some(notification)) = (set, local.notification()) {
        let _ = epoll::delete(set, notification);
    }
}

/// Called when the program closes a descriptor. New connections go to other workers from now on. Does nothing
/// in a child of `vfork`: it closes its own copy of the descriptor, and the tables are those of its parent.
#[inline]
pub fn closes(fd: c_int) {
    if let Some((index, local)) = PROCESS.listener(fd)
        && is_own_state()
    {
        let _errno = ErrnoGuard::new();
        forget(index, local);
    }
}

/// Returns whether the state is that of this process, and not of a parent that has called `vfork` or
/// clone(2): both may have the same id, in PID namespaces of their own.
fn is_own_state() -> bool {
    let members = &PROCESS.members;
    PROCESS.id.load(Ordering::Relaxed) == getpid().as_raw_nonzero().get()
        && members.is_own_state()
        && !members.is_unnoticed_child()
}

/// Called after the program has tried to close a range of descriptors, both ends included. Listeners that are
/// still open stay: libc may lack the function.
pub fn closed_range(first: c_uint, last: c_uint) {
    let _errno = ErrnoGuard::new();
    for (_, local) in PROCESS.open_listeners() {
        let fd = local.fd.get().filter(|fd| (first..=last).contains(&fd.cast_unsigned()));
        let present = local.present_cookie.load(Ordering::Relaxed);
        if let Some(fd) = fd.filter(|fd| borrow(*fd).map(cookie) != Some(present)) {
            closes(fd);
        }
    }
}

fn forget(index: usize, local: &LocalListener) {
    let Some(region) = PROCESS.region.get() else { return };
    let shared = &region.listeners[index];
    if local.is_in(shared) {
        if local.usage.load(Ordering::Relaxed) == OWN
            && let Some(slot) = PROCESS.slot()
        {
            worker::leave(shared, slot);
            worker::refresh(region);
            worker::notify(local);
        }
        if PROCESS.members.present() == Some(shared.owner.load(Ordering::Relaxed)) {
            shared.is_closed.store(1, Ordering::Relaxed);
        }
        shared.free_if_unused();
    }
    unwatch(local);
    if let Some(fd) = local.fd.take() {
        PROCESS.mark(fd, None);
    }
    for slot in 0..SLOTS_MAX {
        let is_own = local.socket(slot).is_some();
        // The program may have closed the number, and another descriptor may have it now.
        if let Some(socket) = local.sockets[slot].take().filter(|_| is_own) {
            drop(slot_socket::own(socket));
        }
    }
    drop(local.take_notification());
    local.sockets_len.store(0, Ordering::Relaxed);
    local.usage.store(UNUSED, Ordering::Relaxed);
    PROCESS.count_unused();
}

/// Called before the process forks: binds sockets for the slots of its children, unless the process accepts
/// connections itself.
pub fn before_fork() {
    let Some(region) = PROCESS.region.get() else { return };
    if let Some(slot) = PROCESS.slot() {
        for (index, local) in PROCESS.open_listeners() {
            let shared = &region.listeners[index];
            if local.is_in(shared) {
                shared.sockets[slot].is_inherited.store(1, Ordering::Release);
            }
        }
        return;
    }
    let _errno = ErrnoGuard::new();
    // One for each child that runs, one for the new child.
    let needed = (PROCESS.children.load(Ordering::Relaxed) + 1).min(SLOTS_MAX);
    locked(region, |_| {
        for (index, local) in PROCESS.open_listeners() {
            let own = PROCESS.members.present().unwrap_or_default();
            region.listeners[index].owner.store(own, Ordering::Relaxed);
            prepare_slots(region, index, local, needed);
        }
    });
}

fn prepare_slots(region: &'static Region, index: usize, local: &LocalListener, needed: usize) {
    let present = local.sockets_len.load(Ordering::Relaxed);
    let listener = local.fd.get().and_then(borrow);
    let Some(listener) = listener.filter(|fd| cookie(*fd) == local.cookie.load(Ordering::Relaxed)) else {
        return;
    };
    if present >= needed {
        return;
    }
    if local.notification().is_none()
        && let Ok(socket) = notification::create().map_err(Into::into).and_then(slot_socket::hide)
    {
        local.set_notification(socket);
    }
    let at_once = crate::affinity::cpus(&crate::affinity::allowed()).count().max(SLOTS_AT_ONCE);
    let wanted = needed.max(at_once).max(2 * present).min(SLOTS_MAX);
    let others = PROCESS.open_listeners().filter(|(other, _)| *other != index);
    let used: usize = others.map(|(_, other)| other.open_sockets()).sum();
    let may_have = slot_socket::sockets_max().saturating_sub(used);
    for slot in present..wanted {
        let socket = match slot {
            _ if slot >= may_have => Err(io::Error::other("a quarter of the descriptors is used for them")),
            0 => slot_socket::hidden_copy(listener),
            _ => slot_socket::create(listener),
        };
        match socket {
            Ok(socket) => {
                local.socket_cookies[slot].store(cookie(rustix::fd::AsFd::as_fd(&socket)), Ordering::Relaxed);
                local.sockets[slot].set(Some(socket.into_raw_fd()));
            }
            Err(error) => {
                let address = region.listeners[index].address();
                note(format_args!("{address}: only {slot} workers have listeners of their own: {error}"));
                // No further attempts.
                local.sockets_len.store(SLOTS_MAX, Ordering::Relaxed);
                return;
            }
        }
    }
    local.sockets_len.store(wanted, Ordering::Relaxed);
}

/// Called after a fork in the process that has forked.
pub fn after_fork_parent() {
    if PROCESS.region.get().is_some() {
        PROCESS.children.fetch_add(1, Ordering::Relaxed);
    }
}

/// Called after a fork in the new process, which has no slot yet. Listeners that its parent accepts from stay
/// as they are, because they may be in an epoll set that both share.
pub fn after_fork_child() {
    if PROCESS.region.get().is_none() {
        return;
    }
    PROCESS.id.store(getpid().as_raw_nonzero().get(), Ordering::Relaxed);
    PROCESS.forker.store(PROCESS.members.forget_own(), Ordering::Relaxed);
    PROCESS.is_child.store(true, Ordering::Relaxed);
    PROCESS.children.store(0, Ordering::Relaxed);
    PROCESS.slot.store(0, Ordering::Relaxed);
    for (_, local) in PROCESS.open_listeners() {
        if local.usage.load(Ordering::Relaxed) == OWN {
            local.usage.store(INHERITED, Ordering::Relaxed);
        }
        local.epoll.set(None);
        local.is_watching.store(false, Ordering::Relaxed);
        local.watched.iter().for_each(|watched| watched.store(false, Ordering::Relaxed));
    }
    PROCESS.count_unused();
}

/// Called when the process has waited for a child that has ended. Safe in a signal handler.
pub fn child_reaped() {
    let Some(region) = PROCESS.region.get() else { return };
    let _errno = ErrnoGuard::new();
    let one_less = |count: usize| count.checked_sub(1);
    let _ = PROCESS.children.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
    worker::find_ended(region);
}

/// Returns the descriptor of the shared memory if it is in a range of numbers, both ends included. It must
/// stay open when the program closes numbers that it has not opened: the process counts as ended otherwise.
pub fn memory_in(first: c_uint, last: c_uint) -> Option<c_int> {
    let _errno = ErrnoGuard::new();
    PROCESS.members.fd_in(first..=last)
}

/// Called before a call of `dup2` or `dup3`, which closes the descriptor `to`. Returns whether
/// [`replaced`] must be called after the call. Returns false in a child of `vfork`: it replaces its own copy
/// of the shared memory's descriptor, and the recorded number is that of its parent.
pub fn replaces(to: c_int) -> bool {
    let is_memory = to >= 0 && memory_in(to.cast_unsigned(), to.cast_unsigned()).is_some();
    let _errno = is_memory.then(ErrnoGuard::new);
    is_memory && (is_own_state() || PROCESS.members.is_unnoticed_child()) && PROCESS.members.make_way()
}

/// See [`replaces`]. If the call has failed, the descriptor `to` is still open and is closed here: the
/// program has not opened it.
pub fn replaced(to: c_int, has_failed: bool) {
    let _errno = ErrnoGuard::new();
    if has_failed {
        drop(slot_socket::own(to));
    }
    PROCESS.members.lock_again();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::tests::in_child;
    use rustix::fd::OwnedFd;
    use rustix::fs::fstat;
    use rustix::net::sockopt::set_socket_reuseport;
    use rustix::net::{AddressFamily, SocketType, bind, getsockname};
    use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
    use std::sync::{Mutex, PoisonError};

    /// Serialises the tests that use the state of the process.
    static STATE: Mutex<()> = Mutex::new(());

    #[test]
    fn only_closed_listeners_of_a_range_are_forgotten() {
        let _state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        PROCESS.id.store(getpid().as_raw_nonzero().get(), Ordering::Relaxed);
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let fds = listeners.each_ref().map(AsRawFd::as_raw_fd);
        for fd in fds {
            register(region().unwrap(), fd, 5);
        }
        closed_range(0, c_uint::MAX);
        assert_eq!(fds.map(is_listener), [true; 2], "nothing was closed");
        drop(listeners);
        let first = fds[0].cast_unsigned();
        closed_range(first, first);
        assert_eq!(fds.map(is_listener), [false, true]);
        closed_range(0, c_uint::MAX);
        assert_eq!(fds.map(is_listener), [false; 2]);
    }

    /// Returns a socket that listens as with the hook, and whether others may have its address.
    fn listener() -> (OwnedFd, bool) {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).unwrap();
        let is_shared = share_address(socket.as_raw_fd());
        rustix::net::listen(&socket, 5).unwrap();
        (socket, is_shared)
    }

    #[test]
    fn a_listener_without_an_entry_keeps_its_address() {
        let _state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        let region = region().unwrap();
        let listen = |may_share: bool| {
            let (socket, is_shared) = listener();
            assert_eq!(is_shared, may_share);
            let other = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
            set_socket_reuseport(&other, true).unwrap();
            assert_eq!(bind(&other, &getsockname(&socket).unwrap()).is_ok(), may_share);
        };
        listen(true);
        let free = region.listeners.iter().filter(|entry| entry.cookie.load(Ordering::Relaxed) == 0);
        let free: Vec<_> = free.collect();
        free.iter().for_each(|entry| entry.cookie.store(u64::MAX, Ordering::Relaxed));
        listen(false);
        free.iter().for_each(|entry| entry.cookie.store(0, Ordering::Relaxed));
    }

    #[test]
    fn a_cloned_child_that_listens_leaves_its_parents_slot() {
        let _state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        PROCESS.id.store(getpid().as_raw_nonzero().get(), Ordering::Relaxed);
        let (listener, _) = listener();
        let (region, fd) = (region().unwrap(), listener.as_raw_fd());
        register(region, fd, 5);
        let (index, local) = PROCESS.listener(fd).unwrap();
        before_fork();
        use_listener(fd);
        assert_eq!(local.usage.load(Ordering::Relaxed), OWN);
        let socket = &region.listeners[index].sockets[0];
        let is_active = || [&socket.is_active, &socket.is_orphan].map(|flag| flag.load(Ordering::Relaxed));
        assert_eq!(is_active(), [1, 0]);
        // libc does not know of the child, as after clone(2).
        let is_marked = in_child(|| {
            listening(fd, 5, true);
            i32::from(is_listener(fd))
        });
        assert_eq!(is_marked, Some(1));
        assert_eq!(is_active(), [1, 0]);
        drop(listener);
        closed_range(fd.cast_unsigned(), fd.cast_unsigned());
        region.slots[0].worker.store(0, Ordering::Relaxed);
        PROCESS.slot.store(0, Ordering::Relaxed);
    }

    #[test]
    fn connections_of_an_inherited_socket_count_for_its_slot() {
        let _state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        PROCESS.id.store(getpid().as_raw_nonzero().get(), Ordering::Relaxed);
        let (listener, _) = listener();
        let (region, fd) = (region().unwrap(), listener.as_raw_fd());
        register(region, fd, 5);
        let (index, _) = PROCESS.listener(fd).unwrap();
        before_fork();
        // As if this process accepted, too.
        let own = PROCESS.members.own(region).unwrap().cast_signed();
        let before = region.slots[0].worker.swap(own, Ordering::Relaxed);
        let accept = || {
            after_fork_child();
            use_listener(fd);
            accepted(fd);
        };
        let worker = || {
            accept();
            let child = || {
                accept();
                0
            };
            in_child(child).unwrap_or(1)
        };
        assert_eq!(in_child(worker), Some(0));
        region.slots[0].worker.store(before, Ordering::Relaxed);
        let counts =
            || region.listeners[index].sockets.iter().map(|slot| slot.accepted.load(Ordering::Relaxed));
        assert_eq!(
            (counts().next(), counts().max()),
            (Some(0), Some(2)),
            "{:?}",
            counts().collect::<Vec<_>>()
        );
        drop(listener);
        closed_range(fd.cast_unsigned(), fd.cast_unsigned());
    }

    #[test]
    fn a_worker_without_the_lock_shares_the_first_socket() {
        let _state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        PROCESS.id.store(getpid().as_raw_nonzero().get(), Ordering::Relaxed);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let region = region().unwrap();
        register(region, listener.as_raw_fd(), 5);
        let (index, local) = PROCESS.listener(listener.as_raw_fd()).unwrap();
        let usage = in_child(|| {
            after_fork_child();
            // Without the memory no lock can be had, as with a filter that refuses locks.
            drop(slot_socket::own(memory_in(0, c_uint::MAX).unwrap()));
            use_listener(listener.as_raw_fd());
            local.usage.load(Ordering::Relaxed).cast_signed()
        });
        assert_eq!(usage, Some(INHERITED.cast_signed()));
        assert_eq!(region.listeners[index].sockets[0].is_inherited.load(Ordering::Relaxed), 1);
        let fd = listener.as_raw_fd();
        drop(listener);
        closed_range(fd.cast_unsigned(), fd.cast_unsigned());
    }

    #[test]
    fn the_memory_makes_way_in_its_own_process() {
        let _state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        PROCESS.members.own(region().unwrap()).unwrap();
        let memory = || memory_in(0, c_uint::MAX).unwrap();
        let before = memory();
        // As in a child of `vfork`.
        PROCESS.id.store(-1, Ordering::Relaxed);
        assert!(!replaces(before));
        assert_eq!(memory(), before);
        PROCESS.id.store(getpid().as_raw_nonzero().get(), Ordering::Relaxed);
        assert!(replaces(before));
        assert_ne!(memory(), before);
        let is_memory = |fd| {
            let [one, other] = [fd, memory()].map(|fd| fstat(borrow(fd).unwrap()).map(|about| about.st_ino));
            one == other
        };
        assert!(is_memory(before));
        // The program's call has failed, so the number is free, perhaps for another test.
        replaced(before, true);
        assert!(!is_memory(before));
    }
}
