//! Neighbour resolution: performs what the state machine in [`neighbour`](super::neighbour) decides.

use super::neighbour::{
    DEVICE_RETRY, EvictedNeighbour, NeighbourTimerAction, NeighbourUpdate, NeighbourUpdateOutcome,
    PendingFrame, SendDecision,
};
use crate::handle::LinkId;
use crate::icmp::error::{parse_quoted_packet, quoted_udp_payload};
use crate::ip::Network;
use crate::ip::timers::NetworkTimer;
use crate::time::Instant;
use crate::wire::ethernet::EtherType;
use core::net::IpAddr;
use std::collections::VecDeque;

/// Where a solicitation is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SolicitTarget {
    /// To all hosts of the link, or to the solicited-node group.
    Multicast,
    /// To the neighbour itself, at its last known MAC address.
    Unicast,
}

impl Network {
    /// Handles a packet from `source` for a neighbour that is not ready. Returns true if the packet may be
    /// sent now, false if it must be queued.
    #[cold]
    pub(crate) fn send_to_unready_neighbour(&mut self, now: Instant, slot: u32, source: IpAddr) -> bool {
        let Some(neighbour) = self.neighbours.neighbour_mut(slot) else { return false };
        match neighbour.on_send(now, &self.config) {
            SendDecision::Send => true,
            SendDecision::SendThenProbe(after) => {
                self.timers.arm(NetworkTimer::Neighbour(slot), now + after);
                true
            }
            SendDecision::Queue => false,
            SendDecision::QueueAndSolicit => {
                self.solicit_and_arm_timer(now, slot, SolicitTarget::Multicast, Some(source));
                false
            }
        }
    }

    /// Handles the expiry of a neighbour's timer.
    pub(crate) fn on_neighbour_timer(&mut self, now: Instant, slot: u32) {
        let Some(neighbour) = self.neighbours.neighbour_mut(slot) else { return };
        let target = match neighbour.on_timer(now, &self.config) {
            NeighbourTimerAction::None => return,
            NeighbourTimerAction::SolicitMulticast => SolicitTarget::Multicast,
            NeighbourTimerAction::SolicitUnicast => SolicitTarget::Unicast,
            NeighbourTimerAction::Fail => {
                self.stats.neighbours_failed += 1;
                let pending = self.neighbours.take_pending(slot);
                self.report_unreachable(&pending);
                return;
            }
        };
        self.solicit_and_arm_timer(now, slot, target, None);
    }

    /// Sends one solicitation and arms the timer for the next.
    fn solicit_and_arm_timer(
        &mut self,
        now: Instant,
        slot: u32,
        target: SolicitTarget,
        source: Option<IpAddr>,
    ) {
        let sent = self.solicit(slot, target, source);
        let Some(neighbour) = self.neighbours.neighbour_mut(slot) else { return };
        let interval = self.links[usize::from(neighbour.link.0)].retrans_timer;
        let after = neighbour.on_solicited(sent, interval);
        self.timers.arm(NetworkTimer::Neighbour(slot), now + after);
    }

    /// Sends one solicitation. Its source address is that of the queued packet if that belongs to the link
    /// (RFC 4861 §7.2.2; for ARP as with Linux's `arp_announce=1`). Returns false if the device is full.
    fn solicit(&mut self, slot: u32, target: SolicitTarget, source: Option<IpAddr>) -> bool {
        let Some(neighbour) = self.neighbours.neighbour_mut(slot) else { return true };
        let (link, address, mac) = (neighbour.link, neighbour.address, neighbour.mac());
        let waiting = || {
            let frame = neighbour.first_pending()?;
            let packet = frame.bytes.get(usize::from(neighbour.header_len)..)?;
            parse_quoted_packet(packet).map(|error| error.local.ip())
        };
        let source = source.or_else(waiting).filter(|&source| self.local.link_of(source) == Some(link));
        let to = match target {
            SolicitTarget::Multicast => None,
            SolicitTarget::Unicast => Some(mac),
        };
        match (address, source) {
            (IpAddr::V4(target), Some(IpAddr::V4(source))) => self.send_arp_request(link, source, target, to),
            (IpAddr::V4(target), _) => match self.link(link).source_v4(target) {
                Some(source) => self.send_arp_request(link, source, target, to),
                // Without a source address a retry is useless, too.
                None => true,
            },
            (IpAddr::V6(target), source) => {
                let source = match source {
                    Some(IpAddr::V6(source)) => Some(source),
                    _ => self.link(link).link_local(),
                };
                match source {
                    Some(source) => self.send_neighbour_solicitation(link, source, target, to),
                    None => true,
                }
            }
        }
    }

    /// Applies an update about `address` and returns the neighbour's slot. With `create`, an unknown
    /// neighbour is added.
    pub(crate) fn update_neighbour(
        &mut self,
        now: Instant,
        link: LinkId,
        address: IpAddr,
        update: NeighbourUpdate,
        create: bool,
    ) -> Option<u32> {
        let slot = match self.neighbours.find(link, address) {
            Some(slot) => slot,
            None if create && update.mac.is_some() => self.neighbour_slot(link, address, None).ok()?,
            None => return None,
        };
        let reachable = self.link(link).reachable_time;
        let neighbour = self.neighbours.neighbour_mut(slot)?;
        match neighbour.update(now, update, reachable) {
            NeighbourUpdateOutcome::Resolved => {
                self.timers.cancel(NetworkTimer::Neighbour(slot));
                self.send_pending(now, slot);
            }
            NeighbourUpdateOutcome::Moved => self.stats.neighbours_moved += 1,
            NeighbourUpdateOutcome::Unchanged => {}
            NeighbourUpdateOutcome::Refused => self.stats.neighbour_updates_refused += 1,
        }
        Some(slot)
    }

    /// Sends all packets queued for a neighbour. Those that the device has no room for are retried soon.
    fn send_pending(&mut self, now: Instant, slot: u32) {
        let mut frames = self.neighbours.take_pending(slot);
        let Some(neighbour) = self.neighbours.neighbour_mut(slot) else { return };
        let (link, mac) = (neighbour.link, neighbour.mac());
        let port = &mut self.ports[usize::from(self.links[usize::from(link.0)].port.0)];
        while let Some(frame) = frames.front() {
            let len = frame.bytes.len();
            let Some(buffer) = port.tx.reserve(len).and_then(|buffer| buffer.get_mut(..len)) else { break };
            buffer.copy_from_slice(&frame.bytes);
            buffer[..6].copy_from_slice(&mac.0);
            port.commit(len, frame.meta);
            frames.pop_front();
        }
        if !frames.is_empty() {
            self.neighbours.requeue_pending(slot, frames);
            self.backlog.push(slot);
            self.timers.arm(NetworkTimer::Backlog, now + DEVICE_RETRY);
        }
    }

    /// Retries packets that a full device refused.
    pub(crate) fn retry_backlog(&mut self, now: Instant) {
        for slot in core::mem::take(&mut self.backlog) {
            // Meanwhile the neighbour may have failed, or its slot may have been reused; then other rules
            // apply.
            if self.neighbours.neighbour_mut(slot).is_some_and(|neighbour| neighbour.is_resolved()) {
                self.send_pending(now, slot);
            }
        }
    }

    /// Queues a packet for its neighbour.
    pub(crate) fn push_pending(&mut self, slot: u32, frame: PendingFrame) {
        self.stats.tx_pending += 1;
        match self.neighbours.push_pending(slot, frame) {
            Ok(dropped) => self.stats.tx_pending_overflow += dropped,
            Err(_) => self.stats.tx_pending_overflow += 1,
        }
    }

    /// Cleans up after an evicted neighbour: cancels its timer and reports its queued packets.
    pub(crate) fn on_neighbour_evicted(&mut self, evicted: EvictedNeighbour) {
        self.timers.cancel(NetworkTimer::Neighbour(evicted.slot));
        self.backlog.retain(|&slot| slot != evicted.slot);
        self.report_unreachable(&evicted.pending);
    }

    /// Reports to the transports that these packets are dropped.
    fn report_unreachable(&mut self, frames: &VecDeque<PendingFrame>) {
        for frame in frames {
            self.stats.tx_unresolved += 1;
            let vlan = frame.bytes.get(12..14) == Some(&EtherType::VLAN.0.to_be_bytes());
            let header = if vlan { 18 } else { 14 };
            let packet = frame.bytes.get(header..).unwrap_or(&[]);
            if let Some(error) = parse_quoted_packet(packet) {
                self.push_error(error, quoted_udp_payload(packet));
            }
        }
    }
}
