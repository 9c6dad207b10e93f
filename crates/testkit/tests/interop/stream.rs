//! Test data: the byte at each position of a stream is known, so a wrong byte is located exactly.

use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

/// Period of a stream: longer than any buffer, and no multiple of a segment size.
const PERIOD: usize = (16 << 20) + 13;

/// The two streams of a connection; they differ, so that no stream is mistaken for an echo of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// From the side that opened the connection.
    Request,
    /// From the side that accepted it.
    Response,
}

/// A SHA-256 digest.
pub type Digest256 = [u8; 32];

impl Stream {
    fn period(self) -> &'static [u8] {
        static PERIODS: [OnceLock<Vec<u8>>; 2] = [OnceLock::new(), OnceLock::new()];
        PERIODS[self as usize].get_or_init(|| {
            let mut state = 0x9e37_79b9_7f4a_7c15 ^ self as u64;
            let mut words = Vec::with_capacity(PERIOD + 8);
            while words.len() < PERIOD {
                // xorshift64
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                words.extend_from_slice(&state.to_le_bytes());
            }
            words.truncate(PERIOD);
            words
        })
    }

    /// Returns the bytes from `offset` on: at most `max`, and at least one if `max` is not 0.
    pub fn piece(self, offset: u64, max: u64) -> &'static [u8] {
        let start = (offset % PERIOD as u64) as usize;
        let len = usize::try_from(max).unwrap_or(PERIOD).min(PERIOD - start);
        &self.period()[start..start + len]
    }

    /// Returns the digest of the first `len` bytes.
    pub fn digest(self, len: u64) -> Digest256 {
        static KNOWN: Mutex<Option<HashMap<(Stream, u64), Digest256>>> = Mutex::new(None);
        let mut known = KNOWN.lock().expect("an unpoisoned lock");
        *known.get_or_insert_default().entry((self, len)).or_insert_with(|| {
            let mut hash = Sha256::new();
            let mut offset = 0;
            while offset < len {
                let piece = self.piece(offset, len - offset);
                hash.update(piece);
                offset += piece.len() as u64;
            }
            hash.finalize().into()
        })
    }
}

/// Verifies received bytes.
#[derive(Clone)]
pub struct Verifier {
    stream: Stream,
    hash: Sha256,
    received: u64,
    mismatch: Option<u64>,
}

impl Verifier {
    pub fn new(stream: Stream) -> Self {
        Self { stream, hash: Sha256::new(), received: 0, mismatch: None }
    }

    pub fn take(&mut self, mut bytes: &[u8]) {
        self.hash.update(bytes);
        while !bytes.is_empty() {
            let expected = self.stream.piece(self.received, bytes.len() as u64);
            let (now, rest) = bytes.split_at(expected.len());
            if now != expected && self.mismatch.is_none() {
                let within = now.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(0);
                self.mismatch = Some(self.received + within as u64);
            }
            self.received += now.len() as u64;
            bytes = rest;
        }
    }

    /// Returns the number of bytes received.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Returns the offset of the first byte that differs from the stream.
    pub fn mismatch(&self) -> Option<u64> {
        self.mismatch
    }

    pub fn digest(self) -> Digest256 {
        self.hash.finalize().into()
    }
}
