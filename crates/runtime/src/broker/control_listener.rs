//! The door's address: a socket in the file system that only its user can open.

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
use std::time::Duration;

/// How long somebody waits to be let in.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Processes that may wait to be let in.
const BACKLOG: i32 = 128;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Where processes knock. The file goes with it.
#[derive(Debug)]
pub(super) struct ControlListener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the file: not to remove somebody else's.
    file_id: (u64, u64),
}

/// Somebody at the door.
pub(super) enum AcceptedPeer {
    /// May come in; the user's number.
    Permitted(OwnedFd, u32),
    /// May not.
    Denied(OwnedFd),
}

fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?)
}

fn file_id(path: &Path) -> io::Result<(u64, u64)> {
    let stat = lstat(path)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Connects to the door at a path.
pub(super) fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    // One that waits, for there is no room for all that come at once; not for ever, for who should answer may be stopped.
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(CONNECT_TIMEOUT))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

impl ControlListener {
    /// A file that a dead stack left is replaced; one that is used, or is no socket, is an error.
    pub fn new(path: &Path) -> io::Result<Self> {
        let (socket, address) = (socket()?, SocketAddrUnix::new(path)?);
        // The mode of the socket becomes that of the file, so there is no moment in which it has another.
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

    /// The next in the queue.
    pub fn accept(&self) -> io::Result<AcceptedPeer> {
        let peer = accept_with(&self.socket, FLAGS)?;
        let uid = peer_uid(&peer)?;
        let is_permitted = uid == geteuid().as_raw() || uid == 0;
        Ok(if is_permitted { AcceptedPeer::Permitted(peer, uid) } else { AcceptedPeer::Denied(peer) })
    }
}

/// The user who has made a pair of connected sockets, as the kernel says when it is asked about one of them.
///
/// # Errors
/// It is none of a pair. Of other connections the kernel may name somebody else: whoever listened (unix(7), `SO_PEERCRED`).
pub(super) fn creator_uid(socket: impl AsFd) -> io::Result<u32> {
    // Of an address there is the family alone.
    let is_unnamed = |name: SocketAddrAny| name.addr_len() as usize == size_of::<libc::sa_family_t>();
    let is_pair = sockopt::socket_domain(&socket)? == AddressFamily::UNIX
        && sockopt::socket_type(&socket)? == SocketType::SEQPACKET
        && is_unnamed(getsockname(&socket)?)
        && getpeername(&socket)?.is_some_and(is_unnamed);
    if is_pair { peer_uid(socket) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// The user at the other end, as the kernel says.
fn peer_uid(socket: impl AsFd) -> io::Result<u32> {
    Ok(sockopt::socket_peercred(socket)?.uid.as_raw())
}

impl Drop for ControlListener {
    fn drop(&mut self) {
        if file_id(&self.path).is_ok_and(|identity| identity == self.file_id) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::socketpair;

    #[test]
    fn only_the_user_may_open_it_and_what_a_dead_stack_left_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let first = ControlListener::new(&path).unwrap();
        assert_eq!(lstat(&path).unwrap().st_mode & 0o777, 0o600);
        assert_eq!(
            ControlListener::new(&path).unwrap_err().kind(),
            io::ErrorKind::AddrInUse,
            "somebody listens there"
        );
        let _knocking = connect_to(&path).unwrap();
        let AcceptedPeer::Permitted(_, uid) = first.accept().unwrap() else { panic!("a stranger") };
        assert_eq!(uid, geteuid().as_raw());
        drop(first);
        assert!(!path.exists());
        // As if it had died without taking its file along.
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
    fn who_has_made_a_connection_is_known_of_pairs_alone() {
        let pair = |kind| socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let (socket, other) = pair(SocketType::SEQPACKET);
        let uid = geteuid().as_raw();
        assert_eq!((creator_uid(&socket).unwrap(), creator_uid(&other).unwrap()), (uid, uid));
        assert!(creator_uid(pair(SocketType::STREAM).0).is_err());
        // Neither end of a connection to somebody's listener.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("listener");
        let listener = ControlListener::new(&path).unwrap();
        let client = connect_to(&path).unwrap();
        let AcceptedPeer::Permitted(accepted, _) = listener.accept().unwrap() else { panic!("a stranger") };
        assert!(creator_uid(&client).is_err() && creator_uid(&accepted).is_err());
        assert!(creator_uid(std::fs::File::open("/dev/null").unwrap()).is_err());
        assert!(creator_uid(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).is_err());
    }

    #[test]
    fn another_user_is_a_stranger_even_if_the_file_lets_everybody_in() {
        use rustix::thread::{Uid, set_thread_res_uid};
        use std::os::unix::fs::PermissionsExt;

        if !geteuid().is_root() {
            return ginnel_testkit::skip("door::listen another user", "only root can be another user");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let listener = ControlListener::new(&path).unwrap();
        for (path, mode) in [(directory.path(), 0o755), (&*path, 0o666)] {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let nobody = Uid::from_raw(65_534);
        // Of this thread alone, and for good.
        let knocking = std::thread::spawn(move || {
            set_thread_res_uid(nobody, nobody, nobody).unwrap();
            connect_to(&path).unwrap()
        });
        let _knocking = knocking.join().unwrap();
        assert!(matches!(listener.accept().unwrap(), AcceptedPeer::Denied(_)));
    }
}
