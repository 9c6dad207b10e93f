//! Epoll sets, as `fs/eventpoll.c` implements them: `epoll_wait` goes through a list of items that may be
//! ready, in order. Kernel descriptors in a set are in an epoll instance of the kernel, which is also what
//! the program's descriptor refers to.

mod by_class;
mod direct;

use crate::Ops;
use crate::descriptor::{HiddenFd, borrow, is_pooled};
use crate::fd_table::FileId;
use crate::file::FileKind;
use crate::process::ProcessState;
use crate::sleep::{Timeout, Wait};
use crate::wait_queue::WaitEntry;
use crate::wait_set::KernelEpoll;
use core::ffi::c_int;
use core::sync::atomic::{AtomicU64, Ordering};
use ginnel::priority::{self, ClassSet, PrioritizedNumbers};
use libc::{POLLIN, pollfd, sigset_t};
use rustix::event::epoll;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use rustix::io::Errno;
use std::collections::VecDeque;

use direct::DirectSleep;
pub(crate) use direct::{DirectWait, WakeFds};

const IN: u32 = libc::EPOLLIN as u32;
const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
const WAKEUP: u32 = libc::EPOLLWAKEUP as u32;
/// Reported whether requested or not.
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
/// Bits that may be combined with `EPOLLEXCLUSIVE`.
const EXCLUSIVE_WITH: u32 = IN | libc::EPOLLOUT as u32 | ALWAYS | WAKEUP | ET | EXCLUSIVE;
/// Bits that say how an item behaves, not for which events it waits.
const PRIVATE_BITS: u32 = WAKEUP | ONESHOT | ET | EXCLUSIVE;
/// While items of the stack are ready, the kernel's part is polled every 8th time.
const KERNEL_POLL_INTERVAL: u32 = 8;

/// How deep sets may be nested (`EP_MAX_NESTS`).
const NESTS_MAX: usize = 4;

/// An event, as `epoll_wait` reports and `epoll_ctl` takes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpollEvent {
    /// `EPOLL…` bits.
    pub events: u32,
    /// The program's own data.
    pub data: u64,
}

/// An item of an epoll set.
struct EpollItem {
    fd: RawFd,
    file: FileId,
    event: EpollEvent,
    /// True if the item is in [`EpollSet::ready`].
    queued: bool,
    /// True if the item was not removed.
    live: bool,
    /// The class in whose queue the item is, if it is in one.
    class: Option<u8>,
    /// Classes of events other than data since the item was last reported.
    event_classes: ClassSet,
}

/// An epoll set.
pub(crate) struct EpollSet {
    /// The kernel's epoll instance, by a descriptor of our own: the program may close its descriptor and go
    /// on with a duplicate.
    kernel: HiddenFd,
    items: Vec<EpollItem>,
    free: Vec<u32>,
    /// Items that may be ready; those that are not in `by_class`, if that exists.
    ready: VecDeque<u32>,
    /// Items that may be ready, by class, once the order of classes matters.
    by_class: Option<Box<PrioritizedNumbers>>,
    /// True if the last event of best effort was one of the kernel; those of the stack have the next turn.
    was_kernel_turn: bool,
    /// Empty between calls; its memory is used again.
    reported: Vec<(u32, u8)>,
    /// How many kernel descriptors were added and not removed; some may be closed meanwhile.
    kernel_items: usize,
    /// How often `epoll_wait` ran since the kernel's part was polled.
    rounds_without_kernel: u32,
    /// See [`KernelEpoll`].
    number: u64,
    direct: DirectSleep,
}

impl EpollSet {
    fn new(kernel: HiddenFd) -> Self {
        Self::with_kernel_items(kernel, 0, false)
    }

    /// Creates a set that was another process's. It has `kernel_items` kernel descriptors and no other items
    /// yet.
    pub fn from_inherited(kernel: HiddenFd, kernel_items: usize) -> Self {
        Self::with_kernel_items(kernel, kernel_items, true)
    }

    fn with_kernel_items(kernel: HiddenFd, kernel_items: usize, is_shared: bool) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let (items, free, ready) = (Vec::new(), Vec::new(), VecDeque::new());
        let (by_class, reported, rounds_without_kernel, was_kernel_turn) = (None, Vec::new(), 0, false);
        Self {
            kernel,
            items,
            free,
            ready,
            by_class,
            was_kernel_turn,
            reported,
            kernel_items,
            rounds_without_kernel,
            number,
            direct: DirectSleep::new(number, is_shared),
        }
    }

    /// Moves the kernel's epoll instance to another number if it has this one.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn relocate(&self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        self.kernel.relocate(number)
    }

    /// Returns the kernel's epoll instance.
    pub fn kernel_epoll(&self) -> KernelEpoll {
        KernelEpoll { fd: self.kernel.as_raw_fd(), number: self.number }
    }

    pub fn add(&mut self, fd: RawFd, file: FileId, event: EpollEvent) -> u32 {
        let (queued, live, class, event_classes) = (false, true, None, 0);
        let item = EpollItem { fd, file, event, queued, live, class, event_classes };
        match self.free.pop() {
            Some(number) => {
                self.items[number as usize] = item;
                number
            }
            None => {
                self.items.push(item);
                self.items.len() as u32 - 1
            }
        }
    }

    /// Removes an item. Its slot becomes free once it has left the ready list.
    pub fn remove(&mut self, number: u32) {
        if core::mem::replace(&mut self.items[number as usize].live, false) && !self.has_entries(number) {
            self.free.push(number);
        }
    }

    pub fn is_exclusive(&self, item: u32) -> bool {
        self.items[item as usize].event.events & EXCLUSIVE != 0
    }

    /// Puts an item in the ready list if it waits for an event in `key`; 0 matches all. Returns whether it
    /// does (`ep_poll_callback`). `event_classes` has the class of the event, unless that is about data.
    pub fn queue_ready(&mut self, number: u32, key: i16, event_classes: ClassSet) -> bool {
        let item = &mut self.items[number as usize];
        let wanted = item.event.events;
        if !item.live || wanted & !PRIVATE_BITS == 0 || key != 0 && wanted & poll_to_epoll(key) == 0 {
            return false;
        }
        item.event_classes |= event_classes;
        if !item.queued {
            item.queued = true;
            self.ready.push_back(number);
        }
        true
    }

    /// Iterates over all items: descriptor, description, events, and whether it is in the ready list. Items
    /// of the ready list come first, in its order.
    pub fn entries(&self) -> impl Iterator<Item = (RawFd, FileId, EpollEvent, bool)> + '_ {
        let is_queued = |item: &EpollItem| item.queued || item.class.is_some();
        let queued = self.ready_items().map(|number| &self.items[number as usize]);
        let others = self.items.iter().filter(move |item| !is_queued(item));
        let live = queued.chain(others).filter(|item| item.live);
        live.map(move |item| (item.fd, item.file, item.event, is_queued(item)))
    }

    /// Returns how many kernel descriptors are in the set.
    pub fn kernel_items(&self) -> usize {
        self.kernel_items
    }

    /// Iterates over the descriptions in the set.
    pub fn watched_files(&self) -> impl Iterator<Item = FileId> + '_ {
        self.items.iter().filter(|item| item.live).map(|item| item.file)
    }

    /// Returns the descriptions and events of the items in the ready list.
    pub fn candidates(&self) -> Vec<(FileId, u32)> {
        let items = self.ready_items().map(|number| &self.items[number as usize]);
        items.filter(|item| item.live).map(|item| (item.file, item.event.events)).collect()
    }

    /// Returns whether a kernel descriptor in the set is ready.
    pub fn kernel_ready(&self) -> bool {
        !self.direct.taken.is_empty() || self.kernel_items > 0 && self.is_kernel_readable()
    }

    /// Must be called when a kernel descriptor was removed.
    fn note_removed_kernel_item(&mut self) {
        self.kernel_items = self.kernel_items.saturating_sub(1);
        self.forget_events_of_removed();
    }

    /// Reports events that a sleep has taken, after `count` others. Returns how many.
    fn report_taken_events(
        &mut self,
        count: usize,
        events_max: usize,
        put: &mut impl FnMut(usize, EpollEvent) -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        let mut reported = 0;
        while count + reported < events_max
            && let Some(event) = self.direct.taken.front()
        {
            match put(count + reported, *event) {
                Ok(()) => {}
                Err(error) if count + reported == 0 => return Err(error),
                Err(_) => break,
            }
            self.direct.taken.pop_front();
            reported += 1;
        }
        Ok(reported)
    }

    /// Takes events of kernel descriptors, after `count` others. Returns how many.
    fn take_kernel_events(
        &mut self,
        count: usize,
        events_max: usize,
        put: &mut impl FnMut(usize, EpollEvent) -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        self.rounds_without_kernel = 0;
        if !self.direct.taken.is_empty() {
            return self.report_taken_events(count, events_max, put);
        }
        // One call for all: a second one would report level-triggered events again.
        let room = (events_max - count).min(self.kernel_items.max(KERNEL_EVENTS_FEW));
        let mut few = [const { core::mem::MaybeUninit::uninit() }; KERNEL_EVENTS_FEW];
        let mut many = Vec::new();
        let buffer = if room <= KERNEL_EVENTS_FEW {
            &mut few[..room]
        } else {
            many.resize_with(room, core::mem::MaybeUninit::uninit);
            &mut many[..]
        };
        let no_wait = rustix::event::Timespec::default();
        let (mut at, mut has_sentinels, mut result) = (0, false, Ok(()));
        // Repeated only if sentinels have taken the places of other events.
        for _ in 0..=direct::SENTINELS_MAX {
            let (events, _) = epoll::wait(&self.kernel, &mut *buffer, Some(&no_wait))?;
            let is_full = events.len() == room;
            for event in events {
                let (flags, data) = (event.flags, event.data.u64());
                if self.is_sentinel(data) {
                    has_sentinels = true;
                    continue;
                }
                let event = EpollEvent { events: flags.bits(), data };
                if result.is_ok() {
                    result = put(count + at, event);
                }
                if result.is_ok() {
                    at += 1;
                } else {
                    // The kernel does not report edge-triggered and one-shot events again.
                    self.direct.taken.push_back(event);
                }
            }
            if at > 0 || result.is_err() || !is_full {
                break;
            }
        }
        if has_sentinels {
            self.return_sentinels();
        }
        if !self.direct.taken.is_empty() {
            self.rounds_without_kernel = KERNEL_POLL_INTERVAL;
        }
        match result {
            Err(error) if count + at == 0 => Err(error),
            _ => Ok(at),
        }
    }
}

/// Kernel events that are taken without an allocation.
const KERNEL_EVENTS_FEW: usize = 64;

fn poll_to_epoll(ready: i16) -> u32 {
    u32::from(ready.cast_unsigned())
}

impl Ops {
    /// Implements `epoll_create1`.
    ///
    /// # Errors
    /// `EINVAL`, `EMFILE`, `ENFILE`.
    pub fn epoll_create1(&self, flags: c_int) -> Result<RawFd, Errno> {
        if flags & !libc::EPOLL_CLOEXEC != 0 {
            return Err(Errno::INVAL);
        }
        let program_fd = epoll::create(epoll::CreateFlags::from_bits_retain(flags.cast_unsigned()))?;
        let own_fd = HiddenFd::copy_of(&program_fd)?;
        let mut state = self.lock()?;
        self.install(&mut state, program_fd.into_raw_fd(), FileKind::Epoll(Box::new(EpollSet::new(own_fd))))
    }

    /// Implements `epoll_ctl` on a set of the stack. `event` may be absent only for `EPOLL_CTL_DEL`.
    ///
    /// # Errors
    /// `EEXIST`, `ENOENT`, `EINVAL`, `ELOOP`, `EBADF`, `EPERM`.
    pub fn epoll_ctl(
        &self,
        epfd: RawFd,
        op: c_int,
        fd: RawFd,
        event: Option<EpollEvent>,
    ) -> Result<(), Errno> {
        let mut state = self.lock()?;
        let set = self.file_of(&mut state, epfd)?;
        // Earlier events concern the items that are in the sets now.
        state.process_events();
        let target = self.fds.get(fd);
        state.files.epoll(set)?;
        if target == Some(set) {
            return Err(Errno::INVAL);
        }
        let Some(file) = target else {
            // To the program a pooled proxy descriptor is closed.
            return if is_pooled(fd) { Err(Errno::BADF) } else { state.kernel_ctl(set, op, fd, event) };
        };
        let event = event.unwrap_or_default();
        let nested = matches!(state.files.get(file).kind, FileKind::Epoll(_));
        let exclusive = event.events & EXCLUSIVE != 0;
        if exclusive
            && (op == libc::EPOLL_CTL_MOD
                || op == libc::EPOLL_CTL_ADD && (nested || event.events & !EXCLUSIVE_WITH != 0))
        {
            return Err(Errno::INVAL);
        }
        let event = EpollEvent { events: event.events | ALWAYS, data: event.data };
        let existing = state.item_of(set, fd, file)?;
        match (op, existing) {
            (libc::EPOLL_CTL_ADD, Some(_)) => Err(Errno::EXIST),
            (libc::EPOLL_CTL_ADD, None) => {
                if nested && state.nesting_depth(set, file) > NESTS_MAX {
                    return Err(Errno::LOOP);
                }
                if !nested {
                    state.kernel_half_ctl(set, file, op, event)?;
                }
                let item = state.files.epoll(set)?.add(fd, file, event);
                state.files.get(file).wait_queue.push(WaitEntry::EpollItem { set, item });
                if nested {
                    state.nest_kernel_epoll(set, file, op, event);
                }
                state.begin_accepting(file);
                state.queue_if_ready(set, item);
                Ok(())
            }
            (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, None) => Err(Errno::NOENT),
            (libc::EPOLL_CTL_MOD, Some(item)) => {
                let entry = &mut state.files.epoll(set)?.items[item as usize];
                if entry.event.events & EXCLUSIVE != 0 {
                    return Err(Errno::INVAL);
                }
                entry.event = event;
                if nested {
                    state.nest_kernel_epoll(set, file, op, event);
                } else {
                    state.kernel_half_ctl(set, file, op, event)?;
                }
                state.queue_if_ready(set, item);
                Ok(())
            }
            (libc::EPOLL_CTL_DEL, Some(item)) => {
                state.files.epoll(set)?.remove(item);
                let removed = WaitEntry::EpollItem { set, item };
                state.files.get(file).wait_queue.retain(|entry| *entry != removed);
                if nested {
                    state.nest_kernel_epoll(set, file, op, event);
                } else {
                    state.kernel_half_ctl(set, file, op, event)?;
                }
                Ok(())
            }
            _ => Err(Errno::INVAL),
        }
    }

    /// Implements `epoll_wait`, `epoll_pwait` and `epoll_pwait2`. Returns the number of events, 0 after the
    /// time-out.
    ///
    /// # Errors
    /// `EINVAL` if `events` is empty or the descriptor is not an epoll set, `EINTR`.
    pub fn epoll_wait(
        &self,
        epfd: RawFd,
        events: &mut [EpollEvent],
        timeout: Timeout,
        mask: Option<&sigset_t>,
    ) -> Result<usize, Errno> {
        self.epoll_wait_with(epfd, events.len(), timeout, mask, |at, event| {
            events[at] = event;
            Ok(())
        })
    }

    /// As [`epoll_wait`](Self::epoll_wait). Passes each of at most `events_max` events with its index to
    /// `put`. An event for which that fails stays in the set.
    ///
    /// # Errors
    /// As [`epoll_wait`](Self::epoll_wait), and the error of `put` for the first event.
    pub fn epoll_wait_with(
        &self,
        epfd: RawFd,
        events_max: usize,
        timeout: Timeout,
        mask: Option<&sigset_t>,
        mut put: impl FnMut(usize, EpollEvent) -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        if events_max == 0 {
            return Err(Errno::INVAL);
        }
        let mut state = self.lock()?;
        let set = self.file_of(&mut state, epfd)?;
        let epoll = state.files.epoll(set)?;
        let kernel_epoll = epoll.kernel_epoll();
        let direct = epoll.wants_direct_sleep().then_some(DirectWait { set, events_max });
        let mut kernel = [pollfd { fd: kernel_epoll.fd, events: POLLIN, revents: 0 }];
        let wait = Wait {
            mask,
            exclusive: true,
            kernel_epoll: Some(kernel_epoll),
            direct,
            eintr_on_stop: true,
            ..Wait::of(timeout)
        };
        // Some of the events may be there already.
        state.deliver_locally();
        // A call that is going to sleep polls the kernel's part by sleeping on it.
        let mut poll_kernel = timeout == Timeout::Zero;
        let (mut state, result) = self.block_until(state, &[set], &mut kernel, &wait, |state, kernel| {
            state.process_events();
            let poll_kernel = core::mem::take(&mut poll_kernel) || kernel[0].revents != 0;
            if state.waiters.polled_kernel && !poll_kernel {
                // The kernel has said that nothing is ready.
                state.files.epoll(set)?.rounds_without_kernel = 0;
            }
            state.send_events(set, events_max, poll_kernel, &mut put)
        });
        if result.is_ok()
            && let Ok(epoll) = state.files.epoll(set)
            && epoll.has_candidates()
        {
            // Another thread may take the remaining events; to sets that contain this one they are not new
            // (`ep_done_scan`).
            state.wake_threads(set);
        }
        match result {
            Err(Errno::AGAIN) => Ok(0),
            result => result,
        }
    }
}

impl ProcessState {
    /// Adds, changes or removes a kernel descriptor.
    fn kernel_ctl(
        &mut self,
        set: FileId,
        op: c_int,
        fd: RawFd,
        event: Option<EpollEvent>,
    ) -> Result<(), Errno> {
        let epoll = self.files.epoll(set)?;
        let fd = borrow(fd)?;
        kernel_epoll_ctl(epoll.kernel.as_fd(), op, fd, event.unwrap_or_default())?;
        if let Some(event) = event {
            epoll.note_kernel_item(event);
        }
        match op {
            libc::EPOLL_CTL_ADD => epoll.kernel_items += 1,
            libc::EPOLL_CTL_DEL => epoll.note_removed_kernel_item(),
            _ => {}
        }
        Ok(())
    }

    /// Adds, changes or removes the kernel socket of a description, if it has one. All descriptors of the
    /// description share it: it has the event of the one that was added first or changed last, and leaves the
    /// set with the last one.
    fn kernel_half_ctl(
        &mut self,
        set: FileId,
        file: FileId,
        op: c_int,
        event: EpollEvent,
    ) -> Result<(), Errno> {
        let Some(kernel_fd) = self.kernel_fd(file) else { return Ok(()) };
        let new = (op != libc::EPOLL_CTL_DEL).then_some(event);
        match self.kernel_ctl(set, op, kernel_fd, new) {
            // Another descriptor of the description is in the set.
            Err(Errno::EXIST) if op == libc::EPOLL_CTL_ADD => return Ok(()),
            result => result?,
        }
        if op == libc::EPOLL_CTL_DEL
            && let Some(left) = self.event_in(set, file)?
        {
            self.kernel_ctl(set, libc::EPOLL_CTL_ADD, kernel_fd, Some(left))?;
        }
        Ok(())
    }

    /// Adds the kernel socket that a description has got to the sets that contain the description.
    pub(crate) fn add_kernel_half_to_sets(&mut self, file: FileId) {
        let entries = self.files.get(file).wait_queue.iter();
        let sets: Vec<FileId> = entries
            .filter_map(|entry| match entry {
                WaitEntry::EpollItem { set, .. } => Some(*set),
                WaitEntry::Thread { .. } => None,
            })
            .collect();
        for set in sets {
            if let Ok(Some(event)) = self.event_in(set, file) {
                // Without memory in the kernel, the set does not report its connections.
                let _ = self.kernel_half_ctl(set, file, libc::EPOLL_CTL_ADD, event);
            }
        }
    }

    /// Returns the event of an item of a description in a set.
    fn event_in(&mut self, set: FileId, file: FileId) -> Result<Option<EpollEvent>, Errno> {
        let items = self.files.get(file).wait_queue.iter();
        let mut items = items.filter_map(|entry| match *entry {
            WaitEntry::EpollItem { set: of, item } if of == set => Some(item),
            _ => None,
        });
        let Some(item) = items.next() else { return Ok(None) };
        Ok(Some(self.files.epoll(set)?.items[item as usize].event))
    }

    /// Returns the item of a descriptor in a set. Searches the wait queue of the description, which is short.
    fn item_of(&mut self, set: FileId, fd: RawFd, file: FileId) -> Result<Option<u32>, Errno> {
        let mut entries = core::mem::take(&mut self.files.get(file).wait_queue);
        let found = self.files.epoll(set).map(|epoll| {
            entries.iter().find_map(|entry| match *entry {
                WaitEntry::EpollItem { set: of, item }
                    if of == set && epoll.items[item as usize].fd == fd =>
                {
                    Some(item)
                }
                _ => None,
            })
        });
        core::mem::swap(&mut self.files.get(file).wait_queue, &mut entries);
        found
    }

    /// Nests the kernel's epoll instances as the sets are nested.
    fn nest_kernel_epoll(&mut self, outer: FileId, inner: FileId, op: c_int, event: EpollEvent) {
        let Ok(inner) = self.files.epoll(inner) else { return };
        inner.ban_direct_sleep();
        let inner = inner.kernel.as_raw_fd();
        let Ok(outer) = self.files.epoll(outer) else { return };
        outer.note_kernel_item(event);
        let Ok(inner) = borrow(inner) else { return };
        // The kernel applies the same rules to nesting; if it refuses, the outer set does not report kernel
        // descriptors of the inner one.
        if kernel_epoll_ctl(outer.kernel.as_fd(), op, inner, event).is_ok() {
            match op {
                libc::EPOLL_CTL_ADD => outer.kernel_items += 1,
                libc::EPOLL_CTL_DEL => outer.note_removed_kernel_item(),
                _ => {}
            }
        }
    }

    /// Returns how deep sets would be nested if `outer` contained `inner`; more than [`NESTS_MAX`] if that
    /// made a cycle (`ep_loop_check`).
    fn nesting_depth(&mut self, outer: FileId, inner: FileId) -> usize {
        self.depth_below(inner, outer, 0) + self.depth_above(outer, 0)
    }

    fn depth_below(&mut self, set: FileId, cycle: FileId, depth: usize) -> usize {
        let FileKind::Epoll(epoll) = &self.files.get(set).kind else { return 0 };
        if set == cycle || depth > NESTS_MAX {
            return NESTS_MAX + 1;
        }
        let inner: Vec<FileId> = epoll.watched_files().collect();
        let sets = inner.into_iter().map(|file| self.depth_below(file, cycle, depth + 1));
        1 + sets.max().unwrap_or(0)
    }

    fn depth_above(&mut self, set: FileId, depth: usize) -> usize {
        if depth > NESTS_MAX {
            return NESTS_MAX + 1;
        }
        let outer: Vec<FileId> = self
            .files
            .get(set)
            .wait_queue
            .iter()
            .filter_map(|entry| match entry {
                WaitEntry::EpollItem { set, .. } => Some(*set),
                WaitEntry::Thread { .. } => None,
            })
            .collect();
        outer.into_iter().map(|set| self.depth_above(set, depth + 1) + 1).max().unwrap_or(0)
    }

    /// Puts a new or changed item in the ready list if it is ready (`ep_insert`, `ep_modify`).
    fn queue_if_ready(&mut self, set: FileId, item: u32) {
        let Ok(epoll) = self.files.epoll(set) else { return };
        let EpollItem { file, event, queued, class, .. } = epoll.items[item as usize];
        // An item that is in the ready list is not new to the waiters.
        if queued || class.is_some() || poll_to_epoll(self.readiness(file)) & event.events == 0 {
            return;
        }
        if let Ok(epoll) = self.files.epoll(set)
            && epoll.queue_ready(item, 0, 0)
        {
            self.wake(set, POLLIN);
        }
    }

    /// Returns whether one of these descriptions has one of its events.
    pub fn any_ready(&mut self, candidates: Vec<(FileId, u32)>) -> bool {
        candidates.into_iter().any(|(file, events)| poll_to_epoll(self.readiness(file)) & events != 0)
    }

    /// Writes events of ready items and returns how many (`ep_send_events`). `poll_kernel` tells that a
    /// kernel descriptor may be ready.
    ///
    /// # Errors
    /// `EAGAIN` if nothing is ready, and the error of `put` for the first event.
    fn send_events(
        &mut self,
        set: FileId,
        events_max: usize,
        poll_kernel: bool,
        put: &mut impl FnMut(usize, EpollEvent) -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        if priority::COMPILED && self.files.has_priorities {
            return self.send_events_by_class(set, events_max, poll_kernel, put);
        }
        let epoll = self.files.epoll(set)?;
        epoll.rounds_without_kernel += 1;
        let mut left = epoll.ready.len();
        // Before items of the stack, which may fill the program's array each time.
        let is_kernel_due = epoll.kernel_items > 0 && epoll.rounds_without_kernel >= KERNEL_POLL_INTERVAL;
        let mut count = if is_kernel_due { epoll.take_kernel_events(0, events_max, put)? } else { 0 };
        while left > 0 && count < events_max {
            left -= 1;
            let epoll = self.files.epoll(set)?;
            let Some(number) = epoll.ready.pop_front() else { break };
            let item = &mut epoll.items[number as usize];
            item.queued = false;
            if !item.live {
                epoll.free.push(number);
                continue;
            }
            let (file, event) = (item.file, item.event);
            let ready = poll_to_epoll(self.readiness(file)) & event.events & !PRIVATE_BITS;
            if ready == 0 {
                continue;
            }
            if let Err(error) = put(count, EpollEvent { events: ready, data: event.data }) {
                let epoll = self.files.epoll(set)?;
                epoll.items[number as usize].queued = true;
                epoll.ready.push_front(number);
                return if count > 0 { Ok(count) } else { Err(error) };
            }
            count += 1;
            if event.events & ONESHOT != 0 {
                self.files.epoll(set)?.items[number as usize].event.events &= PRIVATE_BITS;
            } else if event.events & ET == 0 {
                let epoll = self.files.epoll(set)?;
                epoll.items[number as usize].queued = true;
                epoll.ready.push_back(number);
            }
        }
        let epoll = self.files.epoll(set)?;
        if poll_kernel && count == 0 && epoll.kernel_items > 0 && !is_kernel_due {
            count += epoll.take_kernel_events(count, events_max, put)?;
        }
        if count > 0 { Ok(count) } else { Err(Errno::AGAIN) }
    }
}

fn kernel_epoll_ctl(
    set: BorrowedFd<'_>,
    op: c_int,
    fd: BorrowedFd<'_>,
    event: EpollEvent,
) -> Result<(), Errno> {
    let data = epoll::EventData::new_u64(event.data);
    let flags = epoll::EventFlags::from_bits_retain(event.events);
    match op {
        libc::EPOLL_CTL_ADD => epoll::add(set, fd, data, flags),
        libc::EPOLL_CTL_MOD => epoll::modify(set, fd, data, flags),
        libc::EPOLL_CTL_DEL => epoll::delete(set, fd),
        _ => Err(Errno::INVAL),
    }
}
