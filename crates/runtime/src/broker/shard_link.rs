//! The path from the broker to a shard: the shard's mailbox, or a connection to the process that runs the
//! shards.
//!
//! ```text
//!   supervisor                                              child
//!   ┌────────────────────┐  requests (SOCK_SEQPACKET)      ┌───────────────────────────────────┐
//!   │ BrokerThread       │────────────────────────────────►│ thread "broker-link" ──► mailbox   │
//!   │   ShardLink::Child │◄────────────────────────────────│                     ◄── of a shard │
//!   └────────────────────┘  replies with descriptors       └───────────────────────────────────┘
//! ```
//!
//! One request is in flight at a time. The hang-up of the connection tells each process that the other one is
//! gone.

use super::codec::{Codec, codec_enum};
use super::message::{decode, encode};
use super::seqpacket::{self, RecvResult};
use crate::channel::SocketId;
use crate::channel::control::{
    AdmittedClient, BrokerReply, BrokerRequest, ChannelReply, ChannelRequest, call_for_broker,
};
use crate::command::Commander;
use crate::devices::KeptTaps;
use crate::error::Error;
use ginnel_devices::tap::TapDescriptors;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Id of the two messages that are no requests: the supervisor's TAP descriptors, and the child's number of
/// shards.
const HELLO_ID: u32 = u32::MAX;

/// The path to one shard.
#[derive(Clone, Debug)]
pub(super) enum ShardLink {
    /// The shard runs in this process.
    InProcess(Commander),
    /// The shard of this index runs in a child process.
    Child(Arc<ChildLink>, u16),
}

impl ShardLink {
    /// Has the shard execute a request.
    ///
    /// # Errors
    /// The shard has ended.
    pub fn call(&self, request: BrokerRequest) -> Result<BrokerReply, Error> {
        match self {
            Self::InProcess(shard) => call_for_broker(shard, request),
            Self::Child(link, shard) => link.call(*shard, &request),
        }
    }
}

/// Sends the descriptors of TAP devices to a child that is being started. The supervisor keeps them, so that
/// the interfaces outlive the child.
///
/// # Errors
/// There are more descriptors than a message may have, or the child is gone.
pub fn send_taps(connection: &OwnedFd, taps: &KeptTaps) -> Result<(), Error> {
    let names: Vec<(String, String, u16)> = taps
        .iter()
        .map(|(device, tap)| (device.clone(), tap.name.clone(), tap.queues.len() as u16))
        .collect();
    let descriptors: Vec<BorrowedFd<'_>> =
        taps.iter().flat_map(|(_, tap)| tap.queues.iter().map(AsFd::as_fd)).collect();
    seqpacket::send(connection, &encode(HELLO_ID, &names), &descriptors)
        .map_err(|e| Error::io("TAP devices for the process of the shards", e))
}

/// Receives what [`send_taps`] has sent, in the child.
///
/// # Errors
/// The supervisor is gone, its message is malformed, or this process has no descriptor left.
pub fn receive_taps(connection: &OwnedFd) -> Result<KeptTaps, Error> {
    wait_readable(connection, None);
    let mut buffer = seqpacket::buffer();
    let RecvResult::Packet(bytes, descriptors) = seqpacket::receive(connection, &mut buffer) else {
        return Err(Error::StackGone);
    };
    let (_, names) = decode::<Vec<(String, String, u16)>>(&buffer[..bytes]);
    let mut descriptors = descriptors.into_iter();
    let taps = names.ok_or(Error::StackGone)?.into_iter().map(|(device, name, queues)| {
        (device, TapDescriptors { name, queues: descriptors.by_ref().take(queues.into()).collect() })
    });
    Ok(taps.collect())
}

/// The supervisor's end of the connection to the child that runs the shards.
#[derive(Debug)]
pub struct ChildLink {
    connection: OwnedFd,
    shards: u16,
    /// Id of the last request, and the receive buffer.
    state: Mutex<(u32, Vec<u8>)>,
}

/// Creates a connection: the supervisor's end, and the end for a child, which inherits it.
///
/// # Errors
/// The process has no descriptor left.
pub fn link_pair() -> Result<(OwnedFd, OwnedFd), Error> {
    seqpacket::pair().map_err(|e| Error::io("connection to the process of the shards", e))
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}

fn wait_readable(fd: &OwnedFd, timeout: Option<Duration>) {
    let timeout = timeout.map(timespec);
    // The result is not needed: the next receive tells whether there is a packet, also after a signal.
    let _ = poll(&mut [PollFd::new(fd, PollFlags::IN)], timeout.as_ref());
}

impl ChildLink {
    /// Waits until the child announces its shards.
    ///
    /// # Errors
    /// The child has ended, or does not announce them within `timeout`.
    pub fn open(connection: OwnedFd, timeout: Duration) -> Result<Self, Error> {
        let until = Instant::now() + timeout;
        let mut buffer = seqpacket::buffer();
        loop {
            wait_readable(&connection, Some(until.saturating_duration_since(Instant::now())));
            match seqpacket::receive(&connection, &mut buffer) {
                RecvResult::Packet(bytes, _) => match decode::<u16>(&buffer[..bytes]) {
                    (HELLO_ID, Some(shards)) => {
                        return Ok(Self { connection, shards, state: Mutex::new((0, buffer)) });
                    }
                    _ => {
                        return Err(Error::application("the process of the shards sent a malformed message"));
                    }
                },
                RecvResult::WouldBlock if Instant::now() < until => {}
                RecvResult::WouldBlock => {
                    return Err(Error::application("the process of the shards did not start in time"));
                }
                RecvResult::Closed | RecvResult::Oversized | RecvResult::NoDescriptors(_) => {
                    return Err(Error::StackGone);
                }
            }
        }
    }

    /// Returns the number of shards.
    pub(super) fn shards(&self) -> u16 {
        self.shards
    }

    /// Returns the connection.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    /// Returns whether the child is gone, or ends within `timeout`.
    pub(super) fn is_gone_within(&self, timeout: Duration) -> bool {
        let mut fds = [PollFd::new(&self.connection, PollFlags::empty())];
        matches!(poll(&mut fds, Some(&timespec(timeout))), Ok(1))
    }

    fn call(&self, shard: u16, request: &BrokerRequest) -> Result<BrokerReply, Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (last_id, buffer) = &mut *state;
        *last_id = (*last_id + 1) % HELLO_ID;
        let (message, descriptor) = request_message(*last_id, shard, request);
        let descriptors = descriptor.as_slice();
        seqpacket::send(&self.connection, &message, descriptors).map_err(|_| Error::StackGone)?;
        loop {
            wait_readable(&self.connection, None);
            match seqpacket::receive(&self.connection, buffer) {
                RecvResult::Packet(bytes, descriptors) => {
                    return match decode::<ReplyMessage>(&buffer[..bytes]) {
                        (id, Some(reply)) if id == *last_id => reply.with_descriptors(descriptors),
                        _ => None,
                    }
                    .ok_or(Error::StackGone);
                }
                RecvResult::WouldBlock => {}
                RecvResult::NoDescriptors(bytes) => {
                    let (_, reply) = decode::<ReplyMessage>(&buffer[..bytes]);
                    drop(state);
                    // Nobody can use a client whose memory was not received.
                    if let Some((domain, client)) = reply.and_then(|reply| reply.new_client(request)) {
                        self.call(shard, &BrokerRequest::Reap { domain, client })?;
                    }
                    return Ok(BrokerReply::NoResources(Errno::MFILE));
                }
                RecvResult::Closed | RecvResult::Oversized => return Err(Error::StackGone),
            }
        }
    }
}

/// A [`BrokerRequest`] without its descriptor.
#[derive(Debug)]
enum RequestMessage {
    OpenDomain,
    Admit(u8),
    Fork(u8, u32, Option<Vec<SocketId>>),
    Call(u8, u32, ChannelRequest),
    AddProxy(u8, u32, Vec<SocketId>),
    ResolveProxy(u8, u32, Vec<SocketId>),
    ReleaseProxy(u8, Vec<SocketId>),
    Reap(u8, u32),
    Own(u8, u32, Vec<SocketId>),
}
codec_enum!(RequestMessage {
    0 => OpenDomain, 1 => Admit(domain), 2 => Fork(domain, parent, kept), 3 => Call(domain, client, request),
    4 => AddProxy(domain, client, sockets), 5 => ResolveProxy(domain, client, sockets), 6 => ReleaseProxy(domain, sockets),
    7 => Reap(domain, client), 8 => Own(domain, client, sockets),
});

/// Returns a request as a message, and its descriptor.
fn request_message(id: u32, shard: u16, request: &BrokerRequest) -> (Vec<u8>, Option<BorrowedFd<'_>>) {
    let (message, wake) = match request {
        BrokerRequest::OpenDomain { wake } => (RequestMessage::OpenDomain, Some(wake)),
        BrokerRequest::Admit { domain, wake } => (RequestMessage::Admit(*domain), Some(wake)),
        BrokerRequest::Fork { domain, parent, kept, wake } => {
            (RequestMessage::Fork(*domain, *parent, kept.clone()), Some(wake))
        }
        BrokerRequest::Call { domain, client, request } => {
            (RequestMessage::Call(*domain, *client, request.clone()), None)
        }
        BrokerRequest::AddProxy { domain, client, sockets } => {
            (RequestMessage::AddProxy(*domain, *client, sockets.clone()), None)
        }
        BrokerRequest::ResolveProxy { domain, client, sockets } => {
            (RequestMessage::ResolveProxy(*domain, *client, sockets.clone()), None)
        }
        BrokerRequest::ReleaseProxy { domain, sockets } => {
            (RequestMessage::ReleaseProxy(*domain, sockets.clone()), None)
        }
        BrokerRequest::Reap { domain, client } => (RequestMessage::Reap(*domain, *client), None),
        BrokerRequest::Own { domain, client, sockets } => {
            (RequestMessage::Own(*domain, *client, sockets.clone()), None)
        }
    };
    (encode(id, &(shard, message)), wake.map(AsFd::as_fd))
}

impl RequestMessage {
    /// Returns the request with its descriptor; `None` if the descriptor that it needs is missing.
    fn with_descriptors(self, mut descriptors: Vec<OwnedFd>) -> Option<BrokerRequest> {
        Some(match self {
            Self::OpenDomain => BrokerRequest::OpenDomain { wake: descriptors.pop()? },
            Self::Admit(domain) => BrokerRequest::Admit { domain, wake: descriptors.pop()? },
            Self::Fork(domain, parent, kept) => {
                BrokerRequest::Fork { domain, parent, kept, wake: descriptors.pop()? }
            }
            Self::Call(domain, client, request) => BrokerRequest::Call { domain, client, request },
            Self::AddProxy(domain, client, sockets) => BrokerRequest::AddProxy { domain, client, sockets },
            Self::ResolveProxy(domain, client, sockets) => {
                BrokerRequest::ResolveProxy { domain, client, sockets }
            }
            Self::ReleaseProxy(domain, sockets) => BrokerRequest::ReleaseProxy { domain, sockets },
            Self::Reap(domain, client) => BrokerRequest::Reap { domain, client },
            Self::Own(domain, client, sockets) => BrokerRequest::Own { domain, client, sockets },
        })
    }
}

/// A [`BrokerReply`] without its descriptors.
#[derive(Debug)]
enum ReplyMessage {
    /// The domain and the client. The descriptors are the region, the descriptor that wakes the shard, and
    /// the client's memory.
    Opened(u8, u32),
    /// The client. The descriptor is its memory.
    Admitted(u32),
    Reply(ChannelReply),
    Done,
    Full(u32),
    NoResources(Errno),
    Unknown,
    ShardEnded,
}
codec_enum!(ReplyMessage {
    0 => Opened(domain, client), 1 => Admitted(client), 2 => Reply(reply), 3 => Done, 4 => Full(limit), 5 => NoResources(errno), 6 => Unknown,
    7 => ShardEnded,
});

impl ReplyMessage {
    /// Returns the domain and the number of the client that was admitted by this reply to `request`.
    fn new_client(&self, request: &BrokerRequest) -> Option<(u8, u32)> {
        match (self, request) {
            (Self::Opened(domain, client), _) => Some((*domain, *client)),
            (
                Self::Admitted(client),
                BrokerRequest::Admit { domain, .. } | BrokerRequest::Fork { domain, .. },
            ) => Some((*domain, *client)),
            _ => None,
        }
    }

    fn with_descriptors(self, descriptors: Vec<OwnedFd>) -> Option<BrokerReply> {
        Some(match self {
            Self::Opened(domain, number) => {
                let [region, wake, memory] = descriptors.try_into().ok()?;
                BrokerReply::Opened { domain, region, wake, client: AdmittedClient { number, memory } }
            }
            Self::Admitted(number) => {
                let [memory] = descriptors.try_into().ok()?;
                BrokerReply::Admitted(AdmittedClient { number, memory })
            }
            Self::Reply(reply) => BrokerReply::Reply(reply),
            Self::Done => BrokerReply::Done,
            Self::Full(limit) => BrokerReply::Full(limit),
            Self::NoResources(errno) => BrokerReply::NoResources(errno),
            Self::Unknown => BrokerReply::Unknown,
            Self::ShardEnded => return None,
        })
    }
}

/// Splits a reply into a message and its descriptors.
fn reply_message(reply: Result<BrokerReply, Error>) -> (ReplyMessage, Vec<OwnedFd>) {
    match reply {
        Ok(BrokerReply::Opened { domain, region, wake, client: AdmittedClient { number, memory } }) => {
            (ReplyMessage::Opened(domain, number), vec![region, wake, memory])
        }
        Ok(BrokerReply::Admitted(AdmittedClient { number, memory })) => {
            (ReplyMessage::Admitted(number), vec![memory])
        }
        Ok(BrokerReply::Reply(reply)) => (ReplyMessage::Reply(reply), Vec::new()),
        Ok(BrokerReply::Done) => (ReplyMessage::Done, Vec::new()),
        Ok(BrokerReply::Full(limit)) => (ReplyMessage::Full(limit), Vec::new()),
        Ok(BrokerReply::NoResources(errno)) => (ReplyMessage::NoResources(errno), Vec::new()),
        Ok(BrokerReply::Unknown) => (ReplyMessage::Unknown, Vec::new()),
        Err(_) => (ReplyMessage::ShardEnded, Vec::new()),
    }
}

/// Announces `shards` to the supervisor and carries out its requests, in the child, until the supervisor
/// closes the connection or is gone.
pub fn serve_broker(connection: &OwnedFd, shards: &[Commander]) {
    // Cannot truncate: there are at most 64 shards.
    if seqpacket::send(connection, &encode(HELLO_ID, &(shards.len() as u16)), &[]).is_err() {
        return;
    }
    let mut buffer = seqpacket::buffer();
    loop {
        wait_readable(connection, None);
        match seqpacket::receive(connection, &mut buffer) {
            RecvResult::Packet(bytes, descriptors) => {
                let (id, Some((shard, message))) = decode::<(u16, RequestMessage)>(&buffer[..bytes]) else {
                    return;
                };
                let request = message.with_descriptors(descriptors);
                let (Some(shard), Some(request)) = (shards.get(usize::from(shard)), request) else { return };
                let (message, descriptors) = reply_message(call_for_broker(shard, request));
                let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
                if seqpacket::send(connection, &encode(id, &message), &descriptors).is_err() {
                    return;
                }
            }
            RecvResult::NoDescriptors(bytes) => {
                let (id, _) = decode::<(u16, RequestMessage)>(&buffer[..bytes]);
                let reply = ReplyMessage::NoResources(Errno::MFILE);
                if seqpacket::send(connection, &encode(id, &reply), &[]).is_err() {
                    return;
                }
            }
            RecvResult::WouldBlock => {}
            RecvResult::Closed | RecvResult::Oversized => return,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::channel::control::AddressSharing;

    #[test]
    fn requests_survive_encoding() {
        let wake = || -> OwnedFd { std::fs::File::open("/dev/null").unwrap().into() };
        let sockets = || vec![SocketId::Listener(7), SocketId::Socket { socket: 1, generation: 2 }];
        let reserve = ChannelRequest::Reserve("10.0.0.1:80".parse().unwrap(), AddressSharing::default());
        let requests = [
            BrokerRequest::OpenDomain { wake: wake() },
            BrokerRequest::Admit { domain: 3, wake: wake() },
            BrokerRequest::Fork { domain: 3, parent: 4, kept: Some(sockets()), wake: wake() },
            BrokerRequest::Call { domain: 3, client: 4, request: reserve },
            BrokerRequest::AddProxy { domain: 3, client: 4, sockets: sockets() },
            BrokerRequest::ResolveProxy { domain: 3, client: 4, sockets: sockets() },
            BrokerRequest::ReleaseProxy { domain: 3, sockets: sockets() },
            BrokerRequest::Own { domain: 3, client: 4, sockets: sockets() },
            BrokerRequest::Reap { domain: 3, client: 4 },
        ];
        for request in &requests {
            let (bytes, descriptor) = request_message(9, 5, request);
            let (9, Some((5u16, decoded))) = decode::<(u16, RequestMessage)>(&bytes) else {
                panic!("{bytes:?}")
            };
            let needs_descriptor = descriptor.is_some();
            let text = format!("{decoded:?}");
            assert_eq!(decoded.with_descriptors(Vec::new()).is_none(), needs_descriptor, "{text}");
            let (_, Some((_, again))) = decode::<(u16, RequestMessage)>(&bytes) else { panic!() };
            let decoded = again.with_descriptors(vec![wake()]).unwrap();
            assert_eq!(request_message(9, 5, &decoded).0, bytes);
        }
    }

    #[test]
    fn a_child_that_ends_is_noticed() {
        let (supervisor_end, child_end) = link_pair().unwrap();
        let child = std::thread::spawn(move || serve_broker(&child_end, &[]));
        let link = Arc::new(ChildLink::open(supervisor_end, Duration::from_secs(10)).unwrap());
        assert_eq!(link.shards(), 0);
        // There is no such shard, so the child ends the connection.
        let request = BrokerRequest::Reap { domain: 0, client: 0 };
        assert!(ShardLink::Child(link, 1).call(request).is_err());
        child.join().unwrap();
        let (supervisor_end, child_end) = link_pair().unwrap();
        drop(child_end);
        assert!(ChildLink::open(supervisor_end, Duration::from_secs(10)).is_err());
    }

    #[test]
    fn the_end_is_awaited_for_whole_seconds() {
        let (supervisor_end, child_end) = link_pair().unwrap();
        let child = std::thread::spawn(move || serve_broker(&child_end, &[]));
        let link = Arc::new(ChildLink::open(supervisor_end, Duration::from_secs(10)).unwrap());
        assert!(!link.is_gone_within(Duration::from_millis(1)));
        let ending = link.clone();
        let call = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            ShardLink::Child(ending, 1).call(BrokerRequest::Reap { domain: 0, client: 0 }).is_err()
        });
        assert!(link.is_gone_within(Duration::from_secs(10)));
        assert!(call.join().unwrap());
        child.join().unwrap();
    }
}
