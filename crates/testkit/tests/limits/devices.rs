//! The ring of a memory device whose other end takes no frames.

use super::common::pattern;
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::time::Duration;
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::{Device, RxBurst, RxQueue};
use ginnel_stack::events::Event;
use ginnel_stack::handle::{Conn, PortId};
use ginnel_stack::link::LinkConfig;
use ginnel_stack::options::{ConnectOptions, ListenOptions, SocketOptions, TcpOption};
use ginnel_stack::stack::{Stack, StackConfig};
use ginnel_stack::time::Instant;

/// A stack with the receive queues of its devices.
struct Endpoint {
    stack: Stack,
    ports: Vec<(PortId, Box<dyn RxQueue + Send>)>,
    accepted: Vec<Conn>,
    read: Vec<u8>,
}

impl Endpoint {
    /// Creates a stack that has the address 10.`n`.0.`host` on device `n`.
    fn new(host: u8, devices: Vec<(u8, Device)>) -> Self {
        let mut stack = Stack::new(StackConfig::default(), [host; 32], Instant::ZERO).unwrap();
        let mut ports = Vec::new();
        for (n, device) in devices {
            let port = stack.add_port(device.tx);
            let addresses = vec![(address(n, host), 24)];
            let link = LinkConfig { name: format!("lan{n}"), addresses, ..LinkConfig::default() };
            stack.add_link(port, &link).unwrap();
            ports.push((port, device.rx));
        }
        Self { stack, ports, accepted: Vec::new(), read: Vec::new() }
    }

    fn turn(&mut self, now: Instant) {
        for at in 0..self.ports.len() {
            let (port, rx) = &mut self.ports[at];
            let mut burst = RxBurst::new();
            rx.rx_burst(now, &mut burst);
            self.stack.receive(now, *port, &burst);
            while let Some(event) = self.stack.next_event() {
                match event {
                    Event::Incoming { listener } => self.accepted.extend(self.stack.accept(listener)),
                    Event::Data { conn, data } => {
                        let bytes = self.stack.inline_data(&burst, &data);
                        self.read.extend_from_slice(bytes);
                        self.stack.consume(conn, data, bytes.len(), &burst);
                    }
                    Event::Readable { conn } => {
                        let mut buffer = [0; 4096];
                        while let Ok(count @ 1..) = self.stack.recv(conn, &mut buffer) {
                            self.read.extend_from_slice(&buffer[..count]);
                        }
                    }
                    _ => {}
                }
            }
            self.stack.finish_burst(&burst);
        }
        self.stack.advance(now);
        self.stack.transmit(now);
        self.stack.check_invariants();
    }

    fn connect(&mut self, now: Instant, network: u8) -> Conn {
        let to = SocketAddr::new(address(network, 1), 80);
        self.stack.connect(now, to, &ConnectOptions::default()).unwrap()
    }
}

fn address(network: u8, host: u8) -> IpAddr {
    Ipv4Addr::new(10, network, 0, host).into()
}

/// Runs turns of all stacks for `time`.
fn run(ends: &mut [&mut Endpoint], now: &mut Instant, time: Duration) {
    let until = *now + time;
    while *now < until {
        ends.iter_mut().for_each(|end| end.turn(*now));
        *now += Duration::from_micros(100);
    }
}

// limit: bytes in a ring of the memory device
#[test]
fn full_ring_does_not_affect_other_devices() {
    let small = MemoryConfig { ring_bytes: 1, ..MemoryConfig::default() }.without_offloads();
    let ((near, far), (other, away)) = (pair(small), pair(MemoryConfig::default()));
    let mut server = Endpoint::new(1, vec![(0, near), (1, other)]);
    let (mut slow, mut quick) = (Endpoint::new(2, vec![(0, far)]), Endpoint::new(2, vec![(1, away)]));
    let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 80);
    let socket = SocketOptions { send_buffer_bytes: Some(1 << 20), ..SocketOptions::default() };
    server.stack.listen(any, ListenOptions { socket, ..ListenOptions::default() }).unwrap();
    let mut now = Instant::from_millis(1000);
    let lost = slow.connect(now, 0);
    run(&mut [&mut server, &mut slow, &mut quick], &mut now, Duration::from_millis(20));
    let conn = quick.connect(now, 1);
    run(&mut [&mut server, &mut slow, &mut quick], &mut now, Duration::from_millis(20));
    let [to_slow, to_quick] = server.accepted[..] else { panic!("{:?}", server.accepted) };

    // One end takes no frames; its connection has more to send than the ring holds.
    let text = pattern(3, 300_000);
    assert_eq!(server.stack.send(to_slow, &text), Ok(text.len()));
    run(&mut [&mut server, &mut quick], &mut now, Duration::from_millis(5));
    let full = server.stack.tcp_stats().device_full;
    assert!(full > 0);
    let before = *server.stack.tcp_stats();
    for round in 0..100usize {
        server.stack.send(to_quick, &pattern(4, 1000)).unwrap();
        quick.stack.send(conn, b"more").unwrap();
        run(&mut [&mut server, &mut quick], &mut now, Duration::from_millis(1));
        assert_eq!(quick.read.len(), 1000 * (round + 1), "the other device has room");
    }
    assert_eq!(server.read.len(), 400);
    assert_eq!(server.stack.tcp_stats().closed_timeout, before.closed_timeout);

    // It takes frames again and receives everything.
    run(&mut [&mut server, &mut slow, &mut quick], &mut now, Duration::from_secs(2));
    assert!(slow.read == text, "{} of {} bytes", slow.read.len(), text.len());
    let full = server.stack.tcp_stats().device_full;
    slow.stack.send(lost, b"thanks").unwrap();
    run(&mut [&mut server, &mut slow, &mut quick], &mut now, Duration::from_secs(1));
    assert_eq!((server.read.len(), server.stack.tcp_stats().device_full), (406, full));
}

/// Urgent connections fill one device.
#[test]
fn refused_urgent_connections_do_not_stop_usual_ones_on_other_devices() {
    let small = MemoryConfig { ring_bytes: 1, ..MemoryConfig::default() }.without_offloads();
    let ((near, far), (other, away)) = (pair(small), pair(MemoryConfig::default()));
    let mut server = Endpoint::new(1, vec![(0, near), (1, other)]);
    let (mut slow, mut quick) = (Endpoint::new(2, vec![(0, far)]), Endpoint::new(2, vec![(1, away)]));
    server.stack.set_refused_by_class();
    let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 80);
    server.stack.listen(any, ListenOptions::default()).unwrap();
    let mut now = Instant::from_millis(1000);
    for _ in 0..10 {
        for _ in 0..10 {
            slow.connect(now, 0);
        }
        run(&mut [&mut server, &mut slow, &mut quick], &mut now, Duration::from_millis(5));
    }
    quick.connect(now, 1);
    run(&mut [&mut server, &mut slow, &mut quick], &mut now, Duration::from_millis(20));
    let (to_quick, urgent) =
        server.accepted.split_last().map(|(last, others)| (*last, others.to_vec())).unwrap();
    assert_eq!(urgent.len(), 100);
    for conn in &urgent {
        server.stack.set_option(*conn, TcpOption::Priority(6)).unwrap();
        assert_eq!(server.stack.send(*conn, &[0; 10_000]), Ok(10_000));
    }
    run(&mut [&mut server, &mut quick], &mut now, Duration::from_millis(5));
    let full = server.stack.tcp_stats().device_full;
    for round in 1..=20usize {
        server.stack.send(to_quick, &pattern(4, 1000)).unwrap();
        run(&mut [&mut server, &mut quick], &mut now, Duration::from_millis(1));
        assert_eq!(quick.read.len(), 1000 * round, "the other device has room");
    }
    let refused = server.stack.tcp_stats().device_full - full;
    assert!(refused >= 20, "an urgent one is tried in each round: {refused}");
    assert!(refused < 20 * 64, "the others wait for their turn: {refused}");
    run(&mut [&mut server, &mut slow, &mut quick], &mut now, Duration::from_secs(2));
    assert_eq!(slow.read.len(), 100 * 10_000);
}

/// The windows of each connection admit more than a device takes at once, and the stack has another device.
#[test]
fn connections_of_a_class_take_turns_on_each_device() {
    const CONNS: usize = 100;
    let small = MemoryConfig { ring_bytes: 1, ..MemoryConfig::default() }.without_offloads();
    let (slow_device, quick_device) = (pair(small.clone()), pair(small));
    let mut server = Endpoint::new(1, vec![(0, slow_device.0), (1, quick_device.0)]);
    let mut slow = Endpoint::new(2, vec![(0, slow_device.1)]);
    let mut quick = Endpoint::new(2, vec![(1, quick_device.1)]);
    server.stack.set_refused_by_class();
    let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 80);
    let socket = SocketOptions { send_buffer_bytes: Some(1 << 20), ..SocketOptions::default() };
    server.stack.listen(any, ListenOptions { socket, ..ListenOptions::default() }).unwrap();
    let mut now = Instant::from_millis(1000);
    for number in 0..CONNS {
        let (client, device) = if number % 10 == 9 { (&mut quick, 1) } else { (&mut slow, 0) };
        client.connect(now, device);
        run(&mut [&mut server, &mut slow, &mut quick], &mut now, Duration::from_millis(2));
    }
    let conns = server.accepted.clone();
    assert_eq!(conns.len(), CONNS);
    for (number, conn) in (0u8..).zip(&conns) {
        assert_eq!(server.stack.send(*conn, &[number; 400_000]), Ok(400_000));
    }
    // Each device passes a full ring on in a millisecond.
    for _ in 0..400 {
        for client in [&mut slow, &mut quick] {
            run(&mut [&mut server], &mut now, Duration::from_micros(500));
            run(&mut [&mut server, client], &mut now, Duration::from_micros(5));
        }
    }
    for (client, count) in [(slow, 9 * CONNS / 10), (quick, CONNS / 10)] {
        let mut bytes = vec![0; CONNS];
        client.read.iter().for_each(|byte| bytes[usize::from(*byte)] += 1);
        bytes.retain(|bytes| *bytes > 0);
        assert_eq!(bytes.len(), count, "each connection has had a turn");
        let (least, most) = (*bytes.iter().min().unwrap(), *bytes.iter().max().unwrap());
        assert!(most < 400_000 && 4 * least >= most, "{least} and {most} of {count} connections");
    }
}

/// Returns how many bytes of a bulk transfer arrive before a message of another connection that was queued
/// while the ring of the device was full.
fn bulk_bytes_before_message(priority: u8) -> usize {
    let (near, far) = pair(MemoryConfig { ring_bytes: 1, ..MemoryConfig::default() }.without_offloads());
    let mut server = Endpoint::new(1, vec![(0, near)]);
    let mut client = Endpoint::new(2, vec![(0, far)]);
    let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 80);
    server.stack.listen(any, ListenOptions::default()).unwrap();
    let mut now = Instant::from_millis(1000);
    for _ in 0..41 {
        client.connect(now, 0);
    }
    run(&mut [&mut server, &mut client], &mut now, Duration::from_millis(20));
    let (conn, bulk) = server.accepted.split_last().map(|(last, others)| (*last, others.to_vec())).unwrap();
    for conn in bulk {
        assert_eq!(server.stack.send(conn, &[b'b'; 10_000]), Ok(10_000));
    }
    // The client takes no frames for a while. The ring holds those of a few connections.
    run(&mut [&mut server], &mut now, Duration::from_micros(300));
    assert!(server.stack.tcp_stats().device_full > 0);
    server.stack.send_message(conn, b"low", 0).unwrap();
    run(&mut [&mut server], &mut now, Duration::from_micros(300));
    server.stack.send_message(conn, b"M", priority).unwrap();
    run(&mut [&mut server], &mut now, Duration::from_micros(300));
    run(&mut [&mut client, &mut server], &mut now, Duration::from_millis(200));
    assert_eq!(client.read.len(), 400_004);
    client.read.iter().position(|byte| *byte == b'M').unwrap()
}

/// A connection that has an urgent message is sent first when the device has room again.
#[test]
fn urgent_message_waits_for_no_other_connection() {
    let [urgent, usual] = [6, 0].map(bulk_bytes_before_message);
    assert!(2 * urgent < usual, "{urgent} and {usual} bytes were received before the message");
}
