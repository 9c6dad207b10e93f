//! What a program leaves to the next, or sends beside a socket, as bytes: each field after the other, little-endian. Both ends are this library; what is not what it should be is `None`.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel::CongestionControl;
use rustix::io::Errno;

/// Something that can be in a note.
pub(crate) trait Note: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn get(from: &mut &[u8]) -> Option<Self>;
}

macro_rules! numbers {
    ($($ty:ty),*) => { $(
        impl Note for $ty {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }

            fn get(from: &mut &[u8]) -> Option<Self> {
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
        impl $crate::note::Note for $ty {
            fn put(&self, out: &mut Vec<u8>) {
                $($crate::note::Note::put(&self.$field, out);)*
            }

            fn get(from: &mut &[u8]) -> Option<Self> {
                Some(Self { $($field: $crate::note::Note::get(from)?,)* $($($rest: $value,)*)? })
            }
        }
    };
}
pub(crate) use fields;

impl Note for bool {
    fn put(&self, out: &mut Vec<u8>) {
        u8::from(*self).put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        match u8::get(from)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl<A: Note, B: Note> Note for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some((A::get(from)?, B::get(from)?))
    }
}

impl<A: Note, B: Note, C: Note> Note for (A, B, C) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
        self.2.put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some((A::get(from)?, B::get(from)?, C::get(from)?))
    }
}

impl<T: Note> Note for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some(match bool::get(from)? {
            true => Some(T::get(from)?),
            false => None,
        })
    }
}

impl<T: Note> Note for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        // Cannot truncate: of descriptors, files and bytes of an option there are fewer.
        (self.len() as u32).put(out);
        self.iter().for_each(|value| value.put(out));
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let count = u32::get(from)? as usize;
        // Each takes a byte at least, so that a wrong number takes no memory.
        if count > from.len() {
            return None;
        }
        (0..count).map(|_| T::get(from)).collect()
    }
}

impl<T: Note> Note for Box<[T]> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        self.iter().for_each(|value| value.put(out));
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Vec::get(from).map(Vec::into_boxed_slice)
    }
}

impl Note for Duration {
    fn put(&self, out: &mut Vec<u8>) {
        (self.as_secs(), self.subsec_nanos()).put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let (seconds, nanos) = <(u64, u32)>::get(from)?;
        (nanos < 1_000_000_000).then(|| Self::new(seconds, nanos))
    }
}

impl Note for Errno {
    fn put(&self, out: &mut Vec<u8>) {
        self.raw_os_error().put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let number = i32::get(from)?;
        (1..4096).contains(&number).then(|| Self::from_raw_os_error(number))
    }
}

impl Note for CongestionControl {
    fn put(&self, out: &mut Vec<u8>) {
        (*self == Self::NewReno).put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some(if bool::get(from)? { Self::NewReno } else { Self::Cubic })
    }
}

impl Note for SocketAddr {
    fn put(&self, out: &mut Vec<u8>) {
        match self.ip() {
            IpAddr::V4(ip) => (4u8, u32::from(ip)).put(out),
            IpAddr::V6(ip) => {
                6u8.put(out);
                out.extend(ip.octets());
            }
        }
        self.port().put(out);
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        let ip = match u8::get(from)? {
            4 => IpAddr::V4(u32::get(from)?.into()),
            6 => {
                let (octets, rest) = from.split_first_chunk::<16>()?;
                *from = rest;
                IpAddr::V6((*octets).into())
            }
            _ => return None,
        };
        Some(Self::new(ip, u16::get(from)?))
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
        value.put(&mut bytes);
        let mut rest = &bytes[..];
        assert_eq!(Value::get(&mut rest).as_ref(), Some(&value));
        assert!(rest.is_empty());
        for cut in 0..bytes.len() {
            assert_eq!(Value::get(&mut &bytes[..cut]), None, "{cut}");
        }
        assert_eq!(Vec::<u64>::get(&mut &[255, 255, 255, 255, 1][..]), None);
        assert_eq!(bool::get(&mut &[2][..]), None);
        assert_eq!(Errno::get(&mut &[0, 0, 0, 0][..]), None);
    }
}
