//! Messages of DPDK: they become debug messages of this process, and the last ones explain errors.
#![allow(unsafe_code)] // text of C

use core::ffi::c_char;
use std::sync::{Mutex, PoisonError};

/// Bytes of the end of the log that are kept.
const TAIL_BYTES: usize = 4096;

/// The end of the log since it was cleared.
static TAIL: Mutex<String> = Mutex::new(String::new());

/// Receives what DPDK logs, in any thread.
pub(super) extern "C" fn sink(text: *const c_char, len: usize) {
    // SAFETY: DPDK passes `len` bytes that live until this function returns.
    let bytes = unsafe { core::slice::from_raw_parts(text.cast::<u8>(), len) };
    let text = String::from_utf8_lossy(bytes);
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        tracing::debug!(target: "dpdk", "{}", line.trim());
    }
    let mut tail = TAIL.lock().unwrap_or_else(PoisonError::into_inner);
    tail.push_str(&text);
    if tail.len() > TAIL_BYTES {
        let from = (tail.len() - TAIL_BYTES..).find(|&at| tail.is_char_boundary(at)).unwrap_or(0);
        tail.drain(..from);
    }
}

/// Forgets what was logged.
pub(super) fn clear() {
    take();
}

/// Returns what was logged since the last call.
pub(super) fn take() -> String {
    core::mem::take(&mut TAIL.lock().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_of_the_log_is_kept() {
        clear();
        for number in 0..2000 {
            let line = format!("line {number} ä\n");
            sink(line.as_ptr().cast(), line.len());
        }
        let text = take();
        assert!(text.len() <= TAIL_BYTES && text.ends_with("line 1999 ä\n"), "{text}");
        assert_eq!(take(), "");
    }
}
