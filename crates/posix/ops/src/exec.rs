//! Inheritance of sockets that are not close-on-exec, when the process executes or starts a program
//! (docs/adr/0012-holders-and-placeholders.md).

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

/// What the next program inherits. If that program does not run, dropping the value cancels the inheritance.
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
codec_struct!(ShutdownState { read, write });

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
    /// A kernel socket is behind the descriptor.
    has_kernel_socket: bool,
}
codec_struct!(SerializedAddress { address, port_locked, has_kernel_socket });

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
    bound
});

struct SerializedUdp {
    /// The shard, and the handle of the socket there.
    shard: u16,
    socket: u32,
    generation: u32,
    bound: bool,
    peer: Option<SocketAddr>,
    has_kernel_socket: bool,
    shut_read: bool,
    shut_write: bool,
}
codec_struct!(SerializedUdp {
    shard,
    socket,
    generation,
    bound,
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
    /// Prepares the inheritance of sockets by the program that is executed or started. `kept` lists the
    /// descriptors, as pairs of the number there and the number here. A program that inherits no sockets
    /// needs no inheritance.
    ///
    /// # Errors
    /// `ENOBUFS` if the stack has no room for another process, or if there are too many sockets; `EMFILE`,
    /// `ENFILE`.
    pub fn prepare_inheritance(&mut self, kept: &[(RawFd, RawFd)]) -> Result<Inheritance, Errno> {
        let (held, note) = self.ops.serialize_fds(&mut self.state, kept)?;
        let process = self.state.attachment.as_ref().ok_or(Errno::NOBUFS)?;
        let expected = process.prepare_exec(&held).map_err(|_| Errno::NOBUFS)?;
        let table = PreparedProcess::inheritance_table(&held, &note).map_err(|_| Errno::NOBUFS)?;
        let line = HiddenFd::new(rustix::io::fcntl_dupfd_cloexec(expected.connection(), 0)?);
        Ok(Inheritance { connection: line, table: HiddenFd::new(table) })
    }

    /// Returns a control connection for a program that inherits nothing else
    /// ([`Attachment::successor_connection`]).
    ///
    /// # Errors
    /// `ENETDOWN` if the stack is gone, or if there are no descriptors.
    pub fn new_connection(&self) -> Result<InternalFd, Errno> {
        let process = self.state.attachment.as_ref().ok_or(Errno::NETDOWN)?;
        process.successor_connection().map_err(|_| Errno::NETDOWN)
    }
}

impl Ops {
    /// Returns the stack's descriptors that an executed program keeps.
    pub fn inheritable(&self) -> Vec<RawFd> {
        let kept = |fd: &RawFd| {
            let flags = borrow(*fd).and_then(fcntl_getfd);
            flags.is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
        };
        self.fds.range(0, RawFd::MAX).filter(kept).collect()
    }

    fn serialize_fds(
        &self,
        lane: &mut ProcessState,
        kept: &[(RawFd, RawFd)],
    ) -> Result<(Vec<GlobalSocketId>, Vec<u8>), Errno> {
        let (mut fds, mut files, mut held) = (Vec::new(), BTreeMap::new(), Vec::new());
        for &(number, here) in kept {
            let Some(file) = self.fds.get(here) else { continue };
            let count = files.len() as u32;
            let file = *files.entry(file).or_insert(count);
            fds.push(InheritedFd { number, file_index: file, inode: fstat(borrow(here)?)?.st_ino });
        }
        let mut in_order: Vec<(FileId, u32)> = files.iter().map(|(id, place)| (*id, *place)).collect();
        in_order.sort_by_key(|(_, place)| *place);
        let mut notes = Vec::new();
        for (id, _) in in_order {
            lane.share(id);
            notes.push(match &lane.files.get(id).kind {
                FileKind::Socket(socket) => {
                    let (note, things) = serialize_socket(socket, &lane.client);
                    held.extend(things);
                    SerializedFile::Socket(Box::new(note))
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
        let mut note = Vec::new();
        fds.encode(&mut note);
        notes.encode(&mut note);
        Ok((held, note))
    }

    /// Returns the socket calls of a program that inherits the descriptors of [`Inheritance::clear_cloexec`].
    /// The inherited sockets have the numbers that they had before.
    ///
    /// # Errors
    /// `ENETDOWN` if the stack is gone, `EINVAL` if the descriptors are not the library's; `EMFILE`,
    /// `ENFILE`.
    pub fn from_inheritance(
        line: OwnedFd,
        table: OwnedFd,
        config: impl FnOnce(&Attachment) -> OpsConfig,
    ) -> Result<Self, Errno> {
        fcntl_setfd(&line, FdFlags::CLOEXEC)?;
        let (process, held, note) = Attachment::inherit(line, table).map_err(|error| match error {
            ginnel::Error::StackGone => Errno::NETDOWN,
            _ => Errno::INVAL,
        })?;
        let config = config(&process);
        let ops = Self::from_process(process, config)?;
        let mut rest = &note[..];
        let (fds, files) =
            <(Vec<InheritedFd>, Vec<SerializedFile>)>::decode(&mut rest).ok_or(Errno::INVAL)?;
        let mut lane = ops.lock()?;
        ops.restore(&mut lane, &fds, files)?;
        lane.drop_unclaimed(&held);
        ops.rebuild_report(&mut lane);
        lane.client.flush();
        drop(lane);
        Ok(ops)
    }

    fn restore(
        &self,
        lane: &mut ProcessState,
        fds: &[InheritedFd],
        files: Vec<SerializedFile>,
    ) -> Result<(), Errno> {
        // Skips descriptors that were closed or reused meanwhile.
        let same = |fd: &&InheritedFd| {
            let there = borrow(fd.number).and_then(|fd| Ok(fstat(fd)?.st_ino));
            there.is_ok_and(|inode| inode == fd.inode)
        };
        let fds: Vec<&InheritedFd> = fds.iter().filter(same).collect();
        let first = |place: usize| fds.iter().find(|fd| fd.file_index as usize == place).map(|fd| fd.number);
        let mut ids = vec![None; files.len()];
        let mut sets = Vec::new();
        for (place, note) in files.into_iter().enumerate() {
            let Some(number) = first(place) else { continue };
            let kind = match note {
                SerializedFile::Socket(note) => {
                    FileKind::Socket(Box::new(lane.deserialize_socket(*note, number)?))
                }
                SerializedFile::Epoll(items, kernel_items) => {
                    let own = HiddenFd::new(rustix::io::fcntl_dupfd_cloexec(borrow(number)?, 0)?);
                    sets.push((place, items));
                    FileKind::Epoll(Box::new(EpollSet::from_inherited(own, kernel_items as usize)))
                }
            };
            let id = lane.files.add(kind);
            // Other processes may share the description; the first access applies what they have changed.
            lane.files.get(id).shared_version = Some(0);
            ids[place] = Some(id);
        }
        for fd in &fds {
            let Some(Some(id)) = ids.get(fd.file_index as usize) else { continue };
            if self.fds.set(fd.number, *id) {
                let file = lane.files.get(*id);
                file.refcount += 1;
                file.fd_count += 1;
            }
        }
        for id in ids.iter().flatten() {
            lane.activate(*id)?;
        }
        for (place, items) in sets {
            let Some(set) = ids[place] else { continue };
            for item in items {
                let Some(Some(file)) = ids.get(item.file_index as usize).copied() else { continue };
                let event = EpollEvent { events: item.events, data: item.data };
                let number = lane.files.epoll(set)?.add(item.fd, file, event);
                lane.files.get(file).wait_queue.push(WaitEntry::EpollItem { set, item: number });
                if item.queued {
                    lane.files.epoll(set)?.queue_ready(number, 0);
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
    let bound_note = |bound: &BoundAddress| SerializedAddress {
        address: bound.reserved.address,
        port_locked: bound.port_locked,
        has_kernel_socket: bound.kernel_fd.is_some(),
    };
    let named = |held: &GlobalSocketId| match held.id {
        SocketId::Socket { socket, generation } => (socket, generation),
        SocketId::Listener(_) => (0, 0),
    };
    let (shape, held) = match &socket.role {
        SocketRole::Unconnected { bound } => {
            (SerializedRole::Unconnected(bound.as_ref().map(bound_note)), Vec::new())
        }
        SocketRole::Listening(listening) => {
            let held = channels.listener_ids(listening.number);
            let number = |held: &GlobalSocketId| match held.id {
                SocketId::Listener(number) => number,
                SocketId::Socket { .. } => 0,
            };
            let note = SerializedListener {
                numbers: held.iter().map(number).collect(),
                bound: bound_note(&listening.bound),
                accepting: listening.accepting,
                backlog: listening.backlog,
                has_kernel_socket: listening.kernel_fd.is_some(),
            };
            (SerializedRole::Listening(note), held)
        }
        SocketRole::Stream(stream) => {
            let held = channels.socket_id(stream.conn);
            let (socket, generation) = named(&held);
            let note = SerializedStream {
                shard: held.shard,
                socket,
                generation,
                connecting: stream.connecting,
                disconnecting: stream.disconnecting,
                error: stream.error,
                end_seen: stream.end_seen,
                msg_more: stream.msg_more,
                bound: stream.bound.as_ref().map(bound_note),
            };
            (SerializedRole::Stream(note), vec![held])
        }
        SocketRole::Udp(dgram) => {
            let held = channels.socket_id(dgram.conn);
            let (socket, generation) = named(&held);
            let note = SerializedUdp {
                shard: held.shard,
                socket,
                generation,
                bound: dgram.bound,
                peer: dgram.peer,
                has_kernel_socket: dgram.kernel_fd.is_some(),
                shut_read: dgram.shut_read,
                shut_write: dgram.shut_write,
            };
            (SerializedRole::Udp(note), vec![held])
        }
    };
    let family = match socket.family {
        Family::V4 => 4,
        Family::V6 => 6,
    };
    let note = SerializedSocket {
        family,
        is_udp: socket.is_udp,
        destinations: socket.udp_send.as_ref().map_or(Vec::new(), |outbox| outbox.destinations.clone()),
        nonblocking: socket.nonblocking,
        options: socket.options.clone(),
        shutdown: socket.shutdown,
        role: shape,
        cookie: socket.cookie,
        last_address: socket.last_address,
    };
    (note, held)
}

impl ProcessState {
    /// Restores a socket that another process serialized and this one already owns. `fd` is its descriptor.
    pub fn deserialize_socket(&mut self, note: SerializedSocket, fd: RawFd) -> Result<Socket, Errno> {
        let SerializedSocket {
            is_udp: datagrams,
            destinations,
            nonblocking,
            options,
            shutdown: shut,
            role: shape,
            cookie,
            last_address: past,
            ..
        } = note;
        let family = match note.family {
            4 => Family::V4,
            6 => Family::V6,
            _ => return Err(Errno::INVAL),
        };
        let bound_of = |SerializedAddress { address, port_locked: keeps_port, has_kernel_socket: backed }: SerializedAddress| BoundAddress {
            reserved: Reservation { number: FOREIGN_RESERVATION, address },
            port_locked: keeps_port,
            kernel_fd: backed.then_some(fd),
        };
        let shape = match shape {
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
            SerializedRole::Listening(note) => SocketRole::Listening(Listener {
                number: self.client.import_listener(&note.numbers),
                bound: bound_of(note.bound),
                accepting: note.accepting,
                backlog: note.backlog,
                kernel_fd: note.has_kernel_socket.then_some(fd),
            }),
            SerializedRole::Stream(note) => SocketRole::Stream(Stream {
                conn: self.client.conn_of(note.shard, Conn::new(note.socket, note.generation)),
                connecting: note.connecting,
                disconnecting: note.disconnecting,
                error: note.error,
                end_seen: note.end_seen,
                msg_more: note.msg_more,
                nospace_acked: None,
                bound: note.bound.map(bound_of),
                incomplete_report_fd: None,
            }),
            SerializedRole::Udp(note) => SocketRole::Udp(UdpSocket {
                conn: self.client.conn_of(note.shard, Conn::new(note.socket, note.generation)),
                bound: note.bound,
                peer: note.peer,
                kernel_fd: note.has_kernel_socket.then_some(fd),
                shut_read: note.shut_read,
                shut_write: note.shut_write,
                deferred_error: None,
            }),
        };
        let outbox = datagrams.then(|| {
            let mut outbox = Box::new(UdpSendState { destinations, ..UdpSendState::default() });
            options.apply_to_udp_send(family, &mut outbox);
            outbox
        });
        let urgency = UrgentState::default();
        Ok(Socket {
            family,
            is_udp: datagrams,
            udp_send: outbox,
            nonblocking,
            options,
            shutdown: shut,
            role: shape,
            cookie,
            urgent: urgency,
            last_address: past,
        })
    }

    /// Activates a description that came from another process: its events are directed to it.
    pub fn activate(&mut self, file: FileId) -> Result<(), Errno> {
        let Ok(socket) = self.files.socket(file) else { return Ok(()) };
        match &mut socket.role {
            SocketRole::Unconnected { .. } => {}
            SocketRole::Listening(listening) => {
                // Granted anew, because each process has accept credit of its own.
                let (number, wants) = (listening.number, core::mem::take(&mut listening.accepting));
                self.bind_listener(number, file);
                if wants {
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
    fn drop_unclaimed(&mut self, held: &[GlobalSocketId]) {
        for held in held {
            if let SocketId::Socket { socket, generation } = held.id {
                let conn = self.client.conn_of(held.shard, Conn::new(socket, generation));
                if self.file_of(conn).is_none() {
                    // If the connection is over, there is no reference to release.
                    let _ = self.client.release(conn);
                }
            } else if let SocketId::Listener(number) = held.id {
                let known = self.client.listener_of(held.shard, number);
                if known.and_then(|number| self.file_of_listener(number)).is_none() {
                    self.client.unlisten_on_shard(held.shard, number);
                }
            }
        }
    }
}
