//! Sleeps on the kernel's part of an epoll set (`epoll/direct.rs`).

use super::{SleepArgs, SleepEnd, timeout_of};
use crate::channels::Channels;
use crate::epoll::{DirectWait, WakeFds};
use crate::fd_table::FileId;
use crate::lock::{self, LockGuard};
use crate::process::ProcessState;
use crate::signal::SignalSet;
use crate::{Ops, syscall, wait_set};
use libc::{POLLIN, pollfd};
use rustix::fd::{AsFd, RawFd};
use rustix::io::Errno;

/// How many events one sleep takes. A call that can return more gets the others from the next calls.
const EVENTS_MAX: usize = 32;

impl Ops {
    /// Sleeps on the kernel's part of an epoll set, whose descriptor is `epoll`. Keeps the events that ended
    /// the sleep in the set.
    pub(super) fn sleep_directly<'a>(
        &'a self,
        state: LockGuard<'a>,
        args: &SleepArgs<'_>,
        direct: DirectWait,
        epoll: RawFd,
        kernel: &mut [pollfd],
    ) -> (LockGuard<'a>, Result<SleepEnd, Errno>) {
        let &SleepArgs { waiter, wait, bounds, handlers } = args;
        drop(state);
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS_MAX];
        let room = direct.events_max.min(EVENTS_MAX);
        let (timeout, mask) = (timeout_of(bounds.timeout), bounds.mask);
        let sleep_end = self.unless_isolated(|| {
            // Each handler ends the sleep, because it may have removed the descriptors that wake the thread.
            syscall::epoll_pwait2(epoll, &mut events[..room], timeout, mask, SignalSet::MAX)
        });
        let mut state = self.lock_or_panic();
        let has_polled = sleep_end.is_ok();
        let ran = lock::handlers_ran();
        let (count, sleep_end) = match sleep_end {
            Ok(count) => (count, Ok(SleepEnd::Event)),
            Err(Errno::INTR) if self.is_isolated() => (0, Err(Errno::INTR)),
            Err(Errno::INTR) if ran != 0 && ran & bounds.interrupting == 0 => {
                // To the program, the handler ran before the call. It does not end the next sleep.
                lock::clear_handlers_ran();
                (0, Ok(SleepEnd::Event))
            }
            Err(Errno::INTR) => (0, self.after_interruption(wait, handlers)),
            Err(error) => (0, Err(error)),
        };
        state.waiters.polled_kernel = has_polled;
        state.waiters.waiters[waiter as usize].asleep = false;
        // The set exists: the call has a reference.
        let set = state.files.epoll(direct.set);
        let cause = set.map(|set| set.end_direct_sleep(&events[..count], room)).unwrap_or_default();
        if cause.kernel_event {
            kernel.iter_mut().for_each(|fd| fd.revents = POLLIN);
        }
        if state.waiters.leader == Some(waiter) {
            state.resign_leader(|client: &mut Channels| {
                client.after_epoll_wait(cause.stack_event, cause.hung_up);
            });
        } else {
            state.process_events();
        }
        state.waiters.waiters[waiter as usize].woken = false;
        (state, sleep_end)
    }
}

impl ProcessState {
    /// Prepares the kernel's part of an epoll set for the sleep of a thread, and returns its descriptor.
    /// Returns `None` if the thread must sleep elsewhere.
    pub(super) fn begin_direct_sleep(&mut self, waiter: u32, is_leader: bool, set: FileId) -> Option<RawFd> {
        let Self { waiters, client, files, .. } = self;
        // A stack that is gone brings no events.
        if client.is_stack_gone() || !wait_set::is_supported() {
            return None;
        }
        let stack = is_leader.then(|| (client.wake_fd(), waiters.wake_fd_generation));
        let thread_event = waiters.waiters[waiter as usize].event.as_fd();
        files.epoll(set).ok()?.begin_direct_sleep(&WakeFds { waiter, thread_event, stack })
    }
}
