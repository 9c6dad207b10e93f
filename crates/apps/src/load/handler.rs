//! Runs the generator on a shard.

use super::options::Job;
use super::plan::WorkerShare;
use super::run::{self, LoadJob, LoadSession};
use super::session::Network;
use super::stats::{Failure, LiveProgress, Stats};
use core::net::{IpAddr, SocketAddr};
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use ginnel::{
    CloseReason, Conn, ConnectError, ConnectOptions, Context, Error, Handler, Instant, SocketOptions, Timer,
};
use std::sync::{Arc, Mutex};

/// Timer token: the session is due.
const POLL: u64 = 0;
/// Timer token: [`LINGER`] has passed since the run ended.
const STOP: u64 = 1;
/// Time after the run in which the last FINs are sent.
const LINGER: Duration = Duration::from_millis(100);
const NO_SLOT: u32 = u32::MAX;

/// Results of a generator, shared with its creator.
pub type SharedStats<S = Stats> = Arc<Mutex<Option<S>>>;

/// The generator as a shard's application: one worker of a job.
pub struct LoadHandler<J: LoadJob = Job> {
    job: J,
    share: WorkerShare,
    progress: Arc<LiveProgress>,
    outcome: SharedStats<J::Stats>,
    /// Set when the shard starts.
    session: Option<J::Session>,
    links: Links,
    timer: Option<(Timer, Instant)>,
    ended: bool,
    /// True if [`LINGER`] has passed since the run ended.
    has_lingered: bool,
    /// True if the shard was asked to stop.
    is_stop_requested: bool,
    /// Number of workers on the shards of the same stack whose runs are not over, including this one. No
    /// shard stops before the others are finished.
    running: Option<Arc<AtomicU32>>,
}

/// Maps slots to connections and back.
#[derive(Default)]
struct Links {
    conn_of: Vec<Option<LinkedConn>>,
    slot_of: Vec<u32>,
}

/// The connection of a slot.
#[derive(Clone, Copy)]
struct LinkedConn {
    conn: Conn,
    is_established: bool,
}

impl Links {
    fn slot(&self, conn: Conn) -> Option<u32> {
        let slot = *self.slot_of.get(conn.index() as usize)?;
        (self.conn(slot)? == conn).then_some(slot)
    }

    fn conn(&self, slot: u32) -> Option<Conn> {
        let linked = (*self.conn_of.get(slot as usize)?)?;
        Some(linked.conn)
    }

    fn set_established(&mut self, slot: u32) {
        if let Some(Some(linked)) = self.conn_of.get_mut(slot as usize) {
            linked.is_established = true;
        }
    }

    fn link(&mut self, slot: u32, conn: Conn) {
        let (s, c) = (slot as usize, conn.index() as usize);
        if self.conn_of.len() <= s {
            self.conn_of.resize(s + 1, None);
        }
        if self.slot_of.len() <= c {
            self.slot_of.resize(c + 1, NO_SLOT);
        }
        self.conn_of[s] = Some(LinkedConn { conn, is_established: false });
        self.slot_of[c] = slot;
    }

    fn unlink(&mut self, slot: u32) -> Option<LinkedConn> {
        self.conn_of.get_mut(slot as usize)?.take()
    }
}

impl<J: LoadJob> LoadHandler<J> {
    /// Creates the generator for worker `worker` of `workers`, which stores its results in `outcome`.
    pub fn new(
        job: J,
        worker: u32,
        workers: u32,
        progress: Arc<LiveProgress>,
        outcome: SharedStats<J::Stats>,
    ) -> Self {
        Self::of_share(job, WorkerShare { worker, workers }, progress, outcome)
    }

    /// Creates the generator for this share of a job, which stores its results in `outcome`.
    pub fn of_share(
        job: J,
        share: WorkerShare,
        progress: Arc<LiveProgress>,
        outcome: SharedStats<J::Stats>,
    ) -> Self {
        let links = Links::default();
        Self {
            job,
            share,
            progress,
            outcome,
            session: None,
            links,
            timer: None,
            ended: false,
            has_lingered: false,
            is_stop_requested: false,
            running: None,
        }
    }

    /// Makes the generator one of several on shards of one stack. `running` counts those whose runs are not
    /// over.
    pub(super) fn in_group(mut self, running: Arc<AtomicU32>) -> Self {
        self.running = Some(running);
        self
    }

    /// Returns the results once the run is over.
    pub(super) fn measured(&self) -> Option<J::Stats> {
        self.outcome.lock().ok()?.clone()
    }

    /// Returns true once the run is over and its results are stored.
    pub const fn is_done(&self) -> bool {
        self.ended
    }

    /// Calls the session, and re-arms the timer if the session is due earlier.
    fn act(
        &mut self,
        cx: &mut Context<'_>,
        act: impl FnOnce(&mut J::Session, Instant, &mut ShardNetwork<'_, '_>),
    ) {
        let Some(session) = &mut self.session else { return };
        let now = cx.now();
        act(session, now, &mut ShardNetwork { cx, links: &mut self.links });
        run::think(session.take_think_time());
        // The session's own deadlines are handled when the timer expires; only a request that is due earlier
        // needs another timer.
        if let (Some((_, at)), Some(due)) = (self.timer, session.next_arrival())
            && due < at
        {
            self.arm(cx, due);
        }
    }

    fn arm(&mut self, cx: &mut Context<'_>, at: Instant) {
        if let Some((timer, _)) = self.timer.take() {
            cx.cancel_timer(timer);
        }
        // Only the requests of an open loop need an exact timer.
        let is_exact = self.session.as_ref().and_then(LoadSession::next_arrival).is_some();
        let timer = match is_exact {
            true => cx.set_exact_timer(at, POLL),
            false => cx.set_timer(at.saturating_since(cx.now()), POLL),
        };
        self.timer = timer.map(|timer| (timer, at));
    }

    fn poll(&mut self, cx: &mut Context<'_>) {
        self.timer = None;
        let mut next = None;
        self.act(cx, |session, now, net| next = session.poll(now, net));
        match next {
            Some(at) => self.arm(cx, at),
            None if !self.ended => {
                self.ended = true;
                if let (Some(session), Ok(mut outcome)) = (&self.session, self.outcome.lock()) {
                    *outcome = Some(session.stats().clone());
                }
                if let Some(running) = &self.running {
                    running.fetch_sub(1, Ordering::AcqRel);
                }
                if cx.set_timer(LINGER, STOP).is_none() {
                    self.has_lingered = true;
                }
            }
            None => {}
        }
        self.stop_if_group_done(cx);
    }

    /// Stops the shard if the runs of all workers are over. The last shard to finish stops the others, too.
    fn stop_if_group_done(&self, cx: &mut Context<'_>) {
        let is_last = self.running.as_ref().is_none_or(|running| running.load(Ordering::Acquire) == 0);
        if self.has_lingered && (is_last || self.is_stop_requested) {
            cx.stop();
        }
    }
}

impl<J: LoadJob> Handler for LoadHandler<J> {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.session = Some(self.job.session(self.share, Arc::clone(&self.progress), cx.now()));
        self.poll(cx);
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Some(slot) = self.links.slot(conn) {
            self.links.set_established(slot);
            self.act(cx, |session, now, net| session.connected(slot, now, net));
        }
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        if let Some(slot) = self.links.slot(conn) {
            self.act(cx, |session, now, net| session.data(slot, data, now, net));
        }
        data.len()
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Some(slot) = self.links.slot(conn) {
            self.act(cx, |session, now, net| session.writable(slot, now, net));
        }
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        // A connection without a slot has been closed by the session.
        if let Some(slot) = self.links.slot(conn) {
            self.act(cx, |session, now, net| session.peer_closed(slot, now, net));
        }
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        if let Some(slot) = self.links.slot(conn) {
            let is_established = self.links.unlink(slot).is_some_and(|linked| linked.is_established);
            let failure = failure(reason, is_established);
            self.act(cx, |session, now, net| session.ended(slot, failure, now, net));
        }
    }

    fn timer(&mut self, cx: &mut Context<'_>, token: u64) {
        if token == STOP {
            self.has_lingered = true;
            self.stop_if_group_done(cx);
        } else {
            self.poll(cx);
        }
    }

    fn stopping(&mut self, cx: &mut Context<'_>) {
        if let Some(session) = &mut self.session {
            session.interrupt(cx.now());
        }
        self.is_stop_requested = true;
        self.poll(cx);
    }
}

/// Returns the failure of a connection that ended for `reason`.
const fn failure(reason: CloseReason, is_established: bool) -> Failure {
    match reason {
        CloseReason::Refused => Failure::Refused,
        CloseReason::TimedOut if is_established => Failure::Timeout,
        CloseReason::TimedOut => Failure::ConnectTimeout,
        CloseReason::HostUnreachable
        | CloseReason::NetUnreachable
        | CloseReason::ProtocolUnreachable
        | CloseReason::HostDown
        | CloseReason::HostIsolated
        | CloseReason::SourceRouteFailed
        | CloseReason::Prohibited
        | CloseReason::ProtocolError => Failure::Unreachable,
        CloseReason::Normal => Failure::ClosedEarly,
        CloseReason::Reset | CloseReason::Aborted | CloseReason::Destroyed => Failure::Reset,
    }
}

/// The shard's context as the session's network.
struct ShardNetwork<'a, 'c> {
    cx: &'a mut Context<'c>,
    links: &'a mut Links,
}

impl Network for ShardNetwork<'_, '_> {
    fn connect(&mut self, slot: u32, to: SocketAddr, from: Option<IpAddr>) -> Result<(), Failure> {
        let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
        let local = from.map(|address| SocketAddr::new(address, 0));
        match self.cx.connect(to, ConnectOptions { local, socket, ..ConnectOptions::default() }) {
            Ok(conn) => {
                self.links.link(slot, conn);
                Ok(())
            }
            Err(Error::Connect(_, ConnectError::NetUnreachable | ConnectError::InvalidAddress)) => {
                Err(Failure::Unreachable)
            }
            Err(_) => Err(Failure::Exhausted),
        }
    }

    fn send(&mut self, slot: u32, bytes: &[u8]) -> usize {
        match self.links.conn(slot) {
            // A closed connection sends nothing; `closed` will be called.
            Some(conn) => self.cx.send(conn, bytes).unwrap_or(0),
            None => 0,
        }
    }

    fn close(&mut self, slot: u32) {
        if let Some(LinkedConn { conn, .. }) = self.links.unlink(slot) {
            let _ = self.cx.close(conn); // gone already: nothing to close
        }
    }

    fn abort(&mut self, slot: u32) {
        if let Some(LinkedConn { conn, .. }) = self.links.unlink(slot) {
            let _ = self.cx.abort(conn); // gone already: nothing to reset
        }
    }
}
