//! Open file descriptions: the objects that descriptors refer to, and that duplicates of a descriptor share.

use crate::datagram::CorkedDatagram;
use crate::epoll::EpollSet;
use crate::fd_table::FileId;
use crate::flow_labels::FlowLabels;
use crate::options::SocketOptionState;
use crate::sockaddr::Family;
use crate::tx_stamps::TxStamps;
use crate::wait_queue::WaitEntry;
use core::ffi::c_int;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::Conn;
use ginnel::channel::Reservation;
use ginnel::priority::ClassSet;
use rustix::fd::RawFd;
use rustix::io::Errno;

/// One open file description.
pub(crate) struct File {
    /// References from descriptors and from sleeping calls. The description is freed when the last one goes.
    pub refcount: u32,
    /// References from descriptors alone. When the last one goes, the program has closed the socket.
    pub fd_count: u32,
    pub kind: FileKind,
    /// The version of the shared state that was read last, if other processes have the description, too.
    pub shared_version: Option<u32>,
    /// Epoll items and threads to wake when the readiness changes, in the order in which they were added.
    pub wait_queue: Vec<WaitEntry>,
}

/// Kind of an open file description.
pub(crate) enum FileKind {
    /// The slot is unused.
    Free,
    Socket(Box<Socket>),
    Epoll(Box<EpollSet>),
}

/// A TCP or UDP socket.
pub(crate) struct Socket {
    pub family: Family,
    /// True if the socket is a UDP socket.
    pub is_udp: bool,
    /// State that few sockets need: for sending datagrams, for `SIOCGSTAMP`, for `SO_PEEK_OFF` and for
    /// transmit timestamps. `None` for sockets that have not needed it yet.
    pub udp_send: Option<Box<UdpSendState>>,
    /// The flow labels that the socket has reserved, or asked about.
    pub flow_labels: Option<Box<FlowLabels>>,
    pub nonblocking: bool,
    pub options: SocketOptionState,
    pub shutdown: ShutdownState,
    pub role: SocketRole,
    /// The value of `SO_COOKIE`, or 0 until it is asked for.
    pub cookie: u64,
    /// State of urgent data.
    pub urgent: UrgentState,
    /// The last round of [`NetdownRounds`](crate::stack_end::NetdownRounds) in which a call has reported
    /// `ENETDOWN`; 0 before the first.
    pub netdown_round: u32,
    /// The local address that the socket had before. Linux goes on reporting it (`inet_sport`).
    pub last_address: Option<SocketAddr>,
}

/// State of urgent data.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UrgentState {
    /// The process or, if negative, the process group that gets `SIGURG` (`F_SETOWN`); 0 is none.
    pub owner: c_int,
    /// The socket's counter of urgent notifications when it was read last.
    pub oob_events_seen: u32,
    /// True if an urgent byte was announced and has not arrived yet.
    pub byte_pending: bool,
}

/// State of a UDP socket for sending, for `SIOCGSTAMP` and for `SO_PEEK_OFF`.
#[derive(Clone, Debug, Default)]
pub(crate) struct UdpSendState {
    /// Destinations to which the socket has sent.
    pub destinations: Vec<SocketAddr>,
    /// Datagrams that exceed the path MTU are refused, not fragmented (`IP_PMTUDISC_DO` and stricter modes).
    pub refuses_too_long: bool,
    /// The longest datagram, in bytes, that the stack has accepted so far.
    pub longest_sent: usize,
    /// The first datagram to a destination waits in the channel, or did, because the device had no room.
    pub waits_for_device: bool,
    /// `UDP_CORK` is set: writes are collected into one datagram.
    pub corking: bool,
    /// Payload bytes of each datagram into which a write is cut (`UDP_SEGMENT`), or 0.
    pub gso_size: u16,
    /// The datagram being collected.
    pub corked: Option<CorkedDatagram>,
    /// The program asks when datagrams arrived (`SIOCGSTAMP`).
    pub notes_arrival: bool,
    /// When the datagram arrived that was received last.
    pub last_arrival: Option<Duration>,
    /// Peeks begin at an offset (`SO_PEEK_OFF`).
    pub has_peek_offset: bool,
    /// Positions of the empty datagrams in the queue at which the program has peeked.
    pub peeked_empty: Vec<u64>,
    /// A datagram may have to be sent by a request.
    pub checks_sends: bool,
    /// Transmit timestamps.
    pub tx_stamps: TxStamps,
}

impl UdpSendState {
    /// Determines whether datagrams may have to be sent by a request.
    pub fn update_checks(&mut self) {
        self.checks_sends = self.refuses_too_long || self.tx_stamps.concern_next();
    }

    /// Returns whether a datagram of this length has to be sent by a request: if it is longer than any that
    /// was sent so far and may be too long, or if the program wants to know when it leaves.
    #[cold]
    pub fn needs_request(&self, bytes: usize) -> bool {
        self.refuses_too_long && bytes > self.longest_sent || self.tx_stamps.concern_next()
    }

    /// Returns whether something has to be done when a datagram was received.
    #[inline]
    pub fn follows_receipts(&self) -> bool {
        self.notes_arrival | self.has_peek_offset
    }
}

/// The directions that were shut down (`sk_shutdown`). As in Linux, sockets that are not connected have it,
/// too.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ShutdownState {
    pub read: bool,
    pub write: bool,
    /// True if the connection ended with the process of the shards, and the socket was not connected again.
    pub is_lost: bool,
    /// `sk_err` of a lost connection, and of one that was shut down in its handshake, until it is reported.
    pub error: Option<Errno>,
}

/// The role of a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SocketRole {
    /// The socket is neither connected nor listening, and a UDP socket has no port yet.
    Unconnected {
        bound: Option<BoundAddress>,
    },
    Listening(Listener),
    Stream(Stream),
    /// A UDP socket with a port.
    Udp(UdpSocket),
}

/// The stack's side of a UDP socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UdpSocket {
    /// The handle of the channel socket.
    pub conn: Conn,
    /// True if the program has bound the socket to a port that it chose, or if a kernel socket has the port,
    /// too. Any other port is released by a disconnect (`SOCK_BINDPORT_LOCK`).
    pub port_locked: bool,
    /// True if the program has bound an address (`SOCK_BINDADDR_LOCK`).
    pub address_locked: bool,
    /// The address to which the socket is connected.
    pub peer: Option<SocketAddr>,
    /// The descriptor if a kernel socket behind it serves the socket, too.
    pub kernel_fd: Option<RawFd>,
    /// True if reading was shut down.
    pub shut_read: bool,
    /// True if writing was shut down.
    pub shut_write: bool,
    /// An error that `recvmmsg` could not report because messages preceded it. The next call returns it.
    pub deferred_error: Option<Errno>,
}

/// An address that `bind` gave a socket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BoundAddress {
    pub reserved: Reservation,
    /// True if the program chose the port, and the socket keeps it after a disconnect (`SOCK_BINDPORT_LOCK`).
    pub port_locked: bool,
    /// The descriptor if a kernel socket behind it is bound to the address, too.
    pub kernel_fd: Option<RawFd>,
    /// Random number of the open file description, or 0. Processes that share the description and listen on
    /// it get one listener.
    pub description: u64,
    /// True if another process may have the socket, too: what it listens with is published.
    pub is_shared: bool,
}

/// Number of a reservation that belongs to another process or no longer exists.
pub(crate) const FOREIGN_RESERVATION: u32 = u32::MAX;

impl BoundAddress {
    pub fn address(&self) -> SocketAddr {
        self.reserved.address
    }

    /// Returns the reservation if this process made it: no other process can release it.
    pub fn own_reservation(&self) -> Option<Reservation> {
        Some(self.reserved).filter(|reserved| reserved.number != FOREIGN_RESERVATION)
    }

    /// Returns whether the socket keeps the address after a disconnect. An address with a kernel socket
    /// stays, too.
    pub fn survives_disconnect(&self) -> bool {
        self.port_locked || self.kernel_fd.is_some()
    }
}

impl Socket {
    /// Forgets the transmit timestamps that are awaited of a connection which is gone.
    pub fn forget_awaited_stamps(&mut self) {
        if let Some(udp_send) = &mut self.udp_send {
            udp_send.tx_stamps.forget_awaited();
        }
    }

    /// Returns the address that `bind` reserved for the socket, to change it.
    pub fn bound_mut(&mut self) -> Option<&mut BoundAddress> {
        match &mut self.role {
            SocketRole::Unconnected { bound } => bound.as_mut(),
            SocketRole::Listening(listening) => Some(&mut listening.bound),
            SocketRole::Stream(stream) => stream.bound.as_mut(),
            SocketRole::Udp(_) => None,
        }
    }

    /// Returns whether the program has bound an address, other than the unspecified one, of which the socket
    /// has no port now.
    pub fn has_bound_address(&self) -> bool {
        self.last_address.is_some_and(|address| !address.ip().is_unspecified())
    }

    /// Records that one or both directions were shut down.
    pub fn record_shutdown(&mut self, read: bool, write: bool) {
        self.shutdown.read |= read;
        self.shutdown.write |= write;
    }

    /// Returns the address to which a UDP socket is connected.
    pub fn connected_peer(&self) -> Option<SocketAddr> {
        match self.role {
            SocketRole::Udp(udp) => udp.peer,
            _ => None,
        }
    }

    /// Returns the address that `bind` reserved for the socket.
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
    /// The number of the channel listener.
    pub number: u32,
    pub bound: BoundAddress,
    /// True if this process has granted accept credit because a thread asked for connections. A master
    /// process that only listens must not take connections from its workers.
    pub accepting: bool,
    pub backlog: u32,
    /// The descriptor if a kernel socket behind it listens, too.
    pub kernel_fd: Option<RawFd>,
}

/// A connection, with the fields of `struct socket` and `struct sock`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stream {
    pub conn: Conn,
    /// `connect` was called and has not reported its result yet (`SS_CONNECTING`).
    pub connecting: bool,
    /// True if the socket was shut down after the connection had failed and before `connect` reported that
    /// (`SS_DISCONNECTING`).
    pub disconnecting: bool,
    /// `sk_err`.
    pub error: Option<Errno>,
    /// True if the end of the connection was turned into an error.
    pub end_seen: bool,
    /// True if the last send set `MSG_MORE`.
    pub msg_more: bool,
    /// True if a send has something to do after its bytes were written: to release what `MSG_MORE` has held
    /// back, or to ask for transmit timestamps.
    pub has_end_work: bool,
    /// How many bytes were acknowledged when a write last found the send buffer full (`SOCK_NOSPACE`) or, if
    /// the program has fixed the size of the buffer, when the stack was last asked. Used only if the send
    /// buffer limits writes.
    pub nospace_acked: Option<u64>,
    /// The address that `bind` reserved for the socket.
    pub bound: Option<BoundAddress>,
    /// True if the socket was bound again after the connection had ended. A disconnect then keeps the
    /// address, which is `bound` or, without a port, that of [`Socket::last_address`].
    pub is_rebound: bool,
    /// The descriptor whose report entry lacks the local address, until that address is known.
    pub incomplete_report_fd: Option<RawFd>,
    /// True if the last message of unordered send found no room: see [`crate::unordered`].
    pub message_blocked: bool,
}

impl Stream {
    pub fn new(conn: Conn, connecting: bool, bound: Option<BoundAddress>) -> Self {
        let (error, incomplete_report_fd, nospace_acked) = (None, None, None);
        let (disconnecting, end_seen, msg_more, message_blocked) = (false, false, false, false);
        let is_rebound = false;
        let has_end_work = false;
        Self {
            conn,
            connecting,
            disconnecting,
            error,
            end_seen,
            msg_more,
            has_end_work,
            nospace_acked,
            bound,
            is_rebound,
            incomplete_report_fd,
            message_blocked,
        }
    }
}

/// Boxes of closed sockets that are kept for reuse: as many as connections are offered at a time.
const SPARE_MAX: usize = 64;

/// All open file descriptions of a process.
#[derive(Default)]
pub(crate) struct Files {
    files: Vec<File>,
    free: Vec<FileId>,
    #[allow(clippy::vec_box)] // recycled sockets keep their boxes
    spare: Vec<Box<Socket>>,
    /// True once the order of ready descriptors may matter: the stack has priorities, and has reported an
    /// event, or a socket has a priority.
    pub has_priorities: bool,
    /// The class of priority of the event that is being handled. Empty for an event about data, whose class
    /// the socket tells.
    pub event_classes: ClassSet,
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

    /// Moves a socket into a box, reusing the box of a closed socket if there is one.
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

    /// Keeps the box of a closed socket for reuse.
    #[inline]
    pub fn recycle(&mut self, socket: Box<Socket>) {
        if self.spare.len() < SPARE_MAX {
            self.spare.push(socket);
        }
    }

    /// Frees a slot and returns what was in it. The wait queue keeps its capacity.
    pub fn remove(&mut self, id: FileId) -> FileKind {
        let file = &mut self.files[id as usize];
        file.wait_queue.clear();
        self.free.push(id);
        core::mem::replace(&mut file.kind, FileKind::Free)
    }

    /// Returns the numbers of all slots in use.
    pub fn ids(&self) -> Vec<FileId> {
        let in_use =
            |(id, file): (usize, &File)| (!matches!(file.kind, FileKind::Free)).then_some(id as FileId);
        self.files.iter().enumerate().filter_map(in_use).collect()
    }

    /// Returns the socket of a description.
    ///
    /// # Errors
    /// `ENOTSOCK` for an epoll set, `EBADF` for a free slot.
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

    /// Returns the connection of a socket.
    #[inline]
    pub fn stream(&mut self, id: FileId) -> Option<&mut Stream> {
        match &mut self.socket(id).ok()?.role {
            SocketRole::Stream(stream) => Some(stream),
            _ => None,
        }
    }
}
