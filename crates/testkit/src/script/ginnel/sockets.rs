//! Implements the socket calls of scripts with the engine's API: the part of Linux's socket layer that
//! scripts need.

use crate::script::assertion::Info;
use crate::script::calls::{CallResult, Fd, Op, OptionValue};
use crate::script::flow::SERVER_PORT;
use crate::script::names::{Errno, MsgFlags, PollEvents, ShutdownHow, SockOpt, SocketIoctl};
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel_stack::error::{ConnectError, ListenError, RecvError, SendError};
use ginnel_stack::events::{CloseReason, Event};
use ginnel_stack::handle::{Conn, Listener};
use ginnel_stack::options::{
    CaState, ConnectOptions, ListenOptions, SocketOptions, TcpOption, defer_accept_timeouts,
};
use ginnel_stack::stack::Stack;
use ginnel_stack::tcp::state::State;
use ginnel_stack::time::Instant;
use std::collections::BTreeMap;

/// Progress of a call that may block.
pub enum CallProgress {
    /// The call returned.
    Done(CallResult),
    /// The call still blocks.
    Wait,
}

enum SocketKind {
    /// Neither listening nor connected.
    Unconnected,
    Listening(Listener),
    Connected(Conn),
    /// The connection has ended; holds the received bytes that were not read.
    Closed(Vec<u8>),
}

struct Socket {
    kind: SocketKind,
    bound: Option<SocketAddr>,
    /// Options with which a listener or a connection is created.
    options: SocketOptions,
    /// Options that are set on the connection once it exists.
    pending_options: Vec<TcpOption>,
    /// Pending `SO_ERROR`.
    error: Option<i32>,
    shut_read: bool,
    shut_write: bool,
    /// True if the peer had closed before the connection ended.
    peer_closed: bool,
    /// Seconds that `close` lingers.
    linger: Option<u32>,
    /// True if the last send had `MSG_MORE`.
    msg_more: bool,
    /// `TCP_NOTSENT_LOWAT`; 0 is none.
    notsent_lowat: u32,
    /// Number of connections in the accept queue.
    accept_pending: usize,
    oob_inline: bool,
}

impl Socket {
    fn new(kind: SocketKind) -> Self {
        Self {
            kind,
            bound: None,
            options: SocketOptions::default(),
            pending_options: Vec::new(),
            error: None,
            shut_read: false,
            shut_write: false,
            peer_closed: false,
            linger: None,
            msg_more: false,
            notsent_lowat: 0,
            accept_pending: 0,
            oob_inline: false,
        }
    }
}

/// The sockets of a script.
pub struct EngineSockets {
    local: IpAddr,
    remote: IpAddr,
    table: BTreeMap<Fd, Socket>,
    /// Connections whose descriptor was closed.
    lingering: BTreeMap<Fd, Conn>,
}

fn fail(errno: i32) -> CallResult {
    CallResult::error(Errno(errno))
}

impl EngineSockets {
    /// Creates an empty descriptor table.
    pub fn new(local: IpAddr, remote: IpAddr) -> Self {
        Self { local, remote, table: BTreeMap::new(), lingering: BTreeMap::new() }
    }

    fn find_conn(&mut self, conn: Conn) -> Option<&mut Socket> {
        self.table.values_mut().find(|s| matches!(s.kind, SocketKind::Connected(c) if c == conn))
    }

    /// Processes all pending events of the engine.
    pub fn take_events(&mut self, stack: &mut Stack) {
        while let Some(event) = stack.next_event() {
            match event {
                Event::Incoming { listener } => {
                    let found = self
                        .table
                        .values_mut()
                        .find(|s| matches!(s.kind, SocketKind::Listening(l) if l == listener));
                    if let Some(socket) = found {
                        socket.accept_pending += 1;
                    }
                }
                Event::Closed { conn, reason, .. } => {
                    self.lingering.retain(|_, c| *c != conn);
                    let Some(socket) = self.find_conn(conn) else { continue };
                    // After this event the receive buffer is gone.
                    let mut unread = vec![0; stack.readable(conn)];
                    let got = stack.recv(conn, &mut unread).unwrap_or(0);
                    unread.truncate(got);
                    socket.error = close_errno(reason, socket.peer_closed && !socket.shut_write);
                    socket.kind = SocketKind::Closed(unread);
                }
                Event::PeerClosed { conn } => {
                    if let Some(socket) = self.find_conn(conn) {
                        socket.peer_closed = true;
                    }
                }
                // Readiness is computed on demand.
                Event::Connected { .. }
                | Event::Data { .. }
                | Event::Readable { .. }
                | Event::Writable { .. }
                | Event::Acked { .. }
                | Event::Urgent { .. }
                | Event::Unordered { .. }
                | Event::UdpReadable { .. }
                | Event::ListenerDestroyed { .. } => {}
            }
        }
    }

    /// Makes a call without blocking.
    pub fn call(
        &mut self,
        stack: &mut Stack,
        now: Instant,
        op: &Op,
        new_fd: Option<Fd>,
        data: &[u8],
    ) -> CallResult {
        match op {
            Op::Socket => {
                let Some(fd) = new_fd else { return fail(libc::EMFILE) };
                self.table.insert(fd, Socket::new(SocketKind::Unconnected));
                CallResult::value(fd.into())
            }
            Op::Poll { entries, .. } => {
                let revents: Vec<_> = entries.iter().map(|e| self.readiness(stack, e.fd, e.events)).collect();
                let ready = revents.iter().filter(|r| r.0 != 0).count();
                CallResult { revents, ..CallResult::value(ready as i64) }
            }
            Op::Close { fd } => match self.table.remove(fd) {
                Some(socket) => {
                    match socket.kind {
                        SocketKind::Listening(listener) => {
                            stack.unlisten(listener);
                        }
                        SocketKind::Connected(conn) => {
                            let _ = stack.close(conn);
                            self.lingering.insert(*fd, conn);
                        }
                        SocketKind::Unconnected | SocketKind::Closed(_) => {}
                    }
                    CallResult::value(0)
                }
                None => fail(libc::EBADF),
            },
            Op::Accept { fd } => self.accept(stack, *fd, new_fd),
            _ => {
                let (local, remote) = (self.local, self.remote);
                let Some(socket) = op.fd().and_then(|fd| self.table.get_mut(&fd)) else {
                    return fail(libc::EBADF);
                };
                socket.call(stack, now, (local, remote), op, data)
            }
        }
    }

    fn accept(&mut self, stack: &mut Stack, fd: Fd, new_fd: Option<Fd>) -> CallResult {
        let Some(socket) = self.table.get_mut(&fd) else { return fail(libc::EBADF) };
        let SocketKind::Listening(listener) = socket.kind else { return fail(libc::EINVAL) };
        let Some(conn) = stack.accept(listener) else {
            socket.accept_pending = 0;
            return fail(libc::EAGAIN);
        };
        socket.accept_pending = socket.accept_pending.saturating_sub(1);
        let mut accepted = Socket::new(SocketKind::Connected(conn));
        accepted.peer_closed = stack.state(conn).is_some_and(peer_has_closed);
        let Some(new_fd) = new_fd else {
            // The script expected an error.
            let _ = stack.abort(conn);
            return CallResult::value(0);
        };
        self.table.insert(new_fd, accepted);
        CallResult::value(new_fd.into())
    }

    /// Starts a call that may block.
    pub fn start_blocking(
        &mut self,
        stack: &mut Stack,
        now: Instant,
        op: &Op,
        new_fd: Option<Fd>,
        data: &[u8],
    ) -> CallProgress {
        let lingers = matches!(op, Op::Close { fd } if self.table.get(fd).is_some_and(|s| s.linger.is_some_and(|l| l > 0)));
        let returned = self.call(stack, now, op, new_fd, data);
        let blocks = lingers
            || matches!(returned.errno, Some(Errno(libc::EAGAIN | libc::EINPROGRESS)))
            || matches!(op, Op::Poll { timeout_ms, .. } if *timeout_ms != 0 && returned.value == 0);
        if blocks { CallProgress::Wait } else { CallProgress::Done(returned) }
    }

    /// Retries a call that blocks; `expired` says that its time limit has passed.
    pub fn retry_blocking(
        &mut self,
        stack: &mut Stack,
        now: Instant,
        op: &Op,
        new_fd: Option<Fd>,
        data: &[u8],
        expired: bool,
    ) -> CallProgress {
        match op {
            Op::Connect { fd } => {
                let Some(socket) = self.table.get_mut(fd) else {
                    return CallProgress::Done(fail(libc::EBADF));
                };
                match socket.kind {
                    SocketKind::Connected(conn) => match stack.state(conn) {
                        Some(State::SynSent | State::SynReceived) => CallProgress::Wait,
                        _ => CallProgress::Done(CallResult::value(0)),
                    },
                    _ => CallProgress::Done(fail(socket.error.take().unwrap_or(libc::ECONNABORTED))),
                }
            }
            Op::Close { fd } => {
                let open = self.lingering.get(fd).and_then(|conn| stack.state(*conn));
                let unfinished = matches!(open, Some(State::FinWait1 | State::Closing | State::LastAck));
                if unfinished && !expired {
                    CallProgress::Wait
                } else {
                    CallProgress::Done(CallResult::value(0))
                }
            }
            Op::Poll { .. } => {
                let returned = self.call(stack, now, op, new_fd, data);
                if returned.value == 0 && !expired {
                    CallProgress::Wait
                } else {
                    CallProgress::Done(returned)
                }
            }
            _ => {
                let returned = self.call(stack, now, op, new_fd, data);
                let would_block = returned.errno == Some(Errno(libc::EAGAIN));
                if would_block { CallProgress::Wait } else { CallProgress::Done(returned) }
            }
        }
    }

    /// Returns the call's own time limit.
    pub fn time_limit(&self, op: &Op) -> Option<Duration> {
        match op {
            Op::Poll { timeout_ms, .. } => u64::try_from(*timeout_ms).ok().map(Duration::from_millis),
            Op::Close { fd } => self.table.get(fd)?.linger.map(|s| Duration::from_secs(s.into())),
            _ => None,
        }
    }

    fn readiness(&self, stack: &Stack, fd: Fd, events: PollEvents) -> PollEvents {
        let Some(socket) = self.table.get(&fd) else { return PollEvents(libc::POLLNVAL) };
        let always = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;
        PollEvents(socket.readiness(stack) & (events.0 | always))
    }

    /// Returns the connection's state by the names of `tcp_info`.
    ///
    /// # Errors
    /// A message if the descriptor is unknown.
    pub fn info(&self, stack: &Stack, fd: Fd) -> Result<Info, String> {
        let socket = self.table.get(&fd).ok_or(format!("unknown descriptor {fd}"))?;
        Ok(match socket.kind {
            SocketKind::Connected(conn) => info(stack, conn).unwrap_or_else(closed_info),
            SocketKind::Listening(_) => Info::from([("tcpi_state", 10)]),
            SocketKind::Unconnected | SocketKind::Closed(_) => closed_info(),
        })
    }
}

/// Sends the deferred SYN of a connection with as many bytes of `data` as the SYN can carry.
fn send_in_syn(stack: &mut Stack, now: Instant, conn: Conn, data: &[u8]) -> CallResult {
    let max = usize::from(stack.syn_data_max(conn).unwrap_or(0)).min(data.len());
    let sent = stack.send(conn, &data[..max]);
    stack.send_deferred_syn(now, conn);
    match sent {
        Ok(1..) => CallResult::value(max as i64),
        Ok(0) => fail(libc::EINPROGRESS),
        Err(_) => fail(libc::EPIPE),
    }
}

/// Returns Linux's `SO_ERROR` for the end of a connection.
fn close_errno(reason: CloseReason, is_close_wait: bool) -> Option<i32> {
    match reason {
        CloseReason::Normal | CloseReason::Aborted => None,
        // The incoming stream had ended already, so only writing can fail.
        CloseReason::Reset if is_close_wait => Some(libc::EPIPE),
        CloseReason::Reset => Some(libc::ECONNRESET),
        CloseReason::Refused => Some(libc::ECONNREFUSED),
        CloseReason::TimedOut => Some(libc::ETIMEDOUT),
        CloseReason::HostUnreachable => Some(libc::EHOSTUNREACH),
        CloseReason::NetUnreachable => Some(libc::ENETUNREACH),
        CloseReason::ProtocolUnreachable => Some(libc::ENOPROTOOPT),
        CloseReason::HostDown => Some(libc::EHOSTDOWN),
        CloseReason::HostIsolated => Some(libc::ENONET),
        CloseReason::SourceRouteFailed => Some(libc::EOPNOTSUPP),
        CloseReason::Prohibited => Some(libc::EACCES),
        CloseReason::ProtocolError => Some(libc::EPROTO),
        CloseReason::Destroyed => Some(libc::ECONNABORTED),
    }
}

fn peer_has_closed(state: State) -> bool {
    matches!(state, State::CloseWait | State::LastAck | State::Closing | State::TimeWait)
}

impl Socket {
    fn call(
        &mut self,
        stack: &mut Stack,
        now: Instant,
        ends: (IpAddr, IpAddr),
        op: &Op,
        data: &[u8],
    ) -> CallResult {
        match op {
            Op::Bind { port, .. } => {
                self.bound = Some(SocketAddr::new(ends.0, port.unwrap_or(SERVER_PORT)));
                CallResult::value(0)
            }
            Op::Listen { backlog, .. } => self.listen(stack, *backlog),
            Op::Connect { .. } => self.connect(stack, now, SocketAddr::new(ends.1, SERVER_PORT)),
            Op::Receive { len, flags, .. } => self.receive(stack, *len, *flags),
            Op::Send { flags, .. } => self.send(stack, now, data, *flags),
            Op::SendTo { flags, .. } if flags.has(libc::MSG_FASTOPEN) => {
                self.send_fast(stack, now, SocketAddr::new(ends.1, SERVER_PORT), data)
            }
            Op::SendTo { flags, .. } | Op::SendMessage { flags, .. } => self.send(stack, now, data, *flags),
            Op::Disconnect { .. } => self.disconnect(stack),
            Op::Shutdown { how, .. } => self.shutdown(stack, *how),
            Op::SetOption { option, value, .. } => self.set_option(stack, option, value),
            Op::GetOption { option, .. } => match (option.name, self.options.send_buffer_bytes) {
                ("SO_ERROR", _) => {
                    CallResult { detail: Some(self.error.take().unwrap_or(0).into()), ..CallResult::value(0) }
                }
                // Linux doubles the value for its own overhead (`sock_setsockopt`).
                ("SO_SNDBUF", Some(bytes)) => {
                    CallResult { detail: Some((2 * i64::from(bytes)).max(4608)), ..CallResult::value(0) }
                }
                _ => fail(libc::ENOPROTOOPT),
            },
            Op::Ioctl { query, .. } => self.ioctl(stack, *query),
            _ => CallResult::value(0),
        }
    }

    fn listen(&mut self, stack: &mut Stack, backlog: i32) -> CallResult {
        let Some(address) = self.bound else { return fail(libc::EINVAL) };
        let backlog = u32::try_from(backlog).unwrap_or(4096);
        let options = ListenOptions { backlog, socket: self.options, ..ListenOptions::default() };
        match stack.listen(address, options) {
            Ok(listener) => {
                self.kind = SocketKind::Listening(listener);
                CallResult::value(0)
            }
            Err(ListenError::AddressInUse) => fail(libc::EADDRINUSE),
            Err(ListenError::AddressNotAvailable) => fail(libc::EADDRNOTAVAIL),
            Err(_) => fail(libc::ENFILE),
        }
    }

    fn connect(&mut self, stack: &mut Stack, now: Instant, remote: SocketAddr) -> CallResult {
        match self.kind {
            SocketKind::Connected(conn) => {
                let opening = matches!(stack.state(conn), Some(State::SynSent | State::SynReceived));
                return fail(if opening { libc::EALREADY } else { libc::EISCONN });
            }
            SocketKind::Closed(_) => return fail(self.error.take().unwrap_or(libc::ECONNABORTED)),
            SocketKind::Listening(_) => return fail(libc::EISCONN),
            SocketKind::Unconnected => {}
        }
        let options = ConnectOptions { local: self.bound, socket: self.options, ..ConnectOptions::default() };
        match stack.connect(now, remote, &options) {
            Ok(conn) => {
                self.kind = SocketKind::Connected(conn);
                for option in self.pending_options.drain(..) {
                    let _ = stack.set_option(conn, option);
                }
                match stack.syn_data_max(conn) {
                    Some(_) => CallResult::value(0),
                    None => fail(libc::EINPROGRESS),
                }
            }
            Err(ConnectError::NetUnreachable) => fail(libc::ENETUNREACH),
            Err(
                ConnectError::AddressInUse | ConnectError::PortsExhausted | ConnectError::AddressNotAvailable,
            ) => fail(libc::EADDRNOTAVAIL),
            Err(ConnectError::InvalidAddress) => fail(libc::EINVAL),
            Err(_) => fail(libc::ENFILE),
        }
    }

    fn disconnect(&mut self, stack: &mut Stack) -> CallResult {
        if let SocketKind::Connected(conn) = self.kind {
            let _ = stack.abort(conn);
        }
        // The addresses and the state are reset, the options stay (`tcp_disconnect`).
        let options = core::mem::take(&mut self.options);
        let was_connected = matches!(self.kind, SocketKind::Connected(_));
        let error = was_connected.then_some(libc::ECONNRESET);
        *self = Self { options, error, ..Self::new(SocketKind::Unconnected) };
        CallResult::value(0)
    }

    fn receive(&mut self, stack: &mut Stack, len: usize, flags: MsgFlags) -> CallResult {
        if flags.has(libc::MSG_OOB) {
            return self.receive_urgent(stack);
        }
        let mut buffer = vec![0; len];
        let result = match &mut self.kind {
            SocketKind::Unconnected | SocketKind::Listening(_) => return fail(libc::ENOTCONN),
            SocketKind::Connected(conn) if flags.has(libc::MSG_PEEK) => stack.peek(*conn, &mut buffer),
            SocketKind::Connected(conn) => stack.recv(*conn, &mut buffer),
            SocketKind::Closed(unread) => {
                let n = len.min(unread.len());
                buffer[..n].copy_from_slice(&unread[..n]);
                if !flags.has(libc::MSG_PEEK) {
                    unread.drain(..n);
                }
                Ok(n)
            }
        };
        match result {
            Ok(0) => match self.error.take() {
                Some(errno) => fail(errno),
                None => CallResult::value(0),
            },
            Ok(n) => {
                buffer.truncate(n);
                CallResult { data: buffer, ..CallResult::value(n as i64) }
            }
            Err(RecvError::WouldBlock) if self.shut_read => CallResult::value(0),
            Err(RecvError::WouldBlock) => fail(libc::EAGAIN),
            Err(_) => fail(libc::ENOTCONN),
        }
    }

    fn receive_urgent(&mut self, stack: &mut Stack) -> CallResult {
        let SocketKind::Connected(conn) = self.kind else { return fail(libc::EINVAL) };
        if self.oob_inline {
            return fail(libc::EINVAL);
        }
        match stack.recv_urgent(conn) {
            Ok(byte) => CallResult { data: vec![byte], ..CallResult::value(1) },
            // EAGAIN: announced and not received yet. EINVAL: no urgent byte, or read already.
            Err(_) => match stack.urgent_mark(conn) {
                Some(mark) if mark.ahead >= stack.readable(conn) => fail(libc::EAGAIN),
                _ => fail(libc::EINVAL),
            },
        }
    }

    /// `sendto` with `MSG_FASTOPEN` (`tcp_sendmsg_fastopen`).
    fn send_fast(&mut self, stack: &mut Stack, now: Instant, remote: SocketAddr, data: &[u8]) -> CallResult {
        if !stack.can_open_fast() {
            return fail(libc::EOPNOTSUPP);
        }
        let chosen = self.options.fastopen_connect;
        self.options.fastopen_connect = true;
        let connected = self.connect(stack, now, remote);
        self.options.fastopen_connect = chosen;
        match self.kind {
            SocketKind::Connected(conn) if connected.value == 0 => send_in_syn(stack, now, conn, data),
            _ => connected,
        }
    }

    fn send(&mut self, stack: &mut Stack, now: Instant, data: &[u8], flags: MsgFlags) -> CallResult {
        if let Some(errno) = self.error.take() {
            return fail(errno);
        }
        let SocketKind::Connected(conn) = self.kind else { return fail(libc::EPIPE) };
        if self.shut_write {
            return fail(libc::EPIPE);
        }
        if stack.syn_data_max(conn).is_some() {
            return send_in_syn(stack, now, conn, data);
        }
        if matches!(stack.state(conn), Some(State::SynSent | State::SynReceived)) {
            return fail(libc::EAGAIN);
        }
        // A send without bytes neither releases held data nor ends a record (`tcp_sendmsg_locked`).
        if data.is_empty() {
            return CallResult::value(0);
        }
        let more = flags.has(libc::MSG_MORE);
        if more {
            let _ = stack.set_option(conn, TcpOption::More(true));
        }
        let limit = match self.notsent_lowat {
            0 => data.len(),
            low => stack.sendable_within(conn, data.len() as u32, low, u32::MAX) as usize,
        };
        if limit == 0 {
            return fail(libc::EAGAIN);
        }
        let data = &data[..limit];
        let result =
            if flags.has(libc::MSG_OOB) { stack.send_urgent(conn, data) } else { stack.send(conn, data) };
        if self.msg_more && !more {
            let _ = stack.set_option(conn, TcpOption::More(false));
        }
        self.msg_more = more;
        if flags.has(libc::MSG_EOR) && result == Ok(data.len()) {
            stack.end_record(conn);
        }
        match result {
            Ok(0) => fail(libc::EAGAIN),
            Ok(n) => CallResult::value(n as i64),
            Err(SendError::Full) => fail(libc::EAGAIN),
            Err(_) => fail(libc::EPIPE),
        }
    }

    fn shutdown(&mut self, stack: &mut Stack, how: ShutdownHow) -> CallResult {
        let SocketKind::Connected(conn) = self.kind else { return fail(libc::ENOTCONN) };
        self.shut_read |= matches!(how, ShutdownHow::Read | ShutdownHow::Both);
        if matches!(how, ShutdownHow::Write | ShutdownHow::Both) {
            self.shut_write = true;
            let _ = stack.shutdown_write(conn);
        }
        CallResult::value(0)
    }

    fn set_option(&mut self, stack: &mut Stack, option: &SockOpt, value: &OptionValue) -> CallResult {
        let (number, on) = match value {
            OptionValue::Int(n) => (u32::try_from(*n).unwrap_or(0), *n != 0),
            OptionValue::Linger { on, seconds } => {
                self.linger = (*on != 0).then_some(u32::try_from(*seconds).unwrap_or(0));
                (0, *on != 0 && *seconds == 0)
            }
            OptionValue::Text(_) => return fail(libc::ENOPROTOOPT),
        };
        let seconds = Duration::from_secs(number.into());
        let option = match option.name {
            // The engine discovers path MTUs regardless of these options.
            "SO_REUSEADDR" | "IPV6_MTU_DISCOVER" => return CallResult::value(0),
            "SO_KEEPALIVE" => TcpOption::KeepAlive(on),
            "SO_LINGER" => TcpOption::LingerZero(on),
            "SO_OOBINLINE" => {
                self.oob_inline = on;
                TcpOption::OobInline(on)
            }
            "SO_RCVBUF" => {
                self.options.recv_buffer_bytes = Some(number);
                TcpOption::RecvBuffer(number)
            }
            "SO_SNDBUF" => {
                self.options.send_buffer_bytes = Some(number);
                TcpOption::SendBuffer(number)
            }
            // The handshake has decided on the size of a connection's segments.
            "TCP_MAXSEG" if matches!(self.kind, SocketKind::Connected(_)) => return CallResult::value(0),
            "TCP_MAXSEG" => {
                self.options.mss = u16::try_from(number).ok();
                TcpOption::MaxSegment(u16::try_from(number).unwrap_or(0))
            }
            "TCP_NOTSENT_LOWAT" => {
                self.notsent_lowat = number;
                TcpOption::NotSentLowat(number)
            }
            "SO_MAX_PACING_RATE" => TcpOption::MaxPacingRate(number.into()),
            "TCP_NODELAY" => TcpOption::NoDelay(on),
            "TCP_CORK" => TcpOption::Cork(on),
            "TCP_QUICKACK" => TcpOption::QuickAck(on),
            "TCP_KEEPIDLE" => TcpOption::KeepIdle(seconds),
            "TCP_KEEPINTVL" => TcpOption::KeepInterval(seconds),
            "TCP_KEEPCNT" => TcpOption::KeepCount(u8::try_from(number).unwrap_or(0)),
            "TCP_USER_TIMEOUT" => TcpOption::UserTimeout(Duration::from_millis(number.into())),
            "TCP_LINGER2" => TcpOption::Linger2(seconds),
            "TCP_RTO_MAX_MS" => TcpOption::RtoMax(Duration::from_millis(number.into())),
            "TCP_RTO_MIN_US" => TcpOption::RtoMin(Duration::from_micros(number.into())),
            "TCP_DELACK_MAX_US" => TcpOption::DelayedAckMax(Duration::from_micros(number.into())),
            "IP_MTU_DISCOVER" => {
                self.options.may_fragment = !matches!(number, 1 | 2);
                TcpOption::MayFragment(self.options.may_fragment)
            }
            "TCP_FASTOPEN_CONNECT" => {
                self.options.fastopen_connect = on;
                return CallResult::value(0);
            }
            "TCP_FASTOPEN_NO_COOKIE" => {
                self.options.fastopen_no_cookie = on;
                return CallResult::value(0);
            }
            "TCP_FASTOPEN" => {
                self.options.fastopen_queue = number;
                if let SocketKind::Listening(listener) = self.kind {
                    let _ = stack.set_listener_options(listener, &self.options);
                }
                return CallResult::value(0);
            }
            "TCP_DEFER_ACCEPT" => {
                self.options.defer_accept = defer_accept_timeouts(number);
                if let SocketKind::Listening(listener) = self.kind {
                    let _ = stack.set_listener_options(listener, &self.options);
                }
                return CallResult::value(0);
            }
            "IP_MINTTL" | "IPV6_MINHOPCOUNT" => match u8::try_from(number) {
                Ok(hops) => TcpOption::MinHopLimit(hops),
                Err(_) => return fail(libc::EINVAL),
            },
            _ => return fail(libc::ENOPROTOOPT),
        };
        if !option.is_valid() {
            return fail(libc::EINVAL);
        }
        match option {
            TcpOption::RtoMax(time) => self.options.rto_max = Some(time),
            TcpOption::RtoMin(time) => self.options.rto_min = Some(time),
            TcpOption::DelayedAckMax(time) => self.options.delayed_ack_max = Some(time),
            TcpOption::MinHopLimit(hops) => {
                (self.options.min_ttl, self.options.min_hop_count) = (hops, hops);
            }
            _ => {}
        }
        match self.kind {
            SocketKind::Connected(conn) => match stack.set_option(conn, option) {
                Ok(()) => CallResult::value(0),
                Err(_) => fail(libc::EINVAL),
            },
            SocketKind::Listening(listener) => match stack.set_listener_options(listener, &self.options) {
                Ok(()) => CallResult::value(0),
                Err(_) => fail(libc::EINVAL),
            },
            _ => {
                self.pending_options.push(option);
                CallResult::value(0)
            }
        }
    }

    fn ioctl(&self, stack: &Stack, query: SocketIoctl) -> CallResult {
        let detail = match (&self.kind, query) {
            (SocketKind::Connected(conn), SocketIoctl::Unread) => stack.readable(*conn) as i64,
            (SocketKind::Closed(unread), SocketIoctl::Unread) => unread.len() as i64,
            (SocketKind::Connected(conn), SocketIoctl::Unsent) => {
                stack.info(*conn).map_or(0, |i| i.notsent_bytes.into())
            }
            (SocketKind::Connected(conn), SocketIoctl::AtMark) => {
                stack.urgent_mark(*conn).is_some_and(|mark| mark.ahead == 0).into()
            }
            _ => return fail(libc::EINVAL),
        };
        CallResult { detail: Some(detail), ..CallResult::value(0) }
    }

    /// Computes the events as Linux's `tcp_poll` does.
    fn readiness(&self, stack: &Stack) -> i16 {
        let mut ready = if self.error.is_some() { libc::POLLERR } else { 0 };
        match &self.kind {
            SocketKind::Unconnected => ready |= libc::POLLOUT | libc::POLLHUP,
            SocketKind::Listening(_) if self.accept_pending > 0 => ready |= libc::POLLIN | libc::POLLRDNORM,
            SocketKind::Listening(_) => {}
            SocketKind::Closed(_) => {
                ready |= libc::POLLIN
                    | libc::POLLRDNORM
                    | libc::POLLRDHUP
                    | libc::POLLOUT
                    | libc::POLLWRNORM
                    | libc::POLLHUP;
            }
            SocketKind::Connected(conn) => {
                let state = stack.state(*conn).unwrap_or(State::Closed);
                if matches!(state, State::SynSent) {
                    // A write sends a deferred SYN (`tcp_poll`).
                    let writable = stack.syn_data_max(*conn).map_or(0, |_| libc::POLLOUT | libc::POLLWRNORM);
                    return ready | writable;
                }
                let end_of_input = self.shut_read || peer_has_closed(state);
                if end_of_input {
                    ready |= libc::POLLIN | libc::POLLRDNORM | libc::POLLRDHUP;
                }
                if end_of_input && self.shut_write {
                    ready |= libc::POLLHUP;
                }
                if stack.readable(*conn) > 0 {
                    ready |= libc::POLLIN | libc::POLLRDNORM;
                }
                if self.notsent_lowat == 0
                    || 2 * u64::from(stack.notsent(*conn)) < u64::from(self.notsent_lowat)
                {
                    ready |= libc::POLLOUT | libc::POLLWRNORM;
                }
                if stack.urgent_mark(*conn).is_some_and(|mark| mark.ready) {
                    ready |= libc::POLLPRI;
                }
            }
        }
        ready
    }
}

fn closed_info() -> Info {
    Info::from([("tcpi_state", 7)])
}

fn info(stack: &Stack, conn: Conn) -> Option<Info> {
    let i = stack.info(conn)?;
    let us = |d: Duration| i64::try_from(d.as_micros()).unwrap_or(i64::MAX);
    let ca_state = match i.ca_state {
        CaState::Open => 0,
        CaState::Disorder => 1,
        CaState::Cwr => 2,
        CaState::Recovery => 3,
        CaState::Loss => 4,
    };
    let options = i64::from(i.timestamps)
        | i64::from(i.sack) << 1
        | i64::from(i.wscale) << 2
        | i64::from(i.ecn) << 3
        | i64::from(i.syn_data) << 5;
    Some(Info::from([
        ("tcpi_state", i.state.linux_number().into()),
        ("tcpi_ca_state", ca_state),
        ("tcpi_retransmits", i.retransmits.into()),
        ("tcpi_probes", i.probes.into()),
        ("tcpi_backoff", i.backoff.into()),
        ("tcpi_options", options),
        ("tcpi_fastopen_client_fail", i.fastopen_failure as i64),
        ("tcpi_snd_wscale", i.snd_wscale.into()),
        ("tcpi_rcv_wscale", i.rcv_wscale.into()),
        ("tcpi_rto", us(i.rto)),
        ("tcpi_ato", us(i.ato)),
        ("tcpi_snd_mss", i.snd_mss.into()),
        ("tcpi_rcv_mss", i.rcv_mss.into()),
        ("tcpi_unacked", i.unacked.into()),
        ("tcpi_sacked", i.sacked.into()),
        ("tcpi_lost", i.lost.into()),
        ("tcpi_retrans", i.retrans.into()),
        ("tcpi_pmtu", i.pmtu.into()),
        ("tcpi_rtt", us(i.rtt)),
        ("tcpi_rttvar", us(i.rttvar)),
        ("tcpi_min_rtt", us(i.min_rtt)),
        ("tcpi_snd_ssthresh", i.snd_ssthresh.into()),
        ("tcpi_snd_cwnd", i.snd_cwnd.into()),
        ("tcpi_advmss", i.advmss.into()),
        ("tcpi_reordering", i.reordering.into()),
        ("tcpi_reord_seen", i.reord_seen.into()),
        ("tcpi_total_retrans", i.total_retrans.into()),
        ("tcpi_last_data_recv", us(i.last_data_recv) / 1000),
        ("tcpi_busy_time", us(i.busy_time)),
        ("tcpi_rwnd_limited", us(i.rwnd_limited)),
        ("tcpi_sndbuf_limited", us(i.sndbuf_limited)),
        ("tcpi_notsent_bytes", i.notsent_bytes.into()),
        ("tcpi_pacing_rate", i.pacing_rate.cast_signed()),
        ("tcpi_max_pacing_rate", i.max_pacing_rate.cast_signed()),
        ("tcpi_delivery_rate", i.delivery_rate.cast_signed()),
        ("tcpi_snd_wnd", i.snd_wnd.into()),
        ("tcpi_rcv_wnd", i.rcv_wnd.into()),
    ]))
}
