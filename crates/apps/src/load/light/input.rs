//! Handles received frames: RFC 9293 §3.10.7 for a client, with the checks of RFC 5961.

use super::conn::{CWND_SEGMENTS_MAX, ConnFlags, NO_SLOT, TcpState};
use super::destination::WINDOW;
use super::frames::{self, NEIGHBOUR_BYTES, NdpAddresses, ReceivedPacket, ReceivedSegment, SegmentFields};
use super::locals::PortUser;
use super::network::LightNetwork;
use crate::load::stats::Failure;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use ginnel_stack::device::RxFrame;
use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags, TcpOptions};
use ginnel_stack::wire::{MacAddr, arp, ndp};

/// MSS of a peer that sends no MSS option (RFC 9293 §3.7.1).
const MSS_DEFAULT_V4: u16 = 536;
const MSS_DEFAULT_V6: u16 = 1_220;
/// Smallest MSS that is accepted; smaller segments would consist mostly of headers.
const MSS_MIN: u16 = 64;
/// The session is told that it can send again when this many bytes or fewer are in the send queue.
const WRITABLE_BELOW: u32 = 32 << 10;

/// Effect of a frame that is reported to the session.
#[derive(Debug)]
pub(super) enum InputEvent<'a> {
    Nothing,
    Connected(u32),
    Ended(u32, Failure),
    Progress(SegmentProgress<'a>),
}

/// A segment arrived on a connection of the session.
#[derive(Debug)]
pub(super) struct SegmentProgress<'a> {
    pub slot: u32,
    pub conn: u32,
    pub port: u16,
    pub source: u16,
    /// True if the send queue has room again.
    pub writable: bool,
    pub data: &'a [u8],
    /// True if the peer has sent FIN, and `data` are its last bytes.
    pub fin: bool,
}

impl LightNetwork {
    /// Handles a received frame.
    #[inline]
    pub fn receive<'a>(&mut self, frame: &RxFrame<'a>) -> InputEvent<'a> {
        match frames::parse(frame, self.out.mac, &self.locals) {
            Some(ReceivedPacket::Tcp(arrival)) => self.on_segment(&arrival),
            Some(other) => {
                self.on_control_packet(&other);
                InputEvent::Nothing
            }
            None => InputEvent::Nothing,
        }
    }

    #[inline]
    fn on_segment<'a>(&mut self, received: &ReceivedSegment<'a>) -> InputEvent<'a> {
        let header = &received.segment.header;
        let user = self.locals.port_user(received.local, header.dst_port);
        let PortUser::Conn(conn) = user else {
            return self.on_unknown_segment(received, user == PortUser::Ended);
        };
        let c = &self.conns[conn as usize];
        let destination = &self.destinations[usize::from(c.destination)];
        if destination.address.ip() != received.from || destination.address.port() != header.src_port {
            return self.on_unknown_segment(received, false);
        }
        match c.state {
            TcpState::SynSent => self.on_syn_sent(conn, received),
            _ => self.on_synchronized(conn, received),
        }
    }

    /// RFC 9293 §3.10.7.3. A SYN without ACK (a simultaneous open) is ignored.
    fn on_syn_sent<'a>(&mut self, conn: u32, received: &ReceivedSegment<'a>) -> InputEvent<'a> {
        let segment = &received.segment;
        let header = &segment.header;
        let c = &mut self.conns[conn as usize];
        if !header.flags.contains(TcpFlags::ACK) {
            return InputEvent::Nothing;
        }
        if header.ack != c.snd_nxt {
            return self.on_unknown_segment(received, false);
        }
        let slot = c.slot;
        if header.flags.contains(TcpFlags::RST) {
            self.release(conn, false);
            return InputEvent::Ended(slot, Failure::Refused);
        }
        if !header.flags.contains(TcpFlags::SYN) {
            return InputEvent::Nothing;
        }
        let options = TcpOptions::parse(segment.options);
        let default = if received.from.is_ipv4() { MSS_DEFAULT_V4 } else { MSS_DEFAULT_V6 };
        let destination = &mut self.destinations[usize::from(c.destination)];
        c.mss = options.mss.unwrap_or(default).max(MSS_MIN).min(destination.mss);
        c.snd_wscale = options.window_scale.unwrap_or(0);
        // RFC 7323 §2.2: the window of a SYN is not scaled.
        c.snd_wnd = header.window.into();
        c.rcv_nxt = header.seq + 1;
        c.snd_una = header.ack;
        if c.flags.has(ConnFlags::RTT_TIMED) {
            destination.record_rtt(self.now_us.wrapping_sub(c.sent_at));
        }
        c.flags.clear(ConnFlags::RTT_TIMED);
        c.flags.clear(ConnFlags::ARMED);
        if let Some(timestamps) = options.timestamps {
            // If the peer sends timestamps that were not offered, none are sent, and received ones are
            // ignored.
            c.ts_recent = timestamps.tsval;
            self.enable_timestamps(conn);
        }
        let c = &mut self.conns[conn as usize];
        c.retries = 0;
        c.state = TcpState::Established;
        self.schedule_ack(conn);
        InputEvent::Connected(slot)
    }

    /// RFC 9293 §3.10.7.4.
    #[inline]
    fn on_synchronized<'a>(&mut self, conn: u32, received: &ReceivedSegment<'a>) -> InputEvent<'a> {
        let segment = &received.segment;
        let header = &segment.header;
        let c = &mut self.conns[conn as usize];
        let ahead = header.seq - c.rcv_nxt;
        if c.flags.has(ConnFlags::TIMESTAMPS)
            && let Some(timestamps) = TcpOptions::parse(segment.options).timestamps
        {
            let newer = timestamps.tsval.wrapping_sub(c.ts_recent) as i32;
            if newer < 0 && !header.flags.contains(TcpFlags::RST) {
                // RFC 7323 §5.3: an old duplicate.
                self.send_control(conn, TcpFlags::ACK);
                return InputEvent::Nothing;
            }
            // RFC 7323 §4.3: the timestamp of the first of several segments that are acknowledged together is
            // echoed.
            if newer > 0 && ahead <= 0 && !c.flags.has(ConnFlags::ACK_PENDING) {
                c.ts_recent = timestamps.tsval;
            }
        }
        if header.flags.intersects(TcpFlags::RST | TcpFlags::SYN) {
            return self.on_rst_or_syn(conn, header.flags, ahead);
        }
        if !header.flags.contains(TcpFlags::ACK) {
            return InputEvent::Nothing;
        }
        // First, sequence number: it must be in the window; bytes that were received before are cut off.
        let (mut data, fin) = (segment.payload, header.flags.contains(TcpFlags::FIN));
        if ahead != 0 {
            let known = ahead.unsigned_abs() as usize;
            if ahead > WINDOW as i32 || (ahead < 0 && known >= data.len() + usize::from(fin)) {
                self.send_control(conn, TcpFlags::ACK);
                return InputEvent::Nothing;
            }
            if ahead < 0 {
                data = data.get(known..).unwrap_or(&[]);
            }
        }
        // Fifth, acknowledgement.
        let acked = header.ack - c.snd_una;
        if acked > 0 {
            if header.ack.gt(c.snd_max) {
                self.send_control(conn, TcpFlags::ACK);
                return InputEvent::Nothing;
            }
            if self.on_ack(conn, acked as u32, header.ack) {
                return InputEvent::Nothing;
            }
        }
        let c = &mut self.conns[conn as usize];
        if acked > 0 || (acked == 0 && ahead >= 0) {
            c.snd_wnd = u32::from(header.window) << c.snd_wscale;
            if c.snd_wnd == 0 && c.retries > 0 {
                self.probe_answered(conn);
            }
        }
        let c = &mut self.conns[conn as usize];
        if c.send_queue.len() > (c.snd_nxt - c.snd_una) as u32 {
            self.transmit(conn, false);
        }
        let c = &mut self.conns[conn as usize];
        let (slot, port, source) = (c.slot, c.port, c.source);
        let writable = c.flags.has(ConnFlags::WANTS_WRITABLE) && c.send_queue.len() <= WRITABLE_BELOW;
        if writable {
            c.flags.clear(ConnFlags::WANTS_WRITABLE);
        }
        // Seventh and eighth, text and FIN.
        let (mut taken, mut is_fin): (&[u8], bool) = (&[], false);
        if !data.is_empty() || fin {
            if ahead > 0 {
                // Out of order: the peer retransmits, and earlier after a duplicate acknowledgement (RFC 5681
                // §4.2).
                self.send_control(conn, TcpFlags::ACK);
            } else if matches!(c.state, TcpState::Established | TcpState::FinWait1 | TcpState::FinWait2) {
                if slot == NO_SLOT && !data.is_empty() {
                    // Nobody reads the data, so the peer gets a reset (RFC 9293 §3.6.1).
                    self.send_control(conn, TcpFlags::RST | TcpFlags::ACK);
                    self.release(conn, false);
                    return InputEvent::Nothing;
                }
                c.rcv_nxt += data.len() as u32 + u32::from(fin);
                (taken, is_fin) = (data, fin);
                self.schedule_ack(conn);
                if fin {
                    self.on_fin(conn);
                }
            } else {
                // Data after a FIN are not accepted.
                self.send_control(conn, TcpFlags::ACK);
            }
        }
        if slot == NO_SLOT || !(writable || is_fin || !taken.is_empty()) {
            return InputEvent::Nothing;
        }
        InputEvent::Progress(SegmentProgress { slot, conn, port, source, writable, data: taken, fin: is_fin })
    }

    /// Handles the acknowledgement of new data or FIN. Returns true if it ended the connection.
    #[inline]
    fn on_ack(&mut self, conn: u32, acked: u32, ack: SeqNumber) -> bool {
        let c = &mut self.conns[conn as usize];
        let data = acked.min(c.send_queue.len());
        if data > 0 {
            self.buffers.acknowledge(&mut c.send_queue, data);
        }
        c.snd_una = ack;
        c.snd_nxt = c.snd_nxt.max(ack);
        if c.flags.has(ConnFlags::RTT_TIMED) {
            c.flags.clear(ConnFlags::RTT_TIMED);
            self.destinations[usize::from(c.destination)].record_rtt(self.now_us.wrapping_sub(c.sent_at));
        }
        c.retries = 0;
        c.cwnd_segments = c.cwnd_segments.saturating_mul(2).min(CWND_SEGMENTS_MAX);
        // RFC 6298 §5.2, 5.3.
        c.flags.clear(ConnFlags::ARMED);
        if !c.is_all_acked() || c.send_queue.len() > 0 {
            let ms = self.destinations[usize::from(c.destination)].rto_ms(0);
            self.arm(conn, ms);
        } else if acked > data {
            c.flags.clear(ConnFlags::FIN_PENDING);
            match c.state {
                TcpState::FinWait1 => {
                    c.state = TcpState::FinWait2;
                    self.arm_fin_wait_2(conn);
                }
                TcpState::Closing | TcpState::LastAck => {
                    self.release(conn, true);
                    return true;
                }
                _ => {}
            }
        }
        false
    }

    fn on_fin(&mut self, conn: u32) {
        let c = &mut self.conns[conn as usize];
        match c.state {
            TcpState::Established => c.state = TcpState::CloseWait,
            TcpState::FinWait1 => c.state = TcpState::Closing,
            TcpState::FinWait2 => {
                self.send_control(conn, TcpFlags::ACK);
                self.release(conn, true);
            }
            _ => {}
        }
    }

    /// Requests an acknowledgement, which is sent with the next segment or at the end of the burst.
    #[inline]
    fn schedule_ack(&mut self, conn: u32) {
        let c = &mut self.conns[conn as usize];
        if !c.flags.has(ConnFlags::ACK_PENDING) {
            c.flags.set(ConnFlags::ACK_PENDING);
            self.unacked.push(conn);
        }
    }

    /// RFC 5961 §3.2, §4.2: a reset is only accepted with the expected sequence number. Other resets in the
    /// window, and SYNs, get a challenge ACK.
    #[cold]
    fn on_rst_or_syn<'a>(&mut self, conn: u32, flags: TcpFlags, ahead: i32) -> InputEvent<'a> {
        let slot = self.conns[conn as usize].slot;
        if flags.contains(TcpFlags::RST) && ahead == 0 {
            self.release(conn, false);
            return if slot == NO_SLOT {
                InputEvent::Nothing
            } else {
                InputEvent::Ended(slot, Failure::Reset)
            };
        }
        if !flags.contains(TcpFlags::RST) || (ahead > 0 && ahead <= WINDOW as i32) {
            self.send_control(conn, TcpFlags::ACK);
        }
        InputEvent::Nothing
    }

    /// Handles a segment without a connection, which is reset (RFC 9293 §3.10.7.1). But a FIN for a
    /// connection that was closed with FINs on both sides is acknowledged once more, as in TIME-WAIT: the
    /// first acknowledgement was lost.
    #[cold]
    fn on_unknown_segment<'a>(
        &mut self,
        received: &ReceivedSegment<'a>,
        closed_in_order: bool,
    ) -> InputEvent<'a> {
        let header = &received.segment.header;
        if header.flags.contains(TcpFlags::RST) {
            return InputEvent::Nothing;
        }
        let has_ack = header.flags.contains(TcpFlags::ACK);
        let end = header.seq + received.segment.seq_len();
        let (seq, ack, flags) = match has_ack {
            true if closed_in_order
                && header.flags.without(TcpFlags::PSH) == TcpFlags::FIN | TcpFlags::ACK =>
            {
                (header.ack, end, TcpFlags::ACK)
            }
            true => (header.ack, SeqNumber(0), TcpFlags::RST),
            false => (SeqNumber(0), end, TcpFlags::RST | TcpFlags::ACK),
        };
        let to = SocketAddr::new(received.from, header.src_port);
        let numbers = SegmentFields { port: header.dst_port, seq, ack, flags };
        if received.mac.is_unicast() {
            self.reply(to, received.mac, received.local, numbers);
        }
        InputEvent::Nothing
    }

    #[cold]
    fn on_control_packet(&mut self, received: &ReceivedPacket<'_>) {
        match received {
            ReceivedPacket::Tcp(_) => {}
            ReceivedPacket::Arp(packet) => self.on_arp(packet),
            ReceivedPacket::Ndp { message, src, src_mac } => self.on_ndp(message, *src, *src_mac),
            ReceivedPacket::TooBig { to, mtu } => {
                self.destinations
                    .iter_mut()
                    .filter(|t| t.address.ip() == *to)
                    .for_each(|t| t.lower_mtu(*mtu));
            }
        }
    }

    /// RFC 826, “Packet Reception”.
    fn on_arp(&mut self, packet: &arp::ArpPacket) {
        if self.locals.number_v4(packet.target_ip).is_none() {
            return;
        }
        self.learn_neighbour(packet.sender_ip.into(), packet.sender_mac);
        if packet.operation == arp::ArpOperation::Request && packet.sender_mac.is_unicast() {
            let reply = arp::ArpPacket {
                operation: arp::ArpOperation::Reply,
                sender_mac: self.out.mac,
                sender_ip: packet.target_ip,
                target_mac: packet.sender_mac,
                target_ip: packet.sender_ip,
            };
            let mut frame = [0; NEIGHBOUR_BYTES];
            let len = frames::arp(&reply, packet.sender_mac, &mut frame);
            self.send_frame(&frame[..len]);
        }
    }

    /// RFC 4861 §7.2.3–7.2.5.
    fn on_ndp(&mut self, message: &ndp::NdpMessage, src: Ipv6Addr, src_mac: MacAddr) {
        match *message {
            ndp::NdpMessage::NeighbourSolicitation { target, source_mac: source, .. } => {
                if self.locals.number_v6(target).is_none() {
                    return;
                }
                let Some(mac) = source.or((!src.is_unspecified()).then_some(src_mac)) else {
                    // Another host performs duplicate address detection for a local address.
                    return self.advertise(target, None);
                };
                if let Some(source) = source {
                    self.learn_neighbour(src.into(), source);
                }
                self.advertise(target, Some((src, mac)));
            }
            ndp::NdpMessage::NeighbourAdvertisement { target, target_mac: Some(mac), .. } => {
                self.learn_neighbour(target.into(), mac);
            }
            _ => {}
        }
    }

    fn advertise(&mut self, target: Ipv6Addr, to: Option<(Ipv6Addr, MacAddr)>) {
        const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
        let (dst, mac) = to.unwrap_or((ALL_NODES, MacAddr::from_ipv6_multicast(ALL_NODES)));
        let message = ndp::NdpMessage::NeighbourAdvertisement {
            target,
            router: false,
            solicited: to.is_some(),
            overrides: true,
            target_mac: Some(self.out.mac),
        };
        let mut frame = [0; NEIGHBOUR_BYTES];
        let addresses = NdpAddresses { src: target, dst, src_mac: self.out.mac, dst_mac: mac };
        let len = frames::ndp(&message, addresses, &mut frame);
        self.send_frame(&frame[..len]);
    }

    fn learn_neighbour(&mut self, address: IpAddr, mac: MacAddr) {
        let Some(number) = self.neighbours.iter().position(|n| n.address == address) else { return };
        if self.neighbours[number].update(mac) {
            self.apply_neighbour(number);
        }
    }
}
