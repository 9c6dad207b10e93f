//! Values for which TOML has no type. Each is a string, which is validated when the file is parsed.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::str::FromStr;
use serde::{Deserialize, Deserializer, de};

/// An address and the length of its network prefix, written `10.0.0.1/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefix {
    /// The address, or the network.
    pub address: IpAddr,
    /// Length of the prefix in bits: 0 to 32 for IPv4, 0 to 128 for IPv6.
    pub len: u8,
}

impl Prefix {
    /// Returns the prefix of all addresses of a family.
    pub fn everything(ipv4: bool) -> Self {
        let address = if ipv4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        Self { address, len: 0 }
    }

    /// Returns whether `address` is in the network.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= self.len.into(),
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= self.len.into(),
            _ => false,
        }
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (address, len) = text
            .split_once('/')
            .ok_or_else(|| format!("\"{text}\" has no prefix length, as in 10.0.0.1/24"))?;
        let address: IpAddr = address.parse().map_err(|_| format!("\"{address}\" is not an IP address"))?;
        let max = if address.is_ipv4() { 32 } else { 128 };
        match len.parse() {
            Ok(len) if len <= max => Ok(Self { address, len }),
            _ => Err(format!("prefix length \"{len}\" is not within 0 to {max}")),
        }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.len)
    }
}

/// A MAC address, written `02:00:00:00:00:01`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mac(pub [u8; 6]);

impl FromStr for Mac {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("\"{text}\" is not a MAC address, as in 02:00:00:00:00:01");
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|p| p.len() == 2).ok_or_else(wrong)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| wrong())?;
        }
        if parts.next().is_some() {
            return Err(wrong());
        }
        if bytes[0] & 1 == 1 {
            return Err(format!("\"{text}\" is a group address"));
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// Deserializes through [`FromStr`], so that a file and a command line accept the same text.
macro_rules! from_text {
    ($($name:ident),*) => {$(
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }
    )*};
}

from_text!(Prefix, Mac);

/// Deserializes an optional value of a type of another crate through its [`FromStr`].
pub(super) fn optional_text<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: FromStr<Err: fmt::Display>,
    D: Deserializer<'de>,
{
    String::deserialize(deserializer)?.parse().map(Some).map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::{Mac, Prefix};

    #[test]
    fn values_round_trip() {
        for text in ["10.0.0.1/24", "0.0.0.0/0", "fd00::1/64", "::/0", "255.255.255.255/32"] {
            assert_eq!(text.parse::<Prefix>().unwrap().to_string(), text);
        }
        assert_eq!("02:ab:00:00:0f:01".parse::<Mac>().unwrap().to_string(), "02:ab:00:00:0f:01");
    }

    #[test]
    fn malformed_values_are_refused() {
        for text in ["", "/", "10.0.0.1", "10.0.0.1/33", "10.0.0.1/-1", "10.0.0/8", "fd00::1/129", "x/8"] {
            assert!(text.parse::<Prefix>().is_err(), "{text}");
        }
        for text in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:0g",
            "02:00:00:00:00:01:02",
            "2:0:0:0:0:1",
            "01:00:5e:00:00:01",
        ] {
            assert!(text.parse::<Mac>().is_err(), "{text}");
        }
    }
}
