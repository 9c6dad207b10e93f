//! Extensions behind the datagram that an ICMP error quotes (RFC 4884): where they begin, and whether they are whole. What they say is for whoever asks (`IP_RECVERR_RFC4884`).

use crate::wire::checksum::Sum;
use crate::wire::{icmpv4, icmpv6};

/// Bytes of the quote, at least, when there are extensions behind it (RFC 4884 §3).
const QUOTE_LEN_MIN: usize = 128;
/// Bytes of the header of all extensions, and of that of each.
const HEADER_LEN: usize = 4;
/// The version whose insides are known.
const VERSION: u8 = 2;

/// Where the extensions of a message are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpExtensions {
    /// So many bytes behind the beginning of the quoted datagram's payload.
    pub offset: u16,
    /// Their checksum is wrong, or an object does not fit (`SO_EE_RFC4884_FLAG_INVALID`).
    pub is_invalid: bool,
}

impl IcmpExtensions {
    /// Those of an ICMP message of this type, which begins with `head`; behind that is the quote, with so many bytes of headers in front of its payload.
    pub(super) fn find(kind: u8, v4: bool, head: &[u8], quote: &[u8], headers: usize) -> Option<Self> {
        // The length of the quote, in words of 4 bytes or of 8.
        let length = match kind {
            icmpv4::UNREACHABLE | icmpv4::TIME_EXCEEDED | icmpv4::PARAMETER_PROBLEM if v4 => {
                usize::from(*head.get(5)?) * 4
            }
            icmpv6::UNREACHABLE | icmpv6::TIME_EXCEEDED if !v4 => usize::from(*head.get(4)?) * 8,
            _ => return None,
        };
        let extensions = quote.get(length..)?;
        if length < QUOTE_LEN_MIN || extensions.len() < HEADER_LEN {
            return None;
        }
        // Cannot truncate: at most 255 words of 8 bytes.
        let at = length.checked_sub(headers)? as u16;
        Some(Self { offset: at, is_invalid: !are_well_formed(extensions) })
    }
}

/// Whether nothing contradicts that they are what they claim to be (RFC 4884 §7, §8).
fn are_well_formed(extensions: &[u8]) -> bool {
    let Some((&[version, _, a, b], mut objects)) = extensions.split_first_chunk::<HEADER_LEN>() else {
        return false;
    };
    if version >> 4 != VERSION {
        return true;
    }
    if (a, b) != (0, 0) && !Sum::of(extensions).is_valid() {
        return false;
    }
    while !objects.is_empty() {
        let Some(&[a, b, ..]) = objects.first_chunk::<HEADER_LEN>() else { return false };
        let len = usize::from(u16::from_be_bytes([a, b]));
        if len < HEADER_LEN {
            return false;
        }
        let Some(rest) = objects.get(len..) else { return false };
        objects = rest;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Extensions of these objects, with their checksum.
    fn extensions(version: u8, objects: &[u8]) -> Vec<u8> {
        let mut bytes = vec![version << 4, 0, 0, 0];
        bytes.extend(objects);
        let sum = Sum::of(&bytes).finish();
        bytes[2..4].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    /// The same messages were shown to Linux 6.18: a datagram of 100 bytes behind 28 of headers, and this.
    #[test]
    fn what_linux_says_of_them_is_said() {
        let object = [&[0, 8, 1, 1][..], b"abcd"].concat();
        let good = extensions(2, &object);
        let mut bad = good.clone();
        bad[3] ^= 1;
        let mut unchecked = good.clone();
        unchecked[2..4].fill(0);
        let odd = [&good[..], &[0, 0]].concat();
        let whole = |at| Some(IcmpExtensions { offset: at, is_invalid: false });
        let broken = Some(IcmpExtensions { offset: 100, is_invalid: true });
        let cases = [
            ("good", 32, &good, 100, whole(100)),
            ("no length", 0, &good, 100, None),
            ("short length", 31, &good, 100, None),
            ("bad checksum", 32, &bad, 100, broken),
            ("no checksum", 32, &unchecked, 100, whole(100)),
            ("object too long", 32, &extensions(2, &[&[0, 12, 1, 1][..], b"abcd"].concat()), 100, broken),
            ("object too short", 32, &extensions(2, &[0, 3, 1, 1]), 100, broken),
            ("other version", 32, &extensions(1, &[0, 3, 1, 1]), 100, whole(100)),
            ("header only", 32, &extensions(2, &[]), 100, whole(100)),
            ("cut header", 32, &good[..3].to_vec(), 100, None),
            ("beyond", 33, &extensions(2, &[]), 100, None),
            ("odd rest", 32, &odd, 100, broken),
            ("longer quote", 34, &good, 108, whole(108)),
        ];
        for (name, length, behind, payload, expected) in cases {
            let quote = [&vec![7; 28 + payload][..], behind].concat();
            let found = IcmpExtensions::find(3, true, &[3, 3, 0, 0, 0, length, 0, 0], &quote, 28);
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn only_some_messages_have_them_and_ipv6_counts_in_words_of_eight() {
        let quote = [&[7; 136][..], &extensions(2, &[])].concat();
        let of = |kind, v4, at: usize, length| {
            let mut head = [0; 8];
            head[at] = length;
            IcmpExtensions::find(kind, v4, &head, &quote, 48).map(|found| found.offset)
        };
        for kind in 0..=u8::MAX {
            assert_eq!(of(kind, true, 5, 34), matches!(kind, 3 | 11 | 12).then_some(88), "{kind}");
            assert_eq!(of(kind, false, 4, 17), matches!(kind, 1 | 3).then_some(88), "{kind}");
        }
        // Headers that are longer than the quote says it is.
        assert_eq!(IcmpExtensions::find(3, true, &[0, 0, 0, 0, 0, 34, 0, 0], &quote, 137), None);
    }
}
