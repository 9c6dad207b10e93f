//! `ginnel load http` on a shard and a server on the engine, taking turns on one thread, in a time of their own: what the generator
//! costs for each connection or request, to be counted or profiled.

use crate::harness::Failure;
use crate::server::{Checksums, EngineOptions, EngineServer, ROUTER_IP, SERVER, Server, cable};
use crate::solo::{START, TURN};
use clap::Parser;
use core::net::Ipv4Addr;
use core::time::Duration;
use ginnel::config::{Config, DeviceConfig, DeviceKind, Prefix};
use ginnel::{Instant, Shard};
use ginnel_apps::load::{LoadHandler, Options, Outcome};
use ginnel_stack::tcp::config::TcpConfig;
use std::sync::Arc;

/// The command line of the program.
#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    options: Options,
}

/// Lets the generator make `requests` requests to the end, with a server at its other end that answers all of them.
pub fn run(keep_alive: bool, connections: u32, requests: u64, tcp: TcpConfig) -> Result<(), Failure> {
    const NAME: &str = "server";
    let (server_end, client_end) = cable(Checksums::Device, 1 << 22);
    let options = EngineOptions { tcp: tcp.clone(), ..EngineOptions::new(keep_alive) };
    let mut server = EngineServer::new(server_end, options, START);

    let url = format!("http://{}/64", Ipv4Addr::from_bits(SERVER.ip));
    let (connections, wanted) = (connections.to_string(), requests.to_string());
    let mut words = vec!["load", &url, "--connections", &connections, "--requests", &wanted];
    words.extend(keep_alive.then_some("--keep-alive"));
    let options = CommandLine::parse_from(words).options;
    let job = options.job().map_err(|e| Failure::Failed(e.to_string()))?;
    let outcome = Outcome::default();
    let handler = LoadHandler::new(job, 0, 1, Arc::default(), Arc::clone(&outcome));

    let own = Prefix { address: Ipv4Addr::from_bits(ROUTER_IP).into(), len: 24 };
    let config = Config { tcp, ..Config::single(DeviceConfig::new(NAME, DeviceKind::Memory), &[own], &[]) };
    let builder = Shard::builder(config).handler(handler).device(NAME, client_end).seed([7; 32]).now(START);
    let mut shard = builder.build().map_err(|e| Failure::Failed(e.to_string()))?;

    let mut now = START;
    while !shard.handler().is_done() {
        if now > START + Duration::from_secs(600) {
            return Err(Failure::Failed("the generator makes no progress".into()));
        }
        server.turn(now);
        generator_turn(&mut shard, now);
        now += TURN;
    }
    let stats = outcome.lock().ok().and_then(|mut o| o.take());
    match stats.map(|s| s.counters.completed) {
        Some(completed) if completed == requests => Ok(()),
        completed => Err(Failure::Failed(format!("{completed:?} of {requests} requests were answered"))),
    }
}

/// Valgrind counts what happens in here; it finds the function by its name.
#[inline(never)]
fn generator_turn(shard: &mut Shard<LoadHandler>, now: Instant) {
    // Something to do after the call: otherwise it becomes a jump, and valgrind does not see where the function ends.
    std::hint::black_box(shard.poll_once(now).expect("the generator does not fail").work);
}
