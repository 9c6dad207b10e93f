//! All options that Linux 6.18 has for TCP sockets, those that are UDP's own, and how each is treated here.
//! `docs/posix.md` contains the table, and a test compares each row with the kernel.

use crate::sockaddr::Family;
use core::ffi::c_int;
use core::ops::RangeInclusive;
use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, IPPROTO_UDP, SOL_SOCKET};
use rustix::io::Errno;

/// An option.
#[derive(Clone, Copy, Debug)]
pub struct OptionRow {
    /// `SOL_SOCKET` or `IPPROTO_…`.
    pub level: c_int,
    /// The option's number on its level.
    pub name: c_int,
    /// The option's name in Linux.
    pub linux_name: &'static str,
    /// How the option is treated.
    pub kind: OptionKind,
    /// How it differs from Linux; empty if it does not.
    pub note: &'static str,
}

/// How an option is treated.
#[derive(Clone, Copy, Debug)]
pub enum OptionKind {
    /// `options.rs` has code for the option.
    Dedicated,
    /// The option is an integer that is stored.
    Int {
        /// How `setsockopt` parses the value.
        format: IntFormat,
        /// Which values are accepted.
        accepts: AcceptedValues,
        /// The default.
        default: c_int,
    },
    /// The option has a fixed value, or cannot be read; setting it has no effect or fails.
    Fixed {
        /// How `setsockopt` parses the value before it returns `set`.
        format: IntFormat,
        /// The result of `getsockopt`.
        get: Result<c_int, Errno>,
        /// The result of `setsockopt`.
        set: Result<(), Errno>,
    },
    /// Both calls fail with `ENOPROTOOPT`.
    Refused,
}

/// How the bytes of an integer are parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntFormat {
    /// Four bytes; fewer are `EINVAL`.
    Int,
    /// Four bytes; of fewer the first one, or 0 if there is none (`do_ip_setsockopt`).
    IntOrByteOrNone,
    /// Four bytes; of fewer the first one; none is `EINVAL`.
    IntOrByte,
    /// Four bytes; fewer are 0 (`do_ipv6_setsockopt`).
    IntOrZero,
    /// The bytes are not looked at.
    Ignored,
}

/// Which values an integer option accepts.
#[derive(Clone, Debug, Copy, PartialEq, Eq)]
pub enum AcceptedValues {
    /// Any value, stored as 0 or 1.
    Flag,
    /// A flag that cannot be cleared.
    OneWayFlag,
    /// Any value.
    Any,
    /// Values from the first to the second.
    Within(c_int, c_int),
    /// Values from the first to the second, and -1 for the default.
    OrDefault(c_int, c_int),
    /// As `OrDefault`, with the ECN bits cleared, which TCP sets itself; -1 is 0.
    TosClass(c_int, c_int),
    /// Values that are not negative; larger ones become this one.
    ClampedTo(c_int),
    /// Values from this one on, and 0 for none.
    ZeroOr(c_int),
    /// Only 0, which changes nothing; other values are this error.
    Zero(Errno),
}

impl IntFormat {
    /// Parses an integer.
    ///
    /// # Errors
    /// `EINVAL`.
    pub fn read(self, value: &[u8]) -> Result<c_int, Errno> {
        let four = value.get(..4).map(|b| c_int::from_ne_bytes(b.try_into().expect("four bytes")));
        match (self, four, value.first()) {
            (Self::Ignored, ..) => Ok(0),
            (_, Some(number), _) => Ok(number),
            (Self::Int, None, _) | (Self::IntOrByte, None, None) => Err(Errno::INVAL),
            (Self::IntOrByteOrNone | Self::IntOrByte, None, Some(byte)) => Ok((*byte).into()),
            (Self::IntOrByteOrNone, None, None) | (Self::IntOrZero, None, _) => Ok(0),
        }
    }
}

impl AcceptedValues {
    /// Returns what the option becomes when it is set to `value`.
    ///
    /// # Errors
    /// The kernel's error for a value that it does not accept.
    pub fn apply(self, value: c_int, old: c_int, default: c_int) -> Result<c_int, Errno> {
        let within =
            |range: RangeInclusive<c_int>| if range.contains(&value) { Ok(value) } else { Err(Errno::INVAL) };
        match self {
            Self::Flag => Ok((value != 0).into()),
            Self::OneWayFlag if value == 0 && old != 0 => Err(Errno::PERM),
            Self::OneWayFlag => Ok((value != 0).into()),
            Self::Any => Ok(value),
            Self::Within(min, max) => within(min..=max),
            Self::OrDefault(..) if value == -1 => Ok(default),
            Self::OrDefault(min, max) => within(min..=max),
            Self::TosClass(..) if value == -1 => Ok(0),
            Self::TosClass(min, max) => Ok(within(min..=max)? & 0xfc),
            Self::ClampedTo(max) => Ok(within(0..=c_int::MAX)?.min(max)),
            Self::ZeroOr(_) if value == 0 => Ok(0),
            Self::ZeroOr(min) => within(min..=c_int::MAX),
            Self::Zero(_) if value == 0 => Ok(old),
            Self::Zero(error) => Err(error),
        }
    }
}

const fn row(
    level: c_int,
    name: c_int,
    linux_name: &'static str,
    kind: OptionKind,
    note: &'static str,
) -> OptionRow {
    OptionRow { level, name, linux_name, kind, note }
}

const fn dedicated(level: c_int, name: c_int, linux_name: &'static str) -> OptionRow {
    row(level, name, linux_name, OptionKind::Dedicated, "")
}

const fn dedicated_with_note(
    level: c_int,
    name: c_int,
    linux_name: &'static str,
    note: &'static str,
) -> OptionRow {
    row(level, name, linux_name, OptionKind::Dedicated, note)
}

const fn number(
    level: c_int,
    name: c_int,
    linux_name: &'static str,
    format: IntFormat,
    accepts: AcceptedValues,
    default: c_int,
) -> OptionRow {
    row(level, name, linux_name, OptionKind::Int { format, accepts, default }, "")
}

/// Returns the row of an option that is stored and has no effect.
const fn ignored(
    level: c_int,
    name: c_int,
    linux_name: &'static str,
    kind: (IntFormat, AcceptedValues, c_int),
    note: &'static str,
) -> OptionRow {
    let (format, accepts, default) = kind;
    row(level, name, linux_name, OptionKind::Int { format, accepts, default }, note)
}

const fn fixed(
    level: c_int,
    name: c_int,
    linux_name: &'static str,
    format: IntFormat,
    get: Result<c_int, Errno>,
    set: Errno,
) -> OptionRow {
    row(level, name, linux_name, OptionKind::Fixed { format, get, set: Err(set) }, "")
}

/// Returns the row of a socket option for which every value is accepted and ignored.
const fn accepted(name: c_int, linux_name: &'static str, get: Result<c_int, Errno>) -> OptionRow {
    row(SOL, name, linux_name, OptionKind::Fixed { format: IntFormat::Int, get, set: Ok(()) }, "")
}

const fn refused(level: c_int, name: c_int, linux_name: &'static str, note: &'static str) -> OptionRow {
    row(level, name, linux_name, OptionKind::Refused, note)
}

const UNKNOWN_OPTION: Errno = Errno::NOPROTOOPT;
const NO_EXTENSION_HEADERS: &str =
    "empty; setting a header fails with `ENOPROTOOPT`: the stack sends no extension headers for programs";
const FLAG: (IntFormat, AcceptedValues, c_int) = (IntFormat::Int, AcceptedValues::Flag, 0);
const IP_FLAG: (IntFormat, AcceptedValues, c_int) = (IntFormat::IntOrByteOrNone, AcceptedValues::Flag, 0);
const NO_EFFECT_ON_TCP: &str = "";
const NO_EBPF: &str = "the stack runs no eBPF programs";
const NOT_WITH_COOKIES: &str = "not on SYN+ACKs with SYN cookies";
const NOT_WITH_COOKIES_V6: &str = "not on SYN+ACKs with SYN cookies or of dual-stack listeners";
const TICKS: &str = "in steps of 4 ms, as with `CONFIG_HZ=250`";
const KERNELS_ADDRESSES: &str = "an address that the stack does not have is bound on the kernel's network";
const NOT_YET: &str = "not implemented";
const KERNELS_TABLES: &str = "stored without effect: it selects routing tables of the kernel";
const SOL: c_int = SOL_SOCKET;
const IP: c_int = IPPROTO_IP;
const V6: c_int = IPPROTO_IPV6;
const TCP: c_int = IPPROTO_TCP;
const UDP: c_int = IPPROTO_UDP;

/// All options, by level and number.
pub const OPTIONS: &[OptionRow] = &[
    ignored(SOL, 1, "SO_DEBUG", FLAG, NO_EFFECT_ON_TCP),
    dedicated(SOL, 2, "SO_REUSEADDR"),
    dedicated(SOL, 3, "SO_TYPE"),
    dedicated(SOL, 4, "SO_ERROR"),
    ignored(SOL, 5, "SO_DONTROUTE", FLAG, "stored without effect: routers are used nevertheless"),
    dedicated(SOL, 6, "SO_BROADCAST"),
    dedicated_with_note(SOL, 7, "SO_SNDBUF", "at most 4 MiB, Linux's default of `net.core.wmem_max`"),
    dedicated_with_note(SOL, 8, "SO_RCVBUF", "at most 4 MiB, Linux's default of `net.core.rmem_max`"),
    dedicated(SOL, 9, "SO_KEEPALIVE"),
    dedicated(SOL, 10, "SO_OOBINLINE"),
    ignored(SOL, 11, "SO_NO_CHECK", FLAG, NO_EFFECT_ON_TCP),
    dedicated_with_note(
        SOL,
        12,
        "SO_PRIORITY",
        "orders the sending of connections, and between stacks over memif the processing of frames, by IEEE \
         802.1Q (1 lowest, then 0, 7 highest); larger values count as 7; not on SYN+ACKs with SYN cookies",
    ),
    dedicated(SOL, 13, "SO_LINGER"),
    accepted(14, "SO_BSDCOMPAT", Ok(0)),
    dedicated(SOL, 15, "SO_REUSEPORT"),
    fixed(SOL, 16, "SO_PASSCRED", IntFormat::Int, Err(Errno::OPNOTSUPP), Errno::OPNOTSUPP),
    dedicated(SOL, 17, "SO_PEERCRED"),
    dedicated_with_note(
        SOL,
        18,
        "SO_RCVLOWAT",
        "at most half of `SO_RCVBUF`, and at most what the channel holds",
    ),
    fixed(SOL, 19, "SO_SNDLOWAT", IntFormat::Int, Ok(1), UNKNOWN_OPTION),
    dedicated(SOL, 20, "SO_RCVTIMEO"),
    dedicated(SOL, 21, "SO_SNDTIMEO"),
    dedicated_with_note(
        SOL,
        25,
        "SO_BINDTODEVICE",
        "a kernel device makes the socket a kernel socket; links of the stack are no devices (`ENODEV`)",
    ),
    dedicated_with_note(
        SOL,
        26,
        "SO_ATTACH_FILTER",
        "Takes classic BPF. \
         The programs of all sockets of one user share `channel.filter_bytes_max` bytes on each shard. A socket takes its share with `bind`, `connect` or `listen`, or with this option after one of them; that call fails with `ENOMEM` if the bytes do not suffice. \
         The programs of one user may execute 262,144 steps in one turn of a shard. Packets for these programs are then dropped until the next turn. \
         A program may visit 4,096 attributes of a packet (`SKF_AD_NLATTR`); one that visits more drops the packet. \
         `SKF_AD_MARK`, `SKF_AD_QUEUE` and `SKF_AD_RXHASH` are 0, and `SKF_AD_CPU` is the CPU of the shard. \
         `SKF_AD_IFINDEX` is 1 for the loopback interface, and 2^30 or more for a link of the stack. \
         At `SKF_LL_OFF` a datagram has no addresses, and a frame with a VLAN tag still has the tag. \
         A segment that arrived in fragments has no IP options, and its type of service, identification, checksum and reserved bits are 0.",
    ),
    dedicated(SOL, 27, "SO_DETACH_FILTER"),
    dedicated(SOL, 28, "SO_PEERNAME"),
    dedicated_with_note(
        SOL,
        29,
        "SO_TIMESTAMP",
        "in microseconds; bytes of a stream that arrived before `accept` have the time of `accept`",
    ),
    dedicated(SOL, 30, "SO_ACCEPTCONN"),
    fixed(SOL, 31, "SO_PEERSEC", IntFormat::Int, Err(UNKNOWN_OPTION), UNKNOWN_OPTION),
    dedicated_with_note(SOL, 32, "SO_SNDBUFFORCE", "at most 1 GiB"),
    dedicated_with_note(SOL, 33, "SO_RCVBUFFORCE", "at most 1 GiB"),
    fixed(SOL, 34, "SO_PASSSEC", IntFormat::Int, Err(Errno::OPNOTSUPP), Errno::OPNOTSUPP),
    dedicated_with_note(
        SOL,
        35,
        "SO_TIMESTAMPNS",
        "in microseconds; bytes of a stream that arrived before `accept` have the time of `accept`",
    ),
    ignored(SOL, 36, "SO_MARK", (IntFormat::Int, AcceptedValues::Any, 0), KERNELS_TABLES),
    dedicated_with_note(
        SOL,
        37,
        "SO_TIMESTAMPING",
        "as `SO_TIMESTAMP`; software timestamps of what is received and sent",
    ),
    dedicated(SOL, 38, "SO_PROTOCOL"),
    dedicated(SOL, 39, "SO_DOMAIN"),
    ignored(SOL, 40, "SO_RXQ_OVFL", FLAG, NO_EFFECT_ON_TCP),
    ignored(SOL, 41, "SO_WIFI_STATUS", FLAG, NO_EFFECT_ON_TCP),
    number(SOL, 42, "SO_PEEK_OFF", IntFormat::Int, AcceptedValues::Any, -1),
    ignored(SOL, 43, "SO_NOFCS", FLAG, NO_EFFECT_ON_TCP),
    row(
        SOL,
        44,
        "SO_LOCK_FILTER",
        OptionKind::Int { format: IntFormat::Int, accepts: AcceptedValues::OneWayFlag, default: 0 },
        "binds programs that use the library; the stack does not know of the lock",
    ),
    ignored(SOL, 45, "SO_SELECT_ERR_QUEUE", FLAG, NO_EFFECT_ON_TCP),
    ignored(
        SOL,
        46,
        "SO_BUSY_POLL",
        (IntFormat::Int, AcceptedValues::Within(0, c_int::MAX), 0),
        "stored without effect: the stack's counterpart is `ginnel run --spin-us`",
    ),
    dedicated_with_note(
        SOL,
        47,
        "SO_MAX_PACING_RATE",
        "paces TCP with a granularity of 65.5 µs and the turn of the shard, and a paced connection keeps about 2 KiB while it is idle; ten segments are not paced if the option is set after an idle time and little was sent before; UDP is not paced, as in Linux without \
         the `fq` queueing discipline",
    ),
    fixed(SOL, 48, "SO_BPF_EXTENSIONS", IntFormat::Int, Ok(64), UNKNOWN_OPTION),
    ignored(
        SOL,
        49,
        "SO_INCOMING_CPU",
        (IntFormat::Int, AcceptedValues::Any, -1),
        "stored without effect: each shard runs on one core",
    ),
    refused(SOL, 50, "SO_ATTACH_BPF", NO_EBPF),
    dedicated_with_note(
        SOL,
        51,
        "SO_ATTACH_REUSEPORT_CBPF",
        "the program selects among the UDP sockets of one shard, and its CPU is that of the shard",
    ),
    refused(SOL, 52, "SO_ATTACH_REUSEPORT_EBPF", NO_EBPF),
    accepted(53, "SO_CNX_ADVICE", Err(UNKNOWN_OPTION)),
    dedicated_with_note(
        SOL,
        55,
        "SO_MEMINFO",
        "buffer sizes as in `SO_RCVBUF` and `SO_SNDBUF`; allocated memory is 0",
    ),
    fixed(SOL, 56, "SO_INCOMING_NAPI_ID", IntFormat::Int, Ok(0), UNKNOWN_OPTION),
    dedicated_with_note(SOL, 57, "SO_COOKIE", "unique in the process"),
    fixed(SOL, 59, "SO_PEERGROUPS", IntFormat::Int, Err(Errno::NODATA), UNKNOWN_OPTION),
    row(
        SOL,
        60,
        "SO_ZEROCOPY",
        OptionKind::Int { format: IntFormat::Int, accepts: AcceptedValues::Within(0, 1), default: 0 },
        "sent data are copied, and `MSG_ZEROCOPY` is completed at once, which says so, as over Linux's loopback; each process that shares a socket has its own completions",
    ),
    dedicated_with_note(
        SOL,
        61,
        "SO_TXTIME",
        "datagrams that have a time behave as with Linux's queueing disciplines: with `CLOCK_MONOTONIC` as with `fq` (one whose time has passed is sent at once, one that is more than 10 s ahead is dropped), with other clocks as with `etf` (one whose time has passed is dropped, and reported with `SO_EE_CODE_TXTIME_INVALID_PARAM`; `SO_EE_CODE_TXTIME_MISSED` does not occur, since a held datagram is sent even if the shard is late). \
         All leave in the order of their times. A socket holds at most as many bytes as its buffer of the channel has (`channel.socket_buffer_bytes`); a datagram that is longer than that is sent at once. TCP ignores the times, as in Linux.",
    ),
    dedicated_with_note(SOL, 62, "SO_BINDTOIFINDEX", "as `SO_BINDTODEVICE`"),
    dedicated_with_note(
        SOL,
        63,
        "SO_TIMESTAMP_NEW",
        "in microseconds; bytes of a stream that arrived before `accept` have the time of `accept`",
    ),
    dedicated_with_note(
        SOL,
        64,
        "SO_TIMESTAMPNS_NEW",
        "in microseconds; bytes of a stream that arrived before `accept` have the time of `accept`",
    ),
    dedicated_with_note(
        SOL,
        65,
        "SO_TIMESTAMPING_NEW",
        "as `SO_TIMESTAMP`; software timestamps of what is received and sent",
    ),
    dedicated(SOL, 66, "SO_RCVTIMEO_NEW"),
    dedicated(SOL, 67, "SO_SNDTIMEO_NEW"),
    dedicated(SOL, 68, "SO_DETACH_REUSEPORT_BPF"),
    ignored(SOL, 69, "SO_PREFER_BUSY_POLL", FLAG, NO_EFFECT_ON_TCP),
    dedicated(SOL, 70, "SO_BUSY_POLL_BUDGET"),
    dedicated_with_note(SOL, 71, "SO_NETNS_COOKIE", "of the calling thread's network namespace"),
    dedicated_with_note(SOL, 72, "SO_BUF_LOCK", "on a connection a fixed size keeps its value"),
    refused(SOL, 73, "SO_RESERVE_MEM", "the configuration reserves the stack's memory"),
    ignored(
        SOL,
        74,
        "SO_TXREHASH",
        (IntFormat::Int, AcceptedValues::OrDefault(0, 1), 1),
        "stored without effect: flows have no hash that a router sees",
    ),
    ignored(SOL, 75, "SO_RCVMARK", FLAG, NO_EFFECT_ON_TCP),
    fixed(SOL, 76, "SO_PASSPIDFD", IntFormat::Int, Err(Errno::OPNOTSUPP), Errno::OPNOTSUPP),
    fixed(SOL, 77, "SO_PEERPIDFD", IntFormat::Int, Err(Errno::NODATA), UNKNOWN_OPTION),
    refused(SOL, 80, "SO_DEVMEM_DONTNEED", "there is no device memory"),
    ignored(SOL, 82, "SO_RCVPRIORITY", FLAG, NO_EFFECT_ON_TCP),
    fixed(SOL, 83, "SO_PASSRIGHTS", IntFormat::Int, Err(Errno::OPNOTSUPP), Errno::OPNOTSUPP),
    dedicated_with_note(IP, 1, "IP_TOS", NOT_WITH_COOKIES),
    dedicated_with_note(IP, 2, "IP_TTL", NOT_WITH_COOKIES),
    fixed(IP, 3, "IP_HDRINCL", IntFormat::Ignored, Ok(0), UNKNOWN_OPTION),
    refused(IP, 4, "IP_OPTIONS", "the stack sends no IP options"),
    fixed(IP, 5, "IP_ROUTER_ALERT", IntFormat::Ignored, Ok(0), Errno::INVAL),
    ignored(IP, 6, "IP_RECVOPTS", IP_FLAG, NO_EFFECT_ON_TCP),
    ignored(IP, 7, "IP_RETOPTS", IP_FLAG, NO_EFFECT_ON_TCP),
    ignored(IP, 8, "IP_PKTINFO", IP_FLAG, NO_EFFECT_ON_TCP),
    refused(IP, 9, "IP_PKTOPTIONS", NOT_YET),
    number(IP, 10, "IP_MTU_DISCOVER", IntFormat::IntOrByteOrNone, AcceptedValues::Within(0, 5), 1),
    ignored(IP, 11, "IP_RECVERR", IP_FLAG, "without effect on TCP: soft errors stay soft"),
    ignored(IP, 12, "IP_RECVTTL", IP_FLAG, NO_EFFECT_ON_TCP),
    ignored(IP, 13, "IP_RECVTOS", IP_FLAG, NO_EFFECT_ON_TCP),
    dedicated(IP, 14, "IP_MTU"),
    ignored(IP, 15, "IP_FREEBIND", (IntFormat::IntOrByte, AcceptedValues::Flag, 0), KERNELS_ADDRESSES),
    refused(IP, 16, "IP_IPSEC_POLICY", "the stack has no IPsec"),
    refused(IP, 17, "IP_XFRM_POLICY", "the stack has no IPsec"),
    ignored(IP, 18, "IP_PASSSEC", IP_FLAG, NO_EFFECT_ON_TCP),
    refused(IP, 19, "IP_TRANSPARENT", "only addresses of the stack can be bound"),
    ignored(IP, 20, "IP_RECVORIGDSTADDR", IP_FLAG, NO_EFFECT_ON_TCP),
    dedicated(IP, 21, "IP_MINTTL"),
    fixed(IP, 22, "IP_NODEFRAG", IntFormat::Ignored, Ok(0), UNKNOWN_OPTION),
    ignored(IP, 23, "IP_CHECKSUM", IP_FLAG, NO_EFFECT_ON_TCP),
    ignored(
        IP,
        24,
        "IP_BIND_ADDRESS_NO_PORT",
        IP_FLAG,
        "`bind` of a UDP socket to a group chooses a port nevertheless",
    ),
    fixed(IP, 25, "IP_RECVFRAGSIZE", IntFormat::Ignored, Ok(0), Errno::INVAL),
    ignored(
        IP,
        26,
        "IP_RECVERR_RFC4884",
        (IntFormat::IntOrByteOrNone, AcceptedValues::Within(0, 1), 0),
        "evaluated when an error is read",
    ),
    fixed(IP, 32, "IP_MULTICAST_IF", IntFormat::Ignored, Ok(0), Errno::INVAL),
    fixed(IP, 33, "IP_MULTICAST_TTL", IntFormat::Ignored, Ok(1), Errno::INVAL),
    ignored(IP, 34, "IP_MULTICAST_LOOP", (IntFormat::IntOrByte, AcceptedValues::Flag, 1), NO_EFFECT_ON_TCP),
    fixed(IP, 35, "IP_ADD_MEMBERSHIP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::PROTO),
    fixed(IP, 36, "IP_DROP_MEMBERSHIP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::PROTO),
    fixed(IP, 37, "IP_UNBLOCK_SOURCE", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(IP, 38, "IP_BLOCK_SOURCE", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(IP, 39, "IP_ADD_SOURCE_MEMBERSHIP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(IP, 40, "IP_DROP_SOURCE_MEMBERSHIP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(IP, 41, "IP_MSFILTER", IntFormat::Ignored, Err(Errno::INVAL), Errno::INVAL),
    fixed(IP, 42, "MCAST_JOIN_GROUP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(IP, 43, "MCAST_BLOCK_SOURCE", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(IP, 44, "MCAST_UNBLOCK_SOURCE", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(IP, 45, "MCAST_LEAVE_GROUP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(IP, 46, "MCAST_JOIN_SOURCE_GROUP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(IP, 47, "MCAST_LEAVE_SOURCE_GROUP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(IP, 48, "MCAST_MSFILTER", IntFormat::Ignored, Err(Errno::INVAL), Errno::INVAL),
    number(IP, 49, "IP_MULTICAST_ALL", IntFormat::IntOrByte, AcceptedValues::Within(0, 1), 1),
    refused(IP, 50, "IP_UNICAST_IF", "the route determines the link"),
    dedicated_with_note(
        IP,
        51,
        "IP_LOCAL_PORT_RANGE",
        "`tcp.local_port_first` … and `network.udp_port_first` … of the configuration stand for the sysctl",
    ),
    dedicated(IP, 52, "IP_PROTOCOL"),
    refused(IP, 64, "IPT_SO_SET_REPLACE", "the stack has no netfilter"),
    refused(IP, 65, "IPT_SO_SET_ADD_COUNTERS", "the stack has no netfilter"),
    refused(IP, 66, "IPT_SO_GET_REVISION_MATCH", "the stack has no netfilter"),
    refused(IP, 67, "IPT_SO_GET_REVISION_TARGET", "the stack has no netfilter"),
    fixed(IP, 80, "SO_ORIGINAL_DST", IntFormat::Ignored, Err(Errno::NOENT), UNKNOWN_OPTION),
    dedicated(V6, 1, "IPV6_ADDRFORM"),
    ignored(V6, 2, "IPV6_2292PKTINFO", FLAG, NO_EFFECT_ON_TCP),
    ignored(V6, 3, "IPV6_2292HOPOPTS", FLAG, NO_EFFECT_ON_TCP),
    ignored(V6, 4, "IPV6_2292DSTOPTS", FLAG, NO_EFFECT_ON_TCP),
    ignored(V6, 5, "IPV6_2292RTHDR", FLAG, NO_EFFECT_ON_TCP),
    refused(V6, 6, "IPV6_2292PKTOPTIONS", NOT_YET),
    ignored(V6, 8, "IPV6_2292HOPLIMIT", FLAG, NO_EFFECT_ON_TCP),
    ignored(V6, 11, "IPV6_FLOWINFO", FLAG, NO_EFFECT_ON_TCP),
    dedicated_with_note(V6, 16, "IPV6_UNICAST_HOPS", NOT_WITH_COOKIES_V6),
    fixed(V6, 17, "IPV6_MULTICAST_IF", IntFormat::Ignored, Ok(0), UNKNOWN_OPTION),
    fixed(V6, 18, "IPV6_MULTICAST_HOPS", IntFormat::Ignored, Ok(1), UNKNOWN_OPTION),
    ignored(
        V6,
        19,
        "IPV6_MULTICAST_LOOP",
        (IntFormat::Int, AcceptedValues::Within(0, 1), 1),
        NO_EFFECT_ON_TCP,
    ),
    fixed(V6, 20, "IPV6_ADD_MEMBERSHIP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(V6, 21, "IPV6_DROP_MEMBERSHIP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(V6, 22, "IPV6_ROUTER_ALERT", IntFormat::Int, Ok(0), UNKNOWN_OPTION),
    ignored(
        V6,
        23,
        "IPV6_MTU_DISCOVER",
        (IntFormat::Int, AcceptedValues::Within(0, 5), 1),
        "without effect on TCP: `tcp.mtu_probing` and ICMP determine the path MTU",
    ),
    ignored(
        V6,
        24,
        "IPV6_MTU",
        (IntFormat::Int, AcceptedValues::ZeroOr(1280), 0),
        "setting it has no effect: fragments have the size of the path MTU",
    ),
    ignored(V6, 25, "IPV6_RECVERR", FLAG, "without effect on TCP: soft errors stay soft"),
    dedicated(V6, 26, "IPV6_V6ONLY"),
    fixed(V6, 27, "IPV6_JOIN_ANYCAST", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(V6, 28, "IPV6_LEAVE_ANYCAST", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    ignored(V6, 29, "IPV6_MULTICAST_ALL", (IntFormat::Int, AcceptedValues::Flag, 1), NO_EFFECT_ON_TCP),
    ignored(V6, 30, "IPV6_ROUTER_ALERT_ISOLATE", FLAG, NO_EFFECT_ON_TCP),
    ignored(
        V6,
        31,
        "IPV6_RECVERR_RFC4884",
        (IntFormat::Int, AcceptedValues::Within(0, 1), 0),
        "evaluated when an error is read",
    ),
    dedicated_with_note(
        V6,
        32,
        "IPV6_FLOWLABEL_MGR",
        "the kernel reserves the labels, for the program's network namespace; a program that the process executes, and one that gets the socket by `SCM_RIGHTS`, has none of them; `IPV6_FL_F_REMOTE` returns 0",
    ),
    number(V6, 33, "IPV6_FLOWINFO_SEND", IntFormat::Int, AcceptedValues::Flag, 0),
    refused(V6, 34, "IPV6_IPSEC_POLICY", "the stack has no IPsec"),
    refused(V6, 35, "IPV6_XFRM_POLICY", "the stack has no IPsec"),
    fixed(V6, 42, "MCAST_JOIN_GROUP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(V6, 43, "MCAST_BLOCK_SOURCE", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(V6, 44, "MCAST_UNBLOCK_SOURCE", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(V6, 45, "MCAST_LEAVE_GROUP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(V6, 46, "MCAST_JOIN_SOURCE_GROUP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    fixed(V6, 47, "MCAST_LEAVE_SOURCE_GROUP", IntFormat::Ignored, Err(UNKNOWN_OPTION), Errno::INVAL),
    refused(V6, 48, "MCAST_MSFILTER", "TCP has no multicast groups"),
    ignored(V6, 49, "IPV6_RECVPKTINFO", FLAG, NO_EFFECT_ON_TCP),
    dedicated_with_note(V6, 50, "IPV6_PKTINFO", "stored without effect: the route determines the link"),
    ignored(V6, 51, "IPV6_RECVHOPLIMIT", FLAG, NO_EFFECT_ON_TCP),
    ignored(V6, 53, "IPV6_RECVHOPOPTS", FLAG, NO_EFFECT_ON_TCP),
    dedicated_with_note(V6, 54, "IPV6_HOPOPTS", NO_EXTENSION_HEADERS),
    dedicated_with_note(V6, 55, "IPV6_RTHDRDSTOPTS", NO_EXTENSION_HEADERS),
    ignored(V6, 56, "IPV6_RECVRTHDR", FLAG, NO_EFFECT_ON_TCP),
    dedicated_with_note(V6, 57, "IPV6_RTHDR", NO_EXTENSION_HEADERS),
    ignored(V6, 58, "IPV6_RECVDSTOPTS", FLAG, NO_EFFECT_ON_TCP),
    dedicated_with_note(V6, 59, "IPV6_DSTOPTS", NO_EXTENSION_HEADERS),
    ignored(V6, 60, "IPV6_RECVPATHMTU", FLAG, NO_EFFECT_ON_TCP),
    dedicated(V6, 61, "IPV6_PATHMTU"),
    ignored(V6, 62, "IPV6_DONTFRAG", (IntFormat::IntOrZero, AcceptedValues::Flag, 0), NO_EFFECT_ON_TCP),
    refused(V6, 64, "IP6T_SO_SET_REPLACE", "the stack has no netfilter"),
    refused(V6, 65, "IP6T_SO_SET_ADD_COUNTERS", "the stack has no netfilter"),
    ignored(V6, 66, "IPV6_RECVTCLASS", FLAG, NO_EFFECT_ON_TCP),
    dedicated_with_note(V6, 67, "IPV6_TCLASS", NOT_WITH_COOKIES_V6),
    refused(V6, 68, "IP6T_SO_GET_REVISION_MATCH", "the stack has no netfilter"),
    refused(V6, 69, "IP6T_SO_GET_REVISION_TARGET", "the stack has no netfilter"),
    row(
        V6,
        70,
        "IPV6_AUTOFLOWLABEL",
        OptionKind::Int { format: IntFormat::IntOrZero, accepts: AcceptedValues::Flag, default: 1 },
        "on by default, whatever `net.ipv6.auto_flowlabels` says; labels stay the same after retransmissions",
    ),
    dedicated_with_note(
        V6,
        72,
        "IPV6_ADDR_PREFERENCES",
        "stored without effect: the stack has no temporary, care-of or generated addresses to choose from",
    ),
    dedicated(V6, 73, "IPV6_MINHOPCOUNT"),
    ignored(V6, 74, "IPV6_ORIGDSTADDR", FLAG, NO_EFFECT_ON_TCP),
    refused(V6, 75, "IPV6_TRANSPARENT", "only addresses of the stack can be bound"),
    refused(V6, 76, "IPV6_UNICAST_IF", "the route determines the link"),
    ignored(V6, 77, "IPV6_RECVFRAGSIZE", (IntFormat::IntOrZero, AcceptedValues::Flag, 0), NO_EFFECT_ON_TCP),
    ignored(V6, 78, "IPV6_FREEBIND", FLAG, KERNELS_ADDRESSES),
    fixed(V6, 80, "IP6T_SO_ORIGINAL_DST", IntFormat::Ignored, Err(Errno::NOENT), UNKNOWN_OPTION),
    dedicated(TCP, 1, "TCP_NODELAY"),
    dedicated(TCP, 2, "TCP_MAXSEG"),
    dedicated(TCP, 3, "TCP_CORK"),
    dedicated(TCP, 4, "TCP_KEEPIDLE"),
    dedicated(TCP, 5, "TCP_KEEPINTVL"),
    dedicated(TCP, 6, "TCP_KEEPCNT"),
    dedicated(TCP, 7, "TCP_SYNCNT"),
    dedicated(TCP, 8, "TCP_LINGER2"),
    dedicated(TCP, 9, "TCP_DEFER_ACCEPT"),
    dedicated_with_note(
        TCP,
        10,
        "TCP_WINDOW_CLAMP",
        "at least 2,048 bytes; an advertised window is not shrunk",
    ),
    dedicated_with_note(
        TCP,
        11,
        "TCP_INFO",
        "fields that the stack does not maintain are 0; it samples `tcpi_delivery_rate` of connections that are \
         paced",
    ),
    dedicated_with_note(TCP, 12, "TCP_QUICKACK", "reads back as it was set"),
    dedicated_with_note(
        TCP,
        13,
        "TCP_CONGESTION",
        "`cubic`, `reno` and `bbr` (version 1), which need no privilege; the stack's configuration has the default",
    ),
    refused(TCP, 14, "TCP_MD5SIG", "segments are not signed"),
    ignored(
        TCP,
        16,
        "TCP_THIN_LINEAR_TIMEOUTS",
        (IntFormat::Int, AcceptedValues::Within(0, 1), 0),
        "stored without effect",
    ),
    number(TCP, 17, "TCP_THIN_DUPACK", IntFormat::Int, AcceptedValues::Within(0, 1), 0)
        .with_note("without effect, as in Linux, where it reads back as 0"),
    dedicated(TCP, 18, "TCP_USER_TIMEOUT"),
    refused(TCP, 19, "TCP_REPAIR", NOT_YET),
    refused(TCP, 20, "TCP_REPAIR_QUEUE", NOT_YET),
    refused(TCP, 21, "TCP_QUEUE_SEQ", NOT_YET),
    refused(TCP, 22, "TCP_REPAIR_OPTIONS", NOT_YET),
    number(TCP, 23, "TCP_FASTOPEN", IntFormat::Int, AcceptedValues::ClampedTo(4096), 0),
    refused(TCP, 24, "TCP_TIMESTAMP", NOT_YET),
    number(TCP, 25, "TCP_NOTSENT_LOWAT", IntFormat::Int, AcceptedValues::Any, 0),
    dedicated_with_note(TCP, 26, "TCP_CC_INFO", "of `bbr`; empty for `cubic` and `reno`, as in Linux"),
    dedicated(TCP, 27, "TCP_SAVE_SYN"),
    dedicated_with_note(
        TCP,
        28,
        "TCP_SAVED_SYN",
        "empty for a SYN that arrived in fragments, or with more than 256 bytes of headers, or waited for a listener (`channel.killed_listener_wait_ms`)",
    ),
    refused(TCP, 29, "TCP_REPAIR_WINDOW", NOT_YET),
    number(TCP, 30, "TCP_FASTOPEN_CONNECT", IntFormat::Int, AcceptedValues::Within(0, 1), 0),
    dedicated_with_note(TCP, 31, "TCP_ULP", "as in Linux without modules for it"),
    refused(TCP, 32, "TCP_MD5SIG_EXT", "segments are not signed"),
    dedicated_with_note(TCP, 33, "TCP_FASTOPEN_KEY", "empty unless the socket has keys of its own"),
    number(TCP, 34, "TCP_FASTOPEN_NO_COOKIE", IntFormat::Int, AcceptedValues::Within(0, 1), 0),
    refused(TCP, 35, "TCP_ZEROCOPY_RECEIVE", "received data is copied, as programs do without the option"),
    dedicated(TCP, 36, "TCP_INQ"),
    refused(TCP, 37, "TCP_TX_DELAY", NOT_YET),
    fixed(TCP, 43, "TCP_IS_MPTCP", IntFormat::Int, Ok(0), UNKNOWN_OPTION),
    dedicated_with_note(TCP, 44, "TCP_RTO_MAX_MS", TICKS),
    dedicated_with_note(TCP, 45, "TCP_RTO_MIN_US", TICKS),
    dedicated_with_note(TCP, 46, "TCP_DELACK_MAX_US", TICKS),
    number(UDP, 1, "UDP_CORK", IntFormat::Int, AcceptedValues::Flag, 0),
    fixed(UDP, 10, "UDPLITE_SEND_CSCOV", IntFormat::Int, Ok(0), UNKNOWN_OPTION),
    fixed(UDP, 11, "UDPLITE_RECV_CSCOV", IntFormat::Int, Ok(0), UNKNOWN_OPTION),
    refused(UDP, 100, "UDP_ENCAP", "the stack has no IPsec"),
    ignored(UDP, 101, "UDP_NO_CHECK6_TX", FLAG, "stored without effect: datagrams always have checksums"),
    ignored(
        UDP,
        102,
        "UDP_NO_CHECK6_RX",
        FLAG,
        "stored without effect: datagrams over IPv6 must have checksums",
    ),
    number(UDP, 103, "UDP_SEGMENT", IntFormat::Int, AcceptedValues::Within(0, 65_535), 0),
    number(UDP, 104, "UDP_GRO", IntFormat::Int, AcceptedValues::Flag, 0),
];

impl OptionRow {
    /// Returns the row with a note on how it differs from Linux.
    const fn with_note(self, note: &'static str) -> Self {
        Self { note, ..self }
    }
}

/// Returns the row of an option, if sockets of this family have it.
pub fn find(family: Family, level: c_int, name: c_int) -> Option<&'static OptionRow> {
    OPTIONS.iter().find(|row| row.level == level && row.name == name && (family == Family::V6 || level != V6))
}
