//! Rewrites the heads that a proxy relays: fields that belong to one connection end here (RFC 9110 §7.6.1).

use crate::httpd::head::trim;

/// Fields that belong to one connection, even if `Connection` does not name them.
const HOP_BY_HOP: [&[u8]; 5] = [b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade"];
/// Fields that are relayed even if `Connection` names them: without them, the message would have another
/// framing or destination.
const ALWAYS_RELAYED: [&[u8]; 3] = [b"host", b"content-length", b"transfer-encoding"];

/// The changes to a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadChanges {
    /// True if the connection to the next hop stays open after this message.
    pub keep_alive: bool,
    /// True if the message is chunked: `Content-Length` is dropped then (RFC 9112 §6.3).
    pub is_chunked: bool,
    /// Fields that are added, each with its line end; may be empty.
    pub added: &'static [u8],
}

/// Appends `head`, which must be complete, to `out` with `changes`.
pub fn rewrite(head: &[u8], changes: HeadChanges, out: &mut Vec<u8>) {
    let mut lines = lines(head).skip_while(|line| line.is_empty());
    push_line(lines.next().unwrap_or_default(), out);
    let mut is_dropped = false;
    for line in lines.take_while(|line| !line.is_empty()) {
        // A folded line belongs to the field before it.
        if !matches!(line[0], b' ' | b'\t') {
            let name = trim(line.split(|byte| *byte == b':').next().unwrap_or_default());
            is_dropped = must_drop(head, name, changes.is_chunked);
        }
        if !is_dropped {
            push_line(line, out);
        }
    }
    out.extend_from_slice(changes.added);
    let connection = if changes.keep_alive { "Connection: keep-alive" } else { "Connection: close" };
    push_line(connection.as_bytes(), out);
    push_line(b"", out);
}

/// Returns the lines of a head without their ends.
fn lines(head: &[u8]) -> impl Iterator<Item = &[u8]> {
    head.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line))
}

fn push_line(line: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(line);
    out.extend_from_slice(b"\r\n");
}

fn must_drop(head: &[u8], name: &[u8], is_chunked: bool) -> bool {
    if is_chunked && name.eq_ignore_ascii_case(b"content-length") {
        return true;
    }
    let is_among = |names: &[&[u8]]| names.iter().any(|other| name.eq_ignore_ascii_case(other));
    is_among(&HOP_BY_HOP) || (!is_among(&ALWAYS_RELAYED) && is_named_by_connection(head, name))
}

/// Returns whether a `Connection` field of `head` lists the field `name`.
fn is_named_by_connection(head: &[u8], name: &[u8]) -> bool {
    lines(head)
        .filter_map(|line| line.split_at_checked(11))
        .filter(|(field, _)| field.eq_ignore_ascii_case(b"connection:"))
        .flat_map(|(_, value)| value.split(|byte| *byte == b','))
        .any(|option| trim(option).eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::{HeadChanges, rewrite};

    fn rewritten(head: &str, keep_alive: bool, is_chunked: bool) -> String {
        let mut out = Vec::new();
        rewrite(head.as_bytes(), HeadChanges { keep_alive, is_chunked, added: b"Via: x\r\n" }, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn fields_of_one_hop_are_replaced() {
        let head = "\r\nGET / HTTP/1.1\r\nHost: a\r\nconnection: X-Mine , upgrade,Host\r\nKeep-Alive: 5\r\n\
                    Upgrade: h2c\r\nX-Mine: 1\r\nX-Yours: 2\r\nTe: trailers\r\nProxy-Connection: x\r\n\r\n";
        let expected = "GET / HTTP/1.1\r\nHost: a\r\nX-Yours: 2\r\nVia: x\r\nConnection: close\r\n\r\n";
        assert_eq!(rewritten(head, false, false), expected);
        assert!(rewritten(head, true, false).ends_with("Connection: keep-alive\r\n\r\n"));
    }

    #[test]
    fn framing_fields_are_never_hop_by_hop() {
        let head = "HTTP/1.1 200 OK\nConnection: content-length, transfer-encoding\n\
                    Content-Length: 3\nTransfer-Encoding: chunked\n\n";
        let kept = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n";
        assert!(rewritten(head, true, false).starts_with(kept));
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nVia";
        assert!(rewritten(head, true, true).starts_with(chunked));
    }

    #[test]
    fn folded_lines_follow_their_field() {
        let head = "HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5,\r\n max=9\r\nX: a\r\n\tb\r\n\r\n";
        let expected = "HTTP/1.1 200 OK\r\nX: a\r\n\tb\r\nVia: x\r\nConnection: close\r\n\r\n";
        assert_eq!(rewritten(head, false, false), expected);
    }
}
