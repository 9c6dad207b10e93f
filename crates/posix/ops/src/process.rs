//! The state that all calls of a process share: the channel, and the open file descriptions of the sockets at
//! its other end.

use crate::channels::Channels;
use crate::connect::connect_errno;
use crate::descriptor::ProxyFds;
use crate::descriptor_report::{DescriptorReport, ReportEntry};
use crate::fd_passing::PassedKernelSocket;
use crate::fd_table::FileId;
use crate::file::{BoundAddress, FileKind, Files, Socket, SocketRole};
use crate::isolation::Isolation;
use crate::local_delivery::LocalDelivery;
use crate::lock::DeferredWork;
use crate::sleep::Waiters;
use crate::stack_end::NetdownRounds;
use crate::wait_queue::{self, WaitEntry};
use core::net::{IpAddr, SocketAddr};
use ginnel::broker::Attachment;
use ginnel::channel::{ClientEvent, SocketState, SocketStatus};
use ginnel::{CloseReason, Conn};
use libc::{POLLIN, POLLOUT, POLLPRI, POLLRDBAND, POLLRDNORM, POLLWRBAND, POLLWRNORM};
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Instant;

/// Wake-up keys of the kernel's callbacks `sk_data_ready`, `sk_write_space` and `sk_state_change`. The last
/// one is 0, which wakes every waiter.
pub(crate) const DATA_READY: i16 = POLLIN | POLLPRI | POLLRDNORM | POLLRDBAND;
const WRITE_SPACE: i16 = POLLOUT | POLLWRNORM | POLLWRBAND;
const STATE_CHANGE: i16 = 0;
/// How many non-blocking calls that find nothing lie between two checks whether the stack still runs.
const LIVENESS_CHECK_INTERVAL: u32 = 256;

/// The state, which [`ProcessLock`](crate::lock::ProcessLock) protects.
pub(crate) struct ProcessState {
    pub client: Channels,
    pub files: Files,
    pub proxy_fds: ProxyFds,
    pub waiters: Waiters,
    /// The control connection to the stack's process, by which that process notices the end of this one.
    pub attachment: Option<Attachment>,
    /// The value of `SO_COOKIE` for the next socket that is asked for one.
    pub next_cookie: u64,
    /// Hosts to which the stack has a route, most recent last.
    pub reachable_hosts: Vec<IpAddr>,
    /// Kernel sockets that were passed to other processes with the stack's side of their sockets.
    pub passed_kernel_sockets: Vec<PassedKernelSocket>,
    /// Report that `ginnel check` may read about the descriptors; `None` if the report could not be created.
    pub report: Option<DescriptorReport>,
    /// Work to do when the lock is released.
    pub deferred: Arc<DeferredWork>,
    /// Lists what a child must not change that a handler forks in the middle of a call.
    pub isolation: Arc<Isolation>,
    /// See [`OpsConfig::send_buffer`](crate::OpsConfig).
    pub send_buffer: Option<[u32; 2]>,
    /// How often the process has continued after a restart of the shards.
    pub restarts: u32,
    /// True if all waits were ended because the stack is gone.
    pub is_end_noticed: bool,
    /// When the process may try again to continue with shards that could not be started yet; `None` if there
    /// will be none.
    pub next_resume: Option<Instant>,
    /// Rounds in which sockets report that the stack is gone.
    pub netdown: NetdownRounds,
    /// Counts non-blocking calls that found nothing.
    empty_polls: u32,
    /// Maps the index of a channel socket to its description plus one; 0 is none.
    by_socket: Vec<FileId>,
    /// Maps the number of a channel listener to its description plus one; 0 is none.
    by_listener: Vec<FileId>,
    pub local_delivery: LocalDelivery,
}

impl ProcessState {
    pub fn new(client: Channels) -> Result<Self, Errno> {
        let isolation = Arc::<Isolation>::default();
        isolation.set_shared([&client], None);
        Ok(Self {
            client,
            files: Files::default(),
            proxy_fds: ProxyFds::new()?,
            waiters: Waiters::default(),
            attachment: None,
            next_cookie: 1,
            reachable_hosts: Vec::new(),
            passed_kernel_sockets: Vec::new(),
            report: None,
            deferred: Arc::default(),
            isolation,
            send_buffer: None,
            restarts: 0,
            is_end_noticed: false,
            next_resume: None,
            netdown: NetdownRounds::default(),
            empty_polls: 0,
            by_socket: Vec::new(),
            by_listener: Vec::new(),
            local_delivery: LocalDelivery::default(),
        })
    }

    /// Publishes for handlers that fork what the process shares with others. `previous` are channels that
    /// were replaced and are still in use.
    pub fn publish_shared_memory<'a>(&'a self, previous: impl IntoIterator<Item = &'a Channels>) {
        let report = self.report.as_ref().map(DescriptorReport::mapping);
        self.isolation.set_shared(previous.into_iter().chain([&self.client]), report);
    }

    /// Directs events of a connection to this description.
    pub fn bind_conn(&mut self, conn: Conn, file: FileId) {
        set_slot(&mut self.by_socket, conn.index(), file + 1);
    }

    pub fn unbind_conn(&mut self, conn: Conn) {
        set_slot(&mut self.by_socket, conn.index(), 0);
    }

    /// Returns the description of a listener.
    pub fn file_of_listener(&self, listener: u32) -> Option<FileId> {
        get_slot(&self.by_listener, listener)
    }

    pub fn bind_listener(&mut self, listener: u32, file: FileId) {
        set_slot(&mut self.by_listener, listener, file + 1);
    }

    /// Returns the descriptions of this process's listeners.
    pub fn listener_files(&self) -> impl Iterator<Item = FileId> {
        self.by_listener.iter().filter_map(|slot| slot.checked_sub(1))
    }

    /// Forgets all handles of the channel.
    pub fn unbind_all(&mut self) {
        self.by_socket.clear();
        self.by_listener.clear();
        self.local_delivery = LocalDelivery::default();
    }

    pub fn unbind_listener(&mut self, listener: u32) {
        set_slot(&mut self.by_listener, listener, 0);
    }

    /// Enters a descriptor of this description in the report.
    pub fn report_fd(&mut self, fd: RawFd, file: FileId) {
        let Self { report: Some(report), files, client, .. } = self else { return };
        let entry = match &files.get(file).kind {
            FileKind::Free => return,
            FileKind::Epoll(_) => ReportEntry::Epoll,
            FileKind::Socket(socket) => match socket.role {
                SocketRole::Unconnected { .. } if socket.is_udp => {
                    ReportEntry::Udp([socket.family.unspecified(); 2], false)
                }
                SocketRole::Udp(udp) => {
                    let [own, _] = client.endpoints(udp.conn).unwrap_or([socket.family.unspecified(); 2]);
                    let peer = udp.peer.unwrap_or(socket.family.unspecified());
                    ReportEntry::Udp([own, peer], udp.kernel_fd.is_some())
                }
                SocketRole::Unconnected { bound: None } => ReportEntry::Unconnected,
                SocketRole::Unconnected { bound: Some(bound) } => ReportEntry::Bound(bound.address()),
                SocketRole::Listening(listening) => {
                    ReportEntry::Listener(listening.bound.address(), listening.kernel_fd.is_some())
                }
                SocketRole::Stream(stream) => {
                    client.endpoints(stream.conn).map_or(ReportEntry::Unconnected, ReportEntry::Stream)
                }
            },
        };
        report.write(fd, entry);
    }

    /// Completes the report entry of a connection that was opened asynchronously, once its local address is
    /// known.
    fn complete_report(&mut self, conn: Conn) {
        let incomplete =
            self.file_of(conn).and_then(|file| self.files.stream(file)?.incomplete_report_fd.take());
        if let (Some(fd), Some(report), Ok(endpoints)) =
            (incomplete, &self.report, self.client.endpoints(conn))
        {
            report.complete(fd, endpoints);
        }
    }

    /// Asks the stack for the local address of a connection that was opened asynchronously. Must be called
    /// before the connection is shared: when the stack reports the address by itself, only one descriptor's
    /// entry is completed.
    pub fn query_local_end(&mut self, file: FileId) {
        let incomplete = self.files.stream(file).filter(|stream| stream.incomplete_report_fd.is_some());
        if let Some(conn) = incomplete.map(|stream| stream.conn)
            && self.endpoints(conn).is_some_and(|[own, _]| own.port() != 0)
        {
            self.complete_report(conn);
        }
    }

    /// Returns the local and the remote address of a connection, asking the stack if the local one is not
    /// known yet.
    pub fn endpoints(&mut self, conn: Conn) -> Option<[SocketAddr; 2]> {
        let endpoints = self.client.endpoints(conn).ok()?;
        if endpoints[0].port() != 0 {
            return Some(endpoints);
        }
        // When the stack answers, it has opened the connection or failed to.
        let _ = self.client.info(conn);
        self.client.endpoints(conn).ok()
    }

    /// Removes a descriptor from the report.
    pub fn unreport_fd(&self, fd: RawFd) {
        if let Some(report) = &self.report {
            report.clear(fd);
        }
    }

    /// Creates a report with room for `descriptors` entries and enters the library's internal descriptors.
    pub fn start_report(&mut self, descriptors: usize, stack: &str) {
        self.report = match self.report.take() {
            Some(parents_report) => parents_report.for_child(),
            None => DescriptorReport::new(descriptors, stack),
        }
        .ok();
        self.publish_shared_memory([]);
        let Some(report) = &self.report else { return };
        let attachment_fd = self.attachment.iter().map(Attachment::connection_fd);
        for fd in attachment_fd.chain(self.client.internal_fds()).chain([self.proxy_fds.template()]) {
            report.write(fd, ReportEntry::Internal);
        }
    }

    /// Processes all events of the channel and wakes the waiters that they concern.
    pub fn process_events(&mut self) {
        while let Some(event) = self.client.next_event() {
            if self.client.has_priorities() {
                self.note_event_class(&event);
            }
            match event {
                ClientEvent::Offered { listener } => {
                    if let Some(file) = get_slot(&self.by_listener, listener) {
                        self.wake(file, DATA_READY);
                    }
                }
                ClientEvent::ListenersDestroyed => self.end_destroyed_listeners(),
                // `accept4` takes connections explicitly.
                ClientEvent::Accepted { .. } => {}
                ClientEvent::Connected { conn } => {
                    self.complete_report(conn);
                    self.wake_conn(conn, STATE_CHANGE);
                }
                ClientEvent::Readable { conn } => {
                    if let Some(file) = self.file_of(conn) {
                        self.data_ready(file);
                    }
                }
                // The stack reported something about a datagram, such as an error.
                ClientEvent::Datagrams { conn } => self.wake_conn(conn, STATE_CHANGE),
                ClientEvent::Urgent { conn } => {
                    if let Some(file) = self.file_of(conn)
                        && self.handle_urgent_notice(file)
                    {
                        self.wake(file, DATA_READY);
                    }
                }
                ClientEvent::Writable { conn } => {
                    if let Some(file) = self.file_of(conn) {
                        self.set_message_blocked(file, false);
                        self.wake(file, WRITE_SPACE);
                    }
                }
                ClientEvent::Acked { conn, .. } => {
                    if let Some(file) = self.file_of(conn) {
                        self.take_stream_stamps(file, conn);
                    }
                    self.wake_conn(conn, STATE_CHANGE);
                }
                ClientEvent::PeerClosed { conn } | ClientEvent::Closed { conn, .. } => {
                    self.wake_conn(conn, STATE_CHANGE)
                }
            }
        }
        self.files.event_classes = 0;
    }

    /// Notes the class of an event of the stack, unless that is about data, whose class the socket has.
    #[cold]
    fn note_event_class(&mut self, event: &ClientEvent) {
        self.files.has_priorities = true;
        self.files.event_classes = match event {
            ClientEvent::Connected { .. }
            | ClientEvent::Urgent { .. }
            | ClientEvent::PeerClosed { .. }
            | ClientEvent::Closed { .. } => 1 << self.client.event_class(),
            _ => 0,
        };
    }

    /// Returns the description of a connection or UDP socket.
    #[inline]
    pub fn file_of(&mut self, conn: Conn) -> Option<FileId> {
        let file = get_slot(&self.by_socket, conn.index())?;
        let current = match self.files.socket(file).ok()?.role {
            SocketRole::Stream(stream) => stream.conn == conn,
            SocketRole::Udp(udp) => udp.conn == conn,
            _ => false,
        };
        current.then_some(file)
    }

    fn wake_conn(&mut self, conn: Conn, key: i16) {
        if let Some(file) = self.file_of(conn) {
            self.wake(file, key);
        }
    }

    /// Wakes waiters for data if `SO_RCVLOWAT` is reached (`tcp_data_ready`).
    #[inline]
    pub fn data_ready(&mut self, file: FileId) {
        // UDP counts datagrams, not bytes.
        let rcvlowat = match self.files.socket(file) {
            Ok(socket) if !socket.is_udp => socket.options.rcvlowat(),
            _ => 1,
        };
        // With the default mark one byte is enough, even if another thread has read it already.
        if rcvlowat <= 1 || self.is_above_low_water(file, rcvlowat) {
            self.wake(file, DATA_READY);
        }
    }

    #[cold]
    fn is_above_low_water(&mut self, file: FileId, rcvlowat: usize) -> bool {
        let rcvlowat = rcvlowat.min(self.client.buffer_bytes());
        self.status(file).is_some_and(|(_, status)| status.readable >= rcvlowat || status.state.has_fin())
    }

    /// Wakes the waiters of a description whose events overlap `key`.
    pub fn wake(&mut self, file: FileId, key: i16) {
        wait_queue::wake(&mut self.files, &mut self.waiters, file, key);
    }

    /// Wakes threads that sleep on a description.
    pub fn wake_threads(&mut self, file: FileId) {
        wait_queue::wake_threads(&mut self.files, &mut self.waiters, file);
    }

    /// Counts a non-blocking call that found nothing. A program that polls without sleeping would otherwise
    /// never notice the end of the stack: such a call notices it at once if it was announced, and a call now
    /// and then checks for it.
    #[inline]
    pub fn note_empty_poll(&mut self) {
        self.empty_polls = self.empty_polls.wrapping_add(1);
        if self.client.is_stack_said_to_be_gone() {
            self.notice_announced_end();
        } else if self.empty_polls.is_multiple_of(LIVENESS_CHECK_INTERVAL) {
            self.check_stack_alive();
        }
    }

    /// Wakes all waiters of all descriptions.
    pub fn wake_all(&mut self) {
        for file in self.files.ids() {
            self.wake(file, STATE_CHANGE);
        }
    }

    /// Returns the status of a connection. The first time that the connection is found closed, the reason
    /// becomes its pending error, as the kernel would report it.
    pub fn status(&mut self, file: FileId) -> Option<(Conn, SocketStatus)> {
        let stream = self.files.stream(file)?;
        let (conn, end_seen) = (stream.conn, stream.end_seen);
        let status = self.client.status(conn).ok()?;
        if status.state.is_closed() && !end_seen {
            let (conn, conn_state) = self.handle_end(file, status.state)?;
            return Some((conn, self.client.status_with_state(conn, conn_state).ok()?));
        }
        Some((conn, status))
    }

    /// Returns the state of a connection without its byte counts.
    #[inline(always)]
    pub fn socket_state(&mut self, file: FileId) -> Option<(Conn, SocketState)> {
        let stream = self.files.stream(file)?;
        let (conn, end_seen) = (stream.conn, stream.end_seen);
        let conn_state = self.client.socket_state(conn).ok()?;
        if conn_state.is_closed() && !end_seen {
            return self.handle_end(file, conn_state);
        }
        Some((conn, conn_state))
    }

    /// Turns the end of a connection into a pending error, once.
    #[cold]
    pub(crate) fn handle_end(
        &mut self,
        file: FileId,
        mut conn_state: SocketState,
    ) -> Option<(Conn, SocketState)> {
        if conn_state.close_reason() == Some(CloseReason::Aborted)
            && self.files.stream(file)?.connecting
            && let Some(conn) = self.connect_on_other_shard(file)
        {
            conn_state = self.client.socket_state(conn).ok()?;
        }
        let is_write_shut = self.files.socket(file).ok()?.shutdown.write;
        let stream = self.files.stream(file)?;
        if let Some(reason) = conn_state.close_reason() {
            stream.end_seen = true;
            let refusal = (stream.connecting && reason == CloseReason::Aborted)
                .then(|| self.client.connect_error(stream.conn));
            let error = match refusal.flatten() {
                Some(error) => Some(connect_errno(error)),
                // In CLOSING and LAST-ACK, too, the program's own FIN was sent.
                None => sk_err_of(reason, conn_state.has_fin() && !is_write_shut),
            };
            // An earlier error takes precedence.
            stream.error = stream.error.or(error);
        }
        Some((stream.conn, conn_state))
    }

    /// Takes the pending error (`sock_error`).
    pub fn take_error(&mut self, file: FileId) -> Option<Errno> {
        if self.socket_state(file).is_none() {
            return self.files.socket(file).ok()?.shutdown.error.take();
        }
        self.files.stream(file)?.error.take()
    }

    /// Frees a description that has no references left.
    pub fn free_file(&mut self, file: FileId) {
        // The vector is emptied in place, so that its memory serves the next description.
        while let Some(entry) = self.files.get(file).wait_queue.pop() {
            if let WaitEntry::EpollItem { set, item } = entry
                && let Ok(set) = self.files.epoll(set)
            {
                set.remove(item);
            }
        }
        match self.files.remove(file) {
            FileKind::Socket(mut socket) => {
                self.close_socket(&mut socket);
                // The heap memory of the socket is released; its box is recycled.
                socket.udp_send = None;
                socket.flow_labels = None;
                socket.options.release_memory();
                self.files.recycle(socket);
            }
            FileKind::Epoll(set) => {
                for watched in set.watched_files() {
                    let watchers = &mut self.files.get(watched).wait_queue;
                    watchers.retain(|w| !matches!(w, WaitEntry::EpollItem { set, .. } if *set == file));
                }
            }
            FileKind::Free => {}
        }
    }

    pub fn unreserve(&mut self, bound: Option<BoundAddress>) {
        if let Some(reserved) = bound.and_then(|bound| bound.own_reservation()) {
            // If the stack is gone, so is the reservation.
            let _ = self.client.unreserve(reserved);
        }
    }

    fn close_socket(&mut self, socket: &mut Socket) {
        match socket.role {
            SocketRole::Unconnected { bound } => self.unreserve(bound),
            SocketRole::Listening(listening) => {
                self.unbind_listener(listening.number);
                // If the stack is gone, so is the listener.
                let _ = self.client.unlisten(listening.number, listening.bound.own_reservation());
            }
            SocketRole::Udp(udp) => self.release_udp(udp.conn),
            SocketRole::Stream(stream) => {
                self.unreserve(stream.bound);
                self.unbind_conn(stream.conn);
                self.release_stream(stream.conn);
            }
        }
    }
}

/// Returns the value of `sk_err` for the end of a connection. A reset in CLOSE_WAIT is `EPIPE`.
fn sk_err_of(reason: CloseReason, fin: bool) -> Option<Errno> {
    if fin && reason == CloseReason::Reset { Some(Errno::PIPE) } else { ginnel::errno::of_close(reason) }
}

fn set_slot(table: &mut Vec<FileId>, index: u32, file: FileId) {
    let index = index as usize;
    if table.len() <= index {
        table.resize(index + 1, 0);
    }
    table[index] = file;
}

fn get_slot(table: &[FileId], index: u32) -> Option<FileId> {
    table.get(index as usize)?.checked_sub(1)
}
