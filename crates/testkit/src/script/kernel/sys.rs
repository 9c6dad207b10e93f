//! System calls without a safe wrapper: namespaces, the TUN device, interface requests and raw socket
//! options.
#![allow(unsafe_code)] // ioctls, setsockopt with arbitrary options, unshare

use std::io;
use std::mem::{size_of, zeroed};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Length of an interface name including the terminating zero.
const NAME_BYTES: usize = libc::IFNAMSIZ;

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Moves the calling thread into a new network namespace, which disappears with its last thread, socket and
/// device.
pub fn enter_new_network_namespace() -> io::Result<()> {
    // SAFETY: the call takes no pointers and affects only the calling thread.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) }).map(drop)
}

/// Gives the calling thread real-time priority, so that other processes do not delay its packets.
pub fn raise_priority() -> io::Result<()> {
    let parameter = libc::sched_param { sched_priority: 10 };
    // SAFETY: the pointer is to a live struct; 0 is the calling thread.
    check(unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameter) }).map(drop)
}

fn request(name: &str) -> libc::ifreq {
    // SAFETY: ifreq is plain data, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { zeroed() };
    let bytes = name.as_bytes().iter().take(NAME_BYTES - 1);
    request.ifr_name.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from as libc::c_char);
    request
}

/// Creates a TUN device in the current namespace. It carries IP packets, with a `virtio_net_hdr` before
/// each if `vnet_header` is set.
pub fn open_tun(name: &str, vnet_header: bool) -> io::Result<OwnedFd> {
    // SAFETY: the path is a C string; the result is checked before use.
    let fd = check(unsafe {
        libc::open(c"/dev/net/tun".as_ptr(), libc::O_RDWR | libc::O_NONBLOCK | libc::O_CLOEXEC)
    })?;
    // SAFETY: `fd` was just opened and has no other owner.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut request = request(name);
    let header = if vnet_header { libc::IFF_VNET_HDR } else { 0 };
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI | header) as i16;
    // SAFETY: TUNSETIFF takes an ifreq, which lives through the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    Ok(fd)
}

fn ioctl_interface(socket: BorrowedFd<'_>, code: libc::Ioctl, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: every code passed here takes an ifreq, which lives through the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), code, std::ptr::from_mut(request)) }).map(drop)
}

fn sockaddr(address: Ipv4Addr) -> libc::sockaddr {
    // SAFETY: both are plain data, and sockaddr_in is as long as sockaddr.
    unsafe {
        let mut v4: libc::sockaddr_in = zeroed();
        v4.sin_family = libc::AF_INET as u16;
        v4.sin_addr.s_addr = u32::from(address).to_be();
        std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(v4)
    }
}

/// Sets the MTU of an interface in bytes.
pub fn set_mtu(socket: BorrowedFd<'_>, name: &str, mtu: u32) -> io::Result<()> {
    let mut request = request(name);
    request.ifr_ifru.ifru_mtu = mtu as i32;
    ioctl_interface(socket, libc::SIOCSIFMTU, &mut request)
}

/// Brings an interface up.
pub fn set_up(socket: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let mut request = request(name);
    ioctl_interface(socket, libc::SIOCGIFFLAGS, &mut request)?;
    // SAFETY: SIOCGIFFLAGS filled this member.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as i16;
    ioctl_interface(socket, libc::SIOCSIFFLAGS, &mut request)
}

/// Gives an interface an IPv4 address with a /24 prefix. `socket` is an AF_INET socket.
pub fn add_ipv4(socket: BorrowedFd<'_>, name: &str, address: Ipv4Addr) -> io::Result<()> {
    let mut request = request(name);
    request.ifr_ifru.ifru_addr = sockaddr(address);
    ioctl_interface(socket, libc::SIOCSIFADDR, &mut request)?;
    request.ifr_ifru.ifru_netmask = sockaddr(Ipv4Addr::new(255, 255, 255, 0));
    ioctl_interface(socket, libc::SIOCSIFNETMASK, &mut request)
}

/// Gives an interface an IPv6 address with a /64 prefix. `socket` is an AF_INET6 socket.
pub fn add_ipv6(socket: BorrowedFd<'_>, name: &str, address: Ipv6Addr) -> io::Result<()> {
    let mut request = request(name);
    ioctl_interface(socket, libc::SIOCGIFINDEX, &mut request)?;
    // SAFETY: SIOCGIFINDEX filled this member.
    let ifr6_ifindex = unsafe { request.ifr_ifru.ifru_ifindex };
    let ifr6_addr = libc::in6_addr { s6_addr: address.octets() };
    let mut request = libc::in6_ifreq { ifr6_addr, ifr6_prefixlen: 64, ifr6_ifindex };
    // SAFETY: SIOCSIFADDR on an AF_INET6 socket takes an in6_ifreq, which lives through the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFADDR, &raw mut request) }).map(drop)
}

/// Calls `setsockopt`.
pub fn set_socket_option(socket: BorrowedFd<'_>, level: i32, name: i32, value: &[u8]) -> io::Result<()> {
    let len = value.len() as libc::socklen_t;
    // SAFETY: pointer and length describe `value`.
    check(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), len) }).map(drop)
}

/// Calls `getsockopt`. Returns the number of bytes filled.
pub fn socket_option(socket: BorrowedFd<'_>, level: i32, name: i32, value: &mut [u8]) -> io::Result<usize> {
    let mut len = value.len() as libc::socklen_t;
    // SAFETY: pointer and length describe `value`; the kernel writes at most `len` bytes.
    check(unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, name, value.as_mut_ptr().cast(), &raw mut len)
    })?;
    Ok(len as usize)
}

/// Calls an `ioctl` that fills one integer.
pub fn ioctl_int(socket: BorrowedFd<'_>, code: libc::Ioctl) -> io::Result<i32> {
    let mut value = 0i32;
    // SAFETY: the codes passed here fill one int.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), code, &raw mut value) })?;
    Ok(value)
}

/// Calls `poll` with a time-out in milliseconds; fills `revents`.
pub fn poll(fds: &mut [libc::pollfd], timeout_ms: i32) -> io::Result<i32> {
    // SAFETY: pointer and length describe `fds`.
    check(unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) })
}

/// Waits up to `nanos` nanoseconds until `fd` is readable. Returns whether it is.
pub fn wait_readable(fd: BorrowedFd<'_>, nanos: u64) -> io::Result<bool> {
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let timeout =
        libc::timespec { tv_sec: (nanos / 1_000_000_000) as i64, tv_nsec: (nanos % 1_000_000_000) as i64 };
    // SAFETY: both pointers are to live values; no signal mask.
    check(unsafe { libc::ppoll(&raw mut entry, 1, &raw const timeout, std::ptr::null()) })
        .map(|ready| ready > 0)
}

/// Calls `recv`.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8], flags: i32) -> io::Result<usize> {
    // SAFETY: pointer and length describe `buffer`.
    let got = unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), flags) };
    usize::try_from(got).map_err(|_| io::Error::last_os_error())
}

/// Calls `send` with `MSG_NOSIGNAL` added to `flags`.
pub fn send(socket: BorrowedFd<'_>, bytes: &[u8], flags: i32) -> io::Result<usize> {
    let flags = flags | libc::MSG_NOSIGNAL;
    // SAFETY: pointer and length describe `bytes`.
    let sent = unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Calls `close` and returns its error, for example that of a lingering close.
pub fn close(socket: OwnedFd) -> io::Result<()> {
    use std::os::fd::IntoRawFd;
    // SAFETY: the descriptor was owned and is given up here.
    check(unsafe { libc::close(socket.into_raw_fd()) }).map(drop)
}

const _: () = assert!(size_of::<libc::sockaddr_in>() == size_of::<libc::sockaddr>());
