//! Values as bytes, and back: little-endian, each field after the other, nothing that a reader could not check. What a process sent is decoded
//! without trust: whatever it is, the answer is a value or `None`.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use core::time::Duration;

/// Takes values off the front of a message.
pub(super) struct Decoder<'a>(&'a [u8]);

impl<'a> Decoder<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    /// Nothing is left: the message was no longer than what it says.
    pub fn is_done(&self) -> bool {
        self.0.is_empty()
    }
}

/// Something that can be in a message.
pub(super) trait Codec: Sized {
    fn encode(&self, out: &mut Vec<u8>);
    fn decode(from: &mut Decoder<'_>) -> Option<Self>;
}

macro_rules! numbers {
    ($($ty:ty),*) => { $(
        impl Codec for $ty {
            fn encode(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }

            fn decode(from: &mut Decoder<'_>) -> Option<Self> {
                from.take(size_of::<$ty>())?.try_into().ok().map(<$ty>::from_le_bytes)
            }
        }
    )* };
}
numbers!(u8, u16, u32, u64, u128);

/// A structure: its fields in this order.
macro_rules! record {
    ($ty:path { $($field:ident),* $(,)? }) => {
        impl Codec for $ty {
            fn encode(&self, out: &mut Vec<u8>) {
                $(self.$field.encode(out);)*
            }

            fn decode(from: &mut Decoder<'_>) -> Option<Self> {
                Some(Self { $($field: Codec::decode(from)?),* })
            }
        }
    };
}

/// A choice: a byte that says which, then what it carries.
macro_rules! choice {
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

            fn decode(from: &mut Decoder<'_>) -> Option<Self> {
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
pub(super) use {choice, record};

impl Codec for () {
    fn encode(&self, _: &mut Vec<u8>) {}

    fn decode(_: &mut Decoder<'_>) -> Option<Self> {
        Some(())
    }
}

impl Codec for bool {
    fn encode(&self, out: &mut Vec<u8>) {
        u8::from(*self).encode(out);
    }

    fn decode(from: &mut Decoder<'_>) -> Option<Self> {
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

    fn decode(from: &mut Decoder<'_>) -> Option<Self> {
        from.take(N)?.try_into().ok()
    }
}

impl Codec for usize {
    fn encode(&self, out: &mut Vec<u8>) {
        (*self as u64).encode(out);
    }

    fn decode(from: &mut Decoder<'_>) -> Option<Self> {
        u64::decode(from)?.try_into().ok()
    }
}

impl<A: Codec, B: Codec> Codec for (A, B) {
    fn encode(&self, out: &mut Vec<u8>) {
        self.0.encode(out);
        self.1.encode(out);
    }

    fn decode(from: &mut Decoder<'_>) -> Option<Self> {
        Some((A::decode(from)?, B::decode(from)?))
    }
}

impl<T: Codec> Codec for Option<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        self.is_some().encode(out);
        if let Some(value) = self {
            value.encode(out);
        }
    }

    fn decode(from: &mut Decoder<'_>) -> Option<Self> {
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

    fn decode(from: &mut Decoder<'_>) -> Option<Self> {
        Some(if bool::decode(from)? { Ok(T::decode(from)?) } else { Err(E::decode(from)?) })
    }
}

impl<T: Codec> Codec for Box<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        (**self).encode(out);
    }

    fn decode(from: &mut Decoder<'_>) -> Option<Self> {
        T::decode(from).map(Box::new)
    }
}

/// Bytes in one piece, or things one after the other. Each takes at least a byte, so that a count cannot ask for more memory than the message had.
impl<T: Codec> Codec for Vec<T> {
    fn encode(&self, out: &mut Vec<u8>) {
        // Cannot truncate: messages are shorter.
        (self.len() as u32).encode(out);
        self.iter().for_each(|value| value.encode(out));
    }

    fn decode(from: &mut Decoder<'_>) -> Option<Self> {
        let count = u32::decode(from)? as usize;
        if count > from.0.len() {
            return None;
        }
        (0..count).map(|_| T::decode(from)).collect()
    }
}

impl Codec for String {
    fn encode(&self, out: &mut Vec<u8>) {
        (self.len() as u32).encode(out);
        out.extend(self.as_bytes());
    }

    fn decode(from: &mut Decoder<'_>) -> Option<Self> {
        let count = u32::decode(from)? as usize;
        String::from_utf8(from.take(count)?.to_vec()).ok()
    }
}

impl Codec for Duration {
    fn encode(&self, out: &mut Vec<u8>) {
        self.as_secs().encode(out);
        self.subsec_nanos().encode(out);
    }

    fn decode(from: &mut Decoder<'_>) -> Option<Self> {
        let (seconds, nanos) = (u64::decode(from)?, u32::decode(from)?);
        (nanos < 1_000_000_000).then(|| Self::new(seconds, nanos))
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

    fn decode(from: &mut Decoder<'_>) -> Option<Self> {
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

    fn decode(from: &mut Decoder<'_>) -> Option<Self> {
        let (ip, port) = (IpAddr::decode(from)?, u16::decode(from)?);
        Some(match ip {
            IpAddr::V4(v4) => (v4, port).into(),
            IpAddr::V6(v6) => SocketAddrV6::new(v6, port, u32::decode(from)?, u32::decode(from)?).into(),
        })
    }
}
