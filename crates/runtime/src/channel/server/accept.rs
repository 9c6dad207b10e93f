//! Listeners, and connections that are offered to clients (docs/adr/0013-accept-credits.md).

use super::domain::{Domain, Listening, ones};
use super::served::{Offered, Served};
use crate::channel::bells::RUNG;
use crate::channel::control::Sharing;
use crate::channel::places::{self, Revoked};
use crate::channel::region::{OFFERS_MAX, SECOND_CHOICE};
use crate::channel::sync::Ordering;
use crate::context::Context;
use crate::error::Error;
use core::net::SocketAddr;
use ginnel_stack::error::{ListenError, Stale};
use ginnel_stack::options::{ListenOptions, SocketOptions};
use std::collections::VecDeque;

impl Domain {
    /// A connection that a client took is its own.
    pub(super) fn settle(&mut self, cx: &mut Context<'_>, number: usize, place: usize) {
        let Some(client) = &mut self.clients[number] else { return };
        let Some(Offered { listener, socket, .. }) = client.offered(place) else { return };
        if !places::settle(&self.region.offers(number)[place], listener, socket) {
            return;
        }
        client.clear(place);
        if let Some(listening) = &mut self.listeners[usize::from(listener)] {
            listening.keep(cx, listening.kept.saturating_sub(1));
        }
        let known = self.socket(socket);
        known.offered = None;
        known.holders |= 1 << number;
        self.stats.accepted += 1;
        // Whatever came since it was offered.
        self.ring(socket);
    }

    /// Takes an offer back; whether the client had not taken it.
    pub(super) fn revoke(&mut self, number: usize, place: usize) -> bool {
        let Some(client) = &mut self.clients[number] else { return false };
        let Some(Offered { listener, socket, .. }) = client.offered(place) else { return false };
        match places::revoke(&self.region.offers(number)[place], listener, socket) {
            Revoked::Taken => return false,
            // What it was offered goes to others.
            Revoked::Overwritten => self.stats.violations += 1,
            Revoked::Back => {}
        }
        client.clear(place);
        let known = &mut self.sockets[socket as usize];
        known.offered = None;
        let listening = self.listeners[usize::from(listener)].as_mut();
        known.waits = listening.is_some();
        if let Some(listening) = listening {
            listening.waiting.push_front(socket);
            self.queued |= 1 << listener;
        }
        true
    }

    /// Whether a client would take one more connection of a listener.
    pub(super) fn has_credit(&self, number: usize, listener: usize) -> bool {
        let (Some(client), Some(listening)) = (&self.clients[number], &self.listeners[listener]) else {
            return false;
        };
        if client.dozes || listening.holders & 1 << number == 0 {
            return false;
        }
        let credits = self.region.credits(number)[listener].load(Ordering::Acquire);
        client.out_of(listener) < ((credits & !SECOND_CHOICE) as usize).min(OFFERS_MAX)
    }

    /// Whether a client would rather serve another shard.
    fn is_second_choice(&self, number: usize, listener: usize) -> bool {
        self.region.credits(number)[listener].load(Ordering::Relaxed) & SECOND_CHOICE != 0
    }

    /// Offers what waits to those who have credit: those whose first choice this shard is before others, the one with the fewest offers first, and of several in turn.
    pub(super) fn deal(&mut self, cx: &mut Context<'_>) {
        for listener in ones(self.queued) {
            loop {
                let Some(listening) = self.listeners[listener].as_ref().filter(|l| !l.waiting.is_empty())
                else {
                    self.queued &= !(1 << listener);
                    break;
                };
                let out = |n: &usize| self.clients[*n].as_ref().map_or(0, Served::out);
                // Those behind the last that got one come first.
                let holders = self.members & listening.holders;
                let first = holders & !(u64::MAX >> (63 - self.dealt_to));
                let in_turn = ones(first).chain(ones(holders & !first));
                let mut able = in_turn.filter(|n| self.has_credit(*n, listener));
                let rank = |n: &usize| (self.is_second_choice(*n, listener), out(n));
                // Mostly there is one who accepts, and nobody to be compared with.
                let chosen = if holders.is_power_of_two() { able.next() } else { able.min_by_key(rank) };
                let Some(number) = chosen else { break };
                if !self.offer(cx, listener, number) {
                    break;
                }
                self.dealt_to = number;
            }
        }
    }

    pub(super) fn offer(&mut self, cx: &mut Context<'_>, listener: usize, number: usize) -> bool {
        let (Some(listening), Some(client)) = (&mut self.listeners[listener], &mut self.clients[number])
        else {
            return false;
        };
        let Some(&socket) = listening.waiting.front() else { return false };
        let until = cx.now() + self.offer_time;
        let listener = listener as u16;
        let Some(place) = client.put(Offered { listener, socket, until }) else { return false };
        listening.waiting.pop_front();
        self.region.socket(socket).offer_place.store(place as u32, Ordering::Relaxed);
        let known = &mut self.sockets[socket as usize];
        known.waits = false;
        known.offered = Some((number as u8, place as u8));
        places::offer(&self.region.offers(number)[place], listener, socket);
        client.down.ring(self.region.down(number), socket, RUNG);
        if !self.timer_runs {
            self.timer_runs = cx.set_timer(self.offer_time, self.token()).is_some();
        }
        self.take_more(cx);
        true
    }

    pub(super) fn listen(
        &mut self,
        cx: &mut Context<'_>,
        client: usize,
        at: SocketAddr,
        options: ListenOptions,
        alone: bool,
    ) -> Result<u32, Error> {
        if self.workers && !alone {
            let shared = self.listeners.iter_mut().zip(0..).find_map(|(listening, number)| {
                let listening = listening.as_mut().filter(|l| l.at == at && l.holders & 1 << client == 0)?;
                listening.holders |= 1 << client;
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
        let is_narrow = self.is_narrow(options.socket.recv_buffer_bytes);
        let listener = if alone { cx.listen_alone(at, options) } else { cx.listen(at, options) }?;
        self.listeners[number] = Some(Listening {
            listener,
            at,
            sharing: Sharing { reuse_address: false, reuse_port, user, v6_only },
            holders: 1 << client,
            placeholders: 0,
            waiting: VecDeque::new(),
            kept: 0,
            backlog: backlog.max(1) as usize,
            asked: backlog,
            is_narrow,
        });
        for client in 0..self.clients.len() {
            // Credit for a listener that had this number before.
            self.region.credits(client)[number].store(0, Ordering::Relaxed);
        }
        // Another shard may have listened first, and connections have come since.
        self.starved = true;
        self.take_more(cx);
        Ok(number as u32)
    }

    /// How many connections may wait from now on, within what the domain may have. Those that wait are offered before the answer, so that whoever
    /// begins to accept finds them.
    pub(super) fn set_backlog(&mut self, cx: &mut Context<'_>, number: u32, backlog: u32) {
        let most = self.backlog_max;
        if let Some(Some(listening)) = self.listeners.get_mut(number as usize) {
            listening.backlog = (backlog.max(1) as usize).min(most);
            listening.asked = backlog.min(most as u32);
            listening.keep(cx, listening.kept);
        }
        self.take_more(cx);
        self.deal(cx);
    }

    /// What connections of a listener begin with from now on.
    pub(super) fn amend(&mut self, cx: &mut Context<'_>, number: u32, options: &SocketOptions) {
        let is_narrow = self.is_narrow(options.recv_buffer_bytes);
        if let Some(Some(listening)) = self.listeners.get_mut(number as usize) {
            listening.is_narrow = is_narrow;
            if cx.set_listener_options(listening.listener, options).is_err() {
                self.stats.options_refused += 1;
            }
        }
    }

    pub(super) fn join(&mut self, client: usize, number: u32) -> Result<(), Stale> {
        let listening = self.listeners.get_mut(number as usize).and_then(Option::as_mut);
        listening.ok_or(Stale::Handle)?.holders |= 1 << client;
        Ok(())
    }

    /// A client holds a listener no more.
    pub(super) fn unlisten(&mut self, cx: &mut Context<'_>, client: usize, number: u32) {
        let Some(Some(listening)) = self.listeners.get_mut(number as usize) else { return };
        let held = listening.holders & 1 << client != 0;
        listening.holders &= !(1 << client);
        if held {
            self.unheld_listener(cx, number);
        }
    }

    /// A listener may have lost its last holder.
    pub(super) fn unheld_listener(&mut self, cx: &mut Context<'_>, number: u32) {
        let Some(slot) = self.listeners.get_mut(number as usize) else { return };
        let Some(listening) = slot.take_if(|l| l.holders == 0 && l.placeholders == 0) else { return };
        // Only a stale handle can be refused.
        let _ = cx.unlisten(listening.listener);
        let mut nobodys: Vec<u32> = listening.waiting.into();
        self.stop_deferring(number as usize, &mut nobodys);
        for client in 0..self.clients.len() {
            for place in 0..OFFERS_MAX {
                let offer = self.clients[client].as_ref().and_then(|c| c.offered(place));
                if let Some(offer) = offer.filter(|o| u32::from(o.listener) == number)
                    && self.revoke(client, place)
                {
                    nobodys.push(offer.socket);
                }
            }
        }
        for socket in nobodys {
            self.socket(socket).waits = false;
            if let Some(conn) = self.socket(socket).conn {
                let _ = cx.abort(conn);
            }
            self.unheld(cx, socket);
        }
    }

    /// Takes back what was offered and not taken in time, if somebody else would.
    pub(super) fn take_back(&mut self, cx: &mut Context<'_>) {
        self.timer_runs = false;
        let now = cx.now();
        let mut next = None;
        for number in 0..self.clients.len() {
            for place in 0..OFFERS_MAX {
                self.settle(cx, number, place);
                let Some(client) = &self.clients[number] else { break };
                let Some(offer) = client.offered(place) else { continue };
                let others = (0..self.clients.len()).filter(|other| *other != number);
                let mut others = others.filter(|other| self.has_credit(*other, offer.listener.into()));
                if now >= offer.until && others.next().is_some() && self.revoke(number, place) {
                    self.stats.offers_revoked += 1;
                    if let Some(client) = &mut self.clients[number] {
                        client.dozes = true;
                        self.region.dozes(number).store(1, Ordering::Release);
                    }
                } else {
                    next = Some(self.offer_time);
                }
            }
        }
        self.deal(cx);
        if let Some(after) = next.filter(|_| !self.timer_runs) {
            self.timer_runs = cx.set_timer(after, self.token()).is_some();
        }
    }
}
