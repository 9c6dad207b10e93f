//! Converts the path of a request to a key of the site's catalogue.
//!
//! The catalogue is a table of the files below the root, so no key leads out of the root. Every known trick
//! is refused here nevertheless, so that a later change of the catalogue cannot open a hole.

use super::status::Status;

/// Decodes and normalises `raw`, the path of a target without its query. The result begins with a slash and
/// has no empty, `.` or `..` segments; it may end with a slash. `scratch` is used if anything changes.
///
/// Percent-encoding is decoded once. These are refused with 400, however they are encoded: a malformed
/// escape, NUL, a backslash, control characters, and `..` beyond the root. An encoded slash gives 404,
/// because no file name contains a slash.
pub fn normalise<'a>(raw: &'a [u8], scratch: &'a mut Vec<u8>) -> Result<&'a [u8], Status> {
    if raw.first() != Some(&b'/') {
        return Err(Status::BadRequest);
    }
    if is_plain(raw) {
        return Ok(raw);
    }
    scratch.clear();
    let mut rest = raw;
    while let [b'/', tail @ ..] = rest {
        let end = memchr::memchr(b'/', tail).unwrap_or(tail.len());
        let start = scratch.len();
        scratch.push(b'/');
        decode(&tail[..end], scratch)?;
        rest = &tail[end..];
        let is_last = rest.is_empty();
        match &scratch[start + 1..] {
            // An empty last segment is the slash at the end of a directory's path.
            b"" if is_last => {}
            b"" => scratch.truncate(start),
            b"." => scratch.truncate(if is_last { start + 1 } else { start }),
            b".." => {
                let parent = scratch[..start].iter().rposition(|b| *b == b'/').ok_or(Status::BadRequest)?;
                scratch.truncate(if is_last { parent + 1 } else { parent });
            }
            _ => {}
        }
    }
    Ok(scratch)
}

/// Returns true if there is nothing to decode, to resolve or to refuse.
fn is_plain(path: &[u8]) -> bool {
    let mut previous = 0;
    path.iter().all(|byte| {
        let starts_segment = previous == b'/';
        previous = *byte;
        match byte {
            b'%' | b'\\' | 0..=0x1f | 0x7f => false,
            b'/' | b'.' => !starts_segment,
            _ => true,
        }
    })
}

fn decode(segment: &[u8], out: &mut Vec<u8>) -> Result<(), Status> {
    let mut bytes = segment.iter();
    while let Some(byte) = bytes.next() {
        let decoded = if *byte == b'%' {
            let mut digit = || bytes.next().and_then(|d| (*d as char).to_digit(16)).ok_or(Status::BadRequest);
            let value = digit()? << 4 | digit()?;
            if value == u32::from(b'/') {
                return Err(Status::NotFound);
            }
            value as u8
        } else {
            *byte
        };
        if matches!(decoded, b'\\' | 0..=0x1f | 0x7f) {
            return Err(Status::BadRequest);
        }
        out.push(decoded);
    }
    Ok(())
}

/// Encodes a normalised path for a Location field: every byte except unreserved characters and slashes is
/// escaped. A normalised path has no empty segment, so it cannot begin with two slashes, which would name
/// another host.
pub fn encode(path: &[u8], out: &mut Vec<u8>) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    for byte in path {
        match byte {
            b'/' | b'-' | b'.' | b'_' | b'~' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => out.push(*byte),
            _ => out.extend_from_slice(&[b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(raw: &str) -> Result<String, u16> {
        let mut scratch = Vec::new();
        normalise(raw.as_bytes(), &mut scratch)
            .map(|key| String::from_utf8_lossy(key).into_owned())
            .map_err(Status::code)
    }

    #[test]
    fn paths_are_normalised() {
        let table = [
            ("/", "/"),
            ("/a/b.html", "/a/b.html"),
            ("/a/", "/a/"),
            ("//a///b//", "/a/b/"),
            ("/./a/./b/.", "/a/b/"),
            ("/a/../b", "/b"),
            ("/a/b/..", "/a/"),
            ("/a/b/../", "/a/"),
            ("/a/..", "/"),
            ("/%61%20b", "/a b"),
            ("/a/%2e%2E/b", "/b"),
            ("/a/.%2e/b", "/b"),
            ("/%25%32%65", "/%2e"),
            ("/...", "/..."),
            ("/..a", "/..a"),
            ("/a..", "/a.."),
            ("/.hidden", "/.hidden"),
            ("/%C3%A4", "/ä"),
            ("/ä", "/ä"),
            ("/a+b", "/a+b"),
        ];
        for (raw, expected) in table {
            assert_eq!(key(raw).as_deref(), Ok(expected), "{raw}");
        }
    }

    #[test]
    fn escapes_from_the_root_are_refused() {
        let table = [
            ("", 400),
            ("a", 400),
            ("..", 400),
            ("/..", 400),
            ("/../etc/passwd", 400),
            ("/a/../../etc/passwd", 400),
            ("/./../etc/passwd", 400),
            ("//../etc/passwd", 400),
            ("/%2e%2e/etc/passwd", 400),
            ("/%2E./etc/passwd", 400),
            ("/a/%2e%2e/%2e%2e/etc/passwd", 400),
            ("/..%2fetc/passwd", 404),
            ("/%2e%2e%2fetc%2fpasswd", 404),
            ("/a%2f..%2f..%2fetc", 404),
            ("/..\\etc", 400),
            ("/..%5cetc", 400),
            ("/a\\b", 400),
            ("/a%00.html", 400),
            ("/a%0a", 400),
            ("/a%7f", 400),
            ("/%", 400),
            ("/%4", 400),
            ("/%zz", 400),
            ("/%+1", 400),
        ];
        for (raw, status) in table {
            assert_eq!(key(raw), Err(status), "{raw}");
        }
    }

    #[test]
    fn a_location_never_names_another_host() {
        for raw in ["//evil.example/a", "/%2e/evil", "/.//evil.example/..//a", "/a/..//evil.example"] {
            let mut out = Vec::new();
            encode(key(raw).unwrap().as_bytes(), &mut out);
            assert!(!out.starts_with(b"//"), "{raw}");
        }
    }

    proptest! {
        #[test]
        fn no_key_leads_out_of_the_root(raw in "/[a./%2e5cf\\\\]{0,40}") {
            if let Ok(key) = key(&raw) {
                prop_assert!(key.starts_with('/'));
                let (segments, _) = key[1..].rsplit_once('/').unwrap_or(("x", ""));
                prop_assert!(key == "/" || segments.split('/').all(|s| !matches!(s, "" | "." | "..")), "{}", key);
                prop_assert!(!matches!(key.rsplit('/').next(), Some("." | "..")));
                prop_assert!(!key.contains('\\'));
            }
        }

        #[test]
        fn normalising_reverses_encoding(path in "/[ -\\[\\]-~]{0,20}") {
            if let Ok(wanted) = key(&path.replace('%', "%25")) {
                let mut encoded = Vec::new();
                encode(wanted.as_bytes(), &mut encoded);
                prop_assert_eq!(key(core::str::from_utf8(&encoded).unwrap()), Ok(wanted));
            }
        }

        #[test]
        fn any_bytes_normalise_without_panic(raw in proptest::collection::vec(any::<u8>(), 0..60)) {
            let _ = normalise(&raw, &mut Vec::new());
        }
    }
}
