//! Passing of sockets to other processes, in control messages over Unix sockets (`SCM_RIGHTS`;
//! docs/adr/0012-holders-and-placeholders.md).

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

/// What a control message carries in the place of a stack descriptor.
pub enum PassedFd {
    /// This descriptor, which may be closed after the message was sent.
    Substitute(OwnedFd),
    /// The descriptor itself: the kernel object behind it identifies the socket.
    Itself,
}

impl PassedFd {
    /// Returns the number for the message, given the socket's number here.
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
    /// `EBADF`; `ENETDOWN` without a stack; `ETOOMANYREFS` if too many sockets are in transit.
    pub fn pass_fd(&self, fd: RawFd) -> Result<PassedFd, Errno> {
        let mut lane = self.lock()?;
        let file = self.file_of(&mut lane, fd)?;
        let half = lane.kernel_fd(file);
        lane.share(file);
        let ProcessState { files, client, .. } = &mut *lane;
        let FileKind::Socket(socket) = &files.get(file).kind else { return Ok(PassedFd::Itself) };
        if matches!(socket.role, SocketRole::Unconnected { .. }) {
            return Ok(PassedFd::Itself);
        }
        let (note, held) = serialize(socket, client);
        let process = lane.attachment.as_ref().ok_or(Errno::NETDOWN)?;
        let share = |travels| process.share_with(&held, &note, travels).map_err(|_| Errno::TOOMANYREFS);
        let Some(half) = half else { return share(None).map(PassedFd::Substitute) };
        // Both sides must arrive, so the kernel socket is sent. No event tells when its last copy is closed,
        // so this process keeps a reference to the stack's side as long as it lives.
        let half = borrow(half)?;
        let cookie = sockopt::socket_cookie(half)?;
        if !lane.passed_listeners.iter().any(|(known, _)| *known == cookie) {
            let holds = HiddenFd::new(share(Some(half))?);
            lane.passed_listeners.push((cookie, holds));
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
        let mut lane = self.lock()?;
        let ProcessState { attachment: process, client, .. } = &mut *lane;
        let process = process.as_ref().ok_or(Errno::NETDOWN)?;
        let (held, note) = process.resolve_with(client.all_mut(), received).map_err(|_| Errno::BADF)?;
        let file = match lane.existing_file(&held) {
            // This process has the description already.
            Some(file) => file,
            None => {
                let note = SerializedSocket::decode(&mut &note[..]).ok_or(Errno::INVAL)?;
                let socket = lane.deserialize_socket(note, fd)?;
                let file = lane.files.add(FileKind::Socket(Box::new(socket)));
                // The first access applies what was changed while the socket was in transit.
                lane.files.get(file).shared_version = Some(0);
                file
            }
        };
        if !listener {
            lane.proxy_fds.install_over(fd)?;
        }
        if !self.fds.set(fd, file) {
            descriptor::close(fd);
            return Err(Errno::MFILE);
        }
        let known = lane.files.get(file);
        known.refcount += 1;
        known.fd_count += 1;
        if known.fd_count == 1 {
            lane.activate(file)?;
        }
        lane.report_fd(fd, file);
        lane.client.flush();
        Ok(())
    }
}

impl ProcessState {
    /// Returns the description that this process has of these identifiers.
    fn existing_file(&mut self, held: &[GlobalSocketId]) -> Option<FileId> {
        let first = held.first()?;
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
    let (note, held) = serialize_socket(socket, channels);
    let mut bytes = Vec::new();
    note.encode(&mut bytes);
    (bytes, held)
}

/// Checks whether a descriptor is of a kind that can stand for a stack socket, so that the stack need not be
/// asked about others. Returns whether it is a kernel listener.
///
/// # Errors
/// `ENOTSOCK` if it is not of such a kind.
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
