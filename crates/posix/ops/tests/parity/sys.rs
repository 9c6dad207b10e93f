//! Calls that a case makes, and how it went.

use core::ffi::{c_int, c_uint, c_ulong};
use core::time::Duration;
use rustix::io::Errno;
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

pub type Fd = c_int;

/// One of the two: the kernel, or the operations on a stack.
pub trait Sys: Sync {
    fn socket(&self, domain: c_int, kind: c_int) -> Result<Fd, Errno>;
    fn bind(&self, fd: Fd, address: &[u8]) -> Result<(), Errno>;
    fn listen(&self, fd: Fd, backlog: c_int) -> Result<(), Errno>;
    fn accept4(&self, fd: Fd, flags: c_int) -> Result<Fd, Errno>;
    fn connect(&self, fd: Fd, address: &[u8]) -> Result<(), Errno>;
    fn send(&self, fd: Fd, bytes: &[u8], flags: c_int) -> Result<usize, Errno>;
    fn recv(&self, fd: Fd, most: usize, flags: c_int) -> Result<Vec<u8>, Errno>;
    fn sendv(&self, fd: Fd, parts: &[&[u8]], flags: c_int) -> Result<usize, Errno>;
    /// Receives into buffers of these lengths. Returns what is in them, one behind the other.
    fn recvv(&self, fd: Fd, lengths: &[usize], flags: c_int) -> Result<Vec<u8>, Errno>;
    fn send_to(
        &self,
        fd: Fd,
        bytes: &[u8],
        to: Option<&[u8]>,
        control: &[u8],
        flags: c_int,
    ) -> Result<usize, Errno>;
    fn recv_from(&self, fd: Fd, most: usize, control_room: usize, flags: c_int) -> Result<Message, Errno>;
    /// `sendmmsg`: bytes and destinations. How many bytes of each went, of those that did.
    fn send_many(
        &self,
        fd: Fd,
        messages: &[(&[u8], Option<&[u8]>)],
        flags: c_int,
    ) -> Result<Vec<usize>, Errno>;
    /// `recvmmsg`, of which each has so much room.
    fn recv_many(
        &self,
        fd: Fd,
        count: usize,
        most: usize,
        flags: c_int,
        timeout: Option<Duration>,
    ) -> Result<Vec<Vec<u8>>, Errno>;
    fn shutdown(&self, fd: Fd, how: c_int) -> Result<(), Errno>;
    fn close(&self, fd: Fd) -> Result<(), Errno>;
    fn dup(&self, fd: Fd) -> Result<Fd, Errno>;
    /// `F_DUPFD`: a copy under a number that is no lower.
    fn dup_above(&self, fd: Fd, least: Fd) -> Result<Fd, Errno>;
    fn set_nonblocking(&self, fd: Fd, on: bool) -> Result<(), Errno>;
    /// The same by `FIONBIO`.
    fn fionbio(&self, fd: Fd, on: bool) -> Result<(), Errno>;
    fn setsockopt(&self, fd: Fd, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno>;
    /// With so much room; beside an error stands the length that is told.
    fn getsockopt_into(
        &self,
        fd: Fd,
        level: c_int,
        name: c_int,
        room: usize,
    ) -> Result<Vec<u8>, (Errno, usize)>;
    fn getsockopt(&self, fd: Fd, level: c_int, name: c_int) -> Result<Vec<u8>, Errno> {
        self.getsockopt_into(fd, level, name, 256).map_err(|(error, _)| error)
    }
    fn getsockname(&self, fd: Fd) -> Result<Vec<u8>, Errno>;
    fn getpeername(&self, fd: Fd) -> Result<Vec<u8>, Errno>;
    /// What an `ioctl` says that asks for a number.
    fn query(&self, fd: Fd, request: c_ulong) -> Result<c_int, Errno>;
    fn readable_bytes(&self, fd: Fd) -> Result<c_int, Errno> {
        self.query(fd, libc::FIONREAD)
    }
    /// `F_GETOWN`.
    fn owner(&self, fd: Fd) -> Result<c_int, Errno>;
    /// `F_SETOWN`.
    fn set_owner(&self, fd: Fd, owner: c_int) -> Result<(), Errno>;
    fn poll(&self, fds: &mut [libc::pollfd], timeout_ms: c_int) -> Result<usize, Errno>;
    /// The same with signals kept back meanwhile.
    fn ppoll(
        &self,
        fds: &mut [libc::pollfd],
        timeout: Option<Duration>,
        mask: &[c_int],
    ) -> Result<usize, Errno>;
    /// Does not wait. Says how many bits were set, and for which descriptors.
    fn select(&self, sets: &[Vec<Fd>; 3]) -> Result<(usize, [Vec<Fd>; 3]), Errno>;
    /// The same with signals kept back meanwhile.
    fn pselect(&self, sets: &[Vec<Fd>; 3], mask: &[c_int]) -> Result<(usize, [Vec<Fd>; 3]), Errno>;
    fn epoll_create(&self) -> Result<Fd, Errno>;
    fn epoll_ctl(&self, set: Fd, op: c_int, fd: Fd, events: u32, data: u64) -> Result<(), Errno>;
    fn epoll_wait(&self, set: Fd, most: usize, timeout_ms: c_int) -> Result<Vec<(u32, u64)>, Errno>;
    /// The case has changed what signals do.
    fn handlers_changed(&self) {}
    /// Without offsets, as neither pipes nor connections have any.
    fn splice(&self, from: Fd, to: Fd, len: usize, flags: c_uint) -> Result<usize, Errno>;
    /// From a file, at an offset that moves or where the file stands.
    fn sendfile(&self, to: Fd, from: Fd, offset: Option<&mut i64>, count: usize) -> Result<usize, Errno>;
    /// Waits until the host has worked on whatever had come to it. The kernel does that when it comes.
    fn catch_up(&self) {}
}

/// What was received, of which `count` is what the call returned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    pub count: usize,
    pub bytes: Vec<u8>,
    pub from: Vec<u8>,
    pub control: Vec<u8>,
    pub flags: c_int,
}

/// Two hosts, and what was said so far.
pub struct World<'a> {
    pub a: &'a dyn Sys,
    pub b: &'a dyn Sys,
    addresses: [IpAddr; 2],
    pub transcript: Vec<String>,
}

impl<'a> World<'a> {
    pub fn new(a: &'a dyn Sys, b: &'a dyn Sys, addresses: [IpAddr; 2]) -> Self {
        Self { a, b, addresses, transcript: Vec::new() }
    }

    /// Writes down how a call went.
    pub fn say(&mut self, what: &str, how: impl core::fmt::Debug) {
        let mut line = String::new();
        write!(line, "{what}: {how:?}").unwrap();
        if std::env::var_os("PARITY_SHOW").is_some() {
            eprintln!("{line}");
        }
        self.transcript.push(line);
    }

    /// Address of host `a`.
    pub fn at_a(&self, port: u16) -> Vec<u8> {
        address(SocketAddr::new(self.addresses[0], port))
    }

    /// Address of host `b`.
    pub fn at_b(&self, port: u16) -> Vec<u8> {
        address(SocketAddr::new(self.addresses[1], port))
    }

    /// Family of the hosts' addresses.
    pub fn domain(&self) -> c_int {
        if self.addresses[0].is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }
    }

    /// A listener at host `a`, and its port.
    pub fn listener(&mut self, flags: c_int) -> (Fd, u16) {
        let fd = self.a.socket(self.domain(), libc::SOCK_STREAM | flags).unwrap();
        self.a.bind(fd, &self.at_a(0)).unwrap();
        self.a.listen(fd, 16).unwrap();
        (fd, port(&self.a.getsockname(fd).unwrap()))
    }

    /// A connection: the end at `a`, which was accepted, and the end at `b`, which opened it.
    pub fn connection(&mut self) -> (Fd, Fd) {
        let (listener, port) = self.listener(0);
        let b = self.b.socket(self.domain(), libc::SOCK_STREAM).unwrap();
        self.b.connect(b, &self.at_a(port)).unwrap();
        let a = self.a.accept4(listener, 0).unwrap();
        self.a.close(listener).unwrap();
        (a, b)
    }

    /// Waits until `events` are there, and tells which of all are. Fails after a while.
    pub fn wait(&self, sys: &dyn Sys, fd: Fd, events: i16) -> i16 {
        let mut fds = [libc::pollfd { fd, events, revents: 0 }];
        assert_eq!(sys.poll(&mut fds, 10_000), Ok(1), "nothing came");
        fds[0].revents
    }

    /// Lets what is on its way arrive: also an answer to an answer, behind a question who the neighbour is. However long the machine leaves a stack's thread standing.
    pub fn settle(&self) {
        std::thread::sleep(std::time::Duration::from_millis(40));
        for _ in 0..4 {
            self.a.catch_up();
            self.b.catch_up();
        }
    }

    /// What `poll` says now.
    pub fn ready(&self, sys: &dyn Sys, fd: Fd) -> String {
        let mut fds = [libc::pollfd { fd, events: ALL, revents: 0 }];
        sys.poll(&mut fds, 0).unwrap();
        names(fds[0].revents.cast_unsigned().into())
    }
}

pub const ALL: i16 =
    libc::POLLIN | libc::POLLOUT | libc::POLLPRI | libc::POLLRDHUP | libc::POLLRDNORM | libc::POLLWRNORM;

/// Names of events.
pub fn names(events: u32) -> String {
    let all = [
        (libc::POLLIN, "IN"),
        (libc::POLLRDNORM, "RDNORM"),
        (libc::POLLOUT, "OUT"),
        (libc::POLLWRNORM, "WRNORM"),
        (libc::POLLPRI, "PRI"),
        (libc::POLLRDHUP, "RDHUP"),
        (libc::POLLHUP, "HUP"),
        (libc::POLLERR, "ERR"),
        (libc::POLLNVAL, "NVAL"),
    ];
    let set = all.iter().filter(|(bit, _)| events & u32::from(bit.cast_unsigned()) != 0);
    set.map(|(_, name)| *name).collect::<Vec<_>>().join("|")
}

/// As a program lays it out.
pub fn address(address: SocketAddr) -> Vec<u8> {
    let mut bytes = Vec::new();
    match address {
        SocketAddr::V4(v4) => {
            bytes.extend((libc::AF_INET as u16).to_ne_bytes());
            bytes.extend(v4.port().to_be_bytes());
            bytes.extend(v4.ip().octets());
            bytes.extend([0; 8]);
        }
        SocketAddr::V6(v6) => {
            bytes.extend((libc::AF_INET6 as u16).to_ne_bytes());
            bytes.extend(v6.port().to_be_bytes());
            bytes.extend([0; 4]);
            bytes.extend(v6.ip().octets());
            bytes.extend([0; 4]);
        }
    }
    bytes
}

// Of `ioctl`, from `asm-generic/sockios.h` and `linux/sockios.h`.
pub const SIOCATMARK: c_ulong = 0x8905;
pub const SIOCOUTQNSD: c_ulong = 0x894b;

/// The value of an option that is a number.
pub fn word(value: c_int) -> [u8; 4] {
    value.to_ne_bytes()
}

/// A control message.
pub fn control(level: i32, kind: i32, value: &[u8]) -> Vec<u8> {
    let mut out = (16 + value.len()).to_ne_bytes().to_vec();
    out.extend(level.to_ne_bytes());
    out.extend(kind.to_ne_bytes());
    out.extend(value);
    out.resize(out.len().next_multiple_of(8), 0);
    out
}

pub fn port(address: &[u8]) -> u16 {
    u16::from_be_bytes([address[2], address[3]])
}

/// Shows the first line that differs.
pub fn assert_same(kernel: &[String], stack: &[String]) {
    for (number, (kernel, stack)) in kernel.iter().zip(stack).enumerate() {
        assert_eq!(kernel, stack, "line {number}: the kernel's on the left, the stack's on the right");
    }
    assert_eq!(kernel.len(), stack.len(), "one says more");
}
