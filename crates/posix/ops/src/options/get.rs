//! `getsockopt`.

use super::timestamps::TimestampOptions;
use super::values::{cc_info, congestion_name, fastopen_key_bytes, pacing_rate_value};
use super::{
    ADDR_PREFERENCES, BINDTOIFINDEX, BUF_LOCK, BoolOption, IP_PROTOCOL, IPV6_PATHMTU, MAX_PACING_RATE,
    MINHOPCOUNT, NETNS_COOKIE, ORIGINAL_DST, RCVTIMEO_NEW, SNDBUF_GROWN_MAX, SNDTIMEO_NEW, TCP_INQ,
    TTL_DEFAULT, TXREHASH, address_preferences, extension_headers, int_options, ports, tcp_info, times,
};
use crate::Ops;
use crate::file::SocketRole;
use crate::flow_labels::{FLOWLABEL_MGR, REQUEST_BYTES};
use crate::kernel_socket;
use crate::sockaddr::Family;
use crate::unordered::{GINNEL_UNORDERED_RECV, GINNEL_UNORDERED_SEND, SOL_GINNEL};
use core::ffi::c_int;
use core::time::Duration;
use rustix::fd::RawFd;
use rustix::io::Errno;

/// The value of an option, as `getsockopt` returns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionValue {
    bytes: Vec<u8>,
    /// True if a smaller buffer gets nothing rather than a prefix.
    is_indivisible: bool,
    /// The length that is reported, if it does not count bytes. The buffer then has room for the value.
    count: Option<usize>,
}

impl OptionValue {
    /// Returns the value as bytes. A smaller buffer gets a prefix or nothing, see [`fits`](Self::fits).
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Checks whether the value may be copied into `space` bytes. If not, `getsockopt` still reports the
    /// length that it needs.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn fits(&self, space: usize) -> Result<(), Errno> {
        if self.is_indivisible && space < self.bytes.len() { Err(Errno::INVAL) } else { Ok(()) }
    }

    /// Returns a value that must not be truncated.
    pub(super) fn indivisible(bytes: Vec<u8>) -> Self {
        Self { bytes, is_indivisible: true, count: None }
    }

    pub(crate) fn truncatable(bytes: Vec<u8>) -> Self {
        Self { bytes, is_indivisible: false, count: None }
    }

    /// Returns a value that fits into the buffer and whose length is reported in other units.
    pub(super) fn counted(bytes: Vec<u8>, count: usize) -> Self {
        Self { bytes, is_indivisible: true, count: Some(count) }
    }

    /// Returns the length to report, if it does not count bytes.
    pub fn count(&self) -> Option<usize> {
        self.count
    }

    pub(crate) fn int(value: c_int) -> Self {
        Self::truncatable(value.to_ne_bytes().to_vec())
    }

    fn ints(values: &[i64]) -> Self {
        Self::truncatable(values.iter().flat_map(|v| v.to_ne_bytes()).collect())
    }
}

impl Ops {
    /// Implements `getsockopt` with a length that is negative.
    ///
    /// # Errors
    /// `EINVAL`, or that of a level that the socket does not have. The level of IPv6 compares lengths as
    /// unsigned, so there the length is the largest.
    pub fn getsockopt_without_length(
        &self,
        fd: RawFd,
        level: c_int,
        name: c_int,
    ) -> Result<OptionValue, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        let (family, is_udp) = (socket.family, socket.is_udp);
        drop(state);
        match own_level(level, is_udp) {
            libc::IPPROTO_IPV6 if family == Family::V6 => {
                self.getsockopt(fd, level, name, c_int::MAX as usize)
            }
            libc::IPPROTO_TCP if !is_udp => Err(Errno::INVAL),
            libc::IPPROTO_UDP if is_udp => Err(Errno::INVAL),
            libc::SOL_SOCKET | libc::IPPROTO_IP => Err(Errno::INVAL),
            _ => Err(int_options::wrong_protocol_errno(family)),
        }
    }

    /// Implements `getsockopt` with a buffer of `space` bytes.
    ///
    /// # Errors
    /// As Linux: `ENOPROTOOPT` or `EOPNOTSUPP` if the option is not supported, `ENOTCONN`, `EINVAL`.
    pub fn getsockopt(
        &self,
        fd: RawFd,
        level: c_int,
        name: c_int,
        space: usize,
    ) -> Result<OptionValue, Errno> {
        if (level, name) == (libc::IPPROTO_IPV6, FLOWLABEL_MGR) {
            return self.flow_label(fd, &[0; REQUEST_BYTES][..space.min(REQUEST_BYTES)]);
        }
        let mut state = self.lock()?;
        state.notice_announced_end();
        let file = self.file_of(&mut state, fd)?;
        state.socket_state(file);
        let socket = state.files.socket(file)?;
        let (family, role, is_udp) = (socket.family, socket.role, socket.is_udp);
        let level = own_level(level, is_udp);
        if is_udp && level == libc::IPPROTO_TCP || !is_udp && level == libc::IPPROTO_UDP {
            return Err(int_options::wrong_protocol_errno(family));
        }
        let options = socket.options.clone();
        let flag = |flag| OptionValue::int(options.flag(flag).into());
        let time = |time: Option<Duration>| {
            let time = time.unwrap_or_default();
            OptionValue::ints(&[time.as_secs().cast_signed(), time.subsec_micros().into()])
        };
        let number = |value: u32| OptionValue::int(value.cast_signed());
        let multicast = options.multicast.value(family, level, name).filter(|_| is_udp);
        let value = match (level, name) {
            _ if let Some(value) = multicast => value,
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => flag(BoolOption::ReuseAddress),
            (libc::SOL_SOCKET, libc::SO_REUSEPORT) => flag(BoolOption::ReusePort),
            (libc::SOL_SOCKET, libc::SO_BROADCAST) => flag(BoolOption::Broadcast),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => flag(BoolOption::KeepAlive),
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => flag(BoolOption::OobInline),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => flag(BoolOption::NoDelay),
            (libc::IPPROTO_TCP, libc::TCP_CORK) => flag(BoolOption::Cork),
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) if family == Family::V6 => flag(BoolOption::V6Only),
            (libc::SOL_SOCKET, libc::SO_TYPE) if is_udp => OptionValue::int(libc::SOCK_DGRAM),
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) if is_udp => OptionValue::int(libc::IPPROTO_UDP),
            (libc::SOL_SOCKET, libc::SO_TYPE) => OptionValue::int(libc::SOCK_STREAM),
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) => OptionValue::int(libc::IPPROTO_TCP),
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => OptionValue::int(family.sa_family().into()),
            (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
                OptionValue::int(matches!(role, SocketRole::Listening(_)).into())
            }
            (libc::SOL_SOCKET, libc::SO_ERROR) => {
                let error = state.take_udp_error(file).or_else(|| state.take_error(file));
                OptionValue::int(error.map_or(0, Errno::raw_os_error))
            }
            (libc::SOL_SOCKET, libc::SO_PRIORITY) => OptionValue::int(options.priority),
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let seconds = options.ints.get("SO_LINGER").unwrap_or(0);
                let on = c_int::from(options.linger.is_some());
                OptionValue::truncatable([on.to_ne_bytes(), seconds.to_ne_bytes()].concat())
            }
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO | RCVTIMEO_NEW) => time(options.recv_timeout),
            (libc::SOL_SOCKET, libc::SO_SNDTIMEO | SNDTIMEO_NEW) => time(options.send_timeout),
            (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => number(options.rcvlowat),
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => number(options.recv_buffer),
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => match state.info(file) {
                Some(info) if !is_udp && state.send_buffer.is_none() => {
                    number(state.files.socket(file)?.options.grow_send_buffer(&info, SNDBUF_GROWN_MAX, true))
                }
                _ => number(options.send_buffer),
            },
            (libc::SOL_SOCKET, name) if TimestampOptions::is_timestamp(name) => {
                OptionValue::int(options.timestamps.get(name).into())
            }
            (libc::SOL_SOCKET, name) if TimestampOptions::is_timestamping(name) => {
                OptionValue::truncatable(options.timestamps.flags(name))
            }
            (libc::SOL_SOCKET, BUF_LOCK) => number(options.buf_lock.into()),
            (libc::IPPROTO_IP, ports::LOCAL_PORT_RANGE) => number(options.port_range),
            (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP) => number(match (options.window_clamp, role) {
                (0, SocketRole::Stream(_)) => options.window_bytes(),
                (clamp, _) => clamp,
            }),
            (libc::IPPROTO_TCP, TCP_INQ) => flag(BoolOption::Inq),
            (SOL_GINNEL, GINNEL_UNORDERED_RECV) if !is_udp => flag(BoolOption::UnorderedReceive),
            (SOL_GINNEL, GINNEL_UNORDERED_SEND) if !is_udp => flag(BoolOption::UnorderedSend),
            (libc::IPPROTO_TCP, libc::TCP_CC_INFO) => {
                let info = state.info(file);
                let kind = options.congestion.or(info.as_ref().map(|info| info.congestion));
                cc_info(kind.unwrap_or(self.config.congestion_control), info.as_deref())
            }
            (libc::SOL_SOCKET, libc::SO_TXTIME) => OptionValue::truncatable(options.txtime_value().to_vec()),
            (libc::SOL_SOCKET, MAX_PACING_RATE) => pacing_rate_value(options.max_pacing_rate, space),
            (libc::IPPROTO_IPV6, IPV6_PATHMTU) if family == Family::V6 => {
                // `struct ip6_mtuinfo`: an empty address, and the MTU.
                if space < IP6_MTUINFO_BYTES {
                    return Err(Errno::INVAL);
                }
                let mtu = state.path_mtu(file)?;
                OptionValue::truncatable([&[0; 28][..], &mtu.to_ne_bytes()].concat())
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => number(options.keep_idle_s.into()),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => number(options.keep_interval_s.into()),
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => number(options.keep_count.into()),
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT) => number(options.user_timeout_ms),
            (libc::IPPROTO_TCP, libc::TCP_LINGER2) => OptionValue::int(options.linger2_s),
            (libc::IPPROTO_TCP, libc::TCP_SYNCNT) => number(options.syn_count.into()),
            (libc::IPPROTO_TCP, name) if let Some(time) = times::find(name) => options.time_value(time),
            (libc::IPPROTO_TCP, libc::TCP_SAVE_SYN) => OptionValue::int(options.save_syn() as c_int),
            (libc::IPPROTO_TCP, libc::TCP_SAVED_SYN) => state.saved_syn(file, space)?,
            (libc::IPPROTO_IP, libc::IP_MINTTL) => number(options.min_ttl(true).into()),
            (libc::IPPROTO_IPV6, MINHOPCOUNT) if family == Family::V6 => {
                number(options.min_ttl(false).into())
            }
            (libc::IPPROTO_TCP, libc::TCP_FASTOPEN_KEY) => {
                OptionValue::truncatable(fastopen_key_bytes(options.fastopen_keys))
            }
            (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT) => number(options.defer_accept_s),
            (libc::IPPROTO_TCP, libc::TCP_QUICKACK) => OptionValue::int(options.quick_ack.into()),
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
                let kind = options.congestion.or_else(|| state.info(file).map(|info| info.congestion));
                congestion_name(kind.unwrap_or(self.config.congestion_control))
            }
            (libc::IPPROTO_TCP, libc::TCP_ULP) => OptionValue::truncatable(Vec::new()),
            (libc::IPPROTO_IP, libc::IP_TOS) => number(options.tos.into()),
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) if family == Family::V6 => number(options.tclass.into()),
            (libc::IPPROTO_IP, libc::IP_TTL) => number(ttl_or_default(options.ttl)),
            (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS) if family == Family::V6 => {
                number(ttl_or_default(options.unicast_hops))
            }
            (libc::IPPROTO_IP, libc::IP_MTU) => number(state.path_mtu(file)?),
            (libc::IPPROTO_IPV6, libc::IPV6_MTU) if family == Family::V6 => number(state.path_mtu(file)?),
            (libc::IPPROTO_IPV6, libc::IPV6_ADDRFORM) if family == Family::V6 => {
                state.peer_of(file).ok_or(Errno::NOTCONN)?;
                OptionValue::int(libc::AF_INET6)
            }
            (libc::SOL_SOCKET, libc::SO_BINDTODEVICE) => OptionValue::truncatable(Vec::new()),
            (libc::SOL_SOCKET, BINDTOIFINDEX) => OptionValue::int(0),
            // `struct ucred` without a peer process.
            (libc::SOL_SOCKET, libc::SO_PEERCRED) => {
                OptionValue::truncatable([0, -1, -1].map(i32::to_ne_bytes).concat())
            }
            (libc::SOL_SOCKET, libc::SO_PEERNAME) => {
                drop(state);
                let name = self.getpeername(fd)?;
                // Linux does not accept a longer buffer (`sk_getsockopt`).
                return match space > name.bytes().len() {
                    true => Err(Errno::INVAL),
                    false => Ok(OptionValue::truncatable(name.bytes().to_vec())),
                };
            }
            // Linux returns the local port (`inet_num`).
            (libc::IPPROTO_IP, IP_PROTOCOL) => {
                drop(state);
                OptionValue::int(self.getsockname(fd)?.port().into())
            }
            // Only new sockets of IPv4 have the option set (`inet_create`).
            (libc::IPPROTO_IP, libc::IP_MULTICAST_ALL) if family == Family::V6 => {
                OptionValue::int(options.ints.get("IP_MULTICAST_ALL").unwrap_or(0))
            }
            (libc::SOL_SOCKET, TXREHASH) if is_udp => return Err(Errno::OPNOTSUPP),
            (libc::IPPROTO_IP, ORIGINAL_DST) if is_udp => return Err(Errno::NOPROTOOPT),
            (libc::IPPROTO_IPV6, ORIGINAL_DST) if is_udp && family == Family::V6 => {
                return Err(Errno::NOPROTOOPT);
            }
            (libc::IPPROTO_IPV6, name) if family == Family::V6 && extension_headers::is_option(name) => {
                OptionValue::truncatable(Vec::new())
            }
            (libc::IPPROTO_IPV6, ADDR_PREFERENCES) if family == Family::V6 => {
                OptionValue::int(address_preferences::reported(options.ints.get(address_preferences::NAME)))
            }
            (libc::SOL_SOCKET, libc::SO_GET_FILTER) => return state.get_filter(file, space),
            (libc::SOL_SOCKET, libc::SO_MEMINFO) => OptionValue::truncatable(options.meminfo()),
            (libc::SOL_SOCKET, libc::SO_COOKIE) if space < size_of::<u64>() => return Err(Errno::INVAL),
            (libc::SOL_SOCKET, libc::SO_COOKIE) => {
                OptionValue::truncatable(state.cookie(file).to_ne_bytes().to_vec())
            }
            (libc::SOL_SOCKET, NETNS_COOKIE) if space != size_of::<u64>() => return Err(Errno::INVAL),
            (libc::SOL_SOCKET, NETNS_COOKIE) => {
                OptionValue::truncatable(kernel_socket::netns_cookie()?.to_vec())
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => match state.info(file) {
                Some(info) => number(info.snd_mss),
                None if options.max_segment > 0 => number(options.max_segment.into()),
                None => number(MSS_DEFAULT),
            },
            (libc::IPPROTO_TCP, libc::TCP_INFO) => {
                let is_listening = matches!(role, SocketRole::Listening(_));
                let transferred = state.transferred(file);
                OptionValue::truncatable(tcp_info::bytes(
                    state.info(file).as_deref(),
                    transferred,
                    is_listening,
                    options.max_pacing_rate,
                ))
            }
            _ => options.get_int(family, level, name)?,
        };
        // `do_ip_getsockopt` returns a byte to a program with less space than an integer.
        let is_byte = level == libc::IPPROTO_IP && value.bytes.len() == 4 && (1..4).contains(&space);
        Ok(match value.bytes[..] {
            [byte, 0, 0, 0] if is_byte && name != libc::IP_MULTICAST_IF => {
                OptionValue::truncatable(vec![byte])
            }
            _ => value,
        })
    }
}

/// Returns the level that a socket looks its options up on: those of UDP-Lite are UDP's
/// (`udp_getsockopt`).
pub(super) fn own_level(level: c_int, is_udp: bool) -> c_int {
    if is_udp && level == libc::IPPROTO_UDPLITE { libc::IPPROTO_UDP } else { level }
}

/// Bytes of `struct ip6_mtuinfo`.
const IP6_MTUINFO_BYTES: usize = 32;

/// Value of `TCP_MAXSEG` without a connection (`TCP_MSS_DEFAULT`).
const MSS_DEFAULT: u32 = 536;

fn ttl_or_default(hops: i16) -> u32 {
    u32::try_from(hops).unwrap_or(TTL_DEFAULT)
}
