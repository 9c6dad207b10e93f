//! Socket calls as scripts write them, typed.

use super::names::{Errno, MsgFlags, PollEvents, ShutdownHow, SockOpt, SocketIoctl};

/// A file descriptor as numbered in the script; each backend maps it to what it stands for.
pub type Fd = i32;

/// One call with what it must return.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// What is called.
    pub op: Op,
    /// The text as written, for messages.
    pub text: String,
    /// What it must return.
    pub expect: ExpectedReturn,
}

/// What a call must return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpectedReturn {
    /// The value; `None` is `*`.
    pub value: Option<i64>,
    /// The error, if the value is -1.
    pub errno: Option<Errno>,
}

/// A call.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `socket(..., SOCK_STREAM, IPPROTO_TCP)`.
    Socket,
    /// `bind(3, ..., ...)`: to the run's local address and this port.
    Bind {
        /// Socket.
        fd: Fd,
        /// `{port=N}`; the script's server port otherwise.
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
    /// `connect(3, ..., ...)`: to the run's remote address.
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
        /// Bytes.
        len: usize,
        /// Flags.
        flags: MsgFlags,
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
        /// Which direction.
        how: ShutdownHow,
    },
    /// `setsockopt`.
    SetOption {
        /// Socket.
        fd: Fd,
        /// Which.
        option: SockOpt,
        /// The value.
        value: OptionValue,
    },
    /// `getsockopt`.
    GetOption {
        /// Socket.
        fd: Fd,
        /// Which.
        option: SockOpt,
        /// What must come back.
        expected: i64,
    },
    /// `fcntl(3, F_SETFL, …)`: sockets of scripts never block unless a time range says so, so this only checks the call.
    Fcntl {
        /// Socket.
        fd: Fd,
    },
    /// `poll`.
    Poll {
        /// Sockets with what is waited for and what must come back.
        entries: Vec<PollEntry>,
        /// Milliseconds, -1 for no limit.
        timeout_ms: i32,
    },
    /// `ioctl(4, SIOCINQ, [n])`.
    Ioctl {
        /// Socket.
        fd: Fd,
        /// Which.
        query: SocketIoctl,
        /// What must come back.
        expected: i64,
    },
}

impl Op {
    /// The descriptor that it is about.
    pub fn fd(&self) -> Option<Fd> {
        match self {
            Self::Socket | Self::Poll { .. } => None,
            Self::Bind { fd, .. }
            | Self::Listen { fd, .. }
            | Self::Accept { fd }
            | Self::Connect { fd }
            | Self::Receive { fd, .. }
            | Self::Send { fd, .. }
            | Self::Close { fd }
            | Self::Shutdown { fd, .. }
            | Self::SetOption { fd, .. }
            | Self::GetOption { fd, .. }
            | Self::Fcntl { fd }
            | Self::Ioctl { fd, .. } => Some(*fd),
        }
    }
}

/// A value for `setsockopt`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionValue {
    /// `[1]`.
    Int(i32),
    /// `{onoff=1, linger=0}`.
    Linger {
        /// Linger at all.
        on: i32,
        /// Seconds.
        seconds: i32,
    },
    /// `"reno"`.
    Text(String),
}

/// One entry of `poll`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollEntry {
    /// Socket.
    pub fd: Fd,
    /// What is waited for.
    pub events: PollEvents,
    /// What must come back.
    pub revents: PollEvents,
}

/// What a call returned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallResult {
    /// Value, -1 on error.
    pub value: i64,
    /// Error.
    pub errno: Option<Errno>,
    /// What came back through a pointer: an option's value or a queue length.
    pub detail: Option<i64>,
    /// `revents` of each entry of a `poll`.
    pub revents: Vec<PollEvents>,
    /// Bytes read.
    pub data: Vec<u8>,
}

impl CallResult {
    /// A plain value.
    pub fn value(value: i64) -> Self {
        Self { value, ..Self::default() }
    }

    /// An error.
    pub fn error(errno: Errno) -> Self {
        Self { value: -1, errno: Some(errno), ..Self::default() }
    }
}
