//! Range requests (RFC 9110 §14) for one range of bytes. A list of several ranges is answered with the whole
//! file, which §14.2 permits: few clients use multipart responses, and they are known to multiply a server's
//! work.

/// The part of a file that a Range field selects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// The whole file: the field is malformed, has another unit, or lists several ranges.
    Whole,
    /// `len` (≥ 1) bytes from `start` on.
    Part {
        /// Offset of the first byte.
        start: u64,
        /// Number of bytes.
        len: u64,
    },
    /// The range does not overlap the file: 416.
    Unsatisfiable,
}

/// Returns the part that the field value `field` selects of a file of `size` bytes.
pub fn select(field: &[u8], size: u64) -> Selection {
    let Some((start, end)) = parse(field) else { return Selection::Whole };
    match (start, end) {
        (Some(start), _) if start >= size => Selection::Unsatisfiable,
        (Some(start), end) => {
            let last = end.unwrap_or(u64::MAX).min(size - 1);
            Selection::Part { start, len: last - start + 1 }
        }
        // A suffix range: the last bytes of the file.
        (None, Some(0)) => Selection::Unsatisfiable,
        (None, Some(_)) if size == 0 => Selection::Unsatisfiable,
        (None, Some(suffix)) => Selection::Part { start: size - suffix.min(size), len: suffix.min(size) },
        (None, None) => Selection::Whole,
    }
}

/// Parses `bytes=first-last`, in which either number may be missing. Returns `None` if the field is not
/// exactly one well-formed range.
fn parse(field: &[u8]) -> Option<(Option<u64>, Option<u64>)> {
    let (unit, set) = field.split_at_checked(b"bytes=".len())?;
    if !unit.eq_ignore_ascii_case(b"bytes=") {
        return None;
    }
    let dash = set.iter().position(|b| *b == b'-')?;
    let (first, last) = (number(&set[..dash])?, number(&set[dash + 1..])?);
    match (first, last) {
        (None, None) => None,
        (Some(first), Some(last)) if first > last => None, // §14.1.1: invalid, so the field is ignored
        range => Some(range),
    }
}

/// Parses digits. Returns `Some(None)` for an empty string and `None` for anything else that is not a number.
/// A number that is too large becomes the largest.
fn number(digits: &[u8]) -> Option<Option<u64>> {
    if digits.is_empty() {
        return Some(None);
    }
    let value = digits.iter().try_fold(0u64, |value, digit| {
        digit.is_ascii_digit().then(|| value.saturating_mul(10).saturating_add(u64::from(digit - b'0')))
    })?;
    Some(Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn part(start: u64, len: u64) -> Selection {
        Selection::Part { start, len }
    }

    #[test]
    fn ranges_of_a_file_of_1000_bytes() {
        let table = [
            ("bytes=0-", part(0, 1000)),
            ("bytes=0-0", part(0, 1)),
            ("bytes=0-499", part(0, 500)),
            ("bytes=500-999", part(500, 500)),
            ("bytes=500-1000", part(500, 500)),
            ("BYTES=999-", part(999, 1)),
            ("bytes=-1", part(999, 1)),
            ("bytes=-1000", part(0, 1000)),
            ("bytes=-1001", part(0, 1000)),
            ("bytes=0-99999999999999999999999", part(0, 1000)),
            ("bytes=1000-", Selection::Unsatisfiable),
            ("bytes=1000-2000", Selection::Unsatisfiable),
            ("bytes=99999999999999999999999-", Selection::Unsatisfiable),
            ("bytes=-0", Selection::Unsatisfiable),
            ("bytes=5-4", Selection::Whole),
            ("bytes=-", Selection::Whole),
            ("bytes=", Selection::Whole),
            ("bytes", Selection::Whole),
            ("", Selection::Whole),
            ("lines=0-1", Selection::Whole),
            ("bytes=0-1,3-4", Selection::Whole),
            ("bytes=0-1,", Selection::Whole),
            ("bytes= 0-1", Selection::Whole),
            ("bytes=0 -1", Selection::Whole),
            ("bytes=+0-1", Selection::Whole),
            ("bytes=0--1", Selection::Whole),
            ("bytes=--1", Selection::Whole),
            ("bytes=0x0-1", Selection::Whole),
        ];
        for (field, expected) in table {
            assert_eq!(select(field.as_bytes(), 1000), expected, "{field}");
        }
    }

    #[test]
    fn an_empty_file_has_no_ranges() {
        for field in ["bytes=0-", "bytes=0-0", "bytes=-1", "bytes=-0"] {
            assert_eq!(select(field.as_bytes(), 0), Selection::Unsatisfiable, "{field}");
        }
    }

    proptest! {
        #[test]
        fn a_range_is_clipped_to_the_file(first: u64, length in 0u64..5000, size in 0u64..10_000) {
            let first = first % 12_000;
            let last = first + length;
            let expected: Vec<u64> = (first..=last).filter(|b| *b < size).collect();
            match select(format!("bytes={first}-{last}").as_bytes(), size) {
                Selection::Part { start, len } => {
                    prop_assert_eq!(Some(&start), expected.first());
                    prop_assert_eq!(len, expected.len() as u64);
                }
                other => {
                    prop_assert_eq!(other, Selection::Unsatisfiable);
                    prop_assert!(expected.is_empty());
                }
            }
        }

        #[test]
        fn any_field_selects_within_the_file(field in "(bytes=)?[0-9,-]{0,30}", size: u64) {
            if let Selection::Part { start, len } = select(field.as_bytes(), size) {
                prop_assert!(len > 0 && start.checked_add(len).is_some_and(|end| end <= size));
            }
        }
    }
}
