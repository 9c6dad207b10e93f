//! What is rare and needs an answer: it goes through the shard's mailbox.

use super::client::Client;
use super::server::ChannelServer;
use crate::command::{Command, CommandError, Commander};
use crate::error::Error;
use crate::shard::Shard;
use core::fmt;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel_stack::error::{SendError, Stale};
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::ip::{DropStats, LinkView, NetworkStats};
use ginnel_stack::link::AddressState;
use ginnel_stack::options::{ConnectOptions, ListenOptions, SocketOptions, TcpInfo};
use ginnel_stack::tcp::TcpStats;
use ginnel_stack::udp::{Datagram, UdpError, UdpExtendedError, UdpOptions, UdpSendParams};
use rustix::fd::OwnedFd;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

/// Whoever waits for an answer looks so often whether the shard still runs.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(20);

/// A question to the stack's side of a channel. `client` is the number of who asks.
#[derive(Clone, Debug)]
pub enum ChannelRequest {
    /// Keep an address for a socket that is going to listen or to connect.
    Reserve(SocketAddr, AddressSharing),
    /// Give up the reservation of this number.
    Unreserve(u32),
    /// Listen.
    Listen(SocketAddr, ListenOptions),
    /// The same, but on no port that another shard or worker listens on.
    ListenExclusive(SocketAddr, ListenOptions),
    /// So many connections may wait at the listener of this number.
    SetBacklog(u32, u32),
    /// Offer what waits at listeners, as far as credits allow.
    OfferPending,
    /// Connections at the listener of this number are offered when they have brought something, or so much time is over; 0 for at once.
    DeferAccept(u32, Duration),
    /// Connections that come to the listener of this number from now on begin with these options.
    SetListenerOptions(u32, SocketOptions),
    /// Hold the listener of this number too.
    Join(u32),
    /// Hold the listener of this number no more. The last to do so closes it.
    Unlisten(u32),
    /// Open a connection.
    Connect(SocketAddr, ConnectOptions),
    /// What is known of a socket.
    Info(u32),
    /// The headers of the SYN that began a socket's connection, if they were kept. The stack lets go of them if there is room for so many bytes.
    SavedSyn(u32, u32),
    /// How many of so many bytes, 2^30 at the most, a socket may write before that many or more have not left, or that many are not acknowledged.
    SendableWithin(u32, u32, (u32, u32)),
    /// Send bytes of which the last is urgent, on a socket.
    SendUrgent(u32, Vec<u8>),
    /// About UDP sockets.
    Udp(UdpRequest),
    /// The links from this one on, as many as one answer has room for.
    Links(u32),
    /// What the stack has counted.
    Counters,
    /// The client is gone, or wants to be: what it alone holds is closed.
    Detach,
}

impl ChannelRequest {
    /// The same, of this user whatever it says.
    pub(crate) fn with_user(mut self, of: u32) -> Self {
        use UdpRequest::{Bind, Open, SetOptions};
        match &mut self {
            Self::Reserve(_, AddressSharing { uid: user, .. })
            | Self::Listen(_, ListenOptions { user, .. })
            | Self::ListenExclusive(_, ListenOptions { user, .. })
            | Self::Udp(Bind(_, UdpOptions { uid: user, .. }))
            | Self::Udp(
                Open(_, UdpOptions { uid: user, .. }) | SetOptions(_, UdpOptions { uid: user, .. }),
            ) => *user = of,
            _ => {}
        }
        self
    }

    /// The port that it wants for itself, if it names one.
    pub(crate) fn claimed_port(&self) -> Option<u16> {
        use UdpRequest::{Bind, Open};
        match self {
            Self::Reserve(address, _)
            | Self::Listen(address, _)
            | Self::ListenExclusive(address, _)
            | Self::Udp(Bind(address, _) | Open(address, _)) => Some(address.port()),
            Self::Connect(_, options) => options.local.map(|local| local.port()),
            _ => None,
        }
    }
}

/// What is asked about UDP sockets. Datagrams take this way too: each costs a question and an answer.
#[derive(Clone, Debug)]
pub enum UdpRequest {
    /// Open one.
    Bind(SocketAddr, UdpOptions),
    /// Fix the other end.
    Connect(UdpHandle, SocketAddr),
    /// Send a datagram.
    Send(UdpHandle, Option<SocketAddr>, Vec<u8>),
    /// Answer a datagram.
    Reply(UdpHandle, Datagram, Vec<u8>),
    /// Receive one.
    Recv(UdpHandle),
    /// Our end.
    Local(UdpHandle),
    /// Close it.
    Close(UdpHandle),
    /// Open one whose datagrams go through the region.
    Open(SocketAddr, UdpOptions),
    /// Change how it behaves.
    SetOptions(UdpHandle, UdpOptions),
    /// The next datagram that did not fit into the region; whether it is taken.
    RecvOversize(UdpHandle, bool),
    /// The oldest report of an error, which is taken.
    TakeExtendedError(UdpHandle),
    /// What the path to the other end takes.
    PathMtu(UdpHandle),
    /// Send a datagram, or several, in this way.
    SendWith(UdpHandle, UdpSendParams, Vec<u8>),
}

/// What the stack has counted.
#[derive(Clone, Debug, Default)]
pub struct StackCounters {
    /// TCP.
    pub tcp: TcpStats,
    /// The network layer.
    pub network: NetworkStats,
    /// Frames that it dropped.
    pub drops: DropStats,
}

/// A link of the stack's, as programs may be shown it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkInfo {
    /// Its name in the configuration; the first 64 bytes of a longer one.
    pub name: String,
    /// Its address on the link layer.
    pub mac: [u8; 6],
    /// Bytes of its largest IP packet.
    pub mtu: u16,
    /// What is sent there comes back.
    pub loopback: bool,
    /// The addresses in use, with the lengths of their prefixes; [`LinkInfo::ADDRESSES_MAX`] at the most.
    pub addresses: Vec<(IpAddr, u8)>,
}

impl LinkInfo {
    /// Addresses of a link that are told.
    pub const ADDRESSES_MAX: usize = 1024;
    /// Bytes of a name that are told.
    const NAME_MAX: usize = 64;
    /// Addresses in one answer, which fits into a message of the door.
    const ADDRESSES_PER_REPLY: usize = 2048;
    /// What else a link has takes as much as so many.
    const LINK_OVERHEAD: usize = 5;

    /// Those from number `from` on that fit into one answer.
    pub(crate) fn chunk<'a>(links: impl Iterator<Item = LinkView<'a>>, from: u32) -> Vec<Self> {
        let mut told = Vec::new();
        let mut room = Self::ADDRESSES_PER_REPLY;
        for view in links.skip(from as usize) {
            let info = Self::from_view(&view);
            let needs = info.addresses.len() + Self::LINK_OVERHEAD;
            if needs > room && !told.is_empty() {
                break;
            }
            room = room.saturating_sub(needs);
            told.push(info);
        }
        told
    }

    fn from_view(view: &LinkView<'_>) -> Self {
        let name = &view.name[..view.name.floor_char_boundary(Self::NAME_MAX)];
        // Those that can be bound: not such as are being checked, or are another host's.
        let ours = view.addresses.iter().filter(|known| known.state == AddressState::Valid);
        let addresses = ours.map(|known| (known.address, known.prefix)).take(Self::ADDRESSES_MAX).collect();
        Self { name: name.into(), mac: view.mac.0, mtu: view.mtu, loopback: view.loopback, addresses }
    }
}

/// With whom a reserved address may be shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddressSharing {
    /// With others that have this set, unless one listens (`SO_REUSEADDR`).
    pub reuse_address: bool,
    /// With others of the same user that have this set (`SO_REUSEPORT`).
    pub reuse_port: bool,
    /// Whose it is (on Linux, the effective user).
    pub uid: u32,
    /// The IPv6 address that stands for all leaves IPv4 to others (`IPV6_V6ONLY`).
    pub v6only: bool,
}

/// An address that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// Number of the reservation.
    pub number: u32,
    /// The address, with its port.
    pub address: SocketAddr,
}

/// Why an address cannot be reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveError {
    /// Somebody has it, or no port is left (`EADDRINUSE`).
    InUse,
    /// It is not one of this stack's (`EADDRNOTAVAIL`).
    NotAvailable,
    /// There are as many reservations as listeners and connections could use (`ENOBUFS`).
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

/// The answer.
#[derive(Debug)]
pub enum ChannelReply {
    /// To [`Request::Reserve`].
    Reserve(Result<Reservation, ReserveError>),
    /// To [`Request::Listen`] and [`Request::ListenAlone`]: the listener's number.
    Listen(Result<u32, Error>),
    /// To [`Request::Join`].
    Join(Result<(), Stale>),
    /// The socket's number and generation.
    Connect(Result<(u32, u32), Error>),
    /// To [`Request::Info`].
    Info(Result<Box<TcpInfo>, Stale>),
    /// To [`Request::SavedSyn`]: nothing if there are none.
    SavedSyn(Vec<u8>),
    /// To [`Request::RoomBelow`].
    SendableWithin(Result<u32, Stale>),
    /// To [`Request::SendUrgent`].
    SendUrgent(Result<usize, SendError>),
    /// To [`UdpRequest::Bind`]: the socket's number and generation.
    UdpBind(Result<(u32, u32), UdpError>),
    /// To [`UdpRequest::Recv`].
    UdpRecv(Result<(Datagram, Vec<u8>), UdpError>),
    /// To [`UdpRequest::Local`].
    UdpLocal(Result<SocketAddr, UdpError>),
    /// To [`UdpRequest::Report`]: the report, and what is known of the datagram.
    UdpExtendedError(Result<Box<(UdpExtendedError, Vec<u8>)>, UdpError>),
    /// To [`UdpRequest::PathMtu`].
    UdpPathMtu(Result<u16, UdpError>),
    /// To the other questions about UDP sockets.
    Udp(Result<(), UdpError>),
    /// To [`Request::Links`]. Behind the last there are none.
    Links(Vec<LinkInfo>),
    /// To [`Request::Counters`].
    Counters(Box<StackCounters>),
    /// To what cannot fail.
    Done,
}

/// A request on its way.
pub(crate) struct RequestEnvelope {
    pub client: usize,
    pub request: ChannelRequest,
    pub reply: SyncSender<ChannelReply>,
}

/// Something that clients hold: its numbers in the region of one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketId {
    /// A connection or a UDP socket.
    Socket {
        /// Its number.
        socket: u32,
        /// Of the one that is meant.
        generation: u32,
    },
    /// A listener of this number.
    Listener(u32),
}

/// What the door asks a shard to do. `domain` is a number of the shard's own.
pub(crate) enum BrokerRequest {
    /// A new domain and its first client, to be woken over `wake`.
    OpenDomain { wake: OwnedFd },
    /// A new client of a domain, to be woken over `wake`.
    Admit { domain: u8, wake: OwnedFd },
    /// A client is about to become two.
    Fork { domain: u8, parent: u32, kept: Option<Vec<SocketId>>, wake: OwnedFd },
    /// What a client asks for.
    Call { domain: u8, client: u32, request: ChannelRequest },
    /// A descriptor that travels holds these things of a client.
    AddProxy { domain: u8, client: u32, things: Vec<SocketId> },
    /// It arrived at this client.
    ResolveProxy { domain: u8, client: u32, things: Vec<SocketId> },
    /// Its last copy is gone.
    ReleaseProxy { domain: u8, things: Vec<SocketId> },
    /// A client is gone.
    Reap { domain: u8, client: u32 },
}

/// What came of it.
pub(crate) enum BrokerReply {
    Opened {
        domain: u8,
        region: OwnedFd,
        wake: OwnedFd,
        client: u32,
    },
    /// The client's number.
    Admitted(u32),
    Reply(ChannelReply),
    Done,
    /// As many as there may be.
    Full,
    /// There is no such thing, or the client does not hold it.
    Unknown,
}

/// An errand on its way.
pub(crate) struct BrokerEnvelope {
    pub request: BrokerRequest,
    pub reply: SyncSender<BrokerReply>,
}

/// Carries requests to the stack's side and answers back.
pub trait ControlPath: Send {
    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// The shard is gone.
    fn call(&mut self, client: usize, request: ChannelRequest) -> Result<ChannelReply, Error>;

    /// Asks, and need not wait for the answer: what is asked next in the same way, by whichever client of the process, is answered behind it.
    ///
    /// # Errors
    /// The shard is gone.
    fn post(&mut self, client: usize, request: ChannelRequest) -> Result<(), Error> {
        self.call(client, request).map(|_| ())
    }
}

/// The way for simulations and other programs that turn both shards on one thread: the stack's shard is asked directly.
#[derive(Clone)]
pub struct SameThread(pub Arc<Mutex<Shard<ChannelServer>>>);

impl SameThread {
    /// A new client of the stack's, which asks in this way.
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

/// The way from a thread that is not the shard's.
impl ControlPath for Commander {
    fn call(&mut self, client: usize, request: ChannelRequest) -> Result<ChannelReply, Error> {
        call_shard(self, |reply| Box::new(RequestEnvelope { client, request, reply }))
    }
}

/// Has a shard do something for the door.
pub(crate) fn call_for_broker(shard: &Commander, errand: BrokerRequest) -> Result<BrokerReply, Error> {
    call_shard(shard, |reply| Box::new(BrokerEnvelope { request: errand, reply }))
}

/// Sends a command and waits for the answer.
fn call_shard<T>(shard: &Commander, command: impl FnOnce(SyncSender<T>) -> Command) -> Result<T, Error> {
    let gone = || Error::application("channel: the shard is gone");
    let (reply, answer) = sync_channel(1);
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
        match answer.recv_timeout(LIVENESS_INTERVAL) {
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
    fn links_come_in_portions_and_those_that_have_much_are_cut() {
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
            addresses,
        };
        let views =
            [view("a", &few[..]), view("b", &[]), view("c", &many), view(&long, &others), view("e", &few)];
        let from = |from| LinkInfo::chunk(views.into_iter(), from);
        let counts = |told: &[LinkInfo]| told.iter().map(|link| link.addresses.len()).collect::<Vec<_>>();
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
