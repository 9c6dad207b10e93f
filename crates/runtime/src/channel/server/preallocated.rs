//! Preallocated sockets, with which clients open connections without a request
//! (docs/adr/0018-connecting-without-a-request.md).

use super::client_state::ClientState;
use super::domain::{ClientSlot, Domain, DomainSocket};
use super::waker::ClientWaker;
use crate::channel::client_memory::PREALLOCATED_MAX;
use crate::channel::offer_slots;
use crate::channel::socket::{PreallocatedSocket, closed_bits, connect_error_to_word, request};
use crate::channel::sync::Ordering;
use crate::context::Context;
use crate::error::Error;
use core::net::{Ipv6Addr, SocketAddr};
use ginnel_stack::error::ConnectError;
use ginnel_stack::events::CloseReason;
use ginnel_stack::options::ConnectOptions;

impl Domain {
    /// Returns whether enough sockets are free that preallocated ones do not prevent incoming connections.
    fn has_spare_sockets(&self) -> bool {
        self.socket_slots.free_count() > self.sockets_max() / 2 + PREALLOCATED_MAX
    }

    /// Fills the slots of a client in another process, which has opened a connection.
    pub(super) fn preallocate(&mut self, client: usize) {
        if !matches!(self.clients.get(client), Some(ClientState { wake: ClientWaker::Process(_), .. })) {
            return;
        }
        for slot in 0..PREALLOCATED_MAX {
            self.preallocate_slot(client, slot);
        }
    }

    /// Puts a preallocated socket into the slot, if the slot is empty and enough sockets are free.
    fn preallocate_slot(&mut self, client: usize, slot: usize) {
        let has_spare = self.has_spare_sockets();
        let is_empty = |state: &ClientState| state.preallocated[slot].is_none();
        if !has_spare || !self.clients.get(client).is_some_and(is_empty) {
            return;
        }
        let Some(socket) = self.allocate_socket() else { return };
        let Self { clients, sockets, region, preallocated_count, .. } = self;
        let Some(state) = clients.get_mut(client) else { return };
        state.preallocated[slot] = Some(socket);
        *preallocated_count += 1;
        let entry = &mut sockets[socket as usize];
        let generation = entry.generation;
        // Cannot truncate: client numbers have 16 bits, and there are 64 slots.
        let preallocated = Some(ClientSlot { client: client as u16, slot: slot as u8 });
        *entry = DomainSocket { is_in_use: true, generation, preallocated, ..DomainSocket::default() };
        let area = region.socket(socket);
        area.reset(generation);
        let unspecified = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
        area.set_endpoints([unspecified; 2]);
        area.state.store(0, Ordering::Relaxed);
        offer_slots::put_preallocated(
            &state.memory.preallocated()[slot],
            PreallocatedSocket { socket, generation },
        );
    }

    /// Handles a client's notification about its preallocated socket. If the client requests a connection,
    /// opens one with the socket and refills the slot.
    pub(super) fn connect_preallocated(
        &mut self,
        cx: &mut Context<'_>,
        client: usize,
        slot: usize,
        socket: u32,
    ) {
        let area = self.region.socket(socket);
        if area.requests.load(Ordering::Acquire) & request::CONNECT == 0 {
            return;
        }
        let [_, remote] = area.endpoints();
        self.take_preallocated(client, slot);
        if let Some(client) = self.clients.get(client) {
            client.memory.preallocated()[slot].store(0, Ordering::Relaxed);
        }
        self.add_owner(socket, client);
        self.preallocate_slot(client, slot);
        match cx.connect(remote, ConnectOptions::default()) {
            Ok(conn) => {
                let report_unread_after = self.report_unread_after(None);
                self.socket(socket).report_unread_after = report_unread_after;
                self.attach_conn(cx, conn, socket);
            }
            Err(error) => {
                let why = match error {
                    Error::Connect(_, why) => why,
                    _ => ConnectError::NetUnreachable,
                };
                self.region.socket(socket).error.store(connect_error_to_word(why), Ordering::Relaxed);
                self.add_state(socket, closed_bits(CloseReason::Aborted));
            }
        }
    }

    /// Takes the socket out of a client's slot.
    fn take_preallocated(&mut self, client: usize, slot: usize) -> Option<u32> {
        let socket = self.clients.get_mut(client)?.preallocated[slot].take()?;
        self.preallocated_count -= 1;
        self.socket(socket).preallocated = None;
        Some(socket)
    }

    /// Frees all preallocated sockets of a client that detaches.
    pub(super) fn free_preallocated(&mut self, cx: &mut Context<'_>, client: usize) {
        for slot in 0..PREALLOCATED_MAX {
            if let Some(socket) = self.take_preallocated(client, slot) {
                self.free_socket(cx, socket);
            }
        }
    }
}
