//! The Linux kernel at the other end of a TAP device.

use crate::harness::machine::{Cpus, pin, thread_cpu_time};
use crate::harness::pairs::{self, Bound, Measurement};
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::kernel_client::KernelClient;
use crate::server::{EngineOptions, EngineServer, ROUTER_IP, SERVER, Server};
use crate::tap::{self, Sender, Transfer};
use crate::two_threads::PollTime;
use core::net::{IpAddr, Ipv4Addr, SocketAddrV4};
use core::time::Duration;
use ginnel::clock;
use ginnel_stack::tcp::config::TcpConfig;
use std::sync::atomic::{AtomicBool, Ordering};

/// Time before bytes are counted; slow start has ended by then.
const WARM_UP: Duration = Duration::from_millis(500);
/// Concurrent connections of the kernel's client.
const CONNECTIONS: usize = 32;
/// Addresses of the kernel's client. With 64,000 ports each they suffice for more than the time of TIME_WAIT.
const ADDRESSES: u8 = 200;
/// Limit on connections in TIME_WAIT: 60 s at twice the rate of such a client.
const TIME_WAIT_MAX: u32 = 6_000_000;
/// Smallest share of its CPU that a client uses if it is the bottleneck.
const CLIENT_SHARE_MIN: f64 = 0.95;

/// Measures one connection with all offloads, in each direction.
pub fn bulk(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let cpus = Cpus::choose()?;
    let measure = Duration::from_secs_f64(options.seconds(3.0));
    let run = |name: &str, sender| {
        let ours = move || -> Result<Measurement, MeasureError> {
            let tcp = TcpConfig::default();
            let mut measured =
                tap::transfer(&Transfer { sender, cpus, tcp, warm_up: WARM_UP, measure, link: None })?;
            measured.value /= 1e3;
            Ok(measured)
        };
        pairs::run(name, "Gbit/s", options, Bound::Machine, Box::new(ours), None)
    };
    Ok(vec![run("tap-bulk/to-kernel", Sender::Ours)?, run("tap-bulk/from-kernel", Sender::Kernel)?])
}

/// Measures short connections of a client on the kernel, which is meant to be the bottleneck.
pub fn short(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let cpus = Cpus::choose()?;
    let seconds = options.seconds(5.0);
    let ours = || short_once(cpus, seconds);
    Ok(vec![pairs::run("tap-short", "connections/s", options, Bound::Machine, Box::new(ours), None)?])
}

fn short_once(cpus: Cpus, seconds: f64) -> Result<Measurement, MeasureError> {
    let first = Ipv4Addr::from_bits(ROUTER_IP);
    let address = |n: u8| (IpAddr::V4(Ipv4Addr::from_bits(ROUTER_IP + u32::from(n))), 24);
    let device = tap::open(cpus, (0..ADDRESSES).map(address).collect())?;
    let to = SocketAddrV4::new(Ipv4Addr::from_bits(SERVER.ip), SERVER.port);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let server = scope.spawn(|| -> Result<(PollTime, [f64; 2]), MeasureError> {
            pin(cpus.server)?;
            let tcp = TcpConfig { time_wait_max: TIME_WAIT_MAX, ..TcpConfig::default() };
            let options = EngineOptions { tcp, ..EngineOptions::new(false) };
            let mut now = clock::now();
            let mut server = EngineServer::new(device, options, now);
            let mut load = PollTime::default();
            while !over.load(Ordering::Relaxed) {
                let frames = server.turn(now);
                let end = clock::now();
                load.count(frames, end - now);
                now = end;
            }
            Ok((load, server.packets_each()))
        });
        let client = scope.spawn(|| -> Result<Measurement, MeasureError> {
            let result = client_side(cpus, seconds, to, first);
            over.store(true, Ordering::Relaxed);
            result
        });
        let mut measured = client.join().expect("the client does not panic")?;
        let (load, [to_server, to_client]) = server.join().expect("the server does not panic")?;
        measured.facts.insert("server_busy_time".into(), 1.0 - load.idle_time());
        measured.facts.insert("server_idle_polls".into(), load.idle_polls());
        Ok(measured.with("packets_to_server", to_server).with("packets_to_client", to_client))
    })
}

fn client_side(
    cpus: Cpus,
    seconds: f64,
    to: SocketAddrV4,
    first: Ipv4Addr,
) -> Result<Measurement, MeasureError> {
    pin(cpus.client)?;
    let mut client = KernelClient::new(to, first, ADDRESSES.into(), CONNECTIONS)?;
    let run = |client: &mut KernelClient, seconds: f64| -> Result<f64, MeasureError> {
        let began = clock::now();
        let mut took = 0.0;
        while took < seconds {
            client.turn()?;
            took = (clock::now() - began).as_secs_f64();
        }
        Ok(took)
    };
    run(&mut client, seconds / 10.0)?;
    let (done, failed, cpu) = (client.done, client.failed, thread_cpu_time());
    let took = run(&mut client, seconds)?;
    let (done, failed) = (client.done - done, client.failed - failed);
    let share = (thread_cpu_time() - cpu).as_secs_f64() / took;
    let mut measured =
        Measurement::new(done as f64 / took).with("client_cpu", share).with("failed", failed as f64);
    if share < CLIENT_SHARE_MIN {
        measured
            .problems
            .push(format!("the client was not the bottleneck: it used {:.0} % of its CPU", 100.0 * share));
    }
    if failed > 0 {
        measured.problems.push(format!("{failed} connections failed"));
    }
    Ok(measured)
}
