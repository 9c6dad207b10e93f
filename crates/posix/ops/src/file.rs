//! Open file descriptions: what descriptors stand for, and what copies of a descriptor share.

use crate::epoll::EpollSet;
use crate::fd_table::FileId;
use crate::options::Options;
use crate::sockaddr::Family;
use crate::wake::Watcher;
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
    /// Destinations to which it has sent.
    pub destinations: Vec<SocketAddr>,
    pub nonblocking: bool,
    pub options: Options,
    pub shut: Shut,
    pub shape: Shape,
    /// Once it was asked for (`SO_COOKIE`).
    pub cookie: u64,
    /// An address that it had and has no more, which Linux goes on telling (`inet_sport`).
    pub past: Option<SocketAddr>,
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

impl Bound {
    pub fn address(&self) -> SocketAddr {
        self.reserved.address
    }

    /// Whether it outlives what was made with it. (The kernel's half keeps it, too.)
    pub fn stays(&self) -> bool {
        self.keeps_port || self.kernel.is_some()
    }
}

impl Socket {
    /// One direction or both are done with.
    pub fn shut(&mut self, read: bool, write: bool) {
        self.shut.read |= read;
        self.shut.write |= write;
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
    /// What `bind` reserved for it.
    pub bound: Option<Bound>,
}

impl Stream {
    pub fn new(conn: Conn, connecting: bool, bound: Option<Bound>) -> Self {
        Self { conn, bound, connecting, disconnecting: false, error: None, end_seen: false, more: false }
    }
}

/// All open file descriptions of a lane.
#[derive(Default)]
pub(crate) struct Files {
    files: Vec<File>,
    free: Vec<FileId>,
}

impl Files {
    pub fn add(&mut self, kind: Kind) -> FileId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.files.push(File { users: 0, descriptors: 0, kind: Kind::Free, watchers: Vec::new() });
            self.files.len() as FileId - 1
        });
        self.files[id as usize].kind = kind;
        id
    }

    pub fn get(&mut self, id: FileId) -> &mut File {
        &mut self.files[id as usize]
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
    pub fn socket(&mut self, id: FileId) -> Result<&mut Socket, Errno> {
        match &mut self.files[id as usize].kind {
            Kind::Socket(socket) => Ok(socket),
            Kind::Epoll(_) => Err(Errno::NOTSOCK),
            Kind::Free => Err(Errno::BADF),
        }
    }

    pub fn epoll(&mut self, id: FileId) -> Result<&mut EpollSet, Errno> {
        match &mut self.files[id as usize].kind {
            Kind::Epoll(set) => Ok(set),
            Kind::Socket(_) => Err(Errno::INVAL),
            Kind::Free => Err(Errno::BADF),
        }
    }

    /// The connection of a socket.
    pub fn stream(&mut self, id: FileId) -> Option<&mut Stream> {
        match &mut self.socket(id).ok()?.shape {
            Shape::Stream(stream) => Some(stream),
            _ => None,
        }
    }
}
