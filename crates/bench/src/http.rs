//! Requests and responses of the comparisons, equal to the byte for all arms.

/// Length of the body of a response in bytes.
pub const BODY_BYTES: usize = ginnel_measure::servers::BODY_BYTES;

/// The request of the client.
pub const REQUEST: &[u8] = b"GET /64 HTTP/1.1\r\nHost: bench\r\n\r\n";

/// Returns the head of a response with a body of `len` bytes.
pub fn head(len: u64, keep_alive: bool) -> Vec<u8> {
    let connection = if keep_alive { "" } else { "Connection: close\r\n" };
    format!("HTTP/1.1 200 OK\r\nContent-Length: {len}\r\n{connection}\r\n").into_bytes()
}

/// Returns a response with a body of [`BODY_BYTES`] bytes.
pub fn response(keep_alive: bool) -> Vec<u8> {
    [&head(BODY_BYTES as u64, keep_alive)[..], &[b'x'; BODY_BYTES]].concat()
}

/// Returns true if the bytes are a complete request.
#[inline]
pub fn is_request(bytes: &[u8]) -> bool {
    bytes.starts_with(b"GET ") && bytes.ends_with(b"\r\n\r\n")
}

/// Returns the length of a response's head and of its body, if `bytes` has the complete head.
pub fn response_head(bytes: &[u8]) -> Option<(usize, u64)> {
    let end = bytes.windows(4).position(|w| w == b"\r\n\r\n")? + 4;
    let head = std::str::from_utf8(&bytes[..end]).ok()?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    })?;
    Some((end, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_response_states_its_length() {
        for keep_alive in [false, true] {
            let bytes = response(keep_alive);
            let (head, body) = response_head(&bytes).unwrap();
            assert_eq!((head + BODY_BYTES, body), (bytes.len(), BODY_BYTES as u64));
        }
        assert_eq!(response_head(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n"), None, "the head goes on");
    }

    #[test]
    fn the_request_is_a_request() {
        assert!(is_request(REQUEST));
        assert!(!is_request(&REQUEST[..REQUEST.len() - 1]));
    }
}
