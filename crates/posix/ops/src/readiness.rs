//! The readiness of a description, as `poll` reports it (`tcp_poll`).

use crate::fd_table::FileId;
use crate::file::{FileKind, SocketRole, UdpSocket};
use crate::options::BoolOption;
use crate::process::ProcessState;
use ginnel::Conn;
use libc::{POLLERR, POLLHUP, POLLIN, POLLOUT, POLLPRI, POLLRDHUP, POLLRDNORM, POLLWRBAND, POLLWRNORM};

const READABLE: i16 = POLLIN | POLLRDNORM;
const WRITABLE: i16 = POLLOUT | POLLWRNORM;
/// Datagrams are also writable with priority (`datagram_poll`).
const DATAGRAM_WRITABLE: i16 = WRITABLE | POLLWRBAND;

impl ProcessState {
    /// Returns the events that are ready. If the description is not writable, requests an event for when it
    /// is.
    pub fn readiness(&mut self, file: FileId) -> i16 {
        match &self.files.get(file).kind {
            FileKind::Free => 0,
            FileKind::Epoll(set) => {
                let (set, kernel) = (set.candidates(), set.kernel_ready());
                if kernel || self.any_ready(set) { READABLE } else { 0 }
            }
            FileKind::Socket(socket) => match socket.role {
                SocketRole::Unconnected { .. } if socket.is_udp => {
                    DATAGRAM_WRITABLE | shutdown_events(socket.shutdown.read, socket.shutdown.write)
                }
                SocketRole::Udp(udp) => {
                    let urgent = socket.options.is_on("SO_SELECT_ERR_QUEUE");
                    let has_completion = socket.options.zerocopy.is_queued();
                    self.datagram_readiness(file, udp, urgent, has_completion)
                }
                // Linux reports these events for an unconnected socket after `shutdown`.
                SocketRole::Unconnected { .. } if socket.shutdown.read => {
                    let failed = if socket.shutdown.error.is_some() { POLLERR } else { 0 };
                    WRITABLE | POLLHUP | READABLE | POLLRDHUP | failed
                }
                SocketRole::Unconnected { .. } if socket.shutdown.error.is_some() => {
                    WRITABLE | POLLHUP | POLLERR
                }
                SocketRole::Unconnected { .. } => WRITABLE | POLLHUP,
                SocketRole::Listening(listening) => {
                    if self.client.has_offer(listening.number) {
                        READABLE
                    } else if self.is_netdown_pending(file, listening.kernel_fd) {
                        READABLE | POLLERR | POLLHUP
                    } else {
                        0
                    }
                }
                SocketRole::Stream(stream) => self.stream_readiness(file, stream.conn, stream.end_seen),
            },
        }
    }

    /// Returns readiness of a UDP socket (`datagram_poll`).
    fn datagram_readiness(
        &mut self,
        file: FileId,
        udp: UdpSocket,
        urgent: bool,
        has_completion: bool,
    ) -> i16 {
        let Ok(status) = self.client.status(udp.conn) else { return POLLERR };
        let mut ready = 0;
        if self.is_netdown_pending(file, udp.kernel_fd) {
            ready |= READABLE | DATAGRAM_WRITABLE | POLLERR | POLLHUP;
        }
        if udp.deferred_error.is_some()
            || self.client.udp_error(udp.conn, false).is_some()
            || self.client.udp_has_extended_errors(udp.conn)
            || has_completion
        {
            ready |= if urgent { POLLERR | POLLPRI } else { POLLERR };
        }
        ready |= shutdown_events(udp.shut_read, udp.shut_write);
        // The whole datagram must have arrived: its head may come before the rest.
        if status.readable > 0 && self.client.udp_next_len(udp.conn).is_some() {
            ready |= READABLE;
        }
        let required = self.client.buffer_bytes() / 2;
        if status.send_space >= required || self.client.await_send_space(udp.conn, required) == Ok(true) {
            ready |= DATAGRAM_WRITABLE;
        }
        ready
    }

    /// Returns whether the unsent bytes are below half of `TCP_NOTSENT_LOWAT` (`tcp_stream_memory_free`).
    #[inline]
    fn has_stream_memory_free(&mut self, conn: Conn, notsent_lowat: Option<u32>) -> bool {
        notsent_lowat.is_none_or(|notsent_lowat| {
            self.client.notsent(conn).is_ok_and(|bytes| 2 * (bytes as u64) < u64::from(notsent_lowat))
        })
    }

    /// Returns whether a third of the send buffer is free and the unsent bytes are below half of
    /// `TCP_NOTSENT_LOWAT`. Used if the send buffer limits writes.
    #[cold]
    fn has_send_buffer_space(&mut self, file: FileId, conn: Conn, notsent_lowat: Option<u32>) -> bool {
        let Some((bound, queued)) = self.send_buffer_usage(file, conn) else { return true };
        if bound.saturating_sub(queued) >= queued / 2 && self.has_stream_memory_free(conn, notsent_lowat) {
            return true;
        }
        self.set_nospace(file, conn);
        // If the connection is gone meanwhile, the next check finds out.
        let _ = self.client.await_send_space(conn, usize::MAX);
        let _ = self.client.sendable_within(conn, 1 << 30, (0, 0));
        false
    }

    /// Returns whether a socket whose send buffer limits writes is writable. If not, a notification follows.
    #[cold]
    fn has_limited_space(
        &mut self,
        file: FileId,
        conn: Conn,
        notsent_lowat: Option<u32>,
        required: usize,
    ) -> bool {
        if self.send_buffer.is_some() {
            return self.has_send_buffer_space(file, conn, notsent_lowat);
        }
        self.has_fixed_buffer_space(file, conn) && self.await_channel_space(conn, notsent_lowat, required)
    }

    /// Requests a notification unless there is space in the channel, and returns whether there is.
    fn await_channel_space(&mut self, conn: Conn, notsent_lowat: Option<u32>, required: usize) -> bool {
        self.client.await_send_space(conn, required) == Ok(true)
            && self.has_stream_memory_free(conn, notsent_lowat)
    }

    /// Returns the readiness of a stream with this connection. `end_seen` is true if the end of the
    /// connection was already turned into an error of the description.
    fn stream_readiness(&mut self, file: FileId, mut conn: Conn, end_seen: bool) -> i16 {
        let Ok(mut status) = self.client.status(conn) else { return POLLHUP };
        if status.state.is_closed() && !end_seen {
            let Some(after) = self.status(file) else { return POLLHUP };
            (conn, status) = after;
        }
        // A low-water mark above the size of the channel's buffer would never be reached.
        let buffer_bytes = self.client.buffer_bytes();
        let Ok(socket) = self.files.socket(file) else { return POLLHUP };
        let (rcvlowat, shutdown) = (socket.options.rcvlowat().min(buffer_bytes), socket.shutdown);
        let notsent_lowat = socket.options.notsent_lowat();
        let is_fixed = socket.options.has_fixed_send_buffer();
        let failed = matches!(socket.role, SocketRole::Stream(stream) if stream.error.is_some());
        let is_message_blocked = matches!(socket.role, SocketRole::Stream(stream) if stream.message_blocked);
        let is_unordered = socket.options.flag(BoolOption::UnorderedReceive);
        let has_completion = socket.options.zerocopy.is_queued();
        let ended = status.state.is_closed();
        let no_more_input = status.state.has_fin() || ended || shutdown.read;
        let no_more_output = ended || shutdown.write;
        let mut ready = 0;
        if no_more_input && no_more_output {
            ready |= POLLHUP;
        }
        if no_more_input {
            ready |= READABLE | POLLRDHUP;
        }
        let mark = self.urgent_mark(file, conn, &status);
        if mark.is_some_and(|mark| mark.byte.is_some()) {
            ready |= POLLPRI;
        }
        // A skipped urgent byte does not count as readable (`tcp_poll`).
        let rcvlowat = rcvlowat + usize::from(mark.is_some() && self.is_at_skipped_byte(file, mark));
        if status.state.is_connected() || ended {
            if status.readable >= rcvlowat || is_unordered && self.client.has_unordered(conn) {
                ready |= READABLE;
            }
            // Half as much space as what is queued (`sk_stream_is_writeable`).
            let required = (status.occupied / 2).max(1);
            let is_limited = (is_fixed || self.send_buffer.is_some()) && !no_more_output;
            let has_space = status.send_space >= required && self.has_stream_memory_free(conn, notsent_lowat);
            if is_limited {
                if self.has_limited_space(file, conn, notsent_lowat, required) {
                    ready |= WRITABLE;
                }
            } else if no_more_output || has_space || self.await_channel_space(conn, notsent_lowat, required) {
                ready |= WRITABLE;
            }
        } else if self.syn_data_max(file).is_some() {
            // A write sends the SYN.
            ready |= WRITABLE;
        }
        if is_message_blocked && !no_more_output {
            // Until the stack has reported that there is room again.
            ready &= !WRITABLE;
        }
        if failed || has_completion {
            ready |= POLLERR;
        }
        ready
    }
}

/// Returns the events of a UDP socket by the directions that were shut down.
fn shutdown_events(read: bool, write: bool) -> i16 {
    match (read, write) {
        (true, true) => READABLE | POLLRDHUP | POLLHUP,
        (true, false) => READABLE | POLLRDHUP,
        (false, _) => 0,
    }
}
