//! Listeners, and connections that are offered to clients (docs/adr/0013-accept-credits.md).

use super::client_state::PendingOffer;
use super::client_table::ClientTable;
use super::credit_queue::{ChosenClient, Credit, CreditQueue};
use super::domain::{ClientSlot, Domain, DomainListener};
use super::owner_set::OwnerSet;
use crate::channel::client_memory::{FALLBACK_CREDIT, OFFERS_MAX};
use crate::channel::control::AddressSharing;
use crate::channel::data_class;
use crate::channel::offer_slots::{self, RevokeOutcome};
use crate::channel::region::Direction;
use crate::channel::sync::Ordering;
use crate::context::Context;
use crate::error::Error;
use core::net::SocketAddr;
use ginnel_stack::error::{ListenError, Stale};
use ginnel_stack::options::{ListenOptions, SocketOptions};
use ginnel_stack::priority::{BEST_EFFORT, ClassedQueue, QueueClass};
use ginnel_stack::time::Instant;

/// Returns the options of a client's listener as the engine has them.
fn listener_options(options: &SocketOptions) -> SocketOptions {
    SocketOptions { port_sharing: options.port_sharing.of_listener(), ..*options }
}

impl Domain {
    /// Makes a client the owner of the connection that it accepted in a slot.
    pub(super) fn complete_accept(&mut self, cx: &mut Context<'_>, number: usize, slot: usize) {
        let Some(client) = self.clients.get_mut(number) else { return };
        let Some(PendingOffer { listener, socket, is_fallback, .. }) = client.offer(slot) else { return };
        if !offer_slots::clear_accepted(&client.memory.offers()[slot], listener, socket) {
            return;
        }
        self.stats.accepted_remote += u64::from(is_fallback);
        self.clear_offer(number, slot);
        if let Some(listening) = &mut self.listeners[usize::from(listener)] {
            listening.set_unaccepted(cx, listening.unaccepted.saturating_sub(1));
        }
        self.socket(socket).offer = None;
        self.add_owner(socket, number);
        self.stats.accepted += 1;
        // Reports whatever happened since the connection was offered.
        if self.event_class().is_some() {
            self.with_data_class(socket, |domain| domain.notify_owners(socket));
        } else {
            self.notify_owners(socket);
        }
    }

    /// Revokes an offer. Returns false if the client had accepted it.
    pub(super) fn revoke_offer(&mut self, number: usize, slot: usize) -> bool {
        let Some(client) = self.clients.get_mut(number) else { return false };
        let Some(PendingOffer { listener, socket, .. }) = client.offer(slot) else { return false };
        match offer_slots::revoke(&client.memory.offers()[slot], listener, socket) {
            RevokeOutcome::Taken => return false,
            // The connection goes to other clients.
            RevokeOutcome::Overwritten => self.stats.violations += 1,
            RevokeOutcome::Revoked => {}
        }
        self.clear_offer(number, slot);
        let entry = &mut self.sockets[socket as usize];
        entry.offer = None;
        let listening = self.listeners[usize::from(listener)].as_mut();
        entry.is_pending = listening.is_some();
        let class = self.pending_class(socket);
        if let Some(Some(listening)) = self.listeners.get_mut(usize::from(listener)) {
            listening.pending.push_front(socket, class);
            self.set_distributable(listener.into());
        }
        true
    }

    /// Adds a connection to those of a listener that can be offered.
    pub(super) fn push_pending(&mut self, number: usize, socket: u32) {
        let class = self.pending_class(socket);
        if let Some(Some(listening)) = self.listeners.get_mut(number) {
            listening.pending.push_back(socket, class);
        }
    }

    /// Makes a pending connection that has received bytes of this class precede those of lower classes.
    #[cold]
    pub(super) fn raise_pending(&mut self, socket: u32, class: u8) {
        let number = usize::from(self.sockets[socket as usize].listener);
        let class = QueueClass { class, lower_share_percent: self.region.lower_share_percent().unwrap_or(0) };
        if class.class > BEST_EFFORT
            && let Some(Some(listening)) = self.listeners.get_mut(number)
        {
            listening.pending.raise(socket, class);
        }
    }

    /// Returns the class of a connection that is pending: that of its unread bytes or, without any, that of
    /// the event that established it. `None` without `[priority]`.
    #[inline]
    pub(super) fn pending_class(&self, socket: u32) -> Option<QueueClass> {
        self.event_class().map(|_| self.pending_class_by_data(socket))
    }

    #[cold]
    fn pending_class_by_data(&self, socket: u32) -> QueueClass {
        let area = self.region.socket(socket);
        let class = data_class::of_unread(&area.data_class, area.positions(Direction::Incoming).read());
        QueueClass { class, lower_share_percent: self.region.lower_share_percent().unwrap_or(0) }
    }

    /// Frees an offer slot, with which the client may have credit again.
    fn clear_offer(&mut self, number: usize, slot: usize) {
        let Some(client) = self.clients.get_mut(number) else { return };
        let had_no_slot = client.outstanding() == OFFERS_MAX;
        let Some(offer) = client.clear_offer(slot) else { return };
        let listener = usize::from(offer.listener);
        if had_no_slot {
            self.enqueue_all_credits(number);
        } else if let Some(Some(listening)) = self.listeners.get(listener)
            && listening.credit_queue.contains(number)
        {
            // Usually it has more credit than it uses.
            self.set_distributable(listener);
        } else {
            self.enqueue_credit(number, listener);
        }
    }

    /// Puts a client into the queue of a listener if it has credit.
    pub(super) fn enqueue_credit(&mut self, number: usize, listener: usize) {
        let Some(listening) = self.listeners.get_mut(listener).and_then(Option::as_mut) else { return };
        let credit = credit(&self.clients, number, listener);
        listening.credit_queue.push(number, credit);
        self.set_distributable(listener);
    }

    /// Puts a client into the queues of all listeners for which it has credit.
    #[cold]
    pub(super) fn enqueue_all_credits(&mut self, number: usize) {
        let Some(client) = self.clients.get(number) else { return };
        for listener in client.owned_listeners.clone() {
            self.enqueue_credit(number, listener as usize);
        }
    }

    /// Offers pending connections to clients that have credit. Clients with ordinary credits come before
    /// clients with fallback credits, then clients with few outstanding offers, then clients in turn.
    pub(super) fn distribute(&mut self, cx: &mut Context<'_>) {
        while let Some(listener) = self.distributable.pop_front() {
            let listener = usize::from(listener);
            if let Some(Some(listening)) = self.listeners.get_mut(listener) {
                listening.is_distributable = false;
            }
            while let Some(Some(listening)) = self.listeners.get_mut(listener)
                && !listening.pending.is_empty()
            {
                let chosen = listening.credit_queue.pick(|client| credit(&self.clients, client, listener));
                let Some(chosen) = chosen else { break };
                if !self.offer_to(cx, listener, chosen) {
                    break;
                }
            }
        }
    }

    /// Offers the next pending connection of a listener to a client. Returns false if there is none, or no
    /// free offer slot. Inlined where connections are distributed, on the path of each connection.
    #[inline(always)]
    fn offer_to(&mut self, cx: &mut Context<'_>, listener: usize, chosen: ChosenClient) -> bool {
        let ChosenClient { client: number, is_fallback } = chosen;
        let (Some(listening), Some(client)) = (&mut self.listeners[listener], self.clients.get_mut(number))
        else {
            return false;
        };
        if client.outstanding() == OFFERS_MAX {
            return false;
        }
        let Some(socket) = listening.pending.pop() else { return false };
        let is_backlog_full = listening.is_backlog_full;
        let until = cx.now() + self.offer_timeout;
        // Cannot truncate: numbers of listeners have 16 bits.
        let offer = PendingOffer { listener: listener as u16, is_fallback, socket, deadline: until };
        let Some(slot) = client.add_offer(offer) else { return false };
        self.region.socket(socket).offer_slot.store(slot as u32, Ordering::Relaxed);
        let entry = &mut self.sockets[socket as usize];
        entry.is_pending = false;
        // Cannot truncate: client numbers have 16 bits, and there are 64 slots.
        entry.offer = Some(ClientSlot { client: number as u16, slot: slot as u8 });
        offer_slots::offer(&client.memory.offers()[slot], offer.listener, socket);
        self.clients.add_offering(number);
        if self.event_class().is_some() {
            self.with_data_class(socket, |domain| domain.clients.notify(number, socket));
        } else {
            self.clients.notify(number, socket);
        }
        if !self.is_offer_timer_set {
            self.is_offer_timer_set = cx.set_timer(self.offer_timeout, self.token()).is_some();
        }
        if is_backlog_full {
            self.accept_from(cx, listener);
        }
        true
    }

    /// Opens a listener for a client, or adds the client to the owners of a listener that can be shared.
    /// Returns the number of the listener.
    pub(super) fn listen(
        &mut self,
        cx: &mut Context<'_>,
        client: usize,
        at: SocketAddr,
        options: ListenOptions,
        exclusive: bool,
    ) -> Result<u32, Error> {
        if self.shares_listeners && !exclusive {
            let shared = self.listeners.iter().zip(0..).find_map(|(listening, number)| {
                let may_share =
                    |l: &&DomainListener| l.address == at && !l.is_destroyed && !l.owners.contains(client);
                listening.as_ref().filter(may_share).map(|_| number)
            });
            if let Some(number) = shared {
                self.add_listener_owner(number, client);
                return Ok(number);
            }
        }
        let Some(number) = self.listener_slots.peek() else {
            self.stats.listeners_refused += 1;
            return Err(Error::Listen(at, ListenError::TooMany));
        };
        let backlog = options.backlog.min(self.backlog_max as u32);
        let options = ListenOptions { backlog, socket: listener_options(&options.socket), ..options };
        let ListenOptions { reuse_port, user, v6_only, .. } = options;
        let report_unread_after = self.report_unread_after(options.socket.recv_buffer_bytes);
        let listener = if exclusive { cx.listen_exclusive(at, options) } else { cx.listen(at, options) }?;
        self.listener_slots.allocate();
        if let Some(description) = self.region.listener_description(number) {
            description.clear();
        }
        if number as usize >= self.listeners.len() {
            self.listeners.resize_with(number as usize + 1, || None);
        }
        self.listeners[number as usize] = Some(DomainListener {
            listener,
            address: at,
            sharing: AddressSharing { reuse_address: false, reuse_port, uid: user, v6only: v6_only },
            owners: OwnerSet::default(),
            proxies: 0,
            credit_queue: CreditQueue::default(),
            pending: ClassedQueue::default(),
            is_distributable: false,
            is_backlog_full: false,
            is_stalled: false,
            unaccepted: 0,
            backlog: backlog.max(1) as usize,
            requested_backlog: backlog,
            report_unread_after,
            is_destroyed: false,
            description: 0,
            filter_removed: false,
        });
        self.add_listener_owner(number, client);
        // Another shard may have listened first, and connections may have arrived since.
        self.accept_from(cx, number as usize);
        Ok(number)
    }

    /// Returns the listener that was opened for an open file description.
    pub(super) fn listener_of(&self, description: u64) -> Option<u32> {
        let serves =
            |l: &&DomainListener| description != 0 && l.description == description && !l.is_destroyed;
        let mut listeners = self.listeners.iter().zip(0..);
        listeners.find_map(|(listening, number)| listening.as_ref().filter(serves).map(|_| number))
    }

    /// Listens for an open file description, or makes the client an owner of the listener that another
    /// process has opened for it: `listen` of a socket that listens sets its backlog (`inet_listen`).
    pub(super) fn listen_shared(
        &mut self,
        cx: &mut Context<'_>,
        client: usize,
        at: SocketAddr,
        options: ListenOptions,
        description: u64,
    ) -> Result<u32, Error> {
        if let Some(number) = self.listener_of(description) {
            self.add_listener_owner(number, client);
            self.set_backlog(cx, number, options.backlog);
            return Ok(number);
        }
        let number = self.listen(cx, client, at, options, false)?;
        if let Some(Some(listening)) = self.listeners.get_mut(number as usize) {
            listening.description = description;
        }
        Ok(number)
    }

    /// Sets a listener's backlog, within the domain's limit. Pending connections are offered before the
    /// reply, so that a client that begins to accept finds them.
    pub(super) fn set_backlog(&mut self, cx: &mut Context<'_>, number: u32, backlog: u32) {
        let max = self.backlog_max;
        if let Some(Some(listening)) = self.listeners.get_mut(number as usize) {
            listening.backlog = (backlog.max(1) as usize).min(max);
            listening.requested_backlog = backlog.min(max as u32);
            listening.set_unaccepted(cx, listening.unaccepted);
        }
        self.accept_from(cx, number as usize);
        self.distribute(cx);
    }

    /// Sets the options with which later connections of a listener begin.
    pub(super) fn set_listener_options(
        &mut self,
        cx: &mut Context<'_>,
        number: u32,
        options: &SocketOptions,
    ) {
        let report_unread_after = self.report_unread_after(options.recv_buffer_bytes);
        if let Some(Some(listening)) = self.listeners.get_mut(number as usize) {
            listening.report_unread_after = report_unread_after;
            if cx.set_listener_options(listening.listener, &listener_options(options)).is_err() {
                self.stats.options_refused += 1;
            }
        }
    }

    /// Adds a client to the owners of a listener.
    pub(super) fn join(&mut self, client: usize, number: u32) -> Result<(), Stale> {
        self.listeners.get(number as usize).and_then(Option::as_ref).ok_or(Stale::Handle)?;
        self.add_listener_owner(number, client);
        Ok(())
    }

    /// Removes a client from the owners of a listener.
    pub(super) fn unlisten(&mut self, cx: &mut Context<'_>, client: usize, number: u32) {
        if self.remove_listener_owner(number, client) {
            self.close_listener_if_unowned(cx, number);
        }
    }

    /// Closes a listener if it has no owner any more.
    pub(super) fn close_listener_if_unowned(&mut self, cx: &mut Context<'_>, number: u32) {
        let Some(slot) = self.listeners.get_mut(number as usize) else { return };
        let Some(mut listening) = slot.take_if(|l| l.owners.is_empty() && l.proxies == 0) else { return };
        self.listener_slots.release(number);
        // Refused if the listener was destroyed.
        let _ = cx.unlisten(listening.listener);
        self.abandon_connections(cx, number, &mut listening);
        if listening.is_destroyed
            && let Some(description) = self.region.listener_description(number)
        {
            description.set_destroyed(false);
        }
    }

    /// Handles the end of a listener that an administrator has closed: its connections that were not accepted
    /// are reset, and its owners are told. They release it.
    pub(super) fn destroy_listener(&mut self, cx: &mut Context<'_>, number: u32) {
        let Some(mut listening) = self.listeners.get_mut(number as usize).and_then(Option::take) else {
            return;
        };
        listening.is_destroyed = true;
        self.abandon_connections(cx, number, &mut listening);
        if let Some(description) = self.region.listener_description(number) {
            description.set_destroyed(true);
        }
        self.region.destroyed_listeners().fetch_add(1, Ordering::AcqRel);
        for client in listening.owners.clients() {
            self.clients.notify_of_all(client);
        }
        self.listeners[number as usize] = Some(listening);
    }

    /// Gives connections of a listener that were not accepted to a listener that shares the address, or else
    /// resets them. The listener is not in the table meanwhile.
    fn abandon_connections(&mut self, cx: &mut Context<'_>, number: u32, listening: &mut DomainListener) {
        let sibling = self.sibling_of(listening);
        self.stalled_listeners.retain(|stalled| u32::from(*stalled) != number);
        listening.unaccepted = 0;
        let mut orphans = listening.pending.take_all();
        for client in self.clients.offering().into_iter().map(usize::from) {
            let slots = self.clients.get(client).map(|client| client.offer_slots());
            for slot in slots.into_iter().flatten() {
                let offer = self.clients.get(client).and_then(|client| client.offer(slot));
                if let Some(offer) = offer.filter(|offer| u32::from(offer.listener) == number)
                    && self.revoke_offer(client, slot)
                {
                    orphans.push(offer.socket);
                }
            }
        }
        for socket in orphans {
            if let Some(number) = sibling
                && let Some(Some(sibling)) = self.listeners.get_mut(number)
            {
                sibling.set_unaccepted(cx, sibling.unaccepted + 1);
                self.push_pending(number, socket);
                let entry = self.socket(socket);
                // Cannot truncate: listener numbers have 16 bits.
                (entry.is_pending, entry.listener) = (true, number as u16);
                continue;
            }
            self.socket(socket).is_pending = false;
            if let Some(conn) = self.socket(socket).conn {
                let _ = cx.abort(conn);
            }
            self.close_if_unowned(cx, socket);
        }
        if let Some(sibling) = sibling {
            self.set_distributable(sibling);
        }
    }

    /// Returns a listener that shares the address of a closed one (`SO_REUSEPORT`). It takes over the
    /// connections of the closed listener that were not accepted.
    fn sibling_of(&self, closed: &DomainListener) -> Option<usize> {
        let AddressSharing { reuse_port, uid, .. } = closed.sharing;
        let mut all = self.listeners.iter();
        all.position(|other| {
            other.as_ref().is_some_and(|other| {
                reuse_port
                    && !other.is_destroyed
                    && other.address == closed.address
                    && other.sharing.reuse_port
                    && other.sharing.uid == uid
            })
        })
    }

    /// Revokes offers that were not accepted in time, if another client has credit.
    pub(super) fn revoke_expired_offers(&mut self, cx: &mut Context<'_>) {
        self.is_offer_timer_set = false;
        let now = cx.now();
        let mut next = None;
        for number in self.clients.offering().into_iter().map(usize::from) {
            let slots = self.clients.get(number).map(|client| client.offer_slots());
            for slot in slots.into_iter().flatten() {
                self.complete_accept(cx, number, slot);
                let Some(offer) = self.clients.get(number).and_then(|client| client.offer(slot)) else {
                    continue;
                };
                let has_expired =
                    now >= offer.deadline && self.has_other_credit(offer.listener.into(), number);
                if has_expired && self.revoke_offer(number, slot) {
                    self.stats.offers_revoked += 1;
                    if let Some(client) = self.clients.get_mut(number) {
                        client.is_suspended = true;
                        if !client.revoked_listeners.contains(&offer.listener) {
                            client.revoked_listeners.push(offer.listener);
                        }
                        client.memory.offers_suspended().store(1, Ordering::Release);
                    }
                } else {
                    next = Some(self.offer_timeout);
                }
            }
        }
        self.distribute(cx);
        if let Some(delay) = next.filter(|_| !self.is_offer_timer_set) {
            self.is_offer_timer_set = cx.set_timer(delay, self.token()).is_some();
        }
    }

    /// Resumes offers to a client that asks for a connection. If none is pending, the client gets the
    /// connection that another client has not accepted for the longest time. Without this, a client that
    /// takes longer than `channel.offer_ms` to accept would never get a connection. The same holds for the
    /// other listeners of which offers were revoked: the client asks only once.
    #[cold]
    pub(super) fn claim_offer(&mut self, cx: &mut Context<'_>, number: usize, listener: usize) {
        let Some(client) = self.clients.get_mut(number) else { return };
        client.is_suspended = false;
        let revoked = core::mem::take(&mut client.revoked_listeners);
        for slot in client.offer_slots() {
            self.complete_accept(cx, number, slot);
        }
        self.enqueue_all_credits(number);
        self.distribute(cx);
        self.take_oldest_offer(cx, number, listener);
        for other in revoked.into_iter().map(usize::from).filter(|other| *other != listener) {
            self.take_oldest_offer(cx, number, other);
        }
    }

    /// Offers a client the connection of a listener that another client has not accepted for the longest
    /// time, if the client has credit and no offer.
    fn take_oldest_offer(&mut self, cx: &mut Context<'_>, number: usize, listener: usize) {
        if self.clients.get(number).is_none_or(|client| client.outstanding_of(listener) > 0) {
            return;
        }
        let is_fallback = match credit(&self.clients, number, listener) {
            Credit::None => return,
            credit => matches!(credit, Credit::Fallback(_)),
        };
        let mut offers: Vec<(Instant, usize, usize)> = Vec::new();
        for other in self.clients.offering().into_iter().map(usize::from) {
            let Some(client) = self.clients.get(other).filter(|_| other != number) else { continue };
            for slot in client.offer_slots() {
                if let Some(offer) = client.offer(slot).filter(|o| usize::from(o.listener) == listener) {
                    offers.push((offer.deadline, other, slot));
                }
            }
        }
        offers.sort_unstable();
        // The other client may have accepted an offer already.
        if offers.into_iter().any(|(_, other, slot)| self.revoke_offer(other, slot)) {
            self.stats.offers_revoked += 1;
            self.offer_to(cx, listener, ChosenClient { client: number, is_fallback });
        }
    }

    /// Returns whether a client other than `number` would accept a connection of a listener now.
    fn has_other_credit(&self, listener: usize, number: usize) -> bool {
        let Some(Some(listening)) = self.listeners.get(listener) else { return false };
        listening.credit_queue.has_other(number, |client| credit(&self.clients, client, listener))
    }
}

/// Returns the credit that a client has for another connection of a listener.
fn credit(clients: &ClientTable, number: usize, listener: usize) -> Credit {
    let Some(client) = clients.get(number) else { return Credit::None };
    // Cannot truncate: numbers of listeners have 16 bits.
    let Some(credits) = client.memory.credits(listener as u32) else { return Credit::None };
    let credits = credits.load(Ordering::Acquire);
    let outstanding = client.outstanding();
    let wanted = ((credits & !FALLBACK_CREDIT) as usize).min(OFFERS_MAX);
    if client.is_suspended
        || outstanding == OFFERS_MAX
        || client.outstanding_of(listener) >= wanted
        || !client.owns_listener(listener)
    {
        Credit::None
    } else if credits & FALLBACK_CREDIT != 0 {
        Credit::Fallback(outstanding)
    } else {
        Credit::Ordinary(outstanding)
    }
}
