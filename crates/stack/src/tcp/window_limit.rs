//! Limits of receive windows while received frames wait for the application's CPU.
//!
//! Windows follow the memory of receive buffers, which is free while the processor is what is short. Under
//! overload the owner of the stack limits the windows of a class of priority, so that peers wait instead of
//! sending what this host would have to drop. Linux does likewise when memory is short
//! (`tcp_under_memory_pressure`).

use super::conn::Tcb;
use crate::priority::{BEST_EFFORT, CLASSES};

/// Segments that a window admits despite its limit. One would wait for the peer's delayed segments (RFC 9293
/// §3.8.6.2.1) and for delayed acknowledgements.
const SEGMENTS_MIN: u32 = 2;

/// The limit of each class of priority in bytes. `u32::MAX` stands for none.
#[derive(Debug)]
pub(crate) struct WindowLimits {
    by_class: [u32; CLASSES],
    /// The limit of the class that is transmitting.
    current: u32,
}

impl Default for WindowLimits {
    fn default() -> Self {
        Self { by_class: [u32::MAX; CLASSES], current: u32::MAX }
    }
}

impl WindowLimits {
    /// Limits the windows that connections of a class offer from now on.
    pub fn set(&mut self, class: u8, bytes: u32) {
        self.by_class[usize::from(class)] = bytes;
        self.select(BEST_EFFORT);
    }

    /// Chooses the class whose connections send next.
    pub fn select(&mut self, class: u8) {
        self.current = self.by_class[usize::from(class)];
    }

    /// Returns the window that a connection offers, which has room for `window` bytes.
    #[inline(always)]
    pub fn limit(&self, c: &Tcb, window: u32) -> u32 {
        if window > self.current { self.reduce(c, window) } else { window }
    }

    /// The right edge of the window does not move back (RFC 9293 §3.8.6).
    #[cold]
    fn reduce(&self, c: &Tcb, window: u32) -> u32 {
        window.min(self.current.max(SEGMENTS_MIN * u32::from(c.rcv_mss))).max(c.rcv_wnd())
    }
}
