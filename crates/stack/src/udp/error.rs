//! Errors of calls on UDP sockets. Each variant names the errno that Linux returns in this case.

use crate::icmp::error::IcmpErrorKind;
use core::fmt;
use serde::{Deserialize, Serialize};

/// Why a call on a UDP socket failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum UdpError {
    /// The socket of the handle is closed (`EBADF`).
    Stale,
    /// Another socket has the address and port (`EADDRINUSE`).
    AddressInUse,
    /// The address is not a local one, or no ephemeral port is free (`EADDRNOTAVAIL`).
    AddressNotAvailable,
    /// `udp_sockets_max` is reached (`ENFILE`).
    TooManySockets,
    /// No destination was given and the socket is not connected (`EDESTADDRREQ`).
    NoDestination,
    /// The port is 0, or packets cannot be sent to the address (`EINVAL`).
    InvalidAddress,
    /// The address family of the destination does not match the socket (`EAFNOSUPPORT`).
    WrongFamily,
    /// The socket may not send to broadcast addresses (`EACCES`).
    BroadcastForbidden,
    /// The datagram exceeds the longest possible datagram or, as a pending error, the path MTU (`EMSGSIZE`).
    TooLong,
    /// There is no route (`ENETUNREACH`).
    NetUnreachable,
    /// The host cannot be reached (`EHOSTUNREACH`).
    HostUnreachable,
    /// No socket of the remote host has the port (`ECONNREFUSED`).
    ConnectionRefused,
    /// The host, or a router on the path, rejects the datagram (`EHOSTUNREACH`).
    Unreachable,
    /// The host does not support UDP (`ENOPROTOOPT`).
    ProtocolUnreachable,
    /// Communication is administratively prohibited; used for IPv6 only (`EACCES`).
    Prohibited,
    /// The host, or a router on the path, did not understand the header (`EPROTO`).
    ProtocolError,
    /// A table is full (`ENOBUFS`).
    NoBuffers,
    /// The device has no room, or none for this priority. Nothing was sent (`ENOBUFS`; a caller that can wait
    /// tries again).
    DeviceFull,
    /// There is nothing to read (`EAGAIN`).
    WouldBlock,
    /// An administrator closed the socket (`SOCK_DESTROY`, `ECONNABORTED`).
    Destroyed,
}

impl fmt::Display for UdpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stale => "stale socket handle",
            Self::AddressInUse => "address already in use",
            Self::AddressNotAvailable => "cannot assign requested address",
            Self::TooManySockets => "too many sockets",
            Self::NoDestination => "destination address required",
            Self::InvalidAddress => "invalid destination address",
            Self::WrongFamily => "address family not supported by the socket",
            Self::BroadcastForbidden => "broadcast not permitted",
            Self::TooLong => "message too long",
            Self::NetUnreachable => "network is unreachable",
            Self::HostUnreachable => "no route to host",
            Self::ConnectionRefused => "connection refused",
            Self::Unreachable => "destination unreachable",
            Self::ProtocolUnreachable => "protocol not available",
            Self::Prohibited => "administratively prohibited",
            Self::ProtocolError => "protocol error",
            Self::NoBuffers => "no buffer space available",
            Self::DeviceFull => "the device is full",
            Self::WouldBlock => "nothing to read yet",
            Self::Destroyed => "closed by an administrator",
        })
    }
}

impl std::error::Error for UdpError {}

impl UdpError {
    /// Maps an ICMP error about a datagram over IPv4 (`v4`) or IPv6 to the error of its socket (Linux's
    /// `icmp_err_convert`, `icmpv6_err_convert`).
    pub(super) fn from_icmp(kind: IcmpErrorKind, v4: bool) -> Self {
        match kind {
            IcmpErrorKind::NetUnreachable => Self::NetUnreachable,
            IcmpErrorKind::HostUnreachable | IcmpErrorKind::TimeExceeded => Self::HostUnreachable,
            IcmpErrorKind::PortUnreachable => Self::ConnectionRefused,
            IcmpErrorKind::PacketTooBig { .. } => Self::TooLong,
            IcmpErrorKind::ProtocolUnreachable => Self::ProtocolUnreachable,
            IcmpErrorKind::Prohibited if !v4 => Self::Prohibited,
            IcmpErrorKind::Prohibited | IcmpErrorKind::Unreachable => Self::Unreachable,
            IcmpErrorKind::ParameterProblem => Self::ProtocolError,
        }
    }
}
