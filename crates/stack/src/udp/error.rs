//! Why a call on a UDP socket fails. Each names the errno that the same mistake has on Linux.

use crate::icmp::error::IcmpErrorKind;
use core::fmt;

/// Why a call on a UDP socket failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UdpError {
    /// The handle's socket is closed (`EBADF`).
    Stale,
    /// Another socket has the address and port (`EADDRINUSE`).
    AddressInUse,
    /// The address is not ours, or no port is free (`EADDRNOTAVAIL`).
    AddressNotAvailable,
    /// `udp_sockets_max` is reached (`ENFILE`).
    TooManySockets,
    /// No destination was given and the socket is not connected (`EDESTADDRREQ`).
    NoDestination,
    /// Port 0, or an address that cannot be sent to (`EINVAL`).
    InvalidAddress,
    /// The destination is of a family that the socket's address excludes (`EAFNOSUPPORT`).
    WrongFamily,
    /// A broadcast needs the socket's permission (`EACCES`).
    BroadcastForbidden,
    /// Longer than a datagram can be, or, as a pending error, than the path takes (`EMSGSIZE`).
    TooLong,
    /// No route (`ENETUNREACH`).
    NetUnreachable,
    /// The host cannot be reached (`EHOSTUNREACH`).
    HostUnreachable,
    /// Nobody has the port over there (`ECONNREFUSED`).
    ConnectionRefused,
    /// The host, or a router on the way, will not have it (`EHOSTUNREACH`).
    Unreachable,
    /// The host does not speak UDP (`ENOPROTOOPT`).
    ProtocolUnreachable,
    /// A rule on the way forbids it; so it is called for IPv6 alone (`EACCES`).
    Prohibited,
    /// Somebody did not understand our header (`EPROTO`).
    ProtocolError,
    /// The device, or a table, is full (`ENOBUFS`; blocking sockets wait).
    NoBuffers,
    /// Nothing to read (`EAGAIN`).
    WouldBlock,
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
            Self::Prohibited => "prohibited on the way",
            Self::ProtocolError => "protocol error",
            Self::NoBuffers => "no buffer space available",
            Self::WouldBlock => "nothing to read yet",
        })
    }
}

impl std::error::Error for UdpError {}

impl UdpError {
    /// What an error about a datagram over IPv4 (`v4`) or IPv6 is to its socket (`icmp_err_convert`, `icmpv6_err_convert`).
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
