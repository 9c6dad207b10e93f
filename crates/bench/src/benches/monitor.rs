//! Packets per second that the engine of `ginnel monitor` examines on one core: a million connections with
//! one request each, whose packets lie in memory in the order of their arrival, as in a ring.

use crate::harness::machine::{Cpus, pin};
use crate::harness::pairs::{self, Arm, Better, Bound, Measurement};
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use ginnel::{Instant, clock};
use ginnel_apps::iot::message::ANSWER_OK;
use ginnel_devices::random::Random;
use ginnel_monitor::engine::{Engine, EngineConfig};
use ginnel_monitor::frame::{ACK, LinkType};
use ginnel_monitor::rules::{IOT_MESSAGE_BYTES, PortRule, ProtocolName};
use ginnel_monitor::scripted::{SERVER_PORT, Side, segment_of};

const CONNECTIONS: usize = 1_000_000;
/// Requests between a request and its answer.
const OUTSTANDING: usize = 1000;
/// Nanoseconds between two packets.
const GAP_NANOS: u64 = 200;
/// Goal in packets per second.
const GOAL: f64 = 5e6;

/// Measures packets per second.
pub fn rate(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let connections = if options.smoke { CONNECTIONS / 20 } else { CONNECTIONS };
    // Chosen once: this thread stays pinned.
    let cpus = Cpus::choose()?;
    let ours: Arm<'_> = Box::new(move || measure(cpus, connections));
    let name = "monitor-rate";
    pairs::run_for(Better::Higher, name, "packets/s", options, Bound::Machine, ours, None)
        .map(|result| vec![result])
}

/// Packets one after the other in memory.
#[derive(Default)]
struct Packets {
    bytes: Vec<u8>,
    /// Position after each packet.
    ends: Vec<u32>,
}

impl Packets {
    fn push(&mut self, frame: &[u8]) {
        self.bytes.extend_from_slice(frame);
        // All packets together have less than 4 GiB.
        self.ends.push(self.bytes.len() as u32);
    }

    fn iter(&self) -> impl Iterator<Item = (Instant, &[u8])> {
        let starts = core::iter::once(0).chain(self.ends.iter().copied());
        let times = (0..).map(|number| Instant::from_nanos(1_000_000_000 + number * GAP_NANOS));
        times
            .zip(starts.zip(&self.ends))
            .map(|(at, (start, end))| (at, &self.bytes[start as usize..*end as usize]))
    }
}

/// Builds the packets of a round, in which each connection sends a request and gets its answer, in an order
/// that no cache can predict.
fn round(number: u32, order: &[u32]) -> Packets {
    let mut message = [0; IOT_MESSAGE_BYTES as usize];
    message[5] = 1;
    // Sequence numbers before the round.
    let (client, server) = (1 + number * IOT_MESSAGE_BYTES, 1 + number * ANSWER_OK.len() as u32);
    let mut packets = Packets::default();
    let mut push = |connection: u32, side| {
        let [_, a, b, c] = connection.to_be_bytes();
        let address = ([10, a, b, c], 40_000);
        packets.push(&match side {
            Side::Client => segment_of(address, side, client, server, ACK, &message),
            Side::Server => segment_of(address, side, server, client + IOT_MESSAGE_BYTES, ACK, ANSWER_OK),
        });
    };
    for at in 0..order.len() + OUTSTANDING {
        if let Some(connection) = order.get(at) {
            push(*connection, Side::Client);
        }
        if let Some(connection) = at.checked_sub(OUTSTANDING).and_then(|at| order.get(at)) {
            push(*connection, Side::Server);
        }
    }
    packets
}

fn measure(cpus: Cpus, connections: usize) -> Result<Measurement, MeasureError> {
    pin(cpus.server)?;
    let mut order: Vec<u32> = (0..connections as u32).collect();
    let mut random = Random::new(7);
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    let rule = PortRule::new(ProtocolName::Iot, vec![SERVER_PORT]);
    let config = EngineConfig { seed: 0x5eed, ..EngineConfig::new(vec![rule]) };
    let mut engine = Engine::new(&config).map_err(MeasureError::Failed)?;
    // The first round adds the connections.
    engine.process_burst(LinkType::Ethernet, round(0, &order).iter());
    let packets = round(1, &order);
    let began = clock::now();
    engine.process_burst(LinkType::Ethernet, packets.iter());
    let took = clock::now() - began;
    let counters = engine.counters();
    if counters.responses != 2 * connections as u64 || engine.connections() != connections {
        return Err(MeasureError::Failed(format!("not every request was answered: {counters:?}")));
    }
    let rate = packets.ends.len() as f64 / took.as_secs_f64();
    Ok(Measurement::new(rate)
        .with("ns_per_packet", 1e9 / rate)
        .with("goal_reached", f64::from(u8::from(rate >= GOAL))))
}
