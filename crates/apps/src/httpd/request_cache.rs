//! Caches recent request heads, byte for byte, with the responses to them.
//!
//! The response to a plain request for a loaded file depends on nothing but the bytes of the request, and
//! many clients (proxies, health checks, programs, load generators) repeat the same bytes. Comparing them
//! costs a tenth of parsing them.

use super::site::FileId;

/// Number of requests in the cache.
const ENTRIES: usize = 64;
/// Longest head in the cache, in bytes.
const HEAD_BYTES_MAX: usize = 512;
/// Number of leading bytes of a request that are hashed: the request line and usually the Host field.
const KEY_BYTES: usize = 64;

/// A prepared response: the file whose response is sent, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedResponse {
    /// The file.
    pub file: FileId,
    /// True if only the head of the response is sent.
    pub is_head: bool,
    /// True if the connection is closed after the response.
    pub close: bool,
}

#[derive(Debug)]
struct CachedRequest {
    /// Complete head; empty if the bucket is free.
    head: Vec<u8>,
    response: CachedResponse,
}

/// The cache.
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
    /// Returns the length of the head that `bytes` begins with and the response to it, if that head is in the
    /// cache.
    pub fn find(&self, bytes: &[u8]) -> Option<(usize, CachedResponse)> {
        let entry = &self.entries[bucket_of(bytes)];
        let is_known = !entry.head.is_empty() && bytes.starts_with(&entry.head);
        is_known.then_some((entry.head.len(), entry.response))
    }

    /// Inserts the head of `head_len` bytes that `bytes` begins with, and evicts the head in its bucket. A
    /// head of more than 512 bytes is not inserted. `bytes` must be the argument of the preceding
    /// [`RequestCache::find`].
    pub fn insert(&mut self, bytes: &[u8], head_len: usize, response: CachedResponse) {
        if head_len <= HEAD_BYTES_MAX {
            let entry = &mut self.entries[bucket_of(bytes)];
            entry.head.clear();
            entry.head.extend_from_slice(&bytes[..head_len]);
            entry.response = response;
        }
    }

    /// Removes all entries, because the responses have changed.
    pub fn clear(&mut self) {
        self.entries.iter_mut().for_each(|e| e.head.clear());
    }
}

/// Returns the index of the bucket for a request. The hash need not be unpredictable: a client that fills
/// buckets only costs others the parsing of their requests.
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
    fn only_an_identical_head_is_found() {
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
    fn a_long_head_is_not_cached() {
        let mut cache = RequestCache::default();
        let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", "x".repeat(600));
        cache.insert(request.as_bytes(), request.len(), answer(7));
        assert_eq!(cache.find(request.as_bytes()), None);
        assert_eq!(cache.find(b""), None);
    }
}
