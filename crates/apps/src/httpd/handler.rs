//! Runs the server on a shard.

use super::options::HttpdOptions;
use super::response::DateText;
use super::server::{Server, Transport};
use super::site::{FileBody, FileId, Site};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::stats::CounterKind;
use ginnel::{
    CloseReason, Conn, Context, Error, Handler, Instant, ListenOptions, Listener, PreloadedSource,
    SocketOptions, Source, SourceId,
};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Timer token: once per second, for timeouts and the clock.
const TICK: u64 = 0;
/// Timer token: a block of a file may have arrived in the page cache.
const DISK: u64 = 1;
/// Time between two looks for blocks in the page cache.
const DISK_RETRY: Duration = Duration::from_millis(1);

/// The server as a shard's application.
pub struct Httpd {
    server: Server,
    listen: Vec<SocketAddr>,
    listeners: Vec<Listener>,
    /// Sources of the loaded files on the stack; `None` for small files and for files that are read from
    /// disk.
    sources: Vec<Option<SourceId>>,
    description: String,
    clock: fn() -> Duration,
    is_disk_timer_set: bool,
    is_stopping: bool,
}

impl Httpd {
    /// Creates the server and reads the site.
    pub fn new(options: &HttpdOptions) -> Result<Self, Error> {
        Self::with_clock(options, time_of_day)
    }

    /// Creates the server with another clock (time since 1970), for simulations.
    pub fn with_clock(options: &HttpdOptions, clock: fn() -> Duration) -> Result<Self, Error> {
        let root = &options.root;
        let date = DateText::new(clock().as_secs());
        let site = Site::read(root, &options.site(), &date)
            .map_err(|e| Error::io(format!("read {}", root.display()), e))?;
        let (loaded, bytes, streamed) = site.summary();
        let addresses: Vec<String> = options.listen.iter().map(SocketAddr::to_string).collect();
        let text = format!(
            "serving {} on {}: {loaded} files in memory ({bytes} bytes), {streamed} streamed, {} skipped",
            root.display(),
            addresses.join(" "),
            site.skipped.len()
        );
        Ok(Self {
            server: Server::new(site, options.server(), Instant::ZERO, clock()),
            listen: options.listen.clone(),
            listeners: Vec::new(),
            sources: Vec::new(),
            description: text,
            clock,
            is_disk_timer_set: false,
            is_stopping: false,
        })
    }

    /// Describes in one line which files are served at which addresses.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// Returns the server.
    pub const fn server(&self) -> &Server {
        &self.server
    }

    /// Calls the server with the shard's context as transport, and sets a timer if the server waits for the
    /// disk.
    fn serve<R>(
        &mut self,
        cx: &mut Context<'_>,
        call: impl FnOnce(&mut Server, &mut ShardTransport<'_, '_>) -> R,
    ) -> R {
        let result = call(&mut self.server, &mut ShardTransport { cx, sources: &self.sources });
        if self.server.waits_for_disk() && !self.is_disk_timer_set {
            self.is_disk_timer_set = cx.set_timer(DISK_RETRY, DISK).is_some();
        }
        result
    }
}

fn time_of_day() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

impl Handler for Httpd {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.server.set_clock(cx.now(), (self.clock)());
        for entry in self.server.site().entries() {
            self.sources.push(match &entry.body {
                FileBody::Loaded(source) if entry.inline_body().is_none() => {
                    Some(cx.add_source(Box::new(SharedSource(Arc::clone(source)))))
                }
                _ => None,
            });
        }
        // A response is passed to the stack as a whole, so waiting for more data gains nothing.
        let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
        for address in &self.listen {
            self.listeners.push(
                cx.listen(*address, ListenOptions { socket, v6_only: true, ..ListenOptions::default() })?,
            );
        }
        cx.set_timer(Duration::from_secs(1), TICK);
        Ok(())
    }

    fn report_counters(&self, report: &mut dyn FnMut(CounterKind, &'static str, u64)) {
        let counters = self.server.counters();
        report(CounterKind::Counter, "httpd.connections", counters.connections);
        report(CounterKind::Counter, "httpd.responses", counters.responses);
        report(CounterKind::Counter, "httpd.errors", counters.errors);
        report(CounterKind::Counter, "httpd.timeouts", counters.timeouts);
        report(CounterKind::Gauge, "httpd.open", counters.open);
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, _: Listener) {
        self.server.accepted(cx.now(), conn);
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let now = cx.now();
        self.serve(cx, |server, net| server.data(now, conn, data, net))
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let now = cx.now();
        self.serve(cx, |server, net| server.writable(now, conn, net));
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.serve(cx, |server, net| server.peer_closed(conn, net));
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, _: CloseReason) {
        self.server.closed(conn);
        if self.is_stopping && self.server.counters().open == 0 {
            cx.stop();
        }
    }

    fn timer(&mut self, cx: &mut Context<'_>, token: u64) {
        let now = cx.now();
        if token == DISK {
            self.is_disk_timer_set = false;
            return self.serve(cx, |server, net| server.read_disk(now, net));
        }
        // The timer must be set first: a slot has just become free among the shard's timers.
        cx.set_timer(Duration::from_secs(1), TICK);
        self.server.set_clock(now, (self.clock)());
        self.serve(cx, |server, net| server.tick(now, net));
    }

    fn stopping(&mut self, cx: &mut Context<'_>) {
        for listener in self.listeners.drain(..) {
            // Fails only if the stack has already dropped the listener.
            let _ = cx.unlisten(listener);
        }
        self.is_stopping = true;
        self.serve(cx, |server, net| server.drain(net));
        if self.server.counters().open == 0 {
            cx.stop();
        }
    }
}

/// The shard's context as the server's transport. Calls for a closed connection have no effect: `closed` is,
/// or will be, called.
struct ShardTransport<'a, 'c> {
    cx: &'a mut Context<'c>,
    sources: &'a [Option<SourceId>],
}

impl Transport for ShardTransport<'_, '_> {
    fn send(&mut self, conn: Conn, bytes: &[u8]) -> usize {
        self.cx.send(conn, bytes).unwrap_or(0)
    }

    fn send_file(&mut self, conn: Conn, file: FileId, offset: u64, len: u64) -> bool {
        match self.sources.get(file.0 as usize) {
            Some(Some(source)) => self.cx.send_source(conn, *source, offset, len).is_ok(),
            _ => false,
        }
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

    fn outstanding(&mut self, conn: Conn) -> Option<u32> {
        let info = self.cx.info(conn).ok()?;
        let in_flight = info.unacked.saturating_mul(info.snd_mss);
        (info.unacked > 0 || info.notsent_bytes > 0).then(|| info.notsent_bytes.wrapping_add(in_flight))
    }
}

/// A loaded file as a source of the stack. All shards share its bytes.
struct SharedSource(Arc<PreloadedSource>);

impl Source for SharedSource {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn fill(&self, offset: u64, out: &mut [u8]) {
        self.0.fill(offset, out);
    }

    fn sum(&self, offset: u64, len: usize) -> Option<ginnel::Sum> {
        self.0.sum(offset, len)
    }
}
