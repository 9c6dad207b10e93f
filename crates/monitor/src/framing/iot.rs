//! The wire format of `ginnel iot` (docs/iot.md).

use super::{Body, LostFraming, MessageHead, MessageKind, RequestMethod};
use ginnel_apps::iot::message::{ANSWER, ANSWER_BYTES, HEAD_BYTES};

/// Position of the label of an answer.
const LABEL_AT: usize = 6;

/// Parses the head of a message of a device.
#[inline]
pub(super) fn message(bytes: &[u8], message_bytes: u32) -> Result<Option<MessageHead>, LostFraming> {
    let Some(first) = bytes.first_chunk::<HEAD_BYTES>() else { return Ok(None) };
    let head = ginnel_apps::iot::message::MessageHead::parse(first).ok_or(LostFraming)?;
    let is_high = head.is_urgent;
    let kind = match head.is_request {
        true => MessageKind::Request { is_high, method: RequestMethod::Other },
        false => MessageKind::OneWay { is_high },
    };
    let left = u64::from(message_bytes).checked_sub(HEAD_BYTES as u64).ok_or(LostFraming)?;
    Ok(Some(MessageHead { len: HEAD_BYTES, kind, body: Body::Length(left) }))
}

/// Parses the head of an answer.
#[inline]
pub(super) fn answer(bytes: &[u8]) -> Result<Option<MessageHead>, LostFraming> {
    match bytes.get(LABEL_AT) {
        None => Ok(None),
        Some(&ANSWER) => Ok(Some(MessageHead {
            len: HEAD_BYTES,
            kind: MessageKind::Response,
            body: Body::Length((ANSWER_BYTES - HEAD_BYTES) as u64),
        })),
        Some(_) => Err(LostFraming),
    }
}
