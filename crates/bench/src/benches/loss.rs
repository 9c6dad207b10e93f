//! Goodput of one connection over a gigabit link with loss: the engine in simulated time (a committed table),
//! and over TAP in real time against the Linux kernel as sender.

use crate::bulk::BulkTransfer;
use crate::harness::machine::Cpus;
use crate::harness::pairs::Bound;
use crate::harness::result::{BenchResult, median};
use crate::harness::{MeasureError, Options, pairs};
use crate::host::StackHost;
use crate::tap::{self, Sender, Transfer};
use core::net::{Ipv4Addr, SocketAddr};
use core::time::Duration;
use ginnel_devices::faults::{self, LinkSpec};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::tcp::config::TcpConfig;
use ginnel_stack::time::Instant;
use std::fmt::Write;

/// Loss of data frames in percent, as text.
const LOSSES: [&str; 4] = ["0", "0.1", "1", "3"];
/// Round-trip times without queueing, in ms.
const RTTS_MS: [u64; 3] = [1, 20, 100];
/// Buffers of both ends: more than twice the bandwidth-delay product at the longest round trip.
const BUFFER_BYTES: u32 = 32 << 20;
/// Runs of a cell of the committed table, each with a seed of its own.
const SEEDS: u64 = 5;

const SENDER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const RECEIVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const PORT: u16 = 5001;

/// A cell of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    loss: &'static str,
    rtt_ms: u64,
}

impl Cell {
    /// Returns all cells, row by row.
    pub fn all() -> impl Iterator<Item = Self> {
        LOSSES.into_iter().flat_map(|loss| RTTS_MS.map(|rtt_ms| Self { loss, rtt_ms }))
    }

    fn name(self) -> String {
        format!("loss-table/{}%/{}ms", self.loss, self.rtt_ms)
    }

    /// Returns the length of a transfer: at least a hundred round trips, so that slow start does not
    /// dominate.
    fn seconds(self) -> u64 {
        match self.rtt_ms {
            0..10 => 2,
            10..50 => 5,
            _ => 15,
        }
    }

    /// Returns the link. `data` is the direction of the data: `up` if the device's owner sends, `down` if it
    /// receives.
    fn link(self, data: &str) -> LinkSpec {
        let Self { loss, rtt_ms } = self;
        let text = format!("rate=1gbit delay={}us {data}.loss={loss}%", rtt_ms * 500);
        LinkSpec::parse(&text).expect("the link of a cell is valid")
    }
}

fn tcp() -> TcpConfig {
    TcpConfig { recv_buffer_bytes: BUFFER_BYTES, send_buffer_bytes: BUFFER_BYTES, ..TcpConfig::default() }
}

/// Returns the goodput of the engine in simulated time, in Mbit/s.
pub fn simulate(cell: Cell, seed: u64) -> f64 {
    let mut now = Instant::from_millis(1_000_000);
    let (a, b) = pair(MemoryConfig { ring_bytes: 4 << 20, ..MemoryConfig::default() });
    let a = faults::wrap(a, &cell.link("up"), seed);
    let mut sender = StackHost::new(a, SENDER, None, tcp(), now);
    let mut receiver = StackHost::new(b, RECEIVER, None, tcp(), now);
    let mut fountain = BulkTransfer::sender(&mut sender.stack);
    let mut sink = BulkTransfer::receiver();
    let to = SocketAddr::new(RECEIVER.into(), PORT);
    receiver.stack.listen(to, ListenOptions::default()).expect("the port is free");
    sender.stack.connect(now, to, &ConnectOptions::default()).expect("the receiver is on the link");
    let time = Duration::from_secs(cell.seconds());
    let end = now + time;
    while now < end {
        let work = sender.turn(now, &mut fountain) + receiver.turn(now, &mut sink);
        if work == 0 {
            let next = [sender.next_deadline(), receiver.next_deadline()].into_iter().flatten().min();
            // A deadline in the past requires another turn, and time must advance nevertheless.
            now = next.unwrap_or(end).max(now + Duration::from_nanos(1000));
        }
    }
    assert_eq!((fountain.ended, sink.ended), (0, 0), "{cell:?} seed {seed}: the connection ended");
    sink.received as f64 * 8.0 / time.as_secs_f64() / 1e6
}

/// Returns the committed table. Without loss the result is not random, and one run suffices.
pub fn table() -> String {
    let goodput = |cell: Cell| {
        let seeds = if cell.loss == "0" { 1 } else { SEEDS };
        let runs: Vec<f64> = (1..=seeds).map(|seed| simulate(cell, seed)).collect();
        median(&runs).unwrap_or(0.0)
    };
    let cells: Vec<f64> = std::thread::scope(|scope| {
        let running: Vec<_> = Cell::all().map(|cell| scope.spawn(move || goodput(cell))).collect();
        running.into_iter().map(|run| run.join().expect("the simulation does not panic")).collect()
    });
    let mut text = String::from(
        "Goodput in Mbit/s of one connection over 1 Gbit/s, simulated. Rows: loss of data frames. Columns: round trip time.\n\n",
    );
    _ = write!(text, "{:>8}", "");
    for rtt in RTTS_MS {
        _ = write!(text, "{:>12}", format!("{rtt} ms"));
    }
    for (loss, row) in LOSSES.iter().zip(cells.chunks(RTTS_MS.len())) {
        _ = write!(text, "\n{:>8}", format!("{loss} %"));
        for goodput in row {
            _ = write!(text, "{goodput:>12.2}");
        }
    }
    text + "\n"
}

/// Smallest number of runs of each cell over TAP.
const RUNS_MIN: usize = 9;

/// Prints the simulated table, then measures each cell over TAP: our sender and the kernel's in turn, with
/// equal seeds.
pub fn run(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    print!("{}", table());
    let cpus = Cpus::choose()?;
    let options = Options { pairs: options.pairs.max(RUNS_MIN), ..options.clone() };
    Cell::all()
        .filter(|cell| options.wants(&cell.name()))
        .map(|cell| run_cell(cell, &options, cpus))
        .collect()
}

fn run_cell(cell: Cell, options: &Options, cpus: Cpus) -> Result<BenchResult, MeasureError> {
    let measure = Duration::from_secs_f64(options.seconds(cell.seconds() as f64));
    let arm = |sender, data: &'static str| {
        let mut seed = 0;
        move || {
            seed += 1;
            let link = Some((cell.link(data), seed));
            tap::transfer(&Transfer { sender, cpus, tcp: tcp(), warm_up: Duration::ZERO, measure, link })
        }
    };
    let (ours, theirs) = (arm(Sender::Ours, "up"), arm(Sender::Kernel, "down"));
    pairs::run(&cell.name(), "Mbit/s", options, Bound::Link, Box::new(ours), Some(Box::new(theirs)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the table with the committed one; `GINNEL_BLESS=1` writes it.
    #[test]
    fn goodput_under_loss_is_unchanged() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/loss-table.txt");
        let now = table();
        if std::env::var_os("GINNEL_BLESS").is_some() {
            std::fs::write(path, &now).unwrap();
        }
        let accepted = std::fs::read_to_string(path).unwrap();
        assert!(
            now == accepted,
            "The table has changed. To accept it, run again with GINNEL_BLESS=1.\nCommitted:\n{accepted}\nNow:\n{now}"
        );
    }
}
