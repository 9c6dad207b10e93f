//! A program becomes another one, or starts one, and leaves it the sockets that are not close-on-exec (docs/adr/0012-holders-and-placeholders.md).

use crate::channels::Channels;
use crate::descriptor::{Execing, Internal, borrow};
use crate::epoll::{EpollEvent, EpollSet};
use crate::fd_table::FileId;
use crate::file::{Bound, Dgram, Kind, Listening, NOT_OURS, Outbox, Shape, Shut, Socket, Stream, Urgency};
use crate::lane::Lane;
use crate::note::{Note, fields};
use crate::options::Options;
use crate::sockaddr::Family;
use crate::wake::Watcher;
use crate::{Ops, OpsConfig};
use core::net::SocketAddr;
use ginnel::Conn;
use ginnel::channel::{Reserved, Thing};
use ginnel::door::{Expected, Held, Process};
use ginnel::own_fd::OwnFd;
use rustix::fd::{AsRawFd, OwnedFd, RawFd};
use rustix::fs::fstat;
use rustix::io::{Errno, FdFlags, fcntl_getfd, fcntl_setfd};
use std::collections::BTreeMap;

/// What the next program is left. If the program is not started, dropping it says so.
pub struct Heir {
    line: Internal,
    table: Internal,
}

impl Heir {
    /// The descriptors that the program needs, for [`Ops::resume`]: they stay open in it.
    ///
    /// # Errors
    /// They were closed behind the library's back.
    pub fn bequeath(&self) -> Result<[RawFd; 2], Errno> {
        for fd in [&self.line, &self.table] {
            fcntl_setfd(fd, FdFlags::empty())?;
        }
        Ok([self.line.as_raw_fd(), self.table.as_raw_fd()])
    }
}

/// A descriptor of the next program's.
struct Fd {
    /// Its number there.
    number: i32,
    /// Its description, by its place in the table.
    file: u32,
    /// What the kernel has behind it, so that one which was closed or replaced meanwhile is not taken for it.
    inode: u64,
}
fields!(Fd { number, file, inode });

/// A socket, in words that mean the same in another process.
pub(crate) struct SocketNote {
    family: u8,
    datagrams: bool,
    destinations: Vec<SocketAddr>,
    nonblocking: bool,
    options: Options,
    shut: Shut,
    shape: ShapeNote,
    cookie: u64,
    past: Option<SocketAddr>,
}
fields!(SocketNote { family, datagrams, destinations, nonblocking, options, shut, shape, cookie, past });
fields!(Shut { read, write });

enum ShapeNote {
    Fresh(Option<BoundNote>),
    Listening(ListeningNote),
    Stream(StreamNote),
    Datagrams(DatagramsNote),
}

impl Note for ShapeNote {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Fresh(bound) => {
                0u8.put(out);
                bound.put(out);
            }
            Self::Listening(listening) => {
                1u8.put(out);
                listening.put(out);
            }
            Self::Stream(stream) => {
                2u8.put(out);
                stream.put(out);
            }
            Self::Datagrams(socket) => {
                3u8.put(out);
                socket.put(out);
            }
        }
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some(match u8::get(from)? {
            0 => Self::Fresh(Note::get(from)?),
            1 => Self::Listening(Note::get(from)?),
            2 => Self::Stream(Note::get(from)?),
            3 => Self::Datagrams(Note::get(from)?),
            _ => return None,
        })
    }
}

struct BoundNote {
    address: SocketAddr,
    keeps_port: bool,
    /// A socket of the kernel's is behind the descriptor.
    backed: bool,
}
fields!(BoundNote { address, keeps_port, backed });

struct ListeningNote {
    /// By shard.
    numbers: Vec<u32>,
    bound: BoundNote,
    accepts: bool,
    backlog: u32,
    backed: bool,
}
fields!(ListeningNote { numbers, bound, accepts, backlog, backed });

struct StreamNote {
    /// The shard, and what the connection is called there.
    shard: u16,
    socket: u32,
    generation: u32,
    connecting: bool,
    disconnecting: bool,
    error: Option<Errno>,
    end_seen: bool,
    more: bool,
    bound: Option<BoundNote>,
}
fields!(StreamNote { shard, socket, generation, connecting, disconnecting, error, end_seen, more, bound });

struct DatagramsNote {
    /// As of a connection.
    shard: u16,
    socket: u32,
    generation: u32,
    bound: bool,
    connected: Option<SocketAddr>,
    backed: bool,
    shut_read: bool,
    shut_write: bool,
}
fields!(DatagramsNote { shard, socket, generation, bound, connected, backed, shut_read, shut_write });

/// An entry of an epoll set: the descriptor and the description that it is of, and whether it stood in the list of those that may be ready.
struct ItemNote {
    fd: i32,
    file: u32,
    events: u32,
    data: u64,
    queued: bool,
}
fields!(ItemNote { fd, file, events, data, queued });

/// A description.
enum FileNote {
    Socket(Box<SocketNote>),
    /// Those that may be ready come first, in their order. Beside them: entries of the kernel.
    Epoll(Vec<ItemNote>, u32),
}

impl Note for FileNote {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Socket(socket) => {
                0u8.put(out);
                socket.put(out);
            }
            Self::Epoll(items, kernel) => {
                1u8.put(out);
                items.put(out);
                kernel.put(out);
            }
        }
    }

    fn get(from: &mut &[u8]) -> Option<Self> {
        Some(match u8::get(from)? {
            0 => Self::Socket(Box::new(Note::get(from)?)),
            1 => Self::Epoll(Note::get(from)?, Note::get(from)?),
            _ => return None,
        })
    }
}

impl Execing<'_> {
    /// The program that takes this one's place, or is started, will hold the sockets of these descriptors, each a number there and the number here. Without any
    /// nothing need be left.
    ///
    /// # Errors
    /// `ENOBUFS`: the stack has no room for another process, or there are too many sockets; no descriptors.
    pub fn heir(&mut self, kept: &[(RawFd, RawFd)]) -> Result<Heir, Errno> {
        let (held, note) = self.ops.note_of(&mut self.lane, kept)?;
        let process = self.lane.process.as_ref().ok_or(Errno::NOBUFS)?;
        let expected = process.expect_program(&held).map_err(|_| Errno::NOBUFS)?;
        let table = Expected::table(&held, &note).map_err(|_| Errno::NOBUFS)?;
        let line = Internal::new(rustix::io::fcntl_dupfd_cloexec(expected.line(), 0)?);
        Ok(Heir { line, table: Internal::new(table) })
    }

    /// A way to the stack for a program that is left nothing else ([`Process::followed`]).
    ///
    /// # Errors
    /// `ENETDOWN`: the stack is gone, or there are no descriptors.
    pub fn way(&self) -> Result<OwnFd, Errno> {
        let process = self.lane.process.as_ref().ok_or(Errno::NETDOWN)?;
        process.followed().map_err(|_| Errno::NETDOWN)
    }
}

impl Ops {
    /// Descriptors of ours that a program which takes this one's place keeps.
    pub fn inheritable(&self) -> Vec<RawFd> {
        let kept = |fd: &RawFd| {
            let flags = borrow(*fd).and_then(fcntl_getfd);
            flags.is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
        };
        self.fds.range(0, RawFd::MAX).filter(kept).collect()
    }

    fn note_of(&self, lane: &mut Lane, kept: &[(RawFd, RawFd)]) -> Result<(Vec<Held>, Vec<u8>), Errno> {
        let (mut fds, mut files, mut held) = (Vec::new(), BTreeMap::new(), Vec::new());
        for &(number, here) in kept {
            let Some(file) = self.fds.get(here) else { continue };
            let count = files.len() as u32;
            let file = *files.entry(file).or_insert(count);
            fds.push(Fd { number, file, inode: fstat(borrow(here)?)?.st_ino });
        }
        let mut in_order: Vec<(FileId, u32)> = files.iter().map(|(id, place)| (*id, *place)).collect();
        in_order.sort_by_key(|(_, place)| *place);
        let mut notes = Vec::new();
        for (id, _) in in_order {
            lane.share(id);
            notes.push(match &lane.files.get(id).kind {
                Kind::Socket(socket) => {
                    let (note, things) = note_of_socket(socket, &lane.client);
                    held.extend(things);
                    FileNote::Socket(Box::new(note))
                }
                Kind::Epoll(set) => {
                    let items = set.entries().filter_map(|(fd, file, event, queued)| {
                        let file = *files.get(&file)?;
                        Some(ItemNote { fd, file, events: event.events, data: event.data, queued })
                    });
                    FileNote::Epoll(items.collect(), set.kernel_items() as u32)
                }
                Kind::Free => return Err(Errno::BADF),
            });
        }
        let mut note = Vec::new();
        fds.put(&mut note);
        notes.put(&mut note);
        Ok((held, note))
    }

    /// Socket calls of a program that was left these descriptors by [`Heir::bequeath`]: it finds the sockets that it was left under their numbers.
    ///
    /// # Errors
    /// `ENETDOWN`: the stack is gone; `EINVAL`: what was left is none of ours; no descriptors.
    pub fn resume(
        line: OwnedFd,
        table: OwnedFd,
        config: impl FnOnce(&Process) -> OpsConfig,
    ) -> Result<Self, Errno> {
        fcntl_setfd(&line, FdFlags::CLOEXEC)?;
        let (process, held, note) = Process::resume(line, table).map_err(|error| match error {
            ginnel::Error::StackGone => Errno::NETDOWN,
            _ => Errno::INVAL,
        })?;
        let config = config(&process);
        let ops = Self::over(process, config)?;
        let mut rest = &note[..];
        let (fds, files) = <(Vec<Fd>, Vec<FileNote>)>::get(&mut rest).ok_or(Errno::INVAL)?;
        let mut lane = ops.lock()?;
        ops.restore(&mut lane, &fds, files)?;
        lane.drop_unclaimed(&held);
        ops.write_all_down(&mut lane);
        lane.client.flush();
        drop(lane);
        Ok(ops)
    }

    fn restore(&self, lane: &mut Lane, fds: &[Fd], files: Vec<FileNote>) -> Result<(), Errno> {
        // Those that are still what they were.
        let same = |fd: &&Fd| {
            let there = borrow(fd.number).and_then(|fd| Ok(fstat(fd)?.st_ino));
            there.is_ok_and(|inode| inode == fd.inode)
        };
        let fds: Vec<&Fd> = fds.iter().filter(same).collect();
        let first = |place: usize| fds.iter().find(|fd| fd.file as usize == place).map(|fd| fd.number);
        let mut ids = vec![None; files.len()];
        let mut sets = Vec::new();
        for (place, note) in files.into_iter().enumerate() {
            let Some(number) = first(place) else { continue };
            let kind = match note {
                FileNote::Socket(note) => Kind::Socket(Box::new(lane.socket_of(*note, number)?)),
                FileNote::Epoll(items, kernel_items) => {
                    let own = Internal::new(rustix::io::fcntl_dupfd_cloexec(borrow(number)?, 0)?);
                    sets.push((place, items));
                    Kind::Epoll(Box::new(EpollSet::inherited(own, kernel_items as usize)))
                }
            };
            let id = lane.files.add(kind);
            // Others may have it, too; what they changed is told by the first look.
            lane.files.get(id).shared = Some(0);
            ids[place] = Some(id);
        }
        for fd in &fds {
            let Some(Some(id)) = ids.get(fd.file as usize) else { continue };
            if self.fds.set(fd.number, *id) {
                let file = lane.files.get(*id);
                file.users += 1;
                file.descriptors += 1;
            }
        }
        for id in ids.iter().flatten() {
            lane.take_up(*id)?;
        }
        for (place, items) in sets {
            let Some(set) = ids[place] else { continue };
            for item in items {
                let Some(Some(file)) = ids.get(item.file as usize).copied() else { continue };
                let event = EpollEvent { events: item.events, data: item.data };
                let number = lane.files.epoll(set)?.add(item.fd, file, event);
                lane.files.get(file).watchers.push(Watcher::Item { set, item: number });
                if item.queued {
                    lane.files.epoll(set)?.make_ready(number, 0);
                }
            }
        }
        Ok(())
    }
}

/// What another process needs to know of a socket, and what it is to hold.
pub(crate) fn note_of_socket(socket: &Socket, channels: &Channels) -> (SocketNote, Vec<Held>) {
    let bound_note = |bound: &Bound| BoundNote {
        address: bound.reserved.address,
        keeps_port: bound.keeps_port,
        backed: bound.kernel.is_some(),
    };
    let named = |held: &Held| match held.thing {
        Thing::Socket { socket, generation } => (socket, generation),
        Thing::Listener(_) => (0, 0),
    };
    let (shape, held) = match &socket.shape {
        Shape::Fresh { bound } => (ShapeNote::Fresh(bound.as_ref().map(bound_note)), Vec::new()),
        Shape::Listening(listening) => {
            let held = channels.held_listeners(listening.number);
            let number = |held: &Held| match held.thing {
                Thing::Listener(number) => number,
                Thing::Socket { .. } => 0,
            };
            let note = ListeningNote {
                numbers: held.iter().map(number).collect(),
                bound: bound_note(&listening.bound),
                accepts: listening.accepts,
                backlog: listening.backlog,
                backed: listening.kernel.is_some(),
            };
            (ShapeNote::Listening(note), held)
        }
        Shape::Stream(stream) => {
            let held = channels.held(stream.conn);
            let (socket, generation) = named(&held);
            let note = StreamNote {
                shard: held.shard,
                socket,
                generation,
                connecting: stream.connecting,
                disconnecting: stream.disconnecting,
                error: stream.error,
                end_seen: stream.end_seen,
                more: stream.more,
                bound: stream.bound.as_ref().map(bound_note),
            };
            (ShapeNote::Stream(note), vec![held])
        }
        Shape::Datagrams(dgram) => {
            let held = channels.held(dgram.conn);
            let (socket, generation) = named(&held);
            let note = DatagramsNote {
                shard: held.shard,
                socket,
                generation,
                bound: dgram.bound,
                connected: dgram.connected,
                backed: dgram.kernel.is_some(),
                shut_read: dgram.shut_read,
                shut_write: dgram.shut_write,
            };
            (ShapeNote::Datagrams(note), vec![held])
        }
    };
    let family = match socket.family {
        Family::V4 => 4,
        Family::V6 => 6,
    };
    let note = SocketNote {
        family,
        datagrams: socket.datagrams,
        destinations: socket.outbox.as_ref().map_or(Vec::new(), |outbox| outbox.destinations.clone()),
        nonblocking: socket.nonblocking,
        options: socket.options.clone(),
        shut: socket.shut,
        shape,
        cookie: socket.cookie,
        past: socket.past,
    };
    (note, held)
}

impl Lane {
    /// A socket that another process described, which this one holds already, behind the descriptor `fd`.
    pub fn socket_of(&mut self, note: SocketNote, fd: RawFd) -> Result<Socket, Errno> {
        let SocketNote { datagrams, destinations, nonblocking, options, shut, shape, cookie, past, .. } =
            note;
        let family = match note.family {
            4 => Family::V4,
            6 => Family::V6,
            _ => return Err(Errno::INVAL),
        };
        let bound_of = |BoundNote { address, keeps_port, backed }: BoundNote| Bound {
            reserved: Reserved { number: NOT_OURS, address },
            keeps_port,
            kernel: backed.then_some(fd),
        };
        let shape = match shape {
            ShapeNote::Fresh(bound) => {
                let sharing = options.sharing(family);
                let bound = bound.map(|bound| {
                    let mut bound = bound_of(bound);
                    // The one before has given it up; if it lives on, the address is still its.
                    bound.reserved = self.client.reserve(bound.address(), sharing).unwrap_or(bound.reserved);
                    bound
                });
                Shape::Fresh { bound }
            }
            ShapeNote::Listening(note) => Shape::Listening(Listening {
                number: self.client.know_listener(&note.numbers),
                bound: bound_of(note.bound),
                accepts: note.accepts,
                backlog: note.backlog,
                kernel: note.backed.then_some(fd),
            }),
            ShapeNote::Stream(note) => Shape::Stream(Stream {
                conn: self.client.conn_of(note.shard, Conn::new(note.socket, note.generation)),
                connecting: note.connecting,
                disconnecting: note.disconnecting,
                error: note.error,
                end_seen: note.end_seen,
                more: note.more,
                cramped: None,
                bound: note.bound.map(bound_of),
                unnamed: None,
            }),
            ShapeNote::Datagrams(note) => Shape::Datagrams(Dgram {
                conn: self.client.conn_of(note.shard, Conn::new(note.socket, note.generation)),
                bound: note.bound,
                connected: note.connected,
                kernel: note.backed.then_some(fd),
                shut_read: note.shut_read,
                shut_write: note.shut_write,
                late: None,
            }),
        };
        let outbox = datagrams.then(|| {
            let mut outbox = Box::new(Outbox { destinations, ..Outbox::default() });
            options.for_outbox(family, &mut outbox);
            outbox
        });
        let urgency = Urgency::default();
        Ok(Socket { family, datagrams, outbox, nonblocking, options, shut, shape, cookie, urgency, past })
    }

    /// A description that came from another process is at work: events go to it.
    pub fn take_up(&mut self, file: FileId) -> Result<(), Errno> {
        let Ok(socket) = self.files.socket(file) else { return Ok(()) };
        match &mut socket.shape {
            Shape::Fresh { .. } => {}
            Shape::Listening(listening) => {
                // Asked for again: each process takes a share of its own.
                let (number, wants) = (listening.number, core::mem::take(&mut listening.accepts));
                self.bind_listener(number, file);
                if wants {
                    self.begin_accepting(file);
                }
            }
            Shape::Stream(Stream { conn, .. }) | Shape::Datagrams(Dgram { conn, .. }) => {
                let conn = *conn;
                self.bind_conn(conn, file);
            }
        }
        Ok(())
    }

    /// What was left to this program and has no descriptor any more ends as if it had closed it.
    fn drop_unclaimed(&mut self, held: &[Held]) {
        for held in held {
            if let Thing::Socket { socket, generation } = held.thing {
                let conn = self.client.conn_of(held.shard, Conn::new(socket, generation));
                if self.file_of(conn).is_none() {
                    // If it is over there is nothing to let go of.
                    let _ = self.client.release(conn);
                }
            } else if let Thing::Listener(number) = held.thing {
                let known = self.client.listener_of(held.shard, number);
                if known.and_then(|number| self.file_of_listener(number)).is_none() {
                    self.client.unlisten_there(held.shard, number);
                }
            }
        }
    }
}
