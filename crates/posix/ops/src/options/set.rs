//! `setsockopt`.

use super::get::own_level;
use super::timestamps::{OPT_ID, TimestampOptions};
use super::values::{congestion, defer_accept, fastopen_keys, pacing_rate};
use super::{
    ADDR_PREFERENCES, BINDTOIFINDEX, BUF_LOCK, BUFFER_MAX, BUSY_POLL_BUDGET, BoolOption, FORCED_MAX,
    INFINITE_TIMEOUT_S, LINGER2_DEFAULT, LINGER2_MAX, MAX_PACING_RATE, MINHOPCOUNT, PRIORITY_FREE_MAX,
    RCVBUF_LOCK, RCVBUF_MIN, RCVTIMEO_NEW, SNDBUF_LOCK, SNDBUF_MIN, SNDTIMEO_NEW, SocketOptionState,
    StackOption, TCP_INQ, TXREHASH, address_preferences, extension_headers, int, ports, reuseport, table,
    times, within,
};
use crate::Ops;
use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::flow_labels::FLOWLABEL_MGR;
use crate::lock::LockGuard;
use crate::sleep::Timeout;
use crate::sockaddr::Family;
use crate::unordered::{GINNEL_UNORDERED_RECV, GINNEL_UNORDERED_SEND, SOL_GINNEL};
use crate::{kernel_socket, multicast, syscall};
use core::ffi::c_int;
use core::time::Duration;
use ginnel::TcpOption;
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Bytes of `struct in6_pktinfo`.
const IN6_PKTINFO_BYTES: usize = 20;

impl Ops {
    /// Checks whether `setsockopt` looks at the value of an option at all.
    ///
    /// # Errors
    /// `ENOPROTOOPT` if the socket has no such level, or its level `IPPROTO_IP` no such option. On other
    /// levels Linux reads the value before it looks up the option.
    pub fn check_option(&self, fd: RawFd, level: c_int, name: c_int) -> Result<(), Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        let exists = match own_level(level, socket.is_udp) {
            libc::SOL_SOCKET | SOL_GINNEL => true,
            libc::IPPROTO_TCP => !socket.is_udp,
            libc::IPPROTO_UDP => socket.is_udp,
            libc::IPPROTO_IPV6 => socket.family == Family::V6,
            level => table::find(socket.family, level, name).is_some(),
        };
        if exists { Ok(()) } else { Err(Errno::NOPROTOOPT) }
    }

    /// Implements `setsockopt`.
    ///
    /// # Errors
    /// As Linux: `ENOPROTOOPT` if the option is not supported, `EINVAL`, `EDOM`, `ENODEV`, and those of the
    /// kernel for options that it checks.
    pub fn setsockopt(&self, fd: RawFd, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
        if (level, name) == (libc::IPPROTO_IPV6, FLOWLABEL_MGR) {
            return self.manage_flow_label(fd, &mut value.to_vec());
        }
        let mut state = self.lock()?;
        state.notice_announced_end();
        let file = self.file_of(&mut state, fd)?;
        let level = own_level(level, state.files.socket(file)?.is_udp);
        if (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
            // The old mark applies to data that arrived before.
            state.process_events();
        }
        if (level, name) == (libc::IPPROTO_IPV6, libc::IPV6_ADDRFORM) {
            return state.set_addrform(file, value);
        }
        if (level, name) == (libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT) {
            state.check_fastopen_connect(file, value)?;
        }
        let socket = state.files.socket(file)?;
        if socket.is_udp && multicast::is_option(socket.family, level, name) {
            return self.set_multicast(state, file, (level, name), value);
        }
        // If the library limits writes itself, the stack need not know the size of the send buffer.
        let limits_writes = state.send_buffer.is_some();
        let apply_send_buffer = |options: &mut SocketOptionState| {
            if !limits_writes {
                options.mark_set(StackOption::SendBuffer);
            }
        };
        let socket = state.files.socket(file)?;
        let (family, role, is_udp) = (socket.family, socket.role, socket.is_udp);
        let v4 = socket.child_is_v4();
        let options = &mut socket.options;
        if is_udp && level == libc::IPPROTO_TCP || !is_udp && level == libc::IPPROTO_UDP {
            return Err(Errno::NOPROTOOPT);
        }
        let begins_hold = (level, name) == (libc::IPPROTO_TCP, libc::TCP_CORK)
            && !options.flag(BoolOption::Cork)
            && int(value)? != 0;
        let old_initial = matches!(role, SocketRole::Listening(_)).then(|| options.initial_options(v4));
        let mut flag = |flag: BoolOption, option: Option<StackOption>| {
            let on = int(value)? != 0;
            options.set_flag(flag, on);
            if let Some(option) = option {
                options.mark_set(option);
            }
            Ok::<_, Errno>(())
        };
        let mut enables_ids = false;
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => flag(BoolOption::ReuseAddress, None)?,
            (libc::SOL_SOCKET, libc::SO_REUSEPORT) => {
                flag(BoolOption::ReusePort, None)?;
                // Linux remembers who created the socket. Only sharing a port needs it, so the system call is
                // made here.
                options.user = rustix::process::geteuid().as_raw();
            }
            (libc::SOL_SOCKET, libc::SO_BROADCAST) => flag(BoolOption::Broadcast, None)?,
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => {
                flag(BoolOption::KeepAlive, Some(StackOption::KeepAlive))?
            }
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => {
                flag(BoolOption::OobInline, Some(StackOption::OobInline))?
            }
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => flag(BoolOption::NoDelay, Some(StackOption::NoDelay))?,
            (libc::IPPROTO_TCP, libc::TCP_CORK) => flag(BoolOption::Cork, Some(StackOption::Cork))?,
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let seconds = int(value.get(4..8).ok_or(Errno::INVAL)?)?;
                let on = int(value)? != 0;
                options.set_linger(on, seconds);
                options.mark_set(StackOption::LingerZero);
            }
            (libc::SOL_SOCKET, libc::SO_PRIORITY) => {
                let priority = int(value)?;
                if !(0..=PRIORITY_FREE_MAX).contains(&priority) {
                    // The kernel decides whether this program may have such a priority.
                    kernel_socket::try_option(family, level, name, value)?;
                }
                options.set_priority(priority);
            }
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO | RCVTIMEO_NEW) => options.recv_timeout = timeout(value)?,
            (libc::SOL_SOCKET, libc::SO_SNDTIMEO | SNDTIMEO_NEW) => options.send_timeout = timeout(value)?,
            (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => {
                let bytes = int(value)?;
                // A negative value is the maximum, and 0 is 1.
                let bytes = u32::try_from(bytes).unwrap_or(c_int::MAX.unsigned_abs());
                options.rcvlowat = bytes.clamp(1, options.recv_buffer / 2);
            }
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => {
                options.recv_buffer = doubled(int(value)?, RCVBUF_MIN, BUFFER_MAX);
                options.buf_lock |= RCVBUF_LOCK;
                options.mark_set(StackOption::RecvBuffer);
            }
            (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE) => {
                options.recv_buffer = doubled(int(value)?.max(0), RCVBUF_MIN, FORCED_MAX);
                options.buf_lock |= RCVBUF_LOCK;
                options.mark_set(StackOption::RecvBuffer);
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => {
                options.send_buffer = doubled(int(value)?, SNDBUF_MIN, BUFFER_MAX);
                options.buf_lock |= SNDBUF_LOCK;
                apply_send_buffer(options);
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE) => {
                options.send_buffer = doubled(int(value)?.max(0), SNDBUF_MIN, FORCED_MAX);
                options.buf_lock |= SNDBUF_LOCK;
                apply_send_buffer(options);
            }
            (libc::SOL_SOCKET, libc::SO_TXTIME) => options.set_txtime(family, value)?,
            (libc::SOL_SOCKET, MAX_PACING_RATE) => {
                options.max_pacing_rate = pacing_rate(value)?;
                options.mark_set(StackOption::MaxPacingRate);
            }
            (libc::SOL_SOCKET, name) if TimestampOptions::is_timestamp(name) => {
                options.timestamps.set(name, int(value)? != 0);
                options.mark_set(StackOption::ArrivalTimes);
            }
            (libc::SOL_SOCKET, name) if TimestampOptions::is_timestamping(name) => {
                let has_ids = is_udp || matches!(role, SocketRole::Stream(_));
                let had_ids = options.timestamps.has(OPT_ID);
                options.timestamps.set_flags(name, value, has_ids)?;
                enables_ids = !had_ids && options.timestamps.has(OPT_ID);
                options.mark_set(StackOption::ArrivalTimes);
            }
            (libc::SOL_SOCKET, BUF_LOCK) => {
                let locks = int(value)?;
                options.buf_lock =
                    u8::try_from(locks).ok().filter(|locks| *locks <= 3).ok_or(Errno::INVAL)?;
                // A fixed buffer keeps its current size.
                for (lock, option) in
                    [(RCVBUF_LOCK, StackOption::RecvBuffer), (SNDBUF_LOCK, StackOption::SendBuffer)]
                {
                    if options.buf_lock & lock != 0 && (lock == RCVBUF_LOCK || !limits_writes) {
                        options.mark_set(option);
                    }
                }
            }
            (libc::IPPROTO_IP, ports::LOCAL_PORT_RANGE) => options.port_range = ports::read(value)?,
            (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP) => {
                options.window_clamp = match int(value)? {
                    0 if matches!(role, SocketRole::Unconnected { .. }) => 0,
                    0 => return Err(Errno::INVAL),
                    bytes => u32::try_from(bytes).unwrap_or(0).max(RCVBUF_MIN / 2),
                };
                options.mark_set(StackOption::RecvBuffer);
            }
            (libc::IPPROTO_TCP, TCP_INQ) => {
                let on = within(value, 0..=1)? != 0;
                options.set_flag(BoolOption::Inq, on);
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => {
                options.keep_idle_s = within(value, 1..=32_767)? as u16;
                options.mark_set(StackOption::KeepIdle);
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => {
                options.keep_interval_s = within(value, 1..=32_767)? as u16;
                options.mark_set(StackOption::KeepInterval);
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => {
                options.keep_count = within(value, 1..=127)? as u8;
                options.mark_set(StackOption::KeepCount);
            }
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT) => {
                options.user_timeout_ms = within(value, 0..=c_int::MAX)?.unsigned_abs();
                options.mark_set(StackOption::UserTimeout);
            }
            (libc::IPPROTO_TCP, libc::TCP_LINGER2) => {
                options.linger2_s = match int(value)? {
                    0 => LINGER2_DEFAULT,
                    seconds if seconds < 0 => -1,
                    seconds => seconds.min(LINGER2_MAX),
                };
                options.mark_set(StackOption::Linger2);
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => {
                options.max_segment = match int(value)? {
                    0 => 0,
                    _ => within(value, 88..=32_767)? as u16,
                };
                // The handshake has decided on the size of a connection's segments.
                if options.max_segment > 0 && !matches!(role, SocketRole::Stream(_)) {
                    options.mark_set(StackOption::MaxSegment);
                }
            }
            (libc::IPPROTO_TCP, libc::TCP_SYNCNT) => {
                options.syn_count = within(value, 1..=127)? as u8;
                options.mark_set(StackOption::SynCount);
            }
            (libc::IPPROTO_TCP, name) if let Some(time) = times::find(name) => {
                options.set_time(time, value)?
            }
            (libc::IPPROTO_TCP, libc::TCP_SAVE_SYN) => options.set_save_syn(value)?,
            (libc::IPPROTO_IP, libc::IP_MINTTL) => options.set_min_ttl(true, value)?,
            (libc::IPPROTO_IPV6, MINHOPCOUNT) if family == Family::V6 => {
                options.set_min_ttl(false, value)?;
            }
            (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT) => {
                options.defer_accept_s = defer_accept::seconds(int(value)?);
            }
            (libc::IPPROTO_TCP, libc::TCP_FASTOPEN_KEY) => options.fastopen_keys = fastopen_keys(value)?,
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
                options.congestion = Some(congestion(value)?);
                options.mark_set(StackOption::Congestion);
            }
            (libc::IPPROTO_TCP, libc::TCP_ULP) => {
                // Upper-layer protocols would be kernel modules.
                return Err(if value.is_empty() { Errno::INVAL } else { Errno::NOENT });
            }
            (libc::IPPROTO_IP, libc::IP_TOS) => options.set_tos(level, value, is_udp)?,
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) if family == Family::V6 => {
                options.set_tos(level, value, is_udp)?;
            }
            (libc::IPPROTO_IP, libc::IP_TTL) => options.set_ttl(level, value)?,
            (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS) if family == Family::V6 => {
                options.set_ttl(level, value)?;
            }
            (libc::IPPROTO_TCP, libc::TCP_QUICKACK) => {
                let on = int(value)? != 0;
                options.quick_ack = on;
                if let SocketRole::Stream(stream) = role {
                    let result = state.set_stack_option(stream.conn, TcpOption::QuickAck(on));
                    state.client.flush();
                    state.publish_shared(file);
                    return result;
                }
            }
            (SOL_GINNEL, GINNEL_UNORDERED_RECV) if !is_udp => {
                flag(BoolOption::UnorderedReceive, Some(StackOption::Unordered))?
            }
            (SOL_GINNEL, GINNEL_UNORDERED_SEND) if !is_udp => flag(BoolOption::UnorderedSend, None)?,
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) if family == Family::V6 => {
                if !matches!(role, SocketRole::Unconnected { bound: None }) {
                    return Err(Errno::INVAL);
                }
                flag(BoolOption::V6Only, None)?;
            }
            (libc::IPPROTO_TCP, libc::TCP_FASTOPEN | libc::TCP_FASTOPEN_NO_COOKIE)
                if matches!(role, SocketRole::Stream(_)) =>
            {
                return Err(Errno::INVAL);
            }
            (libc::SOL_SOCKET, BUSY_POLL_BUDGET) => {
                // The kernel decides whether this program may have such a budget, and refuses wrong ones.
                kernel_socket::try_option(family, level, name, value)?;
            }
            (libc::SOL_SOCKET, TXREHASH) if is_udp => {
                int(value)?;
                return Err(Errno::OPNOTSUPP);
            }
            (libc::IPPROTO_IPV6, name) if family == Family::V6 && extension_headers::is_option(name) => {
                extension_headers::check(value)?;
            }
            (libc::IPPROTO_IPV6, ADDR_PREFERENCES) if family == Family::V6 => {
                let preferences = address_preferences::read(int(value)?)?;
                options.ints.set(address_preferences::NAME, preferences);
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) if family == Family::V6 => {
                if value.len() < IN6_PKTINFO_BYTES {
                    return Err(Errno::INVAL);
                }
            }
            (libc::SOL_SOCKET, libc::SO_BINDTODEVICE | BINDTOIFINDEX) => {
                return self.bind_to_device(state, fd, file, name, value);
            }
            (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER | libc::SO_DETACH_FILTER) => {
                return state.change_filter(file, name == libc::SO_ATTACH_FILTER, value);
            }
            (libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF | reuseport::DETACH_REUSEPORT_BPF) => {
                return state.change_group_program(file, name == libc::SO_ATTACH_REUSEPORT_CBPF, value);
            }
            _ => options.set_int(family, level, name, value)?,
        }
        if options.link_priority() != 0 {
            state.begin_priorities();
        }
        if enables_ids {
            state.restart_stamp_ids(file);
        }
        // The kernel does not know Ginnel's own options.
        if matches!(role, SocketRole::Unconnected { .. }) && level != SOL_GINNEL {
            let log = &mut state.files.socket(file)?.options.settings_log;
            log.retain(|(l, n, _)| (*l, *n) != (level, name));
            log.push((level, name, value.into()));
        }
        if level == libc::IPPROTO_UDP || is_udp && (level, name) == (libc::SOL_SOCKET, libc::SO_PEEK_OFF) {
            let socket = state.files.socket(file)?;
            let udp_send = socket.udp_send.get_or_insert_default();
            socket.options.apply_to_udp_send(family, udp_send);
            if (level, name) == (libc::IPPROTO_UDP, libc::UDP_CORK)
                && !udp_send.corking
                && udp_send.corked.is_some()
            {
                // The result of sending is not reported.
                state.publish_shared(file);
                let _ = self.send_corked(state, file, Timeout::Zero);
                return Ok(());
            }
        }
        if let SocketRole::Udp(udp) = role {
            if let Some(kernel_fd) = udp.kernel_fd {
                // If the kernel does not accept the option, it has no use for it.
                let _ = syscall::setsockopt(kernel_fd, level, name, value);
            }
            let applied = state.apply_datagram_options(file);
            state.publish_shared(file);
            return applied;
        }
        if (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
            // Enough data may have arrived already (`tcp_set_rcvlowat`).
            if state.status(file).is_some_and(|(_, status)| status.readable > 0 || status.state.has_fin()) {
                state.data_ready(file);
            }
        }
        if let SocketRole::Stream(stream) = role
            && begins_hold
            && !stream.msg_more
        {
            // A connection that is over holds nothing back.
            let _ = state.client.begin_hold(stream.conn);
        }
        let applied = match (role, old_initial) {
            (SocketRole::Listening(listening), Some(old_initial)) => {
                state.update_listener_options(file, listening.number, &old_initial)
            }
            _ => state.apply_options(file),
        };
        state.publish_shared(file);
        applied
    }
}

impl Ops {
    /// Implements `SO_BINDTODEVICE` and `SO_BINDTOIFINDEX`. Only kernel devices have names here, so a socket
    /// that is bound to one becomes a kernel socket.
    fn bind_to_device(
        &self,
        mut state: LockGuard<'_>,
        fd: RawFd,
        file: FileId,
        name: c_int,
        value: &[u8],
    ) -> Result<(), Errno> {
        let none = match name {
            BINDTOIFINDEX => match int(value)? {
                index if index < 0 => return Err(Errno::INVAL),
                index => index == 0,
            },
            _ => value.first().is_none_or(|byte| *byte == 0),
        };
        if none {
            return Ok(());
        }
        let is_unbound = matches!(state.files.socket(file)?.role, SocketRole::Unconnected { bound: None });
        if !is_unbound || !self.config.kernel_listen {
            return Err(Errno::NODEV);
        }
        kernel_socket::try_option(state.files.socket(file)?.family, libc::SOL_SOCKET, name, value)?;
        self.convert_to_kernel(&mut state, fd, file)?;
        drop(state);
        syscall::setsockopt(fd, libc::SOL_SOCKET, name, value)
    }
}

/// Parses `struct timeval`; `None` is infinite (`sock_set_timeout`). `EDOM` if the microseconds are out of
/// range.
fn timeout(value: &[u8]) -> Result<Option<Duration>, Errno> {
    let bytes = value.get(..16).ok_or(Errno::INVAL)?;
    let word = |at: usize| i64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let (seconds, micros) = (word(0), word(8));
    if !(0..1_000_000).contains(&micros) {
        return Err(Errno::DOM);
    }
    if seconds < 0 {
        // A negative time does not wait at all.
        return Ok(Some(Duration::ZERO));
    }
    if seconds == 0 && micros == 0 || seconds >= INFINITE_TIMEOUT_S {
        return Ok(None);
    }
    Ok(Some(Duration::new(seconds.unsigned_abs(), micros as u32 * 1000)))
}

/// Returns twice the requested size in bytes, within `min` and twice `max`. Linux doubles sizes because it
/// needs half of a buffer for its own overhead, and programs rely on reading back twice the value.
fn doubled(requested: c_int, min: u32, max: u32) -> u32 {
    // Linux compares sizes as unsigned, so negative values are the maximum.
    let requested = u32::try_from(requested).unwrap_or(u32::MAX).min(max);
    (requested * 2).max(min)
}
