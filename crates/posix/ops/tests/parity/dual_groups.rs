//! Groups on interfaces of the kernel, of sockets that are on both sides.

use crate::kernel::Kernel;
use crate::stack::Stacks;
use crate::sys::{Sys, address, port};
use ginnel_posix_ops::OpsConfig;
use libc::{
    AF_INET, AF_INET6, IP_ADD_MEMBERSHIP, IP_DROP_MEMBERSHIP, IP_MULTICAST_IF, IP_MULTICAST_TTL, IPPROTO_IP,
    IPPROTO_IPV6, IPV6_ADD_MEMBERSHIP, IPV6_DROP_MEMBERSHIP, SOCK_DGRAM,
};
use rustix::io::Errno;
use std::net::{IpAddr, Ipv6Addr};

/// A group and the address of the kernel's loopback interface, as `struct ip_mreq`.
const LOOPBACK_MREQ: [u8; 8] = [239, 1, 2, 1, 127, 0, 0, 1];

fn start() -> Stacks {
    crate::enter_own_namespace();
    Stacks::with(|| OpsConfig {
        is_stack_address: |ip| !ip.is_loopback(),
        kernel_listen: true,
        proxy_pool_max: 8,
        ..OpsConfig::default()
    })
}

fn at(ip: [u8; 4], port: u16) -> Vec<u8> {
    address((IpAddr::from(ip), port).into())
}

#[test]
fn membership_before_bind_is_one_of_the_kernel() {
    let stacks = start();
    let host = stacks.a();
    let fd = host.socket(AF_INET, SOCK_DGRAM).unwrap();
    host.setsockopt(fd, IPPROTO_IP, IP_MULTICAST_TTL, &[3]).unwrap();
    for _ in 0..300 {
        host.setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &LOOPBACK_MREQ).unwrap();
        let again = host.setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &LOOPBACK_MREQ);
        assert_eq!(again, Err(Errno::ADDRINUSE));
        host.setsockopt(fd, IPPROTO_IP, IP_DROP_MEMBERSHIP, &LOOPBACK_MREQ).unwrap();
        let again = host.setsockopt(fd, IPPROTO_IP, IP_DROP_MEMBERSHIP, &LOOPBACK_MREQ);
        assert_eq!(again, Err(Errno::ADDRNOTAVAIL));
    }
    host.setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &LOOPBACK_MREQ).unwrap();
    host.bind(fd, &at([0; 4], 0)).unwrap();
    let port = port(&host.getsockname(fd).unwrap());
    let sender = Kernel.socket(AF_INET, SOCK_DGRAM).unwrap();
    Kernel.setsockopt(sender, IPPROTO_IP, IP_MULTICAST_IF, &[127, 0, 0, 1]).unwrap();
    Kernel.send_to(sender, b"to all", Some(&at([239, 1, 2, 1], port)), &[], 0).unwrap();
    assert_eq!(host.recv(fd, 100, 0).unwrap(), b"to all");
    Kernel.close(sender).unwrap();
}

// limit: bytes of a shared description
#[test]
fn memberships_of_a_shared_socket_are_limited() {
    let stacks = start();
    let host = stacks.a();
    let fd = host.socket(AF_INET6, SOCK_DGRAM).unwrap();
    host.bind(fd, &address((Ipv6Addr::UNSPECIFIED, 0).into())).unwrap();
    let set = |name, group: u16| {
        let group = Ipv6Addr::new(0xff15, 0, 0, 0, 0, 0, 0, group);
        host.setsockopt(fd, IPPROTO_IPV6, name, &[&group.octets()[..], &[0; 4]].concat())
    };
    set(IPV6_ADD_MEMBERSHIP, 0).unwrap();
    host.0.fork_parent(host.0.prepare_fork());
    let joined = (1..100).take_while(|group| set(IPV6_ADD_MEMBERSHIP, *group).is_ok()).count() as u16;
    assert!((10..99).contains(&joined), "{joined}");
    assert_eq!(set(IPV6_ADD_MEMBERSHIP, 100), Err(Errno::NOBUFS));
    assert_eq!(set(IPV6_ADD_MEMBERSHIP, joined), Err(Errno::ADDRINUSE), "the memberships remain");
    set(IPV6_DROP_MEMBERSHIP, 0).unwrap();
    set(IPV6_ADD_MEMBERSHIP, 100).unwrap();
}

#[test]
fn socket_of_the_stack_joins_no_kernel_interface() {
    let stacks = start();
    let host = stacks.a();
    let fd = host.socket(AF_INET, SOCK_DGRAM).unwrap();
    host.bind(fd, &at([10, 0, 0, 1], 0)).unwrap();
    for (name, value, expected) in [
        (IP_ADD_MEMBERSHIP, &LOOPBACK_MREQ[..], Errno::NODEV),
        (IP_DROP_MEMBERSHIP, &LOOPBACK_MREQ[..], Errno::ADDRNOTAVAIL),
        (IP_MULTICAST_IF, &LOOPBACK_MREQ[4..], Errno::ADDRNOTAVAIL),
    ] {
        assert_eq!(host.setsockopt(fd, IPPROTO_IP, name, value), Err(expected), "{name}");
    }
}
