//! Epoll sets: a list of entries that may be ready, looked at by `epoll_wait` in their order, as `fs/eventpoll.c` keeps it. Descriptors of the kernel in
//! a set stand in an epoll set of the kernel's, which is what the program's descriptor is.

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
use libc::{POLLIN, pollfd, sigset_t};
use rustix::event::epoll;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, RawFd};
use rustix::io::Errno;
use std::collections::VecDeque;

const IN: u32 = libc::EPOLLIN as u32;
const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = libc::EPOLLEXCLUSIVE as u32;
const WAKEUP: u32 = libc::EPOLLWAKEUP as u32;
/// Reported whether asked for or not.
const ALWAYS: u32 = (libc::EPOLLERR | libc::EPOLLHUP) as u32;
/// What may stand beside `EPOLLEXCLUSIVE`.
const EXCLUSIVE_WITH: u32 = IN | libc::EPOLLOUT as u32 | ALWAYS | WAKEUP | ET | EXCLUSIVE;
/// How an entry behaves, not what it waits for.
const PRIVATE_BITS: u32 = WAKEUP | ONESHOT | ET | EXCLUSIVE;
/// While entries of the stack are ready the kernel's are looked at every so often.
const KERNEL_POLL_INTERVAL: u32 = 8;

/// Sets may watch sets, so deep at the most (`EP_MAX_NESTS`).
const NESTS_MAX: usize = 4;

/// What `epoll_wait` reports, and `epoll_ctl` takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpollEvent {
    /// Bits `EPOLL…`.
    pub events: u32,
    /// The program's own.
    pub data: u64,
}

/// One entry.
struct EpollItem {
    fd: RawFd,
    file: FileId,
    event: EpollEvent,
    /// It stands in the list of those that may be ready.
    queued: bool,
    /// It was not taken out.
    live: bool,
}

/// One set.
pub(crate) struct EpollSet {
    /// The kernel's, under a number of our own: the program may close its one and go on with a copy.
    kernel: HiddenFd,
    items: Vec<EpollItem>,
    free: Vec<u32>,
    ready: VecDeque<u32>,
    /// Descriptors of the kernel that were added and not taken out; some may be closed meanwhile.
    kernel_items: usize,
    /// Times that the kernel was not looked at.
    rounds_without_kernel: u32,
    /// See [`KernelPart`].
    number: u64,
}

impl EpollSet {
    fn new(kernel: HiddenFd) -> Self {
        Self::from_inherited(kernel, 0)
    }

    /// A set that was another process's, without its entries but for so many of the kernel.
    pub fn from_inherited(kernel: HiddenFd, kernel_items: usize) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(0);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let (items, free, ready) = (Vec::new(), Vec::new(), VecDeque::new());
        Self { kernel, items, free, ready, kernel_items, rounds_without_kernel: 0, number }
    }

    /// Takes another number if it has this one.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn relocate(&self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        self.kernel.relocate(number)
    }

    fn kernel_epoll(&self) -> KernelEpoll {
        KernelEpoll { fd: self.kernel.as_raw_fd(), number: self.number }
    }

    pub fn add(&mut self, fd: RawFd, file: FileId, event: EpollEvent) -> u32 {
        let item = EpollItem { fd, file, event, queued: false, live: true };
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

    /// Takes an entry out. Its place is free once it has left the list.
    pub fn remove(&mut self, number: u32) {
        let item = &mut self.items[number as usize];
        if core::mem::replace(&mut item.live, false) && !item.queued {
            self.free.push(number);
        }
    }

    pub fn is_exclusive(&self, item: u32) -> bool {
        self.items[item as usize].event.events & EXCLUSIVE != 0
    }

    /// Something of `key` may be true of an entry's description. Whether that is for the entry (`ep_poll_callback`).
    pub fn queue_ready(&mut self, number: u32, key: i16) -> bool {
        let item = &mut self.items[number as usize];
        let wants = item.event.events;
        if !item.live || wants & !PRIVATE_BITS == 0 || key != 0 && wants & poll_to_epoll(key) == 0 {
            return false;
        }
        if !item.queued {
            item.queued = true;
            self.ready.push_back(number);
        }
        true
    }

    /// All entries: their descriptors and descriptions, what they wait for, and whether they are among those that may be ready, which come first, in their order.
    pub fn entries(&self) -> impl Iterator<Item = (RawFd, FileId, EpollEvent, bool)> + '_ {
        let queued = self.ready.iter().map(|number| &self.items[*number as usize]);
        let others = self.items.iter().filter(|item| !item.queued);
        let live = queued.chain(others).filter(|item| item.live);
        live.map(|item| (item.fd, item.file, item.event, item.queued))
    }

    /// Entries of the kernel.
    pub fn kernel_items(&self) -> usize {
        self.kernel_items
    }

    /// Descriptions that are watched.
    pub fn watched_files(&self) -> impl Iterator<Item = FileId> + '_ {
        self.items.iter().filter(|item| item.live).map(|item| item.file)
    }

    /// Entries that may be ready, and what they wait for.
    pub fn candidates(&self) -> Vec<(FileId, u32)> {
        let items = self.ready.iter().map(|number| &self.items[*number as usize]);
        items.filter(|item| item.live).map(|item| (item.file, item.event.events)).collect()
    }

    /// Whether the kernel has something in its part of the set.
    pub fn kernel_ready(&self) -> bool {
        let mut fd = [rustix::event::PollFd::new(&self.kernel, rustix::event::PollFlags::IN)];
        self.kernel_items > 0
            && rustix::event::poll(&mut fd, Some(&rustix::event::Timespec::default())).is_ok_and(|n| n > 0)
    }

    /// Asks the kernel for its part.
    fn kernel_events(&mut self, out: &mut [EpollEvent]) -> Result<usize, Errno> {
        let mut place = [const { core::mem::MaybeUninit::uninit() }; KERNEL_EVENTS_MAX];
        let room = out.len().min(place.len());
        let zero = rustix::event::Timespec::default();
        let (events, _) = epoll::wait(&self.kernel, &mut place[..room], Some(&zero))?;
        for (out, event) in out.iter_mut().zip(events.iter()) {
            let (flags, data) = (event.flags, event.data);
            *out = EpollEvent { events: flags.bits(), data: data.u64() };
        }
        Ok(events.len())
    }
}

/// Events of the kernel taken at a time.
const KERNEL_EVENTS_MAX: usize = 64;

fn poll_to_epoll(ready: i16) -> u32 {
    u32::from(ready.cast_unsigned())
}

impl Ops {
    /// `epoll_create1`.
    ///
    /// # Errors
    /// `EINVAL`, `EMFILE`, `ENFILE`.
    pub fn epoll_create1(&self, flags: c_int) -> Result<RawFd, Errno> {
        if flags & !libc::EPOLL_CLOEXEC != 0 {
            return Err(Errno::INVAL);
        }
        let program = epoll::create(epoll::CreateFlags::from_bits_retain(flags.cast_unsigned()))?;
        let own = HiddenFd::new(rustix::io::fcntl_dupfd_cloexec(&program, 0)?);
        let mut lane = self.lock()?;
        self.install(&mut lane, program.into_raw_fd(), FileKind::Epoll(Box::new(EpollSet::new(own))))
    }

    /// `epoll_ctl` on a set that is ours; `event` is absent only for `EPOLL_CTL_DEL`.
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
        let mut lane = self.lock()?;
        let set = self.file_of(&mut lane, epfd)?;
        // What happened before concerns what is in the sets now.
        lane.process_events();
        let target = self.fds.get(fd);
        lane.files.epoll(set)?;
        if target == Some(set) {
            return Err(Errno::INVAL);
        }
        let Some(file) = target else {
            // Closed ones are the kernel's no more than ours.
            return if is_pooled(fd) { Err(Errno::BADF) } else { lane.kernel_ctl(set, op, fd, event) };
        };
        let event = event.unwrap_or_default();
        let nested = matches!(lane.files.get(file).kind, FileKind::Epoll(_));
        let exclusive = event.events & EXCLUSIVE != 0;
        if exclusive
            && (op == libc::EPOLL_CTL_MOD
                || op == libc::EPOLL_CTL_ADD && (nested || event.events & !EXCLUSIVE_WITH != 0))
        {
            return Err(Errno::INVAL);
        }
        let event = EpollEvent { events: event.events | ALWAYS, data: event.data };
        let known = lane.item_of(set, fd, file)?;
        match (op, known) {
            (libc::EPOLL_CTL_ADD, Some(_)) => Err(Errno::EXIST),
            (libc::EPOLL_CTL_ADD, None) => {
                if nested && lane.nesting_depth(set, file) > NESTS_MAX {
                    return Err(Errno::LOOP);
                }
                let item = lane.files.epoll(set)?.add(fd, file, event);
                lane.files.get(file).wait_queue.push(WaitEntry::EpollItem { set, item });
                if nested {
                    lane.nest_kernel_epoll(set, file, op, event);
                } else if let Some(half) = lane.kernel_fd(file) {
                    lane.kernel_ctl(set, op, half, Some(event))?;
                }
                lane.begin_accepting(file);
                lane.queue_if_ready(set, item);
                Ok(())
            }
            (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, None) => Err(Errno::NOENT),
            (libc::EPOLL_CTL_MOD, Some(item)) => {
                let entry = &mut lane.files.epoll(set)?.items[item as usize];
                if entry.event.events & EXCLUSIVE != 0 {
                    return Err(Errno::INVAL);
                }
                entry.event = event;
                if nested {
                    lane.nest_kernel_epoll(set, file, op, event);
                } else if let Some(half) = lane.kernel_fd(file) {
                    lane.kernel_ctl(set, op, half, Some(event))?;
                }
                lane.queue_if_ready(set, item);
                Ok(())
            }
            (libc::EPOLL_CTL_DEL, Some(item)) => {
                lane.files.epoll(set)?.remove(item);
                let gone = WaitEntry::EpollItem { set, item };
                lane.files.get(file).wait_queue.retain(|watcher| *watcher != gone);
                if nested {
                    lane.nest_kernel_epoll(set, file, op, event);
                } else if let Some(half) = lane.kernel_fd(file) {
                    lane.kernel_ctl(set, op, half, None)?;
                }
                Ok(())
            }
            _ => Err(Errno::INVAL),
        }
    }

    /// `epoll_wait`, `epoll_pwait` and `epoll_pwait2`. Returns how many events were written; 0 when patience ended.
    ///
    /// # Errors
    /// `EINVAL` if there is no room for events or it is no epoll set, `EINTR`.
    pub fn epoll_wait(
        &self,
        epfd: RawFd,
        events: &mut [EpollEvent],
        patience: Timeout,
        mask: Option<&sigset_t>,
    ) -> Result<usize, Errno> {
        if events.is_empty() {
            return Err(Errno::INVAL);
        }
        let mut lane = self.lock()?;
        let set = self.file_of(&mut lane, epfd)?;
        let epoll = lane.files.epoll(set)?;
        let part = epoll.kernel_epoll();
        let mut kernel = [pollfd { fd: part.fd, events: POLLIN, revents: 0 }];
        let wait = Wait {
            mask,
            exclusive: true,
            kernel_epoll: Some(part),
            eintr_on_stop: true,
            ..Wait::of(patience)
        };
        // Who is going to sleep looks at the kernel's part by sleeping on it, and need not ask before.
        let mut ask = patience == Timeout::Zero;
        let (mut lane, result) = self.block_until(lane, &[set], &mut kernel, &wait, |lane, kernel| {
            lane.process_events();
            let ask = core::mem::take(&mut ask) || kernel[0].revents != 0;
            if lane.waiters.polled_kernel && !ask {
                // The kernel has said that nothing is ready.
                lane.files.epoll(set)?.rounds_without_kernel = 0;
            }
            lane.send_events(set, events, ask)
        });
        if result.is_ok()
            && let Ok(epoll) = lane.files.epoll(set)
            && !epoll.ready.is_empty()
        {
            // Another thread may take what is left; to sets around this one it is nothing new (`ep_done_scan`).
            lane.wake_threads(set);
        }
        match result {
            Err(Errno::AGAIN) => {
                if patience == Timeout::Zero {
                    lane.note_empty_poll();
                }
                Ok(0)
            }
            result => result,
        }
    }
}

impl ProcessState {
    /// An entry for a descriptor of the kernel.
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
        match op {
            libc::EPOLL_CTL_ADD => epoll.kernel_items += 1,
            libc::EPOLL_CTL_DEL => epoll.kernel_items = epoll.kernel_items.saturating_sub(1),
            _ => {}
        }
        Ok(())
    }

    /// The entry of a descriptor in a set. Whoever watches a description is few, so they are gone through.
    fn item_of(&mut self, set: FileId, fd: RawFd, file: FileId) -> Result<Option<u32>, Errno> {
        let mut watchers = core::mem::take(&mut self.files.get(file).wait_queue);
        let found = self.files.epoll(set).map(|epoll| {
            watchers.iter().find_map(|watcher| match *watcher {
                WaitEntry::EpollItem { set: of, item }
                    if of == set && epoll.items[item as usize].fd == fd =>
                {
                    Some(item)
                }
                _ => None,
            })
        });
        core::mem::swap(&mut self.files.get(file).wait_queue, &mut watchers);
        found
    }

    /// A set within a set: the kernel's parts are nested as ours are.
    fn nest_kernel_epoll(&mut self, outer: FileId, inner: FileId, op: c_int, event: EpollEvent) {
        let Ok(inner) = self.files.epoll(inner).map(|set| set.kernel.as_raw_fd()) else { return };
        let Ok(outer) = self.files.epoll(outer) else { return };
        let Ok(inner) = borrow(inner) else { return };
        // The kernel has the same view of what may be nested; where it has not, events of the kernel in the inner set are not seen.
        if kernel_epoll_ctl(outer.kernel.as_fd(), op, inner, event).is_ok() {
            match op {
                libc::EPOLL_CTL_ADD => outer.kernel_items += 1,
                libc::EPOLL_CTL_DEL => outer.kernel_items = outer.kernel_items.saturating_sub(1),
                _ => {}
            }
        }
    }

    /// How deep sets would be nested if `outer` watched `inner`; more than admitted also for a circle (`ep_loop_check`).
    fn nesting_depth(&mut self, outer: FileId, inner: FileId) -> usize {
        self.depth_below(inner, outer, 0) + self.depth_above(outer, 0)
    }

    fn depth_below(&mut self, set: FileId, circle: FileId, depth: usize) -> usize {
        let FileKind::Epoll(epoll) = &self.files.get(set).kind else { return 0 };
        if set == circle || depth > NESTS_MAX {
            return NESTS_MAX + 1;
        }
        let inner: Vec<FileId> = epoll.watched_files().collect();
        let sets = inner.into_iter().map(|file| self.depth_below(file, circle, depth + 1));
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
            .filter_map(|watcher| match watcher {
                WaitEntry::EpollItem { set, .. } => Some(*set),
                WaitEntry::Thread { .. } => None,
            })
            .collect();
        outer.into_iter().map(|set| self.depth_above(set, depth + 1) + 1).max().unwrap_or(0)
    }

    /// An entry is new, or waits for something else: it may be ready already (`ep_insert`, `ep_modify`).
    fn queue_if_ready(&mut self, set: FileId, item: u32) {
        let Ok(epoll) = self.files.epoll(set) else { return };
        let EpollItem { file, event, queued, .. } = epoll.items[item as usize];
        // What stands in the list already is nothing new to those who wait.
        if queued || poll_to_epoll(self.readiness(file)) & event.events == 0 {
            return;
        }
        if let Ok(epoll) = self.files.epoll(set)
            && epoll.queue_ready(item, 0)
        {
            self.wake(set, POLLIN);
        }
    }

    /// Whether one of these is ready.
    pub fn any_ready(&mut self, candidates: Vec<(FileId, u32)>) -> bool {
        candidates.into_iter().any(|(file, events)| poll_to_epoll(self.readiness(file)) & events != 0)
    }

    /// Writes what is ready (`ep_send_events`). `EAGAIN` if nothing is. `ask`: the kernel may have something ready.
    fn send_events(&mut self, set: FileId, out: &mut [EpollEvent], ask: bool) -> Result<usize, Errno> {
        let mut count = 0;
        let mut left = self.files.epoll(set)?.ready.len();
        while left > 0 && count < out.len() {
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
            out[count] = EpollEvent { events: ready, data: event.data };
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
        epoll.rounds_without_kernel += 1;
        let ask = ask && count == 0 || epoll.rounds_without_kernel >= KERNEL_POLL_INTERVAL;
        if epoll.kernel_items > 0 && count < out.len() && ask {
            epoll.rounds_without_kernel = 0;
            count += epoll.kernel_events(&mut out[count..])?;
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
