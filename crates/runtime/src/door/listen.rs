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
const PATIENCE: Duration = Duration::from_secs(10);
/// Processes that may wait to be let in.
const BACKLOG: i32 = 128;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Where processes knock. The file goes with it.
#[derive(Debug)]
pub(super) struct Knocker {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the file: not to remove somebody else's.
    file: (u64, u64),
}

/// Somebody at the door.
pub(super) enum Caller {
    /// May come in; the user's number.
    Welcome(OwnedFd, u32),
    /// May not.
    Stranger(OwnedFd),
}

fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?)
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let stat = lstat(path)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Connects to the door at a path.
pub(super) fn connect_to(path: &Path) -> io::Result<OwnedFd> {
    // One that waits, for there is no room for all that come at once; not for ever, for who should answer may be stopped.
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

impl Knocker {
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
        Ok(Self { socket, path: path.to_owned(), file: identity(path)? })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The next in the queue.
    pub fn answer(&self) -> io::Result<Caller> {
        let caller = accept_with(&self.socket, FLAGS)?;
        let user = user_of(&caller)?;
        let welcome = user == geteuid().as_raw() || user == 0;
        Ok(if welcome { Caller::Welcome(caller, user) } else { Caller::Stranger(caller) })
    }
}

/// The user who has made a pair of connected sockets, as the kernel says when it is asked about one of them.
///
/// # Errors
/// It is none of a pair. Of other connections the kernel may name somebody else: whoever listened (unix(7), `SO_PEERCRED`).
pub(super) fn maker_of(one: impl AsFd) -> io::Result<u32> {
    // Of an address there is the family alone.
    let nameless = |name: SocketAddrAny| name.addr_len() as usize == size_of::<libc::sa_family_t>();
    let of_pair = sockopt::socket_domain(&one)? == AddressFamily::UNIX
        && sockopt::socket_type(&one)? == SocketType::SEQPACKET
        && nameless(getsockname(&one)?)
        && getpeername(&one)?.is_some_and(nameless);
    if of_pair { user_of(one) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// The user at the other end, as the kernel says.
fn user_of(socket: impl AsFd) -> io::Result<u32> {
    Ok(sockopt::socket_peercred(socket)?.uid.as_raw())
}

impl Drop for Knocker {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|identity| identity == self.file) {
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
        let first = Knocker::new(&path).unwrap();
        assert_eq!(lstat(&path).unwrap().st_mode & 0o777, 0o600);
        assert_eq!(
            Knocker::new(&path).unwrap_err().kind(),
            io::ErrorKind::AddrInUse,
            "somebody listens there"
        );
        let _knocking = connect_to(&path).unwrap();
        let Caller::Welcome(_, user) = first.answer().unwrap() else { panic!("a stranger") };
        assert_eq!(user, geteuid().as_raw());
        drop(first);
        assert!(!path.exists());
        // As if it had died without taking its file along.
        bind(socket().unwrap(), &SocketAddrUnix::new(&path).unwrap()).unwrap();
        assert!(path.exists());
        let second = Knocker::new(&path).unwrap();
        connect_to(&path).unwrap();
        drop(second);
        assert!(!path.exists());
        std::fs::write(&path, "no socket").unwrap();
        assert!(Knocker::new(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"no socket");
    }

    #[test]
    fn who_has_made_a_connection_is_known_of_pairs_alone() {
        let pair = |kind| socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let (one, other) = pair(SocketType::SEQPACKET);
        let user = geteuid().as_raw();
        assert_eq!((maker_of(&one).unwrap(), maker_of(&other).unwrap()), (user, user));
        assert!(maker_of(pair(SocketType::STREAM).0).is_err());
        // Neither end of a connection to somebody's listener.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("listener");
        let knocker = Knocker::new(&path).unwrap();
        let its = connect_to(&path).unwrap();
        let Caller::Welcome(ours, _) = knocker.answer().unwrap() else { panic!("a stranger") };
        assert!(maker_of(&its).is_err() && maker_of(&ours).is_err());
        assert!(maker_of(std::fs::File::open("/dev/null").unwrap()).is_err());
        assert!(maker_of(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).is_err());
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
        let knocker = Knocker::new(&path).unwrap();
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
        assert!(matches!(knocker.answer().unwrap(), Caller::Stranger(_)));
    }
}
