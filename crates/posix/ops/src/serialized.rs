//! What a program leaves to the next, or sends beside a socket, as bytes: each field after the other, little-endian. Both ends are this library; what is not what it should be is `None`.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel::CongestionControl;
use rustix::io::Errno;

/// Something that can be in a note.
pub(crate) trait Codec: Sized {
    fn encode(&self, out: &mut Vec<u8>);
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
numbers!(u8, u16, u32, u64, i16, i32);

/// A structure: its fields in this order. Those behind `anew` begin as they stand here.
macro_rules! fields {
    ($ty:path { $($field:ident),* $(,)? } $(anew { $($rest:ident: $value:expr),* $(,)? })?) => {
        impl $crate::serialized::Codec for $ty {
            fn encode(&self, out: &mut Vec<u8>) {
                $($crate::serialized::Codec::encode(&self.$field, out);)*
            }

            fn decode(from: &mut &[u8]) -> Option<Self> {
                Some(Self { $($field: $crate::serialized::Codec::decode(from)?,)* $($($rest: $value,)*)? })
            }
        }
    };
}
pub(crate) use fields;

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
        Some(match bool::decode(from)? {
            true => Some(T::decode(from)?),
            false => None,
        })
    }
}

impl<T: Codec> Codec for Vec<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        // Cannot truncate: of descriptors, files and bytes of an option there are fewer.
        (self.len() as u32).encode(out);
        self.iter().for_each(|value| value.encode(out));
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        let count = u32::decode(from)? as usize;
        // Each takes a byte at least, so that a wrong number takes no memory.
        if count > from.len() {
            return None;
        }
        (0..count).map(|_| T::decode(from)).collect()
    }
}

impl<T: Codec> Codec for Box<[T]> {
    fn encode(&self, out: &mut Vec<u8>) {
        (self.len() as u32).encode(out);
        self.iter().for_each(|value| value.encode(out));
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Vec::decode(from).map(Vec::into_boxed_slice)
    }
}

impl Codec for Duration {
    fn encode(&self, out: &mut Vec<u8>) {
        (self.as_secs(), self.subsec_nanos()).encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        let (seconds, nanos) = <(u64, u32)>::decode(from)?;
        (nanos < 1_000_000_000).then(|| Self::new(seconds, nanos))
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

impl Codec for CongestionControl {
    fn encode(&self, out: &mut Vec<u8>) {
        (*self == Self::NewReno).encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some(if bool::decode(from)? { Self::NewReno } else { Self::Cubic })
    }
}

impl Codec for SocketAddr {
    fn encode(&self, out: &mut Vec<u8>) {
        match self.ip() {
            IpAddr::V4(ip) => (4u8, u32::from(ip)).encode(out),
            IpAddr::V6(ip) => {
                6u8.encode(out);
                out.extend(ip.octets());
            }
        }
        self.port().encode(out);
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        let ip = match u8::decode(from)? {
            4 => IpAddr::V4(u32::decode(from)?.into()),
            6 => {
                let (octets, rest) = from.split_first_chunk::<16>()?;
                *from = rest;
                IpAddr::V6((*octets).into())
            }
            _ => return None,
        };
        Some(Self::new(ip, u16::decode(from)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_what_is_cut_or_wrong_is_not() {
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
