//! The stack's end of a channel: a handler that copies between the engine and regions. It trusts nothing in a
//! region except what it wrote there itself and kept a copy of.

mod accept;
mod arrival_times;
mod client_state;
mod client_table;
mod credit_queue;
mod datagram_queue;
mod departures;
mod device_wait;
mod domain;
mod error_queue;
mod filters;
mod group_programs;
mod large_buffers;
mod owner_set;
mod owners;
mod port_reservations;
mod preallocated;
mod receive_charges;
mod requests;
mod saved;
mod slot_allocator;
mod stage_marks;
mod tx_stamps;
mod udp_requests;
mod unordered;
mod unread;
mod waker;
mod zero_copy;

use super::client::{Client, ClientParts};
use super::control::{
    AdmittedClient, BrokerEnvelope, BrokerReply, BrokerRequest, ChannelReply, ChannelRequest, ControlPath,
    RequestEnvelope,
};
use super::socket::state;
use super::{ChannelConfig, ChannelStats};
use crate::command::Command;
use crate::context::{Context, WorkContext};
use crate::errno;
use crate::error::Error;
use crate::handler::{Handler, UrgentData};
use crate::saved_shard::DescriptorTable;
use crate::shard_saver::SaveRequest;
use crate::socket_filter;
use crate::stages::StageSampler;
use crate::stats::CounterKind;
use crate::wait::EventFd;
use core::any::Any;
use core::time::Duration;
use domain::{Domain, split_token};
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use ginnel_stack::priority::BEST_EFFORT;
use ginnel_stack::socket_filter::SocketFilter;
use ginnel_stack::udp::{Datagram, UdpError};
use owners::NotAdmitted;
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::io;
use std::sync::Arc;
use waker::{ClientWaker, DomainEpoll};

/// Index of the domain of the clients in this process.
const LOCAL_DOMAIN: usize = 0;

/// Where a listener of the engine is served.
#[derive(Clone, Copy)]
struct ListenerPlace {
    listener: Listener,
    domain: u8,
    /// Its number in the domain.
    number: u16,
}

/// A handler that serves clients: threads of this process, which form one domain, and processes that were
/// admitted by the [broker](crate::broker). Each domain has its own region.
pub struct ChannelServer {
    config: ChannelConfig,
    // Boxed, because most entries are empty and a domain is large.
    domains: Vec<Option<Box<Domain>>>,
    /// The domain with which a turn begins.
    first_domain: usize,
    /// Indexed by the index of the engine's listener.
    listeners: Vec<Option<ListenerPlace>>,
    /// The epoll descriptor of the domains of all processes; created with the first domain for processes.
    domain_epoll: Option<DomainEpoll>,
    ports: port_reservations::PortReservations,
    /// True if the stack's addresses can be used.
    is_ready: bool,
    /// True if the last yield of the CPU lasted for its full time.
    has_yield_expired: bool,
    /// Counters of domains that were reaped.
    closed_stats: ChannelStats,
    /// Of a state that is being restored: whether events had classes of priority, and its filters.
    has_saved_priorities: bool,
    restored_filters: saved::RestoredFilters,
}

impl ChannelServer {
    /// Creates the stack's end of a channel without clients, for threads of this process and for other
    /// processes.
    ///
    /// # Errors
    /// Returns an error if a key is out of range, or if memory or descriptors are short.
    pub fn new(config: &ChannelConfig) -> Result<Self, Error> {
        let mut server = Self::for_processes(config)?;
        let local = Domain::new(LOCAL_DOMAIN as u8, config, false)
            .map_err(|e| Error::io("region of the channel", e))?;
        server.domains[LOCAL_DOMAIN] = Some(Box::new(local));
        Ok(server)
    }

    /// Creates the stack's end of a channel whose clients are the workers of one program. Workers that listen
    /// on the same address share the listener.
    pub(crate) fn for_workers(config: &ChannelConfig) -> Result<Self, Error> {
        let mut server = Self::new(config)?;
        server.local_domain()?.shares_listeners = true;
        Ok(server)
    }

    /// Creates the stack's end of a channel for other processes only. Domains are created when processes
    /// attach.
    ///
    /// # Errors
    /// Returns an error if a key is out of range.
    pub fn for_processes(config: &ChannelConfig) -> Result<Self, Error> {
        config.validate()?;
        Ok(Self {
            config: config.clone(),
            domains: (0..config.domains_max).map(|_| None).collect(),
            first_domain: 0,
            listeners: Vec::new(),
            domain_epoll: None,
            ports: port_reservations::PortReservations::default(),
            is_ready: false,
            has_yield_expired: false,
            closed_stats: ChannelStats::default(),
            has_saved_priorities: false,
            restored_filters: saved::RestoredFilters::default(),
        })
    }

    /// Returns the domain of this process.
    fn local_domain(&mut self) -> Result<&mut Domain, Error> {
        let none = || Error::application("channel: this stack serves only other processes");
        self.domains[LOCAL_DOMAIN].as_deref_mut().filter(|d| !d.is_for_processes).ok_or_else(none)
    }

    /// Attaches a client in this process. `control` is the path of its requests, usually the shard's
    /// [`Commander`](crate::Commander).
    ///
    /// # Errors
    /// Returns an error if `channel.clients_max` is reached, memory or descriptors are short, or the server
    /// was created [for other processes only](Self::for_processes).
    pub fn attach(&mut self, control: Box<dyn ControlPath>) -> Result<Client, Error> {
        let (client, wake) = self.admit()?;
        let local = self.local_domain()?;
        let number = client.number as usize;
        let admitted = local.clients.get(number).expect("it was admitted just now");
        let (region, memory) = (local.region.clone(), admitted.memory.clone());
        Ok(Client::new(region, memory, number, local.wake.clone(), wake, control))
    }

    /// Returns what another process needs to become a client of this process's domain with [`Client::open`].
    ///
    /// # Errors
    /// As [`ChannelServer::attach`].
    pub fn attach_process(&mut self) -> Result<ClientParts, Error> {
        let copy = |fd: BorrowedFd<'_>| {
            fd.try_clone_to_owned().map_err(|e| Error::io("descriptors of the channel", e))
        };
        let local = self.local_domain()?;
        let (region, stack) = (copy(local.region.file())?, copy(local.wake.as_fd())?);
        let (AdmittedClient { number, memory }, wake) = self.admit()?;
        Ok(ClientParts {
            region,
            memory,
            stack_wake: stack,
            client_wake: copy(wake.as_fd())?,
            client: number,
        })
    }

    fn admit(&mut self) -> Result<(AdmittedClient, Arc<EventFd>), Error> {
        let wake = EventFd::new().map_err(|e| Error::io("eventfd of a client", e))?;
        let wake = Arc::new(wake);
        let admitted = self.local_domain()?.admit(ClientWaker::Thread(wake.clone()));
        let client = admitted.map_err(|cause| match cause {
            NotAdmitted::Full(limit) => Error::application(format!(
                "channel: {limit} clients are attached, the limit channel.clients_max"
            )),
            NotAdmitted::NoResources(errno) => Error::io("memory of a client", io::Error::from(errno)),
        })?;
        Ok((client, wake))
    }

    /// Returns the counters, summed over all present and past domains.
    pub fn stats(&self) -> ChannelStats {
        self.domains.iter().flatten().fold(self.closed_stats, |sum, domain| sum + domain.stats())
    }

    /// Returns the number of sockets in use: connections, and sockets that clients still own after their
    /// connection closed.
    pub fn sockets_in_use(&self) -> usize {
        self.domains.iter().flatten().map(|domain| domain.sockets_in_use()).sum()
    }

    /// Returns the number of domains: this process's, those of attached processes, and those whose last bytes
    /// are not sent yet.
    pub fn domains(&self) -> usize {
        self.domains.iter().flatten().count()
    }

    /// Returns whether at most one domain has clients, so that a long yield delays no other domain.
    fn has_single_domain(&self) -> bool {
        self.domains.iter().flatten().filter(|domain| domain.clients.count() > 0).nth(1).is_none()
    }

    /// Returns the clients of this process's domain that the next turn would visit, and forgets that they
    /// have notified.
    #[cfg(all(test, not(loom)))]
    pub(super) fn clients_of_next_turn(&mut self) -> Vec<u16> {
        let domain = self.local_domain().expect("this process's domain");
        domain.clients.begin_turn(&domain.region)
    }

    /// Returns the domain and the socket of a connection.
    #[inline(always)]
    fn socket_of(&mut self, cx: &Context<'_>, conn: Conn) -> Option<(&mut Domain, u32)> {
        let (domain, socket) = split_token(cx.token(conn).ok()?);
        let domain = self.domains.get_mut(domain)?.as_deref_mut()?;
        let socket = domain.socket_of(socket, conn)?;
        if cx.has_priorities() {
            domain.begin_event(cx.event_class());
        }
        Some((domain, socket))
    }

    /// Begins to handle an event of this priority class that may concern any domain, if `[priority]` is in
    /// use.
    fn begin_event(&mut self, cx: &Context<'_>, class: u8) {
        if cx.has_priorities() {
            self.domains.iter_mut().flatten().for_each(|domain| domain.begin_event(class));
        }
    }

    /// Returns the domain of a listener, and the listener's number in the domain.
    fn listener_of(&mut self, listener: Listener) -> Option<(&mut Domain, usize)> {
        let place = (*self.listeners.get(listener.index() as usize)?)?;
        let domain = self.domains.get_mut(usize::from(place.domain))?.as_deref_mut()?;
        let number = usize::from(place.number);
        let is_alive = domain.listeners.get(number)?.as_ref().is_some_and(|l| l.listener == listener);
        (place.listener == listener && is_alive).then_some((domain, number))
    }

    /// Handles a request of a client in this process.
    pub(super) fn handle_request(
        &mut self,
        cx: &mut Context<'_>,
        number: usize,
        request: ChannelRequest,
    ) -> ChannelReply {
        self.handle_domain_request(cx, LOCAL_DOMAIN, number, request).unwrap_or(ChannelReply::Done)
    }

    fn handle_domain_request(
        &mut self,
        cx: &mut Context<'_>,
        index: usize,
        number: usize,
        request: ChannelRequest,
    ) -> Option<ChannelReply> {
        self.begin_event(cx, BEST_EFFORT);
        let owner = port_reservations::owner_id(index, number);
        match request {
            ChannelRequest::Reserve(at, sharing) => {
                return Some(ChannelReply::Reserve(self.reserve(cx, owner, at, sharing)));
            }
            ChannelRequest::Unreserve(reservation) => {
                self.ports.release(reservation, owner);
                return Some(ChannelReply::Done);
            }
            ChannelRequest::Detach => self.ports.release_all(owner),
            _ => {}
        }
        let domain = self.domains.get_mut(index)?.as_deref_mut()?;
        let reply = domain.handle_request(cx, number, request);
        if let ChannelReply::Listen(Ok(number)) = reply
            && let Some(listening) = &domain.listeners[number as usize]
        {
            let at = listening.listener.index() as usize;
            if self.listeners.len() <= at {
                self.listeners.resize(at + 1, None);
            }
            let listener = listening.listener;
            // Cannot truncate: there are at most 64 domains, and numbers of listeners have 16 bits.
            self.listeners[at] = Some(ListenerPlace { listener, domain: index as u8, number: number as u16 });
        }
        Some(reply)
    }

    /// Handles a request of the broker.
    pub(super) fn handle_broker_request(
        &mut self,
        cx: &mut Context<'_>,
        request: BrokerRequest,
    ) -> BrokerReply {
        self.begin_event(cx, BEST_EFFORT);
        let broker_reply = self.dispatch_broker_request(cx, request);
        self.reap_domains();
        broker_reply
    }

    fn dispatch_broker_request(&mut self, cx: &mut Context<'_>, request: BrokerRequest) -> BrokerReply {
        match request {
            BrokerRequest::OpenDomain { wake } => match self.domains.iter().position(Option::is_none) {
                Some(index) => self
                    .open_domain(index, wake, cx.has_priorities().then(|| cx.lower_share_percent()))
                    .unwrap_or_else(|e| BrokerReply::NoResources(errno::of_io(&e))),
                None => {
                    self.closed_stats.domains_refused += 1;
                    BrokerReply::Full(self.config.domains_max)
                }
            },
            BrokerRequest::Call { domain, client, request } => {
                let reply = self.handle_domain_request(cx, domain.into(), client as usize, request);
                reply.map_or(BrokerReply::Unknown, BrokerReply::Reply)
            }
            BrokerRequest::Admit { domain, wake } => {
                self.with_process_domain(domain, |d| d.admit(ClientWaker::Process(wake)).into())
            }
            BrokerRequest::Fork { domain, parent, kept, wake } => self.with_process_domain(domain, |d| {
                d.fork(cx, parent as usize, kept.as_deref(), ClientWaker::Process(wake)).into()
            }),
            BrokerRequest::AddProxy { domain, client, sockets } => self
                .with_process_domain(domain, |d| done_or_unknown(d.add_proxy(cx, client as usize, &sockets))),
            BrokerRequest::ResolveProxy { domain, client, sockets } => self
                .with_process_domain(domain, |d| {
                    done_or_unknown(d.own_via_proxy(cx, client as usize, &sockets))
                }),
            BrokerRequest::Own { domain, client, sockets } => self
                .with_process_domain(domain, |d| done_or_unknown(d.own_restored(client as usize, &sockets))),
            BrokerRequest::ReleaseProxy { domain, sockets } => self.with_process_domain(domain, |d| {
                d.release_proxy(cx, &sockets);
                BrokerReply::Done
            }),
            BrokerRequest::Reap { domain, client } => {
                self.ports.release_all(port_reservations::owner_id(domain.into(), client as usize));
                self.with_process_domain(domain, |d| {
                    d.detach(cx, client as usize);
                    BrokerReply::Done
                })
            }
        }
    }

    fn with_process_domain(
        &mut self,
        index: u8,
        act: impl FnOnce(&mut Domain) -> BrokerReply,
    ) -> BrokerReply {
        match self.domains.get_mut(usize::from(index)).and_then(Option::as_deref_mut) {
            Some(domain) if domain.is_for_processes => act(domain),
            _ => BrokerReply::Unknown,
        }
    }

    /// Creates a domain for processes, with a free index.
    ///
    /// # Errors
    /// The kernel is short of memory or descriptors.
    fn open_domain(
        &mut self,
        index: usize,
        client: OwnedFd,
        lower_share_percent: Option<u32>,
    ) -> io::Result<BrokerReply> {
        // Cannot truncate: at most 64.
        let mut domain = Domain::new(index as u8, &self.config, true)?;
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned();
        let (region, wake) = (copy(domain.region.file())?, copy(domain.wake.as_fd())?);
        self.add_to_epoll(&domain)?;
        domain.region.set_cpu(rustix::thread::sched_getcpu());
        if let Some(share) = lower_share_percent {
            domain.region.set_lower_share_percent(share);
        }
        if self.is_ready {
            domain.region.set_ready();
        }
        let client = match domain.admit(ClientWaker::Process(client)) {
            Ok(client) => client,
            // The first client of a domain fits into it.
            Err(NotAdmitted::Full(_)) => return Err(io::ErrorKind::OutOfMemory.into()),
            Err(NotAdmitted::NoResources(errno)) => return Err(errno.into()),
        };
        self.domains[index] = Some(Box::new(domain));
        Ok(BrokerReply::Opened { domain: index as u8, region, wake, client })
    }

    /// Removes domains that no process will use again.
    fn reap_domains(&mut self) {
        for entry in &mut self.domains {
            if let Some(domain) = entry.take_if(|domain| domain.is_unused()) {
                self.closed_stats = self.closed_stats + domain.stats();
                if let Some(epoll) = &self.domain_epoll {
                    epoll.remove(&domain.wake);
                }
            }
        }
    }
}

fn done_or_unknown(is_known: bool) -> BrokerReply {
    if is_known { BrokerReply::Done } else { BrokerReply::Unknown }
}

/// Returns the index of the occupied slot that follows `at` in a circle; `at` if there is no other.
fn next_occupied<T>(slots: &[Option<T>], at: usize) -> usize {
    let mut others = (1..slots.len()).map(|distance| (at + distance) % slots.len());
    others.find(|index| slots[*index].is_some()).unwrap_or(at)
}

impl Handler for ChannelServer {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.defer_quick_acks(Duration::from_micros(self.config.ack_hold_us.into()));
        self.is_ready = true;
        for domain in self.domains.iter_mut().flatten() {
            if cx.has_priorities() {
                domain.region.set_lower_share_percent(cx.lower_share_percent());
            }
            domain.region.set_ready();
            domain.clients.notify_all();
        }
        Ok(())
    }

    fn may_accept(&mut self, listener: Listener) -> bool {
        self.listener_of(listener).is_some_and(|(domain, number)| domain.may_accept(number))
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, listener: Listener) {
        match self.listener_of(listener) {
            Some((domain, number)) => {
                if cx.has_priorities() {
                    domain.begin_event(cx.event_class());
                }
                domain.accepted(cx, conn, number);
            }
            None => {
                let _ = cx.abort(conn);
            }
        }
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Some((domain, socket)) = self.socket_of(cx, conn) {
            domain.connected(cx, conn, socket);
        }
    }

    fn takes_any_bytes(&self) -> bool {
        true
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        match self.socket_of(cx, conn) {
            Some((domain, socket)) => domain.data(cx, conn, socket, data),
            None => data.len(),
        }
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Some((domain, socket)) = self.socket_of(cx, conn) {
            domain.writable(cx, socket);
        }
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Some((domain, socket)) = self.socket_of(cx, conn) {
            domain.add_state(socket, state::FIN);
        }
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        if let Some((domain, socket)) = self.socket_of(cx, conn) {
            domain.closed(cx, socket, reason);
            if domain.is_unused() {
                self.reap_domains();
            }
        }
    }

    fn set_stages(
        &mut self,
        cx: &mut Context<'_>,
        conn: Conn,
        stages: Option<(Arc<StageSampler>, u32)>,
    ) -> bool {
        match self.socket_of(cx, conn) {
            Some((domain, socket)) => {
                domain.set_stages(socket, stages);
                true
            }
            None => false,
        }
    }

    fn listener_destroyed(&mut self, cx: &mut Context<'_>, listener: Listener) {
        let place = self.listeners.get(listener.index() as usize).copied().flatten();
        let Some(ListenerPlace { domain, number, .. }) = place.filter(|place| place.listener == listener)
        else {
            return;
        };
        if let Some(domain) = self.domains.get_mut(usize::from(domain)).and_then(Option::as_deref_mut) {
            domain.destroy_listener(cx, number.into());
        }
    }

    fn timer(&mut self, cx: &mut Context<'_>, token: u64) {
        self.begin_event(cx, BEST_EFFORT);
        // The lower half of a token is the domain's index.
        if let Some(Some(domain)) = self.domains.get_mut(token as u32 as usize) {
            match token {
                token if Domain::is_departure_timer(token) => domain.on_departure_timer(cx),
                token if Domain::is_stamp_timer(token) => domain.on_stamp_timer(cx),
                _ => domain.revoke_expired_offers(cx),
            }
        }
    }

    fn report_counters(&self, report: &mut dyn FnMut(CounterKind, &'static str, u64)) {
        self.stats().report(report);
        let domains = || self.domains.iter().flatten();
        for (name, count) in [
            ("channel.domains", self.domains()),
            ("channel.domains_limit", self.domains.len()),
            ("channel.sockets", self.sockets_in_use()),
            ("channel.sockets_limit", domains().map(|domain| domain.sockets_max()).sum()),
            ("channel.large_buffers", domains().map(|domain| domain.large_buffers_in_use()).sum()),
            ("channel.large_buffers_limit", domains().map(|domain| domain.region.large().0 as usize).sum()),
            ("channel.clients", domains().map(|domain| domain.clients.count()).sum()),
            ("channel.clients_limit", domains().map(|domain| domain.clients.max()).sum()),
        ] {
            report(CounterKind::Gauge, name, count as u64);
        }
    }

    fn command(&mut self, cx: &mut Context<'_>, command: Command) {
        let command: Box<dyn Any + Send> = command;
        match command.downcast::<RequestEnvelope>() {
            Ok(envelope) => {
                let RequestEnvelope { client, request, reply } = *envelope;
                let response = self.handle_request(cx, client, request);
                // The caller may be gone.
                let _ = reply.send(response);
            }
            Err(other) => {
                let other = match other.downcast::<BrokerEnvelope>() {
                    Ok(envelope) => {
                        let BrokerEnvelope { request, reply } = *envelope;
                        let broker_reply = self.handle_broker_request(cx, request);
                        let _ = reply.send(broker_reply);
                        return;
                    }
                    Err(other) => other,
                };
                if let Ok(request) = other.downcast::<SaveRequest>() {
                    cx.save_after_turn(*request);
                }
            }
        }
    }

    fn save(&mut self, cx: &mut Context<'_>, descriptors: &mut DescriptorTable) -> Result<Vec<u8>, String> {
        self.save_state(cx, descriptors)
    }

    fn restore(&mut self, state: &[u8], descriptors: &mut DescriptorTable) -> Result<(), String> {
        self.restore_state(state, descriptors)
    }

    fn restore_filter(&mut self, saved: &[u8]) -> Option<Arc<dyn SocketFilter>> {
        if let Some(shared) = self.restored_filters.get(saved) {
            return Some(shared.clone());
        }
        let budget = |domain: u8| Some(&self.domains.get(usize::from(domain))?.as_ref()?.filter_budget);
        let filter = socket_filter::restore(saved, budget)?;
        self.restored_filters.insert(saved.to_vec(), filter.clone());
        Some(filter)
    }

    fn restored(&mut self, cx: &mut Context<'_>) -> Result<(), String> {
        self.tie_to_engine(cx)
    }

    fn acked(&mut self, cx: &mut Context<'_>, conn: Conn, bytes: u32) {
        if let Some((domain, socket)) = self.socket_of(cx, conn)
            && !domain.on_stamped_ack(cx, socket)
        {
            domain.acked(socket, bytes);
        }
    }

    fn pulls_unordered(&self) -> bool {
        true
    }

    fn unordered_readable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        // The gap may have been filled since the event was queued.
        if cx.has_unordered(conn)
            && let Some((domain, socket)) = self.socket_of(cx, conn)
        {
            domain.unordered_readable(socket);
        }
    }

    fn urgent(&mut self, cx: &mut Context<'_>, conn: Conn, urgent: UrgentData) {
        if let Some((domain, socket)) = self.socket_of(cx, conn) {
            domain.urgent(cx, conn, socket, urgent);
        }
    }

    fn datagram(&mut self, cx: &mut Context<'_>, socket: UdpHandle, datagram: &Datagram, data: &[u8]) {
        self.begin_event(cx, cx.event_class());
        let mut domains = self.domains.iter_mut().flatten();
        // Only the domains know to which of them the socket belongs.
        let _ = domains.any(|domain| domain.deliver_datagram(cx, socket, Ok((*datagram, data))));
    }

    fn datagram_error(&mut self, cx: &mut Context<'_>, socket: UdpHandle, error: UdpError) {
        self.begin_event(cx, cx.event_class());
        let _ =
            self.domains.iter_mut().flatten().any(|domain| domain.deliver_datagram(cx, socket, Err(error)));
    }

    fn work(&mut self, cx: &mut WorkContext<'_>) -> Result<usize, Error> {
        let cx = &mut cx.context();
        self.begin_event(cx, BEST_EFFORT);
        let (mut done, mut any_unused, mut any_refused) = (0, false, false);
        let (later, first) = self.domains.split_at_mut(self.first_domain);
        for domain in first.iter_mut().chain(later).flatten() {
            let work = domain.work(cx);
            done += work;
            any_refused |= domain.has_refused();
            // The last bytes of a process that is gone may have been sent.
            any_unused |= work > 0 && domain.clients.count() == 0 && domain.is_unused();
        }
        if any_refused {
            // The room of a device is for the sockets of all domains.
            self.first_domain = next_occupied(&self.domains, self.first_domain);
        }
        if any_unused {
            self.reap_domains();
        }
        Ok(done)
    }

    fn has_unfinished(&self) -> bool {
        self.domains.iter().flatten().any(|domain| domain.has_unfinished())
    }

    fn before_sleep(&mut self) -> bool {
        let mut may_sleep = true;
        for domain in self.domains.iter_mut().flatten() {
            // All domains have to prepare, even if one was notified.
            may_sleep &= domain.before_sleep();
        }
        may_sleep
    }

    fn is_cpu_contended(&self) -> bool {
        self.config.turn_us > 0 && {
            let (cpu, is_single) = (rustix::thread::sched_getcpu(), self.has_single_domain());
            self.domains.iter().flatten().any(|domain| domain.has_client_running_on(cpu, is_single))
        }
    }

    fn yield_limit(&self) -> Option<Duration> {
        // With several domains, a long yield to one of them would delay the others.
        (self.has_single_domain() && self.is_cpu_contended())
            .then(|| Duration::from_micros(self.config.turn_us.into()))
    }

    fn yield_cpu(&mut self) -> Option<Duration> {
        if self.config.turn_us == 0 {
            return None;
        }
        let (cpu, is_single) = (rustix::thread::sched_getcpu(), self.has_single_domain());
        let mut has_yielded = false;
        for domain in self.domains.iter_mut().flatten() {
            match domain.yield_cpu(cpu, is_single) {
                Some(yielded) => has_yielded |= yielded,
                None => return Some(Duration::ZERO),
            }
        }
        // Penalised domains are skipped for one sleep of the shard. On the early return above the shard does
        // not sleep, so they stay penalised.
        self.domains.iter_mut().flatten().for_each(|domain| domain.is_penalised = false);
        has_yielded.then(|| Duration::from_micros(self.config.turn_us.into()))
    }

    fn yield_expired(&mut self) {
        self.has_yield_expired = true;
    }

    fn after_sleep(&mut self, is_readable: bool) {
        let has_expired = core::mem::take(&mut self.has_yield_expired);
        for domain in self.domains.iter_mut().flatten() {
            let woken = domain.after_sleep(has_expired);
            // Clears the eventfd even if its doorbell was handled before the sleep: without an epoll
            // descriptor the shard sleeps on this eventfd, which would end every sleep while it is readable.
            if (woken || is_readable && self.domain_epoll.is_none()) && !domain.is_for_processes {
                domain.wake.clear();
            }
        }
        if is_readable && let Some(epoll) = &self.domain_epoll {
            // Done whatever the doorbell words say, as a process may have changed them.
            epoll.clear();
        }
    }

    fn wake_fd(&self) -> Option<RawFd> {
        match (&self.domain_epoll, &self.domains[LOCAL_DOMAIN]) {
            (Some(epoll), _) => Some(epoll.fd()),
            (None, local) => local.as_ref().map(|local| local.wake.as_fd().as_raw_fd()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::next_occupied;

    #[test]
    fn occupied_slots_take_turns() {
        let slots = [Some(()), Some(()), None, None, Some(()), None];
        let turns = core::iter::successors(Some(0), |at| Some(next_occupied(&slots, *at)));
        assert_eq!(turns.take(7).collect::<Vec<_>>(), [0, 1, 4, 0, 1, 4, 0]);
        assert_eq!([next_occupied(&[None, Some(())], 1), next_occupied(&[None::<()>], 0)], [1, 0]);
    }
}
