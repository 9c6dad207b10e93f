//! Words of the region: the state of a socket, requests of clients, preallocated sockets and offers.

use ginnel_stack::error::ConnectError;
use ginnel_stack::events::CloseReason;

/// State bits of a socket, which the stack sets. Bits are only added while a connection lives.
pub(super) mod state {
    /// The connection is established.
    pub const CONNECTED: u32 = 1;
    /// The peer sent FIN after the received bytes.
    pub const FIN: u32 = 1 << 1;
    /// The connection is closed. The bits from `REASON_SHIFT` on say why.
    pub const CLOSED: u32 = 1 << 2;
    /// The socket is a UDP socket.
    pub const UDP: u32 = 1 << 3;
    /// The SYN waits for the first bytes, which it carries (TCP Fast Open). The bits from
    /// `SYN_DATA_MAX_SHIFT` on say how many it takes.
    pub const SYN_DEFERRED: u32 = 1 << 4;
    /// A deferred SYN was sent although nothing was written.
    pub const SYN_SENT: u32 = 1 << 5;
    /// Lowest bit of the close reason.
    pub const REASON_SHIFT: u32 = 8;
    /// Lowest bit of the number of bytes that a deferred SYN takes.
    pub const SYN_DATA_MAX_SHIFT: u32 = 16;
}

/// Requests of clients for a socket. Bits are only added while a connection lives.
pub(super) mod request {
    /// Send FIN after what was written.
    pub const SHUTDOWN: u32 = 1;
    /// Close both directions, for all owners.
    pub const CLOSE: u32 = 1 << 1;
    /// Send RST.
    pub const ABORT: u32 = 1 << 2;
    /// Bytes that still arrive will not be read.
    pub const SHUTDOWN_READ: u32 = 1 << 3;
    /// Open a connection to the peer whose address is in the socket's area. Only valid for a preallocated
    /// socket.
    pub const CONNECT: u32 = 1 << 4;
    /// Record the arrival time of datagrams.
    pub const TIMESTAMPS: u32 = 1 << 5;
}

/// The close reasons. The index of a reason is its code in the state bits.
const CLOSE_REASONS: [CloseReason; 14] = [
    CloseReason::Normal,
    CloseReason::Reset,
    CloseReason::Refused,
    CloseReason::TimedOut,
    CloseReason::HostUnreachable,
    CloseReason::NetUnreachable,
    CloseReason::ProtocolUnreachable,
    CloseReason::Aborted,
    CloseReason::Destroyed,
    CloseReason::HostDown,
    CloseReason::HostIsolated,
    CloseReason::SourceRouteFailed,
    CloseReason::Prohibited,
    CloseReason::ProtocolError,
];

/// Returns the state bits of a new connection, whose deferred SYN takes `syn_data_max` bytes.
pub(super) fn opened_bits(syn_data_max: Option<u16>) -> u32 {
    syn_data_max.map_or(0, |max| state::SYN_DEFERRED | u32::from(max) << state::SYN_DATA_MAX_SHIFT)
}

/// Returns the state bits of a connection that closed for this reason.
pub(super) fn closed_bits(reason: CloseReason) -> u32 {
    let index = CLOSE_REASONS.iter().position(|r| *r == reason).expect("the table has all reasons");
    state::CLOSED | (index as u32) << state::REASON_SHIFT
}

/// Returns why a connection closed, if it did.
pub(super) fn close_reason(bits: u32) -> Option<CloseReason> {
    let index = (bits >> state::REASON_SHIFT) as usize & (CLOSE_REASONS.len().next_power_of_two() - 1);
    // A process may have written an index that no reason has.
    (bits & state::CLOSED != 0).then(|| CLOSE_REASONS.get(index).copied().unwrap_or(CloseReason::Reset))
}

/// The errors with which a connection could not be opened. The code of an error is its index plus one.
const CONNECT_ERRORS: [ConnectError; 7] = [
    ConnectError::AddressInUse,
    ConnectError::AddressNotAvailable,
    ConnectError::InvalidAddress,
    ConnectError::InvalidOption,
    ConnectError::NetUnreachable,
    ConnectError::PortsExhausted,
    ConnectError::TooMany,
];

/// Returns the code of an error with which a connection could not be opened.
pub(super) fn connect_error_to_word(why: ConnectError) -> u32 {
    1 + CONNECT_ERRORS.iter().position(|r| *r == why).expect("the table has all errors") as u32
}

/// Returns the error of a code; `None` if the connection was opened.
pub(super) fn connect_error_from_word(word: u32) -> Option<ConnectError> {
    CONNECT_ERRORS.get((word as usize).checked_sub(1)?).copied()
}

/// A preallocated socket, as its slot encodes it. 0 is an empty slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PreallocatedSocket {
    pub socket: u32,
    pub generation: u32,
}

impl PreallocatedSocket {
    /// Bits of a socket's number: there are at most 2^24 sockets.
    const SOCKET_BITS: u32 = 24;
    const PRESENT: u64 = 1 << 63;

    pub fn to_bits(self) -> u64 {
        Self::PRESENT | u64::from(self.generation) << Self::SOCKET_BITS | u64::from(self.socket)
    }

    pub fn from_bits(bits: u64) -> Option<Self> {
        let socket = (bits & ((1 << Self::SOCKET_BITS) - 1)) as u32;
        let generation = (bits >> Self::SOCKET_BITS) as u32;
        (bits & Self::PRESENT != 0).then_some(Self { socket, generation })
    }
}

/// Content of an offer slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OfferSlot {
    /// The slot is empty.
    None,
    /// The client may accept this connection of this listener.
    Offered { listener: u16, socket: u32 },
    /// The client has accepted the connection.
    Taken { listener: u16, socket: u32 },
}

impl OfferSlot {
    pub fn to_bits(self) -> u64 {
        let bits =
            |tag: u64, listener: u16, socket: u32| tag << 48 | u64::from(listener) << 32 | u64::from(socket);
        match self {
            Self::None => 0,
            Self::Offered { listener, socket } => bits(1, listener, socket),
            Self::Taken { listener, socket } => bits(2, listener, socket),
        }
    }

    pub fn from_bits(bits: u64) -> Self {
        let (listener, socket) = ((bits >> 32) as u16, bits as u32);
        match bits >> 48 {
            1 => Self::Offered { listener, socket },
            2 => Self::Taken { listener, socket },
            _ => Self::None,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn offers_and_reasons_round_trip_through_words() {
        for offer in [
            OfferSlot::None,
            OfferSlot::Offered { listener: 63, socket: u32::MAX },
            OfferSlot::Taken { listener: 0, socket: 0 },
        ] {
            assert_eq!(OfferSlot::from_bits(offer.to_bits()), offer);
        }
        for preallocated in [
            PreallocatedSocket { socket: 0, generation: 0 },
            PreallocatedSocket { socket: (1 << 24) - 1, generation: u32::MAX },
        ] {
            assert_eq!(PreallocatedSocket::from_bits(preallocated.to_bits()), Some(preallocated));
        }
        assert_eq!(PreallocatedSocket::from_bits(0), None);
        for why in CONNECT_ERRORS {
            assert_eq!(connect_error_from_word(connect_error_to_word(why)), Some(why));
        }
        assert_eq!((connect_error_from_word(0), connect_error_from_word(99)), (None, None));
        for why in CLOSE_REASONS {
            assert_eq!(close_reason(closed_bits(why)), Some(why));
            assert_eq!(close_reason(closed_bits(why) | opened_bits(Some(u16::MAX))), Some(why));
        }
        assert_eq!(close_reason(state::CONNECTED | state::FIN), None);
    }
}
