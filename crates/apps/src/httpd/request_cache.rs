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
pub struct CachedResponse {
    /// The file.
    pub file: FileId,
    /// Only its head.
    pub is_head: bool,
    /// The connection closes afterwards.
    pub close: bool,
}

#[derive(Debug)]
struct CachedRequest {
    /// A whole head; empty if the place is free.
    head: Vec<u8>,
    response: CachedResponse,
}

/// The requests.
#[derive(Debug)]
pub struct RequestCache {
    entries: Box<[CachedRequest]>,
}

impl Default for RequestCache {
    fn default() -> Self {
        let response = CachedResponse { file: FileId(0), is_head: false, close: false };
        let free = || CachedRequest { head: Vec::with_capacity(HEAD_BYTES_MAX), response };
        Self { entries: (0..ENTRIES).map(|_| free()).collect() }
    }
}

impl RequestCache {
    /// The answer to the request that `bytes` begins with, and the length of its head.
    pub fn find(&self, bytes: &[u8]) -> Option<(usize, CachedResponse)> {
        let entry = &self.entries[bucket_of(bytes)];
        let is_known = !entry.head.is_empty() && bytes.starts_with(&entry.head);
        is_known.then_some((entry.head.len(), entry.response))
    }

    /// Remembers the head of `head_len` bytes that `bytes` begins with, in the place of another one. `bytes` must be what
    /// [`Memo::find`] was asked about.
    pub fn insert(&mut self, bytes: &[u8], head_len: usize, response: CachedResponse) {
        if head_len <= HEAD_BYTES_MAX {
            let entry = &mut self.entries[bucket_of(bytes)];
            entry.head.clear();
            entry.head.extend_from_slice(&bytes[..head_len]);
            entry.response = response;
        }
    }

    /// Forgets everything, because answers have changed.
    pub fn clear(&mut self) {
        self.entries.iter_mut().for_each(|e| e.head.clear());
    }
}

/// It need not be unpredictable: a client that fills places costs others only what reading their requests costs.
fn bucket_of(bytes: &[u8]) -> usize {
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

    const fn answer(file: u32) -> CachedResponse {
        CachedResponse { file: FileId(file), is_head: false, close: true }
    }

    #[test]
    fn only_the_very_same_head_is_known() {
        let mut cache = RequestCache::default();
        let request = format!("GET /{} HTTP/1.1\r\nHost: a\r\nX: y\r\n\r\n", "x".repeat(80));
        assert_eq!(cache.find(request.as_bytes()), None);
        cache.insert(request.as_bytes(), request.len(), answer(7));
        assert_eq!(cache.find(request.as_bytes()), Some((request.len(), answer(7))));
        let pipelined = request.repeat(2);
        assert_eq!(cache.find(pipelined.as_bytes()), Some((request.len(), answer(7))));
        for other in
            [request.replace("X: y", "X: z"), request.replace("X: y", "X: yy"), request[..100].to_owned()]
        {
            assert_eq!(cache.find(other.as_bytes()), None, "{other:?}");
        }
        cache.clear();
        assert_eq!(cache.find(request.as_bytes()), None);
    }

    #[test]
    fn a_long_head_is_not_remembered() {
        let mut cache = RequestCache::default();
        let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", "x".repeat(600));
        cache.insert(request.as_bytes(), request.len(), answer(7));
        assert_eq!(cache.find(request.as_bytes()), None);
        assert_eq!(cache.find(b""), None);
    }
}
