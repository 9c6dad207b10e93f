//! What all calls of a process share: the channel, and the open file descriptions whose sockets are at its other end.

use crate::descriptor::Placeholders;
use crate::fd_table::FileId;
use crate::file::{Bound, Files, Kind, Shape, Socket, Stream};
use crate::sleep::Sleepers;
use crate::wake::{self, Watcher};
use core::net::IpAddr;
use ginnel::channel::{Client, ClientEvent, Status};
use ginnel::door::Process;
use ginnel::{CloseReason, Conn};
use libc::{POLLIN, POLLOUT, POLLPRI, POLLRDBAND, POLLRDNORM, POLLWRBAND, POLLWRNORM};
use rustix::io::Errno;

/// What may have become true, by the kernel's callbacks: `sk_data_ready`, `sk_write_space`, and `sk_state_change`, which concerns whoever waits for whatever.
pub(crate) const DATA_READY: i16 = POLLIN | POLLPRI | POLLRDNORM | POLLRDBAND;
const WRITE_SPACE: i16 = POLLOUT | POLLWRNORM | POLLWRBAND;
const STATE_CHANGE: i16 = 0;

pub(crate) struct Lane {
    pub client: Client,
    pub files: Files,
    pub placeholders: Placeholders,
    pub sleepers: Sleepers,
    /// The connection to the stack's process, which tells it when this one is gone.
    pub process: Option<Process>,
    /// The next of `SO_COOKIE`.
    pub next_cookie: u64,
    /// Hosts that UDP sockets reach.
    pub udp_ways: Vec<IpAddr>,
    /// By the number of the channel's socket: the description and one, or 0.
    by_socket: Vec<FileId>,
    /// By the number of the channel's listener, the same.
    by_listener: Vec<FileId>,
}

impl Lane {
    pub fn new(mut client: Client) -> Result<Self, Errno> {
        client.accept_by_hand();
        Ok(Self {
            client,
            files: Files::default(),
            placeholders: Placeholders::new()?,
            sleepers: Sleepers::default(),
            process: None,
            next_cookie: 1,
            udp_ways: Vec::new(),
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

    pub fn bind_listener(&mut self, listener: u32, file: FileId) {
        note(&mut self.by_listener, listener, file + 1);
    }

    pub fn unbind_listener(&mut self, listener: u32) {
        note(&mut self.by_listener, listener, 0);
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
                ClientEvent::Connected { conn } => self.wake_conn(conn, STATE_CHANGE),
                ClientEvent::Readable { conn } => {
                    if let Some(file) = self.file_of(conn) {
                        self.data_ready(file);
                    }
                }
                // Something was said about a datagram.
                ClientEvent::Datagrams { conn } => self.wake_conn(conn, STATE_CHANGE),
                ClientEvent::Urgent { conn } => {
                    self.wake_conn(conn, DATA_READY);
                }
                ClientEvent::Writable { conn } => self.wake_conn(conn, WRITE_SPACE),
                ClientEvent::Acked { conn, .. }
                | ClientEvent::PeerClosed { conn }
                | ClientEvent::Closed { conn, .. } => self.wake_conn(conn, STATE_CHANGE),
            }
        }
    }

    fn file_of(&mut self, conn: Conn) -> Option<FileId> {
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
    pub fn data_ready(&mut self, file: FileId) {
        let most = self.client.buffer_bytes();
        // Datagrams are counted, not their bytes.
        let low_water = match self.files.socket(file) {
            Ok(socket) if !socket.datagrams => socket.options.recv_low_water().min(most),
            _ => 1,
        };
        // One is enough, also if it was read before anybody looked here: it came.
        if low_water <= 1
            || self.status(file).is_some_and(|(_, status)| status.readable >= low_water || status.peer_closed)
        {
            self.wake(file, DATA_READY);
        }
    }

    /// Tells whoever watches a description that something of `key` may have become true.
    pub fn wake(&mut self, file: FileId, key: i16) {
        wake::wake(&mut self.files, &mut self.sleepers, file, key);
    }

    /// Tells threads that sleep at a description.
    pub fn wake_threads(&mut self, file: FileId) {
        wake::wake_threads(&mut self.files, &mut self.sleepers, file);
    }

    /// The stack is gone: whoever waits for anything looks again.
    pub fn wake_all(&mut self) {
        for file in self.files.ids() {
            self.wake(file, STATE_CHANGE);
        }
    }

    /// How things stand with a connection; its end becomes the error that the kernel would report, once.
    pub fn status(&mut self, file: FileId) -> Option<(Stream, Status)> {
        let stream = self.files.stream(file)?;
        let status = self.client.status(stream.conn).ok()?;
        if let Some(reason) = status.ended
            && !stream.end_seen
        {
            stream.end_seen = true;
            // An error that came before stays.
            stream.error = stream.error.or(error_of(reason, status.peer_closed));
        }
        Some((*stream, status))
    }

    /// Takes the pending error (`sock_error`).
    pub fn take_error(&mut self, file: FileId) -> Option<Errno> {
        self.status(file)?;
        self.files.stream(file)?.error.take()
    }

    /// Nobody uses a description any more.
    pub fn forget(&mut self, file: FileId) {
        for watcher in core::mem::take(&mut self.files.get(file).watchers) {
            if let Watcher::Item { set, item } = watcher
                && let Ok(set) = self.files.epoll(set)
            {
                set.remove(item);
            }
        }
        match self.files.remove(file) {
            Kind::Socket(socket) => self.close_socket(*socket),
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
        if let Some(bound) = bound {
            // If the stack is gone there is nothing reserved.
            let _ = self.client.unreserve(bound.reserved);
        }
    }

    fn close_socket(&mut self, socket: Socket) {
        match socket.shape {
            Shape::Fresh { bound } => self.unreserve(bound),
            Shape::Listening(listening) => {
                self.unbind_listener(listening.number);
                // If the stack is gone there is nothing to close.
                let _ = self.client.unlisten(listening.number);
                self.unreserve(Some(listening.bound));
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
