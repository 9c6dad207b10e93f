//! The order in which a write of a datagram checks its length, its flags and its destination.

use crate::sys::{Fd, Fixture, port, word};
use libc::{AF_INET, AF_INET6, AF_UNSPEC, MSG_MORE, MSG_OOB, SOCK_DGRAM};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

/// A family that no socket here has.
const OTHER_FAMILY: u16 = 77;
/// One byte more than any datagram over IPv4 has with its headers (`udp_sendmsg`).
const TOO_LONG: usize = 65_536;

/// Returns an address with another family.
fn with_family(address: &[u8], family: u16) -> Vec<u8> {
    [&family.to_ne_bytes()[..], &address[2..]].concat()
}

fn v4(at: u16) -> Vec<u8> {
    crate::sys::address(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), at))
}

fn mapped(at: u16) -> Vec<u8> {
    crate::sys::address(SocketAddr::new(Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(), at))
}

fn bound(w: &Fixture<'_>, domain: i32, address: &[u8]) -> u16 {
    let fd = w.a.socket(domain, SOCK_DGRAM).unwrap();
    w.a.bind(fd, address).unwrap();
    port(&w.a.getsockname(fd).unwrap())
}

/// Returns destinations with their names: valid ones of `domain`, invalid ones, and ones of other families.
fn destinations(at: u16, at_v4: u16, domain: i32) -> Vec<(&'static str, Option<Vec<u8>>)> {
    let own = match domain {
        AF_INET => v4 as fn(u16) -> Vec<u8>,
        _ => |at| crate::sys::address(SocketAddr::new(Ipv6Addr::LOCALHOST.into(), at)),
    };
    let unspecified = with_family(&own(at), AF_UNSPEC as u16);
    vec![
        ("no address", None),
        ("valid", Some(own(at))),
        ("port 0", Some(own(0))),
        ("1 byte", Some(own(at)[..1].to_vec())),
        ("15 bytes", Some(own(at)[..15].to_vec())),
        ("16 bytes", Some(own(at)[..16].to_vec())),
        ("AF_UNSPEC", Some(unspecified.clone())),
        ("2 bytes of AF_UNSPEC", Some(unspecified[..2].to_vec())),
        ("another family", Some(with_family(&own(at), OTHER_FAMILY))),
        ("IPv4", Some(v4(at_v4))),
        ("short IPv4", Some(v4(at_v4)[..15].to_vec())),
        ("IPv4 port 0", Some(v4(0))),
        ("mapped", Some(mapped(at_v4))),
        ("mapped port 0", Some(mapped(0))),
        ("short mapped", Some(mapped(at_v4)[..23].to_vec())),
    ]
}

fn log_sends(w: &mut Fixture<'_>, fd: Fd, name: &str, to: Option<&[u8]>, flags: i32, lengths: &[usize]) {
    for len in lengths {
        w.log(name, (*len, flags, w.b.send_to(fd, &vec![0; *len], to, &[], flags)));
    }
}

pub fn length_precedes_an_ipv4_address(w: &mut Fixture<'_>) {
    let domain = w.domain();
    let (at, at_v4) = (bound(w, domain, &w.at_a(0)), bound(w, AF_INET, &v4(0)));
    for is_connected in [false, true] {
        let fd = w.b.socket(domain, SOCK_DGRAM).unwrap();
        if is_connected {
            w.log("connect", w.b.connect(fd, &w.at_a(at)));
        }
        for (name, to) in destinations(at, at_v4, domain) {
            for flags in [0, MSG_OOB] {
                // A connected IPv6 socket has an IPv6 source address, which no IPv4 packet can carry.
                let sends_v4 = is_connected && domain == AF_INET6 && matches!(name, "IPv4" | "mapped");
                let lengths = if sends_v4 { &[TOO_LONG][..] } else { &[1, TOO_LONG - 1, TOO_LONG] };
                log_sends(w, fd, name, to.as_deref(), flags, lengths);
            }
        }
    }
    let only = w.b.socket(AF_INET6, SOCK_DGRAM).unwrap();
    w.b.setsockopt(only, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, &word(1)).unwrap();
    for (name, to) in [("IPv6 only", v4(at_v4)), ("IPv6 only, mapped", mapped(at_v4))] {
        log_sends(w, only, name, Some(&to), 0, &[1, TOO_LONG]);
    }
}

pub fn later_parts_check_what_linux_checks(w: &mut Fixture<'_>) {
    let domain = w.domain();
    let (at, at_v4) = (bound(w, domain, &w.at_a(0)), bound(w, AF_INET, &v4(0)));
    for (name, to) in destinations(at, at_v4, domain) {
        for (flags, len) in [(MSG_MORE, 1), (MSG_MORE, TOO_LONG), (MSG_MORE | MSG_OOB, 1)] {
            let fd = w.b.socket(domain, SOCK_DGRAM).unwrap();
            w.log("first part", w.b.send_to(fd, b"first", Some(&w.at_a(at)), &[], MSG_MORE));
            log_sends(w, fd, name, to.as_deref(), flags, &[len]);
            // Fails without an address if the second part has discarded the first.
            w.log("third part", w.b.send(fd, b"third", 0));
            w.b.close(fd).unwrap();
        }
    }
}

pub mod tests {
    crate::cases! {
        ; over_loopback {
            length_precedes_an_ipv4_address
            later_parts_check_what_linux_checks
        }
    }
}
