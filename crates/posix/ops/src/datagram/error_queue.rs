//! The error queue of UDP sockets (`MSG_ERRQUEUE`), in the layout of `ip_recv_error` and `ipv6_recv_error`.

use super::ancillary::ReceivedMessage;
use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::process::ProcessState;
use crate::sockaddr::{self, Family};
use crate::user_memory::{UserSliceMut, efault};
use core::ffi::c_int;
use core::net::SocketAddr;
use ginnel::channel::scatter;
use ginnel::{UdpExtendedError, errno};
use rustix::io::Errno;

/// Bytes of `struct sock_extended_err`.
const EXTENDED_BYTES: usize = 16;
/// Origins of errors (`<linux/errqueue.h>`).
const ORIGIN_LOCAL: u8 = 1;
const ORIGIN_ICMP: u8 = 2;
const ORIGIN_ICMP6: u8 = 3;
/// Types of ICMP messages (RFC 792, RFC 4443).
const UNREACHABLE: u8 = 3;
const UNREACHABLE_V6: u8 = 1;

/// Returns the error number of `icmp_err_convert` and `icmpv6_err_convert`. For some codes it is more
/// specific than the socket's error.
fn errno_of(report: &UdpExtendedError) -> Errno {
    match (report.offender.map(|from| from.is_ipv4()), report.icmp_type, report.icmp_code) {
        (Some(true), UNREACHABLE, 5) => Errno::OPNOTSUPP,
        (Some(true), UNREACHABLE, 6 | 9) => Errno::NETUNREACH,
        (Some(true), UNREACHABLE, 7) => Errno::HOSTDOWN,
        (Some(true), UNREACHABLE, 8) => Errno::NONET,
        (Some(false), UNREACHABLE_V6, 7..) => Errno::PROTO,
        _ => errno::udp(report.error),
    }
}

/// `SO_EE_RFC4884_FLAG_INVALID`.
const RFC4884_FLAG_INVALID: u8 = 1;

/// Returns `struct sock_extended_err`, followed by the address of the node that reported the error.
/// `has_rfc4884` adds the offset of ICMP extensions (`struct sock_ee_data_rfc4884`).
fn sock_extended_err(report: &UdpExtendedError, family: Family, has_rfc4884: bool) -> Vec<u8> {
    let origin = match report.offender.map(|from| from.is_ipv4()) {
        None => ORIGIN_LOCAL,
        Some(true) => ORIGIN_ICMP,
        Some(false) => ORIGIN_ICMP6,
    };
    let mut out = Vec::with_capacity(EXTENDED_BYTES + 28);
    out.extend(errno_of(report).raw_os_error().to_ne_bytes());
    out.extend([origin, report.icmp_type, report.icmp_code, 0]);
    out.extend(report.info.to_ne_bytes());
    let extensions = report.extensions.filter(|_| has_rfc4884);
    out.extend(extensions.map_or(0, |extensions| extensions.offset).to_ne_bytes());
    out.extend([extensions.map_or(0, |e| if e.is_invalid { RFC4884_FLAG_INVALID } else { 0 }), 0]);
    match report.offender {
        Some(from) => out.extend(sockaddr::encode(SocketAddr::new(from, 0), family).bytes()),
        None => out.resize(out.len() + sockaddr::encode(family.unspecified(), family).bytes().len(), 0),
    }
    out
}

impl ProcessState {
    /// Takes the oldest error: the known part of the datagram, its destination, and the error. Returns
    /// `EAGAIN` if there is none.
    pub(super) fn recv_error(
        &mut self,
        file: FileId,
        buffers: &mut [UserSliceMut<'_>],
        control_space: usize,
    ) -> Result<ReceivedMessage, Errno> {
        let socket = self.files.socket(file)?;
        let family = socket.family;
        let SocketRole::Udp(udp) = socket.role else { return Err(Errno::AGAIN) };
        if !self.client.udp_has_extended_errors(udp.conn) {
            return Err(Errno::AGAIN);
        }
        let has_rfc4884 = |name| socket.options.is_on(name);
        let (has_rfc4884_v4, has_rfc4884_v6) =
            (has_rfc4884("IP_RECVERR_RFC4884"), has_rfc4884("IPV6_RECVERR_RFC4884"));
        let (report, payload) = *self.client.udp_take_extended_error(udp.conn).map_err(|_| Errno::AGAIN)?;
        let count = scatter(&payload, buffers).map_err(efault)?;
        let mut received = ReceivedMessage::from_stream(count);
        received.from = Some(sockaddr::encode(report.destination, family));
        received.flags = libc::MSG_ERRQUEUE | if count == payload.len() { 0 } else { libc::MSG_TRUNC };
        let has_rfc4884 =
            if report.offender.is_some_and(|from| from.is_ipv4()) { has_rfc4884_v4 } else { has_rfc4884_v6 };
        let (level, cmsg_type): (c_int, c_int) = match family {
            Family::V4 => (libc::IPPROTO_IP, libc::IP_RECVERR),
            Family::V6 => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
        };
        received.control_with_room(control_space).put(
            level,
            cmsg_type,
            &sock_extended_err(&report, family, has_rfc4884),
        );
        Ok(received)
    }

    /// Returns whether a datagram must be sent synchronously, so that the program learns at once if it is too
    /// long, or when it was sent.
    pub(super) fn must_be_synchronous(&mut self, file: FileId, bytes: usize) -> bool {
        let udp_send = self.files.socket(file).ok().and_then(|socket| socket.udp_send.as_ref());
        udp_send.is_some_and(|udp_send| udp_send.checks_sends && udp_send.needs_request(bytes))
    }

    /// Records that a datagram of this length was sent.
    pub(super) fn note_sent_length(&mut self, file: FileId, bytes: usize) {
        if let Ok(socket) = self.files.socket(file) {
            let longest = &mut socket.udp_send.get_or_insert_default().longest_sent;
            *longest = bytes.max(*longest);
        }
    }
}
