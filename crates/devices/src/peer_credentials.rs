//! The process and the user at the other end of a Unix socket.
#![allow(unsafe_code)] // rustix has no value for a process of another PID namespace

use rustix::fd::{AsFd, AsRawFd};
use rustix::process::Pid;
use std::io;

/// The process that has connected a socket, or that has called listen(2), and its user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// The process by its id in the PID namespace of the reader, or `None` if it is not visible there.
    pub pid: Option<Pid>,
    /// The user.
    pub uid: u32,
}

/// Returns the process and the user at the other end of `socket` (unix(7), `SO_PEERCRED`).
///
/// # Errors
/// The descriptor is no connected Unix socket.
pub fn peer_credentials(socket: impl AsFd) -> io::Result<PeerCredentials> {
    let fd = socket.as_fd().as_raw_fd();
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, and any bytes are a valid structure.
    let result = unsafe {
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut len)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // The kernel answers for sockets of other families, too, with this number, which no user has.
    if peer.uid == u32::MAX {
        return Err(io::ErrorKind::NotConnected.into());
    }
    Ok(PeerCredentials { pid: Pid::from_raw(peer.pid), uid: peer.uid })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn peer_is_named_for_connections_only() {
        let (end, _other) = UnixStream::pair().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        let own = PeerCredentials { pid: Some(rustix::process::getpid()), uid };
        assert_eq!(peer_credentials(&end).unwrap(), own);
        assert!(peer_credentials(std::fs::File::open("/dev/null").unwrap()).is_err());
        assert!(peer_credentials(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).is_err());
    }
}
