//! Errors of the runtime.

use crate::broker::{Refusal, UnreachableStack};
use crate::channel::control::ReserveError;
use crate::socket_filter::FilterError;
use core::fmt;
use ginnel_stack::error::{ConfigError, ConnectError, ListenError, SendError};
use ginnel_stack::udp::UdpError;
use std::path::PathBuf;

/// Why a shard could not be built, started or kept running.
#[derive(Debug)]
pub enum Error {
    /// A configuration value is not valid.
    Config(ConfigError),
    /// A socket could not listen on the address.
    Listen(core::net::SocketAddr, ListenError),
    /// A connection could not be opened.
    Connect(core::net::SocketAddr, ConnectError),
    /// A UDP socket could not be opened.
    Udp(core::net::SocketAddr, UdpError),
    /// An address could not be reserved.
    Reserve(core::net::SocketAddr, ReserveError),
    /// A socket did not get its filter.
    Filter(FilterError),
    /// Bytes could not be sent.
    Send(SendError),
    /// A system call failed; the text names its object.
    Io(String, std::io::Error),
    /// Every device of the shard is gone; the text lists their names.
    DevicesLost(String),
    /// One of several shards failed.
    Shard(usize, Box<Error>),
    /// The thread of a shard panicked, with this message.
    Panicked(String),
    /// The broker of a stack refused a request.
    Refused(Refusal),
    /// The broker that listens at this path could not be reached, for this reason.
    Unreachable(PathBuf, UnreachableStack),
    /// The stack, which is in another process, is gone.
    StackGone,
    /// The application's own error.
    Application(String),
}

impl Error {
    /// Creates an error of the application: one line that names the object concerned.
    pub fn application(text: impl Into<String>) -> Self {
        Self::Application(text.into())
    }

    /// Creates the error of a failed system call on `what`.
    pub fn io(what: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        Self::Io(what.into(), source.into())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(e) => e.fmt(f),
            Self::Listen(address, e) => write!(f, "listen on {address}: {e}"),
            Self::Reserve(address, e) => write!(f, "bind to {address}: {e}"),
            Self::Connect(address, e) => write!(f, "connect to {address}: {e}"),
            Self::Udp(address, e) => write!(f, "bind {address}: {e}"),
            Self::Filter(e) => write!(f, "filter: {e}"),
            Self::Send(e) => write!(f, "send: {e}"),
            Self::Io(what, e) => write!(f, "{what}: {e}"),
            Self::DevicesLost(names) => write!(f, "no device is left (gone: {names})"),
            Self::Shard(index, e) => write!(f, "shard {index}: {e}"),
            Self::Panicked(text) => write!(f, "panicked: {text}"),
            Self::Refused(why) => write!(f, "the stack refused the request: {why}"),
            Self::Unreachable(path, why) => write!(f, "stack at {}: {why}", path.display()),
            Self::StackGone => f.write_str("the stack is gone"),
            Self::Application(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(e) => Some(e),
            Self::Listen(_, e) => Some(e),
            Self::Connect(_, e) => Some(e),
            Self::Udp(_, e) => Some(e),
            Self::Reserve(_, e) => Some(e),
            Self::Filter(e) => Some(e),
            Self::Send(e) => Some(e),
            Self::Io(_, e) => Some(e),
            Self::Shard(_, e) => Some(e),
            Self::Refused(why) => Some(why),
            Self::Unreachable(_, why) => Some(why),
            Self::DevicesLost(_) | Self::Panicked(_) | Self::StackGone | Self::Application(_) => None,
        }
    }
}

impl From<ConfigError> for Error {
    fn from(e: ConfigError) -> Self {
        Self::Config(e)
    }
}

impl From<SendError> for Error {
    fn from(e: SendError) -> Self {
        Self::Send(e)
    }
}
