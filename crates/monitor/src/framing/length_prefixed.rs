//! Messages with their length at a fixed place.

use super::{Body, LostFraming, MessageHead, MessageKind, REQUEST, RequestMethod};
use crate::rules::{ByteTest, Endianness, LengthPrefix};

/// Parses the head of a message: the length, and the bytes that tell its kind.
pub(super) fn head(
    prefix: &LengthPrefix,
    direction: usize,
    bytes: &[u8],
) -> Result<Option<MessageHead>, LostFraming> {
    let prefix_end = prefix.offset_bytes as usize + usize::from(prefix.width_bytes);
    let Some(digits) = bytes.get(prefix.offset_bytes as usize..prefix_end) else { return Ok(None) };
    let value = match prefix.endianness {
        Endianness::Big => digits.iter().fold(0u64, |value, digit| value << 8 | u64::from(*digit)),
        Endianness::Little => digits.iter().rev().fold(0u64, |value, digit| value << 8 | u64::from(*digit)),
    };
    let len = i128::from(value) + i128::from(prefix.added_bytes);
    let len = u64::try_from(len).ok().filter(|len| *len <= prefix.message_bytes_max).ok_or(LostFraming)?;
    if len < prefix_end as u64 || len == 0 {
        return Err(LostFraming);
    }
    let tests = [prefix.high, prefix.one_way].into_iter().flatten();
    let inside = tests.map(|test| u64::from(test.offset_bytes) + 1).filter(|end| *end <= len);
    let head_len = inside.fold(prefix_end as u64, u64::max) as usize;
    let Some(head) = bytes.get(..head_len) else { return Ok(None) };
    let passes = |test: Option<ByteTest>| {
        test.is_some_and(|test| head.get(test.offset_bytes as usize) == Some(&test.value))
    };
    let is_high = passes(prefix.high);
    let kind = match (direction, passes(prefix.one_way)) {
        (REQUEST, false) => MessageKind::Request { is_high, method: RequestMethod::Other },
        (REQUEST, true) => MessageKind::OneWay { is_high },
        (_, false) => MessageKind::Response,
        (_, true) => MessageKind::Unsolicited,
    };
    Ok(Some(MessageHead { len: head_len, kind, body: Body::Length(len - head_len as u64) }))
}
