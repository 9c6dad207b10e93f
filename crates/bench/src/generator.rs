//! Runs `ginnel load http` and a server in turns on one thread, in simulated time, to count or profile what
//! the generator, or `ginnel httpd` under its load, costs per connection or request.

use crate::harness::MeasureError;
use crate::mirrored_device::mirrored;
use crate::program_options::options;
use crate::server::{Checksums, EngineOptions, EngineServer, ROUTER_IP, SERVER, Server, ShardServer, cable};
use crate::single_thread::{START, TICK, server_turn};
use core::net::Ipv4Addr;
use core::time::Duration;
use ginnel::config::{Config, DeviceConfig, DeviceKind, Prefix};
use ginnel::{Error, Instant, Shard, clock};
use ginnel_apps::httpd::{self, Httpd};
use ginnel_apps::load::light::{LightWorker, WorkerStack};
use ginnel_apps::load::plan::WorkerShare;
use ginnel_apps::load::stats::Stats;
use ginnel_apps::load::{HttpOptions, LoadHandler, LoadOptions, SharedStats};
use ginnel_stack::device::Device;
use ginnel_stack::tcp::config::TcpConfig;
use std::sync::Arc;

/// Name of the generator's device.
const NAME: &str = "server";

/// A case: what runs, and for how long.
#[derive(Clone, Debug)]
pub struct GeneratorCase {
    /// True if the generator uses the light TCP; otherwise it runs on a shard.
    pub light: bool,
    /// True if the server is `ginnel httpd`; otherwise it is a simple responder.
    pub httpd: bool,
    /// True if a monitor gets copies of the frames of `ginnel httpd`.
    pub is_mirrored: bool,
    /// True if a connection carries many requests.
    pub keep_alive: bool,
    /// Number of concurrent connections.
    pub connections: u32,
    /// Number of requests.
    pub requests: u64,
    /// TCP configuration of all shards.
    pub tcp: TcpConfig,
}

/// Returns the configuration of the generator's stack.
fn config(tcp: TcpConfig) -> Config {
    let own = Prefix { address: Ipv4Addr::from_bits(ROUTER_IP).into(), len: 24 };
    let device = DeviceConfig::new(NAME, DeviceKind::Memory);
    Config { tcp, ..Config::single(device, &[own], &[]) }
}

fn failed(error: Error) -> MeasureError {
    MeasureError::Failed(error.to_string())
}

/// The generator on one of its stacks.
trait Generator {
    /// Runs a turn. Returns the results when the run is over.
    fn turn(&mut self, now: Instant) -> Option<Stats>;
}

struct ShardGenerator {
    shard: Shard<LoadHandler>,
    outcome: SharedStats,
}

impl Generator for ShardGenerator {
    fn turn(&mut self, now: Instant) -> Option<Stats> {
        self.shard.poll_once(now).expect("the generator does not fail");
        let outcome = || self.outcome.lock().ok().and_then(|mut o| o.take());
        if self.shard.handler().is_done() { outcome() } else { None }
    }
}

impl Generator for LightWorker {
    fn turn(&mut self, now: Instant) -> Option<Stats> {
        LightWorker::turn(self, now).done.then(|| self.stats())
    }
}

impl GeneratorCase {
    /// Runs the generator to its end against a server that answers all requests.
    pub fn run(&self) -> Result<(), MeasureError> {
        let (server_end, client_end) = cable(Checksums::Device, 1 << 22);
        if !self.httpd {
            let options = EngineOptions { tcp: self.tcp.clone(), ..EngineOptions::new(self.keep_alive) };
            return self.against(EngineServer::new(server_end, options, START), client_end);
        }
        let root = tempfile::tempdir()?;
        std::fs::write(root.path().join("64"), "x".repeat(64))?;
        let root = root.path().to_string_lossy().into_owned();
        let options: httpd::HttpdOptions = options(&[&root, "--listen", "0.0.0.0:80"]);
        let handler = Httpd::new(&options).map_err(failed)?;
        let server_end = if self.is_mirrored { mirrored(server_end)? } else { server_end };
        let server = ShardServer::new(server_end, handler, self.tcp.clone(), START).map_err(failed)?;
        self.against(server, client_end)
    }

    fn against(&self, mut server: impl Server, client_end: Device) -> Result<(), MeasureError> {
        let mut generator = self.generator(client_end).map_err(failed)?;
        let mut now = START;
        let stats = loop {
            if now > START + Duration::from_secs(600) {
                return Err(MeasureError::Failed("the generator makes no progress".into()));
            }
            server_turn(&mut server, now);
            if let Some(stats) = generator_turn(&mut *generator, now) {
                break stats;
            }
            now += TICK;
        };
        match stats.counters.completed {
            completed if completed == self.requests => Ok(()),
            completed => {
                Err(MeasureError::Failed(format!("{completed} of {} requests were answered", self.requests)))
            }
        }
    }

    /// Creates the generator for a run of `duration` with short connections on the light TCP.
    ///
    /// # Errors
    /// An error in the configuration.
    pub fn light(client_end: Device, connections: u32, duration: Duration) -> Result<LightWorker, Error> {
        let url = format!("http://{}/64", Ipv4Addr::from_bits(SERVER.ip));
        let (connections, seconds) = (connections.to_string(), format!("{}s", duration.as_secs_f64()));
        let words = ["--connections", &connections, "--duration", &seconds, "--warmup", "500ms", &url];
        let stack = WorkerStack { config: config(TcpConfig::default()), device: Some(client_end) };
        let job = options::<HttpOptions>(&words).job()?;
        LightWorker::new(&job, WorkerShare::WHOLE, Arc::default(), stack, clock::now())
    }

    fn generator(&self, client_end: Device) -> Result<Box<dyn Generator>, Error> {
        let url = format!("http://{}/64", Ipv4Addr::from_bits(SERVER.ip));
        let (connections, wanted) = (self.connections.to_string(), self.requests.to_string());
        let mut words = vec![&*url, "--connections", &connections, "--requests", &wanted];
        words.extend(self.keep_alive.then_some("--keep-alive"));
        let job = options::<HttpOptions>(&words).job()?;
        let config = config(self.tcp.clone());
        if self.light {
            let stack = WorkerStack { config, device: Some(client_end) };
            return Ok(Box::new(LightWorker::new(&job, WorkerShare::WHOLE, Arc::default(), stack, START)?));
        }
        let outcome = SharedStats::default();
        let handler = LoadHandler::new(job, 0, 1, Arc::default(), Arc::clone(&outcome));
        let shard = Shard::builder(config).handler(handler).device(NAME, client_end).seed([7; 32]).now(START);
        Ok(Box::new(ShardGenerator { shard: shard.build()?, outcome }))
    }
}

/// valgrind counts the instructions within this function, which it finds by its name.
#[inline(never)]
fn generator_turn(generator: &mut dyn Generator, now: Instant) -> Option<Stats> {
    // The call must not be in tail position: a jump in its place would hide the end of the function from
    // valgrind.
    std::hint::black_box(generator.turn(now))
}
