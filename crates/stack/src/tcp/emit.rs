//! Builds the segments of a connection, in the device's own memory.

use super::Tcp;
use super::conn::{Flags, NONE, Tcb};
use crate::device::Label;
use crate::ip::{FlowLabel, IpHeader, Network, PayloadSum, SealedTcpV4, TcpV4Headers, TcpV4Lengths, TxError};
use crate::priority;
use crate::wire::checksum::Sum;
use crate::wire::protocol;
use crate::wire::tcp::{self, FastOpenCookie, SeqNumber, TcpFlags, TcpHeader, TcpOptions, Timestamps};

/// ECN-capable transport, codepoint ECT(0) (RFC 3168 §5).
const ECT0: u8 = 2;

/// Bytes of the SACK option without its blocks, including two bytes of padding.
pub(super) const SACK_FIXED_BYTES: u32 = 4;

/// Bytes of one SACK block.
pub(super) const SACK_BLOCK_BYTES: u32 = 8;

/// Returns how many SACK blocks fit into the options (RFC 2018 §3).
pub(super) fn max_sack_blocks(c: &Tcb) -> usize {
    if c.has(Flags::TIMESTAMPS) { 3 } else { 4 }
}

/// A segment, or super-frame, that has to be built.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TxSegment {
    pub seq: SeqNumber,
    pub len: u32,
    pub flags: TcpFlags,
    /// Payload bytes of each wire segment, if it is a super-frame.
    pub gso_size: Option<u16>,
    /// True if it is new data of an ECN connection (RFC 3168 §6.1.5: retransmissions are not ECN-capable).
    pub ect: bool,
}

impl TxSegment {
    /// Returns how many segments it is on the wire.
    fn wire_segments(&self) -> u64 {
        self.gso_size.map_or(1, |size| u64::from(self.len.div_ceil(size.into())))
    }
}

/// Returns the window field for a window in bytes, and its scale. Rounded up, so that rounding does not move
/// the right edge back.
#[inline(always)]
pub(super) fn scaled_window(c: &Tcb, window: u32) -> (u16, u8) {
    let scale = if c.has(Flags::WSCALE) { c.rcv_wscale() } else { 0 };
    (((u64::from(window) + (1 << scale) - 1) >> scale).min(65_535) as u16, scale)
}

/// Returns the header fields of a segment over IPv4 that must not be fragmented.
#[inline(always)]
fn v4_headers(c: &Tcb, segment: &TxSegment, tos: u8, ttl: u8, window: u16, urgent: u16) -> TcpV4Headers {
    TcpV4Headers {
        src: c.local_ip,
        dst: c.remote_ip,
        tos: tos | if segment.ect { ECT0 } else { 0 },
        ttl,
        ports: u32::from(c.local_port) << 16 | u32::from(c.remote_port),
        seq: segment.seq.0,
        ack: if segment.flags.contains(TcpFlags::ACK) { c.rcv_nxt.0 } else { 0 },
        flags: segment.flags,
        window,
        urg_ptr: urgent,
    }
}

impl Tcp {
    /// Builds and sends one segment.
    #[inline(never)]
    pub fn emit(&mut self, net: &mut Network, idx: u32, segment: &TxSegment) -> Result<(), TxError> {
        if self.is_plain(idx, segment) && self.emit_plain(net, idx, segment)? {
            return Ok(());
        }
        self.emit_slow_path(net, idx, segment)
    }

    /// Returns whether a segment has no options but timestamps and no exceptional header fields, so that the
    /// fast path can build it.
    #[inline(always)]
    fn is_plain(&self, idx: u32, segment: &TxSegment) -> bool {
        let c = &self.conns[idx];
        if segment.flags.0 & (TcpFlags::SYN.0 | TcpFlags::RST.0) != 0
            || c.has(Flags::V6 | Flags::ECN_ECHO | Flags::MTU_LOCKED)
        {
            return false;
        }
        if c.active == NONE {
            return true;
        }
        let b = &self.active[c.active];
        b.snd_up.is_none() && b.dsack.is_none() && b.recv.range_count() == 0 && b.ooo_fin_seq.is_none()
    }

    /// Sends a pure acknowledgement.
    #[inline(never)]
    pub fn send_ack(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        let seq = self.conns[idx].snd_nxt;
        let segment = TxSegment { seq, len: 0, flags: TcpFlags::ACK, gso_size: None, ect: false };
        if self.is_plain(idx, &segment) && self.emit_single(net, idx, seq, 0, TcpFlags::ACK)? {
            return Ok(());
        }
        self.emit_slow_path(net, idx, &segment)
    }

    /// Builds a plain segment that is one segment on the wire, too, and not ECN-capable. Returns false like
    /// `emit_plain`.
    ///
    /// Not inlined: single-segment sends and acknowledgements share this code, because a short connection
    /// needs both, and all its code should fit the processor's first-level cache (docs/adr/0007).
    #[inline(never)]
    pub(super) fn emit_single(
        &mut self,
        net: &mut Network,
        idx: u32,
        seq: SeqNumber,
        len: u32,
        flags: TcpFlags,
    ) -> Result<bool, TxError> {
        self.emit_plain(net, idx, &TxSegment { seq, len, flags, gso_size: None, ect: false })
    }

    /// Builds a plain segment. Returns false if the network layer needs its slow path for the next hop.
    #[inline(always)]
    fn emit_plain(&mut self, net: &mut Network, idx: u32, segment: &TxSegment) -> Result<bool, TxError> {
        let c = &self.conns[idx];
        let timestamps = Timestamps { tsval: self.now_ms().wrapping_add(c.ts_offset), tsecr: c.ts_recent };
        let options = timestamps.words();
        let options = if c.has(Flags::TIMESTAMPS) { &options[..] } else { &[] };
        let (window, edge) = self.window_field(idx, false);
        if !self.emit_v4(net, idx, segment, window, 0, options)? {
            return Ok(false);
        }
        self.on_plain_ack_sent(idx, edge);
        Ok(true)
    }

    /// Builds the SYN+ACK of an IPv4 connection. Returns false like `emit_plain`.
    #[inline(always)]
    pub(super) fn emit_syn_ack(
        &mut self,
        net: &mut Network,
        idx: u32,
        segment: &TxSegment,
    ) -> Result<bool, TxError> {
        let options = self.syn_options(idx, true).words();
        let (window, edge) = self.window_field(idx, true);
        if !self.emit_v4(net, idx, segment, window, 0, &options)? {
            return Ok(false);
        }
        self.on_plain_ack_sent(idx, edge);
        Ok(true)
    }

    /// Builds a SYN or SYN+ACK, which may have data, with the fast open cookie that is given.
    #[cold]
    pub(super) fn emit_syn_with(
        &mut self,
        net: &mut Network,
        idx: u32,
        segment: &TxSegment,
        cookie: Option<&FastOpenCookie>,
    ) -> Result<(), TxError> {
        if !net.hop_is_current(&self.conns[idx].hop) {
            self.reroute(net, idx)?;
        }
        let is_syn_ack = segment.flags.contains(TcpFlags::ACK);
        let options = TcpOptions { fastopen: cookie.cloned(), ..self.syn_options(idx, is_syn_ack) };
        let (window, edge) = self.window_field(idx, true);
        let plain = !self.conns[idx].has(Flags::V6 | Flags::MTU_LOCKED);
        if !plain || !self.emit_v4(net, idx, segment, window, 0, &options.words())? {
            self.emit_generic(net, idx, segment, window, 0, &options)?;
        }
        if is_syn_ack {
            self.on_plain_ack_sent(idx, edge);
        }
        Ok(())
    }

    /// Builds a segment over IPv4 that must not be fragmented, and counts it. Returns false like
    /// `emit_plain`.
    #[inline(always)]
    fn emit_v4(
        &mut self,
        net: &mut Network,
        idx: u32,
        segment: &TxSegment,
        window: u16,
        urgent: u16,
        options: &[u32],
    ) -> Result<bool, TxError> {
        // The device is not known yet, so the label is made if any device carries labels; the others ignore
        // it.
        let label = if net.has_flow_hasher() { self.segment_label(net, idx, segment) } else { Label::NONE };
        let c = &self.conns[idx];
        let (tos, ttl) = self.tos_and_hop_limit(c);
        let lengths = TcpV4Lengths { options, payload: segment.len as usize, gso_size: segment.gso_size };
        let Some(packet) = net.begin_tcp_v4(self.now, &c.hop, lengths)? else { return Ok(false) };
        if packet.can_gather && self.active[c.active].send.is_gatherable() {
            let sealed = packet.seal(&v4_headers(c, segment, tos, ttl, window, urgent), options, Sum::ZERO);
            self.commit_gathered(net, idx, segment, sealed, label);
            return Ok(true);
        }
        let mut sum = Sum::ZERO;
        if segment.len > 0 {
            let offset = (segment.seq - c.snd_una) as u64;
            let send = &self.active[c.active].send;
            sum = send.fill(&self.chunks, &self.sources, offset, packet.payload, packet.payload_sum);
        }
        let sealed = packet.seal(&v4_headers(c, segment, tos, ttl, window, urgent), options, sum);
        net.commit_tcp_v4(sealed, label);
        self.stats.segments_out += segment.wire_segments();
        Ok(true)
    }

    /// Sends a super-frame to a device that copies and can gather the payload from where it is.
    #[inline(never)]
    fn commit_gathered(
        &mut self,
        net: &mut Network,
        idx: u32,
        segment: &TxSegment,
        sealed: SealedTcpV4,
        label: Label,
    ) {
        let c = &self.conns[idx];
        let offset = (segment.seq - c.snd_una) as u64;
        let send = &self.active[c.active].send;
        let mut pieces = send.pieces(&self.chunks, &self.sources, offset, segment.len as usize);
        net.commit_gathered_v4(sealed, label, &mut pieces);
        self.stats.segments_out += segment.wire_segments();
    }

    /// Returns the label of a connection's flow: its hash, as the receiver would compute it, and its
    /// priority. The hash is computed once while the connection has active state.
    #[inline(never)]
    pub(super) fn label(&mut self, net: &Network, idx: u32) -> Label {
        let c = &self.conns[idx];
        let priority = self.priority(c);
        if c.active != NONE && self.active[c.active].label != Label::NONE {
            return Label::new(self.active[c.active].label.hash(), priority);
        }
        let (key, active) = (self.key(idx), c.active);
        let hash = net.tx_flow_hash(key.local_addr(), key.remote_addr());
        if active != NONE {
            self.active[active].label = Label::new(hash, 0);
        }
        Label::new(hash, priority)
    }

    /// Returns the label of a segment. Messages in it may have a higher priority than the connection.
    #[inline]
    fn segment_label(&mut self, net: &Network, idx: u32, segment: &TxSegment) -> Label {
        let label = self.label(net, idx);
        let c = &self.conns[idx];
        if segment.len > 0
            && c.active != NONE
            && let offset = (segment.seq - c.snd_una) as u64
            && let Some(class) = self.active[c.active].send.message_class(offset, segment.len.into())
            && class > priority::class(label.priority())
        {
            return Label::new(label.hash(), priority::of_class(class));
        }
        label
    }

    /// Returns the label of a connection's flow if a device carries labels.
    pub(super) fn label_if_carried(&mut self, net: &Network, idx: u32) -> Label {
        if net.has_flow_hasher() { self.label(net, idx) } else { Label::NONE }
    }

    /// Returns the type of service and the hop limit of a connection.
    #[inline(always)]
    pub(super) fn tos_and_hop_limit(&self, c: &Tcb) -> (u8, u8) {
        if c.profile.is_usual() {
            return (0, self.config.hop_limit);
        }
        let profile = self.profiles.get(c.profile);
        (profile.tos, profile.hop_limit)
    }

    /// Returns how packets of a connection over IPv6 get their flow label.
    #[inline]
    pub(super) fn flow_label(&self, c: &Tcb) -> FlowLabel {
        if c.profile.is_usual() { FlowLabel::Auto } else { self.profiles.get(c.profile).flow_label }
    }

    /// Returns the priority of a connection.
    #[inline(always)]
    pub(super) fn priority(&self, c: &Tcb) -> u8 {
        if c.profile.is_usual() { 0 } else { self.profiles.get(c.profile).priority }
    }

    /// Builds a segment with any options, over IPv4 or IPv6.
    #[inline(never)]
    fn emit_slow_path(&mut self, net: &mut Network, idx: u32, segment: &TxSegment) -> Result<(), TxError> {
        if !net.hop_is_current(&self.conns[idx].hop) {
            self.reroute(net, idx)?;
        }
        let options = self.options_for(idx, segment);
        let syn = segment.flags.contains(TcpFlags::SYN);
        let (window, edge) = self.window_field(idx, syn);
        let c = &self.conns[idx];
        let mut segment = *segment;
        if c.has(Flags::ECN_ECHO) && !syn {
            segment.flags |= TcpFlags::ECE;
        }
        let mut urgent = 0;
        if !syn
            && c.active != NONE
            && let Some(end) = self.active[c.active].snd_up
        {
            // RFC 6093 §3.2: the urgent pointer points after the urgent byte, as in all implementations.
            let ahead = end - segment.seq;
            if ahead > 0 && ahead <= 0xffff {
                segment.flags |= TcpFlags::URG;
                urgent = ahead as u16;
            }
        }
        let plain = !c.has(Flags::V6 | Flags::MTU_LOCKED);
        if !plain || !self.emit_v4(net, idx, &segment, window, urgent, &options.words())? {
            self.emit_generic(net, idx, &segment, window, urgent, &options)?;
        }
        if segment.flags.contains(TcpFlags::ACK) {
            let c = &self.conns[idx];
            let unreported = options.sack_blocks.is_empty()
                && c.has(Flags::ACK_NOW)
                && c.active != NONE
                && c.has(Flags::SACK)
                && (self.active[c.active].dsack.is_some()
                    || self.active[c.active].sack_block_count(c.rcv_nxt) > 0);
            let dsack = if unreported { self.active[c.active].dsack } else { None };
            self.on_ack_sent(idx, edge);
            if unreported {
                // The options had no room for the SACK blocks, so an acknowledgement with them follows.
                let c = &mut self.conns[idx];
                c.flags.set(Flags::ACK_NOW);
                self.active[c.active].dsack = dsack;
            }
        }
        Ok(())
    }

    /// Builds a segment over IPv6, one that may be fragmented, or one to a neighbour that has to be resolved
    /// first.
    fn emit_generic(
        &mut self,
        net: &mut Network,
        idx: u32,
        segment: &TxSegment,
        window: u16,
        urgent: u16,
        options: &TcpOptions,
    ) -> Result<(), TxError> {
        let label = if net.has_flow_hasher() { self.segment_label(net, idx, segment) } else { Label::NONE };
        let c = &self.conns[idx];
        let tcp_header = TcpHeader {
            src_port: c.local_port,
            dst_port: c.remote_port,
            seq: segment.seq,
            ack: if segment.flags.contains(TcpFlags::ACK) { c.rcv_nxt } else { SeqNumber(0) },
            flags: segment.flags,
            window,
            urg_ptr: urgent,
            header_len: 0,
        };
        let header_len = TcpHeader::LEN + options.encoded_len();
        let l4_len = header_len + segment.len as usize;
        let write = |l4: &mut [u8], summing: PayloadSum| {
            tcp::emit(&tcp_header, options, l4);
            let payload = &mut l4[header_len..];
            if payload.is_empty() {
                return (header_len, Sum::ZERO);
            }
            let offset = (segment.seq - c.snd_una) as u64;
            (
                header_len,
                self.active[c.active].send.fill(&self.chunks, &self.sources, offset, payload, summing),
            )
        };
        let key = self.key(idx);
        let (tos, hop_limit) = self.tos_and_hop_limit(c);
        let header = IpHeader {
            src: key.local.ip(),
            dst: key.remote.ip(),
            protocol: protocol::TCP,
            tos: tos | if segment.ect { ECT0 } else { 0 },
            hop_limit,
            // A SYN+ACK is too short to be fragmented (`ip_build_and_send_pkt`).
            dont_fragment: !c.has(Flags::MTU_LOCKED) || segment.flags.contains(TcpFlags::SYN | TcpFlags::ACK),
            flow_label: 0,
            label,
        };
        let header = net.with_flow_label(header, self.flow_label(c), (c.local_port, c.remote_port));
        net.send_tcp(self.now, &c.hop, &header, l4_len, segment.gso_size, write)?;
        self.stats.segments_out += segment.wire_segments();
        Ok(())
    }

    /// Updates the state after a segment was sent that acknowledges everything received.
    #[inline(always)]
    fn on_ack_sent(&mut self, idx: u32, edge: SeqNumber) {
        self.on_plain_ack_sent(idx, edge);
        let c = &self.conns[idx];
        if c.active != NONE {
            self.active[c.active].dsack = None;
        }
    }

    /// Updates the state after a segment was sent that had no duplicate to report.
    #[inline(always)]
    fn on_plain_ack_sent(&mut self, idx: u32, edge: SeqNumber) {
        let c = &mut self.conns[idx];
        c.rcv_edge = edge;
        c.rcv_wup = c.rcv_nxt;
        c.dec_quick_acks();
        c.flags.clear(Flags::ACK_NOW | Flags::ACK_DELAYED);
    }

    /// Returns the window field, and the right edge of the window that it advertises.
    #[inline(always)]
    pub fn window_field(&self, idx: u32, syn: bool) -> (u16, SeqNumber) {
        let c = &self.conns[idx];
        if syn {
            // The window in a SYN is never scaled (RFC 7323 §2.2).
            let window = c.rcv_wnd().min(65_535);
            return (window as u16, c.rcv_nxt + window);
        }
        let window = if c.state.may_receive() { self.select_window(idx) } else { c.rcv_wnd() };
        let (field, scale) = scaled_window(c, window);
        let edge = c.rcv_nxt + (u32::from(field) << scale);
        (field, if edge.lt(c.rcv_edge) && field == u16::MAX { c.rcv_edge } else { edge.max(c.rcv_nxt) })
    }

    /// Returns the options of a segment: timestamps and SACK blocks, or those of SYN and SYN+ACK.
    pub(super) fn options_for(&self, idx: u32, segment: &TxSegment) -> TcpOptions {
        let c = &self.conns[idx];
        if segment.flags.contains(TcpFlags::SYN) {
            return self.syn_options(idx, segment.flags.contains(TcpFlags::ACK));
        }
        let mut options = TcpOptions::default();
        if c.has(Flags::TIMESTAMPS) {
            let value = self.now_ms().wrapping_add(c.ts_offset);
            options.timestamps = Some(Timestamps { tsval: value, tsecr: c.ts_recent });
        }
        if c.active != NONE && c.has(Flags::SACK) {
            self.sack_blocks_for(idx, segment, &mut options);
        }
        options
    }

    /// Returns the options of SYN or SYN+ACK.
    #[inline(always)]
    fn syn_options(&self, idx: u32, is_syn_ack: bool) -> TcpOptions {
        let c = &self.conns[idx];
        let Self { config, .. } = self;
        // A passive open answers only options that were offered (RFC 7323 §1.3).
        let offers = |flag: Flags, configured: bool| if is_syn_ack { c.has(flag) } else { configured };
        let value = self.now_ms().wrapping_add(c.ts_offset);
        let timestamps = Timestamps { tsval: value, tsecr: c.ts_recent };
        TcpOptions {
            mss: Some(self.advmss(idx)),
            sack_permitted: offers(Flags::SACK, config.sack),
            window_scale: offers(Flags::WSCALE, config.window_scaling).then_some(c.rcv_wscale()),
            timestamps: offers(Flags::TIMESTAMPS, config.timestamps).then_some(timestamps),
            ..TcpOptions::default()
        }
    }

    /// Appends SACK blocks: the range that was received twice, then ranges out of order, the most recently
    /// changed first (RFC 2883 §4, RFC 2018 §4), with a FIN as their last sequence number or after them.
    fn sack_blocks_for(&self, idx: u32, segment: &TxSegment, options: &mut TcpOptions) {
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        let payload = segment.gso_size.map_or(segment.len, u32::from);
        let room = match payload {
            0 => max_sack_blocks(c),
            // As many blocks as fit beside the payload: a retransmission may leave no room.
            _ => {
                let left = c.mss().saturating_sub(payload).saturating_sub(SACK_FIXED_BYTES);
                max_sack_blocks(c).min((left / SACK_BLOCK_BYTES) as usize)
            }
        };
        if room == 0 {
            return;
        }
        if let Some(block) = b.dsack {
            options.sack_blocks.push(block);
        }
        let mut fin = b.reported_fin();
        if b.recv.range_count() == 0 && fin.is_none() {
            return;
        }
        // Ranges count from the first unread byte, which is `contiguous` bytes before `rcv_nxt`.
        let base = c.rcv_nxt - b.recv.contiguous() as u32;
        for (start, end) in b.recv.ranges() {
            if options.sack_blocks.len() == room {
                break;
            }
            let end = base + end as u32;
            let end = if fin == Some(end) { end + fin.take().map_or(0, |_| 1) } else { end };
            options.sack_blocks.push((base + start as u32, end));
        }
        if let Some(fin) = fin.filter(|_| options.sack_blocks.len() < room) {
            options.sack_blocks.push((fin, fin + 1));
        }
    }
}
