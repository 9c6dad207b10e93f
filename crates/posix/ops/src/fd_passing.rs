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
use rustix::net::{AddressFamily, SocketType, getpeername, sockopt};

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

/// A kernel socket that was passed to another process in the place of a stack socket behind which it is.
pub(crate) struct PassedKernelSocket {
    /// Its `SO_COOKIE`.
    cookie: u64,
    /// The stack's side of the socket when it was passed last.
    ids: Vec<GlobalSocketId>,
    /// Owns the stack's side.
    owner: HiddenFd,
}

impl PassedKernelSocket {
    /// Returns the descriptor that owns the stack's side.
    pub fn owner(&self) -> &HiddenFd {
        &self.owner
    }
}

impl Ops {
    /// Returns what to send in the place of a stack descriptor. Epoll sets are passed as the kernel object
    /// behind them.
    ///
    /// # Errors
    /// `EBADF`; `EOPNOTSUPP` for a socket with a filter, with a program of a group or with locked filters
    /// that is not on the stack yet; `ENETDOWN` without a stack; `ETOOMANYREFS` if too many sockets are in
    /// transit.
    pub fn pass_fd(&self, fd: RawFd) -> Result<PassedFd, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let of_role = state.kernel_fd(file);
        state.share(file);
        let ProcessState { files, client, .. } = &mut *state;
        let FileKind::Socket(socket) = &files.get(file).kind else { return Ok(PassedFd::Itself) };
        let kernel_fd = match socket.role {
            SocketRole::Unconnected { bound } => bound.and_then(|bound| bound.kernel_fd),
            _ => of_role,
        };
        if matches!(socket.role, SocketRole::Unconnected { .. }) && socket.options.has_program_or_lock() {
            // Nothing would carry the program: the receiver's socket would accept everything.
            return Err(Errno::OPNOTSUPP);
        }
        let (metadata, ids) = serialize(socket, client);
        let attachment = state.attachment.as_ref().ok_or(Errno::NETDOWN)?;
        let share = |passed| attachment.share_with(&ids, &metadata, passed).map_err(|_| Errno::TOOMANYREFS);
        let Some(kernel_fd) = kernel_fd else { return share(None).map(PassedFd::Substitute) };
        // Both sides must arrive, so the kernel socket is sent. No event tells when its last copy is closed,
        // so this process keeps a reference to the stack's side as long as it lives.
        let kernel_fd = borrow(kernel_fd)?;
        let cookie = sockopt::socket_cookie(kernel_fd)?;
        let entry = state.passed_kernel_sockets.iter().position(|entry| entry.cookie == cookie);
        if entry.is_some_and(|at| !ids.is_empty() && state.passed_kernel_sockets[at].ids == ids) {
            return Ok(PassedFd::Itself);
        }
        let owner = HiddenFd::new(share(Some(kernel_fd))?)?;
        let passed = PassedKernelSocket { cookie, ids, owner };
        match entry {
            // The socket listens meanwhile, or has another port.
            Some(at) => state.passed_kernel_sockets[at] = passed,
            None => state.passed_kernel_sockets.push(passed),
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
        let is_kernel_socket = is_passable(received)?;
        let mut state = self.lock()?;
        let ProcessState { attachment, client, .. } = &mut *state;
        let attachment = attachment.as_ref().ok_or(Errno::NETDOWN)?;
        let (ids, metadata) = attachment.resolve_with(client.all_mut(), received).map_err(|_| Errno::BADF)?;
        let file = match state.existing_file(&ids) {
            // This process has the description already.
            Some(file) => file,
            None => {
                let metadata = SerializedSocket::decode(&mut &metadata[..]).ok_or(Errno::INVAL)?;
                state.import_socket(metadata, fd)?
            }
        };
        self.assign_received(&mut state, fd, file, is_kernel_socket)
    }

    /// Makes a received descriptor one of a description, which may be new. If it cannot be, a new description
    /// is removed, which closes the stack's side.
    fn assign_received(
        &self,
        state: &mut ProcessState,
        fd: RawFd,
        file: FileId,
        is_kernel_socket: bool,
    ) -> Result<(), Errno> {
        let mut result = if is_kernel_socket { Ok(()) } else { state.proxy_fds.install_over(fd) };
        if result.is_ok() && !self.fds.set(fd, file) {
            descriptor::close(fd);
            result = Err(Errno::MFILE);
        }
        if result.is_err() && state.files.get(file).refcount == 0 {
            state.free_file(file);
            state.client.flush();
        }
        result?;
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
    /// Returns the description of a socket that another process has serialized: the one that this process has
    /// of an address that is bound, otherwise a new one.
    fn import_socket(&mut self, metadata: SerializedSocket, fd: RawFd) -> Result<FileId, Errno> {
        if let Some(description) = metadata.bound_description()
            && let Some(file) = self.file_of_description(description)
        {
            return Ok(file);
        }
        let socket = self.deserialize_socket(metadata, fd)?;
        let file = self.files.add(FileKind::Socket(Box::new(socket)));
        // The first access applies what was changed while the socket was in transit.
        self.files.get(file).shared_version = Some(0);
        Ok(file)
    }

    /// Returns the description whose address was bound with this number.
    fn file_of_description(&mut self, description: u64) -> Option<FileId> {
        let is_of = |socket: &Socket| socket.bound().is_some_and(|bound| bound.description == description);
        self.files.ids().into_iter().find(|file| self.files.socket(*file).is_ok_and(|socket| is_of(socket)))
    }

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
    metadata.drop_programs();
    let mut bytes = Vec::new();
    metadata.encode(&mut bytes);
    (bytes, ids)
}

/// Checks whether a descriptor is of a kind that can stand for a stack socket, so that the stack need not be
/// asked about others. Returns whether it is a kernel socket, which serves the socket, too.
///
/// # Errors
/// `ENOTSOCK` otherwise.
fn is_passable(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let kind = sockopt::socket_type(fd)?;
    match sockopt::socket_domain(fd)? {
        AddressFamily::UNIX if kind == SocketType::SEQPACKET => Ok(false),
        // Kernel sockets that serve a stack socket, too, have no peer.
        AddressFamily::INET | AddressFamily::INET6
            if matches!(kind, SocketType::STREAM | SocketType::DGRAM)
                && getpeername(fd).err() == Some(Errno::NOTCONN) =>
        {
            Ok(true)
        }
        _ => Err(Errno::NOTSOCK),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OpsConfig;
    use crate::fd_table::FdTable;
    use core::net::SocketAddr;
    use ginnel::channel::{ChannelConfig, ChannelServer};
    use ginnel::config::{Config, DeviceConfig, DeviceKind};
    use ginnel::{Shard, StopFlag};
    use ginnel_devices::memory::{MemoryConfig, pair};

    #[test]
    fn a_description_without_descriptor_leaves_nothing_in_the_stack() {
        let cable = DeviceConfig::new("cable", DeviceKind::Memory);
        let config = Config::single(cable, &["10.0.0.1/24".parse().unwrap()], &[]);
        let channel = ChannelConfig { sockets_max: 64, ..ChannelConfig::default() };
        let server = ChannelServer::new(&channel).unwrap();
        let (device, _) = pair(MemoryConfig::default());
        let mut shard = Shard::builder(config).handler(server).device("cable", device).build().unwrap();
        let commander = shard.commander();
        let client = shard.handler_mut().attach(Box::new(commander)).unwrap();
        let stop = StopFlag::new().unwrap();
        let until = stop.clone();
        let thread = std::thread::spawn(move || shard.run(&until).unwrap());
        let mut ops = Ops::new(client, OpsConfig::default()).unwrap();
        let address: SocketAddr = "10.0.0.1:7".parse().unwrap();
        let address = crate::sockaddr::encode(address, crate::Family::V4);

        for (is_kernel_socket, error) in [(false, Errno::BADF), (true, Errno::MFILE)] {
            let fd = ops.socket(libc::AF_INET, libc::SOCK_DGRAM, 0).unwrap();
            assert_eq!(ops.bind(fd, address.bytes()), Ok(()), "the address must be free again");
            // The description becomes as it is when it has just arrived.
            let file = ops.fds.take(fd).unwrap();
            // No descriptor has the largest number, so no proxy can be put behind it.
            let arrived = if is_kernel_socket { fd } else { RawFd::MAX };
            if is_kernel_socket {
                ops.fds = FdTable::with_len(0);
            } else {
                descriptor::close(fd);
            }
            let mut state = ops.lock().unwrap();
            let entry = state.files.get(file);
            (entry.refcount, entry.fd_count) = (0, 0);
            assert_eq!(ops.assign_received(&mut state, arrived, file, is_kernel_socket), Err(error));
            assert!(state.files.ids().is_empty());
        }

        drop(ops);
        stop.stop();
        thread.join().unwrap();
    }
}
