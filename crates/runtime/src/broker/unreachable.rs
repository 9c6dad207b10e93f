//! Why a process does not reach the broker of a stack.

use crate::error::Error;
use core::fmt;
use rustix::fs::stat;
use rustix::process::geteuid;
use std::io::{self, ErrorKind};
use std::path::Path;

/// Why a broker could not be reached. Formats as one line without the path of its socket.
#[derive(Debug)]
pub struct UnreachableStack {
    cause: UnreachableCause,
    source: io::Error,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnreachableCause {
    /// The socket exists, and no process listens there.
    Dead,
    /// No such file exists.
    Ended,
    /// The user of this number owns the socket, or the first directory on its path that cannot be entered.
    OtherUser(u32),
    /// The socket belongs to this user, and something else than its owner forbids the connection.
    Forbidden,
    /// The process does not accept the connection in time.
    Stuck,
    /// Any other error of the system call.
    Other,
}

impl UnreachableStack {
    /// Returns the error of a connection to `path` that failed with `source`.
    pub(super) fn error(path: &Path, source: io::Error) -> Error {
        let cause = match source.kind() {
            ErrorKind::ConnectionRefused => UnreachableCause::Dead,
            ErrorKind::NotFound | ErrorKind::NotADirectory => UnreachableCause::Ended,
            ErrorKind::WouldBlock | ErrorKind::TimedOut => UnreachableCause::Stuck,
            ErrorKind::PermissionDenied => match owner_of(path) {
                Some(uid) if uid != geteuid().as_raw() => UnreachableCause::OtherUser(uid),
                _ => UnreachableCause::Forbidden,
            },
            _ => UnreachableCause::Other,
        };
        Error::Unreachable(path.into(), Self { cause, source })
    }

    /// Returns the error of the system call.
    pub fn io_error(&self) -> &io::Error {
        &self.source
    }
}

/// Returns the user who owns `path`, or the nearest directory above it that this process can see.
pub fn owner_of(path: &Path) -> Option<u32> {
    path.ancestors().find_map(|path| stat(path).ok()).map(|metadata| metadata.st_uid)
}

impl fmt::Display for UnreachableStack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cause {
            UnreachableCause::Dead => f.write_str("its process is dead, and has left its directory behind"),
            UnreachableCause::Ended => f.write_str("it has ended, or never ran"),
            UnreachableCause::OtherUser(uid) => write!(f, "it belongs to user {uid}"),
            UnreachableCause::Forbidden => f.write_str("this process may not connect to it"),
            UnreachableCause::Stuck => {
                f.write_str("its process is stopped or stuck, and accepts no connection")
            }
            UnreachableCause::Other => f.write_str("the connection failed"),
        }?;
        write!(f, ": {}", self.source)
    }
}

impl std::error::Error for UnreachableStack {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let text = |kind: ErrorKind| UnreachableStack::error(&path, kind.into()).to_string();
        for (kind, expected) in [
            (ErrorKind::ConnectionRefused, "its process is dead, and has left its directory behind: "),
            (ErrorKind::NotFound, "it has ended, or never ran: "),
            (ErrorKind::WouldBlock, "its process is stopped or stuck, and accepts no connection: "),
            (ErrorKind::PermissionDenied, "this process may not connect to it: "),
            (ErrorKind::OutOfMemory, "the connection failed: "),
        ] {
            let expected = format!("stack at {}: {expected}", path.display());
            assert!(text(kind).starts_with(&expected), "{}", text(kind));
        }
        assert_eq!(owner_of(&path), Some(geteuid().as_raw()));
    }
}
