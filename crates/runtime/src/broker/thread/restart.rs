//! Restart of the shards in a new process: the broker admits all attached processes there, and each of them
//! opens its listeners and UDP sockets again when it notices (docs/adr/0021-restart-of-the-shards.md).

use super::{
    BrokerThread, ChildLink, ControlReply, DomainClients, DomainEntry, LINK_EVENT, PreviousSocket,
    ProcessEntry, Refusal, ShardLink, SocketId, UpgradeShards, WatchedFd, process_log,
};
use crate::channel::control::{BrokerReply, BrokerRequest, ChannelReply, ChannelRequest, UdpRequest};
use crate::socket_filter::{FilterError, UNKNOWN_PROGRAM};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Signal, pidfd_send_signal};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Ids of sockets of one domain that were opened again: more than a domain has listeners and UDP sockets.
// limit: socket ids of a domain known across restarts
const IDENTITIES_MAX: usize = 1 << 20;
/// Earlier domains of a process that are remembered. A socket id that was valid before the oldest of them is
/// unknown.
// limit: restarts that a socket is known across
const PREVIOUS_DOMAINS_MAX: usize = 16;
/// How long programs may take to end after SIGTERM.
const TERM_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the kernel may take to close all descriptors of the shards' process. A process may see the end of
/// one connection before this thread sees the end of another.
pub(super) const END_TIMEOUT: Duration = Duration::from_millis(200);
/// How long requests wait for the next process of the shards. After that they are refused until it runs.
const RESTART_WAIT: Duration = Duration::from_secs(1);

/// The process that runs the shards, and how to start the next one.
pub(in super::super) struct Supervision {
    /// The connection to the process that runs the shards.
    pub link: Arc<ChildLink>,
    /// Starts the next process; blocks until it runs.
    pub restart: Box<dyn FnMut() -> AfterDeath + Send>,
    pub upgrade: Arc<UpgradeShards>,
}

/// The shards that run in a process of their own, and the thread that starts the next process. The start may
/// take many attempts, during which the broker answers requests.
pub(super) struct SupervisedShards {
    pub(super) link: Arc<ChildLink>,
    /// Asks the thread to start the next process.
    start: Sender<()>,
    started: Receiver<AfterDeath>,
    /// Since when the next process is being started; `None` while the shards run.
    restarting_since: Option<Instant>,
    pub(super) upgrade: Arc<UpgradeShards>,
}

impl SupervisedShards {
    /// Returns whether the next process is being started.
    pub(super) fn is_restarting(&self) -> bool {
        self.restarting_since.is_some()
    }
}

/// Decision after the death of the process that ran the shards.
#[derive(Debug)]
pub enum AfterDeath {
    /// The next process runs the shards.
    Restarted(ChildLink),
    /// There are no shards any more. The broker ends the attached and the unattached processes.
    EndPrograms,
    /// There are no shards any more. The attached processes get errors.
    Ended,
}

/// Names a socket across restarts. Ids of domains are never used again, so a domain implies the process of
/// the shards.
type SocketKey = (u64, u16, SocketId);

/// The domains that a process had before it resumed, one for each time that it resumed, the newest last. The
/// socket ids of that time belong to them.
#[derive(Default)]
pub(super) struct PreviousDomains(Vec<u64>);

impl PreviousDomains {
    fn push(&mut self, domain: u64) {
        if self.0.len() == PREVIOUS_DOMAINS_MAX {
            self.0.remove(0);
        }
        self.0.push(domain);
    }

    /// Returns the domain that the process had until it resumed `resumes` times, if that is known.
    fn before(&self, resumes: u32) -> Option<u64> {
        self.0.get(self.0.len().checked_sub(resumes as usize)?).copied()
    }

    fn iter(&self) -> impl Iterator<Item = u64> {
        self.0.iter().copied()
    }
}

/// Sockets that were opened again. A socket has another id after each restart, and a process may miss a
/// restart, so all ids of a socket lead to its identity.
#[derive(Default)]
pub(super) struct RestoredSockets {
    identities: HashMap<SocketKey, u64>,
    /// Number of keys in `identities` by domain.
    counts: HashMap<u64, usize>,
    /// The domain and the id that a socket has now, by its identity.
    current: HashMap<u64, (u64, SocketId)>,
    last_identity: u64,
}

impl RestoredSockets {
    /// Returns the id of a socket in `domain`, if a process has opened the socket again there.
    fn find(&self, before: SocketKey, domain: u64) -> Option<SocketId> {
        let (opened_in, id) = self.current.get(self.identities.get(&before)?)?;
        (*opened_in == domain).then_some(*id)
    }

    /// Records that the socket `before` was opened again as `now`.
    fn insert(&mut self, before: SocketKey, now: SocketKey) {
        // A process may name any number of sockets, and must not take the room of other users. Processes that
        // share a socket that is not recorded get one socket each.
        let is_full = |key: &SocketKey| {
            !self.identities.contains_key(key)
                && self.counts.get(&key.0).is_some_and(|count| *count >= IDENTITIES_MAX)
        };
        if is_full(&before) || is_full(&now) {
            return;
        }
        let identity = self.identities.get(&before).copied().unwrap_or(self.last_identity + 1);
        self.last_identity = self.last_identity.max(identity);
        for key in [before, now] {
            if self.identities.insert(key, identity).is_none() {
                *self.counts.entry(key.0).or_default() += 1;
            }
        }
        self.current.insert(identity, (now.0, now.2));
    }

    /// Forgets sockets of domains that no process knows any more.
    fn retain(&mut self, domains: &BTreeSet<u64>) {
        self.identities.retain(|(domain, ..), _| domains.contains(domain));
        self.counts.retain(|domain, _| domains.contains(domain));
        let known: BTreeSet<u64> = self.identities.values().copied().collect();
        self.current.retain(|identity, _| known.contains(identity));
    }
}

impl BrokerThread {
    /// Sets the process that runs the shards.
    pub(super) fn supervise(&mut self, supervision: Supervision) {
        let Supervision { link, mut restart, upgrade } = supervision;
        let (start, starts) = channel();
        let (sender, started) = channel();
        let wake = self.wake.clone();
        let thread = std::thread::Builder::new().name("restart".into()).spawn(move || {
            while starts.recv().is_ok() && sender.send(restart()).is_ok() {
                wake.signal();
            }
        });
        match thread {
            Ok(_) => {
                self.watch_shards(SupervisedShards { link, start, started, restarting_since: None, upgrade });
            }
            Err(error) => tracing::error!("the shards will not be started again if they end: {error}"),
        }
    }

    pub(super) fn watch_shards(&mut self, supervised: SupervisedShards) {
        let data = epoll::EventData::new_u64(LINK_EVENT);
        // Reports only the hang-up; replies are received by the request that waits for them.
        if epoll::add(&self.epoll, supervised.link.fd(), data, epoll::EventFlags::empty()).is_ok() {
            self.supervised = Some(supervised);
        }
    }

    /// Ignores the end of the process of the shards.
    pub(super) fn unwatch_shards(&mut self) {
        if let Some(supervised) = &self.supervised {
            // Fails if it is not watched. The descriptor may have a copy in a process that is being started.
            let _ = epoll::delete(&self.epoll, supervised.link.fd());
        }
    }

    /// Goes on with the process at the other end of `link`.
    pub(super) fn continue_on(&mut self, link: ChildLink) {
        let Some(supervised) = self.supervised.take() else { return };
        let link = Arc::new(link);
        let of = |shard| ShardLink::Child(link.clone(), shard);
        self.shards = (0..link.shards()).map(of).collect();
        self.watch_shards(SupervisedShards { link, restarting_since: None, ..supervised });
    }

    /// Starts the process of the shards again if it is gone, or ends within `timeout`, and waits up to
    /// [`RESTART_WAIT`] for the next one. Returns whether it was gone.
    pub(super) fn restart_ended_shards(&mut self, timeout: Duration) -> bool {
        let Some(supervised) = &mut self.supervised else { return false };
        if supervised.restarting_since.is_none() {
            // The event may be that of a process whose successor runs already, because a program has asked
            // first.
            if !supervised.link.is_gone_within(timeout) {
                return false;
            }
            supervised.restarting_since = Some(Instant::now());
            // Fails only if the thread is gone, which the next step finds.
            let _ = supervised.start.send(());
            self.unwatch_shards();
            self.domains.values().for_each(DomainEntry::announce_end);
        }
        self.finish_restart();
        true
    }

    /// Admits all attached processes to the shards that were started again. If they do not run yet, waits
    /// until [`RESTART_WAIT`] has passed since the end of the previous ones.
    pub(super) fn finish_restart(&mut self) {
        let Some(supervised) = &self.supervised else { return };
        let Some(since) = supervised.restarting_since else { return };
        let after = match supervised.started.recv_timeout(RESTART_WAIT.saturating_sub(since.elapsed())) {
            Ok(after) => after,
            // The thread wakes this one.
            Err(RecvTimeoutError::Timeout) => return,
            Err(RecvTimeoutError::Disconnected) => AfterDeath::Ended,
        };
        match after {
            AfterDeath::Restarted(link) if usize::from(link.shards()) == self.shards.len() => {
                self.continue_on(link);
                self.readmit();
            }
            AfterDeath::EndPrograms => {
                self.supervised = None;
                self.end_programs();
            }
            AfterDeath::Restarted(_) | AfterDeath::Ended => {
                self.supervised = None;
                self.end_shards();
            }
        }
        // If the new process is gone already, the next event says so.
    }

    /// Returns why a request is refused that the shards cannot carry out because they have ended.
    pub(super) fn ended_refusal(&self) -> Refusal {
        match self.supervised.as_ref().and_then(|supervised| supervised.restarting_since) {
            // Cannot truncate: nobody waits for a century.
            Some(since) => Refusal::Restarting(since.elapsed().as_secs() as u32),
            None => Refusal::ShardEnded,
        }
    }

    /// Ends all processes by SIGTERM, and after [`TERM_TIMEOUT`] by SIGKILL. They are disconnected before: a
    /// process that waits for the next shards would not see its signal.
    fn end_programs(&mut self) {
        let of = |entry: &mut ProcessEntry| {
            Some(EndingProcess { pidfd: entry.pidfd.take()?, program: entry.logged.take() })
        };
        let mut ending: Vec<EndingProcess> = self.processes.values_mut().filter_map(of).collect();
        ending.iter().for_each(|process| process.signal(Signal::TERM));
        self.end_shards();
        let until = Instant::now() + TERM_TIMEOUT;
        while !ending.is_empty() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
            ending.retain(|process| {
                let has_ended = has_process_ended(&process.pidfd.fd);
                if let Some((pid, name)) = process.program.as_ref().filter(|_| has_ended) {
                    process_log::ended(name, *pid);
                }
                !has_ended
            });
        }
        for process in ending {
            process.signal(Signal::KILL);
            if let Some((pid, name)) = process.program {
                process_log::killed(&name, pid, TERM_TIMEOUT);
            }
        }
    }

    /// Disconnects all attached processes: there are no shards any more.
    fn end_shards(&mut self) {
        self.shards.clear();
        let attached = self.processes.iter().filter(|(_, entry)| entry.attachment.is_some());
        let attached: Vec<u64> = attached.map(|(id, _)| *id).collect();
        for id in attached {
            // The hang-up of a process that has ended may not be handled yet.
            let runs = |entry: &&mut ProcessEntry| {
                entry.pidfd.as_ref().is_none_or(|pidfd| !has_process_ended(&pidfd.fd))
            };
            let program = self.processes.get_mut(&id).filter(runs).and_then(|entry| entry.logged.take());
            if let Some((pid, name)) = program {
                process_log::lost_stack(&name, pid);
            }
            self.reap(id);
        }
    }

    fn readmit(&mut self) {
        // Nobody can tell which sockets a proxy descriptor owns now.
        let proxies: Vec<u64> = self.proxies.keys().copied().collect();
        for id in proxies {
            if let Some(proxy) = self.proxies.remove(&id) {
                self.cookies.remove(&proxy.cookie);
            }
        }
        self.domains.values_mut().for_each(|domain| domain.proxies = 0);
        let mut before = core::mem::take(&mut self.domains);
        let ids: Vec<u64> = self.processes.keys().copied().collect();
        for id in ids {
            let Some(entry) = self.processes.get_mut(&id) else { continue };
            let Some(attachment) = entry.attachment.take() else { continue };
            let Some(domain) = before.get(&attachment.domain) else { continue };
            match self.attach_to_domain(domain.uid, &domain.domain_name) {
                Ok((domain, clients, wake)) => {
                    let Some(entry) = self.processes.get_mut(&id) else { continue };
                    if entry.resume_fd.is_none() {
                        entry.previous_domains.push(attachment.domain);
                    }
                    entry.attachment = Some(DomainClients { domain, clients: clients.numbers });
                    (entry.resume_fd, entry.memories) = (Some(wake), clients.memories);
                }
                // The new process is gone, too: its hang-up is the next event.
                Err(Refusal::ShardEnded) => {
                    if let Some(entry) = self.processes.get_mut(&id) {
                        entry.attachment = Some(attachment);
                    }
                    self.domains.extend(before.drain());
                    return;
                }
                // The process finds its connection closed.
                Err(_) => self.forget(id),
            }
        }
        let domains = self.processes.values().flat_map(|entry| {
            entry.previous_domains.iter().chain(entry.attachment.as_ref().map(|of| of.domain))
        });
        let domains: BTreeSet<u64> = domains.collect();
        self.restored.retain(&domains);
    }

    /// Removes a process that has no clients.
    fn forget(&mut self, id: u64) {
        let entry = self.processes.remove(&id);
        self.pending.remove(&id);
        if let Some((pid, name)) = entry.and_then(|entry| entry.logged) {
            process_log::lost_stack(&name, pid);
        }
        self.shared.attached.remove(id);
    }

    /// Handles [`ControlRequest::Resume`](super::ControlRequest::Resume).
    pub(super) fn resume(&mut self, id: u64) -> Result<(ControlReply, Vec<OwnedFd>), Refusal> {
        let is_current = self.processes.get(&id).is_some_and(|entry| entry.resume_fd.is_none());
        // The process has noticed the end before this thread, and may ask again if this thread cannot see it.
        if is_current && !self.restart_ended_shards(Duration::ZERO) {
            return Err(if self.supervised.is_some() { Refusal::ShardsRun } else { Refusal::Unknown });
        }
        let entry = self.processes.get_mut(&id).ok_or(Refusal::Unknown)?;
        let Some(wake) = entry.resume_fd.take() else { return Err(self.ended_refusal()) };
        // Cannot truncate: there are at most 64 shards.
        let welcome = ControlReply::Welcome(self.shards.len() as u16, self.shared.stack_info.clone());
        Ok((welcome, vec![wake]))
    }

    /// Records that the shards have ended while a process opened its sockets again.
    pub(super) fn note_death_during_restoration(&self, id: u64) {
        process_log::restoration_interrupted(self.processes.get(&id).and_then(|entry| entry.logged.as_ref()));
    }

    /// Opens a socket again, or makes the process an owner of it if another process has opened it.
    pub(super) fn restore(
        &mut self,
        id: u64,
        shard: u16,
        before: PreviousSocket,
        request: ChannelRequest,
    ) -> Result<ControlReply, Refusal> {
        let entry = self.processes.get(&id).ok_or(Refusal::Unknown)?;
        let domain = entry.attachment.as_ref().ok_or(Refusal::Unknown)?.domain;
        // If the domain is not known any more, the socket is a new one, which no other process shares.
        let previous = entry.previous_domains.before(before.resumes);
        let before = previous.map(|domain| (domain, shard, before.id));
        if !matches!(
            request.without_filter(),
            ChannelRequest::ListenShared(..) | ChannelRequest::Udp(UdpRequest::Open(..))
        ) {
            return Err(Refusal::Malformed);
        }
        if let Some(now) = before.and_then(|before| self.restored.find(before, domain)) {
            let (link, region, client) = self.client_on_shard(id, shard)?;
            let own = BrokerRequest::Own { domain: region.domain, client, sockets: vec![now] };
            match link.call(own) {
                Ok(BrokerReply::Done) => {
                    let reply = match (self.replace_unknown_filter(id, shard, now, &request)?, now) {
                        (Err(error), _) => ChannelReply::SetFilter(Err(error)),
                        (Ok(()), SocketId::Listener(number)) => ChannelReply::Listen(Ok(number)),
                        (Ok(()), SocketId::Socket { socket, generation }) => {
                            ChannelReply::UdpBind(Ok((socket, generation)))
                        }
                    };
                    return Ok(ControlReply::Reply(reply));
                }
                // The process that opened it has closed it since.
                Ok(_) => {}
                Err(_) => return Err(Refusal::ShardEnded),
            }
        }
        let reply = self.call_shard(id, shard, request)?;
        let now = match &reply {
            ChannelReply::Listen(Ok(number)) => Some(SocketId::Listener(*number)),
            ChannelReply::UdpBind(Ok((socket, generation))) => {
                Some(SocketId::Socket { socket: *socket, generation: *generation })
            }
            _ => None,
        };
        if let (Some(before), Some(now)) = (before, now) {
            self.restored.insert(before, (domain, shard, now));
        }
        Ok(ControlReply::Reply(reply))
    }
}

impl BrokerThread {
    /// Gives a socket the filter of `request` if the process that opened it again did not know its filter.
    /// Any other filter is as new or newer, since processes set filters through this thread only.
    fn replace_unknown_filter(
        &self,
        id: u64,
        shard: u16,
        of: SocketId,
        request: &ChannelRequest,
    ) -> Result<Result<(), FilterError>, Refusal> {
        let ChannelRequest::Filtered(code, _) = request else { return Ok(Ok(())) };
        let is_unknown = |code: &[u8]| code == UNKNOWN_PROGRAM;
        if is_unknown(code) {
            return Ok(Ok(()));
        }
        match self.call_shard(id, shard, ChannelRequest::Filter(of))? {
            ChannelReply::Filter(Ok(present)) if is_unknown(&present) => {}
            _ => return Ok(Ok(())),
        }
        match self.call_shard(id, shard, ChannelRequest::SetFilter(of, Some(code.clone())))? {
            ChannelReply::SetFilter(result) => Ok(result),
            _ => Err(Refusal::Unknown),
        }
    }
}

/// A process that is ended.
struct EndingProcess {
    pidfd: WatchedFd,
    /// Process id and name of a program that is in the log.
    program: Option<(u32, Box<str>)>,
}

impl EndingProcess {
    fn signal(&self, signal: Signal) {
        // Fails only for a process that has ended.
        let _ = pidfd_send_signal(&self.pidfd.fd, signal);
    }
}

/// Returns whether the process of a pidfd has ended.
fn has_process_ended(pidfd: &OwnedFd) -> bool {
    let immediately = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&immediately)), Ok(1))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    // limit: restarts that a socket is known across
    #[test]
    fn oldest_domains_are_forgotten() {
        let mut domains = PreviousDomains::default();
        assert_eq!((domains.before(0), domains.before(1)), (None, None));
        (1..=PREVIOUS_DOMAINS_MAX as u64 + 1).for_each(|domain| domains.push(domain));
        assert_eq!((domains.before(0), domains.before(1), domains.before(2)), (None, Some(17), Some(16)));
        assert_eq!((domains.before(16), domains.before(17), domains.before(u32::MAX)), (Some(2), None, None));
    }

    // limit: socket ids of a domain known across restarts
    #[test]
    fn sockets_beyond_the_limit_have_no_identity() {
        let mut restored = RestoredSockets::default();
        let of = |domain, number| (domain, 0, SocketId::Listener(number));
        let sockets = IDENTITIES_MAX as u32;
        (0..=sockets).for_each(|number| restored.insert(of(1, number), of(2, number)));
        assert_eq!(restored.find(of(1, sockets - 1), 2), Some(SocketId::Listener(sockets - 1)));
        assert_eq!(restored.find(of(1, sockets), 2), None);
        // A known socket may be opened again, and other domains have room of their own.
        restored.insert(of(1, 0), of(5, 7));
        assert_eq!(restored.find(of(2, 0), 5), Some(SocketId::Listener(7)));
        restored.insert(of(3, sockets), of(4, sockets));
        assert_eq!(restored.find(of(3, sockets), 4), Some(SocketId::Listener(sockets)));
        // So has a domain once the processes of its earlier domains are gone.
        restored.insert(of(2, sockets), of(6, 1));
        assert_eq!(restored.find(of(2, sockets), 6), None);
        restored.retain(&BTreeSet::from([6]));
        assert_eq!((restored.identities.len(), restored.counts.len()), (0, 0));
        restored.insert(of(2, sockets), of(6, 1));
        assert_eq!(restored.find(of(2, sockets), 6), Some(SocketId::Listener(1)));
    }

    #[test]
    fn a_socket_keeps_its_identity_across_restarts() {
        let of = |number| SocketId::Listener(number);
        let mut restored = RestoredSockets::default();
        assert_eq!(restored.find((1, 0, of(5)), 2), None);
        restored.insert((1, 0, of(5)), (2, 0, of(7)));
        assert_eq!(restored.find((1, 0, of(5)), 2), Some(of(7)));
        assert_eq!(restored.find((1, 1, of(5)), 2), None, "another shard");
        // A process that missed the first restart is the first after the second one.
        assert_eq!(restored.find((1, 0, of(5)), 3), None);
        restored.insert((1, 0, of(5)), (3, 0, of(1)));
        assert_eq!(restored.find((2, 0, of(7)), 3), Some(of(1)));
        restored.retain(&BTreeSet::from([3]));
        assert_eq!((restored.identities.len(), restored.current.len()), (1, 1));
        restored.retain(&BTreeSet::new());
        assert_eq!((restored.identities.len(), restored.current.len()), (0, 0));
    }
}
