//! Ownership: clients that attach, fork and detach, and proxy descriptors
//! (docs/adr/0012-owners-and-proxy-descriptors.md).

use super::domain::Domain;
use super::owner_set::OwnerSet;
use super::waker::ClientWaker;
use crate::channel::client_memory::{ClientMemory, OFFERS_MAX};
use crate::channel::control::{AdmittedClient, BrokerReply, SocketId};
use crate::channel::lock;
use crate::context::Context;
use crate::errno;
use rustix::io::Errno;

/// Why a client is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotAdmitted {
    /// All numbers of clients are in use: how many there may be.
    Full(u32),
    /// The kernel refused the stack's process a descriptor, memory or a mapping, with this error.
    NoResources(Errno),
}

impl From<Result<AdmittedClient, NotAdmitted>> for BrokerReply {
    fn from(admitted: Result<AdmittedClient, NotAdmitted>) -> Self {
        match admitted {
            Ok(client) => Self::Admitted(client),
            Err(NotAdmitted::Full(limit)) => Self::Full(limit),
            Err(NotAdmitted::NoResources(errno)) => Self::NoResources(errno),
        }
    }
}

impl Domain {
    /// Admits a client.
    ///
    /// # Errors
    /// Returns an error if the domain has as many clients as it may have, or the kernel is short of
    /// something.
    pub(super) fn admit(&mut self, wake: ClientWaker) -> Result<AdmittedClient, NotAdmitted> {
        // Cannot truncate: `channel.clients_max` is a `u32`.
        let full = NotAdmitted::Full(self.clients.max() as u32);
        if self.clients.count() == self.clients.max() {
            self.stats.clients_refused += 1;
            return Err(full);
        }
        let (memory, file) = ClientMemory::create(self.region.sockets(), self.region.listeners())
            .map_err(|e| NotAdmitted::NoResources(errno::of_io(&e)))?;
        let copy = match wake {
            ClientWaker::Thread(_) => None,
            ClientWaker::Process(_) => {
                let copy = file.try_clone();
                Some(copy.map_err(|e| NotAdmitted::NoResources(errno::of_io(&e)))?)
            }
        };
        let number = self.clients.insert(memory, wake).ok_or(full)?;
        if let Some(client) = self.clients.get_mut(number) {
            client.memory_file = copy;
        }
        // Cannot truncate: client numbers have 16 bits.
        Ok(AdmittedClient { number: number as u32, memory: file })
    }

    /// Admits the client of a child process or of a program to be executed. The client owns what the parent
    /// owns, or those sockets in `inherited` that the parent owns.
    ///
    /// # Errors
    /// As [`admit`](Self::admit).
    pub(super) fn fork(
        &mut self,
        cx: &mut Context<'_>,
        parent: usize,
        inherited: Option<&[SocketId]>,
        wake: ClientWaker,
    ) -> Result<AdmittedClient, NotAdmitted> {
        self.drain_client(cx, parent);
        let admitted = self.admit(wake)?;
        let child = admitted.number as usize;
        match inherited {
            None => {
                let Some(owner) = self.clients.get(parent) else { return Ok(admitted) };
                let (sockets, listeners) = (owner.owned_sockets.clone(), owner.owned_listeners.clone());
                listeners.into_iter().for_each(|listener| self.add_listener_owner(listener, child));
                sockets.into_iter().for_each(|socket| self.add_owner(socket, child));
            }
            Some(inherited) => {
                for id in inherited {
                    if self.owners_of(*id).is_some_and(|(owners, _)| owners.contains(parent)) {
                        self.add_owner_of(*id, child);
                    }
                }
            }
        }
        Ok(admitted)
    }

    /// Makes a client an owner of a socket.
    pub(super) fn add_owner(&mut self, socket: u32, client: usize) {
        if let Some(state) = self.clients.get_mut(client) {
            self.sockets[socket as usize].owners.insert(client, &mut state.owned_sockets, socket);
        }
    }

    /// Removes a client from the owners of a socket.
    pub(super) fn remove_owner(&mut self, socket: u32, client: usize) {
        let Some(position) = self.sockets[socket as usize].owners.remove(client) else { return };
        let Some(state) = self.clients.get_mut(client) else { return };
        state.owned_sockets.swap_remove(position);
        if let Some(moved) = state.owned_sockets.get(position) {
            self.sockets[*moved as usize].owners.set_position(client, position);
        }
    }

    /// Makes a client an owner of an existing listener, without credit.
    pub(super) fn add_listener_owner(&mut self, listener: u32, client: usize) {
        let listening = self.listeners.get_mut(listener as usize).and_then(Option::as_mut);
        if let (Some(listening), Some(state)) = (listening, self.clients.get_mut(client))
            && listening.owners.insert(client, &mut state.owned_listeners, listener)
        {
            state.set_owns_listener(listener as usize, true);
            // What it wrote for another listener that had this number is void.
            if let Some(credits) = state.memory.credits(listener) {
                credits.store(0, crate::channel::sync::Ordering::Relaxed);
            }
        }
    }

    /// Removes a client from the owners of a listener. Returns whether it was one.
    pub(super) fn remove_listener_owner(&mut self, listener: u32, client: usize) -> bool {
        let listening = self.listeners.get_mut(listener as usize).and_then(Option::as_mut);
        let Some(position) = listening.and_then(|listening| listening.owners.remove(client)) else {
            return false;
        };
        if let Some(state) = self.clients.get_mut(client) {
            state.set_owns_listener(listener as usize, false);
            state.owned_listeners.swap_remove(position);
            if let Some(moved) = state.owned_listeners.get(position)
                && let Some(Some(moved)) = self.listeners.get_mut(*moved as usize)
            {
                moved.owners.set_position(client, position);
            }
        }
        true
    }

    fn add_owner_of(&mut self, id: SocketId, client: usize) {
        match id {
            SocketId::Socket { socket, .. } => self.add_owner(socket, client),
            SocketId::Listener(listener) => self.add_listener_owner(listener, client),
        }
    }

    /// Remembers a socket that a client released while another thread of the client had the socket's lock: if
    /// the client dies before that thread releases the lock, other owners of the socket need it.
    pub(super) fn record_lock_at_release(&mut self, socket: u32, client: usize) {
        if !self.sockets[socket as usize].owners.is_empty()
            && lock::is_held_by(&self.region.socket(socket).lock, client)
            && let Some(state) = self.clients.get_mut(client)
        {
            state.locked_at_release.push(socket);
        }
    }

    /// Processes what a client did before it sent a request: its notifications and accepted offers.
    fn drain_client(&mut self, cx: &mut Context<'_>, number: usize) {
        self.handle_doorbells(cx, number, usize::MAX);
        (0..OFFERS_MAX).for_each(|slot| self.complete_accept(cx, number, slot));
    }

    /// Returns the clients that own a socket and the number of proxy descriptors that own it, or `None` if
    /// the socket does not exist any more.
    fn owners_of(&mut self, id: SocketId) -> Option<(&OwnerSet, &mut u32)> {
        match id {
            SocketId::Socket { socket, generation } => {
                let entry = self.sockets.get_mut(socket as usize)?;
                let is_alive = entry.is_in_use && entry.generation == generation;
                is_alive.then_some((&entry.owners, &mut entry.proxies))
            }
            SocketId::Listener(number) => {
                let listening = self.listeners.get_mut(number as usize)?.as_mut()?;
                Some((&listening.owners, &mut listening.proxies))
            }
        }
    }

    /// Makes a proxy descriptor an owner of these sockets. Returns false, and changes nothing, if the client
    /// does not own all of them.
    pub(super) fn add_proxy(&mut self, cx: &mut Context<'_>, client: usize, ids: &[SocketId]) -> bool {
        self.drain_client(cx, client);
        let owns_all =
            ids.iter().all(|id| self.owners_of(*id).is_some_and(|(owners, _)| owners.contains(client)));
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
        let is_attached = self.clients.get(client).is_some();
        if owns_all && is_attached {
            ids.iter().for_each(|id| self.add_owner_of(*id, client));
        }
        owns_all && is_attached
    }

    /// Makes a client an owner of sockets that another client of the domain has opened again after a restart.
    /// Returns false, and changes nothing, if one of them does not exist.
    pub(super) fn own_restored(&mut self, client: usize, ids: &[SocketId]) -> bool {
        let exists = self.clients.get(client).is_some() && ids.iter().all(|id| self.owners_of(*id).is_some());
        if exists {
            ids.iter().for_each(|id| self.add_owner_of(*id, client));
        }
        exists
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

    /// Removes a client that has ended from the owners of a listener. If it was the last one, later SYNs wait
    /// for another process that listens at the address.
    fn release_listener_of_dead(&mut self, cx: &mut Context<'_>, client: usize, number: u32) {
        if !self.remove_listener_owner(number, client) {
            return;
        }
        let unowned = self.listeners.get(number as usize).and_then(Option::as_ref);
        let unowned = unowned.filter(|l| l.owners.is_empty() && l.proxies == 0 && !l.is_destroyed);
        let held = unowned.map(|l| (l.address, l.sharing.v6only, l.requested_backlog.max(1)));
        self.close_listener_if_unowned(cx, number);
        if let Some((address, v6_only, backlog)) = held
            && !self.killed_listener_wait.is_zero()
        {
            // The close of a listener ends the wait at its address, so this comes after it.
            cx.hold_syns(address, v6_only, backlog, self.killed_listener_wait);
        }
    }

    /// Removes a client. What it alone owned is closed, and the locks that it held are released.
    pub(super) fn detach(&mut self, cx: &mut Context<'_>, number: usize) {
        if self.clients.get(number).is_none() {
            return;
        }
        // A notification of its last moment may say that it accepted or released a connection.
        self.drain_client(cx, number);
        for slot in 0..OFFERS_MAX {
            self.revoke_offer(number, slot);
        }
        let listeners = self.clients.get(number).map(|client| client.owned_listeners.clone());
        listeners
            .into_iter()
            .flatten()
            .for_each(|listener| self.release_listener_of_dead(cx, number, listener));
        self.free_preallocated(cx, number);
        self.forget_stamps(number);
        let Some(client) = self.clients.remove(number) else { return };
        for socket in client.owned_sockets.iter().chain(&client.locked_at_release) {
            lock::unlock_for_dead(&self.region.socket(*socket).lock, number);
        }
        for socket in client.owned_sockets {
            self.sockets[socket as usize].owners.remove(number);
            // The client may have written without a notification.
            self.process_socket(cx, socket);
            self.close_if_unowned(cx, socket);
        }
        self.distribute(cx);
    }
}
