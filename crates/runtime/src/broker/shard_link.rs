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
//! gone. For an upgrade the supervisor asks the child to save the state of its shards, and passes the state
//! to the next child.

use super::codec::{Codec, codec_enum, codec_struct};
use super::message::{decode, encode};
use super::saved_state::{SaveShards, SavedState, ShardSummary};
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

/// Id of the messages until the child serves: what the supervisor passes on, and what the child says.
const HELLO_ID: u32 = u32::MAX;
/// How long the shards may take to save their state.
pub(super) const SAVE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the next batch of descriptors may take.
const STEP_TIMEOUT: Duration = Duration::from_secs(2);
/// How long all batches of descriptors may take.
pub(super) const TRANSFER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the shards may take to go on if their state is not passed on: they may still be saving.
pub(super) const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

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

/// Contains what a child starts with.
#[derive(Debug)]
pub struct ChildStart {
    /// TAP devices. The supervisor keeps their descriptors, so that the interfaces outlive the child.
    pub taps: KeptTaps,
    /// The state of the shards of the child before.
    pub state: Option<SavedState>,
}

/// The first message to a child: the TAP devices, whose descriptors are attached, and the state that follows
/// in batches of descriptors.
struct StartMessage {
    taps: Vec<(String, String, u16)>,
    state: Option<Vec<ShardSummary>>,
}
codec_struct!(StartMessage { taps, state });

/// Messages of a child until it serves.
enum ChildMessage {
    /// The child has this many shards, which serve.
    Serves(u16),
    /// Asks for the batch of descriptors of the saved state that begins with the descriptor of this number.
    Take(u32),
    /// The shards have taken over the saved state, and the child waits for a reply before their first turn.
    Restored,
}
codec_enum!(ChildMessage { 0 => Serves(shards), 1 => Take(first), 2 => Restored });

/// Sends the first message to a child that is being started: the descriptors of the TAP devices, and what is
/// said about the state. [`ChildLink::open`] passes on the state itself.
///
/// # Errors
/// There are more descriptors than a message may have, or the child is gone.
pub fn send_start(connection: &OwnedFd, taps: &KeptTaps, state: Option<&SavedState>) -> Result<(), Error> {
    let devices = taps
        .iter()
        .map(|(device, tap)| (device.clone(), tap.name.clone(), tap.queues.len() as u16))
        .collect();
    let message = StartMessage { taps: devices, state: state.map(SavedState::summary) };
    let descriptors: Vec<BorrowedFd<'_>> =
        taps.iter().flat_map(|(_, tap)| tap.queues.iter().map(AsFd::as_fd)).collect();
    seqpacket::send(connection, &encode(HELLO_ID, &message), &descriptors)
        .map_err(|e| Error::io("TAP devices for the process of the shards", e))
}

/// Receives what [`send_start`] has sent and the saved state, in the child.
///
/// # Errors
/// The supervisor is gone, its message is malformed, or this process has no descriptor left.
pub fn receive_start(connection: &OwnedFd) -> Result<ChildStart, Error> {
    let mut buffer = seqpacket::buffer();
    let mut receive = || {
        wait_readable(connection, None);
        match seqpacket::receive(connection, &mut buffer) {
            RecvResult::Packet(bytes, descriptors) => Ok((buffer[..bytes].to_vec(), descriptors)),
            RecvResult::NoDescriptors(_) => {
                Err(Error::io("descriptors of the supervisor", std::io::Error::from(Errno::MFILE)))
            }
            _ => Err(Error::StackGone),
        }
    };
    let (bytes, descriptors) = receive()?;
    let StartMessage { taps, state } = decode(&bytes).1.ok_or(Error::StackGone)?;
    let mut descriptors = descriptors.into_iter();
    let taps = taps.into_iter().map(|(device, name, queues)| {
        (device, TapDescriptors { name, queues: descriptors.by_ref().take(queues.into()).collect() })
    });
    let taps = taps.collect();
    let request = |first| {
        seqpacket::send(connection, &encode(HELLO_ID, &ChildMessage::Take(first)), &[])
            .map_err(|_| Error::StackGone)?;
        receive().map(|(_, descriptors)| descriptors)
    };
    let state = state.map(|summary| SavedState::receive(&summary, request)).transpose()?;
    Ok(ChildStart { taps, state })
}

/// Tells the supervisor that the shards have taken over the saved state, in the child, and waits until it
/// permits their first turn. Afterwards no other process may continue with this state. Returns false if the
/// supervisor does not permit it.
pub fn await_permission(connection: &OwnedFd) -> bool {
    let mut buffer = seqpacket::buffer();
    seqpacket::send(connection, &encode(HELLO_ID, &ChildMessage::Restored), &[]).is_ok() && {
        wait_readable(connection, None);
        matches!(seqpacket::receive(connection, &mut buffer), RecvResult::Packet(..))
    }
}

/// A child that does not serve.
#[derive(Debug)]
pub struct NotServing {
    /// Why.
    pub error: Error,
    /// True if its shards may have had turns, so that the saved state is out of date.
    pub has_used_state: bool,
}

/// Shards whose state was not saved.
#[derive(Debug)]
pub struct NotSaved {
    /// A sentence that says why.
    pub reason: String,
    /// True if the process of the shards does not answer any more.
    pub hangs: bool,
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
    /// Passes `state` to the child, and waits until it announces its shards.
    ///
    /// # Errors
    /// The child has ended, or does not announce them within `timeout`.
    pub fn open(
        connection: OwnedFd,
        state: Option<&SavedState>,
        timeout: Duration,
    ) -> Result<Self, NotServing> {
        let until = Instant::now() + timeout;
        let mut buffer = seqpacket::buffer();
        let mut has_used_state = false;
        let error = loop {
            wait_readable(&connection, Some(until.saturating_duration_since(Instant::now())));
            let reply = match seqpacket::receive(&connection, &mut buffer) {
                RecvResult::Packet(bytes, _) => match (decode::<ChildMessage>(&buffer[..bytes]), state) {
                    ((HELLO_ID, Some(ChildMessage::Serves(shards))), _) => {
                        return Ok(Self { connection, shards, state: Mutex::new((0, buffer)) });
                    }
                    ((HELLO_ID, Some(ChildMessage::Take(first))), Some(state)) => state.batch(first),
                    ((HELLO_ID, Some(ChildMessage::Restored)), Some(_)) => {
                        has_used_state = true;
                        Vec::new()
                    }
                    _ => break Error::application("the process of the shards sent a malformed message"),
                },
                RecvResult::WouldBlock if Instant::now() < until => continue,
                RecvResult::WouldBlock => {
                    break Error::application("the process of the shards did not start in time");
                }
                RecvResult::Closed | RecvResult::Oversized | RecvResult::NoDescriptors(_) => {
                    break Error::StackGone;
                }
            };
            if seqpacket::send(&connection, &encode(HELLO_ID, &()), &reply).is_err() {
                break Error::StackGone;
            }
        };
        Err(NotServing { error, has_used_state })
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

    /// Has the child stop its shards and save their state, within `timeout`. The shards stay stopped until
    /// [`release`](Self::release) or the end of the child.
    ///
    /// # Errors
    /// A sentence that says why the state was not saved. The shards run then, unless the child has ended or
    /// hangs.
    pub(super) fn save(&self, timeout: Duration) -> Result<SavedState, NotSaved> {
        let ended = |_| NotSaved {
            reason: "the process of the shards has ended while it saved its state".into(),
            hangs: false,
        };
        let malformed = "the process of the shards sent a malformed message";
        let summary = match self.exchange(&LinkRequest::Save, timeout).map_err(ended)? {
            Some(LinkReply::Saved(summary)) => summary,
            Some(LinkReply::NotSaved(reason)) => return Err(NotSaved { reason, hangs: false }),
            Some(_) => return Err(NotSaved { reason: malformed.into(), hangs: !self.release() }),
            None => {
                let reason = format!("the shards did not save their state within {} s", timeout.as_secs());
                return Err(NotSaved { reason, hangs: !self.release() });
            }
        };
        let until = Instant::now() + TRANSFER_TIMEOUT;
        let taken = SavedState::receive(&summary, |first| {
            let timeout = STEP_TIMEOUT.min(until.saturating_duration_since(Instant::now()));
            if timeout.is_zero() {
                let seconds = TRANSFER_TIMEOUT.as_secs();
                return Err(Error::application(format!(
                    "the descriptors of the shards did not arrive within {seconds} s"
                )));
            }
            match self.exchange_with_descriptors(&LinkRequest::Take(first), timeout)? {
                Some((LinkReply::Batch, descriptors)) => Ok(descriptors),
                _ => Err(Error::application("the supervisor cannot receive the descriptors of the shards")),
            }
        });
        taken.map_err(|error| NotSaved { reason: error.to_string(), hangs: !self.release() })
    }

    /// Has stopped shards go on. Returns false if the child does not answer.
    pub(super) fn release(&self) -> bool {
        matches!(self.exchange(&LinkRequest::Release, RELEASE_TIMEOUT), Ok(Some(LinkReply::Released)))
    }

    fn exchange(&self, request: &LinkRequest, timeout: Duration) -> Result<Option<LinkReply>, Error> {
        Ok(self.exchange_with_descriptors(request, timeout)?.map(|(reply, _)| reply))
    }

    /// Sends a request that is not for a single shard, and waits for the reply; `None` if there is none
    /// within `timeout`, or if this process cannot receive its descriptors.
    fn exchange_with_descriptors(
        &self,
        request: &LinkRequest,
        timeout: Duration,
    ) -> Result<Option<(LinkReply, Vec<OwnedFd>)>, Error> {
        let until = Instant::now() + timeout;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (last_id, buffer) = &mut *state;
        *last_id = (*last_id + 1) % HELLO_ID;
        seqpacket::send(&self.connection, &encode(*last_id, request), &[]).map_err(|_| Error::StackGone)?;
        loop {
            wait_readable(&self.connection, Some(until.saturating_duration_since(Instant::now())));
            match seqpacket::receive(&self.connection, buffer) {
                RecvResult::Packet(bytes, descriptors) => {
                    let (id, reply) = decode::<LinkReply>(&buffer[..bytes]);
                    // Replies to requests that were given up come late.
                    if id == *last_id {
                        return Ok(Some((reply.ok_or(Error::StackGone)?, descriptors)));
                    }
                }
                RecvResult::WouldBlock if Instant::now() < until => {}
                RecvResult::WouldBlock | RecvResult::NoDescriptors(_) => return Ok(None),
                RecvResult::Closed | RecvResult::Oversized => return Err(Error::StackGone),
            }
        }
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
                    let (id, reply) = decode::<LinkReply>(&buffer[..bytes]);
                    // Replies to requests that were given up come late.
                    if id == *last_id {
                        let reply = match reply {
                            Some(LinkReply::Shard(reply)) => reply.with_descriptors(descriptors),
                            _ => None,
                        };
                        return reply.ok_or(Error::StackGone);
                    }
                }
                RecvResult::WouldBlock => {}
                RecvResult::NoDescriptors(bytes) => {
                    let (_, reply) = decode::<LinkReply>(&buffer[..bytes]);
                    drop(state);
                    // Nobody can use a client whose memory was not received.
                    let Some(LinkReply::Shard(reply)) = reply else { return Err(Error::StackGone) };
                    if let Some((domain, client)) = reply.new_client(request) {
                        self.call(shard, &BrokerRequest::Reap { domain, client })?;
                    }
                    return Ok(BrokerReply::NoResources(Errno::MFILE));
                }
                RecvResult::Closed | RecvResult::Oversized => return Err(Error::StackGone),
            }
        }
    }
}

/// A request to a child that serves.
#[derive(Debug)]
enum LinkRequest {
    /// A request to the shard with this index.
    Shard(u16, Box<RequestMessage>),
    /// Asks the child to stop its shards and to save their state.
    Save,
    /// Asks for the batch of descriptors of the saved state that begins with the descriptor of this number.
    Take(u32),
    /// Has stopped shards go on.
    Release,
}
codec_enum!(LinkRequest { 0 => Shard(shard, request), 1 => Save, 2 => Take(first), 3 => Release });

/// A reply of a child that serves.
#[derive(Debug)]
enum LinkReply {
    /// To [`LinkRequest::Shard`].
    Shard(ReplyMessage),
    /// To [`LinkRequest::Save`]: the shards are stopped, and their state can be taken.
    Saved(Vec<ShardSummary>),
    /// To [`LinkRequest::Save`]: the shards go on, for this reason.
    NotSaved(String),
    /// To [`LinkRequest::Take`]: the descriptors are attached.
    Batch,
    /// To [`LinkRequest::Release`].
    Released,
}
codec_enum!(LinkReply { 0 => Shard(reply), 1 => Saved(summary), 2 => NotSaved(reason), 3 => Batch, 4 => Released });

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
    (encode(id, &LinkRequest::Shard(shard, Box::new(message))), wake.map(AsFd::as_fd))
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

/// Waits until each shard runs. Returns false if one has ended, or could not be built.
pub fn await_shards(shards: &[Commander]) -> bool {
    // Has no effect, whether the domain exists or not.
    let request = || BrokerRequest::ReleaseProxy { domain: 0, sockets: Vec::new() };
    shards.iter().all(|shard| call_for_broker(shard, request()).is_ok())
}

/// Announces `shards` to the supervisor and carries out its requests, in the child, until the supervisor
/// closes the connection or is gone. `saver` stops the shards for an upgrade.
pub fn serve_broker(connection: &OwnedFd, shards: &[Commander], saver: &mut dyn SaveShards) {
    let send = |id, message: &LinkReply, descriptors: &[BorrowedFd<'_>]| {
        seqpacket::send(connection, &encode(id, message), descriptors).is_ok()
    };
    // Cannot truncate: there are at most 64 shards.
    let announcement = ChildMessage::Serves(shards.len() as u16);
    if seqpacket::send(connection, &encode(HELLO_ID, &announcement), &[]).is_err() {
        return;
    }
    let mut buffer = seqpacket::buffer();
    let mut saved: Option<SavedState> = None;
    loop {
        wait_readable(connection, None);
        let is_sent = match seqpacket::receive(connection, &mut buffer) {
            RecvResult::Packet(bytes, descriptors) => {
                let (id, Some(request)) = decode::<LinkRequest>(&buffer[..bytes]) else { return };
                match request {
                    LinkRequest::Shard(shard, message) => {
                        let request = message.with_descriptors(descriptors);
                        let (Some(shard), Some(request)) = (shards.get(usize::from(shard)), request) else {
                            return;
                        };
                        let (message, descriptors) = reply_message(call_for_broker(shard, request));
                        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
                        send(id, &LinkReply::Shard(message), &descriptors)
                    }
                    LinkRequest::Save => match saver.save() {
                        Ok(state) => {
                            let summary = state.summary();
                            saved = Some(state);
                            send(id, &LinkReply::Saved(summary), &[])
                        }
                        Err(reason) => send(id, &LinkReply::NotSaved(reason), &[]),
                    },
                    LinkRequest::Take(first) => {
                        let batch = saved.as_ref().map_or_else(Vec::new, |state| state.batch(first));
                        send(id, &LinkReply::Batch, &batch)
                    }
                    LinkRequest::Release => {
                        if saved.take().is_some() {
                            saver.release();
                        }
                        send(id, &LinkReply::Released, &[])
                    }
                }
            }
            RecvResult::NoDescriptors(bytes) => {
                let (id, _) = decode::<LinkRequest>(&buffer[..bytes]);
                send(id, &LinkReply::Shard(ReplyMessage::NoResources(Errno::MFILE)), &[])
            }
            RecvResult::WouldBlock => true,
            RecvResult::Closed | RecvResult::Oversized => return,
        };
        if !is_sent {
            return;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::saved_state::ShardState;
    use super::*;
    use crate::channel::control::AddressSharing;
    use std::sync::atomic::{AtomicU32, Ordering};

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
            let decoded = || match decode::<LinkRequest>(&bytes) {
                (9, Some(LinkRequest::Shard(5, decoded))) => *decoded,
                other => panic!("{other:?}"),
            };
            let needs_descriptor = descriptor.is_some();
            let text = format!("{:?}", decoded());
            assert_eq!(decoded().with_descriptors(Vec::new()).is_none(), needs_descriptor, "{text}");
            let decoded = decoded().with_descriptors(vec![wake()]).unwrap();
            assert_eq!(request_message(9, 5, &decoded).0, bytes);
        }
    }

    /// Shards with a state of opaque bytes and open pipes.
    #[derive(Default)]
    struct FakeShards {
        /// Number of descriptors of each shard.
        descriptors: Vec<usize>,
        refusal: Option<String>,
        /// How long the shards take to save their state.
        delay: Duration,
        panics: bool,
        released: Arc<AtomicU32>,
    }

    impl SaveShards for FakeShards {
        fn save(&mut self) -> Result<SavedState, String> {
            std::thread::sleep(self.delay);
            assert!(!self.panics, "the process of the shards dies");
            if let Some(reason) = &self.refusal {
                return Err(reason.clone());
            }
            let of = |(shard, &count): (usize, &usize)| {
                let pipes = (0..count).map(|_| std::io::pipe().unwrap().0.into()).collect();
                ShardState::new(&[shard as u8; 100], pipes, 7).unwrap()
            };
            Ok(SavedState::new(self.descriptors.iter().enumerate().map(of).collect()))
        }

        fn release(&mut self) {
            self.released.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Starts a thread in the place of a child. Returns the supervisor's end, and the thread.
    fn serve(mut shards: FakeShards) -> (ChildLink, std::thread::JoinHandle<()>) {
        let (supervisor_end, child_end) = link_pair().unwrap();
        let child = std::thread::spawn(move || serve_broker(&child_end, &[], &mut shards));
        (ChildLink::open(supervisor_end, None, Duration::from_secs(10)).unwrap(), child)
    }

    #[test]
    fn saved_state_reaches_the_next_child() {
        let descriptors = vec![3, 200, 0];
        let (link, child) = serve(FakeShards { descriptors: descriptors.clone(), ..FakeShards::default() });
        let state = link.save(Duration::from_secs(10)).unwrap();
        assert_eq!(state.connections(), 21);
        drop(link);
        child.join().unwrap();
        // A state can be restored again if the first child that gets it fails.
        for _ in 0..2 {
            let (supervisor_end, child_end) = link_pair().unwrap();
            send_start(&supervisor_end, &Vec::new(), Some(&state)).unwrap();
            let child = std::thread::spawn(move || {
                let start = receive_start(&child_end).unwrap();
                serve_broker(&child_end, &[], &mut FakeShards::default());
                start
            });
            let link = ChildLink::open(supervisor_end, Some(&state), Duration::from_secs(10)).unwrap();
            drop(link);
            let start = child.join().unwrap();
            let shards = start.state.unwrap().into_shards();
            assert_eq!((start.taps.len(), shards.len()), (0, 3));
            for ((shard, state), count) in shards.into_iter().enumerate().zip(&descriptors) {
                let state = state.load().unwrap();
                assert_eq!((state.bytes, state.descriptors.len()), (vec![shard as u8; 100], *count));
            }
        }
    }

    #[test]
    fn shards_without_a_state_start_empty() {
        let (supervisor_end, child_end) = link_pair().unwrap();
        send_start(&supervisor_end, &Vec::new(), None).unwrap();
        assert!(receive_start(&child_end).unwrap().state.is_none());
        drop(supervisor_end);
        assert!(receive_start(&child_end).is_err());
    }

    #[test]
    fn a_state_is_used_once_turns_are_permitted() {
        for is_permitted in [false, true] {
            let (supervisor_end, child_end) = link_pair().unwrap();
            let child = std::thread::spawn(move || assert!(!is_permitted || await_permission(&child_end)));
            let state = SavedState::new(Vec::new());
            let failed = ChildLink::open(supervisor_end, Some(&state), Duration::from_secs(10)).unwrap_err();
            child.join().unwrap();
            assert!(matches!(failed.error, Error::StackGone), "{failed:?}");
            assert_eq!(failed.has_used_state, is_permitted);
        }
        let (supervisor_end, child_end) = link_pair().unwrap();
        drop(supervisor_end);
        assert!(!await_permission(&child_end));
    }

    #[test]
    fn released_shards_can_be_saved_again() {
        let released = Arc::<AtomicU32>::default();
        let shards = FakeShards { descriptors: vec![1], released: released.clone(), ..FakeShards::default() };
        let (link, child) = serve(shards);
        for times in 1..=2 {
            drop(link.save(Duration::from_secs(10)).unwrap());
            assert!(link.release());
            assert_eq!(released.load(Ordering::Relaxed), times);
        }
        assert!(link.release(), "nothing is stopped");
        assert_eq!(released.load(Ordering::Relaxed), 2);
        drop(link);
        child.join().unwrap();
    }

    #[test]
    fn shards_say_why_they_save_nothing() {
        let refusal = "shard 1 has a connection with a source of its own";
        let (link, child) = serve(FakeShards { refusal: Some(refusal.into()), ..FakeShards::default() });
        let refused = link.save(Duration::from_secs(10)).unwrap_err();
        assert_eq!((&*refused.reason, refused.hangs), (refusal, false));
        assert!(!link.is_gone_within(Duration::ZERO));
        drop(link);
        child.join().unwrap();
    }

    #[test]
    fn late_state_is_dropped() {
        let released = Arc::<AtomicU32>::default();
        let delay = Duration::from_millis(500);
        let shards =
            FakeShards { descriptors: vec![1], delay, released: released.clone(), ..FakeShards::default() };
        let (link, child) = serve(shards);
        let late = link.save(Duration::from_millis(10)).unwrap_err();
        assert!(!late.hangs && late.reason.contains("did not save their state"), "{late:?}");
        // The shards were released when their state was there, and its announcement is ignored.
        assert_eq!(released.load(Ordering::Relaxed), 1);
        assert!(link.save(Duration::from_secs(10)).is_ok());
        drop(link);
        child.join().unwrap();
    }

    #[test]
    fn a_child_that_dies_while_saving_is_noticed() {
        let (link, child) = serve(FakeShards { panics: true, ..FakeShards::default() });
        let ended = link.save(Duration::from_secs(10)).unwrap_err();
        assert!(!ended.hangs && ended.reason.contains("has ended while"), "{ended:?}");
        assert!(link.is_gone_within(Duration::from_secs(10)));
        assert!(child.join().is_err());
    }

    #[test]
    fn a_child_that_ends_is_noticed() {
        let (supervisor_end, child_end) = link_pair().unwrap();
        let child = std::thread::spawn(move || serve_broker(&child_end, &[], &mut FakeShards::default()));
        let link = Arc::new(ChildLink::open(supervisor_end, None, Duration::from_secs(10)).unwrap());
        assert_eq!(link.shards(), 0);
        // There is no such shard, so the child ends the connection.
        let request = BrokerRequest::Reap { domain: 0, client: 0 };
        assert!(ShardLink::Child(link, 1).call(request).is_err());
        child.join().unwrap();
        let (supervisor_end, child_end) = link_pair().unwrap();
        drop(child_end);
        assert!(ChildLink::open(supervisor_end, None, Duration::from_secs(10)).is_err());
    }

    #[test]
    fn the_end_is_awaited_for_whole_seconds() {
        let (supervisor_end, child_end) = link_pair().unwrap();
        let child = std::thread::spawn(move || serve_broker(&child_end, &[], &mut FakeShards::default()));
        let link = Arc::new(ChildLink::open(supervisor_end, None, Duration::from_secs(10)).unwrap());
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
