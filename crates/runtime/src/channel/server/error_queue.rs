//! Error queues of UDP sockets (`IP_RECVERR`). Their entries stay in the engine until they are taken; a bit
//! of the socket's error word says that there are some.

use super::domain::Domain;
use crate::channel::datagram::{HAS_EXTENDED_ERRORS, error_to_word};
use crate::channel::sync::Ordering;
use crate::context::Context;
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::udp::{UdpError, UdpExtendedError};

/// Most bytes of a quoted datagram that are passed on (RFC 4443 §2.4 (c)).
const QUOTE_BYTES_MAX: usize = 1280;

impl Domain {
    /// Switches the error queue of a socket on or off.
    pub(super) fn set_recverr(&mut self, socket: u32, wants: bool) {
        if let Some(queue) = &mut self.sockets[socket as usize].datagram_queue {
            queue.recverr = wants;
        }
        if !wants {
            self.region.socket(socket).error.fetch_and(!HAS_EXTENDED_ERRORS, Ordering::Relaxed);
        }
    }

    /// Returns the bit that says that there are entries, if the socket has an error queue.
    pub(super) fn extended_error_bit(&self, socket: u32) -> u32 {
        let queue = self.sockets.get(socket as usize).and_then(|entry| entry.datagram_queue.as_ref());
        if queue.is_some_and(|queue| queue.recverr) { HAS_EXTENDED_ERRORS } else { 0 }
    }

    /// Handles the result of a send request; the engine may have queued an entry for it.
    pub(super) fn record_send_result(
        &mut self,
        socket: u32,
        result: Result<(), UdpError>,
    ) -> Result<(), UdpError> {
        if result == Err(UdpError::TooLong) && self.extended_error_bit(socket) != 0 {
            self.region.socket(socket).error.fetch_or(HAS_EXTENDED_ERRORS, Ordering::Release);
            self.notify_oob_event(socket);
        }
        result
    }

    pub(super) fn take_extended_error(
        &mut self,
        cx: &mut Context<'_>,
        udp: UdpHandle,
    ) -> Result<Box<(UdpExtendedError, Vec<u8>)>, UdpError> {
        let mut quoted = vec![0; QUOTE_BYTES_MAX];
        let report = cx.udp_take_report(udp, &mut quoted)?;
        quoted.truncate(report.payload_len);
        Ok(Box::new((report, quoted)))
    }

    /// Publishes the pending error and the state of the queue after an entry was taken
    /// (`sock_dequeue_err_skb`).
    pub(super) fn publish_error_queue(
        &mut self,
        socket: u32,
        taken: &Result<Box<(UdpExtendedError, Vec<u8>)>, UdpError>,
    ) {
        let word = &self.region.socket(socket).error;
        let Ok((report, _)) = taken.as_deref() else {
            word.fetch_and(!HAS_EXTENDED_ERRORS, Ordering::Relaxed);
            return;
        };
        let more = if report.has_more { HAS_EXTENDED_ERRORS } else { 0 };
        match report.next_error {
            Some(next) => word.store(error_to_word(next) | more, Ordering::Release),
            None if report.offender.is_some() => word.store(more, Ordering::Release),
            // An entry of local origin leaves the pending error alone.
            None if more == 0 => {
                word.fetch_and(!HAS_EXTENDED_ERRORS, Ordering::Relaxed);
            }
            None => {}
        }
        if report.has_more {
            self.notify_oob_event(socket);
        }
    }
}
