//! The part of rtnetlink (`linux/rtnetlink.h`) that configures the kernel's side of a device.

use rustix::fd::OwnedFd;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};
use std::io;
use std::net::IpAddr;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
#[cfg(all(test, not(loom)))]
const IFLA_MASTER: u16 = 10;
#[cfg(all(test, not(loom)))]
const IFLA_LINKINFO: u16 = 18;
#[cfg(all(test, not(loom)))]
const IFLA_INFO_KIND: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// Makes the address usable at once, without duplicate address detection, which takes about a second.
const IFA_F_NODAD: u8 = 2;
const IFF_UP: u32 = 1;
const IFF_LOWER_UP: u32 = 0x1_0000;
const MESSAGE_HEADER_BYTES: usize = 16;
const ADDRESS_HEADER_BYTES: usize = 8;
const LINK_HEADER_BYTES: usize = 16;

/// Attributes of a kernel interface, as `RTM_NEWLINK` reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LinkInfo {
    pub(crate) index: u32,
    pub(crate) up: bool,
    /// The interface is up and has a carrier (`IFF_LOWER_UP`).
    pub(crate) has_carrier: bool,
    pub(crate) mtu: usize,
    /// The hardware address, if it is a MAC address: that of a tunnel has another length.
    pub(crate) mac: Option<[u8; 6]>,
}

/// Attributes of an interface to change. `None` and `false` leave an attribute unchanged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LinkChange {
    pub(crate) up: bool,
    pub(crate) mtu: Option<usize>,
    pub(crate) mac: Option<[u8; 6]>,
}

/// An address of a kernel interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InterfaceAddress {
    /// Index of the interface.
    pub(crate) index: u32,
    pub(crate) address: IpAddr,
    /// Length of the network's prefix in bits.
    pub(crate) prefix: u8,
}

/// A netlink socket of the network namespace of the thread that opened it.
pub(crate) struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

/// A netlink message under construction. [`Netlink::send`] fills its header.
struct NetlinkMessage(Vec<u8>);

impl NetlinkMessage {
    fn new(body: &[u8]) -> Self {
        let mut bytes = vec![0; MESSAGE_HEADER_BYTES];
        bytes.extend(body);
        Self(bytes)
    }

    /// Creates a message with a `struct ifinfomsg`.
    fn link(index: u32, flags: u32, change: u32) -> Self {
        let mut body = [0; LINK_HEADER_BYTES];
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        body[8..12].copy_from_slice(&flags.to_ne_bytes());
        body[12..16].copy_from_slice(&change.to_ne_bytes());
        Self::new(&body)
    }

    fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        self.0.extend((4 + value.len() as u16).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }
}

impl Netlink {
    pub(crate) fn open() -> io::Result<Self> {
        // No protocol means NETLINK_ROUTE.
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Returns the attributes of the interface `name`.
    pub(crate) fn link(&mut self, name: &str) -> io::Result<LinkInfo> {
        let message = NetlinkMessage::link(0, 0, 0).attribute(IFLA_IFNAME, &[name.as_bytes(), &[0]].concat());
        let reply = self.request(RTM_GETLINK, 0, message)?;
        parse_link(&reply).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    /// Changes an interface. Sends nothing to the kernel if `change` is empty.
    pub(crate) fn change_link(&mut self, index: u32, change: LinkChange) -> io::Result<()> {
        if change == LinkChange::default() {
            return Ok(());
        }
        let flags = if change.up { IFF_UP } else { 0 };
        let mut message = NetlinkMessage::link(index, flags, flags);
        if let Some(mac) = change.mac {
            message = message.attribute(IFLA_ADDRESS, &mac);
        }
        if let Some(mtu) = change.mtu {
            message = message.attribute(IFLA_MTU, &(mtu as u32).to_ne_bytes());
        }
        self.request(RTM_NEWLINK, NLM_F_ACK, message).map(drop)
    }

    /// Adds an address to an interface. Succeeds if the interface has the address already.
    pub(crate) fn add_address(&mut self, index: u32, address: IpAddr, prefix: u8) -> io::Result<()> {
        let (family, flags, bytes) = match address {
            IpAddr::V4(v4) => (libc::AF_INET as u8, 0, v4.octets().to_vec()),
            IpAddr::V6(v6) => (libc::AF_INET6 as u8, IFA_F_NODAD, v6.octets().to_vec()),
        };
        let mut body = [family, prefix, flags, 0, 0, 0, 0, 0];
        body[4..].copy_from_slice(&index.to_ne_bytes());
        let message = NetlinkMessage::new(&body).attribute(IFA_LOCAL, &bytes).attribute(IFA_ADDRESS, &bytes);
        self.request(RTM_NEWADDR, NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE, message).map(drop)
    }

    /// Returns the addresses of all kernel interfaces.
    pub(crate) fn addresses(&mut self) -> io::Result<Vec<InterfaceAddress>> {
        self.send(RTM_GETADDR, NLM_F_DUMP, NetlinkMessage::new(&[0; ADDRESS_HEADER_BYTES]))?;
        let mut found = Vec::new();
        let mut reply = vec![0; 32 << 10];
        loop {
            let (len, _) = recv(&self.socket, &mut reply, RecvFlags::empty())?;
            let mut rest = &reply[..len];
            while let Some(header) = rest.first_chunk::<MESSAGE_HEADER_BYTES>() {
                let len = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
                let Some(body) = rest.get(MESSAGE_HEADER_BYTES..len) else { break };
                match u16::from_ne_bytes([header[4], header[5]]) {
                    NLMSG_DONE => return Ok(found),
                    NLMSG_ERROR => return Err(error_of(body)),
                    RTM_NEWADDR => found.extend(parse_address(body)),
                    _ => {}
                }
                rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
            }
        }
    }

    /// Creates a bridge and returns its interface index.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn add_bridge(&mut self, name: &str) -> io::Result<u32> {
        let kind = NetlinkMessage(Vec::new()).attribute(IFLA_INFO_KIND, b"bridge").0;
        let message = NetlinkMessage::link(0, IFF_UP, IFF_UP)
            .attribute(IFLA_IFNAME, &[name.as_bytes(), &[0]].concat())
            .attribute(IFLA_LINKINFO, &kind);
        self.request(RTM_NEWLINK, NLM_F_ACK | NLM_F_CREATE, message)?;
        Ok(self.link(name)?.index)
    }

    /// Makes an interface a port of a bridge.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn set_master(&mut self, index: u32, bridge: u32) -> io::Result<()> {
        let message = NetlinkMessage::link(index, 0, 0).attribute(IFLA_MASTER, &bridge.to_ne_bytes());
        self.request(RTM_NEWLINK, NLM_F_ACK, message).map(drop)
    }

    fn send(&mut self, kind: u16, flags: u16, message: NetlinkMessage) -> io::Result<()> {
        self.sequence += 1;
        let mut bytes = message.0;
        let len = bytes.len() as u32;
        bytes[0..4].copy_from_slice(&len.to_ne_bytes());
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(flags | NLM_F_REQUEST).to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.sequence.to_ne_bytes());
        send(&self.socket, &bytes, SendFlags::empty())?;
        Ok(())
    }

    /// Sends a request and returns the body of the reply, which is empty for a plain acknowledgement.
    fn request(&mut self, kind: u16, flags: u16, message: NetlinkMessage) -> io::Result<Vec<u8>> {
        self.send(kind, flags, message)?;
        let mut reply = vec![0; 32 << 10];
        loop {
            let (len, _) = recv(&self.socket, &mut reply, RecvFlags::empty())?;
            let Some(header) = reply[..len].first_chunk::<MESSAGE_HEADER_BYTES>() else { continue };
            if u32::from_ne_bytes([header[8], header[9], header[10], header[11]]) != self.sequence {
                continue;
            }
            let body = reply[MESSAGE_HEADER_BYTES..len].to_vec();
            if u16::from_ne_bytes([header[4], header[5]]) != NLMSG_ERROR {
                return Ok(body);
            }
            let is_acknowledgement = body.first_chunk() == Some(&[0; 4]);
            return if is_acknowledgement { Ok(Vec::new()) } else { Err(error_of(&body)) };
        }
    }
}

/// Returns the error that the body of an `NLMSG_ERROR` message carries.
fn error_of(body: &[u8]) -> io::Error {
    let code = body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
    io::Error::from_raw_os_error(code.saturating_neg())
}

/// Parses the address of an `RTM_NEWADDR` message: `IFA_LOCAL` if there is one, otherwise `IFA_ADDRESS`. On a
/// point-to-point link the latter is the address of the peer.
fn parse_address(body: &[u8]) -> Option<InterfaceAddress> {
    let &[_, prefix, _, _, a, b, c, d] = body.first_chunk::<ADDRESS_HEADER_BYTES>()?;
    let index = u32::from_ne_bytes([a, b, c, d]);
    let mut found = None;
    let mut rest = &body[ADDRESS_HEADER_BYTES..];
    while let Some(&[a, b, c, d]) = rest.first_chunk::<4>() {
        let len = usize::from(u16::from_ne_bytes([a, b]));
        let value = rest.get(4..len)?;
        let kind = u16::from_ne_bytes([c, d]);
        if kind == IFA_LOCAL || kind == IFA_ADDRESS && found.is_none() {
            let v4 = <[u8; 4]>::try_from(value).map(IpAddr::from);
            found = Some(v4.or_else(|_| <[u8; 16]>::try_from(value).map(IpAddr::from)).ok()?);
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    found.map(|address| InterfaceAddress { index, address, prefix })
}

fn parse_link(body: &[u8]) -> Option<LinkInfo> {
    let word = |at: usize| body.get(at..at + 4)?.first_chunk::<4>().map(|bytes| u32::from_ne_bytes(*bytes));
    let (index, flags) = (word(4)?, word(8)?);
    let (up, has_carrier) = (flags & IFF_UP != 0, flags & IFF_LOWER_UP != 0);
    let mut link = LinkInfo { index, up, has_carrier, ..LinkInfo::default() };
    let mut rest = body.get(LINK_HEADER_BYTES..)?;
    while let Some(&[a, b, c, d]) = rest.first_chunk::<4>() {
        let len = usize::from(u16::from_ne_bytes([a, b]));
        let value = rest.get(4..len)?;
        match u16::from_ne_bytes([c, d]) {
            IFLA_MTU => link.mtu = u32::from_ne_bytes(*value.first_chunk()?) as usize,
            IFLA_ADDRESS => link.mac = value.try_into().ok(),
            _ => {}
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(link)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::net::Ipv6Addr;

    #[test]
    fn hardware_address_of_other_length_is_no_mac() {
        let link = |address: &[u8]| {
            let message = NetlinkMessage::link(7, IFF_UP, 0)
                .attribute(IFLA_ADDRESS, address)
                .attribute(IFLA_MTU, &1480u32.to_ne_bytes());
            parse_link(&message.0[MESSAGE_HEADER_BYTES..])
        };
        let expected = LinkInfo { index: 7, up: true, has_carrier: false, mtu: 1480, mac: None };
        // A tunnel over IPv4, one over IPv6, and InfiniBand.
        for len in [0, 4, 5, 16, 20] {
            assert_eq!(link(&[9; 20][..len]), Some(expected), "{len} bytes");
        }
        assert_eq!(link(&[2; 6]), Some(LinkInfo { mac: Some([2; 6]), ..expected }));
    }

    #[test]
    fn own_address_of_a_point_to_point_link_is_found() {
        let (own, peer) = (Ipv6Addr::LOCALHOST, Ipv6Addr::UNSPECIFIED);
        let message = |attributes: &[(u16, Ipv6Addr)]| {
            // Family, length of the prefix, flags, scope, and the index of the interface.
            let mut body = [&[libc::AF_INET6 as u8, 64, 0, 0][..], &7u32.to_ne_bytes()].concat();
            for (kind, address) in attributes {
                body.extend(20u16.to_ne_bytes());
                body.extend(kind.to_ne_bytes());
                body.extend(address.octets());
            }
            parse_address(&body).map(|found| (found.index, found.address, found.prefix))
        };
        let expected = Some((7, IpAddr::from(own), 64));
        assert_eq!(message(&[(IFA_LOCAL, own), (IFA_ADDRESS, peer)]), expected);
        assert_eq!(message(&[(IFA_ADDRESS, peer), (IFA_LOCAL, own)]), expected);
        assert_eq!(message(&[(IFA_ADDRESS, own)]), expected);
        assert_eq!(message(&[]), None);
    }
}
