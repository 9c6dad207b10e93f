//! Requests seen lately, byte for byte, with what they come to.
//!
//! What a plain request for a loaded file is answered with depends on nothing but its bytes, and many clients (proxies, health checks,
//! programs, generators of load) send the same bytes again and again. Comparing them costs a tenth of reading them.

use super::site::FileId;

/// Requests remembered.
const ENTRIES: usize = 64;
/// Longest head remembered.
const HEAD_BYTES_MAX: usize = 512;
/// The first bytes of a request choose its place: the request line and, as a rule, the host.
const KEY_BYTES: usize = 64;

/// What a remembered request is answered with: a prepared response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// The file.
    pub file: FileId,
    /// Only its head.
    pub is_head: bool,
    /// The connection closes afterwards.
    pub close: bool,
}

#[derive(Debug)]
struct Entry {
    /// A whole head; empty if the place is free.
    head: Vec<u8>,
    answer: Remembered,
}

/// The requests.
#[derive(Debug)]
pub struct Memo {
    entries: Box<[Entry]>,
}

impl Default for Memo {
    fn default() -> Self {
        let answer = Remembered { file: FileId(0), is_head: false, close: false };
        let free = || Entry { head: Vec::with_capacity(HEAD_BYTES_MAX), answer };
        Self { entries: (0..ENTRIES).map(|_| free()).collect() }
    }
}

impl Memo {
    /// The answer to the request that `bytes` begins with, and the length of its head.
    pub fn find(&self, bytes: &[u8]) -> Option<(usize, Remembered)> {
        let entry = &self.entries[place(bytes)];
        let is_known = !entry.head.is_empty() && bytes.starts_with(&entry.head);
        is_known.then_some((entry.head.len(), entry.answer))
    }

    /// Remembers the head of `head_len` bytes that `bytes` begins with, in the place of another one. `bytes` must be what
    /// [`Memo::find`] was asked about.
    pub fn remember(&mut self, bytes: &[u8], head_len: usize, answer: Remembered) {
        if head_len <= HEAD_BYTES_MAX {
            let entry = &mut self.entries[place(bytes)];
            entry.head.clear();
            entry.head.extend_from_slice(&bytes[..head_len]);
            entry.answer = answer;
        }
    }

    /// Forgets everything, because answers have changed.
    pub fn clear(&mut self) {
        self.entries.iter_mut().for_each(|e| e.head.clear());
    }
}

/// It need not be unpredictable: a client that fills places costs others only what reading their requests costs.
fn place(bytes: &[u8]) -> usize {
    let key = &bytes[..bytes.len().min(KEY_BYTES)];
    let mut hash = key.len() as u64;
    let (words, rest) = key.as_chunks::<8>();
    for word in words {
        hash = (hash.rotate_left(23) ^ u64::from_le_bytes(*word)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
    for byte in rest {
        hash = (hash.rotate_left(9) ^ u64::from(*byte)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
    (hash >> 58) as usize
}

const _: () = assert!(ENTRIES == 1 << (64 - 58));

#[cfg(test)]
mod tests {
    use super::*;

    const fn answer(file: u32) -> Remembered {
        Remembered { file: FileId(file), is_head: false, close: true }
    }

    #[test]
    fn only_the_very_same_head_is_known() {
        let mut memo = Memo::default();
        let request = format!("GET /{} HTTP/1.1\r\nHost: a\r\nX: y\r\n\r\n", "x".repeat(80));
        assert_eq!(memo.find(request.as_bytes()), None);
        memo.remember(request.as_bytes(), request.len(), answer(7));
        assert_eq!(memo.find(request.as_bytes()), Some((request.len(), answer(7))));
        let pipelined = request.repeat(2);
        assert_eq!(memo.find(pipelined.as_bytes()), Some((request.len(), answer(7))));
        for other in
            [request.replace("X: y", "X: z"), request.replace("X: y", "X: yy"), request[..100].to_owned()]
        {
            assert_eq!(memo.find(other.as_bytes()), None, "{other:?}");
        }
        memo.clear();
        assert_eq!(memo.find(request.as_bytes()), None);
    }

    #[test]
    fn a_long_head_is_not_remembered() {
        let mut memo = Memo::default();
        let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", "x".repeat(600));
        memo.remember(request.as_bytes(), request.len(), answer(7));
        assert_eq!(memo.find(request.as_bytes()), None);
        assert_eq!(memo.find(b""), None);
    }
}
