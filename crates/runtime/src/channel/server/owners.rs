//! Ownership: clients that attach, fork and detach, and proxy descriptors
//! (docs/adr/0012-owners-and-proxy-descriptors.md).

use super::client_state::ClientState;
use super::domain::Domain;
use super::waker::ClientWaker;
use crate::channel::control::SocketId;
use crate::channel::lock;
use crate::channel::region::{LISTENERS_MAX, OFFERS_MAX};
use crate::context::Context;

impl Domain {
    /// Admits a client and returns its number, or `None` if all numbers are in use.
    pub(super) fn admit(&mut self, wake: ClientWaker) -> Option<usize> {
        let Some(number) = self.clients.iter().position(Option::is_none) else {
            self.stats.clients_refused += 1;
            return None;
        };
        self.region.clear_client(number);
        self.clients[number] = Some(ClientState::new(&self.region, number, wake));
        self.client_mask |= 1 << number;
        Some(number)
    }

    /// Admits the client of a child process or of a program to be executed. The client owns what the parent
    /// owns, or those sockets in `inherited` that the parent owns. Returns the client's number, or `None` if
    /// all numbers are in use.
    pub(super) fn fork(
        &mut self,
        cx: &mut Context<'_>,
        parent: usize,
        inherited: Option<&[SocketId]>,
        wake: ClientWaker,
    ) -> Option<usize> {
        self.drain_client(cx, parent);
        let child = self.admit(wake)?;
        let (parent, child) = (1 << parent, 1 << child);
        match inherited {
            None => {
                for listening in self.listeners.iter_mut().flatten().filter(|l| l.owners & parent != 0) {
                    listening.owners |= child;
                }
                for entry in self.used_sockets().iter_mut().filter(|entry| entry.owners & parent != 0) {
                    entry.owners |= child;
                }
            }
            Some(inherited) => {
                for id in inherited {
                    if let Some((owners, _)) = self.owners_of(*id)
                        && *owners & parent != 0
                    {
                        *owners |= child;
                    }
                }
            }
        }
        Some(child.trailing_zeros() as usize)
    }

    /// Processes what a client did before it sent a request: its notifications and accepted offers.
    fn drain_client(&mut self, cx: &mut Context<'_>, number: usize) {
        self.handle_doorbells(cx, number, usize::MAX);
        (0..OFFERS_MAX).for_each(|slot| self.complete_accept(cx, number, slot));
    }

    /// Returns the mask of clients that own a socket and the number of proxy descriptors that own it, or
    /// `None` if the socket does not exist any more.
    fn owners_of(&mut self, id: SocketId) -> Option<(&mut u64, &mut u32)> {
        match id {
            SocketId::Socket { socket, generation } => {
                let entry = self.sockets.get_mut(socket as usize)?;
                let is_alive = entry.is_in_use && entry.generation == generation;
                is_alive.then_some((&mut entry.owners, &mut entry.proxies))
            }
            SocketId::Listener(number) => {
                let listening = self.listeners.get_mut(number as usize)?.as_mut()?;
                Some((&mut listening.owners, &mut listening.proxies))
            }
        }
    }

    /// Makes a proxy descriptor an owner of these sockets. Returns false, and changes nothing, if the client
    /// does not own all of them.
    pub(super) fn add_proxy(&mut self, cx: &mut Context<'_>, client: usize, ids: &[SocketId]) -> bool {
        self.drain_client(cx, client);
        let owns_all =
            ids.iter().all(|id| self.owners_of(*id).is_some_and(|(owners, _)| *owners & 1 << client != 0));
        if owns_all {
            for id in ids {
                if let Some((_, proxies)) = self.owners_of(*id) {
                    *proxies += 1;
                }
            }
        }
        owns_all
    }

    /// Makes a client that received a proxy descriptor an owner of the descriptor's sockets. Returns false,
    /// and changes nothing, if a proxy descriptor does not own all of them.
    pub(super) fn own_via_proxy(&mut self, cx: &mut Context<'_>, client: usize, ids: &[SocketId]) -> bool {
        // The client may have released one of the sockets before it received the descriptor.
        self.drain_client(cx, client);
        let owns_all = ids.iter().all(|id| self.owners_of(*id).is_some_and(|(_, p)| *p > 0));
        if owns_all && self.clients.get(client).is_some_and(Option::is_some) {
            for id in ids {
                if let Some((owners, _)) = self.owners_of(*id) {
                    *owners |= 1 << client;
                }
            }
            return true;
        }
        false
    }

    /// Removes a proxy descriptor, whose last copy is gone, from the owners of its sockets.
    pub(super) fn release_proxy(&mut self, cx: &mut Context<'_>, ids: &[SocketId]) {
        for id in ids {
            let Some((_, proxies)) = self.owners_of(*id) else { continue };
            *proxies = proxies.saturating_sub(1);
            match id {
                SocketId::Socket { socket, .. } => self.close_if_unowned(cx, *socket),
                SocketId::Listener(number) => self.close_listener_if_unowned(cx, *number),
            }
        }
    }

    /// Removes a client. What it alone owned is closed, and the locks that it held are released.
    pub(super) fn detach(&mut self, cx: &mut Context<'_>, number: usize) {
        if self.clients.get(number).is_none_or(Option::is_none) {
            return;
        }
        // A notification of its last moment may say that it accepted or released a connection.
        self.drain_client(cx, number);
        for slot in 0..OFFERS_MAX {
            self.revoke_offer(number, slot);
        }
        for listener in 0..LISTENERS_MAX {
            self.unlisten(cx, number, listener as u32);
        }
        self.free_preallocated(cx, number);
        self.clients[number] = None;
        self.client_mask &= !(1 << number);
        for socket in 0..self.used_sockets().len() as u32 {
            if !self.socket(socket).is_in_use {
                continue;
            }
            // Also for a socket that another thread of the client has released.
            lock::unlock_for_dead(&self.region.socket(socket).lock, number);
            let entry = self.socket(socket);
            if entry.owners & 1 << number == 0 {
                continue;
            }
            entry.owners &= !(1 << number);
            // The client may have written without a notification.
            self.process_socket(cx, socket);
            self.close_if_unowned(cx, socket);
        }
        self.distribute(cx);
    }
}
