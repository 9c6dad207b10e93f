//! RESP, the protocol of Redis, versions 2 and 3.

use super::{Body, LostFraming, MessageHead, MessageKind, RequestMethod};
use ginnel_apps::resp::{VALUE_BYTES_MAX, decimal};

/// Most elements of an array.
const ITEMS_MAX: u64 = 1 << 32;

/// Number of values and bytes after the line of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ValueLine {
    /// Values that belong to this one.
    pub(super) items: u64,
    /// Bytes of a string and its line end.
    pub(super) skip: u64,
}

/// Parses the line of a value, with its line end.
pub(super) fn value(line: &[u8]) -> Result<ValueLine, LostFraming> {
    let (kind, rest) = line.strip_suffix(b"\r\n").and_then(<[u8]>::split_first).ok_or(LostFraming)?;
    let count = |factor: u64| {
        let count = decimal(rest).filter(|count| *count <= ITEMS_MAX).ok_or(LostFraming)?;
        Ok(ValueLine { items: count * factor, skip: 0 })
    };
    match (kind, rest) {
        // Simple strings, errors, integers, null, doubles, booleans, big numbers.
        (b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(', _) | (b'$' | b'*', b"-1") => {
            Ok(ValueLine::default())
        }
        // Strings, verbatim strings, long errors.
        (b'$' | b'=' | b'!', len) => {
            let len = decimal(len).filter(|len| *len <= VALUE_BYTES_MAX).ok_or(LostFraming)?;
            Ok(ValueLine { items: 0, skip: len + 2 })
        }
        // Arrays, sets, pushes.
        (b'*' | b'~' | b'>', _) => count(1),
        // Maps.
        (b'%', _) => count(2),
        // Attributes precede the value that they describe.
        (b'|', _) => count(2).map(|line| ValueLine { items: line.items + 1, ..line }),
        _ => Err(LostFraming),
    }
}

/// Parses the first line of a command.
pub(super) fn command(bytes: &[u8]) -> Result<Option<MessageHead>, LostFraming> {
    let request = MessageKind::Request { is_high: false, method: RequestMethod::Other };
    // Redis does not answer an empty command.
    let ignored = MessageKind::OneWay { is_high: false };
    let is_inline = bytes.first() != Some(&b'*');
    if is_inline && !bytes.iter().take_while(|byte| **byte != b'\n').all(|byte| is_text(*byte)) {
        return Err(LostFraming);
    }
    let Some(end) = memchr::memchr(b'\n', bytes) else { return Ok(None) };
    let line = &bytes[..=end];
    if is_inline {
        let kind = if line.trim_ascii().is_empty() { ignored } else { request };
        return Ok(Some(MessageHead { len: end + 1, kind, body: Body::Length(0) }));
    }
    let ValueLine { items, skip } = value(line)?;
    let kind = if items == 0 { ignored } else { request };
    Ok(Some(MessageHead { len: end + 1, kind, body: Body::Items { items, skip } }))
}

/// Parses the first line of a reply.
pub(super) fn reply(bytes: &[u8]) -> Result<Option<MessageHead>, LostFraming> {
    let kind = match bytes.first() {
        None => return Ok(None),
        Some(b'>') => MessageKind::Unsolicited,
        Some(byte) if b"+-:$*_,#(=!~%|".contains(byte) => MessageKind::Response,
        Some(_) => return Err(LostFraming),
    };
    let Some(end) = memchr::memchr(b'\n', bytes) else { return Ok(None) };
    let ValueLine { items, skip } = value(&bytes[..=end])?;
    Ok(Some(MessageHead { len: end + 1, kind, body: Body::Items { items, skip } }))
}

/// Returns whether a byte may occur in an inline command.
fn is_text(byte: u8) -> bool {
    byte >= b' ' && byte != 0x7f || matches!(byte, b'\t' | b'\r')
}
