//! Inheritance of sockets that are not close-on-exec, when the process executes or starts a program
//! (docs/adr/0012-owners-and-proxy-descriptors.md).

use crate::channels::Channels;
use crate::descriptor::{ExecGuard, HiddenFd, borrow};
use crate::epoll::{EpollEvent, EpollSet};
use crate::fd_table::FileId;
use crate::file::{
    BoundAddress, FOREIGN_RESERVATION, FileKind, Listener, ShutdownState, Socket, SocketRole, Stream,
    UdpSendState, UdpSocket, UrgentState,
};
use crate::options::SocketOptionState;
use crate::process::ProcessState;
use crate::sockaddr::Family;
use crate::wait_queue::WaitEntry;
use crate::{Ops, OpsConfig};
use core::net::SocketAddr;
use ginnel::Conn;
use ginnel::broker::codec::Codec;
use ginnel::broker::{Attachment, GlobalSocketId, PreparedProcess};
use ginnel::channel::{Reservation, SocketId};
use ginnel::codec_struct;
use ginnel::internal_fd::InternalFd;
use rustix::fd::{AsRawFd, OwnedFd, RawFd};
use rustix::fs::fstat;
use rustix::io::{Errno, FdFlags, fcntl_getfd, fcntl_setfd};
use std::collections::BTreeMap;

/// Sockets that the next program inherits. If that program does not run, dropping the value cancels the
/// inheritance.
pub struct Inheritance {
    connection: HiddenFd,
    table: HiddenFd,
}

impl Inheritance {
    /// Clears the close-on-exec flag of the two descriptors that the program needs for
    /// [`Ops::from_inheritance`], and returns them.
    ///
    /// # Errors
    /// `EBADF` if the program has closed them without the hooks.
    pub fn clear_cloexec(&self) -> Result<[RawFd; 2], Errno> {
        for fd in [&self.connection, &self.table] {
            fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok([self.connection.as_raw_fd(), self.table.as_raw_fd()])
    }
}

/// A descriptor of the next program.
struct InheritedFd {
    /// Its number in the next program.
    number: i32,
    /// Index of its description in the serialized table.
    file_index: u32,
    /// Inode of the kernel object behind it, which tells whether the number was closed or reused meanwhile.
    inode: u64,
}
codec_struct!(InheritedFd { number, file_index, inode });

/// A socket, with identifiers that are valid in all processes.
pub(crate) struct SerializedSocket {
    family: u8,
    is_udp: bool,
    destinations: Vec<SocketAddr>,
    nonblocking: bool,
    options: SocketOptionState,
    shutdown: ShutdownState,
    role: SerializedRole,
    cookie: u64,
    last_address: Option<SocketAddr>,
}
codec_struct!(SerializedSocket {
    family,
    is_udp,
    destinations,
    nonblocking,
    options,
    shutdown,
    role,
    cookie,
    last_address
});
impl SerializedSocket {
    /// Returns the number of the open file description if its socket is bound, and neither connected nor
    /// listening.
    pub fn bound_description(&self) -> Option<u64> {
        match &self.role {
            SerializedRole::Unconnected(Some(bound)) => Some(bound.description).filter(|number| *number != 0),
            _ => None,
        }
    }

    /// Removes the programs: the receiver asks the stack for that of the filter.
    pub fn drop_programs(&mut self) {
        self.options.drop_programs();
    }
}

codec_struct!(ShutdownState { read, write } defaults { is_lost: false, error: None });

enum SerializedRole {
    Unconnected(Option<SerializedAddress>),
    Listening(SerializedListener),
    Stream(SerializedStream),
    Udp(SerializedUdp),
}

impl Codec for SerializedRole {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Unconnected(bound) => {
                0u8.encode(out);
                bound.encode(out);
            }
            Self::Listening(listening) => {
                1u8.encode(out);
                listening.encode(out);
            }
            Self::Stream(stream) => {
                2u8.encode(out);
                stream.encode(out);
            }
            Self::Udp(socket) => {
                3u8.encode(out);
                socket.encode(out);
            }
        }
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some(match u8::decode(from)? {
            0 => Self::Unconnected(Codec::decode(from)?),
            1 => Self::Listening(Codec::decode(from)?),
            2 => Self::Stream(Codec::decode(from)?),
            3 => Self::Udp(Codec::decode(from)?),
            _ => return None,
        })
    }
}

struct SerializedAddress {
    address: SocketAddr,
    port_locked: bool,
    /// True if a kernel socket is behind the descriptor.
    has_kernel_socket: bool,
    description: u64,
}
codec_struct!(SerializedAddress { address, port_locked, has_kernel_socket, description });

struct SerializedListener {
    /// The listener's number on each shard.
    numbers: Vec<u32>,
    bound: SerializedAddress,
    accepting: bool,
    backlog: u32,
    has_kernel_socket: bool,
}
codec_struct!(SerializedListener { numbers, bound, accepting, backlog, has_kernel_socket });

struct SerializedStream {
    /// The shard, and the handle of the connection there.
    shard: u16,
    socket: u32,
    generation: u32,
    connecting: bool,
    disconnecting: bool,
    error: Option<Errno>,
    end_seen: bool,
    msg_more: bool,
    bound: Option<SerializedAddress>,
    is_rebound: bool,
}
codec_struct!(SerializedStream {
    shard,
    socket,
    generation,
    connecting,
    disconnecting,
    error,
    end_seen,
    msg_more,
    bound,
    is_rebound
});

struct SerializedUdp {
    /// The shard, and the handle of the socket there.
    shard: u16,
    socket: u32,
    generation: u32,
    port_locked: bool,
    address_locked: bool,
    peer: Option<SocketAddr>,
    has_kernel_socket: bool,
    shut_read: bool,
    shut_write: bool,
}
codec_struct!(SerializedUdp {
    shard,
    socket,
    generation,
    port_locked,
    address_locked,
    peer,
    has_kernel_socket,
    shut_read,
    shut_write
});

/// An item of an epoll set: its descriptor and description, and whether it was in the ready list.
struct SerializedEpollItem {
    fd: i32,
    file_index: u32,
    events: u32,
    data: u64,
    queued: bool,
}
codec_struct!(SerializedEpollItem { fd, file_index, events, data, queued });

/// An open file description.
enum SerializedFile {
    Socket(Box<SerializedSocket>),
    /// The items, those of the ready list first and in its order, and the number of kernel descriptors in the
    /// set.
    Epoll(Vec<SerializedEpollItem>, u32),
}

impl Codec for SerializedFile {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Socket(socket) => {
                0u8.encode(out);
                socket.encode(out);
            }
            Self::Epoll(items, kernel) => {
                1u8.encode(out);
                items.encode(out);
                kernel.encode(out);
            }
        }
    }

    fn decode(from: &mut &[u8]) -> Option<Self> {
        Some(match u8::decode(from)? {
            0 => Self::Socket(Box::new(Codec::decode(from)?)),
            1 => Self::Epoll(Codec::decode(from)?, Codec::decode(from)?),
            _ => return None,
        })
    }
}

impl ExecGuard<'_> {
    /// Prepares the inheritance of sockets by the program that is executed or started. `fds_to_keep` lists
    /// the descriptors, as pairs of the number in the new program and the number in this process. A program
    /// that inherits no sockets needs no inheritance.
    ///
    /// # Errors
    /// Why the stack refuses the program; a socket that cannot be left to a program; `EMFILE`, `ENFILE`.
    pub fn prepare_inheritance(
        &mut self,
        fds_to_keep: &[(RawFd, RawFd)],
    ) -> Result<Inheritance, ginnel::Error> {
        let io = |what: &str| {
            let what = what.to_owned();
            move |e: Errno| ginnel::Error::io(what, e)
        };
        let serialized = self.ops.serialize_fds(&mut self.state, fds_to_keep);
        let (ids, serialized) = serialized.map_err(io("state of the sockets"))?;
        let attachment = self.state.attachment.as_ref().ok_or(ginnel::Error::StackGone)?;
        let prepared = attachment.prepare_exec(&ids)?;
        let table = PreparedProcess::inheritance_table(&ids, &serialized)?;
        let connection =
            HiddenFd::copy_of(prepared.connection()).map_err(io("connection for the program"))?;
        let table = HiddenFd::new(table).map_err(io("inheritance table"))?;
        Ok(Inheritance { connection, table })
    }

    /// Returns a control connection for a program that inherits nothing else
    /// ([`Attachment::successor_connection`]).
    ///
    /// # Errors
    /// `ENETDOWN` if the stack is gone, or if there are no descriptors.
    pub fn new_connection(&self) -> Result<InternalFd, Errno> {
        let attachment = self.state.attachment.as_ref().ok_or(Errno::NETDOWN)?;
        attachment.successor_connection().map_err(|_| Errno::NETDOWN)
    }
}

impl Ops {
    /// Returns the stack's descriptors that an executed program keeps.
    pub fn inheritable(&self) -> Vec<RawFd> {
        let is_kept = |fd: &RawFd| {
            let flags = borrow(*fd).and_then(fcntl_getfd);
            flags.is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
        };
        self.fds.range(0, RawFd::MAX).filter(is_kept).collect()
    }

    fn serialize_fds(
        &self,
        state: &mut ProcessState,
        fds_to_keep: &[(RawFd, RawFd)],
    ) -> Result<(Vec<GlobalSocketId>, Vec<u8>), Errno> {
        let (mut fds, mut files, mut ids) = (Vec::new(), BTreeMap::new(), Vec::new());
        for &(number, local_fd) in fds_to_keep {
            let Some(file) = self.fds.get(local_fd) else { continue };
            let count = files.len() as u32;
            let file = *files.entry(file).or_insert(count);
            fds.push(InheritedFd { number, file_index: file, inode: fstat(borrow(local_fd)?)?.st_ino });
        }
        let mut by_index: Vec<(FileId, u32)> =
            files.iter().map(|(id, file_index)| (*id, *file_index)).collect();
        by_index.sort_by_key(|(_, file_index)| *file_index);
        let mut serialized_files = Vec::new();
        for (id, _) in by_index {
            state.share(id);
            serialized_files.push(match &state.files.get(id).kind {
                FileKind::Socket(socket) => {
                    let (serialized, socket_ids) = serialize_socket(socket, &state.client);
                    ids.extend(socket_ids);
                    SerializedFile::Socket(Box::new(serialized))
                }
                FileKind::Epoll(set) => {
                    let items = set.entries().filter_map(|(fd, file, event, queued)| {
                        let file = *files.get(&file)?;
                        Some(SerializedEpollItem {
                            fd,
                            file_index: file,
                            events: event.events,
                            data: event.data,
                            queued,
                        })
                    });
                    SerializedFile::Epoll(items.collect(), set.kernel_items() as u32)
                }
                FileKind::Free => return Err(Errno::BADF),
            });
        }
        let mut serialized = Vec::new();
        fds.encode(&mut serialized);
        serialized_files.encode(&mut serialized);
        Ok((ids, serialized))
    }

    /// Returns the socket calls of a program that inherits the descriptors of [`Inheritance::clear_cloexec`].
    /// The inherited sockets have the numbers that they had before.
    ///
    /// # Errors
    /// `ENETDOWN` if the stack is gone, `EINVAL` if the descriptors are not the library's; `EMFILE`,
    /// `ENFILE`.
    pub fn from_inheritance(
        connection: OwnedFd,
        table: OwnedFd,
        config: impl FnOnce(&Attachment) -> OpsConfig,
    ) -> Result<Self, Errno> {
        fcntl_setfd(&connection, FdFlags::CLOEXEC)?;
        let (attachment, ids, serialized) =
            Attachment::inherit(connection, table).map_err(|error| match error {
                ginnel::Error::StackGone => Errno::NETDOWN,
                _ => Errno::INVAL,
            })?;
        let config = config(&attachment);
        let ops = Self::from_process(attachment, config)?;
        let mut rest = &serialized[..];
        let (fds, files) =
            <(Vec<InheritedFd>, Vec<SerializedFile>)>::decode(&mut rest).ok_or(Errno::INVAL)?;
        let mut state = ops.lock()?;
        ops.restore(&mut state, &fds, files)?;
        state.drop_unclaimed(&ids);
        ops.rebuild_report(&mut state);
        state.client.flush();
        drop(state);
        Ok(ops)
    }

    fn restore(
        &self,
        state: &mut ProcessState,
        fds: &[InheritedFd],
        files: Vec<SerializedFile>,
    ) -> Result<(), Errno> {
        // Skips descriptors that were closed or reused meanwhile.
        let is_unchanged = |fd: &&InheritedFd| {
            let current = borrow(fd.number).and_then(|fd| Ok(fstat(fd)?.st_ino));
            current.is_ok_and(|inode| inode == fd.inode)
        };
        let fds: Vec<&InheritedFd> = fds.iter().filter(is_unchanged).collect();
        let first = |file_index: usize| {
            fds.iter().find(|fd| fd.file_index as usize == file_index).map(|fd| fd.number)
        };
        let mut ids = vec![None; files.len()];
        let mut sets = Vec::new();
        for (file_index, serialized) in files.into_iter().enumerate() {
            let Some(number) = first(file_index) else { continue };
            let kind = match serialized {
                SerializedFile::Socket(serialized) => {
                    FileKind::Socket(Box::new(state.deserialize_socket(*serialized, number)?))
                }
                SerializedFile::Epoll(items, kernel_items) => {
                    let own = HiddenFd::copy_of(borrow(number)?)?;
                    sets.push((file_index, items));
                    FileKind::Epoll(Box::new(EpollSet::from_inherited(own, kernel_items as usize)))
                }
            };
            let id = state.files.add(kind);
            // Other processes may share the description; the first access applies what they have changed.
            state.files.get(id).shared_version = Some(0);
            ids[file_index] = Some(id);
        }
        for fd in &fds {
            let Some(Some(id)) = ids.get(fd.file_index as usize) else { continue };
            if self.fds.set(fd.number, *id) {
                let file = state.files.get(*id);
                file.refcount += 1;
                file.fd_count += 1;
            }
        }
        for id in ids.iter().flatten() {
            state.activate(*id)?;
        }
        for (file_index, items) in sets {
            let Some(set) = ids[file_index] else { continue };
            for item in items {
                let Some(Some(file)) = ids.get(item.file_index as usize).copied() else { continue };
                let event = EpollEvent { events: item.events, data: item.data };
                let number = state.files.epoll(set)?.add(item.fd, file, event);
                state.files.get(file).wait_queue.push(WaitEntry::EpollItem { set, item: number });
                if item.queued {
                    state.files.epoll(set)?.queue_ready(number, 0, 0);
                }
            }
        }
        Ok(())
    }
}

/// Serializes a socket for another process, and lists what that process will own.
pub(crate) fn serialize_socket(
    socket: &Socket,
    channels: &Channels,
) -> (SerializedSocket, Vec<GlobalSocketId>) {
    let serialize_address = |bound: &BoundAddress| SerializedAddress {
        address: bound.reserved.address,
        port_locked: bound.port_locked,
        has_kernel_socket: bound.kernel_fd.is_some(),
        description: bound.description,
    };
    let handle_of = |id: &GlobalSocketId| match id.id {
        SocketId::Socket { socket, generation } => (socket, generation),
        SocketId::Listener(_) => (0, 0),
    };
    let (role, ids) = match &socket.role {
        SocketRole::Unconnected { bound } => {
            (SerializedRole::Unconnected(bound.as_ref().map(serialize_address)), Vec::new())
        }
        SocketRole::Listening(listening) => {
            let ids = channels.listener_ids(listening.number);
            let number = |id: &GlobalSocketId| match id.id {
                SocketId::Listener(number) => number,
                SocketId::Socket { .. } => 0,
            };
            let serialized = SerializedListener {
                numbers: ids.iter().map(number).collect(),
                bound: serialize_address(&listening.bound),
                accepting: listening.accepting,
                backlog: listening.backlog,
                has_kernel_socket: listening.kernel_fd.is_some(),
            };
            (SerializedRole::Listening(serialized), ids)
        }
        SocketRole::Stream(stream) => {
            let id = channels.socket_id(stream.conn);
            let (socket, generation) = handle_of(&id);
            let serialized = SerializedStream {
                shard: id.shard,
                socket,
                generation,
                connecting: stream.connecting,
                disconnecting: stream.disconnecting,
                error: stream.error,
                end_seen: stream.end_seen,
                msg_more: stream.msg_more,
                bound: stream.bound.as_ref().map(serialize_address),
                is_rebound: stream.is_rebound,
            };
            (SerializedRole::Stream(serialized), vec![id])
        }
        SocketRole::Udp(udp) => {
            let id = channels.socket_id(udp.conn);
            let (socket, generation) = handle_of(&id);
            let serialized = SerializedUdp {
                shard: id.shard,
                socket,
                generation,
                port_locked: udp.port_locked,
                address_locked: udp.address_locked,
                peer: udp.peer,
                has_kernel_socket: udp.kernel_fd.is_some(),
                shut_read: udp.shut_read,
                shut_write: udp.shut_write,
            };
            (SerializedRole::Udp(serialized), vec![id])
        }
    };
    let family = match socket.family {
        Family::V4 => 4,
        Family::V6 => 6,
    };
    let serialized = SerializedSocket {
        family,
        is_udp: socket.is_udp,
        destinations: socket.udp_send.as_ref().map_or(Vec::new(), |udp_send| udp_send.destinations.clone()),
        nonblocking: socket.nonblocking,
        options: socket.options.clone(),
        shutdown: socket.shutdown,
        role,
        cookie: socket.cookie,
        last_address: socket.last_address,
    };
    (serialized, ids)
}

impl ProcessState {
    /// Restores a socket that another process serialized and this one already owns. `fd` is its descriptor.
    pub fn deserialize_socket(&mut self, serialized: SerializedSocket, fd: RawFd) -> Result<Socket, Errno> {
        let SerializedSocket {
            is_udp,
            destinations,
            nonblocking,
            options,
            shutdown,
            role,
            cookie,
            last_address,
            ..
        } = serialized;
        let family = match serialized.family {
            4 => Family::V4,
            6 => Family::V6,
            _ => return Err(Errno::INVAL),
        };
        let bound_of = |bound: SerializedAddress| BoundAddress {
            reserved: Reservation { number: FOREIGN_RESERVATION, address: bound.address },
            port_locked: bound.port_locked,
            kernel_fd: bound.has_kernel_socket.then_some(fd),
            description: bound.description,
            is_shared: true,
        };
        let role = match role {
            SerializedRole::Unconnected(bound) => {
                let sharing = options.sharing(family);
                let bound = bound.map(|bound| {
                    let mut bound = bound_of(bound);
                    // The previous program has released the reservation; if that process still runs, it keeps
                    // the address.
                    bound.reserved = self.client.reserve(bound.address(), sharing).unwrap_or(bound.reserved);
                    bound
                });
                SocketRole::Unconnected { bound }
            }
            SerializedRole::Listening(serialized) => SocketRole::Listening(Listener {
                number: self.client.import_listener(&serialized.numbers),
                bound: bound_of(serialized.bound),
                accepting: serialized.accepting,
                backlog: serialized.backlog,
                kernel_fd: serialized.has_kernel_socket.then_some(fd),
            }),
            SerializedRole::Stream(serialized) => SocketRole::Stream(Stream {
                conn: self
                    .client
                    .conn_of(serialized.shard, Conn::new(serialized.socket, serialized.generation)),
                connecting: serialized.connecting,
                disconnecting: serialized.disconnecting,
                error: serialized.error,
                end_seen: serialized.end_seen,
                msg_more: serialized.msg_more,
                has_end_work: serialized.msg_more || options.timestamps().tx_flags() != 0,
                nospace_acked: None,
                bound: serialized.bound.map(bound_of),
                is_rebound: serialized.is_rebound,
                incomplete_report_fd: None,
                message_blocked: false,
            }),
            SerializedRole::Udp(serialized) => SocketRole::Udp(UdpSocket {
                conn: self
                    .client
                    .conn_of(serialized.shard, Conn::new(serialized.socket, serialized.generation)),
                port_locked: serialized.port_locked,
                address_locked: serialized.address_locked,
                peer: serialized.peer,
                kernel_fd: serialized.has_kernel_socket.then_some(fd),
                shut_read: serialized.shut_read,
                shut_write: serialized.shut_write,
                deferred_error: None,
            }),
        };
        let udp_send = is_udp.then(|| {
            let mut udp_send = Box::new(UdpSendState { destinations, ..UdpSendState::default() });
            options.apply_to_udp_send(family, &mut udp_send);
            udp_send
        });
        Ok(Socket {
            family,
            is_udp,
            udp_send,
            flow_labels: None,
            nonblocking,
            options,
            shutdown,
            role,
            cookie,
            urgent: UrgentState::default(),
            netdown_round: 0,
            last_address,
        })
    }

    /// Activates a description that came from another process: its events are directed to it.
    pub fn activate(&mut self, file: FileId) -> Result<(), Errno> {
        let Ok(socket) = self.files.socket(file) else { return Ok(()) };
        match &mut socket.role {
            SocketRole::Unconnected { .. } => {}
            SocketRole::Listening(listening) => {
                // Granted anew, because each process has accept credit of its own.
                let (number, accepts) = (listening.number, core::mem::take(&mut listening.accepting));
                self.bind_listener(number, file);
                if accepts {
                    self.begin_accepting(file);
                }
            }
            SocketRole::Stream(Stream { conn, .. }) | SocketRole::Udp(UdpSocket { conn, .. }) => {
                let conn = *conn;
                self.bind_conn(conn, file);
            }
        }
        Ok(())
    }

    /// Releases inherited sockets that have no descriptor any more, as if the program had closed them.
    fn drop_unclaimed(&mut self, ids: &[GlobalSocketId]) {
        for id in ids {
            if let SocketId::Socket { socket, generation } = id.id {
                let conn = self.client.conn_of(id.shard, Conn::new(socket, generation));
                if self.file_of(conn).is_none() {
                    // If the connection is over, there is no reference to release.
                    let _ = self.client.release(conn);
                }
            } else if let SocketId::Listener(number) = id.id {
                let local_number = self.client.listener_of(id.shard, number);
                if local_number.and_then(|number| self.file_of_listener(number)).is_none() {
                    self.client.unlisten_on_shard(id.shard, number);
                }
            }
        }
    }
}
