//! UDP sockets of clients that send and receive each datagram with a request, and other requests about UDP
//! sockets.

use super::datagram_queue::now_us;
use super::domain::{Domain, DomainSocket};
use crate::channel::control::{ChannelReply, UdpRequest};
use crate::channel::socket::state;
use crate::channel::sync::Ordering;
use crate::context::Context;
use core::num::NonZeroU32;
use ginnel_stack::handle::{LinkId, UdpHandle};
use ginnel_stack::udp::{Datagram, UdpError};
use std::collections::VecDeque;

/// Datagrams that may be queued on a UDP socket.
const DATAGRAMS_MAX: usize = 256;

impl Domain {
    /// Handles a request about UDP sockets.
    pub(super) fn handle_udp_request(
        &mut self,
        cx: &mut Context<'_>,
        client: usize,
        request: UdpRequest,
    ) -> ChannelReply {
        let find = |domain: &Self, socket: UdpHandle| {
            let entry = domain.sockets.get(socket.index() as usize)?;
            let is_owned = entry.owners.contains(client) && entry.generation == socket.generation();
            entry.udp.filter(|_| is_owned)
        };
        let owned = |domain: &Self, socket| find(domain, socket).ok_or(UdpError::Stale);
        // Datagrams that were written before the request are sent first, with the options of that time.
        if let UdpRequest::Connect(socket, _)
        | UdpRequest::SetOptions(socket, _)
        | UdpRequest::SendWith(socket, ..)
        | UdpRequest::SendTimed(socket, ..)
        | UdpRequest::Send(socket, ..)
        | UdpRequest::Reply(socket, ..) = &request
            && let Some(udp) = find(self, *socket).filter(|_| self.socket(socket.index()).is_unfinished)
        {
            self.send_all_datagrams(cx, socket.index(), udp);
        }
        match request {
            UdpRequest::OpenServed(local, _, to) if !cx.serves_path(local.ip(), to) => {
                ChannelReply::UdpBind(Err(UdpError::AddressNotAvailable))
            }
            UdpRequest::Bind(local, options)
            | UdpRequest::Open(local, options)
            | UdpRequest::OpenServed(local, options, _) => {
                if self.is_full() {
                    return ChannelReply::UdpBind(Err(UdpError::TooManySockets));
                }
                let through_region = !matches!(request, UdpRequest::Bind(..));
                ChannelReply::UdpBind(cx.udp_bind(local, options).map(|udp| {
                    let socket = self.allocate_socket().expect("a socket is free: checked above");
                    let generation = self.socket(socket).generation;
                    let bits = state::UDP;
                    self.udp.insert(udp, (socket, VecDeque::new()));
                    let udp_socket = Some(udp);
                    *self.socket(socket) = DomainSocket {
                        is_in_use: true,
                        generation,
                        state_bits: bits,
                        udp: udp_socket,
                        ..DomainSocket::default()
                    };
                    self.add_owner(socket, client);
                    self.region.socket(socket).reset(generation);
                    if through_region {
                        self.open_datagram_queue(cx, socket, udp);
                        self.set_recverr(socket, options.recverr_v4 || options.recverr_v6);
                        self.set_datagram_buffer(socket, options.rcvbuf);
                    }
                    self.region.socket(socket).state.store(bits, Ordering::Release);
                    (socket, generation)
                }))
            }
            UdpRequest::Connect(socket, remote) => ChannelReply::Udp(owned(self, socket).and_then(|udp| {
                cx.udp_connect(udp, remote)?;
                self.publish_endpoints(cx, socket.index(), udp, Some(remote));
                Ok(())
            })),
            UdpRequest::SetOptions(socket, options) => {
                let set = owned(self, socket).and_then(|udp| cx.udp_set_options(udp, options));
                if set.is_ok() {
                    self.set_recverr(socket.index(), options.recverr_v4 || options.recverr_v6);
                    self.set_datagram_buffer(socket.index(), options.rcvbuf);
                }
                ChannelReply::Udp(set)
            }
            UdpRequest::SendWith(socket, sending, data) => {
                let udp = owned(self, socket);
                let sent = udp.and_then(|udp| cx.udp_send_with(udp, &sending, &data));
                ChannelReply::Udp(self.record_send_result(socket.index(), sent))
            }
            UdpRequest::SendTimed(socket, sending, data) => {
                let micros = || now_us().map_or(0, NonZeroU32::get);
                let (udp, begun) = (owned(self, socket), micros());
                let sent = udp.and_then(|udp| cx.udp_send_with(udp, &sending, &data));
                let sent = self.record_send_result(socket.index(), sent);
                ChannelReply::UdpSentAt(sent.map(|()| (begun, micros())))
            }
            UdpRequest::TakeExtendedError(socket) => {
                ChannelReply::UdpExtendedError(owned(self, socket).and_then(|udp| {
                    let result = self.take_extended_error(cx, udp);
                    self.publish_error_queue(socket.index(), &result);
                    result
                }))
            }
            UdpRequest::PathMtu(socket) => {
                ChannelReply::UdpPathMtu(owned(self, socket).and_then(|udp| cx.udp_path_mtu(udp)))
            }
            UdpRequest::SetMembership(socket, link, group, filter) => {
                ChannelReply::Udp(owned(self, socket).and_then(|udp| {
                    let link = LinkId(link);
                    cx.udp_set_membership(udp, link, group, filter)
                }))
            }
            UdpRequest::GroupLink(group) => {
                let (link, limits) = cx.link_and_limits(group);
                ChannelReply::UdpGroupLink(link.map(|link| link.0), limits)
            }
            UdpRequest::RecvOversize(socket) => match find(self, socket) {
                Some(_) => self.recv_oversize(socket.index()),
                None => ChannelReply::UdpRecv(Err(UdpError::Stale)),
            },
            UdpRequest::PeekOversize(socket, index) => match find(self, socket) {
                Some(_) => self.peek_oversize(socket.index(), index),
                None => ChannelReply::UdpRecv(Err(UdpError::Stale)),
            },
            UdpRequest::Send(socket, remote, data) => {
                let sent = owned(self, socket).and_then(|udp| cx.udp_send(udp, remote, &data));
                ChannelReply::Udp(self.record_send_result(socket.index(), sent))
            }
            UdpRequest::Reply(socket, datagram, data) => {
                let sent = owned(self, socket).and_then(|udp| cx.udp_reply(udp, &datagram, &data));
                ChannelReply::Udp(self.record_send_result(socket.index(), sent))
            }
            UdpRequest::Recv(socket) => ChannelReply::UdpRecv(owned(self, socket).and_then(|udp| {
                let waiting = self.udp.get_mut(&udp).and_then(|(_, waiting)| waiting.pop_front());
                if let Some(Ok((_, data))) = &waiting {
                    self.datagram_bytes -= data.len();
                }
                waiting.unwrap_or(Err(UdpError::WouldBlock))
            })),
            UdpRequest::Local(socket) => {
                ChannelReply::UdpLocal(owned(self, socket).and_then(|udp| cx.udp_local(udp)))
            }
            // The client releases the number afterwards. A client whose datagrams pass through the region
            // sends no such request: it only releases the number, and its datagrams are still sent.
            UdpRequest::Close(socket) => ChannelReply::Udp(owned(self, socket).and_then(|udp| {
                self.drop_datagram_queue(socket.index());
                self.socket(socket.index()).udp = None;
                self.drop_datagrams(udp);
                cx.udp_close(udp)
            })),
        }
    }

    /// Drops the datagrams that are queued on a UDP socket that is closed.
    pub(super) fn drop_datagrams(&mut self, udp: UdpHandle) {
        let Some((_, waiting)) = self.udp.remove(&udp) else { return };
        self.datagram_bytes -= waiting.iter().flatten().map(|(_, data)| data.len()).sum::<usize>();
    }

    /// Queues a datagram or an error. Returns whether the socket belongs to this domain.
    pub(super) fn deliver_datagram(
        &mut self,
        cx: &mut Context<'_>,
        udp: UdpHandle,
        result: Result<(Datagram, &[u8]), UdpError>,
    ) -> bool {
        let Some((socket, waiting)) = self.udp.get_mut(&udp) else { return false };
        let number = *socket;
        if self.sockets[number as usize].datagram_queue.is_some() {
            self.queue_datagram(cx, number, result);
            return true;
        }
        let (bytes, datagrams_max) = match result {
            Ok((_, data)) => (data.len(), cx.limit_for_datagram(DATAGRAMS_MAX)),
            Err(_) => (0, DATAGRAMS_MAX),
        };
        let exceeds_domain = self.datagram_bytes + bytes > cx.limit_for_datagram(self.datagram_bytes_max);
        if waiting.len() >= datagrams_max || bytes > 0 && exceeds_domain {
            self.stats.datagrams_dropped += 1;
            if result.is_ok() {
                cx.count_shed_datagram();
            }
            return true;
        }
        self.datagram_bytes += bytes;
        waiting.push_back(result.map(|(datagram, data)| (datagram, data.to_vec())));
        self.notify_oob_event(number);
        true
    }
}
