//! Maps errors to the error numbers of Linux.

use crate::socket_filter::FilterError;
use ginnel_stack::events::CloseReason;
use ginnel_stack::udp::UdpError;
use rustix::io::Errno;

/// Returns the error number with which a call on a UDP socket fails on Linux.
pub fn udp(error: UdpError) -> Errno {
    match error {
        UdpError::Stale => Errno::BADF,
        UdpError::AddressInUse => Errno::ADDRINUSE,
        UdpError::AddressNotAvailable => Errno::ADDRNOTAVAIL,
        UdpError::TooManySockets => Errno::NFILE,
        UdpError::NoDestination => Errno::DESTADDRREQ,
        UdpError::InvalidAddress => Errno::INVAL,
        UdpError::WrongFamily => Errno::AFNOSUPPORT,
        UdpError::BroadcastForbidden | UdpError::Prohibited => Errno::ACCESS,
        UdpError::TooLong => Errno::MSGSIZE,
        UdpError::NetUnreachable => Errno::NETUNREACH,
        UdpError::HostUnreachable | UdpError::Unreachable => Errno::HOSTUNREACH,
        UdpError::ProtocolUnreachable => Errno::NOPROTOOPT,
        UdpError::ProtocolError => Errno::PROTO,
        UdpError::ConnectionRefused => Errno::CONNREFUSED,
        UdpError::NoBuffers | UdpError::DeviceFull => Errno::NOBUFS,
        UdpError::WouldBlock => Errno::AGAIN,
        UdpError::Destroyed => Errno::CONNABORTED,
    }
}

/// Returns the error number with which `SO_ATTACH_FILTER` fails on Linux; `ENETDOWN` if the stack does not
/// have the socket any more.
pub fn filter(error: FilterError) -> Errno {
    match error {
        FilterError::Stale => Errno::NETDOWN,
        FilterError::Invalid => Errno::INVAL,
        FilterError::NoMemory => Errno::NOMEM,
    }
}

/// Returns the error number with which Linux reports the end of a connection (`tcp_reset`, `tcp_write_err`);
/// `None` if this side ended it, or both sides closed it.
pub fn of_close(reason: CloseReason) -> Option<Errno> {
    Some(match reason {
        CloseReason::Normal | CloseReason::Aborted => return None,
        CloseReason::Reset => Errno::CONNRESET,
        CloseReason::Refused => Errno::CONNREFUSED,
        CloseReason::TimedOut => Errno::TIMEDOUT,
        CloseReason::HostUnreachable => Errno::HOSTUNREACH,
        CloseReason::NetUnreachable => Errno::NETUNREACH,
        CloseReason::ProtocolUnreachable => Errno::NOPROTOOPT,
        CloseReason::HostDown => Errno::HOSTDOWN,
        CloseReason::HostIsolated => Errno::NONET,
        CloseReason::SourceRouteFailed => Errno::OPNOTSUPP,
        CloseReason::Prohibited => Errno::ACCESS,
        CloseReason::ProtocolError => Errno::PROTO,
        CloseReason::Destroyed => Errno::CONNABORTED,
    })
}

/// Returns the error number of a failed system call; `ENOMEM` for an error that is not from the kernel.
pub fn of_io(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::NOMEM)
}
