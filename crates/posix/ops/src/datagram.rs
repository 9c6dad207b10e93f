//! UDP sockets, as `udp_sendmsg` and `udp_recvmsg` serve them.
//!
//! `bind` to an address of the stack, and `connect` or the first `sendto` to a destination that the stack can
//! reach, make a socket the stack's; other addresses make it a kernel socket for good. A socket that is bound
//! to the unspecified address is both: a kernel socket is behind its descriptor, each datagram is sent by the
//! side that reaches the destination, and datagrams that arrived at the stack are received first.

mod ancillary;
mod cork;
mod destination;
mod error_queue;
mod local_answer;
mod peek;
mod sent_packet;
pub(crate) mod via_kernel;

pub(crate) use ancillary::cmsgs_of;
pub use ancillary::{ControlMessages, ReceivedMessage};
pub(crate) use cork::CorkedDatagram;

use crate::connect::PORT_ATTEMPTS_MAX;
use crate::departures::Departure;
use crate::descriptor_report::KernelReason;
use crate::fd_table::FileId;
use crate::file::{SocketRole, UdpSocket};
use crate::flow_labels::LABEL_MASK;
use crate::interfaces::FIRST_INDEX;
use crate::lock::LockGuard;
use crate::options::BoolOption;
use crate::options::timestamps::OPT_ID;
use crate::process::ProcessState;
use crate::sleep::{Timeout, Wait};
use crate::sockaddr::{self, Family};
use crate::tx_stamps::StampRequest;
use crate::user_memory::{UserSlice, UserSliceMut, efault};
use crate::{Ops, OpsConfig};
use ancillary::SendCmsgs;
use core::cell::Cell;
use core::ffi::c_int;
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::num::NonZeroU32;
use ginnel::channel::{DescriptionKey, ReceivedDatagram, RecvBuffer, SendBuffer, gather};
use ginnel::{Conn, Error, UdpError, UdpOptions, UdpSendParams, errno};
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Arguments of `sendmsg` besides the buffers.
#[derive(Clone, Copy, Debug, Default)]
pub struct SendArgs<'a> {
    /// Flags of `send`.
    pub flags: c_int,
    /// The destination as the program laid it out; `None` sends to the connected address.
    pub to: Option<&'a [u8]>,
    /// Control messages as the program laid them out.
    pub control: &'a [u8],
}

fn udp_errno(error: &Error) -> Errno {
    match error {
        Error::Udp(_, error) => errno::udp(*error),
        Error::Filter(error) => errno::filter(*error),
        _ => Errno::NETDOWN,
    }
}

impl Ops {
    /// Implements `sendto` and `sendmsg` of a UDP socket. On a TCP socket calls [`Ops::send`], ignoring
    /// the address, and control messages that Linux accepts.
    ///
    /// # Errors
    /// As [`Ops::send`]; `EDESTADDRREQ`, `EMSGSIZE`, `EACCES`, `ENETUNREACH`, and errors of earlier
    /// datagrams, such as `ECONNREFUSED`.
    pub fn send_to(&self, fd: RawFd, buffers: &[UserSlice<'_>], args: &SendArgs<'_>) -> Result<usize, Errno> {
        let sent = self.send_datagram_message(fd, buffers, args)?;
        if args.flags & libc::MSG_ZEROCOPY != 0 && sent > 0 {
            self.complete_datagram(fd);
        }
        Ok(sent)
    }

    /// Completes a call with `MSG_ZEROCOPY` on a UDP socket. [`Ops::send`] does it for others.
    #[cold]
    fn complete_datagram(&self, fd: RawFd) {
        let Ok(mut state) = self.lock() else { return };
        if let Ok(file) = self.file_of(&mut state, fd)
            && state.files.socket(file).is_ok_and(|socket| socket.is_udp)
        {
            state.complete_zerocopy(file);
        }
    }

    fn send_datagram_message(
        &self,
        fd: RawFd,
        buffers: &[UserSlice<'_>],
        args: &SendArgs<'_>,
    ) -> Result<usize, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        if !state.files.socket(file)?.is_udp {
            drop(state);
            return self.send_with_cmsgs(fd, buffers, args);
        }
        let socket = state.files.socket(file)?;
        let family = socket.family;
        let dont_wait = socket.nonblocking || args.flags & libc::MSG_DONTWAIT != 0;
        let timeout = if dont_wait { Timeout::Zero } else { socket.options.send_timeout() };
        let (corking, gso_size, is_corked) = socket.udp_send.as_ref().map_or((false, 0, false), |udp_send| {
            (udp_send.corking, udp_send.gso_size, udp_send.corked.is_some())
        });
        let corking = corking || args.flags & libc::MSG_MORE != 0;
        let len: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        let to = socket.check_destination(args.to, args.flags, len)?;
        if is_corked {
            // The first write has fixed the destination.
            return self.append(state, file, buffers, corking, timeout);
        }
        let v4 = to.or(socket.connected_peer()).map_or(family == Family::V4, |to| to.is_ipv4());
        let flow_info = match (v4, to) {
            (true, _) => 0,
            (false, Some(_)) => socket.named_flow_info(args.to.unwrap_or_default()),
            (false, None) => socket.peer_flow_info(),
        };
        let socket_state =
            || (family, socket.options.timestamps().has(OPT_ID), socket.options.has_departures());
        let cmsgs = match args.control {
            [] => SendCmsgs::default(),
            control => SendCmsgs::read(control, v4, socket_state(), flow_info)?,
        };
        let named_label = if to.is_some() { flow_info } else { 0 };
        socket.check_flow_label(named_label)?;
        let flow_info = cmsgs.flow_info.unwrap_or(flow_info);
        // Linux does not check the label of a control message if the address has one, too. That of the
        // connected peer was checked when the socket was connected.
        if named_label & LABEL_MASK == 0 && !args.control.is_empty() {
            socket.check_flow_label(flow_info)?;
        }
        let is_named = to.is_some() || cmsgs.flow_info.is_some();
        let flow_label = if v4 { None } else { socket.datagram_flow_label(flow_info, is_named) };
        let udp = match self.choose_path(state, fd, file, to)? {
            UdpPath::Kernel(kernel_fd) => {
                // `choose_path` has released the lock. The kernel copies, too, so that calls to it and to the
                // stack complete in one sequence.
                let args = SendArgs { flags: args.flags & !libc::MSG_ZEROCOPY, ..*args };
                return via_kernel::send(kernel_fd, buffers, &args);
            }
            UdpPath::Stack(locked, udp) => {
                state = locked;
                udp
            }
        };
        if udp.shut_write {
            return Err(Errno::PIPE);
        }
        if let Some(error) = state.take_udp_error(file) {
            return Err(error);
        }
        let remote = to.or(udp.peer).ok_or(Errno::DESTADDRREQ)?;
        let SendCmsgs { source, hop_limit, tos, .. } = cmsgs;
        let gso_size = cmsgs.gso_size.unwrap_or(gso_size);
        let args = UdpSendParams { to, source, gso_size, hop_limit, tos, flow_label };
        let mut message = UdpMessage { remote, args, departs_us: None };
        if let Some(at) = cmsgs.socket.departs_at {
            match state.files.socket(file)?.options.departure(at) {
                Departure::Now => {}
                Departure::At(departs_us) => message.departs_us = Some(departs_us),
                Departure::Dropped { is_reported } => {
                    if is_reported {
                        state.report_late_datagram(file, udp, &message, at, buffers)?;
                    }
                    return Ok(len);
                }
            }
        }
        if cmsgs.socket.has_tx() {
            state.set_datagram_cmsgs(file, cmsgs.socket);
        }
        if corking {
            state.cork(file, message, buffers)?;
            return Ok(len);
        }
        self.send_datagram(state, file, message, buffers, timeout)
    }

    /// Sends a datagram through the stack.
    fn send_datagram(
        &self,
        mut state: LockGuard<'_>,
        file: FileId,
        message: UdpMessage,
        buffers: &[UserSlice<'_>],
        timeout: Timeout,
    ) -> Result<usize, Errno> {
        let len: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        let UdpMessage { remote, mut args, departs_us } = message;
        if len <= args.gso_size.into() {
            args.gso_size = 0;
        }
        let gso_size = args.gso_size;
        let too_long =
            len > DATAGRAM_BYTES_MAX - if remote.is_ipv4() { HEADERS_BYTES } else { UDP_HEADER_BYTES };
        if len > usize::from(gso_size) * UDP_MAX_SEGMENTS && gso_size > 0 && !too_long {
            if let Some(stamp) = state.take_stamp_request(file) {
                state.return_stamp_request(file, stamp);
            }
            return Err(Errno::INVAL);
        }
        // A request would make the stack send, or lose, what waits.
        let is_new = state.is_new_destination(file, remote) && !state.waits_for_device(file);
        if departs_us.is_some() {
            // The time at which the datagram leaves is not taken.
            let _ = state.take_stamp_request(file);
        }
        let is_timed = departs_us.is_some();
        if too_long || !is_timed && (is_new || state.must_be_synchronous(file, len)) {
            // The first datagram to a destination is sent synchronously, so that errors are reported at once.
            // For a datagram that is too long for IPv6 the stack queues an error report, as for one that
            // exceeds the path MTU.
            let mut bytes = Vec::new();
            let gathered = gather(buffers, DATAGRAM_BYTES_MAX, &mut bytes).map_err(efault);
            let stamp = state.take_stamp_request(file);
            let sent = gathered.and_then(|_| state.send_synchronously(file, message, &bytes, stamp));
            match (sent, stamp) {
                (Ok(()), _) => {
                    let to = remote.ip();
                    if is_new && (to.is_loopback() || (self.config.is_stack_address)(to)) {
                        state.note_own_datagram(remote);
                        state.await_local_error(file);
                    }
                    return Ok(len);
                }
                // The datagram waits for the device, and is not timed.
                (Err(Errno::NOBUFS), Some(_)) => {}
                (Err(Errno::NOBUFS), None) if !state.is_new_destination(file, remote) => {}
                (Err(error), stamp) => {
                    stamp.into_iter().for_each(|stamp| state.return_stamp_request(file, stamp));
                    return Err(error);
                }
            }
        }
        let done = Cell::new(0);
        let wait = Wait::restarting(timeout, &done);
        let (mut state, result) = self.block_until(state, &[file], &mut [], &wait, |state, _| {
            if state.has_stack_ended() {
                return Err(Errno::NETDOWN);
            }
            // The handle changes if the shards are started again.
            let SocketRole::Udp(udp) = state.files.socket(file)?.role else { return Err(Errno::NETDOWN) };
            let sent = state.client.udp_send_queued(udp.conn, &args, departs_us, buffers);
            sent.map_err(|error| state.udp_request_error(error))?.map_err(efault)
        });
        state.client.flush();
        result.map(|()| len)
    }

    /// Implements `recvfrom` and `recvmsg`. Returns control messages as far as `control_space` bytes suffice.
    ///
    /// # Errors
    /// As [`Ops::recv`]; on a UDP socket `EAGAIN`, `EINTR`, and errors of earlier datagrams, such as
    /// `ECONNREFUSED`.
    pub fn recv_from(
        &self,
        fd: RawFd,
        buffers: &mut [UserSliceMut<'_>],
        flags: c_int,
        control_space: usize,
    ) -> Result<ReceivedMessage, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        if !socket.is_udp {
            if flags & libc::MSG_ERRQUEUE != 0 {
                return state.recv_local_error(file, buffers, control_space);
            }
            let inq = socket.options.flag(BoolOption::Inq);
            let is_unordered = socket.options.flag(BoolOption::UnorderedReceive);
            let timestamps = socket.options.timestamps();
            drop(state);
            if is_unordered && let Some(result) = self.recv_unordered(fd, buffers, flags, control_space) {
                return result;
            }
            let (count, arrived_us) = match timestamps.are_on() {
                true => self.recv_timed(fd, buffers, flags)?,
                false => (self.recv(fd, buffers, flags)?, None),
            };
            let mut received = ReceivedMessage::from_stream(count);
            if flags & libc::MSG_OOB != 0 && received.count > 0 {
                received.flags |= libc::MSG_OOB;
            }
            received.put_arrival_time(timestamps, arrived_us, control_space);
            // The bytes are consumed, so the call does not fail any more.
            if inq && let Ok(bytes) = self.inq_hint(fd) {
                received.put_inq(bytes, control_space);
            }
            return Ok(received);
        }
        let family = socket.family;
        let dont_wait = socket.nonblocking || flags & libc::MSG_DONTWAIT != 0;
        let timeout = if dont_wait { Timeout::Zero } else { socket.options.recv_timeout() };
        let reported_round = socket.netdown_round;
        let kernel_fd = state.kernel_fd(file);
        if flags & libc::MSG_ERRQUEUE != 0 {
            let reported = match state.recv_error(file, buffers, control_space) {
                Err(Errno::AGAIN) => state.recv_local_error(file, buffers, control_space),
                reported => reported,
            };
            return match (reported, kernel_fd) {
                (Err(Errno::AGAIN), Some(kernel_fd)) => {
                    via_kernel::recv(kernel_fd, buffers, flags, control_space, family)
                }
                (result, _) => result,
            };
        }
        let mut kernel_fds = [libc::pollfd { fd: kernel_fd.unwrap_or(-1), events: libc::POLLIN, revents: 0 }];
        let kernel_fds = &mut kernel_fds[..usize::from(kernel_fd.is_some())];
        let done = Cell::new(0);
        let wait = Wait { exclusive: true, ..Wait::restarting(timeout, &done) };
        if dont_wait {
            state.deliver_locally();
        }
        let (mut state, result) = self.block_until(state, &[file], kernel_fds, &wait, |state, _| {
            let received =
                state.recv_datagram(file, buffers, (flags, timeout), control_space, reported_round);
            match (received, kernel_fd) {
                (Err(Errno::AGAIN), Some(kernel_fd)) => {
                    via_kernel::recv(kernel_fd, buffers, flags | libc::MSG_DONTWAIT, control_space, family)
                }
                (result, _) => result,
            }
        });
        state.client.flush();
        if result.is_err() {
            state.notice_stack_end();
        }
        result
    }

    /// Implements `bind` of a UDP socket.
    pub(crate) fn bind_udp(
        &self,
        mut state: LockGuard<'_>,
        fd: RawFd,
        file: FileId,
        address: SocketAddr,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        let ip = address.ip();
        let lacks_port = address.port() == 0 && state.files.socket(file)?.options.binds_without_port();
        if lacks_port && !ip.is_multicast() && state.bind_udp_without_port(file, address, &self.config)? {
            return Ok(());
        }
        // Groups exist on interfaces of the kernel, too; a scope names the stack's link.
        let scope = if let SocketAddr::V6(address) = address { address.scope_id() } else { 0 };
        let is_shared_group = ip.is_multicast() && self.config.kernel_listen && scope < FIRST_INDEX;
        if !ip.is_unspecified() && !is_shared_group {
            let is_stack_address = (self.config.is_stack_address)(ip);
            let not_available = Err(Errno::ADDRNOTAVAIL);
            let opened = if is_stack_address {
                state.open_udp(file, address, true, None, None)
            } else {
                not_available
            };
            state.report_fd(fd, file);
            if opened != not_available || !self.config.kernel_listen {
                return opened;
            }
            self.convert_to_kernel(&mut state, fd, file)?;
            state.report_kernel_socket(fd, KernelReason::NotLocal);
            drop(state);
            return crate::syscall::bind(fd, bytes);
        }
        if !self.config.kernel_listen {
            let opened = state.open_udp(file, address, true, None, None);
            state.report_fd(fd, file);
            return opened;
        }
        let family = state.files.socket(file)?.family;
        let is_port_locked = address.port() != 0;
        // The kernel does not know which ports the stack's sockets use, so it may choose one of them.
        let attempts = if is_port_locked { 1 } else { PORT_ATTEMPTS_MAX };
        let mut opened = Err(Errno::ADDRINUSE);
        for _ in 0..attempts {
            // The kernel decides whether the port is free and permitted.
            self.open_kernel_socket(&mut state, fd, file)?;
            if let Err(error) = crate::syscall::bind(fd, bytes) {
                let _ = state.proxy_fds.install_over(fd);
                return Err(error);
            }
            let kernel_address = crate::kernel_socket::local_address(fd, family)?;
            let chosen = SocketAddr::new(ip, kernel_address.port());
            opened = state.open_udp(file, chosen, is_port_locked, Some(fd), None);
            if opened != Err(Errno::ADDRINUSE) {
                break;
            }
        }
        state.report_fd(fd, file);
        if opened.is_ok() {
            state.add_kernel_half_to_sets(file);
        } else {
            // The kernel's half must not keep the port.
            let _ = state.proxy_fds.install_over(fd);
        }
        opened
    }

    /// Implements `connect` of a UDP socket.
    pub(crate) fn connect_udp(
        &self,
        mut state: LockGuard<'_>,
        fd: RawFd,
        file: FileId,
        bytes: &[u8],
    ) -> Result<(), Errno> {
        let socket = state.files.socket(file)?;
        let family = socket.family;
        if sockaddr::family_of(bytes)? == libc::AF_UNSPEC as u16 {
            let disconnected = state.disconnect_udp(file);
            state.report_fd(fd, file);
            return disconnected;
        }
        let is_plain_v4 = family == Family::V6 && sockaddr::family_of(bytes)? == libc::AF_INET as u16;
        if is_plain_v4 && socket.options.is_v6_only() {
            return Err(Errno::AFNOSUPPORT);
        }
        // `__ip6_datagram_connect` accepts IPv4 addresses.
        let decoded = sockaddr::decode(bytes, if is_plain_v4 { Family::V4 } else { family })?;
        let to = crate::connect::loopback_for_any(decoded, None);
        if to.is_ipv4() && family == Family::V6 && socket.options.is_v6_only() {
            return Err(Errno::NETUNREACH);
        }
        let may_become_kernels =
            matches!(socket.role, SocketRole::Unconnected { .. }) && !socket.has_bound_address();
        let flow_info = socket.options.stored_flow_info();
        if to.is_ipv6() {
            state.take_peer_flow_info(file, bytes)?;
        }
        let socket = state.files.socket(file)?;
        let by_option = socket.options.multicast.leaves_by_stack(to.ip());
        let connected = match by_option.unwrap_or_else(|| (self.config.is_stack_address)(to.ip())) {
            true => state.connect_udp(file, to),
            false => Err(Errno::NETUNREACH),
        };
        match (connected, state.kernel_fd(file)) {
            (Err(Errno::NETUNREACH), Some(_)) => {
                // Only the kernel reaches the peer: it serves the socket alone from now on.
                self.drop_stack_side(&mut state, fd, file)?;
                drop(state);
                crate::syscall::connect(fd, bytes)
            }
            (Err(Errno::NETUNREACH), None) if may_become_kernels && self.config.kernel_listen => {
                state.close_udp(file);
                self.convert_to_kernel(&mut state, fd, file)?;
                drop(state);
                crate::syscall::connect(fd, bytes)
            }
            (connected, _) => {
                state.report_fd(fd, file);
                if connected.is_err() {
                    state.restore_flow_info(file, flow_info);
                }
                connected
            }
        }
    }

    /// Chooses the side that sends a datagram. A socket without a port gets one, and its first destination
    /// decides whether it belongs to the stack.
    fn choose_path<'a>(
        &'a self,
        mut state: LockGuard<'a>,
        fd: RawFd,
        file: FileId,
        to: Option<SocketAddr>,
    ) -> Result<UdpPath<'a>, Errno> {
        let socket = state.files.socket(file)?;
        let family = socket.family;
        let is_stack_address = to.is_none_or(|to| (self.config.is_stack_address)(to.ip()));
        let by_option = to.and_then(|to| socket.options.multicast.leaves_by_stack(to.ip()));
        let stays = socket.options.multicast.has_memberships();
        let is_kernels = |state: &mut LockGuard<'_>| match by_option {
            Some(leaves_by_stack) => !leaves_by_stack,
            None => !is_stack_address || !state.is_reachable(to),
        };
        match socket.role {
            SocketRole::Udp(udp) => match udp.kernel_fd {
                Some(kernel_fd) if udp.peer.is_none() && is_kernels(&mut state) => {
                    Ok(UdpPath::Kernel(kernel_fd))
                }
                _ => Ok(UdpPath::Stack(state, udp)),
            },
            _ => {
                to.ok_or(Errno::DESTADDRREQ)?;
                let may_become_kernels = !stays && !state.files.socket(file)?.has_bound_address();
                if self.config.kernel_listen && may_become_kernels && is_kernels(&mut state) {
                    self.convert_to_kernel(&mut state, fd, file)?;
                    return Ok(UdpPath::Kernel(fd));
                }
                let local = state.address_without_port(file)?.unwrap_or(any_address(family, to));
                state.open_udp(file, local, false, None, to.map(|to| to.ip()))?;
                state.report_fd(fd, file);
                match state.files.socket(file)?.role {
                    SocketRole::Udp(udp) => Ok(UdpPath::Stack(state, udp)),
                    _ => Err(Errno::BADF),
                }
            }
        }
    }
}

/// A datagram's destination and parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UdpMessage {
    /// The destination, also if it is the connected address.
    remote: SocketAddr,
    args: UdpSendParams,
    /// When it is to be sent: the lowest 32 bits of the microseconds of the monotonic clock.
    departs_us: Option<NonZeroU32>,
}

/// The side that sends a datagram.
enum UdpPath<'a> {
    Stack(LockGuard<'a>, UdpSocket),
    Kernel(RawFd),
}

/// Maximum number of datagrams that one write is cut into (`UDP_MAX_SEGMENTS`).
const UDP_MAX_SEGMENTS: usize = 128;
/// Maximum length of a datagram, in bytes (`udp_sendmsg`).
const DATAGRAM_BYTES_MAX: usize = 0xffff;
/// Header bytes that count for that maximum over IPv4; over IPv6 only the UDP header counts.
const HEADERS_BYTES: usize = 20 + UDP_HEADER_BYTES;
const UDP_HEADER_BYTES: usize = 8;

fn any_address(family: Family, to: Option<SocketAddr>) -> SocketAddr {
    match (family, to) {
        // An IPv6 socket also receives over IPv4, unless `IPV6_V6ONLY` is set.
        (Family::V6, _) => family.unspecified(),
        _ => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
    }
}

impl ProcessState {
    /// Returns the error number for a datagram or a connection to `to`. The families of the addresses do not
    /// match if the socket has an IPv6 address, and the destination is an IPv4 address, or the reverse
    /// (`ip6_dst_lookup_tail`, `udpv6_sendmsg`). `ENETDOWN` if the shards have ended.
    fn errno_towards(&mut self, error: UdpError, to: SocketAddr) -> Errno {
        match error {
            UdpError::WrongFamily if to.is_ipv4() => Errno::NETUNREACH,
            error => self.udp_request_error(error),
        }
    }

    /// Opens the stack's side of a UDP socket; `to` is its first peer, if it has one already.
    fn open_udp(
        &mut self,
        file: FileId,
        address: SocketAddr,
        bound: bool,
        kernel: Option<RawFd>,
        to: Option<IpAddr>,
    ) -> Result<(), Errno> {
        self.check_stack_alive();
        self.request_over_restarts(|state| {
            // The former shards had opened it, and it was opened again.
            let is_open = matches!(state.files.socket(file)?.role, SocketRole::Udp(_));
            if is_open { Ok(()) } else { state.try_open_udp(file, address, bound, kernel, to) }
        })
    }

    fn try_open_udp(
        &mut self,
        file: FileId,
        address: SocketAddr,
        bound: bool,
        kernel: Option<RawFd>,
        to: Option<IpAddr>,
    ) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let options = socket.options.udp_options(socket.family);
        socket.options.applied_udp = Some(options);
        let filter = socket.options.filter_code();
        let filter = filter.as_deref();
        let program = socket.options.group_program().filter(|_| options.reuse_port);
        let ports = if address.port() == 0 { self.local_ports(file)? } else { None };
        if program.is_some() && address.port() != 0 {
            // A socket with a group of its own does not join another one (`udp_lib_lport_inuse`).
            self.probe_udp(address, UdpOptions { reuse_port: false, ..options }, to)?;
        }
        let conn = match ports {
            None => self.client.udp_open(address, options, to, filter).map_err(|e| udp_errno(&e)),
            Some(ports) => crate::connect::first_free(ports, |port| {
                let address = SocketAddr::new(address.ip(), port);
                self.client.udp_open(address, options, to, filter).map_err(|e| udp_errno(&e))
            }),
        }?;
        if let Some(program) = program
            && let Err(error) = self.begin_group(DescriptionKey::Socket(conn), &program, true)
        {
            let _ = self.client.release(conn);
            self.client.flush();
            return Err(error);
        }
        let socket = self.files.socket(file)?;
        socket.role = SocketRole::Udp(UdpSocket {
            conn,
            port_locked: bound && address.port() != 0,
            address_locked: !address.ip().is_unspecified(),
            peer: None,
            kernel_fd: kernel,
            shut_read: socket.shutdown.read,
            shut_write: socket.shutdown.write,
            deferred_error: None,
        });
        if let Some(udp_send) = &mut socket.udp_send {
            // Positions in the queue of the former socket.
            udp_send.peeked_empty.clear();
        }
        self.bind_conn(conn, file);
        self.apply_datagram_options(file)?;
        self.apply_memberships(file)
    }

    fn connect_udp(&mut self, file: FileId, to: SocketAddr) -> Result<(), Errno> {
        self.request_over_restarts(|state| state.try_connect_udp(file, to))
    }

    fn try_connect_udp(&mut self, file: FileId, to: SocketAddr) -> Result<(), Errno> {
        let family = self.files.socket(file)?.family;
        if !matches!(self.files.socket(file)?.role, SocketRole::Udp(_)) {
            let local = self.address_without_port(file)?.unwrap_or(family.unspecified());
            self.open_udp(file, local, false, None, Some(to.ip()))?;
        }
        let SocketRole::Udp(udp) = self.files.socket(file)?.role else { return Err(Errno::NETDOWN) };
        let connected = self.client.udp_connect(udp.conn, to);
        connected.map_err(|error| self.errno_towards(error, to))?;
        if let SocketRole::Udp(udp) = &mut self.files.socket(file)?.role {
            udp.peer = Some(to);
        }
        self.files.socket(file)?.udp_send.get_or_insert_default().longest_sent = 0;
        if !to.ip().is_loopback() {
            // Errors that the stack finds have been reported.
            self.note_destination(file, to);
        }
        Ok(())
    }

    /// Binds a socket to an address without a port, which the first datagram or `connect` chooses
    /// (`IP_BIND_ADDRESS_NO_PORT`). Returns false if the address is not the stack's.
    fn bind_udp_without_port(
        &mut self,
        file: FileId,
        address: SocketAddr,
        config: &OpsConfig,
    ) -> Result<bool, Errno> {
        if !address.ip().is_unspecified() {
            let probe = |state: &mut Self| state.probe_udp(address, UdpOptions::default(), None);
            let is_own = (config.is_stack_address)(address.ip()) && self.request_over_restarts(probe).is_ok();
            if !is_own && config.kernel_listen {
                return Ok(false);
            }
            if !is_own {
                return Err(Errno::ADDRNOTAVAIL);
            }
        }
        self.files.socket(file)?.last_address = Some(address);
        Ok(true)
    }

    /// Opens a temporary socket, to see whether that is possible.
    fn probe_udp(
        &mut self,
        address: SocketAddr,
        options: UdpOptions,
        to: Option<IpAddr>,
    ) -> Result<(), Errno> {
        let probe = self.client.udp_open(address, options, to, None).map_err(|e| udp_errno(&e))?;
        let _ = self.client.release(probe);
        self.client.flush();
        Ok(())
    }

    /// Returns the address without a port that the program has bound, by `IP_BIND_ADDRESS_NO_PORT` or before
    /// `connect` with `AF_UNSPEC` released the port.
    fn address_without_port(&mut self, file: FileId) -> Result<Option<SocketAddr>, Errno> {
        Ok(self.files.socket(file)?.last_address)
    }

    /// Implements `connect` with `AF_UNSPEC` (`__udp_disconnect`). The address and the port that the program
    /// chose stay bound.
    fn disconnect_udp(&mut self, file: FileId) -> Result<(), Errno> {
        let SocketRole::Udp(udp) = self.files.socket(file)?.role else { return Ok(()) };
        if udp.peer.is_none() && udp.port_locked {
            return Ok(());
        }
        let local = self.client.endpoints(udp.conn).map(|[local, _]| local);
        self.close_udp(file);
        let socket = self.files.socket(file)?;
        let local = local.unwrap_or(socket.family.unspecified());
        let ip = if udp.address_locked {
            local_ip(local, socket.family)
        } else {
            socket.family.unspecified().ip()
        };
        if udp.port_locked {
            // The socket returns to its group, which may have other members.
            let program = socket.options.replace_group_program(None);
            let opened = self.open_udp(file, SocketAddr::new(ip, local.port()), true, udp.kernel_fd, None);
            self.files.socket(file)?.options.replace_group_program(program);
            self.restore_group_program(file);
            return opened;
        }
        if udp.address_locked {
            socket.last_address = Some(SocketAddr::new(ip, 0));
        }
        if let Some(kernel_fd) = udp.kernel_fd {
            // The kernel's side releases its port, too. An address of the family `AF_UNSPEC` is valid.
            let _ = crate::syscall::connect(kernel_fd, &[0; 16]);
        }
        Ok(())
    }

    /// Implements `shutdown`.
    ///
    /// # Errors
    /// `ENOTCONN` if the socket is not connected; it is shut down all the same.
    pub fn shutdown_udp(&mut self, file: FileId, read: bool, write: bool) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        // Kept over `connect`, also with `AF_UNSPEC`.
        socket.record_shutdown(read, write);
        let mut connected = false;
        if let SocketRole::Udp(udp) = &mut socket.role {
            udp.shut_read |= read;
            udp.shut_write |= write;
            connected = udp.peer.is_some();
        }
        self.wake(file, libc::POLLIN | libc::POLLRDNORM | libc::POLLRDHUP | libc::POLLHUP | libc::POLLOUT);
        if connected { Ok(()) } else { Err(Errno::NOTCONN) }
    }

    /// Returns the local address, as `getsockname` reports it.
    pub fn udp_local(&self, udp: UdpSocket, family: Family) -> Option<SocketAddr> {
        let [local, _] = self.client.endpoints(udp.conn).ok()?;
        Some(SocketAddr::new(local_ip(local, family), local.port()))
    }

    /// Closes the stack's side of a UDP socket, which becomes unconnected and unbound.
    pub fn close_udp(&mut self, file: FileId) {
        let Ok(socket) = self.files.socket(file) else { return };
        let SocketRole::Udp(udp) = socket.role else { return };
        socket.role = SocketRole::Unconnected { bound: None };
        self.release_udp(udp.conn);
    }

    pub fn release_udp(&mut self, conn: Conn) {
        self.unbind_conn(conn);
        // If the stack is gone, there is nothing to release.
        let _ = self.client.release(conn);
        self.client.flush();
    }

    /// Returns whether the stack has a route to a destination, by connecting a temporary socket. Returns true
    /// without a destination, and if no such socket can be opened.
    fn is_reachable(&mut self, to: Option<SocketAddr>) -> bool {
        let Some(to) = to else { return true };
        if self.reachable_hosts.contains(&to.ip()) {
            return true;
        }
        let unspecified = SocketAddr::new(
            if to.is_ipv4() {
                Ipv4Addr::UNSPECIFIED.into()
            } else {
                IpAddr::V6(core::net::Ipv6Addr::UNSPECIFIED)
            },
            0,
        );
        let Ok(probe) = self.client.udp_open(unspecified, UdpOptions::default(), None, None) else {
            return true;
        };
        let has_route = self.client.udp_connect(probe, to) != Err(UdpError::NetUnreachable);
        let _ = self.client.release(probe);
        self.client.flush();
        if has_route {
            self.note_reachable(to.ip());
        }
        has_route
    }

    /// Remembers that the stack has a route to a host.
    pub fn note_reachable(&mut self, ip: IpAddr) {
        if self.reachable_hosts.len() == REMEMBERED_HOSTS_MAX {
            self.reachable_hosts.remove(0);
        }
        self.reachable_hosts.push(ip);
    }

    /// Sends a datagram by a request, and queues the timestamps that the program wants.
    fn send_synchronously(
        &mut self,
        file: FileId,
        message: UdpMessage,
        bytes: &[u8],
        stamp: Option<StampRequest>,
    ) -> Result<(), Errno> {
        let UdpMessage { remote, mut args, .. } = message;
        if bytes.len() <= args.gso_size.into() {
            args.gso_size = 0;
        }
        let send = |state: &mut Self, conn: Conn| match stamp {
            None => state.client.udp_send_with(conn, &args, bytes).map(|()| None),
            Some(_) => state.client.udp_send_timed(conn, &args, bytes).map(Some),
        };
        let (conn, times) = self.request_over_restarts(|state| {
            // The handle changes if the shards are started again.
            let SocketRole::Udp(udp) = state.files.socket(file)?.role else { return Err(Errno::NETDOWN) };
            let sent = send(state, udp.conn);
            if matches!(sent, Err(UdpError::DeviceFull)) {
                // The destination can be reached. Later datagrams wait behind this one, in the channel.
                state.note_destination(file, remote);
                state.note_sent_length(file, bytes.len());
                state.files.socket(file)?.udp_send.get_or_insert_default().waits_for_device = true;
            }
            sent.map(|times| (udp.conn, times)).map_err(|error| state.errno_towards(error, remote))
        })?;
        self.note_destination(file, remote);
        self.note_sent_length(file, bytes.len());
        if let (Some(stamp), Some(times)) = (stamp, times) {
            let local = self.client.endpoints(conn).map_or(remote, |[local, _]| local);
            let from = SocketAddr::new(args.source.unwrap_or(local.ip()), local.port());
            let options = self.files.socket(file)?.options.ip_fields(remote.is_ipv4());
            let fields = (args.hop_limit.or(options.0), args.tos.unwrap_or(options.1));
            self.queue_stamps(file, stamp, times, || sent_packet::sent_packet([from, remote], fields, bytes));
        }
        Ok(())
    }

    /// Reports that a datagram was dropped because its time had passed.
    #[cold]
    fn report_late_datagram(
        &mut self,
        file: FileId,
        udp: UdpSocket,
        message: &UdpMessage,
        at: u64,
        buffers: &[UserSlice<'_>],
    ) -> Result<(), Errno> {
        let mut bytes = Vec::new();
        gather(buffers, DATAGRAM_BYTES_MAX, &mut bytes).map_err(efault)?;
        let UdpMessage { remote, args, .. } = message;
        let local = self.client.endpoints(udp.conn).map_or(*remote, |[local, _]| local);
        let from = SocketAddr::new(args.source.unwrap_or(local.ip()), local.port());
        let options = self.files.socket(file)?.options.ip_fields(remote.is_ipv4());
        let fields = (args.hop_limit.or(options.0), args.tos.unwrap_or(options.1));
        self.queue_late_datagram(file, at, sent_packet::sent_packet([from, *remote], fields, &bytes));
        Ok(())
    }

    /// Returns whether datagrams wait in the channel since the device had no room for the first one to a
    /// destination.
    fn waits_for_device(&mut self, file: FileId) -> bool {
        let Ok(socket) = self.files.socket(file) else { return false };
        let SocketRole::Udp(udp) = socket.role else { return false };
        let Some(udp_send) = socket.udp_send.as_mut().filter(|udp_send| udp_send.waits_for_device) else {
            return false;
        };
        udp_send.waits_for_device = self.client.status(udp.conn).is_ok_and(|status| status.unsent > 0);
        udp_send.waits_for_device
    }

    /// Returns whether this socket has not sent to the destination yet.
    fn is_new_destination(&mut self, file: FileId, to: SocketAddr) -> bool {
        let socket = self.files.socket(file);
        socket.is_ok_and(|socket| {
            !socket.udp_send.as_ref().is_some_and(|udp_send| udp_send.destinations.contains(&to))
        })
    }

    /// Forgets to which destinations a socket has sent: after an error or a change of options, the next
    /// datagram to each may fail.
    pub(crate) fn forget_destinations(&mut self, file: FileId) {
        if let Ok(socket) = self.files.socket(file)
            && let Some(udp_send) = &mut socket.udp_send
        {
            udp_send.destinations.clear();
        }
    }

    fn note_destination(&mut self, file: FileId, to: SocketAddr) {
        let Ok(socket) = self.files.socket(file) else { return };
        let destinations = &mut socket.udp_send.get_or_insert_default().destinations;
        if destinations.len() == REMEMBERED_HOSTS_MAX {
            destinations.remove(0);
        }
        if !destinations.contains(&to) {
            destinations.push(to);
        }
    }

    /// Records when a datagram arrived, if the program asks for that (`SIOCGSTAMP`), and moves the offset of
    /// peeks back. `count` is the result of the call.
    #[inline]
    fn note_received(&mut self, file: FileId, datagram: &ReceivedDatagram, count: usize) {
        if let Ok(socket) = self.files.socket(file)
            && let Some(udp_send) = socket.udp_send.as_mut().filter(|udp_send| udp_send.follows_receipts())
        {
            udp_send.last_arrival = Some(crate::options::timestamps::time_of(datagram.received_us));
            socket.options.move_peek_offset(false, count);
        }
    }

    /// Takes the error of an earlier datagram.
    pub fn take_udp_error(&mut self, file: FileId) -> Option<Errno> {
        let SocketRole::Udp(udp) = &mut self.files.socket(file).ok()?.role else { return None };
        let (deferred_error, conn) = (udp.deferred_error.take(), udp.conn);
        if deferred_error.is_some() {
            return deferred_error;
        }
        let error = self.client.udp_error(conn, true)?;
        self.forget_destinations(file);
        if error == UdpError::Destroyed {
            // The error is reported even if the socket cannot be bound again.
            let _ = self.disconnect_udp(file);
        }
        Some(errno::udp(error))
    }

    fn recv_datagram(
        &mut self,
        file: FileId,
        buffers: &mut [UserSliceMut<'_>],
        (flags, timeout): (c_int, Timeout),
        control_space: usize,
        reported_round: u32,
    ) -> Result<ReceivedMessage, Errno> {
        let SocketRole::Udp(udp) = self.files.socket(file)?.role else { return Err(Errno::AGAIN) };
        if let Some(error) = self.take_udp_error(file) {
            return Err(error);
        }
        let is_peek = flags & libc::MSG_PEEK != 0;
        let mut offset = 0;
        let result = if is_peek {
            self.peek_datagram(file, udp.conn, buffers, &mut offset)
        } else {
            self.client.udp_recv_into(udp.conn, buffers)
        };
        let datagram = match result {
            // A call that would not wait fails nevertheless (`__skb_wait_for_more_packets`).
            Err(UdpError::WouldBlock) if udp.shut_read && timeout != Timeout::Zero => {
                return Ok(ReceivedMessage::from_stream(0));
            }
            Err(UdpError::WouldBlock) => {
                return Err(self.wait_error(file, udp.kernel_fd, reported_round));
            }
            result => result.map_err(errno::udp)?.map_err(efault)?,
        };
        let space: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        let socket = self.files.socket(file)?;
        let family = socket.family;
        let mut received = ReceivedMessage::from_datagram(&datagram, space, flags, family);
        socket.options.put_cmsgs(&datagram, family, received.control_with_room(control_space));
        if socket.options.reports_destination(datagram.to, family) {
            let port = self.client.endpoints(udp.conn).map_or(0, |[local, _]| local.port());
            received.put_original_destination(SocketAddr::new(datagram.to, port));
        }
        if is_peek {
            received.begin_at(&datagram, (offset, space, flags));
            self.advance_peek(file, received.count);
        } else {
            self.note_received(file, &datagram, received.count);
        }
        Ok(received)
    }
}

/// How many hosts and destinations are remembered.
const REMEMBERED_HOSTS_MAX: usize = 32;

/// Returns the local address as a socket of this family reports it. For an IPv4 socket, an IPv6 address
/// stands for the unspecified one.
pub(crate) fn local_ip(local: SocketAddr, family: Family) -> IpAddr {
    match (local.ip(), family) {
        (ip @ IpAddr::V4(_), Family::V4) | (ip, Family::V6) => ip,
        _ => family.unspecified().ip(),
    }
}

/// Returns whether a datagram was longer than the buffers.
pub(crate) fn is_truncated(datagram: &ReceivedDatagram, space: usize) -> bool {
    datagram.len > space
}
