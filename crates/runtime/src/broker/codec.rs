//! Values as bytes and back: fields follow each other, little-endian. Messages of the broker, the table that
//! a program inherits and the metadata of a passed descriptor (crates/posix/ops) are encoded by this module.
//!
//! Decoding does not trust its input: it returns a value, or `None` if the bytes are not an encoding of one.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use core::time::Duration;
use ginnel_stack::tcp::config::CongestionControl;
use rustix::io::Errno;

/// Removes `count` bytes from the front of `from`. Returns `None` if `from` is shorter.
fn take<'a>(from: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, rest) = from.split_at_checked(count)?;
    *from = rest;
    Some(taken)
}

/// A value that can be part of a message.
pub trait Codec: Sized {
    /// Appends the encoding of the value to `out`.
    fn encode(&self, out: &mut Vec<u8>);

    /// Removes the encoding of a value from the front of `from`. Returns `None` if `from` does not begin with
    /// one.
    fn decode(from: &mut &[u8]) -> Option<Self>;
}

macro_rules! numbers {
    ($($ty:ty),*) => { $(
        impl Codec for $ty {
            fn encode(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }

            fn decode(from: &mut &[u8]) -> Option<Self> {
                let (taken, rest) = from.split_first_chunk()?;
                *from = rest;
                Some(<$ty>::from_le_bytes(*taken))
            }
        }
    )* };
}
numbers!(u8, u16, u32, u64, u128, i16, i32);

/// Implements [`Codec`] for a structure: its fields in the given order. Fields after `defaults` are not
/// encoded; decoding sets them to the given values.
#[doc(hidden)]
#[macro_export]
macro_rules! codec_struct {
    ($ty:path { $($field:ident),* $(,)? } $(defaults { $($rest:ident: $value:expr),* $(,)? })?) => {
        impl $crate::broker::codec::Codec for $ty {
            fn encode(&self, out: &mut Vec<u8>) {
                $($crate::broker::codec::Codec::encode(&self.$field, out);)*
            }

            fn decode(from: &mut &[u8]) -> Option<Self> {
                Some(Self {
                    $($field: $crate::broker::codec::Codec::decode(from)?,)*
                    $($($rest: $value,)*)?
                })
            }
        }
    };
}

/// Implements [`Codec`] for an enumeration: a byte that names the variant, then the values of the variant.
macro_rules! codec_enum {
    ($ty:path { $($tag:literal => $variant:ident $( ($($value:ident),*) )? $( {$($field:ident),*} )?),* $(,)? }) => {
        impl Codec for $ty {
            fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant $( ($($value),*) )? $( {$($field),*} )? => {
                        out.push($tag);
                        $($($value.encode(out);)*)?
                        $($($field.encode(out);)*)?
                    })*
                }
            }

            fn decode(from: &mut &[u8]) -> Option<Self> {
                match u8::decode(from)? {
                    $($tag => {
                        $($(let $value = Codec::decode(from)?;)*)?
                        $($(let $field = Codec::decode(from)?;)*)?
                        Some(Self::$variant $( ($($value),*) )? $( {$($field),*} )?)
                    })*
                    _ => None,
                }
            }
        }
    };
}
pub(super) use codec_enum;
pub(super) use codec_struct;

impl Codec for () {
    fn encode(&self, _: &mut Vec<u8>) {}

    fn decode(_: &mut &[u8]) -> Option<Self> {
        Some(())
    }
}

impl Codec for bool {
    fn encode(&self, out: &mut Vec<u8>) {
        u8::from(*self).encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        match u8::decode(from)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl<const N: usize> Codec for [u8; N] {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        take(from, N)?.try_into().ok()
    }
}

impl Codec for usize {
    fn encode(&self, out: &mut Vec<u8>) {
        (*self as u64).encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        u64::decode(from)?.try_into().ok()
    }
}

impl<A: Codec, B: Codec> Codec for (A, B) {
    fn encode(&self, out: &mut Vec<u8>) {
        self.0.encode(out);
        self.1.encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some((A::decode(from)?, B::decode(from)?))
    }
}

impl<A: Codec, B: Codec, C: Codec> Codec for (A, B, C) {
    fn encode(&self, out: &mut Vec<u8>) {
        self.0.encode(out);
        self.1.encode(out);
        self.2.encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some((A::decode(from)?, B::decode(from)?, C::decode(from)?))
    }
}

impl<T: Codec> Codec for Option<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        self.is_some().encode(out);
        if let Some(value) = self {
            value.encode(out);
        }
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some(if bool::decode(from)? { Some(T::decode(from)?) } else { None })
    }
}

impl<T: Codec, E: Codec> Codec for Result<T, E> {
    fn encode(&self, out: &mut Vec<u8>) {
        self.is_ok().encode(out);
        match self {
            Ok(value) => value.encode(out),
            Err(error) => error.encode(out),
        }
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some(if bool::decode(from)? { Ok(T::decode(from)?) } else { Err(E::decode(from)?) })
    }
}

impl<T: Codec> Codec for Box<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        (**self).encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        T::decode(from).map(Box::new)
    }
}

/// Encodes the number of values, then the values. Each value takes at least a byte, so a count above the
/// number of remaining bytes is refused before memory is reserved for it.
impl<T: Codec> Codec for Vec<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        // Cannot truncate: messages and tables are shorter than 4 GiB.
        (self.len() as u32).encode(out);
        self.iter().for_each(|value| value.encode(out));
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        let count = u32::decode(from)? as usize;
        if count > from.len() {
            return None;
        }
        (0..count).map(|_| T::decode(from)).collect()
    }
}

impl<T: Codec> Codec for Box<[T]> {
    fn encode(&self, out: &mut Vec<u8>) {
        // Cannot truncate, as for `Vec`.
        (self.len() as u32).encode(out);
        self.iter().for_each(|value| value.encode(out));
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Vec::decode(from).map(Vec::into_boxed_slice)
    }
}

impl Codec for String {
    fn encode(&self, out: &mut Vec<u8>) {
        (self.len() as u32).encode(out);
        out.extend(self.as_bytes());
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        let count = u32::decode(from)? as usize;
        String::from_utf8(take(from, count)?.to_vec()).ok()
    }
}

impl Codec for Duration {
    fn encode(&self, out: &mut Vec<u8>) {
        self.as_secs().encode(out);
        self.subsec_nanos().encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        let (seconds, nanos) = (u64::decode(from)?, u32::decode(from)?);
        (nanos < 1_000_000_000).then(|| Self::new(seconds, nanos))
    }
}

impl Codec for Ipv4Addr {
    fn encode(&self, out: &mut Vec<u8>) {
        self.to_bits().encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        u32::decode(from).map(Self::from_bits)
    }
}

impl Codec for IpAddr {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::V4(v4) => {
                4u8.encode(out);
                v4.to_bits().encode(out);
            }
            Self::V6(v6) => {
                6u8.encode(out);
                v6.to_bits().encode(out);
            }
        }
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        match u8::decode(from)? {
            4 => Some(Ipv4Addr::from_bits(u32::decode(from)?).into()),
            6 => Some(Ipv6Addr::from_bits(u128::decode(from)?).into()),
            _ => None,
        }
    }
}

impl Codec for SocketAddr {
    fn encode(&self, out: &mut Vec<u8>) {
        self.ip().encode(out);
        self.port().encode(out);
        if let Self::V6(v6) = self {
            v6.flowinfo().encode(out);
            v6.scope_id().encode(out);
        }
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        let (ip, port) = (IpAddr::decode(from)?, u16::decode(from)?);
        Some(match ip {
            IpAddr::V4(v4) => (v4, port).into(),
            IpAddr::V6(v6) => SocketAddrV6::new(v6, port, u32::decode(from)?, u32::decode(from)?).into(),
        })
    }
}

impl Codec for Errno {
    fn encode(&self, out: &mut Vec<u8>) {
        self.raw_os_error().encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        let number = i32::decode(from)?;
        (1..4096).contains(&number).then(|| Self::from_raw_os_error(number))
    }
}

codec_enum!(CongestionControl { 0 => Cubic, 1 => NewReno, 2 => Bbr });

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_round_trip_and_truncated_or_invalid_bytes_fail() {
        type First = Vec<(i32, u32, u64)>;
        type Value = (First, Option<Duration>, (Errno, Vec<SocketAddr>));
        let value: Value = (
            vec![(-1, 2, 3), (4, 5, u64::MAX)],
            Some(Duration::new(7, 8)),
            (Errno::PIPE, vec!["10.0.0.1:80".parse().unwrap(), "[fd00::1]:443".parse().unwrap()]),
        );
        let mut bytes = Vec::new();
        value.encode(&mut bytes);
        let mut rest = &bytes[..];
        assert_eq!(Value::decode(&mut rest).as_ref(), Some(&value));
        assert!(rest.is_empty());
        for cut in 0..bytes.len() {
            assert_eq!(Value::decode(&mut &bytes[..cut]), None, "{cut}");
        }
        assert_eq!(Vec::<u64>::decode(&mut &[255, 255, 255, 255, 1][..]), None);
        assert_eq!(bool::decode(&mut &[2][..]), None);
        assert_eq!(Errno::decode(&mut &[0, 0, 0, 0][..]), None);
    }
}
