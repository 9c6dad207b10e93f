//! The error queue of a UDP socket (`IP_RECVERR`, `MSG_ERRQUEUE`): errors about its datagrams, with their
//! origin and the known part of the datagram.

use super::{Udp, UdpError};
use crate::handle::UdpHandle;
use crate::icmp::extensions::IcmpExtensions;
use core::net::{IpAddr, SocketAddr};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Largest number of queued errors per socket. Further errors only become the pending error.
const ERRORS_MAX: usize = 64;

/// A queued error, as in Linux's `sock_extended_err`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UdpExtendedError {
    /// The error code.
    pub error: UdpError,
    /// Destination of the datagram. The port is 0 if the stack itself rejected a datagram of an unconnected
    /// socket.
    pub destination: SocketAddr,
    /// Sender of the ICMP message; `None` if the stack itself rejected the datagram.
    pub offender: Option<IpAddr>,
    /// Type of the ICMP message.
    pub icmp_type: u8,
    /// Code of the ICMP message.
    pub icmp_code: u8,
    /// Bytes of the largest packet that would have fitted, or the offset of the byte that was not understood;
    /// otherwise 0.
    pub info: u32,
    /// The extensions of the ICMP message (RFC 4884), which are the last part of the known payload.
    pub extensions: Option<IcmpExtensions>,
    /// Bytes of the datagram's payload that are known.
    pub payload_len: usize,
    /// The next error in the queue, if it came with an ICMP message.
    pub next_error: Option<UdpError>,
    /// True if the queue holds more errors.
    pub has_more: bool,
}

/// The queued errors of a socket, and the known payloads of their datagrams.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct UdpErrorQueue {
    errors: VecDeque<UdpExtendedError>,
    payloads: VecDeque<u8>,
}

impl UdpErrorQueue {
    /// Returns whether the parts of a queue that was read from an image agree.
    pub fn is_valid(&self) -> bool {
        let len = self.errors.iter().try_fold(0_usize, |sum, error| sum.checked_add(error.payload_len));
        len == Some(self.payloads.len()) && self.errors.len() <= ERRORS_MAX
    }

    /// Returns the allocated memory in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.errors.capacity() * size_of::<UdpExtendedError>() + self.payloads.capacity()
    }

    pub fn push(&mut self, error: UdpExtendedError, payload: &[u8]) {
        if self.errors.len() < ERRORS_MAX {
            self.errors.push_back(UdpExtendedError { payload_len: payload.len(), ..error });
            self.payloads.extend(payload);
        }
    }

    fn pop(&mut self, out: &mut [u8]) -> Option<UdpExtendedError> {
        let mut error = self.errors.pop_front()?;
        let payload = self.payloads.drain(..error.payload_len);
        out.iter_mut().zip(payload).for_each(|(slot, byte)| *slot = byte);
        error.next_error = self.errors.front().filter(|next| next.offender.is_some()).map(|next| next.error);
        error.has_more = !self.errors.is_empty();
        Some(error)
    }
}

impl Udp {
    /// Takes the oldest queued error. The known payload is truncated to the length of `out`.
    ///
    /// # Errors
    /// [`UdpError::WouldBlock`] if the queue is empty, [`UdpError::Stale`].
    pub fn take_extended_error(
        &mut self,
        handle: UdpHandle,
        out: &mut [u8],
    ) -> Result<UdpExtendedError, UdpError> {
        let queue = self.socket(handle)?.error_queue.as_mut();
        queue.and_then(|queue| queue.pop(out)).ok_or(UdpError::WouldBlock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(error: UdpError, offender: Option<&str>) -> UdpExtendedError {
        UdpExtendedError {
            error,
            destination: "10.0.0.2:7".parse().unwrap(),
            offender: offender.map(|offender| offender.parse().unwrap()),
            icmp_type: 3,
            icmp_code: 3,
            info: 0,
            extensions: None,
            payload_len: 0,
            next_error: None,
            has_more: false,
        }
    }

    #[test]
    fn errors_are_returned_in_order_with_payloads() {
        let mut queue = UdpErrorQueue::default();
        let refused = error(UdpError::ConnectionRefused, Some("10.0.0.2"));
        let ours = error(UdpError::TooLong, None);
        queue.push(ours, b"");
        queue.push(refused, b"abcd");
        queue.push(ours, b"");
        queue.push(refused, b"ef");
        let mut out = [0; 3];
        let next = Some(UdpError::ConnectionRefused);
        assert_eq!(queue.pop(&mut out), Some(UdpExtendedError { next_error: next, has_more: true, ..ours }));
        assert_eq!(queue.pop(&mut out), Some(UdpExtendedError { payload_len: 4, has_more: true, ..refused }));
        assert_eq!(&out, b"abc");
        assert_eq!(queue.pop(&mut out), Some(UdpExtendedError { next_error: next, has_more: true, ..ours }));
        assert_eq!(queue.pop(&mut out), Some(UdpExtendedError { payload_len: 2, ..refused }));
        assert_eq!(&out[..2], b"ef");
        assert_eq!(queue.pop(&mut out), None);
    }

    #[test]
    fn error_queue_is_bounded() {
        let mut queue = UdpErrorQueue::default();
        (0..1000).for_each(|_| queue.push(error(UdpError::ConnectionRefused, Some("10.0.0.2")), b"x"));
        assert_eq!((queue.errors.len(), queue.payloads.len()), (ERRORS_MAX, ERRORS_MAX));
    }
}
