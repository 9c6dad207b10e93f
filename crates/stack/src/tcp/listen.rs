//! Listeners: lookup, half-open connections, accept queues.

pub(super) mod image;

use super::conn::{Flags, NONE, SlotState, TIMESTAMPS_BYTES, Tcb};
use super::cookies::{self, CookieOptions};
use super::demux::{FlowKey, HostAddr};
use super::fastopen::{FastOpenQueue, FastOpenReply};
use super::filter_table::FilterId;
use super::input::Segment;
use super::profile::{Profile, ProfileId};
use super::reply::CookieSynAck;
use super::state::State;
use super::{Tcp, rtt};
use crate::device::RxBurst;
use crate::error::{GroupError, ListenError, OptionError};
use crate::events::Event;
use crate::handle::{Conn, Listener};
use crate::ip::{FlowLabel, Network, TxError};
use crate::options::{ListenOptions, SaveSyn, SocketOptions};
use crate::priority::{BEST_EFFORT, ClassedQueue, QueueClass};
use crate::reuseport::{GroupKey, ReuseportGroups};
use crate::socket_filter::{FilteredPacket, SocketFilter};
use crate::stack::{ListedSocket, SocketHandle, SocketMemory, SocketProtocol, unspecified_addr};
use crate::tcp::config::{EcnMode, SynCookies};
use crate::wire::tcp::{SeqNumber, TcpFlags, TcpOptions};
use core::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Bit of a half-open connection's token, beside the index of its listener: set if both ends belong to this
/// stack.
const LOOPBACK_BIT: u32 = 1 << 31;

/// Slots of listeners that there can be at most: the largest `tcp.listeners_max`, and as many that were
/// closed while they had half-open connections.
pub(super) const LISTENERS_LIMIT: usize = 1 << 21;

/// Returns the listener of a half-open connection from its token.
#[inline(always)]
pub(super) const fn listener_of(token: u32) -> u32 {
    token & !LOOPBACK_BIT
}

/// The local addresses of segments to a listener.
#[derive(Clone, Copy)]
pub(super) struct LocalMatch {
    /// The address of the listener.
    host: HostAddr,
    /// True if every IPv4 address matches.
    any_v4: bool,
    /// True if every IPv6 address matches.
    any_v6: bool,
}

impl LocalMatch {
    pub fn new(ip: IpAddr, v6_only: bool) -> Self {
        let any = ip.is_unspecified();
        // No link has an IPv6 address that an IPv4 address is mapped to.
        Self { host: ip.into(), any_v4: any && !(ip.is_ipv6() && v6_only), any_v6: any && ip.is_ipv6() }
    }

    #[inline(always)]
    pub fn matches(&self, local: HostAddr) -> bool {
        local == self.host || if local.is_v4() { self.any_v4 } else { self.any_v6 }
    }
}

/// A listener.
pub(crate) struct ListenEntry {
    pub addr: SocketAddr,
    /// Which segments may belong to the listener, by their local address.
    accepts: LocalMatch,
    pub options: ListenOptions,
    pub profile: ProfileId,
    /// Flags that its connections begin with.
    flags: Flags,
    /// True if the profile has a minimum hop limit or a filter, which segments have to pass, or if a program
    /// selects the listener.
    is_guarded: bool,
    /// True if a program selects the member of the listener's group that gets a segment.
    has_group_program: bool,
    generation: u32,
    open: bool,
    /// True if the listener is open, and an acknowledgement without data creates a connection.
    accepts_at_once: bool,
    half_open: u32,
    /// Half-open connections whose peer is this stack itself.
    half_open_loopback: u32,
    /// Connections that are established and not accepted, by the class of the segment that established them.
    queue: ClassedQueue<u32>,
    /// Connections that were accepted by the owner and not delivered to an application: they count as queued.
    accepted_undelivered: u32,
    /// The queue is full if it has more connections of best effort than this: the backlog, less all other
    /// connections that count as queued.
    best_effort_max: i64,
    fastopen: FastOpenQueue,
}

impl ListenEntry {
    /// Creates the entry of a listener without connections.
    fn new(
        addr: SocketAddr,
        options: ListenOptions,
        (id, profile): (ProfileId, &Profile),
        generation: u32,
    ) -> Self {
        Self {
            addr,
            accepts: LocalMatch::new(addr.ip(), options.v6_only),
            options,
            profile: id,
            flags: initial_flags(&options.socket, profile),
            is_guarded: is_guarded(profile),
            has_group_program: false,
            generation,
            open: true,
            accepts_at_once: options.socket.defer_accept == 0,
            half_open: 0,
            half_open_loopback: 0,
            queue: ClassedQueue::default(),
            accepted_undelivered: 0,
            best_effort_max: options.backlog.into(),
            fastopen: FastOpenQueue::default(),
        }
    }

    fn is_wildcard(&self) -> bool {
        self.addr.ip().is_unspecified()
    }

    /// Returns the group of listeners that share the address; `None` if the listener does not share it.
    fn group(&self) -> Option<GroupKey> {
        let ListenOptions { reuse_port, v6_only, user, .. } = self.options;
        reuse_port.then_some(GroupKey { local: self.addr, v6_only, uid: user })
    }

    /// Returns the bytes of memory of the accept queue.
    pub fn queue_bytes(&self) -> usize {
        self.queue.capacity() * size_of::<u32>()
    }

    fn queue_is_full(&self) -> bool {
        self.is_full_with(0)
    }

    /// Returns whether the queue is full with `more` more connections. As on Linux, one connection more than
    /// the backlog fits.
    #[inline(always)]
    fn is_full_with(&self, more: u32) -> bool {
        self.queue.best_effort_len() as i64 + i64::from(more) > self.best_effort_max
    }

    /// Updates what depends on the backlog and on the connections besides those of best effort.
    fn count_others(&mut self) {
        let others = self.queue.others_len() as i64 + i64::from(self.accepted_undelivered);
        self.best_effort_max = i64::from(self.options.backlog) - others;
    }

    /// Adds a connection to the queue of a class.
    #[cold]
    #[inline(never)]
    fn push_by_class(&mut self, idx: u32, class: QueueClass) {
        self.queue.push_back(idx, Some(class));
        self.count_others();
    }

    /// Takes the next connection by class, and returns its class.
    #[cold]
    #[inline(never)]
    fn pop_by_class(&mut self) -> Option<(u32, u8)> {
        let taken = self.queue.pop_by_class();
        self.count_others();
        taken
    }

    /// Takes the oldest connection of a class.
    #[cold]
    #[inline(never)]
    fn pop_of_class(&mut self, class: u8) -> Option<u32> {
        let taken = self.queue.pop_of_class(class);
        self.count_others();
        taken
    }
}

/// The listeners of a shard.
pub(crate) struct ListenTable {
    entries: Vec<ListenEntry>,
    /// Pairs of port and entry, sorted: there are few enough for a binary search, and iteration has a defined
    /// order.
    by_port: Vec<(u16, u32)>,
    free: Vec<u32>,
    max: usize,
    groups: ReuseportGroups,
}

impl ListenTable {
    pub fn new(max: u32) -> Self {
        Self {
            entries: Vec::new(),
            by_port: Vec::new(),
            free: Vec::new(),
            max: max as usize,
            groups: ReuseportGroups::default(),
        }
    }

    pub fn add(
        &mut self,
        addr: SocketAddr,
        options: ListenOptions,
        (id, profile): (ProfileId, &Profile),
    ) -> Result<Listener, ListenError> {
        let first = self.by_port.partition_point(|(port, _)| *port < addr.port());
        let mut same_port = self.by_port[first..].iter().take_while(|(port, _)| *port == addr.port());
        if same_port.any(|(_, i)| {
            let entry = &self.entries[*i as usize];
            entry.options.conflicts_with(entry.addr, addr, &options)
        }) {
            return Err(ListenError::AddressInUse);
        }
        if self.by_port.len() >= self.max {
            return Err(ListenError::TooMany);
        }
        let entry = |generation| ListenEntry::new(addr, options, (id, profile), generation);
        let index = match self.free.pop() {
            Some(index) => {
                let generation = self.entries[index as usize].generation.wrapping_add(1);
                self.entries[index as usize] = entry(generation);
                index
            }
            None => {
                self.entries.push(entry(0));
                (self.entries.len() - 1) as u32
            }
        };
        let at = self.by_port.partition_point(|e| *e < (addr.port(), index));
        self.by_port.insert(at, (addr.port(), index));
        if let Some(group) = self.entries[index as usize].group()
            && self.groups.join(group, index)
        {
            self.set_has_group_program(index, true, profile);
        }
        Ok(Listener::new(index, self.entries[index as usize].generation))
    }

    /// Sets the profile of a listener, and what depends on it. Returns the profile that it had before.
    pub fn set_profile(&mut self, index: u32, id: ProfileId, profile: &Profile) -> ProfileId {
        let entry = &mut self.entries[index as usize];
        entry.flags = initial_flags(&entry.options.socket, profile);
        entry.is_guarded = is_guarded(profile) || entry.has_group_program;
        core::mem::replace(&mut entry.profile, id)
    }

    /// Records whether a program selects the listeners of the group of a listener, whose profile is given.
    pub(super) fn set_has_group_program(&mut self, index: u32, has_program: bool, profile: &Profile) {
        let entry = &mut self.entries[index as usize];
        entry.has_group_program = has_program;
        entry.is_guarded = is_guarded(profile) || has_program;
    }

    /// Sets the program of the group of a listener. Returns the members of the group.
    ///
    /// # Errors
    /// As [`ReuseportGroups::set_program`].
    pub(super) fn set_group_program(
        &mut self,
        index: u32,
        program: Option<Arc<dyn SocketFilter>>,
        is_first: bool,
    ) -> Result<Vec<u32>, GroupError> {
        let group = self.entries[index as usize].group().ok_or(GroupError::NotInGroup)?;
        self.groups.set_program(&group, program, is_first)?;
        Ok(self.groups.members(&group).to_vec())
    }

    /// Returns whether a program selects the listener of a segment for this one.
    pub(super) fn has_group_program(&self, index: u32) -> bool {
        self.entries[index as usize].has_group_program
    }

    /// Returns the listener that the program of the group of a listener selects, if it selects one.
    pub(super) fn select_by_program(&self, index: u32, packet: &FilteredPacket<'_>) -> Option<u32> {
        self.groups.select(&self.entries[index as usize].group()?, packet)
    }

    /// Closes a listener. Returns its profile, and the connections of its accept queue with their classes.
    fn remove(&mut self, index: u32) -> (ProfileId, Vec<(u32, u8)>) {
        self.by_port.retain(|(_, i)| *i != index);
        if let Some(group) = self.entries[index as usize].group() {
            self.groups.leave(&group, index);
        }
        let entry = &mut self.entries[index as usize];
        (entry.open, entry.accepts_at_once) = (false, false);
        let queue = core::mem::take(&mut entry.queue).take_all_with_classes();
        if entry.half_open == 0 {
            self.free.push(index);
        }
        (entry.profile, queue)
    }

    /// Returns the number of slots, including vacant ones.
    pub fn slots(&self) -> usize {
        self.entries.len()
    }

    /// Returns the number of listeners now, and the largest number at a time, which includes listeners that
    /// were closed while they had half-open connections.
    pub fn usage(&self) -> (usize, usize) {
        (self.by_port.len(), self.entries.len())
    }

    /// Returns the listener in a slot for a listing.
    pub fn listed(
        &self,
        index: u32,
        memory: impl FnOnce(&ListenEntry) -> SocketMemory,
    ) -> Option<ListedSocket> {
        let entry = self.entries.get(index as usize).filter(|entry| entry.open)?;
        Some(ListedSocket {
            protocol: SocketProtocol::Tcp,
            state: State::Listen,
            local: entry.addr,
            remote: unspecified_addr(entry.addr),
            recv_queue: entry.queue.len() as u64,
            send_queue: entry.options.backlog.into(),
            timer: None,
            info: None,
            memory: memory(entry),
            handle: Some(SocketHandle::Listener(self.handle(index))),
        })
    }

    pub fn index(&self, listener: Listener) -> Option<u32> {
        let entry = self.entries.get(listener.index() as usize)?;
        (entry.open && entry.generation == listener.generation()).then_some(listener.index())
    }

    /// Returns an open listener to change it.
    #[inline(always)]
    fn open_entry(&mut self, listener: Listener) -> Option<&mut ListenEntry> {
        let entry = self.entries.get_mut(listener.index() as usize)?;
        (entry.open && entry.generation == listener.generation()).then_some(entry)
    }

    pub fn get(&self, index: u32) -> &ListenEntry {
        &self.entries[index as usize]
    }

    /// Returns the requests for fast open of a listener, its options, and its backlog.
    pub fn fastopen_queue(&mut self, index: u32) -> (&mut FastOpenQueue, &SocketOptions, u32) {
        let entry = &mut self.entries[index as usize];
        (&mut entry.fastopen, &entry.options.socket, entry.options.backlog)
    }

    pub fn handle(&self, index: u32) -> Listener {
        Listener::new(index, self.entries[index as usize].generation)
    }

    /// Returns the listener for a segment: an exact address precedes the wildcard, and the wildcard of the
    /// same family precedes that of the other family. Among listeners that share an address the hash of the
    /// flow selects one, so that all segments of a handshake find the same listener.
    #[inline(always)]
    pub fn find(&self, local: HostAddr, port: u16, hash: u32) -> Option<u32> {
        let from = self.by_port.partition_point(|e| e.0 < port);
        if let [(first, index), rest @ ..] = &self.by_port[from..]
            && rest.first().is_none_or(|e| e.0 != port)
        {
            // Most ports have one listener.
            return (*first == port && self.entries[*index as usize].accepts.matches(local))
                .then_some(*index);
        }
        self.find_among(&self.by_port[from..], local, port, hash)
    }

    #[inline(never)]
    fn find_among(&self, from: &[(u16, u32)], local: HostAddr, port: u16, hash: u32) -> Option<u32> {
        let rank = |index: u32| {
            let entry = &self.entries[index as usize];
            (entry.is_wildcard(), entry.addr.is_ipv4() != local.is_v4())
        };
        let of_port = from.iter().take_while(|e| e.0 == port).map(|e| e.1);
        let candidates = of_port.filter(|index| self.entries[*index as usize].accepts.matches(local));
        let best = candidates.clone().map(rank).min()?;
        let mut equals = candidates.filter(|index| rank(*index) == best);
        let count = equals.clone().count() as u64;
        // The upper bits are used, because the flow table uses the lower ones. Cannot truncate: the product
        // shifted is below `count`.
        equals.nth(((u64::from(hash.rotate_left(16)) * count) >> 32) as usize)
    }

    /// Accounts for a half-open connection with this token that has ended or is established.
    #[inline(always)]
    pub fn on_half_open_end(&mut self, token: u32) {
        let index = listener_of(token);
        let entry = &mut self.entries[index as usize];
        entry.half_open -= 1;
        entry.half_open_loopback -= u32::from(token != index);
        if !entry.open && entry.half_open == 0 {
            self.free.push(index);
        }
    }

    /// Returns a listener that shares the address of another one (`SO_REUSEPORT`), and that takes over its
    /// connections when it is closed, as Linux does with `net.ipv4.tcp_migrate_req`. `hash` selects one of
    /// several.
    #[inline(never)]
    fn sibling_of(&self, index: u32, hash: u32) -> Option<u32> {
        // A listener that is closed has left its group.
        let siblings = self.groups.members(&self.entries[index as usize].group()?);
        siblings.get(hash as usize % siblings.len().max(1)).copied()
    }

    /// Moves a half-open connection with this token to a sibling of its listener, which is closed. Returns
    /// the new token.
    fn migrate_half_open(&mut self, token: u32, hash: u32) -> Option<u32> {
        let to = self.sibling_of(listener_of(token), hash)?;
        self.on_half_open_end(token);
        let is_loopback = token != listener_of(token);
        let entry = &mut self.entries[to as usize];
        entry.half_open += 1;
        entry.half_open_loopback += u32::from(is_loopback);
        Some(if is_loopback { to | LOOPBACK_BIT } else { to })
    }

    /// Returns whether segments have to pass a minimum hop limit or a filter, or a program selects the
    /// listener.
    pub fn is_guarded(&self, index: u32) -> bool {
        self.entries[index as usize].is_guarded
    }

    pub fn is_open(&self, index: u32) -> bool {
        self.entries[index as usize].open
    }

    /// Returns whether a listener is open and does not defer connections.
    #[inline(always)]
    pub fn accepts_at_once(&self, index: u32) -> bool {
        self.entries[index as usize].accepts_at_once
    }

    /// Returns whether a listener uses a local port, so that `connect` must not choose it.
    pub fn has_port(&self, port: u16) -> bool {
        let from = self.by_port.partition_point(|e| e.0 < port);
        self.by_port.get(from).is_some_and(|e| e.0 == port)
    }
}

/// Returns the flags that connections of a listener begin with.
fn initial_flags(options: &SocketOptions, profile: &Profile) -> Flags {
    let mut flags = Flags::from_options(options);
    flags.assign(Flags::URGENT_OR_FILTERED, profile.filter != FilterId::NONE);
    flags
}

/// Returns whether segments have to pass a minimum hop limit or a filter.
fn is_guarded(profile: &Profile) -> bool {
    profile.filter != FilterId::NONE || profile.min_hop_limits != [0; 2]
}

impl Tcp {
    /// Opens a listener.
    pub fn listen(&mut self, addr: SocketAddr, options: ListenOptions) -> Result<Listener, ListenError> {
        let profile = self
            .profiles
            .get(ProfileId::DEFAULT)
            .with_options(&self.config, &options.socket)
            .map(|p| if options.awaits_filter { p.with_filter(FilterId::DROP_ALL) } else { p })
            .and_then(|p| self.profiles.intern(p))
            .ok_or(ListenError::InvalidOption)?;
        self.note_profile(profile);
        let of = (profile, self.profiles.get(profile));
        self.held_syns.on_listen(self.now);
        self.listeners.add(addr, options, of).inspect_err(|error| {
            self.stats.listeners_refused += u64::from(*error == ListenError::TooMany);
            self.profiles.release(profile);
        })
    }

    /// Sets the options with which later connections begin.
    pub fn set_listener_options(
        &mut self,
        listener: Listener,
        options: &SocketOptions,
    ) -> Result<(), OptionError> {
        let index = self.listeners.index(listener).ok_or(OptionError::Stale)?;
        let profile = self.profiles.get(ProfileId::DEFAULT).with_options(&self.config, options);
        // The filter is no option.
        let filter = self.profiles.get(self.listeners.get(index).profile).filter;
        let profile = profile.ok_or(OptionError::Invalid)?.with_filter(filter);
        let profile = self.profiles.intern(profile).ok_or(OptionError::TooMany)?;
        self.note_profile(profile);
        let entry = &mut self.listeners.entries[index as usize];
        entry.options.socket = *options;
        entry.accepts_at_once = options.defer_accept == 0;
        let old = self.listeners.set_profile(index, profile, self.profiles.get(profile));
        self.profiles.release(old);
        Ok(())
    }

    /// Sets how many connections may be queued from now on, and how many the owner has accepted and not
    /// delivered to an application: these still count as queued.
    pub fn set_backlog(&mut self, listener: Listener, backlog: u32, accepted_undelivered: u32) {
        if let Some(index) = self.listeners.index(listener) {
            let entry = &mut self.listeners.entries[index as usize];
            (entry.options.backlog, entry.accepted_undelivered) = (backlog, accepted_undelivered);
            entry.count_others();
        }
    }

    /// Closes a listener. Connections that were not accepted move to a listener that shares the address
    /// (`SO_REUSEPORT`), or else are reset.
    pub fn unlisten(&mut self, net: &mut Network, listener: Listener) -> bool {
        let Some(index) = self.listeners.index(listener) else { return false };
        self.held_syns.on_unlisten(self.now, self.listeners.get(index).addr);
        let (profile, queue) = self.listeners.remove(index);
        self.has_guards |= self.half_open > 0 && !self.profiles.filters.is_empty();
        for (idx, class) in queue {
            let c = &mut self.conns[idx];
            c.flags.clear(Flags::IN_ACCEPT_QUEUE);
            match c.slot_state {
                // The peer has closed or reset the connection already.
                SlotState::Unaccepted(_) => self.free_slot(idx),
                _ => match self.listeners.sibling_of(index, idx) {
                    Some(sibling) => {
                        c.token = sibling;
                        c.flags.set(Flags::IN_ACCEPT_QUEUE);
                        let to = QueueClass { class, lower_share_percent: self.lower_share_percent };
                        self.listeners.entries[sibling as usize].push_by_class(idx, to);
                        let listener = self.listeners.handle(sibling);
                        // The event stands for a connection of its class.
                        let current = self.event_classes.current();
                        self.event_classes.select(&mut self.events, class);
                        self.events.push_back(Event::Incoming { listener });
                        self.event_classes.select(&mut self.events, current);
                    }
                    None => self.abort(net, idx),
                },
            }
        }
        self.profiles.release(profile);
        true
    }

    /// Gives a half-open connection whose listener was closed to a listener that shares the address. Returns
    /// false if there is none.
    #[cold]
    pub fn migrate_half_open(&mut self, idx: u32) -> bool {
        let Some(token) = self.listeners.migrate_half_open(self.conns[idx].token, idx) else { return false };
        self.conns[idx].token = token;
        true
    }

    /// Takes the next connection of the accept queue: the oldest one of the class whose turn it is.
    pub fn accept(&mut self, listener: Listener) -> Option<Conn> {
        let index = self.listeners.index(listener)?;
        let queue = &mut self.listeners.entries[index as usize].queue;
        if queue.has_classes() {
            return self.accept_by_class(listener);
        }
        let idx = queue.pop_best_effort()?;
        Some(self.accepted(idx))
    }

    /// A separate function, so that listeners without classes do not execute its instructions.
    #[cold]
    #[inline(never)]
    fn accept_by_class(&mut self, listener: Listener) -> Option<Conn> {
        self.accept_with_class(listener).map(|(conn, _)| conn)
    }

    /// As [`Tcp::accept`]. Returns the class of the connection, too.
    pub fn accept_with_class(&mut self, listener: Listener) -> Option<(Conn, u8)> {
        let (idx, class) = self.listeners.open_entry(listener)?.pop_by_class()?;
        Some((self.accepted(idx), class))
    }

    /// Takes the oldest connection of the accept queue that has the class of the events that are taken now.
    pub fn accept_incoming(&mut self, listener: Listener) -> Option<Conn> {
        let class = self.event_classes.current();
        let entry = self.listeners.open_entry(listener)?;
        let idx = match class {
            BEST_EFFORT => entry.queue.pop_best_effort()?,
            class => entry.pop_of_class(class)?,
        };
        Some(self.accepted(idx))
    }

    /// Gives a connection that was in an accept queue to the owner.
    #[inline(always)]
    fn accepted(&mut self, idx: u32) -> Conn {
        let c = &mut self.conns[idx];
        c.flags.clear(Flags::IN_ACCEPT_QUEUE);
        c.flags.set(Flags::ACCEPTED);
        c.token = 0;
        let conn = Conn::new(idx, c.generation);
        let nothing = c.active == NONE
            && c.slot_state == SlotState::Open
            && !c.has(Flags::PEER_FIN)
            && !(c.has(Flags::INLINE) && self.pending.has_withheld());
        if !nothing {
            self.report_arrived(idx, conn);
        }
        conn
    }

    /// Reports what arrived before the connection was accepted, since those events were dropped.
    #[inline(never)]
    fn report_arrived(&mut self, idx: u32, conn: Conn) {
        let c = &self.conns[idx];
        let (peer_fin, inline) = (c.has(Flags::PEER_FIN), c.has(Flags::INLINE));
        if c.has(Flags::URGENT_OR_FILTERED) {
            self.report_urgent(idx);
        }
        let readable = self.tcb_and_active(idx).is_some_and(|(_, b)| b.recv.readable() > 0);
        if readable {
            self.conns[idx].flags.set(Flags::READABLE_QUEUED);
            self.events.push_back(Event::Readable { conn });
        }
        if inline && self.pending.has_withheld() {
            // So were the events of data in this burst. If they are still queued, those events find the data
            // delivered.
            for p in self.pending.iter().filter(|p| p.conn == conn) {
                self.events.push_back(Event::Data { conn, data: p.data });
            }
        }
        if peer_fin {
            self.events.push_back(Event::PeerClosed { conn });
        }
        if let SlotState::Unaccepted(reason) = self.conns[idx].slot_state {
            self.report_closed(idx, reason);
        }
    }

    /// Processes a segment for which no connection exists (RFC 9293 §3.10.7.1 and §3.10.7.2).
    pub fn input_listen(&mut self, net: &mut Network, seg: &Segment<'_>, burst: &RxBurst<'_>) {
        let Some(listener) = self.listeners.find(seg.key.local, seg.key.local_port, seg.hash) else {
            if self.held_syns.is_empty() || !self.hold_syn(net, seg, burst) {
                self.stats.no_listener += 1;
                self.send_reset(net, seg);
            }
            return;
        };
        self.stats.listener_lookups += 1;
        if self.listeners.is_guarded(listener) {
            let listener = self.select_listener(net, listener, seg, burst);
            if let Some(kept) = self.guard_listener(net, listener, seg, burst) {
                self.input_listener(net, listener, &seg.truncated(kept), burst);
            }
            return;
        }
        self.input_listener(net, listener, seg, burst);
    }

    /// Processes a segment that has passed the minimum hop limit and the filter of its listener.
    #[inline(always)]
    fn input_listener(&mut self, net: &mut Network, listener: u32, seg: &Segment<'_>, burst: &RxBurst<'_>) {
        let flags = seg.header.flags;
        // The checks are in this order: RST, ACK, SYN.
        if flags.contains(TcpFlags::RST) {
            return;
        }
        if flags.contains(TcpFlags::ACK) {
            if !flags.contains(TcpFlags::SYN) && self.accept_cookie(net, listener, seg) {
                return;
            }
            self.send_reset(net, seg);
            return;
        }
        if flags.contains(TcpFlags::SYN) && !flags.contains(TcpFlags::FIN) {
            self.on_syn(net, listener, seg, burst, None);
        }
    }

    /// Processes a SYN for a listener. `sequence` is set if TIME-WAIT has chosen the initial sequence number.
    /// Returns whether a connection was created.
    pub fn on_syn(
        &mut self,
        net: &mut Network,
        listener: u32,
        seg: &Segment<'_>,
        burst: &RxBurst<'_>,
        sequence: Option<SeqNumber>,
    ) -> bool {
        let entry = &self.listeners.entries[listener as usize];
        // A handshake over loopback cannot fail, and Linux completes it before another peer can connect: a
        // half-open loopback connection counts as queued. A host does not flood itself, so no cookie is sent
        // beyond the limit.
        if entry.is_full_with(entry.half_open_loopback)
            && (entry.queue_is_full() || net.is_local(seg.key.remote.ip()))
        {
            self.stats.accept_overflows += 1;
            return false;
        }
        let is_over_limit =
            self.half_open >= self.config.half_open_max || entry.half_open > entry.options.backlog;
        let save = entry.options.socket.save_syn;
        let cookies = match self.config.syn_cookies {
            SynCookies::Off => false,
            SynCookies::Auto => is_over_limit && sequence.is_none(),
            SynCookies::Always => sequence.is_none(),
        };
        if cookies {
            self.send_cookie(net, listener, seg);
            return false;
        }
        if is_over_limit {
            self.stats.half_open_overflows += 1;
            return false;
        }
        let iss = sequence.unwrap_or_else(|| SeqNumber(self.secrets.initial_sequence(&seg.key, self.now)));
        let options = TcpOptions::parse(seg.options);
        let fastopen = if options.fastopen.is_some() | !seg.payload.is_empty() {
            self.try_fastopen(listener, seg, &options)
        } else {
            FastOpenReply::None
        };
        let Some(idx) = self.new_passive(net, listener, seg, &options, iss) else { return false };
        if save != SaveSyn::Off {
            self.save_syn(idx, save, seg, burst);
        }
        let cookie = match &fastopen {
            FastOpenReply::None => None,
            FastOpenReply::Cookie(cookie) => Some(cookie),
            FastOpenReply::Accept(cookie) => {
                self.open_fast(net, idx, seg, burst, cookie.as_ref());
                return true;
            }
        };
        self.half_open += 1;
        self.half_open_high_water = self.half_open_high_water.max(self.half_open);
        let is_loopback = net.is_loopback(self.conns[idx].hop.link());
        let entry = &mut self.listeners.entries[listener as usize];
        entry.half_open += 1;
        if is_loopback {
            entry.half_open_loopback += 1;
            self.conns[idx].token |= LOOPBACK_BIT;
        }
        // No data of the application can be sent with the SYN+ACK, so it is sent at once.
        let sent = match cookie {
            None => self.send_first_syn_ack(net, idx),
            Some(cookie) => self.send_syn_ack_with_cookie(net, idx, cookie),
        };
        if sent == Err(TxError::Full) {
            self.stats.device_full += 1;
            self.want_transmit(idx);
            return true;
        }
        // A new connection has no other timer, and no round-trip time yet.
        let profile = self.profiles.get(self.conns[idx].profile);
        self.arm(idx, self.now.after_micros(profile.syn_ack_rto_us()));
        true
    }

    /// Creates a connection from a peer's SYN, or from the contents of a cookie. Its SYN+ACK has to be sent.
    #[inline(always)]
    fn new_passive(
        &mut self,
        net: &mut Network,
        listener: u32,
        seg: &Segment<'_>,
        options: &TcpOptions,
        iss: SeqNumber,
    ) -> Option<u32> {
        let (remote, local) = (seg.key.remote, seg.key.local);
        let route = match net.cached_route(remote.v4_bits(), local.v4_bits()).filter(|_| remote.is_v4()) {
            Some(route) => *route,
            None => net.route(self.now, remote.ip(), Some(local.ip())).ok()?,
        };
        let entry = &self.listeners.entries[listener as usize];
        let (profile, flags) = (entry.profile, entry.flags);
        let allocated = if self.profiles.get(profile).flow_label == FlowLabel::Reflect {
            self.alloc_reflecting(seg, profile)
        } else {
            self.alloc_conn(&seg.key, seg.hash, profile, false)
        };
        let Some(idx) = allocated else {
            self.stats.connection_overflows += 1;
            return None;
        };
        let now_ms = self.now_ms();
        let c = &mut self.conns[idx];
        if options.timestamps.is_some() {
            c.ts_offset = self.secrets.timestamp_offset(local, remote);
        }
        let ecn = self.config.ecn != EcnMode::Off
            && seg.header.flags.contains(TcpFlags::SYN | TcpFlags::ECE | TcpFlags::CWR);
        c.state = State::SynReceived;
        c.flags |= flags | Flags::SYN_PENDING;
        c.flags.assign(Flags::ECN, ecn);
        if route.mtu_locked {
            c.flags.set(Flags::MTU_LOCKED);
        }
        c.token = listener;
        c.hop = route.hop;
        c.pmtu = route.mtu;
        c.rcv_nxt = seg.header.seq + 1;
        c.rcv_wup = c.rcv_nxt;
        c.snd_una = iss;
        c.snd_nxt = iss + 1;
        c.snd_wnd = seg.header.window.into();
        c.snd_wl1 = seg.header.seq;
        c.last_rx = now_ms;
        apply_peer_options(c, &self.config, options);
        init_windows(c, self.profiles.get(profile));
        if !c.has(Flags::WSCALE) {
            c.wscale = 0;
        }
        Some(idx)
    }

    /// Creates a connection from a cookie; out of line, because cookies are rare.
    #[inline(never)]
    fn new_from_cookie(
        &mut self,
        net: &mut Network,
        listener: u32,
        seg: &Segment<'_>,
        options: &TcpOptions,
        cookie: SeqNumber,
    ) -> Option<u32> {
        self.new_passive(net, listener, seg, options, cookie)
    }

    /// Allocates a TCB, adds it to the flow table and returns its index.
    #[inline(always)]
    fn alloc_conn(&mut self, key: &FlowKey, hash: u32, profile: ProfileId, is_active: bool) -> Option<u32> {
        let idx = self.conns.alloc()?;
        if self.flows.insert(hash, idx).is_err() {
            self.conns[idx].state = State::Closed;
            self.conns.free(idx);
            return None;
        }
        self.port_use.add(key, self.profiles.port_sharing(profile, is_active));
        let (remote_ip, local_ip, v6) = self.addresses.store(key);
        let c = &mut self.conns[idx];
        *c = Tcb {
            remote_ip,
            local_ip,
            remote_port: key.remote_port,
            local_port: key.local_port,
            generation: c.generation,
            flags: if v6 { Flags::V6 } else { Flags::NONE },
            cwnd: self.config.initial_window_segments,
            token: 0,
            profile: self.profiles.share(profile),
            slot_state: SlotState::Open,
            ..Tcb::vacant()
        };
        Some(idx)
    }

    /// Allocates a TCB as [`alloc_conn`](Self::alloc_conn) for a listener that reflects flow labels. If there
    /// are too many profiles, the connection gets a label of its own.
    #[cold]
    fn alloc_reflecting(&mut self, seg: &Segment<'_>, profile: ProfileId) -> Option<u32> {
        let of_listener = *self.profiles.get(profile);
        let flow_label = of_listener.flow_label.of_connection(seg.flow_label);
        match self.profiles.intern(of_listener.with_flow_label(flow_label)) {
            Some(reflecting) => {
                let idx = self.alloc_conn(&seg.key, seg.hash, reflecting, false);
                // The connection has a share of its own.
                self.profiles.release(reflecting);
                idx
            }
            None => self.alloc_conn(&seg.key, seg.hash, profile, false),
        }
    }

    /// Creates a connection that is opened from here, with the addresses of `key`, and adds it to the flow
    /// table. The caller sets [`Flags::ACTIVE_OPEN`].
    pub fn insert_connection(&mut self, key: &FlowKey, hash: u32, profile: ProfileId) -> Option<u32> {
        self.alloc_conn(key, hash, profile, true)
    }

    /// Sets the receive window that a connection begins with, and its scale.
    pub fn init_windows(&mut self, idx: u32) {
        let c = &mut self.conns[idx];
        init_windows(c, self.profiles.get(c.profile));
    }

    /// Returns the segment size to announce: what the path accepts (RFC 6691), or less if the socket requests
    /// it.
    #[inline]
    pub fn advmss(&self, idx: u32) -> u16 {
        let c = &self.conns[idx];
        advmss(c, self.profiles.get(c.profile))
    }

    /// Completes a passive open: puts the connection into the accept queue. Returns false if the queue is
    /// full or the listener was closed.
    #[inline(always)]
    pub fn establish_passive(&mut self, idx: u32) -> bool {
        let listener = listener_of(self.conns[idx].token);
        let entry = &mut self.listeners.entries[listener as usize];
        if !entry.open || entry.queue_is_full() {
            return false;
        }
        let class = self.event_classes.current();
        if class == BEST_EFFORT {
            entry.queue.push_best_effort(idx);
        } else {
            entry.push_by_class(idx, QueueClass { class, lower_share_percent: self.lower_share_percent });
        }
        let incoming = Event::Incoming { listener: Listener::new(listener, entry.generation) };
        let c = &mut self.conns[idx];
        c.flags.set(Flags::IN_ACCEPT_QUEUE);
        c.state = State::Established;
        self.stats.passive_opens += 1;
        self.events.push_back(incoming);
        true
    }

    fn send_cookie(&mut self, net: &mut Network, listener: u32, seg: &Segment<'_>) {
        let options = TcpOptions::parse(seg.options);
        let Ok(route) = net.route(self.now, seg.key.remote.ip(), Some(seg.key.local.ip())) else { return };
        let peer_mss = announced_mss(&options, !seg.key.remote.is_v4());
        let cookie = cookies::make(&self.secrets, &seg.key, seg.header.seq.0, peer_mss, self.now);
        let header = if seg.key.remote.is_v4() { 40 } else { 60 };
        let announced = match self.profiles.get(self.listeners.get(listener).profile).mss {
            0 => route.mtu.saturating_sub(header).max(ADVMSS_MIN),
            limit => limit.min(route.mtu.saturating_sub(header).max(ADVMSS_MIN)),
        };
        self.stats.cookies_sent += 1;
        let profile = self.profiles.get(self.listeners.get(listener).profile);
        let has_timestamps = self.config.timestamps && options.timestamps.is_some();
        let options_bytes = if has_timestamps { TIMESTAMPS_BYTES } else { 0 };
        let (window, scale) = initial_window(profile, announced.saturating_sub(options_bytes));
        let offer = CookieSynAck { sequence: SeqNumber(cookie), mss: announced, window, scale };
        self.send_cookie_synack(net, &route, seg, &options, &offer);
    }

    /// Checks whether an ACK for a listener answers a cookie, and creates the connection. Returns whether the
    /// ACK was processed.
    fn accept_cookie(&mut self, net: &mut Network, listener: u32, seg: &Segment<'_>) -> bool {
        if self.config.syn_cookies == SynCookies::Off || self.stats.cookies_sent == 0 {
            return false;
        }
        let cookie = seg.header.ack - 1;
        let peer_sequence = seg.header.seq - 1;
        let Some(mss) = cookies::check(&self.secrets, &seg.key, peer_sequence.0, cookie.0, self.now) else {
            self.stats.cookies_failed += 1;
            return false;
        };
        if self.listeners.get(listener).queue_is_full() {
            self.stats.accept_overflows += 1;
            return true;
        }
        let timestamps = TcpOptions::parse(seg.options).timestamps.filter(|_| self.config.timestamps);
        let ts_offset = self.secrets.timestamp_offset(seg.key.local, seg.key.remote);
        let cookie_options = match timestamps {
            Some(ts) => cookies::decode_timestamp(ts.tsecr.wrapping_sub(ts_offset), mss),
            None => CookieOptions { mss, window_scale: None, sack: false, ecn: false },
        };
        let options = TcpOptions {
            mss: Some(cookie_options.mss),
            window_scale: cookie_options.window_scale,
            sack_permitted: cookie_options.sack,
            timestamps,
            ..TcpOptions::default()
        };
        let Some(idx) = self.new_from_cookie(net, listener, seg, &options, cookie) else { return true };
        self.stats.cookies_accepted += 1;
        let c = &mut self.conns[idx];
        c.rcv_nxt = seg.header.seq;
        c.rcv_wup = c.rcv_nxt;
        c.snd_una = seg.header.ack;
        c.snd_nxt = seg.header.ack;
        c.snd_wnd = u32::from(seg.header.window) << c.snd_wscale();
        c.flags.assign(Flags::ECN, cookie_options.ecn);
        // The SYN+ACK was sent as a cookie.
        c.flags.clear(Flags::SYN_PENDING);
        c.min_rtt = u32::MAX;
        self.init_windows(idx);
        let established = self.establish_passive(idx);
        debug_assert!(established, "the accept queue is full");
        self.input_established(net, idx, seg, None);
        self.rearm(idx);
        true
    }
}

/// Smallest segment size that is announced unless the socket requests less (`ip_rt_min_advmss`): a peer's
/// larger segments arrive in fragments.
const ADVMSS_MIN: u16 = 256;

/// Returns the segment size to announce, given TCB and profile.
#[inline]
pub(super) fn advmss(c: &Tcb, profile: &Profile) -> u16 {
    let mss = c.pmtu.saturating_sub(c.header_bytes()).max(ADVMSS_MIN);
    if profile.mss == 0 { mss } else { mss.min(profile.mss) }
}

#[inline(always)]
fn init_windows(c: &mut Tcb, profile: &Profile) {
    let mss = advmss(c, profile);
    // The options of segments are known when a passive open begins (`tcp_openreq_init_rwin`).
    let options = if c.has(Flags::ACTIVE_OPEN) { 0 } else { c.option_bytes() };
    let (window, shift) = initial_window(profile, mss.saturating_sub(options));
    c.wscale = c.wscale & 15 | shift << 4;
    if profile.mss != 0 {
        c.peer_mss = c.peer_mss.min(profile.mss);
    }
    c.rcv_edge = c.rcv_nxt + u32::from(window);
    // The window is what was announced until more arrives.
    c.rcv_grow_seq = c.rcv_nxt + profile.recv_window_step.saturating_sub(window.into());
    c.rcv_mss = mss.min(c.peer_mss).min(536.max(mss / 2));
}

/// Returns the window that a connection offers in its SYN, a multiple of `mss`, and its shift.
#[inline]
fn initial_window(profile: &Profile, mss: u16) -> (u16, u8) {
    let (window, mss) = (profile.recv_window_first, u32::from(mss));
    let window = if window > mss { window - window % mss.max(1) } else { window };
    (window.min(65_535) as u16, profile.recv_window_shift)
}

/// Returns the segment size that a peer's SYN announces; 536 (IPv4) or 1220 (IPv6) without the option (RFC
/// 9293 §3.7.1). If a peer announces a tiny size, Linux's minimum of 48 avoids a flood of tiny segments.
#[inline(always)]
fn announced_mss(options: &TcpOptions, is_v6: bool) -> u16 {
    let default = if is_v6 { 1220 } else { 536 };
    options.mss.filter(|m| *m != 0).unwrap_or(default).max(48)
}

/// Applies the options that the peer's SYN offers, as far as they are configured here, too.
#[inline(always)]
pub(crate) fn apply_peer_options(c: &mut Tcb, config: &crate::tcp::config::TcpConfig, options: &TcpOptions) {
    c.peer_mss = announced_mss(options, c.has(Flags::V6));
    if config.window_scaling
        && let Some(shift) = options.window_scale
    {
        c.flags.set(Flags::WSCALE);
        c.wscale = c.wscale & 0xf0 | shift.min(14);
    }
    c.flags.assign(Flags::SACK, config.sack && options.sack_permitted);
    if config.timestamps
        && let Some(ts) = options.timestamps
    {
        c.flags.set(Flags::TIMESTAMPS);
        c.ts_recent = ts.tsval;
    }
}

/// Bit of `rttvar` before there is a sample: SYN or SYN+ACK was retransmitted without a time-out.
pub(crate) const SYNACK_AMBIGUOUS: u32 = 1;
/// Bit of `rttvar` before there is a sample: the peer has acknowledged SYN+ACK, and the connection is
/// deferred ([`super::defer_accept`]).
pub(crate) const SYNACK_DEFERRED: u32 = 2;

/// Takes the first round-trip time sample, that of SYN or SYN+ACK, if the segment was sent only once (Karn).
#[inline(always)]
pub(crate) fn take_handshake_rtt(c: &mut Tcb, profile: &Profile, now_us: u32) {
    let sent = core::mem::replace(&mut c.min_rtt, u32::MAX);
    let ambiguous = core::mem::take(&mut c.rttvar) & SYNACK_AMBIGUOUS != 0;
    if c.retries == 0 && !ambiguous {
        rtt::on_sample(c, profile, now_us.wrapping_sub(sent));
    }
    if c.retries > 1 {
        // RFC 5681 §3.1 and RFC 6928 §2: the network is congested. A single retransmission may be due to the
        // short initial time-out.
        c.cwnd = 1;
    }
    c.retries = 0;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::config::TcpConfig;

    #[test]
    fn listeners_match_their_address_or_family() {
        for (own, v6_only, expected) in [
            ("10.0.0.1", false, [true, false, false]),
            ("2001:db8::1", false, [false, false, true]),
            ("0.0.0.0", false, [true, true, false]),
            ("0.0.0.0", true, [true, true, false]),
            ("::", false, [true, true, true]),
            ("::", true, [false, false, true]),
        ] {
            let accepts = LocalMatch::new(own.parse().unwrap(), v6_only);
            let to = ["10.0.0.1", "10.0.0.2", "2001:db8::1"];
            let matches = to.map(|to| accepts.matches(to.parse::<IpAddr>().unwrap().into()));
            assert_eq!(matches, expected, "{own} {v6_only}");
        }
    }

    #[test]
    fn siblings_are_members_of_one_group() {
        let mut listeners = ListenTable::new(8);
        let profile = Profile::from_config(&TcpConfig::default());
        let mut listen = |v6_only| {
            let options = ListenOptions { reuse_port: true, v6_only, ..ListenOptions::default() };
            let address = "[::]:80".parse().unwrap();
            listeners.add(address, options, (ProfileId::DEFAULT, &profile)).unwrap()
        };
        let opened = [false, true, false, true, false].map(&mut listen);
        let [closed, sibling, other] = [0, 2, 4].map(|at: usize| listeners.index(opened[at]).unwrap());
        listeners.remove(closed);
        let siblings = [0, 1, 2, 3].map(|hash| listeners.sibling_of(closed, hash).unwrap());
        assert_eq!(siblings[..2], siblings[2..]);
        assert!(siblings.contains(&sibling) && siblings.contains(&other), "{siblings:?}");
        listeners.remove(sibling);
        listeners.remove(other);
        assert_eq!(listeners.sibling_of(closed, 7), None);
    }

    // limit: tcp.recv_window_first_bytes
    #[test]
    fn initial_window_is_whole_segments_within_16_bits() {
        let first = |buffer: u32, first: u32, mss: u16| {
            let config = TcpConfig {
                recv_buffer_bytes: buffer,
                recv_window_first_bytes: first,
                ..TcpConfig::default()
            };
            config.validate().unwrap();
            initial_window(&Profile::from_config(&config), mss)
        };
        assert_eq!(first(6 << 20, 1 << 16, 1460), (64_240, 7));
        assert_eq!(first(6 << 20, 1 << 30, 1460), (65_535, 7));
        assert_eq!(first(6 << 20, 2048, 1460), (1460, 7));
        assert_eq!(first(6 << 20, 2048, 9000), (2048, 7));
        assert_eq!(first(4096, 1 << 16, 1460), (2920, 0));
    }
}
