//! Errors of the engine as the `errno` values of Linux.

use ginnel_stack::error::{ConnectError, ListenError, OptionError};
use ginnel_stack::events::CloseReason;
use ginnel_stack::udp::UdpError;
use rustix::io::Errno;
use std::io;

/// The pending error of a connection (`SO_ERROR`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::executor) enum SocketError {
    Reset,
    /// A reset after the peer's FIN: `EPIPE`, as in Linux's `tcp_reset`.
    Pipe,
    Refused,
    TimedOut,
    HostUnreachable,
    NetUnreachable,
    ProtocolUnreachable,
    HostDown,
    HostIsolated,
    SourceRouteFailed,
    Prohibited,
    ProtocolError,
    Aborted,
}

impl SocketError {
    /// Returns the error for the end of a connection; `None` if it ended normally.
    pub(in crate::executor) const fn from_close_reason(reason: CloseReason, after_fin: bool) -> Option<Self> {
        match reason {
            CloseReason::Normal => None,
            CloseReason::Reset if after_fin => Some(Self::Pipe),
            CloseReason::Reset => Some(Self::Reset),
            CloseReason::Refused => Some(Self::Refused),
            CloseReason::TimedOut => Some(Self::TimedOut),
            CloseReason::HostUnreachable => Some(Self::HostUnreachable),
            CloseReason::NetUnreachable => Some(Self::NetUnreachable),
            CloseReason::ProtocolUnreachable => Some(Self::ProtocolUnreachable),
            CloseReason::HostDown => Some(Self::HostDown),
            CloseReason::HostIsolated => Some(Self::HostIsolated),
            CloseReason::SourceRouteFailed => Some(Self::SourceRouteFailed),
            CloseReason::Prohibited => Some(Self::Prohibited),
            CloseReason::ProtocolError => Some(Self::ProtocolError),
            CloseReason::Aborted | CloseReason::Destroyed => Some(Self::Aborted),
        }
    }
}

impl From<SocketError> for io::Error {
    fn from(fault: SocketError) -> Self {
        Self::from(match fault {
            SocketError::Reset => Errno::CONNRESET,
            SocketError::Pipe => Errno::PIPE,
            SocketError::Refused => Errno::CONNREFUSED,
            SocketError::TimedOut => Errno::TIMEDOUT,
            SocketError::HostUnreachable => Errno::HOSTUNREACH,
            SocketError::NetUnreachable => Errno::NETUNREACH,
            SocketError::ProtocolUnreachable => Errno::NOPROTOOPT,
            SocketError::HostDown => Errno::HOSTDOWN,
            SocketError::HostIsolated => Errno::NONET,
            SocketError::SourceRouteFailed => Errno::OPNOTSUPP,
            SocketError::Prohibited => Errno::ACCESS,
            SocketError::ProtocolError => Errno::PROTO,
            SocketError::Aborted => Errno::CONNABORTED,
        })
    }
}

pub(super) fn listen(error: ListenError) -> io::Error {
    io::Error::from(match error {
        ListenError::AddressInUse => Errno::ADDRINUSE,
        ListenError::AddressNotAvailable => Errno::ADDRNOTAVAIL,
        ListenError::TooMany => Errno::NFILE,
        ListenError::InvalidOption => Errno::INVAL,
    })
}

pub(super) fn connect(error: ConnectError) -> io::Error {
    io::Error::from(match error {
        ConnectError::PortsExhausted | ConnectError::AddressNotAvailable | ConnectError::AddressInUse => {
            Errno::ADDRNOTAVAIL
        }
        ConnectError::NetUnreachable => Errno::NETUNREACH,
        ConnectError::InvalidAddress | ConnectError::InvalidOption => Errno::INVAL,
        ConnectError::TooMany => Errno::NFILE,
    })
}

pub(super) fn option(error: OptionError) -> io::Error {
    io::Error::from(match error {
        OptionError::Stale => Errno::NOTCONN,
        OptionError::Invalid => Errno::INVAL,
        OptionError::TooMany => Errno::NOBUFS,
    })
}

pub(super) fn udp(error: UdpError) -> io::Error {
    crate::errno::udp(error).into()
}

pub(super) fn destroyed() -> io::Error {
    Errno::CONNABORTED.into()
}

pub(super) fn not_connected() -> io::Error {
    Errno::NOTCONN.into()
}

pub(super) fn broken_pipe() -> io::Error {
    Errno::PIPE.into()
}

pub(super) fn message_too_long() -> io::Error {
    Errno::MSGSIZE.into()
}

pub(super) fn would_block() -> io::Error {
    Errno::AGAIN.into()
}
