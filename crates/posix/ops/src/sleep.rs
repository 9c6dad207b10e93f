//! Threads that block in a call. One of them, the leader, sleeps on the descriptor by which the stack wakes
//! the process, and processes events for all; the others sleep until the leader wakes them.

use crate::channels::Channels;
use crate::cleanup::CleanupHandler;
use crate::descriptor::{HiddenFd, is_shortage, take_ownership};
use crate::epoll::DirectWait;
use crate::lock::LockGuard;
use crate::process::ProcessState;
use crate::scratch;
use crate::signal::{HandlerSets, SignalSet};
use crate::syscall;
use crate::wait_set::{self, KernelEpoll, WaitSet};
use crate::{FileId, Ops, lock};
use core::cell::Cell;
use core::pin::pin;
use core::time::Duration;
use ginnel::raised_limit::with_raised_limit;
use libc::{POLLIN, pollfd, sigset_t};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsRawFd, RawFd};
use rustix::io::Errno;
use std::time::Instant;

use crate::wait_queue::WaitEntry;

mod direct;

/// How long a call waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timeout {
    /// The call does not wait.
    Zero,
    /// The call waits until this moment.
    Deadline(Instant),
    /// The call waits without limit.
    Infinite,
}

impl Timeout {
    /// Returns the time-out that ends after this duration; `None` is infinite.
    pub fn after(timeout: Option<Duration>) -> Self {
        match timeout {
            None => Self::Infinite,
            Some(Duration::ZERO) => Self::Zero,
            Some(time) => Instant::now().checked_add(time).map_or(Self::Infinite, Self::Deadline),
        }
    }

    /// Returns the time-out for a number of milliseconds as in `poll`; a negative number is infinite.
    pub fn from_millis(timeout_ms: i32) -> Self {
        Self::after(u64::try_from(timeout_ms).ok().map(Duration::from_millis))
    }

    pub(crate) fn has_expired(self) -> bool {
        match self {
            Self::Zero => true,
            Self::Deadline(end) => Instant::now() >= end,
            Self::Infinite => false,
        }
    }
}

thread_local! {
    /// The waiter of this thread while it sleeps without the lock, in the kernel or spinning. A handler that
    /// runs meanwhile may fork.
    static SLEEPING: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Returns the waiter of this thread if it sleeps.
pub(crate) fn sleeping_waiter() -> Option<u32> {
    SLEEPING.get()
}

/// A thread that blocks in a call.
struct Waiter {
    event: HiddenFd,
    /// An event for which the thread waits has happened.
    woken: bool,
    /// The thread sleeps in the kernel.
    asleep: bool,
    in_use: bool,
    /// True if a handler has interrupted the sleep and blocks in a call itself. The sleep ends when the
    /// handler returns (signal(7)).
    interrupted: bool,
    /// A signalfd that is readable while one of these signals is pending: signals with `SA_RESTART` handlers
    /// that the sleep blocks.
    restart_signals: Option<(HiddenFd, SignalSet)>,
    /// The epoll instance on which the thread sleeps when it is the leader.
    wait_set: Option<WaitSet>,
    /// The epoll set on whose kernel instance the thread sleeps.
    direct_set: Option<FileId>,
}

impl Waiter {
    fn new(event: HiddenFd) -> Self {
        let (woken, asleep, in_use, interrupted) = (false, false, false, false);
        Self {
            event,
            woken,
            asleep,
            in_use,
            interrupted,
            restart_signals: None,
            wait_set: None,
            direct_set: None,
        }
    }

    /// Returns the signalfd for these signals.
    fn watch_restart_signals(&mut self, set: SignalSet) -> Result<RawFd, Errno> {
        match &mut self.restart_signals {
            Some((fd, watched)) => {
                if *watched != set {
                    syscall::signalfd(Some(fd.as_raw_fd()), set)?;
                    *watched = set;
                }
                Ok(fd.as_raw_fd())
            }
            None => {
                let fd = HiddenFd::new(take_ownership(syscall::signalfd(None, set)?))?;
                let number = fd.as_raw_fd();
                self.restart_signals = Some((fd, set));
                Ok(number)
            }
        }
    }
}

/// All threads that block in calls.
#[derive(Default)]
pub(crate) struct Waiters {
    waiters: Vec<Waiter>,
    leader: Option<u32>,
    /// How often another descriptor has become the one that wakes the process.
    wake_fd_generation: u32,
    /// In the sleep that has just ended, the kernel checked its descriptors.
    pub polled_kernel: bool,
}

impl Waiters {
    fn add(&mut self) -> Result<u32, Errno> {
        let free = self.waiters.iter().position(|waiter| !waiter.in_use);
        let index = match free {
            Some(index) => index,
            None => {
                let event = HiddenFd::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)?;
                self.waiters.push(Waiter::new(event));
                self.waiters.len() - 1
            }
        };
        let waiter = &mut self.waiters[index];
        (waiter.in_use, waiter.woken, waiter.asleep, waiter.interrupted) = (true, false, false, false);
        Ok(index as u32)
    }

    /// Returns the waiters of a child process. Only that of the thread that forked continues, and its
    /// descriptors are the child's own.
    pub fn for_child(own: Option<u32>) -> Result<Self, Errno> {
        let mut waiters = Self::default();
        // The program may have used all of its descriptors. A child has one thread.
        let event = || HiddenFd::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        for number in 0..own.map_or(0, |own| own + 1) {
            let mut waiter = Waiter::new(with_raised_limit(is_shortage, event)?);
            waiter.in_use = Some(number) == own;
            (waiter.woken, waiter.asleep) = (waiter.in_use, waiter.in_use);
            waiters.waiters.push(waiter);
        }
        Ok(waiters)
    }

    /// Iterates over the descriptors of all waiters.
    pub fn own_fds(&self) -> impl Iterator<Item = &HiddenFd> {
        self.waiters.iter().flat_map(|waiter| {
            let of_signals = waiter.restart_signals.iter().map(|(fd, _)| fd);
            of_signals.chain(waiter.wait_set.iter().map(WaitSet::epoll_fd)).chain([&waiter.event])
        })
    }

    /// Must be called when another descriptor wakes the process from now on. A leader that sleeps on the
    /// previous one is woken.
    pub fn replace_wake_fd(&mut self) {
        self.wake_fd_generation += 1;
        for waiter in &mut self.waiters {
            if let Some(wait_set) = &mut waiter.wait_set {
                wait_set.is_stale = true;
            }
            if waiter.in_use && waiter.asleep {
                notify(&waiter.event);
            }
        }
    }

    fn remove(&mut self, waiter: u32) {
        self.waiters[waiter as usize].in_use = false;
    }

    /// Wakes a waiter. Returns false if it was woken before, or if a handler keeps it from running soon.
    pub fn wake(&mut self, waiter: u32) -> bool {
        let waiter = &mut self.waiters[waiter as usize];
        if waiter.woken {
            return false;
        }
        waiter.woken = true;
        if waiter.asleep {
            notify(&waiter.event);
        }
        !waiter.interrupted
    }

    /// Wakes all waiters.
    pub fn wake_all(&mut self) {
        for waiter in 0..self.waiters.len() as u32 {
            if self.waiters[waiter as usize].in_use {
                self.wake(waiter);
            }
        }
    }

    /// Wakes another waiter to become the leader, after the leader has resigned.
    fn elect_leader(&mut self) {
        self.leader = None;
        let mut next = self.waiters.iter().filter(|w| w.in_use && w.asleep && !w.woken && !w.interrupted);
        if let Some(next) = next.next() {
            notify(&next.event);
        }
    }
}

fn notify(event: &HiddenFd) {
    // An eventfd whose counter is full is readable, too.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Creates the descriptors on which the next call will sleep.
pub(crate) fn preallocate(state: &mut ProcessState) -> Result<(), Errno> {
    let waiter = state.waiters.add()?;
    state.wait_set_for(waiter as usize, None);
    state.waiters.remove(waiter);
    Ok(())
}

/// How a call waits.
pub(crate) struct Wait<'a> {
    pub timeout: Timeout,
    /// The signal mask during the wait, instead of the thread's.
    pub mask: Option<&'a sigset_t>,
    /// Only one of the threads that wait exclusively for the same event is woken.
    pub exclusive: bool,
    /// The kernel's part of the epoll set for which the call waits. The call waits for no other kernel
    /// descriptor.
    pub kernel_epoll: Option<KernelEpoll>,
    /// The epoll set, if the call may sleep on the kernel's part itself.
    pub direct: Option<DirectWait>,
    /// Present if the call continues after a handler with `SA_RESTART`. The counter says how much the call
    /// has done; if it is not 0, the call returns instead.
    pub restart_unless: Option<&'a Cell<usize>>,
    /// True if the call fails with `EINTR` when the process was stopped and continued, even without a handler
    /// (signal(7)).
    pub eintr_on_stop: bool,
}

impl<'a> Wait<'a> {
    /// Returns the wait of a call that fails with `EINTR` after every handler, such as `poll` (signal(7)).
    pub fn of(timeout: Timeout) -> Self {
        Self {
            timeout,
            mask: None,
            exclusive: false,
            kernel_epoll: None,
            direct: None,
            restart_unless: None,
            eintr_on_stop: false,
        }
    }

    /// Returns the wait of a call that continues after a handler with `SA_RESTART` if it has no time-out and
    /// `done` is 0.
    pub fn restarting(timeout: Timeout, done: &'a Cell<usize>) -> Self {
        let endless = timeout == Timeout::Infinite;
        Self { restart_unless: endless.then_some(done), eintr_on_stop: !endless, ..Self::of(timeout) }
    }
}

/// Why a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SleepEnd {
    /// Something may have happened.
    Event,
    /// A handler ran, after which the call continues.
    HandlerRan,
}

impl Ops {
    /// Repeats `attempt` until it returns something other than `EAGAIN`. In between waits for events of
    /// `files`, or for readiness of the kernel descriptors. Returns `EAGAIN` when the time-out expires and
    /// `EINTR` after a signal.
    #[inline]
    pub(crate) fn block_until<'a, T>(
        &'a self,
        mut state: LockGuard<'a>,
        files: &[FileId],
        kernel: &mut [pollfd],
        wait: &Wait<'_>,
        mut attempt: impl FnMut(&mut ProcessState, &mut [pollfd]) -> Result<T, Errno>,
    ) -> (LockGuard<'a>, Result<T, Errno>) {
        // The sleep of another call says nothing about the descriptors of this one.
        state.waiters.polled_kernel = false;
        let first = attempt(&mut state, kernel);
        if !matches!(first, Err(Errno::AGAIN)) {
            return (state, first);
        }
        if wait.timeout == Timeout::Zero {
            state.note_empty_poll();
            return (state, first);
        }
        self.block_until_from_second(state, files, kernel, wait, attempt)
    }

    /// As [`block_until`](Self::block_until), after a first attempt that returned `EAGAIN`.
    #[inline(never)]
    pub(crate) fn block_until_from_second<'a, T>(
        &'a self,
        mut state: LockGuard<'a>,
        files: &[FileId],
        kernel: &mut [pollfd],
        wait: &Wait<'_>,
        mut attempt: impl FnMut(&mut ProcessState, &mut [pollfd]) -> Result<T, Errno>,
    ) -> (LockGuard<'a>, Result<T, Errno>) {
        let waiter = match state.waiters.add() {
            Ok(waiter) => waiter,
            Err(error) => return (state, Err(error)),
        };
        // Handlers that run from here on interrupt a call that waits.
        lock::clear_handlers_ran();
        // A handler may leave this call by a jump while it sleeps.
        let outer_waiter = sleeping_waiter();
        let cleanup_handler = pin!(CleanupHandler::new(|| self.cancel_sleep(waiter, files, outer_waiter)));
        let cleanup_guard = cleanup_handler.push();
        for &file in files {
            let entry = WaitEntry::Thread { waiter, exclusive: wait.exclusive };
            let file = state.files.get(file);
            file.refcount += 1;
            file.wait_queue.push(entry);
        }
        // This processes events, so this call's waiter must be in the wait queues before.
        state.suspend_interrupted_sleep();
        let result = loop {
            let sleep_end;
            (state, sleep_end) = self.sleep(state, waiter, kernel, wait);
            match attempt(&mut state, kernel) {
                Err(Errno::AGAIN) => {}
                result => break result,
            }
            match sleep_end {
                Ok(SleepEnd::Event) => {}
                // A call that has done something reports that before it waits for the rest.
                Ok(SleepEnd::HandlerRan) if wait.restart_unless.is_none_or(|done| done.get() == 0) => {
                    lock::clear_handlers_ran();
                }
                Ok(SleepEnd::HandlerRan) => break Err(Errno::INTR),
                Err(error) => break Err(error),
            }
            if wait.timeout.has_expired() {
                break Err(Errno::AGAIN);
            }
        };
        state.finish_wait(waiter, files);
        drop(cleanup_guard);
        (state, result)
    }

    /// Cleans up after a handler that left a sleeping call by a jump.
    #[cold]
    fn cancel_sleep(&self, waiter: u32, files: &[FileId], outer_waiter: Option<u32>) {
        // A call that was interrupted inside the critical section cannot be cleaned up.
        let Ok(mut state) = self.lock() else { return };
        state.suspend_interrupted_sleep();
        SLEEPING.set(outer_waiter);
        lock::set_handler_begun(false);
        let entry = &mut state.waiters.waiters[waiter as usize];
        entry.asleep = false;
        if let Some(set) = entry.direct_set.take()
            && let Ok(set) = state.files.epoll(set)
        {
            set.cancel_direct_sleep(waiter);
        }
        state.finish_wait(waiter, files);
    }

    /// Sleeps until the waiter is woken, a kernel descriptor is ready, or the time-out expires. Stores
    /// readiness in `kernel`. May return spuriously.
    fn sleep<'a>(
        &'a self,
        mut state: LockGuard<'a>,
        waiter: u32,
        kernel: &mut [pollfd],
        wait: &Wait<'_>,
    ) -> (LockGuard<'a>, Result<SleepEnd, Errno>) {
        let index = waiter as usize;
        state.waiters.polled_kernel = false;
        kernel.iter_mut().for_each(|fd| fd.revents = 0);
        state.client.flush();
        // Spinning does not help if the shard sleeps, or waits for this CPU.
        let mut spin_end = None;
        loop {
            state.process_events();
            if core::mem::take(&mut state.waiters.waiters[index].woken) {
                return (state, Ok(SleepEnd::Event));
            }
            if wait.timeout.has_expired() {
                // The descriptors were not checked, so the next attempt must try all of them.
                kernel.iter_mut().for_each(|fd| fd.revents = fd.events);
                return (state, Ok(SleepEnd::Event));
            }
            if self.config.spin.is_zero() || !state.client.is_stack_running_elsewhere() {
                break;
            }
            let now = Instant::now();
            if now >= *spin_end.get_or_insert(now + self.config.spin) {
                break;
            }
            // A handler may fork meanwhile, and the child goes on with this call.
            let outer_waiter = SLEEPING.replace(Some(waiter));
            drop(state);
            core::hint::spin_loop();
            state = self.lock_or_panic();
            SLEEPING.set(outer_waiter);
            // A handler that made a call has returned.
            state.waiters.waiters[index].interrupted = false;
        }
        let is_leader = state.waiters.leader.is_none();
        if is_leader && !state.client.before_sleep() {
            state.client.after_sleep();
            state.process_events();
            state.notice_stack_end();
            return (state, Ok(SleepEnd::Event));
        }
        let handlers = wait.restart_unless.map(|_| self.signals.handlers()).unwrap_or_default();
        let mut mask = wait.mask.map(syscall::kernel_sigset);
        let mut signalfd = -1;
        if handlers.is_mixed()
            && let Ok(blocked) = lock::blocked_signals()
        {
            let set = handlers.restarting & !blocked;
            // Without descriptors every signal interrupts the call.
            if let Ok(fd) = state.waiters.waiters[index].watch_restart_signals(set) {
                signalfd = fd;
                mask = Some(blocked | set);
            }
        }
        // A handler that has run since the call began ends the sleep at once, except for signals that the
        // caller's mask blocks.
        let interrupting = !wait.mask.map_or(0, syscall::kernel_sigset);
        let timeout = if is_leader { state.bounded_by_stack_end(wait.timeout) } else { wait.timeout };
        let bounds = SleepBounds { timeout, mask, interrupting };
        let args = SleepArgs { waiter, wait, bounds, handlers };
        if is_leader {
            state.waiters.leader = Some(waiter);
        }
        let asleep = &mut state.waiters.waiters[index];
        (asleep.asleep, asleep.interrupted) = (true, false);
        let outer_waiter = SLEEPING.replace(Some(waiter));
        if let Some(direct) = wait.direct
            && signalfd < 0
            && let Some(epoll) = state.begin_direct_sleep(waiter, is_leader, direct.set)
        {
            state.waiters.waiters[index].direct_set = Some(direct.set);
            let outer_has_begun = lock::set_handler_begun(false);
            let (mut state, sleep_end) = self.sleep_directly(state, &args, direct, epoll, kernel);
            lock::set_handler_begun(outer_has_begun);
            state.waiters.waiters[index].direct_set = None;
            SLEEPING.set(outer_waiter);
            return (state, sleep_end);
        }
        let uses_wait_set =
            is_leader && signalfd < 0 && kernel.len() == usize::from(wait.kernel_epoll.is_some());
        if uses_wait_set && let Some(wait_set) = state.wait_set_for(index, wait.kernel_epoll) {
            let sleep_end = self.sleep_on_wait_set(state, &args, wait_set, kernel);
            SLEEPING.set(outer_waiter);
            return sleep_end;
        }
        let sleep_end = scratch::with(|scratch| {
            self.sleep_in_ppoll(state, &args, signalfd, kernel, &mut scratch.sleep_fds)
        });
        SLEEPING.set(outer_waiter);
        sleep_end
    }

    /// Sleeps in `ppoll`, on kernel descriptors and on the signalfd of blocked `SA_RESTART` signals. The
    /// caller provides the list of descriptors.
    fn sleep_in_ppoll<'a>(
        &'a self,
        mut state: LockGuard<'a>,
        args: &SleepArgs<'_>,
        signalfd: RawFd,
        kernel: &mut [pollfd],
        watched: &mut Vec<pollfd>,
    ) -> (LockGuard<'a>, Result<SleepEnd, Errno>) {
        let &SleepArgs { waiter, wait, bounds, handlers } = args;
        let index = waiter as usize;
        let is_leader = state.waiters.leader == Some(waiter);
        let own_event = state.waiters.waiters[index].event.as_raw_fd();
        let entry = |fd| pollfd { fd, events: POLLIN, revents: 0 };
        watched.push(entry(own_event));
        // The descriptor of a stack that is gone stays readable and brings no events.
        let wakes = is_leader && !state.client.is_stack_gone();
        watched.push(entry(if wakes { state.client.wake_fd().as_raw_fd() } else { -1 }));
        watched.push(entry(signalfd));
        watched.extend_from_slice(kernel);
        drop(state);
        // Handlers of signals that the sleep has blocked run before this returns.
        let sleep_end = match self.unless_isolated(|| ppoll(watched, bounds)) {
            Err(Errno::INTR) if self.is_isolated() => Err(Errno::INTR),
            Ok(()) if watched[2].revents != 0 => Ok(SleepEnd::HandlerRan),
            Ok(()) => Ok(SleepEnd::Event),
            Err(Errno::INTR) => self.after_interruption(wait, handlers),
            Err(error) => Err(error),
        };
        for (fd, polled) in kernel.iter_mut().zip(&watched[3..]) {
            fd.revents = polled.revents;
        }
        state = self.lock_or_panic();
        state.waiters.polled_kernel = true;
        let entry = &mut state.waiters.waiters[index];
        entry.asleep = false;
        if watched[0].revents != 0 {
            let _ = rustix::io::read(&entry.event, &mut [0; 8]);
        }
        if state.waiters.leader == Some(waiter) {
            state.resign_leader(Channels::after_sleep);
        } else {
            state.process_events();
        }
        state.waiters.waiters[index].woken = false;
        (state, sleep_end)
    }

    /// Sleeps on the wait set: a leader that waits for no other kernel descriptor.
    fn sleep_on_wait_set<'a>(
        &'a self,
        state: LockGuard<'a>,
        args: &SleepArgs<'_>,
        wait_set: RawFd,
        kernel: &mut [pollfd],
    ) -> (LockGuard<'a>, Result<SleepEnd, Errno>) {
        let &SleepArgs { waiter, wait, bounds, handlers } = args;
        let index = waiter as usize;
        drop(state);
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
        let sleep_end = self.unless_isolated(|| {
            syscall::epoll_pwait2(
                wait_set,
                &mut events,
                timeout_of(bounds.timeout),
                bounds.mask,
                bounds.interrupting,
            )
        });
        let mut state = self.lock_or_panic();
        let (count, sleep_end) = match sleep_end {
            Ok(count) => (count, Ok(SleepEnd::Event)),
            Err(Errno::INTR) if self.is_isolated() => (0, Err(Errno::INTR)),
            Err(Errno::INTR) => (0, self.after_interruption(wait, handlers)),
            Err(error) => (0, Err(error)),
        };
        state.waiters.polled_kernel = sleep_end.is_ok();
        let entry = &mut state.waiters.waiters[index];
        entry.asleep = false;
        let cause = entry.wait_set.as_mut().map(|set| set.wake_cause(&events[..count])).unwrap_or_default();
        if cause.kernel_event {
            kernel.iter_mut().for_each(|fd| fd.revents = fd.events);
        }
        if state.waiters.leader == Some(waiter) {
            state.resign_leader(|client| client.after_epoll_wait(cause.stack_event, cause.hung_up));
        } else {
            // A handler became the leader and has read what woke both.
            state.process_events();
        }
        state.waiters.waiters[index].woken = false;
        (state, sleep_end)
    }
}

impl Ops {
    /// Sleeps, unless this process was forked in the middle of the call: then the call fails with `EINTR`,
    /// after the handler that forked, because the descriptors belong to the parent. Must be called without
    /// the lock: from there on a fork makes the child a process of its own.
    #[inline]
    fn unless_isolated<T>(&self, sleep: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
        if self.is_isolated() { Err(Errno::INTR) } else { sleep() }
    }

    /// Decides how a call continues whose sleep the kernel reports as interrupted. `handlers` are the
    /// dispositions before the sleep.
    #[cold]
    fn after_interruption(&self, wait: &Wait<'_>, handlers: HandlerSets) -> Result<SleepEnd, Errno> {
        let ran = lock::handlers_ran();
        // The process was stopped and continued (signal(7)).
        if ran == 0 && !wait.eintr_on_stop && self.signals.are_all_hooked(handlers) {
            return Ok(SleepEnd::Event);
        }
        if wait.restart_unless.is_some() && self.signals.restarts_after(handlers, ran) {
            return Ok(SleepEnd::HandlerRan);
        }
        Err(Errno::INTR)
    }
}

impl ProcessState {
    /// Returns the wait set of a leader, or `None` if it cannot be used.
    fn wait_set_for(&mut self, waiter: usize, kernel_epoll: Option<KernelEpoll>) -> Option<RawFd> {
        let Self { waiters, client, .. } = self;
        // A stack that is gone brings no events.
        if client.is_stack_gone() || !wait_set::is_supported() {
            return None;
        }
        let waiter = &mut waiters.waiters[waiter];
        if waiter.wait_set.as_ref().is_none_or(|wait_set| wait_set.is_stale) {
            waiter.wait_set = WaitSet::new(&waiter.event, client.wake_fd()).ok();
        }
        let wait_set = waiter.wait_set.as_mut()?;
        if wait_set.set_kernel_epoll(kernel_epoll).is_err() {
            waiter.wait_set = None;
            return None;
        }
        Some(wait_set.fd())
    }

    /// Removes the waiter of a call from the wait queues, whatever the result.
    fn finish_wait(&mut self, waiter: u32, files: &[FileId]) {
        for &file in files {
            let entry = self.files.get(file);
            entry.wait_queue.retain(
                |entry| !matches!(entry, WaitEntry::Thread { waiter: other, .. } if *other == waiter),
            );
            entry.refcount -= 1;
            if entry.refcount == 0 {
                // The last descriptor was closed while this call waited.
                self.free_file(file);
            }
        }
        self.waiters.remove(waiter);
        if self.waiters.leader.is_none() {
            // This thread may have been chosen as the leader while it got what it waited for.
            self.waiters.elect_leader();
        }
    }

    /// Suspends the sleep that the handler of the current call has interrupted: it resigns as the leader, and
    /// continues only when the handler has returned.
    fn suspend_interrupted_sleep(&mut self) {
        let Some(own) = sleeping_waiter() else { return };
        let waiter = &mut self.waiters.waiters[own as usize];
        waiter.interrupted = true;
        // Another sleep of the handler begins.
        if let Some(set) = waiter.direct_set
            && lock::has_handler_begun()
            && let Ok(set) = self.files.epoll(set)
        {
            set.suspend_direct_sleep(own);
        }
        if self.waiters.leader == Some(own) {
            self.resign_leader(Channels::after_sleep);
        }
    }

    /// Processes events after the leader's sleep, and lets another waiter lead.
    fn resign_leader(&mut self, after_sleep: impl FnOnce(&mut Channels)) {
        after_sleep(&mut self.client);
        self.process_events();
        self.notice_stack_end();
        self.waiters.elect_leader();
    }
}

const NOW: Option<libc::timespec> = Some(libc::timespec { tv_sec: 0, tv_nsec: 0 });

/// Arguments of a sleep in the kernel.
struct SleepArgs<'a> {
    waiter: u32,
    wait: &'a Wait<'a>,
    bounds: SleepBounds,
    /// The dispositions before the sleep.
    handlers: HandlerSets,
}

/// Conditions that end a sleep in the kernel.
#[derive(Clone, Copy)]
struct SleepBounds {
    timeout: Timeout,
    mask: Option<SignalSet>,
    /// Signals whose handlers end the sleep if they have run before.
    interrupting: SignalSet,
}

/// Sleeps in the kernel. Callers that want to know which descriptors are ready ask again.
fn ppoll(watched: &mut [pollfd], bounds: SleepBounds) -> Result<(), Errno> {
    syscall::ppoll(watched, timeout_of(bounds.timeout), bounds.mask, bounds.interrupting).map(|_| ())
}

/// Returns how long the kernel may sleep.
fn timeout_of(timeout: Timeout) -> Option<libc::timespec> {
    let timeout = match timeout {
        Timeout::Infinite => None,
        Timeout::Zero => Some(Duration::ZERO),
        Timeout::Deadline(end) => Some(end.saturating_duration_since(Instant::now())),
    };
    timeout.map(|left| libc::timespec {
        tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: left.subsec_nanos().into(),
    })
}

/// Polls kernel descriptors without waiting. Returns how many are ready.
pub(crate) fn poll_now(fds: &mut [pollfd]) -> Result<usize, Errno> {
    syscall::ppoll(fds, NOW, None, 0)
}

#[cfg(test)]
mod tests;
