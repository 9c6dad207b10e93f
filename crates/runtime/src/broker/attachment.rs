//! Attachment of a process to a stack: the control connection to the broker, and a client
//! for each shard.

mod fd_passing;
mod inherit;
mod resume;
mod unattached;

pub use inherit::PreparedProcess;
pub use unattached::UnattachedProcess;

use super::SOCKET_NAME;
use super::codec::Codec;
use super::control_listener::connect_to;
use super::message::{
    ControlReply, ControlRequest, Hello, MAGIC, PROTOCOL_VERSION, Refusal, StackInfo, decode, encode,
};
use super::seqpacket::{self, RecvResult};
use super::unreachable::UnreachableStack;
use crate::channel::Client;
use crate::channel::client::ClientParts;
use crate::channel::control::{ChannelReply, ChannelRequest, ControlPath};
use crate::error::Error;
use crate::internal_fd::InternalFd;
use crate::raised_limit::{RaisedLimit, with_raised_limit};
use crate::run_dir;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a process waits for a reply. A request costs a turn of its shard; but during an upgrade the
/// broker answers nobody until the next process runs the shards, or has failed to and the former executable
/// runs them again. Only a stack that is stuck takes this long.
const REPLY_TIMEOUT: Duration = Duration::from_secs(75);
/// How long a process that starts waits to be admitted. It has no sockets yet, and can be started again.
pub(super) const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a process that is admitted asks for the shards that are started next.
const RESUME_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to the broker. At most one caller at a time waits for a reply.
#[derive(Debug)]
struct ControlConnection {
    fd: InternalFd,
    /// Id of the last request.
    last_request: u32,
    /// Receive buffer, allocated by the first request: most children never send one.
    buffer: Vec<u8>,
    /// The descriptors of a reply may get numbers above the soft limit.
    is_short: bool,
}

impl ControlConnection {
    fn new(fd: OwnedFd) -> Result<Self, Error> {
        let fd = InternalFd::new(fd).map_err(|e| Error::io("connection to the stack", e))?;
        Ok(Self::from_internal_fd(fd))
    }

    fn from_internal_fd(fd: InternalFd) -> Self {
        Self { fd, last_request: 0, buffer: Vec::new(), is_short: false }
    }

    /// Sends [`Hello`] and attaches to every shard. Returns the descriptor that wakes this process, the
    /// attachments by shard, and the properties of the stack.
    fn greet(&mut self, domain: &str, may_resume: bool) -> Result<AttachedShards, Error> {
        let pidfd = with_raised_limit(is_errno_mfile, || pidfd_open(getpid(), PidfdFlags::empty()));
        let pidfd = pidfd.map_err(|e| Error::io("pidfd of this process", e))?;
        let hello = Hello { magic: MAGIC, version: PROTOCOL_VERSION, domain: domain.into() };
        let welcome = Self::welcome(self.request_within(HELLO_TIMEOUT, &hello, &[pidfd.as_fd()])?)?;
        match self.attach_shards(welcome) {
            // The process is admitted to the shards that are started next.
            Err(Error::Refused(Refusal::ShardEnded)) if may_resume => self.resume(&mut 0, RESUME_TIMEOUT),
            attached => attached,
        }
    }

    /// Sends a message whose reply is a [`Welcome`].
    fn request_welcome(
        &mut self,
        message: &impl Codec,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<Welcome, Error> {
        Self::welcome(self.request(message, descriptors)?)
    }

    /// Returns the [`Welcome`] of a reply.
    fn welcome((reply, mut wake): (ControlReply, Vec<OwnedFd>)) -> Result<Welcome, Error> {
        let malformed = || Error::Refused(Refusal::Malformed);
        let ControlReply::Welcome(shards, stack_info) = reply else { return Err(malformed()) };
        Ok(Welcome { shards, stack_info, wake: wake.pop().ok_or_else(malformed)? })
    }

    /// Attaches to every shard.
    fn attach_shards(&mut self, welcome: Welcome) -> Result<AttachedShards, Error> {
        let malformed = || Error::Refused(Refusal::Malformed);
        let Welcome { shards, stack_info, wake } = welcome;
        let mut attachments = Vec::new();
        for shard in 0..shards {
            let (ControlReply::Attached(client), descriptors) =
                self.request(&ControlRequest::Attach(shard), &[])?
            else {
                return Err(malformed());
            };
            let [region, memory, stack] = <[OwnedFd; 3]>::try_from(descriptors).map_err(|_| malformed())?;
            attachments.push(ShardAttachment { client, region, memory, stack_wake: stack });
        }
        Ok(AttachedShards { shards: attachments, wake, stack_info })
    }

    /// Sends a request and does not wait for its reply, which the next [`request`](Self::request) skips.
    fn send_request(&mut self, message: &impl Codec, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
        if self.buffer.is_empty() {
            self.buffer = seqpacket::buffer();
        }
        self.last_request = self.last_request.wrapping_add(1);
        seqpacket::send(&self.fd, &encode(self.last_request, message), descriptors)
            .map_err(|_| hangup_reason(&self.fd, &mut self.buffer))
    }

    /// Receives a packet without waiting. The limit is that of all threads, so it is raised only during this
    /// call.
    fn receive(&mut self) -> RecvResult {
        let _raised = self.is_short.then(RaisedLimit::new);
        seqpacket::receive(&self.fd, &mut self.buffer)
    }

    /// Sends a request and waits for its reply and the descriptors in it.
    fn request(
        &mut self,
        message: &impl Codec,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(ControlReply, Vec<OwnedFd>), Error> {
        self.request_within(REPLY_TIMEOUT, message, descriptors)
    }

    /// Sends a request and waits up to `timeout` for its reply and the descriptors in it.
    fn request_within(
        &mut self,
        timeout: Duration,
        message: &impl Codec,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(ControlReply, Vec<OwnedFd>), Error> {
        self.send_request(message, descriptors)?;
        let deadline = Instant::now() + timeout;
        loop {
            // The reply comes from another thread, so it is never there yet.
            let remaining = deadline.saturating_duration_since(Instant::now());
            let remaining =
                Timespec { tv_sec: remaining.as_secs() as i64, tv_nsec: remaining.subsec_nanos().into() };
            // The result is not needed: `receive` tells whether there is a packet, also after a signal.
            let _ = poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&remaining));
            match self.receive() {
                RecvResult::Packet(bytes, descriptors) => match decode::<ControlReply>(&self.buffer[..bytes])
                {
                    (request_id, Some(reply)) if request_id == self.last_request || request_id == 0 => {
                        match reply {
                            ControlReply::Refused(refusal) => return Err(Error::Refused(refusal)),
                            reply => return Ok((reply, descriptors)),
                        }
                    }
                    // The reply to a request whose sender did not wait for it.
                    (_, Some(_)) => {}
                    (_, None) => return Err(Error::Refused(Refusal::Malformed)),
                },
                RecvResult::WouldBlock if Instant::now() >= deadline => {
                    let text = "reply of the stack, whose process is stopped or overloaded";
                    return Err(Error::io(text, std::io::ErrorKind::TimedOut));
                }
                RecvResult::WouldBlock => {}
                RecvResult::Closed => return Err(hangup_reason(&self.fd, &mut self.buffer)),
                RecvResult::Oversized => return Err(Error::Refused(Refusal::Malformed)),
                RecvResult::NoDescriptors(_) => {
                    let error = std::io::Error::from_raw_os_error(Errno::MFILE.raw_os_error());
                    return Err(Error::io("descriptors of the stack", error));
                }
            }
        }
    }
}

/// Returns whether an error of the kernel says that the process has no number left for a descriptor.
fn is_errno_mfile(errno: &Errno) -> bool {
    *errno == Errno::MFILE
}

/// As [`is_errno_mfile`].
fn is_io_mfile(error: &std::io::Error) -> bool {
    Errno::from_io_error(error).is_some_and(|errno| is_errno_mfile(&errno))
}

/// Calls `request` with false. Calls it again with true if the process had no number left for the descriptors
/// of a reply, which are lost then: they may get numbers above the soft limit.
fn request_again_if_short<T>(mut request: impl FnMut(bool) -> Result<T, Error>) -> Result<T, Error> {
    match request(false) {
        Err(Error::Io(_, cause)) if is_io_mfile(&cause) => request(true),
        result => result,
    }
}

/// Returns why the stack closed the connection: a refusal that waits in the receive queue, or else
/// [`Error::StackGone`].
fn hangup_reason(connection: &InternalFd, buffer: &mut [u8]) -> Error {
    // The first call may report the failed send (`ECONNRESET`).
    for _ in 0..2 {
        if let RecvResult::Packet(bytes, _) = seqpacket::receive(connection, buffer)
            && let (_, Some(ControlReply::Refused(refusal))) = decode::<ControlReply>(&buffer[..bytes])
        {
            return Error::Refused(refusal);
        }
    }
    Error::StackGone
}

/// A reply of the broker that admits a process.
struct Welcome {
    shards: u16,
    stack_info: StackInfo,
    /// Wakes the process.
    wake: OwnedFd,
}

/// The attachments to all shards.
struct AttachedShards {
    shards: Vec<ShardAttachment>,
    /// Wakes the process.
    wake: OwnedFd,
    stack_info: StackInfo,
}

/// The attachment to one shard.
struct ShardAttachment {
    client: u32,
    region: OwnedFd,
    memory: OwnedFd,
    stack_wake: OwnedFd,
}

/// Sends the rare requests of a client. The clients of all shards share the connection.
struct BrokerControl {
    connection: Arc<Mutex<ControlConnection>>,
    shard: u16,
}

impl ControlPath for BrokerControl {
    fn call(&mut self, _client: usize, request: ChannelRequest) -> Result<ChannelReply, Error> {
        match request {
            // Only the close of the connection detaches a process: a child must not detach its parent.
            ChannelRequest::Detach => Ok(ChannelReply::Done),
            ChannelRequest::Counters => {
                Err(Error::application("channel: the broker does not serve counters"))
            }
            request => match lock_connection(&self.connection)
                .request(&ControlRequest::Shard(self.shard, request), &[])?
                .0
            {
                ControlReply::Reply(reply) => Ok(reply),
                _ => Err(Error::Refused(Refusal::Malformed)),
            },
        }
    }

    fn post(&mut self, _client: usize, request: ChannelRequest) -> Result<(), Error> {
        lock_connection(&self.connection).send_request(&ControlRequest::Shard(self.shard, request), &[])
    }
}

fn lock_connection(connection: &Mutex<ControlConnection>) -> std::sync::MutexGuard<'_, ControlConnection> {
    // A thread that panicked may have left a reply in the queue, which the next request skips by its id.
    connection.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens the clients of a process that has attached to the shards.
fn open_clients(
    connection: &Arc<Mutex<ControlConnection>>,
    wake: &OwnedFd,
    attachments: Vec<ShardAttachment>,
) -> Result<Vec<Client>, Error> {
    let open = |(shard, attachment): (usize, ShardAttachment)| {
        let ShardAttachment { client, region, memory, stack_wake } = attachment;
        // Cannot truncate: the number of shards was received as a `u16`.
        let control = BrokerControl { connection: connection.clone(), shard: shard as u16 };
        let client_wake = with_raised_limit(is_io_mfile, || wake.try_clone());
        let client_wake = client_wake.map_err(|e| Error::io("wake-up descriptor", e))?;
        Client::open(ClientParts { region, memory, stack_wake, client_wake, client }, Box::new(control))
    };
    attachments.into_iter().enumerate().map(open).collect()
}

/// The attachment of this process to a stack: a client for each shard. One descriptor wakes the process for
/// all of them.
pub struct Attachment {
    connection: Arc<Mutex<ControlConnection>>,
    clients: Vec<Client>,
    stack_info: StackInfo,
}

impl Attachment {
    /// Attaches to the stack whose broker listens at `path`, in the domain of this name. Processes of one
    /// user in one domain may share sockets.
    ///
    /// # Errors
    /// Nobody listens there, or the broker refuses ([`Error::Refused`]).
    pub fn connect(path: &Path, domain: &str) -> Result<Self, Error> {
        request_again_if_short(|is_short| {
            let connection = connect_to(path).map_err(|e| UnreachableStack::error(path, e))?;
            Self::greet(connection, domain, true, is_short)
        })
    }

    /// Attaches to the stack of this name, or to the only running stack of this user.
    ///
    /// # Errors
    /// No such stack runs; several run and no name was given; or as [`Attachment::connect`].
    pub fn find(stack: Option<&str>, domain: &str) -> Result<Self, Error> {
        Self::connect(&run_dir::find(stack)?.path.join(SOCKET_NAME), domain)
    }

    /// Attaches over a connection that [`Broker::open_connection`](super::Broker::open_connection) created
    /// for this process.
    ///
    /// # Errors
    /// As [`Attachment::connect`].
    pub fn from_connection(connection: OwnedFd) -> Result<Self, Error> {
        Self::greet(connection, "", true, false)
    }

    /// Attaches. If `may_resume` is false, an end of the shards meanwhile is an error: sockets that the
    /// process inherits end with them. If `is_short` is true, the descriptors of replies may get numbers
    /// above the soft limit.
    fn greet(connection: OwnedFd, domain: &str, may_resume: bool, is_short: bool) -> Result<Self, Error> {
        let mut connection = ControlConnection::new(connection)?;
        connection.is_short = is_short;
        let AttachedShards { shards, wake, stack_info } = connection.greet(domain, may_resume)?;
        connection.is_short = false;
        let connection = Arc::new(Mutex::new(connection));
        let clients = open_clients(&connection, &wake, shards)?;
        Ok(Self { connection, clients, stack_info })
    }

    /// Returns the properties of this stack.
    pub fn stack_info(&self) -> &StackInfo {
        &self.stack_info
    }

    /// Returns whether the stack closed the connection: its process ended, or dropped its broker.
    pub fn is_disconnected(&self) -> bool {
        let connection = lock_connection(&self.connection);
        let mut fds = [PollFd::new(&connection.fd, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(1)) && fds[0].revents().contains(PollFlags::HUP)
    }

    /// Returns the descriptor of the connection to the broker.
    pub fn connection_fd(&self) -> RawFd {
        lock_connection(&self.connection).fd.as_raw_fd()
    }

    /// See [`InternalFd::relocate_from`].
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn relocate_from(&self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        lock_connection(&self.connection).fd.relocate_from(number)
    }

    /// Takes the next client, in the order of shards; `None` if all were taken. Keep the attachment: when it
    /// is dropped, the stack releases all references of this process.
    pub fn take_client(&mut self) -> Option<Client> {
        if self.clients.is_empty() { None } else { Some(self.clients.remove(0)) }
    }

    /// Returns the clients that were not taken, in the order of shards.
    pub fn clients(&mut self) -> &mut [Client] {
        &mut self.clients
    }
}
