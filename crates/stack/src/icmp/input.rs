//! Input of ICMP messages: echo requests are answered, errors are passed to the transport that sent the
//! quoted packet.

use super::error::{IcmpErrorKind, IcmpErrorOrigin, TransportError, parse_quoted_packet, quoted_udp_payload};
use super::extensions::IcmpExtensions;
use crate::device::Label;
use crate::handle::LinkId;
use crate::ip::{InputResult, IpHeader, Ipv4Packet, Ipv6Packet, Network};
use crate::link::is_unicast;
use crate::link::ndp::NdpPacket;
use crate::steering::ControlUpdate;
use crate::time::Instant;
use crate::wire::echo::Echo;
use crate::wire::{MacAddr, icmpv4, icmpv6, mld, protocol};
use core::net::IpAddr;

/// An echo request to be answered.
struct ReceivedEcho<'a> {
    /// The local address that the request was sent to; `None` if it was sent to a group.
    to: Option<IpAddr>,
    from: IpAddr,
    tos: u8,
    echo: Echo<'a>,
}

impl Network {
    /// Handles an ICMP message over IPv4.
    pub(crate) fn icmpv4_input(&mut self, now: Instant, packet: &Ipv4Packet<'_>) -> InputResult {
        self.stats.icmp_in += 1;
        let (src, dst) = (IpAddr::V4(packet.header.src), IpAddr::V4(packet.header.dst));
        let origin = IcmpErrorOrigin {
            offender: src,
            icmp_type: 0,
            icmp_code: 0,
            info: 0,
            extensions: None,
            hop_limit: packet.header.ttl,
        };
        match icmpv4::Message::parse(packet.payload) {
            Ok(icmpv4::Message::EchoRequest(echo)) => {
                // RFC 1122 §3.2.2.6: an attacker could direct the replies of a whole network to one host.
                if packet.broadcast {
                    self.stats.icmp_echo_ignored += 1;
                } else {
                    let tos = packet.header.dscp << 2 | packet.header.ecn;
                    self.send_echo_reply(now, &ReceivedEcho { to: Some(dst), from: src, tos, echo });
                }
            }
            Ok(icmpv4::Message::Unreachable { code, mtu, quote }) => {
                let info = if code == icmpv4::unreachable::FRAGMENTATION_NEEDED { mtu.into() } else { 0 };
                let origin =
                    IcmpErrorOrigin { icmp_type: icmpv4::UNREACHABLE, icmp_code: code, info, ..origin };
                return self.icmp_error(dst, packet.payload, quote, unreachable_v4(code, mtu), origin);
            }
            Ok(icmpv4::Message::TimeExceeded { code, quote }) => {
                let origin = IcmpErrorOrigin { icmp_type: icmpv4::TIME_EXCEEDED, icmp_code: code, ..origin };
                return self.icmp_error(dst, packet.payload, quote, IcmpErrorKind::TimeExceeded, origin);
            }
            Ok(icmpv4::Message::ParameterProblem { code, pointer, quote }) => {
                let icmp_type = icmpv4::PARAMETER_PROBLEM;
                let origin = IcmpErrorOrigin { icmp_type, icmp_code: code, info: pointer.into(), ..origin };
                return self.icmp_error(dst, packet.payload, quote, IcmpErrorKind::ParameterProblem, origin);
            }
            Ok(icmpv4::Message::Redirect { .. }) => self.stats.redirects_ignored += 1,
            Ok(icmpv4::Message::EchoReply(_) | icmpv4::Message::Other { .. }) => {
                self.stats.icmp_unhandled += 1;
            }
            Err(_) => self.stats.icmp_invalid += 1,
        }
        InputResult::Handled
    }

    /// Handles an ICMP message over IPv6. `source_mac` is `None` for reassembled packets.
    pub(crate) fn icmpv6_input(
        &mut self,
        now: Instant,
        link: LinkId,
        source_mac: Option<MacAddr>,
        packet: &Ipv6Packet<'_>,
    ) -> InputResult {
        self.stats.icmp_in += 1;
        let header = &packet.header;
        let (src, dst) = (IpAddr::V6(header.src), IpAddr::V6(header.dst));
        let origin = IcmpErrorOrigin {
            offender: src,
            icmp_type: 0,
            icmp_code: 0,
            info: 0,
            extensions: None,
            hop_limit: header.hop_limit,
        };
        match icmpv6::Message::parse(packet.payload, header.src, header.dst) {
            Ok(icmpv6::Message::EchoRequest(echo)) if !header.src.is_unspecified() => {
                let tos = header.dscp << 2 | header.ecn;
                // RFC 4443 §4.2: a request to a group is answered from a unicast address.
                let to = (!header.dst.is_multicast()).then_some(dst);
                self.send_echo_reply(now, &ReceivedEcho { to, from: src, tos, echo });
            }
            Ok(icmpv6::Message::Unreachable { code, quote }) => {
                let origin = IcmpErrorOrigin { icmp_type: icmpv6::UNREACHABLE, icmp_code: code, ..origin };
                return self.icmp_error(dst, packet.payload, quote, unreachable_v6(code), origin);
            }
            Ok(icmpv6::Message::PacketTooBig { mtu, quote }) => {
                let origin = IcmpErrorOrigin { icmp_type: icmpv6::PACKET_TOO_BIG, info: mtu, ..origin };
                let mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
                return self.icmp_error(
                    dst,
                    packet.payload,
                    quote,
                    IcmpErrorKind::PacketTooBig { mtu },
                    origin,
                );
            }
            Ok(icmpv6::Message::TimeExceeded { code, quote }) => {
                let origin = IcmpErrorOrigin { icmp_type: icmpv6::TIME_EXCEEDED, icmp_code: code, ..origin };
                return self.icmp_error(dst, packet.payload, quote, IcmpErrorKind::TimeExceeded, origin);
            }
            Ok(icmpv6::Message::ParameterProblem { code, pointer, quote }) => {
                let icmp_type = icmpv6::PARAMETER_PROBLEM;
                let origin = IcmpErrorOrigin { icmp_type, icmp_code: code, info: pointer, ..origin };
                return self.icmp_error(dst, packet.payload, quote, IcmpErrorKind::ParameterProblem, origin);
            }
            Ok(icmpv6::Message::Ndp(message)) => match source_mac {
                Some(source_mac) => {
                    let hop_limit = header.hop_limit;
                    let packet =
                        NdpPacket { link, source_mac, src: header.src, dst: header.dst, hop_limit, message };
                    self.ndp_input(now, &packet);
                }
                // RFC 6980 §5: fragmented neighbour discovery messages are ignored.
                None => self.stats.ndp_invalid += 1,
            },
            Ok(icmpv6::Message::MldQuery(message)) => {
                self.mld_query_input(now, link, header.src, header.hop_limit, message);
            }
            Ok(icmpv6::Message::Other { kind: mld::REPORT_V1, .. }) => {
                self.mld_report_input(now, link, header, packet.payload);
            }
            // Messages of other listeners to routers.
            Ok(icmpv6::Message::Other { kind: mld::DONE | mld::REPORT, .. }) => {}
            Ok(_) => self.stats.icmp_unhandled += 1,
            Err(_) => self.stats.icmp_invalid += 1,
        }
        InputResult::Handled
    }

    fn send_echo_reply(&mut self, now: Instant, request: &ReceivedEcho<'_>) {
        if !self.config.icmp_echo {
            self.stats.icmp_echo_ignored += 1;
            return;
        }
        let Ok(route) = self.route(now, request.from, request.to) else { return };
        let link = self.link(route.hop.link());
        let header = IpHeader {
            src: route.src,
            dst: request.from,
            protocol: if route.src.is_ipv4() { protocol::ICMP } else { protocol::ICMPV6 },
            tos: request.tos,
            hop_limit: link.hop_limit,
            dont_fragment: false,
            flow_label: 0,
            label: Label::NONE,
        };
        let len = icmpv4::HEADER_LEN + request.echo.data.len();
        let sent = match (route.src, request.from) {
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let reply = icmpv6::Message::EchoReply(request.echo);
                self.send_datagram(now, &route, &header, len, None, |out| {
                    reply.emit(src, dst, out);
                })
            }
            _ => {
                let reply = icmpv4::Message::EchoReply(request.echo);
                self.send_datagram(now, &route, &header, len, None, |out| {
                    reply.emit(out);
                })
            }
        };
        match sent {
            Ok(()) => self.stats.icmp_echo_replies += 1,
            Err(_) => self.stats.tx_control_dropped += 1,
        }
    }

    /// Handles an ICMP error. The quoted packet must have been sent from the address that the error was sent
    /// to (RFC 5927 §4.1); the transport makes further checks.
    fn icmp_error(
        &mut self,
        dst: IpAddr,
        message: &[u8],
        quote: &[u8],
        kind: IcmpErrorKind,
        mut origin: IcmpErrorOrigin,
    ) -> InputResult {
        let described = parse_quoted_packet(quote).filter(|error| {
            error.local.ip() == dst
                && self.local.link_of(dst).is_some()
                && self.is_valid_remote(error.remote.ip())
                && matches!(error.protocol, protocol::TCP | protocol::UDP)
        });
        match described {
            Some(error) => {
                self.stats.icmp_errors_in += 1;
                let payload = quoted_udp_payload(quote);
                self.set_quoted_payload(payload);
                if !payload.is_empty() {
                    let headers = quote.len() - payload.len();
                    origin.extensions =
                        IcmpExtensions::find(origin.icmp_type, dst.is_ipv4(), message, quote, headers);
                }
                // Linux compares the hop limit of the quoted packet for IPv4, and that of the message itself
                // for IPv6.
                let hop_limit = if dst.is_ipv4() { error.hop_limit } else { origin.hop_limit };
                InputResult::Error(TransportError { kind, origin, hop_limit, ..error })
            }
            None => {
                self.stats.icmp_errors_foreign += 1;
                InputResult::Handled
            }
        }
    }

    /// Returns whether packets can be sent to an address: that of another host, or a local one.
    fn is_valid_remote(&self, address: IpAddr) -> bool {
        is_unicast(address) || self.local.link_of(address).is_some()
    }

    /// Accepts the path MTU of a "packet too big" error, after the transport has validated the error: for
    /// TCP, that its sequence number is in flight (RFC 5927 §7). From now on [`Network::route`] returns the
    /// smaller path MTU, until the cache entry expires. Returns the path MTU that applies now if it has
    /// become smaller.
    ///
    /// It must not be called before that validation, because a forged message would slow down every
    /// connection to the destination.
    pub fn accept_path_mtu(&mut self, now: Instant, error: &TransportError) -> Option<u16> {
        let IcmpErrorKind::PacketTooBig { mtu } = error.kind else { return None };
        let destination = error.remote.ip();
        let current = self.route(now, destination, Some(error.local.ip())).ok()?;
        if self.path_mtu.learn(now, destination, mtu, current.mtu) {
            self.stats.path_mtu_learnt += 1;
            self.stats.path_mtu_evicted = self.path_mtu.evicted();
            self.broadcast_update(ControlUpdate::PathMtu { destination, mtu });
            self.route(now, destination, Some(error.local.ip())).ok().map(|route| route.mtu)
        } else {
            self.stats.path_mtu_ignored += 1;
            None
        }
    }
}

/// Maps a code of ICMPv4's "destination unreachable" as Linux does.
fn unreachable_v4(code: u8, mtu: u16) -> IcmpErrorKind {
    use icmpv4::unreachable as codes;
    match code {
        // 11: network unreachable for this type of service.
        codes::NET | 11 => IcmpErrorKind::NetUnreachable,
        codes::PROTOCOL => IcmpErrorKind::ProtocolUnreachable,
        codes::PORT => IcmpErrorKind::PortUnreachable,
        codes::FRAGMENTATION_NEEDED => IcmpErrorKind::PacketTooBig { mtu },
        // 6 to 8: destination network unknown, destination host unknown, source host isolated.
        6..=8 => IcmpErrorKind::Unreachable,
        // 9, 10, 13 to 15: network, host or communication administratively prohibited, host precedence
        // violation, precedence cutoff in effect.
        9 | 10 | codes::ADMINISTRATIVELY_PROHIBITED..=15 => IcmpErrorKind::Prohibited,
        _ => IcmpErrorKind::HostUnreachable,
    }
}

/// Maps a code of ICMPv6's "destination unreachable" as Linux does.
fn unreachable_v6(code: u8) -> IcmpErrorKind {
    use icmpv6::unreachable as codes;
    match code {
        codes::NO_ROUTE => IcmpErrorKind::NetUnreachable,
        codes::PORT => IcmpErrorKind::PortUnreachable,
        codes::ADMINISTRATIVELY_PROHIBITED | codes::SOURCE_POLICY | codes::REJECT_ROUTE => {
            IcmpErrorKind::Prohibited
        }
        _ => IcmpErrorKind::HostUnreachable,
    }
}

#[cfg(test)]
#[path = "input_tests.rs"]
mod tests;
