//! The thread of the broker: records which processes are attached and which sockets they own, and carries out
//! their requests. It validates everything that a process sends.

mod hand_over;
mod process_log;
mod restart;
mod upgrade;

pub use hand_over::{HAND_OVER_TIMEOUT, HandOver, HandOverInProgress};
pub use restart::AfterDeath;
pub(super) use restart::Supervision;
use restart::{END_TIMEOUT, PreviousDomains, RestoredSockets, SupervisedShards};
pub use upgrade::UpgradeShards;

use super::BrokerCounters;
use super::admission::{self, AdmissionLimits, PeerUser};
use super::attached::{AttachedProcesses, pid_of};
use super::control_listener::{AcceptedPeer, ControlListener, creator_uid};
use super::message::{
    ControlReply, ControlRequest, DOMAIN_NAME_BYTES_MAX, GlobalSocketId, Hello, MAGIC, MAGIC_CHILD,
    MAGIC_UNATTACHED, MAGIC_UPGRADE, METADATA_BYTES_MAX, PROTOCOL_VERSION, PreviousSocket, ProxyContents,
    Refusal, SOCKETS_PER_MESSAGE_MAX, StackInfo, decode, encode, unattached,
};
use super::seqpacket::{self, RecvResult};
use super::shard_link::{ChildLink, NotSaved, ShardLink};
use crate::channel::control::{AdmittedClient, BrokerReply, BrokerRequest, ChannelReply, ChannelRequest};
use crate::channel::{SocketId, announce_end};
use crate::errno;
use crate::wait::EventFd;
use ginnel_devices::resource_limit::resource_limit;
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use rustix::process::{Resource, geteuid};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};

/// Most proxy descriptors of a domain. Each takes a descriptor of the stack's process.
// limit: sockets of a domain in SCM_RIGHTS messages
pub(super) const PROXY_FDS_MAX: usize = 256;
/// A barrier is passed after this many calls of epoll_wait(2), even if descriptors are always ready. Each
/// call returns many events, so all that was pending when the barrier was requested has been processed by
/// then.
const BARRIER_WAITS_MAX: u32 = 64;
/// Most packets of one process that are handled before other events. The end of a connection is seen after
/// its last packet.
const PACKETS_PER_EVENT: u32 = 4;
/// Events per call of epoll_wait(2).
const EVENTS_PER_WAIT: usize = 64;
/// Pause after an error that would recur at once, usually for lack of descriptors.
const ERROR_PAUSE: std::time::Duration = std::time::Duration::from_millis(100);

const COMMAND_EVENT: u64 = u64::MAX;
const LISTENER_EVENT: u64 = u64::MAX - 1;
const LINK_EVENT: u64 = u64::MAX - 2;

/// Kind of the descriptor that an event is about; with the id of an entry it makes up the event's data.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EventSource {
    Connection = 0,
    Process = 1,
    ProxyFd = 2,
}

/// Commands of other threads of the stack's process.
pub(super) enum BrokerCommand {
    /// The broker's end of a connection of a program that joins the domain of this name.
    Connection(OwnedFd, String),
    /// Requests a message once everything that is pending now has been processed.
    Barrier(Sender<()>),
    /// Sets the process that runs the shards, and how to start the next one.
    Supervise(Supervision),
    /// Stops the shards for an upgrade, and waits until another process has their state.
    HandOver(Sender<Result<HandOverInProgress, NotSaved>>),
    /// Ends the thread.
    Close,
}

/// A descriptor that epoll watches as long as the value lives. Closing the descriptor is not enough, because
/// its sender may have kept a copy.
struct WatchedFd {
    fd: Arc<OwnedFd>,
    epoll: Arc<OwnedFd>,
}

impl Drop for WatchedFd {
    fn drop(&mut self) {
        // Fails only if the descriptor was not added.
        let _ = epoll::delete(&self.epoll, &self.fd);
    }
}

/// Origin of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opener {
    /// The process at the other end connected to the stack's socket as the user of the entry.
    Peer,
    /// Another process made the connection, perhaps before the process at the other end dropped its
    /// privileges.
    Other,
}

/// A process, a process that was announced, or a connection without a first message.
struct ProcessEntry {
    connection: WatchedFd,
    /// A pidfd of the process. The connection alone is not enough: it stays open after the death of the
    /// process if a child that was not announced has a copy.
    pidfd: Option<WatchedFd>,
    uid: u32,
    /// True for the stack's own user and for root, who may bind ports below `unprivileged_port_start`.
    is_privileged: bool,
    opener: Opener,
    /// Name of the domain to which the connection belongs, regardless of [`Hello::domain`].
    domain_name: Option<String>,
    attachment: Option<DomainClients>,
    /// The descriptor that wakes the process, until it is sent to the process.
    wake_fd: Option<OwnedFd>,
    /// The memory of its client on each shard, until it is sent to the process.
    memories: Vec<Option<OwnedFd>>,
    /// The descriptor that wakes the process from now on, if the process has not asked for it since the
    /// shards were started again. Its requests are refused until then.
    resume_fd: Option<OwnedFd>,
    previous_domains: PreviousDomains,
    /// True if the process has sent its first message.
    is_greeted: bool,
    /// The process's id and the name of its program, if an event said that it attached.
    logged: Option<(u32, Box<str>)>,
    /// True if the process is not attached, and may attach others (see [`unattached`]).
    is_unattached: bool,
}

impl ProcessEntry {
    fn peer_user(&self) -> PeerUser {
        PeerUser { uid: self.uid, is_privileged: self.is_privileged }
    }
}

/// The clients of a process.
#[derive(Clone)]
struct DomainClients {
    /// Id of the domain.
    domain: u64,
    /// Client id on each shard.
    clients: Vec<u32>,
}

/// Clients that the shards have admitted for a new process.
#[derive(Default)]
struct NewClients {
    numbers: Vec<u32>,
    memories: Vec<Option<OwnedFd>>,
}

impl NewClients {
    fn push(&mut self, client: AdmittedClient) {
        self.numbers.push(client.number);
        self.memories.push(Some(client.memory));
    }
}

/// A domain that has a process or a proxy descriptor.
struct DomainEntry {
    uid: u32,
    domain_name: String,
    shards: Vec<DomainRegion>,
    processes: usize,
    proxies: usize,
}

impl DomainEntry {
    /// Tells the processes of the domain that the shards have ended. A process that sleeps learns of it by a
    /// hang-up, and one that never sleeps by this mark in the region.
    fn announce_end(&self) {
        for shard in &self.shards {
            if let Err(error) = announce_end(&shard.memory) {
                tracing::debug!("the end of a shard could not be announced: {error}");
            }
        }
    }
}

/// The region of a domain on one shard.
struct DomainRegion {
    domain: u8,
    memory: OwnedFd,
    wake: OwnedFd,
}

/// A proxy descriptor and the sockets that it owns. Copies of it may be in any process.
struct ProxyEntry {
    end: WatchedFd,
    cookie: u64,
    domain: u64,
    contents: ProxyContents,
}

/// Counters and lists that other threads read, the properties that attaching processes are told, and the
/// limits of admission.
pub(super) struct BrokerShared {
    pub counters: Arc<BrokerCounters>,
    pub attached: Arc<AttachedProcesses>,
    pub stack_info: StackInfo,
    pub limits: AdmissionLimits,
}

pub(super) struct BrokerThread {
    /// Present if the shards run in a process of their own.
    supervised: Option<SupervisedShards>,
    /// Sockets that were opened again after a restart.
    restored: RestoredSockets,
    listener: Option<ControlListener>,
    shards: Vec<ShardLink>,
    commands: Receiver<BrokerCommand>,
    /// For the threads of upgrades.
    command_sender: Sender<BrokerCommand>,
    wake: Arc<EventFd>,
    shared: BrokerShared,
    epoll: Arc<OwnedFd>,
    /// By id, and so in the order of their arrival.
    processes: BTreeMap<u64, ProcessEntry>,
    /// Ids of the connections without a first message that were not announced.
    pending: BTreeSet<u64>,
    domains: HashMap<u64, DomainEntry>,
    proxies: HashMap<u64, ProxyEntry>,
    /// Ids of proxy descriptors by socket cookie.
    cookies: HashMap<u64, u64>,
    last_id: u64,
    buffer: Vec<u8>,
    /// Barriers that have been requested, and the number of epoll_wait(2) calls left until they are passed at
    /// the latest.
    barriers: Vec<Sender<()>>,
    barrier_waits: u32,
}

fn increment(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl BrokerThread {
    pub fn new(
        listener: Option<ControlListener>,
        shards: Vec<ShardLink>,
        (command_sender, commands): (Sender<BrokerCommand>, Receiver<BrokerCommand>),
        wake: Arc<EventFd>,
        shared: BrokerShared,
    ) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let add = |fd: BorrowedFd<'_>, source| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(source), epoll::EventFlags::IN)
        };
        add(wake.as_fd(), COMMAND_EVENT)?;
        if let Some(listener) = &listener {
            add(listener.fd(), LISTENER_EVENT)?;
        }
        Ok(Self {
            supervised: None,
            restored: RestoredSockets::default(),
            listener,
            shards,
            commands,
            command_sender,
            wake,
            shared,
            epoll,
            processes: BTreeMap::new(),
            pending: BTreeSet::new(),
            domains: HashMap::new(),
            proxies: HashMap::new(),
            cookies: HashMap::new(),
            last_id: 0,
            buffer: seqpacket::buffer(),
            barriers: Vec::new(),
            barrier_waits: 0,
        })
    }

    /// Runs until [`BrokerCommand::Close`].
    pub fn run(mut self) {
        let no_event = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [no_event; EVENTS_PER_WAIT];
        let immediately = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            let timeout = if self.barriers.is_empty() { None } else { Some(&immediately) };
            let ready = match epoll::wait(&self.epoll, &mut events, timeout) {
                Ok(ready) => ready,
                Err(Errno::INTR) => 0,
                Err(_) => {
                    std::thread::sleep(ERROR_PAUSE);
                    0
                }
            };
            self.barrier_waits = self.barrier_waits.saturating_sub(1);
            if ready == 0 || self.barrier_waits == 0 {
                for barrier in self.barriers.drain(..) {
                    // Fails if the caller has given up waiting.
                    let _ = barrier.send(());
                }
            }
            for event in &events[..ready] {
                match event.data.u64() {
                    COMMAND_EVENT => {
                        self.wake.clear();
                        while let Ok(command) = self.commands.try_recv() {
                            match command {
                                BrokerCommand::Connection(connection, domain_name) => {
                                    let uid = geteuid().as_raw();
                                    self.add_connection(connection, uid, Some(domain_name), Opener::Other);
                                }
                                BrokerCommand::Barrier(barrier) => {
                                    self.barriers.push(barrier);
                                    self.barrier_waits = BARRIER_WAITS_MAX;
                                }
                                BrokerCommand::Supervise(supervision) => self.supervise(supervision),
                                BrokerCommand::HandOver(reply) => self.hand_over(reply),
                                BrokerCommand::Close => return,
                            }
                        }
                        self.finish_restart();
                    }
                    LISTENER_EVENT => self.accept(),
                    // The process of the shards is gone.
                    LINK_EVENT => _ = self.restart_ended_shards(std::time::Duration::ZERO),
                    data => self.handle_event(data),
                }
            }
        }
    }

    /// Watches a descriptor. Descriptors that epoll does not support are refused.
    fn watch(&self, fd: OwnedFd, id: u64, source: EventSource) -> Result<WatchedFd, Refusal> {
        let data = epoll::EventData::new_u64(id << 2 | source as u64);
        match epoll::add(&self.epoll, &fd, data, epoll::EventFlags::IN) {
            Ok(()) => Ok(WatchedFd { fd: Arc::new(fd), epoll: self.epoll.clone() }),
            Err(_) => Err(Refusal::Malformed),
        }
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        match listener.accept() {
            Ok(AcceptedPeer::Permitted(connection, uid)) => {
                self.add_connection(connection, uid, None, Opener::Peer)
            }
            Ok(AcceptedPeer::Denied(connection, uid)) => {
                increment(&self.shared.counters.rejected);
                let refusal = Refusal::User(geteuid().as_raw());
                process_log::refused(0, uid, refusal);
                // Fails if the other end is closed.
                let _ = seqpacket::send(&connection, &encode(0, &ControlReply::Refused(refusal)), &[]);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // The listener stays ready, so the error would recur at once.
            Err(_) => std::thread::sleep(ERROR_PAUSE),
        }
    }

    /// Adds a connection that has not sent its first message.
    fn add_connection(&mut self, connection: OwnedFd, uid: u32, domain_name: Option<String>, opener: Opener) {
        self.evict_pending();
        let id = self.next_id();
        let is_privileged = uid == 0 || uid == geteuid().as_raw();
        if let Ok(connection) = self.watch(connection, id, EventSource::Connection) {
            let entry = ProcessEntry {
                connection,
                pidfd: None,
                uid,
                is_privileged,
                opener,
                domain_name,
                attachment: None,
                wake_fd: None,
                memories: Vec::new(),
                resume_fd: None,
                previous_domains: PreviousDomains::default(),
                is_greeted: false,
                logged: None,
                is_unattached: false,
            };
            self.processes.insert(id, entry);
            self.pending.insert(id);
        }
    }

    /// At the limit of connections without a first message, closes one of them.
    fn evict_pending(&mut self) {
        let max = self.shared.limits.pending_max;
        if self.pending.len() < max {
            return;
        }
        let pending = self.pending.iter().filter_map(|id| Some((*id, self.processes.get(id)?.peer_user())));
        let users = pending.clone().map(|(_, user)| user);
        let Some(uid) = admission::pick_user_to_evict(users, max) else { return };
        // Ids are in the order of arrival.
        let oldest = { pending }.find(|(_, user)| user.uid == uid).map(|(id, _)| id);
        if let Some(oldest) = oldest {
            increment(&self.shared.counters.rejected);
            self.send_reply(oldest, 0, &ControlReply::Refused(Refusal::Pending(limit_in_message(max))), &[]);
            self.processes.remove(&oldest);
            self.pending.remove(&oldest);
        }
    }

    /// Handles an event of a process, of its connection or of a proxy descriptor.
    fn handle_event(&mut self, data: u64) {
        let id = data >> 2;
        if data & 3 == EventSource::ProxyFd as u64 {
            let Some(proxy) = self.proxies.get(&id) else { return };
            // Data that a process writes into the descriptor is discarded.
            if matches!(seqpacket::receive(&proxy.end.fd, &mut self.buffer), RecvResult::Closed) {
                self.remove_proxy(id);
            }
            return;
        }
        if data & 3 == EventSource::Process as u64 {
            if let Some(entry) = self.processes.get_mut(&id).filter(|entry| entry.is_unattached) {
                // Its children may still use the connection.
                entry.pidfd = None;
                self.shared.attached.update(id, 0, None);
                return;
            }
            self.drain_requests(id);
            self.reap(id);
            return;
        }
        // A child that sends its first message and exits is reaped before the next request of its parent,
        // which waits for the child, is answered.
        for _ in 0..PACKETS_PER_EVENT {
            if !self.receive_packet(id) {
                break;
            }
        }
    }

    /// Receives and handles a packet. Returns true if there was one and its connection stays open.
    fn receive_packet(&mut self, id: u64) -> bool {
        let Some(entry) = self.processes.get(&id) else { return false };
        let is_open = match seqpacket::receive(&entry.connection.fd, &mut self.buffer) {
            RecvResult::WouldBlock => return false,
            RecvResult::Closed => false,
            RecvResult::Oversized => {
                increment(&self.shared.counters.requests_refused);
                false
            }
            RecvResult::NoDescriptors(_) => {
                increment(&self.shared.counters.limit_reached);
                // The last message on this connection, so that the process finds it whatever it has sent.
                self.send_reply(id, 0, &ControlReply::Refused(Refusal::Resources(Errno::MFILE)), &[]);
                false
            }
            RecvResult::Packet(bytes, descriptors) => {
                // Taken, because handling the message needs the rest of `self`.
                let buffer = core::mem::take(&mut self.buffer);
                let is_open = self.handle_message(id, &buffer[..bytes], descriptors);
                self.buffer = buffer;
                is_open
            }
        };
        if !is_open {
            self.reap(id);
        }
        is_open
    }

    /// Handles the requests that a process sent before it died; they may announce a child.
    fn drain_requests(&mut self, id: u64) {
        let mut buffer = core::mem::take(&mut self.buffer);
        // A process has one request in flight, and at most one request without reply after it.
        for _ in 0..2 {
            let Some(entry) = self.processes.get(&id) else { break };
            let RecvResult::Packet(bytes, descriptors) =
                seqpacket::receive(&entry.connection.fd, &mut buffer)
            else {
                break;
            };
            self.handle_message(id, &buffer[..bytes], descriptors);
        }
        self.buffer = buffer;
    }

    /// Handles a message. Returns whether its connection stays open.
    fn handle_message(&mut self, id: u64, bytes: &[u8], descriptors: Vec<OwnedFd>) -> bool {
        let Some(entry) = self.processes.get(&id) else { return true };
        if entry.is_unattached {
            return self.handle_unattached(id, bytes, descriptors);
        }
        if !entry.is_greeted {
            let uid = entry.uid;
            let pid = descriptors.last().map_or(0, pid_of);
            let (request_id, hello) = decode::<Hello>(bytes);
            if let Some(hello) = hello.as_ref().filter(|hello| hello.magic == MAGIC_UNATTACHED) {
                let greeted = self.greet_unattached(id, hello, descriptors);
                if let Err(refusal) = &greeted {
                    increment(&self.shared.counters.rejected);
                    process_log::refused(pid, uid, *refusal);
                    // The process reads the reply when it wants to attach.
                    self.send_reply(id, request_id, &ControlReply::Refused(*refusal), &[]);
                }
                return greeted.is_ok();
            }
            if let Some(hello) = hello.as_ref().filter(|hello| hello.magic == MAGIC_CHILD) {
                return match self.greet_child(id, hello, descriptors, pid) {
                    Ok(()) => {
                        increment(&self.shared.counters.admitted);
                        true
                    }
                    Err(refusal) => {
                        increment(&self.shared.counters.rejected);
                        process_log::refused(pid, uid, refusal);
                        self.send_reply(id, request_id, &ControlReply::Refused(refusal), &[]);
                        false
                    }
                };
            }
            if let Some(hello) = hello.as_ref().filter(|hello| hello.magic == MAGIC_UPGRADE) {
                let started = self.start_upgrade(id, request_id, hello, descriptors);
                if let Err(refusal) = &started {
                    increment(&self.shared.counters.rejected);
                    self.send_reply(id, request_id, &ControlReply::Refused(*refusal), &[]);
                }
                return started.is_ok();
            }
            let reply = match hello {
                Some(hello) if hello.magic == MAGIC => self.greet(id, &hello, descriptors, pid),
                _ => Err(Refusal::Malformed),
            };
            return match reply {
                Ok(wake) => {
                    increment(&self.shared.counters.admitted);
                    self.log_attached(id, pid);
                    // Cannot truncate: there are at most 64 shards.
                    self.send_reply(
                        id,
                        request_id,
                        &ControlReply::Welcome(self.shards.len() as u16, self.shared.stack_info.clone()),
                        &[wake],
                    )
                }
                Err(refusal) => {
                    let is_full =
                        matches!(refusal, Refusal::Clients(_) | Refusal::Domains(_) | Refusal::Resources(_));
                    increment(if is_full {
                        &self.shared.counters.limit_reached
                    } else {
                        &self.shared.counters.rejected
                    });
                    process_log::refused(pid, uid, refusal);
                    self.send_reply(id, request_id, &ControlReply::Refused(refusal), &[]);
                    false
                }
            };
        }
        let (request_id, request) = decode::<ControlRequest>(bytes);
        let Some(request) = request else {
            // A peer that sends something else than requests is disconnected. It may be the broker itself, if
            // a process sent both ends of a pair here.
            increment(&self.shared.counters.requests_refused);
            self.send_reply(id, request_id, &ControlReply::Refused(Refusal::Malformed), &[]);
            return false;
        };
        let reply = self.handle_request(id, request, descriptors);
        let (reply, descriptors) = reply.unwrap_or_else(|refusal| {
            let is_full =
                matches!(refusal, Refusal::Clients(_) | Refusal::ProxyDescriptors | Refusal::Resources(_));
            increment(if is_full {
                &self.shared.counters.limit_reached
            } else {
                &self.shared.counters.requests_refused
            });
            (ControlReply::Refused(refusal), Vec::new())
        });
        self.send_reply(id, request_id, &reply, &descriptors)
    }

    /// Handles a message of an unattached process. Returns whether its connection stays open.
    fn handle_unattached(&mut self, id: u64, bytes: &[u8], mut descriptors: Vec<OwnedFd>) -> bool {
        let Some(entry) = self.processes.get(&id) else { return true };
        let (uid, domain_name) = (entry.uid, entry.domain_name.clone());
        match (bytes, descriptors.pop()) {
            ([unattached::ATTACH], Some(connection)) => {
                self.add_connection(connection, uid, domain_name, Opener::Other);
            }
            ([unattached::SUCCESSOR], Some(connection)) => self.add_successor(connection, domain_name),
            ([unattached::IDENTIFY], Some(pidfd)) => return self.identify(id, pidfd),
            _ => increment(&self.shared.counters.requests_refused),
        }
        true
    }

    /// Adds a connection that an attached or unattached process created for a program of its own. The kernel
    /// tells the user who created it.
    fn add_successor(&mut self, connection: OwnedFd, domain_name: Option<String>) {
        match creator_uid(&connection) {
            // The connecting process cannot choose the domain: each user has one domain of this name.
            Ok(uid) => {
                self.add_connection(connection, uid, Some(domain_name.unwrap_or_default()), Opener::Other);
            }
            Err(_) => increment(&self.shared.counters.requests_refused),
        }
    }

    /// Sets the process of an unattached connection. Returns whether the connection stays open.
    fn identify(&mut self, id: u64, pidfd: OwnedFd) -> bool {
        let pid = pid_of(&pidfd);
        let Ok(pidfd) = self.watch(pidfd, id, EventSource::Process) else { return false };
        let Some(entry) = self.processes.get_mut(&id) else { return false };
        self.shared.attached.update(id, pid, Some(pidfd.fd.clone()));
        (entry.pidfd, entry.is_greeted, entry.is_unattached) = (Some(pidfd), true, true);
        self.pending.remove(&id);
        true
    }

    /// Handles the first message of a process that does not attach yet.
    fn greet_unattached(
        &mut self,
        id: u64,
        hello: &Hello,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<(), Refusal> {
        if hello.version != PROTOCOL_VERSION {
            return Err(Refusal::Version(PROTOCOL_VERSION));
        }
        let pidfd = descriptors.pop().ok_or(Refusal::Malformed)?;
        let applicant = self.processes.get(&id).ok_or(Refusal::Unknown)?.peer_user();
        let unattached =
            self.processes.values().filter(|entry| entry.is_unattached).map(ProcessEntry::peer_user);
        let max = self.shared.limits.unattached(resource_limit(Resource::Nofile).current);
        if !admission::is_admitted(applicant, unattached, max) {
            return Err(Refusal::Unattached(limit_in_message(max)));
        }
        if self.identify(id, pidfd) { Ok(()) } else { Err(Refusal::Malformed) }
    }

    /// Sends a reply. Returns false if that fails; a process that does not read its replies is disconnected.
    fn send_reply(&self, id: u64, request_id: u32, reply: &ControlReply, descriptors: &[OwnedFd]) -> bool {
        let Some(entry) = self.processes.get(&id) else { return false };
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        seqpacket::send(&entry.connection.fd, &encode(request_id, reply), &descriptors).is_ok()
    }

    /// Handles the first message of a process that attaches. Returns the descriptor that wakes the process.
    fn greet(
        &mut self,
        id: u64,
        hello: &Hello,
        mut descriptors: Vec<OwnedFd>,
        pid: u32,
    ) -> Result<OwnedFd, Refusal> {
        if hello.version != PROTOCOL_VERSION {
            return Err(Refusal::Version(PROTOCOL_VERSION));
        }
        if hello.domain.len() > DOMAIN_NAME_BYTES_MAX {
            return Err(Refusal::Malformed);
        }
        let pidfd = descriptors.pop().ok_or(Refusal::Malformed)?;
        let pidfd = self.watch(pidfd, id, EventSource::Process)?;
        let entry = self.processes.get_mut(&id).ok_or(Refusal::Unknown)?;
        entry.pidfd = Some(pidfd);
        if entry.attachment.is_none() {
            let domain_name = entry.domain_name.clone().unwrap_or_else(|| hello.domain.clone());
            let uid = entry.uid;
            let attached = match self.attach_to_domain(uid, &domain_name) {
                // The process has come before the event that the shards' process is gone.
                Err(Refusal::ShardEnded) if self.restart_ended_shards(END_TIMEOUT) => {
                    self.attach_to_domain(uid, &domain_name)
                }
                attached => attached,
            };
            let (domain, clients, wake) = attached.map_err(|refusal| match refusal {
                Refusal::ShardEnded => self.ended_refusal(),
                refusal => refusal,
            })?;
            let entry = self.processes.get_mut(&id).ok_or(Refusal::Unknown)?;
            entry.attachment = Some(DomainClients { domain, clients: clients.numbers });
            (entry.wake_fd, entry.memories) = (Some(wake), clients.memories);
        }
        let entry = self.processes.get_mut(&id).ok_or(Refusal::Unknown)?;
        entry.is_greeted = true;
        self.pending.remove(&id);
        self.shared.attached.update(id, pid, entry.pidfd.as_ref().map(|pidfd| pidfd.fd.clone()));
        entry.wake_fd.take().ok_or(Refusal::Unknown)
    }

    /// Handles the first message of a child that its parent announced.
    fn greet_child(
        &mut self,
        id: u64,
        hello: &Hello,
        mut descriptors: Vec<OwnedFd>,
        pid: u32,
    ) -> Result<(), Refusal> {
        if hello.version != PROTOCOL_VERSION {
            return Err(Refusal::Version(PROTOCOL_VERSION));
        }
        let pidfd = descriptors.pop().ok_or(Refusal::Malformed)?;
        let pidfd = self.watch(pidfd, id, EventSource::Process)?;
        let entry = self.processes.get_mut(&id).ok_or(Refusal::Unknown)?;
        // A connection whose `wake_fd` has not been sent belongs to a program, not to a child.
        if entry.attachment.is_none() || entry.wake_fd.is_some() {
            return Err(Refusal::Unknown);
        }
        self.shared.attached.update(id, pid, Some(pidfd.fd.clone()));
        (entry.pidfd, entry.is_greeted) = (Some(pidfd), true);
        Ok(())
    }

    /// Writes the event that a program has attached.
    fn log_attached(&mut self, id: u64, pid: u32) {
        if let Some(entry) = self.processes.get_mut(&id) {
            entry.logged = process_log::attached(pid, entry.uid).map(|name| (pid, name));
        }
    }

    /// Attaches a process to the domain of this name, creating the domain if necessary. Returns the domain's
    /// id, the clients, and the process's end of its wake pair.
    fn attach_to_domain(
        &mut self,
        uid: u32,
        domain_name: &str,
    ) -> Result<(u64, NewClients, OwnedFd), Refusal> {
        let domain =
            self.domains.iter().find(|(_, domain)| domain.uid == uid && domain.domain_name == domain_name);
        let domain = domain.map(|(id, _)| *id);
        let (broker_end, process_end) = wake_pair()?;
        if let Some(domain) = domain {
            let request = |domain, wake| BrokerRequest::Admit { domain, wake };
            let clients = self.attach_clients(domain, &broker_end, request)?;
            return Ok((domain, clients, process_end));
        }
        let (mut shards, mut clients) = (Vec::new(), NewClients::default());
        for shard in &self.shards {
            let opened = match broker_end.try_clone() {
                Ok(wake) => shard.call(BrokerRequest::OpenDomain { wake }),
                Err(e) => Ok(BrokerReply::NoResources(errno::of_io(&e))),
            };
            match opened {
                Ok(BrokerReply::Opened { domain, region, wake, client }) => {
                    shards.push(DomainRegion { domain, memory: region, wake });
                    clients.push(client);
                }
                other => {
                    self.reap_clients(&shards, &clients.numbers);
                    return Err(refusal_of(other, Refusal::Domains));
                }
            }
        }
        let id = self.next_id();
        let domain = DomainEntry { uid, domain_name: domain_name.into(), shards, processes: 1, proxies: 0 };
        self.domains.insert(id, domain);
        Ok((id, clients, process_end))
    }

    /// Reaps `clients`: the first one on shard 0, the next one on shard 1, and so on.
    fn reap_clients(&self, regions: &[DomainRegion], clients: &[u32]) {
        for ((shard, region), client) in self.shards.iter().zip(regions).zip(clients) {
            // Fails only if the shard has ended.
            let _ = shard.call(BrokerRequest::Reap { domain: region.domain, client: *client });
        }
    }

    /// Creates a client on each shard in an existing domain and returns the clients.
    fn attach_clients(
        &mut self,
        domain: u64,
        wake: &OwnedFd,
        mut request: impl FnMut(u8, OwnedFd) -> BrokerRequest,
    ) -> Result<NewClients, Refusal> {
        let entry = self.domains.get(&domain).ok_or(Refusal::Unknown)?;
        let mut clients = NewClients::default();
        for (shard, region) in self.shards.iter().zip(&entry.shards) {
            let admitted = match wake.try_clone() {
                Ok(wake) => shard.call(request(region.domain, wake)),
                Err(e) => Ok(BrokerReply::NoResources(errno::of_io(&e))),
            };
            match admitted {
                Ok(BrokerReply::Admitted(client)) => clients.push(client),
                other => {
                    self.reap_clients(&entry.shards, &clients.numbers);
                    return Err(refusal_of(other, Refusal::Clients));
                }
            }
        }
        if let Some(entry) = self.domains.get_mut(&domain) {
            entry.processes += 1;
        }
        Ok(clients)
    }

    /// Returns a shard, the region of the process's domain there, and the process's client id there.
    fn client_on_shard(&self, id: u64, shard: u16) -> Result<(&ShardLink, &DomainRegion, u32), Refusal> {
        let entry = self.processes.get(&id).ok_or(Refusal::Unknown)?;
        let DomainClients { domain, clients } = entry.attachment.as_ref().ok_or(Refusal::Unknown)?;
        let shard = usize::from(shard);
        let domain = self.domains.get(domain).ok_or(Refusal::Unknown)?;
        match (self.shards.get(shard), domain.shards.get(shard), clients.get(shard)) {
            (Some(link), Some(region), Some(client)) => Ok((link, region, *client)),
            _ => Err(Refusal::Unknown),
        }
    }

    /// Carries out a request. All access checks are here.
    fn handle_request(
        &mut self,
        id: u64,
        request: ControlRequest,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(ControlReply, Vec<OwnedFd>), Refusal> {
        // The process has not noticed yet that its numbers and its memory are those of a process that is
        // gone.
        let is_stale = self.processes.get(&id).is_some_and(|entry| entry.resume_fd.is_some());
        if is_stale && !matches!(request, ControlRequest::Resume | ControlRequest::Successor) {
            if matches!(request, ControlRequest::Restore(..)) {
                self.note_death_during_restoration(id);
            }
            return Err(Refusal::ShardEnded);
        }
        let reply = match request {
            ControlRequest::Resume => return self.resume(id),
            ControlRequest::Restore(shard, before, request) => {
                let restored = self.restore(id, shard, before, request);
                if matches!(restored, Err(Refusal::ShardEnded)) {
                    self.note_death_during_restoration(id);
                }
                restored?
            }
            ControlRequest::Attach(shard) => {
                let (_, region, client) = self.client_on_shard(id, shard)?;
                let (region, wake) = (region.memory.try_clone(), region.wake.try_clone());
                let entry = self.processes.get_mut(&id).ok_or(Refusal::Unknown)?;
                // A process attaches to each shard once.
                let memory = entry.memories.get_mut(usize::from(shard)).and_then(Option::take);
                let memory = memory.ok_or(Refusal::Unknown)?;
                let no_descriptor = |e| Refusal::Resources(errno::of_io(&e));
                let descriptors = vec![region.map_err(no_descriptor)?, memory, wake.map_err(no_descriptor)?];
                return Ok((ControlReply::Attached(client), descriptors));
            }
            ControlRequest::Shard(shard, request) => {
                ControlReply::Reply(self.call_shard(id, shard, request)?)
            }
            ControlRequest::Fork => {
                let child = self.prepare_process(id, None, descriptors)?;
                let entry = self.processes.get_mut(&child).ok_or(Refusal::Unknown)?;
                let wake = entry.wake_fd.take().ok_or(Refusal::Unknown)?;
                let memories = core::mem::take(&mut entry.memories).into_iter().flatten();
                let descriptors = core::iter::once(wake).chain(memories).collect();
                let clients = entry.attachment.as_ref().map_or_else(Vec::new, |of| of.clients.clone());
                return Ok((ControlReply::Forked(clients), descriptors));
            }
            ControlRequest::Exec(kept) => {
                self.prepare_process(id, Some(kept), descriptors)?;
                ControlReply::Done
            }
            ControlRequest::Share(cookie, contents) => self.share(id, cookie, contents, descriptors)?,
            ControlRequest::Resolve(cookie) => self.resolve(id, cookie)?,
            ControlRequest::Successor => {
                let connection = { descriptors }.pop().ok_or(Refusal::Malformed)?;
                let domain_name = self.processes.get(&id).ok_or(Refusal::Unknown)?.domain_name.clone();
                self.add_successor(connection, domain_name);
                ControlReply::Done
            }
        };
        Ok((reply, Vec::new()))
    }

    /// Carries out a request of a process to one of the shards.
    fn call_shard(&self, id: u64, shard: u16, request: ChannelRequest) -> Result<ChannelReply, Refusal> {
        let (link, region, client) = self.client_on_shard(id, shard)?;
        let entry = self.processes.get(&id).ok_or(Refusal::Unknown)?;
        let (uid, port_start) = (entry.uid, self.shared.stack_info.unprivileged_port_start);
        // The library checks this, too; a process cannot bypass this check.
        if !entry.is_privileged && request.claimed_port().is_some_and(|port| (1..port_start).contains(&port))
        {
            return Err(Refusal::Port(port_start));
        }
        // The user of the connection counts, not what the request says. A process that connected as root may
        // have dropped its privileges since, so its word is taken.
        let request = if uid == 0 { request } else { request.with_user(uid) };
        match link.call(BrokerRequest::Call { domain: region.domain, client, request }) {
            Ok(BrokerReply::Reply(reply)) => Ok(reply),
            Ok(_) => Err(Refusal::Unknown),
            Err(_) => Err(Refusal::ShardEnded),
        }
    }

    /// Adds the entry of a child or program that a process has announced. The new entry owns all sockets of
    /// the process, or the sockets `kept`. Returns the id of the entry.
    fn prepare_process(
        &mut self,
        id: u64,
        kept: Option<Vec<GlobalSocketId>>,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<u64, Refusal> {
        let connection = descriptors.pop().ok_or(Refusal::Malformed)?;
        if kept.as_ref().is_some_and(|kept| kept.len() > SOCKETS_PER_MESSAGE_MAX) {
            return Err(Refusal::Malformed);
        }
        let entry = self.processes.get(&id).ok_or(Refusal::Unknown)?;
        let (uid, is_privileged, domain_name) = (entry.uid, entry.is_privileged, entry.domain_name.clone());
        let DomainClients { domain, clients: parent_clients } =
            entry.attachment.clone().ok_or(Refusal::Unknown)?;
        let (broker_end, process_end) = wake_pair()?;
        let child = self.next_id();
        let connection = self.watch(connection, child, EventSource::Connection)?;
        let mut shard = 0;
        let clients = self.attach_clients(domain, &broker_end, |domain, wake| {
            let kept = kept.as_ref().map(|kept| sockets_on(kept, shard));
            let parent = parent_clients[shard];
            shard += 1;
            BrokerRequest::Fork { domain, parent, kept, wake }
        })?;
        let entry = ProcessEntry {
            connection,
            pidfd: None,
            uid,
            is_privileged,
            opener: Opener::Other,
            domain_name,
            attachment: Some(DomainClients { domain, clients: clients.numbers }),
            wake_fd: Some(process_end),
            memories: clients.memories,
            resume_fd: None,
            previous_domains: PreviousDomains::default(),
            is_greeted: false,
            logged: None,
            is_unattached: false,
        };
        self.processes.insert(child, entry);
        self.shared.attached.update(child, 0, None);
        Ok(child)
    }

    /// Creates a proxy descriptor that owns the sockets in `contents`.
    fn share(
        &mut self,
        id: u64,
        cookie: u64,
        contents: ProxyContents,
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<ControlReply, Refusal> {
        let end = descriptors.pop().ok_or(Refusal::Malformed)?;
        let ProxyContents { sockets, metadata } = &contents;
        // A socket that is only bound is described by its metadata.
        let is_valid = sockets.len() <= SOCKETS_PER_MESSAGE_MAX
            && metadata.len() <= METADATA_BYTES_MAX
            && !(sockets.is_empty() && metadata.is_empty());
        let entry = self.processes.get(&id).ok_or(Refusal::Unknown)?;
        let domain = entry.attachment.as_ref().ok_or(Refusal::Unknown)?.domain;
        // Several processes may pass one kernel socket on.
        let proxy_of_cookie = self.cookies.get(&cookie).and_then(|id| self.proxies.get(id));
        if !is_valid || proxy_of_cookie.is_some_and(|proxy| proxy.domain != domain) {
            return Err(Refusal::Malformed);
        }
        if self.domains.get(&domain).is_none_or(|entry| entry.proxies >= PROXY_FDS_MAX) {
            return Err(Refusal::ProxyDescriptors);
        }
        let proxy = self.next_id();
        // A program that does not use the library sees a connection whose other end has sent all its data.
        let _ = shutdown(&end, Shutdown::Write);
        let end = self.watch(end, proxy, EventSource::ProxyFd)?;
        let request = |domain, client, sockets| BrokerRequest::AddProxy { domain, client, sockets };
        if let Err((refusal, done)) = self.for_each_shard(id, sockets, request) {
            self.release_refs(domain, sockets, done);
            return Err(refusal);
        }
        self.cookies.insert(cookie, proxy);
        self.proxies.insert(proxy, ProxyEntry { end, cookie, domain, contents });
        if let Some(domain) = self.domains.get_mut(&domain) {
            domain.proxies += 1;
        }
        Ok(ControlReply::Done)
    }

    /// Makes a process that received a proxy descriptor an owner of its sockets.
    fn resolve(&mut self, id: u64, cookie: u64) -> Result<ControlReply, Refusal> {
        let proxy = self.cookies.get(&cookie).and_then(|id| self.proxies.get(id));
        let proxy = proxy.ok_or(Refusal::Unknown)?;
        let entry = self.processes.get(&id).ok_or(Refusal::Unknown)?;
        // Processes of another domain do not map the region of these sockets.
        if entry.attachment.as_ref().is_none_or(|of| of.domain != proxy.domain) {
            return Err(Refusal::Unknown);
        }
        let contents = proxy.contents.clone();
        let request = |domain, client, sockets| BrokerRequest::ResolveProxy { domain, client, sockets };
        self.for_each_shard(id, &contents.sockets, request).map_err(|(refusal, _)| refusal)?;
        Ok(ControlReply::Resolved(contents))
    }

    /// Calls each shard on which some of `sockets` are. An error comes with the index of the shard at which
    /// it occurred: the calls of shards below this index have succeeded.
    fn for_each_shard(
        &self,
        id: u64,
        sockets: &[GlobalSocketId],
        request: impl Fn(u8, u32, Vec<SocketId>) -> BrokerRequest,
    ) -> Result<(), (Refusal, usize)> {
        if sockets.iter().any(|socket| usize::from(socket.shard) >= self.shards.len()) {
            return Err((Refusal::Unknown, 0));
        }
        for shard in 0..self.shards.len() {
            let on_shard = sockets_on(sockets, shard);
            if on_shard.is_empty() {
                continue;
            }
            let (link, region, client) =
                self.client_on_shard(id, shard as u16).map_err(|refusal| (refusal, shard))?;
            match link.call(request(region.domain, client, on_shard)) {
                Ok(BrokerReply::Done) => {}
                Ok(_) => return Err((Refusal::Unknown, shard)),
                Err(_) => return Err((Refusal::ShardEnded, shard)),
            }
        }
        Ok(())
    }

    /// Releases the references of a proxy descriptor to `sockets` on the first `shards` shards.
    fn release_refs(&self, domain: u64, sockets: &[GlobalSocketId], shards: usize) {
        let Some(domain) = self.domains.get(&domain) else { return };
        for (index, (shard, region)) in self.shards.iter().zip(&domain.shards).enumerate().take(shards) {
            let sockets = sockets_on(sockets, index);
            if !sockets.is_empty() {
                // Fails only if the shard has ended.
                let _ = shard.call(BrokerRequest::ReleaseProxy { domain: region.domain, sockets });
            }
        }
    }

    /// Handles the close of the last copy of a proxy descriptor.
    fn remove_proxy(&mut self, id: u64) {
        let Some(proxy) = self.proxies.remove(&id) else { return };
        if self.cookies.get(&proxy.cookie) == Some(&id) {
            let same_cookie = |(_, other): &(&u64, &ProxyEntry)| other.cookie == proxy.cookie;
            match self.proxies.iter().filter(same_cookie).map(|(id, _)| *id).max() {
                Some(other) => self.cookies.insert(proxy.cookie, other),
                None => self.cookies.remove(&proxy.cookie),
            };
        }
        self.release_refs(proxy.domain, &proxy.contents.sockets, self.shards.len());
        if let Some(domain) = self.domains.get_mut(&proxy.domain) {
            domain.proxies -= 1;
        }
        self.remove_domain_if_empty(proxy.domain);
    }

    /// Releases all references of a process that died or disconnected.
    fn reap(&mut self, id: u64) {
        let Some(entry) = self.processes.remove(&id) else { return };
        self.pending.remove(&id);
        if let Some((pid, name)) = &entry.logged {
            process_log::ended(name, *pid);
        }
        if entry.is_unattached {
            self.shared.attached.remove(id);
        }
        let Some(DomainClients { domain: domain_id, clients }) = entry.attachment else { return };
        self.shared.attached.remove(id);
        increment(&self.shared.counters.reaped);
        if let Some(domain) = self.domains.get_mut(&domain_id) {
            domain.processes -= 1;
        }
        if let Some(domain) = self.domains.get(&domain_id) {
            self.reap_clients(&domain.shards, &clients);
        }
        self.remove_domain_if_empty(domain_id);
    }

    /// Forgets a domain that has no process and no proxy descriptor, so that nobody can join it. On the
    /// shards it lives until its last byte is sent.
    fn remove_domain_if_empty(&mut self, domain: u64) {
        if self.domains.get(&domain).is_some_and(|entry| entry.processes == 0 && entry.proxies == 0) {
            self.domains.remove(&domain);
        }
    }
}

/// Returns the ids of those `sockets` that are on a shard.
fn sockets_on(sockets: &[GlobalSocketId], shard: usize) -> Vec<SocketId> {
    sockets.iter().filter(|socket| usize::from(socket.shard) == shard).map(|socket| socket.id).collect()
}

/// Returns why a shard did not admit a client. `full` is the refusal if it has as many as it may have.
fn refusal_of(reply: Result<BrokerReply, crate::error::Error>, full: fn(u32) -> Refusal) -> Refusal {
    match reply {
        Ok(BrokerReply::NoResources(errno)) => Refusal::Resources(errno),
        Ok(BrokerReply::Full(limit)) => full(limit),
        Ok(_) => Refusal::Unknown,
        Err(_) => Refusal::ShardEnded,
    }
}

/// Returns a limit as it is sent in a refusal.
fn limit_in_message(limit: usize) -> u32 {
    u32::try_from(limit).unwrap_or(u32::MAX)
}

/// Creates the socket pair that wakes a process: the broker's end and the process's end.
fn wake_pair() -> Result<(OwnedFd, OwnedFd), Refusal> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // Fails if the process has no descriptor left.
    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(Refusal::Resources)
}
