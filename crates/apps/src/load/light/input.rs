//! What a received frame does: RFC 9293 §3.10.7 for a client, with the checks of RFC 5961.

use super::conn::{FLIGHT_SEGMENTS_MAX, Flags, NO_SLOT, State};
use super::frames::{self, Arrival, NEIGHBOUR_BYTES, Numbers, Received};
use super::locals::Tenant;
use super::network::Net;
use super::target::WINDOW;
use crate::load::stats::Failure;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use ginnel_stack::device::RxFrame;
use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags, TcpOptions};
use ginnel_stack::wire::{MacAddr, arp, ndp};

/// Longest payload for a peer that says nothing of it (RFC 9293 §3.7.1).
const MSS_DEFAULT_V4: u16 = 536;
const MSS_DEFAULT_V6: u16 = 1_220;
/// Less is not believed: segments would be mostly headers.
const MSS_MIN: u16 = 64;
/// A connection that wants room is told when so few bytes are waiting.
const ROOMY: u32 = 32 << 10;

/// What the session is to be told.
#[derive(Debug)]
pub(super) enum Outcome<'a> {
    Nothing,
    Connected(u32),
    Ended(u32, Failure),
    Progress(Progress<'a>),
}

/// Something came on a connection that the session knows.
#[derive(Debug)]
pub(super) struct Progress<'a> {
    pub slot: u32,
    pub conn: u32,
    pub port: u16,
    pub source: u16,
    /// There is room to send again.
    pub writable: bool,
    pub data: &'a [u8],
    /// The peer's last byte was before this.
    pub fin: bool,
}

impl Net {
    /// Takes in a frame.
    #[inline]
    pub fn receive<'a>(&mut self, frame: &RxFrame<'a>) -> Outcome<'a> {
        match frames::parse(frame, self.out.mac, &self.locals) {
            Some(Received::Tcp(arrival)) => self.segment(&arrival),
            Some(other) => {
                self.other(&other);
                Outcome::Nothing
            }
            None => Outcome::Nothing,
        }
    }

    #[inline]
    fn segment<'a>(&mut self, arrival: &Arrival<'a>) -> Outcome<'a> {
        let header = &arrival.segment.header;
        let tenant = self.locals.tenant(arrival.local, header.dst_port);
        let Tenant::Conn(conn) = tenant else { return self.stranger(arrival, tenant == Tenant::Ended) };
        let c = &self.conns[conn as usize];
        let target = &self.targets[usize::from(c.target)];
        if target.address.ip() != arrival.from || target.address.port() != header.src_port {
            return self.stranger(arrival, false);
        }
        match c.state {
            State::SynSent => self.syn_sent(conn, arrival),
            _ => self.synchronized(conn, arrival),
        }
    }

    /// RFC 9293 §3.10.7.3. A SYN without ACK, from a peer that opens at the same time, is for servers to send; it is ignored.
    fn syn_sent<'a>(&mut self, conn: u32, arrival: &Arrival<'a>) -> Outcome<'a> {
        let segment = &arrival.segment;
        let header = &segment.header;
        let c = &mut self.conns[conn as usize];
        if !header.flags.contains(TcpFlags::ACK) {
            return Outcome::Nothing;
        }
        if header.ack != c.nxt {
            return self.stranger(arrival, false);
        }
        let slot = c.slot;
        if header.flags.contains(TcpFlags::RST) {
            self.release(conn, false);
            return Outcome::Ended(slot, Failure::Refused);
        }
        if !header.flags.contains(TcpFlags::SYN) {
            return Outcome::Nothing;
        }
        let options = TcpOptions::parse(segment.options);
        let default = if arrival.from.is_ipv4() { MSS_DEFAULT_V4 } else { MSS_DEFAULT_V6 };
        let target = &mut self.targets[usize::from(c.target)];
        c.mss = options.mss.unwrap_or(default).max(MSS_MIN).min(target.mss);
        c.shift = options.window_scale.unwrap_or(0);
        // RFC 7323 §2.2: the window of a SYN is not scaled.
        c.window = header.window.into();
        c.rcv_nxt = header.seq + 1;
        c.una = header.ack;
        if c.flags.has(Flags::TIMING) {
            target.measured(self.now_us.wrapping_sub(c.sent_at));
        }
        c.flags.clear(Flags::TIMING);
        c.flags.clear(Flags::ARMED);
        if let Some(timestamps) = options.timestamps {
            // A peer that sends them unasked gets none, and what it sends is skipped.
            c.ts_recent = timestamps.value;
            self.agree_on_timestamps(conn);
        }
        let c = &mut self.conns[conn as usize];
        c.retries = 0;
        c.state = State::Established;
        self.owe_ack(conn);
        Outcome::Connected(slot)
    }

    /// RFC 9293 §3.10.7.4.
    #[inline]
    fn synchronized<'a>(&mut self, conn: u32, arrival: &Arrival<'a>) -> Outcome<'a> {
        let segment = &arrival.segment;
        let header = &segment.header;
        let c = &mut self.conns[conn as usize];
        let ahead = header.seq - c.rcv_nxt;
        if c.flags.has(Flags::TIMESTAMPS)
            && let Some(timestamps) = TcpOptions::parse(segment.options).timestamps
        {
            let newer = timestamps.value.wrapping_sub(c.ts_recent) as i32;
            if newer < 0 && !header.flags.contains(TcpFlags::RST) {
                // RFC 7323 §5.3: a duplicate from an earlier time.
                self.control(conn, TcpFlags::ACK);
                return Outcome::Nothing;
            }
            // RFC 7323 §4.3: of several segments that are acknowledged together the first one's is echoed.
            if newer > 0 && ahead <= 0 && !c.flags.has(Flags::ACK) {
                c.ts_recent = timestamps.value;
            }
        }
        if header.flags.intersects(TcpFlags::RST | TcpFlags::SYN) {
            return self.reset_or_syn(conn, header.flags, ahead);
        }
        if !header.flags.contains(TcpFlags::ACK) {
            return Outcome::Nothing;
        }
        // First, sequence number: within the window, and what came before is cut off.
        let (mut data, fin) = (segment.payload, header.flags.contains(TcpFlags::FIN));
        if ahead != 0 {
            let known = ahead.unsigned_abs() as usize;
            if ahead > WINDOW as i32 || (ahead < 0 && known >= data.len() + usize::from(fin)) {
                self.control(conn, TcpFlags::ACK);
                return Outcome::Nothing;
            }
            if ahead < 0 {
                data = data.get(known..).unwrap_or(&[]);
            }
        }
        // Fifth, acknowledgement.
        let acked = header.ack - c.una;
        if acked > 0 {
            if header.ack.gt(c.max) {
                self.control(conn, TcpFlags::ACK);
                return Outcome::Nothing;
            }
            if self.acknowledged(conn, acked as u32, header.ack) {
                return Outcome::Nothing;
            }
        }
        let c = &mut self.conns[conn as usize];
        if acked > 0 || (acked == 0 && ahead >= 0) {
            c.window = u32::from(header.window) << c.shift;
            if c.window == 0 && c.retries > 0 {
                self.probe_answered(conn);
            }
        }
        let c = &mut self.conns[conn as usize];
        if c.waiting.len() > (c.nxt - c.una) as u32 {
            self.transmit(conn, false);
        }
        let c = &mut self.conns[conn as usize];
        let (slot, port, source) = (c.slot, c.port, c.source);
        let writable = c.flags.has(Flags::WANTS_ROOM) && c.waiting.len() <= ROOMY;
        if writable {
            c.flags.clear(Flags::WANTS_ROOM);
        }
        // Seventh and eighth, text and FIN.
        let (mut taken, mut ended): (&[u8], bool) = (&[], false);
        if !data.is_empty() || fin {
            if ahead > 0 {
                // Out of order: it comes again, and sooner for the second acknowledgement (RFC 5681 §4.2).
                self.control(conn, TcpFlags::ACK);
            } else if matches!(c.state, State::Established | State::FinWait1 | State::FinWait2) {
                if slot == NO_SLOT && !data.is_empty() {
                    // Nobody is there to read it, and the peer should know (RFC 9293 §3.6.1).
                    self.control(conn, TcpFlags::RST | TcpFlags::ACK);
                    self.release(conn, false);
                    return Outcome::Nothing;
                }
                c.rcv_nxt += data.len() as u32 + u32::from(fin);
                (taken, ended) = (data, fin);
                self.owe_ack(conn);
                if fin {
                    self.fin_received(conn);
                }
            } else {
                // Behind a FIN there is nothing.
                self.control(conn, TcpFlags::ACK);
            }
        }
        if slot == NO_SLOT || !(writable || ended || !taken.is_empty()) {
            return Outcome::Nothing;
        }
        Outcome::Progress(Progress { slot, conn, port, source, writable, data: taken, fin: ended })
    }

    /// Something that was sent has arrived. True if that was the connection's end.
    #[inline]
    fn acknowledged(&mut self, conn: u32, acked: u32, ack: SeqNumber) -> bool {
        let c = &mut self.conns[conn as usize];
        let data = acked.min(c.waiting.len());
        if data > 0 {
            self.buffers.forget(&mut c.waiting, data);
        }
        c.una = ack;
        c.nxt = c.nxt.max(ack);
        if c.flags.has(Flags::TIMING) {
            c.flags.clear(Flags::TIMING);
            self.targets[usize::from(c.target)].measured(self.now_us.wrapping_sub(c.sent_at));
        }
        c.retries = 0;
        c.flight = c.flight.saturating_mul(2).min(FLIGHT_SEGMENTS_MAX);
        // RFC 6298 §5.2, 5.3.
        c.flags.clear(Flags::ARMED);
        if !c.is_quiet() || c.waiting.len() > 0 {
            let ms = self.targets[usize::from(c.target)].rto_ms(0);
            self.arm(conn, ms);
        } else if acked > data {
            c.flags.clear(Flags::FIN);
            match c.state {
                State::FinWait1 => {
                    c.state = State::FinWait2;
                    self.await_fin(conn);
                }
                State::Closing | State::LastAck => {
                    self.release(conn, true);
                    return true;
                }
                _ => {}
            }
        }
        false
    }

    fn fin_received(&mut self, conn: u32) {
        let c = &mut self.conns[conn as usize];
        match c.state {
            State::Established => c.state = State::CloseWait,
            State::FinWait1 => c.state = State::Closing,
            State::FinWait2 => {
                self.control(conn, TcpFlags::ACK);
                self.release(conn, true);
            }
            _ => {}
        }
    }

    /// An acknowledgement is to leave with the next segment, or at the end of the burst.
    #[inline]
    fn owe_ack(&mut self, conn: u32) {
        let c = &mut self.conns[conn as usize];
        if !c.flags.has(Flags::ACK) {
            c.flags.set(Flags::ACK);
            self.unacked.push(conn);
        }
    }

    /// RFC 5961 §3.2, §4.2: a reset counts only where the next byte is expected; others, and SYNs, are answered with an acknowledgement.
    #[cold]
    fn reset_or_syn<'a>(&mut self, conn: u32, flags: TcpFlags, ahead: i32) -> Outcome<'a> {
        let slot = self.conns[conn as usize].slot;
        if flags.contains(TcpFlags::RST) && ahead == 0 {
            self.release(conn, false);
            return if slot == NO_SLOT { Outcome::Nothing } else { Outcome::Ended(slot, Failure::Reset) };
        }
        if !flags.contains(TcpFlags::RST) || (ahead > 0 && ahead <= WINDOW as i32) {
            self.control(conn, TcpFlags::ACK);
        }
        Outcome::Nothing
    }

    /// A segment of no connection: it is reset (RFC 9293 §3.10.7.1). But the FIN of one that was closed in good order is acknowledged once
    /// more, as TIME-WAIT would: the first acknowledgement was lost.
    #[cold]
    fn stranger<'a>(&mut self, arrival: &Arrival<'a>, ended: bool) -> Outcome<'a> {
        let header = &arrival.segment.header;
        if header.flags.contains(TcpFlags::RST) {
            return Outcome::Nothing;
        }
        let has_ack = header.flags.contains(TcpFlags::ACK);
        let end = header.seq + arrival.segment.seq_len();
        let (seq, ack, flags) = match has_ack {
            true if ended && header.flags.without(TcpFlags::PSH) == TcpFlags::FIN | TcpFlags::ACK => {
                (header.ack, end, TcpFlags::ACK)
            }
            true => (header.ack, SeqNumber(0), TcpFlags::RST),
            false => (SeqNumber(0), end, TcpFlags::RST | TcpFlags::ACK),
        };
        let to = SocketAddr::new(arrival.from, header.src_port);
        let numbers = Numbers { port: header.dst_port, seq, ack, flags };
        if arrival.mac.is_unicast() {
            self.reply(to, arrival.mac, arrival.local, numbers);
        }
        Outcome::Nothing
    }

    #[cold]
    fn other(&mut self, received: &Received<'_>) {
        match received {
            Received::Tcp(_) => {}
            Received::Arp(packet) => self.arp(packet),
            Received::Ndp { message, src, src_mac } => self.ndp(message, *src, *src_mac),
            Received::TooBig { to, mtu } => {
                self.targets.iter_mut().filter(|t| t.address.ip() == *to).for_each(|t| t.limit(*mtu));
            }
        }
    }

    /// RFC 826, “Packet Reception”.
    fn arp(&mut self, packet: &arp::Packet) {
        if self.locals.number_v4(packet.target_ip).is_none() {
            return;
        }
        self.heard_of(packet.sender_ip.into(), packet.sender_mac);
        if packet.operation == arp::Operation::Request && packet.sender_mac.is_unicast() {
            let reply = arp::Packet {
                operation: arp::Operation::Reply,
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
    fn ndp(&mut self, message: &ndp::Message, src: Ipv6Addr, src_mac: MacAddr) {
        match *message {
            ndp::Message::NeighbourSolicitation { target, source, .. } => {
                if self.locals.number_v6(target).is_none() {
                    return;
                }
                let Some(mac) = source.or((!src.is_unspecified()).then_some(src_mac)) else {
                    // Somebody wants to take an address of ours.
                    return self.advertise(target, None);
                };
                if let Some(source) = source {
                    self.heard_of(src.into(), source);
                }
                self.advertise(target, Some((src, mac)));
            }
            ndp::Message::NeighbourAdvertisement { target, target_mac: Some(mac), .. } => {
                self.heard_of(target.into(), mac);
            }
            _ => {}
        }
    }

    fn advertise(&mut self, target: Ipv6Addr, to: Option<(Ipv6Addr, MacAddr)>) {
        const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
        let (dst, mac) = to.unwrap_or((ALL_NODES, MacAddr::from_ipv6_multicast(ALL_NODES)));
        let message = ndp::Message::NeighbourAdvertisement {
            target,
            router: false,
            solicited: to.is_some(),
            overrides: true,
            target_mac: Some(self.out.mac),
        };
        let mut frame = [0; NEIGHBOUR_BYTES];
        let len = frames::ndp(&message, (target, dst), (self.out.mac, mac), &mut frame);
        self.send_frame(&frame[..len]);
    }

    fn heard_of(&mut self, address: IpAddr, mac: MacAddr) {
        let Some(number) = self.neighbours.iter().position(|n| n.address == address) else { return };
        if self.neighbours[number].learn(mac) {
            self.found(number);
        }
    }
}
