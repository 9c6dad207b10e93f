//! Words of the region: what the stack says of a socket, what clients ask for, and what is offered to them.

use ginnel_stack::error::ConnectError;
use ginnel_stack::events::CloseReason;

/// What the stack says of a socket. Bits are only ever added while a connection lives.
pub(super) mod state {
    /// The connection is established.
    pub const CONNECTED: u32 = 1;
    /// The peer's FIN follows what was received.
    pub const FIN: u32 = 1 << 1;
    /// It is over. Why stands in the bits above.
    pub const CLOSED: u32 = 1 << 2;
    /// It is a UDP socket.
    pub const UDP: u32 = 1 << 3;
    /// Where the reason begins.
    pub const REASON_SHIFT: u32 = 8;
}

/// What clients ask for a socket. Bits are only ever added while a connection lives.
pub(super) mod request {
    /// FIN behind what is written.
    pub const SHUTDOWN: u32 = 1;
    /// Both directions are done with, for all who hold it.
    pub const CLOSE: u32 = 1 << 1;
    /// RST.
    pub const ABORT: u32 = 1 << 2;
    /// Nobody will read what is still to come.
    pub const SHUTDOWN_READ: u32 = 1 << 3;
    /// Open a connection to the peer that stands in the socket's words. Only of a socket that the client had at hand.
    pub const CONNECT: u32 = 1 << 4;
    /// Datagrams are to say when they came.
    pub const TIMESTAMPS: u32 = 1 << 5;
}

const CLOSE_REASONS: [CloseReason; 8] = [
    CloseReason::Normal,
    CloseReason::Reset,
    CloseReason::Refused,
    CloseReason::TimedOut,
    CloseReason::HostUnreachable,
    CloseReason::NetUnreachable,
    CloseReason::ProtocolUnreachable,
    CloseReason::Aborted,
];

/// The bits of a connection that ended so.
pub(super) fn closed_bits(reason: CloseReason) -> u32 {
    let place = CLOSE_REASONS.iter().position(|r| *r == reason).expect("all reasons are in the table");
    state::CLOSED | (place as u32) << state::REASON_SHIFT
}

/// Why a connection ended, if it did.
pub(super) fn close_reason(bits: u32) -> Option<CloseReason> {
    let place = (bits >> state::REASON_SHIFT) as usize & (CLOSE_REASONS.len() - 1);
    (bits & state::CLOSED != 0).then_some(CLOSE_REASONS[place])
}

const CONNECT_ERRORS: [ConnectError; 7] = [
    ConnectError::AddressInUse,
    ConnectError::AddressNotAvailable,
    ConnectError::InvalidAddress,
    ConnectError::InvalidOption,
    ConnectError::NetUnreachable,
    ConnectError::PortsExhausted,
    ConnectError::TooMany,
];

/// The word that says why a connection could not be opened.
pub(super) fn connect_error_to_word(why: ConnectError) -> u32 {
    1 + CONNECT_ERRORS.iter().position(|r| *r == why).expect("all errors are in the table") as u32
}

/// Why a connection could not be opened, if that is why it is over.
pub(super) fn connect_error_from_word(word: u32) -> Option<ConnectError> {
    CONNECT_ERRORS.get((word as usize).checked_sub(1)?).copied()
}

/// A socket that a client has at hand, as it stands in a place for such. 0 is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PreallocatedSocket {
    pub socket: u32,
    pub generation: u32,
}

impl PreallocatedSocket {
    /// Sockets are fewer than 2^24.
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

/// What stands in a place for offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OfferSlot {
    /// Nothing.
    None,
    /// The client may take this connection of this listener.
    Offered { listener: u16, socket: u32 },
    /// The client took it.
    Taken { listener: u16, socket: u32 },
}

impl OfferSlot {
    pub fn to_bits(self) -> u64 {
        let bits = |what: u64, listener: u16, socket: u32| {
            what << 48 | u64::from(listener) << 32 | u64::from(socket)
        };
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
    fn offers_and_reasons_go_through_words_and_come_back() {
        for offer in [
            OfferSlot::None,
            OfferSlot::Offered { listener: 63, socket: u32::MAX },
            OfferSlot::Taken { listener: 0, socket: 0 },
        ] {
            assert_eq!(OfferSlot::from_bits(offer.to_bits()), offer);
        }
        for blank in [
            PreallocatedSocket { socket: 0, generation: 0 },
            PreallocatedSocket { socket: (1 << 24) - 1, generation: u32::MAX },
        ] {
            assert_eq!(PreallocatedSocket::from_bits(blank.to_bits()), Some(blank));
        }
        assert_eq!(PreallocatedSocket::from_bits(0), None);
        for why in CONNECT_ERRORS {
            assert_eq!(connect_error_from_word(connect_error_to_word(why)), Some(why));
        }
        assert_eq!((connect_error_from_word(0), connect_error_from_word(99)), (None, None));
        for why in CLOSE_REASONS {
            assert_eq!(close_reason(closed_bits(why)), Some(why));
        }
        assert_eq!(close_reason(state::CONNECTED | state::FIN), None);
    }
}
