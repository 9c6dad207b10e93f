//! Sockets that become kernel sockets, and the kernel sockets of listeners that also serve the kernel.

use crate::Ops;
use crate::descriptor_report::{KernelReason, ReportEntry};
use crate::fd_table::FileId;
use crate::file::{FileKind, Socket, SocketRole};
use crate::options::NETNS_COOKIE;
use crate::options::Setting;
use crate::options::filter::set_on_kernel;
use crate::options::reuseport::set_group_program_on_kernel;
use crate::process::ProcessState;
use crate::sockaddr::{self, Family, SockaddrBytes};
use crate::syscall;
use core::ffi::c_int;
use core::net::SocketAddr;
use ginnel::channel::AddressSharing;
use rustix::fd::{AsRawFd, RawFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

impl Ops {
    /// Puts a kernel socket behind a descriptor, with the options that the program has set. The descriptor
    /// still belongs to the stack.
    pub(crate) fn open_kernel_socket(
        &self,
        state: &mut ProcessState,
        fd: RawFd,
        file: FileId,
    ) -> Result<(), Errno> {
        let socket = state.files.socket(file)?;
        let family = match socket.family {
            Family::V4 => AddressFamily::INET,
            Family::V6 => AddressFamily::INET6,
        };
        let flags = if socket.nonblocking { SocketFlags::NONBLOCK } else { SocketFlags::empty() };
        let kind = if socket.is_udp { SocketType::DGRAM } else { SocketType::STREAM };
        let kernel_socket = socket_with(family, kind, flags | SocketFlags::CLOEXEC, None)?;
        // Before the settings, one of which may lock the filter.
        if let Some(filter) = socket.options.filter_code() {
            set_on_kernel(kernel_socket.as_raw_fd(), &filter)?;
        }
        repeat_settings(kernel_socket.as_raw_fd(), socket.options.settings_log());
        if let Some(program) = socket.options.group_program().filter(|program| !program.is_empty()) {
            // Refused if filters were locked after it was set, and without `SO_REUSEPORT`.
            let _ = set_group_program_on_kernel(kernel_socket.as_raw_fd(), Some(&program));
        }
        let cloexec = rustix::io::fcntl_getfd(crate::descriptor::borrow(fd)?)?;
        let flags = if cloexec.contains(rustix::io::FdFlags::CLOEXEC) { libc::O_CLOEXEC } else { 0 };
        syscall::dup3(kernel_socket.as_raw_fd(), fd, flags)
    }

    /// Turns a socket that the stack does not serve into a kernel socket.
    ///
    /// # Errors
    /// `ENETUNREACH` if the description has further descriptors: they would remain proxies.
    pub(crate) fn convert_to_kernel(
        &self,
        state: &mut ProcessState,
        fd: RawFd,
        file: FileId,
    ) -> Result<(), Errno> {
        let shared = state.files.get(file).fd_count > 1;
        if shared {
            // The other descriptors would remain proxies.
            return Err(Errno::NETUNREACH);
        }
        self.open_kernel_socket(state, fd, file)?;
        self.detach_fd(state, fd, file);
        Ok(())
    }

    /// Closes the stack's side of a socket, which its kernel socket serves alone from now on.
    ///
    /// # Errors
    /// `ENETUNREACH` if the description has further descriptors, as in
    /// [`convert_to_kernel`](Self::convert_to_kernel).
    pub(crate) fn drop_stack_side(
        &self,
        state: &mut ProcessState,
        fd: RawFd,
        file: FileId,
    ) -> Result<(), Errno> {
        if state.files.get(file).fd_count > 1 {
            return Err(Errno::NETUNREACH);
        }
        if state.files.socket(file)?.nonblocking {
            set_nonblocking(fd)?;
        }
        self.detach_fd(state, fd, file);
        Ok(())
    }

    fn detach_fd(&self, state: &mut ProcessState, fd: RawFd, file: FileId) {
        self.fds.take(fd);
        state.report_kernel_socket(fd, KernelReason::Unreachable);
        state.files.get(file).fd_count = 0;
        state.free_file(file);
    }
}

/// Checks whether the kernel accepts an option for a new socket.
pub(crate) fn try_option(family: Family, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
    let family = match family {
        Family::V4 => AddressFamily::INET,
        Family::V6 => AddressFamily::INET6,
    };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    syscall::setsockopt(socket.as_raw_fd(), level, name, value)
}

/// Returns the number of the calling thread's network namespace (`SO_NETNS_COOKIE`).
pub(crate) fn netns_cookie() -> Result<[u8; 8], Errno> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let mut cookie = [0; 8];
    syscall::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, NETNS_COOKIE, &mut cookie)?;
    Ok(cookie)
}

/// Sets options on a kernel socket as the program has set them. If the kernel does not accept one any more,
/// it has no use for it.
fn repeat_settings(kernel_fd: RawFd, settings: &[Setting]) {
    for (level, name, value) in settings {
        let _ = syscall::setsockopt(kernel_fd, *level, *name, value);
    }
}

/// Lets the kernel share the address of a socket that connected before, after which its settings are not
/// recorded any more.
pub(crate) fn repeat_sharing(kernel_fd: RawFd, sharing: AddressSharing) {
    let options = [(libc::SO_REUSEADDR, sharing.reuse_address), (libc::SO_REUSEPORT, sharing.reuse_port)];
    for (name, _) in options.into_iter().filter(|(_, is_on)| *is_on) {
        let _ = syscall::setsockopt(kernel_fd, libc::SOL_SOCKET, name, &1_i32.to_ne_bytes());
    }
}

/// Checks whether the kernel accepts an option for a new datagram socket with earlier options.
pub(crate) fn try_datagram_option(
    family: Family,
    earlier: &[Setting],
    level: c_int,
    name: c_int,
    value: &[u8],
) -> Result<(), Errno> {
    let family = match family {
        Family::V4 => AddressFamily::INET,
        Family::V6 => AddressFamily::INET6,
    };
    let socket = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    repeat_settings(socket.as_raw_fd(), earlier);
    syscall::setsockopt(socket.as_raw_fd(), level, name, value)
}

/// Makes a kernel socket non-blocking: after the socket was reported ready, another process may take the
/// connection or data first.
pub(crate) fn set_nonblocking(fd: RawFd) -> Result<(), Errno> {
    rustix::fs::fcntl_setfl(crate::descriptor::borrow(fd)?, rustix::fs::OFlags::NONBLOCK)
}

/// Returns the address that the kernel has chosen.
pub(crate) fn local_address(fd: RawFd, family: Family) -> Result<SocketAddr, Errno> {
    let mut bytes = [0u8; 128];
    let len = syscall::getsockname(fd, &mut bytes)?;
    sockaddr::decode(bytes.get(..len).ok_or(Errno::INVAL)?, family)
}

/// Accepts a connection from the kernel without waiting.
///
/// # Errors
/// `EAGAIN` if there is none.
pub(crate) fn accept(fd: RawFd, flags: c_int, family: Family) -> Result<(RawFd, SockaddrBytes), Errno> {
    let mut ready = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
    if crate::sleep::poll_now(&mut ready)? == 0 {
        return Err(Errno::AGAIN);
    }
    let mut bytes = [0u8; 128];
    let (new, len) = syscall::accept4(fd, &mut bytes, flags)?;
    let peer = bytes.get(..len).and_then(|bytes| sockaddr::decode(bytes, family).ok());
    Ok((new, sockaddr::encode(peer.unwrap_or(family.unspecified()), family)))
}

impl ProcessState {
    /// Returns whether a kernel object is behind a description's descriptors, not just proxies.
    pub fn has_kernel_socket(&mut self, file: FileId) -> bool {
        match &self.files.get(file).kind {
            FileKind::Epoll(_) => true,
            FileKind::Free => false,
            FileKind::Socket(socket) => match socket.role {
                SocketRole::Udp(udp) => udp.kernel_fd.is_some(),
                _ => socket.bound().is_some_and(|bound| bound.kernel_fd.is_some()),
            },
        }
    }

    /// Replaces the descriptor by which the kernel socket of a description is reached, if that is `from`,
    /// which is closed. `copy` returns the new descriptor.
    pub fn move_kernel_socket(&mut self, file: FileId, from: RawFd, copy: impl FnOnce() -> Option<RawFd>) {
        let Ok(socket) = self.files.socket(file) else { return };
        if let SocketRole::Udp(udp) = &mut socket.role {
            if udp.kernel_fd == Some(from) {
                udp.kernel_fd = copy();
            }
            return;
        }
        if socket.bound().is_none_or(|bound| bound.kernel_fd != Some(from)) {
            return;
        }
        let copy = copy();
        match &mut socket.role {
            SocketRole::Unconnected { bound: Some(bound) } => bound.kernel_fd = copy,
            SocketRole::Listening(listening) => {
                listening.kernel_fd = listening.kernel_fd.and(copy);
                listening.bound.kernel_fd = copy;
            }
            SocketRole::Stream(stream) => {
                if let Some(bound) = &mut stream.bound {
                    bound.kernel_fd = copy;
                }
            }
            SocketRole::Unconnected { bound: None } | SocketRole::Udp(_) => {}
        }
    }

    /// Writes to the descriptor report why a socket is a kernel socket.
    pub fn report_kernel_socket(&mut self, fd: RawFd, reason: KernelReason) {
        let inode = crate::descriptor::borrow(fd).and_then(|fd| Ok(rustix::fs::fstat(fd)?.st_ino));
        if let (Some(report), Ok(inode)) = (&self.report, inode) {
            report.write(fd, ReportEntry::Kernel(reason, inode));
        }
    }

    /// Returns the descriptor by which the kernel socket of a listener or UDP socket is reached.
    pub fn kernel_fd(&mut self, file: FileId) -> Option<RawFd> {
        match self.files.socket(file) {
            Ok(Socket { role: SocketRole::Listening(listening), .. }) => listening.kernel_fd,
            Ok(Socket { role: SocketRole::Udp(udp), .. }) => udp.kernel_fd,
            _ => None,
        }
    }

    /// Returns the descriptor to poll beside the stack: that of the kernel socket of a listener or UDP
    /// socket, or the epoll instance with the kernel descriptors of an epoll set.
    pub fn polled_kernel_fd(&mut self, file: FileId) -> Option<RawFd> {
        match &mut self.files.get(file).kind {
            FileKind::Epoll(set) => {
                set.ban_direct_sleep();
                Some(set.kernel_epoll().fd)
            }
            _ => self.kernel_fd(file),
        }
    }
}
