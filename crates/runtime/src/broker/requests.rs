//! Encoding of the channel's requests and replies in messages of the broker.

use super::codec::{Codec, codec_enum, codec_struct};
use crate::channel::SocketId;
use crate::channel::control::{
    AddressSharing, ChannelReply, ChannelRequest, LinkInfo, Reservation, ReserveError, StreamStamp,
    UdpRequest, UnorderedReply,
};
use crate::error::Error;
use crate::socket_filter::FilterError;
use core::net::IpAddr;
use ginnel_stack::error::{ConnectError, GroupError, ListenError, RecvError, SendError, Stale};
use ginnel_stack::handle::{LinkId, UdpHandle};
use ginnel_stack::icmp::extensions::IcmpExtensions;
use ginnel_stack::ip::FlowLabel;
use ginnel_stack::multicast::{FilterMode, MulticastOptions, SourceFilter};
use ginnel_stack::options::{
    BbrInfo, CaState, ConnectOptions, FastOpenFailure, ListenOptions, PortSharing, SaveSyn, SocketOptions,
    TcpInfo,
};
use ginnel_stack::tcp::state::State;
use ginnel_stack::udp::{
    Datagram, MembershipLimits, PmtuDiscovery, UdpError, UdpExtendedError, UdpOptions, UdpSendParams,
};

codec_enum!(ListenError { 0 => AddressInUse, 1 => AddressNotAvailable, 2 => TooMany, 3 => InvalidOption });
codec_enum!(ConnectError {
    0 => PortsExhausted, 1 => AddressNotAvailable, 2 => AddressInUse, 3 => NetUnreachable, 4 => InvalidAddress, 5 => TooMany,
    6 => InvalidOption,
});
codec_enum!(SendError { 0 => Stale, 1 => Closed, 2 => InvalidSource, 3 => Full, 4 => TooLong });
codec_enum!(RecvError { 0 => Stale, 1 => WouldBlock });
codec_enum!(Stale { 0 => Handle });
codec_enum!(ReserveError { 0 => InUse, 1 => NotAvailable, 2 => TooMany });
codec_struct!(AddressSharing { reuse_address, reuse_port, uid, v6only });
codec_struct!(LinkInfo { name, mac, mtu, loopback, multicast, addresses });
codec_struct!(Reservation { number, address });
codec_struct!(StreamStamp { end, is_acked, at_us });
codec_enum!(UdpError {
    0 => Stale, 1 => AddressInUse, 2 => AddressNotAvailable, 3 => TooManySockets, 4 => NoDestination, 5 => InvalidAddress, 6 => WrongFamily,
    7 => BroadcastForbidden, 8 => TooLong, 9 => NetUnreachable, 10 => HostUnreachable, 11 => ConnectionRefused, 12 => Unreachable,
    13 => NoBuffers, 14 => WouldBlock, 15 => ProtocolUnreachable, 16 => Prohibited, 17 => ProtocolError, 18 => Destroyed, 19 => DeviceFull,
});
codec_enum!(State {
    0 => Closed, 1 => Listen, 2 => SynSent, 3 => SynReceived, 4 => Established, 5 => FinWait1, 6 => FinWait2, 7 => CloseWait,
    8 => Closing, 9 => LastAck, 10 => TimeWait,
});
codec_enum!(CaState { 0 => Open, 1 => Disorder, 2 => Cwr, 3 => Recovery, 4 => Loss });
codec_struct!(SocketOptions {
    recv_buffer_bytes,
    send_buffer_bytes,
    mss,
    nodelay,
    keepalive,
    ack_events,
    tos,
    hop_limit,
    min_ttl,
    min_hop_count,
    rto_min,
    rto_max,
    delayed_ack_max,
    save_syn,
    priority,
    unordered,
    port_sharing,
    defer_accept,
    may_fragment,
    fastopen_queue,
    fastopen_keys,
    fastopen_no_cookie,
    flow_label,
    fastopen_connect,
});
impl Codec for FlowLabel {
    fn encode(&self, out: &mut Vec<u8>) {
        self.bits().encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some(Self::from_bits(Codec::decode(from)?)).filter(|choice| choice.is_valid())
    }
}
codec_struct!(PortSharing { reuse_address, reuse_port });
codec_enum!(FastOpenFailure { 0 => None, 1 => CookieUnavailable, 2 => DataNotAcked, 3 => SynRetransmitted });
codec_enum!(SaveSyn { 0 => Off, 1 => Packet, 2 => Frame });
codec_struct!(ListenOptions { backlog, v6_only, reuse_port, awaits_filter, user, socket });
codec_struct!(ConnectOptions { local, is_ephemeral_port, socket });
codec_enum!(PmtuDiscovery { 0 => Want, 1 => Dont, 2 => Do, 3 => Probe, 4 => Interface, 5 => Omit });
codec_struct!(UdpOptions {
    reuse_address,
    reuse_port,
    uid,
    broadcast,
    v6only,
    rcvbuf,
    hop_limit,
    tos,
    flow_label,
    priority,
    recverr_v4,
    recverr_v6,
    pmtu_discovery,
    gro,
    multicast_v4,
    multicast_v6,
});
codec_struct!(MulticastOptions { link, source, hop_limit, no_loop, members_only });
codec_struct!(MembershipLimits { igmp_max_memberships, igmp_max_msf, mld_max_memberships, mld_max_msf });
codec_struct!(UdpExtendedError {
    error,
    destination,
    offender,
    icmp_type,
    icmp_code,
    info,
    extensions,
    payload_len,
    next_error,
    has_more
});
codec_struct!(IcmpExtensions { offset, is_invalid });
codec_struct!(Datagram { len, from, to, tos, hop_limit, flow_label, gso_size });
codec_struct!(UdpSendParams { to, source, gso_size, hop_limit, tos, flow_label });
codec_struct!(TcpInfo {
    state,
    local,
    remote,
    ca_state,
    retransmits,
    probes,
    backoff,
    rto,
    ato,
    snd_mss,
    rcv_mss,
    advmss,
    pmtu,
    unacked,
    sacked,
    lost,
    retrans,
    total_retrans,
    rtt,
    rttvar,
    min_rtt,
    snd_ssthresh,
    snd_cwnd,
    reordering,
    reord_seen,
    snd_wnd,
    rcv_wnd,
    snd_wscale,
    rcv_wscale,
    timestamps,
    sack,
    wscale,
    ecn,
    syn_data,
    fastopen_failure,
    notsent_bytes,
    last_data_recv,
    busy_time,
    rwnd_limited,
    sndbuf_limited,
    congestion,
    pacing_rate,
    max_pacing_rate,
    delivery_rate,
    delivery_rate_app_limited,
    bbr,
    send_queued,
    recv_queued,
});
codec_struct!(BbrInfo { bandwidth, min_rtt_us, pacing_gain, cwnd_gain });
codec_enum!(UnorderedReply { 0 => Early { offset, bytes }, 1 => InOrder { offset, len } });
codec_enum!(SocketId { 0 => Socket { socket, generation }, 1 => Listener(number) });

impl Codec for UdpHandle {
    fn encode(&self, out: &mut Vec<u8>) {
        (self.index(), self.generation()).encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        <(u32, u32)>::decode(from).map(|(index, generation)| Self::new(index, generation))
    }
}

impl Codec for LinkId {
    fn encode(&self, out: &mut Vec<u8>) {
        self.0.encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        u16::decode(from).map(Self)
    }
}

codec_enum!(FilterError { 0 => Stale, 1 => Invalid, 2 => NoMemory });
codec_enum!(GroupError { 0 => Stale, 1 => NotInGroup, 2 => NoProgram, 3 => InUse });
codec_enum!(FilterMode { 0 => Include, 1 => Exclude });

impl Codec for SourceFilter {
    fn encode(&self, out: &mut Vec<u8>) {
        (self.mode(), self.sources().to_vec()).encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        <(FilterMode, Vec<IpAddr>)>::decode(from).map(|(mode, sources)| Self::new(mode, sources))
    }
}

codec_enum!(UdpRequest {
    0 => Bind(local, options), 1 => Connect(socket, remote), 2 => Send(socket, remote, data), 3 => Reply(socket, datagram, data),
    4 => Recv(socket), 5 => Local(socket), 6 => Close(socket), 7 => Open(local, options), 8 => SetOptions(socket, options),
    9 => RecvOversize(socket), 10 => TakeExtendedError(socket), 11 => PathMtu(socket),
    12 => SendWith(socket, sending, data), 13 => SetMembership(socket, link, group, filter), 14 => GroupLink(group),
    15 => OpenServed(local, options, peer), 16 => PeekOversize(socket, index),
    17 => SendTimed(socket, sending, data),
});

/// The byte with which [`ChannelRequest::Filtered`] begins.
const FILTERED: u8 = 25;

// `Detach` is implied by the close of the control connection, and the broker does not serve counters.
impl Codec for ChannelRequest {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Listen(at, options) => (0u8, (*at, *options)).encode(out),
            Self::Join(listener) => (1u8, *listener).encode(out),
            Self::Unlisten(listener) => (2u8, *listener).encode(out),
            Self::Connect(remote, options) => (3u8, (*remote, *options)).encode(out),
            Self::Info(socket) => (5u8, *socket).encode(out),
            Self::SendUrgent(socket, bytes) => {
                (6u8, *socket).encode(out);
                bytes.encode(out);
            }
            Self::Udp(request) => {
                8u8.encode(out);
                request.encode(out);
            }
            Self::ListenExclusive(at, options) => (9u8, (*at, *options)).encode(out),
            Self::Reserve(at, address_sharing) => (12u8, (*at, *address_sharing)).encode(out),
            Self::Unreserve(number) => (10u8, *number).encode(out),
            Self::SetListenerOptions(listener, options) => (14u8, (*listener, *options)).encode(out),
            Self::SavedSyn(socket, room) => (15u8, (*socket, *room)).encode(out),
            Self::SendableWithin(socket, len, most) => (16u8, (*socket, (*len, *most))).encode(out),
            Self::Links(from) => (17u8, *from).encode(out),
            Self::ArrivalTime(socket, end) => (13u8, (*socket, *end)).encode(out),
            Self::AwaitStamps(socket, end, sent, acked) => {
                (32u8, (*socket, *end)).encode(out);
                (*sent, *acked).encode(out);
            }
            Self::TakeStamps(socket) => (33u8, *socket).encode(out),
            Self::SetBacklog(listener, backlog) => (11u8, (*listener, *backlog)).encode(out),
            Self::OfferPending => 18u8.encode(out),
            Self::IsShared(socket) => (19u8, *socket).encode(out),
            Self::SendDeferredSyn(socket) => (23u8, *socket).encode(out),
            Self::CanOpenFast => 24u8.encode(out),
            Self::SendMessage(socket, bytes, priority) => {
                (20u8, (*socket, *priority)).encode(out);
                bytes.encode(out);
            }
            Self::RecvUnordered(socket, read, max) => (21u8, (*socket, (*read, *max))).encode(out),
            Self::ReturnUnordered(socket, offset, bytes) => {
                (22u8, (*socket, *offset)).encode(out);
                bytes.encode(out);
            }
            Self::Filtered(code, request) => {
                FILTERED.encode(out);
                code.encode(out);
                request.encode(out);
            }
            Self::SetFilter(of, code) => {
                (26u8, *of).encode(out);
                code.encode(out);
            }
            Self::Filter(of) => (27u8, *of).encode(out),
            Self::SetGroupProgram(of, code, is_first) => {
                (30u8, *of).encode(out);
                code.encode(out);
                is_first.encode(out);
            }
            Self::LocalPorts => 31u8.encode(out),
            Self::ListenShared(at, options, description) => {
                (28u8, (*at, *options)).encode(out);
                description.encode(out);
            }
            Self::ClaimOffer(listener) => (29u8, *listener).encode(out),
            Self::Counters | Self::Detach => u8::MAX.encode(out),
        }
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some(match u8::decode(from)? {
            0 => Self::Listen(Codec::decode(from)?, Codec::decode(from)?),
            1 => Self::Join(Codec::decode(from)?),
            2 => Self::Unlisten(Codec::decode(from)?),
            3 => Self::Connect(Codec::decode(from)?, Codec::decode(from)?),
            5 => Self::Info(Codec::decode(from)?),
            6 => Self::SendUrgent(Codec::decode(from)?, Codec::decode(from)?),
            8 => Self::Udp(Codec::decode(from)?),
            9 => Self::ListenExclusive(Codec::decode(from)?, Codec::decode(from)?),
            12 => Self::Reserve(Codec::decode(from)?, Codec::decode(from)?),
            10 => Self::Unreserve(Codec::decode(from)?),
            14 => Self::SetListenerOptions(Codec::decode(from)?, Codec::decode(from)?),
            15 => Self::SavedSyn(Codec::decode(from)?, Codec::decode(from)?),
            16 => Self::SendableWithin(Codec::decode(from)?, Codec::decode(from)?, Codec::decode(from)?),
            17 => Self::Links(Codec::decode(from)?),
            13 => Self::ArrivalTime(Codec::decode(from)?, Codec::decode(from)?),
            32 => Self::AwaitStamps(
                Codec::decode(from)?,
                Codec::decode(from)?,
                Codec::decode(from)?,
                Codec::decode(from)?,
            ),
            33 => Self::TakeStamps(Codec::decode(from)?),
            11 => Self::SetBacklog(Codec::decode(from)?, Codec::decode(from)?),
            18 => Self::OfferPending,
            19 => Self::IsShared(Codec::decode(from)?),
            23 => Self::SendDeferredSyn(Codec::decode(from)?),
            24 => Self::CanOpenFast,
            FILTERED => {
                let code = Codec::decode(from)?;
                // A request with two filters does not exist. So messages are not nested more deeply.
                if from.first() == Some(&FILTERED) {
                    return None;
                }
                Self::Filtered(code, Box::new(Self::decode(from)?))
            }
            26 => Self::SetFilter(Codec::decode(from)?, Codec::decode(from)?),
            27 => Self::Filter(Codec::decode(from)?),
            30 => Self::SetGroupProgram(Codec::decode(from)?, Codec::decode(from)?, Codec::decode(from)?),
            31 => Self::LocalPorts,
            29 => Self::ClaimOffer(Codec::decode(from)?),
            28 => Self::ListenShared(Codec::decode(from)?, Codec::decode(from)?, Codec::decode(from)?),
            20 => {
                let (socket, priority) = Codec::decode(from)?;
                Self::SendMessage(socket, Codec::decode(from)?, priority)
            }
            21 => Self::RecvUnordered(Codec::decode(from)?, Codec::decode(from)?, Codec::decode(from)?),
            22 => Self::ReturnUnordered(Codec::decode(from)?, Codec::decode(from)?, Codec::decode(from)?),
            _ => return None,
        })
    }
}

impl Codec for Error {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Listen(at, error) => (0u8, (*at, *error)).encode(out),
            Self::Connect(to, error) => (1u8, (*to, *error)).encode(out),
            other => (2u8, other.to_string()).encode(out),
        }
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some(match u8::decode(from)? {
            0 => Self::Listen(Codec::decode(from)?, Codec::decode(from)?),
            1 => Self::Connect(Codec::decode(from)?, Codec::decode(from)?),
            2 => Self::application(String::decode(from)?),
            _ => return None,
        })
    }
}

impl Codec for ChannelReply {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Listen(result) => tagged(out, 0, result),
            Self::Join(result) => tagged(out, 1, result),
            Self::Connect(result) => tagged(out, 2, result),
            Self::Info(result) => tagged(out, 4, result),
            Self::SendUrgent(result) => tagged(out, 5, result),
            Self::UdpBind(result) => tagged(out, 7, result),
            Self::UdpRecv(result) => tagged(out, 8, result),
            Self::UdpLocal(result) => tagged(out, 9, result),
            Self::Udp(result) => tagged(out, 10, result),
            Self::Reserve(result) => tagged(out, 12, result),
            Self::UdpExtendedError(result) => tagged(out, 13, result),
            Self::UdpPathMtu(result) => tagged(out, 14, result),
            Self::UdpGroupLink(link, limits) => tagged(out, 21, &(*link, *limits)),
            Self::SavedSyn(bytes) => tagged(out, 15, bytes),
            Self::SendableWithin(result) => tagged(out, 16, result),
            Self::ArrivalTime(result) => tagged(out, 22, result),
            Self::IsShared(is_shared) => tagged(out, 18, is_shared),
            Self::CanOpenFast(can) => tagged(out, 23, can),
            Self::SendMessage(result) => tagged(out, 19, result),
            Self::RecvUnordered(result) => tagged(out, 20, result),
            Self::Links(links) => tagged(out, 17, links),
            Self::SetFilter(result) => tagged(out, 24, result),
            Self::Filter(result) => tagged(out, 25, result),
            Self::SetGroupProgram(result) => tagged(out, 26, result),
            Self::LocalPorts([tcp, udp]) => tagged(out, 27, &(*tcp, *udp)),
            Self::UdpSentAt(result) => tagged(out, 28, result),
            Self::Stamps(stamps) => tagged(out, 29, stamps),
            Self::AwaitStamps(result) => tagged(out, 30, result),
            // The broker does not serve counters.
            Self::Done | Self::Counters(_) => out.push(11),
        }
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some(match u8::decode(from)? {
            0 => Self::Listen(Codec::decode(from)?),
            1 => Self::Join(Codec::decode(from)?),
            2 => Self::Connect(Codec::decode(from)?),
            4 => Self::Info(Codec::decode(from)?),
            5 => Self::SendUrgent(Codec::decode(from)?),
            7 => Self::UdpBind(Codec::decode(from)?),
            8 => Self::UdpRecv(Codec::decode(from)?),
            9 => Self::UdpLocal(Codec::decode(from)?),
            10 => Self::Udp(Codec::decode(from)?),
            11 => Self::Done,
            12 => Self::Reserve(Codec::decode(from)?),
            13 => Self::UdpExtendedError(Codec::decode(from)?),
            14 => Self::UdpPathMtu(Codec::decode(from)?),
            21 => Self::UdpGroupLink(Codec::decode(from)?, Codec::decode(from)?),
            15 => Self::SavedSyn(Codec::decode(from)?),
            16 => Self::SendableWithin(Codec::decode(from)?),
            22 => Self::ArrivalTime(Codec::decode(from)?),
            18 => Self::IsShared(Codec::decode(from)?),
            23 => Self::CanOpenFast(Codec::decode(from)?),
            17 => Self::Links(Codec::decode(from)?),
            19 => Self::SendMessage(Codec::decode(from)?),
            20 => Self::RecvUnordered(Codec::decode(from)?),
            24 => Self::SetFilter(Codec::decode(from)?),
            25 => Self::Filter(Codec::decode(from)?),
            26 => Self::SetGroupProgram(Codec::decode(from)?),
            27 => Self::LocalPorts([Codec::decode(from)?, Codec::decode(from)?]),
            28 => Self::UdpSentAt(Codec::decode(from)?),
            29 => Self::Stamps(Codec::decode(from)?),
            30 => Self::AwaitStamps(Codec::decode(from)?),
            _ => return None,
        })
    }
}

fn tagged(out: &mut Vec<u8>, tag: u8, value: &impl Codec) {
    out.push(tag);
    value.encode(out);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::broker::message::{
        ControlReply, ControlRequest, MESSAGE_BYTES_MAX, PreviousSocket, decode, encode,
    };

    #[test]
    fn longest_list_of_links_fits_into_a_message() {
        let link = |addresses: usize| LinkInfo {
            name: "x".repeat(64),
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            loopback: false,
            multicast: true,
            addresses: vec![(core::net::Ipv6Addr::LOCALHOST.into(), 64); addresses],
        };
        let most = LinkInfo::ADDRESSES_MAX;
        for links in [vec![link(most), link(most)], vec![link(1); 2048 / 6], vec![link(0); 2048 / 5]] {
            let bytes = encode(1, &ControlReply::Reply(ChannelReply::Links(links.clone())));
            assert!(bytes.len() <= MESSAGE_BYTES_MAX, "{} links: {} bytes", links.len(), bytes.len());
            let (1, Some(ControlReply::Reply(ChannelReply::Links(decoded)))) = decode(&bytes) else {
                panic!("the message is malformed")
            };
            assert_eq!(decoded, links);
        }
    }

    /// Returns the request that opens a listener on port 80 as user 1, with a filter.
    fn filtered_listen(code: Vec<u8>) -> ChannelRequest {
        let options = ListenOptions { user: 1, ..ListenOptions::default() };
        ChannelRequest::Filtered(code, Box::new(ChannelRequest::Listen(([0; 4], 80).into(), options)))
    }

    #[test]
    fn filtered_requests_are_checked_like_others() {
        let request = filtered_listen(vec![7; 8]);
        assert_eq!(request.claimed_port(), Some(80));
        let ChannelRequest::Filtered(code, request) = request.with_user(77) else { panic!() };
        let ChannelRequest::Listen(_, options) = *request else { panic!() };
        assert_eq!((code, options.user), (vec![7; 8], 77));
    }

    #[test]
    fn filtered_requests_do_not_nest() {
        let encoded = |request: &ChannelRequest| {
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            bytes
        };
        let request = filtered_listen(vec![7; 8]);
        let bytes = encoded(&request);
        assert!(ChannelRequest::decode(&mut &bytes[..]).is_some());
        let nested = encoded(&ChannelRequest::Filtered(vec![7; 8], Box::new(request)));
        assert!(ChannelRequest::decode(&mut &nested[..]).is_none());
        let empty = encoded(&ChannelRequest::Filtered(Vec::new(), Box::new(ChannelRequest::OfferPending)));
        let deep = empty[..empty.len() - 1].repeat(MESSAGE_BYTES_MAX / empty.len());
        assert!(ChannelRequest::decode(&mut &deep[..]).is_none());
    }

    #[test]
    fn longest_program_fits_into_a_message() {
        let code = vec![7; 8 * 4096];
        let previous = PreviousSocket { resumes: 0, id: SocketId::Listener(0) };
        let request = ControlRequest::Restore(0, previous, filtered_listen(code.clone()));
        assert!(encode(1, &request).len() <= MESSAGE_BYTES_MAX);
        let reply = ControlReply::Reply(ChannelReply::Filter(Ok(code)));
        assert!(encode(1, &reply).len() <= MESSAGE_BYTES_MAX);
    }
}
