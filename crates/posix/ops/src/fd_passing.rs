//! Sockets that travel to other processes in messages over Unix sockets (`SCM_RIGHTS`), and such that come (docs/adr/0012-holders-and-placeholders.md).

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

/// What goes in a message in the place of a descriptor.
pub enum PassedFd {
    /// This one, which may be closed once the message is sent.
    Substitute(OwnedFd),
    /// The descriptor itself: what the kernel has behind it says what it stands for.
    Itself,
}

impl PassedFd {
    /// The number for the message, of a socket that is `fd` here.
    pub fn number(&self, fd: RawFd) -> RawFd {
        match self {
            Self::Substitute(other) => other.as_raw_fd(),
            Self::Itself => fd,
        }
    }
}

impl Ops {
    /// What to send in the place of a descriptor of ours. Epoll sets, and sockets that are neither connected nor listen, travel as what the kernel has behind them.
    ///
    /// # Errors
    /// `EBADF`; `ETOOMANYREFS`: as many as may be are on their way.
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
        // Both halves have to arrive, so the kernel's travels. Nobody tells when its last copy is gone: the stack's half is held as long as this process lives.
        let half = borrow(half)?;
        let cookie = sockopt::socket_cookie(half)?;
        if !lane.passed_listeners.iter().any(|(known, _)| *known == cookie) {
            let holds = HiddenFd::new(share(Some(half))?);
            lane.passed_listeners.push((cookie, holds));
        }
        Ok(PassedFd::Itself)
    }

    /// Whether a descriptor that came in a message could stand for a socket of a stack's.
    pub fn may_be_stack_socket(fd: RawFd) -> bool {
        borrow(fd).and_then(is_passable).is_ok()
    }

    /// A descriptor came in a message. If it stands for a socket of the stack's, it is ours from now on.
    pub fn receive_fd(&self, fd: RawFd) {
        // Whatever is none of ours stays as it came.
        let _ = borrow(fd).and_then(|received| self.import_fd(fd, received));
    }

    fn import_fd(&self, fd: RawFd, received: BorrowedFd<'_>) -> Result<(), Errno> {
        let listener = is_passable(received)?;
        let mut lane = self.lock()?;
        let ProcessState { attachment: process, client, .. } = &mut *lane;
        let process = process.as_ref().ok_or(Errno::NETDOWN)?;
        let (held, note) = process.resolve_with(client.all_mut(), received).map_err(|_| Errno::BADF)?;
        let file = match lane.existing_file(&held) {
            // A copy of one that this process has.
            Some(file) => file,
            None => {
                let note = SerializedSocket::decode(&mut &note[..]).ok_or(Errno::INVAL)?;
                let socket = lane.deserialize_socket(note, fd)?;
                let file = lane.files.add(FileKind::Socket(Box::new(socket)));
                // What was changed while it was on its way is told by the first look.
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
    /// The description that this process has of these things already.
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

/// A socket for another process, in bytes.
fn serialize(socket: &Socket, channels: &Channels) -> (Vec<u8>, Vec<GlobalSocketId>) {
    let (note, held) = serialize_socket(socket, channels);
    let mut bytes = Vec::new();
    note.encode(&mut bytes);
    (bytes, held)
}

/// Whether a descriptor can be one that stands for a socket of the stack's: of all others the stack need not be asked. True if it is a listener of the kernel's.
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
