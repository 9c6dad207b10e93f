//! Rare requests that need a reply. They pass through the shard's mailbox.

use super::client::Client;
use super::server::ChannelServer;
use crate::command::{Command, CommandError, Commander};
use crate::error::Error;
use crate::shard::Shard;
use crate::socket_filter::FilterError;
use core::fmt;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel_stack::error::{GroupError, SendError, Stale};
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::ip::{DropStats, LinkView, NetworkStats};
use ginnel_stack::link::AddressState;
use ginnel_stack::multicast::SourceFilter;
use ginnel_stack::options::{ConnectOptions, ListenOptions, SocketOptions, TcpInfo};
use ginnel_stack::tcp::TcpStats;
use ginnel_stack::udp::{Datagram, MembershipLimits, UdpError, UdpExtendedError, UdpOptions, UdpSendParams};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

/// How often a caller that waits for a reply checks whether the shard still runs.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(20);

/// A client's request to the stack's end of the channel.
#[derive(Clone, Debug)]
pub enum ChannelRequest {
    /// Reserves an address for a socket that is going to listen or to connect.
    Reserve(SocketAddr, AddressSharing),
    /// Gives up the reservation of this number.
    Unreserve(u32),
    /// Listens on an address.
    Listen(SocketAddr, ListenOptions),
    /// Listens on an address for the open file description with this number, if it is not 0. If another
    /// process that shares the description listens already, the client becomes an owner of that listener and
    /// sets its backlog.
    ListenShared(SocketAddr, ListenOptions, u64),
    /// Listens on an address, but on no port that another shard or worker listens on.
    ListenExclusive(SocketAddr, ListenOptions),
    /// Sets the backlog of the listener of this number.
    SetBacklog(u32, u32),
    /// Offers pending connections of all listeners, as far as credits allow.
    OfferPending,
    /// Offers the client a connection of the listener of this number that is offered to another client, if
    /// the client has credit and no offer.
    ClaimOffer(u32),
    /// Asks whether another client, or a proxy descriptor, owns this socket, too.
    IsShared(u32),
    /// Sets the options with which later connections of the listener of this number begin.
    SetListenerOptions(u32, SocketOptions),
    /// Adds the client to the owners of the listener of this number.
    Join(u32),
    /// Removes the client from the owners of the listener of this number. The last owner closes the listener.
    Unlisten(u32),
    /// Opens a connection.
    Connect(SocketAddr, ConnectOptions),
    /// Sends the SYN of a socket that waits for the first bytes, without them.
    SendDeferredSyn(u32),
    /// Asks whether the stack uses TCP Fast Open as a client.
    CanOpenFast,
    /// Queries the `TcpInfo` of a socket.
    Info(u32),
    /// Returns the headers of the SYN that began a socket's connection, if they were saved. The stack
    /// discards them if the caller's buffer, whose length is the second number, can hold them.
    SavedSyn(u32, u32),
    /// Returns when the byte of a socket's stream before this position arrived.
    ArrivalTime(u32, u64),
    /// Has the times taken at which the byte before this position of a socket's stream is sent, if the first
    /// flag is set, and acknowledged, if the second one is.
    AwaitStamps(u32, u64, bool, bool),
    /// Returns the times that were taken.
    TakeStamps(u32),
    /// Returns how many bytes a socket may write, up to the second value (at most 2^30), before one of the
    /// limits in the pair is reached: unsent bytes, then unacknowledged bytes.
    SendableWithin(u32, u32, (u32, u32)),
    /// Sends bytes of which the last is urgent.
    SendUrgent(u32, Vec<u8>),
    /// Queues a message with a priority, which may overtake queued ones of lower priority.
    SendMessage(u32, Vec<u8>, u8),
    /// Takes bytes of a socket that arrived before bytes which precede them, up to the third value. Without
    /// any, returns the offset in the stream of the byte at a position of the region, the second value.
    RecvUnordered(u32, u64, u32),
    /// Gives back the bytes at this offset in the stream that were taken last by [`Self::RecvUnordered`].
    ReturnUnordered(u32, u64, Vec<u8>),
    /// A request about UDP sockets.
    Udp(UdpRequest),
    /// Opens a socket by the request, with this program as its filter before it gets a packet.
    Filtered(Vec<u8>, Box<ChannelRequest>),
    /// Sets the filter of a socket to this program; `None` removes the filter.
    SetFilter(SocketId, Option<Vec<u8>>),
    /// Returns the program of a socket's filter.
    Filter(SocketId),
    /// Sets the program that selects the member of the group of sockets with the address of this one
    /// (`SO_REUSEPORT`); `None` removes it. If the flag is set, the group must have no other member.
    SetGroupProgram(SocketId, Option<Vec<u8>>, bool),
    /// Returns the ranges from which the stack chooses ports of TCP and of UDP sockets.
    LocalPorts,
    /// Returns the links from this index on, as many as fit into one reply.
    Links(u32),
    /// Returns the stack's counters.
    Counters,
    /// Detaches the client, and closes the sockets that it alone owns.
    Detach,
}

impl ChannelRequest {
    /// Returns the request with its user ID replaced by `of`.
    pub(crate) fn with_user(mut self, of: u32) -> Self {
        use UdpRequest::{Bind, Open, OpenServed, SetOptions};
        if let Self::Filtered(code, request) = self {
            return Self::Filtered(code, Box::new(request.with_user(of)));
        }
        match &mut self {
            Self::Reserve(_, AddressSharing { uid: user, .. })
            | Self::Listen(_, ListenOptions { user, .. })
            | Self::ListenShared(_, ListenOptions { user, .. }, _)
            | Self::ListenExclusive(_, ListenOptions { user, .. })
            | Self::Udp(Bind(_, UdpOptions { uid: user, .. }))
            | Self::Udp(
                Open(_, UdpOptions { uid: user, .. })
                | OpenServed(_, UdpOptions { uid: user, .. }, _)
                | SetOptions(_, UdpOptions { uid: user, .. }),
            ) => *user = of,
            _ => {}
        }
        self
    }

    /// Returns the request that opens a socket, without the filter that the socket gets.
    pub(crate) fn without_filter(&self) -> &Self {
        match self {
            Self::Filtered(_, request) => request,
            request => request,
        }
    }

    /// Returns the local port that the request claims, if it names one.
    pub(crate) fn claimed_port(&self) -> Option<u16> {
        use UdpRequest::{Bind, Open, OpenServed};
        match self {
            Self::Filtered(_, request) => request.claimed_port(),
            Self::Reserve(address, _)
            | Self::Listen(address, _)
            | Self::ListenShared(address, ..)
            | Self::ListenExclusive(address, _)
            | Self::Udp(Bind(address, _) | Open(address, _) | OpenServed(address, ..)) => {
                Some(address.port())
            }
            Self::Connect(_, options) => options.local.map(|local| local.port()),
            _ => None,
        }
    }
}

/// A request about UDP sockets. Datagrams can be sent and received by requests, too, at the cost of a request
/// and a reply each.
#[derive(Clone, Debug)]
pub enum UdpRequest {
    /// Opens a socket.
    Bind(SocketAddr, UdpOptions),
    /// Connects a socket to a peer.
    Connect(UdpHandle, SocketAddr),
    /// Sends a datagram.
    Send(UdpHandle, Option<SocketAddr>, Vec<u8>),
    /// Replies to a datagram.
    Reply(UdpHandle, Datagram, Vec<u8>),
    /// Receives a datagram.
    Recv(UdpHandle),
    /// Returns the local address.
    Local(UdpHandle),
    /// Closes a socket.
    Close(UdpHandle),
    /// Opens a socket whose datagrams pass through the region.
    Open(SocketAddr, UdpOptions),
    /// Sets a socket's options.
    SetOptions(UdpHandle, UdpOptions),
    /// Removes the next datagram that did not fit into the region, and returns it.
    RecvOversize(UdpHandle),
    /// Returns the datagram of this index among those that did not fit into the region.
    PeekOversize(UdpHandle, u32),
    /// Takes the oldest entry of a socket's error queue.
    TakeExtendedError(UdpHandle),
    /// Returns the path MTU to the connected peer.
    PathMtu(UdpHandle),
    /// Sends a datagram, or several, with these parameters.
    SendWith(UdpHandle, UdpSendParams, Vec<u8>),
    /// As `SendWith`; the reply says when.
    SendTimed(UdpHandle, UdpSendParams, Vec<u8>),
    /// Sets the filter with which a socket receives a group on the link of this number; `None` leaves the
    /// group.
    SetMembership(UdpHandle, u16, IpAddr, Option<SourceFilter>),
    /// Returns the link by which a group is reached if the program names none, and the limits of memberships.
    GroupLink(IpAddr),
    /// As `Open`, but refused with [`UdpError::AddressNotAvailable`] by a shard that does not serve the
    /// device of the local address or, if that is unspecified, the device by which packets to the third value
    /// leave.
    OpenServed(SocketAddr, UdpOptions, Option<IpAddr>),
}

/// The time at which a byte of a stream was sent or acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamStamp {
    /// Position after the byte.
    pub end: u64,
    /// True if the peer has acknowledged the byte at this time, false if the device got it.
    pub is_acked: bool,
    /// The lowest 32 bits of the microseconds since 1970.
    pub at_us: u32,
}

/// Counters of the stack.
#[derive(Clone, Debug, Default)]
pub struct StackCounters {
    /// Counters of TCP.
    pub tcp: TcpStats,
    /// Counters of the network layer.
    pub network: NetworkStats,
    /// Frames that the network layer dropped.
    pub drops: DropStats,
}

/// A link of the stack, as programs may see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkInfo {
    /// Name in the configuration, cut off after 64 bytes.
    pub name: String,
    /// Link-layer address.
    pub mac: [u8; 6],
    /// Bytes of the largest IP packet.
    pub mtu: u16,
    /// Packets sent on this link return to the stack.
    pub loopback: bool,
    /// Sockets can join groups on this link.
    pub multicast: bool,
    /// Valid addresses with their prefix lengths, at most [`LinkInfo::ADDRESSES_MAX`].
    pub addresses: Vec<(IpAddr, u8)>,
}

impl LinkInfo {
    /// Maximum number of addresses that are reported for a link.
    pub const ADDRESSES_MAX: usize = 1024;
    /// Maximum number of bytes that are reported of a name.
    const NAME_MAX: usize = 64;
    /// Addresses in one reply, which has to fit into a message of the broker.
    const ADDRESSES_PER_REPLY: usize = 2048;
    /// The rest of a link takes as much room in a message as this number of addresses.
    const LINK_OVERHEAD: usize = 5;

    /// Returns the links from index `from` on that fit into one reply.
    pub(crate) fn chunk<'a>(links: impl Iterator<Item = LinkView<'a>>, from: u32) -> Vec<Self> {
        let mut links_in_reply = Vec::new();
        let mut space = Self::ADDRESSES_PER_REPLY;
        for view in links.skip(from as usize) {
            let info = Self::from_view(&view);
            let needs = info.addresses.len() + Self::LINK_OVERHEAD;
            if needs > space && !links_in_reply.is_empty() {
                break;
            }
            space = space.saturating_sub(needs);
            links_in_reply.push(info);
        }
        links_in_reply
    }

    fn from_view(view: &LinkView<'_>) -> Self {
        let name = &view.name[..view.name.floor_char_boundary(Self::NAME_MAX)];
        // Only addresses that can be bound, not tentative or duplicate ones.
        let valid = view.addresses.iter().filter(|entry| entry.state == AddressState::Valid);
        let addresses = valid.map(|entry| (entry.address, entry.prefix)).take(Self::ADDRESSES_MAX).collect();
        let LinkView { mtu, loopback, multicast, .. } = *view;
        Self { name: name.into(), mac: view.mac.0, mtu, loopback, multicast, addresses }
    }
}

/// Rules by which an address may be shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressSharing {
    /// Shares the address with sockets that have this flag, too, unless one of them listens (`SO_REUSEADDR`).
    pub reuse_address: bool,
    /// Shares the address with sockets of the same user that have this flag, too (`SO_REUSEPORT`).
    pub reuse_port: bool,
    /// User of the socket (on Linux, the effective user ID).
    pub uid: u32,
    /// Leaves IPv4 to others if the address is the unspecified IPv6 address (`IPV6_V6ONLY`).
    pub v6only: bool,
}

/// A reserved address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// Number of the reservation.
    pub number: u32,
    /// The address with its port.
    pub address: SocketAddr,
}

/// Why an address cannot be reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveError {
    /// The address is in use, or no port is left (`EADDRINUSE`).
    InUse,
    /// The address does not belong to this stack (`EADDRNOTAVAIL`).
    NotAvailable,
    /// All reservations are in use (`ENOBUFS`).
    TooMany,
}

impl fmt::Display for ReserveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InUse => "address already in use",
            Self::NotAvailable => "cannot assign requested address",
            Self::TooMany => "too many reserved addresses",
        })
    }
}

impl std::error::Error for ReserveError {}

/// A reply to a [`ChannelRequest`].
#[derive(Debug)]
pub enum ChannelReply {
    /// Reply to [`ChannelRequest::Reserve`].
    Reserve(Result<Reservation, ReserveError>),
    /// Reply to [`ChannelRequest::Listen`], [`ChannelRequest::ListenShared`] and
    /// [`ChannelRequest::ListenExclusive`]: the listener's number.
    Listen(Result<u32, Error>),
    /// Reply to [`ChannelRequest::Join`].
    Join(Result<(), Stale>),
    /// Reply to [`ChannelRequest::Connect`]: the socket's number and generation.
    Connect(Result<(u32, u32), Error>),
    /// Reply to [`ChannelRequest::Info`].
    Info(Result<Box<TcpInfo>, Stale>),
    /// Reply to [`ChannelRequest::CanOpenFast`].
    CanOpenFast(bool),
    /// Reply to [`ChannelRequest::SavedSyn`]: the headers, empty if none were saved.
    SavedSyn(Vec<u8>),
    /// Reply to [`ChannelRequest::ArrivalTime`]: the lowest 32 bits of the time in microseconds, or 0 if
    /// times are not recorded.
    ArrivalTime(Result<u32, Stale>),
    /// Reply to [`ChannelRequest::SendableWithin`].
    SendableWithin(Result<u32, Stale>),
    /// Reply to [`ChannelRequest::AwaitStamps`]: false if the times are not taken, because the limit is
    /// reached.
    AwaitStamps(Result<bool, Stale>),
    /// Reply to [`ChannelRequest::TakeStamps`].
    Stamps(Vec<StreamStamp>),
    /// Reply to [`ChannelRequest::IsShared`].
    IsShared(bool),
    /// Reply to [`ChannelRequest::SendUrgent`].
    SendUrgent(Result<usize, SendError>),
    /// Reply to [`ChannelRequest::SendMessage`].
    SendMessage(Result<(), SendError>),
    /// Reply to [`ChannelRequest::RecvUnordered`].
    RecvUnordered(Result<UnorderedReply, Stale>),
    /// Reply to [`UdpRequest::Bind`], [`UdpRequest::Open`] and [`UdpRequest::OpenServed`]: the socket's
    /// number and generation.
    UdpBind(Result<(u32, u32), UdpError>),
    /// Reply to [`UdpRequest::Recv`], [`UdpRequest::RecvOversize`] and [`UdpRequest::PeekOversize`].
    UdpRecv(Result<(Datagram, Vec<u8>), UdpError>),
    /// Reply to [`UdpRequest::Local`].
    UdpLocal(Result<SocketAddr, UdpError>),
    /// Reply to [`UdpRequest::TakeExtendedError`]: the error and the quoted part of the datagram.
    UdpExtendedError(Result<Box<(UdpExtendedError, Vec<u8>)>, UdpError>),
    /// Reply to [`UdpRequest::SendTimed`]: when the engine began to send the datagram and when the device had
    /// it, each as the lowest 32 bits of the microseconds since 1970.
    UdpSentAt(Result<(u32, u32), UdpError>),
    /// Reply to [`UdpRequest::PathMtu`].
    UdpPathMtu(Result<u16, UdpError>),
    /// Reply to [`UdpRequest::GroupLink`]: the number of the link, if there is one, and the limits.
    UdpGroupLink(Option<u16>, MembershipLimits),
    /// Reply to the other requests about UDP sockets.
    Udp(Result<(), UdpError>),
    /// Reply to [`ChannelRequest::Links`]: empty after the last link.
    Links(Vec<LinkInfo>),
    /// Reply to [`ChannelRequest::Counters`].
    Counters(Box<StackCounters>),
    /// Reply to [`ChannelRequest::SetFilter`], and to [`ChannelRequest::Filtered`] if the filter is refused.
    SetFilter(Result<(), FilterError>),
    /// Reply to [`ChannelRequest::Filter`]: the program, without bytes if there is none.
    Filter(Result<Vec<u8>, Stale>),
    /// Reply to [`ChannelRequest::SetGroupProgram`].
    SetGroupProgram(Result<Result<(), GroupError>, FilterError>),
    /// Reply to [`ChannelRequest::LocalPorts`]: the first and the last port for TCP, and those for UDP.
    LocalPorts([(u16, u16); 2]),
    /// Reply to requests that cannot fail.
    Done,
}

/// The bytes that can be read next from a connection with unordered receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnorderedReply {
    /// Bytes that arrived before bytes which precede them in the stream.
    Early {
        /// Offset of the first byte in the stream.
        offset: u64,
        /// The bytes, of one segment at most.
        bytes: Vec<u8>,
    },
    /// Bytes in order, which can be read from the region.
    InOrder {
        /// Offset of the next byte in the stream.
        offset: u64,
        /// How many bytes from there on can be read that have consecutive offsets.
        len: u32,
    },
}

/// A request in the shard's mailbox, with the sender of its reply.
pub(crate) struct RequestEnvelope {
    pub client: usize,
    pub request: ChannelRequest,
    pub reply: SyncSender<ChannelReply>,
}

/// Identifies a connection, a UDP socket or a listener that clients own, within the region of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SocketId {
    /// A connection or a UDP socket.
    Socket {
        /// Number of the socket.
        socket: u32,
        /// Generation of the socket.
        generation: u32,
    },
    /// The listener of this number.
    Listener(u32),
}

/// A request of the broker to a shard. `domain` is the shard's own number of a domain.
pub(crate) enum BrokerRequest {
    /// Creates a domain and its first client, which is woken through `wake`.
    OpenDomain { wake: OwnedFd },
    /// Admits a client to a domain. The client is woken through `wake`.
    Admit { domain: u8, wake: OwnedFd },
    /// Duplicates a client before a fork, or before it executes another program. The new client owns the
    /// sockets in `kept`, or all sockets of the parent if that is `None`.
    Fork { domain: u8, parent: u32, kept: Option<Vec<SocketId>>, wake: OwnedFd },
    /// Carries a client's request.
    Call { domain: u8, client: u32, request: ChannelRequest },
    /// Records that a proxy descriptor owns these sockets, all of which the client has to own.
    AddProxy { domain: u8, client: u32, sockets: Vec<SocketId> },
    /// Makes the client, which received a proxy descriptor, an owner of the descriptor's sockets.
    ResolveProxy { domain: u8, client: u32, sockets: Vec<SocketId> },
    /// Removes a proxy descriptor, whose last copy is gone, from the owners of its sockets.
    ReleaseProxy { domain: u8, sockets: Vec<SocketId> },
    /// Makes the client an owner of these sockets, which another client of the domain has opened again after
    /// a restart of the shards.
    Own { domain: u8, client: u32, sockets: Vec<SocketId> },
    /// Reaps a client that is gone.
    Reap { domain: u8, client: u32 },
}

/// A client that a shard has admitted.
#[derive(Debug)]
pub(crate) struct AdmittedClient {
    /// Its number in the domain.
    pub number: u32,
    /// The memory file that the shard shares with it.
    pub memory: OwnedFd,
}

/// A shard's reply to a [`BrokerRequest`].
pub(crate) enum BrokerReply {
    /// Reply to [`BrokerRequest::OpenDomain`]: the domain's number, the memory file of its region, the
    /// descriptor that wakes the shard, and the first client.
    Opened { domain: u8, region: OwnedFd, wake: OwnedFd, client: AdmittedClient },
    /// Reply to [`BrokerRequest::Admit`] and [`BrokerRequest::Fork`].
    Admitted(AdmittedClient),
    /// Reply to [`BrokerRequest::Call`].
    Reply(ChannelReply),
    /// The request was carried out.
    Done,
    /// All clients or domains are in use: how many there may be.
    Full(u32),
    /// The kernel refused the stack's process a descriptor, memory or a mapping, with this error.
    NoResources(Errno),
    /// The domain, the client or a socket does not exist, or the client does not own the socket.
    Unknown,
}

/// A broker's request in the shard's mailbox, with the sender of its reply.
pub(crate) struct BrokerEnvelope {
    pub request: BrokerRequest,
    pub reply: SyncSender<BrokerReply>,
}

/// Carries requests to the stack's end of the channel and replies back.
pub trait ControlPath: Send {
    /// Sends a request and waits for the reply.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    fn call(&mut self, client: usize, request: ChannelRequest) -> Result<ChannelReply, Error>;

    /// Sends a request, possibly without waiting for the reply. A later request of any client of the process
    /// on this path is answered after this request is executed.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    fn post(&mut self, client: usize, request: ChannelRequest) -> Result<(), Error> {
        self.call(client, request).map(|_| ())
    }
}

/// A path for simulations and other programs that run both shards on one thread: it calls the stack's shard
/// directly.
#[derive(Clone)]
pub struct SameThread(pub Arc<Mutex<Shard<ChannelServer>>>);

impl SameThread {
    /// Attaches a new client, which uses this path.
    pub(crate) fn attach(&self) -> Result<Client, Error> {
        let mut shard = self.0.lock().map_err(|_| Error::application("channel: the shard is gone"))?;
        shard.handler_mut().attach(Box::new(self.clone()))
    }
}

impl ControlPath for SameThread {
    fn call(&mut self, client: usize, request: ChannelRequest) -> Result<ChannelReply, Error> {
        let mut shard = self.0.lock().map_err(|_| Error::application("channel: the shard is gone"))?;
        let now = shard.now();
        Ok(shard.with(now, |server, cx| server.handle_request(cx, client, request)))
    }
}

/// The path from a thread other than the shard's.
impl ControlPath for Commander {
    fn call(&mut self, client: usize, request: ChannelRequest) -> Result<ChannelReply, Error> {
        call_shard(self, |reply| Box::new(RequestEnvelope { client, request, reply }))
    }
}

/// Has a shard execute a request of the broker.
pub(crate) fn call_for_broker(shard: &Commander, request: BrokerRequest) -> Result<BrokerReply, Error> {
    call_shard(shard, |reply| Box::new(BrokerEnvelope { request, reply }))
}

/// Sends a command to a shard and waits for the reply.
fn call_shard<T>(shard: &Commander, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, Error> {
    let gone = || Error::application("channel: the shard is gone");
    let (reply, receiver) = sync_channel(1);
    let mut command = command(reply);
    loop {
        match shard.send(command) {
            Ok(()) => break,
            Err(CommandError::Full(back)) if !shard.has_ended() => {
                command = back;
                std::thread::yield_now();
            }
            Err(_) => return Err(gone()),
        }
    }
    loop {
        match receiver.recv_timeout(LIVENESS_INTERVAL) {
            Ok(reply) => return Ok(reply),
            Err(RecvTimeoutError::Timeout) if !shard.has_ended() => {}
            Err(_) => return Err(gone()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use ginnel_stack::link::InterfaceAddress;
    use ginnel_stack::time::Instant;
    use ginnel_stack::wire::MacAddr;

    fn address(number: u32, state: AddressState) -> InterfaceAddress {
        let (address, never) = (core::net::Ipv4Addr::from_bits(number).into(), Instant::MAX);
        let autoconfigured = false;
        InterfaceAddress {
            address,
            prefix: 24,
            state,
            autoconfigured,
            preferred_until: never,
            valid_until: never,
        }
    }

    #[test]
    fn links_are_split_into_replies_and_truncated() {
        let few: Vec<_> = (0..3).map(|at| address(at, AddressState::Valid)).collect();
        let many: Vec<_> = (0..3000).map(|at| address(at, AddressState::Valid)).collect();
        let others = [
            address(1, AddressState::Duplicate),
            address(2, AddressState::Valid),
            address(3, AddressState::Tentative { probes: 0 }),
        ];
        let long = "ü".repeat(100);
        let view = |name, addresses| LinkView {
            name,
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            mtu: 1500,
            loopback: false,
            multicast: true,
            addresses,
        };
        let views =
            [view("a", &few[..]), view("b", &[]), view("c", &many), view(&long, &others), view("e", &few)];
        let from = |from| LinkInfo::chunk(views.into_iter(), from);
        let counts = |links_in_reply: &[LinkInfo]| {
            links_in_reply.iter().map(|link| link.addresses.len()).collect::<Vec<_>>()
        };
        assert_eq!(counts(&from(0)), [3, 0, LinkInfo::ADDRESSES_MAX, 1, 3]);
        let last = from(3);
        assert_eq!(counts(&last), [1, 3]);
        assert_eq!((last[0].name.len(), last[0].addresses[0]), (64, ("0.0.0.2".parse().unwrap(), 24)));
        assert!(from(5).is_empty() && from(u32::MAX).is_empty());
        let small: Vec<_> = (0..5000).map(|_| view("x", &[])).collect();
        assert_eq!(
            LinkInfo::chunk(small.into_iter(), 0).len(),
            LinkInfo::ADDRESSES_PER_REPLY / LinkInfo::LINK_OVERHEAD
        );
        let large = [view("c", &many); 3];
        assert_eq!(counts(&LinkInfo::chunk(large.into_iter(), 0)), [LinkInfo::ADDRESSES_MAX]);
    }
}
