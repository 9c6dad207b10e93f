//! Filters of UDP sockets (`SO_ATTACH_FILTER`), and the slow path on which a datagram is queued.

use super::queue::{self, Datagram};
use super::{Udp, UdpError};
use crate::handle::{LinkId, UdpHandle};
use crate::ip::{L4, Network};
use crate::socket_filter::{FilteredPacket, PacketFields, SocketFilter, loopback_header};
use crate::wire::{protocol, udp};
use std::sync::Arc;

/// How a datagram has arrived.
pub(super) struct Arrival<'a> {
    pub network: &'a Network,
    pub link: LinkId,
    /// The packet as it was received; `None` if it was looped back.
    pub l4: Option<&'a L4<'a>>,
}

impl Udp {
    /// Sets the filter of a socket; `None` removes it. Queued datagrams stay.
    pub fn set_filter(
        &mut self,
        handle: UdpHandle,
        filter: Option<Arc<dyn SocketFilter>>,
    ) -> Result<(), UdpError> {
        let has_classes = self.classes.is_some();
        let socket = self.socket(handle)?;
        socket.filter = filter;
        socket.update_slow_path(has_classes);
        Ok(())
    }

    /// Returns the filter of a socket.
    pub fn filter(&self, handle: UdpHandle) -> Option<&dyn SocketFilter> {
        let slot =
            self.slots.get(handle.index as usize).filter(|slot| slot.generation == handle.generation)?;
        slot.socket.as_ref()?.filter.as_deref()
    }

    /// Queues a datagram, or datagrams, to a socket that coalesces datagrams or has a filter, or if datagrams
    /// have classes.
    #[cold]
    #[inline(never)]
    pub(super) fn enqueue_slow_path(
        &mut self,
        index: u32,
        mut datagram: Datagram,
        mut payload: &[u8],
        arrival: &Arrival<'_>,
    ) {
        let Some(socket) = &mut self.slots[index as usize].socket else { return };
        // Cannot truncate: at most 64.
        let count = if datagram.gso_size == 0 { 1 } else { payload.len().div_ceil(datagram.gso_size.into()) };
        if let Some(filter) = &socket.filter {
            let kept = run(&**filter, socket.local.port(), &datagram, payload, arrival, &mut self.scratch);
            if kept == 0 {
                self.stats.filter_drops += count as u64;
                socket.drops += count as u64;
                return;
            }
            // The header is kept in any case (`udp_queue_rcv_one_skb`).
            payload = &payload[..(kept as usize).saturating_sub(udp::Header::LEN).min(payload.len())];
            datagram.len = payload.len();
            if payload.len() <= datagram.gso_size.into() {
                datagram.gso_size = 0;
            }
        }
        // After the filter, as on Linux: what it drops or removes takes no room.
        let cost = payload.len() + queue::OVERHEAD;
        let class = self.readable_classes.current();
        let limits = self.classes.as_ref().map(|classes| classes.limits);
        let of_class = |limit| limits.map_or(limit, |limits| limits.of(limit, class));
        let rcvbuf = of_class(socket.rcvbuf(self.receive_bytes));
        if !socket.has_room(cost, rcvbuf) || self.queued + cost > of_class(self.receive_total_bytes) {
            self.stats.receive_overflow += 1;
            socket.drops += 1;
            if let Some(classes) = &mut self.classes {
                classes.count_shed(class);
            }
            return;
        }
        let (capacity, before) = (socket.queue.capacity(), socket.queue.cost());
        let joins = socket.options.gro
            && datagram.gso_size == 0
            && (limits.is_none() || socket.queue.newest_class() == Some(class))
            && socket.queue.coalesce(&datagram, payload);
        if !joins {
            socket.queue.push(datagram, payload);
            if limits.is_some() {
                socket.queue.push_class(class);
            }
        }
        self.capacity += socket.queue.capacity() - capacity;
        self.queued += socket.queue.cost() - before;
        self.queued_peak = self.queued_peak.max(self.queued);
        self.stats.received += count as u64;
        self.list_readable(index);
    }
}

/// Runs a filter on a datagram to a local port. `scratch` is a buffer for packets that have to be built.
fn run(
    filter: &dyn SocketFilter,
    port: u16,
    datagram: &Datagram,
    payload: &[u8],
    arrival: &Arrival<'_>,
    scratch: &mut Vec<u8>,
) -> u32 {
    let len = udp::Header::LEN + payload.len();
    // A super-frame may have been divided.
    let received = arrival.l4.filter(|l4| l4.bytes.len() == len && l4.ip_packet.len() >= len);
    let (network, bytes) = match received {
        Some(l4) => (l4.ip_packet, l4.bytes),
        None => {
            let mut header = [0; udp::Header::LEN];
            // Cannot truncate: datagrams are at most that long.
            let fields =
                udp::Header { src_port: datagram.from.port(), dst_port: port, len: len as u16, checksum: 0 };
            fields.emit(&mut header);
            let fields = PacketFields {
                source: datagram.from.ip(),
                destination: datagram.to,
                protocol: protocol::UDP,
                tos: datagram.tos,
                hop_limit: datagram.hop_limit,
            };
            let network_len = fields.build(&[&header, payload], scratch);
            (&scratch[..], &scratch[network_len..])
        }
    };
    filter.run(&FilteredPacket {
        bytes,
        header_len: udp::Header::LEN,
        network,
        frame: &loopback_header(datagram.from.is_ipv4()),
        destination: datagram.to,
        is_broadcast: arrival.network.is_broadcast(datagram.to),
        link: arrival.link,
        is_loopback: arrival.network.is_loopback(arrival.link),
    })
}

#[cfg(test)]
mod tests;
