//! Ethernet addresses.

use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr};
use core::str::FromStr;

/// An Ethernet (MAC-48) address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// The broadcast address: all stations.
    pub const BROADCAST: Self = Self([0xff; 6]);
    /// The zero address, which stands for no address.
    pub const ZERO: Self = Self([0; 6]);

    /// Returns whether this is the broadcast address.
    #[inline]
    pub const fn is_broadcast(self) -> bool {
        matches!(self.0, [0xff, 0xff, 0xff, 0xff, 0xff, 0xff])
    }

    /// Returns whether this is a group address, which the broadcast address is, too: the lowest bit of the
    /// first byte is set.
    #[inline]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Returns whether this is the address of exactly one station: neither a group address nor zero.
    #[inline]
    pub const fn is_unicast(self) -> bool {
        !self.is_multicast() && !matches!(self.0, [0, 0, 0, 0, 0, 0])
    }

    /// Returns the group address of an IPv4 multicast address (RFC 1112 §6.4: its low 23 bits).
    #[inline]
    pub const fn from_ipv4_multicast(address: Ipv4Addr) -> Self {
        let [_, b, c, d] = address.octets();
        Self([0x01, 0x00, 0x5e, b & 0x7f, c, d])
    }

    /// Returns the group address of an IPv6 multicast address (RFC 2464 §7: its low 32 bits).
    #[inline]
    pub const fn from_ipv6_multicast(address: Ipv6Addr) -> Self {
        let o = address.octets();
        Self([0x33, 0x33, o[12], o[13], o[14], o[15]])
    }

    /// Returns the modified EUI-64 interface identifier (RFC 4291 appendix A): the low half of an
    /// autoconfigured IPv6 address.
    pub const fn interface_id(self) -> [u8; 8] {
        let m = self.0;
        [m[0] ^ 0x02, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]]
    }
}

impl From<[u8; 6]> for MacAddr {
    fn from(bytes: [u8; 6]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The error for text that is not six hexadecimal bytes separated by `:` or `-`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseMacError;

impl fmt::Display for ParseMacError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a MAC address is six hexadecimal bytes separated by ':'")
    }
}

impl std::error::Error for ParseMacError {}

impl FromStr for MacAddr {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, ParseMacError> {
        let mut parts = text.split([':', '-']);
        let mut bytes = [0; 6];
        for byte in &mut bytes {
            let part = parts.next().ok_or(ParseMacError)?;
            // from_str_radix accepts a sign.
            if part.is_empty() || part.len() > 2 || !part.bytes().all(|c| c.is_ascii_hexdigit()) {
                return Err(ParseMacError);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| ParseMacError)?;
        }
        if parts.next().is_some() { Err(ParseMacError) } else { Ok(Self(bytes)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips_and_invalid_text_is_rejected() {
        let mac = MacAddr([0x02, 0, 0, 0xab, 0xcd, 0xef]);
        assert_eq!(mac.to_string(), "02:00:00:ab:cd:ef");
        assert_eq!("02:0:00:AB:cd:ef".parse(), Ok(mac));
        assert_eq!("02-00-00-ab-cd-ef".parse(), Ok(mac));
        for bad in ["", "02:00:00:ab:cd", "02:00:00:ab:cd:ef:00", "02:00:00:ab:cd:+f", "02:00:00:ab:cd:eff"] {
            assert_eq!(bad.parse::<MacAddr>(), Err(ParseMacError), "{bad}");
        }
    }

    #[test]
    fn multicast_groups_map_to_their_mac() {
        let v4 = MacAddr::from_ipv4_multicast(Ipv4Addr::new(239, 129, 2, 3));
        assert_eq!(v4, MacAddr([0x01, 0x00, 0x5e, 0x01, 2, 3]));
        let v6 = MacAddr::from_ipv6_multicast("ff02::1:ff12:3456".parse().unwrap());
        assert_eq!(v6, MacAddr([0x33, 0x33, 0xff, 0x12, 0x34, 0x56]));
        assert!(v4.is_multicast() && v6.is_multicast() && !v4.is_broadcast());
        assert!(MacAddr::BROADCAST.is_multicast() && !MacAddr::ZERO.is_unicast());
    }

    #[test]
    fn interface_id_flips_the_universal_bit() {
        let mac = MacAddr([0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde]);
        assert_eq!(mac.interface_id(), [0x36, 0x56, 0x78, 0xff, 0xfe, 0x9a, 0xbc, 0xde]);
    }
}
