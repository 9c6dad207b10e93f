//! Conditional requests (RFC 9110 §13): evaluates the preconditions.

use super::head::{Method, Request, trim};
use super::range::{self, Selection};
use crate::date;

/// Validators of one version of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validators<'a> {
    /// Strong entity tag, with its quotation marks.
    pub etag: &'a [u8],
    /// Time of last modification, in seconds since 1970.
    pub modified: u64,
}

/// Result of evaluating the preconditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreconditionResult {
    /// Send this part of the file: the preconditions hold, or there are none.
    Send(Selection),
    /// 304: the client has the current version.
    NotModified,
    /// 412: a precondition is false.
    Failed,
}

/// Evaluates the preconditions of a GET or HEAD request in the order of §13.2.2, for a file of `size` bytes.
/// `now` is in seconds since 1970.
pub fn evaluate(request: &Request<'_, '_>, file: &Validators<'_>, size: u64, now: u64) -> PreconditionResult {
    let date_of = |name| request.single(name).and_then(|text| date::parse(text, now));
    if request.values("if-match").next().is_some() {
        if !matches_any(request.values("if-match"), |tag| is_strong_match(tag, file.etag)) {
            return PreconditionResult::Failed;
        }
    } else if date_of("if-unmodified-since").is_some_and(|since| file.modified > since) {
        return PreconditionResult::Failed;
    }
    if request.values("if-none-match").next().is_some() {
        if matches_any(request.values("if-none-match"), |tag| is_weak_match(tag, file.etag)) {
            return PreconditionResult::NotModified;
        }
    } else if date_of("if-modified-since").is_some_and(|since| file.modified <= since) {
        return PreconditionResult::NotModified;
    }
    // §14.2: Range is defined for GET only.
    match request.single("range") {
        Some(field) if request.method == Method::Get && range_applies(request, file) => {
            PreconditionResult::Send(range::select(field, size))
        }
        _ => PreconditionResult::Send(Selection::Whole),
    }
}

/// §13.1.5: Range applies without If-Range, or if If-Range has the entity tag of the current version.
///
/// A date never applies. It is a strong validator only if the file did not change twice in that second
/// (§8.8.2.2), and a file does not say that. A client has no need for a date, because each response with a
/// file has an entity tag.
fn range_applies(request: &Request<'_, '_>, file: &Validators<'_>) -> bool {
    let mut validators = request.values("if-range");
    match (validators.next(), validators.next()) {
        (None, _) => true,
        (Some(tag), None) => is_strong_match(tag, file.etag),
        _ => false,
    }
}

fn is_strong_match(tag: &[u8], etag: &[u8]) -> bool {
    tag == etag // a weak tag begins with W/ and so differs
}

fn is_weak_match(tag: &[u8], etag: &[u8]) -> bool {
    tag.strip_prefix(b"W/").unwrap_or(tag) == etag
}

/// Returns true if a list of entity tags is `*` or has a matching tag. Commas within quotation marks do not
/// separate tags.
fn matches_any<'b>(fields: impl Iterator<Item = &'b [u8]>, matches: impl Fn(&[u8]) -> bool) -> bool {
    for field in fields {
        if field == b"*" {
            return true;
        }
        let (mut quoted, mut start) = (false, 0);
        for (i, byte) in field.iter().enumerate() {
            match byte {
                b'"' => quoted = !quoted,
                b',' if !quoted => {
                    if matches(trim(&field[start..i])) {
                        return true;
                    }
                    start = i + 1;
                }
                _ => {}
            }
        }
        if matches(trim(&field[start..])) {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::head::{HEADERS_MAX, HeaderBuffer, parse};
    use super::*;
    use core::mem::MaybeUninit;

    const MODIFIED: u64 = 784_111_777; // Sun, 06 Nov 1994 08:49:37 GMT
    const NOW: u64 = 1_790_000_000;
    const WHOLE: PreconditionResult = PreconditionResult::Send(Selection::Whole);
    const PART: PreconditionResult = PreconditionResult::Send(Selection::Part { start: 0, len: 10 });

    fn outcome(method: &str, fields: &str) -> PreconditionResult {
        let head = format!("{method} / HTTP/1.0\r\n{fields}\r\n");
        let mut buffer: HeaderBuffer<'_> = [const { MaybeUninit::uninit() }; HEADERS_MAX];
        let request = parse(head.as_bytes(), &mut buffer).unwrap();
        assert_eq!(request.is_conditional, !fields.is_empty());
        evaluate(&request, &Validators { etag: b"\"v1\"", modified: MODIFIED }, 1000, NOW)
    }

    #[test]
    fn preconditions_are_evaluated() {
        let table = [
            ("", WHOLE),
            ("If-None-Match: \"v1\"\r\n", PreconditionResult::NotModified),
            ("If-None-Match: W/\"v1\"\r\n", PreconditionResult::NotModified),
            ("If-None-Match: *\r\n", PreconditionResult::NotModified),
            ("If-None-Match: \"v0\", \"a,b\" , \"v1\"\r\n", PreconditionResult::NotModified),
            ("If-None-Match: \"v0\"\r\nIf-None-Match: \"v1\"\r\n", PreconditionResult::NotModified),
            ("If-None-Match: \"v0,\"v1\"\r\n", WHOLE),
            ("If-None-Match: v1\r\n", WHOLE),
            ("If-None-Match: \"v0\"\r\n", WHOLE),
            ("If-None-Match: \"v0\"\r\nIf-Modified-Since: Sun, 06 Nov 1994 08:49:37 GMT\r\n", WHOLE),
            ("If-Modified-Since: Sun, 06 Nov 1994 08:49:37 GMT\r\n", PreconditionResult::NotModified),
            ("If-Modified-Since: Sun, 06 Nov 1994 08:49:38 GMT\r\n", PreconditionResult::NotModified),
            ("If-Modified-Since: Sun, 06 Nov 1994 08:49:36 GMT\r\n", WHOLE),
            ("If-Modified-Since: Sunday, 06-Nov-94 08:49:37 GMT\r\n", PreconditionResult::NotModified),
            ("If-Modified-Since: last week\r\n", WHOLE),
            ("If-Match: \"v1\"\r\n", WHOLE),
            ("If-Match: *\r\n", WHOLE),
            ("If-Match: W/\"v1\"\r\n", PreconditionResult::Failed),
            ("If-Match: \"v0\"\r\n", PreconditionResult::Failed),
            ("If-Match: \"v1\"\r\nIf-None-Match: \"v1\"\r\n", PreconditionResult::NotModified),
            ("If-Unmodified-Since: Sun, 06 Nov 1994 08:49:37 GMT\r\n", WHOLE),
            ("If-Unmodified-Since: Sun, 06 Nov 1994 08:49:36 GMT\r\n", PreconditionResult::Failed),
            ("If-Match: \"v1\"\r\nIf-Unmodified-Since: Sun, 06 Nov 1994 08:49:36 GMT\r\n", WHOLE),
            ("Range: bytes=0-9\r\n", PART),
            ("Range: bytes=0-9\r\nRange: bytes=10-19\r\n", WHOLE),
            ("Range: bytes=2000-\r\n", PreconditionResult::Send(Selection::Unsatisfiable)),
            ("Range: bytes=0-9\r\nIf-None-Match: \"v1\"\r\n", PreconditionResult::NotModified),
            ("Range: bytes=0-9\r\nIf-Range: \"v1\"\r\n", PART),
            ("Range: bytes=0-9\r\nIf-Range: \"v0\"\r\n", WHOLE),
            ("Range: bytes=0-9\r\nIf-Range: W/\"v1\"\r\n", WHOLE),
            ("Range: bytes=0-9\r\nIf-Range: Sun, 06 Nov 1994 08:49:37 GMT\r\n", WHOLE),
            ("Range: bytes=0-9\r\nIf-Range: Sun, 06 Nov 1994 08:49:38 GMT\r\n", WHOLE),
            ("Range: bytes=0-9\r\nIf-Range: nonsense\r\n", WHOLE),
            ("Range: bytes=2000-\r\nIf-Range: \"v0\"\r\n", WHOLE),
        ];
        for (fields, expected) in table {
            assert_eq!(outcome("GET", fields), expected, "{fields:?}");
        }
    }

    #[test]
    fn head_ignores_ranges_and_honours_validators() {
        assert_eq!(outcome("HEAD", "Range: bytes=0-9\r\n"), WHOLE);
        assert_eq!(outcome("HEAD", "If-None-Match: \"v1\"\r\n"), PreconditionResult::NotModified);
    }
}
