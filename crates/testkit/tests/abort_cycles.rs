//! Connections that are opened and aborted leave nothing in the pools of either end.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::time::Duration;
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::{Device, RxBurst, RxQueue};
use ginnel_stack::events::Event;
use ginnel_stack::handle::{Conn, Listener, PortId};
use ginnel_stack::link::LinkConfig;
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::stack::{Stack, StackConfig};
use ginnel_stack::time::Instant;

const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
/// Connections that are open at the same time.
const TOGETHER: u64 = 50;

/// One end of the link.
struct End {
    stack: Stack,
    rx: Box<dyn RxQueue + Send>,
    port: PortId,
    listener: Option<Listener>,
    conns: Vec<Conn>,
    connected: u64,
    /// Bytes of received data that were left unread.
    left: u64,
}

impl End {
    fn new(device: Device, address: IpAddr, seed: u8) -> Self {
        let mut stack = Stack::new(StackConfig::default(), [seed; 32], Instant::from_millis(1000)).unwrap();
        let port = stack.add_port(device.tx);
        let addresses = vec![(address, 24)];
        let link = LinkConfig { name: "lan".into(), addresses, ..LinkConfig::default() };
        stack.add_link(port, &link).unwrap();
        let (conns, listener) = (Vec::new(), None);
        Self { stack, rx: device.rx, port, listener, conns, connected: 0, left: 0 }
    }

    /// Runs a turn: half of what arrives is read, and new connections send.
    fn turn(&mut self, now: Instant) {
        let mut burst = RxBurst::new();
        self.rx.rx_burst(now, &mut burst);
        self.stack.receive(now, self.port, &burst);
        while let Some(event) = self.stack.next_event() {
            match event {
                Event::Incoming { .. } => {
                    let listener = self.listener.expect("only the server has incoming connections");
                    self.conns.extend(self.stack.accept(listener));
                }
                Event::Connected { conn } => {
                    self.connected += 1;
                    assert_eq!(self.stack.send(conn, &[7; 5000]), Ok(5000));
                }
                Event::Data { conn, data } => {
                    let (take, len) = (data.len() / 2, data.len());
                    self.stack.consume(conn, data, take, &burst);
                    self.left += (len - take) as u64;
                }
                _ => {}
            }
        }
        self.stack.finish_burst(&burst);
        drop(burst);
        self.stack.advance(now);
        self.stack.transmit(now);
    }

    /// Returns what must be 0 without connections.
    fn in_use(&self) -> [usize; 6] {
        let usage = self.stack.usage();
        [usage.connections, usage.half_open, usage.time_wait, usage.active, usage.chunks, usage.timers]
    }
}

/// Opens and aborts connections, each with data that nobody has read, and with data in flight. The client
/// aborts, the server, or both at once.
fn open_and_abort(cycles: u64) {
    let (a, b) = pair(MemoryConfig::default());
    let (mut server, mut client) = (End::new(a, SERVER, 1), End::new(b, CLIENT, 2));
    let at = SocketAddr::new(SERVER, 80);
    server.listener = Some(server.stack.listen(at, ListenOptions::default()).unwrap());
    let mut now = Instant::from_millis(1000);
    let mut both_turn = |server: &mut End, client: &mut End| {
        now += Duration::from_micros(50);
        client.turn(now);
        server.turn(now);
        now
    };
    let mut warm = None;
    for batch in 0..cycles / TOGETHER {
        let now = both_turn(&mut server, &mut client);
        for _ in 0..TOGETHER {
            client.conns.push(client.stack.connect(now, at, &ConnectOptions::default()).unwrap());
        }
        let mut turns = 0;
        while client.connected < (batch + 1) * TOGETHER || server.conns.len() < TOGETHER as usize {
            both_turn(&mut server, &mut client);
            turns += 1;
            assert!(turns < 100_000, "{} connected, {} accepted", client.connected, server.conns.len());
        }
        both_turn(&mut server, &mut client);
        // These bytes are still queued when the connections are aborted.
        for conn in &client.conns {
            assert_eq!(client.stack.send(*conn, &[8; 3000]), Ok(3000));
        }
        assert!(server.in_use()[4] > 0 && client.in_use()[4] > 0, "both ends hold data");
        let (near, far) = (core::mem::take(&mut client.conns), core::mem::take(&mut server.conns));
        if batch % 3 != 1 {
            near.into_iter().for_each(|conn| client.stack.abort(conn).unwrap());
        }
        if batch % 3 != 0 {
            far.into_iter().for_each(|conn| server.stack.abort(conn).unwrap());
        }
        let mut turns = 0;
        while server.in_use()[0] + client.in_use()[0] > 0 {
            both_turn(&mut server, &mut client);
            turns += 1;
            assert!(turns < 100, "{:?} {:?}", server.in_use(), client.in_use());
        }
        assert_eq!((server.in_use(), client.in_use()), ([0; 6], [0; 6]), "batch {batch}");
        if batch >= 30 {
            let usages = [&server, &client].map(|end| end.stack.usage());
            let warm = warm.get_or_insert(usages);
            for (usage, warm) in usages.iter().zip(warm) {
                assert_eq!(usage.chunks_high_water, warm.chunks_high_water, "batch {batch}");
                // Its buckets depend on the hashes of the flows.
                assert!(usage.flow_table_bytes <= 2 * warm.flow_table_bytes, "batch {batch}: {usage:?}");
            }
        }
    }
    assert!(warm.is_some() && server.left > cycles * 1000, "{} bytes were not read", server.left);
}

#[test]
fn a_million_aborted_connections_leave_nothing() {
    open_and_abort(1_000_000);
}
