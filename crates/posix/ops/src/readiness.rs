//! How things stand with a description, as `poll` says it (`tcp_poll`).

use crate::fd_table::FileId;
use crate::file::{Dgram, Kind, Shape};
use crate::lane::Lane;
use ginnel::Conn;
use libc::{POLLERR, POLLHUP, POLLIN, POLLOUT, POLLPRI, POLLRDHUP, POLLRDNORM, POLLWRNORM};

const READABLE: i16 = POLLIN | POLLRDNORM;
const WRITABLE: i16 = POLLOUT | POLLWRNORM;

impl Lane {
    /// What is ready. Whoever finds out that nothing can be written is told when something can.
    pub fn readiness(&mut self, file: FileId) -> i16 {
        match &self.files.get(file).kind {
            Kind::Free => 0,
            Kind::Epoll(set) => {
                let (set, kernel) = (set.candidates(), set.kernel_ready());
                if kernel || self.any_ready(set) { READABLE } else { 0 }
            }
            Kind::Socket(socket) => match socket.shape {
                Shape::Fresh { .. } if socket.datagrams => WRITABLE,
                Shape::Datagrams(dgram) => {
                    let urgent = socket.options.is_on("SO_SELECT_ERR_QUEUE");
                    self.datagram_readiness(dgram, urgent)
                }
                // Linux says so of a socket that was never connected.
                Shape::Fresh { .. } if socket.shut.read => WRITABLE | POLLHUP | READABLE | POLLRDHUP,
                Shape::Fresh { .. } => WRITABLE | POLLHUP,
                Shape::Listening(listening) => {
                    if self.client.is_offered(listening.number) {
                        READABLE
                    } else {
                        0
                    }
                }
                Shape::Stream(_) => self.stream_readiness(file),
            },
        }
    }

    /// As `datagram_poll` says it.
    fn datagram_readiness(&mut self, dgram: Dgram, urgent: bool) -> i16 {
        let Ok(status) = self.client.status(dgram.conn) else { return POLLERR };
        let mut ready = 0;
        if dgram.late.is_some()
            || self.client.udp_error(dgram.conn, false).is_some()
            || self.client.udp_has_reports(dgram.conn)
        {
            ready |= if urgent { POLLERR | POLLPRI } else { POLLERR };
        }
        if dgram.shut_read {
            ready |= READABLE | POLLRDHUP;
        }
        if dgram.shut_read && dgram.shut_write {
            ready |= POLLHUP;
        }
        // All of the next one: its head may be there before the rest.
        if status.readable > 0 && self.client.udp_next_bytes(dgram.conn).is_some() {
            ready |= READABLE;
        }
        let enough = self.client.buffer_bytes() / 2;
        if status.room >= enough || self.client.await_room(dgram.conn, enough) == Ok(true) {
            ready |= WRITABLE;
        }
        ready
    }

    /// Whether less than half of so many bytes were not sent (`__sk_stream_memory_free`).
    #[inline]
    fn is_sparse(&mut self, conn: Conn, low: Option<u32>) -> bool {
        low.is_none_or(|low| {
            self.client.not_sent(conn).is_ok_and(|bytes| 2 * (bytes as u64) < u64::from(low))
        })
    }

    /// The same where writes are bounded by the send buffer: of which a third must be free.
    #[cold]
    fn is_within_bound(&mut self, file: FileId, conn: Conn, low: Option<u32>) -> bool {
        let Some((bound, queued)) = self.send_bound(file, conn) else { return true };
        if bound.saturating_sub(queued) >= queued / 2 && self.is_sparse(conn, low) {
            return true;
        }
        self.note_cramped(file, conn);
        // Gone meanwhile: the next look tells.
        let _ = self.client.await_room(conn, usize::MAX);
        let _ = self.client.room_below(conn, 1 << 30, (0, 0));
        false
    }

    fn stream_readiness(&mut self, file: FileId) -> i16 {
        let Some((conn, status)) = self.status_here(file) else { return POLLHUP };
        // More than the channel holds would never be there.
        let most = self.client.buffer_bytes();
        let Ok(socket) = self.files.socket(file) else { return POLLHUP };
        let (low_water, shut) = (socket.options.recv_low_water().min(most), socket.shut);
        let not_sent = socket.options.not_sent_low_water();
        let failed = matches!(socket.shape, Shape::Stream(stream) if stream.error.is_some());
        let ended = status.standing.is_over();
        let no_more_in = status.standing.peer_closed() || ended || shut.read;
        let no_more_out = ended || shut.write;
        let mut ready = 0;
        if no_more_in && no_more_out {
            ready |= POLLHUP;
        }
        if no_more_in {
            ready |= READABLE | POLLRDHUP;
        }
        let mark = self.mark(conn, &status);
        if mark.is_some_and(|mark| mark.byte.is_some()) {
            ready |= POLLPRI;
        }
        // What is passed over is no byte to be read (`tcp_poll`).
        let low_water = low_water + usize::from(mark.is_some() && self.is_at_hidden_byte(file, mark));
        if status.standing.is_connected() || ended {
            if status.readable >= low_water {
                ready |= READABLE;
            }
            // Half as much room as what waits (`sk_stream_is_writeable`).
            let enough = (status.occupied / 2).max(1);
            let bounded = self.send_buffer.is_some() && !no_more_out;
            let room = status.room >= enough && self.is_sparse(conn, not_sent);
            if bounded {
                if self.is_within_bound(file, conn, not_sent) {
                    ready |= WRITABLE;
                }
            } else if no_more_out
                || room
                || self.client.await_room(conn, enough) == Ok(true) && self.is_sparse(conn, not_sent)
            {
                ready |= WRITABLE;
            }
        }
        if failed {
            ready |= POLLERR;
        }
        ready
    }
}
