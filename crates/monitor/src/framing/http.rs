//! HTTP/1.1 (RFC 9112).

use super::{Body, LostFraming, MessageHead, MessageKind, RequestMethod};
use httparse::{EMPTY_HEADER, Header, Status};
use memchr::memmem;

/// Most header fields of a message; with more, the framing is lost.
const FIELDS_MAX: usize = 96;
/// Longest name of a method.
const METHOD_BYTES_MAX: usize = 16;

/// Parses the head of a request.
pub(super) fn request(bytes: &[u8]) -> Result<Option<MessageHead>, LostFraming> {
    if !has_end(bytes) {
        let method = &bytes[..bytes.len().min(METHOD_BYTES_MAX)];
        let name = method.split(|byte| *byte == b' ').next().unwrap_or_default();
        // RFC 9112 §2.2: an empty line may precede a request.
        let may_be =
            name.iter().all(|byte| byte.is_ascii_uppercase() || matches!(byte, b'-' | b'\r' | b'\n'));
        return if may_be { Ok(None) } else { Err(LostFraming) };
    }
    let mut fields = [EMPTY_HEADER; FIELDS_MAX];
    let mut request = httparse::Request::new(&mut fields);
    let len = match request.parse(bytes) {
        Ok(Status::Complete(len)) => len,
        Ok(Status::Partial) => return Ok(None),
        Err(_) => return Err(LostFraming),
    };
    let method = match request.method {
        Some("HEAD") => RequestMethod::Head,
        Some("CONNECT") => RequestMethod::Connect,
        _ => RequestMethod::Other,
    };
    // RFC 9112 §6.3: without these fields a request has no body.
    let body = framing(request.headers)?.unwrap_or(Body::Length(0));
    Ok(Some(MessageHead { len, kind: MessageKind::Request { is_high: false, method }, body }))
}

/// Parses the head of a response to a request with this method.
pub(super) fn response(bytes: &[u8], method: RequestMethod) -> Result<Option<MessageHead>, LostFraming> {
    let start = b"HTTP/1.";
    let compared = bytes.len().min(start.len());
    if bytes[..compared] != start[..compared] {
        return Err(LostFraming);
    }
    if !has_end(bytes) {
        return Ok(None);
    }
    let mut fields = [EMPTY_HEADER; FIELDS_MAX];
    let mut response = httparse::Response::new(&mut fields);
    let len = match response.parse(bytes) {
        Ok(Status::Complete(len)) => len,
        Ok(Status::Partial) => return Ok(None),
        Err(_) => return Err(LostFraming),
    };
    let status = response.code.ok_or(LostFraming)?;
    let (kind, has_no_body) = match (status, method) {
        (101, _) | (200..=299, RequestMethod::Connect) => (MessageKind::LastResponse, true),
        (100..=199, _) => (MessageKind::Unsolicited, true),
        (204 | 304, _) | (_, RequestMethod::Head) => (MessageKind::Response, true),
        _ => (MessageKind::Response, false),
    };
    let body = match has_no_body {
        true => Body::Length(0),
        // RFC 9112 §6.3: without these fields the body ends with the connection.
        false => framing(response.headers)?.unwrap_or(Body::UntilClose),
    };
    Ok(Some(MessageHead { len, kind, body }))
}

/// Returns whether the empty line at the end of a head is in `bytes`, so that only complete heads are parsed.
fn has_end(bytes: &[u8]) -> bool {
    memmem::find(bytes, b"\n\r\n").is_some() || memmem::find(bytes, b"\n\n").is_some()
}

/// Returns what the fields say about the body.
fn framing(fields: &[Header<'_>]) -> Result<Option<Body>, LostFraming> {
    let named = |name: &'static str| fields.iter().filter(move |field| field.name.eq_ignore_ascii_case(name));
    // Several fields are one list (RFC 9110 §5.3), whose last coding counts; empty ones do not (§5.6.1).
    let codings = named("transfer-encoding").flat_map(|field| field.value.split(|byte| *byte == b','));
    if let Some(last) = codings.map(<[u8]>::trim_ascii).rfind(|coding| !coding.is_empty()) {
        // The coding overrides the length (RFC 9112 §6.3).
        let is_chunked = last.eq_ignore_ascii_case(b"chunked");
        return Ok(Some(if is_chunked { Body::Chunked } else { Body::UntilClose }));
    }
    let mut length = None;
    for field in named("content-length") {
        let value = ginnel_apps::resp::decimal(field.value.trim_ascii()).ok_or(LostFraming)?;
        if length.is_some_and(|known| known != value) {
            return Err(LostFraming);
        }
        length = Some(value);
    }
    Ok(length.map(Body::Length))
}
