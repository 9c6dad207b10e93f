//! `MSG_ZEROCOPY` (Linux's `Documentation/networking/msg_zerocopy.rst`). The bytes of a call are copied
//! before it returns, so its completion is queued at once, and says that they were copied
//! (`SO_EE_CODE_ZEROCOPY_COPIED`), as Linux does over loopback.

use crate::datagram::ReceivedMessage;
use crate::fd_table::FileId;
use crate::process::ProcessState;
use crate::sockaddr::{self, Family};
use core::ffi::c_int;
use libc::POLLERR;
use rustix::io::Errno;

/// `SO_EE_ORIGIN_ZEROCOPY` and `SO_EE_CODE_ZEROCOPY_COPIED` (`<linux/errqueue.h>`).
const ORIGIN_ZEROCOPY: u8 = 5;
const CODE_COPIED: u8 = 1;

/// The calls of a socket that were to send without a copy. Linux numbers them from 0 on, and joins
/// completions of consecutive calls in the error queue, so that there is one message at the most. Each
/// process that shares a socket has calls of its own, because a completion concerns its memory alone.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ZerocopyCalls {
    /// The number of the next call.
    next: u32,
    /// The number of the first call whose completion was not taken.
    first_untaken: u32,
    /// The error queue of this process has a completion or a transmit timestamp.
    is_queued: bool,
}

impl ZerocopyCalls {
    /// Returns whether there is a completion, or a transmit timestamp.
    #[inline]
    pub fn is_queued(&self) -> bool {
        self.is_queued
    }

    /// Records whether there are transmit timestamps.
    pub fn set_has_stamps(&mut self, has_stamps: bool) {
        self.is_queued = has_stamps || self.has_completion();
    }

    fn has_completion(&self) -> bool {
        self.first_untaken != self.next
    }

    /// Records a call, which is completed.
    fn complete(&mut self) {
        self.next = self.next.wrapping_add(1);
        if !self.has_completion() {
            // All 2^32 numbers are untaken: the oldest call is forgotten.
            self.first_untaken = self.next.wrapping_add(1);
        }
        self.is_queued = true;
    }

    /// Takes the numbers of the first and of the last completed call, if there is one.
    fn take(&mut self) -> Option<(u32, u32)> {
        let range = self.has_completion().then(|| (self.first_untaken, self.next.wrapping_sub(1)));
        self.first_untaken = self.next;
        self.is_queued = false;
        range
    }
}

/// Returns `struct sock_extended_err` of the calls `first` to `last`, and an address without a family.
fn sock_extended_err((first, last): (u32, u32), family: Family) -> Vec<u8> {
    let mut out = vec![0; 4];
    out.extend([ORIGIN_ZEROCOPY, 0, CODE_COPIED, 0]);
    out.extend(first.to_ne_bytes());
    out.extend(last.to_ne_bytes());
    out.resize(out.len() + sockaddr::encode(family.unspecified(), family).bytes().len(), 0);
    out
}

impl ProcessState {
    /// Completes a call with `MSG_ZEROCOPY` that has sent something. Without `SO_ZEROCOPY` the flag has no
    /// effect.
    #[cold]
    #[inline(never)]
    pub(crate) fn complete_zerocopy(&mut self, file: FileId) {
        let Ok(socket) = self.files.socket(file) else { return };
        if socket.options.is_on("SO_ZEROCOPY") {
            socket.options.zerocopy.complete();
            self.wake(file, POLLERR);
        }
    }

    /// Takes the completion in the error queue of a socket (`MSG_ERRQUEUE`), which has no transmit
    /// timestamps.
    ///
    /// # Errors
    /// `EAGAIN` if there is none.
    pub(crate) fn recv_completion(
        &mut self,
        file: FileId,
        control_space: usize,
    ) -> Result<ReceivedMessage, Errno> {
        let socket = self.files.socket(file)?;
        let family = socket.family;
        let range = socket.options.zerocopy.take().ok_or(Errno::AGAIN)?;
        let (level, cmsg_type): (c_int, c_int) = match family {
            Family::V4 => (libc::IPPROTO_IP, libc::IP_RECVERR),
            Family::V6 => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
        };
        let mut received = ReceivedMessage::from_stream(0);
        received.flags = libc::MSG_ERRQUEUE;
        received.control_with_room(control_space).put(level, cmsg_type, &sock_extended_err(range, family));
        Ok(received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_of_consecutive_calls_are_one_range() {
        let mut calls = ZerocopyCalls::default();
        assert_eq!(calls.take(), None);
        calls.complete();
        calls.complete();
        assert_eq!((calls.take(), calls.take()), (Some((0, 1)), None));
        calls.complete();
        assert_eq!(calls.take(), Some((2, 2)));
    }

    #[test]
    fn numbers_wrap_around() {
        let mut calls = ZerocopyCalls { next: u32::MAX, first_untaken: u32::MAX, is_queued: false };
        calls.complete();
        calls.complete();
        assert_eq!(calls.take(), Some((u32::MAX, 0)));
        let mut calls = ZerocopyCalls { next: 6, first_untaken: 7, is_queued: true };
        calls.complete();
        assert_eq!(calls.take(), Some((8, 6)));
    }
}
