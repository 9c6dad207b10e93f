//! A host of the simulation: a stack, a device in memory, and a minimal application.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use ginnel_stack::device::{BURST_FRAMES_MAX, Capabilities, RxBurst, RxFrame, TxMeta, TxQueue};
use ginnel_stack::events::{CloseReason, Event};
use ginnel_stack::handle::{Conn, Listener, PortId};
use ginnel_stack::link::LinkConfig;
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::stack::{Nothing, Restorer, Stack, StackConfig};
use ginnel_stack::time::Instant;
use ginnel_stack::wire::MacAddr;
use postcard::ser_flavors::{Flavor, StdVec};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// Configuration of a host.
#[derive(Clone, Debug, Default)]
pub struct HostConfig {
    /// Configuration of the stack.
    pub stack: StackConfig,
    /// MTU of the device in bytes; 0 means 1,500.
    pub mtu: usize,
    /// Leaves received data unread until the test calls [`Host::read`].
    pub defer_reads: bool,
    /// Accepts router advertisements.
    pub accept_ra: bool,
    /// Static neighbour entries.
    pub static_neighbours: Vec<(IpAddr, MacAddr)>,
}

/// Data that a connection received, and how it ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnRecord {
    /// The received bytes, in order.
    pub bytes: Vec<u8>,
    /// True if the handshake succeeded.
    pub connected: bool,
    /// True if FIN was received.
    pub peer_closed: bool,
    /// Reason of the end, once the connection has ended.
    pub closed: Option<CloseReason>,
    /// Number of bytes that [`Event::Acked`] reported.
    pub acked: u64,
}

/// Frames that the stack has sent and the simulation has not taken.
#[derive(Clone, Default)]
pub(crate) struct FrameQueue(Arc<Mutex<QueuedFrames>>);

#[derive(Default)]
struct QueuedFrames {
    frames: Vec<Vec<u8>>,
    /// Maximum number of frames in the queue; `None` is unlimited.
    capacity: Option<usize>,
}

pub(crate) struct FrameQueueTx {
    queue: FrameQueue,
    capabilities: Capabilities,
    buffer: Vec<u8>,
}

impl FrameQueue {
    /// Returns the frames sent since the last call.
    pub fn take(&self) -> Vec<Vec<u8>> {
        core::mem::take(&mut self.queue().frames)
    }

    fn queue(&self) -> MutexGuard<'_, QueuedFrames> {
        self.0.lock().expect("no panic while the queue is locked")
    }
}

impl FrameQueueTx {
    /// Creates the transmit queue of a device without offloads.
    pub fn new(queue: FrameQueue, mac: [u8; 6], mtu: usize) -> Self {
        let capabilities =
            Capabilities { mac, mtu, tx_checksum: false, gso_bytes_max: 0, uso: false, labels: false };
        Self { queue, capabilities, buffer: Vec::new() }
    }
}

impl TxQueue for FrameQueueTx {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        let queue = self.queue.queue();
        if queue.capacity.is_some_and(|room| queue.frames.len() >= room) {
            return None;
        }
        drop(queue);
        // A device's buffer contains arbitrary old bytes.
        self.buffer.clear();
        self.buffer.resize(len, 0xa5);
        Some(&mut self.buffer)
    }

    fn commit(&mut self, len: usize, _meta: TxMeta) {
        let frame = self.buffer[..len].to_vec();
        self.queue.queue().frames.push(frame);
    }

    fn flush(&mut self, _now: Instant) {}
}

/// A host.
pub struct Host {
    /// The stack.
    pub stack: Stack,
    /// The port of the stack's device.
    pub port: PortId,
    /// The IPv4 address.
    pub v4: Ipv4Addr,
    /// The IPv6 address.
    pub v6: Ipv6Addr,
    /// All events, in order.
    pub events: Vec<Event>,
    /// Accepted connections, in order.
    pub accepted: Vec<Conn>,
    /// State of each connection.
    pub received: BTreeMap<Conn, ConnRecord>,
    /// Bytes that wait for send space: the bytes, the number already sent, and whether FIN follows.
    sending: BTreeMap<Conn, (Vec<u8>, usize, bool)>,
    /// Leaves received data unread.
    pub defer_reads: bool,
    /// Leaves connections in the accept queue.
    pub defer_accepts: bool,
    /// Closes a connection when the peer closes.
    pub close_on_peer_close: bool,
    sent_frames: FrameQueue,
    number: u8,
    config: HostConfig,
}

/// Returns the image of a stack.
///
/// # Panics
/// If the stack cannot be saved.
pub fn image_of(stack: &Stack) -> Vec<u8> {
    assert_eq!(stack.cannot_be_saved(), None);
    let mut serializer = postcard::Serializer { output: StdVec::new() };
    stack.save(&mut serializer).expect("memory takes everything");
    serializer.output.finalize().expect("memory takes everything")
}

/// Lets a stack take over an image.
///
/// # Errors
/// As [`Stack::restore_image`], or the image is cut off.
pub fn restore(stack: &mut Stack, image: &[u8], owner: &mut dyn Restorer) -> Result<(), String> {
    let image = postcard::from_bytes(image).map_err(|error| error.to_string())?;
    stack.restore_image(image, owner)
}

impl HostConfig {
    /// Returns a stack with a device.
    fn stack(&self, number: u8, key: [u8; 32], now: Instant, frames: &FrameQueue) -> (Stack, PortId) {
        let mut stack = Stack::new(self.stack.clone(), key, now).expect("the test's configuration is valid");
        let mtu = if self.mtu == 0 { 1500 } else { self.mtu };
        let port = stack.add_port(Box::new(FrameQueueTx::new(frames.clone(), [2, 0, 0, 0, 0, number], mtu)));
        let mut addresses = vec![(IpAddr::V4(v4(number)), 24)];
        if mtu >= 1280 {
            addresses.push((IpAddr::V6(v6(number)), 64));
        }
        let link = LinkConfig {
            name: format!("sim{number}"),
            addresses,
            accept_ra: self.accept_ra,
            static_neighbours: self.static_neighbours.clone(),
            ..LinkConfig::default()
        };
        stack.add_link(port, &link).expect("the link is valid");
        (stack, port)
    }
}

fn v4(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, number)
}

fn v6(number: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, number.into())
}

impl Host {
    pub(super) fn new(number: u8, config: &HostConfig, seed: u64, now: Instant) -> Self {
        let mut key = [number; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        let sent_frames = FrameQueue::default();
        let (stack, port) = config.stack(number, key, now, &sent_frames);
        Self {
            stack,
            port,
            v4: v4(number),
            v6: v6(number),
            events: Vec::new(),
            accepted: Vec::new(),
            received: BTreeMap::new(),
            sending: BTreeMap::new(),
            defer_reads: config.defer_reads,
            defer_accepts: false,
            close_on_peer_close: false,
            sent_frames,
            number,
            config: config.clone(),
        }
    }

    /// Exchanges the stack for another one that takes over its image: another process with another seed.
    /// Returns the image.
    ///
    /// # Panics
    /// If that fails, or the image of the other stack differs.
    pub fn exchange(&mut self, now: Instant) -> Vec<u8> {
        self.exchange_with(now, &mut Nothing)
    }

    /// Like [`Host::exchange`], with an owner that makes filters and sources again.
    pub fn exchange_with(&mut self, now: Instant, owner: &mut dyn Restorer) -> Vec<u8> {
        let image = image_of(&self.stack);
        let (mut stack, _) = self.config.stack(self.number, [self.number ^ 0xff; 32], now, &self.sent_frames);
        restore(&mut stack, &image, owner).expect("the image is complete");
        assert!(image_of(&stack) == image, "the image of the restored stack differs");
        stack.check_invariants();
        self.stack = stack;
        image
    }

    /// Returns a stack like that of this host, as it was made.
    pub fn fresh_stack(&self, now: Instant) -> Stack {
        self.config.stack(self.number, [self.number; 32], now, &self.sent_frames).0
    }

    /// Limits the number of frames that the device takes per turn; `None` removes the limit.
    pub fn set_device_capacity(&mut self, frames: Option<usize>) {
        self.sent_frames.queue().capacity = frames;
    }

    /// Listens on all IPv4 addresses.
    ///
    /// # Panics
    /// If the port is in use.
    pub fn listen(&mut self, port: u16) -> Listener {
        let addr = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port);
        self.stack.listen(addr, ListenOptions::default()).expect("the port is free")
    }

    /// Opens a connection.
    ///
    /// # Panics
    /// If the stack refuses the connection.
    pub fn connect(&mut self, now: Instant, remote: SocketAddr) -> Conn {
        let conn = self
            .stack
            .connect(now, remote, &ConnectOptions::default())
            .expect("the stack opens the connection");
        self.received.insert(conn, ConnRecord::default());
        self.stack.transmit(now);
        conn
    }

    /// Sends bytes as send space becomes available, then closes the write side if `then_fin` is set. Discards
    /// the bytes of an earlier call that still wait for send space.
    pub fn send_all(&mut self, now: Instant, conn: Conn, bytes: Vec<u8>, then_fin: bool) {
        self.sending.insert(conn, (bytes, 0, then_fin));
        self.send_queued(conn);
        self.stack.transmit(now);
    }

    fn send_queued(&mut self, conn: Conn) {
        let Some((bytes, done, fin)) = self.sending.get_mut(&conn) else { return };
        while *done < bytes.len() {
            match self.stack.send(conn, &bytes[*done..]) {
                Ok(0) | Err(_) => return,
                Ok(n) => *done += n,
            }
        }
        let fin = *fin;
        self.sending.remove(&conn);
        if fin {
            let _ = self.stack.shutdown_write(conn);
        }
    }

    /// Reads up to `max` bytes into the connection's record. Returns the number of bytes read.
    pub fn read(&mut self, conn: Conn, max: usize) -> usize {
        let mut buffer = vec![0; max];
        let n = self.stack.recv(conn, &mut buffer).unwrap_or(0);
        self.received.entry(conn).or_default().bytes.extend_from_slice(&buffer[..n]);
        n
    }

    /// Runs one turn with these received frames.
    pub(super) fn turn(&mut self, now: Instant, frames: &[Vec<u8>]) {
        for chunk in frames.chunks(BURST_FRAMES_MAX) {
            let mut burst = RxBurst::new();
            for bytes in chunk {
                burst.push(RxFrame::new(bytes));
            }
            self.stack.receive(now, self.port, &burst);
            self.take_events(&burst);
            self.stack.finish_burst(&burst);
        }
        self.stack.advance(now);
        self.take_events(&RxBurst::new());
        self.stack.transmit(now);
        self.stack.check_invariants();
    }

    fn take_events(&mut self, burst: &RxBurst<'_>) {
        while let Some(event) = self.stack.next_event() {
            self.events.push(event);
            match event {
                Event::Incoming { listener } if !self.defer_accepts => {
                    if let Some(conn) = self.stack.accept(listener) {
                        self.accepted.push(conn);
                        self.received.entry(conn).or_default().connected = true;
                    }
                }
                Event::Connected { conn } => {
                    self.received.entry(conn).or_default().connected = true;
                    self.send_queued(conn);
                }
                Event::Data { conn, data } => {
                    let deferred = self.defer_reads || self.stack.buffered(conn) > 0;
                    if deferred {
                        self.stack.consume(conn, data, 0, burst);
                        if !self.defer_reads {
                            while self.read(conn, 1 << 16) > 0 {}
                        }
                    } else {
                        let bytes = self.stack.inline_data(burst, &data);
                        self.received.entry(conn).or_default().bytes.extend_from_slice(bytes);
                        self.stack.consume(conn, data, bytes.len(), burst);
                    }
                }
                Event::Readable { conn } if !self.defer_reads => while self.read(conn, 1 << 16) > 0 {},
                Event::Writable { conn } => self.send_queued(conn),
                Event::Acked { conn, bytes } => {
                    self.received.entry(conn).or_default().acked += u64::from(bytes)
                }
                Event::PeerClosed { conn } => {
                    self.received.entry(conn).or_default().peer_closed = true;
                    if self.close_on_peer_close {
                        let _ = self.stack.close(conn);
                    }
                }
                Event::Closed { conn, reason, .. } => {
                    while !self.defer_reads && self.read(conn, 1 << 16) > 0 {}
                    let r = self.received.entry(conn).or_default();
                    assert!(r.closed.is_none(), "a connection reported its end twice");
                    r.closed = Some(reason);
                }
                _ => {}
            }
        }
    }

    pub(super) fn take_sent(&mut self) -> Vec<Vec<u8>> {
        self.sent_frames.take()
    }
}
