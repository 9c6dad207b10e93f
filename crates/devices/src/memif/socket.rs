//! Sockets of the control channel: listening, accepting, connecting.

use super::config::SocketName;
use super::control_channel::ControlChannel;
use crate::peer_credentials::peer_credentials;
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Mode, fchmod, lstat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
};
use std::io;
use std::path::{Path, PathBuf};

/// Length of the queue of clients that wait to be accepted.
const BACKLOG: i32 = 16;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?)
}

fn address(name: &SocketName) -> io::Result<SocketAddrUnix> {
    Ok(match name {
        SocketName::Path(path) => SocketAddrUnix::new(path)?,
        SocketName::Abstract(name) => SocketAddrUnix::new_abstract_name(name.as_bytes())?,
    })
}

/// A listening socket. Its file is removed with it.
#[derive(Debug)]
pub(super) struct MemifListener {
    socket: OwnedFd,
    name: SocketName,
    /// The file that was created, with device and inode number, so that another process's file is not
    /// removed.
    file: Option<(PathBuf, (u64, u64))>,
}

impl MemifListener {
    /// Binds and listens. Replaces the file of a dead server. Fails with `AddrInUse` if another server
    /// listens, and with `AlreadyExists` if the file is no socket.
    pub(super) fn bind(name: &SocketName) -> io::Result<Self> {
        let socket = socket()?;
        if let SocketName::Path(path) = name {
            // The file inherits the mode of the socket, so it never has another mode.
            fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
            remove_stale(path, name)?;
        }
        bind(&socket, &address(name)?)?;
        listen(&socket, BACKLOG)?;
        let file = match name {
            SocketName::Path(path) => Some((path.clone(), device_and_inode(path)?)),
            SocketName::Abstract(_) => None,
        };
        Ok(Self { socket, name: name.clone(), file })
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.socket
    }

    /// Accepts a client. Returns `None` if it has no permission.
    pub(super) fn accept(&self) -> io::Result<Option<ControlChannel>> {
        let socket = accept_with(&self.socket, FLAGS)?;
        Ok(is_peer_allowed(&self.name, &socket).then(|| ControlChannel::new(socket)))
    }
}

impl Drop for MemifListener {
    fn drop(&mut self) {
        if let Some((path, ours)) = &self.file
            && device_and_inode(path).is_ok_and(|identity| identity == *ours)
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Connects to the server.
pub(super) fn connect_to(name: &SocketName) -> io::Result<ControlChannel> {
    let socket = socket()?;
    connect(&socket, &address(name)?)?;
    if !is_peer_allowed(name, &socket) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(ControlChannel::new(socket))
}

/// Returns whether the peer has permission. An abstract name has no mode, so the peer must run as the same
/// user or as root.
fn is_peer_allowed(name: &SocketName, socket: &OwnedFd) -> bool {
    let SocketName::Abstract(_) = name else { return true };
    let own_uid = rustix::process::geteuid().as_raw();
    peer_credentials(socket).is_ok_and(|peer| peer.uid == own_uid || peer.uid == 0)
}

fn device_and_inode(path: &Path) -> io::Result<(u64, u64)> {
    let stat = lstat(path)?;
    Ok((stat.st_dev, stat.st_ino))
}

fn remove_stale(path: &Path, name: &SocketName) -> io::Result<()> {
    let stat = match lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is not a socket exists"));
    }
    match connect(&socket()?, &address(name)?) {
        Err(Errno::CONNREFUSED) => Ok(std::fs::remove_file(path)?),
        _ => Err(io::ErrorKind::AddrInUse.into()),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn socket_file_is_private_and_removed_on_close() {
        let folder = super::super::tests::Folder::new();
        let path = folder.path("socket");
        let name = SocketName::Path(path.clone());
        let listener = MemifListener::bind(&name).expect("bound");
        let mode = std::fs::metadata(&path).expect("the file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(MemifListener::bind(&name).expect_err("in use").kind(), io::ErrorKind::AddrInUse);
        let _client = connect_to(&name).expect("the server");
        assert!(listener.accept().expect("the second client").is_some(), "the first client has closed");
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn only_stale_socket_files_are_replaced() {
        let folder = super::super::tests::Folder::new();
        let path = folder.path("socket");
        let name = SocketName::Path(path.clone());
        let mut dead = MemifListener::bind(&name).expect("bound");
        dead.file = None; // as after kill -9
        drop(dead);
        assert!(path.exists());
        let listener = MemifListener::bind(&name).expect("replaced");
        std::fs::remove_file(&path).expect("the file was removed");
        std::fs::write(&path, "text").expect("foreign file");
        drop(listener);
        assert_eq!(std::fs::read_to_string(&path).expect("the file still exists"), "text");
        assert_eq!(MemifListener::bind(&name).expect_err("a file").kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn abstract_name_needs_no_file() {
        let name = SocketName::Abstract(format!("ginnel-test-{}", std::process::id()));
        let listener = MemifListener::bind(&name).expect("bound");
        let _client = connect_to(&name).expect("the server");
        assert!(listener.accept().expect("the client").is_some(), "peer of equal user");
    }
}
