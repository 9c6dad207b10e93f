//! The TUN device of a script in a network namespace of its own.

use super::sys;
use crate::namespace;
use crate::script::ast::{CONGESTION_CONTROL, Directives, IpVersion};
use crate::script::wire::addresses;
use core::net::IpAddr;
use core::time::Duration;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

const DEVICE: &str = "script0";

/// Moves the calling thread into a new namespace. Returns its TUN device, which is up and has the run's local
/// address.
pub fn open(ip: IpVersion, directives: &Directives) -> io::Result<OwnedFd> {
    namespace::enter_new()?;
    // Congestion control is set on each socket: by sysctl, a namespace may only name algorithms that the host
    // allows to everyone.
    for (name, value) in directives.sysctls.iter().filter(|(name, _)| name != CONGESTION_CONTROL) {
        namespace::set_sysctl(name, value)?;
    }
    let tun = sys::open_tun(DEVICE, directives.gso.is_some())?;
    let family = if ip == IpVersion::V4 { AddressFamily::INET } else { AddressFamily::INET6 };
    let control = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    sys::set_mtu(control.as_fd(), DEVICE, directives.mtu)?;
    if ip == IpVersion::V6 {
        // Without a link-local address the kernel sends no router solicitations and no listener reports.
        namespace::set_sysctl(&format!("net.ipv6.conf.{DEVICE}.addr_gen_mode"), "1")?;
        namespace::set_sysctl(&format!("net.ipv6.conf.{DEVICE}.accept_dad"), "0")?;
    }
    match addresses(ip).0 {
        IpAddr::V4(address) => {
            sys::add_ipv4(control.as_fd(), DEVICE, address)?;
            sys::set_up(control.as_fd(), DEVICE)?;
        }
        IpAddr::V6(address) => {
            sys::set_up(control.as_fd(), DEVICE)?;
            sys::add_ipv6(control.as_fd(), DEVICE, address)?;
            wait_until_usable(address.into())?;
        }
    }
    Ok(tun)
}

/// Waits until the kernel's own thread has decided that the IPv6 address needs no duplicate address
/// detection.
fn wait_until_usable(address: IpAddr) -> io::Result<()> {
    let mut attempt = 0;
    loop {
        match std::net::UdpSocket::bind((address, 0)) {
            Ok(_) => return Ok(()),
            Err(e) if attempt == 1000 => return Err(e),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
        attempt += 1;
    }
}
