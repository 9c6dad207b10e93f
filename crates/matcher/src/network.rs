//! A network in CIDR notation.

use crate::from_text;
use core::fmt;
use core::net::IpAddr;
use core::str::FromStr;

/// A network, written `10.0.0.0/8` or `fd00::/8`. An address without a prefix length is a network of one
/// address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Network {
    address: IpAddr,
    /// Length of the prefix in bits.
    len: u8,
}

impl Network {
    /// Returns whether `address` is in the network.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        prefix_of(address, self.len) == Some(self.address)
    }

    /// Returns whether the addresses of the network are of IPv4.
    #[must_use]
    pub const fn is_ipv4(&self) -> bool {
        self.address.is_ipv4()
    }
}

/// Returns the first address of the network; `None` if `len` is more than the number of bits of the address.
fn prefix_of(address: IpAddr, len: u8) -> Option<IpAddr> {
    match address {
        IpAddr::V4(v4) => {
            let host_bits = 32u32.checked_sub(len.into())?;
            let mask = u32::MAX.checked_shl(host_bits).unwrap_or(0);
            Some(IpAddr::V4((v4.to_bits() & mask).into()))
        }
        IpAddr::V6(v6) => {
            let host_bits = 128u32.checked_sub(len.into())?;
            let mask = u128::MAX.checked_shl(host_bits).unwrap_or(0);
            Some(IpAddr::V6((v6.to_bits() & mask).into()))
        }
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, len) = match text.split_once('/') {
            Some((address, len)) => (address, Some(len)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| format!("\"{address}\" is not an IP address"))?;
        let max = if address.is_ipv4() { 32 } else { 128 };
        let wrong = |len| format!("prefix length \"{len}\" is not within 0 to {max}");
        let len = match len {
            Some(len) => len.parse().ok().filter(|len| *len <= max).ok_or_else(|| wrong(len))?,
            None => max,
        };
        match prefix_of(address, len) {
            Some(network) if network == address => Ok(Self { address, len }),
            network => {
                let network = network.unwrap_or(address);
                Err(format!("\"{text}\" has bits beyond its prefix; the network is {network}/{len}"))
            }
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.len)
    }
}

from_text!(Network);

#[cfg(test)]
mod tests {
    use super::Network;
    use proptest::prelude::*;

    #[test]
    fn networks_round_trip() {
        for text in ["10.0.0.0/8", "0.0.0.0/0", "10.1.2.3/32", "::/0", "fd00::/64", "fd00::1/128"] {
            assert_eq!(text.parse::<Network>().unwrap().to_string(), text);
        }
        assert_eq!("10.1.2.3".parse::<Network>().unwrap().to_string(), "10.1.2.3/32");
        assert_eq!("fd00::1".parse::<Network>().unwrap().to_string(), "fd00::1/128");
    }

    #[test]
    fn malformed_networks_are_refused() {
        for (text, problem) in [
            ("", "\"\" is not an IP address"),
            ("10.0.0/8", "\"10.0.0\" is not an IP address"),
            ("10.0.0.0/33", "prefix length \"33\" is not within 0 to 32"),
            ("fd00::/129", "prefix length \"129\" is not within 0 to 128"),
            ("10.0.0.0/", "prefix length \"\" is not within 0 to 32"),
            ("10.0.0.1/8", "\"10.0.0.1/8\" has bits beyond its prefix; the network is 10.0.0.0/8"),
        ] {
            assert_eq!(text.parse::<Network>(), Err(problem.to_string()));
        }
    }

    proptest! {
        /// Membership, bit by bit.
        #[test]
        fn network_contains_what_shares_its_prefix(a: u32, other: u32, len in 0u8..=32) {
            let network = (0..u32::from(len)).map(|bit| a & 1 << (31 - bit)).sum::<u32>();
            let text = format!("{}/{len}", core::net::Ipv4Addr::from(network));
            let parsed: Network = text.parse().unwrap();
            for address in [a, other, a ^ 1] {
                let expected = (0..u32::from(len)).all(|bit| (address ^ a) & 1 << (31 - bit) == 0);
                prop_assert_eq!(parsed.contains(core::net::Ipv4Addr::from(address).into()), expected);
                prop_assert!(!parsed.contains(core::net::Ipv4Addr::from(address).to_ipv6_mapped().into()));
            }
        }
    }
}
