//! Open file descriptions: what descriptors stand for, and what copies of a descriptor share.

use crate::datagram::CorkedDatagram;
use crate::epoll::EpollSet;
use crate::fd_table::FileId;
use crate::options::SocketOptionState;
use crate::sockaddr::Family;
use crate::wait_queue::WaitEntry;
use core::ffi::c_int;
use core::net::SocketAddr;
use ginnel::Conn;
use ginnel::channel::Reservation;
use rustix::fd::RawFd;
use rustix::io::Errno;

/// One open file description.
pub(crate) struct File {
    /// Descriptors, and calls that sleep, which keep it alive.
    pub refcount: u32,
    /// Descriptors alone: when the last goes the socket is closed to the program.
    pub fd_count: u32,
    pub kind: FileKind,
    /// Other processes have it, too: the last change of what all agree on that was seen here.
    pub shared_version: Option<u32>,
    /// Who is told when its readiness changes, in the order in which they came.
    pub wait_queue: Vec<WaitEntry>,
}

/// What it is.
pub(crate) enum FileKind {
    /// The place is free.
    Free,
    Socket(Box<Socket>),
    Epoll(Box<EpollSet>),
}

/// A socket of TCP or UDP.
pub(crate) struct Socket {
    pub family: Family,
    /// It is one of UDP.
    pub is_udp: bool,
    /// What is known of that which it has sent, if it is one of UDP and has sent anything.
    pub udp_send: Option<Box<UdpSendState>>,
    pub nonblocking: bool,
    pub options: SocketOptionState,
    pub shutdown: ShutdownState,
    pub role: SocketRole,
    /// Once it was asked for (`SO_COOKIE`).
    pub cookie: u64,
    /// Who hears of urgent data.
    pub urgent: UrgentState,
    /// An address that it had and has no more, which Linux goes on telling (`inet_sport`).
    pub last_address: Option<SocketAddr>,
}

/// What is to be told of urgent data.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UrgentState {
    /// Who gets `SIGURG`, as `F_SETOWN` says it.
    pub owner: c_int,
    /// What had been said about urgent data when it was looked at last.
    pub notices_seen: u32,
    /// A byte that was announced is still to come.
    pub byte_pending: bool,
}

/// What a UDP socket has sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct UdpSendState {
    /// Where to.
    pub destinations: Vec<SocketAddr>,
    /// Datagrams that are too long for the path are refused, not cut (`IP_PMTUDISC_DO` and beyond).
    pub refuses_too_long: bool,
    /// The longest datagram of which the stack said that it was not too long.
    pub longest_sent: usize,
    /// Datagrams are put together until it is said otherwise (`UDP_CORK`).
    pub corking: bool,
    /// What is sent is cut into datagrams of so many bytes (`UDP_SEGMENT`), or 0.
    pub gso_size: u16,
    /// A datagram of which more is to come.
    pub corked: Option<CorkedDatagram>,
}

/// `shutdown` of each direction (`sk_shutdown`). Linux keeps it also for what is not connected.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ShutdownState {
    pub read: bool,
    pub write: bool,
}

/// What became of a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SocketRole {
    /// It is neither connected nor does it listen.
    Unconnected {
        bound: Option<BoundAddress>,
    },
    Listening(Listener),
    Stream(Stream),
    /// A UDP socket that has an address.
    Udp(UdpSocket),
}

/// A UDP socket's side on the stack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UdpSocket {
    /// Its number of the channel's, as that of a connection.
    pub conn: Conn,
    /// The program gave it its address.
    pub bound: bool,
    /// Its other end, if that is fixed.
    pub peer: Option<SocketAddr>,
    /// The kernel's socket behind this descriptor serves it, too.
    pub kernel_fd: Option<RawFd>,
    /// `shutdown` of each direction.
    pub shut_read: bool,
    pub shut_write: bool,
    /// An error that a call had no room to tell (`recvmmsg`): the next one's.
    pub deferred_error: Option<Errno>,
}

/// An address that `bind` gave a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BoundAddress {
    pub reserved: Reservation,
    /// The program named the port, and keeps it whatever becomes of the socket (`SOCK_BINDPORT_LOCK`).
    pub port_locked: bool,
    /// The kernel's socket behind this descriptor is bound to it, too.
    pub kernel_fd: Option<RawFd>,
}

/// A reservation that is another process's, or nobody's any more.
pub(crate) const FOREIGN_RESERVATION: u32 = u32::MAX;

impl BoundAddress {
    pub fn address(&self) -> SocketAddr {
        self.reserved.address
    }

    /// The reservation, if this process made it: no other can give it up.
    pub fn own_reservation(&self) -> Option<Reservation> {
        Some(self.reserved).filter(|reserved| reserved.number != FOREIGN_RESERVATION)
    }

    /// Whether it outlives what was made with it. (The kernel's half keeps it, too.)
    pub fn survives_disconnect(&self) -> bool {
        self.port_locked || self.kernel_fd.is_some()
    }
}

impl Socket {
    /// What `bind` reserved for it.
    pub fn bound_mut(&mut self) -> Option<&mut BoundAddress> {
        match &mut self.role {
            SocketRole::Unconnected { bound } => bound.as_mut(),
            SocketRole::Listening(listening) => Some(&mut listening.bound),
            SocketRole::Stream(stream) => stream.bound.as_mut(),
            SocketRole::Udp(_) => None,
        }
    }

    /// One direction or both are done with.
    pub fn record_shutdown(&mut self, read: bool, write: bool) {
        self.shutdown.read |= read;
        self.shutdown.write |= write;
    }

    /// The other end of a UDP socket, if that is fixed.
    pub fn connected_peer(&self) -> Option<SocketAddr> {
        match self.role {
            SocketRole::Udp(dgram) => dgram.peer,
            _ => None,
        }
    }

    /// What `bind` gave it.
    pub fn bound(&self) -> Option<BoundAddress> {
        match self.role {
            SocketRole::Unconnected { bound } => bound,
            SocketRole::Listening(listening) => Some(listening.bound),
            SocketRole::Stream(stream) => stream.bound,
            SocketRole::Udp(_) => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Listener {
    /// Of the channel.
    pub number: u32,
    pub bound: BoundAddress,
    /// Somebody asked for connections, so this process takes its share. A master that only listens must not.
    pub accepting: bool,
    pub backlog: u32,
    /// The kernel's socket behind this descriptor listens, too.
    pub kernel_fd: Option<RawFd>,
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
    pub msg_more: bool,
    /// A write found the send buffer full when so many bytes were acknowledged (`SOCK_NOSPACE`), where writes are bounded by it.
    pub nospace_acked: Option<u64>,
    /// What `bind` reserved for it.
    pub bound: Option<BoundAddress>,
    /// The descriptor by which it was opened, while its own end is not known.
    pub incomplete_report_fd: Option<RawFd>,
}

impl Stream {
    pub fn new(conn: Conn, connecting: bool, bound: Option<BoundAddress>) -> Self {
        let (error, incomplete_report_fd, nospace_acked) = (None, None, None);
        let (disconnecting, end_seen, msg_more) = (false, false, false);
        Self {
            conn,
            connecting,
            disconnecting,
            error,
            end_seen,
            msg_more,
            nospace_acked,
            bound,
            incomplete_report_fd,
        }
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
    pub fn add(&mut self, kind: FileKind) -> FileId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.files.push(File {
                refcount: 0,
                fd_count: 0,
                kind: FileKind::Free,
                shared_version: None,
                wait_queue: Vec::new(),
            });
            self.files.len() as FileId - 1
        });
        let file = &mut self.files[id as usize];
        (file.kind, file.shared_version) = (kind, None);
        id
    }

    #[inline]
    pub fn get(&mut self, id: FileId) -> &mut File {
        &mut self.files[id as usize]
    }

    /// A socket in memory of its own, which may be that of one before.
    #[inline]
    pub fn box_socket(&mut self, socket: Socket) -> Box<Socket> {
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
    pub fn recycle(&mut self, socket: Box<Socket>) {
        if self.spare.len() < SPARE_MAX {
            self.spare.push(socket);
        }
    }

    /// The place is free again. The list of watchers keeps its memory.
    pub fn remove(&mut self, id: FileId) -> FileKind {
        let file = &mut self.files[id as usize];
        file.wait_queue.clear();
        self.free.push(id);
        core::mem::replace(&mut file.kind, FileKind::Free)
    }

    /// All that are in use.
    pub fn ids(&self) -> Vec<FileId> {
        let in_use =
            |(id, file): (usize, &File)| (!matches!(file.kind, FileKind::Free)).then_some(id as FileId);
        self.files.iter().enumerate().filter_map(in_use).collect()
    }

    /// The socket of a description.
    #[inline]
    pub fn socket(&mut self, id: FileId) -> Result<&mut Socket, Errno> {
        match &mut self.files[id as usize].kind {
            FileKind::Socket(socket) => Ok(socket),
            FileKind::Epoll(_) => Err(Errno::NOTSOCK),
            FileKind::Free => Err(Errno::BADF),
        }
    }

    #[inline]
    pub fn epoll(&mut self, id: FileId) -> Result<&mut EpollSet, Errno> {
        match &mut self.files[id as usize].kind {
            FileKind::Epoll(set) => Ok(set),
            FileKind::Socket(_) => Err(Errno::INVAL),
            FileKind::Free => Err(Errno::BADF),
        }
    }

    /// The connection of a socket.
    #[inline]
    pub fn stream(&mut self, id: FileId) -> Option<&mut Stream> {
        match &mut self.socket(id).ok()?.role {
            SocketRole::Stream(stream) => Some(stream),
            _ => None,
        }
    }
}
