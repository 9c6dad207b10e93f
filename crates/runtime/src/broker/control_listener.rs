//! The broker's address: a socket in the file system that only its owner can open.

use super::attachment::HELLO_TIMEOUT;
use crate::raised_limit::with_raised_limit;
use ginnel_devices::peer_credentials::peer_credentials;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, Mode, fchmod, lstat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    getpeername, getsockname, listen, socket_with, sockopt,
};
use rustix::process::geteuid;
use std::io;
use std::path::{Path, PathBuf};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The listening socket of the broker. Dropping it removes its file.
#[derive(Debug)]
pub(super) struct ControlListener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the file, so that the file of another stack is not removed.
    file_id: (u64, u64),
}

/// A connection that was accepted, by the user at its other end.
pub(super) enum AcceptedPeer {
    /// The user is the stack's own or root; its number.
    Permitted(OwnedFd, u32),
    /// Any other user; its number.
    Denied(OwnedFd, u32),
}

fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?)
}

fn file_id(path: &Path) -> io::Result<(u64, u64)> {
    let stat = lstat(path)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Connects to the broker at `path`.
pub(super) fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    // A blocking socket: `connect` waits while the backlog is full. The timeout bounds the wait, because the
    // stack's process may be stopped. While the broker answers nobody, nobody is accepted.
    let socket = || socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    // The program may have used all of its numbers. The limit is that of all threads, and is not raised while
    // this one waits.
    let socket = with_raised_limit(|errno: &Errno| *errno == Errno::MFILE, socket)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(HELLO_TIMEOUT))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

impl ControlListener {
    /// Binds and listens at `path`. Replaces a socket file that a dead stack left; fails if a process listens
    /// there or the file is no socket.
    pub fn new(path: &Path) -> io::Result<Self> {
        let (socket, address) = (socket()?, SocketAddrUnix::new(path)?);
        // bind(2) gives the file the mode of the socket, so the file never has another mode.
        fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        if lstat(path).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket)
            && connect_to(path).is_err_and(|e| e.raw_os_error() == Some(Errno::CONNREFUSED.raw_os_error()))
        {
            std::fs::remove_file(path)?;
        }
        bind(&socket, &address)?;
        listen(&socket, BACKLOG)?;
        Ok(Self { socket, path: path.to_owned(), file_id: file_id(path)? })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Accepts the next connection.
    pub fn accept(&self) -> io::Result<AcceptedPeer> {
        let peer = accept_with(&self.socket, FLAGS)?;
        let uid = peer_credentials(&peer)?.uid;
        let is_permitted = uid == geteuid().as_raw() || uid == 0;
        Ok(if is_permitted { AcceptedPeer::Permitted(peer, uid) } else { AcceptedPeer::Denied(peer, uid) })
    }
}

/// Returns the user who created a connected pair of sockets (socketpair(2)), from one of its ends.
///
/// # Errors
/// The socket is not of a pair. For other connections the kernel names the user who called listen(2)
/// (unix(7), `SO_PEERCRED`).
pub(super) fn creator_uid(socket: impl AsFd) -> io::Result<u32> {
    // The address of an unnamed socket consists of the family alone.
    let is_unnamed = |name: SocketAddrAny| name.addr_len() as usize == size_of::<libc::sa_family_t>();
    let is_pair = sockopt::socket_domain(&socket)? == AddressFamily::UNIX
        && sockopt::socket_type(&socket)? == SocketType::SEQPACKET
        && is_unnamed(getsockname(&socket)?)
        && getpeername(&socket)?.is_some_and(is_unnamed);
    if is_pair { Ok(peer_credentials(socket)?.uid) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

impl Drop for ControlListener {
    fn drop(&mut self) {
        if file_id(&self.path).is_ok_and(|identity| identity == self.file_id) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use rustix::net::socketpair;

    #[test]
    fn socket_is_private_and_a_stale_file_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let first = ControlListener::new(&path).unwrap();
        assert_eq!(lstat(&path).unwrap().st_mode & 0o777, 0o600);
        assert_eq!(
            ControlListener::new(&path).unwrap_err().kind(),
            io::ErrorKind::AddrInUse,
            "a stack listens there"
        );
        let _connecting = connect_to(&path).unwrap();
        let AcceptedPeer::Permitted(_, uid) = first.accept().unwrap() else { panic!("the user is denied") };
        assert_eq!(uid, geteuid().as_raw());
        drop(first);
        assert!(!path.exists());
        // Leaves the file behind, as a process that is killed does.
        bind(socket().unwrap(), &SocketAddrUnix::new(&path).unwrap()).unwrap();
        assert!(path.exists());
        let second = ControlListener::new(&path).unwrap();
        connect_to(&path).unwrap();
        drop(second);
        assert!(!path.exists());
        std::fs::write(&path, "no socket").unwrap();
        assert!(ControlListener::new(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"no socket");
    }

    #[test]
    fn creator_is_known_for_socket_pairs_only() {
        let pair = |kind| socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let (socket, other) = pair(SocketType::SEQPACKET);
        let uid = geteuid().as_raw();
        assert_eq!((creator_uid(&socket).unwrap(), creator_uid(&other).unwrap()), (uid, uid));
        assert!(creator_uid(pair(SocketType::STREAM).0).is_err());
        // Neither end of a connection to a listener is accepted.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("listener");
        let listener = ControlListener::new(&path).unwrap();
        let client = connect_to(&path).unwrap();
        let AcceptedPeer::Permitted(accepted, _) = listener.accept().unwrap() else {
            panic!("the user is denied")
        };
        assert!(creator_uid(&client).is_err() && creator_uid(&accepted).is_err());
        assert!(creator_uid(std::fs::File::open("/dev/null").unwrap()).is_err());
        assert!(creator_uid(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).is_err());
    }

    #[test]
    fn another_user_is_denied_whatever_the_file_mode() {
        use rustix::thread::{Uid, set_thread_res_uid};
        use std::os::unix::fs::PermissionsExt;

        if !geteuid().is_root() {
            return ginnel_testkit::skip(
                "broker::control_listener another user",
                "only root can be another user",
            );
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let listener = ControlListener::new(&path).unwrap();
        for (path, mode) in [(directory.path(), 0o755), (&*path, 0o666)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let nobody = Uid::from_raw(65_534);
        // Changes the user of this thread alone, irrevocably.
        let connecting = std::thread::spawn(move || {
            set_thread_res_uid(nobody, nobody, nobody).unwrap();
            connect_to(&path).unwrap()
        });
        let _connecting = connecting.join().unwrap();
        assert!(matches!(listener.accept().unwrap(), AcceptedPeer::Denied(..)));
    }
}
