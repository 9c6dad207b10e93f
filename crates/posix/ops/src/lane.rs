//! What all calls of a process share: the channel, and the open file descriptions whose sockets are at its other end.

use crate::book::{Book, Entry};
use crate::channels::Channels;
use crate::connect::errno_of_refusal;
use crate::descriptor::{Internal, Placeholders};
use crate::fd_table::FileId;
use crate::file::{Bound, Files, Kind, Shape, Socket};
use crate::held::Left;
use crate::sleep::Sleepers;
use crate::wake::{self, Watcher};
use core::net::{IpAddr, SocketAddr};
use ginnel::channel::{ClientEvent, Standing, Status};
use ginnel::door::Process;
use ginnel::{CloseReason, Conn};
use libc::{POLLIN, POLLOUT, POLLPRI, POLLRDBAND, POLLRDNORM, POLLWRBAND, POLLWRNORM};
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::sync::Arc;

/// What may have become true, by the kernel's callbacks: `sk_data_ready`, `sk_write_space`, and `sk_state_change`, which concerns whoever waits for whatever.
pub(crate) const DATA_READY: i16 = POLLIN | POLLPRI | POLLRDNORM | POLLRDBAND;
const WRITE_SPACE: i16 = POLLOUT | POLLWRNORM | POLLWRBAND;
const STATE_CHANGE: i16 = 0;
/// Looks for readiness that do not wait and find nothing, of which one looks for the end of the stack.
const END_EVERY: u32 = 256;

pub(crate) struct Lane {
    pub client: Channels,
    pub files: Files,
    pub placeholders: Placeholders,
    pub sleepers: Sleepers,
    /// The connection to the stack's process, which tells it when this one is gone.
    pub process: Option<Process>,
    /// The next of `SO_COOKIE`.
    pub next_cookie: u64,
    /// Hosts that UDP sockets reach.
    pub ways: Vec<IpAddr>,
    /// What holds listeners of the kernel and the stack that were sent to other processes, by the cookie of the kernel's half.
    pub sent: Vec<(u64, Internal)>,
    /// What others may know of the descriptors; absent where nobody is to read it.
    pub book: Option<Book>,
    /// What is to be done when the sockets are let go of.
    pub left: Arc<Left>,
    /// See [`OpsConfig::send_buffer`](crate::OpsConfig).
    pub send_buffer: Option<[u32; 2]>,
    /// Calls that did not wait and found nothing.
    fruitless: u32,
    /// By the number of the channel's socket: the description and one, or 0.
    by_socket: Vec<FileId>,
    /// By the number of the channel's listener, the same.
    by_listener: Vec<FileId>,
}

impl Lane {
    pub fn new(client: Channels) -> Result<Self, Errno> {
        Ok(Self {
            client,
            files: Files::default(),
            placeholders: Placeholders::new()?,
            sleepers: Sleepers::default(),
            process: None,
            next_cookie: 1,
            ways: Vec::new(),
            sent: Vec::new(),
            book: None,
            left: Arc::default(),
            send_buffer: None,
            fruitless: 0,
            by_socket: Vec::new(),
            by_listener: Vec::new(),
        })
    }

    /// Events about a connection go to this description from now on.
    pub fn bind_conn(&mut self, conn: Conn, file: FileId) {
        note(&mut self.by_socket, conn.index(), file + 1);
    }

    pub fn unbind_conn(&mut self, conn: Conn) {
        note(&mut self.by_socket, conn.index(), 0);
    }

    /// The description behind a listener.
    pub fn file_of_listener(&self, listener: u32) -> Option<FileId> {
        found(&self.by_listener, listener)
    }

    pub fn bind_listener(&mut self, listener: u32, file: FileId) {
        note(&mut self.by_listener, listener, file + 1);
    }

    pub fn unbind_listener(&mut self, listener: u32) {
        note(&mut self.by_listener, listener, 0);
    }

    /// Notes for others what a descriptor of this description is.
    pub fn write_down(&mut self, fd: RawFd, file: FileId) {
        let Self { book: Some(book), files, client, .. } = self else { return };
        let entry = match &files.get(file).kind {
            Kind::Free => return,
            Kind::Epoll(_) => Entry::Epoll,
            Kind::Socket(socket) => match socket.shape {
                Shape::Fresh { .. } if socket.datagrams => Entry::Datagrams([socket.family.any(); 2], false),
                Shape::Datagrams(dgram) => {
                    let [own, _] = client.ends(dgram.conn).unwrap_or([socket.family.any(); 2]);
                    let peer = dgram.connected.unwrap_or(socket.family.any());
                    Entry::Datagrams([own, peer], dgram.kernel.is_some())
                }
                Shape::Fresh { bound: None } => Entry::Open,
                Shape::Fresh { bound: Some(bound) } => Entry::Bound(bound.address()),
                Shape::Listening(listening) => {
                    Entry::Listener(listening.bound.address(), listening.kernel.is_some())
                }
                Shape::Stream(stream) => client.ends(stream.conn).map_or(Entry::Open, Entry::Stream),
            },
        };
        book.write(fd, entry);
    }

    /// The same of a connection that was opened without a question: its own end is known now.
    fn write_down_own_end(&mut self, conn: Conn) {
        let unnamed = self.file_of(conn).and_then(|file| self.files.stream(file)?.unnamed.take());
        if let (Some(fd), Some(book), Ok(ends)) = (unnamed, &self.book, self.client.ends(conn)) {
            book.complete(fd, ends);
        }
    }

    /// Before a connection is shared that was opened without a question a moment ago: the stack is asked for its own end, as only one descriptor is completed
    /// when it says so by itself.
    pub fn know_own_end(&mut self, file: FileId) {
        let unnamed = self.files.stream(file).filter(|stream| stream.unnamed.is_some());
        if let Some(conn) = unnamed.map(|stream| stream.conn)
            && self.ends_of(conn).is_some_and(|[own, _]| own.port() != 0)
        {
            self.write_down_own_end(conn);
        }
    }

    /// Both ends of a connection: the stack is asked if it has not said yet.
    pub fn ends_of(&mut self, conn: Conn) -> Option<[SocketAddr; 2]> {
        let ends = self.client.ends(conn).ok()?;
        if ends[0].port() != 0 {
            return Some(ends);
        }
        // By the answer it has opened the connection, or could not.
        let _ = self.client.info(conn);
        self.client.ends(conn).ok()
    }

    /// A descriptor is ours no more.
    pub fn strike_out(&self, fd: RawFd) {
        if let Some(book) = &self.book {
            book.clear(fd);
        }
    }

    /// Begins a book for so many descriptors, of which these are the library's own.
    pub fn begin_book(&mut self, descriptors: usize) {
        self.book = match self.book.take() {
            Some(parents) => parents.of_child(),
            None => Book::new(descriptors),
        }
        .ok();
        let Some(book) = &self.book else { return };
        let of_process = self.process.iter().map(Process::line);
        for fd in of_process.chain(self.client.own_fds()).chain([self.placeholders.original()]) {
            book.write(fd, Entry::Internal);
        }
    }

    /// Takes news from the channel and tells those concerned.
    pub fn pump(&mut self) {
        while let Some(event) = self.client.next_event() {
            match event {
                ClientEvent::Offered { listener } => {
                    if let Some(file) = found(&self.by_listener, listener) {
                        self.wake(file, DATA_READY);
                    }
                }
                // Connections are accepted by hand.
                ClientEvent::Accepted { .. } => {}
                ClientEvent::Connected { conn } => {
                    self.write_down_own_end(conn);
                    self.wake_conn(conn, STATE_CHANGE);
                }
                ClientEvent::Readable { conn } => {
                    if let Some(file) = self.file_of(conn) {
                        self.data_ready(file);
                    }
                }
                // Something was said about a datagram.
                ClientEvent::Datagrams { conn } => self.wake_conn(conn, STATE_CHANGE),
                ClientEvent::Urgent { conn } => {
                    if let Some(file) = self.file_of(conn)
                        && self.heard_of_urgent(file)
                    {
                        self.wake(file, DATA_READY);
                    }
                }
                ClientEvent::Writable { conn } => self.wake_conn(conn, WRITE_SPACE),
                ClientEvent::Acked { conn, .. }
                | ClientEvent::PeerClosed { conn }
                | ClientEvent::Closed { conn, .. } => self.wake_conn(conn, STATE_CHANGE),
            }
        }
    }

    /// The description behind a connection, or a UDP socket.
    #[inline]
    pub fn file_of(&mut self, conn: Conn) -> Option<FileId> {
        let file = found(&self.by_socket, conn.index())?;
        let current = match self.files.socket(file).ok()?.shape {
            Shape::Stream(stream) => stream.conn == conn,
            Shape::Datagrams(dgram) => dgram.conn == conn,
            _ => false,
        };
        current.then_some(file)
    }

    fn wake_conn(&mut self, conn: Conn, key: i16) {
        if let Some(file) = self.file_of(conn) {
            self.wake(file, key);
        }
    }

    /// Wakes those who wait for bytes, if there are as many as it takes (`tcp_data_ready`).
    #[inline]
    pub fn data_ready(&mut self, file: FileId) {
        // Datagrams are counted, not their bytes.
        let low_water = match self.files.socket(file) {
            Ok(socket) if !socket.datagrams => socket.options.recv_low_water(),
            _ => 1,
        };
        // One is enough, also if it was read before anybody looked here: it came.
        if low_water <= 1 || self.is_above_low_water(file, low_water) {
            self.wake(file, DATA_READY);
        }
    }

    #[cold]
    fn is_above_low_water(&mut self, file: FileId, low_water: usize) -> bool {
        let low_water = low_water.min(self.client.buffer_bytes());
        self.status(file)
            .is_some_and(|(_, status)| status.readable >= low_water || status.standing.peer_closed())
    }

    /// Tells whoever watches a description that something of `key` may have become true.
    pub fn wake(&mut self, file: FileId, key: i16) {
        wake::wake(&mut self.files, &mut self.sleepers, file, key);
    }

    /// Tells threads that sleep at a description.
    pub fn wake_threads(&mut self, file: FileId) {
        wake::wake_threads(&mut self.files, &mut self.sleepers, file);
    }

    /// A call that does not wait found nothing. One that is made again and again never sleeps, so that it looks now and then whether there is a stack.
    pub fn found_nothing(&mut self) {
        self.fruitless = self.fruitless.wrapping_add(1);
        if self.fruitless.is_multiple_of(END_EVERY) && !self.client.is_gone() {
            self.client.look_for_end();
            if self.client.is_gone() {
                self.pump();
                self.wake_all();
            }
        }
    }

    /// The stack is gone: whoever waits for anything looks again.
    pub fn wake_all(&mut self) {
        for file in self.files.ids() {
            self.wake(file, STATE_CHANGE);
        }
    }

    /// How things stand with a connection; its end becomes the error that the kernel would report, once.
    pub fn status(&mut self, file: FileId) -> Option<(Conn, Status)> {
        self.status_here(file)
    }

    /// The same where all of it is made use of at once.
    #[inline(always)]
    pub fn status_here(&mut self, file: FileId) -> Option<(Conn, Status)> {
        let stream = self.files.stream(file)?;
        let (conn, end_seen) = (stream.conn, stream.end_seen);
        let status = self.client.status(conn).ok()?;
        if status.standing.is_over() && !end_seen {
            let (conn, standing) = self.see_end(file, status.standing)?;
            return Some((conn, self.client.status_beside(conn, standing).ok()?));
        }
        Some((conn, status))
    }

    /// The same without what is known of its bytes.
    #[inline(always)]
    pub fn standing(&mut self, file: FileId) -> Option<(Conn, Standing)> {
        let stream = self.files.stream(file)?;
        let (conn, end_seen) = (stream.conn, stream.end_seen);
        let standing = self.client.standing(conn).ok()?;
        if standing.is_over() && !end_seen {
            return self.see_end(file, standing);
        }
        Some((conn, standing))
    }

    /// It is over, and nobody was told yet.
    #[cold]
    pub(crate) fn see_end(&mut self, file: FileId, mut standing: Standing) -> Option<(Conn, Standing)> {
        if standing.ended() == Some(CloseReason::Aborted)
            && self.files.stream(file)?.connecting
            && let Some(conn) = self.connect_elsewhere(file)
        {
            standing = self.client.standing(conn).ok()?;
        }
        let stream = self.files.stream(file)?;
        if let Some(reason) = standing.ended() {
            stream.end_seen = true;
            let refused = (stream.connecting && reason == CloseReason::Aborted)
                .then(|| self.client.refusal(stream.conn));
            let error = match refused.flatten() {
                Some(why) => Some(errno_of_refusal(why)),
                None => error_of(reason, standing.peer_closed()),
            };
            // An error that came before stays.
            stream.error = stream.error.or(error);
        }
        Some((stream.conn, standing))
    }

    /// Takes the pending error (`sock_error`).
    pub fn take_error(&mut self, file: FileId) -> Option<Errno> {
        self.standing(file)?;
        self.files.stream(file)?.error.take()
    }

    /// Nobody uses a description any more.
    pub fn forget(&mut self, file: FileId) {
        // In its place, whose memory is kept for the next.
        while let Some(watcher) = self.files.get(file).watchers.pop() {
            if let Watcher::Item { set, item } = watcher
                && let Ok(set) = self.files.epoll(set)
            {
                set.remove(item);
            }
        }
        match self.files.remove(file) {
            Kind::Socket(mut socket) => {
                self.close_socket(&mut socket);
                // What it has beside itself is not kept.
                socket.outbox = None;
                socket.options.forget_memory();
                self.files.put_by(socket);
            }
            Kind::Epoll(set) => {
                for watched in set.watched() {
                    let watchers = &mut self.files.get(watched).watchers;
                    watchers.retain(|w| !matches!(w, Watcher::Item { set, .. } if *set == file));
                }
            }
            Kind::Free => {}
        }
    }

    pub fn unreserve(&mut self, bound: Option<Bound>) {
        if let Some(reserved) = bound.and_then(|bound| bound.own()) {
            // If the stack is gone there is nothing reserved.
            let _ = self.client.unreserve(reserved);
        }
    }

    fn close_socket(&mut self, socket: &mut Socket) {
        match socket.shape {
            Shape::Fresh { bound } => self.unreserve(bound),
            Shape::Listening(listening) => {
                self.unbind_listener(listening.number);
                // If the stack is gone there is nothing to close.
                let _ = self.client.unlisten(listening.number, listening.bound.own());
            }
            Shape::Datagrams(dgram) => self.release_datagrams(dgram.conn),
            Shape::Stream(stream) => {
                self.unreserve(stream.bound);
                self.unbind_conn(stream.conn);
                if socket.options.resets_at_close() {
                    let _ = self.client.abort(stream.conn);
                }
                let _ = self.client.release(stream.conn);
                self.client.flush();
            }
        }
    }
}

/// What `sk_err` becomes when a connection ends (`tcp_reset`, `tcp_write_err`). A reset in CLOSE_WAIT is `EPIPE`.
fn error_of(reason: CloseReason, fin: bool) -> Option<Errno> {
    Some(match reason {
        CloseReason::Normal | CloseReason::Aborted => return None,
        CloseReason::Reset if fin => Errno::PIPE,
        CloseReason::Reset => Errno::CONNRESET,
        CloseReason::Refused => Errno::CONNREFUSED,
        CloseReason::TimedOut => Errno::TIMEDOUT,
        CloseReason::HostUnreachable => Errno::HOSTUNREACH,
        CloseReason::NetUnreachable => Errno::NETUNREACH,
        CloseReason::ProtocolUnreachable => Errno::NOPROTOOPT,
    })
}

fn note(table: &mut Vec<FileId>, number: u32, file: FileId) {
    let number = number as usize;
    if table.len() <= number {
        table.resize(number + 1, 0);
    }
    table[number] = file;
}

fn found(table: &[FileId], number: u32) -> Option<FileId> {
    table.get(number as usize)?.checked_sub(1)
}
