//! Continuation after a restart of the shards: connections are lost, listeners and UDP sockets are opened
//! again (docs/adr/0021-restart-of-the-shards.md).

use crate::channels::Channels;
use crate::datagram::local_ip;
use crate::descriptor;
use crate::descriptor_report::ReportEntry;
use crate::fd_table::FileId;
use crate::file::{BoundAddress, FOREIGN_RESERVATION, Listener, SocketRole, Stream, UdpSocket};
use crate::process::ProcessState;
use crate::stack_end::write_line;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::broker::Attachment;
use ginnel::{Error, ListenOptions};
use rustix::io::Errno;
use std::time::Instant;

/// How long to wait for the addresses of shards that were started again (RFC 4862 §5.4).
const READY_TIMEOUT: Duration = Duration::from_secs(5);
const READY_POLL_INTERVAL: Duration = Duration::from_micros(200);

impl ProcessState {
    /// Continues with shards that were started again. Returns false if there are none: the stack is gone.
    pub fn resume(&mut self) -> bool {
        let Some(mut attachment) = self.attachment.take() else { return false };
        let resumed = self.resume_with(&mut attachment);
        self.attachment = Some(attachment);
        resumed.is_some()
    }

    fn resume_with(&mut self, attachment: &mut Attachment) -> Option<()> {
        let clients = attachment.resume().ok()?;
        let before = self.client.replace(clients)?;
        for fd in before.internal_fds() {
            descriptor::unregister_internal(fd);
            self.unreport_fd(fd);
        }
        for fd in self.client.internal_fds() {
            descriptor::register_internal(fd);
            if let Some(report) = &self.report {
                report.write(fd, ReportEntry::Internal);
            }
        }
        self.restarts += 1;
        self.waiters.replace_wake_fd();
        self.passed_listeners.clear();
        self.unbind_all();
        let until = Instant::now() + READY_TIMEOUT;
        while !self.client.is_ready() && Instant::now() < until {
            std::thread::sleep(READY_POLL_INTERVAL);
        }
        let files = self.files.ids();
        for &file in &files {
            match self.files.socket(file).map(|socket| socket.role) {
                Ok(SocketRole::Stream(stream)) => self.lose_connection(&before, file, stream),
                Ok(SocketRole::Listening(listening)) => {
                    if let Err(error) = self.restore_listener(attachment, &before, file, listening) {
                        self.lose_socket(file, listening.bound.address(), &error);
                    }
                }
                Ok(SocketRole::Udp(udp)) => {
                    let local = before.endpoints(udp.conn).map(|[local, _]| local);
                    let local = local.unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)));
                    if let Err(error) = self.restore_udp(attachment, file, udp, local) {
                        self.lose_socket(file, local, &error);
                    }
                }
                Ok(SocketRole::Unconnected { .. }) | Err(_) => {}
            }
        }
        // After the listeners: another process may open a listener whose address this process has reserved.
        files.iter().for_each(|file| self.reserve_again(*file));
        self.client.flush();
        Some(())
    }

    /// Makes a socket an unconnected one whose connection was reset.
    fn lose_connection(&mut self, before: &Channels, file: FileId, stream: Stream) {
        let local = before.endpoints(stream.conn).map(|[local, _]| local).ok();
        self.files.get(file).shared_version = None;
        let Ok(socket) = self.files.socket(file) else { return };
        socket.role =
            SocketRole::Unconnected { bound: stream.bound.filter(BoundAddress::survives_disconnect) };
        socket.last_address = local.or(socket.last_address);
        socket.shutdown.is_lost = true;
        (socket.shutdown.read, socket.shutdown.write) = (true, true);
        socket.shutdown.error = stream.error.or((!stream.end_seen).then_some(Errno::CONNRESET));
    }

    /// Reports that a socket could not be opened again, and makes it unconnected.
    fn lose_socket(&mut self, file: FileId, local: SocketAddr, error: &Error) {
        write_line(&format!("ginnel: {local} could not be opened again: {error}\n"));
        self.files.get(file).shared_version = None;
        if let Ok(socket) = self.files.socket(file) {
            socket.role = SocketRole::Unconnected { bound: None };
            (socket.shutdown.read, socket.shutdown.write) = (true, true);
            (socket.shutdown.is_lost, socket.shutdown.error) = (true, Some(Errno::NETDOWN));
        }
    }

    fn restore_listener(
        &mut self,
        attachment: &Attachment,
        before: &Channels,
        file: FileId,
        listening: Listener,
    ) -> Result<(), Error> {
        let Ok(socket) = self.files.socket(file) else { return Ok(()) };
        let sharing = socket.options.sharing(socket.family);
        let options = ListenOptions {
            backlog: listening.backlog,
            v6_only: socket.options.is_v6_only(),
            reuse_port: sharing.reuse_port,
            user: sharing.uid,
            socket: socket.options.initial_options(socket.child_is_v4()),
        };
        let defer_accept = socket.options.defer_accept_time();
        let (number, address) = (listening.number, listening.bound.address());
        let number = self.client.restore_listener(attachment, before, number, address, options)?;
        self.bind_listener(number, file);
        if let Some(time) = defer_accept {
            self.client.set_defer_accept(number, time)?;
        }
        if let Ok(socket) = self.files.socket(file)
            && let SocketRole::Listening(now) = &mut socket.role
        {
            *now = Listener { number, accepting: false, ..listening };
        }
        self.share_again(file);
        if listening.accepting {
            self.begin_accepting(file);
        }
        Ok(())
    }

    fn restore_udp(
        &mut self,
        attachment: &Attachment,
        file: FileId,
        udp: UdpSocket,
        local: SocketAddr,
    ) -> Result<(), Error> {
        let Ok(socket) = self.files.socket(file) else { return Ok(()) };
        let options = socket.options.udp_options(socket.family);
        let local = SocketAddr::new(local_ip(local, socket.family), local.port());
        socket.options.applied_udp = Some(options);
        let conn = self.client.restore_udp(attachment, udp.conn, local, options)?;
        if let Some(peer) = udp.peer {
            self.client.udp_connect(conn, peer).map_err(|error| Error::Udp(peer, error))?;
        }
        if let Ok(socket) = self.files.socket(file) {
            socket.role = SocketRole::Udp(UdpSocket { conn, ..udp });
        }
        self.bind_conn(conn, file);
        // The options were passed with the request.
        let _ = self.apply_datagram_options(file);
        self.share_again(file);
        Ok(())
    }

    /// Publishes the state of a description that other processes share.
    fn share_again(&mut self, file: FileId) {
        if self.files.get(file).shared_version.take().is_some() {
            self.share(file);
        }
    }

    /// Reserves the address of a bound socket again. If another process of the program has the address, that
    /// one keeps it.
    fn reserve_again(&mut self, file: FileId) {
        let Ok(socket) = self.files.socket(file) else { return };
        let sharing = socket.options.sharing(socket.family);
        let Some(reserved) = socket.bound().and_then(|bound| bound.own_reservation()) else { return };
        let reserved = self.client.reserve(reserved.address, sharing);
        if let Some(bound) = self.files.socket(file).ok().and_then(|socket| socket.bound_mut()) {
            match reserved {
                Ok(reserved) => bound.reserved = reserved,
                Err(_) => bound.reserved.number = FOREIGN_RESERVATION,
            }
        }
    }
}
