//! Open file descriptions: what descriptors stand for, and what copies of a descriptor share.

use crate::datagram::Corked;
use crate::epoll::EpollSet;
use crate::fd_table::FileId;
use crate::options::Options;
use crate::sockaddr::Family;
use crate::wake::Watcher;
use core::ffi::c_int;
use core::net::SocketAddr;
use ginnel::Conn;
use ginnel::channel::Reserved;
use rustix::fd::RawFd;
use rustix::io::Errno;

/// One open file description.
pub(crate) struct File {
    /// Descriptors, and calls that sleep, which keep it alive.
    pub users: u32,
    /// Descriptors alone: when the last goes the socket is closed to the program.
    pub descriptors: u32,
    pub kind: Kind,
    /// Other processes have it, too: the last change of what all agree on that was seen here.
    pub shared: Option<u32>,
    /// Who is told when its readiness changes, in the order in which they came.
    pub watchers: Vec<Watcher>,
}

/// What it is.
pub(crate) enum Kind {
    /// The place is free.
    Free,
    Socket(Box<Socket>),
    Epoll(Box<EpollSet>),
}

/// A socket of TCP or UDP.
pub(crate) struct Socket {
    pub family: Family,
    /// It is one of UDP.
    pub datagrams: bool,
    /// What is known of that which it has sent, if it is one of UDP and has sent anything.
    pub outbox: Option<Box<Outbox>>,
    pub nonblocking: bool,
    pub options: Options,
    pub shut: Shut,
    pub shape: Shape,
    /// Once it was asked for (`SO_COOKIE`).
    pub cookie: u64,
    /// Who hears of urgent data.
    pub urgency: Urgency,
    /// An address that it had and has no more, which Linux goes on telling (`inet_sport`).
    pub past: Option<SocketAddr>,
}

/// What is to be told of urgent data.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Urgency {
    /// Who gets `SIGURG`, as `F_SETOWN` says it.
    pub owner: c_int,
    /// What had been said about urgent data when it was looked at last.
    pub heard: u32,
    /// A byte that was announced is still to come.
    pub awaited: bool,
}

/// What a UDP socket has sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outbox {
    /// Where to.
    pub destinations: Vec<SocketAddr>,
    /// Datagrams that are too long for the path are refused, not cut (`IP_PMTUDISC_DO` and beyond).
    pub refuses_long: bool,
    /// The longest datagram of which the stack said that it was not too long.
    pub longest: usize,
    /// Datagrams are put together until it is said otherwise (`UDP_CORK`).
    pub corks: bool,
    /// What is sent is cut into datagrams of so many bytes (`UDP_SEGMENT`), or 0.
    pub piece: u16,
    /// A datagram of which more is to come.
    pub corked: Option<Corked>,
}

/// `shutdown` of each direction (`sk_shutdown`). Linux keeps it also for what is not connected.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shut {
    pub read: bool,
    pub write: bool,
}

/// What became of a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Shape {
    /// It is neither connected nor does it listen.
    Fresh {
        bound: Option<Bound>,
    },
    Listening(Listening),
    Stream(Stream),
    /// A UDP socket that has an address.
    Datagrams(Dgram),
}

/// A UDP socket's side on the stack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dgram {
    /// Its number of the channel's, as that of a connection.
    pub conn: Conn,
    /// The program gave it its address.
    pub bound: bool,
    /// Its other end, if that is fixed.
    pub connected: Option<SocketAddr>,
    /// The kernel's socket behind this descriptor serves it, too.
    pub kernel: Option<RawFd>,
    /// `shutdown` of each direction.
    pub shut_read: bool,
    pub shut_write: bool,
    /// An error that a call had no room to tell (`recvmmsg`): the next one's.
    pub late: Option<Errno>,
}

/// An address that `bind` gave a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub reserved: Reserved,
    /// The program named the port, and keeps it whatever becomes of the socket (`SOCK_BINDPORT_LOCK`).
    pub keeps_port: bool,
    /// The kernel's socket behind this descriptor is bound to it, too.
    pub kernel: Option<RawFd>,
}

/// A reservation that is another process's, or nobody's any more.
pub(crate) const NOT_OURS: u32 = u32::MAX;

impl Bound {
    pub fn address(&self) -> SocketAddr {
        self.reserved.address
    }

    /// The reservation, if this process made it: no other can give it up.
    pub fn own(&self) -> Option<Reserved> {
        Some(self.reserved).filter(|reserved| reserved.number != NOT_OURS)
    }

    /// Whether it outlives what was made with it. (The kernel's half keeps it, too.)
    pub fn stays(&self) -> bool {
        self.keeps_port || self.kernel.is_some()
    }
}

impl Socket {
    /// What `bind` reserved for it.
    pub fn bound_mut(&mut self) -> Option<&mut Bound> {
        match &mut self.shape {
            Shape::Fresh { bound } => bound.as_mut(),
            Shape::Listening(listening) => Some(&mut listening.bound),
            Shape::Stream(stream) => stream.bound.as_mut(),
            Shape::Datagrams(_) => None,
        }
    }

    /// One direction or both are done with.
    pub fn shut(&mut self, read: bool, write: bool) {
        self.shut.read |= read;
        self.shut.write |= write;
    }

    /// The other end of a UDP socket, if that is fixed.
    pub fn other_end(&self) -> Option<SocketAddr> {
        match self.shape {
            Shape::Datagrams(dgram) => dgram.connected,
            _ => None,
        }
    }

    /// What `bind` gave it.
    pub fn bound(&self) -> Option<Bound> {
        match self.shape {
            Shape::Fresh { bound } => bound,
            Shape::Listening(listening) => Some(listening.bound),
            Shape::Stream(stream) => stream.bound,
            Shape::Datagrams(_) => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Listening {
    /// Of the channel.
    pub number: u32,
    pub bound: Bound,
    /// Somebody asked for connections, so this process takes its share. A master that only listens must not.
    pub accepts: bool,
    pub backlog: u32,
    /// The kernel's socket behind this descriptor listens, too.
    pub kernel: Option<RawFd>,
}

/// A connection, in the words of `struct sock`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    pub conn: Conn,
    /// `connect` was called and has not yet told how it went (`SS_CONNECTING`).
    pub connecting: bool,
    /// It was shut down after it had failed and before anybody heard of that (`SS_DISCONNECTING`).
    pub disconnecting: bool,
    /// `sk_err`.
    pub error: Option<Errno>,
    /// Its end was turned into an error.
    pub end_seen: bool,
    /// The last send said that more is to come (`MSG_MORE`).
    pub more: bool,
    /// A write found the send buffer full when so many bytes were acknowledged (`SOCK_NOSPACE`), where writes are bounded by it.
    pub cramped: Option<u64>,
    /// What `bind` reserved for it.
    pub bound: Option<Bound>,
    /// The descriptor by which it was opened, while its own end is not known.
    pub unnamed: Option<RawFd>,
}

impl Stream {
    pub fn new(conn: Conn, connecting: bool, bound: Option<Bound>) -> Self {
        let (error, unnamed, cramped) = (None, None, None);
        let (disconnecting, end_seen, more) = (false, false, false);
        Self { conn, connecting, disconnecting, error, end_seen, more, cramped, bound, unnamed }
    }
}

/// Memory of closed sockets that is kept for the next ones: as many as connections are offered at a time.
const SPARE_MAX: usize = 64;

/// All open file descriptions of a lane.
#[derive(Default)]
pub(crate) struct Files {
    files: Vec<File>,
    free: Vec<FileId>,
    #[allow(clippy::vec_box)] // they go from hand to hand in their boxes
    spare: Vec<Box<Socket>>,
}

impl Files {
    pub fn add(&mut self, kind: Kind) -> FileId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.files.push(File {
                users: 0,
                descriptors: 0,
                kind: Kind::Free,
                shared: None,
                watchers: Vec::new(),
            });
            self.files.len() as FileId - 1
        });
        let file = &mut self.files[id as usize];
        (file.kind, file.shared) = (kind, None);
        id
    }

    #[inline]
    pub fn get(&mut self, id: FileId) -> &mut File {
        &mut self.files[id as usize]
    }

    /// A socket in memory of its own, which may be that of one before.
    #[inline]
    pub fn boxed(&mut self, socket: Socket) -> Box<Socket> {
        match self.spare.pop() {
            Some(mut spare) => {
                *spare = socket;
                spare
            }
            None => Box::new(socket),
        }
    }

    /// A socket is closed, and its memory may be the next one's.
    #[inline]
    pub fn put_by(&mut self, socket: Box<Socket>) {
        if self.spare.len() < SPARE_MAX {
            self.spare.push(socket);
        }
    }

    /// The place is free again. The list of watchers keeps its memory.
    pub fn remove(&mut self, id: FileId) -> Kind {
        let file = &mut self.files[id as usize];
        file.watchers.clear();
        self.free.push(id);
        core::mem::replace(&mut file.kind, Kind::Free)
    }

    /// All that are in use.
    pub fn ids(&self) -> Vec<FileId> {
        let in_use = |(id, file): (usize, &File)| (!matches!(file.kind, Kind::Free)).then_some(id as FileId);
        self.files.iter().enumerate().filter_map(in_use).collect()
    }

    /// The socket of a description.
    #[inline]
    pub fn socket(&mut self, id: FileId) -> Result<&mut Socket, Errno> {
        match &mut self.files[id as usize].kind {
            Kind::Socket(socket) => Ok(socket),
            Kind::Epoll(_) => Err(Errno::NOTSOCK),
            Kind::Free => Err(Errno::BADF),
        }
    }

    #[inline]
    pub fn epoll(&mut self, id: FileId) -> Result<&mut EpollSet, Errno> {
        match &mut self.files[id as usize].kind {
            Kind::Epoll(set) => Ok(set),
            Kind::Socket(_) => Err(Errno::INVAL),
            Kind::Free => Err(Errno::BADF),
        }
    }

    /// The connection of a socket.
    #[inline]
    pub fn stream(&mut self, id: FileId) -> Option<&mut Stream> {
        match &mut self.socket(id).ok()?.shape {
            Shape::Stream(stream) => Some(stream),
            _ => None,
        }
    }
}
