//! Who is told when the readiness of a description changes.

use crate::fd_table::FileId;
use crate::file::{Files, Kind};
use crate::sleep::Sleepers;
use libc::POLLIN;

/// Whoever wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watcher {
    /// An entry of an epoll set.
    Item { set: FileId, item: u32 },
    /// A thread that sleeps in a call. Of those that would all take the same thing only one is woken.
    Thread { sleeper: u32, exclusive: bool },
}

/// Tells threads that sleep at `file`, of several that would take the same only one.
pub(crate) fn wake_threads(files: &mut Files, sleepers: &mut Sleepers, file: FileId) {
    let mut done = false;
    for watcher in &files.get(file).watchers {
        if let Watcher::Thread { sleeper, exclusive } = *watcher
            && !(exclusive && done)
        {
            done |= sleepers.wake(sleeper) && exclusive;
        }
    }
}

/// Tells whoever watches `file` that something of `key` may have become true; 0 means that it is not known what. Sets may watch sets: how deep
/// is bounded by what `epoll_ctl` admits.
#[inline]
pub(crate) fn wake(files: &mut Files, sleepers: &mut Sleepers, file: FileId, key: i16) {
    match files.get(file).watchers[..] {
        [] => {}
        // Mostly one set watches: nobody else is there to be told instead.
        [Watcher::Item { set, item }] => {
            let around = files.get(set);
            if let Kind::Epoll(epoll) = &mut around.kind
                && epoll.make_ready(item, key)
                && !around.watchers.is_empty()
            {
                wake_all(files, sleepers, set, POLLIN);
            }
        }
        _ => wake_all(files, sleepers, file, key),
    }
}

/// The same where several watch, or threads.
fn wake_all(files: &mut Files, sleepers: &mut Sleepers, file: FileId, key: i16) {
    let watchers = core::mem::take(&mut files.get(file).watchers);
    let (mut thread_done, mut item_done) = (false, false);
    for watcher in &watchers {
        match *watcher {
            Watcher::Thread { sleeper, exclusive: false } => {
                sleepers.wake(sleeper);
            }
            Watcher::Thread { sleeper, exclusive: true } => {
                thread_done = thread_done || sleepers.wake(sleeper);
            }
            Watcher::Item { set, item } => {
                let Kind::Epoll(epoll) = &mut files.get(set).kind else { continue };
                let exclusive = epoll.is_exclusive(item);
                if exclusive && item_done || !epoll.make_ready(item, key) {
                    continue;
                }
                // As in ep_poll_callback: a set that nobody waits at does not count.
                let waits = |w: &Watcher| matches!(w, Watcher::Thread { .. });
                item_done |= exclusive && files.get(set).watchers.iter().any(waits);
                wake(files, sleepers, set, POLLIN);
            }
        }
    }
    // Nobody was added meanwhile: the lane is locked, and waking adds none.
    files.get(file).watchers = watchers;
}
