//! Values as bytes, and back: little-endian, each field after the other, nothing that a reader could not check. What a process sent is decoded
//! without trust: whatever it is, the answer is a value or `None`.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use core::time::Duration;

/// Takes values off the front of a message.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
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
pub(super) trait Code: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn get(from: &mut Reader<'_>) -> Option<Self>;
}

macro_rules! numbers {
    ($($ty:ty),*) => { $(
        impl Code for $ty {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }

            fn get(from: &mut Reader<'_>) -> Option<Self> {
                from.take(size_of::<$ty>())?.try_into().ok().map(<$ty>::from_le_bytes)
            }
        }
    )* };
}
numbers!(u8, u16, u32, u64, u128);

/// A structure: its fields in this order.
macro_rules! record {
    ($ty:path { $($field:ident),* $(,)? }) => {
        impl Code for $ty {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }

            fn get(from: &mut Reader<'_>) -> Option<Self> {
                Some(Self { $($field: Code::get(from)?),* })
            }
        }
    };
}

/// A choice: a byte that says which, then what it carries.
macro_rules! choice {
    ($ty:path { $($tag:literal => $variant:ident $( ($($value:ident),*) )? $( {$($field:ident),*} )?),* $(,)? }) => {
        impl Code for $ty {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant $( ($($value),*) )? $( {$($field),*} )? => {
                        out.push($tag);
                        $($($value.put(out);)*)?
                        $($($field.put(out);)*)?
                    })*
                }
            }

            fn get(from: &mut Reader<'_>) -> Option<Self> {
                match u8::get(from)? {
                    $($tag => {
                        $($(let $value = Code::get(from)?;)*)?
                        $($(let $field = Code::get(from)?;)*)?
                        Some(Self::$variant $( ($($value),*) )? $( {$($field),*} )?)
                    })*
                    _ => None,
                }
            }
        }
    };
}
pub(super) use {choice, record};

impl Code for () {
    fn put(&self, _: &mut Vec<u8>) {}

    fn get(_: &mut Reader<'_>) -> Option<Self> {
        Some(())
    }
}

impl Code for bool {
    fn put(&self, out: &mut Vec<u8>) {
        u8::from(*self).put(out);
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        match u8::get(from)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }
}

impl<const N: usize> Code for [u8; N] {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend(self);
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        from.take(N)?.try_into().ok()
    }
}

impl Code for usize {
    fn put(&self, out: &mut Vec<u8>) {
        (*self as u64).put(out);
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        u64::get(from)?.try_into().ok()
    }
}

impl<A: Code, B: Code> Code for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        Some((A::get(from)?, B::get(from)?))
    }
}

impl<T: Code> Code for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        Some(if bool::get(from)? { Some(T::get(from)?) } else { None })
    }
}

impl<T: Code, E: Code> Code for Result<T, E> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_ok().put(out);
        match self {
            Ok(value) => value.put(out),
            Err(error) => error.put(out),
        }
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        Some(if bool::get(from)? { Ok(T::get(from)?) } else { Err(E::get(from)?) })
    }
}

impl<T: Code> Code for Box<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (**self).put(out);
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        T::get(from).map(Box::new)
    }
}

/// Bytes in one piece, or things one after the other. Each takes at least a byte, so that a count cannot ask for more memory than the message had.
impl<T: Code> Code for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        // Cannot truncate: messages are shorter.
        (self.len() as u32).put(out);
        self.iter().for_each(|value| value.put(out));
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        let count = u32::get(from)? as usize;
        if count > from.0.len() {
            return None;
        }
        (0..count).map(|_| T::get(from)).collect()
    }
}

impl Code for String {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        out.extend(self.as_bytes());
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        let count = u32::get(from)? as usize;
        String::from_utf8(from.take(count)?.to_vec()).ok()
    }
}

impl Code for Duration {
    fn put(&self, out: &mut Vec<u8>) {
        self.as_secs().put(out);
        self.subsec_nanos().put(out);
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        let (seconds, nanos) = (u64::get(from)?, u32::get(from)?);
        (nanos < 1_000_000_000).then(|| Self::new(seconds, nanos))
    }
}

impl Code for IpAddr {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::V4(v4) => {
                4u8.put(out);
                v4.to_bits().put(out);
            }
            Self::V6(v6) => {
                6u8.put(out);
                v6.to_bits().put(out);
            }
        }
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        match u8::get(from)? {
            4 => Some(Ipv4Addr::from_bits(u32::get(from)?).into()),
            6 => Some(Ipv6Addr::from_bits(u128::get(from)?).into()),
            _ => None,
        }
    }
}

impl Code for SocketAddr {
    fn put(&self, out: &mut Vec<u8>) {
        self.ip().put(out);
        self.port().put(out);
        if let Self::V6(v6) = self {
            v6.flowinfo().put(out);
            v6.scope_id().put(out);
        }
    }

    fn get(from: &mut Reader<'_>) -> Option<Self> {
        let (ip, port) = (IpAddr::get(from)?, u16::get(from)?);
        Some(match ip {
            IpAddr::V4(v4) => (v4, port).into(),
            IpAddr::V6(v6) => SocketAddrV6::new(v6, port, u32::get(from)?, u32::get(from)?).into(),
        })
    }
}
