//! Sockets that are bound like a listener of the program and have its options.
#![allow(unsafe_code)] // options of sockets by number

use crate::steering::Instruction;
use core::ffi::{c_int, c_void};
use ginnel_devices::resource_limit::resource_limit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::{Errno, fcntl_dupfd_cloexec, fcntl_getfd};
use rustix::net::sockopt::{
    set_socket_reuseport, socket_acceptconn, socket_cookie, socket_domain, socket_protocol, socket_reuseport,
    socket_type,
};
use rustix::net::{AddressFamily, SocketAddrAny, SocketFlags, SocketType, ipproto};
use rustix::process::Resource;
use std::io;
use std::net::SocketAddr;

/// Lowest number of the descriptors that the program must not see, if its limit allows that.
const HIDDEN_FD_MIN: u64 = 1000;
/// Lowest number of these descriptors if the limit is unknown and turns out to be lower than
/// [`USUAL_FDS_MAX`]: after those of standard input, output and error.
const HIDDEN_FD_FALLBACK: c_int = 3;
/// Limit of descriptors that is taken for granted if the kernel does not tell it, as under a seccomp filter.
const USUAL_FDS_MAX: u64 = 1024;
/// Longest value of an option, in bytes.
const VALUE_BYTES: usize = 64;

/// Options that take effect at `bind`.
const BIND_OPTIONS: [(c_int, c_int); 6] = [
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_MARK),
    (libc::SOL_SOCKET, libc::SO_BINDTODEVICE),
    (libc::SOL_IP, libc::IP_FREEBIND),
    (libc::SOL_IP, libc::IP_TRANSPARENT),
    (libc::SOL_IPV6, libc::IPV6_V6ONLY),
];

/// Other options of a listener, most of which accepted connections inherit.
const LISTEN_OPTIONS: [(c_int, c_int); 25] = [
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::SOL_SOCKET, libc::SO_RCVBUF),
    (libc::SOL_SOCKET, libc::SO_SNDBUF),
    (libc::SOL_TCP, libc::TCP_NODELAY),
    (libc::SOL_TCP, libc::TCP_MAXSEG),
    (libc::SOL_TCP, libc::TCP_KEEPIDLE),
    (libc::SOL_TCP, libc::TCP_KEEPINTVL),
    (libc::SOL_TCP, libc::TCP_KEEPCNT),
    (libc::SOL_TCP, libc::TCP_LINGER2),
    (libc::SOL_TCP, libc::TCP_DEFER_ACCEPT),
    (libc::SOL_TCP, libc::TCP_WINDOW_CLAMP),
    (libc::SOL_TCP, libc::TCP_CONGESTION),
    (libc::SOL_TCP, libc::TCP_USER_TIMEOUT),
    (libc::SOL_TCP, libc::TCP_FASTOPEN),
    (libc::SOL_TCP, libc::TCP_NOTSENT_LOWAT),
    (libc::SOL_IP, libc::IP_TOS),
    (libc::SOL_IP, libc::IP_TTL),
    (libc::SOL_IPV6, libc::IPV6_TCLASS),
    (libc::SOL_IPV6, libc::IPV6_UNICAST_HOPS),
];

/// Borrows a descriptor by its number.
pub fn borrow(fd: c_int) -> Option<BorrowedFd<'static>> {
    // SAFETY: not -1; the kernel reports a descriptor that is not open.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Returns a descriptor for a number that belongs to this library.
pub fn own(fd: c_int) -> OwnedFd {
    // SAFETY: the caller has taken the number out of the library's tables, so nobody else closes it.
    unsafe { <OwnedFd as rustix::fd::FromRawFd>::from_raw_fd(fd) }
}

/// Returns whether workers may have listeners of their own: the socket is one of TCP over IP that does not
/// listen yet, and the program does not share its port by itself (`SO_REUSEPORT`).
pub fn is_suitable(fd: BorrowedFd<'_>) -> bool {
    let is_tcp = socket_type(fd) == Ok(SocketType::STREAM)
        && matches!(socket_domain(fd), Ok(AddressFamily::INET | AddressFamily::INET6))
        && matches!(socket_protocol(fd), Ok(Some(ipproto::TCP)));
    is_tcp && socket_reuseport(fd) == Ok(false) && socket_acceptconn(fd) == Ok(false)
}

/// Allows or forbids other sockets on the address (`SO_REUSEPORT`).
///
/// # Errors
/// The kernel's error.
pub fn set_shared(fd: BorrowedFd<'_>, is_shared: bool) -> io::Result<()> {
    Ok(set_socket_reuseport(fd, is_shared)?)
}

/// Returns the socket's unique number in the kernel (`SO_COOKIE`); zero for a descriptor that is no socket.
pub fn cookie(fd: BorrowedFd<'_>) -> u64 {
    socket_cookie(fd).unwrap_or_default()
}

/// Returns the address that a socket is bound to.
///
/// # Errors
/// The kernel's error, or the address is not one of IP.
pub fn address(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    let address: SocketAddrAny = rustix::net::getsockname(fd)?;
    address.try_into().map_err(|_| io::Error::other("the listener has no IP address"))
}

/// Returns the number of descriptors that the process may have.
fn fds_max() -> u64 {
    resource_limit(Resource::Nofile).current.unwrap_or(USUAL_FDS_MAX)
}

/// Returns the number of sockets for slots that the process may keep: a quarter of its descriptors.
pub fn sockets_max() -> usize {
    usize::try_from(fds_max() / 4).unwrap_or(usize::MAX)
}

/// Moves a descriptor away from the numbers that programs expect to get.
///
/// # Errors
/// `EMFILE` if the program uses all the others.
pub fn hide(fd: OwnedFd) -> io::Result<OwnedFd> {
    hidden_copy(&fd)
}

/// Duplicates a descriptor to a number that programs do not expect to get.
///
/// # Errors
/// `EMFILE` if the program uses all the others.
pub fn hidden_copy(fd: impl AsFd) -> io::Result<OwnedFd> {
    let lowest = HIDDEN_FD_MIN.min(fds_max() / 2) as c_int;
    match fcntl_dupfd_cloexec(&fd, lowest) {
        // The limit is unknown, and lower than `USUAL_FDS_MAX`.
        Err(Errno::INVAL) => Ok(fcntl_dupfd_cloexec(&fd, HIDDEN_FD_FALLBACK)?),
        copy => Ok(copy?),
    }
}

/// Creates a socket that is bound to the address of `listener`. It does not listen.
///
/// # Errors
/// The kernel's error, such as `EADDRINUSE` if the process has changed its user since it bound the listener,
/// or that of [`hide`].
pub fn create(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let domain = socket_domain(listener)?;
    let socket = rustix::net::socket_with(
        domain,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        Some(ipproto::TCP),
    )?;
    copy_options(listener, socket.as_fd(), &BIND_OPTIONS);
    set_shared(socket.as_fd(), true)?;
    rustix::net::bind(&socket, &address(listener)?)?;
    hide(socket)
}

/// Makes a slot's socket listen with the options of the program's own listener.
///
/// # Errors
/// The kernel's error.
pub fn listen(listener: BorrowedFd<'_>, socket: BorrowedFd<'_>, backlog: c_int) -> io::Result<()> {
    copy_options(listener, socket, &LISTEN_OPTIONS);
    let nonblocking = fcntl_getfl(listener)? & OFlags::NONBLOCK;
    fcntl_setfl(socket, (fcntl_getfl(socket)? - OFlags::NONBLOCK) | nonblocking)?;
    Ok(rustix::net::listen(socket, backlog)?)
}

/// Returns whether `accept` on the socket blocks until a connection arrives.
pub fn is_blocking(socket: BorrowedFd<'_>) -> bool {
    !fcntl_getfl(socket).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
}

/// Returns whether a connection waits for `accept`.
pub fn has_connection(socket: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&at_once)).is_ok() && polled[0].revents().contains(PollFlags::IN)
}

/// Puts a slot's socket at the number of the program's listener.
///
/// # Errors
/// The kernel's error.
pub fn replace(listener: c_int, socket: BorrowedFd<'_>) -> io::Result<()> {
    let number = borrow(listener).ok_or(Errno::BADF)?;
    let is_closed_by_exec = fcntl_getfd(number)?.contains(rustix::io::FdFlags::CLOEXEC);
    let flags = if is_closed_by_exec { rustix::io::DupFlags::CLOEXEC } else { rustix::io::DupFlags::empty() };
    // The program owns the number, so the end of this value must not close it.
    let mut target = core::mem::ManuallyDrop::new(own(listener));
    Ok(rustix::io::dup3(socket, &mut target, flags)?)
}

fn copy_options(from: BorrowedFd<'_>, to: BorrowedFd<'_>, options: &[(c_int, c_int)]) {
    for &(level, name) in options {
        // Options of the other IP version are missing. An option that needs a privilege which the program has
        // given up keeps its default.
        if let (Some(wanted), Some(present)) = (get(from, level, name), get(to, level, name))
            && wanted.bytes() != present.bytes()
        {
            let is_doubled = level == libc::SOL_SOCKET && matches!(name, libc::SO_RCVBUF | libc::SO_SNDBUF);
            set(to, level, name, if is_doubled { wanted.halved() } else { wanted });
        }
    }
}

/// Value of an option.
#[derive(Clone, Copy, Debug)]
struct Value {
    bytes: [u8; VALUE_BYTES],
    len: usize,
}

impl Value {
    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Returns half of a number: the kernel doubles sizes of buffers that it is given.
    fn halved(mut self) -> Self {
        let [a, b, c, d, ..] = self.bytes;
        self.bytes[..4].copy_from_slice(&(c_int::from_ne_bytes([a, b, c, d]) / 2).to_ne_bytes());
        self
    }
}

fn get(fd: BorrowedFd<'_>, level: c_int, name: c_int) -> Option<Value> {
    let mut value = Value { bytes: [0; VALUE_BYTES], len: 0 };
    let mut len = VALUE_BYTES as libc::socklen_t;
    let at = value.bytes.as_mut_ptr().cast::<c_void>();
    // SAFETY: the buffer has this length.
    let result = unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, at, &raw mut len) };
    value.len = (len as usize).min(VALUE_BYTES);
    (result == 0).then_some(value)
}

fn set(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: Value) {
    let at = value.bytes.as_ptr().cast::<c_void>();
    // SAFETY: the buffer has this length. Failures leave the default.
    unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, at, value.len as libc::socklen_t) };
}

/// Attaches a classic BPF program to the `SO_REUSEPORT` group of a listener. The program chooses the socket
/// of each new connection.
///
/// # Errors
/// The kernel's error.
pub fn steer(listener: BorrowedFd<'_>, program: &[Instruction]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_ptr().cast::<libc::sock_filter>().cast_mut(),
    };
    let at = (&raw const program).cast::<c_void>();
    let len = size_of_val(&program) as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF);
    // SAFETY: the program has this length; an instruction has the layout of C's.
    if unsafe { libc::setsockopt(listener.as_raw_fd(), level, name, at, len) } == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_slot_socket_has_the_options_of_the_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let fd = listener.as_fd();
        set_shared(fd, true).unwrap();
        let int = |value: c_int| {
            let mut bytes = [0; VALUE_BYTES];
            bytes[..4].copy_from_slice(&value.to_ne_bytes());
            Value { bytes, len: 4 }
        };
        for (level, name, value) in [
            (libc::SOL_TCP, libc::TCP_DEFER_ACCEPT, 5),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
            (libc::SOL_SOCKET, libc::SO_RCVBUF, 50_000),
            (libc::SOL_IP, libc::IP_TOS, 0x10),
        ] {
            set(fd, level, name, int(value));
        }
        let socket = create(fd).unwrap();
        listen(fd, socket.as_fd(), 7).unwrap();
        assert_eq!(address(socket.as_fd()).unwrap(), listener.local_addr().unwrap());
        assert_eq!(socket_acceptconn(&socket), Ok(true));
        for (level, name) in LISTEN_OPTIONS {
            let [wanted, present] = [fd, socket.as_fd()].map(|fd| get(fd, level, name));
            assert_eq!(
                wanted.map(|value| value.bytes().to_vec()),
                present.map(|value| value.bytes().to_vec()),
                "{level} {name}"
            );
        }
        assert!(fcntl_getfl(&socket).unwrap().contains(OFlags::NONBLOCK));
        assert!(socket.as_raw_fd() >= 512, "{socket:?}");
    }

    #[test]
    fn a_port_that_the_program_shares_itself_is_not_suitable() {
        let socket = |kind| rustix::net::socket(AddressFamily::INET, kind, None).unwrap();
        let own = socket(SocketType::STREAM);
        assert!(is_suitable(own.as_fd()));
        set_shared(own.as_fd(), true).unwrap();
        assert!(!is_suitable(own.as_fd()));
        assert!(!is_suitable(socket(SocketType::DGRAM).as_fd()));
        let unix = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        assert!(!is_suitable(unix.as_fd()));
    }
}
