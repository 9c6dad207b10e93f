//! The clients of a domain. Besides the table there are lists of the clients that a turn has to visit, so
//! that the cost of a turn depends on the activity of clients, not on their number.

use super::super::client_memory::ClientMemory;
use super::super::doorbells::{NOTIFIED, reasons_of_class};
use super::super::region::Region;
use super::super::sleep_state::{YieldOutcome, try_yield};
use super::super::sync::{Ordering, fence};
use super::client_state::ClientState;
use super::slot_allocator::SlotAllocator;
use super::waker::ClientWaker;
use std::sync::Arc;

/// The clients of a domain, by number.
pub(super) struct ClientTable {
    // Boxed, because most numbers are free. Grows up to the limit.
    clients: Vec<Option<Box<ClientState>>>,
    numbers: SlotAllocator,
    max: usize,
    count: usize,
    /// Clients some of whose notifications remain for the next turn.
    unfinished: Vec<u16>,
    /// Memory for the list that [`begin_turn`](Self::begin_turn) returns.
    notified: Vec<u16>,
    /// Clients that were notified since they were last woken.
    to_wake: Vec<u16>,
    /// Clients that exchanged notifications with the stack since they last slept at the end of a turn.
    active: Vec<u16>,
    /// Clients to which the shard yielded its CPU.
    yielded: Vec<u16>,
    /// Clients that may have outstanding offers.
    offering: Vec<u16>,
    /// Reasons of notifications: the class of priority of the event that is being handled.
    reasons: u8,
    /// Number of times that rings of clients which were removed became full.
    rings_full_before: u64,
}

impl ClientTable {
    /// Creates a table for up to `max` clients.
    pub fn new(max: usize) -> Self {
        Self {
            clients: Vec::new(),
            numbers: SlotAllocator::new(max),
            max,
            count: 0,
            unfinished: Vec::new(),
            notified: Vec::new(),
            to_wake: Vec::new(),
            active: Vec::new(),
            yielded: Vec::new(),
            offering: Vec::new(),
            reasons: NOTIFIED,
            rings_full_before: 0,
        }
    }

    /// Sets the class of priority of the notifications that follow.
    pub fn set_class(&mut self, class: u8) {
        self.reasons = reasons_of_class(class);
    }

    /// Returns the number of clients that there may be.
    pub fn max(&self) -> usize {
        self.max
    }

    /// Returns the number of clients.
    pub fn count(&self) -> usize {
        self.count
    }

    #[inline]
    pub fn get(&self, number: usize) -> Option<&ClientState> {
        self.clients.get(number)?.as_deref()
    }

    #[inline]
    pub fn get_mut(&mut self, number: usize) -> Option<&mut ClientState> {
        self.clients.get_mut(number)?.as_deref_mut()
    }

    /// Adds a client and returns its number, or `None` if all numbers are in use.
    pub fn insert(&mut self, memory: Arc<ClientMemory>, wake: ClientWaker) -> Option<usize> {
        let number = self.numbers.allocate()? as usize;
        if number >= self.clients.len() {
            self.clients.resize_with(number + 1, || None);
        }
        self.clients[number] = Some(Box::new(ClientState::new(memory, wake)));
        self.count += 1;
        Some(number)
    }

    /// Returns the clients and their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &ClientState)> {
        self.clients.iter().enumerate().filter_map(|(number, client)| Some((number, client.as_deref()?)))
    }

    /// Returns how often rings of clients that were removed became full.
    pub fn rings_full_before(&self) -> u64 {
        self.rings_full_before
    }

    /// Creates a table with the clients of a saved one. All of them count as having notified, so that no
    /// notification is lost. Returns `None` if a number is used twice or beyond the limit.
    pub fn restore(
        max: usize,
        clients: impl IntoIterator<Item = (usize, ClientState)>,
        rings_full_before: u64,
    ) -> Option<Self> {
        let mut table = Self { rings_full_before, ..Self::new(max) };
        for (number, mut client) in clients {
            if number >= max || table.get(number).is_some() {
                return None;
            }
            if number >= table.clients.len() {
                table.clients.resize_with(number + 1, || None);
            }
            client.is_unfinished = true;
            // Cannot truncate: numbers have 16 bits.
            table.unfinished.push(number as u16);
            if !client.to_client.is_quiet() {
                table.to_wake.push(number as u16);
            }
            if client.outstanding() > 0 {
                client.is_offering = true;
                table.offering.push(number as u16);
            }
            table.clients[number] = Some(Box::new(client));
            table.count += 1;
        }
        table.numbers = SlotAllocator::with_allocated(max, table.clients.iter().map(Option::is_some));
        Some(table)
    }

    /// Removes a client. Its number is used again.
    pub fn remove(&mut self, number: usize) -> Option<Box<ClientState>> {
        let client = self.clients.get_mut(number)?.take()?;
        self.count -= 1;
        self.rings_full_before += client.rings_full();
        // Cannot truncate: numbers have 16 bits.
        self.numbers.release(number as u32);
        // A later client of this number must be in no list twice.
        for (list, is_in) in [
            (&mut self.unfinished, client.is_unfinished),
            (&mut self.active, client.is_active),
            (&mut self.offering, client.is_offering),
        ] {
            if is_in {
                list.retain(|entry| usize::from(*entry) != number);
            }
        }
        Some(client)
    }

    /// Returns how often a ring of doorbells was full, to or from a client.
    pub fn rings_full(&self) -> u64 {
        let full = self.clients.iter().flatten().map(|client| client.rings_full());
        self.rings_full_before + full.sum::<u64>()
    }

    /// Notifies a client of a socket.
    #[inline]
    pub fn notify(&mut self, number: usize, socket: u32) {
        let Some(client) = self.clients.get_mut(number).and_then(Option::as_deref_mut) else { return };
        if client.to_client.is_quiet() {
            self.to_wake.push(number as u16);
            if !client.is_active {
                client.is_active = true;
                self.active.push(number as u16);
            }
        }
        client.to_client.notify(client.memory.to_client(), socket, self.reasons);
    }

    /// Makes a client look at everything.
    #[cold]
    pub fn notify_of_all(&mut self, number: usize) {
        // Marks the client as notified, like any notification.
        self.notify(number, 0);
        if let Some(client) = self.clients.get_mut(number).and_then(Option::as_deref_mut) {
            client.to_client.notify_all(client.memory.to_client());
        }
    }

    /// Notifies all clients without a particular socket, so that clients that wait look again.
    pub fn notify_all(&mut self) {
        (0..self.clients.len()).for_each(|number| self.notify(number, 0));
    }

    /// Wakes clients that sleep and were notified.
    #[inline]
    pub fn wake_notified(&mut self) {
        if self.to_wake.is_empty() {
            return;
        }
        // Either a client sees its entry before it sleeps, or this thread sees it asleep.
        fence(Ordering::SeqCst);
        for number in self.to_wake.drain(..) {
            if let Some(client) = self.clients.get_mut(usize::from(number)).and_then(Option::as_deref_mut)
                && client.to_client.take_notified()
                && client.memory.sleep().claim_wakeup()
            {
                client.wake.signal();
            }
        }
    }

    /// Returns the clients whose notifications this turn processes: those that have notified, and those of
    /// which earlier turns left some. They are to be returned to [`end_turn`](Self::end_turn).
    #[inline]
    pub fn begin_turn(&mut self, region: &Region) -> Vec<u16> {
        let mut turn = core::mem::take(&mut self.notified);
        if !self.unfinished.is_empty() {
            turn.append(&mut self.unfinished);
            for number in &turn {
                if let Some(client) =
                    self.clients.get_mut(usize::from(*number)).and_then(Option::as_deref_mut)
                {
                    client.is_unfinished = false;
                }
            }
        }
        region.notified().take(self.clients.len(), &mut turn);
        turn
    }

    /// Takes back the list of [`begin_turn`](Self::begin_turn), whose memory is used again.
    #[inline]
    pub fn end_turn(&mut self, mut turn: Vec<u16>) {
        turn.clear();
        self.notified = turn;
    }

    /// Records that notifications of a client remain for the next turn.
    pub fn add_unfinished(&mut self, number: usize) {
        if let Some(client) = self.clients.get_mut(number).and_then(Option::as_deref_mut)
            && !core::mem::replace(&mut client.is_unfinished, true)
        {
            self.unfinished.push(number as u16);
        }
    }

    /// Returns whether notifications of a client remain for the next turn.
    pub fn has_unfinished(&self) -> bool {
        !self.unfinished.is_empty()
    }

    /// Records that a client has notified.
    #[inline]
    pub fn activate(&mut self, number: usize) {
        if let Some(client) = self.clients.get_mut(number).and_then(Option::as_deref_mut)
            && !client.is_active
        {
            client.is_active = true;
            self.active.push(number as u16);
        }
    }

    /// Returns whether no client has notified. Called after the stack declared that it is about to sleep.
    #[inline]
    pub fn is_quiet_before_sleep(&self, region: &Region) -> bool {
        region.notified().is_empty_before_sleep(self.clients.len())
    }

    /// Returns whether an active client runs on `cpu`.
    pub fn has_client_running_on(&self, cpu: usize) -> bool {
        self.active.iter().filter_map(|number| self.get(usize::from(*number))).any(|client| {
            !client.is_idle && client.memory.cpu() == Some(cpu) && !client.memory.sleep().is_asleep()
        })
    }

    /// Yields `cpu` to the active clients that run on it. Returns whether there are any, or `None` if the
    /// shard has work itself.
    pub fn yield_cpu(&mut self, region: &Region, cpu: usize) -> Option<bool> {
        let count = self.clients.len();
        let mut index = 0;
        while let Some(number) = self.active.get(index).copied() {
            let Some(client) = self.clients[usize::from(number)].as_deref_mut() else {
                self.active.swap_remove(index);
                continue;
            };
            // Whatever a client writes there, the shard yields to it only while it appears to be active.
            if client.memory.sleep().is_asleep() {
                client.is_idle = false;
                client.is_active = false;
                self.active.swap_remove(index);
                continue;
            }
            index += 1;
            if client.is_idle || client.memory.cpu() != Some(cpu) {
                continue;
            }
            let is_notified = || !region.notified().is_empty_before_sleep(count);
            match try_yield(client.memory.has_cpu(), client.memory.sleep(), is_notified) {
                YieldOutcome::Yielded => {
                    let notified = client.from_client.notified_count(client.memory.to_stack());
                    client.notified_at_yield = Some(notified);
                    self.yielded.push(number);
                }
                YieldOutcome::Declined => {}
                YieldOutcome::Notified => return None,
            }
        }
        Some(!self.yielded.is_empty())
    }

    /// Ends the yield to clients. Returns whether the shard had yielded to some. `has_expired`: the yield
    /// lasted for its full time, and nobody woke the shard.
    pub fn end_yield(&mut self, has_expired: bool) -> bool {
        let has_yielded = !self.yielded.is_empty();
        for number in self.yielded.drain(..) {
            let Some(client) = self.clients[usize::from(number)].as_deref_mut() else { continue };
            client.memory.has_cpu().store(0, Ordering::Relaxed);
            if let Some(notified) = client.notified_at_yield.take() {
                let now = client.from_client.notified_count(client.memory.to_stack());
                client.is_idle = has_expired && notified == now;
            }
        }
        has_yielded
    }

    /// Records that a client has an outstanding offer.
    #[inline]
    pub fn add_offering(&mut self, number: usize) {
        if let Some(client) = self.clients.get_mut(number).and_then(Option::as_deref_mut)
            && !client.is_offering
        {
            client.is_offering = true;
            self.offering.push(number as u16);
        }
    }

    /// Forgets clients that have no outstanding offer any more, and returns those that have.
    pub fn offering(&mut self) -> Vec<u16> {
        let clients = &mut self.clients;
        self.offering.retain(|number| {
            let client = clients[usize::from(*number)].as_deref_mut();
            client.is_some_and(|client| {
                client.is_offering = client.outstanding() > 0;
                client.is_offering
            })
        });
        self.offering.clone()
    }
}
