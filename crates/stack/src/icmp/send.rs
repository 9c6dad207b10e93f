//! Transmission of ICMP errors. No error is sent about an ICMP error, about a packet from or to a group, or
//! about a fragment other than the first (RFC 1122 §3.2.2, RFC 4443 §2.4), and the rate limit applies.

use crate::device::Label;
use crate::ip::{IpHeader, Ipv4Packet, Ipv6Packet, Ipv6ParameterProblem, L4, Network};
use crate::time::Instant;
use crate::wire::{icmpv4, icmpv6, ipv6, protocol};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Why a transport rejects a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnreachableReason {
    /// No socket has the port.
    Port,
    /// A rule prohibits it.
    Prohibited,
}

/// Precedence "internetwork control", which ICMP errors have (RFC 1812 §4.3.2.5).
const ERROR_TOS: u8 = 0xc0;

impl Network {
    /// Reports to the sender of a segment that it cannot be delivered. Nothing is sent about a packet to a
    /// broadcast or multicast address.
    pub fn send_icmp_unreachable(&mut self, now: Instant, l4: &L4<'_>, reason: UnreachableReason) {
        if l4.broadcast {
            return;
        }
        match (l4.src, l4.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let code = match reason {
                    UnreachableReason::Port => icmpv4::unreachable::PORT,
                    UnreachableReason::Prohibited => icmpv4::unreachable::ADMINISTRATIVELY_PROHIBITED,
                };
                let quote = quote(l4.ip_packet, icmpv4::QUOTE_LEN_MAX);
                self.send_error_v4(now, src, dst, &icmpv4::Message::Unreachable { code, mtu: 0, quote });
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let code = match reason {
                    UnreachableReason::Port => icmpv6::unreachable::PORT,
                    UnreachableReason::Prohibited => icmpv6::unreachable::ADMINISTRATIVELY_PROHIBITED,
                };
                let quote = quote(l4.ip_packet, icmpv6::QUOTE_LEN_MAX);
                self.send_error_v6(now, src, Some(dst), &icmpv6::Message::Unreachable { code, quote });
            }
            _ => {}
        }
    }

    /// Reports an IPv4 packet of an unknown protocol.
    pub(crate) fn reject_protocol_v4(&mut self, now: Instant, packet: &Ipv4Packet<'_>) {
        if !packet.broadcast {
            let code = icmpv4::unreachable::PROTOCOL;
            let quote = quote(packet.bytes, icmpv4::QUOTE_LEN_MAX);
            let message = icmpv4::Message::Unreachable { code, mtu: 0, quote };
            self.send_error_v4(now, packet.header.src, packet.header.dst, &message);
        }
    }

    /// Reports an IPv6 packet with an unknown next header, as a parameter problem (RFC 4443 §3.4).
    pub(crate) fn reject_protocol_v6(&mut self, now: Instant, packet: &Ipv6Packet<'_>) {
        // RFC 8200 §4.7: a packet without a next header has nothing to be rejected.
        if packet.chain.protocol == protocol::NO_NEXT_HEADER {
            return;
        }
        let problem = Ipv6ParameterProblem {
            header: packet.header,
            bytes: packet.bytes,
            code: icmpv6::parameter_problem::UNKNOWN_NEXT_HEADER,
            // Cannot truncate: an offset within a packet.
            pointer: packet.chain.next_header_offset as u32,
            even_if_multicast: false,
        };
        self.send_parameter_problem(now, &problem);
    }

    /// Reports to the sender which byte of its packet is not understood.
    pub(crate) fn send_parameter_problem(&mut self, now: Instant, problem: &Ipv6ParameterProblem<'_>) {
        let dst = problem.header.dst;
        if (dst.is_multicast() && !problem.even_if_multicast) || is_icmpv6_error(problem.bytes) {
            return;
        }
        let quote = quote(problem.bytes, icmpv6::QUOTE_LEN_MAX);
        let message =
            icmpv6::Message::ParameterProblem { code: problem.code, pointer: problem.pointer, quote };
        let from = (!dst.is_multicast()).then_some(dst);
        self.send_error_v6(now, problem.header.src, from, &message);
    }

    /// Reports to the sender that fragments of its packet did not arrive in time. `first` is the first
    /// fragment.
    pub(crate) fn send_reassembly_timeout(&mut self, now: Instant, first: &[u8]) {
        match first.first().map(|byte| byte >> 4) {
            Some(4) => {
                let Ok((header, _)) = crate::wire::ipv4::Header::parse_quoted(first) else { return };
                let code = icmpv4::time_exceeded::REASSEMBLY;
                let quote = quote(first, icmpv4::QUOTE_LEN_MAX);
                let message = icmpv4::Message::TimeExceeded { code, quote };
                self.send_error_v4(now, header.src, header.dst, &message);
            }
            Some(6) => {
                let Ok(header) = ipv6::Header::parse_quoted(first) else { return };
                let code = icmpv6::time_exceeded::REASSEMBLY;
                let quote = quote(first, icmpv6::QUOTE_LEN_MAX);
                if !is_icmpv6_error(first) {
                    let message = icmpv6::Message::TimeExceeded { code, quote };
                    self.send_error_v6(now, header.src, Some(header.dst), &message);
                }
            }
            _ => {}
        }
    }

    /// Returns whether the rate limit permits an error to this address. Errors to local addresses are not
    /// limited, as on Linux.
    fn may_send_error(&mut self, now: Instant, to: IpAddr) -> bool {
        self.local.link_of(to).is_some() || self.icmp_limit.allow(now, to)
    }

    fn send_error_v4(&mut self, now: Instant, to: Ipv4Addr, from: Ipv4Addr, message: &icmpv4::Message<'_>) {
        if !self.may_send_error(now, to.into()) {
            self.stats.icmp_errors_limited += 1;
            return;
        }
        let len = message.encoded_len();
        self.send_error(now, to.into(), Some(from.into()), protocol::ICMP, len, |_, out| {
            message.emit(out);
        });
    }

    fn send_error_v6(
        &mut self,
        now: Instant,
        to: Ipv6Addr,
        from: Option<Ipv6Addr>,
        message: &icmpv6::Message<'_>,
    ) {
        if to.is_unspecified() {
            return;
        }
        if !self.may_send_error(now, to.into()) {
            self.stats.icmp_errors_limited += 1;
            return;
        }
        let len = message.encoded_len();
        self.send_error(now, to.into(), from.map(IpAddr::V6), protocol::ICMPV6, len, |src, out| {
            if let IpAddr::V6(src) = src {
                message.emit(src, to, out);
            }
        });
    }

    fn send_error(
        &mut self,
        now: Instant,
        to: IpAddr,
        from: Option<IpAddr>,
        protocol: u8,
        len: usize,
        write: impl FnOnce(IpAddr, &mut [u8]),
    ) {
        let Ok(route) = self.route(now, to, from) else { return };
        let hop_limit = self.link(route.hop.link()).hop_limit;
        let tos = if to.is_ipv4() { ERROR_TOS } else { 0 };
        let header = IpHeader {
            src: route.src,
            dst: to,
            protocol,
            tos,
            hop_limit,
            dont_fragment: false,
            flow_label: 0,
            label: Label::NONE,
        };
        match self.send_datagram(now, &route, &header, len, None, |out| write(route.src, out)) {
            Ok(()) => self.stats.icmp_errors_out += 1,
            Err(_) => self.stats.tx_control_dropped += 1,
        }
    }
}

/// Returns as much of a packet as an error may quote.
fn quote(packet: &[u8], len_max: usize) -> &[u8] {
    &packet[..packet.len().min(len_max)]
}

/// Returns whether an IPv6 packet carries an ICMPv6 error. Extension headers that are not understood are
/// skipped as far as possible.
fn is_icmpv6_error(packet: &[u8]) -> bool {
    let Ok(header) = ipv6::Header::parse_quoted(packet) else { return true };
    let (mut next, mut rest) = (header.next_header, &packet[ipv6::Header::LEN..]);
    for _ in 0..ipv6::EXTENSION_HEADERS_MAX {
        let Some(&[following, units]) = rest.first_chunk::<2>() else { return false };
        let len = match next {
            protocol::HOP_BY_HOP | protocol::ROUTING | protocol::DESTINATION_OPTIONS => {
                8 + usize::from(units) * 8
            }
            protocol::FRAGMENT => 8,
            _ => break,
        };
        rest = rest.get(len..).unwrap_or(&[]);
        next = following;
    }
    next == protocol::ICMPV6 && rest.first().is_some_and(|&kind| !icmpv6::is_query(kind))
}
