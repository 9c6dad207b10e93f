//! The ready list by priority, if the stack has priorities (docs/priorities.md): `epoll_wait` reports the
//! items of the highest class first, except for the minimum share of lower ones. Kernel descriptors are of
//! best effort.

use super::{ET, EpollEvent, EpollSet, KERNEL_POLL_INTERVAL, ONESHOT, PRIVATE_BITS, poll_to_epoll};
use crate::fd_table::FileId;
use crate::file::{FileKind, SocketRole};
use crate::process::ProcessState;
use ginnel::priority::{self, BEST_EFFORT, ClassSet, PrioritizedNumbers};
use rustix::io::Errno;

impl EpollSet {
    /// Returns whether an item may be ready.
    pub(super) fn has_candidates(&self) -> bool {
        !self.ready.is_empty() || self.by_class.as_ref().is_some_and(|by_class| !by_class.is_empty())
    }

    /// Iterates over the items of the ready list: by class if it is ordered by class, then the latest ones.
    pub(super) fn ready_items(&self) -> impl Iterator<Item = u32> + '_ {
        let by_class = self.by_class.iter().flat_map(|by_class| by_class.iter());
        // An item may have entries in the queues of other classes, which are obsolete.
        let sorted = by_class.filter(|(number, class)| self.items[*number as usize].class == Some(*class));
        let latest = self.ready.iter().filter(|number| self.items[**number as usize].class.is_none());
        sorted.map(|(number, _)| number).chain(latest.copied())
    }

    /// Returns whether an item that was removed has entries in the ready list.
    pub(super) fn has_entries(&self, number: u32) -> bool {
        let by_class = self.by_class.as_ref();
        self.items[number as usize].queued
            || by_class.is_some_and(|by_class| by_class.classes_of(number) != 0)
    }

    /// Appends an item to the queue of its class. An earlier entry of another class becomes obsolete.
    fn push_by_class(&mut self, number: u32, class: u8) {
        if let Some(by_class) = &mut self.by_class {
            by_class.push(number, class);
            self.items[number as usize].class = Some(class);
        }
    }

    /// Puts the item that was taken last back to the front of its queue.
    fn put_back(&mut self, number: u32, class: u8) {
        if let Some(by_class) = &mut self.by_class {
            by_class.put_back(number, class);
            self.items[number as usize].class = Some(class);
        }
    }

    /// Takes the next item that is not obsolete. Returns its class, too.
    fn pop_by_class(&mut self) -> Option<(u32, u8)> {
        loop {
            let (number, class) = self.by_class.as_mut()?.pop()?;
            if !self.items[number as usize].live {
                if !self.has_entries(number) {
                    self.free.push(number);
                }
            } else if self.items[number as usize].class == Some(class) {
                self.items[number as usize].class = None;
                return Some((number, class));
            }
        }
    }
}

impl ProcessState {
    /// Notes that the order of ready descriptors may matter from now on, if the stack has priorities.
    #[cold]
    pub fn begin_priorities(&mut self) {
        self.files.has_priorities |= self.client.lower_share_percent().is_some();
    }

    /// Returns the class of priority of a description: the highest one of its unread data, of connections
    /// that can be accepted, or of the events in `events`. If that is best effort, `SO_PRIORITY` decides.
    fn class_of(&mut self, file: FileId, events: ClassSet) -> u8 {
        let socket = match &self.files.get(file).kind {
            FileKind::Free => return BEST_EFFORT,
            FileKind::Epoll(_) => None,
            FileKind::Socket(socket) => Some((socket.role, socket.options.link_priority())),
        };
        let (role, own_priority) = socket.unzip();
        let unread = match role {
            Some(SocketRole::Stream(stream)) => self.client.data_class(stream.conn),
            Some(SocketRole::Udp(udp)) => self.client.data_class(udp.conn),
            Some(SocketRole::Listening(listening)) => self.client.offer_class(listening.number),
            Some(SocketRole::Unconnected { .. }) => None,
            None => self.class_of_set(file),
        };
        // Cannot truncate: there are eight classes.
        let of_events = events.checked_ilog2().map(|class| class as u8);
        match unread.max(of_events) {
            None | Some(BEST_EFFORT) => priority::class(own_priority.unwrap_or(0)),
            Some(class) => class,
        }
    }

    /// Returns the highest class of a set that is an item of another one.
    fn class_of_set(&mut self, set: FileId) -> Option<u8> {
        self.sort_ready(set).ok()?;
        let by_class = self.files.epoll(set).ok()?.by_class.as_ref()?;
        by_class.with_entries().checked_ilog2().map(|class| class as u8)
    }

    /// Moves the items that may be ready to the queues of their classes.
    fn sort_ready(&mut self, set: FileId) -> Result<(), Errno> {
        let epoll = self.files.epoll(set)?;
        if epoll.by_class.is_none() {
            let share = self.client.lower_share_percent().unwrap_or(0);
            epoll.by_class = Some(Box::new(PrioritizedNumbers::new(share)));
        }
        while let Some(number) = self.files.epoll(set)?.ready.pop_front() {
            let epoll = self.files.epoll(set)?;
            let item = &mut epoll.items[number as usize];
            item.queued = false;
            let (file, before, event_classes) = (item.file, item.class, item.event_classes);
            if !item.live {
                if !epoll.has_entries(number) {
                    epoll.free.push(number);
                }
                continue;
            }
            let class = self.class_of(file, event_classes);
            if before.is_none_or(|before| before < class) {
                self.files.epoll(set)?.push_by_class(number, class);
            }
        }
        Ok(())
    }

    /// As `send_events`, by class.
    #[cold]
    #[inline(never)]
    pub(super) fn send_events_by_class(
        &mut self,
        set: FileId,
        events_max: usize,
        poll_kernel: bool,
        put: &mut impl FnMut(usize, EpollEvent) -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        self.sort_ready(set)?;
        // Items that stay in the list are not reported twice by one call.
        let mut stay = core::mem::take(&mut self.files.epoll(set)?.reported);
        let mut count = 0;
        let result = self.send_next_events(set, events_max, poll_kernel, put, (&mut count, &mut stay));
        let epoll = self.files.epoll(set)?;
        for (number, class) in stay.drain(..) {
            epoll.push_by_class(number, class);
        }
        epoll.reported = stay;
        match result {
            Err(error) if count == 0 => Err(error),
            _ if count == 0 => Err(Errno::AGAIN),
            _ => Ok(count),
        }
    }

    /// Writes events until `events_max` are written or nothing is ready. Adds their number to `count`, and to
    /// `stay` the items that stay in the ready list.
    fn send_next_events(
        &mut self,
        set: FileId,
        events_max: usize,
        poll_kernel: bool,
        put: &mut impl FnMut(usize, EpollEvent) -> Result<(), Errno>,
        (count, stay): (&mut usize, &mut Vec<(u32, u8)>),
    ) -> Result<(), Errno> {
        let epoll = self.files.epoll(set)?;
        epoll.rounds_without_kernel += 1;
        if !epoll.direct.taken.is_empty() {
            // First, whatever their class: after this call the program may remove their descriptors.
            *count = epoll.take_kernel_events(0, events_max, put)?;
            if let Some(by_class) = &mut epoll.by_class {
                by_class.charge(BEST_EFFORT, *count, 1 << BEST_EFFORT);
            }
        }
        let has_kernel_items = epoll.kernel_items > 0;
        let is_kernel_due = has_kernel_items && epoll.rounds_without_kernel >= KERNEL_POLL_INTERVAL;
        let mut kernel_classes = if is_kernel_due { 1 << BEST_EFFORT } else { 0 };
        while *count < events_max {
            let epoll = self.files.epoll(set)?;
            let Some(by_class) = &mut epoll.by_class else { break };
            let is_stack_turn = epoll.was_kernel_turn && by_class.with_entries() >> BEST_EFFORT & 1 != 0;
            let next = by_class.next_class(kernel_classes);
            if kernel_classes != 0 && next == Some(BEST_EFFORT) && !is_stack_turn {
                epoll.was_kernel_turn = true;
                let taken = epoll.take_kernel_events(*count, events_max, put)?;
                if let Some(by_class) = &mut epoll.by_class {
                    by_class.charge(BEST_EFFORT, taken, kernel_classes);
                }
                (*count, kernel_classes) = (*count + taken, 0);
                continue;
            }
            let Some((number, class)) = epoll.pop_by_class() else {
                if kernel_classes == 0 {
                    break;
                }
                // Only obsolete entries were left.
                continue;
            };
            let item = &mut epoll.items[number as usize];
            let (file, event, event_classes) = (item.file, item.event, item.event_classes);
            item.event_classes = 0;
            let ready = poll_to_epoll(self.readiness(file)) & event.events & !PRIVATE_BITS;
            if ready == 0 {
                continue;
            }
            let class_now = self.class_of(file, event_classes);
            let epoll = self.files.epoll(set)?;
            if class_now < class {
                // What was urgent has been read.
                epoll.items[number as usize].event_classes = event_classes;
                epoll.push_by_class(number, class_now);
                continue;
            }
            if let Err(error) = put(*count, EpollEvent { events: ready, data: event.data }) {
                epoll.items[number as usize].event_classes = event_classes;
                epoll.put_back(number, class);
                return Err(error);
            }
            *count += 1;
            epoll.was_kernel_turn &= class > BEST_EFFORT;
            if event.events & ONESHOT != 0 {
                epoll.items[number as usize].event.events &= PRIVATE_BITS;
            } else if event.events & ET == 0 {
                stay.push((number, class));
            }
            if let Some(by_class) = &mut epoll.by_class {
                by_class.charge(class, 1, kernel_classes);
            }
        }
        if *count == 0 && poll_kernel && has_kernel_items && !is_kernel_due {
            *count = self.files.epoll(set)?.take_kernel_events(0, events_max, put)?;
        }
        Ok(())
    }
}
