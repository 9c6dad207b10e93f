//! Threads that wait in a call. One of them, the leader, sleeps on what the stack wakes, and takes the news for all; the others sleep until the
//! leader wakes them.

use crate::channels::Channels;
use crate::descriptor::{Internal, own};
use crate::held::Locked;
use crate::jumps::OnJump;
use crate::lane::Lane;
use crate::nap::{self, KernelPart, Nap};
use crate::raw;
use crate::scratch;
use crate::signal::{Handlers, SignalSet};
use crate::{FileId, Ops, held};
use core::cell::Cell;
use core::pin::pin;
use core::time::Duration;
use libc::{POLLIN, pollfd, sigset_t};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsRawFd, RawFd};
use rustix::io::Errno;
use std::time::Instant;

use crate::wake::Watcher;

/// How long a call waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Not at all.
    None,
    /// Until this moment.
    Until(Instant),
    /// As long as it takes.
    Endless,
}

impl Patience {
    /// So long from now on; `None` is endless.
    pub fn of(timeout: Option<Duration>) -> Self {
        match timeout {
            None => Self::Endless,
            Some(Duration::ZERO) => Self::None,
            Some(time) => Instant::now().checked_add(time).map_or(Self::Endless, Self::Until),
        }
    }

    /// As the calls in milliseconds say it: negative is endless.
    pub fn of_ms(timeout_ms: i32) -> Self {
        Self::of(u64::try_from(timeout_ms).ok().map(Duration::from_millis))
    }

    pub(crate) fn is_over(self) -> bool {
        match self {
            Self::None => true,
            Self::Until(end) => Instant::now() >= end,
            Self::Endless => false,
        }
    }
}

thread_local! {
    /// The sleeper of this thread, while it sleeps in the kernel. A handler that comes then may fork.
    static ASLEEP: Cell<Option<u32>> = const { Cell::new(None) };
}

/// The sleeper of this thread, if it sleeps.
pub(crate) fn asleep() -> Option<u32> {
    ASLEEP.get()
}

/// A thread that waits.
struct Sleeper {
    event: Internal,
    /// Something happened that it waits for.
    woken: bool,
    /// It sleeps in the kernel.
    asleep: bool,
    in_use: bool,
    /// A handler runs in its thread, in the middle of its sleep, and waits itself. The sleep ends when the handler does (signal(7)).
    interrupted: bool,
    /// Readable while one of these signals waits, which are kept back while it sleeps.
    kept_back: Option<(Internal, SignalSet)>,
    /// What it sleeps on as a leader.
    nap: Option<Nap>,
}

impl Sleeper {
    fn new(event: Internal) -> Self {
        let (woken, asleep, in_use, interrupted) = (false, false, false, false);
        Self { event, woken, asleep, in_use, interrupted, kept_back: None, nap: None }
    }

    /// What tells of these signals.
    fn keep_back(&mut self, set: SignalSet) -> Result<RawFd, Errno> {
        match &mut self.kept_back {
            Some((fd, known)) => {
                if *known != set {
                    raw::signalfd(Some(fd.as_raw_fd()), set)?;
                    *known = set;
                }
                Ok(fd.as_raw_fd())
            }
            None => {
                let fd = Internal::new(own(raw::signalfd(None, set)?));
                let number = fd.as_raw_fd();
                self.kept_back = Some((fd, set));
                Ok(number)
            }
        }
    }
}

/// All threads that wait.
#[derive(Default)]
pub(crate) struct Sleepers {
    sleepers: Vec<Sleeper>,
    leader: Option<u32>,
    /// The sleep that has just ended was one in which the kernel looked at its descriptors.
    pub slept_on_kernel: bool,
}

impl Sleepers {
    fn add(&mut self) -> Result<u32, Errno> {
        let free = self.sleepers.iter().position(|sleeper| !sleeper.in_use);
        let index = match free {
            Some(index) => index,
            None => {
                let event = Internal::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
                self.sleepers.push(Sleeper::new(event));
                self.sleepers.len() - 1
            }
        };
        let sleeper = &mut self.sleepers[index];
        (sleeper.in_use, sleeper.woken, sleeper.asleep, sleeper.interrupted) = (true, false, false, false);
        Ok(index as u32)
    }

    /// Of a child: only this one, of the thread that forked, goes on, and is woken by what is the child's own.
    pub fn of_child(own: Option<u32>) -> Result<Self, Errno> {
        let mut anew = Self::default();
        for number in 0..own.map_or(0, |own| own + 1) {
            let event = Internal::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
            let mut sleeper = Sleeper::new(event);
            sleeper.in_use = Some(number) == own;
            (sleeper.woken, sleeper.asleep) = (sleeper.in_use, sleeper.in_use);
            anew.sleepers.push(sleeper);
        }
        Ok(anew)
    }

    /// Descriptors of all.
    pub fn own_fds(&self) -> impl Iterator<Item = &Internal> {
        self.sleepers.iter().flat_map(|sleeper| {
            let of_signals = sleeper.kept_back.iter().map(|(fd, _)| fd);
            of_signals.chain(sleeper.nap.iter().map(Nap::set)).chain([&sleeper.event])
        })
    }

    fn remove(&mut self, sleeper: u32) {
        self.sleepers[sleeper as usize].in_use = false;
    }

    /// Something happened that this one waits for. False if it had been told before, or does not take it soon.
    pub fn wake(&mut self, sleeper: u32) -> bool {
        let sleeper = &mut self.sleepers[sleeper as usize];
        if sleeper.woken {
            return false;
        }
        sleeper.woken = true;
        if sleeper.asleep {
            signal(&sleeper.event);
        }
        !sleeper.interrupted
    }

    /// The leader goes: another takes its place.
    fn hand_over(&mut self) {
        self.leader = None;
        let mut next = self.sleepers.iter().filter(|s| s.in_use && s.asleep && !s.woken && !s.interrupted);
        if let Some(next) = next.next() {
            signal(&next.event);
        }
    }
}

fn signal(event: &Internal) {
    // A full counter is readable, too.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Makes what the next call sleeps on.
pub(crate) fn prepare(lane: &mut Lane) -> Result<(), Errno> {
    let sleeper = lane.sleepers.add()?;
    lane.nap(sleeper as usize, None);
    lane.sleepers.remove(sleeper);
    Ok(())
}

/// What a waiting call waits with.
pub(crate) struct Wait<'a> {
    pub patience: Patience,
    /// Signals that are blocked meanwhile instead of those that the thread blocks.
    pub mask: Option<&'a sigset_t>,
    /// Of several threads that wait for this only one is to be woken.
    pub exclusive: bool,
    /// The kernel's part of the epoll set that it waits for, which is all that it waits for of the kernel's.
    pub part: Option<KernelPart>,
    /// It goes on after handlers with `SA_RESTART`, if it waits without end, unless so much was done already.
    pub restarts: Option<&'a Cell<usize>>,
    /// It is `EINTR` when the process was stopped and goes on, without any handler (signal(7)).
    pub hears_of_stops: bool,
}

impl<'a> Wait<'a> {
    /// Whatever signal comes, the call is `EINTR` (poll and its kin, signal(7)).
    pub fn of(patience: Patience) -> Self {
        Self { patience, mask: None, exclusive: false, part: None, restarts: None, hears_of_stops: false }
    }

    /// With `SA_RESTART` the call goes on if nothing is `done`, and there is no time-out.
    pub fn restarting(patience: Patience, done: &'a Cell<usize>) -> Self {
        let endless = patience == Patience::Endless;
        Self { restarts: endless.then_some(done), hears_of_stops: !endless, ..Self::of(patience) }
    }
}

/// Why a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Woken {
    /// Something may have happened.
    ByNews,
    /// A handler ran, after which the call goes on.
    ByHandler,
}

impl Ops {
    /// Tries `attempt` until it says something other than `EAGAIN`, and waits in between for news about `files`, or for descriptors of
    /// the kernel to become ready. With the patience at its end the result is `EAGAIN`, after a signal `EINTR`.
    #[inline]
    pub(crate) fn until<'a, T>(
        &'a self,
        mut lane: Locked<'a>,
        files: &[FileId],
        kernel: &mut [pollfd],
        wait: &Wait<'_>,
        mut attempt: impl FnMut(&mut Lane, &mut [pollfd]) -> Result<T, Errno>,
    ) -> (Locked<'a>, Result<T, Errno>) {
        // What another call slept on says nothing of what this one waits for.
        lane.sleepers.slept_on_kernel = false;
        let first = attempt(&mut lane, kernel);
        if !matches!(first, Err(Errno::AGAIN)) || wait.patience == Patience::None {
            return (lane, first);
        }
        self.wait_until(lane, files, kernel, wait, attempt)
    }

    /// The same behind a first attempt.
    #[inline(never)]
    pub(crate) fn wait_until<'a, T>(
        &'a self,
        mut lane: Locked<'a>,
        files: &[FileId],
        kernel: &mut [pollfd],
        wait: &Wait<'_>,
        mut attempt: impl FnMut(&mut Lane, &mut [pollfd]) -> Result<T, Errno>,
    ) -> (Locked<'a>, Result<T, Errno>) {
        let sleeper = match lane.sleepers.add() {
            Ok(sleeper) => sleeper,
            Err(error) => return (lane, Err(error)),
        };
        // Handlers that come from here on find a call that waits.
        held::forget_what_ran();
        // While this sleeps a handler may jump away from it.
        let slept_before = asleep();
        let on_jump = pin!(OnJump::new(|| self.sleeps_no_more(sleeper, files, slept_before)));
        let watched = on_jump.watch();
        for &file in files {
            let watcher = Watcher::Thread { sleeper, exclusive: wait.exclusive };
            let file = lane.files.get(file);
            file.users += 1;
            file.watchers.push(watcher);
        }
        // This takes the news, so whoever is to be told stands there.
        lane.interrupt_own_sleep();
        let result = loop {
            let slept;
            (lane, slept) = self.sleep(lane, sleeper, kernel, wait);
            match attempt(&mut lane, kernel) {
                Err(Errno::AGAIN) => {}
                result => break result,
            }
            match slept {
                Ok(Woken::ByNews) => {}
                // What was done is reported before the rest is waited for.
                Ok(Woken::ByHandler) if wait.restarts.is_none_or(|done| done.get() == 0) => {
                    held::forget_what_ran();
                }
                Ok(Woken::ByHandler) => break Err(Errno::INTR),
                Err(error) => break Err(error),
            }
            if wait.patience.is_over() {
                break Err(Errno::AGAIN);
            }
        };
        lane.wait_no_more(sleeper, files);
        drop(watched);
        (lane, result)
    }

    /// A handler jumps over a call that sleeps, which never returns.
    #[cold]
    fn sleeps_no_more(&self, sleeper: u32, files: &[FileId], slept_before: Option<u32>) {
        // Of a call that was interrupted in the middle nothing can be taken back.
        let Ok(mut lane) = self.lock() else { return };
        lane.interrupt_own_sleep();
        ASLEEP.set(slept_before);
        lane.sleepers.sleepers[sleeper as usize].asleep = false;
        lane.wait_no_more(sleeper, files);
    }

    /// Waits until the sleeper is woken, a descriptor of the kernel may be ready, as stands in `kernel` then, patience ends, or for no reason.
    fn sleep<'a>(
        &'a self,
        mut lane: Locked<'a>,
        sleeper: u32,
        kernel: &mut [pollfd],
        wait: &Wait<'_>,
    ) -> (Locked<'a>, Result<Woken, Errno>) {
        let index = sleeper as usize;
        lane.sleepers.slept_on_kernel = false;
        kernel.iter_mut().for_each(|fd| fd.revents = 0);
        lane.client.flush();
        // A shard that sleeps has nothing to say soon, and one that waits for this very CPU gets it by sleeping.
        let mut spin_end = None;
        loop {
            lane.pump();
            if core::mem::take(&mut lane.sleepers.sleepers[index].woken) {
                return (lane, Ok(Woken::ByNews));
            }
            if wait.patience.is_over() {
                // Nobody has looked.
                kernel.iter_mut().for_each(|fd| fd.revents = fd.events);
                return (lane, Ok(Woken::ByNews));
            }
            if self.config.spin.is_zero() || !lane.client.stack_works_elsewhere() {
                break;
            }
            let now = Instant::now();
            if now >= *spin_end.get_or_insert(now + self.config.spin) {
                break;
            }
            drop(lane);
            core::hint::spin_loop();
            lane = self.lock_for_good();
        }
        let leads = lane.sleepers.leader.is_none();
        if leads && !lane.client.before_sleep() {
            lane.client.after_sleep();
            lane.pump();
            return (lane, Ok(Woken::ByNews));
        }
        let handlers = wait.restarts.map(|_| self.signals.handlers()).unwrap_or_default();
        let mut mask = wait.mask.map(raw::kernel_set);
        let mut kept_back = -1;
        if handlers.are_mixed()
            && let Ok(blocked) = held::blocked_signals()
        {
            let set = handlers.restarting & !blocked;
            // Without descriptors all signals interrupt.
            if let Ok(fd) = lane.sleepers.sleepers[index].keep_back(set) {
                kept_back = fd;
                mask = Some(blocked | set);
            }
        }
        // Handlers that ran end this sleep before it begins, but for those that a mask of the caller's would have kept back.
        let heeded = !wait.mask.map_or(0, raw::kernel_set);
        let bounds = Bounds { patience: wait.patience, mask, heeded };
        if leads {
            lane.sleepers.leader = Some(sleeper);
        }
        let asleep = &mut lane.sleepers.sleepers[index];
        (asleep.asleep, asleep.interrupted) = (true, false);
        let interrupted = ASLEEP.replace(Some(sleeper));
        let naps = leads && kept_back < 0 && kernel.len() == usize::from(wait.part.is_some());
        if naps && let Some(nap) = lane.nap(index, wait.part) {
            let slept = self.nap(lane, (sleeper, nap), kernel, wait, bounds, handlers);
            ASLEEP.set(interrupted);
            return slept;
        }
        let slept = scratch::with(|lists| {
            self.sleep_on(lane, (sleeper, kept_back), (kernel, &mut lists.slept_on), wait, bounds, handlers)
        });
        ASLEEP.set(interrupted);
        slept
    }

    /// Sleeps on the kernel's descriptors, too, and on signals that are kept back. The list of all that is the caller's.
    fn sleep_on<'a>(
        &'a self,
        mut lane: Locked<'a>,
        (sleeper, kept_back): (u32, RawFd),
        (kernel, watched): (&mut [pollfd], &mut Vec<pollfd>),
        wait: &Wait<'_>,
        bounds: Bounds,
        handlers: Handlers,
    ) -> (Locked<'a>, Result<Woken, Errno>) {
        let index = sleeper as usize;
        let leads = lane.sleepers.leader == Some(sleeper);
        let own = lane.sleepers.sleepers[index].event.as_raw_fd();
        let entry = |fd| pollfd { fd, events: POLLIN, revents: 0 };
        watched.push(entry(own));
        // Of a stack that is gone there is no news, and its descriptor is readable for ever.
        let wakes = leads && !lane.client.is_gone();
        watched.push(entry(if wakes { lane.client.wake_fd().as_raw_fd() } else { -1 }));
        watched.push(entry(kept_back));
        watched.extend_from_slice(kernel);
        drop(lane);
        // Handlers that were kept back run before this returns.
        let slept = match ppoll(watched, bounds) {
            Ok(()) if watched[2].revents != 0 => Ok(Woken::ByHandler),
            Ok(()) => Ok(Woken::ByNews),
            Err(Errno::INTR) => self.interrupted(wait, handlers),
            Err(error) => Err(error),
        };
        for (fd, slept_on) in kernel.iter_mut().zip(&watched[3..]) {
            fd.revents = slept_on.revents;
        }
        lane = self.lock_for_good();
        lane.sleepers.slept_on_kernel = true;
        let awake = &mut lane.sleepers.sleepers[index];
        awake.asleep = false;
        if watched[0].revents != 0 {
            let _ = rustix::io::read(&awake.event, &mut [0; 8]);
        }
        if lane.sleepers.leader == Some(sleeper) {
            lane.lead_no_more(Channels::after_sleep);
        } else {
            lane.pump();
        }
        lane.sleepers.sleepers[index].woken = false;
        (lane, slept)
    }

    /// The same for a leader that waits for nothing else of the kernel's.
    fn nap<'a>(
        &'a self,
        lane: Locked<'a>,
        (sleeper, nap): (u32, RawFd),
        kernel: &mut [pollfd],
        wait: &Wait<'_>,
        bounds: Bounds,
        handlers: Handlers,
    ) -> (Locked<'a>, Result<Woken, Errno>) {
        let index = sleeper as usize;
        drop(lane);
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
        let slept =
            raw::epoll_pwait2(nap, &mut events, timeout_of(bounds.patience), bounds.mask, bounds.heeded);
        let mut lane = self.lock_for_good();
        let (count, slept) = match slept {
            Ok(count) => (count, Ok(Woken::ByNews)),
            Err(Errno::INTR) => (0, self.interrupted(wait, handlers)),
            Err(error) => (0, Err(error)),
        };
        lane.sleepers.slept_on_kernel = slept.is_ok();
        let awake = &mut lane.sleepers.sleepers[index];
        awake.asleep = false;
        let woke = awake.nap.as_mut().map(|nap| nap.woke(&events[..count])).unwrap_or_default();
        if woke.by_kernel {
            kernel.iter_mut().for_each(|fd| fd.revents = fd.events);
        }
        if lane.sleepers.leader == Some(sleeper) {
            lane.lead_no_more(|client| client.after_nap(woke.by_stack, woke.hung_up));
        } else {
            // A handler took the lead, and what woke both was read there.
            lane.pump();
        }
        lane.sleepers.sleepers[index].woken = false;
        (lane, slept)
    }
}

impl Ops {
    /// The kernel says that a sleep was interrupted, of a call that had looked at these handlers.
    #[cold]
    fn interrupted(&self, wait: &Wait<'_>, handlers: Handlers) -> Result<Woken, Errno> {
        let ran = held::ran();
        // It was stopped, and goes on (signal(7)).
        if ran == 0 && !wait.hears_of_stops && self.signals.all_are_seen(handlers) {
            return Ok(Woken::ByNews);
        }
        if wait.restarts.is_some() && self.signals.goes_on(handlers, ran) {
            return Ok(Woken::ByHandler);
        }
        Err(Errno::INTR)
    }
}

impl Lane {
    /// What a leader sleeps on, if all is well with it.
    fn nap(&mut self, sleeper: usize, part: Option<KernelPart>) -> Option<RawFd> {
        let Self { sleepers, client, .. } = self;
        // Of a stack that is gone there is no news.
        if client.is_gone() || !nap::is_known() {
            return None;
        }
        let known = &mut sleepers.sleepers[sleeper];
        if known.nap.as_ref().is_none_or(|nap| nap.is_stale) {
            known.nap = Nap::new(&known.event, client.wake_fd()).ok();
        }
        let nap = known.nap.as_mut()?;
        if nap.watch(part).is_err() {
            known.nap = None;
            return None;
        }
        Some(nap.fd())
    }

    /// A call does not wait for these any more, whatever came of it.
    fn wait_no_more(&mut self, sleeper: u32, files: &[FileId]) {
        for &file in files {
            let users = self.files.get(file);
            users.watchers.retain(|w| !matches!(w, Watcher::Thread { sleeper: s, .. } if *s == sleeper));
            users.users -= 1;
            if users.users == 0 {
                // Its last descriptor was closed while this call waited.
                self.forget(file);
            }
        }
        self.sleepers.remove(sleeper);
        if self.sleepers.leader.is_none() {
            // It may have been told to lead, and has what it waited for instead.
            self.sleepers.hand_over();
        }
    }

    /// A call that waits in a handler of a signal: the sleep of this thread that the handler interrupted leads nobody any more, and goes on only when the handler is done.
    fn interrupt_own_sleep(&mut self) {
        let Some(own) = asleep() else { return };
        self.sleepers.sleepers[own as usize].interrupted = true;
        if self.sleepers.leader == Some(own) {
            self.lead_no_more(Channels::after_sleep);
        }
    }

    /// The leader is awake, and takes the news.
    fn lead_no_more(&mut self, after_sleep: impl FnOnce(&mut Channels)) {
        let was_gone = self.client.is_gone();
        after_sleep(&mut self.client);
        self.pump();
        if self.client.is_gone() && !was_gone {
            self.wake_all();
        }
        self.sleepers.hand_over();
    }
}

const NOW: Option<libc::timespec> = Some(libc::timespec { tv_sec: 0, tv_nsec: 0 });

/// What bounds a sleep in the kernel.
#[derive(Clone, Copy)]
struct Bounds {
    patience: Patience,
    mask: Option<SignalSet>,
    /// Signals whose handlers are not to have run.
    heeded: SignalSet,
}

/// Sleeps in the kernel. Which descriptors are ready is asked again by whoever wants to know.
fn ppoll(watched: &mut [pollfd], bounds: Bounds) -> Result<(), Errno> {
    raw::ppoll(watched, timeout_of(bounds.patience), bounds.mask, bounds.heeded).map(|_| ())
}

/// How long the kernel may sleep.
fn timeout_of(patience: Patience) -> Option<libc::timespec> {
    let timeout = match patience {
        Patience::Endless => None,
        Patience::None => Some(Duration::ZERO),
        Patience::Until(end) => Some(end.saturating_duration_since(Instant::now())),
    };
    timeout.map(|left| libc::timespec {
        tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: left.subsec_nanos().into(),
    })
}

/// What the kernel says of its descriptors without waiting. Returns how many are ready.
pub(crate) fn poll_now(fds: &mut [pollfd]) -> Result<usize, Errno> {
    raw::ppoll(fds, NOW, None, 0)
}

#[cfg(test)]
mod tests;
