//! The stack's links as interfaces for `getifaddrs`, `if_nametoindex` and the `ioctl`s of netdevice(7). Their
//! names and indices differ from those of all kernel interfaces.

use crate::Ops;
use crate::descriptor::borrow;
use core::ffi::c_int;
use core::net::{IpAddr, Ipv4Addr};
use ginnel::channel::LinkInfo;
use rustix::fd::RawFd;
use rustix::io::Errno;
use rustix::net::sockopt;

/// Maximum length of a name (`IFNAMSIZ` without the terminating zero).
pub const NAME_MAX: usize = 15;
/// Index of the first link.
pub const FIRST_INDEX: u32 = ginnel::socket_filter::FIRST_INTERFACE_INDEX;
/// Suffix for a name that a kernel interface has, too.
const SUFFIX: &str = "-stack";

/// A link as an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The index; 1 for loopback, which the kernel's `lo` stands for, too.
    pub index: u32,
    /// The configured name, unless another interface has it.
    pub name: String,
    /// The address on the link layer.
    pub mac: [u8; 6],
    /// The MTU in bytes.
    pub mtu: u16,
    /// True if the link is loopback.
    pub loopback: bool,
    /// True if programs can join groups on the link.
    pub multicast: bool,
    /// Addresses and their prefix lengths.
    pub addresses: Vec<(IpAddr, u8)>,
}

impl Interface {
    /// Returns the first IPv4 address, which older calls report as the only one.
    pub fn ipv4(&self) -> Option<(Ipv4Addr, u8)> {
        self.addresses.iter().find_map(|(address, prefix)| match address {
            IpAddr::V4(v4) => Some((*v4, *prefix)),
            IpAddr::V6(_) => None,
        })
    }
}

/// Returns the netmask for a prefix length.
pub fn mask_v4(prefix: u8) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::MAX.unbounded_shl(32 - u32::from(prefix.min(32))))
}

/// Returns the broadcast address of a network; /31 and /32 networks have none (RFC 3021).
pub fn broadcast_v4(address: Ipv4Addr, prefix: u8) -> Option<Ipv4Addr> {
    (prefix <= 30).then(|| address | !mask_v4(prefix))
}

impl Ops {
    /// Returns the family of any socket (`AF_INET` …).
    ///
    /// # Errors
    /// `EBADF`, `ENOTSOCK`; `EAGAIN` in a handler that interrupted a call.
    pub fn family_of(&self, fd: RawFd) -> Result<c_int, Errno> {
        if !self.owns(fd) {
            return sockopt::socket_domain(borrow(fd)?).map(|family| family.as_raw().into());
        }
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let family = state.files.socket(file).map_err(|_| Errno::NOTSOCK)?.family;
        Ok(family.sa_family().into())
    }

    /// Returns the links of the stack. `is_taken` tells whether a kernel interface has a name.
    ///
    /// # Errors
    /// `ENETDOWN` if the stack is gone, `EAGAIN` in a handler that interrupted a call.
    pub fn interfaces(&self, is_taken: impl Fn(&str) -> bool) -> Result<Vec<Interface>, Errno> {
        let links = self.lock()?.client.links().map_err(|_| Errno::NETDOWN)?;
        Ok(to_interfaces(links, is_taken))
    }
}

fn to_interfaces(links: Vec<LinkInfo>, is_taken: impl Fn(&str) -> bool) -> Vec<Interface> {
    let mut interfaces = Vec::<Interface>::new();
    for (index, link) in (FIRST_INDEX..).zip(links) {
        let LinkInfo { name, mac, mtu, loopback, multicast, addresses } = link;
        let (index, name) = if loopback {
            (1, "lo".into())
        } else {
            let known = |name: &str| is_taken(name) || interfaces.iter().any(|other| other.name == name);
            (index, unused_name(&sanitized(&name), known))
        };
        interfaces.push(Interface { index, name, mac, mtu, loopback, multicast, addresses });
    }
    interfaces
}

/// Returns a valid interface name (`dev_valid_name`) that is not an alias.
fn sanitized(name: &str) -> String {
    let name: String =
        name.chars().map(|c| if c.is_ascii_graphic() && c != '/' && c != ':' { c } else { '_' }).collect();
    if matches!(&*name, "" | "." | "..") { "link".into() } else { name }
}

/// Returns the name, or a variant of it that is not in use. The name must be ASCII.
fn unused_name(name: &str, is_known: impl Fn(&str) -> bool) -> String {
    let cut = |len: usize| &name[..name.len().min(len)];
    let plain = cut(NAME_MAX);
    if !is_known(plain) {
        return plain.into();
    }
    let with = |number: u32| {
        let suffix = if number == 1 { SUFFIX.into() } else { format!("{SUFFIX}{number}") };
        format!("{}{suffix}", cut(NAME_MAX - suffix.len()))
    };
    // There are fewer links than numbers.
    (1..100_000).map(with).find(|name| !is_known(name)).unwrap_or_else(|| plain.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str, loopback: bool) -> LinkInfo {
        let (mac, addresses) = ([2, 0, 0, 0, 0, 1], Vec::new());
        LinkInfo { name: name.into(), mac, mtu: 1500, loopback, multicast: true, addresses }
    }

    #[test]
    fn names_and_indices_are_unique() {
        let links =
            ["lan", "eth0", "", "a name: with/all ü", "a-very-long-name-of-a-link", "a-very-long-name-too"];
        let mut links: Vec<_> = links.map(|name| link(name, false)).into();
        links.insert(2, link("lo", true));
        let kernels = ["lo", "eth0", "eth0-stack"];
        let seen = to_interfaces(links, |name| kernels.contains(&name));
        let names: Vec<_> =
            seen.iter().map(|one| (one.index.wrapping_sub(FIRST_INDEX), &*one.name)).collect();
        let lo = 1u32.wrapping_sub(FIRST_INDEX);
        assert_eq!(
            names,
            [
                (0, "lan"),
                (1, "eth0-stack2"),
                (lo, "lo"),
                (3, "link"),
                (4, "a_name__with_al"),
                (5, "a-very-long-nam"),
                (6, "a-very-lo-stack"),
            ]
        );
        assert!(seen.iter().all(|one| one.name.len() <= NAME_MAX));
    }

    #[test]
    fn masks_and_broadcast_addresses_are_as_on_linux() {
        let address = Ipv4Addr::new(10, 5, 3, 1);
        let of = |prefix| (mask_v4(prefix), broadcast_v4(address, prefix));
        assert_eq!(of(24), (Ipv4Addr::new(255, 255, 255, 0), Some(Ipv4Addr::new(10, 5, 3, 255))));
        assert_eq!(of(30), (Ipv4Addr::new(255, 255, 255, 252), Some(Ipv4Addr::new(10, 5, 3, 3))));
        assert_eq!(of(31), (Ipv4Addr::new(255, 255, 255, 254), None));
        assert_eq!(of(32), (Ipv4Addr::BROADCAST, None));
        assert_eq!(of(0), (Ipv4Addr::UNSPECIFIED, Some(Ipv4Addr::BROADCAST)));
    }
}
