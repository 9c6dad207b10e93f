//! A hostile client process: it writes arbitrary values into the memory that it shares with the stack, sends
//! arbitrary messages to the broker, and uses its connections in between. A second, well-behaved domain must
//! not notice: its bytes arrive completely and in order, and the stack keeps running.

use core::time::Duration;
use ginnel::channel::control::{ControlPath, SameThread};
use ginnel::channel::simulation::SimulatedDomain;
use ginnel::channel::{ChannelConfig, ChannelServer, ChannelStats, Client, ClientEvent};
use ginnel::config::{Config, DeviceConfig, DeviceKind};
use ginnel::{
    Conn, ConnectOptions, Context, Error, Handler, Instant, ListenOptions, Listener, Shard, broker,
};
use ginnel::{Datagram, TcpOption, UdpHandle, UdpOptions, UdpSendParams};
use ginnel_devices::memory::{MemoryConfig, pair};
use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

/// Bytes of an operation: code, position and value.
const OPERATION_BYTES: usize = 1 + 4 + 8;
/// Maximum number of operations in an input.
const OPERATIONS_MAX: usize = 400;
/// Sockets of a domain: few, so that the limit is reached; or, if bit 6 of the first byte is set, enough that
/// clients have preallocated sockets to open connections with.
const SOCKETS_MAX: [u32; 2] = [8, 200];
/// Bytes of each of the two buffers of a socket.
const BUFFER_BYTES: u32 = 4096;
/// Large buffers of a domain, and bytes of each: few and small, so that a random offset is often one of the
/// metadata.
const LARGE_BUFFERS: u32 = 2;
const LARGE_BUFFER_BYTES: u32 = 2 * BUFFER_BYTES;

/// Echoes the data of all connections and datagrams.
#[derive(Default)]
struct EchoPeer {
    unsent: HashMap<Conn, Vec<u8>>,
    /// The UDP socket.
    udp: Option<UdpHandle>,
    /// Datagrams received.
    datagrams: u64,
    /// Connections accepted.
    accepted: u64,
}

impl EchoPeer {
    fn send_unsent(&mut self, cx: &mut Context<'_>, conn: Conn) {
        if let Some(waiting) = self.unsent.get_mut(&conn)
            && let Ok(count) = cx.send(conn, waiting)
        {
            waiting.drain(..count);
        }
    }
}

impl Handler for EchoPeer {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let at = ([0, 0, 0, 0], 90).into();
        cx.listen(at, ListenOptions::default())?;
        self.udp = Some(cx.udp_bind(at, UdpOptions::default()).map_err(|e| Error::Udp(at, e))?);
        Ok(())
    }

    fn datagram(&mut self, cx: &mut Context<'_>, udp: UdpHandle, datagram: &Datagram, data: &[u8]) {
        self.datagrams += 1;
        // The reply is lost if the device has no room.
        let _ = cx.udp_reply(udp, datagram, data);
    }

    fn accepted(&mut self, _: &mut Context<'_>, conn: Conn, _: Listener) {
        self.accepted += 1;
        self.unsent.insert(conn, Vec::new());
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.send_unsent(cx, conn);
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        self.unsent.entry(conn).or_default().extend(data);
        self.send_unsent(cx, conn);
        data.len()
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.send_unsent(cx, conn);
    }

    fn closed(&mut self, _: &mut Context<'_>, conn: Conn, _: ginnel::CloseReason) {
        self.unsent.remove(&conn);
    }
}

/// The well-behaved domain: sends a known byte sequence and expects its echo.
struct HonestDomain {
    client: Client,
    conn: Conn,
    sent: u64,
    received: u64,
}

impl HonestDomain {
    fn stream_byte(at: u64) -> u8 {
        (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
    }

    fn exchange(&mut self, count: u64) {
        while self.client.next_event().is_some() {}
        let bytes: Vec<u8> = (self.sent..self.sent + count).map(Self::stream_byte).collect();
        self.sent += self.client.send(self.conn, &bytes).expect("an open connection") as u64;
        let mut out = [0; 4096];
        loop {
            let count = self.client.recv(self.conn, &mut out).expect("a connection");
            if count == 0 {
                break;
            }
            for byte in &out[..count] {
                assert_eq!(
                    *byte,
                    Self::stream_byte(self.received),
                    "byte {} of the well-behaved domain",
                    self.received
                );
                self.received += 1;
            }
        }
        assert!(self.received <= self.sent);
        self.client.flush();
    }
}

/// The memory that the hostile client shares with the stack: its own file, and after it the region.
struct SharedMemory {
    client: std::fs::File,
    region: std::fs::File,
    client_bytes: u64,
    bytes: u64,
}

impl SharedMemory {
    fn new(client: OwnedFd, region: OwnedFd) -> Self {
        let (client, region) = (std::fs::File::from(client), std::fs::File::from(region));
        let bytes = |file: &std::fs::File| file.metadata().expect("a file").len();
        let client_bytes = bytes(&client);
        Self { bytes: client_bytes + bytes(&region), client, region, client_bytes }
    }

    /// Overwrites bytes at an offset, up to the end of the file in which the offset is.
    fn write(&self, bytes: &[u8], at: u64) {
        let (file, at, end) = match at.checked_sub(self.client_bytes) {
            None => (&self.client, at, self.client_bytes),
            Some(at) => (&self.region, at, self.bytes - self.client_bytes),
        };
        let count = bytes.len().min((end - at) as usize);
        file.write_at(&bytes[..count], at).expect("memory");
    }
}

/// The hostile domain.
struct HostileDomain {
    client: Client,
    domain: SimulatedDomain,
    memory: SharedMemory,
    /// Offset at which headers, rings and socket records end; stream buffers and large buffers follow.
    metadata_bytes: u64,
    conns: Vec<Conn>,
    /// UDP sockets.
    udp_sockets: Vec<Conn>,
    /// Connections that were opened on preallocated sockets, without a request to the stack.
    preallocated_connects: u64,
    children: Vec<Client>,
}

/// Summary of one input.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunSummary {
    /// Counters of the channel server.
    pub stats: ChannelStats,
    /// Datagrams that reached the peer, from headers and bytes that the client wrote into the region.
    pub datagrams: u64,
    /// Connections that were opened by writes to the region.
    pub preallocated_connects: u64,
}

struct ChannelFixture {
    server: Arc<Mutex<Shard<ChannelServer>>>,
    peer: Shard<EchoPeer>,
    now: Instant,
}

fn config(address: &str) -> Config {
    let device = DeviceConfig::new("cable", DeviceKind::Memory);
    let mut config = Config::single(device, &[address.parse().expect("an address")], &[]);
    config.tcp.connections_max = 200;
    config
}

impl ChannelFixture {
    fn new(sockets: u32) -> Self {
        let channel = ChannelConfig {
            domains_max: 2,
            sockets_max: sockets,
            clients_max: 3,
            listeners_max: 64,
            socket_buffer_bytes: BUFFER_BYTES,
            large_buffers_max: LARGE_BUFFERS,
            large_buffer_bytes: LARGE_BUFFER_BYTES,
            ..ChannelConfig::default()
        };
        let now = Instant::from_millis(1000);
        let (a, b) = pair(MemoryConfig::default());
        let handler = ChannelServer::for_processes(&channel).expect("a valid configuration");
        let server = Shard::builder(config("10.0.0.1/24")).handler(handler).device("cable", a);
        let peer = Shard::builder(config("10.0.0.2/24")).handler(EchoPeer::default()).device("cable", b);
        let server = server.seed([1; 32]).now(now).build().expect("a shard");
        let peer = peer.seed([2; 32]).now(now).build().expect("a shard");
        let mut fixture = Self { server: Arc::new(Mutex::new(server)), peer, now };
        fixture.run_for(Duration::from_millis(1));
        fixture
    }

    fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let mut server = self.server.lock().expect("no panic");
            let a = server.poll_once(self.now).expect("a running shard");
            let b = self.peer.poll_once(self.now).expect("a running shard");
            let soon = self.now + Duration::from_micros(1);
            let next = [a.next_deadline, b.next_deadline].into_iter().flatten().min().unwrap_or(end);
            self.now = if a.work + b.work > 0 { soon } else { next.max(soon).min(end) };
        }
    }

    fn open_domain(&self) -> (SimulatedDomain, Client, SharedMemory) {
        let (domain, parts) = SameThread(self.server.clone()).open_domain().expect("a free domain");
        let copy = |file: &OwnedFd| file.try_clone().expect("a descriptor");
        let memory = SharedMemory::new(copy(&parts.memory), copy(&parts.region));
        (domain.clone(), Client::open(parts, Box::new(domain)).expect("a region"), memory)
    }

    fn stats(&self) -> ChannelStats {
        self.server.lock().expect("no panic").handler().stats()
    }
}

impl HostileDomain {
    fn pick_conn(&self, at: u64) -> Option<Conn> {
        let count = self.conns.len() as u64;
        (count > 0).then(|| self.conns[(at % count) as usize])
    }

    /// Performs a valid or an invalid operation on UDP sockets.
    fn udp_operation(&mut self, fixture: &mut ChannelFixture, at: u64, word: u64) {
        let peer = ([10, 0, 0, 2], 90).into();
        if word.is_multiple_of(8) || self.udp_sockets.is_empty() {
            let options = UdpOptions { recverr_v4: at & 4 != 0, gro: at & 8 != 0, ..UdpOptions::default() };
            self.udp_sockets
                .extend(self.client.udp_open(([0, 0, 0, 0], 200 + (at % 4) as u16).into(), options));
        }
        let count = self.udp_sockets.len() as u64;
        if count == 0 {
            return;
        }
        let index = (at / 8 % count) as usize;
        let socket = self.udp_sockets[index];
        let bytes = vec![at as u8; (word >> 3) as usize % 9000];
        match word % 8 {
            1 => {
                let byte_if = |bit: u32| (at >> bit & 1 == 1).then_some((word >> 56) as u8);
                let params = UdpSendParams {
                    to: Some(peer),
                    source: None,
                    gso_size: (word >> 40) as u16,
                    flow_label: None,
                    hop_limit: byte_if(5),
                    tos: byte_if(6),
                };
                let _ = self.client.udp_send_queued(socket, &params, &[IoSlice::new(&bytes)]);
            }
            // Forges a datagram header, and some bytes after it.
            2 => {
                let mut forged = [0; 48];
                for (at, byte) in forged.iter_mut().enumerate() {
                    *byte = (word >> (8 * (at % 8))) as u8;
                }
                if at & 16 == 0 {
                    // All fields but length and segment size are valid.
                    forged[4] = 0;
                    forged[8..10].copy_from_slice(&90_u16.to_ne_bytes());
                    forged[16..32].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 0, 0, 2]);
                    forged[32..].fill(0);
                }
                let _ = self.client.send(socket, &forged);
                let _ = self.client.send(socket, &bytes[..bytes.len().min(word as usize & 0xff)]);
            }
            3 => {
                let mut out = vec![0; bytes.len()];
                let buffers = &mut [IoSliceMut::new(&mut out)];
                if at & 1 == 0 {
                    let _ = self.client.udp_recv_into(socket, buffers);
                } else {
                    let _ = self.client.udp_peek_into(socket, buffers, word as usize, &[at]);
                }
            }
            4 => {
                let _ = self.client.udp_connect(socket, peer);
                let _ =
                    self.client.udp_send_queued(socket, &UdpSendParams::default(), &[IoSlice::new(&bytes)]);
            }
            // Sends a datagram of any length from outside.
            5 => fixture.peer.with(fixture.now, |echo, cx| {
                let to = Some(([10, 0, 0, 1], 200 + (at % 4) as u16).into());
                let _ = echo.udp.map(|udp| cx.udp_send(udp, to, &bytes));
            }),
            6 => {
                let _ = self.client.udp_error(socket, at & 1 == 0);
                let _ = self.client.udp_take_extended_error(socket);
            }
            7 if at & 1 == 0 => {
                let _ = self.client.close(socket);
                let _ = self.client.release(self.udp_sockets.remove(index));
            }
            _ => {}
        }
    }

    fn apply(&mut self, fixture: &mut ChannelFixture, code: u8, at: u64, word: u64) {
        // In the metadata, or with bit 31 of `at` anywhere in the memory.
        let offset_below =
            |limit: u64| if at & 1 << 31 == 0 { at % self.metadata_bytes.min(limit) } else { at % limit };
        match code % 20 {
            // Overwrites whole words, with small and large values.
            0..=4 => {
                let value = word >> (word % 64);
                self.memory.write(&value.to_ne_bytes(), offset_below(self.memory.bytes - 8) & !7);
            }
            5 => {
                self.memory.write(&(word as u32).to_ne_bytes(), offset_below(self.memory.bytes - 4) & !3);
            }
            6 => {
                self.memory.write(&[word as u8], offset_below(self.memory.bytes - 1));
            }
            // Ordinary operations of a well-behaved client.
            7 => {
                let options = ListenOptions::default();
                let at = ([0, 0, 0, 0], 100 + (at % 4) as u16).into();
                let _ = self.client.listen(at, options, (word % 9) as u32);
            }
            8 => {
                let conn = self.client.connect(([10, 0, 0, 2], 90).into(), ConnectOptions::default());
                self.conns.extend(conn);
            }
            9 => {
                let bytes = vec![at as u8; (word % 5000) as usize];
                if let Some(conn) = self.pick_conn(at) {
                    let _ = self.client.send(conn, &bytes);
                }
            }
            10 => {
                let mut out = vec![0; (word % 5000) as usize];
                if let Some(conn) = self.pick_conn(at) {
                    let _ = self.client.recv(conn, &mut out);
                }
            }
            11 => {
                if let Some(conn) = self.pick_conn(at) {
                    let _ = match word % 4 {
                        0 => self.client.close(conn),
                        1 => self.client.abort(conn),
                        2 => self.client.shutdown_write(conn),
                        _ => {
                            self.conns.retain(|other| *other != conn);
                            self.client.release(conn)
                        }
                    };
                }
            }
            12 => {
                let port = 100 + (at % 4) as u16;
                fixture.peer.with(fixture.now, |echo, cx| {
                    if let Ok(conn) = cx.connect(([10, 0, 0, 1], port).into(), ConnectOptions::default()) {
                        echo.unsent.insert(conn, vec![7; 100]);
                    }
                });
            }
            13 => match word % 3 {
                0 => self.children.extend(self.domain.fork(&self.client)),
                1 => drop(self.children.pop()),
                _ => {
                    let _ = self.client.unlisten((at % 70) as u32);
                }
            },
            // Overwrites every other word of a 512-byte range.
            14 => {
                let from = offset_below(self.memory.bytes - 512) & !7;
                for at in (from..from + 512).step_by(16) {
                    self.memory.write(&(word >> 1).to_ne_bytes(), at + 8 * (word & 1));
                }
            }
            15 => fixture.run_for(Duration::from_micros(word % 20_000)),
            16 => {
                if let Ok(conn) = self.client.connect_without_request(([10, 0, 0, 2], 90).into()) {
                    // A connection whose local end is unknown was opened without a request.
                    let ends = self.client.endpoints(conn);
                    self.preallocated_connects += u64::from(ends.is_ok_and(|[local, _]| local.port() == 0));
                    self.conns.push(conn);
                }
            }
            17 => {
                if let Some(conn) = self.pick_conn(at) {
                    let time = Duration::from_secs(word >> 2);
                    let _ = self.client.set_option(
                        conn,
                        match word % 4 {
                            0 => TcpOption::NoDelay(word & 4 != 0),
                            1 => TcpOption::Cork(word & 4 != 0),
                            2 => TcpOption::KeepIdle(time),
                            _ => TcpOption::UserTimeout(time),
                        },
                    );
                }
            }
            _ => self.udp_operation(fixture, at, word),
        }
        for _ in 0..20 {
            match self.client.next_event() {
                Some(ClientEvent::Accepted { conn, .. }) => self.conns.push(conn),
                Some(_) => {}
                None => break,
            }
        }
        self.client.flush();
    }

    /// Decodes a message as the broker does. If it is a request to the shard, the shard gets it.
    fn send_to_broker(&mut self, message: &[u8]) {
        if let Some(request) = broker::fuzz(message) {
            let number = self.client.number() as usize;
            let _ = self.domain.call(number, request);
        }
    }
}

/// Runs one input: operations, and messages to the broker (a byte 255, a length, and that many bytes).
///
/// # Panics
/// If the stack panics, or the well-behaved domain is affected.
pub fn run(data: &[u8]) {
    let _ = run_counted(data);
}

/// Runs one input and returns its summary.
///
/// # Panics
/// As [`run`].
pub fn run_counted(mut data: &[u8]) -> RunSummary {
    let sockets = SOCKETS_MAX[usize::from(data.first().is_some_and(|first| first & 64 != 0))];
    let mut fixture = ChannelFixture::new(sockets);
    let (_, mut client, _) = fixture.open_domain();
    let conn = client.connect(([10, 0, 0, 2], 90).into(), ConnectOptions::default()).expect("room");
    let mut honest = HonestDomain { client, conn, sent: 0, received: 0 };
    let (domain, client, memory) = fixture.open_domain();
    let buffer_bytes = 2 * sockets * BUFFER_BYTES + LARGE_BUFFERS * LARGE_BUFFER_BYTES;
    let metadata_bytes = memory.bytes - u64::from(buffer_bytes);
    let (conns, udp_sockets, children) = (Vec::new(), Vec::new(), Vec::new());
    let mut hostile = HostileDomain {
        client,
        domain,
        memory,
        metadata_bytes,
        conns,
        udp_sockets,
        preallocated_connects: 0,
        children,
    };
    for _ in 0..OPERATIONS_MAX {
        let Some((&code, rest)) = data.split_first() else { break };
        if code == u8::MAX {
            let length = rest.first().map_or(0, |length| usize::from(*length));
            let message = &rest[rest.len().min(1)..];
            let (message, rest) = message.split_at(length.min(message.len()));
            hostile.send_to_broker(message);
            data = rest;
        } else {
            let mut operation = [0; OPERATION_BYTES];
            let operation_bytes = data.len().min(OPERATION_BYTES);
            operation[..operation_bytes].copy_from_slice(&data[..operation_bytes]);
            data = &data[operation_bytes..];
            let at = u32::from_le_bytes(operation[1..5].try_into().expect("four bytes"));
            let word = u64::from_le_bytes(operation[5..].try_into().expect("eight bytes"));
            hostile.apply(&mut fixture, code, at.into(), word);
        }
        honest.exchange(u64::from(code));
        fixture.run_for(Duration::from_micros(50));
    }
    // All outstanding data arrive eventually.
    for _ in 0..200 {
        honest.exchange(0);
        fixture.run_for(Duration::from_millis(50));
    }
    assert_eq!(honest.received, honest.sent, "bytes of the well-behaved domain were lost");
    let stats = fixture.stats();
    let summary = RunSummary {
        stats,
        datagrams: fixture.peer.handler().datagrams,
        preallocated_connects: hostile.preallocated_connects,
    };
    // The resources of the hostile domain are reclaimed.
    drop(hostile);
    fixture.run_for(Duration::from_secs(400));
    honest.exchange(10);
    fixture.run_for(Duration::from_secs(1));
    honest.exchange(0);
    assert_eq!(honest.received, honest.sent);
    let server = fixture.server.lock().expect("no panic");
    assert_eq!((server.handler().sockets_in_use(), server.handler().domains()), (1, 1), "{stats:?}");
    drop(server);
    summary
}

/// Encodes an operation.
fn operation(code: u8, at: u32, word: u64) -> Vec<u8> {
    let mut bytes = vec![code];
    bytes.extend(at.to_le_bytes());
    bytes.extend(word.to_le_bytes());
    bytes
}

/// Returns the handwritten seed inputs.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let traffic = || {
        let mut all = operation(7, 0, 8);
        all.extend(operation(12, 0, 0));
        all.extend(operation(8, 0, 0));
        all.extend(operation(15, 0, 5000));
        for round in 0..6 {
            all.extend(operation(9, round, 700));
            all.extend(operation(15, 0, 3000));
            all.extend(operation(10, round, 5000));
        }
        all
    };
    // Overwrites range after range, with traffic in between.
    let everywhere = |value: u64| {
        let mut all = traffic();
        for part in 0..48 {
            all.extend(operation(14, part * 512, value << 1 | u64::from(part) & 1));
            all.extend(operation(8, 0, 0));
            all.extend(operation(9, part, 100));
            all.extend(operation(15, 0, 2000));
            all.extend(operation(10, part, 100));
        }
        all
    };
    let mut forks = traffic();
    for (at, word) in [(0, 0), (0, 0), (0, 1), (1, 2)] {
        forks.extend(operation(13, at, word));
        forks.extend(operation(9, at, 100));
        forks.extend(operation(15, 0, 3000));
    }
    let mut ends = traffic();
    for word in 0..4 {
        ends.extend(operation(11, word as u32, word));
        ends.extend(operation(15, 0, 9000));
        ends.extend(operation(8, 0, 0));
    }
    let mut messages = traffic();
    for message in [
        // An attachment, queries for an existing and a missing socket, an unknown request, a fork, an exec
        // with too many sockets, and a missing listener to join.
        &[1, 0, 0, 0, 0, 0, 0][..],
        &[2, 0, 0, 0, 1, 0, 0, 5, 0, 0, 0, 0],
        &[3, 0, 0, 0, 1, 0, 0, 5, 255, 255, 255, 255],
        &[4, 0, 0, 0, 1, 0, 0, 7, 0, 0, 0, 0],
        &[5, 0, 0, 0, 2],
        &[6, 0, 0, 0, 3, 255, 255, 255, 255],
        &[7, 0, 0, 0, 1, 0, 0, 1, 255, 255, 255, 127],
    ] {
        messages.push(u8::MAX);
        messages.push(message.len() as u8);
        messages.extend(message);
    }
    // Datagrams in both directions, with forged headers and overwritten words in between.
    let mut datagrams = traffic();
    for round in 0..20 {
        datagrams.extend(operation(18, round % 4, 0));
        datagrams.extend(operation(18, round, 1 | u64::from(round) << 10));
        datagrams.extend(operation(18, round, 1 | 1000 << 3 | u64::from(round) << 40));
        datagrams.extend(operation(18, round, 4 | 600 << 3));
        datagrams.extend(operation(18, round, 5 | u64::from(round) << 11));
        datagrams.extend(operation(15, 0, 2000));
        datagrams.extend(operation(18, round, 3 | 2000 << 3));
        datagrams.extend(operation(18, round << 2, 2 | u64::from(round) << 8));
        datagrams.extend(operation(14, (1 << 31) + round * 4096, u64::from(round) << 33 | 5));
        datagrams.extend(operation(18, round, 7));
        datagrams.extend(operation(18, round, 6));
    }
    // Connections opened on preallocated sockets, with options, while the sockets' words are overwritten.
    let mut preallocated = operation(7 + 60, 0, 8);
    preallocated.extend(traffic());
    for round in 0..20 {
        preallocated.extend(operation(8, 0, 0));
        preallocated.extend(operation(15, 0, 2000));
        preallocated.extend(operation(16, 0, 0));
        preallocated.extend(operation(17, round, u64::from(round) << 3 | u64::from(round % 4)));
        preallocated.extend(operation(9, round, 100));
        if round % 3 == 2 {
            preallocated.extend(operation(14, round * 512, u64::from(round) << 32));
        }
        preallocated.extend(operation(11, round, u64::from(round) % 4));
    }
    vec![
        ("empty", Vec::new()),
        ("traffic", traffic()),
        ("zeroes", everywhere(0)),
        ("ones", everywhere(u64::MAX << 8 | 1)),
        ("small_numbers", everywhere(3)),
        ("forks", forks),
        ("ends", ends),
        ("messages", messages),
        ("datagrams", datagrams),
        ("preallocated", preallocated),
    ]
}
