//! SYNs to the address of a listener that is gone because the process that owned it has ended: they wait a
//! short time for another process to listen there, instead of being refused. Linux refuses them at once.

use super::Tcp;
use super::demux::{FlowKey, HostAddr, NO_HINT};
use super::input::{Segment, SegmentHeader};
use super::listen::LocalMatch;
use crate::device::RxBurst;
use crate::handle::LinkId;
use crate::ip::Network;
use crate::time::Instant;
use crate::wire::tcp::TcpFlags;
use arrayvec::ArrayVec;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::time::Duration;
use std::collections::BTreeMap;

/// Bytes of the options of a TCP header at most (RFC 9293 §3.1).
const OPTIONS_MAX: usize = 40;

/// An address at which SYNs wait.
struct HeldAddress {
    /// Which SYNs wait, by their local address.
    accepts: LocalMatch,
    /// When the SYNs are refused.
    until: Instant,
    /// How many SYNs may wait.
    backlog: u32,
    /// How many SYNs wait.
    waiting: u32,
}

/// A SYN that waits, without its data: the peer sends them again (RFC 7413 §4.1.3).
struct HeldSyn {
    key: FlowKey,
    hash: u32,
    header: SegmentHeader,
    options: ArrayVec<u8, OPTIONS_MAX>,
    ce: bool,
    hop_limit: u8,
    flow_label: u32,
    /// Link on which the SYN has arrived, if it still exists.
    link: Option<LinkId>,
}

/// The SYNs of a shard that wait for a listener. Not part of a saved state: their senders retransmit them.
#[derive(Default)]
pub(crate) struct HeldSyns {
    addresses: BTreeMap<(u16, IpAddr), HeldAddress>,
    syns: Vec<HeldSyn>,
    /// When SYNs are refused or get a listener next.
    next_deadline: Option<Instant>,
}

impl HeldSyns {
    /// Returns the address at which a SYN waits.
    fn address_of(&mut self, local: HostAddr, port: u16) -> Option<&mut HeldAddress> {
        let of_port =
            (port, IpAddr::V4(Ipv4Addr::UNSPECIFIED))..=(port, IpAddr::V6(Ipv6Addr::from(u128::MAX)));
        self.addresses.range_mut(of_port).map(|(_, held)| held).find(|held| held.accepts.matches(local))
    }

    /// Returns whether no SYN may wait.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    /// Gives SYNs that wait to a listener that was opened, in the next turn.
    pub fn on_listen(&mut self, now: Instant) {
        if !self.syns.is_empty() {
            self.next_deadline = Some(now);
        }
    }

    /// Lets no SYN wait at the address of a listener that was closed: those that wait are refused in the next
    /// turn.
    pub fn on_unlisten(&mut self, now: Instant, local: SocketAddr) {
        if self.addresses.remove(&(local.port(), local.ip())).is_some() {
            self.next_deadline = Some(now);
        }
    }

    /// Returns when SYNs are refused or get a listener next; `None` if none may wait.
    #[inline]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.next_deadline
    }

    /// Removes the addresses whose time is over, and returns the SYNs, of which those that go on waiting have
    /// to be added again.
    fn take_due(&mut self, now: Instant) -> Vec<HeldSyn> {
        self.addresses.retain(|_, held| held.until > now);
        self.addresses.values_mut().for_each(|held| held.waiting = 0);
        self.next_deadline = self.addresses.values().map(|held| held.until).min();
        core::mem::take(&mut self.syns)
    }
}

impl Tcp {
    /// Lets SYNs to an address without a listener wait until `self.now + wait`, at most `backlog` of them.
    /// Has no effect on more than `listeners_max` addresses at a time.
    pub fn hold_syns(&mut self, local: SocketAddr, v6_only: bool, backlog: u32, wait: Duration) {
        let address = (local.port(), local.ip());
        let addresses = &mut self.held_syns.addresses;
        if addresses.len() >= self.config.listeners_max as usize && !addresses.contains_key(&address) {
            return;
        }
        let (accepts, until) = (LocalMatch::new(local.ip(), v6_only), self.now + wait);
        let new = HeldAddress { accepts, until, backlog, waiting: 0 };
        let held = addresses.entry(address).or_insert(new);
        (held.accepts, held.until, held.backlog) = (accepts, until, backlog);
        let earliest = self.held_syns.next_deadline.map_or(until, |at| at.min(until));
        self.held_syns.next_deadline = Some(earliest);
    }

    /// Keeps a SYN for which there is no listener, if it may wait. Returns false if it has to be refused.
    #[cold]
    #[inline(never)]
    pub(super) fn hold_syn(&mut self, net: &Network, seg: &Segment<'_>, burst: &RxBurst<'_>) -> bool {
        let others = TcpFlags::ACK | TcpFlags::RST | TcpFlags::FIN;
        if !seg.header.flags.contains(TcpFlags::SYN) || seg.header.flags.intersects(others) {
            return false;
        }
        let is_full =
            self.half_open as usize + self.held_syns.syns.len() >= self.config.half_open_max as usize;
        let Some(held) = self.held_syns.address_of(seg.key.local, seg.key.local_port) else { return false };
        if is_full || held.waiting >= held.backlog {
            self.stats.half_open_overflows += 1;
            return true;
        }
        held.waiting += 1;
        self.stats.syns_held += 1;
        let frame = seg.position.and_then(|position| burst.get(usize::from(position.frame)));
        let link = match frame {
            Some(frame) => net.link_of_frame(self.rx_port, frame.bytes),
            None => Some(self.reassembled_link),
        };
        self.held_syns.syns.push(HeldSyn {
            key: seg.key,
            hash: seg.hash,
            header: seg.header,
            options: seg.options.iter().copied().take(OPTIONS_MAX).collect(),
            ce: seg.ce,
            hop_limit: seg.hop_limit,
            flow_label: seg.flow_label,
            link,
        });
        true
    }

    /// Gives SYNs that wait to listeners that were opened meanwhile, and refuses those whose time is over.
    #[inline]
    pub(super) fn release_held_syns(&mut self, net: &mut Network) {
        if self.held_syns.next_deadline().is_some_and(|at| at <= self.now) {
            self.release_due_syns(net);
        }
    }

    #[cold]
    #[inline(never)]
    fn release_due_syns(&mut self, net: &mut Network) {
        for syn in self.held_syns.take_due(self.now) {
            let HeldSyn { key, hash, .. } = syn;
            let has_listener = self.listeners.find(key.local, key.local_port, hash).is_some();
            if !has_listener && let Some(held) = self.held_syns.address_of(key.local, key.local_port) {
                held.waiting += 1;
                self.held_syns.syns.push(syn);
                continue;
            }
            let seg = Segment {
                key,
                hash,
                hint: NO_HINT,
                header: syn.header,
                options: &syn.options,
                payload: &[],
                position: None,
                ce: syn.ce,
                segments: 1,
                hop_limit: syn.hop_limit,
                flow_label: syn.flow_label,
            };
            // The link may have gone: the SYN is lost then, as its answer would be.
            let Some(link) = syn.link else { continue };
            self.reassembled_link = link;
            // Was counted when it arrived.
            self.stats.segments_in -= 1;
            self.input(net, &seg, &RxBurst::new());
        }
    }
}
