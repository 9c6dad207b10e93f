//! One of several shards: what it has to do with the others.

use crate::board::{Board, Posted, Sharer, State};
use crate::mailbox::Outbox;
use crate::stats::ShardStats;
use core::net::SocketAddr;
use ginnel_stack::device::{RxBurst, RxFrame};
use ginnel_stack::error::ListenError;
use ginnel_stack::handle::{Listener, PortId, UdpHandle};
use ginnel_stack::options::ListenOptions;
use ginnel_stack::stack::Stack;
use ginnel_stack::steering::udp::UdpClaim;
use ginnel_stack::steering::{Home, Steering};
use ginnel_stack::udp::{UdpError, UdpOptions};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A port that was chosen turns out to be taken only if somebody has bound it by name since the last turn.
const CHOICES_MAX: usize = 16;

/// A shard's way to the others.
pub(crate) struct Peers {
    me: u8,
    /// By number of the shard; `None` at this one's.
    out: Vec<Option<Outbox>>,
    board: Arc<Board>,
    /// The change of the board that was taken over last.
    seen: u64,
    /// A listener could not be opened, perhaps because its address is not ours yet.
    incomplete: bool,
    listeners: BTreeMap<SocketAddr, Known>,
    /// Listeners of this shard that share their addresses, with their numbers on the board.
    sharers: Vec<(Listener, u64)>,
    /// Numbers and ports of the claims of this shard's sockets.
    udp: BTreeMap<UdpHandle, (u64, u16)>,
}

/// A listener of the board on this shard.
struct Known {
    id: u64,
    listener: Listener,
    /// This shard's application listens too.
    is_used: bool,
}

impl Peers {
    pub(crate) fn new(me: u8, out: Vec<Option<Outbox>>, board: Arc<Board>) -> Self {
        Self {
            me,
            out,
            board,
            seen: 0,
            incomplete: false,
            listeners: BTreeMap::new(),
            sharers: Vec::new(),
            udp: BTreeMap::new(),
        }
    }

    /// Leaves in `burst` what belongs to this shard, and sends the rest on.
    pub(crate) fn steer(
        &mut self,
        steering: Option<&Steering>,
        port: PortId,
        burst: &mut RxBurst<'_>,
        stats: &mut ShardStats,
    ) {
        let Some(steering) = steering else { return };
        burst.retain(|frame| match self.home(steering, frame, stats) {
            Home::Shard(home) if home == self.me => true,
            Home::Shard(home) => {
                self.send(home, port, frame, stats);
                false
            }
            Home::Every => {
                self.send_to_all(port, frame, stats);
                true
            }
            Home::First { .. } if self.me != 0 => {
                self.send(0, port, frame, stats);
                false
            }
            Home::First { told } => !told || self.tell_all(port, frame, stats),
        });
        self.publish();
    }

    /// Where a frame belongs. A hash that its sender has computed is enough to stay, but a hop costs more than computing it: it is checked before. So no sender can fill
    /// mailboxes with frames that do not belong there.
    #[inline]
    fn home(&self, steering: &Steering, frame: &RxFrame<'_>, stats: &mut ShardStats) -> Home {
        if frame.label.hash().is_none() {
            return steering.home(frame.bytes);
        }
        let said = steering.home_of(frame);
        if said == Home::Shard(self.me) {
            stats.hashes_taken += 1;
            return said;
        }
        let home = steering.home(frame.bytes);
        stats.hashes_wrong += u64::from(said != home);
        home
    }

    /// Sends frames of a burst home that a wrong hash kept here, a bit of `frames` for each: the engine does not know their flows, and has done nothing with them.
    #[cold]
    pub(crate) fn redirect(
        &mut self,
        steering: Option<&Steering>,
        port: PortId,
        burst: &RxBurst<'_>,
        frames: u64,
        stats: &mut ShardStats,
    ) {
        let Some(steering) = steering else { return };
        for (_, frame) in burst.iter().enumerate().filter(|(index, _)| frames >> index & 1 != 0) {
            stats.hashes_taken -= 1;
            stats.hashes_wrong += 1;
            if let Home::Shard(home) = steering.home(frame.bytes) {
                self.send(home, port, frame, stats);
            }
        }
        self.publish();
    }

    /// A frame that another shard has sent here stays here, wherever it would belong by now: frames make one hop. Returns false if it may not be
    /// processed, because the others could not be told.
    pub(crate) fn admits(
        &mut self,
        steering: Option<&Steering>,
        port: PortId,
        frame: &RxFrame<'_>,
        stats: &mut ShardStats,
    ) -> bool {
        let first = self.me == 0;
        match steering {
            Some(steering) if first && steering.home(frame.bytes) == (Home::First { told: true }) => {
                self.tell_all(port, frame, stats)
            }
            _ => true,
        }
    }

    fn send(&mut self, home: u8, port: PortId, frame: &RxFrame<'_>, stats: &mut ShardStats) {
        let Some(Some(out)) = self.out.get_mut(usize::from(home)) else { return };
        // Nobody looks at the hash again.
        let frame = RxFrame { label: frame.label.without_hash(), ..*frame };
        if out.send(port, &frame) {
            stats.frames_forwarded += 1;
        } else {
            stats.forwards_dropped += 1;
        }
    }

    fn send_to_all(&mut self, port: PortId, frame: &RxFrame<'_>, stats: &mut ShardStats) {
        // Cannot truncate: 64 shards at the most.
        (0..self.out.len() as u8).for_each(|home| self.send(home, port, frame, stats));
    }

    /// Lets all others see a frame that teaches something, or nobody: then it must not be seen here either.
    fn tell_all(&mut self, port: PortId, frame: &RxFrame<'_>, stats: &mut ShardStats) -> bool {
        if !self.out.iter_mut().flatten().all(|out| out.can_tell(frame.bytes.len())) {
            stats.tells_refused += 1;
            return false;
        }
        for out in self.out.iter_mut().flatten() {
            out.tell(port, frame);
            stats.told += 1;
        }
        true
    }

    /// Sends what the engine has for the others.
    pub(crate) fn exchange(&mut self, stack: &mut Stack, stats: &mut ShardStats) {
        while let Some(stray) = stack.next_stray() {
            let frame = RxFrame::new(&stray.frame);
            match stray.home {
                Home::Shard(home) => self.send(home, stray.port, &frame, stats),
                Home::Every => self.send_to_all(stray.port, &frame, stats),
                Home::First { .. } => self.send(0, stray.port, &frame, stats),
            }
        }
        while let Some(news) = stack.network_mut().next_news() {
            for out in self.out.iter_mut().flatten() {
                out.tell_news(news);
                stats.told += 1;
            }
        }
        self.publish();
    }

    fn publish(&mut self) {
        self.out.iter_mut().flatten().for_each(Outbox::publish);
    }

    /// True if something waits for room in a mailbox.
    pub(crate) fn is_behind(&self) -> bool {
        self.out.iter().flatten().any(Outbox::is_behind)
    }

    /// True if the board has changed.
    pub(crate) fn is_stale(&self) -> bool {
        self.board.version() != self.seen
    }

    /// An address became usable: what could not be listened on may be now.
    pub(crate) fn retry(&mut self, stack: &mut Stack, stats: &mut ShardStats) {
        if self.incomplete {
            self.sync(stack, stats);
        }
    }

    /// Takes over what stands on the board.
    pub(crate) fn sync(&mut self, stack: &mut Stack, stats: &mut ShardStats) {
        let board = Arc::clone(&self.board);
        self.take_over(&board.lock(), stack, stats);
    }

    fn take_over(&mut self, state: &State, stack: &mut Stack, stats: &mut ShardStats) {
        self.seen = state.version();
        self.listeners.retain(|address, known| {
            let stays = state.listeners.get(address).is_some_and(|posted| posted.id == known.id);
            if !stays {
                stack.unlisten(known.listener);
            }
            stays
        });
        self.incomplete = false;
        for (&address, posted) in &state.listeners {
            if self.listeners.contains_key(&address) {
                continue;
            }
            match stack.listen(address, posted.options) {
                Ok(listener) => {
                    self.listeners.insert(address, Known { id: posted.id, listener, is_used: false });
                }
                Err(error) => {
                    self.incomplete |= error == ListenError::AddressNotAvailable;
                    stats.listens_refused += 1;
                }
            }
        }
        if let Some(steering) = stack.network_mut().steering_mut() {
            steering.set_udp_homes(state.udp_homes());
        }
    }

    fn announce(&mut self, board: &Board, state: &mut State, stack: &mut Stack, stats: &mut ShardStats) {
        board.announce(state);
        self.take_over(state, stack, stats);
    }

    /// The others look at the board when they have their next turn.
    fn ring_all(&self) {
        self.out.iter().flatten().for_each(Outbox::ring);
    }

    /// Listens here and everywhere. What another shard listens on already is shared with it, as it is: whose handler gets a connection depends on
    /// where it arrives. Not so if `alone`: then it is in use. One that shares its address by `reuse_port` is this shard's own.
    pub(crate) fn listen(
        &mut self,
        stack: &mut Stack,
        stats: &mut ShardStats,
        address: SocketAddr,
        options: ListenOptions,
        alone: bool,
    ) -> Result<Listener, ListenError> {
        let board = Arc::clone(&self.board);
        let mut state = board.lock();
        self.take_over(&state, stack, stats);
        if state.sharers_conflict(address, &options) {
            return Err(ListenError::AddressInUse);
        }
        if options.reuse_port {
            let listener = stack.listen(address, options)?;
            let id = state.next_id();
            state.sharers.push(Sharer { id, at: address, options });
            self.sharers.push((listener, id));
            return Ok(listener);
        }
        if let Some(known) = self.listeners.get_mut(&address) {
            if alone || core::mem::replace(&mut known.is_used, true) {
                return Err(ListenError::AddressInUse);
            }
            return Ok(known.listener);
        }
        let listener = stack.listen(address, options)?;
        let id = state.next_id();
        state.listeners.insert(address, Posted { id, options });
        self.listeners.insert(address, Known { id, listener, is_used: true });
        self.announce(&board, &mut state, stack, stats);
        drop(state);
        self.ring_all();
        Ok(listener)
    }

    /// Stops listening, here and everywhere. False if somebody has done so already.
    pub(crate) fn unlisten(&mut self, stack: &mut Stack, stats: &mut ShardStats, listener: Listener) -> bool {
        if let Some(place) = self.sharers.iter().position(|(own, _)| *own == listener) {
            let (_, id) = self.sharers.swap_remove(place);
            self.board.lock().sharers.retain(|sharer| sharer.id != id);
            return stack.unlisten(listener);
        }
        let found = self.listeners.iter().find(|(_, known)| known.listener == listener);
        let Some((&address, known)) = found else { return stack.unlisten(listener) };
        let id = known.id;
        let board = Arc::clone(&self.board);
        let mut state = board.lock();
        if state.listeners.get(&address).is_none_or(|posted| posted.id != id) {
            self.take_over(&state, stack, stats);
            return false;
        }
        state.listeners.remove(&address);
        self.announce(&board, &mut state, stack, stats);
        drop(state);
        self.ring_all();
        true
    }

    /// Opens a UDP socket that lives here: its datagrams come here wherever they arrive.
    pub(crate) fn udp_bind(
        &mut self,
        stack: &mut Stack,
        stats: &mut ShardStats,
        local: SocketAddr,
        options: UdpOptions,
    ) -> Result<UdpHandle, UdpError> {
        let board = Arc::clone(&self.board);
        let mut state = board.lock();
        self.take_over(&state, stack, stats);
        let mut claim = UdpClaim { id: state.next_id(), shard: self.me, local, remote: None, options };
        if local.port() != 0 && state.udp_conflicts(&claim) {
            return Err(UdpError::AddressInUse);
        }
        for _ in 0..CHOICES_MAX {
            let socket = stack.udp_bind(local, options)?;
            claim.local = stack.udp_local(socket)?;
            if local.port() == 0 && state.udp_conflicts(&claim) {
                stack.udp_close(socket)?;
                continue;
            }
            self.udp.insert(socket, (claim.id, claim.local.port()));
            // Others may come to one that shares its port, also on other shards.
            if local.port() == 0 && !options.reuse_port {
                state.chosen.add(claim);
            } else {
                state.udp.add(claim);
                self.announce(&board, &mut state, stack, stats);
                drop(state);
                self.ring_all();
            }
            return Ok(socket);
        }
        Err(UdpError::AddressNotAvailable)
    }

    /// A socket of this shard has got a fixed other end.
    pub(crate) fn udp_connected(
        &mut self,
        stack: &mut Stack,
        stats: &mut ShardStats,
        socket: UdpHandle,
        remote: SocketAddr,
    ) {
        let (Some(&(id, _)), Ok(local)) = (self.udp.get(&socket), stack.udp_local(socket)) else { return };
        let board = Arc::clone(&self.board);
        let mut state = board.lock();
        if state.udp.connect(id, local, remote) {
            self.announce(&board, &mut state, stack, stats);
            drop(state);
            self.ring_all();
        }
    }

    /// A socket of this shard was closed.
    pub(crate) fn udp_closed(&mut self, stack: &mut Stack, stats: &mut ShardStats, socket: UdpHandle) {
        let Some((id, port)) = self.udp.remove(&socket) else { return };
        let board = Arc::clone(&self.board);
        let mut state = board.lock();
        state.chosen.remove(port, id);
        if state.udp.remove(port, id) {
            self.announce(&board, &mut state, stack, stats);
            drop(state);
            self.ring_all();
        }
    }
}
