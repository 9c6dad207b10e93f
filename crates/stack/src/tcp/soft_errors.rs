//! The meaning of ICMP errors for connections (RFC 1122 §4.2.3.9, RFC 5461), by the tables of Linux
//! (`icmp_err_convert`, `icmpv6_err_convert`).

use crate::events::CloseReason;
use crate::icmp::error::{IcmpErrorKind, TransportError};
use crate::wire::{icmpv4, icmpv6};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum number of remembered errors. A further one evicts the error of the lowest index, whose connection
/// then counts as having met "host unreachable".
const ERRORS_MAX: usize = 1024;

/// The last soft error of the few connections that have one, by index and generation.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct SoftErrors(BTreeMap<u32, (u32, CloseReason)>);

impl SoftErrors {
    /// Records the error of a connection. Replaces one of an earlier connection with this index.
    pub fn record(&mut self, idx: u32, generation: u32, reason: CloseReason) {
        if self.0.len() >= ERRORS_MAX && !self.0.contains_key(&idx) {
            // Entries of connections that have ended are still in the table.
            self.0.pop_first();
        }
        self.0.insert(idx, (generation, reason));
    }

    /// Returns the recorded error of a connection that had one.
    pub fn get(&self, idx: u32, generation: u32) -> CloseReason {
        match self.0.get(&idx) {
            Some(&(of, reason)) if of == generation => reason,
            _ => CloseReason::HostUnreachable,
        }
    }
}

/// Returns the reason for which a connection ends if this error ends it.
pub(super) fn icmp_close_reason(error: &TransportError) -> CloseReason {
    let (is_v4, icmp_type, code) = (error.remote.is_ipv4(), error.origin.icmp_type, error.origin.icmp_code);
    match (error.kind, is_v4) {
        (_, true) if icmp_type == icmpv4::UNREACHABLE => match code {
            0 | 6 | 9 | 11 => CloseReason::NetUnreachable,
            2 => CloseReason::ProtocolUnreachable,
            3 => CloseReason::Refused,
            5 => CloseReason::SourceRouteFailed,
            7 => CloseReason::HostDown,
            8 => CloseReason::HostIsolated,
            _ => CloseReason::HostUnreachable,
        },
        (IcmpErrorKind::ParameterProblem | IcmpErrorKind::ProtocolUnreachable, _) => {
            CloseReason::ProtocolError
        }
        (_, false) if icmp_type == icmpv6::UNREACHABLE => match code {
            0 => CloseReason::NetUnreachable,
            1 | 5 | 6 => CloseReason::Prohibited,
            2 | 3 => CloseReason::HostUnreachable,
            4 => CloseReason::Refused,
            _ => CloseReason::ProtocolError,
        },
        _ => CloseReason::HostUnreachable,
    }
}

/// Returns whether an error ends a connection that a listener has not completed (`tcp_v4_err`, `tcp_v6_err`).
pub(super) fn ends_request(error: &TransportError) -> bool {
    let (icmp_type, code) = (error.origin.icmp_type, error.origin.icmp_code);
    if error.remote.is_ipv4() {
        let is_unreachable = icmp_type == icmpv4::UNREACHABLE && code <= 1;
        is_unreachable || matches!(error.kind, IcmpErrorKind::TimeExceeded | IcmpErrorKind::ParameterProblem)
    } else {
        icmp_type == icmpv6::UNREACHABLE && matches!(code, 1 | 4..)
            || matches!(error.kind, IcmpErrorKind::ParameterProblem | IcmpErrorKind::ProtocolUnreachable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::icmp::error::IcmpErrorOrigin;

    fn error(remote: &str, kind: IcmpErrorKind, icmp_type: u8, icmp_code: u8) -> TransportError {
        let address: core::net::IpAddr = remote.parse().unwrap();
        let origin = IcmpErrorOrigin {
            offender: address,
            icmp_type,
            icmp_code,
            info: 0,
            extensions: None,
            hop_limit: 64,
        };
        let at = core::net::SocketAddr::new(address, 80);
        TransportError { protocol: 6, local: at, remote: at, seq: None, kind, hop_limit: 64, origin }
    }

    #[test]
    fn codes_have_the_errors_of_linux() {
        use CloseReason as R;
        let v4 = [
            R::NetUnreachable,
            R::HostUnreachable,
            R::ProtocolUnreachable,
            R::Refused,
            R::HostUnreachable,
            R::SourceRouteFailed,
            R::NetUnreachable,
            R::HostDown,
            R::HostIsolated,
            R::NetUnreachable,
            R::HostUnreachable,
            R::NetUnreachable,
            R::HostUnreachable,
            R::HostUnreachable,
            R::HostUnreachable,
            R::HostUnreachable,
        ];
        let v6 = [
            R::NetUnreachable,
            R::Prohibited,
            R::HostUnreachable,
            R::HostUnreachable,
            R::Refused,
            R::Prohibited,
            R::Prohibited,
            R::ProtocolError,
        ];
        // The kind does not matter for messages of the type "destination unreachable".
        let kind = IcmpErrorKind::HostUnreachable;
        for (code, expected) in (0..).zip(v4) {
            assert_eq!(icmp_close_reason(&error("10.0.0.2", kind, 3, code)), expected, "code {code}");
        }
        for (code, expected) in (0..).zip(v6) {
            assert_eq!(icmp_close_reason(&error("2001:db8::2", kind, 1, code)), expected, "code {code}");
        }
        let problem = IcmpErrorKind::ParameterProblem;
        assert_eq!(icmp_close_reason(&error("10.0.0.2", problem, 12, 0)), R::ProtocolError);
        let exceeded = IcmpErrorKind::TimeExceeded;
        assert_eq!(icmp_close_reason(&error("10.0.0.2", exceeded, 11, 0)), R::HostUnreachable);
    }

    #[test]
    fn soft_errors_are_kept_for_their_connection() {
        let mut errors = SoftErrors::default();
        for idx in 0..ERRORS_MAX as u32 + 1 {
            errors.record(idx, 7, CloseReason::HostDown);
        }
        assert_eq!(errors.0.len(), ERRORS_MAX);
        assert_eq!(errors.get(0, 7), CloseReason::HostUnreachable, "dropped for another");
        assert_eq!(errors.get(1, 7), CloseReason::HostDown);
        assert_eq!(errors.get(1, 8), CloseReason::HostUnreachable, "of an earlier connection");
    }
}
