//! Events by priority, if `[priority]` is in use: the notifications in the ring are moved to a queue for each
//! class before each event, and the next event is that of the class whose turn it is.

use super::offers::offered_class;
use super::{Client, ClientEvent};
use crate::channel::client_memory::ClientMemory;
use crate::channel::data_class;
use crate::channel::doorbells::{NotifyQueue, highest_class};
use crate::channel::region::Region;
use crate::channel::socket::OfferSlot;
use crate::channel::sync::Ordering;
use ginnel_stack::error::Stale;
use ginnel_stack::handle::Conn;
use ginnel_stack::priority::{self, BEST_EFFORT, PrioritizedNumbers};

/// Notifications that are moved from the ring at a time, at most. The stack may notify all the time.
const MOVED_MAX: usize = 1 << 17;

/// Sockets that the stack has notified of, by class.
pub(super) struct PrioritizedEvents {
    /// Numbers of sockets.
    waiting: PrioritizedNumbers,
    /// Class of the event that was returned last.
    pub class: u8,
}

impl PrioritizedEvents {
    /// Creates empty queues for a client of this region. Without a share there, as before the stack has
    /// declared one, lower classes come last.
    pub fn new(region: &Region) -> Self {
        Self {
            waiting: PrioritizedNumbers::new(region.lower_share_percent().unwrap_or(0)),
            class: BEST_EFFORT,
        }
    }

    /// Queues a socket that was notified of for these reasons.
    pub fn push(&mut self, socket: u32, reasons: u8) {
        self.waiting.push(socket, highest_class(reasons));
    }

    /// Returns whether no notification waits outside of the ring.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Moves all notifications from the ring to the queues. After an overflow of the ring, moves also those
    /// of which only the flag is set, and returns true: the client must check what has no notification of its
    /// own.
    fn take_notifications(
        &mut self,
        ring: &mut NotifyQueue,
        memory: &ClientMemory,
        sockets_max: usize,
    ) -> bool {
        let mut has_scanned = false;
        for _ in 0..MOVED_MAX {
            // The stack does not corrupt its rings.
            match ring.pop(memory.to_client()).ok().flatten() {
                // Another process of the domain may have written any number there.
                Some((socket, reasons)) if (socket as usize) < sockets_max => self.push(socket, reasons),
                Some(_) => {}
                None if ring.is_scanning() => has_scanned = true,
                None => break,
            }
        }
        has_scanned
    }
}

impl Client {
    /// Returns the class of priority ([`priority::class`]) of the event that [`next_event`](Self::next_event)
    /// returned last.
    #[inline]
    pub fn event_class(&self) -> u8 {
        self.prioritized.as_ref().map_or(BEST_EFFORT, |prioritized| prioritized.class)
    }

    /// Returns whether the stack has reported an event and has priorities. Otherwise all sockets are of one
    /// class.
    #[inline]
    pub fn has_priorities(&self) -> bool {
        priority::COMPILED && self.prioritized.is_some()
    }

    /// Returns the minimum share of lower priorities in percent; `None` if the stack has no priorities.
    pub fn lower_share_percent(&self) -> Option<u32> {
        self.region.lower_share_percent()
    }

    /// Returns the class of priority of a socket's unread bytes or datagrams: the highest one among them;
    /// `None` if nothing is unread.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn data_class(&self, conn: Conn) -> Result<Option<u8>, Stale> {
        let socket_ref = self.socket_ref(conn)?;
        let word = &self.region.socket(conn.index()).data_class;
        let in_order =
            (socket_ref.readable() > 0).then(|| data_class::of_unread(word, socket_ref.read_position()));
        // One more than the class; 0 says that there are no such bytes.
        let unordered = self.region.socket(conn.index()).unordered.load(Ordering::Relaxed).checked_sub(1);
        let unordered = unordered.and_then(|class| u8::try_from(class).ok()).filter(|class| *class < 8);
        Ok(in_order.max(unordered))
    }

    /// Returns the highest class of priority of the connections of a listener that could be accepted now.
    pub fn offer_class(&self, listener: u32) -> Option<u8> {
        let offers = self.memory.offers().iter();
        let offered = offers.filter_map(|word| match OfferSlot::from_bits(word.load(Ordering::Acquire)) {
            OfferSlot::Offered { listener: of, socket } if u32::from(of) == listener => {
                offered_class(&self.region, socket)
            }
            _ => None,
        });
        offered.max()
    }

    /// Begins to order events by class, with the notification that was popped last: the first one of a stack
    /// with priorities.
    #[cold]
    pub(super) fn start_priorities(&mut self, socket: u32, reasons: u8) {
        let mut prioritized = Box::new(PrioritizedEvents::new(&self.region));
        if (socket as usize) < self.sockets_max() {
            prioritized.push(socket, reasons);
        }
        self.prioritized = Some(prioritized);
    }

    /// As [`next_event`](Self::next_event), by class.
    #[cold]
    #[inline(never)]
    pub(super) fn next_event_by_class(&mut self) -> Option<ClientEvent> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(event);
            }
            let sockets_max = self.sockets_max();
            let prioritized = self.prioritized.as_mut()?;
            if prioritized.take_notifications(&mut self.from_stack, &self.memory, sockets_max) {
                self.report_destroyed_listeners();
            }
            let prioritized = self.prioritized.as_mut()?;
            let Some((socket, class)) = prioritized.waiting.pop() else {
                if self.must_rescan {
                    self.rescan();
                }
                if self.events.is_empty() {
                    self.set_event_class(BEST_EFFORT);
                    return None;
                }
                continue;
            };
            if prioritized.waiting.classes_of(socket) >> class > 1 {
                // The entry of a higher class will report everything.
                continue;
            }
            match self.sockets.get(socket as usize).and_then(|entry| entry.generation) {
                Some(generation) => {
                    let conn = Conn::new(socket, generation);
                    self.report_changes(conn);
                    self.repeat_high_readable(conn, class);
                }
                None => {
                    if let Some(event) = self.check_offer(socket) {
                        self.events.push_front(event);
                    }
                    self.repeat_high_offer(socket, class);
                }
            }
            // Entries whose changes were reported for a higher class cost nothing.
            if !self.events.is_empty() {
                self.set_event_class(class);
                if let Some(prioritized) = &mut self.prioritized {
                    prioritized.waiting.charge(class, 1, 0);
                }
            }
        }
    }

    fn set_event_class(&mut self, class: u8) {
        if let Some(prioritized) = &mut self.prioritized {
            prioritized.class = class;
        }
    }

    /// Reports unread bytes again if bytes of a high class arrived after them and wait for space in the
    /// region.
    fn repeat_high_readable(&mut self, conn: Conn, class: u8) {
        if class > BEST_EFFORT && self.events.is_empty() && self.data_class(conn) == Ok(Some(class)) {
            self.events.push_back(ClientEvent::Readable { conn });
        }
    }

    /// Reports an offer again if data of a high class arrived before the connection was accepted.
    fn repeat_high_offer(&mut self, socket: u32, class: u8) {
        let slot = self.region.socket(socket).offer_slot.load(Ordering::Acquire) as usize;
        if class > BEST_EFFORT
            && self.events.is_empty()
            && self.explicit_offers.is_some()
            && let Some(word) = self.memory.offers().get(slot)
            && let OfferSlot::Offered { listener, socket: of } =
                OfferSlot::from_bits(word.load(Ordering::Acquire))
            && of == socket
        {
            self.events.push_back(ClientEvent::Offered { listener: listener.into() });
        }
    }
}
