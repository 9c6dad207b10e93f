//! Wake-ups of epoll items and threads when the readiness of a description changes.

use crate::fd_table::FileId;
use crate::file::{FileKind, Files};
use crate::sleep::Waiters;
use libc::POLLIN;

/// An entry of a wait queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitEntry {
    /// An item of an epoll set.
    EpollItem { set: FileId, item: u32 },
    /// A thread that sleeps in a call. Of all exclusive threads only one is woken.
    Thread { waiter: u32, exclusive: bool },
}

/// Wakes the threads that sleep on `file`, but only one of the exclusive ones.
pub(crate) fn wake_threads(files: &mut Files, waiters: &mut Waiters, file: FileId) {
    let mut done = false;
    for entry in &files.get(file).wait_queue {
        if let WaitEntry::Thread { waiter, exclusive } = *entry
            && !(exclusive && done)
        {
            done |= waiters.wake(waiter) && exclusive;
        }
    }
}

/// Wakes the entries of `file` that wait for an event in `key`; 0 matches all. Recursion into nested epoll
/// sets is bounded by what `epoll_ctl` admits.
#[inline]
pub(crate) fn wake(files: &mut Files, waiters: &mut Waiters, file: FileId, key: i16) {
    match files.get(file).wait_queue[..] {
        [] => {}
        // The common case is one epoll set alone in the queue, so exclusive wake-ups need no bookkeeping.
        [WaitEntry::EpollItem { set, item }] => {
            let event_classes = files.event_classes;
            let outer = files.get(set);
            if let FileKind::Epoll(epoll) = &mut outer.kind
                && epoll.queue_ready(item, key, event_classes)
                && !outer.wait_queue.is_empty()
            {
                wake_all(files, waiters, set, POLLIN);
            }
        }
        _ => wake_all(files, waiters, file, key),
    }
}

/// Wakes a queue with several entries, or with threads.
fn wake_all(files: &mut Files, waiters: &mut Waiters, file: FileId, key: i16) {
    let entries = core::mem::take(&mut files.get(file).wait_queue);
    let event_classes = files.event_classes;
    let (mut thread_done, mut item_done) = (false, false);
    for entry in &entries {
        match *entry {
            WaitEntry::Thread { waiter, exclusive: false } => {
                waiters.wake(waiter);
            }
            WaitEntry::Thread { waiter, exclusive: true } => {
                thread_done = thread_done || waiters.wake(waiter);
            }
            WaitEntry::EpollItem { set, item } => {
                let FileKind::Epoll(epoll) = &mut files.get(set).kind else { continue };
                let exclusive = epoll.is_exclusive(item);
                if exclusive && item_done || !epoll.queue_ready(item, key, event_classes) {
                    continue;
                }
                // An epoll set on which no thread waits does not use up the exclusive wake-up
                // (`ep_poll_callback`).
                let waits = |w: &WaitEntry| matches!(w, WaitEntry::Thread { .. });
                item_done |= exclusive && files.get(set).wait_queue.iter().any(waits);
                wake(files, waiters, set, POLLIN);
            }
        }
    }
    // No entry was added meanwhile: the lock is held, and waking adds none.
    files.get(file).wait_queue = entries;
}
