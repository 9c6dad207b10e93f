//! Continuation after a restart of the shards: connections are lost, listeners and UDP sockets are opened
//! again (docs/adr/0021-restart-of-the-shards.md).

use crate::channels::{Channels, PreviousChannels};
use crate::datagram::local_ip;
use crate::descriptor;
use crate::descriptor_report::ReportEntry;
use crate::fd_table::FileId;
use crate::file::{BoundAddress, FOREIGN_RESERVATION, Listener, SocketRole, Stream, UdpSocket};
use crate::process::ProcessState;
use crate::standard_error::write_line;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::broker::{Attachment, Refusal};
use ginnel::{Error, ListenOptions};
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

/// How long to wait for the addresses of shards that were started again (RFC 4862 §5.4).
const READY_TIMEOUT: Duration = Duration::from_secs(5);
const READY_POLL_INTERVAL: Duration = Duration::from_micros(200);

/// The shards ended while sockets were opened again.
struct ShardsEnded;

impl ProcessState {
    /// Continues with shards that were started again, after waiting up to `timeout` for them.
    ///
    /// # Errors
    /// The stack is gone: the broker has ended, or starts no shards again. [`Refusal::Restarting`] if the
    /// shards did not run in time, and a later call may succeed.
    pub fn resume(&mut self, timeout: Duration) -> Result<(), Error> {
        let mut attachment = self.attachment.take().ok_or(Error::StackGone)?;
        let resumed = self.resume_with(&mut attachment, timeout);
        self.attachment = Some(attachment);
        resumed
    }

    fn resume_with(&mut self, attachment: &mut Attachment, timeout: Duration) -> Result<(), Error> {
        let mut previous: BTreeMap<usize, PreviousChannels> = BTreeMap::new();
        // Sockets that were opened again, by shards that have ended since: the index of their channels in
        // `previous`, which is 0 for all others.
        let mut reopened = HashMap::new();
        for round in 0.. {
            let mut resumes = 0;
            let clients = attachment.resume(&mut resumes, timeout)?;
            let channels = self.client.replace(clients).ok_or(Error::StackGone)?;
            self.exchange_internal_fds(&channels);
            previous.insert(round, PreviousChannels { channels, resumes: 0 });
            self.publish_shared_memory(previous.values().map(|before| &before.channels));
            previous.values_mut().for_each(|before| before.resumes += resumes);
            if self.open_again(attachment, &previous, &mut reopened).is_ok() {
                break;
            }
            // Channels are needed only as long as sockets have their numbers from them.
            previous.retain(|round, _| *round == 0 || reopened.values().any(|of| of == round));
        }
        self.publish_shared_memory([]);
        Ok(())
    }

    /// Replaces the internal descriptors of the channels `before` by those of the present ones, and forgets
    /// what refers to the former channels.
    fn exchange_internal_fds(&mut self, before: &Channels) {
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
        // The former channels still have theirs.
        for file in self.files.ids() {
            if let Ok(set) = self.files.epoll(file) {
                set.remove_stack_sentinel();
            }
        }
        self.waiters.replace_wake_fd();
        self.passed_kernel_sockets.clear();
        self.unbind_all();
    }

    /// Opens all sockets again, on the new shards. Fails if the new shards have ended, too; `reopened` then
    /// has the sockets that were opened until then.
    fn open_again(
        &mut self,
        attachment: &Attachment,
        previous: &BTreeMap<usize, PreviousChannels>,
        reopened: &mut HashMap<FileId, usize>,
    ) -> Result<(), ShardsEnded> {
        let until = Instant::now() + READY_TIMEOUT;
        while !self.client.is_ready() && Instant::now() < until {
            if self.have_shards_ended() {
                return Err(ShardsEnded);
            }
            std::thread::sleep(READY_POLL_INTERVAL);
        }
        let round = previous.keys().next_back().copied().unwrap_or(0);
        let files = self.files.ids();
        for &file in &files {
            let Some(before) = previous.get(&reopened.get(&file).copied().unwrap_or(0)) else { continue };
            let (address, restored) = match self.files.socket(file).map(|socket| socket.role) {
                Ok(SocketRole::Stream(stream)) => {
                    self.lose_connection(&before.channels, file, stream);
                    continue;
                }
                Ok(SocketRole::Listening(listening)) => {
                    (listening.bound.address(), self.restore_listener(attachment, before, file, listening))
                }
                Ok(SocketRole::Udp(udp)) => {
                    let local = before.channels.endpoints(udp.conn).map(|[local, _]| local);
                    let local = local.unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)));
                    (local, self.restore_udp(attachment, before, file, udp, local))
                }
                Ok(SocketRole::Unconnected { .. }) | Err(_) => continue,
            };
            match restored {
                Ok(()) => {
                    reopened.insert(file, round + 1);
                }
                Err(Error::StackGone | Error::Refused(Refusal::ShardEnded)) => return Err(ShardsEnded),
                Err(_) if self.have_shards_ended() => return Err(ShardsEnded),
                Err(error) => self.lose_socket(file, address, &error),
            }
        }
        // After the listeners: another process may open a listener whose address this process has reserved.
        for file in files {
            self.reserve_again(file)?;
        }
        self.client.flush();
        Ok(())
    }

    /// Makes a socket an unconnected one whose connection was reset.
    fn lose_connection(&mut self, before: &Channels, file: FileId, stream: Stream) {
        let local = before.endpoints(stream.conn).map(|[local, _]| local).ok();
        self.files.get(file).shared_version = None;
        let Ok(socket) = self.files.socket(file) else { return };
        let survives = |bound: &BoundAddress| stream.is_rebound || bound.survives_disconnect();
        socket.role = SocketRole::Unconnected { bound: stream.bound.filter(survives) };
        if !stream.is_rebound {
            socket.last_address = local.or(socket.last_address);
        }
        socket.forget_awaited_stamps();
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
        before: &PreviousChannels,
        file: FileId,
        listening: Listener,
    ) -> Result<(), Error> {
        self.update_filter_from(&before.channels, file);
        let Ok(socket) = self.files.socket(file) else { return Ok(()) };
        let sharing = socket.options.sharing(socket.family);
        let options = ListenOptions {
            backlog: listening.backlog,
            v6_only: socket.options.is_v6_only(),
            reuse_port: sharing.reuse_port,
            awaits_filter: false,
            user: sharing.uid,
            socket: socket.options.initial_options(socket.child_is_v4()),
        };
        let number = listening.number;
        let filter = socket.options.filter_code();
        let filter = filter.as_deref();
        let number =
            self.client.restore_listener(attachment, before, number, &listening.bound, options, filter)?;
        self.bind_listener(number, file);
        if let Ok(socket) = self.files.socket(file)
            && let SocketRole::Listening(now) = &mut socket.role
        {
            *now = Listener { number, accepting: false, ..listening };
        }
        self.share_again(file);
        self.restore_group_program(file);
        if listening.accepting {
            self.begin_accepting(file);
        }
        Ok(())
    }

    fn restore_udp(
        &mut self,
        attachment: &Attachment,
        before: &PreviousChannels,
        file: FileId,
        udp: UdpSocket,
        local: SocketAddr,
    ) -> Result<(), Error> {
        self.update_filter_from(&before.channels, file);
        let Ok(socket) = self.files.socket(file) else { return Ok(()) };
        let options = socket.options.udp_options(socket.family);
        let filter = socket.options.filter_code();
        let filter = filter.as_deref();
        let local = SocketAddr::new(local_ip(local, socket.family), local.port());
        socket.options.applied_udp = Some(options);
        let conn = self.client.restore_udp(attachment, udp.conn, before.resumes, local, options, filter)?;
        if let Some(peer) = udp.peer {
            self.client.udp_connect(conn, peer).map_err(|error| Error::Udp(peer, error))?;
        }
        if let Ok(socket) = self.files.socket(file) {
            socket.role = SocketRole::Udp(UdpSocket { conn, ..udp });
        }
        self.bind_conn(conn, file);
        self.share_again(file);
        self.restore_group_program(file);
        // The options were passed with the request.
        let _ = self.apply_datagram_options(file);
        // Links and limits are those of before.
        let _ = self.apply_memberships(file);
        Ok(())
    }

    /// Reserves the address of a bound socket again. If another process of the program has the address, that
    /// one keeps it.
    fn reserve_again(&mut self, file: FileId) -> Result<(), ShardsEnded> {
        let Ok(socket) = self.files.socket(file) else { return Ok(()) };
        let sharing = socket.options.sharing(socket.family);
        let Some(reserved) = socket.bound().and_then(|bound| bound.own_reservation()) else { return Ok(()) };
        let reserved = self.client.reserve(reserved.address, sharing);
        if reserved.is_err() && self.have_shards_ended() {
            return Err(ShardsEnded);
        }
        if let Some(bound) = self.files.socket(file).ok().and_then(|socket| socket.bound_mut()) {
            match reserved {
                Ok(reserved) => bound.reserved = reserved,
                Err(_) => bound.reserved.number = FOREIGN_RESERVATION,
            }
        }
        Ok(())
    }
}
