//! Who holds what: clients that come, multiply and go, and descriptors between them (docs/adr/0012-holders-and-placeholders.md).

use super::domain::Domain;
use super::served::Served;
use super::wake::Wake;
use crate::channel::control::Thing;
use crate::channel::lock;
use crate::channel::region::{LISTENERS_MAX, OFFERS_MAX};
use crate::context::Context;

impl Domain {
    /// A new client: its number. `None`: there are as many as there may be.
    pub(super) fn admit(&mut self, wake: Wake) -> Option<usize> {
        let Some(number) = self.clients.iter().position(Option::is_none) else {
            self.stats.clients_refused += 1;
            return None;
        };
        self.region.clear_client(number);
        self.clients[number] = Some(Served::new(&self.region, number, wake));
        self.members |= 1 << number;
        Some(number)
    }

    /// A client is about to become two, or to start another program: a number for the new one, which holds from now on what the first holds, of
    /// that only `kept` if it says so.
    pub(super) fn fork(
        &mut self,
        cx: &mut Context<'_>,
        parent: usize,
        kept: Option<&[Thing]>,
        wake: Wake,
    ) -> Option<usize> {
        self.catch_up(cx, parent);
        let child = self.admit(wake)?;
        let (parent, child) = (1 << parent, 1 << child);
        match kept {
            None => {
                for listening in self.listeners.iter_mut().flatten().filter(|l| l.holders & parent != 0) {
                    listening.holders |= child;
                }
                for known in self.used().iter_mut().filter(|known| known.holders & parent != 0) {
                    known.holders |= child;
                }
            }
            Some(kept) => {
                for thing in kept {
                    if let Some((holders, _)) = self.holders(*thing)
                        && *holders & parent != 0
                    {
                        *holders |= child;
                    }
                }
            }
        }
        Some(child.trailing_zeros() as usize)
    }

    /// What a client did before it asked is in its ring and in its places for offers.
    fn catch_up(&mut self, cx: &mut Context<'_>, number: usize) {
        self.answer_bells(cx, number, usize::MAX);
        (0..OFFERS_MAX).for_each(|place| self.settle(cx, number, place));
    }

    /// The clients that hold a thing, and how many descriptors between them do. `None` if there is no such thing any more.
    fn holders(&mut self, thing: Thing) -> Option<(&mut u64, &mut u32)> {
        match thing {
            Thing::Socket { socket, generation } => {
                let known = self.sockets.get_mut(socket as usize)?;
                let lives = known.in_use && known.generation == generation;
                lives.then_some((&mut known.holders, &mut known.placeholders))
            }
            Thing::Listener(number) => {
                let listening = self.listeners.get_mut(number as usize)?.as_mut()?;
                Some((&mut listening.holders, &mut listening.placeholders))
            }
        }
    }

    /// A descriptor holds these things, all of which the client holds, from now on. False, and nothing has changed, if it does not.
    pub(super) fn hold_by_placeholder(
        &mut self,
        cx: &mut Context<'_>,
        client: usize,
        things: &[Thing],
    ) -> bool {
        self.catch_up(cx, client);
        let held =
            things.iter().all(|thing| self.holders(*thing).is_some_and(|(h, _)| *h & 1 << client != 0));
        if held {
            for thing in things {
                if let Some((_, placeholders)) = self.holders(*thing) {
                    *placeholders += 1;
                }
            }
        }
        held
    }

    /// A client got such a descriptor: it holds what that holds.
    pub(super) fn hold_as_placeholder_does(
        &mut self,
        cx: &mut Context<'_>,
        client: usize,
        things: &[Thing],
    ) -> bool {
        // It may have let go of one before it got this one.
        self.catch_up(cx, client);
        let held = things.iter().all(|thing| self.holders(*thing).is_some_and(|(_, p)| *p > 0));
        if held && self.clients.get(client).is_some_and(Option::is_some) {
            for thing in things {
                if let Some((holders, _)) = self.holders(*thing) {
                    *holders |= 1 << client;
                }
            }
            return true;
        }
        false
    }

    /// The last copy of such a descriptor is gone.
    pub(super) fn let_go(&mut self, cx: &mut Context<'_>, things: &[Thing]) {
        for thing in things {
            let Some((_, placeholders)) = self.holders(*thing) else { continue };
            *placeholders = placeholders.saturating_sub(1);
            match thing {
                Thing::Socket { socket, .. } => self.unheld(cx, *socket),
                Thing::Listener(number) => self.unheld_listener(cx, *number),
            }
        }
    }

    /// Forgets a client. What it alone held is closed, and what it had locked is open.
    pub(super) fn detach(&mut self, cx: &mut Context<'_>, number: usize) {
        if self.clients.get(number).is_none_or(Option::is_none) {
            return;
        }
        // A bell of its last moment may say that it took a connection, or let go of one.
        self.catch_up(cx, number);
        for place in 0..OFFERS_MAX {
            self.revoke(number, place);
        }
        for listener in 0..LISTENERS_MAX {
            self.unlisten(cx, number, listener as u32);
        }
        self.take_up_all(cx, number);
        self.clients[number] = None;
        self.members &= !(1 << number);
        for socket in 0..self.used().len() as u32 {
            if !self.socket(socket).in_use {
                continue;
            }
            // Also of a socket that it has let go of, in another thread.
            lock::open_for_dead(&self.region.socket(socket).lock, number);
            let known = self.socket(socket);
            if known.holders & 1 << number == 0 {
                continue;
            }
            known.holders &= !(1 << number);
            // It may have written and not rung.
            self.go_on(cx, socket);
            self.unheld(cx, socket);
        }
        self.deal(cx);
    }
}
