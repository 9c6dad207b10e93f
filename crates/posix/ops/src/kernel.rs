//! Sockets that turn out to be the kernel's, and the kernel's half of listeners that serve both.

use crate::Ops;
use crate::book::{Entry, Why};
use crate::fd_table::FileId;
use crate::file::{Kind, Shape, Socket};
use crate::lane::Lane;
use crate::raw;
use crate::sockaddr::{self, Family, Written};
use core::ffi::c_int;
use core::net::SocketAddr;
use rustix::fd::{AsRawFd, RawFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

impl Ops {
    /// Puts a socket of the kernel's behind a descriptor, with the options that the program has set. It still is ours.
    pub(crate) fn back_with_kernel(&self, lane: &mut Lane, fd: RawFd, file: FileId) -> Result<(), Errno> {
        let socket = lane.files.socket(file)?;
        let family = match socket.family {
            Family::V4 => AddressFamily::INET,
            Family::V6 => AddressFamily::INET6,
        };
        let flags = if socket.nonblocking { SocketFlags::NONBLOCK } else { SocketFlags::empty() };
        let kind = if socket.datagrams { SocketType::DGRAM } else { SocketType::STREAM };
        let real = socket_with(family, kind, flags | SocketFlags::CLOEXEC, None)?;
        for (level, name, value) in socket.options.as_set() {
            raw::setsockopt(real.as_raw_fd(), *level, *name, value)?;
        }
        let cloexec = rustix::io::fcntl_getfd(crate::descriptor::borrow(fd)?)?;
        let flags = if cloexec.contains(rustix::io::FdFlags::CLOEXEC) { libc::O_CLOEXEC } else { 0 };
        raw::dup3(real.as_raw_fd(), fd, flags)
    }

    /// A socket that is not for the stack becomes the kernel's, and the descriptor is ours no longer.
    pub(crate) fn hand_to_kernel(&self, lane: &mut Lane, fd: RawFd, file: FileId) -> Result<(), Errno> {
        let shared = lane.files.get(file).descriptors > 1;
        if shared {
            // Its copies would go on being placeholders.
            return Err(Errno::NETUNREACH);
        }
        self.back_with_kernel(lane, fd, file)?;
        self.let_go(lane, fd, file);
        Ok(())
    }

    /// The kernel's half is all of a socket from now on.
    pub(crate) fn leave_to_kernel(&self, lane: &mut Lane, fd: RawFd, file: FileId) -> Result<(), Errno> {
        if lane.files.get(file).descriptors > 1 {
            return Err(Errno::NETUNREACH);
        }
        if lane.files.socket(file)?.nonblocking {
            never_wait(fd)?;
        }
        self.let_go(lane, fd, file);
        Ok(())
    }

    fn let_go(&self, lane: &mut Lane, fd: RawFd, file: FileId) {
        self.fds.take(fd);
        lane.write_down_kernels(fd, Why::NotReached);
        lane.files.get(file).descriptors = 0;
        lane.forget(file);
    }
}

/// Whether the kernel would take an option for a new socket.
pub(crate) fn try_option(family: Family, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
    let family = match family {
        Family::V4 => AddressFamily::INET,
        Family::V6 => AddressFamily::INET6,
    };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    raw::setsockopt(socket.as_raw_fd(), level, name, value)
}

/// Calls on the kernel's half of a listener never wait: another process may have been faster.
pub(crate) fn never_wait(fd: RawFd) -> Result<(), Errno> {
    rustix::fs::fcntl_setfl(crate::descriptor::borrow(fd)?, rustix::fs::OFlags::NONBLOCK)
}

/// The address that the kernel chose.
pub(crate) fn name_of(fd: RawFd, family: Family) -> Result<SocketAddr, Errno> {
    let mut bytes = [0u8; 128];
    let len = raw::getsockname(fd, &mut bytes)?;
    sockaddr::read(bytes.get(..len).ok_or(Errno::INVAL)?, family)
}

/// A connection that came by the kernel, if there is one; never waits.
pub(crate) fn accept(fd: RawFd, flags: c_int, family: Family) -> Result<(RawFd, Written), Errno> {
    let mut ready = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
    if crate::sleep::poll_now(&mut ready)? == 0 {
        return Err(Errno::AGAIN);
    }
    let mut bytes = [0u8; 128];
    let (new, len) = raw::accept4(fd, &mut bytes, flags)?;
    let peer = bytes.get(..len).and_then(|bytes| sockaddr::read(bytes, family).ok());
    Ok((new, sockaddr::write(peer.unwrap_or(family.any()), family)))
}

impl Lane {
    /// Whether something of the kernel's stands behind a description's descriptors, not mere placeholders.
    pub fn is_backed(&mut self, file: FileId) -> bool {
        match &self.files.get(file).kind {
            Kind::Epoll(_) => true,
            Kind::Free => false,
            Kind::Socket(socket) => match socket.shape {
                Shape::Datagrams(dgram) => dgram.kernel.is_some(),
                _ => socket.bound().is_some_and(|bound| bound.kernel.is_some()),
            },
        }
    }

    /// The descriptor `from` is gone: the kernel's half, if it stood behind that, stands behind a copy.
    pub fn rename_kernel_half(&mut self, file: FileId, from: RawFd, copy: impl FnOnce() -> Option<RawFd>) {
        let Ok(socket) = self.files.socket(file) else { return };
        if let Shape::Datagrams(dgram) = &mut socket.shape {
            if dgram.kernel == Some(from) {
                dgram.kernel = copy();
            }
            return;
        }
        if socket.bound().is_none_or(|bound| bound.kernel != Some(from)) {
            return;
        }
        let copy = copy();
        match &mut socket.shape {
            Shape::Fresh { bound: Some(bound) } => bound.kernel = copy,
            Shape::Listening(listening) => {
                listening.kernel = listening.kernel.and(copy);
                listening.bound.kernel = copy;
            }
            Shape::Stream(stream) => {
                if let Some(bound) = &mut stream.bound {
                    bound.kernel = copy;
                }
            }
            Shape::Fresh { bound: None } | Shape::Datagrams(_) => {}
        }
    }

    /// Notes for others why a socket is the kernel's.
    pub fn write_down_kernels(&mut self, fd: RawFd, why: Why) {
        let inode = crate::descriptor::borrow(fd).and_then(|fd| Ok(rustix::fs::fstat(fd)?.st_ino));
        if let (Some(book), Ok(inode)) = (&self.book, inode) {
            book.write(fd, Entry::Kernel(why, inode));
        }
    }

    /// The descriptor behind which the kernel's half of a listener stands.
    pub fn kernel_half(&mut self, file: FileId) -> Option<RawFd> {
        match self.files.socket(file) {
            Ok(Socket { shape: Shape::Listening(listening), .. }) => listening.kernel,
            Ok(Socket { shape: Shape::Datagrams(dgram), .. }) => dgram.kernel,
            _ => None,
        }
    }
}
