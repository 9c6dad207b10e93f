//! Filters of connections and listeners (`SO_ATTACH_FILTER`). A segment that a filter drops is lost: nothing
//! is answered, and the peer sends it again.

use super::Tcp;
use super::active::UrgentState;
use super::conn::{Flags, NONE, SlotState};
use super::filter_table::FilterId;
use super::input::Segment;
use super::listen::listener_of;
use super::profile::ProfileId;
use super::state::State;
use crate::device::RxBurst;
use crate::error::{GroupError, OptionError};
use crate::handle::{Conn, LinkId, Listener, PortId};
use crate::ip::Network;
use crate::socket_filter::{FilteredPacket, PacketFields, SocketFilter, loopback_header};
use crate::wire::tcp::TcpHeader;
use crate::wire::{be16, protocol};
use std::sync::Arc;

/// Bytes of an Ethernet header without VLAN tag, and of a tag.
const ETHERNET: usize = 14;
const TAG: usize = 4;

impl Tcp {
    /// Sets the filter of a connection.
    ///
    /// # Errors
    /// The connection has ended, or there are too many filters or different option sets.
    pub fn set_filter(
        &mut self,
        conn: Conn,
        filter: Option<Arc<dyn SocketFilter>>,
    ) -> Result<(), OptionError> {
        let idx = self
            .index(conn)
            .filter(|idx| self.conns[*idx].slot_state != SlotState::Reported)
            .ok_or(OptionError::Stale)?;
        let profile = self.profile_with_filter(self.conns[idx].profile, filter)?;
        self.replace_filtered_profile(idx, profile);
        Ok(())
    }

    /// Gives a connection a profile that differs from its own one in the filter.
    fn replace_filtered_profile(&mut self, idx: u32, profile: ProfileId) {
        let old = core::mem::replace(&mut self.conns[idx].profile, profile);
        self.profiles.release(old);
        let active = self.conns[idx].active;
        let is_urgent = active != NONE && !matches!(self.active[active].urg_data, UrgentState::None);
        let is_slow = is_urgent || self.is_filtered(idx);
        self.conns[idx].flags.assign(Flags::URGENT_OR_FILTERED, is_slow);
    }

    /// Applies what a segment of a connection has to pass before anything else: the minimum hop limit. Lets a
    /// half-open connection take over the filter that its listener has now, as Linux runs the listener's
    /// filter until the handshake is complete. Returns false if the segment is dropped.
    #[cold]
    #[inline(never)]
    pub(super) fn passes_guards(&mut self, idx: u32, seg: &Segment<'_>) -> bool {
        self.has_guards = self.is_gtsm_used || self.half_open > 0;
        let c = &self.conns[idx];
        let is_half_open = c.state == State::SynReceived
            && !c.has(Flags::ACTIVE_OPEN)
            // Connections of Fast Open are in the queue from the SYN on.
            && !c.has(Flags::IN_ACCEPT_QUEUE)
            && !c.has(Flags::ACCEPTED);
        if is_half_open && !self.take_over_filter(idx) {
            self.stats.filter_drops += 1;
            return false;
        }
        !self.fails_gtsm(self.conns[idx].profile, seg)
    }

    /// Gives a half-open connection the filter of its listener or, if that was closed, of the listener that
    /// takes the connection over. Returns false if there are too many different option sets.
    fn take_over_filter(&mut self, idx: u32) -> bool {
        if !self.listeners.is_open(listener_of(self.conns[idx].token)) && !self.migrate_half_open(idx) {
            // The connection is reset when the segment is processed.
            return true;
        }
        let c = &self.conns[idx];
        let of_listener = self.listeners.get(listener_of(c.token)).profile;
        let filter = self.profiles.get(of_listener).filter;
        let own = *self.profiles.get(c.profile);
        if own.filter == filter {
            return true;
        }
        let Some(profile) = self.profiles.intern(own.with_filter(filter)) else { return false };
        self.replace_filtered_profile(idx, profile);
        true
    }

    /// Sets the filter of a listener, which connections inherit whose handshake is completed from now on.
    ///
    /// # Errors
    /// As [`Tcp::set_filter`].
    pub fn set_listener_filter(
        &mut self,
        listener: Listener,
        filter: Option<Arc<dyn SocketFilter>>,
    ) -> Result<(), OptionError> {
        let index = self.listeners.index(listener).ok_or(OptionError::Stale)?;
        let profile = self.profile_with_filter(self.listeners.get(index).profile, filter)?;
        let old = self.listeners.set_profile(index, profile, self.profiles.get(profile));
        self.profiles.release(old);
        // They take over the filter at their next segment. A listener that was closed may have left them.
        self.has_guards |= self.half_open > 0;
        Ok(())
    }

    /// Returns the filter of a connection.
    pub fn filter(&self, conn: Conn) -> Option<&dyn SocketFilter> {
        let idx = self.index(conn)?;
        self.filter_of(self.conns[idx].profile)
    }

    /// Returns the filter of a listener.
    pub fn listener_filter(&self, listener: Listener) -> Option<&dyn SocketFilter> {
        let index = self.listeners.index(listener)?;
        self.filter_of(self.listeners.get(index).profile)
    }

    fn filter_of(&self, profile: ProfileId) -> Option<&dyn SocketFilter> {
        self.profiles.filters.get(self.profiles.get(profile).filter).map(|filter| &**filter)
    }

    /// Returns a profile that differs from another one in the filter, with one more user.
    fn profile_with_filter(
        &mut self,
        profile: ProfileId,
        filter: Option<Arc<dyn SocketFilter>>,
    ) -> Result<ProfileId, OptionError> {
        let mut profile = *self.profiles.get(profile);
        let added = filter.map(|filter| self.profiles.filters.add(filter).ok_or(OptionError::TooMany));
        profile.filter = added.transpose()?.unwrap_or(FilterId::NONE);
        let id = self.profiles.intern(profile);
        if id.is_none() {
            // No profile has the filter, so this frees it.
            self.profiles.filters.release(profile.filter);
        }
        id.ok_or(OptionError::TooMany)
    }

    /// Returns whether a connection has a filter.
    pub fn is_filtered(&self, idx: u32) -> bool {
        self.profiles.get(self.conns[idx].profile).filter != FilterId::NONE
    }

    /// Processes a segment of a connection with [`Flags::URGENT_OR_FILTERED`].
    #[cold]
    #[inline(never)]
    pub(super) fn input_urgent_or_filtered(
        &mut self,
        net: &mut Network,
        idx: u32,
        seg: &Segment<'_>,
        burst: &RxBurst<'_>,
    ) {
        let profile = self.conns[idx].profile;
        if let Some(kept) = self.filter_segment(net, profile, seg, burst) {
            self.input_unpredicted(net, idx, &seg.truncated(kept), burst);
        }
    }

    /// Applies the minimum hop limit and the filter of a listener to a segment. Returns how many bytes of its
    /// payload are kept; `None` if the segment is dropped.
    #[cold]
    #[inline(never)]
    pub(super) fn guard_listener(
        &mut self,
        net: &Network,
        listener: u32,
        seg: &Segment<'_>,
        burst: &RxBurst<'_>,
    ) -> Option<usize> {
        let profile = self.listeners.get(listener).profile;
        if self.fails_gtsm(profile, seg) {
            return None;
        }
        if self.profiles.get(profile).filter == FilterId::NONE {
            return Some(seg.payload.len());
        }
        self.filter_segment(net, profile, seg, burst)
    }

    /// Runs the filter of a profile, if it has one, on a segment. Returns how many bytes of the payload are
    /// kept; `None` if the segment is dropped.
    fn filter_segment(
        &mut self,
        net: &Network,
        profile: ProfileId,
        seg: &Segment<'_>,
        burst: &RxBurst<'_>,
    ) -> Option<usize> {
        let id = self.profiles.get(profile).filter;
        if id == FilterId::NONE {
            return Some(seg.payload.len());
        }
        let mut buffers = PacketBuffers::new(seg, &mut self.filter_scratch);
        let packet = filtered_packet(net, (self.rx_port, self.reassembled_link), seg, burst, &mut buffers)?;
        let header_len = packet.header_len;
        let kept = self.profiles.filters.run(id, &packet);
        if kept == 0 {
            self.stats.filter_drops += 1;
            return None;
        }
        // The header is kept in any case (`sk_filter_trim_cap`).
        Some((kept as usize).saturating_sub(header_len).min(seg.payload.len()))
    }

    /// Returns the listener that gets a segment which was found to be for this one: that which the program of
    /// their group selects, if it selects one (`reuseport_select_sock`).
    #[cold]
    #[inline(never)]
    pub(super) fn select_listener(
        &mut self,
        net: &Network,
        listener: u32,
        seg: &Segment<'_>,
        burst: &RxBurst<'_>,
    ) -> u32 {
        if !self.listeners.has_group_program(listener) {
            return listener;
        }
        let mut buffers = PacketBuffers::new(seg, &mut self.filter_scratch);
        let packet = filtered_packet(net, (self.rx_port, self.reassembled_link), seg, burst, &mut buffers);
        let selected = packet.and_then(|packet| {
            let of_payload = FilteredPacket { bytes: seg.payload, header_len: 0, ..packet };
            self.listeners.select_by_program(listener, &of_payload)
        });
        selected.unwrap_or(listener)
    }

    /// Sets the program that selects the member of a listener's group for a segment; `None` removes it. With
    /// `is_first` the listener must be the only member.
    ///
    /// # Errors
    /// Any [`GroupError`].
    pub fn set_group_program(
        &mut self,
        listener: Listener,
        program: Option<Arc<dyn SocketFilter>>,
        is_first: bool,
    ) -> Result<(), GroupError> {
        let index = self.listeners.index(listener).ok_or(GroupError::Stale)?;
        let has_program = program.is_some();
        for member in self.listeners.set_group_program(index, program, is_first)? {
            let profile = self.profiles.get(self.listeners.get(member).profile);
            self.listeners.set_has_group_program(member, has_program, profile);
        }
        Ok(())
    }
}

/// Memory for the headers of a segment that is not in one frame.
struct PacketBuffers<'a> {
    network: &'a mut Vec<u8>,
    frame: [u8; ETHERNET],
}

impl<'a> PacketBuffers<'a> {
    fn new(seg: &Segment<'_>, network: &'a mut Vec<u8>) -> Self {
        Self { network, frame: loopback_header(seg.key.local.is_v4()) }
    }
}

/// Returns a segment as filters see it. `arrival` is the port of the device that it came from and the link of
/// a segment that was reassembled from fragments. `None` if the frame has no link.
fn filtered_packet<'a>(
    net: &Network,
    arrival: (PortId, LinkId),
    seg: &Segment<'_>,
    burst: &'a RxBurst<'_>,
    buffers: &'a mut PacketBuffers<'_>,
) -> Option<FilteredPacket<'a>> {
    let (rx_port, reassembled_link) = arrival;
    let header_len = TcpHeader::LEN + seg.options.len();
    let received = match seg.position {
        Some(position) => Some((burst.get(usize::from(position.frame))?.bytes, position)),
        None => None,
    };
    let link = match received {
        Some((frame, _)) => net.link_of_frame(rx_port, frame)?,
        None => reassembled_link,
    };
    let frame = received.and_then(|(frame, position)| {
        let payload_at = position.start as usize;
        let frame = frame.get(..payload_at + seg.payload.len())?;
        Some((frame, network_header_at(frame)?, payload_at.checked_sub(header_len)?))
    });
    let (frame, network, bytes) = match frame {
        Some((frame, network_at, at)) => (frame, frame.get(network_at..)?, frame.get(at..)?),
        None => {
            let network_len = build_packet(seg, buffers.network);
            let network = &buffers.network[..];
            (&buffers.frame[..], network, &network[network_len..])
        }
    };
    Some(FilteredPacket {
        bytes,
        header_len,
        network,
        frame,
        destination: seg.key.local.ip(),
        is_broadcast: false,
        link,
        is_loopback: net.is_loopback(link),
    })
}

impl<'a> Segment<'a> {
    /// Returns the segment with the first `len` bytes of its payload.
    pub(super) fn truncated(&self, len: usize) -> Segment<'a> {
        Segment { payload: self.payload.get(..len).unwrap_or(self.payload), ..*self }
    }
}

/// Returns where the IP header is in a frame.
fn network_header_at(frame: &[u8]) -> Option<usize> {
    let mut start = ETHERNET;
    while matches!(be16(frame.get(start - 2..start)?.first_chunk::<2>()?, 0), 0x8100 | 0x88a8) {
        start += TAG;
    }
    Some(start)
}

/// Builds the packet of a segment that was reassembled from fragments, as far as its fields are known.
/// Returns the length of the IP header.
fn build_packet(seg: &Segment<'_>, out: &mut Vec<u8>) -> usize {
    let mut header = [0; TcpHeader::LEN];
    header[..2].copy_from_slice(&seg.key.remote_port.to_be_bytes());
    header[2..4].copy_from_slice(&seg.key.local_port.to_be_bytes());
    header[4..8].copy_from_slice(&seg.header.seq.0.to_be_bytes());
    header[8..12].copy_from_slice(&seg.header.ack.0.to_be_bytes());
    // Cannot truncate: options have at most 40 bytes.
    header[12] = ((TcpHeader::LEN + seg.options.len()) as u8 >> 2) << 4;
    header[13] = seg.header.flags.0;
    header[14..16].copy_from_slice(&seg.header.window.to_be_bytes());
    header[18..].copy_from_slice(&seg.header.urgent.to_be_bytes());
    let fields = PacketFields {
        source: seg.key.remote.ip(),
        destination: seg.key.local.ip(),
        protocol: protocol::TCP,
        tos: if seg.ce { 3 } else { 0 },
        hop_limit: seg.hop_limit,
    };
    fields.build(&[&header, seg.options, seg.payload], out)
}

#[cfg(test)]
mod tests;
