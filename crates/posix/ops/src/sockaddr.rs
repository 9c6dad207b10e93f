//! Socket addresses in the layout of `struct sockaddr_in` and `struct sockaddr_in6` (`<netinet/in.h>`).

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use rustix::io::Errno;

/// Bytes of `struct sockaddr_in`.
const IN_BYTES: usize = 16;
/// Bytes of `struct sockaddr_in6`, and of its older version without a scope, which Linux accepts, too.
const IN6_BYTES: usize = 28;
const IN6_BYTES_MIN: usize = 24;

/// The address family of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `AF_INET`.
    V4,
    /// `AF_INET6`.
    V6,
}

impl Family {
    /// Returns the number of the family.
    pub fn sa_family(self) -> u16 {
        match self {
            Self::V4 => libc::AF_INET as u16,
            Self::V6 => libc::AF_INET6 as u16,
        }
    }

    /// Returns the unspecified address of the family, with port 0.
    pub fn unspecified(self) -> SocketAddr {
        match self {
            Self::V4 => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
            Self::V6 => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
        }
    }
}

/// Returns the family of an address.
///
/// # Errors
/// `EINVAL` if the address is too short.
pub fn family_of(bytes: &[u8]) -> Result<u16, Errno> {
    let family = bytes.get(..2).ok_or(Errno::INVAL)?;
    Ok(u16::from_ne_bytes([family[0], family[1]]))
}

/// Decodes an address for a socket of `family`. An IPv4-mapped address is returned as IPv4.
///
/// # Errors
/// `EINVAL` if it is too short, `EAFNOSUPPORT` if it is of another family.
pub fn decode(bytes: &[u8], family: Family) -> Result<SocketAddr, Errno> {
    let least = match family {
        Family::V4 => IN_BYTES,
        Family::V6 => IN6_BYTES_MIN,
    };
    if bytes.len() < least {
        return Err(Errno::INVAL);
    }
    if family_of(bytes)? != family.sa_family() {
        return Err(Errno::AFNOSUPPORT);
    }
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    Ok(match family {
        Family::V4 => {
            let octets: [u8; 4] = bytes[4..8].try_into().expect("four bytes");
            SocketAddr::new(Ipv4Addr::from(octets).into(), port)
        }
        Family::V6 => {
            let octets: [u8; 16] = bytes[8..24].try_into().expect("sixteen bytes");
            let address = Ipv6Addr::from(octets);
            let scope = bytes.get(24..IN6_BYTES).map_or([0; 4], |b| b.try_into().expect("four bytes"));
            match address.to_ipv4_mapped() {
                Some(v4) => SocketAddr::new(v4.into(), port),
                None => SocketAddrV6::new(address, port, 0, u32::from_ne_bytes(scope)).into(),
            }
        }
    })
}

/// An address in the layout for programs.
#[derive(Clone, Copy, Debug)]
pub struct SockaddrBytes {
    bytes: [u8; IN6_BYTES],
    len: usize,
}

impl SockaddrBytes {
    /// Returns the address as bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        u16::from_be_bytes([self.bytes[2], self.bytes[3]])
    }

    /// Returns the address with `sin6_flowinfo`, if it is a `struct sockaddr_in6`.
    pub(crate) fn with_flow_info(mut self, flow_info: u32) -> Self {
        if self.len == IN6_BYTES {
            self.bytes[4..8].copy_from_slice(&flow_info.to_be_bytes());
        }
        self
    }
}

/// Returns whether an address needs an interface to be unique: one of a link (`ipv6_iface_scope_id`).
fn has_scope(ip: Ipv6Addr) -> bool {
    ip.is_unicast_link_local() || ip.octets()[0] == 0xff && matches!(ip.octets()[1] & 15, 1 | 2)
}

/// Encodes an address for a socket of `family`. An IPv6 socket reports IPv4 addresses as IPv4-mapped.
pub fn encode(address: SocketAddr, family: Family) -> SockaddrBytes {
    let mut bytes = [0; IN6_BYTES];
    bytes[..2].copy_from_slice(&family.sa_family().to_ne_bytes());
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    match family {
        Family::V4 => {
            if let IpAddr::V4(v4) = address.ip() {
                bytes[4..8].copy_from_slice(&v4.octets());
            }
            SockaddrBytes { bytes, len: IN_BYTES }
        }
        Family::V6 => {
            let v6 = match address.ip() {
                IpAddr::V4(v4) if v4.is_unspecified() => Ipv6Addr::UNSPECIFIED,
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            bytes[8..24].copy_from_slice(&v6.octets());
            if let SocketAddr::V6(v6) = address
                && has_scope(*v6.ip())
            {
                bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
            }
            SockaddrBytes { bytes, len: IN6_BYTES }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_decode_as_encoded() {
        for (text, family) in
            [("10.1.2.3:80", Family::V4), ("[2001:db8::1]:443", Family::V6), ("10.1.2.3:80", Family::V6)]
        {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(decode(encode(address, family).bytes(), family), Ok(address), "{text}");
        }
        let mapped = encode("10.1.2.3:80".parse().unwrap(), Family::V6);
        assert_eq!(mapped.bytes()[8..24], *b"\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x01\x02\x03");
    }

    #[test]
    fn short_and_foreign_addresses_are_refused_as_linux_does() {
        let v4 = encode("10.1.2.3:80".parse().unwrap(), Family::V4);
        assert_eq!(decode(&v4.bytes()[..15], Family::V4), Err(Errno::INVAL));
        assert_eq!(decode(v4.bytes(), Family::V6), Err(Errno::INVAL));
        let v6 = encode("[::1]:80".parse().unwrap(), Family::V6);
        assert_eq!(decode(v6.bytes(), Family::V4), Err(Errno::AFNOSUPPORT));
        assert!(decode(&v6.bytes()[..24], Family::V6).is_ok());
        assert_eq!(family_of(&[1]), Err(Errno::INVAL));
    }
}
