//! The destination of a datagram, and the checks up to it in the order of `udp_sendmsg` and `udpv6_sendmsg`.

use super::DATAGRAM_BYTES_MAX;
use crate::file::Socket;
use crate::sockaddr::{self, Family};
use core::ffi::c_int;
use core::net::SocketAddr;
use rustix::io::Errno;

/// The destination as the program named it.
enum Named<'a> {
    /// No address: the connected peer is the destination.
    Nothing,
    /// A `struct sockaddr_in`, which is not checked yet.
    V4(&'a [u8]),
    /// An address of an IPv6 socket; one that is IPv4-mapped is decoded as IPv4.
    V6(SocketAddr),
}

impl Socket {
    /// Checks the length of a write and its flags, and returns the destination that the program named, `None`
    /// for the connected peer. A write to a datagram under construction, which has its destination, gets
    /// `None`, too.
    ///
    /// # Errors
    /// `EINVAL`, `EAFNOSUPPORT` for an invalid address, `EDESTADDRREQ` without one, `ENETUNREACH` for IPv4 on
    /// a socket with `IPV6_V6ONLY`; over IPv4 also `EMSGSIZE`, `EOPNOTSUPP` for `MSG_OOB`.
    pub(super) fn check_destination(
        &self,
        to: Option<&[u8]>,
        flags: c_int,
        len: usize,
    ) -> Result<Option<SocketAddr>, Errno> {
        let corked = self.udp_send.as_ref().and_then(|udp_send| udp_send.corked.as_ref());
        let corked_v4 = corked.map(|corked| corked.is_ipv4());
        let peer = self.connected_peer();
        let named = match (self.family, to) {
            (_, None) => Named::Nothing,
            (Family::V4, Some(bytes)) => Named::V4(bytes),
            (Family::V6, Some(bytes)) => named_on_v6(bytes)?,
        };
        let v4 = match named {
            Named::V4(_) => true,
            Named::V6(to) => to.is_ipv4(),
            Named::Nothing if self.family == Family::V4 => true,
            Named::Nothing => match corked_v4 {
                Some(corked_v4) => corked_v4,
                None => peer.ok_or(Errno::DESTADDRREQ)?.is_ipv4(),
            },
        };
        if v4 {
            if self.family == Family::V6 && self.options.is_v6_only() {
                return Err(Errno::NETUNREACH);
            }
            if len > DATAGRAM_BYTES_MAX {
                return Err(Errno::MSGSIZE);
            }
            // Linux ignores the flag for IPv6.
            if flags & libc::MSG_OOB != 0 {
                return Err(Errno::OPNOTSUPP);
            }
        }
        if let Some(corked_v4) = corked_v4 {
            return if v4 && !corked_v4 { Err(Errno::INVAL) } else { Ok(None) };
        }
        let to = match named {
            Named::Nothing if peer.is_none() => return Err(Errno::DESTADDRREQ),
            Named::Nothing => return Ok(None),
            Named::V4(bytes) => decode_v4(bytes)?,
            Named::V6(to) => to,
        };
        if to.port() == 0 {
            return Err(Errno::INVAL);
        }
        // The unspecified address means loopback, as for `connect`.
        Ok(Some(crate::connect::loopback_for_any(to, None)))
    }
}

/// Reads an address for an IPv6 socket, on which the family `AF_UNSPEC` stands for no address.
fn named_on_v6(bytes: &[u8]) -> Result<Named<'_>, Errno> {
    match sockaddr::family_of(bytes)?.into() {
        libc::AF_INET6 => sockaddr::decode(bytes, Family::V6).map(Named::V6),
        libc::AF_INET => Ok(Named::V4(bytes)),
        libc::AF_UNSPEC => Ok(Named::Nothing),
        _ => Err(Errno::INVAL),
    }
}

/// Decodes a `struct sockaddr_in`, whose family old programs leave 0.
fn decode_v4(bytes: &[u8]) -> Result<SocketAddr, Errno> {
    if sockaddr::family_of(bytes)? != libc::AF_UNSPEC as u16 {
        return sockaddr::decode(bytes, Family::V4);
    }
    let mut copy = *bytes.first_chunk::<16>().ok_or(Errno::INVAL)?;
    copy[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    sockaddr::decode(&copy, Family::V4)
}
