//! Threads that wait in a call. One of them, the leader, sleeps on what the stack wakes, and takes the news for all; the others sleep until the
//! leader wakes them.

use crate::channels::Channels;
use crate::cleanup::CleanupHandler;
use crate::descriptor::{HiddenFd, take_ownership};
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
use libc::{POLLIN, pollfd, sigset_t};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsRawFd, RawFd};
use rustix::io::Errno;
use std::time::Instant;

use crate::wait_queue::WaitEntry;

/// How long a call waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timeout {
    /// Not at all.
    Zero,
    /// Until this moment.
    Deadline(Instant),
    /// As long as it takes.
    Infinite,
}

impl Timeout {
    /// So long from now on; `None` is endless.
    pub fn after(timeout: Option<Duration>) -> Self {
        match timeout {
            None => Self::Infinite,
            Some(Duration::ZERO) => Self::Zero,
            Some(time) => Instant::now().checked_add(time).map_or(Self::Infinite, Self::Deadline),
        }
    }

    /// As the calls in milliseconds say it: negative is endless.
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
    /// The sleeper of this thread, while it sleeps in the kernel. A handler that comes then may fork.
    static SLEEPING: Cell<Option<u32>> = const { Cell::new(None) };
}

/// The sleeper of this thread, if it sleeps.
pub(crate) fn sleeping_waiter() -> Option<u32> {
    SLEEPING.get()
}

/// A thread that waits.
struct Waiter {
    event: HiddenFd,
    /// Something happened that it waits for.
    woken: bool,
    /// It sleeps in the kernel.
    asleep: bool,
    in_use: bool,
    /// A handler runs in its thread, in the middle of its sleep, and waits itself. The sleep ends when the handler does (signal(7)).
    interrupted: bool,
    /// Readable while one of these signals waits, which are kept back while it sleeps.
    restart_signals: Option<(HiddenFd, SignalSet)>,
    /// What it sleeps on as a leader.
    wait_set: Option<WaitSet>,
}

impl Waiter {
    fn new(event: HiddenFd) -> Self {
        let (woken, asleep, in_use, interrupted) = (false, false, false, false);
        Self { event, woken, asleep, in_use, interrupted, restart_signals: None, wait_set: None }
    }

    /// What tells of these signals.
    fn watch_restart_signals(&mut self, set: SignalSet) -> Result<RawFd, Errno> {
        match &mut self.restart_signals {
            Some((fd, known)) => {
                if *known != set {
                    syscall::signalfd(Some(fd.as_raw_fd()), set)?;
                    *known = set;
                }
                Ok(fd.as_raw_fd())
            }
            None => {
                let fd = HiddenFd::new(take_ownership(syscall::signalfd(None, set)?));
                let number = fd.as_raw_fd();
                self.restart_signals = Some((fd, set));
                Ok(number)
            }
        }
    }
}

/// All threads that wait.
#[derive(Default)]
pub(crate) struct Waiters {
    waiters: Vec<Waiter>,
    leader: Option<u32>,
    /// The sleep that has just ended was one in which the kernel looked at its descriptors.
    pub polled_kernel: bool,
}

impl Waiters {
    fn add(&mut self) -> Result<u32, Errno> {
        let free = self.waiters.iter().position(|sleeper| !sleeper.in_use);
        let index = match free {
            Some(index) => index,
            None => {
                let event = HiddenFd::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
                self.waiters.push(Waiter::new(event));
                self.waiters.len() - 1
            }
        };
        let sleeper = &mut self.waiters[index];
        (sleeper.in_use, sleeper.woken, sleeper.asleep, sleeper.interrupted) = (true, false, false, false);
        Ok(index as u32)
    }

    /// Of a child: only this one, of the thread that forked, goes on, and is woken by what is the child's own.
    pub fn for_child(own: Option<u32>) -> Result<Self, Errno> {
        let mut anew = Self::default();
        for number in 0..own.map_or(0, |own| own + 1) {
            let event = HiddenFd::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
            let mut sleeper = Waiter::new(event);
            sleeper.in_use = Some(number) == own;
            (sleeper.woken, sleeper.asleep) = (sleeper.in_use, sleeper.in_use);
            anew.waiters.push(sleeper);
        }
        Ok(anew)
    }

    /// Descriptors of all.
    pub fn own_fds(&self) -> impl Iterator<Item = &HiddenFd> {
        self.waiters.iter().flat_map(|sleeper| {
            let of_signals = sleeper.restart_signals.iter().map(|(fd, _)| fd);
            of_signals.chain(sleeper.wait_set.iter().map(WaitSet::epoll_fd)).chain([&sleeper.event])
        })
    }

    fn remove(&mut self, sleeper: u32) {
        self.waiters[sleeper as usize].in_use = false;
    }

    /// Something happened that this one waits for. False if it had been told before, or does not take it soon.
    pub fn wake(&mut self, sleeper: u32) -> bool {
        let sleeper = &mut self.waiters[sleeper as usize];
        if sleeper.woken {
            return false;
        }
        sleeper.woken = true;
        if sleeper.asleep {
            notify(&sleeper.event);
        }
        !sleeper.interrupted
    }

    /// The leader goes: another takes its place.
    fn elect_leader(&mut self) {
        self.leader = None;
        let mut next = self.waiters.iter().filter(|s| s.in_use && s.asleep && !s.woken && !s.interrupted);
        if let Some(next) = next.next() {
            notify(&next.event);
        }
    }
}

fn notify(event: &HiddenFd) {
    // A full counter is readable, too.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Makes what the next call sleeps on.
pub(crate) fn preallocate(lane: &mut ProcessState) -> Result<(), Errno> {
    let sleeper = lane.waiters.add()?;
    lane.wait_set_for(sleeper as usize, None);
    lane.waiters.remove(sleeper);
    Ok(())
}

/// What a waiting call waits with.
pub(crate) struct Wait<'a> {
    pub timeout: Timeout,
    /// Signals that are blocked meanwhile instead of those that the thread blocks.
    pub mask: Option<&'a sigset_t>,
    /// Of several threads that wait for this only one is to be woken.
    pub exclusive: bool,
    /// The kernel's part of the epoll set that it waits for, which is all that it waits for of the kernel's.
    pub kernel_epoll: Option<KernelEpoll>,
    /// It goes on after handlers with `SA_RESTART`, if it waits without end, unless so much was done already.
    pub restart_unless: Option<&'a Cell<usize>>,
    /// It is `EINTR` when the process was stopped and goes on, without any handler (signal(7)).
    pub eintr_on_stop: bool,
}

impl<'a> Wait<'a> {
    /// Whatever signal comes, the call is `EINTR` (poll and its kin, signal(7)).
    pub fn of(timeout: Timeout) -> Self {
        Self {
            timeout,
            mask: None,
            exclusive: false,
            kernel_epoll: None,
            restart_unless: None,
            eintr_on_stop: false,
        }
    }

    /// With `SA_RESTART` the call goes on if nothing is `done`, and there is no time-out.
    pub fn restarting(patience: Timeout, done: &'a Cell<usize>) -> Self {
        let endless = patience == Timeout::Infinite;
        Self { restart_unless: endless.then_some(done), eintr_on_stop: !endless, ..Self::of(patience) }
    }
}

/// Why a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SleepEnd {
    /// Something may have happened.
    Event,
    /// A handler ran, after which the call goes on.
    HandlerRan,
}

impl Ops {
    /// Tries `attempt` until it says something other than `EAGAIN`, and waits in between for news about `files`, or for descriptors of
    /// the kernel to become ready. With the patience at its end the result is `EAGAIN`, after a signal `EINTR`.
    #[inline]
    pub(crate) fn block_until<'a, T>(
        &'a self,
        mut lane: LockGuard<'a>,
        files: &[FileId],
        kernel: &mut [pollfd],
        wait: &Wait<'_>,
        mut attempt: impl FnMut(&mut ProcessState, &mut [pollfd]) -> Result<T, Errno>,
    ) -> (LockGuard<'a>, Result<T, Errno>) {
        // What another call slept on says nothing of what this one waits for.
        lane.waiters.polled_kernel = false;
        let first = attempt(&mut lane, kernel);
        if !matches!(first, Err(Errno::AGAIN)) || wait.timeout == Timeout::Zero {
            return (lane, first);
        }
        self.block_until_from_second(lane, files, kernel, wait, attempt)
    }

    /// The same behind a first attempt.
    #[inline(never)]
    pub(crate) fn block_until_from_second<'a, T>(
        &'a self,
        mut lane: LockGuard<'a>,
        files: &[FileId],
        kernel: &mut [pollfd],
        wait: &Wait<'_>,
        mut attempt: impl FnMut(&mut ProcessState, &mut [pollfd]) -> Result<T, Errno>,
    ) -> (LockGuard<'a>, Result<T, Errno>) {
        let sleeper = match lane.waiters.add() {
            Ok(sleeper) => sleeper,
            Err(error) => return (lane, Err(error)),
        };
        // Handlers that come from here on find a call that waits.
        lock::clear_handlers_ran();
        // While this sleeps a handler may jump away from it.
        let slept_before = sleeping_waiter();
        let on_jump = pin!(CleanupHandler::new(|| self.cancel_sleep(sleeper, files, slept_before)));
        let watched = on_jump.push();
        for &file in files {
            let watcher = WaitEntry::Thread { waiter: sleeper, exclusive: wait.exclusive };
            let file = lane.files.get(file);
            file.refcount += 1;
            file.wait_queue.push(watcher);
        }
        // This takes the news, so whoever is to be told stands there.
        lane.suspend_interrupted_sleep();
        let result = loop {
            let slept;
            (lane, slept) = self.sleep(lane, sleeper, kernel, wait);
            match attempt(&mut lane, kernel) {
                Err(Errno::AGAIN) => {}
                result => break result,
            }
            match slept {
                Ok(SleepEnd::Event) => {}
                // What was done is reported before the rest is waited for.
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
        lane.finish_wait(sleeper, files);
        drop(watched);
        (lane, result)
    }

    /// A handler jumps over a call that sleeps, which never returns.
    #[cold]
    fn cancel_sleep(&self, sleeper: u32, files: &[FileId], slept_before: Option<u32>) {
        // Of a call that was interrupted in the middle nothing can be taken back.
        let Ok(mut lane) = self.lock() else { return };
        lane.suspend_interrupted_sleep();
        SLEEPING.set(slept_before);
        lane.waiters.waiters[sleeper as usize].asleep = false;
        lane.finish_wait(sleeper, files);
    }

    /// Waits until the sleeper is woken, a descriptor of the kernel may be ready, as stands in `kernel` then, patience ends, or for no reason.
    fn sleep<'a>(
        &'a self,
        mut lane: LockGuard<'a>,
        sleeper: u32,
        kernel: &mut [pollfd],
        wait: &Wait<'_>,
    ) -> (LockGuard<'a>, Result<SleepEnd, Errno>) {
        let index = sleeper as usize;
        lane.waiters.polled_kernel = false;
        kernel.iter_mut().for_each(|fd| fd.revents = 0);
        lane.client.flush();
        // A shard that sleeps has nothing to say soon, and one that waits for this very CPU gets it by sleeping.
        let mut spin_end = None;
        loop {
            lane.process_events();
            if core::mem::take(&mut lane.waiters.waiters[index].woken) {
                return (lane, Ok(SleepEnd::Event));
            }
            if wait.timeout.has_expired() {
                // Nobody has looked.
                kernel.iter_mut().for_each(|fd| fd.revents = fd.events);
                return (lane, Ok(SleepEnd::Event));
            }
            if self.config.spin.is_zero() || !lane.client.is_stack_running_elsewhere() {
                break;
            }
            let now = Instant::now();
            if now >= *spin_end.get_or_insert(now + self.config.spin) {
                break;
            }
            drop(lane);
            core::hint::spin_loop();
            lane = self.lock_or_panic();
        }
        let leads = lane.waiters.leader.is_none();
        if leads && !lane.client.before_sleep() {
            lane.client.after_sleep();
            lane.process_events();
            return (lane, Ok(SleepEnd::Event));
        }
        let handlers = wait.restart_unless.map(|_| self.signals.handlers()).unwrap_or_default();
        let mut mask = wait.mask.map(syscall::kernel_sigset);
        let mut kept_back = -1;
        if handlers.is_mixed()
            && let Ok(blocked) = lock::blocked_signals()
        {
            let set = handlers.restarting & !blocked;
            // Without descriptors all signals interrupt.
            if let Ok(fd) = lane.waiters.waiters[index].watch_restart_signals(set) {
                kept_back = fd;
                mask = Some(blocked | set);
            }
        }
        // Handlers that ran end this sleep before it begins, but for those that a mask of the caller's would have kept back.
        let heeded = !wait.mask.map_or(0, syscall::kernel_sigset);
        let bounds = SleepBounds { timeout: wait.timeout, mask, interrupting: heeded };
        if leads {
            lane.waiters.leader = Some(sleeper);
        }
        let asleep = &mut lane.waiters.waiters[index];
        (asleep.asleep, asleep.interrupted) = (true, false);
        let interrupted = SLEEPING.replace(Some(sleeper));
        let naps = leads && kept_back < 0 && kernel.len() == usize::from(wait.kernel_epoll.is_some());
        if naps && let Some(nap) = lane.wait_set_for(index, wait.kernel_epoll) {
            let slept = self.sleep_on_wait_set(lane, (sleeper, nap), kernel, wait, bounds, handlers);
            SLEEPING.set(interrupted);
            return slept;
        }
        let slept = scratch::with(|lists| {
            self.sleep_in_ppoll(
                lane,
                (sleeper, kept_back),
                (kernel, &mut lists.sleep_fds),
                wait,
                bounds,
                handlers,
            )
        });
        SLEEPING.set(interrupted);
        slept
    }

    /// Sleeps on the kernel's descriptors, too, and on signals that are kept back. The list of all that is the caller's.
    fn sleep_in_ppoll<'a>(
        &'a self,
        mut lane: LockGuard<'a>,
        (sleeper, kept_back): (u32, RawFd),
        (kernel, watched): (&mut [pollfd], &mut Vec<pollfd>),
        wait: &Wait<'_>,
        bounds: SleepBounds,
        handlers: HandlerSets,
    ) -> (LockGuard<'a>, Result<SleepEnd, Errno>) {
        let index = sleeper as usize;
        let leads = lane.waiters.leader == Some(sleeper);
        let own = lane.waiters.waiters[index].event.as_raw_fd();
        let entry = |fd| pollfd { fd, events: POLLIN, revents: 0 };
        watched.push(entry(own));
        // Of a stack that is gone there is no news, and its descriptor is readable for ever.
        let wakes = leads && !lane.client.is_stack_gone();
        watched.push(entry(if wakes { lane.client.wake_fd().as_raw_fd() } else { -1 }));
        watched.push(entry(kept_back));
        watched.extend_from_slice(kernel);
        drop(lane);
        // Handlers that were kept back run before this returns.
        let slept = match ppoll(watched, bounds) {
            Ok(()) if watched[2].revents != 0 => Ok(SleepEnd::HandlerRan),
            Ok(()) => Ok(SleepEnd::Event),
            Err(Errno::INTR) => self.interrupted(wait, handlers),
            Err(error) => Err(error),
        };
        for (fd, slept_on) in kernel.iter_mut().zip(&watched[3..]) {
            fd.revents = slept_on.revents;
        }
        lane = self.lock_or_panic();
        lane.waiters.polled_kernel = true;
        let awake = &mut lane.waiters.waiters[index];
        awake.asleep = false;
        if watched[0].revents != 0 {
            let _ = rustix::io::read(&awake.event, &mut [0; 8]);
        }
        if lane.waiters.leader == Some(sleeper) {
            lane.resign_leader(Channels::after_sleep);
        } else {
            lane.process_events();
        }
        lane.waiters.waiters[index].woken = false;
        (lane, slept)
    }

    /// The same for a leader that waits for nothing else of the kernel's.
    fn sleep_on_wait_set<'a>(
        &'a self,
        lane: LockGuard<'a>,
        (sleeper, nap): (u32, RawFd),
        kernel: &mut [pollfd],
        wait: &Wait<'_>,
        bounds: SleepBounds,
        handlers: HandlerSets,
    ) -> (LockGuard<'a>, Result<SleepEnd, Errno>) {
        let index = sleeper as usize;
        drop(lane);
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
        let slept = syscall::epoll_pwait2(
            nap,
            &mut events,
            timeout_of(bounds.timeout),
            bounds.mask,
            bounds.interrupting,
        );
        let mut lane = self.lock_or_panic();
        let (count, slept) = match slept {
            Ok(count) => (count, Ok(SleepEnd::Event)),
            Err(Errno::INTR) => (0, self.interrupted(wait, handlers)),
            Err(error) => (0, Err(error)),
        };
        lane.waiters.polled_kernel = slept.is_ok();
        let awake = &mut lane.waiters.waiters[index];
        awake.asleep = false;
        let woke = awake.wait_set.as_mut().map(|nap| nap.wake_cause(&events[..count])).unwrap_or_default();
        if woke.kernel_event {
            kernel.iter_mut().for_each(|fd| fd.revents = fd.events);
        }
        if lane.waiters.leader == Some(sleeper) {
            lane.resign_leader(|client| client.after_epoll_wait(woke.stack_event, woke.hung_up));
        } else {
            // A handler took the lead, and what woke both was read there.
            lane.process_events();
        }
        lane.waiters.waiters[index].woken = false;
        (lane, slept)
    }
}

impl Ops {
    /// The kernel says that a sleep was interrupted, of a call that had looked at these handlers.
    #[cold]
    fn interrupted(&self, wait: &Wait<'_>, handlers: HandlerSets) -> Result<SleepEnd, Errno> {
        let ran = lock::handlers_ran();
        // It was stopped, and goes on (signal(7)).
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
    /// What a leader sleeps on, if all is well with it.
    fn wait_set_for(&mut self, sleeper: usize, part: Option<KernelEpoll>) -> Option<RawFd> {
        let Self { waiters: sleepers, client, .. } = self;
        // Of a stack that is gone there is no news.
        if client.is_stack_gone() || !wait_set::is_supported() {
            return None;
        }
        let known = &mut sleepers.waiters[sleeper];
        if known.wait_set.as_ref().is_none_or(|nap| nap.is_stale) {
            known.wait_set = WaitSet::new(&known.event, client.wake_fd()).ok();
        }
        let nap = known.wait_set.as_mut()?;
        if nap.set_kernel_epoll(part).is_err() {
            known.wait_set = None;
            return None;
        }
        Some(nap.fd())
    }

    /// A call does not wait for these any more, whatever came of it.
    fn finish_wait(&mut self, sleeper: u32, files: &[FileId]) {
        for &file in files {
            let users = self.files.get(file);
            users.wait_queue.retain(|w| !matches!(w, WaitEntry::Thread { waiter: s, .. } if *s == sleeper));
            users.refcount -= 1;
            if users.refcount == 0 {
                // Its last descriptor was closed while this call waited.
                self.free_file(file);
            }
        }
        self.waiters.remove(sleeper);
        if self.waiters.leader.is_none() {
            // It may have been told to lead, and has what it waited for instead.
            self.waiters.elect_leader();
        }
    }

    /// A call that waits in a handler of a signal: the sleep of this thread that the handler interrupted leads nobody any more, and goes on only when the handler is done.
    fn suspend_interrupted_sleep(&mut self) {
        let Some(own) = sleeping_waiter() else { return };
        self.waiters.waiters[own as usize].interrupted = true;
        if self.waiters.leader == Some(own) {
            self.resign_leader(Channels::after_sleep);
        }
    }

    /// The leader is awake, and takes the news.
    fn resign_leader(&mut self, after_sleep: impl FnOnce(&mut Channels)) {
        let was_gone = self.client.is_stack_gone();
        after_sleep(&mut self.client);
        self.process_events();
        if self.client.is_stack_gone() && !was_gone {
            self.wake_all();
        }
        self.waiters.elect_leader();
    }
}

const NOW: Option<libc::timespec> = Some(libc::timespec { tv_sec: 0, tv_nsec: 0 });

/// What bounds a sleep in the kernel.
#[derive(Clone, Copy)]
struct SleepBounds {
    timeout: Timeout,
    mask: Option<SignalSet>,
    /// Signals whose handlers are not to have run.
    interrupting: SignalSet,
}

/// Sleeps in the kernel. Which descriptors are ready is asked again by whoever wants to know.
fn ppoll(watched: &mut [pollfd], bounds: SleepBounds) -> Result<(), Errno> {
    syscall::ppoll(watched, timeout_of(bounds.timeout), bounds.mask, bounds.interrupting).map(|_| ())
}

/// How long the kernel may sleep.
fn timeout_of(patience: Timeout) -> Option<libc::timespec> {
    let timeout = match patience {
        Timeout::Infinite => None,
        Timeout::Zero => Some(Duration::ZERO),
        Timeout::Deadline(end) => Some(end.saturating_duration_since(Instant::now())),
    };
    timeout.map(|left| libc::timespec {
        tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: left.subsec_nanos().into(),
    })
}

/// What the kernel says of its descriptors without waiting. Returns how many are ready.
pub(crate) fn poll_now(fds: &mut [pollfd]) -> Result<usize, Errno> {
    syscall::ppoll(fds, NOW, None, 0)
}

#[cfg(test)]
mod tests;
