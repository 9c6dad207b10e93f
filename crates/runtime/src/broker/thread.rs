//! The door's thread: who is there, what they hold, and what they ask for. It trusts nothing that comes from a process.

use super::BrokerCounters;
use super::admission::{self, PeerUser};
use super::attached::{AttachedProcesses, pid_of};
use super::control_listener::{AcceptedPeer, ControlListener, creator_uid};
use super::message::{
    ControlReply, ControlRequest, DOMAIN_NAME_BYTES_MAX, GlobalSocketId, Hello, MAGIC, MAGIC_CHILD,
    MAGIC_UNATTACHED, METADATA_BYTES_MAX, PROTOCOL_VERSION, Refusal, SOCKETS_PER_MESSAGE_MAX, StackInfo,
    decode, encode, unattached,
};
use super::seqpacket::{self, RecvResult};
use crate::channel::SocketId;
use crate::channel::control::{BrokerReply, BrokerRequest, call_for_broker};
use crate::command::Commander;
use crate::wait::EventFd;
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use rustix::process::{Resource, geteuid, getrlimit};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};

/// Connections that have not said who they are; of the user who has most of them the oldest makes room for one more (see `crowd`).
// limit: connections to the broker before their first message
pub(super) const PENDING_MAX: usize = 64;
/// Descriptors between processes that hold something of a domain: each takes one of this process's.
// limit: sockets of a domain in SCM_RIGHTS messages
pub(super) const PROXY_FDS_MAX: usize = 256;
/// Looks at what is ready, each at many, in which all that was there when somebody asked has been attended to, also where there is always more.
const BARRIER_WAITS_MAX: u32 = 64;
/// Processes that want no place yet, of all users. A user has no more of them than it leaves free, so alone it gets half; users other than the stack's own and root have half of them together.
// limit: unattached processes
pub(super) const UNATTACHED_MAX: usize = 2048;
/// Each of them takes two descriptors, and they get no more than half of those that this process may have.
const DESCRIPTORS_PER_UNATTACHED: u64 = 4;
/// Packets of one process that are attended to before others' are: its end stands behind the last.
const PACKETS_PER_EVENT: u32 = 4;
/// Events looked at in one go.
const EVENTS_PER_WAIT: usize = 64;
/// After an error that would only come again: no descriptors, usually.
const ERROR_PAUSE: std::time::Duration = std::time::Duration::from_millis(100);

const COMMAND_EVENT: u64 = u64::MAX;
const LISTENER_EVENT: u64 = u64::MAX - 1;

/// What an event is about: a number, and which descriptor of it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EventSource {
    Connection = 0,
    Process = 1,
    ProxyFd = 2,
}

/// What other threads of the stack's process hand to this one.
pub(super) enum BrokerCommand {
    /// A connection of a program that belongs to the domain of this name.
    Connection(OwnedFd, String),
    /// Somebody who is told once all that is there already has been attended to.
    Barrier(Sender<()>),
    /// The end.
    Close,
}

/// A descriptor that is watched for as long as the value lives: closing alone is not enough, for whoever sent it may have kept a copy.
struct WatchedFd {
    fd: OwnedFd,
    epoll: Arc<OwnedFd>,
}

impl Drop for WatchedFd {
    fn drop(&mut self) {
        // It was added.
        let _ = epoll::delete(&self.epoll, &self.fd);
    }
}

/// A process, or one that is about to be, or a connection that did not say yet who it is.
struct ProcessEntry {
    connection: WatchedFd,
    /// The process itself: its connection may stay open when it dies, in a child that nobody was told of.
    pidfd: Option<WatchedFd>,
    uid: u32,
    /// It is the stack's own user, or root: ports below `unprivileged_port_start` are its, too.
    is_privileged: bool,
    /// The domain it belongs to without saying so.
    domain_name: Option<String>,
    /// Its domain, and its number on each shard.
    attachment: Option<(u64, Vec<u32>)>,
    /// What wakes it, until it is given that.
    wake_fd: Option<OwnedFd>,
    /// It has said who it is.
    is_greeted: bool,
    /// It wants no place yet.
    is_unattached: bool,
}

impl ProcessEntry {
    fn peer_user(&self) -> PeerUser {
        PeerUser { uid: self.uid, is_privileged: self.is_privileged }
    }
}

/// A domain, while somebody is in it.
struct DomainEntry {
    uid: u32,
    domain_name: String,
    shards: Vec<DomainRegion>,
    processes: usize,
    proxies: usize,
}

/// A domain on one shard.
struct DomainRegion {
    domain: u8,
    memory: OwnedFd,
    wake: OwnedFd,
}

/// A descriptor that may be anywhere, and what it holds.
struct ProxyEntry {
    end: WatchedFd,
    cookie: u64,
    domain: u64,
    sockets: Vec<GlobalSocketId>,
    /// What whoever receives it is told.
    metadata: Vec<u8>,
}

/// What the door's thread writes for others, and what it tells those who come in.
pub(super) struct BrokerShared {
    pub counters: Arc<BrokerCounters>,
    pub attached: Arc<AttachedProcesses>,
    pub stack_info: StackInfo,
}

pub(super) struct BrokerThread {
    listener: Option<ControlListener>,
    shards: Vec<Commander>,
    commands: Receiver<BrokerCommand>,
    wake: Arc<EventFd>,
    shared: BrokerShared,
    epoll: Arc<OwnedFd>,
    /// In the order in which they came.
    processes: BTreeMap<u64, ProcessEntry>,
    domains: HashMap<u64, DomainEntry>,
    proxies: HashMap<u64, ProxyEntry>,
    /// Numbers of placeholders by their cookies.
    cookies: HashMap<u64, u64>,
    last_id: u64,
    buffer: Vec<u8>,
    /// Who waits until nothing is left to be attended to, and for how many more looks at the longest.
    barriers: Vec<Sender<()>>,
    barrier_waits: u32,
}

/// How many guests there may be in a process that may have so many descriptors.
pub(super) fn unattached_max(descriptors: Option<u64>) -> usize {
    let share = descriptors.map_or(usize::MAX, |limit| (limit / DESCRIPTORS_PER_UNATTACHED) as usize);
    UNATTACHED_MAX.min(share)
}

fn increment(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl BrokerThread {
    pub fn new(
        listener: Option<ControlListener>,
        shards: Vec<Commander>,
        command: Receiver<BrokerCommand>,
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
            listener,
            shards,
            commands: command,
            wake,
            shared,
            epoll,
            processes: BTreeMap::new(),
            domains: HashMap::new(),
            proxies: HashMap::new(),
            cookies: HashMap::new(),
            last_id: 0,
            buffer: seqpacket::buffer(),
            barriers: Vec::new(),
            barrier_waits: 0,
        })
    }

    /// Until the door is closed.
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
                for asked in self.barriers.drain(..) {
                    // It may not wait any more.
                    let _ = asked.send(());
                }
            }
            for event in &events[..ready] {
                match event.data.u64() {
                    COMMAND_EVENT => {
                        self.wake.clear();
                        while let Ok(command) = self.commands.try_recv() {
                            match command {
                                BrokerCommand::Connection(connection, domain_name) => {
                                    self.add_connection(connection, geteuid().as_raw(), Some(domain_name));
                                }
                                BrokerCommand::Barrier(asked) => {
                                    self.barriers.push(asked);
                                    self.barrier_waits = BARRIER_WAITS_MAX;
                                }
                                BrokerCommand::Close => return,
                            }
                        }
                    }
                    LISTENER_EVENT => self.accept(),
                    data => self.handle_event(data),
                }
            }
        }
    }

    /// Watches a descriptor, unless it is one that cannot be watched.
    fn watch(&self, fd: OwnedFd, id: u64, source: EventSource) -> Result<WatchedFd, Refusal> {
        let data = epoll::EventData::new_u64(id << 2 | source as u64);
        match epoll::add(&self.epoll, &fd, data, epoll::EventFlags::IN) {
            Ok(()) => Ok(WatchedFd { fd, epoll: self.epoll.clone() }),
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
            Ok(AcceptedPeer::Permitted(connection, uid)) => self.add_connection(connection, uid, None),
            Ok(AcceptedPeer::Denied(connection)) => {
                increment(&self.shared.counters.rejected);
                // It may be gone.
                let _ = seqpacket::send(&connection, &encode(0, &ControlReply::Refused(Refusal::User)), &[]);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // It would be ready again at once.
            Err(_) => std::thread::sleep(ERROR_PAUSE),
        }
    }

    /// Somebody who has not said anything yet.
    fn add_connection(&mut self, connection: OwnedFd, uid: u32, domain_name: Option<String>) {
        self.evict_pending();
        let id = self.next_id();
        let is_privileged = uid == 0 || uid == geteuid().as_raw();
        if let Ok(connection) = self.watch(connection, id, EventSource::Connection) {
            let entry = ProcessEntry {
                connection,
                pidfd: None,
                uid,
                is_privileged,
                domain_name,
                attachment: None,
                wake_fd: None,
                is_greeted: false,
                is_unattached: false,
            };
            self.processes.insert(id, entry);
        }
    }

    /// So many may say nothing, of all users together.
    fn evict_pending(&mut self) {
        let is_pending = |entry: &ProcessEntry| !entry.is_greeted && entry.attachment.is_none();
        let pending_users =
            self.processes.values().filter(|entry| is_pending(entry)).map(ProcessEntry::peer_user);
        let Some(uid) = admission::pick_user_to_evict(pending_users, PENDING_MAX) else { return };
        let mut oldest = self.processes.iter().filter(|(_, entry)| is_pending(entry));
        let oldest = oldest.find(|(_, entry)| entry.uid == uid).map(|(id, _)| *id);
        if let Some(oldest) = oldest {
            increment(&self.shared.counters.rejected);
            self.send_reply(oldest, 0, &ControlReply::Refused(Refusal::UserLimit), &[]);
            self.processes.remove(&oldest);
        }
    }

    /// Something happened to a process or a placeholder.
    fn handle_event(&mut self, data: u64) {
        let id = data >> 2;
        if data & 3 == EventSource::ProxyFd as u64 {
            let Some(proxy) = self.proxies.get(&id) else { return };
            // Somebody may write into it; that is nothing to us.
            if matches!(seqpacket::receive(&proxy.end.fd, &mut self.buffer), RecvResult::Closed) {
                self.remove_proxy(id);
            }
            return;
        }
        if data & 3 == EventSource::Process as u64 {
            if let Some(entry) = self.processes.get_mut(&id).filter(|entry| entry.is_unattached) {
                // Its children may still have the connection.
                entry.pidfd = None;
                self.shared.attached.update(id, 0);
                return;
            }
            self.drain_requests(id);
            self.reap(id);
            return;
        }
        // A child that says its word and ends is gone before its parent, which learns of that, has its next question answered.
        for _ in 0..PACKETS_PER_EVENT {
            if !self.receive_packet(id) {
                break;
            }
        }
    }

    /// Whether there was one, and its sender stays.
    fn receive_packet(&mut self, id: u64) -> bool {
        let Some(entry) = self.processes.get(&id) else { return false };
        let stays = match seqpacket::receive(&entry.connection.fd, &mut self.buffer) {
            RecvResult::WouldBlock => return false,
            RecvResult::Closed => false,
            RecvResult::Oversized => {
                increment(&self.shared.counters.requests_refused);
                false
            }
            RecvResult::Packet(bytes, descriptors) => {
                // Taken out, because what is done with it needs the rest of the porter.
                let buffer = core::mem::take(&mut self.buffer);
                let stays = self.handle_message(id, &buffer[..bytes], descriptors);
                self.buffer = buffer;
                stays
            }
        };
        if !stays {
            self.reap(id);
        }
        stays
    }

    /// What a process said before it died still counts: it may have announced a child.
    fn drain_requests(&mut self, id: u64) {
        let mut buffer = core::mem::take(&mut self.buffer);
        // One question is under way at a time, and behind it there may be one more.
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

    /// A message. Whether whoever sent it may stay.
    fn handle_message(&mut self, id: u64, bytes: &[u8], descriptors: Vec<OwnedFd>) -> bool {
        let Some(entry) = self.processes.get(&id) else { return true };
        if entry.is_unattached {
            return self.handle_unattached(id, bytes, descriptors);
        }
        if !entry.is_greeted {
            let (asked, hello) = decode::<Hello>(bytes);
            if let Some(hello) = hello.as_ref().filter(|hello| hello.magic == MAGIC_UNATTACHED) {
                let greeted = self.greet_unattached(id, hello, descriptors);
                if let Err(refusal) = &greeted {
                    increment(&self.shared.counters.rejected);
                    // It hears of it when it wants to come in.
                    self.send_reply(id, asked, &ControlReply::Refused(*refusal), &[]);
                }
                return greeted.is_ok();
            }
            if let Some(hello) = hello.as_ref().filter(|hello| hello.magic == MAGIC_CHILD) {
                return match self.greet_child(id, hello, descriptors) {
                    Ok(()) => {
                        increment(&self.shared.counters.admitted);
                        true
                    }
                    Err(refusal) => {
                        increment(&self.shared.counters.rejected);
                        self.send_reply(id, asked, &ControlReply::Refused(refusal), &[]);
                        false
                    }
                };
            }
            let answer = match hello {
                Some(hello) if hello.magic == MAGIC => self.greet(id, &hello, descriptors),
                _ => Err(Refusal::Malformed),
            };
            return match answer {
                Ok(wake) => {
                    increment(&self.shared.counters.admitted);
                    // Cannot truncate: shards are 64 at the most.
                    self.send_reply(
                        id,
                        asked,
                        &ControlReply::Welcome(self.shards.len() as u16, self.shared.stack_info.clone()),
                        &[wake],
                    )
                }
                Err(refusal) => {
                    let is_full = matches!(refusal, Refusal::Clients | Refusal::Domains);
                    increment(if is_full {
                        &self.shared.counters.limit_reached
                    } else {
                        &self.shared.counters.rejected
                    });
                    self.send_reply(id, asked, &ControlReply::Refused(refusal), &[]);
                    false
                }
            };
        }
        let (asked, ask) = decode::<ControlRequest>(bytes);
        let Some(ask) = ask else {
            // Who speaks another language is not listened to any more: it may be the door itself, at the other end of a connection both of whose ends were sent here.
            increment(&self.shared.counters.requests_refused);
            self.send_reply(id, asked, &ControlReply::Refused(Refusal::Malformed), &[]);
            return false;
        };
        let answer = self.handle_request(id, ask, descriptors);
        let (answer, descriptors) = answer.unwrap_or_else(|refusal| {
            let is_full = matches!(refusal, Refusal::Clients | Refusal::ProxyDescriptors);
            increment(if is_full {
                &self.shared.counters.limit_reached
            } else {
                &self.shared.counters.requests_refused
            });
            (ControlReply::Refused(refusal), Vec::new())
        });
        self.send_reply(id, asked, &answer, &descriptors)
    }

    /// What a guest says behind its first word. Whether it may stay.
    fn handle_unattached(&mut self, id: u64, bytes: &[u8], mut descriptors: Vec<OwnedFd>) -> bool {
        let Some(entry) = self.processes.get(&id) else { return true };
        let (uid, domain_name) = (entry.uid, entry.domain_name.clone());
        match (bytes, descriptors.pop()) {
            ([unattached::ATTACH], Some(connection)) => self.add_connection(connection, uid, domain_name),
            ([unattached::SUCCESSOR], Some(connection)) => self.add_successor(connection, domain_name),
            ([unattached::IDENTIFY], Some(pidfd)) => return self.identify(id, pidfd),
            _ => increment(&self.shared.counters.requests_refused),
        }
        true
    }

    /// Somebody inside has made a connection for a program of its own, which comes as the user who made it, as the kernel knows.
    fn add_successor(&mut self, connection: OwnedFd, domain_name: Option<String>) {
        match creator_uid(&connection) {
            // One domain for each user: the name is not for whoever comes to choose.
            Ok(uid) => self.add_connection(connection, uid, Some(domain_name.unwrap_or_default())),
            Err(_) => increment(&self.shared.counters.requests_refused),
        }
    }

    /// Which process a guest is. Whether it may stay.
    fn identify(&mut self, id: u64, pidfd: OwnedFd) -> bool {
        let pid = pid_of(&pidfd);
        let Ok(pidfd) = self.watch(pidfd, id, EventSource::Process) else { return false };
        let Some(entry) = self.processes.get_mut(&id) else { return false };
        (entry.pidfd, entry.is_greeted, entry.is_unattached) = (Some(pidfd), true, true);
        self.shared.attached.update(id, pid);
        true
    }

    /// The first word of somebody who wants no place yet.
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
        if !admission::is_admitted(applicant, unattached, unattached_max(getrlimit(Resource::Nofile).current))
        {
            return Err(Refusal::UserLimit);
        }
        if self.identify(id, pidfd) { Ok(()) } else { Err(Refusal::Malformed) }
    }

    /// Whether it could be said: whoever does not read answers is sent away.
    fn send_reply(&self, id: u64, asked: u32, answer: &ControlReply, descriptors: &[OwnedFd]) -> bool {
        let Some(entry) = self.processes.get(&id) else { return false };
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        seqpacket::send(&entry.connection.fd, &encode(asked, answer), &descriptors).is_ok()
    }

    /// The first word of a process. Returns what wakes it.
    fn greet(&mut self, id: u64, hello: &Hello, mut descriptors: Vec<OwnedFd>) -> Result<OwnedFd, Refusal> {
        if hello.version != PROTOCOL_VERSION {
            return Err(Refusal::Version(PROTOCOL_VERSION));
        }
        if hello.domain.len() > DOMAIN_NAME_BYTES_MAX {
            return Err(Refusal::Malformed);
        }
        let pidfd = descriptors.pop().ok_or(Refusal::Malformed)?;
        let pid = pid_of(&pidfd);
        let pidfd = self.watch(pidfd, id, EventSource::Process)?;
        let entry = self.processes.get_mut(&id).ok_or(Refusal::Unknown)?;
        entry.pidfd = Some(pidfd);
        if entry.attachment.is_none() {
            let domain_name = entry.domain_name.clone().unwrap_or_else(|| hello.domain.clone());
            let uid = entry.uid;
            let (domain, clients, wake) = self.attach_to_domain(uid, &domain_name)?;
            let entry = self.processes.get_mut(&id).ok_or(Refusal::Unknown)?;
            (entry.attachment, entry.wake_fd) = (Some((domain, clients)), Some(wake));
        }
        let entry = self.processes.get_mut(&id).ok_or(Refusal::Unknown)?;
        entry.is_greeted = true;
        self.shared.attached.update(id, pid);
        entry.wake_fd.take().ok_or(Refusal::Unknown)
    }

    /// The first word of a child, of which its parent has told.
    fn greet_child(&mut self, id: u64, hello: &Hello, mut descriptors: Vec<OwnedFd>) -> Result<(), Refusal> {
        if hello.version != PROTOCOL_VERSION {
            return Err(Refusal::Version(PROTOCOL_VERSION));
        }
        let pidfd = descriptors.pop().ok_or(Refusal::Malformed)?;
        let pid = pid_of(&pidfd);
        let pidfd = self.watch(pidfd, id, EventSource::Process)?;
        let entry = self.processes.get_mut(&id).ok_or(Refusal::Unknown)?;
        // What wakes it stands here as long as nobody has it: of who was announced as a program.
        if entry.attachment.is_none() || entry.wake_fd.is_some() {
            return Err(Refusal::Unknown);
        }
        (entry.pidfd, entry.is_greeted) = (Some(pidfd), true);
        self.shared.attached.update(id, pid);
        Ok(())
    }

    /// A place on each shard for somebody in a domain.
    fn attach_to_domain(&mut self, uid: u32, domain_name: &str) -> Result<(u64, Vec<u32>, OwnedFd), Refusal> {
        let domain = self.domains.iter().find(|(_, home)| home.uid == uid && home.domain_name == domain_name);
        let domain = domain.map(|(id, _)| *id);
        let (broker_end, process_end) = wake_pair()?;
        if let Some(domain) = domain {
            let request = |domain, wake| BrokerRequest::Admit { domain, wake };
            let clients = self.attach_clients(domain, &broker_end, request)?;
            return Ok((domain, clients, process_end));
        }
        let (mut shards, mut clients) = (Vec::new(), Vec::new());
        for shard in &self.shards {
            let wake = broker_end.try_clone().map_err(|_| Refusal::Clients)?;
            match call_for_broker(shard, BrokerRequest::OpenDomain { wake }) {
                Ok(BrokerReply::Opened { domain, region, wake, client }) => {
                    shards.push(DomainRegion { domain, memory: region, wake });
                    clients.push(client);
                }
                other => {
                    for ((shard, region), client) in self.shards.iter().zip(&shards).zip(&clients) {
                        let _ = call_for_broker(
                            shard,
                            BrokerRequest::Reap { domain: region.domain, client: *client },
                        );
                    }
                    return Err(if other.is_ok() { Refusal::Domains } else { Refusal::ShardEnded });
                }
            }
        }
        let id = self.next_id();
        let domain = DomainEntry { uid, domain_name: domain_name.into(), shards, processes: 1, proxies: 0 };
        self.domains.insert(id, domain);
        Ok((id, clients, process_end))
    }

    /// A place on each shard in a domain that there is.
    fn attach_clients(
        &mut self,
        domain: u64,
        wake: &OwnedFd,
        mut request: impl FnMut(u8, OwnedFd) -> BrokerRequest,
    ) -> Result<Vec<u32>, Refusal> {
        let entry = self.domains.get_mut(&domain).ok_or(Refusal::Unknown)?;
        let mut clients = Vec::new();
        for (shard, region) in self.shards.iter().zip(&entry.shards) {
            let wake = wake.try_clone().map_err(|_| Refusal::Clients)?;
            match call_for_broker(shard, request(region.domain, wake)) {
                Ok(BrokerReply::Admitted(client)) => clients.push(client),
                other => {
                    for ((shard, region), client) in self.shards.iter().zip(&entry.shards).zip(&clients) {
                        let _ = call_for_broker(
                            shard,
                            BrokerRequest::Reap { domain: region.domain, client: *client },
                        );
                    }
                    return Err(if other.is_ok() { Refusal::Clients } else { Refusal::ShardEnded });
                }
            }
        }
        entry.processes += 1;
        Ok(clients)
    }

    /// Where a process sits on a shard: its domain there, and its number.
    fn client_on_shard(&self, id: u64, shard: u16) -> Result<(&Commander, &DomainRegion, u32), Refusal> {
        let entry = self.processes.get(&id).ok_or(Refusal::Unknown)?;
        let (domain, clients) = entry.attachment.as_ref().ok_or(Refusal::Unknown)?;
        let shard = usize::from(shard);
        let domain = self.domains.get(domain).ok_or(Refusal::Unknown)?;
        match (self.shards.get(shard), domain.shards.get(shard), clients.get(shard)) {
            (Some(commander), Some(region), Some(client)) => Ok((commander, region, *client)),
            _ => Err(Refusal::Unknown),
        }
    }

    /// Does what a process asks for: the one place where that is decided.
    fn handle_request(
        &mut self,
        id: u64,
        ask: ControlRequest,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(ControlReply, Vec<OwnedFd>), Refusal> {
        let answer = match ask {
            ControlRequest::Attach(shard) => {
                let (_, region, client) = self.client_on_shard(id, shard)?;
                let descriptors = [region.memory.try_clone(), region.wake.try_clone()];
                let descriptors: Result<Vec<OwnedFd>, _> = descriptors.into_iter().collect();
                return Ok((ControlReply::Attached(client), descriptors.map_err(|_| Refusal::Clients)?));
            }
            ControlRequest::Shard(shard, request) => {
                let (commander, region, client) = self.client_on_shard(id, shard)?;
                let entry = self.processes.get(&id).ok_or(Refusal::Unknown)?;
                let (uid, port_start) = (entry.uid, self.shared.stack_info.unprivileged_port_start);
                // The library has looked, too; here nobody gets around it.
                if !entry.is_privileged
                    && request.claimed_port().is_some_and(|port| (1..port_start).contains(&port))
                {
                    return Err(Refusal::Port(port_start));
                }
                // Root may have given up its rights since it came.
                let request = if uid == 0 { request } else { request.with_user(uid) };
                match call_for_broker(
                    commander,
                    BrokerRequest::Call { domain: region.domain, client, request },
                ) {
                    Ok(BrokerReply::Reply(reply)) => ControlReply::Reply(reply),
                    Ok(_) => return Err(Refusal::Unknown),
                    Err(_) => return Err(Refusal::ShardEnded),
                }
            }
            ControlRequest::Fork => {
                let child = self.prepare_process(id, None, descriptors)?;
                let entry = self.processes.get_mut(&child).ok_or(Refusal::Unknown)?;
                let wake = entry.wake_fd.take().ok_or(Refusal::Unknown)?;
                let clients = entry.attachment.as_ref().map_or_else(Vec::new, |(_, seats)| seats.clone());
                return Ok((ControlReply::Forked(clients), vec![wake]));
            }
            ControlRequest::Exec(kept) => {
                self.prepare_process(id, Some(kept), descriptors)?;
                ControlReply::Done
            }
            ControlRequest::Share(cookie, sockets, metadata) => {
                self.share(id, cookie, (sockets, metadata), descriptors)?
            }
            ControlRequest::Resolve(cookie) => self.resolve(id, cookie)?,
            ControlRequest::Successor => {
                let connection = { descriptors }.pop().ok_or(Refusal::Malformed)?;
                let domain_name = self.processes.get(&id).ok_or(Refusal::Unknown)?.domain_name.clone();
                self.add_successor(connection, domain_name);
                ControlReply::Done
            }
        };
        Ok((answer, Vec::new()))
    }

    /// A process announces another, which will hold what it holds, or some of that. Returns its number.
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
        let (domain, parent_clients) = entry.attachment.clone().ok_or(Refusal::Unknown)?;
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
            domain_name,
            attachment: Some((domain, clients)),
            wake_fd: Some(process_end),
            is_greeted: false,
            is_unattached: false,
        };
        self.processes.insert(child, entry);
        self.shared.attached.update(child, 0);
        Ok(child)
    }

    /// A process has a descriptor that it may send to others.
    fn share(
        &mut self,
        id: u64,
        cookie: u64,
        (sockets, metadata): (Vec<GlobalSocketId>, Vec<u8>),
        mut descriptors: Vec<OwnedFd>,
    ) -> Result<ControlReply, Refusal> {
        let end = descriptors.pop().ok_or(Refusal::Malformed)?;
        let is_valid =
            (1..=SOCKETS_PER_MESSAGE_MAX).contains(&sockets.len()) && metadata.len() <= METADATA_BYTES_MAX;
        if !is_valid || self.cookies.contains_key(&cookie) {
            return Err(Refusal::Malformed);
        }
        let entry = self.processes.get(&id).ok_or(Refusal::Unknown)?;
        let (domain, _) = entry.attachment.as_ref().ok_or(Refusal::Unknown)?;
        let domain = *domain;
        if self.domains.get(&domain).is_none_or(|home| home.proxies >= PROXY_FDS_MAX) {
            return Err(Refusal::ProxyDescriptors);
        }
        let proxy = self.next_id();
        // To whoever does not know the library it is a connection whose other end has said all it had to say.
        let _ = shutdown(&end, Shutdown::Write);
        let end = self.watch(end, proxy, EventSource::ProxyFd)?;
        let request = |domain, client, sockets| BrokerRequest::AddProxy { domain, client, things: sockets };
        if let Err((why, done)) = self.for_each_shard(id, &sockets, request) {
            self.release_refs(domain, &sockets, done);
            return Err(why);
        }
        self.cookies.insert(cookie, proxy);
        self.proxies.insert(proxy, ProxyEntry { end, cookie, domain, sockets, metadata });
        if let Some(domain) = self.domains.get_mut(&domain) {
            domain.proxies += 1;
        }
        Ok(ControlReply::Done)
    }

    /// A process was sent such a descriptor.
    fn resolve(&mut self, id: u64, cookie: u64) -> Result<ControlReply, Refusal> {
        let proxy = self.cookies.get(&cookie).and_then(|id| self.proxies.get(id));
        let proxy = proxy.ok_or(Refusal::Unknown)?;
        let entry = self.processes.get(&id).ok_or(Refusal::Unknown)?;
        // Another domain has other memory.
        if entry.attachment.as_ref().is_none_or(|(domain, _)| *domain != proxy.domain) {
            return Err(Refusal::Unknown);
        }
        let (sockets, metadata) = (proxy.sockets.clone(), proxy.metadata.clone());
        let request =
            |domain, client, sockets| BrokerRequest::ResolveProxy { domain, client, things: sockets };
        self.for_each_shard(id, &sockets, request).map_err(|(refusal, _)| refusal)?;
        Ok(ControlReply::Resolved(sockets, metadata))
    }

    /// Asks each shard on which there are some of these things. An error comes with the number of shards that had agreed before.
    fn for_each_shard(
        &self,
        id: u64,
        sockets: &[GlobalSocketId],
        request: impl Fn(u8, u32, Vec<SocketId>) -> BrokerRequest,
    ) -> Result<(), (Refusal, usize)> {
        if sockets.iter().any(|held| usize::from(held.shard) >= self.shards.len()) {
            return Err((Refusal::Unknown, 0));
        }
        for shard in 0..self.shards.len() {
            let on_shard = sockets_on(sockets, shard);
            if on_shard.is_empty() {
                continue;
            }
            let (commander, region, client) =
                self.client_on_shard(id, shard as u16).map_err(|refusal| (refusal, shard))?;
            match call_for_broker(commander, request(region.domain, client, on_shard)) {
                Ok(BrokerReply::Done) => {}
                Ok(_) => return Err((Refusal::Unknown, shard)),
                Err(_) => return Err((Refusal::ShardEnded, shard)),
            }
        }
        Ok(())
    }

    /// Things are held by a placeholder no more, on so many shards.
    fn release_refs(&self, domain: u64, sockets: &[GlobalSocketId], shards: usize) {
        let Some(domain) = self.domains.get(&domain) else { return };
        for (index, (shard, region)) in self.shards.iter().zip(&domain.shards).enumerate().take(shards) {
            let sockets = sockets_on(sockets, index);
            if !sockets.is_empty() {
                // A shard that is gone holds nothing.
                let _ = call_for_broker(
                    shard,
                    BrokerRequest::ReleaseProxy { domain: region.domain, things: sockets },
                );
            }
        }
    }

    /// The last copy of a descriptor is gone.
    fn remove_proxy(&mut self, id: u64) {
        let Some(proxy) = self.proxies.remove(&id) else { return };
        self.cookies.remove(&proxy.cookie);
        self.release_refs(proxy.domain, &proxy.sockets, self.shards.len());
        if let Some(domain) = self.domains.get_mut(&proxy.domain) {
            domain.proxies -= 1;
        }
        self.remove_domain_if_empty(proxy.domain);
    }

    /// A process is gone: whatever it alone held ends.
    fn reap(&mut self, id: u64) {
        let Some(entry) = self.processes.remove(&id) else { return };
        if entry.is_unattached {
            self.shared.attached.remove(id);
        }
        let Some((home, seats)) = entry.attachment else { return };
        self.shared.attached.remove(id);
        increment(&self.shared.counters.reaped);
        if let Some(domain) = self.domains.get_mut(&home) {
            for ((shard, region), client) in self.shards.iter().zip(&domain.shards).zip(&seats) {
                // A shard that is gone holds nothing.
                let _ =
                    call_for_broker(shard, BrokerRequest::Reap { domain: region.domain, client: *client });
            }
            domain.processes -= 1;
        }
        self.remove_domain_if_empty(home);
    }

    /// A domain without anybody in it is no longer one to join. On the shards it lives until its last byte is sent.
    fn remove_domain_if_empty(&mut self, domain: u64) {
        if self.domains.get(&domain).is_some_and(|home| home.processes == 0 && home.proxies == 0) {
            self.domains.remove(&domain);
        }
    }
}

/// Those of the things that are on a shard.
fn sockets_on(sockets: &[GlobalSocketId], shard: usize) -> Vec<SocketId> {
    sockets.iter().filter(|held| usize::from(held.shard) == shard).map(|held| held.id).collect()
}

/// What wakes a process: our end and its.
fn wake_pair() -> Result<(OwnedFd, OwnedFd), Refusal> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // Out of descriptors.
    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(|_| Refusal::Clients)
}
