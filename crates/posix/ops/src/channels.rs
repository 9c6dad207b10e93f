//! The channels of a process, one to each shard of its stack, as if they were one. A connection belongs to one shard, and which one stands in its handle; a listener is on all of
//! them, and takes from whichever has something.

use core::net::SocketAddr;
use core::time::Duration;
use ginnel::channel::control::ReserveError;
use ginnel::channel::{
    Arrived, Client, ClientEvent, CommonOf, LinkInfo, Mark, Reserved, Sharing, Standing, Status,
};
use ginnel::door::Held;
use ginnel::{
    Conn, ConnectError, ConnectOptions, Error, ListenOptions, OptionError, RecvError, SendError,
    SocketOptions, Stale, TcpInfo, TcpOption, UdpError, UdpOptions, UdpReport, UdpSending,
};
use rustix::fd::{AsRawFd, BorrowedFd, RawFd};
use rustix::thread::{CpuSet, sched_getaffinity};
use std::io::{IoSlice, IoSliceMut};

/// Which shard's connections a process takes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenSpawn {
    /// Those of all alike.
    Off,
    /// Those of the shard on the CPU that the process is bound to, if it is bound to one.
    Bound,
    /// The same; processes that are not bound get the shards in turn.
    Auto,
}

/// Shards are bits of a word (`shards.count`).
const SHARDS_MAX: usize = 64;
/// What wakes the process has room for some hundreds that are not read.
const UNREAD_MAX: u32 = 64;
/// Where reservations are kept: one place has to know them all.
const KEEPER: usize = 0;

/// A listener on all shards.
#[derive(Clone)]
struct Spread {
    /// Its number on each.
    numbers: Box<[u32]>,
    /// Those that may have something to be accepted.
    offering: u64,
    /// Where it is looked first.
    turn: usize,
}

/// All channels. Handles of connections are those of the channels' with the number of the shard in their lowest bits.
pub(crate) struct Channels {
    clients: Vec<Client>,
    /// Bits that hold the number of a shard, and all of them set.
    bits: u32,
    mask: u32,
    /// Shards whose channel was used since the last flush.
    dirty: u64,
    /// Whose news is taken next.
    turn: usize,
    /// Who opens the next connection.
    opener: usize,
    /// Where the next UDP socket has its home.
    udp_home: usize,
    /// By number. With one shard it is the channel's own number, and there is no table.
    listeners: Vec<Option<Spread>>,
    /// By shard, and number there: the number here and one, or 0.
    spread: Vec<Vec<u32>>,
    listen_spawn: ListenSpawn,
    /// The CPU of each shard.
    cpus: Vec<u16>,
    /// How often the stack woke the process and that was not read.
    unread: u32,
}

impl Channels {
    /// `None`: there are none, or more than a stack can have shards.
    pub fn new(mut clients: Vec<Client>) -> Option<Self> {
        if clients.is_empty() || clients.len() > SHARDS_MAX {
            return None;
        }
        clients.iter_mut().for_each(Client::accept_by_hand);
        let bits = clients.len().next_power_of_two().trailing_zeros();
        // Processes that open one connection each do not all open it on the same shard.
        let opener = std::process::id() as usize % clients.len();
        let spread = vec![Vec::new(); clients.len()];
        let (listeners, cpus, listen_spawn) = (Vec::new(), Vec::new(), ListenSpawn::Off);
        Some(Self {
            clients,
            bits,
            mask: (1 << bits) - 1,
            dirty: 0,
            turn: 0,
            opener,
            udp_home: opener,
            listeners,
            spread,
            listen_spawn,
            cpus,
            unread: 0,
        })
    }

    /// From now on connections are taken as this says, where shards have these CPUs.
    pub fn prefer(&mut self, listen_spawn: ListenSpawn, cpus: Vec<u16>) {
        (self.listen_spawn, self.cpus) = (listen_spawn, cpus);
    }

    /// The shard that this process serves first. Asked when a process begins to accept, so a worker that was bound after it was born is where it was bound to.
    fn preferred(&self) -> Option<usize> {
        if self.clients.len() == 1 || self.listen_spawn == ListenSpawn::Off {
            return None;
        }
        let in_turn = || self.clients[0].number() as usize % self.clients.len();
        self.beside().or_else(|| (self.listen_spawn == ListenSpawn::Auto).then(in_turn))
    }

    /// The shard whose CPU is the only one on which this thread may run.
    fn beside(&self) -> Option<usize> {
        let bound = sched_getaffinity(None).ok().filter(|cpus| cpus.count() == 1)?;
        let known = |cpu: &u16| usize::from(*cpu) < CpuSet::MAX_CPU;
        self.cpus.iter().position(|cpu| known(cpu) && bound.is_set((*cpu).into()))
    }

    /// The clients have become those of a child of the process.
    pub fn are_childs(&mut self) {
        self.udp_home = std::process::id() as usize % self.clients.len();
        self.listeners.iter_mut().flatten().for_each(|spread| spread.offering = u64::MAX);
    }

    /// One after the other.
    pub fn all(&self) -> &[Client] {
        &self.clients
    }

    /// Descriptors that they need.
    pub fn own_fds(&self) -> impl Iterator<Item = RawFd> {
        self.clients.iter().flat_map(Client::own_fds).map(|own| own.as_raw_fd())
    }

    /// The same, to be changed.
    pub fn all_mut(&mut self) -> &mut [Client] {
        &mut self.clients
    }

    /// The shard of a connection, and its handle there.
    #[inline(always)]
    fn there(&self, conn: Conn) -> (usize, Conn) {
        let index = conn.index();
        let shard = (index & self.mask) as usize;
        (shard, Conn::new(index >> self.bits, conn.generation()))
    }

    /// The reverse.
    #[inline(always)]
    fn here(&self, shard: usize, conn: Conn) -> Conn {
        // Cannot overflow: sockets are numbered with 24 bits, and shards with 6.
        Conn::new(conn.index() << self.bits | shard as u32, conn.generation())
    }

    /// The channel of a connection, to be looked at. A handle that was never made here finds none.
    #[inline(always)]
    fn of(&self, conn: Conn) -> Result<(&Client, Conn), Stale> {
        let (shard, conn) = self.there(conn);
        self.clients.get(shard).map(|client| (client, conn)).ok_or(Stale::Handle)
    }

    /// The same, to be used: the stack is told with the next flush.
    #[inline(always)]
    fn with(&mut self, conn: Conn) -> Result<(&mut Client, Conn), Stale> {
        let (shard, conn) = self.there(conn);
        self.dirty |= 1 << shard;
        self.clients.get_mut(shard).map(|client| (client, conn)).ok_or(Stale::Handle)
    }

    /// What the stack calls a connection.
    pub fn held(&self, conn: Conn) -> Held {
        let (shard, conn) = self.there(conn);
        // Cannot truncate: shards are 64 at the most.
        Held::conn(shard as u16, conn)
    }

    /// What this calls a connection that the stack calls so.
    pub fn conn_of(&self, shard: u16, conn: Conn) -> Conn {
        self.here(shard.into(), conn)
    }

    /// What the stack calls a listener: one on each shard.
    pub fn held_listeners(&self, listener: u32) -> Vec<Held> {
        // Cannot truncate: shards are 64 at the most.
        (0..self.clients.len())
            .filter_map(|shard| Some(Held::listener(shard as u16, self.number(listener, shard)?)))
            .collect()
    }

    /// A listener that this process holds already, by its number on each shard.
    pub fn know_listener(&mut self, numbers: &[u32]) -> u32 {
        match numbers {
            [only] if self.clients.len() == 1 => *only,
            numbers => self.spread_over(numbers.into()),
        }
    }

    /// What this calls a listener that the stack calls so.
    pub fn listener_of(&self, shard: u16, number: u32) -> Option<u32> {
        if self.clients.len() == 1 {
            return Some(number);
        }
        self.spread.get(usize::from(shard))?.get(number as usize)?.checked_sub(1)
    }

    /// This process holds a listener of a shard no more.
    pub fn unlisten_there(&mut self, shard: u16, number: u32) {
        if let Some(client) = self.clients.get_mut(usize::from(shard)) {
            // If the shard is gone, so is the listener.
            let _ = client.unlisten(number);
        }
    }

    fn spread_over(&mut self, numbers: Box<[u32]>) -> u32 {
        let free = self.listeners.iter().position(Option::is_none);
        let here = free.unwrap_or(self.listeners.len());
        for (shard, &number) in numbers.iter().enumerate() {
            let known = &mut self.spread[shard];
            if known.len() <= number as usize {
                known.resize(number as usize + 1, 0);
            }
            known[number as usize] = here as u32 + 1;
        }
        // What was offered before this was known is looked for.
        let spread = Some(Spread { numbers, offering: u64::MAX, turn: 0 });
        match free {
            Some(place) => self.listeners[place] = spread,
            None => self.listeners.push(spread),
        }
        here as u32
    }

    /// A listener's number on a shard.
    fn number(&self, listener: u32, shard: usize) -> Option<u32> {
        if self.clients.len() == 1 {
            return Some(listener);
        }
        self.listeners.get(listener as usize)?.as_ref()?.numbers.get(shard).copied()
    }

    /// The links of the stack: all shards have the same.
    pub fn links(&mut self) -> Result<Vec<LinkInfo>, Error> {
        self.clients.get_mut(KEEPER).map_or(Ok(Vec::new()), Client::links)
    }

    /// Keeps an address.
    pub fn reserve(&mut self, address: SocketAddr, sharing: Sharing) -> Result<Reserved, Error> {
        self.clients
            .get_mut(KEEPER)
            .ok_or(Error::Reserve(address, ReserveError::NotAvailable))?
            .reserve(address, sharing)
    }

    pub fn unreserve(&mut self, reserved: Reserved) -> Result<(), Error> {
        self.clients.get_mut(KEEPER).map_or(Ok(()), |client| client.unreserve(reserved))
    }

    /// Listens on all shards, or on none.
    pub fn listen(&mut self, local: SocketAddr, options: ListenOptions, credits: u32) -> Result<u32, Error> {
        if let [only] = self.clients.as_mut_slice() {
            return only.listen(local, options, credits);
        }
        let mut numbers = Vec::new();
        for client in &mut self.clients {
            match client.listen(local, options, credits) {
                Ok(number) => numbers.push(number),
                Err(error) => {
                    for (client, number) in self.clients.iter_mut().zip(numbers) {
                        // It was opened a moment ago; if its shard is gone, so is the listener.
                        let _ = client.unlisten(number);
                    }
                    return Err(error);
                }
            }
        }
        Ok(self.spread_over(numbers.into()))
    }

    /// Does something with a listener on each shard.
    fn on_all(
        &mut self,
        listener: u32,
        mut act: impl FnMut(&mut Client, u32) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut result = Ok(());
        for shard in 0..self.clients.len() {
            if let Some(number) = self.number(listener, shard) {
                self.dirty |= 1 << shard;
                result = result.and(act(&mut self.clients[shard], number));
            }
        }
        result
    }

    /// This process holds a listener no more, nor what was reserved for it. All of that is one wait, for the last answer.
    pub fn unlisten(&mut self, listener: u32, reserved: Option<Reserved>) -> Result<(), Error> {
        let last = self.clients.len() - 1;
        let mut shard = 0;
        let result = self.on_all(listener, |client, number| {
            let is_last = shard == last && reserved.is_none();
            shard += 1;
            if is_last { client.unlisten(number) } else { client.unlisten_before_asking(number) }
        });
        if let Some(spread) = self.listeners.get_mut(listener as usize).and_then(Option::take) {
            for (known, number) in self.spread.iter_mut().zip(&spread.numbers) {
                known[*number as usize] = 0;
            }
        }
        result.and(reserved.map_or(Ok(()), |reserved| self.unreserve(reserved)))
    }

    pub fn set_backlog(&mut self, listener: u32, backlog: u32) -> Result<(), Error> {
        self.on_all(listener, |client, number| client.set_backlog(number, backlog))
    }

    /// What waits at a listener is offered when this returns.
    pub fn ask_for_offers(&mut self, listener: u32) -> Result<(), Error> {
        self.on_all(listener, |client, _| client.ask_for_offers())
    }

    pub fn defer(&mut self, listener: u32, time: Duration) -> Result<(), Error> {
        self.on_all(listener, |client, number| client.defer(number, time))
    }

    pub fn amend(&mut self, listener: u32, options: SocketOptions) -> Result<(), Error> {
        self.on_all(listener, |client, number| client.amend(number, options))
    }

    pub fn saved_syn(&mut self, conn: Conn, room: usize) -> Result<Vec<u8>, Stale> {
        let (client, conn) = self.with(conn)?;
        client.saved_syn(conn, room)
    }

    pub fn set_credits(&mut self, listener: u32, credits: u32) {
        let preferred = self.preferred();
        for shard in 0..self.clients.len() {
            let Some(number) = self.number(listener, shard) else { continue };
            self.dirty |= 1 << shard;
            match preferred {
                Some(preferred) if preferred != shard => {
                    self.clients[shard].set_credits_as_second_choice(number, credits);
                }
                _ => self.clients[shard].set_credits(number, credits),
            }
        }
    }

    /// Takes a connection from the next shard in turn that has one. Shards that said nothing are not asked.
    pub fn accept(&mut self, listener: u32) -> Option<Conn> {
        if let [only] = self.clients.as_mut_slice() {
            self.dirty = 1;
            return only.accept(listener);
        }
        let count = self.clients.len();
        let spread = self.listeners.get_mut(listener as usize)?.as_mut()?;
        spread.offering &= u64::MAX >> (SHARDS_MAX - count);
        while spread.offering != 0 {
            let behind = spread.offering & u64::MAX.unbounded_shl(spread.turn as u32);
            let shard = if behind != 0 { behind } else { spread.offering }.trailing_zeros() as usize;
            if let Some(conn) = self.clients[shard].accept(spread.numbers[shard]) {
                spread.turn = (shard + 1) % count;
                self.dirty |= 1 << shard;
                return Some(self.here(shard, conn));
            }
            spread.offering &= !(1 << shard);
        }
        None
    }

    /// Whether a connection could be accepted.
    pub fn is_offered(&mut self, listener: u32) -> bool {
        if let [only] = self.clients.as_mut_slice() {
            return only.is_offered(listener);
        }
        let count = self.clients.len();
        let Some(Some(spread)) = self.listeners.get_mut(listener as usize) else { return false };
        spread.offering &= u64::MAX >> (SHARDS_MAX - count);
        while spread.offering != 0 {
            let shard = spread.offering.trailing_zeros() as usize;
            if self.clients[shard].is_offered(spread.numbers[shard]) {
                return true;
            }
            spread.offering &= !(1 << shard);
        }
        false
    }

    /// Opens a connection on the shard where its answers arrive: any shard that may choose the port, and the one that the port says otherwise.
    pub fn connect(&mut self, remote: SocketAddr, options: ConnectOptions) -> Result<Conn, Error> {
        let count = self.clients.len();
        let mut refused = None;
        for _ in 0..count {
            let shard = self.opener;
            self.opener = (shard + 1) % count;
            match self.clients[shard].connect(remote, options) {
                Ok(conn) => {
                    self.dirty |= 1 << shard;
                    return Ok(self.here(shard, conn));
                }
                Err(
                    error @ Error::Connect(
                        _,
                        ConnectError::AddressNotAvailable | ConnectError::PortsExhausted,
                    ),
                ) => {
                    refused = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(refused.unwrap_or(Error::Connect(remote, ConnectError::TooMany)))
    }

    /// The same for one with no options that SYN carries and no address of its own, without a question where that can be ([`Client::connect_unasked`]).
    pub fn connect_unasked(&mut self, remote: SocketAddr) -> Result<Conn, Error> {
        let shard = self.opener;
        self.opener = (shard + 1) % self.clients.len();
        self.dirty |= 1 << shard;
        match self.clients[shard].connect_unasked(remote) {
            Ok(conn) => Ok(self.here(shard, conn)),
            // It was asked, and another may have a port.
            Err(Error::Connect(_, ConnectError::AddressNotAvailable | ConnectError::PortsExhausted)) => {
                self.connect(remote, ConnectOptions::default())
            }
            Err(error) => Err(error),
        }
    }

    /// Why a connection could not be opened, if that is why it is over.
    pub fn refusal(&self, conn: Conn) -> Option<ConnectError> {
        let (client, conn) = self.of(conn).ok()?;
        client.refusal(conn)
    }

    /// The next thing that happened, from all in turn.
    #[inline]
    pub fn next_event(&mut self) -> Option<ClientEvent> {
        if let [only] = self.clients.as_mut_slice() {
            return only.next_event();
        }
        for _ in 0..self.clients.len() {
            let shard = self.turn;
            if let Some(event) = self.clients[shard].next_event() {
                return Some(self.event_here(shard, event));
            }
            self.turn = (shard + 1) % self.clients.len();
        }
        None
    }

    fn event_here(&mut self, shard: usize, event: ClientEvent) -> ClientEvent {
        let listener_here = |this: &mut Self, number: u32| {
            let here = this.spread[shard].get(number as usize).copied().unwrap_or(0).checked_sub(1)?;
            let spread = this.listeners.get_mut(here as usize)?.as_mut()?;
            spread.offering |= 1 << shard;
            Some(here)
        };
        match event {
            // Of one that is no longer there: a number that nobody has.
            ClientEvent::Offered { listener } => {
                ClientEvent::Offered { listener: listener_here(self, listener).unwrap_or(u32::MAX) }
            }
            ClientEvent::Accepted { conn, listener } => ClientEvent::Accepted {
                conn: self.here(shard, conn),
                listener: listener_here(self, listener).unwrap_or(u32::MAX),
            },
            ClientEvent::Connected { conn } => ClientEvent::Connected { conn: self.here(shard, conn) },
            ClientEvent::Readable { conn } => ClientEvent::Readable { conn: self.here(shard, conn) },
            ClientEvent::Writable { conn } => ClientEvent::Writable { conn: self.here(shard, conn) },
            ClientEvent::Acked { conn, bytes } => ClientEvent::Acked { conn: self.here(shard, conn), bytes },
            ClientEvent::Urgent { conn } => ClientEvent::Urgent { conn: self.here(shard, conn) },
            ClientEvent::Datagrams { conn } => ClientEvent::Datagrams { conn: self.here(shard, conn) },
            ClientEvent::PeerClosed { conn } => ClientEvent::PeerClosed { conn: self.here(shard, conn) },
            ClientEvent::Closed { conn, reason } => {
                ClientEvent::Closed { conn: self.here(shard, conn), reason }
            }
        }
    }

    /// Tells the shards at once of what was done.
    #[inline]
    pub fn flush(&mut self) {
        if self.dirty != 0 {
            self.flush_all();
        }
    }

    fn flush_all(&mut self) {
        let mut dirty = core::mem::take(&mut self.dirty);
        while dirty != 0 {
            self.clients[dirty.trailing_zeros() as usize].flush();
            dirty &= dirty - 1;
        }
    }

    /// What wakes the process, whichever shard has news.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.clients[0].wake_fd()
    }

    /// To be called before sleeping. False if something happened: do not sleep.
    pub fn before_sleep(&mut self) -> bool {
        self.clients.iter_mut().all(Client::before_sleep)
    }

    pub fn after_sleep(&mut self) {
        if self.unread > 0 {
            // Here the level counts.
            self.read_wakes();
        }
        self.clients.iter_mut().for_each(|client| client.after_sleep(true));
        if self.is_gone() {
            // One has found out, and another had to do with its bells.
            self.look_for_end();
        }
    }

    /// Looks whether the stack is gone. Who never sleeps finds out only so.
    pub fn look_for_end(&mut self) {
        self.clients.iter_mut().for_each(Client::look_for_end);
    }

    /// The same after a sleep on the edges of [`wake_fd`](Self::wake_fd): whether there was one, and whether nobody holds the other end any more.
    pub fn after_nap(&mut self, rang: bool, hung_up: bool) {
        // Whoever wakes the process writes one byte.
        let wakes = self.clients.iter_mut().map(|client| u32::from(client.after_nap())).sum::<u32>();
        self.unread += wakes.max(rang.into());
        if self.unread >= UNREAD_MAX || hung_up {
            self.read_wakes();
        }
        if hung_up {
            // It stands behind what was not read.
            self.look_for_end();
        }
    }

    /// Reads what was not read after naps.
    fn read_wakes(&mut self) {
        self.unread = 0;
        self.clients[0].clear_wake();
    }

    /// Whether a shard is at work at this moment, on another CPU than the caller: then news may come without sleeping.
    pub fn stack_works_elsewhere(&self) -> bool {
        self.clients.iter().any(Client::stack_works_elsewhere)
    }

    /// Whether the stack is gone, and all of its shards with it.
    pub fn is_gone(&self) -> bool {
        self.clients.iter().any(Client::is_gone)
    }

    /// Whether the addresses of the stack can be used.
    pub fn is_ready(&self) -> bool {
        self.clients.iter().all(Client::is_ready)
    }

    #[inline]
    pub fn buffer_bytes(&self) -> usize {
        self.clients[0].buffer_bytes()
    }
}

/// Descriptions that this process shares with others. Of a listener the first shard keeps what all agree on.
impl Channels {
    #[inline]
    fn common(&self, of: CommonOf) -> Option<(&Client, CommonOf)> {
        match of {
            CommonOf::Socket(conn) => {
                self.of(conn).ok().map(|(client, conn)| (client, CommonOf::Socket(conn)))
            }
            CommonOf::Listener(listener) => {
                Some((self.clients.get(KEEPER)?, CommonOf::Listener(self.number(listener, KEEPER)?)))
            }
        }
    }

    #[inline]
    pub fn common_version(&self, of: CommonOf) -> u32 {
        self.common(of).map_or(0, |(client, of)| client.common_version(of))
    }

    pub fn tell_common(&self, of: CommonOf, bytes: &[u8]) -> Option<u32> {
        let (client, of) = self.common(of)?;
        client.tell_common(of, bytes)
    }

    pub fn common_told(&self, of: CommonOf) -> Option<(u32, Vec<u8>)> {
        let (client, of) = self.common(of)?;
        client.common_told(of)
    }
}

/// What is done with a connection: the same as of a channel.
impl Channels {
    #[inline(always)]
    pub fn status(&self, conn: Conn) -> Result<Status, Stale> {
        let (client, conn) = self.of(conn)?;
        client.status(conn)
    }

    #[inline]
    pub fn standing(&self, conn: Conn) -> Result<Standing, Stale> {
        let (client, conn) = self.of(conn)?;
        client.standing(conn)
    }

    #[inline]
    pub fn status_beside(&self, conn: Conn, standing: Standing) -> Result<Status, Stale> {
        let (client, conn) = self.of(conn)?;
        client.status_beside(conn, standing)
    }

    #[inline]
    pub fn recv_into(
        &mut self,
        conn: Conn,
        buffers: &mut [IoSliceMut<'_>],
        skip: usize,
    ) -> Result<(Standing, Option<usize>), Stale> {
        let (shard, conn) = self.there(conn);
        let client = self.clients.get_mut(shard).ok_or(Stale::Handle)?;
        let result = client.recv_into(conn, buffers, skip);
        // Mostly the stack need not hear of it.
        self.dirty |= u64::from(client.has_rung()) << shard;
        result
    }

    pub fn peer(&self, conn: Conn) -> Result<SocketAddr, Stale> {
        let (client, conn) = self.of(conn)?;
        client.peer(conn)
    }

    pub fn ends(&self, conn: Conn) -> Result<[SocketAddr; 2], Stale> {
        let (client, conn) = self.of(conn)?;
        client.ends(conn)
    }

    #[inline]
    pub fn peek(&self, conn: Conn, skip: usize, out: &mut [u8]) -> Result<usize, RecvError> {
        let (client, conn) = self.of(conn).map_err(|_| RecvError::Stale)?;
        client.peek(conn, skip, out)
    }

    #[inline]
    pub fn consume(&mut self, conn: Conn, count: usize) -> Result<(), Stale> {
        let (client, conn) = self.with(conn)?;
        client.consume(conn, count)
    }

    #[inline]
    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        let (client, conn) = self.with(conn).map_err(|_| SendError::Stale)?;
        client.send(conn, bytes)
    }

    pub fn await_room(&mut self, conn: Conn, enough: usize) -> Result<bool, Stale> {
        let (client, conn) = self.with(conn)?;
        client.await_room(conn, enough)
    }

    pub fn room_below(&mut self, conn: Conn, len: u32, most: (u32, u32)) -> Result<u32, Stale> {
        let (client, conn) = self.with(conn)?;
        client.room_below(conn, len, most)
    }

    pub fn written(&mut self, conn: Conn) -> Result<u64, Stale> {
        let (client, conn) = self.with(conn)?;
        client.written(conn)
    }

    pub fn not_sent(&mut self, conn: Conn) -> Result<usize, Stale> {
        let (client, conn) = self.with(conn)?;
        client.not_sent(conn)
    }

    pub fn end_record(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.with(conn)?;
        client.end_record(conn)
    }

    pub fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.with(conn)?;
        client.shutdown_write(conn)
    }

    pub fn abort(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.with(conn)?;
        client.abort(conn)
    }

    pub fn release(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.with(conn)?;
        client.release(conn)
    }

    pub fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError> {
        let (client, conn) = self.with(conn).map_err(|_| OptionError::Stale)?;
        client.set_option(conn, option)
    }

    pub fn info(&mut self, conn: Conn) -> Result<Box<TcpInfo>, Stale> {
        let (client, conn) = self.with(conn)?;
        client.info(conn)
    }

    pub fn send_urgent(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        let (client, conn) = self.with(conn).map_err(|_| SendError::Stale)?;
        client.send_urgent(conn, bytes)
    }

    pub fn mark(&mut self, conn: Conn) -> Result<Option<Mark>, Stale> {
        let (client, conn) = self.with(conn)?;
        client.mark(conn)
    }

    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        let (client, conn) = self.with(conn).map_err(|_| RecvError::Stale)?;
        client.recv_urgent(conn)
    }

    pub fn shutdown_read(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.with(conn)?;
        client.shutdown_read(conn)
    }
}

/// UDP sockets. Each has its home on one shard, which gets what comes for it wherever it arrives.
impl Channels {
    /// Opens one beside the thread that asks, if that is bound to the CPU of a shard, and otherwise on one shard after the other: so are sockets that share a
    /// port by `SO_REUSEPORT`, over which datagrams are spread by sender.
    pub fn udp_open(&mut self, local: SocketAddr, options: UdpOptions) -> Result<Conn, Error> {
        let count = self.clients.len();
        let first = if count == 1 { 0 } else { self.beside().unwrap_or(self.udp_home) };
        let mut refused = Error::Udp(local, UdpError::Stale);
        for shard in (first..count).chain(0..first) {
            match self.clients[shard].udp_open(local, options) {
                Ok(conn) => {
                    self.udp_home = (shard + 1) % count;
                    return Ok(self.here(shard, conn));
                }
                // Another may have ports to choose from, or room; and what has the port may share it on its own shard only.
                Err(
                    error @ Error::Udp(
                        _,
                        UdpError::AddressInUse | UdpError::AddressNotAvailable | UdpError::TooMany,
                    ),
                ) => {
                    refused = error;
                }
                Err(error) => return Err(error),
            }
        }
        Err(refused)
    }

    pub fn udp_connect(&mut self, conn: Conn, remote: SocketAddr) -> Result<(), UdpError> {
        let (client, conn) = self.with(conn).map_err(|_| UdpError::Stale)?;
        client.udp_connect(conn, remote)
    }

    pub fn udp_set_options(&mut self, conn: Conn, options: UdpOptions) -> Result<(), UdpError> {
        let (client, conn) = self.with(conn).map_err(|_| UdpError::Stale)?;
        client.udp_set_options(conn, options)
    }

    pub fn udp_send_from(&mut self, conn: Conn, sending: &UdpSending, data: &[u8]) -> Result<(), UdpError> {
        let (client, conn) = self.with(conn).map_err(|_| UdpError::Stale)?;
        client.udp_send_from(conn, sending, data)
    }

    pub fn udp_post(
        &mut self,
        conn: Conn,
        sending: &UdpSending,
        buffers: &[IoSlice<'_>],
    ) -> Result<(), UdpError> {
        let (client, conn) = self.with(conn).map_err(|_| UdpError::Stale)?;
        client.udp_post(conn, sending, buffers)
    }

    pub fn udp_take(
        &mut self,
        conn: Conn,
        buffers: &mut [IoSliceMut<'_>],
        take: bool,
    ) -> Result<Arrived, UdpError> {
        let (client, conn) = self.with(conn).map_err(|_| UdpError::Stale)?;
        client.udp_take(conn, buffers, take)
    }

    pub fn udp_error(&self, conn: Conn, take: bool) -> Option<UdpError> {
        let (client, conn) = self.of(conn).ok()?;
        client.udp_error(conn, take)
    }

    pub fn udp_has_reports(&self, conn: Conn) -> bool {
        self.of(conn).is_ok_and(|(client, conn)| client.udp_has_reports(conn))
    }

    pub fn udp_take_report(&mut self, conn: Conn) -> Result<Box<(UdpReport, Vec<u8>)>, UdpError> {
        let (client, conn) = self.with(conn).map_err(|_| UdpError::Stale)?;
        client.udp_take_report(conn)
    }

    pub fn udp_path_mtu(&mut self, conn: Conn) -> Result<u16, UdpError> {
        let (client, conn) = self.with(conn).map_err(|_| UdpError::Stale)?;
        client.udp_path_mtu(conn)
    }

    pub fn udp_stamp(&mut self, conn: Conn) -> Result<(), Stale> {
        let (client, conn) = self.with(conn)?;
        client.udp_stamp(conn)
    }

    pub fn udp_next_bytes(&self, conn: Conn) -> Option<usize> {
        let (client, conn) = self.of(conn).ok()?;
        client.udp_next_bytes(conn)
    }
}
