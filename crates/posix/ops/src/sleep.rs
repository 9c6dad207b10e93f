//! Threads that wait in a call. One of them, the leader, sleeps on what the stack wakes, and takes the news for all; the others sleep until the
//! leader wakes them.

use crate::descriptor::{Internal, own};
use crate::held::Locked;
use crate::lane::Lane;
use crate::raw;
use crate::signal::SignalSet;
use crate::{FileId, Ops};
use core::cell::Cell;
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

/// A thread that waits.
struct Sleeper {
    event: Internal,
    /// Something happened that it waits for.
    woken: bool,
    /// It sleeps in the kernel.
    asleep: bool,
    in_use: bool,
    /// Readable while one of these signals waits, which are kept back while it sleeps.
    kept_back: Option<(Internal, SignalSet)>,
}

impl Sleeper {
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
                let fd = Internal::new(own(raw::signalfd(None, set)?))?;
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
    has_leader: bool,
}

impl Sleepers {
    fn add(&mut self) -> Result<u32, Errno> {
        let free = self.sleepers.iter().position(|sleeper| !sleeper.in_use);
        let index = match free {
            Some(index) => index,
            None => {
                let event = Internal::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)?;
                let (woken, asleep, in_use) = (false, false, false);
                self.sleepers.push(Sleeper { event, woken, asleep, in_use, kept_back: None });
                self.sleepers.len() - 1
            }
        };
        let sleeper = &mut self.sleepers[index];
        (sleeper.in_use, sleeper.woken, sleeper.asleep) = (true, false, false);
        Ok(index as u32)
    }

    fn remove(&mut self, sleeper: u32) {
        self.sleepers[sleeper as usize].in_use = false;
    }

    /// Something happened that this one waits for. False if it had been told before.
    pub fn wake(&mut self, sleeper: u32) -> bool {
        let sleeper = &mut self.sleepers[sleeper as usize];
        if sleeper.woken {
            return false;
        }
        sleeper.woken = true;
        if sleeper.asleep {
            signal(&sleeper.event);
        }
        true
    }

    /// The leader goes: another takes its place.
    fn hand_over(&mut self) {
        self.has_leader = false;
        if let Some(next) = self.sleepers.iter().find(|s| s.in_use && s.asleep && !s.woken) {
            signal(&next.event);
        }
    }
}

fn signal(event: &Internal) {
    // A full counter is readable, too.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// What a waiting call waits with.
pub(crate) struct Wait<'a> {
    pub patience: Patience,
    /// Signals that are blocked meanwhile instead of those that the thread blocks.
    pub mask: Option<&'a sigset_t>,
    /// Of several threads that wait for this only one is to be woken.
    pub exclusive: bool,
    /// It goes on after handlers with `SA_RESTART`, if it waits without end, unless so much was done already.
    pub restarts: Option<&'a Cell<usize>>,
}

impl<'a> Wait<'a> {
    /// Whatever signal comes, the call is `EINTR` (poll and its kin, signal(7)).
    pub fn of(patience: Patience) -> Self {
        Self { patience, mask: None, exclusive: false, restarts: None }
    }

    /// With `SA_RESTART` the call goes on if nothing is `done`, and there is no time-out.
    pub fn restarting(patience: Patience, done: &'a Cell<usize>) -> Self {
        let endless = patience == Patience::Endless;
        Self { restarts: endless.then_some(done), ..Self::of(patience) }
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
    pub(crate) fn until<'a, T>(
        &'a self,
        mut lane: Locked<'a>,
        files: &[FileId],
        kernel: &mut [pollfd],
        wait: &Wait<'_>,
        mut attempt: impl FnMut(&mut Lane, &mut [pollfd]) -> Result<T, Errno>,
    ) -> (Locked<'a>, Result<T, Errno>) {
        let first = attempt(&mut lane, kernel);
        if !matches!(first, Err(Errno::AGAIN)) || wait.patience == Patience::None {
            return (lane, first);
        }
        let sleeper = match lane.sleepers.add() {
            Ok(sleeper) => sleeper,
            Err(error) => return (lane, Err(error)),
        };
        for &file in files {
            let watcher = Watcher::Thread { sleeper, exclusive: wait.exclusive };
            let file = lane.files.get(file);
            file.users += 1;
            file.watchers.push(watcher);
        }
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
                Ok(Woken::ByHandler) if wait.restarts.is_none_or(|done| done.get() == 0) => {}
                Ok(Woken::ByHandler) => break Err(Errno::INTR),
                Err(error) => break Err(error),
            }
            if wait.patience.is_over() {
                break Err(Errno::AGAIN);
            }
        };
        for &file in files {
            let users = lane.files.get(file);
            users.watchers.retain(|w| !matches!(w, Watcher::Thread { sleeper: s, .. } if *s == sleeper));
            users.users -= 1;
            if users.users == 0 {
                // Its last descriptor was closed while this call waited.
                lane.forget(file);
            }
        }
        lane.sleepers.remove(sleeper);
        (lane, result)
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
        let leads = !lane.sleepers.has_leader;
        if leads && !lane.client.before_sleep() {
            lane.client.after_sleep();
            lane.pump();
            return (lane, Ok(Woken::ByNews));
        }
        let handlers = wait.restarts.map(|_| self.signals.handlers()).unwrap_or_default();
        let mut mask = wait.mask.map(raw::kernel_set);
        let mut kept_back = -1;
        if handlers.are_mixed()
            && let Ok(blocked) = raw::blocked_signals()
        {
            let set = handlers.restarting & !blocked;
            // Without descriptors all signals interrupt.
            if let Ok(fd) = lane.sleepers.sleepers[index].keep_back(set) {
                kept_back = fd;
                mask = Some(blocked | set);
            }
        }
        lane.sleepers.has_leader = true;
        lane.sleepers.sleepers[index].asleep = true;
        let own = lane.sleepers.sleepers[index].event.as_raw_fd();
        let mut watched = Vec::with_capacity(kernel.len() + 3);
        let entry = |fd| pollfd { fd, events: POLLIN, revents: 0 };
        watched.push(entry(own));
        // Of a stack that is gone there is no news, and its descriptor is readable for ever.
        let wakes = leads && !lane.client.is_gone();
        watched.push(entry(if wakes { lane.client.wake_fd().as_raw_fd() } else { -1 }));
        watched.push(entry(kept_back));
        watched.extend_from_slice(kernel);
        drop(lane);
        // Handlers that were kept back run before this returns.
        let slept = match ppoll(&mut watched, wait.patience, mask) {
            Ok(()) if watched[2].revents != 0 => Ok(Woken::ByHandler),
            Ok(()) => Ok(Woken::ByNews),
            Err(Errno::INTR) if wait.restarts.is_some() && self.signals.goes_on(handlers) => {
                Ok(Woken::ByHandler)
            }
            Err(error) => Err(error),
        };
        for (fd, slept_on) in kernel.iter_mut().zip(&watched[3..]) {
            fd.revents = slept_on.revents;
        }
        lane = self.lock_for_good();
        let awake = &mut lane.sleepers.sleepers[index];
        awake.asleep = false;
        if watched[0].revents != 0 {
            let _ = rustix::io::read(&awake.event, &mut [0; 8]);
        }
        if leads {
            let was_gone = lane.client.is_gone();
            lane.client.after_sleep();
            lane.pump();
            if lane.client.is_gone() && !was_gone {
                lane.wake_all();
            }
            lane.sleepers.hand_over();
        }
        lane.sleepers.sleepers[index].woken = false;
        (lane, slept)
    }
}

/// Sleeps in the kernel. Which descriptors are ready is asked again by whoever wants to know.
fn ppoll(watched: &mut [pollfd], patience: Patience, mask: Option<SignalSet>) -> Result<(), Errno> {
    let timeout = match patience {
        Patience::Endless => None,
        Patience::None => Some(Duration::ZERO),
        Patience::Until(end) => Some(end.saturating_duration_since(Instant::now())),
    };
    let timeout = timeout.map(|left| libc::timespec {
        tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    raw::ppoll(watched, timeout, mask).map(|_| ())
}

/// What the kernel says of its descriptors without waiting. Returns how many are ready.
pub(crate) fn poll_now(fds: &mut [pollfd]) -> Result<usize, Errno> {
    raw::ppoll(fds, Some(libc::timespec { tv_sec: 0, tv_nsec: 0 }), None)
}
