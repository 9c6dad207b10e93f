//! What the engine tells its owner after a batch. No call goes upward from inside TCP: results wait here until the owner
//! takes them with [`Stack::next_event`](crate::stack::Stack::next_event).

use crate::device::RxBurst;
use crate::handle::{Conn, Listener, UdpHandle};
use crate::wire::tcp::SeqNumber;

/// Bytes of the stream that still lie in a frame of the current burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InlineData {
    /// Which frame of the burst.
    pub(crate) frame: u16,
    /// First byte within the frame.
    pub(crate) start: u32,
    /// Number of bytes.
    pub(crate) len: u32,
}

impl InlineData {
    /// Number of bytes.
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Never true for data of an event.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes, in the burst they came with.
    pub(crate) fn bytes<'a>(&self, burst: &RxBurst<'a>) -> &'a [u8] {
        let start = self.start as usize;
        &burst[usize::from(self.frame)].bytes[start..start + self.len()]
    }
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CloseReason {
    /// Both sides sent and acknowledged FIN, or the rest of the close was left to TIME_WAIT.
    Normal,
    /// The peer sent RST (`ECONNRESET`).
    Reset,
    /// The peer answered SYN with RST (`ECONNREFUSED`).
    Refused,
    /// No answer for as long as the user timeout, the retry limit or keepalive allows (`ETIMEDOUT`).
    TimedOut,
    /// ICMP said that the host cannot be reached and no answer came (`EHOSTUNREACH`).
    HostUnreachable,
    /// ICMP said that the network cannot be reached and no answer came (`ENETUNREACH`).
    NetUnreachable,
    /// ICMP said that the peer speaks no TCP (`ENOPROTOOPT`).
    ProtocolUnreachable,
    /// The application aborted it, closed it with unread data, or its listener went away.
    Aborted,
}

/// One thing that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A connection waits in the accept queue: [`Stack::accept`](crate::stack::Stack::accept).
    Incoming {
        /// Whose queue.
        listener: Listener,
    },
    /// An active open succeeded.
    Connected {
        /// Which connection.
        conn: Conn,
    },
    /// New bytes in order, still in a frame of the burst. Whoever takes the event reads
    /// [`Stack::inline_data`](crate::stack::Stack::inline_data) and then says how much it consumed with
    /// [`Stack::consume`](crate::stack::Stack::consume); the rest moves to the receive buffer.
    Data {
        /// Which connection.
        conn: Conn,
        /// Where they lie.
        data: InlineData,
    },
    /// There are bytes in the receive buffer that were not there before.
    Readable {
        /// Which connection.
        conn: Conn,
    },
    /// There is room to send again after a send that was cut short.
    Writable {
        /// Which connection.
        conn: Conn,
    },
    /// The peer acknowledged bytes of ours. Reported only if [`TcpOption::AckEvents`](crate::options::TcpOption::AckEvents) is on.
    Acked {
        /// Which connection.
        conn: Conn,
        /// How many, since the last such event.
        bytes: u32,
    },
    /// The peer announced urgent data, or the byte has come that it announced before. What follows the announcement is not shown to anybody before this is.
    Urgent {
        /// Which connection.
        conn: Conn,
        /// Sequence number of the urgent byte: [`Stack::urgent_ahead`](crate::stack::Stack::urgent_ahead) says how far ahead it is.
        at: SeqNumber,
        /// The byte itself, if it has come.
        byte: Option<u8>,
    },
    /// The peer sent FIN: after the bytes that are buffered, nothing more comes.
    PeerClosed {
        /// Which connection.
        conn: Conn,
    },
    /// The connection is over and its handle stale. Exactly one per connection that was accepted or opened.
    Closed {
        /// Which connection.
        conn: Conn,
        /// The application's token.
        token: u32,
        /// Why.
        reason: CloseReason,
    },
    /// A UDP socket has something to read, or a pending error.
    UdpReadable {
        /// Which socket.
        socket: UdpHandle,
    },
}
