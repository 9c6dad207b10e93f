//! Reports of errors about datagrams, for those who ask (`IP_RECVERR`). They stay in the engine until they are taken; the socket's word says that there are
//! some.

use super::domain::Domain;
use crate::channel::datagram::{REPORTS, word_of};
use crate::channel::sync::Ordering;
use crate::context::Context;
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::udp::{UdpError, UdpReport};

/// Most bytes that an ICMP message quotes of a datagram that are handed out (RFC 4443 §2.4 (c)).
const KNOWN_BYTES_MAX: usize = 1280;

impl Domain {
    /// The clients of a socket want reports, or no more.
    pub(super) fn wants_reports(&mut self, socket: u32, wants: bool) {
        if let Some(post) = &mut self.sockets[socket as usize].post {
            post.reports = wants;
        }
        if !wants {
            self.region.socket(socket).error.fetch_and(!REPORTS, Ordering::Relaxed);
        }
    }

    /// The bit that says that there are reports, if a socket has got an error and keeps them.
    pub(super) fn reports_bit(&self, socket: u32) -> u32 {
        let post = self.sockets.get(socket as usize).and_then(|known| known.post.as_ref());
        if post.is_some_and(|post| post.reports) { REPORTS } else { 0 }
    }

    /// What came of a datagram, which is answered; the stack may have left a report of it.
    pub(super) fn sent(&mut self, socket: u32, result: Result<(), UdpError>) -> Result<(), UdpError> {
        if result == Err(UdpError::TooLong) && self.reports_bit(socket) != 0 {
            self.region.socket(socket).error.fetch_or(REPORTS, Ordering::Release);
            self.notice(socket);
        }
        result
    }

    pub(super) fn report(
        &mut self,
        cx: &mut Context<'_>,
        udp: UdpHandle,
    ) -> Result<Box<(UdpReport, Vec<u8>)>, UdpError> {
        let mut known = vec![0; KNOWN_BYTES_MAX];
        let report = cx.udp_take_report(udp, &mut known)?;
        known.truncate(report.len);
        Ok(Box::new((report, known)))
    }

    /// A report was taken, or there was none: what is pending now (`sock_dequeue_err_skb`).
    pub(super) fn note_reports(&mut self, socket: u32, taken: &Result<Box<(UdpReport, Vec<u8>)>, UdpError>) {
        let word = &self.region.socket(socket).error;
        let Ok((report, _)) = taken.as_deref() else {
            word.fetch_and(!REPORTS, Ordering::Relaxed);
            return;
        };
        let more = if report.more { REPORTS } else { 0 };
        match report.next {
            Some(next) => word.store(word_of(next) | more, Ordering::Release),
            None if report.from.is_some() => word.store(more, Ordering::Release),
            // A report of the stack's own leaves alone what is pending.
            None if more == 0 => {
                word.fetch_and(!REPORTS, Ordering::Relaxed);
            }
            None => {}
        }
        if report.more {
            self.notice(socket);
        }
    }
}
