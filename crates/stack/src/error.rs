//! Errors that callers of the engine receive. Each names the errno of the corresponding error on Linux.

use core::fmt;
use serde::{Deserialize, Serialize};

macro_rules! errors {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident => $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum $name { $($(#[$vdoc])* $variant,)* }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $(Self::$variant => $text,)* })
            }
        }

        impl std::error::Error for $name {}
    };
}

errors! {
    /// Why a socket cannot listen.
    ListenError {
        /// Another listener has the address and port (`EADDRINUSE`).
        AddressInUse => "address already in use",
        /// The address is not an address of this stack (`EADDRNOTAVAIL`).
        AddressNotAvailable => "cannot assign requested address",
        /// `listeners_max` is reached (`ENFILE`).
        TooMany => "too many listeners",
        /// A socket option is out of range (`EINVAL`).
        InvalidOption => "invalid socket option",
    }
}

errors! {
    /// Why a connection cannot be opened.
    ConnectError {
        /// No local port is free towards this destination (`EADDRNOTAVAIL`).
        PortsExhausted => "no free local port towards this destination",
        /// The local address is not an address of this stack, or other shards serve it (`EADDRNOTAVAIL`).
        AddressNotAvailable => "cannot assign requested address",
        /// The given local address and port have a connection to this destination already (`EADDRINUSE`).
        AddressInUse => "address already in use",
        /// There is no route (`ENETUNREACH`).
        NetUnreachable => "network is unreachable",
        /// Port 0, a broadcast or multicast address, or mixed address families (`EINVAL`, `ENETUNREACH`).
        InvalidAddress => "invalid destination address",
        /// `connections_max` is reached (`ENFILE`).
        TooMany => "too many connections",
        /// A socket option is out of range (`EINVAL`).
        InvalidOption => "invalid socket option",
    }
}

errors! {
    /// Why the program of a group of sockets that share an address cannot be set (`SO_REUSEPORT`).
    GroupError {
        /// The socket of the handle was closed.
        Stale => "stale socket handle",
        /// The socket was not bound with `SO_REUSEPORT` (`EINVAL`).
        NotInGroup => "the socket shares its address with no others",
        /// There is no program to remove (`ENOENT`).
        NoProgram => "the group has no program",
        /// The socket has a program of its own, and other sockets have the address (`EADDRINUSE`).
        InUse => "address already in use",
    }
}

errors! {
    /// Why nothing can be sent.
    SendError {
        /// The connection of the handle has ended.
        Stale => "stale connection handle",
        /// The write side was shut down (`EPIPE`).
        Closed => "broken pipe",
        /// The source or the range does not exist (`EINVAL`).
        InvalidSource => "no such source or range",
        /// The send queue accepts no more items now (`EAGAIN`): wait for `Writable`.
        Full => "send buffer is full",
        /// The message is longer than the send buffer (`EMSGSIZE`).
        TooLong => "message exceeds the send buffer",
    }
}

errors! {
    /// Why nothing can be read.
    RecvError {
        /// The connection of the handle has ended.
        Stale => "stale connection handle",
        /// No data have arrived yet (`EAGAIN`).
        WouldBlock => "nothing to read yet",
    }
}

errors! {
    /// Why an option was refused.
    OptionError {
        /// The connection of the handle has ended.
        Stale => "stale connection handle",
        /// The value is out of range (`EINVAL`).
        Invalid => "invalid option value",
        /// 65,535 different sets of options are in use (`ENOBUFS`).
        TooMany => "too many different sets of options",
    }
}

errors! {
    /// Error of a call with a handle whose connection has ended.
    Stale {
        /// The connection of the handle has ended.
        Handle => "stale handle",
    }
}

/// A configuration value that is rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The key, dotted (`tcp.rto_min_ms`).
    pub key: String,
    /// Reason for which the value is refused, with the permitted range.
    pub problem: String,
}

impl ConfigError {
    /// Returns an error about `key`.
    pub fn new(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { key: key.into(), problem: problem.into() }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.problem)
    }
}

impl std::error::Error for ConfigError {}
