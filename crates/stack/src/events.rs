//! Events that the engine reports to its owner after a batch. TCP calls no code of the owner: results are
//! queued here until the owner takes them with [`Stack::next_event`](crate::stack::Stack::next_event).

use crate::device::RxBurst;
use crate::handle::{Conn, Listener, UdpHandle};
use crate::wire::tcp::SeqNumber;
use serde::{Deserialize, Serialize};

/// Bytes of the stream that are still in a frame of the current burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InlineData {
    /// Index of the frame in the burst.
    pub(crate) frame: u16,
    /// Offset of the first byte in the frame.
    pub(crate) start: u32,
    /// Number of bytes.
    pub(crate) len: u32,
}

impl InlineData {
    /// Returns the number of bytes.
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Always false for data of an event.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes, in the burst that they arrived with.
    pub(crate) fn bytes<'a>(&self, burst: &RxBurst<'a>) -> &'a [u8] {
        let start = self.start as usize;
        &burst[usize::from(self.frame)].bytes[start..start + self.len()]
    }
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CloseReason {
    /// Both sides have sent and acknowledged FIN, or TIME-WAIT completes the close.
    Normal,
    /// The peer sent RST (`ECONNRESET`).
    Reset,
    /// The peer answered SYN with RST (`ECONNREFUSED`).
    Refused,
    /// The peer did not answer within the user timeout, the retry limit or the limit of keepalive
    /// (`ETIMEDOUT`).
    TimedOut,
    /// ICMP reported that the host is unreachable, and no answer arrived (`EHOSTUNREACH`).
    HostUnreachable,
    /// ICMP reported that the network is unreachable, and no answer arrived (`ENETUNREACH`).
    NetUnreachable,
    /// ICMP reported that the peer does not support TCP (`ENOPROTOOPT`).
    ProtocolUnreachable,
    /// ICMP reported that the host is unknown (`EHOSTDOWN`).
    HostDown,
    /// ICMP reported that the source host is isolated (`ENONET`).
    HostIsolated,
    /// ICMP reported that a source route failed (`EOPNOTSUPP`).
    SourceRouteFailed,
    /// ICMPv6 reported that communication is prohibited (`EACCES`).
    Prohibited,
    /// ICMP reported that a header was not understood (`EPROTO`).
    ProtocolError,
    /// The application aborted the connection or closed it with unread data, or its listener was closed.
    Aborted,
    /// An administrator closed the socket (`SOCK_DESTROY`, `ECONNABORTED`).
    Destroyed,
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A connection is in the accept queue: [`Stack::accept`](crate::stack::Stack::accept).
    Incoming {
        /// The listener that received the connection.
        listener: Listener,
    },
    /// An active open has succeeded.
    Connected {
        /// The connection.
        conn: Conn,
    },
    /// New bytes in order have arrived and are still in a frame of the burst. The owner reads
    /// [`Stack::inline_data`](crate::stack::Stack::inline_data) and then calls
    /// [`Stack::consume`](crate::stack::Stack::consume) with the number of consumed bytes; the rest is moved
    /// to the receive buffer.
    Data {
        /// The connection.
        conn: Conn,
        /// Position of the bytes.
        data: InlineData,
    },
    /// New bytes are in the receive buffer.
    Readable {
        /// The connection.
        conn: Conn,
    },
    /// Bytes of high priority are available that arrived before bytes which precede them in the stream:
    /// [`Stack::recv_unordered`](crate::stack::Stack::recv_unordered). Reported only if
    /// [`TcpOption::Unordered`](crate::options::TcpOption::Unordered) is on.
    Unordered {
        /// The connection.
        conn: Conn,
    },
    /// There is room to send again after a send that was cut short.
    Writable {
        /// The connection.
        conn: Conn,
    },
    /// The peer has acknowledged bytes. Reported only if
    /// [`TcpOption::AckEvents`](crate::options::TcpOption::AckEvents) is on.
    Acked {
        /// The connection.
        conn: Conn,
        /// Number of bytes since the last such event.
        bytes: u32,
    },
    /// The peer has announced urgent data, or the announced byte has arrived. Data after the announcement
    /// cannot be read before this event is taken.
    Urgent {
        /// The connection.
        conn: Conn,
        /// Sequence number of the urgent byte: [`Stack::urgent_ahead`](crate::stack::Stack::urgent_ahead)
        /// returns its distance.
        at: SeqNumber,
        /// The byte, if it has arrived.
        byte: Option<u8>,
    },
    /// The peer has sent FIN: after the buffered bytes no data follow.
    PeerClosed {
        /// The connection.
        conn: Conn,
    },
    /// The connection has ended and its handle is stale. Exactly one is reported for each connection that was
    /// accepted or opened.
    Closed {
        /// The connection.
        conn: Conn,
        /// The application's token.
        token: u32,
        /// Why it has ended.
        reason: CloseReason,
    },
    /// A UDP socket has a datagram to read, or a pending error.
    UdpReadable {
        /// The socket.
        socket: UdpHandle,
    },
    /// An administrator has closed a listener, whose handle is stale. Only an engine in another thread
    /// reports this.
    ListenerDestroyed {
        /// The listener.
        listener: Listener,
    },
}
