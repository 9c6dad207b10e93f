//! Facts about an interface of the kernel, in the network namespace of the calling thread.

use crate::netlink::Netlink;
use std::io;
use std::net::IpAddr;

/// Facts about an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceInfo {
    /// Index of the interface.
    pub index: u32,
    /// True if the interface is up (`IFF_UP`); it may lack a carrier.
    pub up: bool,
    /// Largest IP packet in bytes.
    pub mtu: usize,
    /// MAC address of the interface; all zeros if it has none.
    pub mac: [u8; 6],
    /// Addresses of the interface, each with its prefix length in bits.
    pub addresses: Vec<(IpAddr, u8)>,
}

/// Reads the facts about an interface.
///
/// # Errors
/// There is no such interface, or the kernel refuses the request.
pub fn read(name: &str) -> io::Result<InterfaceInfo> {
    let mut netlink = Netlink::open()?;
    let link = netlink.link(name)?;
    let addresses = netlink.addresses()?.into_iter().filter(|address| address.index == link.index);
    let addresses = addresses.map(|address| (address.address, address.prefix)).collect();
    Ok(InterfaceInfo {
        index: link.index,
        up: link.up,
        mtu: link.mtu,
        mac: link.mac.unwrap_or_default(),
        addresses,
    })
}

/// Says whether an interface can carry frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// The interface is up and has a carrier.
    Up,
    /// The interface is up, and its cable or its peer is not.
    NoCarrier,
    /// The interface is down.
    Down,
    /// There is no interface of that name.
    Missing,
}

/// Reads the states of interfaces in the network namespace of the thread that opened it.
pub struct LinkStates(Netlink);

impl LinkStates {
    /// Opens a netlink socket.
    ///
    /// # Errors
    /// The socket could not be opened.
    pub fn open() -> io::Result<Self> {
        Netlink::open().map(Self)
    }

    /// Returns the state of the interface `name`.
    ///
    /// # Errors
    /// The kernel refuses the request.
    pub fn read(&mut self, name: &str) -> io::Result<LinkState> {
        match self.0.link(name) {
            Ok(link) if link.has_carrier => Ok(LinkState::Up),
            Ok(link) if link.up => Ok(LinkState::NoCarrier),
            Ok(_) => Ok(LinkState::Down),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(LinkState::Missing),
            Err(error) => Err(error),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{LinkState, LinkStates, read};
    use std::net::{IpAddr, Ipv4Addr};

    #[test]
    fn loopback_is_read() {
        let lo = read("lo").unwrap();
        assert_eq!((lo.index, lo.mac), (1, [0; 6]));
        assert!(!lo.up || lo.addresses.contains(&(IpAddr::V4(Ipv4Addr::LOCALHOST), 8)), "{lo:?}");
        assert!(read("nonesuch").is_err());
    }

    #[test]
    fn states_are_those_of_the_kernel() {
        let mut states = LinkStates::open().unwrap();
        let lo = if read("lo").unwrap().up { LinkState::Up } else { LinkState::Down };
        assert_eq!(states.read("lo").unwrap(), lo);
        assert_eq!(states.read("nonesuch").unwrap(), LinkState::Missing);
    }
}
