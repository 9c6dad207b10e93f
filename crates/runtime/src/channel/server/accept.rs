//! Listeners, and connections that are offered to clients (docs/adr/0013-accept-credits.md).

use super::client_state::{ClientState, PendingOffer};
use super::domain::{Domain, DomainListener, iter_set_bits};
use crate::channel::control::AddressSharing;
use crate::channel::doorbells::NOTIFIED;
use crate::channel::offer_slots::{self, RevokeOutcome};
use crate::channel::region::{FALLBACK_CREDIT, OFFERS_MAX};
use crate::channel::sync::Ordering;
use crate::context::Context;
use crate::error::Error;
use core::net::SocketAddr;
use ginnel_stack::error::{ListenError, Stale};
use ginnel_stack::options::{ListenOptions, SocketOptions};
use std::collections::VecDeque;

impl Domain {
    /// Makes a client the owner of the connection that it accepted in a slot.
    pub(super) fn complete_accept(&mut self, cx: &mut Context<'_>, number: usize, slot: usize) {
        let Some(client) = &mut self.clients[number] else { return };
        let Some(PendingOffer { listener, socket, .. }) = client.offer(slot) else { return };
        if !offer_slots::clear_accepted(&self.region.offers(number)[slot], listener, socket) {
            return;
        }
        client.clear_offer(slot);
        if let Some(listening) = &mut self.listeners[usize::from(listener)] {
            listening.set_unaccepted(cx, listening.unaccepted.saturating_sub(1));
        }
        let entry = self.socket(socket);
        entry.offer = None;
        entry.owners |= 1 << number;
        self.stats.accepted += 1;
        // Reports whatever happened since the connection was offered.
        self.notify_owners(socket);
    }

    /// Revokes an offer. Returns false if the client had accepted it.
    pub(super) fn revoke_offer(&mut self, number: usize, slot: usize) -> bool {
        let Some(client) = &mut self.clients[number] else { return false };
        let Some(PendingOffer { listener, socket, .. }) = client.offer(slot) else { return false };
        match offer_slots::revoke(&self.region.offers(number)[slot], listener, socket) {
            RevokeOutcome::Taken => return false,
            // The connection goes to other clients.
            RevokeOutcome::Overwritten => self.stats.violations += 1,
            RevokeOutcome::Revoked => {}
        }
        client.clear_offer(slot);
        let entry = &mut self.sockets[socket as usize];
        entry.offer = None;
        let listening = self.listeners[usize::from(listener)].as_mut();
        entry.is_pending = listening.is_some();
        if let Some(listening) = listening {
            listening.pending.push_front(socket);
            self.pending_listeners |= 1 << listener;
        }
        true
    }

    /// Returns whether a client would accept another connection of a listener.
    pub(super) fn has_credit(&self, number: usize, listener: usize) -> bool {
        let (Some(client), Some(listening)) = (&self.clients[number], &self.listeners[listener]) else {
            return false;
        };
        if client.is_suspended || listening.owners & 1 << number == 0 {
            return false;
        }
        let credits = self.region.credits(number)[listener].load(Ordering::Acquire);
        client.outstanding_of(listener) < ((credits & !FALLBACK_CREDIT) as usize).min(OFFERS_MAX)
    }

    /// Returns whether a client's credits are fallback credits: it prefers to serve another shard.
    fn is_fallback(&self, number: usize, listener: usize) -> bool {
        self.region.credits(number)[listener].load(Ordering::Relaxed) & FALLBACK_CREDIT != 0
    }

    /// Offers pending connections to clients that have credit. Clients with ordinary credits come before
    /// clients with fallback credits, then the client with the fewest outstanding offers, then clients in
    /// turn.
    pub(super) fn distribute(&mut self, cx: &mut Context<'_>) {
        for listener in iter_set_bits(self.pending_listeners) {
            loop {
                let Some(listening) = self.listeners[listener].as_ref().filter(|l| !l.pending.is_empty())
                else {
                    self.pending_listeners &= !(1 << listener);
                    break;
                };
                let outstanding = |n: &usize| self.clients[*n].as_ref().map_or(0, ClientState::outstanding);
                // Clients after the one that got the last offer come first.
                let owners = self.client_mask & listening.owners;
                let first = owners & !(u64::MAX >> (63 - self.distributed_to));
                let in_turn = iter_set_bits(first).chain(iter_set_bits(owners & !first));
                let mut able = in_turn.filter(|n| self.has_credit(*n, listener));
                let rank = |n: &usize| (self.is_fallback(*n, listener), outstanding(n));
                // Usually one client accepts, and there is nothing to compare.
                let chosen = if owners.is_power_of_two() { able.next() } else { able.min_by_key(rank) };
                let Some(number) = chosen else { break };
                if !self.offer_to(cx, listener, number) {
                    break;
                }
                self.distributed_to = number;
            }
        }
    }

    /// Offers the oldest pending connection of a listener to a client. Returns false if there is none, or no
    /// free offer slot.
    pub(super) fn offer_to(&mut self, cx: &mut Context<'_>, listener: usize, number: usize) -> bool {
        let (Some(listening), Some(client)) = (&mut self.listeners[listener], &mut self.clients[number])
        else {
            return false;
        };
        let Some(&socket) = listening.pending.front() else { return false };
        let until = cx.now() + self.offer_timeout;
        let listener = listener as u16;
        let Some(slot) = client.add_offer(PendingOffer { listener, socket, deadline: until }) else {
            return false;
        };
        listening.pending.pop_front();
        self.region.socket(socket).offer_slot.store(slot as u32, Ordering::Relaxed);
        let entry = &mut self.sockets[socket as usize];
        entry.is_pending = false;
        entry.offer = Some((number as u8, slot as u8));
        offer_slots::offer(&self.region.offers(number)[slot], listener, socket);
        client.to_client.notify(self.region.to_client(number), socket, NOTIFIED);
        if !self.is_offer_timer_set {
            self.is_offer_timer_set = cx.set_timer(self.offer_timeout, self.token()).is_some();
        }
        self.accept_more(cx);
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
            let shared = self.listeners.iter_mut().zip(0..).find_map(|(listening, number)| {
                let listening =
                    listening.as_mut().filter(|l| l.address == at && l.owners & 1 << client == 0)?;
                listening.owners |= 1 << client;
                Some(number)
            });
            if let Some(number) = shared {
                return Ok(number);
            }
        }
        let Some(number) = self.listeners.iter().position(Option::is_none) else {
            self.stats.listeners_refused += 1;
            return Err(Error::Listen(at, ListenError::TooMany));
        };
        let backlog = options.backlog.min(self.backlog_max as u32);
        let options = ListenOptions { backlog, ..options };
        let ListenOptions { reuse_port, user, v6_only, .. } = options;
        let has_small_recv_buffer = self.is_small_recv_buffer(options.socket.recv_buffer_bytes);
        let listener = if exclusive { cx.listen_exclusive(at, options) } else { cx.listen(at, options) }?;
        self.listeners[number] = Some(DomainListener {
            listener,
            address: at,
            sharing: AddressSharing { reuse_address: false, reuse_port, uid: user, v6only: v6_only },
            owners: 1 << client,
            proxies: 0,
            pending: VecDeque::new(),
            unaccepted: 0,
            backlog: backlog.max(1) as usize,
            requested_backlog: backlog,
            has_small_recv_buffer,
        });
        for client in 0..self.clients.len() {
            // Clears the credits for a listener that had this number before.
            self.region.credits(client)[number].store(0, Ordering::Relaxed);
        }
        // Another shard may have listened first, and connections may have arrived since.
        self.is_accept_stalled = true;
        self.accept_more(cx);
        Ok(number as u32)
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
        self.accept_more(cx);
        self.distribute(cx);
    }

    /// Sets the options with which later connections of a listener begin.
    pub(super) fn set_listener_options(
        &mut self,
        cx: &mut Context<'_>,
        number: u32,
        options: &SocketOptions,
    ) {
        let has_small_recv_buffer = self.is_small_recv_buffer(options.recv_buffer_bytes);
        if let Some(Some(listening)) = self.listeners.get_mut(number as usize) {
            listening.has_small_recv_buffer = has_small_recv_buffer;
            if cx.set_listener_options(listening.listener, options).is_err() {
                self.stats.options_refused += 1;
            }
        }
    }

    /// Adds a client to the owners of a listener.
    pub(super) fn join(&mut self, client: usize, number: u32) -> Result<(), Stale> {
        let listening = self.listeners.get_mut(number as usize).and_then(Option::as_mut);
        listening.ok_or(Stale::Handle)?.owners |= 1 << client;
        Ok(())
    }

    /// Removes a client from the owners of a listener.
    pub(super) fn unlisten(&mut self, cx: &mut Context<'_>, client: usize, number: u32) {
        let Some(Some(listening)) = self.listeners.get_mut(number as usize) else { return };
        let was_owner = listening.owners & 1 << client != 0;
        listening.owners &= !(1 << client);
        if was_owner {
            self.close_listener_if_unowned(cx, number);
        }
    }

    /// Closes a listener if it has no owner any more.
    pub(super) fn close_listener_if_unowned(&mut self, cx: &mut Context<'_>, number: u32) {
        let Some(slot) = self.listeners.get_mut(number as usize) else { return };
        let Some(listening) = slot.take_if(|l| l.owners == 0 && l.proxies == 0) else { return };
        // Only a stale handle can be refused.
        let _ = cx.unlisten(listening.listener);
        let mut orphans: Vec<u32> = listening.pending.into();
        self.drain_deferred(number as usize, &mut orphans);
        for client in 0..self.clients.len() {
            for slot in 0..OFFERS_MAX {
                let offer = self.clients[client].as_ref().and_then(|c| c.offer(slot));
                if let Some(offer) = offer.filter(|o| u32::from(o.listener) == number)
                    && self.revoke_offer(client, slot)
                {
                    orphans.push(offer.socket);
                }
            }
        }
        for socket in orphans {
            self.socket(socket).is_pending = false;
            if let Some(conn) = self.socket(socket).conn {
                let _ = cx.abort(conn);
            }
            self.close_if_unowned(cx, socket);
        }
    }

    /// Revokes offers that were not accepted in time, if another client has credit.
    pub(super) fn revoke_expired_offers(&mut self, cx: &mut Context<'_>) {
        self.is_offer_timer_set = false;
        let now = cx.now();
        let mut next = None;
        for number in 0..self.clients.len() {
            for slot in 0..OFFERS_MAX {
                self.complete_accept(cx, number, slot);
                let Some(client) = &self.clients[number] else { break };
                let Some(offer) = client.offer(slot) else { continue };
                let others = (0..self.clients.len()).filter(|other| *other != number);
                let mut others = others.filter(|other| self.has_credit(*other, offer.listener.into()));
                if now >= offer.deadline && others.next().is_some() && self.revoke_offer(number, slot) {
                    self.stats.offers_revoked += 1;
                    if let Some(client) = &mut self.clients[number] {
                        client.is_suspended = true;
                        self.region.offers_suspended(number).store(1, Ordering::Release);
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
}
