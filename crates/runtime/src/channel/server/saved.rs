//! The state of a [`ChannelServer`] that another process takes over ([`crate::handler::Handler::save`]).
//! Clients do not notice: the memory that they share with the stack stays as it is, and so do all numbers,
//! generations and positions.
//!
//! Fields are saved, follow from what is saved, or are made anew:
//!
//! * `ChannelServer`: reservations, `is_ready` and counters of past domains are saved. The table of listeners
//!   by the engine's index and the epoll descriptor follow from the domains. `config`, `first_domain` and
//!   `has_yield_expired` are made anew.
//! * `Domain`: index, region (its file and the parameters of its layout), eventfd, clients, sockets,
//!   listeners, UDP sockets with their queues, stamps, the lists of unfinished sockets (as one list) and of
//!   stalled listeners, and counters are saved. The allocators of numbers, the pool of large buffers, the
//!   bytes of datagrams, the number of preallocated sockets and the listeners to be distributed follow from
//!   these. The limits of the configuration hold for what comes later, but the number of sockets stays that
//!   of the region. Budgets of a turn, penalties, the class of the event and the buffer for a datagram are
//!   made anew. Filters are saved by the engine; their memory is charged again. Timers are set again.
//! * `DomainSocket`: all is saved, except for zero-copy loans, which end before, by a copy of the lent bytes,
//!   and the sampling of latency stages, which ends.
//! * `DomainListener`: all is saved, except for the queue of clients with credit, which follows from their
//!   memory.
//! * `ClientState`: its memory's file, its end of the socket that wakes it, an unfinished scan of a ring,
//!   counters of the rings, suspension, revoked listeners, locks at release and offers are saved. What it
//!   owns, its preallocated sockets and its membership in lists follow from sockets, listeners and offers,
//!   and its positions in the rings from its memory. All clients count as having notified, so that a doorbell
//!   that was rung while nobody ran is heard, and scan all their sockets once. Whether a client is idle or
//!   had the CPU is made anew.

use super::ChannelServer;
use super::client_state::{ClientState, PendingOffer};
use super::client_table::ClientTable;
use super::departures::HeldDatagram;
use super::domain::{ClientSlot, Domain, DomainListener, DomainSocket, UdpBacklog};
use super::large_buffers::direction_index;
use super::slot_allocator::SlotAllocator;
use super::tx_stamps::StreamStamps;
use super::waker::{ClientWaker, DomainEpoll};
use super::{ListenerPlace, port_reservations};
use crate::channel::client_memory::{ClientMemory, OFFERS_MAX, PREALLOCATED_MAX};
use crate::channel::datagram::DATAGRAM_BYTES_MAX;
use crate::channel::doorbells::{Notifier, NotifyQueue};
use crate::channel::region::{Direction, Region, RegionParameters};
use crate::channel::{ChannelConfig, ChannelStats, DOMAINS_MAX};
use crate::context::Context;
use crate::internal_fd::InternalFd;
use crate::saved_shard::state_config::OTHER_PRIORITIES;
use crate::saved_shard::{DescriptorTable, decode, encode_to};
use crate::wait::EventFd;
use core::time::Duration;
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::time::Instant;
use rustix::fd::AsFd;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io;
use std::sync::Arc;

/// The server as it is saved. Its domains follow, each encoded by itself.
#[derive(Serialize, Deserialize)]
struct SavedServer {
    is_ready: bool,
    /// True if events have classes of priority.
    has_priorities: bool,
    ports: port_reservations::PortReservations,
    closed_stats: ChannelStats,
    domains: Vec<Vec<u8>>,
}

/// A domain as it is read. The fields are those of [`DomainRef`].
#[derive(Deserialize)]
struct SavedDomain {
    index: u8,
    region: u32,
    parameters: RegionParameters,
    wake: u32,
    sockets_max: u32,
    clients: Vec<SavedClient>,
    rings_full_before: u64,
    listeners: Vec<Option<DomainListener>>,
    sockets: Vec<DomainSocket>,
    unfinished: Vec<u32>,
    stalled_listeners: Vec<u16>,
    udp: Vec<(UdpHandle, u32, UdpBacklog)>,
    stamped: Vec<(u32, StreamStamps)>,
    departures: Vec<(Instant, HeldDatagram)>,
    stats: ChannelStats,
}

/// A domain as it is written. Numbers of descriptors are indices of the table of the saved state.
#[derive(Serialize)]
struct DomainRef<'a> {
    index: u8,
    region: u32,
    parameters: RegionParameters,
    wake: u32,
    sockets_max: u32,
    clients: Vec<SavedClient>,
    rings_full_before: u64,
    listeners: &'a [Option<DomainListener>],
    sockets: Vec<Cow<'a, DomainSocket>>,
    unfinished: Vec<u32>,
    stalled_listeners: Vec<u16>,
    udp: Vec<(UdpHandle, u32, &'a UdpBacklog)>,
    stamped: Vec<(u32, &'a StreamStamps)>,
    departures: Vec<(Instant, &'a HeldDatagram)>,
    stats: &'a ChannelStats,
}

#[derive(Serialize, Deserialize)]
struct SavedClient {
    number: u16,
    memory: u32,
    wake: u32,
    from_client: NotifyQueue,
    to_client: Notifier,
    is_suspended: bool,
    revoked_listeners: Vec<u16>,
    locked_at_release: Vec<u32>,
    /// Slots and what is in them.
    offers: Vec<(u8, PendingOffer)>,
}

fn invalid(domain: u8, what: &str) -> String {
    format!("saved state: domain {domain}: {what}")
}

impl ClientState {
    fn save(&self, number: usize, descriptors: &mut DescriptorTable) -> Result<SavedClient, String> {
        // Each field is listed, so that none is forgotten.
        let Self {
            memory: _,
            memory_file,
            from_client,
            to_client,
            wake,
            is_suspended,
            revoked_listeners,
            is_idle: _,
            notified_at_yield: _,
            is_active: _,
            is_unfinished: _,
            is_offering: _,
            owned_sockets: _,
            owned_listeners: _,
            listener_bits: _,
            locked_at_release,
            preallocated: _,
            offers: _,
            free_slots: _,
            outstanding_total: _,
            outstanding: _,
        } = self;
        let (Some(file), ClientWaker::Process(wake)) = (memory_file, wake) else {
            return Err("threads of its own process are clients".into());
        };
        let offers = self.offer_slots().filter_map(|slot| Some((slot as u8, self.offer(slot)?)));
        Ok(SavedClient {
            // Cannot truncate: client numbers have 16 bits, and there are 64 slots.
            number: number as u16,
            memory: descriptors.add(file.as_fd())?,
            wake: descriptors.add(wake.as_fd())?,
            from_client: from_client.clone(),
            to_client: to_client.clone(),
            is_suspended: *is_suspended,
            revoked_listeners: revoked_listeners.clone(),
            locked_at_release: locked_at_release.clone(),
            offers: offers.collect(),
        })
    }

    fn restore(
        saved: SavedClient,
        region: &Region,
        descriptors: &mut DescriptorTable,
    ) -> Result<Self, String> {
        let file = descriptors.take(saved.memory)?;
        let memory = ClientMemory::open(&file, region.sockets(), region.listeners())
            .map_err(|error| format!("memory of a client: {error}"))?;
        let wake = ClientWaker::Process(descriptors.take(saved.wake)?);
        let mut client = Self::new(memory, wake);
        client.memory_file = Some(file);
        (client.from_client, client.to_client) = (saved.from_client, saved.to_client);
        // The positions are those of the rings, in case that shards ran after the state was saved. The client
        // looks at all its sockets once.
        client.from_client.resume(client.memory.to_stack());
        client.to_client.resume(client.memory.to_client());
        client.is_suspended = saved.is_suspended;
        client.revoked_listeners = saved.revoked_listeners;
        client.locked_at_release = saved.locked_at_release;
        let sockets = region.sockets();
        client.locked_at_release.retain(|socket| (*socket as usize) < sockets);
        let all_fit =
            saved.offers.into_iter().all(|(slot, offer)| client.restore_offer(usize::from(slot), offer));
        if all_fit {
            Ok(client)
        } else {
            Err("saved state: two offers of a client have the same slot".into())
        }
    }
}

impl DomainSocket {
    /// Returns the socket without a sampling of its latency stages.
    fn without_stages(&self) -> Cow<'_, Self> {
        if self.arrival_times.as_ref().is_none_or(|times| times.stages.is_none()) {
            return Cow::Borrowed(self);
        }
        let mut socket = self.clone();
        socket.end_stages();
        Cow::Owned(socket)
    }
}

impl Domain {
    /// Ends the zero-copy loans: the engine gets copies of the bytes.
    ///
    /// # Errors
    /// The engine's send buffers have no room.
    fn end_all_loans(&mut self, cx: &mut Context<'_>) -> Result<(), String> {
        for socket in 0..self.sockets.len() as u32 {
            let entry = &self.sockets[socket as usize];
            if entry.loan.is_none() {
                continue;
            }
            if let Some(conn) = entry.conn {
                let (queued, taken) = (cx.queued(conn), entry.taken);
                if cx.privatize(conn, queued) < queued {
                    return Err(
                        "bytes that are sent from shared memory find no room (tcp.buffer_pool_bytes)".into(),
                    );
                }
                self.region.stream(socket, Direction::Outgoing).advance_read(taken);
                self.end_loan(cx, socket);
                self.notify_send_space(socket);
            } else {
                self.end_loan(cx, socket);
            }
        }
        Ok(())
    }

    fn save(&self, descriptors: &mut DescriptorTable) -> Result<Vec<u8>, String> {
        // Each field is listed, so that none is forgotten.
        let Self {
            index,
            region,
            wake,
            is_for_processes,
            clients: client_table,
            distributable: _,
            sockets,
            socket_slots: _,
            large_buffer_pool: _,
            unfinished,
            chunked,
            refused,
            refused_after_progress,
            turn_budget: _,
            short_of_send_space: _,
            send_space_wait_turns: _,
            preallocated_count: _,
            sockets_max,
            listeners,
            listener_slots: _,
            offer_timeout: _,
            killed_listener_wait: _,
            backlog_max: _,
            udp,
            datagram_bytes: _,
            datagram_bytes_max: _,
            filter_budget: _,
            stamped,
            stamps_due: _,
            departures,
            is_offer_timer_set: _,
            stalled_listeners,
            shares_listeners: _,
            is_penalised: _,
            datagram_buffer: _,
            event_class: _,
            stats,
        } = self;
        if !is_for_processes {
            return Err("threads of its own process are clients".into());
        }
        let clients = client_table.iter().map(|(number, client)| client.save(number, descriptors));
        let clients = clients.collect::<Result<_, _>>()?;
        let refused = refused.iter().chain(refused_after_progress);
        let unfinished = unfinished.iter().chain(chunked).chain(refused);
        let domain = DomainRef {
            index: *index,
            region: descriptors.add(region.file())?,
            parameters: region.parameters(),
            wake: descriptors.add(wake.as_fd())?,
            // Cannot truncate: `channel.sockets_max` is a `u32`.
            sockets_max: *sockets_max as u32,
            clients,
            rings_full_before: client_table.rings_full_before(),
            listeners,
            sockets: sockets.iter().map(DomainSocket::without_stages).collect(),
            unfinished: unfinished.copied().collect(),
            stalled_listeners: stalled_listeners.iter().copied().collect(),
            udp: udp.iter().map(|(udp, (socket, backlog))| (*udp, *socket, backlog)).collect(),
            stamped: stamped.iter().map(|(socket, stamps)| (*socket, stamps)).collect(),
            departures: departures.saved().collect(),
            stats,
        };
        encode_to(Vec::new(), &domain)
    }

    fn restore(
        saved: SavedDomain,
        config: &ChannelConfig,
        descriptors: &mut DescriptorTable,
    ) -> Result<Self, String> {
        let index = saved.index;
        let region = Region::reopen(descriptors.take(saved.region)?, saved.parameters)
            .map_err(|error| format!("region of the channel: {error}"))?;
        let wake = EventFd::from_internal(InternalFd::in_place(descriptors.take(saved.wake)?));
        let clients = saved.clients.into_iter().map(|client| {
            Ok((usize::from(client.number), ClientState::restore(client, &region, descriptors)?))
        });
        let clients = clients.collect::<Result<Vec<_>, String>>()?;
        let mut domain = Self::with_region(index, config, true, (region, wake));
        let sockets_max = saved.sockets_max as usize;
        if sockets_max > domain.region.sockets() || saved.sockets.len() > sockets_max {
            return Err(invalid(index, "it has more sockets than its region"));
        }
        if saved.listeners.len() > domain.region.listeners() {
            return Err(invalid(index, "it has more listeners than its region"));
        }
        domain.sockets_max = sockets_max;
        domain.stats = saved.stats;
        domain.clients = ClientTable::restore(domain.region.clients(), clients, saved.rings_full_before)
            .ok_or_else(|| invalid(index, "two clients have the same number"))?;
        // Keeps its capacity: the vector never moves.
        domain.sockets.extend(saved.sockets);
        domain.listeners = saved.listeners;
        domain.restore_slots(config);
        domain.restore_owners()?;
        domain.restore_offers()?;
        domain.restore_large_buffers()?;
        domain.restore_lists(saved.unfinished, saved.stalled_listeners)?;
        domain.restore_datagrams(saved.udp)?;
        domain.restore_departures(saved.departures).map_err(|reason| invalid(index, reason))?;
        let stamped = saved.stamped.into_iter();
        domain.stamped = stamped.filter(|(socket, _)| (*socket as usize) < domain.sockets.len()).collect();
        Ok(domain)
    }

    /// Restores the allocators of numbers.
    fn restore_slots(&mut self, config: &ChannelConfig) {
        let sockets = self.sockets.iter().map(|entry| entry.is_in_use);
        self.socket_slots = SlotAllocator::with_allocated(self.sockets_max, sockets);
        let listeners = self.listeners.iter().map(Option::is_some);
        self.listener_slots = SlotAllocator::with_allocated(self.region.listeners(), listeners);
        for listening in self.listeners.iter_mut().flatten() {
            listening.backlog = listening.backlog.clamp(1, config.backlog_max as usize);
        }
    }

    /// Restores the lists of what each client owns.
    fn restore_owners(&mut self) -> Result<(), String> {
        let Self { clients, sockets, listeners, index, .. } = self;
        let unknown = || invalid(*index, "an owner is no client");
        for (entry, socket) in sockets.iter_mut().zip(0..) {
            for client in core::mem::take(&mut entry.owners).clients() {
                let state = clients.get_mut(client).ok_or_else(unknown)?;
                entry.owners.insert(client, &mut state.owned_sockets, socket);
            }
        }
        for (listening, number) in listeners.iter_mut().zip(0..) {
            let Some(listening) = listening else { continue };
            for client in core::mem::take(&mut listening.owners).clients() {
                let state = clients.get_mut(client).ok_or_else(unknown)?;
                listening.owners.insert(client, &mut state.owned_listeners, number);
                state.set_owns_listener(number as usize, true);
            }
        }
        Ok(())
    }

    /// Restores preallocated sockets, and checks that sockets and what refers to them agree.
    fn restore_offers(&mut self) -> Result<(), String> {
        let Self { clients, sockets, listeners, index, preallocated_count, .. } = self;
        let wrong = |what| Err(invalid(*index, what));
        for (entry, socket) in sockets.iter().zip(0..) {
            if let Some(ClientSlot { client, slot }) = entry.preallocated {
                let place = clients.get_mut(client.into()).and_then(|state| {
                    state.preallocated.get_mut(usize::from(slot)).filter(|place| place.is_none())
                });
                let Some(place) = place else { return wrong("a preallocated socket has no client") };
                *place = Some(socket);
                *preallocated_count += 1;
            }
            if let Some(ClientSlot { client, slot }) = entry.offer {
                let offer = clients.get(client.into()).filter(|_| usize::from(slot) < OFFERS_MAX);
                let offer = offer.and_then(|state| state.offer(slot.into()));
                if offer.is_none_or(|offer| offer.socket != socket) {
                    return wrong("an offer does not have its socket");
                }
            }
        }
        for (client, state) in clients.iter() {
            for slot in state.offer_slots() {
                let Some(PendingOffer { listener, socket, .. }) = state.offer(slot) else { continue };
                // Cannot truncate: client numbers have 16 bits, and there are 64 slots.
                let place = Some(ClientSlot { client: client as u16, slot: slot as u8 });
                let has_listener = matches!(listeners.get(usize::from(listener)), Some(Some(_)));
                if !has_listener || sockets.get(socket as usize).is_none_or(|entry| entry.offer != place) {
                    return wrong("a socket does not have its offer");
                }
            }
        }
        let mut pending_count = 0;
        for (listening, number) in listeners.iter().zip(0u16..) {
            let mut is_wrong = false;
            for entry in listening.iter().flat_map(|listening| listening.pending.iter()) {
                let entry = sockets.get(*entry as usize);
                is_wrong |= entry.is_none_or(|entry| !entry.is_pending || entry.listener != number);
                pending_count += 1;
            }
            if is_wrong {
                return wrong("a pending connection does not have its listener");
            }
        }
        if sockets.iter().filter(|entry| entry.is_pending).count() != pending_count {
            return wrong("a pending connection has no listener");
        }
        debug_assert!(*preallocated_count <= clients.count() * PREALLOCATED_MAX);
        Ok(())
    }

    /// Restores the pool of large buffers.
    fn restore_large_buffers(&mut self) -> Result<(), String> {
        let mut is_free = vec![true; self.region.large().0 as usize];
        for direction in [Direction::Incoming, Direction::Outgoing].map(direction_index) {
            for number in self.sockets.iter().filter_map(|entry| entry.large_buffers[direction]) {
                let was_free = is_free.get_mut(number as usize).map(|free| core::mem::replace(free, false));
                if was_free != Some(true) {
                    return Err(invalid(self.index, "two sockets have the same large buffer"));
                }
            }
        }
        self.large_buffer_pool =
            (0..).zip(is_free).filter_map(|(number, free)| free.then_some(number)).collect();
        self.large_buffer_pool.reverse();
        Ok(())
    }

    /// Restores the lists of unfinished sockets and stalled listeners.
    fn restore_lists(&mut self, unfinished: Vec<u32>, stalled: Vec<u16>) -> Result<(), String> {
        for socket in unfinished {
            let Some(entry) = self.sockets.get_mut(socket as usize) else {
                return Err(invalid(self.index, "an unfinished socket does not exist"));
            };
            // A number that was used again while it was listed may have been listed once more.
            if !core::mem::replace(&mut entry.is_unfinished, true) {
                self.unfinished.push_back(socket);
            }
        }
        for number in stalled {
            match self.listeners.get_mut(usize::from(number)) {
                Some(Some(listening)) if !listening.is_stalled => listening.is_stalled = true,
                _ => return Err(invalid(self.index, "a stalled listener does not exist")),
            }
            self.stalled_listeners.push_back(number);
        }
        for number in 0..self.listeners.len() {
            self.set_distributable(number);
        }
        Ok(())
    }

    /// Restores the queues of UDP sockets.
    fn restore_datagrams(&mut self, udp: Vec<(UdpHandle, u32, UdpBacklog)>) -> Result<(), String> {
        for (handle, socket, backlog) in udp {
            if self.sockets.get(socket as usize).is_none_or(|entry| entry.udp != Some(handle)) {
                return Err(invalid(self.index, "a UDP socket does not exist"));
            }
            self.datagram_bytes += backlog.iter().flatten().map(|(_, data)| data.len()).sum::<usize>();
            self.udp.insert(handle, (socket, backlog));
        }
        let queues = || self.sockets.iter().filter_map(|entry| entry.datagram_queue.as_ref());
        let waiting = queues().flat_map(|queue| queue.pending.iter().chain(&queue.oversize));
        self.datagram_bytes += waiting.map(|(_, data)| data.len()).sum::<usize>();
        if queues().next().is_some() {
            self.datagram_buffer = vec![0; DATAGRAM_BYTES_MAX].into();
        }
        Ok(())
    }

    /// Ties the domain to the engine, which has been restored, too.
    fn restored(&mut self, cx: &mut Context<'_>) -> Result<(), String> {
        for (entry, socket) in self.sockets.iter().zip(0..) {
            let has_conn = entry.conn.is_none_or(|conn| cx.token(conn) == Ok(self.token_of(socket)));
            if !has_conn || entry.udp.is_some_and(|udp| cx.udp_local(udp).is_err()) {
                return Err(invalid(self.index, "the engine does not have a socket"));
            }
        }
        self.region.set_cpu(rustix::thread::sched_getcpu());
        let clients: Vec<usize> = self.clients.iter().map(|(number, _)| number).collect();
        let has_offers = self.clients.iter().any(|(_, client)| client.outstanding() > 0);
        clients.into_iter().for_each(|number| self.enqueue_all_credits(number));
        if has_offers {
            self.is_offer_timer_set = cx.set_timer(self.offer_timeout, self.token()).is_some();
        }
        self.restore_stamps(cx);
        self.arm_departures(cx);
        Ok(())
    }
}

impl ChannelServer {
    /// See [`Handler::save`](crate::Handler::save).
    pub(super) fn save_state(
        &mut self,
        cx: &mut Context<'_>,
        descriptors: &mut DescriptorTable,
    ) -> Result<Vec<u8>, String> {
        for domain in self.domains.iter_mut().flatten() {
            domain.end_all_loans(cx)?;
        }
        // Each field is listed, so that none is forgotten.
        let Self {
            config: _,
            domains,
            first_domain: _,
            listeners: _,
            domain_epoll: _,
            ports,
            is_ready,
            has_yield_expired: _,
            closed_stats,
            has_saved_priorities: _,
            restored_filters: _,
        } = self;
        let domains = domains.iter().flatten().map(|domain| domain.save(descriptors));
        let server = SavedServer {
            is_ready: *is_ready,
            has_priorities: cx.has_priorities(),
            ports: ports.clone(),
            closed_stats: *closed_stats,
            domains: domains.collect::<Result<_, _>>()?,
        };
        encode_to(Vec::new(), &server)
    }

    /// See [`Handler::restore`](crate::Handler::restore).
    pub(super) fn restore_state(
        &mut self,
        state: &[u8],
        descriptors: &mut DescriptorTable,
    ) -> Result<(), String> {
        let saved: SavedServer = decode(state)?;
        if self.domains() > 0 {
            return Err("the channel has clients already".into());
        }
        self.has_saved_priorities = saved.has_priorities;
        (self.is_ready, self.ports, self.closed_stats) = (saved.is_ready, saved.ports, saved.closed_stats);
        for domain in saved.domains {
            let domain = Domain::restore(decode(&domain)?, &self.config, descriptors)?;
            self.add_restored(domain)?;
        }
        Ok(())
    }

    fn add_restored(&mut self, domain: Domain) -> Result<(), String> {
        let (index, number) = (usize::from(domain.index), domain.index);
        // The configuration may allow fewer domains now; those that there are stay.
        if index >= self.domains.len() && index < DOMAINS_MAX {
            self.domains.resize_with(index + 1, || None);
        }
        let is_free = self.domains.get(index).is_some_and(Option::is_none);
        if !is_free {
            return Err(invalid(number, "its index is in use"));
        }
        self.add_to_epoll(&domain).map_err(|error| format!("wake-ups of the channel: {error}"))?;
        self.domains[index] = Some(Box::new(domain));
        Ok(())
    }

    /// Restores the table of listeners. A listener that the engine has closed is served nowhere: another
    /// shard or an administrator has closed it, and the request to this domain has not arrived yet.
    fn restore_places(&mut self, cx: &Context<'_>) -> Result<(), String> {
        let mut places = Vec::new();
        for domain in self.domains.iter().flatten() {
            let open = domain.listeners.iter().zip(0..).filter_map(|(listening, number)| {
                let listener = listening.as_ref().filter(|listening| !listening.is_destroyed)?.listener;
                cx.has_listener(listener).then_some(ListenerPlace { listener, domain: domain.index, number })
            });
            places.extend(open);
        }
        for place in places {
            self.set_place(place).ok_or_else(|| invalid(place.domain, "two listeners are the same"))?;
        }
        Ok(())
    }

    /// Records where a listener is served; `None` if its place is taken, or its index is impossible.
    fn set_place(&mut self, place: ListenerPlace) -> Option<()> {
        let at = place.listener.index() as usize;
        if at >= DOMAINS_MAX << u16::BITS {
            return None;
        }
        if self.listeners.len() <= at {
            self.listeners.resize(at + 1, None);
        }
        let is_free = self.listeners[at].is_none();
        self.listeners[at] = Some(place);
        is_free.then_some(())
    }

    /// Makes the doorbells of a domain wake the shard.
    pub(super) fn add_to_epoll(&mut self, domain: &Domain) -> io::Result<()> {
        if self.domain_epoll.is_none() {
            let epoll = DomainEpoll::new()?;
            if let Some(local) = &self.domains[super::LOCAL_DOMAIN] {
                epoll.add(&local.wake, super::LOCAL_DOMAIN as u8)?;
            }
            self.domain_epoll = Some(epoll);
        }
        self.domain_epoll.as_ref().map_or(Ok(()), |epoll| epoll.add(&domain.wake, domain.index))
    }

    /// See [`Handler::restored`](crate::Handler::restored).
    pub(super) fn tie_to_engine(&mut self, cx: &mut Context<'_>) -> Result<(), String> {
        if self.has_saved_priorities != cx.has_priorities() {
            return Err(OTHER_PRIORITIES.into());
        }
        cx.defer_quick_acks(Duration::from_micros(self.config.ack_hold_us.into()));
        self.restore_places(cx)?;
        for domain in self.domains.iter_mut().flatten() {
            if cx.has_priorities() {
                domain.region.set_lower_share_percent(cx.lower_share_percent());
            }
            domain.restored(cx)?;
        }
        self.restored_filters.clear();
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
impl ChannelServer {
    /// Returns a hash of the layout of what is saved.
    pub(crate) fn layout_hash() -> u64 {
        ginnel_testkit::layout::layout_hash::<(SavedServer, SavedDomain)>()
    }

    /// Lists a socket of a domain as unfinished twice, as if its number had been used again in between.
    pub(crate) fn list_unfinished_twice(&mut self, domain: usize, socket: u32) {
        let domain = self.domains[domain].as_mut().expect("the domain exists");
        domain.unfinished.extend([socket, socket]);
        domain.sockets[socket as usize].is_unfinished = true;
    }
}

/// The filters that were restored, by what was saved of each: sockets that shared a filter share it again.
pub(super) type RestoredFilters =
    std::collections::HashMap<Vec<u8>, Arc<dyn ginnel_stack::socket_filter::SocketFilter>>;
