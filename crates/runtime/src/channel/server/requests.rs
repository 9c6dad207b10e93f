//! Work that clients request: by doorbells, and by rare requests that get a reply.

use super::domain::{ClientSlot, Domain};
use crate::channel::control::{ChannelReply, ChannelRequest, LinkInfo, StackCounters};
use crate::channel::doorbells::RELEASED;
use crate::channel::socket::{opened_bits, state};
use crate::context::Context;
use crate::error::Error;
use core::ops::RangeInclusive;
use ginnel_stack::error::{ConnectError, SendError, Stale};
use ginnel_stack::handle::Conn;

impl Domain {
    /// Processes at most `max` notifications of a client, and no more than there are numbers of sockets and
    /// listeners. Returns how many.
    pub(super) fn handle_doorbells(&mut self, cx: &mut Context<'_>, number: usize, max: usize) -> usize {
        let max = max.min(self.region.sockets() + self.region.listeners());
        let mut handled = 0;
        let is_empty = loop {
            let Some(client) = self.clients.get_mut(number) else { break true };
            let doorbells = client.memory.to_stack();
            if handled >= max {
                break client.from_client.is_empty(doorbells);
            }
            match client.from_client.pop(doorbells) {
                Ok(None) if client.from_client.is_scanning() => {
                    // A look at many flags costs a turn as much as a notification.
                    handled += 1;
                }
                Ok(None) => break true,
                Ok(Some((socket, reasons))) => {
                    let was_suspended = core::mem::take(&mut client.is_suspended);
                    handled += 1;
                    self.handle_doorbell(cx, number, socket, reasons);
                    if was_suspended {
                        self.enqueue_all_credits(number);
                    }
                }
                Err(_) => {
                    self.stats.violations += 1;
                    break true;
                }
            }
        };
        if !is_empty {
            self.clients.add_unfinished(number);
        }
        self.stats.doorbells += handled as u64;
        handled
    }

    /// Processes one notification: of a socket, or of a listener for which the client has set credits.
    fn handle_doorbell(&mut self, cx: &mut Context<'_>, number: usize, socket: u32, reasons: u8) {
        let Some(entry) = self.sockets.get(socket as usize) else {
            let client = self.clients.get(number);
            match client.and_then(|client| client.memory.listener_of_doorbell(socket)) {
                Some(listener) => self.enqueue_credit(number, listener as usize),
                // No socket had this number yet.
                None if (socket as usize) < self.region.sockets() => {}
                None => self.stats.violations += 1,
            }
            return;
        };
        let (offer, preallocated) = (entry.offer, entry.preallocated);
        if let Some(ClientSlot { client, slot }) = offer
            && usize::from(client) == number
        {
            self.complete_accept(cx, number, slot.into());
        }
        if let Some(ClientSlot { client, slot }) = preallocated
            && usize::from(client) == number
        {
            self.connect_preallocated(cx, number, slot.into(), socket);
        }
        if !self.socket(socket).owners.contains(number) {
            return;
        }
        if reasons & RELEASED != 0 {
            let is_connection = self.socket(socket).conn.is_some();
            self.remove_owner(socket, number);
            self.record_lock_at_release(socket, number);
            self.close_if_unowned(cx, socket);
            if is_connection && self.socket(socket).is_closing {
                // The client was the last owner, and what it wrote before the release is processed.
                return;
            }
        }
        // A socket that got its share of this turn continues in the next one, however often it notifies.
        if !self.socket(socket).is_unfinished {
            // Also processes what was written before a release.
            self.process_socket(cx, socket);
        }
    }

    /// Handles a request of a client.
    pub(in crate::channel) fn handle_request(
        &mut self,
        cx: &mut Context<'_>,
        number: usize,
        request: ChannelRequest,
    ) -> ChannelReply {
        let owned_conn = |domain: &Self, socket: u32| {
            let entry = domain.sockets.get(socket as usize)?;
            entry.conn.filter(|_| entry.owners.contains(number))
        };
        // What the client did before the request is in its ring.
        self.handle_doorbells(cx, number, usize::MAX);
        match request {
            ChannelRequest::Listen(at, options) => {
                ChannelReply::Listen(self.listen(cx, number, at, options, false))
            }
            ChannelRequest::ListenShared(at, options, description) => {
                ChannelReply::Listen(self.listen_shared(cx, number, at, options, description))
            }
            ChannelRequest::ListenExclusive(at, options) => {
                ChannelReply::Listen(self.listen(cx, number, at, options, true))
            }
            // Reservations belong to the stack, not to a domain: `ChannelServer` handles them.
            ChannelRequest::Reserve(..) | ChannelRequest::Unreserve(_) => ChannelReply::Done,
            ChannelRequest::SetBacklog(listener, backlog) => {
                self.set_backlog(cx, listener, backlog);
                ChannelReply::Done
            }
            ChannelRequest::OfferPending => {
                self.accept_more(cx);
                self.distribute(cx);
                ChannelReply::Done
            }
            ChannelRequest::ClaimOffer(listener) => {
                self.claim_offer(cx, number, listener as usize);
                ChannelReply::Done
            }
            ChannelRequest::SetListenerOptions(listener, options) => {
                self.set_listener_options(cx, listener, &options);
                ChannelReply::Done
            }
            ChannelRequest::Join(listener) => ChannelReply::Join(self.join(number, listener)),
            ChannelRequest::Unlisten(listener) => {
                self.unlisten(cx, number, listener);
                ChannelReply::Done
            }
            ChannelRequest::Connect(remote, options) => {
                if self.is_full() {
                    return ChannelReply::Connect(Err(Error::Connect(remote, ConnectError::TooMany)));
                }
                let report_unread_after = self.report_unread_after(options.socket.recv_buffer_bytes);
                let socket = cx.connect(remote, options).map(|conn| {
                    let bits = opened_bits(cx.syn_data_max(conn).filter(|_| options.socket.fastopen_connect));
                    self.open_socket(cx, conn, bits)
                });
                if socket.is_ok() {
                    self.preallocate(number);
                }
                ChannelReply::Connect(socket.map(|socket| {
                    let socket = socket.expect("a socket is free: checked above");
                    self.add_owner(socket, number);
                    let entry = self.socket(socket);
                    entry.report_unread_after = report_unread_after;
                    (socket, entry.generation)
                }))
            }
            ChannelRequest::SendDeferredSyn(socket) => {
                if let Some(conn) = owned_conn(self, socket) {
                    cx.send_deferred_syn(conn);
                    self.add_state(socket, state::SYN_SENT);
                }
                ChannelReply::Done
            }
            ChannelRequest::CanOpenFast => ChannelReply::CanOpenFast(cx.can_open_fast()),
            ChannelRequest::Info(socket) => ChannelReply::Info(match owned_conn(self, socket) {
                Some(conn) => cx.info(conn).map(Box::new),
                None => Err(Stale::Handle),
            }),
            ChannelRequest::SavedSyn(socket, max_len) => {
                ChannelReply::SavedSyn(match owned_conn(self, socket) {
                    Some(conn) => cx.saved_syn(conn, max_len as usize),
                    None => Vec::new(),
                })
            }
            ChannelRequest::ArrivalTime(socket, end) => {
                let is_owner = self.sockets.get(socket as usize).is_some_and(|s| s.owners.contains(number));
                ChannelReply::ArrivalTime(match is_owner {
                    true => self.arrival_time(socket, end),
                    false => Err(Stale::Handle),
                })
            }
            ChannelRequest::AwaitStamps(socket, end, wants_sent, wants_acked) => {
                ChannelReply::AwaitStamps(match owned_conn(self, socket) {
                    Some(_) => Ok(self.await_stamps(cx, (number, socket), (end, wants_sent, wants_acked))),
                    None => Err(Stale::Handle),
                })
            }
            ChannelRequest::TakeStamps(socket) => {
                let is_owner = self.sockets.get(socket as usize).is_some_and(|s| s.owners.contains(number));
                ChannelReply::Stamps(if is_owner { self.take_stamps(number, socket) } else { Vec::new() })
            }
            ChannelRequest::SendableWithin(socket, len, (unsent, unacked)) => {
                ChannelReply::SendableWithin(match owned_conn(self, socket) {
                    Some(conn) => {
                        // What was written before counts first.
                        self.process_socket(cx, socket);
                        let ahead = self.untaken_bytes(socket);
                        let (unsent_max, unacked_max) =
                            (unsent.saturating_sub(ahead), unacked.saturating_sub(ahead));
                        let sendable = cx.sendable_within(conn, len.min(1 << 30), unsent_max, unacked_max);
                        let sendable = if ahead < unsent.min(unacked) { sendable } else { 0 };
                        if sendable < len {
                            self.socket(socket).awaits_acked = true;
                            cx.request_writable(conn);
                        }
                        Ok(sendable)
                    }
                    None => Err(Stale::Handle),
                })
            }
            ChannelRequest::IsShared(socket) => {
                ChannelReply::IsShared(self.sockets.get(socket as usize).is_some_and(|entry| {
                    entry.proxies > 0 || entry.owners.clients().any(|owner| owner != number)
                }))
            }
            ChannelRequest::SendUrgent(socket, bytes) => {
                ChannelReply::SendUrgent(match owned_conn(self, socket) {
                    Some(conn) => self.send_urgent(cx, conn, socket, &bytes),
                    None => Err(SendError::Stale),
                })
            }
            ChannelRequest::SendMessage(socket, bytes, priority) => {
                ChannelReply::SendMessage(match owned_conn(self, socket) {
                    Some(conn) => self.send_message(cx, conn, socket, (&bytes, priority)),
                    None => Err(SendError::Stale),
                })
            }
            ChannelRequest::RecvUnordered(socket, read, max) => {
                let is_owner = self.sockets.get(socket as usize).is_some_and(|s| s.owners.contains(number));
                ChannelReply::RecvUnordered(match is_owner {
                    true => self.recv_unordered(cx, (socket, read, max)),
                    false => Err(Stale::Handle),
                })
            }
            ChannelRequest::ReturnUnordered(socket, offset, bytes) => {
                if self.sockets.get(socket as usize).is_some_and(|entry| entry.owners.contains(number)) {
                    self.return_unordered(socket, offset, bytes);
                }
                ChannelReply::Done
            }
            ChannelRequest::Udp(request) => self.handle_udp_request(cx, number, request),
            ChannelRequest::Filtered(code, request) => self.open_filtered(cx, number, &code, *request),
            ChannelRequest::SetFilter(of, code) => {
                ChannelReply::SetFilter(self.set_filter(cx, number, of, code.as_deref()))
            }
            ChannelRequest::Filter(of) => ChannelReply::Filter(self.filter(cx, number, of)),
            ChannelRequest::SetGroupProgram(of, code, is_first) => {
                let set = self.set_group_program(cx, number, of, code.as_deref(), is_first);
                ChannelReply::SetGroupProgram(set)
            }
            ChannelRequest::LocalPorts => {
                let ends = |ports: RangeInclusive<u16>| (*ports.start(), *ports.end());
                ChannelReply::LocalPorts([ends(cx.local_ports()), ends(cx.local_udp_ports())])
            }
            ChannelRequest::Links(from) => ChannelReply::Links(LinkInfo::chunk(cx.links(), from)),
            ChannelRequest::Counters => ChannelReply::Counters(Box::new(StackCounters {
                tcp: *cx.tcp_stats(),
                network: cx.network_stats(),
                drops: cx.network_drops().clone(),
            })),
            ChannelRequest::Detach => {
                self.detach(cx, number);
                ChannelReply::Done
            }
        }
    }

    /// Queues urgent bytes after all that clients wrote before. If not all were taken, the client is notified
    /// when there may be room.
    fn send_urgent(
        &mut self,
        cx: &mut Context<'_>,
        conn: Conn,
        socket: u32,
        bytes: &[u8],
    ) -> Result<usize, SendError> {
        let sent = match self.forward(cx, socket, conn, usize::MAX) {
            true => cx.send_urgent(conn, bytes),
            false => Err(SendError::Full),
        };
        if sent == Err(SendError::Full) || sent.is_ok_and(|sent| sent < bytes.len()) {
            self.socket(socket).awaits_acked = true;
            cx.request_writable(conn);
        }
        sent
    }
}
