//! Comparing bytes of a payload.

use serde::{Deserialize, Deserializer, de};

/// Longest comparison, in bytes.
pub const PAYLOAD_TEST_BYTES_MAX: usize = 32;

/// Compares bytes at an offset of the payload of TCP or UDP: payload AND mask = value. A payload that ends
/// before the last of these bytes does not match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PayloadTest {
    offset: usize,
    /// Value and mask of each byte.
    bytes: Vec<(u8, u8)>,
}

impl PayloadTest {
    /// Creates a comparison. Without a mask, all bits are compared.
    ///
    /// # Errors
    /// The name of the wrong argument, `value` or `mask`, and a text that says what is wrong with it.
    pub fn new(offset: u16, value: &[u8], mask: Option<&[u8]>) -> Result<Self, (&'static str, String)> {
        if value.is_empty() || value.len() > PAYLOAD_TEST_BYTES_MAX {
            return Err((
                "value",
                format!("has {} bytes, outside 1 to {PAYLOAD_TEST_BYTES_MAX}", value.len()),
            ));
        }
        let whole = vec![0xff; value.len()];
        let mask = mask.unwrap_or(&whole);
        if mask.len() != value.len() {
            return Err(("mask", format!("has {} byte(s), but value has {}", mask.len(), value.len())));
        }
        if let Some(at) = value.iter().zip(mask).position(|(value, mask)| value & !mask != 0) {
            return Err(("value", format!("never matches: byte {at} has bits that mask does not have")));
        }
        let bytes = value.iter().copied().zip(mask.iter().copied()).collect();
        Ok(Self { offset: offset.into(), bytes })
    }

    /// Returns whether a payload has the bytes.
    #[must_use]
    pub fn matches(&self, payload: &[u8]) -> bool {
        let found = payload.get(self.offset..).and_then(|rest| rest.get(..self.bytes.len()));
        found.is_some_and(|found| {
            found.iter().zip(&self.bytes).all(|(byte, (value, mask))| byte & mask == *value)
        })
    }
}

/// Bytes in hexadecimal digits, such as `02` or `47 45 54 20`. Spaces are ignored. The number of digits is
/// even and may be 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HexBytes(pub Vec<u8>);

impl<'de> Deserialize<'de> for HexBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let problem = || {
            de::Error::custom(format!(
                "\"{text}\" is not bytes in hexadecimal digits, as in \"02\" or \"47 45 54\""
            ))
        };
        let digits: Option<Vec<u8>> = text
            .chars()
            .filter(|c| *c != ' ')
            // Cannot truncate: a digit is below 16.
            .map(|c| c.to_digit(16).map(|digit| digit as u8))
            .collect();
        let digits = digits.filter(|digits| digits.len() % 2 == 0).ok_or_else(problem)?;
        Ok(Self(digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::{HexBytes, PAYLOAD_TEST_BYTES_MAX, PayloadTest};
    use serde::Deserialize;

    #[test]
    fn bytes_are_compared_under_the_mask() {
        let test = PayloadTest::new(2, &[0x02, 0x30], Some(&[0x0f, 0xf0])).unwrap();
        for (payload, expected) in [
            (&[0, 0, 0x02, 0x30][..], true),
            (&[9, 9, 0xf2, 0x3f, 1], true),
            (&[0, 0, 0x03, 0x30], false),
            (&[0, 0, 0x02, 0x20], false),
            (&[0, 0, 0x02], false),
            (&[], false),
        ] {
            assert_eq!(test.matches(payload), expected, "{payload:?}");
        }
        let whole = PayloadTest::new(0, b"GET ", None).unwrap();
        assert!(whole.matches(b"GET / HTTP/1.1") && !whole.matches(b"get / HTTP/1.1"));
        let last = PayloadTest::new(u16::MAX, &[1], None).unwrap();
        assert!(!last.matches(&[1; 65_535]) && last.matches(&[1; 65_536]));
    }

    #[test]
    fn impossible_comparisons_are_refused() {
        let error = |value: &[u8], mask: Option<&[u8]>| PayloadTest::new(0, value, mask).unwrap_err();
        let longest = [1; PAYLOAD_TEST_BYTES_MAX];
        assert!(PayloadTest::new(0, &longest, None).is_ok());
        assert_eq!(error(&[1; 33], None), ("value", "has 33 bytes, outside 1 to 32".into()));
        assert_eq!(error(&[], None), ("value", "has 0 bytes, outside 1 to 32".into()));
        assert_eq!(error(&[1, 2], Some(&[1])), ("mask", "has 1 byte(s), but value has 2".into()));
        let problem = "never matches: byte 1 has bits that mask does not have";
        assert_eq!(error(&[1, 2], Some(&[1, 1])), ("value", problem.into()));
    }

    #[test]
    fn bytes_are_hexadecimal() {
        #[derive(Deserialize)]
        struct File {
            value: HexBytes,
        }
        let file = |text: &str| {
            let file: Result<File, _> = toml::from_str(&format!("value = \"{text}\""));
            file.map(|file| file.value.0).map_err(|e| e.message().to_string())
        };
        assert_eq!(file("02"), Ok(vec![2]));
        assert_eq!(file("47 45 54fF"), Ok(vec![0x47, 0x45, 0x54, 0xff]));
        assert_eq!(file(""), Ok(vec![]));
        for wrong in ["2", "0x02", "0g", "é0"] {
            let problem =
                format!("\"{wrong}\" is not bytes in hexadecimal digits, as in \"02\" or \"47 45 54\"");
            assert_eq!(file(wrong), Err(problem));
        }
    }
}
