//! What a handler can do.

use crate::engine::Engine;
use crate::error::Error;
use crate::rng::Rng;
use crate::stats::ShardStats;
use crate::timers::{Timer, Timers};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::error::{OptionError, SendError, Stale};
use ginnel_stack::handle::{Conn, Listener};
use ginnel_stack::options::{ConnectOptions, ListenOptions, TcpInfo, TcpOption};
use ginnel_stack::tcp::source::{Source, SourceId};
use ginnel_stack::tcp::state::State;
use ginnel_stack::time::Instant;

/// Everything of a shard but its devices and its handler.
pub(crate) struct Core {
    pub(crate) now: Instant,
    pub(crate) engine: Box<dyn Engine>,
    pub(crate) timers: Timers,
    pub(crate) rng: Rng,
    pub(crate) stats: ShardStats,
    /// Connections whose handler wants to be shown what it left unread.
    pub(crate) resume: Vec<Conn>,
    /// The connection whose `closed` is running, and its token.
    pub(crate) closing: Option<(Conn, u32)>,
    pub(crate) stopping: bool,
}

/// A handler's way to its shard. Lent for one call.
pub struct Context<'a> {
    core: &'a mut Core,
}

impl<'a> Context<'a> {
    pub(crate) fn new(core: &'a mut Core) -> Self {
        Self { core }
    }

    /// The time of the current burst.
    pub fn now(&self) -> Instant {
        self.core.now
    }

    /// Listens on `local`; an unspecified address stands for all of the stack's. Port 0 is refused.
    pub fn listen(&mut self, local: SocketAddr, options: ListenOptions) -> Result<Listener, Error> {
        self.core.engine.listen(local, options).map_err(|e| Error::Listen(local, e))
    }

    /// Stops listening. Connections already accepted go on, those still in the queue are reset.
    pub fn unlisten(&mut self, listener: Listener) -> Result<(), Stale> {
        self.core.engine.unlisten(listener)
    }

    /// Opens a connection. The outcome is [`connected`](crate::Handler::connected) or [`closed`](crate::Handler::closed).
    pub fn connect(&mut self, remote: SocketAddr, options: ConnectOptions) -> Result<Conn, Error> {
        self.core.engine.connect(self.core.now, remote, options).map_err(|e| Error::Connect(remote, e))
    }

    /// Queues a copy of as many of `bytes` as there is room for, and returns how many. If that is less than all,
    /// [`writable`](crate::Handler::writable) follows when there is room again.
    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        self.core.engine.send(conn, bytes)
    }

    /// Queues `len` bytes of a source from `offset` on, without copying them. All or nothing: [`SendError::Full`] means that nothing was
    /// queued and [`writable`](crate::Handler::writable) follows.
    pub fn send_source(&mut self, conn: Conn, id: SourceId, offset: u64, len: u64) -> Result<(), SendError> {
        self.core.engine.send_source(conn, id, offset, len)
    }

    /// Registers a source of bytes. It lives until it is released and no connection needs it any more.
    pub fn add_source(&mut self, source: Box<dyn Source>) -> SourceId {
        self.core.engine.add_source(source)
    }

    /// Gives a source back. Ranges already queued are still sent.
    pub fn release_source(&mut self, id: SourceId) {
        self.core.engine.release_source(id);
    }

    /// Sends FIN after what is queued; receiving goes on.
    pub fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale> {
        self.core.engine.shutdown_write(conn)
    }

    /// Closes both directions: what is queued is still sent, then FIN. What was received and not consumed makes it a reset, as on Linux.
    /// [`closed`](crate::Handler::closed) follows.
    pub fn close(&mut self, conn: Conn) -> Result<(), Stale> {
        self.core.engine.close(conn)
    }

    /// Sends RST and forgets what is queued. [`closed`](crate::Handler::closed) follows.
    pub fn abort(&mut self, conn: Conn) -> Result<(), Stale> {
        self.core.engine.abort(conn)
    }

    /// Sets one option of a connection.
    pub fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError> {
        self.core.engine.set_option(conn, option)
    }

    /// What is known about a connection.
    pub fn info(&self, conn: Conn) -> Result<TcpInfo, Stale> {
        self.core.engine.info(conn)
    }

    /// The state of a connection.
    pub fn state(&self, conn: Conn) -> Result<State, Stale> {
        self.core.engine.state(conn)
    }

    /// Stores a number of the application's with the connection.
    pub fn set_token(&mut self, conn: Conn, token: u32) -> Result<(), Stale> {
        self.core.engine.set_token(conn, token)
    }

    /// The number stored last, 0 if none was.
    pub fn token(&self, conn: Conn) -> Result<u32, Stale> {
        match self.core.closing {
            Some((closing, token)) if closing == conn => Ok(token),
            _ => self.core.engine.token(conn),
        }
    }

    /// Asks for what [`data`](crate::Handler::data) left unconsumed to be shown again, after this call returns.
    pub fn resume_reading(&mut self, conn: Conn) {
        self.core.resume.push(conn);
    }

    /// Calls [`timer`](crate::Handler::timer) with `token` once, `after` from now (rounded up, by at most
    /// [`TIMER_TICK`](crate::timers::TIMER_TICK)). `None` if `shard.timers_max` timers are set already.
    pub fn set_timer(&mut self, after: Duration, token: u64) -> Option<Timer> {
        self.core.timers.set(self.core.now + after, token)
    }

    /// Takes a timer back. False if it has run out already.
    pub fn cancel_timer(&mut self, timer: Timer) -> bool {
        self.core.timers.cancel(timer)
    }

    /// What the shard has counted.
    pub fn stats(&self) -> &ShardStats {
        &self.core.stats
    }

    /// A random number: not predictable from outside, reproducible in a simulation.
    pub fn random_u64(&mut self) -> u64 {
        self.core.rng.next_u64()
    }

    /// Ends the shard after this turn. Connections that are open then are simply forgotten, so close them first where it matters.
    pub fn stop(&mut self) {
        self.core.stopping = true;
    }
}
