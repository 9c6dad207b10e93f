//! The responder on smoltcp, written for speed: each turn has one pass over the received frames, one over the
//! sockets and one over the frames to send. There are as many sockets as connections, because each packet is
//! looked up among all of them. A closed socket listens again as soon as its last acknowledgement was sent.
//! So smoltcp keeps no TIME_WAIT, which saves work that Ginnel does.

use super::{Checksums, ROUTER_IP, SERVER, SERVER_MAC, Server};
use crate::frames::tx_meta;
use crate::http;
use core::net::Ipv4Addr;
use ginnel_stack::device::{Device as MemoryDevice, RxBurst, RxQueue, TxQueue};
use ginnel_stack::time::Instant;
use smoltcp::iface::{Config, Interface, PollIngressSingleResult, SocketHandle, SocketSet};
use smoltcp::phy::{self, Checksum, ChecksumCapabilities, Device, DeviceCapabilities, Medium};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::time::Instant as SmoltcpInstant;
use smoltcp::wire::{EthernetAddress, HardwareAddress, IpCidr};

/// Size of each socket's receive buffer and send buffer in bytes; more than a request and a response.
const BUFFER_BYTES: usize = 2048;

/// A burst of received frames and the transmit queue, as smoltcp's device.
struct BurstDevice<'b, 'd> {
    frames: core::slice::Iter<'b, ginnel_stack::device::RxFrame<'d>>,
    tx: &'b mut (dyn TxQueue + Send),
    checksums: Checksums,
}

struct RxToken<'a>(&'a [u8]);
struct TxToken<'a> {
    tx: &'a mut (dyn TxQueue + Send),
    offload: bool,
}

impl phy::RxToken for RxToken<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

impl phy::TxToken for TxToken<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        match self.tx.reserve(len) {
            Some(room) => {
                let result = f(room);
                self.tx.commit(len, tx_meta(self.offload));
                result
            }
            // A token must accept a frame; a frame without space in the ring is lost, as on a link.
            None => f(&mut vec![0; len]),
        }
    }
}

impl Device for BurstDevice<'_, '_> {
    type RxToken<'a>
        = RxToken<'a>
    where
        Self: 'a;
    type TxToken<'a>
        = TxToken<'a>
    where
        Self: 'a;

    fn receive(&mut self, _now: SmoltcpInstant) -> Option<(Self::RxToken<'_>, Self::TxToken<'_>)> {
        let frame = self.frames.next()?;
        let offload = self.checksums == Checksums::Device;
        Some((RxToken(frame.bytes), TxToken { tx: self.tx, offload }))
    }

    fn transmit(&mut self, _now: SmoltcpInstant) -> Option<Self::TxToken<'_>> {
        Some(TxToken { tx: self.tx, offload: self.checksums == Checksums::Device })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 1514;
        // Both stacks compute the checksums of IP headers in any case.
        if self.checksums == Checksums::Device {
            let mut checksum = ChecksumCapabilities::default();
            checksum.tcp = Checksum::None;
            capabilities.checksum = checksum;
        }
        capabilities
    }
}

/// The responder.
pub struct SmoltcpServer {
    rx: Box<dyn RxQueue + Send>,
    tx: Box<dyn TxQueue + Send>,
    interface: Interface,
    sockets: SocketSet<'static>,
    handles: Vec<SocketHandle>,
    checksums: Checksums,
    response: Vec<u8>,
    keep_alive: bool,
    /// Number of times that a socket was set to listen again.
    reused: u64,
    /// Millisecond in which smoltcp's timers ran last. Without frames they need to run only once in each.
    timers_ran_ms: u64,
}

impl SmoltcpServer {
    /// Creates a responder with `connections` sockets on a device.
    pub fn new(
        mut device: MemoryDevice,
        checksums: Checksums,
        connections: u32,
        keep_alive: bool,
        now: Instant,
    ) -> Self {
        let none = [];
        let mut burst = BurstDevice { frames: none.iter(), tx: &mut *device.tx, checksums };
        let mut config = Config::new(HardwareAddress::Ethernet(EthernetAddress(SERVER_MAC)));
        config.random_seed = 7;
        let mut interface = Interface::new(config, &mut burst, instant(now));
        interface.update_ip_addrs(|addresses| {
            let address = IpCidr::new(Ipv4Addr::from_bits(SERVER.ip).into(), 24);
            addresses.push(address).expect("there is room for one address");
        });
        let routes = interface.routes_mut();
        routes.add_default_ipv4_route(Ipv4Addr::from_bits(ROUTER_IP)).expect("there is room for one route");
        let mut sockets = SocketSet::new(Vec::new());
        let handles = (0..connections)
            .map(|_| {
                let buffer = || SocketBuffer::new(vec![0; BUFFER_BYTES]);
                let mut socket = Socket::new(buffer(), buffer());
                socket.set_nagle_enabled(false);
                socket.listen(SERVER.port).expect("a new socket can listen");
                sockets.add(socket)
            })
            .collect();
        let response = http::response(keep_alive);
        let MemoryDevice { rx, tx } = device;
        let (reused, timers_ran_ms) = (0, 0);
        Self { rx, tx, interface, sockets, handles, checksums, response, keep_alive, reused, timers_ran_ms }
    }
}

fn instant(now: Instant) -> SmoltcpInstant {
    SmoltcpInstant::from_micros(now.as_micros() as i64)
}

impl Server for SmoltcpServer {
    fn turn(&mut self, now: Instant) -> usize {
        let timestamp = instant(now);
        let mut received = RxBurst::new();
        self.rx.rx_burst(now, &mut received);
        let due = now.as_millis() != self.timers_ran_ms;
        if received.is_empty() && !due {
            return 0;
        }
        self.timers_ran_ms = now.as_millis();
        let mut burst = BurstDevice { frames: received.iter(), tx: &mut *self.tx, checksums: self.checksums };
        self.interface.poll_maintenance(timestamp);
        while self.interface.poll_ingress_single(timestamp, &mut burst, &mut self.sockets)
            != PollIngressSingleResult::None
        {}
        respond_all(&mut self.sockets, &self.handles, &self.response, self.keep_alive);
        self.interface.poll_egress(timestamp, &mut burst, &mut self.sockets);
        self.reused += listen_again(&mut self.sockets, &self.handles);
        self.tx.flush(now);
        received.len()
    }

    fn facts(&self) -> Vec<(&'static str, u64)> {
        vec![("sockets_reused", self.reused)]
    }
}

fn respond_all(sockets: &mut SocketSet<'_>, handles: &[SocketHandle], response: &[u8], keep_alive: bool) {
    for &handle in handles {
        let socket = sockets.get_mut::<Socket<'_>>(handle);
        if socket.can_recv() {
            // A request may wrap around the end of the ring buffer.
            let mut request = [0; 256];
            let len = socket.recv_slice(&mut request).unwrap_or(0);
            if http::is_request(&request[..len]) {
                let sent = socket.send_slice(response);
                debug_assert_eq!(sent, Ok(response.len()));
                if !keep_alive {
                    socket.close();
                }
            }
        } else if socket.state() == State::CloseWait {
            socket.close();
        }
    }
}

/// Sets closed sockets to listen again, and returns their number. Must be called after all segments of the
/// sockets were sent.
fn listen_again(sockets: &mut SocketSet<'_>, handles: &[SocketHandle]) -> u64 {
    let mut count = 0;
    for &handle in handles {
        let socket = sockets.get_mut::<Socket<'_>>(handle);
        if matches!(socket.state(), State::TimeWait | State::Closed) {
            socket.listen(SERVER.port).expect("a closed socket can listen");
            count += 1;
        }
    }
    count
}
