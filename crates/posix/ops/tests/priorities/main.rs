//! The order in which `epoll_wait` returns descriptors of a stack with priorities, in simulated time. The
//! program is slower than its peers: most messages have arrived when it waits for the first time.

mod datagrams;
mod deferred_syn;
mod faults;
mod unordered;

use core::ffi::c_int;
use core::time::Duration;
use ginnel::channel::control::SameThread;
use ginnel::channel::{ChannelConfig, ChannelServer};
use ginnel::config::{Config, DeviceConfig, DeviceKind};
use ginnel::{
    Conn, ConnectOptions, Context, Datagram, Error, Handler, Instant, Listener, Shard, SocketOptions,
    UdpHandle,
};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_posix_ops::{EpollEvent, Ops, OpsConfig, Timeout, UserSlice, UserSliceMut};
use ginnel_stack::device::{Device, RxBurst, RxQueue};
use rustix::fd::{AsRawFd, OwnedFd, RawFd};
use rustix::io::Errno;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const HIGH: u8 = 6;
const MESSAGE_BYTES: usize = 16;
const IN: u32 = libc::EPOLLIN as u32;
const ET: u32 = libc::EPOLLET as u32;
const ONESHOT: u32 = libc::EPOLLONESHOT as u32;
const START: Instant = Instant::from_millis(1000);
/// Connections with low messages, and messages on each.
const LOW: usize = 250;
const MESSAGES: usize = 4;

/// Receives what another queue receives, except for frames that are lost.
struct LossyRx {
    inner: Box<dyn RxQueue + Send>,
    /// How many frames with payload are lost next.
    lost: Arc<AtomicUsize>,
}

impl RxQueue for LossyRx {
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>) {
        self.inner.rx_burst(now, burst);
        // Longer than headers alone.
        burst.retain(|frame| {
            let is_lost = frame.bytes.len() > 74 && self.lost.load(Ordering::Relaxed) > 0;
            self.lost.fetch_sub(usize::from(is_lost), Ordering::Relaxed);
            !is_lost
        });
    }
}

/// Opens and accepts connections, and counts the answers on each.
#[derive(Default)]
struct Clients {
    conns: Vec<Conn>,
    /// Bytes that arrived on the first connection.
    received: Vec<u8>,
    /// Numbers of the connections on which answers arrived, one for each answer.
    answered: Vec<usize>,
    /// First bytes of the datagrams that arrived.
    datagrams: Vec<u8>,
}

impl Handler for Clients {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn accepted(&mut self, _: &mut Context<'_>, conn: Conn, _: Listener) {
        self.conns.push(conn);
    }

    fn datagram(&mut self, _: &mut Context<'_>, _: UdpHandle, _: &Datagram, data: &[u8]) {
        self.datagrams.push(data[0]);
    }

    fn data(&mut self, _: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let number = self.conns.iter().position(|own| *own == conn).unwrap();
        if number == 0 {
            self.received.extend(data);
        }
        self.answered.extend(core::iter::repeat_n(number, data.len()));
        data.len()
    }
}

/// A program with a listener and an epoll set, and its clients.
struct Hosts {
    ops: Ops,
    listener: RawFd,
    epfd: RawFd,
    stack: Arc<Mutex<Shard<ChannelServer>>>,
    clients: Shard<Clients>,
    now: Instant,
    /// Descriptors of the connections, in the order of [`Clients::conns`].
    fds: Vec<RawFd>,
    /// See [`LossyRx`].
    lost: Arc<AtomicUsize>,
}

fn config(address: &str) -> Config {
    let device = DeviceConfig::new("cable", DeviceKind::Memory);
    let mut config = Config::single(device, &[address.parse().unwrap()], &[]);
    config.tcp.connections_max = 1000;
    config
}

fn sockaddr(port: u16) -> Vec<u8> {
    sockaddr_of([0; 4], port)
}

fn sockaddr_of(ip: [u8; 4], port: u16) -> Vec<u8> {
    let family = (libc::AF_INET as u16).to_ne_bytes();
    [&family[..], &port.to_be_bytes(), &ip, &[0; 8]].concat()
}

impl Hosts {
    fn new(has_priorities: bool) -> Self {
        let (near, far) = pair(MemoryConfig { labels: true, ..MemoryConfig::default() });
        let lost = Arc::<AtomicUsize>::default();
        let rx = Box::new(LossyRx { inner: near.rx, lost: lost.clone() });
        let stack = stack(has_priorities, Device { rx, tx: near.tx });
        let control = Box::new(SameThread(Arc::clone(&stack)));
        let client = stack.lock().unwrap().handler_mut().attach(control).unwrap();
        let ops = Ops::new(client, OpsConfig { spin: Duration::ZERO, ..OpsConfig::default() }).unwrap();
        let clients = Shard::builder(config("10.0.0.2/24")).handler(Clients::default()).device("cable", far);
        let clients = clients.seed([2; 32]).now(START).build().unwrap();
        let mut hosts =
            Self { listener: -1, epfd: -1, ops, stack, clients, now: START, fds: Vec::new(), lost };
        hosts.settle();
        hosts.listener = hosts.ops.socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_NONBLOCK, 0).unwrap();
        hosts.ops.bind(hosts.listener, &sockaddr(80)).unwrap();
        hosts.ops.listen(hosts.listener, 1000).unwrap();
        hosts.epfd = hosts.ops.epoll_create1(0).unwrap();
        hosts
    }

    /// Runs both stacks until neither has work.
    fn settle(&mut self) {
        let mut idle = 0;
        while idle < 3 {
            let turns = [
                self.stack.lock().unwrap().poll_once(self.now).unwrap(),
                self.clients.poll_once(self.now).unwrap(),
            ];
            idle = if turns.iter().all(|turn| turn.work == 0) { idle + 1 } else { 0 };
            self.now += Duration::from_micros(10);
        }
    }

    /// Lets time pass.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += Duration::from_millis(1);
            self.settle();
        }
    }

    /// Opens connections whose frames have this priority.
    fn connect(&mut self, count: usize, priority: u8) {
        self.clients.with(self.now, |clients, cx| {
            for _ in 0..count {
                let socket = SocketOptions { nodelay: true, priority, ..SocketOptions::default() };
                let options = ConnectOptions { socket, ..ConnectOptions::default() };
                clients.conns.push(cx.connect("10.0.0.1:80".parse().unwrap(), options).unwrap());
            }
        });
        self.settle();
    }

    /// Accepts all connections, and adds them to the set with these bits and their numbers.
    fn accept(&mut self, bits: u32) {
        loop {
            match self.ops.accept4(self.listener, libc::SOCK_NONBLOCK) {
                Ok((fd, _)) => {
                    self.control(libc::EPOLL_CTL_ADD, fd, bits, self.fds.len() as u64);
                    self.fds.push(fd);
                }
                Err(Errno::AGAIN) if self.fds.len() == self.clients.handler().conns.len() => return,
                Err(Errno::AGAIN) => self.settle(),
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn control(&self, op: c_int, fd: RawFd, bits: u32, data: u64) {
        self.ops.epoll_ctl(self.epfd, op, fd, Some(EpollEvent { events: bits, data })).unwrap();
    }

    /// Sends a message on each of these connections.
    fn send(&mut self, numbers: core::ops::Range<usize>) {
        self.clients.with(self.now, |clients, cx| {
            for number in numbers {
                assert_eq!(cx.send(clients.conns[number], &[7; MESSAGE_BYTES]), Ok(MESSAGE_BYTES));
            }
        });
        self.settle();
    }

    /// Returns the data of up to `events_max` events.
    fn wait(&self, events_max: usize) -> Vec<u64> {
        let mut events = vec![EpollEvent::default(); events_max];
        let count = self.ops.epoll_wait(self.epfd, &mut events, Timeout::Zero, None).unwrap();
        events[..count].iter().map(|event| event.data).collect()
    }

    /// Reads a message and answers it with a byte. Returns false if there is none.
    fn answer(&self, number: usize) -> bool {
        let mut message = [0; MESSAGE_BYTES];
        match self.ops.recv(self.fds[number], &mut [UserSliceMut::new(&mut message)], 0) {
            Ok(MESSAGE_BYTES) => {
                assert_eq!(self.ops.send(self.fds[number], &[UserSlice::new(b"!")], 0), Ok(1));
                true
            }
            Err(Errno::AGAIN) => false,
            other => panic!("{other:?}"),
        }
    }

    /// Waits for events and answers messages, one for each event if it is level-triggered and otherwise all,
    /// until `count` messages are answered. Calls `after_first` after the first events. Returns the numbers
    /// of the connections in the order of the answers, and how many were answered when a descriptor of the
    /// kernel was first reported.
    fn serve(
        &mut self,
        (bits, events_max, count): (u32, usize, usize),
        after_first: impl FnOnce(&mut Self),
    ) -> (Vec<usize>, Option<usize>) {
        let (mut order, mut kernel_at, mut after_first) = (Vec::new(), None, Some(after_first));
        while order.len() < count {
            let events = self.wait(events_max);
            assert!(!events.is_empty(), "{} of {count}", order.len());
            for data in events {
                let Some(number) = usize::try_from(data).ok().filter(|number| *number < self.fds.len())
                else {
                    kernel_at.get_or_insert(order.len());
                    continue;
                };
                while self.answer(number) {
                    order.push(number);
                    if bits & (ET | ONESHOT) == 0 {
                        break;
                    }
                }
                if bits & ONESHOT != 0 {
                    self.control(libc::EPOLL_CTL_MOD, self.fds[number], bits, data);
                }
            }
            if let Some(act) = after_first.take() {
                act(self);
            }
        }
        self.settle();
        (order, kernel_at)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for fd in self.fds.iter().chain([&self.listener, &self.epfd]) {
            let _ = self.ops.close(*fd);
        }
    }
}

fn stack(has_priorities: bool, device: Device) -> Arc<Mutex<Shard<ChannelServer>>> {
    let channel = ChannelConfig { sockets_max: 1024, ..ChannelConfig::default() };
    let mut config = config("10.0.0.1/24");
    config.priority.enabled = Some(has_priorities);
    let server = ChannelServer::new(&channel).unwrap();
    let builder = Shard::builder(config).handler(server).device("cable", device);
    Arc::new(Mutex::new(builder.seed([1; 32]).now(START).build().unwrap()))
}

fn kernel_event() -> OwnedFd {
    rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC).unwrap()
}

/// Serves a backlog of low messages, and a high one that arrives after the first events. Returns how many
/// messages were answered before the high one.
fn answered_before_high(has_priorities: bool, bits: u32, events_max: usize) -> usize {
    let mut hosts = Hosts::new(has_priorities);
    hosts.connect(LOW, 0);
    hosts.accept(IN | bits);
    hosts.connect(1, HIGH);
    hosts.accept(IN | bits);
    let kernel = kernel_event();
    hosts.control(libc::EPOLL_CTL_ADD, kernel.as_raw_fd(), IN, u64::MAX);
    for _ in 0..MESSAGES {
        hosts.send(0..LOW);
    }
    let count = LOW * MESSAGES + 1;
    let (order, kernel_at) = hosts.serve((IN | bits, events_max, count), |hosts| hosts.send(LOW..LOW + 1));
    let before = order.iter().position(|number| *number == LOW).unwrap();
    let clients = hosts.clients.handler();
    assert_eq!(clients.answered.len(), count, "every message is answered once");
    assert!((0..LOW).all(|low| clients.answered.iter().filter(|number| **number == low).count() == MESSAGES));
    assert!(kernel_at.is_some_and(|at| at <= 64 * events_max), "the kernel's descriptor: {kernel_at:?}");
    before
}

#[test]
fn urgent_descriptor_is_returned_first() {
    for (bits, events_max) in [(0, 1), (0, 8), (ET, 1), (ET, 8), (ONESHOT, 1), (ONESHOT, 8), (0, 64)] {
        let at_once = if bits == 0 { 1 } else { MESSAGES };
        let on = answered_before_high(true, bits, events_max);
        // Those of the first call, and at most one of the share of lower classes.
        assert!(on <= (events_max + 1) * at_once, "{bits:#x} {events_max}: {on}");
        let off = answered_before_high(false, bits, events_max);
        assert!(off >= (LOW - 2 * events_max) * at_once, "{bits:#x} {events_max} without priorities: {off}");
    }
}

/// Waits for one event at a time while 50 low connections, 50 high ones and a descriptor of the kernel are
/// ready all the time. Returns how often each of these kinds was returned.
fn events_of_ready_descriptors(has_priorities: bool, count: usize) -> [usize; 3] {
    let mut hosts = Hosts::new(has_priorities);
    hosts.connect(50, 0);
    hosts.accept(IN);
    hosts.connect(50, HIGH);
    hosts.accept(IN);
    let kernel = kernel_event();
    hosts.control(libc::EPOLL_CTL_ADD, kernel.as_raw_fd(), IN, u64::MAX);
    hosts.send(0..100);
    let mut seen = [0; 3];
    for _ in 0..count {
        match hosts.wait(1)[..] {
            [u64::MAX] => seen[2] += 1,
            [number] => seen[usize::from(number >= 50)] += 1,
            ref other => panic!("{other:?}"),
        }
    }
    seen
}

/// While urgent descriptors are ready all the time, others and those of the kernel get their share.
#[test]
fn lower_descriptors_get_their_share() {
    let [low, high, kernel] = events_of_ready_descriptors(true, 2000);
    let seen = [low, high, kernel];
    assert!((90..=110).contains(&(low + kernel)) && low > 20 && kernel > 20, "{seen:?}");
    assert_eq!(low + kernel + high, 2000);
    let [low, high, kernel] = events_of_ready_descriptors(false, 2000);
    assert!(low > 800 && low.abs_diff(high) <= 50, "without priorities: {:?}", [low, high, kernel]);
}

/// The kernel's descriptors are reported although those of the stack fill the array in each call.
#[test]
fn kernel_descriptor_is_not_starved_without_priorities() {
    let mut hosts = Hosts::new(false);
    hosts.connect(4, 0);
    hosts.accept(IN);
    let kernel = kernel_event();
    hosts.control(libc::EPOLL_CTL_ADD, kernel.as_raw_fd(), IN, u64::MAX);
    hosts.send(0..4);
    let of_kernel = (0..80).filter(|_| hosts.wait(1) == [u64::MAX]).count();
    assert_eq!(of_kernel, 10);
}

/// When the urgent bytes are read, the rest of a connection is of the usual class.
#[test]
fn descriptor_is_urgent_until_its_urgent_bytes_are_read() {
    let mut hosts = Hosts::new(true);
    hosts.connect(3, 0);
    hosts.accept(IN);
    hosts.send(0..3);
    let set_priority = |hosts: &mut Hosts, priority| {
        hosts.clients.with(hosts.now, |clients, cx| cx.set_priority(clients.conns[2], priority).unwrap());
    };
    set_priority(&mut hosts, HIGH);
    hosts.send(2..3);
    set_priority(&mut hosts, 0);
    hosts.send(2..3);
    assert_eq!([hosts.wait(1), hosts.wait(1)], [[2], [2]]);
    assert!(hosts.answer(2) && hosts.wait(1) == [2] && hosts.answer(2), "the second message is urgent");
    assert_eq!([hosts.wait(1), hosts.wait(1), hosts.wait(1)], [[0], [1], [2]]);
    assert!(hosts.answer(2) && !hosts.answer(2));
}

/// `SO_PRIORITY` of the descriptor counts if the frames have the usual priority.
#[test]
fn so_priority_orders_descriptors_with_usual_frames() {
    for has_priorities in [true, false] {
        let mut hosts = Hosts::new(has_priorities);
        hosts.connect(5, 0);
        hosts.accept(IN);
        let set = |fd, priority: c_int| {
            hosts.ops.setsockopt(fd, libc::SOL_SOCKET, libc::SO_PRIORITY, &priority.to_ne_bytes()).unwrap();
        };
        set(hosts.fds[3], 5);
        set(hosts.fds[0], 1);
        hosts.send(0..5);
        let expected = if has_priorities { [3, 1, 2, 4, 0] } else { [0, 1, 2, 3, 4] };
        assert_eq!(hosts.wait(8), expected);
    }
}

/// A listener has the class of the connections that can be accepted.
#[test]
fn listener_of_an_urgent_connection_is_returned_first() {
    let mut hosts = Hosts::new(true);
    hosts.connect(10, 0);
    hosts.accept(IN);
    hosts.control(libc::EPOLL_CTL_ADD, hosts.listener, IN, u64::MAX);
    hosts.send(0..10);
    hosts.connect(1, 0);
    assert_eq!(hosts.wait(1), [0]);
    hosts.connect(1, HIGH);
    assert_eq!([hosts.wait(1), hosts.wait(1)], [[u64::MAX], [u64::MAX]]);
    hosts.accept(IN);
    hosts.send(11..12);
    assert_eq!(hosts.wait(1), [10], "it was accepted before the other one");
    assert!(hosts.answer(10));
    // Both are level-triggered; the first one has been returned before.
    assert_eq!(hosts.wait(1), [1]);
}

/// A set that contains another one returns it first if that contains an urgent descriptor.
#[test]
fn set_of_an_urgent_descriptor_is_returned_first() {
    let mut hosts = Hosts::new(true);
    hosts.connect(6, 0);
    hosts.accept(IN);
    let outer = hosts.ops.epoll_create1(0).unwrap();
    let add = |hosts: &Hosts, fd, data| {
        let event = EpollEvent { events: IN, data };
        hosts.ops.epoll_ctl(outer, libc::EPOLL_CTL_ADD, fd, Some(event)).unwrap();
    };
    (1..6).for_each(|number| add(&hosts, hosts.fds[number], number as u64));
    add(&hosts, hosts.epfd, 100);
    (1..6).for_each(|number| {
        hosts.ops.epoll_ctl(hosts.epfd, libc::EPOLL_CTL_DEL, hosts.fds[number], None).unwrap()
    });
    hosts.send(1..6);
    hosts.clients.with(hosts.now, |clients, cx| cx.set_priority(clients.conns[0], HIGH).unwrap());
    hosts.send(0..1);
    let mut events = [EpollEvent::default(); 8];
    let count = hosts.ops.epoll_wait(outer, &mut events, Timeout::Zero, None).unwrap();
    assert_eq!(events[..count].iter().map(|event| event.data).collect::<Vec<_>>(), [100, 1, 2, 3, 4, 5]);
    assert_eq!(hosts.wait(8), [0]);
    hosts.ops.close(outer).unwrap();
}

/// Removed and changed items leave nothing behind in the queues of their classes.
#[test]
fn removed_items_are_not_returned() {
    let mut hosts = Hosts::new(true);
    hosts.connect(20, 0);
    hosts.connect(20, HIGH);
    hosts.accept(IN);
    for round in 0..50 {
        hosts.send(0..40);
        let first = hosts.wait(3);
        assert_eq!(first.len(), 3);
        for number in (0..40).filter(|number| (number + round) % 3 == 0) {
            hosts.ops.epoll_ctl(hosts.epfd, libc::EPOLL_CTL_DEL, hosts.fds[number], None).unwrap();
            if number % 2 == 0 {
                hosts.control(libc::EPOLL_CTL_ADD, hosts.fds[number], IN, number as u64);
            }
        }
        let mut returned = hosts.wait(100);
        returned.sort_unstable();
        let expected = (0..40).filter(|number| (number + round) % 3 != 0 || number % 2 == 0);
        assert_eq!(returned, expected.map(|number| number as u64).collect::<Vec<_>>(), "round {round}");
        (0..40).for_each(|number| while hosts.answer(number) {});
        for number in (0..40).filter(|number| (number + round) % 3 == 0 && number % 2 != 0) {
            hosts.control(libc::EPOLL_CTL_ADD, hosts.fds[number], IN, number as u64);
        }
        assert_eq!(hosts.wait(100), Vec::<u64>::new());
    }
}
