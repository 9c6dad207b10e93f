//! Who is told when the readiness of a description changes.

use crate::fd_table::FileId;
use crate::file::{FileKind, Files};
use crate::sleep::Waiters;
use libc::POLLIN;

/// Whoever wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitEntry {
    /// An entry of an epoll set.
    EpollItem { set: FileId, item: u32 },
    /// A thread that sleeps in a call. Of those that would all take the same thing only one is woken.
    Thread { waiter: u32, exclusive: bool },
}

/// Tells threads that sleep at `file`, of several that would take the same only one.
pub(crate) fn wake_threads(files: &mut Files, sleepers: &mut Waiters, file: FileId) {
    let mut done = false;
    for watcher in &files.get(file).wait_queue {
        if let WaitEntry::Thread { waiter: sleeper, exclusive } = *watcher
            && !(exclusive && done)
        {
            done |= sleepers.wake(sleeper) && exclusive;
        }
    }
}

/// Tells whoever watches `file` that something of `key` may have become true; 0 means that it is not known what. Sets may watch sets: how deep
/// is bounded by what `epoll_ctl` admits.
#[inline]
pub(crate) fn wake(files: &mut Files, sleepers: &mut Waiters, file: FileId, key: i16) {
    match files.get(file).wait_queue[..] {
        [] => {}
        // Mostly one set watches: nobody else is there to be told instead.
        [WaitEntry::EpollItem { set, item }] => {
            let around = files.get(set);
            if let FileKind::Epoll(epoll) = &mut around.kind
                && epoll.queue_ready(item, key)
                && !around.wait_queue.is_empty()
            {
                wake_all(files, sleepers, set, POLLIN);
            }
        }
        _ => wake_all(files, sleepers, file, key),
    }
}

/// The same where several watch, or threads.
fn wake_all(files: &mut Files, sleepers: &mut Waiters, file: FileId, key: i16) {
    let watchers = core::mem::take(&mut files.get(file).wait_queue);
    let (mut thread_done, mut item_done) = (false, false);
    for watcher in &watchers {
        match *watcher {
            WaitEntry::Thread { waiter: sleeper, exclusive: false } => {
                sleepers.wake(sleeper);
            }
            WaitEntry::Thread { waiter: sleeper, exclusive: true } => {
                thread_done = thread_done || sleepers.wake(sleeper);
            }
            WaitEntry::EpollItem { set, item } => {
                let FileKind::Epoll(epoll) = &mut files.get(set).kind else { continue };
                let exclusive = epoll.is_exclusive(item);
                if exclusive && item_done || !epoll.queue_ready(item, key) {
                    continue;
                }
                // As in ep_poll_callback: a set that nobody waits at does not count.
                let waits = |w: &WaitEntry| matches!(w, WaitEntry::Thread { .. });
                item_done |= exclusive && files.get(set).wait_queue.iter().any(waits);
                wake(files, sleepers, set, POLLIN);
            }
        }
    }
    // Nobody was added meanwhile: the lane is locked, and waking adds none.
    files.get(file).wait_queue = watchers;
}
