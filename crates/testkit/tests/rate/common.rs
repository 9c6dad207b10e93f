//! Connections over a bottleneck, and what leaves and arrives.

use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::{TcpInfo, TcpOption};
use ginnel_stack::stack::ListCursor;
use ginnel_stack::tcp::config::CongestionControl;
use ginnel_stack::time::Instant;
use ginnel_testkit::sim::{HostConfig, LinkModel, Sim};
use std::cell::RefCell;
use std::rc::Rc;

pub const SENDER: usize = 0;
pub const RECEIVER: usize = 1;
pub const SECOND: Duration = Duration::from_secs(1);

/// Bytes of an Ethernet frame without payload: headers of Ethernet, IPv4 and TCP with timestamps.
const HEADERS: usize = 14 + 20 + 32;
/// Payload bytes of a full-sized segment, and bytes that it occupies on the link.
pub const MSS: u64 = 1448;
const FRAME: u64 = 1514 + 24;

/// The payload bytes of the frames that left at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    pub at: Instant,
    pub bytes: u64,
}

/// Flows of one sender to one receiver over a bottleneck.
pub struct Bottleneck {
    pub sim: Sim,
    pub conns: Vec<Conn>,
    departures: Rc<RefCell<Vec<Departure>>>,
}

impl Bottleneck {
    /// Connects the hosts, before the link gets its rate and its faults.
    pub fn new(kind: CongestionControl, model: &LinkModel) -> Self {
        let mut sender = HostConfig::default();
        sender.stack.tcp.congestion_control = kind;
        let delay = LinkModel { delay: model.delay, ..LinkModel::default() };
        let mut sim = Sim::pair_with(11, sender, HostConfig::default(), delay);
        sim.hosts[RECEIVER].listen(80);
        let departures: Rc<RefCell<Vec<Departure>>> = Rc::default();
        let seen = Rc::clone(&departures);
        sim.tap = Some(Box::new(move |at, host, frame| {
            if host == SENDER && frame.len() > HEADERS {
                let bytes = (frame.len() - HEADERS) as u64;
                let mut seen = seen.borrow_mut();
                match seen.last_mut().filter(|last| last.at == at) {
                    Some(last) => last.bytes += bytes,
                    None => seen.push(Departure { at, bytes }),
                }
            }
        }));
        let mut path = Self { sim, conns: Vec::new(), departures };
        path.connect();
        path.sim.set_link_from(SENDER, model);
        path.departures();
        path
    }

    /// Opens another connection.
    pub fn connect(&mut self) -> Conn {
        let to = SocketAddr::new(self.sim.hosts[RECEIVER].v4.into(), 80);
        let now = self.sim.now;
        let conn = self.sim.hosts[SENDER].connect(now, to);
        self.sim.collect(SENDER);
        self.conns.push(conn);
        let count = self.conns.len();
        assert!(self.sim.run_until(5 * SECOND, |sim| sim.hosts[RECEIVER].accepted.len() == count));
        conn
    }

    /// Sends more than the test will deliver.
    pub fn send_endlessly(&mut self, flow: usize) {
        self.send(flow, 256 << 20);
    }

    /// Sends `len` bytes.
    pub fn send(&mut self, flow: usize, len: usize) {
        let now = self.sim.now;
        self.sim.hosts[SENDER].send_all(now, self.conns[flow], vec![0; len], false);
        self.sim.collect(SENDER);
    }

    pub fn set(&mut self, option: TcpOption) {
        self.sim.hosts[SENDER].stack.set_option(self.conns[0], option).unwrap();
    }

    pub fn info(&self, flow: usize) -> TcpInfo {
        self.sim.hosts[SENDER].stack.info(self.conns[flow]).unwrap()
    }

    /// Returns the bytes of memory of the first connection at the sender.
    pub fn memory(&self) -> u64 {
        let mut listed = Vec::new();
        self.sim.hosts[SENDER].stack.list(self.sim.now, ListCursor::default(), usize::MAX, &mut listed);
        listed.iter().find(|socket| socket.info.is_some()).unwrap().memory.total
    }

    /// Returns the bytes that have arrived.
    pub fn arrived(&self, flow: usize) -> u64 {
        let host = &self.sim.hosts[RECEIVER];
        host.received[&host.accepted[flow]].bytes.len() as u64
    }

    /// Runs for `time` and returns the bytes per second that arrive.
    pub fn goodput(&mut self, flow: usize, time: Duration) -> f64 {
        let before = self.arrived(flow);
        self.sim.run(time);
        (self.arrived(flow) - before) as f64 / time.as_secs_f64()
    }

    /// Takes the departures since the last call.
    pub fn departures(&mut self) -> Vec<Departure> {
        core::mem::take(&mut self.departures.borrow_mut())
    }
}

/// Returns the payload bytes per second that a link of `bps` carries.
pub fn capacity(bps: u64) -> f64 {
    (bps / 8 * MSS) as f64 / FRAME as f64
}
