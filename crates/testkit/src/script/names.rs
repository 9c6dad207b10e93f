//! C names in scripts and their values.

use core::fmt;

/// An error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

macro_rules! errno_names {
    ($($name:ident)*) => {
        const ERRNO_NAMES: &[(&str, i32)] = &[$((stringify!($name), libc::$name)),*];
    };
}

errno_names! {
    EAGAIN EINPROGRESS EALREADY EISCONN ENOTCONN ECONNREFUSED ECONNRESET ECONNABORTED ETIMEDOUT EPIPE EINVAL EBADF
    EADDRINUSE EADDRNOTAVAIL EHOSTUNREACH ENETUNREACH ENOPROTOOPT EPROTO EMSGSIZE EOPNOTSUPP ENOTSOCK EINTR EACCES EPERM
    ENOBUFS ENOMEM EDESTADDRREQ EAFNOSUPPORT EFAULT ENODEV ENFILE EDOM EHOSTDOWN ENONET
}

impl Errno {
    /// Returns the error with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = if name == "EWOULDBLOCK" { "EAGAIN" } else { name };
        ERRNO_NAMES.iter().find(|(n, _)| *n == name).map(|(_, number)| Self(*number))
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match ERRNO_NAMES.iter().find(|(_, number)| *number == self.0) {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "errno {}", self.0),
        }
    }
}

/// A socket option with its level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SockOpt {
    /// Name of the level.
    pub level: &'static str,
    /// Name of the option.
    pub name: &'static str,
    /// Number of the level.
    pub level_number: i32,
    /// Number of the option.
    pub number: i32,
}

/// libc's constants, and those that libc lacks.
mod numbers {
    pub use libc::*;
    pub const TCP_RTO_MAX_MS: i32 = 44;
    pub const TCP_RTO_MIN_US: i32 = 45;
    pub const TCP_DELACK_MAX_US: i32 = 46;
    pub const IPV6_MINHOPCOUNT: i32 = 73;
}

macro_rules! options {
    ($($level:ident $number:ident: $($name:ident)*;)*) => {
        const OPTIONS: &[SockOpt] = &[$($(SockOpt {
            level: stringify!($level), name: stringify!($name), level_number: libc::$number, number: numbers::$name,
        }),*),*];
    };
}

options! {
    SOL_SOCKET SOL_SOCKET: SO_REUSEADDR SO_KEEPALIVE SO_LINGER SO_RCVBUF SO_SNDBUF SO_OOBINLINE SO_ERROR SO_RCVLOWAT SO_RCVTIMEO
        SO_SNDTIMEO SO_ACCEPTCONN SO_TYPE SO_BROADCAST SO_REUSEPORT
        SO_MAX_PACING_RATE;
    SOL_TCP IPPROTO_TCP: TCP_NODELAY TCP_MAXSEG TCP_CORK TCP_KEEPIDLE TCP_KEEPINTVL TCP_KEEPCNT TCP_SYNCNT TCP_LINGER2
        TCP_DEFER_ACCEPT TCP_WINDOW_CLAMP TCP_QUICKACK TCP_CONGESTION TCP_USER_TIMEOUT TCP_NOTSENT_LOWAT
        TCP_RTO_MAX_MS TCP_RTO_MIN_US TCP_DELACK_MAX_US TCP_FASTOPEN TCP_FASTOPEN_CONNECT TCP_FASTOPEN_NO_COOKIE;
    IPPROTO_IP IPPROTO_IP: IP_TOS IP_TTL IP_MTU_DISCOVER IP_MTU IP_RECVERR IP_MINTTL;
    IPPROTO_IPV6 IPPROTO_IPV6: IPV6_TCLASS IPV6_UNICAST_HOPS IPV6_MTU_DISCOVER IPV6_MTU IPV6_RECVERR IPV6_MINHOPCOUNT;
}

impl SockOpt {
    /// Returns the option with these names.
    pub fn from_names(level: &str, name: &str) -> Option<Self> {
        let level = match level {
            "IPPROTO_TCP" => "SOL_TCP",
            "SOL_IP" => "IPPROTO_IP",
            "SOL_IPV6" => "IPPROTO_IPV6",
            other => other,
        };
        OPTIONS.iter().find(|o| o.level == level && o.name == name).copied()
    }
}

/// Flags of `recv` and `send`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsgFlags(pub i32);

impl MsgFlags {
    const NAMES: [(&'static str, i32); 9] = [
        ("MSG_OOB", libc::MSG_OOB),
        ("MSG_PEEK", libc::MSG_PEEK),
        ("MSG_DONTWAIT", libc::MSG_DONTWAIT),
        ("MSG_NOSIGNAL", libc::MSG_NOSIGNAL),
        ("MSG_MORE", libc::MSG_MORE),
        ("MSG_TRUNC", libc::MSG_TRUNC),
        ("MSG_WAITALL", libc::MSG_WAITALL),
        ("MSG_EOR", libc::MSG_EOR),
        ("MSG_FASTOPEN", libc::MSG_FASTOPEN),
    ];

    /// Returns the flag with this name.
    pub fn from_name(name: &str) -> Option<i32> {
        Self::NAMES.iter().find(|(n, _)| *n == name).map(|(_, bit)| *bit)
    }

    /// Returns whether all bits of `flag` are set.
    pub fn has(self, flag: i32) -> bool {
        self.0 & flag == flag
    }
}

/// Events of `poll`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PollEvents(pub i16);

impl PollEvents {
    const NAMES: [(&'static str, i16); 9] = [
        ("POLLIN", libc::POLLIN),
        ("POLLPRI", libc::POLLPRI),
        ("POLLOUT", libc::POLLOUT),
        ("POLLERR", libc::POLLERR),
        ("POLLHUP", libc::POLLHUP),
        ("POLLNVAL", libc::POLLNVAL),
        ("POLLRDNORM", libc::POLLRDNORM),
        ("POLLWRNORM", libc::POLLWRNORM),
        ("POLLRDHUP", libc::POLLRDHUP),
    ];

    /// Returns the event with this name.
    pub fn from_name(name: &str) -> Option<i16> {
        Self::NAMES.iter().find(|(n, _)| *n == name).map(|(_, bit)| *bit)
    }
}

impl fmt::Display for PollEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("0");
        }
        let set = Self::NAMES.iter().filter(|(_, bit)| self.0 & bit != 0).map(|(name, _)| *name);
        f.write_str(&set.collect::<Vec<_>>().join("|"))
    }
}

/// Direction of `shutdown`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownHow {
    /// `SHUT_RD`.
    Read,
    /// `SHUT_WR`.
    Write,
    /// `SHUT_RDWR`.
    Both,
}

/// Requests of `ioctl` on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketIoctl {
    /// `SIOCINQ` (`FIONREAD`): number of unread bytes.
    Unread,
    /// `SIOCOUTQ`: number of unacknowledged bytes.
    Unacknowledged,
    /// `SIOCOUTQNSD`: number of unsent bytes.
    Unsent,
    /// `SIOCATMARK`: whether the next byte is the urgent byte.
    AtMark,
}

impl SocketIoctl {
    /// Returns the request with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "SIOCINQ" | "FIONREAD" => Self::Unread,
            "SIOCOUTQ" => Self::Unacknowledged,
            "SIOCOUTQNSD" => Self::Unsent,
            "SIOCATMARK" => Self::AtMark,
            _ => return None,
        })
    }
}

/// Constants in assertions with Linux's values: TCP states, congestion states, bits of `tcpi_options`, and
/// values of `tcpi_fastopen_client_fail`.
pub const INFO_CONSTANTS: &[(&str, i64)] = &[
    ("ESTABLISHED", 1),
    ("SYN_SENT", 2),
    ("SYN_RECV", 3),
    ("FIN_WAIT1", 4),
    ("FIN_WAIT2", 5),
    ("TIME_WAIT", 6),
    ("CLOSE", 7),
    ("CLOSE_WAIT", 8),
    ("LAST_ACK", 9),
    ("LISTEN", 10),
    ("CLOSING", 11),
    ("TCP_CA_Open", 0),
    ("TCP_CA_Disorder", 1),
    ("TCP_CA_CWR", 2),
    ("TCP_CA_Recovery", 3),
    ("TCP_CA_Loss", 4),
    ("TCPI_OPT_TIMESTAMPS", 1),
    ("TCPI_OPT_SACK", 2),
    ("TCPI_OPT_WSCALE", 4),
    ("TCPI_OPT_ECN", 8),
    ("TCPI_OPT_SYN_DATA", 32),
    ("TFO_COOKIE_UNAVAILABLE", 1),
    ("TFO_DATA_NOT_ACKED", 2),
    ("TFO_SYN_RETRANSMITTED", 3),
];
