//! Errors about datagrams, kept for those who ask (`IP_RECVERR`): what went wrong, who says so, and what is known of the datagram.

use super::{Udp, UdpError};
use crate::handle::UdpHandle;
use crate::icmp::extensions::Extensions;
use core::net::{IpAddr, SocketAddr};
use std::collections::VecDeque;

/// Reports that wait on a socket at the most. What comes then is only an error that is pending, as without this.
const WAITING_MAX: usize = 64;

/// One error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpReport {
    /// What it means.
    pub error: UdpError,
    /// Where the datagram was sent to. Its port is 0 if the stack itself refused a datagram of a socket without a fixed other end.
    pub to: SocketAddr,
    /// Who sent the ICMP message; `None` if it is the stack that refused the datagram.
    pub from: Option<IpAddr>,
    /// Type of the ICMP message.
    pub kind: u8,
    /// Its code.
    pub code: u8,
    /// Bytes of the largest packet that would have fitted, or which byte was not understood; else 0.
    pub info: u32,
    /// What the message says behind what it quotes (RFC 4884), which is the last of what is known of the datagram.
    pub extensions: Option<Extensions>,
    /// Bytes of the datagram that are known.
    pub len: usize,
    /// The report behind this one came with an ICMP message, of this meaning.
    pub next: Option<UdpError>,
    /// There are reports behind this one.
    pub more: bool,
}

/// A socket's reports, and what is known of the datagrams that they are about.
#[derive(Debug, Default)]
pub(super) struct Reports {
    waiting: VecDeque<UdpReport>,
    bytes: VecDeque<u8>,
}

impl Reports {
    /// Bytes of its memory.
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + self.waiting.capacity() * size_of::<UdpReport>() + self.bytes.capacity()
    }

    pub fn push(&mut self, report: UdpReport, known: &[u8]) {
        if self.waiting.len() < WAITING_MAX {
            self.waiting.push_back(UdpReport { len: known.len(), ..report });
            self.bytes.extend(known);
        }
    }

    fn pop(&mut self, out: &mut [u8]) -> Option<UdpReport> {
        let mut report = self.waiting.pop_front()?;
        let known = self.bytes.drain(..report.len);
        out.iter_mut().zip(known).for_each(|(place, byte)| *place = byte);
        report.next = self.waiting.front().filter(|next| next.from.is_some()).map(|next| next.error);
        report.more = !self.waiting.is_empty();
        Some(report)
    }
}

impl Udp {
    /// Takes the oldest report. What is known of the datagram is cut off where `out` ends.
    ///
    /// # Errors
    /// [`UdpError::WouldBlock`] if there is none, [`UdpError::Stale`].
    pub fn take_report(&mut self, handle: UdpHandle, out: &mut [u8]) -> Result<UdpReport, UdpError> {
        let reports = self.socket(handle)?.reports.as_mut();
        reports.and_then(|reports| reports.pop(out)).ok_or(UdpError::WouldBlock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(error: UdpError, from: Option<&str>) -> UdpReport {
        UdpReport {
            error,
            to: "10.0.0.2:7".parse().unwrap(),
            from: from.map(|from| from.parse().unwrap()),
            kind: 3,
            code: 3,
            info: 0,
            extensions: None,
            len: 0,
            next: None,
            more: false,
        }
    }

    #[test]
    fn they_come_in_order_with_their_bytes_and_say_what_is_next() {
        let mut reports = Reports::default();
        let refused = report(UdpError::Refused, Some("10.0.0.2"));
        let ours = report(UdpError::TooLong, None);
        reports.push(ours, b"");
        reports.push(refused, b"abcd");
        reports.push(ours, b"");
        reports.push(refused, b"ef");
        let mut out = [0; 3];
        let next = Some(UdpError::Refused);
        assert_eq!(reports.pop(&mut out), Some(UdpReport { next, more: true, ..ours }));
        assert_eq!(reports.pop(&mut out), Some(UdpReport { len: 4, more: true, ..refused }));
        assert_eq!(&out, b"abc");
        assert_eq!(reports.pop(&mut out), Some(UdpReport { next, more: true, ..ours }));
        assert_eq!(reports.pop(&mut out), Some(UdpReport { len: 2, ..refused }));
        assert_eq!(&out[..2], b"ef");
        assert_eq!(reports.pop(&mut out), None);
    }

    #[test]
    fn there_is_an_end_to_them() {
        let mut reports = Reports::default();
        (0..1000).for_each(|_| reports.push(report(UdpError::Refused, Some("10.0.0.2")), b"x"));
        assert_eq!((reports.waiting.len(), reports.bytes.len()), (WAITING_MAX, WAITING_MAX));
    }
}
