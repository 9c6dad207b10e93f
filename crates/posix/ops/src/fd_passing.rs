//! Passing of sockets to other processes, in control messages over Unix sockets (`SCM_RIGHTS`;
//! docs/adr/0012-owners-and-proxy-descriptors.md).

use crate::Ops;
use crate::channels::Channels;
use crate::descriptor::{self, HiddenFd, borrow};
use crate::exec::{SerializedSocket, serialize_socket};
use crate::fd_table::FileId;
use crate::file::{FileKind, Socket, SocketRole};
use crate::process::ProcessState;
use ginnel::Conn;
use ginnel::broker::GlobalSocketId;
use ginnel::broker::codec::Codec;
use ginnel::channel::SocketId;
use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};

/// Item that a control message carries in the place of a stack descriptor.
pub enum PassedFd {
    /// This descriptor, which may be closed after the message was sent.
    Substitute(OwnedFd),
    /// The descriptor itself: the kernel object behind it identifies the socket.
    Itself,
}

impl PassedFd {
    /// Returns the socket's number for the message, given its number in this process.
    pub fn number(&self, fd: RawFd) -> RawFd {
        match self {
            Self::Substitute(other) => other.as_raw_fd(),
            Self::Itself => fd,
        }
    }
}

impl Ops {
    /// Returns what to send in the place of a stack descriptor. Epoll sets, and sockets that are neither
    /// connected nor listening, are passed as the kernel object behind them.
    ///
    /// # Errors
    /// `EBADF`; `EOPNOTSUPP` for a socket with a filter that is not on the stack yet; `ENETDOWN`
    /// without a stack; `ETOOMANYREFS` if too many sockets are in transit.
    pub fn pass_fd(&self, fd: RawFd) -> Result<PassedFd, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let kernel_fd = state.kernel_fd(file);
        state.share(file);
        let ProcessState { files, client, .. } = &mut *state;
        let FileKind::Socket(socket) = &files.get(file).kind else { return Ok(PassedFd::Itself) };
        if matches!(socket.role, SocketRole::Unconnected { .. }) {
            if socket.options.has_filter_or_lock() {
                // Nothing would carry the filter: the receiver's socket would accept everything.
                return Err(Errno::OPNOTSUPP);
            }
            return Ok(PassedFd::Itself);
        }
        let (metadata, ids) = serialize(socket, client);
        let attachment = state.attachment.as_ref().ok_or(Errno::NETDOWN)?;
        let share = |passed| attachment.share_with(&ids, &metadata, passed).map_err(|_| Errno::TOOMANYREFS);
        let Some(kernel_fd) = kernel_fd else { return share(None).map(PassedFd::Substitute) };
        // Both sides must arrive, so the kernel socket is sent. No event tells when its last copy is closed,
        // so this process keeps a reference to the stack's side as long as it lives.
        let kernel_fd = borrow(kernel_fd)?;
        let cookie = sockopt::socket_cookie(kernel_fd)?;
        if !state.passed_listeners.iter().any(|(entry, _)| *entry == cookie) {
            let owner = HiddenFd::new(share(Some(kernel_fd))?)?;
            state.passed_listeners.push((cookie, owner));
        }
        Ok(PassedFd::Itself)
    }

    /// Returns whether a received descriptor may stand for a stack socket.
    pub fn may_be_stack_socket(fd: RawFd) -> bool {
        borrow(fd).and_then(is_passable).is_ok()
    }

    /// Takes over a received descriptor, if it stands for a socket of the stack.
    pub fn receive_fd(&self, fd: RawFd) {
        // All other descriptors stay as they are.
        let _ = borrow(fd).and_then(|received| self.import_fd(fd, received));
    }

    fn import_fd(&self, fd: RawFd, received: BorrowedFd<'_>) -> Result<(), Errno> {
        let listener = is_passable(received)?;
        let mut state = self.lock()?;
        let ProcessState { attachment, client, .. } = &mut *state;
        let attachment = attachment.as_ref().ok_or(Errno::NETDOWN)?;
        let (ids, metadata) = attachment.resolve_with(client.all_mut(), received).map_err(|_| Errno::BADF)?;
        let file = match state.existing_file(&ids) {
            // This process has the description already.
            Some(file) => file,
            None => {
                let metadata = SerializedSocket::decode(&mut &metadata[..]).ok_or(Errno::INVAL)?;
                let socket = state.deserialize_socket(metadata, fd)?;
                let file = state.files.add(FileKind::Socket(Box::new(socket)));
                // The first access applies what was changed while the socket was in transit.
                state.files.get(file).shared_version = Some(0);
                file
            }
        };
        if !listener {
            state.proxy_fds.install_over(fd)?;
        }
        if !self.fds.set(fd, file) {
            descriptor::close(fd);
            return Err(Errno::MFILE);
        }
        let entry = state.files.get(file);
        entry.refcount += 1;
        entry.fd_count += 1;
        if entry.fd_count == 1 {
            state.activate(file)?;
        }
        state.report_fd(fd, file);
        state.client.flush();
        Ok(())
    }
}

impl ProcessState {
    /// Returns the description that this process has of these identifiers.
    fn existing_file(&mut self, ids: &[GlobalSocketId]) -> Option<FileId> {
        let first = ids.first()?;
        match first.id {
            SocketId::Socket { socket, generation } => {
                let conn = self.client.conn_of(first.shard, Conn::new(socket, generation));
                self.file_of(conn)
            }
            SocketId::Listener(number) => {
                let number = self.client.listener_of(first.shard, number)?;
                self.file_of_listener(number)
            }
        }
    }
}

/// Serializes a socket for another process, and lists what that process will own.
fn serialize(socket: &Socket, channels: &Channels) -> (Vec<u8>, Vec<GlobalSocketId>) {
    let (mut metadata, ids) = serialize_socket(socket, channels);
    metadata.drop_filter_code();
    let mut bytes = Vec::new();
    metadata.encode(&mut bytes);
    (bytes, ids)
}

/// Checks whether a descriptor is of a kind that can stand for a stack socket, so that the stack need not be
/// asked about others. Returns whether it is a kernel listener.
///
/// # Errors
/// `ENOTSOCK` otherwise.
fn is_passable(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let kind = sockopt::socket_type(fd)?;
    match sockopt::socket_domain(fd)? {
        AddressFamily::UNIX if kind == SocketType::SEQPACKET => Ok(false),
        AddressFamily::INET | AddressFamily::INET6
            if kind == SocketType::STREAM && sockopt::socket_acceptconn(fd)? =>
        {
            Ok(true)
        }
        _ => Err(Errno::NOTSOCK),
    }
}
