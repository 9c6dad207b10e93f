//! The channels of a process, one for each shard of its stack, behind one interface. A connection belongs to
//! the shard that its handle names; a listener exists on all shards and accepts from any of them.

use crate::file::BoundAddress;
use crate::unserved_peers::{UnservedPeers, is_refusal};
use crate::user_memory::{UserSlice, UserSliceMut};
use core::net::{IpAddr, SocketAddr};
use core::num::NonZeroU32;
use core::ops::Range;
use ginnel::broker::{Attachment, GlobalSocketId};
use ginnel::channel::control::{ChannelRequest, ReserveError, StreamStamp, UnorderedReply};
use ginnel::channel::{
    AddressSharing, Client, ClientEvent, DescriptionKey, Fault, LinkInfo, PeekedDatagram, ReceivedDatagram,
    Reservation, SocketId, SocketState, SocketStatus, UrgentMark,
};
use ginnel::{
    Conn, ConnectError, ConnectOptions, Error, ListenOptions, MembershipLimits, OptionError, RecvError,
    SendError, SocketOptions, SourceFilter, Stale, TcpInfo, TcpOption, UdpError, UdpExtendedError,
    UdpOptions, UdpSendParams,
};
use rustix::fd::{AsRawFd, BorrowedFd, RawFd};
use rustix::thread::{CpuSet, sched_getaffinity};
use std::time::{Duration, Instant};

/// The shard from which a process prefers to take connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenSpawn {
    /// Takes connections from all shards alike.
    Off,
    /// Prefers the shard on the CPU to which the process is bound, if it is bound to one.
    Bound,
    /// As `Bound`; processes that are not bound prefer the shards in turn.
    Auto,
}

/// Largest number of shards: sets of shards are bits of one word. It bounds `shards.count`.
const SHARDS_MAX: usize = 64;
/// How many wake-ups may stay unread in the socket of the wake descriptor, whose buffer has room for some
/// hundreds.
const UNREAD_WAKES_MAX: u32 = 64;
/// The shard that keeps all reservations of addresses: they must be in one place.
const RESERVATION_SHARD: usize = 0;

/// A listener on all shards.
#[derive(Clone)]
struct ShardedListener {
    /// The listener's number on each shard.
    numbers: Box<[u32]>,
    /// Shards that may have a connection to accept.
    may_offer: u64,
    /// The shard to ask first.
    next_shard: usize,
    /// The credits that were given, and the shard that was preferred then.
    credits: u32,
    preferred: Option<usize>,
    /// Accepted connections until the preference is looked at again.
    accepts_until_check: u32,
}

/// Accepted connections after which a process looks where its thread runs.
const ACCEPTS_PER_CHECK: u32 = 64;

/// Turns after which a shard that always has work has delivered what it was asked to send: it takes the bytes
/// in one turn and receives its own frame in the next one, and the peer's answer takes as many. Bytes for
/// which there was no window take several rounds.
const SETTLE_TURNS: u32 = 16;
/// Longest wait for a delivery, if the shard gets no CPU.
const SETTLE_MAX: Duration = Duration::from_millis(20);

/// Channels of shards that have ended.
pub(crate) struct PreviousChannels {
    /// The channels, which still tell the numbers and addresses of sockets.
    pub channels: Channels,
    /// How often the process has attached to new shards since it got these channels.
    pub resumes: u32,
}

/// All channels. A connection handle is the handle of its channel, shifted left, with the number of the shard
/// in the lowest bits.
pub(crate) struct Channels {
    clients: Vec<Client>,
    /// How many bits hold the number of a shard, and a mask of these bits.
    bits: u32,
    mask: u32,
    /// Shards whose channel was used since the last flush.
    dirty: u64,
    /// The shard whose events are taken next.
    next_event_shard: usize,
    /// The shard that opens the next connection.
    next_connect_shard: usize,
    /// Peers to which some of the shards open no connections.
    unserved_peers: UnservedPeers,
    /// The shard that owns the next UDP socket.
    next_udp_shard: usize,
    /// Listeners by number. With one shard the number is that of the channel, and the table stays empty.
    listeners: Vec<Option<ShardedListener>>,
    /// Maps a shard and the listener's number on that shard to this process's number plus one; 0 is none.
    listener_of_shard: Vec<Vec<u32>>,
    listen_spawn: ListenSpawn,
    /// The CPU of each shard.
    cpus: Vec<u16>,
    /// How many wake-ups by the stack were not read from the descriptor.
    unread_wakes: u32,
    /// The shards were notified after they were last waited for ([`Channels::settle`]).
    has_sent: bool,
    /// The first shard has said that it uses TCP Fast Open as a client (`tcp.fastopen`).
    can_open_fast: bool,
    /// The first and the last port that the stack chooses for TCP, and those for UDP, once they were asked
    /// for.
    local_ports: Option<[(u16, u16); 2]>,
}

impl Channels {
    /// Creates the channels of a process from one client for each shard. Returns `None` if there are no
    /// clients, or more than a stack can have shards.
    pub fn new(mut clients: Vec<Client>) -> Option<Self> {
        if clients.is_empty() || clients.len() > SHARDS_MAX {
            return None;
        }
        clients.iter_mut().for_each(Client::accept_explicitly);
        let bits = clients.len().next_power_of_two().trailing_zeros();
        // Processes that open one connection each should not all open it on the same shard.
        let next_connect_shard = std::process::id() as usize % clients.len();
        let listener_of_shard = vec![Vec::new(); clients.len()];
        let (listeners, cpus, listen_spawn) = (Vec::new(), Vec::new(), ListenSpawn::Off);
        Some(Self {
            clients,
            bits,
            mask: (1 << bits) - 1,
            dirty: 0,
            next_event_shard: 0,
            next_connect_shard,
            unserved_peers: UnservedPeers::default(),
            next_udp_shard: next_connect_shard,
            listeners,
            listener_of_shard,
            listen_spawn,
            cpus,
            unread_wakes: 0,
            has_sent: false,
            can_open_fast: false,
            local_ports: None,
        })
    }

    /// Replaces the channels by those of shards that were started again. Returns the previous ones, or `None`
    /// if the stack now has another number of shards; then nothing is replaced.
    pub fn replace(&mut self, clients: Vec<Client>) -> Option<Self> {
        let mut new = Self::new(clients).filter(|new| new.clients.len() == self.clients.len())?;
        new.set_listen_spawn(self.listen_spawn, core::mem::take(&mut self.cpus));
        Some(core::mem::replace(self, new))
    }

    /// Opens a listener again that had this number in the channels `before`, on all shards or on none.
    pub fn restore_listener(
        &mut self,
        attachment: &Attachment,
        before: &PreviousChannels,
        number: u32,
        bound: &BoundAddress,
        options: ListenOptions,
        filter: Option<&[u8]>,
    ) -> Result<u32, Error> {
        let request = ChannelRequest::ListenShared(bound.address(), options, bound.description);
        let mut numbers = Vec::new();
        for shard in 0..self.clients.len() {
            let restored = match before.channels.number_on_shard(number, shard) {
                // Cannot truncate: there are at most 64 shards.
                Some(number) => {
                    attachment.restore_listener(shard as u16, number, before.resumes, request.clone(), filter)
                }
                None => Err(Error::StackGone),
            };
            match restored {
                Ok(number) => numbers.push(number),
                Err(error) => {
                    numbers
                        .iter()
                        .enumerate()
                        .for_each(|(shard, number)| self.unlisten_on_shard(shard as u16, *number));
                    return Err(error);
                }
            }
        }
        Ok(self.import_listener(&numbers))
    }

    /// Opens a UDP socket again. It had the handle `conn` in former channels, since which the process has
    /// attached to new shards `resumes` times.
    pub fn restore_udp(
        &mut self,
        attachment: &Attachment,
        conn: Conn,
        resumes: u32,
        local: SocketAddr,
        options: UdpOptions,
        filter: Option<&[u8]>,
    ) -> Result<Conn, Error> {
        let (shard, before) = self.split_handle(conn);
        let client = self.clients.get_mut(shard).ok_or(Error::StackGone)?;
        let conn = attachment.restore_udp(client, shard as u16, before, resumes, local, (options, filter))?;
        self.dirty |= 1 << shard;
        Ok(self.join_handle(shard, conn))
    }

    /// Sets the preference for shards, whose threads run on these CPUs.
    pub fn set_listen_spawn(&mut self, listen_spawn: ListenSpawn, cpus: Vec<u16>) {
        (self.listen_spawn, self.cpus) = (listen_spawn, cpus);
    }

    /// Returns the shard that this process prefers. Evaluated when the process begins to accept, so that a
    /// worker which binds itself after `fork` is bound already, and again after every
    /// [`ACCEPTS_PER_CHECK`] connections, so that a worker that is moved gets those of its new CPU.
    fn preferred_shard(&self) -> Option<usize> {
        if self.clients.len() == 1 || self.listen_spawn == ListenSpawn::Off {
            return None;
        }
        let in_turn = || self.clients[0].number() as usize % self.clients.len();
        self.local_shard().or_else(|| (self.listen_spawn == ListenSpawn::Auto).then(in_turn))
    }

    /// Returns the shard that runs on the only CPU on which this thread may run.
    fn local_shard(&self) -> Option<usize> {
        let bound = sched_getaffinity(None).ok().filter(|cpus| cpus.count() == 1)?;
        let is_valid = |cpu: &u16| usize::from(*cpu) < CpuSet::MAX_CPU;
        self.cpus.iter().position(|cpu| is_valid(cpu) && bound.is_set((*cpu).into()))
    }

    /// Adapts to a child process, in which all listeners may have offers.
    pub fn reset_in_child(&mut self) {
        self.next_udp_shard = std::process::id() as usize % self.clients.len();
        self.listeners.iter_mut().flatten().for_each(|listener_entry| listener_entry.may_offer = u64::MAX);
    }

    /// Returns the channels, in the order of shards.
    pub fn all(&self) -> &[Client] {
        &self.clients
    }

    /// Iterates over the descriptors that the channels need.
    pub fn internal_fds(&self) -> impl Iterator<Item = RawFd> {
        self.clients.iter().flat_map(Client::internal_fds).map(|own| own.as_raw_fd())
    }

    /// Returns the channels, in the order of shards, to change them.
    pub fn all_mut(&mut self) -> &mut [Client] {
        &mut self.clients
    }

    /// Splits a connection handle into its shard and the handle there.
    #[inline(always)]
    fn split_handle(&self, conn: Conn) -> (usize, Conn) {
        let index = conn.index();
        let shard = (index & self.mask) as usize;
        (shard, Conn::new(index >> self.bits, conn.generation()))
    }

    /// Joins a shard and a handle there to a connection handle.
    #[inline(always)]
    fn join_handle(&self, shard: usize, conn: Conn) -> Conn {
        // Cannot overflow: sockets are numbered with 24 bits, and shards with 6.
        Conn::new(conn.index() << self.bits | shard as u32, conn.generation())
    }

    /// Returns the channel of a connection for reading. A handle that was not made here has none.
    #[inline(always)]
    fn client_of(&self, conn: Conn) -> Result<(&Client, Conn), Stale> {
        let (shard, conn) = self.split_handle(conn);
        self.clients.get(shard).map(|client| (client, conn)).ok_or(Stale::Handle)
    }

    /// Returns the channel of a connection for writing, and marks its shard for the next flush.
    #[inline(always)]
    fn client_mut(&mut self, conn: Conn) -> Result<(&mut Client, Conn), Stale> {
        let (shard, conn) = self.split_handle(conn);
        self.dirty |= 1 << shard;
        self.clients.get_mut(shard).map(|client| (client, conn)).ok_or(Stale::Handle)
    }

    /// Returns the identifier of a connection that is valid in all processes.
    pub fn socket_id(&self, conn: Conn) -> GlobalSocketId {
        let (shard, conn) = self.split_handle(conn);
        // Cannot truncate: there are at most 64 shards.
        GlobalSocketId::conn(shard as u16, conn)
    }

    /// Returns the handle of a connection, given its shard and the handle there.
    pub fn conn_of(&self, shard: u16, conn: Conn) -> Conn {
        self.join_handle(shard.into(), conn)
    }

    /// Returns the identifiers of a listener, one for each shard.
    pub fn listener_ids(&self, listener: u32) -> Vec<GlobalSocketId> {
        // Cannot truncate: there are at most 64 shards.
        (0..self.clients.len())
            .filter_map(|shard| {
                Some(GlobalSocketId::listener(shard as u16, self.number_on_shard(listener, shard)?))
            })
            .collect()
    }

    /// Adds a listener to which this process has a reference already, given its number on each shard.
    pub fn import_listener(&mut self, numbers: &[u32]) -> u32 {
        match numbers {
            [only] if self.clients.len() == 1 => *only,
            numbers => self.add_sharded_listener(numbers.into()),
        }
    }

    /// Returns this process's number of a listener, given a shard and the number on that shard.
    pub fn listener_of(&self, shard: u16, number: u32) -> Option<u32> {
        if self.clients.len() == 1 {
            return Some(number);
        }
        self.listener_of_shard.get(usize::from(shard))?.get(number as usize)?.checked_sub(1)
    }

    /// Releases this process's reference to a listener on one shard.
    pub fn unlisten_on_shard(&mut self, shard: u16, number: u32) {
        if let Some(client) = self.clients.get_mut(usize::from(shard)) {
            // If the shard is gone, so is the listener.
            let _ = client.unlisten(number);
        }
    }

    fn add_sharded_listener(&mut self, numbers: Box<[u32]>) -> u32 {
        let free = self.listeners.iter().position(Option::is_none);
        let local = free.unwrap_or(self.listeners.len());
        for (shard, &number) in numbers.iter().enumerate() {
            let table = &mut self.listener_of_shard[shard];
            if table.len() <= number as usize {
                table.resize(number as usize + 1, 0);
            }
            table[number as usize] = local as u32 + 1;
        }
        // Connections may have been offered before the listener was added, so all shards are asked.
        let listener_entry = Some(ShardedListener {
            numbers,
            may_offer: u64::MAX,
            next_shard: 0,
            credits: 0,
            preferred: None,
            accepts_until_check: ACCEPTS_PER_CHECK,
        });
        match free {
            Some(index) => self.listeners[index] = listener_entry,
            None => self.listeners.push(listener_entry),
        }
        local as u32
    }

    /// Returns a listener's number on a shard.
    fn number_on_shard(&self, listener: u32, shard: usize) -> Option<u32> {
        if self.clients.len() == 1 {
            return Some(listener);
        }
        self.listeners.get(listener as usize)?.as_ref()?.numbers.get(shard).copied()
    }

    /// Returns the links of the stack, which are the same on all shards.
    pub fn links(&mut self) -> Result<Vec<LinkInfo>, Error> {
        self.clients.get_mut(RESERVATION_SHARD).map_or(Ok(Vec::new()), Client::links)
    }

    /// Reserves an address. A given port must be free on all shards, because each shard knows only its own
    /// connections.
    pub fn reserve(&mut self, address: SocketAddr, sharing: AddressSharing) -> Result<Reservation, Error> {
        if address.port() != 0 {
            for client in self.clients.iter_mut().skip(RESERVATION_SHARD + 1) {
                let reserved = client.reserve(address, sharing)?;
                client.unreserve(reserved)?;
            }
        }
        self.clients
            .get_mut(RESERVATION_SHARD)
            .ok_or(Error::Reserve(address, ReserveError::NotAvailable))?
            .reserve(address, sharing)
    }

    pub fn unreserve(&mut self, reserved: Reservation) -> Result<(), Error> {
        self.clients.get_mut(RESERVATION_SHARD).map_or(Ok(()), |client| client.unreserve(reserved))
    }

    /// Listens on all shards, or on none, with a filter if there is a program.
    pub fn listen(
        &mut self,
        bound: &BoundAddress,
        options: ListenOptions,
        filter: Option<&[u8]>,
    ) -> Result<u32, Error> {
        let local = bound.address();
        if let [only] = self.clients.as_mut_slice() {
            return only.listen_shared(local, options, 0, bound.description, filter);
        }
        let mut numbers = Vec::new();
        for client in &mut self.clients {
            match client.listen_shared(local, options, 0, bound.description, filter) {
                Ok(number) => numbers.push(number),
                Err(error) => {
                    for (client, number) in self.clients.iter_mut().zip(numbers) {
                        // The listener was opened a moment ago; if its shard is gone, so is the listener.
                        let _ = client.unlisten(number);
                    }
                    return Err(error);
                }
            }
        }
        Ok(self.add_sharded_listener(numbers.into()))
    }

    /// Calls `act` with the listener's number on each shard.
    fn on_all_shards(
        &mut self,
        listener: u32,
        mut act: impl FnMut(&mut Client, u32) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut result = Ok(());
        for shard in 0..self.clients.len() {
            if let Some(number) = self.number_on_shard(listener, shard) {
                self.dirty |= 1 << shard;
                result = result.and(act(&mut self.clients[shard], number));
            }
        }
        result
    }

    /// Releases this process's reference to a listener, and its reservation. Waits only for the last answer.
    pub fn unlisten(&mut self, listener: u32, reserved: Option<Reservation>) -> Result<(), Error> {
        let last = self.clients.len() - 1;
        let mut shard = 0;
        let result = self.on_all_shards(listener, |client, number| {
            let is_last = shard == last && reserved.is_none();
            shard += 1;
            if is_last { client.unlisten(number) } else { client.post_unlisten(number) }
        });
        if let Some(listener_entry) = self.listeners.get_mut(listener as usize).and_then(Option::take) {
            for (table, number) in self.listener_of_shard.iter_mut().zip(&listener_entry.numbers) {
                table[*number as usize] = 0;
            }
        }
        result.and(reserved.map_or(Ok(()), |reserved| self.unreserve(reserved)))
    }

    /// Returns whether an administrator has closed a listener, at least on one shard.
    pub fn is_listener_destroyed(&self, listener: u32) -> bool {
        self.clients.iter().enumerate().any(|(shard, client)| {
            self.number_on_shard(listener, shard).is_some_and(|number| client.is_listener_destroyed(number))
        })
    }

    pub fn set_backlog(&mut self, listener: u32, backlog: u32) -> Result<(), Error> {
        self.on_all_shards(listener, |client, number| client.set_backlog(number, backlog))
    }

    /// Waits until the connections in the accept queue are offered.
    pub fn request_offers(&mut self, listener: u32) -> Result<(), Error> {
        self.on_all_shards(listener, |client, _| client.request_offers())
    }

    pub fn set_listener_options(&mut self, listener: u32, options: SocketOptions) -> Result<(), Error> {
        self.on_all_shards(listener, |client, number| client.set_listener_options(number, options))
    }

    pub fn saved_syn(&mut self, conn: Conn, room: usize) -> Result<Vec<u8>, Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.saved_syn(conn, room)
    }

    /// Sets how many connections a listener may be offered. With a preferred shard, the other shards get
    /// fallback credits ([`Client::set_fallback_credits`]).
    pub fn set_credits(&mut self, listener: u32, credits: u32) {
        let preferred = self.preferred_shard();
        if let Some(Some(entry)) = self.listeners.get_mut(listener as usize) {
            (entry.credits, entry.preferred) = (credits, preferred);
        }
        for shard in 0..self.clients.len() {
            let Some(number) = self.number_on_shard(listener, shard) else { continue };
            self.dirty |= 1 << shard;
            match preferred {
                Some(preferred) if preferred != shard => {
                    self.clients[shard].set_fallback_credits(number, credits);
                }
                _ => self.clients[shard].set_credits(number, credits),
            }
        }
    }

    /// Looks where this thread runs now, and prefers the shard of that CPU from now on.
    #[cold]
    fn follow_thread(&mut self, listener: u32) {
        let preferred = self.preferred_shard();
        let Some(Some(entry)) = self.listeners.get_mut(listener as usize) else { return };
        entry.accepts_until_check = ACCEPTS_PER_CHECK;
        let credits = entry.credits;
        if preferred != entry.preferred && credits > 0 {
            self.set_credits(listener, credits);
        }
    }

    /// Accepts a connection from the next shard in turn that has one. Shards that announced nothing are not
    /// asked.
    pub fn accept(&mut self, listener: u32) -> Option<Conn> {
        if let [only] = self.clients.as_mut_slice() {
            self.dirty = 1;
            return only.accept(listener);
        }
        let count = self.clients.len();
        let listener_entry = self.listeners.get_mut(listener as usize)?.as_mut()?;
        listener_entry.may_offer &= u64::MAX >> (SHARDS_MAX - count);
        while listener_entry.may_offer != 0 {
            let later = listener_entry.may_offer & u64::MAX.unbounded_shl(listener_entry.next_shard as u32);
            let shard = if later != 0 { later } else { listener_entry.may_offer }.trailing_zeros() as usize;
            if let Some(conn) = self.clients[shard].accept(listener_entry.numbers[shard]) {
                listener_entry.next_shard = (shard + 1) % count;
                listener_entry.accepts_until_check = listener_entry.accepts_until_check.wrapping_sub(1);
                let is_check_due = listener_entry.accepts_until_check == 0;
                self.dirty |= 1 << shard;
                if is_check_due {
                    self.follow_thread(listener);
                }
                return Some(self.join_handle(shard, conn));
            }
            listener_entry.may_offer &= !(1 << shard);
        }
        None
    }

    /// Returns whether a connection can be accepted.
    pub fn has_offer(&mut self, listener: u32) -> bool {
        if let [only] = self.clients.as_mut_slice() {
            return only.has_offer(listener);
        }
        let count = self.clients.len();
        let Some(Some(listener_entry)) = self.listeners.get_mut(listener as usize) else { return false };
        listener_entry.may_offer &= u64::MAX >> (SHARDS_MAX - count);
        while listener_entry.may_offer != 0 {
            let shard = listener_entry.may_offer.trailing_zeros() as usize;
            if self.clients[shard].has_offer(listener_entry.numbers[shard]) {
                return true;
            }
            listener_entry.may_offer &= !(1 << shard);
        }
        false
    }

    /// Opens a connection on the shard that receives its packets: any shard if the stack chooses the port,
    /// otherwise the one that the port determines.
    pub fn connect(
        &mut self,
        remote: SocketAddr,
        options: ConnectOptions,
        filter: Option<&[u8]>,
    ) -> Result<Conn, Error> {
        let Self { clients, unserved_peers, next_connect_shard, .. } = self;
        let flow = (remote, options.local.is_none());
        let (shard, conn) = unserved_peers.open(flow, next_connect_shard, clients.len(), |shard| {
            clients[shard].connect_filtered(remote, options, filter)
        })?;
        self.dirty |= 1 << shard;
        Ok(self.join_handle(shard, conn))
    }

    /// Records that the shard of a connection to `peer`, which was opened asynchronously, does not serve the
    /// link towards it.
    pub fn note_unserved(&mut self, conn: Conn, peer: IpAddr) {
        let (shard, _) = self.split_handle(conn);
        self.unserved_peers.add(peer, shard);
    }

    /// Opens a connection with default SYN options and without a local address, asynchronously if possible
    /// ([`Client::connect_without_request`]).
    pub fn connect_without_request(&mut self, remote: SocketAddr) -> Result<Conn, Error> {
        let Self { clients, unserved_peers, next_connect_shard, .. } = self;
        let count = clients.len();
        let first = unserved_peers.first_shard(remote.ip(), *next_connect_shard, count);
        *next_connect_shard = (first + 1) % count;
        self.dirty |= 1 << first;
        let (shard, conn) = match clients[first].connect_without_request(remote) {
            Ok(conn) => (first, conn),
            // The shard answered that it has no port; another shard may have one.
            Err(error) if is_refusal(&error) => {
                let refused = ((remote, true), (first, error));
                let opened = unserved_peers.open_elsewhere(refused, next_connect_shard, count, |shard| {
                    clients[shard].connect(remote, ConnectOptions::default())
                })?;
                self.dirty |= 1 << opened.0;
                opened
            }
            Err(error) => return Err(error),
        };
        Ok(self.join_handle(shard, conn))
    }

    /// Returns how many bytes the deferred SYN of a connection can carry (TCP Fast Open); `None` if the SYN
    /// was sent.
    pub fn syn_data_max(&self, conn: Conn) -> Option<usize> {
        let (client, conn) = self.client_of(conn).ok()?;
        client.syn_data_max(conn).ok()?.map(usize::from)
    }

    /// Sends the deferred SYN of a connection without data.
    pub fn send_deferred_syn(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.send_deferred_syn(conn)
    }

    /// Returns whether the stack uses TCP Fast Open as a client. Asks the first shard until it has said yes;
    /// the configuration of running shards does not change.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    pub fn can_open_fast(&mut self) -> Result<bool, Error> {
        if !self.can_open_fast {
            self.can_open_fast = self.clients.first_mut().ok_or(Error::StackGone)?.can_open_fast()?;
        }
        Ok(self.can_open_fast)
    }

    /// Returns the first and the last port that the stack chooses for TCP or UDP sockets. Asks the first
    /// shard once; the configuration of running shards does not change.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    pub fn local_ports(&mut self, is_udp: bool) -> Result<(u16, u16), Error> {
        let ports = match self.local_ports {
            Some(ports) => ports,
            None => {
                *self.local_ports.insert(self.clients.first_mut().ok_or(Error::StackGone)?.local_ports()?)
            }
        };
        Ok(ports[usize::from(is_udp)])
    }

    /// Returns the reason why the attempt to open a connection failed; `None` if the connection has not ended
    /// by that.
    pub fn connect_error(&self, conn: Conn) -> Option<ConnectError> {
        let (client, conn) = self.client_of(conn).ok()?;
        client.connect_error(conn)
    }

    /// Returns the next event, taking shards in turn.
    #[inline]
    pub fn next_event(&mut self) -> Option<ClientEvent> {
        if let [only] = self.clients.as_mut_slice() {
            return only.next_event();
        }
        for _ in 0..self.clients.len() {
            let shard = self.next_event_shard;
            if let Some(event) = self.clients[shard].next_event() {
                return Some(self.translate_event(shard, event));
            }
            self.next_event_shard = (shard + 1) % self.clients.len();
        }
        None
    }

    /// Returns whether the shard of the last event has priorities.
    #[inline]
    pub fn has_priorities(&self) -> bool {
        self.clients[self.next_event_shard].has_priorities()
    }

    /// Returns the class of priority of the last event.
    pub fn event_class(&self) -> u8 {
        self.clients[self.next_event_shard].event_class()
    }

    /// Returns the minimum share of lower priorities in percent; `None` if the stack has no priorities.
    pub fn lower_share_percent(&self) -> Option<u32> {
        self.clients.iter().find_map(Client::lower_share_percent)
    }

    /// Returns the highest class of priority of a socket's unread bytes or datagrams, if there are some.
    pub fn data_class(&self, conn: Conn) -> Option<u8> {
        let (client, conn) = self.client_of(conn).ok()?;
        client.data_class(conn).ok().flatten()
    }

    /// Returns the highest class of priority of the connections of a listener that could be accepted now.
    pub fn offer_class(&self, listener: u32) -> Option<u8> {
        let shards = self.clients.iter().enumerate();
        shards.filter_map(|(shard, client)| client.offer_class(self.number_on_shard(listener, shard)?)).max()
    }

    fn translate_event(&mut self, shard: usize, event: ClientEvent) -> ClientEvent {
        let local_number = |this: &mut Self, number: u32| {
            let local =
                this.listener_of_shard[shard].get(number as usize).copied().unwrap_or(0).checked_sub(1)?;
            let listener_entry = this.listeners.get_mut(local as usize)?.as_mut()?;
            listener_entry.may_offer |= 1 << shard;
            Some(local)
        };
        match event {
            // A listener that no longer exists gets a number that no listener has.
            ClientEvent::Offered { listener } => {
                ClientEvent::Offered { listener: local_number(self, listener).unwrap_or(u32::MAX) }
            }
            ClientEvent::Accepted { conn, listener } => ClientEvent::Accepted {
                conn: self.join_handle(shard, conn),
                listener: local_number(self, listener).unwrap_or(u32::MAX),
            },
            ClientEvent::ListenersDestroyed => ClientEvent::ListenersDestroyed,
            ClientEvent::Connected { conn } => ClientEvent::Connected { conn: self.join_handle(shard, conn) },
            ClientEvent::Readable { conn } => ClientEvent::Readable { conn: self.join_handle(shard, conn) },
            ClientEvent::Writable { conn } => ClientEvent::Writable { conn: self.join_handle(shard, conn) },
            ClientEvent::Acked { conn, bytes } => {
                ClientEvent::Acked { conn: self.join_handle(shard, conn), bytes }
            }
            ClientEvent::Urgent { conn } => ClientEvent::Urgent { conn: self.join_handle(shard, conn) },
            ClientEvent::Datagrams { conn } => ClientEvent::Datagrams { conn: self.join_handle(shard, conn) },
            ClientEvent::PeerClosed { conn } => {
                ClientEvent::PeerClosed { conn: self.join_handle(shard, conn) }
            }
            ClientEvent::Closed { conn, reason } => {
                ClientEvent::Closed { conn: self.join_handle(shard, conn), reason }
            }
        }
    }

    /// Notifies the shards that were used since the last flush.
    #[inline]
    pub fn flush(&mut self) {
        if self.dirty != 0 {
            self.flush_all();
        }
    }

    fn flush_all(&mut self) {
        self.has_sent = true;
        let mut dirty = core::mem::take(&mut self.dirty);
        while dirty != 0 {
            self.clients[dirty.trailing_zeros() as usize].flush();
            dirty &= dirty - 1;
        }
    }

    /// Returns whether the shards were notified after they were last waited for.
    #[inline]
    pub fn has_sent(&mut self) -> bool {
        self.flush();
        self.has_sent
    }

    /// Waits until the shards have done what this process has asked for, and have delivered on their loopback
    /// what follows from it. Gives up on a shard that gets no CPU.
    #[cold]
    pub fn settle(&mut self) {
        self.flush();
        self.has_sent = false;
        let until = Instant::now() + SETTLE_MAX;
        self.await_turns(until);
        if self.clients.len() > 1 {
            // A shard to which another one has handed something seems to sleep until it wakes.
            for _ in 0..2 {
                for client in &self.clients {
                    let begun = client.turns();
                    client.wake_shard();
                    while client.turns() == begun && Instant::now() < until {
                        rustix::thread::sched_yield();
                    }
                }
                self.await_turns(until);
            }
        }
    }

    /// Waits until each shard sleeps, or has begun as many turns as a delivery takes.
    fn await_turns(&self, until: Instant) {
        for client in &self.clients {
            let begun = client.turns();
            while !client.is_shard_quiet()
                && client.turns().wrapping_sub(begun) < SETTLE_TURNS
                && Instant::now() < until
            {
                rustix::thread::sched_yield();
            }
        }
    }

    /// Returns the descriptor on which all shards wake the process.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.clients[0].wake_fd()
    }

    /// Must be called before sleeping. Returns false if an event is pending: do not sleep then.
    pub fn before_sleep(&mut self) -> bool {
        self.clients.iter_mut().all(Client::before_sleep)
    }

    pub fn after_sleep(&mut self) {
        if self.unread_wakes > 0 {
            // `poll` is level-triggered.
            self.drain_wakes();
        }
        self.clients.iter_mut().for_each(|client| client.after_sleep(true));
        if self.is_stack_gone() {
            // Perhaps only one channel has noticed the end: a channel that finds doorbells does not look for
            // a hang-up.
            self.check_stack_alive();
        }
    }

    /// Checks whether the stack is gone. A process that never sleeps learns of it only here.
    pub fn check_stack_alive(&mut self) {
        self.clients.iter_mut().for_each(Client::check_stack_alive);
    }

    /// Must be called after a sleep on the edges of [`wake_fd`](Self::wake_fd). `was_woken` tells whether
    /// there was an edge, `hung_up` whether the other end is closed.
    pub fn after_epoll_wait(&mut self, was_woken: bool, hung_up: bool) {
        // Each wake-up writes one byte.
        let wakes = self.clients.iter_mut().map(|client| u32::from(client.after_epoll_wait())).sum::<u32>();
        self.unread_wakes += wakes.max(was_woken.into());
        if self.unread_wakes >= UNREAD_WAKES_MAX || hung_up {
            self.drain_wakes();
        }
        if hung_up {
            // The end of the stream follows the unread bytes.
            self.check_stack_alive();
        }
    }

    /// Reads the wake-ups that edge-triggered sleeps left unread.
    fn drain_wakes(&mut self) {
        self.unread_wakes = 0;
        self.clients[0].clear_wake();
    }

    /// Returns whether a shard is running at this moment on another CPU than the caller: then events may
    /// arrive without sleeping.
    pub fn is_stack_running_elsewhere(&self) -> bool {
        self.clients.iter().any(Client::is_stack_running_elsewhere)
    }

    /// Returns whether the stack, and with it every shard, is gone.
    pub fn is_stack_gone(&self) -> bool {
        self.clients.iter().any(Client::is_stack_gone)
    }

    /// Returns whether the stack is gone, or is said to be: [`check_stack_alive`](Self::check_stack_alive)
    /// finds out. If one region says so, so do all.
    #[inline]
    pub fn is_stack_said_to_be_gone(&self) -> bool {
        self.clients[0].is_stack_said_to_be_gone()
    }

    /// Returns whether the addresses of the stack can be used.
    pub fn is_ready(&self) -> bool {
        self.clients.iter().all(Client::is_ready)
    }

    #[inline]
    pub fn buffer_bytes(&self) -> usize {
        self.clients[0].buffer_bytes()
    }
}

/// Descriptions shared between processes. The first shard keeps the state of a shared listener.
impl Channels {
    #[inline]
    fn client_of_description(&self, of: DescriptionKey) -> Option<(&Client, DescriptionKey)> {
        match of {
            DescriptionKey::Socket(conn) => {
                self.client_of(conn).ok().map(|(client, conn)| (client, DescriptionKey::Socket(conn)))
            }
            DescriptionKey::Listener(listener) => Some((
                self.clients.get(RESERVATION_SHARD)?,
                DescriptionKey::Listener(self.number_on_shard(listener, RESERVATION_SHARD)?),
            )),
        }
    }

    /// Returns the shards that have a socket or listener, with its id there.
    pub fn sides_of(&self, of: DescriptionKey) -> Vec<(usize, SocketId)> {
        match of {
            DescriptionKey::Socket(conn) => {
                let (shard, conn) = self.split_handle(conn);
                let id = SocketId::Socket { socket: conn.index(), generation: conn.generation() };
                if shard < self.clients.len() { vec![(shard, id)] } else { Vec::new() }
            }
            DescriptionKey::Listener(number) => {
                let on_shard =
                    |shard| Some((shard, SocketId::Listener(self.number_on_shard(number, shard)?)));
                (0..self.clients.len()).filter_map(on_shard).collect()
            }
        }
    }

    /// Returns the client of a shard, which is one of [`Self::sides_of`].
    pub fn client_of_shard(&mut self, shard: usize) -> &mut Client {
        &mut self.clients[shard]
    }

    /// Notes that a shard has to be flushed.
    pub fn mark_dirty(&mut self, shard: usize) {
        self.dirty |= 1 << shard;
    }

    #[inline]
    pub fn description_version(&self, of: DescriptionKey) -> u32 {
        self.client_of_description(of).map_or(0, |(client, of)| client.description_version(of))
    }

    pub fn write_description(&self, of: DescriptionKey, bytes: &[u8]) -> Option<u32> {
        let (client, of) = self.client_of_description(of)?;
        client.write_description(of, bytes)
    }

    pub fn write_description_after(&self, of: DescriptionKey, version: u32, bytes: &[u8]) -> Option<u32> {
        let (client, of) = self.client_of_description(of)?;
        client.write_description_after(of, version, bytes)
    }

    pub fn read_description(&self, of: DescriptionKey) -> Option<(u32, Vec<u8>)> {
        let (client, of) = self.client_of_description(of)?;
        client.read_description(of)
    }
}

/// Operations on a connection, as those of [`Client`].
impl Channels {
    #[inline(always)]
    pub fn status(&self, conn: Conn) -> Result<SocketStatus, Stale> {
        let (client, conn) = self.client_of(conn)?;
        client.status(conn)
    }

    #[inline]
    pub fn socket_state(&self, conn: Conn) -> Result<SocketState, Stale> {
        let (client, conn) = self.client_of(conn)?;
        client.socket_state(conn)
    }

    #[inline]
    pub fn status_with_state(&self, conn: Conn, conn_state: SocketState) -> Result<SocketStatus, Stale> {
        let (client, conn) = self.client_of(conn)?;
        client.status_with_state(conn, conn_state)
    }

    #[inline]
    pub fn recv_into(
        &mut self,
        conn: Conn,
        buffers: &mut [UserSliceMut<'_>],
        skip: usize,
    ) -> Result<(SocketState, Result<Option<usize>, Fault>), RecvError> {
        let (shard, conn) = self.split_handle(conn);
        let client = self.clients.get_mut(shard).ok_or(RecvError::Stale)?;
        let result = client.recv_into(conn, buffers, skip);
        // Most reads need not notify the stack.
        self.dirty |= u64::from(client.needs_flush()) << shard;
        result
    }

    pub fn peer(&self, conn: Conn) -> Result<SocketAddr, Stale> {
        let (client, conn) = self.client_of(conn)?;
        client.peer(conn)
    }

    pub fn endpoints(&self, conn: Conn) -> Result<[SocketAddr; 2], Stale> {
        let (client, conn) = self.client_of(conn)?;
        client.endpoints(conn)
    }

    #[inline]
    pub fn peek_into(
        &mut self,
        conn: Conn,
        skip: usize,
        buffer: &mut UserSliceMut<'_>,
        at: usize,
        len: usize,
    ) -> Result<Result<usize, Fault>, RecvError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| RecvError::Stale)?;
        client.peek_into(conn, skip, buffer, at, len)
    }

    pub fn recv_at_most(
        &mut self,
        conn: Conn,
        buffers: &mut [UserSliceMut<'_>],
        skip: usize,
        max: usize,
    ) -> Result<Result<usize, Fault>, RecvError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| RecvError::Stale)?;
        client.recv_at_most(conn, buffers, skip, max)
    }

    #[inline]
    pub fn consume(&mut self, conn: Conn, count: usize) -> Result<usize, RecvError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| RecvError::Stale)?;
        client.consume(conn, count)
    }

    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| SendError::Stale)?;
        client.send(conn, bytes)
    }

    #[inline]
    pub fn send_from(
        &mut self,
        conn: Conn,
        buffers: &[UserSlice<'_>],
        range: Range<usize>,
    ) -> Result<Result<usize, Fault>, SendError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| SendError::Stale)?;
        client.send_from(conn, buffers, range)
    }

    pub fn await_send_space(&mut self, conn: Conn, enough: usize) -> Result<bool, Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.await_send_space(conn, enough)
    }

    pub fn sendable_within(&mut self, conn: Conn, len: u32, limits: (u32, u32)) -> Result<u32, Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.sendable_within(conn, len, limits.0, limits.1)
    }

    pub fn is_shared(&mut self, conn: Conn) -> Result<bool, Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.is_shared(conn)
    }

    pub fn written(&mut self, conn: Conn) -> Result<u64, Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.written(conn)
    }

    pub fn read_position(&mut self, conn: Conn) -> Result<u64, Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.read_position(conn)
    }

    pub fn arrival_time(&mut self, conn: Conn, end: u64) -> Result<Option<u32>, Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.arrival_time(conn, end)
    }

    pub fn await_stamps(&mut self, conn: Conn, end: u64, sent: bool, acked: bool) -> Result<bool, Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.await_stamps(conn, end, sent, acked)
    }

    pub fn take_stamps(&mut self, conn: Conn) -> Result<Vec<StreamStamp>, Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.take_stamps(conn)
    }

    pub fn notsent(&mut self, conn: Conn) -> Result<usize, Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.not_sent(conn)
    }

    pub fn end_record(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.end_record(conn)
    }

    pub fn begin_hold(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.begin_hold(conn)
    }

    pub fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.shutdown_write(conn)
    }

    pub fn abort(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.abort(conn)
    }

    pub fn release(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.release(conn)
    }

    pub fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| OptionError::Stale)?;
        client.set_option(conn, option)
    }

    pub fn info(&mut self, conn: Conn) -> Result<Box<TcpInfo>, Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.info(conn)
    }

    pub fn has_unordered(&self, conn: Conn) -> bool {
        self.client_of(conn).is_ok_and(|(client, conn)| client.has_unordered(conn) == Ok(true))
    }

    pub fn recv_unordered(&mut self, conn: Conn, max: u32) -> Result<UnorderedReply, RecvError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| RecvError::Stale)?;
        client.recv_unordered(conn, max)
    }

    pub fn return_unordered(&mut self, conn: Conn, offset: u64, bytes: Vec<u8>) -> Result<(), Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.return_unordered(conn, offset, bytes)
    }

    pub fn send_message(&mut self, conn: Conn, bytes: Vec<u8>, priority: u8) -> Result<(), SendError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| SendError::Stale)?;
        client.send_message(conn, bytes, priority)
    }

    pub fn send_urgent(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| SendError::Stale)?;
        client.send_urgent(conn, bytes)
    }

    pub fn urgent_mark(&mut self, conn: Conn) -> Result<Option<UrgentMark>, Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.urgent_mark(conn)
    }

    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| RecvError::Stale)?;
        client.recv_urgent(conn)
    }

    pub fn shutdown_read(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.shutdown_read(conn)
    }
}

/// UDP sockets. Each is owned by one shard, which gets its datagrams wherever they arrive.
impl Channels {
    /// Opens a UDP socket on the shard that runs on the CPU to which the thread is bound, otherwise on the
    /// shards in turn. So sockets that share a port by `SO_REUSEPORT` get different shards, and datagrams are
    /// distributed among them by sender.
    ///
    /// If devices have shards of their own, the socket gets one that serves the device of its address, or of
    /// the route to its first peer `to`.
    pub fn udp_open(
        &mut self,
        local: SocketAddr,
        options: UdpOptions,
        to: Option<IpAddr>,
        filter: Option<&[u8]>,
    ) -> Result<Conn, Error> {
        let count = self.clients.len();
        let first = if count == 1 { 0 } else { self.local_shard().unwrap_or(self.next_udp_shard) };
        let mut last_error = None;
        for shard in (first..count).chain(0..first) {
            match self.clients[shard].udp_open_filtered(local, options, to, filter) {
                Ok(conn) => {
                    self.next_udp_shard = (shard + 1) % count;
                    return Ok(self.join_handle(shard, conn));
                }
                // Another shard may have free ports or room; and a socket can share a port only on the shard
                // that has it.
                Err(
                    error @ Error::Udp(
                        _,
                        UdpError::AddressInUse | UdpError::AddressNotAvailable | UdpError::TooManySockets,
                    ),
                ) => {
                    // A shard that does not serve the address answers `AddressNotAvailable`, which hides the
                    // error of a shard that does.
                    let is_telling =
                        |error: &Error| !matches!(error, Error::Udp(_, UdpError::AddressNotAvailable));
                    last_error = last_error.filter(is_telling).or(Some(error));
                }
                Err(error) => return Err(error),
            }
        }
        Err(last_error.unwrap_or(Error::Udp(local, UdpError::Stale)))
    }

    pub fn udp_connect(&mut self, conn: Conn, remote: SocketAddr) -> Result<(), UdpError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| UdpError::Stale)?;
        client.udp_connect(conn, remote)
    }

    pub fn udp_set_options(&mut self, conn: Conn, options: UdpOptions) -> Result<(), UdpError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| UdpError::Stale)?;
        client.udp_set_options(conn, options)
    }

    pub fn udp_send_with(
        &mut self,
        conn: Conn,
        sending: &UdpSendParams,
        data: &[u8],
    ) -> Result<(), UdpError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| UdpError::Stale)?;
        client.udp_send_with(conn, sending, data)
    }

    pub fn udp_send_timed(
        &mut self,
        conn: Conn,
        sending: &UdpSendParams,
        data: &[u8],
    ) -> Result<(u32, u32), UdpError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| UdpError::Stale)?;
        client.udp_send_timed(conn, sending, data)
    }

    pub fn udp_send_queued(
        &mut self,
        conn: Conn,
        sending: &UdpSendParams,
        departs_us: Option<NonZeroU32>,
        buffers: &[UserSlice<'_>],
    ) -> Result<Result<(), Fault>, UdpError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| UdpError::Stale)?;
        client.udp_send_queued_from(conn, sending, departs_us, buffers)
    }

    pub fn udp_recv_into(
        &mut self,
        conn: Conn,
        buffers: &mut [UserSliceMut<'_>],
    ) -> Result<Result<ReceivedDatagram, Fault>, UdpError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| UdpError::Stale)?;
        client.udp_recv_into(conn, buffers)
    }

    pub fn udp_peek_into(
        &mut self,
        conn: Conn,
        buffers: &mut [UserSliceMut<'_>],
        offset: usize,
        peeked_empty: &[u64],
    ) -> Result<Result<PeekedDatagram, Fault>, UdpError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| UdpError::Stale)?;
        client.udp_peek_into(conn, buffers, offset, peeked_empty)
    }

    pub fn udp_error(&self, conn: Conn, take: bool) -> Option<UdpError> {
        let (client, conn) = self.client_of(conn).ok()?;
        client.udp_error(conn, take)
    }

    pub fn udp_has_extended_errors(&self, conn: Conn) -> bool {
        self.client_of(conn).is_ok_and(|(client, conn)| client.udp_has_extended_errors(conn))
    }

    pub fn udp_take_extended_error(
        &mut self,
        conn: Conn,
    ) -> Result<Box<(UdpExtendedError, Vec<u8>)>, UdpError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| UdpError::Stale)?;
        client.udp_take_extended_error(conn)
    }

    pub fn udp_set_membership(
        &mut self,
        conn: Conn,
        link: u16,
        group: IpAddr,
        filter: Option<SourceFilter>,
    ) -> Result<(), UdpError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| UdpError::Stale)?;
        client.udp_set_membership(conn, link, group, filter)
    }

    /// Returns the number of the link by which a group is reached if the program names none, and the limits
    /// of memberships.
    pub fn link_of_group(&mut self, group: IpAddr) -> Result<(Option<u16>, MembershipLimits), Error> {
        self.clients.get_mut(RESERVATION_SHARD).ok_or(Error::StackGone)?.link_of_group(group)
    }

    pub fn udp_path_mtu(&mut self, conn: Conn) -> Result<u16, UdpError> {
        let (client, conn) = self.client_mut(conn).map_err(|_| UdpError::Stale)?;
        client.udp_path_mtu(conn)
    }

    pub fn udp_enable_timestamps(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.client_mut(conn)?;
        client.udp_enable_timestamps(conn)
    }

    pub fn udp_next_len(&self, conn: Conn) -> Option<usize> {
        let (client, conn) = self.client_of(conn).ok()?;
        client.udp_next_len(conn)
    }
}
