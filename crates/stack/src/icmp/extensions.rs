//! Extensions after the packet that an ICMP error quotes (RFC 4884): where they begin, and whether they are
//! valid. Their contents are passed on uninterpreted (`IP_RECVERR_RFC4884`).

use crate::wire::checksum::Sum;
use crate::wire::{icmpv4, icmpv6};
use serde::{Deserialize, Serialize};

/// Smallest length in bytes of a quoted packet that extensions follow (RFC 4884 §3).
const QUOTE_LEN_MIN: usize = 128;
/// Bytes of the extension header, and of an object header.
const HEADER_LEN: usize = 4;
/// The extension version that is understood.
const VERSION: u8 = 2;

/// The position of a message's extensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IcmpExtensions {
    /// Byte offset from the beginning of the quoted datagram's payload.
    pub offset: u16,
    /// True if their checksum is wrong, or an object exceeds them (`SO_EE_RFC4884_FLAG_INVALID`).
    pub is_invalid: bool,
}

impl IcmpExtensions {
    /// Finds the extensions of an ICMP message of type `kind` whose first bytes are `head` and which quotes
    /// `quote`. `headers` is the length in bytes of the headers in front of the quoted payload. Returns
    /// `None` if there are no extensions.
    pub(super) fn find(kind: u8, v4: bool, head: &[u8], quote: &[u8], headers: usize) -> Option<Self> {
        // The length of the quoted packet is given in words of 4 bytes (IPv4) or 8 bytes (IPv6).
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

/// Returns whether the checksum and the object lengths are correct (RFC 4884 §7, §8). Extensions of an
/// unknown version are accepted.
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

    /// Returns extensions with these objects and a correct checksum.
    fn extensions(version: u8, objects: &[u8]) -> Vec<u8> {
        let mut bytes = vec![version << 4, 0, 0, 0];
        bytes.extend(objects);
        let sum = Sum::of(&bytes).finish();
        bytes[2..4].copy_from_slice(&sum.to_be_bytes());
        bytes
    }

    /// The expected values are those of Linux 6.18 for these messages: a datagram of 100 bytes after 28 bytes
    /// of headers, followed by the extensions.
    #[test]
    fn validity_of_extensions_matches_linux() {
        let object = [&[0, 8, 1, 1][..], b"abcd"].concat();
        let good = extensions(2, &object);
        let mut bad = good.clone();
        bad[3] ^= 1;
        let mut unchecked = good.clone();
        unchecked[2..4].fill(0);
        let odd = [&good[..], &[0, 0]].concat();
        let valid = |at| Some(IcmpExtensions { offset: at, is_invalid: false });
        let invalid = Some(IcmpExtensions { offset: 100, is_invalid: true });
        let cases = [
            ("good", 32, &good, 100, valid(100)),
            ("no length", 0, &good, 100, None),
            ("short length", 31, &good, 100, None),
            ("bad checksum", 32, &bad, 100, invalid),
            ("no checksum", 32, &unchecked, 100, valid(100)),
            ("object too long", 32, &extensions(2, &[&[0, 12, 1, 1][..], b"abcd"].concat()), 100, invalid),
            ("object too short", 32, &extensions(2, &[0, 3, 1, 1]), 100, invalid),
            ("other version", 32, &extensions(1, &[0, 3, 1, 1]), 100, valid(100)),
            ("header only", 32, &extensions(2, &[]), 100, valid(100)),
            ("truncated header", 32, &good[..3].to_vec(), 100, None),
            ("beyond the message", 33, &extensions(2, &[]), 100, None),
            ("odd trailing bytes", 32, &odd, 100, invalid),
            ("longer quote", 34, &good, 108, valid(108)),
        ];
        for (name, length, behind, payload, expected) in cases {
            let quote = [&vec![7; 28 + payload][..], behind].concat();
            let found = IcmpExtensions::find(3, true, &[3, 3, 0, 0, 0, length, 0, 0], &quote, 28);
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn only_certain_message_types_have_extensions() {
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
        // Headers that are longer than the quoted packet is said to be.
        assert_eq!(IcmpExtensions::find(3, true, &[0, 0, 0, 0, 0, 34, 0, 0], &quote, 137), None);
    }
}
