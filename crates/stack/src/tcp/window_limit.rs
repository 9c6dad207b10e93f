//! Limits of receive windows while received frames wait for the application's CPU.
//!
//! Windows follow the free memory of receive buffers, which says nothing if CPU time is the scarce resource.
//! Under CPU overload the runtime limits the windows of a priority class, so that peers wait instead of
//! sending what this host would have to drop. Linux limits windows when memory is scarce
//! (`tcp_under_memory_pressure`).

use super::conn::Tcb;
use crate::priority::{BEST_EFFORT, CLASSES, COMPILED};

/// Segments that a window admits despite its limit. With room for one, the peer's avoidance of silly windows
/// (RFC 9293 §3.8.6.2.1) and delayed acknowledgements would stall the connection.
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

    /// Selects the class whose connections send next. Before the first call, and after
    /// [`WindowLimits::set`], the limit of best effort applies.
    pub fn select(&mut self, class: u8) {
        self.current = self.by_class[usize::from(class)];
    }

    /// Returns the window in bytes that a connection with room for `window` bytes offers.
    #[inline(always)]
    pub fn limit(&self, c: &Tcb, window: u32) -> u32 {
        if COMPILED && window > self.current { self.reduce(c, window) } else { window }
    }

    /// Returns the limited window. Its right edge does not move back (RFC 9293 §3.8.6).
    #[cold]
    fn reduce(&self, c: &Tcb, window: u32) -> u32 {
        window.min(self.current.max(SEGMENTS_MIN * u32::from(c.rcv_mss))).max(c.rcv_wnd())
    }
}
