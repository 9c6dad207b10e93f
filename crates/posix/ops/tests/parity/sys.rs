//! The calls that cases make, and the transcript of their results.

use core::ffi::{c_int, c_uint, c_ulong};
use core::time::Duration;
use rustix::io::Errno;
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

pub type Fd = c_int;

/// A host: the kernel, or the operations on a stack.
pub trait Sys: Sync {
    fn socket(&self, domain: c_int, kind: c_int) -> Result<Fd, Errno>;
    fn bind(&self, fd: Fd, address: &[u8]) -> Result<(), Errno>;
    fn listen(&self, fd: Fd, backlog: c_int) -> Result<(), Errno>;
    fn accept4(&self, fd: Fd, flags: c_int) -> Result<Fd, Errno>;
    fn connect(&self, fd: Fd, address: &[u8]) -> Result<(), Errno>;
    fn send(&self, fd: Fd, bytes: &[u8], flags: c_int) -> Result<usize, Errno>;
    fn recv(&self, fd: Fd, len_max: usize, flags: c_int) -> Result<Vec<u8>, Errno>;
    fn sendv(&self, fd: Fd, parts: &[&[u8]], flags: c_int) -> Result<usize, Errno>;
    /// Receives into buffers of these lengths. Returns their concatenated content.
    fn recvv(&self, fd: Fd, lengths: &[usize], flags: c_int) -> Result<Vec<u8>, Errno>;
    fn send_to(
        &self,
        fd: Fd,
        bytes: &[u8],
        to: Option<&[u8]>,
        control: &[u8],
        flags: c_int,
    ) -> Result<usize, Errno>;
    fn recv_from(
        &self,
        fd: Fd,
        len_max: usize,
        control_capacity: usize,
        flags: c_int,
    ) -> Result<Message, Errno>;
    /// `sendmmsg` with bytes and destinations. Returns how many bytes of each sent message were sent.
    fn send_many(
        &self,
        fd: Fd,
        messages: &[(&[u8], Option<&[u8]>)],
        flags: c_int,
    ) -> Result<Vec<usize>, Errno>;
    /// `recvmmsg` into `count` buffers of `len_max` bytes.
    fn recv_many(
        &self,
        fd: Fd,
        count: usize,
        len_max: usize,
        flags: c_int,
        timeout: Option<Duration>,
    ) -> Result<Vec<Vec<u8>>, Errno>;
    fn shutdown(&self, fd: Fd, how: c_int) -> Result<(), Errno>;
    fn close(&self, fd: Fd) -> Result<(), Errno>;
    fn dup(&self, fd: Fd) -> Result<Fd, Errno>;
    /// `F_DUPFD`: copies a descriptor to the lowest free number from `lowest` on.
    fn dup_above(&self, fd: Fd, lowest: Fd) -> Result<Fd, Errno>;
    fn set_nonblocking(&self, fd: Fd, on: bool) -> Result<(), Errno>;
    /// Sets the nonblocking flag by `FIONBIO`.
    fn fionbio(&self, fd: Fd, on: bool) -> Result<(), Errno>;
    fn setsockopt(&self, fd: Fd, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno>;
    /// Reads an option into a buffer of `capacity` bytes. An error contains the length that the call
    /// returned.
    fn getsockopt_into(
        &self,
        fd: Fd,
        level: c_int,
        name: c_int,
        capacity: usize,
    ) -> Result<Vec<u8>, (Errno, usize)>;
    fn getsockopt(&self, fd: Fd, level: c_int, name: c_int) -> Result<Vec<u8>, Errno> {
        self.getsockopt_into(fd, level, name, 256).map_err(|(error, _)| error)
    }
    /// `SO_GET_FILTER` with a buffer for `space` instructions. Returns the length that the call returned, and
    /// the first bytes of the buffer, as many as a program of that length has.
    fn attached_filter(&self, fd: Fd, space: usize) -> Result<(usize, Vec<u8>), Errno>;
    /// `getsockopt` of a source filter, or of a flow label: `value` is the request.
    fn source_filter(&self, fd: Fd, level: c_int, name: c_int, value: &[u8]) -> Result<Vec<u8>, Errno>;
    fn getsockname(&self, fd: Fd) -> Result<Vec<u8>, Errno>;
    fn getpeername(&self, fd: Fd) -> Result<Vec<u8>, Errno>;
    /// Returns the number that an `ioctl` gives.
    fn query(&self, fd: Fd, request: c_ulong) -> Result<c_int, Errno>;
    fn readable_bytes(&self, fd: Fd) -> Result<c_int, Errno> {
        self.query(fd, libc::FIONREAD)
    }
    /// `SIOCGSTAMP`: returns whether the time is not 0.
    fn arrival(&self, fd: Fd) -> Result<bool, Errno>;
    /// `EPIOCGPARAMS`.
    fn epoll_params(&self, fd: Fd) -> Result<[u8; 8], Errno>;
    /// `EPIOCSPARAMS`.
    fn set_epoll_params(&self, fd: Fd, params: [u8; 8]) -> Result<(), Errno>;
    /// `F_GETOWN`.
    fn owner(&self, fd: Fd) -> Result<c_int, Errno>;
    /// `F_SETOWN`.
    fn set_owner(&self, fd: Fd, owner: c_int) -> Result<(), Errno>;
    fn poll(&self, fds: &mut [libc::pollfd], timeout_ms: c_int) -> Result<usize, Errno>;
    /// `ppoll` with blocked signals.
    fn ppoll(
        &self,
        fds: &mut [libc::pollfd],
        timeout: Option<Duration>,
        mask: &[c_int],
    ) -> Result<usize, Errno>;
    /// `select` without waiting. Returns the number of bits set, and the ready descriptors.
    fn select(&self, sets: &[Vec<Fd>; 3]) -> Result<(usize, [Vec<Fd>; 3]), Errno>;
    /// `pselect` without waiting, with blocked signals.
    fn pselect(&self, sets: &[Vec<Fd>; 3], mask: &[c_int]) -> Result<(usize, [Vec<Fd>; 3]), Errno>;
    fn epoll_create(&self) -> Result<Fd, Errno>;
    fn epoll_ctl(&self, set: Fd, op: c_int, fd: Fd, events: u32, data: u64) -> Result<(), Errno>;
    fn epoll_wait(&self, set: Fd, len_max: usize, timeout_ms: c_int) -> Result<Vec<(u32, u64)>, Errno>;
    /// Tells the host that the case has changed signal handlers.
    fn handlers_changed(&self) {}
    /// `splice` without offsets, because neither pipes nor connections have any.
    fn splice(&self, from: Fd, to: Fd, len: usize, flags: c_uint) -> Result<usize, Errno>;
    /// `sendfile`, at an offset that advances or at the position of the file.
    fn sendfile(&self, to: Fd, from: Fd, offset: Option<&mut i64>, count: usize) -> Result<usize, Errno>;
    /// Waits until the host has processed everything that has arrived. The kernel does so on arrival.
    fn catch_up(&self) {}
}

/// A received message; `count` is the result of the call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Message {
    pub count: usize,
    pub bytes: Vec<u8>,
    pub from: Vec<u8>,
    pub control: Vec<u8>,
    pub flags: c_int,
}

/// Two hosts, and the transcript of a case.
pub struct Fixture<'a> {
    pub a: &'a dyn Sys,
    pub b: &'a dyn Sys,
    addresses: [IpAddr; 2],
    pub transcript: Vec<String>,
}

impl<'a> Fixture<'a> {
    pub fn new(a: &'a dyn Sys, b: &'a dyn Sys, addresses: [IpAddr; 2]) -> Self {
        Self { a, b, addresses, transcript: Vec::new() }
    }

    /// Appends the result of a call to the transcript.
    pub fn log(&mut self, label: &str, result: impl core::fmt::Debug) {
        let mut line = String::new();
        write!(line, "{label}: {result:?}").unwrap();
        if std::env::var_os("PARITY_SHOW").is_some() {
            eprintln!("{line}");
        }
        self.transcript.push(line);
    }

    /// Returns an address of host `a`.
    pub fn at_a(&self, port: u16) -> Vec<u8> {
        address(SocketAddr::new(self.addresses[0], port))
    }

    /// Returns an address of host `b`.
    pub fn at_b(&self, port: u16) -> Vec<u8> {
        address(SocketAddr::new(self.addresses[1], port))
    }

    /// Returns the address family of the hosts.
    pub fn domain(&self) -> c_int {
        if self.addresses[0].is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }
    }

    /// Creates a listener at host `a`. Returns it and its port.
    pub fn listener(&mut self, flags: c_int) -> (Fd, u16) {
        let fd = self.a.socket(self.domain(), libc::SOCK_STREAM | flags).unwrap();
        self.a.bind(fd, &self.at_a(0)).unwrap();
        self.a.listen(fd, 16).unwrap();
        (fd, port(&self.a.getsockname(fd).unwrap()))
    }

    /// Establishes a connection. Returns the accepted end at `a`, and the end at `b` that opened it.
    pub fn connection(&mut self) -> (Fd, Fd) {
        let (listener, port) = self.listener(0);
        let b = self.b.socket(self.domain(), libc::SOCK_STREAM).unwrap();
        self.b.connect(b, &self.at_a(port)).unwrap();
        let a = self.a.accept4(listener, 0).unwrap();
        self.a.close(listener).unwrap();
        (a, b)
    }

    /// Waits until one of `events` occurs, and returns the events that did. Panics after 10 seconds.
    pub fn wait(&self, sys: &dyn Sys, fd: Fd, events: i16) -> i16 {
        let mut fds = [libc::pollfd { fd, events, revents: 0 }];
        assert_eq!(sys.poll(&mut fds, 10_000), Ok(1), "no event within 10 seconds");
        fds[0].revents
    }

    /// Waits until all packets in flight have arrived, including replies to replies and neighbour discovery,
    /// even if the machine stalls a stack's thread.
    pub fn settle(&self) {
        std::thread::sleep(std::time::Duration::from_millis(40));
        for _ in 0..4 {
            self.a.catch_up();
            self.b.catch_up();
        }
    }

    /// Returns the current result of `poll`.
    pub fn ready(&self, sys: &dyn Sys, fd: Fd) -> String {
        let mut fds = [libc::pollfd { fd, events: ALL, revents: 0 }];
        sys.poll(&mut fds, 0).unwrap();
        names(fds[0].revents.cast_unsigned().into())
    }
}

pub const ALL: i16 =
    libc::POLLIN | libc::POLLOUT | libc::POLLPRI | libc::POLLRDHUP | libc::POLLRDNORM | libc::POLLWRNORM;

/// Returns the names of events.
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

/// Returns an address as `struct sockaddr`.
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

// Requests of `ioctl`, from `asm-generic/sockios.h` and `linux/sockios.h`.
pub const SIOCGSTAMP: c_ulong = 0x8906;
pub const SIOCATMARK: c_ulong = 0x8905;
pub const SIOCOUTQNSD: c_ulong = 0x894b;
// From `linux/eventpoll.h`.
pub const EPIOCSPARAMS: c_ulong = 0x4008_8a01;
pub const EPIOCGPARAMS: c_ulong = 0x8008_8a02;

/// Returns the value of an integer option.
pub fn word(value: c_int) -> [u8; 4] {
    value.to_ne_bytes()
}

/// Returns a control message.
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

/// Compares two transcripts. Shows the first line that differs.
pub fn assert_same(kernel: &[String], stack: &[String]) {
    for (number, (kernel, stack)) in kernel.iter().zip(stack).enumerate() {
        assert_eq!(kernel, stack, "line {number}: kernel left, stack right");
    }
    assert_eq!(kernel.len(), stack.len(), "one transcript is longer");
}
