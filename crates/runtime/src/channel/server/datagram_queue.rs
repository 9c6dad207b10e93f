//! UDP sockets whose datagrams pass through the region.

use super::departures::HoldOutcome;
use super::domain::{CHUNK_BYTES, DatagramQueue, Domain};
use super::receive_charges::truesize;
use crate::channel::control::ChannelReply;
use crate::channel::datagram::{
    DATAGRAM_BYTES_MAX, DatagramHeader, HAS_AUTO_FLOW_LABEL, HAS_FLOW_LABEL, HAS_HOP_LIMIT, HAS_TOS,
    HEADER_BYTES, error_to_word,
};
use crate::channel::region::Direction;
use crate::channel::socket::request;
use crate::channel::sync::{Ordering, fence};
use crate::context::Context;
use core::net::{Ipv6Addr, SocketAddr};
use core::num::NonZeroU32;
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::ip::FlowLabel;
use ginnel_stack::udp::{Datagram, UdpError, UdpSendParams};
use rustix::time::{ClockId, clock_gettime};

/// Datagrams of a socket that may wait for space in the region, or are too long for it.
const PENDING_MAX: usize = 256;

impl Domain {
    /// Makes a UDP socket's datagrams pass through the region from now on.
    pub(super) fn open_datagram_queue(&mut self, cx: &mut Context<'_>, socket: u32, udp: UdpHandle) {
        self.sockets[socket as usize].datagram_queue = Some(Box::default());
        if self.datagram_buffer.is_empty() {
            self.datagram_buffer = vec![0; DATAGRAM_BYTES_MAX].into();
        }
        self.publish_endpoints(cx, socket, udp, None);
    }

    /// Publishes both addresses to clients.
    pub(super) fn publish_endpoints(
        &mut self,
        cx: &mut Context<'_>,
        socket: u32,
        udp: UdpHandle,
        remote: Option<SocketAddr>,
    ) {
        if let Ok(local) = cx.udp_local(udp) {
            let unspecified = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
            self.region.socket(socket).set_endpoints([local, remote.unwrap_or(unspecified)]);
        }
    }

    /// Queues a datagram or an error for clients.
    pub(super) fn queue_datagram(
        &mut self,
        cx: &mut Context<'_>,
        socket: u32,
        result: Result<(Datagram, &[u8]), UdpError>,
    ) {
        let (datagram, data) = match result {
            Ok(datagram) => datagram,
            Err(error) => {
                self.publish_udp_error(socket, error);
                return;
            }
        };
        if self.exceeds_recv_buffer(cx, socket, data.len()) {
            self.drop_datagram(cx);
            return;
        }
        let fits = !self.is_oversize(data.len());
        let mut queue = self.sockets[socket as usize].datagram_queue.take().unwrap_or_default();
        if queue.pending.is_empty()
            && fits
            && self.write_datagram(socket, &self.datagram_header(socket, &datagram, false), data)
        {
            queue.charges.add(self.sockets[socket as usize].received, data.len());
            self.sockets[socket as usize].datagram_queue = Some(queue);
            if let Some(class) = self.event_class {
                self.record_data_class(socket, class, 0);
            }
            self.notify_owners(socket);
            return;
        }
        if queue.pending.len() + queue.oversize.len() >= cx.limit_for_datagram(PENDING_MAX)
            || self.datagram_bytes + data.len() > cx.limit_for_datagram(self.datagram_bytes_max)
        {
            self.drop_datagram(cx);
        } else {
            self.datagram_bytes += data.len();
            queue.pending.push_back((datagram, data.to_vec()));
            if let Some(class) = self.event_class {
                let bytes = |(_, data): &(Datagram, Vec<u8>)| self.region_bytes(data.len());
                self.record_data_class(socket, class, queue.pending.iter().map(bytes).sum());
            }
        }
        self.move_pending(socket, &mut queue);
        self.sockets[socket as usize].datagram_queue = Some(queue);
        self.notify_owners(socket);
    }

    /// Counts that the datagram being delivered is dropped.
    fn drop_datagram(&mut self, cx: &mut Context<'_>) {
        self.stats.datagrams_dropped += 1;
        cx.count_shed_datagram();
    }

    /// Sets the size of the receive buffer of a socket whose datagrams pass through the region.
    pub(super) fn set_datagram_buffer(&mut self, socket: u32, bytes: Option<u32>) {
        if let Some(queue) = &mut self.sockets[socket as usize].datagram_queue {
            queue.recv_buffer_bytes = bytes.unwrap_or(u32::MAX);
        }
    }

    /// Returns whether the unread datagrams leave no space in the receive buffer for the one being delivered,
    /// of `len` bytes. As on Linux, each is charged more memory than its payload. An empty queue accepts any
    /// datagram.
    fn exceeds_recv_buffer(&mut self, cx: &Context<'_>, socket: u32, len: usize) -> bool {
        let entry = &mut self.sockets[socket as usize];
        let Some(queue) = &mut entry.datagram_queue else { return false };
        let unread = self.region.stream(socket, Direction::Incoming).unread(entry.received).unwrap_or(0);
        let pending: usize = queue.pending.iter().map(|(_, data)| truesize(data.len())).sum();
        let charged = queue.charges.unread(entry.received - unread as u64) + pending;
        charged > 0 && charged + truesize(len) > cx.limit_for_datagram(queue.recv_buffer_bytes as usize)
    }

    /// Returns whether a datagram of this length is too long for the region, which then has its header alone.
    fn is_oversize(&self, len: usize) -> bool {
        HEADER_BYTES + len > self.region.buffer_bytes()
    }

    /// Returns the bytes that a datagram of this length takes in the region.
    fn region_bytes(&self, len: usize) -> usize {
        HEADER_BYTES + if self.is_oversize(len) { 0 } else { len }
    }

    /// Moves waiting datagrams to the region, as far as there is space.
    fn move_pending(&mut self, socket: u32, queue: &mut DatagramQueue) {
        while let Some((datagram, data)) = queue.pending.pop_front() {
            let is_oversize = self.is_oversize(data.len());
            let header = self.datagram_header(socket, &datagram, is_oversize);
            let bytes = if is_oversize { &[][..] } else { &data };
            let mut delivered = self.write_datagram(socket, &header, bytes);
            if !delivered {
                self.region.socket(socket).wants_recv_space.store(1, Ordering::Relaxed);
                // Pairs with the fence of a client that has read.
                fence(Ordering::SeqCst);
                delivered = self.write_datagram(socket, &header, bytes);
            }
            if !delivered {
                queue.pending.push_front((datagram, data));
                return;
            }
            queue.charges.add(self.sockets[socket as usize].received, data.len());
            if is_oversize {
                queue.oversize.push_back((datagram, data));
            } else {
                self.datagram_bytes -= data.len();
            }
        }
    }

    /// Writes a datagram to the region. Returns false if there was no space.
    fn write_datagram(&mut self, socket: u32, header: &DatagramHeader, data: &[u8]) -> bool {
        let stream = self.region.stream(socket, Direction::Incoming);
        let entry = &mut self.sockets[socket as usize];
        match stream.space(entry.received) {
            Ok(space) if space >= HEADER_BYTES + data.len() => {
                // There is space for both, and readers wait for both.
                let _ = stream.write(&mut entry.received, &header.encode());
                let _ = stream.write(&mut entry.received, data);
                true
            }
            Ok(_) => false,
            Err(_) => {
                self.stats.violations += 1;
                // The socket cannot continue with an invalid position: the datagram is dropped as if it had
                // been read.
                true
            }
        }
    }

    /// Returns the header of a received datagram.
    fn datagram_header(&self, socket: u32, datagram: &Datagram, is_oversize: bool) -> DatagramHeader {
        let Datagram { len, from: peer, to: local, tos, hop_limit, flow_label, gso_size } = *datagram;
        let wants_timestamps =
            self.region.socket(socket).requests.load(Ordering::Relaxed) & request::TIMESTAMPS != 0;
        let received_us = if wants_timestamps { now_us() } else { None };
        // Cannot truncate: no datagram is that long.
        DatagramHeader {
            len: len as u32,
            is_oversize,
            peer,
            local,
            tos,
            hop_limit,
            flow_label,
            present: 0,
            gso_size,
            received_us,
        }
    }

    pub(super) fn publish_udp_error(&mut self, socket: u32, error: UdpError) {
        let word = error_to_word(error);
        if word != 0 {
            let word = word | self.extended_error_bit(socket);
            self.region.socket(socket).error.store(word, Ordering::Release);
            self.notify_oob_event(socket);
        }
    }

    /// Sends what clients wrote, up to a cost of `max_cost` or a little more, and uses the space that they
    /// freed. The rest follows in the next turn. What a device refuses follows later, and is lost if it has
    /// waited for too long, if all must be sent before a request, or if the socket is closed.
    pub(super) fn send_queued_datagrams(
        &mut self,
        cx: &mut Context<'_>,
        socket: u32,
        udp: UdpHandle,
        max_cost: usize,
    ) {
        if let Some(mut queue) = self.sockets[socket as usize].datagram_queue.take() {
            if !queue.pending.is_empty() {
                self.move_pending(socket, &mut queue);
                match self.event_class {
                    Some(_) => self.with_data_class(socket, |domain| domain.notify_owners(socket)),
                    None => self.notify_owners(socket),
                }
            }
            self.sockets[socket as usize].datagram_queue = Some(queue);
        }
        let mut taken = self.sockets[socket as usize].taken;
        let before = taken;
        let mut long = core::mem::take(&mut self.datagram_buffer);
        // A pending error does not delay sending.
        if let Some(error) = cx.udp_take_error(udp) {
            self.publish_udp_error(socket, error);
        }
        // Datagrams written meanwhile have a notification of their own.
        let end = taken.wrapping_add(self.region.buffer_bytes() as u64);
        let (mut done, mut rest, mut is_refused) = (0, false, false);
        let may_wait = max_cost < usize::MAX && !self.sockets[socket as usize].is_closing;
        let queue = self.sockets[socket as usize].datagram_queue.as_ref();
        let has_given_up = queue.is_some_and(|queue| queue.device_wait.has_given_up());
        while taken < end {
            let mut head = [0; HEADER_BYTES];
            let stream = self.region.stream(socket, Direction::Outgoing);
            let Ok(count) = stream.peek(taken, 0, &mut head) else {
                self.stats.violations += 1;
                break;
            };
            if count < HEADER_BYTES {
                break;
            }
            let Some(header) = DatagramHeader::decode(&head).filter(|header| !header.is_oversize) else {
                self.stats.violations += 1;
                break;
            };
            let bytes = &mut long[..header.len as usize];
            if stream.peek(taken, HEADER_BYTES, bytes) != Ok(bytes.len()) {
                // The rest of the datagram is being written.
                break;
            }
            if done >= max_cost {
                rest = true;
                break;
            }
            if header.received_us.is_some() {
                match self.hold_datagram(cx, (socket, udp), &header, bytes) {
                    HoldOutcome::Now => {}
                    HoldOutcome::Held => {
                        done += header.cost();
                        let stream = self.region.stream(socket, Direction::Outgoing);
                        stream.consume(&mut taken, header.stream_bytes());
                        continue;
                    }
                    HoldOutcome::Waits => break,
                }
            }
            let stream = self.region.stream(socket, Direction::Outgoing);
            let sent = send_datagram(cx, udp, &header, bytes);
            if may_wait
                && sent == Err(UdpError::DeviceFull)
                && self.sockets[socket as usize].waits_for_device(taken, header.peer, cx.now())
            {
                is_refused = true;
                break;
            }
            done += header.cost();
            stream.consume(&mut taken, header.stream_bytes());
            match sent {
                Ok(()) if has_given_up => {
                    if let Some(queue) = &mut self.sockets[socket as usize].datagram_queue {
                        queue.device_wait.note_taken(header.peer);
                    }
                }
                Ok(()) => {}
                // A datagram for which a device or a table has no space is lost, as anywhere on the path.
                Err(UdpError::DeviceFull | UdpError::NoBuffers) => self.stats.datagrams_refused += 1,
                Err(error) => self.publish_udp_error(socket, error),
            }
        }
        self.datagram_buffer = long;
        self.sockets[socket as usize].taken = taken;
        self.charge(done);
        if is_refused {
            self.queue_refused(socket, taken != before);
        }
        if rest {
            // The writer is notified of space when there is more of it.
            self.queue_chunked(socket);
        } else if taken != before {
            // Pairs with the fence of a client that found no space.
            fence(Ordering::SeqCst);
            let wants = &self.region.socket(socket).wants_send_space;
            if wants.load(Ordering::Relaxed) != 0 && wants.swap(0, Ordering::Relaxed) != 0 {
                self.notify_owners(socket);
            }
        }
    }

    /// Sends all that clients wrote, which is at most what the region holds, before a request that comes
    /// after it.
    pub(super) fn send_all_datagrams(&mut self, cx: &mut Context<'_>, socket: u32, udp: UdpHandle) {
        if self.sockets[socket as usize].datagram_queue.is_some() {
            self.send_queued_datagrams(cx, socket, udp, usize::MAX);
        }
    }

    /// Sends what was written on a socket that lost its last owner, a chunk in each turn. Returns whether all
    /// was sent.
    pub(super) fn finish_datagrams(&mut self, cx: &mut Context<'_>, socket: u32, udp: UdpHandle) -> bool {
        let entry = self.socket(socket);
        // Whatever is written after the first call, by a client that must not, does not keep the socket.
        if !core::mem::replace(&mut entry.is_closing, true)
            && entry.datagram_queue.is_some()
            && !entry.is_unfinished
        {
            self.send_queued_datagrams(cx, socket, udp, CHUNK_BYTES);
        }
        let entry = self.socket(socket);
        let is_held = entry.datagram_queue.as_ref().is_some_and(|queue| queue.held_bytes > 0);
        !entry.is_unfinished && !is_held
    }

    /// Removes the next datagram that did not fit into the region, and returns it.
    pub(super) fn recv_oversize(&mut self, socket: u32) -> ChannelReply {
        let queue = self.sockets[socket as usize].datagram_queue.as_mut();
        let next = queue.and_then(|queue| queue.oversize.pop_front());
        self.datagram_bytes -= next.as_ref().map_or(0, |(_, data)| data.len());
        ChannelReply::UdpRecv(next.ok_or(UdpError::WouldBlock))
    }

    /// Returns the datagram of this index among those that are too long for the region.
    pub(super) fn peek_oversize(&self, socket: u32, index: u32) -> ChannelReply {
        let queue = self.sockets[socket as usize].datagram_queue.as_ref();
        let found = queue.and_then(|queue| queue.oversize.get(index as usize)).cloned();
        ChannelReply::UdpRecv(found.ok_or(UdpError::WouldBlock))
    }

    /// Drops what waits on a socket that is closed.
    pub(super) fn drop_datagram_queue(&mut self, socket: u32) {
        if let Some(queue) = self.sockets[socket as usize].datagram_queue.take() {
            let bytes = |(_, data): &(Datagram, Vec<u8>)| data.len();
            self.datagram_bytes -= queue.pending.iter().chain(&queue.oversize).map(bytes).sum::<usize>();
        }
    }
}

/// Sends one datagram.
pub(super) fn send_datagram(
    cx: &mut Context<'_>,
    udp: UdpHandle,
    header: &DatagramHeader,
    data: &[u8],
) -> Result<(), UdpError> {
    let to = (header.peer.port() != 0 || !header.peer.ip().is_unspecified()).then_some(header.peer);
    let local = (!header.local.is_unspecified()).then_some(header.local);
    match (to, local) {
        (to, source) if header.gso_size != 0 || header.present != 0 => {
            let wanted = |bit, value| (header.present & bit != 0).then_some(value);
            let (tos, hop_limit) = (wanted(HAS_TOS, header.tos), wanted(HAS_HOP_LIMIT, header.hop_limit));
            let auto = wanted(HAS_AUTO_FLOW_LABEL, 0).map(|_| FlowLabel::Auto);
            let flow_label = auto
                .or((header.present & HAS_FLOW_LABEL != 0).then_some(FlowLabel::Fixed(header.flow_label)));
            cx.udp_send_with(
                udp,
                &UdpSendParams { to, source, gso_size: header.gso_size, hop_limit, tos, flow_label },
                data,
            )
        }
        (Some(from), Some(to)) => cx.udp_reply(
            udp,
            &Datagram { len: 0, from, to, tos: 0, hop_limit: 0, flow_label: 0, gso_size: 0 },
            data,
        ),
        (to, _) => cx.udp_send(udp, to, data),
    }
}

/// Returns the lowest 32 bits of the microseconds since 1970, or 1 if these are 0. It never returns `None`.
pub(super) fn now_us() -> Option<NonZeroU32> {
    let now = clock_gettime(ClockId::Realtime);
    let micros = now.tv_sec.wrapping_mul(1_000_000).wrapping_add(now.tv_nsec / 1000);
    NonZeroU32::new((micros as u32).max(1))
}
