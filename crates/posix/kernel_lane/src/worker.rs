//! Workers and their slots.

use crate::affinity;
use crate::lane::mode;
use crate::local::{INHERITED, LocalListener, OWN, PROCESS};
use crate::mode::Mode;
use crate::note::note;
use crate::notification;
use crate::region::{LockedRegion, Region, SharedListener, seconds};
use crate::slot_socket::{self, borrow, cookie};
use crate::steering::{ActiveListener, write_program};
use core::sync::atomic::{Ordering, fence};

/// Upper limit of the time that a handshake takes, in whole seconds: by default the kernel retransmits a
/// SYN-ACK five times (`tcp_synack_retries`) and gives up after 63 seconds.
const HANDSHAKE_SECONDS_MAX: u64 = 120;

/// Runs `action` with the lock, then steers anew if that is needed. Returns `None` without running `action`
/// if [`Region::lock`] fails.
pub fn locked<R>(region: &'static Region, action: impl FnOnce(&mut LockedRegion) -> R) -> Option<R> {
    let result = action(&mut region.lock(&PROCESS.members)?);
    if is_stale(region) {
        refresh(region);
    }
    Some(result)
}

/// Returns whether connections must be steered anew. Called after the lock was released, and before the lock
/// is taken in [`refresh`]. The fence orders both accesses, so that the request of a thread which finds the
/// lock held is seen by the thread that releases the lock.
pub fn is_stale(region: &Region) -> bool {
    fence(Ordering::SeqCst);
    region.is_stale.load(Ordering::Acquire) != 0
}

/// Takes the lock if nobody holds it.
pub fn try_lock(region: &'static Region) -> Option<LockedRegion> {
    region.try_lock(PROCESS.members.own(region)?, &PROCESS.members).ok()
}

/// Steers the connections of this process's listeners to those workers that accept now. If another thread
/// holds the lock, that thread does so when it releases the lock.
pub fn refresh(region: &'static Region) {
    region.is_stale.swap(1, Ordering::AcqRel);
    while is_stale(region) {
        let Some(mut lock) = try_lock(region) else { return };
        // Not a store, which the processor may delay until the slots were read: it could then overwrite a
        // later request.
        region.is_stale.swap(0, Ordering::AcqRel);
        for (index, local) in PROCESS.open_listeners() {
            steer(region, &region.listeners[index], local, &mut lock);
        }
    }
}

fn steer(region: &Region, shared: &SharedListener, local: &LocalListener, lock: &mut LockedRegion) {
    let sockets = shared.sockets.iter().zip(&region.slots).take(region.slots_len());
    let is_alone = sockets.clone().skip(1).all(|(socket, _)| socket.group_index().is_none());
    let listener = local.fd.get().and_then(borrow);
    let present = |fd: &_| cookie(*fd) == local.present_cookie.load(Ordering::Relaxed);
    let Some(listener) = listener.filter(present).filter(|_| !is_alone) else { return };
    let active = sockets.filter_map(|(socket, slot)| {
        let index = socket.group_index().filter(|_| socket.is_active.load(Ordering::Acquire) != 0)?;
        Some(ActiveListener { index, cpu: slot.cpu() })
    });
    let program = lock.program();
    let Some(len) = write_program(program, active) else { return };
    if let Err(error) = slot_socket::steer(listener, &program[..len]) {
        let address = shared.address();
        // The text of an error is allocated, and this may be a signal handler.
        let number = error.raw_os_error().unwrap_or_default();
        note(format_args!("{address}: connections are not steered to the CPUs of workers: errno {number}"));
    }
}

/// Begins to accept from a listener: in the slot of this process, or from the inherited socket if there is
/// no free slot.
pub fn begin(index: usize, local: &LocalListener) {
    let Some(region) = PROCESS.region.get() else { return };
    let shared = &region.listeners[index];
    let keep_inherited = || {
        if local.is_in(shared) {
            shared.sockets[0].is_inherited.store(1, Ordering::Release);
        }
        INHERITED
    };
    let usage = locked(region, |_| match begin_locked(region, shared, local) {
        INHERITED => keep_inherited(),
        usage => usage,
    });
    // Without the lock the process keeps the inherited socket for good: it may be in an epoll set soon.
    local.usage.store(usage.unwrap_or_else(keep_inherited), Ordering::Relaxed);
    PROCESS.count_unused();
}

fn begin_locked(region: &'static Region, shared: &SharedListener, local: &LocalListener) -> u32 {
    let Some((number, listener)) = local.fd.get().and_then(|fd| Some((fd, borrow(fd)?))) else {
        return INHERITED;
    };
    if !local.is_in(shared) || cookie(listener) != local.present_cookie.load(Ordering::Relaxed) {
        return INHERITED;
    }
    let Some(slot) = PROCESS.slot().or_else(|| take_slot(region)) else { return INHERITED };
    let entry = &shared.sockets[slot];
    if slot != 0 {
        let Some(socket) = local.socket(slot) else { return INHERITED };
        let address = shared.address();
        let listening = slot_socket::listen(listener, socket, local.backlog.load(Ordering::Relaxed));
        if listening.is_ok() && entry.group_index().is_none() {
            shared.join_group(slot);
        }
        if let Err(error) = listening.and_then(|()| slot_socket::replace(number, socket)) {
            note(format_args!("{address}: this worker has no listener of its own: {error}"));
            return INHERITED;
        }
        local.present_cookie.store(cookie(socket), Ordering::Relaxed);
        local.present_slot.store(slot, Ordering::Relaxed);
    }
    if entry.is_orphan.swap(0, Ordering::AcqRel) != 0 {
        shared.orphans.fetch_sub(1, Ordering::AcqRel);
    }
    entry.is_active.store(1, Ordering::Release);
    region.is_stale.store(1, Ordering::Release);
    OWN
}

/// Takes a free slot for this process. A process that is no child can only have slot 0, whose socket is the
/// program's own: it must keep that socket at its descriptor, because later children inherit it.
fn take_slot(region: &'static Region) -> Option<usize> {
    find_ended(region);
    let own = PROCESS.members.own(region)?.cast_signed();
    let is_child = PROCESS.is_child.load(Ordering::Relaxed);
    let has_socket = |slot: usize| PROCESS.open_listeners().any(|(_, local)| local.socket(slot).is_some());
    let len = if is_child { region.slots.len() } else { 1 };
    let slot = (0..len).find(|slot| {
        let worker = &region.slots[*slot].worker;
        (*slot == 0 || has_socket(*slot))
            && worker.compare_exchange(0, own, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    })?;
    region.raise_slots_len(slot + 1);
    // The slot has the CPU of its previous worker, which does not count.
    region.slots[slot].set_cpu(None);
    region.slots[slot].set_cpu(if is_child { cpu_of_worker(region) } else { None });
    PROCESS.slot.store(slot + 1, Ordering::Relaxed);
    Some(slot)
}

/// Returns whether the process that has forked this one still runs. Otherwise this is not a worker but a
/// server that went into the background after it had listened.
fn has_master() -> bool {
    let forker = PROCESS.forker.load(Ordering::Relaxed);
    forker != 0 && PROCESS.members.is_running(forker)
}

/// Returns the CPU that this worker is pinned to, or `None` for a worker that is not pinned. In the mode
/// `auto`, pins a worker that is not pinned yet, if it has a single thread (only the calling thread would be
/// pinned) and its master still runs.
fn cpu_of_worker(region: &Region) -> Option<u32> {
    let workers_of = |cpu| {
        let is_taken = |slot: &&crate::region::Slot| slot.worker.load(Ordering::Relaxed) != 0;
        region.slots.iter().filter(is_taken).filter(|slot| slot.cpu() == Some(cpu)).count()
    };
    affinity::pinned().or_else(|| {
        let pins = mode() == Some(Mode::Auto) && has_master() && !affinity::has_other_threads();
        pins.then(|| affinity::pin_to_least(workers_of)).flatten()
    })
}

/// Records that the worker of a slot does not accept from a listener any more. Connections that wait are left
/// to other workers.
pub fn leave(shared: &SharedListener, slot: usize) {
    let entry = &shared.sockets[slot];
    entry.retires_at.store(seconds() + HANDSHAKE_SECONDS_MAX, Ordering::Relaxed);
    if entry.is_active.swap(0, Ordering::AcqRel) != 0 && entry.is_orphan.swap(1, Ordering::AcqRel) == 0 {
        shared.orphans.fetch_add(1, Ordering::AcqRel);
    }
}

/// Stops the search for connections in the queue of a worker that has left, once all handshakes that its
/// socket had begun have ended. The queue must be empty, or the process accepts from the socket anyway.
pub fn retire(shared: &SharedListener, slot: usize) {
    let entry = &shared.sockets[slot];
    let is_over = seconds() > entry.retires_at.load(Ordering::Relaxed);
    if is_over && entry.is_orphan.swap(0, Ordering::AcqRel) != 0 {
        shared.orphans.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Wakes workers that wait in an epoll set, so that they take over connections that wait elsewhere.
pub fn notify(local: &LocalListener) {
    if let Some(socket) = local.notification() {
        notification::notify(socket);
    }
}

/// Frees the slots of members that have ended, and those that such a member was freeing. Safe in a signal
/// handler.
pub fn find_ended(region: &'static Region) {
    for (number, slot) in region.slots.iter().enumerate().take(region.slots_len()) {
        let worker = slot.worker.load(Ordering::Acquire);
        if worker != 0 && !PROCESS.members.is_running(worker.unsigned_abs()) {
            free_slot(region, number, worker);
        }
    }
}

fn free_slot(region: &'static Region, number: usize, ended: i32) {
    let Some(own) = PROCESS.members.own(region) else { return };
    // The negative number keeps others away from the slot until all its listeners are free.
    let (worker, own) = (&region.slots[number].worker, -own.cast_signed());
    if worker.compare_exchange(ended, own, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return;
    }
    for shared in &region.listeners {
        if shared.cookie.load(Ordering::Acquire) != 0 {
            leave(shared, number);
            shared.free_if_unused();
        }
    }
    worker.store(0, Ordering::Release);
    refresh(region);
    PROCESS.open_listeners().for_each(|(_, local)| notify(local));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_orphaned_queue_is_searched_until_it_retires() {
        let (region, _memory) = Region::create().unwrap();
        let shared = &region.listeners[0];
        shared.fill(1, 1, "10.0.0.1:80".parse().unwrap());
        shared.sockets[2].is_active.store(1, Ordering::Relaxed);
        let earliest = seconds() + 120;
        leave(shared, 2);
        leave(shared, 2);
        assert!(shared.sockets[2].retires_at.load(Ordering::Relaxed) >= earliest);
        retire(shared, 2);
        assert_eq!(shared.orphans.load(Ordering::Relaxed), 1);
        shared.sockets[2].retires_at.store(0, Ordering::Relaxed);
        retire(shared, 2);
        retire(shared, 2);
        assert_eq!(shared.orphans.load(Ordering::Relaxed), 0);
    }
}
