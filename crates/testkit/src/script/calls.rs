//! Typed socket calls of scripts.

use super::names::{Errno, MsgFlags, PollEvents, ShutdownHow, SockOpt, SocketIoctl};

/// File descriptor as numbered in the script; each backend maps it to a socket.
pub type Fd = i32;

/// A socket call with its expected result.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The call and its arguments.
    pub op: Op,
    /// Source text for messages.
    pub text: String,
    /// Expected result.
    pub expect: ExpectedReturn,
}

/// Expected return value of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedReturn {
    /// The value; `None` is `*`.
    pub value: Option<i64>,
    /// The error if the value is -1.
    pub errno: Option<Errno>,
}

/// A socket call with its arguments.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `socket(..., SOCK_STREAM, IPPROTO_TCP)`.
    Socket,
    /// `bind(3, ..., ...)`: binds to the run's local address.
    Bind {
        /// Socket.
        fd: Fd,
        /// Port of `{port=N}`; otherwise the script's server port.
        port: Option<u16>,
    },
    /// `listen`.
    Listen {
        /// Socket.
        fd: Fd,
        /// Backlog.
        backlog: i32,
    },
    /// `accept(3, ..., ...)`.
    Accept {
        /// Listener.
        fd: Fd,
    },
    /// `connect(3, ..., ...)`: connects to the run's remote address.
    Connect {
        /// Socket.
        fd: Fd,
    },
    /// `read(4, ..., n)` and `recv(4, ..., n, flags)`.
    Receive {
        /// Socket.
        fd: Fd,
        /// Size of the buffer.
        len: usize,
        /// Flags.
        flags: MsgFlags,
    },
    /// `write(4, ..., n)` and `send(4, ..., n, flags)`.
    Send {
        /// Socket.
        fd: Fd,
        /// Bytes to send.
        len: usize,
        /// Flags.
        flags: MsgFlags,
    },
    /// `sendto(3, ..., n, flags, ..., ...)`: sends to the run's remote address.
    SendTo {
        /// Socket.
        fd: Fd,
        /// Bytes to send.
        len: usize,
        /// Flags.
        flags: MsgFlags,
    },
    /// `sendmsg(4, {msg_iov=[40, 20]}, flags)`.
    SendMessage {
        /// Socket.
        fd: Fd,
        /// Bytes of each part of the message.
        parts: Vec<usize>,
        /// Flags.
        flags: MsgFlags,
    },
    /// `connect(4, AF_UNSPEC, ...)`: dissolves the association of the socket.
    Disconnect {
        /// Socket.
        fd: Fd,
    },
    /// `close`.
    Close {
        /// Socket.
        fd: Fd,
    },
    /// `shutdown`.
    Shutdown {
        /// Socket.
        fd: Fd,
        /// Direction.
        how: ShutdownHow,
    },
    /// `setsockopt`.
    SetOption {
        /// Socket.
        fd: Fd,
        /// The option.
        option: SockOpt,
        /// The value.
        value: OptionValue,
    },
    /// `getsockopt`.
    GetOption {
        /// Socket.
        fd: Fd,
        /// The option.
        option: SockOpt,
        /// Expected value.
        expected: i64,
    },
    /// `fcntl(3, F_SETFL, …)`: accepted without effect, because sockets of scripts never block unless a time
    /// range says so.
    Fcntl {
        /// Socket.
        fd: Fd,
    },
    /// `poll`.
    Poll {
        /// Sockets with requested and expected events.
        entries: Vec<PollEntry>,
        /// Time-out in milliseconds; -1 is infinite.
        timeout_ms: i32,
    },
    /// `ioctl(4, SIOCINQ, [n])`.
    Ioctl {
        /// Socket.
        fd: Fd,
        /// The request.
        query: SocketIoctl,
        /// Expected value.
        expected: i64,
    },
}

impl Op {
    /// Returns the descriptor that the call refers to.
    pub fn fd(&self) -> Option<Fd> {
        match self {
            Self::Socket | Self::Poll { .. } => None,
            Self::Bind { fd, .. }
            | Self::Listen { fd, .. }
            | Self::Accept { fd }
            | Self::Connect { fd }
            | Self::Receive { fd, .. }
            | Self::Send { fd, .. }
            | Self::SendTo { fd, .. }
            | Self::SendMessage { fd, .. }
            | Self::Disconnect { fd }
            | Self::Close { fd }
            | Self::Shutdown { fd, .. }
            | Self::SetOption { fd, .. }
            | Self::GetOption { fd, .. }
            | Self::Fcntl { fd }
            | Self::Ioctl { fd, .. } => Some(*fd),
        }
    }
}

/// Value of `setsockopt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionValue {
    /// `[1]`.
    Int(i32),
    /// `{onoff=1, linger=0}`.
    Linger {
        /// Says whether lingering is enabled.
        on: i32,
        /// Seconds.
        seconds: i32,
    },
    /// `"reno"`.
    Text(String),
}

/// An entry of `poll`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollEntry {
    /// Socket.
    pub fd: Fd,
    /// Requested events.
    pub events: PollEvents,
    /// Expected events.
    pub revents: PollEvents,
}

/// Result of a socket call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallResult {
    /// Return value; -1 on error.
    pub value: i64,
    /// The error.
    pub errno: Option<Errno>,
    /// Value returned through a pointer: an option's value or a queue length.
    pub detail: Option<i64>,
    /// `revents` of each entry of a `poll`.
    pub revents: Vec<PollEvents>,
    /// Bytes that were read.
    pub data: Vec<u8>,
}

impl CallResult {
    /// Returns a result with this value.
    pub fn value(value: i64) -> Self {
        Self { value, ..Self::default() }
    }

    /// Returns a result with this error.
    pub fn error(errno: Errno) -> Self {
        Self { value: -1, errno: Some(errno), ..Self::default() }
    }
}
