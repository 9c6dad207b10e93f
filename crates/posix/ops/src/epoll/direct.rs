//! Sleeps on the kernel's epoll instance of a set, so that `EPOLLEXCLUSIVE` of kernel descriptors wakes one
//! process. The kernel counts an exclusive wake-up only if a thread sleeps on the instance that has the
//! item: if the instance were nested in the library's wait set, every process would wake. So the thread's
//! eventfd and the descriptor by which the stack wakes the process are items of the instance, too, called
//! sentinels; `epoll_wait` does not report them.
//!
//! Sentinels are edge-triggered. Sets that other processes or other sets also wait on have none.

use super::{EpollEvent, EpollSet, KERNEL_POLL_INTERVAL, kernel_epoll_ctl};
use crate::descriptor::borrow;
use crate::fd_table::FileId;
use crate::lock;
use crate::sleep::sleeping_waiter;
use crate::wait_set::WakeCause;
use core::hash::BuildHasher;
use rustix::event::epoll;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::collections::hash_map::RandomState;

const EDGES: u32 = (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
/// Bit of a sentinel's data that tells the stack's descriptor from the thread's.
const STACK_BIT: u64 = 1;
/// How many sentinels a kernel instance has.
pub(super) const SENTINELS_MAX: usize = 2;

/// The set on whose kernel instance a call may sleep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirectWait {
    pub set: FileId,
    /// How many events the call can return.
    pub events_max: usize,
}

/// The descriptors that wake a thread.
pub(crate) struct WakeFds<'a> {
    /// The number of the thread's waiter.
    pub waiter: u32,
    /// The eventfd by which other threads wake the thread.
    pub thread_event: BorrowedFd<'a>,
    /// The descriptor by which the stack wakes the process, if the thread is the leader, and a number that
    /// changes when another descriptor replaces it.
    pub stack: Option<(BorrowedFd<'a>, u32)>,
}

/// The sentinels in a kernel instance.
#[derive(Clone, Copy, Debug)]
struct Sentinels {
    waiter: u32,
    thread_event: RawFd,
    stack: Option<(RawFd, u32)>,
}

/// The state of sleeps on the kernel's instance of a set.
pub(super) struct DirectSleep {
    /// True if an exclusive kernel descriptor was added, and sentinels would reach nobody else.
    is_wanted: bool,
    /// True if sentinels would reach others: another process, an outer set or a `poll` of the set.
    is_banned: bool,
    /// The data of the thread's sentinel; that of the stack has [`STACK_BIT`], too. `None` once the program
    /// has used this number.
    token: Option<u64>,
    sentinels: Option<Sentinels>,
    /// The waiter of the thread that sleeps on the instance.
    sleeper: Option<u32>,
    /// Events that a sleep has returned and `epoll_wait` has not reported.
    pub taken: VecDeque<EpollEvent>,
}

impl DirectSleep {
    /// Creates the state of a set, which is the `number`th of the process. `is_shared` tells whether another
    /// process may have the set.
    pub fn new(number: u64, is_shared: bool) -> Self {
        let token = Some(RandomState::new().hash_one(number) & !STACK_BIT);
        let (sentinels, sleeper, taken) = (None, None, VecDeque::new());
        Self { is_wanted: false, is_banned: is_shared, token, sentinels, sleeper, taken }
    }
}

impl EpollSet {
    /// Returns whether a call on the set may sleep on the kernel's instance.
    pub(super) fn wants_direct_sleep(&self) -> bool {
        self.direct.is_wanted
    }

    /// Must be called with each event that the program gives a kernel descriptor in the set.
    pub(super) fn note_kernel_item(&mut self, event: EpollEvent) {
        self.direct.is_wanted |= event.events & super::EXCLUSIVE != 0 && !self.direct.is_banned;
        if self.is_sentinel(event.data) {
            self.ban_direct_sleep();
            self.direct.token = None;
        }
    }

    /// Returns whether an event with this data is one of a sentinel.
    pub(super) fn is_sentinel(&self, data: u64) -> bool {
        Some(data & !STACK_BIT) == self.direct.token
    }

    /// Returns the event for which a sentinel is added.
    fn sentinel_event(&self, events: u32, bit: u64) -> EpollEvent {
        EpollEvent { events, data: self.direct.token.unwrap_or(0) | bit }
    }

    /// Must be called before the set is shared with another process, added to another set, or polled. From
    /// then on no call sleeps on the kernel's instance. A thread that does is woken.
    pub fn ban_direct_sleep(&mut self) {
        self.direct.is_wanted = false;
        if self.direct.sleeper.is_some()
            && self.direct.sleeper == sleeping_waiter()
            && lock::has_handler_begun()
        {
            // The caller is a handler that has interrupted the sleep.
            self.remove_sentinels();
        }
        if core::mem::replace(&mut self.direct.is_banned, true) {
            return;
        }
        let Some(sentinels) = &mut self.direct.sentinels else { return };
        let (thread_event, stack) = (sentinels.thread_event, sentinels.stack.take());
        if let Some((stack, _)) = stack {
            self.remove_sentinel(stack);
        }
        if self.direct.sleeper.is_none() {
            self.remove_sentinels();
            return;
        }
        // Level-triggered, the sentinel remains until the thread has seen it, whoever else takes events.
        let event = self.sentinel_event(super::IN, 0);
        if let Ok(fd) = borrow(thread_event) {
            let _ = kernel_epoll_ctl(self.kernel.as_fd(), libc::EPOLL_CTL_MOD, fd, event);
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }

    /// Must be called if a handler has interrupted the sleep of a thread on the instance, and the sleep ends
    /// when the handler returns. Until then nobody would take the sentinels' events.
    pub fn suspend_direct_sleep(&mut self, waiter: u32) {
        if self.direct.sleeper == Some(waiter) {
            self.remove_sentinels();
        }
    }

    /// Returns whether the kernel's instance has descriptors of the library.
    pub fn has_sentinels(&self) -> bool {
        self.direct.sentinels.is_some()
    }

    /// Returns whether the instance has an event for the program. The only sentinel of a banned set, that of
    /// a thread that must leave the instance, is removed meanwhile, because it would count as an event.
    pub(super) fn is_kernel_readable(&self) -> bool {
        let is_readable = || {
            let mut fd = [rustix::event::PollFd::new(&self.kernel, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fd, Some(&rustix::event::Timespec::default())).is_ok_and(|n| n > 0)
        };
        if !is_readable() {
            return false;
        }
        let Some(Sentinels { thread_event, stack, .. }) = self.direct.sentinels else { return true };
        debug_assert!(stack.is_none(), "sets that are polled have no sentinel of the stack");
        self.remove_sentinel(thread_event);
        let has_event = is_readable();
        if let Ok(fd) = borrow(thread_event) {
            // The eventfd is readable: the thread is woken again.
            let event = self.sentinel_event(super::IN, 0);
            let _ = kernel_epoll_ctl(self.kernel.as_fd(), libc::EPOLL_CTL_ADD, fd, event);
        }
        has_event
    }

    /// Forgets events that were not reported, if no kernel descriptor is left.
    pub(super) fn forget_events_of_removed(&mut self) {
        if self.kernel_items == 0 {
            self.direct.taken.clear();
        }
    }

    /// Must be called when an internal descriptor has moved to another number, while it still has the former
    /// one, too: later the kernel's instance could not be told to remove it.
    pub fn renumber_sentinel(&mut self, from: RawFd, to: RawFd) {
        let Some(Sentinels { thread_event, stack, .. }) = &mut self.direct.sentinels else { return };
        let bit = match stack {
            Some((stack, _)) if *stack == from => {
                *stack = to;
                STACK_BIT
            }
            _ if *thread_event == from => {
                *thread_event = to;
                0
            }
            _ => return,
        };
        self.remove_sentinel(from);
        if let Ok(fd) = borrow(to) {
            let event = self.sentinel_event(if self.direct.is_banned { super::IN } else { EDGES }, bit);
            // A thread that sleeps on the instance sees an event that the former number has had.
            let _ = kernel_epoll_ctl(self.kernel.as_fd(), libc::EPOLL_CTL_ADD, fd, event);
        }
    }

    /// Must be called before the descriptor by which the stack wakes the process is closed: its number may be
    /// that of another descriptor in the set afterwards.
    pub fn remove_stack_sentinel(&mut self) {
        let stack = self.direct.sentinels.as_mut().and_then(|sentinels| sentinels.stack.take());
        if let Some((stack, _)) = stack {
            self.remove_sentinel(stack);
        }
    }

    /// Must be called after a fork, in the child: the sentinels and the threads are the parent's.
    pub fn forget_direct_sleep(&mut self) {
        (self.direct.sentinels, self.direct.sleeper) = (None, None);
        self.direct.taken.clear();
    }

    fn remove_sentinels(&mut self) {
        let Some(Sentinels { thread_event, stack, .. }) = self.direct.sentinels.take() else { return };
        self.remove_sentinel(thread_event);
        if let Some((stack, _)) = stack {
            self.remove_sentinel(stack);
        }
    }

    fn remove_sentinel(&self, fd: RawFd) {
        if let Ok(fd) = borrow(fd) {
            // Fails if the descriptor was closed, which has removed it from the instance.
            let _ = epoll::delete(&self.kernel, fd);
        }
    }

    fn add_sentinel(&self, fd: BorrowedFd<'_>, bit: u64) -> bool {
        let event = self.sentinel_event(EDGES, bit);
        let added = kernel_epoll_ctl(self.kernel.as_fd(), libc::EPOLL_CTL_ADD, fd, event);
        matches!(added, Ok(()) | Err(Errno::EXIST))
    }

    /// Prepares the kernel's instance for the sleep of a thread, and returns its descriptor. Returns `None`
    /// if the thread must sleep elsewhere. Otherwise [`end_direct_sleep`](Self::end_direct_sleep) must
    /// follow.
    pub fn begin_direct_sleep(&mut self, wake: &WakeFds<'_>) -> Option<RawFd> {
        if !self.wants_direct_sleep() || self.direct.sleeper.is_some() {
            return None;
        }
        let present = self.direct.sentinels;
        let stack = wake.stack.map(|(fd, generation)| (fd.as_raw_fd(), generation));
        if present.is_none_or(|present| present.waiter != wake.waiter || present.stack != stack) {
            self.replace_sentinels(present, wake)?;
        }
        self.direct.sleeper = Some(wake.waiter);
        Some(self.kernel.as_raw_fd())
    }

    /// Replaces sentinels by those of another thread, or of a thread that has become the leader or resigned.
    #[cold]
    fn replace_sentinels(&mut self, present: Option<Sentinels>, wake: &WakeFds<'_>) -> Option<()> {
        if present.is_some_and(|present| present.waiter != wake.waiter) {
            self.remove_sentinels();
        } else if let Some(Sentinels { stack: Some((fd, _)), .. }) = present {
            self.remove_sentinel(fd);
        }
        let stack = wake.stack.map(|(fd, generation)| (fd.as_raw_fd(), generation));
        let thread_event = wake.thread_event.as_raw_fd();
        self.direct.sentinels = Some(Sentinels { waiter: wake.waiter, thread_event, stack });
        let is_added = self.add_sentinel(wake.thread_event, 0)
            && wake.stack.is_none_or(|(fd, _)| self.add_sentinel(fd, STACK_BIT));
        if !is_added {
            // The reason may last (fs.epoll.max_user_watches): the next exclusive item is tried again.
            self.direct.is_wanted = false;
            self.remove_sentinels();
        }
        is_added.then_some(())
    }

    /// Keeps the events of a sleep on the kernel's instance for `epoll_wait`, and returns what ended the
    /// sleep. The sleep returned no more than `room` events.
    pub fn end_direct_sleep(&mut self, events: &[libc::epoll_event], room: usize) -> WakeCause {
        let mut cause = WakeCause::default();
        self.direct.sleeper = None;
        for event in events {
            let (data, events) = (event.u64, event.events);
            if !self.is_sentinel(data) {
                self.direct.taken.push_back(EpollEvent { events, data });
            } else if data & STACK_BIT != 0 {
                cause.stack_event = true;
                cause.hung_up = events & (libc::EPOLLHUP | libc::EPOLLRDHUP) as u32 != 0;
            }
        }
        // The descriptors may have been removed meanwhile.
        self.forget_events_of_removed();
        if !self.direct.taken.is_empty() {
            self.rounds_without_kernel = KERNEL_POLL_INTERVAL;
        }
        // Sentinels may have taken the places of other events.
        cause.kernel_event = !self.direct.taken.is_empty() || events.len() == room;
        if self.direct.is_banned {
            self.remove_sentinels();
        }
        cause
    }

    /// Must be called when a sleep has ended without [`end_direct_sleep`](Self::end_direct_sleep).
    pub fn cancel_direct_sleep(&mut self, waiter: u32) {
        if self.direct.sleeper == Some(waiter) {
            self.end_direct_sleep(&[], 1);
        }
    }

    /// Must be called after events were taken from the kernel's instance, sentinels among them. A thread that
    /// sleeps there gets the sentinels again.
    #[cold]
    pub(super) fn return_sentinels(&self) {
        let (Some(_), Some(Sentinels { thread_event, stack, .. }), false) =
            (self.direct.sleeper, self.direct.sentinels, self.direct.is_banned)
        else {
            // A level-triggered sentinel is still there.
            return;
        };
        let sentinels = [(Some(thread_event), 0), (stack.map(|(fd, _)| fd), STACK_BIT)];
        for (fd, bit) in sentinels {
            if let Some(Ok(fd)) = fd.map(borrow) {
                let event = self.sentinel_event(EDGES, bit);
                let _ = kernel_epoll_ctl(self.kernel.as_fd(), libc::EPOLL_CTL_MOD, fd, event);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fd::OwnedFd;

    const EXCLUSIVE_IN: u32 = super::super::IN | super::super::EXCLUSIVE;

    fn event_fd() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    /// A set with an exclusive kernel descriptor, on whose kernel instance a thread sleeps.
    struct Fixture {
        set: EpollSet,
        item: OwnedFd,
        thread_event: OwnedFd,
        stack: OwnedFd,
    }

    impl Fixture {
        fn new() -> Self {
            let instance = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
            let mut set = EpollSet::new(crate::descriptor::HiddenFd::new(instance).unwrap());
            let item = event_fd();
            let event = EpollEvent { events: EXCLUSIVE_IN, data: 7 };
            kernel_epoll_ctl(set.kernel.as_fd(), libc::EPOLL_CTL_ADD, item.as_fd(), event).unwrap();
            set.note_kernel_item(event);
            set.kernel_items = 1;
            let mut fixture = Self { set, item, thread_event: event_fd(), stack: event_fd() };
            fixture.sleep();
            fixture
        }

        fn sleep(&mut self) {
            let stack = Some((self.stack.as_fd(), 0));
            let wake = WakeFds { waiter: 3, thread_event: self.thread_event.as_fd(), stack };
            assert!(self.set.begin_direct_sleep(&wake).is_some());
        }

        /// Takes the events that a sleep would take now.
        fn take(&self) -> Vec<libc::epoll_event> {
            let mut events = [const { core::mem::MaybeUninit::uninit() }; 8];
            let no_wait = rustix::event::Timespec::default();
            let (events, _) = epoll::wait(&self.set.kernel, &mut events, Some(&no_wait)).unwrap();
            let of_libc = |event: &epoll::Event| {
                let (flags, data) = (event.flags, event.data.u64());
                libc::epoll_event { events: flags.bits(), u64: data }
            };
            events.iter().map(of_libc).collect()
        }
    }

    fn signal(event: &OwnedFd) {
        rustix::io::write(event, &1u64.to_ne_bytes()).unwrap();
    }

    #[test]
    fn event_of_a_removed_descriptor_does_not_remain() {
        let mut fixture = Fixture::new();
        signal(&fixture.item);
        let taken = fixture.take();
        assert_eq!(taken.len(), 1);
        epoll::delete(&fixture.set.kernel, &fixture.item).unwrap();
        fixture.set.note_removed_kernel_item();
        let cause = fixture.set.end_direct_sleep(&taken, 8);
        assert!(!cause.kernel_event && !fixture.set.kernel_ready());
        // The program could not take the events of a call; then the descriptor is removed.
        (fixture.set.kernel_items, fixture.set.direct.sleeper) = (1, Some(3));
        assert!(fixture.set.end_direct_sleep(&taken, 8).kernel_event);
        assert!(fixture.set.kernel_ready());
        fixture.set.note_removed_kernel_item();
        assert!(!fixture.set.kernel_ready());
    }

    #[test]
    fn interrupted_sleeper_leaves_nothing_in_the_instance() {
        let mut fixture = Fixture::new();
        signal(&fixture.thread_event);
        signal(&fixture.stack);
        fixture.set.suspend_direct_sleep(4);
        assert!(fixture.set.has_sentinels(), "another thread sleeps");
        fixture.set.suspend_direct_sleep(3);
        assert!(fixture.take().is_empty());
        fixture.set.ban_direct_sleep();
        assert!(fixture.take().is_empty() && !fixture.set.kernel_ready());
        signal(&fixture.item);
        assert!(fixture.set.kernel_ready());
        assert_eq!(fixture.take().len(), 1);
    }

    #[test]
    fn moved_sentinels_wake_and_leave_nothing() {
        let mut fixture = Fixture::new();
        // The number belongs to another descriptor after the move, as after `dup2`.
        let other = event_fd();
        for is_stack in [false, true] {
            let descriptor = if is_stack { &fixture.stack } else { &fixture.thread_event };
            let number = descriptor.as_raw_fd();
            let moved = rustix::io::fcntl_dupfd_cloexec(borrow(number).unwrap(), 0).unwrap();
            signal(&moved);
            fixture.take();
            fixture.set.renumber_sentinel(number, moved.as_raw_fd());
            let mut former = if is_stack {
                core::mem::replace(&mut fixture.stack, moved)
            } else {
                core::mem::replace(&mut fixture.thread_event, moved)
            };
            rustix::io::dup2(&other, &mut former).unwrap();
            let [event] = fixture.take()[..] else { panic!("the thread is not woken: {is_stack}") };
            let data = event.u64;
            assert_eq!((fixture.set.is_sentinel(data), data & STACK_BIT != 0), (true, is_stack));
        }
        fixture.set.end_direct_sleep(&[], 8);
        fixture.set.ban_direct_sleep();
        signal(&fixture.thread_event);
        signal(&fixture.stack);
        assert!(fixture.take().is_empty() && !fixture.set.has_sentinels());
    }

    #[test]
    fn former_wake_descriptor_is_not_removed_by_number() {
        let mut fixture = Fixture::new();
        fixture.set.remove_stack_sentinel();
        signal(&fixture.stack);
        assert!(fixture.take().is_empty());
        fixture.set.end_direct_sleep(&[], 8);
        // The number belongs to an item of the program.
        let event = EpollEvent { events: super::super::IN, data: 8 };
        let item = core::mem::replace(&mut fixture.stack, event_fd());
        kernel_epoll_ctl(fixture.set.kernel.as_fd(), libc::EPOLL_CTL_ADD, item.as_fd(), event).unwrap();
        fixture.sleep();
        let data: Vec<_> = fixture.take().iter().map(|event| event.u64).collect();
        assert_eq!(data, [8]);
        signal(&fixture.stack);
        assert_eq!(fixture.take().len(), 2, "the new descriptor wakes the thread");
    }

    #[test]
    fn sentinel_that_cannot_be_added_is_not_tried_again() {
        let mut fixture = Fixture::new();
        fixture.set.end_direct_sleep(&[], 8);
        // The kernel accepts no file as an item, and refuses it each time.
        let file = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let wake = WakeFds { waiter: 4, thread_event: file.as_fd(), stack: None };
        assert!(fixture.set.begin_direct_sleep(&wake).is_none());
        assert!(!fixture.set.has_sentinels() && !fixture.set.wants_direct_sleep());
        fixture.set.note_kernel_item(EpollEvent { events: EXCLUSIVE_IN, data: 9 });
        fixture.sleep();
    }

    #[test]
    fn sleeper_of_a_banned_set_is_woken_and_no_event_is_seen() {
        let mut fixture = Fixture::new();
        signal(&fixture.stack);
        fixture.set.ban_direct_sleep();
        for _ in 0..2 {
            assert!(!fixture.set.kernel_ready(), "the program has no event");
            let [event] = fixture.take()[..] else { panic!("the thread was not woken") };
            let data = event.u64;
            assert!(fixture.set.is_sentinel(data) && data & STACK_BIT == 0);
            // Another call that has taken the sentinel returns it.
            fixture.set.return_sentinels();
        }
        signal(&fixture.item);
        assert!(fixture.set.kernel_ready());
        fixture.set.end_direct_sleep(&[], 8);
        let data: Vec<_> = fixture.take().iter().map(|event| event.u64).collect();
        assert_eq!(data, [7]);
    }
}
