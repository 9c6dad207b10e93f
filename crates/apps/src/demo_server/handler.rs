//! Runs the server on a shard.

use super::counters::WorkerCounters;
use super::options::DemoServerOptions;
use super::server::{DemoCore, StackConnections, Trace};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::stats::CounterKind;
use ginnel::{
    CloseReason, Conn, ConnectOptions, Context, Error, Handler, Instant, ListenOptions, Listener,
    SocketOptions,
};
use std::sync::Arc;

/// A message is passed to the stack as a whole, so waiting for more data gains nothing.
fn socket_options() -> SocketOptions {
    SocketOptions { nodelay: true, ..SocketOptions::default() }
}

/// The server as a shard's application.
pub struct DemoServer {
    server: DemoCore<Conn>,
    listen: Vec<SocketAddr>,
    counters: Arc<WorkerCounters>,
}

impl DemoServer {
    /// Creates the server of worker `worker`. `trace` gets the lines of `--debug`.
    pub fn new(
        options: &DemoServerOptions,
        worker: usize,
        counters: Arc<WorkerCounters>,
        trace: Option<Trace>,
    ) -> Self {
        let server = DemoCore::new(options, worker, Arc::clone(&counters), trace, Instant::ZERO);
        Self { server, listen: options.listen(), counters }
    }
}

impl Handler for DemoServer {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.server.tick(cx.now(), &mut ShardTransport { cx });
        for address in &self.listen {
            let options =
                ListenOptions { socket: socket_options(), v6_only: true, ..ListenOptions::default() };
            cx.listen(*address, options)?;
        }
        cx.set_timer(Duration::from_secs(1), 0);
        Ok(())
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, _: Listener) {
        let token = self.server.accepted(conn);
        // A connection that was reset meanwhile keeps its token until `closed`.
        let _ = cx.set_token(conn, token);
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let token = cx.token(conn).unwrap_or_default();
        self.server.connected(token, conn, &mut ShardTransport { cx });
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let token = cx.token(conn).unwrap_or_default();
        self.server.data(token, conn, data, &mut ShardTransport { cx })
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let token = cx.token(conn).unwrap_or_default();
        self.server.writable(token, conn, &mut ShardTransport { cx });
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let token = cx.token(conn).unwrap_or_default();
        self.server.peer_closed(token, conn, &mut ShardTransport { cx });
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, _: CloseReason) {
        let token = cx.token(conn).unwrap_or_default();
        self.server.closed(token, conn, &mut ShardTransport { cx });
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        // The timer must be set first: a slot has just become free among the shard's timers.
        cx.set_timer(Duration::from_secs(1), 0);
        self.server.tick(cx.now(), &mut ShardTransport { cx });
    }

    fn report_counters(&self, report: &mut dyn FnMut(CounterKind, &'static str, u64)) {
        for (name, count) in self.counters.counts().stat_items() {
            let kind = if name == "demo_server.open" { CounterKind::Gauge } else { CounterKind::Counter };
            report(kind, name, count);
        }
    }
}

/// The shard's context as the server's transport.
struct ShardTransport<'a, 'c> {
    cx: &'a mut Context<'c>,
}

impl StackConnections<Conn> for ShardTransport<'_, '_> {
    fn connect(&mut self, to: SocketAddr, token: u32) -> Option<Conn> {
        let options = ConnectOptions { socket: socket_options(), ..ConnectOptions::default() };
        let conn = self.cx.connect(to, options).ok()?;
        self.cx.set_token(conn, token).ok()?;
        Some(conn)
    }

    fn send(&mut self, conn: Conn, bytes: &[u8]) -> usize {
        self.cx.send(conn, bytes).unwrap_or(0)
    }

    fn finish(&mut self, conn: Conn) {
        let _ = self.cx.shutdown_write(conn);
    }

    fn close(&mut self, conn: Conn) {
        let _ = self.cx.close(conn);
    }

    fn abort(&mut self, conn: Conn) {
        let _ = self.cx.abort(conn);
    }

    fn resume_reading(&mut self, conn: Conn) {
        self.cx.resume_reading(conn);
    }
}
