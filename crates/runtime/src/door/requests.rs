//! Requests of the channel, and answers to them, as they stand in messages of the door.

use super::codec::{Code, Reader, choice, record};
use crate::channel::Thing;
use crate::channel::control::{LinkInfo, Reply, Request, ReserveError, Reserved, Sharing, UdpRequest};
use crate::error::Error;
use ginnel_stack::error::{ConnectError, ListenError, RecvError, SendError, Stale};
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::icmp::extensions::Extensions;
use ginnel_stack::options::{CaState, ConnectOptions, ListenOptions, SaveSyn, SocketOptions, TcpInfo};
use ginnel_stack::tcp::state::State;
use ginnel_stack::udp::{Datagram, PathMtu, UdpError, UdpOptions, UdpReport, UdpSending};

choice!(ListenError { 0 => AddressInUse, 1 => AddressNotAvailable, 2 => TooMany, 3 => InvalidOption });
choice!(ConnectError {
    0 => PortsExhausted, 1 => AddressNotAvailable, 2 => AddressInUse, 3 => NetUnreachable, 4 => InvalidAddress, 5 => TooMany,
    6 => InvalidOption,
});
choice!(SendError { 0 => Stale, 1 => Closed, 2 => InvalidSource, 3 => Full });
choice!(RecvError { 0 => Stale, 1 => WouldBlock });
choice!(Stale { 0 => Handle });
choice!(ReserveError { 0 => InUse, 1 => NotAvailable, 2 => TooMany });
record!(Sharing { reuse_address, reuse_port, user, v6_only });
record!(LinkInfo { name, mac, mtu, loopback, addresses });
record!(Reserved { number, address });
choice!(UdpError {
    0 => Stale, 1 => AddressInUse, 2 => AddressNotAvailable, 3 => TooMany, 4 => NoDestination, 5 => InvalidAddress, 6 => WrongFamily,
    7 => BroadcastForbidden, 8 => TooLong, 9 => NetUnreachable, 10 => HostUnreachable, 11 => Refused, 12 => Unreachable,
    13 => NoBuffers, 14 => WouldBlock, 15 => ProtocolUnreachable, 16 => Prohibited, 17 => Malformed,
});
choice!(State {
    0 => Closed, 1 => Listen, 2 => SynSent, 3 => SynReceived, 4 => Established, 5 => FinWait1, 6 => FinWait2, 7 => CloseWait,
    8 => Closing, 9 => LastAck, 10 => TimeWait,
});
choice!(CaState { 0 => Open, 1 => Disorder, 2 => Cwr, 3 => Recovery, 4 => Loss });
record!(SocketOptions {
    recv_buffer_bytes,
    send_buffer_bytes,
    mss,
    nodelay,
    keepalive,
    ack_events,
    tos,
    hop_limit,
    min_hops_v4,
    min_hops_v6,
    rto_min,
    rto_max,
    delayed_ack_max,
    save_syn,
    priority,
});
choice!(SaveSyn { 0 => Off, 1 => Packet, 2 => Frame });
record!(ListenOptions { backlog, v6_only, reuse_port, user, socket });
record!(ConnectOptions { local, port_was_chosen, socket });
choice!(PathMtu { 0 => Want, 1 => Ignore, 2 => Do, 3 => Probe, 4 => Interface, 5 => Omit });
record!(UdpOptions {
    reuse_address,
    reuse_port,
    user,
    broadcast,
    only_v6,
    receive_bytes,
    hop_limit,
    tos,
    priority,
    reports_v4,
    reports_v6,
    path_mtu,
    coalesces,
});
record!(UdpReport { error, to, from, kind, code, info, extensions, len, next, more });
record!(Extensions { at, broken });
record!(Datagram { len, from, to, tos, hop_limit, piece });
record!(UdpSending { to, source, piece, hop_limit, tos });
record!(TcpInfo {
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
    reorderings,
    snd_wnd,
    rcv_wnd,
    snd_wscale,
    rcv_wscale,
    timestamps,
    sack,
    wscale,
    ecn,
    notsent_bytes,
    last_data_recv,
    busy_time,
    rwnd_limited,
    sndbuf_limited,
    send_queued,
    recv_queued,
});
choice!(Thing { 0 => Socket { socket, generation }, 1 => Listener(number) });

impl Code for UdpHandle {
    fn put(&self, out: &mut Vec<u8>) {
        (self.index(), self.generation()).put(out);
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        <(u32, u32)>::get(from).map(|(index, generation)| Self::new(index, generation))
    }
}

choice!(UdpRequest {
    0 => Bind(local, options), 1 => Connect(socket, remote), 2 => Send(socket, remote, data), 3 => Reply(socket, datagram, data),
    4 => Recv(socket), 5 => Local(socket), 6 => Close(socket), 7 => Open(local, options), 8 => SetOptions(socket, options),
    9 => Apart(socket, take), 10 => Report(socket), 11 => PathMtu(socket),
    12 => SendWith(socket, sending, data),
});

// `Detach` is the hang-up of a connection to the door, and counters are asked for in other ways.
impl Code for Request {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Listen(at, options) => (0u8, (*at, *options)).put(out),
            Self::Join(listener) => (1u8, *listener).put(out),
            Self::Unlisten(listener) => (2u8, *listener).put(out),
            Self::Connect(remote, options) => (3u8, (*remote, *options)).put(out),
            Self::Info(socket) => (5u8, *socket).put(out),
            Self::SendUrgent(socket, bytes) => {
                (6u8, *socket).put(out);
                bytes.put(out);
            }
            Self::Udp(request) => {
                8u8.put(out);
                request.put(out);
            }
            Self::ListenAlone(at, options) => (9u8, (*at, *options)).put(out),
            Self::Reserve(at, sharing) => (12u8, (*at, *sharing)).put(out),
            Self::Unreserve(number) => (10u8, *number).put(out),
            Self::Amend(listener, options) => (14u8, (*listener, *options)).put(out),
            Self::SavedSyn(socket, room) => (15u8, (*socket, *room)).put(out),
            Self::RoomBelow(socket, len, most) => (16u8, (*socket, (*len, *most))).put(out),
            Self::Links(from) => (17u8, *from).put(out),
            Self::Defer(listener, time) => (13u8, (*listener, *time)).put(out),
            Self::Backlog(listener, backlog) => (11u8, (*listener, *backlog)).put(out),
            Self::Offer => 18u8.put(out),
            Self::Counters | Self::Detach => u8::MAX.put(out),
        }
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        Some(match u8::get(from)? {
            0 => Self::Listen(Code::get(from)?, Code::get(from)?),
            1 => Self::Join(Code::get(from)?),
            2 => Self::Unlisten(Code::get(from)?),
            3 => Self::Connect(Code::get(from)?, Code::get(from)?),
            5 => Self::Info(Code::get(from)?),
            6 => Self::SendUrgent(Code::get(from)?, Code::get(from)?),
            8 => Self::Udp(Code::get(from)?),
            9 => Self::ListenAlone(Code::get(from)?, Code::get(from)?),
            12 => Self::Reserve(Code::get(from)?, Code::get(from)?),
            10 => Self::Unreserve(Code::get(from)?),
            14 => Self::Amend(Code::get(from)?, Code::get(from)?),
            15 => Self::SavedSyn(Code::get(from)?, Code::get(from)?),
            16 => Self::RoomBelow(Code::get(from)?, Code::get(from)?, Code::get(from)?),
            17 => Self::Links(Code::get(from)?),
            13 => Self::Defer(Code::get(from)?, Code::get(from)?),
            11 => Self::Backlog(Code::get(from)?, Code::get(from)?),
            18 => Self::Offer,
            _ => return None,
        })
    }
}

impl Code for Error {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Listen(at, error) => (0u8, (*at, *error)).put(out),
            Self::Connect(to, error) => (1u8, (*to, *error)).put(out),
            other => (2u8, other.to_string()).put(out),
        }
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        Some(match u8::get(from)? {
            0 => Self::Listen(Code::get(from)?, Code::get(from)?),
            1 => Self::Connect(Code::get(from)?, Code::get(from)?),
            2 => Self::application(String::get(from)?),
            _ => return None,
        })
    }
}

impl Code for Reply {
    fn put(&self, out: &mut Vec<u8>) {
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
            Self::UdpReport(result) => tagged(out, 13, result),
            Self::UdpPathMtu(result) => tagged(out, 14, result),
            Self::SavedSyn(bytes) => tagged(out, 15, bytes),
            Self::RoomBelow(result) => tagged(out, 16, result),
            Self::Links(links) => tagged(out, 17, links),
            // Counters are not asked for over the door.
            Self::Done | Self::Counters(_) => out.push(11),
        }
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        Some(match u8::get(from)? {
            0 => Self::Listen(Code::get(from)?),
            1 => Self::Join(Code::get(from)?),
            2 => Self::Connect(Code::get(from)?),
            4 => Self::Info(Code::get(from)?),
            5 => Self::SendUrgent(Code::get(from)?),
            7 => Self::UdpBind(Code::get(from)?),
            8 => Self::UdpRecv(Code::get(from)?),
            9 => Self::UdpLocal(Code::get(from)?),
            10 => Self::Udp(Code::get(from)?),
            11 => Self::Done,
            12 => Self::Reserve(Code::get(from)?),
            13 => Self::UdpReport(Code::get(from)?),
            14 => Self::UdpPathMtu(Code::get(from)?),
            15 => Self::SavedSyn(Code::get(from)?),
            16 => Self::RoomBelow(Code::get(from)?),
            17 => Self::Links(Code::get(from)?),
            _ => return None,
        })
    }
}

fn tagged(out: &mut Vec<u8>, tag: u8, value: &impl Code) {
    out.push(tag);
    value.put(out);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::door::message::{Answer, MESSAGE_MAX, decode, encode};

    #[test]
    fn the_longest_list_of_links_fits_into_a_message() {
        let link = |addresses: usize| LinkInfo {
            name: "x".repeat(64),
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            loopback: false,
            addresses: vec![(core::net::Ipv6Addr::LOCALHOST.into(), 64); addresses],
        };
        let most = LinkInfo::ADDRESSES_MAX;
        for links in [vec![link(most), link(most)], vec![link(1); 2048 / 6], vec![link(0); 2048 / 5]] {
            let bytes = encode(1, &Answer::Reply(Reply::Links(links.clone())));
            assert!(bytes.len() <= MESSAGE_MAX, "{} links: {} bytes", links.len(), bytes.len());
            let (1, Some(Answer::Reply(Reply::Links(told)))) = decode(&bytes) else {
                panic!("not a message")
            };
            assert_eq!(told, links);
        }
    }
}
